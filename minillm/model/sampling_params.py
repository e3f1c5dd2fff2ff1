"""Sampling parameters: how one request wants its tokens chosen, and when it wants to stop.

Chapter 01. Names, defaults and meanings follow vLLM, except `max_tokens` (64 here, 16 there). A value outside
its legal range raises one `ParamsError` that names the argument, the value and the range.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from minillm.errors import ParamsError, illegal

# A temperature below this counts as 0, that is greedy (vLLM draws the line at the same place). Above it the
# value is used as it is: the sampler subtracts the largest logit before it divides, so 1e-4 is as safe as 1.
GREEDY_BELOW = 1e-5
MOST_ANSWERS = 16384  # to one prompt; a slip of the finger must not fill the memory with waiting requests


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int = 64  # at most this many new tokens
    temperature: float = 1.0  # 0 is greedy: always the likeliest token
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 is off
    top_p: float = 1.0  # keep the smallest set of likeliest tokens whose probabilities reach p; 1 is off
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the likeliest; 0 is off
    repetition_penalty: float = 1.0  # over prompt and output; above 1 discourages; 1 is off
    presence_penalty: float = 0.0  # subtracted once from each token already in the output
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the output
    stop: str | tuple[str, ...] | list[str] = ()  # the text ends before the first of these; kept as a tuple
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False  # go on past the end-of-text token, as benchmarks do
    seed: int | None = None  # same seed, same draws, whatever else is in the batch
    logprobs: int | None = None  # report the sampled token's log-probability and this many of the top ones
    n: int = 1  # independent answers to the same prompt

    def __post_init__(self) -> None:
        self._integer("max_tokens", 1)
        self._integer("n", 1, f"must be a whole number from 1 to {MOST_ANSWERS}", MOST_ANSWERS)
        self._integer("top_k", -1, "must be a whole number; 0 or -1 is off, otherwise at least 1")
        self._number("temperature", 0, 1e4)
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0.01, 100)
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        self._number("top_p", 5e-324, 1, "must be above 0 and at most 1")  # 5e-324: the least float above 0
        if self.seed is not None:
            self._integer("seed", -(2**63), "must be None or a whole number from -2**63 to 2**63-1", 2**63 - 1)
        if self.logprobs is not None:
            self._integer("logprobs", 0, "must be None or a whole number of at least 0")
        if not isinstance(self.ignore_eos, bool):
            raise ParamsError(illegal("ignore_eos", self.ignore_eos, "must be True or False"))
        self._stop_strings()
        self._stop_tokens()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; this only normalises a type

    def _integer(self, name: str, least: int, legal: str | None = None, most: float = float("inf")) -> None:
        value = getattr(self, name)
        if not _is_integer(value) or not least <= value <= most:
            raise ParamsError(illegal(name, value, legal or f"must be a whole number of at least {least}"))
        self._keep(name, int(value))

    def _number(self, name: str, least: float, most: float, legal: str | None = None) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        # `least <= nan` is False, so this line refuses NaN and both infinities too.
        if not is_number or not least <= value <= most:
            raise ParamsError(illegal(name, value, legal or f"must be a number from {least:g} to {most:g}"))
        self._keep(name, float(value))

    def _stop_strings(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        legal = "must be a string or a list of strings, none of them empty"
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) and s for s in stop):
            raise ParamsError(illegal("stop", self.stop, legal))
        self._keep("stop", tuple(stop))

    def _stop_tokens(self) -> None:
        ids = self.stop_token_ids
        legal = "must be a list of token ids (whole numbers of at least 0)"
        if not isinstance(ids, (list, tuple)) or not all(_is_integer(i) and i >= 0 for i in ids):
            raise ParamsError(illegal("stop_token_ids", ids, legal))
        self._keep("stop_token_ids", tuple(int(i) for i in ids))


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
