"""Checks of exercise 14. Oracles: loops over numbers in float64, a buffer that is fed token by token, closed forms.

Chapter 14.
"""

from __future__ import annotations

import torch

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.estimates import estimates, slips

# --- 14.round_kv -------------------------------------------------------------------------------------------------


def run_of_numbers(row: list[float], bits: int) -> list[float]:
    """Numbers that share a scale, rounded and back, in Python's floats."""
    low, scale = min(row), (max(row) - min(row)) / (2**bits - 1)
    return [low + round((x - low) / scale) * scale if scale else x for x in row]


def rounded_by_loop(k: torch.Tensor, v: torch.Tensor, bits: int, group: int):
    keys, values = torch.empty_like(k, dtype=torch.float64), torch.empty_like(v, dtype=torch.float64)
    for channel in range(k.shape[1]):
        for first in range(0, len(k), group):
            part = slice(first, first + group)
            keys[part, channel] = torch.tensor(run_of_numbers(k[part, channel].double().tolist(), bits)).double()
    for token in range(len(v)):
        values[token] = torch.tensor(run_of_numbers(v[token].double().tolist(), bits)).double()
    return keys.float(), values.float()


def there_and_back(x, axis, bits, **flags):
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    scale = (high - low) / (2**bits - (0 if flags.get("steps") else 1))
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    if flags.get("no_low"):
        scale = (2 * torch.maximum(high.abs(), low.abs()) / (2**bits - 1)).clamp(min=1e-12)
        low = torch.zeros_like(low)
    steps = (x - low) / scale
    return low + (steps.trunc() if flags.get("cut") else steps.round()) * scale


def rounding(kind: str):
    """round_kv with a mistake."""

    def answer(k, v, bits, group):
        back = {"cut": {"cut": True}, "steps": {"steps": True}, "no low": {"no_low": True}}.get(kind, {})

        def trip(x, axis):
            return there_and_back(x, axis, bits, **back)

        grouped = k.unflatten(0, (-1, group))
        keys, values = trip(grouped, 1).flatten(0, 1), trip(v, 1)
        if kind == "keys per token":
            keys = trip(k, 1)
        elif kind == "turned":
            keys, values = trip(k, 1), trip(v.unflatten(0, (-1, group)), 1).flatten(0, 1)
        elif kind == "values per channel":
            values = trip(v.unflatten(0, (-1, group)), 1).flatten(0, 1)
        elif kind == "one group":
            keys = trip(k, 0)
        elif kind == "strided":
            keys = trip(k.unflatten(0, (group, -1)), 0).flatten(0, 1)
        elif kind == "whole group":
            keys = trip(grouped.flatten(1), 1).view_as(k)
        elif kind == "one scale":
            values = trip(v.flatten()[None], 1).view_as(v)
        return keys, values

    return answer


ROUND = {
    "keys share a scale along the channel, by `group` tokens; these share it by token": rounding("keys per token"),
    "turned round: keys go along the channel, values along the token": rounding("turned"),
    "values share a scale by token: all channels of one token": rounding("values per channel"),
    "keys: one scale for all tokens; a scale covers `group` of them": rounding("one group"),
    "a group is `group` consecutive tokens, not every n-th": rounding("strided"),
    "keys: each channel has its own scale within a group": rounding("whole group"),
    "values: each token has its own scale": rounding("one scale"),
    "2^bits codes are one step fewer: divide by 2^bits - 1": rounding("steps"),
    "cut off, not rounded": rounding("cut"),
    "the smallest number is `low`, code 0 stands for it: this rounds around 0": rounding("no low"),
}


