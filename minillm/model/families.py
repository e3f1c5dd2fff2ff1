"""Families as data: which `config.json` fields and tensor names make a Llama, a Qwen, a Gemma or a GPT-2.

Chapter 01. Every family is the same `Decoder` under other settings. A `Family` holds what differs: the defaults of
its `config.json`, the fields it switches on, and the names its checkpoints give to our modules. `config_json.py`
reads a `config.json` with their help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from minillm.model.config import ModelConfig

# Our module -> the checkpoint's. Several names: their rows are stacked, in this order, into our one matrix.
LLAMA_NAMES = {
    "embed": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "layers.*.attn_norm": ("model.layers.*.input_layernorm",),
    "layers.*.attn.qkv": tuple(f"model.layers.*.self_attn.{x}_proj" for x in "qkv"),
    "layers.*.attn.q_norm": ("model.layers.*.self_attn.q_norm",),
    "layers.*.attn.k_norm": ("model.layers.*.self_attn.k_norm",),
    "layers.*.attn.out": ("model.layers.*.self_attn.o_proj",),
    "layers.*.mlp_norm": ("model.layers.*.post_attention_layernorm",),
    "layers.*.mlp.gate_up": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "layers.*.mlp.down": ("model.layers.*.mlp.down_proj",),
}
GEMMA_NAMES = {
    **LLAMA_NAMES,
    "layers.*.post_attn_norm": ("model.layers.*.post_attention_layernorm",),
    "layers.*.mlp_norm": ("model.layers.*.pre_feedforward_layernorm",),
    "layers.*.post_mlp_norm": ("model.layers.*.post_feedforward_layernorm",),
}
GPT2_NAMES = {
    "embed": ("transformer.wte",),
    "position_embed": ("transformer.wpe",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "layers.*.attn_norm": ("transformer.h.*.ln_1",),
    "layers.*.attn.qkv": ("transformer.h.*.attn.c_attn",),
    "layers.*.attn.out": ("transformer.h.*.attn.c_proj",),
    "layers.*.mlp_norm": ("transformer.h.*.ln_2",),
    "layers.*.mlp.gate_up": ("transformer.h.*.mlp.c_fc",),
    "layers.*.mlp.down": ("transformer.h.*.mlp.c_proj",),
}


@dataclass(frozen=True)
class Family:
    """What sets one family apart.

    defaults: values of `config.json` fields that its files may leave out. settings: `ModelConfig` fields it fixes.
    names: our modules -> its modules. prefix: start of its tensor names, left out by some files.
    transposed: modules whose matrices are stored [in, out]. ignored: endings of tensors that are no parameters.
    """

    defaults: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    names: dict = field(default_factory=lambda: LLAMA_NAMES)
    prefix: str = "model."
    transposed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


_BASE = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0}
_WINDOWED = {**_BASE, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {
    **_BASE,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "use_sliding_window": True,
}
_GEMMA_SETTINGS = {"norm_offset": 1.0, "post_norms": True}

FAMILIES = {
    "llama": Family(_BASE),
    "mistral": Family({**_BASE, "sliding_window": 4096, "use_sliding_window": True}),
    "qwen2": Family(_WINDOWED, {"qkv_bias": True}),
    "qwen3": Family({**_WINDOWED, "head_dim": 128}, {"qk_norm": True}),
    "gemma2": Family(
        {
            **_GEMMA,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _GEMMA_SETTINGS,
        GEMMA_NAMES,
    ),
    "gemma3_text": Family(
        {**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
        {**_GEMMA_SETTINGS, "qk_norm": True},
        GEMMA_NAMES,
    ),
    "gpt2": Family(
        {**_BASE, "hidden_act": "gelu_new", "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        {
            "norm_kind": "layer",
            "positions": "learned",
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "gated_mlp": False,
        },
        GPT2_NAMES,
        prefix="transformer.",
        transposed=("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down"),
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
}


def sources(config: ModelConfig, parameter: str, names: Mapping | None = None) -> tuple[str, ...]:
    """The checkpoint's tensors that make up our parameter, in row order: "layers.3.attn.qkv.weight" -> q, k, v."""
    module, _, kind = parameter.rpartition(".")
    parts = module.split(".")
    layer = parts[1] if parts[0] == "layers" else ""
    template = ".".join(["layers", "*", *parts[2:]]) if layer else module
    names = FAMILIES[config.family].names if names is None else names
    return tuple(f"{name.replace('*', layer)}.{kind}" for name in names[template])


def piece_rows(config: ModelConfig, parameter: str, rows: int, pieces: int) -> list[int]:
    """How many rows of our parameter each of its `pieces` sources fills."""
    if pieces == 3:
        kv = config.num_kv_heads * config.head_dim
        return [config.num_heads * config.head_dim, kv, kv]
    return [rows // pieces] * pieces
