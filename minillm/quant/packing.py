"""Packing: b-bit codes side by side in bytes, so that INT4 takes half a byte and not a whole one.

Chapter 11. Codes go in order, lowest bits first: one little-endian stream of bits along the last axis.

    8 bits  one a byte              4 bits  byte = code[0] | code[1] << 4
    2 bits  four a byte             3 bits  eight codes in three bytes (24 bits), some across a byte's edge

Read as little-endian int32 this is also how GPTQ's checkpoints keep 2, 4 and 8 bits. A symmetric value is negative
half of the time: pack its code, value + 2^(b-1) (`Quantized.codes`), or the sign bits run into the neighbour.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal


def word(bits: int) -> tuple[int, int]:
    """(codes, bytes) of the shortest run that ends at a byte's edge: 4 bits (2, 1), 3 bits (8, 3)."""
    if bits not in range(1, 9):
        raise ParamsError(illegal("bits", bits, "must be a whole number from 1 to 8"))
    length = math.lcm(bits, 8)
    return length // bits, length // 8


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` codes; count must fill whole words."""
    codes, size = word(bits)
    if count % codes:
        raise ParamsError(illegal("count", count, f"must be a multiple of {codes} at {bits} bits"))
    return count // codes * size


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [..., n], each in 0 .. 2^bits - 1 -> uint8 [..., n * bits / 8]."""
    packed_size(codes.shape[-1], bits)
    if codes.numel() and not (int(codes.min()) >= 0 and int(codes.max()) < 2**bits):
        legal = f"must lie in 0 .. {2**bits - 1}; signed values become codes by adding {2 ** (bits - 1)}"
        raise ParamsError(illegal("codes", (int(codes.min()), int(codes.max())), legal))
    if bits == 8:
        return codes.to(torch.uint8).contiguous()
    count, size = word(bits)
    wide = torch.int32 if 8 * size <= 24 else torch.int64
    shifts = bits * torch.arange(count, device=codes.device, dtype=wide)
    words = (codes.unflatten(-1, (-1, count)).to(wide) << shifts).sum(-1, keepdim=True, dtype=wide)  # [..., words, 1]
    return (words >> (8 * torch.arange(size, device=codes.device)) & 255).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., m] -> uint8 codes [..., m * 8 / bits]."""
    count, size = word(bits)
    if packed.dtype != torch.uint8:
        raise ParamsError(illegal("packed", packed.dtype, "must be uint8"))
    if packed.shape[-1] % size:
        raise ParamsError(illegal("packed", tuple(packed.shape), f"last axis must be a multiple of {size} bytes"))
    if bits == 8:
        return packed
    device = packed.device
    if size == 1:  # whole codes in a byte: no wider integer needed
        shifts = bits * torch.arange(count, device=device, dtype=torch.uint8)
        return (packed.unsqueeze(-1) >> shifts & (2**bits - 1)).flatten(-2)
    wide = torch.int32 if 8 * size <= 24 else torch.int64
    bytes_ = packed.unflatten(-1, (-1, size)).to(wide) << (8 * torch.arange(size, device=device, dtype=wide))
    words = bytes_.sum(-1, keepdim=True, dtype=wide)  # [..., words, 1]
    shifts = bits * torch.arange(count, device=device, dtype=wide)
    return (words >> shifts & (2**bits - 1)).to(torch.uint8).flatten(-2)
