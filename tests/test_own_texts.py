"""Texts that a target writes itself: its own tokens with its own features, resumable, refused where they do not fit;
heads over a part of the vocabulary; students that learn from both; and heads that are loaded from a folder."""

import json
import shutil

import pytest
import torch
from test_medusa_eagle import answers, context, greedy, random_eagle
from test_tree import make_model

from minillm import LLM
from minillm.errors import ParamsError, WeightsError
from minillm.model.decoder import Decoder, init_weights
from minillm.model.export import export
from minillm.model.hub import ASSETS, resolve
from minillm.model.layout import pack_linears
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model
from minillm.quant.named import quantize_by_name
from minillm.speculative import lessons, train
from minillm.speculative.eagle import EagleHead
from minillm.speculative.frequent import DraftHead
from minillm.speculative.heads import heads_path, read_facts, save_heads
from minillm.speculative.medusa import Medusa, MedusaHeads
from minillm.speculative.options import SpeculativeOptions
from minillm.speculative.own_texts import OwnTexts, Plan, Turns, turns_of, write, write_part

TURNS = Turns(opening=(1, 2, 3), to_answer=(4, 5), to_question=(6, 7, 8))
PLAN = Plan(rows=4, length=48, answer=9)
SHORT = train.Recipe(batch=96, warmup=1, cooldown=0.5, muon_rate=0.01)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    return write(model, "little", tmp_path_factory.mktemp("own"), 4 * PLAN.rows * PLAN.length, PLAN, TURNS)


def passage(rng, count):
    return rng.integers(10, 30, count).tolist()


# Writing.


def test_turns_are_what_the_template_writes_around_what_is_said():
    tokenizer = load_tokenizer("tiny")
    turns = turns_of(tokenizer)
    said = [tokenizer.encode(text, add_special_tokens=False) for text in ("How are you?", "Well, sir.", "Good.")]
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": tokenizer.decode(ids)} for r, ids in zip(roles, said)]
    text = tokenizer.apply_chat_template(messages)
    joined = [*turns.opening, *said[0], *turns.to_answer, *said[1], *turns.to_question, *said[2], *turns.to_answer]
    assert tokenizer.decode(joined, skip_special_tokens=False) == text
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert turns_of(tokenizer) is None  # it writes nothing between turns, so nobody could tell where one ends
    tokenizer.chat_template = None
    assert turns_of(tokenizer) is None


@pytest.mark.parametrize("turns", [TURNS, None], ids=["chat", "passages"])
def test_what_is_written_is_what_the_target_says_there_and_how_it_felt(model, turns):
    part = write_part(model, PLAN, 0, turns, passage)
    tokens, answer = part["tokens"].long(), part["answer"]
    with torch.no_grad():
        hidden = model.hidden(tokens)
        choice = model.logits(hidden).argmax(-1)
    assert torch.allclose(part["features"].double(), hidden, rtol=2e-3, atol=1e-3)
    assert answer.any() and not answer.all()
    for row in range(0, PLAN.rows, 2):  # temperatures 0, 0.7, 0, 0.7
        places = answer[row].nonzero().flatten()
        assert torch.equal(tokens[row, places], choice[row, places - 1])
    drawn = answer[1].nonzero().flatten()
    assert not torch.equal(tokens[1, drawn], choice[1, drawn - 1])


def test_a_chat_keeps_to_its_turns(model):
    """Every row: opening, then questions and answers in turn, each of at most `answer` tokens."""
    part = write_part(model, PLAN, 3, TURNS)
    for row, answer in zip(part["tokens"].tolist(), part["answer"].tolist()):
        assert row[:3] == [1, 2, 3]
        at, question = 3, True
        while at < PLAN.length:
            behind = TURNS.to_answer if question else TURNS.to_question
            end = next((i for i in range(at, PLAN.length) if row[i] == behind[0]), PLAN.length)
            assert end - at < PLAN.answer + 1
            assert all(mine != question for mine in answer[at:end])
            closing = row[end : end + len(behind)]
            assert tuple(closing) == behind[: len(closing)]
            assert not any(answer[end + 1 : end + len(behind)])
            at, question = end + len(behind), not question


