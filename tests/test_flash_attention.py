"""FlashAttention, the Triton kernel and its torch twin, against float64. On a GPU the same tests run compiled."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minillm.errors import ParamsError
from minillm.kernels import launch
from minillm.kernels.attention import attention, choose_backend
from minillm.kernels.flash_plan import TileConfig, candidates
from minillm.kernels.flash_reference import flash_attention_reference, key_range

if launch.why_not() is not None:
    pytest.skip(f"Triton kernels cannot run: {launch.why_not()}", allow_module_level=True)
from minillm.kernels.flash_attention import flash_attention

DEVICE = "cpu" if launch.interpreted() else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FIXED = {
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.generate],
}  # shrinking in the interpreter takes minutes
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}  # what rounding the output alone may cost


def formula(q, k, v, dtype, *, scale=None, causal=True, window=None, softcap=None):
    """Attention as the textbook has it, every step in `dtype`; (output, log-sum-exp). No keys: zeros."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # [batch, heads, time or length, dim]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    query = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device=q.device)
    if causal:
        scores = scores.masked_fill(key > query, -math.inf)
    if window is not None:
        scores = scores.masked_fill(key <= query - window, -math.inf)
    weights = scores.softmax(-1).nan_to_num()
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1)


def same(got, lse, q, k, v, **options):
    """The flash-attention project's criterion: at most twice the error of the formula in the same dtype."""
    exact, exact_lse = formula(q, k, v, torch.float64, **options)
    plain, _ = formula(q, k, v, q.dtype, **options)
    assert got.shape == exact.shape and got.dtype == q.dtype
    error, allowed = (got.double() - exact).abs().max(), (plain.double() - exact).abs().max()
    assert error <= 2 * allowed + FLOOR[q.dtype], f"error {error:.2e}, twice torch's is {2 * allowed:.2e}"
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=2e-5)


def draw(seed, dtype, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


@st.composite
def problems(draw_):
    """Shapes, options and tiles."""
    kv_heads, group = draw_(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    block_m, block_n = draw_(st.sampled_from([(64, 64), (128, 64), (64, 128), (32, 64), (128, 128)]))
    time, length = draw_(st.one_of(st.integers(1, 300), st.integers(300, 600))), draw_(st.integers(1, 600))
    if draw_(st.booleans()):
        length = time
    causal = draw_(st.sampled_from([True, True, True, False]))
    return dict(
        shape=(draw_(st.integers(1, 2)), time, length, kv_heads, kv_heads * group),
        dims=draw_(st.sampled_from([(64, 64), (32, 32), (16, 16), (80, 80), (96, 96), (48, 32), (192, 128)])),
        dtype=draw_(st.sampled_from(DTYPES)),
        options=dict(
            causal=causal,
            window=draw_(st.one_of(st.none(), st.integers(1, 200))) if causal else None,
            softcap=draw_(st.sampled_from([None, None, 5.0, 30.0])),
            scale=draw_(st.sampled_from([None, 0.2])),
        ),
        config=TileConfig(block_m, block_n),
        seed=draw_(st.integers(0, 999)),
    )  # fmt: skip


def tensors(problem):
    batch, time, length, kv_heads, heads = problem["shape"]
    dim, v_dim = problem["dims"]
    shapes = (batch, time, heads, dim), (batch, length, kv_heads, dim), (batch, length, kv_heads, v_dim)
    return draw(problem["seed"], problem["dtype"], *shapes)


@settings(max_examples=25, **FIXED)
@given(problems())
def test_kernel_is_as_close_to_float64_as_torch(problem):
    q, k, v = tensors(problem)
    same(*flash_attention(q, k, v, return_lse=True, config=problem["config"], **problem["options"]), q, k, v,
         **problem["options"])  # fmt: skip


@settings(max_examples=25, **FIXED)
@given(problems(), st.integers(20, 130), st.integers(20, 130))
def test_twin_is_as_close_to_float64_as_torch(problem, block_m, block_n):
    q, k, v = tensors(problem)
    options = problem["options"]
    same(*flash_attention_reference(q, k, v, return_lse=True, block_m=block_m, block_n=block_n, **options), q, k, v,
         **options)  # fmt: skip


@pytest.mark.parametrize("dim", [1, 32, 64, 80, 96, 128, 192, 256])
def test_every_head_dim(dim):
    q, k, v = draw(dim, torch.float16, (1, 40, 2, dim), (1, 70, 1, dim), (1, 70, 1, dim))
    same(*flash_attention(q, k, v, return_lse=True), q, k, v)


@settings(max_examples=12, **FIXED)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 200)), min_size=1, max_size=4),
    st.sampled_from([None, 1, 40]),
    st.sampled_from(DTYPES),
)
def test_packed_sequences_are_each_on_their_own(lengths, window, dtype):
    starts = [torch.tensor([0, *row], dtype=torch.int32).cumsum(0).int().to(DEVICE) for row in zip(*lengths)]
    (tokens_q, tokens_k), longest = [int(s[-1]) for s in starts], max(t for t, _ in lengths)
    q, k, v = draw(7, dtype, (tokens_q, 4, 32), (tokens_k, 2, 32), (tokens_k, 2, 48))
    out, lse = flash_attention(
        q, k, v, window=window, starts_q=starts[0], starts_k=starts[1], longest=longest + 3, return_lse=True
    )
    assert out.shape == (tokens_q, 4, 48) and lse.shape == (4, tokens_q)
    at_q = at_k = 0
    for time, length in lengths:
        rows, keys = slice(at_q, at_q + time), slice(at_k, at_k + length)
        if time and length:
            one = (x[None] for x in (q[rows], k[keys], v[keys]))
            same(out[None, rows], lse[None, :, rows], *one, window=window)
        elif time:
            assert not out[rows].any() and (lse[:, rows] == -math.inf).all()
        at_q, at_k = at_q + time, at_k + length


