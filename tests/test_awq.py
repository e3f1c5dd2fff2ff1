"""AWQ: folding is exact, the searches find what brute force finds, and a salient channel is protected."""

import pytest
import torch

from minillm.errors import ParamsError
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.hub import ASSETS
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model
from minillm.quant.affine import Scheme, fake_quantize
from minillm.quant.awq import awq_model, folds, nearest, scale_of, search_clip, search_scale
from minillm.quant.calibrate import InputStats, collect, output_error
from minillm.quant.gptq import as_method
from minillm.quant.linear import quantize_model

GROUP = Scheme(4, False, "group", 16)
FAMILIES = {
    "llama": {},
    "one KV head": dict(num_kv_heads=1),
    "MHA, biases": dict(num_kv_heads=4, qkv_bias=True, mlp_bias=True, out_bias=True),
    "GPT-2": dict(norm_kind="layer", positions="learned", gated_mlp=False, activation="gelu_tanh", mlp_bias=True),
    "Gemma-like": dict(qk_norm=True, post_norms=True, activation="gelu_tanh", tie_embeddings=True),
}


@pytest.fixture(scope="module")
def tokens():
    text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")[:6000]
    return torch.tensor(load_tokenizer("tiny").encode(text)[: 8 * 64]).view(8, 64)


def small_model(**changes):
    config = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)
    model = init_weights(Decoder(ModelConfig(**{**config, "head_dim": 8, "max_length": 64, **changes}))).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # weights and gains of a size that a fold must get right to be exact
        for name, parameter in model.named_parameters():
            parameter.mul_(8) if parameter.dim() == 2 else parameter.uniform_(0.3, 2, generator=generator)
            if name.endswith("bias"):
                parameter.sub_(1)
    return model


def stats_of(x):
    stats = InputStats.empty(x.shape[-1])
    stats.add(x)
    return stats


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_is_exact_before_rounding(family):
    model = small_model(**FAMILIES[family])
    tokens = torch.randint(50, (4, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens)
        found = awq_model(model, tokens, Scheme(3, False, "group", 16), rounding=False)
        after = model(tokens)
    assert (after - before).abs().max() / before.abs().max() < 1e-5
    moved = [name for name, result in found.items() if not torch.allclose(result.scale, torch.ones(()))]
    assert len(found) == 8 and len(moved) >= 4, moved


@pytest.mark.parametrize("family", FAMILIES)
def test_any_scale_may_be_folded(family):
    """Not only those that a search would pick."""
    model, generator = small_model(**FAMILIES[family]), torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (2, 24), generator=generator)
    with torch.no_grad():
        before = model(tokens)
        for block in model.layers:
            for fold in folds(block):
                s = torch.rand(block.get_submodule(fold.linear).in_features, generator=generator) * 3 + 0.2
                shared = s.view(-1, fold.shared, fold.dim)[:, :1].expand(-1, fold.shared, -1).reshape(-1)
                fold.apply(block, shared)
        after = model(tokens)
    assert (after - before).abs().max() / before.abs().max() < 1e-5
    assert len(folds(model.layers[0])) == (3 if family == "GPT-2" else 4)


def test_the_model_of_the_course_folds_exactly(tokens):
    model = load_model("tiny", "float32", "cpu")
    with torch.no_grad():
        before = model(tokens[:2])
        awq_model(model, tokens, Scheme(4, False, "group", 64), rounding=False)
        after = model(tokens[:2])
    assert (after - before).abs().max() / before.abs().max() < 1e-5


def test_the_scale_is_found_among_all_alphas():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 32, generator=generator) * torch.logspace(-1, 1, 32)
    weight, stats = torch.randn(20, 32, generator=generator), stats_of(x)
    alpha, s, errors = search_scale(weight, stats, GROUP, grid=10)
    outputs = []
    for step in range(11):
        by_hand = x.abs().mean(0) ** (step / 10)
        by_hand = by_hand / (by_hand.max() * by_hand.min()).sqrt()
        rounded = nearest(weight * by_hand, GROUP).dequantize() / by_hand
        outputs.append((x.double() @ (weight - rounded).double().T).square().sum(1).mean().item())
    assert errors == pytest.approx(outputs, rel=1e-3)
    assert alpha == outputs.index(min(outputs)) / 10 and 0 < alpha < 1
    assert torch.allclose(s, scale_of(stats.mean_abs, alpha))
    assert torch.equal(scale_of(stats.mean_abs, 0.0), torch.ones(32))


def test_heads_that_share_a_kv_head_share_their_scale():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 24, generator=generator)
    x[:, 5] *= 40  # an outlier channel of the first group: a scale of all ones would be "shared" too
    _, s, _ = search_scale(torch.randn(8, 24, generator=generator), stats_of(x), Scheme(3, False), shared=3, dim=4)
    heads = s.view(2, 3, 4)
    assert torch.equal(heads[:, 0], heads[:, 1]) and torch.equal(heads[:, 0], heads[:, 2])
    assert not torch.equal(heads[0], heads[1])


