# %% [markdown]
# # 03 The memory ledger
#
# **Four lines of arithmetic say what fits on a card before anything is loaded: weights, KV cache, activations,
# buffers.**
#
# > *The interviewer asks:* "A 13B model, 128 K tokens of context, 16 requests at once: how much memory is that, and
# which > of the numbers would you change first?"
#
# You will be able to
# - write the ledger (账本) of any decoder, precision, batch and context on a whiteboard, within 5 % of what the
#   machine takes;
# - say for 8, 24, 40, 80 and 141 GB cards which batch and which context fit, and when the KV cache passes the
#   weights;
# - find the peak of the activations (激活值), and the one line of code that multiplies it.
#
# 25 minutes to read. Bytes are bytes here: 1 GB is 10^9 of them, 1 GiB is 2^30. "128 K" tokens are 131,072.

# %%
import inspect

import matplotlib.pyplot as plt
import torch

from minillm import load_model, load_tokenizer
from minillm.cache.contiguous import ContiguousCache
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import memory
from minillm.measure.activations import Forward
from minillm.measure.peak import LiveBytes, measure_forward
from minillm.model.decoder import Decoder
from minillm.model.hub import ASSETS, is_available
from minillm.model.shapes import known_shape
from minillm.model.weights import random_model

lengths = pick(full=[64, 128, 256], quick=[64, 128])
if is_available("smollm2-135m"):
    name, model = "smollm2-135m", load_model("smollm2-135m", dtype="float32")
    text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor([load_tokenizer(name).encode(text[2000:8000])[: lengths[-1]]], device=model.device)
else:  # the same shape with random weights and fewer layers: memory does not ask what the numbers are
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = "smollm2-135m's shape, 6 layers, random weights"
    model = random_model(known_shape("smollm2-135m").with_changes(num_layers=6), torch.float32, device)
    ids = torch.randint(model.config.vocab_size, (1, lengths[-1]), device=model.device)
config = model.config
print(f"model: {name}, float32, on {model.device}; vocabulary {config.vocab_size}, width {config.hidden_size}")


