"""Trained heads as files: where they lie, and a check that they belong to the model they are put on.

Chapter 17. `tiny`'s lie inside the package. Those of another model are trained by `python -m
minillm.speculative.train --model NAME` and kept in the cache folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from minillm.errors import ParamsError, WeightsError
from minillm.model.hub import ASSETS, cache_folder


def heads_path(name: str, what: str, folder: str | Path | None = None) -> Path:
    """The file of model `name`'s heads of kind `what`: inside `folder`, or else the package's or the cache's."""
    file = f"{Path(str(name)).name}-{what}.safetensors"
    if folder is not None:
        return Path(folder).expanduser() / file
    packaged = ASSETS / "heads" / file
    return packaged if packaged.is_file() else cache_folder() / "heads" / file


def save_heads(heads: nn.Module, path: Path, facts: dict, dtype: torch.dtype = torch.bfloat16) -> None:
    """facts: how they were trained and what they guess right; kept as the file's metadata."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().contiguous() for name, weight in heads.state_dict().items()}
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    save_file(tensors, path, metadata={"facts": json.dumps(facts)})


def existing_heads(name: str, what: str, folder: str | Path | None = None) -> Path:
    """`heads_path`, or an error that says what to run if there is none."""
    path = heads_path(name, what, folder)
    if not path.is_file():
        others = [] if folder is None else sorted(file.name for file in path.parent.glob("*.safetensors"))
        there = f" (in that folder: {', '.join(others)})" if others else ""
        export = "" if folder is None else f" --export {folder}"
        raise ParamsError(
            f"speculative={what!r} needs heads trained for {name!r}, and there are none at {path}{there}; run: "
            f"python -m minillm.speculative.train --what {what} --model {name}{export}"
        )
    return path


def read_facts(name: str, what: str, folder: str | Path | None = None) -> dict:
    """How they were trained and what they guess right. WeightsError if the file is broken or not the trainer's."""
    from safetensors import SafetensorError, safe_open

    path = existing_heads(name, what, folder)
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
    except (SafetensorError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path.name} cannot be read: {error}") from error
    if "accuracy" not in facts:
        raise WeightsError(
            f"{path.name} does not say what its heads guess right; the trainer writes that beside them"
        )
    return facts


def load_heads(heads: nn.Module, name: str, what: str, folder: str | Path | None = None) -> nn.Module:
    """Fill `heads` with the file's weights, in the dtype and on the device they have."""
    from safetensors.torch import load_file

    path = existing_heads(name, what, folder)
    stored, wanted = load_file(path), heads.state_dict()
    if {k: v.shape for k, v in stored.items()} != {k: v.shape for k, v in wanted.items()}:
        raise WeightsError(f"{path.name} does not fit: its tensors are not those of {what} heads for this model")
    heads.load_state_dict(stored)
    return heads.eval().requires_grad_(False)
