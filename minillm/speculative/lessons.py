"""What a draft is taught and how often it is right then: the losses of `train.py`, and its measure.

Chapter 17. All learn from the target's whole distributions, not from the text's one next token: a draft is right when
it says what the target would say.

    medusa   head d at i:   KL(p(. | ..i+d), head d)           Medusa-1 (arXiv:2401.10774): the target is frozen
    eagle    f'_{i+1}:      smooth L1 to f_{i+1} + KL(p(. | ..i+1), head(f'_{i+1}))                (arXiv:2401.15077)
             then once more with f' in place of f below it, as when it drafts        (the idea of arXiv:2503.01840)
    draft    q at i:        KL(p(. | ..i), q)                                       DistillSpec (arXiv:2310.08461)

tokens [sequences, time]. features [sequences, time, hidden]: the target's, where they are known already (None: they
are computed). score: hidden states -> logits, of all tokens or of those that the student may draft (default: the
target's head); p is what the target's features give under it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.decoder import Decoder
from minillm.speculative.eagle import EagleHead
from minillm.speculative.frequent import DraftHead
from minillm.speculative.medusa import MedusaHeads

SHARE = 4  # Medusa scores every 4th place of a batch: its heads cost a vocabulary each
RANKS = 8  # guesses a depth whose accuracy is measured
FADE = 0.8  # a later Medusa head counts less in the loss, as in the paper
SCORES = 1 << 23  # logits of the target that are held at one time where accuracy is measured: 32 MB

Score = Callable[[Tensor], Tensor]


def kl(target: Tensor, draft: Tensor) -> Tensor:
    """Mean KL(p, q) in nats of two sets of logits [..., vocab]."""
    p, q = target.float().log_softmax(-1).flatten(0, -2), draft.float().log_softmax(-1).flatten(0, -2)
    return F.kl_div(q, p, log_target=True, reduction="batchmean")


def features_of(target: Decoder, tokens: Tensor, features: Tensor | None) -> Tensor:
    """[sequences, time, hidden], without a gradient."""
    if features is not None:
        return features
    with torch.no_grad():
        return target.hidden(tokens)


def medusa_loss(
    target: Decoder,
    heads: MedusaHeads,
    tokens: Tensor,
    step: int,
    features: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    """Of places step % SHARE, + SHARE, ... of each sequence."""
    count, score = len(heads.layers), score or target.logits
    h = features_of(target, tokens, features)
    at = torch.arange(step % SHARE, tokens.shape[1] - count, SHARE)
    with torch.no_grad():
        wanted = [score(h[:, at + d]) for d in range(1, count + 1)]  # [sequences, places, vocab] each
    said = heads(h[:, at])  # [sequences, places, heads, hidden]
    return sum(FADE**d * kl(wanted[d], score(said[:, :, d])) for d in range(count))


def eagle_loss(
    target: Decoder,
    head: EagleHead,
    tokens: Tensor,
    step: int,
    features: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    score, features = score or target.logits, features_of(target, tokens, features)
    with torch.no_grad():
        embedded, wanted = target.embed(tokens[:, 1:]), score(features[:, 1:])
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)  # of the pairs
    said = head(features[:, :-1], embedded, positions)  # [sequences, time - 1, hidden]
    below = torch.cat((features[:, :1], said[:, :-1]), 1)  # the draft's own features, one place later
    again = head(below, embedded, positions)
    losses = [F.smooth_l1_loss(x, features[:, 1:]) + kl(wanted, score(x)) for x in (said, again)]
    return losses[0] + losses[1]


def draft_loss(
    target: Decoder,
    draft: Decoder,
    tokens: Tensor,
    step: int,
    features: Tensor | None = None,
    score: Score | None = None,
) -> Tensor:
    with torch.no_grad():
        wanted = target.logits(features_of(target, tokens, features))
    return kl(wanted, draft(tokens))


LOSSES = {"medusa": medusa_loss, "eagle": eagle_loss, "draft": draft_loss}


@torch.no_grad()
def guessed_right(
    what: str,
    target: Decoder,
    student: nn.Module,
    tokens: np.ndarray | Tensor,
    time_: int = 256,
    features: Tensor | None = None,
    counted: Tensor | None = None,
) -> list:
    """[depth][rank]: how often the guess of that rank is the target's own choice (its likeliest token), given that
    the text up to there is the text; for EAGLE and a draft model one depth, for Medusa one a head.

    tokens [count], read in windows of time_; or [rows, time], with features [rows, time, hidden] if they are known.
    counted [rows, time] bool: the tokens whose guess counts (default: all).
    """
    rows = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
    if rows.dim() == 1:
        rows = rows[: len(rows) // time_ * time_].view(-1, time_)
    time_, score = rows.shape[1], DraftHead(target, getattr(student, "vocabulary", None))
    if counted is None:
        counted = torch.ones_like(rows, dtype=torch.bool)
    else:  # from a token to the place before it, whose next token it is
        counted = torch.cat((counted[:, 1:], counted.new_zeros(len(rows), 1)), 1)
    size = max(1, SCORES // (target.config.vocab_size * time_))
    pieces = [None] * len(rows) if features is None else features.split(size)
    hits, seen = 0, 0
    for part, counts, h in zip(rows.split(size), counted.split(size), pieces):
        h = features_of(target, part, h)
        choice = target.logits(h).argmax(-1)  # [rows, time]: the token after each place
        if what == "medusa":
            depth = len(student.layers)
            guesses = student(h[:, :-depth])  # [rows, places, heads, hidden]
            right, counts = (
                torch.stack([x[:, d : time_ - depth + d] for d in range(1, depth + 1)], -1) for x in (choice, counts)
            )  # [rows, places, heads] each
        elif what == "eagle":
            positions = torch.arange(time_ - 1).expand(len(part), -1)
            guesses = student(h[:, :-1], target.embed(part[:, 1:]), positions)  # [rows, places, hidden]
            guesses = guesses[:, :, None]  # one depth
            right, counts = choice[:, 1:, None], counts[:, 1:, None]
        else:
            guesses, right, counts = student.hidden(part)[:, :, None], choice[:, :, None], counts[:, :, None]
        scores = student.logits(guesses) if what == "draft" else score(guesses)
        guesses = score.ids(scores.topk(RANKS).indices)  # [rows, places, depths, ranks]
        hits = hits + ((guesses == right[..., None]) & counts[..., None]).double().sum((0, 1))  # [depths, ranks]
        seen = seen + counts.sum((0, 1))  # [depths]
    return [[round(float(x), 4) for x in row] for row in hits / seen.clamp(min=1)[:, None]]
