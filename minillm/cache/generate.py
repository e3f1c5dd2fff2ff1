"""Generation with a cache is two workloads: prefill reads the prompt at once, decode adds one token at a time.

Chapter 02. Prefill multiplies matrices by matrices and is bound by arithmetic; decode multiplies them by vectors and
is bound by reading the weights. Both are one forward through the same decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minillm.cache.contiguous import ContiguousCache
from minillm.errors import PromptError
from minillm.model.decoder import Decoder, KVCache
from minillm.model.generate import check_count, check_prompt, greedy


@torch.inference_mode()
def prefill(model: Decoder, tokens: Tensor, cache: KVCache) -> Tensor:
    """tokens [batch, time] -> logits of the last token [batch, vocab]. The head runs on one token a row only."""
    return model.logits(model.hidden(tokens, cache=cache)[:, -1])


@torch.inference_mode()
def decode(model: Decoder, tokens: Tensor, cache: KVCache) -> Tensor:
    """One new token a row, tokens [batch] -> logits [batch, vocab]."""
    return model.logits(model.hidden(tokens[:, None], cache=cache)[:, -1])


def cached_tokens(
    model: Decoder,
    prompt: Sequence[int],
    max_tokens: int,
    choose: Callable[[Tensor], Tensor] = greedy,
    cache: KVCache | None = None,
) -> Iterator[int]:
    """The tokens of `naive_tokens`, with one row of work a step. cache: empty; by default as long as is needed."""
    check_prompt(prompt, model.config)
    check_count(max_tokens)
    steps = min(max_tokens, model.config.max_length + 1 - len(prompt))
    if cache is None:
        cache = ContiguousCache(model.config, 1, len(prompt) + steps, model.dtype, model.device)
    elif cache.length:
        raise PromptError(
            f"cache holds {cache.length} tokens: it must be empty, for the prompt is read from its start"
        )
    logits = prefill(model, torch.tensor([prompt], device=model.device), cache)  # [1, vocab]
    for step in range(steps):
        token = choose(logits)  # [1]
        yield token.item()
        if step + 1 < steps:
            logits = decode(model, token, cache)


def generate_cached(
    model: Decoder,
    prompt: Sequence[int],
    max_tokens: int,
    choose: Callable[[Tensor], Tensor] = greedy,
    cache: KVCache | None = None,
) -> list[int]:
    """All the tokens of `cached_tokens`."""
    return list(cached_tokens(model, prompt, max_tokens, choose, cache))
