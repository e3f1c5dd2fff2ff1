"""Quantised folders as the world keeps them: config.json with a `quantization_config`, integers in safetensors.

Chapter 12. A quantised linear is several tensors in the place of one `weight` (`layouts.py`). To chapter 01's loader
this is one more checkpoint format: it lists weights and reads them one at a time, dequantised, so every check of
shapes and names holds here too. `load_quantized(..., packed=True)` then puts chapter 11's packed linears in their
place, with the file's own integers; where q, k and v were stored apart their rows are stacked.

Written: compressed-tensors' pack-quantized, or GPTQ; both are read by vLLM and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from minillm.errors import ConfigError, ParamsError, WeightsError, illegal
from minillm.model.checkpoint import open_shards, read_json
from minillm.model.config_json import config_from_hf
from minillm.model.decoder import Decoder, replace_linears
from minillm.model.export import export, hf_weights
from minillm.model.families import FAMILIES, piece_rows, sources
from minillm.model.hub import resolve
from minillm.model.weights import as_device, as_dtype, fill
from minillm.quant import layouts
from minillm.quant.affine import Quantized, Scheme
from minillm.quant.layouts import Stored
from minillm.quant.linear import as_module

MARKS = ("qweight", "weight_packed", "weight_scale")  # a linear with one of these is a quantised one
FORMATS = "gptq, awq (GEMM), compressed-tensors (pack-quantized, int-quantized, float-quantized)"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """How the tensors of one linear become its weight. shape: their shapes, by last name -> (out, in)."""

    read: Callable[[dict[str, Tensor]], Stored | Tensor]
    shape: Callable[[dict[str, Shape]], Shape]


def file_format(settings: dict) -> Format:
    """From a `quantization_config`, or one clear error."""
    method, bits = settings.get("quant_method"), settings.get("bits", 4)
    if method == "gptq" and bits in (2, 3, 4, 8):
        version = 2 if settings.get("checkpoint_format") == "gptq_v2" else 1
        return Format(
            lambda parts: layouts.read_gptq(parts, bits, version),
            lambda sizes: (sizes["qweight"][1], sizes["qweight"][0] * 32 // bits),
        )
    if method == "awq" and bits == 4 and str(settings.get("version", "gemm")).lower() == "gemm":
        return Format(layouts.read_awq, lambda sizes: (sizes["qweight"][1] * 8, sizes["qweight"][0]))
    if method == "compressed-tensors":
        return compressed_format(settings)
    told = {k: settings[k] for k in ("quant_method", "bits", "version") if k in settings}
    raise ConfigError(f"quantization_config {told} is not supported; supported: {FORMATS}")


def compressed_format(settings: dict) -> Format:
    groups, kind = list((settings.get("config_groups") or {}).values()), settings.get("format")
    widths = {(group.get("weights") or {}).get("num_bits") for group in groups}
    if len(widths) != 1 or not widths <= set(range(2, 9)):
        raise ConfigError(
            f"config_groups with weights of {sorted(widths, key=str)} bits: supported is one width, 2 to 8"
        )
    (bits,) = widths
    if kind == "pack-quantized":
        return Format(
            lambda parts: layouts.read_packed(parts, bits),
            lambda sizes: (sizes["weight_packed"][0], sizes["weight_packed"][1] * 32 // bits),
        )
    if kind in ("int-quantized", "float-quantized", "naive-quantized"):
        return Format(layouts.read_plain, lambda sizes: sizes["weight"])
    raise ConfigError(f"compressed-tensors format {kind!r} is not supported; supported: {FORMATS}")


class QuantizedCheckpoint:
    """A folder of quantised safetensors seen as float weights: what `weights.py` asks of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        raw = read_json(folder / "config.json")
        settings = raw.pop("quantization_config", None)
        if not isinstance(settings, dict):
            raise ConfigError(f"{folder.name}/config.json has no quantization_config: use load_model")
        self.config, self.format = config_from_hf(raw), file_format(settings)
        family = FAMILIES[self.config.family]
        if family.transposed:
            raise ConfigError(f"quantised checkpoints of {self.config.family} are not supported")
        self.names, self.transposed, self.norm_offset = family.names, (), self.config.norm_offset
        self.dtype = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), torch.float16)
        self.files = {}
        for _, handle in open_shards(folder):
            self.files |= dict.fromkeys(handle.keys(), handle)
        sizes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self.files.items()}
        self.parts: dict[str, dict[str, str]] = {}  # linear -> {"qweight": its full name, ..}
        for module in (name.rpartition(".")[0] for name in sizes if name.endswith(MARKS)):
            self.parts[module] = {n[len(module) + 1 :]: n for n in sizes if n.rpartition(".")[0] == module}
        taken = {n for parts in self.parts.values() for part, n in parts.items() if part != "bias"}
        self.shapes = {n: s for n, s in sizes.items() if n not in taken and not n.endswith(family.ignored)}
        for module, parts in self.parts.items():
            try:
                self.shapes[f"{module}.weight"] = self.format.shape({part: sizes[n] for part, n in parts.items()})
            except (KeyError, IndexError):
                raise WeightsError(
                    f"{module} holds {', '.join(parts)}: not what its quantization_config says"
                ) from None

    def stored(self, module: str) -> Stored | Tensor:
        return self.format.read({part: self.files[n].get_tensor(n) for part, n in self.parts[module].items()})

    def read(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in self.parts:
            found = self.stored(module)
            return found if isinstance(found, Tensor) else found.dequantize()
        return self.files[name].get_tensor(name)


def load_quantized(
    name: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    packed: bool = False,
    kernel: str = "auto",
) -> Decoder:
    """A quantised folder or hub id as a Decoder; arguments as in `load_model`.

    packed=False: float weights with the file's rounding in them. packed=True: its integers, in chapter 11's linears
    (kernel as in `quantize_model`); linears whose groups are not neighbours, and INT8 and FP8 ones, stay float.
    Scales are kept in bfloat16 then, those of a float16 file to within 0.4 %.
    """
    device, wanted = as_device(device), as_dtype(dtype)
    checkpoint = QuantizedCheckpoint(resolve(name))
    model = fill(checkpoint, wanted, device)
    if not packed:
        return model

    def make(module: str, linear: nn.Linear) -> nn.Module | None:
        names = [n.removesuffix(".weight") for n in sources(model.config, f"{module}.weight", checkpoint.names)]
        if not all(n in checkpoint.parts for n in names):
            return None
        found = [checkpoint.stored(n) for n in names]
        whole = [None if isinstance(stored, Tensor) else stored.quantized() for stored in found]
        if any(q is None or q.scheme != whole[0].scheme for q in whole if whole[0] is not None) or whole[0] is None:
            return None
        stacked = (torch.cat([getattr(q, part) for q in whole]).to(device) for part in ("values", "scale", "zero"))
        return as_module(Quantized(*stacked, whole[0].scheme), linear.bias, kernel)

    return replace_linears(model, make)


def is_quantized(name: str | Path) -> bool:
    """Whether this is a folder whose config.json says that its weights are quantised."""
    if str(name).startswith("shape:") or not (folder := resolve(name)).is_dir():
        return False
    config = folder / "config.json"
    return config.is_file() and isinstance(read_json(config).get("quantization_config"), dict)


def save_quantized(
    model: Decoder, quantized: Mapping[str, Quantized], folder: str | Path, layout: str = "compressed-tensors"
) -> None:
    """A folder for `load_quantized`, in a layout that vLLM and transformers read too.

    model: a Llama-type decoder without biases, which gives what is not quantised; quantized: integers of its linears
    by name, all under one scheme, as `gptq_model` and `awq_model` find them. layout: "compressed-tensors" or "gptq".
    """
    schemes = {q.scheme for q in quantized.values()}
    if layout not in ("compressed-tensors", "gptq"):
        raise ParamsError(illegal("layout", layout, 'must be "compressed-tensors" or "gptq"'))
    if len(schemes) != 1:
        raise ParamsError(illegal("quantized", f"{len(schemes)} schemes", "must be linears of one scheme"))
    (scheme,) = schemes
    config, folder = model.config, Path(folder)
    tensors = hf_weights(model)
    for module, q in quantized.items():
        names = sources(config, f"{module}.weight")
        rows = piece_rows(config, f"{module}.weight", len(q.values), len(names))
        for name, start, count in zip(names, [0, *accumulate(rows)], rows):
            part = slice(start, start + count)
            piece = Quantized(q.values[part], q.scale[part], None if q.zero is None else q.zero[part], scheme)
            del tensors[name]
            made = layouts.write_packed(piece) if layout != "gptq" else layouts.write_gptq(piece)
            tensors |= {f"{name.removesuffix('weight')}{key}": value.contiguous() for key, value in made.items()}
    export(model, folder)  # config.json; its float weights are written over
    raw = read_json(folder / "config.json") | {"quantization_config": describe(scheme, layout)}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def describe(scheme: Scheme, layout: str) -> dict:
    """The `quantization_config` of a folder written here."""
    size = scheme.group_size if scheme.granularity == "group" else -1
    if layout == "gptq":
        return {
            **{"quant_method": "gptq", "bits": scheme.bits, "group_size": size, "sym": scheme.symmetric},
            **{"desc_act": False, "checkpoint_format": "gptq"},
        }
    weights = {"num_bits": scheme.bits, "type": "int", "symmetric": scheme.symmetric, "dynamic": False}
    weights |= {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel"}
    return {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]},
        **{
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    }
