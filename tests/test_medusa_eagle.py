"""Medusa and EAGLE: the same tokens as plain decoding, drafts equal to a recomputation without any cache, typical
acceptance as it is defined, heads that are refused where they do not belong, and a trainer that can be stopped."""

import math
import random

import numpy as np
import pytest
import torch
from test_tree import make_model

from minillm import LLM
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.speculation import Speculator
from minillm.errors import ParamsError, WeightsError
from minillm.model.sampling import Sampler, SamplingParams
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model
from minillm.speculative import train
from minillm.speculative.eagle import DEPTH, Eagle, EagleHead
from minillm.speculative.eagle import make as make_eagle
from minillm.speculative.heads import heads_path, load_heads, read_facts, save_heads
from minillm.speculative.medusa import Medusa, MedusaHeads, typical
from minillm.speculative.medusa import make as make_medusa
from minillm.speculative.options import SpeculativeOptions
from minillm.speculative.proposer import Context, Draft
from minillm.speculative.verify import verify

MAKE = {"medusa": make_medusa, "eagle": make_eagle}
PROMPTS = [
    "And it came to pass, that",
    "The LORD said to Moses,",
    "She was",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
]


@pytest.fixture(scope="module")
def target():
    return load_model("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts():
    return [load_tokenizer("tiny").encode(text) for text in PROMPTS]


def proposer(kind, target, tree=True, sequences=4):
    return MAKE[kind](SpeculativeOptions(kind, tree=tree), "tiny", target, sequences)


def answers(model, prompts, params, draft=None, lengths=4, walk=None, **options):
    """(tokens of each, the speculator's counts)."""
    speculator = None if draft is None else Speculator(draft, lengths, walk)
    engine = Engine(
        model,
        EngineOptions(**({"num_blocks": 128, "max_num_seqs": 4} | options)),
        eos_ids=(),
        seed=0,
        speculator=speculator,
    )
    groups = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
        engine.pool.check([r.table for r in engine.scheduler.running])
    assert engine.pool.free_count == engine.pool.num_blocks
    return [c.token_ids for g in groups for c in engine.completions(g)], speculator and speculator.stats


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0)


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_greedy_says_the_same_and_wins_tokens(kind, tree, target, prompts):
    plain, _ = answers(target, prompts, greedy(32))
    drafter = proposer(kind, target, tree)
    said, stats = answers(target, prompts, greedy(32), drafter)
    assert said == plain
    assert stats.tokens_per_call > 1.2 and stats.accepted > 20
    held = drafter.held if kind == "eagle" else drafter.last
    assert not held and (kind != "eagle" or sorted(drafter.free) == list(range(4)))


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 26, "max_num_batched_tokens": 24},
        {"block_size": 4, "num_blocks": 26, "num_host_blocks": 40, "preemption": "swap"},
        {"enable_prefix_caching": "radix", "block_size": 4, "max_num_batched_tokens": 9},
        {"enable_prefix_caching": "hash", "block_size": 8, "max_num_seqs": 2},
    ],
    ids=["recompute", "swap", "radix", "hash"],
)
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_greedy_says_the_same_whatever_happens_to_the_blocks(kind, options, target, prompts):
    asked = [*prompts, prompts[3], prompts[1] + prompts[2]]  # the prefix caches find something
    plain, _ = answers(target, asked, greedy(20))
    said, stats = answers(target, asked, greedy(20), proposer(kind, target, sequences=3), **options)
    assert said == plain and stats.accepted > 10


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_seed_draws_the_same_with_trees_as_without(kind, target, prompts):
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=5, n=2)
    plain, _ = answers(target, prompts[:2], params)
    said, stats = answers(target, prompts[:2], params, proposer(kind, target))
    assert said == plain and stats.accepted > 5


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_llm_takes_them_by_name(kind):
    plain, fast = (
        LLM("tiny", device="cpu"),
        LLM("tiny", device="cpu", speculative={"method": kind, "adaptive": False}),
    )
    a, b = (llm.generate(PROMPTS[:2], greedy(24)) for llm in (plain, fast))
    assert [x.text for x in a] == [x.text for x in b]
    assert any(x.metrics.accepted_drafts for x in b) and not any(x.metrics.accepted_drafts for x in a)


# Drafts.


def context(key, tokens, most=4):
    return Context(key, tokens, most, Sampler(0).start(greedy(8), tokens[:1]))


def random_eagle(model, seed=0, **options):
    head = EagleHead(model.config).to(model.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.5, generator=generator)
    return Eagle(model, head.eval(), **options)


