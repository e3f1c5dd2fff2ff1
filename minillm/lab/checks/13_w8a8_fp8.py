"""Checks of exercise 13. Oracles: float64 row by row, Python's own integers, torch's FP8 types.

Chapter 13.
"""

from __future__ import annotations

import torch

from minillm.lab.check import Case, Hint, register
from minillm.lab.compare import mismatch
from minillm.lab.estimates import estimates, slips


def clear_of_ties(make, codes_of, margin: float = 5e-5):
    """Inputs whose codes no other order of the same operations would round the other way."""
    while True:
        found = make()
        if all(((c - c.floor()) - 0.5).abs().min() > margin for c in codes_of(*found)):
            return found


# 1


def rows_of(x, over=1):
    return x.abs().amax(over, keepdim=True).clamp(min=1e-30)


def int8_variant(x, w, *, top=127, over_x=1, over_w=1, rounding=torch.round, sums=None, back=None):
    """An `int8_linear` with a mistake in it."""
    scale_x = (x.abs().max().view(1, 1) if over_x is None else rows_of(x, over_x)) / top
    scale_w = (w.abs().max().view(1, 1) if over_w is None else rows_of(w, over_w)) / top
    a, b = (rounding(v / s).clamp(-128, 127).to(torch.int8) for v, s in ((x, scale_x), (w, scale_w)))
    total = (a.int() @ b.int().T) if sums is None else sums(a, b)
    y = total * scale_x * scale_w.T if back is None else back(total, scale_x, scale_w)
    return a, b, y


def wrap(a, b):
    return (a.int() @ b.int().T).to(torch.int8).float()


def wrap16(a, b):
    return (a.int() @ b.int().T).to(torch.int16).float()


INT8 = {
    "one scale for all tokens: a loud token makes the others coarse": lambda x, w: int8_variant(x, w, over_x=None),
    "one scale for all of W: each output has its own": lambda x, w: int8_variant(x, w, over_w=None),
    "the sum was made in int8 and wrapped around: add up in int32": lambda x, w: int8_variant(x, w, sums=wrap),
    "the sum was made in int16, which ends at 32,767: add up in int32": lambda x, w: int8_variant(x, w, sums=wrap16),
    "the codes were truncated: round to the nearest": lambda x, w: int8_variant(x, w, rounding=torch.trunc),
    "rounded down: round to the nearest": lambda x, w: int8_variant(x, w, rounding=torch.floor),
    "the largest of a row must become 127, not 128": lambda x, w: int8_variant(x, w, top=128),
    "the scales of W are not put back": lambda x, w: int8_variant(x, w, back=lambda t, sx, sw: t * sx),
    "the scales of x are not put back": lambda x, w: int8_variant(x, w, back=lambda t, sx, sw: t * sw.T),
    "the scales are not put back": lambda x, w: int8_variant(x, w, back=lambda t, sx, sw: t.float()),
    "the scales must multiply the sums, not divide them": lambda x, w: int8_variant(
        x, w, back=lambda t, sx, sw: t / sx / sw.T
    ),
    "a scale an input channel cannot leave the sum: scales go with rows": lambda x, w: int8_variant(
        x, w, over_x=0, back=lambda t, sx, sw: t * sw.T
    ),
    "y is the float product: multiply the codes": lambda x, w: (*int8_variant(x, w)[:2], x @ w.T),
}


def by_integers(x, w):
    """Codes in float64, sums by Python's integers."""
    found = []
    for matrix in (x.double(), w.double()):
        scale = [max(float(row.abs().max()), 1e-30) / 127 for row in matrix]
        found.append(([[round(float(v) / s) for v in row] for row, s in zip(matrix, scale)], scale))
    (a, scale_x), (b, scale_w) = found
    y = [[sum(p * q for p, q in zip(i, j)) * s * t for j, t in zip(b, scale_w)] for i, s in zip(a, scale_x)]
    return torch.tensor(a, dtype=torch.int8), torch.tensor(b, dtype=torch.int8), torch.tensor(y)


def not_127(got, expected, case):
    if not isinstance(got, tuple) or len(got) != 3 or any(not torch.is_tensor(part) for part in got):
        return False
    found, right = ([part.abs().amax(1) for part in parts[:2]] for parts in (got, expected))
    return any(a.shape == b.shape and bool((a < b).any()) for a, b in zip(found, right))


