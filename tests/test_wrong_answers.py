"""Every check is checked: it rejects plausible wrong answers with the right hint, calls a stub "not started", and
scores the solution full. A wrong answer that passes is a bug in the check.

`tests/wrong_answers/NN_name.py` holds WRONG = {task: {name: (answer, text)}}. An answer is source text, an object, or
a pair (old, new): the solution with that text replaced. `text` must stand in the message.
"""

import ast
import importlib.util
import linecache
from functools import lru_cache
from pathlib import Path

import pytest

from minillm.lab.check import examine, find, tasks

masters = pytest.importorskip("minillm.lab.masters")
pytest.importorskip("jupytext")

ROOT = Path(__file__).parents[1]
LEAST = 4  # wrong answers a task
FOLDERS = {"solutions": ROOT / "solutions", "wrong": Path(__file__).parent / "wrong_answers"}
CHAPTERS = sorted(path.stem for path in FOLDERS["solutions"].glob("[0-9][0-9]_*.py"))


@lru_cache
def exercise(path: Path, kind: str):
    """(cells, namespace, {task: checked expression}) of an exercise or its solution."""
    notebook = masters.build_cells(path, kind)
    return notebook, masters.definitions(notebook), masters.check_calls(notebook)


def load_wrong(path: Path) -> dict[str, dict[str, tuple]]:
    spec = importlib.util.spec_from_file_location(f"wrong_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


def replaced(notebook, old: str, new: str) -> str:
    """The source of the one cell that contains `old`, with `new` in its place."""
    cells = [c.source for c in notebook.cells if c.cell_type == "code" and not masters.CHECK.search(c.source)]
    holders = [source for source in cells if old in source]
    assert len(holders) == 1, f"{old!r} stands in {len(holders)} cells of the solution; it must be in one"
    assert holders[0].count(old) == 1, f"{old!r} stands in its cell {holders[0].count(old)} times; it must be unique"
    return holders[0].replace(old, new)


def judge(solution: Path, task: str, answer):
    """The verdict on a wrong answer, in the solution's namespace, which is put back afterwards."""
    notebook, space, calls = exercise(solution, "solution")
    before = dict(space)
    if isinstance(answer, tuple) and [type(part) for part in answer] == [str, str]:
        answer = replaced(notebook, *answer)
    try:
        if isinstance(answer, str):
            tree = ast.parse(answer)
            if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr):  # "'32'": the value itself
                return examine(task, eval(answer, space))
            file = f"<wrong answer {masters.digest(answer)}>"
            linecache.cache[file] = (len(answer), None, answer.splitlines(keepends=True), file)
            exec(compile(answer, file, "exec"), space)
            answer = eval(calls[task], space)
        return examine(task, answer)
    finally:
        space.clear()
        space.update(before)


def faults(solution: Path, wrong: dict[str, dict[str, tuple]], task: str) -> list[str]:
    """What is not as it should be with the wrong answers to one task."""
    listed = wrong.get(task, {})
    found = [] if len(listed) >= LEAST else [f"{task} has {len(listed)} wrong answers; {LEAST} are needed"]
    for name, (answer, text) in listed.items():
        verdict = judge(solution, task, answer)
        message = "\n".join(verdict.message.split("\n")[1:])
        if verdict.status != "failed":
            found.append(f"{task}, {name!r}: {verdict.status}")
        elif not text or text.lower() not in message.lower():
            found.append(f"{task}, {name!r}: {text!r} is not in the message:\n{message}")
    return found


def each_task():
    return [pytest.param(name, task.id, id=task.id) for name in CHAPTERS for task in tasks(name[:2])]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_task_has_a_check_cell_and_wrong_answers(chapter):
    path = FOLDERS["wrong"] / f"{chapter}.py"
    assert path.exists(), f"write {path.relative_to(ROOT)}"
    ids = [task.id for task in tasks(chapter[:2])]
    assert list(exercise(FOLDERS["solutions"] / f"{chapter}.py", "solution")[2]) == ids
    assert set(load_wrong(path)) == set(ids)


@pytest.mark.parametrize(("chapter", "task"), each_task())
def test_wrong_answers_are_rejected_with_the_right_hint(chapter, task):
    wrong = load_wrong(FOLDERS["wrong"] / f"{chapter}.py")
    problems = faults(FOLDERS["solutions"] / f"{chapter}.py", wrong, task)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("chapter", "task"), each_task())
def test_the_stub_is_not_started(chapter, task):
    _, space, calls = exercise(FOLDERS["solutions"] / f"{chapter}.py", "exercise")
    verdict = examine(task, eval(calls[task], space))
    assert (verdict.status, verdict.passed) == ("not started", 0), verdict.message


@pytest.mark.parametrize(("chapter", "task"), each_task())
def test_the_solution_scores_full(chapter, task):
    _, space, calls = exercise(FOLDERS["solutions"] / f"{chapter}.py", "solution")
    verdict = examine(task, eval(calls[task], space))
    assert verdict.status == "passed", verdict.message
    assert verdict.passed == verdict.total > 0
    assert find(task).points > 0