def test_one_salient_channel_is_protected():
    """The paper's first observation: a channel with large inputs decides the error, and a scale mends it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 32, generator=generator)
    x[:, 3] *= 40
    weight, stats, scheme = torch.randn(64, 32, generator=generator), stats_of(x), Scheme(3, False, "group", 32)
    alpha, _, errors = search_scale(weight, stats, scheme)
    assert alpha > 0 and min(errors) < 0.5 * errors[0]


def test_clipping_is_the_best_of_its_grid_for_each_block():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(6, 32, generator=generator) ** 3, torch.randn(200, 32, generator=generator)
    scheme, hessian = Scheme(2, True, "group", 16), stats_of(x).hessian
    found = search_clip(weight, hessian, scheme, steps=10, lowest=0.5)
    for row in range(6):
        for group in range(2):
            part = slice(16 * group, 16 * group + 16)
            w, h = weight[row : row + 1, part], hessian[part, part]
            errors = []
            for step in range(10):
                share = 1 - 0.5 * step / 10
                rounded = nearest(w.clamp(w.min() * share, w.max() * share), scheme).dequantize()
                errors.append(output_error(w - rounded, h))
            mine = output_error(w - nearest(found[row : row + 1, part], scheme).dequantize(), h)
            assert mine == pytest.approx(min(errors), rel=1e-3)
    assert not torch.equal(found, weight)


@pytest.mark.parametrize("bits", [4, 3])
def test_tiny_loses_less_than_by_rounding(tokens, bits):
    scheme = Scheme(bits, False, "group", 64)
    model = load_model("tiny", "float32", "cpu")
    results = awq_model(model, tokens, scheme, clip=False)
    assert len(results) == 24
    assert all(result.error <= result.rtn_error * 1.001 for result in results.values())  # alpha = 0 is RTN
    assert sum(result.error for result in results.values()) < sum(r.rtn_error for r in results.values())
    for name, result in results.items():  # the weights in place are on the grid that the result describes
        assert torch.equal(model.get_submodule(name).weight, result.quantized.dequantize())


def test_known_moments_save_the_forwards_and_change_nothing(tokens):
    model, again = (load_model("tiny", "float32", "cpu") for _ in range(2))
    stats, scheme = collect(again, tokens), Scheme(3, False, "group", 64)
    for block in again.layers:
        block.register_forward_pre_hook(lambda *args: pytest.fail("a block was run"))
    one, other = awq_model(model, tokens, scheme), awq_model(again, tokens, scheme, stats=stats)
    assert {name: result.alpha for name, result in one.items()} == {name: r.alpha for name, r in other.items()}
    assert all(result.error == pytest.approx(other[name].error, rel=1e-3) for name, result in one.items())
    assert torch.allclose(model.layers[5].mlp.down.weight, again.layers[5].mlp.down.weight, atol=1e-3)


def test_layer_error_is_that_of_the_function_not_of_the_folded_weight(tokens):
    """Recompute it from outside: run the float linear and the folded one on the same inputs."""
    plain, changed = (load_model("tiny", "float32", "cpu") for _ in range(2))
    plain.layers, changed.layers = plain.layers[:1], changed.layers[:1]
    results = awq_model(changed, tokens, Scheme(3, False, "group", 64))
    seen = {}
    with torch.no_grad():
        plain.layers[0].attn.qkv.register_forward_pre_hook(lambda m, a: seen.update(x=a[0]))
        plain.hidden(tokens)
        x, result = seen["x"].flatten(0, 1), results["layers.0.attn.qkv"]
        y = x @ plain.layers[0].attn.qkv.weight.T
        first = 10 * 32  # V's rows were divided by attn.out's scale
        back = torch.cat((torch.ones(first), results["layers.0.attn.out"].scale.view(2, 4, 32)[:, 0].reshape(-1)))
        z = (x / result.scale) @ changed.layers[0].attn.qkv.weight.T * back
        assert result.error == pytest.approx(((y - z).square().sum() / y.square().sum()).item(), rel=1e-3)
        rounded = x @ fake_quantize(plain.layers[0].attn.qkv.weight, Scheme(3, False, "group", 64)).T
        expected = ((y - rounded).square().sum() / y.square().sum()).item()
        assert result.rtn_error == pytest.approx(expected, rel=0.05)  # its scales are kept in 16 bits


def test_results_pack_into_a_model_with_the_same_logits(tokens):
    scheme = Scheme(4, False, "group", 32)
    flat = load_model("tiny", "float32", "cpu")
    flat.layers = flat.layers[:2]
    results = awq_model(flat, tokens[:4], scheme)
    with torch.no_grad():
        expected = flat(tokens[:2])
        quantize_model(flat, as_method(results), bits=4, group_size=32, symmetric=False, kernel="unpack")
        assert torch.allclose(expected, flat(tokens[:2]), atol=1e-4)


def test_bad_input_is_one_clear_error(tokens):
    with pytest.raises(ParamsError, match="grid=0"):
        search_scale(torch.ones(2, 16), InputStats.empty(16), GROUP, grid=0)
    with pytest.raises(ParamsError, match="group_size=7"):
        awq_model(small_model(), [[1, 2, 3]], Scheme(4, False, "group", 7))
    with pytest.raises(ParamsError, match="typo"):
        awq_model(small_model(), [[1, 2, 3]], GROUP, keep=("typo",))
