"""Every built notebook is fresh and runs: chapters and solutions without an error, untouched exercises "not started".

All in fast mode (MINILLM_FAST=1), under nbval, as a reader's `pytest --nbval-lax` would run them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jupytext")

from minillm.lab import build, masters
from minillm.lab.check import tasks
from minillm.lab.grade_run import run
from minillm.lab.masters import CHECK

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.py"))
EXERCISES = sorted(path.stem for path in (ROOT / "solutions").glob("[0-9][0-9]_*.py"))


def nbval(path: Path) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "MPLBACKEND"))}
    env |= {"MINILLM_FAST": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "--nbval-current-env", "-p", "no:cacheprovider"]
    command += ["--nbval-cell-timeout=300", "-c", os.devnull, f"--rootdir={path.parent}", str(path)]
    return subprocess.run(command, cwd=path.parent, env=env, capture_output=True, text=True, timeout=900)


def test_built_notebooks_match_their_masters():
    found = build.find_stale(ROOT)
    if not os.environ.get("CI"):  # on a reader's machine exercises are there to be edited
        found = {k: v for k, v in found.items() if not (k.startswith("exercises") and v == "was edited by hand")}
    hint = "run: python -m minillm.lab.build"
    assert not found, "\n".join([*(f"{file} {reason}" for file, reason in found.items()), hint])


def test_every_chapter_has_an_exercise():
    assert CHAPTERS == EXERCISES


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_runs(name):
    done = nbval(ROOT / "notebooks" / f"{name}.ipynb")
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("name", EXERCISES)
def test_a_solution_passes_its_checks(name):
    done = nbval(ROOT / "solutions" / f"{name}.ipynb")
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("name", EXERCISES)
def test_an_untouched_exercise_is_not_started_and_nothing_else_fails(name):
    notebook = masters.build_cells(ROOT / "solutions" / f"{name}.py", "exercise")
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    verdicts, cells, problem = run(notebook, ROOT / "exercises" / f"{name}.ipynb")
    assert not problem
    assert {task: v["status"] for task, v in verdicts.items()} == {t.id: "not started" for t in tasks(name[:2])}
    assert len(cells) == len(sources)
    for number, source in enumerate(sources):
        is_check = bool(CHECK.search(source))
        assert cells[number]["failed"] == is_check, f"code cell {number + 1}:\n{source}\n{cells[number]['text']}"
        assert not is_check or "not started" in cells[number]["text"]


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_has_the_parts_that_readers_expect(name):
    notebook = masters.build_cells(ROOT / "solutions" / f"{name}.py", "exercise")
    count = len(tasks(name[:2]))
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown").lower()
    assert 3 <= count <= 6
    assert prose.count("<details>") >= 3 * count, "three hints a task: a nudge, the plan, 'my values look wrong'"
    assert "debug it" in prose
    assert "estimate it" in prose
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "SOLUTION" not in code
