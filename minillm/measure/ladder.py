"""The ladder: one request, one model, one technique more on every rung.

Chapter 00, and `minillm tour`. Each rung generates the same greedy tokens (checked before any is shown; in 16 bits
a near-tie may fall either way, so there the share of equal tokens is reported instead). A rung is a function that
yields token ids; a chapter that adds a technique adds a rung to RUNGS. What takes many requests to show is in
`engine.rungs`, above.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from minillm.cache.generate import cached_tokens
from minillm.errors import ParamsError, illegal
from minillm.measure.clock import RequestTimes
from minillm.measure.counts import forward_counts, weight_bytes
from minillm.measure.machine import Ceilings
from minillm.model.compiled import CompiledDecoder
from minillm.model.decoder import Decoder
from minillm.model.generate import naive_tokens
from minillm.model.layout import pack_linears
from minillm.quant.linear import model_bytes
from minillm.quant.named import quantize_by_name

Tokens = Iterator[int]


@dataclass(frozen=True)
class Rung:
    """prepare(model) -> the model this rung runs. generate(model, prompt, count) -> token ids, as they come.

    exact: False where the technique changes the model (fewer bits), so that its tokens may be others.
    """

    name: str
    chapter: str
    generate: Callable[[Decoder, list[int], int], Tokens]
    prepare: Callable[[Decoder], Decoder] = lambda model: model
    cached: bool = True
    exact: bool = True


def _packed(model: Decoder) -> Decoder:
    return pack_linears(copy.deepcopy(model))


def _compiled(model: Decoder) -> CompiledDecoder:
    return CompiledDecoder(copy.deepcopy(model), many=False)


def _quantized(name: str) -> Callable[[Decoder], CompiledDecoder]:
    return lambda model: CompiledDecoder(quantize_by_name(copy.deepcopy(model), name), many=False)


RUNGS = (
    Rung("naive: recompute everything", "01", naive_tokens, cached=False),
    Rung("KV cache", "02", cached_tokens),
    Rung("packed weights", "02", cached_tokens, _packed),
    Rung("compiled step", "10", cached_tokens, _compiled),
    Rung("8-bit weights *", "11", cached_tokens, _quantized("int8"), exact=False),
    Rung("4-bit weights *", "11", cached_tokens, _quantized("int4"), exact=False),
)
QUICK = tuple(rung for rung in RUNGS if rung.chapter < "10")  # what needs no compiler, for chapter 00


@dataclass(frozen=True)
class Step:
    """What one rung measured. Seconds, bytes. bandwidth_share: bytes a decode step must move / TPOT / ceiling.
    speedup: of tokens_per_second, over the workload's first rung. same_tokens: see `agreement`. exact: see `Rung`."""

    name: str
    chapter: str
    tokens_per_second: float
    ttft: float
    tpot: float
    weight_bytes: int
    kv_bytes: int
    bandwidth_share: float | None  # None: steps differ too much for one figure
    speedup: float
    workload: str = "1 request"
    same_tokens: float = 1.0
    exact: bool = True

    def as_dict(self) -> dict:
        return asdict(self)


def timed_request(tokens: Callable[[], Tokens]) -> tuple[list[int], RequestTimes]:
    """Run one request to its end and note when each token came."""
    times, ids = RequestTimes(time.perf_counter()), []
    for token in tokens():
        times.token()
        ids.append(token)
    return ids, times


def check_tokens(model: Decoder, prompt: list[int], count: int) -> None:
    """Raise ParamsError unless every rung can generate `count` tokens, and two at the least: one has no TPOT."""
    most = model.config.max_length + 1 - len(prompt)
    if not 2 <= count <= most:
        raise ParamsError(illegal("tokens", count, f"must be from 2 to {most}: prompt and answer share the context"))


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of our tokens that theirs equal, up to the first difference of each answer."""
    same = sum(next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a)) for a, b in zip(ours, theirs))
    return same / sum(map(len, ours))


def refuse_other_tokens(name: str, same: float, dtype: torch.dtype) -> None:
    """In float32 only a near-tie may fall the other way, on some machine: that ends one answer, not all of them."""
    if dtype == torch.float32 and same < 0.9:
        raise RuntimeError(f"{name!r} changed the tokens: {same:.0%} are equal; speed is not compared")


def climb(
    model: Decoder,
    prompt: list[int],
    count: int,
    ceilings: Ceilings,
    rungs: tuple[Rung, ...] = RUNGS,
    repeats: int = 2,
) -> Iterator[Step]:
    """Measure each rung: a short warm-up, then the best of `repeats` runs. Refuses exact rungs whose tokens differ.

    What cannot be compiled here has no compiled rung."""
    check_tokens(model, prompt, count)
    reference: list[int] | None = None
    first_rate = None
    element = model.embed.weight.element_size()
    for rung in rungs:
        prepared = rung.prepare(model)
        if rung.exact and getattr(prepared, "why_eager", None) is not None:
            continue
        for _ in rung.generate(prepared, prompt, 2):
            pass
        best, same = None, 1.0
        for _ in range(repeats):
            ids, times = timed_request(lambda rung=rung, m=prepared: rung.generate(m, prompt, count))
            if reference is None:
                reference = ids
            same = min(same, agreement([reference], [ids]))
            if rung.exact:
                refuse_other_tokens(rung.name, same, model.dtype)
            best = times if best is None or times.e2e < best.e2e else best
        rate = len(reference) / best.e2e
        first_rate = first_rate or rate
        middle = len(prompt) + count // 2
        if rung.cached:
            counts = forward_counts(model.config, 1, middle, dtype_bytes=element, scored=1)
            kv = counts.kv_written * (len(prompt) + count - 1)
        else:
            counts, kv = forward_counts(model.config, middle, dtype_bytes=element, scored=1), 0
        held, moved = weight_bytes(model.config, element), counts.total_bytes
        if not rung.exact:
            held = model_bytes(prepared.model)
            moved += held - prepared.model.embed.weight.nbytes - counts.total_weight_bytes
        yield Step(
            name=rung.name,
            chapter=rung.chapter,
            tokens_per_second=rate,
            ttft=best.ttft,
            tpot=best.tpot,
            weight_bytes=held,
            kv_bytes=kv,
            bandwidth_share=moved / best.tpot / ceilings.read_bandwidth,
            speedup=rate / first_rate,
            same_tokens=same,
            exact=rung.exact,
        )
