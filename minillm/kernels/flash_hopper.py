"""FlashAttention for Hopper: the loop of `flash_attention` fed by TMA, one group of warps to load, two to multiply.

Chapter 08. FlashAttention-3, Shah et al. 2024 (arXiv:2407.08608). Same arguments, same values; only how tiles come
onto the chip and who does what differ from the plain kernel, which is the one to read first.

- Tensor descriptors: base, shape, strides and block of a matrix in 128 bytes. One thread then asks for a whole tile
  and the Tensor Memory Accelerator (TMA) copies it: no address registers, no masks, zeros where the tile leaves the
  matrix. Each program describes its own sequence and head, so a packed neighbour is outside by construction.
- Warp specialisation: Triton splits the loop between three groups of four warps. One only loads, and gives most of
  its registers away; two own half of the queries each, and one of them can do softmax while the other multiplies.
  This takes `warps=4` in the TileConfig; with 8 all warps do everything, as in the plain kernel, TMA aside.

Triton specialises functions with one loop and no early return. So there is one loop for blocks with and without a
mask: every block pays for the mask, one comparison and one select a score. What FlashAttention-3 has beyond this:
turns between the two groups by barrier (ping-pong), softmax of one block under the product of the next, float8.

Bytes and FLOPs: those of the plain kernel. Each program also writes three descriptors, 384 bytes of scratch, before
it loads anything: short sequences feel that.
"""

from __future__ import annotations

import contextvars

import torch
import triton
import triton.language as tl

from minillm.kernels.flash_parts import LENGTHS, launch, locate, store_rows, tanh
from minillm.kernels.flash_plan import Plan
from minillm.kernels.launch import interpreted

LOADER_WARPS = 4  # TileConfig.warps that Triton can split: this many a group, three groups


@triton.jit(do_not_specialize=LENGTHS)
def hopper_kernel(
    q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, starts_q, starts_k,
    scale, inner_scale, v_scale, time, length, tiles, window, heads,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr, LSE: tl.constexpr,
    SPECIALISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, time, length = locate(
        q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, starts_q, starts_k, time, length, tiles, heads,
        stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
        stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, GROUP, PACKED,
    )  # fmt: skip
    tile = tl.cdiv(time, BLOCK_M) - 1 - tl.program_id(0) % tiles  # below 0: a packed sequence has no such tile
    first = tile * BLOCK_M
    last = tl.minimum(first + BLOCK_M, time) - 1
    shift = length - time  # query i stands at key position i + shift

    low, high = 0, length  # keys that some query sees
    if CAUSAL:
        high = tl.minimum(tl.maximum(last + shift + 1, 0), length)
    if WINDOW:
        low = tl.minimum(tl.maximum(first + shift - window + 1, 0), high)
    if PACKED:
        high = tl.where(first < 0, low, high)  # nothing to do: the loop below runs no turn

    q_tiles = tl.make_tensor_descriptor(
        q_pointer, [tl.maximum(time, 1), HEAD_DIM], [stride_qt.to(tl.int64), 1], [BLOCK_M, D]
    )
    k_blocks = tl.make_tensor_descriptor(
        k_pointer, [tl.maximum(length, 1), HEAD_DIM], [stride_kt.to(tl.int64), 1], [BLOCK_N, D]
    )
    v_blocks = tl.make_tensor_descriptor(
        v_pointer, [tl.maximum(length, 1), V_DIM], [stride_vt.to(tl.int64), 1], [BLOCK_N, DV]
    )
    n = tl.arange(0, BLOCK_N)
    positions = (first + shift + tl.arange(0, BLOCK_M))[:, None]  # [BLOCK_M, 1]
    q = q_tiles.load([tl.maximum(first, 0), 0])  # [BLOCK_M, D]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)

    for block in tl.range(low, high, BLOCK_N, warp_specialize=SPECIALISE):
        k = k_blocks.load([block, 0])  # [BLOCK_N, D], zeros behind the last key
        s = tl.dot(q, k.T)  # [BLOCK_M, BLOCK_N]
        if SOFTCAP:
            s = tanh(s * inner_scale)
        # A query of this sequence stands at length - 1 at most: causal needs no second comparison.
        seen = n[None, :] <= positions - block if CAUSAL else n[None, :] < length - block
        if WINDOW:
            seen = seen & (n[None, :] > positions - block - window)
        s = tl.where(seen, s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1) * scale)  # [BLOCK_M]
        safe = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing yet
        p = tl.exp2(s * scale - safe[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m - safe)  # [BLOCK_M]
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]  # [BLOCK_M, DV]
        v = v_blocks.load([block, 0])  # [BLOCK_N, DV]
        acc = tl.dot(p.to(v.dtype), v, acc)
        m = new_m

    stop = tl.where(first < 0, first, time)  # no such tile: nothing is written
    store_rows(acc, m, total, out_pointer, lse_pointer, first, stop, stride_ot, v_scale, V_DIM, DV, LSE, BLOCK_M)


def launch_hopper(plan: Plan, q, k, v, out, lse, starts_q, starts_k, return_lse: bool) -> None:
    """`launch` with this file's kernel. The descriptors' scratch comes from torch, asked for in this call's context
    alone: an allocator that the caller has given Triton stays theirs."""

    def run() -> None:
        if not interpreted():
            triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=q.device))
        split = plan.config.warps == LOADER_WARPS
        launch(hopper_kernel, plan, q, k, v, out, lse, starts_q, starts_k, return_lse, SPECIALISE=split)

    if q.numel():
        contextvars.copy_context().run(run)
