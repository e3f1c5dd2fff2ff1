"""Chapter 03's ledger: well-known figures, tensors counted to the byte, a process measured from outside."""

import pytest
import torch

from minillm.cache.contiguous import ContiguousCache
from minillm.measure import memory
from minillm.measure.activations import Forward, forward_bytes, peak_phase
from minillm.measure.memory import CARDS, GB, PRECISIONS, GiB, Precision
from minillm.measure.peak import LiveBytes, _forward, measure_forward, measure_peak
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.shapes import known_shape

LLAMA_7B = known_shape("llama-7b")
SMALL = ModelConfig(
    vocab_size=600, hidden_size=64, intermediate_size=160, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=8,
    max_length=256,
)  # fmt: skip


def test_kv_of_llama_7b():
    assert memory.kv_bytes(LLAMA_7B, 1, 2048) == GiB
    assert memory.kv_bytes(LLAMA_7B, 8, 4096) / GB == pytest.approx(17.2, abs=0.05)


def test_kv_of_a_7b_gqa_model_at_128k():
    gqa = LLAMA_7B.with_changes(num_kv_heads=8)
    assert memory.kv_bytes(gqa, 1, 128 * 1024) / GB == pytest.approx(17.2, abs=0.05)
    assert memory.kv_bytes(LLAMA_7B, 1, 128 * 1024) == 4 * memory.kv_bytes(gqa, 1, 128 * 1024)


def test_kv_of_13b_mha_at_128k_for_16_requests_is_terabytes_not_tens_of_gigabytes():
    needed = memory.kv_bytes(known_shape("llama-2-13b"), 16, 128 * 1024)
    assert needed == 2 * 16 * 40 * 40 * 128 * 131072 * 2
    assert needed / 10**12 == pytest.approx(1.7, abs=0.05)
    assert needed > 11 * CARDS[141].bytes


