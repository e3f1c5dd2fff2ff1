"""FlashDecoding: every split count gives attention, merging is exact, and the kernels compile for absent GPUs too."""

import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import ParamsError
from minillm.kernels import decoding_reference as reference
from minillm.kernels.launch import why_not
from minillm.kernels.splits import MOST_SPLITS, TILE, Grid, choose_splits

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def floor(dtype):
    """Below this, the rounding of a result of size 1 to its own type: nobody can be held to less."""
    return 2 * torch.finfo(dtype).eps


def exact(q, k, v, lengths, scale, window=None, softcap=None):
    """float64, row by row: (out, log-sum-exp). q [batch, heads, dim], k and v [batch, kv_heads, length, dim]."""
    batch, heads, dim = q.shape
    group = heads // k.shape[1]
    out, lse = torch.zeros(batch, heads, dim, dtype=torch.float64), torch.full((batch, heads), -math.inf).double()
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        for head in range(heads if length else 0):
            keys, values = (x[row, head // group, first:length].double().cpu() for x in (k, v))
            scores = keys @ q[row, head].double().cpu() * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out[row, head], lse[row, head] = scores.softmax(0) @ values, scores.logsumexp(0)
    return out, lse


def torch_error(q, k, v, lengths, scale, window, expected):
    """Largest error of torch's own attention in the same type, where it has the option."""
    worst = 0.0
    for row, length in enumerate(lengths):
        if length:
            keys = slice(0 if window is None else max(0, length - window), length)
            out = F.scaled_dot_product_attention(
                q[row, :, None], k[row, :, keys], v[row, :, keys], scale=scale, enable_gqa=True
            )
            worst = max(worst, (out[:, 0].double().cpu() - expected[row]).abs().max().item())
    return worst


def make(batch, kv_heads, group, dim, most, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, kv_heads, most, dim)
    tensors = (torch.randn(size, generator=generator) for size in ((batch, kv_heads * group, dim), shape, shape))
    return [x.to(dtype).to(DEVICE) for x in tensors]


@pytest.mark.skipif(DEVICE == "cuda", reason="there products are in bfloat16 too")
@pytest.mark.parametrize("splits", [1, 3])
def test_interpreted_a_bfloat16_result_is_rounded_and_not_cut_off(splits):
    from minillm.kernels.flash_decoding import flash_decoding

    q, k, v = make(3, 2, 4, 64, 90, torch.bfloat16, 0)
    out, _ = flash_decoding(q, k, v, torch.tensor([90, 1, 40]), scale=0.125, splits=splits)
    expected, _ = exact(q, k, v, [90, 1, 40], 0.125)
    assert (out == expected.bfloat16()).double().mean() > 0.99


@settings(max_examples=24, deadline=None, derandomize=True)
@given(
    lengths=st.lists(
        st.one_of(st.integers(1, 600), st.sampled_from([0, 1, 63, 64, 65, 600])), min_size=1, max_size=3
    ),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 7]),
    dim=st.sampled_from([16, 32, 64, 80, 96, 128]),
    dtype=st.sampled_from(DTYPES),
    splits=st.integers(1, 12),
    window=st.sampled_from([None, None, 1, 65, 200]),
    softcap=st.sampled_from([None, None, 3.0]),
    seed=st.integers(0, 999),
)
def test_any_shape_against_float64(lengths, kv_heads, group, dim, dtype, splits, window, softcap, seed):
    from minillm.kernels.flash_decoding import flash_decoding

    q, k, v = make(len(lengths), kv_heads, group, dim, 600, dtype, seed)
    for row, length in enumerate(lengths):
        k[row, :, length:], v[row, :, length:] = math.nan, math.nan  # what is not there must reach nobody
    scale = dim**-0.5
    out, lse = flash_decoding(
        q, k, v, torch.tensor(lengths, device=DEVICE), scale=scale, window=window, softcap=softcap, splits=splits
    )
    expected, expected_lse = exact(q, k, v, lengths, scale, window, softcap)
    limit = floor(dtype)
    if softcap is None:
        limit += 2 * torch_error(q, k, v, lengths, scale, window, expected)
    else:  # a score is rounded at up to the cap, and moves its weight by as much
        limit += 2 * softcap * torch.finfo(dtype).eps
    assert out.dtype == dtype and (out.double().cpu() - expected).abs().max() <= limit
    assert torch.equal(lse.isneginf().cpu(), expected_lse.isneginf())
    assert torch.allclose(lse.double().cpu(), expected_lse, atol=1e-4)
    for row, length in enumerate(lengths):
        assert length or not out[row].any()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 600), min_size=1, max_size=3),
    splits=st.integers(1, MOST_SPLITS),
    window=st.sampled_from([None, 1, 65, 200]),
    softcap=st.sampled_from([None, 3.0]),
    tile=st.sampled_from([16, 64, 100]),
)
def test_the_torch_twin_against_float64(lengths, splits, window, softcap, tile):
    q, k, v = (x.cpu() for x in make(len(lengths), 1, 2, 8, 600, torch.float32, splits))
    splits = min(splits, 20)
    got, lse = reference.flash_decoding(
        q, k, v, torch.tensor(lengths), scale=0.3, window=window, softcap=softcap, splits=splits, tile=tile
    )
    expected, expected_lse = exact(q, k, v, lengths, 0.3, window, softcap)
    assert (got.double() - expected).abs().max() < 3e-6
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


