"""Drafts that branch: which nodes a tree should have, and who may look at whom when all are read at once.

Chapter 17. SpecInfer (Miao et al. 2024, arXiv:2305.09781): one forward verifies many continuations if each node sees
its own ancestors alone. Medusa (Cai et al. 2024, arXiv:2401.10774) fixes the shape once, from how often each guess is
right; EAGLE-2 (Li et al. 2024, arXiv:2406.16858) grows a new one at every step, from how sure the draft is.

A tree's value is the expected number of its nodes that are accepted: the sum over nodes of the probability that the
whole path down to the node is right. Taking the likeliest nodes one by one maximises it, and what is taken is a tree,
for no node is likelier than its parent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.speculative.proposer import Draft

MOST_NODES = 512


def tree_mask(draft: Draft, known: int = 1) -> Tensor:
    """[known + nodes, known + nodes], True where a row may look: known tokens at those before them, a node at the
    known ones, at its ancestors and at itself."""
    mask = torch.ones(known + len(draft), known + len(draft), dtype=torch.bool).tril()
    for node in range(len(draft)):
        parent = draft.parent(node)
        mask[known + node, known:] = mask[known + parent, known:] if parent >= 0 else False
        mask[known + node, known + node] = True
    return mask


@dataclass(frozen=True)
class Shape:
    """A tree without tokens. ranks[i]: node i takes the guess of that rank (0: the likeliest) for its depth."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        return Draft([0] * len(self), list(self.parents)).depths()

    def fill(self, guesses: Sequence[Sequence[int]]) -> Draft:
        """guesses[depth - 1][rank]: a token. The same guesses stand below every node of a depth."""
        tokens = [guesses[depth - 1][rank] for depth, rank in zip(self.depths, self.ranks)]
        return Draft(tokens, list(self.parents))


def best_shape(accuracy: Sequence[Sequence[float]], nodes: int) -> Shape:
    """The tree of `nodes` nodes with the most expected accepted tokens. Depths count as independent.
    accuracy[depth - 1][rank]: how often the guess of that rank is right at that depth; falling along a row."""
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= MOST_NODES:
        raise ParamsError(illegal("nodes", nodes, f"must be a whole number from 1 to {MOST_NODES}"))
    if not accuracy or any(not row or not all(0 <= a <= 1 for a in row) for row in accuracy):
        raise ParamsError(illegal("accuracy", accuracy, "must hold a row of shares from 0 to 1 for each depth"))
    parents, ranks = [], []
    heap = [(-accuracy[0][0], 1, -1, 0)]  # (-probability of the path, depth, parent, rank)
    while heap and len(parents) < nodes:
        value, depth, parent, rank = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        row = accuracy[depth - 1]
        if rank + 1 < len(row):  # the next sibling; its path above is the same
            heapq.heappush(heap, (value / row[rank] * row[rank + 1] if row[rank] else 0.0, depth, parent, rank + 1))
        if depth < len(accuracy):
            heapq.heappush(heap, (value * accuracy[depth][0], depth + 1, node, 0))
    return Shape(tuple(parents), tuple(ranks))


def expected_tokens(accuracy: Sequence[Sequence[float]], shape: Shape) -> float:
    """Tokens a call: 1 (the bonus) + the sum over nodes of the probability that the path to it is right."""
    values: list[float] = []
    for parent, rank, depth in zip(shape.parents, shape.ranks, shape.depths):
        values.append(accuracy[depth - 1][rank] * (values[parent] if parent >= 0 else 1.0))
    return 1 + sum(values)


def likeliest_nodes(values: Tensor, count: int) -> list[int]:
    """Indices of the `count` nodes of the largest value, in their order. values [nodes]: log-probability of the path
    to each, smaller than its parent's, parents before children: so what is kept is a tree."""
    kept = values.topk(min(count, len(values))).indices  # [kept]
    return sorted(kept[values[kept] > float("-inf")].tolist())


def subtree(tokens: Sequence[int], parents: Sequence[int], kept: Sequence[int]) -> Draft:
    """The draft of these nodes, numbered again."""
    place = {-1: -1} | {node: i for i, node in enumerate(kept)}
    return Draft([tokens[node] for node in kept], [place[parents[node]] for node in kept])
