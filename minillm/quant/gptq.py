"""GPTQ: round a weight matrix column by column, and let the columns not yet rounded make up for each error.

Chapter 12. Frantar et al. 2022 (arXiv:2210.17323), in its notation. A linear with weights W [out, in] and inputs x is
wanted with rounded weights Q so that E|(W - Q) x|^2 is small: tr((W - Q) H (W - Q)^T) with H = E[x x^T]. Rows do not
mix, so all share one H. Once column j is rounded, with error (w_j - q_j), the best change of the later columns is

    w_k  <-  w_k - (w_j - q_j) / U_jj * U_jk        for k > j, U upper triangular with U^T U = H^-1

(optimal brain surgeon, Hassibi and Stork 1993; row j of U is what is left of H^-1 after columns 0 .. j-1 are fixed).
A diagonal H, inputs without correlation, has U_jk = 0: nothing can be made up for, and GPTQ is RTN.

damping: a share of H's mean diagonal is added to its diagonal, for channels that calibration hardly saw.
act_order: columns by falling H_jj, so that the channels with the largest inputs are rounded while there is most room
to make up for them. Scales of groups are then fixed beforehand, from neighbours in the original order ("static
groups"), so that kernels read the result like any other; without it a group's scale is taken when it is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder
from minillm.quant.affine import Quantized, Scheme, round_to, to_blocks
from minillm.quant.calibrate import gather, output_error, walk
from minillm.quant.linear import linears, rtn, stored_parameters


@dataclass
class LayerResult:
    """What became of one linear. error, rtn_error: E|(W - Q) x|^2 on the calibration text, / E|W x|^2."""

    quantized: Quantized
    error: float
    rtn_error: float


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    act_order: bool = False,
    damping: float = 0.01,
    block: int = 128,
) -> Quantized:
    """weight [out, in], hessian E[x x^T] [in, in] -> Quantized, with the scales of `rtn` where they are fixed.

    block: columns between two updates of the columns further right: the same numbers, fewer passes over W.
    """
    check(weight, hessian, damping, block)
    weight, h = weight.float(), hessian.float()
    width, size = weight.shape[1], scheme.block(weight.shape)  # size: neighbours in a row that share a scale
    static = act_order or scheme.granularity != "group"
    scale, zero = stored_parameters(to_blocks(weight, scheme), scheme)  # [out, groups]; the final ones if static
    order = h.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(width, device=h.device)
    groups = [0] * width if scheme.granularity == "tensor" else (order // size).tolist()
    upper = inverse_factor(h[order][:, order], damping)
    w = weight.T[order].contiguous()  # [in, out]: a column of W is contiguous
    if not static:
        block = max(1, block // size) * size  # a group never straddles a block, so its scale sees every update
    values = torch.empty_like(w, dtype=torch.int8 if scheme.symmetric else torch.uint8)
    for start in range(0, width, block):
        end = min(start + block, width)
        errors = torch.zeros_like(w[start:end])
        for j in range(start, end):
            if not static and j % size == 0:
                fresh = stored_parameters(w[j : j + size].T, scheme)
                scale[:, groups[j]] = fresh[0]
                if zero is not None:
                    zero[:, groups[j]] = fresh[1]
            step, offset = scale[..., groups[j]], None if zero is None else zero[..., groups[j]]  # [out]
            q = values[j] = round_to(w[j].unsqueeze(-1), step, offset, scheme)[:, 0]
            rounded = (q if offset is None else q - offset) * step
            error = errors[j - start] = (w[j] - rounded) / upper[j, j]
            w[j + 1 : end].addr_(upper[j, j + 1 : end], error, alpha=-1)
        w[end:] -= upper[start:end, end:].T @ errors
    return Quantized(values[order.argsort()].T.contiguous(), scale, zero, scheme)


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U, upper triangular, with U^T U = (H + damping * mean diagonal * I)^-1.

    In float64: H may be nearly singular.
    """
    h = hessian.double()
    diagonal = h.diagonal()
    mean = diagonal.mean()
    # A channel that was never on has H_jj = 0: give it a diagonal of its own, so that it is rounded to the nearest.
    dead = torch.where(diagonal > 0, 0.0, mean if mean > 0 else 1.0)
    damped = h + torch.diag(damping * mean + dead)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        raise ParamsError(illegal("damping", damping, "too small: the damped Hessian is not positive definite"))
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()


def check(weight: Tensor, hessian: Tensor, damping: float, block: int) -> None:
    if weight.dim() != 2:
        raise ParamsError(illegal("weight", tuple(weight.shape), "must be [out, in]"))
    if hessian.shape != (weight.shape[1], weight.shape[1]):
        raise ParamsError(illegal("hessian", tuple(hessian.shape), f"must be [in, in] with in = {weight.shape[1]}"))
    if not torch.isfinite(hessian).all():
        raise ParamsError(illegal("hessian", "inf or nan", "must be finite: did the model overflow on this text?"))
    if not isinstance(damping, (int, float)) or not 0 <= damping < float("inf"):
        raise ParamsError(illegal("damping", damping, "must be at least 0; 0.01 is the usual choice"))
    if not isinstance(block, int) or block < 1:
        raise ParamsError(illegal("block", block, "must be a whole number of at least 1 column"))


@torch.no_grad()
def gptq_model(
    model: Decoder,
    tokens: Tensor,
    scheme: Scheme,
    *,
    act_order: bool = False,
    damping: float = 0.01,
    keep: tuple[str, ...] = ("head",),
    batch: int = 4,
) -> dict[str, LayerResult]:
    """Quantise every linear but those in `keep`, in place, block after block. tokens [samples, length].

    The model keeps float weights, now on the grid. To pack them: `quantize_model(model, method=as_method(results),
    ...)` under the same scheme.
    """
    chosen, results = linears(model, keep), {}
    for name, _, run in walk(model, tokens, batch):
        layers = {full: layer for full, layer in chosen.items() if full.startswith(f"{name}.")}
        stats = gather(layers, run)
        for full, layer in layers.items():
            hessian = stats[full].hessian
            found = gptq(layer.weight, hessian, scheme, act_order=act_order, damping=damping)
            results[full] = replace_weight(layer, found, hessian)
    return results


def replace_weight(layer: nn.Linear, found: Quantized, hessian: Tensor) -> LayerResult:
    """Put the rounded weights in place, and compare them with rounding to the nearest on the same inputs."""
    weight, rounded = layer.weight.float(), found.dequantize()
    nearest = rtn("", layer, found.scheme).dequantize()
    power = max(output_error(weight, hessian), 1e-30)
    errors = [output_error(weight - other, hessian) / power for other in (rounded, nearest)]
    layer.weight.copy_(rounded)
    return LayerResult(found, *errors)


def as_method(results: dict[str, LayerResult]) -> Callable[[str, nn.Linear, Scheme], Quantized]:
    """What `quantize_model` takes as a method: the integers found before."""

    def method(name: str, linear: nn.Linear, scheme: Scheme) -> Quantized:
        if name not in results or results[name].quantized.scheme != scheme:
            raise ParamsError(illegal("method", name, "these results hold other linears, or another scheme"))
        return results[name].quantized

    return method
