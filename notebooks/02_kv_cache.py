# %% [markdown]
# # 02 The KV cache
#
# **Keep the keys and values of the tokens you have read: a new token then costs one row of work, not all of them.**
#
# > *The interviewer asks:* "What does a KV cache store, why is that enough, how many bytes does it take, and when
# > is it worth nothing?"
#
# You will be able to
# - show that decoding without a cache costs O(n²) passes through the layers and with one O(n), and read both off a
#   fit;
# - derive `2 x batch x layers x kv_heads x head_dim x length x bytes` and check it against memory that was allocated;
# - tell prefill from decode, and name the requests for which the cache is pure cost.
#
# 30 minutes to read. `tiny` ships with the course; where `smollm2-135m` is present one section runs it, and says so.

# %%
import inspect
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

from minillm import load_model, load_tokenizer
from minillm.cache.contiguous import ConcatCache, ContiguousCache
from minillm.cache.generate import decode, generate_cached, prefill
from minillm.lab import explore, is_fast, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import clock
from minillm.measure.counts import forward_counts, kv_bytes_per_token
from minillm.measure.machine import ceilings
from minillm.measure.roofline import place, roofline
from minillm.model.attention import LayerInfo, attend_now
from minillm.model.generate import generate_naive, greedy
from minillm.model.hub import ASSETS, is_available
from minillm.model.shapes import known_shape

model = load_model("tiny", dtype="float32")
config, device = model.config, model.device
tokenizer = load_tokenizer("tiny")
text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
prompt = tokenizer.encode(text[3000:3400])[:16]
print(
    f"model: tiny, on {device}, {torch.get_num_threads()} CPU threads; {config.num_layers} layers, "
    f"{config.num_heads} query heads, {config.num_kv_heads} KV heads x {config.head_dim}, context {config.max_length}"
)

# %% [markdown]
# ## 1. The waste, measured
#
# The loop of chapter 01 is the definition of generation: run *all* tokens (词元) through the model, take the last row
# of logits, append one token, start again. `generate_naive` is that loop. Every step is timed.


# %% tags=["nbval-ignore-output"]
def step_seconds(generate, prompt, steps):
    """Seconds from each token to the next; the first from the call."""
    stamps = [time.perf_counter()]

    def choose(logits):
        token = greedy(logits)
        clock.synchronize()
        stamps.append(time.perf_counter())
        return token

    generate(model, prompt, steps, choose)
    return np.diff(stamps)


steps = pick(200, 40)
step_seconds(generate_naive, prompt, 4)  # warm-up
naive_steps = step_seconds(generate_naive, prompt, steps)

positions = len(prompt) + np.arange(steps)
_, ax = plots.figure(height=2.8)
ax.plot(positions, naive_steps, ".", color=plots.MEANING["naive"])
ax.set_xlabel("tokens in the text")
plots.unit_axis(ax.yaxis, "s", "time for the next token")
ax.set_ylim(0, np.percentile(naive_steps, 98) * 1.2)
ax.set_title("Without a cache each token costs more than the one before (tiny)")
plt.show()

# %% [markdown]
# *Every dot is one step. The text grows by one token a step, so the work per step grows too.*
#
# What is all that work for? Watch the keys K that the layers compute at one step and at the next.


# %%
class Watch:
    """Stands behind `attend` like a cache, but keeps nothing for later: it only notes K and V of this call."""

    def __init__(self):
        self.kv = {}

    def positions(self, shape):
        return torch.arange(shape[-1], device=device).expand(shape)

    def attend(self, layer, q, k, v):
        self.kv[layer.index] = torch.stack((k, v))
        return attend_now(layer, q, k, v)


ids = torch.tensor([tokenizer.encode(text[3000:3400])[:41]], device=device)
now, later = Watch(), Watch()
with torch.inference_mode():
    model(ids[:, :40], cache=now)
    model(ids, cache=later)
change = max((later.kv[i][:, :, :40] - now.kv[i]).abs().max().item() for i in now.kv)
largest = max(x.abs().max().item() for x in now.kv.values())
print(f"step 41 computes 41 rows of K and V in each of {len(now.kv)} layers")
print(f"40 of them were computed at step 40 already: largest change {change:.1e}, where values reach {largest:.1f}")
assert change < 1e-3 * largest

