"""The engine's benchmarks do what they say, on a small model; no test asserts a time."""

import random

import pytest
from test_same_tokens import model_of

from minillm.engine import bench
from minillm.engine.engine import Engine
from minillm.measure.bench import NotMeasured, as_transformers
from minillm.model.generate import generate_naive


@pytest.fixture(scope="module")
def model():
    return model_of({"heads": "gqa", "window": None})


@pytest.fixture(scope="module")
def work():
    rng = random.Random(1)
    return [([rng.randrange(5, 211) for _ in range(n)], answer) for n, answer in ((9, 3), (2, 9), (17, 5))]


def test_engine_and_peers_answer_the_same_workload(model, work):
    pytest.importorskip("transformers")
    theirs = as_transformers(model)
    texts = bench.run_engine(Engine(model, bench.options_for(work), eos_ids=()), work)
    assert texts == [generate_naive(model, prompt, answer) for prompt, answer in work]
    for peer in (bench.padded, bench.continuous):
        took, found = peer(theirs, work)
        assert took > 0 and [len(t) for t in found] == [answer for _, answer in work]
        assert bench.agreement(texts, found) > 0.9


def test_agreement_counts_tokens_up_to_the_first_difference():
    assert bench.agreement([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == 3 / 5


def test_the_workload_is_as_described():
    work = bench.requests(200, 500)
    assert {min(len(p) for p, _ in work), max(len(p) for p, _ in work)} <= set(range(16, 257))
    assert {min(a for _, a in work), max(a for _, a in work)} <= set(range(16, 129))
    assert work == bench.requests(200, 500)


def test_bookkeeping_is_a_share_and_leaves_the_model_as_it_was(model, work):
    engine = Engine(model, bench.options_for(work), eos_ids=())
    assert 0 < bench.bookkeeping_share(engine, work) < 1
    assert "hidden" not in vars(model) and "logits" not in vars(model) and "sample" not in vars(engine.sampler)


def test_the_scheduler_bench_needs_no_model():
    (figure,) = bench.bench_scheduler(queue=50, steps=5, repeats=1)
    assert figure.name == "scheduler.step" and figure.unit == "s" and figure.workload["waiting"] == 50


def test_a_missing_model_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(bench, "is_available", lambda name: False)
    for run in (bench.bench_throughput, bench.bench_prefix):
        with pytest.raises(NotMeasured, match="minillm pull"):
            next(run())