def with_int8_codes(got, expected):
    if not isinstance(got, (tuple, list)) or len(got) != 3:
        return mismatch(got, expected)
    for i, kind in enumerate((torch.int8, torch.int8, None)):
        if text := mismatch(got[i], expected[i], dtype=kind, where=f"[{i}] "):
            return text
    return None


def nan_in_codes(got, expected, case):
    return isinstance(got, tuple) and len(got) == 3 and bool(torch.isnan(torch.as_tensor(got[2])).any())


@register(
    "13.int8_linear",
    points=2,
    title="A product of integers",
    hints=[
        Hint("a row of zeros has scale 0, and 0 / 0 is NaN: keep the scale above 0", when=nan_in_codes),
        *slips(INT8),
        Hint("the largest code of a row is not 127: each row has its own scale, however quiet it is", when=not_127),
    ],
)
def int8_linear(rng):
    example = torch.tensor([[1.0, -4.0]]), torch.tensor([[2.0, 1.5]])
    yield Case(example, by_integers(*example), compare=with_int8_codes)
    for tokens, width, out in ((3, 5, 4), (6, 40, 6), (9, 64, 3), (1, 130, 7), (5, 300, 11)):

        def make(tokens=tokens, width=width, out=out):
            loud, size = torch.exp(2.5 * rng.tensor(tokens, 1)), torch.exp(rng.tensor(out, 1))
            x, w = rng.tensor(tokens, width) * loud + 0.3, rng.tensor(out, width) * size + 0.1
            if tokens == 9:  # a quiet row has a scale of its own, too
                x[4], w[1] = x[4] / x[4].abs().max() * 1e-3, w[1] / w[1].abs().max() * 1e-3
            return x, w

        x, w = clear_of_ties(make, lambda x, w: [127 * v / rows_of(v) for v in (x.double(), w.double())])
        if tokens == 6:
            x[2], w[4] = 0.0, 0.0
        yield Case((x, w), by_integers(x, w), compare=with_int8_codes)
    width = 900  # loud and alike: sums of 900 x 127 x 127
    signs = 1.0 - 2.0 * rng.ints(2, 4, 1)
    yield Case(
        (torch.ones(4, width) * signs, torch.ones(3, width)),
        by_integers(torch.ones(4, width) * signs, torch.ones(3, width)),
        compare=with_int8_codes,
    )


# 2


def scale_variant(batches, weights, alpha, *, of=None, column=None, formula=None, ones=True):
    """A `smooth_scale` with a mistake in it."""
    x, w = torch.cat(batches), torch.cat(weights)
    loud = (of or (lambda v: v.abs().amax(0)))(x)
    columns = (column or (lambda v: v.abs().amax(0)))(w)
    s = (formula or (lambda a, b, k: a**k / b ** (1 - k)))(loud, columns, alpha)
    return torch.where((loud > 0) & (columns > 0), s, torch.ones_like(s)) if ones else s


SCALE = {
    "alpha and 1 - alpha are swapped": lambda *a: scale_variant(*a, formula=lambda x, w, k: x ** (1 - k) / w**k),
    "upside down: a loud channel needs a large s": lambda *a: scale_variant(
        *a, formula=lambda x, w, k: w ** (1 - k) / x**k
    ),
    "the weights' part multiplies: it must divide": lambda *a: scale_variant(
        *a, formula=lambda x, w, k: x**k * w ** (1 - k)
    ),
    "alpha multiplies: it must be the exponent": lambda *a: scale_variant(
        *a, formula=lambda x, w, k: x * k / (w * (1 - k)).clamp(min=1e-30)
    ),
    "the weights are left out: that is x's part alone": lambda *a: scale_variant(*a, formula=lambda x, w, k: x**k),
    "the mean of |x|: that is AWQ's; SmoothQuant takes the largest": lambda *a: scale_variant(
        *a, of=lambda v: v.abs().mean(0)
    ),
    "the largest x, not the largest |x|": lambda *a: scale_variant(*a, of=lambda v: v.amax(0).clamp(min=0)),
    "the largest W, not the largest |W|": lambda *a: scale_variant(*a, column=lambda v: v.amax(0).clamp(min=0)),
    "the mean of |W|: the largest of the column is asked for": lambda *a: scale_variant(
        *a, column=lambda v: v.abs().mean(0)
    ),
    "the largest of each row of W: s needs the largest of each column": lambda *a: scale_variant(
        *a, column=lambda v: v.abs().amax(1)
    ),
    "only the first weight counts: all that read x share s": lambda b, w, k: scale_variant(b, w[:1], k),
    "only the last weight counts: all that read x share s": lambda b, w, k: scale_variant(b, w[-1:], k),
    "only the last batch counts: the maximum is over all tokens": lambda b, w, k: scale_variant(b[-1:], w, k),
    "only the first batch counts: the maximum is over all tokens": lambda b, w, k: scale_variant(b[:1], w, k),
    "s must not be clamped: an outlier of thousands needs it": lambda *a: scale_variant(
        *a, formula=lambda x, w, k: (x**k / w ** (1 - k)).clamp(0.01, 100)
    ),
    "a mean of the batches' maxima: the largest over all tokens is asked for": lambda b, w, k: scale_variant(
        [torch.stack([x.abs().amax(0) for x in b]).mean(0, keepdim=True)], w, k
    ),
}


