"""SmoothQuant: exact before rounding in every family, scales by hand, outliers repaired, any fold undone."""

import copy

import pytest
import torch

from minillm import load_model
from minillm.errors import ParamsError
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.hub import ASSETS
from minillm.model.tokenizer import load_tokenizer
from minillm.quant.smoothquant import channel_maxima, inject_outliers, smooth_model, smoothing_scale
from minillm.quant.w8a8 import w8a8_model

FAMILIES = {
    "llama": {},
    "one KV head": dict(num_kv_heads=1),
    "MHA, biases": dict(num_kv_heads=4, qkv_bias=True, mlp_bias=True, out_bias=True),
    "Qwen2-like": dict(qkv_bias=True),
    "GPT-2": dict(
        norm_kind="layer",
        positions="learned",
        gated_mlp=False,
        activation="gelu_tanh",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
    "Gemma-like": dict(
        qk_norm=True, post_norms=True, activation="gelu_tanh", tie_embeddings=True, logit_softcap=30.0
    ),
}


@pytest.fixture(scope="module")
def tokens():
    text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")[:8000]
    return torch.tensor(load_tokenizer("tiny").encode(text)[: 8 * 64]).view(8, 64)


def small_model(**changes):
    config = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)
    model = init_weights(Decoder(ModelConfig(**{**config, "head_dim": 8, "max_length": 64, **changes}))).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(8) if parameter.dim() == 2 else parameter.uniform_(0.3, 2, generator=generator)
            if name.endswith("bias"):
                parameter.sub_(1)
    return model


