"""Sampling: distributions against closed forms, masks against transformers, and no NaN for any legal value.

All random numbers are seeded, so every figure here is the same in every run.
"""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import LogitsError, MinillmError, ParamsError
from minillm.model.sampling import (
    Sampler,
    SamplingParams,
    apply_penalties,
    apply_temperature,
    draw,
    mask_min_p,
    mask_top_k,
    mask_top_p,
    probabilities,
    sample,
)
from minillm.model.sampling_steps import likeliest

DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.2, 0.1])


def start(prompt=(), output=(), seed=0, **params):
    state = Sampler(seed).start(SamplingParams(**params), prompt)
    for token in output:
        state.append(token)
    return state


def closed_form(logits, prompt=(), output=(), **params):
    """The distribution of one row, in plain Python and float64: the definition, step by step."""
    p = SamplingParams(**params)
    x = [float(v) for v in logits]
    for i in range(len(x)):
        if i in prompt or i in output:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        x[i] -= p.frequency_penalty * output.count(i) + p.presence_penalty * (i in output)
    top = max(x)
    weights = [math.exp((v - top) / p.temperature) for v in x]
    weights = [w if w >= p.min_p * max(weights) else 0.0 for w in weights]
    if p.top_k > 0:
        kth = sorted(weights, reverse=True)[min(p.top_k, len(x)) - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    total, mass, kept = sum(weights), 0.0, set()
    for i in sorted(range(len(x)), key=lambda i: -weights[i]):
        if mass < p.top_p or p.top_p == 1:
            kept.add(i)
        mass += weights[i] / total
    weights = [w if i in kept else 0.0 for i, w in enumerate(weights)]
    return [w / sum(weights) for w in weights]


def assert_drawn_from(expected, ids):
    """Chi-square goodness of fit at the 99.9th percentile (Wilson and Hilferty's approximation of it)."""
    counts = torch.bincount(torch.tensor(ids), minlength=len(expected)).tolist()
    assert all(p > 0 or c == 0 for p, c in zip(expected, counts)), "a dropped token was drawn"
    cells = [(p * len(ids), c) for p, c in zip(expected, counts) if p > 0]
    freedom = len(cells) - 1
    if freedom == 0:
        return
    statistic = sum((c - e) ** 2 / e for e, c in cells)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f}, limit {limit:.1f}"


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"temperature": 1.7, "min_p": 0.1, "top_k": 7, "top_p": 0.85},
    {"min_p": 0.35, "top_p": 0.6},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7, "presence_penalty": -0.3, "repetition_penalty": 0.8, "temperature": 0.9},
]


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("seed", [None, 7], ids=["unseeded", "seeded"])
def test_empirical_distribution(params, seed):
    history = {"prompt": [0, 6], "output": [1, 1, 1, 7, 8]}
    sampler = Sampler(3)
    state = sampler.start(SamplingParams(**params, seed=seed), history["prompt"])
    for token in history["output"]:
        state.append(token)
    result = sample(LOGITS.expand(DRAWS, -1), [state] * DRAWS)
    assert_drawn_from(closed_form(LOGITS, **history, **params), result.checked())


def test_probabilities_equal_the_closed_form_row_by_row():
    states, expected = [], []
    for params in CASES:
        states.append(start([0, 6], [1, 1, 7], **params))
        expected.append(closed_form(LOGITS, [0, 6], [1, 1, 7], **params))
    got = probabilities(LOGITS.expand(len(CASES), -1), states)
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-7)


def test_unseeded_rows_of_one_batch_follow_the_distribution_together():
    sampler = Sampler(0)
    states = [sampler.start(SamplingParams()) for _ in range(DRAWS)]
    ids = sampler.sample(LOGITS.expand(DRAWS, -1), states).checked()
    assert_drawn_from(closed_form(LOGITS), ids)


# --- seeds ---------------------------------------------------------------------------------------------------


def test_seed_decides_whatever_else_is_in_the_batch():
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * 3
    wish = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    alone = start(**wish)
    expected = [sample(logits[i : i + 1], [alone]).checked()[0] for i in range(40)]
    assert len(set(expected)) > 10

    rng = random.Random(1)
    others = [{"temperature": 0}, {"top_k": 5}, {"seed": 5}, {"seed": 9, "min_p": 0.1}, {"presence_penalty": 1}]
    mine, got = start(**wish), []
    for i in range(40):  # the neighbours, their number and our row change at every step
        rows = [start(**p) for p in rng.choices(others, k=rng.randrange(6))]
        at = rng.randrange(len(rows) + 1)
        batch = torch.randn(len(rows) + 1, 300, generator=torch.Generator().manual_seed(i))
        batch[at] = logits[i]
        got.append(sample(batch, [*rows[:at], mine, *rows[at:]]).checked()[at])
    assert got == expected


