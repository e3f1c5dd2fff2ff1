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
    numbers = q.float().contiguous()
    tensors = tuple(x.contiguous() for x in (keys, values, tables, requests, lengths))
    out = torch.empty(q.shape, dtype=torch.float32)  # [rows, heads, dim]
    library().paged_decode(
        keys.dtype == torch.bfloat16,
        *(rows, heads, kv_heads, dim, block_size, tables.shape[1], window or 0),
        *(scale, softcap or 0.0),
        *(numbers.data_ptr(), numbers.stride(0)),
        *(x.data_ptr() for x in tensors[:3]),
        None,  # the first row of q is the first of requests
        *(x.data_ptr() for x in (*tensors[3:], out)),
        torch.get_num_threads(),
    )
    return out.to(q.dtype)


def paged_store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, checked: bool = False) -> None:
    """Write k and v [tokens, kv_heads, dim] to their slots [tokens] int64 of keys and values [blocks, block_size,
    kv_heads, dim], in those two's dtype; a slot of -1 is nobody's.
    checked: as in `paged_decode`."""
    if not checked:
        check_pool(keys, values)
        wanted = (len(k), *keys.shape[2:])
        for name, x, shape in (("k", k, wanted), ("v", v, wanted), ("slots", slots, wanted[:1])):
            if x.shape != shape or x.device.type != "cpu":
                raise ParamsError(illegal(name, f"{list(x.shape)} on {x.device}", f"must be {list(shape)} on a CPU"))
        if slots.dtype != torch.long:
            raise ParamsError(illegal("slots.dtype", slots.dtype, "must be int64"))
        check_ids("slots", slots, len(keys) * keys.shape[1], padding=True)
    k, v, slots = token_rows(k.to(keys.dtype)), token_rows(v.to(keys.dtype)), slots.contiguous()
    (tokens, kv_heads, dim), size = k.shape, keys.element_size()
    library().paged_store(
        *(tokens, kv_heads * dim * size),
        *(k.data_ptr(), k.stride(0) * size, v.data_ptr(), v.stride(0) * size),
        *(x.data_ptr() for x in (keys, values, slots)),
    )


def token_rows(x: Tensor) -> Tensor:
    """x [tokens, heads, dim], or a copy, whose tokens are each in one piece, wherever they lie."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


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
    check_pool(keys, values)
    for name, x, axes in (("q", q, 3), ("tables", tables, 2)):
        if x.dim() != axes:
            raise ParamsError(illegal(f"{name}.shape", list(x.shape), f"must have {axes} axes"))
        if x.device.type != "cpu":
            raise ParamsError(illegal(f"{name}.device", x.device, "must be a CPU"))
    _, heads, dim = q.shape
    kv_heads = keys.shape[2]
    if window is not None and window < 1:
        raise ParamsError(illegal("window", window, "must be None or at least 1"))
    if keys.shape[3] != dim:
        raise ParamsError(illegal("keys.shape", list(keys.shape), f"must end in q's dim={dim}"))
    if heads % kv_heads:
        raise ParamsError(illegal("q.shape", list(q.shape), f"heads must be a multiple of kv_heads={kv_heads}"))
    if tables.dtype != torch.long:
        raise ParamsError(illegal("tables.dtype", tables.dtype, "must be int64"))
    check_ids("tables", tables, len(keys))


def check_pool(keys: Tensor, values: Tensor) -> None:
    """Whether these are the two halves of a pool that the kernels can read."""
    for name, x in (("keys", keys), ("values", values)):
        if x.device.type != "cpu":
            raise ParamsError(illegal(f"{name}.device", x.device, "must be a CPU"))
        if x.dtype not in DTYPES or x.dtype != keys.dtype:
            raise ParamsError(illegal(f"{name}.dtype", x.dtype, "must be float32 or bfloat16, the same for both"))
        if x.dim() != 4 or x.shape != keys.shape or not x.is_contiguous():
            legal = "must be [blocks, block_size, kv_heads, dim], contiguous, the same for both"
            raise ParamsError(illegal(f"{name}.shape", list(x.shape), legal))
