"""Speculation inside the engine: cuts, budget, blocks, caches of drafts, lengths that adapt, and what is refused."""

import random

import pytest
import torch
from test_same_tokens import model_of
from test_verify import chi_square

from minillm import LLM
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.speculation import Speculator
from minillm.errors import ParamsError
from minillm.model.generate import generate_naive
from minillm.model.sampling import Sampler, SamplingParams, probabilities
from minillm.speculative.adaptive import ANSWER, AdaptiveLength, line
from minillm.speculative.draft_model import DraftModel, check_same_vocabulary
from minillm.speculative.early_exit import first_layers
from minillm.speculative.ngram import NGram
from minillm.speculative.options import SpeculativeOptions, parse
from minillm.speculative.proposer import NOTHING, Context, Draft

PROMPTS = [[7, 3, 9], [11, 2, 8, 5, 5, 1, 30, 12, 6, 4], [1]]


class Oracle:
    """Knows what will be said, and is wrong at every `wrong`-th place of the text (0: never)."""

    wants_hidden = False

    def __init__(self, texts, wrong=0, tree=False):
        self.texts, self.wrong, self.tree, self.released, self.asked = texts, wrong, tree, [], 0

    def propose(self, contexts):
        return [self._one(context) for context in contexts]

    def _one(self, context):
        self.asked += 1
        text = next(t for t in self.texts if t[: len(context.tokens)] == list(context.tokens))
        start, found = len(context.tokens), []
        for place in range(start, min(start + context.most, len(text))):
            found.append((text[place] + 1) % 211 if self.wrong and place % self.wrong == 0 else text[place])
        if not self.tree or not found:
            return Draft(found)
        tokens, parents, trunk = [], [], -1  # a wrong sibling before each right node
        for token in found:
            tokens += [(token + 5) % 211, token]
            parents += [trunk, trunk]
            trunk = len(tokens) - 1
        return Draft(tokens, parents)

    def observe(self, key, start, hidden):
        pass

    def release(self, key):
        self.released.append(key)


@pytest.fixture(scope="module")
def model():
    return model_of({"heads": "gqa", "window": None})


@pytest.fixture(scope="module")
def texts(model):
    return [prompt + generate_naive(model, prompt, 40) for prompt in PROMPTS]


def make(model, proposer, lengths=4, eos_ids=(), **options):
    defaults = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    speculator = None if proposer is None else Speculator(proposer, lengths)
    return Engine(model, EngineOptions(**{**defaults, **options}), eos_ids=eos_ids, seed=0, speculator=speculator)


