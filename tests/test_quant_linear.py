"""Quantised linears: equal to float64 on their own dequantised weights, the bytes of the formula, clear errors."""

import pytest
import torch
import torch._inductor.inductor_prims
from torch import nn

from minillm import load_model
from minillm.errors import ParamsError
from minillm.model.compiled import row_form
from minillm.quant.affine import Scheme, fake_quantize, quantize
from minillm.quant.cpu_linear import Int4Linear, Int8Linear
from minillm.quant.linear import QuantLinear, as_module, linears, model_bytes, quantize_model, rtn
from minillm.quant.row_forms import Int4Words, Int8Rows, Int8Words, codes_of, narrow

BFLOAT = 2.0**-8  # half a step of bfloat16, relative
LEADS = [(1,), (2, 1), (3, 5), (40,)]


def make(inputs=96, outputs=48, bias=True, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def product(x, weight, bias):
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [None, 32])
def test_unpacked_equals_float64(bits, symmetric, group):
    linear = make()
    scheme = Scheme(bits, symmetric, "channel" if group is None else "group", group)
    q = rtn("", linear, scheme)
    module = QuantLinear(q, linear.bias)
    assert torch.equal(module.weight(), q.dequantize())  # packing lost nothing
    x = torch.randn(3, 5, 96)
    assert torch.allclose(module(x).double(), product(x, q.dequantize(), linear.bias), atol=1e-5)
    blocks = 1 if group is None else 3
    zeros = 0 if symmetric else blocks * 48
    assert model_bytes(module) - linear.bias.nbytes == 48 * 96 * bits // 8 + 2 * blocks * 48 + zeros


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_kernel(lead, dtype, bias):
    linear = make(bias=bias).to(dtype)
    q = rtn("", linear, Scheme(8))
    module = as_module(q, linear.bias)
    assert isinstance(module, Int8Linear)
    x = torch.randn(*lead, 96, dtype=dtype)
    close(module(x), product(x.bfloat16(), q.dequantize(), linear.bias), 3 * BFLOAT)
    assert module(x).dtype == dtype
    assert model_bytes(module) == 48 * 96 + 2 * 48 + (linear.bias.nbytes if bias else 0)


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["symmetric", "integer", "float"])
@pytest.mark.parametrize("group", [32, 64])
def test_int4_kernel(lead, dtype, kind, group):
    linear = make(192, 64).to(dtype)
    linear.weight += 0.03  # so that zero points matter
    scheme = Scheme(4, kind == "symmetric", "group", group, "float" if kind == "float" else "integer")
    q = rtn("", linear, scheme)
    module = as_module(q, linear.bias)
    assert isinstance(module, Int4Linear)
    x = torch.randn(*lead, 192, dtype=dtype)
    close(module(x), product(x.bfloat16(), q.dequantize(), linear.bias), 4 * BFLOAT)
    assert model_bytes(module) - linear.bias.nbytes == 64 * 192 // 2 + 4 * 64 * 192 // group


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [1, 33, 48])
def test_int8_row_forms(rows, dtype, outputs):
    """Every byte, -128 too, which symmetric rounding never gives; only the last rounding is the type's."""
    values = torch.randint(-128, 128, (outputs, 96), dtype=torch.int8)
    values[0, :4] = torch.tensor([-128, -128, -128, -128])
    scale, x = torch.rand(outputs).bfloat16(), torch.randn(rows, 96, dtype=dtype)
    bias = torch.randn(outputs) if rows == 2 else None
    expected = product(x, values * scale.unsqueeze(-1).double(), bias)
    for form in (Int8Rows, Int8Words):
        got = form(values, scale, bias)(x)
        assert got.dtype == dtype
        close(got, expected, 1e-6 if dtype == torch.float32 else BFLOAT)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("group", [32, 64, 192])
