"""Build the notebooks from their masters: `python -m minillm.lab.build [NN_name ...] [--check] [--fast]`.

Without names, what is stale is built; with names, those are executed again. `--check` executes nothing: it names the
built files that do not match their masters and fails. An exercise that a reader has edited is never overwritten.
Needs the extra `dev` (jupytext). All chapters.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from minillm.lab.clean import clean, problems_of
from minillm.lab.masters import FOLDERS, MasterError, build_cells, cells_digest

ROOT = Path(__file__).parents[2]


def built_path(root: Path, kind: str, name: str) -> Path:
    return root / FOLDERS[kind] / f"{name}.ipynb"


def masters(root: Path) -> list[tuple[Path, list[str]]]:
    """(master, kinds of notebook it gives), chapters first."""
    found = [(path, ["chapter"]) for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.py"))]
    return found + [(path, ["solution", "exercise"]) for path in sorted((root / "solutions").glob("[0-9][0-9]_*.py"))]


def read(path: Path) -> NotebookNode | None:
    try:
        return nbformat.read(path, as_version=4)
    except Exception:  # absent, not JSON, not a notebook: all mean "build it"
        return None


def edited(notebook: NotebookNode | None) -> bool:
    """Has a reader changed the cells of a built notebook?"""
    stored = (notebook or {}).get("metadata", {}).get("minillm", {}).get("cells_hash")
    return notebook is not None and stored != cells_digest(notebook)


def stale(master: Path, kind: str, root: Path) -> str | None:
    """Why the built notebook does not match its master; None where it does."""
    path = built_path(root, kind, master.stem)
    built, wanted = read(path), build_cells(master, kind)
    if built is None:
        return "is missing or is not a notebook"
    if edited(built):
        return "was edited by hand"
    meta = built.metadata.get("minillm", {})
    if meta.get("master_hash") != wanted.metadata.minillm.master_hash:
        return f"is older than {wanted.metadata.minillm.master}"
    if [_face(cell) for cell in built.cells] != [_face(cell) for cell in wanted.cells]:
        return "was built by another version of the builder"
    if built.metadata.kernelspec != wanted.metadata.kernelspec:
        return "names another kernel"
    code = [cell for cell in built.cells if cell.cell_type == "code" and cell.source.strip()]
    if kind == "exercise":
        return "holds outputs" if any(cell.outputs for cell in code) else None
    if meta.get("fast"):
        return "was built with --fast"
    if any(cell.execution_count is None for cell in code):
        return "was not executed"
    if meta.get("checks_hash") != wanted.metadata.minillm.get("checks_hash"):
        return f"is older than minillm/lab/checks/{master.name}"
    return next(iter(problems_of(built, root)), None)


def _face(cell: NotebookNode) -> tuple:
    return cell.cell_type, cell.source, cell.id, tuple(cell.metadata.get("tags", []))


def find_stale(root: Path = ROOT) -> dict[str, str]:
    """{built file: why it is stale}, orphans included."""
    found, known = {}, set()
    for master, kinds in masters(root):
        for kind in kinds:
            path = built_path(root, kind, master.stem)
            known.add(path)
            if reason := stale(master, kind, root):
                found[str(path.relative_to(root))] = reason
    for folder in FOLDERS.values():
        for path in (root / folder).glob("[0-9][0-9]_*.ipynb"):
            if path not in known and not path.name.endswith(".new.ipynb"):
                found[str(path.relative_to(root))] = "has no master"
    return found


def execute(notebook: NotebookNode, folder: Path, root: Path, fast: bool = False, timeout: int = 900) -> None:
    """Run all cells in a fresh kernel, in `folder`. An error raises MasterError with the cell and the message."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    env = {key: value for key, value in os.environ.items() if not key.startswith(("MPLBACKEND", "MINILLM_GRADE"))}
    env |= {"MINILLM_FAST": "1" if fast else "0", "PYTHONHASHSEED": "0", "COLUMNS": "100"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), str(ROOT), env.get("PYTHONPATH")]))
    folder.mkdir(parents=True, exist_ok=True)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=True,  # needed to run Output widgets; `clean` drops it
        extra_arguments=["--log-level=ERROR"],
        coalesce_streams=True,
    )
    try:
        client.execute(env=env)
    except CellExecutionError as error:
        raise MasterError(f"a cell failed:\n{error}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        raise MasterError(str(error)) from None


def build(master: Path, kind: str, root: Path = ROOT, fast: bool = False) -> str:
    """Build one notebook; returns a line that says what was done."""
    path = built_path(root, kind, master.stem)
    notebook, start = build_cells(master, kind), time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "exercise":
        before = read(path)
        if before is not None and edited(before):
            path = path.with_suffix(".new.ipynb")
            write(notebook, path)
            return f"{path.relative_to(root)}  written beside {master.stem}.ipynb, which you have edited"
        write(notebook, path)
        return f"{path.relative_to(root)}  written"
    execute(notebook, path.parent, root, fast)
    warnings = clean(notebook)
    if fast:
        notebook.metadata.minillm["fast"] = True
    if problems := problems_of(notebook, root):
        raise MasterError("; ".join(problems))
    size = write(notebook, path)
    seconds = time.perf_counter() - start
    return "\n  ".join([f"{path.relative_to(root)}  {seconds:.0f} s, {size / 1000:.0f} kB", *warnings])


def write(notebook: NotebookNode, path: Path) -> int:
    """Write a notebook with sorted keys; returns its size in bytes. The file is untouched where nothing changed."""
    data = (nbformat.writes(notebook, version=4).rstrip("\n") + "\n").encode()
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)
    return len(data)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.lab.build", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="NN_name or NN; none: whatever is stale")
    parser.add_argument("--check", action="store_true", help="execute nothing; fail where a built file is stale")
    parser.add_argument(
        "--fast", action="store_true", help="fast mode, to try a master out; --check rejects the result"
    )
    parser.add_argument("--all", action="store_true", help="execute everything again")
    parser.add_argument("--only", choices=list(FOLDERS), help="build only this kind")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    names = [Path(name).name.split(".")[0] for name in options.names]
    if options.check:
        try:
            found = find_stale(options.root)
        except MasterError as error:
            print(error, file=sys.stderr)
            return 2
        found = {k: v for k, v in found.items() if not names or any(Path(k).name.startswith(n) for n in names)}
        for file, reason in found.items():
            print(f"stale: {file} {reason}")
        return 1 if found else 0
    jobs = [(m, kind) for m, kinds in masters(options.root) for kind in kinds if options.only in (None, kind)]
    if names:
        unknown = [n for n in names if not any(m.stem == n or m.stem[:2] == n for m, _ in jobs)]
        if unknown:
            print(f"no master named {', '.join(unknown)} in notebooks/ or solutions/", file=sys.stderr)
            return 2
        jobs = [(m, kind) for m, kind in jobs if m.stem in names or m.stem[:2] in names]
    failed = 0
    for master, kind in jobs:
        try:
            if names or options.all or stale(master, kind, options.root):
                print(build(master, kind, options.root, options.fast), flush=True)
        except (MasterError, SyntaxError) as error:
            failed += 1
            print(f"{FOLDERS[kind]}/{master.stem}.ipynb  NOT built: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
