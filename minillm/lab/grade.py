"""minillm grade: run an exercise under nbval and say, task by task, what is done.

The notebook runs in a copy and in a kernel of its own. The verdict comes from the checks themselves, which write it
to a file under a one-time number; what a notebook prints counts for nothing. All chapters.
"""

import json
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from minillm.lab.check import MARKS, Task, tasks
from minillm.lab.grade_run import ROOT, dead, run

CHECK = re.compile(r"""^\s*check\(\s*["']([^"']+)["']""", re.MULTILINE)
MARK = {**MARKS, "missing": "?"}
COLOR = {"passed": "green", "failed": "red", "blocked": "yellow", "missing": "magenta", "not started": "dim"}


@dataclass
class Row:
    """One task: status is passed, failed, not started, blocked or missing."""

    task: str
    title: str
    points: int
    of: int
    status: str
    message: str = ""


@dataclass
class Report:
    """The grade of one notebook. `error` says why it could not be run, or not to its end."""

    notebook: str
    rows: list[Row] = field(default_factory=list)
    error: str = ""

    @property
    def points(self) -> int:
        return sum(row.points for row in self.rows)

    @property
    def of(self) -> int:
        return sum(row.of for row in self.rows)

    @property
    def exit_code(self) -> int:
        """0 all passed, 1 not all, 2 could not run."""
        if self.error:
            return 2
        return 0 if self.rows and all(row.status == "passed" for row in self.rows) else 1

    def as_dict(self) -> dict:
        return {"notebook": self.notebook, "points": self.points, "of": self.of, "error": self.error or None} | {
            "tasks": [asdict(row) for row in self.rows]
        }