def test_an_end_of_text_begins_another_passage(model):
    plain = write_part(model, PLAN, 0, None, passage)
    row = plain["tokens"][0].tolist()
    end = row[PLAN.passage + 3]  # what the target says early in the first row ends a text now
    again = write_part(model, PLAN, 0, None, passage, ends=(end,))["tokens"][0].tolist()
    at = again.index(end, PLAN.passage)
    assert again[: at + 1] == row[: at + 1]
    assert all(10 <= token < 30 for token in again[at + 1 : at + 1 + PLAN.passage])


def test_a_part_depends_on_seed_and_number_alone(model):
    def texts(plan, part):
        return write_part(model, plan, part, TURNS)["tokens"]

    assert torch.equal(texts(PLAN, 1), texts(PLAN, 1))
    assert not torch.equal(texts(PLAN, 1), texts(PLAN, 2))
    other = Plan(rows=4, length=48, answer=9, seed=1)
    assert not torch.equal(texts(PLAN, 1), texts(other, 1))


def test_writing_goes_on_where_it_stopped(model, written, tmp_path):
    size = PLAN.rows * PLAN.length
    write(model, "little", tmp_path, 2 * size, PLAN, TURNS)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("part-*")}
    own = write(model, "little", tmp_path, 3 * size + 1, PLAN, TURNS)
    assert own.tokens == 4 * size and all(path.stat().st_mtime_ns == at for path, at in before.items())
    for step in range(3):
        for one, other in zip(own.batch(step, 96), written.batch(step, 96)):
            assert torch.equal(one, other)


def test_texts_of_another_run_or_model_are_refused(model, written, tmp_path):
    with pytest.raises(ParamsError, match="another run: plan"):
        write(model, "little", written.folder, 1, Plan(rows=4, length=48, answer=9, seed=7), TURNS)
    with pytest.raises(ParamsError, match="another run: target"):
        write(model, "large", written.folder, 1, PLAN, TURNS)
    with pytest.raises(WeightsError, match="'little', whose vocab_size is 61; this target's is 67"):
        written.check_fits(make_model(vocab_size=67))
    with pytest.raises(ParamsError, match="texts="):
        OwnTexts(tmp_path)
    (tmp_path / "about.json").write_text(json.dumps(written.about))
    with pytest.raises(ParamsError, match="at least 2"):
        OwnTexts(tmp_path).check_fits(model)
    with pytest.raises(ParamsError, match="length=97"):
        write_part(model, Plan(length=97), 0, TURNS)
    with pytest.raises(ParamsError, match="passage=None"):
        write_part(model, PLAN, 0, None)
    for bad in ({"rows": 0}, {"length": 1}, {"answer": 0}, {"passage": True}, {"temperatures": ()}):
        with pytest.raises(ParamsError, match=next(iter(bad))):
            Plan(**bad)


def test_batches_leave_out_the_first_part_and_tokens_keep_their_features(model, written):
    held = written.held_out()
    assert held["tokens"].shape == (4, 48) and held["features"].dtype == torch.float32
    seen = set()
    for step in range(12):
        tokens, features = written.batch(step, 96, seed=5)
        assert tokens.shape == (2, 48)
        seen |= {tuple(row) for row in tokens.tolist()}
        with torch.no_grad():
            assert torch.allclose(features.double(), model.hidden(tokens), rtol=2e-3, atol=1e-3)
    assert not seen & {tuple(row) for row in held["tokens"].tolist()}
    assert len(seen) > 8


def test_frequent_tokens_are_counted_where_they_stand_and_where_they_could(written):
    target, size = make_model().float(), PLAN.rows * PLAN.length
    counts = torch.zeros(61, dtype=torch.float64)
    for part in written.parts[1:]:
        for place, token in enumerate(part.get_tensor("tokens").flatten().tolist()):
            counts[token] += 1
            if place % (3 * size // 100) == 0:
                h = part.get_tensor("features").flatten(0, 1)[place].float()
                counts += target.logits(h).detach().softmax(-1).double()
    order = sorted(range(61), key=lambda token: -counts[token])
    for count in (1, 10, 61):
        assert written.frequent(count, target.logits, places=100).tolist() == sorted(order[:count])


# A head over a part of the vocabulary.

KEPT = torch.tensor([0, 3, 4, 9, 11, 20, 30, 31, 44, 60])


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"logit_softcap": 3.0}])
def test_a_draft_head_is_the_targets_for_the_tokens_it_keeps(changes):
    model = init_weights(Decoder(make_model(**changes).config).eval(), 1)
    hidden = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model.logits(hidden)
        assert torch.equal(DraftHead(model)(hidden), wanted)
        for packed in (False, True):
            head = DraftHead(model, KEPT, packed)
            assert torch.allclose(head(hidden), wanted[:, KEPT], atol=1e-6)
            assert torch.equal(head.ids(torch.tensor([[0, 9], [2, 1]])), torch.tensor([[0, 60], [4, 3]]))


