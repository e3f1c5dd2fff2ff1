"""The working memory of one forward, in closed form: which tensors of the decoder are alive at once, phase by phase.

Chapter 03. Without gradients a tensor lives until its last reader has run, so the peak is the largest of a few
moments, not the sum over layers. The terms below follow `model/decoder.py` line by line; `measure/peak.py` holds them
against the memory that was really taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.measure.counts import whole
from minillm.model.config import ModelConfig

ATTENTION = ("sdpa", "flash", "naive")


@dataclass(frozen=True)
class Forward:
    """One forward: `batch` sequences of `new` tokens each, after `context` stored ones.

    scored: tokens a sequence that pass the head: 1 in generation, `new` where the model is called directly.
    attention: "sdpa" as `minillm.model.attention` runs today (a chunk after stored tokens builds its mask as a
    tensor), "flash" where the kernel masks by itself, "naive" where the scores are written to memory. A soft cap
    makes "sdpa" naive. padded: the batch has padding on its left, so every row needs a mask of its own.
    """

    batch: int
    new: int
    context: int = 0
    scored: int = 1
    attention: str = "sdpa"
    padded: bool = False

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION:
            raise ValueError(f"attention={self.attention!r} must be one of {', '.join(ATTENTION)}")
        for name, least in (("batch", 1), ("new", 1), ("context", 0)):
            whole(name, getattr(self, name), least)
        whole("scored", self.scored, 0, self.new)

    @property
    def tokens(self) -> int:
        return self.batch * self.new

    @property
    def length(self) -> int:
        return self.context + self.new


def buffer_bytes(config: ModelConfig, run: Forward, phase: str = "mlp") -> int:
    """What lives through all layers: token ids and positions (int64), cos and sin (float32). At the head: the ids."""
    if phase == "head":
        return 8 * run.tokens
    tables = 0
    if config.positions == "rope":
        tables = 2 * run.tokens * config.head_dim * 4 * (2 if config.local_layers else 1)
    return tables + 8 * (run.tokens + (run.tokens if run.padded else run.new))


def phase_bytes(config: ModelConfig, run: Forward, dtype_bytes: int = 4) -> dict[str, int]:
    """Bytes of activations alive at each phase's worst moment; the largest is the peak. Buffers are not in it."""
    n, e = run.tokens, dtype_bytes
    hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_heads
    width = heads * config.head_dim
    qk = (heads + config.num_kv_heads) * config.head_dim
    qkv = qk + config.num_kv_heads * config.head_dim
    turned = qk if config.positions == "rope" or config.qk_norm else 0  # else q and k are views of the qkv tensor
    entered = 2 * n * hidden * e + n * qkv * e  # the stream x, its normed copy, and qkv
    phases = {
        # x * cos and the sum are float32 whatever x is; the rolled copy is as x
        "rotate": entered + (n * qk * e if config.qk_norm else 0) + n * qk * (8 + e),
        "attention": entered + n * turned * e + attention_bytes(config, run, e),
        "output projection": entered + n * (turned + width + hidden) * e,
        "mlp": 3 * n * hidden * e + n * _mlp_elements(ffn, hidden, config.gated_mlp) * e,
        "head": n * hidden * e + run.batch * run.scored * config.vocab_size * e * (3 if config.logit_softcap else 1),
    }
    if config.positions != "rope":
        del phases["rotate"]
    return phases


def _mlp_elements(ffn: int, hidden: int, gated: bool) -> int:
    """Per token, beside the old stream, the new one and its normed copy.

    Gated: gate and up (2 ffn), act(gate), the product; then the product and the output. Plain: up, act(up), output.
    """
    return max(4 * ffn, 3 * ffn + hidden) if gated else 2 * ffn + hidden


def attention_bytes(config: ModelConfig, run: Forward, dtype_bytes: int = 4) -> int:
    """Output of attention and what its kernel needs: O(n) when fused, O(n^2) when scores or masks are written out."""
    e = dtype_bytes
    output = run.tokens * config.num_heads * config.head_dim * e
    pairs = run.new * run.length
    windows = [config.window(layer) for layer in range(config.num_layers)]
    windowed = any(window is not None and window < run.length for window in windows)
    whole = run.context == 0 and not run.padded and not windowed
    decode = run.new == 1 and not run.padded and not windowed
    masks = 0 if decode or run.attention == "flash" else pairs * (run.batch if run.padded else 1)
    if run.attention == "naive" or (run.attention == "sdpa" and config.attention_softcap is not None):
        scores = run.batch * config.num_heads * pairs
        return scores * max(3 * e, 2 * e + 4) + masks  # raw, capped and scaled; later raw, float32 softmax, its copy
    log_sums = 4 * run.batch * config.num_heads * run.new  # float32 log-sum-exp, one a query
    return output + log_sums + (0 if whole else masks * (1 + e))  # a bool mask, and its copy in x's dtype


def peak_phase(config: ModelConfig, run: Forward, dtype_bytes: int = 4) -> tuple[str, int]:
    """(name, bytes) of the phase that, with the buffers alive then, needs most; the bytes are without the buffers."""
    phases = phase_bytes(config, run, dtype_bytes)
    name = max(phases, key=lambda phase: phases[phase] + buffer_bytes(config, run, phase))
    return name, phases[name]


def forward_bytes(config: ModelConfig, run: Forward, dtype_bytes: int = 4) -> int:
    """Peak working memory of one forward, buffers included: everything but weights and KV."""
    name, peak = peak_phase(config, run, dtype_bytes)
    return peak + buffer_bytes(config, run, name)
