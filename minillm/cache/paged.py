"""Paged KV cache: keep K and V in fixed-size blocks, so memory is claimed as tokens arrive.

Chapter 05. PagedAttention, Kwon et al. 2023 (arXiv:2309.06180). All requests share one pool of slots; a request's
block table says where its tokens are (`block_pool` decides, this file only stores and reads). One forward takes the
tokens of many requests packed in a row, some one token long (decode), some a chunk of a prompt (prefill).

Bytes: 2 x layers x blocks x block_size x kv_heads x head_dim x bytes per element, whatever the requests do.

Reading is a gather: the slots of a request are collected, then attended. What every layer needs for that (who is
attended with whom, which slots, which mask) is worked out once a step, in `paged_plan`.
Chapter 09 reads without a gather: with attention="triton" the kernels of `paged_kernel` do both, store and attend;
with "cpp" blocks are read in place on a CPU, by `paged_decode_cpu` and, for prompts, `paged_prefill_cpu`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.cache.paged_kernel import KernelReader, choose_attention
from minillm.cache.paged_plan import Batch, Chunk, PagedStep, Part, Rows, Stretches, parts_in_place, plan
from minillm.errors import ParamsError, illegal
from minillm.kernels.layers_cpu import InPlace
from minillm.kernels.paged_decode_cpu import paged_decode, paged_store
from minillm.kernels.paged_prefill_cpu import paged_prefill
from minillm.model.attention import LayerInfo, attention, naive_attention, visible
from minillm.model.config import ModelConfig


def cache_bytes(config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of this many blocks, all layers."""
    slots = num_blocks * block_size
    return 2 * config.num_layers * slots * config.num_kv_heads * config.head_dim * dtype.itemsize


class PagedCache:
    """Blocks of slots on the device, and, for preemption by swap, in host memory. `begin` each step, then attend.

    attention: "naive" (the formula), "sdpa" (torch's), "triton" (the kernels of chapter 09), "cpp" (its kernels for
    a CPU; trees still by torch's), or "auto", by device; the attribute then says which.
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
        self._checked = False
        self._plans: dict[int | None, list[Part]] = {}

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads, dim]; padding gets zeros."""
        if self._by_kernels:
            return self._kernels.attend(layer, q, k, v, self.k[layer.index], self.v[layer.index])
        self._store(layer, k, v)
        keys, values = self.k[layer.index].flatten(0, 1), self.v[layer.index].flatten(0, 1)  # [slots, kv_heads, dim]
        if layer.window not in self._plans:
            in_place = self.attention == "cpp"
            self._plans[layer.window] = plan(self.step, layer.window, q, keys.shape[1], self.block_size, in_place)
        parts = self._plans[layer.window]
        if len(parts) == 1 and isinstance(parts[0], Rows) and len(parts[0].rows) == len(q):  # all, in order
            return self._in_place(layer, q, parts[0])
        padded = sum(self.step.query_lengths) < len(q)
        out = q.new_zeros(q.shape) if padded else torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in parts:
            if isinstance(part, Rows):
                out.index_copy_(0, part.rows, self._in_place(layer, q.index_select(0, part.rows), part))
            elif isinstance(part, Stretches):
                out = self._stretches(layer, q, out, part)
            elif isinstance(part, Batch):
                out.index_copy_(0, part.rows, self._together(layer, q.index_select(0, part.rows), keys, values, part))
            else:
                out[part.start : part.end] = self._prefill(layer, q, k, v, keys, values, part)
        return out

    def in_place(self) -> InPlace | None:
        """The step, for a kernel that does all layers in one call; None: something in it is not attended in place."""
        step = self.step
        if self.attention != "cpp" or step.masks or self._kept is not None:
            return None
        parts = {type(part): part for part in parts_in_place(step)}
        nobody = step.positions.new_empty((0,))
        rows = parts.get(Rows, Rows(nobody, nobody, nobody))
        stretches = parts.get(Stretches, Stretches(nobody.view(0, 4)))
        tables = (step.slot_mapping, step.block_tables)
        return InPlace(self.k, self.v, *tables, rows.rows, rows.requests, rows.lengths, stretches.table)

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

    def _store(self, layer: LayerInfo, k: Tensor, v: Tensor) -> None:
        keys, values = self.k[layer.index], self.v[layer.index]  # [blocks, block_size, kv_heads, dim]
        if self.attention == "cpp":
            paged_store(k, v, keys, values, self.step.slot_mapping, self._checked)
            self._checked = True  # a step's layers differ in their numbers, not in where they go
            return
        for stored, new in ((keys, k), (values, v)):
            new = new if self._kept is None else new.index_select(0, self._kept)
            stored.flatten(0, 1).index_copy_(0, self._targets, new.to(stored.dtype))

    def _in_place(self, layer: LayerInfo, q: Tensor, part: Rows) -> Tensor:
        """q [rows, heads, dim] -> the same."""
        out = paged_decode(
            q,
            self.k[layer.index],
            self.v[layer.index],
            self.step.block_tables,
            part.requests,
            part.lengths,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            checked=part.checked,
        )
        part.checked = True  # a step's layers differ in their numbers, not in who reads what
        return out

    def _stretches(self, layer: LayerInfo, q: Tensor, out: Tensor, part: Stretches) -> Tensor:
        """out [tokens, heads, dim], with the stretches' rows written."""
        written = out.float()  # itself, if it is float32
        paged_prefill(
            q,
            self.k[layer.index],
            self.v[layer.index],
            self.step.block_tables,
            part.table,
            written,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            checked=part.checked,
        )
        part.checked = True
        return written.to(out.dtype)

    def _together(self, layer: LayerInfo, q: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
        """q [n * time, heads, dim] -> the same. The query heads that share a KV head see the same keys: they go in as
        that head's queries, so a key is read once, not once a query head."""
        n, kv_heads, time = len(q) // batch.time, keys.shape[1], batch.time
        k, v = (self._gather(x, batch.slots, q.dtype).unflatten(0, (n, -1)).transpose(1, 2) for x in (keys, values))
        # k, v: [n, kv_heads, length, dim]
        q = q.view(n, time, kv_heads, -1, q.shape[-1]).movedim(1, 3)  # [n, kv_heads, group, time, dim]
        group, q = q.shape[2], q.flatten(2, 3)  # [n, kv_heads, group * time, dim]
        if layer.softcap is None and self.attention != "naive":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.bias, scale=layer.scale)
        else:
            out = naive_attention(q, k, v, batch.mask, layer.scale, layer.softcap)
        out = out.unflatten(2, (group, time)).movedim(3, 1)  # [n, time, kv_heads, group, dim]
        return out.flatten(2, 3).flatten(0, 1)  # [n * time, heads, dim]

    def _prefill(
        self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, chunk: Chunk
    ) -> Tensor:
        q, k, v = (x[chunk.start : chunk.end] for x in (q, k, v))  # [time, heads, dim]
        if chunk.slots is not None:
            k, v = (self._gather(x, chunk.slots, q.dtype) for x in (keys, values))  # [length, kv_heads, dim]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, time or length, dim]
        if self.attention != "naive":
            out = attention(q, k, v, scale=layer.scale, window=layer.window, softcap=layer.softcap)
        else:
            mask = visible(q.shape[2], k.shape[2], layer.window, device=q.device)
            out = naive_attention(q, k, v, mask, layer.scale, layer.softcap)
        return out.squeeze(0).transpose(0, 1)  # [time, heads, dim]

    @staticmethod
    def _gather(stored: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        return stored.index_select(0, slots).to(dtype)  # [slots asked for, kv_heads, dim]
