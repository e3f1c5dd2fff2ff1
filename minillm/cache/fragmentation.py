"""Where KV memory goes to waste: room held and not used (internal), room free and of no use (external).

Chapter 05. Three ways to give a request its slots, in the order in which engines tried them: a contiguous stretch of
the longest it may get; a contiguous stretch of what it will need, where somebody knows; blocks. Paging leaves at most
block_size - 1 slots of each request unused, and no external waste at all: any free block serves any request.
Terms and comparison as in PagedAttention, Kwon et al. 2023 (arXiv:2309.06180). Counting only, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minillm.cache.block_pool import blocks_for


@dataclass(frozen=True)
class Held:
    """Slots that requests hold, and those of them that hold a token."""

    slots: int
    used: int

    @property
    def wasted(self) -> int:
        return self.slots - self.used

    @property
    def waste(self) -> float:
        """The wasted part of what is held, 0 to 1."""
        return self.wasted / self.slots if self.slots else 0.0


def held_in_blocks(lengths: Iterable[int], block_size: int) -> Held:
    """Requests of these lengths in a paged cache: only the last block of each may be part empty."""
    lengths = list(lengths)
    return Held(sum(blocks_for(length, block_size) * block_size for length in lengths), sum(lengths))


def held_in_reservations(lengths: Iterable[int], max_length: int) -> Held:
    """The same requests, each with room for `max_length` tokens claimed when it came in."""
    lengths = list(lengths)
    return Held(max_length * len(lengths), sum(lengths))


class Arena:
    """A contiguous allocator, first fit: what external waste looks like. `holes` are (start, size), left to right."""

    def __init__(self, slots: int) -> None:
        self.slots, self._held = slots, {}  # start -> size

    @property
    def holes(self) -> list[tuple[int, int]]:
        found, end = [], 0
        for start in [*sorted(self._held), self.slots]:
            if start > end:
                found.append((end, start - end))
            end = start + self._held.get(start, 0)
        return found

    def allocate(self, size: int) -> int | None:
        """The start of the first hole that is large enough; None without one, however much is free in all."""
        for start, room in self.holes:
            if room >= size:
                self._held[start] = size
                return start
        return None

    def free(self, start: int) -> None:
        del self._held[start]

    @property
    def free_slots(self) -> int:
        return self.slots - sum(self._held.values())

    def useless_slots(self, size: int) -> int:
        """Free slots that cannot serve requests of this size: external fragmentation, as that request meets it."""
        return sum(room % size for _, room in self.holes)
