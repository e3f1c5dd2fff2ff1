"""Checks of exercise 12. Oracles: float64 sums token by token, least squares, H inverted anew at each column.

Chapter 12.
"""

from __future__ import annotations

import torch

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.estimates import slips


def inputs(rng, tokens: int, width: int):
    """Correlated inputs with channels of unequal size, [tokens, width]."""
    x = rng.tensor(tokens, width) @ rng.tensor(width, width) / width**0.5
    return x * torch.linspace(0.3, 2.5, width)[torch.randperm(width, generator=rng.generator)]


def moment(x):
    return x.T @ x / len(x)


# 1


def averaged(of, over=lambda batches: sum(x[..., 0].numel() for x in batches)):
    """A `moments` with another sum or another divisor."""

    def wrong(batches):
        rows = [x.flatten(0, 1) for x in batches]
        return sum(of(x) for x in rows) / over(batches), sum(x.abs().sum(0) for x in rows) / over(batches)

    return wrong


def mean_of_means(batches):
    rows = [x.flatten(0, 1) for x in batches]
    return sum(moment(x) for x in rows) / len(rows), sum(x.abs().mean(0) for x in rows) / len(rows)


def covariance(batches):
    x = torch.cat([x.flatten(0, 1) for x in batches])
    return moment(x - x.mean(0)), x.abs().mean(0)


def no_abs(batches):
    x = torch.cat([x.flatten(0, 1) for x in batches])
    return moment(x), x.mean(0)


def root_mean_square(batches):
    x = torch.cat([x.flatten(0, 1) for x in batches])
    return moment(x), x.square().mean(0).sqrt()


MOMENTS = {
    "a mean of the batches' means: a batch of few tokens weighs as much as one of many": mean_of_means,
    "these are sums: divide by the number of tokens": averaged(lambda x: x.T @ x, lambda batches: 1),
    "divided by the number of samples: each has `time` tokens": averaged(
        lambda x: x.T @ x, lambda batches: sum(len(x) for x in batches)
    ),
    "divided by the number of batches, not of tokens": averaged(lambda x: x.T @ x, len),
    "the mean was taken off: that is the covariance, and the mean of x makes errors too": covariance,
    "E|x| is the mean of absolute values: without them, signs cancel": no_abs,
    "that is the root of the mean square; E|x| is asked for": root_mean_square,
    "only the last batch counts": lambda batches: mean_of_means(batches[-1:]),
    "the factor 2 of the Hessian is not part of E[x x^T]": lambda batches: (
        2 * averaged(lambda x: x.T @ x)(batches)[0],
        averaged(lambda x: x.T @ x)(batches)[1],
    ),
}


@register("12.moments", points=1, title="The moments of the inputs", hints=slips(MOMENTS))
def moments(rng):
    for width, shapes in (
        (2, [(1, 1)]),
        (5, [(2, 7)]),
        (8, [(3, 5), (1, 40), (2, 1)]),
        (17, [(1, 3), (4, 30)]),
        (64, [(2, 9), (5, 11), (1, 1), (3, 2)]),
    ):
        batches = [rng.tensor(*shape, width) + 0.7 for shape in shapes]
        h, mean, count = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64), 0
        for batch in batches:
            for token in batch.double().reshape(-1, width):
                h += torch.outer(token, token)
                mean += token.abs()
                count += 1
        yield Case((batches,), ((h / count).float(), (mean / count).float()))


# 2


def change(w, h, j, rounded, first=None, sign=-1.0, solve=None):
    """A `compensate` with a mistake in it."""
    new, start = w.clone(), j + 1 if first is None else first
    vector = (solve or torch.linalg.solve)(h[start:, start:], h[start:, j])
    new[:, start:] += sign * torch.outer(rounded - w[:, j], vector)
    new[:, j] = rounded
    return new


def by_least_squares(w, h, j, rounded):
    """Not the normal equations: with H = R^T R, minimise |R_rest d + R_j delta| by QR, in float64."""
    root = torch.linalg.cholesky(h.double()).T
    target = -torch.outer(root[:, j], (rounded - w[:, j]).double())  # [in, out]
    new = w.double().clone()
    new[:, j] = rounded.double()
    if j + 1 < len(h):
        new[:, j + 1 :] += torch.linalg.lstsq(root[:, j + 1 :], target).solution.T
    return new.float()


def everything_moves(w, h, j, rounded):
    new, others = w.clone(), [k for k in range(len(h)) if k != j]
    new[:, others] -= torch.outer(rounded - w[:, j], torch.linalg.solve(h[others][:, others], h[others, j]))
    new[:, j] = rounded
    return new


