"""Compare an answer with the expected value, and say in one line where they first differ.

Tensors, numbers, strings, and lists, tuples, dicts and sets of them. NaN never passes for a number, a shape that
would only broadcast is a wrong shape, and True is not 1. All chapters.
"""

import math
import numbers
import re
from collections import deque
from collections.abc import Iterator, Mapping, MappingView
from decimal import Decimal
from typing import Any

RTOL, ATOL = 1e-4, 1e-5  # float32 answers against float64 oracles; ATOL is relative to the largest expected value


def mismatch(got: Any, expected: Any, rtol=None, atol=None, dtype=None, where: str = "") -> str | None:
    """None where `got` is right; else one line. `rtol`, `atol`: for floats; `dtype`: demanded exactly if given."""
    if isinstance(got, Iterator | MappingView | deque):
        got = list(got)
    if is_array(expected):
        return _tensor(got, expected, rtol, atol, dtype, where)
    if isinstance(expected, bool) or expected is None or isinstance(expected, str | bytes):
        return _exact(got, expected, where)
    if isinstance(expected, numbers.Real):
        return _number(got, expected, rtol, atol, where)
    if isinstance(expected, Mapping):
        return _mapping(got, expected, rtol, atol, dtype, where)
    if isinstance(expected, list | tuple):
        return _sequence(got, expected, rtol, atol, dtype, where)
    return _exact(got, expected, where)


def whole(got: Any, expected: Any) -> str | None:
    """A `compare` for counts and places: as `mismatch`, and a float is refused even where it is equal."""
    got = list(got) if isinstance(got, Iterator) else got
    if wrong := mismatch(got, expected):
        return wrong
    found = floats(got)
    return f"expected ints, got the float {found[0]!r}: a count or a place is a whole number" if found else None


def floats(value: Any) -> list[float]:
    """The numbers that are not whole ones by type, in lists of lists."""
    if is_array(value):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [number for item in value for number in floats(item)]
    return [value] if isinstance(as_number(value), float) else []


def is_array(value: Any) -> bool:
    """A torch tensor or a numpy array."""
    module = type(value).__module__.partition(".")[0]
    return module in ("torch", "numpy") and hasattr(value, "shape") and hasattr(value, "reshape")


def as_number(value: Any) -> float | int | None:
    """A Python number from int, float, numpy scalar or one-element tensor; None from anything else, and from bool."""
    if is_array(value):
        if math.prod(value.shape) != 1:
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        return None
    if isinstance(value, Decimal) and value.is_snan():
        return math.nan
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _exact(got, expected, where) -> str | None:
    if is_array(got) and isinstance(expected, bool) and math.prod(got.shape) == 1:
        got = got.item()
    if type(got) is type(expected) and got == expected:
        return None
    return f"{where}expected {describe(expected)}, got {describe(got)}"


def _number(got, expected, rtol, atol, where) -> str | None:
    value = as_number(got)
    if value is None:
        return f"{where}expected a number, {describe(expected)}, got {describe(got)}"
    if rtol is None:
        rtol = 0.0 if isinstance(expected, numbers.Integral) else RTOL
    if value == expected:
        return None
    if math.isfinite(expected) and abs(value - expected) <= (atol or 0.0) + rtol * abs(expected):
        return None
    return f"{where}expected {describe(expected)}, got {describe(value)}"


def _mapping(got, expected, rtol, atol, dtype, where) -> str | None:
    if not isinstance(got, Mapping):
        return f"{where}expected a dict, got {describe(got)}"
    if set(got) != set(expected):
        return f"{where}expected the keys {describe(list(expected))}, got {describe(list(got))}"
    found = (mismatch(got[key], expected[key], rtol, atol, dtype, f"{where}[{key!r}] ") for key in expected)
    return next((text for text in found if text), None)


def _sequence(got, expected, rtol, atol, dtype, where) -> str | None:
    if is_array(got) and not any(is_array(item) for item in expected):
        got = got.tolist()
    if not isinstance(got, list | tuple | range):
        return f"{where}expected {describe(expected)}, got {describe(got)}"
    if len(got) != len(expected):
        return f"{where}expected {len(expected)} items, {describe(expected)}, got {len(got)}, {describe(got)}"
    found = (mismatch(g, e, rtol, atol, dtype, f"{where}[{i}] ") for i, (g, e) in enumerate(zip(got, expected)))
    return next((text for text in found if text), None)


def tensor_of(value: Any):
    """A detached CPU tensor from a tensor, an array, a list or a number; None where that is impossible."""
    import torch

    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        return None


def kind(tensor) -> str:
    """bool, integer, floating or complex."""
    if tensor.is_complex():
        return "complex"
    if tensor.is_floating_point():
        return "floating"
    return "bool" if str(tensor.dtype) == "torch.bool" else "integer"


def _tensor(got, expected, rtol, atol, dtype, where) -> str | None:
    import torch

    expected, raw = tensor_of(expected), got
    got = None if got is None or isinstance(got, str) else tensor_of(got)
    if got is None:
        return f"{where}expected a tensor of shape {list(expected.shape)}, got {describe(raw)}"
    if got.shape != expected.shape:
        return f"{where}expected shape {list(expected.shape)}, got shape {list(got.shape)}"
    if kind(got) != kind(expected):
        return f"{where}expected {kind(expected)} values, got dtype {_dtype(got)}"
    if dtype is not None and got.dtype != dtype:
        return f"{where}expected dtype {str(dtype).removeprefix('torch.')}, got {_dtype(got)}"
    if kind(expected) in ("bool", "integer"):
        wrong = got != expected
    else:
        wide = torch.complex128 if expected.is_complex() else torch.float64
        g, e = got.to(wide), expected.to(wide)
        finite = e[torch.isfinite(e)].abs()
        if atol is None:
            atol = ATOL * (finite.max().item() if finite.numel() else 0.0)
        close = (g - e).abs() <= atol + (RTOL if rtol is None else rtol) * e.abs()
        wrong = ~(close & torch.isfinite(e)) & (g != e) & ~(torch.isnan(g) & torch.isnan(e))
    if not wrong.any():
        return None
    first = torch.nonzero(wrong)[0].tolist() if wrong.ndim else []
    at, total = f" at {first}" if first else "", wrong.numel()
    one_g, one_e = got[tuple(first)].item(), expected[tuple(first)].item()
    count = f" ({int(wrong.sum())} of {total} values differ)" if total > 1 else ""
    return f"{where}expected {describe(one_e)}{at}, got {describe(one_g)}{count}"


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def describe(value: Any, limit: int = 60) -> str:
    """A short text for a message: small values whole, tensors by shape, no memory addresses."""
    if is_array(value):
        tensor = tensor_of(value)
        if tensor is not None and tensor.numel() <= 8 and tensor.ndim <= 1:
            return f"tensor({describe(tensor.tolist(), limit)})"
        plain = ("float32", "int64")
        name = str(value.dtype).removeprefix("torch.")
        return f"tensor{list(value.shape)}" + ("" if name in plain else f" {name}")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        open_, close = "[]" if isinstance(value, list) else "()"
        text = open_ + ", ".join(describe(item, limit) for item in value[:40]) + close
    elif callable(value) and hasattr(value, "__name__"):
        text = value.__name__
    else:
        text = repr(value)
        if re.search(r" at 0x[0-9a-f]+", text):
            text = f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 4] + " ..." + text[-1:] * (text[-1:] in ")]}")
