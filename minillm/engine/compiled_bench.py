"""`minillm bench compile`: the engine's steps in three ways on a CPU: layer by layer, as torch.compile's graphs, and
in one C++ call.

Chapter 10. All hold packed weights and answer the same requests, in alternation; their tokens are compared first.
Making the graphs is timed apart: it is paid once, and these seconds stand beside what they buy.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import torch

from minillm.cache.paged_kernel import compiled_attention
from minillm.engine.bench import Workload, options_for, run_engine
from minillm.engine.engine import Engine
from minillm.kernels.layers_cpu import compile_decoder
from minillm.kernels.linear_cpu import tile_linears
from minillm.measure.bench import NotMeasured
from minillm.measure.clock import Timing, seconds
from minillm.measure.ladder import agreement
from minillm.measure.records import Figure, figure
from minillm.model.compiled import CompiledDecoder
from minillm.model.hub import is_available
from minillm.model.layout import pack_linears
from minillm.model.weights import load_model


def bench_compile(
    models: tuple[str, ...] = ("tiny", "smollm2-135m"),
    batches: tuple[int, ...] = (1, 8),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    prompt: int = 16,
    tokens: int = 64,
    repeats: int = 5,
) -> Iterator[Figure]:
    """compile.MODEL.DTYPE.batchN.plain, .graphs and .whole (output tokens/s); .graphs_over_plain, .whole_over_plain,
    .whole_over_graphs; and compile.MODEL.DTYPE.seconds of making all graphs. No whole where `whole_step` gives none:
    weights that torch's own products suit better, say."""
    missing = [name for name in models if not name.startswith("shape:") and not is_available(name)]
    for name in models:
        if name in missing:
            continue
        for dtype in dtypes:
            plain = load_model(name, dtype=dtype, device="cpu")
            graphs = CompiledDecoder(copy.deepcopy(plain), pack=tile_linears)
            if graphs.why_eager is not None:
                raise NotMeasured(graphs.why_eager)
            whole, attention = compile_decoder(copy.deepcopy(plain)), compiled_attention(plain.device, plain.dtype)
            ways = {"plain": (pack_linears(plain), "auto"), "graphs": (graphs, attention)}
            if whole.whole is not None:
                ways["whole"] = (whole, attention)
            about = {"dtype": dtype, "prompt": prompt, "tokens": tokens, "threads": torch.get_num_threads()}
            for batch in batches:
                work = same_length(batch, plain.config.vocab_size, prompt, tokens)
                engines = {
                    key: Engine(model, options_for(work, kind), eos_ids=()) for key, (model, kind) in ways.items()
                }
                texts = [run_engine(engine, work) for engine in engines.values()]  # warms up, and makes the graphs
                if graphs.why_eager is not None:
                    raise NotMeasured(graphs.why_eager)
                if dtype == "float32" and min(agreement(texts[0], text) for text in texts) < 0.9:  # but for near-ties
                    raise RuntimeError(f"{name}: compiled, the engine says something else")
                taken: dict[str, list[float]] = {key: [] for key in engines}
                for _ in range(repeats):
                    for key, engine in engines.items():
                        taken[key].append(seconds(lambda: run_engine(engine, work)))  # noqa: B023
                of = {"model": name, "workload": about | {"batch": batch}}
                prefix, count = f"compile.{name}.{dtype}.batch{batch}", batch * tokens
                for key, times in taken.items():
                    rate = Timing(tuple(count / each for each in times))
                    yield figure(f"{prefix}.{key}", rate.median, "tokens/s", spread=rate.quartiles, **of)
                for slow, fast in itertools.combinations(taken, 2):
                    ratio = Timing(tuple(a / b for a, b in zip(taken[slow], taken[fast])))
                    yield figure(f"{prefix}.{fast}_over_{slow}", ratio.median, "x", spread=ratio.quartiles, **of)
            made = sum(graphs.compile_seconds.values())
            yield figure(f"compile.{name}.{dtype}.seconds", made, "s", model=name, workload=about)
    if missing:
        raise NotMeasured(f"{', '.join(missing)} not on this machine: run minillm pull {missing[0]}")


def same_length(count: int, vocab: int, prompt: int, tokens: int) -> Workload:
    generator = torch.Generator().manual_seed(0)
    return [(row, tokens) for row in torch.randint(5, vocab, (count, prompt), generator=generator).tolist()]


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"compile": bench_compile}
