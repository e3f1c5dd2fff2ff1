"""Verification: keep of a draft what the target would have said, so that nobody can tell that there was a draft.

Chapter 16. Rejection sampling of Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318);
trees as in SpecInfer (Miao et al. 2024, arXiv:2305.09781). p: the target's distribution after temperature, top-k,
top-p and penalties, what plain decoding would draw from. q: the one that the draft token x was drawn from.

    accept x with probability min(1, p(x) / q(x))
    else draw from the residual (p - q)+ / sum (p - q)+       and the draft ends here
    all accepted: one more token, from p, for nothing: the bonus

    P(token = x) = q(x) min(1, p(x) / q(x)) + P(rejected) (p(x) - q(x))+ / sum (p - q)+
                 = min(q(x), p(x)) + (p(x) - q(x))+ = p(x),   for P(rejected) = 1 - sum min(p, q) = sum (p - q)+

Siblings of a tree are tried in order, each against what the ones before it left of p: the residual becomes the new p.
A token that nobody drew has q = 1 at itself. Then "draw from p, keep the draft if it is what was drawn" is the same
law, and takes one number a token from the request's stream, as plain decoding does: with the same seed it even says
the same. Greedy requests are that too, with the likeliest token in place of a draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import LogitsError
from minillm.model.sampling import SamplingState, probabilities
from minillm.model.sampling_steps import LARGEST, draw
from minillm.speculative.proposer import Draft

Walk = Callable[[Tensor, Draft, SamplingState], tuple[list[int], int]]


@dataclass
class Verdict:
    """accepted: nodes of the draft, from the top down. tokens: theirs, and one more: drawn where the draft was left,
    or the bonus at its end; None if nothing can be drawn there (NaN). rows: the logits row that gave each token."""

    accepted: list[int]
    tokens: list[int | None]
    rows: list[int]


@torch.no_grad()
def verify(
    logits: Tensor, drafts: Sequence[Draft], states: Sequence[SamplingState], walk: Walk | None = None
) -> list[Verdict]:
    """logits [rows, vocab]: for each draft one row after its last known token, then one after each of its nodes.

    An empty draft is plain decoding. walk: another rule in place of `reject` for drafts that were drawn or, with a
    rule of your own (typical acceptance), for all that are not greedy: (p [1 + nodes, vocab], draft, state) ->
    (accepted nodes, the last token).
    """
    counts = [len(draft) + 1 for draft in drafts]
    if logits.ndim != 2 or len(logits) != sum(counts) or len(drafts) != len(states):
        raise LogitsError(f"logits has shape {tuple(logits.shape)}: must be [{sum(counts)} rows, vocab]")
    for draft in drafts:
        if draft.probs is not None and draft.probs.shape[-1] != logits.shape[-1]:
            raise LogitsError(
                f"a draft of {draft.probs.shape[-1]} tokens' vocabulary meets {logits.shape[-1]} logits"
            )
    starts = [sum(counts[:i]) for i in range(len(counts))]
    likeliest = logits.argmax(-1)  # [rows]; a NaN counts as the largest
    peaks = logits.gather(-1, likeliest[:, None])[:, 0].tolist()
    said: list[int | None] = [t if abs(x) <= LARGEST else None for t, x in zip(likeliest.tolist(), peaks)]

    others = [i for i, state in enumerate(states) if not state.plain_greedy]
    if not others:
        return [match(draft, said[a : a + n], a) for draft, a, n in zip(drafts, starts, counts)]
    rows = [row for i in others for row in range(starts[i], starts[i] + counts[i])]
    p = probabilities(logits if len(rows) == len(logits) else logits[rows], ahead(drafts, states, others))
    split = dict(zip(others, p.split([counts[i] for i in others])))  # [1 + nodes, vocab] each
    ruled = [i for i in others if len(drafts[i]) and (walk is not None or drafts[i].probs is not None)]
    drawn = [i for i in others if i not in ruled]
    tokens = draw_ahead(split, drafts, states, drawn)

    verdicts = []
    for i, (draft, a, n) in enumerate(zip(drafts, starts, counts)):
        here = said[a : a + n]
        if i in ruled and None not in here:
            accepted, last = (walk or reject)(split[i], draft, states[i])
            visited = [0, *(node + 1 for node in accepted)]
            verdicts.append(
                Verdict(accepted, [*(draft.tokens[x] for x in accepted), last], [a + row for row in visited])
            )
        elif i in ruled:  # a row that cannot be drawn from: as far as the draft is sure, then None
            verdicts.append(Verdict([], [None], [a]) if here[0] is None else self_only(split[i], a, states[i]))
        else:
            if i in tokens:
                here = [None if old is None else new for old, new in zip(here, tokens[i])]
            verdict = match(draft, here, a)
            for _ in verdict.tokens if i in tokens else ():
                states[i].stream.random()  # as many as plain decoding would have used
            verdicts.append(verdict)
    return verdicts


def match(draft: Draft, said: Sequence[int | None], start: int = 0) -> Verdict:
    """Follow the draft as long as it holds what was said at each row. said [1 + nodes]."""
    below, row, accepted = draft.children(), 0, []
    while True:
        found = next((node for node in below[row] if draft.tokens[node] == said[row]), None)
        if found is None:
            break
        accepted.append(found)
        row = found + 1
    rows = [0, *(node + 1 for node in accepted)]
    return Verdict(accepted, [said[r] for r in rows], [start + r for r in rows])


def reject(p: Tensor, draft: Draft, state: SamplingState) -> tuple[list[int], int]:
    """Rejection sampling down a chain or a tree. p [1 + nodes, vocab] -> (accepted nodes, the last token)."""
    below, row, accepted, stream = draft.children(), 0, [], state.stream
    while True:
        left = p[row]  # [vocab]: what the children tried so far left of p
        for node in below[row]:
            x, q = draft.tokens[node], None if draft.probs is None else draft.probs[node]
            here, there = float(left[x]), 1.0 if q is None else float(q[x])
            if stream.random() * there < here:  # random() < min(1, here / there), and never where here is 0
                accepted.append(node)
                row = node + 1
                break
            left = residual(left, x, q)
        else:
            uniform = torch.tensor([stream.random()], dtype=torch.float64, device=p.device)
            return accepted, int(draw(left[None], uniform)[0])


def residual(p: Tensor, x: int, q: Tensor | None) -> Tensor:
    """(p - q)+ / its sum, [vocab]. q None: all of q is at x. Where rounding leaves nothing, p is q: p without x."""
    if q is None:
        left = p.clone()
        left[x] = 0
    else:
        left = (p - q.to(p.dtype)).clamp(min=0)
    total = left.sum()
    return left / total if float(total) > 0 else p


def ahead(drafts: Sequence[Draft], states: Sequence[SamplingState], which: Sequence[int]) -> list[SamplingState]:
    """For each row the state that plain decoding would have there: penalties count the draft's tokens above it."""
    found = []
    for i in which:
        draft, state = drafts[i], states[i]
        found.append(state)
        for node in range(len(draft)):
            if state.params.penalised:
                found.append(state.ahead([draft.tokens[x] for x in draft.path(node)]))
            else:
                found.append(state)
    return found


def draw_ahead(split: dict[int, Tensor], drafts, states, which: Sequence[int]) -> dict[int, list[int]]:
    """What plain decoding would draw at each row, if it came there: depth d uses the stream's d-th next number. The
    streams are left as they were."""
    if not which:
        return {}
    uniforms: list[float] = []
    for i in which:
        stream, depths = states[i].stream, [0, *drafts[i].depths()]
        kept = stream.getstate()
        numbers = [stream.random() for _ in range(max(depths) + 1)]
        stream.setstate(kept)
        uniforms += [numbers[depth] for depth in depths]
    weights = torch.cat([split[i] for i in which])  # [rows, vocab]
    drawn = draw(weights, torch.tensor(uniforms, dtype=torch.float64, device=weights.device)).tolist()
    tokens = iter(drawn)
    return {i: [next(tokens) for _ in range(len(drafts[i]) + 1)] for i in which}


def self_only(p: Tensor, start: int, state: SamplingState) -> Verdict:
    """The draft is passed over: one token from the first row, as plain decoding would."""
    uniform = torch.tensor([state.stream.random()], dtype=torch.float64, device=p.device)
    return Verdict([], [int(draw(p[:1], uniform)[0])], [start])
