"""How quantised checkpoints lay out a linear's integers: AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors.

Chapter 12. All keep codes 0 .. 2^b - 1 as a stream of b bits, lowest first, in int32 words, and a scale and a zero
point a group; w = scale * (code - zero). They differ in what runs along the stream:

    format              words run along           scales, zeros         a zero point is stored as
    gptq                qweight [in*b/32, out]    [groups, out]         zero - 1 (version 2: zero)
    awq (GEMM), b = 4   qweight [in, out/8]       [groups, out]         zero; columns 0 2 4 6 1 3 5 7 of every eight
    pack-quantized      [out, ceil(in*b/32)]      [out, groups]         zero, packed along out; symmetric: 2^(b-1)
    int-, float-quant.  weight int8 or FP8        [out, 1], [1]         zero, or none

GPTQ's g_idx names the group of each input channel: with act-order and no static groups they are not neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.errors import WeightsError
from minillm.quant.affine import Quantized, Scheme, from_codes
from minillm.quant.packing import pack, unpack

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ_ORDER[i] of its eight


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """codes [rows, n] -> int32 [rows, ceil(n * bits / 32)], the last word filled up with zeros."""
    count = codes.shape[-1]
    stream = pack(F.pad(codes, (0, -count % 32)), bits)  # 32 codes fill `bits` words
    words = stream.flatten().view(torch.int32).view(len(codes), -1)
    return words[:, : -(-count * bits // 32)].contiguous()


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, words] -> uint8 codes [rows, count]."""
    if words.dtype != torch.int32 or words.dim() != 2 or words.shape[-1] != -(-count * bits // 32):
        size = f"{words.dtype} {list(words.shape)}"
        raise WeightsError(f"{count} codes of {bits} bits fill {-(-count * bits // 32)} int32 words, not {size}")
    whole = F.pad(words, (0, -words.shape[-1] % bits))
    return unpack(whole.contiguous().view(torch.uint8), bits)[:, :count]


@dataclass
class Stored:
    """codes uint8 [out, in]; scale, zero [out, groups] in float32; group [in]: the group of each input channel."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    group: Tensor
    bits: int

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        return (self.codes.float() - self.zero[:, self.group]) * self.scale[:, self.group]

    def quantized(self) -> Quantized | None:
        """As chapter 11's linears take it; None where the groups are not neighbours."""
        groups, width = self.scale.shape[1], self.codes.shape[1]
        size = -(-width // groups)
        if width % size or not torch.equal(self.group, torch.arange(width, device=self.group.device) // size):
            return None
        symmetric = bool((self.zero == 2 ** (self.bits - 1)).all())
        shape = ("channel",) if groups == 1 else ("group", size)
        scheme = Scheme(self.bits, symmetric, *shape)
        if symmetric:
            return Quantized(from_codes(self.codes, scheme), self.scale, None, scheme)
        return Quantized(self.codes, self.scale, self.zero, scheme)


PLAIN = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Plain:
    """values int8 or FP8 [out, in]; scale, zero float32 [out, 1], zero None if it is 0; bits: of an integer."""

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        values = self.values.float()
        return (values if self.zero is None else values - self.zero) * self.scale

    def quantized(self) -> Quantized | None:
        """As chapter 11's linears take it; None for FP8."""
        if self.values.dtype != torch.int8:
            return None
        if self.zero is None:
            return Quantized(self.values, self.scale, None, Scheme(self.bits, True, "channel"))
        middle = 2 ** (self.bits - 1)  # int8 codes count from -2^(bits - 1)
        codes = (self.values.to(torch.int16) + middle).to(torch.uint8)
        return Quantized(codes, self.scale, self.zero + middle, Scheme(self.bits, False, "channel"))


def stacked(found: list[Stored | Plain]) -> Stored | Plain | None:
    """Their rows, one below the other: q, k and v as one linear. None where kind, bits or groups differ."""
    first = found[0]
    if any(type(each) is not type(first) or each.bits != first.bits for each in found):
        return None
    if isinstance(first, Stored):
        if any(not torch.equal(each.group, first.group) for each in found):
            return None
        codes, scale, zero = (
            torch.cat([getattr(each, part) for each in found]) for part in ("codes", "scale", "zero")
        )
        return Stored(codes, scale, zero, first.group, first.bits)
    if any(each.values.dtype != first.values.dtype for each in found):
        return None
    values, scale = (torch.cat([getattr(each, part) for each in found]) for part in ("values", "scale"))
    zeros = [each.scale * 0 if each.zero is None else each.zero for each in found]
    return Plain(values, scale, None if all(each.zero is None for each in found) else torch.cat(zeros), first.bits)


def read_gptq(parts: Mapping[str, Tensor], bits: int, version: int = 1) -> Stored:
    """parts: qweight, qzeros, scales, and g_idx where there is one."""
    need(parts, "qweight", "qzeros", "scales")
    scale = parts["scales"].float().T.contiguous()  # [out, groups]
    out, groups = scale.shape
    width = parts["qweight"].shape[0] * 32 // bits
    codes = unpack_words(parts["qweight"].T, bits, width)
    zero = unpack_words(parts["qzeros"], bits, out).T.float()
    if version == 1:
        zero = (zero + 1) % 2**bits  # what was packed is zero - 1, in `bits` bits
    group = parts.get("g_idx", torch.arange(width) // -(-width // groups)).long()
    if group.shape != (width,) or int(group.min()) < 0 or int(group.max()) >= groups:
        raise WeightsError(f"g_idx must name one of {groups} groups for each of {width} input channels")
    return Stored(codes, scale, zero.contiguous(), group.to(codes.device), bits)


def write_gptq(q: Quantized, version: int = 1) -> dict[str, Tensor]:
    """The inverse of `read_gptq`. A zero point of 0 cannot be told from 2^b in version 1's b bits: it wraps."""
    codes, scale, zero = in_codes(q)
    bits, (out, width) = q.scheme.bits, codes.shape
    zero = (zero.to(torch.int16) - int(version == 1)) % 2**bits
    return {
        "qweight": pack_words(codes, bits).T.contiguous(),
        "qzeros": pack_words(zero.T.to(torch.uint8), bits),
        "scales": scale.T.to(torch.float16).contiguous(),
        "g_idx": (torch.arange(width) // q.scheme.block((out, width))).int(),
    }


def read_awq(parts: Mapping[str, Tensor]) -> Stored:
    """parts: qweight, qzeros, scales of AutoAWQ's GEMM version, which has 4 bits only."""
    need(parts, "qweight", "qzeros", "scales")
    scale = parts["scales"].float().T.contiguous()  # [out, groups]
    out, groups = scale.shape
    order = torch.tensor(AWQ_ORDER).argsort()  # column c of eight lies in nibble order[c]

    def columns(words: Tensor) -> Tensor:  # [rows, out / 8] -> [rows, out]
        return unpack_words(words, 4, out).unflatten(-1, (-1, 8))[..., order].flatten(-2)

    width = parts["qweight"].shape[0]
    codes, zero = columns(parts["qweight"]).T.contiguous(), columns(parts["qzeros"]).T.float().contiguous()
    return Stored(codes, scale, zero, torch.arange(width) // -(-width // groups), 4)


def read_packed(parts: Mapping[str, Tensor], bits: int) -> Stored:
    """compressed-tensors' pack-quantized. parts: weight_packed, weight_scale, weight_shape; weight_zero_point."""
    need(parts, "weight_packed", "weight_scale", "weight_shape")
    out, width = parts["weight_shape"].tolist()
    scale = parts["weight_scale"].float().reshape(-1, parts["weight_scale"].shape[-1])
    scale = scale.expand(out, -1).contiguous()  # one scale in all, or a row's groups
    codes = unpack_words(parts["weight_packed"], bits, width)
    zero = torch.full_like(scale, 2 ** (bits - 1))
    if "weight_zero_point" in parts:
        zero = unpack_words(parts["weight_zero_point"].T, bits, out).T.float().contiguous()
    group = parts.get("weight_g_idx", torch.arange(width) // -(-width // scale.shape[1])).long()
    return Stored(codes, scale, zero, group.to(codes.device), bits)


def write_packed(q: Quantized) -> dict[str, Tensor]:
    """The inverse of `read_packed`."""
    codes, scale, zero = in_codes(q)
    parts = {
        "weight_packed": pack_words(codes, q.scheme.bits),
        "weight_scale": scale.to(torch.bfloat16) if torch.equal(scale, scale.bfloat16().float()) else scale,
        "weight_shape": torch.tensor(codes.shape),
    }
    if not q.scheme.symmetric:
        parts["weight_zero_point"] = pack_words(zero.T.to(torch.uint8), q.scheme.bits).T.contiguous()
    return parts


def read_plain(parts: Mapping[str, Tensor], bits: int = 8) -> Plain:
    """compressed-tensors' int-quantized and float-quantized: INT8 or FP8 numbers with a scale a row, or one in all.

    bits: those that integers use, each in a byte. Scales of inputs are left where they are: see `checkpoints.py`.
    """
    need(parts, "weight", "weight_scale")
    weight, scale, zero = parts["weight"], parts["weight_scale"].float(), parts.get("weight_zero_point")
    if weight.dtype not in PLAIN:
        raise WeightsError(f"a quantised weight is {weight.dtype}; supported: {', '.join(str(d) for d in PLAIN)}")
    if weight.dim() != 2 or scale.numel() not in (1, len(weight)):
        raise WeightsError(f"weight_scale has shape {list(scale.shape)}; supported: one, or one a row")
    rows = scale.reshape(-1, 1).expand(len(weight), 1).contiguous()
    if zero is None or not zero.any():  # symmetric files of some versions store zeros
        return Plain(weight, rows, None, bits)
    if zero.numel() != scale.numel():
        raise WeightsError(f"weight_zero_point has shape {list(zero.shape)}, weight_scale {list(scale.shape)}")
    return Plain(weight, rows, zero.float().reshape(-1, 1).expand(len(weight), 1).contiguous(), bits)


def in_codes(q: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [out, in], scale [out, groups], zero [out, groups]), zero among the codes."""
    if q.scheme.zero != "integer" or q.scheme.granularity == "tensor":
        raise WeightsError("these formats hold a whole zero point and scales by row or group")
    zero = torch.full_like(q.scale, 2 ** (q.scheme.bits - 1)) if q.zero is None else q.zero
    return q.codes(), q.scale, zero


def need(parts: Mapping[str, Tensor], *names: str) -> None:
    absent = [name for name in names if name not in parts]
    if absent:
        raise WeightsError(f"a quantised linear lacks {', '.join(absent)}; it has {', '.join(sorted(parts))}")
