"""Write a decoder as a Hugging Face folder: config.json and model.safetensors, which transformers opens as well.

Chapter 00. The inverse of loading: the fused matrices are cut into the parts that the file format knows by name.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm.model.decoder import Decoder


def hf_weights(model: Decoder) -> dict[str, Tensor]:
    """The decoder's tensors under Hugging Face's Llama names, the fused matrices cut up; the tied head left out."""
    config, out = (
        model.config,
        {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight},
    )
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i, block in enumerate(model.layers):
        parts = dict(zip(("q", "k", "v"), block.attn.qkv.weight.split((q, kv, kv))))
        named = {f"self_attn.{name}_proj": weight for name, weight in parts.items()}
        named |= dict(zip(("mlp.gate_proj", "mlp.up_proj"), block.mlp.gate_up.weight.chunk(2)))
        named |= {"self_attn.o_proj": block.attn.out.weight, "mlp.down_proj": block.mlp.down.weight}
        named |= {"input_layernorm": block.attn_norm.weight, "post_attention_layernorm": block.mlp_norm.weight}
        out |= {f"model.layers.{i}.{name}.weight": weight for name, weight in named.items()}
    return {name: weight.detach().clone().contiguous() for name, weight in out.items()}


def export(model: Decoder, folder: str | Path, facts: dict | None = None, dtype: torch.dtype = torch.float32) -> None:
    """A folder that `load_model` and transformers can both open, weights rounded to dtype.

    facts: how it was trained (training.json).
    """
    folder, c = Path(folder), model.config
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_length,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": c.bos_id,
        "eos_token_id": list(c.eos_ids),
        "pad_token_id": c.bos_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    files = {"config.json": settings}
    if facts:
        files["training.json"] = facts
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf8")
    tensors = {name: weight.to(dtype) for name, weight in hf_weights(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
