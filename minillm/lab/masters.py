"""From a master, plain text in jupytext's percent format, to the cells of its notebooks.

`notebooks/NN_name.py` gives the chapter; `solutions/NN_name.py` gives the solution and, with what stands between
`### BEGIN SOLUTION` and `### END SOLUTION` taken out, the exercise. Needs jupytext (extra `dev`). All chapters.
"""

import ast
import hashlib
import linecache
import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minillm.lab.check import folders

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
GIVEN, END_GIVEN = "### BEGIN GIVEN", "### END GIVEN"
FOLDERS = {"chapter": "notebooks", "solution": "solutions", "exercise": "exercises"}
CHECK = re.compile(r"""^\s*check\(\s*["']([^"']+)["']""", re.MULTILINE)
LANGUAGE = {
    "name": "python",
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "pygments_lexer": "ipython3",
    "codemirror_mode": {"name": "ipython", "version": 3},
    "nbconvert_exporter": "python",
}


class MasterError(Exception):
    """A master that cannot be built; the message names the file and what to change."""


def digest(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").encode()).hexdigest()[:16]


def cells_digest(notebook: NotebookNode) -> str:
    """A hash of what a reader can edit: the cells' kinds and sources, without outputs."""
    return digest("\0".join(f"{cell.cell_type}\0{cell.source.rstrip()}" for cell in notebook.cells))


def read_master(path: Path) -> NotebookNode:
    """The cells of a master, with ids made from their content."""
    try:
        import jupytext
    except ImportError:
        raise MasterError("building needs jupytext: pip install -e '.[dev]'") from None

    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        key = digest(f"{cell.cell_type}\n{cell.source}")[:12]
        seen[key] = seen.get(key, 0) + 1
        cell["id"] = key if seen[key] == 1 else f"{key}-{seen[key]}"
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode({"tags": list(tags)} if tags else {})
    return notebook


def build_cells(master: Path, kind: str) -> NotebookNode:
    """The notebook that a master stands for, before any cell is run."""
    notebook = read_master(master)
    cells = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if kind == "exercise" and "solution-only" in tags:
            continue
        if cell.cell_type == "code":
            cell.source = strip(cell.source, kind, master.name) if kind != "chapter" else cell.source
            if kind == "solution" and CHECK.search(cell.source) and "nbval-check-output" not in tags:
                cell.metadata["tags"] = [*tags, "nbval-check-output"]
            cell.outputs, cell.execution_count = [], None
        cells.append(cell)
    notebook.cells, notebook.nbformat, notebook.nbformat_minor = cells, 4, 5
    source = "notebooks" if kind == "chapter" else "solutions"
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info=dict(LANGUAGE),
        minillm={
            "kind": kind,
            "master": f"{source}/{master.name}",
            "master_hash": digest(master.read_text(encoding="utf-8")),
            "cells_hash": cells_digest(notebook),
        },
    )
    if kind == "solution":  # its outputs hold the counts of the checks' cases
        files = [path for folder in folders() if (path := folder / master.name).exists()]
        text = "".join(path.read_text(encoding="utf-8") for path in files)
        notebook.metadata["minillm"]["checks_hash"] = digest(text)
    return nbformat.from_dict(notebook)


def strip(source: str, kind: str, name: str) -> str:
    """A code cell as the solution (given code out) or the exercise (answer out, given code in) shows it.

    In a function the answer becomes `raise NotImplementedError`. At the top level, where that would stop the
    notebook, each `name = value` of the answer becomes `name = ...`, which a check reads as not started. Between
    `### BEGIN GIVEN` and `### END GIVEN` stands, commented out, what the exercise shows instead: a bug to find.
    """
    out, region, held = [], None, []
    lines = source.split("\n")
    for i, line in enumerate(lines):
        mark = line.strip()
        if mark in (BEGIN, GIVEN):
            if region:
                raise MasterError(f"{name}: {mark} inside {region}")
            region, held, indent = mark, [], line[: len(line) - len(line.lstrip())]
            if kind == "solution" and mark == BEGIN:
                out.append(line)
        elif mark in (END, END_GIVEN):
            if region != {END: BEGIN, END_GIVEN: GIVEN}[mark]:
                raise MasterError(f"{name}: {mark} without its beginning")
            if kind == "solution":
                out += [*held, line] if mark == END else []
            elif mark == END_GIVEN:
                out += [re.sub(r"^(\s*)# ?", r"\1", text) for text in held]
            elif not any(text.strip() == GIVEN for text in lines[i + 1 : i + 2]):
                out += [f"{indent}raise NotImplementedError"] if indent else blanks(held, name)
            region = None
        elif region:
            held.append(line)
        else:
            out.append(line)
    if region:
        raise MasterError(f"{name}: {region} without its end")
    return "\n".join(out)


def blanks(answer: list[str], name: str) -> list[str]:
    """`kv_bytes = 2 * 32 * ...` becomes `kv_bytes = ...`."""
    statements = ast.parse("\n".join(answer)).body
    if not all(isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) for s in statements):
        raise MasterError(
            f"{name}: a solution at the top level may only hold `name = value`; put the rest in a function"
        )
    return [f"{s.targets[0].id} = ...  # your answer" for s in statements]


def check_calls(notebook: NotebookNode) -> dict[str, str]:
    """{task: the expression that is checked} from the check cells, in order."""
    calls = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and CHECK.search(cell.source):
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check" and len(node.args) == 2:
                    calls[node.args[0].value] = ast.unparse(node.args[1])
    return calls


def definitions(notebook: NotebookNode) -> dict:
    """Run the imports, definitions and assignments of a notebook, without its checks and demonstrations.

    An assignment that fails (it may need a demonstration's result) is passed over. Returns the namespace.
    """
    space: dict = {"__name__": "minillm_answers"}
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code" or CHECK.search(cell.source):
            continue
        source = re.sub(r"^\s*[%!].*$", "pass", cell.source, flags=re.MULTILINE)
        file = f"<cell {number} {digest(source)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        for node in ast.parse(source).body:
            if isinstance(node, kinds):
                try:
                    exec(compile(ast.Module([node], []), file, "exec"), space)
                except Exception:
                    if not isinstance(node, ast.Assign | ast.AnnAssign):
                        raise
    return space
