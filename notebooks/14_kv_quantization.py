# %% [markdown]
# # 14 KV-cache quantisation
#
# **Round keys along their channels, values along their tokens, and keep the newest tokens as they are: the cache
# shrinks to a quarter or less, and that many more requests run at once.**
#
# > *The interviewer asks:* "The KV cache fills the card. How would you quantise it? Why are keys and values treated
# > differently, what does 2 bits really cost, and does it make decoding faster?"
#
# You will be able to
# - draw why a key's scale is shared along a channel and a value's along a token, and what the residual window is for;
# - count the bytes of a token with scales, lows and window, and the requests that a card then holds;
# - name three cases in which it backfires: two bits per token on keys, short requests, and reading without a kernel.
#
# 35 minutes to read. `tiny` ships with the course; where `smollm2-135m` is present some cells run it, and say so.

# %%
import inspect

import matplotlib.pyplot as plt
import torch

from minillm import SamplingParams, load_model, load_tokenizer
from minillm.cache import kv_format
from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import decode, generate_cached
from minillm.cache.kv_format import FORMATS, KVFormat
from minillm.cache.kv_format import kv_format as named
from minillm.cache.quantized import QuantizedCache, quantized_bytes
from minillm.cache.quantized_paged import block_bytes, paged_format, recent_bytes
from minillm.engine.engine import Engine
from minillm.engine.memory import blocks_in
from minillm.engine.options import EngineOptions
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import clock
from minillm.measure.memory import CARDS, weight_bytes
from minillm.measure.quality import Reference
from minillm.model.hub import ASSETS, is_available
from minillm.model.shapes import known_shapes

torch.set_grad_enabled(False)
model = load_model("tiny", dtype="float32")
config, device = model.config, model.device
text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
tokens = load_tokenizer("tiny").encode(text[: pick(20_000, 8_000)])[: pick(2048, 1024)]
big_name = pick("smollm2-135m" if is_available("smollm2-135m") else "tiny", "tiny")
print(f"on {device}, {torch.get_num_threads()} CPU threads; larger cells run {big_name}")

# %% [markdown]
# ## 1. The waste, measured
#
# Every running request keeps K and V (键值缓存) of every token it has seen, in the model's own type. How much of that
# does the model need? Run it over a book it was not trained on, with its keys and values rounded on their way into
# the cache, and compare with the original on the same tokens (intervals: paired bootstrap, chapter 15).


# %%
class Through:
    """A model that attends through a quantised cache, from the first token of each window."""

    def __init__(self, model, form):
        self.model, self.form, self.config, self.device = model, form, model.config, model.device

    def __call__(self, rows):
        cache = QuantizedCache(self.config, *rows.shape, self.form, self.model.dtype, self.device)
        return self.model(rows, cache=cache)


window = pick(512, 256)
reference = Reference(model, tokens, window)
forms = {"int8": FORMATS["int8"], "fp8": FORMATS["fp8"], "int4": named("int4", 16), "int2": named("int2", 16)}
damage = {}
print(f"{'':10s}{'perplexity / before':>26s}{'KL, nats':>34s}{'same first token':>18s}")
for name, form in forms.items():
    damage[name] = reference.damage(Through(model, form))
    found = damage[name]
    print(f"{name:10s}{found.ratio!s:>26s}{found.mean_kl!s:>34s}{found.agreement.value:18.1%}")
assert damage["int8"].ratio.value < 1.005 and damage["int8"].mean_kl.value < damage["int2"].mean_kl.value

# %% [markdown]
# Eight bits change perplexity by less than this text can tell from nothing, and four hardly more. The other bits are
# stored and read at every step, and each byte of them is room that another request could have had. Weights are
# there once; KV is there once a request, so from some batch on it is what the card is full of:

