"""Checks of exercise 11. Oracles: numbers built from a known grid, NumPy's bit streams, loops in float64.

Chapter 11.
"""

from __future__ import annotations

import numpy as np
import torch

from minillm.lab.check import Case, Hint, register
from minillm.lab.compare import is_array, tensor_of
from minillm.lab.estimates import estimates, slips

# --- 11.quantise -------------------------------------------------------------------------------------------------


def on_grid(rng, rows: int, n: int, bits: int, symmetric: bool, side: str):
    """(x, q, scale, zero): x lies near the points of a known grid, whose ends both occur, so the grid is the answer.

    side: "both", "positive" (all above 0) or "negative": where an asymmetric range has to be stretched to hold 0.
    """
    high = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    low = -high if symmetric else 0
    scale = torch.tensor([rng.uniform(0.02, 3.0) for _ in range(rows)], dtype=torch.float64)
    if symmetric:
        zero = torch.zeros(rows, dtype=torch.float64)
    else:
        middle = {"both": lambda: rng.randint(1, high - 1), "positive": lambda: 0, "negative": lambda: high}[side]
        zero = torch.tensor([middle() for _ in range(rows)], dtype=torch.float64)
    q = torch.randint(low, high + 1, (rows, n), generator=rng.generator).double()
    part = (torch.rand(rows, n, generator=rng.generator).double() - 0.5) * 0.8  # never near a tie
    ends = [high] if side == "positive" else [low] if side == "negative" else [low, high]
    if side != "both":  # keep away from the end where 0 is
        q = (
            q.clamp(high // 2 + 1, high)
            if side == "positive"
            else q.clamp(low, (low + high) // 2 if not symmetric else -1)
        )
    for row in range(rows):
        for place, end in zip(rng.sample(range(n), len(ends)), ends):
            q[row, place], part[row, place] = end, 0.0
    part = torch.where(q == high, -part.abs(), torch.where(q == low, part.abs(), part))  # inside the range
    shift = torch.zeros(rows, dtype=torch.float64)
    if not symmetric and side == "both":  # the range then starts between two whole numbers: zero is rounded
        shift = (torch.rand(rows, generator=rng.generator).double() - 0.5) * 0.7
    steps = q + part - zero[:, None]
    ends = (-zero - shift)[:, None], (high - zero - shift)[:, None]  # of the range, in steps
    if not symmetric and side == "both":
        steps = torch.where(q == 0, ends[0], torch.where(q == high, ends[1], steps))
    return (scale[:, None] * steps).float(), q.to(torch.int64), scale.float(), zero.float()


def same_grid(got, expected):
    """The three parts, each with its name in the message."""
    if not isinstance(got, (tuple, list)) or len(got) != 3:
        return f"expected (q, scale, zero), got {type(got).__name__}"
    for name, one, other in zip(
        ("scale", "zero", "q"), (got[1], got[2], got[0]), (expected[1], expected[2], expected[0])
    ):
        one = tensor_of(one)
        if one is None or one.shape != other.shape:
            shape = None if one is None else list(one.shape)
            return f"{name}: expected shape {list(other.shape)}, got {shape}"
        if name == "q" and one.is_floating_point():
            return f"q: expected integers, got {one.dtype}"
        wrong = (one.double() - other.double()).abs() > (1e-4 * other.double().abs() if name == "scale" else 1e-6)
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            return f"{name}: expected {other[tuple(at)].item():.6g} at {at}, got {one[tuple(at)].item():.6g}"
    return None


def variant(**flags):
    """Quantise with a mistake."""

    def answer(x, bits, symmetric):
        if symmetric:
            top = 2 ** (bits - 1) - 1
            least, divide = -top, top
            if flags.get("full"):
                divide = top + 1
            size = x.abs().amax() if flags.get("one") else x.amax(-1) if flags.get("signed") else x.abs().amax(-1)
            scale, zero = (size / divide).expand(len(x)), torch.zeros(len(x))
        else:
            top, least = 2**bits - 1, 0
            low, high = (x.amin(), x.amax()) if flags.get("one") else (x.amin(-1), x.amax(-1))
            if not flags.get("bare"):
                low, high = low.clamp(max=0), high.clamp(min=0)
            scale = ((high - low) / (2**bits if flags.get("full") else top)).expand(len(x))
            zero = -low / scale
            zero = zero.round() if not flags.get("float_zero") else zero
            if flags.get("minus"):
                zero = -zero
        steps = x / scale[:, None] + (0 if flags.get("no_zero") else zero[:, None])
        steps = steps.trunc() if flags.get("cut") else steps.round()
        if not flags.get("no_clamp"):
            steps = steps.clamp(least, top)
        return steps.to(torch.int64), scale.float(), zero.float()

    return answer


def matches(wrong):
    """A `when`: the answer equals a mistaken one."""

    def when(got, expected, case):
        return same_grid(got, wrong(*case.args)) is None

    return when


QUANTISE = {
    "one scale for the whole matrix: each row has its own": variant(one=True),
    "the range has 2^bits numbers, and one step fewer": variant(full=True),
    "the asymmetric range must be stretched to hold 0": variant(bare=True),
    "cutting off is not rounding: use round() before the conversion": variant(cut=True),
    "the zero point is a whole number: round it": variant(float_zero=True),
    "zero is -low / scale, so that x = low gives q = 0": variant(minus=True),
    "the zero point is not added to q": variant(no_zero=True),
    "max of the absolute values: a row's largest number may be negative": variant(signed=True),
}


@register(
    "11.quantise",
    points=3,
    title="Quantise by hand",
    hints=[Hint(text, when=matches(wrong)) for text, wrong in QUANTISE.items()]
    + [Hint("q must be integers: convert after rounding", when=lambda got, *_: "float" in kind_of_q(got))],
)
def quantise(rng):
    first = torch.tensor([[-7.0, 3.2, 1.0]])
    expected = (torch.tensor([[-7, 3, 1]]), torch.tensor([1.0]), torch.tensor([0.0]))
    yield Case((first, 4, True), expected, compare=same_grid)
    plans = [(4, True, "both"), (4, False, "both"), (8, True, "negative"), (8, False, "both"), (3, True, "both")]
    plans += [
        (4, False, "positive"),
        (4, False, "negative"),
        (2, True, "both"),
        (2, False, "both"),
        (5, False, "positive"),
    ]
    for bits, symmetric, side in plans:
        x, q, scale, zero = on_grid(rng, rng.randint(2, 6), rng.randint(9, 40), bits, symmetric, side)
        yield Case((x, bits, symmetric), (q, scale, zero), compare=same_grid)
    tie = torch.tensor([[-7.5, 7.5, 2.0, -3.0, 0.0]])
    clamp = "q must stay in 0 .. 2^bits - 1: clamp after rounding"
    too_large = Hint(clamp, when=lambda got, *_: len(got) == 3 and int(tensor_of(got[0]).max()) > 15)
    yield Case(
        (tie, 4, False),
        (torch.tensor([[0, 15, 10, 5, 8]]), torch.ones(1), torch.tensor([8.0])),
        compare=in_range,
        hints=[too_large],
    )


def in_range(got, expected):
    """The range -7.5 .. 7.5 in steps of 1: zero is a tie, and 7.5 + 8 rounds to 16, which no 4 bits hold."""
    parts = [tensor_of(part) for part in got] if isinstance(got, (tuple, list)) and len(got) == 3 else [None]
    if any(part is None for part in parts) or parts[0].shape != (1, 5):
        return "expected (q, scale, zero), q of shape [1, 5]"
    q, zero = parts[0].flatten().tolist(), parts[2].flatten().tolist()
    ends = {7: (0, 14, 15), 8: (0, 15, 15)}.get(zero[0]) if len(zero) == 1 else None
    if ends is None:
        return f"zero: expected 8 (or 7, the tie rounded down), got {zero}"
    wanted = [(-7.5, (0, 1)), (7.5, ends[1:]), (2.0, (2 + zero[0],)), (-3.0, (zero[0] - 3,)), (0.0, (zero[0],))]
    for (x, codes), one in zip(wanted, q):
        if one not in codes:
            return f"q of {x}: expected {codes[0]:.0f}, got {one}"
    return None


def kind_of_q(got) -> str:
    return str(getattr(got[0], "dtype", "")) if isinstance(got, (tuple, list)) and len(got) == 3 else ""


# --- 11.pack, 11.unpack3 -----------------------------------------------------------------------------------------


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Every code's bits, lowest first, one stream a row, packed by NumPy."""
    spread = np.unpackbits(codes.numpy()[..., None], axis=-1, bitorder="little")[..., :bits]
    return torch.from_numpy(np.packbits(spread.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little"))


def by_shift(order):
    """Pack with another order of the codes: order(codes [..., n], per) -> [..., bytes, per], lowest first."""

    def answer(codes, bits):
        per = 8 // bits
        return (order(codes.int(), per) << (bits * torch.arange(per))).sum(-1).to(torch.uint8)

    return answer


def not_uint8(got, *_) -> bool:
    return is_array(got) and tensor_of(got).dtype != torch.uint8


PACK = {
    "the first code goes into the lowest bits": by_shift(lambda c, per: c.unflatten(-1, (-1, per)).flip(-1)),
    "neighbours share a byte; you packed the first half of a row with its second half": by_shift(
        lambda c, per: c.unflatten(-1, (per, -1)).transpose(-1, -2)
    ),
    "the codes are not packed: 8 / bits of them share a byte": lambda codes, bits: codes,
    "right for 4 bits only: shift by `bits`, not by 4": lambda codes, bits: by_shift(
        lambda c, per: c.unflatten(-1, (-1, 2))
    )(codes, 4),
}


@register(
    "11.pack",
    points=2,
    title="Pack",
    hints=[*slips(PACK), Hint("pack into uint8", when=not_uint8)],
)
def pack(rng):
    yield Case(
        (torch.tensor([1, 2, 15, 0], dtype=torch.uint8), 4),
        torch.tensor([33, 15], dtype=torch.uint8),
        dtype=torch.uint8,
    )
    shapes = [(2, (8,)), (4, (3, 10)), (8, (2, 7)), (2, (2, 3, 12)), (4, (2, 2, 6)), (2, (5, 32)), (4, (1, 64))]
    for bits, shape in shapes:
        codes = rng.ints(2**bits, *shape).to(torch.uint8)
        codes[..., 0] = 2**bits - 1
        yield Case((codes, bits), stream(codes, bits), dtype=torch.uint8)


def three(order=(0, 1, 2), codes=range(8), lost=False):
    """Unpack with another order of bytes or codes."""

    def answer(packed):
        words = packed.unflatten(-1, (-1, 3)).int()[..., list(order)]
        word = (words << torch.tensor([0, 8, 16])).sum(-1, keepdim=True)
        if lost:
            word = word & 255
        return (word >> (3 * torch.tensor(list(codes))) & 7).flatten(-2).to(torch.uint8)

    return answer


def bytewise(packed):
    """Two codes from each byte, and its last two bits dropped."""
    parts = torch.stack((packed & 7, packed >> 3 & 7), -1).flatten(-2)
    return torch.nn.functional.pad(parts.unflatten(-1, (-1, 6)), (0, 2)).flatten(-2)


UNPACK = {
    "the bytes are little-endian: the first holds the lowest bits": three((2, 1, 0)),
    "code 0 is in the lowest bits": three(codes=range(7, -1, -1)),
    "bits beyond the first byte are lost: shift in int32, not in uint8": three(lost=True),
    "two codes of each eight lie across a byte's edge: make one 24-bit number of three bytes": bytewise,
}


@register(
    "11.unpack3",
    points=2,
    title="Unpack three bits",
    hints=[*slips(UNPACK), Hint("the codes are to be uint8", when=not_uint8)],
)
def unpack3(rng):
    first = torch.tensor([0b10_001_000, 0, 0], dtype=torch.uint8)
    yield Case((first,), torch.tensor([0, 1, 2, 0, 0, 0, 0, 0], dtype=torch.uint8), dtype=torch.uint8)
    for shape in [(8,), (2, 16), (3, 2, 8), (1, 40), (4, 24)]:
        codes = rng.ints(8, *shape).to(torch.uint8)
        yield Case((stream(codes, 3),), codes, dtype=torch.uint8)


# --- 11.group_linear ---------------------------------------------------------------------------------------------


def loops(x, codes, scale, zero, which=None, early=True, use_zero=True):
    """One weight after the other, in float64. which(k, groups, group): the group of column k."""
    which = which or (lambda k, groups, group: k // group)
    groups, width = scale.shape[1], codes.shape[1]
    columns = [which(k, groups, width // groups) for k in range(width)]
    s, z = scale.double()[:, columns], zero.double()[:, columns]  # [out, in]
    z = z if use_zero else torch.zeros_like(z)
    whole = codes.double()
    weight = s * (whole - z) if early else s * whole - z
    return x.double() @ weight.T


GROUPS = {
    "column k belongs to group k // group: neighbours share a scale": lambda *a: loops(
        *a, which=lambda k, g, n: k % g
    ),
    "the zero point goes off before the scale": lambda *a: loops(*a, early=False),
    "the zero point is missing": lambda *a: loops(*a, use_zero=False),
    "every column uses the scale of the first group": lambda *a: loops(*a, which=lambda k, g, n: 0),
    "the zero point need not be a whole number: Q4_1's is not": lambda x, c, s, z: loops(x, c, s, z.trunc()),
    "the zero point is 8 here only by chance: use `zero`": lambda x, c, s, z: loops(x, c, s, torch.full_like(z, 8.0)),
    "codes from 128 on do not fit int8: go to float, or to a wider integer": lambda x, c, s, z: loops(
        x, c.to(torch.int8), s, z
    ),
    "a code may have 8 bits: there is nothing to mask off": lambda x, c, s, z: loops(x, c & 15, s, z),
    "codes and zero were subtracted as uint8, which wraps below 0: go to float first": lambda x, c, s, z: wrapped(
        x, c, s, z
    ),
}


def wrapped(x, codes, scale, zero):
    group = codes.shape[1] // scale.shape[1]
    whole = codes - zero.to(torch.uint8).repeat_interleave(group, 1)
    return x.double() @ (whole.double() * scale.double().repeat_interleave(group, 1)).T


@register("11.group_linear", points=3, title="Scales in the product", hints=slips(GROUPS))
def group_linear(rng):
    yield Case(
        (
            torch.tensor([[1.0, 2.0]]),
            torch.tensor([[3, 5]], dtype=torch.uint8),
            torch.tensor([[0.5, 2.0]]),
            torch.tensor([[1.0, 4.0]]),
        ),
        torch.tensor([[5.0]]),
    )
    for rows, out, groups, group, bits in [
        (1, 3, 2, 4, 4),
        (4, 5, 3, 8, 4),
        (3, 2, 1, 16, 4),
        (2, 7, 4, 6, 4),
        (5, 4, 2, 32, 4),
        (1, 1, 8, 2, 4),
        (3, 5, 4, 8, 8),
    ]:
        x, codes = rng.tensor(rows, groups * group), rng.ints(2**bits, out, groups * group).to(torch.uint8)
        scale, zero = rng.tensor(out, groups).abs() + 0.1, rng.ints(2**bits, out, groups).float()
        if group in (6, 32):
            zero = zero + 0.5
        yield Case((x, codes, scale, zero), loops(x, codes, scale, zero), rtol=1e-3)


# --- 11.read_signed ----------------------------------------------------------------------------------------------


def nibbles(low, high=None):
    """A reader whose halves become values by low(code) and high(code), code in 0 .. 15."""

    def answer(packed, scale):
        codes = torch.stack((packed & 15, packed >> 4), -1).to(torch.int64)  # [out, bytes, 2]
        values = torch.stack((low(codes[..., 0]), (high or low)(codes[..., 1])), -1).flatten(-2)
        group = values.shape[1] // scale.shape[1]
        return (values.double() * scale.double().repeat_interleave(group, 1)).float()

    return answer


def signed(c):
    return torch.where(c > 7, c - 16, c)


def swapped(packed, scale):
    return nibbles(signed)(packed << 4 | packed >> 4, scale)


SIGNED = {
    "the odd columns are never negative now: they were right": nibbles(signed, lambda c: c),
    "no column is ever negative": nibbles(lambda c: c),
    "subtracting 8 is for codes with an offset; these are two's complement": nibbles(lambda c: c - 8),
    "only the even columns had the bug, and 8 is no offset of theirs": nibbles(lambda c: c - 8, signed),
    "8 stands for -8: the sign bit is set from 8 on, > 7": nibbles(lambda c: torch.where(c > 8, c - 16, c), signed),
    "that takes 8 off, not 16: in four bits 15 is -1": nibbles(lambda c: torch.where(c > 7, c - 8, c), signed),
    "that is sign and magnitude: 8 to 15 stand for -8 to -1": nibbles(lambda c: torch.where(c > 7, 8 - c, c), signed),
    "the halves are swapped: the even column is in the low half": swapped,
}


def given(packed, scale):
    """The code that the exercise shows."""
    low = packed & 15
    high = packed.view(torch.int8) >> 4
    values = torch.stack((low.to(torch.int8), high), -1).flatten(-2)
    out, groups = scale.shape
    return (values.view(out, groups, -1) * scale[..., None]).view(out, -1)


@register(
    "11.read_signed", points=3, title="Debug it: weights that are never negative", hints=slips(SIGNED), given=given
)
def read_signed(rng):
    yield Case((torch.tensor([[0xF7]], dtype=torch.uint8), torch.tensor([[0.5]])), torch.tensor([[3.5, -0.5]]))
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    for packed, groups in [
        (every, 1),
        (every, 4),
        *((rng.ints(256, out, n).to(torch.uint8), g) for out, n, g in [(3, 8, 2), (5, 12, 3), (1, 32, 8)]),
    ]:
        values = [
            [v - 16 if v > 7 else v for byte in row for v in (byte % 16, byte // 16)] for row in packed.tolist()
        ]
        scale = rng.tensor(len(packed), groups).abs() + 0.1
        group = 2 * packed.shape[1] // groups
        expected = [[v * scale[i, k // group].item() for k, v in enumerate(row)] for i, row in enumerate(values)]
        yield Case((packed, scale), torch.tensor(expected))


# --- 11.budget ---------------------------------------------------------------------------------------------------

LAYERS, OTHER = 6.476e9, 0.262e9
BUDGET = {  # key: expected, {what a slip gives: its name}
    "bits": (
        4 + 20 / 128,
        0.004,
        {
            4.125: "the zero point's 4 bits are missing",
            4.25: "a zero point of 4 bits, not 16",
            4.0: "the scale is missing",
            24.0: "scale and zero point are shared by 128 weights",
        },
    ),
    "gb": (
        LAYERS * 4.5 / 8e9 + OTHER * 2 / 1e9,
        {
            3.762: "the scales are missing: 4.5 bits a weight, not 4",
            3.643: "the 16-bit part is missing",
            3.79: "the embedding and the head stay in 16 bits",
            4.571: "5 bits a weight? There is no zero point here",
            33.34: "bits, where bytes are asked for",
        },
    ),
    "tokens_per_s": (
        1e12 / (LAYERS * 4.5 / 8 + OTHER),
        {
            240.0: "the embedding is looked up, one row, not read: only the head's half counts",
            274.5: "the head is read for every token too",
            285.7: "the scales are read as well: 4.5 bits a weight",
            32.0: "bytes, not bits: 8 times faster",
        },
    ),
    "widest": (
        4,
        0,
        {
            5: "the KV's 10 GB come off first, and the scales count",
            3: "there is room for one more",
            4.175: "whole bits: round down",
            4.425: "the scales count, and only whole widths exist",
        },
    ),
}


@register("11.budget", points=2, title="Estimate it: bits for a memory budget")
def budget(rng):
    yield from estimates("budget", BUDGET, 0.01)