@pytest.mark.parametrize("outputs", [1, 33, 64])
def test_int4_row_form(rows, offsets, group, outputs):
    codes = torch.randint(0, 16, (outputs, 192), dtype=torch.uint8)
    scale = torch.rand(outputs, 192 // group).bfloat16()
    offset = torch.randn(scale.shape).bfloat16() if offsets else torch.zeros_like(scale)
    each = [x.repeat_interleave(group, 1).double() for x in (scale, offset)]
    x, bias = torch.randn(rows, 192), torch.randn(outputs)
    form = Int4Words(codes, scale, offset, bias)
    assert (form.offset is None) == (not offsets)
    close(form(x), product(x, (codes.double() - 8) * each[0] + each[1], bias), 1e-6)


def test_codes_come_back_from_torchs_order():
    """Or None, where this processor has another order; a matrix that torch did not pack is never taken for one."""
    codes = torch.randint(0, 16, (64, 96), dtype=torch.int32)
    back = codes_of(torch._convert_weight_to_int4pack_for_cpu(codes, 1), 64, 96)
    assert torch.equal(back, codes) if narrow() else back is None or torch.equal(back, codes)
    assert codes_of(torch._convert_weight_to_int4pack_for_cpu(codes[:48], 1), 48, 96) is None  # no whole blocks


@pytest.mark.parametrize(("scheme", "outputs"), [(Scheme(8), 48), (Scheme(4, False, "group", 32), 64)])
def test_row_form_of_a_packed_linear(scheme, outputs):
    linear = make(192, outputs)
    q = rtn("", linear, scheme)
    form, x = row_form(as_module(q, linear.bias)), torch.randn(2, 192)
    if form is None:
        assert scheme.bits == 4 and not narrow()
    else:
        close(form(x), product(x, q.dequantize(), linear.bias), BFLOAT)  # the offsets of 4 bits are rounded


def close(got, expected, tolerance):
    assert got.shape == expected.shape
    assert (got.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_what_torch_has_no_kernel_for_is_unpacked():
    assert isinstance(as_module(rtn("", make(), Scheme(8, False))), QuantLinear)
    assert isinstance(as_module(rtn("", make(), Scheme(3, True, "group", 32))), QuantLinear)
    assert isinstance(as_module(rtn("", make(96, 50), Scheme(4, True, "group", 32))), QuantLinear)
    with pytest.raises(ParamsError, match=r"kernel='cpu'.*3 bits, group 32, \(48, 96\), on cpu"):
        as_module(rtn("", make(), Scheme(3, True, "group", 32)), kernel="cpu")


def test_scales_are_stored_as_they_were_used():
    """Two bytes a scale; the integers are chosen after the scale was rounded, so no weight is off by over half a step
    (a weight at the very end of the range apart, where the scale was rounded down)."""
    linear = make(256, 64)
    q = rtn("", linear, Scheme(8))
    assert torch.equal(q.scale.bfloat16().float(), q.scale)
    error = (q.dequantize() - linear.weight).abs() / q.scale
    assert error.max() <= 0.5 + 127 * BFLOAT and (error > 0.501).float().mean() < 0.01
    late = quantize(linear.weight, Scheme(8))
    late.scale = late.scale.bfloat16().float()
    assert (q.dequantize() - linear.weight).square().mean() <= (late.dequantize() - linear.weight).square().mean()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(3, 2048, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32), (3, 32)])
def test_a_whole_model_equals_its_fake_quantised_self(tokens, bits, group):
    """The kernels against the float model whose weights went through the round trip."""
    plain = load_model("tiny", dtype="float32", device="cpu")
    scheme = Scheme(bits, True, "channel" if group is None else "group", group)
    for linear in linears(plain, keep=("head",)).values():
        linear.weight.copy_(rtn("", linear, scheme).dequantize())
    expected = plain(tokens)
    for kernel, tolerance in (("unpack", 1e-5), ("auto", 0.03)):
        model = load_model("tiny", dtype="float32", device="cpu")
        quantize_model(model, bits=bits, group_size=group, kernel=kernel)
        got = model(tokens)
        error = ((got - expected).square().mean() / expected.square().mean()).sqrt()
        assert error <= tolerance, (kernel, error)
        assert isinstance(model.head, nn.Linear) and model.head.weight is model.embed.weight


def test_fewer_bits_are_fewer_bytes_and_more_error(tokens):
    model = load_model("tiny", dtype="float32", device="cpu")
    full, whole = model(tokens), model_bytes(model)
    sizes, errors = [whole], []
    for bits in (8, 4, 3, 2):
        small = quantize_model(load_model("tiny", dtype="float32", device="cpu"), bits=bits, kernel="unpack")
        sizes.append(model_bytes(small))
        errors.append((small(tokens) - full).square().mean().item())
    assert sizes == sorted(sizes, reverse=True) and errors == sorted(errors)
    weights = sum(m.weight.numel() for m in linears(model, keep=("head",)).values())
    assert sizes[0] - sizes[2] == weights * 4 - weights * 4.5 / 8


