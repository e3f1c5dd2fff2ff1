"""Quantised folders: layouts as AutoGPTQ, AutoAWQ and compressed-tensors packed them, and our own round trips.

`quant_layouts.safetensors` was made by these tools' own packers (versions in its metadata) from random weights on a
grid; its `weight` tensors are what the tools dequantise.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.errors import ConfigError, MinillmError, ParamsError, WeightsError
from minillm.model.export import hf_weights
from minillm.model.hub import ASSETS
from minillm.model.weights import load_model
from minillm.quant import layouts
from minillm.quant.affine import Quantized, Scheme, quantize
from minillm.quant.checkpoints import load_quantized, save_quantized
from minillm.quant.linear import QuantLinear, linears, quantize_model, rtn

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
    assert close(layouts.read_plain({**given, "weight": given["stored"]}), expected)


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
        assert torch.equal(packed.get_submodule(name).quantized().values, q.codes())


@torch.no_grad()
def test_a_w8a8_folder_is_read_as_float(tmp_path):
    model, _ = tiny(Scheme(8))
    tensors, expected = hf_weights(model), hf_weights(model)
    for name in [n for n in tensors if "proj" in n]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        eight = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale"] = eight, scale
        tensors[name.replace("weight", "input_scale")] = torch.ones(1)
        expected[name] = eight.float() * scale
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((ASSETS / "tiny" / "config.json").read_text()) | {"num_hidden_layers": 2}
    weights = {"num_bits": 8, "type": "float"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    found = hf_weights(load_quantized(tmp_path, "float32", "cpu"))
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not any(isinstance(m, QuantLinear) for m in load_quantized(tmp_path, packed=True).modules())


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
