"""`minillm bench course`: the figures that chapters 00 to 07 draw beside the reader's own.

Each chapter measures these in its own cells, where the reader can see how; here the same quantities are taken once on
a GPU, under the names that the cells ask `recorded` for. Tokens are compared before anything is timed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from minillm.cache.block_pool import blocks_for
from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import generate_cached, prefill
from minillm.cache.paged import PagedCache, PagedStep
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.measure import clock
from minillm.measure.bench import NotMeasured
from minillm.measure.counts import forward_counts
from minillm.measure.machine import ceilings
from minillm.measure.peak import Forward, measure_forward
from minillm.measure.records import Figure, figure
from minillm.model.attention import LayerInfo
from minillm.model.generate import generate_naive
from minillm.model.hub import is_available
from minillm.model.sampling import SamplingParams
from minillm.model.weights import load_model


def bench_course(repeats: int = 3, smoke: bool = False) -> Iterator[Figure]:
    if not smoke and not torch.cuda.is_available():
        raise NotMeasured("the chapters measure a CPU themselves; this is for a GPU")
    tiny = load_model("tiny", dtype="float32")
    large = "smollm2-135m" if not smoke and is_available("smollm2-135m") else "tiny"
    model = tiny if large == "tiny" else load_model(large)
    yield from kv_cache(tiny, 8 if smoke else 200, repeats)
    yield from prefill_share(model, large, 16 if smoke else 1024 if large != "tiny" else 256, repeats, smoke)
    yield from memory_peak(tiny, 16 if smoke else 256)
    yield from paged(tiny, 4 if smoke else 20, repeats)
    length = 32 if smoke else 2048 if large != "tiny" else 384
    yield from paged_attention(model, length, repeats)
    yield from chunks(model, large, length, repeats)
    yield from prefix(model, large, length, repeats)


def kv_cache(model, tokens: int, repeats: int) -> Iterator[Figure]:
    """Chapter 02: tokens/s of a whole answer, with and without a cache."""
    prompt = list(range(5, 21))
    if generate_naive(model, prompt, 8) != generate_cached(model, prompt, 8):
        raise RuntimeError("the cache changed the tokens")
    pair = clock.paired(
        lambda: generate_naive(model, prompt, tokens), lambda: generate_cached(model, prompt, tokens), repeats, 1
    )
    for name, timing in (("naive", pair.a), ("cache", pair.b)):
        yield figure(f"tiny.{name}.tokens_per_s", tokens / timing.median, "tokens/s", model="tiny")


def prefill_share(model, name: str, length: int, repeats: int, smoke: bool) -> Iterator[Figure]:
    """Chapter 00: FLOP/s of a prefill over those of a large product of the same dtype."""
    ids = torch.randint(5, model.config.vocab_size, (1, length), device=model.device)
    cache = ContiguousCache(model.config, 1, length, model.dtype, model.device)

    def run() -> None:
        cache.truncate(0)
        prefill(model, ids, cache)

    flops = forward_counts(model.config, length, scored=1).total_flops
    rate = flops / clock.timed(run, max(3, repeats), 2).median
    share = rate / ceilings(model.device, fast=smoke).peak(model.dtype)
    yield figure("prefill.peak_share", share, "1", model=name, workload={"tokens": length})


def memory_peak(model, tokens: int) -> Iterator[Figure]:
    """Chapter 03: bytes at the peak of one prefill, weights and cache and all."""
    taken = measure_forward(model.config, Forward(1, tokens))
    yield figure("memory.peak", taken["total"], "B", model="tiny", workload={"prefill": tokens})


def paged(model, count: int, repeats: int) -> Iterator[Figure]:
    """Chapter 05: the same requests in memory for four contexts, as 4 blocks of a context and as blocks of 16."""
    rng, context = random.Random(2), model.config.max_length
    work = [([rng.randrange(5, 2000) for _ in range(rng.randint(8, 48))], rng.randint(4, 24)) for _ in range(count)]

    def run(block: int) -> list[list[int]]:
        options = EngineOptions(
            max_num_seqs=64, block_size=block, num_blocks=4 * context // block, headroom=int(block < context)
        )
        return run_all(Engine(model, options, eos_ids=()), work)

    if run(context) != run(16):
        raise RuntimeError("the block size changed the tokens")
    pair = clock.paired(lambda: run(context), lambda: run(16), repeats, 0)
    tokens = sum(answer for _, answer in work)
    for name, timing in (("paged.reserved_throughput", pair.a), ("paged.throughput", pair.b)):
        yield figure(name, tokens / timing.median, "tokens/s", model="tiny", workload={"requests": count})


def paged_attention(model, length: int, repeats: int, batch: int = 8, block: int = 16) -> Iterator[Figure]:
    """Chapter 05: one decode step of one layer's attention, through shuffled blocks over contiguous rows."""
    config, device, dtype = model.config, model.device, model.dtype
    one = config.with_changes(num_layers=1, windows=())
    layer, per = LayerInfo(0, config.scale), blocks_for(length, block)
    whole = ContiguousCache(one, batch, length, dtype, device)
    blocks = PagedCache(one, batch * per, block, dtype, device, attention="auto")
    q = torch.randn(batch, 1, config.num_heads, config.head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, length, config.num_kv_heads, config.head_dim, device=device, dtype=dtype)
    whole.attend(layer, q.expand(-1, length, -1, -1), k, v)
    tables = torch.randperm(batch * per).view(batch, per).to(device)
    place = torch.arange(length, device=device)
    slots = tables[:, place // block] * block + place % block  # [batch, length]
    for stored, rows in ((blocks.k, k), (blocks.v, v)):
        stored[0].flatten(0, 1)[slots.flatten()] = rows.flatten(0, 1)
    last = torch.full((batch,), length - 1, device=device)
    blocks.begin(PagedStep(slots[:, -1].contiguous(), tables, [1] * batch, [length] * batch, last))

    def contiguous_step() -> torch.Tensor:
        whole.lengths[0] = length - 1
        return whole.attend(layer, q, k[:, -1:], v[:, -1:])[:, 0]

    def paged_step() -> torch.Tensor:
        return blocks.attend(layer, q[:, 0], k[:, -1], v[:, -1])

    a, b = contiguous_step().float(), paged_step().float()
    if not (a - b).abs().max() <= 0.02 * a.abs().max():
        raise RuntimeError("paged attention differs from contiguous attention")
    ratio = clock.paired(paged_step, contiguous_step, max(5, repeats), 3).ratio
    about = {"length": length, "batch": batch, "attention": blocks.attention}
    yield figure("paged.attention_overhead", ratio.median, "x", spread=ratio.quartiles, workload=about)


def run_all(engine: Engine, work: list[tuple[list[int], int]]) -> list[list[int]]:
    groups = [
        engine.add(prompt, SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True))
        for prompt, answer in work
    ]
    while engine.has_work:
        engine.step()
    return [engine.completions(group)[0].token_ids for group in groups]