def test_keep_and_method(tokens):
    model = load_model("tiny", dtype="float32", device="cpu")
    seen = []

    def method(name, linear, scheme):
        seen.append(name)
        return rtn(name, linear, scheme)

    quantize_model(model, method, bits=4, keep=("head", "layers.0.*", "layers.*.mlp.down"))
    assert "layers.1.attn.qkv" in seen and not any("down" in n or "layers.0." in n or n == "head" for n in seen)
    assert isinstance(model.layers[0].attn.qkv, nn.Linear) and isinstance(model.layers[3].mlp.down, nn.Linear)
    assert len(seen) == 5 * 3


def test_illegal_models_change_nothing():
    model = load_model("tiny", dtype="float32", device="cpu")
    for arguments, text in (
        (dict(bits=1), "bits=1"),
        (dict(method="magic"), "method='magic'"),
        (dict(kernel="fast"), "kernel='fast'"),
        (dict(group_size=100), "group_size=100: must divide layers.0.attn.qkv's 192"),
        (dict(keep=("haed",)), "keep='haed'"),
        (dict(symmetric=1), "symmetric=1"),
    ):
        with pytest.raises(ParamsError, match=text):
            quantize_model(model, **arguments)
    assert len(linears(model)) == 6 * 4 + 1
    spoilt = make()
    spoilt.weight[0, 0] = float("nan")
    with pytest.raises(ParamsError, match="NaN"):
        as_module(rtn("", spoilt, Scheme(4, True, "group", 32)))
    with pytest.raises(ParamsError, match="multiple of 8 to be packed at 3 bits"):
        QuantLinear(quantize(torch.randn(4, 12), Scheme(3)))


def test_a_16_bit_model(tokens):
    model = load_model("tiny", dtype="bfloat16", device="cpu")
    full = model(tokens).float()
    got = quantize_model(model, bits=8, group_size=None)(tokens)
    assert got.dtype == torch.bfloat16
    assert ((got.float() - full).square().mean() / full.square().mean()).sqrt() < 0.05


def test_fake_quantize_is_the_same_arithmetic():
    linear = make()
    scheme = Scheme(4, True, "group", 32)
    q = quantize(linear.weight, scheme)
    assert torch.equal(q.dequantize(), fake_quantize(linear.weight, scheme))


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2"])
def test_llm_by_name(name):
    """Batched, paged and cached, the quantised model says what its own naive loop says.

    INT8 and INT4 round activations to bfloat16 on a CPU, so a near-tie may fall to the other side: there the token
    must be as good as the best by a hair. INT3 and INT2 compute in float32, and are equal."""
    from minillm import LLM, SamplingParams

    llm = LLM("tiny", dtype="float32", device="cpu", quantization=name)
    assert not any(isinstance(m, nn.Linear) for m in llm.model.modules())
    prompts = [[5, 90, 300, 7], [44, 1000, 3], [8] * 9]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    slack = 0.1 if name in ("int8", "int4") else 1e-3
    for prompt, output in zip(prompts, outputs):
        ids = torch.tensor([[*prompt, *output.token_ids[:-1]]])
        rows = llm.model(ids)[0, len(prompt) - 1 :]  # without a cache
        chosen = rows.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert ((rows.amax(-1) - chosen) <= slack).all()


def test_llm_refuses_before_it_loads():
    from minillm import LLM

    for wrong in ("int5", 4, True, ["int8"]):
        with pytest.raises(ParamsError, match="quantization="):
            LLM("no such model", quantization=wrong)


def test_rows_do_not_depend_on_their_batch():
    """A row's result is the same alone and among others, up to bfloat16's rounding: what batching relies on."""
    torch.manual_seed(0)
    x = torch.randn(40, 192)
    for scheme in (Scheme(8), Scheme(4, True, "group", 32)):
        module = as_module(rtn("", make(192, 64), scheme))
        whole = module(x)
        for rows in (1, 2, 3, 5, 17):
            close(module(x[:rows]), whole[:rows].double(), 2 * BFLOAT)
