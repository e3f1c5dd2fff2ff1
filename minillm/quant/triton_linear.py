"""Weight-only linears for a GPU: the kernels of `kernels/matmul.py` behind a module.

Chapter 11. In Triton's interpreter, where there is no GPU, the same module gives the same values, without the speed.
"""

from __future__ import annotations

from torch import Tensor, nn

from minillm.quant.linear import QuantLinear


class TritonLinear(nn.Module):
    """The buffers of a QuantLinear, multiplied without unpacking them into memory. x [..., in] -> [..., out]."""

    def __init__(self, plain: QuantLinear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = plain.in_features, plain.out_features, plain.scheme
        self.register_buffer("packed", plain.packed)
        self.register_buffer("scale", plain.scale)
        self.register_buffer("zero", plain.zero)
        self.register_buffer("bias", plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        from minillm.kernels.matmul import dequant_matmul

        return dequant_matmul(x, self.packed, self.scale, self.zero, self.bias, self.scheme.bits)


def packed_for_triton(plain: QuantLinear) -> nn.Module | None:
    """The fast form of a QuantLinear on a GPU, or None where there is no kernel for its scheme."""
    from minillm.kernels.launch import why_not

    scheme = plain.scheme
    if why_not() is not None or scheme.bits not in (2, 4, 8) or plain.scale.dim() != 2:
        return None
    if scheme.granularity == "group":
        size = scheme.group_size * scheme.bits // 8
        if plain.scale.shape[1] > 1 and (size & (size - 1) or not 16 <= size <= 1024):
            return None
    return TritonLinear(plain)
