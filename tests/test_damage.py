"""The table of damage: bytes against packed modules, values against their parts, and what a row must show."""

import copy
import math

import pytest
import torch

from minillm.errors import ParamsError
from minillm.measure.bench import NotMeasured
from minillm.measure.choices import passage, turn
from minillm.measure.damage import METHODS, Method, as_text, judge, kv_bytes, methods, scheme, timings, weight_bytes
from minillm.measure.damage_bench import bench_damage
from minillm.measure.gptq_awq_bench import bench_gptq_awq, ways
from minillm.measure.quality import perplexity
from minillm.model.hub import ASSETS
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model
from minillm.quant.gptq import gptq_model
from minillm.quant.linear import linears, quantize_model


@pytest.fixture(scope="module")
def model():
    return load_model("tiny", "float32", "cpu")


@pytest.fixture(scope="module")
def tokens():
    return load_tokenizer("tiny").encode((ASSETS / "heldout.txt").read_text(encoding="utf-8")[:40_000])


@pytest.fixture(scope="module")
def questions(tokens):
    text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")[:40_000]
    return {"passage": passage(tokens, 12), "turn": turn(load_tokenizer("tiny"), text, 12)}


@pytest.fixture(scope="module")
def rows(model, tokens, questions):
    calibration = torch.tensor(tokens[:512]).view(4, 128)
    return {row.name: row for row in judge(model, tokens[-1280:], calibration, questions)}


def buffers_of(module):
    return sum(t.numel() * t.element_size() for t in module.buffers())


@pytest.mark.parametrize("name", ["INT8", "INT4", "INT3", "INT2", "W8A8", "FP8"])
def test_bytes_are_those_of_the_modules_that_serve(model, name):
    (method,) = methods([name])
    served = copy.deepcopy(model)
    if name.startswith("INT"):
        bits = int(name[3:])
        settings = dict(group_size=None, symmetric=True) if bits == 8 else dict(group_size=64, symmetric=False)
        quantize_model(served, bits=bits, keep=("head",), kernel="unpack", **settings)
    else:
        method.change(served, None)
    packed = sum(buffers_of(m) for m in served.modules() if hasattr(m, "in_features"))
    kept = {id(p): p for p in served.parameters()}.values()
    assert weight_bytes(model, method.bits) == packed + 2 * sum(p.numel() for p in kept)


def test_bytes_of_the_original_are_two_a_number(model):
    assert weight_bytes(model) == 2 * sum(p.numel() for p in model.parameters())
    c = model.config
    assert kv_bytes(model) == 4 * c.num_layers * c.num_kv_heads * c.head_dim
    assert kv_bytes(model, "int8") < kv_bytes(model) and kv_bytes(model, "int2") < kv_bytes(model, "int4")


def test_every_method_is_a_row_and_the_original_is_left_alone(model, rows):
    assert list(rows) == [method.name for method in METHODS]
    again = load_model("tiny", "float32", "cpu").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    assert {row.chapter for row in rows.values()} >= {11, 12, 13, 14}


def test_a_row_is_made_of_its_parts(model, tokens, rows):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for linear in linears(changed, ("head",)).values():  # INT2 by hand: 64 neighbours, codes 0 .. 3
            w = linear.weight.view(-1, 64)
            low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
            exact = ((high - low) / 3).clamp(min=1e-30)
            zero, scale = (-low / exact).round(), exact.bfloat16().float()
            codes = (w / scale + zero).round().clamp(0, 3)
            linear.weight.copy_(((codes - zero) * scale).view_as(linear.weight))
    expected = perplexity(changed, tokens[-1280:], 256)
    assert rows["INT2"].damage.perplexity.value == pytest.approx(expected, rel=1e-3)
    ratio = expected / perplexity(model, tokens[-1280:], 256)
    assert rows["INT2"].damage.ratio.value == pytest.approx(ratio, rel=1e-3)


def test_the_order_that_the_chapters_found(rows):
    kl = {name: row.damage.mean_kl.value for name, row in rows.items()}
    assert kl["INT8"] < kl["INT4"] < kl["INT3"] < kl["INT2"]
    assert kl["KV INT8"] < kl["KV INT4"] < kl["KV INT2"]
    for bits in (4, 3, 2):
        assert max(kl[f"INT{bits} GPTQ"], kl[f"INT{bits} AWQ"]) < kl[f"INT{bits}"]
    assert 0 < kl["bfloat16"] < 0.001 and 0 < kl["W8A8"] < 0.01 and 0 < kl["FP8"] < 0.02
    assert rows["INT2"].damage.agreement.high < rows["INT4"].damage.agreement.low


def test_kl_and_top1_see_what_perplexity_does_not(rows):
    """Each interval of the perplexity ratio holds 1; one greedy token in thirty or more is another."""
    hidden = [row for row in rows.values() if row.damage.ratio.low <= 1 <= row.damage.ratio.high]
    assert any(row.damage.agreement.high < 0.97 and row.damage.mean_kl.low > 0.001 for row in hidden)


