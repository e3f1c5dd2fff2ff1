"""FP8: eight bits as sign, exponent and mantissa. E4M3 for weights and activations, E5M2 for a wider range.

Chapter 13. Micikevicius et al. 2022, *FP8 formats for deep learning* (arXiv:2209.05433), in the variants of the Open
Compute Project that torch calls float8_e4m3fn and float8_e5m2:

    format   bits S.E.M   bias   largest   smallest normal, subnormal   above the largest
    e4m3     1.4.3        7      448       2^-6,  2^-9                  no infinity; one NaN a sign, S.1111.111
    e5m2     1.5.2        15     57344     2^-14, 2^-16                 infinity and NaN, as in IEEE 754

A float's step grows with its size: between 2^e and 2^(e+1) it is 2^(e - mantissa bits). So E4M3 errs by at most 1/17
of each number, small or large, where an integer's step is the same for all numbers that share a scale.

What a cast does above the largest value depends on who casts: torch's own gives infinity for E5M2, and for E4M3 NaN
before torch 2.12, 448 since then. Here every cast saturates, +-infinity to +-largest, under every version; NaN stays
NaN. A scale (absmax / largest, a row or a tensor) puts the numbers where the format has its range.

The product runs on FP8 matrix units where `torch._scaled_mm` has them (compute capability 9.0; 8.9 with one scale a
tensor). Elsewhere it is emulated: the values are FP8, products and sums float32; `why_emulated` says so in words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import replace_linears
from minillm.quant.linear import linears

GRANULARITIES = ("row", "tensor")


@dataclass(frozen=True)
class Float8:
    """One format. least: the exponent of the smallest normal number; largest: the largest finite number."""

    name: str
    dtype: torch.dtype
    mantissa: int
    least: int
    largest: float

    @property
    def steps(self) -> int:
        """Numbers from one power of two to the next."""
        return 2**self.mantissa


E4M3 = Float8("e4m3", torch.float8_e4m3fn, 3, -6, 448.0)
E5M2 = Float8("e5m2", torch.float8_e5m2, 2, -14, 57344.0)
FORMATS = {form.name: form for form in (E4M3, E5M2)}


def as_format(form: str | Float8) -> Float8:
    if isinstance(form, Float8):
        return form
    if not isinstance(form, str) or form not in FORMATS:
        raise ParamsError(illegal("form", form, f"must be one of {', '.join(FORMATS)}"))
    return FORMATS[form]


def cast(x: Tensor, form: Float8 = E4M3) -> Tensor:
    """x in FP8, to the nearest (ties to even), saturating: the same under every version of torch."""
    return x.clamp(-form.largest, form.largest).to(form.dtype)


def cast_by_hand(x: Tensor, form: Float8 = E4M3) -> Tensor:
    """The bits of `cast(x)`, uint8, by arithmetic: what the hardware does. x: float32, bfloat16 or float16.

    The code counts numbers upwards from 0: `steps` subnormal ones, then `steps` for every power of two.
    """
    size = x.float().abs().clamp(max=form.largest)  # NaN stays NaN
    nan = size.isnan()
    size = size.masked_fill(nan, 0.0)
    exponent = (size.view(torch.int32) >> 23) - 127  # float32's own: 2^exponent <= size < 2^(exponent + 1)
    exponent = exponent.clamp(min=form.least)  # below the normal numbers the steps stay equal
    step = (exponent - form.mantissa + 127 << 23).view(torch.float32)  # 2^(exponent - mantissa), bit by bit
    count = (size / step).round().int()  # exact division; ties to even; 2 * steps carries into the next exponent
    code = (exponent - form.least) * form.steps + count
    code = code.masked_fill(nan, 0x7F)
    return (code | x.signbit().int() << 7).to(torch.uint8)


@dataclass
class Scaled:
    """x ~ values * scale. values: FP8 [rows, n]; scale: float32 [rows, 1], or [1, 1] for one in all."""

    values: Tensor
    scale: Tensor
    form: Float8

    def dequantize(self) -> Tensor:
        return self.values.float() * self.scale


def quantize_fp8(x: Tensor, form: str | Float8 = E4M3, granularity: str = "row") -> Scaled:
    """x [rows, n], scaled so that the largest of each row, or of all, becomes the largest of the format."""
    form = as_format(form)
    check_granularity("granularity", granularity)
    if x.dim() != 2 or not x.is_floating_point():
        raise ParamsError(illegal("x", f"{x.dtype} {list(x.shape)}", "must be floating-point numbers [rows, n]"))
    x = x.float()
    if not x.numel():
        return Scaled(x.to(form.dtype), x.new_ones(len(x) if granularity == "row" else 1, 1), form)
    largest = x.abs().amax(-1, keepdim=True) if granularity == "row" else x.abs().amax().view(1, 1)
    scale = (largest / form.largest).clamp(min=torch.finfo(torch.float32).tiny)
    return Scaled(cast(x / scale, form), scale, form)


def why_emulated(device: torch.device | str, a: Scaled | None = None, w: Scaled | None = None) -> str | None:
    """Why a @ w.T is not run on FP8 matrix units; None where it is. Without a and w: what the device can do."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"torch has no FP8 matrix units on this {device.type}: products in float32"
    capability = torch.cuda.get_device_capability(device)
    rows = a is None or w is None or a.scale.numel() > 1 or w.scale.numel() > 1
    needed = (9, 0) if rows else (8, 9)
    if capability < needed:
        which = "with a scale a row " if rows else ""
        return f"FP8 products {which}need compute capability {needed[0]}.{needed[1]}, this is {capability}"
    if a is not None and w is not None:
        if a.form == w.form == E5M2:
            return "no matrix unit multiplies E5M2 by E5M2"
        if a.values.shape[1] % 16 or len(w.values) % 16:
            return f"sizes must be multiples of 16: {a.values.shape[1]} inputs, {len(w.values)} outputs"
        if rows and w.form == E5M2:
            return "products with a scale a row want E4M3 weights"
        if rows and not (a.scale.numel() == len(a.values) and w.scale.numel() == len(w.values)):
            return "scales must be by row on both sides, or one in all on both"
    return None