def test_every_split_count_gives_the_same():
    """One length, all split counts up to three more than there are tiles: the last ones have empty splits."""
    from minillm.kernels.flash_decoding import flash_decoding

    q, k, v = make(1, 1, 2, 32, 64 * 9 + 5, torch.float32, 1)
    lengths = torch.tensor([64 * 9 + 5], device=DEVICE)
    expected, _ = exact(q, k, v, [64 * 9 + 5], 0.25)
    for splits in [*range(1, 14), MOST_SPLITS]:
        out, _ = flash_decoding(q, k, v, lengths, scale=0.25, splits=splits)
        assert (out.double().cpu() - expected).abs().max() < 2e-6, splits


def test_strides_are_free_but_the_last():
    """A contiguous cache's slice, whose rows are further apart than they are long, and q cut out of a qkv row."""
    from minillm.kernels.flash_decoding import flash_decoding

    q, k, v = make(2, 2, 2, 32, 100, torch.float32, 2)
    wide = torch.zeros(2, 7, 32, device=DEVICE)
    wide[:, 1:5] = q
    roomy = torch.full((3, 2, 2, 300, 32), math.nan, device=DEVICE)
    roomy[1, :, :, 50:150], lengths = k, torch.tensor([100, 31], device=DEVICE)
    plain, _ = flash_decoding(q, k, v, lengths, scale=0.2, splits=2)
    cut, _ = flash_decoding(wide[:, 1:5], roomy[1, :, :, 50:150], v, lengths, scale=0.2, splits=2)
    assert torch.equal(plain, cut)
    with pytest.raises(ParamsError, match=r"stride\(-1\)"):
        flash_decoding(q.transpose(1, 2), k, v, lengths, scale=0.2)


def test_nan_stays_visible_and_with_its_own_row():
    from minillm.kernels.flash_decoding import flash_decoding

    q, k, v = make(2, 1, 2, 16, 70, torch.float32, 3)
    k[0, 0, 66] = math.nan
    out, _ = flash_decoding(q, k, v, torch.tensor([70, 70], device=DEVICE), scale=0.2, splits=2)
    assert out[0].isnan().all() and not out[1].isnan().any()


