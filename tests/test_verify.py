"""Verification keeps the target's distribution exactly: by chi-square, by enumeration, at the limits, over trees."""

import itertools
import math

import numpy as np
import pytest
import torch

from minillm import load_model
from minillm.errors import LogitsError, ParamsError
from minillm.model.sampling import Sampler, SamplingParams, probabilities
from minillm.model.sampling_steps import draw
from minillm.speculative.analysis import acceptance, acceptance_of, best_k, expected_tokens, speedup
from minillm.speculative.early_exit import first_layers
from minillm.speculative.proposer import NOTHING, Draft
from minillm.speculative.verify import match, reject, residual, verify

SAMPLES = 200_000


def state_of(seed=0, prompt=(1,), **params):
    return Sampler(seed).start(SamplingParams(**params), list(prompt))


def random_logits(rows, vocab, seed, spread=1.5):
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def chi_square(counts, p):
    """(statistic - degrees of freedom) / its standard deviation: below 5 for a true p. Cells under 5 are joined."""
    counts, wanted = np.asarray(counts, float), np.asarray(p, float) * np.sum(counts)
    assert counts[wanted == 0].sum() == 0, "a token came that has no probability"
    small = (wanted > 0) & (wanted < 5)
    cells = [(c, w) for c, w in zip(counts[wanted >= 5], wanted[wanted >= 5])]
    if small.any() and wanted[small].sum() >= 5:
        cells.append((counts[small].sum(), wanted[small].sum()))
    free = len(cells) - 1
    return (sum((c - w) ** 2 / w for c, w in cells) - free) / math.sqrt(2 * free) if free else 0.0


def draw_many(q, count, seed):
    return torch.multinomial(q, count, replacement=True, generator=torch.Generator().manual_seed(seed)).tolist()


def said_of(p, draft, state):
    """(accepted nodes, tokens) of a draft, p worked out already: by `reject`, and now and then by `verify` itself."""
    if draft.probs is None or state.stream.random() < 0.05:
        verdict = verify(p.log() * state.params.temperature, [draft], [state])[0]
        return verdict.accepted, verdict.tokens
    accepted, last = reject(p, draft, state)
    return accepted, [*(draft.tokens[node] for node in accepted), last]


