"""Faults that other engines had. Each is one test by name, and all of them are about what is left behind."""

import threading
from contextlib import suppress

import pytest
import torch
from test_same_tokens import model_of

from minillm import LLM
from minillm.cache.block_pool import NoRoom
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.request import State
from minillm.errors import ParamsError, PromptError
from minillm.model.generate import generate_naive
from minillm.model.sampling import SamplingParams

BLOCK, CONTEXT = 4, 64
PROMPT = [7, 3, 9, 11, 2, 8, 5, 5, 1, 30, 12, 6]  # exactly three blocks
CACHES = pytest.mark.parametrize("prefix", ["hash", "radix"])


@pytest.fixture(scope="module")
def model():
    return model_of({"heads": "gqa", "window": None})


def greedy(tokens=8, **others):
    return SamplingParams(max_tokens=tokens, temperature=0, **others)


def make(model, prefix="off", **options):
    defaults = {"block_size": BLOCK, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return Engine(
        model, EngineOptions(**{**defaults, "enable_prefix_caching": prefix, **options}), eos_ids=(), seed=0
    )


def finish(engine, *groups):
    """Run to the end; the tokens of each group. Nothing may be left behind."""
    while engine.has_work:
        engine.step()
    tables = [r.table for g in groups for r in g.requests if r.table is not None]
    engine.pool.check(tables)
    assert engine.pool.free_count == engine.pool.num_blocks and not engine.groups
    return [[r.output for r in group.requests] for group in groups]


def run(engine, prompt, params):
    return finish(engine, engine.add(prompt, params))[0][0]


def expected(model, prompt, tokens=8):
    return generate_naive(model, prompt, tokens)


@CACHES
def test_full_prompt_cache_hit_leaves_a_token_to_compute(model, prefix):
    engine = make(model, prefix)
    for _ in range(3):
        group = engine.add(PROMPT, greedy())
        assert finish(engine, group)[0][0] == expected(model, PROMPT)
    assert engine.completions(group)[0].metrics.cached_tokens == len(PROMPT) - BLOCK


@CACHES
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_request_that_comes_back_with_a_prefix_hit(model, prefix, preemption):
    engine = make(model, prefix, num_blocks=8, headroom=0, preemption=preemption)
    groups = [engine.add([*PROMPT, i], greedy(12)) for i in range(3)]
    outputs = finish(engine, *groups)
    assert sum(r.preemptions for g in groups for r in g.requests) > 0
    assert outputs == [[expected(model, [*PROMPT, i], 12)] for i in range(3)]


@CACHES
def test_stale_hash_after_a_block_is_reused(model, prefix):
    engine = make(model, prefix, num_blocks=6)
    other = [50 + i for i in range(len(PROMPT))]
    for prompt in (PROMPT, other, PROMPT, [*PROMPT[:5], 99], other):  # each needs blocks that the last one filled
        assert run(engine, prompt, greedy()) == expected(model, prompt)
    assert engine.pool.index.stats.evictions > 0


def test_failed_allocation_leaves_counts_as_they_were(model):
    engine = make(model, num_blocks=5, headroom=0)
    first, second = engine.add(PROMPT, greedy(8)), engine.add(PROMPT, greedy(8))
    engine.step()
    assert second.requests[0].state is State.WAITING and second.requests[0].table is None
    engine.pool.check([first.requests[0].table])
    assert finish(engine, first, second) == [[expected(model, PROMPT)]] * 2


@pytest.mark.parametrize(("requests", "n"), [(3, 1), (1, 3)])
def test_an_allocation_that_fails_while_requests_grow_changes_nothing(model, monkeypatch, requests, n):
    engine, failed = make(model, num_blocks=8, headroom=0), []
    allocate, pool, running = engine.pool.allocate, engine.pool, engine.scheduler.running

    def watched(count):
        before = pool.free_count, [pool.count(block) for block in range(pool.num_blocks)]
        try:
            return allocate(count)
        except NoRoom:
            assert before == (pool.free_count, [pool.count(block) for block in range(pool.num_blocks)])
            pool.check([request.table for request in running])
            failed.append(count)
            raise

    monkeypatch.setattr(pool, "allocate", watched)
    prompts = [[*PROMPT, i] for i in range(requests)]
    groups = [engine.add(prompt, greedy(12, n=n)) for prompt in prompts]
    assert finish(engine, *groups) == [[expected(model, prompt, 12)] * n for prompt in prompts]
    assert failed


@CACHES
def test_a_request_that_waits_for_room_asks_the_cache_once(model, prefix):
    engine = make(model, prefix, num_blocks=8, headroom=0)
    run(engine, [*PROMPT, 1], greedy(1))
    before, other = engine.pool.index.stats.queries, [50 + i for i in range(9)]
    engine.add(other, greedy(20))
    engine.step()
    late = engine.add([*PROMPT, *range(2, 11)], greedy(1))
    for _ in range(5):
        engine.step()
    assert late.requests[0].state is State.WAITING
    finish(engine, late)
    stats = engine.pool.index.stats
    assert stats.queries - before == len(other) + len(late.requests[0].prompt)
    assert stats.hits == engine.completions(late)[0].metrics.cached_tokens > 0


# Where a step may break off: what is called, and whether it was done by then.
BREAKS = {
    "nothing is planned": (lambda e: e.scheduler, "schedule", False),
    "a hit is shared, and no table has it": (lambda e: e.pool, "share", True),
    "blocks are taken, and no table has them": (lambda e: e.pool, "allocate", True),
    "the plan is made, and nobody has it": (lambda e: e.scheduler, "schedule", True),
    "before copy-on-write": (lambda e: e.runner.cache, "copy_blocks", False),
    "before a swap out": (lambda e: e.runner.cache, "swap_out", False),
    "before a swap in": (lambda e: e.runner.cache, "swap_in", False),
    "the forward is done": (lambda e: e.runner, "run", True),
    "tokens are handed out, and not recorded": (lambda e: e.scheduler, "update", False),
    "blocks are indexed, and not counted": (lambda e: e.pool, "insert", True),
    "all is recorded, and who is done has not left": (lambda e: e.scheduler, "update", True),
    "half of those who are done have left": (lambda e: e.scheduler, "finish", True),
}


@pytest.mark.parametrize("where", BREAKS)
@pytest.mark.parametrize("prefix", ["off", "hash", "radix"])
def test_a_step_that_breaks_off_leaves_only_the_tokens_that_it_gave(model, monkeypatch, prefix, where):
    """Ctrl-C in a notebook, or no memory, while others are being answered: nobody says other tokens for it."""
    owner, name, done = BREAKS[where]
    broken = 0
    for chance in range(1, 30, 3):
        engine, calls = make(model, prefix, num_blocks=9, headroom=0, preemption="swap"), 0
        plain = getattr(owner(engine), name)

        def breaks(*args, plain=plain, chance=chance):
            nonlocal calls, broken
            calls += 1
            result = plain(*args) if done or calls != chance else None
            if calls == chance:
                broken += 1
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(owner(engine), name, breaks)
        prompts, counts = [PROMPT, [*PROMPT[:8], 3], [9, 4]], (1, 3, 2)
        groups = [engine.add(prompt, greedy(9, n=n)) for prompt, n in zip(prompts, counts)]
        with suppress(KeyboardInterrupt):
            finish(engine, *groups)
        assert finish(engine, *groups) == [[expected(model, prompt, 9)] * n for prompt, n in zip(prompts, counts)]
    assert broken


def test_a_salt_that_no_file_could_hold_is_a_salt(model):
    engine = make(model, "hash")
    groups = [engine.add(PROMPT, greedy(), salt=salt) for salt in ("\ud800", "", "\ud801")]
    assert finish(engine, *groups) == [[expected(model, PROMPT)]] * 3


@pytest.mark.parametrize("bad", [{"salt": None}, {"salt": 5}, {"priority": 1.5}, {"priority": float("nan")}])
def test_a_bad_salt_or_priority_is_refused_before_it_is_queued(model, bad):
    engine = make(model, "hash")
    with pytest.raises(ParamsError, match=next(iter(bad))):
        engine.add(PROMPT, greedy(), **bad)
    assert not engine.has_work and not engine.groups


def test_a_refused_request_draws_nothing_from_the_common_seed(model):
    free = SamplingParams(max_tokens=8)
    alone = run(make(model, num_blocks=6), PROMPT, free)
    engine = make(model, num_blocks=6)
    with pytest.raises(PromptError, match="could never run"):
        engine.add(PROMPT, SamplingParams(max_tokens=40, n=3))
    assert run(engine, PROMPT, free) == alone


def test_threads_take_turns(model):
    engine, answers = make(model, "radix", num_blocks=12), {}

    def ask(number):
        for round in range(4):
            group = engine.add([*PROMPT, number, round], greedy(6))
            while not group.finished:
                engine.step()
            answers[number, round] = group.requests[0].output

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {(i, k): expected(model, [*PROMPT, i, k], 6) for i in range(4) for k in range(4)}
    assert engine.pool.free_count == engine.pool.num_blocks


def test_an_abort_in_the_middle_of_a_step_waits_for_its_end(model, monkeypatch):
    """The garbage collector closes a forgotten stream whenever it likes."""
    engine = make(model)
    forgotten, other = engine.add(PROMPT, greedy()), engine.add(PROMPT[:5], greedy())
    plain = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda batch: (engine.abort(forgotten), plain(batch))[1])
    engine.step()
    assert forgotten.finished and forgotten.requests[0].answer.finish_reason == "abort"
    assert finish(engine, other) == [[expected(model, PROMPT[:5])]]


