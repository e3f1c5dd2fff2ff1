"""Paged attention of prompts on a CPU, in C++: blocks are copied as they are attended (`paged_prefill.cpp`).

Chapter 09. FlashAttention, Dao et al. 2022 (arXiv:2205.14135), over the blocks of PagedAttention. All prompts and
chunks of a step in one call, whatever their lengths; decodes have `paged_decode_cpu`.

FLOPs: 4 x heads x dim for each token that a token sees. Bytes: K and V once for every 96 rows of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.cpp import library
from minillm.kernels.launch import check_ids
from minillm.kernels.paged_decode_cpu import check_paged, token_rows


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    stretches: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    checked: bool = False,
) -> None:
    """Write the stretches' rows of out [tokens, heads, dim] float32; other rows are left alone.

    q [tokens, heads, dim]; keys and values [blocks, block_size, kv_heads, dim], float32 or bfloat16; computed in
    float32. tables: [requests, max_blocks] int64, block ids. stretches: [n, 4] int64, of each: its first row of q,
    how many rows, the request whose table they read, and how many tokens that has before them. A token sees itself,
    those before it, and no further back than `window`. K and V of all of them must lie in the blocks.
    checked: all this was looked at in an earlier call, on tensors of the same sizes, the same tables and stretches.
    """
    if not checked:
        check(q, keys, values, tables, stretches, out, window)
    _, heads, dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    q = token_rows(q.float())
    tables, stretches = tables.contiguous(), stretches.contiguous()
    library().paged_prefill(
        keys.dtype == torch.bfloat16,
        *(len(stretches), heads, kv_heads, dim, block_size, tables.shape[1], window or 0),
        *(scale, softcap or 0.0),
        *(q.data_ptr(), q.stride(0)),
        *(x.data_ptr() for x in (keys, values, tables, stretches, out)),
        torch.get_num_threads(),
    )


def check(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, stretches: Tensor, out: Tensor, window: int | None
) -> None:
    """ParamsError, if the kernel would read or write memory that is not these tensors'."""
    check_paged(q, keys, values, tables, window)
    if out.shape != q.shape or out.dtype != torch.float32 or out.device.type != "cpu" or not out.is_contiguous():
        legal = f"must be {list(q.shape)} of float32 on a CPU, contiguous"
        raise ParamsError(illegal("out", f"{list(out.shape)} of {out.dtype} on {out.device}", legal))
    check_stretches(stretches, len(q), len(tables), tables.shape[1] * keys.shape[1])


def check_stretches(stretches: Tensor, rows: int, requests: int, tokens: int) -> None:
    """Whether they stay within so many rows, so many requests, and so many tokens of each."""
    if stretches.dim() != 2 or stretches.shape[1] != 4 or stretches.dtype != torch.long or stretches.is_cuda:
        legal = "must be [n, 4] of int64 on a CPU"
        raise ParamsError(illegal("stretches", f"{list(stretches.shape)} of {stretches.dtype}", legal))
    first, count, request, before = stretches.unbind(1)
    check_ids("stretches' request", request, requests)
    for name, low, high, limit in (("rows", first, first + count, rows), ("tokens", before, before + count, tokens)):
        if bool(((low < 0) | (count < 0) | (high > limit)).any()):
            legal = f"must have its {name} in 0 .. {limit - 1}"
            raise ParamsError(illegal("stretches", stretches.tolist(), legal))
