"""A reader's half hour in half a minute: JupyterLab in a real browser. A chapter runs and its slider moves its
figure; a first exercise task is answered, its check turns green, and `minillm grade` gives the points.

Skipped, with the reason, where there is no Chromium, Playwright or JupyterLab.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import chromium
import nbformat
import pytest

from minillm.lab.masters import CHECK

ROOT = Path(__file__).parents[1]
CHAPTER = "02_kv_cache"
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --disable-dev-shm-usage"
START_S, RUN_S = 300, 600  # generous: a loaded machine with two cores

OPENED = """async path => {
  const panel = await jupyterapp.commands.execute('docmanager:open', {path});
  await panel.context.ready; await panel.sessionContext.ready; await panel.revealed;
  return panel.content.widgets.length;
}"""
RUN_ALL = """async limit => {
  const late = new Promise((_, no) => setTimeout(() => no(new Error(`not done after ${limit} s`)), 1000 * limit));
  await Promise.race([jupyterapp.commands.execute('notebook:run-all-cells'), late]);
}"""
OUTPUTS = """() => jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code')
  .map(c => c.model.outputs.toJSON())"""
FOCUS = """async n => {
  const notebook = jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = n;
  await notebook.scrollToItem(n, 'center');
  await notebook.widgets[n].ready;
}"""
PLAY = """() => jupyterapp.shell.currentWidget.content.widgets
  .findIndex(c => c.model.type === 'code' && c.model.sharedModel.getSource().includes('explore('))"""
SOURCE = "n => jupyterapp.shell.currentWidget.content.widgets[n].model.sharedModel.getSource()"
SAVED = "async () => { await jupyterapp.commands.execute('docmanager:save'); }"


def missing(reason: str) -> None:
    """Skip, unless a browser is part of what is tested (.ci/run)."""
    if os.environ.get("MINILLM_REQUIRE_BROWSER"):
        pytest.fail(f"no browser test: {reason}")
    pytest.skip(f"no browser test: {reason}")


def python_with_jupyterlab() -> str | None:
    """That of the environment which `make test` makes for it, else this one."""
    prefix = Path(sys.prefix)
    beside = prefix.with_name(f"{prefix.name}-browser") / "bin" / "python"
    if beside.exists():
        return str(beside)
    return sys.executable if importlib.util.find_spec("jupyterlab") else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A scratch home, and a copy of the course's notebooks for the reader to work in."""
    folder = tmp_path_factory.mktemp("browser")
    for kind in ("notebooks", "exercises"):
        shutil.copytree(ROOT / kind, folder / "work" / kind, ignore=shutil.ignore_patterns(".*", "*.new.ipynb"))
    kernel = folder / "jupyter" / "kernels" / "python3"  # before any other of that name: the tested environment's
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    settings = folder / "home/.jupyter/lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)  # no question about news over the page, and no look for updates
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """The address of a JupyterLab on the copy. It and its kernels are one process group, ended with the test."""
    python = python_with_jupyterlab()
    if python is None:
        missing("JupyterLab is not installed (make test installs it)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "PYTEST_", "MPLBACKEND"))}
    env |= {
        "HOME": str(folder / "home"),
        "MINILLM_CACHE": os.environ.get("MINILLM_CACHE") or str(Path.home() / ".cache" / "minillm"),
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")])),
    }
    command = [python, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += ["--IdentityProvider.token=", "--expose-app-in-browser", f"--notebook-dir={folder / 'work'}"]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        yield wait_for_server(process, folder)
    finally:
        end(process)


def wait_for_server(process: subprocess.Popen, folder: Path) -> str:
    """The address that the server wrote down, once it answers there."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            [found] = (folder / "runtime").glob("jpserver-*.json")
            url = json.loads(found.read_text())["url"]
            with urllib.request.urlopen(f"{url}api/status", timeout=START_S) as answer:
                if answer.status == 200:
                    return url
        except (ValueError, OSError):  # not there, half written, or not listening yet
            time.sleep(0.1)
    tail = (folder / "server.log").read_text()[-3000:]
    raise AssertionError(f"JupyterLab did not start (exit code {process.poll()}):\n{tail}")


def end(process: subprocess.Popen) -> None:
    """Ask the server to stop, which ends its kernels; then end whatever is left of its group."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def page(server, folder):
    if not importlib.util.find_spec("playwright"):
        missing("playwright is not installed")
    from playwright import sync_api as playwright

    path = chromium.find()
    if path is None:
        missing("no Chromium or Chrome on this machine")
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=path, args=FLAGS.split(), timeout=START_S * 1e3)
        except playwright.Error as error:
            missing(f"{path} does not start: {str(error).splitlines()[0]}")
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(START_S * 1e3)
        page.goto(f"{server}lab")
        page.wait_for_function("() => window.jupyterapp")
        page.evaluate("async () => { await jupyterapp.restored; }")
        yield page
        browser.close()


@pytest.fixture
def shot(page, folder):
    """Saves pictures: to MINILLM_SCREENSHOTS, where that names a folder."""
    where = Path(os.environ.get("MINILLM_SCREENSHOTS") or folder)
    yield lambda name: page.screenshot(path=where / f"{name}.png")


def open_notebook(page, path: str) -> None:
    assert page.evaluate(OPENED, path) > 0
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell")


def test_a_chapter_runs_and_its_slider_moves_its_figure(page, shot):
    from playwright.sync_api import expect

    open_notebook(page, f"notebooks/{CHAPTER}.ipynb")
    page.evaluate("() => jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    page.evaluate(RUN_ALL, RUN_S)
    outputs = page.evaluate(OUTPUTS)
    errors = [o for cell in outputs for o in cell if o["output_type"] == "error"]
    assert not errors, errors[0]
    assert any("image/png" in o.get("data", {}) for cell in outputs for o in cell)

    page.evaluate(FOCUS, page.evaluate(PLAY))
    cell = page.locator(".jp-Cell.jp-mod-active")
    slider, figure = cell.locator(".widget-slider .noUi-handle").first, cell.locator(".widget-output img").last
    figure.wait_for()
    slider.scroll_into_view_if_needed()
    before = figure.get_attribute("src")
    shot("chapter-before")
    slider.press("ArrowRight")
    expect(figure).not_to_have_attribute("src", before, timeout=START_S * 1e3)
    figure.wait_for()
    assert figure.get_attribute("src") != before
    figure.scroll_into_view_if_needed()
    shot("chapter-after")


def test_an_answered_task_turns_green_and_scores(page, shot, folder):
    name = f"{CHAPTER}.ipynb"
    task, number, answer = first_answer(name)
    path = folder / "work" / "exercises" / name
    open_notebook(page, f"exercises/{name}")
    page.evaluate(FOCUS, number)
    editor = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell.jp-mod-active .cm-content")
    editor.click()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.insert_text(answer)
    assert page.evaluate(SOURCE, number) == answer
    page.evaluate(RUN_ALL, RUN_S)  # stops at the check of the second task, which is not started

    line = page.locator(".jp-OutputArea-output", has_text=re.compile(rf"✓ {re.escape(task)}\s+(\d+)/\1"))
    line.first.wait_for()
    line.first.scroll_into_view_if_needed()
    shot("exercise-green")
    page.evaluate(SAVED)
    assert nbformat.read(path, as_version=4).cells[number].source == answer

    command = [sys.executable, "-m", "minillm.cli", "grade", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, cwd=folder)
    assert done.returncode == 1, done.stderr
    rows = {row["task"]: row for row in json.loads(done.stdout)["tasks"]}
    assert rows[task]["points"] == rows[task]["of"] > 0
    assert rows[task]["status"] == "passed"
    assert {row["status"] for t, row in rows.items() if t != task} <= {"not started", "blocked"}


def first_answer(name: str) -> tuple[str, int, str]:
    """(first task, number of the cell that its answer goes in, the solution's text of it)."""
    exercise = nbformat.read(ROOT / "exercises" / name, as_version=4)
    solution = nbformat.read(ROOT / "solutions" / name, as_version=4)
    source = {cell.id: cell.source for cell in solution.cells}
    check = next(n for n, cell in enumerate(exercise.cells) if cell.cell_type == "code" and CHECK.search(cell.source))
    task = CHECK.search(exercise.cells[check].source)[1]
    [number] = [n for n in range(check) if exercise.cells[n].source != source[exercise.cells[n].id]]
    return task, number, source[exercise.cells[number].id]
