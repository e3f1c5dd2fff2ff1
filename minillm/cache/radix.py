"""Prefix cache as a radix tree: a path from the root spells a prefix, a node holds the blocks of one stretch of it.

Chapter 07. RadixAttention in SGLang, Zheng et al. 2024 (arXiv:2312.07104). Where two prefixes part inside a node, the
node is split there. The tree works at block granularity: an edge is told apart by a whole block of tokens, so a block
never belongs to two nodes. Tokens are compared, not hashed. Against chained hashes the tree knows what hangs below
what: it evicts leaves only, so all that is stored can be found, and it can be drawn.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from minillm.cache.block_pool import PoolError, PrefixStats

Chunk = tuple  # the tokens of one block; in the first block of a prefix, the salt and the tokens


class Node:
    """chunks[i] are the tokens whose KV is in blocks[i]. Children are found by their first chunk."""

    __slots__ = ("blocks", "children", "chunks", "last_used", "parent", "queued")

    def __init__(self, parent: Node | None, chunks: list[Chunk], blocks: list[int], last_used: int = 0) -> None:
        self.parent, self.chunks, self.blocks, self.last_used = parent, chunks, blocks, last_used
        self.children: dict[Chunk, Node] = {}
        self.queued = False  # is it in the heap of leaves to evict?


@dataclass(frozen=True)
class NodeView:
    """A node as figures need it. `parent` is the parent's position in the list, None at the top."""

    parent: int | None
    depth: int
    salt: str
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    locked: tuple[bool, ...]  # of each block: do running requests hold it?
    last_used: int


