"""The bench of quantised decode: bytes equal their formula, requantised files read back; no test asserts a time."""

import numpy as np
import pytest
import torch

from minillm import load_model
from minillm.measure import quantized_bench
from minillm.measure.bench import NotMeasured
from minillm.quant.linear import model_bytes
from minillm.quant.named import NAMED, quantize_by_name


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_equal_the_formula(name, dtype):
    plain = load_model("tiny", dtype=dtype, device="cpu")
    small = quantize_by_name(load_model("tiny", dtype=dtype, device="cpu"), name)
    assert model_bytes(small) == quantized_bench.formula_bytes(plain, name)


@pytest.mark.parametrize("name", NAMED)
def test_kernels_agree_with_unpacked_integers(name):
    fast, slow = (
        quantize_by_name(load_model("tiny", dtype="float32", device="cpu"), name, kernel=kernel)
        for kernel in ("auto", "unpack")
    )
    assert quantized_bench.logit_error(fast, slow) < 0.03


def test_it_runs_on_a_small_model(monkeypatch):
    monkeypatch.setattr(quantized_bench, "llama_cpp_rate", lambda *a: None)
    figures = list(quantized_bench.bench_quantized(schemes=("int8",), smoke=True))
    names = [f.name.removeprefix("quantized.int8.") for f in figures]
    compiled = ["compiled.rate", "compiled.ratio", "compiled.bandwidth_share"]
    plain = [name for name in names if name not in compiled]
    assert plain == ["rate", "float32", "ratio", "bytes", "bandwidth_share"]
    assert names[len(plain) :] in (compiled, []), "without a C++ compiler there is no compiled step"


def test_the_kernels_are_checked_and_then_timed(monkeypatch):
    from minillm.kernels.launch import why_not

    if why_not() is not None:
        pytest.skip(why_not())
    monkeypatch.setattr(quantized_bench, "timed", lambda run, *a, **k: (run(), type("T", (), {"median": 1.0}))[1])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = list(quantized_bench.kernel_figures(device, 1e3, [(32, 128)], rows=[1], touched=5000))
    # int8: 32 * 128 + 2 * 32 bytes, twice; int4 in groups of 128 and 32: three of 2112 bytes, two of 2304
    assert [f.value for f in found] == [2 * 4160 / 1e3, 3 * 2112 / 1e3, 3 * 2304 / 1e3]


def test_a_missing_model_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(quantized_bench, "is_available", lambda name: False)
    monkeypatch.setattr(quantized_bench, "kernel_figures", lambda *a: iter(()))
    with pytest.raises(NotMeasured, match="minillm pull"):
        next(quantized_bench.bench_quantized())


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K"])
def test_a_gguf_file_is_rewritten(tmp_path, name):
    from gguf import GGUFReader, GGUFWriter
    from gguf.quants import dequantize

    from minillm.quant.formats import dequantize_blocks, quantize_blocks
    from minillm.quant.gguf_file import requantize

    generator = np.random.default_rng(0)
    matrix, odd, norm = (generator.normal(size=s).astype(np.float32) for s in ((6, 512), (6, 40), (512,)))
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "b"])
    for key, value in (("m.weight", matrix), ("odd.weight", odd), ("n.weight", norm)):
        writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GGUFReader(requantize(tmp_path / "a.gguf", tmp_path / "b.gguf", name))
    tensors = {t.name: t for t in reader.tensors}
    assert reader.fields["llama.context_length"].contents() == 77
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert tensors["m.weight"].tensor_type.name == name
    back = dequantize(tensors["m.weight"].data, tensors["m.weight"].tensor_type)
    expected = dequantize_blocks(quantize_blocks(torch.from_numpy(matrix), name), name)
    assert np.array_equal(back, expected.numpy())
    for key, value in (("odd.weight", odd), ("n.weight", norm)):
        assert np.array_equal(tensors[key].data, value)
