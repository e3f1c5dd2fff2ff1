"""Mistakes that any task can have, recognised from the two values alone: a missing return, swapped dimensions, a
constant factor, NaN. Used where no hint of the task's own fits. All chapters.
"""

import math
from collections.abc import Iterator
from typing import Any

from minillm.lab.compare import as_number, is_array, tensor_of

# Ratios that have a name of their own: GB against GiB, bits against bytes and so on.
FACTORS = {
    8.0: "bits where bytes were asked for?",
    1 / 8: "bytes where bits were asked for?",
    1024.0: "a prefix too far, 1024 against 1?",
    1000.0: "a prefix too far, 1000 against 1?",
    1e9: "the base unit where giga was asked for?",
    1e-9: "giga where the base unit was asked for?",
    1e-3: "milli and the base unit mixed up?",
    1.073741824: "GiB and GB mixed up?",
    1 / 1.073741824: "GiB and GB mixed up?",
    1.048576: "MiB and MB mixed up?",
    1 / 1.048576: "MiB and MB mixed up?",
}


def generic_hint(got: Any, expected: Any, secret: bool = False) -> str:
    """A likely mistake, or an empty text. secret: no ratio, from which the expected number could be read off."""
    if isinstance(got, BaseException) or expected is None:
        return ""
    if got is None:
        return "nothing was returned: is there a `return`?"
    if is_array(expected):
        got = tensor_of(got) if is_array(got) else None
        return "" if got is None else _tensor_hint(got, tensor_of(expected))
    one, other = as_number(got), as_number(expected)
    if one is None or not other:
        return ""
    return next(factors(one / other), "") if secret else _ratio_hint(one / other, "your value is")


def factors(ratio: float) -> Iterator[str]:
    """The mistake that has this factor, if one has."""
    return (text for factor, text in FACTORS.items() if math.isclose(ratio, factor, rel_tol=1e-3))


def _tensor_hint(got, expected) -> str:
    import torch

    if got.shape != expected.shape:
        if sorted(got.shape) == sorted(expected.shape):
            return "two dimensions are swapped"
        if got.numel() == expected.numel():
            return "the right number of values in the wrong shape"
        if got.squeeze().shape == expected.squeeze().shape:
            return "a dimension of size 1 is missing or too many (keepdim?)"
        return ""
    if got.is_complex() or expected.is_complex() or expected.numel() == 0:
        return ""
    g, e = got.double(), expected.double()
    if torch.isnan(g).any() and not torch.isnan(e).any():
        return "nan: a division by zero, or a softmax over a row that is all -inf"
    if g.ndim >= 2 and g.shape[-1] == g.shape[-2] and torch.allclose(g.mT, e, rtol=1e-4, atol=1e-6):
        return "the last two dimensions are swapped"
    solid = e.abs() > 1e-6 * e.abs().max()
    if solid.any():
        ratio = (g[solid] / e[solid]).median().item()
        if math.isfinite(ratio) and ratio and torch.allclose(g, ratio * e, rtol=1e-3, atol=1e-6):
            return _ratio_hint(ratio, "every value is")
    shift = (g - e).median().item()
    if math.isfinite(shift) and abs(shift) > 1e-6 and torch.allclose(g - shift, e, rtol=1e-4, atol=1e-6):
        return f"every value is off by {shift:+.4g}"
    return ""


def _ratio_hint(ratio: float, subject: str) -> str:
    """Say a ratio only where it is one that a mistake makes: a whole number, its inverse, or a named factor."""
    if not math.isfinite(ratio) or ratio == 0 or abs(ratio - 1) < 1e-3:
        return ""
    if ratio < 0 and abs(ratio + 1) < 1e-3:
        return f"{subject} the negative of the expected one"
    for text in factors(ratio):
        return f"{subject} {ratio:.4g} x the expected one: {text}"
    whole = ratio if ratio > 1 else 1 / ratio
    if abs(whole - round(whole)) < 1e-3 * whole and whole < 1e4:
        way = "too large" if ratio > 1 else "too small"
        return f"{subject} {round(whole)} x {way}"
    return ""
