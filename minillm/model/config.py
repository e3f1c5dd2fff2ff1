"""One dataclass that describes every decoder of the course.

Chapter 01. A family (Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3, SmolLM2, GPT-2) is a setting of these
fields, never a subclass: `decoder.py` reads the fields and does not know family names. `config_json.py` translates
Hugging Face's `config.json` into this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from minillm.errors import ConfigError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ROPE_KINDS = ("default", "linear", "ntk", "yarn", "llama3")


def is_positive(value: object) -> bool:
    """A finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed to reach past the trained context.

    kind: one of ROPE_KINDS. factor: new length / trained length. original_length: trained length in tokens.
    low_freq_factor, high_freq_factor: llama3's band. beta_fast, beta_slow, truncate: YaRN's band.
    attention_factor: YaRN's multiplier on cos and sin (None: 0.1 ln(factor) + 1).
    """

    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"rope type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if not is_positive(value) and not (name == "attention_factor" and value is None):
                raise ConfigError(f"rope {name}={value!r} must be a finite number > 0")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor={self.low_freq_factor!r} must be < high_freq_factor={self.high_freq_factor!r}"
            )
        if self.kind in ("yarn", "llama3") and self.original_length <= 0:
            raise ConfigError(f"rope type {self.kind!r} needs original_length > 0, got {self.original_length}")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and wiring of a decoder. Lengths in tokens, sizes in elements.

    A layer attends over the last `windows[i]` tokens, or over all when that is None. Layers in `local_layers` use
    `rope_local_theta` (Gemma 3). `attention_scale` multiplies q @ k; None means head_dim ** -0.5.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    family: str = "llama"
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    norm_kind: str = "rms"  # "rms", or "layer" (with bias) for GPT-2
    norm_offset: float = 0.0  # Gemma stores w where the norm multiplies by 1 + w; added once, at loading
    positions: str = "rope"  # "rope", or "learned" for GPT-2
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    rope_local_theta: float | None = None
    windows: tuple[int | None, ...] = ()
    local_layers: tuple[int, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    activation: str = "silu"
    qk_norm: bool = False
    post_norms: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_length",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be an integer >= 1")
        for name in (
            "norm_eps",
            "rope_theta",
            "rope_local_theta",
            "attention_scale",
            "attention_softcap",
            "logit_softcap",
        ):
            value = getattr(self, name)
            unset = value is None and name not in ("norm_eps", "rope_theta")
            if not unset and not is_positive(value) and not (name == "norm_eps" and value == 0):
                raise ConfigError(f"{name}={value!r} must be a finite number > 0")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even for rotary positions")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation={self.activation!r} must be one of {', '.join(ACTIVATIONS)}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"windows has {len(self.windows)} entries for {self.num_layers} layers")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head: 1 is MHA, num_heads is MQA, between is GQA."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def with_changes(self, **changes) -> ModelConfig:
        """A copy with some fields changed; an unknown field name is an error that lists the known ones."""
        known = {field.name for field in fields(self)}
        for name in changes:
            if name not in known:
                raise ConfigError(f"unknown config field {name!r}; known: {', '.join(sorted(known))}")
        return replace(self, **changes)
