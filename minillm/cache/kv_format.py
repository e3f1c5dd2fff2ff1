"""How K and V are kept in few bits: who shares a scale, and what that takes.

Chapter 14. KIVI, Liu et al. 2024 (arXiv:2402.02750). Keys have a few channels that are large in every token, values
have none. So a key's scale is shared along a channel, by `group` tokens ("channel"), where the outlier's channel pays
for itself alone; a value's by one token's vector of one head ("token"), which is complete when the token arrives.

    asymmetric    x ~ low + scale * code, code 0 .. 2^bits - 1: scale and low in 16 bits
    symmetric     x ~ scale * (code - 2^(bits - 1)): scale in 16 bits
    floating      x as FP8 E4M3, cut off at +-448: no scale

`low` is stored and not the zero point, which is low / scale: 16 bits do not hold that of a channel far from 0.

A group along the channel can be rounded only when all its tokens are there. Hence the **residual**: tokens are
rounded `residual` at a time, as a unit, and those of the unfinished unit stay in the model's type. **The invariant:**
what a query sees is a function of its position alone, never of how the tokens came in (a prompt at once or in chunks,
from a prefix cache, or again after a preemption):

    query p sees token t rounded if t < border(p), as it is if border(p) <= t <= p
    border(p) = p // residual * residual

With residual 0 (formats whose scales need one token only) every token is seen rounded, by itself too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.model.attention import LayerInfo, naive_attention
from minillm.model.config import ModelConfig
from minillm.quant.affine import Scheme, parameters, round_to
from minillm.quant.packing import pack, unpack

LARGEST_FP8 = 448.0  # E4M3 has no infinity: anything larger would become NaN
SMALLEST, LARGEST = 2.0**-24, 65504.0  # of float16
Parts = tuple[Tensor, ...]  # codes, and scale and low where the format has them


@dataclass(frozen=True)
class KVFormat:
    """bits 2, 4 or 8. keys: who shares a key's scale, "channel" (`group` tokens) or "token". residual: see above."""

    bits: int
    keys: str = "channel"
    symmetric: bool = False
    floating: bool = False
    group: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ParamsError(illegal("bits", self.bits, "must be 2, 4 or 8"))
        if self.keys not in ("channel", "token"):
            raise ParamsError(illegal("keys", self.keys, 'must be "channel" or "token"'))
        for name, least in (("group", 1), ("residual", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ParamsError(illegal(name, value, f"must be a whole number of at least {least}"))
        if self.floating and (self.bits != 8 or self.keys != "token"):
            raise ParamsError(illegal("floating", True, 'is FP8, without scales: bits=8 and keys="token"'))
        if self.keys == "channel" and (self.residual == 0 or self.residual % self.group):
            legal = f"must be a multiple of group={self.group}: keys wait until a whole group is there"
            raise ParamsError(illegal("residual", self.residual, legal))

    @property
    def unit(self) -> int:
        """Tokens that are rounded together."""
        return self.residual or 1

    def along(self, role: str) -> str:
        return self.keys if role == "k" else "token"

    def bits_per_number(self, role: str, head_dim: int) -> float:
        """Scale and low included: 16 bits each, shared by a group of tokens or by a vector."""
        if self.floating:
            return 8.0
        shared = self.group if self.along(role) == "channel" else head_dim
        return self.bits + (16 if self.symmetric else 32) / shared

    def token_bytes(self, config: ModelConfig) -> float:
        """Bytes of one rounded token, K and V of all layers."""
        numbers = config.num_layers * config.num_kv_heads * config.head_dim
        return numbers * sum(self.bits_per_number(role, config.head_dim) for role in "kv") / 8

    def empty(self, role: str, lead: tuple[int, ...], kv_heads: int, head_dim: int, **where) -> Parts:
        """Room for units of tokens: codes [*lead, unit, kv_heads, bytes], scale and low in float16."""
        if head_dim * self.bits % 8:
            raise ParamsError(illegal("head_dim", head_dim, f"must fill whole bytes at {self.bits} bits"))
        codes = torch.zeros(*lead, self.unit, kv_heads, head_dim * self.bits // 8, dtype=torch.uint8, **where)
        along = self.along(role)
        shape = (self.unit // self.group, kv_heads, head_dim) if along == "channel" else (self.unit, kv_heads)
        scales = 0 if self.floating else 1 if self.symmetric else 2
        return (codes, *(torch.zeros(*lead, *shape, dtype=torch.float16, **where) for _ in range(scales)))

    def encode(self, role: str, x: Tensor) -> Parts:
        """x [n, tokens, kv_heads, dim] -> the parts of n units (tokens: a unit, or any number along "token")."""
        if self.floating:
            return (x.float().clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8),)
        channel = self.along(role) == "channel"
        blocks = x.unflatten(1, (-1, self.group)).movedim(2, -1) if channel else x  # [..., numbers of one scale]
        scheme = Scheme(self.bits, self.symmetric, "token", zero="integer" if self.symmetric else "float")
        scale, zero = parameters(blocks.float(), scheme)
        low = None if zero is None else (-zero * scale).clamp(-LARGEST, LARGEST).half()
        scale = scale.clamp(SMALLEST, LARGEST).half()  # first rounded to 16 bits, then used: codes fit what is stored
        zero = None if low is None else -low.float() / scale.float()
        codes = round_to(blocks.float(), scale.float(), zero, scheme)
        if self.symmetric:
            codes = codes.to(torch.int16) + 2 ** (self.bits - 1)
        codes = codes.movedim(-1, 2).flatten(1, 2) if channel else codes  # [n, tokens, kv_heads, dim]
        packed = pack(codes.to(torch.uint8), self.bits)
        return (packed, scale) if low is None else (packed, scale, low)

    def decode(self, role: str, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        """The parts of n units -> [n, tokens, kv_heads, dim]."""
        if self.floating:
            return parts[0].view(torch.float8_e4m3fn).to(dtype)
        codes = unpack(parts[0], self.bits).float()  # [n, tokens, kv_heads, dim]
        if self.along(role) == "channel":
            codes = codes.unflatten(1, (-1, self.group))  # [n, groups, group, kv_heads, dim]
            scale, *low = (part.unsqueeze(2).float() for part in parts[1:])  # [n, groups, 1, kv_heads, dim]
        else:
            scale, *low = (part.unsqueeze(-1).float() for part in parts[1:])  # [n, tokens, kv_heads, 1]
        x = codes.sub_(2 ** (self.bits - 1)).mul_(scale) if self.symmetric else codes.mul_(scale).add_(low[0])
        return (x.flatten(1, 2) if self.along(role) == "channel" else x).to(dtype)


FORMATS = {
    "int8": KVFormat(8, keys="token", symmetric=True, residual=0),
    "fp8": KVFormat(8, keys="token", floating=True, residual=0),
    "int4": KVFormat(4),
    "int2": KVFormat(2),
}


def kv_format(name: str, residual: int | None = None) -> KVFormat:
    """A format of FORMATS by name. residual: of those that have one; their group is its largest divisor up to 32."""
    if name not in FORMATS:
        raise ParamsError(illegal("kv_cache_dtype", name, "must be " + " or ".join(f'"{each}"' for each in FORMATS)))
    found = FORMATS[name]
    if residual is None or not found.residual:
        return found
    if not isinstance(residual, int) or residual < 1:
        raise ParamsError(illegal("residual", residual, "must be a whole number of at least 1"))
    return replace(found, residual=residual, group=max(d for d in range(1, 33) if residual % d == 0))


def sees(query: Tensor, key: Tensor, rounded: Tensor, residual: int, window: int | None = None) -> Tensor:
    """query [..., time], key [..., keys] positions; rounded [keys], True where the key is one of the rounded ones ->
    [..., time, keys], True where the query looks. A token may be among the keys in both forms: a query takes one."""
    query, key = query.unsqueeze(-1), key.unsqueeze(-2)  # [..., time, 1], [..., 1, keys]
    if residual:
        border = query // residual * residual
        mask = torch.where(rounded, key < border, (key >= border) & (key <= query))
    else:
        mask = key <= query
    return mask if window is None else mask & (key > query - window)


def attend_masked(layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, formula: bool) -> Tensor:
    """q [n, time, heads, dim], k and v [n, keys, kv_heads, dim], mask [n or 1, time, keys] -> as q. One softmax over
    rounded and unrounded keys together. formula: written out, in place of torch's fused kernel."""
    q, k, v, mask = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask.unsqueeze(1)
    if formula or layer.softcap is not None:
        return naive_attention(q, k, v, mask, layer.scale, layer.softcap).transpose(1, 2)
    if q.shape[2] == 1:  # the query heads of a KV head become its queries: each key is read once
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # [n, kv_heads, group, dim]
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=layer.scale).reshape(q.shape)
    else:
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=gqa)
    return out.transpose(1, 2)  # [n, time, heads, dim]
