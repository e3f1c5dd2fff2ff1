"""Calibration and GPTQ: moments against float64 sums, GPTQ against brute force that inverts what is left of H."""

import pytest
import torch

from minillm.errors import ParamsError, PromptError
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.hub import ASSETS, is_available
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model
from minillm.quant.affine import Quantized, Scheme, fake_quantize, round_to
from minillm.quant.calibrate import InputStats, calibration_tokens, collect, gather, output_error, walk
from minillm.quant.gptq import as_method, gptq, gptq_model, inverse_factor
from minillm.quant.linear import linears, quantize_model, rtn, stored_parameters
from minillm.quant.qat import StraightThroughLinear, train_rounded
from minillm.quant.ungrid import ungrid

SMOLLM = "smollm2-135m"
SCHEMES = {
    "INT4 group 16": Scheme(4, False, "group", 16),
    "INT3 group 8 symmetric": Scheme(3, True, "group", 8),
    "INT2 row": Scheme(2, False),
    "INT4 tensor": Scheme(4, True, "tensor"),
}


@pytest.fixture(scope="module")
def text():
    return (ASSETS / "heldout.txt").read_text(encoding="utf-8")[:12000]


@pytest.fixture(scope="module")
def tokens(text):
    return torch.tensor(load_tokenizer("tiny").encode(text)[: 8 * 96]).view(8, 96)


def small_model(**changes):
    config = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)
    return init_weights(Decoder(ModelConfig(**{**config, "head_dim": 8, "max_length": 64, **changes}))).eval()


