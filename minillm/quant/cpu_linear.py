"""Weight-only linears for a CPU: torch's own kernels, which dequantise in registers while they multiply.

Chapter 11. Their vector code takes 16-bit activations; given float32 they fall back to a scalar loop that is slower
than no quantisation at all. So x is rounded to bfloat16 on the way in (8 significant bits; the A16 of W8A16), and the
result, rounded to bfloat16 by the kernel, goes back to x's type.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillm.quant.linear import QuantLinear
from minillm.quant.row_forms import Int4Words, Int8Rows, Int8Words, codes_of, narrow

INT4_GROUPS = (32, 64, 128, 256)
INT4_ROWS = 16  # out_features must be a multiple


class Int8Linear(nn.Module):
    """INT8 weights, one scale a row: bytes = out * in + 2 * out. x [..., in] -> [..., out]."""

    def __init__(self, plain: QuantLinear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = plain.in_features, plain.out_features, plain.scheme
        self.register_buffer("values", plain.quantized().values)  # int8 [out, in]
        self.register_buffer("scale", plain.scale.flatten())  # bfloat16 [out]
        self.register_buffer("bias", plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)  # [rows, in]
        y = torch._weight_int8pack_mm(rows, self.values, self.scale).to(x.dtype)  # [rows, out]
        return with_bias(y.view(*x.shape[:-1], self.out_features), self.bias)

    def row_form(self) -> nn.Module:
        words = narrow() and self.in_features % 4 == 0
        return (Int8Words if words else Int8Rows)(self.values, self.scale, self.bias)


class Int4Linear(nn.Module):
    """INT4 weights in groups: bytes = out * in / 2 + 4 * groups. x [..., in] -> [..., out].

    The kernel computes (code - 8) * scale + offset, so every group has both, symmetric or not.
    """

    def __init__(self, plain: QuantLinear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = plain.in_features, plain.out_features, plain.scheme
        q = plain.quantized()
        offset = torch.zeros_like(q.scale) if q.zero is None else (8 - q.zero) * q.scale  # [out, groups]
        both = torch.stack((q.scale, offset), -1).transpose(0, 1)  # [groups, out, 2]
        self.register_buffer("codes", torch._convert_weight_to_int4pack_for_cpu(q.codes().to(torch.int32), 1))
        self.register_buffer("scale_and_offset", both.to(torch.bfloat16).contiguous())
        self.register_buffer("bias", plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)  # [rows, in]
        group = self.scheme.group_size
        y = torch._weight_int4pack_mm_for_cpu(rows, self.codes, group, self.scale_and_offset).to(x.dtype)
        return with_bias(y.view(*x.shape[:-1], self.out_features), self.bias)

    def row_form(self) -> nn.Module | None:
        """A second copy of the codes, in an order of its own; None where torch's kernel is called instead."""
        if not narrow() or self.in_features % 64:
            return None
        codes = codes_of(self.codes, self.out_features, self.in_features)
        scale, offset = self.scale_and_offset.unbind(-1)  # [groups, out] each
        return None if codes is None else Int4Words(codes, scale.T, offset.T, self.bias)


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


def packed_for_cpu(plain: QuantLinear) -> nn.Module | None:
    """The fast form of a QuantLinear on a CPU, or None where torch has no kernel for its scheme."""
    scheme = plain.scheme
    if scheme.bits == 8 and scheme.symmetric and scheme.granularity == "channel":
        return Int8Linear(plain)
    grouped = scheme.granularity == "group" and scheme.group_size in INT4_GROUPS
    if scheme.bits == 4 and grouped and plain.out_features % INT4_ROWS == 0:
        return Int4Linear(plain)
    return None
