"""Paged decode attention on a CPU, in C++: no gather, no padding (`paged_decode.cpp` has the loop).

Chapter 09. PagedAttention, Kwon et al. 2023 (arXiv:2309.06180). What the Triton kernel of `paged_attention` does for
a GPU.

Bytes: K and V that a row sees, once: 2 x length x kv_heads x dim x bytes per element. FLOPs: 4 x heads x length x
dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.cpp import DTYPES, library
from minillm.kernels.launch import check_ids


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    requests: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    checked: bool = False,
) -> Tensor:
    """q [rows, heads, dim], keys and values [blocks, block_size, kv_heads, dim], float32 or bfloat16 -> [rows, heads,
    dim] in q's dtype, computed in float32.

    tables: [requests, max_blocks], block ids. requests, lengths: [rows], whose table a row reads and how many of its
    tokens, the row's own included; length 0: a row of zeros. All three int64. window: only the last so many.
    checked: all this was looked at in an earlier call, on tensors of the same sizes, and the same three.
    """
    if not checked:
        check(q, keys, values, tables, requests, lengths, window)
    rows, heads, dim = q.shape
    _, block_size, kv_heads, _ = keys.shape
    tensors = tuple(x.contiguous() for x in (q.float(), keys, values, tables, requests, lengths))
    out = torch.empty(q.shape, dtype=torch.float32)  # [rows, heads, dim]
    library().paged_decode(
        keys.dtype == torch.bfloat16,
        *(rows, heads, kv_heads, dim, block_size, tables.shape[1], window or 0),
        *(scale, softcap or 0.0),
        *(x.data_ptr() for x in (*tensors, out)),
        torch.get_num_threads(),
    )
    return out.to(q.dtype)


def check(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, requests: Tensor, lengths: Tensor, window: int | None
) -> None:
    """ParamsError, if the kernel would read or write memory that is not these tensors'."""
    check_paged(q, keys, values, tables, window)
    for name, x in (("requests", requests), ("lengths", lengths)):
        if x.shape != (len(q),):
            raise ParamsError(illegal(f"{name}.shape", list(x.shape), f"must be [{len(q)}], one for each row of q"))
        if x.device.type != "cpu":
            raise ParamsError(illegal(f"{name}.device", x.device, "must be a CPU"))
        if x.dtype != torch.long:
            raise ParamsError(illegal(f"{name}.dtype", x.dtype, "must be int64"))
    check_ids("requests", requests, len(tables))
    check_ids("lengths", lengths, tables.shape[1] * keys.shape[1] + 1)


def check_paged(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, window: int | None) -> None:
    """What both kernels ask of the pool and its tables."""
    for name, x, axes in (("q", q, 3), ("keys", keys, 4), ("values", values, 4), ("tables", tables, 2)):
        if x.dim() != axes:
            raise ParamsError(illegal(f"{name}.shape", list(x.shape), f"must have {axes} axes"))
        if x.device.type != "cpu":
            raise ParamsError(illegal(f"{name}.device", x.device, "must be a CPU"))
    _, heads, dim = q.shape
    blocks, _, kv_heads, _ = keys.shape
    if window is not None and window < 1:
        raise ParamsError(illegal("window", window, "must be None or at least 1"))
    for name, x in (("keys", keys), ("values", values)):
        if x.dtype not in DTYPES or x.dtype != keys.dtype:
            raise ParamsError(illegal(f"{name}.dtype", x.dtype, "must be float32 or bfloat16, the same for both"))
        if x.shape != keys.shape or x.shape[3] != dim or not x.is_contiguous():
            legal = f"must be [blocks, block_size, kv_heads, {dim}], contiguous, the same for both"
            raise ParamsError(illegal(f"{name}.shape", list(x.shape), legal))
    if heads % kv_heads:
        raise ParamsError(illegal("q.shape", list(q.shape), f"heads must be a multiple of kv_heads={kv_heads}"))
    if tables.dtype != torch.long:
        raise ParamsError(illegal("tables.dtype", tables.dtype, "must be int64"))
    check_ids("tables", tables, blocks)
