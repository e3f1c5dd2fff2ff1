"""Run a copy of an exercise under nbval in a process of its own, and collect what its checks and cells report.

All chapters.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CELL_LIMIT_S, LIMIT_S = 120, 1200


def run(notebook, path: Path) -> tuple[dict[str, dict], dict[int, dict], str]:
    """(verdict of each check, outcome of each code cell, why the run did not end well or "")."""
    import nbformat

    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="minillm-grade-") as name:
        folder = Path(name)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, folder / "graded.ipynb")
        (folder / "pytest.ini").write_text("[pytest]\n")
        record, cells = folder / "record.jsonl", folder / "cells.jsonl"
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        paths = [str(ROOT), str(path.resolve().parent), env.get("PYTHONPATH", "")]
        env |= {
            "MINILLM_GRADE_RECORD": str(record),
            "MINILLM_GRADE_NONCE": nonce,
            "MINILLM_GRADE_CELLS": str(cells),
            "MINILLM_FAST": env.get("MINILLM_FAST", "1"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # only nbval: what else is installed must not matter
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "nbval.plugin", "-p", "minillm.lab.grade_plugin"]
        command += ["-p", "no:cacheprovider", "-c", "pytest.ini", "--nbval-lax", "--nbval-current-env"]
        command += [f"--nbval-cell-timeout={CELL_LIMIT_S}", "graded.ipynb"]
        code, output = _run(command, folder, env)
        verdicts = {row["task"]: row for row in _lines(record) if row.get("nonce") == nonce}
        outcome = {row["cell"]: row for row in _lines(cells)}
    died = next((n for n, row in outcome.items() if dead(row)), None)
    if died is not None:
        where = "in" if "the kernel died" in outcome[died]["text"] else "before"
        return verdicts, outcome, f"the kernel ended {where} code cell {died + 1}"
    if code is None:
        return verdicts, outcome, f"stopped after {LIMIT_S} s"
    if code not in (0, 1):
        return verdicts, outcome, f"nbval ended with code {code}: {' '.join(output.split()[-30:])}"
    return verdicts, outcome, ""


def dead(outcome: dict) -> bool:
    """Did this cell find no kernel, or lose it?"""
    return "the kernel died" in outcome["text"] or "Kernel dead" in outcome["text"]


def _run(command: list[str], folder: Path, env: dict) -> tuple[int | None, str]:
    """Run in a process group of its own, so that a time-out leaves no kernel behind."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""


def _lines(path: Path) -> list[dict]:
    """The JSON objects of a file, one a line; anything else in it is passed over."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows += [row] if isinstance(row, dict) else []
    return rows
