"""W8A8: integer products exact, equal to float64 on the same integers, and tokens that do not meet in a scale."""

import copy

import pytest
import torch
from layer_oracle import worst_layer
from torch import nn

from minillm import load_model
from minillm.errors import ParamsError
from minillm.model.decoder import Decoder
from minillm.model.hub import ASSETS
from minillm.model.tokenizer import load_tokenizer
from minillm.quant.affine import Scheme, fake_quantize
from minillm.quant.linear import linears, model_bytes
from minillm.quant.smoothquant import channel_maxima
from minillm.quant.w8a8 import W8A8Linear, int8_matmul, w8a8_model


def int8(*shape, seed=0):
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


@pytest.mark.parametrize("kernel", ["auto", "unpack"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 7, 3), (5, 64, 48), (16, 30, 17), (17, 192, 40), (33, 1000, 9)])
def test_integer_products_are_exact(kernel, shape):
    m, k, n = shape
    a, w = int8(m, k), int8(n, k, seed=1)
    y = int8_matmul(a, w, kernel)
    assert y.dtype == torch.int32 and torch.equal(y.long(), a.long() @ w.long().T)


@pytest.mark.parametrize("kernel", ["auto", "unpack"])
@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("inputs", [1024, 1041, 70_001])
def test_long_sums_of_the_largest_values_are_exact(kernel, rows, inputs):
    """Float32 holds whole numbers up to 2^24 only: 1,040 products of 127 x 127, 1,024 of -128 x -128."""
    a = torch.full((rows, inputs), 127, dtype=torch.int8)
    assert (int8_matmul(a, -a, kernel) == -127 * 127 * inputs).all()
    a[:] = -128
    assert (int8_matmul(a, a, kernel) == 128 * 128 * inputs).all()
    assert int8_matmul(a[:0], a, kernel).shape == (0, rows)


def by_float64(linear, x, granularity):
    """The same round trips, products in float64."""
    rows = x.reshape(-1, x.shape[-1]).double()
    a = fake_quantize(rows, Scheme(8, True, granularity))
    w = fake_quantize(linear.weight.detach().double(), Scheme(8, True, "channel"))
    y = a @ w.T + (0 if linear.bias is None else linear.bias.detach().double())
    return y.view(*x.shape[:-1], -1)