def grade(path: str | Path) -> Report:
    """Grade one notebook. Never raises for what a reader may have done to it; the reader's file is only read."""
    import nbformat

    path = Path(path)
    report = Report(str(path))
    try:
        notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
        sources = [str(cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    except FileNotFoundError:
        report.error = f"there is no file {path}"
        return report
    except IsADirectoryError:
        found = next(iter(sorted(path.glob("[0-9][0-9]_*.ipynb"))), path / "NN_name.ipynb")
        report.error = f"{path} is a folder; name a notebook, such as {found}"
        return report
    except Exception as error:
        report.error = f"{path} is not a notebook: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return report
    try:
        known = tasks(chapter_of(notebook, path, sources))
    except Exception as error:
        report.error = f"the checks of {path.name} cannot be loaded: {type(error).__name__}: {error}"
        return report
    if not known:
        report.error = f"no checks belong to {path.name}: expected an exercise named NN_name.ipynb"
        return report
    if untouched(notebook):
        report.rows = [Row(t.id, t.title, 0, t.points, "not started") for t in known]
        return report
    verdicts, cells, problem = run(notebook, path)
    report.rows = [judge(task, verdicts.get(task.id), sources, cells) for task in known]
    report.error = problem
    return report


def chapter_of(notebook, path: Path, sources: list[str]) -> str:
    """The number of the chapter: from the notebook's own metadata, its file name, or the first check in it."""
    master = notebook.metadata.get("minillm", {}).get("master", "")
    found = re.match(r"\d\d", Path(master).name) or re.match(r"\d\d", path.name)
    return found[0] if found else next((m[1].split(".")[0] for s in sources if (m := CHECK.search(s))), "")


def untouched(notebook) -> bool:
    """Is this an exercise exactly as it was built? Then there is nothing to run."""
    from minillm.lab.masters import cells_digest

    meta = notebook.metadata.get("minillm", {})
    return meta.get("kind") == "exercise" and meta.get("cells_hash") == cells_digest(notebook)


def judge(task: Task, verdict: dict | None, sources: list[str], cells: dict[int, dict]) -> Row:
    """The row of one task, from its check's verdict or, where the check never ran, from its cell."""
    row = Row(task.id, task.title, 0, task.points, "missing")
    if verdict:
        row.status = verdict["status"] if verdict["status"] in MARKS else "failed"
        row.points = task.points if row.status == "passed" else 0
        lines = verdict["message"].split("\n")
        count = f"{verdict['passed']}/{verdict['total']}" if row.status in ("failed", "passed") else ""
        row.message = "\n".join(filter(None, [count, *(line.strip() for line in lines[1:])]))
        return row
    here = next((n for n, source in enumerate(sources) if task.id in CHECK.findall(source)), None)
    if here is None:
        row.message = f'the notebook no longer calls check("{task.id}", ...)'
        return row
    outcome = cells.get(here)
    if outcome is None or dead(outcome):
        row.status, row.message = "blocked", "not run: the notebook stopped before this cell"
    elif not outcome["failed"]:
        row.message = "the check did not run: is `check` redefined in this notebook?"
    else:
        broken = next(
            (n for n in range(here) if cells.get(n, {}).get("failed") and not CHECK.search(sources[n])), None
        )
        error = error_line(outcome["text"])
        if broken is not None and error.startswith("NameError"):
            row.status = "blocked"
            row.message = f"code cell {broken + 1} above fails: {error_line(cells[broken]['text'])}"
        else:
            row.status, row.message = "failed", error
    return row


def error_line(text: str) -> str:
    """The last line of a traceback that names an error."""
    lines = [line.strip() for line in text.splitlines()]
    named = [line for line in lines if re.match(r"[A-Z]\w*(Error|Exception|Interrupt|Warning|Exit)\b", line)]
    limit = [line for line in lines if line.startswith("Timeout of")]
    return (limit or named[-1:] or lines[-1:] or ["failed"])[-1][:200]


def exercises(root: Path = ROOT) -> list[Path]:
    return [p for p in sorted((root / "exercises").glob("[0-9][0-9]_*.ipynb")) if not p.name.endswith(".new.ipynb")]


def resolve(name: str | Path, root: Path = ROOT) -> Path:
    """A path as given, or an exercise by its number or name: "02", "02_kv_cache"."""
    path = Path(name)
    if not path.exists() and path.parent == Path():
        found = [p for p in exercises(root) if p.stem == str(name) or p.stem[:2] == str(name)]
        return found[0] if found else path
    return path


def main(paths: list[str | Path] | None = None, json_output: bool = False, root: Path = ROOT) -> int:
    """Grade the notebooks, or every exercise where none is named; print; return the exit code."""
    chosen = [resolve(p, root) for p in paths] if paths else exercises(root)
    if not chosen:
        print(f"there are no exercises in {root / 'exercises'}", file=sys.stderr)
        return 2
    reports = grade_all(chosen)
    if json_output:
        data = [report.as_dict() for report in reports]
        print(json.dumps(data[0] if paths and len(data) == 1 else data, indent=2, ensure_ascii=False))
    else:
        show(reports, progress=not paths)
    return max(report.exit_code for report in reports)


def grade_all(paths: list[Path]) -> list[Report]:
    """Grade one after the other; a terminal shows which one is running."""
    from rich.console import Console

    reports = []
    with Console(stderr=True).status("") as status:
        for path in paths:
            status.update(f"running {path.name}")
            reports.append(grade(path))
    return reports


def show(reports: list[Report], progress: bool) -> None:
    """Tables for a terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if progress:
        table = Table("exercise", "tasks", "points", "", title="The course")
        for report in reports:
            marks = "".join(f"[{COLOR[row.status]}]{MARK[row.status]}[/]" for row in report.rows)
            done = round(12 * report.points / report.of) if report.of else 0
            bar = f"[green]{'█' * done}[/][dim]{'░' * (12 - done)}[/]"
            note = f"{bar} [red]{escape(report.error)}[/]" if report.error else bar
            table.add_row(Path(report.notebook).stem, marks, f"{report.points}/{report.of}", note)
        console.print(table)
        console.print("✓ passed  ✗ failed  ○ not started  ⊘ blocked  ? check missing")
        return
    for report in reports:
        if report.rows:
            table = Table("task", "points", "", "message", title=Path(report.notebook).name)
            for row in report.rows:
                state = f"[{COLOR[row.status]}]{MARK[row.status]} {row.status}[/]"
                table.add_row(row.task, f"{row.points}/{row.of}", state, escape(row.message))
            console.print(table)
            console.print(f"{report.points} of {report.of} points")
        if report.error:
            console.print(f"[red]could not run: {escape(report.error)}[/]")
