"""How a linear layer's weights are read: same numbers, another order or precision of the sum, a faster CPU.

Chapter 02 (decode is bound by reading weights, so how they are read decides). Both classes go in through the seam
`replace_linears`, and only where they pay:

- float32, and 16 bits on a processor with instructions for them: torch's x @ W.T takes one dot product a row of W;
  oneDNN reads W in blocks that suit the vector registers. `PackedLinear` rewrites W once into that order. It calls
  the operator that torch.compile emits for frozen weights.
- 16 bits on a processor without such instructions: torch multiplies one row of x at a time. For more than a few rows
  `UpcastLinear` turns a slice of W into float32, multiplies, and goes to the next slice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.decoder import Decoder, replace_linears

SLICE_ELEMENTS = 1 << 20  # weights that are float32 at one time: 4 MB, less than a last-level cache
PACKED_FOR = 64  # rows that oneDNN chooses an order for; the one for 1 row takes up to twice as long from 2 rows on
FEW_ROWS = 8  # up to here torch's row-at-a-time product takes no more time than a conversion would

# What oneDNN can multiply, and the operator that says whether this processor has instructions for it (None: all do).
NATIVE = {
    torch.float32: None,
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


class PackedLinear(nn.Module):
    """y = x @ W.T + b with W in oneDNN's blocked order. x [..., in] in W's dtype -> [..., out]. Inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class UpcastLinear(nn.Module):
    """y = x @ W.T + b, W and x in 16 bits, products and sums in float32. x [..., in] -> [..., out] in x's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.rows = max(64, SLICE_ELEMENTS // linear.in_features // 64 * 64)  # rows of W a slice, in whole tiles

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() <= FEW_ROWS * self.in_features:
            return F.linear(x, self.weight, self.bias)
        wide = x.float()
        parts = [F.linear(wide, slice.float()).to(x.dtype) for slice in self.weight.split(self.rows)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)  # [..., out]
        return y if self.bias is None else y + self.bias


def faster_linear(linear: nn.Linear) -> nn.Module | None:
    """What to put in the place of this linear on this machine; None: nothing is faster."""
    weight = linear.weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_linear_pointwise") or weight.dtype not in NATIVE:
        return None
    return UpcastLinear(linear) if row_at_a_time(linear) else PackedLinear(linear)


def row_at_a_time(linear: nn.Module) -> bool:
    """Whether this is a linear of 16 bits on a processor without instructions for them."""
    native = NATIVE.get(linear.weight.dtype) if type(linear) is nn.Linear else None
    return native is not None and not getattr(torch.ops.mkldnn, native, lambda: False)()


def pack_linears(model: Decoder) -> Decoder:
    """Replace every linear for which this machine has a faster one, in place; models on a GPU stay as they are."""
    return replace_linears(model, lambda name, linear: faster_linear(linear))
