"""AWQ: scale up the weight columns that meet large activations, before rounding; scale those activations down.

Chapter 12. Lin et al. 2023 (arXiv:2306.00978). For any s > 0 a channel, W x = (W diag(s)) (x / s): nothing changes
until W diag(s) is rounded. Then a column with s_j > 1 keeps more of its precision, as long as it does not set the
range of its group. The division by s is folded into the layer that makes x, so it costs nothing at run time:

    s goes into the columns of    and is divided out of
    attn.qkv                      attn_norm's gain (and bias)
    attn.out                      V's rows of attn.qkv; query heads that share a KV head share s
    mlp.gate_up                   mlp_norm's gain (and bias)
    mlp.down                      up's rows of mlp.gate_up (gated MLPs: no other activation lets a scale through)

s = E|x|^alpha, one alpha a linear, from a grid: alpha = 0 is RTN, alpha = 1 makes all channels equally large. Then a
second grid clips the range of each group of weights. Both minimise E|(W - Q) x|^2 of the one linear, from the moments
that GPTQ uses; the authors' code compares the outputs of whole modules for the first grid, at more cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Block, Decoder
from minillm.quant.affine import Quantized, Scheme, round_to, to_blocks
from minillm.quant.calibrate import InputStats, gather, output_error, walk
from minillm.quant.gptq import LayerResult
from minillm.quant.linear import linears, stored_parameters


@dataclass
class AWQResult(LayerResult):
    """`LayerResult`, the alpha that was chosen, and the scale [in] that went into the weight's columns."""

    alpha: float = 0.0
    scale: Tensor | None = None


def nearest(weight: Tensor, scheme: Scheme) -> Quantized:
    """weight [out, in], rounded to the nearest under scales as they are stored."""
    blocks = to_blocks(weight.float(), scheme)  # [out, blocks, size]
    scale, zero = stored_parameters(blocks, scheme)
    return Quantized(round_to(blocks, scale, zero, scheme).view(weight.shape), scale, zero, scheme)


def scale_of(mean_abs: Tensor, alpha: float) -> Tensor:
    """E|x|^alpha a channel, its largest and smallest value as far above 1 as below. [in]."""
    s = mean_abs.clamp(min=1e-4 * mean_abs.max().clamp(min=1e-30)) ** alpha
    return s / (s.max() * s.min()).sqrt()


def search_scale(
    weight: Tensor, stats: InputStats, scheme: Scheme, grid: int = 20, shared: int = 1, dim: int = 1
) -> tuple[float, Tensor, list[float]]:
    """(best alpha, its scale [in], the error of each alpha = 0, 1/grid, .. 1), each E|(W - Q) x|^2.

    shared: neighbouring heads of `dim` channels that must have the same scale.
    """
    if not isinstance(grid, int) or grid < 1:
        raise ParamsError(illegal("grid", grid, "must be a whole number of at least 1 step"))
    weight, errors, scales = weight.float(), [], []
    mean_abs = stats.mean_abs.view(-1, shared, dim).mean(1, keepdim=True).expand(-1, shared, -1).reshape(-1)  # [in]
    for step in range(grid + 1):
        s = scale_of(mean_abs, step / grid)
        rounded = nearest(weight * s, scheme).dequantize() / s
        errors.append(output_error(weight - rounded, stats.hessian))
        scales.append(s)
    best = min(range(grid + 1), key=errors.__getitem__)
    return best / grid, scales[best], errors


def search_clip(weight: Tensor, hessian: Tensor, scheme: Scheme, steps: int = 10, lowest: float = 0.5) -> Tensor:
    """The weight with each block's outliers clipped to the share of its range, from 1 down, that errs least.

    Blocks are judged one by one, on their own channels' part of H: what two blocks' errors do together is left out.
    """
    blocks = to_blocks(weight.float(), scheme)  # [out, blocks, size]
    out, count, size = blocks.shape
    parts = torch.stack([hessian[i : i + size, i : i + size] for i in range(0, count * size, size)])  # [blocks, ...]
    best, least = blocks, torch.full((out, count), float("inf"), device=blocks.device)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)  # [out, blocks, 1]
    for step in range(steps):
        share = 1 - (1 - lowest) * step / steps
        clipped = blocks.clamp(low * share, high * share)
        change = blocks - to_blocks(nearest(clipped.view(weight.shape), scheme).dequantize(), scheme)
        error = torch.einsum("obi,bij,obj->ob", change, parts, change)
        better = error < least
        best = torch.where(better[..., None], clipped, best)
        least = torch.where(better, error, least)
    return best.view(weight.shape)


