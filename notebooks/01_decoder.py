# %% [markdown]
# # 01 The decoder: one request, from token ids to the next token
#
# A large language model (LLM, 大语言模型) is one function: token ids in, one score for each word of its vocabulary
# out. This chapter writes that function from tensors in under 40 lines, proves it equal to the library's on real
# weights, says where its parameters, its arithmetic and its bytes are, and shows the last step that most people
# skip: how scores become a token.
#
# **The question an interviewer asks.** "Draw a Llama-style decoder. Where are its parameters, its FLOPs and its
# bytes? And what exactly do temperature and top-p do?"
#
# You will be able to
# - write every block (RMSNorm, rotary positions, grouped-query attention, SwiGLU, sampling) and say how to test it;
# - compute parameters, FLOPs per token and bytes per token of a 7B, an 8B and a 70B model on a whiteboard;
# - say which sampling setting keeps which tokens, and what each of them breaks.
#
# 45 minutes to read. Chapter 00 gave the words FLOP, roofline, prefill (预填充) and decode (解码).

# %%
import inspect
import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from minillm.lab import explore, is_fast, pick, plots, predict, predictions, recorded, reveal, units
from minillm.model import hub
from minillm.model.attention import attend_now
from minillm.model.attention import attention as library_attention
from minillm.model.config import ModelConfig, RopeScaling
from minillm.model.decoder import Attention, Decoder
from minillm.model.rope import cos_sin, inverse_frequencies, rotate
from minillm.model.shapes import known_shapes
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model, random_model

best = "smollm2-135m" if hub.is_available("smollm2-135m") else "tiny"
name = pick(full=best, quick="tiny")
model, tokenizer = load_model(name, dtype=torch.float32), load_tokenizer(name)
config, device = model.config, model.device
torch.set_grad_enabled(False)

text = (hub.ASSETS / "heldout.txt").read_text(encoding="utf-8")[5000:8000]  # a book the tiny model never saw
ids = torch.tensor([tokenizer.encode(text)[: pick(193, 129)]], device=device)  # [1, time]
print(f"model: {name}, {config.num_layers} layers, width {config.hidden_size}, vocabulary {config.vocab_size}")

# %% [markdown]
# ## The waste, measured: a decoder that is almost right
#
# A wrong decoder does not crash. It loads, it answers, its text may even read well, and every later measurement in
# this course would be made on a broken model. So before we build one, we break one, a block at a time, on real
# weights and real text. The score is the loss (损失): the mean of -log p(next token), in nats a token. Lower is
# better; exp(loss) is the perplexity (困惑度).


# %%
class Attends:
    """A cache that stores nothing: a way to replace the attention of the library's decoder from outside."""

    def __init__(self, attend):
        self.attend = attend  # attend(layer, q, k, v), q [batch, time, heads, dim]

    def positions(self, shape):
        return torch.arange(shape[-1], device=device).expand(shape)


def loss(positions=None, attend=None):
    logits = model(ids[:, :-1], positions, Attends(attend) if attend else None)  # [1, time, vocab]
    return F.cross_entropy(logits[0], ids[0, 1:]).item()


@contextmanager
def edited(ending, change):
    """The model with each parameter of that name changed, and put back afterwards."""
    chosen = [p for n, p in model.named_parameters() if n.endswith(ending)]
    saved = [p.clone() for p in chosen]
    for p in chosen:
        p.copy_(change(p))
    yield
    for p, before in zip(chosen, saved):
        p.copy_(before)


