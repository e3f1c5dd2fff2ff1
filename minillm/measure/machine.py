"""The ceilings of this machine, measured: bytes per second that can be read, FLOPs per second of a matrix product.

Chapter 00. A data sheet says what the hardware could do; what a kernel can be blamed for is what this machine does
for the easiest code. So: read a buffer far larger than the cache with several kernels and keep the best; multiply
large matrices and keep the best. Nothing is timed on zeros, and every figure names its thread count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.measure import clock, records
from minillm.model.weights import as_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Ceilings:
    """Bytes/s and FLOP/s. read_kernels: bytes/s of each kernel tried; the ceiling is the best of them.

    copy_bandwidth counts the bytes read and the bytes written. matmul: FLOP/s by dtype name; a dtype is missing where
    the machine cannot multiply in it.
    """

    device: str
    threads: int
    read_bandwidth: float
    copy_bandwidth: float
    matmul: dict[str, float]
    read_kernels: dict[str, float] = field(default_factory=dict)
    load: float = 0.0  # processes that wanted a CPU during the last minute, as the system counts them

    @property
    def busy(self) -> bool:
        """Whether others were using the CPUs: the ceilings are then too low, and shares of them too high."""
        return self.load > (os.cpu_count() or 1) + 1

    def peak(self, dtype: str | torch.dtype) -> float:
        name = str(dtype).removeprefix("torch.")
        if name not in self.matmul:
            raise ValueError(f"no matmul ceiling was measured for {name}; measured: {', '.join(self.matmul)}")
        return self.matmul[name]

    def __str__(self) -> str:
        flops = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in self.matmul.items())
        return (
            f"{self.device} ({self.threads} CPU threads): read {self.read_bandwidth / 1e9:.1f} GB/s, "
            f"copy {self.copy_bandwidth / 1e9:.1f} GB/s, matmul {flops}"
            + (f"; measured on a busy machine (load {self.load:.1f}): too low" if self.busy else "")
        )


def ceilings(device: str | torch.device | None = None, *, fast: bool = False, again: bool = False) -> Ceilings:
    """Measure, once a process and thread count. device: a GPU if there is one. fast: smaller buffers, less repeats.

    again: measure anew, as when the machine was busy the first time.
    """
    device = as_device(device)
    if again:
        _measured.cache_clear()
    return _measured(device, fast, torch.get_num_threads())


@lru_cache(maxsize=8)
def _measured(device: torch.device, fast: bool, threads: int) -> Ceilings:
    budget = 0.02 if fast else 0.1  # seconds for each kernel
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else records.processor_name()
    with torch.inference_mode():
        reads = read_bandwidths(buffer(device, fast), budget)
        copy = copy_bandwidth(buffer(device, fast), budget)
        flops = {
            name: matmul_flops(dtype, device, budget) for name, dtype in DTYPES.items() if _wanted(dtype, device)
        }
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Ceilings(name, threads, max(reads.values()), copy, flops, reads, load)


def _wanted(dtype: torch.dtype, device: torch.device) -> bool:
    """float16 is a GPU's type; on CPUs it is mostly emulated."""
    return device.type == "cuda" or dtype != torch.float16


def buffer(device: torch.device, fast: bool = False) -> Tensor:
    """[rows, 1024] float32 of random numbers, several times a last-level cache: 256 MiB on a CPU, 2 GiB on a GPU."""
    mib = (96 if fast else 256) if device.type == "cpu" else (256 if fast else 2048)
    tile = torch.randn(1024, 1024, device=device)  # 4 MiB, repeated: filling 256 MiB with randn would take longest
    return tile.repeat(mib // 4, 1)


def read_bandwidths(x: Tensor, budget: float) -> dict[str, float]:
    """Bytes/s of kernels that read every element of x [rows, columns] once and write next to nothing."""
    vector = torch.randn(x.shape[1], device=x.device)
    flat = x.view(-1)
    half = flat.numel() // 2
    kernels: dict[str, Callable[[], object]] = {
        "sum": lambda: flat.sum(),
        "max": lambda: flat.amax(),
        "row sums": lambda: x.sum(1),
        "dot": lambda: torch.dot(flat[:half], flat[half:]),
        "matrix-vector": lambda: x @ vector,
    }
    return {name: x.nbytes / best_seconds(kernel, budget, x.device) for name, kernel in kernels.items()}


def copy_bandwidth(x: Tensor, budget: float) -> float:
    """Bytes/s read and written together by x -> y."""
    y = torch.empty_like(x)
    return 2 * x.nbytes / best_seconds(lambda: y.copy_(x), budget, x.device)


def matmul_flops(dtype: torch.dtype, device: torch.device, budget: float) -> float:
    """Best FLOP/s over square products of growing size, written x @ w and as a linear layer's x @ w.T.

    Sizes double until one product would take half a second, and the slow form is dropped: some CPUs emulate one of
    them in 16 bits a hundred times slower than the other. float32 always gets to 1024, however busy the machine is.
    """
    best, size, largest = 0.0, 256, 2048 if device.type == "cpu" else 8192
    forms: dict[str, Callable] = {"x @ w.T": F.linear, "x @ w": torch.matmul}
    while size <= largest and forms:
        x = torch.randn(size, size, device=device).to(dtype)
        w = torch.randn(size, size, device=device).to(dtype)
        seconds = {name: best_seconds(lambda f=f, x=x, w=w: f(x, w), budget / 2, device) for name, f in forms.items()}
        best = max(best, *(2 * size**3 / s for s in seconds.values()))
        limit = min(4 * min(seconds.values()), 0.5 / 8)  # the next size is 8 times the work
        if dtype != torch.float32 or size >= 1024:
            forms = {name: f for name, f in forms.items() if seconds[name] <= limit}
        size *= 2
    return best


def best_seconds(function: Callable[[], object], budget: float, device: torch.device) -> float:
    """Fastest of as many calls as fit the budget, and of 2 at the least.

    The fastest, not the median: noise only ever slows a kernel, and a ceiling is what was reached.
    """
    function()  # pays for page faults and kernel selection
    start, found = time.perf_counter(), []
    while len(found) < 2 or (time.perf_counter() - start < budget and len(found) < 100):
        found.append(clock.timed(function, 1, 0, cuda_events=device.type == "cuda").median)
    return min(found)
