"""Medusa: a few more heads on the target's last hidden state, each guessing one token further ahead.

Chapter 17. Cai et al. 2024 (arXiv:2401.10774). The target's own head says token t + 1 from the hidden state at t;
head d says token t + 1 + d from the same state: h + SiLU(W_d h), then the target's head (the paper gives each its own
copy of that matrix; sharing it keeps the heads small). All guesses come from one state, without knowing one another:
"t + 2 is 'of' or 'the'" and "t + 3 is 'the' or 'house'" combine into a tree of paths, and one forward of the target
over the tree finds the path that is right.

With `verify` as it is, the distribution is the target's own, greedy or sampled. `typical` is Medusa's other rule:
it keeps more, and CHANGES THE DISTRIBUTION of what is sampled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder
from minillm.model.sampling import SamplingState
from minillm.model.sampling_steps import draw
from minillm.speculative.frequent import DraftHead
from minillm.speculative.heads import load_heads, read_facts
from minillm.speculative.proposer import NOTHING, Context, Draft
from minillm.speculative.tree import Shape, best_shape
from minillm.speculative.verify import Walk

HEADS = 4
NODES = 12  # of a draft tree


class MedusaHeads(nn.Module):
    """h [..., hidden] -> [..., heads, hidden], to be scored by the target's head, or by `kept` rows of it: those of
    the token ids in `vocabulary` (see `frequent.py`)."""

    def __init__(self, hidden: int, heads: int = HEADS, kept: int | None = None) -> None:
        super().__init__()
        self.register_buffer("vocabulary", None if kept is None else torch.arange(kept))
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(heads))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # at first every head says what the target's own says
            nn.init.zeros_(layer.bias)

    def forward(self, h: Tensor) -> Tensor:
        return torch.stack([h + F.silu(layer(h)) for layer in self.layers], dim=-2)


class Medusa:
    """target: whose head scores. accuracy[d - 1][rank]: how often head d's guess of that rank is right; it shapes the
    tree. tree False: chains of each head's likeliest guess. nodes: of a tree."""

    wants_hidden = True

    def __init__(
        self,
        target: Decoder,
        heads: MedusaHeads,
        accuracy: Sequence[Sequence[float]],
        nodes: int = NODES,
        tree: bool = True,
    ) -> None:
        if len(accuracy) != len(heads.layers):
            raise ParamsError(illegal("accuracy", accuracy, f"must have a row for each of {len(heads.layers)} heads"))
        rows = [list(row) if tree else list(row[:1]) for row in accuracy]
        self.heads, self.width = heads, max(map(len, rows))
        self.score = DraftHead(target, heads.vocabulary, packed=True)
        self.shapes: list[Shape] = [best_shape(rows[:depth], nodes) for depth in range(1, len(rows) + 1)]
        self.last: dict[Hashable, tuple[int, Tensor]] = {}  # place of the last computed token, its state [hidden]

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        known = [i for i, c in enumerate(contexts) if c.most > 0 and self._knows(c)]
        drafts = [NOTHING] * len(contexts)
        if not known:
            return drafts
        h = torch.stack([self.last[contexts[i].key][1] for i in known])  # [known, hidden]
        guesses = self.score(self.heads(h)).topk(self.width).indices  # [known, heads, width]
        for i, guessed in zip(known, self.score.ids(guesses).tolist()):
            shape = self.shapes[min(contexts[i].most, len(self.shapes)) - 1]
            drafts[i] = shape.fill(guessed)
        return drafts

    def _knows(self, context: Context) -> bool:
        """Whether the state of the last computed token is here: not so after a fork, until its first own step."""
        place, _ = self.last.get(context.key, (None, None))
        return place == len(context.tokens) - 2

    def observe(self, key: Hashable, start: int, hidden: Tensor) -> None:
        self.last[key] = (start + len(hidden) - 1, hidden[-1].clone())

    def release(self, key: Hashable) -> None:
        self.last.pop(key, None)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Walk:
    """Typical acceptance, section 3.3.1 of the paper: keep x where p(x) > min(epsilon, delta exp(-H(p))), and of the
    draft the longest such path. No dice: a token that is likely enough is kept whether it would have been drawn or
    not. This CHANGES THE DISTRIBUTION: likely tokens that were drafted come out too often."""
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value <= 1:
            raise ParamsError(illegal(name, value, "must be above 0 and at most 1"))

    def walk(p: Tensor, draft: Draft, state: SamplingState) -> tuple[list[int], int]:
        entropy = torch.special.entr(p).sum(-1)  # [1 + nodes]
        least = torch.clamp(delta * torch.exp(-entropy), max=epsilon)  # [1 + nodes]
        best, path = (0, 0.0), -1
        reached: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # (tokens, log-probability) down to a kept node
        for node, token in enumerate(draft.tokens):
            parent = draft.parent(node)
            chance = p[parent + 1, token]
            if parent in reached and chance > least[parent + 1]:
                length, total = reached[parent]
                reached[node] = (length + 1, total + float(chance.log()))
                if reached[node] > best:
                    best, path = reached[node], node
        accepted = draft.path(path)
        uniform = torch.tensor([state.stream.random()], dtype=torch.float64, device=p.device)
        return accepted, int(draw(p[path + 1][None], uniform)[0])

    return walk


def make(options, name: str, target: Decoder, sequences: int) -> Medusa:
    """The heads that were trained for model `name`, on `target`, which was loaded by that name."""
    facts = read_facts(name, "medusa", options.heads)
    heads = MedusaHeads(target.config.hidden_size, len(facts["accuracy"]), facts.get("kept"))
    load_heads(heads, name, "medusa", options.heads).to(target.device, target.dtype)
    return Medusa(target, heads, facts["accuracy"], tree=options.tree)
