"""True shapes of named models, without their weights: enough to count FLOPs and bytes, or to time random weights.

Chapters 00, 01 and 03. Each is what the model's config.json says; `shape:NAME` loads it with random weights.
"""

from __future__ import annotations

from minillm.errors import UnknownModelError
from minillm.model.config import ModelConfig, RopeScaling

_LLAMA3 = {"vocab_size": 128256, "max_length": 131072, "rope_theta": 500000.0}
_LLAMA3_BAND = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
_QWEN = {"vocab_size": 151936, "norm_eps": 1e-6, "rope_theta": 1e6, "family": "qwen3", "qk_norm": True}


def _shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int = 128, **more) -> ModelConfig:
    defaults = {"vocab_size": 32000, "max_length": 4096}
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **(defaults | more),
    )


SHAPES: dict[str, ModelConfig] = {
    "gpt2": _shape(
        768,
        3072,
        12,
        12,
        12,
        64,
        vocab_size=50257,
        max_length=1024,
        family="gpt2",
        norm_kind="layer",
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation="gelu_tanh",
        tie_embeddings=True,
    ),
    "smollm2-135m": _shape(
        576, 1536, 30, 9, 3, 64, vocab_size=49152, max_length=8192, rope_theta=1e5, tie_embeddings=True
    ),
    "llama-7b": _shape(4096, 11008, 32, 32, 32, max_length=2048, norm_eps=1e-6),
    "llama-2-7b": _shape(4096, 11008, 32, 32, 32),
    "llama-2-13b": _shape(5120, 13824, 40, 40, 40),
    "llama-2-70b": _shape(8192, 28672, 80, 64, 8),
    "mistral-7b": _shape(4096, 14336, 32, 32, 8, max_length=32768, windows=(4096,) * 32, family="mistral"),
    "llama-3.2-1b": _shape(
        2048, 8192, 16, 32, 8, 64, tie_embeddings=True, rope_scaling=RopeScaling("llama3", 32.0, 8192), **_LLAMA3
    ),
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, rope_scaling=_LLAMA3_BAND, **_LLAMA3),
    "llama-3.1-70b": _shape(8192, 28672, 80, 64, 8, rope_scaling=_LLAMA3_BAND, **_LLAMA3),
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, 8, max_length=40960, tie_embeddings=True, **_QWEN),
    "qwen3-8b": _shape(4096, 12288, 36, 32, 8, max_length=40960, **_QWEN),
}


def shape(name: str) -> ModelConfig:
    """The config of a named model, "llama-3.1-8b" or "shape:llama-3.1-8b"."""
    key = name.removeprefix("shape:").lower()
    if key not in SHAPES:
        raise UnknownModelError(f"no shape is named {key!r}; known: {', '.join(sorted(SHAPES))}")
    return SHAPES[key]