def test_it_reads_a_packed_or_quantised_head():
    hidden = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    kept = torch.arange(0, 2048, 17)
    for change, error in ((pack_linears, 1e-4), (lambda m: quantize_by_name(m, "int8"), 3e-2)):  # sums in bfloat16
        changed = change(load_model("tiny", dtype="float32", device="cpu"))
        with torch.no_grad():
            wanted = changed.logits(hidden)[:, kept]
            assert torch.allclose(DraftHead(changed, kept)(hidden), wanted, atol=error, rtol=error)


def test_ids_that_the_target_does_not_know_are_refused(model):
    with pytest.raises(WeightsError, match="token id 61; the target knows 61"):
        DraftHead(model, torch.tensor([3, 61]))


def test_heads_draft_what_they_keep_and_greedy_says_the_same(model):
    """The guesses are the best of those kept, in the whole head's order."""
    accuracy, hidden = [[0.5, 0.2, 0.1]] * 2, torch.randn(4, 24, dtype=torch.float64)
    heads = MedusaHeads(24, 2, len(KEPT)).double()
    heads.vocabulary.copy_(KEPT)
    medusa = Medusa(model, heads, accuracy, nodes=6)
    medusa.observe("a", 0, hidden)
    (draft,) = medusa.propose([context("a", [1, 2, 3, 4, 5])])
    order = [int(t) for t in model.logits(hidden[-1]).argsort(descending=True) if int(t) in KEPT.tolist()]
    assert draft.tokens[0] == order[0] and set(draft.tokens) == set(order[:3])  # new heads say what the target says

    eagle = random_eagle(model, width=3, nodes=9)
    eagle.head.vocabulary = KEPT.clone()
    eagle = type(eagle)(model, eagle.head, width=3, nodes=9)
    prompts = [[1, 2, 3, 4, 5], [7, 9, 11]]
    plain, _ = answers(model, prompts, greedy(24))
    for proposer in (medusa, eagle):
        drafted, propose = [], proposer.propose

        def watched(contexts, drafted=drafted, propose=propose):
            found = propose(contexts)
            drafted += [token for draft in found for token in draft.tokens]
            return found

        proposer.propose = watched
        said, _ = answers(model, prompts, greedy(24), proposer)
        assert said == plain and drafted and set(drafted) <= set(KEPT.tolist())


# Learning.


def test_accuracy_from_known_features_counts_what_is_asked_for(model, written):
    held = written.held_out()
    tokens, counted, features = held["tokens"], held["answer"], held["features"].double()
    heads = train.make_student("medusa", model, vocabulary=KEPT).double()
    found = lessons.guessed_right("medusa", model, heads, tokens, features=features, counted=counted)
    with torch.no_grad():
        choice = model.logits(features).argmax(-1)
        said = model.logits(heads(features))[..., KEPT].topk(2).indices  # [rows, time, heads, 2]
    for depth in range(1, 5):
        places = [(r, i) for r in range(4) for i in range(44) if counted[r, i + depth + 1 : i + depth + 2].any()]
        for rank in range(2):
            right = sum(int(KEPT[said[r, i, depth - 1, rank]]) == int(choice[r, i + depth]) for r, i in places)
            assert found[depth - 1][rank] == pytest.approx(right / len(places), abs=1e-4)
    assert lessons.guessed_right("medusa", model, heads, tokens, features=features) != found