def whole_inverse(w, h, j, rounded):
    inverse = torch.linalg.inv(h)
    new = w.clone()
    new[:, j + 1 :] += torch.outer(rounded - w[:, j], inverse[j, j + 1 :] / inverse[j, j])
    new[:, j] = rounded
    return new


def only_rounded(w, h, j, rounded):
    new = w.clone()
    new[:, j] = rounded
    return new


COMPENSATE = {
    "the sign: the later columns add to the error in place of making up for it": lambda *a: change(*a, sign=1.0),
    "that divides by H's diagonal alone: right for two columns, not for more": lambda *a: change(
        *a, solve=lambda a, b: b / a.diagonal()
    ),
    "column j is rounded, and no later column makes up for it": only_rounded,
    "columns before j are final: they may not move": everything_moves,
    "the inverse of all of H: columns before j are final, so only H from column j on may be inverted": whole_inverse,
    "column j keeps its old value: it is rounded now": lambda w, h, j, rounded: torch.cat(
        (w[:, : j + 1], change(w, h, j, rounded)[:, j + 1 :]), 1
    ),
    "column j was rounded once more: what it became is `rounded`": lambda w, h, j, rounded: change(
        w, h, j, w[:, j].round()
    ),
    "only the next column makes up for it: all later ones must": lambda *a: next_only(*a),
    "H itself in the place of its inverse": lambda *a: change(*a, solve=lambda a, b: b),
}


def next_only(w, h, j, rounded):
    new = only_rounded(w, h, j, rounded)
    if j + 1 < len(h):
        new[:, j + 1] -= (rounded - w[:, j]) * h[j + 1, j] / h[j + 1, j + 1]
    return new


@register("12.compensate", points=3, title="GPTQ's update for one column", hints=slips(COMPENSATE))
def compensate(rng):
    example = (torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.5], [0.5, 1.0]]), 0, torch.tensor([0.0]))
    yield Case(example, torch.tensor([[0.0, 1.5]]))
    for out, width, j in ((1, 3, 0), (4, 6, 0), (3, 6, 2), (5, 6, 5), (7, 12, 4), (2, 12, 10), (16, 24, 9)):
        h = moment(inputs(rng, 6 * width, width)) + 0.05 * torch.eye(width)
        w = rng.tensor(out, width)
        rounded = (2 * w[:, j]).round() / 2  # a grid that the answer cannot guess
        yield Case((w, h, j, rounded), by_least_squares(w, h, j, rounded), rtol=1e-3, atol=1e-3)


# 3


def swept(w, h, scale, bits, damping=0.01, step=change, top=None, damp=None, clamp=True):
    """A `sweep` with a mistake in it."""
    top = 2 ** (bits - 1) - 1 if top is None else top(bits)
    codes, eye = torch.zeros(w.shape), torch.eye(len(h))
    damped = h + damping * h.diagonal().mean() * eye if damp is None else damp(h, damping, eye)
    for j in range(w.shape[1]):
        code = (w[:, j] / scale).round()
        codes[:, j] = code.clamp(-top, top) if clamp else code
        w = step(w, damped, j, codes[:, j] * scale)
    return codes.to(torch.int8)


def by_inverses(w, h, scale, bits, damping):
    """Optimal brain surgeon in float64: what is left of H is inverted anew at each column."""
    w, scale, width, top = w.double().clone(), scale.double(), len(h), 2 ** (bits - 1) - 1
    h = h.double() + damping * h.double().diagonal().mean() * torch.eye(width, dtype=torch.float64)
    codes = torch.zeros(w.shape, dtype=torch.int8)
    margin = torch.full(w.shape, 1.0, dtype=torch.float64)  # how far from a tie each rounding was
    for j in range(width):
        steps = w[:, j] / scale
        margin[:, j] = ((steps - steps.floor()) - 0.5).abs()
        codes[:, j] = steps.round().clamp(-top, top).to(torch.int8)
        inverse = torch.linalg.inv(h[j:, j:])
        w[:, j:] -= torch.outer(w[:, j] - codes[:, j] * scale, inverse[0] / inverse[0, 0])
    return codes, margin.min().item()


