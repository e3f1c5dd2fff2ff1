"""Paged KV cache: keep K and V in fixed-size blocks, so memory is claimed as tokens arrive.

Chapter 05. PagedAttention, Kwon et al. 2023 (arXiv:2309.06180). All requests share one pool of slots; a request's
block table says where its tokens are (`block_pool` decides, this file only stores and reads). One forward takes the
tokens of many requests packed in a row, some one token long (decode), some a chunk of a prompt (prefill).

Bytes: 2 x layers x blocks x block_size x kv_heads x head_dim x bytes per element, whatever the requests do.

Reading is a gather: the slots of a request are collected, then attended. What every layer needs for that (which
slots, which mask) is worked out once a step. Decodes are attended in batches of similar lengths: padding to the
longest of all would make the short ones as slow as the longest, one by one would launch a kernel for each.
Chapter 09 reads without a gather: with attention="triton" the kernels of `paged_kernel` do both, store and attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.cache.paged_kernel import KernelReader, choose_attention
from minillm.errors import ParamsError, illegal
from minillm.model.attention import LayerInfo, attention, naive_attention, visible
from minillm.model.config import ModelConfig

BATCH_TOKENS = 2048  # of one gathered batch of decodes on a CPU: more would leave its cache before it is attended
BATCH_SPREAD = 0.75  # the shortest of a batch is at least this long, as a part of the longest


def cache_bytes(config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of this many blocks, all layers."""
    slots = num_blocks * block_size
    return 2 * config.num_layers * slots * config.num_kv_heads * config.head_dim * dtype.itemsize


@dataclass
class PagedStep:
    """One forward's tokens: requests one after another, then padding, if any.

    slot_mapping: [tokens] int64, the slot each token's K and V go to; -1: padding, not written.
    block_tables: [requests, max_blocks] int64, padded with 0.
    query_lengths: tokens of each request in this step. kv_lengths: tokens each has in all, this step's included.
    positions: [tokens] int64.
    masks: of a request whose tokens are a tree, [its tokens, its tokens]: True where a row may look (chapter 17).
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_lengths: list[int]
    kv_lengths: list[int]
    positions: Tensor
    masks: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Batch:
    """Decodes attended together. Where a request is shorter than the batch, its last slot is repeated and masked:
    a request reads no slot but its own, so not even NaN in a neighbour's reaches it."""

    rows: Tensor  # [n] places in the packed tokens
    slots: Tensor  # [n * length]
    mask: Tensor | None  # [n, 1, 1, length], True where there is a token; None: everywhere
    bias: Tensor | None  # the same as 0 and -inf


@dataclass
class Chunk:
    """One request's stretch of two or more query tokens."""

    start: int
    end: int
    slots: Tensor | None  # [kv length]; None: the step brings all of the request's tokens, nothing needs reading
    mask: Tensor | None = None  # [time, kv length], if it is a tree


