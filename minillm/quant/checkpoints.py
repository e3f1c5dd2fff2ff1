"""Quantised folders as the world keeps them: config.json with a `quantization_config`, integers in safetensors.

Chapter 12. A quantised linear is several tensors in the place of one `weight` (`layouts.py`). To chapter 01's loader
this is one more checkpoint format: it lists weights and reads them one at a time, dequantised, so every check of
shapes and names holds here too. `load_quantized(..., packed=True)` then puts quantised linears in their place, with
the file's own numbers; where q, k and v were stored apart their rows are stacked.

    weights       inputs, as the file wants them    linear
    INT2 .. INT8  not rounded                       chapter 11's packed ones
    INT8          INT8, symmetric                   chapter 13's W8A8Linear, a scale a token
    FP8           FP8, symmetric                    chapter 13's FP8Linear, a scale a token
    INT2 .. INT8  anything else                     chapter 11's packed ones: inputs are not rounded
    FP8           anything else                     float, with the file's rounding in it

A file may want one scale for all inputs, found while running or fixed by calibration ("static"). Here each token gets
its own, found while running: at most the step that all tokens together need, nothing is clipped, and a token's result
does not depend on its batch. The file's `input_scale` is not used, and neither are scales of a KV cache.

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
from minillm.quant.fp8 import E4M3, FP8Linear, Scaled
from minillm.quant.fp8 import FORMATS as FP8_FORMATS
from minillm.quant.layouts import Plain, Stored, stacked
from minillm.quant.linear import as_module
from minillm.quant.w8a8 import CHANNEL, W8A8Linear

STRATEGIES = ("token", "tensor", "channel", "group", "block", "tensor_group")  # of compressed-tensors
KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale")
MARKS = ("qweight", "weight_packed", "weight_scale")  # a linear with one of these is a quantised one
FORMATS = "gptq, awq (GEMM), compressed-tensors (pack-quantized, int-quantized, float-quantized)"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """How the tensors of one linear become its weight. shape: their shapes, by last name -> (out, in).

    inputs: "int" or "float" where inputs are wanted in 8 symmetric bits of this type, else None.
    """

    read: Callable[[dict[str, Tensor]], Stored | Plain]
    shape: Callable[[dict[str, Shape]], Shape]
    inputs: str | None = None


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
    kinds = {inputs_of(group) for group in groups}
    if len(kinds) != 1:
        raise ConfigError("config_groups whose input_activations differ: supported is one scheme for all linears")
    (bits,), (inputs,) = widths, kinds
    if kind == "pack-quantized":
        return Format(
            lambda parts: layouts.read_packed(parts, bits),
            lambda sizes: (sizes["weight_packed"][0], sizes["weight_packed"][1] * 32 // bits),
        )
    if kind in ("int-quantized", "float-quantized", "naive-quantized"):
        return Format(lambda parts: layouts.read_plain(parts, bits), lambda sizes: sizes["weight"], inputs)
    raise ConfigError(f"compressed-tensors format {kind!r} is not supported; supported: {FORMATS}")


def inputs_of(group: dict) -> str | None:
    """`Format.inputs` of one entry of config_groups; what the file leaves out has compressed-tensors' defaults."""
    given = group.get("input_activations")
    if given is None:
        return None
    kind, bits, strategy = given.get("type", "int"), given.get("num_bits", 8), given.get("strategy") or "tensor"
    if kind not in ("int", "float") or strategy not in STRATEGIES or not isinstance(bits, int):
        told = {"type": kind, "num_bits": bits, "strategy": strategy}
        raise ConfigError(f"input_activations {told}: type must be int or float, strategy of {', '.join(STRATEGIES)}")
    plain = bits == 8 and given.get("symmetric", True) and strategy in ("token", "tensor")
    return kind if plain else None


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
        self.shapes = {
            n: s for n, s in sizes.items() if n not in taken and not n.endswith((*family.ignored, *KV_SCALES))
        }
        for module, parts in self.parts.items():
            try:
                self.shapes[f"{module}.weight"] = self.format.shape({part: sizes[n] for part, n in parts.items()})
            except (KeyError, IndexError):
                raise WeightsError(
                    f"{module} holds {', '.join(parts)}: not what its quantization_config says"
                ) from None

    def stored(self, module: str) -> Stored | Plain:
        return self.format.read({part: self.files[n].get_tensor(n) for part, n in self.parts[module].items()})

    def read(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in self.parts:
            return self.stored(module).dequantize()
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

    packed=False: float weights with the file's rounding in them. packed=True: its integers or FP8 numbers, in the
    linears of the table above (kernel as in `quantize_model`); linears whose groups are not neighbours stay float.
    Chapter 11's linears keep scales in bfloat16, those of a float16 file to within 0.4 %.
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
        found = stacked([checkpoint.stored(n) for n in names])
        return None if found is None else as_linear(found, linear, checkpoint.format.inputs, kernel)

    return replace_linears(model, make)


def as_linear(found: Stored | Plain, linear: nn.Linear, inputs: str | None, kernel: str) -> nn.Module | None:
    """The module docstring's table. linear: the same one in floating point; None: it stays."""
    device, unpack = linear.weight.device, kernel == "unpack"
    q = found.quantized()
    if q is not None:
        zero = None if q.zero is None else q.zero.to(device)
        q = Quantized(q.values.to(device), q.scale.to(device), zero, q.scheme)
        if inputs == "int" and isinstance(found, Plain) and q.scheme == CHANNEL:
            return W8A8Linear(linear, kernel="unpack" if unpack else "auto", quantized=q)
        return as_module(q, linear.bias, kernel)
    if inputs == "float" and isinstance(found, Plain):
        form = next(form for form in FP8_FORMATS.values() if form.dtype == found.values.dtype)
        scaled = Scaled(found.values.to(device), found.scale.to(device), form)
        return FP8Linear(linear, form, inputs=E4M3, emulate=unpack, scaled=scaled)
    return None


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
