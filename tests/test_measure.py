"""Chapter 00's instruments: counts equal to torch's, request metrics equal to a trace worked out by hand."""

import json
import math

import pytest
import torch

from minillm.cache.contiguous import ContiguousCache
from minillm.measure import clock, counts, machine, records
from minillm.measure.roofline import Roofline, place, roofline
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.shapes import known_shape

SMALL = ModelConfig(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=16,
    max_length=64,
)  # fmt: skip
CONFIGS = {
    "gqa": SMALL,
    "mha": SMALL.with_changes(num_kv_heads=8),
    "mqa, tied": SMALL.with_changes(num_kv_heads=1, tie_embeddings=True),
    "window": SMALL.with_changes(windows=(16, None)),
    "soft cap, post norms": SMALL.with_changes(attention_softcap=30.0, logit_softcap=20.0, post_norms=True),
    "qk norm, bias": SMALL.with_changes(qk_norm=True, qkv_bias=True),
    "gpt2": SMALL.with_changes(
        positions="learned", norm_kind="layer", gated_mlp=False, activation="gelu", qkv_bias=True, out_bias=True,
        mlp_bias=True, tie_embeddings=True,
    ),
}  # fmt: skip


@pytest.fixture(params=CONFIGS, ids=list(CONFIGS))
def config(request):
    return CONFIGS[request.param]


def test_parameters_and_bytes_equal_the_module(config):
    model = Decoder(config)
    assert counts.parameter_count(config) == sum(p.numel() for p in model.parameters())
    assert counts.weight_bytes(config, 4) == sum(p.nbytes for p in model.parameters())
    half = model.to(torch.bfloat16)
    assert counts.weight_bytes(config, 2) == sum(p.nbytes for p in half.parameters())
    parts = counts.parameters(config)
    assert parts["mlp"] == sum(p.numel() for layer in model.layers for p in layer.mlp.parameters())
    assert parts["qkv"] == sum(p.numel() for layer in model.layers for p in layer.attn.qkv.parameters())
    assert parts["head"] == (0 if config.tie_embeddings else model.head.weight.numel())


def test_flops_equal_torch_counter_in_prefill_decode_and_chunks(config):
    model, batch = Decoder(config).eval(), 3
    cache = ContiguousCache(config, batch, 40)
    for new in (21, 1, 5):
        before = cache.length
        measured = counts.counted_flops(lambda n=new: model(torch.randint(0, 101, (batch, n)), cache=cache))
        expected = counts.forward_counts(config, new, before, batch, causal=False)
        assert measured == expected.total_flops
    alone = counts.counted_flops(lambda: model(torch.randint(0, 101, (batch, 9))))
    assert alone == counts.forward_counts(config, 9, 0, batch, causal=False).total_flops


def test_head_for_the_last_token_only():
    model, tokens = Decoder(SMALL).eval(), torch.randint(0, 101, (2, 9))
    measured = counts.counted_flops(lambda: model.logits(model.hidden(tokens)[:, -1]))
    assert measured == counts.forward_counts(SMALL, 9, batch=2, causal=False, scored=1).total_flops


def test_kv_bytes_equal_the_cache(config):
    cache = ContiguousCache(config, 3, 40, torch.bfloat16)
    assert counts.kv_bytes_per_token(config, 2) * 3 * 40 == cache.nbytes
    one = counts.forward_counts(config, 1, 39, 3, dtype_bytes=2)
    assert one.kv_written == cache.nbytes / 40
    if not config.windows:
        assert one.kv_read == cache.nbytes


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_visible_pairs_equal_brute_force(window):
    for new in (1, 2, 7, 20):
        for context in (0, 1, 9, 30):
            brute = sum(min(context + i + 1, window or 10**9) for i in range(new))
            assert counts.visible_pairs(new, context, window) == brute