@pytest.mark.parametrize("vocabulary", [None, KEPT], ids=["all", "kept"])
@pytest.mark.parametrize("what", ["medusa", "eagle"])
def test_students_learn_from_own_texts_and_resume(what, vocabulary, model, written, tmp_path):
    target = make_model().float()
    students = [train.make_student(what, target, vocabulary=vocabulary) for _ in range(3)]
    tokens, features = written.batch(99, 192)
    score = DraftHead(target, vocabulary)
    with torch.no_grad():
        before = lessons.LOSSES[what](target, students[0], tokens, 0, features, score)
    train.run(what, target, students[0], written, tmp_path / "whole", recipe=SHORT, tokens=96 * 8)
    with torch.no_grad():
        assert lessons.LOSSES[what](target, students[0], tokens, 0, features, score) < before
    for one, other in zip(target.parameters(), make_model().float().parameters()):
        assert torch.equal(one, other)  # the target stays as it is

    loss, calls = lessons.LOSSES[what], []

    def stops(*args):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return loss(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.LOSSES, what, stops)
        with pytest.raises(KeyboardInterrupt):
            train.run(what, target, students[1], written, tmp_path, recipe=SHORT, tokens=96 * 8, save_every=0)
    train.run(what, target, students[2], written, tmp_path, recipe=SHORT, tokens=96 * 8, resume=True)
    for one, other in zip(students[2].parameters(), students[0].parameters()):
        assert torch.equal(one, other)


def test_what_does_not_fit_a_run_is_one_error(model, written, tmp_path):
    other = make_model(vocab_size=67).float()
    with pytest.raises(WeightsError, match="vocab_size is 61"):
        train.run("medusa", other, MedusaHeads(24), written, tmp_path, tokens=5)
    target = make_model().float()
    with pytest.raises(ParamsError, match="start without it"):
        train.run("medusa", target, MedusaHeads(24), written, tmp_path, tokens=5, resume=True)
    train.run("medusa", target, MedusaHeads(24), written, tmp_path, recipe=SHORT, tokens=96)
    with pytest.raises(WeightsError, match="another student"):
        train.run("eagle", target, train.make_student("eagle", target), written, tmp_path, tokens=5, resume=True)
    with pytest.raises(ParamsError, match="2048 token ids and the target 61"):
        train.make_student("draft", target)
    with pytest.raises(ParamsError, match="what="):
        train.make_student("lookahead", target)


# The command, for a model of one's own.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A little model with tiny's tokenizer and chat template, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "little"
    config = make_model(vocab_size=2048, max_length=64, tie_embeddings=True, bos_id=0, eos_ids=(0, 2)).config
    export(init_weights(Decoder(config), 1), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("tiny") / name, folder / name)
    return folder


def command(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["train", *map(str, words)])
    train.main()


@pytest.mark.parametrize("what", ["medusa", "eagle"])
def test_the_command_writes_trains_and_leaves_heads_that_load(what, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "RECIPE", train.Recipe(batch=640, warmup=1))
    words = ("--what", what, "--model", folder, "--write", 4096, "--kept", 300, "--tokens", 1280, "--seed", 3)
    command(monkeypatch, *words, "--out", tmp_path / "out", "--export", tmp_path / "heads")
    assert "the likeliest guess is right at" in capsys.readouterr().out
    facts = json.loads((tmp_path / "out" / "little-chat" / "about.json").read_text())
    assert facts["target"] == "little" and facts["turns"] and facts["plan"]["seed"] == 3
    facts = read_facts(folder, what, tmp_path / "heads")
    assert (
        facts["kept"] == 300 and facts["written"] == 4096 and facts["texts"] == "chat" and 0 < facts["covered"] <= 1
    )
    llm = LLM(str(folder), device="cpu", speculative={"method": what, "heads": tmp_path / "heads", "adaptive": False})
    plain = LLM(str(folder), device="cpu")
    assert llm.generate("She was", greedy(16))[0].token_ids == plain.generate("She was", greedy(16))[0].token_ids
    assert llm.engine.speculator.stats.drafted


