"""How a paged cache attends through kernels: written by slot, read through the block table, nothing gathered.

Chapter 09. The other way to attend over the blocks of `paged`: same pool, same tables, same step. Once a step the two
lists that a kernel needs go to the device; after that no layer waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels import cpp
from minillm.kernels.launch import FLOATS, interpreted, require_triton, why_not
from minillm.model.attention import LayerInfo

ATTENTION = ("auto", "naive", "sdpa", "triton", "cpp")


def choose_attention(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name itself, if it can run here; for "auto": "triton" on a GPU that it compiles for, else "sdpa"."""
    if name not in ATTENTION:
        raise ParamsError(illegal("attention", name, "must be " + " or ".join(f'"{each}"' for each in ATTENTION)))
    if name == "auto":
        compiles = device.type == "cuda" and dtype in FLOATS and why_not() is None
        return "triton" if compiles else "sdpa"
    if name == "cpp":
        reason = cpp.why_not(dtype, device)
        if reason is not None:
            raise ParamsError(illegal("attention", name, f"cannot run here: {reason}"))
    if name == "triton":
        if dtype not in FLOATS:
            raise ParamsError(illegal("attention", name, f"kernels know float32, bfloat16 and float16, not {dtype}"))
        require_triton()
        if device.type != "cuda" and not interpreted():
            raise ParamsError(illegal("attention", name, f"compiled kernels need a GPU; the cache is on {device}"))
    return name


def compiled_attention(device: torch.device, dtype: torch.dtype) -> str:
    """What "auto" becomes where the decode step is compiled: "cpp" if it can run here, else "auto"."""
    return "cpp" if cpp.why_not(dtype, device) is None else "auto"


class KernelReader:
    """Attends for a PagedCache. splits: of the keys, for every launch; None: by length and SMs, at each step."""

    def __init__(self, device: torch.device, splits: int | None = None) -> None:
        self.device, self.splits = device, splits

    def begin(self, query_lengths: list[int], kv_lengths: list[int], tables: Tensor, slots: Tensor) -> None:
        """Padding tokens become a request of their own, of length 0: the kernel gives it zeros."""
        starts, lengths = [0], list(kv_lengths)
        for count in query_lengths:
            starts.append(starts[-1] + count)
        padding = len(slots) - starts[-1]
        if padding:
            starts, lengths = [*starts, len(slots)], [*lengths, 0]
            tables = torch.cat((tables, tables[:1]))  # a row that is never read
        self.tables, self.slots = tables, slots
        self.starts = torch.tensor(starts, dtype=torch.int32, device=self.device)  # [requests + 1]
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=self.device)  # [requests]
        self.max_query, self.max_length = max((*query_lengths, padding)), max(lengths)

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim], keys and values [blocks, block_size, kv_heads,
        dim] -> [tokens, heads, dim]."""
        from minillm.kernels.paged_attention import paged_attention, store_kv

        store_kv(k, v, keys, values, self.slots)
        return paged_attention(
            q,
            keys,
            values,
            self.tables,
            self.starts,
            self.lengths,
            scale=layer.scale,
            max_query=self.max_query,
            max_length=self.max_length,
            window=layer.window,
            softcap=layer.softcap,
            splits=self.splits,
        )


def attend_tables(
    layer: LayerInfo, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor
) -> Tensor:
    """One query a request, as a captured decode step has it: q [n, heads, dim] -> the same. Launches depend on shapes
    alone, so a CUDA graph can hold them: splits are chosen for tables that are full."""
    from minillm.kernels.paged_attention import paged_attention

    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return paged_attention(
        q,
        keys,
        values,
        tables,
        starts,
        lengths.contiguous(),
        scale=layer.scale,
        max_query=1,
        max_length=tables.shape[1] * keys.shape[1],
        window=layer.window,
        softcap=layer.softcap,
    )