@torch.no_grad()
def brute_eagle(eagle, model, tokens, most, first=0):
    """The same tree with no cache: each path is run from the start. -> {path of tokens: log-probability}."""
    features = model.hidden(torch.tensor([tokens[:-1]]))[0][first:]  # of all but the last token

    def next_feature(path):  # tokens after the last known one, with the draft's own features below them
        x, text = features, tokens[first + 1 :]
        for step in range(len(path) + 1):
            places = torch.arange(first, first + len(x))
            said = eagle.head(x[None], model.embed(torch.tensor([text])), places[None])[0]
            if step < len(path):
                x, text = torch.cat((x, said[-1:])), [*text, path[step]]
        return said[-1]

    found, frontier = {}, [((), 0.0)]
    for _ in range(min(most, DEPTH)):
        level = {}
        for path, total in frontier:
            top = model.logits(next_feature(path)).float().log_softmax(-1).topk(eagle.width)
            for value, token in zip(top.values.tolist(), top.indices.tolist()):
                level[(*path, token)] = total + min(value, -1e-5)
        found |= level
        frontier = sorted(level.items(), key=lambda item: -item[1])[: eagle.width]
    return dict(sorted(found.items(), key=lambda item: -item[1])[: eagle.nodes])


def paths(draft):
    return {tuple(draft.tokens[n] for n in draft.path(node)) for node in range(len(draft))}


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1}])
def test_an_eagle_tree_equals_a_recomputation_of_every_path(changes):
    """Three sequences of other lengths at other depths, over rounds in which some are accepted more than others."""
    model, rng = make_model(**changes), random.Random(2)
    eagle = random_eagle(model, sequences=3, width=3, nodes=9)
    texts = {key: [rng.randrange(61) for _ in range(size)] for key, size in (("a", 5), ("b", 17), ("c", 9))}
    known = dict.fromkeys(texts, 0)
    for _ in range(4):
        for key, text in texts.items():
            with torch.no_grad():
                hidden = model.hidden(torch.tensor([text[:-1]]))[0]
            eagle.observe(key, known[key], hidden[known[key] :])
            known[key] = len(text) - 1
        asked = [context(key, texts[key], most) for key, most in (("b", 4), ("a", 2), ("c", 3))]
        for one, draft in zip(asked, eagle.propose(asked)):
            assert paths(draft) == set(brute_eagle(eagle, model, one.tokens, one.most))
            assert max(draft.depths()) <= one.most and len(draft) == 9
        for text in texts.values():
            text += [rng.randrange(61) for _ in range(rng.randint(1, 4))]


def test_eagle_begins_behind_a_prefix_that_was_found_in_a_cache():
    model, eagle = make_model(), None
    eagle = random_eagle(model, width=2, nodes=5)
    text = list(range(3, 20))
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([text[:-1]]))[0]
    eagle.observe("a", 8, hidden[8:])  # tokens 0 .. 7 were not computed
    (draft,) = eagle.propose([context("a", text)])
    assert paths(draft) == set(brute_eagle(eagle, model, text, 4, first=8))
    assert paths(draft) != set(brute_eagle(eagle, model, text, 4))


def test_eagle_after_a_preemption_has_no_pair_twice():
    model = make_model()
    text = list(range(3, 20))
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([text]))[0]
    drafts = []
    for again in (False, True):
        eagle = random_eagle(model)
        eagle.observe("a", 0, hidden[:10])
        eagle.propose([context("a", text[:11])])
        if again:
            eagle.observe("a", 0, hidden[:6])
            eagle.observe("a", 6, hidden[6:12])
        else:
            eagle.observe("a", 10, hidden[10:12])
        assert eagle.held["a"].known == 12
        drafts.append(eagle.propose([context("a", text[:13])])[0])
    assert drafts[0].tokens == drafts[1].tokens and drafts[0].parents == drafts[1].parents


def test_without_features_or_room_there_is_no_draft():
    model = make_model()
    eagle = random_eagle(model, sequences=1)
    medusa = Medusa(model, MedusaHeads(24, 2).double(), [[0.5, 0.2]] * 2)
    hidden = torch.zeros(4, 24, dtype=torch.float64)
    for proposer in (eagle, medusa):
        assert not proposer.propose([context("x", [1, 2, 3])])[0]
        proposer.observe("a", 0, hidden)
        proposer.observe("b", 0, hidden)
        drafts = proposer.propose(
            [context("a", [1, 2, 3, 4, 5]), context("b", [1, 2, 3, 4, 5]), context("a", [1, 2])]
        )
        assert drafts[0] and bool(drafts[1]) == (proposer is medusa) and not drafts[2]
        proposer.release("a")
        proposer.release("a")
        assert not proposer.propose([context("a", [1, 2, 3, 4, 5])])[0]
        assert not proposer.propose([context("b", [1, 2, 3, 4, 5], most=0)])[0]


