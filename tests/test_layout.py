"""Faster linears compute the same products."""

import pytest
import torch
from torch import nn

from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.layout import PackedLinear, UpcastLinear, pack_linears

SHAPES = [(1, 1), (3, 5), (64, 48), (192, 1024), (576, 5000)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("lead", [(1,), (2, 1), (2, 3), (40,)])
def test_packed_equals_float64(size, bias, lead):
    linear, x = make(size, bias), torch.randn(*lead, size[0], generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        got = PackedLinear(linear)(x)
    assert close(got, reference(linear, x), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("lead", [(1,), (2, 1), (2, 3), (40,)])
def test_upcast_rounds_once(size, bias, lead, dtype):
    """Against float64 on the same 16-bit weights: one rounding of the product, one of the bias sum (2^-8 each)."""
    linear = make(size, bias).to(dtype)
    x = torch.randn(*lead, size[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        got = UpcastLinear(linear)(x)
    assert got.dtype == dtype
    assert close(got, reference(linear, x), 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10)


def make(size, bias) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(*size, bias=bias).requires_grad_(False)


def reference(linear, x):
    y = x.double() @ linear.weight.double().T
    return y if linear.bias is None else y + linear.bias.double()


def close(got, expected, tolerance) -> bool:
    return got.shape == expected.shape and (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_packing_replaces_every_linear_and_keeps_tied_embeddings():
    config = ModelConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_length=32,
        tie_embeddings=True,
    )
    model = init_weights(Decoder(config)).eval().requires_grad_(False)
    tokens = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = model(tokens)
        after = pack_linears(model)(tokens)
    assert close(after, before, 1e-5)
    if torch.backends.mkldnn.is_available():
        assert not [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert model.embed.weight.shape == (101, 32)