SWEEP = {
    "that is rounding to the nearest: each column must be rounded from the W that earlier columns have changed": (
        lambda w, h, s, b, damping=0.01: swept(w, h, s, b, damping, step=lambda w, *a: w)
    ),
    "the clamp is missing: a moved weight can leave the range of codes": lambda *a, **k: swept(*a, **k, clamp=False),
    "the range: symmetric codes end at 2^(bits-1) - 1": lambda *a, **k: swept(*a, **k, top=lambda b: 2 ** (b - 1)),
    "damping is missing": lambda *a, **k: swept(*a, **k, damp=lambda h, d, eye: h + 1e-6 * h.diagonal().mean() * eye),
    "damping goes on the diagonal only": lambda *a, **k: swept(
        *a, **k, damp=lambda h, d, eye: h + d * h.diagonal().mean()
    ),
    "damping is a share of the mean diagonal, not a number of its own": lambda *a, **k: swept(
        *a, **k, damp=lambda h, d, eye: h + d * eye
    ),
    "the sign of the update: errors add up": lambda *a, **k: swept(*a, **k, step=lambda *b: change(*b, sign=1.0)),
    "errors were spread with the inverse of all of H: only what is left of it may be inverted": lambda *a, **k: swept(
        *a, **k, step=whole_inverse
    ),
    "only the next column makes up for an error: all later ones must": lambda *a, **k: swept(*a, **k, step=next_only),
    "that divides by H's diagonal alone: right for two columns, not for more": lambda *a, **k: swept(
        *a, **k, step=lambda *b: change(*b, solve=lambda a, b: b / a.diagonal())
    ),
}


@register("12.sweep", points=3, title="The whole sweep", hints=slips(SWEEP))
def sweep(rng):
    h = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    yield Case((torch.tensor([[0.4, 1.4]]), h, torch.tensor([1.0]), 4, 0.0), torch.tensor([[0, 2]]), dtype=torch.int8)
    plans = [
        (6, 8, 4, 0.01, 60),
        (10, 16, 3, 0.05, 100),
        (8, 24, 2, 0.01, 90),
        (12, 32, 4, 0.1, 20),
        (5, 12, 8, 0.3, 6),
    ]
    for out, width, bits, damping, tokens in plans:
        while True:  # a case without near ties, which another order of the same sums would round the other way
            w, hessian = rng.tensor(out, width), moment(inputs(rng, tokens, width)) * 4
            scale = w.abs().amax(1) / (2 ** (bits - 1) - 1) * 0.8  # clips a few
            expected, margin = by_inverses(w, hessian, scale, bits, damping)
            if margin > 3e-4:
                break
        yield Case((w, hessian, scale, bits, damping), expected, dtype=torch.int8)


# 4


def rounding(bits):
    """Symmetric, one scale a row."""

    def quantise(w):
        scale = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (w / scale).round() * scale

    return quantise


def output_error(w, q, x) -> float:
    return ((w - q) @ x.T).square().sum().item()


def chosen(w, x, quantise, alphas, s_of=None, error_of=None, undo=True, worst=False, rows=False):
    """A `choose_alpha` with a mistake in it."""
    found = []
    for alpha in alphas:
        s = (s_of or (lambda x, a: x.abs().mean(0) ** a))(x, alpha)
        q = quantise(w * s)
        q = q / s if undo else q
        error = (error_of or (lambda w, q, x: ((w - q) @ x.T).square().sum()))(w, q, x)
        found.append((error.item(), alpha, q))
    pick = (max if worst else min)(found, key=lambda row: row[0])
    return pick[1], pick[2]


ALPHA = {
    "the scale was not undone: Q must act on the unscaled x": lambda *a: chosen(*a, undo=False),
    "the error of the weights, not of the outputs: large inputs must count for more": lambda *a: chosen(
        *a, error_of=lambda w, q, x: (w - q).square().sum()
    ),
    "E|x| to the power of alpha, not the root of E x^2": lambda *a: chosen(
        *a, s_of=lambda x, k: x.square().mean(0).sqrt() ** k
    ),
    "the largest |x|, not the mean": lambda *a: chosen(*a, s_of=lambda x, k: x.abs().amax(0) ** k),
    "E x, with its sign, not E|x|": lambda *a: chosen(*a, s_of=lambda x, k: x.mean(0).abs() ** k),
    "that is the alpha with the largest error": lambda *a: chosen(*a, worst=True),
    "the scale is upside down: columns with large inputs must be scaled up": lambda *a: chosen(
        *a, s_of=lambda x, k: x.abs().mean(0) ** -k
    ),
    "alpha multiplies: it must be the exponent": lambda w, x, f, alphas: chosen(
        w, x, f, alphas, s_of=lambda x, k: x.abs().mean(0) * k + 1e-9
    ),
    "always plain rounding: try every alpha": lambda w, x, f, alphas: (0.0, f(w)),
    "the search ended at the first alpha that was worse: try every one": lambda *a: first_valley(*a),
    "the first alpha: compare their errors": lambda w, x, f, alphas: chosen(w, x, f, alphas[:1]),
    "the last alpha: compare their errors": lambda w, x, f, alphas: chosen(w, x, f, alphas[-1:]),
    "the error of the mean output: signs cancel; square first": lambda *a: chosen(
        *a, error_of=lambda w, q, x: ((w - q) @ x.T).sum().square()
    ),
}


