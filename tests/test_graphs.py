"""Decode graphs: padding, buffers and fallback, with a backend that keeps a graph's contract on a CPU.

The same tests run against real CUDA graphs where there is a GPU.
"""

import math

import pytest
import torch
from test_same_tokens import assert_same, model_of

from minillm import LLM
from minillm.cache.paged import PagedCache
from minillm.engine.engine import Engine
from minillm.engine.graphs import (
    CudaBackend,
    DecodeGraphs,
    EagerBackend,
    GraphRunner,
    batch_sizes,
    graph_bytes,
    padded_size,
)
from minillm.engine.options import EngineOptions
from minillm.engine.runner import Runner
from minillm.engine.static_step import StepBuffers, attend_whole_tables, write
from minillm.errors import ParamsError
from minillm.kernels.fused import FusedBlock, fuse
from minillm.kernels.launch import why_not
from minillm.model.attention import LayerInfo, attention
from minillm.model.generate import generate_naive
from minillm.model.sampling import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [EagerBackend] + ([CudaBackend] if DEVICE == "cuda" else [])


def engine_with_graphs(model, sizes=(1, 2, 4), backend=EagerBackend, attention="sdpa") -> Engine:
    options = EngineOptions(num_blocks=64, block_size=4, max_num_seqs=6, attention=attention)
    engine = Engine(model, options, eos_ids=())
    engine.runner = GraphRunner(model, engine.runner.cache, sizes, backend())
    assert engine.runner.why_eager is None
    return engine


def run(engine: Engine, prompts, tokens) -> list[list[int]]:
    groups = [engine.add(prompt, SamplingParams(max_tokens=n, temperature=0)) for prompt, n in zip(prompts, tokens)]
    while engine.has_work:
        engine.step()
    return [engine.completions(group)[0].token_ids for group in groups]