# %% [markdown]
# The old rows come out the same, up to rounding. They must: under the causal mask (因果掩码) token *i* looks only at
# tokens before it, so its hidden state in every layer, and the K and V made from it, cannot depend on what is
# appended later. Of Q only the last row matters, because only the last logits are read. So: **keep K and V, drop Q**.
# That is the KV cache (键值缓存).

# %% [markdown]
# ## 2. Predict
#
# A prompt of *p* tokens, *n* new ones. Write down five numbers before you run anything.
#
# - *Rows* (one token through all layers once). Naive: p, then p + 1, ... so `n p + n (n - 1) / 2`. With a cache: the
#   prompt once, then one row for each token but the last, `p + n - 1`.
# - *Speed-up.* If time were proportional to rows, it would be their ratio. Is it?
# - *Bytes of the cache* for p + n tokens: each layer keeps K and V, `kv_heads x head_dim` numbers each, for each
#   token: **2 x batch x layers x kv_heads x head_dim x length x bytes per number**.
# - *Bytes written* if the cache grows by concatenation (拼接): each step writes everything stored once more.

# %%
p, n = len(prompt), pick(200, 40)
row_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4  # one token, float32
predict("02.rows_naive", n * p + n * (n - 1) / 2, "tokens")
predict("02.rows_cache", p + n - 1, "tokens")
predict("02.speedup", (n * p + n * (n - 1) / 2) / (p + n - 1), "x")
predict("02.kv_bytes", (p + n) * row_bytes, "B")
predict("02.concat_writes", row_bytes * sum(p + i for i in range(n)), "B")

# %% [markdown]
# ## 3. The idea, drawn


# %%
def staircase(ax, cached: bool, p: int = 4, n: int = 6):
    """Steps down, tokens across. Green and blue: computed for the first time. Grey: computed again. Pale: read."""
    pale = "#CFE3F2"
    for step in range(n):
        for token in range(p + step):
            first = step == 0 or token == p + step - 1
            color = plots.MEANING["prefill"] if step == 0 else plots.MEANING["decode"]
            color = color if first else pale if cached else plots.MEANING["naive"]
            ax.add_patch(plt.Rectangle((token, step), 0.9, 0.86, color=color))
    ax.set(xlim=(-0.2, p + n - 1), ylim=(n, -0.2), xlabel="token", ylabel="step", yticks=np.arange(n) + 0.43)
    ax.set_yticklabels(["1 (prefill)", *map(str, range(2, n + 1))])
    ax.set_xticks(np.arange(p + n - 1) + 0.45, range(1, p + n))
    ax.grid(False)
    rows = p + n - 1 if cached else n * p + n * (n - 1) // 2
    ax.set_title(f"with a cache: {rows} rows computed" if cached else f"without: {rows} rows computed")


figure, axes = plots.figure(1, 2, width=7.2, height=2.9)
staircase(axes[0], cached=False)
staircase(axes[1], cached=True)
kinds = {
    "prompt, computed": plots.MEANING["prefill"],
    "new token, computed": plots.MEANING["decode"],
    "computed again": plots.MEANING["naive"],
    "read from the cache": "#CFE3F2",
}
figure.legend(
    [plt.Rectangle((0, 0), 1, 1, color=c) for c in kinds.values()], kinds, loc="outside lower center", ncols=4
)
plt.show()

# %% [markdown]
# *A prompt of 4 tokens, 6 new ones. Left: the triangle is recomputed at every step. Right: the first step, prefill
# (预填充), reads the whole prompt at once; each later step, decode (解码), computes one row and reads the others' K
# and V. The last token sampled is never run at all: nobody asks what comes after it.*

# %% [markdown]
# ## 4. Build it
#
# A cache is two tensors and a count per layer. `attend` is the seam between decoder and cache: write the new K and V
# behind the old, attend over all of them. Two details carry the weight:
# - **the mask is aligned bottom right**: new token *i* of this call sits at position `start + i`, not at *i*;
# - **positions go on**: rotary embedding must turn the new K by its place in the text, not by its place in the call.


