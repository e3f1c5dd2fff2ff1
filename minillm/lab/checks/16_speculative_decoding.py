"""Checks of exercise 16. Oracles: fractions, every draft token gone through, sums written out.

Chapter 16.
"""

from __future__ import annotations

from fractions import Fraction

import torch

from minillm.lab.check import Case, Hint, register
from minillm.lab.estimates import slips


def weights(rng, vocab: int, zeros: int = 0) -> list[Fraction]:
    """A distribution in 64ths of nothing in particular, some entries 0."""
    numbers = [rng.randint(1, 60) for _ in range(vocab)]
    for i in rng.sample(range(vocab), min(zeros, vocab - 1)):
        numbers[i] = 0
    return [Fraction(n, sum(numbers)) for n in numbers]


def tensor(law) -> torch.Tensor:
    return torch.tensor([float(x) for x in law], dtype=torch.float64)


def rest(p, q) -> list[Fraction]:
    left = [max(x - y, Fraction(0)) for x, y in zip(p, q)]
    return [x / sum(left) for x in left] if sum(left) else list(p)


def torch_rest(p, q):
    left = (p - q).clamp(min=0)
    return left / left.sum() if left.sum() > 0 else p


# 1


def one(a=lambda p, q: float(torch.minimum(p, q).sum()), left=torch_rest):
    return lambda p, q: (a(p, q), left(p, q))


@register(
    "16.residual",
    points=2,
    title="What is kept, and what replaces the rest",
    hints=[
        Hint(
            "nan: 0 / 0, for a token with no probability in p nor in q; sum min(p, q) divides by nothing",
            when=lambda got, *_: bool(torch.as_tensor(got[0]).isnan()),
        ),
        Hint(
            "nan: where p equals q the residual sums to 0; return p there",
            when=lambda got, *_: bool(torch.as_tensor(got[1]).isnan().any()),
        ),
        *slips(
            {
                "the residual is not scaled: it must sum to 1": one(left=lambda p, q: (p - q).clamp(min=0)),
                "q - p is what is refused; the residual is what is missing, p - q": one(
                    left=lambda p, q: torch_rest(q, p)
                ),
                "the residual is (p - q)+, not p": one(left=lambda p, q: p),
                "negative parts are left in: clamp at 0 before you scale": one(left=lambda p, q: p - q),
                "p without the tokens that q likes: take q away, do not mask": one(
                    left=lambda p, q: p * (p > q) / (p * (p > q)).sum()
                ),
                "a is sum min(p, q), not sum p q": one(a=lambda p, q: float((p * q).sum())),
                "that is the probability of a refusal": one(a=lambda p, q: 1 - float(torch.minimum(p, q).sum())),
                "weigh min(1, p / q) by q: tokens are drawn from q, not all alike": one(
                    a=lambda p, q: float((p / q.clamp(min=1e-300)).clamp(max=1).mean())
                ),
            }
        ),
    ],
)
def residual_of(rng):
    for i in range(8):
        vocab = rng.choice([2, 3, 7, 33, 130])
        p, q = weights(rng, vocab, i % 3), weights(rng, vocab, (i + 1) % 3)
        a = sum((min(x, y) for x, y in zip(p, q)), Fraction(0))
        yield Case((tensor(p), tensor(q)), (float(a), tensor(rest(p, q))), rtol=1e-6, atol=1e-9)
    law = tensor([Fraction(1, 4)] * 4)
    yield Case((law, law.clone()), (1.0, law.clone()))
    yield Case((tensor([1, 0, 0]), tensor([0, Fraction(1, 2), Fraction(1, 2)])), (0.0, tensor([1, 0, 0])))
    half, quarter = Fraction(1, 2), Fraction(1, 4)  # a token that neither has
    yield Case((tensor([half, half, 0, 0]), tensor([quarter, 0, 3 * quarter, 0])), (0.25, tensor([1, 2, 0, 0]) / 3))
    p, little = weights(rng, 9), Fraction(1, 2**14)  # so near that almost nothing is refused: it has a residual still
    q = [p[0] - little, p[1] + little / 2, p[2] + little / 2, *p[3:]]
    left = tensor([1, *[0] * 8])
    yield Case((tensor(p), tensor(q)), (float(1 - little), left), rtol=1e-6, atol=1e-9)


