"""The fused operations of chapter 10 in plain torch: the same arguments, the same results, no Triton.

They are the operations as an eager model launches them, so they are also what a fusion is measured against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model.rope import rotate


def add_rms_norm(branch: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm(residual + branch) * weight, residual + branch). Two launches."""
    summed = residual if branch is None else residual + branch
    return F.rms_norm(summed, weight.shape, weight, eps), summed


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up from [..., 2 features]. Two launches."""
    gate, up = gate_up.chunk(2, dim=-1)  # [..., features] each
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def rope_and_write(
    qkv: Tensor, tables: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """Turn q and k, write k and v to their slots (-1: nowhere); returns q. Six launches and more."""
    kv_heads = keys.shape[2]
    qk, v = qkv.split((qkv.shape[1] - kv_heads, kv_heads), dim=1)
    if tables is not None:
        qk = rotate(qk, *tables)
    q, k = qk.split((qk.shape[1] - kv_heads, kv_heads), dim=1)
    real = slots >= 0
    for stored, new in ((keys, k), (values, v)):
        stored.flatten(0, 1).index_copy_(0, slots[real], new[real].to(stored.dtype))
    return q


def sample(logits: Tensor, temperatures: Tensor, exponentials: Tensor | None = None) -> Tensor:
    """argmax(logits / temperature - log E) a row; temperature 0: argmax(logits). exponentials [rows, vocab]: the E,
    which the kernel draws itself."""
    logits = logits.float()
    if exponentials is None:
        exponentials = torch.empty_like(logits).exponential_()
    warm = (temperatures > 0)[:, None]
    scaled = logits / torch.where(warm, temperatures[:, None], 1.0)
    return torch.where(warm, scaled - exponentials.log(), scaled).argmax(-1)
