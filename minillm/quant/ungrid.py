"""Take a model's weights off the grid that they were rounded to before, without changing what it computes.

Chapter 11. A file that was stored in 4 bits and dequantised looks like floating point, but each group of a row holds
16 different numbers at the most: rounding it to 4 bits again, with the same groups, costs nothing, and a benchmark on
it shows a method without damage. The honest baseline is the original in 16 bits. Where only the rounded file is at
hand, the function can be kept and the grid broken, by moves that floating point undoes exactly or nearly so:

    norm, linear    gain of channel c times 1/a, column c of the linears behind the norm times a
    values          row r of V times a, columns r of O times 1/a, for each head that reads this channel
    up, down        row r of up times a, column r of down times 1/a

The factors a are drawn anew for every channel, so neighbours in a row no longer share a grid. They are mild, within
2^-1/4 .. 2^1/4: a wide spread, or the whole gain of a norm moved into the linear, would make rows harder to quantise
than the original's. What is measured is still another file than the original: its function is the same, its weights
are only distributed like it. Say so wherever a figure of it is shown.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillm.errors import ParamsError
from minillm.model.decoder import Block, Decoder


@torch.no_grad()
def ungrid(model: Decoder, spread: float = 0.25, seed: int = 0) -> Decoder:
    """Rescale in place. spread: log2 of the factors is uniform in -spread .. spread. Llama type only."""
    config = model.config
    linears = [
        m for block in model.layers for m in (block.attn.qkv, block.attn.out, block.mlp.gate_up, block.mlp.down)
    ]
    biased = config.qkv_bias or config.mlp_bias
    if config.norm_kind != "rms" or not config.gated_mlp or biased or not all(type(m) is nn.Linear for m in linears):
        raise ParamsError(
            "ungrid rescales models of the Llama type: RMS norms, a gated MLP, plain linears without biases"
        )
    generator = torch.Generator().manual_seed(seed)
    for block in model.layers:
        rescale_norm(block.attn_norm, block.attn.qkv, spread, generator)
        rescale_norm(block.mlp_norm, block.mlp.gate_up, spread, generator)
        rescale_values(block, spread, generator)
        rescale_up(block, spread, generator)
    if not config.tie_embeddings:  # a tied head is the embedding too, which no norm stands before
        rescale_norm(model.norm, model.head, spread, generator)
    return model


def rescale_norm(norm: nn.Module, linear: nn.Linear, spread: float, generator: torch.Generator) -> None:
    """Columns of the linear against the norm's gains."""
    a = factors(linear.in_features, spread, generator, linear.weight)
    linear.weight.mul_(a)
    norm.weight.div_(a)


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
