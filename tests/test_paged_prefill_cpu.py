"""Paged attention of prompts in C++ against the formula in float64: chunks, windows, and what it must never do."""

import itertools
import math

import pytest
import torch
from test_paged_decode_cpu import formula, scene

from minillm.cache.paged_plan import PagedStep, Rows, Stretches, plan
from minillm.errors import ParamsError
from minillm.kernels import cpp, paged_prefill_cpu
from minillm.kernels.paged_decode_cpu import paged_store
from minillm.kernels.paged_prefill_cpu import paged_prefill
from minillm.llm import LLM
from minillm.model.sampling import SamplingParams

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    cpp.why_not(torch.float32, CPU) is not None, reason=str(cpp.why_not(torch.float32, CPU))
)


def prompts(lengths, before, *, seed=0, **shape):
    """(q, keys, values, tables, stretches): a stretch a request, behind tokens that are stored already."""
    ends = [length + early for length, early in zip(lengths, before)]
    _, keys, values, tables, _, _ = scene(lengths=ends, seed=seed, **shape)
    starts = [0, *itertools.accumulate(lengths)]
    stretches = torch.tensor([[*row] for row in zip(starts, lengths, range(len(lengths)), before)])
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(starts[-1], shape.get("heads", 6), keys.shape[3], generator=generator).to(keys.dtype)
    return q, keys, values, tables, stretches


def attended(q, keys, values, tables, stretches, **options):
    out = torch.full(q.shape, math.nan)
    paged_prefill(q, keys, values, tables, stretches, out, **options)
    return out


def expected(q, keys, values, tables, stretches, **options):
    """Token by token."""
    requests = [request for _, rows, request, _ in stretches.tolist() for _ in range(rows)]
    lengths = [before + i + 1 for _, rows, _, before in stretches.tolist() for i in range(rows)]
    return formula(q, keys, values, tables, torch.tensor(requests), torch.tensor(lengths), **options)


