"""A decode step of fixed shape: its inputs at fixed addresses, and the cache read through tensors alone.

Chapter 10. What a CUDA graph records must be right for every later replay, so nothing in the step may be a Python
number that changes: which slot to write, how far to read, which blocks, all are tensors. Rows that are padding have
slot -1 and length 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.cache.paged import PagedCache
from minillm.cache.paged_kernel import attend_tables
from minillm.model.attention import LayerInfo, naive_attention


class StepBuffers:
    """The fixed addresses that every graph reads, int64, filled from the host by one copy: of each row its token,
    position, slot (-1: padding) and length (0: padding), then all block tables."""

    def __init__(self, rows: int, max_blocks: int, device: torch.device) -> None:
        self.rows, self.max_blocks = rows, max_blocks
        self.host = torch.zeros(rows * (4 + max_blocks), dtype=torch.long, pin_memory=device.type == "cuda")
        self.device = torch.zeros_like(self.host, device=device)

    def fill(self, requests: Sequence[tuple[int, int, int, Sequence[int]]], size: int) -> None:
        """requests: (token, position, slot, block table); rows up to `size` become padding."""
        tokens, positions, slots, lengths, tables = (view.numpy() for view in self._split(self.host, size))
        for i, (token, position, slot, table) in enumerate(requests):
            tokens[i], positions[i], slots[i], lengths[i] = token, position, slot, position + 1
            tables[i, : len(table)] = table
        for view, padding in ((tokens, 0), (positions, 0), (slots, -1), (lengths, 0), (tables, 0)):
            view[len(requests) :] = padding
        used = self.rows * 4 + size * self.max_blocks
        self.device[:used].copy_(self.host[:used])  # INTO the buffer: the graph knows this address and no other

    def views(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """tokens, positions, slots, lengths, each [size], and tables [size, max_blocks], on the device."""
        return self._split(self.device, size)

    def _split(self, flat: Tensor, size: int) -> tuple[Tensor, ...]:
        scalars, tables = flat.split((4 * self.rows, self.rows * self.max_blocks))
        return *scalars.view(4, self.rows)[:, :size], tables.view(self.rows, self.max_blocks)[:size]


@dataclass
class StaticCache:
    """The cache as a captured step sees it: where to write and how far to read are tensors, not Python numbers."""

    cache: PagedCache
    token_positions: Tensor  # [n]
    slots: Tensor  # [n]
    lengths: Tensor  # [n], this step's token included
    tables: Tensor  # [n, max_blocks]

    def positions(self, shape: torch.Size) -> Tensor:
        return self.token_positions.view(shape)

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.stored(layer)
        write(keys, k, self.slots)
        write(values, v, self.slots)
        return attend_whole_tables(layer, q, keys, values, self.tables, self.lengths)

    def stored(self, layer: LayerInfo) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [blocks, block_size, kv_heads, dim] each."""
        return self.cache.k[layer.index], self.cache.v[layer.index]


class KernelStaticCache(StaticCache):
    """The same through the kernels of chapters 09 and 10, which read a request's blocks and no more of its table."""

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from minillm.kernels.paged_attention import store_kv

        keys, values = self.stored(layer)
        store_kv(k, v, keys, values, self.slots)
        return attend_tables(layer, q, keys, values, self.tables, self.lengths)

    def attend_unrotated(self, layer: LayerInfo, qkv: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """What a fused block calls: qkv [n, heads + 2 kv_heads, dim], not turned yet -> [n, heads, dim]."""
        from minillm.kernels.fused_rope import rope_and_write

        keys, values = self.stored(layer)
        q = rope_and_write(qkv, tables, keys, values, self.slots)
        return attend_tables(layer, q, keys, values, self.tables, self.lengths)


def write(stored: Tensor, new: Tensor, slots: Tensor) -> None:
    """new [n, kv_heads, dim] into its slots; -1 writes nothing. The shape may not depend on how many those are, so a
    padding row writes once more what a real row writes: the first one's value, to the first one's slot.

    With no real row at all, slot 0 is written with what it holds."""
    flat = stored.flatten(0, 1)  # [slots, kv_heads, dim]
    real = slots >= 0  # [n]
    first = real.to(torch.uint8).argmax(0, keepdim=True)  # [1]; as an index a 0-dim tensor would leave the device
    target = torch.where(real, slots, slots.index_select(0, first).clamp(min=0))  # [n]
    source = new.to(flat.dtype)
    source = torch.where(real[:, None, None], source, source.index_select(0, first))  # [n, kv_heads, dim]
    source = torch.where(real.any(), source, flat[:1])
    flat.index_copy_(0, target, source)


def attend_whole_tables(
    layer: LayerInfo, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor
) -> Tensor:
    """Fixed shapes in plain torch: gather every table to its full width and mask. q [n, heads, dim] -> the same.

    It reads max_blocks blocks a row however short the text: the price of a shape that may not change. The Triton
    kernel of chapter 09 has a fixed grid and reads what is there.
    """
    block_size = keys.shape[1]
    place = torch.arange(tables.shape[1] * block_size, device=q.device)  # [room]
    seen = place < lengths[:, None]  # [n, room]
    if layer.window is not None:
        seen = seen & (place >= lengths[:, None] - layer.window)
    own = torch.minimum(place, (lengths[:, None] - 1).clamp(min=0))  # past the end: the last token, so never a
    blocks = tables.gather(1, own // block_size)  # stranger's, whose NaN would pass through a mask [n, room]
    slots = blocks * block_size + own % block_size
    k, v = (x.flatten(0, 1)[slots].to(q.dtype).transpose(1, 2) for x in (keys, values))  # [n, kv_heads, room, dim]
    grouped = q.unflatten(1, (k.shape[1], -1))  # [n, kv_heads, group, dim]
    mask = (seen | (lengths == 0)[:, None])[:, None, None]  # [n, 1, 1, room]
    if layer.softcap is None:
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=layer.scale)
    else:
        out = naive_attention(grouped, k, v, mask, layer.scale, layer.softcap)
    return torch.where((lengths > 0)[:, None, None], out.flatten(1, 2), 0.0)  # [n, heads, dim]
