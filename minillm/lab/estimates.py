"""What most checks share: mistakes by name, and the cases of an "Estimate it" task that asks for several numbers.

All chapters.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from minillm.lab.cases import Case, Drive, Hint
from minillm.lab.compare import as_number


def slips(table: Mapping[str, Any]) -> list[Hint]:
    """{what went wrong: an answer with that mistake in it} as hints."""
    return [Hint(text, wrong=wrong) for text, wrong in table.items()]


def estimates(name: str, table: Mapping[str, tuple], rtol: float = 0.01) -> Iterator[Case]:
    """A case for each number of the dictionary that the reader's function `name` returns, without giving any away.

    table: key -> (expected, {what a slip gives: its name}), or (expected, tolerance, {...}) where the relative
    tolerance is not rtol: 0 for a number that is counted and not estimated. A slip is named within half of it, or
    0.2 %.
    """
    for key, (expected, *own, named) in table.items():
        tolerance = own[0] if own else rtol
        yield Drive(
            lambda answer, key=key: answer()[key],
            expected,
            f"{name}()[{key!r}]",
            compare=within(key, tolerance),
            secret=True,
            hints=[Hint(text, when=near(value, max(tolerance / 2, 0.002))) for value, text in named.items()],
        )


def within(key: str, tolerance: float):
    """Compare with a relative tolerance; the message does not hold the number."""

    def compare(got, expected) -> str | None:
        value = as_number(got)
        if value is None:
            return f"{key!r}: expected a number, got {got!r}"
        if abs(value - expected) <= tolerance * abs(expected):
            return None
        return f"{key!r}: {value:.5g} is " + (
            f"more than {100 * tolerance:g} % off" if tolerance else "not the number"
        )

    return compare


def near(value: float, tolerance: float):
    """A `when`: the answer is this number."""

    def when(got, expected, case) -> bool:
        number = as_number(got)
        return number is not None and abs(number - value) <= tolerance * abs(value)

    return when
