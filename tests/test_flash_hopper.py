"""The Hopper variant of FlashAttention against float64, and what Triton makes of it for compute capability 9.0.

On a Hopper GPU the same tests run compiled. Without any GPU the values come from the interpreter, and the last tests
compile for sm_90 all the same: TMA, wgmma, registers and shared memory are in what the compiler writes.
"""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import ParamsError
from minillm.kernels import flash_plan, launch
from minillm.kernels.flash_plan import TileConfig, pick_variant, why_not_hopper

if launch.why_not() is not None:
    pytest.skip(f"Triton kernels cannot run: {launch.why_not()}", allow_module_level=True)
from test_flash_attention import DEVICE, FIXED, draw, same

from minillm.kernels import flash_hopper
from minillm.kernels.flash_attention import flash_attention

INTERPRETED = launch.interpreted()
DTYPES = [torch.bfloat16, torch.float16]
TILES = [None, TileConfig(128, 64, 4, 2), TileConfig(128, 64, 8, 2)]  # whole, split between groups, all together

runs_here = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.get_device_capability()[0] != 9, reason="neither interpreted nor a Hopper GPU"
)


def hopper(q, k, v, **options):
    return flash_attention(q, k, v, variant="hopper", **options)


@runs_here
@settings(max_examples=20, **FIXED)
@given(st.data())
def test_as_close_to_float64_as_torch(data):
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    kv_heads, group = pick((1, 1), (2, 1), (1, 3), (2, 2))
    time, length = data.draw(st.one_of(st.integers(1, 300), st.integers(300, 600))), data.draw(st.integers(1, 600))
    length = pick(length, time)
    dim, v_dim = pick((64, 64), (128, 128), (80, 80), (48, 32), (192, 128))
    options = dict(causal=pick(True, True, False), softcap=pick(None, None, 5.0), scale=pick(None, 0.2))
    options["window"] = pick(None, 1, 40, 200) if options["causal"] else None
    batch, dtype, seed = pick(1, 2), pick(*DTYPES), data.draw(st.integers(0, 999))
    q, k, v = draw(seed, dtype, (batch, time, kv_heads * group, dim), *(
        (batch, length, kv_heads, d) for d in (dim, v_dim)
    ))  # fmt: skip
    same(*hopper(q, k, v, return_lse=True, config=pick(*TILES), **options), q, k, v, **options)


@runs_here
@pytest.mark.parametrize("dim", [16, 32, 64, 96, 128, 256])
def test_every_head_dim(dim):
    q, k, v = draw(dim, torch.float16, (1, 40, 2, dim), (1, 170, 1, dim), (1, 170, 1, dim))
    same(*hopper(q, k, v, return_lse=True), q, k, v)


@runs_here
@settings(max_examples=10, **FIXED)
@given(
    st.lists(st.tuples(st.integers(0, 190), st.integers(0, 200)), min_size=1, max_size=4),
    st.sampled_from([None, 1, 40]),
    st.sampled_from(DTYPES),
)
def test_packed_sequences_are_each_on_their_own(lengths, window, dtype):
    starts = [torch.tensor([0, *row], dtype=torch.int32).cumsum(0).int().to(DEVICE) for row in zip(*lengths)]
    (tokens_q, tokens_k), longest = [int(s[-1]) for s in starts], max(t for t, _ in lengths)
    q, k, v = draw(7, dtype, (tokens_q, 4, 32), (tokens_k, 2, 32), (tokens_k, 2, 48))
    out, lse = hopper(
        q, k, v, window=window, starts_q=starts[0], starts_k=starts[1], longest=longest + 3, return_lse=True
    )
    assert out.shape == (tokens_q, 4, 48) and lse.shape == (4, tokens_q)
    at_q = at_k = 0
    for time, length in lengths:
        rows, keys = slice(at_q, at_q + time), slice(at_k, at_k + length)
        if time and length:
            same(out[None, rows], lse[None, :, rows], *(x[None] for x in (q[rows], k[keys], v[keys])), window=window)
        elif time:
            assert not out[rows].any() and (lse[:, rows] == -math.inf).all()
        at_q, at_k = at_q + time, at_k + length


@runs_here
@pytest.mark.parametrize("victim", [0, 1])
def test_a_neighbour_full_of_nan_harms_nobody(victim):
    q, k, v = draw(3, torch.float16, (210, 2, 32), (210, 2, 32), (210, 2, 32))
    starts = torch.tensor([0, 71, 210], dtype=torch.int32, device=DEVICE)
    clean = hopper(q, k, v, starts_q=starts, starts_k=starts, longest=139)
    mine, others = (slice(0, 71), slice(71, 210))[:: 1 if victim == 0 else -1]
    for x in (q, k, v):
        x[others] = math.nan
    assert torch.equal(hopper(q, k, v, starts_q=starts, starts_k=starts, longest=139)[mine], clean[mine])


