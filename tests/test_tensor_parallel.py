"""Tensor parallelism: a cut model gives the logits of the whole one, for every family and number of ranks.

Ranks are threads here, which take no time to start; processes over gloo are in `test_parallel_engine.py`.
"""

import copy

import pytest
import torch
from torch import nn

from minillm.cache.contiguous import ContiguousCache
from minillm.errors import ParamsError
from minillm.measure.counts import forward_counts
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.layout import pack_linears
from minillm.model.shapes import known_shape, known_shapes
from minillm.model.weights import load_model, on_meta, random_model
from minillm.parallel import cost
from minillm.parallel.groups import PeerLost, all_gather, all_reduce, broadcast, run_threads
from minillm.parallel.tensor import (
    apply_tensor_parallel,
    check_ranks,
    cut,
    kv_heads_of,
    legal_ranks,
    local_config,
)
from minillm.parallel.weights import load_shard, random_shard, shard_bytes
from minillm.quant.linear import model_bytes, quantize_model
from tests.logit_table import CASES, build, prompt, relative_error


def small(**changes) -> Decoder:
    config = ModelConfig(
        vocab_size=211, hidden_size=48, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        max_length=64,
    ).with_changes(**changes)  # fmt: skip
    model = init_weights(Decoder(config), 1).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(6)
    return model


def parts_of(model: Decoder, ranks: int, run=None, prepare=None) -> list:
    """run(cut model, group) on every rank."""

    def rank_main(group):
        mine = apply_tensor_parallel(copy.deepcopy(model), group, kernel="unpack")
        mine = mine if prepare is None else prepare(mine)
        return (run or (lambda part, _: part(prompt(model.config.vocab_size))))(mine, group)

    return run_threads(rank_main, ranks)


@pytest.mark.parametrize("name", CASES)
def test_every_family_gives_the_logits_of_one_rank(name, tmp_path):
    """Cut in memory, and read slice by slice from the file, against the whole model; whole and through a cache."""
    build(CASES[name], tmp_path)
    whole = load_model(tmp_path, dtype="float32", device="cpu")
    tokens = prompt(whole.config.vocab_size)
    with torch.inference_mode():
        expected = whole(tokens)
    ranks = [r for r in (2, 4) if r in legal_ranks(whole.config)]
    assert ranks == ([2] if name == "smollm2" else [2, 4])
    for count in ranks:

        def cached(part):
            cache = ContiguousCache(part.config, *tokens.shape)
            return torch.cat([part(x, cache=cache) for x in tokens.split([5, 1, tokens.shape[1] - 6], 1)], 1)

        def rank_main(group):
            in_memory = apply_tensor_parallel(copy.deepcopy(whole), group)
            from_file = load_shard(tmp_path, group, dtype="float32", device="cpu")
            for (a, x), (b, y) in zip(in_memory.named_parameters(), from_file.named_parameters(), strict=True):
                assert a == b and torch.equal(x, y), a
            return in_memory(tokens), cached(pack_linears(from_file))

        for results in run_threads(rank_main, count):
            for got in results:
                assert relative_error(got, expected) < 1e-5


def test_the_comparison_would_see_a_missing_sum():
    model, tokens = small(), prompt(211)
    with torch.inference_mode():
        expected = model(tokens)

    def without(part, group):
        part.layers[0].attn.out = part.layers[0].attn.out.linear
        return part(tokens)

    assert relative_error(parts_of(model, 2, without)[0], expected) > 1e-2


