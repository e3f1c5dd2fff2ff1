"""Fast mode: the same cells and the same claims at smaller sizes, so that tests can run every notebook.

`MINILLM_FAST=1` switches it on. All chapters.
"""

import os
from typing import TypeVar

T = TypeVar("T")


def is_fast() -> bool:
    """True where the environment variable MINILLM_FAST is set to anything but 0."""
    return os.environ.get("MINILLM_FAST", "0") not in ("", "0")


def pick(full: T, quick: T) -> T:
    """`full` for a reader, `quick` in fast mode: the one place where a notebook's sizes and repeats fork."""
    return quick if is_fast() else full
