"""The multiple-choice tasks: scores against transformers' one choice at a time, and what the questions promise."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers

from minillm.errors import ParamsError, PromptError
from minillm.measure.choices import Question, Scores, end_of_turn, passage, score, turn
from minillm.model.hub import ASSETS, is_available
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model


@pytest.fixture(scope="module")
def text():
    return (ASSETS / "heldout.txt").read_text(encoding="utf-8")[:60_000]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def tokens(text, tokenizer):
    return tokenizer.encode(text)


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", "float32", "cpu")


def bigram(size=40, seed=0):
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * 2
    return (lambda ids: table[ids]), table.double().log_softmax(-1)


def test_scores_equal_transformers_one_choice_at_a_time(tiny, tokens, tokenizer, text):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32).eval()
    questions = passage(tokens, 6, context=20, length=(3, 9), seed=1) + turn(tokenizer, text, 6, seed=2)
    sums, means = score(tiny, questions, "none", batch=5), score(tiny, questions, batch=7)
    for q, total, mean in zip(questions, sums.scores, means.scores):
        for choice, a, b in zip(q.choices, total, mean):
            labels = torch.tensor([[-100] * len(q.context) + list(choice)])
            with torch.inference_mode():
                loss = oracle(torch.tensor([[*q.context, *choice]]), labels=labels).loss.item()  # mean of the choice
            assert b == pytest.approx(-loss, abs=2e-4)
            assert a == pytest.approx(-loss * len(choice), abs=2e-3)
    assert means.kind == "mixed"


def test_scores_of_a_table_are_sums_of_its_entries():
    model, logp = bigram()
    rng = torch.Generator().manual_seed(3)
    questions = []
    for _ in range(30):
        draw = lambda n: tuple(torch.randint(40, (n,), generator=rng).tolist())  # noqa: E731
        questions.append(Question("table", draw(1 + len(questions) % 5), tuple(draw(n) for n in (1, 4, 2, 7)), 2))
    for normalise in ("tokens", "none"):
        found = score(model, questions, normalise, batch=4)
        for q, row, chosen in zip(questions, found.scores, found.chosen.tolist()):
            expected = []
            for choice in q.choices:
                path = [q.context[-1], *choice]
                total = sum(logp[a, b].item() for a, b in pairwise(path))
                expected.append(total / len(choice) if normalise == "tokens" else total)
            assert row == pytest.approx(expected, abs=1e-4)
            assert chosen == expected.index(max(expected))
    assert len(set(score(model, questions).chosen.tolist())) > 1


def test_length_matters_without_normalisation():
    model = lambda ids: torch.zeros(*ids.shape, 10)  # noqa: E731, every token equally likely
    question = Question("even", (1,), ((2,), (3, 4, 5)), 1)
    assert score(model, [question], "none").scores[0] == pytest.approx((-math.log(10), -3 * math.log(10)))
    assert score(model, [question]).scores[0] == pytest.approx((-math.log(10), -math.log(10)))


def test_choices_of_one_token_cost_one_row():
    rows = []

    def model(ids):
        rows.append(len(ids))
        return torch.zeros(*ids.shape, 10)

    one = Question("a", (1, 2), ((3,), (4,), (5,), (6,)), 0)
    score(model, [one, replace(one, answer=2), replace(one, context=(1, 3))])
    assert sum(rows) == 2
    rows.clear()
    score(model, [replace(one, choices=((3, 1), (4, 1)))])
    assert sum(rows) == 2


def test_a_passage_question_asks_for_what_the_text_says(tokens):
    questions = passage(tokens, 40, context=25, length=(4, 9), ways=5, seed=4)
    joined = ",".join(map(str, tokens))
    for q in questions:
        assert len(q.context) == 25 and len(q.choices) == 5
        assert ",".join(map(str, q.context + q.choices[q.answer])) in joined
        wrong = [c for i, c in enumerate(q.choices) if i != q.answer]
        assert all(4 <= len(c) <= 9 and ",".join(map(str, c)) in joined for c in q.choices)
        assert all(c != q.choices[q.answer] for c in wrong)
    assert {q.answer for q in questions} == set(range(5))  # where the right one stands is drawn
    assert questions == passage(tokens, 40, 25, (4, 9), 5, seed=4) != passage(tokens, 40, 25, (4, 9), 5, seed=5)


def test_a_turn_question_ends_in_half_of_the_cases(tokenizer, text):
    end = end_of_turn(tokenizer)
    assert tokenizer.decode([end], skip_special_tokens=False) == "<|im_end|>"
    questions = turn(tokenizer, text, 40, seed=6)
    over = [q for q in questions if q.choices[q.answer] == (end,)]
    assert len(over) == 20
    for q in questions:
        assert len(set(q.choices)) == 4 and all(len(c) == 1 for c in q.choices) and (end,) in q.choices
        written = tokenizer.decode(q.context, skip_special_tokens=False)
        answer = written.split("<|im_start|>assistant\n")[1]
        assert (answer.endswith(".") and answer in text.replace("\n", " ")) or q not in over
        if q not in over:
            assert answer + tokenizer.decode(q.choices[q.answer]) in " ".join(text.split())
    assert questions == turn(tokenizer, text, 40, seed=6) != turn(tokenizer, text, 40, seed=7)


def test_tiny_knows_both_tasks_and_a_guesser_knows_neither(tiny, tokens, tokenizer, text):
    tasks = {"passage": passage(tokens, 60), "turn": turn(tokenizer, text, 60)}
    for name, questions in tasks.items():
        guess = lambda ids: torch.rand(*ids.shape, 2048, generator=torch.Generator().manual_seed(0))  # noqa: E731
        found, lost = score(tiny, questions), score(guess, questions)
        assert found.kind == name
        assert found.accuracy.low > 0.35 and found.accuracy.value > {"passage": 0.45, "turn": 0.8}[name]
        assert lost.accuracy.value < 0.45
        gain = found.gain(lost)
        assert gain.value == pytest.approx(found.accuracy.value - lost.accuracy.value) and gain.low > 0
        always = torch.full((60,), end_of_turn(tokenizer))
        ends = [q.choices.index((always[0].item(),)) == q.answer for q in questions if name == "turn"]
        assert sum(ends) in (0, 30)  # always ending, or never, is right half of the time


def test_flips_count_both_ways():
    a = Scores("x", ((0.0,),) * 4, torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 1, 0]))  # right right wrong wrong
    b = Scores("x", ((0.0,),) * 4, torch.tensor([1, 1, 1, 0]), torch.tensor([0, 1, 1, 0]))  # wrong right right right
    assert b.flips(a).value == 0.75 and a.flips(a).value == 0
    assert b.gain(a).value == 0.25 and a.accuracy.value == 0.5 and b.accuracy.value == 0.75
    fewer = Scores("x", ((0.0,),) * 3, torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1]))
    for compare in (fewer.flips, fewer.gain):
        with pytest.raises(ParamsError, match="same questions"):
            compare(a)


@pytest.mark.skipif(not is_available("smollm2-135m"), reason="smollm2-135m is not here")
def test_smollm2_has_a_turn_task_too(text):
    tokenizer = load_tokenizer("smollm2-135m")
    questions = turn(tokenizer, text, 4)
    assert tokenizer.decode([end_of_turn(tokenizer)], skip_special_tokens=False) == "<|im_end|>"
    assert all(len(q.choices) == 4 for q in questions)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda t, k: passage(t, 0), ParamsError, "count=0"),
        (lambda t, k: passage(t, 3, ways=1), ParamsError, "ways=1"),
        (lambda t, k: passage(t, 3, context=0), ParamsError, "context=0"),
        (lambda t, k: passage(t, 3, length=(5, 4)), ParamsError, "length=\\(5, 4\\)"),
        (lambda t, k: passage(t[:90], 3), PromptError, "must be at least"),
        (lambda t, k: turn(k, "Too short. ", 3), PromptError, "sentences"),
        (lambda t, k: turn(replace(k, eos_ids=()), "He said so. " * 40, 3), PromptError, "no end token"),
        (lambda t, k: Question("a", (), ((1,), (2,)), 0), PromptError, "context"),
        (lambda t, k: Question("a", (1,), ((1,), ()), 0), PromptError, "choices"),
        (lambda t, k: Question("a", (1,), ((1,), (2,)), 2), PromptError, "answer=2"),
        (lambda t, k: score(bigram()[0], []), ParamsError, "questions"),
        (lambda t, k: score(bigram()[0], [Question("a", (1,), ((1,), (2,)), 0)], "bytes"), ParamsError, "normalise"),
    ],
)
def test_bad_input_is_one_clear_error(tokens, tokenizer, call, error, match):
    with pytest.raises(error, match=match):
        call(tokens, tokenizer)
