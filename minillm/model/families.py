"""Families as data: which `config.json` fields and tensor names make a Llama, a Qwen, a Gemma or a GPT-2.

Chapter 01. Every family is the same `Decoder` under other settings. A `Family` holds what differs: the defaults of
its `config.json`, the fields it switches on, and the names its checkpoints give to our modules. Both forms of
`config.json` are read: the older one (`torch_dtype`, `rope_theta` and `rope_scaling`) and that of transformers 5
(`dtype`, `rope_parameters`, which Gemma 3 nests by layer type).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from minillm.errors import ConfigError, UnsupportedArchitectureError
from minillm.model.config import ModelConfig, RopeScaling

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
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# GPT-2's own field names, read under the names that everyone else uses.
GPT2_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
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
        ignored=("attn.bias", "attn.masked_bias"),
    ),
}
SUPPORTED = "supported: " + ", ".join(sorted(FAMILIES)) + " (SmolLM2, Llama 2 and 3 are llama)"
# Fields that change the function computed, and their only value that this decoder computes.
_MUST_BE = {
    "use_bidirectional_attention": False,
    "add_cross_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "partial_rotary_factor": 1.0,
}


def config_from_hf(raw: Mapping) -> ModelConfig:
    """The dictionary of a `config.json`, old form or new -> ModelConfig."""
    family = family_of(raw)
    spec = FAMILIES[family]
    renamed = {GPT2_FIELDS.get(key, key): value for key, value in raw.items()} if family == "gpt2" else raw
    values = {**spec.defaults, **{k: v for k, v in renamed.items() if v is not None or k == "sliding_window"}}
    if family.startswith("gemma"):  # an explicit null turns a cap off
        values.update({k: raw[k] for k in raw if k.endswith("softcapping")})
        values["hidden_act"] = values["hidden_activation"]
    for name, legal in _MUST_BE.items():
        if values.get(name, legal) not in (legal, None):
            raise ConfigError(f"{name}={values[name]!r} is not supported; supported: {legal!r}")
    if values.get("quantization_config"):
        method = dict(values["quantization_config"]).get("quant_method", "unknown")
        raise ConfigError(f"the checkpoint is stored quantised ({method}); minillm reads unquantised ones and GGUF")

    hidden, heads = integer(values, "hidden_size"), integer(values, "num_attention_heads")
    layers = integer(values, "num_hidden_layers")
    windows = layer_windows(values, layers)
    theta, scaling, local_theta = rope_settings(values)
    settings = {"qkv_bias": False, "out_bias": False, "mlp_bias": bool(values.get("mlp_bias", False))}
    if values.get("attention_bias") and family != "mistral":
        settings.update(qkv_bias=True, out_bias=True)
    settings.update(spec.settings)
    if family.startswith("gemma"):
        settings["embedding_scale"] = math.sqrt(hidden)
        settings["attention_scale"] = values["query_pre_attn_scalar"] ** -0.5
    if family == "gemma3_text":
        settings["rope_local_theta"] = local_theta
        settings["local_layers"] = tuple(i for i, window in enumerate(windows) if window is not None)
    return ModelConfig(
        family=family,
        vocab_size=integer(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(values, "intermediate_size", 4 * hidden if family == "gpt2" else None),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=integer(values, "num_key_value_heads", heads),
        head_dim=integer(values, "head_dim", hidden // max(heads, 1)),
        max_length=context_length(values, scaling),
        tie_embeddings=bool(values["tie_word_embeddings"]),
        norm_eps=float(values["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        windows=windows if any(window is not None for window in windows) else (),
        activation=activation(values["hidden_act"]),
        attention_softcap=values.get("attn_logit_softcapping"),
        logit_softcap=values.get("final_logit_softcapping"),
        bos_id=first(values.get("bos_token_id")),
        eos_ids=id_tuple(values.get("eos_token_id")),
        **settings,
    )


def family_of(raw: Mapping) -> str:
    """The key in FAMILIES, by `model_type`; architectures that are no plain decoder are refused by name."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    if model_type is None and not architectures:
        raise ConfigError("config.json names neither model_type nor architectures")
    decoders = [a for a in architectures if str(a).endswith(("ForCausalLM", "LMHeadModel"))]
    name = model_type if model_type in FAMILIES else None
    if name is None and model_type is None and decoders:
        by_name = {key.replace("_text", ""): key for key in FAMILIES}
        name = by_name.get(str(decoders[0]).replace("ForCausalLM", "").replace("LMHeadModel", "").lower())
    if name is None or (architectures and not decoders):
        shown = ", ".join(map(str, architectures)) or str(model_type)
        raise UnsupportedArchitectureError(f"architecture {shown!r} is not supported; {SUPPORTED}")
    return name