@register(
    "14.round_kv",
    points=3,
    title="Two directions",
    hints=[
        Hint(
            "a channel or token that never changes has scale 0: divide by something else there",
            when=lambda got, *_: isinstance(got, tuple) and any(bool(x.isnan().any()) for x in got),
        ),
        *slips(ROUND),
    ],
)
def round_kv(rng):
    example = torch.tensor([[0.0, 10.0], [3.0, 40.0]])
    yield Case((example, example.clone(), 2, 2), (example, example))
    for tokens, dim, bits, group in (
        (12, 5, 2, 4),
        (32, 16, 4, 8),
        (64, 9, 2, 32),
        (30, 7, 3, 10),
        (21, 8, 4, 7),
        (96, 33, 8, 16),
        (8, 4, 4, 8),
        (6, 12, 2, 1),
    ):
        k, v = rng.tensor(tokens, dim) * 3 + 1, rng.tensor(tokens, dim) - 2
        k[:, rng.randrange(dim)] *= 20  # a stripe
        if group > 1:
            k[: 2 * group, 0] = 1.5  # and one that never changes
        v[rng.randrange(tokens)] = -0.7  # a token of equal numbers
        yield Case((k, v, bits, group), rounded_by_loop(k, v, bits, group), rtol=1e-3)


# --- 14.window_step ----------------------------------------------------------------------------------------------


def fed(start: int, new: int, residual: int) -> dict:
    """One token after the other: a query looks, joins the buffer, and the buffer is emptied when it is full."""
    buffer, rounded, now, sees = [], 0, [], []
    for token in range(start + new):
        if token >= start:
            sees.append(rounded)
        buffer.append(token)
        if len(buffer) == residual:
            rounded += residual
            now += buffer if token >= start else []
            buffer = []
    return {"rounded": now, "floats": buffer, "sees": sees}