@CACHES
def test_abort_in_the_middle_of_a_chunked_prefill_does_not_poison_the_cache(model, prefix):
    engine = make(model, prefix, max_num_batched_tokens=5)
    long = PROMPT * 3
    group = engine.add(long, greedy())
    for _ in range(3):  # 15 tokens: three blocks and a part
        engine.step()
    assert group.requests[0].computed == 15
    engine.abort(group)
    assert engine.pool.free_count == engine.pool.num_blocks
    again = engine.add(long, greedy())
    assert finish(engine, again)[0][0] == expected(model, long)
    assert engine.completions(again)[0].metrics.cached_tokens == 12, "what was computed is used, and no more"


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("prefix", ["off", "radix"])
def test_n_answers_aborted_half_way_leak_no_block(model, prefix, steps):
    engine = make(model, prefix, max_num_batched_tokens=6, max_num_seqs=3)
    group = engine.add(PROMPT, SamplingParams(max_tokens=8, n=4, seed=1))
    other = engine.add(PROMPT[:6], greedy())
    for _ in range(steps):
        engine.step()
    engine.abort(group)
    engine.pool.check([r.table for r in other.requests if r.table is not None])
    assert all(r.answer.finish_reason == "abort" for r in group.requests)
    assert finish(engine, other)[0][0] == expected(model, PROMPT[:6])


