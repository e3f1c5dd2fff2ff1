"""How a linear layer's weights lie in memory: same numbers, another order, up to twice the speed on a CPU.

Chapter 02 (decode is bound by reading weights, so how they are read decides). torch's x @ W.T on a row-major W is one
dot product a row; oneDNN can instead read W in blocks that suit the vector registers. `pack_linears` rewrites each
float32 weight once into oneDNN's order, through the seam `replace_linears`. The operator is the one that
torch.compile emits for frozen weights on a CPU; where it is missing the model is left as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillm.model.decoder import Decoder, replace_linears


class PackedLinear(nn.Module):
    """y = x @ W.T + b with W in oneDNN's blocked order. x [..., in] float32 -> [..., out]. Inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(linear: nn.Linear) -> bool:
    weight = linear.weight
    ready = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return ready and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack_linears(model: Decoder) -> Decoder:
    """Pack every linear that can be packed, in place; the rest, and models on a GPU, stay as they are."""
    return replace_linears(model, lambda name, linear: PackedLinear(linear) if can_pack(linear) else None)