def first_valley(w, x, quantise, alphas):
    best = None
    for alpha in alphas:
        found = chosen(w, x, quantise, [alpha])
        error = output_error(w, found[1], x)
        if best is not None and error > best[0]:
            break
        best = (error, found)
    return best[1]


def alpha_in_float64(w, x, quantise, alphas):
    """Token by token, output by output."""
    best, w64 = None, w.double()
    mean = torch.stack([token.abs() for token in x.double()]).mean(0)
    for alpha in alphas:
        s = torch.exp(alpha * mean.log())
        q = quantise((w64 * s).float()).double() / s
        error = sum(float(((w64 - q) @ token).pow(2).sum()) for token in x.double())
        if best is None or error < best[0]:
            best = (error, alpha, q.float())
    return best[1], best[2]


@register("12.choose_alpha", points=2, title="A scale for AWQ", hints=slips(ALPHA))
def choose_alpha(rng):
    grid = [round(0.1 * k, 1) for k in range(11)]
    plans = [
        (6, 8, 3, [0.0, 0.5, 1.0]),
        (24, 32, 3, grid),
        (48, 24, 4, grid),
        (16, 40, 2, rng.sample(grid, len(grid))),  # in no order: the best may follow a worse one
        (32, 16, 3, grid[3:]),
    ]
    for out, width, bits, alphas in plans:
        quantise = rounding(bits)
        while True:  # a case with a clear winner, and another one for the sum of absolute errors
            x = rng.tensor(80, width) * torch.exp(1.6 * rng.tensor(width))
            x = x * (1 + 4 * torch.rand(80, 1, generator=rng.generator) ** 8) + 0.3  # a few loud tokens
            w = rng.tensor(out, width) / x.abs().mean(0) ** 0.3
            errors = sorted(output_error(w, chosen(w, x, quantise, [alpha])[1], x) for alpha in alphas)
            other = chosen(w, x, quantise, alphas, error_of=lambda w, q, x: ((w - q) @ x.T).abs().sum())
            if errors[1] > 1.001 * errors[0] and (len(alphas) < 8 or other[0] != chosen(w, x, quantise, alphas)[0]):
                break
        call = f"choose_alpha(w [{out}, {width}], x [80, {width}], quantise to {bits} bits, {alphas})"
        yield Case((w, x, quantise, alphas), alpha_in_float64(w, x, quantise, alphas), call=call)


# 5


def given_act_order(w, h, scale, bits, sweep):
    order = h.diagonal().argsort(descending=True)
    codes = sweep(w[:, order], h[order][:, order], scale, bits)
    return codes[:, order]


def reordered(w, h, scale, bits, sweep, order=None, both=True, undo=lambda codes, order: codes[:, order.argsort()]):
    order = h.diagonal().argsort(descending=True) if order is None else order(h)
    return undo(sweep(w[:, order], h[order][:, order] if both else h, scale, bits), order)


ACT_ORDER = {
    "that is the sorting once more, not its inverse": given_act_order,
    "the codes are still in the sorted order": lambda *a: reordered(*a, undo=lambda codes, order: codes),
    "no act-order at all: the codes must be those of the sorted sweep": lambda w, h, s, b, sweep: sweep(w, h, s, b),
    "the quiet channels first: the order must be falling": lambda *a: reordered(
        *a, order=lambda h: h.diagonal().argsort()
    ),
    "H must be sorted too, rows and columns": lambda *a: reordered(*a, both=False),
    "H was sorted in its rows only": lambda w, h, s, b, sweep: reordered_rows(w, h, s, b, sweep),
    "flipped: that undoes a reversal, not this order": lambda *a: reordered(
        *a, undo=lambda codes, order: codes.flip(1)
    ),
}


def reordered_rows(w, h, scale, bits, sweep):
    order = h.diagonal().argsort(descending=True)
    return sweep(w[:, order], h[order], scale, bits)[:, order.argsort()]