def drain(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        check(engine)
    return outputs


def check(engine):
    """The pool's invariant, and no table holds more than its request's own tokens between two steps."""
    tables = [r.table for r in engine.scheduler.running]
    engine.pool.check(tables)
    for request in engine.scheduler.running:
        assert request.computed <= request.table.length <= len(request.tokens)  # a prompt has its place beforehand


def greedy(count, **more):
    return SamplingParams(max_tokens=count, temperature=0, **more)


# Cut where plain decoding cuts.


@pytest.mark.parametrize("count", [1, 2, 5, 6, 13])
@pytest.mark.parametrize("tree", [False, True])
def test_max_tokens_cuts_inside_an_accepted_run(model, texts, count, tree):
    engine = make(model, Oracle(texts, tree=tree))
    groups = [engine.add(p, greedy(count)) for p in PROMPTS]
    drain(engine)
    for group, prompt, text in zip(groups, PROMPTS, texts):
        got = engine.completions(group)[0]
        assert got.token_ids == text[len(prompt) :][:count] and got.finish_reason == "length"
        assert group.requests[0].computed <= group.requests[0].longest
    assert engine.pool.free_count == engine.pool.num_blocks


@pytest.mark.parametrize("index", ["off", "hash", "radix"])
def test_eos_cuts_inside_an_accepted_run_and_leaves_the_same_cache(model, texts, index):
    """The end token is at every place in turn. The prefix cache then knows what plain decoding leaves."""
    said = texts[1][len(PROMPTS[1]) :]
    for place in range(1, 12):
        if said[place] in said[:place]:
            continue
        left = []
        for proposer in (None, Oracle(texts)):
            engine = make(model, proposer, eos_ids=(said[place],), enable_prefix_caching=index)
            group = engine.add(PROMPTS[1], greedy(30))
            drain(engine)
            got = engine.completions(group)[0]
            assert got.token_ids == said[: place + 1] and got.finish_reason == "stop"
            known = engine.pool.index.longest_prefix(texts[1]) if engine.pool.index else 0
            left.append((engine.pool.free_count, engine.pool.empty_count, known))
        assert left[0] == left[1]


def test_a_stop_string_cuts_inside_an_accepted_run():
    plain, fast = (
        LLM("tiny", device="cpu", speculative=s) for s in (None, {"method": "self-int8", "adaptive": False})
    )
    prompt = "And the children of Israel"
    text = plain.generate([prompt], greedy(40))[0].text
    for begin in (5, 11, 23, 38):
        params = greedy(40, stop=[text[begin : begin + 4]])
        a, b = (llm.generate([prompt], params)[0] for llm in (plain, fast))
        assert (a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason)
        assert a.finish_reason == "stop"
    pieces = list(fast.stream(prompt, greedy(40)))
    assert "".join(pieces) == text and fast.engine.pool.free_count == fast.engine.pool.num_blocks


def test_logprobs_are_those_of_plain_decoding(model, texts):
    results = []
    for proposer in (None, Oracle(texts, wrong=3)):
        engine = make(model, proposer)
        group = engine.add(PROMPTS[0], greedy(12, logprobs=2))
        drain(engine)
        results.append(engine.completions(group)[0].logprobs)
    for a, b in zip(*results, strict=True):
        assert a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-4
        assert [t for t, _ in a.top] == [t for t, _ in b.top]


def test_a_trial_drafts_for_the_shortest_prompt(model, texts):
    asked = []

    class Seen(Oracle):
        def propose(self, contexts):
            asked.append([len(c.key.prompt) for c in contexts])
            return super().propose(contexts)

    engine = make(model, Seen(texts), AdaptiveLength(4))
    groups = [engine.add(p, greedy(24)) for p in PROMPTS]
    drain(engine)
    assert asked[:2] == [[1], [1]]
    for group, prompt, text in zip(groups, PROMPTS, texts):
        assert engine.completions(group)[0].token_ids == text[len(prompt) :][:24]


# Room.


def test_drafts_take_what_is_left_of_the_budget(model, texts):
    """A step never exceeds its budget, and a prompt that arrives comes before drafts."""
    engine = make(model, Oracle(texts), lengths=8, max_num_batched_tokens=6, max_num_seqs=3, keep_log=True)
    engine.add(PROMPTS[0], greedy(30))
    for _ in range(3):
        engine.step()
    assert engine.scheduler.log[-1].entries[0][2] == 6  # 1 + 5 drafted, of 8
    engine.add(PROMPTS[1], greedy(5))
    engine.step()
    assert [e[2] for e in engine.scheduler.log[-1].entries] == [1, 5]  # no draft while a prompt waits
    drain(engine)
    assert all(step.tokens <= 6 for step in engine.scheduler.log)


@pytest.mark.parametrize("tree", [False, True])  # a tree has more nodes than the text has tokens to come
def test_drafts_take_no_cached_block_and_preempt_nobody(model, texts, tree):
    engine = make(model, Oracle(texts, tree=tree), lengths=8, num_blocks=6, enable_prefix_caching="hash")
    engine.add(PROMPTS[1], greedy(2))
    drain(engine)
    known = engine.pool.index.longest_prefix(texts[1])
    assert known == 8
    group = engine.add(PROMPTS[0], greedy(14))  # 3 + 14 - 1 tokens: four blocks, two are cached for others
    drain(engine)
    assert engine.completions(group)[0].token_ids == texts[0][3:17]
    assert engine.pool.index.longest_prefix(texts[1]) == known and engine.pool.index.stats.evictions == 0


def test_only_guesses_that_were_right_are_counted_as_accepted(model, texts):
    engine = make(model, Oracle(texts, wrong=3), lengths=5)
    groups = [engine.add(prompt, greedy(20)) for prompt in PROMPTS]
    drain(engine)
    stats, told = engine.speculator.stats, [engine.completions(group)[0].metrics.accepted_drafts for group in groups]
    assert min(told) > 0 and sum(told) == stats.accepted < stats.drafted


def test_the_pool_after_each_step_is_as_if_never_drafted(model, texts):
    """Both engines at the same length of the text: the same number of free, empty and cached blocks."""
    for index in ("off", "radix"):
        seen = []
        for proposer in (None, Oracle(texts, wrong=5), Oracle(texts, wrong=4, tree=True)):
            engine = make(model, proposer, enable_prefix_caching=index)
            request = engine.add(PROMPTS[1], greedy(36)).requests[0]
            states = {}
            while engine.has_work:
                engine.step()
                check(engine)
                states[len(request.tokens)] = (engine.pool.free_count, engine.pool.empty_count)
            seen.append(states)
        for states in seen[1:]:
            assert len(states) < len(seen[0])
            assert all(seen[0][length] == counts for length, counts in states.items())


def test_random_arrivals_preemptions_and_aborts(model, texts):
    """Requests come, run out of blocks, are aborted; drafts are wrong now and then; whoever ends is right."""
    rng = random.Random(0)
    for trial in range(12):
        proposer = Oracle(texts, wrong=rng.choice([0, 2, 3, 7]), tree=trial % 3 == 2)
        swap = dict(preemption="swap", num_host_blocks=rng.choice([2, 20])) if trial % 2 else {}
        engine = make(
            model,
            proposer,
            lengths=rng.randint(1, 6),
            num_blocks=13,
            max_num_batched_tokens=rng.choice([4, 9, 32]),
            enable_prefix_caching=rng.choice(["off", "hash", "radix"]),
            **swap,
        )
        groups, expected = [], []
        while len(groups) < 10 or engine.has_work:
            if len(groups) < 10 and rng.random() < 0.3:
                which, count = rng.randrange(3), rng.randint(1, 36)
                groups.append(engine.add(PROMPTS[which], greedy(count)))
                expected.append(texts[which][len(PROMPTS[which]) :][:count])
            if groups and rng.random() < 0.02:
                engine.abort(rng.choice(groups))
            engine.step()
            check(engine)
        for group, text in zip(groups, expected):
            got = engine.completions(group)[0]
            assert got.token_ids == text or (
                got.finish_reason == "abort" and got.token_ids == text[: len(got.token_ids)]
            )
        assert engine.pool.free_count == engine.pool.num_blocks
        assert len(set(proposer.released)) == 10


def test_parallel_answers_and_mixed_batches(model, texts):
    """n = 3 greedy answers share a prompt; beside them a request that nobody drafts for."""

    class Some(Oracle):
        def propose(self, contexts):
            return [self._one(c) if len(c.tokens) % 2 else NOTHING for c in contexts]

    engine = make(model, Some(texts), enable_prefix_caching="radix")
    groups = [engine.add(PROMPTS[1], greedy(12, n=3)), engine.add(PROMPTS[0], greedy(20))]
    drain(engine)
    assert all(c.token_ids == texts[1][10:22] for c in engine.completions(groups[0]))
    assert engine.completions(groups[1])[0].token_ids == texts[0][3:23]
    assert engine.completions(groups[1])[0].metrics.accepted_drafts > 5
    assert engine.speculator.stats.acceptance == 1.0 and engine.speculator.stats.tokens_per_call > 1.5


# Sampling.


def test_sampled_texts_have_the_law_of_plain_decoding():
    """The engine, a draft that draws, 3,000 texts of three tokens over 5: chi-square against the exact joint law."""
    config = model_of({"heads": "gqa", "window": None}).config.with_changes(vocab_size=5)
    from minillm.model.decoder import Decoder, init_weights

    target, draft = (init_weights(Decoder(config), seed).eval().requires_grad_(False) for seed in (1, 2))
    for parameter in [*target.parameters(), *draft.parameters()]:
        if parameter.dim() == 2:
            parameter.mul_(5)
    params, prompt = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.95, ignore_eos=True), [1, 3, 0]
    engine = make(target, DraftModel(draft, 64, block_size=4), 2, max_num_seqs=64, max_num_batched_tokens=512)
    counts = torch.zeros(5, 5, 5)
    for _ in range(50):
        groups = [engine.add(prompt, params) for _ in range(60)]
        while engine.has_work:
            engine.step()
        for group in groups:
            counts[tuple(group.requests[0].output)] += 1
    state, law = Sampler().start(params, prompt), torch.zeros(5, 5, 5)
    with torch.inference_mode():
        for a in range(5):
            for b in range(5):
                p = probabilities(target(torch.tensor([[*prompt, a, b]]))[0, -3:], [state] * 3)
                law[a, b] = p[0, a] * p[1, b] * p[2]
    assert chi_square(counts.flatten().tolist(), law.flatten().tolist()) < 5
    assert 0.2 < engine.speculator.stats.acceptance < 0.999