def not_finite(got, expected, case):
    return torch.is_tensor(got) and got.shape == expected.shape and not torch.isfinite(got).all()


def not_one(got, expected, case):
    """Finite, right everywhere else, and something other than 1 where nothing is heard or read."""
    if not (torch.is_tensor(got) and got.shape == expected.shape):
        return False
    batches, weights, _ = case.args
    alive = (torch.cat(batches).abs().amax(0) > 0) & (torch.cat(weights).abs().amax(0) > 0)
    return bool((got[~alive] != 1).any()) and torch.allclose(got[alive], expected[alive], rtol=1e-3)


def scale_in_float64(batches, weights, alpha):
    s = []
    for j in range(batches[0].shape[1]):
        loud = max(abs(float(v)) for batch in batches for v in batch[:, j])
        column = max(abs(float(v)) for w in weights for v in w[:, j])
        s.append(loud**alpha / column ** (1 - alpha) if loud > 0 and column > 0 else 1.0)
    return torch.tensor(s)


@register(
    "13.smooth_scale",
    title="SmoothQuant's scale",
    hints=[
        Hint("a silent or unused channel must get 1, not inf or nan", when=not_finite),
        Hint("a silent or unused channel must get 1, not what the formula gives", when=not_one),
        *slips(SCALE),
    ],
)
def smooth_scale(rng):
    yield Case(
        ([torch.tensor([[8.0, 0.0], [-2.0, 0.0]])], [torch.tensor([[2.0, 5.0]])], 0.5), torch.tensor([2.0, 1.0])
    )
    plans = (
        (6, [4], [5], 0.5),
        (9, [3, 7], [4], 0.8),
        (24, [10, 2, 6], [8, 3, 3], 0.3),
        (17, [5, 5], [7, 12], 0.0),
        (33, [2, 9], [4, 1], 1.0),
        (64, [30, 1], [16, 8], 0.65),
    )
    for width, batches, weights, alpha in plans:
        spread = torch.exp(1.5 * rng.tensor(width))
        xs = [rng.tensor(n, width) * spread - 0.4 * spread for n in batches]
        ws = [rng.tensor(n, width) * torch.exp(rng.tensor(width)) - 0.2 for n in weights]
        if width in (24, 33, 64, 17):
            for x in xs:
                x[:, 3] = 0.0
            for w in ws:
                w[:, 11] = 0.0
        if width == 64:  # as loud as real ones are
            for x in xs:
                x[:, 5] *= 3000
        yield Case((xs, ws, alpha), scale_in_float64(xs, ws, alpha), atol=0.0)


# 3


def fold_variant(gain, bias, weights, s, *, g=None, b=None, w=None):
    by = lambda v: v / s  # noqa: E731
    return (
        (g or by)(gain),
        None if bias is None else (b or by)(bias),
        [((w or (lambda v, i: v * s))(weight, i)) for i, weight in enumerate(weights)],
    )