@runs_here
def test_heads_and_sequences_of_a_batch_stay_apart():
    """Each is described on its own: what lies behind its last row, NaN here, is not read as a key or a value."""
    q, k, v = draw(9, torch.bfloat16, (3, 50, 4, 64), (3, 70, 2, 64), (3, 70, 2, 64))
    clean = hopper(q, k, v)
    k[1], v[1] = math.nan, math.nan
    spoilt = hopper(q, k, v)
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]]) and spoilt[1].isnan().all()


@runs_here
def test_queries_before_the_first_key_give_zeros():
    q, k, v = draw(1, torch.float16, (1, 200, 2, 32), (1, 30, 2, 32), (1, 30, 2, 32))
    out, lse = hopper(q, k, v, return_lse=True)
    assert not out[:, :170].any() and (lse[..., :170] == -math.inf).all() and lse[..., 170:].isfinite().all()
    same(out, lse, q, k, v)


@runs_here
def test_no_keys_and_no_queries():
    q, k, v = draw(0, torch.float16, (2, 5, 4, 32), (2, 0, 4, 32), (2, 0, 4, 32))
    out, lse = hopper(q, k, v, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    assert hopper(k, q, q).shape == (2, 0, 4, 32)


@runs_here
def test_large_scores_do_not_overflow():
    q, k, v = draw(2, torch.bfloat16, (1, 130, 1, 64), (1, 130, 1, 64), (1, 130, 1, 64))
    same(*hopper(q * 60, k * 60, v, return_lse=True), q * 60, k * 60, v)


@runs_here
def test_transposed_views_need_no_copy():
    q, k, v = draw(4, torch.float16, (2, 4, 190, 32), (2, 2, 190, 32), (2, 2, 190, 32))  # [batch, heads, time, dim]
    got = hopper(*(x.transpose(1, 2) for x in (q, k, v)))
    assert torch.equal(got, hopper(*(x.transpose(1, 2).contiguous() for x in (q, k, v))))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(dtype=torch.float32), "not torch.float32"),
        (dict(dim=36), r"q\.shape\[-1\]=36 is no multiple of 8"),
        (dict(cut=4), "multiple of 16 bytes"),
    ],
)
def test_what_it_does_not_support_is_refused_by_name_and_left_to_the_plain_kernel_by_auto(change, words):
    change = {"dtype": torch.float16, "dim": 32, "cut": 0} | change
    wide = draw(0, change["dtype"], *[(1, 20, 2, change["dim"] + 4)] * 3)
    q, k, v = (x[..., change["cut"] :][..., : change["dim"]] for x in wide)  # rows of dim + 4: not aligned
    if not change["cut"]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    with pytest.raises(ParamsError, match=words):
        hopper(q, k, v)
    torch.testing.assert_close(flash_attention(q, k, v, variant="auto"), flash_attention(q, k, v))


@runs_here
def test_two_groups_need_a_tile_that_both_can_multiply():
    q, k, v = draw(0, torch.float16, *[(1, 4, 1, 32)] * 3)
    with pytest.raises(ParamsError, match="block_m=64"):
        hopper(q, k, v, config=TileConfig(64, 64, 4))


def test_unknown_variant():
    q, k, v = draw(0, torch.float16, *[(1, 4, 1, 32)] * 3)
    with pytest.raises(ParamsError, match="must be one of plain, auto, hopper"):
        flash_attention(q, k, v, variant="ampere")