# %%
class SmallCache:
    """K and V, [layers, batch, kv_heads, max_length, head_dim] each, filled from the left."""

    def __init__(self, config, batch, max_length, device="cpu"):
        shape = (config.num_layers, batch, config.num_kv_heads, max_length, config.head_dim)
        self.k, self.v = torch.empty(shape, device=device), torch.empty(shape, device=device)
        self.stored = [0] * config.num_layers

    def positions(self, shape):
        return torch.arange(self.stored[-1], self.stored[-1] + shape[-1], device=self.k.device).expand(shape)

    def attend(self, layer, q, k, v):
        start = self.stored[layer.index]
        end = start + q.shape[1]
        self.k[layer.index, :, :, start:end] = k.transpose(1, 2)  # [batch, kv_heads, time, dim]
        self.v[layer.index, :, :, start:end] = v.transpose(1, 2)
        self.stored[layer.index] = end
        group = q.shape[2] // k.shape[2]  # query heads that share a KV head
        keys = self.k[layer.index, :, :, :end].repeat_interleave(group, dim=1)  # [batch, heads, end, dim]
        values = self.v[layer.index, :, :, :end].repeat_interleave(group, dim=1)
        scores = q.transpose(1, 2) @ keys.transpose(2, 3) * layer.scale  # [batch, heads, time, end]
        key, query = torch.arange(end, device=q.device), torch.arange(start, end, device=q.device)
        scores = scores.masked_fill(key > query[:, None], float("-inf"))
        return (scores.softmax(-1) @ values).transpose(1, 2)  # [batch, time, heads, dim]


@torch.inference_mode()
def small_generate(model, prompt, steps):
    cache = SmallCache(model.config, 1, len(prompt) + steps, model.device)
    tokens = [model(torch.tensor([prompt], device=model.device), cache=cache)[:, -1].argmax(-1)]  # prefill
    while len(tokens) < steps:
        tokens.append(model(tokens[-1][:, None], cache=cache)[:, -1].argmax(-1))  # decode: one token in
    return torch.cat(tokens).tolist()


print(repr(tokenizer.decode(prompt)), "->", repr(tokenizer.decode(small_generate(model, prompt, 24))))

# %% [markdown]
# ## 5. The library's version
#
# The same, from source:

# %%
print(inspect.getsource(ContiguousCache.attend))

# %% [markdown]
# | it adds | because |
# |---|---|
# | an error before a write past the end | a full cache that wraps or grows in silence corrupts text |
# | `attention(...)` in place of the formula | torch's fused kernel: grouped heads as they are, no score matrix kept |
# | `window`, `softcap` from the layer | Mistral and Gemma need them; the decoder does not have to know |
# | `padding` | prompts of unequal length in one batch (chapter 04) |
# | `truncate`, `keep` | forget rejected drafts (chapter 16), drop finished rows: no copy, or one |
#
# **Same tokens, proved.** Four prompts from a book that the model was not trained on, greedy (贪心) decoding: the
# naive loop, the 40 lines above, the library's cache, the concatenating cache. Equal text could be luck, so look at
# the logits as well: the gap between best and second-best token, at its smallest, against the largest difference that
# the cache makes.


# %%
@torch.inference_mode()
def logit_gap(tokens, p):
    """(largest difference between logits with and without a cache, smallest lead of the best token)."""
    whole = torch.tensor([tokens], device=device)
    full = model(whole)[0, p - 1 :]  # [steps, vocab]
    cache = ContiguousCache(config, 1, len(tokens), device=device)
    rows = [prefill(model, whole[:, :p], cache)]
    rows += [decode(model, whole[:, i], cache) for i in range(p, len(tokens))]
    best = full.topk(2).values
    return (torch.cat(rows) - full).abs().max().item(), (best[:, 0] - best[:, 1]).min().item()


count, differences, leads = pick(48, 12), [], []
for start in (5000, 9000, 20000, 40000):
    ids = tokenizer.encode(text[start : start + 400])[:24]
    expected = generate_naive(model, ids, count)
    assert small_generate(model, ids, count) == expected
    assert generate_cached(model, ids, count) == expected
    assert generate_cached(model, ids, count, cache=ConcatCache()) == expected
    difference, lead = logit_gap(ids + expected[:-1], len(ids))
    differences.append(difference)
    leads.append(lead)
print(f"4 prompts x {count} tokens x 3 caches: all equal to the naive loop")
print(f"largest difference of a logit {max(differences):.1e}; smallest lead of a chosen token {min(leads):.1e}")

# %% [markdown]
# The difference is rounding: matrix products of another shape add up in another order. As long as it stays far below
# the lead, greedy text cannot change. In bfloat16, with 8 significant bits in place of 24, a near-tie can flip, which
# is why the course proves equality in float32.

