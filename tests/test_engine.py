"""The engine and the batching policies, on a small random model; and LLM's options."""

import itertools
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_same_tokens import model_of

from minillm import LLM
from minillm.cache.paged import PagedCache
from minillm.engine.batch import Batch
from minillm.engine.beam import beam_search
from minillm.engine.engine import Engine
from minillm.engine.memory import blocks_in, check_room
from minillm.engine.options import EngineOptions
from minillm.engine.outputs import Answer
from minillm.engine.policies import POLICIES, Arrival, make_trace, run_trace
from minillm.engine.runner import Runner, pack
from minillm.errors import ParamsError, PromptError
from minillm.measure.bench import as_transformers
from minillm.model.generate import generate_naive
from minillm.model.sampling import Sampler, SamplingParams

PROMPTS = [[7, 3, 9], [11, 2, 8, 5, 5, 1, 30, 12, 6, 4], [1]]
GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def model():
    return model_of({"heads": "gqa", "window": None})


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny", device="cpu", seed=0, enable_prefix_caching="radix")


def make(model, **options):
    defaults = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return Engine(model, EngineOptions(**{**defaults, **options}), eos_ids=(), seed=0)


def drain(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_requests_join_and_leave_between_steps(model):
    engine = make(model)
    groups, seen = [engine.add(PROMPTS[0], GREEDY)], []
    for prompt in PROMPTS[1:]:
        seen += engine.step()
        groups.append(engine.add(prompt, GREEDY))
    seen += drain(engine)
    for group, prompt in zip(groups, PROMPTS):
        mine = [out for out in seen if out.group == group.id]
        assert [out.token for out in mine] == generate_naive(model, prompt, 6)
        assert [out.finish_reason for out in mine] == [None] * 5 + ["length"]
    assert engine.step() == [] and not engine.has_work


def test_a_mixed_batch_is_packed_without_padding(model):
    engine = make(model, max_num_batched_tokens=8, keep_log=True)
    engine.add(PROMPTS[0], GREEDY)
    engine.step()
    engine.add(PROMPTS[1], GREEDY)
    batch = engine.scheduler.schedule()
    tokens, step, rows = pack(batch, torch.device("cpu"), 99)
    first, second = batch.entries
    assert tokens.tolist() == [first.tokens[3], *PROMPTS[1][:7]]
    assert step.positions.tolist() == [3, *range(7)] and rows.tolist() == [0]
    assert step.query_lengths == [1, 7] and step.kv_lengths == [4, 7]
    assert step.slot_mapping.tolist() == first.table.slots(3, 1) + second.table.slots(0, 7)
    assert step.block_tables.shape == (2, len(second.table.blocks))


def test_copies_are_made_in_the_order_they_were_decided(model):
    """Each frees the block that the next one writes: 0 moves to the host, 1 is copied to it, host block 0 moves to 1.
    Any other order loses a block that is still needed."""
    cache = PagedCache(model.config, 2, 4, host_blocks=2)
    for block in range(2):
        cache.k[:, block], cache.v[:, block] = 1 + block, -1 - block
        cache.host_k[:, block], cache.host_v[:, block] = 3 + block, -3 - block
    copies = [("swap_out", [(0, 1)]), ("copy", [(1, 0)]), ("swap_in", [(0, 1)])]
    Runner(model, cache).copy(Batch(0, 32, copies=copies))
    for sign, device, host in ((1, cache.k, cache.host_k), (-1, cache.v, cache.host_v)):
        assert device[0, :, 0, 0, 0].tolist() == [sign * 2, sign * 3]
        assert host[0, :, 0, 0, 0].tolist() == [sign * 3, sign * 1]


def test_only_sampled_rows_reach_the_head(model):
    engine, heights = make(model), []
    plain = engine.model.logits
    engine.runner.model = type(
        "Watched",
        (),
        {
            "hidden": model.hidden,
            "device": model.device,
            "logits": staticmethod(lambda x: heights.append(len(x)) or plain(x)),
        },
    )
    engine.add(PROMPTS[1], GREEDY)
    engine.add(PROMPTS[0], GREEDY)
    drain(engine)
    assert heights == [2] * 6


@pytest.mark.parametrize("chunk", [4, 32])
@pytest.mark.parametrize("prefix", ["off", "radix"])
def test_n_answers_are_those_of_n_requests(model, chunk, prefix):
    params = SamplingParams(max_tokens=6, n=3, seed=11)
    engine = make(model, max_num_batched_tokens=chunk, enable_prefix_caching=prefix)
    group = engine.add(PROMPTS[1], params)
    drain(engine)
    together = [c.token_ids for c in engine.completions(group)]
    assert len({tuple(t) for t in together}) > 1
    for index, tokens in enumerate(together):  # the same draws, without any sharing
        state = engine.sampler.start(params, PROMPTS[1], index)
        text = list(PROMPTS[1])
        for token in tokens:
            with torch.inference_mode():
                logits = model(torch.tensor([text]))[:, -1]
            assert engine.sampler.sample(logits, [state]).token_ids == [token]
            state.append(token)
            text.append(token)


def test_a_block_that_is_swapped_out_and_then_copied_to_keeps_every_answer_right(model):
    """Three answers part where a fourth is pushed out: the copy that one of them writes to takes the block just left.
    Tokens are those of an ample pool."""
    prompts, told, reused = [PROMPTS[0], PROMPTS[1][:5]], [], 0
    for blocks in (64, 4):
        engine = make(model, num_blocks=blocks, num_host_blocks=blocks, preemption="swap", headroom=0)
        seen, plain = [], engine.runner.copy
        engine.runner.copy = lambda batch, seen=seen, plain=plain: seen.append(batch.copies) or plain(batch)
        groups = [engine.add(p, SamplingParams(max_tokens=12, temperature=0, n=n)) for p, n in zip(prompts, (3, 1))]
        drain(engine)
        told.append([done.token_ids for group in groups for done in engine.completions(group)])
        for copies in seen:
            left = set()
            for kind, pairs in copies:
                reused += kind == "copy" and not left.isdisjoint(target for _, target in pairs)
                left |= {source for source, _ in pairs} if kind == "swap_out" else set()
    assert told[0] == told[1] == [generate_naive(model, p, 12) for p in prompts[:1] * 3 + prompts[1:]]
    assert reused, "no block was left and copied to in one step: this pool is no test"


def test_n_answers_need_the_prompt_once(model):
    engine = make(model, keep_log=True)
    engine.add(PROMPTS[1], SamplingParams(max_tokens=6, n=4, temperature=0))
    drain(engine)
    assert sum(step.tokens for step in engine.scheduler.log) == 10 + 4 * 5


def test_metrics_and_what_preemption_does_to_them(model):
    engine = make(model, num_blocks=7, headroom=0)  # both prompts fit, both answers do not
    groups = [engine.add(PROMPTS[1], SamplingParams(max_tokens=8, temperature=0)) for _ in range(2)]
    engine.step()
    queue = [engine.completions(group)[0].metrics.queue for group in groups]
    drain(engine)
    first, second = (engine.completions(group)[0] for group in groups)
    assert first.token_ids == second.token_ids == generate_naive(model, PROMPTS[1], 8)
    assert (first.metrics.preemptions, second.metrics.preemptions) == (0, 1)
    for metrics in (first.metrics, second.metrics):
        assert 0 <= metrics.queue <= metrics.ttft <= metrics.e2e
        assert metrics.ttft + 7 * metrics.tpot == pytest.approx(metrics.e2e)
    assert [first.metrics.queue, second.metrics.queue] == queue, "who lost its place was not queued anew"


def test_waiting_for_blocks_is_queue_time(model):
    engine = make(model, num_blocks=5, headroom=0)
    groups = [engine.add(PROMPTS[1], SamplingParams(max_tokens=8, temperature=0)) for _ in range(2)]
    drain(engine)
    first, second = (engine.completions(group)[0].metrics for group in groups)
    assert second.preemptions == 0
    assert second.queue > first.e2e - first.ttft  # it had to wait for the first one's blocks


def test_seconds_are_counted_from_the_arrival_that_was_given(model):
    engine = make(model)
    arrival = time.perf_counter() - 1000  # it waited outside the engine
    given, plain = engine.add(PROMPTS[0], GREEDY, arrival=arrival), engine.add(PROMPTS[0], GREEDY)
    drain(engine)
    given, plain = (engine.completions(group)[0].metrics for group in (given, plain))
    assert plain.e2e < 1000 <= given.queue <= given.ttft <= given.e2e


def test_abort_keeps_what_was_said_and_may_come_at_any_time(model):
    for steps in range(8):
        engine = make(model, max_num_batched_tokens=4)
        group, other = engine.add(PROMPTS[1], GREEDY), engine.add(PROMPTS[0], GREEDY)
        for _ in range(steps):
            engine.step()
        engine.abort(group.id)
        engine.abort(group)  # twice is harmless
        drain(engine)
        done = engine.completions(group)[0]
        assert (
            done.finish_reason == "abort"
            and done.token_ids == generate_naive(model, PROMPTS[1], 6)[: max(steps - 2, 0)]
        )
        assert engine.completions(other)[0].token_ids == generate_naive(model, PROMPTS[0], 6)
        assert engine.pool.free_count == 64


def test_an_aborted_answer_keeps_its_unfinished_character(llm):
    head, tail = llm.tokenizer.encode("5"), llm.tokenizer.encode("é")
    assert len(tail) == 2, "one character, two tokens"
    answer = Answer(Sampler(0).start(GREEDY, [1], 0), 9, (), llm.tokenizer, arrival=0.0)
    assert [answer.append(token, None) for token in (*head, tail[0])] == ["5", ""]
    answer.abort()
    assert answer.text == answer.read() == "5\ufffd" and answer.token_ids == [*head, tail[0]]
    answer.abort()  # twice is harmless
    assert answer.text == "5\ufffd" and answer.finish_reason == "abort"


def test_a_forward_that_fails_can_be_tried_again(model):
    engine = make(model, enable_prefix_caching="hash")
    group = engine.add(PROMPTS[1], GREEDY)
    engine.step()
    plain, engine.runner.run = engine.runner.run, lambda batch: (_ for _ in ()).throw(MemoryError("no room"))
    with pytest.raises(MemoryError):
        engine.step()
    engine.runner.run = plain
    drain(engine)
    assert engine.completions(group)[0].token_ids == generate_naive(model, PROMPTS[1], 6)


def test_refused_requests_leave_nothing(model):
    engine = make(model, num_blocks=3)
    with pytest.raises(PromptError, match="could never run"):
        engine.add(PROMPTS[1], GREEDY)
    with pytest.raises(PromptError, match="empty"):
        engine.add([], GREEDY)
    with pytest.raises(ParamsError, match="tokenizer"):
        engine.add([1], SamplingParams(stop="x"))
    assert not engine.has_work and not engine.groups


def test_answers_can_be_looked_at_before_they_begin(model):
    engine = make(model)
    done = engine.completions(engine.add(PROMPTS[0], GREEDY))[0]
    assert done.token_ids == [] and done.finish_reason is None and done.metrics.ttft is None


def test_salts_separate_cached_prefixes(model):
    engine = make(model, enable_prefix_caching="hash")
    cached = []
    for salt in ("", "a", "a", ""):
        group = engine.add(PROMPTS[1], GREEDY, salt=salt)
        drain(engine)
        cached.append(engine.completions(group)[0].metrics.cached_tokens)
    assert cached == [0, 0, 8, 8]


def test_default_pool_has_room_for_all_full_contexts_when_memory_allows(model):
    engine = Engine(model, EngineOptions(max_num_seqs=3))
    assert engine.options.num_blocks == 3 * 64 // 16 and engine.options.max_num_batched_tokens == 512
    assert EngineOptions(max_num_seqs=3).resolved(model.config, most_blocks=7).num_blocks == 7
    assert (
        engine.runner.cache.nbytes == 2 * 3 * 12 * 16 * 2 * 16 * 4
    )  # K, V; layers; blocks; slots; heads; dim; bytes


def test_every_policy_gives_every_request_its_own_tokens(model):
    trace = make_trace(9, rate=2.0, vocab=211, prompt=(1, 20), tokens=(1, 20))
    cost = lambda tokens: 0.1 + 0.001 * tokens  # noqa: E731
    results = {p: run_trace(model, trace, p, size=3, window=1.0, cost=cost) for p in POLICIES}
    for result in results.values():
        assert result.outputs == [generate_naive(model, a.prompt, a.tokens) for a in trace]
        assert all(t.arrival <= t.scheduled < t.token_times[0] for t in result.times)
        busy = [(c.slot, c.begin) for c in result.cells]
        assert len(busy) == len(set(busy)), "a slot does one thing at a time"
        assert sum(c.useful for c in result.cells) == sum(len(a.prompt) + a.tokens - 1 for a in trace)
    assert results["continuous"].padding_waste == 0 < results["static"].padding_waste
    ttft = {p: r.summary.ttft.mean for p, r in results.items()}
    assert ttft["continuous"] < ttft["dynamic"]


def test_static_waits_for_a_full_batch_and_dynamic_for_its_window(model):
    trace = [Arrival(0.0, (1, 2), 2), Arrival(5.0, (3,), 2), Arrival(5.5, (4,), 2)]
    starts = {
        p: [t.scheduled for t in run_trace(model, trace, p, size=2, window=1.0, cost=lambda _: 0.1).times]
        for p in POLICIES
    }
    assert starts == {
        "static": pytest.approx([5.0, 5.0, 5.5]),
        "dynamic": pytest.approx([1.0, 5.5, 5.5]),
        "continuous": pytest.approx([0.0, 5.0, 5.5]),
    }
    with pytest.raises(ParamsError, match="must be one of static, dynamic, continuous"):
        run_trace(model, trace, "lucky")


def test_streams_may_be_read_in_any_mixture_and_closed_early(llm):
    expected = [o.text for o in llm.generate(["The sea", "Once"], GREEDY)]
    first, second = llm.stream("The sea", GREEDY), llm.stream("Once", GREEDY)
    pieces = list(itertools.zip_longest(first, second, fillvalue=""))
    assert ["".join(side) for side in zip(*pieces)] == expected
    early = llm.stream("The sea", SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    next(early)
    assert llm.generate("Once", GREEDY)[0].text == expected[1]
    early.close()
    assert not llm.engine.has_work and llm.engine.pool.free_count == llm.engine.options.num_blocks


def test_generate_is_all_or_nothing(llm):
    limited = LLM("tiny", device="cpu", num_blocks=2, block_size=16)
    with pytest.raises(PromptError, match="could never run"):
        limited.generate([[1, 2], [1] * 40], GREEDY)
    assert not limited.engine.has_work
    assert limited.generate([[1, 2]], GREEDY)[0].token_ids == llm.generate([[1, 2]], GREEDY)[0].token_ids


def test_priorities_of_a_call():
    one = LLM("tiny", device="cpu", policy="priority", max_num_seqs=1)
    outputs = one.generate(["The sea", "Once"], GREEDY, priority=[1, 0])
    assert outputs[1].metrics.queue < outputs[0].metrics.queue
    with pytest.raises(ParamsError, match="priority has 1 entries"):
        one.generate(["The sea", "Once"], GREEDY, priority=[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption": "drop"}, "preemption='drop'"),
        ({"policy": "lifo"}, "policy='lifo'"),
        ({"enable_prefix_caching": "yes"}, 'must be "off" or "hash" or "radix"'),
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"max_num_batched_tokens": 4}, "at least max_num_seqs=32"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, "context 512"),
    ],
)
def test_illegal_options_are_one_clear_error(options, message):
    with pytest.raises(ParamsError, match=message):
        LLM("tiny", device="cpu", **options)


