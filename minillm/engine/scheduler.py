"""The scheduler: which tokens of which requests does the next forward compute?

Chapter 06. Iteration-level scheduling is from Orca (Yu et al. 2022, OSDI); a prompt computed in chunks that ride
along with decodes from Sarathi-Serve (Agrawal et al. 2024, arXiv:2403.02310) and DeepSpeed-FastGen's SplitFuse
(Holmes et al. 2024, arXiv:2401.08671); preemption by recomputation or by swapping from vLLM (Kwon et al. 2023,
arXiv:2309.06180).

Every step hands out a budget of tokens. A decoding request takes one, a prompt takes what is left. A request is
admitted when the blocks for all its known tokens are free. When a running one finds no block for its next token, the
least urgent is preempted. Nobody waits for ever:

- The queue is ordered by (urgency, arrival), and its head is never skipped for want of room. With priorities, a
  request gains one level every `ageing` steps. All who wait gain at the same rate, so their order never changes, and
  `priority * ageing + step of arrival` is a key that a heap can keep.
- Who waits takes the place of who runs only with a smaller key and a more urgent level. Few can ever have a smaller
  key than a given request: none that arrives `priority * ageing` steps after it. And a victim cannot strike back.
- The most urgent running request is never a victim for want of a block, so every step brings somebody nearer to the
  end.
- A request that could not run even alone is refused when it is added.

Drafts (chapter 16) come last. They get what is left of the budget, and blocks that hold nothing, not even a cached
prefix; blocks of what was not accepted are free again before the next step.

Pure bookkeeping: no tensor is touched, and torch is not imported. The work of a step grows with the requests that
run, not with those that wait.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from minillm.cache.block_pool import BlockPool, BlockTable, NoRoom, blocks_for
from minillm.engine.batch import Batch, StepLog
from minillm.engine.options import EngineOptions
from minillm.engine.preemption import enough, less_urgent, victim
from minillm.engine.request import Request, State
from minillm.errors import PromptError
from minillm.speculative.proposer import Draft


class Scheduler:
    """schedule() -> Batch; the runner computes it; update(batch, tokens) records what came out."""

    def __init__(self, options: EngineOptions, pool: BlockPool, host_pool: BlockPool | None = None) -> None:
        self.options, self.pool, self.host_pool = options, pool, host_pool
        self.running: list[Request] = []  # most urgent first
        self.num_waiting = 0
        self.steps = 0
        self.log: list[StepLog] = []
        self._waiting: list[tuple[tuple, Request]] = []  # a heap; aborted requests are left in it until they surface
        self._tickets = count()

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    # What comes in.

    def add(self, request: Request) -> None:
        """Queue a request and give its forks their places behind it; PromptError if it could not run even alone."""
        self.refuse_if_hopeless(request)
        for each in (request, *request.forks):
            age = each.priority * self.options.ageing + self.steps if self.options.policy == "priority" else 0
            each.order = (age, next(self._tickets))
        self._enqueue(request)

    def refuse_if_hopeless(self, request: Request) -> None:
        blocks = blocks_for(request.longest, self.pool.block_size)
        if blocks > self.pool.num_blocks:
            raise PromptError(
                f"request {request.id} could never run: {len(request.prompt)} prompt tokens and up to "
                f"{request.limit} new ones need {blocks} blocks of {self.pool.block_size}, and the pool has "
                f"{self.pool.num_blocks}; lower max_tokens, or raise num_blocks"
            )
        limit = self.options.max_num_batched_tokens
        if not self.options.enable_chunked_prefill and request.longest > limit:
            raise PromptError(
                f"request {request.id} could never run: a prefill of up to {request.longest} tokens does not fit "
                f"max_num_batched_tokens={limit}; raise it, or set enable_chunked_prefill=True"
            )

    # One step.

    def schedule(self, drafts: Mapping[Request, Draft] | None = None) -> Batch:
        """Choose the tokens of the next forward, and give them room. drafts: guesses for requests that decode."""
        batch = Batch(self.steps, self.options.max_num_batched_tokens)
        self.steps += 1
        self._make_way(batch)
        if self.options.prefill_first:
            self._continue(batch, decoding=False)
            self._admit(batch)
            if self.options.enable_chunked_prefill or not batch.entries:
                self._continue(batch, decoding=True)
        else:
            self._continue(batch, decoding=True)
            self._continue(batch, decoding=False)
            self._admit(batch)
        for request, draft in (drafts or {}).items():
            self._add_draft(batch, request, draft)
        if self.options.keep_log:
            self.log.append(StepLog.of(batch, self.num_waiting, len(self.running), self.pool.free_count))
        return batch

    def _continue(self, batch: Batch, decoding: bool) -> None:
        """More tokens for running requests, the most urgent first; preempt from the other end where room is short."""
        for request in list(self.running):
            if request.state is not State.RUNNING or request.decoding is not decoding or request in batch.entries:
                continue
            tokens = min(request.remaining, batch.budget)
            while tokens and request.state is State.RUNNING:
                try:
                    self._make_room(batch, request, tokens)
                except NoRoom:
                    assert len(self.running) > 1, "who runs alone has room: it was checked when it was added"
                    self._preempt(batch, victim(self.running, self.options.victim))
                else:
                    batch.add(request, tokens)
                    break

    def _add_draft(self, batch: Batch, request: Request, draft: Draft) -> None:
        """As much of a draft as there is room for that nobody else wants."""
        entry, table, size = batch.entries.get(request), request.table, self.pool.block_size
        if entry is None or not entry.samples or entry.count > 1:
            return
        room = (len(table.blocks) + self.pool.empty_count) * size - table.length
        draft = draft.cut(min(batch.budget, room))
        if draft:
            table.append(self.pool, len(draft))  # behind the token just placed: nothing shared is written
            batch.add_draft(request, draft)

    def _admit(self, batch: Batch) -> None:
        """Start waiting requests while slots, budget and blocks last; the first that does not fit ends it."""
        while self.num_waiting and batch.budget and not batch.preempted:
            if len(self.running) >= self.options.max_num_seqs:
                return
            request = self._next_waiting()
            if not self._place(batch, request):
                heapq.heappush(self._waiting, (request.order, request))
                return
            self._start(batch, request)
            batch.add(request, min(request.remaining, batch.budget))

    def _start(self, batch: Batch, request: Request) -> None:
        """It has its place: it runs."""
        self.num_waiting -= 1
        request.state, request.queued = State.RUNNING, False
        insort(self.running, request, key=lambda r: r.order)
        batch.admitted.append(request)

    def _place(self, batch: Batch, request: Request) -> bool:
        """Give a waiting request blocks for all its tokens: cached ones, its own from the host, or new. False: no."""
        spare = self.options.headroom * len(self.running)  # those who run will soon need blocks, too
        if request.on_host:
            if self._need(request) + spare > self.pool.free_count:
                return False
            if pairs := request.table.swap(self.host_pool, self.pool):
                batch.copies.append(("swap_in", pairs))
            request.on_host = False
        else:
            size, need = self.pool.block_size, self._need(request)
            if need + spare > self.pool.free_count:
                return False
            if not self.options.enable_chunked_prefill and len(request.tokens) - self._known(request) > batch.budget:
                return False  # without chunks a prompt is computed in one forward or not yet
            hit = self.pool.match(request.tokens, request.salt)
            self.pool.share(hit)  # before anything is allocated, which might evict them
            if need + spare > self.pool.free_count:  # those that nobody held counted as free until now
                self.pool.free(hit)
                self.pool.index.stats.take_back(len(request.tokens), len(hit) * size)  # it will ask again
                return False
            request.computed = len(hit) * size
            request.table = BlockTable(size, hit, request.computed)
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
        self._make_room(batch, request, request.remaining)
        return True

    def _known(self, request: Request) -> int:
        """Tokens of its prefix that are cached."""
        return 0 if self.pool.index is None else self.pool.index.longest_prefix(request.tokens, request.salt)

    def _need(self, request: Request) -> int:
        """Blocks that a waiting request takes from the free ones; cached ones that it revives come on top."""
        blocks = blocks_for(len(request.tokens), self.pool.block_size)
        if not request.on_host:
            return blocks - self._known(request) // self.pool.block_size
        held = len(request.table.blocks)
        moved = request.table.swap_needs(self.host_pool, self.pool)
        return moved + max(blocks - held, 0) + (moved < held)  # where blocks are shared, the last may need a copy

    def _make_room(self, batch: Batch, request: Request, tokens: int) -> None:
        """Blocks for the next tokens, and a copy of a shared last block before it is written. NoRoom: no change."""
        new = request.computed + tokens - request.table.length
        if new > 0 and (pairs := request.table.append(self.pool, new)):
            batch.copies.append(("copy", pairs))

    def _next_waiting(self) -> Request:
        """The head of the queue; with a look-ahead, the one among the first few with the longest cached prefix."""
        first = self._pop_waiting()
        if self.options.lookahead <= 1 or self.pool.index is None:
            return first
        others = [self._pop_waiting() for _ in range(min(self.options.lookahead, self.num_waiting) - 1)]
        best = first
        if first.passed_over < self.options.patience and not first.on_host:
            best = max((first, *others), key=lambda r: self.pool.index.longest_prefix(r.tokens, r.salt))
        if best is not first:
            first.passed_over += 1
        for other in (first, *others):
            if other is not best:
                heapq.heappush(self._waiting, (other.order, other))
        return best

    def _head(self) -> Request | None:
        """Who waits first; those that were aborted are taken from the heap on the way."""
        while self._waiting and self._waiting[0][1].finished:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _pop_waiting(self) -> Request:
        request = self._head()
        heapq.heappop(self._waiting)
        return request

    # Preemption.

    def _make_way(self, batch: Batch) -> None:
        """The head of the queue takes the place of less urgent requests, if that is what it waits for."""
        head, options = self._head(), self.options
        if options.policy != "priority" or head is None:
            return
        lesser = less_urgent(self.running, head, options.victim)
        need, running = self._need(head) if lesser else 0, len(self.running)
        victims = enough(lesser, running, options.max_num_seqs, need, options.headroom, self.pool)
        for i, each in enumerate(lesser if victims else ()):
            if i >= victims and self._take_place(batch, head):
                return
            self._preempt(batch, each)
        if victims:
            self._take_place(batch, head)

    def _take_place(self, batch: Batch, head: Request) -> bool:
        """Start the head of the queue now; it gets its tokens with the others who run. False: no room yet."""
        if not self._place(batch, head):
            return False
        popped = self._pop_waiting()
        assert popped is head, "victims wait behind it"
        self._start(batch, head)
        if not self.options.enable_chunked_prefill:
            batch.add(head, head.remaining)  # whole, or not at all
        return True

    def _preempt(self, batch: Batch, request: Request) -> None:
        """Take a running request's blocks; its place in the queue is where it was."""
        batch.drop(request)
        self.running.remove(request)
        request.table.truncate(self.pool, request.computed)
        request.state, request.preemptions = State.PREEMPTED, request.preemptions + 1
        if not self._swap_out(batch, request):
            request.table.free(self.pool)
            request.computed = 0
        batch.preempted.append((request, "swap" if request.on_host else "recompute"))
        self._enqueue(request)

    def _swap_out(self, batch: Batch, request: Request) -> bool:
        """Move the blocks to the host, if that is wanted and the host has room."""
        if self.options.preemption != "swap" or self.host_pool is None or not request.computed:
            return False
        try:
            pairs = request.table.swap(self.pool, self.host_pool)
        except NoRoom:
            return False
        if pairs:
            batch.copies.append(("swap_out", pairs))
        request.on_host = True
        return True

    # What comes out.

    def update(self, batch: Batch, tokens: Mapping[Request, int | Sequence[int]]) -> None:
        """The batch was computed, and these tokens were sampled, those of forks included. Of several tokens of one
        request all but the last were in its draft: their K and V are in place, what else was drafted is forgotten."""
        size = self.pool.block_size
        said = {request: [t] if isinstance(t, int) else list(t) for request, t in tokens.items()}
        for request, new in said.items():
            request.tokens += new
        for request, entry in batch.entries.items():
            end = entry.end
            if entry.draft:
                kept = max(len(said.get(request, ())) - 1, 0)
                end, request.accepted_drafts = end + kept, request.accepted_drafts + kept
                request.table.truncate(self.pool, end)
            full = end // size
            if full > request.computed // size:
                self.pool.insert(request.tokens[: full * size], request.table.blocks[:full], request.salt)
            request.computed = end
            if entry.samples:
                for fork in request.forks:
                    self._start_fork(request, fork)
                request.forks = []

    def _start_fork(self, request: Request, fork: Request) -> None:
        """Begin where `request` is, on its blocks. Without a free slot: wait, and compute the prompt again."""
        if fork.finished:
            return
        fork.cached_tokens = request.cached_tokens
        if len(self.running) >= self.options.max_num_seqs:
            self._enqueue(fork)
            return
        fork.table, fork.computed, fork.state = request.table.fork(self.pool), request.computed, State.RUNNING
        insort(self.running, fork, key=lambda r: r.order)

    def finish(self, requests: Iterable[Request]) -> None:
        """Done or aborted, in whatever state: blocks are free at once."""
        for request in requests:
            if request.finished:
                continue
            if request.state is State.RUNNING:
                self.running.remove(request)
            elif request.queued:
                self.num_waiting -= 1
            if request.table is not None:
                request.table.free(self.host_pool if request.on_host else self.pool)
            request.state, request.on_host, request.queued = State.FINISHED, False, False
            if self.log:
                self.log[-1].finished.append(request.id)

    def restart(self, requests: Iterable[Request]) -> None:
        """These, and no others, are to be computed, from their first token on; each has its old place in the queue.
        The pools were cleared."""
        self.running.clear()
        self._waiting, self.num_waiting = [], 0
        for request in requests:
            request.table, request.computed, request.on_host = None, 0, False
            request.state = State.WAITING if request.state is State.WAITING else State.PREEMPTED
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.order, request))
        request.queued = True
        self.num_waiting += 1