def test_a_row_with_rare_rows_in_two_bits_reads_well_and_never_stops(model, tokens, questions):
    """The chapter's backfire: the rows of the head whose tokens the text does not have, at 2 bits."""
    seen = torch.bincount(torch.tensor(tokens), minlength=model.config.vocab_size)

    def rare_rows(changed, calibration):
        weight = changed.head.weight.detach().clone()
        scale = weight.abs().amax(-1, keepdim=True)  # symmetric, 2 bits: -1, 0, 1
        weight[seen == 0] = ((weight / scale).round() * scale)[seen == 0]
        changed.head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        changed.head.weight = torch.nn.Parameter(weight, requires_grad=False)

    (row,) = judge(model, tokens[-1280:], None, questions, [Method("rare rows", 15, rare_rows)])
    assert row.damage.ratio.value < 1.05 and row.damage.agreement.value > 0.95
    told_apart = row.scores["passage"].gain(row.original["passage"])
    assert told_apart.low <= 0 <= told_apart.high
    assert row.scores["turn"].gain(row.original["turn"]).high < -0.2


def test_kv_runs_through_the_cache(model):
    ids = torch.tensor([[5, 6, 7, 8] * 20])
    (method,) = methods(["KV INT2"])
    assert not torch.allclose(method.run(model)(ids), model(ids), atol=1e-2)
    (method,) = methods(["KV INT8"])
    assert torch.allclose(method.run(model)(ids), model(ids), atol=0.3)


def test_times_are_pairs_and_only_of_methods_that_have_kernels(model):
    for name in ("INT8", "W8A8", "KV INT4"):
        decoding, reading = timings(model, *methods([name]), prompt=8, tokens=2, repeats=1)
        assert all(len(t.samples) == 1 for pair in (decoding, reading) for t in (pair.a, pair.b))
    assert timings(model, *methods(["INT3"])) is None and timings(model, *methods(["INT4 GPTQ"])) is None
    if model.device.type == "cpu":
        assert timings(model, *methods(["FP8"])) is None  # emulated: its time means nothing


def test_the_table_has_a_line_a_row(rows):
    lines = as_text(rows.values()).splitlines()
    assert len(lines) == 1 + len(METHODS) and len({len(line) for line in lines}) == 1
    assert lines[0].split()[:2] == ["weights", "KV/token"] and "turn, change" in lines[0]
    assert as_text([])


def test_the_benchmark_gives_every_figure_of_a_row():
    figures = {found.name: found for found in bench_damage(smoke=True)}
    parts = ("ratio", "kl", "top1", "passage", "turn", "bytes", "kv_bytes")
    assert set(figures) == {f"damage.{m}.{part}" for m in ("int4", "int4_gptq", "kv_int2") for part in parts}
    assert all(found.model == "tiny" and found.workload["window"] == 256 for found in figures.values())
    for name, found in figures.items():
        assert found.spread is None if name.endswith("bytes") else found.spread[0] <= found.value <= found.spread[1]
    assert figures["damage.int4.kl"].value > figures["damage.int4_gptq.kl"].value > 0
    assert figures["damage.kv_int2.kv_bytes"].value < figures["damage.int4.kv_bytes"].value


def test_the_layers_of_a_row_are_those_of_the_method(model, tokens, rows):
    """GPTQ and AWQ tell each linear's output error beside that of rounding to the nearest; others do not."""
    results = gptq_model(copy.deepcopy(model), torch.tensor(tokens[:512]).view(4, 128), scheme(3), act_order=True)
    expected = {name: result.error / result.rtn_error for name, result in results.items()}
    assert rows["INT3 GPTQ"].layers == pytest.approx(expected, rel=1e-3) and len(expected) == 24
    assert len(rows["INT2 AWQ"].layers) == 24 and not rows["INT3"].layers and not rows["W8A8"].layers


def test_chapter_12s_benchmark_gives_each_way_and_each_pair():
    figures = {found.name.removeprefix("gptq_awq."): found for found in bench_gptq_awq(smoke=True)}
    names = list(ways(3, {}))
    parts = {f"int3.{name}.{part}" for name in names for part in ("ratio", "kl", "top1")}
    parts |= {f"int3.{name}.{part}" for name in names[1:] for part in ("layer_worst", "layer_mean")}
    pairs = [(b, a) for i, a in enumerate(names) for b in names[i + 1 :]]
    parts |= {f"int3.{b}_less_{a}.{part}" for b, a in pairs for part in ("loss", "kl")}
    assert set(figures) == parts | {"float.perplexity"}
    kl = {name: figures[f"int3.{name}.kl"].value for name in names}
    for b, a in pairs:
        gap = figures[f"int3.{b}_less_{a}.kl"]
        assert gap.value == pytest.approx(kl[b] - kl[a], abs=1e-6) and gap.spread[0] <= gap.value <= gap.spread[1]
        loss = figures[f"int3.{b}_less_{a}.loss"].value
        ratio = figures[f"int3.{b}.ratio"].value / figures[f"int3.{a}.ratio"].value
        assert math.exp(loss) == pytest.approx(ratio, rel=1e-4)
    for name in names[1:]:
        assert 0 < figures[f"int3.{name}.layer_mean"].value <= figures[f"int3.{name}.layer_worst"].value <= 1
    assert kl["gptq"] < kl["rtn"] and kl["awq"] < kl["rtn"]
    assert figures["float.perplexity"].value > 1 and figures["float.perplexity"].workload["calibration"] == 1024


def test_the_benchmark_says_which_model_is_not_here():
    for bench in (bench_damage, bench_gptq_awq):
        with pytest.raises(NotMeasured, match="no-such-model"):
            next(bench("no-such-model"))
    with pytest.raises(NotMeasured, match="fewer than"):
        next(bench_gptq_awq("tiny", samples=4000))


def test_an_unknown_method_is_named():
    with pytest.raises(ParamsError, match="INT5"):
        methods(["INT4", "INT5"])
