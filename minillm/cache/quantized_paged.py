"""The paged cache in 8, 4 or 2 bits: a block is rounded when it is full, and forked, swapped and shared as codes.

Chapter 14. KIVI, Liu et al. 2024 (arXiv:2402.02750), on the blocks of PagedAttention (arXiv:2309.06180). Where a
format needs a residual, it is one block: what a query sees (`kv_format`) then depends on whole blocks, so a block
that the prefix cache hands to another request is rounded already, and no floats have to be handed over with it.

Full blocks live in `parts`, by block id. The unrounded tokens live in `recent`, a few blocks of floats that belong to
block ids through its `slot_of`. **The invariant**, after every step, for every table that took part in it:

    each full block        is in parts, rounded once, from the floats that were computed
    the block being written, and the one before it, if their floats were ever there: have a slot as well
    every other block      has none

Reading needs the first two lines; the block before is what rolling back (`BlockTable.truncate`) by up to a block
needs to be exact. Further back the block is opened again from its codes (`reopened` counts). Copies (copy-on-write,
swap) take the slot along. A slot is let go when its block is: the pool's count is 0. tests/test_quantized_cache.py
compares random forks, swaps, hits and rollbacks with each request alone.

Bytes: blocks x block_size x `token_bytes` + slots x block_size x bytes of an unrounded token; slots is twice the
requests that run at once (should steps ever need more, it grows). Reading dequantises what it gathers, so this saves
memory and not time; a kernel would dequantise in registers, as chapter 11's does for weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.cache.block_pool import BlockPool, blocks_for
from minillm.cache.kv_format import KVFormat, Parts, attend_masked, kv_format, sees
from minillm.cache.paged import cache_bytes
from minillm.cache.paged_plan import SHORT, PagedStep, batches
from minillm.cache.recent import RecentBlocks
from minillm.errors import ParamsError, illegal
from minillm.model.attention import LayerInfo
from minillm.model.config import ModelConfig


def paged_format(name: str, block_size: int) -> KVFormat:
    """The format of that name whose residual, if it has one, is a block."""
    return kv_format(name, residual=block_size)


def block_bytes(config: ModelConfig, form: KVFormat, block_size: int) -> int:
    """Bytes of one full block, all layers."""
    return round(block_size * form.token_bytes(config))


def recent_bytes(config: ModelConfig, form: KVFormat, block_size: int, sequences: int, dtype: torch.dtype) -> int:
    """Bytes of the unrounded blocks for this many requests at once."""
    return cache_bytes(config, 2 * sequences, block_size, dtype) if form.residual else 0


@dataclass
class Group:
    """Queries attended together: `time` of each of n requests. Keys of a request are its rounded blocks, then floats.
    Blocks and floats are padded to the longest; `valid` says which keys are the request's own (None: all)."""

    rows: Tensor  # [n * time] places in the packed tokens
    time: int
    blocks: Tensor  # [n, blocks]
    floats: Tensor  # [n, floats] places among the step's unrounded tokens
    query: Tensor  # [n, time] positions
    key: Tensor  # [n, keys] positions
    valid: Tensor | None  # [n, keys]