@pytest.mark.parametrize(
    ("dim", "heads", "size"), [*itertools.product((16, 20, 64, 80), ((1, 1), (6, 2), (8, 1)), (1, 4, 16))]
)
def test_equals_the_formula(dim, heads, size):
    """Lengths around a group of 96 keys; some behind a cached prefix."""
    heads, kv_heads = heads
    tensors = prompts((1, 40, 97), (0, 60, 3), heads=heads, kv_heads=kv_heads, dim=dim, block_size=size)
    got = attended(*tensors, scale=dim**-0.5)
    # Float32 against float64 over at most 100 keys; outputs are about 1.
    torch.testing.assert_close(got.double(), expected(*tensors, scale=dim**-0.5), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", (None, 1, 3, 95, 96, 97, 1000))
@pytest.mark.parametrize("softcap", (None, 2.0))
def test_window_and_softcap(window, softcap):
    tensors = prompts((5, 130), (120, 0))
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    torch.testing.assert_close(
        attended(*tensors, **options).double(), expected(*tensors, **options), rtol=1e-5, atol=2e-6
    )


def test_bfloat16_is_computed_in_float32():
    tensors = prompts((33,), (7,), dtype=torch.bfloat16)
    wanted = expected(*tensors, scale=0.125)
    torch.testing.assert_close(attended(*tensors, scale=0.125).double(), wanted, rtol=1e-5, atol=2e-6)


def test_a_row_has_the_same_bits_in_any_chunk_beside_any_rows_and_with_any_threads():
    q, keys, values, tables, stretches = prompts((200, 50), (0, 11))
    options = {"scale": 0.2, "window": 70}
    whole, threads = attended(q, keys, values, tables, stretches, **options), torch.get_num_threads()
    cuts = [(0, 1, 0, 0), (1, 96, 0, 1), (97, 103, 0, 97), (200, 49, 1, 11), (249, 1, 1, 60)]
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(attended(q, keys, values, tables, torch.tensor(cuts), **options), whole)
    finally:
        torch.set_num_threads(threads)


def test_rows_of_no_stretch_are_left_alone_and_nan_stays_with_its_request():
    """`scene` fills every slot that no request owns with NaN, so reading one would show."""
    q, keys, values, tables, stretches = prompts((4, 30), (0, 0))
    clean = attended(q, keys, values, tables, stretches, scale=0.2)
    keys.flatten(0, 1)[int(tables[0, 0]) * keys.shape[1]] = math.nan
    got = attended(q, keys, values, tables, stretches, scale=0.2)
    assert got[:4].isnan().all() and torch.equal(got[4:], clean[4:])
    alone = attended(q, keys, values, tables, stretches[1:], scale=0.2)
    assert alone[:4].isnan().all() and torch.equal(alone[4:], clean[4:])  # the NaN that `attended` put there


def test_inputs_with_gaps():
    q, keys, values, tables, stretches = prompts((9, 5), (0, 2))
    wide = torch.cat((q, q), dim=1)[:, : q.shape[1]]  # a view, as q is of qkv
    assert not wide.is_contiguous()
    assert torch.equal(
        attended(wide, keys, values, tables, stretches, scale=1.0),
        attended(q, keys, values, tables, stretches, scale=1.0),
    )


@pytest.mark.parametrize(
    ("place", "change", "match"),
    [
        (0, lambda q: q[0], "q.shape"),
        (0, lambda q: q[:, :5], "heads must be a multiple"),
        (0, lambda q: q[..., :-1], "keys.shape"),
        (1, lambda keys: keys.double(), "keys.dtype"),
        (2, lambda values: values[:-1], "values.shape"),
        (3, lambda tables: tables + 1000, "tables"),
        (3, lambda tables: tables.int(), "tables.dtype"),
        (4, lambda s: s[:, :3], "stretches"),
        (4, lambda s: s.int(), "stretches"),
        (4, lambda s: s + torch.tensor([1, 0, 0, 0]), "rows"),
        (4, lambda s: s - torch.tensor([1, 0, 0, 0]), "rows"),
        (4, lambda s: s + torch.tensor([0, 0, 1, 0]), "request"),
        (4, lambda s: s + torch.tensor([0, 0, 0, 1000]), "tokens"),
        (4, lambda s: s - torch.tensor([0, 0, 0, 1]), "tokens"),
        (4, lambda s: s * torch.tensor([0, -1, 1, 1]), "rows"),
    ],
)
def test_what_would_read_strange_memory_is_refused(place, change, match, monkeypatch):
    tensors = [*prompts((9, 5), (0, 2))]
    tensors[place] = change(tensors[place])
    monkeypatch.setattr(paged_prefill_cpu, "library", None)  # a call would be a TypeError
    with pytest.raises(ParamsError, match=match):
        attended(*tensors, scale=1.0)


def test_an_output_that_is_another_s_is_refused(monkeypatch):
    q, *rest = prompts((9, 5), (0, 2))
    monkeypatch.setattr(paged_prefill_cpu, "library", None)
    for out in (torch.empty(3, 6, 64), torch.empty(q.shape, dtype=torch.bfloat16), torch.empty(14, 6, 128)[..., ::2]):
        with pytest.raises(ParamsError, match="out"):
            paged_prefill(q, *rest, out, scale=1.0)


@pytest.mark.parametrize("dtype", cpp.DTYPES)
def test_store_writes_its_slots_and_no_other(dtype):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 3 * 2, 8, generator=generator)
    k, v = qkv[:, 2:4], qkv[:, 4:]  # views with gaps
    keys, values = torch.zeros(3, 4, 2, 8, dtype=dtype), torch.zeros(3, 4, 2, 8, dtype=dtype)
    slots = torch.tensor([7, -1, 0, 11, 5])
    paged_store(k, v, keys, values, slots)
    for stored, new in ((keys, k), (values, v)):
        wanted = torch.zeros(12, 2, 8, dtype=dtype)
        wanted[[7, 0, 11, 5]] = new[[0, 2, 3, 4]].to(dtype)
        assert torch.equal(stored.flatten(0, 1), wanted)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a | {"slots": torch.tensor([0, 12])}, "slots"),
        (lambda a: a | {"slots": torch.tensor([-2, 0])}, "slots"),
        (lambda a: a | {"slots": torch.tensor([1])}, "slots"),
        (lambda a: a | {"slots": torch.tensor([0, 1], dtype=torch.int32)}, "slots.dtype"),
        (lambda a: a | {"v": torch.zeros(2, 1, 8)}, "v"),
        (lambda a: a | {"k": torch.zeros(2, 2, 9)}, "k"),
        (lambda a: a | {"keys": torch.zeros(3, 4, 2, 16)[..., ::2]}, "keys.shape"),
        (lambda a: a | {"values": torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16)}, "values.dtype"),
    ],
)
def test_store_refuses_what_would_write_strange_memory(change, match):
    k, v = torch.zeros(2, 2, 8), torch.zeros(2, 2, 8)
    pool = {"keys": torch.zeros(3, 4, 2, 8), "values": torch.zeros(3, 4, 2, 8)}
    with pytest.raises(ParamsError, match=match):
        paged_store(**change({"k": k, "v": v, "slots": torch.tensor([0, 1]), **pool}))


def test_the_engine_takes_it_for_prompts_and_their_chunks():
    ids = [list(range(5, 5 + n)) for n in (3, 40, 17, 90)]
    params = SamplingParams(max_tokens=16, temperature=0)
    wanted = [out.token_ids for out in LLM("tiny", attention="sdpa").generate(ids, params)]
    for chunk in (16, 64, 2048):
        llm = LLM("tiny", attention="cpp", max_num_seqs=8, max_num_batched_tokens=chunk)
        assert [out.token_ids for out in llm.generate(ids, params)] == wanted


def test_what_is_no_tree_is_planned_in_place():
    """Decodes and short drafts row by row; prompts, whole or not, in stretches."""
    new, ends = [1, 3, 2, 40, 9], [8, 20, 2, 40, 30]  # a decode, a draft, a short prompt, a whole one, a chunk
    step = PagedStep(torch.arange(55), torch.zeros(5, 3, dtype=torch.long), new, ends, torch.zeros(55))
    rows, stretches = plan(step, None, torch.empty(55, 4, 8), 2, 16, in_place=True)
    assert isinstance(rows, Rows) and rows.lengths.tolist() == [8, 18, 19, 20]
    assert isinstance(stretches, Stretches)
    assert stretches.table.tolist() == [[4, 2, 2, 0], [6, 40, 3, 0], [46, 9, 4, 21]]
