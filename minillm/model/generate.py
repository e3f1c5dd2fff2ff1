"""The naive loop: run the whole text through the model for every new token.

Chapter 01. It is the definition that every later technique must reproduce token for token, and the slowest thing in
the course: token n costs a forward over n tokens, so a text of n tokens costs O(n^2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minillm.errors import ParamsError, PromptError, illegal
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder


def greedy(logits: Tensor) -> Tensor:
    """[..., vocab] -> [...]: the likeliest token; of equals, the lowest id."""
    return logits.argmax(-1)


def check_prompt(tokens: Sequence[int], config: ModelConfig, name: str = "prompt") -> None:
    """Raise PromptError unless the tokens are a legal prompt of the model."""
    if len(tokens) == 0:
        raise PromptError(f"{name} is empty: it must hold at least one token")
    if len(tokens) > config.max_length:
        raise PromptError(
            f"{name} has {len(tokens)} tokens: the context is {config.max_length}, prompt and answer together"
        )
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
            raise PromptError(illegal(f"{name} token id", token, f"must be in 0 .. {config.vocab_size - 1}"))


def check_count(max_tokens: int) -> None:
    """Raise ParamsError unless max_tokens is a whole number of at least 0."""
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 0:
        raise ParamsError(illegal("max_tokens", max_tokens, "must be a whole number of at least 0"))


@torch.inference_mode()
def naive_tokens(
    model: Decoder, prompt: Sequence[int], max_tokens: int, choose: Callable[[Tensor], Tensor] = greedy
) -> Iterator[int]:
    """New token ids one by one, without any cache. Ends early only at the model's context."""
    check_prompt(prompt, model.config)
    check_count(max_tokens)
    tokens = torch.tensor([prompt], device=model.device)  # [1, time]
    for _ in range(min(max_tokens, model.config.max_length + 1 - len(prompt))):
        hidden = model.hidden(tokens)  # [1, time, hidden]
        token = choose(model.logits(hidden[:, -1]))  # [1]
        tokens = torch.cat((tokens, token[:, None]), dim=1)
        yield token.item()


def generate_naive(
    model: Decoder, prompt: Sequence[int], max_tokens: int, choose: Callable[[Tensor], Tensor] = greedy
) -> list[int]:
    """All the tokens of `naive_tokens`."""
    return list(naive_tokens(model, prompt, max_tokens, choose))
