"""What one forward pass must do, by formula: FLOPs, parameters, and the bytes that must move.

Chapter 00. A matrix product of [n, k] with [k, m] is 2 n k m FLOPs (a multiply and an add each). So a forward costs
about 2 x parameters FLOPs per token plus the attention, which grows with the context; and whatever the batch, each
weight is read once. Norms, rotations, softmax and activations are left out: under 1 % of the FLOPs at real sizes.

Bytes are the least any implementation must move: weights once, keys and values once. Activations are left out, since
fused and cache-sized they need not reach memory; a measured time that implies fewer bytes than this is a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

from minillm.errors import illegal
from minillm.model.config import ModelConfig

PARTS = ("embedding", "qkv", "attention", "out", "mlp", "norms", "head")


def whole(name: str, value: object, least: int = 0, most: float = math.inf) -> None:
    """Raise unless value is a whole number (Python's or NumPy's) from least to most."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= value <= most:
        upper = "" if most == math.inf else f" and at most {most}"
        raise ValueError(illegal(name, value, f"must be a whole number of at least {least}{upper}"))


def parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part. The sum is the model's; a tied head has none of its own."""
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    mlp_rows = config.intermediate_size * (2 if config.gated_mlp else 1)
    norm = 2 if config.norm_kind == "layer" else 1  # weight, and for LayerNorm a bias
    norms_per_layer = norm * hidden * (4 if config.post_norms else 2)
    if config.qk_norm:
        norms_per_layer += 2 * norm * config.head_dim
    per_layer = {
        "qkv": qkv_rows * (hidden + config.qkv_bias),
        "out": hidden * (width + config.out_bias),
        "mlp": mlp_rows * (hidden + config.mlp_bias) + hidden * (config.intermediate_size + config.mlp_bias),
        "norms": norms_per_layer,
    }
    found = {name: config.num_layers * count for name, count in per_layer.items()}
    learned = config.max_length if config.positions == "learned" else 0
    found["embedding"] = (config.vocab_size + learned) * hidden
    found["norms"] += norm * hidden
    found["head"] = 0 if config.tie_embeddings else config.vocab_size * hidden
    return {name: found.get(name, 0) for name in PARTS}


def parameter_count(config: ModelConfig) -> int:
    return sum(parameters(config).values())


@dataclass(frozen=True)
class Counts:
    """One forward of `batch` sequences, each with `context` tokens stored and `new_tokens` more.

    flops: by part. weight_bytes: read, by part. kv_read, kv_written: bytes of keys and values.
    """

    batch: int
    new_tokens: int
    context: int
    flops: dict[str, int]
    weight_bytes: dict[str, int]
    kv_read: int
    kv_written: int

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def total_weight_bytes(self) -> int:
        return sum(self.weight_bytes.values())

    @property
    def total_bytes(self) -> int:
        return self.total_weight_bytes + self.kv_read + self.kv_written

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved. Under the machine's ridge point, memory is what limits."""
        return self.total_flops / self.total_bytes

    @property
    def tokens(self) -> int:
        return self.batch * self.new_tokens


