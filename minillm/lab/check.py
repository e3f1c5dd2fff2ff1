"""check("02.kv_bytes", my_function): run the reader's own object on fresh seeded inputs, beside an outside oracle.

A pass prints one stable line. Anything else raises one short message without a traceback of the checker: what was
called, expected against got at the first mismatch, and the likely mistake. Not started, wrong and blocked by an
earlier task read differently. The checks themselves are in `minillm/lab/checks/NN_name.py`. All chapters.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minillm.lab.answers import global_names, names_of
from minillm.lab.cases import Case, Drive, Faster, Hint, Rng, Value
from minillm.lab.examine import examine_cases

__all__ = ["Case", "CheckFailed", "Drive", "Faster", "Hint", "NotStarted", "Rng", "Value", "check", "register"]

MARKS = {"passed": "✓", "failed": "✗", "not started": "○", "blocked": "⊘"}


@dataclass
class Task:
    """One task of an exercise: where its cases come from and what it is worth."""

    id: str
    title: str
    points: int
    cases: Callable[[Rng], Iterable[Case]]
    hints: list[Hint] = field(default_factory=list)
    given: Any = None  # for "debug it": the function or class with the bug, as the reader is given it
    limit_s: float = 20.0


@dataclass
class Verdict:
    """What a check found. `status` is passed, failed, not started or blocked."""

    task: str
    status: str
    passed: int = 0
    total: int = 0
    detail: list[str] = field(default_factory=list)
    hint: str = ""

    @property
    def line(self) -> str:
        count = "not started" if self.status == "not started" else f"{self.passed}/{self.total}"
        return f"{MARKS[self.status]} {self.task}  {count}"

    @property
    def message(self) -> str:
        hint = [f"likely: {self.hint}"] if self.hint else []
        return "\n".join([self.line, *(f"  {text}" for text in [*self.detail, *hint])])


class CheckFailed(Exception):
    """The answer is wrong, or is blocked by an earlier one."""

    def __init__(self, verdict: Verdict):
        super().__init__(verdict.message)
        self.verdict = verdict

    def _render_traceback_(self) -> list[str]:  # what IPython shows in place of a traceback
        return self.verdict.message.split("\n")


class NotStarted(CheckFailed):
    """There is no answer yet: nothing is wrong."""


class UnknownTask(ValueError):
    """check() was given a name that no chapter has."""

    def _render_traceback_(self) -> list[str]:
        return [f"✗ {self}"]


_TASKS: dict[str, Task] = {}
_LOADED: set[str] = set()
_LEDGER: dict[str, tuple[str, set[str]]] = {}  # task -> (status, names of the answer), for this kernel


def register(
    task: str, *, points: int = 1, title: str, hints: Iterable[Hint] = (), given: Any = None, limit_s: float = 20.0
):
    """Decorate a generator of cases, `def cases(rng): yield Case(...)`, as the check of one task."""

    def add(cases: Callable[[Rng], Iterable[Case]]):
        _TASKS[task] = Task(task, title, points, cases, list(hints), given, limit_s)
        return cases

    return add


def folders() -> list[Path]:
    """Where checks are looked for; MINILLM_CHECKS adds a folder for a course of your own."""
    extra = os.environ.get("MINILLM_CHECKS")
    return [Path(__file__).parent / "checks", *([Path(extra)] if extra else [])]


def tasks(chapter: str) -> list[Task]:
    """The tasks of a chapter ("02"), in the order in which its file registers them."""
    for folder in folders():
        for path in sorted(folder.glob(f"{chapter}_*.py")):
            if str(path) not in _LOADED:
                _LOADED.add(str(path))
                spec = importlib.util.spec_from_file_location(f"minillm.lab.checks.{path.stem}", path)
                sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
    return [task for task in _TASKS.values() if task.id.split(".")[0] == chapter]


def find(task: str) -> Task:
    """The task of that name, or one clear error that lists the chapter's tasks."""
    if not isinstance(task, str):
        raise UnknownTask(f'check(task, answer): task must be a name, such as "02.kv_bytes"; got {task!r:.60}')
    known = tasks(task.split(".")[0])
    if task not in _TASKS:
        names = ", ".join(other.id for other in known) or "none"
        raise UnknownTask(f"there is no task {task!r}; this chapter has: {names}")
    return _TASKS[task]


def examine(task: str, answer: Any, ledger: dict | None = None) -> Verdict:
    """Run a check and return what it found: nothing is printed, raised or remembered."""
    entry, ledger = find(task), ledger or {}
    result = examine_cases(entry, answer)
    verdict = Verdict(task, result.status, result.passed, result.total, result.detail, result.hint)
    # An answer that calls an unfinished answer of another task is blocked, not wrong.
    unfinished = {name: other for other, (status, names) in ledger.items() if status != "passed" for name in names}
    used = global_names(answer) if result.status == "failed" else set()
    culprits = [result.unwritten] if result.unwritten else sorted(used - names_of(answer))
    for name in culprits:
        if unfinished.get(name, task) != task:
            verdict.status, verdict.hint = "blocked", ""
            first = f"blocked by {unfinished[name]}: your code uses `{name}`, whose check does not pass yet"
            verdict.detail = [first] if result.unwritten else [first, *verdict.detail]
            break
    return verdict


def check(task: str, answer: Any) -> None:
    """Check an answer: print one line if it is right, else raise one short message."""
    verdict = examine(task, answer, _LEDGER)
    _LEDGER[task] = (verdict.status, names_of(answer))
    _record(verdict)
    if verdict.status == "passed":
        print(verdict.line)
        return
    # `from None`: the reader sees the message, not the chain of the checker's own exceptions.
    raise (NotStarted if verdict.status == "not started" else CheckFailed)(verdict) from None


def _record(verdict: Verdict) -> None:
    """Under `minillm grade` the verdict goes to a file of the grader's, so that a printed ✓ proves nothing."""
    path = os.environ.get("MINILLM_GRADE_RECORD")
    if path:
        row = {"nonce": os.environ.get("MINILLM_GRADE_NONCE"), "message": verdict.message, **asdict(verdict)}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
