"""A rank reads its slice of the file and no more: no process ever holds the whole model.

Chapter 18. The header of a safetensors file says where every tensor lies, so a slice of it can be read alone
(`get_slice`, over a memory map). Rows of a matrix are one run of bytes; columns are a short run in every row. Other
formats (GGUF's blocks, quantised folders) are read a tensor at a time, cut, and dropped.

Bytes per rank: what is cut divides by the number of ranks (KV heads only down to one a rank); norms, learned
positions and the biases after a sum are on every rank.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minillm.errors import WeightsError
from minillm.model.checkpoint import Checkpoint, SafetensorsCheckpoint, open_checkpoint
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.families import piece_rows
from minillm.model.hub import resolve
from minillm.model.shapes import known_shape
from minillm.model.weights import (
    as_device,
    as_dtype,
    check,
    default_dtype,
    device_memory,
    is_transposed,
    on_meta,
    read_parameter,
)
from minillm.parallel.tensor import Cut, Range, check_ranks, cut, wire


def load_shard(
    name: str | Path,
    group: dist.ProcessGroup,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Decoder:
    """This rank's part of a model, ready to run with the others of the group. Arguments as in `load_model`."""
    device, wanted = as_device(device), as_dtype(dtype)
    rank, ranks = group.rank(), group.size()
    if str(name).startswith("shape:"):
        config = known_shape(str(name))
        check_ranks(config, ranks)
        return wire(random_shard(config, rank, ranks, default_dtype(wanted, torch.bfloat16, device), device), group)
    checkpoint = open_checkpoint(resolve(name))
    check_ranks(checkpoint.config, ranks)
    plan, model = check(checkpoint)
    dtype = default_dtype(wanted, checkpoint.dtype, device)
    check_room(model.config, rank, ranks, dtype, device)
    for parameter, pieces in plan.items():
        whole = model.get_parameter(parameter).shape
        part = cut(model.config, parameter, rank, ranks)
        if part == Cut():
            value = read_parameter(checkpoint, parameter, pieces, whole, dtype, device)
        else:
            value = read_part(checkpoint, parameter, pieces, whole, part, dtype, device)
        put(model, parameter, value)
    return wire(finish(model), group)


def read_part(
    checkpoint: Checkpoint,
    parameter: str,
    pieces: tuple[str, ...],
    whole: torch.Size,
    part: Cut,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The rank's rows and columns of one parameter, wherever in the checkpoint's tensors they lie."""
    out, at = torch.empty(part.shape(tuple(whole)), dtype=dtype, device=device), 0
    counts = piece_rows(checkpoint.config, parameter, whole[0], len(pieces))
    for first, last in part.rows or ((0, whole[0]),):
        start = 0
        for name, count in zip(pieces, counts):
            low, high = max(first, start), min(last, start + count)
            if low < high:
                rows = (low - start, high - start)
                piece = read_slice(checkpoint, name, rows, part.columns, is_transposed(checkpoint, parameter))
                out[at : at + high - low].copy_(piece)
                at += high - low
            start += count
    return out


def read_slice(checkpoint: Checkpoint, name: str, rows: Range, columns: Range | None, transposed: bool) -> Tensor:
    """Rows and columns of one of the file's tensors, as ours is laid out; from a safetensors file only those."""
    source = checkpoint.files[name].get_slice(name) if isinstance(checkpoint, SafetensorsCheckpoint) else None
    source = checkpoint.read(name) if source is None else source
    if len(checkpoint.shapes[name]) == 1:
        return source[rows[0] : rows[1]]
    across = slice(None) if columns is None else slice(*columns)
    return source[across, rows[0] : rows[1]].T if transposed else source[rows[0] : rows[1], across]


def shard_bytes(config: ModelConfig, ranks: int, itemsize: int, rank: int = 0) -> int:
    """Bytes of a rank's weights, by formula."""
    total = 0
    for parameter, tensor in on_meta(config).named_parameters():  # a tied head is listed once
        total += torch.Size(cut(config, parameter, rank, ranks).shape(tuple(tensor.shape))).numel()
    return total * itemsize


def check_room(config: ModelConfig, rank: int, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    needed, total = shard_bytes(config, ranks, dtype.itemsize, rank), device_memory(device)
    if total is not None and needed > total:
        raise WeightsError(
            f"1 of {ranks} parts of the weights takes {needed / 1e9:.1f} GB in {dtype}; {device} has "
            f"{total / 1e9:.1f} GB in all"
        )


def random_shard(
    config: ModelConfig, rank: int, ranks: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Decoder:
    """The rank's slices of `random_model`: the same numbers as on one rank, made a parameter at a time."""
    check_room(config, rank, ranks, dtype, device)
    model, generator = on_meta(config), torch.Generator(device).manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.dim() == 2:
            value.normal_(0.0, 0.02, generator=generator)
        else:
            value.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        put(model, name, cut(config, name, rank, ranks).of(value))
    return finish(model)


def put(model: nn.Module, parameter: str, value: Tensor) -> None:
    """Set a parameter; the linear that holds it knows its new sizes."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, name, nn.Parameter(value, requires_grad=False))
    if isinstance(module, nn.Linear) and name == "weight":
        module.out_features, module.in_features = value.shape


def finish(model: Decoder) -> Decoder:
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight
        model.head.out_features = len(model.embed.weight)
    return model.eval()
