"""EAGLE: one decoder layer that continues the target's features instead of its tokens.

Chapter 17. Li et al. 2024 (arXiv:2401.15077). The feature f_i is the target's last hidden state at token i, what its
head scores. Which token was drawn from f_i is not in f_i, so a draft on features alone must guess it; given the token
t_{i+1} beside f_i, the next feature is far easier to say:

    f'_{i+1} = norm(layer(fuse([embed(t_{i+1}), f_i])))        the target's head scores f'_{i+1}: what is t_{i+2}?

The layer has a KV cache of its own, of pairs (f_i, t_{i+1}). Pairs of accepted tokens hold the target's features;
below them the draft goes on from features of its own, and those pairs are written over in the next round.

The tree is dynamic (EAGLE-2, Li et al. 2024, arXiv:2406.16858): each level continues the `width` likeliest paths, and
of all that was looked at the `nodes` likeliest are verified. Where the draft is sure, that is a chain; where not, a
fan. Its tokens are the likeliest, not drawn, so `verify` needs no q.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.attention import LayerInfo, attend_now, naive_attention
from minillm.model.config import ModelConfig
from minillm.model.decoder import Block, Decoder, make_norm
from minillm.model.rope import cos_sin, inverse_frequencies
from minillm.speculative.frequent import DraftHead
from minillm.speculative.heads import load_heads, read_facts
from minillm.speculative.proposer import NOTHING, Context, Draft
from minillm.speculative.tree import likeliest_nodes, subtree

WIDTH, NODES, DEPTH = 4, 12, 8


class EagleHead(nn.Module):
    """(features, embeddings of the tokens after them, positions) -> the next features, [..., hidden]. The target's
    head scores them, or `kept` rows of it: those of the token ids in `vocabulary` (see `frequent.py`)."""

    def __init__(self, config: ModelConfig, kept: int | None = None) -> None:
        super().__init__()
        self.register_buffer("vocabulary", None if kept is None else torch.arange(kept))
        self.config = config.with_changes(num_layers=1, windows=(), local_layers=())
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = Block(self.config, 0)
        self.norm = make_norm(config, config.hidden_size)

    def forward(self, features: Tensor, embedded: Tensor, positions: Tensor, attend=attend_now) -> Tensor:
        tables = None
        if self.config.positions == "rope":
            tables = cos_sin(positions, *inverse_frequencies(self.config, device=positions.device))
        x = self.fuse(torch.cat((embedded, features), dim=-1))  # [..., 2 hidden] -> [..., hidden]
        return self.norm(self.block(x, tables, attend))


@dataclass
class Place:
    """What the draft knows of one sequence: its row, pairs first .. done - 1 stored there, features after those."""

    row: int
    first: int = 0
    done: int = 0
    known: int = 0  # features so far: `done` and the waiting ones
    waiting: list[Tensor] = field(default_factory=list)  # [count, hidden] each: features done, done + 1, ...


class RowCache:
    """K and V of one layer, a row a sequence; each call says where it writes and what it sees."""

    def __init__(self, config: ModelConfig, rows: int, room: int, dtype: torch.dtype, device) -> None:
        shape = (rows, room, config.num_kv_heads, config.head_dim)
        self.k, self.v = (
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )

    def begin(self, rows: Tensor, places: Tensor, mask: Tensor) -> None:
        """rows [n]. places [n, time]: where the new ones go. mask [n, 1, time, length]: the first `length` places."""
        self.rows, self.places, self.mask = rows, places, mask

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, time, heads, dim], k and v [n, time, kv_heads, dim] -> [n, time, heads, dim]."""
        where, length = (self.rows[:, None], self.places), self.mask.shape[-1]
        self.k[where], self.v[where] = k, v
        keys, values = (x[self.rows, :length].transpose(1, 2) for x in (self.k, self.v))  # [n, kv_heads, length, dim]
        out = naive_attention(q.transpose(1, 2), keys, values, self.mask, layer.scale, layer.softcap)
        return out.transpose(1, 2)  # [n, time, heads, dim]


