"""Attention itself: softmax(scale * q @ k) @ v under a causal mask, in the two forms every cache needs.

Chapter 01. Attention Is All You Need, Vaswani et al. 2017 (arXiv:1706.03762); grouped queries, Ainslie et al. 2023
(arXiv:2305.13245); soft caps as in Gemma 2 (arXiv:2408.00118).

Queries are the LAST `time` of the `length` keys ("bottom-right" alignment): query i sits at position
length - time + i, and sees keys 0 .. length - time + i. That one rule covers prefill (time = length), decode
(time = 1) and a chunk of a prompt (anything between).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LayerInfo:
    """What a layer tells the cache: its index, the factor on q @ k, its window in tokens, its soft cap."""

    index: int
    scale: float
    window: int | None = None
    softcap: float | None = None


def visible(time: int, length: int, window: int | None = None, padding: Tensor | None = None, device=None) -> Tensor:
    """True where a query may look: [time, length], or [batch, 1, time, length] with padding.

    window: a query sees itself and the window - 1 tokens before it.
    padding: [batch], number of unused keys at the left of each row.
    """
    query = torch.arange(length - time, length, device=device).unsqueeze(-1)  # [time, 1]
    key = torch.arange(length, device=device)  # [length]
    mask = key <= query  # [time, length]
    if window is not None:
        mask = mask & (key > query - window)
    if padding is not None:
        mask = mask & (key >= padding.view(-1, 1, 1, 1))  # [batch, 1, time, length]
        mask = mask | (key == query)  # a padding query sees itself: its row of the softmax stays finite
    return mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """q [batch, heads, time, dim], k and v [batch, kv_heads, length, dim] -> [batch, heads, time, v dim].

    padding: [batch] int, unused keys at the left of each row (None: none). Uses torch's fused kernel except under a
    soft cap, which that kernel does not know.
    """
    time, length = q.shape[-2], k.shape[-2]
    all_visible = time == 1 and padding is None and (window is None or window >= length)
    if softcap is not None:
        mask = None if all_visible else visible(time, length, window, padding, q.device)
        return naive_attention(q, k, v, mask, scale, softcap)
    grouped = q.shape[-3] != k.shape[-3]
    if all_visible:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
    if time == length and padding is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True, enable_gqa=grouped)
    mask = visible(time, length, window, padding, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """The formula, written out. mask: True where a query may look, broadcastable to [batch, 1, time, length]."""
    batch, heads, time, dim = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(batch, kv_heads, heads // kv_heads, time, dim)  # [batch, kv_heads, group, time, dim]
    scores = (q @ k.unsqueeze(2).transpose(-1, -2)) * scale  # [batch, kv_heads, group, time, length]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        mask = mask.unsqueeze(-3) if mask.dim() == 4 else mask  # [batch, 1, 1, time, length]
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    out = weights @ v.unsqueeze(2)  # [batch, kv_heads, group, time, v dim]
    return out.reshape(batch, heads, time, v.shape[-1])


def attend_now(layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without a cache: the tokens of this call are all there is. Shapes as in the cache seam:
    q [..., time, heads, dim], k and v [..., time, kv_heads, dim] -> [..., time, heads, v dim]."""
    single = q.dim() == 3
    if single:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)  # [1, time, heads, dim]
    out = attention(
        q.transpose(1, 2),  # [batch, heads, time, dim]
        k.transpose(1, 2),
        v.transpose(1, 2),
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
    ).transpose(1, 2)  # [batch, time, heads, v dim]
    return out.squeeze(0) if single else out