def test_the_life_of_one_token_is_told_as_it_is(capsys):
    root = Path(__file__).parent.parent
    page = (root / "docs" / "life_of_one_token.md").read_text(encoding="utf-8")
    code, shown = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL).groups()
    exec(compile(code, "life_of_one_token.md", "exec"), {})
    assert capsys.readouterr().out == shown
    source = "\n".join(path.read_text(encoding="utf-8") for path in (root / "minillm").rglob("*.py"))
    for name in set(re.findall(r"`([A-Za-z_.]+)`", page)):
        last = name.split(".")[-1]
        assert re.search(rf"\b{last}\b", source), f"{name} is not in the code"
    for file in set(re.findall(r"[\w/]+\.py\b", page)):
        assert (root / "minillm" / file).is_file(), file


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_blocks": 20_000_000},
            "num_blocks=20000000: at most [1-9][0-9]* blocks of 4 tokens fit the .* of cpu",
        ),
        ({"num_blocks": 10**9, "kv_cache_dtype": "int4"}, "num_blocks=1000000000: at most [1-9]"),
        ({"block_size": 10**9}, "block_size=1000000000: at most [1-9][0-9]* tokens fit"),
        ({"block_size": 10**9, "kv_cache_dtype": "int2"}, "block_size=1000000000: at most [1-9][0-9]* tokens fit"),
        ({"num_host_blocks": 10**9, "preemption": "swap"}, "num_host_blocks=1000000000: .* besides num_blocks=64"),
    ],
)
def test_blocks_beyond_the_memory_there_is_are_refused(model, options, message, monkeypatch):
    monkeypatch.setattr("minillm.engine.engine.BlockPool", lambda *_: pytest.fail("something was allocated"))
    with pytest.raises(ParamsError, match=message):
        make(model, **options)


