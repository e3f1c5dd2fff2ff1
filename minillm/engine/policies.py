"""Three ways to batch one trace of requests: static, dynamic, continuous. Who computes what, when, and for nothing.

Chapter 04. Static and dynamic batching choose a batch, pad its prompts to the longest, and run it until its longest
answer is done; they differ in when they stop waiting for more requests (a full batch; or a full batch or a time
window, as Triton and TensorFlow Serving do). Continuous batching is the engine: requests join and leave at every
step (Orca, Yu et al. 2022, OSDI).

The clock is simulated where nothing is computed and real where something is: every forward is timed and moves the
clock by its seconds; a wait for the next arrival moves it at once. With `cost`, a function of the tokens computed,
it is simulated throughout, and two runs give the same figure.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import decode, prefill
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.errors import ParamsError, illegal
from minillm.measure.clock import RequestTimes, Summary, synchronize
from minillm.measure.clock import summary as summarise
from minillm.model.decoder import Decoder
from minillm.model.sampling import SamplingParams

POLICIES = ("static", "dynamic", "continuous")


@dataclass(frozen=True)
class Arrival:
    """One request of a trace: seconds after the start, prompt, and the exact number of new tokens."""

    time: float
    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Cell:
    """What one slot of the batch did in one forward. kind: "prefill", "decode", or "idle" for a finished row that a
    static batch still computes. tokens: computed; useful: of these, the ones that are not padding."""

    slot: int
    begin: float
    end: float
    request: int
    kind: str
    tokens: int
    useful: int


@dataclass
class TraceResult:
    """One policy's run: outputs and times in the order of the trace, and every cell of the slot-by-time figure."""

    policy: str
    outputs: list[list[int]]
    times: list[RequestTimes]
    cells: list[Cell] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        return sum(cell.tokens for cell in self.cells)

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that nobody asked for."""
        return 1 - sum(cell.useful for cell in self.cells) / max(self.computed_tokens, 1)

    @property
    def summary(self) -> Summary:
        return summarise(self.times)


class Clock:
    """now moves by what a call took, or by cost(tokens)."""

    def __init__(self, cost: Callable[[int], float] | None) -> None:
        self.now, self.cost = 0.0, cost

    def run(self, call: Callable, tokens: int | Callable[[], int]):
        """call(); tokens: how many it computed, or a function that knows afterwards."""
        synchronize()
        start = time.perf_counter()
        result = call()
        synchronize()
        seconds = time.perf_counter() - start
        self.now += seconds if self.cost is None else self.cost(tokens() if callable(tokens) else tokens)
        return result


def make_trace(
    count: int,
    rate: float,
    vocab: int,
    prompt: tuple[int, int] = (4, 48),
    tokens: tuple[int, int] = (4, 64),
    seed: int = 0,
) -> list[Arrival]:
    """Poisson arrivals, `rate` a second. Prompt lengths are uniform, answer lengths log-uniform: many are short."""
    rng, now, trace = random.Random(seed), 0.0, []
    for _ in range(count):
        length = rng.randint(*prompt)
        answer = round(math.exp(rng.uniform(math.log(tokens[0]), math.log(tokens[1]))))
        trace.append(Arrival(now, tuple(rng.randrange(5, vocab) for _ in range(length)), answer))
        now += rng.expovariate(rate)
    return trace


def run_trace(
    model: Decoder,
    trace: Sequence[Arrival],
    policy: str,
    *,
    size: int = 8,
    window: float = 0.1,
    cost: Callable[[int], float] | None = None,
    options: EngineOptions | None = None,
) -> TraceResult:
    """Greedy answers to a trace, which is in order of arrival, under one policy.

    size: rows of a batch. window: longest wait of the first request for a fuller batch, in seconds ("dynamic" only).
    options: of the engine ("continuous" only; default: size requests at once).
    """
    if policy not in POLICIES:
        raise ParamsError(illegal("policy", policy, f"must be one of {', '.join(POLICIES)}"))
    longest = max((len(a.prompt) + a.tokens - 1 for a in trace), default=0)
    if longest > model.config.max_length:
        raise ParamsError(
            illegal("trace", longest, f"tokens of one request; the context is {model.config.max_length}")
        )
    times = [RequestTimes(arrival=a.time, prompt_tokens=len(a.prompt)) for a in trace]
    result, clock = TraceResult(policy, [[] for _ in trace], times), Clock(cost)
    if policy == "continuous":
        _continuous(model, trace, options or EngineOptions(max_num_seqs=size), clock, result)
        return result
    for batch, start in _batches(trace, size, math.inf if policy == "static" else window, clock):
        clock.now = max(clock.now, start)
        _padded(model, trace, batch, clock, result)
    return result


def _batches(trace: Sequence[Arrival], size: int, window: float, clock: Clock) -> Iterator[tuple[list[int], float]]:
    """(requests, when their batch may start): when it is full, the window is over, or nobody else will come."""
    first = 0
    while first < len(trace):
        close = max(trace[first].time + window, clock.now)
        arrived = [i for i in range(first, min(first + size, len(trace))) if trace[i].time <= close]
        full = len(arrived) == size or arrived[-1] == len(trace) - 1
        yield arrived, trace[arrived[-1]].time if full else close
        first += len(arrived)


@torch.inference_mode()
def _padded(model: Decoder, trace: Sequence[Arrival], batch: list[int], clock: Clock, result: TraceResult) -> None:
    """One padded batch, from prefill until its longest answer is done. Rows that are done go on as idle ones."""
    prompts, counts = [list(trace[i].prompt) for i in batch], [trace[i].tokens for i in batch]
    longest, steps = max(map(len, prompts)), max(counts)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=model.device)
    rows = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)  # [batch, longest]
    cache = ContiguousCache(model.config, len(batch), longest + steps, model.dtype, model.device, padding)
    for i in batch:
        result.times[i].scheduled = clock.now
    tokens = None
    for step in range(steps):
        begin, width = clock.now, 1 if step else longest
        call = partial(decode, model, tokens, cache) if step else partial(prefill, model, rows, cache)
        logits = clock.run(call, len(batch) * width)  # [batch, vocab]
        tokens = logits.argmax(-1)  # [batch]
        for slot, (i, token) in enumerate(zip(batch, tokens.tolist())):
            live = step < counts[slot]
            useful = (1 if step else len(prompts[slot])) if live else 0
            kind = "idle" if not live else "decode" if step else "prefill"
            result.cells.append(Cell(slot, begin, clock.now, i, kind, width, useful))
            if live:
                result.outputs[i].append(token)
                result.times[i].token(clock.now)


def _continuous(
    model: Decoder, trace: Sequence[Arrival], options: EngineOptions, clock: Clock, result: TraceResult
) -> None:
    engine = Engine(model, replace(options, keep_log=True), eos_ids=())
    log = engine.scheduler.log
    names, slots, coming = {}, {}, 0
    while coming < len(trace) or engine.has_work:
        if not engine.has_work:
            clock.now = max(clock.now, trace[coming].time)
        while coming < len(trace) and trace[coming].time <= clock.now:
            params = SamplingParams(max_tokens=trace[coming].tokens, temperature=0, ignore_eos=True)
            names[engine.add(trace[coming].prompt, params).id] = coming
            coming += 1
        begin = clock.now
        outputs = clock.run(engine.step, lambda: log[-1].tokens)
        for name, _, count, kind in log[-1].entries:
            i = names[name]
            if i not in slots:
                slots[i] = next(s for s in range(options.max_num_seqs) if s not in slots.values())
            result.times[i].scheduled = begin if result.times[i].scheduled is None else result.times[i].scheduled
            result.cells.append(Cell(slots[i], begin, clock.now, i, kind, count, count))
        for name, _ in log[-1].preempted:
            slots.pop(names[name], None)
        for output in outputs:
            i = names[output.group]
            result.outputs[i].append(output.token)
            result.times[i].token(clock.now)
            if output.finish_reason is not None:
                del slots[i]
