"""The block pool: who holds which block of KV memory. Counting only, no tensors.

Chapter 05. PagedAttention, Kwon et al. 2023 (arXiv:2309.06180), gives a sequence its memory as an operating system
gives a process its pages: fixed-size blocks, handed out as tokens arrive, named by a table, shared by counting.

**The invariant.** Every block is in exactly one of three states:

    free        count 0, in the free list; its content means nothing
    cached      count 0, known to the prefix index; its content may be reused, or evicted when room is needed
    referenced  count >= 1, and the count is the number of tables that hold it

so free + cached + referenced = all. An operation that fails raises and changes nothing. A block changes its content
only while exactly one table holds it and the index does not know it. Swapped tables share on the host what they
shared on the device, and again on the device. `BlockPool.check` verifies all of this;
tests/test_block_pool.py does so over random operations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from minillm.errors import ParamsError, illegal


class NoRoom(Exception):
    """An allocation that cannot be met now. Nothing was changed."""


class PoolError(RuntimeError):
    """The caller broke a rule of the pool (a double free, sharing a free block). Nothing was changed."""


@dataclass
class PrefixStats:
    """What a prefix index was asked and gave, in tokens; and the blocks that it had to forget."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0

    def take_back(self, queries: int, hits: int) -> None:
        """A question whose answer could not be used yet: it will be asked again, and counts once."""
        self.queries, self.hits = self.queries - queries, self.hits - hits


class PrefixIndex(Protocol):
    """Remembers which block holds the KV of which tokens after which tokens (chapter 07: hash table, radix tree).

    Only whole blocks are stored. `salt` separates requests that must not share: the same tokens under another salt
    are another prefix (see `cache_salt`).
    """

    stats: PrefixStats

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Blocks of the longest stored prefix of at most len(tokens) - 1 tokens: the last one is always computed,
        since its logits are what the request came for. Share them before allocating: allocation may evict."""

    def longest_prefix(self, tokens: Sequence[int], salt: str = "") -> int:
        """The tokens that `match` would find now. Counts in no statistic and refreshes nothing."""

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], salt: str = "") -> None:
        """These blocks, all referenced, now hold the KV of these tokens. What is stored already keeps its block."""

    def holds(self, block: int) -> bool: ...

    def reference(self, block: int) -> None:
        """A held block's count went from 0 to 1: it must not be evicted."""

    def release(self, block: int) -> None:
        """A held block's count went from 1 to 0: it may be evicted, and is now the most recently used."""

    def evict(self) -> int | None:
        """Forget the least recently used unreferenced block and return it; None if there is none."""


def cache_salt(salt: str = "", adapter: str = "") -> str:
    """One string of the user's salt and the adapter's id; different pairs give different strings."""
    return f"{len(salt)}:{salt}{adapter}" if salt or adapter else ""


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // block_size)