# The distribution.


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"temperature": 1.7, "top_p": 0.8}, {"top_k": 3}])
def test_one_drafted_token_by_chi_square(params):
    """SAMPLES rounds over all four, a draft of one; first tokens against p, second ones against the bonus."""
    logits, state = random_logits(2, 8, seed=1), state_of(**params)
    q = (random_logits(1, 8, seed=2)).softmax(-1)  # [1, 8], nothing like p
    p = probabilities(logits, [state, state])  # [2, 8]
    first, second, accepted = np.zeros(8), np.zeros(8), 0
    for x in draw_many(q[0], SAMPLES // 4, seed=3):
        nodes, last = reject(p, Draft([x], probs=q), state)
        first[x if nodes else last] += 1
        if nodes:
            accepted += 1
            second[last] += 1
    assert chi_square(first, p[0]) < 5
    assert chi_square(second, p[1]) < 5
    a = acceptance(p[0], q[0])
    assert abs(4 * accepted / SAMPLES - a) < 5 * math.sqrt(4 * a * (1 - a) / SAMPLES)


def enumerate_law(p, q):
    """P(first token) by going through all drafts and all refusals, on `reject`'s parts."""
    total = {}
    vocab = p.shape[-1]
    for x in range(vocab):
        keep = min(1.0, float(p[0, x] / q[0, x]))
        left = residual(p[0], x, q[0])
        total[x] = total.get(x, 0.0) + float(q[0, x]) * keep
        for y in range(vocab):
            total[y] = total.get(y, 0.0) + float(q[0, x]) * (1 - keep) * float(left[y])
    return total


def test_the_law_by_enumeration():
    """No sampling: q(x) min(1, p/q) + sum over rejected drafts of the residual, for every token."""
    for seed in range(20):
        p, q = random_logits(1, 6, seed).double().softmax(-1), random_logits(1, 6, seed + 99).double().softmax(-1)
        total = enumerate_law(p, q)
        assert all(abs(total[x] - float(p[0, x])) < 1e-12 for x in range(6))


def test_chains_of_three_by_chi_square():
    """All that is emitted, as a joint law: P(first 3 tokens) = p1 p2 p3 with rows that depend on the text."""
    vocab, rng = 4, torch.Generator().manual_seed(5)
    table = torch.randn(vocab + 1, vocab, generator=rng) * 1.2  # logits after each token; row `vocab`: at the start
    other = torch.randn(vocab + 1, vocab, generator=rng)
    state = state_of(temperature=0.8)
    p, q = probabilities(table, [state] * (vocab + 1)), other.softmax(-1)
    counts, stream = np.zeros((vocab,) * 3), state_of(7).stream
    for _ in range(SAMPLES // 16):
        text, before = [], vocab
        while len(text) < 3:
            tokens, rows, here = [], [], before
            for _ in range(2):
                rows.append(q[here])
                here = int(draw(q[here][None], torch.tensor([stream.random()], dtype=torch.float64))[0])
                tokens.append(here)
            draft = Draft(tokens, probs=torch.stack(rows))
            text += said_of(p[[before, *tokens]], draft, state)[1]
            before = text[-1]
        counts[tuple(text[:3])] += 1
    wanted = [p[vocab, a] * p[a, b] * p[b, c] for a, b, c in itertools.product(range(vocab), repeat=3)]
    assert chi_square(counts.ravel(), torch.stack(wanted)) < 5


@pytest.mark.parametrize("sure", [False, True])
def test_trees_by_chi_square(sure):
    """Siblings drawn without replacement, or sure ones; first tokens, and second ones given the first."""
    vocab = 6
    logits, state = random_logits(7, vocab, seed=11), state_of(temperature=0.9)
    q = random_logits(1, vocab, seed=12)[0].softmax(-1)
    p = probabilities(logits, [state] * 7)
    first, second = np.zeros(vocab), {node: np.zeros(vocab) for node in range(3)}
    drafts = torch.multinomial(q.expand(SAMPLES // 10, -1), 2, generator=torch.Generator().manual_seed(1)).tolist()
    for a, b in drafts:
        if sure:
            a, b = 4, 2
        rest = q.clone()
        rest[a] = 0
        probs = None if sure else torch.stack([q, rest / rest.sum(), q])
        below = 3
        if not sure:
            below = int(draw(q[None], torch.tensor([state.stream.random()], dtype=torch.float64))[0])
        draft = Draft([a, b, below], [-1, -1, 0], probs)
        accepted, said = said_of(p[:4], draft, state)
        first[said[0]] += 1
        if accepted:
            second[accepted[0]][said[1]] += 1
    assert chi_square(first, p[0]) < 5
    for node in (0, 1):
        assert second[node].sum() > 200 and chi_square(second[node], p[node + 1]) < 5


def test_tiny_over_its_first_three_positions():
    """Real logits: `tiny` and a bad draft, its own first two layers; SAMPLES rounds at each of three positions."""
    model = load_model("tiny", dtype="float32", device="cpu")
    draft, prompt = first_layers(model, 2), [30, 71, 5, 100]
    state = state_of(3, prompt, temperature=1.0, top_p=0.95)
    with torch.inference_mode():
        for position in range(3):
            p = probabilities(model(torch.tensor([prompt]))[0, -1:], [state])  # [1, vocab]
            q = probabilities(draft(torch.tensor([prompt]))[0, -1:], [state])
            kept = np.zeros(p.shape[-1])
            drafted = np.bincount(draw_many(q[0], SAMPLES, position), minlength=len(kept))
            # every draft of one token is one trial of the same law: count them together
            ratio = torch.where(q[0] > 0, p[0] / q[0], torch.zeros(())).clamp(max=1).double().numpy()
            rng = np.random.default_rng(position)
            accepted = rng.binomial(drafted, ratio)
            left = residual(p[0], 0, q[0]).double().numpy()
            kept += accepted + rng.multinomial(SAMPLES - accepted.sum(), left / left.sum())
            assert chi_square(kept, p[0]) < 5
            few = [reject(p.expand(2, -1), Draft([x], probs=q), state) for x in draw_many(q[0], 3000, 50 + position)]
            share = sum(bool(nodes) for nodes, _ in few) / len(few)
            a = acceptance(p[0], q[0])
            assert abs(share - a) < 5 * math.sqrt(a * (1 - a) / len(few))
            prompt = [*prompt, int(p[0].argmax())]


def test_a_biased_verifier_is_noticed():
    """The check can fail: drawing from p after a refusal, in place of the residual, is seen at once."""
    p, q = random_logits(1, 8, 1).softmax(-1)[0], random_logits(1, 8, 2).softmax(-1)[0]
    rng, counts = np.random.default_rng(0), np.zeros(8)
    for x in draw_many(q, SAMPLES // 4, 3):
        kept = rng.random() < float(p[x] / q[x])
        counts[x if kept else rng.choice(8, p=p.double().numpy() / float(p.double().sum()))] += 1
    assert chi_square(counts, p) > 50


# The limits.


def test_a_draft_equal_to_the_target_is_always_accepted():
    logits, state = random_logits(5, 50, 1), state_of(temperature=0.7, top_p=0.9)
    p = probabilities(logits, [state] * 5)
    for seed in range(300):
        tokens = [draw_many(row, 1, seed * 10 + i)[0] for i, row in enumerate(p[:4])]
        assert verify(logits, [Draft(tokens, probs=p[:4])], [state])[0].accepted == [0, 1, 2, 3]


def test_a_draft_of_another_support_is_never_accepted_and_the_law_holds():
    logits = torch.tensor([[0.0, 1.0, 2.0, -math.inf, -math.inf]] * 3)
    q = torch.tensor([[0.0, 0.0, 0.0, 0.5, 0.5]] * 2)
    state, counts = state_of(), np.zeros(5)
    for i in range(4_000):
        verdict = verify(logits, [Draft([3 + i % 2, 3], probs=q)], [state])[0]
        assert verdict.accepted == []
        counts[verdict.tokens[0]] += 1
    assert chi_square(counts, logits[0].softmax(-1)) < 5


def test_greedy_is_the_limit():
    """Whatever q says: kept while it is the likeliest token, then the likeliest token."""
    logits, state = random_logits(4, 30, 8), state_of(temperature=0)
    best = logits.argmax(-1).tolist()
    wrong = (best[1] + 1) % 30
    for probs in (None, torch.full((3, 30), 1 / 30)):
        verdict = verify(logits, [Draft([best[0], wrong, best[2]], probs=probs)], [state])[0]
        assert (verdict.accepted, verdict.tokens, verdict.rows) == ([0], [best[0], best[1]], [0, 1])
        assert verify(logits, [Draft(best[:3], probs=probs)], [state])[0].tokens == best


def test_greedy_with_penalties_counts_the_drafted_tokens():
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 3)
    state = state_of(temperature=0, presence_penalty=1.5)
    assert verify(logits, [Draft([1, 1])], [state])[0].tokens == [1, 2]  # 1 is penalised once it was said
    assert verify(logits, [Draft([1, 2])], [state])[0].tokens == [1, 2, 1]  # both are


@pytest.mark.parametrize("params", [{"temperature": 0.9}, {"temperature": 1.3, "top_k": 5, "frequency_penalty": 0.4}])
def test_a_sure_draft_says_what_plain_decoding_says_with_the_same_seed(params):
    rows = random_logits(5, 20, 21)
    for seed in range(60):
        plain, sampler = state_of(seed, **params), Sampler()
        said = []
        for row in rows:
            said.append(sampler.sample(row[None], [plain]).checked()[0])
            plain.append(said[-1])
        tokens = [*said[: seed % 5], *[(t + 1) % 20 for t in said[seed % 5 : 4]]]
        state = state_of(seed, **params)
        verdict = verify(rows, [Draft(tokens)], [state])[0]
        assert verdict.tokens == said[: min(seed % 5, 4) + 1]
        again = state_of(seed, **params)
        for _ in verdict.tokens:
            again.stream.random()
        assert state.stream.getstate() == again.stream.getstate()


def test_no_draft_is_plain_decoding():
    logits = random_logits(3, 40, 4)
    plain = [state_of(s, temperature=1.0) for s in range(2)] + [state_of(0, temperature=0)]
    wanted = Sampler().sample(logits, plain).token_ids
    states = [state_of(s, temperature=1.0) for s in range(2)] + [state_of(0, temperature=0)]
    assert [v.tokens for v in verify(logits, [NOTHING] * 3, states)] == [[t] for t in wanted]


def test_a_batch_is_as_each_alone():
    logits = random_logits(9, 12, 6)
    q = random_logits(3, 12, 7).softmax(-1)
    drafts = [Draft([3, 4, 5], probs=q), NOTHING, Draft([1, 2, 3], [-1, -1, 0])]
    kinds = [dict(temperature=1.0), dict(temperature=0.5), dict(temperature=0)]
    together = verify(logits, drafts, [state_of(i, **kind) for i, kind in enumerate(kinds)])
    start = 0
    for i, (draft, kind) in enumerate(zip(drafts, kinds)):
        n = len(draft) + 1
        alone = verify(logits[start : start + n], [draft], [state_of(i, **kind)])[0]
        assert alone.tokens == together[i].tokens and [r + start for r in alone.rows] == together[i].rows
        start += n


# Trees and bad rows.


def test_match_follows_the_right_branch():
    tree = Draft([5, 7, 8, 9, 6], [-1, -1, 1, 1, 3])
    said = [7, 0, 9, 0, 6, 1]  # at the root 7 (node 1), below it 9 (node 3), below that 6 (node 4), then 1
    verdict = match(tree, said)
    assert verdict.accepted == [1, 3, 4]
    assert verdict.tokens == [7, 9, 6, 1] and verdict.rows == [0, 2, 4, 5]


def test_a_row_of_nan_ends_this_request_alone():
    logits = random_logits(6, 10, 3)
    best = logits.argmax(-1).tolist()
    logits[1] = math.nan
    for kind in ({"temperature": 0}, {"temperature": 1.0, "top_k": 1}):
        states = [state_of(0, **kind), state_of(1, **kind)]
        got = verify(logits, [Draft(best[:2]), Draft(best[3:5])], states)
        assert got[0].tokens == [best[0], None] and got[1].tokens == best[3:6]
    q = torch.full((2, 10), 0.1)
    drawn = verify(logits[:3], [Draft(best[:2], probs=q)], [state_of(temperature=1.0)])[0]
    assert len(drawn.tokens) == 1 and drawn.tokens[0] is not None
    logits[0] = math.nan
    assert verify(logits[:3], [Draft(best[:2], probs=q)], [state_of(temperature=1.0)])[0].tokens == [None]


def test_drafts_know_their_shape():
    tree = Draft([5, 7, 8, 9, 6], [-1, -1, 1, 1, 3])
    assert tree.depths() == [1, 1, 2, 2, 3] and tree.path(4) == [1, 3, 4] and not tree.is_chain
    assert tree.children() == [[0, 1], [], [2, 3], [], [4], []]
    assert tree.cut(3).parents == [-1, -1, 1] and tree.cut(9) is tree
    assert Draft([1, 2]).is_chain and Draft([1, 2], [-1, 0]).is_chain and NOTHING.depths() == []
    with pytest.raises(ParamsError, match="parents"):
        Draft([1, 2], [-1, 1])
    with pytest.raises(ParamsError, match="probs"):
        Draft([1, 2], probs=torch.ones(1, 4))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(LogitsError, match="3 rows"):
        verify(torch.zeros(2, 4), [Draft([1, 2])], [state_of(temperature=0)])
    with pytest.raises(LogitsError, match="vocabulary"):
        verify(torch.zeros(2, 4), [Draft([1], probs=torch.ones(1, 5))], [state_of()])


# On paper.


def test_the_formulas():
    rng = np.random.default_rng(0)
    for a, k in [(0.3, 2), (0.8, 5), (0.95, 8)]:
        runs = (rng.random((100_000, k)) < a).cumprod(1).sum(1)  # accepted tokens of each round
        assert abs(expected_tokens(a, k) - (1 + runs.mean())) < 0.03
        estimate = acceptance_of(int(runs.sum()), int((runs < k).sum()))
        assert abs(estimate - a) < 0.01
    assert expected_tokens(1, 4) == 5 and expected_tokens(0, 4) == 1 and acceptance_of(0, 0) == 0
    for a, c in itertools.product((0.1, 0.3, 0.5, 0.8, 0.99), (0.01, 0.1, 0.3, 0.6, 1.0)):
        k = best_k(a, c)
        assert (k > 0) == (a > c)
        assert all(speedup(a, k, c) >= speedup(a, other, c) for other in range(65))
    with pytest.raises(ParamsError, match=r"a=1\.5"):
        expected_tokens(1.5, 2)
    with pytest.raises(ParamsError, match="k=-1"):
        expected_tokens(0.5, -1)
    assert acceptance([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]) == 0.5
