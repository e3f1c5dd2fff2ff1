"""What a caller gets back, and the text side of a request while it grows.

Chapter 04. `Answer` turns sampled tokens into text that may be shown, and decides which token is the last:
end-of-text, a stop token, a stop string (which may begin in one token and end in another), or the length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.model.sampling import SamplingParams, SamplingState, TokenLogprobs
from minillm.model.stops import StopChecker
from minillm.model.tokenizer import Tokenizer


@dataclass
class RequestMetrics:
    """Seconds, counted from the call. TPOT: mean time per output token after the first (None with one token).

    cached_tokens: prompt tokens whose KV the prefix cache had. accepted_drafts: tokens that a draft had
    guessed (chapter 16). preemptions: times it lost its place.
    """

    queue: float
    ttft: float | None
    tpot: float | None
    e2e: float
    cached_tokens: int = 0
    accepted_drafts: int = 0
    preemptions: int = 0


@dataclass
class Completion:
    """One answer. finish_reason: "stop" (end-of-text token or stop string), "length", or "abort"."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    metrics: RequestMetrics
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class RequestOutput:
    """The answers to one prompt: one, or SamplingParams.n of them. The shortcuts read the first."""

    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def metrics(self) -> RequestMetrics:
        return self.completions[0].metrics


class Answer:
    """One answer while it is being generated. tokenizer None: tokens only, and no text.

    unread: text that was released and not yet fetched by `read`; joined, the pieces are `text`.
    """

    def __init__(
        self,
        sampling: SamplingState,
        limit: int,
        eos_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        arrival: float,
    ) -> None:
        self.params: SamplingParams = sampling.params
        self.sampling, self.limit = sampling, limit
        self.detokenizer = tokenizer.stream() if tokenizer is not None else None
        self.stops = StopChecker(self.params.stop)
        self.ends = set(self.params.stop_token_ids) | (set() if self.params.ignore_eos else set(eos_ids))
        self.text, self.unread, self.logprobs, self.finish_reason = "", "", [], None
        self.arrival, self.started, self.token_times, self.ended = arrival, None, [], None

    @property
    def token_ids(self) -> list[int]:
        return self.sampling.output_ids

    def append(self, token: int, logprobs: TokenLogprobs | None) -> str:
        """Record a token, decide whether it is the last, and return the text that may be shown now."""
        self.token_times.append(time.perf_counter())
        self.sampling.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self.ends:
            piece = self.stops.feed(self._flush())
            return self.finish("stop", piece)
        piece = self.stops.feed(self.detokenizer.push(token)) if self.detokenizer is not None else ""
        if self.stops.stopped is None and len(self.token_ids) >= self.limit:
            piece += self.stops.feed(self._flush())
            return self.finish("stop" if self.stops.stopped is not None else "length", piece)
        if self.stops.stopped is not None:
            return self.finish("stop", piece)
        return self._show(piece)

    def finish(self, reason: str, piece: str = "") -> str:
        """End here. Text that was held because a stop string might have come is released."""
        self.finish_reason, self.ended = reason, time.perf_counter()
        return self._show(piece + self.stops.finish())

    def abort(self) -> None:
        """End from outside: what was said so far stays, an unfinished character included."""
        if self.finish_reason is None:
            self.finish("abort", self.stops.feed(self._flush()))

    def read(self) -> str:
        piece, self.unread = self.unread, ""
        return piece

    def completion(self, cached_tokens: int = 0, preemptions: int = 0, accepted_drafts: int = 0) -> Completion:
        times = self.token_times
        last = times[-1] if times else self.ended or time.perf_counter()
        started = self.started if self.started is not None else last
        metrics = RequestMetrics(
            queue=started - self.arrival,
            ttft=times[0] - self.arrival if times else None,
            tpot=(last - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            e2e=last - self.arrival,
            cached_tokens=cached_tokens,
            accepted_drafts=accepted_drafts,
            preemptions=preemptions,
        )
        logprobs = self.logprobs if self.params.logprobs is not None else None
        return Completion(self.text, list(self.token_ids), self.finish_reason, metrics, logprobs)

    def _flush(self) -> str:
        return self.detokenizer.flush() if self.detokenizer is not None else ""

    def _show(self, piece: str) -> str:
        self.text += piece
        self.unread += piece
        return piece
