"""Fusion: one kernel where several ran one after another, so that what they hand over never goes through memory.

Chapter 10. A norm, a residual add, a gate or a rotation does a few FLOPs a number; its time is the bytes it reads and
writes, and, for the small rows of a decode step, the launch itself. Fusing two of them saves the write and the read
between, and one launch. `traffic` counts both, by formula.

`fuse(model)` puts fused parts in the place of a decoder's blocks and last norm, and leaves decoder.py as it is: a
block may hand the next one a pair (branch, residual) in place of their sum, since the decoder only passes it on. A
cache that offers `attend_unrotated` also takes over the rotation, and writes k and v on the way; with any other cache
the rotation stays where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.kernels import fused_reference
from minillm.kernels.launch import why_not
from minillm.model.config import ModelConfig
from minillm.model.decoder import MLP, Attention, Block, Decoder, RMSNorm


@dataclass(frozen=True)
class Ops:
    """The fused operations a model uses: Triton's, or torch's."""

    add_rms_norm: Callable
    gated: Callable
    rope_and_write: Callable


def torch_ops() -> Ops:
    return Ops(fused_reference.add_rms_norm, fused_reference.gated, fused_reference.rope_and_write)


def triton_ops() -> Ops:
    from minillm.kernels.fused_norm import add_rms_norm
    from minillm.kernels.fused_rope import rope_and_write
    from minillm.kernels.fused_swiglu import gated

    return Ops(add_rms_norm, gated, rope_and_write)


@dataclass(frozen=True)
class Traffic:
    """One fusion: bytes through memory and launches, one kernel an operation against fused."""

    name: str
    unfused_bytes: int
    fused_bytes: int
    unfused_launches: int
    fused_launches: int

    @property
    def saved(self) -> int:
        return self.unfused_bytes - self.fused_bytes


def traffic(config: ModelConfig, rows: int, itemsize: int) -> list[Traffic]:
    """What each fusion moves for `rows` tokens in one layer. Tables of the rotation are float32, [rows, head_dim].

    Each operation reads its inputs and writes its output once. The rotation as `minillm.model.rope` writes it:
    x * cos, a roll, a multiply-add, a cast where the model is not in float32.
    """
    w, f, b = config.hidden_size, config.intermediate_size, itemsize
    d, h, g = config.head_dim, config.num_heads, config.num_kv_heads
    add_norm = Traffic("residual + RMSNorm", (5 * rows * w + w) * b, (4 * rows * w + w) * b, 2, 1)
    gate = Traffic("act(gate) * up", 5 * rows * f * b, 3 * rows * f * b, 2, 1)
    turned, stored = rows * (h + g) * d, rows * 2 * g * d
    table = rows * d * 4
    casts = b != 4
    product = turned * (b + 4) + table  # read x and cos, write float32
    roll = 2 * turned * b
    multiply_add = turned * (4 + b + 4) + table  # read product, roll and sin, write float32
    cast = turned * (4 + b) if casts else 0
    write = 2 * stored * b
    apart = product + roll + multiply_add + cast + write
    together = (turned + rows * g * d) * 2 * b + table
    rope = Traffic("RoPE + KV write", apart, together, 5 + casts, 1)
    return [add_norm, gate, rope]


def fuse(model: Decoder, ops: Ops | None = None) -> Decoder:
    """Replace the blocks and the last norm, in place. ops: Triton's by default. Weights are shared, not copied.

    Blocks that norm with anything but RMSNorm stay as they are.
    """
    if not all(isinstance(norm, RMSNorm) for norm in norms(model)):
        return model
    ops = ops or triton_ops()
    for i, block in enumerate(model.layers):
        model.layers[i] = FusedBlock(block, ops)
    model.norm = FusedNorm(model.norm, ops)
    return model


def norms(model: Decoder) -> list[nn.Module]:
    return [model.norm, *(norm for block in model.layers for norm in (block.attn_norm, block.mlp_norm))]


@torch.inference_mode()
def try_fuse(model: Decoder, tokens: int = 8) -> str | None:
    """`fuse`, if the kernels run here and leave the logits as they were, up to rounding; else the reason, and the
    model untouched."""
    if (reason := no_fusion(model)) is not None:
        return reason
    blocks, norm = list(model.layers), model.norm
    probe = torch.arange(tokens, device=model.device) % model.config.vocab_size
    expected = model(probe).float()
    try:
        error = (fuse(model)(probe).float() - expected).abs().max() / expected.abs().max()
        limit = 1e-3 if model.dtype == torch.float32 else 0.1
        reason = None if error < limit else f"fused logits are {error:.1e} of their size away"
    except Exception as problem:  # whatever a compiler says: decoding without fusion is right, only slower
        reason = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"
    if reason is not None:
        model.layers, model.norm = nn.ModuleList(blocks), norm
    return reason


def no_fusion(model: Decoder) -> str | None:
    """Why fused kernels are not worth trying on this model; None: they are."""
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}; fused kernels pay on a GPU"
    return why_not()


class FusedNorm(nn.Module):
    """RMSNorm of a sum that was not made yet. x: the residual, or a pair (branch, residual)."""

    def __init__(self, norm: RMSNorm, ops: Ops) -> None:
        super().__init__()
        self.weight, self.eps, self.ops = norm.weight, norm.eps, ops

    def split(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(normed, residual)."""
        branch, residual = x if isinstance(x, tuple) else (None, x)
        return self.ops.add_rms_norm(branch, residual, self.weight, self.eps)

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return self.split(x)[0]


class FusedBlock(nn.Module):
    """A decoder block whose adds wait for the next norm. Takes and returns (branch, residual); their sum is what the
    plain block passes on."""

    def __init__(self, block: Block, ops: Ops) -> None:
        super().__init__()
        self.local = block.local
        self.attn_norm, self.mlp_norm = FusedNorm(block.attn_norm, ops), FusedNorm(block.mlp_norm, ops)
        self.attn, self.mlp = FusedAttention(block.attn), FusedMLP(block.mlp, ops)
        self.post_attn_norm, self.post_mlp_norm = block.post_attn_norm, block.post_mlp_norm

    def forward(self, x, tables: tuple[Tensor, Tensor] | None, attend: Callable) -> tuple[Tensor, Tensor]:
        normed, residual = self.attn_norm.split(x)
        branch = self.post_attn_norm(self.attn(normed, tables, attend))
        normed, residual = self.mlp_norm.split((branch, residual))
        return self.post_mlp_norm(self.mlp(normed)), residual


class FusedMLP(nn.Module):
    def __init__(self, mlp: MLP, ops: Ops) -> None:
        super().__init__()
        self.gate_up, self.down, self.ops, self.plain = mlp.gate_up, mlp.down, ops, mlp.act
        self.gated, self.activation = mlp.gated, mlp.activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate_up(x)  # [..., 2 ffn], or [..., ffn]
        return self.down(self.ops.gated(x, self.activation) if self.gated else self.plain(x))


class FusedAttention(nn.Module):
    """Hands q, k and v to the cache before they are turned, where the cache can turn them while it writes."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, attend: Callable) -> Tensor:
        plain = self.attention
        fused = getattr(getattr(attend, "__self__", None), "attend_unrotated", None)
        if fused is None or plain.q_norm is not None:
            return plain(x, tables, attend)
        qkv = plain.qkv(x).unflatten(-1, (-1, plain.head_dim))  # [tokens, heads + 2 kv_heads, head_dim]
        return plain.out(fused(plain.layer, qkv, tables).flatten(-2))  # [tokens, hidden]