def test_a_neighbour_full_of_nan_harms_nobody():
    q, k, v = draw(3, torch.float32, (60, 2, 32), (60, 2, 32), (60, 2, 32))
    starts = torch.tensor([0, 21, 60], dtype=torch.int32, device=DEVICE)
    clean = flash_attention(q, k, v, starts_q=starts, starts_k=starts, longest=39)
    for x in (k, v):
        x[21:] = math.nan
    assert torch.equal(flash_attention(q, k, v, starts_q=starts, starts_k=starts, longest=39)[:21], clean[:21])


def test_queries_before_the_first_key_give_zeros():
    q, k, v = draw(1, torch.float32, (1, 100, 2, 32), (1, 30, 2, 32), (1, 30, 2, 32))
    for out, lse in (
        flash_attention(q, k, v, return_lse=True),
        flash_attention_reference(q, k, v, return_lse=True),
    ):
        assert not out[:, :70].any() and (lse[..., :70] == -math.inf).all() and lse[..., 70:].isfinite().all()
        same(out, lse, q, k, v)


def test_large_scores_do_not_overflow():
    q, k, v = draw(2, torch.float32, (1, 130, 1, 64), (1, 130, 1, 64), (1, 130, 1, 64))
    same(*flash_attention(q * 60, k * 60, v, return_lse=True), q * 60, k * 60, v)


def test_transposed_views_need_no_copy():
    q, k, v = draw(4, torch.float32, (2, 4, 90, 32), (2, 2, 90, 32), (2, 2, 90, 32))  # [batch, heads, time, dim]
    got = flash_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    torch.testing.assert_close(got, flash_attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v))))


def test_float8_inputs_with_scales():
    q, k, v = draw(5, torch.float32, (1, 70, 4, 64), (1, 150, 2, 64), (1, 150, 2, 64))
    small = [(x / s).to(torch.float8_e4m3fn) for x, s in ((q, 0.02), (k, 0.01), (v, 0.03))]
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    out = flash_attention(*small, scales=(0.02, 0.01, 0.03), out_dtype=torch.float32)
    wide = [x.float() * s for x, s in zip(small, (0.02, 0.01, 0.03))]
    exact, _ = formula(*wide, torch.float64)
    assert (out.double() - exact).abs().max() < (1e-5 if launch.interpreted() else 3e-3)
    assert flash_attention(*small).dtype == torch.bfloat16


@given(*[st.integers(1, 80)] * 2, st.integers(1, 40), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 90)))
@settings(max_examples=200, **FIXED)
def test_blocks_visited_are_those_that_are_seen(time, length, block_m, block_n, window):
    """Against the mask itself: no block that somebody sees is left out, none that nobody sees is visited, and a block
    without a mask is seen by every query of the tile."""
    query, key = torch.arange(time)[:, None] + length - time, torch.arange(length)
    seen = (key <= query) & (key > query - (window or 10**6))
    for first in range(0, time, block_m):
        last = min(first + block_m, time) - 1
        tile = seen[first : last + 1]
        visited = list(key_range(first, last, time, length, block_n, True, window).blocks(block_n))
        starts = [block for block, _ in visited]
        wanted = [block for block in range(0, length, block_n) if tile[:, block : block + block_n].any()]
        assert starts == wanted
        for block, masked in visited:
            whole = block + block_n <= length and bool(tile[:, block : block + block_n].all())
            assert masked or whole