def wrong_groups(layer, q, k, v):  # query head h must read KV head h // group; tiling makes it h % kv_heads
    return attend_now(layer, q, *(t.repeat(1, 1, q.shape[-2] // k.shape[-2], 1) for t in (k, v)))


def no_mask(layer, q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [batch, heads, time, dim]
    return F.scaled_dot_product_attention(q, k, v, scale=layer.scale, enable_gqa=True).transpose(1, 2)


def interleave(w):  # rows of the fused qkv matrix, as if channels 2i and 2i + 1 were a pair
    rows, dim = (config.num_heads + config.num_kv_heads) * config.head_dim, config.head_dim
    pairs = w[:rows].unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).flatten(0, 2)  # [rows, hidden]
    return torch.cat((pairs, w[rows:]))


time = torch.arange(ids.shape[1] - 1, device=device)[None]  # [1, time]
broken = {
    "as it should be": lambda: loss(),
    "all positions 7 too high": lambda: loss(time + 7),
    "positions restart every 32 tokens": lambda: loss(time % 32),
    "every position is 0": lambda: loss(time * 0),
    "other RoPE layout": lambda: loss(),
    "scores not divided by √head_dim": lambda: loss(attend=lambda i, *qkv: attend_now(replace(i, scale=1.0), *qkv)),
    "KV heads in the wrong order": lambda: loss(attend=wrong_groups),
    "RMSNorm gains left out": lambda: loss(),
    "gate and up swapped": lambda: loss(),
    "no causal mask": lambda: loss(attend=no_mask),
}
edits = {
    "other RoPE layout": ("attn.qkv.weight", interleave),
    "RMSNorm gains left out": ("attn_norm.weight", torch.ones_like),
    "gate and up swapped": ("mlp.gate_up.weight", lambda w: w.roll(len(w) // 2, 0)),
}
losses = {}
for label, run in broken.items():
    with edited(*edits[label]) if label in edits else nullcontext():
        losses[label] = run()
colors = [plots.MEANING["ceiling"] if label == "no causal mask" else plots.MEANING["naive"] for label in losses]
colors[0] = plots.MEANING["technique"]
ax = plots.bars(list(losses), list(losses.values()), "", f"loss on held-out text, {name}", colors=colors)
ax.set_xlabel("loss, nats a token")
ax.axvline(losses["as it should be"], color=plots.MEANING["technique"], lw=1, ls=":")
plt.show()

# %% [markdown]
# *Each bar is the same weights with one block changed. Blue is right.*
#
# Three of these bars deserve a second look.
# - **All positions 7 too high** costs nothing: rotary positions enter only as differences. So a test that compares
#   loss cannot find that slip; a test of the cache can.
# - **No causal mask** (因果掩码) is the one that can *lower* the loss: the model reads the answer it is asked to
#   predict. A loss that is too good is a bug until shown otherwise. While generating, there is no future to read,
#   and the model is then not the one that was measured.
# - The rest only make the model worse, some of them by little. Nothing but an equality with an outside oracle finds
#   those. This chapter's rule: **equal logits, block by block**.

# %% [markdown]
# ## Predict: an 8B model on paper
#
# The shape of Llama 3.1 8B: vocabulary 128256, width 4096, 32 layers, 32 query heads and 8 key-value (KV) heads of
# 128 channels, feed-forward width 14336, and a head of its own (not tied to the embedding). Change the formulas to
# yours before you run the cell; `...` stands for "no idea yet".

# %%
vocab, hidden, ffn, layers, heads, kv_heads, dim = 128256, 4096, 14336, 32, 32, 8, 128

per_layer = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 * hidden * ffn + 2 * hidden
predict("01.parameters of the 8B", layers * per_layer + 2 * vocab * hidden + hidden, "params")
predict("01.FLOPs of its next token, empty context", 2 * (8.03e9 - vocab * hidden), "FLOP")
predict("01.KV bytes of one token, bfloat16", 2 * layers * kv_heads * dim * 2, "B")
predict("01.tokens of the vocabulary in a typical 0.9 nucleus", 20)

# %% [markdown]
# The measurements come in "Measure it".
#
# ## The idea, drawn

# %%
fig, ax = plt.subplots(figsize=(7.6, 4.4))
ax.set_xlim(0, 100)
ax.set_ylim(0, 61)
ax.axis("off")


def box(x, y, w, h, label, color, size=8.5):
    ax.add_patch(plt.Rectangle((x, y), w, h, facecolor=color, edgecolor="#333333", lw=1, alpha=0.9))
    ax.text(x + w / 2, y + h / 2, label, ha="center", va="center", fontsize=size)


def arrow(x0, y0, x1, y1):
    ax.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "->", "lw": 1.3, "color": "#333333"})


pale = {"norm": "#E8E8E8", "mix": "#BFDDF2", "mlp": "#C9E9DD", "ends": "#FBE3B5"}
box(0, 25, 10, 10, "embed\n[V, d]", pale["ends"])
ax.text(5, 18, "token ids\n[T]", ha="center", fontsize=8.5)
arrow(5, 22, 5, 24.6)
ax.plot([10, 82], [30, 30], color="#333333", lw=2.4, zorder=0)
ax.text(25, 27.2, "x [T, d]", fontsize=8.5, ha="center")
for x in (38, 71):
    ax.add_patch(plt.Circle((x, 30), 2, facecolor="white", edgecolor="#333333", zorder=3))
    ax.text(x, 30, "+", ha="center", va="center", fontsize=11, zorder=4)
branches = (
    (11, 38, [("norm", "norm"), ("q k v\n[(h + 2 h_kv) dh, d]", "mix"), ("rotate q, k", "mix")]),
    (46, 71, [("norm", "norm"), ("gate, up\n[2 f, d]", "mlp"), ("silu(gate) · up", "mlp")]),
)
for left, plus, parts in branches:
    arrow(left + 8, 30, left + 8, 33.6)
    for y, (label, kind) in zip((34, 41, 49), parts):
        box(left + 0.5, y, 15, 7 if y == 41 else 5, label, pale[kind], 7)
    arrow(left + 15.5, 51.5, plus - 8, 51.5)
    arrow(plus, 41, plus, 32.2)
box(30, 41, 14.5, 13, "softmax(q·k / √dh\n+ mask)·v\n\nout [d, h dh]", pale["mix"], 7)
box(63.5, 41, 14.5, 13, "down\n[d, f]", pale["mlp"], 7)
ax.add_patch(plt.Rectangle((10.8, 25.5), 69, 31.5, fill=False, edgecolor="#6E6E6E", ls="--"))
ax.text(79.5, 58, "× L layers", fontsize=9, ha="right")
ax.text(46, 20.5, "mix tokens (attention), then mix channels (MLP); each adds to x", ha="center", fontsize=9)
box(84, 26, 14, 8, "norm, head\n[V, d]", pale["ends"], 8)
arrow(80, 30, 83.6, 30)
arrow(91, 25.6, 91, 17.5)
ax.text(91, 14, "logits [T, V]", ha="center", fontsize=8.5)
steps = ["penalties", "temperature", "min-p", "top-k", "top-p", "softmax, draw"]
for i, label in enumerate(steps):
    box(84 - 15.5 * i, 3, 14, 6, label, pale["norm"], 8)
    if i:
        arrow(84.2 - 15.5 * (i - 1), 6, 83.6 - 15.5 * i + 14, 6)
arrow(91, 13, 91, 9.3)
ax.text(13.5, 0.2, "next token", ha="center", fontsize=8.5)
plt.show()

# %% [markdown]
# *One residual stream (残差流) `x`; every block reads it through a norm and adds to it. T tokens, width d, h query
# heads and h_kv KV heads of dh channels, feed-forward width f, vocabulary V. Below: from scores to a token.*
#
# ## Build it: a whole decoder in under 40 lines
#
# Four blocks and a loop. One sequence, no batch, no cache; weights are the library's own tensors, by name.


# %%
def rms_norm(x, weight, eps):
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def rope(x, positions, inverse):  # x [time, heads, dim]; inverse [dim / 2]: radians a position
    angle = positions[:, None, None].float() * inverse  # [time, 1, dim / 2]
    a, b = x.chunk(2, -1)  # channel i is paired with channel i + dim / 2
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def attention(q, k, v, scale):  # q [time, heads, dim]; k, v [length, kv_heads, dim]
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))  # [length, heads, dim]
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale  # [heads, time, length]
    future = torch.ones_like(scores[0]).bool().triu(1 + len(k) - len(q))  # [time, length]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)


def swiglu(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)  # [time, ffn] each
    return (F.silu(gate) * up) @ down.T


def decoder(tokens, w, c):  # tokens [time] -> logits [time, vocab]
    positions = torch.arange(len(tokens), device=tokens.device)
    inverse = c.rope_theta ** -(torch.arange(0, c.head_dim, 2, device=tokens.device) / c.head_dim)
    x = w["embed.weight"][tokens]  # [time, hidden]
    for i in range(c.num_layers):
        p = {n.split(".", 2)[2]: t for n, t in w.items() if n.startswith(f"layers.{i}.")}
        y = rms_norm(x, p["attn_norm.weight"], c.norm_eps)
        y = F.linear(y, p["attn.qkv.weight"], p.get("attn.qkv.bias")).unflatten(-1, (-1, c.head_dim))
        q, k, v = y.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)  # [time, heads, dim] each
        if c.qk_norm:
            q, k = (rms_norm(t, p[f"attn.{n}_norm.weight"], c.norm_eps) for n, t in (("q", q), ("k", k)))
        y = attention(rope(q, positions, inverse), rope(k, positions, inverse), v, c.head_dim**-0.5)
        x = x + y.flatten(1) @ p["attn.out.weight"].T  # [time, hidden]
        x = x + swiglu(rms_norm(x, p["mlp_norm.weight"], c.norm_eps), p["mlp.gate_up.weight"], p["mlp.down.weight"])
    return rms_norm(x, w["norm.weight"], c.norm_eps) @ w["head.weight"].T


