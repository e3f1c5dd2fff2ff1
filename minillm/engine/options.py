"""Everything that can be set about the engine, checked before anything is allocated.

Chapters 04 to 09. Names follow vLLM where it has one. `LLM` passes its options here; whoever drives the engine or the
scheduler alone makes one directly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral

from minillm.cache.block_pool import blocks_for
from minillm.errors import ParamsError, illegal
from minillm.model.config import ModelConfig

CHOICES = {
    "enable_prefix_caching": ("off", "hash", "radix"),
    "preemption": ("recompute", "swap"),
    "policy": ("fcfs", "priority"),
    "victim": ("least_urgent", "fewest_tokens"),
    "attention": ("auto", "naive", "sdpa", "triton", "cpp"),
    "kv_cache_dtype": ("auto", "int8", "fp8", "int4", "int2"),
}
AT_LEAST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "num_blocks": 1,
    "num_host_blocks": 0,
    "ageing": 1,
    "headroom": 0,
    "lookahead": 1,
    "patience": 0,
}
OPTIONAL = ("max_num_batched_tokens", "num_blocks", "num_host_blocks")


@dataclass(frozen=True)
class EngineOptions:
    max_num_seqs: int = 32  # requests that run at once
    max_num_batched_tokens: int | None = None  # tokens a step; None: 512, more where the other options need it
    block_size: int = 16  # tokens a KV block
    num_blocks: int | None = None  # None: by memory
    num_host_blocks: int | None = None  # room to swap to; None: as many as on the device, if preemption is "swap"
    enable_prefix_caching: str = "off"  # "off", "hash", "radix"
    enable_chunked_prefill: bool = True  # a prompt may be computed in pieces, beside decodes
    prefill_first: bool = False  # prompts before decodes: earlier first tokens, stalled streams
    preemption: str = "recompute"  # or "swap" to host memory
    victim: str = "least_urgent"  # or "fewest_tokens"
    policy: str = "fcfs"  # or "priority"
    ageing: int = 64  # steps of waiting that are worth one level of priority
    headroom: int = 1  # blocks that must stay free for each running request when another one is admitted
    lookahead: int = 1  # waiting requests among which the one with the longest cached prefix goes first
    patience: int = 16  # steps in which the first of the queue may be passed over for that
    attention: str = "auto"  # "naive", "sdpa", "triton", "cpp"; "auto": triton on a GPU, sdpa elsewhere
    kv_cache_dtype: str = "auto"  # the model's, or "int8", "fp8", "int4", "int2" (chapter 14)
    cuda_graphs: bool = False  # replay decode steps (chapter 10); where there is no CUDA, says why and runs as before
    keep_log: bool = False  # keep a StepLog of every step

    def __post_init__(self) -> None:
        for name, values in CHOICES.items():
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in values:
                legal = "must be " + " or ".join(f'"{value}"' for value in values)
                raise ParamsError(illegal(name, getattr(self, name), legal))
        for name in ("enable_chunked_prefill", "prefill_first", "cuda_graphs", "keep_log"):
            if not isinstance(getattr(self, name), bool):
                raise ParamsError(illegal(name, getattr(self, name), "must be True or False"))
        for name, least in AT_LEAST.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise ParamsError(illegal(name, value, f"must be a whole number of at least {least}"))
            object.__setattr__(self, name, int(value))  # the dataclass is frozen; this only normalises NumPy's
        self._check_mixes()

    def _check_mixes(self) -> None:
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < self.max_num_seqs:
            legal = f"must be at least max_num_seqs={self.max_num_seqs}, so that all who run can decode in one step"
            raise ParamsError(illegal("max_num_batched_tokens", tokens, legal))
        if self.num_host_blocks and self.preemption != "swap":
            raise ParamsError(illegal("num_host_blocks", self.num_host_blocks, 'is used with preemption="swap" only'))
        if self.lookahead > 1 and self.enable_prefix_caching == "off":
            raise ParamsError(illegal("lookahead", self.lookahead, "needs a prefix cache: set enable_prefix_caching"))
        if self.kv_cache_dtype != "auto" and (self.attention in ("triton", "cpp") or self.cuda_graphs):
            what = "cuda_graphs=True" if self.cuda_graphs else f'attention="{self.attention}"'
            legal = (
                f'must be "auto" with {what}: those read the blocks as floats; use attention="sdpa" without graphs'
            )
            raise ParamsError(illegal("kv_cache_dtype", self.kv_cache_dtype, legal))

    def resolved(self, config: ModelConfig, most_blocks: int) -> EngineOptions:
        """The same with no None left. most_blocks: as many as there is memory for."""
        tokens, blocks, host = self.max_num_batched_tokens, self.num_blocks, self.num_host_blocks
        if tokens is None:
            tokens = max(512, self.max_num_seqs, 0 if self.enable_chunked_prefill else config.max_length)
        elif not self.enable_chunked_prefill and tokens < config.max_length:
            legal = f"must hold a whole prompt (context {config.max_length}), or set enable_chunked_prefill=True"
            raise ParamsError(illegal("max_num_batched_tokens", tokens, legal))
        if blocks is None:
            wanted = self.max_num_seqs * blocks_for(config.max_length, self.block_size)
            blocks = max(1, min(wanted, most_blocks))
        if host is None:
            host = blocks if self.preemption == "swap" else 0
        return replace(self, max_num_batched_tokens=tokens, num_blocks=blocks, num_host_blocks=host)
