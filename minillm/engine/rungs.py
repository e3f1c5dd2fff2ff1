"""The ladder's rungs for many requests: batching, paged blocks, and a prefix that is already cached.

Chapters 04, 05 and 07, and `minillm tour`. One request cannot show them, so they have workloads of their own, each
with a first rung to be compared with. All requests of a workload are there at the start, so TTFT holds the wait:

    many    requests of mixed lengths: one by one; in padded batches; batched continuously, with room for the longest
            request set aside for each; with the same bytes cut into blocks, where more of them run at once; and
            that with all layers of a step in one call, on a CPU that has a compiler
    prefix  one request whose prompt begins as an earlier one did: computed again, or found in the prefix cache

Weights are packed on every rung, as on those of `measure.ladder`. A rung whose tokens differ from its
workload's first is refused (in float32: see `measure.ladder`). kv_bytes: room set aside for K and V, used or not.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from minillm.cache.block_pool import blocks_for
from minillm.cache.paged import cache_bytes
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.policies import Arrival, run_trace
from minillm.errors import ParamsError, illegal
from minillm.kernels.layers_cpu import compile_decoder
from minillm.measure.clock import RequestTimes, summary
from minillm.measure.counts import weight_bytes
from minillm.measure.ladder import Step, agreement, refuse_other_tokens, timed_request
from minillm.model.compiled import CompiledDecoder
from minillm.model.decoder import Decoder
from minillm.model.layout import pack_linears
from minillm.model.sampling import SamplingParams

BLOCK = 16  # tokens a block
AT_ONCE = 4  # requests for which there is memory, if each takes room for the longest
LONGEST = 512  # tokens of the longest request that has to be reckoned with, where the context allows
SHORTEST = 64  # contexts in which the workloads make sense


def _packed(model: Decoder) -> Decoder:
    return pack_linears(copy.deepcopy(model))


def _in_one_call(model: Decoder) -> CompiledDecoder | None:
    compiled = compile_decoder(copy.deepcopy(model))
    return None if compiled.whole is None else compiled


@dataclass(frozen=True)
class Rung:
    """run(model, workload) -> (answers and times of all requests, tokens that KV room was set aside for). prepare:
    makes the model that runs from the plain one, which it leaves as it is; None: there is no such rung here."""

    name: str
    chapter: str
    run: Callable[[Decoder, Workload], tuple[list[list[int]], list[RequestTimes], int]]
    prepare: Callable[[Decoder], Decoder | None] = _packed


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together. reserve: tokens of room that a request gets if it cannot grow. before: prompts
    that were answered earlier."""

    name: str
    trace: tuple[Arrival, ...]
    reserve: int
    before: tuple[tuple[int, ...], ...] = ()