@pytest.mark.parametrize("parts", [1, 2, 5, 64])
def test_merging_parts_is_softmax_over_all(parts):
    """The merge alone, in float64 arithmetic beside it; parts may be empty, all of them too."""
    generator, rng = torch.Generator().manual_seed(parts), random.Random(parts)
    scores = torch.randn(3, 200, generator=generator) * 30
    values = torch.randn(3, 200, 4, generator=generator)
    cuts = sorted(rng.choices(range(201), k=parts - 1))
    bounds = list(zip([0, *cuts], [*cuts, 200]))
    outs, lses = torch.full((parts, 3, 4), math.nan), torch.full((parts, 3), -math.inf)
    for i, (begin, end) in enumerate(bounds):
        if begin < end:
            outs[i] = (scores[:, begin:end].softmax(1)[:, None] @ values[:, begin:end])[:, 0]
            lses[i] = scores[:, begin:end].logsumexp(1)
    out, lse = reference.merge(outs, lses)
    expected = (scores.double().softmax(1)[:, None] @ values.double())[:, 0]
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.allclose(lse.double(), scores.double().logsumexp(1), atol=1e-4)
    nothing, lowest = reference.merge(torch.full((parts, 2, 4), 7.0), torch.full((parts, 2), -math.inf))
    assert not nothing.any() and lowest.isneginf().all()


def test_merging_is_associative():
    """Any tree of merges gives what one merge gives: that is why splits may be computed in any order."""
    outs, lses = torch.randn(8, 5, 3), torch.randn(8, 5) * 40
    whole, whole_lse = reference.merge(outs, lses)
    for cut in range(1, 8):
        halves = [reference.merge(outs[part], lses[part]) for part in (slice(0, cut), slice(cut, 8))]
        out, lse = reference.merge(*(torch.stack(x) for x in zip(*halves)))
        assert torch.allclose(out, whole, atol=1e-5) and torch.allclose(lse, whole_lse, atol=1e-4)


@given(
    length=st.integers(0, 3000),
    splits=st.integers(1, 60),
    tile=st.sampled_from([1, 16, 64]),
    first=st.integers(0, 500),
)
@settings(deadline=None)
def test_splits_cover_every_key_once(length, splits, tile, first):
    first = min(first, length)
    keys = []
    for split in range(splits):
        begin, end = reference.split_bounds(first, length, splits, split, tile)
        assert begin % tile == 0
        keys += range(max(begin, first), min(end, length))
    assert keys == list(range(first, length))


def test_choose_splits():
    assert choose_splits(1, 64, 264) == 1  # one tile: nothing to split
    assert choose_splits(264, 65536, 264) == 1  # the slots are full
    assert choose_splits(8, 0, 264) == 1
    assert choose_splits(8, 65536, 264) == 30  # 35 tiles each; 33 splits have 32
    for programs, length in ((8, 65536), (32, 4096), (3, 700), (100, 9999), (1, 10**6)):
        splits = choose_splits(programs, length, 264)
        best = min(Grid(programs, length, s, 264).steps for s in range(1, MOST_SPLITS + 1))
        grid = Grid(programs, length, splits, 264)
        assert grid.steps <= 1.1 * best and grid.busy_splits == splits
        fewer = [Grid(programs, length, s, 264).steps for s in range(1, splits)]
        assert all(steps > 1.1 * best for steps in fewer if steps), "the fewest that are near the best"
    for bad in ({"programs": 0}, {"length": -1}, {"slots": 0}):
        with pytest.raises(ParamsError, match=next(iter(bad))):
            choose_splits(**{"programs": 1, "length": 1, "slots": 1} | bad)