def test_what_the_command_cannot_do_it_says_in_one_line(folder, tmp_path, monkeypatch, capsys):
    for words, said in (
        (("--what", "medusa", "--model", "nobody"), "unknown model 'nobody'"),
        (("--what", "medusa", "--model", folder, "--resume", "--tokens", 5, "--write", 4096), "start without it"),
        (("--what", "medusa", "--model", folder, "--kept", 3), "kept=3"),
        (("--what", "medusa", "--model", folder, "--write", 0), "write=0"),
        (("--what", "medusa", "--model", folder, "--minutes", -1), "minutes=-1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command(monkeypatch, *words, "--out", tmp_path / "out", "--export", tmp_path)
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert said in error
    assert not list(tmp_path.glob("*.safetensors"))


# The distilled draft.


def test_the_distilled_draft_is_small_and_nearer_to_tiny_than_the_plain_one():
    """On the held-out book: the target's own choice more often, and more of its distribution (what a drawn draft is
    accepted with), at the same shape, so at the same cost."""
    size = sum(path.stat().st_size for path in resolve("tiny-distilled").iterdir())
    assert size < 1.3e6 and sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < 12e6
    target, *drafts = (load_model(n, "float32", "cpu") for n in ("tiny", "tiny-draft", "tiny-distilled"))
    assert drafts[0].config == drafts[1].config
    text = (ASSETS / "heldout.txt").read_text("utf8")[40_000:52_000]
    rows = torch.tensor(load_tokenizer("tiny").encode(text)[:3072]).view(12, 256)
    with torch.no_grad():
        p = target(rows).softmax(-1)
        q = [draft(rows).softmax(-1) for draft in drafts]
    agreed = [float((x.argmax(-1) == p.argmax(-1)).double().mean()) for x in q]
    shared = [float(torch.minimum(x, p).sum(-1).mean()) for x in q]
    assert agreed[1] > agreed[0] + 0.02 and shared[1] > shared[0] + 0.01


# Heads from a folder.


def test_heads_are_loaded_from_the_folder_where_the_trainer_left_them(tmp_path):
    target, facts = load_model("tiny", dtype="float32", device="cpu"), {"accuracy": [[0.3] * 8] * 4, "kept": 300}
    heads = train.make_student("medusa", target, vocabulary=torch.arange(100, 400))
    save_heads(heads, heads_path("tiny", "medusa", tmp_path), facts)
    save_heads(
        train.make_student("eagle", target, vocabulary=torch.arange(100, 400)),
        heads_path("tiny", "eagle", tmp_path),
        {"accuracy": [[0.3] * 8], "kept": 300},
    )
    plain = LLM("tiny", device="cpu").generate("She was", greedy(12))[0].text
    for method in ("medusa", "eagle"):
        wish = {"method": method, "heads": str(tmp_path), "adaptive": False}
        llm = LLM("tiny", device="cpu", speculative=wish)
        proposer = llm.engine.speculator.proposer
        assert proposer.score.vocabulary.tolist() == list(range(100, 400))
        assert llm.generate("She was", greedy(12))[0].text == plain


def test_a_folder_that_does_not_fit_is_one_error(tmp_path):
    with pytest.raises(ParamsError, match="speculative heads='nowhere': must be a folder"):
        SpeculativeOptions("medusa", heads="nowhere")
    with pytest.raises(ParamsError, match="goes with medusa and eagle, not with 'ngram'"):
        SpeculativeOptions("ngram", heads=str(tmp_path))
    save_heads(MedusaHeads(16), heads_path("other", "medusa", tmp_path), {"accuracy": [[0.1]] * 4})
    wish = {"method": "medusa", "heads": str(tmp_path)}
    with pytest.raises(ParamsError, match=r"in that folder: other-medusa.safetensors\); run: python -m"):
        LLM("tiny", device="cpu", speculative=wish)
    path = heads_path("tiny", "medusa", tmp_path)
    save_heads(MedusaHeads(16), path, {"accuracy": [[0.1]] * 4})
    with pytest.raises(WeightsError, match="does not fit"):
        LLM("tiny", device="cpu", speculative=wish)
    heads = MedusaHeads(192, 4, 3)
    heads.vocabulary.copy_(torch.tensor([5, 6, 5000]))
    save_heads(heads, path, {"accuracy": [[0.1]] * 4, "kept": 3})
    with pytest.raises(WeightsError, match="token id 5000; the target knows 2048"):
        LLM("tiny", device="cpu", speculative=wish)
    save_heads(MedusaHeads(192), path, {"target": "tiny"})
    with pytest.raises(WeightsError, match="guess right"):
        LLM("tiny", device="cpu", speculative=wish)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(WeightsError, match="cannot be read"):
        LLM("tiny", device="cpu", speculative=wish)


def test_an_eagle_keeps_no_more_guesses_than_it_knows(model):
    head = EagleHead(model.config, 3).double()
    eagle = type(random_eagle(model))(model, head, width=4)
    assert eagle.width == 3
