"""Prefix cache by block hashes: a block is known by the hash of its tokens and of the hash before it.

Chapter 07. The automatic prefix caching of vLLM (Kwon et al. 2023, arXiv:2309.06180) in its simplest form. K and V of
a token depend on all tokens before it, so a block may be reused only after the same prefix. Chaining the hashes turns
"same prefix, same block" into one dictionary look-up a block.

**A collision can never serve another request's KV.** A hash only proposes an entry; the entry is used when its
tokens, and those of every block before it, are equal to the request's. That costs one comparison a block, since an
entry points at its predecessor, and a predecessor that is the very object just verified needs no second look.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

from minillm.cache.block_pool import PoolError, PrefixStats


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block: sha256 over its predecessor's key (for the first block: the salt) and its tokens."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


class Entry:
    """A stored block. Its predecessor is kept even after that one is evicted: it tells which tokens came before."""

    __slots__ = ("block", "key", "parent", "tokens")

    def __init__(self, key: bytes, parent: Entry | None, tokens: tuple, block: int | None) -> None:
        self.key, self.parent, self.tokens, self.block = key, parent, tokens, block

    def follows(self, prefix: Entry) -> bool:
        """Do the same tokens stand before this entry as in `prefix`, that one's own included?"""
        mine, other = self.parent, prefix
        while mine is not other:
            if mine is None or other is None or mine.tokens != other.tokens:
                return False
            mine, other = mine.parent, other.parent
        self.parent = prefix  # the same content; the next comparison ends here at once
        return True


class HashIndex:
    """`PrefixIndex` by chained hashes, with least-recently-used eviction of unreferenced blocks."""

    def __init__(self, block_size: int, hash_block: Callable[[bytes, Sequence[int]], bytes] = hash_block) -> None:
        self.block_size, self.hash_block = block_size, hash_block
        self.stats = PrefixStats()
        self._entries: dict[bytes, Entry] = {}
        self._of_block: dict[int, Entry] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._of_block)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        blocks = self._find(tokens, salt)
        self.stats.queries += len(tokens)
        self.stats.hits += len(blocks) * self.block_size
        return blocks

    def longest_prefix(self, tokens: Sequence[int], salt: str = "") -> int:
        return len(self._find(tokens, salt)) * self.block_size

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], salt: str = "") -> None:
        fresh: dict[bytes, Entry] = {}
        used, prefix = set(), self._root(salt)
        for block, (key, chunk) in zip(blocks, self._keys(tokens, salt)):
            entry = self._entries.get(key) or fresh.get(key)
            if entry is not None and (entry.tokens != chunk or not entry.follows(prefix)):
                break  # another prefix has this key: what comes after could never be found
            if self._of_block.get(block, entry) is not entry or block in used:
                raise PoolError(f"block {block} is stored for other tokens than it is now said to hold")
            used.add(block)
            if entry is None:
                entry = fresh[key] = Entry(key, prefix, chunk, block)
            prefix = entry
        self._entries.update(fresh)
        self._of_block.update((entry.block, entry) for entry in fresh.values())

    def holds(self, block: int) -> bool:
        return block in self._of_block

    def reference(self, block: int) -> None:
        self._unreferenced.pop(block, None)

    def release(self, block: int) -> None:
        self._unreferenced[block] = None
        self._unreferenced.move_to_end(block)

    def evict(self) -> int | None:
        """Blocks after the evicted one stay: they are found again once their prefix has been computed again."""
        if not self._unreferenced:
            return None
        block, _ = self._unreferenced.popitem(last=False)
        del self._entries[self._of_block.pop(block).key]
        self.stats.evictions += 1
        return block

    def _root(self, salt: str) -> Entry:
        return Entry(b"", None, (salt,), None)

    def _keys(self, tokens: Sequence[int], salt: str) -> Iterator[tuple[bytes, tuple]]:
        """(key, tokens) of each whole block."""
        key, size = salt.encode("utf-8", "surrogatepass"), self.block_size  # any string is a salt
        for start in range(0, len(tokens) - size + 1, size):
            chunk = tuple(tokens[start : start + size])
            key = self.hash_block(key, chunk)
            yield key, chunk

    def _find(self, tokens: Sequence[int], salt: str) -> list[int]:
        blocks, prefix = [], self._root(salt)
        for key, chunk in self._keys(tokens[: max(len(tokens) - 1, 0)], salt):
            entry = self._entries.get(key)
            if entry is None or entry.tokens != chunk or not entry.follows(prefix):
                break
            blocks.append(entry.block)
            prefix = entry
        return blocks