FOLD = {
    "the bias of the norm is part of x: it must be divided too": lambda g, b, w, s: fold_variant(
        g, b, w, s, b=lambda v: v
    ),
    "only the first weight was multiplied: all of them read x": lambda g, b, w, s: fold_variant(
        g, b, w, s, w=lambda v, i: v * s if i == 0 else v
    ),
    "the other way round: x is divided by s, the weights are multiplied": lambda g, b, w, s: fold_variant(
        g, b, w, s, g=lambda v: v * s, b=lambda v: v * s, w=lambda v, i: v / s
    ),
    "both sides were divided: the weights must be multiplied": lambda g, b, w, s: fold_variant(
        g, b, w, s, w=lambda v, i: v / s
    ),
    "both sides were multiplied: gain and bias must be divided": lambda g, b, w, s: fold_variant(
        g, b, w, s, g=lambda v: v * s, b=lambda v: v * s
    ),
    "the weights are as they were: their columns must make up for it": lambda g, b, w, s: fold_variant(
        g, b, w, s, w=lambda v, i: v
    ),
    "the gain is as it was": lambda g, b, w, s: fold_variant(g, b, w, s, g=lambda v: v),
    "the gain was divided twice": lambda g, b, w, s: fold_variant(g, b, w, s, g=lambda v: v / s / s),
    "the bias was lost": lambda g, b, w, s: (*fold_variant(g, None, w, s)[:2], fold_variant(g, b, w, s)[2]),
    "the bias must be divided, not multiplied": lambda g, b, w, s: fold_variant(g, b, w, s, b=lambda v: v * s),
}


def fold_by_columns(gain, bias, weights, s):
    """Column by column, in float64."""
    g = torch.tensor([float(a) / float(k) for a, k in zip(gain, s)])
    b = None if bias is None else torch.tensor([float(a) / float(k) for a, k in zip(bias, s)])
    columns = [torch.stack([w[:, j].double() * float(k) for j, k in enumerate(s)], 1).float() for w in weights]
    return g, b, columns


def rows_scaled(got, expected, case):
    weights, s = case.args[2], case.args[3]
    try:
        first, rows = got[2][0], weights[0] * s[:, None]
        return first.shape == rows.shape and torch.allclose(first, rows)
    except (RuntimeError, TypeError, IndexError, AttributeError):
        return isinstance(got, RuntimeError)


@register(
    "13.fold",
    title="Fold it in",
    hints=[*slips(FOLD), Hint("s belongs to input channels: columns of a weight, not rows", when=rows_scaled)],
)
def fold(rng):
    yield Case(
        (torch.tensor([2.0, 6.0]), None, [torch.tensor([[1.0, 1.0]])], torch.tensor([1.0, 3.0])),
        (torch.tensor([2.0, 2.0]), None, [torch.tensor([[1.0, 3.0]])]),
    )
    for width, outs, has_bias in ((5, [7], False), (8, [8], True), (16, [16, 4, 4], True), (40, [9, 33], False)):
        gain, s = rng.tensor(width), torch.exp(rng.tensor(width))
        bias = rng.tensor(width) if has_bias else None
        weights = [rng.tensor(out, width) for out in outs]
        yield Case((gain, bias, weights, s), fold_by_columns(gain, bias, weights, s))


# 4


def e4m3_variant(x, *, mantissa=3, least=-6, top=448.0, rounding=torch.round, shift=1, flush=False):
    """An `e4m3` with a mistake in it."""
    x = x.clamp(-top, top) if top else x
    exponent = torch.frexp(x).exponent - shift
    exponent = exponent if least is None else exponent.clamp(min=least)
    step = torch.exp2((exponent - mantissa).float())
    y = rounding(x / step) * step
    return torch.where(x.abs() < 2.0**-6, torch.zeros_like(y), y) if flush else y


