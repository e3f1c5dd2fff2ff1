"""The decoder-only transformer: embed, mix tokens (attention), mix channels (MLP), repeat, score the vocabulary.

Chapter 01. LLaMA, Touvron et al. 2023 (arXiv:2302.13971), with the switches of `ModelConfig` for Mistral, Qwen,
Gemma and GPT-2. This file knows nothing of caches, quantisation, devices or requests. Later chapters change what
happens through two seams:

- `cache.attend(layer, q, k, v)` stores this call's keys and values and attends over all it holds;
- `replace_linears(model, make)` swaps each `nn.Linear` for something that computes the same product another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.attention import LayerInfo, attend_now
from minillm.model.config import ModelConfig
from minillm.model.rope import cos_sin, inverse_frequencies, rotate


class KVCache(Protocol):
    """What the decoder asks of a cache. The leading shape is [batch, time], or [tokens] for packed requests."""

    def positions(self, shape: torch.Size) -> Tensor:
        """Positions of the next tokens, of that leading shape (used when the caller gives none)."""

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [..., kv_heads, dim], attend q [..., heads, dim] over all stored -> [..., heads, v dim]."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last axis. Zhang and Sennrich 2019 (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias, over the last axis: GPT-2's norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig, size: int) -> nn.Module:
    return (LayerNorm if config.norm_kind == "layer" else RMSNorm)(size, config.norm_eps)


class Attention(nn.Module):
    """Project to heads, turn q and k by their position, let the cache attend, project back.

    MHA, GQA and MQA differ only in num_kv_heads. One matrix holds q, k and v: one read of x, one launch.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.out_bias)
        self.q_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, self.head_dim) if config.qk_norm else None
        self.layer = LayerInfo(index, config.scale, config.window(index), config.attention_softcap)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, attend: Callable) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [..., heads + 2 kv_heads, head_dim]
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=-2)
        if self.q_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), dim=-2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        if tables is not None:
            qk = rotate(qk, *tables)
        q, k = qk.split((self.heads, self.kv_heads), dim=-2)  # [..., heads, head_dim], [..., kv_heads, head_dim]
        return self.out(attend(self.layer, q, k, v).flatten(-2))  # [..., hidden]


class MLP(nn.Module):
    """down(act(gate x) * up x), the gated form (Shazeer 2020, arXiv:2002.05202), or down(act(up x)) for GPT-2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated, self.activation = config.gated_mlp, config.activation
        rows = config.intermediate_size * (2 if self.gated else 1)
        self.gate_up = nn.Linear(config.hidden_size, rows, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def act(self, x: Tensor) -> Tensor:
        if self.activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate_up(x)  # [..., 2 ffn]
        if not self.gated:
            return self.down(self.act(x))
        gate, up = x.chunk(2, dim=-1)  # [..., ffn] each
        return self.down(self.act(gate) * up)


class Block(nn.Module):
    """One layer: x + attention(norm x), then x + mlp(norm x). Gemma norms the two branches' outputs as well."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.local = index in config.local_layers
        self.attn_norm, self.attn = make_norm(config, hidden), Attention(config, index)
        self.mlp_norm, self.mlp = make_norm(config, hidden), MLP(config)
        self.post_attn_norm = make_norm(config, hidden) if config.post_norms else nn.Identity()
        self.post_mlp_norm = make_norm(config, hidden) if config.post_norms else nn.Identity()

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, attend: Callable) -> Tensor:
        x = x + self.post_attn_norm(self.attn(self.attn_norm(x), tables, attend))
        return x + self.post_mlp_norm(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """tokens [..., ] int64 -> logits [..., vocab].

    The leading shape is [batch, time], or [tokens]. positions: same shape, counted from 0; by default those that the
    cache expects next, or 0, 1, 2, ... without a cache. Without a cache the call attends over its own tokens only.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.position_embed = nn.Embedding(config.max_length, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """The last layer's normed output [..., hidden]: what the head scores, and what later chapters read."""
        if positions is None:
            if cache is not None:
                positions = cache.positions(tokens.shape)
            else:
                positions = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
        attend = attend_now if cache is None else cache.attend
        x = self.embed(tokens)  # [..., hidden]
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # rounded as the family rounds it
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        tables, local_tables = self.rope_tables(positions)
        for block in self.layers:
            x = block(x, local_tables if block.local else tables, attend)
        return self.norm(x)

    def rope_tables(self, positions: Tensor) -> tuple:
        """(cos, sin) for the global layers and for Gemma 3's local ones; computed once a call, in float32."""
        if self.config.positions != "rope":
            return None, None
        tables = cos_sin(positions, *inverse_frequencies(self.config, device=positions.device))
        if not self.config.local_layers:
            return tables, tables
        return tables, cos_sin(positions, *inverse_frequencies(self.config, True, positions.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]. Split from `hidden` so that prefill can score its last token only."""
        scores = self.head(hidden)
        cap = self.config.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        return self.logits(self.hidden(tokens, positions, cache))

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype


def replace_linears(model: nn.Module, make: Callable[[str, nn.Linear], nn.Module | None]) -> nn.Module:
    """Offer each nn.Linear to make(name, linear); put what it returns in its place (None: leave it). In place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            replacement = make(name, module)
            if replacement is not None:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, replacement)
    return model


def init_weights(model: Decoder, seed: int = 0) -> Decoder:
    """Seeded random weights: normal(0, 0.02), the projections into the residual stream divided by sqrt(2 layers)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.02
            if name.endswith(("attn.out.weight", "mlp.down.weight")):
                std /= (2 * model.config.num_layers) ** 0.5
            with torch.no_grad():
                parameter.normal_(0.0, std, generator=generator)
    return model
