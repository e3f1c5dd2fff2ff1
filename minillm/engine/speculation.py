"""Speculation inside the engine: who gets a draft, how long it may be, what is kept, and what it cost.

Chapter 16. Drafts are proposed before the scheduler plans the step, for all that will decode; the scheduler fits them
in where there is room; the runner computes requests with drafts and without in one forward; `verify` judges all. What
is below (`minillm.speculative`) knows no requests: here they become `Context`s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minillm.engine.batch import Batch
from minillm.engine.request import Request
from minillm.speculative.adaptive import FixedLength
from minillm.speculative.analysis import acceptance_of
from minillm.speculative.proposer import NOTHING, Context, Draft, Proposer
from minillm.speculative.verify import Verdict, Walk, verify


class Lengths(Protocol):
    """How long the next drafts should be, and how many of the batch should have one: `FixedLength`, or
    `AdaptiveLength`, which learns from `record`."""

    def choose(self, batch: int) -> tuple[int, int]: ...

    def record(self, batch: int, k: int, rounds: list[tuple[int, int]], propose: float, rest: float) -> None: ...


@dataclass
class SpeculationStats:
    """Counted since the start, or since `reset`. rounds: drafts that were verified; calls: steps of a request that
    gave it tokens, with a draft or without, the prompt's left out."""

    calls: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    left_early: int = 0  # rounds in which a draft token was refused

    @property
    def tokens_per_call(self) -> float:
        return self.tokens / self.calls if self.calls else 0.0

    @property
    def acceptance(self) -> float:
        """a: accepted, of the draft tokens that were looked at; those behind a refused one were not."""
        return acceptance_of(self.accepted, self.left_early)


class Speculator:
    """proposer: where drafts come from. lengths: how long they are. walk: another rule of acceptance (see verify)."""

    def __init__(self, proposer: Proposer, lengths: Lengths | int = 4, walk: Walk | None = None) -> None:
        self.proposer, self.walk = proposer, walk
        self.lengths = FixedLength(lengths) if isinstance(lengths, int) else lengths
        self.trees = True  # False: the cache knows no trees (chapter 14's), so they are drafted as chains
        self.stats = SpeculationStats()
        self._began = self._proposed = 0.0

    def drafts(self, running: Iterable[Request]) -> dict[Request, Draft]:
        """Proposals for all that decode and have said something already, empty ones left out."""
        self._began = time.perf_counter()
        found: dict[Request, Draft] = {}
        requests = [r for r in running if r.decoding and len(r.tokens) > len(r.prompt)]
        k, count = self.lengths.choose(len(requests)) if requests else (0, 0)
        if count < len(requests):  # a trial: the shortest prompts, for a draft model has to read them
            requests = sorted(requests, key=lambda r: len(r.prompt))[:count]
        if k:
            contexts = [Context(r, r.tokens, min(k, r.longest - len(r.tokens)), r.answer.sampling) for r in requests]
            drafts = self.proposer.propose(contexts)
            drafts = drafts if self.trees else [draft.trunk() for draft in drafts]
            found = {r: draft for r, draft in zip(requests, drafts) if draft}
        self._k, self._proposed = k, time.perf_counter()
        return found

    def judge(self, logits: Tensor, batch: Batch, requests: Sequence[Request]) -> list[Verdict]:
        """A verdict for each of the requests; logits: their rows, one after another."""
        drafts = [batch.entries[r].draft if r in batch.entries else NOTHING for r in requests]
        return verify(logits, drafts, [r.answer.sampling for r in requests], self.walk)

    def record(self, batch: Batch, gained: dict[Request, int], accepted: dict[Request, int]) -> None:
        """The step is over. gained: tokens each request got; accepted: of these, drafted ones."""
        rounds, stats = [], self.stats
        for request, entry in batch.entries.items():
            if request not in gained or entry.start < len(request.prompt):
                continue
            depth = max(entry.draft.depths(), default=0)
            stats.calls, stats.tokens = stats.calls + 1, stats.tokens + gained[request]
            if depth:
                rounds.append((depth, accepted[request]))
                stats.rounds += 1
                stats.drafted += len(entry.draft)
                stats.accepted += accepted[request]
                stats.left_early += accepted[request] < depth
        if all(entry.count == 1 and entry.samples for entry in batch.entries.values()):
            rest = time.perf_counter() - self._proposed
            self.lengths.record(len(batch.entries), self._k, rounds, self._proposed - self._began, rest)

    def observe(self, batch: Batch, hidden: Tensor | None, accepted: dict[Request, list[int]]) -> None:
        """Hand the target's features to a proposer that wants them: of known tokens, and of accepted ones."""
        if hidden is None:
            return
        row = 0
        for request, entry in batch.entries.items():
            known, kept = hidden[row : row + entry.count], accepted.get(request)  # a view: most steps keep nothing
            if kept:
                known = torch.cat((known, hidden[[row + entry.count + node for node in kept]]))
            self.proposer.observe(request, entry.start, known)
            row += entry.width

    def release(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.proposer.release(request)