lines = "".join(inspect.getsource(f) for f in (rms_norm, rope, attention, swiglu, decoder)).split("\n")
print(f"{sum(bool(line.strip()) for line in lines)} lines of code")


# %% [markdown]
# **The proof.** Each block against the library's, then the whole against the library's `Decoder`, on real weights.
# The error is the largest difference over the largest value.


# %%
def relative(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


def say(what, error, limit=1e-4):
    print(f"{what:42s} {'equal' if error < limit else 'DIFFERENT'}   (error under {limit:g}: {error < limit})")


block = model.layers[0]
x = model.embed(ids[0])  # [time, hidden]
say("RMSNorm", relative(rms_norm(x, block.attn_norm.weight, config.norm_eps), block.attn_norm(x)))

inverse, _ = inverse_frequencies(config, device=device)
q, k, v = (
    torch.randn(len(x), h, config.head_dim, device=device) for h in (config.num_heads, *[config.num_kv_heads] * 2)
)
positions = torch.arange(len(x), device=device)
say("rotary positions", relative(rope(q, positions, inverse), rotate(q, *cos_sin(positions, inverse))))
say("  a norm is left as it was", relative(rope(q, positions, inverse).norm(dim=-1), q.norm(dim=-1)))
shifted = [
    (rope(q, positions + s, inverse) * rope(q.flip(0), positions.flip(0) + s, inverse)).sum(-1) for s in (0, 999)
]
say("  q·k depends on the distance alone", relative(*shifted), 1e-3)

batched = [t.transpose(0, 1)[None] for t in (q, k, v)]  # [1, heads, time, dim]
expected = library_attention(*batched, scale=config.scale)[0].transpose(0, 1)
say("grouped-query attention", relative(attention(q, k, v, config.scale), expected))
say("  a chunk: the last 5 queries of all keys", relative(attention(q[-5:], k, v, config.scale), expected[-5:]))
say("SwiGLU", relative(swiglu(x, block.mlp.gate_up.weight, block.mlp.down.weight), block.mlp(x)))
for label in dict.fromkeys((name, "tiny")):
    whole = model if label == name else load_model(label, dtype=torch.float32)
    some = ids[0] % whole.config.vocab_size  # [time]
    say(
        f"the whole decoder, {label}", relative(decoder(some, whole.state_dict(), whole.config), whole(some[None])[0])
    )

# %% [markdown]
# The same lines are MHA, MQA and GQA, Qwen2 and Qwen3: only the settings differ.
#
# | name | KV heads | who |
# |---|---|---|
# | multi-head attention (MHA, 多头注意力) | as many as query heads | Llama 2 7B, GPT-2 |
# | grouped-query attention (GQA, 分组查询注意力) | fewer, each for a group of query heads | Llama 3, Mistral, Qwen |
# | multi-query attention (MQA, 多查询注意力) | one | Falcon 7B, PaLM |
#
# **QKV bias** (Qwen2) adds a vector after the projection. **QK-norm** (Qwen3) puts an RMSNorm on each head's q and k,
# so that no score can grow without limit. **Tied embeddings** (权重共享) use one matrix to look up and to score.

# %%
small = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=8,
    num_kv_heads=8,
    head_dim=16,
    max_length=64,
)
variants = {
    "MHA: 8 KV heads": {},
    "GQA: 2 KV heads": {"num_kv_heads": 2},
    "MQA: 1 KV head": {"num_kv_heads": 1},
    "QKV bias (Qwen2)": {"num_kv_heads": 2, "qkv_bias": True},
    "QK-norm (Qwen3)": {"num_kv_heads": 2, "qk_norm": True},
    "tied embeddings": {"num_kv_heads": 2, "tie_embeddings": True},
}
tokens = torch.arange(40) % 97
for label, changes in variants.items():
    other = random_model(small.with_changes(**changes), torch.float32, torch.device("cpu"), seed=1)
    for parameter in other.parameters():
        if parameter.dim() == 1:  # biases and gains that would be seen if they were left out
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) / 2)
    say(label, relative(decoder(tokens, other.state_dict(), other.config), other(tokens[None])[0]))

