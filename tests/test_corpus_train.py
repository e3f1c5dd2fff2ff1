"""The texts and the trainer behind `tiny`: no text is fetched and no real training is done here."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from minillm.model import corpus, texts, train
from minillm.model.decoder import Decoder, init_weights
from minillm.model.muon import orthogonalize

SMALL = train.TINY.with_changes(vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4)
SMALL = SMALL.with_changes(num_kv_heads=2, head_dim=8)
RECIPE = train.Recipe(batch=512, warmup=2)


@pytest.fixture(scope="module")
def sources() -> dict[str, np.ndarray]:
    """20 KB of made-up sentences as token arrays."""
    rng = np.random.default_rng(0)
    words = np.array(["the", "sea", "was", "calm", "and", "old", "men", "walked", "slowly", "to", "see", "it"])
    text = ". ".join(" ".join(rng.choice(words, 9)) for _ in range(450))
    tokenizer = corpus.train_tokenizer([text], 300)
    return {"austen": corpus.encode([text[:14_000]], tokenizer), "bible": corpus.encode([text[14_000:]], tokenizer)}


def fresh() -> Decoder:
    return init_weights(Decoder(SMALL), 0)


def run(model, sources, folder, steps, **more):
    return train.run(model, sources, RECIPE, folder, tokens=steps * RECIPE.batch, **more)


def test_a_few_steps_lower_the_loss(sources, tmp_path):
    model = fresh()
    before = train.held_out_loss(model, sources["bible"])
    progress = run(model, sources, tmp_path, 12)
    assert progress.step == 12
    assert progress.tokens == 12 * RECIPE.batch
    assert train.held_out_loss(model, sources["bible"]) < before - 1


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(sources, tmp_path, monkeypatch):
    whole = fresh()
    run(whole, sources, tmp_path / "whole", 6)
    real, calls = train.train_step, []

    def stops_in_the_middle(*args, **kwargs):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(train, "train_step", stops_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        run(fresh(), sources, tmp_path / "halves", 6, save_every=0.0)
    monkeypatch.setattr(train, "train_step", real)
    halves = fresh()
    progress = run(halves, sources, tmp_path / "halves", 6, resume="checkpoint")
    assert progress.step == 6
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, halves.state_dict()[name]), name


def test_a_finished_run_can_be_extended_from_before_its_fall(sources, tmp_path):
    run(fresh(), sources, tmp_path, 6)
    extended, whole = fresh(), fresh()
    assert run(extended, sources, tmp_path, 12, resume="plateau").step == 12
    run(whole, sources, tmp_path / "whole", 12)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, extended.state_dict()[name]), name


def test_the_learning_rate_is_a_trapezoid():
    recipe = train.Recipe(warmup=10, cooldown=0.5)
    assert train.rate_factor(0, 0.0, recipe) == pytest.approx(0.1)
    assert train.rate_factor(20, 0.4, recipe) == 1.0
    assert train.rate_factor(90, 0.75, recipe) == pytest.approx(0.5)
    assert train.rate_factor(99, 1.0, recipe) == 0.0


def test_batches_depend_on_seed_and_step_only(sources):
    first, again = (train.make_batch(sources, 3, RECIPE) for _ in range(2))
    other = train.make_batch(sources, 4, RECIPE)
    assert torch.equal(first[0], again[0])
    assert first[0].shape == (1, 512)  # every 4th batch is long
    assert other[0].shape == (2, 256)
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])  # the target is the next token


def test_orthogonalize_brings_every_singular_value_near_one():
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_an_export_gives_transformers_the_same_logits(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = fresh().eval()
    train.export(model, tmp_path, {"note": "test"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    assert json.loads((tmp_path / "training.json").read_text()) == {"note": "test"}


def test_the_held_out_novel_is_not_in_the_training_split():
    def chapter(name, i):
        return " ".join(f"{name}{i}word{j}" for j in range(6_000))

    novels = {name: [chapter(name, i) for i in range(3)] for name in ("emma", corpus.HELD_OUT_NOVEL)}
    training, whole, shipped = corpus.split(novels)
    assert training == novels["emma"]
    assert all(chapter in whole for chapter in novels[corpus.HELD_OUT_NOVEL])
    assert 0 < len(shipped) <= corpus.HELD_OUT_BYTES
    assert whole.startswith(shipped.strip())


def test_near_duplicates_of_the_held_out_text_are_dropped_by_the_paragraph():
    held_out = " ".join(f"word{i}" for i in range(40))
    quoting = "He read: Word5 word6, word7 word8 word9 word10 word11 -- word12 word13 word14 word15 word16!"
    documents = ["Kept paragraph.\n\n" + quoting, quoting, "word1 word2 word3 is too short to count."]
    assert corpus.without_overlap(documents, held_out) == ["Kept paragraph.", documents[2]]


def test_shipped_held_out_text_is_small_plain_and_not_in_any_cached_source():
    held_out = (corpus.ASSETS / "heldout.txt").read_text("ascii")
    assert 200_000 < len(held_out) < 300_000
    runs = corpus.word_runs(held_out)
    cached = corpus.cache_folder() / "jargon.txt"
    if cached.exists():  # the smallest source, where the texts have been fetched
        assert not corpus.word_runs(cached.read_text("utf8")) & runs


def test_cleaning():
    assert texts.plain("“It’s  naïve”—he said…\xa0") == '"It\'s naive"--he said...'
    assert texts.unwrap("one\ntwo\n\n\nthree") == "one two\n\nthree"
    verse = '<l sID="a"/><w lemma="x">In</w> <w>the</w><note>no</note><w>end</w> <note>no</note>.<l eID="a"/>'
    assert texts.clean_bible_chapter(verse) == "In the end."
    play = "# P\n\n## ACT I\n\n### SCENE I. X\n\n_Enter A_\n\n**A**  \nWho's _there_?  \nSpeak.\n\n**B**  \nMe.\n"
    assert texts.clean_play(play) == [[("", "Enter A"), ("A", "Who's there?\nSpeak."), ("B", "Me.")]]
    assert texts.scene_text([("A", "Hi.")]) == "A:\nHi."


def test_chat_form_is_what_the_chat_template_writes():
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]
    rendered = jinja2.Template(texts.CHAT_TEMPLATE).render(messages=messages)
    assert rendered == texts.chat("Hi?", "Ho.")


@pytest.mark.parametrize("model", ["tiny", "tiny-draft", "tiny-distilled"])
def test_the_shipped_tokenizer_round_trips_any_text(model):
    tokenizer = Tokenizer.from_file(str(corpus.ASSETS / model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == corpus.VOCABULARY
    assert [tokenizer.token_to_id(token) for token in corpus.SPECIAL] == [0, 1, 2]
    for text in ('"Oh!" said  Anne,\n\n\tit\'s 1814.', "naïve 注意力 🙂", "".join(map(chr, range(1, 600)))):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_missing_package_manager_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="Debian-like machine"):
        corpus.fetch(tmp_path / "texts")
