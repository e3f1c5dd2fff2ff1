"""What the scheduler hands to the runner: whose tokens, and the block copies to make first. And the log of it.

Chapter 06. A batch is a plan. Nothing in it is a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minillm.engine.request import Request
from minillm.speculative.proposer import NOTHING, Draft


@dataclass(frozen=True)
class Entry:
    """Tokens start .. start + count - 1 of a request. samples: the last of them is the last known token.

    draft: guesses of what comes after that one, computed in the same forward to be verified (chapter 16)."""

    start: int
    count: int
    samples: bool
    draft: Draft = NOTHING

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def width(self) -> int:
        """Tokens in the forward: known ones and guesses."""
        return self.count + len(self.draft)


@dataclass
class Batch:
    """entries: in the order they are packed. copies: ("swap_out" | "swap_in" | "copy", pairs of blocks), to be made
    in this order before the forward: a block that one of them frees may be the target of a later one."""

    step: int
    budget: int  # tokens that may still be added
    entries: dict[Request, Entry] = field(default_factory=dict)
    copies: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[tuple[Request, str]] = field(default_factory=list)  # with "swap" or "recompute"

    def add(self, request: Request, tokens: int) -> None:
        self.entries[request] = Entry(request.computed, tokens, tokens == request.remaining)
        self.budget -= tokens

    def add_draft(self, request: Request, draft: Draft) -> None:
        self.entries[request] = replace(self.entries[request], draft=draft)
        self.budget -= len(draft)

    def drop(self, request: Request) -> None:
        """The request was preempted after it had been given tokens."""
        if request in self.entries:
            self.budget += self.entries.pop(request).width

    @property
    def num_tokens(self) -> int:
        return sum(entry.width for entry in self.entries.values())

    @property
    def sampling(self) -> list[Request]:
        """The requests that get a new token from this forward, or several."""
        return [request for request, entry in self.entries.items() if entry.samples]


@dataclass
class StepLog:
    """One step, as figures need it. entries: (request id, first token, number of tokens, "prefill" or "decode")."""

    step: int
    entries: list[tuple[str, int, int, str]]
    admitted: list[str]
    preempted: list[tuple[str, str]]
    waiting: int
    running: int
    free_blocks: int
    finished: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Batch, waiting: int, running: int, free_blocks: int) -> StepLog:
        """Take it right after schedule(), before the requests change."""
        entries = [
            (request.id, entry.start, entry.width, "decode" if request.decoding else "prefill")
            for request, entry in batch.entries.items()
        ]
        preempted = [(request.id, how) for request, how in batch.preempted]
        return cls(batch.step, entries, [r.id for r in batch.admitted], preempted, waiting, running, free_blocks)

    @property
    def tokens(self) -> int:
        return sum(count for _, _, count, _ in self.entries)
