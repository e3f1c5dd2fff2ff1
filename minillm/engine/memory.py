"""How much memory the block pool may take, when nobody says; and the cache that is made of it.

Chapters 05 and 14. On a GPU the pool gets what the weights left, less a share for activations: every block more is a
request that need not wait. On a CPU the memory belongs to others as well, so the pool stays modest.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import replace

import torch

from minillm.cache.block_pool import BlockPool
from minillm.cache.paged import PagedCache, cache_bytes
from minillm.cache.quantized_paged import QuantizedPagedCache, block_bytes, paged_format, recent_bytes
from minillm.engine.options import EngineOptions
from minillm.errors import ParamsError, illegal
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.weights import device_memory

GPU_SHARE = 0.85  # of what is free now; the rest is for activations
CPU_SHARE = 0.25  # of the machine's memory
CPU_MOST = 4 << 30  # bytes


def kv_budget(device: torch.device) -> int:
    """Bytes for K and V on this device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system says
        memory = 8 << 30
    return min(CPU_MOST, int(memory * CPU_SHARE))


def blocks_in(memory: int, config: ModelConfig, options: EngineOptions, dtype: torch.dtype) -> int:
    """Blocks of K and V that fit `memory` bytes, all layers; of a quantised cache after its unrounded blocks."""
    size = options.block_size
    if options.kv_cache_dtype == "auto":
        return memory // cache_bytes(config, 1, size, dtype)
    form = paged_format(options.kv_cache_dtype, size)
    free = memory - recent_bytes(config, form, size, options.max_num_seqs, dtype)
    return max(0, free) // block_bytes(config, form, size)


def check_room(options: EngineOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse blocks, of options that are resolved, which the memory could not hold if it were empty."""
    taken = 0
    for name, where in (("num_blocks", device), ("num_host_blocks", torch.device("cpu"))):
        blocks, total = getattr(options, name), device_memory(where)
        if total is None or not blocks:
            continue
        memory = f"the {total / 1e9:.1f} GB of memory of {where}"
        most = blocks_in(total, config, options, dtype)
        if most == 0:
            sizes = range(1, min(options.block_size, total))
            largest = bisect_left(
                sizes, True, key=lambda n: not blocks_in(total, config, replace(options, block_size=n), dtype)
            )
            raise ParamsError(illegal("block_size", options.block_size, f"at most {largest} tokens fit {memory}"))
        if blocks > most - taken:
            besides = f" besides num_blocks={taken}" if taken else ""
            legal = f"at most {max(0, most - taken)} blocks of {options.block_size} tokens fit {memory}{besides}"
            raise ParamsError(illegal(name, blocks, legal))
        taken = blocks if device.type == "cpu" else 0


def make_cache(model: Decoder, options: EngineOptions, pool: BlockPool) -> PagedCache | QuantizedPagedCache:
    """The cache that these options, resolved, ask for."""
    where = dict(dtype=model.dtype, device=model.device, host_blocks=options.num_host_blocks)
    if options.kv_cache_dtype == "auto":
        return PagedCache(model.config, options.num_blocks, options.block_size, attention=options.attention, **where)
    form = paged_format(options.kv_cache_dtype, options.block_size)
    return QuantizedPagedCache(
        model.config, pool, form, attention=options.attention, sequences=options.max_num_seqs, **where
    )
