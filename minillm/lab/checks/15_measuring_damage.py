"""Checks of exercise 15. Oracles: float64 loops token by token, over models that remember all they have read.

Chapter 15.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.estimates import slips


class Reader:
    """A small recurrent model, s_t = 0.8 s_(t-1) + E[x_t], logits = s_t W: what stands before in a window matters."""

    def __init__(self, rng, vocab: int, width: int = 6) -> None:
        self.embed, self.head = rng.tensor(vocab, width).double(), rng.tensor(width, vocab).double() * 1.5

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(tokens.shape[1])
        decay = torch.where(steps[:, None] >= steps, 0.8 ** (steps[:, None] - steps).clamp(min=0).double(), 0.0)
        return (decay @ self.embed[tokens] @ self.head).float()  # [batch, time, vocab]

    def logp(self, before: list[int], token: int) -> float:
        """ln p(token | before), one step after the other."""
        state = torch.zeros(self.embed.shape[1], dtype=torch.float64)
        for seen in before:
            state = 0.8 * state + self.embed[seen]
        return (state @ self.head).log_softmax(-1)[token].item()

    def __repr__(self) -> str:
        return "run"


# 1


def losses_with(new=None, stop=True, shift=1, context=None, keep_first=False):
    """A `strided_losses` with a mistake in it. new: (done, start, end, stride) -> first token scored."""

    def wrong(run, tokens, window, stride):
        losses, done = [], 1
        for start in range(0, len(tokens), stride):
            part = tokens[start : start + window]
            end = start + len(part)
            first = max(done, start + 1) if new is None else new(done, start, end, stride)
            first = max(first, start + 1)
            if context is not None:
                part, first = part[context(first, start) :], first
            offset = end - len(part)
            if first < end:
                logits = run(part[None])[0]
                rows = logits[first - offset - shift : len(part) - shift]
                losses.append(F.cross_entropy(rows, part[first - offset :], reduction="none"))
            done = end
            if stop and end == len(tokens):
                break
        return torch.cat(losses)

    return wrong


def whole_text(run, tokens, window, stride):
    return F.cross_entropy(run(tokens[None])[0, :-1], tokens[1:], reduction="none")


def one_at_a_time(run, tokens, window, stride):
    return losses_with()(run, tokens, window, 1)


def bits(run, tokens, window, stride):
    return losses_with()(run, tokens, window, stride) / math.log(2)


STRIDED = {
    "tokens of the overlap are scored again: each is scored once, in the first window that holds it": losses_with(
        new=lambda done, start, end, stride: start + 1, stop=False
    ),
    "tokens of the overlap are scored in every window that holds them": losses_with(
        new=lambda done, start, end, stride: start + 1
    ),
    "only the last `stride` tokens of the first window are scored: all of its tokens are new": losses_with(
        new=lambda done, start, end, stride: max(done, end - stride)
    ),
    "row i of the logits is about token i + 1, not about token i": losses_with(shift=0),
    "the new tokens lost what stands before them in their window": losses_with(
        context=lambda first, start: max(first - start - 1, 0)
    ),
    "the whole text was read at once: a token sees its own window only": whole_text,
    "the stride is not used: windows start `stride` tokens apart": lambda r, t, w, s: losses_with()(r, t, w, w),
    "windows start `stride` tokens apart, not one": one_at_a_time,
    "those are bits: losses are asked for in nats": bits,
}


@register("15.strided_losses", points=3, title="Losses with a stride", hints=slips(STRIDED))
def strided_losses(rng):
    sizes = ((10, 4, 3), (10, 4, 4), (9, 16, 5), (23, 8, 2), (61, 16, 7), (64, 16, 16), (40, 7, 1), (131, 32, 20))
    for count, window, stride in (*sizes, (2, 2, 1), (331, 160, 96)):
        vocab = 29 if count < 300 else 301
        run, tokens = Reader(rng, vocab), rng.ints(vocab, count)
        expected, done = [], 1
        for start in range(0, count, stride):
            end = min(start + window, count)
            for token in range(max(done, start + 1), end):
                expected.append(-run.logp(tokens[start:token].tolist(), tokens[token].item()))
            done = end
            if end == count:
                break
        call = f"strided_losses(run, {count} tokens, {window}, {stride})"
        yield Case((run, tokens, window, stride), torch.tensor(expected), rtol=1e-3, atol=1e-4, call=call)


# 2


def apart(kl, agree=lambda p, q: (p.argmax(-1) == q.argmax(-1)).float().mean()):
    """A `distance` with another KL(log p, log q) [tokens, vocab] -> number, or another agreement."""

    def wrong(original, changed):
        p, q = original.log_softmax(-1), changed.log_softmax(-1)
        return float(kl(p, q)), float(agree(p, q))

    return wrong


def terms(p, q):
    return (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0)


def right(p, q):
    return terms(p, q).sum(-1).mean()


DISTANCE = {
    "the divergence the other way round: it is the original's p that weighs the terms": apart(
        lambda p, q: right(q, p)
    ),
    "that is in bits: ln gives nats": apart(lambda p, q: right(p, q) / math.log(2)),
    "a sum over tokens: the mean is asked for": apart(lambda p, q: terms(p, q).sum()),
    "the mean over all numbers: sum over the vocabulary, mean over tokens": apart(lambda p, q: terms(p, q).mean()),
    "the sign: KL is never negative": apart(lambda p, q: -right(p, q)),
    "the cross entropy, -sum p ln q: the original's own entropy was not taken off": apart(
        lambda p, q: -(p.exp() * q).masked_fill(p == -torch.inf, 0.0).sum(-1).mean()
    ),
    "both ways averaged: KL(original || changed) alone is asked for": apart(
        lambda p, q: (right(p, q) + right(q, p)) / 2
    ),
    "a count of the tokens that agree: their share is asked for": apart(
        right, lambda p, q: (p.argmax(-1) == q.argmax(-1)).sum()
    ),
    "the share that differ: agreement is asked for": apart(
        right, lambda p, q: (p.argmax(-1) != q.argmax(-1)).float().mean()
    ),
    "a token that the changed model alone rules out makes the divergence infinite, it does not add 0": apart(
        lambda p, q: terms(p, q).masked_fill(q == -torch.inf, 0.0).sum(-1).mean()
    ),
    "a token that is ruled out in one place is not ruled out in the others": apart(
        lambda p, q: terms(p, q)[:, (p > -torch.inf).all(0)].sum(-1).mean()
    ),
    "of equal logits argmax takes the first, in both models": apart(
        right, lambda p, q: (q.gather(-1, p.argmax(-1, keepdim=True)) == q.amax(-1, keepdim=True)).float().mean()
    ),
    "the terms of single tokens, averaged where the original is sure only": apart(
        lambda p, q: (p - q).gather(-1, p.argmax(-1, keepdim=True)).mean()
    ),
}


@register(
    "15.distance",
    points=2,
    title="KL and top-1 agreement",
    hints=[
        *slips(DISTANCE),
        Hint(
            "nan: a token that the original rules out adds 0, not 0 x inf",
            when=lambda got, expected, case: isinstance(got, tuple) and math.isnan(float(got[0])),
        ),
    ],
)
def distance(rng):
    sizes = (
        (1, 2, 1.0, 0),
        (5, 7, 1.0, 0),
        (33, 50, 3.0, 0),
        (12, 20, 1.0, 6),
        (40, 300, 2.0, 40),
        (9, 11, 200.0, 0),
    )
    for count, vocab, size, banned in sizes:
        original = rng.tensor(count, vocab) * size
        changed = original + rng.tensor(count, vocab) * size * 0.6
        places = rng.tensor(count, vocab).argsort(-1)[:, :banned]  # other tokens in every row
        original.scatter_(-1, places, -torch.inf)
        changed.scatter_(-1, places[:, : banned // 3], -torch.inf)  # the changed model has learnt a part of the ban
        p, q = original.double().log_softmax(-1), changed.double().log_softmax(-1)
        kl, agree = 0.0, 0
        for row in range(count):
            pairs = [(a, b) for a, b in zip(p[row].tolist(), q[row].tolist()) if a > -math.inf]
            kl += sum(math.exp(a) * (a - b) for a, b in pairs)
            agree += max(range(vocab), key=p[row].tolist().__getitem__) == max(
                range(vocab), key=q[row].tolist().__getitem__
            )
        call = f"distance(logits [{count}, {vocab}]{', some -inf' if banned else ''}, changed)"
        yield Case((original, changed), (kl / count, agree / count), rtol=2e-3, atol=1e-5, call=call)
    alike = [[2.0, 0.0, 2.0], [0.0, 3.0, 1.0]]
    original, tied, banned = (torch.tensor([row, *alike]) for row in ([0, 1, 0.5], [1, 1, 0], [0, 1, -math.inf]))
    a, b, c = (math.exp(x) for x in (0, 1, 0.5))
    kl = (b * 0 + a * -1 + c * 0.5) / (a + b + c) - math.log((a + b + c) / (2 * b + a))
    yield Case((original, tied), (kl / 3, 2 / 3), call="distance(logits [3, 3], changed), some logits equal")
    yield Case((original, banned), (math.inf, 1.0), call="distance(logits [3, 3], changed), -inf in changed alone")


# 3


def interval_with(values=lambda a, b: a - b, ends=(0.025, 0.975), short=True, block=None):
    """A `paired_interval` with a mistake in it. short: a short block counts by its tokens."""

    def wrong(a, b, size, drawn):
        blocks = values(a, b).split(size if block is None else block(size))
        sums, lengths = torch.stack([x.sum() for x in blocks]), torch.tensor([float(len(x)) for x in blocks])
        drawn = drawn if block is None else drawn % len(blocks)
        means = (sums / lengths)[drawn].mean(1) if not short else sums[drawn].sum(1) / lengths[drawn].sum(1)
        return tuple(means.quantile(torch.tensor(ends)).tolist())

    return wrong


def resampled_apart(a, b, size, drawn):
    (a_low, a_high), (b_low, b_high) = (interval_with(lambda x, _: x)(x, x, size, drawn) for x in (a, b))
    return a_low - b_high, a_high - b_low


def ends_subtracted(a, b, size, drawn):
    one, other = (interval_with(lambda x, _: x)(x, x, size, drawn) for x in (a, b))
    return one[0] - other[0], one[1] - other[1]


def normal(a, b, size, drawn):
    d = a - b
    half = 1.96 * d.std() / len(d) ** 0.5
    return (d.mean() - half).item(), (d.mean() + half).item()


def of_means(a, b, size, drawn):
    d = a - b
    sums = torch.stack([x.sum() for x in d.split(size)])
    means = sums[drawn].sum(1) / len(d)  # as if every resampled text were as long as the original
    return tuple(means.quantile(torch.tensor([0.025, 0.975])).tolist())


PAIRED = {
    "b - a: the difference is a - b": interval_with(lambda a, b: b - a),
    "a and b were resampled apart: subtract first, token by token, then resample": resampled_apart,
    "the ends of two intervals were subtracted: subtract first, token by token": ends_subtracted,
    "a mean of block means: a short block counts as much as a full one": interval_with(short=False),
    "divided by the length of the text: a resampled text with the short block in it has another length": of_means,
    "those are the 5 % and 95 % quantiles: 95 % between them asks for 2.5 % and 97.5 %": interval_with(
        ends=(0.05, 0.95)
    ),
    "high comes before low": interval_with(ends=(0.975, 0.025)),
    "b was not used: these are means of a alone": interval_with(lambda a, b: a),
    "that assumes independent tokens and a normal distribution: resample the blocks of `drawn`": normal,
    "a ratio of perplexities: the difference of losses is asked for, without exp": lambda *args: tuple(
        math.exp(x) for x in interval_with()(*args)
    ),
    "single tokens were drawn in place of blocks": interval_with(block=lambda size: 1),
    "squared or absolute differences: better and worse tokens must be able to cancel": interval_with(
        lambda a, b: (a - b).abs()
    ),
}


@register("15.paired_interval", points=3, title="A paired interval", hints=slips(PAIRED))
def paired_interval(rng):
    example = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4), 2, torch.tensor([[0, 0], [1, 1]])
    yield Case(example, (0.55, 2.45), rtol=1e-3)
    for count, block, samples in ((10, 4, 40), (64, 8, 200), (131, 32, 100), (50, 1, 80), (333, 50, 400)):
        hard = rng.tensor(count).abs() * 4
        a, b = hard + 0.3 * rng.tensor(count) + 0.1, hard
        blocks = math.ceil(count / block)
        drawn = rng.ints(blocks, samples, blocks)
        means = []
        for row in drawn.tolist():
            tokens = [i for number in row for i in range(number * block, min((number + 1) * block, count))]
            means.append(sum(a[i].item() - b[i].item() for i in tokens) / len(tokens))
        means.sort()
        ends = []
        for share in (0.025, 0.975):  # linear between neighbours, as torch.quantile
            place = share * (samples - 1)
            below = int(place)
            above = min(below + 1, samples - 1)
            ends.append(means[below] + (place - below) * (means[above] - means[below]))
        call = f"paired_interval(a [{count}], b, {block}, drawn [{samples}, {blocks}])"
        yield Case((a, b, block, drawn), tuple(ends), rtol=1e-3, atol=3e-5, call=call)


# 4


def scores_with(rows=lambda n, length: slice(n - 1, n + length - 1), average=lambda x, n: x.mean(), alone=False):
    """A `choice_scores` with a mistake in it. average: log p [tokens], length of the context -> number."""

    def wrong(run, context, choices):
        scores = []
        for choice in choices:
            ids = choice if alone else torch.cat((context, choice))
            n = 1 if alone else len(context)
            logp = run(ids[None])[0].log_softmax(-1)[rows(n, len(ids) - n)]
            scores.append(average(logp.gather(-1, ids[n:, None])[:, 0], n).item())
        return scores

    return wrong


def with_context(run, context, choices):
    scores = []
    for choice in choices:
        ids = torch.cat((context, choice))
        scores.append(-F.cross_entropy(run(ids[None])[0, :-1], ids[1:]).item())
    return scores


def choice_without_first(run, context, choices):
    scores = []
    for choice in choices:
        ids = torch.cat((context, choice))
        logits = run(ids[None])[0, len(context) : -1]
        scores.append(-F.cross_entropy(logits, choice[1:]).item() if len(choice) > 1 else 0.0)
    return scores


def products(run, context, choices):
    return [math.exp(x) for x in scores_with()(run, context, choices)]


CHOICES = {
    "a sum: long choices lose by their length; take the mean over the tokens of the choice": scores_with(
        average=lambda x, n: x.sum()
    ),
    "the context's own tokens are in the mean": with_context,
    "divided by the length of context and choice together": scores_with(average=lambda x, n: x.sum() / (n + len(x))),
    "row i of the logits is about token i + 1: the first token of a choice stands on the context's last row": (
        scores_with(rows=lambda n, length: slice(n, n + length))
    ),
    "the first token of each choice is not scored": choice_without_first,
    "the choices were read without the context": scores_with(alone=True),
    "the sign: scores are log-likelihoods, at most 0": scores_with(average=lambda x, n: -x.mean()),
    "probabilities in place of their logarithms": products,
    "the mean of probabilities, not of log-probabilities": scores_with(average=lambda x, n: x.exp().mean()),
    "only the first token of each choice is scored": scores_with(average=lambda x, n: x[0]),
    "only the last token of each choice is scored": scores_with(average=lambda x, n: x[-1]),
}


@register("15.choice_scores", points=2, title="The scores of a multiple-choice question", hints=slips(CHOICES))
def choice_scores(rng):
    for context_length, lengths in (
        (1, (3, 2)),
        (5, (2, 3, 1, 4)),
        (12, (6, 9, 4, 11)),
        (40, (1, 1, 1, 1)),
        (200, (2, 5, 1, 3, 8, 4, 2, 33)),
        (3, (17, 2)),
    ):
        run, context = Reader(rng, 31), rng.ints(31, context_length)
        choices = [rng.ints(31, length) for length in lengths]
        expected = []
        for choice in choices:
            before, total = context.tolist(), 0.0
            for token in choice.tolist():
                total += run.logp(before, token)
                before = [*before, token]
            expected.append(total / len(choice))
        call = f"choice_scores(run, {context_length} tokens, {len(lengths)} choices)"
        yield Case((run, context, choices), expected, rtol=1e-3, atol=1e-4, call=call)


# 5


def given_perplexity(windows):
    total, count = 0.0, 0
    for losses in windows:
        total, count = total + losses.mean(), count + 1
    return (total / count).exp().item()


def whole(windows):
    return torch.cat(list(windows))


JUMPS = {
    "still a mean of the windows' means: a window of three tokens counts as much as one of 511": given_perplexity,
    "a mean of the windows' perplexities: exp comes once, at the end": lambda w: (
        sum(x.mean().exp() for x in w) / len(w)
    ).item(),
    "the perplexities of windows weighted by their tokens: average losses, then exp": lambda w: (
        sum(x.mean().exp() * len(x) for x in w) / sum(map(len, w))
    ).item(),
    "a mean of exp of single losses: exp comes once, at the end": lambda w: whole(w).exp().mean().item(),
    "the last window was left out: its tokens count too": lambda w: (
        whole(w[:-1] if len(w) > 1 else w).mean().exp().item()
    ),
    "only full windows were counted": lambda w: (
        whole([x for x in w if len(x) == max(map(len, w))]).mean().exp().item()
    ),
    "that is the mean loss: perplexity is its exp": lambda w: whole(w).mean().item(),
    "2 to the power of a loss in nats: exp belongs to nats": lambda w: 2 ** whole(w).mean().item(),
    "the median of the losses, not their mean": lambda w: whole(w).median().exp().item(),
    "weighted by the wrong length: each window's mean counts once a token of its own": lambda w: (
        (sum(x.mean() * len(y) for x, y in zip(w, [*w[1:], w[0]])) / sum(map(len, w))).exp().item()
    ),
}


@register(
    "15.perplexity_of",
    points=2,
    title="Debug it: the perplexity that jumps",
    hints=slips(JUMPS),
    given=given_perplexity,
)
def perplexity_of(rng):
    many = tuple(rng.randint(1, 40) for _ in range(300))
    for lengths in ((4, 4), (3, 1), (31, 16, 16, 2), (511, 256, 256, 9), (7,), (1, 2, 3, 4, 5), (100, 1, 1), many):
        windows = [rng.tensor(length).abs() * 2 + rng.random() * 2 for length in lengths]
        values = [x for window in windows for x in window.tolist()]
        shown = f"{len(lengths)} windows" if lengths is many else f"windows of {', '.join(map(str, lengths))} tokens"
        call = f"perplexity_of({shown})"
        yield Case((windows,), math.exp(math.fsum(values) / len(values)), rtol=1e-4, call=call)


# 6


Z = 1.96
NEEDED = {
    "alone": (
        (Z * 3.0 / 0.005) ** 2,
        {
            "1.96 standard errors make the interval: the factor is missing": (3.0 / 0.005) ** 2,
            "the square is missing: the standard error falls with the root of n": Z * 3.0 / 0.005,
            "0.5 % is 0.005, not 0.5": (Z * 3.0 / 0.5) ** 2,
            "± 0.5 % is half of the interval's width": (Z * 3.0 / 0.0025) ** 2,
            "the variance in place of the standard deviation": (Z * 9.0 / 0.005) ** 2,
        },
    ),
    "paired": (
        4 * (Z * 0.2 / 0.005) ** 2,
        {
            "the factor 4 for neighbours that are alike is missing": (Z * 0.2 / 0.005) ** 2,
            "it is the variance that is 4 x as large, not the standard deviation": (4 * Z * 0.2 / 0.005) ** 2,
            "divided by 4: neighbours that are alike tell less, so more tokens are needed": (Z * 0.2 / 0.005) ** 2
            / 4,
            "1.96 standard errors make the interval: the factor is missing": 4 * (0.2 / 0.005) ** 2,
            "the difference of pairs has its own standard deviation, 0.2": 4 * (Z * 3.0 / 0.005) ** 2,
        },
    ),
    "forwards": (
        1 + math.ceil((1_000_000 - 2048) / 512),
        {
            "that is without overlap: each further window adds a stride, not a window": 1_000_000 / 2048,
            "a forward a token: that is stride 1": 1_000_000 - 2048,
            "tokens read, not windows": 2048 * (1 + math.ceil((1_000_000 - 2048) / 512)),
        },
    ),
    "questions": (
        (Z / 0.02) ** 2 * 0.10,
        {
            "1.96 standard errors make the interval: the factor is missing": 0.10 / 0.02**2,
            "the standard deviation is the root of 0.10: its square is 0.10": (Z * 0.10 / 0.02) ** 2,
            "that is unpaired: paired, only the answers that flip have a variance": (Z / 0.02) ** 2 * 0.25,
            "that is unpaired, twice: paired, only the answers that flip have a variance": (Z / 0.02) ** 2 * 0.5,
            "0.02 squared was added: every question counts as if it flipped": (Z / 0.02) ** 2,
        },
    ),
    "same": (
        0.99**100,
        {
            "0.99 a token: an answer is the same if all of its tokens are": 0.99,
            "that is the share that change": 1 - 0.99**100,
            "not linear: 1 - 100 x 0.01 would be 0": 0.0,
            "a percentage: a share lies between 0 and 1": 100 * 0.99**100,
        },
    ),
}


@register("15.text_needed", points=1, title="Estimate it: how much text does a claim need?")
def text_needed(rng):
    for key, (value, wrong) in NEEDED.items():
        hints = [Hint(text, wrong=lambda key=key, number=number: {key: number}) for text, number in wrong.items()]
        yield Drive(lambda answer, key=key: answer()[key], value, f"text_needed()[{key!r}]", rtol=0.02, hints=hints)
