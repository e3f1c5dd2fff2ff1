"""Matrix product with packed weights: codes are unpacked in registers, and never written to memory. Triton.

Chapter 11. W4A16 and W8A16, what GPTQ and AWQ serve their models with (arXiv:2210.17323, arXiv:2306.00978). y =
x @ W.T with x [rows, K] in 16 or 32 bits and W [N, K] as codes of 2, 4 or 8 bits, each group of a row with a scale s
and a zero point z:

    y[m, n] = sum over groups g of  s[n, g] * (sum over k in g of x[m, k] * (code[n, k] - z[n, g]))

The inner sum runs on small whole numbers, exact even in bfloat16; the scale comes after it, once a group.

Bytes that must move: N K bits / 8 of codes, 2 N K / group of scales (twice that with zero points), and x and y, small
at decode. FLOPs: 2 rows N K. At one row that is 4 FLOPs a byte at 4 bits: memory decides, so `vector_kernel` reads
long runs of a row and multiplies without tensor cores. With many rows arithmetic decides: `matrix_kernel` uses
`tl.dot` on tiles, and unpacking is work that a 16-bit weight would not need.

One byte holds PER = 8 / bits neighbours of a row. Unpacking them into one tile would need a shuffle; instead x is
read PER times, each time the columns that sit in the same place of their byte, and the products are added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import autotune, check_tensor, interpreted, power_of_two, require_triton

FEW_ROWS = 4  # up to here each row reads the weights by itself: they are still in the L2 cache for the next one
BITS = (2, 4, 8)
VECTOR_CONFIGS = [  # the first is the interpreter's: few programs
    triton.Config({"BLOCK_N": n, "BLOCK_BYTES": size}, num_warps=warps)
    for n, size, warps in ((64, 256, 4), (4, 512, 4), (8, 512, 4), (2, 1024, 4), (4, 1024, 8), (1, 2048, 4))
]
MATRIX_CONFIGS = [
    triton.Config({"BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for n, warps, stages in ((64, 4, 3), (32, 4, 4), (128, 4, 3), (128, 8, 3), (64, 4, 5))
]


@autotune(VECTOR_CONFIGS, key=["N", "BYTES", "INNER", "PER"])
@triton.jit
def vector_kernel(
    x, packed, scale, zero, bias, y, x_row, scale_row, N, BYTES,
    INNER: tl.constexpr, PER: tl.constexpr, GROUPED: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of one row. INNER: bytes of a group; BLOCK_BYTES of each weight row at a time."""
    GROUPS: tl.constexpr = BLOCK_BYTES // INNER
    WIDTH: tl.constexpr = 8 // PER
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    m = tl.program_id(1).to(tl.int64)
    inside = n < N
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, BYTES, BLOCK_BYTES):
        group = start // INNER + tl.arange(0, GROUPS)  # [GROUPS]
        place = group[:, None] * INNER + tl.arange(0, INNER)[None, :]  # [GROUPS, INNER], bytes of a row
        there = inside[:, None, None] & (place < BYTES)[None]  # [BLOCK_N, GROUPS, INNER]
        tile = tl.load(packed + n.to(tl.int64)[:, None, None] * BYTES + place[None], mask=there, other=0)
        dots = tl.zeros((BLOCK_N, GROUPS), tl.float32)
        sums = tl.zeros((GROUPS,), tl.float32)
        for i in tl.static_range(PER):
            part = tl.load(x + m * x_row + place * PER + i, mask=place < BYTES, other=0.0).to(tl.float32)
            code = ((tile >> (WIDTH * i)) & ((1 << WIDTH) - 1)).to(tl.float32)
            dots += tl.sum(code * part[None], 2)  # [BLOCK_N, GROUPS]
            sums += tl.sum(part, 1)  # [GROUPS]
        column = group if GROUPED else group * 0
        where = n.to(tl.int64)[:, None] * scale_row + column[None, :]  # [BLOCK_N, GROUPS]
        real = inside[:, None] & (group * INNER < BYTES)[None, :]
        s = tl.load(scale + where, mask=real, other=0.0).to(tl.float32)
        if HAS_ZERO:
            z = tl.load(zero + where, mask=real, other=0.0).to(tl.float32)
        else:
            z = tl.full((BLOCK_N, GROUPS), 1 << (WIDTH - 1), tl.float32)
        total += tl.sum(s * (dots - z * sums[None, :]), 1)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m * N + n, total.to(y.dtype.element_ty), mask=inside)


