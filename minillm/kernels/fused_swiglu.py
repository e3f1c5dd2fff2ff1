"""The gate of an MLP in one kernel: act(gate) * up, straight from the rows of the fused gate-and-up product. Triton.

Chapter 10. Gated MLPs, Shazeer 2020 (arXiv:2002.05202).

Bytes that must move, for n rows, f inner features, b bytes a number: read 2 n f b, write n f b. As two kernels:
read n f b and write n f b for the activation, then read 2 n f b and write n f b for the product, 5 n f b in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import check_tensor, require_triton

BLOCK = 1024
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@triton.jit
def gated_kernel(gate_up, out, row_stride, FEATURES: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK features of one row. act(gate) stays in float32: one rounding less than through memory."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = feature < FEATURES
    gate = tl.load(gate_up + row * row_stride + feature, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + FEATURES + feature, mask=inside, other=0.0).to(tl.float32)
    if ACT == 0:
        gate = gate * tl.sigmoid(gate)
    elif ACT == 1:  # 0.5 x (1 + tanh(z)) = x sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    tl.store(out + row * FEATURES + feature, (gate * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """gate_up [..., 2 features], gate first -> act(gate) * up, [..., features], in gate_up's dtype."""
    require_triton()
    if activation not in ACTIVATIONS:
        raise ParamsError(illegal("activation", activation, f"must be one of {', '.join(ACTIVATIONS)}"))
    width = gate_up.shape[-1] if gate_up.dim() else 0
    if width < 2 or width % 2:
        raise ParamsError(illegal("gate_up.shape[-1]", width, "must be even, gate and up side by side"))
    features, x = width // 2, gate_up.reshape(-1, width)  # [rows, 2 features]
    check_tensor("gate_up", x, [None, width])
    out = torch.empty(len(x), features, dtype=x.dtype, device=x.device)
    if len(x):
        grid = (len(x), triton.cdiv(features, BLOCK))
        gated_kernel[grid](x, out, x.stride(0), FEATURES=features, ACT=ACTIVATIONS[activation], BLOCK=BLOCK)
    return out.view(*gate_up.shape[:-1], features)