@dataclass(frozen=True)
class Fold:
    """Where a scale goes: into the columns of `linear`, out of the gain of a norm or out of rows of a linear.

    start: first of these rows. shared: neighbouring heads of `dim` channels each that have one scale.
    """

    linear: str
    before: str
    start: int = 0
    shared: int = 1
    dim: int = 1

    def rows(self, s: Tensor) -> Tensor:
        """The scale [in] as the layer before has it: one entry for heads that share a KV head."""
        return s.view(-1, self.shared, self.dim)[:, 0].reshape(-1)

    def apply(self, block: Block, s: Tensor) -> None:
        """Multiply the columns, divide what makes their inputs. In place."""
        weight, before = block.get_submodule(self.linear).weight, block.get_submodule(self.before)
        weight.mul_(s.to(weight.dtype))
        for part in (before.weight, getattr(before, "bias", None)):
            if part is not None:
                rows = self.rows(s).to(part.dtype)
                part[self.start :].div_(rows if part.dim() == 1 else rows[:, None])


def folds(block: Block) -> list[Fold]:
    """Those of the docstring's table that this block allows."""
    attn, mlp = block.attn, block.mlp
    values = (attn.heads + attn.kv_heads) * attn.head_dim  # V's first row in qkv
    found = [
        Fold("attn.qkv", "attn_norm"),
        Fold("attn.out", "attn.qkv", values, attn.heads // attn.kv_heads, attn.head_dim),
        Fold("mlp.gate_up", "mlp_norm"),
    ]
    return [*found, Fold("mlp.down", "mlp.gate_up", mlp.gate_up.out_features // 2)] if mlp.gated else found


@torch.no_grad()
def awq_model(
    model: Decoder,
    tokens: Tensor,
    scheme: Scheme,
    *,
    clip: bool = True,
    grid: int = 20,
    keep: tuple[str, ...] = ("head",),
    batch: int = 4,
    rounding: bool = True,
    stats: dict[str, InputStats] | None = None,
) -> dict[str, AWQResult]:
    """Fold scales into the model and quantise every linear but those in `keep`, in place. tokens [samples, length].

    The moments are those of the model as it was, as in the paper: no linear sees the errors of another.
    rounding=False: fold the scales and stop, which changes nothing that the model computes. stats: these moments, if
    `collect(model, tokens)` has them already, for several schemes say: then nothing is run.
    """
    chosen, results = linears(model, keep), {}
    known = ((f"layers.{index}", block, None) for index, block in enumerate(model.layers))
    for name, block, run in walk(model, tokens, batch) if stats is None else known:
        layers = {full: layer for full, layer in chosen.items() if full.startswith(f"{name}.")}
        seen = gather(layers, run) if stats is None else {full: stats[full] for full in layers}
        results |= awq_block(name, block, layers, seen, scheme, grid, clip)
    if rounding:  # at the end: until then every block has seen the inputs of the unrounded model
        for full, result in results.items():
            chosen[full].weight.copy_(result.quantized.dequantize())
    return results


def awq_block(
    name: str,
    block: Block,
    layers: dict[str, nn.Linear],
    stats: dict[str, InputStats],
    scheme: Scheme,
    grid: int,
    clip: bool,
) -> dict[str, AWQResult]:
    """Choose all scales on the weights as they are, fold them in, then clip and round what came out."""
    whole = {full: layer.weight.float().clone() for full, layer in layers.items()}
    alphas = dict.fromkeys(layers, 0.0)
    columns = {full: torch.ones_like(seen.mean_abs) for full, seen in stats.items()}
    rows = {full: torch.ones_like(weight[:, 0]) for full, weight in whole.items()}  # what folds divided rows by
    for fold in folds(block):
        full, before = f"{name}.{fold.linear}", f"{name}.{fold.before}"
        if full in layers:
            found = search_scale(whole[full], stats[full], scheme, grid, fold.shared, fold.dim)
            alphas[full], columns[full] = found[:2]
            fold.apply(block, columns[full])
            if before in rows:
                rows[before][fold.start :] = fold.rows(columns[full])
    results = {}
    for full, layer in layers.items():
        weight, hessian = layer.weight.float(), stats[full].hessian
        if clip:
            clipped = search_clip(weight, stats[full].rescaled(columns[full]).hessian, scheme)
            # Not the rows of q and k, as the authors' code does: their errors multiply each other in q @ k.
            first = clip_from(block) if full.endswith("attn.qkv") else 0
            weight = torch.cat((weight[:first], clipped[first:]))
        q = nearest(weight, scheme)
        effective = q.dequantize() * rows[full][:, None] / columns[full]  # as if nothing had been folded
        power = max(output_error(whole[full], hessian), 1e-30)
        changes = (whole[full] - effective, whole[full] - nearest(whole[full], scheme).dequantize())
        errors = [output_error(change, hessian) / power for change in changes]
        results[full] = AWQResult(q, *errors, alphas[full], columns[full])
    return results


def clip_from(block: Block) -> int:
    """The first row of qkv that may be clipped: V's first."""
    return (block.attn.heads + block.attn.kv_heads) * block.attn.head_dim
