"""How long a draft should be: decided again at every step, from what was accepted and what it cost here.

Chapter 16. Acceptance depends on the text, the cost of a draft on the machine and on the batch; neither is known
before. Both are measured while decoding, for batches of similar size apart: seconds of a plain step, of a drafted
one, and of each draft token. Then k is the one with the most expected tokens a second (`analysis`), or 0 where plain
decoding is faster. Two rules keep it from losing more than a few per cent:

- it begins with plain steps, then tries a few short drafts, and does not try again for `pause` steps where they
  lost, and then one is enough; each loss in a row makes the pause three times as long;
- while it drafts, a plain step now and then keeps the comparison fresh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from minillm.errors import ParamsError, illegal
from minillm.speculative.analysis import expected_tokens

MEMORY = 9  # measurements of a kind that count; the median of few is steady and forgets soon
PLAIN_FIRST = 3  # plain steps before the first draft
TRIALS = 2  # drafted steps before they are judged
LONGEST_PAUSE = 1024
FADE = 0.95  # what a round's acceptance still counts after the next one
PRIOR = 0.5  # rounds that the first guess of acceptance is worth


@dataclass
class Costs:
    """Measured at batches of similar size. Seconds."""

    plain: deque = field(default_factory=lambda: deque(maxlen=MEMORY))
    verify: deque = field(default_factory=lambda: deque(maxlen=2 * MEMORY))  # (depth, a drafted step, less drafting)
    draft: deque = field(default_factory=lambda: deque(maxlen=MEMORY))  # drafting, a token of depth
    pause: int = 0  # plain steps to take before the next trial
    next_pause: int = 0
    trials: int = 0
    since_plain: int = 0


class FixedLength:
    """Always the same."""

    def __init__(self, k: int) -> None:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ParamsError(illegal("num_tokens", k, "must be a whole number of at least 1"))
        self.k = k

    def choose(self, batch: int) -> int:
        return self.k

    def record(self, batch: int, k: int, rounds: list[tuple[int, int]], propose: float, rest: float) -> None:
        pass


class AdaptiveLength:
    """choose(batch) -> k before a step, record(...) after it. most: the longest draft."""

    def __init__(self, most: int = 8, pause: int = 48, refresh: int = 64) -> None:
        FixedLength(most)
        self.most, self.pause, self.refresh = most, pause, refresh
        self.hits, self.misses = 0.6 * PRIOR, 0.4 * PRIOR
        self._costs: dict[int, Costs] = {}

    @property
    def acceptance(self) -> float:
        """The running estimate of a."""
        return self.hits / (self.hits + self.misses)

    def choose(self, batch: int) -> int:
        costs = self.costs(batch)
        if len(costs.plain) < PLAIN_FIRST:
            return 0
        if costs.pause:
            costs.pause -= 1
            if not costs.pause:
                costs.trials = 0
            return 0
        if costs.since_plain >= self.refresh:
            return 0
        if costs.trials < (1 if costs.next_pause else TRIALS):
            return min(2, self.most)
        k = self.best(costs)
        if k == 0:  # it loses: out for a while, longer each time
            costs.next_pause = min(3 * costs.next_pause or self.pause, LONGEST_PAUSE)
            costs.pause = costs.next_pause - 1
        elif costs.since_plain == self.refresh - 1:
            costs.next_pause = 0  # it has been winning
        return k

    def best(self, costs: Costs) -> int:
        """The k of the most tokens a second; 0: plain."""
        if not costs.verify:
            return min(2, self.most)
        (base, slope), draft = line(costs.verify), usual(costs.draft)
        seconds = {k: base + k * (slope + draft) for k in range(1, self.most + 1)}
        rates = {k: expected_tokens(self.acceptance, k) / seconds[k] for k in seconds}
        k = max(rates, key=rates.get)
        return k if rates[k] * median(costs.plain) > 1 else 0

    def record(self, batch: int, k: int, rounds: list[tuple[int, int]], propose: float, rest: float) -> None:
        """A step of decodes alone is over. rounds: (drafted depth, accepted) of each draft that was verified.
        propose: seconds of drafting, rest: of everything else."""
        costs = self.costs(batch)
        if not rounds:
            costs.plain.append(propose + rest)  # a proposer that found nothing has still looked
            costs.since_plain = 0
            return
        costs.trials, costs.since_plain = costs.trials + 1, costs.since_plain + 1
        deepest = max(depth for depth, _ in rounds)
        costs.verify.append((deepest, rest))
        costs.draft.append(propose / deepest)
        for depth, accepted in rounds:
            self.hits = FADE * self.hits + accepted
            self.misses = FADE * self.misses + (accepted < depth)

    def costs(self, batch: int) -> Costs:
        return self._costs.setdefault(max(batch, 1).bit_length(), Costs())


def usual(costs: Sequence[float]) -> float:
    """The lower quartile: after a pause, or a new prompt, a draft model first reads what it missed, which is not what
    a draft token costs."""
    return sorted(costs)[len(costs) // 4]


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(base, slope) of seconds over depth: through the medians of the shallowest and the deepest; never falling."""
    by_depth: dict[int, list[float]] = {}
    for depth, seconds in points:
        by_depth.setdefault(depth, []).append(seconds)
    low, high = min(by_depth), max(by_depth)
    at_low, at_high = median(by_depth[low]), median(by_depth[high])
    if low == high or at_high <= at_low:
        return at_high, 0.0
    slope = (at_high - at_low) / (high - low)
    return at_low - low * slope, slope