class Eagle:
    """Drafts for up to `sequences` sequences at once. tree False: chains, the likeliest token at each level."""

    wants_hidden = True

    def __init__(
        self,
        target: Decoder,
        head: EagleHead,
        sequences: int = 32,
        width: int = WIDTH,
        nodes: int = NODES,
        tree: bool = True,
    ) -> None:
        for name, value in (("sequences", sequences), ("width", width), ("nodes", nodes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParamsError(illegal(name, value, "must be a whole number of at least 1"))
        self.target, self.head = target, head
        self.score = DraftHead(target, head.vocabulary, packed=True)
        known = target.config.vocab_size if head.vocabulary is None else len(head.vocabulary)
        self.width, self.nodes = (min(width, known), nodes) if tree else (1, DEPTH)
        room = target.config.max_length + self.width * DEPTH + 1  # the last place takes what padding writes
        self.cache = RowCache(head.config, sequences, room, target.dtype, target.device)
        self.free, self.held, self.trash = list(range(sequences)), {}, room - 1

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        if key not in self.held:
            if not self.free:
                return  # no room: no drafts for this one
            self.held[key] = Place(self.free.pop(), start, start, start)
        place = self.held[key]
        if start > place.known:  # a prefix was not computed but found in a cache: begin behind it
            place.first = place.done = place.known = start
            place.waiting = []
        fresh = hidden[place.known - start :]  # after a preemption the same ones come again
        if len(fresh):
            place.waiting.append(fresh.clone())
            place.known += len(fresh)

    def release(self, key: Hashable) -> None:
        if key in self.held:
            self.free.append(self.held.pop(key).row)

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        drafts = [NOTHING] * len(contexts)
        able = [i for i, c in enumerate(contexts) if c.most > 0 and self._knows(c)]
        if able:
            chosen = [contexts[i] for i in able]
            features = self._catch_up(chosen)  # [n, hidden]
            for i, draft in zip(able, self._grow(chosen, features)):
                drafts[i] = draft
        return drafts

    def _knows(self, context: Context) -> bool:
        place = self.held.get(context.key)
        return place is not None and place.waiting != [] and place.known == len(context.tokens) - 1

    def _catch_up(self, contexts: Sequence[Context]) -> Tensor:
        """Store the pairs of what became of each sequence since its last draft -> its draft feature, [n, hidden]."""
        device = self.target.device
        places = [self.held[c.key] for c in contexts]
        counts = [p.known - p.done for p in places]
        most = max(counts)
        features = torch.zeros(
            len(places), most, self.target.config.hidden_size, dtype=self.target.dtype, device=device
        )
        tokens, where, seen = [], [], []
        for i, (context, p, count) in enumerate(zip(contexts, places, counts)):
            features[i, :count] = torch.cat(p.waiting)
            pad = most - count
            tokens.append([*context.tokens[p.done + 1 : p.known + 1], *[0] * pad])
            where.append([*range(p.done, p.known), *[self.trash] * pad])
            seen.append([*range(p.done, p.known), *[p.known - 1] * pad])  # the last pair that each may look at
            p.done, p.waiting = p.known, []
        tokens, where, seen = (torch.tensor(x, device=device) for x in (tokens, where, seen))  # [n, most]
        first = torch.tensor([p.first for p in places], device=device)[:, None, None]  # [n, 1, 1]
        key = torch.arange(max(p.done for p in places), device=device)  # [length]
        mask = (key >= first) & (key <= seen[:, :, None])  # [n, most, length]
        rows = torch.tensor([p.row for p in places], device=device)
        said = self._forward(features, tokens, seen, rows, where, mask)  # [n, most, hidden]
        return said[torch.arange(len(places), device=device), torch.tensor(counts, device=device) - 1]

    def _forward(self, features, tokens, positions, rows, where, mask) -> Tensor:
        self.cache.begin(rows, where, mask[:, None])
        return self.head(features, self.target.embed(tokens), positions, self.cache.attend)

    def _grow(self, contexts: Sequence[Context], features: Tensor) -> list[Draft]:
        """Level by level -> the likeliest nodes of each. features [n, hidden]: what stands above the first level."""
        n, width, device = len(contexts), self.width, features.device
        places = [self.held[c.key] for c in contexts]
        rows, done, first = (
            torch.tensor([getattr(p, x) for p in places], device=device) for x in ("row", "done", "first")
        )
        limit = torch.tensor([min(c.most, DEPTH) for c in contexts], device=device)[:, None]  # [n, 1]
        deepest = int(limit.max())
        value, token = self._likeliest(features)  # [n, width] each; value: log-probability of the path
        parent = torch.full_like(token, -1)
        found = [(token, parent, value)]  # nodes, level by level
        node = torch.arange(width, device=device).expand(n, width)  # numbers of the frontier's nodes
        above = features[:, None].expand(n, width, -1)  # [n, width, hidden]: each frontier node's parent feature
        ancestry = torch.zeros(n, width, width * deepest, dtype=torch.bool, device=device)
        count, key = width, torch.arange(int(done.max()) + width * (deepest - 1), device=device)  # [length]
        for depth in range(1, deepest):
            at = (depth - 1) * width + torch.arange(width, device=device)  # place of each, behind the stored pairs
            ancestry[:, torch.arange(width, device=device), at] = True
            offset = (key - done[:, None]).clamp(0, ancestry.shape[-1] - 1)[:, None].expand(n, width, -1)
            stored = (key >= first[:, None]) & (key < done[:, None])  # [n, length]
            mask = stored[:, None] | (
                ancestry.gather(2, offset) & (key >= done[:, None])[:, None]
            )  # [n, width, length]
            positions = (done + depth - 1)[:, None].expand(n, width)
            said = self._forward(above, token, positions, rows, done[:, None] + at, mask)  # [n, width, hidden]
            more, tokens = self._likeliest(said)  # [n, width, width] each
            values = (value[:, :, None] + more).flatten(1)  # [n, width^2]
            tokens, parents = tokens.flatten(1), node.repeat_interleave(width, 1)
            found.append((tokens, parents, values.masked_fill(depth + 1 > limit, float("-inf"))))
            value, best = values.topk(width)  # [n, width]: the next frontier
            token, node, source = tokens.gather(1, best), count + best, best // width
            above = said.gather(1, source[:, :, None].expand(-1, -1, said.shape[-1]))
            ancestry = ancestry.gather(1, source[:, :, None].expand(-1, -1, ancestry.shape[-1]))
            count += width * width
        tokens, parents, values = (torch.cat(x, 1) for x in zip(*found))  # [n, all nodes]
        kept = [likeliest_nodes(row, self.nodes) for row in values]
        return [subtree(t, p, k) for t, p, k in zip(tokens.tolist(), parents.tolist(), kept)]

    def _likeliest(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probabilities, tokens) of the `width` likeliest, each [..., width]; below 0, so that a path that goes
        on is always less likely than the path it comes from."""
        top, places = self.score(features).float().log_softmax(-1).topk(self.width)
        return top.clamp(max=-1e-5), self.score.ids(places)


def make(options, name: str, target: Decoder, sequences: int) -> Eagle:
    """The layer that was trained for model `name`, on `target`, which was loaded by that name."""
    kept = read_facts(name, "eagle", options.heads).get("kept")
    head = load_heads(EagleHead(target.config, kept), name, "eagle", options.heads)
    head = head.to(target.device, target.dtype)
    return Eagle(target, head, sequences, tree=options.tree)