# %% [markdown]
# Two implementations by one author can share one mistake. So a third: Hugging Face transformers, on the same files
# (skipped where it is not installed; `tests/test_families.py` does it for every family, chunk by chunk through the
# cache as well).

# %% tags=["nbval-ignore-output"]
if is_fast() or find_spec("transformers") is None or not hub.is_available("tiny"):
    print("not compared here (fast mode, or transformers is not installed)")
else:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    outside = AutoModelForCausalLM.from_pretrained(hub.resolve("tiny"), dtype=torch.float32)
    ours = load_model("tiny", dtype=torch.float32, device="cpu")
    few = torch.arange(3, 99)[None]  # [1, 96]
    say(
        "tiny, the small decoder against transformers",
        relative(decoder(few[0], ours.state_dict(), ours.config), outside(few).logits[0]),
    )

# %% [markdown]
# ### Longer than trained: five ways to scale rotary positions
#
# Rotary position embedding (RoPE, 旋转位置编码) turns channel pair i by `position · theta^(-2i / dim)`: the first
# pairs turn fast and tell neighbours apart, the last ones turn slowly and tell far places apart. A context s times
# as long as the trained one shows the slow pairs angles that they never saw. All cures slow pairs down; they differ
# in which.
#
# | kind | what it does |
# |---|---|
# | linear (position interpolation) | all pairs s times slower; neighbours become harder to tell apart |
# | NTK-aware | a larger base theta: the fastest pair keeps its speed, the slowest is exactly s times slower |
# | YaRN | keeps pairs that turn often within the trained length, slows the others, a ramp between; cos, sin grow |
# | llama3 | the same idea, the ramp over the number of turns |


# %%
def frequencies(theta, dim, s):
    """Radians a position for each channel pair, [dim / 2], under a scaling `s`."""
    i = torch.arange(0, dim, 2)
    plain = theta ** -(i / dim)
    turns = s.original_length * plain / (2 * math.pi)  # within the trained length
    if s.kind == "linear":
        return plain / s.factor
    if s.kind == "ntk":
        return (theta * s.factor ** (dim / (dim - 2))) ** -(i / dim)
    if s.kind == "llama3":
        keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    elif s.kind == "yarn":
        low, high = (dim * math.log(s.original_length / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (32, 1))
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        keep = 1 - ((i / 2 - low) / (high - low)).clamp(0, 1)
    else:
        return plain
    return keep * plain + (1 - keep) * plain / s.factor


trained, factor = 8192, 8.0
base = small.with_changes(head_dim=128, rope_theta=500000.0)
found = {}
for kind in ("default", "linear", "ntk", "yarn", "llama3"):
    scaling = RopeScaling(kind, factor, trained, 1.0, 4.0)
    found[kind] = frequencies(500000.0, 128, scaling)
    say(
        f"frequencies, {kind}", relative(found[kind], inverse_frequencies(base.with_changes(rope_scaling=scaling))[0])
    )

fig, ax = plots.figure()
for color, (kind, inverse_of) in zip(plots.PALETTE, found.items()):
    ax.plot(found["default"] / inverse_of, color=color, label=kind, lw=2.4 if kind == "default" else 1.6)
ax.axvline(int((trained * found["default"] < 2 * math.pi).int().argmax()), color=plots.GREY, ls=":", lw=1)
ax.text(0.72, 0.06, "right of the line: not one\nfull turn in training", transform=ax.transAxes, fontsize=8)
ax.set_xlabel("channel pair (fast on the left, slow on the right)")
ax.set_ylabel("times slower than plain RoPE")
ax.legend()
plt.show()

# %% [markdown]
# *How much each kind slows each channel pair down, for a context 8 times the trained one (theta 500000, 128
# channels).*
#
# ## The library's version
#
# `minillm/model/decoder.py` is the same decoder with a batch in front. Its attention:

# %%
print(inspect.getsource(Attention))
print(inspect.getsource(rotate))

# %% [markdown]
# What it adds, and why:
# - **One fused qkv matrix, one fused gate/up matrix.** Same bytes, fewer launches, one read of `x`.
# - **`attend` is an argument.** The layer does not know whether keys and values are contiguous, paged, quantised or
#   on another device. Every cache from chapter 02 on comes in here.
# - **Rotation tables in float32**, computed once a call and shared by all layers. In bfloat16 only
#   every second position above 256 has a value of its own.
# - **`rotate` on q and k together**, by one roll and one fused multiply-add.
# - **torch's fused attention**, which never repeats K and V in memory, with the mask of the last `time` of `length`
#   keys: one rule for prefill, for a chunk of a prompt, and for decode.
#
# A family is a setting, not a subclass: `minillm/model/families.py` and one dataclass.

# %%
shapes = known_shapes()
rows = [("model", "heads / KV", "tied", "QKV bias", "QK-norm", "window", "soft cap", "positions")]
for label, c in shapes.items():
    window = next((w for w in c.windows if w), None)
    scaled = c.positions if c.positions != "rope" else f"rope {c.rope_theta:g} {c.rope_scaling.kind}"
    flags = ["yes" if flag else "" for flag in (c.tie_embeddings, c.qkv_bias, c.qk_norm)]
    rows.append(
        (label, f"{c.num_heads} / {c.num_kv_heads}", *flags, str(window or ""), str(c.logit_softcap or ""), scaled)
    )
for row in rows:
    print("".join(cell.ljust(width) for cell, width in zip(row, (14, 12, 6, 10, 9, 8, 10, 20))).rstrip())

# %% [markdown]
# ## Measure it: where the parameters, the FLOPs and the bytes are
#
# First the parameters, by formula, against the library's decoder built on torch's `meta` device: true shapes, no
# memory.

# %%
from minillm.measure.counts import forward_counts, kv_bytes_per_token, parameters  # noqa: E402

with torch.device("meta"):
    real = sum(p.numel() for p in Decoder(shapes["llama-3.1-8b"]).parameters())
reveal("01.parameters of the 8B", real)

chosen = {label: shapes[label] for label in ("smollm2-135m", "llama-2-7b", "llama-3.1-8b", "llama-3.1-70b")}
chosen = {**({} if name in chosen else {name: config}), **chosen}
groups = {"embedding": plots.ORANGE, "qkv": plots.BLUE, "out": plots.SKY, "mlp": plots.GREEN, "head": plots.RED}
fig, ax = plots.figure(height=2.8)
for y, c in enumerate(chosen.values()):
    parts, left = parameters(c), 0.0
    total = sum(parts.values())
    for part, color in groups.items():
        share = parts[part] / total
        ax.barh(y, share, left=left, color=color, label=None if y else part)
        if share > 0.06:
            ax.text(left + share / 2, y, f"{share:.0%}", ha="center", va="center", fontsize=8, color="white")
        left += share
ax.set_yticks(
    range(len(chosen)),
    [f"{label}\n{units.show(sum(parameters(c).values()), 'params')}" for label, c in chosen.items()],
)
ax.invert_yaxis()
ax.grid(False)
ax.set_xlabel("share of all parameters (norms are too few to see)")
ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5)
plt.show()

