"""The memory ledger: weights + KV + activations + buffers, for any model, precision, batch and context.

Chapter 03. Four lines decide what fits on a card. Weights are fixed. KV grows with batch x context and is what fills
the card when serving. Activations grow with the tokens of one forward, so a prefill chunk bounds them. Buffers are
small. GQA: Ainslie et al. 2023 (arXiv:2305.13245); MLA: DeepSeek-V2, 2024 (arXiv:2405.04434).

1 GB is 10^9 bytes, 1 GiB is 2^30 (7 % more). Sellers' "24 GB" is 24 GiB, less what the driver keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from minillm.errors import illegal
from minillm.measure import activations, counts
from minillm.measure.activations import Forward
from minillm.measure.counts import whole
from minillm.model.config import ModelConfig

GB, GiB, MiB = 10**9, 2**30, 2**20


@dataclass(frozen=True)
class Card:
    """A GPU. bytes: its total memory as nvidia-smi reports it with nothing running."""

    name: str
    sold_as: str
    bytes: int


CARDS = {
    8: Card("GeForce RTX 4060", "8 GB", 8188 * MiB),
    24: Card("GeForce RTX 4090", "24 GB", 24564 * MiB),
    40: Card("A100 SXM4 40GB", "40 GB", 40960 * MiB),
    80: Card("H100 SXM5 80GB", "80 GB", 81559 * MiB),
    141: Card("H200 SXM", "141 GB", 143771 * MiB),
}


@dataclass(frozen=True)
class Precision:
    """How numbers are stored, in bits.

    weights: of the layers' linears; embedding, norms and head stay at `compute`, as most quantised checkpoints have
    it. group: weights that share one 16-bit scale (None: one row does); zero_points adds as many bits again a group.
    kv: of keys and values; under 16 bits each head's vector of a token carries a 16-bit scale. compute: activations.
    """

    weights: int = 16
    group: int | None = None
    zero_points: bool = False
    kv: int = 16
    compute: int = 16

    def __post_init__(self) -> None:
        for name in ("weights", "kv", "compute"):
            if getattr(self, name) not in (32, 16, 8, 4, 3, 2):
                raise ValueError(f"{name}={getattr(self, name)!r} bits: must be one of 32, 16, 8, 4, 3, 2")
        if self.group is not None:
            whole("group", self.group, 1)


PRECISIONS = {
    "fp32": Precision(32, kv=32, compute=32),
    "fp16": Precision(),
    "int8": Precision(8),
    "int4-g128": Precision(4, 128),
    "int4-g32": Precision(4, 32),
    "int4-g128, kv int8": Precision(4, 128, kv=8),
}


def weight_bytes(config: ModelConfig, precision: Precision = PRECISIONS["fp16"]) -> int:
    """All weights at rest. Below `compute` bits: the linears' values, and one scale (and zero point) a group."""
    parts = counts.parameters(config)
    total = counts.parameter_count(config)
    if precision.weights >= 16:
        return total * precision.weights // 8
    linears = parts["qkv"] + parts["out"] + parts["mlp"]
    if precision.group is None:
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim + 2 * config.hidden_size
        groups = config.num_layers * (rows + config.intermediate_size * (2 if config.gated_mlp else 1))
    else:
        groups = math.ceil(linears / precision.group)
    overhead = groups * 16 * (2 if precision.zero_points else 1)
    return ((total - linears) * precision.compute + linears * precision.weights + overhead) // 8


def kv_bytes(config: ModelConfig, batch: int, length: int, bits: int = 16) -> int:
    """2 x batch x layers x kv_heads x head_dim x length x bytes, and the scales of a quantised cache."""
    whole("batch", batch)
    whole("length", length)
    whole("bits", bits, 1)
    vectors = 2 * batch * config.num_layers * config.num_kv_heads * length
    return vectors * (config.head_dim * bits + (16 if bits < 16 else 0)) // 8


