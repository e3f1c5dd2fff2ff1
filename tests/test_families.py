"""Every family equals transformers, every setting of a family matters, and both forms of config.json read alike."""

from __future__ import annotations

import pytest
import torch

from minillm.errors import ConfigError, UnsupportedArchitectureError
from minillm.model.config import RopeScaling
from minillm.model.config_json import config_from_hf
from minillm.model.decoder import Decoder
from minillm.model.families import FAMILIES
from minillm.model.rope import inverse_frequencies
from minillm.model.shapes import SHAPES, known_shapes
from minillm.model.weights import load_model, on_meta
from tests.logit_table import CASES, build, errors, our_logits, prompt, relative_error

# Family -> a change of its config that must show in the logits: the test would miss the feature otherwise.
MATTERS = {
    "llama 3 (llama3 rope)": {"rope_scaling": RopeScaling()},
    "llama (linear rope)": {"rope_scaling": RopeScaling()},
    "llama (yarn)": {"rope_scaling": RopeScaling()},
    "mistral": {"windows": (8,) * 4},
    "qwen2 (window, yarn)": {"windows": (None, 9, 9, 9)},
    "gemma 2": {"attention_softcap": None},
    "gemma 3": {"windows": (8, 8, None, 8)},
}
MATTERS_TOO = [
    ("qwen2 (window, yarn)", {"rope_scaling": RopeScaling("yarn", 4.0, 16, truncate=True)}),
    ("gemma 2", {"logit_softcap": None}),
    ("gemma 2", {"embedding_scale": 1.0}),
    ("gemma 2", {"attention_scale": None}),
    ("gemma 3", {"rope_local_theta": 1e6}),
    ("gemma 3", {"local_layers": ()}),
    ("gpt2", {"activation": "silu"}),
]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path):
    found = errors(CASES[name], tmp_path)
    assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize(("name", "change"), [*MATTERS.items(), *MATTERS_TOO])
def test_the_comparison_would_see_a_missing_feature(name, change, tmp_path):
    build(CASES[name], tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    other = Decoder(model.config.with_changes(**change))
    other.load_state_dict(model.state_dict())
    tokens = prompt(model.config.vocab_size)
    difference = relative_error(our_logits(other, tokens, "prefill"), our_logits(model, tokens, "prefill"))
    assert difference > 1e-3


def test_packed_tokens_equal_a_batch_of_one(tmp_path):
    build(CASES["gemma 3"], tmp_path)
    model = load_model(tmp_path, device="cpu")
    tokens = prompt(model.config.vocab_size, batch=1)
    torch.testing.assert_close(our_logits(model, tokens, "prefill")[0], our_logits(model, tokens[0], "prefill"))


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}
BAND = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **BAND}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **BAND}},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, "dtype": "bfloat16"},
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}},
        ),
    ],
)
def test_old_and_new_config_forms_read_alike(old, new):
    assert config_from_hf({**LLAMA, **old}) == config_from_hf({**LLAMA, **new})