@pytest.mark.parametrize("capability, picked", [((8, 0), "plain"), ((9, 0), "hopper"), ((10, 0), "plain")])
def test_auto_takes_it_on_hopper_alone(monkeypatch, capability, picked):
    monkeypatch.setattr(flash_plan, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    q, k, v = draw(0, torch.bfloat16, *[(1, 4, 1, 32)] * 3)
    assert pick_variant("plain", q, k, v) == "plain"
    assert pick_variant("auto", q, k, v) == picked
    assert pick_variant("auto", q.float(), k.float(), v.float()) == "plain"
    if picked == "plain":
        assert f"this GPU has {capability[0]}.{capability[1]}" in why_not_hopper(q, k, v)
        with pytest.raises(ParamsError, match=r"compute capability 9\.x"):
            pick_variant("hopper", q, k, v)


def test_auto_interprets_the_plain_kernel(monkeypatch):
    q, k, v = draw(0, torch.bfloat16, *[(1, 4, 1, 32)] * 3)
    monkeypatch.setattr(flash_plan, "interpreted", lambda: True)
    assert pick_variant("auto", q, k, v) == "plain" and pick_variant("hopper", q, k, v) == "hopper"


def test_scratch_comes_from_torch_and_the_callers_allocator_stays(monkeypatch):
    from triton.runtime import _allocation

    seen = []

    def kernel(*args, **settings):
        seen.append((_allocation._allocator.get()(384, 128, None), settings))

    monkeypatch.setattr(flash_hopper, "hopper_kernel", {(6,): kernel})
    monkeypatch.setattr(flash_hopper, "interpreted", lambda: False)
    before = _allocation._allocator.get()
    q, k, v = draw(0, torch.float16, (1, 130, 3, 32), (1, 130, 3, 32), (1, 130, 3, 32))
    plan = SimpleNamespace(
        programs=6, scale=1.0, inner_scale=0.0, v_scale=1.0, time=130, length=130, tiles=2, window=0, causal=True,
        config=TileConfig(128, 64, 8, 2),
    )  # fmt: skip
    flash_hopper.launch_hopper(plan, q, k, v, q, torch.empty(1), None, None, False)
    (scratch, settings), = seen  # fmt: skip
    assert scratch.numel() == 384 and scratch.dtype == torch.int8 and scratch.device == q.device
    assert not settings["SPECIALISE"] and settings["num_warps"] == 8
    assert _allocation._allocator.get() is before


@runs_here
def test_bench_races_it_against_the_plain_kernel():
    from minillm.measure.attention_bench import bench_attention, bench_hopper

    names = {f.name: f.value for f in bench_hopper(repeats=1, smoke=True)}
    kinds = ("triton_hopper", "triton_hopper_w8")
    wanted = {f"attention.d32.n{n}.{kind}{end}" for n in (64, 128) for kind in kinds for end in ("", "_gain")}
    assert set(names) == wanted and all(value > 0 for value in names.values())
    assert wanted <= {f.name for f in bench_attention(repeats=1, smoke=True)}
    assert not wanted & {f.name for f in bench_attention(repeats=1, smoke=True, hopper=False)}


def test_bench_says_why_where_it_cannot_run(monkeypatch):
    from minillm.measure import attention_bench

    monkeypatch.setattr(attention_bench, "why_not_hopper", lambda *tensors: "this GPU has 8.0")
    with pytest.raises(attention_bench.NotMeasured, match=r"8\.0"):
        list(attention_bench.bench_hopper(repeats=1, smoke=True))


COMPILE = """
import glob, os, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minillm.kernels.flash_hopper import hopper_kernel
from minillm.kernels.flash_plan import TileConfig, hopper_config
from minillm.kernels.launch import power_of_two

CASES = {
    "64": dict(), "128": dict(), "256": dict(), "192x128": dict(), "64 fp16": dict(dtype="fp16"),
    "128 packed": dict(PACKED=True, WINDOW=True, SOFTCAP=True), "128 full": dict(CAUSAL=False, LSE=False),
    "128 together": dict(warps=8),
}
for name, change in CASES.items():
    dims = [int(n) for n in name.split()[0].split("x")]
    dim, v_dim = dims[0], dims[-1]
    c = hopper_config(dim, v_dim)
    c = TileConfig(c.block_m, c.block_n, change.pop("warps", c.warps), c.stages)
    dtype = change.pop("dtype", "bf16")
    constants = dict(
        GROUP=4, HEAD_DIM=dim, V_DIM=v_dim, D=power_of_two(dim), DV=power_of_two(v_dim), CAUSAL=True, WINDOW=False,
        SOFTCAP=False, PACKED=False, LSE=True, SPECIALISE=c.warps == 4, BLOCK_M=c.block_m, BLOCK_N=c.block_n,
    ) | change
    if not constants["PACKED"]:
        constants |= dict(starts_q=None, starts_k=None)
    signature, aligned = {}, {}
    for i, argument in enumerate(hopper_kernel.arg_names):
        known = {"lse_pointer": "*fp32", "starts_q": "*i32", "starts_k": "*i32"}
        known |= dict.fromkeys(("scale", "inner_scale", "v_scale"), "fp32")
        known |= dict.fromkeys((f"{x}_pointer" for x in ("q", "k", "v", "out")), "*" + dtype)
        signature[argument] = "constexpr" if argument in constants else known.get(argument, "i32")
        if argument.endswith("_pointer") or argument.startswith(("stride_q", "stride_k", "stride_v", "stride_o")):
            aligned[(i,)] = [["tt.divisibility", 16]]
    where = {(hopper_kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(hopper_kernel, signature, constexprs=where, attrs=aligned)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                          options=dict(num_warps=c.warps, num_stages=c.stages))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    ptx = done.asm["ptx"]
    print(name, *(int(s in ptx) for s in ("cp.async.bulk.tensor", "wgmma.mma_async", "setmaxnreg", "cp.async.cg")),
          done.metadata.num_warps, done.metadata.shared,
          *(word.split(":")[1] for word in usage.split() if word.startswith(("STACK:", "LOCAL:"))), sep="|")
"""


@pytest.mark.skipif(not INTERPRETED, reason="the GPU compiles it in the tests above")
def test_compiled_for_hopper_it_uses_tma_and_wgmma_splits_its_warps_and_spills_nothing(tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split("|") for line in done.stdout.split("\n") if line]
    assert len(rows) == 8
    for name, tma, wgmma, registers_moved, plain_copies, warps, shared, *spilled in rows:
        assert (tma, wgmma, plain_copies) == ("1", "1", "0"), f"{name}: no TMA or no wgmma, or copies beside TMA"
        together = name.endswith("together")
        assert (registers_moved, warps) == (("0", "8") if together else ("1", "12")), f"{name}: warps not specialised"
        assert int(shared) <= 232_448, f"{name} wants {shared} bytes of shared memory, a block may have 227 KB"
        assert spilled == ["0", "0"], f"{name} spills registers: {spilled} bytes of stack and local memory"
