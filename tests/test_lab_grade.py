"""minillm grade: the right verdict whatever a reader did to the notebook, and never a change to the reader's file."""

import json

import nbformat
import pytest
import test_wrong_answers as harness
from demo_course import write_course

pytest.importorskip("jupytext")

from minillm.lab import build, masters
from minillm.lab.grade import grade, main

DOUBLE = "def double(x):\n    return 2 * x"
QUADRUPLE = "def quadruple(x):\n    return double(double(x))"


@pytest.fixture(scope="module", autouse=True)
def course(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        root = write_course(tmp_path_factory.mktemp("course"))
        patch.setenv("MINILLM_CHECKS", str(root / "checks"))
        assert build.main(["--root", str(root), "99", "--only", "exercise"]) == 0
        yield root


def variant(course, edits: dict[str, str]):
    """The exercise with each cell that contains the key replaced by the value."""
    notebook = nbformat.read(course / "exercises/99_demo.ipynb", as_version=4)
    for key, source in edits.items():
        next(cell for cell in notebook.cells if key in cell.source).source = source
    path = course / "99_variant.ipynb"
    nbformat.write(notebook, path)
    return path


def statuses(report):
    return {row.task.removeprefix("99."): row.status for row in report.rows}


def test_an_untouched_exercise_is_not_started(course):
    report = grade(course / "exercises/99_demo.ipynb")
    assert set(statuses(report).values()) == {"not started"}
    assert (report.points, report.of, report.exit_code) == (0, 7, 1)


def test_a_solved_exercise_scores_full_and_is_not_changed(course, capsys):
    solved = {"def double": DOUBLE, "size =": "size = 32", "def quad": QUADRUPLE}
    path = variant(course, {**solved, "def last": "def last(items):\n    return items[-1]"})
    before = path.read_bytes()
    assert main([path]) == 0
    assert "7 of 7 points" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_wrong_unstarted_and_blocked_read_differently(course, capsys):
    half = "def double(x):\n    return 2 * x if x < 50 else x"
    path = variant(course, {"def double": half, "size =": "size = 16", "def quad": QUADRUPLE})
    assert main([path], json_output=True) == 1
    data = json.loads(capsys.readouterr().out)
    rows = {row["task"].removeprefix("99."): row for row in data["tasks"]}
    assert {k: row["status"] for k, row in rows.items()} == {
        "double": "failed",
        "size": "failed",
        "last": "not started",
        "quadruple": "blocked",
    }
    assert "the factor 2 is missing" in rows["size"]["message"]
    assert "once is not twice" in rows["double"]["message"]
    assert "blocked by 99.double" in rows["quadruple"]["message"]
    assert data["points"] == 0


def test_printed_ticks_deleted_checks_and_syntax_errors(course):
    path = variant(
        course,
        {
            'check("99.double"': 'print("✓ 99.double  6/6")',
            'check("99.size"': "pass",
            "def last": "def last(items:\n    return",
            "def quad": "def quadruple(x):\n    return 4 * x",
        },
    )
    report = grade(path)
    wanted = {"double": "missing", "size": "missing", "last": "blocked", "quadruple": "passed"}
    assert statuses(report) == wanted
    assert "SyntaxError" in report.rows[2].message
    assert report.exit_code == 1


def test_a_redefined_check_counts_for_nothing(course):
    path = variant(course, {"import check": 'def check(task, answer):\n    print("✓", task, " 6/6")'})
    report = grade(path)
    assert set(statuses(report).values()) == {"missing"}
    assert "redefined" in report.rows[0].message


def test_a_dead_kernel_could_not_run(course):
    path = variant(course, {"def double": "def double(x):\n    import os\n    os._exit(1)"})
    report = grade(path)
    assert report.exit_code == 2
    assert "kernel ended in code cell 3" in report.error
    assert statuses(report)["quadruple"] == "blocked"


@pytest.mark.parametrize(
    "content", [None, "not json", "{}", "[]", '{"cells": 3, "nbformat": 4, "nbformat_minor": 5}']
)
def test_what_is_not_a_notebook_could_not_run(tmp_path, content, capsys):
    path = tmp_path / "99_demo.ipynb"
    if content is not None:
        path.write_text(content)
    assert main([path]) == 2
    assert "could not run" in capsys.readouterr().out


def test_a_notebook_without_checks_could_not_run(tmp_path):
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "notes.ipynb")
    assert "no checks belong to" in grade(tmp_path / "notes.ipynb").error


def test_the_whole_course_is_one_table(course, capsys):
    assert main(root=course) == 1
    text = capsys.readouterr().out
    assert "99_demo" in text
    assert "0/7" in text
    assert main(root=course / "nowhere") == 2


def test_the_harness_of_wrong_answers_finds_nothing_wrong_with_the_demonstration(course):
    solution = course / "solutions/99_demo.py"
    wrong = harness.load_wrong(course / "wrong_answers/99_demo.py")
    for task in masters.check_calls(masters.build_cells(solution, "solution")):
        assert harness.faults(solution, wrong, task) == []


def test_the_harness_sees_a_right_answer_a_wrong_hint_and_too_few(course):
    solution = course / "solutions/99_demo.py"
    found = harness.faults(
        solution, {"99.double": {"right": (DOUBLE, "x"), "hint": (("2 * x", "x"), "thrice")}}, "99.double"
    )
    assert len(found) == 3
    assert "2 wrong answers" in found[0]
    assert "passed" in found[1]
    assert "not in the message" in found[2]


def test_a_folder_is_one_clear_error(tmp_path):
    assert grade(tmp_path).error == f"{tmp_path} is a folder; name a notebook, such as {tmp_path / 'NN_name.ipynb'}"
    (tmp_path / "07_b.ipynb").write_text("{}")
    (tmp_path / "02_a.ipynb").write_text("{}")
    report = grade(tmp_path)
    assert report.error.endswith(f"such as {tmp_path / '02_a.ipynb'}") and report.exit_code == 2
