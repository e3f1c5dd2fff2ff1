"""How long a draft should be: decided again at every step, from what was accepted and what it cost here.

Chapter 16. Acceptance depends on the text, the cost of a draft on the machine and on the batch; neither is known
before. Both are measured while decoding, for batches of similar size apart: seconds of a plain step, of a drafted
one, and of each draft token. Then k is the one with the most expected tokens a second (`analysis`), or 0 where plain
decoding is about as fast. Trying is what costs where drafts do not pay, so trials are small and paid for:

- they begin after a few plain steps, short, and with one request of the batch: its text is all that a draft model
  has to read. What that took, times the batch, is the price of a trial of all. Only if drafts would win by enough to
  earn it soon, and plain steps have saved it, each `SAVED` of a step, the whole batch tries. Tokens that such a trial
  gains are not counted on: where answers end together, the slowest sets the time;
- what drafted steps lost against plain ones is a debt, which plain steps pay off, each `SHARE` of a step. While there
  is a debt, nothing is tried. After each loss in a row it counts three times as much as after the one before;
- while it drafts, a plain step now and then keeps the comparison fresh: soon after a trial, for the machine may have
  changed its speed between the two, then ever more rarely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from minillm.errors import ParamsError, illegal
from minillm.speculative.analysis import expected_tokens

MEMORY = 9  # measurements of a kind that count; the median of few is steady and forgets soon
PLAIN_MEMORY = 5  # the same for plain steps: while it drafts they are rare, and three new ones must outvote the old
PLAIN_FIRST = 3  # plain steps before the first draft
TRIALS = 2  # drafted steps before they are judged
TRIAL_LENGTH = 1  # of a draft on trial: if any length wins, this one does (`analysis.best_k`)
GAIN = 1.05  # to be worth drafting; less is within what the measurements are off
ANSWER = 64  # steps within which a whole batch's trial must have earned its price
SAVED = 0.04  # of the time may go into trials of a whole batch
SHARE = 0.01  # of the time may go into trials that fail
LONGEST_PAUSE = 1024
FIRST_REFRESH = 4  # drafted steps after a trial until the first plain one; each wait is twice the last
FADE = 0.95  # what a round's acceptance still counts after the next one
PRIOR = 0.5  # rounds that the first guess of acceptance is worth


@dataclass
class Costs:
    """Measured at batches of similar size. Seconds."""

    plain: deque = field(default_factory=lambda: deque(maxlen=PLAIN_MEMORY))
    verify: deque = field(default_factory=lambda: deque(maxlen=2 * MEMORY))  # (depth, a drafted step, less drafting)
    draft: deque = field(default_factory=lambda: deque(maxlen=MEMORY))  # drafting, a token of depth
    extra: float = 0.0  # what this trial's steps took longer than plain ones, in plain steps
    losses: int = 0  # trials in a row that lost
    whole: bool = False  # the trial is of the whole batch, not of one request
    trials: int = 0
    since_plain: int = 0
    refresh: int = FIRST_REFRESH  # drafted steps until the next plain one

    def restart(self, whole: bool) -> None:
        """Another trial, of one request or of all, from new measurements."""
        self.verify.clear()
        self.draft.clear()
        self.whole, self.trials, self.extra, self.refresh = whole, 0, 0.0, FIRST_REFRESH


class FixedLength:
    """Always the same."""

    def __init__(self, k: int) -> None:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ParamsError(illegal("num_tokens", k, "must be a whole number of at least 1"))
        self.k = k

    def choose(self, batch: int) -> tuple[int, int]:
        return self.k, batch

    def record(self, batch: int, k: int, rounds: list[tuple[int, int]], propose: float, rest: float) -> None:
        pass


class AdaptiveLength:
    """choose(batch) -> (k, for how many of its requests) before a step, record(...) after it. most: the longest
    draft. pause: least plain steps after a trial that lost. debt: what is not paid off yet, saved: what may be spent
    on a trial of all, both in plain steps."""

    def __init__(self, most: int = 8, pause: int = 16, refresh: int = 64) -> None:
        FixedLength(most)
        self.most, self.pause, self.refresh = most, pause, refresh
        self.hits, self.misses = 0.6 * PRIOR, 0.4 * PRIOR
        self.debt = self.saved = 0.0
        self.unknown = False  # unknown: a trial was sent out, and no step was recorded since
        self._costs: dict[int, Costs] = {}

    @property
    def acceptance(self) -> float:
        """The running estimate of a."""
        return self.hits / (self.hits + self.misses)

    def choose(self, batch: int) -> tuple[int, int]:
        costs = self.costs(batch)
        if len(costs.plain) < PLAIN_FIRST or costs.since_plain >= min(costs.refresh, self.refresh):
            return 0, batch
        whole = costs.whole or batch == 1
        if costs.trials < TRIALS:
            if self.unknown or (costs.trials == 0 and not costs.whole and self.debt):
                return 0, batch
            self.unknown = True  # steps that compute prompts as well are not recorded
            return TRIAL_LENGTH, batch if whole else 1
        price = 0.0 if whole else batch * costs.extra
        k = self.best(costs, GAIN + price / ANSWER)
        if k == 0:  # it loses: out for a while, longer each time
            debt = max(self.debt, self.pause * SHARE)
            self.debt = min(debt * 3**costs.losses, LONGEST_PAUSE * SHARE)
            costs.losses += 1
            costs.restart(whole=False)
        elif not whole:
            if self.saved < price:
                return 0, batch
            self.saved -= price
            costs.restart(whole=True)
            return TRIAL_LENGTH, batch
        elif costs.refresh > self.refresh and costs.since_plain == self.refresh - 1:
            costs.losses = 0  # it has been winning
        return k, batch

    def best(self, costs: Costs, least: float = GAIN) -> int:
        """The k of the most tokens a second; 0, plain, if that is not `least` times as many as plain steps give. No
        more than twice as deep as was measured: beyond, the line through the costs is a guess."""
        (base, slope), draft = line(costs.verify), usual(costs.draft)
        most = min(self.most, 2 * max(depth for depth, _ in costs.verify))
        seconds = {k: base + k * (slope + draft) for k in range(1, most + 1)}
        rates = {k: expected_tokens(self.acceptance, k) / seconds[k] for k in seconds}
        k = max(rates, key=rates.get)
        return k if rates[k] * median(costs.plain) > least else 0

    def record(self, batch: int, k: int, rounds: list[tuple[int, int]], propose: float, rest: float) -> None:
        """A step of decodes alone is over. k: what was asked for. rounds: (drafted depth, accepted) of each verified
        draft. propose: seconds of drafting, rest: of everything else."""
        costs, self.unknown = self.costs(batch), False
        if not rounds:
            costs.plain.append(propose + rest)  # a proposer that found nothing has still looked
            if costs.since_plain >= costs.refresh:
                costs.refresh *= 2
            costs.since_plain = 0
        if k == 0:
            self.debt = max(self.debt - SHARE, 0.0)
            self.saved = min(self.saved + SAVED, ANSWER)  # a long stretch of plain steps is no licence for more
            return
        gained = 1 + sum(accepted for _, accepted in rounds) / max(batch, 1)  # in plain steps
        spent = (propose + rest) / median(costs.plain or (propose + rest,))
        self.debt = max(self.debt + spent - gained, 0.0)
        if costs.trials > TRIALS:  # past its trial: a passing loss is chance, tokens come in fits and starts
            self.debt = min(self.debt, 1.0)
        if not rounds:
            return
        costs.trials, costs.since_plain = costs.trials + 1, costs.since_plain + 1
        costs.extra += max(spent - 1, 0.0)
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
