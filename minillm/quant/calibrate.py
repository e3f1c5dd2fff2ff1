"""Calibration: what the inputs of each linear look like, gathered by hooks while the model reads a text.

Chapter 12. GPTQ (arXiv:2210.17323) needs H = E[x x^T] of a linear's inputs x, up to a factor 2 the Hessian of its
squared output error; AWQ (arXiv:2306.00978) needs E|x| of each channel. Both are means over tokens, so no activation
is kept: a linear costs in_features^2 + in_features floats, however long the text is.

`walk` visits the decoder block by block and computes the next block's inputs only after the caller has changed this
one: GPTQ's later blocks see the errors of the earlier ones, and may make up for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from minillm.errors import PromptError, illegal
from minillm.model.attention import attend_now
from minillm.model.decoder import Decoder
from minillm.quant.linear import linears


@dataclass
class InputStats:
    """Running moments of a linear's inputs. hessian: E[x x^T], [in, in]; mean_abs: E|x|, [in]; count: tokens seen."""

    hessian: Tensor
    mean_abs: Tensor
    count: int = 0

    @classmethod
    def empty(cls, size: int, device: torch.device | str = "cpu") -> InputStats:
        return cls(torch.zeros(size, size, device=device), torch.zeros(size, device=device))

    def add(self, x: Tensor) -> None:
        """x [..., in]: more tokens."""
        x = x.detach().flatten(0, -2).float()  # [tokens, in]
        self.count += len(x)
        share = len(x) / self.count
        self.hessian += (x.T @ x / len(x) - self.hessian) * share
        self.mean_abs += (x.abs().mean(0) - self.mean_abs) * share

    def rescaled(self, scale: Tensor) -> InputStats:
        """The moments of x / scale, scale [in]: what is seen after a scale has been folded into the layer before."""
        return InputStats(self.hessian / torch.outer(scale, scale), self.mean_abs / scale, self.count)


def output_error(change: Tensor, hessian: Tensor) -> float:
    """E|change @ x|^2, the mean squared output error a token of a weight change [out, in]: tr(change H change^T)."""
    return ((change.float() @ hessian) * change).sum(dtype=torch.float64).item()


def gather(layers: dict[str, nn.Linear], run: Callable[[], object]) -> dict[str, InputStats]:
    """Call run() and gather the inputs of these linears while it runs."""
    stats = {name: InputStats.empty(layer.in_features, layer.weight.device) for name, layer in layers.items()}

    def hook(name: str) -> Callable:
        return lambda module, args: stats[name].add(args[0])

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return stats


@torch.no_grad()
def collect(
    model: Decoder, tokens: Tensor, keep: tuple[str, ...] = ("head",), batch: int = 4
) -> dict[str, InputStats]:
    """Moments of every linear's inputs at once, in the model as it is. tokens [samples, length]; keep: as in
    `quantize_model`."""
    tokens = calibration_tokens(model, tokens)
    return gather(linears(model, keep), lambda: [model.hidden(part) for part in tokens.split(batch)])


def calibration_tokens(model: Decoder, tokens: Tensor) -> Tensor:
    """Ids [samples, length] where the model is, or one clear error."""
    found = torch.as_tensor(tokens, device=model.device)
    if found.dim() != 2 or not found.numel() or found.is_floating_point():
        raise PromptError(illegal("tokens", tuple(found.shape), "must be whole numbers [samples, length]"))
    if found.shape[1] > model.config.max_length:
        raise PromptError(illegal("tokens", tuple(found.shape), f"rows of at most {model.config.max_length} tokens"))
    if int(found.min()) < 0 or int(found.max()) >= model.config.vocab_size:
        raise PromptError(illegal("tokens", "ids", f"must lie in 0 .. {model.config.vocab_size - 1}"))
    return found.long()


@dataclass
class Stop(Exception):
    """Carries the first block's input out of a forward pass that is not wanted any further."""

    x: Tensor = field(repr=False)


def first_input(model: Decoder, tokens: Tensor) -> Tensor:
    """What the decoder hands to its first block, [batch, time, hidden]."""

    def stop(block: nn.Module, args: tuple) -> None:
        raise Stop(args[0])

    handle = model.layers[0].register_forward_pre_hook(stop)
    try:
        model.hidden(tokens)
    except Stop as caught:
        return caught.x
    finally:
        handle.remove()
    raise AssertionError("the decoder did not call its first block")


@torch.no_grad()
def walk(model: Decoder, tokens: Tensor, batch: int = 4) -> Iterator[tuple[str, nn.Module, Callable[[], None]]]:
    """(name, block, run) of each block in order; run() sends the calibration text through this block.

    Change the block, then ask for the next: its inputs are the outputs of this one as it is then.
    """
    tokens = calibration_tokens(model, tokens)
    states = [first_input(model, part) for part in tokens.split(batch)]  # [batch, time, hidden] each
    tables = []
    for x in states:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        tables.append(model.rope_tables(positions))
    for index, block in enumerate(model.layers):
        yield f"layers.{index}", block, partial(through, block, states, tables)
        if index + 1 < len(model.layers):  # nobody reads the last block's outputs
            states = through(block, states, tables)


def through(block: nn.Module, states: list[Tensor], tables: list[tuple]) -> list[Tensor]:
    """One block over all batches, without a cache. tables: (global, local) rotary tables a batch."""
    return [block(x, both[block.local], attend_now) for x, both in zip(states, tables)]
