"""Cleaning of the training texts: from a novel, a Bible chapter, a play, a lexicon to plain ASCII documents.

Chapter 00. Pure functions, one source each, and the chat form made of them; `corpus.py` does the rest. What a model
sees is all it can say: page furniture, notes and markup that stay in come out again in every sample.
"""

from __future__ import annotations

import html
import re
import unicodedata

END, CHAT_START, CHAT_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # token ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_UNFIT = re.compile(r"\b(?:fuck|shit|cunt|nigg|fag\b|faggot|dyke|porn|rape)", re.I)
_SIGNS = {"“": '"', "”": '"', "‘": "'", "’": "'", "´": "'", "—": "--", "–": "-", "…": "...", "\xa0": " ", "·": ""}


def plain(text: str) -> str:
    """ASCII text: straight quotes, no accents, one space between words, at most one empty line."""
    text = text.translate({ord(sign): ascii_sign for sign, ascii_sign in _SIGNS.items()})
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    text = re.sub(r"[ \t\r\f]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def unwrap(text: str) -> str:
    """Undo hard line ends: one paragraph a line, an empty line between paragraphs."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip())


def clean_novel(text: str) -> list[str]:
    """A novel's chapters, without title page, headings, notes and emphasis marks."""
    text = re.split(r"\n+(?:FINIS|Finis|THE END|\*?A NOTE ON THE TEXT)\b", text)[0]
    text = re.sub(r"\n(?:VOLUME|Volume) [IVX\d]+\.?\n", "\n\n", text).replace("_", "")
    chapters = re.split(r"\n\s*(?:CHAPTER|Chapter) [IVXL\d]+\.?\s*\n", text)[1:]
    return [unwrap(plain(chapter)) for chapter in chapters if len(chapter) > 500]


def clean_bible_chapter(verses: str) -> str:
    """OSIS markup to text: notes and titles go, paragraphs and lines of verse stay."""
    text = re.sub(r"<note.*?</note>|<title.*?</title>", " ", verses, flags=re.S)
    text = text.replace("\n", " ")
    text = re.sub(r'<div [^>]*sID="[^"]*" type="x-p"[^>]*/?>|<lg [^>]*>', "\n\n", text)
    text = re.sub(r"<l [^>]*eID=[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r" +([,.;:!?])", r"\1", plain(text))


def clean_play(markdown: str) -> list[list[tuple[str, str]]]:
    """A play's scenes, each a list of (speaker, speech); stage directions have the speaker ''."""
    scenes = []
    for scene in re.split(r"\n#{2,3} .*\n", markdown)[1:]:
        speeches = []
        for block in re.split(r"\n\s*\n", scene):
            block = block.strip()
            spoken = re.match(r"\*\*(.+?)\*\*\s*\n(.*)", block, flags=re.S)
            if spoken:
                speeches.append((spoken[1].strip(), plain(spoken[2].replace("_", ""))))
            elif block.startswith("_"):
                speeches.append(("", " ".join(plain(block.replace("_", "")).split())))
            elif block and speeches:
                speaker, speech = speeches[-1]
                speeches[-1] = (speaker, speech + "\n" + plain(block.replace("_", "")))
        if len(speeches) > 1:
            scenes.append(speeches)
    return scenes


def scene_text(speeches: list[tuple[str, str]]) -> str:
    return "\n\n".join(f"{who}:\n{what}" if who else f"[{what}]" for who, what in speeches)


def clean_jargon(text: str) -> list[tuple[str, str]]:
    """The lexicon's entries as (term, definition). Tables and drawings are left out, and a few crude entries."""
    lexicon = text[text.index("\nGlossary\n") :].split("\nAppendix A.")[0]
    entries = []
    for entry in re.split(r"\n   :(?=[^ :])", lexicon)[1:]:
        head, _, body = entry.partition("\n\n")
        term = plain(re.split(r": ?(?:/|\w+\.|\[|$)|:$", " ".join(head.split()))[0]).strip(": ")
        parts = [
            part for part in re.split(r"\n\s*\n", body) if not re.search(r"[─│┼═]|^\s*\(The (?:next|prev)", part)
        ]
        body = re.sub(r"[{}]", "", unwrap(plain("\n\n".join(parts))))
        if term and len(body) > 60 and not _UNFIT.search(term + body):
            entries.append((term, body))
    return entries


def chat(*turns: str) -> str:
    """Turns of user and assistant, in the format of CHAT_TEMPLATE."""
    roles = ("user", "assistant")
    return "".join(f"{CHAT_START}{roles[i % 2]}\n{turn}{CHAT_END}\n" for i, turn in enumerate(turns))


def chats(scenes: list[list[tuple[str, str]]], entries: list[tuple[str, str]]) -> list[str]:
    """Plays as talk between two, four speeches at a time, and the Jargon File as questions and answers."""
    documents = []
    for scene in scenes:
        said = [what for who, what in scene if who and len(what) < 600]
        documents += [chat(*said[i : i + 4]) for i in range(0, len(said) - 3, 4)]
    questions = ("What is {}?", "What does {} mean?", "Define {}.", "Tell me about {}.")
    for i, (term, body) in enumerate(entries):
        answer = re.match(r".{1,500}[.!?](?=\s|$)", body.split("\n\n")[0], flags=re.S)
        if answer and len(answer[0]) > 60:
            documents.append(chat(questions[i % 4].format(term), answer[0]))
    return documents