# %%
card, shape = CARDS[80], known_shapes()["llama-3.1-8b"]
weights = weight_bytes(shape)
plain = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2  # bytes of a token in 16 bits
for context in (2048, 8192, 32768):
    room = int((card.bytes * 0.9 - weights) / (context * plain))
    print(f"{card.name}, 8B in 16 bits, {context:6d} tokens each: {room:4d} requests beside {weights / 1e9:.1f} GB")

# %% [markdown]
# ## 2. Predict
#
# `tiny` has 6 layers, 2 KV heads, 32 channels; in float32 a token takes 2 x 6 x 2 x 32 x 4 = 3072 B.
#
# - *INT8, a scale (缩放因子) a vector.* 32 codes and one 16-bit scale for each of the 24 vectors.
# - *INT4, KIVI.* A key's scale and low end are shared by 16 tokens of a channel: 4 + 32/16 bits. A value's by a
#   vector of 32: 4 + 32/32.
# - *Requests in the same memory*, each of them long: the ratio of bytes, were there no window.
# - *What two bits less cost.* The step is range / (2^b - 1): from 4 to 2 bits it grows by 15 / 3.

# %%
predict("14.bytes_int8", 24 * (32 + 2), "B")
predict("14.bytes_int4", 12 * 32 * (4 + 32 / 16 + 4 + 32 / 32) / 8, "B")
predict("14.more_requests_int8", 3072 / 816, "x")
predict("14.step_4_to_2", 15 / 3, "x")

# %% [markdown]
# ## 3. The idea, drawn
#
# Look at what is to be rounded: one head's keys and values, token by token.

# %%
shown = load_model(big_name, dtype="float32")
ids = load_tokenizer(big_name).encode(text[:2000])[:128]
seen = ContiguousCache(shown.config, 1, len(ids), device=shown.device)
shown(torch.tensor([ids], device=shown.device), cache=seen)


def spread(x, axis):
    """How far the largest row or column stands out: its mean size over the median one's. x [tokens, dim]."""
    size = x.abs()[8:].mean(axis)  # the first tokens are a story of their own (chapter 24)
    return (size.max() / size.median()).item()


stands_out = [[spread(head, 0) for head in layer[0]] for layer in seen.k]
layer, head = max(
    ((i, j) for i in range(len(stands_out)) for j in range(len(stands_out[i]))), key=lambda p: stands_out[p[0]][p[1]]
)
_, axes = plots.figure(1, 2, width=7.4, height=2.9)
for ax, name, store in zip(axes, ("keys", "values"), (seen.k, seen.v)):
    x = store[layer, 0, head].cpu()  # [tokens, dim]
    levels = (x.abs() / x.abs().quantile(0.995) * 8).round().clamp(max=8)
    ax.imshow(levels[:64], aspect="auto", cmap="Blues", interpolation="nearest")
    ax.grid(False)
    ax.set(xlabel="channel", ylabel="token")
    ax.set_title(f"{name}: channel {spread(x, 0):.1f} x, token {spread(x, 1):.1f} x the median", fontsize=9)
plt.show()
print(f"{big_name}, layer {layer}, KV head {head}; size of the numbers, dark is large")

# %% [markdown]
# *Keys have stripes: a few channels are large in every token. Values have none that pronounced.* Who shares a scale
# shares a step. A scale for each **token** of the keys (per token, 逐词元) would cross all stripes: the outlier
# (离群值) sets the step, and the quiet channels are rounded to nothing. A scale for each **channel** (per channel,
# 逐通道) leaves the stripe to itself. Values are summed over tokens, weighted by attention: a token's own scale keeps
# the error of an unimportant token in that token, and needs no other token to be there. This is KIVI's rule.
#
# It has a price. A channel's scale needs several tokens; they come one at a time. So the newest wait, unrounded, in a
# **residual window** (残差窗口), until a unit is full:


