"""Rotary position embedding (RoPE): turn each pair of channels by an angle that grows with the position.

Chapter 01. RoFormer, Su et al. 2021 (arXiv:2104.09864); linear interpolation, Chen et al. 2023
(arXiv:2306.15595); NTK-aware base change and YaRN, Peng et al. 2023 (arXiv:2309.00071); the llama3 band as in
Meta's Llama 3.1 release. Channel i is paired with channel i + head_dim / 2, the layout of Hugging Face weights.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from minillm.model.config import ModelConfig, RopeScaling


@lru_cache(maxsize=64)
def inverse_frequencies(
    config: ModelConfig, local: bool = False, device: torch.device | str = "cpu"
) -> tuple[Tensor, float]:
    """Angles per position, [head_dim / 2] float32, and the factor on cos and sin (1 except for YaRN).

    local: the plain frequencies of Gemma 3's sliding-window layers.
    """
    inverse, factor = _inverse_frequencies(config, local)
    return inverse.to(device), factor


def _inverse_frequencies(config: ModelConfig, local: bool) -> tuple[Tensor, float]:
    scaling, theta = config.rope_scaling, config.rope_theta
    if local and config.rope_local_theta is not None:
        scaling, theta = RopeScaling(), config.rope_local_theta
    dim = config.head_dim
    if scaling.kind == "ntk":
        theta = theta * scaling.factor ** (dim / (dim - 2))
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim  # [head_dim / 2]
    plain = 1.0 / (theta**exponent)
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        factor = scaling.attention_factor
        if factor is None:
            factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
        return _yarn(plain, scaling, theta, dim), factor
    return plain, 1.0


def _llama3(plain: Tensor, s: RopeScaling) -> Tensor:
    """Keep waves that turn often within the trained length, stretch the slow ones, blend between."""
    turns = s.original_length * plain / (2 * math.pi)  # full turns within the trained length
    blend = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return blend * plain + (1 - blend) * plain / s.factor


def _yarn(plain: Tensor, s: RopeScaling, theta: float, dim: int) -> Tensor:
    """The same idea with a ramp over the channel index between beta_fast and beta_slow turns."""

    def channel(turns: float) -> float:
        return dim * math.log(s.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(s.beta_fast), channel(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0, 1)  # 0: keep, 1: stretch by the factor
    return plain * (1 - stretch) + plain / s.factor * stretch


def cos_sin(positions: Tensor, inverse: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin, each [..., 1, head_dim] float32, for positions [...]; the 1 broadcasts over heads.

    The first half of sin is negative, so that `rotate` needs one roll instead of a slice, a negation and a concat.
    """
    angle = positions.unsqueeze(-1).float() * inverse  # [..., head_dim / 2]
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat((cos, cos), -1).unsqueeze(-2), torch.cat((-sin, sin), -1).unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., heads, head_dim] by the tables of `cos_sin`. Computed in float32, returned in x's dtype."""
    turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)  # [..., heads, head_dim]
    return turned.to(x.dtype)
