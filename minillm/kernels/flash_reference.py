"""FlashAttention in torch: the Triton kernel line for line, for readers and for machines without a GPU.

Chapter 08. FlashAttention-2, Dao 2023 (arXiv:2307.08691). Where the kernel is one program a tile of queries and a
head, this loops over the tiles and does all heads of all sequences at once. It stores one tile of scores at a time,
so its memory grows with the length, not with its square. Bytes and FLOPs: see `flash_attention`. Packed sequences
are left to the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.flash_plan import LOG2_E, check_options

LN_2 = math.log(2)


@dataclass(frozen=True)
class KeyRange:
    """Keys of one tile of queries. [low, high) are seen by some query of it, [full_low, full_high) by every one."""

    low: int
    full_low: int
    full_high: int
    high: int

    def blocks(self, size: int):
        """(first key, needs a mask?) of every block that is visited."""
        for start, stop, masked in (
            (self.low, self.full_low, True),
            (self.full_low, self.full_high, False),
            (self.full_high, self.high, True),
        ):
            for block in range(start, stop, size):
                yield block, masked


def key_range(
    first: int, last: int, time: int, length: int, block_n: int, causal: bool = True, window: int | None = None
) -> KeyRange:
    """For queries first .. last of `time`, which are the last of `length` keys."""
    shift = length - time  # query i stands at key position i + shift
    low, full_low, high, full_high = 0, 0, length, length // block_n * block_n
    if causal:
        high = min(max(last + shift + 1, 0), length)
        full_high = min(max(first + shift + 1, 0), length) // block_n * block_n
    if window is not None:
        low = min(max(first + shift - window + 1, 0), high) // block_n * block_n
        full_low = -(-max(last + shift - window + 1, 0) // block_n) * block_n
        full_low = min(max(full_low, low), high)
        full_high = max(full_high, full_low)
    return KeyRange(low, full_low, full_high, high)


@dataclass(frozen=True)
class Step:
    """What one program holds after one block of keys: `watch` is called with it."""

    first_query: int
    first_key: int
    masked: bool
    m: Tensor  # [batch, heads, queries] largest score so far, in base 2
    total: Tensor  # [batch, heads, queries] sum of 2^(score - m) so far
    acc: Tensor  # [batch, heads, queries, v dim] weighted sum of values so far


def flash_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    block_m: int = 64,
    block_n: int = 64,
    return_lse: bool = False,
    watch: Callable[[Step], object] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [batch, time, heads, dim], k [batch, length, kv_heads, dim], v [batch, length, kv_heads, v dim] ->
    [batch, time, heads, v dim], and with return_lse the natural log-sum-exp [batch, heads, time] in float32."""
    check_options(causal, window, softcap, (1.0, 1.0, 1.0))
    for name, block in (("block_m", block_m), ("block_n", block_n)):
        if block < 1:
            raise ParamsError(illegal(name, block, "must be >= 1"))
    (batch, time, heads, dim), (_, length, kv_heads, v_dim) = q.shape, v.shape
    if k.shape != (batch, length, kv_heads, dim) or not kv_heads or heads % kv_heads:
        raise ParamsError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: lengths, dims or head counts do not fit"
        )
    scale = dim**-0.5 if scale is None else scale
    inner_scale = None if softcap is None else scale / softcap
    scale = (scale if softcap is None else softcap) * LOG2_E  # 2^(x log2 e) = e^x: exp2 is the cheaper one on a GPU

    # Query heads that share a KV head form a group; k and v are not repeated.
    q = q.unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4)  # [batch, kv_heads, group, time, dim]
    k = k.permute(0, 2, 3, 1).unsqueeze(2)  # [batch, kv_heads, 1, dim, length]
    v = v.transpose(1, 2).unsqueeze(2)  # [batch, kv_heads, 1, length, v dim]
    out = q.new_empty(*q.shape[:-1], v_dim)  # [batch, kv_heads, group, time, v dim]
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    for first in range(0, time, block_m):  # in the kernel: one program each
        last = min(first + block_m, time) - 1
        # Tensor cores multiply 16-bit numbers and add up in float32; in torch that is: widen, then multiply.
        tile = q[..., first : last + 1, :].float()  # [batch, kv_heads, group, queries, dim]
        positions = torch.arange(first, last + 1, device=q.device)[:, None] + length - time  # [queries, 1]
        m = torch.full(tile.shape[:-1], float("-inf"), device=q.device)  # [batch, kv_heads, group, queries]
        total = torch.zeros_like(m)
        acc = torch.zeros(*m.shape, v_dim, device=q.device)
        for block, masked in key_range(first, last, time, length, block_n, causal, window).blocks(block_n):
            keys = torch.arange(block, min(block + block_n, length), device=q.device)  # [keys]
            s = tile @ k[..., keys[0] : keys[-1] + 1].float()  # [batch, kv_heads, group, queries, keys]
            if softcap is not None:
                s = torch.tanh(s * inner_scale)
            if masked:
                seen = torch.ones(len(positions), len(keys), dtype=torch.bool, device=q.device)
                if causal:
                    seen &= keys <= positions
                if window is not None:
                    seen &= keys > positions - window
                s = s.masked_fill(~seen, float("-inf"))
            new_m = torch.maximum(m, s.amax(-1) * scale)
            safe = new_m.masked_fill(new_m == float("-inf"), 0.0) if masked else new_m
            p = torch.exp2(s * scale - safe[..., None])  # [batch, kv_heads, group, queries, keys]
            alpha = torch.exp2(m - safe)  # what the old sums are worth under the new maximum
            total = total * alpha + p.sum(-1)
            acc = acc * alpha[..., None]
            acc = acc + p.to(v.dtype).float() @ v[..., keys[0] : keys[-1] + 1, :].float()
            m = new_m
            if watch is not None:
                watch(Step(first, block, masked, m.flatten(1, 2), total.flatten(1, 2), acc.flatten(1, 2)))
        nothing = total == 0  # a query that sees no key: output 0, log-sum-exp -inf
        out[..., first : last + 1, :] = (acc / total.masked_fill(nothing, 1.0)[..., None]).to(q.dtype)
        lse[..., first : last + 1] = (m + total.log2()) * LN_2  # log2(0) is -inf
    out = out.flatten(1, 2).transpose(1, 2)  # [batch, time, heads, v dim]
    return (out, lse.flatten(1, 2)) if return_lse else out
