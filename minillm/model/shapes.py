"""True shapes of well-known models, to reason about and to measure speed and memory without their weights.

Chapters 01 and 03. `known_shapes()` gives configurations and allocates nothing; `load_model("shape:llama-3.1-8b")`
builds that shape with random weights. Figures are those of the published `config.json` files.
"""

from __future__ import annotations

from minillm.errors import UnknownModelError
from minillm.model.config import ModelConfig
from minillm.model.config_json import config_from_hf

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _raw(family: str, vocab, hidden, ffn, layers, heads, kv_heads, length, theta=10000.0, **more) -> dict:
    return {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rope_theta": theta,
        **more,
    }


SHAPES = {
    "smollm2-135m": _raw("llama", 49152, 576, 1536, 30, 9, 3, 8192, 1e5, tie_word_embeddings=True),
    "llama-7b": _raw("llama", 32000, 4096, 11008, 32, 32, 32, 2048),
    "llama-2-7b": _raw("llama", 32000, 4096, 11008, 32, 32, 32, 4096),
    "llama-2-13b": _raw("llama", 32000, 5120, 13824, 40, 40, 40, 4096),
    "llama-2-70b": _raw("llama", 32000, 8192, 28672, 80, 64, 8, 4096),
    "llama-3.2-1b": _raw(
        "llama",
        128256,
        2048,
        8192,
        16,
        32,
        8,
        131072,
        5e5,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling={**_LLAMA3, "factor": 32.0},
    ),
    "llama-3.1-8b": _raw("llama", 128256, 4096, 14336, 32, 32, 8, 131072, 5e5, rope_scaling=_LLAMA3),
    "llama-3.1-70b": _raw("llama", 128256, 8192, 28672, 80, 64, 8, 131072, 5e5, rope_scaling=_LLAMA3),
    "mistral-7b": _raw("mistral", 32000, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096),
    "qwen2.5-0.5b": _raw("qwen2", 151936, 896, 4864, 24, 14, 2, 32768, 1e6, tie_word_embeddings=True),
    "qwen2.5-7b": _raw("qwen2", 152064, 3584, 18944, 28, 28, 4, 131072, 1e6),
    "qwen3-8b": _raw("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, 1e6, head_dim=128),
    "gemma-2-9b": _raw("gemma2", 256000, 3584, 14336, 42, 16, 8, 8192, head_dim=256),
    "gpt2": _raw("gpt2", 50257, 768, 3072, 12, 12, 12, 1024),
}


def known_shapes() -> dict[str, ModelConfig]:
    """Name -> configuration of every shape that "shape:NAME" accepts."""
    return {name: config_from_hf(raw) for name, raw in SHAPES.items()}


def known_shape(name: str) -> ModelConfig:
    """The configuration behind "NAME" or "shape:NAME"."""
    name = name.removeprefix("shape:")
    if name not in SHAPES:
        raise UnknownModelError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    return config_from_hf(SHAPES[name])
