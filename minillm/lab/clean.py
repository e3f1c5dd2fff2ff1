"""What may stay in a built notebook: outputs without volatile parts, errors, addresses or machine paths, under 1 MB.

All chapters.
"""

import base64
import json
import re
from pathlib import Path

from nbformat import NotebookNode

LIMIT = 1_000_000  # bytes of outputs a notebook
PNG_LIMIT = 60_000  # bytes of a figure, above which the author is told
WIDGET = "application/vnd.jupyter.widget-view+json"
PLACEHOLDER = "(a control that needs a running kernel: run this cell to move it)"
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")


def clean(notebook: NotebookNode) -> list[str]:
    """Drop what changes from run to run and means nothing to a reader. Returns warnings for the author."""
    warnings = []
    notebook.metadata.pop("widgets", None)
    count = 0
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode({"tags": tags} if tags else {})
        if cell.source.strip():
            count += 1
            cell.execution_count = count
        outputs = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                text = output.text.strip()
                if text and "%|" not in text:
                    warnings.append(f"cell {number} wrote to stderr, which is not kept: {text[:150]}")
                continue
            if output.output_type in ("display_data", "execute_result") and WIDGET in output.data:
                if "%|" in output.data.get("text/plain", "") or "FloatProgress" in output.data.get("text/plain", ""):
                    continue  # a progress bar
                output.data = NotebookNode({"text/plain": PLACEHOLDER})
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count
            if "metadata" in output:
                output.metadata = NotebookNode({})
            png = output.get("data", {}).get("image/png", "")
            if len(base64.b64decode(png)) > PNG_LIMIT:
                warnings.append(f"cell {number}: a figure of {len(base64.b64decode(png)) / 1000:.0f} kB; aim at 60")
            outputs.append(output)
        cell.outputs = outputs
    return warnings


def problems_of(notebook: NotebookNode, root: Path) -> list[str]:
    """Why these outputs may not be committed."""
    found = []
    private = {str(root.resolve()), str(Path.home()), "/site-packages/", "/ipykernel_"} - {"/", "/root"}
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                found.append(f"cell {number} shows an error: {output.ename}: {output.evalue[:80]}")
                continue
            text = output.get("text", "") + "".join(
                value for kind, value in output.get("data", {}).items() if kind.startswith("text/")
            )
            if ADDRESS.search(text):
                found.append(f"cell {number} shows a memory address; end it with plt.show() or print what is meant")
            for path in private:
                if path in text:
                    found.append(f"cell {number} shows a path of this machine: {path}")
    size = sum(len(json.dumps(cell.get("outputs", []))) for cell in notebook.cells)
    if size > LIMIT:
        found.append(f"the outputs take {size / 1e6:.2f} MB; the limit is 1 MB")
    return found
