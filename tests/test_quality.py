"""Perplexity, KL and agreement against transformers and float64 loops; intervals against repeated experiments."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers

from minillm.errors import ParamsError, PromptError
from minillm.measure.quality import Interval, Reference, Windows, bootstrap, difference, perplexity, token_losses
from minillm.model.hub import ASSETS, is_available
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model


@pytest.fixture(scope="module")
def tokens():
    return load_tokenizer("tiny").encode((ASSETS / "heldout.txt").read_text(encoding="utf-8")[:9000])[:1500]


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", "float32", "cpu")


@pytest.fixture(scope="module")
def oracle():
    return transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32).eval()


@torch.inference_mode()
def transformers_perplexity(oracle, tokens, window, stride):
    """The loop of transformers' own page on perplexity of fixed-length models, its loss and its labels."""
    ids, total, count, previous = torch.tensor([tokens]), 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, : -(end - previous)] = -100
        scored = (labels[:, 1:] != -100).sum().item()  # the first label of a window has nothing before it
        if scored:
            total += oracle(part, labels=labels).loss.item() * scored
            count += scored
        previous = end
        if end == ids.shape[1]:
            break
    return math.exp(total / count), count


@pytest.mark.parametrize(("window", "stride"), [(512, None), (128, None), (100, 37), (256, 128), (64, 1), (512, 500)])
def test_perplexity_equals_transformers_on_the_same_windows(tiny, oracle, tokens, window, stride):
    text = tokens[:150] if stride == 1 else tokens
    expected, count = transformers_perplexity(oracle, text, window, stride or window)
    losses = token_losses(tiny, text, window, stride)
    assert len(losses) == count
    assert perplexity(tiny, text, window, stride) == pytest.approx(expected, rel=1e-3)
    assert losses.double().mean().exp().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.skipif(not is_available("smollm2-135m"), reason="smollm2-135m is not here")
def test_perplexity_of_smollm2_is_one_cross_entropy_a_window():
    model, tokenizer = load_model("smollm2-135m", "float32", "cpu"), load_tokenizer("smollm2-135m")
    ids = torch.tensor(tokenizer.encode((ASSETS / "heldout.txt").read_text(encoding="utf-8")[:6000])[:600])
    with torch.inference_mode():
        losses = [F.cross_entropy(model(w[None])[0, :-1].double(), w[1:], reduction="sum") for w in ids.split(200)]
    assert perplexity(model, ids, 200) == pytest.approx(math.exp(sum(losses) / 597), rel=1e-4)


def test_every_token_is_scored_once_where_windows_overlap():
    for count in (2, 9, 10, 11, 100):
        for window, stride in ((2, 1), (10, 3), (10, 9), (7, 1), (10, 10)):
            spans = Windows(window, stride).spans(count)
            found = [i for _, end, first in spans for i in range(first, end)]
            lost = {i for i in range(0, count, window)} if stride == window else {0}
            assert found == [i for i in range(count) if i not in lost]
            assert all(end - start <= window and start < first for start, end, first in spans)


def test_batches_of_windows_change_nothing(tiny, tokens):
    one = token_losses(tiny, tokens[:700], 96, 50, batch=1)
    assert torch.allclose(one, token_losses(tiny, tokens[:700], 96, 50, batch=5), atol=1e-4)


def test_perplexity_of_a_guess_is_the_number_of_choices():
    assert perplexity(lambda ids: torch.zeros(*ids.shape, 37), list(range(30)), 8) == pytest.approx(37, rel=1e-6)


def test_kl_and_agreement_are_their_definitions(tokens):
    generator = torch.Generator().manual_seed(0)
    tables = torch.randn(2, 60, 60, generator=generator) * 3  # two bigram models of 60 tokens
    ids = torch.randint(60, (200,), generator=generator)
    before, after = (lambda t, table=table: table[t] for table in tables)
    damage = Reference(before, ids, 50).damage(after)
    kl, agree, loss = [], [], []
    for start in range(0, 200, 50):
        for i in range(start, start + 49):
            p, q = (table[ids[i]].double().softmax(-1) for table in tables)
            kl.append((p * (p / q).log()).sum())
            agree.append(float(p.argmax() == q.argmax()))
            loss.append(-q[ids[i + 1]].log())
    assert torch.allclose(damage.kl.double(), torch.stack(kl), atol=1e-4)
    assert damage.agree.tolist() == agree and 0 < sum(agree) < len(agree)
    assert torch.allclose(damage.loss.double(), torch.stack(loss), atol=1e-4)
    assert damage.mean_kl.value == pytest.approx(sum(kl).item() / len(kl), rel=1e-4)
    assert damage.perplexity.value == pytest.approx(perplexity(after, ids, 50), rel=1e-5)
    ratio = perplexity(after, ids, 50) / perplexity(before, ids, 50)
    assert damage.ratio.value == pytest.approx(ratio, rel=1e-4)