# 2


def walk(p, q, tokens, uniforms) -> list[int]:
    """In fractions."""
    said = []
    for i, x in enumerate(tokens):
        if uniforms[i] * q[i][x] < p[i][x]:
            said.append(x)
            continue
        return [*said, pick(rest(p[i], q[i]), uniforms[-1])]
    return [*said, pick(p[len(tokens)], uniforms[-1])]


def pick(law, uniform) -> int:
    total = Fraction(0)
    for x, weight in enumerate(law):
        total += weight
        if total > uniform:
            return x
    raise AssertionError("the law sums to 1")


def slip(refused=torch_rest, keep=None, after=lambda said: said, last=True):
    """A verify with a mistake. refused(p, q): the law after a refusal."""

    def verify(p, q, tokens, uniforms):
        said, law = [], p[len(tokens)]
        for i, x in enumerate(tokens):
            if (keep or (lambda u, a, b: u * b < a))(uniforms[i], p[i, x], q[i, x]):
                said.append(x)
                continue
            law = refused(p[i], q[i]) if refused else p[len(tokens)]
            break
        else:
            if not last:
                return said
        return [*after(said), int((law.cumsum(0) <= uniforms[len(tokens)]).sum())]

    return verify


def keep_going(p, q, tokens, uniforms):
    said = [x if uniforms[i] * q[i, x] < p[i, x] else None for i, x in enumerate(tokens)]
    said = [
        x if x is not None else int((torch_rest(p[i], q[i]).cumsum(0) <= uniforms[-1]).sum())
        for i, x in enumerate(said)
    ]
    return [*said, int((p[-1].cumsum(0) <= uniforms[-1]).sum())]


@register(
    "16.verify",
    points=4,
    title="The verifier",
    hints=slips(
        {
            "u q(x) = p(x) is refused, else u = 0 keeps a token of probability 0": slip(
                keep=lambda u, a, b: u * b <= a
            ),
            "after a refusal draw from the residual (p - q)+, not from p": slip(refused=lambda p, q: p),
            "after a refusal draw at the place of the refusal, not from p[k]": slip(refused=None),
            "the bonus is missing: all kept gives k + 1 tokens": slip(last=False),
            "the rest of the draft continued a text that did not happen: stop at the first refusal": keep_going,
            "keep if u q(x) < p(x): the ratio is upside down": slip(keep=lambda u, a, b: u * a < b),
            "that keeps with probability p(x); it is min(1, p(x) / q(x))": slip(keep=lambda u, a, b: u < a),
            "that is greedy comparing, p(x) >= q(x); the uniform number decides below it": slip(
                keep=lambda u, a, b: a >= b
            ),
            "the residual after a refusal is (p - q)+, not (q - p)+": slip(refused=lambda p, q: torch_rest(q, p)),
        }
    ),
)
def verify(rng):
    for i in range(16):
        vocab, k = rng.choice([3, 5, 9, 70]), rng.choice([1, 2, 3, 4, 6])
        near = i % 2 == 0  # drafts that are like the target, and drafts that are not
        p = [weights(rng, vocab, i % 3) for _ in range(k + 1)]
        q = [
            [(3 * x + y) / 4 for x, y in zip(row, weights(rng, vocab))] if near else weights(rng, vocab) for row in p
        ]
        tokens = [rng.choices(range(vocab), [float(x) for x in row])[0] for row in q[:k]]
        if i in (3, 4):  # all kept
            q = [list(row) for row in p]
            tokens = [max(range(vocab), key=row.__getitem__) for row in p[:k]]
        uniforms = [Fraction(rng.randrange(1, 2**20, 2), 2**20) for _ in range(k + 1)]
        arguments = (
            torch.stack([tensor(row) for row in p]),
            torch.stack([tensor(row) for row in q[:k]]),
            tokens,
            [float(u) for u in uniforms],
        )
        yield Case(arguments, walk(p, q, tokens, uniforms))
    certain = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    yield Case((certain, torch.tensor([[0.0, 1.0]], dtype=torch.float64), [1], [0.0, 0.5]), [0])  # p(x) = 0, u = 0
    yield Case((certain, certain[:1].clone(), [0], [0.999, 0.3]), [0, 1])
    yield Case((certain[:1].clone(), certain[:0].clone(), [], [0.4]), [0])  # no draft: plain decoding
    yield Case((certain[1:].clone(), certain[:0].clone(), [], [0.0]), [1])  # token 0 has no probability at all
    rare = torch.tensor([[2.0**-13, 1 - 2.0**-13], [0.5, 0.5]], dtype=torch.float64)
    likelier = torch.tensor([[2.0**-12, 1 - 2.0**-12]], dtype=torch.float64)
    for uniform, said in ((0.49, [0, 0]), (0.51, [1])):  # p / q is 1/2, however small both are
        yield Case((rare, likelier, [0], [uniform, 0.25]), said)