CAST = {
    "ties go to the even code: floor(x + 0.5) takes them all up": lambda x: e4m3_variant(
        x, rounding=lambda v: (v + 0.5).floor()
    ),
    "ties go to the even code, not away from 0": lambda x: e4m3_variant(
        x, rounding=lambda v: v.sign() * (v.abs() + 0.5).floor()
    ),
    "truncated: round to the nearest": lambda x: e4m3_variant(x, rounding=torch.trunc),
    "rounded down: round to the nearest": lambda x: e4m3_variant(x, rounding=torch.floor),
    "below 2^-6 there are subnormal numbers: small values must not all become 0": lambda x: e4m3_variant(
        x, flush=True
    ),
    "from 2^-10 on the nearest is 2^-9, not 0": lambda x: e4m3_variant(x) * (x.abs() >= 2.0**-9),
    "the exponent is not clamped at -6: below it the steps stay equal": lambda x: e4m3_variant(x, least=None),
    "the smallest exponent is -6, not -7": lambda x: e4m3_variant(x, least=-7),
    "the smallest exponent is -6; clamped at -5 the steps are too coarse": lambda x: e4m3_variant(x, least=-5),
    "beyond 448 it must saturate": lambda x: e4m3_variant(x, top=None),
    "480 is no number of E4M3: that code is NaN; the largest is 448": lambda x: e4m3_variant(x, top=480.0),
    "that is E5M2: four bits of exponent and three of mantissa are asked for": lambda x: (
        x.clamp(-448, 448).to(torch.float8_e5m2).float()
    ),
    "two bits of mantissa: that is E5M2's step": lambda x: e4m3_variant(x, mantissa=2),
    "four bits of mantissa: 2^(e-4) is a step too fine": lambda x: e4m3_variant(x, mantissa=4),
    "e is off by one: frexp's mantissa is below 1, so e = exponent - 1": lambda x: e4m3_variant(x, shift=0),
    "240 is the end of another E4M3 (fnuz); here it is 448": lambda x: e4m3_variant(x, top=240.0),
}


def nan_gone(got, expected, case):
    return torch.is_tensor(got) and got.shape == expected.shape and bool((expected.isnan() & ~got.isnan()).any())


def nan_for_zero(got, expected, case):
    return torch.is_tensor(got) and got.shape == expected.shape and bool((got.isnan() & (case.args[0] == 0)).any())


def nan_for_large(got, expected, case):
    same = torch.is_tensor(got) and got.shape == expected.shape
    return same and bool((got.isnan() & (expected.abs() == 448)).any())


@register(
    "13.e4m3",
    points=3,
    title="A cast to E4M3",
    hints=[
        Hint("0 became NaN: log2(0) is -inf; clamp the exponent, or |x|, first", when=nan_for_zero),
        Hint("NaN must stay NaN", when=nan_gone),
        Hint("beyond 448 it must saturate, not become NaN", when=nan_for_large),
        *slips(CAST),
    ],
)
def e4m3(rng):
    def case(x):
        return Case((x,), x.clamp(-448, 448).to(torch.float8_e4m3fn).float(), rtol=1e-6, atol=0.0)

    yield case(torch.tensor([1.06, 1.0625, 17.0, 0.001, 500.0]))
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # all that are not negative
    ties = (numbers[1:] + numbers[:-1]) / 2
    signs = 1.0 - 2.0 * rng.ints(2, 3000)
    yield case(torch.exp2(torch.rand(3000, generator=rng.generator) * 14 - 6) * signs)  # the normal range
    yield case(torch.cat((numbers, -numbers)))
    yield case(torch.cat((ties, -ties)).view(2, -1))
    yield case(torch.rand(40, 50, generator=rng.generator) * 2.0**-5 * signs[:2000].view(40, 50))  # subnormal
    yield case(torch.tensor([0.0, -0.0, 2.0**-10, 2.0**-11, 1e-20, -1e-38]))
    yield case(torch.tensor([448.0, 449.0, 463.9, 464.0, 465.0, 480.0, 1e4, -3e38, float("inf"), -float("inf")]))
    yield case(torch.tensor([1.0, float("nan"), -7.0]))


# 5


def given_smoothed(x, w, s):
    scale_x = x.abs().amax(1, keepdim=True) / 127
    scale_w = w.abs().amax(1, keepdim=True) / 127
    x, w = x / s, w * s
    a = (x / scale_x).round().to(torch.int8)
    b = (w / scale_w).round().to(torch.int8)
    return (a.int() @ b.int().T) * scale_x * scale_w.T


def smoothed_variant(x, w, s, *, x_from="after", w_from="after", use=True, back=None, clamp=True):
    """A `smoothed_linear` with a mistake in it."""
    xs, ws = (x / s, w * s) if use else (x, w)
    scale_x = rows_of(xs if x_from == "after" else x) / 127
    scale_w = rows_of(ws if w_from == "after" else w) / 127
    codes = [(v / t).round() for v, t in ((xs, scale_x), (ws, scale_w))]
    a, b = (c.clamp(-127, 127) if clamp else c.to(torch.int32).to(torch.int8).float() for c in codes)
    y = (a.double() @ b.double().T).float() * scale_x * scale_w.T
    return y if back is None else back(y, s)


