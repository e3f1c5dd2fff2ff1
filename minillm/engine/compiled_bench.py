"""`minillm bench compile`: the engine with compiled decode steps against the same engine without, on a CPU.

Chapter 10. Both hold packed weights and answer the same requests, in alternation; their tokens are compared first.
Making the graphs is timed apart: it is paid once, and these seconds stand beside what they buy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch

from minillm.cache.paged_kernel import compiled_attention
from minillm.engine.bench import Workload, options_for, run_engine
from minillm.engine.engine import Engine
from minillm.kernels.linear_cpu import tile_linears
from minillm.measure.bench import NotMeasured
from minillm.measure.clock import paired
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
    """compile.MODEL.DTYPE.batchN.rate, .uncompiled (output tokens/s), .ratio, and .seconds of making all graphs."""
    missing = [name for name in models if not is_available(name)]
    for name in models:
        if name in missing:
            continue
        for dtype in dtypes:
            plain = load_model(name, dtype=dtype, device="cpu")
            compiled = CompiledDecoder(copy.deepcopy(plain), pack=tile_linears)
            if compiled.why_eager is not None:
                raise NotMeasured(compiled.why_eager)
            pack_linears(plain)
            about = {"dtype": dtype, "prompt": prompt, "tokens": tokens, "threads": torch.get_num_threads()}
            for batch in batches:
                work = same_length(batch, plain.config.vocab_size, prompt, tokens)
                attention = compiled_attention(plain.device, plain.dtype)
                pairs = ((plain, options_for(work)), (compiled, options_for(work, attention)))
                engines = [Engine(model, options, eos_ids=()) for model, options in pairs]
                texts = [run_engine(engine, work) for engine in engines]  # warms up, and makes the graphs
                if compiled.why_eager is not None:
                    raise NotMeasured(compiled.why_eager)
                if dtype == "float32" and agreement(*texts) < 0.9:  # in float32 only near-ties may differ
                    raise RuntimeError(f"{name}: compiled, the engine says something else")
                runs = (lambda engine=engine, work=work: run_engine(engine, work) for engine in engines)
                timing = paired(*runs, repeats, warmup=1)
                prefix, workload = f"compile.{name}.{dtype}.batch{batch}", about | {"batch": batch}
                count = batch * tokens
                for key, taken in (("uncompiled", timing.a), ("rate", timing.b)):
                    yield figure(f"{prefix}.{key}", count / taken.median, "tokens/s", model=name, workload=workload)
                ratio = timing.ratio
                yield figure(
                    f"{prefix}.ratio", ratio.median, "x", spread=ratio.quartiles, model=name, workload=workload
                )
            made = sum(compiled.compile_seconds.values())
            yield figure(f"compile.{name}.{dtype}.seconds", made, "s", model=name, workload=about)
    if missing:
        raise NotMeasured(f"{', '.join(missing)} not on this machine: run minillm pull {missing[0]}")


def same_length(count: int, vocab: int, prompt: int, tokens: int) -> Workload:
    generator = torch.Generator().manual_seed(0)
    return [(row, tokens) for row in torch.randint(5, vocab, (count, prompt), generator=generator).tolist()]


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"compile": bench_compile}