def plain_sweep(w, h, scale, bits):
    """What is passed to the reader; H as it comes, so that a wrong H shows."""
    return swept(w, h.double().float(), scale, bits, 0.05)


def by_place(w, h, scale, bits):
    """The sorted sweep, each column's codes written to its place by hand."""
    order = sorted(range(len(h)), key=lambda j: -float(h[j, j]))
    w2 = torch.stack([w[:, j] for j in order], 1)
    h2 = torch.stack([torch.stack([h[a, b] for b in order]) for a in order])
    found, codes = plain_sweep(w2, h2, scale, bits), torch.zeros(w.shape, dtype=torch.int8)
    for place, j in enumerate(order):
        codes[:, j] = found[:, place]
    return codes


@register(
    "12.with_act_order",
    points=2,
    title="Debug it: act-order made it worse",
    hints=slips(ACT_ORDER),
    given=given_act_order,
)
def with_act_order(rng):
    for out, width, bits in ((4, 5, 4), (8, 12, 3), (6, 24, 4), (16, 17, 3)):
        w, h = rng.tensor(out, width), moment(inputs(rng, 5 * width, width))
        scale = w.abs().amax(1) / (2 ** (bits - 1) - 1)
        call = f"with_act_order(w [{out}, {width}], h, scale, {bits}, sweep)"
        yield Case((w, h, scale, bits, plain_sweep), by_place(w, h, scale, bits), call=call)


# 6


WIDTHS = (4096, 4096, 4096, 11008)
WEIGHTS = 32 * (4 * 4096 * 4096 + 2 * 4096 * 11008 + 11008 * 4096)
COSTS = {
    "hessians": (
        4 * (3 * 4096**2 + 11008**2),
        {
            "one H a linear: q, k, v share theirs, and so do gate and up": 4 * (6 * 4096**2 + 11008**2),
            "down's H is as wide as its inputs, 11,008": 4 * 4 * 4096**2,
            "elements, not bytes": 3 * 4096**2 + 11008**2,
            "16 bits: H is kept in float32": 2 * (3 * 4096**2 + 11008**2),
            "of all blocks: one block at a time is enough": 32 * 4 * (3 * 4096**2 + 11008**2),
            "gate and up read the hidden state, 4,096 wide": 4 * (2 * 4096**2 + 2 * 11008**2),
        },
    ),
    "activations": (
        128 * 2048 * 2 * (3 * 4096 + 11008),
        {
            "float32: 16 bits were asked for": 128 * 2048 * 4 * (3 * 4096 + 11008),
            "one sample of the 128": 2048 * 2 * (3 * 4096 + 11008),
            "shared inputs once: four sets, not seven": 128 * 2048 * 2 * (6 * 4096 + 11008),
            "of all blocks: one block's are asked for": 32 * 128 * 2048 * 2 * (3 * 4096 + 11008),
            "elements, not bytes": 128 * 2048 * (3 * 4096 + 11008),
        },
    ),
    "factor": (
        32 / 3 * (3 * 4096**3 + 11008**3),
        {
            "of one block: 32 are asked for": (3 * 4096**3 + 11008**3) / 3,
            "n^3 / 3, not n^3": 32 * (3 * 4096**3 + 11008**3),
            "one factorisation a linear: shared inputs have one H": 32 / 3 * (6 * 4096**3 + 11008**3),
            "squares: a factorisation takes n^3 / 3": 32 / 3 * (3 * 4096**2 + 11008**2),
        },
    ),
    "packed": (
        WEIGHTS * (4 + 20 / 128) / 8,
        {
            "scales and zero points are missing": WEIGHTS / 2,
            "bits, not bytes": WEIGHTS * (4 + 20 / 128),
            "zero points are missing": WEIGHTS * (4 + 16 / 128) / 8,
            "of one block: 32 are asked for": WEIGHTS / 32 * (4 + 20 / 128) / 8,
            "a scale and a zero point a weight: they are shared by 128": WEIGHTS * 24 / 8,
        },
    ),
}


@register("12.costs", points=1, title="Estimate it: what does the conversion cost?")
def costs(rng):
    for key, (value, wrong) in COSTS.items():
        rtol = 0.002 if key == "packed" else 0.03
        hints = [Hint(text, wrong=lambda key=key, number=number: {key: number}) for text, number in wrong.items()]
        yield Drive(lambda answer, key=key: answer()[key], value, f"costs()[{key!r}]", rtol=rtol, hints=hints)
