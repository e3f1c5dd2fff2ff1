"""Time, in the two senses the course needs: how long a function takes, and how long a user waits.

Chapter 00. A function is timed after a warm-up, many times, and reported as a median with its quartiles; two
functions are compared in alternation (A B A B ...), as the median of the paired ratios, so that a machine that slows
down half-way slows both. A request is described by the names vLLM's benchmark uses:

- TTFT, time to first token: arrival to first token, queueing included;
- ITL, inter-token latency: each gap between two tokens of one request;
- TPOT, time per output token: a request's (e2e - TTFT) / (tokens - 1), which is the mean of its ITLs;
- e2e: arrival to last token; throughput: tokens or requests per second over the whole run;
- goodput: requests per second that met every target of a service level objective (SLO). DistServe, Zhong et al. 2024
  (arXiv:2401.09670).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of repeated measurements: seconds for `timed`, a plain ratio for `paired`."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.percentile(self.samples, (25, 75))
        return float(low), float(high)

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median: 0.05 reads "within about 5 %"."""
        low, high = self.quartiles
        return (high - low) / self.median if self.median else 0.0

    def __str__(self) -> str:
        low, high = self.quartiles
        return f"{self.median:.4g} [{low:.4g}, {high:.4g}]"


@dataclass(frozen=True)
class Paired:
    """Two functions timed in alternation. `ratio` is a's seconds / b's, pair by pair: 2.0 is b twice as fast."""

    a: Timing
    b: Timing

    @property
    def ratio(self) -> Timing:
        return Timing(tuple(x / y for x, y in zip(self.a.samples, self.b.samples)))


def synchronize() -> None:
    """Wait for a CUDA device that is in use. Without one, returns at once: CPU kernels return when they are done."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds(function: Callable[[], object]) -> float:
    """One call, from a quiet device to a quiet device. GPU kernels of microseconds need `timed(cuda_events=True)`."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def timed(function: Callable[[], object], repeats: int = 10, warmup: int = 2, *, cuda_events: bool = False) -> Timing:
    """Median seconds of `function()`. Warm-up calls pay for caches, allocations and compilation, and are not counted.

    cuda_events: time on the GPU's own clock, so that the time the CPU needs to launch is left out when it is hidden.
    """
    _check_repeats(repeats, warmup)
    for _ in range(warmup):
        function()
    if cuda_events:
        return Timing(tuple(_event_seconds(function) for _ in range(repeats)))
    return Timing(tuple(seconds(function) for _ in range(repeats)))


def paired(a: Callable[[], object], b: Callable[[], object], repeats: int = 10, warmup: int = 2) -> Paired:
    """Time a and b as A B A B ..., so that drift of the machine falls on both."""
    _check_repeats(repeats, warmup)
    for _ in range(warmup):
        a()
        b()
    pairs = [(seconds(a), seconds(b)) for _ in range(repeats)]
    return Paired(Timing(tuple(x for x, _ in pairs)), Timing(tuple(y for _, y in pairs)))


def _check_repeats(repeats: int, warmup: int) -> None:
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}: repeats must be >= 1 and warmup >= 0")


def _event_seconds(function: Callable[[], object]) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3  # ms -> s


@dataclass
class RequestTimes:
    """When one request arrived, was first scheduled, and got each token. Seconds on one clock."""

    arrival: float
    token_times: list[float] = field(default_factory=list)
    scheduled: float | None = None
    prompt_tokens: int = 0

    def token(self, now: float | None = None) -> None:
        """Note that one output token reached the user."""
        self.token_times.append(time.perf_counter() if now is None else now)

    @property
    def output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def queue(self) -> float | None:
        """Waiting before the first forward pass; part of TTFT."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def itl(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:])]

    @property
    def tpot(self) -> float | None:
        """None for a request of one token: it has no gap to measure."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float | None:
        return self.token_times[-1] - self.arrival if self.token_times else None


@dataclass(frozen=True)
class SLO:
    """The slowest a request may be and still count as good, in seconds. None: no target."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met_by(self, request: RequestTimes) -> bool:
        """A request of one token meets any TPOT target; one without tokens meets nothing."""
        if not request.token_times:
            return False
        pairs = ((self.ttft, request.ttft), (self.tpot, request.tpot), (self.e2e, request.e2e))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of one quantity over a run. `percentiles` maps 50, 90, 99 to values."""

    count: int
    mean: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, values: Iterable[float], percentiles: Sequence[int] = PERCENTILES) -> Distribution:
        values = list(values)
        if not values:
            return cls(0, float("nan"), dict.fromkeys(percentiles, float("nan")))
        found = np.percentile(values, percentiles)
        return cls(len(values), float(np.mean(values)), {p: float(x) for p, x in zip(percentiles, found)})


@dataclass(frozen=True)
class Summary:
    """What a run of many requests looked like. Times in seconds, rates per second of `duration`.

    ttft, tpot, e2e have one value a request; itl pools the gaps of all requests, so long answers weigh more there.
    """

    requests: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    good_requests: int

    @property
    def request_throughput(self) -> float:
        return self.requests / self.duration

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.duration

    @property
    def goodput(self) -> float:
        return self.good_requests / self.duration


def summary(requests: Sequence[RequestTimes], slo: SLO | None = None, duration: float | None = None) -> Summary:
    """Summarise finished requests. duration: by default first arrival to last token. Without an SLO all are good."""
    done = [request for request in requests if request.token_times]
    if not done:
        raise ValueError("summary needs at least one request that got a token")
    if duration is None:
        duration = max(r.token_times[-1] for r in done) - min(r.arrival for r in requests)
    if not duration > 0:
        raise ValueError(f"duration={duration!r} must be > 0 seconds: nothing has a rate over no time")
    slo = slo or SLO()
    return Summary(
        requests=len(done),
        duration=duration,
        prompt_tokens=sum(r.prompt_tokens for r in done),
        output_tokens=sum(r.output_tokens for r in done),
        ttft=Distribution.of(r.ttft for r in done),
        tpot=Distribution.of(r.tpot for r in done if r.tpot is not None),
        itl=Distribution.of(gap for r in done for gap in r.itl),
        e2e=Distribution.of(r.e2e for r in done),
        good_requests=sum(slo.met_by(r) for r in done),
    )