# %% [markdown]
# *In a large model the MLP holds most of the weights; in a small one with a large vocabulary the embedding does,
# which is why small models tie it to the head.*
#
# Then FLOPs and bytes of one decode step. Each weight but the embedding's is used once a token, so a token costs 2
# FLOPs a parameter; attention adds `4 · layers · heads · head_dim` FLOPs for each token of context. Bytes: each
# weight once, and the KV cache (键值缓存) once.

# %%
lengths = [2**i for i in range(9, 19)]
fig, axes = plots.figure(1, 2, width=8.0, height=3.2)
c = shapes["llama-3.1-8b"]
counts = [forward_counts(c, 1, n - 1, dtype_bytes=2) for n in lengths]
reveal("01.FLOPs of its next token, empty context", forward_counts(c, 1, 0).total_flops)
reveal("01.KV bytes of one token, bfloat16", kv_bytes_per_token(c, 2))
axes[0].loglog(lengths, [n.total_flops - n.flops["attention"] for n in counts], color=plots.GREEN, label="weights")
axes[0].loglog(lengths, [n.flops["attention"] for n in counts], color=plots.BLUE, label="attention")
axes[0].set_title("8B: FLOPs of one token")
plots.unit_axis(axes[0].yaxis, "FLOP", "")
styles = {"llama-2-7b": plots.ORANGE, "llama-3.1-8b": plots.GREEN, "llama-3.1-70b": plots.BLUE}
for label, color in styles.items():
    many = [forward_counts(shapes[label], 1, n - 1, dtype_bytes=2) for n in lengths]
    axes[1].loglog(lengths, [n.total_weight_bytes for n in many], color=color, ls="--", lw=1.2)
    axes[1].loglog(lengths, [n.kv_read for n in many], color=color, label=label)
axes[1].set_title("bytes of one step: KV (line), weights (dashed)")
plots.unit_axis(axes[1].yaxis, "B", "")
for ax in axes:
    ax.set_xlabel("context, tokens")
    ax.legend()
plt.show()
for label in styles:
    c = shapes[label]
    w, kv = forward_counts(c, 1, 0, dtype_bytes=2).total_weight_bytes, kv_bytes_per_token(c, 2)
    flat, per_token = forward_counts(c, 1, 0).total_flops, 4 * c.num_layers * c.num_heads * c.head_dim
    print(f"{label:14s} weights {units.show(w, 'B'):8s} KV {kv // 1024:4d} KiB a token; KV passes the weights at "
          f"{w / kv:,.0f} tokens, attention FLOPs pass the rest at {flat / per_token:,.0f}")  # fmt: skip

# %% [markdown]
# *Left: attention's arithmetic passes the weights' only at tens of thousands of tokens. Right: what a step must read.
# The 7B model without grouped queries reads four times the KV of the 8B one, at the same width and depth.*
#
# Does the time of a real step follow the bytes? One token through each part of all layers, in turn with the whole
# step (pairs in alternation, as chapter 00 asks), beside the share that the bytes predict.

# %% tags=["nbval-ignore-output"]
from minillm.measure.clock import paired  # noqa: E402
from minillm.measure.machine import ceilings  # noqa: E402

