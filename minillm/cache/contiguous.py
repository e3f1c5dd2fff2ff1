"""The contiguous KV cache: one tensor per layer, allocated once for the longest the request can get.

Chapter 02. Decoding one token without a cache recomputes K and V of every earlier token, which depend on nothing
that changed. Keep them, and a step computes one row. `ConcatCache` keeps them by concatenation (what older engines
did: every step copies all of it); `ContiguousCache` writes into room reserved ahead.
Bytes: 2 x batch x layers x kv_heads x head_dim x length x bytes per element (the 2 is K and V).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.errors import PromptError, illegal
from minillm.model.attention import LayerInfo, attention
from minillm.model.config import ModelConfig
from minillm.model.weights import device_memory


class ContiguousCache:
    """K and V in [layers, batch, kv_heads, max_length, head_dim], written left to right.

    Every layer counts its own tokens, so a forward through all layers advances the cache with no call beside it.
    padding: [batch] int, tokens at the left of each row that are only there to make the batch rectangular; they are
    never attended to, and positions count from the first real token.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        padding: Tensor | None = None,
    ) -> None:
        for name, value in (("batch", batch), ("max_length", max_length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PromptError(f"{name}={value!r} must be an integer >= 1")
        if padding is not None:
            check_padding(padding, batch, max_length)
        shape = (config.num_layers, batch, config.num_kv_heads, max_length, config.head_dim)
        needed, total = 2 * math.prod(shape) * dtype.itemsize, device_memory(torch.device(device))
        if total is not None and needed > total:
            raise PromptError(
                f"batch={batch}, max_length={max_length}: this cache takes {needed / 1e9:.1f} GB; "
                f"{device} has {total / 1e9:.1f} GB in all"
            )
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.lengths = [0] * config.num_layers
        self.max_length = max_length
        self.padding = padding if padding is not None and bool(padding.any()) else None

    @property
    def length(self) -> int:
        """Tokens stored, padding included."""
        return self.lengths[-1]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def positions(self, shape: torch.Size) -> Tensor:
        positions = torch.arange(self.length, self.length + shape[-1], device=self.k.device)  # [time]
        if self.padding is not None:
            positions = (positions - self.padding.unsqueeze(-1)).clamp(min=0)  # [batch, time]
        return positions.expand(shape)

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        single = q.dim() == 3
        if single:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)  # [1, time, heads, dim]
        _, batch, kv_heads, _, head_dim = self.k.shape
        if k.shape[0] != batch or k.shape[2:] != (kv_heads, head_dim) or k.dtype != self.k.dtype:  # no broadcasting
            raise PromptError(
                f"the cache holds {batch} rows of {kv_heads} heads x {head_dim} in {self.k.dtype}; "
                f"got k {list(k.shape)} in {k.dtype}"
            )
        start = self.lengths[layer.index]
        end = start + q.shape[1]
        if end > self.max_length:
            raise PromptError(f"the cache has room for {self.max_length} tokens; {end} were asked for")
        keys, values = self.k[layer.index, :, :, :end], self.v[layer.index, :, :, :end]
        keys[:, :, start:] = k.transpose(1, 2)  # [batch, kv_heads, time, dim]
        values[:, :, start:] = v.transpose(1, 2)
        self.lengths[layer.index] = end
        out = attention(
            q.transpose(1, 2),  # [batch, heads, time, dim]
            keys,
            values,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            padding=self.padding,
        ).transpose(1, 2)  # [batch, time, heads, dim]
        return out.squeeze(0) if single else out

    def keep(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in this order. Copies what is kept."""
        batch = self.k.shape[1]
        if not rows or not all(type(row) is int and 0 <= row < batch for row in rows):
            raise PromptError(illegal("rows", rows, f"must be a list of one or more of 0 .. {batch - 1}"))
        index = torch.tensor(rows, dtype=torch.long, device=self.k.device)
        self.k, self.v = self.k.index_select(1, index), self.v.index_select(1, index)
        if self.padding is not None:
            self.padding = self.padding[index]

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens. Costs nothing: later writes go over them."""
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise PromptError(f"length={length} must be between 0 and the {self.length} tokens stored")
        self.lengths = [length] * len(self.lengths)


def check_padding(padding: Tensor, batch: int, max_length: int) -> None:
    """padding must be whole numbers, one a row, and leave each row a token of its own."""
    legal = f"must be a tensor of {batch} whole numbers from 0 to {max_length - 1}"
    whole = isinstance(padding, Tensor) and not padding.is_floating_point() and not padding.is_complex()
    if not whole or padding.shape != (batch,):
        raise PromptError(illegal("padding", padding, legal))
    if not padding.is_meta and not 0 <= int(padding.min()) <= int(padding.max()) < max_length:
        raise PromptError(illegal("padding", padding.tolist(), legal))


class ConcatCache:
    """K and V grown by torch.cat. Same results; every step allocates and copies all that is stored."""

    def __init__(self) -> None:
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    @property
    def length(self) -> int:
        return min((k.shape[2] for k in self.k.values()), default=0)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for store in (self.k, self.v) for x in store.values())

    def positions(self, shape: torch.Size) -> Tensor:
        device = next(iter(self.k.values())).device if self.k else None
        return torch.arange(self.length, self.length + shape[-1], device=device).expand(shape)

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        single = q.dim() == 3
        if single:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [batch, kv_heads, time, dim]
        if layer.index in self.k:
            stored = self.k[layer.index]
            if stored.shape[:2] != k.shape[:2] or stored.shape[3] != k.shape[3]:
                raise PromptError(f"the cache holds k {list(stored.shape)}; got k {list(k.shape)} to put behind it")
            k = torch.cat((stored, k), dim=2)  # [batch, kv_heads, length, dim]
            v = torch.cat((self.v[layer.index], v), dim=2)
        self.k[layer.index], self.v[layer.index] = k, v
        out = attention(
            q.transpose(1, 2), k, v, scale=layer.scale, window=layer.window, softcap=layer.softcap
        ).transpose(1, 2)  # [batch, time, heads, dim]
        return out.squeeze(0) if single else out
