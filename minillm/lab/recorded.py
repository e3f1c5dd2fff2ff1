"""Recorded figures: what was measured once on a GPU, drawn beside the reader's own measurement.

Each file of `notebooks/measurements/*.json` holds a list of records as `minillm bench --json` writes them. A
figure that has no record is shown as "not measured"; nothing is ever estimated in its place. All chapters.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from minillm.lab import units

FIELDS = ("name", "value", "unit", "spread", "model", "workload", "device", "versions", "commit")


@dataclass(frozen=True)
class Recorded:
    """One recorded figure. False, with value None, where there is no record: `if figure: draw(figure.value)`."""

    name: str
    value: float | None = None
    unit: str = ""
    spread: float | list | None = None
    model: str = ""
    workload: str | dict = ""
    device: str = ""
    versions: dict = field(default_factory=dict)
    commit: str = ""

    def __bool__(self) -> bool:
        return self.value is not None

    def __str__(self) -> str:
        if self.value is None:
            return "not measured"
        return f"{units.show(self.value, self.unit)} ({self.device})"

    def _repr_markdown_(self) -> str:
        return f"{self.name}: {self}"


def folder() -> Path:
    """Where the records are: MINILLM_MEASUREMENTS, else notebooks/measurements of this checkout."""
    named = os.environ.get("MINILLM_MEASUREMENTS")
    return Path(named) if named else Path(__file__).parents[2] / "notebooks" / "measurements"


def records(name: str | None = None, **where) -> list[Recorded]:
    """All records, or those of one name; `where` narrows by any field: `records("decode", model="tiny")`."""
    found = []
    for path in sorted(folder().glob("*.json")):
        for record in _read(path):
            same = all(getattr(record, key) == value for key, value in where.items())
            if same and name in (None, record.name):
                found.append(record)
    return found


def recorded(name: str, **where) -> Recorded:
    """The last record of that name; where there is none, a Recorded that is false and prints "not measured"."""
    found = records(name, **where)
    return found[-1] if found else Recorded(name)


def _read(path: Path) -> list[Recorded]:
    """The records of one file. A record without name, value, unit or device is an error, not a guess."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    rows = content if isinstance(content, list) else [content]
    for row in rows:
        missing = [key for key in ("name", "value", "unit", "device") if not isinstance(row, dict) or key not in row]
        if missing:
            raise ValueError(f"{path.name}: a record lacks {', '.join(missing)}")
    return [Recorded(**{key: row[key] for key in FIELDS if key in row}) for row in rows]
