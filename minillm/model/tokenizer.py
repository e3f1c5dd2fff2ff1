"""Text to token ids and back, with the model's own special tokens and chat template.

Chapter 00. The `tokenizers` library does the splitting and merging (byte-pair encoding, Sennrich et al. 2016,
arXiv:1508.07909). What is added here is what serving needs: begin-of-text where the model was trained with it and
never twice, every end-of-text id, ids checked before they are used, and text that streams without half characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer as Backend

from minillm.errors import ConfigError, PromptError, WeightsError, illegal
from minillm.model.chat import render
from minillm.model.config_json import id_tuple
from minillm.model.hub import resolve
from minillm.model.shapes import known_shape


@dataclass
class Tokenizer:
    """backend: the `tokenizers` object. special: names such as bos_token -> their text, which templates read.

    vocab_size: ids the model knows, which may be more than have text. add_bos: whether `encode` starts with bos_id.
    """

    backend: Backend
    special: dict[str, str] = field(default_factory=dict)
    add_bos: bool = False
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    vocab_size: int = 0

    def __post_init__(self) -> None:
        self.vocab_size = max(self.vocab_size, self.backend.get_vocab_size(with_added_tokens=True))
        self.bos_id = self.token_id(self.special.get("bos_token"))

    def token_id(self, text: str | None) -> int | None:
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Begin-of-text comes first where the model expects it, unless the text brings it already."""
        if not isinstance(text, str):
            raise PromptError(illegal("text", text, "must be a string"))
        try:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # it is a str, so half of a surrogate pair is what the library cannot take
            raise PromptError("text is not valid Unicode: it holds half of a surrogate pair") from error
        if add_special_tokens and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def check_ids(self, ids: Iterable[int]) -> list[int]:
        checked = list(ids)
        for i, token in enumerate(checked):
            integer = hasattr(token, "__index__") and not isinstance(token, bool)  # NumPy's integers are welcome
            if not integer or not 0 <= token < self.vocab_size:
                raise PromptError(illegal(f"token_ids[{i}]", token, f"must be an integer in [0, {self.vocab_size})"))
        return [int(token) for token in checked]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no character yet come out as U+FFFD."""
        return self.backend.decode(self.check_ids(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """How one token is written in the vocabulary, for display."""
        return self.backend.id_to_token(self.check_ids([token])[0]) or ""

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping], add_generation_prompt: bool = True, **variables
    ) -> str:
        """The prompt text; encode it with add_special_tokens=False, since templates write their own."""
        if self.chat_template is None:
            raise PromptError("this model has no chat template; give it plain text")
        variables = {"tools": None, "documents": None, **self.special, **variables}
        return render(self.chat_template, messages, add_generation_prompt=add_generation_prompt, **variables)


class StreamDecoder:
    """Token ids in, text out, piece by piece: the pieces joined are `decode` of all ids.

    A token may hold part of a character, and how a token reads may depend on the one before it. So the last tokens
    that gave text (`context`) are decoded again with the new ones (`pending`), and nothing is given out while it ends
    in U+FFFD, the sign of an unfinished character. Both lists stay short: constant time a token.
    (One exception to "joined are `decode`": SentencePiece's byte fallback spoils a whole run of bytes for one broken
    byte at its end, when its start has long been given out.)
    """

    LIMIT = 12  # tokens; a character has 4 bytes, so a longer wait is not an unfinished character but broken bytes

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.context: list[int] = []
        self.pending: list[int] = []

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.backend.decode(ids, skip_special_tokens=self.skip)

    def _new_text(self, count: int) -> str:
        """What the first `count` pending tokens add to the context."""
        return self._text(self.context + self.pending[:count])[len(self._text(self.context)) :]

    def push(self, token: int) -> str:
        """The text that is certain now: often one token's, sometimes none."""
        self.pending += self.tokenizer.check_ids([token])
        text = self._new_text(len(self.pending))
        if text == "" and self._text(self.pending * 2) == "":  # a special token, or an id without text
            self.pending.clear()
            return ""
        if not text.endswith("\ufffd"):
            return self._give(len(self.pending), text)
        if len(self.pending) < self.LIMIT:
            return ""
        for count in range(len(self.pending) - 4, 0, -1):  # broken bytes: give what cannot change any more
            head = self._new_text(count)
            if head + self._text(self.pending[count:]) == text:
                return self._give(count, head)
        return self._give(len(self.pending), text)

    def _give(self, count: int, text: str) -> str:
        self.context, self.pending = self.pending[:count], self.pending[count:]
        return text

    def flush(self) -> str:
        """The rest, at the end of the stream: an unfinished character as U+FFFD."""
        return self._give(len(self.pending), self._new_text(len(self.pending))) if self.pending else ""


def load_tokenizer(name: str | Path) -> Tokenizer:
    """name: as in `load_model`. A "shape:" has no tokenizer of its own and gets tiny's, to have some text at all."""
    if str(name).startswith("shape:"):
        tokenizer = load_tokenizer("tiny")
        tokenizer.vocab_size = max(tokenizer.vocab_size, known_shape(str(name)).vocab_size)
        tokenizer.eos_ids = ()
        return tokenizer
    path = resolve(name)
    gguf_files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if gguf_files and not (path / "tokenizer.json").is_file():
        from minillm.model.gguf_tokenizer import tokenizer_from_gguf  # imports the gguf package only when needed

        return tokenizer_from_gguf(gguf_files[0])
    return tokenizer_from_folder(path)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """tokenizer.json, with what its neighbours say about special tokens, end-of-text ids and the chat template."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(f"{folder} has no tokenizer.json (a SentencePiece tokenizer.model alone is not read)")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file.name} is not a tokenizer: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    settings = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    special = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[key] = text
    config = _json(folder / "config.json")
    generation = _json(folder / "generation_config.json")
    ends = [*id_tuple(generation.get("eos_token_id")), *id_tuple(config.get("eos_token_id"))]
    if "eos_token" in special:
        ends.append(backend.token_to_id(special["eos_token"]))
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
        add_bos = bos is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos]
    return Tokenizer(
        backend,
        special,
        add_bos=bool(add_bos),
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        chat_template=_chat_template(folder, settings),
        vocab_size=config.get("vocab_size") or 0,
    )


def _chat_template(folder: Path, settings: dict) -> str | None:
    """From chat_template.jinja (new form) or tokenizer_config.json, where it may be a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template


def _json(path: Path) -> dict:
    """A JSON object, or {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path.name} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}
