"""Sampling: from logits to the next token, for a batch in which every row has its own parameters.

Chapter 01. The steps and their order are vLLM's: penalties, temperature, min-p, top-k, top-p, draw.
(transformers puts min-p last. That can keep another set: here top-p measures its share of what min-p left.)

- Greedy rows (temperature 0) take the largest logit after penalties, the lowest id of equals; nothing else
  applies to them.
- The repetition penalty looks at prompt and output, presence and frequency penalties at the output alone.
- A draw inverts the cumulative distribution at one uniform number. Each request has its own stream of such
  numbers, so a seed gives the same draws whoever shares the batch, in whatever order. (The logits must be the
  same too: a matrix product may round differently at another batch size.)
- Reported log-probabilities are of the model's own distribution, before any step here, as in vLLM.
- A row with NaN, with +inf, or with all tokens masked is reported in `errors`; the other rows are sampled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from minillm.errors import LogitsError
from minillm.model.sampling_params import SamplingParams
from minillm.model.sampling_steps import (
    LARGEST,
    apply_penalties,
    apply_temperature,
    draw,
    likeliest,
    mask_min_p,
    mask_top_k,
    mask_top_p,
)

__all__ = [
    "SampleResult",
    "Sampler",
    "SamplingParams",
    "SamplingState",
    "TokenLogprobs",
    "apply_penalties",
    "apply_temperature",
    "draw",
    "mask_min_p",
    "mask_top_k",
    "mask_top_p",
    "probabilities",
    "sample",
    "token_logprobs",
]


class SamplingState:
    """What sampling remembers of one request: its parameters, its tokens so far, its random stream."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], stream: random.Random):
        self.params = params
        self.prompt_ids = list(prompt_ids)
        self.output_ids: list[int] = []
        self.stream = stream
        self.plain_greedy = params.greedy and not params.penalised
        self._seen: tuple[Tensor, Tensor] | None = None  # only kept for rows with penalties

    def append(self, token_id: int) -> None:
        """Record a token that became part of the output."""
        self.output_ids.append(token_id)
        if self._seen is not None:
            self._seen[1][token_id] += 1

    def ahead(self, token_ids: Sequence[int]) -> SamplingState:
        """This state as it would be after `token_ids`: for drafts not yet accepted. The stream is shared."""
        copy = SamplingState(self.params, self.prompt_ids, self.stream)
        copy.output_ids = self.output_ids + list(token_ids)
        return copy

    def seen(self, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(in_prompt bool [vocab], output_counts float [vocab]): built once, kept up to date by `append`."""
        if self._seen is None or self._seen[0].device != device:
            in_prompt = torch.zeros(vocab, dtype=torch.bool)
            in_prompt[self.prompt_ids] = True
            counts = torch.bincount(torch.tensor(self.output_ids, dtype=torch.long), minlength=vocab)
            self._seen = in_prompt.to(device), counts.to(device, torch.float32)
        return self._seen


@dataclass(frozen=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass
class SampleResult:
    token_ids: list[int | None]  # None where `errors` has the row
    logprobs: list[TokenLogprobs | None]  # None where the request did not ask
    errors: dict[int, LogitsError] = field(default_factory=dict)

    def checked(self) -> list[int]:
        """The token ids, or the first row's error raised: for callers with one request."""
        for error in self.errors.values():
            raise error
        return self.token_ids


class Sampler:
    """Starts a state for each request, and samples for any batch of states."""

    def __init__(self, seed: int | None = None):
        self._streams = random.Random(seed)  # gives each request without a seed its stream

    def start(self, params: SamplingParams, prompt_ids: Sequence[int] = (), index: int = 0) -> SamplingState:
        """`index` tells the `n` answers to one prompt apart, so that they draw differently under one seed."""
        name = self._streams.getrandbits(128) if params.seed is None else f"{params.seed}/{index}"
        return SamplingState(params, prompt_ids, random.Random(name))

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> SampleResult:
        return sample(logits, states)


@torch.no_grad()
def sample(logits: Tensor, states: Sequence[SamplingState]) -> SampleResult:
    """One token a row; logits [batch, vocab]. Draws from the streams, and does not append to the states."""
    if logits.ndim != 2 or logits.shape[0] != len(states):
        raise LogitsError(f"logits has shape {tuple(logits.shape)}: must be [{len(states)} rows, vocab]")
    token_ids = likeliest(logits)  # [batch]; a NaN counts as the largest, so it shows in the next line
    peaks = logits.gather(-1, token_ids[:, None])[:, 0]  # [batch]
    bad = {row: _error(row, peak) for row, peak in enumerate(peaks.tolist()) if not abs(peak) <= LARGEST}

    others = [row for row, state in enumerate(states) if not state.plain_greedy and row not in bad]
    if others:
        chosen = [states[row] for row in others]
        uniforms = torch.tensor([state.stream.random() for state in chosen], dtype=torch.float64)
        asked = logits if len(others) == len(states) else logits[others]
        weights = probabilities(asked, chosen)  # [others, vocab]
        token_ids[others] = draw(weights, uniforms.to(logits.device))

    ids = [None if row in bad else token for row, token in enumerate(token_ids.tolist())]
    return SampleResult(ids, token_logprobs(logits, ids, states), bad)


@torch.no_grad()
def probabilities(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """The distribution each row is drawn from, [batch, vocab] float32: one-hot for a greedy row.

    Speculative decoding verifies drafts against this. A row no token can be drawn from holds NaN.
    """
    logits = logits.float()
    params = [state.params for state in states]

    rows = [row for row, p in enumerate(params) if p.penalised]
    if rows:
        seen = [states[row].seen(logits.shape[-1], logits.device) for row in rows]
        in_prompt, counts = (torch.stack(column) for column in zip(*seen))  # [rows, vocab] each
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        columns = [_column(params, rows, name, logits) for name in names]
        logits = _on_rows(lambda x: apply_penalties(x, in_prompt, counts, *columns), logits, rows)

    penalised = logits
    logits = apply_temperature(logits, _column(params, range(len(params)), "temperature", logits))
    for name, mask in (("min_p", mask_min_p), ("top_k", mask_top_k), ("top_p", mask_top_p)):
        rows = [row for row, p in enumerate(params) if not p.greedy and _in_use(name, getattr(p, name))]
        if rows:  # touch only the rows that ask: most of the cost is top-p's
            column = _column(params, rows, name, logits)
            logits = _on_rows(partial(mask, **{name: column}), logits, rows)

    weights = logits.softmax(-1)
    greedy = [row for row, p in enumerate(params) if p.greedy]
    if greedy:
        peaks, best = penalised[greedy].max(-1)  # [greedy] each
        weights[greedy] = 0
        weights[greedy, best] = 1 + 0 * peaks  # 1, or NaN if the peak is not finite
    return weights


def _in_use(name: str, value: float) -> bool:
    return value < 1 if name == "top_p" else value > 0


def _column(params, rows, name: str, logits: Tensor) -> Tensor:
    # float64, so that no legal value rounds to an illegal one; a top_k beyond 2**53 is the whole vocabulary.
    values = [min(getattr(params[row], name), 2**53) for row in rows]
    dtype = torch.float64 if name in ("min_p", "top_k", "top_p") else torch.float32
    return torch.tensor(values, dtype=dtype, device=logits.device)


def _on_rows(step, logits: Tensor, rows: list[int]) -> Tensor:
    if len(rows) == len(logits):
        return step(logits)
    return logits.index_copy(0, _index(rows, logits), step(logits[rows]))


def _index(rows: list[int], logits: Tensor) -> Tensor:
    return torch.tensor(rows, device=logits.device)


def _error(row: int, peak: float) -> LogitsError:
    found = {-torch.inf: "every token is masked (-inf)", torch.inf: "a logit is +inf"}.get(peak, "a logit is NaN")
    return LogitsError(f"row {row}: {found}, so no token can be drawn")


def token_logprobs(logits, ids, states) -> list[TokenLogprobs | None]:
    """What a row's own distribution gives its token, and the likeliest; None where nobody asked or there is none."""
    result: list[TokenLogprobs | None] = [None] * len(ids)
    rows = [row for row, state in enumerate(states) if state.params.logprobs is not None and ids[row] is not None]
    if not rows:
        return result
    logprobs = logits[rows].float().log_softmax(-1)  # [rows, vocab]
    most = min(max(states[row].params.logprobs for row in rows), logits.shape[-1])
    values, indices = (column.tolist() for column in logprobs.topk(most))
    own = logprobs.gather(-1, _index([ids[row] for row in rows], logits)[:, None])[:, 0].tolist()
    for i, row in enumerate(rows):
        top = list(zip(indices[i], values[i]))[: states[row].params.logprobs]
        result[row] = TokenLogprobs(ids[row], own[i], tuple(top))
    return result
