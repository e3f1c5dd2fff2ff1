"""A peer in another Python: asked line by line, and its absence is one line. The peer here is a fake."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from minillm import cli
from minillm.engine import bench
from minillm.measure import openvino_peer
from minillm.measure.bench import NotMeasured

FAKE = """#!{python}
import json, sys
first = json.loads(sys.stdin.readline())
settings = first["scheduler"]
assert settings["max_num_seqs"] == 3 and settings["max_num_batched_tokens"] == 9, settings
assert first["pipelines"]["openvino.float32"]["KV_CACHE_PRECISION"] == "f32"
{body}
"""
ANSWERS = """
from pathlib import Path
assert Path(first["model"], "model.safetensors").is_file() and Path(first["model"], "config.json").is_file()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    texts = [[len(asked["pipeline"])] * count for _, count in asked["work"]]
    print(json.dumps({"seconds": 0.5, "texts": texts}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    def make(body):
        path = tmp_path / "python"
        path.write_text(FAKE.replace("{python}", sys.executable).replace("{body}", body))
        path.chmod(0o755)
        return str(path)

    return make


def peers(python):
    return openvino_peer.openvino_peers("tiny", python, sequences=3, step_tokens=9)


def test_a_peer_gets_the_weights_and_answers_each_request(fake):
    with peers(fake(ANSWERS)) as found:
        assert list(found) == ["openvino.float32", "openvino.default"]
        for name, peer in found.items():
            assert peer(None, [([1, 2], 2), ([3], 1)]) == (0.5, [[len(name)] * 2, [len(name)]])


def test_the_process_is_ended_with_the_peer(fake, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kw: started.append(popen(*args, **kw)) or started[-1])
    with pytest.raises(ZeroDivisionError), peers(fake(ANSWERS)):
        _ = 1 / 0
    assert started[0].returncode is not None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('no more room')", "process ended: no more room"),
        ("sys.exit(3)", "process ended: it said nothing"),
    ],
)
def test_a_peer_that_ends_says_its_last_line(fake, body, message):
    with pytest.raises(RuntimeError, match=message), peers(fake(body)):
        raise AssertionError("no peer")


def test_what_is_missing_is_named(fake, tmp_path):
    absent = str(tmp_path / "nowhere")
    lacking = fake("""print('{"missing": "openvino_genai"}', flush=True)""")
    for python, message in ((None, "--peer-python"), (absent, "cannot be run"), (lacking, "lacks .* openvino_genai")):
        with pytest.raises(NotMeasured, match=message), peers(python):
            raise AssertionError("no peer")


def test_the_child_needs_nothing_of_ours_and_names_the_package_that_it_lacks():
    command = [sys.executable, "-I", "-c", CHILD_WITHOUT_OPENVINO, str(openvino_peer.CHILD)]
    done = subprocess.run(command, input='{"model": "."}\n', capture_output=True, text=True, timeout=60)
    assert done.stdout == '{"missing": "openvino"}\n', done.stderr


CHILD_WITHOUT_OPENVINO = """
import runpy, sys
sys.modules["openvino"] = None  # an import of it fails, whatever is installed
sys.modules["minillm"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_throughput_says_that_the_peer_is_absent_and_goes_on(monkeypatch):
    monkeypatch.setattr(bench, "need", lambda model: None)
    monkeypatch.setattr(bench, "throughput_figures", lambda model, dtypes, count, repeats, outside: iter([outside]))
    said = []
    assert list(bench.bench_throughput("tiny", say=said.append)) == [{}]
    assert len(said) == 1 and said[0].startswith("throughput.openvino: not measured. ")


def test_the_command_passes_the_python_on_and_refuses_it_elsewhere(monkeypatch):
    got = {}

    def throughput(repeats, peer_python=None, say=None):
        got.update(python=peer_python)
        say("one line")
        return iter(())

    monkeypatch.setattr(cli, "all_benches", lambda: {"throughput": throughput, "scheduler": lambda repeats: iter(())})
    result = CliRunner().invoke(cli.app, ["bench", "throughput", "--peer-python", "/x/python"])
    assert result.exit_code == 0 and got == {"python": "/x/python"} and "one line" in result.stderr
    result = CliRunner().invoke(cli.app, ["bench", "scheduler", "--peer-python", "/x/python"])
    assert result.exit_code != 0 and "--peer-python" in result.stderr