def test_kv_per_token_by_kind():
    found = memory.kv_per_token(60, 128, 128, 8)  # DeepSeek-V2's shape
    assert found["MHA"] == 2 * 60 * 128 * 128 * 2
    assert (found["GQA"], found["MQA"]) == (found["MHA"] // 16, found["MHA"] // 128)
    assert found["MLA"] == 60 * (512 + 64) * 2
    assert found["MHA"] / found["MLA"] == pytest.approx(56.9, abs=0.1)


def test_kv_equals_the_cache():
    for bits, dtype in ((32, torch.float32), (16, torch.bfloat16)):
        assert memory.kv_bytes(SMALL, 3, 50, bits) == ContiguousCache(SMALL, 3, 50, dtype).nbytes
    assert memory.kv_bytes(SMALL, 1, 10, 8) == 2 * 3 * 2 * 10 * (8 + 2)  # a byte a value, two bytes a vector


def test_weights_by_precision():
    assert memory.weight_bytes(LLAMA_7B) / GB == pytest.approx(13.48, abs=0.01)
    model = Decoder(SMALL)
    linears = [m for layer in model.layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    values, rest = sum(m.weight.numel() for m in linears), 0
    rest = sum(p.numel() for p in model.parameters()) - values
    rows = sum(m.out_features for m in linears)
    assert memory.weight_bytes(SMALL, PRECISIONS["int8"]) == rest * 2 + values + rows * 2
    assert memory.weight_bytes(SMALL, PRECISIONS["int4-g32"]) == rest * 2 + values // 2 + values // 32 * 2
    with_zeros = Precision(4, 32, zero_points=True)
    assert memory.weight_bytes(SMALL, with_zeros) - memory.weight_bytes(SMALL, PRECISIONS["int4-g32"]) == values // 16
    with pytest.raises(ValueError, match="weights=5 bits"):
        Precision(5)


RUNS = {
    "prefill": Forward(2, 64),
    "decode": Forward(4, 1, 100),
    "a chunk": Forward(2, 32, 70),
    "padded": Forward(3, 48, padded=True),
    "all scored": Forward(2, 64, scored=64),
    "nothing scored": Forward(1, 200, scored=0),
}
KINDS = {
    "gqa": SMALL,
    "small mlp": SMALL.with_changes(intermediate_size=16, num_kv_heads=8),
    "qk norm": SMALL.with_changes(intermediate_size=16, qk_norm=True),
    "window": SMALL.with_changes(windows=(24, None, 24)),
    "gemma": SMALL.with_changes(post_norms=True, local_layers=(0, 1), rope_local_theta=1e4, windows=(24, 24, None)),
    "soft caps": SMALL.with_changes(attention_softcap=30.0, logit_softcap=20.0),
    "gpt2": SMALL.with_changes(positions="learned", norm_kind="layer", gated_mlp=False, activation="gelu"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", RUNS)
def test_activation_peak_equals_the_tensors_alive(kind, run):
    config, run = KINDS[kind], RUNS[run]
    model = Decoder(config).eval()
    padding = torch.arange(run.batch) if run.padded else None
    cache = ContiguousCache(config, run.batch, run.length, padding=padding)
    cache.lengths = [run.context] * config.num_layers
    with LiveBytes() as seen:
        _forward(model, cache, run)
    assert seen.peak == pytest.approx(forward_bytes(config, run), rel=0.01), seen.operation


def test_predicted_peak_within_5_percent_of_a_fresh_process():
    config = ModelConfig(
        vocab_size=48000, hidden_size=512, intermediate_size=1408, num_layers=2, num_heads=8, num_kv_heads=4,
        head_dim=64, max_length=4096,
    )  # fmt: skip
    run = Forward(batch=4, new=512)
    predicted = memory.forward_ledger(config, run, PRECISIONS["fp32"])
    measured = measure_forward(config, run)
    assert 250e6 < predicted.total < 400e6
    assert predicted.activations > 0.15 * predicted.total
    assert predicted.weights + predicted.kv == pytest.approx(measured["weights_and_kv"], rel=0.02)
    assert predicted.total == pytest.approx(measured["total"], rel=0.05)
    assert predicted.activations + predicted.buffers == pytest.approx(measured["tensors"], rel=0.01)


def test_measure_peak_sees_what_is_freed_again():
    found = measure_peak(lambda: torch.ones(16 * 2**20).sum().item(), tensors=True)
    assert found.tensors == pytest.approx(64 * 2**20, rel=0.01)
    assert 0 <= found.bytes < 80 * 2**20  # below 64 MiB where the allocator had kept some from earlier


def test_ledger_and_what_fits():
    entry = memory.ledger(LLAMA_7B, 8, 4096)
    assert entry.total == sum(entry.rows().values())
    assert entry.kv > entry.weights > entry.activations > entry.buffers
    for sold, card in CARDS.items():
        batch = memory.largest_batch(LLAMA_7B, card.bytes, 4096)
        assert (batch == 0) == (sold == 8)  # 13.5 GB of weights do not fit 8 GB at all
        if batch:
            assert memory.fits(LLAMA_7B, card.bytes, batch, 4096)
            assert not memory.fits(LLAMA_7B, card.bytes, batch + 1, 4096)
            context = memory.largest_context(LLAMA_7B, card.bytes)
            assert memory.fits(LLAMA_7B, card.bytes, 1, context)
            assert not memory.fits(LLAMA_7B, card.bytes, 1, context + 1)
    assert memory.largest_batch(LLAMA_7B, CARDS[8].bytes, 4096, precision=PRECISIONS["int4-g128"]) > 0


def test_a_7b_model_on_24_gb_at_128k_does_not_fit_until_everything_shrinks():
    card, long = CARDS[24].bytes, 128 * 1024
    gqa = LLAMA_7B.with_changes(num_kv_heads=8)
    assert not memory.fits(LLAMA_7B, card, 1, long)
    assert not memory.fits(gqa, card, 1, long)
    assert memory.fits(gqa, card, 1, long, precision=Precision(4, 128, kv=8))
    assert not memory.fits(LLAMA_7B, card, 1, long, precision=Precision(4, 128, kv=8))


def test_chunks_bound_the_activations():
    whole = memory.ledger(LLAMA_7B, 1, 32768, prefill_chunk=None)
    chunked = memory.ledger(LLAMA_7B, 1, 32768, prefill_chunk=2048)
    assert whole.activations > 15 * chunked.activations
    naive = memory.ledger(LLAMA_7B, 1, 32768, prefill_chunk=None, attention="naive")
    assert naive.phase == "attention"
    assert naive.activations > 32 * 32768**2 * 2  # one copy of the scores alone: 69 GB


@pytest.mark.parametrize("bad", [{"attention": "magic"}, {"new": 0}, {"batch": 0}, {"context": -1}, {"scored": 9}])
def test_illegal_forwards_are_one_clear_error(bad):
    with pytest.raises(ValueError, match=rf"^{next(iter(bad))}=.*must be"):
        Forward(**({"batch": 1, "new": 4} | bad))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.kv_bytes(SMALL, -1, 10), "batch=-1"),
        (lambda: memory.kv_bytes(SMALL, 1, 1.5), "length=1.5"),
        (lambda: memory.Precision(4, group=0), "group=0"),
        (lambda: memory.largest_batch(SMALL, "24GB", 10), "memory='24GB'"),
        (lambda: memory.largest_batch(SMALL, float("inf"), 10), "memory=inf"),
        (lambda: memory.fits(SMALL, 10**9, 1, 10, utilization=1.5), "utilization=1.5"),
        (lambda: memory.ledger(SMALL, 1, 10, prefill_chunk=0), "new=0"),
    ],
)
def test_illegal_ledgers_are_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_peak_phase_is_the_head_when_all_tokens_are_scored():
    assert peak_phase(SMALL.with_changes(vocab_size=2000), RUNS["all scored"])[0] == "head"
    assert peak_phase(SMALL, RUNS["prefill"])[0] == "mlp"
