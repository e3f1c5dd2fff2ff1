"""Where a compiled step calls back: operators that the compiler does not look into.

Chapter 10. Attention belongs to the cache of whoever called, and a packed or quantised product to its own module. To
torch.compile each is one operator with a name; what it does is looked up when it is called.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor, nn


class Called(Protocol):
    """A model whose steps call back."""

    linears: list[nn.Module]  # by the index of a CalledLinear

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Layer `index` attends: q, k, v [rows, heads, dim] -> [rows, heads, dim]."""

    def attend_out(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same, and the projection behind it -> [rows, 1, hidden]."""


class CalledLinear(nn.Module):
    """A linear that the compiler does not look into: it is called as it is, packed or quantised."""

    def __init__(self, key: str, index: int, out_features: int) -> None:
        super().__init__()
        self.key, self.index, self.out_features = key, torch.tensor(index), out_features

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.minillm.linear(self.key, self.index, self.out_features, x)


def called_linears(key: str, linears: dict[str, nn.Module], first: int = 0) -> dict[str, nn.Module]:
    """For each linear the operator that calls it, by the place it will have among the decoder's."""
    return {name: CalledLinear(key, first + i, each.out_features) for i, (name, each) in enumerate(linears.items())}


def register(model: Called) -> str:
    """The key under which operators find this model, as long as somebody else holds it."""
    key = f"model {next(_KEYS)}"
    _MODELS[key] = model
    return key


class Callback:
    """The cache that the compiler sees: one operator, which it does not look into. hidden: the width behind the
    output projection, if the operator is to project too."""

    def __init__(self, key: str, hidden: int | None = None) -> None:
        self.key, self.hidden = key, hidden

    def attend(self, layer: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.hidden is None:
            return torch.ops.minillm.attend(self.key, layer, q, k, v)
        return torch.ops.minillm.attend_out(self.key, layer, self.hidden, q, k, v)


# An operator has a name but no `self`: its first argument says which model is meant.
_KEYS = itertools.count()
_MODELS: weakref.WeakValueDictionary[str, Called] = weakref.WeakValueDictionary()
_LIBRARY = torch.library.Library("minillm", "DEF")
_LIBRARY.define("attend(str key, Tensor layer, Tensor q, Tensor k, Tensor v) -> Tensor")
_LIBRARY.define("attend_out(str key, Tensor layer, int hidden, Tensor q, Tensor k, Tensor v) -> Tensor")
_LIBRARY.define("linear(str key, Tensor index, int out_features, Tensor x) -> Tensor")
_LIBRARY.impl("attend", lambda key, index, q, k, v: _MODELS[key].attend(int(index), q, k, v), "CPU")
_LIBRARY.impl("attend_out", lambda key, index, hidden, q, k, v: _MODELS[key].attend_out(int(index), q, k, v), "CPU")
_LIBRARY.impl("linear", lambda key, index, out, x: _MODELS[key].linears[int(index)].forward(x), "CPU")
torch.library.register_fake(
    "minillm::attend", lambda key, index, q, k, v: q.new_empty((*q.shape[:-1], v.shape[-1])), lib=_LIBRARY
)
torch.library.register_fake(
    "minillm::attend_out", lambda key, index, hidden, q, k, v: q.new_empty((q.shape[0], 1, hidden)), lib=_LIBRARY
)
torch.library.register_fake(
    "minillm::linear", lambda key, index, out, x: x.new_empty((*x.shape[:-1], out)), lib=_LIBRARY
)
