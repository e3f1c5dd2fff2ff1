"""LLM: the one class a user starts from.

    llm = LLM("tiny")
    outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

Requests are run in static batches of up to `max_num_seqs`: prompts padded at the left to one length, one prefill,
then one decode step a token; a row that has finished leaves the batch. (Chapter 04 replaces this loop by an engine.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch

from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import decode, prefill
from minillm.errors import LogitsError, ParamsError, PromptError, illegal
from minillm.model.generate import check_prompt
from minillm.model.layout import pack_linears
from minillm.model.sampling import Sampler, SamplingParams, TokenLogprobs
from minillm.model.stops import StopChecker
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model

Prompt = str | Sequence[int]


@dataclass
class RequestMetrics:
    """Seconds, counted from the call. TPOT: mean time per output token after the first (None with one token)."""

    queue: float
    ttft: float | None
    tpot: float | None
    e2e: float
    cached_tokens: int = 0
    accepted_drafts: int = 0


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


class _Row:
    """One answer while it is being generated."""

    def __init__(self, llm: LLM, prompt_ids: list[int], params: SamplingParams, index: int, arrival: float) -> None:
        self.params, self.prompt_ids = params, prompt_ids
        self.sampling = llm.sampler.start(params, prompt_ids, index)
        self.detokenizer, self.stops = llm.tokenizer.stream(), StopChecker(params.stop)
        self.ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(llm.eos_ids))
        self.limit = min(params.max_tokens, llm.config.max_length + 1 - len(prompt_ids))
        self.text, self.logprobs, self.finish_reason = "", [], None
        self.arrival, self.started, self.first, self.last = arrival, time.perf_counter(), None, arrival

    @property
    def token_ids(self) -> list[int]:
        return self.sampling.output_ids

    def append(self, token: int, logprobs: TokenLogprobs | None) -> str:
        """Record a token, decide whether it is the last, and return the text that may be shown now."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.sampling.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self.ends:
            self.finish_reason = "stop"
            piece = self.stops.feed(self.detokenizer.flush())
        else:
            piece = self.stops.feed(self.detokenizer.push(token))
            if len(self.token_ids) >= self.limit and self.stops.stopped is None:
                piece += self.stops.feed(self.detokenizer.flush())
                self.finish_reason = "length"
        if self.stops.stopped is not None:
            self.finish_reason = "stop"
        if self.finish_reason is not None:
            piece += self.stops.finish()
        self.text += piece
        return piece

    def completion(self) -> Completion:
        tokens = len(self.token_ids)
        metrics = RequestMetrics(
            queue=self.started - self.arrival,
            ttft=self.first - self.arrival if self.first else None,
            tpot=(self.last - self.first) / (tokens - 1) if tokens > 1 else None,
            e2e=self.last - self.arrival,
        )
        logprobs = self.logprobs if self.params.logprobs is not None else None
        return Completion(self.text, list(self.token_ids), self.finish_reason, metrics, logprobs)


