"""Logits of every decoder family against Hugging Face transformers, in float32, on small random models.

    python -m tests.logit_table

prints the table; `test_families.py` asserts the same numbers. The error is the largest difference over the largest
logit of the oracle. Each case runs four ways: one prefill, chunks, and step by step through both caches.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from minillm.cache.contiguous import ConcatCache, ContiguousCache
from minillm.model.decoder import Decoder
from minillm.model.weights import load_model

LENGTH = 48  # tokens of the prompt; longer than every window and every original context below
SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def rope(kind: str, theta: float = 10000.0, **more) -> dict:
    return {"rope_type": kind, "rope_theta": theta, **more}


LLAMA3 = rope(
    "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
CASES = {
    "llama 2": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama 3 (llama3 rope)": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama (linear rope)": LlamaConfig(**SIZES, rope_parameters=rope("linear", factor=2.0)),
    "llama (yarn)": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama (biases, wide head)": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=20),
    "smollm2": LlamaConfig(
        **{**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2}, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=7),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2 (window, yarn)": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=2,
        rope_parameters={**YARN, "truncate": False, "rope_theta": 100.0},
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma 2": Gemma2Config(
        **SIZES, head_dim=16, sliding_window=7, query_pre_attn_scalar=24, attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
    ),
    "gemma 3": Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": rope("linear", 1e6, factor=4.0),
            "sliding_attention": rope("default", 1e4),
        },
    ),
    "gpt2": GPT2Config(
        vocab_size=211, n_embd=48, n_layer=4, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
}  # fmt: skip
transformers.utils.logging.disable_progress_bar()
WAYS = ("prefill", "chunks", "steps, contiguous", "steps, concat")


def build(config: transformers.PreTrainedConfig, folder: Path, seed: int = 0) -> transformers.PreTrainedModel:
    """A random oracle, saved to the folder. Its weights are larger than at initialisation, so every part counts."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else 2.0 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    model.eval().save_pretrained(folder)
    return model


def prompt(vocab: int, batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(7))


@torch.inference_mode()
def our_logits(model: Decoder, tokens: torch.Tensor, way: str) -> torch.Tensor:
    """[batch, time, vocab], computed one of WAYS."""
    if way == "prefill":
        return model(tokens)
    cache = ConcatCache() if way == "steps, concat" else ContiguousCache(model.config, *tokens.shape)
    sizes = [1, 5, 13, tokens.shape[1] - 19] if way == "chunks" else [1] * tokens.shape[1]
    return torch.cat([model(part, cache=cache) for part in tokens.split(sizes, dim=1)], dim=1)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def errors(config: transformers.PreTrainedConfig, folder: Path) -> dict[str, float]:
    """Way -> relative error of our logits against transformers'."""
    oracle = build(config, folder)
    tokens = prompt(config.vocab_size)
    with torch.inference_mode():
        theirs = oracle(tokens, use_cache=False).logits
    model = load_model(folder, dtype="float32", device="cpu")
    return {way: relative_error(our_logits(model, tokens, way), theirs) for way in WAYS}


def main() -> None:
    print(
        f"largest logit error over largest logit, float32, {LENGTH} tokens, transformers {transformers.__version__}"
    )
    print(f"{'family':<26}" + "".join(f"{way:>19}" for way in WAYS))
    for name, config in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            row = errors(config, Path(folder))
        print(f"{name:<26}" + "".join(f"{row[way]:>19.1e}" for way in WAYS))


if __name__ == "__main__":
    main()