@pytest.mark.parametrize("kind", ["auto", "int8", "int2"])
def test_blocks_are_refused_from_the_first_that_does_not_fit(model, kind, monkeypatch):
    monkeypatch.setattr("minillm.engine.memory.device_memory", lambda _: 10**6)

    def check(**options):
        resolved = EngineOptions(**options).resolved(model.config, 1)
        check_room(resolved, model.config, torch.float32, torch.device("cpu"))

    base = {"kv_cache_dtype": kind, "preemption": "swap", "max_num_seqs": 2, "block_size": 4}
    most = blocks_in(10**6, model.config, EngineOptions(**base), torch.float32)
    check(**base, num_blocks=most - 3, num_host_blocks=3)
    for device, host, message in (
        (most + 1, 0, f"num_blocks={most + 1}: at most {most} blocks"),
        (most - 3, 4, f"num_host_blocks=4: at most 3 blocks of 4 tokens fit .* besides num_blocks={most - 3}"),
    ):
        with pytest.raises(ParamsError, match=message):
            check(**base, num_blocks=device, num_host_blocks=host)
    base["preemption"] = "recompute"
    with pytest.raises(ParamsError, match="block_size=") as error:
        check(**{**base, "block_size": 10**5})
    largest = int(re.search(r"at most (\d+) tokens", str(error.value)).group(1))
    check(**{**base, "block_size": largest})
    with pytest.raises(ParamsError, match=f"at most {largest} tokens"):
        check(**{**base, "block_size": largest + 1})


