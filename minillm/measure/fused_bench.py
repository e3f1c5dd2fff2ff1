"""`minillm bench fused`: each fusion against the operations it replaces, on a GPU; values first, then time.

Chapter 10. Both sides run from the same tensors, in alternation, on the GPU's own clock. Tensors are rotated so that
large ones come from memory and not from a cache. The share of the copy bandwidth counts the bytes that must move.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from minillm.kernels import fused, fused_reference
from minillm.kernels.launch import why_not
from minillm.measure import clock
from minillm.measure.bench import NotMeasured
from minillm.measure.machine import ceilings
from minillm.measure.records import Figure, figure
from minillm.model.config import ModelConfig
from minillm.model.rope import cos_sin
from minillm.model.shapes import known_shape

NAMES = {"residual + RMSNorm": "add_norm", "act(gate) * up": "gate", "RoPE + KV write": "rope"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def bench_fused(
    shape: str = "llama-3.1-8b", rows: tuple[int, ...] = (1, 64, 8192), repeats: int = 5, smoke: bool = False
) -> Iterator[Figure]:
    """Figures fused.NAME.rowsN.ratio, .bandwidth_share, and for the sampler fused.sample.rowsN.ratio.

    smoke: tiny sizes, and anywhere: values are checked through the interpreter and nothing is timed.
    """
    reason = why_not()
    if reason is not None:
        raise NotMeasured(reason)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not smoke:
        raise NotMeasured("fused kernels are timed on a GPU; there is none")
    device = torch.device("cuda" if on_gpu else "cpu")
    config = known_shape("smollm2-135m" if smoke else shape)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    roof = None if smoke else ceilings(device)
    for count in (2,) if smoke else rows:
        for counted, plain, ours in pairs(config, count, dtype, device):
            check(counted.name, plain(0), ours(0), dtype)
            name = f"fused.{NAMES[counted.name]}.rows{count}"
            about = {"rows": count, "dtype": str(dtype).removeprefix("torch."), "shape": config.hidden_size}
            yield figure(f"{name}.bytes_saved", counted.saved, "B", workload=about)
            if smoke:
                continue
            ratio, seconds = time_pair(plain, ours, repeats)
            yield figure(f"{name}.ratio", ratio.median, "x", spread=ratio.quartiles, workload=about)
            share = counted.fused_bytes / seconds / roof.copy_bandwidth
            yield figure(f"{name}.bandwidth_share", share, "1", workload=about)
    yield from sampler(config, (1,) if smoke else (1, 64), dtype, device, repeats, smoke)


def pairs(config: ModelConfig, rows: int, dtype, device) -> Iterator[tuple[fused.Traffic, Callable, Callable]]:
    """(bytes, plain(i), fused(i)) of each fusion; i picks one of several sets of tensors."""
    generator = torch.Generator(device).manual_seed(0)
    ops, twins = fused.triton_ops(), fused.torch_ops()
    sets = 1 if device.type == "cpu" else max(2, min(64, (1 << 28) // max(1, rows * config.hidden_size * 2)))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    add_norm, gate, rope = fused.traffic(config, rows, dtype.itemsize)
    weight = randn(config.hidden_size)
    inputs = [(randn(rows, config.hidden_size), randn(rows, config.hidden_size)) for _ in range(sets)]

    def norm(o: fused.Ops) -> Callable:
        return lambda i: o.add_rms_norm(*inputs[i % sets], weight, config.norm_eps)

    yield add_norm, norm(twins), norm(ops)
    gates = [randn(rows, 2 * config.intermediate_size) for _ in range(max(1, sets // 4))]
    yield gate, lambda i: twins.gated(gates[i % len(gates)]), lambda i: ops.gated(gates[i % len(gates)])
    heads, block = config.num_heads + 2 * config.num_kv_heads, 16
    inverse = 1.0 / 10000 ** (torch.arange(config.head_dim // 2, device=device) / (config.head_dim // 2))
    tables = cos_sin(torch.arange(rows, device=device), inverse)
    qkv = [randn(rows, heads, config.head_dim) for _ in range(sets)]
    stores = [randn(-(-rows // block), block, config.num_kv_heads, config.head_dim) for _ in range(2)]
    slots = torch.randperm(len(stores[0]) * block, generator=generator, device=device)[:rows]

    def turn(o: fused.Ops) -> Callable:
        return lambda i: (o.rope_and_write(qkv[i % sets], tables, *stores, slots), *stores)

    yield rope, turn(twins), turn(ops)


def sampler(config: ModelConfig, rows, dtype, device, repeats: int, smoke: bool) -> Iterator[Figure]:
    from minillm.kernels.fused_sample import sample

    for count in rows:
        logits = torch.randn(count, 1000 if smoke else config.vocab_size, device=device).to(dtype)
        seeds, steps = torch.zeros(2, count, dtype=torch.long, device=device)
        cold, warm = torch.zeros(count, device=device), torch.ones(count, device=device)
        if not torch.equal(sample(logits, cold, seeds, steps), logits.argmax(-1)):
            raise RuntimeError("the sampling kernel's greedy choice is not argmax's")
        if smoke:
            yield figure(f"fused.sample.rows{count}.launches", 1, "1")
            continue

        def plain(i: int, logits=logits, warm=warm) -> torch.Tensor:
            return fused_reference.sample(logits, warm)

        def ours(i: int, logits=logits, warm=warm, seeds=seeds, steps=steps) -> torch.Tensor:
            return sample(logits, warm, seeds, steps)

        ratio, _ = time_pair(plain, ours, repeats)
        yield figure(f"fused.sample.rows{count}.ratio", ratio.median, "x", spread=ratio.quartiles)


def check(name: str, expected, got, dtype: torch.dtype) -> None:
    """Values first: a fast wrong kernel is not a result."""
    expected, got = ((x,) if isinstance(x, torch.Tensor) else x for x in (expected, got))
    for a, b in zip(expected, got):
        error = (a.float() - b.float()).abs().max() / a.float().abs().max()
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"{name}: the fused result is {error:.1e} of its size away")


def time_pair(plain: Callable, ours: Callable, repeats: int, calls: int = 50) -> tuple[clock.Timing, float]:
    """(plain seconds / fused seconds, pair by pair; fused seconds of one call), over `calls` calls a sample."""
    turn = itertools.count()

    def many(function: Callable) -> Callable:
        def run() -> None:
            for _ in range(calls):
                function(next(turn))

        return run

    samples = []
    for _ in range(repeats + 1):
        samples.append([clock.timed(many(f), 1, 0, cuda_events=True).median / calls for f in (plain, ours)])
    samples = samples[1:]  # the first compiles
    return clock.Timing(tuple(a / b for a, b in samples)), clock.Timing(tuple(b for _, b in samples)).median


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"fused": bench_fused}
