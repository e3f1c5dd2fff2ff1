"""From files to a Decoder: check every shape against the headers first, then fill one tensor at a time.

Chapter 01. Nothing is allocated before the whole checkpoint is known to fit its config: the decoder is built on
PyTorch's meta device (shapes without memory), each parameter is matched with the tensors that make it up, and only
then is it allocated and filled, so the peak is the model plus one tensor. Pickles are never opened: unpickling runs
code from the file. `checkpoint.py` reads folders of safetensors, `gguf.py` GGUF files.

Heads. tie_word_embeddings true: the head is the embedding; a stored head must equal it, else the file contradicts its
config and is refused. False: a head must be stored; there is no random head.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minillm.errors import ConfigError, ParamsError, WeightsError, illegal
from minillm.model.checkpoint import FLOATS, Checkpoint, listed, open_checkpoint
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.families import piece_rows, sources
from minillm.model.hub import resolve
from minillm.model.shapes import known_shape

DEVICES = "must be cpu, cuda, cuda:1 ..., or None"
Plan = dict[str, tuple[str, ...]]  # our parameter -> the checkpoint's tensors, in row order


def load_model(
    name: str | Path, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> Decoder:
    """A Decoder in eval mode, its parameters without gradients.

    name: as in `hub.resolve`, or "shape:NAME" for random weights. device: default CUDA if there is one.
    dtype: default the checkpoint's on CUDA, float32 on a CPU.
    """
    device, wanted = as_device(device), as_dtype(dtype)
    if str(name).startswith("shape:"):
        return random_model(known_shape(str(name)), default_dtype(wanted, torch.bfloat16, device), device)
    return fill(open_checkpoint(resolve(name)), wanted, device)


def fill(checkpoint: Checkpoint, wanted: torch.dtype | None, device: torch.device) -> Decoder:
    """The decoder of an opened checkpoint; `load_model` without the search for the file."""
    plan, model = check(checkpoint)
    dtype = default_dtype(wanted, checkpoint.dtype, device)
    check_memory(model, dtype, device)
    for parameter, pieces in plan.items():
        shape = model.get_parameter(parameter).shape
        _set(model, parameter, read_parameter(checkpoint, parameter, pieces, shape, dtype, device))
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model.eval()


def as_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError, ImportError, AssertionError) as error:
        raise ParamsError(illegal("device", device, DEVICES)) from error
    usable = chosen.type in ("cpu", "cuda") or (chosen.type == "mps" and torch.backends.mps.is_available())
    if not usable:
        raise ParamsError(illegal("device", device, DEVICES))
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ParamsError(illegal("device", device, f"this machine has {torch.cuda.device_count()} CUDA devices"))
    return chosen


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (None, *FLOATS.values()) or (found is None and dtype is not None):
        raise ParamsError(illegal("dtype", dtype, "must be float32, bfloat16, float16, float64 or None"))
    return found


def default_dtype(wanted: torch.dtype | None, stored: torch.dtype, device: torch.device) -> torch.dtype:
    return wanted or (stored if device.type == "cuda" else torch.float32)


def check(checkpoint: Checkpoint) -> tuple[Plan, Decoder]:
    """Match the whole checkpoint with its config, from headers alone. Returns the plan and a decoder on meta."""
    config, shapes = checkpoint.config, checkpoint.shapes
    if config.num_layers > len(shapes):
        raise WeightsError(f"the config has {config.num_layers} layers; the file holds {len(shapes)} tensors")
    try:
        model = on_meta(config)
    except (RuntimeError, TypeError) as error:  # sizes whose product is no 64-bit number
        raise ConfigError(f"the config's sizes are beyond any memory: {error}") from error
    plan = {name: sources(config, name, checkpoint.names) for name, _ in model.named_parameters()}
    used = {name for pieces in plan.values() for name in pieces}
    missing, head = used - shapes.keys(), f"{checkpoint.names['head'][0]}.weight"
    if missing == {head}:
        raise WeightsError(f"the head {head} is missing, and tie_word_embeddings is false: nothing to score with")
    if missing:
        raise WeightsError(f"missing tensors: {listed(missing)}")
    for parameter, pieces in plan.items():
        check_shapes(checkpoint, parameter, pieces, tuple(model.get_parameter(parameter).shape))
    extra = shapes.keys() - used
    if config.tie_embeddings and head in extra:
        check_tied_head(checkpoint, plan["embed.weight"][0], head)
        extra = extra - {head}
    if extra:
        raise WeightsError(f"tensors that a {config.family} of this config does not have: {listed(extra)}")
    return plan, model


class _SkipInit(TorchFunctionMode):
    """Leaves out the random initialisation of new modules: it would be thrown away."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def on_meta(config: ModelConfig) -> Decoder:
    """The decoder with shapes and no memory."""
    with torch.device("meta"), _SkipInit():
        return Decoder(config)


def check_shapes(checkpoint: Checkpoint, parameter: str, pieces: tuple[str, ...], shape: tuple) -> None:
    for name, rows in zip(pieces, piece_rows(checkpoint.config, parameter, shape[0], len(pieces))):
        expected = (rows, *shape[1:])
        if is_transposed(checkpoint, parameter):
            expected = expected[::-1]
        if checkpoint.shapes[name] != expected:
            raise WeightsError(
                f"tensor {name} has shape {list(checkpoint.shapes[name])}; the config asks for {list(expected)}"
            )


def check_tied_head(checkpoint: Checkpoint, embed: str, head: str) -> None:
    if checkpoint.shapes[head] != checkpoint.shapes[embed] or not torch.equal(
        checkpoint.read(head), checkpoint.read(embed)
    ):
        raise WeightsError(
            f"tie_word_embeddings is true, but {head} differs from {embed}: "
            "set it to false in config.json to use the stored head"
        )


def check_memory(model: Decoder, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a model that cannot fit the device's memory at all."""
    needed, total = sum(p.numel() for p in model.parameters()) * dtype.itemsize, device_memory(device)
    if total is not None and needed > total:
        raise WeightsError(
            f"the weights take {needed / 1e9:.1f} GB in {dtype}; {device} has {total / 1e9:.1f} GB in all"
        )


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory the device has in all; None where nothing tells, and for "meta", which stores nothing."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def is_transposed(checkpoint: Checkpoint, parameter: str) -> bool:
    return parameter.endswith(".weight") and parameter.removesuffix(".weight").endswith(checkpoint.transposed)


def read_parameter(
    checkpoint: Checkpoint,
    parameter: str,
    pieces: tuple[str, ...],
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One parameter of ours, its pieces copied into place."""
    out, start = torch.empty(shape, dtype=dtype, device=device), 0
    for name, rows in zip(pieces, piece_rows(checkpoint.config, parameter, shape[0], len(pieces))):
        piece = checkpoint.read(name)
        if is_transposed(checkpoint, parameter):
            piece = piece.T
        if checkpoint.norm_offset and parameter.split(".")[-2].endswith("norm"):
            piece = piece.float() + checkpoint.norm_offset  # in float32: 1 + w would lose bits of w in bfloat16
        out[start : start + rows].copy_(piece)
        start += rows
    return out


def _set(model: nn.Module, parameter: str, value: Tensor) -> None:
    module, _, name = parameter.rpartition(".")
    setattr(model.get_submodule(module), name, nn.Parameter(value, requires_grad=False))


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Decoder:
    """Seeded random weights at a true shape: for speed and memory; the text is noise."""
    model = on_meta(config)
    check_memory(model, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.dim() == 2:
            value.normal_(0.0, 0.02, generator=generator)
        else:
            value.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        _set(model, name, value)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model.eval()