def test_published_sizes():
    published = {  # parameters, as the safetensors files of the releases sum to
        "gpt2": 124_439_808,
        "smollm2-135m": 134_515_008,
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-2-70b": 68_976_648_192,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
        "mistral-7b": 7_241_732_096,
        "llama-3.2-1b": 1_235_814_400,
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-7b": 7_615_616_512,
        "qwen3-8b": 8_190_735_360,
        "gemma-2-9b": 9_241_705_984,
    }
    assert {name: counts.parameter_count(known_shape(name)) for name in published} == published
    with pytest.raises(ValueError, match=r"llama-2-7b"):
        known_shape("shape:llama-9b")


def test_decode_is_two_flops_per_parameter_and_intensity_grows_with_batch():
    config = known_shape("llama-2-7b")
    matrices = counts.parameter_count(config) - counts.parameters(config)["embedding"]
    step = counts.forward_counts(config, 1, dtype_bytes=2)
    assert step.total_flops == pytest.approx(2 * matrices, rel=1e-3)
    assert step.intensity == pytest.approx(1.0, rel=1e-2)  # 2 FLOPs a weight, 2 bytes a weight
    assert counts.forward_counts(config, 1, batch=32, dtype_bytes=2).intensity == pytest.approx(32, rel=0.02)
    prefill = counts.forward_counts(config, 512, dtype_bytes=2)
    assert prefill.intensity > 400


