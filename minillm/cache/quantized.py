"""The contiguous cache in 8, 4 or 2 bits: rounded units from the left, the newest tokens in the model's own type.

Chapter 14. KIVI, Liu et al. 2024 (arXiv:2402.02750). What a query sees is defined in `kv_format`; this is its plain
form, one request or a batch of equal lengths. The paged form, for the engine, is `quantized_paged`.

Bytes: batch x (room x `token_bytes` + 2 x residual x bytes of an unrounded token). Reading needs the unfinished unit;
the one before it is kept too, so that rolling back (`truncate`) by up to `residual` tokens gives exactly the cache
that was there. Further back the floats are gone: the unit is opened again from its codes (`reopened` counts).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.cache.kv_format import KVFormat, attend_masked, kv_format, sees
from minillm.cache.paged import cache_bytes
from minillm.errors import PromptError, illegal
from minillm.model.attention import LayerInfo, attention
from minillm.model.config import ModelConfig


def quantized_bytes(config: ModelConfig, batch: int, length: int, form: KVFormat, dtype: torch.dtype) -> int:
    """Bytes of a cache with room for `length` tokens a row, codes, scales and unrounded tokens."""
    room = -(-length // form.unit) * form.unit
    floats = cache_bytes(config, 2, form.residual, dtype)
    return round(batch * (room * form.token_bytes(config) + floats))


class QuantizedCache:
    """form: a KVFormat, or a name of `kv_format.FORMATS`. Otherwise used as ContiguousCache, without padding."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_length: int,
        form: KVFormat | str = "int8",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("batch", batch), ("max_length", max_length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PromptError(illegal(name, value, "must be an integer >= 1"))
        self.form = kv_format(form) if isinstance(form, str) else form
        self.max_length, self.dtype, self.lengths = max_length, dtype, [0] * config.num_layers
        heads = config.num_kv_heads, config.head_dim
        lead = (config.num_layers, batch, -(-max_length // self.form.unit))
        self.units = {role: self.form.empty(role, lead, *heads, device=device) for role in "kv"}
        shape = (config.num_layers, batch, 2 * self.form.residual, *heads)  # token t stands at t % (2 * residual)
        self.recent = {role: torch.zeros(shape, dtype=dtype, device=device) for role in "kv"}
        self.oldest = [0] * config.num_layers  # the first token of `recent`
        self.reopened = 0

    @property
    def length(self) -> int:
        return self.lengths[-1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for role in "kv" for part in (*self.units[role], self.recent[role]))

    def positions(self, shape: torch.Size) -> Tensor:
        return torch.arange(self.length, self.length + shape[-1], device=self.recent["k"].device).expand(shape)

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dim() == 3:
            return self.attend(layer, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)).squeeze(0)
        batch, kv_heads, dim = self.recent["k"].shape[1], *self.recent["k"].shape[-2:]
        if k.shape[0] != batch or k.shape[2:] != (kv_heads, dim):
            raise PromptError(f"the cache holds {batch} rows of {kv_heads} heads x {dim}; got k {list(k.shape)}")
        start = self.lengths[layer.index]
        end = start + q.shape[1]
        if end > self.max_length:
            raise PromptError(f"the cache has room for {self.max_length} tokens; {end} were asked for")
        store = self._store if self.form.residual else self._store_at_once
        keys, values = (store(layer.index, role, new, start) for role, new in (("k", k), ("v", v)))
        self.lengths[layer.index] = end
        if not self.form.residual:
            out = attention(
                *(x.transpose(1, 2) for x in (q, keys, values)),  # [batch, heads, time, dim]
                scale=layer.scale,
                window=layer.window,
                softcap=layer.softcap,
            )
            return out.transpose(1, 2)
        residual, device = self.form.residual, q.device
        rounded = (end - 1) // residual * residual  # tokens that the last query sees rounded
        self.oldest[layer.index] = max(self.oldest[layer.index], rounded - residual)
        places = torch.arange(rounded, device=device), torch.arange(start // residual * residual, end, device=device)
        kind = torch.arange(sum(map(len, places)), device=device) < rounded
        mask = sees(torch.arange(start, end, device=device), torch.cat(places), kind, residual, layer.window)
        return attend_masked(layer, q, keys, values, mask[None], formula=False)

    def _store_at_once(self, layer: int, role: str, new: Tensor, start: int) -> Tensor:
        """Round the new tokens, then read all: [batch, tokens, kv_heads, dim]."""
        end = start + new.shape[1]
        for stored, part in zip(self.units[role], self.form.encode(role, new)):
            stored[layer, :, start:end, 0] = part  # [batch, time, ...]
        return self._read(layer, role, end)

    def _store(self, layer: int, role: str, new: Tensor, start: int) -> Tensor:
        """Round the units that are complete now. -> rounded units, then the tokens from the unfinished one on."""
        residual, recent = self.form.residual, self.recent[role][layer]
        end, own = start + new.shape[1], start // residual * residual
        at = own % (2 * residual)
        fresh = torch.cat((recent[:, at : at + start - own], new.to(recent.dtype)), 1)  # tokens own .. end - 1
        full = (end - own) // residual
        if full:
            units = fresh[:, : full * residual].unflatten(1, (full, residual))  # [batch, full, residual, heads, dim]
            parts = self.form.encode(role, units.flatten(0, 1))
            for stored, part in zip(self.units[role], parts):
                stored[layer, :, own // residual : own // residual + full] = part.unflatten(0, (-1, full))
        first = max(start, (end - 1) // residual * residual - residual)
        recent[:, torch.arange(first, end, device=new.device) % (2 * residual)] = new[:, first - start :].to(
            recent.dtype
        )
        return torch.cat((self._read(layer, role, (end - 1) // residual), fresh), 1)

    def _read(self, layer: int, role: str, count: int, first: int = 0) -> Tensor:
        """Units first .. count - 1 -> [batch, tokens, kv_heads, dim]."""
        parts = tuple(stored[layer, :, first:count] for stored in self.units[role])
        out = self.form.decode(role, tuple(part.flatten(0, 1) for part in parts), self.dtype)
        return out.unflatten(0, (len(parts[0]), count - first)).flatten(1, 2)

    def keep(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in this order."""
        batch = self.recent["k"].shape[1]
        if not rows or not all(type(row) is int and 0 <= row < batch for row in rows):
            raise PromptError(illegal("rows", rows, f"must be a list of one or more of 0 .. {batch - 1}"))
        index = torch.tensor(rows, device=self.recent["k"].device)
        self.units = {role: tuple(p.index_select(1, index) for p in parts) for role, parts in self.units.items()}
        self.recent = {role: x.index_select(1, index) for role, x in self.recent.items()}

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens: exact up to `residual` tokens back, else see above."""
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise PromptError(f"length={length} must be between 0 and the {self.length} tokens stored")
        self.lengths = [length] * len(self.lengths)
        own = length // self.form.unit * self.form.unit
        lost = own < length and own < max(self.oldest)
        self.oldest = [min(oldest, own) for oldest in self.oldest]
        if not self.form.residual or not lost:
            return
        at = own % (2 * self.form.residual)
        for layer in range(len(self.lengths)):
            for role in "kv":
                unit = own // self.form.residual
                self.recent[role][layer, :, at : at + self.form.residual] = self._read(layer, role, unit + 1, unit)
        self.reopened += 1