class LLM:
    """model: "tiny", "smollm2-135m", a folder, a .gguf file, a hub id, or "shape:NAME" (random weights).

    dtype: "float32", "bfloat16", "float16" or a torch dtype (default: float32 on a CPU, the checkpoint's on a GPU).
    device: "cpu", "cuda", "cuda:1" ... (default: a GPU if there is one). max_num_seqs: largest batch.
    seed: makes runs repeatable for requests that bring no seed of their own.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_num_seqs: int = 32,
        seed: int | None = None,
    ) -> None:
        if not isinstance(max_num_seqs, Integral) or isinstance(max_num_seqs, bool) or max_num_seqs < 1:
            raise ParamsError(illegal("max_num_seqs", max_num_seqs, "must be a whole number of at least 1"))
        if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool)):
            raise ParamsError(illegal("seed", seed, "must be None or a whole number"))
        self.model = pack_linears(load_model(model, dtype=dtype, device=device))
        self.config = self.model.config
        self.tokenizer = load_tokenizer(model)
        self.eos_ids = tuple(dict.fromkeys((*self.config.eos_ids, *self.tokenizer.eos_ids)))
        self.max_num_seqs = int(max_num_seqs)
        self.sampler = Sampler(None if seed is None else int(seed))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order. params: one for all, or one a prompt."""
        arrival = time.perf_counter()
        prompts = _as_list(prompts)
        per_prompt = self._params_list(params, len(prompts))
        ids = [self._encode(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        outputs = [RequestOutput(p if isinstance(p, str) else None, t) for p, t in zip(prompts, ids)]
        waiting = [(i, k) for i, p in enumerate(per_prompt) for k in range(p.n)]
        for start in range(0, len(waiting), self.max_num_seqs):
            batch = waiting[start : start + self.max_num_seqs]
            rows = [_Row(self, ids[i], per_prompt[i], k, arrival) for i, k in batch]
            for _ in self._run(rows):
                pass
            for (i, _), row in zip(batch, rows):
                outputs[i].completions.append(row.completion())
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text in pieces, as it comes; never half a character, never part of a stop string."""
        params = self._params_list(params, 1)[0]
        if params.n != 1:
            raise ParamsError(illegal("n", params.n, "must be 1 for a stream"))
        row = _Row(self, self._encode(prompt, "prompt"), params, 0, time.perf_counter())
        return (piece for pieces in self._run([row]) for piece in pieces if piece)

    def chat(self, messages: Sequence[dict], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation, [{"role": "user", "content": "..."}, ...], under the model's own chat template."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        output = self.generate([self.tokenizer.encode(text, add_special_tokens=False)], params)[0]
        output.prompt = text
        return output

    def _run(self, rows: list[_Row]) -> Iterator[list[str]]:
        """Generate until every row has finished; after each step, yield the new text of every row of the batch."""
        longest = max(len(row.prompt_ids) for row in rows)
        padding = torch.tensor([longest - len(row.prompt_ids) for row in rows], device=self.model.device)
        room = longest + max(row.limit for row in rows)
        model = self.model
        cache = ContiguousCache(self.config, len(rows), room, model.dtype, model.device, padding)
        padded = [[0] * (longest - len(row.prompt_ids)) + row.prompt_ids for row in rows]
        logits = prefill(model, torch.tensor(padded, device=model.device), cache)  # [batch, vocab]
        while True:
            result = self.sampler.sample(logits, [row.sampling for row in rows])
            pieces = [self._take(row, i, result) for i, row in enumerate(rows)]
            yield pieces
            alive = [i for i, row in enumerate(rows) if row.finish_reason is None]
            if not alive:
                return
            if len(alive) < len(rows):
                rows = [rows[i] for i in alive]
                cache.keep(alive)
            tokens = torch.tensor([row.token_ids[-1] for row in rows], device=model.device)  # [batch]
            logits = decode(model, tokens, cache)

    @staticmethod
    def _take(row: _Row, index: int, result) -> str:
        if index in result.errors:  # this row has no distribution to draw from; the others go on
            row.finish_reason = "abort"
            return ""
        return row.append(result.token_ids[index], result.logprobs[index])

    def _encode(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError(f"{name} is empty: it must hold at least one character")
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, (list, tuple)) or getattr(prompt, "ndim", 0) > 0:
            ids = [_number(token) for token in prompt]
        else:
            raise PromptError(illegal(name, prompt, "must be a string or a list of token ids"))
        check_prompt(ids, self.config, name)
        return ids

    @staticmethod
    def _params_list(params, count: int) -> list[SamplingParams]:
        params = SamplingParams() if params is None else params
        if not isinstance(params, (SamplingParams, list, tuple)):
            raise ParamsError(illegal("params", params, "must be a SamplingParams, or a list of one a prompt"))
        many = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(many) != count:
            raise ParamsError(f"params has {len(many)} entries for {count} prompts: give one, or one a prompt")
        for entry in many:
            if not isinstance(entry, SamplingParams):
                raise ParamsError(illegal("params", entry, "must be a SamplingParams, or one a prompt"))
        return many


def _as_list(prompts) -> list[Prompt]:
    """A single string or a single list of token ids becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)) and getattr(prompts, "ndim", 0) < 1:  # an array or tensor is welcome
        raise PromptError(illegal("prompts", prompts, "must be a string, or a list of strings or of token ids"))
    if len(prompts) == 0:
        raise PromptError("prompts is empty: give at least one prompt")
    return [prompts] if isinstance(_number(prompts[0]), (int, float)) else list(prompts)


def _number(token):
    """A NumPy or torch scalar as Python's own number; anything else as it is."""
    return token.item() if getattr(token, "ndim", None) == 0 else token


__all__ = ["LLM", "Completion", "LogitsError", "RequestMetrics", "RequestOutput", "SamplingParams"]
