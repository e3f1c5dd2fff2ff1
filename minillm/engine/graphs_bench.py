"""`minillm bench graphs`: the engine's decode step launched kernel by kernel, and replayed from a CUDA graph.

Chapter 10. The same model, requests and kernels on both sides, in alternation; tokens are compared before anything is
timed. Also what a graph costs: seconds to capture, and bytes that stay allocated, beside the formula.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from minillm.cache.block_pool import blocks_for
from minillm.engine.engine import Engine
from minillm.engine.graphs import CudaBackend, EagerBackend, GraphRunner, graph_bytes
from minillm.engine.options import EngineOptions
from minillm.kernels.fused import try_fuse
from minillm.measure import clock
from minillm.measure.bench import NotMeasured
from minillm.measure.launches import gpu_launches
from minillm.measure.records import Figure, figure
from minillm.model.decoder import Decoder
from minillm.model.sampling import SamplingParams
from minillm.model.weights import load_model

PROMPT, BLOCK = 16, 16


def bench_graphs(
    model: str = "smollm2-135m",
    batches: tuple[int, ...] = (1, 8, 32),
    tokens: int = 64,
    repeats: int = 5,
    smoke: bool = False,
) -> Iterator[Figure]:
    """Figures graphs.batchN.eager_rate, .rate, .ratio; graphs.launches.eager, .fused, .replay;
    graphs.capture_seconds, graphs.memory, graphs.memory_formula.

    smoke: on any device, with `tiny`; without CUDA a stand-in that keeps a graph's contract is replayed.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not smoke:
        raise NotMeasured("CUDA graphs need a GPU; there is none")
    name, batches, tokens = ("tiny", (1, 3), 4) if smoke else (model, batches, tokens)
    decoder = load_model(name, dtype="bfloat16" if on_gpu else "float32")
    if on_gpu:
        yield figure("graphs.launches.eager", gpu_launches(decode_step(decoder)), "1", model=name)
        if (reason := try_fuse(decoder)) is not None:
            raise RuntimeError(f"fusion failed: {reason}")
        yield figure("graphs.launches.fused", gpu_launches(decode_step(decoder)), "1", model=name)
    sizes = tuple(sorted({1, 2, 4, *batches}))
    engines = {kind: make_engine(decoder, max(batches), tokens) for kind in ("eager", "replay")}
    before, start = torch.cuda.memory_reserved() if on_gpu else 0, time.perf_counter()
    cache = engines["replay"].runner.cache
    runner = GraphRunner(decoder, cache, sizes, CudaBackend() if on_gpu else EagerBackend())
    if runner.why_eager is not None:
        raise RuntimeError(runner.why_eager)
    engines["replay"].runner = runner
    about = {"sizes": list(sizes), "prompt": PROMPT, "tokens": tokens}
    if on_gpu:
        yield figure("graphs.capture_seconds", time.perf_counter() - start, "s", model=name, workload=about)
        yield figure("graphs.memory", torch.cuda.memory_reserved() - before, "B", model=name, workload=about)
        yield figure("graphs.launches.replay", gpu_launches(runner.graphs.replays[1]), "1", model=name)
    formula = graph_bytes(decoder.config, sizes, decoder.dtype.itemsize)
    yield figure("graphs.memory_formula", formula, "B", model=name, workload=about)
    for batch in batches:
        texts = {kind: answers(engine, batch, tokens)[0] for kind, engine in engines.items()}
        same = sum(a == b for x, y in zip(texts["eager"], texts["replay"]) for a, b in zip(x, y)) / (batch * tokens)
        if same < (0.8 if on_gpu else 1.0):  # in 16 bits a near-tie may flip, and the text parts
            raise RuntimeError(f"batch {batch}: only {same:.0%} of the replayed tokens are the eager ones")
        pairs = [[answers(engines[kind], batch, tokens)[1] for kind in engines] for _ in range(repeats)]
        ratio = clock.Timing(tuple(eager / replay for eager, replay in pairs))
        row = {**about, "batch": batch, "dtype": str(decoder.dtype).removeprefix("torch.")}
        for i, what in enumerate(("eager_rate", "rate")):
            rate = batch * (tokens - 1) / clock.Timing(tuple(pair[i] for pair in pairs)).median
            yield figure(f"graphs.batch{batch}.{what}", rate, "tokens/s", model=name, workload=row)
        yield figure(
            f"graphs.batch{batch}.ratio", ratio.median, "x", spread=ratio.quartiles, model=name, workload=row
        )


def make_engine(decoder: Decoder, batch: int, tokens: int) -> Engine:
    blocks = batch * blocks_for(PROMPT + tokens, BLOCK)
    return Engine(decoder, EngineOptions(max_num_seqs=batch, num_blocks=blocks, block_size=BLOCK), eos_ids=())


def answers(engine: Engine, batch: int, tokens: int) -> tuple[list[list[int]], float]:
    """(token ids of each request, seconds of the decode steps: all but the first, which is the prefill)."""
    vocab = engine.model.config.vocab_size
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    prompts = [[(7 * i + 3 * j + 5) % vocab for j in range(PROMPT)] for i in range(batch)]
    groups = [engine.add(prompt, params) for prompt in prompts]
    engine.step()

    def rest() -> None:
        while engine.has_work:
            engine.step()

    took = clock.seconds(rest)
    return [engine.completions(group)[0].token_ids for group in groups], took


def decode_step(decoder: Decoder) -> Callable[[], object]:
    """One step of one running request, again and again."""
    engine = make_engine(decoder, 1, 64)
    engine.add([5] * PROMPT, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    for _ in range(3):
        engine.step()
    return engine.step


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"graphs": bench_graphs}