# 3


def given(p, q, keep):
    """The function as the reader is given it."""
    replacement = p
    kept = q * keep  # [vocab]
    refused = (q * (1 - keep)).sum()
    return kept + refused * replacement


@register(
    "16.law_of_first",
    points=2,
    title="Debug it: it looks right",
    given=given,
    hints=slips(
        {
            "the replacement is still drawn from p": given,
            "p is what a right verifier gives; describe the verifier, whatever rule it is handed": (
                lambda p, q, keep: p
            ),
            "the replacement is (p - q)+, scaled to sum 1": lambda p, q, keep: (
                q * keep + (q * (1 - keep)).sum() * (p - q).clamp(min=0)
            ),
            "that is (q - p)+, what was refused": lambda p, q, keep: (
                q * keep + (q * (1 - keep)).sum() * torch_rest(q, p)
            ),
            "what is refused must come back: the law sums to less than 1": lambda p, q, keep: q * keep,
            "the replacement is drawn as often as a token is refused, not always": lambda p, q, keep: (
                q * keep + torch_rest(p, q)
            ),
        }
    ),
)
def law_of_first(rng):
    for i in range(9):
        vocab = rng.choice([2, 3, 6, 40])
        p, q = weights(rng, vocab, i % 3), weights(rng, vocab, (i + 1) % 3)
        if i == 4:
            q = list(p)
        keep = [min(Fraction(1), x / y) if y else Fraction(1) for x, y in zip(p, q)]
        if i > 5:  # another rule: its law is not p, and the description must say so
            keep = [Fraction(rng.randint(0, 8), 8) for _ in range(vocab)]
        out = [Fraction(0)] * vocab
        for x in range(vocab):
            out[x] += q[x] * keep[x]
            for y, weight in enumerate(rest(p, q)):
                out[y] += q[x] * (1 - keep[x]) * weight
        assert i > 5 or out == p
        yield Case((tensor(p), tensor(q), tensor(keep)), tensor(out), rtol=1e-9, atol=1e-9)


# 4


def common(held, text):
    return next((i for i, (x, y) in enumerate(zip(held, text)) if x != y), min(len(held), len(text)))