class PagedCache:
    """Blocks of slots on the device, and, for preemption by swap, in host memory. `begin` each step, then attend.

    attention: "naive" (the formula), "sdpa" (torch's), "triton" (the kernels of chapter 09), or "auto", by device;
    the attribute then says which.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        host_blocks: int = 0,
        attention: str = "sdpa",
    ) -> None:
        for name, value, least in (
            ("num_blocks", num_blocks, 1),
            ("block_size", block_size, 1),
            ("host_blocks", host_blocks, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ParamsError(illegal(name, value, f"must be an integer >= {least}"))
        self.block_size, self.attention = block_size, choose_attention(attention, torch.device(device), dtype)
        self._kernels = KernelReader(torch.device(device)) if self.attention == "triton" else None
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        host = (config.num_layers, host_blocks, *shape[2:])
        pinned = self.k.is_cuda and host_blocks > 0
        self.host_k = torch.empty(host, dtype=dtype, pin_memory=pinned)
        self.host_v = torch.empty(host, dtype=dtype, pin_memory=pinned)
        self.step: PagedStep | None = None

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.k.nbytes + self.v.nbytes

    def positions(self, shape: torch.Size) -> Tensor:
        return self.step.positions.view(shape)

    def begin(self, step: PagedStep) -> None:
        """Plan the step. What depends on a layer's window is planned at the first layer that has it."""
        self.step = step
        self._by_kernels = self._kernels is not None and not step.masks  # the kernels know no trees
        if self._by_kernels:
            self._kernels.begin(step.query_lengths, step.kv_lengths, step.block_tables, step.slot_mapping)
            return
        written = step.slot_mapping >= 0
        self._kept = None if bool(written.all()) else written.nonzero().squeeze(-1)  # [written tokens]
        self._targets = step.slot_mapping if self._kept is None else step.slot_mapping[self._kept]
        self._plans: dict[int | None, list[Batch | Chunk]] = {}

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads, dim]; padding gets zeros."""
        if self._by_kernels:
            return self._kernels.attend(layer, q, k, v, self.k[layer.index], self.v[layer.index])
        keys, values = self.k[layer.index].flatten(0, 1), self.v[layer.index].flatten(0, 1)  # [slots, kv_heads, dim]
        self._write(keys, k)
        self._write(values, v)
        if layer.window not in self._plans:
            self._plans[layer.window] = self._plan(layer.window, q)
        out = q.new_zeros(q.shape) if self._padded else torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in self._plans[layer.window]:
            if isinstance(part, Batch):
                out.index_copy_(0, part.rows, self._decode(layer, q.index_select(0, part.rows), keys, values, part))
            else:
                out[part.start : part.end] = self._prefill(layer, q, k, v, keys, values, part)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) block copies in all layers. All sources are read before any target is written."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.k.device).unbind(1)
            for store in (self.k, self.v):
                store.index_copy_(1, targets, store.index_select(1, sources))

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) copies of single tokens in all layers, all read before any is written: what was accepted
        of a tree moves together."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.k.device).unbind(1)
            for store in (self.k.flatten(1, 2), self.v.flatten(1, 2)):  # [layers, slots, kv_heads, dim], views
                store.index_copy_(1, targets, store.index_select(1, sources))

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy blocks to host memory."""
        self._move((self.k, self.v), blocks, (self.host_k, self.host_v), host_blocks)

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks back to the device."""
        self._move((self.host_k, self.host_v), host_blocks, (self.k, self.v), blocks)

    @staticmethod
    def _move(sources: tuple, source_blocks: Sequence[int], targets: tuple, target_blocks: Sequence[int]) -> None:
        if len(source_blocks) != len(target_blocks):
            raise ParamsError(f"{len(source_blocks)} blocks cannot be copied to {len(target_blocks)}")
        if not source_blocks:
            return
        for source, target in zip(sources, targets):
            read = source.index_select(1, torch.tensor(source_blocks, device=source.device))
            target.index_copy_(1, torch.tensor(target_blocks, device=target.device), read.to(target.device))

    def _write(self, stored: Tensor, new: Tensor) -> None:
        new = new if self._kept is None else new.index_select(0, self._kept)
        stored.index_copy_(0, self._targets, new.to(stored.dtype))

    def _plan(self, window: int | None, q: Tensor) -> list[Batch | Chunk]:
        step, parts, decodes, start = self.step, [], [], 0
        for request, (new, length) in enumerate(zip(step.query_lengths, step.kv_lengths)):
            first = 0 if window is None else max(0, length - new - window + 1)  # the oldest token any query sees
            if new == 1:
                decodes.append((length - first, start, request))
            elif new:
                slots = None if new == length else self._slots([request], [first], [length], length - first)
                tree = self._tree_mask(request, start, first, window) if request in step.masks else None
                parts.append(Chunk(start, start + new, slots, tree))
            start += new
        self._padded = start < len(q)
        return parts + [self._batch(group, q) for group in batches(decodes, q.is_cuda)]

    def _tree_mask(self, request: int, start: int, first: int, window: int | None) -> Tensor:
        """[new, kv length]: what is stored from token `first` on, then the tree's own; as far as a window goes."""
        own, new = self.step.masks[request], self.step.query_lengths[request]
        stored = torch.arange(first, self.step.kv_lengths[request] - new, device=own.device)
        query = self.step.positions[start : start + new, None]  # [new, 1]
        key = torch.cat((stored, query[:, 0]))  # [kv length]
        mask = torch.cat((own.new_ones(new, len(stored)), own), 1)  # [new, kv length]
        return mask if window is None else mask & (key > query - window)

    def _batch(self, group: list[tuple[int, int, int]], q: Tensor) -> Batch:
        ends = [self.step.kv_lengths[request] for _, _, request in group]
        seen = [length for length, _, _ in group]
        longest = max(seen)
        slots = self._slots([r for _, _, r in group], [e - s for e, s in zip(ends, seen)], ends, longest)
        rows = torch.tensor([row for _, row, _ in group], device=q.device)
        if min(seen) == longest:
            return Batch(rows, slots, None, None)
        mask = torch.arange(longest, device=q.device) < torch.tensor(seen, device=q.device).unsqueeze(
            -1
        )  # [n, length]
        mask = mask[:, None, None]  # [n, 1, 1, length]
        return Batch(rows, slots, mask, torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf")))

    def _slots(self, requests: list[int], starts: list[int], ends: list[int], length: int) -> Tensor:
        """Slots of tokens starts[i] .. ends[i] - 1 of each request, the last repeated up to `length`, flattened."""
        tables = self.step.block_tables
        rows, starts, ends = (torch.tensor(x, device=tables.device).unsqueeze(-1) for x in (requests, starts, ends))
        places = torch.minimum(starts + torch.arange(length, device=tables.device), ends - 1)  # [n, length]
        blocks = tables[rows, places // self.block_size]  # [n, length]
        return (blocks * self.block_size + places % self.block_size).flatten()

    def _decode(self, layer: LayerInfo, q: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
        """q [n, heads, dim]. The query heads that share a KV head see the same keys: they go in as that head's
        queries, so a key is read once, not once a query head."""
        q = q.unflatten(1, (keys.shape[1], -1))  # [n, kv_heads, group, dim]
        k, v = (
            self._gather(x, batch.slots, q.dtype).unflatten(0, (len(q), -1)).transpose(1, 2) for x in (keys, values)
        )
        # k, v: [n, kv_heads, length, dim]
        if layer.softcap is None and self.attention == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.bias, scale=layer.scale)
        else:
            out = naive_attention(q, k, v, batch.mask, layer.scale, layer.softcap)
        return out.flatten(1, 2)  # [n, heads, dim]

    def _prefill(
        self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, chunk: Chunk
    ) -> Tensor:
        q, k, v = (x[chunk.start : chunk.end] for x in (q, k, v))  # [time, heads, dim]
        if chunk.slots is not None:
            k, v = (self._gather(x, chunk.slots, q.dtype) for x in (keys, values))  # [length, kv_heads, dim]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, time or length, dim]
        if chunk.mask is not None:
            out = naive_attention(q, k, v, chunk.mask, layer.scale, layer.softcap)
        elif self.attention == "sdpa":
            out = attention(q, k, v, scale=layer.scale, window=layer.window, softcap=layer.softcap)
        else:
            mask = visible(q.shape[2], k.shape[2], layer.window, device=q.device)
            out = naive_attention(q, k, v, mask, layer.scale, layer.softcap)
        return out.squeeze(0).transpose(0, 1)  # [time, heads, dim]

    @staticmethod
    def _gather(stored: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.index_select(0, slots).to(dtype)  # [slots asked for, kv_heads, dim]


def batches(decodes: list[tuple[int, int, int]], whole: bool) -> list[list[tuple[int, int, int]]]:
    """Decodes (length, row, request) in groups of similar length. whole: in one group, for a device where launches
    cost more than padding."""
    groups: list[list[tuple[int, int, int]]] = []
    for decode in sorted(decodes, reverse=True):
        group = groups[-1] if groups else None
        longest = group[0][0] if group else 0
        if group and (whole or (decode[0] >= BATCH_SPREAD * longest and (len(group) + 1) * longest <= BATCH_TOKENS)):
            group.append(decode)
        else:
            groups.append([decode])
    return groups
