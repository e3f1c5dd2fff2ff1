"""Paged attention in C++ against the formula in float64, and what it must never do."""

import itertools
import math
import subprocess

import pytest
import torch

from minillm.cache.paged import PagedCache, PagedStep
from minillm.errors import ParamsError
from minillm.kernels import cpp, paged_decode_cpu
from minillm.kernels.paged_decode_cpu import paged_decode
from minillm.llm import LLM
from minillm.model.attention import LayerInfo
from minillm.model.weights import load_model

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    cpp.why_not(torch.float32, CPU) is not None, reason=str(cpp.why_not(torch.float32, CPU))
)


def scene(heads=6, kv_heads=2, dim=64, block_size=4, lengths=(1, 4, 5, 23), dtype=torch.float32, seed=0):
    """A pool whose unused slots are NaN, and shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for length in lengths]
    ids = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(1, *blocks), dtype=torch.long)
    keys, values = (torch.full((len(ids), block_size, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2))
    for row, (count, length) in enumerate(zip(blocks, lengths)):
        own = [ids.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(own, dtype=torch.long)
        slots = torch.tensor([own[i // block_size] * block_size + i % block_size for i in range(length)]).long()
        for stored in (keys, values):
            stored.flatten(0, 1)[slots] = torch.randn(length, kv_heads, dim, generator=generator).to(dtype)
    q = torch.randn(len(lengths), heads, dim, generator=generator).to(dtype)
    return q, keys, values, tables, torch.arange(len(lengths)), torch.tensor(lengths)


def formula(q, keys, values, tables, requests, lengths, *, scale, window=None, softcap=None):
    out = torch.zeros(q.shape, dtype=torch.float64)
    size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist())):
        for head in range(q.shape[1]):
            places = range(max(0, length - window) if window else 0, length)
            slots = [int(tables[request, p // size]) * size + p % size for p in places]
            if slots:
                k, v = (x.flatten(0, 1)[slots, head // group].double() for x in (keys, values))  # [length, dim]
                scores = k @ q[row, head].double() * scale
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[row, head] = torch.softmax(scores, 0) @ v
    return out


@needs_compiler
@pytest.mark.parametrize(
    ("dim", "heads", "size"), [*itertools.product((16, 20, 32, 64, 128), ((1, 1), (6, 2), (8, 1)), (1, 4, 16))]
)
def test_equals_the_formula(dim, heads, size):
    tensors = scene(*heads, dim, size, (1, 16, 17, 40), seed=dim)
    got = paged_decode(*tensors, scale=dim**-0.5)
    torch.testing.assert_close(got.double(), formula(*tensors, scale=dim**-0.5), rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("window", (None, 1, 3, 100))
@pytest.mark.parametrize("softcap", (None, 2.0))
def test_window_and_softcap(window, softcap):
    tensors = scene(lengths=(1, 3, 4, 30))
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    torch.testing.assert_close(
        paged_decode(*tensors, **options).double(), formula(*tensors, **options), rtol=1e-5, atol=1e-6
    )


@needs_compiler
def test_bfloat16_is_computed_in_float32_and_rounded_once():
    tensors = scene(dtype=torch.bfloat16)
    got = paged_decode(*tensors, scale=0.125)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, formula(*tensors, scale=0.125).bfloat16(), rtol=2**-7, atol=1e-6)


@needs_compiler
def test_large_scores_and_rows_of_one_request():
    """Scores of some hundreds need the running maximum; two rows of one table see different lengths of it."""
    q, keys, values, tables, _, _ = scene(lengths=(23, 7))
    q, requests, lengths = q[[0, 0, 1]] * 100, torch.tensor([0, 0, 1]), torch.tensor([22, 23, 7])
    got = paged_decode(q, keys, values, tables, requests, lengths, scale=1.0)
    wanted = formula(q, keys, values, tables, requests, lengths, scale=1.0)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-3)  # a score of 1 000 is rounded by 6e-5


@needs_compiler
def test_a_row_of_length_0_is_zeros_and_the_threads_change_nothing():
    tensors = scene(lengths=(5, 0, 33, 12))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = paged_decode(*tensors, scale=0.125)
        torch.set_num_threads(3)
        three = paged_decode(*tensors, scale=0.125)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, three) and not one[1].any()


@needs_compiler
def test_inputs_with_gaps_are_read_right():
    q, keys, values, tables, requests, lengths = scene()
    wide = torch.zeros(*q.shape[:2], 128)
    wide[..., ::2] = q
    tables = torch.stack((tables, tables), -1)[..., 0]
    got = paged_decode(wide[..., ::2], keys, values, tables, requests, lengths, scale=0.125)
    assert torch.equal(got, paged_decode(q, keys, values, tables.contiguous(), requests, lengths, scale=0.125))


@needs_compiler
@pytest.mark.parametrize(
    ("place", "change", "match"),
    [
        (1, lambda x: x.double(), "keys.dtype=torch.float64"),
        (2, lambda x: x.bfloat16(), "values.dtype"),
        (1, lambda x: x[..., :32], "keys.shape"),
        (2, lambda x: x[:, ::2], "values.shape"),
        (0, lambda x: x[:, :5], "multiple of kv_heads=2"),
        (3, lambda x: x.int(), "tables.dtype=torch.int32"),
        (3, lambda x: x + 100, "tables=1"),
        (3, lambda x: x - 100, "tables=-"),
        (0, lambda x: x[0], "q.shape"),
        (2, lambda x: x.to("meta"), "values.device"),
        (5, lambda x: x.to("meta"), "lengths.device"),
        (3, lambda x: x[0], "tables.shape"),
        (4, lambda x: x[:3], "requests.shape"),
        (5, lambda x: x[:3], "lengths.shape"),
        (5, lambda x: x[:, None], "lengths.shape"),
        (4, lambda x: x + 1, "requests=4"),
        (5, lambda x: x + 2, "lengths=25"),
        (5, lambda x: x - 2, "lengths=-1"),
    ],
)
def test_what_would_read_strange_memory_is_refused(place, change, match, monkeypatch):
    tensors = list(scene())
    tensors[place] = change(tensors[place])
    monkeypatch.setattr(paged_decode_cpu, "library", None)  # a call would be a TypeError
    with pytest.raises(ParamsError, match=match):
        paged_decode(*tensors, scale=0.125)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ParamsError, match="window=0"):
        paged_decode(*scene(), scale=0.125, window=0)


@needs_compiler
def test_padding_behind_decodes_gets_zeros_and_changes_nothing():
    """All requests decode, but the step has more rows than tokens: the short way for "all rows" must not be taken."""
    config = load_model("tiny").config
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    layer = LayerInfo(0, dim**-0.5)
    generator = torch.Generator().manual_seed(0)
    q, *kv = (torch.randn(5, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    stored = torch.randn(4, 4, kv_heads, dim, generator=generator)
    got = []
    for padding in (0, 3):
        cache = PagedCache(config, 5, 4, attention="cpp")
        cache.k.fill_(math.nan)
        cache.v.fill_(math.nan)
        cache.k[0, :4], cache.v[0, :4] = stored, stored.flip(0)
        slots, positions = torch.tensor([6, 9] + [-1] * padding), torch.tensor([6, 1] + [0] * padding)
        cache.begin(PagedStep(slots, torch.tensor([[0, 1], [2, 4]]), [1, 1], [7, 2], positions))
        got.append(cache.attend(layer, *(x[: 2 + padding] for x in (q, *kv))))
    plain, padded = got  # [2, heads, dim], [5, heads, dim]
    assert torch.equal(padded[:2], plain) and plain.isfinite().all() and plain.all()
    assert torch.equal(padded[2:], torch.zeros(3, heads, dim))


def test_without_a_compiler_the_reason_is_given(monkeypatch):
    cpp.library.cache_clear()
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    assert "needs a C++ compiler" in cpp.why_not(torch.float32, CPU)
    config = load_model("tiny").config
    with pytest.raises(ParamsError, match=r"attention='cpp'.*C\+\+ compiler"):
        PagedCache(config, 4, 16, attention="cpp")
    assert "float16" in cpp.why_not(torch.float16, CPU)
    assert "cuda" in cpp.why_not(torch.float32, torch.device("cuda"))
    llm = LLM("tiny", compile=True)  # goes on without
    assert llm.engine.runner.cache.attention == "sdpa"


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    cpp.library.cache_clear()
    answer = subprocess.CompletedProcess((), 1, b"version", "no such flag\nmore")
    monkeypatch.setattr(cpp.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(cpp.subprocess, "run", lambda *args, **kwargs: answer)
    assert "no such flag" in cpp.why_not(torch.float32, CPU)
    assert not list((tmp_path / "kernels").iterdir())


@needs_compiler
def test_it_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    for _ in range(2):
        cpp.library.cache_clear()
        assert cpp.why_not(torch.float32, CPU) is None
        (made,) = (tmp_path / "kernels").iterdir()
        before = made.stat().st_mtime_ns
    assert made.stat().st_mtime_ns == before
    cpp.library.cache_clear()


@needs_compiler
def test_compile_takes_it_by_default_and_an_explicit_choice_stays():
    assert LLM("tiny", compile=True).engine.runner.cache.attention == "cpp"
    assert LLM("tiny", compile=True, attention="sdpa").engine.runner.cache.attention == "sdpa"
    assert LLM("tiny").engine.runner.cache.attention == "sdpa"
    with pytest.raises(ParamsError, match=r'kv_cache_dtype.*attention="cpp"'):
        LLM("tiny", attention="cpp", kv_cache_dtype="int8")
