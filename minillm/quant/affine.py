"""Affine quantisation: a tensor becomes small integers, and a scale and a zero point for each block of it.

Chapter 11. Jacob et al. 2018 (arXiv:1712.05877), in its notation r = S (q - Z): x ~ scale * (values - zero).

    symmetric    values in [-(2^(b-1) - 1), 2^(b-1) - 1], zero = 0:     scale = max |x| / (2^(b-1) - 1)
    asymmetric   values in [0, 2^b - 1], zero = -min / scale:           scale = (max - min) / (2^b - 1)

A symmetric range leaves one of the 2^b codes unused; in return nothing but a scale is stored and 0 stays 0. The zero
point is a whole number, so that 0 stays 0 here too (padding, ReLU): then the range is first stretched to hold 0, and
rounding the zero point can shift it by half a step. `zero="float"` keeps it as it falls, as GGUF's Q4_1 does.

Rounding to the nearest (RTN) errs by at most scale / 2, where nothing is clipped. What shares a scale:

    "tensor"   everything        "channel"  each row of a weight [out, in]
    "group"    group_size neighbours in a row        "token"  each row of an activation [..., tokens, hidden]

"channel" and "token" are the same arithmetic, along the last axis; the two names say what the rows are.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal

GRANULARITIES = ("tensor", "channel", "group", "token")


@dataclass(frozen=True)
class Scheme:
    """How to quantise. group_size: numbers that share a scale, with granularity "group" only."""

    bits: int = 8
    symmetric: bool = True
    granularity: str = "channel"
    group_size: int | None = None
    zero: str = "integer"  # or "float": the zero point is not rounded (asymmetric only)

    def __post_init__(self) -> None:
        if not isinstance(self.bits, Integral) or isinstance(self.bits, bool) or not 2 <= self.bits <= 8:
            raise ParamsError(illegal("bits", self.bits, "must be a whole number from 2 to 8"))
        if not isinstance(self.symmetric, bool):
            raise ParamsError(illegal("symmetric", self.symmetric, "must be True or False"))
        if self.granularity not in GRANULARITIES:
            raise ParamsError(illegal("granularity", self.granularity, f"must be one of {', '.join(GRANULARITIES)}"))
        grouped, size = self.granularity == "group", self.group_size
        if grouped and (not isinstance(size, Integral) or isinstance(size, bool) or size < 1):
            raise ParamsError(illegal("group_size", size, 'must be at least 1 with granularity="group"'))
        if not grouped and size is not None:
            raise ParamsError(illegal("group_size", size, 'is used with granularity="group" only'))
        if self.zero not in ("integer", "float"):
            raise ParamsError(illegal("zero", self.zero, 'must be "integer" or "float"'))
        if self.symmetric and self.zero == "float":
            raise ParamsError(illegal("zero", self.zero, "a symmetric scheme has no zero point"))

    @property
    def low(self) -> int:
        """Smallest integer that occurs."""
        return -self.high if self.symmetric else 0

    @property
    def high(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    def block(self, shape: tuple[int, ...]) -> int:
        """How many numbers of a tensor of this shape share a scale."""
        if self.granularity == "tensor":
            return max(1, torch.Size(shape).numel())
        return self.group_size if self.granularity == "group" else shape[-1]

    def bits_per_weight(self, shape: tuple[int, ...], scale_bits: int = 16, zero_bits: int = 16) -> float:
        """What one number takes, its share of scale and (asymmetric) zero point included."""
        extra = scale_bits + (0 if self.symmetric else zero_bits)
        return self.bits + extra / self.block(shape)


@dataclass
class Quantized:
    """values: int8 (symmetric) or uint8, in the shape of x. scale, zero: [..., blocks], zero None if symmetric."""

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme

    def codes(self) -> Tensor:
        """uint8, from 0 to 2^bits - 1: what is packed. Symmetric values move up by 2^(bits - 1)."""
        return to_codes(self.values, self.scheme)

    def dequantize(self) -> Tensor:
        return dequantize(self)


def quantize(x: Tensor, scheme: Scheme) -> Quantized:
    """Round to the nearest. Computed in float32 (float64 for a float64 x); scale and zero have that type."""
    if not x.is_floating_point():
        raise ParamsError(illegal("x", x.dtype, "must be a tensor of floating-point numbers"))
    blocks = to_blocks(x if x.dtype == torch.float64 else x.float(), scheme)  # [..., blocks, size]
    scale, zero = parameters(blocks, scheme)  # [..., blocks], the same or None
    return Quantized(round_to(blocks, scale, zero, scheme).view(x.shape), scale, zero, scheme)


def parameters(blocks: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """blocks [..., size] -> (scale, zero), [...] each; zero is None for a symmetric scheme."""
    tiny = torch.finfo(blocks.dtype).tiny
    if scheme.symmetric:
        return (blocks.abs().amax(-1) / scheme.high).clamp(min=tiny), None
    low, high = blocks.amin(-1), blocks.amax(-1)  # [...]
    if scheme.zero == "float":  # the range as it is; a block of one value gets a step of its own size
        scale = torch.where(high > low, (high - low) / scheme.high, low.abs()).clamp(min=tiny)
        return scale, -low / scale
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / scheme.high).clamp(min=tiny)
    return scale, (-low / scale).round().clamp(0, scheme.high)


def round_to(blocks: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """Integers of blocks [..., size] under given scale and zero [...]: what GPTQ and AWQ call too."""
    steps = blocks / scale.unsqueeze(-1)
    if zero is not None:
        steps = steps + zero.unsqueeze(-1)
    return steps.round_().clamp_(scheme.low, scheme.high).to(torch.int8 if scheme.symmetric else torch.uint8)


def dequantize(q: Quantized) -> Tensor:
    """scale * (values - zero), in the shape of values and the type of scale."""
    blocks = to_blocks(q.values, q.scheme).to(q.scale.dtype)  # [..., blocks, size]
    if q.zero is not None:
        blocks = blocks - q.zero.unsqueeze(-1)
    return (blocks * q.scale.unsqueeze(-1)).view(q.values.shape)


def fake_quantize(x: Tensor, scheme: Scheme) -> Tensor:
    """What is left of x after a round trip, in x's own type."""
    return dequantize(quantize(x, scheme)).to(x.dtype)


def to_blocks(x: Tensor, scheme: Scheme) -> Tensor:
    """[..., n] -> [..., blocks, size]: the last axis of the result shares a scale."""
    if x.dim() == 0 or x.numel() == 0:
        raise ParamsError(illegal("x", tuple(x.shape), "must have at least one axis and one number"))
    size = scheme.block(x.shape)
    if scheme.granularity == "tensor":
        return x.reshape(1, size)
    if x.shape[-1] % size:
        raise ParamsError(illegal("group_size", size, f"must divide the last axis, {x.shape[-1]}"))
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def to_codes(values: Tensor, scheme: Scheme) -> Tensor:
    """int8 of a symmetric scheme -> uint8 codes, -2^(bits - 1) becoming 0; the others are codes already."""
    return (values.to(torch.int16) + 2 ** (scheme.bits - 1)).to(torch.uint8) if scheme.symmetric else values


def from_codes(codes: Tensor, scheme: Scheme) -> Tensor:
    return (codes.to(torch.int16) - 2 ** (scheme.bits - 1)).to(torch.int8) if scheme.symmetric else codes