# %% [markdown]
# ## 6. Measure it
#
# ### Time: O(n²) against O(n)
#
# First the step. Both loops' steps are fitted by `a + b x tokens`: *b* is what one more token in the text adds to
# every later step. A *b* above zero is what makes the whole answer quadratic.

# %% tags=["nbval-ignore-output"]
cached_steps = step_seconds(generate_cached, prompt, steps)


def fit_line(x, y):
    """a, b of y = a + b x, without the 5 % slowest points: a busy machine's hiccups."""
    calm = y <= np.percentile(y, 95)
    b, a = np.polyfit(x[calm], y[calm], 1)
    return a, b


_, ax = plots.figure(height=3.0)
slopes = {}
for name, seconds, color in (
    ("naive", naive_steps, plots.MEANING["naive"]),
    ("cache", cached_steps, plots.MEANING["technique"]),
):
    a, slopes[name] = fit_line(positions[1:], seconds[1:])  # the first step is the prefill
    ax.plot(positions[1:], seconds[1:], ".", color=color, markersize=3)
    label = f"{name}: {units.show(a, 's', 2)} + {units.show(slopes[name], 's', 2)} x tokens"
    ax.plot(positions, a + slopes[name] * positions, color=color, label=label)
ax.set_xlabel("tokens in the text")
plots.unit_axis(ax.yaxis, "s", "time for the next token")
ax.set_ylim(0, np.percentile(naive_steps, 98) * 1.35)
ax.set_title("One step (tiny)")
ax.legend(loc="upper left")
plt.show()

# %% [markdown]
# *Naive steps climb; cached steps stay nearly level. Nearly: each still reads all stored K and V, 2 x layers x
# kv_heads x head_dim numbers a token, which is little beside the weights until the text is long (chapter 03 finds
# where).*
#
# Now whole answers, run in alternation, with the exponent fitted. An exponent that is 2 on paper shows as less here:
# a step over few tokens costs about the same as a step over one, because the weights are read and the kernels started
# either way. The exact count of FLOPs has no such floor.

# %% tags=["nbval-ignore-output"]
lengths = pick([25, 50, 100, 200], [10, 20, 40])
pairs = {}
for length in lengths:
    pairs[length] = clock.paired(
        lambda: generate_naive(model, prompt, length),  # noqa: B023
        lambda: generate_cached(model, prompt, length),  # noqa: B023
        repeats=3,
        warmup=1 if length < 100 else 0,
    )
    pair = pairs[length]
    print(
        f"{length:4d} new tokens: naive {units.show(pair.a.median, 's'):>8}, "
        f"cache {units.show(pair.b.median, 's'):>8}, ratio {pair.ratio}"
    )

many = [2**i for i in range(5, pick(13, 10))]
shape = known_shape("llama-7b")


def answer_flops(shape, p, n, cached):
    """FLOPs of a whole answer by formula, layers and attention and head."""
    prefill_then_decode = [(p, 0)] + [(1, p + i) for i in range(n - 1)]  # (new tokens, tokens stored) of each call
    calls = prefill_then_decode if cached else [(p + i, 0) for i in range(n)]
    return sum(forward_counts(shape, new, context, scored=1).total_flops for new, context in calls)


counted = {name: [answer_flops(shape, 1, m, name == "cache") for m in many] for name in ("naive", "cache")}
_, axes = plots.figure(1, 2, width=7.6, height=3.1)
measured = {"naive": [q.a.median for q in pairs.values()], "cache": [q.b.median for q in pairs.values()]}
plots.scaling(lengths, measured, "new tokens", "s", "time of the answer", "Measured here (tiny)", axes[0])
plots.scaling(many, counted, "new tokens", "FLOP", "FLOPs of the answer", "Counted: LLaMA-7B shape", axes[1])
plots.plain_log_ticks(axes[1].xaxis, many[::2])
for ax in axes:
    for line, color in zip(ax.lines, (plots.MEANING["naive"], plots.MEANING["technique"])):
        line.set_color(color)
    ax.legend()
plt.show()

# %% [markdown]
# *Left: seconds on this machine, right: FLOPs by formula; fitted exponents in the legends.* Over the linears the
# count is n² / 2 rows against n. Attention (注意力) has one power more each: n³ / 6 query-key pairs without a cache,
# n² / 2 with one. So "O(n) with a cache" is short for *the linears are O(n), and attention's O(n²) is small at usual
# lengths*; the legend's exponent just above 1 is that term arriving.
#
# ### Prediction against measurement
#
# Rows are counted by a hook on the first layer, not derived again.