def test_gemma3_old_form_equals_the_nested_one():
    base = {**LLAMA, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    types = ["sliding_attention", "full_attention"] * 2
    config = config_from_hf({**base, **old})
    assert config == config_from_hf({**base, "rope_parameters": nested, "layer_types": types})
    assert config.windows == (8, None, 8, None) and config.local_layers == (0, 2)
    assert config.rope_local_theta == 2e4 and config.tie_embeddings and config.norm_offset == 1.0


def test_defaults_that_files_leave_out():
    config = config_from_hf(LLAMA)
    assert (config.head_dim, config.norm_eps, config.tie_embeddings, config.eos_ids) == (16, 1e-6, False, (2, 7))
    mistral = config_from_hf({**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    assert mistral.windows == (4096,) * 4
    assert (
        config_from_hf({**LLAMA, "model_type": "mistral", "sliding_window": None, "architectures": []}).windows == ()
    )
    qwen = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    assert config_from_hf(qwen).windows == ()  # use_sliding_window is false unless said
    assert config_from_hf({**qwen, "use_sliding_window": True, "max_window_layers": 3}).windows == (None,) * 3 + (32,)
    only_architecture = {k: v for k, v in LLAMA.items() if k != "model_type"}
    assert config_from_hf(only_architecture).family == "llama"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ConfigError, "dynamic.*supported.*llama3"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ConfigError, "longrope"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, ConfigError, "factor=-1.0"),
        ({"rope_scaling": {"type": "linear"}}, ConfigError, "linear.*needs a factor"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, ConfigError, "factor=inf"),
        ({"rope_scaling": {"type": "longrope"}}, ConfigError, "longrope.*supported"),
        ({"rope_scaling": {**YARN, "type": "yarn", "beta_fast": 0}}, ConfigError, "beta_fast=0"),
        ({"rope_scaling": {**YARN, "type": "yarn", "beta_slow": "1"}}, ConfigError, "beta_slow='1'"),
        (
            {"rope_scaling": {**YARN, "type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}},
            ConfigError,
            "low_freq_factor=4 must be < high_freq_factor=4",
        ),
        ({"rope_scaling": "linear"}, ConfigError, "wrong type"),
        ({"rope_theta": 0}, ConfigError, "rope_theta=0"),
        ({"rms_norm_eps": -1e-5}, ConfigError, "norm_eps=-1e-05"),
        ({"tie_word_embeddings": "no"}, ConfigError, "tie_word_embeddings='no' must be true or false"),
        ({"attention_bias": "false"}, ConfigError, "attention_bias='false'"),
        ({"hidden_act": "relu"}, ConfigError, "hidden_act='relu'.*silu"),
        ({"hidden_size": None}, ConfigError, "hidden_size"),
        ({"hidden_size": "64"}, ConfigError, "hidden_size='64'"),
        ({"num_hidden_layers": 0}, ConfigError, "num_layers=0"),
        ({"num_attention_heads": 0}, ConfigError, "num_heads=0"),
        ({"num_key_value_heads": 3}, ConfigError, "multiple"),
        ({"rms_norm_eps": "tiny"}, ConfigError, "rms_norm_eps='tiny'"),
        ({"partial_rotary_factor": 0.5}, ConfigError, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, ConfigError, "gptq"),
        ({"eos_token_id": "x"}, ConfigError, "id is 'x'"),
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            UnsupportedArchitectureError,
            "Mamba.*llama",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, UnsupportedArchitectureError, "Classification"),
        ({"model_type": None, "architectures": None}, ConfigError, "neither"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
            ConfigError,
            "layer_types",
        ),
    ],
)
def test_bad_configs_are_one_clear_error(change, error, message):
    with pytest.raises(error, match=message):
        config_from_hf({**LLAMA, **change})


def test_ntk_is_a_larger_base():
    config = config_from_hf({**LLAMA, "rope_scaling": {"type": "ntk", "factor": 2.0}})
    plain = config_from_hf({**LLAMA, "rope_theta": 10000.0 * 2.0 ** (16 / 14)})
    torch.testing.assert_close(inverse_frequencies(config)[0], inverse_frequencies(plain)[0])


def test_known_shapes_have_the_published_parameter_counts():
    published = {
        "smollm2-135m": 134.5e6,
        "llama-2-7b": 6.74e9,
        "llama-3.1-8b": 8.03e9,
        "llama-3.1-70b": 70.6e9,
        "mistral-7b": 7.24e9,
        "qwen2.5-7b": 7.62e9,
        "qwen3-8b": 8.19e9,
        "gpt2": 124.4e6,
    }
    shapes = known_shapes()
    assert shapes.keys() == SHAPES.keys() and {c.family for c in shapes.values()} <= FAMILIES.keys()
    for name, count in published.items():
        found = sum(p.numel() for p in on_meta(shapes[name]).parameters())
        assert abs(found / count - 1) < 0.005, (name, found)
