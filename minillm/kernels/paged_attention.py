"""Attention straight from the blocks of a paged cache, for any mix of decodes and chunks of prompts. Triton.

Chapter 09. PagedAttention, Kwon et al. 2023 (arXiv:2309.06180), with FlashDecoding's splits. The gather of chapter 05
reads K and V, writes a copy and reads the copy. Here the table is looked up inside the kernel, so K and V are read
once: 2 x kv_heads x dim x (sum of KV lengths) x bytes a number, and one table entry a key, which comes from a cache.

A program holds M rows of queries of one request and one KV head: whole tokens, each with all the query heads of the
group (GQA packing), so a decode's tile is one token and a chunk's is M / group of them. It walks over its split of
the keys that any of its rows can see.

Nothing here looks at the contents of `block_tables`, `query_starts` or `kv_lengths` on a GPU, and the grid comes from
`max_query` and `max_length` alone. So a CUDA graph can hold the launches: capture with the largest of both, then
change the tensors in place. A request of length 0 gives zeros: that is how a captured batch is padded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.flash_decoding import (
    absorb,
    check_heads,
    check_options,
    finish,
    launch_merge,
    partials,
    program_slots,
    results,
    tile_shape,
    to_logits,
)
from minillm.kernels.launch import FLOATS, check_ids, check_tensor, power_of_two
from minillm.kernels.splits import choose_splits

INDEX = (torch.int32, torch.int64)
MOST_ROWS = 64  # of queries in a tile


@triton.jit(do_not_specialize=["table_row", "window"])
def paged_kernel(
    q, k, v, tables, query_starts, kv_lengths, outs, lses,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row,
    out_split, out_token, out_head, lse_split, lse_token,
    scale, softcap, window, kv_heads,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one request's queries x one KV head x one split of the keys that the tile sees."""
    TOKENS: tl.constexpr = M // GROUP
    request, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    place, split, splits = tl.program_id(1) * TOKENS, tl.program_id(2), tl.num_programs(2)
    start = tl.load(query_starts + request).to(tl.int32)
    count = tl.load(query_starts + request + 1).to(tl.int32) - start
    length = tl.load(kv_lengths + request).to(tl.int32)
    if place >= count:  # the grid is as wide as the longest request
        return

    rows, d = tl.arange(0, M), tl.arange(0, D)
    token, head = place + rows // GROUP, kv_head * GROUP + rows % GROUP  # [M]
    live = (rows < TOKENS * GROUP) & (token < count)  # [M]
    position = length - count + token  # [M]; the queries are the last `count` tokens
    row_token = (start + token).to(tl.int64)[:, None]  # 64 bits: a product is coming
    q_mask = live[:, None] & (d < DIM)[None, :]  # [M, D]
    q_tile = tl.load(q + row_token * q_token + head[:, None] * q_head + d[None, :], mask=q_mask, other=0.0)
    q_tile = q_tile.to(COMPUTE)

    last = tl.maximum(length - count + tl.minimum(place + TOKENS, count), 0)  # one more than the last key seen
    first = last * 0
    if HAS_WINDOW:
        first = tl.maximum(length - count + place - window + 1, 0)
    first_tile, last_tile = first // N, (last + N - 1) // N
    tiles_each = (last_tile - first_tile + splits - 1) // splits
    begin = first_tile + split * tiles_each
    end = tl.minimum(begin + tiles_each, last_tile)

    m, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for tile in range(begin, end):
        key = tile * N + tl.arange(0, N)  # [N]
        here = (key >= first) & (key < last)
        block = tl.load(tables + request.to(tl.int64) * table_row + key // BLOCK_SIZE, mask=here, other=0)
        block, slot = block.to(tl.int64), key % BLOCK_SIZE  # 64 bits: block x stride passes 2^31 in a pool of 4 GB
        kv_mask = here[:, None] & (d < DIM)[None, :]  # [N, D]
        k_at = k + (block * k_block + slot * k_slot + kv_head * k_head)[:, None] + d[None, :]
        v_at = v + (block * v_block + slot * v_slot + kv_head * v_head)[:, None] + d[None, :]
        k_tile = tl.load(k_at, mask=kv_mask, other=0.0).to(COMPUTE)
        v_tile = tl.load(v_at, mask=kv_mask, other=0.0).to(COMPUTE)
        scores = to_logits(tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
        sees = here[None, :] & (key[None, :] <= position[:, None])  # [M, N]
        if HAS_WINDOW:
            sees = sees & (key[None, :] > position[:, None] - window)
        acc, m, total = absorb(acc, m, total, tl.where(sees, scores, float("-inf")), v_tile)

    out, lse = finish(acc, m, total)
    out_at = outs + split.to(tl.int64) * out_split + row_token * out_token + head[:, None] * out_head + d[None, :]
    tl.store(out_at, out.to(outs.dtype.element_ty), mask=q_mask)
    tl.store(lses + split * lse_split + (start + token) * lse_token + head, lse, mask=live)


@triton.jit
def store_kernel(
    k, v, k_cache, v_cache, slots, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: one token's K and V to its slot; slot -1 is padding and is left alone."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    i = tl.arange(0, WIDTH)
    head, d, mask = i // DIM, i % DIM, i < HEADS * DIM
    place = slot * HEADS * DIM + i
    tl.store(k_cache + place, tl.load(k + token * k_token + head * k_head + d, mask=mask), mask=mask)
    tl.store(v_cache + place, tl.load(v + token * v_token + head * v_head + d, mask=mask), mask=mask)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float,
    max_query: int,
    max_length: int,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """q [tokens, heads, dim] of all requests in a row; k, v [blocks, block_size, kv_heads, dim] -> out as q.

    block_tables [requests, most blocks]; query_starts [requests + 1], from 0 to tokens, so that every token is some
    request's; kv_lengths [requests], this step's tokens included. A request's queries are its last tokens. Length 0
    gives zeros. max_query and max_length: the most queries and keys that any request has, or may come to have in a
    CUDA graph. splits: None chooses by the number of SMs.
    """
    tokens, heads, dim = check_heads(q, k, 2)
    blocks, block_size, kv_heads = k.shape[:3]
    requests = len(kv_lengths)
    check_tensor("k", k, (blocks, block_size, kv_heads, dim), device=q.device)
    check_tensor("v", v, (blocks, block_size, kv_heads, dim), (k.dtype,), q.device)
    check_tensor("block_tables", block_tables, (requests, None), INDEX, q.device)
    check_tensor("query_starts", query_starts, (requests + 1,), INDEX, q.device)
    check_tensor("kv_lengths", kv_lengths, (requests,), INDEX, q.device)
    check_options(window, softcap, splits)
    check_step(block_tables, query_starts, kv_lengths, blocks, block_size, tokens, max_query, max_length)
    out, lse = results(q)
    if not tokens:
        return torch.empty_like(q)
    group = heads // kv_heads
    rows = power_of_two(group * min(max_query, max(1, MOST_ROWS // group)))  # of queries in a tile, padding included
    tiles = -(-max_query // (rows // group))
    if splits is None:
        seen = min(max_length, max_length if window is None else window + rows // group)
        splits = choose_splits(requests * kv_heads * tiles, seen, program_slots(q.device))
    outs, lses = partials(out, lse, splits)
    # A stage more than with keys in a row: one is spent on the table's entry.
    paged_kernel[requests * kv_heads, tiles, splits](
        q, k, v, block_tables, query_starts, kv_lengths, outs, lses,
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], block_tables.stride(0),
        *outs.stride()[:3], *lses.stride()[:2],
        scale, softcap or 0.0, window or 0, kv_heads,
        BLOCK_SIZE=block_size, GROUP=group, DIM=dim, M=rows,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, **tile_shape(dim, q.dtype, 4),
    )  # fmt: skip
    if splits > 1:
        launch_merge(outs, lses, out, lse)
    return out.to(q.dtype)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [tokens, kv_heads, dim] into k_cache, v_cache [blocks, block_size, kv_heads, dim] at slots [tokens]; -1:
    not written. One launch for both, nothing waits for the device."""
    tokens, heads, dim = k.shape
    blocks, block_size = k_cache.shape[:2]
    check_tensor("k", k, (tokens, heads, dim))
    check_tensor("v", v, (tokens, heads, dim), (k.dtype,), k.device)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, (blocks, block_size, heads, dim), FLOATS, k.device)
        if not cache.is_contiguous():
            raise ParamsError(illegal(f"{name}.stride()", cache.stride(), "must be contiguous"))
    check_tensor("slots", slots, (tokens,), INDEX, k.device)
    k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)  # the same tensors, where the types are the same
    check_ids("slots", slots, blocks * block_size, padding=True)
    if tokens:
        store_kernel[(tokens,)](
            k, v, k_cache, v_cache, slots, *k.stride()[:2], *v.stride()[:2],
            HEADS=heads, DIM=dim, WIDTH=power_of_two(heads * dim, 1),
        )  # fmt: skip


def check_step(tables, starts, lengths, blocks, block_size, tokens, max_query, max_length) -> None:
    """What the step says must fit together. On a GPU only shapes are looked at: whoever fills the tensors checks
    their contents while they are lists (`check_ids`)."""
    for name, value in (("max_query", max_query), ("max_length", max_length)):
        if not isinstance(value, int) or value < 0:
            raise ParamsError(illegal(name, value, "must be a whole number of at least 0"))
    room = tables.shape[1] * block_size
    if max_length > room:
        legal = f"block_tables of {tables.shape[1]} blocks hold at most {room} tokens"
        raise ParamsError(illegal("max_length", max_length, legal))
    if starts.device.type != "cpu":
        return
    counts = starts.diff()
    if (len(lengths) == 0 and tokens) or starts[0] != 0 or starts[-1] != tokens or (counts < 0).any():
        raise ParamsError(illegal("query_starts", starts.tolist(), f"must rise from 0 to {tokens}, the tokens of q"))
    if len(counts) and int(counts.max()) > max_query:
        raise ParamsError(illegal("max_query", max_query, f"a request has {int(counts.max())} queries"))
    check_ids("kv_lengths", lengths, max_length + 1)
    if ((lengths < counts) & (lengths > 0)).any():
        raise ParamsError(illegal("kv_lengths", lengths.tolist(), "must count this step's queries too, or be 0"))
    used = torch.arange(tables.shape[1]) < (-(-lengths // block_size)).unsqueeze(-1)  # [requests, blocks]
    check_ids("block_tables", tables[used], blocks)
