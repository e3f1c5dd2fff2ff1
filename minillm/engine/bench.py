"""Benchmarks of the engine, beside its peers: `minillm bench throughput`, `prefix` and `scheduler`.

Chapters 04 to 07. throughput: one set of requests of mixed lengths through this engine, through transformers'
continuous batching (`generate_batch`'s own manager, with explicit sizes), through its padded `generate`, and, where
there is a Python that has it, through OpenVINO GenAI's continuous batching; same weights, alternating. prefix: time
to first token with a warm prefix cache against a cold one. scheduler: a step of bookkeeping with a long queue,
without any model.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

from minillm.cache.block_pool import BlockPool
from minillm.cache.paged import cache_bytes
from minillm.cache.paged_kernel import compiled_attention
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.kernels.layers_cpu import compile_decoder
from minillm.measure.bench import NotMeasured, as_transformers, check_same_logits
from minillm.measure.clock import Timing, seconds
from minillm.measure.ladder import agreement
from minillm.measure.openvino_peer import ROUNDED, openvino_peers
from minillm.measure.records import Figure, figure
from minillm.model.hub import is_available
from minillm.model.layout import pack_linears
from minillm.model.sampling import SamplingParams
from minillm.model.weights import load_model

Workload = list[tuple[list[int], int]]  # (prompt, exact number of new tokens)
SEQUENCES, STEP_TOKENS, BLOCK = 32, 512, 16


def requests(count: int, vocab: int, seed: int = 0) -> Workload:
    """Prompts of 16 to 256 tokens, answers of 16 to 128, uniform."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(5, vocab) for _ in range(rng.randint(16, 256))], rng.randint(16, 128)) for _ in range(count)
    ]


def bench_throughput(
    model: str = "smollm2-135m",
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    count: int = 32,
    repeats: int = 5,
    peer_python: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Figure]:
    """Output tokens/s of one workload: this engine, transformers' continuous batching, its padded generate, and
    OpenVINO's continuous batching, on float32 weights. peer_python: a Python that has it; `say` hears if not."""
    need(model)
    with ExitStack() as stack:
        outside: dict[str, Callable] = {}
        try:
            outside = stack.enter_context(openvino_peers(model, peer_python, SEQUENCES, STEP_TOKENS))
        except NotMeasured as error:
            say(f"throughput.openvino: not measured. {error}")
        yield from throughput_figures(model, dtypes, count, repeats, outside)


def throughput_figures(
    model: str, dtypes: tuple[str, ...], count: int, repeats: int, outside: dict[str, Callable]
) -> Iterator[Figure]:
    """outside: peers that are neither given our model nor timed by us."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in dtypes:
        ours = load_model(model, dtype=dtype, device=device)
        theirs = as_transformers(ours)
        check_same_logits(ours, theirs, 1e-3 if dtype == "float32" else 0.1)
        work = requests(count, ours.config.vocab_size)
        compiled = compile_decoder(copy.deepcopy(ours))
        engine = Engine(pack_linears(ours), options_for(work), eos_ids=())
        assert engine.runner.cache.nbytes == cache_bytes(ours.config, engine.options.num_blocks, BLOCK, ours.dtype)
        texts, share = run_engine(engine, work), bookkeeping_share(engine, work)  # both warm up
        engines = {"engine": engine}
        if compiled.why_eager is None:
            options = options_for(work, compiled_attention(ours.device, ours.dtype))
            engines["engine.compiled"] = Engine(compiled, options, eos_ids=())
            same = agreement(texts, run_engine(engines["engine.compiled"], work))
            if dtype == "float32" and same < 0.9:
                raise RuntimeError(f"compiled, only {same:.0%} of the tokens are equal")
        peers = {"transformers.generate_batch": continuous, "transformers.generate": padded} | outside
        for peer in outside.values():
            peer(theirs, work)  # transformers warmed up on the logits
        samples: dict[str, list[float]] = {name: [] for name in (*engines, *peers)}
        for _ in range(repeats):
            for name, each in engines.items():
                samples[name].append(seconds(lambda: run_engine(each, work)))  # noqa: B023
            for name, peer in peers.items():
                took, peer_texts = peer(theirs, work)
                samples[name].append(took)
                same = agreement(texts, peer_texts)
                exact = dtype == "float32" and name != ROUNDED
                if exact and same < 0.9:  # in float32 only near-ties may differ
                    raise RuntimeError(
                        f"{name}: only {same:.0%} of the tokens are equal; the workload is not the same"
                    )
        tokens = sum(answer for _, answer in work)
        about = {"dtype": dtype, "requests": count, "output_tokens": tokens, "threads": torch.get_num_threads()}
        for name, taken in samples.items():
            rates = Timing(tuple(tokens / took for took in taken))
            yield figure(
                f"throughput.{dtype}.{name}",
                rates.median,
                "tokens/s",
                spread=rates.quartiles,
                model=model,
                workload=about,
            )
        for mine, name in itertools.product(engines, peers):
            ratio = Timing(tuple(theirs / ours for theirs, ours in zip(samples[name], samples[mine])))
            yield figure(
                f"throughput.{dtype}.{mine}.over_{name}",
                ratio.median,
                "x",
                spread=ratio.quartiles,
                model=model,
                workload=about,
            )
        yield figure(f"throughput.{dtype}.bookkeeping_share", share, "1", model=model, workload=about)


def options_for(work: Workload, attention: str = "auto") -> EngineOptions:
    blocks = sum(-(-(len(prompt) + answer) // BLOCK) for prompt, answer in work)
    return EngineOptions(
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=STEP_TOKENS,
        block_size=BLOCK,
        num_blocks=blocks,
        attention=attention,
    )


def run_engine(engine: Engine, work: Workload) -> list[list[int]]:
    groups = [
        engine.add(prompt, SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True))
        for prompt, answer in work
    ]
    while engine.has_work:
        engine.step()
    return [group.requests[0].output for group in groups]


def bookkeeping_share(engine: Engine, work: Workload) -> float:
    """Share of the engine's time that is neither the model nor the sampler."""
    spent, whole = [0.0], time.perf_counter()

    def timed(call: Callable) -> Callable:
        def wrapper(*args):
            start = time.perf_counter()
            result = call(*args)
            spent[0] += time.perf_counter() - start
            return result

        return wrapper

    places = [(engine.model, "hidden"), (engine.model, "logits"), (engine.sampler, "sample")]
    for owner, name in places:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        run_engine(engine, work)
    finally:
        for owner, name in places:
            delattr(owner, name)  # the class's own method is back
    return 1 - spent[0] / (time.perf_counter() - whole)