@pytest.mark.parametrize(
    "bad",
    [
        {"new_tokens": 0},
        {"new_tokens": 1.5},
        {"new_tokens": "2"},
        {"context": -1},
        {"batch": 0},
        {"scored": 5},
        {"dtype_bytes": 0},
        {"dtype_bytes": math.nan},
        {"kv_bytes": -2},
        {"kv_bytes": "2"},
    ],
)
def test_illegal_counts_are_one_clear_error(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(ValueError, match=f"^{name}={value!r}: must be"):
        counts.forward_counts(SMALL, **({"new_tokens": 2} | bad))


def trace():
    """Two requests: waits 1 s then a token every 0.1 s; waits 0.2 s, then gaps of 0.2 and 0.4 s; a one-token one."""
    a = clock.RequestTimes(0.0, [1.0, 1.1, 1.2, 1.3, 1.4], scheduled=0.7, prompt_tokens=10)
    b = clock.RequestTimes(0.5, [0.7, 0.9, 1.3], prompt_tokens=20)
    c = clock.RequestTimes(1.0, [2.0], prompt_tokens=1)
    return [a, b, c]


def test_request_times_by_hand():
    a, b, c = trace()
    assert (a.ttft, a.e2e, a.queue, a.output_tokens) == (1.0, 1.4, 0.7, 5)
    assert a.tpot == pytest.approx(0.1)
    assert b.ttft == pytest.approx(0.2)
    assert b.itl == pytest.approx([0.2, 0.4])
    assert b.tpot == pytest.approx(sum(b.itl) / 2) == pytest.approx((b.e2e - b.ttft) / (b.output_tokens - 1))
    assert (c.tpot, c.itl, c.ttft, c.queue) == (None, [], 1.0, None)
    assert clock.RequestTimes(0.0).ttft is None


def test_summary_and_goodput_by_hand():
    found = clock.summary(trace(), clock.SLO(ttft=0.5))
    assert (found.requests, found.output_tokens, found.prompt_tokens, found.duration) == (3, 9, 31, 2.0)
    assert found.output_throughput == 4.5
    assert found.total_token_throughput == 20.0
    assert found.request_throughput == 1.5
    assert found.goodput == 0.5
    assert found.itl.count == 6
    assert found.itl.mean == pytest.approx(1 / 6)
    assert found.tpot.count == 2
    assert found.tpot.percentiles[50] == pytest.approx(0.2)
    assert found.ttft.percentiles[50] == pytest.approx(1.0)
    assert clock.summary(trace(), clock.SLO(tpot=0.15)).good_requests == 2  # the one-token request has no TPOT
    assert clock.summary(trace()).good_requests == 3
    with pytest.raises(ValueError, match="at least one request"):
        clock.summary([clock.RequestTimes(0.0)])


def test_rates_over_no_time_are_one_clear_error():
    for requests, options in (
        ([clock.RequestTimes(0.0, [0.0])], {}),
        ([clock.RequestTimes(0.0, [1.0])], {"duration": -1}),
    ):
        with pytest.raises(ValueError, match="duration="):
            clock.summary(requests, **options)
    with pytest.raises(ValueError, match="bandwidth=0"):
        Roofline(1e12, 0)


def test_paired_alternates_and_divides_pair_by_pair():
    calls = []
    found = clock.paired(lambda: calls.append("a"), lambda: calls.append("b"), repeats=3, warmup=1)
    assert "".join(calls) == "ab" * 4
    assert found.ratio.samples == tuple(x / y for x, y in zip(found.a.samples, found.b.samples))
    timing = clock.Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert (timing.median, timing.quartiles, timing.best, timing.spread) == (3.0, (2.0, 4.0), 1.0, 2 / 3)
    assert len(clock.timed(lambda: None, repeats=4, warmup=0).samples) == 4
    with pytest.raises(ValueError, match="repeats=0"):
        clock.timed(lambda: None, repeats=0)


def test_records_survive_json_and_refuse_what_was_not_measured(tmp_path):
    made = records.figure("decode", 41.5, "tokens/s", spread=(40.0, 43), model="tiny", workload={"batch": 1})
    assert made.device
    assert made.versions["torch"] == torch.__version__
    records.write([made, made], tmp_path / "here.json")
    assert records.read(tmp_path / "here.json") == [made, made]
    with pytest.raises(ValueError, match="not measured"):
        records.Figure("decode", math.nan, "tokens/s")
    (tmp_path / "bad.json").write_text(json.dumps([{"name": "decode", "value": 1}]))
    with pytest.raises(ValueError, match="lacks unit, device"):
        records.read(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        records.read(tmp_path / "bad.json")


def test_roofline_by_hand():
    roof = Roofline(peak=100e9, bandwidth=20e9)
    assert roof.ridge == 5.0
    assert (roof.attainable(0.5), roof.attainable(5.0), roof.attainable(80.0)) == (10e9, 100e9, 100e9)
    x, y = roof.curve(0.5, 50, 3)
    assert (x.tolist(), y.tolist()) == (pytest.approx([0.5, 5, 50]), pytest.approx([10e9, 100e9, 100e9]))
    step = counts.forward_counts(known_shape("smollm2-135m"), 1, 100)
    decode = place(step, 2 * step.total_bytes / 20e9, roof, "decode")
    assert (decode.bound, decode.share_of_bandwidth, decode.share_of_roof) == ("memory", 0.5, 0.5)
    assert decode.flops_per_second / decode.bytes_per_second == pytest.approx(step.intensity)
    long = counts.forward_counts(known_shape("smollm2-135m"), 512)
    prefill = place(long, 4 * long.total_flops / 100e9, roof)
    assert (prefill.bound, prefill.share_of_peak) == ("compute", 0.25)
    with pytest.raises(ValueError, match="seconds=0"):
        place(step, 0, roof)


def test_ceilings_are_measured_once_and_named():
    found = machine.ceilings("cpu", fast=True)
    assert found is machine.ceilings("cpu", fast=True)
    assert found.read_bandwidth == max(found.read_kernels.values()) > 0
    assert found.copy_bandwidth > 0
    assert set(found.matmul) >= {"float32", "bfloat16"}
    assert str(torch.get_num_threads()) in str(found)
    roof = roofline(found, torch.float32)
    assert roof.attainable(roof.ridge * 10) == found.peak("float32") == found.matmul["float32"]
    with pytest.raises(ValueError, match="no matmul ceiling was measured for int8"):
        found.peak("int8")


def test_recorded_figures_are_the_same_record(tmp_path, monkeypatch):
    from minillm.lab.recorded import recorded

    made = records.figure("decode", 41.5, "tokens/s", model="tiny", workload="batch 1")
    records.write([made], tmp_path / "gpu.json")
    monkeypatch.setenv("MINILLM_MEASUREMENTS", str(tmp_path))
    found = recorded("decode", model="tiny")
    assert all(getattr(found, name) == getattr(made, name) for name in records.Figure.__dataclass_fields__)