def many(model: Decoder, count: int = 16, seed: int = 0) -> Workload:
    """Prompts of up to a fifth of the longest request, answers of up to a tenth, log-uniform: many are short."""
    rng, vocab, reserve = random.Random(seed), model.config.vocab_size, _room(model)
    trace = []
    for _ in range(count):
        prompt = tuple(rng.randrange(5, vocab) for _ in range(rng.randint(reserve // 32, reserve // 5)))
        trace.append(Arrival(0.0, prompt, round(4 * (reserve / 40) ** rng.random())))
    return Workload(f"{count} requests of mixed lengths, all there at the start", tuple(trace), reserve)


def prefix(model: Decoder, own: int = 8, tokens: int = 16, seed: int = 0) -> Workload:
    """One prompt, half of the longest request and `own` tokens more, after another one with the same first half."""
    rng, vocab, shared = random.Random(seed), model.config.vocab_size, _room(model) // 2
    start = tuple(rng.randrange(5, vocab) for _ in range(shared))
    first, second = (start + tuple(rng.randrange(5, vocab) for _ in range(own)) for _ in range(2))
    name = f"1 request, {shared} of its {shared + own} prompt tokens the same as an earlier one's"
    return Workload(name, (Arrival(0.0, second, tokens),), shared + own + tokens, (first,))


def _room(model: Decoder) -> int:
    if (context := model.config.max_length) < SHORTEST:
        raise ParamsError(illegal("max_length", context, f"the rungs of many requests need a context of {SHORTEST}"))
    return min(LONGEST, context)


def _padded(size: int):
    def run(model: Decoder, work: Workload):
        result = run_trace(model, work.trace, "static", size=size)
        return result.outputs, result.times, size * work.reserve

    return run


def _reserved(model: Decoder, work: Workload):
    """Continuous batching before paging: a block holds the longest request, so each takes one, whole."""
    options = EngineOptions(max_num_seqs=AT_ONCE, block_size=work.reserve, num_blocks=AT_ONCE, headroom=0)
    return _continuous(model, work, options)


def _paged(attention: str = "auto"):
    """The same bytes in small blocks: as many requests run at once as their tokens allow."""

    def run(model: Decoder, work: Workload):
        sizes = {"num_blocks": AT_ONCE * work.reserve // BLOCK, "block_size": BLOCK}
        return _continuous(model, work, EngineOptions(max_num_seqs=len(work.trace), attention=attention, **sizes))

    return run


def _continuous(model: Decoder, work: Workload, options: EngineOptions):
    result = run_trace(model, work.trace, "continuous", options=options)
    return result.outputs, result.times, options.num_blocks * options.block_size


def _after_another(kind: str):
    def run(model: Decoder, work: Workload):
        (request,) = work.trace
        blocks = 2 * blocks_for(work.reserve, BLOCK)
        engine = Engine(
            model, EngineOptions(enable_prefix_caching=kind, num_blocks=blocks, block_size=BLOCK), eos_ids=()
        )
        for prompt in work.before:
            list(_answer(engine, prompt, 1))
        ids, times = timed_request(lambda: _answer(engine, request.prompt, request.tokens))
        return [ids], [times], blocks * BLOCK

    return run


def _answer(engine: Engine, prompt: Sequence[int], tokens: int) -> Iterator[int]:
    engine.add(prompt, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    while engine.has_work:
        for output in engine.step():
            yield output.token


MANY = (
    Rung("one by one", "02", _padded(1)),
    Rung(f"padded batches of {AT_ONCE}", "04", _padded(AT_ONCE)),
    Rung(f"continuous batching, {AT_ONCE} at once", "04", _reserved),
    Rung("paged blocks, same bytes", "05", _paged()),
    Rung("all layers in one call", "10", _paged("cpp"), _in_one_call),
)
PREFIX = (
    Rung("computed again", "05", _after_another("off")),
    Rung("prefix cache", "07", _after_another("hash")),
)


def climb_many(
    model: Decoder, workloads: Sequence[tuple[Workload, Sequence[Rung]]], repeats: int = 1
) -> Iterator[Step]:
    """Measure each rung: a warm-up of the first request, then the best of `repeats` runs of the whole workload.
    TTFT and TPOT are medians over the requests."""
    prepared = {}
    element = model.embed.weight.element_size()
    for work, rungs in workloads:
        short = Workload(work.name, (Arrival(0.0, work.trace[0].prompt, 2),), work.reserve, work.before)
        reference, first_rate = None, None
        for rung in rungs:
            if rung.prepare not in prepared:
                prepared[rung.prepare] = rung.prepare(model)
            if (runs := prepared[rung.prepare]) is None:
                continue
            rung.run(runs, short)
            best, same = None, 1.0
            for _ in range(repeats):
                answers, times, room = rung.run(runs, work)
                reference = reference or answers
                same = min(same, agreement(reference, answers))
                refuse_other_tokens(rung.name, same, model.dtype)
                run = summary(times)
                best = run if best is None or run.duration < best.duration else best
            rate = best.output_tokens / best.duration
            first_rate = first_rate or rate
            yield Step(
                name=rung.name,
                chapter=rung.chapter,
                tokens_per_second=rate,
                ttft=best.ttft.percentiles[50],
                tpot=best.tpot.percentiles[50],
                weight_bytes=weight_bytes(model.config, element),
                kv_bytes=cache_bytes(model.config, 1, room, model.dtype),
                bandwidth_share=None,
                speedup=rate / first_rate,
                workload=work.name,
                same_tokens=same,
            )


def tour_workloads(model: Decoder) -> list[tuple[Workload, Sequence[Rung]]]:
    """What `minillm tour` runs after the ladder of one request."""
    return [(many(model), MANY), (prefix(model), PREFIX)]
