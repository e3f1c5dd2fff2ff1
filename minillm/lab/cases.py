"""What an author of a check writes: cases, and hints that recognise a mistake by what it computes.

    yield Case((layers, length), expected)              # call the reader's function on these arguments
    yield Value(17.2e9, rtol=0.01)                      # the answer is a number
    yield Drive(lambda Cache: ..., expected, "what")    # drive the reader's class or object by hand
    yield Faster(naive, args, factor=1.5)               # speed, looked at only after all other cases pass
    Hint("the factor 2, for K and V, is missing", wrong=lambda layers, length: layers * length)

All chapters.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Hint:
    """A likely mistake. Said when `wrong` gives what the reader's answer gave, or when `when` is true.

    `wrong` is an answer with the mistake in it: a function with the task's signature (for Drive, whatever the
    answer is; for Value, a number). `when(got, expected, case)` is free; `got` is the exception if one was raised.
    """

    text: str
    wrong: Any = None
    when: Callable[[Any, Any, "Case"], bool] | None = None


@dataclass
class Case:
    """One call of the reader's function. The reader gets copies of `args` and `kwargs`; `expected` stays here."""

    args: tuple = ()
    expected: Any = None
    kwargs: dict = field(default_factory=dict)
    rtol: float | None = None
    atol: float | None = None
    dtype: Any = None  # demanded exactly where given; else only bool, integer, floating, complex must agree
    raises: type[BaseException] | None = None  # the call must raise this
    may_mutate: bool = False  # may the function change its arguments?
    compare: Callable[[Any, Any], str | None] | None = None  # (got, expected) -> what is wrong, or None
    call: str = ""  # how the call is shown; made from the arguments where empty
    hints: list[Hint] = field(default_factory=list)
    run: Callable[[Any], Any] | None = None  # (answer) -> got, in place of the call
    is_value: bool = False
    secret: bool = False  # an estimate: neither message nor hint may give the number away
    faster_than: Callable | None = None
    factor: float = 1.0
    pairs: int = 7


def Value(expected: Any, rtol: float | None = 0.01, what: str = "your answer", **options) -> Case:
    """The answer itself is the value: a number (int, float or one-element tensor), or a list or dict of them."""
    return Case((), expected, rtol=rtol, call=what, is_value=True, **options)


def Drive(run: Callable[[Any], Any], expected: Any, call: str, **options) -> Case:
    """`run(answer)` uses the reader's class or object and returns what to compare. `call` says what it did."""
    return Case((), expected, run=run, call=call, **options)


def Faster(naive: Callable, args: tuple = (), factor: float = 1.5, pairs: int = 7, **options) -> Case:
    """The median of paired, alternating runs must beat `naive` by `factor`: set it from measured noise."""
    return Case(args, None, faster_than=naive, factor=factor, pairs=pairs, may_mutate=True, **options)


class Rng(random.Random):
    """Seeded inputs: Python's random numbers, and tensors from a generator of their own."""

    def __init__(self, seed: str):
        super().__init__(seed)
        self._seed, self._generator = seed, None

    @property
    def generator(self):
        """A torch.Generator with the task's own seed."""
        import torch

        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.getrandbits(48))
        return self._generator

    def tensor(self, *shape: int, scale: float = 1.0, dtype=None):
        """Normal values of that shape, float32 unless `dtype` is given."""
        import torch

        values = torch.randn(shape, generator=self.generator) * scale
        return values if dtype is None else values.to(dtype)

    def ints(self, high: int, *shape: int):
        """Integers in [0, high), int64."""
        import torch

        return torch.randint(high, shape, generator=self.generator)
