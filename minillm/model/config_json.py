"""Hugging Face's `config.json` -> ModelConfig, in both of its forms.

Chapter 01. The older form has `torch_dtype`, `rope_theta` and `rope_scaling`; that of transformers 5 has `dtype` and
`rope_parameters`, which Gemma 3 nests by layer type. A field that would change what the model computes, and that the
decoder does not know, is an error; every other unknown field is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from minillm.errors import ConfigError, MinillmError, UnsupportedArchitectureError
from minillm.model.config import ModelConfig, RopeScaling
from minillm.model.families import FAMILIES

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
SUPPORTED = "supported: " + ", ".join(sorted(FAMILIES)) + " (SmolLM2, Llama 2 and 3 are llama)"
MOST_LAYERS = 10_000  # a bound on what a hostile file can make us build; real models have about 100
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
    try:
        return _read(raw)
    except MinillmError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"config.json has a field of the wrong type: {error}") from error


def _read(raw: Mapping) -> ModelConfig:
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
    if layers > MOST_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers={layers} must be at most {MOST_LAYERS}")
    windows = layer_windows(values, layers)
    theta, scaling, local_theta = rope_settings(values)
    settings = {"qkv_bias": False, "out_bias": False, "mlp_bias": flag(values, "mlp_bias")}
    if flag(values, "attention_bias") and family != "mistral":
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
        tie_embeddings=flag(values, "tie_word_embeddings"),
        norm_eps=number(values, "rms_norm_eps"),
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
    architectures = [architectures] if isinstance(architectures, str) else architectures
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
    local = None if local is None else number({"local rope_theta": local}, "local rope_theta")
    rope = {**(values.get("rope_scaling") or {}), **(nested.get("full_attention", {}) if nested else new)}
    theta = number({"rope_theta": values["rope_theta"], **rope}, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor other than 1.0 is not supported")
    if kind == "default":
        return theta, RopeScaling(), local
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    context = values.get("max_position_embeddings", 0)
    original = original or context
    factor = rope.get("factor")
    if factor is None and kind in ("linear", "ntk", "llama3"):  # YaRN may leave it to the two lengths
        raise ConfigError(f"config.json: rope type {kind!r} needs a factor")
    factor = number({"rope factor": factor}, "rope factor") if factor is not None else context / max(original, 1)
    named = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
    optional = {name: rope[name] for name in named if rope.get(name) is not None}
    return (
        theta,
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


def flag(values: Mapping, name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name}={value!r} must be true or false")
    return value


def number(values: Mapping, name: str) -> float:
    value = values.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"config.json: {name}={value!r} must be a number")
    return float(value)


def id_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    """A token id, a list of them, or null -> a tuple."""
    ids = tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(f"a special token id is {token!r}; it must be an integer >= 0, a list of them, or null")
    return ids


def first(value: int | list[int] | None) -> int | None:
    return next(iter(id_tuple(value)), None)