machine = ceilings(fast=is_fast())
one, inner = ids[:, :1], torch.randn(1, 1, config.num_heads * config.head_dim, device=device)
x = model.embed(one)  # [1, 1, hidden]
parts = {
    "qkv": lambda: [b.attn.qkv(x) for b in model.layers],
    "out": lambda: [b.attn.out(inner) for b in model.layers],
    "mlp": lambda: [b.mlp(x) for b in model.layers],
    "head": lambda: model.head(x),
}
step = forward_counts(config, 1, 0, dtype_bytes=4)
rows = []
for part, run in parts.items():
    pair = paired(run, lambda: model(one), repeats=pick(7, 3), warmup=2)
    share = step.weight_bytes[part] / step.total_bytes
    ratio = pair.ratio
    print(f"{part:5s} {ratio.median:5.1%} of the step's time (spread {ratio.spread:.0%}), {share:5.1%} of its bytes")
    rows.append(
        {
            "name": part,
            "here": pair.a.median,
            "recorded": recorded(f"decoder.decode_step.{part}", model=name),
            "prediction": share * pair.b.median,
            "ceiling": step.weight_bytes[part] / machine.read_bandwidth,
        }
    )
plots.beside(rows, "s", f"one decode step of {name} by part, float32")
plt.show()

# %% [markdown]
# *Prediction: the step's measured time, split by bytes. Ceiling: the part's bytes at this machine's measured read
# bandwidth. (A model small enough to stay in the processor's cache can beat that ceiling, and its step is then mostly
# launch overhead.)*
#
# ### The last step: from scores to a token
#
# The library's sampler (采样器) applies, in this order: penalties, temperature (温度), min-p, top-k, top-p, draw. In
# tensors, for one row:


# %%
def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seen=()):
    """Probabilities [vocab] of the next token, from its logits [vocab]. seen: ids of prompt and output."""
    logits = logits.clone()
    for token in set(seen):  # towards less likely on both sides of 0
        logits[token] = (
            logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
        )
    if temperature == 0:
        return F.one_hot(logits.argmax(), len(logits)).float()
    p = ((logits - logits.max()) / temperature).softmax(-1)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    if top_k:
        p = torch.where(p >= p.topk(top_k).values[-1], p, 0.0)
    ordered, order = (p / p.sum()).sort(descending=True, stable=True)
    keep = (ordered.cumsum(0) - ordered < top_p) | (top_p == 1)  # what ranks higher has not reached top_p yet
    return torch.zeros_like(p).index_copy(0, order, ordered * keep) / (ordered * keep).sum()


from minillm.model.sampling import Sampler, SamplingParams, probabilities, sample  # noqa: E402

logits = model(ids)[0].cpu()  # [time, vocab]
settings = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=2, min_p=0.1),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
]
prompt = ids[0].tolist()
states = [Sampler(0).start(params, prompt) for params in settings]
together = probabilities(logits[-1:].expand(len(settings), -1), states)  # a batch in which each row has its own
for params, row in zip(settings, together):
    keys = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    mine = distribution(logits[-1], **{key: getattr(params, key) for key in keys}, seen=prompt)
    shown = ", ".join(
        f"{key} {getattr(params, key):g}" for key in keys if getattr(params, key) != getattr(SamplingParams(), key)
    )
    say(shown or "plain", relative(mine, row), 1e-3)

# %% [markdown]
# `| (top_p == 1)` is no decoration: summed in float32, 49152 small numbers reach 1 long before the last of them, and
# "off" would quietly cut the tail.
#
# Does it *draw* what it says? A chi-square test (卡方检验) on seeded draws: the statistic has mean 9 (ten outcomes,
# nine free), and passes 27.9 once in a thousand times if the sampler is right.

# %%
n, odds = 4000, torch.linspace(3, -1, 10)
many = [Sampler(seed).start(SamplingParams(), [0]) for seed in range(n)]
drawn = torch.bincount(torch.tensor(sample(odds.expand(n, -1), many).token_ids), minlength=10)
expected = n * odds.softmax(-1)
statistic = ((drawn - expected) ** 2 / expected).sum().item()
print(f"chi-square {statistic:.1f}, under 27.9: {statistic < 27.9}")

# %% [markdown]
# How many tokens does a filter keep? That depends on the place in the text, which is the reason for top-p (nucleus
# sampling, 核采样) and min-p: where the model is sure they keep one token, where it is not they keep many. Top-k
# keeps as many everywhere.

# %%
p = logits.softmax(-1).sort(-1, descending=True).values  # [time, vocab]
sizes = {
    "top-p 0.9": ((p.cumsum(-1) - p) < 0.9).sum(-1),
    "min-p 0.1": (p >= 0.1 * p[:, :1]).sum(-1),
    "top-k 50": torch.full((len(p),), 50),
}
reveal("01.tokens of the vocabulary in a typical 0.9 nucleus", sizes["top-p 0.9"].median().item())
fig, ax = plots.figure(height=2.8)
for color, (label, kept) in zip(plots.PALETTE, sizes.items()):
    ax.plot(torch.linspace(0, 100, len(kept)), kept.sort().values, color=color, label=label)
ax.set_yscale("log")
ax.set_xlabel("places in the text, from sure to unsure, %")
ax.set_ylabel("tokens kept")
ax.set_title(f"what each filter keeps, {name}, vocabulary {config.vocab_size}")
ax.legend()
plt.show()

# %% [markdown]
# *Every place of the held-out text, sorted by how many tokens each filter keeps there.*
#
# ## Where it backfires
#
# **Temperature 0 is not a small temperature: they differ at ties.** As the temperature falls, the draw goes to the
# largest logit; and if two are equal, to each of them with probability one half, for ever. Greedy decoding
# (贪心解码) is a rule of its own: the lowest id of the equals. In float32 ties are rare. In bfloat16, with 8
# significant bits, they are not:

