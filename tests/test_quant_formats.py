"""GGUF blocks bit-equal with the gguf package; ungrid changes no logit and takes the weights off their grid."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from minillm import load_model
from minillm.errors import ParamsError
from minillm.model.hub import is_available
from minillm.quant.affine import Scheme, fake_quantize
from minillm.quant.formats import FORMATS, dequantize_blocks, pack_six, quantize_blocks, unpack_six

NAMES = list(FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_ggmls(name):
    form = FORMATS[name]
    assert (form.weights, form.size) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_are_read_as_gguf_reads_them(name):
    """Random codes and scales; the 16-bit scales finite, as a real file's are."""
    form, generator = FORMATS[name], np.random.default_rng(0)
    raw = generator.integers(0, 256, (50, 3, form.size), dtype=np.uint8)
    halves = 4 if name in ("Q4_1", "Q4_K") else 2
    scales = generator.normal(0, 0.1, (50, 3, halves // 2)).astype(np.float16)
    raw[..., :halves] = scales.view(np.uint8)
    expected = dequantize(raw.reshape(50, -1), GGMLQuantizationType[name]).reshape(50, 3 * form.weights)
    got = dequantize_blocks(torch.from_numpy(raw.reshape(50, -1)), name)
    assert np.array_equal(got.numpy().view(np.uint32), expected.view(np.uint32))


def weights(kind: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, count, generator=generator) * 0.05
    if kind == "positive":
        return x.abs() + 0.01
    if kind == "ties":  # halves of a step: where roundings differ
        return torch.randint(-16, 16, x.shape, generator=generator).float() / 2 * 0.125
    if kind == "zeros":
        return x.masked_fill((torch.arange(64) % 2 == 0)[:, None], 0.0)
    return x


@pytest.mark.parametrize("kind", ["normal", "positive", "ties", "zeros"])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_made_again_bit_for_bit(name, kind):
    x = weights(kind, 4 * FORMATS[name].weights)
    expected = quantize(x.numpy(), GGMLQuantizationType[name])
    assert np.array_equal(quantize_blocks(x, name).numpy(), expected)


@pytest.mark.parametrize("kind", ["normal", "positive", "zeros"])
def test_q4_k_errs_by_little_more_than_half_a_step(kind):
    """There is no encoder to be equal to; the bound: half a step, and half a 64th of the largest scale and offset."""
    x = weights(kind, 512)
    back = dequantize_blocks(quantize_blocks(x, "Q4_K"), "Q4_K")
    super_ = x.unflatten(-1, (2, 8, 32))
    low, high = super_.amin(-1).clamp(max=0), super_.amax(-1).clamp(min=0)
    step = ((high - low) / 15).amax(-1)  # [64, 2], the largest of each 256
    bound = step * (0.5 + 15 / 126) + (-low).amax(-1) / 126 + 1e-3 * (high - low).amax(-1)
    error = (back - x).abs().unflatten(-1, (2, 256)).amax(-1)
    assert (error <= bound).all()
    assert (back[(x == 0).all(-1)] == 0).all()
    # the same numbers as the package reads
    expected = dequantize(quantize_blocks(x, "Q4_K").numpy(), GGMLQuantizationType.Q4_K)
    assert np.array_equal(back.numpy(), expected)


def test_six_bits_come_back():
    generator = torch.Generator().manual_seed(0)
    scale, offset = torch.randint(0, 64, (2, 500, 8), generator=generator)
    got = unpack_six(pack_six(scale, offset))
    assert torch.equal(got[0].long(), scale) and torch.equal(got[1].long(), offset)


def test_more_bits_err_less():
    x = weights("normal", 1024)
    errors = [
        (dequantize_blocks(quantize_blocks(x, name), name) - x).square().mean().item()
        for name in ("Q8_0", "Q4_1", "Q4_0")
    ]
    assert errors == sorted(errors)


def test_refusals():
    with pytest.raises(ParamsError, match="name='Q5_0': must be one of Q8_0"):
        quantize_blocks(torch.randn(4, 32), "Q5_0")
    with pytest.raises(ParamsError, match="multiple of 256 for Q4_K"):
        quantize_blocks(torch.randn(4, 128), "Q4_K")
    with pytest.raises(ParamsError, match="34 bytes of a Q8_0 block"):
        dequantize_blocks(torch.zeros(4, 33, dtype=torch.uint8), "Q8_0")
    with pytest.raises(ParamsError, match="must be uint8"):
        dequantize_blocks(torch.zeros(4, 34), "Q8_0")


def on_a_grid(model):
    """Its linears as a Q4_1 file would give them back."""
    for block in model.layers:
        for linear in (block.attn.qkv, block.attn.out, block.mlp.gate_up, block.mlp.down):
            linear.weight.copy_(dequantize_blocks(quantize_blocks(linear.weight, "Q4_1"), "Q4_1"))
    return model


def error_of_rounding(model, scheme):
    """Relative error of the weights of all layers under one more rounding."""
    wrong = total = 0.0
    for block in model.layers:
        for linear in (block.attn.qkv, block.attn.out, block.mlp.gate_up, block.mlp.down):
            wrong += (fake_quantize(linear.weight, scheme) - linear.weight).square().sum().item()
            total += linear.weight.square().sum().item()
    return (wrong / total) ** 0.5


def test_ungrid_keeps_the_function_and_breaks_the_grid():
    from minillm.quant.ungrid import distinct_in_groups, ungrid

    tokens = torch.randint(3, 2048, (2, 20), generator=torch.Generator().manual_seed(0))
    original = load_model("tiny", dtype="float32", device="cpu")
    free = Scheme(4, False, "group", 32, "float")
    honest = error_of_rounding(original, free)
    model = on_a_grid(original)
    before, stuck = model(tokens), error_of_rounding(model, free)
    assert distinct_in_groups(model.layers[0].mlp.down.weight) <= 16
    ungrid(model)
    after = model(tokens)
    assert (after - before).abs().max() <= 2e-5 * before.abs().max()
    for block in model.layers:
        for linear in (block.attn.qkv, block.attn.out, block.mlp.gate_up, block.mlp.down):
            assert distinct_in_groups(linear.weight) > 24
    assert stuck < 0.01 * honest  # what looked lossless ...
    assert 0.7 * honest < error_of_rounding(model, free) < 1.3 * honest  # ... costs what it costs on real weights


def test_ungrid_rescales_an_untied_head():
    from minillm.model.config import ModelConfig
    from minillm.model.decoder import Decoder, init_weights
    from minillm.quant.ungrid import ungrid

    config = ModelConfig(60, 32, 64, 2, 4, 2, 8, 32)
    model = init_weights(Decoder(config)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 2.0)
    tokens = torch.randint(0, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    before, head = model(tokens), model.head.weight.clone()
    after = ungrid(model)(tokens)
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()
    change = (model.head.weight / head).log2()
    assert change.abs().max() <= 0.25 + 1e-4 and change.std() > 0.1


def test_ungrid_refuses_other_families():
    from minillm.model.config import ModelConfig
    from minillm.model.decoder import Decoder
    from minillm.quant.linear import quantize_model
    from minillm.quant.ungrid import ungrid

    with pytest.raises(ParamsError, match="Llama type"):
        ungrid(Decoder(ModelConfig(60, 32, 64, 2, 4, 2, 8, 32, norm_kind="layer")))
    with pytest.raises(ParamsError, match="plain linears"):
        ungrid(quantize_model(load_model("tiny", dtype="float32", device="cpu")))


@pytest.mark.skipif(not is_available("smollm2-135m"), reason="smollm2-135m is not pulled")
def test_smollm2s_file_is_a_trap_and_ungrid_mends_it():
    from minillm.quant.ungrid import distinct_in_groups, ungrid

    model = load_model("smollm2-135m", dtype="float32", device="cpu")
    matrices = [block.mlp.down.weight for block in (model.layers[0], model.layers[20])]
    if distinct_in_groups(matrices[0]) > 16:
        pytest.skip("these are the original 16-bit weights")
    free = Scheme(4, False, "group", 32, "float")
    stuck = max((fake_quantize(w, free) - w).norm() / w.norm() for w in matrices)
    tokens = torch.randint(5, 49152, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = model(tokens)
        after = ungrid(model)(tokens)
    assert (after - before).abs().max() <= 1e-4 * before.abs().max()
    assert stuck < 1e-3
    for w in (block.mlp.down.weight for block in (model.layers[0], model.layers[20])):
        assert (fake_quantize(w, free) - w).norm() / w.norm() > 0.05
