"""`minillm bench tensor-parallel`: what ranks cost each other on this machine, and what they save.

Chapter 18. `probe` runs on every rank of one launch and measures three things: all-reduces by size; one decode step
of a model cut over the ranks beside the same step on one rank, in alternation, with the seconds spent in collectives
(waiting for a slower peer is communication, too); and the memory that loading a slice takes, beside the formula.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from minillm.measure import clock
from minillm.measure.records import Figure, figure
from minillm.model.checkpoint import open_checkpoint
from minillm.model.config import ModelConfig
from minillm.model.export import export
from minillm.model.weights import random_model
from minillm.parallel.cost import allreduce_seconds, fit_link
from minillm.parallel.groups import Done, all_reduce, broadcast
from minillm.parallel.launch import World, run_processes
from minillm.parallel.tensor import wire
from minillm.parallel.weights import load_shard, random_shard, shard_bytes


class TimedGroup:
    """A process group that adds up the seconds of its collectives."""

    def __init__(self, group) -> None:
        self.group, self.seconds = group, 0.0
        self.rank, self.size = group.rank, group.size

    def allreduce(self, tensors) -> Done:
        return self._timed(lambda: self.group.allreduce(tensors))

    def allgather(self, outputs, tensors) -> Done:
        return self._timed(lambda: self.group.allgather(outputs, tensors))

    def _timed(self, start: Callable) -> Done:
        clock.synchronize()
        began = time.perf_counter()
        start().wait()
        clock.synchronize()
        self.seconds += time.perf_counter() - began
        return Done()


def llama_like(hidden: int, layers: int = 2) -> ModelConfig:
    """A small Llama: heads of 32, a quarter as many KV heads, an MLP of 8/3 the width rounded to 64."""
    heads = hidden // 32
    mlp = round(hidden / 24) * 64
    return ModelConfig(2048, hidden, mlp, layers, heads, max(4, heads // 4), 32, 512, tie_embeddings=True)


def probe(
    world: World, sizes: Sequence[int], steps: Sequence[tuple[int, int]], folder: str | None, repeats: int
) -> dict:
    """allreduce: {bytes: seconds}; steps: {(hidden, batch): {"alone", "cut", "comm"}}; memory: (bytes, formula)."""
    found: dict = {"allreduce": {}, "steps": {}}
    if folder is not None:  # first, while the process is fresh: freed memory would be used again unseen
        config = open_checkpoint(Path(folder)).config
        taken = anonymous_peak(lambda: load_shard(folder, world.group, "float32", world.device))
        found["memory"] = (taken, shard_bytes(config, world.size, 4, world.rank))
    with torch.inference_mode():
        for size in sizes:
            found["allreduce"][size] = allreduce_median(world, size, repeats)
        for hidden, batch in steps:
            found["steps"][hidden, batch] = step_times(world, hidden, batch, repeats)
    return found


def meet(world: World) -> None:
    broadcast(torch.zeros(1), world.control)


def allreduce_median(world: World, size: int, repeats: int) -> float:
    x = torch.randn(max(1, size // 4), device=world.device)
    for _ in range(3):
        all_reduce(x, world.group)
    seconds = []
    for _ in range(max(5, repeats) * (4 if size < 1 << 20 else 1)):  # small ones are quick, and noisy
        meet(world)
        seconds.append(clock.seconds(lambda: all_reduce(x, world.group)))
    return clock.Timing(tuple(seconds)).median


def step_times(world: World, hidden: int, batch: int, repeats: int) -> dict[str, float]:
    """Medians of paired runs. alone: the whole model on one rank, the others idle. comm: of `cut`, in collectives."""
    config, device = llama_like(hidden), world.device
    group = TimedGroup(world.group)
    part = wire(random_shard(config, world.rank, world.size, torch.float32, device), group)
    whole = random_model(config, torch.float32, device) if world.rank == 0 else None
    tokens = torch.arange(batch, device=device).unsqueeze(-1)  # [batch, 1]
    alone, cut, comm = [], [], []
    for round_ in range(repeats + 1):
        meet(world)
        if whole is not None:
            expected = whole(tokens)
            alone.append(clock.seconds(lambda: whole(tokens)))
        meet(world)
        group.seconds = 0.0
        cut.append(clock.seconds(lambda: part(tokens)))
        comm.append(group.seconds)
        if whole is not None and round_ == 0:  # values before times
            error = (part_logits := part(tokens)).sub(expected).abs().max() / expected.abs().max()
            if not error < 1e-4 or part_logits.shape != expected.shape:
                raise RuntimeError(f"{world.size} ranks give other logits: {error:.1e}")
        elif round_ == 0:
            part(tokens)
    named = {"alone": alone, "cut": cut, "comm": comm}
    return {name: clock.Timing(tuple(times[1:])).median for name, times in named.items() if len(times) > 1}


def anonymous_peak(function: Callable[[], object]) -> int:
    """Growth of this process's own memory (RssAnon: without pages of mapped files) to its highest, sampled; the
    result is kept until then. 0 where the system does not tell."""
    before, highest, over = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            highest[0] = max(highest[0], anonymous() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    result = function()
    highest[0] = max(highest[0], anonymous() - before)
    over.set()
    watcher.join()
    del result
    return highest[0]


def anonymous() -> int:
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else 0


def example_folder(folder: str | Path, hidden: int = 1024) -> ModelConfig:
    """A random Llama saved as safetensors, for measuring what loading takes."""
    config = llama_like(hidden)
    export(random_model(config, torch.float32, torch.device("cpu")), Path(folder))
    return config


def measure(ranks: int, sizes, steps, hidden: int | None, repeats: int, device: str = "cpu") -> list[dict]:
    """One launch: `probe` on every rank. hidden: of the model whose loading is measured; None: skip it."""
    with tempfile.TemporaryDirectory() as folder:
        if hidden is not None:
            example_folder(folder, hidden)
        job = (tuple(sizes), tuple(steps), folder if hidden is not None else None, repeats)
        return run_processes(probe, ranks, *job, device=device, threads=1 if device == "cpu" else None)


def bench_tensor_parallel(repeats: int = 5, smoke: bool = False) -> Iterator[Figure]:
    """tensor_parallel.allreduce.*: seconds by size, fitted latency and bandwidth, model error; .step.*: share of a
    decode step in communication, time on one rank over time on two; .memory: loaded bytes over the formula."""
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    sizes = [4096, 1 << 20] if smoke else [1 << k for k in range(10, 25, 2)]
    steps = [(256, 1)] if smoke else [(256, 1), (256, 16), (1024, 1), (1024, 16)]
    results = measure(2, sizes, steps, 256 if smoke else 1024, 2 if smoke else max(5, repeats), device)
    about, first = {"ranks": 2, "device": device}, results[0]
    times = first["allreduce"]
    for size, seconds in times.items():
        yield figure(f"tensor_parallel.allreduce.{size}", seconds, "s", workload=about)
    link = fit_link(list(times), list(times.values()), 2)
    yield figure("tensor_parallel.link.latency", link.latency, "s", workload=about)
    yield figure("tensor_parallel.link.bandwidth", link.bandwidth, "B/s", workload=about)
    off = max(abs(allreduce_seconds(size, 2, link, "ring") / seconds - 1) for size, seconds in times.items())
    yield figure("tensor_parallel.link.model_error", off, "1", workload=about)
    for (hidden, batch), row in first["steps"].items():
        prefix, work = f"tensor_parallel.step.hidden{hidden}.batch{batch}", about | {"hidden": hidden, "batch": batch}
        yield figure(f"{prefix}.comm_share", row["comm"] / row["cut"], "1", workload=work)
        yield figure(f"{prefix}.speedup", row["alone"] / row["cut"], "x", workload=work)
    taken, formula = max(result["memory"] for result in results[1:])  # rank 0 is this process, and not fresh
    if taken:
        yield figure("tensor_parallel.memory", taken / formula, "1", workload=about)


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"tensor-parallel": bench_tensor_parallel}
