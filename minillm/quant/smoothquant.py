"""SmoothQuant: divide each input channel by what makes it loud, and multiply the weight's column by the same.

Chapter 13. Xiao et al. 2022 (arXiv:2211.10438). An outlier channel of x sets the scale of its whole token, and the
other channels fall on a few integers. A scale a channel cannot be taken out of the sum (`w8a8.py`), but it can be
moved into the weight before anything is rounded: for any s > 0, x W^T = (x / s) (W diag(s))^T, with

    s_j = max |x_j|^alpha / max |W_j|^(1 - alpha)         over tokens, and over the rows of column j

alpha = 1 makes all input channels equally loud and leaves the trouble to the weights; alpha = 0 makes all weight
columns alike and leaves it to the inputs; alpha = 1/2 gives both the same range in every channel. The division is
folded into the layer that makes x, by chapter 12's `Fold`: into a norm, or into V's and up's rows.

The authors smooth the inputs that come from a norm (sites="norms"); sites="all" also those of attn.out and mlp.down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder
from minillm.quant.awq import Fold, folds
from minillm.quant.calibrate import calibration_tokens
from minillm.quant.linear import linears

SITES = ("norms", "all")


@torch.no_grad()
def channel_maxima(
    model: Decoder, tokens: Tensor, keep: Iterable[str] = ("head",), batch: int = 4
) -> dict[str, Tensor]:
    """max |x| of every linear's input channels over a text, [in] each. tokens [samples, length]; keep stays out."""
    tokens, layers = calibration_tokens(model, tokens), linears(model, keep)
    maxima = {name: torch.zeros(layer.in_features, device=model.device) for name, layer in layers.items()}

    def hook(name: str):
        def see(module: nn.Module, args: tuple) -> None:
            torch.maximum(maxima[name], args[0].flatten(0, -2).abs().amax(0).float(), out=maxima[name])

        return see

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        for part in tokens.split(batch):
            model.hidden(part)
    finally:
        for handle in handles:
            handle.remove()
    return maxima


def smoothing_scale(inputs: Tensor, weight: Tensor, alpha: float = 0.5) -> Tensor:
    """s [in] from inputs, max |x_j| [in], and weight [out, in]. A channel that is silent, or unused, gets 1."""
    check_alpha(alpha)
    columns = weight.abs().amax(0).float()  # [in]
    s = inputs.float() ** alpha / columns ** (1 - alpha)
    return torch.where((inputs > 0) & (columns > 0), s, torch.ones_like(s))


@torch.no_grad()
def smooth_model(
    model: Decoder,
    maxima: Mapping[str, Tensor],
    alpha: float = 0.5,
    sites: str = "norms",
) -> dict[str, Tensor]:
    """Fold the scales into the model, in place: it computes what it did. maxima: from `channel_maxima`.

    Returns the scale [in] of each smoothed linear by name. All scales are found before the first is folded in.
    """
    check_alpha(alpha)
    if sites not in SITES:
        raise ParamsError(illegal("sites", sites, f"must be one of {', '.join(SITES)}"))
    plans = [
        (f"layers.{i}.{fold.linear}", block, fold)
        for i, block in enumerate(model.layers)
        for fold in folds(block)
        if sites == "all" or after_norm(block, fold)
    ]
    scales = {}
    for name, block, fold in plans:
        weight = block.get_submodule(fold.linear).weight
        if name not in maxima or maxima[name].shape != weight.shape[1:]:
            found = "nothing" if name not in maxima else list(maxima[name].shape)
            raise ParamsError(illegal(f"maxima[{name!r}]", found, f"must hold {weight.shape[1]} channels"))
        shared = together(maxima[name], fold), together(weight.abs().amax(0), fold)
        scales[name] = smoothing_scale(shared[0], shared[1][None], alpha)
    for name, block, fold in plans:
        fold.apply(block, scales[name])
    return scales


def after_norm(block: nn.Module, fold: Fold) -> bool:
    return not isinstance(block.get_submodule(fold.before), nn.Linear)


def together(x: Tensor, fold: Fold) -> Tensor:
    """[in] -> [in]: query heads that read the same V must have one scale, that of the loudest."""
    heads = x.view(-1, fold.shared, fold.dim)
    return heads.amax(1, keepdim=True).expand_as(heads).reshape(-1)


@torch.no_grad()
def inject_outliers(
    model: Decoder, factor: float, channels: Iterable[int] = (0,), layers: Iterable[int] | None = None
) -> Decoder:
    """Make some input channels of qkv and gate_up `factor` x louder, in place, without changing the function.

    The fold backwards: the norm's gain is multiplied, the weight's column divided. A stand-in, to be named as such
    wherever it is shown, for the outlier channels that models of several billion parameters grow by themselves.
    """
    if not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
        raise ParamsError(illegal("factor", factor, "must be a finite number above 0"))
    channels = list(channels)
    hidden = model.config.hidden_size
    if any(not isinstance(c, int) or not 0 <= c < hidden for c in channels):
        raise ParamsError(illegal("channels", channels, f"must be whole numbers from 0 to {hidden - 1}"))
    s = torch.ones(hidden, device=model.device)
    s[channels] = 1 / factor
    for index in range(len(model.layers)) if layers is None else layers:
        block = model.layers[index]
        for fold in folds(block):
            if after_norm(block, fold):
                fold.apply(block, s)
    return model


def check_alpha(alpha: float) -> None:
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 <= alpha <= 1:
        raise ParamsError(illegal("alpha", alpha, "must be from 0 to 1"))