@pytest.mark.parametrize("host", [0, 1, 3])
def test_swap_with_no_room_in_host_memory(model, host):
    engine = make(model, num_blocks=8, headroom=0, preemption="swap", num_host_blocks=host)
    prompts = [[*PROMPT, i] for i in range(3)]
    groups = [engine.add(prompt, greedy(12)) for prompt in prompts]
    assert finish(engine, *groups) == [[expected(model, prompt, 12)] for prompt in prompts]
    assert sum(r.preemptions for g in groups for r in g.requests) > 0


def test_a_greedy_row_beside_a_sampled_row(model):
    engine = make(model)
    groups = [engine.add(PROMPT, params) for params in (greedy(), SamplingParams(max_tokens=8, seed=1), greedy())]
    first, sampled, last = finish(engine, *groups)
    assert first[0] == last[0] == expected(model, PROMPT) != sampled[0]


def test_a_seed_holds_beside_unseeded_rows(model):
    seeded, free = SamplingParams(max_tokens=8, seed=5), SamplingParams(max_tokens=8)
    alone = run(make(model), PROMPT, seeded)
    engine = make(model)
    groups = [engine.add(PROMPT, params) for params in (free, seeded, free)]
    outputs = finish(engine, *groups)
    assert outputs[1][0] == alone and outputs[0] != outputs[2]