def test_watch_sees_the_running_maximum_and_sum():
    q, k, v = draw(6, torch.float32, (1, 8, 1, 16), (1, 8, 1, 16), (1, 8, 1, 16))
    steps = []
    out = flash_attention_reference(q, k, v, block_m=4, block_n=2, watch=steps.append)
    assert [(s.first_query, s.first_key) for s in steps] == [(0, 0), (0, 2), (4, 0), (4, 2), (4, 4), (4, 6)]
    final = steps[-1]
    torch.testing.assert_close((final.acc / final.total[..., None])[0, 0], out[0, 4:, 0])
    assert (steps[3].m >= steps[2].m).all()


GOOD = dict(q=(2, 9, 4, 32), k=(2, 12, 2, 32), v=(2, 12, 2, 16))


@pytest.mark.parametrize(
    "change, options, words",
    [
        (dict(k=(2, 12, 2, 48)), {}, "k.shape"),
        (dict(k=(1, 12, 2, 32)), {}, "k.shape"),
        (dict(v=(2, 11, 2, 16)), {}, "v.shape"),
        (dict(v=(2, 12, 1, 16)), {}, "v.shape"),
        (dict(k=(2, 12, 3, 32), v=(2, 12, 3, 16)), {}, "multiple of the 3 KV heads"),
        (dict(k=(2, 12, 0, 32), v=(2, 12, 0, 16)), {}, "multiple of the 0 KV heads"),
        (dict(q=(2, 9, 4, 288), k=(2, 12, 2, 288)), {}, "head dim is 1 to 256"),
        (dict(q=(9, 4, 32)), {}, "q.shape"),
        ({}, dict(window=0), "window=0"),
        ({}, dict(window=True), "window=True"),
        ({}, dict(window=4, causal=False), "needs causal=True"),
        ({}, dict(softcap=0.0), "softcap=0.0"),
        ({}, dict(scale=-1.0), "scale=-1.0"),
        ({}, dict(scale=math.nan), "scale=nan"),
        ({}, dict(scales=(1.0, 0.0, 1.0)), "scales"),
        ({}, dict(longest=3), "goes with starts_q"),
        ({}, dict(out_dtype=torch.int32), "out_dtype"),
        ({}, dict(config=TileConfig(48, 64)), "block_m=48"),
        ({}, dict(config=TileConfig(64, 8)), "block_n=8"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_launch(change, options, words):
    q, k, v = draw(0, torch.float32, *{**GOOD, **change}.values())
    with pytest.raises(ParamsError, match=words):
        flash_attention(q, k, v, **options)


def test_packed_arguments_are_checked():
    q, k, v = draw(0, torch.float32, (9, 4, 32), (12, 2, 32), (12, 2, 16))
    starts_q, starts_k = torch.tensor([0, 4, 9], device=DEVICE), torch.tensor([0, 6, 12], device=DEVICE)
    with pytest.raises(ParamsError, match="all three"):
        flash_attention(q, k, v, starts_q=starts_q, longest=5)
    with pytest.raises(ParamsError, match=r"starts_k.shape"):
        flash_attention(q, k, v, starts_q=starts_q, starts_k=starts_k[:2], longest=5)
    with pytest.raises(ParamsError, match=r"starts_q.dtype"):
        flash_attention(q, k, v, starts_q=starts_q.float(), starts_k=starts_k, longest=5)
    if DEVICE == "cpu":  # on a GPU looking at the values would wait for it
        for bad in ([0, 4, 10], [1, 4, 9], [0, 12, 9]):
            with pytest.raises(ParamsError, match="must rise from 0 to 9"):
                flash_attention(q, k, v, starts_q=torch.tensor(bad), starts_k=starts_k, longest=12)
        with pytest.raises(ParamsError, match="one sequence has 5 queries"):
            flash_attention(q, k, v, starts_q=starts_q, starts_k=starts_k, longest=4)


def test_dtypes_and_devices_must_agree():
    q, k, v = draw(0, torch.float32, *GOOD.values())
    with pytest.raises(ParamsError, match=r"k\.dtype"):
        flash_attention(q, k.half(), v)
    with pytest.raises(ParamsError, match=r"q\.dtype"):
        flash_attention(q.double(), k.double(), v.double())
    with pytest.raises(ParamsError, match="device"):
        flash_attention(q, k.to("meta"), v)
    with pytest.raises(ParamsError, match="stride"):
        flash_attention(q.transpose(2, 3), q.transpose(2, 3), q.transpose(2, 3))


def test_no_queries_launch_nothing():
    q, k, v = draw(0, torch.float32, (2, 0, 4, 32), (2, 5, 2, 32), (2, 5, 2, 32))
    assert flash_attention(q, k, v).shape == (2, 0, 4, 32)


@pytest.mark.parametrize("window, softcap", [(None, None), (20, None), (None, 8.0)])
def test_backends_agree(window, softcap):
    q, k, v = draw(8, torch.float32, (2, 4, 50, 32), (2, 2, 90, 32), (2, 2, 90, 32))  # [batch, heads, time, dim]
    results = [
        attention(q, k, v, scale=0.2, window=window, softcap=softcap, backend=name)
        for name in ("naive", "sdpa", "triton", "auto")
    ]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)


def test_auto_says_what_it_took():
    assert choose_backend("auto", "cpu").name == "sdpa" and "no GPU" in str(choose_backend("auto", "cpu"))
    assert choose_backend("naive", "cpu").name == "naive"
    with pytest.raises(ParamsError, match="must be one of auto, naive, sdpa, triton"):
        choose_backend("flash", "cpu")


def test_candidates_fit_the_shared_memory():
    for dim, v_dim, itemsize in ((64, 64, 2), (128, 128, 2), (192, 128, 2), (256, 256, 2), (128, 128, 4)):
        for limit in (101_376, 166_912, 232_448):  # bytes a program may hold: RTX 3090 and 4090, A100, H100
            found = candidates(dim, v_dim, itemsize, limit)
            assert found and all(c.shared_bytes(dim, v_dim, itemsize) <= limit for c in found)


def in_process(code, **environment):
    """What a fresh Python prints."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_the_interpreter_is_chosen_before_triton_loads():
    code = (
        "import torch, minillm.kernels.attention as a; q = torch.ones(1, 1, 4, 16)\n"
        "print(float(a.attention(q, q, q, scale=1.0, backend='triton').sum()))"
    )
    assert in_process(code) == "64.0"
    late = "import triton; from minillm.kernels.launch import why_not; print(why_not())"
    assert "TRITON_INTERPRET=1" in in_process(late)
    assert "switched off" in in_process(late.replace("import triton; ", ""), TRITON_INTERPRET="0")


def test_bytes_and_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    from minillm.measure.attention_counts import AttentionShape, attention_flops, flash_bytes, naive_bytes

    shape = AttentionShape(2, 4, 128, 128, 32, causal=False)
    q = torch.randn(2, 4, 128, 32)
    with FlopCounterMode(display=False) as counter:
        (q @ q.transpose(-1, -2)) @ q
    assert attention_flops(shape) == counter.get_total_flops()
    seen = (torch.arange(50)[:, None] + 20 >= torch.arange(70)).sum().item()
    assert AttentionShape(1, 1, 50, 70, 8).pairs == seen
    assert naive_bytes(shape, 2) == 2 * 4 * 2 * (4 * 128 * 32 + 4 * 128 * 128)
    assert flash_bytes(shape, 2, block_m=128) == 4 * q.numel() * 2  # one tile: everything once
    assert flash_bytes(shape, 2, block_m=32) == (2 + 2 * 4) * q.numel() * 2
    causal = AttentionShape(1, 1, 128, 128, 32)
    assert flash_bytes(causal, 2, block_m=64) == (2 * 128 + 2 * (64 + 128)) * 32 * 2


def test_attention_bench_checks_values_and_reports_ratios():
    from minillm.measure.attention_bench import bench_attention, check_values

    figures = {f.name: f for f in bench_attention(repeats=1, smoke=True)}
    for name in ("naive", "triton", "against_naive", "against_sdpa", "ceiling_share"):
        assert figures[f"attention.d32.n128.{name}"].value > 0
    q = torch.randn(1, 2, 16, 16)
    with pytest.raises(RuntimeError, match="broken is"):
        check_values({"broken": lambda: q * 0}, q, q, q)
