# %% [markdown]
# # 09 FlashDecoding and paged attention
#
# **A decode step has one query and a long row of keys: split the keys over the whole GPU, merge exactly, and read
# them where they lie.**
#
# > *The interviewer asks:* "Batch 1, context 64k: your attention kernel uses a few per cent of the GPU. Why, and how
# > does Flash-Decoding fix it? Why is the result exact? And what changes when K and V lie in blocks?"
#
# You will be able to
# - count the programs of a decode step, say which share of the SMs they fill, and choose a split count;
# - write the merge of partial softmaxes by log-sum-exp, with empty parts, and prove that it loses nothing;
# - say what a kernel that reads through a block table saves, what it costs, and where its offsets overflow.
#
# 30 minutes to read. All of it runs on `tiny`; Triton kernels run in the interpreter where there is no GPU, for their
# values, not for their speed.

# %%
import inspect
import math
from fractions import Fraction
from itertools import pairwise
from random import Random

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

from minillm import LLM, SamplingParams, load_model
from minillm.cache.contiguous import ContiguousCache
from minillm.cache.paged import PagedCache, PagedStep
from minillm.kernels import cpp
from minillm.kernels import decoding_reference as twin
from minillm.kernels.launch import interpreted, why_not
from minillm.kernels.splits import Grid, choose_splits
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import clock
from minillm.measure import decode_attention_bench as bench
from minillm.measure.machine import ceilings
from minillm.model.attention import LayerInfo
from minillm.model.decoder import Decoder

model = load_model("tiny", dtype="float32")
config, device = model.config, model.device
assert why_not() is None, why_not()
roof = ceilings(device, fast=True)
kernels = "in Triton's interpreter" if interpreted() else "compiled"
print(f"model: tiny, on {device}, {torch.get_num_threads()} CPU threads; Triton kernels run {kernels}")
print(f"{config.num_heads} query heads, {config.num_kv_heads} KV heads of {config.head_dim}")

# %% [markdown]
# ## 1. The waste, measured
#
# A decode step (解码) reads the weights once, whatever the context, and K and V of the whole context. So attention
# takes over as the context grows. Below: one step of `tiny` at growing context, against a step at 16 tokens, in
# pairs. (`tiny` was trained on 512 tokens; longer texts are only timed here.)


# %% tags=["nbval-ignore-output"]
def attention_share(context, repeats=7):
    """(share of a decode step that the context costs, the share that its bytes would say)."""
    longer = Decoder(config.with_changes(max_length=context + 1)).to(device).eval()
    longer.load_state_dict(model.state_dict())
    token = torch.tensor([[5]], device=device)
    caches = {length: ContiguousCache(longer.config, 1, length + 1, device=device) for length in (context, 16)}
    for cache in caches.values():
        cache.k.normal_()
        cache.v.normal_()

    @torch.inference_mode()
    def step(length):
        caches[length].lengths = [length] * config.num_layers
        longer(token, cache=caches[length])

    ratio = clock.paired(lambda: step(context), lambda: step(16), repeats=repeats).ratio.median
    kv, weights = caches[context].nbytes, sum(p.nbytes for p in longer.parameters())
    return 1 - 1 / ratio, kv / (kv + weights)


contexts = pick([256, 1024, 4096, 16384, 65536], [256, 4096, 16384])
shares = [attention_share(context) for context in contexts]
_, ax = plots.figure(height=2.9)
ax.plot(
    contexts, [100 * measured for measured, _ in shares], "o-", color=plots.MEANING["technique"], label="measured"
)
ax.plot(
    contexts,
    [100 * b for _, b in shares],
    "s--",
    color=plots.MEANING["prediction"],
    label="by bytes: KV / (KV + weights)",
)
ax.set_xscale("log", base=2)
plots.plain_log_ticks(ax.xaxis, contexts)
ax.set(
    xlabel="context, tokens",
    ylabel="% of the step",
    ylim=(0, 100),
    title="Share of one decode step that the context costs (tiny)",
)
ax.legend()
plt.show()

# %% [markdown]
# *At long context the step is attention, and attention is reading: K and V once, each number used for 2 FLOPs a query
# head.* So the only question is how fast K and V are read. On a GPU that depends on how many of its streaming
# multiprocessors (SM, 流多处理器) read at once. FlashAttention (chapter 08) starts a program (线程块) for each
# (sequence, head, tile of queries). In decode there is one query. With one program for each sequence and KV head:

