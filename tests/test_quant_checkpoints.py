"""Quantised folders: layouts as AutoGPTQ, AutoAWQ and compressed-tensors packed them, and our own round trips.

`quant_layouts.safetensors` was made by these tools' own packers (versions in its metadata) from random weights on a
grid; its `weight` tensors are what the tools dequantise.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from layer_oracle import worst_layer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.errors import ConfigError, MinillmError, ParamsError, WeightsError
from minillm.model.export import hf_weights
from minillm.model.hub import ASSETS
from minillm.model.weights import load_model
from minillm.quant import layouts
from minillm.quant.affine import Quantized, Scheme, fake_quantize, quantize
from minillm.quant.checkpoints import load_quantized, save_quantized
from minillm.quant.cpu_linear import Int4Linear, Int8Linear
from minillm.quant.fp8 import FP8Linear, quantize_fp8
from minillm.quant.linear import QuantLinear, linears, model_bytes, quantize_model, rtn
from minillm.quant.w8a8 import W8A8Linear

FILE = Path(__file__).parent / "quant_layouts.safetensors"


def parts(name):
    with safe_open(FILE, framework="pt") as file:
        keys = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118
        return {key.removeprefix(f"{name}."): file.get_tensor(key) for key in keys}


def close(found, expected):
    return torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_layout_equals_autogptqs(bits):
    given = parts(f"autogptq{bits}")
    stored = layouts.read_gptq(given, bits)
    assert close(stored.dequantize(), given["weight"])
    written = layouts.write_gptq(stored.quantized())
    for key in ("qweight", "qzeros", "scales", "g_idx"):
        assert torch.equal(written[key], given[key]), key


def test_awq_layout_equals_autoawqs():
    given = parts("autoawq4")
    assert close(layouts.read_awq(given).dequantize(), given["weight"])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["s", "a"])
def test_packed_layout_equals_compressed_tensors(bits, kind):
    given = parts(f"compressed{bits}{kind}")
    stored = layouts.read_packed(given, bits)
    assert close(stored.dequantize(), given["weight"])
    again = layouts.write_packed(stored.quantized())
    assert torch.equal(again["weight_packed"], given["weight_packed"])
    if kind == "a":
        assert torch.equal(again["weight_zero_point"], given["weight_zero_point"])


@pytest.mark.parametrize("name", ["naive_int8", "naive_fp8"])
def test_plain_layout_equals_compressed_tensors(name):
    given = parts(name)
    expected = given.pop("weight")
    assert close(layouts.read_plain({**given, "weight": given["stored"]}).dequantize(), expected)


def test_groups_of_act_order_are_read_by_index():
    given = parts("autogptq4")
    shuffle = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    stored = layouts.read_gptq(given, 4)
    codes = stored.codes[:, shuffle]  # an order of channels in which groups are not neighbours
    words = layouts.pack_words(codes, 4).T
    other = layouts.read_gptq({**given, "qweight": words, "g_idx": given["g_idx"][shuffle]}, 4)
    assert close(other.dequantize(), given["weight"][:, shuffle])
    assert other.quantized() is None and stored.quantized() is not None


def test_version_2_stores_the_zero_point_itself():
    given = parts("autogptq4")
    q = layouts.read_gptq(given, 4).quantized()
    q.zero[:, 0] = 0  # what version 1 stores as -1
    for version in (1, 2):
        again = layouts.read_gptq(layouts.write_gptq(q, version), 4, version)
        assert torch.equal(again.zero, q.zero)
    assert not torch.equal(layouts.write_gptq(q, 1)["qzeros"], layouts.write_gptq(q, 2)["qzeros"])


@pytest.mark.parametrize(("bits", "count"), [(3, 5), (3, 33), (4, 31), (2, 16), (8, 3), (5, 40)])
def test_words_hold_any_count(bits, count):
    codes = torch.randint(2**bits, (3, count), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    words = layouts.pack_words(codes, bits)
    assert words.shape == (3, -(-count * bits // 32))
    assert torch.equal(layouts.unpack_words(words, bits, count), codes)


def tiny(scheme):
    model = load_model("tiny", "float32", "cpu")
    model.layers = model.layers[:2]
    model.config = model.config.with_changes(num_layers=2)
    results = {name: rtn(name, linear, scheme) for name, linear in linears(model, ("head",)).items()}
    return model, results


SCHEMES = [Scheme(4, True, "group", 64), Scheme(3, False, "group", 32), Scheme(8, True), Scheme(4, False)]


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_our_own_folder_comes_back(tmp_path, layout, scheme):
    model, results = tiny(scheme)
    save_quantized(model, results, tmp_path, layout)
    tokens = torch.arange(40).view(2, 20)
    for name, q in results.items():
        model.get_submodule(name).weight.copy_(q.dequantize())
    expected = model(tokens)
    back = load_quantized(tmp_path, "float32", "cpu")
    assert torch.allclose(back(tokens), expected, atol=1e-4)
    packed = load_quantized(tmp_path, "float32", "cpu", packed=True, kernel="unpack")
    assert sum(isinstance(m, QuantLinear) for m in packed.modules()) == 8
    assert torch.allclose(packed(tokens), expected, atol=1e-4)
    for name, q in results.items():  # the very integers that were saved
        found = packed.get_submodule(name).quantized()
        assert found.scheme == q.scheme and torch.equal(found.values, q.values)


TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
BF16 = torch.bfloat16


def eight_bits(folder, kind, inputs=None, tensor=False, zero=False):
    """Two layers of tiny in INT8 or FP8 ("int", "float") to compressed-tensors' documented layout.

    inputs: input_activations without their type. tensor: one scale a linear, not one a row. zero: asymmetric.
    """
    model, _ = tiny(Scheme(8))
    tensors = {name: value.clone() for name, value in hf_weights(model).items()}
    for name in [n for n in tensors if "proj" in n]:
        w, axes = tensors[name], (0, 1) if tensor else 1
        high = 127 if kind == "int" else 448
        scale = (w.abs().amax(axes, keepdim=True) / high).to(BF16)
        values = w / scale.float()
        if kind == "int":
            values = values.round().clamp(-128, 127)
            values[0, 0] = -128  # a code that a symmetric range of ours never has, and files may hold
        tensors[name] = values.to(torch.int8 if kind == "int" else torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale.view(1) if tensor else scale
        if zero:
            tensors[f"{name}_zero_point"] = torch.full(scale.shape, -3, dtype=torch.int8)
        if inputs == STATIC:
            tensors[name.replace("weight", "input_scale")] = torch.full((1,), 0.01, dtype=BF16)
    save_file(tensors, folder / "model.safetensors")
    weights = {"num_bits": 8, "type": kind, "strategy": "tensor" if tensor else "channel", "symmetric": not zero}
    given = None if inputs is None else {"type": kind, **inputs}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": given}}
    settings = {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": groups}
    raw = json.loads((ASSETS / "tiny" / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": settings | {"ignore": ["lm_head"]}}))
    return tensors


def modules(model, kind):
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def relative(found, expected):
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


ROUND = {  # what a linear does to its inputs, in other words than its own; how far that may move the logits
    "int": (W8A8Linear, lambda x: fake_quantize(x.double(), Scheme(8, True, "token")), 0.02),
    "float": (FP8Linear, lambda x: by_torch(x), 0.06),
}


def by_torch(x):
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


@torch.no_grad()
@pytest.mark.parametrize("inputs", [TOKEN, STATIC], ids=["token", "static"])
@pytest.mark.parametrize("tensor", [False, True], ids=["row", "tensor"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_8_bit_folders_stay_in_8_bits(tmp_path, kind, tensor, inputs):
    """The file's own numbers, bytes by formula, and a model that is the dequantised one but for its inputs' rounding.

    A scale for all inputs becomes one a token, and a scale a linear one a row: q, k and v have three."""
    stored = eight_bits(tmp_path, kind, inputs, tensor)
    plain = load_quantized(tmp_path, "float32", "cpu")
    small = load_quantized(tmp_path, "float32", "cpu", packed=True)
    which, fake_input, tolerance = ROUND[kind]
    found = modules(small, which)
    assert len(found) == 8 and list(modules(small, torch.nn.Linear)) == ["head"]
    assert sum(model_bytes(m) for m in found.values()) == sum(
        m.in_features * m.out_features + 4 * m.out_features for m in found.values()
    )
    for ours, names in (("qkv", "qkv"), ("out", "o")):
        rows = [stored[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in names]
        assert torch.equal(bits_of(found[f"layers.1.attn.{ours}"].values), bits_of(torch.cat(rows)))
    tokens = torch.arange(40).view(2, 20)
    error = worst_layer(small, plain, tokens, which, lambda linear: linear.weight, fake_input)
    assert error < (1e-5 if kind == "int" else 1e-4)
    assert 0 < relative(small(tokens), plain(tokens)) < tolerance
    unpacked = load_quantized(tmp_path, "float32", "cpu", packed=True, kernel="unpack")
    assert relative(unpacked(tokens), small(tokens)) < tolerance


def bits_of(x):
    return x.view(torch.uint8)


@torch.no_grad()
def test_the_dequantised_model_has_the_files_weights(tmp_path):
    for kind in ("int", "float"):
        stored = eight_bits(tmp_path, kind, TOKEN)
        for name, weight in hf_weights(load_quantized(tmp_path, "float32", "cpu")).items():
            scale = stored[f"{name}_scale"].float() if f"{name}_scale" in stored else 1
            assert torch.equal(weight, stored[name].float() * scale), name


@torch.no_grad()
@pytest.mark.parametrize("zero", [False, True], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("inputs", [None, {**TOKEN, "symmetric": False}, {**TOKEN, "num_bits": 4}])
def test_int8_weights_alone_are_packed(tmp_path, inputs, zero):
    """No rounding of inputs in the file, or none that a linear here does: chapter 11's linears."""
    eight_bits(tmp_path, "int", inputs, zero=zero)
    tokens = torch.arange(40).view(2, 20)
    expected = load_quantized(tmp_path, "float32", "cpu")(tokens)
    small = load_quantized(tmp_path, "float32", "cpu", packed=True)
    found = modules(small, QuantLinear if zero else Int8Linear)
    assert len(found) == 8
    extra = 1 if zero else 0  # a zero point a row takes a byte, a scale two
    formula = sum(m.in_features * m.out_features + (2 + extra) * m.out_features for m in found.values())
    assert sum(model_bytes(m) for m in found.values()) == formula
    assert relative(small(tokens), expected) < (1e-5 if zero else 0.01)  # torch's kernel computes in bfloat16
    exact = load_quantized(tmp_path, "float32", "cpu", packed=True, kernel="unpack")
    assert torch.allclose(exact(tokens), expected, atol=1e-4)