# %%
low = logits.bfloat16()  # what an engine has that keeps its logits in bfloat16
for label, scores in (("float32", logits), ("bfloat16", low)):
    top = scores.topk(2).values  # [time, 2]
    print(f"{label:9s} places where the two best logits are equal: {(top[:, 0] == top[:, 1]).sum()} of {len(top)}")
changed = (low.argmax(-1) != logits.argmax(-1)).sum()
print(f"places where rounding alone changes the greedy token: {changed} of {len(low)}")

tie = torch.tensor([1.0, 3.0, 3.0, 0.0])
for params in (SamplingParams(temperature=0), SamplingParams(temperature=1e-4), SamplingParams(temperature=1.0)):
    chances = probabilities(tie[None], [Sampler(0).start(params)])[0]
    print(f"temperature {params.temperature:<7g}", [round(value, 3) for value in chances.tolist()])

# %% [markdown]
# So never assert that two engines give equal greedy *text*: another batch size or another kernel rounds differently,
# one tie flips, and the texts part. Compare logits, with a tolerance.
#
# **Top-p at 1.0 draws from the tail.** The tail (尾部) is thousands of tokens, each nearly impossible. Together they
# are not. If the tokens outside the 0.95 nucleus hold a share t of the probability, a text of n tokens holds at
# least one of them with probability 1 - (1 - t)^n.

# %%
nucleus = ((p.cumsum(-1) - p) < 0.95).sum(-1, keepdim=True)  # [time, 1]
rank = torch.arange(p.shape[-1])
outside = torch.where(rank >= nucleus, p, 0.0).sum(-1)  # [time]
impossible = torch.where(p < 1e-4, p, 0.0).sum(-1)  # [time]: tokens of less than 1 in 10 000 each
for label, mass in (("outside the 0.95 nucleus", outside), ("under 1e-4 each", impossible)):
    t = mass.mean().item()
    chances = ", ".join(f"{1 - (1 - t) ** n:.0%} of {n}-token texts" for n in (20, 200))
    print(f"{label}: {t:.1%} of a draw; at least one in {chances}")

# %% [markdown]
# What that does to text, and what greedy does. One batch, each row with its own parameters; the cache of chapter 02
# saves the waiting.

# %% tags=["nbval-ignore-output"]
from minillm.cache.contiguous import ContiguousCache  # noqa: E402
from minillm.cache.generate import decode, prefill  # noqa: E402

ways = {
    "greedy": SamplingParams(temperature=0),
    "greedy, repetition_penalty 1.3": SamplingParams(temperature=0, repetition_penalty=1.3),
    "temperature 0.7": SamplingParams(temperature=0.7, seed=1),
    "top_p 1.0": SamplingParams(seed=3),
    "top_p 0.9": SamplingParams(top_p=0.9, seed=3),
    "temperature 1.5": SamplingParams(temperature=1.5, seed=3),
    "temperature 1.5, min_p 0.1": SamplingParams(temperature=1.5, min_p=0.1, seed=3),
}
opening = tokenizer.encode("The old house stood at the end of the road, and")
states = [Sampler().start(params, opening) for params in ways.values()]
steps = pick(60, 24)
cache = ContiguousCache(config, len(ways), len(opening) + steps, device=device)
scores, picked = prefill(model, torch.tensor([opening] * len(ways), device=device), cache), []
for _ in range(steps):
    chosen_ids = sample(scores, states).checked()
    picked.append(scores.log_softmax(-1).gather(-1, torch.tensor(chosen_ids, device=device)[:, None])[:, 0])
    for state, token in zip(states, chosen_ids):
        state.append(token)
    scores = decode(model, torch.tensor(chosen_ids, device=device), cache)
picked = torch.stack(picked, 1)  # [rows, steps]: the model's own log-probability of each token

print(f"{name}: 'The old house stood at the end of the road, and' ...")
for label, state, row in zip(ways, states, picked):
    triples = list(zip(state.output_ids, state.output_ids[1:], state.output_ids[2:]))
    again = 1 - len(set(triples)) / len(triples)
    print(f"\n[{label}]  rarest token: p = {row.min().exp():.1e}; repeated triples of tokens: {again:.0%}")
    print(tokenizer.decode(state.output_ids).strip()[:300])

# %% [markdown]
# Greedy always takes the likeliest token, and tends to walk in circles. Top-p 1.0 is the model's true distribution,
# tail included: one rare token, and the model must continue a text that nobody would have written. **Each cure has
# its own price:** a repetition penalty also punishes words that must repeat (names, brackets in code); a low top-p
# takes away the variety that sampling was for; a filter always throws some right tokens away, so evaluations and
# speculative decoding (chapter 16) need the true distribution.
#
# ## Play
#
# The next token after a text of your choice. Grey: the model. Blue: what is drawn from.

# %% tags=["nbval-ignore-output"]
openings = ["The king took her hand and", "It was the best of", "In the beginning God created the heaven and the"]
after = {}
for opening_text in openings:
    seen = tokenizer.encode(opening_text)
    after[opening_text] = (model(torch.tensor([seen], device=device))[0, -1].cpu(), seen)