# %%
SMS = 132  # an H100 SXM; an A100 has 108
print(f"{'batch':>6s}{'KV heads':>10s}{'programs':>10s}{'SMs at work':>13s}{'idle':>7s}")
for batch in (1, 4, 16, 64):
    for kv_heads in (1, 8):
        grid = Grid(batch * kv_heads, 65536, 1, SMS)
        working = min(grid.programs, SMS)
        print(f"{batch:6d}{kv_heads:10d}{grid.programs:10d}{working:9d}/{SMS}{1 - working / SMS:7.0%}")

# %% [markdown]
# *Counted, the same on every machine.* Batch 1 with 8 KV heads (Llama 3) leaves 124 of 132 SMs idle, and a GPU's
# memory is only fast if all of them ask. The second waste is chapter 05's: with paged blocks, our cache gathers the
# keys into a row before it attends, so each byte is read, written and read again.

# %% [markdown]
# ## 2. Predict
#
# Llama 3.1 8B: 32 query heads, 8 KV heads of 128, 16-bit numbers, one layer. Write down:
#
# - *Bytes of K and V* at 65,536 tokens, batch 1: `2 x kv_heads x dim x length x 2`.
# - *Idle SMs* of 132 at batch 1 with a program a KV head: `1 - 8 / 132`.
# - *Splits* (分割) so that every SM has a program, none has two: `132 / 8`, rounded down.
# - *Cost of the merge*, as a part of the K and V bytes: each split writes a partial output (a float32 per query head
#   and dimension) and one log-sum-exp per query head, and the merge reads them: `2 x splits x 32 x (128 + 1) x 4`.
# - *Reading through a gather*, bytes against reading in place: `3`.