@pytest.mark.parametrize("kernel", ["auto", "unpack"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inputs", ["token", "tensor"])
def test_a_linear_equals_float64_on_the_same_integers(inputs, bias, kernel):
    torch.manual_seed(0)
    for width, out, shape in ((64, 48, (2, 5)), (30, 7, (1,)), (192, 40, (3, 2, 4))):
        linear = nn.Linear(width, out, bias=bias)
        x = torch.randn(*shape, width) * 3
        got, right = W8A8Linear(linear, inputs, kernel=kernel)(x), by_float64(linear, x, inputs)
        assert got.shape == right.shape
        assert (got.double() - right).abs().max() <= 1e-3 * right.abs().max()  # a tie in float32 may fall elsewhere
        noise = ((got - linear(x)).square().mean() / linear(x).square().mean()).sqrt()
        assert noise < 0.02


def test_a_static_scale_clips_what_calibration_did_not_see():
    torch.manual_seed(0)
    linear, x = nn.Linear(32, 16, bias=False), torch.randn(4, 32).clamp(-2, 2)
    layer = W8A8Linear(linear, "static", largest=2.0)
    values, scale = layer.quantize_inputs(x * 5)
    assert scale.view(-1).tolist() == pytest.approx([2 / 127]) and int(values.abs().max()) == 127
    assert torch.equal(values, (x * 5 / (2 / 127)).round().clamp(-127, 127).to(torch.int8))
    assert torch.allclose(layer(x), linear(x), atol=0.06) and not torch.allclose(
        layer(5 * x), linear(5 * x), atol=0.5
    )
    assert torch.allclose(layer(x)[:1], layer(x[:1]), atol=1e-6)


def test_a_token_scale_keeps_tokens_apart_and_a_tensor_scale_does_not():
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32), torch.randn(8, 64)
    x[5] *= 1000
    token, tensor = W8A8Linear(linear, "token"), W8A8Linear(linear, "tensor")
    for rows in (1, 2, 3, 5):
        assert torch.equal(token(x)[:rows], token(x[:rows]))
    assert not torch.allclose(tensor(x)[:1], tensor(x[:1]), atol=0.01)


def test_bytes_dtypes_zeros_and_empty():
    torch.manual_seed(0)
    linear = nn.Linear(96, 48)
    layer = W8A8Linear(linear)
    assert model_bytes(layer) == 96 * 48 + 4 * 48 + 4 * 48
    assert torch.allclose(layer(torch.zeros(2, 96)), linear.bias.detach().expand(2, 48))
    assert layer(torch.zeros(0, 96)).shape == (0, 48) and layer(torch.zeros(2, 0, 96)).shape == (2, 0, 48)
    half = nn.Linear(96, 48).bfloat16()
    x = torch.randn(3, 96).bfloat16()
    y = W8A8Linear(half)(x)
    assert y.dtype == torch.bfloat16 and torch.allclose(y.float(), half(x).float(), atol=0.06)


@pytest.fixture(scope="module")
def tokens():
    text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")[:6000]
    return torch.tensor(load_tokenizer("tiny").encode(text)[: 4 * 64]).view(4, 64)


@torch.no_grad()
def test_each_layer_of_a_model_equals_float64_with_the_same_rounding(tokens):
    plain = load_model("tiny", "float32", "cpu")
    full = plain(tokens[:2])
    small = w8a8_model(copy.deepcopy(plain))
    assert sum(isinstance(m, W8A8Linear) for m in small.modules()) == 24 and isinstance(small.head, nn.Linear)
    weight = lambda linear: fake_quantize(linear.weight, Scheme(8, True, "channel"))  # noqa: E731
    row = lambda x: fake_quantize(x, Scheme(8, True, "token"))  # noqa: E731
    assert worst_layer(small, plain, tokens[:2], W8A8Linear, weight, row) < 1e-5
    assert ((small(tokens[:2]) - full).square().mean() / full.square().mean()).sqrt() < 0.02


@torch.no_grad()
def test_static_scales_come_from_calibration(tokens):
    model = load_model("tiny", "float32", "cpu")
    full = model(tokens[:2])
    maxima = channel_maxima(model, tokens)
    static = w8a8_model(copy.deepcopy(model), "static", maxima)
    layer = static.layers[1].mlp.down
    assert layer.step.item() == pytest.approx(maxima["layers.1.mlp.down"].max().item() / 127)
    assert ((static(tokens[:2]) - full).square().mean() / full.square().mean()).sqrt() < 0.1


def test_keep_and_illegal_models_change_nothing(tokens):
    model = load_model("tiny", "float32", "cpu")
    for arguments, text in (
        (dict(inputs="channel"), "inputs='channel'"),
        (dict(inputs="static"), "maxima"),
        (dict(maxima={}), "maxima"),
        (dict(inputs="static", maxima={"layers.0.attn.qkv": torch.ones(192)}), "lacks layers.0.attn.out"),
        (dict(keep=("haed",)), "keep='haed'"),
    ):
        with pytest.raises(ParamsError, match=text):
            w8a8_model(model, **arguments)
    assert len(linears(model)) == 25
    w8a8_model(model, keep=("head", "layers.*.mlp.down"))
    assert isinstance(model.layers[2].mlp.down, nn.Linear) and isinstance(model.layers[2].attn.qkv, W8A8Linear)
    with pytest.raises(ParamsError, match=r"a\.shape"):
        int8_matmul(int8(2, 8), int8(2, 9))
    with pytest.raises(ParamsError, match="must be int8"):
        int8_matmul(torch.ones(2, 8), int8(2, 8))
    with pytest.raises(ParamsError, match="largest"):
        W8A8Linear(nn.Linear(8, 8), "static")
    spoilt = nn.Linear(8, 8)
    spoilt.weight.data[0, 0] = float("nan")
    with pytest.raises(ParamsError, match="NaN"):
        W8A8Linear(spoilt)


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_llm_by_name(name):
    """Batched, paged and cached, the model says what its own naive loop says: a token's scale is its own. A rounding
    that ties may fall to the other side in another batch, so the token must be as good as the best by a hair."""
    from minillm import LLM, SamplingParams

    llm = LLM("tiny", dtype="float32", device="cpu", quantization=name)
    assert isinstance(llm.model, Decoder) and not any(isinstance(m, nn.Linear) for m in llm.model.modules())
    prompts = [[5, 90, 300, 7], [44, 1000, 3], [8] * 9]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    for prompt, output in zip(prompts, outputs):
        ids = torch.tensor([[*prompt, *output.token_ids[:-1]]])
        rows = llm.model(ids)[0, len(prompt) - 1 :]  # without a cache
        chosen = rows.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert ((rows.amax(-1) - chosen) <= 0.1).all()


def test_the_bench_checks_values_before_it_times(monkeypatch):
    from minillm.measure import gemm_bench

    names = [f.name for f in gemm_bench.bench_gemm(smoke=True)]
    assert names[:4] == [
        f"gemm.int8.{part}.64x32.rows17.{what}" for part in ("product", "layer") for what in ("ratio", "rate")
    ]
    linear, x = nn.Linear(64, 32, bias=False), torch.randn(5, 64)
    wrong = x @ linear.weight.detach().T * 1.1
    with pytest.raises(RuntimeError, match="not timed"):
        gemm_bench.check("int8", wrong, x @ linear.weight.detach().T)