def test_a_layer_has_two_all_reduces_and_nothing_else():
    model, tokens = small(num_layers=3), prompt(211, batch=2, length=10)

    def count(part, group):
        group.sent.clear()
        part(tokens)
        return group.sent

    for sent in parts_of(model, 2, count):
        assert [name for name, _ in sent] == ["all_reduce"] * (1 + 2 * 3) + ["all_gather"]
        reduced = sum(size for _, size in sent[1:-1])
        assert reduced == 3 * cost.layer_bytes(model.config, 20, 4)
        assert sent[-1][1] == 20 * 106 * 4  # the wider half of 211 logits


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 2, 4), (8, 2, 8), (8, 1, 4), (6, 6, 3), (12, 4, 2)])
def test_every_query_head_finds_its_kv_head(heads, kv_heads, ranks):
    config = small(num_heads=heads, num_kv_heads=kv_heads).config
    group = heads // kv_heads
    for rank in range(ranks):
        first, last = kv_heads_of(config, rank, ranks)
        local = local_config(config, ranks)
        assert last - first == local.num_kv_heads
        for head in range(local.num_heads):
            mine = first + head // local.group_size
            assert mine == (rank * local.num_heads + head) // group


def test_replicated_kv_heads_give_the_same_logits():
    model, tokens = small(num_heads=8, num_kv_heads=2, intermediate_size=64), prompt(211, 1, 20)
    with torch.inference_mode():
        expected = model(tokens)
    for got in parts_of(model, 8, lambda part, _: part(tokens)):
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ({}, 3, "must divide the 4 query heads; this model can have 1, 2, 4"),
        ({"num_heads": 6, "num_kv_heads": 2}, 3, "must divide the 2 KV heads, or be a multiple of them.*1, 2, 6"),
        ({"intermediate_size": 90}, 4, "MLP's width, 90; this model can have 1, 2$"),
        ({"vocab_size": 3}, 4, "vocabulary, 3"),
        ({}, 0, "at least 1"),
        ({}, True, "at least 1"),
        ({}, "2", "at least 1"),
    ],
)
def test_illegal_rank_counts_are_refused_with_the_legal_ones(change, ranks, message):
    config = small().config.with_changes(**change)
    with pytest.raises(ParamsError, match=message):
        check_ranks(config, ranks)


def test_smollm2_has_nine_heads():
    assert legal_ranks(known_shape("smollm2-135m")) == [1, 3]
    assert legal_ranks(known_shape("llama-3.1-70b")) == [1, 2, 4, 8, 16, 32, 64]


def test_one_rank_is_the_plain_model():
    model, tokens = small(), prompt(211)
    with torch.inference_mode():
        expected = model(tokens)
    (got,) = parts_of(model, 1)
    assert torch.equal(got, expected)


def test_a_cut_model_is_not_cut_again_and_a_packed_one_is_refused():
    with pytest.raises(ParamsError, match="cut already"):
        parts_of(small(), 2, lambda part, group: apply_tensor_parallel(part, group))
    with pytest.raises(ParamsError, match=r"attn.qkv is a PackedLinear.*before it is packed"):
        run_threads(lambda group: apply_tensor_parallel(pack_linears(small()), group), 2)
    with pytest.raises(ParamsError, match="must be a Decoder"):
        run_threads(lambda group: apply_tensor_parallel(nn.Linear(2, 2), group), 1)


@pytest.mark.parametrize(
    "settings",
    [
        dict(bits=8, group_size=None),
        dict(bits=4, group_size=8),
        dict(bits=4, group_size=8, symmetric=False),
        dict(bits=3, group_size=16, symmetric=False, zero="float"),
        dict(bits=8, group_size=None, keep=()),
    ],
)
def test_quantised_linears_are_cut_with_their_scales(settings):
    model = quantize_model(small(qkv_bias=True, out_bias=True), kernel="unpack", **settings)
    tokens = prompt(211)
    with torch.inference_mode():
        expected = model(tokens)
    for ranks in (2, 4) if settings["group_size"] != 16 else (2,):
        for got in parts_of(model, ranks):
            assert relative_error(got, expected) < 1e-5


def test_the_fast_quantised_forms_run_after_the_cut():
    model = quantize_model(small(hidden_size=64, intermediate_size=128, num_heads=4), bits=4, kernel="unpack")
    with torch.inference_mode():
        expected = model(prompt(211))

    def rank_main(group):
        part = apply_tensor_parallel(copy.deepcopy(model), group)  # kernel="auto"
        return type(part.layers[0].mlp.down.linear).__name__, part(prompt(211))

    for name, got in run_threads(rank_main, 2):
        assert name == "Int4Linear"
        assert relative_error(got, expected) < 0.05  # activations are rounded to 16 bits


