"""A decode step through a cache of fewer bits, beside the same step through a cache of the model's own type.

`minillm bench kv-cache`, chapter 14. Values come first: the logits of the step against the float cache's. Then bytes
of a cache of this length over the float cache's, and the speed, in alternation. This cache dequantises what it reads,
so it is memory that it saves; the ratio says what that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import decode, prefill
from minillm.cache.kv_format import FORMATS
from minillm.cache.quantized import QuantizedCache, quantized_bytes
from minillm.measure.bench import NotMeasured
from minillm.measure.clock import paired
from minillm.measure.records import Figure, figure
from minillm.model.hub import is_available
from minillm.model.layout import pack_linears
from minillm.model.weights import load_model

LARGEST_ERROR = {"int8": 0.05, "fp8": 0.2, "int4": 0.25, "int2": 1.0}  # of the logits, root mean square


def bench_kv_cache(
    model: str = "smollm2-135m", prompt: int = 1024, batch: int = 1, repeats: int = 5, smoke: bool = False
) -> Iterator[Figure]:
    """Figures kv_cache.NAME.speedup (over the float cache), .bytes (as a part of the float cache's), .error.
    smoke: the shipped model, a short prompt."""
    if smoke:
        model, prompt, repeats = "tiny", 200, 1
    if not is_available(model):
        raise NotMeasured(f"{model} is not on this machine: run minillm pull {model}")
    ours = pack_linears(load_model(model))
    config, room = ours.config, prompt + 8
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, config.vocab_size, (batch, prompt), generator=generator).to(ours.device)

    def step(cache):
        token = prefill(ours, ids, cache).argmax(-1)  # [batch]

        def run() -> torch.Tensor:
            cache.truncate(prompt)
            return decode(ours, token, cache)

        return run

    plain = ContiguousCache(config, batch, room, ours.dtype, ours.device)
    base = step(plain)
    for name, form in FORMATS.items():
        cache = QuantizedCache(config, batch, room, form, ours.dtype, ours.device)
        if cache.nbytes != (formula := quantized_bytes(config, batch, room, form, ours.dtype)):
            raise RuntimeError(f"{name}: the cache takes {cache.nbytes} bytes, the formula says {formula}")
        run = step(cache)
        before, after = base().float(), run().float()
        error = ((after - before).square().mean() / before.square().mean()).sqrt().item()
        if not error <= LARGEST_ERROR[name]:
            raise RuntimeError(f"{name}: logits are {error:.1%} off the float cache's")
        timing = paired(lambda: base().argmax().item(), lambda: run().argmax().item(), repeats, warmup=1)  # noqa: B023
        workload = {"prompt": prompt, "batch": batch, "threads": torch.get_num_threads()}

        def row(what, value, unit, spread=None, name=name, workload=workload):
            return figure(f"kv_cache.{name}.{what}", value, unit, spread=spread, model=model, workload=workload)

        yield row("speedup", timing.ratio.median, "x", timing.ratio.quartiles)
        yield row("bytes", cache.nbytes / plain.nbytes, "1")
        yield row("error", error, "1")


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"kv-cache": bench_kv_cache}
