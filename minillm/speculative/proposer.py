"""What a draft is, and what proposes one: the fourth seam.

Chapters 16 and 17. Speculative decoding, Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023
(arXiv:2302.01318); drafts that are trees, SpecInfer (Miao et al. 2024, arXiv:2305.09781).

    proposer.propose(contexts) -> one Draft a context       what may come next
    one forward of the target over all drafts               the engine's runner
    verify(logits, drafts, states) -> one Verdict a draft   what is kept

Nothing here knows a request: the engine makes a `Context` of each that decodes, and keys it. Nothing here is a tensor
either, except what a draft or a context carries; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from minillm.errors import ParamsError, illegal

if TYPE_CHECKING:
    from torch import Tensor

    from minillm.model.sampling import SamplingState


@dataclass
class Context:
    """What a proposer may know of one sequence.

    key: the same at every step. tokens: prompt and answer so far; the last one is not computed by the target yet.
    most: more draft tokens than this are of no use (length limit, wished length); 0: propose nothing.
    state: sampling parameters and the random stream that draws of a draft must use.
    """

    key: Hashable
    tokens: Sequence[int]
    most: int
    state: SamplingState


@dataclass(eq=False)
class Draft:
    """Guessed tokens: a chain, or a tree below the last known token.

    parents: of each node the index of its parent, smaller than its own; -1: the last known token. None: a chain,
    -1, 0, 1, ... Siblings are tried in order. No two siblings hold the same token, unless `probs` says how they came.
    probs: [nodes, vocab], the distribution that each node's token was drawn from, after its earlier siblings were.
    None: no draw took place, the tokens are the proposer's sure choice (greedy, looked up, the k likeliest).
    """

    tokens: list[int]
    parents: list[int] | None = None
    probs: Tensor | None = None

    def __post_init__(self) -> None:
        if self.parents is not None:
            legal = f"must hold {len(self.tokens)} indices, each smaller than its own place and at least -1"
            if len(self.parents) != len(self.tokens) or any(not -1 <= p < i for i, p in enumerate(self.parents)):
                raise ParamsError(illegal("parents", self.parents, legal))
        if self.probs is not None and len(self.probs) != len(self.tokens):
            raise ParamsError(illegal("probs", tuple(self.probs.shape), f"must have {len(self.tokens)} rows"))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents is None or all(p == i - 1 for i, p in enumerate(self.parents))

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def children(self) -> list[list[int]]:
        """children()[i + 1]: the nodes below node i, in order; children()[0]: those below the last known token."""
        below: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node in range(len(self.tokens)):
            below[self.parent(node) + 1].append(node)
        return below

    def depths(self) -> list[int]:
        """Tokens from the last known one to each node: 1 for its children. A node's position is that much later."""
        depths: list[int] = []
        for node in range(len(self.tokens)):
            parent = self.parent(node)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Nodes from the top down to `node`, itself included; [] for -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parent(node)
        return path[::-1]

    def trunk(self) -> Draft:
        """The chain of first children: for a cache that knows no trees. A chain is itself."""
        if self.is_chain:
            return self
        below, nodes, row = self.children(), [], 0
        while below[row]:
            nodes.append(below[row][0])
            row = nodes[-1] + 1
        return Draft([self.tokens[node] for node in nodes], None, None if self.probs is None else self.probs[nodes])

    def cut(self, most: int) -> Draft:
        """The first `most` nodes: parents come first, so that is a tree again. A draft that fits is itself."""
        if most >= len(self.tokens):
            return self
        parents = None if self.parents is None else self.parents[:most]
        return Draft(self.tokens[:most], parents, None if self.probs is None else self.probs[:most])


class Proposer(Protocol):
    """Guesses what comes next. It may keep state by key (a cache, an index), and must give it up on `release`."""

    wants_hidden: bool  # whether `observe` is to be called

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """One draft a context, in order, of at most context.most tokens deep; an empty one where nothing is likely.

        It must not depend on what the target will say, and draw from nothing but context.state.stream.
        """

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        """The target's last hidden states [count, hidden size] of the sequence's tokens start .. start + count - 1,
        after each forward; of a draft only those that were accepted. After a preemption they come again."""

    def release(self, key: Hashable) -> None:
        """The sequence ended, or lost its place. Unknown keys are no error."""


NOTHING = Draft([])
