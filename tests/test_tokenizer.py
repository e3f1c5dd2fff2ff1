"""Tokenizers against transformers on strange strings, BOS and EOS, chat templates, and text that streams."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors
from transformers import AutoTokenizer

from minillm.errors import ConfigError, PromptError, WeightsError
from minillm.model.chat import render
from minillm.model.hub import ASSETS
from minillm.model.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_folder

STRANGE = [
    "",
    " ",
    "\n\n\n \t",
    "Hello, world! It's 12345.67 o'clock",
    "naïve café e\u0301 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u200f",
    "你好，世界。こんにちは 안녕하세요",
    "😀👨‍👩‍👧‍👦🏳️‍🌈 \U0001f1e9\U0001f1ea",
    "\x00\x07\x1b[31m\ufeff\ufffd\u2028",
    "<|im_start|>user\nhi<|im_end|><|endoftext|>",
    "a" * 300,
]
# Single characters of every kind, and runs of them.
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40) | st.sampled_from(STRANGE)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return tokenizer_from_folder(ASSETS / "tiny")


@pytest.fixture(scope="module")
def oracle():
    return AutoTokenizer.from_pretrained(ASSETS / "tiny")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=TEXT)
def test_tiny_equals_transformers(tiny, oracle, text):
    ids = tiny.encode(text)
    assert ids == oracle(text)["input_ids"]
    assert tiny.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tiny.decode(ids, skip_special_tokens=False) == oracle.decode(ids) == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=TEXT)
def test_streamed_text_equals_decode_and_never_holds_half_a_character(tiny, text):
    stream, pieces = tiny.stream(skip_special_tokens=False), []
    for token in tiny.encode(text):
        pieces.append(stream.push(token))
        assert text.startswith("".join(pieces))
    assert "".join(pieces) + stream.flush() == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 300) | st.integers(0, 2047), max_size=60))
def test_streaming_broken_bytes_equals_decode(tiny, ids):
    """The first 300 ids are single bytes and specials: most such lists are no valid UTF-8."""
    stream, pieces = tiny.stream(), []
    for token in ids:
        pieces.append(stream.push(token))
        assert len(stream.context) <= stream.LIMIT and len(stream.pending) <= stream.LIMIT
    assert "".join(pieces) + stream.flush() == tiny.decode(ids)


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """The id of one raw byte in a byte-level vocabulary."""
    return next(i for i in range(tokenizer.vocab_size) if _bytes(tokenizer.token_text(i)) == bytes([byte]))


def _bytes(token: str) -> bytes | None:
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in alphabet]
    table = {chr(b): b for b in alphabet} | {chr(256 + i): b for i, b in enumerate(rest)}
    return bytes(table[c] for c in token) if token and all(c in table for c in token) else None


def test_streaming_waits_for_a_whole_character(tiny):
    bytes_of = [byte_id(tiny, b) for b in "€".encode()]
    stream = tiny.stream()
    assert [stream.push(i) for i in bytes_of] == ["", "", "€"]
    assert stream.push(bytes_of[0]) == "" and stream.flush() == "\ufffd" and stream.flush() == ""


def test_an_endless_broken_stream_costs_the_same_for_every_token(tiny):
    continuation = byte_id(tiny, 0x80)
    stream = tiny.stream()
    given_out = "".join(stream.push(continuation) for _ in range(2000))
    assert len(stream.pending) <= stream.LIMIT
    assert given_out + stream.flush() == "\ufffd" * 2000


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A Llama-2-style tokenizer: a space is part of the word after it, unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁Hello", "▁world", "o", "k", "!"]
    backend = Backend(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True, eos_ids=(2,))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=TEXT)
def test_streaming_with_spaces_and_byte_fallback(sentencepiece, text):
    ids = sentencepiece.encode(text)
    stream = sentencepiece.stream()
    assert "".join(stream.push(i) for i in ids) + stream.flush() == sentencepiece.decode(ids)


def test_spaces_between_streamed_words(sentencepiece):
    hello, world = (sentencepiece.token_id(p) for p in ("▁Hello", "▁world"))
    stream = sentencepiece.stream()
    pieces = [stream.push(i) for i in (1, hello, world, 2, 2, 2, hello)]
    assert pieces == ["", "Hello", " world", "", "", "", " Hello"]


def test_begin_of_text_once(sentencepiece):
    assert sentencepiece.encode("ok")[:1] == [1] and sentencepiece.encode("")[:1] == [1]
    assert sentencepiece.encode("<s>ok")[:2].count(1) == 1
    assert 1 not in sentencepiece.encode("ok", add_special_tokens=False)
    with_bos = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = Tokenizer(sentencepiece.backend, sentencepiece.special, add_bos=True, chat_template=with_bos)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "ok"}])
    assert tokenizer.encode(prompt).count(1) == 1 == tokenizer.encode(prompt, add_special_tokens=False).count(1)


@pytest.mark.parametrize(
    ("in_file", "setting", "added"),
    [(True, None, True), (False, None, False), (False, True, True), (True, False, False)],
)
def test_begin_of_text_where_the_files_say_so(tmp_path, in_file, setting, added):
    backend = Backend.from_file(str(ASSETS / "tiny" / "tokenizer.json"))
    if in_file:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    backend.save(str(tmp_path / "tokenizer.json"))
    bos = "<|endoftext|>" if setting is None else {"content": "<|endoftext|>"}
    config = {"bos_token": bos, "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {} if setting is None else {"add_bos_token": setting}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = tokenizer_from_folder(tmp_path).encode("Hello")
    assert (ids[0] == 0) is added and ids.count(0) == added
    if setting is None:
        assert ids == AutoTokenizer.from_pretrained(tmp_path)("Hello")["input_ids"]


def test_every_end_of_text_id_is_known(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((ASSETS / "tiny" / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "vocab_size": 2100}')
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.eos_ids == (2, 5, 0)  # generation_config, config, the tokenizer's own
    assert tokenizer.vocab_size == 2100 and tokenizer.decode([2099]) == ""


@pytest.mark.parametrize("bad", [-1, 2048, 10**12, 1.0, "3", None, True])
def test_ids_outside_the_vocabulary(tiny, bad):
    with pytest.raises(PromptError, match=r"token_ids\[1\]=.*\[0, 2048\)"):
        tiny.decode([3, bad])
    with pytest.raises(PromptError):
        tiny.stream().push(bad)
    assert tiny.decode(np.array([300, 301])) == tiny.decode([300, 301])


@pytest.mark.parametrize("bad", [None, b"bytes", ["a"], "lone \ud800 surrogate"])
def test_texts_that_are_none(tiny, bad):
    with pytest.raises(PromptError):
        tiny.encode(bad)


MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "你好 {{ 7 * 7 }} {% raw %}"},
    {"role": "assistant", "content": "Hi!\n"},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "whitespace": "{%- for m in messages %}\n    {%- if m['role'] == 'user' %}\n[INST] {{ m['content'] | trim }}\n"
    "    {% endif %}\n{%- endfor %}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ tools is none }} {{ eos_token }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "date": "{{ strftime_now('%d %b %Y') }} {% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}",
    "thinking": "{% if enable_thinking is defined and enable_thinking is false %}no{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(tiny, oracle, name, prompt):
    ours = Tokenizer(tiny.backend, tiny.special, chat_template=TEMPLATES[name])
    theirs = oracle.apply_chat_template(
        MESSAGES,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=prompt,
        enable_thinking=False,
    )
    assert ours.apply_chat_template(MESSAGES, add_generation_prompt=prompt, enable_thinking=False) == theirs


def test_the_packaged_template(tiny, oracle):
    theirs = oracle.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tiny.apply_chat_template(MESSAGES) == theirs


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__class__.__base__.__subclasses__() }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ range(999999999) | list }}",
        "{{ nothing.at.all }}",
        "{% for %}",
        "{{ 1 / 0 }}",
    ],
)
def test_hostile_and_broken_templates_are_one_error(template):
    with pytest.raises(PromptError, match="chat template"):
        render(template, MESSAGES)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], [{"role": "user"}], None])
def test_messages_that_are_none(tiny, messages):
    with pytest.raises(PromptError, match="messages"):
        tiny.apply_chat_template(messages)


def test_a_model_without_a_template_says_so(tiny):
    with pytest.raises(PromptError, match="no chat template"):
        Tokenizer(tiny.backend).apply_chat_template(MESSAGES)


def test_template_files(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((ASSETS / "tiny" / "tokenizer.json").read_bytes())
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert tokenizer_from_folder(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert tokenizer_from_folder(tmp_path).chat_template == "from the file"


def test_broken_tokenizer_files(tmp_path):
    with pytest.raises(WeightsError, match=r"no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        tokenizer_from_folder(tmp_path)


def test_shapes_borrow_a_tokenizer():
    tokenizer = load_tokenizer("shape:llama-3.1-8b")
    assert tokenizer.vocab_size == 128256 and tokenizer.eos_ids == () and tokenizer.decode([100_000]) == ""