def kv_per_token(
    layers: int, heads: int, head_dim: int, kv_heads: int, *, latent: int = 512, rope_dim: int = 64, bits: int = 16
) -> dict[str, int]:
    """Bytes of KV a token under four ways to share it. MLA keeps one latent and one rotary key for all heads."""
    per_head = 2 * layers * head_dim * bits // 8
    return {
        "MHA": heads * per_head,
        "GQA": kv_heads * per_head,
        "MQA": per_head,
        "MLA": layers * (latent + rope_dim) * bits // 8,
    }


@dataclass(frozen=True)
class Ledger:
    """Bytes at the peak of one forward. phase: the moment at which activations are largest."""

    weights: int
    kv: int
    activations: int
    buffers: int
    phase: str

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.buffers

    def rows(self) -> dict[str, int]:
        return {"weights": self.weights, "KV": self.kv, "activations": self.activations, "buffers": self.buffers}


def forward_ledger(
    config: ModelConfig, run: Forward, precision: Precision = PRECISIONS["fp16"], kv_length: int | None = None
) -> Ledger:
    """The ledger of one forward. kv_length: tokens a sequence the cache has room for (None: as many as stored)."""
    compute = precision.compute // 8
    phase, working = activations.peak_phase(config, run, compute)
    return Ledger(
        weights=weight_bytes(config, precision),
        kv=kv_bytes(config, run.batch, run.length if kv_length is None else kv_length, precision.kv),
        activations=working,
        buffers=activations.buffer_bytes(config, run, phase),
        phase=phase,
    )


def ledger(
    config: ModelConfig,
    batch: int,
    context: int,
    precision: Precision = PRECISIONS["fp16"],
    *,
    prefill_chunk: int | None = 2048,
    attention: str = "flash",
) -> Ledger:
    """The peak while `batch` requests reach `context` tokens each: in the last prefill or in a decode step.

    prefill_chunk: tokens of prompt that one forward takes, of one request at a time, as an engine with chunked
    prefill does; None: all prompts whole and together, as a static batch does.
    """
    if prefill_chunk is None:
        prefill = Forward(batch, context, attention=attention)
    else:
        new = min(prefill_chunk, context)
        prefill = Forward(1, new, context - new, attention=attention)
    decode = Forward(batch, 1, context - 1, attention=attention)
    kv = kv_bytes(config, batch, context, precision.kv)
    found = [forward_ledger(config, run, precision) for run in (prefill, decode)]
    worst = max(found, key=lambda entry: entry.activations + entry.buffers)
    return Ledger(worst.weights, kv, worst.activations, worst.buffers, worst.phase)


def fits(config: ModelConfig, memory: int, batch: int, context: int, *, utilization: float = 0.9, **options) -> bool:
    """Whether the ledger stays within `utilization` of `memory` bytes. options: those of `ledger`.

    The rest is left to the CUDA context, the libraries' workspaces and fragmentation; 0.9 is vLLM's default too.
    """
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization={utilization!r} must be above 0 and at most 1")
    if not isinstance(memory, Real) or not 0 <= memory < math.inf:
        raise ValueError(illegal("memory", memory, "must be a number of bytes"))
    return ledger(config, batch, context, **options).total <= memory * utilization


def largest_batch(config: ModelConfig, memory: int, context: int, **options) -> int:
    """Most requests of `context` tokens that fit at once; 0: not even one. options: those of `fits`."""
    return _largest(lambda batch: fits(config, memory, batch, context, **options))


def largest_context(config: ModelConfig, memory: int, batch: int = 1, **options) -> int:
    """Most tokens that each of `batch` requests can have, by memory alone: the trained length may be shorter."""
    return _largest(lambda context: fits(config, memory, batch, context, **options))


def _largest(fit: Callable[[int], bool], limit: int = 2**30) -> int:
    """The largest n with fit(n), for a fit that holds up to some n and never after."""
    low, high = 0, 1
    while high < limit and fit(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low