def layer_windows(values: Mapping, layers: int) -> tuple[int | None, ...]:
    """Per layer, how many tokens it sees (None: all), from `layer_types` or from the rule of the family."""
    window = values.get("sliding_window")
    if window is None or not values.get("use_sliding_window"):
        return (None,) * layers
    if not isinstance(window, int) or window < 1:
        raise ConfigError(f"sliding_window={window!r} must be an integer >= 1 or null")
    types = values.get("layer_types") if "max_window_layers" in values or _pattern(values) else None
    if types is not None:
        if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"layer_types must name full_attention or sliding_attention for each of {layers} layers, "
                f"got {len(types)} entries of {sorted(set(map(str, types)))}"
            )
        local = [kind == "sliding_attention" for kind in types]
    elif _pattern(values):  # every n-th layer sees all
        local = [(i + 1) % _pattern(values) != 0 for i in range(layers)]
    elif "max_window_layers" in values:  # Qwen: the first layers see all
        local = [i >= values["max_window_layers"] for i in range(layers)]
    else:
        local = [True] * layers
    return tuple(window if is_local else None for is_local in local)


def _pattern(values: Mapping) -> int:
    return int(values.get("sliding_window_pattern") or 0)


def rope_settings(values: Mapping) -> tuple[float, RopeScaling, float | None]:
    """(theta, scaling, theta of the local layers) from either form of config.json."""
    new = values.get("rope_parameters") or {}
    nested = {k: v for k, v in new.items() if isinstance(v, Mapping)}
    local = nested.get("sliding_attention", {}).get("rope_theta", values.get("rope_local_base_freq"))
    rope = dict(nested.get("full_attention") or {} if nested else new)
    rope = {**(values.get("rope_scaling") or {}), **rope}
    theta = rope.get("rope_theta", values["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor other than 1.0 is not supported")
    if kind == "default":
        return float(theta), RopeScaling(), local
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = original or values.get("max_position_embeddings", 0)
    factor = rope.get("factor") or values.get("max_position_embeddings", 0) / max(original, 1)
    named = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
    optional = {name: rope[name] for name in named if rope.get(name) is not None}
    return (
        float(theta),
        RopeScaling(
            kind=kind,
            factor=float(factor),
            original_length=int(original) if kind in ("yarn", "llama3") else 0,
            attention_factor=_attention_factor(rope, float(factor)),
            **optional,
        ),
        local,
    )


def _attention_factor(rope: Mapping, factor: float) -> float | None:
    """YaRN's factor on cos and sin where the file sets it, by itself or by DeepSeek's pair of mscale values."""
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is None and mscale and all_dim and factor > 1:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
    return rope.get("attention_factor")


def context_length(values: Mapping, scaling: RopeScaling) -> int:
    """`max_position_embeddings`, which files with YaRN may give for the original context: then times the factor."""
    length = integer(values, "max_position_embeddings", 2048)
    return max(length, round(scaling.original_length * scaling.factor)) if scaling.kind == "yarn" else length


def activation(name: str) -> str:
    if name not in ACTIVATION_NAMES:
        raise ConfigError(f"hidden_act={name!r} is not supported; supported: {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def integer(values: Mapping, name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"config.json: {name}={value!r} must be an integer")
    return value


def id_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    """A token id, a list of them, or null -> a tuple."""
    return tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)


def first(value: int | list[int] | None) -> int | None:
    return next(iter(id_tuple(value)), None)


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
