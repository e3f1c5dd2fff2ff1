"""FlashAttention in Triton: softmax(q @ k.T) @ v tile by tile, without ever storing q @ k.T.

Chapter 08. FlashAttention, Dao et al. 2022 (arXiv:2205.14135); FlashAttention-2, Dao 2023 (arXiv:2307.08691); online
softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867). `flash_reference` is the same in torch, line for line.

One program owns BLOCK_M queries of one head. It walks over the keys, BLOCK_N at a time, and keeps for each query the
largest score so far (m), the sum of 2^(score - m) (total; l in the papers) and the weighted sum of values (acc).

Bytes: q and the output once; k and v once for each tile of queries that sees them, so BLOCK_M times less often than
there are queries. FLOPs: 2 x (dim + v dim) for each query and key that it sees. What makes it fast:
- key blocks that no query of the tile sees are not visited; those that all see are visited without a mask;
- the softmax is in base 2 with log2(e) folded into the scale: one multiply-add and one exp2 a score;
- the longest tiles of a causal head start first, so that short ones fill the end;
- lengths are plain arguments: a new length compiles nothing.

float8 inputs are widened to float16 once they are on the chip: they halve the bytes, not the FLOPs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.flash_parts import LENGTHS, launch, locate, store_rows, tanh
from minillm.kernels.flash_plan import TileConfig, plan_attention
from minillm.kernels.launch import computable


@triton.jit
def load_tile(pointers, rows, columns, CHECK_ROWS: tl.constexpr, CHECK_COLUMNS: tl.constexpr):
    """A tile, 0 where a checked row or column lies outside; masks cost time, so only where asked for."""
    if CHECK_ROWS and CHECK_COLUMNS:
        x = tl.load(pointers, mask=rows & columns, other=0.0)
    elif CHECK_ROWS:
        x = tl.load(pointers, mask=rows, other=0.0)
    elif CHECK_COLUMNS:
        x = tl.load(pointers, mask=columns, other=0.0)
    else:
        x = tl.load(pointers)
    if x.dtype.primitive_bitwidth == 8:
        x = x.to(tl.float16)
    return x


@triton.jit
def over_keys(
    acc, m, total, q, k_pointer, v_pointer, start, stop, positions, length, window, scale, inner_scale,
    stride_kt, stride_vt,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Key blocks start, start + BLOCK_N .. < stop into (acc, m, total). positions [BLOCK_M, 1]: of the queries."""
    d, dv, n = tl.arange(0, D), tl.arange(0, DV), tl.arange(0, BLOCK_N)
    k_offsets = n[None, :] * stride_kt + d[:, None]  # [D, BLOCK_N]: a block of keys is transposed as it is read
    v_offsets = n[:, None] * stride_vt + dv[None, :]  # [BLOCK_N, DV]
    for block in range(start, stop, BLOCK_N):
        keys = block + n
        k = load_tile(k_pointer + k_offsets, d[:, None] < HEAD_DIM, keys[None, :] < length, D != HEAD_DIM, MASKED)
        s = tl.dot(q, k, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if SOFTCAP:
            s = tanh(s * inner_scale)
        if MASKED:
            seen = keys[None, :] < length
            if CAUSAL:
                seen = seen & (keys[None, :] <= positions)
            if WINDOW:
                seen = seen & (keys[None, :] > positions - window)
            s = tl.where(seen, s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1) * scale)  # [BLOCK_M]
        safe = tl.where(new_m == float("-inf"), 0.0, new_m) if MASKED else new_m  # a row that has seen nothing yet
        p = tl.exp2(s * scale - safe[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m - safe)  # [BLOCK_M], what the old sums are worth under the new maximum
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]  # [BLOCK_M, DV]
        v = load_tile(v_pointer + v_offsets, keys[:, None] < length, dv[None, :] < V_DIM, MASKED, DV != V_DIM)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = new_m
        k_pointer += BLOCK_N * stride_kt  # one address moves; a tensor of them would fill the registers
        v_pointer += BLOCK_N * stride_vt
    return acc, m, total, k_pointer, v_pointer