def apart(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("sites", ["norms", "all"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_exact_before_rounding(family, alpha, sites):
    model = small_model(**FAMILIES[family])
    ids = torch.randint(50, (4, 24), generator=torch.Generator().manual_seed(0))
    before = model(ids)
    scales = smooth_model(model, channel_maxima(model, ids), alpha, sites)
    assert apart(model(ids), before) < 1e-5
    sites_a_block = 2 if sites == "norms" else 3 if family == "GPT-2" else 4
    assert len(scales) == 2 * sites_a_block
    assert all((s / s[0] - 1).abs().max() > 0.01 for s in scales.values())  # something was moved


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@torch.no_grad()
def test_after_smoothing_ranges_are_as_the_formula_says(alpha, tokens):
    model = load_model("tiny", "float32", "cpu")
    before = channel_maxima(model, tokens)
    columns = {name: model.get_submodule(name).weight.abs().amax(0) for name in before}
    scales = smooth_model(model, before, alpha)
    after = channel_maxima(model, tokens)
    assert set(scales) == {f"layers.{i}.{part}" for i in range(6) for part in ("attn.qkv", "mlp.gate_up")}
    for name, s in scales.items():
        by_hand = torch.tensor(
            [float(x) ** alpha / float(w) ** (1 - alpha) for x, w in zip(before[name], columns[name])]
        )
        assert torch.allclose(s, by_hand, rtol=1e-4)
        assert torch.allclose(after[name], before[name] / s, rtol=1e-3)
        assert torch.allclose(model.get_submodule(name).weight.abs().amax(0), columns[name] * s, rtol=1e-3)
        even = after[name] if alpha == 1 else columns[name] * s if alpha == 0 else None
        assert even is None or torch.allclose(even, torch.ones_like(even), rtol=1e-3)


@torch.no_grad()
def test_maxima_are_those_of_the_inputs(tokens):
    model, seen = load_model("tiny", "float32", "cpu"), []
    handle = model.layers[3].mlp.down.register_forward_pre_hook(lambda m, a: seen.append(a[0].flatten(0, -2)))
    found = channel_maxima(model, tokens, batch=3)
    handle.remove()
    assert len(found) == 24 and len(seen) == 3
    assert torch.equal(found["layers.3.mlp.down"], torch.cat(seen).abs().amax(0))
    assert not any(m._forward_pre_hooks for m in model.modules())


def kl(reference, model, ids):
    a, b = reference.log_softmax(-1), model(ids).log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1).mean().item()


@torch.no_grad()
def test_an_injected_outlier_hurts_and_smoothing_repairs(tokens):
    plain = load_model("tiny", "float32", "cpu")
    reference = plain(tokens)
    loud = inject_outliers(copy.deepcopy(plain), 60, channels=(5, 100))
    assert apart(loud(tokens), reference) < 1e-5
    maxima, quiet = channel_maxima(loud, tokens), channel_maxima(plain, tokens)
    name = "layers.2.attn.qkv"
    assert torch.allclose(maxima[name][[5, 100]], 60 * quiet[name][[5, 100]], rtol=1e-4)
    assert torch.allclose(maxima["layers.2.mlp.down"], quiet["layers.2.mlp.down"], rtol=1e-3)
    naive = kl(reference, w8a8_model(copy.deepcopy(loud)), tokens)
    smooth_model(loud, maxima, 0.5)
    repaired = kl(reference, w8a8_model(loud), tokens)
    before = kl(reference, w8a8_model(copy.deepcopy(plain)), tokens)
    assert naive > 20 * before and repaired < 1.5 * before


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@torch.no_grad()
def test_smoothing_undoes_any_fold(alpha, tokens):
    """x times f and W over f make s times f: two models of the same function become the same model."""
    plain = load_model("tiny", "float32", "cpu")
    loud = inject_outliers(copy.deepcopy(plain), 37.0, channels=(0, 9), layers=[1, 4])
    assert apart(loud.layers[4].attn.qkv.weight, plain.layers[4].attn.qkv.weight) > 0.01
    for model in (plain, loud):
        smooth_model(model, channel_maxima(model, tokens), alpha)
    for mine, theirs in zip(plain.parameters(), loud.parameters()):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_one_loud_channel_needs_an_alpha_between(tokens):
    """An outlier that the weights do not mirror: both ends of alpha lose."""
    from minillm.quant.affine import Scheme, fake_quantize

    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(300, 128, generator=generator), torch.randn(96, 128, generator=generator)
    x[:, 3] *= 100
    errors = {}
    for alpha in (0.0, 0.5, 1.0):
        s = smoothing_scale(x.abs().amax(0), w, alpha)
        q = fake_quantize(x / s, Scheme(8, True, "token")) @ fake_quantize(w * s, Scheme(8, True, "channel")).T
        errors[alpha] = (q - x @ w.T).square().mean().item()
    assert errors[0.5] < errors[0.0] / 10 and errors[0.5] < errors[1.0] / 10


def test_silent_and_unused_channels_are_left_alone():
    weight = torch.tensor([[1.0, 0.0, 2.0], [-3.0, 0.0, 0.5]])
    s = smoothing_scale(torch.tensor([0.0, 4.0, 8.0]), weight, 0.5)
    assert s.tolist() == pytest.approx([1.0, 1.0, 2.0])
    assert smoothing_scale(torch.tensor([9.0, 9.0, 9.0]), weight, 1.0).tolist() == pytest.approx([9.0, 1.0, 9.0])


def test_bad_input_is_one_clear_error(tokens):
    model = small_model()
    ids = torch.randint(50, (2, 8))
    maxima = channel_maxima(model, ids)
    weights = [p.clone() for p in model.parameters()]
    for call, text in (
        (lambda: smooth_model(model, maxima, 1.5), "alpha=1.5"),
        (lambda: smooth_model(model, maxima, True), "alpha=True"),
        (lambda: smooth_model(model, maxima, sites="some"), "sites='some'"),
        (lambda: smooth_model(model, {}), "maxima"),
        (lambda: smooth_model(model, {**maxima, "layers.1.mlp.gate_up": torch.ones(3)}), "32 channels"),
        (lambda: inject_outliers(model, 0), "factor=0"),
        (lambda: inject_outliers(model, 2.0, channels=(32,)), "channels"),
    ):
        with pytest.raises(ParamsError, match=text):
            call()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