def test_row_order_does_not_matter():
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    forward = sample(logits, [start(seed=i) for i in range(8)]).checked()
    backward = sample(logits.flip(0), [start(seed=i) for i in reversed(range(8))]).checked()
    assert forward == backward[::-1]


def test_streams_differ_between_seeds_answers_and_unseeded_requests():
    sampler = Sampler(0)
    states = [sampler.start(SamplingParams(seed=1), index=i) for i in range(4)]
    states += [sampler.start(SamplingParams(seed=2)), *(sampler.start(SamplingParams()) for _ in range(4))]
    firsts = [state.stream.random() for state in states]
    assert len(set(firsts)) == len(firsts)
    again = Sampler(0)
    assert again.start(SamplingParams()).stream.random() == firsts[5]


def test_thread_count_does_not_matter():
    logits = torch.randn(16, 5000, generator=torch.Generator().manual_seed(0)) * 2
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            states = [start(seed=i, temperature=0.8, top_p=0.9, top_k=1000) for i in range(16)]
            results.append(sample(logits, states).checked())
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]


def test_sampling_does_not_touch_its_arguments():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    states = [start([1], [2], presence_penalty=1.0), start(top_p=0.5), start(temperature=0)]
    sample(logits, states)
    assert torch.equal(logits, before)
    assert [state.output_ids for state in states] == [[2], [], []]


# --- greedy --------------------------------------------------------------------------------------------------


def test_greedy_beside_sampled():
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    states = [start(temperature=0 if i % 2 else 1.0, seed=i, top_k=50) for i in range(6)]
    ids = sample(logits, states).checked()
    assert [ids[i] for i in (1, 3, 5)] == logits.argmax(-1)[1::2].tolist()
    weights = probabilities(logits, states)
    assert torch.equal(weights[1].nonzero().flatten(), logits[1].argmax()[None]) and weights[1].sum() == 1


def test_greedy_takes_the_lowest_of_equals_and_counts_penalties():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.9]])
    assert sample(logits, [start(temperature=0)]).checked() == [1]
    assert sample(logits, [start(output=[1], temperature=0, presence_penalty=1.0)]).checked() == [2]
    assert sample(logits, [start(prompt=[1, 2], temperature=0, repetition_penalty=1.3)]).checked() == [3]
    assert sample(logits, [start(temperature=9e-6)]).checked() == [1]