@pytest.mark.parametrize("prefix", ["off", "hash", "radix"])
def test_the_second_generate_call_on_the_same_llm(prefix):
    llm = LLM("tiny", device="cpu", enable_prefix_caching=prefix, block_size=4)
    prompts = ["The sea was calm, and the", "Once upon a time"]
    first, second = llm.generate(prompts, greedy()), llm.generate(prompts, greedy())
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    assert [o.text for o in first] == [o.text for o in second] and not llm.engine.has_work
    assert (second[0].metrics.cached_tokens > 0) == (prefix != "off") and first[0].metrics.cached_tokens == 0
    assert 0 <= second[0].metrics.queue <= second[0].metrics.ttft


@pytest.mark.parametrize("prefix", ["off", "hash", "radix"])
@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK, CONTEXT])
def test_prompt_exactly_as_long_as_a_block_the_context_or_the_pool(model, prefix, length):
    prompt = [1 + i % 9 for i in range(length)]
    engine = make(model, prefix, num_blocks=length // BLOCK)  # the pool: one new token fits, whose KV is not needed
    for _ in range(2):
        assert run(engine, prompt, greedy(1)) == expected(model, prompt, 1)
    if length < CONTEXT:
        with pytest.raises(PromptError, match="could never run"):
            engine.add(prompt, greedy(2))
    roomy = make(model, prefix)
    tokens = min(8, CONTEXT + 1 - length)
    assert run(roomy, prompt, greedy()) == expected(model, prompt, tokens)


@pytest.mark.parametrize("prefix", ["off", "hash", "radix"])
def test_one_token_prompts(model, prefix):
    engine = make(model, prefix, block_size=1)
    groups = [engine.add([token], greedy()) for token in (5, 5, 6)]
    assert finish(engine, *groups) == [[expected(model, [token])] for token in (5, 5, 6)]


def test_a_queue_of_a_thousand_requests(model):
    engine = make(model, max_num_seqs=32, num_blocks=128)
    prompts = [[1 + i % 200, 5] for i in range(1000)]
    groups = [engine.add(prompt, greedy(1 + i % 3)) for i, prompt in enumerate(prompts)]
    for group in groups[500:520]:
        engine.abort(group)  # while they wait
    outputs = finish(engine, *groups)
    assert all(len(o[0]) == 1 + i % 3 for i, o in enumerate(outputs) if not 500 <= i < 520)
    assert outputs[500] == [[]] and outputs[999] == [expected(model, prompts[999], 1)]


def test_a_stop_string_that_completes_at_the_last_allowed_token():
    llm = LLM("tiny", device="cpu")
    plain = llm.generate("Once upon a time", greedy(8, ignore_eos=True))[0]
    ending = plain.text[-3:]
    cut = llm.generate("Once upon a time", greedy(8, ignore_eos=True, stop=ending))[0]
    assert cut.finish_reason == "stop" and cut.text == plain.text[: plain.text.index(ending)]
    never = llm.generate("Once upon a time", greedy(8, ignore_eos=True, stop=ending + "#"))[0]
    assert never.finish_reason == "length" and never.text == plain.text, "what was held back for it is released"


def test_end_of_text_in_the_prompt_ends_nothing(model):
    answer = expected(model, PROMPT)
    engine = make(model)
    engine.eos_ids = (PROMPT[4],)
    assert PROMPT[4] not in answer, "choose another token"
    assert run(engine, PROMPT, greedy()) == answer
    engine.eos_ids = (answer[2],)
    assert run(engine, [*PROMPT], greedy()) == answer[: answer.index(answer[2]) + 1]


def test_one_bad_row_harms_nobody(model):
    engine = make(model)
    plain = model.logits

    def spoiled(hidden):
        logits = plain(hidden)
        logits[1] = torch.nan
        return logits

    groups = [engine.add(PROMPT, greedy()) for _ in range(3)]
    engine.runner.model = type(
        "Spoiled", (), {"hidden": model.hidden, "logits": staticmethod(spoiled), "device": model.device}
    )
    engine.step()
    engine.runner.model = model
    outputs = finish(engine, *groups)
    assert outputs == [[expected(model, PROMPT)], [[]], [expected(model, PROMPT)]]
    assert groups[1].requests[0].answer.finish_reason == "abort"