@torch.no_grad()
def test_4_bit_weights_with_8_bit_inputs_are_packed_and_fp8_weights_alone_stay_float(tmp_path):
    model, results = tiny(Scheme(4, True, "group", 64))
    save_quantized(model, results, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    raw["config_groups"]["group_0"]["input_activations"] = {"type": "int", **TOKEN}
    write_config(tmp_path, raw)
    small = load_quantized(tmp_path, "float32", "cpu", packed=True)
    assert len(modules(small, Int4Linear)) == 8 and not modules(small, W8A8Linear)
    eight_bits(tmp_path, "float")
    assert len(modules(load_quantized(tmp_path, "float32", "cpu", packed=True), torch.nn.Linear)) == 9


@pytest.mark.parametrize("kind", ["int", "float"])
def test_llm_serves_8_bit_folders(tmp_path, kind):
    eight_bits(tmp_path, kind, TOKEN)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if (ASSETS / "tiny" / file).is_file():
            shutil.copy(ASSETS / "tiny" / file, tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", device="cpu")
    assert len(modules(llm.model, ROUND[kind][0])) == 8
    prompt = llm.tokenizer.encode("The sea was")
    out = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].token_ids
    rows = llm.model(torch.tensor([[*prompt, *out[:-1]]]))[0, len(prompt) - 1 :]  # without a cache
    assert ((rows.amax(-1) - rows.gather(-1, torch.tensor(out)[:, None])[:, 0]) <= 0.1).all()


def change_group(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = raw["config_groups"]["group_0"]
    for key, value in changes.items():
        group[key] = {**(group[key] or {}), **value}
    write_config(folder, raw)


def add_group(folder):
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = raw["config_groups"]["group_0"]
    raw["config_groups"]["group_1"] = {**group, "input_activations": None}
    write_config(folder, raw)


PROJ = "model.layers.1.mlp.up_proj.weight"
WRONG = {
    "inputs of an unknown type": (lambda f: change_group(f, input_activations={"type": "log"}), ConfigError, "'log'"),
    "an unknown strategy": (
        lambda f: change_group(f, input_activations={"strategy": "head"}),
        ConfigError,
        "strategy of token, tensor",
    ),
    "two schemes": (add_group, ConfigError, "input_activations differ"),
    "weights of 16 bits": (lambda f: edit(f, lambda t: t.update({PROJ: t[PROJ].half()})), WeightsError, "float16"),
    "a scale a group": (
        lambda f: edit(f, lambda t: t.update({f"{PROJ}_scale": torch.ones(len(t[PROJ]), 3)})),
        WeightsError,
        "one a row",
    ),
    "zero points of another size": (
        lambda f: edit(f, lambda t: t.update({f"{PROJ}_zero_point": torch.ones(7, 1, dtype=torch.int8)})),
        WeightsError,
        "weight_zero_point",
    ),
    "a scale that is no number": (
        lambda f: edit(f, lambda t: t[f"{PROJ}_scale"].fill_(float("nan"))),
        MinillmError,
        "NaN",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_broken_8_bit_folders_are_one_clear_error(tmp_path, name):
    eight_bits(tmp_path, "int", TOKEN)
    breaking, error, text = WRONG[name]
    breaking(tmp_path)
    with pytest.raises(error, match=text):
        load_quantized(tmp_path, device="cpu", packed=True)


def test_scales_of_a_kv_cache_are_passed_over(tmp_path):
    eight_bits(tmp_path, "float", TOKEN)
    edit(tmp_path, lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    assert len(modules(load_quantized(tmp_path, device="cpu", packed=True), FP8Linear)) == 8


def test_modules_refuse_numbers_of_another_scheme():
    linear = torch.nn.Linear(64, 16)
    with pytest.raises(ParamsError, match="quantized="):
        W8A8Linear(linear, quantized=quantize(linear.weight, Scheme(8, False)))
    with pytest.raises(ParamsError, match="scaled="):
        FP8Linear(linear, scaled=quantize_fp8(linear.weight, granularity="tensor"))
    with pytest.raises(ParamsError, match="scaled="):
        FP8Linear(linear, scaled=quantize_fp8(linear.weight, "e5m2"))


def write_config(folder, settings):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"
BREAK = {
    "no config": (lambda f: write_config(f, None), ConfigError, "use load_model"),
    "another method": (lambda f: write_config(f, {"quant_method": "bitsandbytes"}), ConfigError, "supported: gptq"),
    "5 bits": (lambda f: write_config(f, {"quant_method": "gptq", "bits": 5}), ConfigError, "'bits': 5"),
    "AWQ GEMV": (
        lambda f: write_config(f, {"quant_method": "awq", "bits": 4, "version": "gemv"}),
        ConfigError,
        "gemv",
    ),
    "another width": (lambda f: write_config(f, {"quant_method": "gptq", "bits": 8}), WeightsError, "q_proj"),
    "a tensor is missing": (lambda f: edit(f, lambda t: t.pop(f"{Q}.scales")), MinillmError, "scales"),
    "group out of range": (lambda f: edit(f, lambda t: t[f"{Q}.g_idx"].add_(9)), WeightsError, "g_idx"),
    "zeros of another size": (
        lambda f: edit(f, lambda t: t.update({f"{Q}.qzeros": torch.zeros(3, 5, dtype=torch.int32)})),
        WeightsError,
        "int32 words",
    ),
    "no qweight": (lambda f: edit(f, lambda t: t.pop(f"{Q}.qweight")), MinillmError, "q_proj"),
}


@pytest.mark.parametrize("name", BREAK)
def test_broken_folders_are_one_clear_error(tmp_path, name):
    model, results = tiny(Scheme(4, False, "group", 64))
    save_quantized(model, results, tmp_path, "gptq")
    load_quantized(tmp_path)
    breaking, error, text = BREAK[name]
    breaking(tmp_path)
    with pytest.raises(error, match=text):
        load_quantized(tmp_path)


def test_what_cannot_be_saved_is_refused(tmp_path):
    model, results = tiny(Scheme(4, False, "group", 64))
    with pytest.raises(ParamsError, match="layout='awq'"):
        save_quantized(model, results, tmp_path, "awq")
    mixed = {**results, "layers.0.attn.out": quantize(torch.randn(192, 256), Scheme(8))}
    with pytest.raises(ParamsError, match="one scheme"):
        save_quantized(model, mixed, tmp_path)
    floating = quantize(torch.randn(4, 64), Scheme(4, False, "channel", zero="float"))
    with pytest.raises(WeightsError, match="whole zero point"):
        layouts.write_gptq(floating)


def test_saved_integers_are_those_that_quantize_model_packs(tmp_path):
    scheme = Scheme(4, True, "group", 64)
    model, results = tiny(scheme)
    save_quantized(model, results, tmp_path)

    def method(name, linear, wanted) -> Quantized:
        return results[name]

    quantize_model(model, method, bits=4, group_size=64, kernel="unpack")
    tokens = torch.arange(20).view(1, 20)
    packed = load_quantized(tmp_path, "float32", "cpu", packed=True, kernel="unpack")
    with torch.no_grad():
        assert torch.allclose(packed(tokens), model(tokens), atol=1e-4)


def test_llm_opens_a_quantised_folder(tmp_path):
    model, results = tiny(Scheme(4, True, "group", 64))
    save_quantized(model, results, tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if (ASSETS / "tiny" / file).is_file():
            shutil.copy(ASSETS / "tiny" / file, tmp_path)
    params = SamplingParams(max_tokens=5, temperature=0)
    llm = LLM(str(tmp_path), device="cpu")
    assert sum(hasattr(m, "scheme") for m in llm.model.modules()) == 8, "its integers stay integers"
    expected = Engine(
        load_quantized(tmp_path, device="cpu", packed=True), tokenizer=llm.tokenizer, eos_ids=llm.eos_ids
    )
    group = expected.add(llm.tokenizer.encode("The sea was"), params)
    while expected.has_work:
        expected.step()
    assert llm.generate("The sea was", params)[0].token_ids == group.requests[0].output
    with pytest.raises(ParamsError, match="quantised already"):
        LLM(str(tmp_path), device="cpu", quantization="int8")
