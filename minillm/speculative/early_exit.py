"""The target's own first layers draft: no second model, no second download, the weights are there already.

Chapter 16. Draft and Verify (Zhang et al. 2024, arXiv:2309.08168) skips layers, LayerSkip (Elhoushi et al. 2024,
arXiv:2404.16710) exits early and trains the model for it. A model that was not trained to be left early guesses
badly: its last norm and head have never seen what layer 2 says.
"""

from __future__ import annotations

import copy

from torch import nn

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder


def first_layers(model: Decoder, count: int, name: str = "layers") -> Decoder:
    """A Decoder of the first `count` layers, then the model's last norm and head. All weights are the model's own.
    name: of `count`, in an error."""
    layers = model.config.num_layers
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count < layers:
        raise ParamsError(illegal(name, count, f"must be a whole number from 1 to {layers - 1}"))
    exit = copy.copy(model)
    exit._modules = dict(model._modules)
    exit.layers = nn.ModuleList(list(model.layers)[:count])
    changes = {"windows": model.config.windows[:count]} if model.config.windows else {}
    if model.config.local_layers:
        changes["local_layers"] = tuple(i for i in model.config.local_layers if i < count)
    exit.config = model.config.with_changes(num_layers=count, **changes)
    return exit
