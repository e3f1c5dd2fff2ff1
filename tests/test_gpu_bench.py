"""`minillm bench gpu` runs here at its smallest sizes; its plan fits its budget; a broken step costs itself alone."""

import inspect
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from minillm import cli
from minillm.engine import course_bench, graphs_bench
from minillm.kernels.launch import why_not
from minillm.lab.recorded import recorded
from minillm.measure import fused_bench, gpu_bench, launches
from minillm.measure.bench import NotMeasured
from minillm.measure.gpu_bench import PLAN, default_path, run_plan
from minillm.measure.records import figure, read
from minillm.model.weights import load_model

ROOT = Path(__file__).parents[1]
no_triton = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def gives(*names, smoke=False):
    def bench(repeats=1, smoke=False):
        for name in names:
            yield figure(name, 1.0, "x")

    return bench


def test_a_broken_step_costs_itself_alone_and_each_step_is_written(tmp_path):
    def breaks(smoke=False):
        yield figure("half", 1.0, "x")
        raise RuntimeError("values differ\nsecond line")

    def absent(smoke=False):
        raise NotMeasured("no model")
        yield

    path = tmp_path / "gpu.json"
    plan = [("a", 1, {}), ("breaks", 1, {}), ("absent", 1, {}), ("nobody", 1, {}), ("b", 1, {"repeats": 2})]
    said = []
    benches = {"a": gives("first"), "breaks": breaks, "absent": absent, "b": gives("last")}
    report = run_plan(benches, plan, path=path, say=said.append)
    assert [f.name for f in report.figures] == ["first", "half", "last"] == [f.name for f in read(path)]
    assert report.left_out == {
        "breaks": "RuntimeError: values differ",
        "absent": "no model",
        "nobody": "there is no such benchmark",
    }
    assert len(said) == len(plan) and all("\n" not in line for line in said)


def test_a_step_that_does_not_fit_is_left_out_and_said_to_be():
    report = run_plan({"long": gives("x"), "short": gives("y")}, [("long", 99, {}), ("short", 1, {})], budget=10)
    assert [f.name for f in report.figures] == ["y"] and "99 s" in report.left_out["long"]


def test_the_plan_names_real_benchmarks_and_fits_eight_minutes():
    assert gpu_bench.BUDGET < 8 * 60
    names = [name for name, _, _ in PLAN]
    assert len(names) == len(set(names))
    known = set(cli.all_benches()) | {"machine", "checks"}
    assert set(names) <= known, set(names) - known
    assert all(0 < most <= gpu_bench.BUDGET for _, most, _ in PLAN)


def test_every_figure_that_a_chapter_draws_is_in_the_plan():
    """From chapter 08 on the first word of a figure's name is that of its benchmark."""
    asked = set()
    for path in (ROOT / "notebooks").glob("*.py"):
        if path.name >= "08":
            asked |= set(re.findall(r'recorded\(f?"([a-z_]+)\.', path.read_text(encoding="utf-8")))
    assert asked >= {"attention", "quantized", "kv_cache", "damage"}
    missing = {name.replace("_", "-") for name in asked} - {name for name, _, _ in PLAN}
    assert not missing, missing


def test_settings_of_the_plan_are_arguments_of_its_benchmarks():
    benches = cli.all_benches() | {"machine": gpu_bench.bench_machine, "checks": gpu_bench.bench_checks}
    for name, _, settings in PLAN:
        assert set(settings) <= set(inspect.signature(benches[name]).parameters), name


def test_files_are_named_after_the_gpu():
    assert default_path("NVIDIA H200").name == "nvidia-h200.json"
    assert default_path("NVIDIA GeForce RTX 4090").parent == ROOT / "notebooks" / "measurements"


@no_triton
def test_fused_smoke_checks_values_and_times_nothing():
    found = {f.name: f.value for f in fused_bench.bench_fused(smoke=True)}
    assert found["fused.add_norm.rows2.bytes_saved"] == 2 * 576 * 4
    assert {"fused.gate.rows2.bytes_saved", "fused.rope.rows2.bytes_saved"} <= set(found)
    assert not any(name.endswith(("ratio", "share")) for name in found)
    if not torch.cuda.is_available():
        with pytest.raises(NotMeasured, match="GPU"):
            next(fused_bench.bench_fused())


