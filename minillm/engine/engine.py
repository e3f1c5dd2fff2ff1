"""The engine: add requests, step, and take the answers as they grow.

Chapters 04 to 07. A step is four calls: the scheduler chooses tokens, the runner computes them, each row is sampled
by its own parameters (or a draft is verified, chapter 16), the scheduler records what came out. Requests come and go
between any two steps (continuous batching). A request that goes wrong is aborted by itself; the others do not notice.
Threads take turns, step by step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from numbers import Integral

import torch

from minillm.cache.block_pool import BlockPool, PrefixIndex
from minillm.cache.prefix_hash import HashIndex
from minillm.cache.radix import RadixIndex
from minillm.engine.batch import Batch
from minillm.engine.graphs import make_runner
from minillm.engine.memory import blocks_in, check_room, kv_budget, make_cache
from minillm.engine.options import EngineOptions
from minillm.engine.outputs import Answer, Completion
from minillm.engine.request import Request, RequestGroup, State
from minillm.engine.scheduler import Scheduler
from minillm.engine.speculation import Speculator
from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder
from minillm.model.generate import check_prompt
from minillm.model.sampling import Sampler, SamplingParams, SamplingState, token_logprobs
from minillm.model.tokenizer import Tokenizer
from minillm.speculative.verify import Verdict


@dataclass(frozen=True)
class TokenOutput:
    """What one step gave one request: a token (None: it was aborted) and the text that may be shown now."""

    group: str
    index: int  # which of the n answers
    token: int | None
    text: str
    finish_reason: str | None


class Engine:
    """tokenizer None: token ids only, no text and no stop strings. eos_ids: tokens that end an answer. speculator:
    where drafts come from (chapter 16); None: one token a step."""

    def __init__(
        self,
        model: Decoder,
        options: EngineOptions | None = None,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] | None = None,
        seed: int | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        options = options or EngineOptions()
        most = blocks_in(kv_budget(model.device), model.config, options, model.dtype)
        options = options.resolved(model.config, most)
        check_room(options, model.config, model.dtype, model.device)
        self.model, self.options, self.tokenizer, self.sampler = model, options, tokenizer, Sampler(seed)
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        self.pool = BlockPool(options.num_blocks, options.block_size, make_index(options))
        host = BlockPool(options.num_host_blocks, options.block_size) if options.num_host_blocks else None
        self.scheduler = Scheduler(options, self.pool, host)
        self.runner = make_runner(model, make_cache(model, options, self.pool), options)
        self.speculator = speculator
        self.runner.keep_hidden = speculator is not None and speculator.proposer.wants_hidden
        if speculator is not None:
            speculator.trees = hasattr(self.runner.cache, "move_slots")
        self.groups: dict[str, RequestGroup] = {}  # those that are not finished
        self._names = count()
        self._lock, self._busy, self._late = threading.RLock(), False, []  # see `_at_work`

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
        if not isinstance(salt, str):
            raise ParamsError(illegal("salt", salt, "must be a string"))
        if not isinstance(priority, Integral) or isinstance(priority, bool):
            raise ParamsError(illegal("priority", priority, "must be a whole number; lower is more urgent"))
        with self._at_work():
            group = self._group(prompt, params, priority, salt, time.perf_counter() if arrival is None else arrival)
            self.groups[group.id] = group  # first, so that who is queued is known, whatever interrupts
            self.scheduler.add(group.requests[0])
        return group

    def _group(self, prompt, params, priority, salt, arrival) -> RequestGroup:
        limit = min(params.max_tokens, self.model.config.max_length + 1 - len(prompt))
        name = f"r{next(self._names)}"
        names = [name if params.n == 1 else f"{name}.{index}" for index in range(params.n)]
        requests = [Request(each, prompt, limit, priority, salt) for each in names]
        self.scheduler.refuse_if_hopeless(requests[0])  # before anything is drawn for it from the common seed
        for index, request in enumerate(requests):
            state = self.sampler.start(params, prompt, index)
            request.answer = Answer(state, limit, self.eos_ids, self.tokenizer, arrival)
        requests[0].forks = requests[1:]
        return RequestGroup(name, requests)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """One thread at a time. An abort that comes meanwhile comes from this very thread (a stream that the garbage
        collector closes, say), perhaps in the middle of a step: it waits for the end."""
        with self._lock:
            self._busy = True
            try:
                yield
            finally:
                while self._late:
                    self._abort(self._late.pop())
                self._busy = False

    def abort(self, group: RequestGroup | str) -> None:
        """End all answers of a group, whatever they are doing; their blocks are free at once, or at the end of the
        step that is under way. Twice is harmless."""
        name = group if isinstance(group, str) else group.id
        with self._lock:
            if self._busy:
                self._late.append(name)
                return
            with self._at_work():
                self._abort(name)

    def _abort(self, name: str) -> None:
        if (found := self.groups.pop(name, None)) is None:
            return
        for request in found.requests:
            request.answer.abort()
        self.scheduler.finish(found.requests)
        if self.speculator is not None:
            self.speculator.release(found.requests)

    def step(self) -> list[TokenOutput]:
        """One forward. Returns what it gave, request by request; nothing if there was nothing to do. A step that
        breaks off (no memory, Ctrl-C) leaves no trace but the tokens that it had handed out: all that run are
        computed again, in the next steps."""
        with self._at_work():
            try:
                return self._step()
            except BaseException:
                self._start_over()
                raise

    def _step(self) -> list[TokenOutput]:
        drafts = self.speculator.drafts(self.scheduler.running) if self.speculator is not None else None
        batch = self.scheduler.schedule(drafts)
        if not batch.entries:
            return []
        now = time.perf_counter()
        for request in batch.admitted:
            for each in (request, *request.forks):
                each.answer.started = each.answer.started or now
        logits = self.runner.run(batch)  # [rows, vocab]
        rows, requests = [], []
        for owner in batch.sampling:
            width = len(batch.entries[owner].draft) + 1
            first = rows[-1][-1] + 1 if rows else 0
            for request in (owner, *owner.forks):
                if not request.finished:
                    rows.append(range(first, first + width))
                    requests.append(request)
        verdicts = self._judge(logits, batch, rows, requests) if requests else []
        outputs, gained, accepted = [], {}, {}
        for request, (verdict, logprobs) in zip(requests, verdicts):
            said = self._take(request, verdict.tokens, logprobs)
            gained[request] = [out.token for out in said if out.token is not None]
            accepted[request] = verdict.accepted[: max(len(gained[request]) - 1, 0)]
            outputs += said
        if self.speculator is not None:
            self._settle(batch, gained, accepted)
        self.scheduler.update(batch, gained)
        self._finish([request for request in requests if request.answer.finish_reason is not None])
        return outputs

    def _start_over(self) -> None:
        """What was said is the truth, and K and V can be computed again; so nobody has to know how far a step came
        that broke off. (A request that samples may go on with other draws.)"""
        alive, host = [], self.scheduler.host_pool
        for group in list(self.groups.values()):
            owner = group.requests[0]
            for request in group.requests:
                request.tokens, request.table = [*request.prompt, *request.answer.token_ids], None
                if request.answer.finish_reason is None and len(request.output) >= request.limit:
                    request.answer.finish("length")
                if request.answer.finish_reason is not None:
                    request.state = State.FINISHED
            if owner.finished or owner.output:  # who was to begin with its first token begins alone
                owner.forks = []
            later = set(owner.forks)
            alive += [r for r in group.requests if not r.finished and r not in later]
            if self.speculator is not None:
                self.speculator.release(group.requests)
            if group.finished:
                del self.groups[group.id]
        self.pool.clear(make_index(self.options))
        if host is not None:
            host.clear()
        self.scheduler.restart(alive)

    def _judge(self, logits: torch.Tensor, batch: Batch, rows: list[range], requests: list[Request]) -> list[tuple]:
        """(verdict, log-probabilities) of each request. A fork's first token is drawn from the logits of the prompt
        it shares. Without drafts a verdict is a sampled token."""
        if sum(map(len, rows)) > len(logits):
            wanted = torch.tensor([row for each in rows for row in each], device=logits.device)
            logits = logits[wanted]  # [rows with forks, vocab]
        states: list[SamplingState] = [request.answer.sampling for request in requests]
        if not any(entry.draft for entry in batch.entries.values()):
            result = self.sampler.sample(logits, states)
            return [(Verdict([], [t], []), [lp]) for t, lp in zip(result.token_ids, result.logprobs)]
        found = []
        for verdict, state in zip(self.speculator.judge(logits, batch, requests), states):
            told = [None] * len(verdict.rows)
            if state.params.logprobs is not None:
                told = token_logprobs(logits[verdict.rows], verdict.tokens, [state] * len(told))
            found.append((verdict, told))
        return found

    def _settle(self, batch: Batch, gained: dict[Request, list[int]], accepted: dict[Request, list[int]]) -> None:
        """After a verification: the accepted path of a tree moves together, and the proposer learns what came."""
        for request, nodes in accepted.items():
            if nodes:
                self.runner.keep(batch.entries[request], request.table, nodes)
        self.speculator.observe(batch, self.runner.hidden, accepted)
        counts = ({request: len(got) for request, got in each.items()} for each in (gained, accepted))
        self.speculator.record(batch, *counts)

    def _take(self, request: Request, tokens: Sequence[int | None], logprobs: Sequence) -> list[TokenOutput]:
        """Hand tokens to an answer, until one is its last. None: nothing could be drawn from this row (NaN), which
        ends this one alone."""
        answer, outputs = request.answer, []
        group, _, index = request.id.partition(".")
        for token, logprob in zip(tokens, logprobs):
            text = ""
            if token is None:
                answer.abort()
            else:
                text = answer.append(token, logprob)
            outputs.append(TokenOutput(group, int(index or 0), token, text, answer.finish_reason))
            if answer.finish_reason is not None:
                break
        return outputs

    def _finish(self, requests: Sequence[Request]) -> None:
        self.scheduler.finish(requests)
        if self.speculator is not None:
            self.speculator.release(requests)
        for name in {request.id.partition(".")[0] for request in requests}:
            if self.groups[name].finished:
                del self.groups[name]

    def completions(self, group: RequestGroup) -> list[Completion]:
        """The answers so far, in order."""
        return [r.answer.completion(r.cached_tokens or 0, r.preemptions, r.accepted_drafts) for r in group.requests]


def make_index(options: EngineOptions) -> PrefixIndex | None:
    kinds = {"off": lambda size: None, "hash": HashIndex, "radix": RadixIndex}
    return kinds[options.enable_prefix_caching](options.block_size)
