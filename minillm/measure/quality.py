"""How much a changed model is damaged: perplexity, KL divergence and top-1 agreement, each with an interval.

Chapters 11 to 15, 26. Perplexity is exp of the mean loss on text; it looks at one token of the vocabulary a position,
the one that came. KL(reference || changed) looks at the whole distribution, top-1 agreement at the token that greedy
decoding would take. All three are means over the tokens of a text, so all three are uncertain: the bootstrap (Efron
1979) says by how much. A comparison of two models is paired: it resamples differences on the same tokens.

Windows: a text of n tokens is cut into windows of `window` tokens that begin `stride` apart. Every token is scored
once, in the first window that holds it; the first token of the text, and with stride = window (the convention of the
GPTQ and AWQ papers, at 2048) the first of each window, has nothing before it and is not scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.errors import ParamsError, PromptError, illegal

Model = Callable[[Tensor], Tensor]  # tokens [batch, time] -> logits [batch, time, vocab]; a Decoder is one


@dataclass(frozen=True)
class Interval:
    """A figure and its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Windows:
    """How a text is cut: tokens a window, tokens between starts (None: window, no overlap), windows at once."""

    window: int = 512
    stride: int | None = None
    batch: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or self.window < 2:
            raise ParamsError(illegal("window", self.window, "must be a whole number of at least 2 tokens"))
        if self.stride is not None and not (isinstance(self.stride, int) and 1 <= self.stride <= self.window):
            raise ParamsError(illegal("stride", self.stride, f"must be from 1 to the window, {self.window}"))
        if not isinstance(self.batch, int) or self.batch < 1:
            raise ParamsError(illegal("batch", self.batch, "must be a whole number of at least 1 window"))

    def spans(self, count: int) -> list[tuple[int, int, int]]:
        """(start, end, first scored) of each window over a text of `count` tokens."""
        spans, done = [], 1
        for start in range(0, count, self.stride or self.window):
            end = min(start + self.window, count)
            first = max(done, start + 1)
            if first < end:
                spans.append((start, end, first))
            done = end
            if end == count:
                break
        return spans


def scored(model: Model, tokens: Tensor, windows: Windows) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [scored, vocab] float32, targets [scored]) of one window after the other."""
    spans = windows.spans(len(tokens))
    while spans:
        size = spans[0][1] - spans[0][0]
        count = 1
        while count < min(windows.batch, len(spans)) and spans[count][1] - spans[count][0] == size:
            count += 1
        group, spans = spans[:count], spans[count:]
        logits = model(torch.stack([tokens[start:end] for start, end, _ in group]))  # [count, size, vocab]
        for row, (start, end, first) in zip(logits, group):
            yield row[first - start - 1 : end - start - 1].float(), tokens[first:end]


def as_tokens(tokens: Tensor | Sequence[int], model: Model) -> Tensor:
    """A text's ids, [n] int64, where the model is."""
    found = torch.as_tensor(tokens, device=getattr(model, "device", None)).long()
    if found.dim() != 1 or len(found) < 2:
        raise PromptError(
            illegal("tokens", tuple(found.shape), "must be one row of at least 2 ids: the first is not scored")
        )
    return found


def as_windows(window: int, stride: int | None, batch: int, model: Model) -> Windows:
    longest = getattr(getattr(model, "config", None), "max_length", None)
    if longest and isinstance(window, int) and window > longest:
        raise ParamsError(illegal("window", window, f"must be at most the model's context, {longest}"))
    return Windows(window, stride, batch)


@torch.inference_mode()
def token_losses(
    model: Model, tokens: Tensor | Sequence[int], window: int = 512, stride: int | None = None, batch: int = 4
) -> Tensor:
    """Loss of every scored token, in nats: -log p(token | what stands before it in its window). [scored] float32."""
    windows, tokens = as_windows(window, stride, batch, model), as_tokens(tokens, model)
    parts = scored(model, tokens, windows)
    return torch.cat([F.cross_entropy(logits, targets, reduction="none") for logits, targets in parts]).cpu()


def perplexity(
    model: Model, tokens: Tensor | Sequence[int], window: int = 512, stride: int | None = None, batch: int = 4
) -> float:
    """exp of the mean loss. A model that guesses among p equally likely tokens has perplexity p."""
    return safe_exp(token_losses(model, tokens, window, stride, batch).double().mean().item())


def safe_exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


