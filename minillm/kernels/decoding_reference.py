"""FlashDecoding and paged attention in plain torch, line for line with the Triton kernels.

Chapter 09. The twin of `flash_decoding` and `paged_attention` for readers who do not know Triton yet: what is a
program there is a turn of a loop here, what is a tile there is a slice here. It is slow and needs no GPU. Flash-
Decoding, Dao, Haziza, Massa and Sizov 2023; the merge is the associativity of online softmax, Milakov and
Gimelshein 2018 (arXiv:1805.02867), Rabe and Staats 2021 (arXiv:2112.05682).

Symbols: m, the largest score so far; total, the sum of exp(score - m), which papers call l; acc, the sum of
exp(score - m) v. A part's output is acc / total and its log-sum-exp (LSE) is m + log(total). Parts merge with weights
exp(LSE): nothing is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64  # keys a step


def split_bounds(first: int, last: int, splits: int, split: int, tile: int = TILE) -> tuple[int, int]:
    """Keys [begin, end) of one split of keys [first, last): whole tiles, as even as tiles allow, perhaps none."""
    first_tile, last_tile = first // tile, -(-last // tile)
    tiles_each = -(-(last_tile - first_tile) // splits)
    begin = first_tile + split * tiles_each
    return begin * tile, min(begin + tiles_each, last_tile) * tile


def attend_split(
    q: Tensor,
    positions: Tensor,
    fetch,
    begin: int,
    end: int,
    first: int,
    last: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """One program: rows of queries over one split of the keys.

    q [rows, dim]; positions [rows]: a row sees keys up to its position, and no more than `window` of them;
    fetch(keys) -> k, v [len(keys), dim]; only keys in [first, last) exist. -> out [rows, dim] float32, lse [rows].
    A row that sees nothing here gets zeros and -inf.
    """
    rows, dim = q.shape
    m = torch.full((rows,), float("-inf"))
    total = torch.zeros(rows)
    acc = torch.zeros(rows, dim)
    for start in range(begin, end, tile):
        keys = torch.arange(max(start, first), min(start + tile, last))  # the kernels mask what is not there
        k, v = fetch(keys)  # [keys, dim]
        scores = q.float() @ k.float().T * scale  # [rows, keys]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        sees = keys <= positions[:, None]  # [rows, keys]
        if window is not None:
            sees &= keys > positions[:, None] - window
        scores = scores.masked_fill(~sees, float("-inf"))
        new_m = torch.maximum(m, scores.amax(1)) if len(keys) else m  # [rows]
        base = new_m.masked_fill(new_m == float("-inf"), 0.0)  # nothing seen yet: exp(-inf - 0) is 0, not NaN
        p = torch.exp(scores - base[:, None])  # [rows, keys]
        rescale = torch.exp(m - base)  # [rows]
        total = total * rescale + p.sum(1)
        acc = acc * rescale[:, None] + p @ v.float()  # [rows, dim]
        m = new_m
    seen = total > 0
    out = torch.where(seen[:, None], acc / total.clamp_min(1e-38)[:, None], 0.0)
    return out, torch.where(seen, m + torch.log(total.clamp_min(1e-38)), float("-inf"))


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs [splits, ..., dim] and lses [splits, ...] of parts of the keys -> out [..., dim], lse [...] of all.

    A part with LSE -inf saw nothing and weighs nothing, whatever stands in its out; where no part saw anything, the
    result is 0 and -inf.
    """
    outs = torch.where((lses == float("-inf")).unsqueeze(-1), 0.0, outs)
    m = lses.amax(0)  # [...]
    base = m.masked_fill(m == float("-inf"), 0.0)
    weights = torch.exp(lses - base)  # [splits, ...]
    total = weights.sum(0)  # [...]
    out = (weights.unsqueeze(-1) * outs).sum(0) / total.clamp_min(1e-38).unsqueeze(-1)  # [..., dim]
    return out, torch.where(total > 0, base + torch.log(total.clamp_min(1e-38)), float("-inf"))


def flash_decoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int = 1,
    tile: int = TILE,
) -> tuple[Tensor, Tensor]:
    """q [batch, heads, dim], k and v [batch, kv_heads, max length, dim], lengths [batch] -> out as q, lse [batch,
    heads]: one token a row against all that its row has stored."""
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    outs, lses = torch.zeros(splits, batch, heads, dim), torch.full((splits, batch, heads), float("-inf"))
    for row in range(batch):
        last = int(lengths[row])
        first = 0 if window is None else max(0, last - window)
        for kv_head in range(kv_heads):
            rows = slice(kv_head * group, (kv_head + 1) * group)  # the query heads that share this KV head
            positions = torch.full((group,), last - 1)
            for split in range(splits):
                begin, end = split_bounds(first, last, splits, split, tile)

                def fetch(keys: Tensor, row: int = row, kv_head: int = kv_head) -> tuple[Tensor, Tensor]:
                    return k[row, kv_head, keys], v[row, kv_head, keys]

                outs[split, row, rows], lses[split, row, rows] = attend_split(
                    q[row, rows], positions, fetch, begin, end, first, last, scale, window, softcap, tile
                )
    out, lse = merge(outs, lses)
    return out.to(q.dtype), lse


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int = 1,
    rows: int = 16,
    tile: int = TILE,
) -> Tensor:
    """q [tokens, heads, dim] packed by query_starts [requests + 1]; k and v [blocks, block_size, kv_heads, dim].

    The last tokens of a request are its queries: of n queries and length L, query i stands at position L - n + i.
    rows: query rows a program holds, as the kernel's BLOCK_M: whole tokens, each with all heads of one KV head.
    """
    tokens, heads, dim = q.shape
    block_size, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    per_tile = max(1, rows // group)  # tokens
    outs, lses = torch.zeros(splits, tokens, heads, dim), torch.full((splits, tokens, heads), float("-inf"))
    for request in range(len(kv_lengths)):
        start, count = int(query_starts[request]), int(query_starts[request + 1] - query_starts[request])
        length = int(kv_lengths[request])
        for place in range(0, count, per_tile):
            here = torch.arange(place, min(place + per_tile, count))  # tokens of this tile
            first = 0 if window is None else max(0, length - count + place - window + 1)
            last = max(0, min(length, length - count + int(here[-1]) + 1))
            for kv_head in range(kv_heads):
                r = torch.arange(len(here) * group)
                row_token, row_head = start + here[r // group], kv_head * group + r % group
                positions = length - count + here[r // group]

                def fetch(keys: Tensor, request: int = request, kv_head: int = kv_head) -> tuple[Tensor, Tensor]:
                    block = block_tables[request, keys // block_size].long()  # 64 bits: a product is coming
                    return k[block, keys % block_size, kv_head], v[block, keys % block_size, kv_head]

                for split in range(splits):
                    begin, end = split_bounds(first, last, splits, split, tile)
                    outs[split, row_token, row_head], lses[split, row_token, row_head] = attend_split(
                        q[row_token, row_head],
                        positions,
                        fetch,
                        begin,
                        end,
                        first,
                        last,
                        scale,
                        window,
                        softcap,
                        tile,
                    )
    return merge(outs, lses)[0].to(q.dtype)
