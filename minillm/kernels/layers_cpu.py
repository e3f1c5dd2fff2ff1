"""All layers of a decoder step as one call on a CPU (`layers.cpp`): what is left to do when every kernel is fast.

Chapter 10. A compiled step still comes back to Python for each product and for attention, 90 times for 30 layers, and
each time the weights of a layer have swept the caches of what Python needs. A GPU has the same trouble with launches:
there a CUDA graph replays them, or a megakernel holds them all (Mirage Persistent Kernel, Cheng et al. 2025,
arXiv:2512.22219). Here one call does a whole step, prompts and decodes mixed, over the blocks of a paged cache.

Bytes: the weights, once for every 120 rows, and K and V that the rows see. FLOPs: as the model's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.cpp import DecoderShape, DecoderStep, Layer, library
from minillm.kernels.launch import check_ids
from minillm.kernels.linear_cpu import TiledLinear, TiledMLP, tile_linears
from minillm.kernels.paged_decode_cpu import check_pool
from minillm.kernels.paged_prefill_cpu import check_stretches
from minillm.model.compiled import CompiledDecoder
from minillm.model.decoder import Block, Decoder, KVCache, RMSNorm


@dataclass
class InPlace:
    """A step of a paged cache, whose tokens are each a row by itself, or in a stretch of their request.

    keys, values: [layers, blocks, block_size, kv_heads, dim]. All others int64. slots: [tokens], where K and V go.
    tables: [requests, max_blocks], block ids. places, requests, lengths: [rows], which token a row is, whose table it
    reads, and how many tokens of it. stretches: [n, 4], of each: its first token, how many, its request, and how many
    tokens that has before them.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    tables: Tensor
    places: Tensor
    requests: Tensor
    lengths: Tensor
    stretches: Tensor


class WholeStep:
    """The layers of a tiled decoder, for steps of a cache that can tell its step as an `InPlace`."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.tensors = [layer_tensors(block) for block in model.layers]
        config, layer = model.config, model.layers[0].attn.layer
        sizes = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
        numbers = (config.norm_eps, layer.scale, layer.softcap or 0.0)
        narrow = self.tensors[0]["qkv"].dtype == torch.bfloat16
        self.shape = DecoderShape(*sizes, config.intermediate_size, *numbers, narrow)
        self.layers = (Layer * config.num_layers)()
        for into, block, tensors in zip(self.layers, model.layers, self.tensors):
            into.window = block.attn.layer.window or 0
            for name, tensor in tensors.items():
                setattr(into, name, tensor.data_ptr())

    def hidden(self, tokens: Tensor, positions: Tensor | None, cache: KVCache | None) -> Tensor | None:
        """As `Decoder.hidden`; None, and nothing done, if the cache cannot."""
        step = cache.in_place() if hasattr(cache, "in_place") else None
        model, shape = self.model, self.shape
        if step is None or (step.keys.dtype == torch.bfloat16) != shape.is_bfloat16:
            return None
        positions = cache.positions(tokens.shape) if positions is None else positions
        if positions.shape != tokens.shape:
            raise ParamsError(illegal("positions", list(positions.shape), f"must be {list(tokens.shape)}, as tokens"))
        x = model.embed(tokens.flatten())  # [tokens, hidden]
        if model.config.embedding_scale != 1.0:
            x = x * torch.tensor(model.config.embedding_scale, dtype=x.dtype)
        dtype, x = x.dtype, x.float()
        check(step, len(x), shape)
        cos, sin = model.rope_tables(positions.flatten())[0]  # [tokens, 1, dim]
        normed, attended = torch.empty_like(x), x.new_empty(len(x), shape.heads, shape.dim)
        qkv = x.new_empty(len(x), shape.heads + 2 * shape.kv_heads, shape.dim)
        sizes = (len(x), *step.keys.shape[1:3], step.tables.shape[1], len(step.places), len(step.stretches))
        paged = (step.keys, step.values, step.slots, step.tables)
        rows = (step.places, step.requests, step.lengths, step.stretches)
        pointers = (each.data_ptr() for each in (x, cos, sin, *paged, *rows, normed, qkv, attended))
        told = DecoderStep(*sizes, *pointers)
        library().decoder_layers(ctypes.byref(shape), self.layers, ctypes.byref(told), torch.get_num_threads())
        return model.norm(x.to(dtype)).unflatten(0, tokens.shape)


def layer_tensors(block: Block) -> dict[str, Tensor]:
    """By the names of `Layer`; those that are not there are left out."""
    attn, mlp = block.attn, block.mlp
    norms = {"norm": block.attn_norm, "mlp_norm": block.mlp_norm, "q_norm": attn.q_norm, "k_norm": attn.k_norm}
    found = {name: norm.weight.detach().float().contiguous() for name, norm in norms.items() if norm is not None}
    if attn.qkv.bias is not None:
        found["qkv_bias"] = attn.qkv.bias.detach().float().contiguous()
    products = {"qkv": attn.qkv.packed, "out": attn.out.packed, "gate_up": mlp.gate_up, "down": mlp.down}
    return found | products


def whole_step(model: Decoder) -> WholeStep | None:
    """None, if the model has something that `layers.cpp` does not know."""
    config, infos = model.config, [block.attn.layer for block in model.layers]
    plain = config.positions == "rope" and not config.local_layers and not config.post_norms
    alike = len({(info.scale, info.softcap) for info in infos}) == 1
    complete = [info.index for info in infos] == list(range(config.num_layers))  # not some layers of a larger model
    return WholeStep(model) if plain and alike and complete and all(map(knows, model.layers)) else None


def knows(block: Block) -> bool:
    attn = block.attn
    norms = (block.attn_norm, block.mlp_norm, attn.q_norm, attn.k_norm)
    tiled = all(isinstance(each, TiledLinear) for each in (attn.qkv, attn.out)) and isinstance(block.mlp, TiledMLP)
    return tiled and attn.out.bias is None and all(norm is None or type(norm) is RMSNorm for norm in norms)


def compile_decoder(model: Decoder) -> CompiledDecoder:
    """The fastest that this library has on a CPU. Takes the model over."""
    return CompiledDecoder(model, pack=tile_linears, whole=whole_step)


def check(step: InPlace, tokens: int, shape: DecoderShape) -> None:
    """ParamsError, if the kernel would read or write memory that is not these tensors'."""
    for name, x in (("keys", step.keys), ("values", step.values)):
        legal = f"must be [{shape.layers}, blocks, block_size, {shape.kv_heads}, {shape.dim}], contiguous"
        fits = x.dim() == 5 and (len(x), *x.shape[3:]) == (shape.layers, shape.kv_heads, shape.dim)
        if not fits or not x.is_contiguous():
            raise ParamsError(illegal(f"{name}.shape", list(x.shape), legal))
    check_pool(step.keys[0], step.values[0])
    _, blocks, size = step.keys.shape[:3]
    requests, widest = step.tables.shape
    for name, wanted, limit in (
        ("slots", (tokens,), blocks * size),
        ("tables", (requests, widest), blocks),
        ("places", (len(step.places),), tokens),
        ("requests", (len(step.places),), requests),
        ("lengths", (len(step.places),), widest * size + 1),
    ):
        x = getattr(step, name)
        if x.shape != wanted or x.dtype != torch.long or x.device.type != "cpu" or not x.is_contiguous():
            legal = f"must be {list(wanted)} of int64 on a CPU, contiguous"
            raise ParamsError(illegal(name, f"{list(x.shape)} of {x.dtype} on {x.device}", legal))
        check_ids(name, x, limit)
    check_stretches(step.stretches, tokens, requests, widest * size)
