"""The Triton product with packed weights against float64 (in the interpreter where there is no GPU)."""

import pytest
import torch

from minillm import load_model
from minillm.errors import ParamsError
from minillm.kernels.launch import why_not
from minillm.quant.affine import Scheme
from minillm.quant.linear import QuantLinear, as_module, quantize_model, rtn
from minillm.quant.packing import pack
from minillm.quant.triton_linear import TritonLinear

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(outputs, inputs, bias=False):
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    linear.weight += 0.02  # so that zero points differ from the middle
    return linear.to(DEVICE)


@pytest.mark.parametrize("rows", [1, 3, 5, 33])
@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(8),
        Scheme(8, False),
        Scheme(4, True, "group", 32),
        Scheme(4, False, "group", 32),
        Scheme(4, False, "group", 64, "float"),
        Scheme(4, True, "channel"),
        Scheme(2, False, "group", 64),
    ],
    ids=lambda s: f"{s.bits}{'s' if s.symmetric else 'a'}{s.group_size or ''}{s.zero[0]}",
)
def test_equal_to_float64(rows, scheme):
    linear = make(70, 192, bias=rows != 5)
    q = rtn("", linear, scheme)
    module = as_module(q, linear.bias, kernel="triton")
    assert isinstance(module, TritonLinear)
    x = torch.randn(rows, 192, device=DEVICE)
    expected = x.double() @ q.dequantize().double().T
    if linear.bias is not None:
        expected = expected + linear.bias.double()
    assert (module(x).double() - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 20])
def test_16_bits_round_once(dtype, rows):
    linear = make(48, 256)
    q = rtn("", linear, Scheme(4, False, "group", 128))
    x = torch.randn(2, rows, 256, device=DEVICE).to(dtype)
    got = as_module(q, kernel="triton")(x)
    expected = x.double() @ q.dequantize().double().T
    assert got.dtype == dtype and got.shape == (2, rows, 48)
    step = 2**-7 if dtype == torch.bfloat16 else 2**-10  # a whole one: the interpreter cuts off where a GPU rounds
    assert (got.double() - expected).abs().max() <= expected.abs().max() * step


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (17, 40), (33, 576), (130, 1088)])
def test_sizes_that_fill_no_tile(outputs, inputs):
    linear = make(outputs, inputs)
    for bits in (8, 4):
        q = rtn("", linear, Scheme(bits))
        for rows in (1, 6):
            x = torch.randn(rows, inputs, device=DEVICE)
            expected = x.double() @ q.dequantize().double().T
            got = as_module(q, kernel="triton")(x)
            assert (got.double() - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_rows_with_a_stride_and_no_rows():
    linear = make(32, 64)
    q = rtn("", linear, Scheme(4, True, "group", 32))
    module = as_module(q, kernel="triton")
    wide = torch.randn(3, 128, device=DEVICE)
    assert torch.allclose(module(wide[:, 64:]), QuantLinear(q)(wide[:, 64:]), atol=1e-5)
    assert module(torch.empty(0, 64, device=DEVICE)).shape == (0, 32)


def test_in_a_model():
    model = lambda: load_model("tiny", dtype="float32", device=DEVICE)  # noqa: E731
    tokens = torch.tensor([[5, 77, 300]], device=DEVICE)
    logits = [
        quantize_model(model(), bits=4, keep=("head", "layers.[1-5].*"), kernel=kernel)(tokens)
        for kernel in ("unpack", "triton")
    ]
    assert torch.allclose(*logits, atol=1e-3)


def test_what_it_refuses():
    from minillm.kernels.matmul import dequant_matmul

    x, scale = torch.randn(2, 64, device=DEVICE), torch.ones(8, 2, device=DEVICE)
    packed = pack(torch.zeros(8, 64, dtype=torch.uint8, device=DEVICE), 4)
    for change, text in (
        (dict(bits=3), "bits=3"),
        (dict(bits=8), r"packed.shape=\[8, 32\]: must be \[any, 64\]"),
        (dict(x=x[:, :62]), r"packed.shape=\[8, 32\]: must be \[any, 31\]"),
        (dict(scale=torch.ones(7, 2, device=DEVICE)), "scale.shape"),
        (dict(scale=torch.ones(8, 3, device=DEVICE)), "scale.shape.1.=3: must divide the 32 bytes"),
        (dict(scale=torch.ones(8, 4, device=DEVICE)), "group bytes=8"),
        (dict(zero=torch.ones(8, 1, device=DEVICE)), "zero.shape"),
        (dict(bias=torch.ones(9, device=DEVICE)), "bias.shape"),
        (dict(packed=packed.to(torch.int32)), "packed.dtype"),
    ):
        with pytest.raises(ParamsError, match=text):
            dequant_matmul(**(dict(x=x, packed=packed, scale=scale) | change))
    linear = make(16, 96)
    with pytest.raises(ParamsError, match="kernel='triton': has no form for 3 bits"):
        as_module(rtn("", linear, Scheme(3)), kernel="triton")