@register(
    "16.catch_up",
    points=2,
    title="What the draft's cache lacks",
    hints=slips(
        {
            "the last token must be fed even if it is held: the guess is read from its logits": lambda held, text: (
                common(held, text),
                text[common(held, text) :],
            ),
            "the bonus alone leaves a hole: every token that is missing must be fed": lambda held, text: (
                min(common(held, text), len(text) - 1),
                text[-1:],
            ),
            "an empty cache has nothing to keep, and lacks the whole text": lambda held, text: (
                len(text) - 1 if not held else min(common(held, text), len(text) - 1),
                text[-1:] if not held else text[min(common(held, text), len(text) - 1) :],
            ),
            "compare tokens, not lengths: what was refused is held and wrong": lambda held, text: (
                min(len(held), len(text) - 1),
                text[min(len(held), len(text) - 1) :],
            ),
            "that feeds the whole text again; what is held and right may stay": lambda held, text: (0, text),
            "equal tokens behind a wrong one were computed after the wrong one: only the common beginning stays": (
                lambda held, text: (
                    sum(x == y for x, y in zip(held, text[:-1])),
                    text[sum(x == y for x, y in zip(held, text[:-1])) :],
                )
            ),
        }
    ),
)
def catch_up(rng):
    yield Case(([], [7]), (0, [7]))
    yield Case(([], [7, 8, 9]), (0, [7, 8, 9]))  # the draft starts late
    text = [rng.randint(0, 5) for _ in range(70)]
    yield Case(([*text[:3], 9, *text[4:]], list(text)), (3, text[3:]))  # wrong long ago, right since
    for i in range(12):
        text = [rng.randint(0, 5) for _ in range(rng.choice([1, 2, 9, 40, 150]))]
        more = [rng.randint(6, 9) for _ in range(rng.randint(1, 5))]
        kind = i % 4
        if kind == 0:  # all kept: the last guess and the bonus are missing
            held, text = text + more[:-1], text + more + [3]
        elif kind == 1:  # refused early: what is held goes on in another way
            held, text = text + more, [*text, 3, *more[1:]]
        elif kind == 2:  # all of it is held
            held = list(text)
        else:  # more is held than the text has
            held = text + more
        keep = 0
        for n in range(len(text)):
            if held[:n] == text[:n] and n <= len(held):
                keep = n
        yield Case((held, list(text)), (keep, text[keep:]))


# 5


def length(tokens=lambda a, k: sum(a**i for i in range(k + 1)), cost=lambda k, c, v: 1 + k * (c + v), first=0):
    def best_length(a, c, v, most):
        gains = [tokens(a, k) / cost(k, c, v) for k in range(first, most + 1)]
        return gains.index(max(gains)) + first, max(gains)

    return best_length


@register(
    "16.best_length",
    points=2,
    title="Estimate it: how long should a draft be?",
    hints=slips(
        {
            "the token that comes in any case is missing: the sum starts at a^0": length(
                tokens=lambda a, k: sum(a**i for i in range(1, k + 1)) if k else 1
            ),
            "a k tokens: but token i is kept only if all before it were": length(tokens=lambda a, k: 1 + a * k),
            "a whole draft or nothing: a^k k counts no draft that was kept in part": length(
                tokens=lambda a, k: 1 + k * a**k
            ),
            "the cost of drafting is missing": length(cost=lambda k, c, v: 1 + k * v),
            "v is missing from the cost": length(cost=lambda k, c, v: 1 + k * c),
            "v is paid for each drafted token": length(cost=lambda k, c, v: 1 + k * c + v),
            "the target's own step is missing from the cost": length(cost=lambda k, c, v: max(k * (c + v), 1e-9)),
            "k = 0 has speed-up 1, and sometimes that is the best": length(first=1),
        }
    ),
)
def best_length(rng):
    for a, c, v, most in (
        (0.5, 0.25, 0.0, 8),
        (0.8, 0.1, 0.0, 20),
        (0.3, 0.4, 0.0, 8),
        (1.0, 0.05, 0.01, 40),
        (0.0, 0.1, 0.0, 8),
        (0.9, 0.02, 0.05, 6),
        (0.95, 0.01, 0.0, 64),
        (0.2, 0.05, 0.3, 5),
        (0.5, 0.25, 0.25, 4),  # k = 0 and k = 1 are equal
        (0.75, 0.125, 0.25, 0),
    ):
        best, gain = 0, 1.0
        for k in range(1, most + 1):
            chance, tokens = 1.0, 1.0
            for _ in range(k):
                chance *= a
                tokens += chance
            if tokens / (1 + k * c + k * v) > gain + 1e-12:
                best, gain = k, tokens / (1 + k * c + k * v)
        yield Case((a, c, v, most), (best, gain))
