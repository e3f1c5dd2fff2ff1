"""Residual add and RMSNorm in one kernel: read both inputs once, write the sum and its norm. Triton.

Chapter 10. RMSNorm, Zhang and Sennrich 2019 (arXiv:1910.07467).

Bytes that must move, for n rows of width w and b bytes a number: read branch and residual, write sum and normed,
4 n w b, and the weight, w b, once. As two kernels it is 3 n w b for the add and 2 n w b for the norm: the sum is
written, then read again. FLOPs: about 5 n w; far below any ridge, so the bytes are the time.

A row fits into one program's registers (up to 32768 numbers), so the row is read once although it is used twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import check_tensor, power_of_two, require_triton

WIDEST = 32768


@triton.jit
def add_rms_norm_kernel(
    branch, residual, weight, summed, normed, branch_row, residual_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_BRANCH: tl.constexpr,
):  # fmt: skip
    """One program: one row. Sums in float32; the sum is rounded to the residual's dtype before it is normed, as it
    would be if it went through memory."""
    row = tl.program_id(0).to(tl.int64)  # 64 bits: row x width can pass 2^31
    column = tl.arange(0, BLOCK)  # [BLOCK]
    inside = column < WIDTH
    x = tl.load(residual + row * residual_row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        x += tl.load(branch + row * branch_row + column, mask=inside, other=0.0).to(tl.float32)
        x = x.to(summed.dtype.element_ty)
        tl.store(summed + row * WIDTH + column, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * WIDTH + column, (x * scale * gain).to(normed.dtype.element_ty), mask=inside)


def add_rms_norm(branch: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm(residual + branch) * weight, residual + branch), each of residual's shape [..., width] and dtype.

    branch None: nothing is added, and the residual comes back as it is.
    """
    require_triton()
    width = residual.shape[-1] if residual.dim() else 0
    if not 1 <= width <= WIDEST:
        raise ParamsError(illegal("width", width, f"must be from 1 to {WIDEST}"))
    x = residual.reshape(-1, width)  # [rows, width]
    check_tensor("residual", x, [None, width])
    check_tensor("weight", weight, [width], device=x.device)
    if branch is not None:
        if branch.shape != residual.shape:
            raise ParamsError(illegal("branch.shape", list(branch.shape), f"must be {list(residual.shape)}"))
        branch = branch.reshape(-1, width)
        check_tensor("branch", branch, [len(x), width], dtypes=[x.dtype], device=x.device)
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    summed = normed if branch is None else torch.empty_like(normed)
    if len(x):
        block = power_of_two(width)
        add_rms_norm_kernel[(len(x),)](
            x if branch is None else branch, x, weight, summed, normed,
            0 if branch is None else branch.stride(0), x.stride(0), eps,
            WIDTH=width, BLOCK=block, HAS_BRANCH=branch is not None, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return normed.view(residual.shape), residual if branch is None else summed.view(residual.shape)
