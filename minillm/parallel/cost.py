"""What the all-reduces of tensor parallelism cost: bytes, and seconds from latency and bandwidth.

Chapter 18. The alpha-beta model, with the counts of Thakur, Rabenseifner and Gropp 2005 (Optimization of Collective
Communication Operations in MPICH). n bytes, p ranks; a rank sends

    ring    2 (p - 1) messages of n / p      2 (p - 1) / p * n bytes, the least that is possible
    tree    2 ceil(log2 p) messages of n     up to a root by halves and down again: fewer steps, more bytes

A message takes latency + bytes / bandwidth; a collective also takes `start` seconds before its first message. So a
small message asks for few steps, a large one for few bytes. A decode step sends 2 x layers messages of batch x hidden
numbers, a few tens of kB: it is latency that is paid. `fit_link` finds a machine's own two numbers from timings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.errors import ParamsError, illegal
from minillm.model.config import ModelConfig

ALGORITHMS = ("ring", "tree")


@dataclass(frozen=True)
class Link:
    """Between two ranks: seconds a message, bytes/s one way; seconds to start a collective. source: who says so."""

    name: str
    latency: float
    bandwidth: float
    start: float = 0.0
    source: str = ""


_NCCL = "latencies: NCCL's own cost model (tuning.cc, ring, LL protocol); bandwidth, one way: "
_NET = "the line rate"
LINKS = {
    "nvlink4": Link("NVLink 4 (H100)", 0.6e-6, 450e9, 6.6e-6, _NCCL + "half of the data sheet's 900 GB/s"),
    "nvlink3": Link("NVLink 3 (A100)", 0.6e-6, 300e9, 6.6e-6, _NCCL + "half of the data sheet's 600 GB/s"),
    "pcie5": Link("PCIe 5 x16", 1.0e-6, 64e9, 6.6e-6, _NCCL + "half of the data sheet's 128 GB/s"),
    "net400": Link("400 Gb/s network", 2.7e-6, 50e9, 6.6e-6, _NCCL + _NET),
    "net100": Link("100 Gb/s network", 2.7e-6, 12.5e9, 6.6e-6, _NCCL + _NET),
}


@dataclass(frozen=True)
class Device:
    """What one rank computes with: bytes/s of its memory, FLOP/s of its matrix products."""

    name: str
    bandwidth: float
    flops: float


H100 = Device("H100 SXM (data sheet: 3.35 TB/s, 989 TFLOP/s dense in bf16)", 3.35e12, 989e12)


def messages(ranks: int, algorithm: str = "ring") -> int:
    """Messages that follow one another in an all-reduce."""
    _check(ranks, algorithm)
    return 2 * (ranks - 1) if algorithm == "ring" else 2 * math.ceil(math.log2(ranks))


def sent_bytes(size: float, ranks: int, algorithm: str = "ring") -> float:
    """Bytes that pass the busiest rank's link, one way, in an all-reduce of `size` bytes."""
    _check(ranks, algorithm)
    return size * (2 * (ranks - 1) / ranks if algorithm == "ring" else messages(ranks, "tree"))


def allreduce_seconds(size: float, ranks: int, link: Link, algorithm: str = "best") -> float:
    """The model's time of one all-reduce. "best": whichever algorithm is faster, as NCCL chooses by size."""
    if ranks == 1:
        return 0.0
    if algorithm == "best":
        return min(allreduce_seconds(size, ranks, link, each) for each in ALGORITHMS)
    return (
        link.start + messages(ranks, algorithm) * link.latency + sent_bytes(size, ranks, algorithm) / link.bandwidth
    )


def layer_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Bytes that one layer's two all-reduces add up: 2 x tokens x hidden numbers, whatever the number of ranks."""
    return 2 * tokens * config.hidden_size * itemsize


def layer_comm_seconds(config: ModelConfig, tokens: int, ranks: int, link: Link, itemsize: int = 2) -> float:
    return 2 * allreduce_seconds(tokens * config.hidden_size * itemsize, ranks, link)


def layer_compute_seconds(config: ModelConfig, tokens: int, ranks: int, device: Device, itemsize: int = 2) -> float:
    """One layer's matrices on one rank: bound by reading them or by multiplying. Without attention over the cache."""
    heads, kv_heads = config.num_heads // ranks, max(1, config.num_kv_heads // ranks)
    attention = (2 * heads + 2 * kv_heads) * config.head_dim * config.hidden_size
    mlp = (3 if config.gated_mlp else 2) * config.intermediate_size // ranks * config.hidden_size
    weights = attention + mlp
    return max(weights * itemsize / device.bandwidth, 2 * tokens * weights / device.flops)


def comm_share(config: ModelConfig, tokens: int, ranks: int, link: Link, device: Device = H100) -> float:
    """Part of a layer's time that is communication, 0 to 1: nothing overlaps, each needs the other's result."""
    sending = layer_comm_seconds(config, tokens, ranks, link)
    return sending / (sending + layer_compute_seconds(config, tokens, ranks, device))


def fit_link(sizes: Sequence[float], seconds: Sequence[float], ranks: int, name: str = "measured") -> Link:
    """Latency and bandwidth of a ring from timed all-reduces of several sizes: seconds ~ a + b x bytes.

    Weighted so that every point counts by its relative error: the small messages are not drowned by the large.
    """
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(sizes) < 2 or len(sizes) != len(seconds) or np.ptp(sizes) == 0 or (seconds <= 0).any():
        raise ParamsError("fit_link needs at least two sizes and a time above 0 for each")
    _check(ranks, "ring")
    if ranks == 1:
        raise ParamsError(illegal("ranks", ranks, "must be at least 2: one rank sends nothing"))
    table = np.stack((np.ones_like(sizes), sizes), 1) / seconds[:, None]
    a, b = np.linalg.lstsq(table, np.ones_like(sizes), rcond=None)[0]
    a, b = max(a, 1e-9), max(b, 1e-15)
    return Link(name, float(a / messages(ranks)), float(sent_bytes(1.0, ranks) / b), source="fitted")


def _check(ranks: int, algorithm: str) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ParamsError(illegal("ranks", ranks, "must be a whole number of at least 1"))
    if algorithm not in ALGORITHMS:
        raise ParamsError(illegal("algorithm", algorithm, f"must be one of {', '.join(ALGORITHMS)}"))