@triton.jit(do_not_specialize=LENGTHS)
def flash_kernel(
    q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, starts_q, starts_k,
    scale, inner_scale, v_scale, time, length, tiles, window, heads,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr, LSE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, time, length = locate(
        q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, starts_q, starts_k, time, length, tiles, heads,
        stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
        stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, GROUP, PACKED,
    )  # fmt: skip
    tile = tl.cdiv(time, BLOCK_M) - 1 - tl.program_id(0) % tiles  # the last tile sees most keys: it goes first
    if tile < 0:
        return
    first = tile * BLOCK_M
    last = tl.minimum(first + BLOCK_M, time) - 1
    shift = length - time  # query i stands at key position i + shift

    # Which keys: [low, high) are seen by some query, [full_low, full_high) by all of them.
    low, full_low, high, full_high = 0, 0, length, length // BLOCK_N * BLOCK_N
    if CAUSAL:
        high = tl.minimum(tl.maximum(last + shift + 1, 0), length)
        full_high = tl.minimum(tl.maximum(first + shift + 1, 0), length) // BLOCK_N * BLOCK_N
    if WINDOW:
        low = tl.minimum(tl.maximum(first + shift - window + 1, 0), high) // BLOCK_N * BLOCK_N
        full_low = tl.cdiv(tl.maximum(last + shift - window + 1, 0), BLOCK_N) * BLOCK_N
        full_low = tl.minimum(tl.maximum(full_low, low), high)
        full_high = tl.maximum(full_high, full_low)

    d = tl.arange(0, D)
    rows = (first + tl.arange(0, BLOCK_M))[:, None]  # [BLOCK_M, 1]
    q_pointers = q_pointer + rows.to(tl.int64) * stride_qt + d[None, :]
    q = load_tile(q_pointers, rows < time, d[None, :] < HEAD_DIM, True, D != HEAD_DIM)  # [BLOCK_M, D]
    if WINDOW:
        k_pointer += low.to(tl.int64) * stride_kt
        v_pointer += low.to(tl.int64) * stride_vt
    positions = rows + shift
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)

    if WINDOW:
        acc, m, total, k_pointer, v_pointer = over_keys(
            acc, m, total, q, k_pointer, v_pointer, low, full_low, positions, length, window, scale, inner_scale,
            stride_kt, stride_vt, HEAD_DIM, V_DIM, D, DV, BLOCK_N, CAUSAL, True, SOFTCAP, True, PRECISION,
        )  # fmt: skip
    acc, m, total, k_pointer, v_pointer = over_keys(
        acc, m, total, q, k_pointer, v_pointer, full_low, full_high, positions, length, window, scale, inner_scale,
        stride_kt, stride_vt, HEAD_DIM, V_DIM, D, DV, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, False, PRECISION,
    )  # fmt: skip
    acc, m, total, k_pointer, v_pointer = over_keys(
        acc, m, total, q, k_pointer, v_pointer, full_high, high, positions, length, window, scale, inner_scale,
        stride_kt, stride_vt, HEAD_DIM, V_DIM, D, DV, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, True, PRECISION,
    )  # fmt: skip
    store_rows(acc, m, total, out_pointer, lse_pointer, first, time, stride_ot, v_scale, V_DIM, DV, LSE, BLOCK_M)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    starts_q: Tensor | None = None,
    starts_k: Tensor | None = None,
    longest: int | None = None,
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    config: TileConfig | None = None,
    variant: str = "plain",
) -> Tensor | tuple[Tensor, Tensor]:
    """q [batch, time, heads, dim], k [batch, length, kv_heads, dim], v [batch, length, kv_heads, v dim] ->
    [batch, time, heads, v dim], and with return_lse the natural log-sum-exp [batch, heads, time] in float32.

    Packed: q [tokens, heads, dim] and k, v [tokens, kv_heads, .] hold sequences in a row; sequence b is rows
    starts_q[b] .. starts_q[b + 1] - 1 (int32, on the device: flash-attn's cu_seqlens), `longest` the most queries of
    one of them; the log-sum-exp is [heads, tokens]. Queries are the last of their sequence's keys (bottom-right).

    window: a query sees itself and the window - 1 tokens before it. scales: what float8 q, k, v are to be multiplied
    by. config: block sizes; None picks by dims, dtype and GPU. variant: "plain" is the kernel of this file, "hopper"
    that of `flash_hopper`, "auto" the second wherever it can run.
    """
    plan = plan_attention(
        q, k, v, scale, causal, window, softcap, starts_q, starts_k, longest, scales, out_dtype, config, variant
    )
    lse = torch.empty(plan.lse_shape if return_lse else (1,), dtype=torch.float32, device=q.device)
    out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=q.device)
    if plan.programs:
        q, k, v, target = (computable(x) for x in (q, k, v, out))
        if plan.variant == "hopper":
            from minillm.kernels.flash_hopper import launch_hopper

            launch_hopper(plan, q, k, v, target, lse, starts_q, starts_k, return_lse)
        else:
            # float32: three tensor-core passes, as exact as float32 sums are; 16 bits ignore it
            tensors = q, k, v, target, lse, starts_q, starts_k
            launch(flash_kernel, plan, *tensors, return_lse, PRECISION="tf32x3")
        out = target.to(out.dtype)
    return (out, lse) if return_lse else out