SMOOTHED = {
    "clamping hides the fault: the scales are still those of x and W before s": lambda *a: smoothed_variant(
        *a, x_from="before", w_from="before"
    ),
    "W's scale is still that of W before s": lambda *a: smoothed_variant(*a, w_from="before"),
    "W's scale is still that of W before s ": lambda *a: smoothed_variant(*a, w_from="before", clamp=False),
    "x's scale is still that of x before s": lambda *a: smoothed_variant(*a, x_from="before"),
    "x's scale is still that of x before s ": lambda *a: smoothed_variant(*a, x_from="before", clamp=False),
    "s is not used any more: that is the layer before smoothing": lambda *a: smoothed_variant(*a, use=False),
    "that is the float product: the layer must multiply codes": lambda x, w, s: x @ w.T,
    "the sides are swapped: x is divided by s, W multiplied": lambda x, w, s: smoothed_variant(x, w, 1 / s),
    "the order is as it was: the scales are taken before x and W are smoothed": given_smoothed,
}


def smoothed_in_float64(x, w, s):
    rows = []
    for matrix in (x.double() / s.double(), w.double() * s.double()):
        scale = matrix.abs().amax(1, keepdim=True) / 127
        rows.append((matrix / scale).round() * scale)
    return (rows[0] @ rows[1].T).float()


@register(
    "13.smoothed_linear",
    points=2,
    title="Debug it: smoothing made it worse",
    hints=slips(SMOOTHED),
    given=given_smoothed,
)
def smoothed_linear(rng):
    example = (torch.tensor([[100.0, 1.0]]), torch.tensor([[1.0, 3.0]]), torch.tensor([10.0, 1.0]))
    yield Case(example, smoothed_in_float64(*example))
    for tokens, width, out in ((3, 6, 4), (8, 24, 8), (5, 64, 12), (12, 33, 7)):

        def make(tokens=tokens, width=width, out=out):
            loud = torch.exp(1.8 * rng.tensor(width))
            x, w = rng.tensor(tokens, width) * loud, rng.tensor(out, width)
            return x, w, x.abs().amax(0) ** 0.5 / w.abs().amax(0) ** 0.5

        codes = lambda x, w, s: [127 * v / rows_of(v) for v in (x.double() / s.double(), w.double() * s.double())]  # noqa: E731
        x, w, s = clear_of_ties(make, codes)
        yield Case((x, w, s), smoothed_in_float64(x, w, s))


# 6

ESTIMATES = {
    "codes": (
        254 / 90,
        {
            2 / (180 / 256): "256 codes from -90 to 90: symmetric INT8 has 127 on each side",
            90 / 2: "upside down: value / scale",
            2 / (90 / 255): "the range has two sides: 127 steps for 90",
        },
    ),
    "worst": (
        1 / 17,
        {
            1 / 8: "a whole step: the nearest is at most half a step away",
            1 / 16: "near: 1/16 of 2^e, but x itself is 1 + 1/16 there",
            1 / 9: "two bits of mantissa are E5M2's",
            1 / 33: "four bits: E4M3 has three of mantissa",
        },
    ),
    "bytes": (
        4096 * 11008 + 4 * 11008,
        {
            8 * 4096 * 11008: "bits, not bytes",
            2 * 4096 * 11008 + 4 * 11008: "INT8 is one byte a weight, not two",
            4 * 4096 * 11008: "elements of 4 bytes: the codes are INT8",
            4096 * 11008 / 2 + 4 * 11008: "half a byte is INT4",
        },
    ),
    "rows": (
        1979e12 / 3.35e12 / 2,
        {
            1979e12 / 3.35e12: "a multiplication and an addition are two operations a byte and row",
            989e12 / 3.35e12 / 2: "bfloat16's rate with INT8's bytes",
            1979e12 / 3.35e12 / 4: "rows, not operations a byte: twice too small",
            3.35e12 / 1979e12: "upside down",
        },
    ),
    "speedup": (
        1 / 0.6,
        {
            2.0: "only 80 % of the time is products: the rest stays",
            0.6: "that is the share of the time that is left: its inverse is asked for",
            1 / 0.9: "the 80 % stay and the 20 % are halved: the other way round",
            1.8: "times cannot be averaged as speeds: add up what is left of each part",
        },
    ),
}


@register("13.estimates", title="Estimate it: codes, bytes, rows")
def figures(rng):
    yield from estimates("estimates", ESTIMATES, 0.005)
