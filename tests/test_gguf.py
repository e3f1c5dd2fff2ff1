"""GGUF: every block format against the numbers it was made from, whole models, and headers that lie."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from minillm.errors import ConfigError, MinillmError, UnsupportedArchitectureError, WeightsError
from minillm.model.gguf import NAMES, GGUFCheckpoint, unpermute
from minillm.model.gguf_header import read_header
from minillm.model.rope import inverse_frequencies
from minillm.model.weights import load_model
from tests.logit_table import LLAMA3, SIZES, build, our_logits, prompt, relative_error

TOKENS = prompt(SIZES["vocab_size"], length=24)
SHAPE = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to Q and K, written by index: new row 2i is channel i, 2i + 1 is i + half."""
    dim = weight.shape[0] // heads
    order = [h * dim + i + half * dim // 2 for h in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return weight[order]


def write(oracle, path: Path, kind: Type = Type.F32, rope_factors=None, **metadata) -> Path:
    """The oracle's weights as a GGUF file: matrices in `kind`, vectors in float32."""
    config, arch = oracle.config, oracle.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for name, tensor in gguf_tensors(oracle).items():
        data = tensor.numpy()
        stored = kind if data.ndim == 2 else Type.F32
        writer.add_tensor(name, gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(oracle) -> dict[str, torch.Tensor]:
    theirs = {
        **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
        **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        **{"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    }
    state = oracle.state_dict()
    out = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not oracle.config.tie_word_embeddings:
        out["output.weight"] = state["lm_head.weight"]
    for i in range(oracle.config.num_hidden_layers):
        for ours, name in theirs.items():
            for end in ("weight", "bias"):
                if (tensor := state.get(f"model.layers.{i}.{name}.{end}")) is not None:
                    heads = {"attn_q": oracle.config.num_attention_heads, "attn_k": oracle.config.num_key_value_heads}
                    if oracle.config.model_type == "llama" and ours in heads:
                        tensor = permute(tensor, heads[ours])
                    out[f"blk.{i}.{ours}.{end}"] = tensor
    return out


def oracle_logits(oracle) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(TOKENS, use_cache=False).logits


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        LlamaConfig(**SHAPE, tie_word_embeddings=True),
        Qwen2Config(**SHAPE),
        Qwen3Config(**SHAPE, head_dim=24),
    ],
    ids=["llama", "llama tied", "qwen2", "qwen3"],
)
@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_float_files_equal_transformers(config, kind, tmp_path):
    oracle = build(config, tmp_path)
    if kind != Type.F32:  # round the oracle first: then the file loses nothing
        dtype = torch.float16 if kind == Type.F16 else torch.bfloat16
        for parameter in oracle.parameters():
            parameter.data = parameter.data.to(dtype).float() if parameter.dim() == 2 else parameter.data
    model = load_model(write(oracle, tmp_path / "model.gguf", kind), device="cpu")
    assert relative_error(our_logits(model, TOKENS, "prefill"), oracle_logits(oracle)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "bound"),
    [(Type.Q8_0, 0.008), (Type.Q4_0, 0.13), (Type.Q4_1, 0.08)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_quantised_files_are_near_what_they_were_made_from(kind, bound, tmp_path):
    """bound: half a step of the grid, relative to the largest weight of a block."""
    oracle = build(LlamaConfig(**SHAPE), tmp_path)
    checkpoint = GGUFCheckpoint(write(oracle, tmp_path / "model.gguf", kind))
    for name in ("attn_q", "attn_k", "attn_v"):
        stored = checkpoint.read(f"blk.1.{name}.weight")
        exact = oracle.state_dict()[f"model.layers.1.self_attn.{name[-1]}_proj.weight"]
        assert ((stored - exact).abs().max() / exact.abs().max()) < bound
        assert (stored - exact).abs().max() > 0


def test_k_quants_by_hand(tmp_path):
    """One super-block each of Q4_K and Q6_K, laid out by the format's definition."""
    half = np.float16
    scales = np.array([10, 20, 30, 40, 50, 60, 7, 8])  # 6 bits each
    mins = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    levels = np.random.default_rng(0).integers(0, 16, 256)
    packed = np.zeros(12, np.uint8)  # scales and mins 0-3 in the low 6 bits, 4-7 split over two places
    packed[0:4] = scales[:4] | (scales[4:] >> 4) << 6
    packed[4:8] = mins[:4] | (mins[4:] >> 4) << 6
    packed[8:12] = (scales[4:] & 15) | (mins[4:] & 15) << 4
    groups = levels.reshape(4, 2, 32)
    nibbles = (groups[:, 0] | groups[:, 1] << 4).astype(np.uint8).reshape(-1)
    q4_k = half([0.5, 0.25]).tobytes() + packed.tobytes() + nibbles.tobytes()
    expected4 = (0.5 * scales[:, None] * levels.reshape(8, 32) - 0.25 * mins[:, None]).reshape(1, 256)

    signed = np.random.default_rng(1).integers(-32, 32, 256)
    scales6 = np.arange(-8, 8).astype(np.int8)
    raw = (signed + 32).reshape(2, 4, 32)  # two halves of four runs of 32
    low, high = raw & 15, raw >> 4
    ql = np.stack([np.concatenate([low[:, 0] | low[:, 2] << 4, low[:, 1] | low[:, 3] << 4], axis=1)])
    qh = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    q6_k = ql.astype(np.uint8).tobytes() + qh.astype(np.uint8).tobytes() + scales6.tobytes() + half([0.5]).tobytes()
    expected6 = (0.5 * scales6[:, None] * signed.reshape(16, 16)).reshape(1, 256)

    path, writer = tmp_path / "k.gguf", gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    for name, data, kind in (("four", q4_k, Type.Q4_K), ("six", q6_k, Type.Q6_K)):
        writer.add_tensor(name, np.frombuffer(data, np.uint8).reshape(1, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = object.__new__(GGUFCheckpoint)
    checkpoint.path, checkpoint.tensors = path, read_header(path)[1]
    np.testing.assert_allclose(checkpoint.read_stored("four").numpy(), expected4)
    np.testing.assert_allclose(checkpoint.read_stored("six").numpy(), expected6)


def test_unpermute_undoes_the_converter():
    for shape, heads in (((32, 5), 4), ((24,), 3), ((6, 2), 1)):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        assert torch.equal(unpermute(permute(tensor, heads), heads), tensor)


def test_llama3_rope_factors_are_recognised_and_others_refused(tmp_path):
    rope = {**LLAMA3, "original_max_position_embeddings": 8192}
    oracle = build(LlamaConfig(**{**SHAPE, "max_position_embeddings": 65536}, rope_parameters=rope), tmp_path)
    plain = 1.0 / (5e5 ** (torch.arange(0, 16, 2) / 16))
    scaled = oracle.model.rotary_emb.inv_freq
    factors = (plain / scaled).numpy()
    assert factors.max() == pytest.approx(8) and factors.min() == pytest.approx(1)
    model = load_model(write(oracle, tmp_path / "model.gguf", rope_factors=factors), device="cpu")
    torch.testing.assert_close(inverse_frequencies(model.config)[0], scaled)
    with pytest.raises(ConfigError, match="rope_freqs"):
        load_model(write(oracle, tmp_path / "odd.gguf", rope_factors=factors**0.5 + 1), device="cpu")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    return write(build(LlamaConfig(**SHAPE), folder), folder / "model.gguf", Type.Q8_0).read_bytes()


@pytest.fixture
def load(tmp_path):
    def from_bytes(data: bytes):
        (tmp_path / "model.gguf").write_bytes(data)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            return load_model(tmp_path / "model.gguf", device="cpu")
        finally:
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB

    return from_bytes


def test_cut_short_anywhere_is_an_error(good, load):
    load(good)
    for keep in [0, 3, 4, 12, 23, 24, 40, 100, 400, 1000, 2000, len(good) // 2, len(good) - 5000, len(good) - 1]:
        with pytest.raises(WeightsError):
            load(good[:keep])


@pytest.mark.parametrize("count", [2**63, 2**32, 10**7])
@pytest.mark.parametrize("at", [8, 16], ids=["tensors", "metadata"])
def test_absurd_counts(good, load, at, count):
    with pytest.raises(WeightsError, match=r"cannot fit|cut short"):
        load(good[:at] + struct.pack("<Q", count) + good[at + 8 :])


def test_absurd_string_array_and_dimensions(good, load):
    with pytest.raises(WeightsError, match="cannot fit"):  # the first key's length
        load(good[:24] + struct.pack("<Q", 2**60) + good[32:])
    at = good.index(b"token_embd.weight") + len(b"token_embd.weight")
    with pytest.raises(WeightsError, match="dimensions"):
        load(good[:at] + struct.pack("<I", 2**31) + good[at + 4 :])
    with pytest.raises(WeightsError, match=r"token_embd\.weight"):
        load(good[: at + 4] + struct.pack("<QQ", 64, 2**61) + good[at + 20 :])
    with pytest.raises(WeightsError, match=r"cut short.*token_embd\.weight"):  # its offset
        load(good[: at + 24] + struct.pack("<Q", 2**50) + good[at + 32 :])
    key = good.index(b"llama.block_count") + len(b"llama.block_count")
    array = struct.pack("<IIQ", 9, 8, 2**50)  # an array of strings
    with pytest.raises(WeightsError, match="cannot fit"):
        load(good[:key] + array + good[key + 8 :])
    with pytest.raises(WeightsError, match=r"layers|tensors"):
        load(good[:key] + struct.pack("<II", 4, 9000) + good[key + 8 :])


def test_unsupported_kinds_are_named(good, load):
    at = good.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    with pytest.raises(WeightsError, match=r"token_embd\.weight has type IQ2_XXS; supported: F32"):
        load(good[:at] + struct.pack("<I", Type.IQ2_XXS) + good[at + 4 :])
    with pytest.raises(WeightsError, match="type number 999"):
        load(good[:at] + struct.pack("<I", 999) + good[at + 4 :])
    with pytest.raises(WeightsError, match="not a GGUF file"):
        load(b"PK\x03\x04" + good[4:])
    with pytest.raises(WeightsError, match="version 9"):
        load(good[:4] + struct.pack("<I", 9) + good[8:])
    with pytest.raises(UnsupportedArchitectureError, match=r"'mamba'.*llama"):
        load(good.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba", 1))


def test_shape_mismatch_and_missing_tensor(good, load):
    with pytest.raises(
        WeightsError, match=r"blk\.0\.ffn_gate\.weight has shape \[96, 64\]; the config asks for \[95, 64\]"
    ):
        at = good.index(b"llama.feed_forward_length") + len(b"llama.feed_forward_length") + 4
        load(good[:at] + struct.pack("<I", 95) + good[at + 4 :])
    with pytest.raises(WeightsError, match=r"missing.*blk\.0\.ffn_up\.weight"):
        load(good.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))


def test_random_damage_is_an_error_or_a_model(good, load):
    """Flip bytes of the header: never a crash of another kind, never a large allocation."""
    random = np.random.default_rng(0)
    header = good.index(b"output_norm.weight")
    for _ in range(150):
        data = bytearray(good)
        for at in random.integers(0, header, 3):
            data[at] = random.integers(256)
        try:
            load(bytes(data))
        except MinillmError:
            continue


def test_names_cover_the_decoder():
    from minillm.model.families import LLAMA_NAMES

    assert NAMES.keys() == LLAMA_NAMES.keys()