def draw(ax, text, temperature, top_k, top_p, min_p, repetition_penalty):
    scores, seen = after[text]
    before = scores.softmax(-1)
    chances = distribution(scores, temperature, top_k, top_p, min_p, repetition_penalty, seen)
    top = before.topk(12).indices
    ax.bar(range(12), before[top], color="#C8C8C8", width=0.85)
    ax.bar(range(12), chances[top], color=plots.BLUE, width=0.45)
    labels = [tokenizer.decode([int(t)]).strip() or "space" for t in top]
    ax.set_xticks(range(12), labels, rotation=60, ha="right", fontsize=7)
    ax.set_ylabel("probability")
    ax.grid(False, axis="x")
    note = f"{int((chances > 0).sum())} tokens left\n{1 - chances[top].sum():.0%} beyond these"
    ax.text(0.98, 0.95, note, transform=ax.transAxes, ha="right", va="top", fontsize=8)


explore(
    draw,
    text=openings,
    temperature=(0.0, 2.0, 0.1, 1.0),
    top_k=(0, 50, 1),
    top_p=(0.05, 1.0, 0.05, 1.0),
    min_p=(0.0, 0.5, 0.02),
    repetition_penalty=(1.0, 2.0, 0.1),
    static=[{"temperature": 0.5}, {"temperature": 2.0}, {"top_p": 0.5}],
)

# %% [markdown]
# *Temperature moves all bars and removes none; top-p removes the right-hand side and scales up the rest.*
#
# ## Say it
#
# **Draw a Llama-style decoder.** *(The idea, drawn; Build it)*
# - 20 seconds: Embed, then L times two residual steps: x + attention(norm x), x + MLP(norm x); a last norm; a head
#   that scores the vocabulary. Norms are RMS, positions are rotations of q and k, the MLP is silu(gate) · up, then
#   down.
# - 2 minutes: add shapes. qkv is [(h + 2 h_kv) · dh, d]; each KV head serves h / h_kv query heads; the mask lets
#   query i of the last T see keys up to length - T + i; gate and up are one [2 f, d] matrix. Attention is the only
#   place where tokens meet, so it is the only place that needs a cache.
# - Follow-up: "What differs in Qwen3?" RMSNorm on q and k of each head. "In Qwen2?" A bias on qkv. "In Gemma 2?"
#   Norms after the branches too, tanh soft caps, every second layer local.
# - Number: under 40 lines of torch.
#
# **Where are the parameters of an 8B model?** *(Measure it, first figure)*
# - 20 seconds: 8.03 billion; 70 % in the MLP, 17 % in attention's matrices, 13 % in embedding and head.
# - 2 minutes: per layer d · (h + 2 h_kv) · dh + h · dh · d + 3 · d · f, times 32, plus twice V · d.
# - Follow-up: "What did grouped queries save?" Three quarters of the KV bytes and 0.8 billion parameters, which
#   Llama 3 spends on a wider MLP.
# - Number: 8B = 16 GB in bfloat16.
#
# **FLOPs and bytes of one decode step?** *(Measure it, second figure and its table)*
# - 20 seconds: 2 FLOPs a parameter, 15 GFLOP for the 8B; every weight read once, 15 GB in bfloat16; so one FLOP a
#   byte at batch 1, far left of any ridge.
# - 2 minutes: the context adds 4 · L · h · dh FLOPs and 2 · L · h_kv · dh · 2 bytes a token: 0.5 MFLOP and 128 KiB.
#   KV passes the weights at about 115 thousand tokens of one request, or of 16 requests at 7 thousand each.
# - Follow-up: "Same for 7B MHA?" 512 KiB a token, four times as much.
# - Number: 128 KiB a token (8B), 320 KiB (70B), 512 KiB (7B MHA).
#
# **Why rotary positions, and how do you stretch them?** *(Build it, the proof; Longer than trained)*
# - 20 seconds: Rotations make q·k depend on the distance alone, cost no parameter, and leave V untouched. To go s
#   times further, slow the slow pairs down and leave the fast ones.
# - 2 minutes: linear slows all; NTK-aware changes the base; YaRN and llama3 blend by turns within the trained length.
# - Follow-up: "Where do bugs hide?" Two pair layouts; positions restarted in a chunk; tables in bfloat16. *(The
#   waste)*
# - Number: theta 10 000 (Llama 2), 500 000 (Llama 3).
#
# **Temperature, top-k, top-p, min-p?** *(From scores to a token; Play)*
# - 20 seconds: Temperature divides logits. Top-k keeps k; top-p the smallest set that reaches p, crossing token
#   included; min-p what is at least min_p times the best.
# - 2 minutes: order matters: penalties, temperature, min-p, top-k, top-p in vLLM; a hot temperature before top-p
#   widens the nucleus. Top-p and min-p adapt to how sure the model is; top-k does not.
# - Follow-up: "Is temperature 0 deterministic?" As a rule of choice, yes; but ties and rounding differ between
#   kernels and batch sizes, so text can still part. *(Where it backfires)*
# - Number: a 5 % tail is hit in 1 - 0.95^20 = 64 % of texts of 20 tokens.
#
# ## Exercise, papers, next
#
# Exercise: [`exercises/01_decoder.ipynb`](../exercises/01_decoder.ipynb). RMSNorm, rotary positions, grouped-query
# attention, the nucleus, an estimate, and a bug of chunked prefill to find.
#
# Papers: Attention Is All You Need (arXiv:1706.03762); RoFormer (arXiv:2104.09864); RMSNorm (arXiv:1910.07467); GLU
# variants (arXiv:2002.05202); GQA (arXiv:2305.13245); LLaMA (arXiv:2302.13971); position interpolation
# (arXiv:2306.15595); YaRN (arXiv:2309.00071); nucleus sampling (arXiv:1904.09751); min-p (arXiv:2407.01082); CTRL's
# repetition penalty (arXiv:1909.05858).
#
# Next: chapter 02 stops computing the same keys and values again for every token.

# %% tags=["nbval-ignore-output"]
predictions()