def forward_counts(
    config: ModelConfig,
    new_tokens: int,
    context: int = 0,
    batch: int = 1,
    *,
    dtype_bytes: float = 4,
    kv_bytes: float | None = None,
    causal: bool = True,
    scored: int | None = None,
) -> Counts:
    """Count one forward. Prefill of n tokens: new_tokens=n. One decode step: new_tokens=1, context=tokens stored.

    causal: True counts the query-key pairs the mask lets through, what a kernel that skips masked blocks does; False
    counts the whole [new, length] rectangle, what a kernel that masks after multiplying does and what torch's counter
    reports. scored: tokens a sequence that pass the head (None: all; prefill that wants only the next token: 1).
    dtype_bytes, kv_bytes: bytes an element of weights and of the cache (None: as the weights).
    """
    scored = new_tokens if scored is None else scored
    kv_bytes = dtype_bytes if kv_bytes is None else kv_bytes
    for name, value, least in (("new_tokens", new_tokens, 1), ("context", context, 0), ("batch", batch, 1)):
        whole(name, value, least)
    whole("scored", scored, 0, new_tokens)
    for name, size in (("dtype_bytes", dtype_bytes), ("kv_bytes", kv_bytes)):
        if not isinstance(size, Real) or not 0 < size < math.inf:
            raise ValueError(illegal(name, size, "must be a number of bytes above 0"))
    tokens, hidden = batch * new_tokens, config.hidden_size
    width = config.num_heads * config.head_dim
    qkv_rows = width + 2 * config.num_kv_heads * config.head_dim
    matrices = 3 if config.gated_mlp else 2
    pairs = sum(
        visible_pairs(new_tokens, context, config.window(layer), causal) for layer in range(config.num_layers)
    )
    flops = {
        "embedding": 0,
        "qkv": 2 * tokens * hidden * qkv_rows * config.num_layers,
        "attention": 2 * 2 * batch * width * pairs,  # scores q k, then weights v
        "out": 2 * tokens * width * hidden * config.num_layers,
        "mlp": 2 * tokens * matrices * hidden * config.intermediate_size * config.num_layers,
        "norms": 0,
        "head": 2 * batch * scored * hidden * config.vocab_size,
    }
    row = 2 * batch * config.num_kv_heads * config.head_dim * kv_bytes  # K and V of one position of one layer
    read = sum(_positions_read(new_tokens, context, config.window(layer)) for layer in range(config.num_layers))
    return Counts(
        batch=batch,
        new_tokens=new_tokens,
        context=context,
        flops=flops,
        weight_bytes=_weights_read(config, tokens, batch * scored, dtype_bytes),
        kv_read=round(row * read),
        kv_written=round(row * new_tokens * config.num_layers),
    )


def visible_pairs(new_tokens: int, context: int, window: int | None = None, causal: bool = True) -> int:
    """Query-key pairs of one head: query i (from 0) sees context + i + 1 keys, at most `window` of them."""
    if not causal:
        return new_tokens * (context + new_tokens)
    if window is None or window >= context + new_tokens:
        return new_tokens * context + new_tokens * (new_tokens + 1) // 2
    growing = min(max(window - context, 0), new_tokens)  # queries that still see everything before them
    return growing * context + growing * (growing + 1) // 2 + (new_tokens - growing) * window


def _positions_read(new_tokens: int, context: int, window: int | None) -> int:
    """Positions whose keys and values any of the new queries sees."""
    length = context + new_tokens
    return length if window is None else min(length, window + new_tokens - 1)


def _weights_read(config: ModelConfig, tokens: int, scored: int, dtype_bytes: float) -> dict[str, int]:
    """Every matrix once; of the embedding only the rows looked up; the head only if anything is scored."""
    read = {name: round(count * dtype_bytes) for name, count in parameters(config).items()}
    tables = 2 if config.positions == "learned" else 1
    read["embedding"] = round(tables * tokens * config.hidden_size * dtype_bytes)
    read["head"] = round(config.vocab_size * config.hidden_size * dtype_bytes) if scored else 0
    return read


def weight_bytes(config: ModelConfig, dtype_bytes: float = 4) -> int:
    """Bytes of all weights at rest: what the file and the memory hold."""
    return round(parameter_count(config) * dtype_bytes)


def kv_bytes_per_token(config: ModelConfig, kv_bytes: float = 2) -> int:
    """2 (K and V) x layers x kv_heads x head_dim x bytes: what one more token of context costs one sequence."""
    return round(2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bytes)


def counted_flops(function: Callable[[], object]) -> int:
    """FLOPs of `function()` as torch counts them: the outside check on the formulas (use causal=False).

    Attention runs as plain matrix products here, because the counter does not know the fused kernel of the CPU and
    would count it as nothing.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        function()
    return counter.get_total_flops()
