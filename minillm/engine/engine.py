"""The engine: add requests, step, and take the answers as they grow.

Chapters 04 to 07. A step is four calls: the scheduler chooses tokens, the runner computes them, each row is sampled
by its own parameters, the scheduler records what came out. Requests come and go between any two steps (continuous
batching). A request that goes wrong is aborted by itself; the others do not notice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from minillm.cache.block_pool import BlockPool, PrefixIndex
from minillm.cache.prefix_hash import HashIndex
from minillm.cache.radix import RadixIndex
from minillm.engine.graphs import make_runner
from minillm.engine.memory import blocks_in, kv_budget, make_cache
from minillm.engine.options import EngineOptions
from minillm.engine.outputs import Answer, Completion
from minillm.engine.request import Request, RequestGroup
from minillm.engine.scheduler import Scheduler
from minillm.errors import ParamsError
from minillm.model.decoder import Decoder
from minillm.model.generate import check_prompt
from minillm.model.sampling import Sampler, SamplingParams, SamplingState
from minillm.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenOutput:
    """What one step gave one request: a token (None: it was aborted) and the text that may be shown now."""

    group: str
    index: int  # which of the n answers
    token: int | None
    text: str
    finish_reason: str | None


class Engine:
    """tokenizer None: token ids only, no text and no stop strings. eos_ids: tokens that end an answer."""

    def __init__(
        self,
        model: Decoder,
        options: EngineOptions | None = None,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        options = options or EngineOptions()
        most = blocks_in(kv_budget(model.device), model.config, options, model.dtype)
        options = options.resolved(model.config, most)
        self.model, self.options, self.tokenizer, self.sampler = model, options, tokenizer, Sampler(seed)
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        self.pool = BlockPool(options.num_blocks, options.block_size, make_index(options))
        host = BlockPool(options.num_host_blocks, options.block_size) if options.num_host_blocks else None
        self.scheduler = Scheduler(options, self.pool, host)
        self.runner = make_runner(model, make_cache(model, options, self.pool), options)
        self.groups: dict[str, RequestGroup] = {}  # those that are not finished
        self._names = count()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: str = "",
        arrival: float | None = None,
    ) -> RequestGroup:
        """Queue a prompt; its answers grow with every `step`. Raises, and queues nothing, if it could never run.

        priority: lower is more urgent (policy="priority"). salt: only requests with the same salt share prefixes.
        """
        params, prompt = params or SamplingParams(), list(prompt)
        check_prompt(prompt, self.model.config)
        if self.tokenizer is None and params.stop:
            raise ParamsError("stop strings need a tokenizer; this engine was made without one")
        group = self._group(prompt, params, priority, salt, time.perf_counter() if arrival is None else arrival)
        self.scheduler.add(group.requests[0])
        self.groups[group.id] = group
        return group

    def _group(self, prompt, params, priority, salt, arrival) -> RequestGroup:
        limit = min(params.max_tokens, self.model.config.max_length + 1 - len(prompt))
        name, requests = f"r{next(self._names)}", []
        for index in range(params.n):
            request = Request(name if params.n == 1 else f"{name}.{index}", prompt, limit, priority, salt)
            state = self.sampler.start(params, prompt, index)
            request.answer = Answer(state, limit, self.eos_ids, self.tokenizer, arrival)
            requests.append(request)
        requests[0].forks = requests[1:]
        return RequestGroup(name, requests)

    def abort(self, group: RequestGroup | str) -> None:
        """End all answers of a group, whatever they are doing; their blocks are free at once. Twice is harmless."""
        name = group if isinstance(group, str) else group.id
        if (found := self.groups.pop(name, None)) is None:
            return
        for request in found.requests:
            request.answer.abort()
        self.scheduler.finish(found.requests)

    def step(self) -> list[TokenOutput]:
        """One forward. Returns what it gave, request by request; nothing if there was nothing to do."""
        batch = self.scheduler.schedule()
        if not batch.entries:
            return []
        now = time.perf_counter()
        for request in batch.admitted:
            for each in (request, *request.forks):
                each.answer.started = each.answer.started or now
        logits = self.runner.run(batch)  # [rows, vocab]
        rows = [(row, r) for row, owner in enumerate(batch.sampling) for r in (owner, *owner.forks) if not r.finished]
        if not rows:
            self.scheduler.update(batch, {})
            return []
        result = self._sample(logits, rows)
        tokens = {request: token for (_, request), token in zip(rows, result.token_ids) if token is not None}
        self.scheduler.update(batch, tokens)
        return [self._take(request, result.token_ids[i], result.logprobs[i]) for i, (_, request) in enumerate(rows)]

    def _sample(self, logits: torch.Tensor, rows: list[tuple[int, Request]]):
        """A fork's first token is drawn from the logits of the prompt it shares."""
        states: list[SamplingState] = [request.answer.sampling for _, request in rows]
        if len(rows) > len(logits):
            logits = logits[torch.tensor([row for row, _ in rows], device=logits.device)]  # [rows with forks, vocab]
        return self.sampler.sample(logits, states)

    def _take(self, request: Request, token: int | None, logprobs) -> TokenOutput:
        """Hand a token to its answer. None: nothing could be drawn from this row (NaN), which ends this one alone."""
        answer = request.answer
        if token is None:
            answer.abort()
            text = ""
        else:
            text = answer.append(token, logprobs)
        if answer.finish_reason is not None:
            self.scheduler.finish([request])
        group, _, index = request.id.partition(".")
        if self.groups[group].finished:
            del self.groups[group]
        return TokenOutput(group, int(index or 0), token, text, answer.finish_reason)

    def completions(self, group: RequestGroup) -> list[Completion]:
        """The answers so far, in order."""
        return [r.answer.completion(r.cached_tokens or 0, r.preemptions) for r in group.requests]


def make_index(options: EngineOptions) -> PrefixIndex | None:
    kinds = {"off": lambda size: None, "hash": HashIndex, "radix": RadixIndex}
    return kinds[options.enable_prefix_caching](options.block_size)