def test_medusa_guesses_what_its_heads_say_in_the_best_tree():
    model, accuracy = make_model(), [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.3, 0.2, 0.1]]
    heads = MedusaHeads(24, 3).double()
    with torch.no_grad():
        for weight in heads.parameters():
            weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for most, tree in ((3, True), (2, True), (9, True), (3, False)):
        medusa = Medusa(model, heads, accuracy, nodes=7, tree=tree)
        medusa.observe("a", 3, hidden)
        (draft,) = medusa.propose([context("a", list(range(9)), most)])
        depth = min(most, 3)
        for node, at in enumerate(draft.depths()):
            layer = heads.layers[at - 1]
            x = hidden[-1] + torch.nn.functional.silu(hidden[-1] @ layer.weight.T + layer.bias)
            order = (model.embed.weight @ x if model.config.tie_embeddings else model.head.weight @ x).argsort(
                descending=True
            )
            assert draft.tokens[node] in order[: 3 if tree else 1].tolist()
        assert max(draft.depths()) == depth and len(draft) == (7 if tree else depth)


# Typical acceptance.


def test_typical_acceptance_is_its_definition():
    """Against the rule, written out for every path of random trees."""
    rng = random.Random(3)
    for _ in range(60):
        nodes = rng.randint(1, 12)
        draft = Draft([rng.randrange(7) for _ in range(nodes)], [rng.randint(-1, i - 1) for i in range(nodes)])
        p = torch.tensor(np.random.default_rng(rng.randrange(999)).dirichlet([0.4] * 7, nodes + 1))
        epsilon, delta = rng.choice([(0.09, 0.3), (0.3, 0.5)])
        state = Sampler(0).start(SamplingParams(temperature=1.0, seed=1), [1])
        accepted, last = typical(epsilon, delta)(p, draft, state)

        def legal(path, p=p, draft=draft, epsilon=epsilon, delta=delta):
            row = 0
            for node in path:
                entropy = -sum(x * math.log(x) for x in p[row].tolist() if x > 0)
                if not p[row, draft.tokens[node]] > min(epsilon, delta * math.exp(-entropy)):
                    return False
                row = node + 1
            return True

        fit = [draft.path(node) for node in range(nodes) if legal(draft.path(node))]
        assert len(accepted) == max(map(len, fit), default=0)
        assert not accepted or accepted in fit
        row = accepted[-1] + 1 if accepted else 0
        u = random.Random("1/0").random()
        assert last == int(torch.searchsorted(p[row].cumsum(0), u * p[row].sum(), right=True))


def test_typical_acceptance_changes_the_distribution_and_the_exact_rule_does_not():
    """One drafted token with p = 0.4 of three: kept always, where it should be kept in 40 of 100."""
    p = torch.tensor([[0.4, 0.35, 0.25], [0.2, 0.3, 0.5]])
    shares = {}
    for name, walk in (("exact", None), ("typical", typical())):
        states = [Sampler(0).start(SamplingParams(temperature=1.0, seed=i), [1]) for i in range(2000)]
        verdicts = verify(p.log().repeat(2000, 1), [Draft([0])] * 2000, states, walk)
        shares[name] = sum(v.tokens[0] == 0 for v in verdicts) / 2000
    assert abs(shares["exact"] - 0.4) < 0.04 and shares["typical"] == 1.0


def test_typical_acceptance_leaves_greedy_alone(target, prompts):
    plain, _ = answers(target, prompts[:2], greedy(16))
    said, _ = answers(target, prompts[:2], greedy(16), proposer("medusa", target), walk=typical())
    assert said == plain


def test_llm_offers_typical_acceptance_by_name():
    warm = SamplingParams(max_tokens=24, temperature=1.0, seed=1)
    plain, exact, loose = (
        LLM("tiny", device="cpu", speculative=s)
        for s in (
            None,
            {"method": "medusa", "adaptive": False},
            {"method": "medusa", "adaptive": False, "acceptance": "typical"},
        )
    )
    a, b, c = (llm.generate(PROMPTS, warm) for llm in (plain, exact, loose))
    assert [x.token_ids for x in a] == [x.token_ids for x in b] != [x.token_ids for x in c]
    kept = [sum(x.metrics.accepted_drafts for x in out) for out in (b, c)]
    assert kept[1] > kept[0]
    with pytest.raises(ParamsError, match="acceptance"):
        SpeculativeOptions("medusa", acceptance="loose")


