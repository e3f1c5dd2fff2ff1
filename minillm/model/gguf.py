"""GGUF: llama.cpp's one-file format, with metadata, tokenizer and (usually quantised) tensors.

Chapter 01. The header is read here, because every count in it must be held against the size of the file before it is
believed; the `gguf` package knows the block formats and dequantises them. Two things differ from a Hugging Face
checkpoint: tensors have other names, and for the llama architecture the rows of Q and K are reordered so that RoPE
turns neighbouring channels. `unpermute` puts them back.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from minillm.errors import ConfigError, UnsupportedArchitectureError, WeightsError
from minillm.model.config import ModelConfig, RopeScaling
from minillm.model.config_json import config_from_hf
from minillm.model.rope import inverse_frequencies

TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
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
# Value types of the header by number: struct code and bytes. 8 is a string, 9 an array.
SCALARS = {
    **{0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1)},
    **{10: ("Q", 8), 11: ("q", 8), 12: ("d", 8)},
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file: shape as torch sees it, block format, and the bytes it takes."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    nbytes: int


class _Header:
    """A cursor over the file that refuses to read past its end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.size, self.at, self.name = data, len(data), 0, name

    def take(self, count: int) -> int:
        """Move on by `count` bytes and return where they start."""
        if count > self.size - self.at:
            raise WeightsError(f"{self.name} is cut short: {count} bytes asked for at {self.at} of {self.size}")
        self.at += count
        return self.at - count

    def scalar(self, kind: int):
        code, size = SCALARS[kind]
        return struct.unpack_from("<" + code, self.data, self.take(size))[0]

    def count(self, smallest: int, what: str) -> int:
        """A 64-bit count of things that take at least `smallest` bytes each."""
        count = self.scalar(10)
        if count * smallest > self.size - self.at:
            raise WeightsError(f"{self.name}: {count} {what} cannot fit a file of {self.size} bytes")
        return count

    def string(self) -> str:
        size = self.count(1, "bytes of text")
        start = self.take(size)
        return self.data[start : start + size].decode("utf-8", "replace")

    def value(self):
        kind = self.scalar(4)
        if kind in SCALARS:
            return self.scalar(kind)
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise WeightsError(f"{self.name}: metadata of unknown type {kind}")
        item = self.scalar(4)
        if item == STRING:
            return [self.string() for _ in range(self.count(8, "strings"))]
        if item not in SCALARS:
            raise WeightsError(f"{self.name}: an array of unknown type {item}")
        code, size = SCALARS[item]
        count = self.count(size, "array items")
        return list(struct.unpack_from(f"<{count}{code}", self.data, self.take(count * size)))


def read_header(path: Path) -> tuple[dict, dict[str, TensorInfo]]:
    """(metadata, tensors) of a GGUF file, every offset inside the file. Reads the header only."""
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)  # the model and its tokenizer read the same header
def _read_header(path: Path, size: int, _changed: int) -> tuple[dict, dict[str, TensorInfo]]:
    if size < 24:
        raise WeightsError(f"{path.name} is cut short: {size} bytes")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data, path.name)
        if data[:4] != b"GGUF":
            raise WeightsError(f"{path.name} is not a GGUF file: it starts with {data[:4]!r}")
        header.take(4)
        version = header.scalar(4)
        if version not in (2, 3):
            raise WeightsError(f"{path.name} has GGUF version {version}; versions 2 and 3 are read")
        tensor_count = header.count(24, "tensors")
        metadata = {}
        for _ in range(header.count(13, "metadata entries")):
            key = header.string()
            metadata[key] = header.value()
        infos = [_read_info(header) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise WeightsError(f"{path.name}: alignment {alignment!r} is no power of two")
        base = -(-header.at // alignment) * alignment
        tensors = {name: _place(header, name, base, *info) for name, *info in infos}
    if len(tensors) != tensor_count:
        raise WeightsError(f"{path.name} holds two tensors of one name")
    return metadata, tensors


def _read_info(header: _Header) -> tuple[str, list[int], int, int]:
    name, dims = header.string(), header.scalar(4)
    if not 1 <= dims <= 4:
        raise WeightsError(f"{header.name}: tensor {name!r} has {dims} dimensions; legal: 1 to 4")
    shape = [header.scalar(10) for _ in range(dims)]
    return name, shape[::-1], header.scalar(4), header.scalar(10)  # GGUF counts the fastest axis first


def _place(header: _Header, name: str, base: int, shape: list[int], kind: int, offset: int) -> TensorInfo:
    """Where a tensor lies, after checking that it lies inside the file."""
    known = {x.value: x for x in GGMLQuantizationType}
    if kind not in known or known[kind].name not in TENSOR_TYPES:
        shown = known[kind].name if kind in known else f"number {kind}"
        raise WeightsError(f"tensor {name} has type {shown}; supported: {', '.join(TENSOR_TYPES)}")
    block, block_bytes = GGML_QUANT_SIZES[known[kind]]
    if shape[-1] % block:
        raise WeightsError(f"tensor {name}: rows of {shape[-1]} are no whole blocks of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    if nbytes == 0 or base + offset + nbytes > header.size:
        raise WeightsError(
            f"{header.name} is cut short: tensor {name} {shape} ends at byte {base + offset + nbytes} "
            f"of {header.size}"
        )
    return TensorInfo(tuple(shape), known[kind], base + offset, nbytes)


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
