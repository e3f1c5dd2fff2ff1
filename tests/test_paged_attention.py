"""Attention from paged blocks: any mix of decodes and chunks, any tables, equal to float64 and to the gather."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache import paged_kernel
from minillm.cache.block_pool import BlockTable
from minillm.cache.paged import PagedCache, PagedStep
from minillm.cache.paged_kernel import attend_tables, choose_attention
from minillm.engine.options import EngineOptions
from minillm.errors import ParamsError
from minillm.kernels import decoding_reference as reference
from minillm.kernels.launch import why_not
from minillm.model.attention import LayerInfo
from tests.test_paged_cache import Packed, alone, close, make_model

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Scene:
    """Requests of (queries, length), their K and V in shuffled blocks, NaN wherever nobody wrote."""

    def __init__(self, work, block_size, kv_heads, group, dim, dtype, seed, shared=0):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        counts = [-(-length // block_size) for _, length in work]
        blocks = list(range(sum(counts) + 3))
        rng.shuffle(blocks)
        tables, spare = [], iter(blocks)
        for i, count in enumerate(counts):
            table = [next(spare) for _ in range(count)]
            if i and shared:  # whole blocks of the first request, as a prefix cache gives them
                same = max(0, min(shared, count - 1, len(tables[0])))
                table[:same] = tables[0][:same]
            tables.append(table)
        width = max(1, *counts)
        self.tables = torch.tensor([table + [0] * (width - len(table)) for table in tables], device=DEVICE)
        shape = (len(blocks), block_size, kv_heads, dim)
        self.k, self.v = (torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for _ in range(2))
        written = torch.zeros(len(blocks) * block_size, dtype=torch.bool)
        self.slots = []
        for table, (_, length) in zip(tables, work):
            place = torch.arange(length)
            blocks_of = torch.tensor(table, dtype=torch.long)
            self.slots.append(blocks_of[place // block_size] * block_size + place % block_size)
            written[self.slots[-1]] = True
        for store in (self.k, self.v):
            store.flatten(0, 1)[~written.to(DEVICE)] = math.nan
        starts = [0]
        for count, _ in work:
            starts.append(starts[-1] + count)
        self.work, self.starts = work, torch.tensor(starts, device=DEVICE)
        self.lengths = torch.tensor([length for _, length in work], device=DEVICE)
        self.q = torch.randn(starts[-1], kv_heads * group, dim, generator=generator).to(dtype).to(DEVICE)
        self.sizes = {"max_query": max(c for c, _ in work), "max_length": max(n for _, n in work)}

    def attend(self, scale, **options):
        from minillm.kernels.paged_attention import paged_attention

        tensors = (self.q, self.k, self.v, self.tables, self.starts, self.lengths)
        return paged_attention(*tensors, scale=scale, **self.sizes, **options)

    def rows(self):
        """(rows of q, q, k, v, mask inputs) a request, on the CPU."""
        start = 0
        for (count, length), slots in zip(self.work, self.slots):
            k, v = (x.flatten(0, 1).cpu()[slots] for x in (self.k, self.v))  # [length, kv_heads, dim]
            yield slice(start, start + count), self.q[start : start + count].cpu(), k, v, length
            start += count

    def exact(self, scale, window=None, softcap=None):
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for rows, q, k, v, length in self.rows():
            if length:
                scores, mask = self.scores(q.double(), k.double(), scale, window, softcap)
                weights = scores.masked_fill(~mask, -math.inf).softmax(-1)  # [heads, count, length]
                out[rows] = (weights @ repeat(v.double(), q.shape[1])).transpose(0, 1)
        return out

    @staticmethod
    def scores(q, k, scale, window, softcap):
        count, length = len(q), len(k)
        scores = q.transpose(0, 1) @ repeat(k, q.shape[1]).transpose(1, 2) * scale  # [heads, count, length]
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        place = torch.arange(length - count, length)[:, None]
        mask = torch.arange(length) <= place
        return scores, mask if window is None else mask & (torch.arange(length) > place - window)

    def torch_error(self, scale, window, expected):
        worst = 0.0
        for rows, q, k, v, length in self.rows():
            if length and len(q):
                _, mask = self.scores(q.float(), k.float(), scale, window, None)
                q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
                worst = max(worst, (out[0].transpose(0, 1).double() - expected[rows]).abs().max().item())
        return worst


def repeat(x, heads):
    """[length, kv_heads, dim] -> [heads, length, dim]."""
    return x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)


@st.composite
def works(draw, most=600):
    """One to four requests: a decode, a chunk, a whole prompt, or an empty row that pads a captured batch."""
    rows = []
    for kind in draw(
        st.lists(st.sampled_from(["decode", "decode", "chunk", "prompt", "empty"]), min_size=1, max_size=4)
    ):
        length = draw(st.one_of(st.integers(1, most), st.sampled_from([1, 63, 64, 65])))
        small = min(length, draw(st.integers(1, 20)))
        rows.append(
            {"decode": (1, length), "chunk": (small, length), "prompt": (small, small), "empty": (1, 0)}[kind]
        )
    return rows


@settings(max_examples=24, deadline=None, derandomize=True)
@given(
    work=works(),
    block_size=st.one_of(st.integers(1, 256), st.sampled_from([1, 16, 256])),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 4]),
    dim=st.sampled_from([16, 64, 80, 96]),
    dtype=st.sampled_from(DTYPES),
    splits=st.sampled_from([1, 1, 2, 5]),
    window=st.sampled_from([None, None, 1, 65, 200]),
    softcap=st.sampled_from([None, None, 3.0]),
    shared=st.integers(0, 3),
    seed=st.integers(0, 999),
)
def test_any_step_against_float64(
    work, block_size, kv_heads, group, dim, dtype, splits, window, softcap, shared, seed
):
    scene, scale = Scene(work, block_size, kv_heads, group, dim, dtype, seed, shared), dim**-0.5
    out = scene.attend(scale, window=window, softcap=softcap, splits=splits)
    expected = scene.exact(scale, window, softcap)
    limit = 2 * torch.finfo(dtype).eps
    if softcap is None:
        limit += 2 * scene.torch_error(scale, window, expected)
    else:  # a score is rounded at up to the cap, and moves its weight by as much
        limit += 2 * softcap * torch.finfo(dtype).eps
    assert out.dtype == dtype and (out.double().cpu() - expected).abs().max() <= limit
    for rows, _, _, _, length in scene.rows():
        assert length or not out[rows].any()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    work=works(300),
    block_size=st.integers(1, 256),
    splits=st.integers(1, 9),
    window=st.sampled_from([None, 1, 65]),
    softcap=st.sampled_from([None, 3.0]),
    rows=st.sampled_from([1, 5, 16, 64]),
    shared=st.integers(0, 3),
)
def test_the_torch_twin_against_float64(work, block_size, splits, window, softcap, rows, shared):
    scene = Scene(work, block_size, 2, 3, 8, torch.float32, splits, shared)
    tensors = (x.cpu() for x in (scene.q, scene.k, scene.v, scene.tables, scene.starts, scene.lengths))
    out = reference.paged_attention(*tensors, scale=0.3, window=window, softcap=softcap, splits=splits, rows=rows)
    assert (out.double() - scene.exact(0.3, window, softcap)).abs().max() < 3e-6


@pytest.mark.parametrize("group", [5, 71])
def test_any_group_of_query_heads_fits_the_tile(group):
    """71 query heads on one KV head is Falcon-7B: more rows than a tile of 64 has."""
    scene = Scene([(3, 40), (1, 9)], 4, 1, group, 16, torch.float32, group)
    assert (scene.attend(0.25, splits=1).double().cpu() - scene.exact(0.25)).abs().max() < 2e-6


def test_offsets_are_64_bits():
    """The third block lies 2^31 numbers behind the first, and tables hold int32: block x stride does not fit 32 bits.
    The pool is 4 GB of addresses, of which a few pages are ever touched."""
    from minillm.kernels.paged_attention import paged_attention

    stride = 2**30
    store = torch.empty(2 * stride + 4 * 16, dtype=torch.bfloat16, device=DEVICE)
    k = v = store.as_strided((3, 4, 1, 16), (stride, 16, 16, 1))  # [blocks, block_size, kv_heads, dim]
    near, far = torch.randn(2, 4, 1, 16).bfloat16().to(DEVICE)
    k[0], k[2] = near, far
    q = torch.randn(1, 1, 16).bfloat16().to(DEVICE)
    tables, starts, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[2, 0]], [0, 1], [7]))
    out = paged_attention(q, k, v, tables, starts, lengths, scale=1.0, max_query=1, max_length=7)
    keys = torch.cat((far, near))[:7, 0].double().cpu()
    expected = (q[0].double().cpu() @ keys.T).softmax(-1) @ keys
    assert (out[0].double().cpu() - expected).abs().max() < 0.03


def test_storing_writes_the_mapped_slots_and_no_other():
    from minillm.kernels.paged_attention import store_kv

    caches = [torch.full((5, 3, 2, 16), 7.5, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16)]
    qkv = torch.randn(4, 8, 16, device=DEVICE)
    k, v = qkv[:, 4:6], qkv[:, 6:]  # cut out of wider rows
    slots = torch.tensor([14, -1, 0, 7], device=DEVICE)
    store_kv(k, v, *caches, slots)
    for cache, new in zip(caches, (k, v)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[slots[slots >= 0]], new[slots >= 0].to(cache.dtype))
        rest = [slot for slot in range(15) if slot not in slots.tolist()]
        assert (flat[rest] == 7.5).all()
    store_kv(k[:0], v[:0], *caches, slots[:0])


@pytest.mark.parametrize("seed", range(3))
def test_the_cache_equals_each_request_alone(seed):
    """Through the decoder: prompts in pieces, decodes, padding, copy-on-write; blocks in no order."""
    rng, size, splits = random.Random(seed), (1, 3, 16)[seed], (1, 2, 1)[seed]
    windows, softcap = ((), (None, 3), (5, None))[seed], (None, None, 2.0)[seed]
    model = make_model(seed, torch.float32, windows=windows, attention_softcap=softcap, num_kv_heads=(1, 2, 2)[seed])
    run = Packed(copy.deepcopy(model).to(DEVICE), 30 if size < 16 else 6, size, rng)
    run.cache = PagedCache(model.config, run.pool.num_blocks, size, torch.float32, DEVICE, attention="triton")
    run.cache.k.fill_(math.nan)
    run.cache.v.fill_(math.nan)
    run.cache._kernels.splits = splits
    prompt, twin_end = [rng.randrange(61) for _ in range(10)], [5, 9]
    first, second = BlockTable(size), BlockTable(size)
    with torch.device(DEVICE):  # where the step's tensors are made
        got = [run.step([(first, prompt[:7])], padding=seed)[0], run.step([(first, prompt[7:])])[0]]
        twin = first.fork(run.pool)
        out = run.step([(second, [1, 2, 3]), (first, [4]), (twin, [5])], padding=2)
        (last,) = run.step([(twin, twin_end[1:])])
    close(torch.cat([*got, out[1]]).cpu(), alone(model, [*prompt, 4]))
    close(out[0].cpu(), alone(model, [1, 2, 3]))
    close(torch.cat([out[2], last]).cpu(), alone(model, prompt + twin_end)[10:])


def test_padding_gets_zeros_and_a_broken_request_poisons_nobody():
    cache = PagedCache(make_model().config, 4, 4, device=DEVICE, attention="triton")
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    with torch.device(DEVICE):
        slots, tables = torch.tensor([4, 1, -1, -1]), torch.tensor([[1, 0], [0, 0]])
        cache.begin(PagedStep(slots, tables, [1, 1], [1, 2], torch.zeros(4)))
        q, kv = torch.randn(4, 4, 8), torch.randn(4, 2, 8)
    out = cache.attend(make_model().layers[0].attn.layer, q, kv, kv)
    assert not out[2:].any() and torch.isfinite(out[0]).all()
    assert out[1].isnan().all()  # its first token was never written: that must be seen, not hidden


def test_a_captured_step_reads_what_the_tensors_say_now():
    """One set of launches, from shapes alone: other lengths and tables in the same tensors give their own result."""
    layer, scenes = (
        LayerInfo(0, 0.25),
        [Scene([(1, n) for n in ns], 8, 2, 2, 16, torch.float32, 3) for ns in ([70, 9], [5, 66])],
    )
    room = torch.zeros(3, 12, dtype=torch.int64, device=DEVICE)  # columns of one buffer, as a graph's inputs are
    lengths, tables = room[:, 0], room[:, 2:]
    for scene in scenes:
        room.zero_()
        lengths[:2], tables[:2, : scene.tables.shape[1]] = scene.lengths, scene.tables
        q = torch.cat((scene.q, scene.q[:1]))  # the third row is padding: length 0
        out = attend_tables(layer, q, scene.k, scene.v, tables, lengths)
        assert (out[:2].double().cpu() - scene.exact(0.25)).abs().max() < 2e-6 and not out[2].any()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a.update(block_tables=torch.tensor([[0, 9]])), "block_tables=9"),
        (lambda a: a.update(block_tables=torch.tensor([[-1, 0]])), "block_tables=-1"),
        (lambda a: a.update(block_tables=torch.tensor([[0]])), "max_length"),
        (lambda a: a.update(block_tables=torch.tensor([0, 1])), "block_tables.shape"),
        (lambda a: a.update(kv_lengths=torch.tensor([8])), "kv_lengths=8"),
        (lambda a: a.update(kv_lengths=torch.tensor([1])), "this step's queries"),
        (lambda a: a.update(kv_lengths=torch.tensor([5.0])), "kv_lengths.dtype"),
        (lambda a: a.update(query_starts=torch.tensor([0, 1])), "query_starts"),
        (lambda a: a.update(query_starts=torch.tensor([1, 2])), "query_starts"),
        (lambda a: a.update(max_query=1), "max_query=1"),
        (lambda a: a.update(max_query=-1), "max_query=-1"),
        (lambda a: a.update(v=torch.zeros(3, 4, 1, 8)), "v.shape"),
        (lambda a: a.update(q=torch.zeros(2, 3, 16)), "multiple"),
        (lambda a: a.update(window=0), "window"),
        (lambda a: a.update(splits=1000), "splits"),
    ],
)
@pytest.mark.skipif(DEVICE == "cuda", reason="contents are looked at on a CPU only")
def test_bad_arguments_raise_before_a_launch(change, match, monkeypatch):
    from minillm.kernels import paged_attention as module

    arguments = {
        "q": torch.zeros(2, 2, 16),
        "k": torch.zeros(3, 4, 2, 16),
        "v": torch.zeros(3, 4, 2, 16),
        "block_tables": torch.tensor([[0, 2]]),
        "query_starts": torch.tensor([0, 2]),
        "kv_lengths": torch.tensor([7]),
        "scale": 1.0,
        "max_query": 2,
        "max_length": 7,
    }
    change(arguments)
    monkeypatch.setattr(module, "paged_kernel", None)  # a launch would be a TypeError
    with pytest.raises(ParamsError, match=match):
        module.paged_attention(**arguments)


@pytest.mark.skipif(DEVICE == "cuda", reason="contents are looked at on a CPU only")
def test_a_slot_outside_the_cache_raises(monkeypatch):
    from minillm.kernels import paged_attention as module

    monkeypatch.setattr(module, "store_kernel", None)
    cache, new = torch.zeros(2, 4, 1, 16), torch.zeros(1, 1, 16)
    for slot in (8, -2):
        with pytest.raises(ParamsError, match=f"slots={slot}"):
            module.store_kv(new, new, cache, cache, torch.tensor([slot]))
    with pytest.raises(ParamsError, match="contiguous"):
        module.store_kv(new, new, cache[:, ::2], cache[:, ::2], torch.tensor([0]))


def test_choosing_by_device_and_by_name(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_attention("auto", cpu, torch.float32) == "sdpa"
    monkeypatch.setattr(paged_kernel, "why_not", lambda: None)
    assert choose_attention("auto", gpu, torch.bfloat16) == "triton"
    assert choose_attention("auto", gpu, torch.float64) == "sdpa"
    monkeypatch.setattr(paged_kernel, "why_not", lambda: "Triton is not installed")
    assert choose_attention("auto", gpu, torch.bfloat16) == "sdpa"
    for name in ("naive", "sdpa"):
        assert choose_attention(name, cpu, torch.float64) == name
    with pytest.raises(ParamsError, match="float64"):
        PagedCache(make_model().config, 2, 4, torch.float64, attention="triton")
    with pytest.raises(ParamsError, match="attention='flash'"):
        EngineOptions(attention="flash")
    with pytest.raises(ParamsError, match="attention"):
        PagedCache(make_model().config, 2, 4, attention=None)


def test_naive_attends_as_sdpa_does():
    model = make_model(windows=(None, 3))
    for attention in ("naive", "sdpa"):
        run, table, other = Packed(model, 8, 4, random.Random(0)), BlockTable(4), BlockTable(4)
        run.cache = PagedCache(model.config, 8, 4, model.dtype, attention=attention)
        run.step([(table, [1, 2, 3, 4, 5])])
        logits, others = run.step([(table, [6]), (other, [7, 8])])
        close(logits, alone(model, [1, 2, 3, 4, 5, 6])[5:])
        close(others, alone(model, [7, 8]))


def test_a_block_id_is_checked_while_it_is_a_list():
    from minillm.engine.engine import Engine
    from minillm.model.sampling import SamplingParams

    engine = Engine(make_model(dtype=torch.float32), EngineOptions(num_blocks=8), eos_ids=())
    engine.add([1, 2, 3], SamplingParams(max_tokens=3))
    engine.step()
    batch = engine.scheduler.schedule()
    next(iter(batch.entries)).table.blocks[0] = 8
    with pytest.raises(ParamsError, match="block table=8"):
        engine.runner.run(batch)


def test_a_row_that_sees_nothing_in_its_first_tile():
    """Six queries, a window of 2 over a tile border: the first tile of the last rows is all -inf, and not NaN."""
    scene = Scene([(6, 67)], 8, 1, 1, 16, torch.float32, 5)
    assert (scene.attend(0.25, window=2, splits=1).double().cpu() - scene.exact(0.25, 2)).abs().max() < 2e-6