def table(head, *rows):
    """Print rows in columns, the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]).rstrip())


def show(count):
    return units.show(count, "B")


# %% [markdown]
# ## 1. The waste, measured
#
# Prefill (预填充) reads the whole prompt but needs one row of scores: those of its last token. A direct call of the
# model scores every token. Both give the same next token. `LiveBytes` adds up the bytes of all tensors alive after
# every operation and keeps the highest sum, so what is shown is the peak over the weights.

# %%
peaks = {"head on all tokens": [], "head on the last token": []}
with torch.inference_mode():
    for length in lengths:
        prompt = ids[:, :length]  # [1, length]
        with LiveBytes() as every:
            scored_all = model(prompt)[:, -1]  # [1, length, vocab] -> [1, vocab]
        with LiveBytes() as last:
            scored_last = model.logits(model.hidden(prompt)[:, -1])  # [1, vocab]
        torch.testing.assert_close(scored_all, scored_last, rtol=1e-3, atol=1e-3)
        peaks["head on all tokens"].append(every.peak)
        peaks["head on the last token"].append(last.peak)

table(
    ("tokens of the prompt", "all scored", "last scored", "ratio"),
    *((n, show(a), show(b), f"{a / b:.1f} x") for n, a, b in zip(lengths, *peaks.values())),
)

# %%
_, ax = plots.figure()
for color, (label, values) in zip((plots.MEANING["naive"], plots.MEANING["technique"]), peaks.items()):
    ax.plot(lengths, values, "o-", color=color, label=label)
ax.set_xlabel("tokens of the prompt")
ax.set_xticks(lengths)
plots.unit_axis(ax.yaxis, "B", "peak of activations")
ax.set_ylim(bottom=0)
ax.set_title("what one prefill needs beside the weights")
ax.legend()
plt.show()

# %% [markdown]
# *Same next token, two peaks: the upper line grows by vocab x 4 bytes a token, for scores that nobody reads.*
#
# How much depends on the vocabulary beside the width of the layers: a model with a small vocabulary, such as `tiny`,
# hides the mistake. transformers and several engines scored whole prompts once, and now keep the last row unless
# asked: it was a common out-of-memory error (显存溢出) of long prompts.

# %%
for shape_name in ("llama-2-7b", "llama-3.1-8b", "gemma-2-9b"):
    wide = known_shape(shape_name)
    print(f"{shape_name:13s} logits of a 131,072-token prompt: {show(131072 * wide.vocab_size * 4)} in float32")

# %% [markdown]
# ## 2. Predict
#
# Write your numbers down before you go on; change the right-hand sides, or put `None` where you have no idea.
#
# 1. **The claim.** It is often said that a 13B model with full multi-head attention (多头注意力, MHA) needs "some
#   tens of GB" of  KV cache at 128 K context with 16 concurrent requests. 40 layers, 40 heads, head dimension 128, 2
#   bytes. How much is it?
# 2. **The card.** Llama-2-7B in 16 bits on a 24 GB card, all of it ours: how many tokens of context fit beside the
#   weights?
# 3. **The peak.** The measured total of a prefill on this machine (section 6): weights, KV, activations, buffers.

# %%
run = Forward(batch=1, new=pick(full=512, quick=256), scored=1)
shape = known_shape("smollm2-135m").with_changes(num_layers=pick(full=8, quick=6))
predict("03.kv_13b", 2 * 40 * 40 * 128 * 2 * 131072 * 16, "B")
predict("03.context_7b_24gb", (24e9 - 2 * 6.74e9) / (2 * 32 * 32 * 128 * 2), "tokens")

# %% [markdown]
# ## 3. The idea, drawn
#
# A card is a column. Weights stand at the bottom and never move. KV grows with every token of every request.
# Activations come and go, once a forward. Buffers are what always gets forgotten. What is left is head-room, and the
# batch is what you spend it on.

# %%
_, ax = plots.figure(height=3.9)
parts = [
    ("weights", 36, plots.GREY, "parameters x bytes\nonce, whatever the batch"),
    ("KV cache", 30, plots.BLUE, "2 x layers x kv_heads x head_dim x bytes\nx length x batch: K and V"),
    (
        "activations",
        12,
        plots.ORANGE,
        "new tokens x the widest moment of one layer\nor of the head: not a sum over layers",
    ),
    ("buffers", 11, plots.GREEN, "ids, positions, RoPE tables;\non a GPU: context, graphs, workspaces"),
    ("kept free", 10, plots.MEANING["waiting"], "1 - utilisation, of the card's total"),
]
low = 0
for label, height, color, formula in parts:
    ax.bar(0, height, bottom=low, width=0.9, color=color, edgecolor="white")
    ax.text(
        0, low + height / 2, label, ha="center", va="center", fontsize=9, color="white" if height > 25 else "black"
    )
    ax.text(0.62, low + height / 2, formula, va="center", fontsize=9)
    low += height
ax.set_xlim(-0.5, 3.0)
ax.axis("off")
ax.set_title("one card")
plt.show()

# %% [markdown]
# *The ledger. Only the blue part grows while requests run; only the orange part depends on how many tokens are new at
# once.*
#
# Why is the activation peak not a sum over layers? Without gradients a tensor is freed when its last reader has run.
# Layer 7 works in the memory that layer 6 gave back. So the peak is one moment: where
# rotary embedding (旋转位置编码, RoPE) turns q and k in float32; or in the multi-layer perceptron (MLP), where gate,
# up and their product are alive together; or at the head, where each scored token has `vocab` logits.
#
# ## 4. Build it


# %%
def ledger_of(c, batch, new, context=0, scored=1, weight_bytes=2.0, kv_bytes=2.0, e=2):
    """Bytes by part for `batch` rows of `new` tokens after `context` stored ones. e: bytes of an activation."""
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = (q_rows + 2 * kv_rows) * c.hidden_size + c.hidden_size * q_rows
    layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    tables = (1 if c.tie_embeddings else 2) * c.vocab_size * c.hidden_size
    parameters = tables + c.num_layers * layer + c.hidden_size

    tokens = batch * new
    buffers = 2 * tokens * c.head_dim * 4 + 8 * (tokens + new)  # cos and sin in float32; ids and positions
    turned = q_rows + kv_rows  # RoPE multiplies and adds in float32, whatever the rest is in
    moments = {
        "rotate": tokens * ((2 * c.hidden_size + turned + kv_rows) * e + turned * (8 + e)) + buffers,
        "mlp": tokens
        * (3 * c.hidden_size + max(4 * c.intermediate_size, 3 * c.intermediate_size + c.hidden_size))
        * e
        + buffers,
        "head": tokens * c.hidden_size * e + batch * scored * c.vocab_size * e + 8 * tokens,
    }
    return {
        "weights": round(parameters * weight_bytes),
        "KV cache": round(2 * c.num_layers * kv_rows * kv_bytes * batch * (context + new)),
        "activations and buffers": max(moments.values()),  # one moment, not the sum over layers
    }


def largest(fits, ceiling=2**40):
    """The largest n for which fits(n) holds, where it holds up to some n and never after; 0 if it never does."""
    low, high = 0, 1
    while high < ceiling and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


thirteen, seven = known_shape("llama-2-13b"), known_shape("llama-2-7b")
claim = ContiguousCache(thirteen, 16, 131072, torch.bfloat16, "meta")  # the real cache's shapes, nothing allocated
reveal("03.kv_13b", claim.nbytes)
reveal("03.context_7b_24gb", largest(lambda n: sum(ledger_of(seven, 1, 1, n).values()) <= 24e9))

# %% [markdown]
# ### The claim, corrected
#
# The 13B figure is not tens of GB. One token costs 2 x 40 x 40 x 128 x 2 = 819,200 bytes; 16 x 131,072 tokens of that
# are 1.72 TB, about 66 times the weights. Tens of GB is what *one* request needs at 32 K. What brings it down, one
# step at a time:

# %%
steps, base = [("MHA, 40 KV heads, 16 bits", thirteen, 2.0, 131072, 16)], claim.nbytes
steps += [("one request in place of 16", thirteen, 2.0, 131072, 1), ("... at 32 K", thirteen, 2.0, 32768, 1)]
grouped = thirteen.with_changes(num_kv_heads=8)
steps += [("16 again, 8 KV heads (GQA)", grouped, 2.0, 131072, 16), ("... in 8 bits", grouped, 1.0, 131072, 16)]
steps += [
    ("... in 4 bits", grouped, 0.5, 131072, 16),
    ("16 x 128 K, 1 KV head (MQA), 16 bits", None, 2.0, 131072, 16),
]
rows = []
for label, c, kv, length, batch in steps:
    c = c or thirteen.with_changes(num_kv_heads=1)
    size = ledger_of(c, batch, 1, length - 1, kv_bytes=kv)["KV cache"]
    rows.append((label, show(size), f"{size / base:.3f}", f"{size / 80e9:.1f}"))
table(("KV cache of a 13B model", "bytes", "of the claim's", "80 GB cards"), *rows)

# %% [markdown]
# Grouped-query attention (分组查询注意力, GQA) lets several query heads share one KV head; multi-query attention
# (多查询注意力, MQA) is the end of that road with one. Multi-head latent attention (多头潜在注意力, MLA; chapter 23)
# stores one compressed vector a token and layer from which all heads are rebuilt, plus a small rotary part: its bytes
# have no heads in them at all.

# %%
bytes_of = {
    "MHA: 2 x 32 heads x 128": 2 * 32 * 128,
    "GQA: 2 x 8 KV heads x 128": 2 * 8 * 128,
    "MLA: latent 512 + rotary 64": 512 + 64,
    "MQA: 2 x 1 KV head x 128": 2 * 1 * 128,
}
per_token = {label: 32 * width * 2 for label, width in bytes_of.items()}
plots.bars(list(per_token), list(per_token.values()), "B", "KV of one token: 32 layers, 2 bytes", better="less")
plt.show()

# %% [markdown]
# *One 7B-sized skeleton, four attentions. From MHA to GQA with 8 KV heads is a factor 4; MLA costs as much as 2.25 KV
# heads would.*
#
# ## 5. The library's version
#
# `minillm.measure.memory` keeps the same four lines and adds what real models need: every family of chapter 01,
# layers with a mask of its own, quantised weights with their scales, attention that writes its scores out, a fraction
# of the card.

# %%
for part in (memory.Ledger, memory.forward_ledger, memory.ledger):
    print(inspect.getsource(part))

# %% [markdown]
# Three proofs that do not trust either version. The parameters are counted on a decoder built without storage
# (torch's `meta` device). The KV bytes are those of the cache's own tensors. And the two ledgers agree to the byte.

# %%
rows = []
for shape_name in ("smollm2-135m", "llama-2-7b", "llama-2-13b", "llama-3.1-8b", "llama-3.1-70b"):
    c = known_shape(shape_name)
    with torch.device("meta"):
        tensors = sum(p.numel() for p in Decoder(c).parameters()) * 2
    stored = ContiguousCache(c, 3, 1000, torch.bfloat16, "meta").nbytes
    for work in (Forward(1, 1000), Forward(3, 1000, scored=1000), Forward(3, 1, context=999)):
        small = ledger_of(c, work.batch, work.new, work.context, work.scored)
        big = memory.forward_ledger(c, work)
        assert sum(small.values()) == big.total
    assert small["weights"] == big.weights == tensors
    assert small["KV cache"] == big.kv == stored
    rows.append((shape_name, show(tensors), show(stored), show(big.activations + big.buffers)))
table(("equal to the byte", "weights", "KV, 3 x 1000", "rest of a decode step"), *rows)

# %% [markdown]
# ## 6. Measure it
#
# Predicted against taken. Each row runs in a fresh process, because memory that earlier work freed but the allocator
# kept would be used again without showing. The process reports its highest resident memory above what it held before
# (`torch.cuda`'s peak on a GPU). Random weights in the shape of smollm2-135m with fewer layers: memory does not ask
# what the numbers are.

# %%
runs = {
    "prefill, last scored": run,
    "prefill, all scored": Forward(1, run.new, scored=run.new),
    "decode, 4 rows": Forward(4, 1, context=run.new - 1),
}
predicted = {
    label: ledger_of(shape, r.batch, r.new, r.context, r.scored, weight_bytes=4, kv_bytes=4, e=4)
    for label, r in runs.items()
}
predict("03.peak", sum(predicted["prefill, last scored"].values()), "B")

# %% tags=["nbval-ignore-output"]
measured = {label: measure_forward(shape, r) for label, r in runs.items()}
rows = []
for label, p in predicted.items():
    total, taken = sum(p.values()), measured[label]["total"]
    rows.append((label, show(total), show(taken), f"{taken / total:.3f}", show(measured[label]["scratch"])))
table(("total memory", "predicted", "measured", "measured / predicted", "library scratch, not in it"), *rows)
reveal("03.peak", measured["prefill, last scored"]["total"])
worst = max(abs(measured[label]["total"] / sum(p.values()) - 1) for label, p in predicted.items())
print(f"furthest from the ledger: {worst:.1%}; read from {measured['prefill, last scored']['how']}")
print("within 5 %" if worst < 0.05 else "NOT within 5 %: something here takes memory that the ledger does not know")

# %% tags=["nbval-ignore-output"]
gpu = recorded("memory.peak")
plots.beside(
    [
        dict(name=label, here=measured[label]["total"], prediction=sum(p.values()), recorded=gpu)
        for label, p in predicted.items()
    ],
    "B",
    "peak memory: weights + KV + activations + buffers",
)
plt.show()

# %% [markdown]
# *Bars are what the process took; orange marks are the ledger. The ceiling here is not a speed: it is the size of the
# card.*
#
# The last column of the table is what a ledger of tensors cannot see: the matrix library packs operands into scratch
# memory of its own, a few MB a thread, taken at the first large product and kept. It belongs to the process and not
# to the model, so it is measured before the model is built. On a GPU the same line is larger: a CUDA context takes
# hundreds of MB before the first tensor, and graphs (chapter 10) keep buffers. That, and fragmentation (碎片), is
# what the share of a card that is kept free pays for.
#
# ### When KV passes the weights
#
# Weights are paid once and KV by the token, so there is always a length at which the cache is the larger half. Under
# it, compress the weights first (chapters 11 to 13); over it, the cache (chapters 14, 23, 24).

# %%
models = {
    "llama-2-7b (MHA)": "llama-2-7b",
    "llama-3.1-8b (GQA)": "llama-3.1-8b",
    "llama-3.1-70b (GQA)": "llama-3.1-70b",
}
rows = []
_, ax = plots.figure()
for color, (label, shape_name) in zip(plots.PALETTE, models.items()):
    c = known_shape(shape_name)
    weights = ledger_of(c, 1, 1)["weights"]
    token = ledger_of(c, 1, 1)["KV cache"]
    span = [2**k for k in range(9, 22)]
    ax.loglog(span, [n * token / weights for n in span], color=color, label=label)
    rows.append((label, show(weights), show(token), *(f"{weights // (b * token) + 1:,}" for b in (1, 8, 64))))
ax.axhline(1, color=plots.MEANING["ceiling"], lw=1.2)
ax.annotate("KV = weights", (600, 1), (0, 4), textcoords="offset points", fontsize=8)
ax.set_xlabel("tokens stored, all requests together")
plots.plain_log_ticks(ax.xaxis, [1024, 8192, 65536, 524288])
ax.set_ylabel("KV bytes / weight bytes")
ax.set_title("when the cache passes the weights (16 bits)")
ax.legend()
plt.show()
table(("model", "weights", "KV a token", "length at batch 1", "batch 8", "batch 64"), *rows)

# %% [markdown]
# *The axis counts tokens of the whole batch: eight requests reach the line at an eighth of the length.*
#
# ### What fits on which card
#
# 90 % of each card may be used. The context is for one request; the batch is for requests of 8,192 tokens. Prompts
# are read in chunks of 2,048 tokens at most, which bounds the activations. Card sizes are what the driver reports.


# %%
def first_that_fits(c, precision):
    """One line: for each card the longest context of one request, and the largest batch at 8,192 tokens."""
    found = []
    for card in memory.CARDS.values():
        alone = memory.largest_context(c, card.bytes, precision=precision)
        found.append(
            f"{alone:,} / {memory.largest_batch(c, card.bytes, 8192, precision=precision)}" if alone else "-"
        )
    return found


rows = []
for shape_name in ("llama-2-7b", "llama-3.1-8b", "llama-2-13b", "llama-3.1-70b"):
    for label in ("fp16", "int4-g128", "int4-g128, kv int8"):
        found = first_that_fits(known_shape(shape_name), memory.PRECISIONS[label])
        rows.append((f"{shape_name}, {label}", *found))
table(("context / batch at 8,192", *(card.sold_as for card in memory.CARDS.values())), *rows)

# %% [markdown]
# *By memory alone: a model's trained context may be shorter.* A dash: the weights do not fit. Reading across a row,
# the last card's batch is far more than its size would suggest, because the weights are paid once.
#
# ## 7. Where it backfires
#
# **A 7B model on a 24 GB card at 128 K.** "7B in 16 bits is 13.5 GB, and the card has 24" is true, and is one line of
# the ledger out of four. The cache below is the real class with real shapes, on the `meta` device, so that nothing is
# allocated.

# %%
card = memory.CARDS[24]
cache = ContiguousCache(seven, 1, 131072, torch.bfloat16, "meta")
print(
    f"card: {card.name}, {show(card.bytes)}; weights {show(memory.weight_bytes(seven))}; cache {show(cache.nbytes)}"
)
rows = []
cases = {
    "Llama-2-7B, 16 bits": (seven, "fp16"),
    "4-bit weights": (seven, "int4-g128"),
    "4-bit weights, 8-bit KV": (seven, "int4-g128, kv int8"),
    "the 8B model with GQA, 16 bits": (known_shape("llama-3.1-8b"), "fp16"),
    "... 4-bit weights": (known_shape("llama-3.1-8b"), "int4-g128"),
    "... 4-bit weights, 8-bit KV": (known_shape("llama-3.1-8b"), "int4-g128, kv int8"),
}
for label, (c, precision) in cases.items():
    precision = memory.PRECISIONS[precision]
    whole = memory.ledger(c, 1, 131072, precision)
    longest = memory.largest_context(c, card.bytes, precision=precision)
    verdict = "fits" if memory.fits(c, card.bytes, 1, 131072, precision=precision) else "does not fit"
    rows.append((label, show(whole.weights), show(whole.kv), show(whole.total), verdict, f"{longest:,}"))
table(("one request at 128 K", "weights", "KV", "total", "on 24 GB", "longest that fits"), *rows)

# %% [markdown]
# Fewer bits in the weights, the usual first reflex, does not save it: the KV alone is several cards. Fewer KV heads
# does most of the work. And memory is not quality: Llama-2-7B was trained at 4,096 tokens, so its answer at 128 K
# would be noise that fits or not.
#
# **The ledger itself backfires** where an implementation breaks its assumption. It says "activations are small"
# because fused attention (chapter 08) never writes the scores down. Code that does, needs heads x new x length of
# them; and an engine that builds its causal mask as a tensor pays new x length even with a fused kernel.

# %%
eight = known_shape("llama-3.1-8b")
rows = []
for label, new, context in (
    ("prompt of 2,048", 2048, 0),
    ("prompt of 32,768", 32768, 0),
    ("chunk of 2,048 after 129,024", 2048, 129024),
):
    found = [Forward(1, new, context, attention=kind) for kind in ("flash", "sdpa", "naive")]
    rows.append((label, *(show(memory.forward_ledger(eight, r).activations) for r in found)))
table(("activations, Llama-3.1-8B", "fused", "torch, mask as a tensor", "scores written"), *rows)

# %% [markdown]
# ## 8. Play
#
# Everything above in one picture. The dashed line is what 90 % of the card allows.


# %% tags=["nbval-ignore-output"]
def draw(ax, model, precision, card, batch, context):
    c, limit = known_shape(model), memory.CARDS[card].bytes
    parts = memory.ledger(c, batch, context, memory.PRECISIONS[precision]).rows()
    low = 0
    for (part, size), color in zip(parts.items(), (plots.GREY, plots.BLUE, plots.ORANGE, plots.GREEN)):
        ax.bar(0, size, bottom=low, width=0.6, color=color, label=f"{part} {show(size)}")
        low += size
    ax.axhline(0.9 * limit, color=plots.MEANING["ceiling"], ls="--", lw=1.2)
    ax.set_xlim(-0.5, 0.5)
    ax.set_xticks([])
    ax.set_ylim(0, max(low, limit) * 1.75)
    plots.unit_axis(ax.yaxis, "B", "")
    verdict = "fits" if low <= 0.9 * limit else "does not fit"
    ax.set_xlabel(f"{show(low)} of {show(0.9 * limit)}\n{verdict}")
    ax.legend(loc="upper center", fontsize=7)


explore(
    draw,
    model=["llama-3.1-8b", "llama-2-7b", "llama-2-13b", "llama-3.1-70b", "qwen2.5-7b"],
    precision=list(memory.PRECISIONS)[1:],
    card=list(memory.CARDS)[1:],
    batch=(1, 64),
    context=(1024, 131072, 1024, 8192),
    static=[
        dict(batch=1, context=8192),
        dict(batch=8, context=8192),
        dict(card=80, context=65536),
    ],
    height=3.8,
)

# %% [markdown]
# *Llama-3.1-8B in 16 bits. Three settings to look for: the batch at which the blue part overtakes the grey one; the
# card on which 70B fits at all; what 8-bit KV buys next to what 4-bit weights buy, at a long context and at a short
# one.*
#
# ## 9. Say it
#
# **Interview card 1. What needs memory when a model serves?**
# - *20 seconds.* Weights, KV cache, activations, buffers. Weights are fixed, KV grows with batch x context,
#   activations with the tokens of one forward. So the batch is whatever the KV can have after weights and head-room.
# - *2 minutes.* Parameters x bytes, embedding once or twice. KV: 2 x layers x kv_heads x head_dim x bytes a token.
#   Activations: the widest moment of one layer, not the sum, and the head on the last token only. Take 10 % of the
#   total off for context, graphs and fragmentation, then divide.
# - *Follow-up.* "Is the 90 % of total or of free memory?" Of the total, weights included: the exercise has that bug.
# - *Number.* A 7B model in 16 bits is 13.5 GB, and 0.5 MB a token with MHA (sections 4 and 6).
#
# **Interview card 2. 13B, MHA, 128 K, 16 requests: how much KV?**
# - *20 seconds.* 1.72 TB, not tens of GB: 0.82 MB a token, times two million tokens.
# - *2 minutes.* 2 x 40 x 40 x 128 x 2 = 819,200 bytes; 131,072 x 16 = 2.1 M tokens. One request is 107 GB, more than
#   an 80 GB card without any weights. GQA with 8 heads divides by 5, 8-bit KV by 2; windows or latent attention
#   change the formula.
# - *Follow-up.* "Which first?" The heads: they belong to the model, so choose another model; then KV bits.
# - *Number.* 1.72 TB (section 4, "The claim, corrected").
#
# **Interview card 3. When does KV pass the weights?**
# - *20 seconds.* At weights / (KV of a token) tokens over the whole batch: about 26 thousand for Llama-2-7B, 123
#   thousand for Llama-3.1-8B.
# - *2 minutes.* It tells what to compress. It is also what a decode step reads: past that line a step's time is the
#   cache's, not the weights'.
# - *Follow-up.* "And at batch 8?" An eighth of the length each (section 6).
# - *Number.* GQA with 8 of 32 heads moves the line by 4, the same factor as 4-bit KV would.
#
# **Interview card 4. Prefill runs out of memory and decode does not. Why?**
# - *20 seconds.* Something grows with new tokens: logits of the whole prompt, scores written out, or a mask as a
#   tensor.
# - *2 minutes.* Score the last token only; use fused attention; read the prompt in chunks, which bounds all three.
# - *Follow-up.* "Who needs all the logits?" Perplexity (困惑度), prompt log-probabilities, and the verify step of
#   speculative decoding, for a few tokens.
# - *Number.* vocab x bytes a token: half a MB for 128 K entries in float32 (sections 1 and 7).
#
# ## 10. Exercise, papers, next
#
# **Exercise:** `exercises/03_memory_ledger.ipynb`: weights of any configuration, the real size of 4 bits, the largest
# batch, the crossover with sliding windows, a planner with three bugs, and 70B for 32 users.
#
# **Papers.** Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need* (arXiv:1911.02150): MQA.
# Ainslie et al. 2023, *GQA* (arXiv:2305.13245). DeepSeek-AI 2024, *DeepSeek-V2* (arXiv:2405.04434): MLA. Pope et al.
# 2022, *Efficiently Scaling Transformer Inference* (arXiv:2211.05102): memory and time of serving by formula. Kwon et
# al. 2023, *PagedAttention* (arXiv:2309.06180): what is wasted when the KV line is reserved ahead, which is the
# **next** step: chapter 04 puts many requests into one batch, chapter 05 stops reserving.

# %%
predictions()
