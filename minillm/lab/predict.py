"""Predict, then measure: a number written down before the cell that shows it, kept beside what was measured.

    predict("02.kv_bytes", 2 * layers * kv_heads * head_dim * length * 4, "B")
    reveal("02.kv_bytes", cache_bytes)
    predictions()                       # at the end of the notebook: all of them in one table

All chapters.
"""

import html
import math
from dataclasses import dataclass

from minillm.lab import units


@dataclass
class Entry:
    """One prediction and, once it is revealed, the measurement beside it."""

    name: str
    predicted: float | None
    unit: str
    measured: float | None = None

    @property
    def ratio(self) -> float | None:
        """measured / predicted; 1 is a perfect prediction."""
        if self.predicted in (None, 0) or self.measured is None:
            return None
        return self.measured / self.predicted

    def row(self) -> tuple[str, str, str, str]:
        predicted = "no prediction" if self.predicted is None else units.show(self.predicted, self.unit)
        measured = "not revealed" if self.measured is None else units.show(self.measured, self.unit)
        return self.name, predicted, measured, "" if self.ratio is None else units.number(self.ratio)


_TABLE: dict[str, Entry] = {}  # one notebook is one process, so this is the notebook's own table


def predict(name: str, value, unit: str = "") -> None:
    """Write a prediction down. None or ... means "I have no idea yet": the measurement is then shown alone."""
    number = None if value is None or value is ... else _number(name, value)
    _TABLE[name] = Entry(name, number, unit)
    print(f"{name}  predicted {_TABLE[name].row()[1]}")


def _number(name: str, value) -> float:
    """One finite number, or one clear error; a tensor or array of one element is a number too."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"{name}: {value!r} is not a finite number; write ... where you have no idea yet")
    return number


def reveal(name: str, measured, unit: str | None = None) -> None:
    """Show the measurement beside the prediction. The unit is the prediction's own unless given."""
    entry = _TABLE.setdefault(name, Entry(name, None, unit or ""))
    if unit is not None and entry.unit and unit != entry.unit:
        raise ValueError(f"{name} was predicted in {entry.unit!r} and is revealed in {unit!r}: use one unit")
    entry.measured = _number(name, measured)
    entry.unit = entry.unit or unit or ""
    _, predicted, shown, ratio = entry.row()
    print(f"{name}  predicted {predicted}  measured {shown}" + (f"  ratio {ratio}" if ratio else ""))


class Predictions:
    """The notebook's table of predictions: text in a terminal, a table in a notebook."""

    HEAD = ("prediction", "predicted", "measured", "measured / predicted")

    def __init__(self, entries: list[Entry]):
        self.entries = entries

    def rows(self) -> list[tuple[str, str, str, str]]:
        return [self.HEAD, *(entry.row() for entry in self.entries)]

    def __repr__(self) -> str:
        widths = [max(len(row[i]) for row in self.rows()) for i in range(4)]
        return "\n".join("  ".join(t.ljust(w) for t, w in zip(row, widths)).rstrip() for row in self.rows())

    def _repr_html_(self) -> str:
        def cells(row, tag):
            return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row) + "</tr>"

        body = "".join(cells(entry.row(), "td") for entry in self.entries)
        return f"<table>{cells(self.HEAD, 'th')}{body}</table>"


def predictions() -> Predictions:
    """All predictions of this notebook so far, in the order in which they were made."""
    return Predictions(list(_TABLE.values()))