def test_grid_counts():
    grid = Grid(programs=8, length=10 * TILE + 1, splits=4, slots=10)
    assert (grid.tiles, grid.tiles_each, grid.busy_splits) == (11, 3, 4)
    assert (grid.waves, grid.steps, grid.occupancy) == (4, 12, 0.8)
    assert Grid(8, 5 * TILE, 4, 10).busy_splits == 3  # 2 + 2 + 1: the fourth is empty
    assert Grid(8, 0, 4, 10).occupancy == 0.0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a.update(q=a["q"][0]), "q.shape"),
        (lambda a: a.update(q=torch.zeros(2, 3, 16)), "multiple of the 2 KV heads"),
        (lambda a: a.update(v=a["v"][:, :, :5]), "v.shape"),
        (lambda a: a.update(v=a["v"].half()), "v.dtype"),
        (lambda a: a.update(lengths=torch.tensor([3])), "lengths.shape"),
        (lambda a: a.update(lengths=torch.tensor([3, 11])), "lengths=11"),
        (lambda a: a.update(lengths=torch.tensor([-1, 3])), "lengths=-1"),
        (lambda a: a.update(splits=0), "splits=0"),
        (lambda a: a.update(splits=MOST_SPLITS + 1), "splits"),
        (lambda a: a.update(window=0), "window=0"),
        (lambda a: a.update(softcap=0.0), "softcap"),
        (lambda a: a.update(q=a["q"].double()), "q.dtype"),
    ],
)
@pytest.mark.skipif(DEVICE == "cuda", reason="contents are looked at on a CPU only")
def test_bad_arguments_raise_before_a_launch(change, match, monkeypatch):
    from minillm.kernels import flash_decoding as module

    q, k, v = make(2, 2, 2, 16, 10, torch.float32, 0)
    arguments = {"q": q, "k": k, "v": v, "lengths": torch.tensor([3, 10]), "scale": 0.25, "splits": 1}
    change(arguments)
    monkeypatch.setattr(module, "decode_kernel", None)  # a launch would be a TypeError
    with pytest.raises(ParamsError, match=match):
        module.flash_decoding(**arguments)


COMPILE = """
import json, sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minillm.kernels import flash_decoding as decoding, paged_attention as paged

POINTERS = {**dict.fromkeys(("q", "k", "v", "out", "k_cache", "v_cache"), "bf16"),
    **dict.fromkeys(("outs", "lses", "lse"), "fp32"), **dict.fromkeys(("tables", "slots"), "i64"),
    **dict.fromkeys(("lengths", "kv_lengths", "query_starts"), "i32")}
ODD = ("window", "kv_heads", "table_row", "splits", "rows")  # numbers that need not be multiples of 16
tile = dict(GROUP=4, DIM=128, D=128, N=64, COMPUTE=tl.bfloat16, HAS_WINDOW=True, HAS_SOFTCAP=True)
jobs = [(decoding.decode_kernel, 80, 3, dict(tile, M=16)),
    (paged.paged_kernel, 90, 4, dict(tile, M=64, BLOCK_SIZE=16)),
    (decoding.merge_kernel, 90, 3, dict(DIM=128, SPLITS=128, D=32)),
    (paged.store_kernel, 80, 3, dict(HEADS=3, DIM=64, WIDTH=256))]
for kernel, capability, stages, constants in jobs:
    kinds = {n: "constexpr" if n in constants else "*" + POINTERS[n] if n in POINTERS else
        "fp32" if n in ("scale", "softcap") else "i32" for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
        if kinds[n] not in ("constexpr", "fp32") and n not in ODD}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=aligned)
    target, options = GPUTarget("cuda", capability, 32), dict(num_warps=4, num_stages=stages)
    built = triton.compile(source, target=target, options=options)
    ptx = built.asm["ptx"]
    cores = "mma.sync" in ptx or "wgmma" in ptx
    print(json.dumps([kernel.__name__, built.metadata.shared, "cp.async" in ptx, cores]))
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="every other test here compiles them")
def test_the_kernels_compile_for_ampere_and_hopper():
    """Triton needs no GPU to compile for one. Shared memory fits any of them, and K and V arrive asynchronously."""
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"}
    )
    assert run.returncode == 0, run.stderr[-2000:]
    built = {row[0]: row[1:] for row in map(json.loads, run.stdout.splitlines())}
    assert set(built) == {"decode_kernel", "paged_kernel", "merge_kernel", "store_kernel"}
    for name, (shared, asynchronous, tensor_cores) in built.items():
        assert shared <= 99 * 1024, name
        if name in ("decode_kernel", "paged_kernel"):
            assert asynchronous and tensor_cores, name