def test_batch_sizes_hold_every_count():
    assert batch_sizes(1) == (1,) and batch_sizes(3) == (1, 2, 3) and batch_sizes(8) == (1, 2, 4, 8)
    assert batch_sizes(33) == (1, 2, 4, 8, 16, 24, 32, 33)
    for most in range(1, 70):
        sizes = batch_sizes(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
        for count in range(1, most + 1):
            size = padded_size(count, sizes)
            assert size >= count and not any(count <= s < size for s in sizes)
        assert padded_size(most + 1, sizes) is None
    for wrong in (0, -1, True, 2.0, "8"):
        with pytest.raises(ParamsError, match="most"):
            batch_sizes(wrong)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads, window", [("mha", None), ("gqa", 5), ("mqa", None)])
def test_replayed_steps_emit_the_same_tokens(backend, heads, window):
    """Five requests of unequal lengths that end one after another: sizes 5 (eager), 4, 3 -> 4, 2, 1."""
    model = model_of({"heads": heads, "window": window}).to(DEVICE)
    prompts, tokens = [[7, 8, 9], [11], list(range(20, 37)), [5, 6], [9] * 6], [14, 3, 9, 5, 12]
    engine = engine_with_graphs(model, backend=backend)
    for _ in range(2):  # the second time stale rows of the first are in the buffers
        got = run(engine, prompts, tokens)
        for prompt, n, answer in zip(prompts, tokens, got):
            assert_same(model, prompt, answer, generate_naive(model, prompt, n))
    assert engine.runner.replayed >= 2 * 8, "most steps are pure decodes of at most four requests"


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("backend", BACKENDS)
def test_replayed_steps_through_fused_kernels_emit_the_same_tokens(backend):
    plain = model_of({"heads": "gqa", "window": 5}).to(DEVICE)
    model = fuse(model_of({"heads": "gqa", "window": 5}).to(DEVICE))
    engine = engine_with_graphs(model, sizes=(2,), backend=backend, attention="triton")
    assert isinstance(model.layers[0], FusedBlock) and engine.runner.cache.attention == "triton"
    prompts, tokens = [[7, 8, 9], list(range(20, 29))], [3, 5]
    for prompt, n, answer in zip(prompts, tokens, run(engine, prompts, tokens)):
        assert_same(plain, prompt, answer, generate_naive(plain, prompt, n))
    assert engine.runner.replayed == 4


def test_prefill_and_large_batches_run_without_a_graph():
    engine = engine_with_graphs(model_of({"heads": "gqa", "window": None}).to(DEVICE), sizes=(1, 2))
    groups = [engine.add([5, 6, i], SamplingParams(max_tokens=4, temperature=0)) for i in range(3)]
    engine.step()
    assert engine.runner.replayed == 0, "a prefill"
    engine.step()
    assert engine.runner.replayed == 0, "three decodes, and the largest graph holds two"
    engine.abort(groups[0])
    engine.step()
    assert engine.runner.replayed == 1


def test_a_result_outlives_the_next_replay():
    engine = engine_with_graphs(model_of({"heads": "gqa", "window": None}).to(DEVICE), sizes=(1,))
    engine.add([5, 6], SamplingParams(max_tokens=9, temperature=0))
    engine.step()
    first = engine.runner.run(engine.scheduler.schedule())
    kept = first.clone()
    engine.runner.graphs.buffers.fill([(3, 0, -1, [0])], 1)
    engine.runner.graphs.replays[1]()
    assert torch.equal(first, kept) and not torch.equal(first, engine.runner.graphs.output[:1])


def test_padding_rows_write_nothing_and_cost_no_nan():
    model = model_of({"heads": "gqa", "window": None}).to(DEVICE)
    cache = PagedCache(model.config, 20, 4, device=DEVICE)
    for store in (cache.k, cache.v):
        store.fill_(float("nan"))  # what was never written
    graphs = DecodeGraphs(model, cache, (1, 2, 4), EagerBackend())
    assert cache.k.isnan().all() and cache.v.isnan().all(), "a capture must not write into the cache"
    graphs.buffers.fill([(7, 0, 12, [3])], 4)
    graphs.replays[4]()
    written = (~cache.k.isnan()).flatten(3).any(-1)  # [layers, blocks, block_size]
    assert written.sum() == model.config.num_layers and written[:, 3, 0].all()


def test_step_buffers_are_filled_in_place():
    buffers = StepBuffers(4, 5, torch.device(DEVICE))
    views = buffers.views(4)
    pointers = [view.data_ptr() for view in views]
    buffers.fill([(9, 6, 30, [7, 8]), (3, 0, 4, [1])], 4)
    tokens, positions, slots, lengths, tables = views
    assert tokens.tolist() == [9, 3, 0, 0] and positions.tolist() == [6, 0, 0, 0]
    assert slots.tolist() == [30, 4, -1, -1] and lengths.tolist() == [7, 1, 0, 0]
    assert tables[:, :2].tolist() == [[7, 8], [1, 0], [0, 0], [0, 0]]
    buffers.fill([(1, 2, 3, [4])], 2)
    assert slots[:2].tolist() == [3, -1] and tokens[:2].tolist() == [1, 0]
    assert pointers == [view.data_ptr() for view in buffers.views(4)]


@pytest.mark.parametrize("slots", [[3, -1, 9], [-1, 5, -1], [-1, -1, -1], [2, 0, 7]])
def test_write_skips_minus_one(slots):
    stored = torch.randn(3, 4, 2, 8)
    new, expected = torch.randn(3, 2, 8), stored.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected.flatten(0, 1)[slot] = new[row]
    write(stored, new, torch.tensor(slots))
    assert torch.equal(stored, expected)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_attending_whole_tables_equals_attention_over_what_is_there(window, softcap):
    generator = torch.Generator().manual_seed(1)
    lengths, block_size, layer = [1, 9, 0, 16, 5], 4, LayerInfo(0, 0.3, window, softcap)
    q = torch.randn(5, 6, 8, generator=generator)
    keys, values = torch.randn(2, 30, block_size, 2, 8, generator=generator)
    tables = torch.randperm(30, generator=generator)[:20].view(5, 4)
    out = attend_whole_tables(layer, q, keys, values, tables, torch.tensor(lengths))
    for row, n in enumerate(lengths):
        if n == 0:
            assert (out[row] == 0).all()
            continue
        k, v = (x[tables[row]].flatten(0, 1)[:n].transpose(0, 1)[None].double() for x in (keys, values))
        wanted = attention(q[row][None, :, None].double(), k, v, scale=0.3, window=window, softcap=softcap)
        torch.testing.assert_close(out[row].double(), wanted[0, :, 0], rtol=1e-5, atol=1e-5)


def test_without_cuda_the_reason_is_one_line():
    if DEVICE == "cuda":
        pytest.skip("this machine has CUDA")
    model = model_of({"heads": "gqa", "window": None})
    runner = GraphRunner(model, PagedCache(model.config, 4, 4), (1, 2))
    assert runner.graphs is None and "cpu" in runner.why_eager and "\n" not in runner.why_eager


def test_the_engine_makes_graphs_where_it_is_asked_to():
    model = model_of({"heads": "gqa", "window": None}).to(DEVICE)
    plain = Engine(model, EngineOptions(num_blocks=16, block_size=4), eos_ids=())
    assert type(plain.runner) is Runner
    asked = Engine(model, EngineOptions(num_blocks=16, block_size=4, max_num_seqs=4, cuda_graphs=True), eos_ids=())
    assert isinstance(asked.runner, GraphRunner) and (asked.runner.graphs is None) == (DEVICE == "cpu")
    assert_same(model, [5, 6], run(asked, [[5, 6]], [6])[0], generate_naive(model, [5, 6], 6))
    with pytest.raises(ParamsError, match="cuda_graphs"):
        EngineOptions(cuda_graphs=1)


def test_llm_compile_asks_for_graphs_and_says_why_not():
    llm = LLM("tiny", device="cpu", num_blocks=32, max_num_seqs=2, compile=True)
    assert llm.engine.options.cuda_graphs and "cpu" in llm.engine.runner.why_eager
    assert not LLM("tiny", device="cpu", num_blocks=32).engine.options.cuda_graphs
    assert not LLM("tiny", device="cpu", num_blocks=32, compile=True, cuda_graphs=False).engine.options.cuda_graphs


def test_a_failed_capture_falls_back_and_says_why():
    class Refuses:
        def capture(self, function):
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    class Misses:
        def capture(self, function):
            return lambda: None  # a replay that launches nothing

    model = model_of({"heads": "gqa", "window": None}).to(DEVICE)
    cases = [
        (Refuses(), "not permitted", 1.0),
        (Misses(), "does not give", 1.0),
        (Misses(), "does not give", math.nan),
    ]
    for backend, text, held in cases:
        engine = Engine(model, EngineOptions(num_blocks=16, block_size=4), eos_ids=())
        with torch.inference_mode():  # what the pool holds before anyone has written to it: anything
            engine.runner.cache.k.fill_(held)
            engine.runner.cache.v.fill_(held)
        engine.runner = GraphRunner(model, engine.runner.cache, (1, 2), backend)
        assert engine.runner.graphs is None and text in engine.runner.why_eager
        assert "\n" not in engine.runner.why_eager
        assert_same(model, [5, 6], run(engine, [[5, 6]], [6])[0], generate_naive(model, [5, 6], 6))


def test_sizes_are_checked_before_anything_is_allocated():
    model = model_of({"heads": "gqa", "window": None})
    for sizes in ((), (0,), (1, -2), (1.5,)):
        with pytest.raises(ParamsError, match="sizes"):
            DecodeGraphs(model, PagedCache(model.config, 4, 4), sizes, EagerBackend())


def test_graph_bytes_count_the_shared_output_once():
    config = model_of({"heads": "gqa", "window": None}).config
    sizes = batch_sizes(32)
    shared, own = graph_bytes(config, sizes, 2), graph_bytes(config, sizes, 2, shared_output=False)
    assert own - shared == 2 * config.vocab_size * (sum(sizes) - 32)
    assert shared == 2 * 32 * (3 * 96 + 2 * 48 + 211)
