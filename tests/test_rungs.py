"""The rungs of many requests: what each is given is fair, and what each gives is what the naive loop gives."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minillm import load_model
from minillm.engine import rungs
from minillm.engine.rungs import MANY, PREFIX, climb_many, many, prefix, tour_workloads
from minillm.errors import ParamsError
from minillm.kernels import cpp
from minillm.measure.ladder import RUNGS, agreement, refuse_other_tokens
from minillm.model.generate import generate_naive


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")


@pytest.mark.parametrize("workload", [many, prefix])
def test_every_rung_gives_the_tokens_of_the_naive_loop(model, workload):
    work = workload(model)
    expected = [generate_naive(model, list(a.prompt), a.tokens) for a in work.trace]
    for rung in MANY if workload is many else PREFIX:
        if (prepared := rung.prepare(model)) is None:
            assert cpp.why_not(model.dtype, model.device) is not None, rung.name
            continue
        answers, times, _ = rung.run(prepared, work)
        assert answers == expected, rung.name
        assert [t.output_tokens for t in times] == [a.tokens for a in work.trace]


def test_the_rungs_of_one_memory_set_the_same_bytes_aside_and_run_more_at_once(model, monkeypatch):
    seen, run_trace = {}, rungs.run_trace

    def watched(model, trace, policy, **options):
        result = run_trace(model, trace, policy, **options)
        steps = {}
        for cell in result.cells:
            steps.setdefault(cell.begin, set()).add(cell.request)
        seen[rung.name] = max(map(len, steps.values()))
        return result

    monkeypatch.setattr(rungs, "run_trace", watched)
    work, room = many(model), {}
    for rung in MANY[:4]:  # the fifth is the fourth with another model
        room[rung.name] = rung.run(model, work)[2]
    single, static, continuous, paged = room.values()
    assert static == continuous == paged == rungs.AT_ONCE * work.reserve == 4 * single
    single, static, continuous, paged = seen.values()
    assert (single, static, continuous) == (1, 4, 4) and paged > 8


def test_the_second_prompt_is_found_but_for_its_own_tokens(model, monkeypatch):
    engines, make = [], rungs.Engine
    monkeypatch.setattr(rungs, "Engine", lambda *a, **k: engines.append(make(*a, **k)) or engines[-1])
    work = prefix(model)
    for rung in PREFIX:
        rung.run(model, work)
    off, cached = engines
    assert off.pool.index is None
    assert cached.pool.index.stats.hits == 256 and cached.pool.index.stats.queries == 2 * 264


def test_workloads_fit_small_contexts_and_refuse_what_is_none(model):
    small = load_model("tiny")
    for context in (64, 100):
        small.config = model.config.with_changes(max_length=context)
        for work, _ in tour_workloads(small):
            for prompt in [a.prompt for a in work.trace] + list(work.before):
                assert 0 < len(prompt) <= context
            assert all(len(a.prompt) + a.tokens - 1 <= context and a.tokens >= 2 for a in work.trace)
    small.config = model.config.with_changes(max_length=32)
    with pytest.raises(ParamsError, match="max_length=32: the rungs of many requests need a context of 64"):
        tour_workloads(small)


def test_a_rung_that_changes_the_tokens_is_refused(model):
    def broken(model, work):
        answers, times, room = MANY[0].run(model, work)
        return [[0] * len(answer) for answer in answers], times, room

    work = replace(many(model, count=3))
    steps = climb_many(model, [(work, (MANY[0], replace(MANY[1], name="broken", run=broken)))], repeats=1)
    assert next(steps).same_tokens == 1
    with pytest.raises(RuntimeError, match="'broken' changed the tokens"):
        next(steps)


def test_near_ties_are_told_and_not_refused_in_16_bits():
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6
    refuse_other_tokens("a", 0.2, torch.bfloat16)
    refuse_other_tokens("a", 0.95, torch.float32)
    with pytest.raises(RuntimeError, match="20% are equal"):
        refuse_other_tokens("a", 0.2, torch.float32)


def test_the_readme_shows_every_rung_of_the_tour():
    script = Path(__file__).parent.parent / "docs" / "readme_ladder.py"
    spec = importlib.util.spec_from_file_location("readme_ladder", script)
    ladder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ladder)
    shown = ladder.README.read_text(encoding="utf-8").split(ladder.BEGIN)[1].split(ladder.END)[0]
    names = [line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines() if line.startswith("| ")]
    assert [name for name in names if name != "rung"] == [rung.name for rung in (*RUNGS, *MANY, *PREFIX)]
