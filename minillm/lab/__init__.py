"""The lab: what notebooks and exercises use, and what builds and grades them.

    from minillm.lab import check, pick, plots, predict, predictions, recorded, reveal, explore

Plots and widgets are loaded when they are first asked for, so that `minillm.lab` itself stays light.
"""

from importlib import import_module

# `check`, `predict` and `recorded` name a file and the function in it. Importing the functions here makes the
# short names the functions for good, because Python binds a submodule to its package only when it first loads.
from minillm.lab.check import check
from minillm.lab.fast import is_fast, pick
from minillm.lab.predict import predict, predictions, reveal
from minillm.lab.recorded import recorded

__all__ = [
    "check",
    "explore",
    "is_fast",
    "pick",
    "plots",
    "predict",
    "predictions",
    "recorded",
    "reveal",
]


def __getattr__(name: str):
    if name == "explore":
        return import_module("minillm.lab.widgets").explore
    if name in ("plots", "widgets", "grade", "build", "units"):
        return import_module(f"minillm.lab.{name}")
    raise AttributeError(f"module 'minillm.lab' has no attribute {name!r}")
