"""A tokenizer from GGUF metadata: vocabulary, merges and the name of the splitting rule.

Chapter 00. GGUF stores byte-level BPE as lists of tokens and merges, and names the regular expression that splits
text before merging (`tokenizer.ggml.pre`). The expressions are those the models were trained with.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from minillm.errors import UnsupportedArchitectureError, WeightsError
from minillm.model.gguf import eos_ids
from minillm.model.gguf_header import read_header
from minillm.model.tokenizer import Tokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return gpt2
    if name == "smollm":  # GPT-2's rule, digits one by one
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return _split(LLAMA3)
    if name == "qwen2":
        return _split(QWEN2)
    raise UnsupportedArchitectureError(
        f"GGUF pre-tokenizer {name!r} is not supported; supported: default, gpt-2, smollm, llama-bpe, qwen2"
    )


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    metadata, _ = read_header(path)

    def get(key: str, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    if get("model") != "gpt2":
        raise UnsupportedArchitectureError(
            f"GGUF tokenizer {get('model')!r} is not supported; supported: gpt2 (byte-level BPE)"
        )
    tokens, merges, pre = get("tokens"), get("merges"), get("pre", "default")
    if not _strings(tokens) or not _strings(merges) or not all(" " in merge for merge in merges):
        raise WeightsError(f"{path.name}: the tokenizer's tokens or merges are missing or malformed")
    types = get("token_type") or [1] * len(tokens)
    try:
        bpe = BPE(
            {token: i for i, token in enumerate(tokens)},
            [tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3"),
        )
    except Exception as error:  # the library raises plain Exception, for example on a merge of unknown tokens
        raise WeightsError(f"{path.name}: the tokenizer's vocabulary and merges do not fit: {error}") from error
    backend = Backend(bpe)
    backend.pre_tokenizer, backend.decoder = pre_tokenizer(pre), decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    marked = list(zip(tokens, types))
    backend.add_special_tokens([AddedToken(t, special=True) for t, kind in marked if kind == CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in marked if kind == USER_DEFINED])
    ids = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    special = {}
    for name, key in ids.items():
        if isinstance(get(key), int) and 0 <= get(key) < len(tokens):
            special[f"{name}_token"] = tokens[get(key)]
    return Tokenizer(
        backend,
        special,
        add_bos=bool(get("add_bos_token", pre in ("llama-bpe", "llama3", "llama-v3"))),
        eos_ids=tuple(eos_ids(metadata)),
        chat_template=metadata.get("tokenizer.chat_template"),
        vocab_size=len(tokens),
    )


def _strings(values) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(isinstance(v, str) for v in values)
