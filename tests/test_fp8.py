"""FP8: the cast by hand is torch's on every bfloat16 value, scales put back, products exact but for the sum."""

import math

import pytest
import torch
from layer_oracle import worst_layer
from torch import nn

from minillm import load_model
from minillm.errors import ParamsError
from minillm.quant import fp8
from minillm.quant.fp8 import E4M3, E5M2, FP8Linear, cast, cast_by_hand, quantize_fp8, scaled_matmul, why_emulated
from minillm.quant.linear import model_bytes

BOTH = pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
LAST = {"e4m3": 464.0, "e5m2": 61440.0}  # half a step above the largest number: from here on casts differ


def every_bfloat16():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bits(x):
    return x.view(torch.uint8)


@BOTH
def test_the_cast_by_hand_is_torchs_on_every_bfloat16_value(form):
    x = every_bfloat16()
    mine, nan = cast_by_hand(x, form), x.isnan()
    inside = x.float().abs() < LAST[form.name]
    assert int(inside.sum()) > 30000
    assert torch.equal(mine[inside], bits(x.to(form.dtype))[inside])  # torch's cast as it is, no clamp of ours
    assert torch.equal(mine[~nan], bits(cast(x, form))[~nan])
    assert bits(cast(x, form))[nan].view(form.dtype).float().isnan().all()
    assert mine[nan].view(form.dtype).float().isnan().all()
    beyond = mine[~inside & ~nan].view(form.dtype).float()
    assert torch.equal(beyond, form.largest * x[~inside & ~nan].float().sign())  # saturates, infinity too