# %% tags=["nbval-ignore-output"]
rows = {"naive": 0, "cache": 0}
for name, generate in (("naive", generate_naive), ("cache", generate_cached)):

    def count_rows(module, inputs, output):
        rows[name] += inputs[0].shape[:-1].numel()  # noqa: B023

    hook = model.layers[0].register_forward_hook(count_rows)
    generate(model, prompt, n)
    hook.remove()
reveal("02.rows_naive", rows["naive"])
reveal("02.rows_cache", rows["cache"])
last = pairs[lengths[-1]]
reveal("02.speedup", last.ratio.median)

machine = ceilings(fast=is_fast())
step = forward_counts(config, 1, context=p + n // 2)
ceiling = machine.read_bandwidth / step.total_bytes  # a decode step can be no faster than reading its bytes
rate = {"naive": n / last.a.median, "cache": n / last.b.median}
plots.beside(
    [
        dict(name="naive", here=rate["naive"], recorded=recorded("tiny.naive.tokens_per_s")),
        dict(
            name="cache",
            here=rate["cache"],
            recorded=recorded("tiny.cache.tokens_per_s"),
            prediction=rate["naive"] * rows["naive"] / rows["cache"],
            ceiling=ceiling,
        ),
    ],
    "tokens/s",
    f"{n} tokens after {p} (tiny)",
    log=True,
)
plt.show()

# %% [markdown]
# *Orange: naive speed x ratio of rows. Red: memory bandwidth (内存带宽) measured here / bytes of a decode step.* The
# counts are exact. The speed-up is not their ratio: one row at a time reads every weight for a single row, while the
# naive loop's rows share one reading. A saving in FLOPs is a saving in time only where FLOPs were the limit.
#
# ### Prefill and decode are two workloads
#
# The same weights, the same code, two ends of the roofline of chapter 00.

# %% tags=["nbval-ignore-output"]
name = pick("smollm2-135m" if is_available("smollm2-135m") else "tiny", "tiny")
big = load_model(name, dtype="float32") if name != "tiny" else model
span = pick(256, 128)
sample = torch.tensor([load_tokenizer(name).encode(text[:4000])[:span]], device=device)
cache = ContiguousCache(big.config, 1, span + 64, device=device)


def run_prefill():
    cache.truncate(0)
    prefill(big, sample, cache)


def run_decode():
    cache.truncate(span)
    decode(big, sample[:, 0], cache)


run_prefill()
both = clock.paired(run_prefill, run_decode, repeats=5, warmup=1)
roof = roofline(machine)
work = {
    "prefill": (forward_counts(big.config, span, scored=1), both.a.median),
    "decode": (forward_counts(big.config, 1, context=span), both.b.median),
}
points = {}
print(f"model: {name}, prompt of {span} tokens, float32, {machine.threads} CPU threads")
for kind, (counts, seconds) in work.items():
    at = place(counts, seconds, roof, kind)
    points[kind] = (at.intensity, at.flops_per_second)
    print(
        f"{kind:8s} {counts.tokens:4d} tokens a call  {counts.tokens / seconds:8.1f} tokens/s  "
        f"{at.intensity:6.2f} FLOP/B  {at.share_of_roof:4.0%} of the ceiling, bound by {at.bound}"
    )
plots.roofline(points, roof.peak, roof.bandwidth, f"Prefill and decode ({name})")
plt.show()

# %% [markdown]
# *Prefill shares each weight among all prompt tokens: many FLOPs a byte. Decode reads every weight for one token:
# about half a FLOP a byte in float32 (one in 16 bits), whatever the model.* Hence the two names in every engine:
# `prefill` sets time to first token (TTFT), `decode` sets time per output token (TPOT), and they are tuned apart.
#
# ### Bytes: the formula against allocated memory

# %%
cache = ContiguousCache(config, 1, p + n, device=device)
allocated = cache.k.untyped_storage().nbytes() + cache.v.untyped_storage().nbytes()
reveal("02.kv_bytes", allocated)
assert allocated == 2 * 1 * config.num_layers * config.num_kv_heads * config.head_dim * (p + n) * 4

# %% [markdown]
# Three figures worth knowing by heart, each from the formula. The check allocates the library's cache at the true
# shape on torch's `meta` device, which has shapes and sizes but no memory. LLaMA-7B is plain multi-head attention
# (MHA, 多头注意力): 32 layers, 32 KV heads of 128. The second shape uses grouped-query attention (GQA,
# 分组查询注意力): 32 layers, 8 KV heads of 128. 16-bit numbers.

# %%
for title, name, batch, length in (
    ("LLaMA-7B, 1 x 2,048", "llama-7b", 1, 2048),
    ("LLaMA-7B, 8 x 4,096", "llama-7b", 8, 4096),
    ("7B with GQA, 1 x 131,072", "mistral-7b", 1, 131072),
):
    shape = known_shape(name)
    formula = 2 * batch * shape.num_layers * shape.num_kv_heads * shape.head_dim * length * 2
    meta = ContiguousCache(shape, batch, length, dtype=torch.bfloat16, device="meta")
    assert meta.nbytes == formula
    print(
        f"{title:25s} {kv_bytes_per_token(shape) // 1024:4d} KiB a token  "
        f"{formula / 2**30:5.1f} GiB = {formula / 1e9:5.2f} GB"
    )

# %% [markdown]
# The 7B's weights are about 13.5 GB in 16 bits. Batch 8 at 4,096 tokens already keeps more in its cache than in its
# weights; GQA buys a 4 x longer context for the same bytes, no less linear.
#
# ### Grow by concatenation, or write into room reserved ahead?
#
# The short way is `torch.cat`: correct, two lines, and each step allocates a new tensor and copies all that is
# stored. One way to count what is written is to stand between torch and its kernels.

# %%
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class CountWrites(TorchDispatchMode):
    """Bytes written by cat and copy_ while it is active."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.cat.default:
            self.bytes += out.nbytes
        elif function is torch.ops.aten.copy_.default:
            self.bytes += args[0].nbytes
        return out


def fill(cache, config, tokens):
    """Attend one call of `tokens` random tokens through all layers."""
    q = torch.randn(1, tokens, config.num_heads, config.head_dim, device=device)
    k, v = torch.randn(2, 1, tokens, config.num_kv_heads, config.head_dim, device=device)
    for index in range(config.num_layers):
        cache.attend(LayerInfo(index, config.scale), q, k, v)


written = {}
for name, cache in (
    ("concatenating", ConcatCache()),
    ("preallocated", ContiguousCache(config, 1, p + n, device=device)),
):
    fill(cache, config, p - 1)
    with CountWrites() as counter:
        for _ in range(n):
            fill(cache, config, 1)
    written[name] = counter.bytes
reveal("02.concat_writes", written["concatenating"])
assert written["concatenating"] == row_bytes * sum(p + i for i in range(n))
assert written["preallocated"] == row_bytes * n
print(f"{n} steps from {p - 1} tokens: " + ", ".join(f"{k} {units.show(v, 'B')}" for k, v in written.items()))

# %% [markdown]
# Exact, both: `row x (p + (p + 1) + ...)` against `row x n`. O(n²) is back, in bytes. Does it cost time? With `tiny`
# little: its whole cache is small. So take one layer of LLaMA-7B's shape, and time one step (write and attend) at
# several lengths.

# %% tags=["nbval-ignore-output"]
layer7b = known_shape("llama-7b").with_changes(num_layers=1)
spans = pick([256, 1024, 4096], [64, 256, 1024])
ratios = []
for length in spans:
    grown, reserved = ConcatCache(), ContiguousCache(layer7b, 1, length + 64, device=device)
    fill(grown, layer7b, length)
    fill(reserved, layer7b, length)
    pair = clock.paired(
        lambda: fill(grown, layer7b, 1),  # noqa: B023
        lambda: fill(reserved, layer7b, 1),  # noqa: B023
        repeats=pick(7, 5),
    )
    ratios.append(pair.ratio.median)
    extra = units.show(grown.nbytes, "B")
    print(
        f"{length:5d} tokens: concatenating takes {pair.ratio} x the preallocated step, "
        f"and writes {extra} to add one row"
    )
plots.bars([f"{s} tokens" for s in spans], ratios, "x", "Step time, concatenating / preallocated")
plt.show()

# %% [markdown]
# *One attention layer, 32 heads of 128, float32; median of paired runs, quartiles printed above.* The copy moves
# twice the bytes that attention reads, once in and once out, into memory that was just allocated; while it runs, old
# and new exist together, so the peak is twice the cache of a layer. Reserving ahead has its own price: room for the
# longest answer is taken from the first token on.

# %%
used, reserved = 40, config.max_length
print(f"{used} tokens in a cache reserved for {reserved}: {1 - used / reserved:.0%} of its bytes hold nothing")

# %% [markdown]
# That waste is what paged caches remove: chapter 05.

# %% [markdown]
# ## 7. Where it backfires
#
# A request that wants **one token**: a classifier's label, a yes or no, a score for reranking. There is no second
# step, so nothing stored is ever read. Speed-up of the cache (naive time / cached time, paired) by prompt and answer
# length:

# %% tags=["nbval-ignore-output"]
prompts, answers = pick([8, 64, 256], [8, 64]), pick([1, 2, 8, 32], [1, 2, 16])
words = tokenizer.encode(text[:3000])
table = {}
for length in prompts:
    for new in answers:
        pair = clock.paired(
            lambda: generate_naive(model, words[:length], new),  # noqa: B023
            lambda: generate_cached(model, words[:length], new),  # noqa: B023
            repeats=pick(9 if new < 8 else 3, 5 if new < 8 else 2),
            warmup=1 if new < 8 else 0,
        )
        table[length, new] = pair.ratio.median
        if new == 1:
            stored = length * row_bytes
            print(
                f"prompt {length:3d}, 1 new token: speed-up {pair.ratio}; "
                f"{units.show(stored, 'B')} of K and V stored, never read again"
            )

_, ax = plots.figure(height=0.9 + 0.5 * len(prompts))
grid = np.array([[table[a, b] for b in answers] for a in prompts])
ax.imshow(np.log2(grid), cmap="RdBu", vmin=-4, vmax=4, aspect="auto")
for i, row in enumerate(grid):
    for j, value in enumerate(row):
        ax.text(j, i, f"{value:.2f} x", ha="center", va="center", color="white" if value > 5 else "black", fontsize=9)
ax.set_xticks(range(len(answers)), answers)
ax.set_yticks(range(len(prompts)), prompts)
ax.grid(False)
ax.set(xlabel="new tokens", ylabel="prompt, tokens", title="Speed-up of the cache (tiny)")
plt.show()

# %% [markdown]
# *White: no difference; blue: the cache wins.* In the column of one token the ratio stands near 1: the same forward,
# plus an allocation. The bytes are real, though: a server that reserves a cache for such requests holds memory that
# other requests could batch with. Engines treat them apart ("pooling", "scoring", "max_tokens=1").
#
# Two more costs to name when asked: the cache takes the memory that would have held more requests, and it turns a
# stateless call into state that must be rolled back, moved and freed. The exercise has a bug of that kind.

# %% [markdown]
# ## 8. Play
#
# FLOPs of a whole answer at LLaMA-7B's shape, by formula. Move `new tokens`.


# %% tags=["nbval-ignore-output"]
def draw(ax, new_tokens, prompt_tokens):
    shape = known_shape("llama-7b")
    first = forward_counts(shape, prompt_tokens, scored=1).total_flops
    naive = answer_flops(shape, prompt_tokens, new_tokens, cached=False)
    cached = answer_flops(shape, prompt_tokens, new_tokens, cached=True)
    ax.barh([0, 1], [first, first], color=plots.MEANING["prefill"], label="prompt, once")
    ax.barh([0], [naive - first], left=[first], color=plots.MEANING["naive"], label="every later step, whole text")
    ax.barh([1], [cached - first], left=[first], color=plots.MEANING["decode"], label="every later step, one row")
    ax.set_yticks([0, 1], ["naive", "cache"])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    plots.unit_axis(ax.xaxis, "FLOP", "FLOPs of the answer")
    ax.xaxis.set_major_locator(plt.MaxNLocator(3 if len(ax.figure.axes) == 1 else 1))
    ax.set_xlim(0, naive * 1.4)
    for row, total in enumerate((naive, cached)):
        ax.annotate(units.show(total, "FLOP"), (total, row), (4, 0), textcoords="offset points", va="center", size=8)
    kept = kv_bytes_per_token(shape) * (prompt_tokens + new_tokens)
    ax.set_title(f"{naive / cached:.1f} x fewer FLOPs for {units.show(kept, 'B')} of cache")
    if len(ax.figure.axes) == 1:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)


explore(
    draw,
    new_tokens=(1, 257, 8, 9),
    prompt_tokens=(16, 512, 16, 128),
    static=[dict(new_tokens=1), dict(new_tokens=3), dict(new_tokens=17)],
    height=2.8,
)

# %% [markdown]
# *Above, a prompt of 128 tokens. One new token: the bars are equal. From then on each naive step adds a bar as long
# as the prompt's, so with a prompt much longer than the answer the ratio is about the number of new tokens.*

# %% [markdown]
# ## 9. Say it
#
# **"What is a KV cache?"**
# - *20 seconds.* Under a causal mask the keys and values of past tokens never change. Store them, and a new token
#   needs one row through the layers instead of the whole text: n rows in place of n² / 2.
# - *2 minutes.* Start from the naive loop and its growing step (section 1). K and V of old tokens come out equal at
#   each step (the cell with `Watch`); Q of old tokens is not needed, since only the last logits are read. So prefill
#   the prompt once, then decode a row at a time: write K and V at the next position, attend over all (section 4).
#   Tokens are equal to the naive loop's (section 5). Work in the linears drops from O(n²) to O(n), attention from
#   O(n³) to O(n²) (section 6).
# - *Follow-up: why not cache Q?* No later token ever looks at an old query. *Follow-up: is the speed-up the ratio of
#   FLOPs?* No: decode reads all weights for one row, see the orange and the red mark in section 6.
# - *The number:* n² / 2 rows become n.
#
# **"How large is it?"**
# - *20 seconds.* 2 x batch x layers x KV heads x head dim x length x bytes. LLaMA-7B in 16 bits: 512 KiB a token, 1
#   GiB at 2,048 tokens, 17.2 GB for 8 x 4,096.
# - *2 minutes.* Derive each factor, check it against allocated bytes, then say what shrinks each: batch (admission),
#   KV heads (GQA: 8 of 32 is a quarter), length (windows, eviction), bytes (quantised KV). The 7B with 8 KV heads
#   reaches 17.2 GB at 128 K tokens. Weights are paid once, KV per request: KV decides the batch, the batch decides
#   throughput.
# - *Follow-up: query heads or KV heads?* KV heads, the commonest slip. *Follow-up: GB or GiB?* 16 GiB = 17.2 GB.
# - *The number:* 0.5 MiB a token for 7B MHA, 0.125 MiB with 8 KV heads ("Bytes", section 6).
#
# **"Prefill against decode?"**
# - *20 seconds.* Prefill runs all prompt tokens at once and is bound by arithmetic; decode runs one token and is
#   bound by reading weights and KV.
# - *2 minutes.* Same forward, different intensity (计算强度): the roofline of section 6. Prefill sets TTFT, decode
#   TPOT. Batching helps decode, because rows share the weights; it does not help a long prefill. Hence chunked
#   prefill and disaggregation later on.
# - *Follow-up: what does a decode step cost at least?* (weight bytes + KV bytes) / bandwidth: the red mark.
# - *The number:* about 1 FLOP a byte for decode at batch 1 in 16 bits, half that in float32.
#
# **"When does the cache not help?"**
# - *20 seconds.* One output token: nothing stored is read (section 7). And a cache that grows by concatenation copies
#   O(n²) bytes; reserve ahead, or page.
# - *2 minutes.* Show the column of ones; then bytes written by the two caches, counted (section 6); then the price of
#   reserving: room held for tokens that never come, which paging removes.
# - *Follow-up: what goes wrong in practice?* State: a wrong offset after a rollback, positions that start again at 0,
#   a row that still sees its last tenant. Nothing crashes; the text is subtly off. The test is always the naive loop.
# - *The number:* speed-up 1 at one token, whatever the prompt.

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %% tags=["nbval-ignore-output"]
predictions()

# %% [markdown]
# **Exercise:** `exercises/02_kv_cache.ipynb`: the formula, three figures, the mask, your own cache, and a cache that
# shows one request another's text.
#
# **Papers:** Pope et al. 2022, *Efficiently Scaling Transformer Inference* (arXiv:2211.05102), for prefill, decode
# and their costs; Shazeer 2019, *Fast Transformer Decoding* (arXiv:1911.02150), for why KV bytes, not FLOPs, limit
# decode; Ainslie et al. 2023, *GQA* (arXiv:2305.13245).
#
# **Next:** chapter 03 adds the other lines of the memory ledger: weights, activations, buffers, and what fits on a
# card.