@pytest.mark.parametrize("width", [1, 3, 5])
@pytest.mark.parametrize("ends", [(), (57,), (127, 19)])
def test_beam_search_finds_what_transformers_finds(width, ends):
    transformers = pytest.importorskip("transformers")
    model = model_of({"heads": "gqa", "window": None})
    theirs = as_transformers(model)
    prompt = PROMPTS[1]
    options = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": 9, "do_sample": False}
    config = transformers.GenerationConfig(
        **options, eos_token_id=list(ends) or None, pad_token_id=0, length_penalty=1.0, early_stopping=False
    )
    with torch.inference_mode():
        found = theirs.generate(torch.tensor([prompt]), generation_config=config, attention_mask=torch.ones(1, 10))
    texts = []
    for row in found[:, len(prompt) :].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:stop])
    result = beam_search(model, prompt, width, 9, eos_ids=ends, block_size=4)
    assert [beam.tokens for beam in result.beams] == texts
    assert width == 1 or result.most_blocks < result.unshared_blocks
    if not ends and width == 1:
        assert texts == [generate_naive(model, prompt, 9)]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("width", bad) for bad in (0, True, "a", 10**12)),
        *(("max_tokens", bad) for bad in (0, 1.0, None)),
        *(("block_size", bad) for bad in (0, -1, "a", 4.0, 10**12)),
        *(("length_penalty", bad) for bad in (None, "a", 1e9, -1e9, float("nan"), float("inf"), True)),
        *(("eos_ids", bad) for bad in (None, 5, "ab", [-1], [None], [1.0], [True])),
    ],
)
def test_beam_search_refuses_bad_arguments_by_name(model, name, bad, monkeypatch):
    monkeypatch.setattr("minillm.engine.beam.BlockPool", lambda *_: pytest.fail("something was allocated"))
    with pytest.raises(ParamsError, match=f"^{name}=") as error:
        beam_search(model, PROMPTS[0], **{name: bad})
    assert repr(bad) in str(error.value)


def test_beam_search_takes_numbers_of_numpy(model):
    plain = beam_search(model, PROMPTS[0], 2, 5, eos_ids=(57,), length_penalty=0.5, block_size=4)
    options = {"eos_ids": np.array([57, 57]), "length_penalty": np.float32(0.5), "block_size": np.int64(4)}
    assert beam_search(model, PROMPTS[0], np.int64(2), np.int64(5), **options) == plain


@pytest.mark.parametrize("width", [3, 300])  # 300: more than there are texts
def test_beam_search_where_every_token_ends_a_text(model, width):
    vocab = model.config.vocab_size
    result = beam_search(model, PROMPTS[0], width, 5, eos_ids=range(vocab))
    logprobs = model(torch.tensor([PROMPTS[0]]))[0, -1].log_softmax(-1)
    values, tokens = logprobs.topk(min(width, vocab))
    assert [beam.tokens for beam in result.beams] == [[token] for token in tokens.tolist()]
    assert [beam.score for beam in result.beams] == pytest.approx(values.tolist(), rel=1e-5)