@pytest.mark.parametrize("bad", [{"epsilon": 0}, {"delta": 1.5}])
def test_thresholds_that_mean_nothing_are_refused(bad):
    with pytest.raises(ParamsError, match=next(iter(bad))):
        typical(**bad)


# Heads as files.


def test_what_ships_is_small_and_says_how_it_was_made():
    size = 0
    for kind in MAKE:
        path, facts = heads_path("tiny", kind), read_facts("tiny", kind)
        size += path.stat().st_size
        assert path.parent.name == "heads" and facts["target"] == "tiny" and facts["tokens"] > 0
        assert all(row == sorted(row, reverse=True) for row in facts["accuracy"])
    assert size < 1.5e6


def test_heads_that_are_missing_or_of_another_model_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ParamsError, match=r"python -m minillm.speculative.train --what eagle --model nobody"):
        read_facts("nobody", "eagle")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    save_heads(MedusaHeads(16), heads_path("other", "medusa"), {"accuracy": []})
    with pytest.raises(WeightsError, match="does not fit"):
        load_heads(MedusaHeads(24), "other", "medusa")
    with pytest.raises(ParamsError, match="accuracy"):
        Medusa(make_model(), MedusaHeads(24, 2), [[0.5]])
    for name in ("sequences", "width", "nodes"):
        with pytest.raises(ParamsError, match=name):
            Eagle(make_model(), EagleHead(make_model().config), **{name: 0})


# The trainer.


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)  # pairs that predict one another
    return {"austen": np.repeat(rng.integers(0, 2048, 3000), 3).astype(np.uint16)}


ENOUGH = 5 * 256 + 512  # six steps: every fourth has a sequence of twice the length
SHORT = train.Recipe(batch=256, warmup=1, cooldown=0.5, muon_rate=0.01)


@pytest.mark.parametrize("what", ["medusa", "eagle", "draft"])
def test_training_lowers_the_loss_and_resumes_where_it_stopped(what, target, texts, tmp_path, monkeypatch):
    students = [train.make_student(what, target) for _ in range(2)]
    batch = train.make_batch(texts, 99, SHORT)[0]
    with torch.no_grad():
        before = train.LOSSES[what](target, students[0], batch, 0)
    train.run(what, target, students[0], texts, tmp_path / "whole", recipe=SHORT, tokens=ENOUGH)
    with torch.no_grad():
        assert train.LOSSES[what](target, students[0], batch, 0) < before

    loss, calls = train.LOSSES[what], []

    def stops(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss(*args)

    monkeypatch.setitem(train.LOSSES, what, stops)
    with pytest.raises(KeyboardInterrupt):
        train.run(what, target, students[1], texts, tmp_path, recipe=SHORT, tokens=ENOUGH, save_every=0)
    fresh = train.make_student(what, target)
    progress = train.run(what, target, fresh, texts, tmp_path, recipe=SHORT, tokens=ENOUGH, resume=True)
    assert (progress.step, progress.tokens, len(calls)) == (6, ENOUGH, 7)
    for one, other in zip(fresh.parameters(), students[0].parameters()):
        assert torch.equal(one, other)


def test_accuracy_is_what_a_loop_counts(target):
    tokens = np.arange(300, 556, dtype=np.uint16)
    heads = train.make_student("medusa", target)
    with torch.no_grad():
        heads.layers[1].bias.add_(0.5)
        h = target.hidden(torch.from_numpy(tokens.astype(np.int64))[None])[0]
        choice = target.logits(h).argmax(-1)
        guesses = target.logits(heads(h)).topk(3).indices  # [256, heads, 3]
    found = train.guessed_right("medusa", target, heads, tokens)
    for depth in range(1, 5):
        for rank in range(3):
            right = sum(int(guesses[i, depth - 1, rank]) == int(choice[i + depth]) for i in range(252))
            assert found[depth - 1][rank] == pytest.approx(right / 252, abs=1e-4)


def test_a_run_must_know_what_and_how_long(target, texts, tmp_path):
    with pytest.raises(ParamsError, match="what"):
        train.run("lookahead", target, MedusaHeads(192), texts, tmp_path, tokens=5)
    with pytest.raises(ParamsError, match="tokens or minutes"):
        train.run("medusa", target, MedusaHeads(192), texts, tmp_path)
