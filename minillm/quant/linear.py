"""Weight-only linears: integers in memory, floating point in the product (W8A16, W4A16, and any other width).

Chapter 11. Decode reads every weight once a token, so a weight of half the bytes takes half the time to read; the
product is done in 16 or 32 bits as before, on weights dequantised on their way in. `QuantLinear` is the plain form:
it unpacks the whole matrix, then multiplies. It is right everywhere and fast nowhere. `cpu_linear.py` and
`triton_linear.py` hold the forms that unpack in registers; `quantize_model` picks one for the device.

The integers come from a method: "rtn" rounds each weight to the nearest; chapter 12's methods choose with more care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import replace_linears
from minillm.quant.affine import Quantized, Scheme, dequantize, from_codes, parameters, round_to, to_blocks
from minillm.quant.packing import pack, unpack, word

SCALE_DTYPE = torch.bfloat16  # two bytes a scale, and float32's range: no scale becomes 0
KERNELS = ("auto", "unpack", "cpu", "triton")
Method = Callable[[str, nn.Linear, Scheme], Quantized]


class QuantLinear(nn.Module):
    """y = x @ W.T + b, W kept as packed codes, scales and zero points. x [..., in] -> [..., out]. Inference only.

    packed: uint8 [out, in * bits / 8]. scale: bfloat16 [out, blocks] ([1] for one scale in all); zero: uint8, or
    bfloat16 where it is no whole number, or None.
    """

    def __init__(self, q: Quantized, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = q.values.shape
        self.scheme = q.scheme
        if self.in_features % word(q.scheme.bits)[0]:
            legal = f"must be a multiple of {word(q.scheme.bits)[0]} to be packed at {q.scheme.bits} bits"
            raise ParamsError(illegal("in_features", self.in_features, legal))
        if not torch.isfinite(q.scale).all():
            raise ParamsError("the weight holds NaN or infinity: it cannot be quantised")
        zero = q.zero
        if zero is not None:
            zero = zero.to(torch.uint8 if q.scheme.zero == "integer" else SCALE_DTYPE)
        self.register_buffer("packed", pack(q.codes(), q.scheme.bits))
        self.register_buffer("scale", q.scale.to(SCALE_DTYPE))
        self.register_buffer("zero", zero)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def quantized(self) -> Quantized:
        """The integers, and scale and zero in float32."""
        values = from_codes(unpack(self.packed, self.scheme.bits), self.scheme)
        zero = None if self.zero is None else self.zero.float()
        return Quantized(values, self.scale.float(), zero, self.scheme)

    def weight(self) -> Tensor:
        """The dequantised matrix, float32 [out, in]."""
        return dequantize(self.quantized())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight().to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        s = self.scheme
        return (
            f"{self.in_features} -> {self.out_features}, {s.bits} bits, {s.granularity} {s.group_size or ''}".strip()
        )


def rtn(name: str, linear: nn.Linear, scheme: Scheme) -> Quantized:
    """Round to the nearest, under a scale that is first rounded to the 16 bits it is stored in."""
    weight = linear.weight.detach()
    blocks = to_blocks(weight.float(), scheme)  # [out, blocks, size]
    scale, zero = stored_parameters(blocks, scheme)
    return Quantized(round_to(blocks, scale, zero, scheme).view(weight.shape), scale, zero, scheme)


def stored_parameters(blocks: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """`affine.parameters`, as QuantLinear will keep them: the integers are then chosen for the scale that is used."""
    scale, zero = parameters(blocks, scheme)
    scale = scale.to(SCALE_DTYPE).float()
    return scale, zero if zero is None or scheme.zero == "integer" else zero.to(SCALE_DTYPE).float()


METHODS: dict[str, Method] = {"rtn": rtn}


def quantize_model(
    model: nn.Module,
    method: str | Method = "rtn",
    bits: int = 4,
    group_size: int | None = 32,
    symmetric: bool = True,
    zero: str = "integer",
    keep: Iterable[str] = ("head",),
    kernel: str = "auto",
) -> nn.Module:
    """Replace every nn.Linear, in place; returns the model.

    bits: 2 to 8. group_size: weights that share a scale; None: a scale a row. zero: see `Scheme`, if not symmetric.
    keep: names or patterns ("head", "layers.0.*") that stay as they are. method: "rtn", or a function of (name,
    linear, scheme) that returns a Quantized. kernel: "unpack" is the plain form, "cpu" and "triton" the fast ones,
    "auto" the fast one where the device and the scheme have it.
    """
    if isinstance(method, str) and method not in METHODS:
        raise ParamsError(illegal("method", method, f"must be a function or one of {', '.join(METHODS)}"))
    if kernel not in KERNELS:
        raise ParamsError(illegal("kernel", kernel, f"must be one of {', '.join(KERNELS)}"))
    granularity = "channel" if group_size is None else "group"
    scheme = Scheme(bits, symmetric, granularity, group_size, zero)
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    chosen = linears(model, keep)
    for name, linear in chosen.items():  # all is checked before anything is changed
        if linear.in_features % scheme.block((linear.in_features,)):
            raise ParamsError(illegal("group_size", group_size, f"must divide {name}'s {linear.in_features} inputs"))
    choose = METHODS[method] if isinstance(method, str) else method

    def make(name: str, linear: nn.Linear) -> nn.Module | None:
        return as_module(choose(name, linear, scheme), linear.bias, kernel) if name in chosen else None

    return replace_linears(model, make)


def linears(model: nn.Module, keep: Iterable[str] = ()) -> dict[str, nn.Linear]:
    """Every nn.Linear by name, without those whose name fits a pattern of keep; each pattern must fit one."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    every = [name for name, _ in model.named_modules()]
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ParamsError(illegal("keep", pattern, f"fits no layer; there are {', '.join(list(found)[:4])} ..."))
    return {name: m for name, m in found.items() if not any(fnmatchcase(name, pattern) for pattern in keep)}


def as_module(q: Quantized, bias: Tensor | None = None, kernel: str = "auto") -> nn.Module:
    """The module that computes with these integers on the device where they are."""
    from minillm.quant.cpu_linear import packed_for_cpu

    plain, device = QuantLinear(q, bias), q.values.device.type
    if kernel == "unpack":
        return plain
    if kernel == "triton" or (kernel == "auto" and device == "cuda"):
        from minillm.quant.triton_linear import packed_for_triton

        fast = packed_for_triton(plain)
    else:
        fast = packed_for_cpu(plain) if device == "cpu" else None
    if fast is None and kernel != "auto":
        s = q.scheme
        what = f"{s.bits} bits, {s.granularity} {s.group_size or ''}, {tuple(q.values.shape)}, on {device}"
        raise ParamsError(illegal("kernel", kernel, f"has no form for {what}; use auto or unpack"))
    return fast or plain


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {(s := t.untyped_storage()).data_ptr() or id(t): s.nbytes() for t in tensors}
    return sum(storages.values())