class BlockPool:
    """Hands out blocks 0 .. num_blocks - 1, least recently freed first; free blocks before cached ones."""

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex | None = None) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParamsError(illegal(name, value, "must be an integer >= 1"))
        self.num_blocks, self.block_size, self.index = num_blocks, block_size, index
        self._free = deque(range(num_blocks))
        self._counts = [0] * num_blocks
        self._cached = 0  # blocks of count 0 that the index holds
        self._versions = [0] * num_blocks  # how often the block's content was replaced, or added to
        self._twins: dict[int, tuple[int, int, int]] = {}  # block -> (block of the other pool, both versions then)

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones."""
        return len(self._free) + self._cached

    @property
    def empty_count(self) -> int:
        """Blocks that hold nothing, not even a cached prefix."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.num_blocks - self.free_count

    def count(self, block: int) -> int:
        return self._counts[block]

    def holds(self, block: int) -> bool:
        """Does the prefix index know this block's content?"""
        return self.index is not None and self.index.holds(block)

    def allocate(self, n: int) -> list[int]:
        """n blocks of count 1, or NoRoom. Evicts from the index only when the free list is empty."""
        if n < 0:
            raise PoolError(illegal("n", n, "must be >= 0"))
        if n > self.free_count:
            raise NoRoom(f"{n} blocks were asked for; {self.free_count} of {self.num_blocks} are free")
        blocks = []
        for _ in range(n):
            if self._free:
                block = self._free.popleft()
            else:
                block = self.index.evict()
                self._cached -= 1
            self._counts[block] = 1
            blocks.append(block)
        self.written(blocks)
        return blocks

    def written(self, blocks: Iterable[int]) -> None:
        """The content of these changes: no copy of it in another pool is one any more."""
        for block in blocks:
            self._versions[block] += 1

    def twin(self, block: int, other: BlockPool) -> int | None:
        """The block of the other pool that holds the same content, if there is one that can be shared."""
        twin, version, other_version = self._twins.get(block, (0, -1, -1))
        if version != self._versions[block] or other_version != other._versions[twin]:
            return None
        return twin if other.count(twin) or other.holds(twin) else None

    def pair(self, block: int, other: BlockPool, twin: int) -> None:
        """The content of `block` is copied to `twin`, or from it."""
        versions = self._versions[block], other._versions[twin]
        self._twins[block], other._twins[twin] = (twin, *versions), (block, *reversed(versions))

    def share(self, blocks: Sequence[int]) -> None:
        """One more table holds each of these: a fork, or a prefix hit (which revives cached blocks)."""
        for block in blocks:
            self._must_exist(block)
            if not self._counts[block] and not self.holds(block):
                raise PoolError(f"block {block} is free: it has no content to share")
        for block in blocks:
            self._counts[block] += 1
            if self._counts[block] == 1:
                self.index.reference(block)
                self._cached -= 1

    def free(self, blocks: Sequence[int]) -> None:
        """One table fewer holds each of these. The last in the list is let go first, so that of a cached prefix the
        tail is evicted before the head, without which the tail cannot be found."""
        for block, times in Counter(blocks).items():
            self._must_exist(block)
            if self._counts[block] < times:
                raise PoolError(f"block {block} freed {times} times, but {self._counts[block]} tables hold it")
        for block in reversed(blocks):
            self._counts[block] -= 1
            if self._counts[block]:
                continue
            if self.holds(block):
                self.index.release(block)
                self._cached += 1
            else:
                self._free.append(block)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """`index.match`, or nothing without an index. The blocks are not yet the caller's: `share` them next."""
        return self.index.match(tokens, salt) if self.index is not None else []

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], salt: str = "") -> None:
        """`index.insert`, if there is an index, after checking that the blocks are held and full."""
        if self.index is None:
            return
        if len(tokens) != len(blocks) * self.block_size:
            raise PoolError(f"{len(tokens)} tokens do not fill {len(blocks)} blocks of {self.block_size}")
        for block in blocks:
            self._must_exist(block)
            if not self._counts[block]:
                raise PoolError(f"block {block} is held by no table; its content may be overwritten at any time")
        self.index.insert(tokens, blocks, salt)

    def clear(self, index: PrefixIndex | None = None) -> None:
        """As when it was made: no table holds a block, no content counts. `index` takes the old one's place, and goes
        on with its statistics."""
        if index is not None and self.index is not None:
            index.stats = self.index.stats
        self.index, self._free, self._cached = index, deque(range(self.num_blocks)), 0
        self._counts, self._twins = [0] * self.num_blocks, {}
        self.written(range(self.num_blocks))

    def check(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Raise AssertionError unless the invariant holds. With all the tables, their blocks are counted too."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        cached = 0
        for block, count in enumerate(self._counts):
            held = self.holds(block)
            assert count >= 0, f"block {block} has count {count}"
            assert (block in free) == (count == 0 and not held), f"block {block}: count {count}, held {held}"
            cached += count == 0 and held
        assert cached == self._cached, f"{cached} cached blocks, counted as {self._cached}"
        if tables is None:
            return
        tables = list(tables)
        holders = Counter(block for table in tables for block in table.blocks)
        for block, count in enumerate(self._counts):
            assert holders[block] == count, f"block {block}: {holders[block]} tables hold it, its count is {count}"
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), "a table holds a block twice"
            assert len(table.blocks) * self.block_size >= table.length, "a table has tokens without room"

    def _must_exist(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise PoolError(illegal("block", block, f"must be between 0 and {self.num_blocks - 1}"))


class BlockTable:
    """Where one sequence's tokens are: token i is in block blocks[i // block_size], at offset i % block_size.

    A method that needs blocks takes the pool, and on NoRoom leaves pool and table as they were.
    """

    def __init__(self, block_size: int, blocks: Iterable[int] = (), length: int = 0) -> None:
        self.block_size, self.blocks, self.length = block_size, list(blocks), length

    def slots(self, start: int, count: int) -> list[int]:
        """The places of tokens start .. start + count - 1 in the flat cache: block * block_size + offset."""
        size, blocks = self.block_size, self.blocks
        return [blocks[i // size] * size + i % size for i in range(start, start + count)]

    def needs(self, pool: BlockPool, count: int) -> int:
        """Blocks that `append` would allocate: new ones, and copies of shared ones."""
        new = blocks_for(self.length + count, self.block_size) - len(self.blocks)
        return max(new, 0) + (len(self._shared(pool, self.length)) if count else 0)

    def append(self, pool: BlockPool, count: int) -> list[tuple[int, int]]:
        """Room for `count` more tokens. Returns the block copies to make before they are written, as `writable`."""
        places = self._shared(pool, self.length) if count else []
        new = max(blocks_for(self.length + count, self.block_size) - len(self.blocks), 0)
        got = pool.allocate(new + len(places))
        pairs = self._replace(pool, places, got)
        pool.written(self.blocks[self.length // self.block_size :] if count else ())
        self.blocks += got[len(pairs) :]
        self.length += count
        return pairs

    def writable(self, pool: BlockPool, start: int) -> list[tuple[int, int]]:
        """Copy-on-write: make all from token `start` on this table's alone. Returns the (source, target) block
        copies to make. A step's copies and swaps are made in the order they were decided, before it writes tokens:
        a source may be free by then, and the target of a later copy."""
        places = self._shared(pool, start)
        pairs = self._replace(pool, places, pool.allocate(len(places)))
        pool.written(self.blocks[start // self.block_size :])
        return pairs

    def fork(self, pool: BlockPool) -> BlockTable:
        """A second table of the same blocks (parallel sampling, beam search). Costs no block until one writes."""
        pool.share(self.blocks)
        return BlockTable(self.block_size, self.blocks, self.length)

    def truncate(self, pool: BlockPool, length: int) -> None:
        """Forget all but the first `length` tokens, and free the blocks that only they needed."""
        if not 0 <= length <= self.length:
            raise PoolError(illegal("length", length, f"must be between 0 and the {self.length} tokens of the table"))
        keep = blocks_for(length, self.block_size)
        pool.free(self.blocks[keep:])
        self.blocks, self.length = self.blocks[:keep], length

    def free(self, pool: BlockPool) -> None:
        """Let go of everything. The table is empty and may be used again."""
        self.truncate(pool, 0)

    def swap_needs(self, source: BlockPool, target: BlockPool) -> int:
        """Blocks of the target that `swap` would take: those to copy to, and cached ones that it would revive."""
        twins = [source.twin(block, target) for block in self.blocks]
        return sum(twin is None or not target.count(twin) for twin in twins)

    def swap(self, source: BlockPool, target: BlockPool) -> list[tuple[int, int]]:
        """Move to the other pool (device to host, or back). Returns the (source, target) copies to make. What tables
        share stays shared: a block that moved with another table, and is there still, is not copied again."""
        if (needs := self.swap_needs(source, target)) > target.free_count:
            raise NoRoom(f"{needs} blocks were asked for; {target.free_count} of {target.num_blocks} are free")
        twins = [source.twin(block, target) for block in self.blocks]
        target.share([twin for twin in twins if twin is not None])  # an allocation might evict them
        fresh = iter(target.allocate(twins.count(None)))
        moved = [next(fresh) if twin is None else twin for twin in twins]
        pairs = [(block, new) for block, new, twin in zip(self.blocks, moved, twins) if twin is None]
        for block, new in pairs:
            source.pair(block, target, new)
        source.free(self.blocks)
        self.blocks = moved
        return pairs

    def _shared(self, pool: BlockPool, start: int) -> list[int]:
        """Places in `blocks` from token `start` on that are not this table's alone to write."""
        first = start // self.block_size
        return [i for i in range(first, len(self.blocks)) if pool.count(b := self.blocks[i]) > 1 or pool.holds(b)]

    def _replace(self, pool: BlockPool, places: list[int], fresh: list[int]) -> list[tuple[int, int]]:
        pairs = [(self.blocks[place], block) for place, block in zip(places, fresh)]
        for place, (_, target) in zip(places, pairs):
            self.blocks[place] = target
        pool.free([source for source, _ in pairs])
        return pairs
