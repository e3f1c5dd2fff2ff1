"""A head for drafts: the target's own, cut to the tokens that its texts are made of.

Chapter 17. FR-Spec, Zhao et al. 2025 (arXiv:2502.14856). A draft reads the target's head at every guess. At a
vocabulary of 49152 and a width of 576 that is a fifth of the target's weights, for rows of which most are never the
answer. Kept are the rows of the most frequent tokens. What is left out cannot be drafted, so it costs acceptance and
nothing else: `verify` looks at the target's own distribution over all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillm.errors import WeightsError
from minillm.model.decoder import Decoder
from minillm.model.layout import faster_linear

AT_ONCE = 64  # unit vectors that a head without plain weights is asked for at one time


def head_rows(head: nn.Module, vocabulary: Tensor, hidden: int, dtype: torch.dtype, device) -> Tensor:
    """The head's rows for these ids, [kept, hidden]. A packed or quantised head is asked what it does to the unit
    vectors: its answers are the columns."""
    if isinstance(head, nn.Linear):
        return head.weight.detach()[vocabulary]
    units = torch.eye(hidden, dtype=dtype, device=device).split(AT_ONCE)
    with torch.inference_mode():
        columns = [head(part)[:, vocabulary] for part in units]  # [AT_ONCE, kept] each
    return torch.cat(columns).T.contiguous().clone()  # [kept, hidden]


class DraftHead:
    """hidden [..., hidden size] -> logits [..., kept]. vocabulary: sorted token ids [kept]; None: the whole head.

    packed: rows are laid out for speed, as the target's are; such a head passes no gradient back.
    """

    def __init__(self, target: Decoder, vocabulary: Tensor | None = None, packed: bool = False) -> None:
        self.target, self.vocabulary, self.linear = target, None, None
        if vocabulary is None:
            return
        config = target.config
        if len(vocabulary) and not 0 <= int(vocabulary.min()) <= int(vocabulary.max()) < config.vocab_size:
            raise WeightsError(
                f"the heads' vocabulary holds token id {int(vocabulary.max())}; the target knows {config.vocab_size}"
            )
        self.vocabulary = vocabulary.to(target.device)
        rows = head_rows(target.head, self.vocabulary, config.hidden_size, target.dtype, target.device)
        self.linear = nn.Linear(config.hidden_size, len(rows), bias=False, device="meta")
        self.linear.weight = nn.Parameter(rows, requires_grad=False)
        if packed:
            self.linear = faster_linear(self.linear) or self.linear

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.linear is None:
            return self.target.logits(hidden)
        scores, cap = self.linear(hidden), self.target.config.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def ids(self, indices: Tensor) -> Tensor:
        """Token ids of places among the logits."""
        return indices if self.vocabulary is None else self.vocabulary[indices]
