"""The command line as a reader meets it: exit codes, one clear line for a mistake, JSON that a program can read."""

import json
import os
import subprocess
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from minillm import cli
from minillm.cli import app
from minillm.engine.rungs import MANY, PREFIX
from minillm.kernels import cpp
from minillm.measure.ladder import RUNGS


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


@pytest.fixture(autouse=True)
def no_models(tmp_path, monkeypatch):
    """An empty cache: nothing is pulled, so that "tiny" is the default."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))


def test_help_lists_the_commands():
    done = run("--help")
    assert done.exit_code == 0
    for name in ("tour", "lab", "grade", "bench", "pull"):
        assert name in done.output


def climbed() -> list:
    """The rungs that there are on this machine."""
    compiles = cpp.why_not(torch.float32, torch.device("cpu")) is None
    return [*RUNGS, *(MANY if compiles else MANY[:-1]), *PREFIX]


def test_tour_prints_every_rung_as_json():
    done = run("tour", "--json", "--tokens", "4")
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["model"] == "tiny"
    assert [rung["name"] for rung in data["rungs"]] == [rung.name for rung in climbed()]
    assert len({rung["workload"] for rung in data["rungs"]}) == 3
    for rung in data["rungs"]:
        assert rung["ttft"] > 0
        assert rung["tpot"] > 0
        assert rung["weight_bytes"] > 0
        assert rung["same_tokens"] == 1 or not rung["exact"]
    assert all(rung["bandwidth_share"] > 0 for rung in data["rungs"][: len(RUNGS)])
    assert data["rungs"][0]["kv_bytes"] == 0 < data["rungs"][1]["kv_bytes"]


def test_tour_draws_a_table():
    done = run("tour", "--model", "tiny", "--tokens", "4")
    assert done.exit_code == 0, done.output
    for rung in climbed():
        assert rung.name.split(":")[0] in done.output
    assert "16 requests of mixed lengths" in done.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tour", "--model", "tinny"], "tiny"),
        (["tour", "--model", "smollm2-135m"], "minillm pull smollm2-135m"),
        (["tour", "--model", "tiny", "--dtype", "float7"], "float7"),
        (["tour", "--model", "tiny", "--tokens", "9999"], "tokens=9999: must be from 2 to"),
        (["bench", "nothing"], "decode"),
        (["pull", "smollm2-135"], "smollm2-135m"),
        (["pull", "nobody/no-such-model"], "nobody/no-such-model"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(arguments, named):
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    line = one_line(done.output)
    assert line.startswith("minillm: ")
    assert named in line


@pytest.mark.parametrize(
    "arguments", [["tour", "--tokens", "1"], ["bench"], ["nonsense"], ["bench", "decode", "--x"]]
)
def test_a_command_that_cannot_be_read_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


def test_pull_of_a_packaged_model_needs_no_network():
    done = run("pull", "tiny")
    assert done.exit_code == 0
    assert one_line(done.output).startswith("tiny: ")


def test_the_help_of_bench_names_every_benchmark():
    assert sorted(cli.BENCH_NAMES) == sorted(cli.all_benches())


def test_a_benchmark_without_its_model_is_skipped_with_a_reason():
    done = run("bench", "decode")
    assert done.exit_code == 0
    assert one_line(done.output).startswith("decode: not measured. ")


def test_grade_of_what_is_not_there_exits_with_2(tmp_path):
    done = run("grade", str(tmp_path / "02_kv_cache.ipynb"))
    assert done.exit_code == 2
    assert "there is no file" in done.output


def test_lab_without_jupyterlab_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jupyterlab", None)
    done = run("lab")
    assert done.exit_code == 2
    assert "make lab" in one_line(done.output)


def test_lab_opens_the_first_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "jupyterlab", types.ModuleType("jupyterlab"))
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    assert run("lab", "--port", "0").exit_code == 0
    assert any(part.endswith("00_one_token.ipynb") for part in started[0])
    assert "--port=0" in started[0]


def test_as_a_program_without_a_terminal(tmp_path):
    env = os.environ | {"COLUMNS": "80", "TERM": "dumb"}
    command = [sys.executable, "-m", "minillm.cli", "bench", "nothing"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "decode" in one_line(done.stderr)