class RadixIndex:
    """`PrefixIndex` by a radix tree, with eviction of the least recently used leaf.

    A held block is locked while a table holds it. Eviction takes the last block of an unlocked leaf.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.stats = PrefixStats()
        self._root = Node(None, [], [])
        self._node_of: dict[int, Node] = {}
        self._unreferenced: set[int] = set()
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (last_used, ticket, leaf whose tail is unreferenced)
        self._clock, self._tickets = count(1), count()

    def __len__(self) -> int:
        return len(self._node_of)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        blocks = self._find(tokens, salt)
        self.stats.queries += len(tokens)
        self.stats.hits += len(blocks) * self.block_size
        return blocks

    def longest_prefix(self, tokens: Sequence[int], salt: str = "") -> int:
        return len(self._find(tokens, salt)) * self.block_size

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], salt: str = "") -> None:
        chunks = self._chunks(tokens, salt)
        node, place, known = self._walk(chunks)
        stored, fresh = self._path(node, place), list(blocks[known:])
        elsewhere = [b for b, old in zip(blocks, stored) if b != old and b in self._node_of]
        elsewhere += [b for b in fresh if b in self._node_of]
        if elsewhere or len(set(fresh)) < len(fresh):
            raise PoolError(f"blocks {elsewhere or fresh} are stored for other tokens than they are now said to hold")
        if not fresh:
            return
        if place < len(node.chunks):
            self._split(node, place)
        if node.children or node is self._root:
            parent, node = node, Node(node, [], [])
            parent.children[chunks[known]] = node
        node.chunks += chunks[known:]  # a leaf grows in place
        node.blocks += fresh
        node.last_used = next(self._clock)
        for block in fresh:
            self._node_of[block] = node

    def holds(self, block: int) -> bool:
        return block in self._node_of

    def reference(self, block: int) -> None:
        self._unreferenced.discard(block)

    def release(self, block: int) -> None:
        node = self._node_of[block]
        node.last_used = next(self._clock)
        self._unreferenced.add(block)
        self._queue(node)

    def evict(self) -> int | None:
        if not self._unreferenced:
            return None
        node = self._oldest_leaf()
        if node is None:
            block = self._cut()
        else:
            block = node.blocks[-1]
            self._drop_tail(node, len(node.blocks) - 1)
            self._queue(node)
        self._unreferenced.discard(block)
        self.stats.evictions += 1
        return block

    def nodes(self) -> list[NodeView]:
        """The tree in reading order, parents before children, without the root, which holds nothing."""
        views: list[NodeView] = []
        todo = [(child, None, 0) for child in reversed(self._root.children.values())]
        while todo:
            node, parent, depth = todo.pop()
            salt = node.chunks[0][0] if parent is None else views[parent].salt
            tokens = tuple(token for chunk in node.chunks for token in chunk)[1 if parent is None else 0 :]
            locked = tuple(block not in self._unreferenced for block in node.blocks)
            views.append(NodeView(parent, depth, salt, tokens, tuple(node.blocks), locked, node.last_used))
            place = len(views) - 1
            todo += [(child, place, depth + 1) for child in reversed(node.children.values())]
        return views

    # Walking.

    def _chunks(self, tokens: Sequence[int], salt: str) -> list[Chunk]:
        """The tokens of each whole block; before those of the first stands the salt."""
        size = self.block_size
        chunks = [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]
        return [(salt, *chunks[0]), *chunks[1:]] if chunks else []

    def _walk(self, chunks: list[Chunk]) -> tuple[Node, int, int]:
        """Follow the chunks as far as they are stored -> (node, how many of its chunks match, chunks matched)."""
        node, known = self._root, 0
        while known < len(chunks) and (child := node.children.get(chunks[known])) is not None:
            place = 0
            while place < len(child.chunks) and known < len(chunks) and child.chunks[place] == chunks[known]:
                place, known = place + 1, known + 1
            node = child
            if place < len(child.chunks):
                return node, place, known
        return node, len(node.chunks), known

    def _find(self, tokens: Sequence[int], salt: str) -> list[int]:
        node, place, _ = self._walk(self._chunks(tokens[: max(len(tokens) - 1, 0)], salt))
        return self._path(node, place)

    def _path(self, node: Node, place: int) -> list[int]:
        parts = [node.blocks[:place]]
        while node.parent is not None:
            node = node.parent
            parts.append(node.blocks)
        return [block for part in reversed(parts) for block in part]

    # Changing.

    def _split(self, node: Node, place: int) -> None:
        """Cut a node in two; the lower part becomes its child and takes its children."""
        lower = Node(node, node.chunks[place:], node.blocks[place:], node.last_used)
        lower.children, node.children = node.children, {lower.chunks[0]: lower}
        node.chunks, node.blocks = node.chunks[:place], node.blocks[:place]
        for child in lower.children.values():
            child.parent = lower
        for block in lower.blocks:
            self._node_of[block] = lower
        self._queue(lower)

    def _queue(self, node: Node) -> None:
        if not node.queued and self._evictable(node):
            node.queued = True
            heapq.heappush(self._leaves, (node.last_used, next(self._tickets), node))

    def _evictable(self, node: Node) -> bool:
        return bool(node.blocks) and not node.children and node.blocks[-1] in self._unreferenced

    def _oldest_leaf(self) -> Node | None:
        """A queued leaf may meanwhile have been used, extended, split or dropped: look again when its turn comes."""
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if used == node.last_used and self._evictable(node):
                return node
            self._queue(node)
        return None

    def _drop_tail(self, node: Node, place: int) -> None:
        """Forget the blocks of a node from `place` on, and the node itself when none is left."""
        first = node.chunks[0]
        for block in node.blocks[place:]:
            del self._node_of[block]
        del node.blocks[place:], node.chunks[place:]
        if not node.blocks:
            del node.parent.children[first]
            self._queue(node.parent)

    def _cut(self) -> int:
        """Every leaf is locked, but an inner block is not: two requests computed the same prefix at once, the tree
        kept the blocks of one, and only the other is still running. Cut below the deepest such block; what hung
        there is locked, stays with its tables, and is forgotten here."""
        block = max(self._unreferenced, key=self._depth)
        node = self._node_of[block]
        below = list(node.children.values())
        while below:
            child = below.pop()
            below += child.children.values()
            for other in child.blocks:
                del self._node_of[other]
        node.children = {}
        self._drop_tail(node, node.blocks.index(block))
        self._queue(node)
        return block

    def _depth(self, block: int) -> int:
        node = self._node_of[block]
        depth = node.blocks.index(block)
        while node.parent is not None:
            node = node.parent
            depth += len(node.blocks)
        return depth