def continuous(theirs, work: Workload) -> tuple[float, list[list[int]]]:
    """transformers' continuous batching; its set-up is not counted. Sizes as here: requests, tokens a step, room."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    page = 32
    pages = sum(-(-(len(prompt) + answer) // page) for prompt, answer in work)
    sizes = ContinuousBatchingConfig(
        page_size=page, num_blocks=pages, max_batch_tokens=STEP_TOKENS, max_requests_per_batch=SEQUENCES
    )
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
    with theirs.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes, block=True, timeout=5
    ) as manager:
        start, texts = time.perf_counter(), {}
        names = [manager.add_request(prompt, max_new_tokens=answer, eos_token_id=-1) for prompt, answer in work]
        while len(texts) < len(work):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
                texts[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped")
        took = time.perf_counter() - start
    return took, [texts[name] for name in names]


def padded(theirs, work: Workload) -> tuple[float, list[list[int]]]:
    """transformers' generate on one padded batch, until the longest answer is done."""
    longest = max(len(prompt) for prompt, _ in work)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in work], device=theirs.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in work], device=theirs.device)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": mask}
    texts = []

    def run() -> None:
        with torch.inference_mode():
            texts[:] = theirs.generate(ids, max_new_tokens=max(a for _, a in work), **options)[:, longest:].tolist()

    took = seconds(run)
    return took, [text[:answer] for text, (_, answer) in zip(texts, work)]


def bench_prefix(model: str = "smollm2-135m", shared: int = 512, own: int = 16, repeats: int = 5) -> Iterator[Figure]:
    """TTFT of a prompt whose first `shared` tokens are cached / TTFT of one that shares nothing, in pairs."""
    need(model)
    decoder = pack_linears(load_model(model))
    vocab, rng = decoder.config.vocab_size, random.Random(0)
    params = SamplingParams(max_tokens=1, temperature=0)
    for kind in ("hash", "radix"):
        engine = Engine(decoder, EngineOptions(enable_prefix_caching=kind, num_blocks=256), eos_ids=())

        def ttft(prefix: list[int], engine: Engine = engine) -> float:
            group = engine.add([*prefix, *(rng.randrange(5, vocab) for _ in range(own))], params)
            while engine.has_work:
                engine.step()
            return engine.completions(group)[0].metrics.ttft

        document = [rng.randrange(5, vocab) for _ in range(shared)]
        ttft(document)
        pairs = [(ttft([rng.randrange(5, vocab) for _ in range(shared)]), ttft(document)) for _ in range(repeats)]
        ratio = Timing(tuple(warm / cold for cold, warm in pairs))
        about = {"shared": shared, "own": own, "threads": torch.get_num_threads()}
        yield figure(
            f"prefix.{kind}.warm_over_cold", ratio.median, "x", spread=ratio.quartiles, model=model, workload=about
        )


def bench_scheduler(queue: int = 10_000, steps: int = 200, repeats: int = 5) -> Iterator[Figure]:
    """CPU seconds of schedule + update a step, with `queue` requests waiting and 32 running; no model."""
    samples = []
    for _ in range(repeats):
        pool = BlockPool(4096, BLOCK)
        scheduler = Scheduler(EngineOptions(max_num_seqs=SEQUENCES, max_num_batched_tokens=STEP_TOKENS), pool)
        for i in range(queue):
            scheduler.add(Request(f"r{i}", range(64), 16 + i % 32))
        start = time.process_time()
        for _ in range(steps):
            batch = scheduler.schedule()
            sampled = batch.sampling
            scheduler.update(batch, dict.fromkeys(sampled, 7))
            scheduler.finish([r for r in sampled if len(r.tokens) - len(r.prompt) >= r.limit])
        samples.append((time.process_time() - start) / steps)
    timing = Timing(tuple(samples))
    about = {"waiting": queue, "running": SEQUENCES}
    yield figure("scheduler.step", timing.median, "s", spread=timing.quartiles, workload=about)


def need(model: str) -> None:
    if not is_available(model):
        raise NotMeasured(f"{model} is not on this machine: run minillm pull {model}")


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {
    "throughput": bench_throughput,
    "prefix": bench_prefix,
    "scheduler": bench_scheduler,
}
