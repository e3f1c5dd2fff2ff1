"""The file formats behind one door: a folder of safetensors here, GGUF in `gguf.py`.

Chapter 01. A checkpoint says what it holds (its config, and the name, shape and type of every tensor) from headers
alone, and reads one tensor at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.errors import ConfigError, WeightsError
from minillm.model.config import ModelConfig
from minillm.model.config_json import config_from_hf, id_tuple
from minillm.model.families import FAMILIES
from minillm.model.hub import PICKLE_ENDINGS

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint(Protocol):
    """What loading needs of a file format. `names` is the table of `families.py` in the format's own names."""

    config: ModelConfig
    dtype: torch.dtype
    names: dict
    transposed: tuple[str, ...]
    norm_offset: float
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """A .gguf file, or a folder with config.json and safetensors, or with one .gguf."""
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if len(files) == 1 and (path.is_file() or not any(path.glob("*.safetensors"))):
        from minillm.model.gguf import GGUFCheckpoint  # imports the gguf package only when needed

        return GGUFCheckpoint(files[0])
    return SafetensorsCheckpoint(path)


class SafetensorsCheckpoint:
    """A Hugging Face folder: config.json beside model.safetensors, or beside shards and their index."""

    def __init__(self, folder: Path) -> None:
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        more = id_tuple(read_json(generation).get("eos_token_id")) if generation.is_file() else ()
        config = config_from_hf(raw)
        self.config = config.with_changes(eos_ids=tuple(dict.fromkeys((*config.eos_ids, *more))))
        family = FAMILIES[config.family]
        self.transposed, self.norm_offset = family.transposed, config.norm_offset
        self.files: dict[str, safe_open] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        dtypes = {}
        for file, handle in open_shards(folder):
            for name in handle.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                if name.endswith(family.ignored):
                    continue
                header = handle.get_slice(name)
                if header.get_dtype() not in FLOATS:
                    raise WeightsError(
                        f"{file.name}: tensor {name} has type {header.get_dtype()}; supported: {', '.join(FLOATS)}"
                    )
                self.files[name], self.shapes[name] = handle, tuple(header.get_shape())
                dtypes[name] = FLOATS[header.get_dtype()]
        bare = not any(name.startswith(family.prefix) for name in self.shapes)  # saved without its outer module
        self.names = {
            ours: tuple(x.removeprefix(family.prefix) if bare else x for x in theirs)
            for ours, theirs in family.names.items()
        }
        declared = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), None)
        self.dtype = declared if declared in FLOATS.values() else next(iter(dtypes.values()), torch.float32)

    def read(self, name: str) -> Tensor:
        return self.files[name].get_tensor(name)


def read_json(path: Path) -> dict:
    if not path.is_file():
        raise WeightsError(f"{path.parent} has no {path.name}: it is not a model folder")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} holds a {type(found).__name__}, not an object")
    return found


def open_shards(folder: Path) -> Iterator[tuple[Path, safe_open]]:
    """Every safetensors file of the folder, its header checked; the index decides which, where there is one."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            pickles = [p.name for p in folder.iterdir() if p.suffix in PICKLE_ENDINGS]
            why = f"; {pickles[0]} is a pickle, and loading one can run any code in it" if pickles else ""
            raise WeightsError(f"{folder} holds no model.safetensors and no .gguf{why}")
        yield single, open_safetensors(single)
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index.name} has no weight_map")
    for file in sorted({str(file) for file in weight_map.values()}):
        if file != os.path.basename(file) or "\\" in file or not file.endswith(".safetensors"):
            raise WeightsError(f"{index.name} names {file!r}: only .safetensors files of the same folder are read")
        if not (folder / file).is_file():
            raise WeightsError(f"{index.name} names {file!r}, which is not in {folder}")
        handle = open_safetensors(folder / file)
        absent = {name for name, where in weight_map.items() if where == file} - set(handle.keys())
        if absent:
            raise WeightsError(f"{file} lacks {listed(absent)}, which {index.name} says it holds")
        yield folder / file, handle


def open_safetensors(path: Path) -> safe_open:
    """Open and check the header: 8 bytes of length, then JSON with the place of every tensor in the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if size < 8 or header > size - 8:
        raise WeightsError(f"{path.name} is cut short: {size} bytes, but its header claims {header}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path.name} is not a whole safetensors file: {error}") from error


def listed(names: set[str]) -> str:
    """The first few, for a message."""
    shown = sorted(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
