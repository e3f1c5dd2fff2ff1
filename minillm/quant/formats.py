"""GGUF's block formats, bit by bit: Q8_0, Q4_0, Q4_1, Q4_K, read and made again.

Chapter 11. A tensor is a row of blocks, each complete in itself: scales first, then the codes. llama.cpp reads a
block with one pointer and no tables, which suits a CPU.

    format  weights  bytes  bits a weight  block                                             weight
    Q8_0         32     34      8.5        d f16, 32 x int8                                  d q
    Q4_0         32     18      4.5        d f16, 16 bytes of codes                          d (q - 8)
    Q4_1         32     20      5.0        d f16, m f16, 16 bytes of codes                   d q + m
    Q4_K        256    144      4.5        D f16, M f16, 12 bytes of 8 (s, t), 128 of codes  D s q - M t

Byte i of a 4-bit block of 32 holds weight i in its low half and weight i + 16 in its high half: two neighbours in
memory are never two neighbours of the row. Q4_0's d is the extreme weight / -8, with its sign, so that one side of
the range uses all of -8 .. 7. Q4_K quantises the scales once more: 8 groups of 32 have a 6-bit scale s and offset t
each, under two 16-bit ones for all 256: zero points at the price of Q4_0.

Values are bit-equal with the `gguf` package, which `model/gguf.py` loads files with; it has no Q4_K encoder, ours is
the plain one (round to the nearest, no search for a better scale as in llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal


@dataclass(frozen=True)
class Format:
    """decode: blocks [n, size] uint8 -> weights [n, weights] float32; encode: the way back."""

    name: str
    weights: int
    size: int
    decode: Callable[[Tensor], Tensor]
    encode: Callable[[Tensor], Tensor]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.size / self.weights


def dequantize_blocks(raw: Tensor, name: str) -> Tensor:
    """raw uint8 [..., bytes] -> float32 [..., weights]."""
    form = known(name)
    if raw.dtype != torch.uint8 or raw.shape[-1] % form.size:
        legal = f"must be uint8, its last axis a multiple of the {form.size} bytes of a {name} block"
        raise ParamsError(illegal("raw", (raw.dtype, tuple(raw.shape)), legal))
    return form.decode(raw.reshape(-1, form.size)).reshape(*raw.shape[:-1], -1)


def quantize_blocks(x: Tensor, name: str) -> Tensor:
    """x [..., weights] -> uint8 [..., bytes]."""
    form = known(name)
    if x.shape[-1] % form.weights:
        raise ParamsError(illegal("x.shape[-1]", x.shape[-1], f"must be a multiple of {form.weights} for {name}"))
    return form.encode(x.float().reshape(-1, form.weights)).reshape(*x.shape[:-1], -1)


def known(name: str) -> Format:
    if name not in FORMATS:
        raise ParamsError(illegal("name", name, f"must be one of {', '.join(FORMATS)}"))
    return FORMATS[name]


def half(raw: Tensor) -> Tensor:
    """Two bytes [n, 2] -> float32 [n, 1]."""
    return raw.contiguous().view(torch.float16).float()


def as_half(x: Tensor) -> Tensor:
    """float32 [n, 1] -> two bytes [n, 2]."""
    return x.to(torch.float16).view(torch.uint8)


def inverse(d: Tensor) -> Tensor:
    """1 / d, and 0 for 0: a block of zeros gets codes of 0."""
    return torch.where(d == 0, torch.zeros_like(d), 1 / d)


def nibbles(raw: Tensor) -> Tensor:
    """[n, 16] -> codes [n, 32]: low halves first, then high halves."""
    return torch.cat((raw & 15, raw >> 4), -1)


def as_nibbles(codes: Tensor) -> Tensor:
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return low | high << 4


def decode_q8_0(raw: Tensor) -> Tensor:
    return half(raw[:, :2]) * raw[:, 2:].contiguous().view(torch.int8).float()


def encode_q8_0(x: Tensor) -> Tensor:
    d = x.abs().amax(-1, keepdim=True) / 127
    steps = x * inverse(d)
    away = steps.abs().floor()  # halves go away from 0, as C's roundf does; torch.round would go to even
    away = (away + ((steps.abs() - away) >= 0.5)) * steps.sign()
    return torch.cat((as_half(d), away.to(torch.int8).view(torch.uint8)), -1)


def decode_q4_0(raw: Tensor) -> Tensor:
    return half(raw[:, :2]) * (nibbles(raw[:, 2:]).to(torch.int8) - 8).float()


def encode_q4_0(x: Tensor) -> Tensor:
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))  # [n, 1], with its sign
    d = extreme / -8
    codes = (x * inverse(d) + 8.5).trunc().clamp(0, 15)
    return torch.cat((as_half(d), as_nibbles(codes)), -1)


def decode_q4_1(raw: Tensor) -> Tensor:
    return half(raw[:, :2]) * nibbles(raw[:, 4:]).float() + half(raw[:, 2:4])


def encode_q4_1(x: Tensor) -> Tensor:
    low = x.amin(-1, keepdim=True)
    d = (x.amax(-1, keepdim=True) - low) / 15
    codes = ((x - low) * inverse(d) + 0.5).trunc().clamp(0, 15)
    return torch.cat((as_half(d), as_half(low), as_nibbles(codes)), -1)


def decode_q4_k(raw: Tensor) -> Tensor:
    big, big_offset = half(raw[:, :2]), half(raw[:, 2:4])  # [n, 1]
    scale, offset = unpack_six(raw[:, 4:16])  # [n, 8] each
    codes = raw[:, 16:].unflatten(-1, (4, 1, 32))  # 64 weights: the low halves of 32 bytes, then the high halves
    codes = torch.cat((codes & 15, codes >> 4), -2).flatten(1, 2).float()  # [n, 8, 32]
    return ((big * scale.float()).unsqueeze(-1) * codes - (big_offset * offset.float()).unsqueeze(-1)).flatten(1)


def encode_q4_k(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (8, 32))  # [n, 8, 32]
    low = groups.amin(-1).clamp(max=0)  # [n, 8]: an offset only ever takes away
    step = (groups.amax(-1).clamp(min=0) - low) / 15
    big, big_offset = (t.amax(-1, keepdim=True) / 63 for t in (step, -low))  # [n, 1]
    scale = (step * inverse(big)).round().clamp(0, 63)
    offset = (-low * inverse(big_offset)).round().clamp(0, 63)
    stored, stored_offset = half(as_half(big)) * scale, half(as_half(big_offset)) * offset  # as they will be read
    codes = (groups + stored_offset.unsqueeze(-1)) * inverse(stored).unsqueeze(-1)
    codes = codes.round().clamp(0, 15).to(torch.uint8).unflatten(1, (4, 2))  # [n, 4, 2, 32]
    packed = (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)  # [n, 128]
    return torch.cat((as_half(big), as_half(big_offset), pack_six(scale, offset), packed), -1)


def unpack_six(raw: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 offsets of 6 bits. Bytes 0-3 hold scales 0-3 and bytes 4-7 offsets 0-3, with the two
    top bits of scales and offsets 4-7 above them; bytes 8-11 hold the low halves of scales and offsets 4-7."""
    s, t, rest = raw.split(4, -1)
    return (
        torch.cat((s & 63, (rest & 15) | (s >> 2 & 48)), -1),
        torch.cat((t & 63, (rest >> 4) | (t >> 2 & 48)), -1),
    )


def pack_six(scale: Tensor, offset: Tensor) -> Tensor:
    s, t = scale.to(torch.uint8), offset.to(torch.uint8)
    (s, s_high), (t, t_high) = s.chunk(2, -1), t.chunk(2, -1)
    return torch.cat((s | s_high >> 4 << 6, t | t_high >> 4 << 6, (s_high & 15) | (t_high & 15) << 4), -1)


FORMATS = {
    form.name: form
    for form in (
        Format("Q8_0", 32, 34, decode_q8_0, encode_q8_0),
        Format("Q4_0", 32, 18, decode_q4_0, encode_q4_0),
        Format("Q4_1", 32, 20, decode_q4_1, encode_q4_1),
        Format("Q4_K", 256, 144, decode_q4_k, encode_q4_k),
    )
}
