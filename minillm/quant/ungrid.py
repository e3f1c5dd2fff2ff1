"""Take a model's weights off the grid that they were rounded to before, without changing what it computes.

Chapter 11. A file that was stored in 4 bits and dequantised looks like floating point, but each group of a row holds
16 different numbers at the most: rounding it to 4 bits again, with the same groups, costs nothing, and a benchmark on
it shows a method without damage. The honest baseline is the original in 16 bits. Where only the rounded file is at
hand, the function can be kept and the grid broken, by moves that floating point undoes exactly or nearly so:

    norm gains      (x * g) @ W.T  =  x @ (W * g).T           into the linears behind the norm; the gain becomes 1
    values          row r of V times a, columns r of O by 1/a  for each KV head's channel and the heads that share it
    up, down        row r of up times a, column r of down by 1/a

The factors a differ from channel to channel, so a group of 32 neighbours in a row of O or down no longer shares a
grid; g does the same for the others. What is measured then is a different file than the original: its function is the
same, its distribution of weights only similar. Say so wherever a figure of it is shown.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillm.errors import ParamsError
from minillm.model.decoder import Block, Decoder


@torch.no_grad()
def ungrid(model: Decoder, spread: float = 0.5, seed: int = 0) -> Decoder:
    """Fold and rescale in place. spread: log2 of the factors is uniform in -spread .. spread. Llama type only."""
    config = model.config
    linears = [
        m for block in model.layers for m in (block.attn.qkv, block.attn.out, block.mlp.gate_up, block.mlp.down)
    ]
    biased = config.qkv_bias or config.mlp_bias
    if config.norm_kind != "rms" or not config.gated_mlp or biased or not all(type(m) is nn.Linear for m in linears):
        raise ParamsError(
            "ungrid folds models of the Llama type: RMS norms, a gated MLP, plain linears without biases"
        )
    generator = torch.Generator().manual_seed(seed)
    for block in model.layers:
        fold(block.attn_norm, block.attn.qkv)
        fold(block.mlp_norm, block.mlp.gate_up)
        rescale_values(block, spread, generator)
        rescale_up(block, spread, generator)
    if not config.tie_embeddings:  # a tied head is the embedding too, which no norm stands before
        fold(model.norm, model.head)
    return model


def fold(norm: nn.Module, linear: nn.Linear) -> None:
    """The norm's gain into the columns behind it."""
    linear.weight.mul_(norm.weight)
    norm.weight.fill_(1.0)


def rescale_values(block: Block, spread: float, generator: torch.Generator) -> None:
    """Rows of V against columns of O; in a group of query heads each reads the same V."""
    attn = block.attn
    heads, kv_heads, dim = attn.heads, attn.kv_heads, attn.head_dim
    a = factors(kv_heads * dim, spread, generator, attn.out.weight)  # [kv_heads * dim]
    attn.qkv.weight[(heads + kv_heads) * dim :].mul_(a[:, None])
    shared = a.view(kv_heads, 1, dim).expand(
        kv_heads, heads // kv_heads, dim
    )  # query head h reads KV head h // group
    attn.out.weight.div_(shared.reshape(-1))


def rescale_up(block: Block, spread: float, generator: torch.Generator) -> None:
    rows = block.mlp.down.in_features
    a = factors(rows, spread, generator, block.mlp.down.weight)
    block.mlp.gate_up.weight[rows:].mul_(a[:, None])  # the gate goes through the activation: it stays
    block.mlp.down.weight.div_(a)


def factors(count: int, spread: float, generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.exp2((2 * torch.rand(count, generator=generator) - 1) * spread).to(like)


def distinct_in_groups(weight: Tensor, size: int = 32) -> float:
    """Mean count of different numbers in a group of `size` neighbours: at most 16 on a 4-bit grid."""
    groups = weight.detach().reshape(-1, size).sort(-1).values
    return ((groups[:, 1:] != groups[:, :-1]).sum(-1) + 1).float().mean().item()
