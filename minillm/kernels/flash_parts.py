"""What the two FlashAttention kernels share: who a program is, how its rows are finished, how both are launched.

Chapter 08. `flash_attention` is the kernel to read, `flash_hopper` its variant for Hopper; between `locate` and
`store_rows` each has a loop of its own. Bytes and FLOPs: see `flash_attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minillm.kernels.flash_plan import Plan
from minillm.kernels.launch import power_of_two

LENGTHS = ["time", "length", "tiles", "window", "stride_lb", "stride_lh"]  # of these Triton compiles no special cases


@triton.jit
def tanh(x):
    """tanh by one exp2; near 0, where 1 - exp2 would cancel, by its series."""
    t = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    x2 = x * x
    near = x * (1.0 + x2 * (-0.33333334 + x2 * (0.13333334 - x2 * 0.053968254)))
    return tl.where(x2 < 0.04, near, tl.where(x < 0, -far, far))


@triton.jit
def locate(
    q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, starts_q, starts_k, time, length, tiles, heads,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, GROUP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Who am I: a tile of queries of one head of one sequence. The pointers, moved there in 64 bits, and the time and
    length of that sequence. Of an empty one q, k and v stay at row 0: `flash_hopper` describes rows that exist."""
    program = tl.program_id(0)
    head = (program // tiles) % heads
    row = (program // tiles // heads).to(tl.int64)
    kv_head = head // GROUP
    q_pointer += head.to(tl.int64) * stride_qh
    k_pointer += kv_head.to(tl.int64) * stride_kh
    v_pointer += kv_head.to(tl.int64) * stride_vh
    out_pointer += head.to(tl.int64) * stride_oh
    lse_pointer += head.to(tl.int64) * stride_lh
    if PACKED:
        first_q = tl.load(starts_q + row).to(tl.int64)
        first_k = tl.load(starts_k + row).to(tl.int64)
        time = (tl.load(starts_q + row + 1) - first_q).to(tl.int32)
        length = (tl.load(starts_k + row + 1) - first_k).to(tl.int32)
        q_pointer += tl.where(time > 0, first_q, 0) * stride_qt
        k_pointer += tl.where(length > 0, first_k, 0) * stride_kt
        v_pointer += tl.where(length > 0, first_k, 0) * stride_vt
        out_pointer += first_q * stride_ot
        lse_pointer += first_q
    else:
        q_pointer += row * stride_qb
        k_pointer += row * stride_kb
        v_pointer += row * stride_vb
        out_pointer += row * stride_ob
        lse_pointer += row * stride_lb
    return q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, time, length


@triton.jit
def store_rows(
    acc, m, total, out_pointer, lse_pointer, first, stop, stride_ot, v_scale,
    V_DIM: tl.constexpr, DV: tl.constexpr, LSE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Divide, and write queries first .. stop - 1. One that saw no key: output 0, log-sum-exp -inf."""
    rows, dv = first + tl.arange(0, BLOCK_M), tl.arange(0, DV)
    nothing = total == 0.0
    acc = acc * (v_scale / tl.where(nothing, 1.0, total))[:, None]  # [BLOCK_M, DV]
    out_pointers = out_pointer + rows[:, None].to(tl.int64) * stride_ot + dv[None, :]
    mine = (rows < stop)[:, None] & (dv < V_DIM)[None, :]
    tl.store(out_pointers, acc.to(out_pointer.dtype.element_ty), mask=mine)
    if LSE:
        lse = tl.where(nothing, float("-inf"), (m + tl.log2(tl.where(nothing, 1.0, total))) * 0.6931471805599453)
        tl.store(lse_pointer + rows, lse, mask=rows < stop)


def launch(kernel, plan: Plan, q, k, v, out, lse, starts_q, starts_k, return_lse: bool, **settings) -> None:
    """`flash_kernel` or `flash_hopper`'s, which take the same arguments; settings: what one of them alone takes."""
    packed = starts_q is not None
    strides = [n for x in (q, k, v, out) for n in ((0, *x.stride()[:2]) if packed else x.stride()[:3])]
    lse_strides = ((0, lse.stride(0)) if packed else lse.stride()[:2]) if return_lse else (0, 0)
    kernel[(plan.programs,)](
        q, k, v, out, lse, starts_q, starts_k,
        plan.scale, plan.inner_scale, plan.v_scale, plan.time, plan.length, plan.tiles, plan.window, q.shape[-2],
        *strides, *lse_strides,
        GROUP=q.shape[-2] // k.shape[-2], HEAD_DIM=q.shape[-1], V_DIM=v.shape[-1],
        D=power_of_two(q.shape[-1]), DV=power_of_two(v.shape[-1]),
        CAUSAL=plan.causal, WINDOW=plan.window > 0, SOFTCAP=plan.inner_scale > 0, PACKED=packed, LSE=return_lse,
        BLOCK_M=plan.config.block_m, BLOCK_N=plan.config.block_n,
        num_warps=plan.config.warps, num_stages=plan.config.stages, **settings,
    )  # fmt: skip