def scaled_matmul(a: Scaled, w: Scaled, dtype: torch.dtype = torch.float32, emulate: bool = False) -> Tensor:
    """(a @ w.T) with the scales put back, [rows, out] in dtype. On matrix units the result is first bfloat16."""
    if not len(a.values):
        return torch.zeros(0, len(w.values), dtype=dtype, device=a.values.device)
    if emulate or why_emulated(a.values.device, a, w) is not None:
        y = a.values.float() @ w.values.float().T  # [rows, out]; products of 8-bit floats are exact
        return (y * a.scale * w.scale.T).to(dtype)
    one = a.scale.numel() == 1 and w.scale.numel() == 1
    scales = (a.scale.view(()), w.scale.view(())) if one else (a.scale, w.scale.T)
    y = torch._scaled_mm(a.values, w.values.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    return y.to(dtype)


class FP8Linear(nn.Module):
    """y = x @ W.T + b, both in FP8. x [..., in] -> [..., out] in x's dtype. Bytes: out * in + 4 * scales.

    granularity: a scale a row ("row": a token, an output) or one in all ("tensor"), for both. Inference only. scaled:
    the weight's FP8 numbers where they are known; by default it is rounded to the nearest here.
    """

    def __init__(
        self,
        linear: nn.Linear,
        form: str | Float8 = E4M3,
        granularity: str = "row",
        inputs: str | Float8 | None = None,
        emulate: bool = False,
        scaled: Scaled | None = None,
    ) -> None:
        super().__init__()
        self.form, self.granularity, self.emulate = as_format(form), granularity, emulate
        self.input_form = self.form if inputs is None else as_format(inputs)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        check_finite(weight)
        q = quantize_fp8(weight, self.form, granularity) if scaled is None else scaled
        scales = [self.out_features if granularity == "row" else 1, 1]
        if q.form != self.form or list(q.scale.shape) != scales:
            legal = f"must be {self.form.name} with scales {scales}"
            raise ParamsError(illegal("scaled", f"{q.form.name}, scales {list(q.scale.shape)}", legal))
        self.register_buffer("values", q.values)  # [out, in]
        self.register_buffer("scale", q.scale)  # [out, 1] or [1, 1]
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    @property
    def weight_scaled(self) -> Scaled:
        return Scaled(self.values, self.scale, self.form)

    @property
    def emulated(self) -> str | None:
        """Why this layer's product is emulated, in words; None where it runs on FP8 matrix units."""
        if self.emulate:
            return "asked for"
        row = torch.zeros(1, self.in_features, device=self.values.device)
        return why_emulated(
            self.values.device, quantize_fp8(row, self.input_form, self.granularity), self.weight_scaled
        )

    def forward(self, x: Tensor) -> Tensor:
        q = quantize_fp8(x.reshape(-1, self.in_features), self.input_form, self.granularity)  # [rows, in]
        y = scaled_matmul(q, self.weight_scaled, x.dtype, self.emulate)  # [rows, out]
        y = y if self.bias is None else (y + self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


def fp8_model(
    model: nn.Module,
    form: str | Float8 = E4M3,
    granularity: str = "row",
    keep: Iterable[str] = ("head",),
    emulate: bool = False,
) -> nn.Module:
    """Replace every nn.Linear but those in `keep`, in place; returns the model."""
    form = as_format(form)
    check_granularity("granularity", granularity)
    chosen = linears(model, (keep,) if isinstance(keep, str) else tuple(keep))

    def make(name: str, linear: nn.Linear) -> nn.Module | None:
        return FP8Linear(linear, form, granularity, emulate=emulate) if name in chosen else None

    return replace_linears(model, make)


def weight_only(linear: nn.Linear, form: str | Float8 = E4M3, granularity: str = "row") -> Tensor:
    """The weight after a round trip through FP8, for products in 16 or 32 bits."""
    return quantize_fp8(linear.weight.detach(), form, granularity).dequantize().to(linear.weight.dtype)


def numbers(form: str | Float8) -> Tensor:
    """Every finite number of the format that is not negative, in order, float32."""
    every = torch.arange(128, dtype=torch.uint8).view(as_format(form).dtype).float()
    return every[every.isfinite()]


def check_granularity(name: str, value: str) -> None:
    if value not in GRANULARITIES:
        raise ParamsError(illegal(name, value, f"must be one of {', '.join(GRANULARITIES)}"))


def check_finite(weight: Tensor) -> None:
    if not torch.isfinite(weight).all():
        raise ParamsError("the weight holds NaN or infinity: it cannot be quantised")