def test_states_follow_appended_tokens_and_look_ahead():
    state = start([0], [3], presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    probabilities(LOGITS[None], [state])  # builds the counts
    state.append(3)
    now, ahead = probabilities(LOGITS.expand(2, -1), [state, state.ahead([4, 4])])
    wish = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    torch.testing.assert_close(now, torch.tensor(closed_form(LOGITS, [0], [3, 3], **wish)))
    torch.testing.assert_close(ahead, torch.tensor(closed_form(LOGITS, [0], [3, 3, 4, 4], **wish)))
    assert state.output_ids == [3, 3]


# --- extremes ------------------------------------------------------------------------------------------------

legal = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 1e-320, 1e-5, 1e-4, 0.3, 1.0, 100.0, 1e4]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 7, 10**30]),
        "top_p": st.sampled_from([5e-324, 1e-4, 0.5, 0.999999999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-320, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([0.01, 1.0, 1.3, 100.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    }
)
extreme_logit = st.sampled_from([0.0, 1.0, -1.0, 5.5, 1e30, -1e30, 3e38, -3e38, 1e-40, -math.inf])


@given(
    st.lists(st.tuples(legal, st.lists(extreme_logit, min_size=7, max_size=7)), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_no_legal_value_gives_nan(rows, dtype):
    logits = torch.tensor([x for _, x in rows])
    if dtype == torch.float16:
        logits = logits.clamp(-65504, 65504).masked_fill(logits.isneginf(), -math.inf)
    logits = logits.to(dtype)
    states = [start([0, 1], [1, 2, 2], seed=1, **params) for params, _ in rows]
    result = sample(logits, states)
    masked = logits.isneginf()
    assert set(result.errors) == set(masked.all(-1).nonzero().flatten().tolist())
    usable = [i for i in range(len(rows)) if i not in result.errors]
    if usable:
        weights = probabilities(logits[usable], [states[i] for i in usable])
        assert weights.isfinite().all() and (weights[masked[usable]] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(usable)))
    assert all(not masked[i, result.token_ids[i]] for i in usable)


@pytest.mark.parametrize("params", [*CASES, {"temperature": 0}, {"temperature": 1e-4}, {"top_p": 1e-4}], ids=str)
def test_all_but_one_masked(params):
    logits = torch.full((1, 1000), -math.inf)
    logits[0, 637] = -5.0
    assert sample(logits, [start([637], [637], **params)]).checked() == [637]


def test_a_masked_token_stays_masked_beside_logits_at_the_edge_of_float32():
    logits = torch.tensor([[-math.inf, -3e38, -3.4e38]])
    state = start([0, 1, 2], [0, 1, 2], repetition_penalty=100.0)
    assert probabilities(logits, [state]).tolist() == [[0.0, 0.5, 0.5]]


def test_a_bad_row_harms_no_other():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    wishes = [{"temperature": 0}, {"top_p": 0.9}] * 4
    healthy = sample(logits, [start(**wish) for wish in wishes]).checked()
    broken = logits.clone()
    broken[0, 7] = broken[1, 0] = math.nan
    broken[2] = broken[3] = -math.inf
    broken[4, 1] = broken[5, 1] = math.inf
    result = sample(broken, [start(**wish, logprobs=1) for wish in wishes])
    assert result.token_ids == [None] * 6 + healthy[6:]
    assert list(result.errors) == [0, 1, 2, 3, 4, 5]
    assert [str(result.errors[i]).split(",")[0] for i in (0, 3, 4)] == [
        "row 0: a logit is NaN",
        "row 3: every token is masked (-inf)",
        "row 4: a logit is +inf",
    ]
    weights = probabilities(broken, [start(**wish) for wish in wishes])
    assert weights.isnan().any(-1).tolist() == [True] * 6 + [False] * 2
    assert result.logprobs[1] is None and result.logprobs[7].token_id == healthy[7]
    with pytest.raises(LogitsError, match="row 0"):
        result.checked()


def test_shape_mismatch_is_one_clear_error():
    with pytest.raises(LogitsError, match=r"\(3, 5\).*2 rows"):
        sample(torch.zeros(3, 5), [start(), start()])


def test_draw_reaches_both_ends_and_never_a_zero_weight():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, -1)
    uniforms = torch.tensor([0.0, 0.31, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, uniforms).tolist() == [1, 3, 3]
    tiny = torch.tensor([[1.0, 1e-30, 0.0]])  # unnormalised weights are fine too
    assert draw(tiny * 1e-20, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [0]


# --- masks against transformers ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle():
    return pytest.importorskip("transformers.generation.logits_process")


def dropped_like(expected, got):
    assert torch.equal(expected.isneginf(), got.isneginf())
    kept = ~got.isneginf()
    torch.testing.assert_close(expected[kept], got[kept])


@pytest.mark.parametrize("vocab", [10, 3000])
def test_masks_equal_transformers(oracle, vocab):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1)) * 2
    values = [0.01, 0.3, 0.5, 0.9, 0.97, 0.999]
    column = torch.tensor(values, dtype=torch.float64)
    top_p, min_p = mask_top_p(logits, column), mask_min_p(logits, column)
    short_head = mask_top_p(logits, column, head=4)
    top_k = mask_top_k(logits, torch.tensor([1, 2, 3, 5, 9, 10**6]))
    cooler = apply_temperature(logits, column.float())
    for i, value in enumerate(values):
        row = logits[i : i + 1]
        dropped_like(oracle.TopPLogitsWarper(value)(None, row)[0], top_p[i])
        dropped_like(oracle.MinPLogitsWarper(value)(None, row)[0], min_p[i])
        dropped_like(oracle.TopKLogitsWarper([1, 2, 3, 5, 9, 10**6][i])(None, row)[0], top_k[i])
        expected = oracle.TemperatureLogitsWarper(value)(None, row)[0].softmax(-1)
        torch.testing.assert_close(expected, cooler[i].softmax(-1), rtol=1e-4, atol=1e-7)
    assert torch.equal(short_head, top_p)


def test_repetition_penalty_equals_transformers(oracle):
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(2))
    history = torch.tensor([[3, 4, 4, 29], [0, 0, 0, 7]])
    for penalty in (0.7, 1.0, 1.8):
        counts = torch.zeros(2, 30).scatter_add_(1, history, torch.ones(2, 4))
        factor, off = torch.full((2,), penalty), torch.zeros(2)
        got = apply_penalties(logits, torch.zeros(2, 30, dtype=torch.bool), counts, factor, off, off)
        expected = oracle.RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone())
        torch.testing.assert_close(got, expected)