@autotune(MATRIX_CONFIGS, key=["N", "BYTES", "INNER", "PER", "BLOCK_M"])
@triton.jit
def matrix_kernel(
    x, packed, scale, zero, bias, y, x_row, scale_row, M, N, BYTES,
    INNER: tl.constexpr, PER: tl.constexpr, GROUPED: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: a tile [BLOCK_M, BLOCK_N] of y; a step of the loop: INNER bytes of each weight row, one group."""
    WIDTH: tl.constexpr = 8 // PER
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    x_at = x + m.to(tl.int64)[:, None] * x_row  # [BLOCK_M, 1]
    w_at = packed + n.to(tl.int64)[None, :] * BYTES  # [1, BLOCK_N]
    s_at = n.to(tl.int64) * scale_row  # [BLOCK_N]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, BYTES, INNER):
        place = start + tl.arange(0, INNER)  # [INNER]
        tile = tl.load(w_at + place[:, None], mask=(n < N)[None, :] & (place < BYTES)[:, None], other=0)
        column = start // INNER if GROUPED else 0
        s = tl.load(scale + s_at + column, mask=n < N, other=0.0).to(tl.float32)
        if HAS_ZERO:
            z = tl.load(zero + s_at + column, mask=n < N, other=0.0).to(tl.float32)
        else:
            z = tl.full((BLOCK_N,), 1 << (WIDTH - 1), tl.float32)
        dots = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in tl.static_range(PER):
            seen = (m < M)[:, None] & (place < BYTES)[None, :]
            part = tl.load(x_at + (place * PER + i)[None, :], mask=seen, other=0.0)  # [BLOCK_M, INNER]
            if UPCAST:
                part = part.to(tl.float32)
            code = ((tile >> (WIDTH * i)) & ((1 << WIDTH) - 1)).to(tl.float32) - z[None, :]  # [INNER, BLOCK_N]
            dots = tl.dot(part, code.to(part.dtype), dots, input_precision="ieee")
        total += dots * s[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def dequant_matmul(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    bits: int = 4,
) -> Tensor:
    """x [..., K], packed uint8 [N, K * bits / 8], scale and zero [N, groups], bias [N] -> [..., N] in x's dtype.

    zero: any type; None: codes are values + 2^(bits - 1). The groups split a row evenly; more than one: each must be
    a power of two of bytes, 16 at least, so that a step of the loops meets a single scale.
    """
    require_triton()
    width = x.shape[-1] if x.dim() else 0
    rows = x.reshape(-1, width)  # [M, K]
    check(rows, packed, scale, zero, bias, bits)
    (count, size), outputs, groups = rows.shape, packed.shape[0], scale.shape[1]
    y = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    if not count:
        return y.view(*x.shape[:-1], outputs)
    inner = size * bits // 8 // groups if groups > 1 else 64
    arguments = (rows, packed, scale, scale if zero is None else zero, scale if bias is None else bias, y)
    sizes = (rows.stride(0), scale.stride(0))
    flags = dict(INNER=inner, PER=8 // bits, GROUPED=groups > 1, HAS_ZERO=zero is not None, HAS_BIAS=bias is not None)
    if count <= FEW_ROWS and inner <= 256:
        grid = lambda meta: (triton.cdiv(outputs, meta["BLOCK_N"]), count)  # noqa: E731
        vector_kernel[grid](*arguments, *sizes, outputs, packed.shape[1], **flags)
    else:
        flags |= dict(UPCAST=interpreted(), BLOCK_M=min(128, power_of_two(count)))
        grid = lambda meta: (triton.cdiv(count, meta["BLOCK_M"]), triton.cdiv(outputs, meta["BLOCK_N"]))  # noqa: E731
        matrix_kernel[grid](*arguments, *sizes, count, outputs, packed.shape[1], **flags)
    return y.view(*x.shape[:-1], outputs)


def check(x: Tensor, packed: Tensor, scale: Tensor, zero, bias, bits: int) -> None:
    if bits not in BITS:
        raise ParamsError(illegal("bits", bits, "must be 2, 4 or 8"))
    width, device = x.shape[1], x.device
    if not width or width * bits % 8:
        raise ParamsError(illegal("x.shape[-1]", width, f"must fill whole bytes at {bits} bits"))
    check_tensor("x", x, [None, width])
    check_tensor("packed", packed, [None, width * bits // 8], dtypes=[torch.uint8], device=device)
    outputs = packed.shape[0]
    check_tensor("scale", scale, [outputs, None], device=device)
    groups, size = scale.shape[1], width * bits // 8  # bytes of a row
    if not groups or size % groups:
        raise ParamsError(illegal("scale.shape[1]", groups, f"must divide the {size} bytes of a row"))
    inner = size // groups
    if groups > 1 and (inner & (inner - 1) or not 16 <= inner <= 1024):
        legal = "a group must be a power of two of bytes, from 16 to 1024"
        raise ParamsError(illegal("group bytes", inner, legal))
    if not packed.is_contiguous():
        raise ParamsError(illegal("packed.stride()", packed.stride(), "must be contiguous"))
    if zero is not None:
        check_tensor("zero", zero, [outputs, groups], dtypes=[torch.uint8, *scale_types()], device=device)
        if zero.stride(0) != scale.stride(0):
            raise ParamsError(illegal("zero.stride(0)", zero.stride(0), f"must be scale's, {scale.stride(0)}"))
    if bias is not None:
        check_tensor("bias", bias, [outputs], device=device)


def scale_types() -> tuple[torch.dtype, ...]:
    return torch.float32, torch.bfloat16, torch.float16
