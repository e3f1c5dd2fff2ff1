"""GGUF: llama.cpp's one-file format, with metadata, tokenizer and (usually quantised) tensors.

Chapter 01. `gguf_header.py` reads and checks the header; the `gguf` package knows the block formats and dequantises
them. Two things differ from a Hugging Face checkpoint: tensors have other names, and for the llama architecture the
rows of Q and K are reordered so that RoPE turns neighbouring channels. `unpermute` puts them back.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from minillm.errors import ConfigError, UnsupportedArchitectureError, WeightsError
from minillm.model.config import ModelConfig, RopeScaling
from minillm.model.config_json import config_from_hf
from minillm.model.gguf_header import read_header
from minillm.model.rope import inverse_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")
NAMES = {
    "embed": ("token_embd",),
    "norm": ("output_norm",),
    "head": ("output",),
    "layers.*.attn_norm": ("blk.*.attn_norm",),
    "layers.*.attn.qkv": ("blk.*.attn_q", "blk.*.attn_k", "blk.*.attn_v"),
    "layers.*.attn.q_norm": ("blk.*.attn_q_norm",),
    "layers.*.attn.k_norm": ("blk.*.attn_k_norm",),
    "layers.*.attn.out": ("blk.*.attn_output",),
    "layers.*.mlp_norm": ("blk.*.ffn_norm",),
    "layers.*.mlp.gate_up": ("blk.*.ffn_gate", "blk.*.ffn_up"),
    "layers.*.mlp.down": ("blk.*.ffn_down",),
}
ROPE_FACTORS = "rope_freqs.weight"  # llama3's scaling, stored as one divisor a frequency


class GGUFCheckpoint:
    """A GGUF file as `weights.load_model` wants it. Its tensors come out dequantised to float32."""

    names, transposed, norm_offset = NAMES, (), 0.0
    dtype = torch.bfloat16  # what a GPU computes in: the file's own types are block formats

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata, self.tensors = read_header(path)
        self.shapes = {name: info.shape for name, info in self.tensors.items()}
        self.config = config_from_gguf(metadata, self)
        self.permuted = metadata["general.architecture"] == "llama"
        self.shapes.pop(ROPE_FACTORS, None)

    def read(self, name: str) -> Tensor:
        tensor = self.read_stored(name)
        if self.permuted and name.startswith("blk.") and name.split(".")[2] in ("attn_q", "attn_k"):
            heads = self.config.num_heads if ".attn_q." in name else self.config.num_kv_heads
            tensor = unpermute(tensor, heads)
        return tensor

    def read_stored(self, name: str) -> Tensor:
        """Dequantise, as the file has it."""
        info = self.tensors[name]
        raw = np.memmap(self.path, np.uint8, "r", info.start, (info.nbytes,))
        rows = raw.reshape(math.prod(info.shape[:-1]), -1)
        values = dequantize(rows, info.type)
        return torch.from_numpy(values if values.flags.writeable else values.copy()).view(info.shape)


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of Q and K rows: channels (0, half, 1, half + 1, ...) -> (0, 1, ..., half, ...)."""
    rows, *rest = tensor.shape
    pairs = tensor.view(heads, rows // heads // 2, 2, *rest)  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows, *rest)  # [heads * head_dim, ...]


def config_from_gguf(metadata: dict, checkpoint: GGUFCheckpoint) -> ModelConfig:
    """The metadata under Hugging Face's names, then through the same door as config.json."""
    arch, tensors = metadata.get("general.architecture"), checkpoint.tensors
    if arch not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"GGUF architecture {arch!r} is not supported; supported in GGUF: {', '.join(ARCHITECTURES)}"
        )

    def get(key: str, default=None):
        return metadata.get(f"{arch}.{key}", default)

    heads, hidden = get("attention.head_count"), get("embedding_length")
    if "token_embd.weight" not in tensors:
        raise WeightsError("missing tensor: token_embd.weight")
    if get("expert_count"):
        raise UnsupportedArchitectureError("GGUF with experts (mixture of experts) is not supported")
    raw = {
        "model_type": arch,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length") or (hidden // heads if hidden and heads else None),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _rope_scaling(get),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids(metadata),
    }
    config = config_from_hf(raw)
    rope_dim = get("rope.dimension_count", config.head_dim)
    if rope_dim != config.head_dim:
        raise ConfigError(f"rope.dimension_count={rope_dim} must equal the head dimension {config.head_dim}")
    return _with_rope_factors(config, checkpoint) if ROPE_FACTORS in tensors else config


def eos_ids(metadata: dict) -> list[int]:
    """End of text and, where the file names one, end of turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return [metadata[key] for key in keys if metadata.get(key) is not None]


def _rope_scaling(get) -> dict | None:
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": get("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        "attention_factor": get("rope.scaling.attn_factor"),
    }


def _with_rope_factors(config: ModelConfig, checkpoint: GGUFCheckpoint) -> ModelConfig:
    """Llama 3.1's scaling, which GGUF stores as divisors: take the largest as the factor, then check all of them."""

    stored = checkpoint.read_stored(ROPE_FACTORS)  # [head_dim / 2]
    llama3 = RopeScaling("llama3", float(stored.max()), 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plain, _ = inverse_frequencies(config)
    scaled, _ = inverse_frequencies(changed := config.with_changes(rope_scaling=llama3))
    if stored.shape != plain.shape or not torch.allclose(plain / scaled, stored, rtol=1e-3):
        raise ConfigError(f"{ROPE_FACTORS} is not llama3's rope scaling; other tables are not supported")
    return changed