# %%
HEADS, KV_HEADS, DIM, CONTEXT = 32, 8, 128, 65536
kv_bytes = 2 * KV_HEADS * DIM * CONTEXT * 2
predict("09.kv_bytes", kv_bytes, "B")
predict("09.idle_sms", 1 - KV_HEADS / SMS, "1")
predict("09.splits", SMS // KV_HEADS, "splits")
predict("09.merge_share", 2 * (SMS // KV_HEADS) * HEADS * (DIM + 1) * 4 / kv_bytes, "1")
predict("09.gather", 3, "x")

# %% [markdown]
# ## 3. The idea, drawn
#
# Cut the keys, not the query. A small GPU of 8 SMs, 2 KV heads, 12 tiles of keys:


# %%
def draw_gantt(ax, programs, tiles, splits, sms, merge=True):
    """Who reads which tile when: a program is a (head, split), placed on the SM that is free first."""
    grid = Grid(programs, tiles, splits, sms, tile=1)
    free = [0] * sms
    for head in range(programs):
        for split in range(grid.busy_splits):
            sm = free.index(min(free))
            first = split * grid.tiles_each
            for step in range(min(grid.tiles_each, tiles - first)):
                color = [plots.SKY, plots.ORANGE, plots.GREEN, plots.PINK][head % 4]
                ax.add_patch(plt.Rectangle((free[sm] + step, sm + 0.1), 0.94, 0.8, facecolor=color))
                ax.text(free[sm] + step + 0.47, sm + 0.5, str(first + step), ha="center", va="center", fontsize=7)
            free[sm] += min(grid.tiles_each, tiles - first)
    end = max(free)
    if splits > 1 and merge:
        ax.add_patch(plt.Rectangle((end + 0.15, 0.1), 0.8, sms - 0.2, facecolor=plots.GREY))
        ax.text(end + 0.55, sms / 2, "merge", rotation=90, ha="center", va="center", color="white", fontsize=8)
    ax.set(xlim=(0, tiles + 0.5), ylim=(sms, 0), ylabel="SM", yticks=[], xlabel="time, tiles")
    ax.grid(False)
    return end


_, axes = plots.figure(1, 2, width=7.6, height=2.6)
ends = [draw_gantt(ax, 2, 12, splits, 8) for ax, splits in zip(axes, (1, 4))]
axes[0].set_title("One program a head: 12 steps, 6 SMs idle")
axes[1].set_title("4 splits: 3 steps and a merge")
plt.show()
assert ends == [12, 3]

# %% [markdown]
# *A colour is a head; the number is the tile of keys. Work is the same, 24 tiles; only who does it changes. Each
# program of the right-hand picture returns an output that is already divided by its own sum, and one number beside
# it: the log-sum-exp (LSE, 对数和指数).*
#
# Why one number is enough. For scores s and values v of a part: m = max s, total = sum exp(s - m), and
#
# > out = sum exp(s - m) v / total,  LSE = m + log(total) = log sum exp(s)
#
# so exp(LSE) is the part's own denominator and out x exp(LSE) its numerator. Numerators and denominators of parts
# simply add:
#
# > **out = sum_i exp(LSE_i) out_i / sum_i exp(LSE_i)**
#
# Nothing is approximated. To see it without rounding: softmax in base 2 over whole numbers is rational arithmetic.


# %%
def part(scores, values):
    """(largest score, sum of 2^(s - m), output) of some keys, in fractions."""
    m = max(scores)
    weights = [Fraction(2) ** (s - m) for s in scores]
    return m, sum(weights), sum(w * v for w, v in zip(weights, values)) / sum(weights)


def merged(parts):
    top = max(m for m, _, _ in parts)
    weights = [total * Fraction(2) ** (m - top) for m, total, _ in parts]  # 2^LSE, over 2^top
    return sum(w * out for w, (_, _, out) in zip(weights, parts)) / sum(weights)


rng, trials = Random(0), pick(500, 200)
for _ in range(trials):
    n = rng.randint(2, 30)
    scores, values = [rng.randint(-40, 40) for _ in range(n)], [rng.randint(-99, 99) for _ in range(n)]
    cuts = sorted(rng.sample(range(1, n), rng.randint(1, n - 1)))
    parts = [part(scores[a:b], values[a:b]) for a, b in zip([0, *cuts], [*cuts, n])]
    assert merged(parts) == part(scores, values)[2]  # equal, not close
print(f"{trials} cuts into 2 to 30 parts: the merge equals softmax over all keys, as fractions, exactly")

# %% [markdown]
# ## 4. Build it
#
# All splits at once, in torch: the splits are one more batch dimension. Then the same from blocks: the only new line
# looks the keys' places up.


# %%
def small_part(q, k, v):
    """q [..., group, dim], k and v [..., keys, dim] -> (out [..., group, dim], LSE [..., group])."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [..., group, keys]
    m = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - m)
    total = p.sum(-1, keepdim=True)
    return p @ v / total, (m + total.log()).squeeze(-1)


def small_merge(outs, lses):
    """outs [splits, ..., dim], lses [splits, ...]: weights exp(LSE), shifted so that none overflows."""
    weights = torch.softmax(lses, 0).unsqueeze(-1)  # exp(LSE_i) / sum exp(LSE_j)
    return (weights * outs).sum(0)


def small_flash_decoding(q, k, v, splits):
    """q [batch, kv_heads, group, dim], k and v [batch, kv_heads, length, dim] -> as q."""
    bounds = [k.shape[2] * i // splits for i in range(splits + 1)]
    parts = [small_part(q, k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(bounds) if a < b]
    return small_merge(*(torch.stack(x) for x in zip(*parts)))


def small_paged(q, k_pool, v_pool, table, length, splits):
    """One sequence. q [kv_heads, group, dim], pools [blocks, block_size, kv_heads, dim], table [its blocks]."""
    parts = []
    for i in range(splits):
        keys = torch.arange(length * i // splits, length * (i + 1) // splits)
        if len(keys):
            block, slot = table[keys // k_pool.shape[1]], keys % k_pool.shape[1]  # the one line
            k, v = (pool[block, slot].transpose(0, 1) for pool in (k_pool, v_pool))  # [kv_heads, keys, dim]
            parts.append(small_part(q, k, v))
    return small_merge(*(torch.stack(x) for x in zip(*parts)))


step = bench.make_step(2, 200, 8, 2, 32, torch.float32, torch.device("cpu"), 1)
q = step.q.unflatten(1, (2, 4))  # [batch, kv_heads, group, dim]
exact = F.scaled_dot_product_attention(q.double(), step.k[0].double(), step.v[0].double())
for splits in (1, 2, 3, 7, 64, 200, 300):
    together = small_flash_decoding(q, step.k[0], step.v[0], splits)
    apart = torch.stack(
        [small_paged(q[i], step.k_pool, step.v_pool, step.tables[0, i], 200, splits) for i in range(2)]
    )
    errors = [(x.double() - exact).abs().max().item() for x in (together, apart)]
    assert max(errors) < 1e-6
    print(f"{splits:4d} splits: largest error against float64 {errors[0]:.1e}, from blocks {errors[1]:.1e}")
lines = sum(
    len(inspect.getsource(f).splitlines()) for f in (small_part, small_merge, small_flash_decoding, small_paged)
)
print(f"{lines} lines, docstrings counted")

# %% [markdown]
# ## 5. The library's version
#
# Three files, and one for a CPU (section 6). `kernels/decoding_reference.py` is the torch twin: a program there is a
# turn of a loop. `kernels/flash_decoding.py` is Triton for keys in a row, and the merge. `kernels/paged_attention.py`
# reads through the table. The merge, in the twin:

# %%
print(inspect.getsource(twin.merge))

# %% [markdown]
# And the loop of the paged kernel, as it runs on a GPU:

# %%
from minillm.kernels import flash_decoding as decoding  # noqa: E402 (only now: it imports Triton)
from minillm.kernels import paged_attention as paged  # noqa: E402

source = inspect.getsource(paged.paged_kernel.fn)
print(source[source.index("    for tile in range") : source.index("    out, lse = finish")])

# %% [markdown]
# | it adds | because |
# |---|---|
# | a tile's rows: tokens x query heads of a KV head | a key is read once a group (GQA packing), decode or chunk |
# | `.to(tl.int64)` before a stride | block x stride passes 2^31 in a pool of 4 GB; see the exercise |
# | lengths read on the device | the launch depends on shapes alone, so a CUDA graph (chapter 10) can hold it |
# | `here` masks every load | what is past the end, or in somebody else's block, may be NaN, and 0 x NaN is NaN |
# | an empty split gives LSE = -inf and is not read again | lengths in a batch differ; length 0 gives zeros |
#
# Proved equal, here in a few shapes, in `tests/test_paged_attention.py` for any lengths, windows, soft caps, block
# sizes from 1 to 256, shuffled and shared tables. Then through the whole engine: the same tokens.

# %%
lengths = torch.tensor([200, 77], device=device)
q, k, v = (x.to(device) for x in (step.q, step.k[0], step.v[0]))
expected, expected_lse = twin.flash_decoding(*(x.cpu() for x in (q, k, v, lengths)), scale=step.scale)
for splits in pick((1, 2, 3, 9), (1, 3)):
    out, lse = decoding.flash_decoding(q, k, v, lengths, scale=step.scale, splits=splits)
    assert torch.allclose(out.cpu(), expected, atol=1e-5) and torch.allclose(lse.cpu(), expected_lse, atol=1e-4)
out = paged.paged_attention(
    q,
    step.k_pool.to(device),
    step.v_pool.to(device),
    step.tables[0].to(device),
    torch.tensor([0, 1, 2], device=device),
    lengths,
    scale=step.scale,
    max_query=1,
    max_length=200,
    splits=2,
)
assert torch.allclose(out.cpu(), expected, atol=1e-5)
texts, no_cpp = {}, cpp.why_not(torch.float32, device)  # a GPU, or no C++ compiler
for attention in ("naive", "sdpa", "triton", *(() if no_cpp else ("cpp",))):
    llm = LLM("tiny", dtype="float32", attention=attention, num_blocks=16)
    params = SamplingParams(max_tokens=pick(4, 3), temperature=0, ignore_eos=True)
    texts[attention] = llm.generate(["The sea was", "It is a truth universally"], params)
assert len({str([output.token_ids for output in outputs]) for outputs in texts.values()}) == 1
print("kernel, twin and paged kernel agree; every way to attend that runs here emits the same tokens:")
print(repr("The sea was" + texts["triton"][0].text))

# %% [markdown]
# ## 6. Measure it
#
# ### The grid, by arithmetic
#
# Time in steps, one step a tile of 64 keys, if every SM reads equally fast: `waves x tiles a split`. A wave (波) is a
# round of programs. The figure is for 132 SMs with one program each.

# %%
splits = np.arange(1, 65)
_, axes = plots.figure(1, 2, width=7.6, height=3.1)
for batch, color in zip((1, 4, 16, 64), plots.PALETTE):
    grids = [Grid(batch * KV_HEADS, CONTEXT, int(s), SMS) for s in splits]
    axes[0].plot(splits, [100 * g.occupancy for g in grids], color=color, label=f"batch {batch}")
    axes[1].plot(splits, [grids[0].steps / g.steps for g in grids], color=color, label=f"batch {batch}")
    chosen = choose_splits(batch * KV_HEADS, CONTEXT, SMS)
    axes[1].plot(chosen, grids[0].steps / grids[chosen - 1].steps, "o", color=color, markersize=7)
axes[0].set(xlabel="splits", ylabel="% of SMs at work", ylim=(0, 105), title="Occupancy over all waves")
axes[1].set(xlabel="splits", ylabel="x faster than 1 split", title="Speed; dots: choose_splits")
axes[1].legend()
plt.show()
big = Grid(KV_HEADS, CONTEXT, 1, SMS)
reveal("09.idle_sms", 1 - big.occupancy)
reveal("09.splits", choose_splits(KV_HEADS, CONTEXT, SMS))
q_shape = torch.empty(1, HEADS, DIM, device="meta", dtype=torch.bfloat16)
lse_shape = torch.empty(1, HEADS, device="meta")
outs, lses = decoding.partials(q_shape, lse_shape, choose_splits(KV_HEADS, CONTEXT, SMS))
keys = torch.empty(2, 1, KV_HEADS, CONTEXT, DIM, device="meta", dtype=torch.bfloat16)
reveal("09.kv_bytes", keys.nbytes)
reveal("09.merge_share", 2 * (outs.nbytes + lses.nbytes) / keys.nbytes)

# %% [markdown]
# *Saw teeth are the last wave: 17 splits x 8 heads are 136 programs on 132 SMs, so 4 of them run alone while 128 SMs
# wait. That is why the split count is chosen, not fixed: the fewest splits within 10 % of the best, here 15.* At
# batch 64 the grid is full without splits. The merge moves 0.2 % of the bytes: at long context
# it is free.
#
# Two corrections for a real GPU: a second program on an SM hides the waits of the first, so the library counts two
# slots an SM; and one SM cannot fetch at more than a few times its share, which is why idle SMs cannot be made up
# for.

# %% [markdown]
# ### Bandwidth against context and batch
#
# This machine's side: torch's attention on keys in a row, and chapter 05's gather; K and V of several steps in
# rotation, so that they come from memory. Bytes are the useful ones, K and V once. Beside them the recorded GPU.

# %% tags=["nbval-ignore-output"]
methods = {"sdpa": bench.sdpa, "gathered": bench.gathered}
if device.type == "cuda":
    methods |= {"flash_decoding": bench.decoding(None), "one_split": bench.decoding(1), "paged": bench.paged}
sizes = pick([(1, 1024), (1, 4096), (1, 16384), (8, 1024), (8, 4096)], [(1, 1024), (8, 1024)])
rates, heads, kv_heads, dim = {}, *((32, 8, 128) if device.type == "cuda" else (8, 2, 64))
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
for batch, context in sizes:
    one = 2 * batch * kv_heads * context * dim * dtype.itemsize
    sets = max(1, min(16, pick(2**27, 2**25) // one))
    inputs = bench.make_step(batch, context, heads, kv_heads, dim, dtype, device, sets)
    rows = tuple(torch.empty_like(pool[: len(pool) // sets]) for pool in (inputs.k_pool, inputs.v_pool))
    methods["kept"] = lambda step, i, rows=rows: bench.gathered(step, i, rows)
    bench.check(inputs, methods, dtype)
    times = bench.time_in_turn(inputs, methods, sets, pick(9, 3))
    rates[batch, context] = {name: inputs.nbytes / timing.median for name, timing in times.items()}
    ratio, kept = (
        np.median([g / s for g, s in zip(times[name].samples, times["sdpa"].samples)])
        for name in ("gathered", "kept")
    )
    shown = ", ".join(f"{name} {rate / roof.read_bandwidth:.1%}" for name, rate in rates[batch, context].items())
    print(f"batch {batch}, context {context:5d}: of the read bandwidth {shown}")
    print(f"{'':25s} gather / in place {ratio:.2f} x, into kept memory {kept:.2f} x")
reveal("09.gather", ratio)
plots.beside(
    [
        dict(
            name=f"batch {batch}, {context} tokens",
            here=rates[batch, context]["paged" if "paged" in methods else "sdpa"],
            recorded=recorded(f"decode_attention.batch{batch}.context{context}.paged"),
            ceiling=roof.read_bandwidth,
        )
        for batch, context in sizes
    ],
    "B/s",
    "K and V read a second by decode attention",
    log=True,
)
plt.show()

# %% [markdown]
# ### In place, on a CPU
#
# A CPU has no SMs to fill, but a gather is as dear there, and unequal lengths cost padding.
# `kernels/paged_decode.cpp` is the paged loop in C++: a task is a row, it walks its own table, and nothing is copied
# or padded. Blocks lie anywhere, so no processor guesses the next one; the table knows it, and asks for it while this
# one is attended. `LLM(compile=True)` takes it where there is a compiler, and `paged_prefill.cpp`, FlashAttention's
# loop over the same blocks, for prompts. Both sides write the new K and V, then attend 32 requests of 32 to 384
# tokens, through all layers.

# %% tags=["nbval-ignore-output"]
rng, size = Random(0), 16
held = [rng.randint(32, 384) for _ in range(32)]
counts = [-(-length // size) for length in held]
ids = rng.sample(range(sum(counts)), sum(counts))
block_tables = [[ids.pop() for _ in range(count)] + [0] * (max(counts) - count) for count in counts]
last = [table[(n - 1) // size] * size + (n - 1) % size for table, n in zip(block_tables, held)]
new_tokens, newest = [1] * 32, torch.tensor(held) - 1  # one new token each
ragged = PagedStep(torch.tensor(last), torch.tensor(block_tables), new_tokens, held, positions=newest)
caches = {
    name: PagedCache(config, sum(counts), size, attention=name) for name in ("sdpa", *(() if no_cpp else ("cpp",)))
}
rows = [torch.randn(32, n, config.head_dim) for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]


start_of = [0, 64, 128, 256]  # of four prompts, 512 tokens in all, over blocks of the same pool
ends = [*start_of[1:], 512]
sizes_of = [end - start for start, end in zip(start_of, ends)]
whole = torch.tensor(rng.sample(range(sum(counts)), 512 // size))  # 32 blocks
own = [whole[start // size : end // size].tolist() for start, end in zip(start_of, ends)]
prompts = PagedStep(
    (whole[:, None] * size + torch.arange(size)).flatten(),  # [512] slots
    torch.tensor([blocks + [0] * (max(map(len, own)) - len(blocks)) for blocks in own]),
    sizes_of,
    sizes_of,
    positions=torch.cat([torch.arange(n) for n in sizes_of]),
)
long_rows = [torch.randn(512, *each.shape[1:]) for each in rows]


def attend_all(cache, step=ragged, rows=rows):
    """One step of all layers."""
    cache.begin(step)
    return [cache.attend(LayerInfo(i, config.scale), *rows) for i in range(config.num_layers)]


if device.type == "cpu" and not no_cpp:
    for name in ("k", "v"):
        getattr(caches["sdpa"], name).normal_()
        getattr(caches["cpp"], name).copy_(getattr(caches["sdpa"], name))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*(attend_all(cache) for cache in caches.values())))
    in_place = clock.paired(*(lambda c=c: attend_all(c) for c in caches.values()), repeats=pick(30, 5), warmup=2)
    print(f"32 requests, {sum(held)} tokens of context: gathered and padded / read in place {in_place.ratio} x")
    both = [lambda c=c: attend_all(c, prompts, long_rows) for c in caches.values()]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*(run() for run in both)))
    in_place = clock.paired(*both, repeats=pick(30, 5))
    print(f"4 prompts of 64 to 256 tokens: one by one / in one call {in_place.ratio} x")
else:
    print("not measured:", no_cpp)

# %%
print("recorded on a GPU, K and V read a second:")
print(f"{'batch':>6s}{'context':>9s}{'1 split':>28s}{'chosen splits':>28s}{'paged':>28s}")
for batch, context in bench.GPU_SIZES:
    name = f"decode_attention.batch{batch}.context{context}"
    row = [str(recorded(f"{name}.{method}")) for method in ("one_split", "flash_decoding", "paged")]
    print(f"{batch:6d}{context:9d}" + "".join(f"{text:>28s}" for text in row))

# %% [markdown]
# *A factor above 1 in the first cell is what the gather costs; it stays below 3 where attention on this machine waits
# for arithmetic as well, or where the copy is still in a cache when it is read. Where it is above, bytes are not all:
# a long row is new memory at every call, which the system maps page by page; into memory kept from the call before
# the same gather costs the second factor.* The authors of Flash-Decoding measured, on an A100, attention up to 50 x
# faster than FlashAttention, with a time that stays nearly constant up to a context of 32k, because until then the
# SMs were not full, and up to 8 x faster generation end to end (PyTorch blog, October 2023; their figures, not ours).

# %% [markdown]
# ## 7. Where it backfires
#
# **When nobody is idle.** One thread, or one SM, reads all parts one after another whether you split or not;
# splitting then only adds the merge. Measured here: the 26 lines above, split against whole, on this machine's
# threads, where a matrix product already uses all of them.

# %% tags=["nbval-ignore-output"]
short = pick([16, 64, 256, 1024, 4096, 16384], [16, 256, 4096])
counts, slower = (4, 16), {}
for n in counts:
    slower[n] = []
    for context in short:
        inputs = bench.make_step(1, context, 8, 2, 64, torch.float32, device, 1)
        grouped = inputs.q.unflatten(1, (2, 4))

        def run(splits, inputs=inputs, grouped=grouped):
            return small_flash_decoding(grouped, inputs.k[0], inputs.v[0], splits)

        assert torch.allclose(run(1), run(n), atol=1e-5)
        pair = clock.paired(lambda: run(n), lambda: run(1), repeats=pick(15, 5))  # noqa: B023
        slower[n].append(pair.ratio.median)
_, ax = plots.figure(height=2.9)
for n, ratios in slower.items():
    ax.loglog(short, ratios, "o-", label=f"{n} splits / 1 split")
ax.axhline(1, color=plots.GREY, lw=0.8, ls=":")
plots.plain_log_ticks(ax.xaxis, short)
plots.plain_log_ticks(ax.yaxis, [1, 2, 5, 10, 20])
ax.set(
    xlabel="context, tokens", ylabel="x the time", title="Splits where there is nobody to take them (this machine)"
)
ax.legend()
plt.show()

# %% [markdown]
# *Above 1 the split version loses. Short contexts lose most: a part of a few keys costs a launch, and the merge costs
# the same as at 64k.* **Large batches** lose for the first reason: with 64 sequences x 8 KV heads, 132 SMs are full.
# **Short contexts** on a GPU: below a tile a split there is nothing to split, counted here:

# %%
print(f"{'context':>8s}{'batch':>7s}{'splits chosen':>15s}{'steps':>8s}{'without':>9s}{'merge / KV bytes':>18s}")
for context, batch in ((64, 1), (256, 1), (1024, 1), (65536, 1), (1024, 64), (65536, 64)):
    s = choose_splits(batch * KV_HEADS, context, SMS)
    grid, whole = Grid(batch * KV_HEADS, context, s, SMS), Grid(batch * KV_HEADS, context, 1, SMS)
    merge = 2 * s * HEADS * (DIM + 1) * 4 / (2 * KV_HEADS * DIM * context * 2) if s > 1 else 0.0
    print(f"{context:8d}{batch:7d}{s:15d}{grid.steps:8d}{whole.steps:9d}{merge:18.2%}")

# %% [markdown]
# At 256 tokens 4 splits save 3 steps of the 4 and add a second launch that waits for the first; at that length the
# launches are the time (chapter 10), and one split would have done. The rule above does not see launches. And a
# captured CUDA graph must choose for the longest context it may meet, so short ones carry empty splits along.

# %% [markdown]
# ## 8. Play
#
# One curve: time in steps against the split count. The dot is your choice; the square is `choose_splits`.


# %% tags=["nbval-ignore-output"]
def draw(ax, batch, kv_heads, context, splits):
    grids = [Grid(batch * kv_heads, context, s, SMS) for s in range(1, 65)]
    ax.plot(range(1, 65), [g.steps for g in grids], color=plots.BLUE)
    mine, best = grids[splits - 1], choose_splits(batch * kv_heads, context, SMS, most=64)
    ax.plot(best, grids[best - 1].steps, "s", color=plots.GREEN, markersize=8)
    ax.plot(splits, mine.steps, "o", color=plots.RED, markersize=7)
    ax.set(xlabel="splits", ylim=(0, None))
    if ax.figure.axes == [ax]:
        text = f"{mine.programs * mine.busy_splits} programs, {mine.waves} waves, {mine.occupancy:.0%} of {SMS} SMs"
        ax.set_title(f"{text}; {mine.steps} steps, best {min(g.steps for g in grids)}")
        ax.set_ylabel("tiles one after another")
    else:
        ax.set_xlabel(
            f"{splits} splits: waves {mine.waves},\n{mine.occupancy:.0%} of SMs, steps {mine.steps}", fontsize=8
        )


explore(
    draw,
    batch=[1, 2, 4, 8, 16, 32, 64],
    kv_heads=[8, 1, 2, 4, 32],
    context=[65536, 256, 1024, 4096, 16384],
    splits=(1, 64, 1, 17),
    static=[dict(batch=1), dict(batch=16), dict(batch=64), dict(batch=1, context=1024)],
    height=2.8,
)

# %% [markdown]
# *Batch 1: from 1 split to 16 the time falls sixteenfold, and 17 is worse than 16: a second wave for 4 programs.
# Batch 64: flat. Context 1,024: 16 tiles, so more than 16 splits are empty.*

# %% [markdown]
# ## 9. Say it
#
# **"Why is attention slow at batch 1 and long context, and what does Flash-Decoding do?"**
# - *20 seconds.* One query a sequence gives one program a KV head: 8 programs on 132 SMs, so 94 % of them idle and
#   the memory is read at a fraction of its speed. Flash-Decoding splits the keys, runs the parts at the same time,
#   and merges them by their log-sum-exps.
# - *2 minutes.* The table of section 1; the Gantt picture of section 3; the formula under it; then what it costs
#   (`09.merge_share`) and where the saw teeth come from (section 6).
# - *Follow-up: does prefill need it?* No: tiles of queries fill the GPU. A chunk of a few tokens at a long context
#   does.
# - *The number:* 8 / 132; 15 or 16 splits at batch 1.
#
# **"Why is the merge exact?"**
# - *20 seconds.* A part's LSE is the log of its own denominator. Times it, the output is the numerator. Numerators
#   and denominators add. Shift by the largest LSE and nothing overflows.
# - *2 minutes.* Write section 3's formula; say that it is associative, so any tree of merges is right; that it is the
#   rescale of FlashAttention's loop, done once; and that the same merge joins ring attention's parts and a cached
#   prefix with a new suffix. Show the fractions cell: equal, not close.
# - *Follow-up: what of an empty part?* LSE = -inf, weight 0. If all are empty the maximum is -inf, and -inf - (-inf)
#   is NaN: guard it.
# - *The number:* one float a query head and split.
#
# **"How does a kernel read paged K and V?"**
# - *20 seconds.* Key i is in block table[i // block_size], slot i % block_size: one more load, of an entry that 16
#   keys share. K and V are read once; a gather moves every byte three times.
# - *2 minutes.* The loop of section 5. Then the table below it: GQA packing, 64-bit offsets, masks against NaN,
#   lengths on the device for graphs. Decode and chunked prefill are one kernel with another number of rows.
# - *Follow-up: which bug did several engines have?* block x stride in 32 bits: right until the pool passes 2^31
#   numbers, then an illegal access or, worse, a wrong one (vLLM pull request 47671 mends one). Exercise, task 5.
# - *The number:* 3 x the bytes for a gather; 20 to 26 % slower attention in the paper's first kernel
#   (arXiv:2309.06180, section 7.1; its figure, not ours).
#
# **"How many splits?"**
# - *20 seconds.* Enough that programs x splits fill the SMs in whole waves; no more than there are tiles; one if the
#   batch fills them.
# - *2 minutes.* The two panels of section 6, then section 7: nobody idle, short contexts, graphs that fix the count.
# - *Follow-up: GQA or MQA?* Fewer KV heads, fewer programs, more splits: MQA at batch 1 has one program without.
# - *The number:* 65,536 tokens of Llama 3.1 8B are 268 MB a layer: 80 microseconds at an H100's 3.35 TB/s.

# %%
print(f"{units.show(kv_bytes, 'B')} a layer; {kv_bytes / 3.35e12 * 1e6:.0f} microseconds at 3.35 TB/s")
assert math.isclose(kv_bytes, 268e6, rel_tol=0.01)

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %%
predictions()

# %% [markdown]
# **Exercise:** `exercises/09_flash_decoding.ipynb`: merge two parts, merge many with empty ones, choose the splits,
# find the offset that overflows, and how long 64k tokens must take.
#
# **Papers:** Dao, Haziza, Massa and Sizov 2023, *Flash-Decoding for long-context inference* (PyTorch blog); Kwon et
# al. 2023, *PagedAttention* (arXiv:2309.06180); Milakov and Gimelshein 2018, *Online normalizer calculation for
# softmax* (arXiv:1805.02867); Rabe and Staats 2021, *Self-attention Does Not Need O(n^2) Memory* (arXiv:2112.05682);
# Ye et al. 2025, *FlashInfer* (arXiv:2501.01005), which merges attention states the same way.
#
# **Next:** chapter 10: what is left between the kernels.
