"""Rotary embedding and the write to the paged cache in one kernel: k and v go straight to their slots. Triton.

Chapter 10. RoFormer, Su et al. 2021 (arXiv:2104.09864); slots as in chapter 05.

Bytes that must move, for n tokens, h query heads, g KV heads of d numbers, b bytes each: read (h + 2 g) d n b of
q, k, v and the table's d x 4 n bytes (half of cos, half of sin), write (h + 2 g) d n b. In separate kernels the
rotation alone (a product, a roll, a multiply-add, each read and written) moves the (h + g) heads three times in
float32, and each of k and v is then read and written once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import check_ids, check_tensor, power_of_two, require_triton


@triton.jit
def rope_write_kernel(
    qkv, cos, sin, q_out, keys, values, slots,
    qkv_token, cos_token, slots_stride, key_slot, key_head, value_slot, value_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """One program: one head of one token. Channel i turns with channel i + HALF. A token whose slot is -1 gets its q
    and writes nothing."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)  # [BLOCK], half of a head
    inside = i < HALF
    at = qkv + token * qkv_token + head * 2 * HALF + i
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:  # noqa: SIM102 (the outer one is settled when the kernel is compiled)
        if head < HEADS + KV_HEADS:
            c = tl.load(cos + token * cos_token + i, mask=inside, other=0.0)
            s = tl.load(sin + token * cos_token + HALF + i, mask=inside, other=0.0)  # the first half has the sign
            turned = a * c - b * s
            b = b * c + a * s
            a = turned
    if head < HEADS:
        to = q_out + (token * HEADS + head) * 2 * HALF + i
        tl.store(to, a.to(q_out.dtype.element_ty), mask=inside)
        tl.store(to + HALF, b.to(q_out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token * slots_stride).to(tl.int64)  # 64 bits: slot x stride can pass 2^31
        real = inside & (slot >= 0)
        if head < HEADS + KV_HEADS:
            to = keys + slot * key_slot + (head - HEADS) * key_head + i
            tl.store(to, a.to(keys.dtype.element_ty), mask=real)
            tl.store(to + HALF, b.to(keys.dtype.element_ty), mask=real)
        else:
            to = values + slot * value_slot + (head - HEADS - KV_HEADS) * value_head + i
            tl.store(to, a.to(values.dtype.element_ty), mask=real)
            tl.store(to + HALF, b.to(values.dtype.element_ty), mask=real)


def rope_and_write(
    qkv: Tensor, tables: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """qkv [tokens, heads + 2 kv_heads, dim] -> q [tokens, heads, dim], turned; k, turned, and v go to their slots.

    tables: (cos, sin) of `minillm.model.rope.cos_sin`, [tokens, 1, dim] float32; None: no rotation.
    keys, values: [blocks, block_size, kv_heads, dim]. slots: [tokens] int64; -1: k and v of this token are dropped.
    """
    require_triton()
    tokens, all_heads, dim = qkv.shape
    if dim % 2:
        raise ParamsError(illegal("head_dim", dim, "must be even"))
    kv_heads = keys.shape[2] if keys.dim() == 4 else 0
    heads = all_heads - 2 * kv_heads
    if heads < 1 or kv_heads < 1:
        raise ParamsError(illegal("qkv.shape", list(qkv.shape), f"must hold more than 2 x {kv_heads} KV heads"))
    qkv = qkv if qkv.stride(1) == dim and qkv.stride(2) == 1 else qkv.contiguous()
    check_tensor("qkv", qkv, [tokens, all_heads, dim])
    check_tensor("keys", keys, [None, None, kv_heads, dim], device=qkv.device)
    check_tensor("values", values, list(keys.shape), dtypes=[keys.dtype], device=qkv.device)
    check_tensor("slots", slots.unsqueeze(-1), [tokens, 1], dtypes=[torch.int64], device=qkv.device)
    for name, stored in (("keys", keys), ("values", values)):
        if stored.stride(0) != stored.shape[1] * stored.stride(1):
            raise ParamsError(illegal(f"{name}.stride()", stored.stride(), "blocks must follow one another"))
    check_ids("slots", slots, keys.shape[0] * keys.shape[1], padding=True)
    cos, sin = (qkv, qkv) if tables is None else (table.reshape(tokens, dim) for table in tables)
    if tables is not None:
        for name, table in (("cos", cos), ("sin", sin)):
            check_tensor(name, table, [tokens, dim], dtypes=[torch.float32], device=qkv.device)
        if cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        rope_write_kernel[(tokens, all_heads)](
            qkv, cos, sin, q, keys, values, slots,
            qkv.stride(0), cos.stride(0), slots.stride(0),
            keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
            HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=power_of_two(dim // 2), ROTATE=tables is not None,
            num_warps=1,
        )  # fmt: skip
    return q