def chunks(model, name: str, length: int, repeats: int) -> Iterator[Figure]:
    """Chapter 06: four streams, a long prompt arrives. Whole prompt against chunks: the streams' longest gap, and
    the newcomer's time to first token."""
    budget = max(8, length // 8)

    def serve(chunked: bool) -> tuple[float, float]:
        tokens = budget if chunked else length + 8
        options = EngineOptions(max_num_seqs=5, max_num_batched_tokens=tokens, num_blocks=length // 16 * 2 + 64)
        engine = Engine(model, options, eos_ids=())
        answer = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
        for i in range(4):
            engine.add([5 + i, 9, 11], answer)
        for _ in range(4):
            engine.step()
        late = engine.add([5 + i % 1900 for i in range(length)], SamplingParams(max_tokens=2, temperature=0))
        steps: list[float] = []
        while not late.requests[0].output:
            steps.append(clock.seconds(engine.step))
        return max(steps), sum(steps)

    serve(False), serve(True)
    pairs = [(serve(False), serve(True)) for _ in range(repeats)]
    about = {"prompt": length, "budget": budget, "streams": 4}
    for what, ratios in (
        ("worst_gap_ratio", [whole[0] / many[0] for whole, many in pairs]),
        ("ttft_ratio", [many[1] / whole[1] for whole, many in pairs]),
    ):
        found = clock.Timing(tuple(ratios))
        yield figure(f"scheduler.{what}", found.median, "x", spread=found.quartiles, model=name, workload=about)


def prefix(model, name: str, length: int, repeats: int) -> Iterator[Figure]:
    """Chapter 07: TTFT of a long shared prompt and eight new tokens, first cold, then with the prompt stored."""
    options = EngineOptions(enable_prefix_caching="hash", num_blocks=(length // 16 + 2) * (repeats + 2))
    engine, rng = Engine(model, options, eos_ids=()), random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(5, model.config.vocab_size) for _ in range(count)]

    def first_token(prompt: list[int]) -> float:
        group = engine.add(prompt, SamplingParams(max_tokens=1, temperature=0))
        while engine.has_work:
            engine.step()
        return engine.completions(group)[0].metrics.ttft

    first_token(ids(length))
    documents = [ids(length) for _ in range(repeats)]
    pairs = [[first_token(document + ids(8)) for _ in range(2)] for document in documents]
    for i, what in enumerate(("cold", "warm")):
        timing = clock.Timing(tuple(pair[i] for pair in pairs))
        yield figure(f"prefix.ttft_{what}", timing.median, "s", model=name, workload={"shared": length, "own": 8})


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"course": bench_course}