@dataclass(frozen=True)
class Damage:
    """A changed model beside its reference, a value a scored token: [scored] each.

    loss, reference_loss: nats. kl: KL(reference || changed), nats. agree: 1 where both rank the same token first.
    """

    loss: Tensor
    reference_loss: Tensor
    kl: Tensor
    agree: Tensor

    @property
    def perplexity(self) -> Interval:
        return exp_interval(bootstrap(self.loss))

    @property
    def ratio(self) -> Interval:
        """Perplexity / the reference's, from paired differences: 1.05 is 5 % worse."""
        return exp_interval(bootstrap(self.loss - self.reference_loss))

    @property
    def mean_kl(self) -> Interval:
        return bootstrap(self.kl)

    @property
    def agreement(self) -> Interval:
        return bootstrap(self.agree)


class Reference:
    """The original model's answers on one text, kept, so that each changed model is run once.

    Memory: 4 bytes x vocabulary a scored token (400 MB for 2048 tokens of smollm2's 49152).
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Model,
        tokens: Tensor | Sequence[int],
        window: int = 512,
        stride: int | None = None,
        batch: int = 4,
    ) -> None:
        self.windows, self.tokens = as_windows(window, stride, batch, model), as_tokens(tokens, model)
        self.parts, losses = [], []  # log p [scored, vocab] and loss [scored], a window each
        for logits, targets in scored(model, self.tokens, self.windows):
            self.parts.append(logits.log_softmax(-1))
            losses.append(-self.parts[-1].gather(-1, targets[:, None])[:, 0])
        self.loss = torch.cat(losses).cpu()

    @property
    def perplexity(self) -> Interval:
        return exp_interval(bootstrap(self.loss))

    @torch.inference_mode()
    def damage(self, model: Model) -> Damage:
        """Run `model` on the same windows."""
        rows = []
        for (logits, targets), before in zip(scored(model, self.tokens, self.windows), self.parts):
            if logits.shape != before.shape:
                raise ParamsError(
                    f"the models have {logits.shape[-1]} and {before.shape[-1]} tokens: they must share a vocabulary"
                )
            after = logits.log_softmax(-1)  # [scored, vocab]
            loss = -after.gather(-1, targets[:, None])[:, 0]
            terms = before.exp() * (before - after)  # a token that the reference rules out adds 0, not 0 * inf
            kl = terms.masked_fill(before == -math.inf, 0.0).sum(-1)
            rows.append((loss, kl, (before.argmax(-1) == after.argmax(-1)).float()))
        loss, kl, agree = (torch.cat(column).cpu() for column in zip(*rows))
        return Damage(loss, self.loss, kl, agree)


def difference(a: Tensor, b: Tensor, **options) -> Interval:
    """Mean of a - b over the same tokens. An interval that holds 0 has not told the two apart."""
    if a.shape != b.shape:
        raise ParamsError(illegal("b", tuple(b.shape), f"must have the shape of a, {tuple(a.shape)}: a pair a token"))
    return bootstrap(a - b, **options)


def bootstrap(values: Tensor, block: int = 32, samples: int = 2000, level: float = 0.95, seed: int = 0) -> Interval:
    """The mean of values [n] and its percentile bootstrap interval.

    Neighbouring tokens share what makes a text easy or hard, so whole blocks of `block` neighbours are drawn: single
    tokens would count the same news many times and give too narrow an interval.
    """
    values = torch.as_tensor(values).double().flatten().cpu()
    if not len(values):
        raise ParamsError(illegal("values", "an empty tensor", "must hold at least one"))
    if not isinstance(block, int) or block < 1:
        raise ParamsError(illegal("block", block, "must be a whole number of at least 1"))
    if not isinstance(samples, int) or samples < 1:
        raise ParamsError(illegal("samples", samples, "must be a whole number of at least 1"))
    if not 0 < level < 1:
        raise ParamsError(illegal("level", level, "must be above 0 and below 1"))
    mean = values.mean().item()
    if not math.isfinite(mean):
        return Interval(mean, mean, mean)
    blocks = values.split(max(1, min(block, len(values) // 8)))  # a short text keeps at least 8 blocks
    sums = torch.stack([part.sum() for part in blocks])  # [blocks]
    counts = torch.tensor([float(len(part)) for part in blocks], dtype=torch.float64)
    drawn = torch.randint(len(blocks), (samples, len(blocks)), generator=torch.Generator().manual_seed(seed))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)  # [samples]
    tail = (1 - level) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(mean, low, high)


def exp_interval(interval: Interval) -> Interval:
    return Interval(*(safe_exp(x) for x in (interval.value, interval.low, interval.high)))