def test_ties():
    flat = torch.zeros(1, 10)
    assert mask_top_k(flat, torch.tensor([3])).isfinite().sum() == 10  # all that equal the k-th stay
    kept = mask_top_p(flat, torch.tensor([0.45], dtype=torch.float64)).isfinite()
    assert kept.nonzero()[:, 1].tolist() == [0, 1, 2, 3, 4]  # 0.4 is short of 0.45, the fifth crosses
    kept = mask_top_p(torch.zeros(1, 4), torch.tensor([0.5], dtype=torch.float64)).isfinite()
    assert kept.tolist() == [[True, True, False, False]]  # 0.5 reaches 0.5: nothing more is needed
    two = torch.tensor([[0.0, 5.0, 5.0, 0.0]])
    assert mask_top_p(two, torch.tensor([1e-4], dtype=torch.float64)).isfinite().tolist() == [
        [False, True, False, False]
    ]


# --- log-probabilities ---------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution():
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(3))
    raw = logits.log_softmax(-1)
    wishes = [
        {"logprobs": 3, "temperature": 0.1},
        {},
        {"logprobs": 0, "top_k": 2},
        {"logprobs": 500, "temperature": 0},
    ]
    result = sample(logits, [start(**wish, seed=1) for wish in wishes])
    assert result.logprobs[1] is None
    for row, top in ((0, 3), (2, 0), (3, 60)):
        entry = result.logprobs[row]
        assert entry.token_id == result.token_ids[row]
        assert entry.logprob == pytest.approx(raw[row, entry.token_id].item(), rel=1e-6)
        assert len(entry.top) == top
    best = raw[0].topk(3)
    assert [token for token, _ in result.logprobs[0].top] == best.indices.tolist()
    assert [value for _, value in result.logprobs[0].top] == pytest.approx(best.values.tolist())


# --- parameters ----------------------------------------------------------------------------------------------

ILLEGAL = [
    ("temperature", [-0.1, math.nan, math.inf, -math.inf, "1", True, None, 10**5000]),
    ("top_p", [0, 0.0, -0.5, 1.0001, math.nan, 2, "x", True]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("top_k", [-2, 1.0, math.nan, True, "5", None]),
    ("max_tokens", [0, -1, 1.5, True, None]),
    ("n", [0, -1, 2.0, 10**12]),
    ("repetition_penalty", [0, -1, math.nan, math.inf]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, math.nan]),
    ("stop", ["", ["a", ""], [1], None, {"a": 1}]),
    ("stop_token_ids", [[-1], [1.0], [True], 3, None]),
    ("ignore_eos", [1, None, "yes"]),
    ("seed", [1.5, True, "7", 2**63]),
    ("logprobs", [-1, 1.5, True]),
]


def shown(value):
    return "huge" if isinstance(value, int) and value > 2**64 else repr(value)


@pytest.mark.parametrize("name, value", [(name, value) for name, values in ILLEGAL for value in values], ids=shown)
def test_an_illegal_value_is_one_clear_error(name, value):
    with pytest.raises(ParamsError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}=") and ": must be " in message and len(message) < 200
    assert isinstance(caught.value, (MinillmError, ValueError))


def test_parameters_are_normalised_and_hashable():
    import numpy as np

    params = SamplingParams(stop="END", stop_token_ids=[3, np.int64(4)], temperature=np.float32(0.5), seed=-(2**63))
    assert params.stop == ("END",) and params.stop_token_ids == (3, 4) and params.temperature == 0.5
    assert type(params.temperature) is float and type(params.stop_token_ids[1]) is int
    assert hash(params) == hash(SamplingParams(stop=["END"], stop_token_ids=(3, 4), temperature=0.5, seed=-(2**63)))
    assert SamplingParams(temperature=9e-6).greedy and not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize("vocab", (1, 7, 255, 256, 512, 513, 767, 1000, 2048))
def test_likeliest_is_argmax_with_its_ties_and_nan(vocab):
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randint(0, 4, (60, vocab), generator=generator).float()  # full of ties
    rows[:20] = torch.randn(20, vocab, generator=generator)
    for row, odd in zip(range(20, 40), (torch.nan, torch.inf, -torch.inf) * 7):
        rows[row, torch.randint(0, vocab, (2,), generator=generator)] = odd
    rows[40] = -torch.inf
    rows[41] = torch.nan
    rows[42, -1] = 9.0
    assert torch.equal(likeliest(rows), rows.argmax(-1))
    assert torch.equal(likeliest(rows.view(3, 20, vocab)), rows.view(3, 20, vocab).argmax(-1))
    assert torch.equal(likeliest(rows.bfloat16()), rows.bfloat16().argmax(-1))
    assert torch.equal(likeliest(rows[:0]), rows[:0].argmax(-1))