def test_a_model_beside_itself_is_unhurt(tiny, tokens):
    damage = Reference(tiny, tokens[:400], 200).damage(tiny)
    assert damage.ratio == Interval(1, 1, 1) and damage.agreement == Interval(1, 1, 1)
    assert damage.kl.abs().max() == 0


def test_a_banned_token_makes_kl_finite_or_infinite_never_nan():
    ids = torch.arange(10)
    banned = torch.zeros(10)
    banned[3] = -math.inf
    free, cut = (lambda t: torch.zeros(*t.shape, 10)), (lambda t: banned.expand(*t.shape, 10))
    assert Reference(cut, ids, 10).damage(free).mean_kl.value == pytest.approx(math.log(10 / 9), rel=1e-5)
    assert Reference(free, ids, 10).damage(cut).mean_kl.value == math.inf


def test_intervals_cover_the_truth_as_often_as_they_say():
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for seed in range(200):
        values = torch.randn(640, generator=generator) + 5
        interval = bootstrap(values, block=8, samples=300, seed=seed)
        hits += interval.low <= 5 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_blocks_matter_where_neighbours_are_alike():
    """Runs of 32 equal values: single draws think they know 32 times as much and miss the truth most of the time."""
    generator = torch.Generator().manual_seed(2)
    hits = {1: 0, 32: 0}
    for seed in range(100):
        values = torch.randn(60, generator=generator).repeat_interleave(32)
        for block in hits:
            interval = bootstrap(values, block=block, samples=300, seed=seed)
            hits[block] += interval.low <= 0 <= interval.high
    assert hits[1] < 50 and hits[32] > 85


def test_pairing_sees_what_two_intervals_do_not():
    generator = torch.Generator().manual_seed(3)
    hard = torch.rand(1600, generator=generator) * 8  # how hard each token is, for every model
    a, b = hard + 0.1 * torch.randn(1600, generator=generator), hard + 0.05
    apart, together = [bootstrap(x) for x in (a, b)], difference(b, a)
    assert apart[0].low < apart[1].value < apart[0].high
    assert together.low > 0.03 and together.high < 0.07
    assert difference(a, a) == Interval(0, 0, 0)


def test_the_same_seed_gives_the_same_interval():
    values = torch.rand(100)
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values, seed=1) != bootstrap(values)
    assert bootstrap(torch.tensor([3.0])) == Interval(3, 3, 3)
    assert bootstrap(torch.tensor([1.0, math.inf])).value == math.inf


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: perplexity(m, [1, 2, 3], 1), ParamsError, "window=1"),
        (lambda m: perplexity(m, [1, 2, 3], 513), ParamsError, "context, 512"),
        (lambda m: perplexity(m, [1, 2, 3], 8, 9), ParamsError, "stride=9"),
        (lambda m: perplexity(m, [1, 2, 3], 8, 0), ParamsError, "stride=0"),
        (lambda m: perplexity(m, [1, 2, 3], 8, batch=0), ParamsError, "batch=0"),
        (lambda m: perplexity(m, [1]), PromptError, "at least 2"),
        (lambda m: perplexity(m, [[1, 2], [3, 4]]), PromptError, "one row"),
        (lambda m: bootstrap(torch.ones(0)), ParamsError, "at least one"),
        (lambda m: bootstrap(torch.ones(4), level=1.0), ParamsError, "level=1.0"),
        (lambda m: bootstrap(torch.ones(4), block=0), ParamsError, "block=0"),
        (lambda m: bootstrap(torch.ones(4), samples=0), ParamsError, "samples=0"),
        (lambda m: difference(torch.ones(4), torch.ones(5)), ParamsError, "a pair a token"),
        (lambda m: Reference(m, [1, 2, 3]).damage(lambda t: torch.zeros(*t.shape, 7)), ParamsError, "vocabulary"),
    ],
)
def test_bad_input_is_one_clear_error(tiny, call, error, text):
    with pytest.raises(error, match=text):
        call(tiny)