class QuantizedPagedCache:
    """Used as PagedCache. pool: hands out the blocks, and says which are in use. sequences: how many requests run at
    once, for the size of `recent`."""

    def __init__(
        self,
        config: ModelConfig,
        pool: BlockPool,
        form: KVFormat,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        host_blocks: int = 0,
        attention: str = "sdpa",
        sequences: int = 32,
    ) -> None:
        if attention not in ("auto", "sdpa", "naive"):
            legal = 'must be "auto", "sdpa" or "naive" with a quantised KV cache: the kernels read floats'
            raise ParamsError(illegal("attention", attention, legal))
        if form.residual not in (0, pool.block_size):
            raise ParamsError(illegal("residual", form.residual, f"must be a block, {pool.block_size} tokens"))
        for name, value, least in (("host_blocks", host_blocks, 0), ("sequences", sequences, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ParamsError(illegal(name, value, f"must be an integer >= {least}"))
        self.pool, self.form, self.block_size, self.dtype = pool, form, pool.block_size, dtype
        self.attention = "sdpa" if attention == "auto" else attention
        heads = config.num_kv_heads, config.head_dim
        self.units = 1 if form.residual else self.block_size  # of a block: whole, or token by token

        def room(blocks: int, **where) -> dict[str, Parts]:
            return {r: form.empty(r, (config.num_layers, blocks, self.units), *heads, **where) for r in "kv"}

        self.parts = room(pool.num_blocks, device=device)
        pinned = torch.device(device).type == "cuda" and host_blocks > 0
        self.host = room(host_blocks, pin_memory=pinned)
        slots = 2 * sequences if form.residual else 0
        self.recent = RecentBlocks(config.num_layers, slots, (self.block_size, *heads), dtype, device)
        self.reopened = 0
        self.step: PagedStep | None = None

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.recent.nbytes + sum(part.nbytes for role in "kv" for part in self.parts[role])

    def positions(self, shape: torch.Size) -> Tensor:
        return self.step.positions.view(shape)

    # A step.

    def begin(self, step: PagedStep) -> None:
        """Plan the step: what is read from where, which blocks are full after it, and where new floats go."""
        self.step, self._masks = step, {}
        tables, device, size = step.block_tables.tolist(), step.slot_mapping.device, self.block_size
        requests = [r for r in zip(tables, step.query_lengths, step.kv_lengths) if r[1]]
        kept_before = self._settle(requests) if self.form.residual else [[] for _ in requests]
        old, full, full_from, kept, kept_from, spans = [], [], [], [], [], []
        row = 0
        for (table, new, length), before in zip(requests, kept_before):
            start, table = length - new, table[: blocks_for(length, size)]
            if self.form.residual:
                own, first = start // size * size, len(old)  # from own on, keys are floats
                old += before
                # places of tokens own .. length - 1: old ones count from 0, new ones from the end of all old ones
                where = [(0, i) for i in range(first, len(old))] + [(1, i) for i in range(row, row + new)]
                for place in range(own // size, length // size):
                    full.append(table[place])
                    full_from.append(where[place * size - own : (place + 1) * size - own])
                for token in range(max(start, ((length - 1) // size - 1) * size), length):
                    kept.append(self.recent.slot_of[table[token // size]] * size + token % size)
                    kept_from.append(row + token - start)
                spans.append((row, new, length, table[: (length - 1) // size], own, where))
            else:
                spans.append((row, new, length, table, length, []))
            row += new
        self._padded = row < len(step.slot_mapping)

        def flat(places) -> list[int]:
            return [i + kind * len(old) for kind, i in places]

        def tensor(values) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        self._old, self._full, self._kept, self._kept_from = map(tensor, (old, full, kept, kept_from))
        self._full_from = tensor([flat(places) for places in full_from]).view(-1, size)
        groups = [[i] for i, (_, new, *_) in enumerate(spans) if new > SHORT]
        short: dict[int, list[tuple[int, int, int]]] = {}  # decodes and drafts, by their number of tokens
        for i, (_, new, length, *_) in enumerate(spans):
            if new <= SHORT:
                short.setdefault(new, []).append((length, i, i))
        for some in short.values():
            groups += [[i for _, i, _ in group] for group in batches(some, device.type == "cuda")]
        self._groups = [self._group([spans[i] for i in group], flat, tensor) for group in groups]
        if not self.form.residual:
            written = step.slot_mapping >= 0
            self._kept, self._kept_from = step.slot_mapping[written], written.nonzero().squeeze(-1)

    def _settle(self, requests: list[tuple[list[int], int, int]]) -> list[list[int]]:
        """Slots for what each (table, new tokens, length) writes, and none for what no later step can need. -> places
        in `recent` of the floats before its new tokens: a layer reads before it writes, so their slots may go."""
        size, recent, before = self.block_size, self.recent, []
        for block in [b for b in recent.slot_of if not self.pool.count(b)]:
            recent.release(block)
        for table, new, length in requests:
            start, block = length - new, table[(length - new) // size]
            if start % size and block not in recent.slot_of:  # rolled back to where no floats are left
                self._reopen(block)
            before.append([recent.slot_of[block] * size + i for i in range(start % size)] if start % size else [])
        for table, _, length in requests:
            last = (length - 1) // size
            done = set(table[: max(last - 1, 0)])
            room = set(table[last + 1 :]) - {0}  # beyond the tokens; or padding: block 0, perhaps another's
            for block in recent.slot_of.keys() & (done | room):
                recent.release(block)
        for table, new, length in requests:
            last = (length - 1) // size
            for place in range(max((length - new) // size, last - 1), last + 1):
                recent.take(table[place])
        return before

    def _reopen(self, block: int) -> None:
        """Floats again, from the codes."""
        self.reopened += 1
        units = [tuple(part[:, block].flatten(0, 1) for part in self.parts[role]) for role in "kv"]  # [layers, ...]
        self.recent.set(block, tuple(self.form.decode(role, x, self.dtype) for role, x in zip("kv", units)))

    def _group(self, spans: list[tuple], flat, tensor) -> Group:
        """spans: (first row, new tokens, tokens in all, rounded blocks, first float, places of the floats)."""
        size, time = self.block_size, spans[0][1]
        blocks, floats = max(len(s[3]) for s in spans), max(len(s[5]) for s in spans)
        table = [s[3] + [0] * (blocks - len(s[3])) for s in spans]
        places = [flat(s[5]) + [0] * (floats - len(s[5])) for s in spans]
        own, length = tensor([s[4] for s in spans])[:, None], tensor([s[2] for s in spans])[:, None]  # [n, 1]
        rounded = tensor(range(blocks * size)).expand(len(spans), -1)  # [n, blocks * size]
        key = torch.cat((rounded, own + tensor(range(floats))), 1)  # [n, keys]
        ends = torch.minimum(tensor([len(s[3]) * size for s in spans])[:, None], length)  # of the rounded tokens
        valid = torch.cat((rounded < ends, key[:, blocks * size :] < length), 1)
        valid = None if bool(valid.all()) else valid
        query = length - time + tensor(range(time))  # [n, time]
        rows = (tensor([s[0] for s in spans])[:, None] + tensor(range(time))).flatten()
        table, places = (tensor(x).view(len(spans), -1) for x in (table, places))
        return Group(rows, time, table, places, query, key, valid)

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads, dim]; padding gets zeros."""
        floats = {role: self._store(layer.index, role, new.to(self.dtype)) for role, new in (("k", k), ("v", v))}
        out = q.new_zeros(q.shape) if self._padded else torch.empty_like(q, memory_format=torch.contiguous_format)
        for i, group in enumerate(self._groups):
            keys, values = (self._read(layer.index, role, group, floats[role]).to(q.dtype) for role in "kv")
            if (i, layer.window) not in self._masks:
                rounded = torch.arange(group.key.shape[1], device=q.device) < group.blocks.shape[1] * self.block_size
                mask = sees(group.query, group.key, rounded, self.form.residual, layer.window)  # [n, time, keys]
                self._masks[i, layer.window] = mask if group.valid is None else mask & group.valid[:, None]
            queries = q.index_select(0, group.rows).unflatten(0, (-1, group.time))  # [n, time, heads, dim]
            mask = self._masks[i, layer.window]
            part = attend_masked(layer, queries, keys, values, mask, self.attention == "naive")
            out.index_copy_(0, group.rows, part.flatten(0, 1))
        return out

    def _store(self, layer: int, role: str, new: Tensor) -> Tensor:
        """Write new [tokens, kv_heads, dim]; -> the step's unrounded tokens: those kept before, then the new ones."""
        if not self.form.residual:
            written = self.form.encode(role, new.index_select(0, self._kept_from).unsqueeze(1))
            for stored, part in zip(self.parts[role], written):
                stored[layer].flatten(0, 1).index_copy_(0, self._kept, part)  # a token is a unit
            return new
        recent = self.recent.layer(role, layer)  # [slots * size, kv_heads, dim]
        floats = torch.cat((recent.index_select(0, self._old), new))
        if len(self._full):
            units = floats.index_select(0, self._full_from.flatten()).unflatten(0, self._full_from.shape)
            for stored, part in zip(self.parts[role], self.form.encode(role, units)):
                stored[layer].index_copy_(0, self._full, part.unsqueeze(1))
        recent.index_copy_(0, self._kept, new.index_select(0, self._kept_from))
        return floats

    def _read(self, layer: int, role: str, group: Group, floats: Tensor) -> Tensor:
        """[n, keys, kv_heads, dim]. Keys that are not the request's own become 0: not even a mask stops NaN."""
        n, blocks = group.blocks.shape
        parts = tuple(part[layer].index_select(0, group.blocks.flatten()).flatten(0, 1) for part in self.parts[role])
        rounded = self.form.decode(role, parts, self.dtype)  # [n * blocks * units, unit, kv_heads, dim]
        rounded = rounded.view(n, blocks * self.block_size, *rounded.shape[2:])
        fresh = floats.index_select(0, group.floats.flatten()).unflatten(0, group.floats.shape)
        keys = torch.cat((rounded, fresh), 1)
        return keys if group.valid is None else keys.masked_fill_(~group.valid[..., None, None], 0)

    # Copies between steps.

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) block copies in all layers. All sources are read before any target is written."""
        self._move(self.parts, [s for s, _ in pairs], self.parts, [t for _, t in pairs])
        self.recent.copy(pairs)

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy blocks to host memory."""
        self._move(self.parts, blocks, self.host, host_blocks)
        self.recent.swap_out(blocks, host_blocks)

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks back to the device."""
        self._move(self.host, host_blocks, self.parts, blocks)
        self.recent.swap_in(host_blocks, blocks)

    @staticmethod
    def _move(sources: dict, source_blocks: Sequence[int], targets: dict, target_blocks: Sequence[int]) -> None:
        if len(source_blocks) != len(target_blocks):
            raise ParamsError(f"{len(source_blocks)} blocks cannot be copied to {len(target_blocks)}")
        for role in "kv" if len(source_blocks) else "":
            for source, target in zip(sources[role], targets[role]):
                read = source.index_select(1, torch.tensor(source_blocks, device=source.device))
                target.index_copy_(1, torch.tensor(target_blocks, device=target.device), read.to(target.device))