def test_a_wrong_fused_value_stops_the_bench():
    x = torch.ones(3)
    fused_bench.check("same", x, x, torch.float32)
    with pytest.raises(RuntimeError, match="away"):
        fused_bench.check("other", x, x * 1.1, torch.float32)
    with pytest.raises(RuntimeError, match="away"):
        fused_bench.check("nan", x, x * float("nan"), torch.float32)


def test_graphs_smoke_compares_tokens_and_counts():
    found = {f.name: f for f in graphs_bench.bench_graphs(smoke=True, repeats=1)}
    assert {"graphs.batch1.rate", "graphs.batch3.ratio", "graphs.memory_formula"} <= set(found)
    if not torch.cuda.is_available():
        with pytest.raises(NotMeasured, match="GPU"):
            next(graphs_bench.bench_graphs())


def test_course_smoke_gives_every_figure_the_chapters_ask_for():
    """Names in `recorded("...")` of chapters 00 to 07 are names that a benchmark of the plan gives."""
    given = {f.name for f in course_bench.bench_course(repeats=1, smoke=True)}
    asked = set()
    for path in sorted((ROOT / "notebooks").glob("0[0-7]_*.py")):
        asked |= set(re.findall(r'recorded\("([^"{]+)"', path.read_text(encoding="utf-8")))
    asked -= {"decode.bfloat16.batch1.bandwidth_share"}  # the decode benchmark's
    assert asked and asked <= given, asked - given


def test_the_command_runs_the_plan_in_smoke_mode(tmp_path, monkeypatch):
    """The whole way through the command line, with the slow steps replaced; and recorded() reads what it wrote."""
    path = tmp_path / "here.json"
    monkeypatch.setattr(cli, "all_benches", lambda: {"course": gives("tiny.cache.tokens_per_s"), "fused": gives("f")})
    result = CliRunner().invoke(cli.app, ["bench", "gpu", "--smoke", "--out", str(path)])
    assert result.exit_code == 0, result.output
    names = [row["name"] for row in json.loads(path.read_text())]
    assert "machine.read_bandwidth" in names and "checks.passed" in names and "f" in names
    monkeypatch.setenv("MINILLM_MEASUREMENTS", str(tmp_path))
    assert recorded("tiny.cache.tokens_per_s").value == 1.0
    if not torch.cuda.is_available():
        result = CliRunner().invoke(cli.app, ["bench", "gpu"])
        assert result.exit_code == 2 and "--smoke" in result.output


def test_launches_are_counted_without_views_and_allocations():
    x = torch.randn(4, 6)
    with launches.LaunchCount() as count:
        y = x.view(6, 4).t().unsqueeze(0).flatten(1)  # t() makes flatten copy
        z = torch.empty_like(y)
        z.copy_(y)
        a, b = z.chunk(2, dim=-1)
        (a * b + 1).sum()
    assert count.names == {"clone": 1, "copy_": 1, "mul": 1, "add": 1, "sum": 1} and count.total == 5
    with launches.LaunchCount() as count:
        single = count.one(lambda t: (t * 2 + 1).exp(), "fused")
        single(x)
        x.exp()
    assert count.names == {"fused": 1, "exp": 1}


def test_a_timeline_has_the_outermost_operations_in_order():
    model = load_model("tiny", dtype="float32")
    with torch.inference_mode():
        ops = launches.timeline(lambda: model(torch.tensor([[5, 6]])), warmup=1)
    assert len(ops) > 10 * model.config.num_layers and ops[0].start == 0
    assert all(a.end <= b.start for a, b in itertools.pairwise(ops)) and all(op.end >= op.start for op in ops)
    assert len(launches.gaps(ops)) == len(ops) - 1 and min(launches.gaps(ops)) >= 0


def test_overhead_share():
    assert launches.overhead_share(32, 16, 5e-6, 32 * 16 * 5e-6) == 0
    assert launches.overhead_share(32, 16, 5e-6, 1.0) == 0
    assert abs(launches.overhead_share(32, 10, 5e-6, 0.4e-3) - 0.75) < 1e-12
    assert launches.overhead_share(0, 10, 5e-6, 1.0) == 0
