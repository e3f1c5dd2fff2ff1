"""Measured peak memory: what a run really took, from outside and from inside.

Chapter 03. On a GPU, torch's allocator keeps the peak. On a CPU there are two honest views. From outside: the
process's resident memory at its highest (VmHWM on Linux, ru_maxrss elsewhere), less what it held before, in a fresh
process so that no earlier garbage hides the growth. From inside: `LiveBytes` adds up the tensors alive after every
operation, exact to the byte, blind to what kernels allocate for themselves. They must agree with the ledger.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.cache.contiguous import ContiguousCache
from minillm.measure.activations import Forward
from minillm.model.config import ModelConfig, RopeScaling


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside the block. `live` now, `peak` at the highest, `operation` that made it.

    Tensors that existed before (weights, a cache) are not counted, nor are views: a storage counts once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.operation = 0, 0, ""
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._note((args, kwargs), made_here=False)
        out = function(*args, **(kwargs or {}))
        self._note(out, made_here=True)
        if self.live > self.peak:
            self.peak, self.operation = self.live, str(function)
        return out

    def _note(self, tree: object, made_here: bool) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    size = storage.nbytes() if made_here else 0
                    self._known.add(key)
                    self.live += size
                    weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@dataclass(frozen=True)
class Peak:
    """Bytes above what was held before. tensors: what LiveBytes saw in a second run (None: not asked for)."""

    bytes: int
    how: str
    tensors: int | None = None


def measure_peak(function: Callable[[], object], *, tensors: bool = False) -> Peak:
    """How much more memory `function()` needs at its highest than was held before it.

    On a CPU the process must be fresh for an exact answer: memory that earlier work freed, but the allocator kept, is
    used again without growth. `measure_forward` sees to that.
    """
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        taken, how = torch.cuda.max_memory_allocated() - before, "torch.cuda.max_memory_allocated"
    else:
        _trim()
        reset = _reset_high_water()
        before = _resident() if reset else _high_water()
        function()
        taken, how = _high_water() - before, "VmHWM" if Path("/proc/self/status").exists() else "ru_maxrss"
    inside = None
    if tensors:
        with LiveBytes() as mode:
            function()
        inside = mode.peak
    return Peak(taken, how, inside)


def measure_forward(config: ModelConfig, run: Forward, dtype: str = "float32") -> dict:
    """Build a random model and its cache in a fresh process and run one forward there; bytes by part.

    Returns weights_and_kv, activations (over weights and KV), total, tensors (LiveBytes' view of activations), how;
    and scratch, what the matrix library took for itself before (in none of the others).
    On CUDA the same figures come from the allocator.
    """
    job = json.dumps({"config": asdict(config), "run": asdict(run), "dtype": dtype})
    # The process must return what it frees: glibc keeps freed blocks under a threshold that grows, unless it is fixed
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
    command = [sys.executable, "-m", "minillm.measure.peak"]
    done = subprocess.run(command, input=job, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the measuring process failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def _job(config: ModelConfig, run: Forward, dtype: torch.dtype) -> dict:
    """What the fresh process does."""
    from minillm.model.weights import random_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    warm = config.with_changes(vocab_size=64, num_layers=1, windows=config.windows[:1])
    _forward(random_model(warm, dtype, device), _cache(warm, run, dtype, device), Forward(run.batch, 1))
    scratch = _warm_products(config, run, dtype, device)
    made: list = []

    def build() -> None:
        made.extend((random_model(config, dtype, device), _cache(config, run, dtype, device)))

    standing = measure_peak(build)
    model, cache = made
    peak = measure_peak(lambda: _forward(model, cache, run))
    cache.truncate(run.context)
    with LiveBytes() as mode:
        _forward(model, cache, run)
    return {
        "weights_and_kv": standing.bytes,
        "activations": peak.bytes,
        "total": standing.bytes + peak.bytes,
        "tensors": mode.peak,
        "operation": mode.operation,
        "scratch": scratch,
        "how": peak.how,
    }


def _warm_products(config: ModelConfig, run: Forward, dtype: torch.dtype, device: torch.device) -> int:
    """Make the matrix library take its scratch (packed operands, a few MB a thread), which it keeps; its bytes.

    It belongs to the process, not to the model: taken at the first large product and used by all later ones.
    """
    shapes = [(run.tokens, config.hidden_size), (min(config.vocab_size, 8192), config.hidden_size)]
    known = sum(rows * columns for rows, columns in [*shapes, (shapes[0][0], shapes[1][0])]) * dtype.itemsize

    def product() -> None:
        x, w = (torch.ones(shape, dtype=dtype, device=device) for shape in shapes)
        torch.nn.functional.linear(x, w)  # [tokens, 8192]

    return max(0, measure_peak(product).bytes - known)


def _cache(config: ModelConfig, run: Forward, dtype: torch.dtype, device: torch.device) -> ContiguousCache:
    padding = torch.arange(run.batch, device=device) if run.padded else None
    cache = ContiguousCache(config, run.batch, run.length, dtype, device, padding)
    for store in (cache.k, cache.v):
        store.normal_()  # memory is only taken when written
    cache.lengths = [run.context] * config.num_layers
    return cache


@torch.inference_mode()
def _forward(model, cache: ContiguousCache, run: Forward) -> None:
    tokens = torch.zeros(run.batch, run.new, dtype=torch.int64, device=model.device)
    hidden = model.hidden(tokens, cache=cache)
    if run.scored:
        model.logits(hidden[:, -run.scored :] if run.scored < run.new else hidden)


def _config(row: dict) -> ModelConfig:
    """A ModelConfig back from asdict and JSON, which know no tuples."""
    row = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return ModelConfig(**{**row, "rope_scaling": RopeScaling(**row["rope_scaling"])})


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _resident() -> int:
    return _status("VmRSS")


def _high_water() -> int:
    """The most this process ever held resident, in bytes."""
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _reset_high_water() -> bool:
    """Linux lets a process set its high-water mark back to what it holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _trim() -> None:
    """Give freed memory back to the system, where the C library can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


if __name__ == "__main__":
    job = json.load(sys.stdin)
    print(json.dumps(_job(_config(job["config"]), Forward(**job["run"]), getattr(torch, job["dtype"]))))
