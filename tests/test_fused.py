"""Fused kernels against float64, over any shape and dtype; the fused model against the plain one.

Under Triton's interpreter where there is no GPU; the same tests on a GPU unchanged. An error may be twice that of
torch in the same dtype, plus a floor of one rounding of the largest value.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minillm.errors import ParamsError
from minillm.kernels import fused, fused_reference
from minillm.kernels.launch import interpreted, why_not
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.rope import cos_sin

triton_needed = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
pytestmark = triton_needed
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter cuts to bfloat16 where a GPU rounds to nearest.
ROUNDING = {torch.float32: 2e-7, torch.bfloat16: 2**-7 if interpreted() else 2**-8, torch.float16: 2**-11}
QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


def randn(seed, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(DEVICE)


def assert_as_good(got, same_dtype, exact):
    """Error against float64: at most twice that of torch in the same dtype, plus one rounding of the largest."""
    assert got.shape == exact.shape and got.dtype == same_dtype.dtype
    error, theirs = ((x.double() - exact).abs().max().item() for x in (got, same_dtype))
    floor = ROUNDING[got.dtype] * exact.abs().max().item()
    assert error <= 2 * theirs + floor, f"error {error:.2e}, torch's {theirs:.2e}, floor {floor:.2e}"


@QUICK
@given(
    rows=st.integers(0, 9),
    width=st.integers(1, 1300),
    dtype=st.sampled_from(DTYPES),
    branch=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 200.0]),
    seed=st.integers(0, 99),
)
def test_add_rms_norm(rows, width, dtype, branch, scale, seed):
    from minillm.kernels.fused_norm import add_rms_norm

    x, weight = randn(seed, rows, width, dtype=dtype, scale=scale), randn(seed + 1, width, dtype=dtype)
    y = randn(seed + 2, rows, width, dtype=dtype, scale=scale) if branch else None
    before = x.clone()
    normed, summed = add_rms_norm(y, x, weight, 1e-5)
    assert torch.equal(x, before), "the residual is an input"
    if not rows:
        assert normed.shape == (0, width)
        return
    same, same_sum = fused_reference.add_rms_norm(y, x, weight, 1e-5)
    torch.testing.assert_close(summed, same_sum, rtol=ROUNDING[dtype] * 2, atol=0)
    total = summed.double()
    exact = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert_as_good(normed, same, exact)


def test_add_rms_norm_of_rows_that_are_not_adjacent_and_any_leading_shape():
    from minillm.kernels.fused_norm import add_rms_norm

    wide = randn(0, 2, 3, 200)
    x, y, weight = wide[..., :96], randn(1, 2, 3, 96), randn(2, 96)
    normed, summed = add_rms_norm(y, x, weight, 1e-6)
    expected = fused_reference.add_rms_norm(y, x, weight, 1e-6)
    torch.testing.assert_close((normed, summed), expected, rtol=1e-5, atol=1e-6)


@QUICK
@given(
    rows=st.integers(0, 5),
    features=st.integers(1, 2100),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(["silu", "gelu_tanh", "gelu"]),
    seed=st.integers(0, 99),
)
def test_gated(rows, features, dtype, activation, seed):
    from minillm.kernels.fused_swiglu import gated

    x = randn(seed, rows, 2 * features, dtype=dtype, scale=4.0)
    out = gated(x, activation)
    if not rows:
        assert out.shape == (0, features)
        return
    assert_as_good(out, fused_reference.gated(x, activation), fused_reference.gated(x.double(), activation))


def test_gated_stays_finite_at_the_ends():
    from minillm.kernels.fused_swiglu import gated

    x = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for activation in ("silu", "gelu_tanh", "gelu"):
        torch.testing.assert_close(gated(x, activation), torch.tensor([[0.0, 200.0, 0.0]], device=DEVICE))


@QUICK
@given(
    tokens=st.integers(0, 7),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 50),
    block_size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(DTYPES),
    rotates=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rope_and_write(tokens, group, kv_heads, half, block_size, dtype, rotates, seed):
    from minillm.kernels.fused_rope import rope_and_write

    generator = torch.Generator().manual_seed(seed)
    dim, blocks = 2 * half, -(-12 // block_size)
    qkv = randn(seed, tokens, (group + 2) * kv_heads, dim, dtype=dtype)
    positions = torch.randint(0, 9000, (tokens,), generator=generator).to(DEVICE)
    inverse = 1.0 / 10000 ** (torch.arange(half, device=DEVICE) / half)
    tables = cos_sin(positions, inverse) if rotates else None
    keys = torch.full((blocks, block_size, kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    values = keys.clone()
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens].to(DEVICE)
    slots[torch.rand(tokens, generator=generator) < 0.3] = -1
    q = rope_and_write(qkv, tables, keys, values, slots)
    same_k, same_v = (torch.full_like(keys, float("nan")) for _ in range(2))
    same_q = fused_reference.rope_and_write(qkv, tables, same_k, same_v, slots)
    written = slots[slots >= 0]
    untouched = torch.ones(blocks * block_size, dtype=torch.bool)
    untouched[written.cpu()] = False
    for stored in (keys, values):
        assert stored.flatten(0, 1)[untouched.to(DEVICE)].isnan().all(), "a slot that nobody was given is touched"
    assert torch.equal(values.flatten(0, 1)[written], same_v.flatten(0, 1)[written])
    exact_k, exact_v = (torch.full_like(keys, float("nan"), dtype=torch.float64) for _ in range(2))
    wide = None if tables is None else tuple(table.double() for table in tables)
    exact_q = fused_reference.rope_and_write(qkv.double(), wide, exact_k, exact_v, slots)
    if tokens:
        assert_as_good(q, same_q, exact_q)
    if len(written):
        assert_as_good(*(x.flatten(0, 1)[written] for x in (keys, same_k, exact_k)))


def test_rope_and_write_takes_a_cache_of_another_dtype_and_strided_tables():
    from minillm.kernels.fused_rope import rope_and_write

    qkv, slots = randn(0, 2, 4, 8), torch.tensor([5, -1], device=DEVICE)
    rows = torch.tensor([[7, 9], [8, 9]], device=DEVICE)  # a column of a buffer, as in a captured step
    tables = cos_sin(rows[:, 0], torch.tensor([1.0, 0.5, 0.2, 0.1], device=DEVICE))
    keys, values = (torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    expected = tuple(torch.zeros_like(keys) for _ in range(2))
    q = rope_and_write(qkv, tables, keys, values, slots)
    torch.testing.assert_close(q, fused_reference.rope_and_write(qkv, tables, *expected, slots))
    torch.testing.assert_close((keys, values), expected)


def refuse(name, call, *args, **kwargs):
    with pytest.raises(ParamsError, match=name):
        call(*args, **kwargs)


def test_bad_arguments_are_named_before_a_launch():
    from minillm.kernels.fused_norm import add_rms_norm
    from minillm.kernels.fused_rope import rope_and_write
    from minillm.kernels.fused_sample import sample
    from minillm.kernels.fused_swiglu import gated

    x, w = randn(0, 2, 8), randn(1, 8)
    refuse("branch", add_rms_norm, randn(0, 2, 7), x, w, 1e-5)
    refuse("branch", add_rms_norm, x.half(), x, w, 1e-5)
    refuse("weight", add_rms_norm, None, x, randn(1, 7), 1e-5)
    refuse("width", add_rms_norm, None, randn(0, 1, 1)[:, :0], w, 1e-5)
    refuse("residual", add_rms_norm, None, x.long(), w, 1e-5)
    refuse("activation", gated, x, "relu")
    refuse("gate_up", gated, randn(0, 2, 7))
    qkv, cache, slots = randn(0, 2, 4, 8), torch.zeros(2, 4, 1, 8, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    refuse("head_dim", rope_and_write, randn(0, 2, 4, 7), None, cache, cache, slots)
    refuse("keys", rope_and_write, qkv, None, cache[..., :6], cache, slots)
    refuse("values", rope_and_write, qkv, None, cache, cache.half(), slots)
    refuse("slots", rope_and_write, qkv, None, cache, cache, slots.int())
    refuse("slots", rope_and_write, qkv, None, cache, cache, slots[:1])
    refuse("qkv", rope_and_write, qkv[:, :2], None, cache, cache, slots)
    if DEVICE == "cpu":  # ids on a GPU are checked while they are lists
        refuse("slots", rope_and_write, qkv, None, cache, cache, torch.tensor([0, 8]))
        refuse("slots", rope_and_write, qkv, None, cache, cache, torch.tensor([-2, 0]))
    t, ids = torch.zeros(2, device=DEVICE), torch.zeros(2, dtype=torch.long, device=DEVICE)
    refuse("temperatures", sample, x, t[:1], ids, ids)
    refuse("seeds", sample, x, t, ids.int(), ids)


def draw(logits, temperature=0.0, seeds=None, steps=None):
    from minillm.kernels.fused_sample import sample

    rows = len(logits)
    seeds = torch.arange(rows) if seeds is None else torch.as_tensor(seeds)
    steps = torch.zeros(rows, dtype=torch.long) if steps is None else torch.as_tensor(steps)
    temperatures = torch.full((rows,), temperature) if isinstance(temperature, float) else torch.tensor(temperature)
    return sample(logits.to(DEVICE), temperatures.to(DEVICE), seeds.to(DEVICE), steps.to(DEVICE)).cpu()


@pytest.mark.parametrize("vocab", [1, 2, 211, 4096, 20_011])
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_is_argmax_with_its_tie_rule(vocab, dtype):
    logits = randn(vocab, 6, vocab, dtype=dtype).cpu()
    logits[1] = 0.5  # all equal: the lowest id
    logits[2, vocab // 2 :] = logits[2].max() + 1  # many equals across blocks
    logits[3, :-1] = float("-inf")
    logits[4] = logits[4].round()
    first = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits.float()])
    assert torch.equal(draw(logits), first)
    assert torch.equal(draw(logits), logits.argmax(-1))


def test_rows_that_nothing_can_be_drawn_from_are_minus_one_and_alone():
    logits = randn(3, 5, 50).cpu()
    logits[0, 7], logits[1, 49], logits[2] = float("nan"), float("inf"), float("-inf")
    for temperature in (0.0, 1.0):
        tokens = draw(logits, temperature)
        assert tokens[:3].tolist() == [-1, -1, -1] and (tokens[3:] >= 0).all()


def chi_square(counts, probabilities, total):
    """(statistic, degrees of freedom), cells with an expectation under 8 pooled."""
    expected = probabilities * total
    large = expected >= 8
    cells = [(counts[large], expected[large]), (counts[~large].sum()[None], expected[~large].sum()[None])]
    value = sum(((c - e) ** 2 / e.clamp(min=1e-9)).sum().item() for c, e in cells if e.sum() > 0)
    return value, int(large.sum()) - 1 + int((~large).any())


def test_draws_follow_the_softmax():
    """1200 draws over 24 tokens, in rows of their own seed, at two steps: the statistic is within 4.5 standard
    deviations of its mean, and of a distribution at a slightly other temperature far outside."""
    logits, rows, steps, temperature = randn(5, 24).cpu() * 1.5, 600, (7, 10**9), 0.7
    counts = torch.zeros(24)
    for step in steps:
        tokens = draw(logits.expand(rows, -1).contiguous(), temperature, steps=[step] * rows)
        counts += torch.bincount(tokens, minlength=24)
    total = rows * len(steps)
    right, freedom = chi_square(counts, (logits / temperature).double().softmax(-1), total)
    wrong, _ = chi_square(counts, (logits / temperature / 1.4).double().softmax(-1), total)
    limit = freedom + 4.5 * (2 * freedom) ** 0.5
    assert right < limit < wrong, f"{right:.0f} of {freedom} degrees of freedom; at a wrong temperature {wrong:.0f}"


def test_a_draw_depends_on_seed_and_step_alone():
    logits = randn(7, 400).cpu()
    many = logits.expand(24, -1).contiguous()
    base = draw(many, 1.0, seeds=range(24), steps=[3] * 24)
    assert torch.equal(base, draw(many, 1.0, seeds=range(24), steps=[3] * 24))
    assert torch.equal(base.flip(0), draw(many, 1.0, seeds=list(range(24))[::-1], steps=[3] * 24))
    assert base[5] == draw(many[:1], 1.0, seeds=[5], steps=[3])[0]
    for other in (draw(many, 1.0, seeds=range(24), steps=[4] * 24), draw(many, 1.0, seeds=range(64, 88))):
        assert (base != other).float().mean() > 0.7
    mixed = draw(many[:2], [0.0, 1.0], seeds=[5, 5], steps=[3, 3])
    assert mixed[0] == logits.argmax() and mixed[1] == base[5]


def test_a_masked_token_is_never_drawn():
    logits = torch.full((60, 64), float("-inf"))
    logits[:, 3], logits[:, 60] = 0.0, 0.0
    assert set(draw(logits, 1.0).tolist()) == {3, 60}


def small_model(**changes) -> Decoder:
    options = dict(
        vocab_size=97, hidden_size=40, intermediate_size=72, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10
    )
    return init_weights(Decoder(ModelConfig(**options, max_length=64, **changes)), 1).eval().to(DEVICE)


@pytest.mark.parametrize(
    "changes",
    [{}, {"post_norms": True}, {"qk_norm": True}, {"activation": "gelu_tanh"}, {"gated_mlp": False}],
    ids=lambda c: next(iter(c), "plain"),
)
@torch.inference_mode()
def test_a_fused_model_gives_the_same_logits(changes):
    tokens = torch.arange(7, device=DEVICE)
    for ops in (fused.torch_ops(), fused.triton_ops()):
        model = small_model(**changes)
        expected = model(tokens)
        assert fused.fuse(model, ops) is model and isinstance(model.layers[0], fused.FusedBlock)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_model_with_layer_norms_stays_as_it_is():
    model = small_model(norm_kind="layer")
    before = list(model.layers)
    assert list(fused.fuse(model, fused.torch_ops()).layers) == before


@torch.inference_mode()
def test_try_fuse_says_why_not_and_leaves_the_model(monkeypatch):
    model = small_model()
    blocks = list(model.layers)
    if DEVICE == "cpu":
        assert "cpu" in fused.try_fuse(model) and list(model.layers) == blocks
    monkeypatch.setattr(fused, "no_fusion", lambda model: None)
    monkeypatch.setattr(fused, "triton_ops", lambda: fused.Ops(lambda *a: 1 / 0, None, None))
    assert "ZeroDivisionError" in fused.try_fuse(model) and list(model.layers) == blocks

    def doubles(branch, residual, weight, eps):
        normed, summed = fused_reference.add_rms_norm(branch, residual, weight, eps)
        return normed * 2, summed

    wrong = fused.Ops(doubles, fused_reference.gated, None)
    monkeypatch.setattr(fused, "triton_ops", lambda: wrong)
    assert "away" in fused.try_fuse(model) and list(model.layers) == blocks
    monkeypatch.setattr(fused, "triton_ops", fused.torch_ops)
    assert fused.try_fuse(model) is None and isinstance(model.layers[0], fused.FusedBlock)


def test_traffic_counts_what_tensors_weigh():
    """The add-norm and the gate, from the sizes of the tensors that the operations read and write."""
    config, rows = small_model().config, 5
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(rows, config.hidden_size, dtype=dtype)
        w = torch.empty(config.hidden_size, dtype=dtype)
        gate = torch.empty(rows, config.intermediate_size, dtype=dtype)
        add_norm, gated, rope = fused.traffic(config, rows, dtype.itemsize)
        assert add_norm.unfused_bytes == 3 * x.nbytes + (2 * x.nbytes + w.nbytes)
        assert add_norm.fused_bytes == 4 * x.nbytes + w.nbytes and add_norm.saved == x.nbytes
        assert gated.unfused_bytes == 2 * gate.nbytes + 3 * gate.nbytes and gated.saved == 2 * gate.nbytes
        qk = torch.empty(rows, config.num_heads + config.num_kv_heads, config.head_dim, dtype=dtype)
        kv = torch.empty(rows, 2 * config.num_kv_heads, config.head_dim, dtype=dtype)
        table = torch.empty(rows, config.head_dim)
        wide = qk.float()
        operations = [
            (qk, table, wide),
            (qk, qk),
            (wide, qk, table, wide),
            (kv, kv),
        ]  # product, roll, addcmul, writes
        operations += [(wide, qk)] if dtype != torch.float32 else []
        assert rope.unfused_bytes == sum(t.nbytes for operation in operations for t in operation)
        assert rope.fused_bytes == 2 * (qk.nbytes + kv.nbytes // 2) + table.nbytes
        assert rope.unfused_launches == len(operations) + 1  # k and v are written by one launch each
