"""The header of a GGUF file: metadata, and where each tensor lies.

Chapter 01. The file is somebody else's, so no number in it is believed: every count, length and offset is held
against the size of the file before anything of that size is read or allocated.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from minillm.errors import WeightsError

TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
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