def test_looked_up_drafts_change_no_sampled_token(model):
    results = []
    for proposer in (None, NGram(2)):
        engine = make(model, proposer)
        params = SamplingParams(max_tokens=30, temperature=0.4, top_k=2, seed=5, frequency_penalty=0.1)
        group = engine.add([4, 9, 4, 9, 4, 9, 4], params)
        drain(engine)
        results.append(engine.completions(group)[0].token_ids)
    assert results[0] == results[1] and engine.speculator.stats.rounds > 0


# Proposers.


def context(tokens, most=4, key="a", **params):
    return Context(key, tokens, most, Sampler(0).start(SamplingParams(**{"temperature": 0, **params}), tokens))


def brute_force_lookup(tokens, most, longest, shortest):
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                while len(text) < len(tokens) + most:
                    text.append(text[end + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


def test_lookup_finds_what_brute_force_finds():
    rng = random.Random(1)
    for _ in range(40):
        proposer, tokens = NGram(rng.randint(1, 4)), [rng.randrange(4)]
        for _ in range(40):
            found = proposer.propose([context(tokens, most=5)])[0].tokens
            assert found == brute_force_lookup(tokens, 5, proposer.longest, 1)
            tokens = tokens + [rng.randrange(4) for _ in range(rng.randint(1, 3))]
    assert proposer.propose([context([1, 1], most=0)])[0] is NOTHING
    proposer.release("a")
    assert not proposer._places
    with pytest.raises(ParamsError, match="longest"):
        NGram(1, 2)


def test_a_draft_model_follows_every_roll_back(model):
    """Whatever became of the text, the draft is what the model says greedily from there, and its pool is exact."""
    rng, proposer = random.Random(2), DraftModel(model, 3, block_size=4, prefill=7)
    texts = {key: [rng.randrange(211) for _ in range(rng.randint(1, 9))] for key in "abc"}
    proposed = 0
    for _ in range(25):
        asked = rng.sample("abc", rng.randint(1, 3))
        drafts = proposer.propose([context(texts[key], rng.randint(1, 4), key) for key in asked])
        proposer.pool.check([table for _, table in proposer.held.values()])
        for key, draft in zip(asked, drafts):
            if not draft:
                continue  # still catching up
            proposed += 1
            assert draft.tokens == generate_naive(model, texts[key], len(draft))
            kept = rng.randint(0, len(draft))  # accept some, then another token
            if len(texts[key]) < 40:
                texts[key] = texts[key] + draft.tokens[:kept] + [rng.randrange(211)]
    assert proposed > 20
    for key in "abc":
        proposer.release(key)
    assert proposer.pool.free_count == proposer.pool.num_blocks and not proposer.held


def test_a_draft_without_the_bonus_token_would_have_a_hole(model):
    """After a whole draft was accepted two tokens are missing from the draft's cache; both are fed."""
    proposer, text = DraftModel(model, 1, block_size=4), [5, 6, 7]
    draft = proposer.propose([context(text, 3)])[0]
    assert len(proposer.held["a"][0]) == len(text) + 2  # its last guess was never fed
    text = text + draft.tokens + [9]
    again = proposer.propose([context(text, 1)])[0]
    assert proposer.held["a"][0] == text and again.tokens == generate_naive(model, text, 1)


def test_a_full_draft_pool_costs_drafts_and_nothing_else(model, texts):
    engine = make(model, DraftModel(model, 1, block_size=4, num_blocks=4), 3)
    groups = [engine.add(p, greedy(20)) for p in PROMPTS]
    drain(engine)
    for group, prompt, text in zip(groups, PROMPTS, texts):
        assert engine.completions(group)[0].token_ids == text[len(prompt) :][:20]


def test_first_layers_are_the_models_own(model):
    exit = first_layers(model, 2)
    assert exit.config.num_layers == 2 and len(model.layers) == 3
    assert exit.layers[1] is model.layers[1] and exit.head is model.head
    for count in (0, 3, True):
        with pytest.raises(ParamsError, match="from 1 to 2"):
            first_layers(model, count)


# Lengths.


def simulate(lengths, steps, a, draft_cost, batch=1, per_token=0.02, seed=0, prompt=0):
    """(tokens a request, time) of a machine on which a plain step takes 1, and a draft step of the whole batch
    draft_cost, half of it however few they are. prompt: tokens of each request that the draft has to read first."""
    rng, tokens, clock, missed = random.Random(seed), 0, 0.0, [prompt] * batch
    for _ in range(steps):
        k, count = lengths.choose(batch)
        count = count if k else 0
        accepted = [next((i for i in range(k) if rng.random() >= a), k) for _ in range(count)]
        propose = k * draft_cost * (1 + count / batch) / 2 + sum(missed[:count]) * draft_cost / 20  # a twentieth each
        rest = 1 + k * per_token * count / batch
        gained = [1 + n for n in accepted] + [1] * (batch - count)
        missed = [n + (0 if i < count else missed[i]) for i, n in enumerate(gained)]
        lengths.record(batch, k, [(k, n) for n in accepted], propose, rest)
        tokens, clock = tokens + sum(gained) / batch, clock + propose + rest
    return tokens, clock


@pytest.mark.parametrize("a", [0.05, 0.3, 0.5, 0.7, 0.9, 0.98])
@pytest.mark.parametrize("cost", [0.01, 0.1, 0.3, 0.8])
def test_adaptive_lengths_never_lose_and_nearly_win(a, cost):
    from minillm.speculative.analysis import best_k, speedup

    gains = []
    for seed in range(5):
        tokens, clock = simulate(AdaptiveLength(8), 400, a, cost, seed=seed)
        gains.append(tokens / clock)
    assert min(gains) > 0.97
    best = max(1.0, speedup(a, best_k(a, cost, 0.02, 8), cost, 0.02))
    assert sum(gains) / 5 > 0.85 * best


def test_reading_the_prompt_does_not_count_as_drafting():
    tokens, _ = simulate(AdaptiveLength(4), 40, 0.9, 0.15, prompt=300)
    assert tokens > 80  # it did not give up after the first, slow proposal


@pytest.mark.parametrize("a", [0.05, 0.3])
@pytest.mark.parametrize(("cost", "batch"), [(0.3, 1), (0.8, 1), (0.3, 8)])
def test_trials_that_fail_cost_little_even_where_a_draft_must_read_prompts(batch, a, cost):
    """From the first step on, over the length of a few answers."""
    gains = []
    for seed in range(5):
        tokens, clock = simulate(AdaptiveLength(8), 200, a, cost, batch, seed=seed, prompt=60)
        gains.append(tokens / clock)
    assert sum(gains) / 5 > 0.965 and min(gains) > 0.95


def test_a_trial_is_one_request_and_then_all():
    lengths, counts = AdaptiveLength(4), []
    for _ in range(80):
        k, count = lengths.choose(8)
        counts.append(count if k else 0)
        lengths.record(8, k, [(k, k)] * counts[-1], 0.009 * k, 1.0)
    # Both trial steps took 0.009 longer than a plain one; times 8 requests, that is 4 plain steps of 0.04.
    assert counts[:8] == [0, 0, 0, 1, 1, 0, 8, 8]
    plain = [step for step, count in enumerate(counts) if step > 5 and count == 0]
    assert set(counts) == {0, 1, 8}
    assert [b - a - 1 for a, b in zip([5, *plain], plain)] == [4, 8, 16, 32], "ever more rarely compared"


def test_a_long_stretch_of_plain_steps_saves_no_more_than_one_trial_may_cost():
    lengths = AdaptiveLength(4)
    for _ in range(5000):
        lengths.record(8, 0, [], 0.0, 1.0)
    assert lengths.saved == ANSWER


@pytest.mark.parametrize("batch", (1, 8))
def test_a_machine_that_grows_faster_during_a_trial_does_not_keep_a_losing_draft(batch):
    """Half the time a step, from the first draft on: what is gained then is not the draft's merit."""
    lengths, counts, speed = AdaptiveLength(4), [], 2.0
    for _ in range(300):
        k, count = lengths.choose(batch)
        counts.append(count if k else 0)
        speed = 1.0 if any(counts) else speed
        lengths.record(batch, k, [(k, 0)] * counts[-1], 0.1 * speed * k, 1.0 * speed)  # nothing is ever accepted
    first = counts.index(batch)
    assert sum(map(bool, counts[first:])) < 40, "a plain step must be compared soon"


@pytest.mark.parametrize("a", [0.5, 0.9])
@pytest.mark.parametrize("cost", [0.2, 0.5, 1.0])
def test_a_trial_of_all_is_saved_for(a, cost):
    """96 plain steps' worth of answers that end together: what some requests gained is waiting for the slowest. No
    more than 5 % may be lost even if nothing is gained; and over a long time a win is still found."""
    for seed in range(5):
        _, clock = simulate(AdaptiveLength(4), 96, a, cost, batch=8, seed=seed, prompt=60)
        assert 96 / clock > 0.95
    tokens, clock = simulate(AdaptiveLength(4), 3000, 0.9, 0.2, batch=8, per_token=0.05)
    assert tokens / clock > 1.3


def test_no_second_trial_before_the_first_was_measured():
    """Steps that compute prompts as well are not recorded; drafts in them say nothing."""
    lengths = AdaptiveLength(4)
    for _ in range(3):
        lengths.record(1, 0, [], 0.0, 1.0)
    assert [lengths.choose(1)[0] for _ in range(5)] == [1, 0, 0, 0, 0]
    lengths.record(1, 0, [], 0.0, 1.0)
    assert lengths.choose(1)[0] == 1


def test_adaptive_lengths_follow_a_text_that_changes():
    lengths = AdaptiveLength(8)
    simulate(lengths, 300, 0.1, 0.3)
    assert sum(lengths.choose(1)[0] for _ in range(30)) == 0  # off
    simulate(lengths, 1500, 0.95, 0.05)
    tokens, clock = simulate(lengths, 200, 0.95, 0.05)
    assert tokens / clock > 2


def test_a_line_through_depths():
    assert line([(2, 1.0), (2, 3.0), (2, 2.0)]) == (2.0, 0.0)
    base, slope = line([(2, 1.2), (4, 1.4), (4, 1.4)])
    assert abs(base - 1.0) < 1e-9 and abs(slope - 0.1) < 1e-9
    assert line([(2, 2.0), (4, 1.0)]) == (1.0, 0.0)


# Options.


def test_options_by_name():
    assert parse(None) is None and parse("ngram").method == "ngram"
    assert SpeculativeOptions("exit-3").layers == 3 and SpeculativeOptions("self-int4").bits == "int4"
    assert parse({"method": "ngram", "num_tokens": 7}).num_tokens == 7
    for wrong, told in (
        (5, "dictionary"),
        ({}, "method"),
        ({"method": "ngram", "k": 3}, "no field k"),
        ({"method": "ngram", "num_tokens": 0}, "num_tokens=0"),
        ({"method": "ngram", "adaptive": 1}, "adaptive=1"),
        ("", "speculative"),
    ):
        with pytest.raises(ParamsError, match=told):
            parse(wrong)
    for name, told in (
        ("exit-6", "speculative exit=6: .*from 1 to 5"),
        ("self-int5", "speculative='self-int5': .*self-int4"),
        ("self-", "speculative='self-': .*self-int4"),
    ):
        with pytest.raises(ParamsError, match=told):
            LLM("tiny", device="cpu", speculative=name)


def test_another_vocabulary_is_refused():
    config = model_of({"heads": "gqa", "window": None}).config
    with pytest.raises(ParamsError, match="212 token ids and the target 211"):
        check_same_vocabulary(config, config.with_changes(vocab_size=212))
    with pytest.raises(ParamsError, match="token ids"):
        LLM("tiny", device="cpu", speculative="shape:smollm2-135m")

    class Fake:
        def __init__(self, **vocab):
            self.backend, self.vocab = self, vocab

        def get_vocab(self, with_added_tokens):
            return self.vocab

    check_same_vocabulary(config, config, Fake(a=0, b=1), Fake(a=0, b=1))
    with pytest.raises(ParamsError, match="'a' different ids"):
        check_same_vocabulary(config, config, Fake(a=0, b=1), Fake(a=1, b=0))


@pytest.mark.parametrize("method", ["ngram", "tiny-draft", "tiny-distilled", "self-int4", "exit-2"])
def test_llm_says_the_same_with_any_proposer(method):
    prompts, params = ["And it came to pass", "She was not"], greedy(24)
    plain = LLM("tiny", dtype="float32", device="cpu").generate(prompts, params)
    fast = LLM("tiny", dtype="float32", device="cpu", speculative={"method": method, "adaptive": False})
    for a, b in zip(plain, fast.generate(prompts, params)):
        assert a.token_ids == b.token_ids
    assert fast.engine.speculator.stats.tokens_per_call > 1