def problem(out=24, width=32, seed=0, tokens=400):
    """(weight, H) with correlated inputs, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator) @ torch.randn(width, width, generator=generator)
    x *= torch.rand(width, generator=generator) * 4 + 0.1
    return torch.randn(out, width, generator=generator), x.T @ x / tokens


def by_brute_force(weight, hessian, scheme, order, damping=0.01, static=False):
    """Optimal brain surgeon, no factorisation: after each column, invert what is left of H and change the rest."""
    w, width = weight.double().clone(), weight.shape[1]
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(width, dtype=torch.float64)
    size = scheme.block(weight.shape)
    whole = weight.reshape(1, -1) if scheme.granularity == "tensor" else weight.reshape(len(weight), -1, size)
    fixed, values = stored_parameters(whole, scheme), torch.zeros_like(weight)
    for place, j in enumerate(order):
        rest = order[place:]
        if scheme.granularity == "tensor":
            scale, zero = fixed[0].expand(len(w)), None
        elif static or size == width:
            scale, zero = (None if p is None else p[:, j // size] for p in fixed)
        elif j % size == 0:
            scale, zero = stored_parameters(w[:, j : j + size].float(), scheme)
        values[:, j] = round_to(w[:, j : j + 1].float(), scale, zero, scheme)[:, 0]
        rounded = (values[:, j] - (0 if zero is None else zero)) * scale
        inverse = torch.linalg.inv(h[rest][:, rest])
        w[:, rest] -= torch.outer(w[:, j] - rounded, inverse[0] / inverse[0, 0])
    return values


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_integers_equal_brute_force(name, act_order):
    for seed in range(3):
        weight, hessian = problem(seed=seed)
        order = hessian.diagonal().argsort(descending=True).tolist() if act_order else list(range(32))
        expected = by_brute_force(weight, hessian, SCHEMES[name], order, static=act_order)
        found = gptq(weight, hessian, SCHEMES[name], act_order=act_order)
        assert (found.values == expected).float().mean() > 0.995  # a tie may fall the other way in float32


@pytest.mark.parametrize("block", [1, 7, 32, 1000])
def test_lazy_updates_change_nothing(block):
    weight, hessian = problem(seed=4)
    for scheme in SCHEMES.values():
        expected = gptq(weight, hessian, scheme)
        found = gptq(weight, hessian, scheme, block=block)
        assert (found.values == expected.values).float().mean() > 0.995
        assert torch.allclose(found.scale, expected.scale, rtol=0.01)


def test_two_columns_have_a_closed_form():
    """min over the second weight of d^T H d with d = (e, w_2 - v): v = w_2 + e * H_12 / H_22, then rounded."""
    hessian = torch.tensor([[2.0, 1.2], [1.2, 1.0]])
    weight = torch.tensor([[0.36, 0.91], [-0.55, 0.20], [1.0, -1.0], [0.77, 0.4]])
    scheme = Scheme(4, True, "tensor")
    scale = float(gptq(weight, hessian, scheme).scale)
    error = weight[:, 0] - (weight[:, 0] / scale).round() * scale
    expected = ((weight[:, 1] + error * 1.2 / 1.0) / scale).round().clamp(-7, 7)
    found = gptq(weight, hessian, scheme, damping=0.0)
    assert found.values[:, 1].tolist() == expected.tolist()
    assert (expected != (weight[:, 1] / scale).round()).any()  # the case is one in which something is made up for


def test_without_correlation_gptq_is_rtn():
    weight, _ = problem()
    for scheme in SCHEMES.values():
        found, plain = gptq(weight, torch.diag(torch.rand(32) + 0.1), scheme), linear_rtn(weight, scheme)
        assert torch.equal(found.values, plain.values) and torch.equal(found.scale, plain.scale)


def linear_rtn(weight: torch.Tensor, scheme: Scheme) -> Quantized:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return rtn("", linear, scheme)


def test_the_factor_is_what_it_says():
    _, hessian = problem()
    upper = inverse_factor(hessian, 0.02).double()
    damped = hessian.double() + 0.02 * hessian.diagonal().mean() * torch.eye(32)
    assert torch.equal(upper, upper.triu())
    assert torch.allclose(upper.T @ upper @ damped, torch.eye(32, dtype=torch.float64), atol=1e-3)


def test_act_order_is_undone():
    """A permutation of the channels, weights and H together, permutes the result and changes no number of it."""
    weight, hessian = problem(seed=7)
    shuffle = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    scheme = Scheme(4, False)
    one = gptq(weight, hessian, scheme, act_order=True)
    other = gptq(weight[:, shuffle], hessian[shuffle][:, shuffle], scheme, act_order=True)
    assert (one.values[:, shuffle] == other.values).float().mean() > 0.995


def test_channels_that_were_never_on_are_rounded_to_the_nearest():
    weight, hessian = problem()
    hessian[5], hessian[:, 5] = 0, 0
    scheme = Scheme(3, False)
    for act_order in (False, True):
        found = gptq(weight, hessian, scheme, act_order=act_order)
        assert torch.equal(found.values[:, 5], linear_rtn(weight, scheme).values[:, 5])
    assert torch.equal(gptq(weight, torch.zeros(32, 32), scheme).values, linear_rtn(weight, scheme).values)


def test_more_inputs_than_tokens_need_damping():
    weight, hessian = problem(tokens=8)
    assert torch.isfinite(gptq(weight, hessian, SCHEMES["INT2 row"]).dequantize()).all()
    with pytest.raises(ParamsError, match="damping=0"):
        gptq(weight, hessian - 1e-3 * torch.eye(32), SCHEMES["INT2 row"], damping=0)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_layer_error_is_at_most_rtns_on_every_layer_of_tiny(tokens, bits):
    results = gptq_model(load_model("tiny", "float32", "cpu"), tokens, Scheme(bits, False, "group", 64))
    worse = {name: (r.error, r.rtn_error) for name, r in results.items() if r.error > r.rtn_error}
    assert len(results) == 24 and not worse, worse


@pytest.mark.skipif(not is_available(SMOLLM), reason=f"{SMOLLM} is not here; run: minillm pull {SMOLLM}")
def test_layer_error_is_below_rtns_in_blocks_of_smollm2(text):
    """The first, a middle and the last block, off the 4-bit grid of the file; all blocks: minillm bench gptq-awq."""
    model = ungrid(load_model(SMOLLM, "float32", "cpu"))
    tokens = torch.tensor(load_tokenizer(SMOLLM).encode(text)[:512]).view(4, 128)
    kept = ("head", *(f"layers.{i}.*" for i in range(1, 29) if i != 14))
    stats, chosen = collect(model, tokens, kept), linears(model, kept)
    assert len(chosen) == 12
    for name, linear in chosen.items():
        weight, hessian = linear.weight, stats[name].hessian
        for bits in (4, 3, 2):
            scheme = Scheme(bits, False, "group", 64)
            found, plain = (q.dequantize() for q in (gptq(weight, hessian, scheme), rtn("", linear, scheme)))
            assert output_error(weight - found, hessian) < output_error(weight - plain, hessian), (bits, name)


def test_moments_are_means_over_all_tokens():
    x = torch.randn(300, 12, generator=torch.Generator().manual_seed(0)) * 3
    stats = InputStats.empty(12)
    for part in x.split([1, 99, 120, 80]):
        stats.add(part.view(1, -1, 12))
    assert stats.count == 300
    assert torch.allclose(stats.hessian.double(), x.double().T @ x.double() / 300, atol=1e-4)
    assert torch.allclose(stats.mean_abs, x.abs().mean(0), atol=1e-5)
    change, s = torch.randn(5, 12), torch.rand(12) + 0.5
    expected = (x.double() @ change.double().T).square().sum(1).mean().item()
    assert output_error(change, stats.hessian) == pytest.approx(expected, rel=1e-4)
    again = InputStats.empty(12)
    again.add(x / s)
    assert torch.allclose(again.hessian, stats.rescaled(s).hessian, atol=1e-4)
    assert torch.allclose(again.mean_abs, stats.rescaled(s).mean_abs, atol=1e-5)


@torch.no_grad()
def test_the_walk_is_the_model_and_its_later_blocks_see_what_was_changed():
    model = small_model(windows=(None, 5), local_layers=(1,), rope_local_theta=500.0)
    tokens = torch.randint(50, (5, 20), generator=torch.Generator().manual_seed(0))
    whole = collect(model, tokens, batch=2)
    for name, part, run in walk(model, tokens, batch=3):
        for short, seen in gather(linears(part), run).items():
            assert torch.allclose(seen.hessian, whole[f"{name}.{short}"].hessian, atol=1e-5)
    expected = small_model(windows=(None, 5), local_layers=(1,), rope_local_theta=500.0)
    expected.layers[0].mlp.down.weight.mul_(3)
    for index, (_, part, run) in enumerate(walk(model, tokens)):
        seen = gather(linears(part), run)
        if index == 0:
            part.mlp.down.weight.mul_(3)
    changed = collect(expected, tokens)["layers.1.attn.qkv"].hessian
    assert torch.allclose(seen["attn.qkv"].hessian, changed, atol=1e-5)
    assert not torch.allclose(changed, whole["layers.1.attn.qkv"].hessian, atol=1e-3)


def test_results_pack_into_a_model_with_the_same_logits(tokens):
    scheme = Scheme(4, False, "group", 32)
    flat = load_model("tiny", "float32", "cpu")
    flat.layers = flat.layers[:2]
    results = gptq_model(flat, tokens[:4], scheme, keep=("head", "layers.0.*"))
    assert set(results) == {f"layers.1.{x}" for x in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")}
    packed = load_model("tiny", "float32", "cpu")
    packed.layers = packed.layers[:2]
    options = dict(bits=4, group_size=32, symmetric=False, keep=("head", "layers.0.*"), kernel="unpack")
    quantize_model(packed, as_method(results), **options)
    with torch.no_grad():
        assert torch.allclose(flat(tokens[:2]), packed(tokens[:2]), atol=1e-4)
    with pytest.raises(ParamsError, match="another scheme"):
        quantize_model(load_model("tiny", "float32", "cpu"), as_method(results), **{**options, "bits": 8})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda w, h: gptq(w, h[:4, :4], Scheme(4)), ParamsError, "in = 32"),
        (lambda w, h: gptq(w[0], h, Scheme(4)), ParamsError, "must be \\[out, in\\]"),
        (lambda w, h: gptq(w, h * float("nan"), Scheme(4)), ParamsError, "finite"),
        (lambda w, h: gptq(w, h, Scheme(4), damping=-1), ParamsError, "damping=-1"),
        (lambda w, h: gptq(w, h, Scheme(4), block=0), ParamsError, "block=0"),
        (lambda w, h: gptq(w, h, Scheme(4, True, "group", 5)), ParamsError, "group_size=5"),
        (lambda w, h: gptq_model(small_model(), [[1, 2]], Scheme(4), keep=("heads",)), ParamsError, "heads"),
        (lambda w, h: calibration_tokens(small_model(), [1, 2]), PromptError, "samples, length"),
        (lambda w, h: calibration_tokens(small_model(), [[1, 50]]), PromptError, "0 .. 49"),
        (lambda w, h: calibration_tokens(small_model(), torch.zeros(1, 65).long()), PromptError, "at most 64"),
    ],
)
def test_bad_input_is_one_clear_error(call, error, text):
    with pytest.raises(error, match=text):
        call(*problem())


def test_straight_through_is_rounding_forward_and_identity_backward():
    linear = torch.nn.Linear(16, 4)
    scheme = Scheme(2, False)
    module = StraightThroughLinear(linear, scheme)
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    out = module(x)
    assert torch.allclose(out, x @ fake_quantize(linear.weight.detach(), scheme).T + linear.bias, atol=1e-6)
    out.square().sum().backward()
    assert torch.allclose(module.weight.grad, 2 * out.detach().T @ x, atol=1e-4)


def test_training_through_rounding_brings_the_answers_back(tokens):
    """Two INT2 blocks learn to answer as the float model does; what is left are weights on the grid."""
    scheme = Scheme(2, False, "group", 64)
    teacher, student = (load_model("tiny", "float32", "cpu") for _ in range(2))
    for model in (teacher, student):
        model.layers = model.layers[:2]
    found, losses = train_rounded(student, teacher, tokens[:, :48], scheme, steps=12, batch=4)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert len(found) == 8
    for name, q in found.items():
        layer = student.get_submodule(name)
        assert type(layer) is torch.nn.Linear and not layer.weight.requires_grad
        assert torch.equal(layer.weight, q.dequantize())
    with pytest.raises(ParamsError, match="steps=0"):
        train_rounded(student, teacher, tokens, scheme, steps=0)