# %%
def drawn(ax, length, residual, per_row=16):
    """Keys of a cache of `length` tokens: [channels, tokens]; one colour for each scale; the window in orange."""
    shades = ["#CFE3F2", "#7FB2D9", "#B5D3EA", "#5F9CC9"]
    channels, border = 4, (length - 1) // residual * residual
    for c in range(channels):
        for t in range(length):
            color = shades[(c + t // residual) % 4] if t < border else plots.ORANGE
            ax.add_patch(plt.Rectangle((t, c), 0.92, 0.9, color=color))
    ax.set(xlim=(-0.2, 24), ylim=(channels, -0.2), xticks=range(0, 25, residual), yticks=[], ylabel="channel")
    ax.grid(False)
    ax.set_title(f"{length} tokens: {border} rounded, {length - border} as they are", fontsize=9)


_, axes = plots.figure(3, 1, width=6.4, height=3.9)
for ax, length in zip(axes, (15, 16, 17)):
    drawn(ax, length, 8)
axes[-1].set_xlabel("token")
plt.show()

# %% [markdown]
# *Blue: rounded, one shade a scale: a key's scale covers one channel of a unit of 8 tokens. Orange: the window, as
# the last query sees it.* The 16th token completes its unit and still sees it unrounded; the 17th sees the whole unit
# rounded. So **query p sees the tokens before p // R x R rounded and the rest as they are**: its position alone
# decides, not how the tokens came in. Chunked prefill, prefix hits and preemption then change nothing.

# %% [markdown]
# ## 4. Build it
#
# One head, no batch. Rounding, and attention (注意力) with one softmax over both kinds of keys.


# %%
def small_round(x, bits, dim):
    """x rounded with one scale and one low end for everything along `dim`."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale, low = ((high - low) / (2**bits - 1)).half().float(), low.half().float()  # as they are stored
    codes = ((x - low) / scale).round().clamp(0, 2**bits - 1)
    return low + codes * scale


class SmallCache:
    """K and V of one head. R tokens are rounded together: keys per channel, values per token."""

    def __init__(self, bits, R):
        self.bits, self.R = bits, R
        self.rounded, self.window = [], []  # (k, v) of R tokens each; (k, v) of a token each

    def attend(self, q, k, v, scale):
        """One new token: q, k, v [dim] -> [dim]."""
        if len(self.window) == self.R:  # the unit is full, and a token beyond it looks back
            ks, vs = (torch.stack(x) for x in zip(*self.window))  # [R, dim]
            self.rounded.append((small_round(ks, self.bits, 0), small_round(vs, self.bits, 1)))
            self.window = []
        self.window.append((k, v))
        keys = torch.cat([ks for ks, _ in self.rounded] + [torch.stack([k for k, _ in self.window])])
        values = torch.cat([vs for _, vs in self.rounded] + [torch.stack([v for _, v in self.window])])
        return (keys @ q * scale).softmax(0) @ values


generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(50, 32, generator=generator) for _ in range(3))
k[:, 5] = 10 + k[:, 5]  # an outlier channel
small = SmallCache(4, 16)
out = torch.stack([small.attend(q[t], k[t], v[t], 32**-0.5) for t in range(50)])
exact = torch.stack([(k[: t + 1] @ q[t] * 32**-0.5).softmax(0) @ v[: t + 1] for t in range(50)])
print(f"{len(small.rounded)} units rounded, {len(small.window)} tokens in the window")
print(f"4 bits: the output is {(out - exact)[16:].norm() / exact[16:].norm():.1%} off, once units are rounded")
across = small_round(k[:16], 4, 1) - k[:16], small_round(k[:16], 4, 0) - k[:16]
off = [(x[:, 6:].norm() / k[:16, 6:].norm()).item() for x in across]
print(f"keys beside the outlier: {off[0]:.1%} off with a scale a token, {off[1]:.1%} with a scale a channel")

# %% [markdown]
# (The rounded numbers are kept as floats here; packing them is chapter 11's.)

# %% [markdown]
# ## 5. The library's version

# %%
print(inspect.getsource(kv_format.sees))
print(inspect.getsource(KVFormat.encode))

# %% [markdown]
# | it adds | because |
# |---|---|
# | many queries at once, each with its own border | a prompt of 500 tokens is one forward, not 500 |
# | codes packed, scale and low in 16 bits, *rounded before use* | the codes fit the scale that is stored |
# | `low`, not the zero point low / scale | a channel at 50 with a range of 0.01 has a zero point beyond 16 bits |
# | the unit before the window keeps its floats | speculation rolls back (`truncate`); codes cannot be unrounded |
# | INT8 and FP8 with no window | a token's own vector is all they need; what vLLM and others ship by that name |
# | the paged form | blocks are rounded when full; forked, swapped and cached as codes |
#
# **Equal, proved:** the 40 lines against the contiguous cache, and the engine's paged cache against it.

# %%
layer_info = kv_format.LayerInfo(0, 32**-0.5)
one = config.with_changes(num_layers=1, num_heads=1, num_kv_heads=1)
cache = QuantizedCache(one, 1, 50, named("int4", 16))
library = [cache.attend(layer_info, *(x[None, t : t + 1, None] for x in (q, k, v)))[0, 0] for t in range(50)]
library = torch.cat(library)  # [50, 32]
whole = QuantizedCache(one, 1, 50, named("int4", 16)).attend(layer_info, *(x[None, :, None] for x in (q, k, v)))
assert torch.allclose(library, out, atol=1e-3) and torch.allclose(whole[0, :, 0], library, atol=1e-4)

prompts = ["Once upon a time", "The sea was", "In the beginning God created", "To be, or not to be", "My dear Emma,"]
encoded = [load_tokenizer("tiny").encode(prompt) for prompt in prompts]
greedy = SamplingParams(max_tokens=40, temperature=0)
for name in ("int8", "int2"):
    options = EngineOptions(
        kv_cache_dtype=name, num_blocks=pick(64, 24), max_num_batched_tokens=7, max_num_seqs=4, preemption="swap"
    )
    engine = Engine(model, options, eos_ids=())
    groups = [engine.add(ids, greedy) for ids in encoded]
    while engine.has_work:
        engine.step()
    same = 0
    for ids, group in zip(encoded, groups):
        cache = QuantizedCache(config, 1, 80, paged_format(name, 16), device=device)
        alone = generate_cached(model, ids, 40, cache=cache)
        same += group.requests[0].output == alone
    print(f"{name}: paged, batched, in chunks of 7 tokens: {same} of {len(encoded)} texts as one request at a time")
    assert same >= len(encoded) - 1  # a number at the border of two codes may fall either way

# %% [markdown]
# And the float model? At 8 bits the greedy text of these prompts should stay; at 2 bits it need not.

# %%
original = [generate_cached(model, ids, 40) for ids in encoded]
kept = {}
for name in forms:
    caches = [QuantizedCache(config, 1, 80, name, device=device) for _ in encoded]
    made = [generate_cached(model, ids, 40, cache=cache) for ids, cache in zip(encoded, caches)]
    first = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), 40) for x, y in zip(original, made)]
    kept[name] = sum(first)
    print(f"{name}: first different token at {first} (40: none)")
assert kept["int8"] >= 0.8 * 40 * len(encoded)

# %% [markdown]
# INT4 does well here for a plain reason: in texts this short most tokens are still in the window. Where INT8 parts
# from the original, two tokens were nearly tied. FP8 has 3 bits behind the point, INT8 seven and a scale.

# %% [markdown]
# ## 6. Measure it
#
# ### Bytes, and requests that run at once

# %%
rows = []
for name in forms:
    form = paged_format(name, 16)
    token, fixed = block_bytes(config, form, 16) / 16, recent_bytes(config, form, 16, 1, model.dtype)
    assert QuantizedCache(config, 1, 512, form).nbytes == quantized_bytes(config, 1, 512, form, torch.float32)
    rows.append((name, token, fixed))
    print(f"{name}: {token:6.0f} B a token + {units.show(fixed, 'B')} of window a request, for 3072 B in float32")
reveal("14.bytes_int8", rows[0][1])
reveal("14.bytes_int4", rows[2][1])

# %% [markdown]
# The same memory for K and V, the same requests: how many does the scheduler run at once? The number of blocks
# follows from the bytes; no request is preempted.

# %%
length, new, memory = pick((384, 24, 6_000_000), (160, 12, 2_500_000))
need = -(-(length + new) // 16)


def options_for(name, count):
    return EngineOptions(
        kv_cache_dtype=name, max_num_seqs=count, max_num_batched_tokens=512, headroom=0, keep_log=True
    )


def fits(name):
    """The most requests whose blocks, to their last token, fit the memory."""
    count = 1
    while blocks_in(memory, config, options_for(name, count + 1), torch.float32) >= (count + 1) * need:
        count += 1
    return count


requests = [tokens[i * 7 : i * 7 + length] for i in range(pick(32, 24))]
running, peak = {}, {}
for name in ("auto", *forms):
    count = fits(name)
    blocks = blocks_in(memory, config, options_for(name, count), torch.float32)
    engine = Engine(model, EngineOptions(**{**vars(options_for(name, count)), "num_blocks": blocks}), eos_ids=())
    groups = [engine.add(prompt, SamplingParams(max_tokens=new, temperature=0)) for prompt in requests]
    while engine.has_work:
        engine.step()
    assert engine.runner.cache.nbytes <= memory and not any(step.preempted for step in engine.scheduler.log)
    running[name] = [step.running for step in engine.scheduler.log]
    peak[name] = max(running[name])
    print(f"{name:5s} {units.show(engine.runner.cache.nbytes, 'B'):>8s}  {blocks:4d} blocks  {peak[name]:3d} at once")
assert peak["int8"] > 2.5 * peak["auto"] and peak["int4"] > 1.5 * peak["auto"]
reveal("14.more_requests_int8", peak["int8"] / peak["auto"])
ax = plots.bars(list(peak), list(peak.values()), "requests", f"Requests at once in {units.show(memory, 'B')} of KV")
ax.set_xticks(range(0, max(peak.values()) + 1, 4))
ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
plt.show()

# %% [markdown]
# *Each request has the same length; whole requests only.* Fewer bits do not always mean more requests: `int4` and
# `int2` pay for a window in floats, two blocks a request (one is read, one is kept for rolling back), and in
# float32, at a few hundred tokens, that is as much as INT8's wider codes. The longer the request, the less the window
# weighs:

# %%
lengths = [32, 64, 128, 256, 512, 1024, 4096, 16384]
_, ax = plots.figure(height=3.1)
for (name, token, fixed), color in zip(rows, plots.PALETTE):
    share = [(fixed + n * token) / n for n in lengths]
    ax.loglog(lengths, share, "o-", color=color, label=name)
ax.axhline(3072, color=plots.MEANING["naive"], label="float32")
plots.plain_log_ticks(ax.xaxis, lengths)
plots.plain_log_ticks(ax.yaxis, [256, 512, 1024, 2048, 4096, 8192])
ax.set(xlabel="tokens of the request", ylabel="bytes a token, window included", title="tiny, blocks of 16 tokens")
ax.legend()
plt.show()

# %% [markdown]
# *Below about 40 tokens the window alone is more than the floats it replaces; from a few hundred on INT4 is below
# INT8.*
#
# ### Quality against bits, on a model with stripes

# %%
if big_name != "tiny":
    big_ids = load_tokenizer(big_name).encode(text[:6000])[:512]
    big_reference = Reference(shown, big_ids, 256)
    big_damage = {name: big_reference.damage(Through(shown, form)) for name, form in forms.items()}
    for name, found in big_damage.items():
        print(
            f"{big_name} {name:5s} perplexity x {found.ratio}, KL {found.mean_kl}, agrees {found.agreement.value:.1%}"
        )
    assert big_damage["int4"].mean_kl.value < big_damage["int2"].mean_kl.value
else:
    print("smollm2-135m: not run here (minillm pull smollm2-135m, and full mode)")

# %% [markdown]
# Four bits cost little there, two bits plainly something: "2-bit KV is free" depends on the model. KIVI's authors
# report, for Llama, Falcon and Mistral models, almost the same quality at 2 bits, 2.6 x less peak memory (weights
# included) and batches up to 4 x larger. What the two bits are worth, on numbers without outliers:

# %%
x = torch.randn(1, 4096, 1, 32, generator=generator)
error = {}
for bits in (4, 2):
    form = KVFormat(bits, group=16, residual=16)
    back = form.decode("k", form.encode("k", x.unflatten(1, (-1, 16)).squeeze(0)))
    error[bits] = (back - x.unflatten(1, (-1, 16)).squeeze(0)).square().mean().sqrt()
reveal("14.step_4_to_2", (error[2] / error[4]).item())

# %% [markdown]
# ### Error against length
#
# Everything a query reads has been rounded, and deeper layers read what earlier ones made of it. Does the error grow
# with the context? KL with the original, by position in the window:

# %%
bucket = window // 8
_, ax = plots.figure(height=3.0)
growth = {}
for (name, found), color in zip(damage.items(), plots.PALETTE):
    per_window = torch.cat((found.kl, torch.zeros(-len(found.kl) % (window - 1)))).view(-1, window - 1)
    full_windows = per_window[: len(found.kl) // (window - 1)]
    curve = [part.mean().item() for part in full_windows.split(bucket, dim=1)]
    growth[name] = curve[-1] / curve[0]
    ax.semilogy([bucket * (i + 0.5) for i in range(len(curve))], curve, "o-", color=color, label=name)
ax.set(xlabel="position in the context", ylabel="KL(original || quantised), nats", title="tiny")
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()
print("last eighth / first eighth: " + ", ".join(f"{name} {ratio:.1f} x" for name, ratio in growth.items()))

# %% [markdown]
# *The first tokens of a context are still in the window, or few; from there on the curves rise a little and
# flatten.* Attention averages over many tokens, so errors of single tokens partly cancel: what is added by a longer
# context is more of the same error, not a product of errors.
#
# ### Time

# %% tags=["nbval-ignore-output"]
prompt = torch.tensor([tokens[: pick(448, 200)]], device=device)
steps = {}
for name in ("float", *forms):
    if name == "float":
        cache = ContiguousCache(config, 1, 512, device=device)
    else:
        cache = QuantizedCache(config, 1, 512, forms[name], device=device)
    model.hidden(prompt, cache=cache)

    def run(cache=cache):
        decode(model, prompt[:, -1], cache)
        cache.truncate(prompt.shape[1])

    steps[name] = run
table = []
for name in forms:
    pair = clock.paired(steps["float"], steps[name], repeats=pick(9, 5), warmup=2)
    table.append(
        dict(name=name, here=pair.ratio.median, recorded=recorded(f"kv_cache.{name}.speedup"), prediction=1.0)
    )
    print(f"decode step through {name}: {pair.ratio} x the float cache's speed")
plots.beside(table, "x", f"Speed of a decode step, {prompt.shape[1]} tokens of context")
plt.show()

# %% [markdown]
# *Orange: the float cache; beyond it would be faster.* It is slower here: the cache is unpacked into floats before it
# is attended, so nothing is saved but memory. Where a kernel unpacks in registers, the bytes that are read fall with
# the bits, and at long contexts, where KV is most of what a step reads, the step gets faster. The memory is saved
# either way, and with it comes throughput: more requests share each reading of the weights (chapter 04).

# %% [markdown]
# ## 7. Where it backfires
#
# ### Two bits per token on keys
#
# Same bits, same window, only the sharing turned: a key's scale for its token and not for its channel.

# %%
turned = {
    "keys per channel": KVFormat(2, group=32, residual=32),
    "keys per token": KVFormat(2, keys="token", residual=32),
}
contest = [("tiny", model, reference)] + ([(big_name, shown, big_reference)] if big_name != "tiny" else [])
for name, which, before in contest:
    worse = {}
    for kind, form in turned.items():
        worse[kind] = before.damage(Through(which, form))
        bits = form.bits_per_number("k", which.config.head_dim)
        print(
            f"{name:13s}{kind:17s} {bits:.1f} bits a key, perplexity x {worse[kind].ratio}, KL {worse[kind].mean_kl}"
        )
    assert worse["keys per token"].mean_kl.value > 1.5 * worse["keys per channel"].mean_kl.value

# %% [markdown]
# With stripes of ten times the median and more (section 3), four levels across all channels leave the quiet ones no
# level of their own: the scores, q @ k, lose them. `tiny`'s stripes are faint and the harm is small; where they are
# strong, the model is broken. (The bits printed include scales and lows; a vector of 64 channels shares one more
# widely than 32 tokens do, so there the broken form also takes half a bit less.) At 8 bits the same sharing is
# harmless, which is why INT8 and FP8 caches get away with it.
#
# ### Values per channel
#
# The other way round is no better. Make one token's value large and see who pays: its neighbours, through the shared
# scale, and they are not the tokens that attention looks at.

# %%
values = torch.randn(16, 32, generator=generator)
values[3] *= 10
others = [t for t in range(16) if t != 3]
for kind, dim in (("per token", 1), ("per channel", 0)):
    off = (small_round(values, 2, dim) - values)[others]
    print(f"values {kind}: the 15 others are {off.norm() / values[others].norm():.0%} off")

# %% [markdown]
# ### Short requests, and no window at all
#
# Section 6 drew the first: under about 40 tokens the window takes more than it saves. The second is the temptation to
# drop it. KIVI's accuracy at 2 bits rests on the newest tokens, which attention looks at most:

# %%
for label, form in {"window of 32": turned["keys per token"], "none": KVFormat(2, keys="token", residual=0)}.items():
    found = reference.damage(Through(model, form))
    print(f"tiny, 2 bits per token, {label:12s} perplexity x {found.ratio}")

# %% [markdown]
# ## 8. Play
#
# Bits and window for an 8B model in 16 bits on a card: what a token takes, and how many requests fit.


# %% tags=["nbval-ignore-output"]
def play(ax, bits, residual, context, gigabytes):
    card = CARDS[gigabytes]
    free = card.bytes * 0.9 - weights
    labels, counts, sizes = [], [], []
    for label, form in (
        ("16 bits", None),
        ("8 bits", FORMATS["int8"]),
        (f"{bits} bits, {residual}", named(f"int{bits}", residual)),
    ):
        token = plain if form is None else form.token_bytes(shape)
        fixed = 0 if form is None else 2 * form.residual * plain
        labels.append(label)
        counts.append(int(max(free, 0) / (fixed + context * token)))
        sizes.append((fixed + context * token) / context)
    ax.barh(range(3), counts, color=[plots.MEANING["naive"], plots.SKY, plots.MEANING["technique"]], height=0.62)
    for place, (count, size) in enumerate(zip(counts, sizes)):
        text = f" {count}, {size / 1000:.0f} kB/token"
        ax.annotate(text, (count, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_yticks(range(3), labels)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlim=(0, (max(counts) or 1) * 2.0), xlabel=f"requests of {context} tokens on {card.sold_as}")


explore(
    play,
    bits=[4, 2],
    residual=[32, 16, 64, 128],
    context=(512, 16384, 512, 4096),
    gigabytes=[80, 24, 40, 141],
    static=[dict(context=512, residual=128), dict(context=8192, residual=32)],
    height=2.4,
)

# %% [markdown]
# *A scale for 16 tokens is 2 bits a key; for 32, one. A window of 128 weighs little at 8192 tokens and is most of the
# cache at 512.*

# %% [markdown]
# ## 9. Say it
#
# **"How would you quantise the KV cache?"**
# - *20 seconds.* INT8 or FP8 per token first: half of 16 bits, nearly free, nothing else changes. For 4 and 2 bits,
#   KIVI: keys per channel, values per token, the newest tokens unrounded in a window.
# - *2 minutes.* Keys have outlier channels (section 3), so a scale along the channel keeps the outlier to itself; a
#   value is used by its token's weight, so its error should stay with its token, and its scale is complete when it
#   arrives. A channel's scale needs a group of tokens: they wait in the residual window. Define what is seen by
#   position alone, and chunks, prefix hits, forks and recomputation give the same text (section 5).
# - *Follow-up: and a prefix cache?* Share full blocks, as codes; make the window end at a block's border, so a hit
#   never needs floats that are gone. *Follow-up: speculative decoding?* Keep the floats of one unit more: codes
#   cannot be unrounded.
# - *The number:* stripes of more than 10 x the median channel in keys; section 3 prints this model's largest.
#
# **"What does it save?"**
# - *20 seconds.* From 16 bits: just under 2 x at INT8; INT4 with groups of 32 takes 5 bits, less than a third; INT2
#   takes three. That many more requests, minus the window.
# - *2 minutes.* Bits a key = b + 32 / group, bits a value = b + 32 / head_dim, scale and low in 16 bits each. Window:
#   2 x R tokens a request in full here. So INT2 is never 8 x smaller; for short requests it is not smaller at all
#   (section 6). The scheduler ran as many as the formula said.
# - *Follow-up: when is KV worth quantising, and when weights?* By the ledger of chapter 03: weights at batch 1, KV at
#   large batch x context.
# - *The number:* 5 bits for INT4 and 3 for INT2 at groups of 32.
#
# **"Does it make decoding faster?"**
# - *20 seconds.* Only with a kernel that unpacks in registers, and only where reading KV is what a step spends its
#   time on. Without one it is slower. Throughput rises anyway, through larger batches.
# - *2 minutes.* Section 6 times it: unpacking to floats adds work. Bytes read fall by the bits only if the floats are
#   never written. Prefill does not profit: it computes attention over a chunk once.
# - *Follow-up: does the error grow with the context?* It rises, then flattens: errors of tokens partly cancel in the
#   weighted sum.
# - *The number:* none from elsewhere; measure at your context.
#
# **"When does it break?"**
# - *20 seconds.* Two bits per token on keys, on a model with stripes: perplexity goes up by multiples. Per channel,
#   the same bits cost a fraction of that.
# - *2 minutes.* Section 7: only the sharing was turned. Small models and 2 bits do not get on even with KIVI. Look at
#   the keys of *your* model, after RoPE, as they are stored.
# - *Follow-up: before or after RoPE (旋转位置编码)?* Stored after it, as here, a pair of channels turns with the
#   position and the stripe is blurred; rounding before RoPE keeps it sharper, and has to turn every key at every
#   read.
# - *The number:* 4 levels.

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %% tags=["nbval-ignore-output"]
predictions()

# %% [markdown]
# **Exercise:** `exercises/14_kv_quantization.ipynb`: round keys and values, keep the window's books, attend over both
# kinds of keys, mend a fork that loses half of a scale, and count the bytes.
#
# **Papers:** Liu et al. 2024, *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache* (arXiv:2402.02750), for
# the two directions and the window; Hooper et al. 2024, *KVQuant* (arXiv:2401.18079), for keys before RoPE; Sheng et
# al. 2023, *FlexGen* (arXiv:2303.06865), for 4-bit KV in groups; Kwon et al. 2023 (arXiv:2309.06180) for the blocks.
#
# **Next:** chapter 15 puts all of part IV into one table, with intervals, and a task beside perplexity.