def test_a_group_is_never_cut_in_two():
    model = quantize_model(small(), bits=4, group_size=16, kernel="unpack")
    with pytest.raises(ParamsError, match=r"group_size=16: must divide the 24 inputs of layers.0.mlp.down"):
        parts_of(model, 4)


def test_bytes_of_a_rank_by_formula(tmp_path):
    build(CASES["llama 3 (llama3 rope)"], tmp_path)
    whole = load_model(tmp_path, dtype="float32", device="cpu")

    def rank_main(group):
        return model_bytes(load_shard(tmp_path, group, device="cpu", dtype="float32"))

    for ranks in (1, 2, 4):
        found = run_threads(rank_main, ranks)
        assert found == [shard_bytes(whole.config, ranks, 4, rank) for rank in range(ranks)]
    assert shard_bytes(whole.config, 1, 4) == model_bytes(whole)
    big = known_shape("llama-3.1-70b")
    matrices = sum(p.numel() for p in on_meta(big).parameters() if p.dim() == 2)
    norms = sum(p.numel() for p in on_meta(big).parameters() if p.dim() == 1)
    assert shard_bytes(big, 8, 2) == 2 * (matrices // 8 + norms)


def test_a_slice_is_all_that_is_read(tmp_path, monkeypatch):
    """No tensor that is cut is ever read whole, and every byte read is a byte kept."""
    build(CASES["llama 2"], tmp_path)
    import minillm.parallel.weights as weights

    whole, parts = [], []
    reader, slicer = weights.read_parameter, weights.read_slice
    monkeypatch.setattr(weights, "read_parameter", lambda c, name, *a: whole.append(name) or reader(c, name, *a))

    def noted(*args):
        parts.append(slicer(*args))
        return parts[-1]

    monkeypatch.setattr(weights, "read_slice", noted)
    run_threads(lambda group: load_shard(tmp_path, group, device="cpu"), 1)
    alone = sum(part.nbytes for part in parts)
    parts.clear(), whole.clear()
    run_threads(lambda group: load_shard(tmp_path, group, device="cpu"), 2)
    assert all(name.endswith("norm.weight") for name in whole)
    assert sum(part.nbytes for part in parts) == alone


@pytest.mark.parametrize("name", ["smollm2-135m", "gpt2"])
def test_random_shapes_are_the_one_rank_model(name):
    config = known_shape(name).with_changes(num_layers=1, vocab_size=500)
    model = random_model(config, torch.float32, torch.device("cpu"))
    for rank in range(3):
        for parameter, value in random_shard(config, rank, 3, torch.float32, torch.device("cpu")).named_parameters():
            assert torch.equal(value, cut(config, parameter, rank, 3).of(model.get_parameter(parameter)))


# Groups of threads.


def test_collectives_of_threads():
    def rank_main(group):
        x = torch.full((3,), float(group.rank() + 1))
        gathered = torch.stack(all_gather(x, group))
        told = broadcast(torch.tensor([group.rank()]), group)
        return all_reduce(x, group).tolist(), gathered[:, 0].tolist(), told.item()

    assert run_threads(rank_main, 3) == [([6.0] * 3, [1.0, 2.0, 3.0], 0)] * 3


def test_a_rank_that_stays_away_is_named():
    with pytest.raises(PeerLost, match=r"collective 1, all_reduce of \[2\] float32; rank 1 has ended"):
        run_threads(lambda group: group.rank() == 1 or all_reduce(torch.ones(2), group), 3)


def test_ranks_that_disagree_are_told_what_each_brings():
    with pytest.raises(PeerLost, match=r"rank 0 brings all_reduce of \[1\] float32; rank 1 brings .* \[2\]"):
        run_threads(lambda group: all_reduce(torch.ones(group.rank() + 1), group), 2)


def test_the_error_of_a_rank_comes_before_those_of_its_peers():
    def rank_main(group):
        if group.rank() == 1:
            raise ZeroDivisionError("mine")
        return all_reduce(torch.ones(2), group)

    with pytest.raises(ZeroDivisionError, match="mine"):
        run_threads(rank_main, 2)


# The cost model.


def simulate_ring(size: int, ranks: int) -> tuple[int, int]:
    """(steps, bytes that one rank sends) of a ring all-reduce, chunk by chunk: the oracle of the formulas."""
    values = torch.rand(ranks, ranks, dtype=torch.float64)  # rank, chunk
    held, steps, sent = values.clone(), 0, 0
    for phase in ("reduce", "gather"):
        for step in range(ranks - 1):
            before, steps, sent = held.clone(), steps + 1, sent + size // ranks
            for rank in range(ranks):
                chunk = (rank - step + (phase == "gather")) % ranks
                to = (rank + 1) % ranks
                held[to, chunk] = before[rank, chunk] + (before[to, chunk] if phase == "reduce" else 0)
    torch.testing.assert_close(held, values.sum(0).expand(ranks, ranks))
    return steps, sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_ring_formulas_equal_a_simulated_ring(ranks):
    size = 24 * 1024
    assert (cost.messages(ranks), cost.sent_bytes(size, ranks)) == simulate_ring(size, ranks)


def test_small_messages_prefer_the_tree_and_large_ones_the_ring():
    link = cost.LINKS["net100"]
    for size, faster in ((1024, "tree"), (1 << 26, "ring")):
        times = {a: cost.allreduce_seconds(size, 16, link, a) for a in cost.ALGORITHMS}
        assert min(times, key=times.get) == faster
        assert cost.allreduce_seconds(size, 16, link) == times[faster]
    assert cost.allreduce_seconds(1 << 20, 1, link) == 0.0


def test_a_link_is_found_again_from_its_own_times():
    link, sizes = cost.Link("x", 20e-6, 2e9), [2**k for k in range(10, 24, 2)]
    times = [cost.allreduce_seconds(size, 4, link, "ring") for size in sizes]
    found = cost.fit_link(sizes, times, 4)
    assert found.latency == pytest.approx(20e-6) and found.bandwidth == pytest.approx(2e9)


@pytest.mark.parametrize("name", ["llama-3.1-70b", "gpt2", "mistral-7b"])
def test_layer_compute_counts_the_weights_of_the_layers(name):
    """Against chapter 00's counts of the whole model, whose layers are all alike."""
    config = known_shapes()[name]
    device = cost.Device("x", 1.0, 1e30)
    embeds = sum(p.numel() for n, p in on_meta(config).named_parameters() if "embed" in n or n.startswith("head"))
    weights = sum(p.numel() for n, p in on_meta(config).named_parameters() if p.dim() == 2) - embeds
    assert cost.layer_compute_seconds(config, 1, 1, device) * config.num_layers == 2 * weights
    flops = cost.layer_compute_seconds(config, 7, 1, cost.Device("y", 1e30, 1.0)) * config.num_layers
    counted = forward_counts(config, 7, scored=0).flops
    assert flops == sum(counted[part] for part in ("qkv", "out", "mlp"))


def test_communication_grows_with_ranks_and_slower_links():
    config = known_shape("llama-3.1-70b")
    shares = {name: [cost.comm_share(config, 8, r, cost.LINKS[name]) for r in (1, 2, 4, 8)] for name in cost.LINKS}
    for row in shares.values():
        assert row[0] == 0 and row == sorted(row)
    assert shares["nvlink4"][3] < shares["pcie5"][3] < shares["net400"][3] < shares["net100"][3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost.messages(0), "ranks=0"),
        (lambda: cost.messages(2, "star"), "algorithm='star'.*ring, tree"),
        (lambda: cost.fit_link([1], [1.0], 2), "at least two sizes"),
        (lambda: cost.fit_link([1, 2], [1.0, 0.0], 2), "above 0"),
        (lambda: cost.fit_link([1, 2], [1.0, 2.0], 1), "one rank sends nothing"),
        (lambda: run_threads(print, 0), "ranks=0"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ParamsError, match=message):
        call()
