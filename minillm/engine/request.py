"""A request, as the scheduler sees it: token ids, how many of them are computed, and where their KV is.

Chapter 06. Kept state is small; the rest is derived from it, so it cannot disagree. `tokens` is prompt and answer in
one list, and `computed` counts those whose K and V are in the cache. A request that was preempted and lost its blocks
is therefore nothing special: `computed` is 0 again, and its next prefill covers what it had already said.
No tensors here, and none in the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minillm.cache.block_pool import BlockTable


class State(Enum):
    WAITING = "waiting"  # not started; no blocks
    RUNNING = "running"  # in the running list; owns blocks on the device
    PREEMPTED = "preempted"  # put back into the queue; its KV is gone (recompute) or on the host (swap)
    FINISHED = "finished"  # done or aborted; no blocks


@dataclass(eq=False)
class Request:
    """One answer to one prompt. limit: most new tokens. priority: lower is more urgent. salt: who shares prefixes.

    A prompt that wants n answers is n requests: the first computes the prompt, and `forks` holds the others, which
    start from its blocks when it gets its first token. `answer` is the engine's, and nothing the scheduler reads.
    """

    id: str
    prompt: Sequence[int]
    limit: int
    priority: int = 0
    salt: str = ""
    forks: list[Request] = field(default_factory=list)
    answer: Any = None
    tokens: list[int] = field(init=False)
    state: State = State.WAITING
    table: BlockTable | None = None
    computed: int = 0
    on_host: bool = False  # table names blocks of the host pool
    queued: bool = False  # in the scheduler's queue
    cached_tokens: int | None = None  # found in the prefix cache when it was first admitted
    preemptions: int = 0
    accepted_drafts: int = 0  # tokens of the answer that were guessed first
    order: tuple = ()  # the scheduler's sort key: smaller goes first
    passed_over: int = 0  # times that a later request was admitted first, for its longer cached prefix

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """One token short, and it is not the prompt's first chunk: the cheap kind of work."""
        return self.remaining == 1 and self.computed > 0

    @property
    def longest(self) -> int:
        """Tokens whose KV it can ever hold: the last new token is never fed back."""
        return len(self.prompt) + self.limit - 1

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.state.value}, {self.computed}/{len(self.tokens)} tokens)"


@dataclass(eq=False)
class RequestGroup:
    """The n requests of one prompt: what a user submitted, and what a user aborts."""

    id: str
    requests: list[Request]

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)
