"""The builder: masters in, notebooks out, byte for byte the same the second time; stale and edited files are seen."""

import json

import nbformat
import pytest
from demo_course import write_course

pytest.importorskip("jupytext")

from minillm.lab import build, masters
from minillm.lab.clean import problems_of

FILES = ["notebooks/99_demo.ipynb", "solutions/99_demo.ipynb", "exercises/99_demo.ipynb"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The demonstration course, built once."""
    with pytest.MonkeyPatch.context() as patch:
        root = write_course(tmp_path_factory.mktemp("course"))
        patch.setenv("MINILLM_CHECKS", str(root / "checks"))
        assert build.main(["--root", str(root)]) == 0
        yield root


def read(root, file):
    return nbformat.read(root / file, as_version=4)


def test_a_fresh_build_is_not_stale_and_a_second_one_changes_no_byte(built, monkeypatch):
    before = {file: (built / file).read_bytes() for file in FILES}
    assert build.find_stale(built) == {}
    assert build.main(["--root", str(built), "--all"]) == 0
    assert {file: (built / file).read_bytes() for file in FILES} == before


def test_built_notebooks_are_valid_and_plain(built):
    for file in FILES:
        notebook = read(built, file)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"
        assert "widgets" not in notebook.metadata
        assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
        text = (built / file).read_text()
        assert "iopub" not in text
        assert "widget-view" not in text


def test_the_chapter_shows_its_outputs(built):
    outputs = [output for cell in read(built, FILES[0]).cells for output in cell.get("outputs", [])]
    texts = [output.get("text", "") for output in outputs]
    assert "99.n  predicted 90 B  measured 100 B  ratio 1.11\n" in texts
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert any("running kernel" in output.get("data", {}).get("text/plain", "") for output in outputs)


def test_the_exercise_has_neither_answers_nor_outputs(built):
    code = [cell for cell in read(built, FILES[2]).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    text = "\n".join(cell.source for cell in code)
    assert text.count("    raise NotImplementedError") == 2
    assert "size = ...  # your answer" in text
    assert "    return items[len(items)]" in text
    for word in ("SOLUTION", "GIVEN", "items[-1]", "2 * x", "only in the solution"):
        assert word not in text


def test_solution_checks_are_compared_by_nbval(built):
    checks = [c for c in read(built, FILES[1]).cells if c.source.startswith("check(")]
    assert [c.outputs[0].text.split()[1] for c in checks] == ["99.double", "99.size", "99.last", "99.quadruple"]
    assert all(c.metadata.tags == ["nbval-check-output"] for c in checks)


def test_ids_do_not_move_when_a_cell_is_inserted(tmp_path):
    path = tmp_path / "99_a.py"
    path.write_text("# %%\nx = 1\n\n# %%\nx = 1\n\n# %%\ny = 2\n")
    before = [cell.id for cell in masters.read_master(path).cells]
    path.write_text("# %% [markdown]\n# new\n\n# %%\nx = 1\n\n# %%\nx = 1\n\n# %%\ny = 2\n")
    assert [cell.id for cell in masters.read_master(path).cells][1:] == before


@pytest.fixture
def course(built, tmp_path):
    """A copy of the built course that a test may change."""
    for file in [*FILES, "notebooks/99_demo.py", "solutions/99_demo.py"]:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((built / file).read_bytes())
    return tmp_path


def check_output(course, capsys):
    code = build.main(["--root", str(course), "--check"])
    return code, capsys.readouterr().out


def test_check_names_what_is_stale(course, capsys):
    assert check_output(course, capsys) == (0, "")
    master = course / "solutions/99_demo.py"
    master.write_text(master.read_text() + "\n# a comment\n")
    code, text = check_output(course, capsys)
    assert code == 1
    assert "solutions/99_demo.ipynb is older than solutions/99_demo.py" in text
    assert "exercises/99_demo.ipynb" in text
    assert "notebooks/" not in text


def test_a_solution_is_stale_when_its_checks_change(course, capsys, monkeypatch):
    """Its outputs hold the number of cases, "7/7", which a new case changes."""
    checks = course / "checks/99_demo.py"
    checks.parent.mkdir()
    monkeypatch.setenv("MINILLM_CHECKS", str(checks.parent))
    checks.write_text("# other cases\n")
    code, text = check_output(course, capsys)
    assert code == 1
    assert text.strip() == "stale: solutions/99_demo.ipynb is older than minillm/lab/checks/99_demo.py"


@pytest.mark.parametrize("damage", ["missing", "orphan", "hand", "outputs", "fast", "kernel", "unrun", "garbage"])
def test_check_sees_every_kind_of_damage(course, capsys, damage):
    path = course / FILES[0]
    notebook = json.loads(path.read_text())
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    if damage == "missing":
        path.unlink()
    elif damage == "garbage":
        path.write_text("{")
    elif damage == "orphan":
        (course / "notebooks/98_old.ipynb").write_bytes(path.read_bytes())
    else:
        if damage == "hand":
            first["source"] = ["x = 1"]
        elif damage == "outputs":
            first["outputs"] = [{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}]
        elif damage == "fast":
            notebook["metadata"]["minillm"]["fast"] = True
        elif damage == "kernel":
            notebook["metadata"]["kernelspec"]["name"] = "mine"
        elif damage == "unrun":
            first["execution_count"] = None
        path.write_text(json.dumps(notebook))
    code, text = check_output(course, capsys)
    assert code == 1
    assert text.startswith("stale: notebooks/9")


def test_an_exercise_that_a_reader_edited_is_kept(course, capsys):
    path = course / FILES[2]
    notebook = read(course, FILES[2])
    next(c for c in notebook.cells if "def double" in c.source).source = "def double(x):\n    return 2 * x"
    nbformat.write(notebook, path)
    before = path.read_bytes()
    assert build.main(["--root", str(course), "99", "--only", "exercise"]) == 0
    assert "which you have edited" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert (course / "exercises/99_demo.new.ipynb").exists()
    assert "edited by hand" in check_output(course, capsys)[1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("### BEGIN SOLUTION\nx = 1", "without its end"),
        ("x = 1\n### END SOLUTION", "without its beginning"),
        ("### BEGIN SOLUTION\nprint(1)\n### END SOLUTION", "may only hold"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", "inside"),
    ],
)
def test_a_master_with_crooked_markers_is_refused(source, message):
    with pytest.raises(masters.MasterError, match=message):
        masters.strip(source, "exercise", "99_a.py")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([nbformat.v4.new_output("stream", text="x" * 1_100_000)], "1 MB"),
        ([nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[])], "error"),
        ([nbformat.v4.new_output("stream", text="<object at 0x7f00deadbeef>")], "address"),
        ([nbformat.v4.new_output("stream", text="/usr/lib/site-packages/torch")], "path"),
    ],
)
def test_outputs_that_may_not_be_committed(outputs, message, tmp_path):
    cell = nbformat.v4.new_code_cell("x")
    cell.outputs = outputs
    found = problems_of(nbformat.v4.new_notebook(cells=[cell]), tmp_path)
    assert any(message in text for text in found)


def test_a_cell_that_fails_stops_the_build_with_a_message(course, capsys):
    master = course / "notebooks/99_demo.py"
    master.write_text("# %%\n1 / 0\n")
    before = (course / FILES[0]).read_bytes()
    assert build.main(["--root", str(course), "99", "--only", "chapter"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert (course / FILES[0]).read_bytes() == before
    assert build.main(["--root", str(course), "77"]) == 2
