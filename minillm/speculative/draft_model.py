"""A smaller model drafts: it says k tokens one by one, the target reads them all at once.

Chapter 16. Leviathan et al. 2023 (arXiv:2211.17192). The draft has a paged cache of its own. What a sequence's cache
holds is compared with what the sequence became: the common beginning is kept, the rest is rolled back in the block
table, and what is missing is fed with the next draft's first step. Where a whole draft was accepted, its last token
and the bonus are missing: the draft never computed them. Feeding the bonus alone would leave a hole in the draft's
cache, and every later guess would be made on a text that nobody wrote.

The draft draws by the request's own parameters and stream, and hands over q, the distribution it drew from.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from minillm.cache.block_pool import BlockPool, BlockTable, NoRoom, blocks_for
from minillm.cache.paged import PagedCache, PagedStep
from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder
from minillm.model.sampling import probabilities
from minillm.model.sampling_steps import draw
from minillm.speculative.proposer import NOTHING, Context, Draft


class DraftModel:
    """Drafts with `model` for up to `sequences` sequences at once.

    num_blocks: of the draft's cache; by default room for all. A sequence that finds no room gets no drafts.
    prefill: most tokens that are fed in one call to catch up; a long prompt takes several steps, without drafts.
    """

    wants_hidden = False

    def __init__(
        self,
        model: Decoder,
        sequences: int = 32,
        block_size: int = 16,
        num_blocks: int | None = None,
        prefill: int = 512,
    ) -> None:
        if not isinstance(sequences, int) or sequences < 1:
            raise ParamsError(illegal("sequences", sequences, "must be a whole number of at least 1"))
        self.model, self.prefill, self.longest = model, prefill, model.config.max_length
        blocks = sequences * blocks_for(self.longest, block_size) if num_blocks is None else num_blocks
        self.pool = BlockPool(blocks, block_size)
        self.cache = PagedCache(model.config, blocks, block_size, model.dtype, model.device, attention="auto")
        self.held: dict[Hashable, tuple[list[int], BlockTable]] = {}  # tokens whose K and V are stored, and where

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        tokens: list[list[int]] = [[] for _ in contexts]
        rows: list[list[Tensor]] = [[] for _ in contexts]  # q of each, [vocab]
        most = [min(c.most, self.longest - len(c.tokens)) for c in contexts]
        feeds = self._catch_up(contexts, most)
        while feeds:
            ready = {i: feed for i, feed in feeds.items() if self._make_room(contexts[i].key, feed, contexts)}
            if not ready:
                break
            logits = self._forward([contexts[i].key for i in ready], list(ready.values()))  # [ready, vocab]
            drafting = [
                (row, i) for row, i in enumerate(ready) if self._stored(contexts[i].key) >= len(contexts[i].tokens)
            ]
            self._choose(logits, drafting, contexts, tokens, rows)
            feeds = {i: tokens[i][-1:] for _, i in drafting if len(tokens[i]) < most[i]}
        return [self._draft(said, q) for said, q in zip(tokens, rows)]

    def _catch_up(self, contexts: Sequence[Context], most: list[int]) -> dict[int, list[int]]:
        """What to feed first: roll each cache back to what became of its sequence; the rest of that is missing."""
        feeds, budget = {}, self.prefill
        for i, context in enumerate(contexts):
            if most[i] < 1 or not budget:
                continue
            held, table = self.held.setdefault(context.key, ([], BlockTable(self.pool.block_size)))
            common = min(len(held), len(context.tokens) - 1)
            while held[:common] != context.tokens[:common]:
                common -= 1
            del held[common:]
            table.truncate(self.pool, common)
            feeds[i] = list(context.tokens[common : common + budget])
            budget -= len(feeds[i])
        return feeds

    def _make_room(self, key: Hashable, feed: list[int], contexts: Sequence[Context]) -> bool:
        """Slots for the tokens; those who draft now drive out those who do not."""
        held, table = self.held[key]
        idle = [other for other in self.held if all(other is not c.key for c in contexts)]
        while True:
            try:
                table.append(self.pool, len(feed))
            except NoRoom:
                if not idle:
                    return False
                self.release(idle.pop())
            else:
                held += feed
                return True

    def _forward(self, keys: list[Hashable], feeds: list[list[int]]) -> Tensor:
        """One packed forward -> logits after each feed, [keys, vocab]."""
        flat, positions, slots, tables, lengths, last = [], [], [], [], [], []
        for key, feed in zip(keys, feeds):
            held, table = self.held[key]
            start = len(held) - len(feed)
            flat += feed
            positions += range(start, len(held))
            slots += table.slots(start, len(feed))
            tables.append(table.blocks)
            lengths.append(len(held))
            last.append(len(flat) - 1)
        widest = max(map(len, tables))
        padded = [blocks + [0] * (widest - len(blocks)) for blocks in tables]
        flat, positions, slots, last, tables = (
            torch.tensor(x, dtype=torch.long, device=self.model.device)
            for x in (flat, positions, slots, last, padded)
        )
        self.cache.begin(PagedStep(slots, tables, [len(feed) for feed in feeds], lengths, positions))
        hidden = self.model.hidden(flat, positions, self.cache)  # [tokens, hidden]
        return self.model.logits(hidden if len(last) == len(hidden) else hidden[last])  # [keys, vocab]

    def _choose(self, logits: Tensor, drafting, contexts, tokens, rows) -> None:
        """The next token of each: the likeliest, or drawn as the request would draw it."""
        greedy = [(row, i) for row, i in drafting if contexts[i].state.plain_greedy]
        others = [(row, i) for row, i in drafting if not contexts[i].state.plain_greedy]
        if greedy:
            for (_, i), token in zip(greedy, logits[[row for row, _ in greedy]].argmax(-1).tolist()):
                tokens[i].append(token)
        if others:
            states = [contexts[i].state.ahead(tokens[i]) for _, i in others]
            q = probabilities(logits[[row for row, _ in others]], states)  # [others, vocab]
            uniforms = torch.tensor([s.stream.random() for s in states], dtype=torch.float64, device=q.device)
            for n, ((_, i), token) in enumerate(zip(others, draw(q, uniforms).tolist())):
                tokens[i].append(token)
                rows[i].append(q[n])

    def _stored(self, key: Hashable) -> int:
        return len(self.held[key][0])

    @staticmethod
    def _draft(tokens: list[int], rows: list[Tensor]) -> Draft:
        return Draft(tokens, probs=torch.stack(rows) if rows else None) if tokens else NOTHING

    def observe(self, key: Hashable, start: int, hidden) -> None:
        pass

    def release(self, key: Hashable) -> None:
        if key in self.held:
            self.held.pop(key)[1].free(self.pool)


def check_same_vocabulary(target, draft, target_tokenizer=None, draft_tokenizer=None) -> None:
    """Draft and target must mean the same by a token id. target, draft: their configs."""
    if target.vocab_size != draft.vocab_size:
        raise ParamsError(
            f"the draft knows {draft.vocab_size} token ids and the target {target.vocab_size}: a drafted id would "
            "mean another text to the target; choose a draft that was trained with the target's tokenizer"
        )
    if target_tokenizer is None or draft_tokenizer is None:
        return
    ours, theirs = (t.backend.get_vocab(with_added_tokens=True) for t in (target_tokenizer, draft_tokenizer))
    if ours != theirs:
        odd = min(text for text, i in (ours.items() ^ theirs.items()))
        raise ParamsError(
            f"draft and target give {odd!r} different ids (target {ours.get(odd)}, draft {theirs.get(odd)}): choose "
            "a draft that was trained with the target's tokenizer"
        )
