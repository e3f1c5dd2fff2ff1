"""Quantised linears as plain multiply and sum, for the compiled step of chapter 10: one pass over the integers.

Chapter 11. torch's own kernels take 16-bit activations and are called from outside the graph; these forms are
compiled with what lies around them, for one or two rows of x of any type. What costs here is not the reading but the
work on each integer before it can be multiplied, so two forms read 32 bits at a time and never shift:

    word & (15 << 4 i)  is  nibble i, times 16 ** i; so multiply it by x / 16 ** i, made once a call

An integer of up to 24 significant bits is exact as a float32, and so is division by a power of two. Codes must not be
negative for that, except the top one, whose sign is the word's: the others carry a bias, which is taken off once for
all rows of W, as bias * sum of x.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillm.model.row_linear import side_by_side, written_out

LANES = 8  # 32-bit words in a 256-bit register
HALVES = {1: (range(8),), 2: (range(4), range(4, 8))}  # scales a unit -> the nibbles under each
BLOCK = 32  # rows of W that torch packs together for 256-bit registers
SIGNS = 0x80808080 - (1 << 32)  # flips the top bit of each byte: int8 becomes 0 .. 255, with a bias of 128


def narrow() -> bool:
    """Whether the compiler makes 256-bit code here. Its load of 8 single bytes then goes through memory, at a tenth
    of the speed; of 8 words, if they are typed as floats, it does not (torch 2.13)."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


class Int8Rows(nn.Module):
    """y = scale * (x @ values.T) + b, byte by byte. x [rows, in] -> [rows, out].

    values: int8 [out, in]. scale, bias: [out].
    """

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.values, self.scale, self.bias = values, scale, bias

    def forward(self, x: Tensor) -> Tensor:
        rows = written_out(x.float())  # [rows, in]
        y = side_by_side(lambda row, values: (values.float() * rows[row]).sum(-1), x.shape[0], self.values)
        return finished(y, self.scale, self.bias, x.dtype)


class Int8Words(nn.Module):
    """The same product, four bytes at a time, on the same memory. in must be a multiple of 4."""

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.words = values.view(torch.float32)  # [out, in / 4]: the bits of four weights, not a number
        self.powers = 256.0 ** -torch.arange(4).unsqueeze(-1)  # [4, 1]
        self.scale, self.bias = scale, bias

    def forward(self, x: Tensor) -> Tensor:
        words = self.words.view(torch.int32)  # [out, in / 4]
        x4 = x.float().view(x.shape[0], -1, 4)  # [rows, in / 4, 4]
        parts = written(x4.transpose(1, 2) * self.powers)  # [rows, 4, in / 4]
        bias = written(-128 * x4[..., :3].sum(-1))  # [rows, in / 4]

        def product(row: int, words: Tensor) -> Tensor:
            biased, total = words ^ SIGNS, bias[row]
            for i, byte in enumerate((biased & 0xFF, biased & 0xFF00, biased & 0xFF0000, words & -(1 << 24))):
                total = total + byte.float() * parts[row, i]  # [out, in / 4]
            return total.sum(-1)

        y = side_by_side(product, x.shape[0], words)  # [rows, out]
        return finished(y, self.scale, self.bias, x.dtype)


class Int4Words(nn.Module):
    """y = x @ W.T + b, W = (code - 8) * scale + offset, eight codes to a word. x [rows, in] -> [rows, out].

    codes: [out, in], 0 .. 15. scale, offset: [out, groups]. in must be a multiple of 64, a group 32 codes or a
    multiple of 64. A unit of 64 codes fills 8 words: nibble i of word j is code 8 i + j, so a group of 32 is one half
    of the nibbles.
    """

    def __init__(self, codes: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        out, inputs = codes.shape
        group = inputs // scale.shape[1]
        self.halves = 2 if group == 32 else 1  # scales a unit
        units = codes.view(out, -1, 8, LANES).to(torch.int32)
        words = torch.zeros_like(units[:, :, 0])  # [out, units, lanes]
        for i in range(8):
            nibble = units[:, :, i] ^ 8 if i == 7 else units[:, :, i]  # the top one is signed
            words |= nibble << (4 * i)
        self.words = words.view(torch.float32)
        self.powers = 16.0 ** -torch.arange(8).unsqueeze(-1)  # [8, 1]
        self.scale = self.spread(scale)  # [out, units, halves]
        self.offset = self.spread(offset) if bool(offset.any()) else None
        self.bias = bias

    def spread(self, values: Tensor) -> Tensor:
        """One value a group -> one a half unit, or one a unit."""
        out, units = self.words.shape[:2]
        if self.halves == 1:
            values = values.repeat_interleave(units // values.shape[1], 1)
        return values.reshape(out, units, self.halves).float().contiguous()  # a load less than from 16 bits

    def forward(self, x: Tensor) -> Tensor:
        words = self.words.view(torch.int32)  # [out, units, lanes]
        wide = x.float().view(x.shape[0], -1, 8, LANES)  # [rows, units, 8, lanes]
        parts = written(wide * self.powers)  # [rows, units, 8, lanes]
        sums, bias = [], []
        for columns in HALVES[self.halves]:
            mine = wide[:, :, columns.start : columns.stop]  # [rows, units, nibbles, lanes]
            sums.append(written(mine.sum(2)))  # [rows, units, lanes]
            bias.append(written(-8 * (mine[:, :, :-1] if 7 in columns else mine).sum(2)))

        def product(row: int, words: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
            y = 0
            for half, columns in enumerate(HALVES[self.halves]):
                total = bias[half][row]
                for i in columns:
                    nibble = words & (15 << 4 * i if i < 7 else -(1 << 28))
                    total = total + nibble.float() * parts[row, :, i]  # [out, units, lanes]
                y = y + total * scale[:, :, half, None]
                if offset is not None:
                    y = y + sums[half][row] * offset[:, :, half, None]
            return y.sum((-1, -2))

        offset = () if self.offset is None else (self.offset,)
        y = side_by_side(product, x.shape[0], words, self.scale, *offset)  # [rows, out]
        return finished(y, None, self.bias, x.dtype)


def written(x: Tensor) -> Tensor:
    """`written_out` for any number of axes."""
    return written_out(x.reshape(x.shape[0], -1)).view(x.shape)


def finished(y: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [rows, out] in float32: scaled, with the bias, in the type that is wanted."""
    y = y if scale is None else y * scale.float()
    return (y if bias is None else y + bias).to(dtype)


def codes_of(packed: Tensor, out: int, inputs: int) -> Tensor | None:
    """The codes [out, in] that torch packed for its 4-bit kernel; None where its order is another than for 256-bit
    registers: blocks of 32 rows, in which byte j of a column holds rows j and j + 16."""
    if out % BLOCK:
        return None
    columns = packed.view(out // BLOCK, inputs, BLOCK // 2)
    codes = torch.stack((columns & 15, columns >> 4), 2).view(-1, inputs, BLOCK)  # [blocks, in, rows]
    codes = codes.transpose(1, 2).reshape(out, inputs)
    again = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return codes if torch.equal(again.view(-1), packed.view(-1)) else None
