"""Blocks that still have their floats: a few places, given to block ids as they are written and taken back.

Chapter 14. A quantised paged cache keeps the newest tokens of each request unrounded. Blocks come and go by the
pool's rules; which of them has floats is written down here, in `slot_of`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Floats = tuple[Tensor, Tensor]  # K and V of a block, all layers


class RecentBlocks:
    """Room for K and V of `slots` blocks in the model's type, [layers, slots, block_size, kv_heads, dim] each."""

    def __init__(
        self, layers: int, slots: int, block: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (layers, slots, *block)
        self.store = {role: torch.zeros(shape, dtype=dtype, device=device) for role in "kv"}
        self.slot_of: dict[int, int] = {}  # block -> its place in the store
        self.free = list(range(slots))
        self.on_host: dict[int, Floats] = {}  # block of the host's pool -> its floats

    @property
    def slots(self) -> int:
        return self.store["k"].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.store.values())

    def layer(self, role: str, layer: int) -> Tensor:
        """All places of a layer, token after token: [slots * block_size, kv_heads, dim]."""
        return self.store[role][layer].flatten(0, 1)

    def take(self, block: int) -> int:
        """The block's place; a new one if it has none. Grows where there is none left."""
        if block not in self.slot_of:
            if not self.free:
                self.free = [self.slots, self.slots + 1]
                with torch.inference_mode(False):
                    for role, x in self.store.items():
                        self.store[role] = torch.cat((x, x.new_zeros(len(x), 2, *x.shape[2:])), 1)
            self.slot_of[block] = self.free.pop()
        return self.slot_of[block]

    def release(self, block: int) -> None:
        if (slot := self.slot_of.pop(block, None)) is not None:
            self.free.append(slot)

    def get(self, block: int) -> Floats | None:
        """A copy of the block's floats, if it has any."""
        slot = self.slot_of.get(block)
        return None if slot is None else tuple(self.store[role][:, slot].clone() for role in "kv")

    def set(self, block: int, floats: Floats | None) -> None:
        """The block has these floats now, or none."""
        if floats is None:
            self.release(block)
            return
        slot = self.take(block)
        for role, x in zip("kv", floats):
            self.store[role][:, slot] = x.to(self.store[role].device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target): all sources are read before any target is written."""
        for target, floats in [(target, self.get(source)) for source, target in pairs]:
            self.set(target, floats)

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for block, target in zip(blocks, host_blocks):
            self.on_host.pop(target, None)
            if (floats := self.get(block)) is not None:
                self.on_host[target] = tuple(x.cpu() for x in floats)

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        for source, block in zip(host_blocks, blocks):
            self.set(block, self.on_host.get(source))