@BOTH
def test_the_cast_by_hand_is_torchs_on_random_floats(form):
    """All exponents of float32, its subnormal numbers, exact ties, and float16."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (400_000,), generator=generator).to(torch.int32).view(torch.float32)
    inside = torch.exp2(torch.rand(400_000, generator=generator) * 40 - 24) * (
        1 - 2 * torch.randint(2, (400_000,), generator=generator)
    )
    numbers = fp8.numbers(form)
    ties = (numbers[1:] + numbers[:-1]) / 2  # exact in float32
    for x in (any_bits, inside, ties, -ties, numbers, torch.nextafter(ties, ties + 1), inside.half()):
        right, mine = bits(cast(x, form)), cast_by_hand(x, form)
        assert torch.equal(mine[~x.isnan()], right[~x.isnan()])
    assert torch.equal(cast_by_hand(torch.tensor([0.0, -0.0]), form), torch.tensor([0, 128], dtype=torch.uint8))


@BOTH
def test_the_format_is_what_its_docstring_says(form):
    numbers, info = fp8.numbers(form), torch.finfo(form.dtype)
    assert numbers[-1] == form.largest == info.max and info.smallest_normal == 2.0**form.least
    assert numbers[1] == 2.0 ** (form.least - form.mantissa)
    assert len(numbers) == {"e4m3": 127, "e5m2": 124}[form.name]
    assert torch.equal(cast(numbers, form).float(), numbers)
    x = torch.exp2(torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 14 + form.least)
    x = x.clamp(max=form.largest)
    relative = ((cast(x, form).float() - x).abs() / x).max().item()
    assert 0.98 < relative * (2 * form.steps + 1) <= 1.0001  # 1/17 for E4M3: a tie just above a power of two


@BOTH
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_round_trip_stays_within_the_bound(form, granularity):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(17, 40, generator=generator) * torch.logspace(-3, 3, 17)[:, None]
    q = quantize_fp8(x, form, granularity)
    assert q.values.dtype == form.dtype and q.scale.shape == ((17, 1) if granularity == "row" else (1, 1))
    error = (q.dequantize() - x).abs()
    finest = q.scale * 2.0 ** (form.least - form.mantissa)
    assert (error <= torch.maximum(x.abs() / (2 * form.steps) * 1.0001, finest * 0.5001)).all()
    top = q.dequantize().abs().amax(1) if granularity == "row" else q.dequantize().abs().amax()
    assert torch.allclose(top, x.abs().amax(1) if granularity == "row" else x.abs().amax())


def test_zeros_empty_and_huge_rows():
    for granularity in ("row", "tensor"):
        assert torch.equal(quantize_fp8(torch.zeros(3, 8), E4M3, granularity).dequantize(), torch.zeros(3, 8))
        huge = torch.full((2, 8), 3e38)
        assert torch.allclose(quantize_fp8(huge, E4M3, granularity).dequantize(), huge)
        empty = quantize_fp8(torch.zeros(0, 8), E4M3, granularity)
        w = quantize_fp8(torch.ones(4, 8), E4M3, granularity)
        assert scaled_matmul(empty, w).shape == (0, 4)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize(("inputs", "weights"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
def test_a_product_equals_float64_on_its_own_values(granularity, inputs, weights):
    generator = torch.Generator().manual_seed(1)
    a = quantize_fp8(torch.randn(9, 64, generator=generator) * 5, inputs, granularity)
    w = quantize_fp8(torch.randn(32, 64, generator=generator), weights, granularity)
    exact = a.dequantize().double() @ w.dequantize().double().T
    got = scaled_matmul(a, w, torch.float32)
    limit = 1e-5 if why_emulated(got.device, a, w) else 0.01
    assert (got.double() - exact).abs().max() <= limit * exact.abs().max()
    assert scaled_matmul(a, w, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.skipif(not hasattr(torch, "_scaled_mm"), reason="this torch has no _scaled_mm")
def test_torchs_scaled_product_on_this_device_agrees_with_the_emulated_one():
    generator = torch.Generator().manual_seed(1)
    a = quantize_fp8(torch.randn(32, 64, generator=generator), E4M3, "tensor")
    w = quantize_fp8(torch.randn(48, 64, generator=generator), E4M3, "tensor")
    try:
        theirs = torch._scaled_mm(a.values, w.values.T, a.scale.view(()), w.scale.view(()), out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"_scaled_mm: {error}")
    mine = scaled_matmul(a, w, torch.float32, emulate=True)
    assert (theirs.float() - mine).abs().max() <= 2**-8 * mine.abs().max()


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@BOTH
def test_a_linear_is_close_and_holds_the_bytes_of_the_formula(form, granularity):
    torch.manual_seed(0)
    linear = nn.Linear(96, 48)
    x = torch.randn(2, 5, 96)
    layer = FP8Linear(linear, form, granularity)
    y, right = layer(x), linear(x)
    assert y.shape == right.shape and y.dtype == x.dtype
    noise = ((y - right).square().mean() / right.square().mean()).sqrt().item()
    assert noise < {"e4m3": 0.045, "e5m2": 0.09}[form.name] and noise > 0.005
    scales = 48 if granularity == "row" else 1
    assert model_bytes(layer) == 48 * 96 + 4 * scales + 4 * 48  # and the bias as it was
    assert layer(x[:0]).shape == (0, 5, 48)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    exact = quantize_fp8(x.view(-1, 96), form, granularity).dequantize() @ layer.weight_scaled.dequantize().T
    assert torch.allclose(y.view(-1, 48), exact + linear.bias, atol=1e-4)


def test_a_token_with_a_scale_of_its_own_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32), torch.randn(6, 64)
    x[3] *= 1e4
    row, tensor = FP8Linear(linear, E4M3, "row"), FP8Linear(linear, E4M3, "tensor")
    assert torch.allclose(row(x)[:1], row(x[:1]), rtol=1e-5)
    assert not torch.allclose(tensor(x)[:1], tensor(x[:1]), rtol=1e-3)


def test_an_outlier_hurts_integers_more_than_floats():
    from minillm.quant.affine import Scheme, fake_quantize

    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    errors = {}
    for factor in (1, 100):
        x[:, 7] *= factor
        rest = torch.arange(512) != 7
        for name, y in (("int8", fake_quantize(x, Scheme(8, True, "token"))), ("fp8", quantize_fp8(x).dequantize())):
            errors[name, factor] = (y - x)[:, rest].square().mean().sqrt().item()
    assert errors["int8", 1] < errors["fp8", 1] / 2  # without outliers integers are finer
    assert errors["int8", 100] > 5 * errors["fp8", 100]
    assert errors["fp8", 100] < 1.3 * errors["fp8", 1]


def test_it_says_why_it_is_emulated(monkeypatch):
    a, w = (quantize_fp8(torch.randn(n, 64), E4M3, "row") for n in (4, 32))
    whole = [quantize_fp8(torch.randn(n, 64), E4M3, "tensor") for n in (4, 32)]
    assert "cpu" in why_emulated("cpu") and "cpu" in why_emulated("cpu", a, w)
    cuda = torch.device("cuda")
    for capability, rows, one in (((9, 0), None, None), ((8, 9), "9.0", None), ((8, 0), "9.0", "8.9")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        for found, word in ((why_emulated(cuda, a, w), rows), (why_emulated(cuda, *whole), one)):
            assert (found is None) if word is None else word in found
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    wide = quantize_fp8(torch.randn(32, 64), E5M2, "row")
    assert "E5M2 by E5M2" in why_emulated(cuda, wide, wide)
    assert why_emulated(cuda, wide, w) is None and "E4M3 weights" in why_emulated(cuda, a, wide)
    odd = quantize_fp8(torch.randn(32, 60), E4M3, "row")
    assert "multiples of 16" in why_emulated(cuda, odd, odd)
    assert "both" in why_emulated(cuda, a, whole[1])
    assert "cpu" in FP8Linear(nn.Linear(16, 16)).emulated
    assert FP8Linear(nn.Linear(16, 16), emulate=True).emulated == "asked for"


def test_each_layer_of_a_model_equals_float64_with_the_same_rounding():
    tokens = torch.randint(3, 2048, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = load_model("tiny", "float32", "cpu")
        full = plain(tokens)
        small = load_model("tiny", "float32", "cpu")
        fp8.fp8_model(small)
        assert isinstance(small.head, nn.Linear) and sum(isinstance(m, FP8Linear) for m in small.modules()) == 24
        got = small(tokens)
        rounded = lambda x: quantize_fp8(x).dequantize()  # noqa: E731
        assert worst_layer(small, plain, tokens, FP8Linear, fp8.weight_only, rounded) < 1e-5
    error = ((got - full).square().mean() / full.square().mean()).sqrt().item()
    assert 0.001 < error < 0.1 and math.isfinite(error)


def test_bad_input_is_one_clear_error():
    for arguments, text in (
        ((torch.ones(2, 4), "e3m4"), "form='e3m4'"),
        ((torch.ones(2, 4), "e4m3", "column"), "granularity='column'"),
        ((torch.ones(4), "e4m3"), "rows, n"),
        ((torch.ones(2, 4, dtype=torch.int32), "e4m3"), "floating-point"),
    ):
        with pytest.raises(ParamsError, match=text):
            quantize_fp8(*arguments)
    model = load_model("tiny", "float32", "cpu")
    for arguments, text in (
        (dict(form="fp8"), "form='fp8'"),
        (dict(granularity="token"), "granularity"),
        (dict(keep="x"), "keep"),
    ):
        with pytest.raises(ParamsError, match=text):
            fp8.fp8_model(model, **arguments)
    assert not any(isinstance(m, FP8Linear) for m in model.modules())
    spoilt = nn.Linear(16, 16)
    with torch.no_grad():
        spoilt.weight[0, 0] = float("inf")
    with pytest.raises(ParamsError, match="infinity"):
        FP8Linear(spoilt)
