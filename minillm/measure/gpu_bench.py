"""`minillm bench gpu`: the GPU checks and measurements of the course, in one run of under 8 minutes.

It runs the kernels' tests as they are, then the other benchmarks by name, and writes what they gave to
`notebooks/measurements/NAME-OF-THE-GPU.json` after each step, so that a run cut short keeps what it has. A step that
fails costs itself alone: the reason is kept beside the results. A step that no longer fits into the time is left out,
and said to be. `--smoke` runs the same list at the smallest sizes, anywhere, and writes nothing unless told where.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minillm.measure import records
from minillm.measure.bench import NotMeasured
from minillm.measure.machine import ceilings
from minillm.measure.records import Figure, figure

ROOT = Path(__file__).parents[2]
BUDGET = 460.0  # seconds in all
TESTS = ("test_flash_attention", "test_flash_decoding", "test_paged_attention", "test_fused", "test_graphs")
SPECULATIVE = {
    "proposers": ("ngram", "tiny-draft", "medusa", "eagle"),
    "temperatures": (0.0, 1.0),
    "batches": (1, 8, 32),
    "tokens": 32,
    "repeats": 2,
}
# (benchmark, the most seconds it may need, settings): the figures that the chapters draw come first.
PLAN: tuple[tuple[str, float, dict], ...] = (
    ("machine", 25, {}),
    ("course", 60, {}),
    ("attention", 60, {"repeats": 3, "hopper": False}),
    ("decode-attention", 45, {"repeats": 3}),
    ("gemm", 20, {"repeats": 3}),
    ("graphs", 45, {"repeats": 3}),
    ("quantized", 50, {"repeats": 3}),
    ("kv-cache", 20, {"repeats": 3}),
    ("decode", 60, {"repeats": 3}),
    ("damage", 60, {"names": ("INT4", "INT4 GPTQ", "W8A8"), "tokens": 4096, "questions": 48}),
    ("fused", 30, {"repeats": 3}),
    ("throughput", 90, {"repeats": 2}),
    ("prefix", 30, {"repeats": 3}),
    ("speculative", 80, SPECULATIVE),
    ("scheduler", 10, {"repeats": 1}),
    ("gptq-awq", 90, {"widths": (3,)}),
    ("checks", 150, {}),
    ("attention-hopper", 40, {"repeats": 3}),
)


@dataclass
class Report:
    """What a run gave: figures, and for each step that gave none the reason."""

    figures: list[Figure] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def run_plan(
    benches: dict[str, Callable[..., Iterable[Figure]]],
    plan: Iterable[tuple[str, float, dict]] = PLAN,
    smoke: bool = False,
    path: Path | None = None,
    budget: float = BUDGET,
    say: Callable[[str], object] = lambda text: None,
) -> Report:
    """Run the plan. benches: by name; `machine` and `checks` are here. path: where to write after each step."""
    benches = {"machine": bench_machine, "checks": bench_checks, **benches}
    report, start = Report(), time.perf_counter()
    for name, most, settings in plan:
        left = budget - (time.perf_counter() - start)
        if name not in benches:
            report.left_out[name] = "there is no such benchmark"
        elif most > left and not smoke:
            report.left_out[name] = f"needs up to {most:.0f} s, and {left:.0f} s were left"
        else:
            began = time.perf_counter()
            try:
                bench = benches[name]
                settings = settings | ({"smoke": smoke} if "smoke" in inspect.signature(bench).parameters else {})
                if smoke and "smoke" not in settings:
                    raise NotMeasured("has no smoke mode")
                for each in bench(**settings):
                    report.figures.append(each)
            except NotMeasured as reason:
                report.left_out[name] = str(reason)
            except Exception as error:  # one broken step must not cost the others: this may be the only GPU run
                text = str(error).strip().splitlines()
                report.left_out[name] = f"{type(error).__name__}: {text[0] if text else ''}"
            report.seconds[name] = time.perf_counter() - began
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        say(f"{name}: {report.left_out.get(name, f'{report.seconds.get(name, 0.0):.1f} s')}")
        if path is not None and report.figures:
            records.write(report.figures, path)
    return report


def default_path(device: str) -> Path:
    """notebooks/measurements/nvidia-h200.json for "NVIDIA H200"."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return ROOT / "notebooks" / "measurements" / f"{name}.json"


def bench_machine(smoke: bool = False) -> Iterator[Figure]:
    """The ceilings that the other figures are divided by."""
    roof = ceilings(fast=smoke)
    yield figure("machine.read_bandwidth", roof.read_bandwidth, "B/s")
    yield figure("machine.copy_bandwidth", roof.copy_bandwidth, "B/s")
    for name, rate in roof.matmul.items():
        yield figure(f"machine.matmul.{name}", rate, "FLOP/s")


def bench_checks(smoke: bool = False, limit: float = 140.0) -> Iterator[Figure]:
    """The kernels' own tests, unchanged, in a process of their own: how many passed, failed, were skipped."""
    found = [str(ROOT / "tests" / f"{name}.py") for name in TESTS if (ROOT / "tests" / f"{name}.py").exists()]
    if not found:
        raise NotMeasured("the tests are not beside the package: run from a clone of the course")
    if smoke:
        found = [name for name in found if "test_graphs" in name]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", *found]
    if smoke:
        command += ["-k", "batch_sizes or filled_in_place"]
    try:
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit).stdout
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"the tests took more than {limit:.0f} s") from None
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", shown)}
    if not counts:
        lines = shown.strip().splitlines()
        raise NotMeasured(f"pytest ran nothing: {lines[-1] if lines else 'is it installed?'}")
    for what in ("passed", "failed", "skipped"):
        yield figure(f"checks.{what}", counts.get(what, 0) + (counts.get("error", 0) if what == "failed" else 0), "1")
