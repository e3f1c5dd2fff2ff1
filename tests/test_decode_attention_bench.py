"""`minillm bench decode-attention` at its smallest: every method's values are checked before any is timed."""

import pytest
import torch

from minillm.measure import decode_attention_bench as bench


def test_smoke_gives_figures_for_each_method():
    figures = {f.name: f for f in bench.bench_decode_attention(smoke=True, repeats=1)}
    for method in ("sdpa", "gathered"):
        rate = figures[f"decode_attention.batch2.context100.{method}"]
        assert rate.unit == "B/s" and rate.value > 0 and rate.workload["context"] == 100
        assert f"decode_attention.batch2.context100.{method}.share" in figures


def test_a_wrong_method_is_refused():
    step = bench.make_step(2, 37, 4, 2, 16, torch.float32, torch.device("cpu"), 2)
    assert step.nbytes == 2 * 2 * 2 * 37 * 16 * 4
    bench.check(step, {"sdpa": bench.sdpa, "gathered": bench.gathered}, torch.float32)
    for i in (0, 1):  # both sets hold the same numbers in a row and in blocks
        assert torch.allclose(bench.sdpa(step, i), bench.gathered(step, i), atol=1e-5)
    with pytest.raises(RuntimeError, match="half"):
        bench.check(step, {"half": lambda s, i: bench.sdpa(s, i) / 2}, torch.float32)
