"""Attention backends behind one function: "naive", "sdpa", "triton"; "auto" picks by device and says which.

Chapter 08. naive is the formula, and stores every score. sdpa is torch's own fused kernels. triton is
`flash_attention`; in Triton's interpreter it is correct and slow, so "auto" takes it on a GPU only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import require_triton, why_not
from minillm.model.attention import attention as sdpa_attention
from minillm.model.attention import naive_attention, visible

BACKENDS = ("auto", "naive", "sdpa", "triton")


@dataclass(frozen=True)
class Choice:
    """A backend and one sentence on why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_backend(backend: str = "auto", device: torch.device | str = "cpu") -> Choice:
    """The backend that will run. Raises for an unknown name, and for "triton" where it cannot run."""
    if backend not in BACKENDS:
        raise ParamsError(illegal("attention", backend, f"must be one of {', '.join(BACKENDS)}"))
    if backend == "triton":
        require_triton()
    if backend != "auto":
        return Choice(backend, "asked for")
    if torch.device(device).type != "cuda":
        return Choice("sdpa", "no GPU, where Triton would be interpreted")
    reason = why_not()
    return Choice("triton", "a GPU that Triton compiles for") if reason is None else Choice("sdpa", reason)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal: q [batch, heads, time, dim], k, v [batch, kv_heads, length, .] -> [batch, heads, time, v dim].

    Arguments and rule are those of `minillm.model.attention.attention`: queries are the last of the keys.
    """
    name = choose_backend(backend, q.device).name
    if name == "naive":
        return naive_attention(q, k, v, visible(q.shape[-2], k.shape[-2], window, device=q.device), scale, softcap)
    if name == "sdpa":
        return sdpa_attention(q, k, v, scale=scale, window=window, softcap=softcap)
    from minillm.kernels.flash_attention import flash_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, time or length, heads, dim], a view
    return flash_attention(q, k, v, scale=scale, window=window, softcap=softcap).transpose(1, 2)