def books(**flags):
    def answer(start, new, residual):
        end = start + new
        border, own = end // residual * residual, start // residual * residual
        rounded, sees = list(range(own, border)), [p // residual * residual for p in range(start, end)]
        floats = list(range(border, end))
        if flags.get("new_only"):
            rounded = [t for t in rounded if t >= start]
        if flags.get("one_unit"):
            rounded, floats = rounded[:residual], list(range(own + residual if border > own else own, end))
        if flags.get("by_length"):
            sees = [(p + 1) // residual * residual for p in range(start, end)]
        if flags.get("same"):
            sees = [border] * new
        if flags.get("before"):
            sees = [own] * new
        if flags.get("sliding"):
            sees = [max(0, p + 1 - residual) for p in range(start, end)]
        if flags.get("new_floats"):
            floats = [t for t in floats if t >= start]
        if flags.get("all"):
            rounded = list(range(border))
        return {"rounded": rounded, "floats": floats, "sees": sees}

    return answer


BOOKS = {
    '"rounded": tokens that waited before this step belong to the unit too': books(new_only=True),
    "a long step fills several units": books(one_unit=True),
    '"sees": the query that completes a unit still sees it unrounded: p // R * R': books(by_length=True),
    '"sees": not all new queries see the same; each has its own border': books(same=True),
    '"sees": later queries of a long step see units that were filled within it': books(before=True),
    '"sees": the border moves by whole units, not with every token': books(sliding=True),
    '"floats": tokens that waited before and still wait are unrounded as well': books(new_floats=True),
    '"rounded": only those of this step; earlier units were rounded before': books(all=True),
}


@register("14.window_step", points=3, title="The books of the window", hints=slips(BOOKS))
def window_step(rng):
    plans = [(6, 3, 4), (0, 1, 4), (3, 1, 4), (4, 1, 4), (0, 8, 4), (5, 30, 8), (31, 1, 32), (32, 1, 32), (7, 2, 1)]
    plans += [(5, 1, 8), (70, 20, 128), (33, 2, 32)]
    plans += [(rng.randint(0, 300), rng.randint(1, 3 * r), r) for r in (2, 3, 16, 24, 32, 128)]
    plans += [(rng.randint(0, 100), 700, 48)]
    for start, new, residual in plans:
        yield Case((start, new, residual), fed(start, new, residual))


# --- 14.attend ---------------------------------------------------------------------------------------------------


def attended(q, keys, values, window_k, window_v, factor):
    """Number by number, in float64."""
    k, v = [], []
    for token in range(len(keys[0])):
        group = token * len(keys[1]) // len(keys[0])
        k.append(keys[0][token].double() * keys[1][group].double() + keys[2][group].double())
        v.append(values[0][token].double() * values[1][token].double() + values[2][token].double())
    k += [row.double() for row in window_k]
    v += [row.double() for row in window_v]
    scores = torch.tensor([float(q.double() @ row) * factor for row in k], dtype=torch.float64)
    weights = (scores - scores.max()).exp()
    return sum(w * row for w, row in zip(weights / weights.sum(), v)).float()


def attending(kind: str):
    def answer(q, keys, values, window_k, window_v, factor):
        codes, scale, low = keys
        codes = codes.to(torch.int8) if kind == "signed" else codes
        group = len(codes) // max(len(scale), 1)
        if kind == "interleaved":
            scale, low = scale.repeat(group, 1), low.repeat(group, 1)
        else:
            scale, low = scale.repeat_interleave(group, 0), low.repeat_interleave(group, 0)
        rounded_k = (codes + low) * scale if kind == "low first" else codes * scale + low
        if kind == "no low":
            rounded_k = codes * scale
        vcodes, vscale, vlow = values
        rounded_v = vcodes * vscale[:, None] + (0 if kind == "no low of v" else vlow[:, None])
        factor = {"no factor": 1.0, "own factor": len(q) ** -0.5}.get(kind, factor)
        if kind in ("sum", "mean"):
            parts = [(rounded_k, rounded_v)] if len(rounded_k) else []
            parts = [(k @ q * factor).softmax(0) @ v for k, v in [*parts, (window_k, window_v)]]
            return sum(parts) / (len(parts) if kind == "mean" else 1)
        k, v = torch.cat((rounded_k, window_k)), torch.cat((rounded_v, window_v))
        if kind == "rounded only" and len(rounded_k):
            k, v = rounded_k, rounded_v
        if kind == "window only":
            k, v = window_k, window_v
        if kind == "swapped":
            k = torch.cat((window_k, rounded_k))
        return (k @ q * factor).softmax(0) @ v

    return answer


ATTEND = {
    "two softmaxes, added: rounded and window tokens share one": attending("sum"),
    "two softmaxes, averaged: rounded and window tokens share one": attending("mean"),
    "a group is consecutive tokens: repeat_interleave, not repeat": attending("interleaved"),
    "keys: `low` is missing": attending("no low"),
    "values: `low` is missing": attending("no low of v"),
    "keys: low is added after the scale, x = low + scale * code": attending("low first"),
    "the factor on q @ k is missing": attending("no factor"),
    "the factor on q @ k is an argument, not always 1 / sqrt(dim)": attending("own factor"),
    "codes go up to 255: as signed bytes those from 128 on are negative": attending("signed"),
    "the window's tokens are left out": attending("rounded only"),
    "the rounded tokens are left out": attending("window only"),
    "keys and values are put together in different orders": attending("swapped"),
}


@register(
    "14.attend",
    points=3,
    title="One query over both",
    hints=[
        Hint(
            "exp of a large score is inf: take the largest off first, as softmax does",
            when=lambda got, *_: isinstance(got, torch.Tensor) and bool(got.isnan().any()),
        ),
        *slips(ATTEND),
    ],
)
def attend(rng):
    for groups, group, dim, window, top, factor in (
        (0, 8, 4, 1, 15, 0.5),
        (3, 4, 8, 2, 15, 0.3),
        (2, 16, 16, 5, 3, 0.25),
        (1, 32, 6, 32, 15, 0.4),
        (5, 8, 64, 1, 15, 0.125),
        (0, 16, 12, 7, 15, 0.2),
        (9, 3, 33, 4, 15, 0.1),
        (40, 16, 32, 11, 15, 0.18),
        (2, 16, 8, 130, 255, 0.02),
        (4, 8, 24, 3, 15, 40.0),  # scores in the hundreds
    ):
        n = groups * group

        def codes(*shape, top=top):
            return torch.randint(0, top + 1, shape, generator=rng.generator).to(torch.uint8)

        keys = codes(n, dim), rng.tensor(groups, dim).abs() * 0.1 + 0.02, rng.tensor(groups, dim)
        values = codes(n, dim), rng.tensor(n).abs() * 0.2 + 0.02, rng.tensor(n) - 1
        q, k, v = rng.tensor(dim), rng.tensor(window, dim), rng.tensor(window, dim)
        args = (q, keys, values, k, v, factor)
        yield Case(args, attended(*args))


# --- 14.code_blocks ----------------------------------------------------------------------------------------------


class GivenBlocks:
    """The class with its two bugs, as the exercise gives it."""

    def __init__(self, blocks, size, dim, bits):
        self.codes = torch.zeros(blocks, size, dim, dtype=torch.uint8)
        self.scale, self.low = torch.zeros(blocks, size), torch.zeros(blocks, size)
        self.top = 2**bits - 1

    def write(self, block, place, x):
        if self.scale[block, place] == 0:
            self.scale[block, place] = ((x.max() - x.min()) / self.top).clamp(min=1e-12)
        self.low[block, place] = x.min()
        steps = (x - self.low[block, place]) / self.scale[block, place]
        self.codes[block, place] = steps.round().clamp(0, self.top).to(torch.uint8)

    def copy(self, source, target):
        self.codes[target] = self.codes[source]
        self.scale[target] = self.scale[source]

    def read(self, block, count):
        codes = self.codes[block, :count].float()
        return codes * self.scale[block, :count, None] + self.low[block, :count, None]


class Fixed(GivenBlocks):
    """Both mended."""

    def write(self, block, place, x):
        self.scale[block, place] = 0
        GivenBlocks.write(self, block, place, x)

    def copy(self, source, target):
        GivenBlocks.copy(self, source, target)
        self.low[target] = self.low[source]


class StaleScale(Fixed):
    write = GivenBlocks.write


class LostLow(Fixed):
    copy = GivenBlocks.copy


class Swapped(Fixed):
    def copy(self, source, target):
        Fixed.copy(self, target, source)


class EveryLow(Fixed):
    def copy(self, source, target):
        GivenBlocks.copy(self, source, target)
        self.low[:] = self.low[source]


class ZeroLow(Fixed):
    def copy(self, source, target):
        GivenBlocks.copy(self, source, target)
        self.low[target] = 0


BLOCKS = {
    "both bugs are still there": GivenBlocks,
    "a place that was used before keeps the scale of its former token": StaleScale,
    "the copy keeps codes and scale and loses the low end": LostLow,
    "copy(source, target) is turned round": Swapped,
    "the copy changes blocks that it has nothing to do with": EveryLow,
    "the low end is the source's, not 0": ZeroLow,
}


def played(plan, shape):
    """Do the writes, copies and reads of a plan; -> what the reads gave, as plain lists of tensors."""

    def run(answer):
        blocks, seen = answer(*shape), []
        for action, *args in plan:
            if action == "write":
                blocks.write(args[0], args[1], args[2].clone())
            elif action == "copy":
                blocks.copy(*args)
            else:
                seen.append(blocks.read(*args).clone())
        return seen

    return run


def oracle(plan, shape):
    """The same with floats that are rounded when they are read."""
    held, seen = {}, []
    for action, *args in plan:
        if action == "write":
            held[args[0], args[1]] = args[2]
        elif action == "copy":
            for place in range(shape[1]):
                held.pop((args[1], place), None)
                if (args[0], place) in held:
                    held[args[1], place] = held[args[0], place]
        else:
            rows = [run_of_numbers(held[args[0], place].double().tolist(), shape[3]) for place in range(args[1])]
            seen.append(torch.tensor(rows, dtype=torch.float64).float())
    return seen


@register(
    "14.code_blocks",
    points=4,
    title="Debug it: two requests, one block",
    given=GivenBlocks,
    hints=slips(BLOCKS),
)
def code_blocks(rng):
    def token(dim):
        return rng.tensor(dim) * rng.choice((0.1, 1.0, 20.0)) + rng.choice((-30.0, 0.0, 7.0))

    def fill(block, count, dim):
        return [("write", block, place, token(dim)) for place in range(count)]

    for blocks, size, dim, bits in ((3, 4, 5, 8), (4, 8, 16, 4), (6, 16, 33, 2), (5, 3, 64, 8), (7, 40, 6, 4)):
        alone = [*fill(0, size, dim), ("read", 0, size)]
        forked = [
            *fill(1, size - 1, dim),
            *fill(0, size, dim),
            ("copy", 1, 2),
            ("read", 2, size - 1),
            ("read", 0, size),
        ]
        forked += [("write", 2, size - 1, token(dim)), ("read", 2, size), ("read", 1, size - 1)]
        forked += [("write", 2, 0, token(dim)), ("read", 1, size - 1), ("write", 1, 1, token(dim)), ("read", 2, size)]
        reused = [*fill(0, size, dim), *fill(0, size, dim), ("read", 0, size)]
        last = blocks - 1
        forks = [*fill(last, size, dim), ("copy", last, 0), ("copy", 0, 1), ("write", 0, 0, token(dim))]
        forks += [("read", block, size) for block in (1, 0, last)]
        again = [
            *fill(2, size, dim),
            *fill(1, 2, dim),
            ("copy", 1, 2),
            ("read", 2, 2),
            *fill(2, size, dim),
            ("read", 2, size),
        ]
        for plan, what in (
            (alone, "one request alone"),
            (forked, "a fork that goes its own way"),
            (forks, "a fork of a fork"),
            (reused, "a block given to a second request"),
            (again, "a copy into a used block, then new tokens there"),
        ):
            shape = (blocks, size, dim, bits)
            yield Drive(played(plan, shape), oracle(plan, shape), f"CodeBlocks{shape}: {what}, read", rtol=1e-3)


# --- 14.budget ---------------------------------------------------------------------------------------------------


K = 32 * 8 * 128  # numbers of K a token
TOKEN, FULL = K * (2 + 1 + 2 + 0.25) / 8, 4 * K
WINDOW = 128 * FULL
BUDGET = {
    "bits": (
        5.0,
        {
            4.5: "a low end as well as a scale: 32 bits a group, not 16",
            4.0: "scale and low are missing",
            4.25: "keys share by 32 tokens, not by the 128 numbers of a vector",
            36.0: "a group shares one scale and one low",
        },
    ),
    "token": (
        TOKEN,
        {
            16384.0: "scales and lows are missing",
            K * 5.25: "bits, where bytes are asked for",
            TOKEN / 2: "K and V: twice the numbers",
            K * 3 / 8: "the values are missing",
            24576.0: "values share by a vector of 128 numbers, not by 32",
            K * 4.5 / 8: "keys share by 32 tokens, not by a vector of 128",
            131072.0: "that is 16 bits",
            TOKEN / 32: "all 32 layers",
        },
    ),
    "window": (
        WINDOW,
        {
            WINDOW / 2: "keys and values both wait in the window",
            WINDOW * 2: "16 bits are 2 bytes",
            FULL: "that is one token; the window holds 128",
            128 * TOKEN: "the window is not rounded",
            WINDOW / 32: "all 32 layers",
        },
    ),
    "requests": (
        381,
        0,
        {
            454: "the window is missing",
            454.13: "the window is missing, and whole requests",
            381.47: "whole requests: round down",
            382: "one too many: round down",
            74: "that is 16 bits",
            355: "GB is 10^9 bytes, and the window is 128 tokens",
        },
    ),
    "even": (
        WINDOW / (FULL - TOKEN),
        {
            128.0: "at 128 tokens the codes come on top of the window",
            WINDOW / TOKEN: "n tokens save 16 bits less INT2's bytes each, not INT2's bytes",
            WINDOW / FULL + 1e-9: "at 128 tokens the codes come on top of the window",
        },
    ),
}


@register("14.budget", points=2, title="Estimate it: bytes and requests")
def budget(rng):
    yield from estimates("budget", BUDGET, 0.01)
