# %% [markdown]
# # 18 Tensor parallelism
#
# **Cut every matrix over the devices of a node: each reads its share of the weights, and a layer pays two
# all-reduces.**
#
# > *The interviewer asks:* "A 70B model does not fit one GPU. How do you cut a transformer layer over eight of them,
# > how many bytes does a token send, and why does tensor parallelism stay inside a node?"
#
# You will be able to
# - say which matrix is cut which way, and why a layer then needs two all-reduces and not four, or eight;
# - compute bytes and messages per token, and turn them into time with a latency and a bandwidth;
# - tell when more ranks make a token slower, and what is kept twice when ranks outnumber KV heads.
#
# 40 minutes to read. Runs on CPUs: ranks are threads where something is proved, processes over gloo where something
# is timed. On a machine with several GPUs the same code uses NCCL.

# %%
import inspect

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

from minillm import LLM, SamplingParams, load_model
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure.parallel_bench import llama_like, measure
from minillm.model.attention import attend_now
from minillm.model.shapes import known_shape
from minillm.parallel import cost, tensor
from minillm.parallel.groups import all_gather, all_reduce, run_threads
from minillm.parallel.weights import shard_bytes

model = load_model("tiny", dtype="float32", device="cpu")
config = model.config
big = known_shape("llama-3.1-70b")
print(
    f"tiny: {config.num_layers} layers, width {config.hidden_size}, {config.num_heads} query heads on "
    f"{config.num_kv_heads} KV heads, MLP {config.intermediate_size}; Llama 3.1 70B: {big.num_layers} layers, width "
    f"{big.hidden_size}, {big.num_heads} query heads on {big.num_kv_heads} KV heads, MLP {big.intermediate_size}"
)

# %% [markdown]
# ## 1. The waste, measured
#
# One device has to hold all weights and read all of them for every token. Tensor parallelism (TP, 张量并行) gives
# each of *p* ranks (进程号, one process with one device) 1/p of every matrix. Bytes of Llama 3.1 70B's weights on
# one rank, in 16 bits, counted parameter by parameter; and the least time a token can take when they are read at an
# H100's 3.35 TB/s.

# %%
ranks = [1, 2, 4, 8]
weights = [shard_bytes(big, p, 2) for p in ranks]
for p, size in zip(ranks, weights):
    print(f"{p} ranks: {size / 1e9:6.1f} GB each, read in at least {size / cost.H100.bandwidth * 1e3:5.1f} ms")
ax = plots.bars([f"{p} rank{'s' * (p > 1)}" for p in ranks], weights, "B", "Weights of a 70B on one rank (16 bits)")
ax.axvline(80e9, color=plots.MEANING["ceiling"], ls="--", lw=1.2, zorder=0)
ax.annotate("one 80 GB card", (80e9, 2.6), (6, 0), textcoords="offset points", fontsize=8)
plt.show()

# %% [markdown]
# *One card cannot hold it; two could, with next to no room for KV. Four leave half of each card, and read the weights
# in a quarter of the time.*
#
# But a naive cut wastes the gain on talk. Cut every matrix by its outputs and each result must be gathered before the
# next matrix can be applied: four gathers a layer. Count what the ranks say to each other, on `tiny`, in one layer:


# %%
def gathered(x, w, group):
    """x @ w.T, each rank giving some outputs; all outputs on every rank."""
    mine = F.linear(x, w.chunk(group.size(), 0)[group.rank()])
    return torch.cat(all_gather(mine, group), -1)


def naive_layer(group, x, block):
    """The matrices of one layer (attention itself left out: it sends nothing)."""
    q = gathered(x, block.attn.qkv.weight, group)[..., : config.num_heads * config.head_dim]
    x = x + gathered(q, block.attn.out.weight, group)
    gate, up = gathered(x, block.mlp.gate_up.weight, group).chunk(2, -1)
    gathered(F.silu(gate) * up, block.mlp.down.weight, group)
    return group.sent


x = torch.randn(8, config.hidden_size, generator=torch.Generator().manual_seed(0))  # 8 tokens
naive_sent = run_threads(naive_layer, 2, x, model.layers[0])[0]
for name, size in naive_sent:
    print(f"{name}: this rank brings {units.show(size, 'B')}")
naive_bytes = sum(size for _, size in naive_sent)
print(f"{len(naive_sent)} messages, {units.show(naive_bytes, 'B')} a layer for 8 tokens")

# %% [markdown]
# ## 2. Predict
#
# `tiny` on 2 ranks, 8 tokens in one forward, float32. Write down before you run:
#
# - *All-reduces* (全归约: the sum of all ranks' tensors, on every rank) of a forward: two a layer, and one for the
#   embedding, whose table is cut as well.
# - *Bytes* of them: each brings tokens x width numbers.
# - *KV heads* on one rank, out of 2; and on 4 ranks?
# - *Weights* of one rank: all matrices halve, the norms (2 a layer and one at the end) do not.
# - *A ring's traffic*: in an all-reduce of n bytes a rank sends 2 (p - 1) / p x n. For 8 ranks, per byte?

# %%
tokens = 8
matrices = sum(w.numel() for w in model.parameters() if w.dim() == 2)
norms = (2 * config.num_layers + 1) * config.hidden_size
predict("18.all_reduces", 2 * config.num_layers + 1, "")
predict("18.bytes", (2 * config.num_layers + 1) * tokens * config.hidden_size * 4, "B")
predict("18.kv_heads_4_ranks", max(1, config.num_kv_heads // 4), "")
predict("18.weights", (matrices / 2 + norms) * 4, "B")
predict("18.ring_8", 2 * 7 / 8, "")

# %% [markdown]
# ## 3. The idea, drawn


# %%
def matrix(ax, left, bottom, width, height, cuts, label, by="columns"):
    """A matrix with its two halves in the ranks' colours."""
    if not cuts:
        ax.add_patch(plt.Rectangle((left, bottom), width, height, facecolor="#D5D5D5"))
    for i in range(2 if cuts else 0):
        color = (plots.BLUE, plots.ORANGE)[i]
        if by == "columns":
            place = (left + i * width / 2, bottom), width / 2, height
        else:
            place = (left, bottom + (1 - i) * height / 2), width, height / 2
        ax.add_patch(plt.Rectangle(*place, facecolor=color, edgecolor="white", lw=1.5, alpha=0.85))
    ax.annotate(label, (left + width / 2, bottom - 0.12), ha="center", va="top", fontsize=9)


_, ax = plots.figure(width=7.4, height=2.7)
matrix(ax, 0.0, 0.6, 0.9, 0.5, False, "x\n[tokens, width]")
matrix(ax, 1.3, 0.4, 1.5, 0.9, True, "A, by columns\nqkv; gate, up")
matrix(ax, 3.2, 0.6, 1.5, 0.5, True, "each rank has its part\nheads; MLP channels")
matrix(ax, 5.1, 0.1, 0.9, 1.5, True, "B, by rows\nout; down", by="rows")
for i, color in enumerate((plots.BLUE, plots.ORANGE)):
    ax.add_patch(plt.Rectangle((6.5, 1.0 - 0.75 * i), 0.9, 0.5, facecolor=color, edgecolor="white", alpha=0.85))
ax.annotate("two partial sums\n[tokens, width]", (6.95, 0.13), ha="center", va="top", fontsize=9)
matrix(ax, 8.3, 0.6, 0.9, 0.5, False, "y, on both\n[tokens, width]")
for at, text in ((1.1, "@"), (3.0, "="), (4.9, "@"), (6.25, "=")):
    ax.annotate(text, (at, 0.85), ha="center", va="center", fontsize=13)
ax.annotate("all-reduce", (7.85, 1.0), ha="center", fontsize=9, color=plots.RED, weight="bold")
ax.annotate("", (8.25, 0.85), (7.45, 0.85), arrowprops=dict(arrowstyle="->", color=plots.RED, lw=2))
ax.set(xlim=(-0.1, 9.4), ylim=(-0.7, 1.75))
ax.axis("off")
plt.show()

# %% [markdown]
# *Blue is rank 0, orange rank 1. What the first cut leaves on a rank is just what the second cut needs there, so
# nothing is sent in the middle. Activation functions and attention work on a rank's own channels and heads: they
# need nobody. One sum at the end of attention, one at the end of the MLP: two a layer (Megatron-LM).* Why not one?
# The residual and the norm between them need the whole row.
#
# On paper: with A = [A1 A2] by columns and B = [B1; B2] by rows, f(xA) B = f(xA1) B1 + f(xA2) B2, for any f that
# works on each channel by itself. Cut A by rows first and f(xA1 + xA2) needs the sum *before* f: one all-reduce
# more.

# %% [markdown]
# ## 4. Build it
#
# Our weights are [out, in], so "by columns" of the drawing is `chunk(ranks, 0)` and "by rows" is `chunk(ranks, 1)`.
# `run_threads` runs a function as every rank; the function knows its rank and sees its slice alone.


# %%
def outputs(w, group):  # column-parallel (列并行): some outputs here
    return w.chunk(group.size(), 0)[group.rank()]


def inputs(w, group):  # row-parallel (行并行): some inputs here, so a part of every sum
    return w.chunk(group.size(), 1)[group.rank()]


def small_mlp(group, x, mlp):
    gate, up = (outputs(w, group) for w in mlp.gate_up.weight.chunk(2, 0))  # each cut by itself
    h = F.silu(F.linear(x, gate)) * F.linear(x, up)  # [tokens, ffn / ranks]
    return all_reduce(F.linear(h, inputs(mlp.down.weight, group)), group)


def small_attention(group, x, attn):
    dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    q, k, v = attn.qkv.weight.split((heads * dim, kv_heads * dim, kv_heads * dim))
    if group.size() <= kv_heads:
        k, v = outputs(k, group), outputs(v, group)
    else:  # fewer KV heads than ranks: keep the one that this rank's query heads use
        head = group.rank() * kv_heads // group.size()
        k, v = k[head * dim : (head + 1) * dim], v[head * dim : (head + 1) * dim]
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, dim)).transpose(0, 1) for w in (outputs(q, group), k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # this rank's heads
    return all_reduce(F.linear(o.transpose(0, 1).flatten(1), inputs(attn.out.weight, group)), group)


block = model.layers[0]
with torch.inference_mode():
    whole = {"MLP": block.mlp(x), "attention": block.attn(x, None, attend_now)}  # None: positions left out here
for count in (2, 4, 8):
    for name, part, piece in (("MLP", small_mlp, block.mlp), ("attention", small_attention, block.attn)):
        got = run_threads(part, count, x, piece)
        error = max((each - whole[name]).abs().max() / whole[name].abs().max() for each in got).item()
        print(f"{count} ranks, {name:9s}: largest error {error:.1e}, on every rank")
        assert error < 1e-5

# %% [markdown]
# The sums are added up in another order, hence the rounding. It is the same on all ranks, and it must be: ranks that
# rounded apart would drift apart, one token after the other.

# %% [markdown]
# ## 5. The library's version
#
# Which slice a rank keeps of each parameter, by name, from source; and the only layer that talks inside the model:

# %%
print(inspect.getsource(tensor.cut))
print(inspect.getsource(tensor.RowParallelLinear.forward))

# %% [markdown]
# | it adds | because |
# |---|---|
# | embedding and head cut by vocabulary (词表) | in a 70B they are 4 GB; logits are gathered for sampled rows only |
# | the bias of `out` and `down` after the sum | before it, p ranks would add it p times |
# | slices read from the file (`get_slice`) | no process ever holds the whole model |
# | quantised linears with their scales | integers are chosen once, on the whole; a group is never cut in two |
# | legal rank counts | 9 query heads on 2 ranks is an error that says 1, 3 |
#
# Proved on the whole model: logits on 2, 4 and 8 ranks against one rank, and what was sent against the prediction.


# %%
def rank_main(group, ids):
    import copy

    part = tensor.apply_tensor_parallel(copy.deepcopy(model), group)
    group.sent.clear()
    logits = part(ids)
    return logits, list(group.sent), sum(w.nbytes for w in part.parameters()), part.config.num_kv_heads


ids = torch.arange(100, 100 + tokens)
with torch.inference_mode():
    expected = model(ids)
for count in (2, 4, 8):
    results = run_threads(rank_main, count, ids)
    error = max((logits - expected).abs().max() / expected.abs().max() for logits, *_ in results).item()
    print(f"{count} ranks: largest logit error {error:.1e} of the largest logit; KV heads a rank: {results[0][3]}")
    assert error < 1e-5
    if count == 2:
        _, sent, rank_bytes, _ = results[0]
    if count == 4:
        kv_heads_4 = results[0][3]

reduced = [size for name, size in sent if name == "all_reduce"]
reveal("18.all_reduces", len(reduced))
reveal("18.bytes", sum(reduced))
reveal("18.kv_heads_4_ranks", kv_heads_4)
reveal("18.weights", rank_bytes)
assert sent[-1][0] == "all_gather" and len(sent) == len(reduced) + 1
assert rank_bytes == shard_bytes(config, 2, 4)
layer_bytes = sum(reduced[1:]) / config.num_layers
print(
    f"a layer: 2 messages, {units.show(layer_bytes, 'B')}; "
    f"cut naively {len(naive_sent)}, {units.show(naive_bytes, 'B')}"
)

# %% [markdown]
# **In the engine** rank 0 schedules. A step is one broadcast (广播) of whole numbers: token ids, positions, block
# tables. All ranks run what they read from it, so their block tables cannot differ; each keeps K and V of its own
# heads. From a notebook the other ranks are processes that `LLM` starts, and ends; under `torchrun` they are those
# it started.

# %%
prompts = ["It was a fine morning, and the family", "It was a fine morning, and the ship", "The sea"]
greedy = SamplingParams(max_tokens=pick(24, 12), temperature=0)
settings = dict(device="cpu", dtype="float32", enable_prefix_caching="radix", block_size=4)
alone = [out.token_ids for out in LLM("tiny", **settings).generate(prompts, greedy)]
with LLM("tiny", tensor_parallel_size=2, speculative="ngram", **settings) as llm:
    for attempt in ("cold", "with the prefix cached"):
        outputs = llm.generate(prompts, greedy)
        assert [out.token_ids for out in outputs] == alone
        print(
            f"2 processes, {attempt}: the same tokens; "
            f"{outputs[1].metrics.cached_tokens} prompt tokens from the cache"
        )
print(repr(outputs[0].text))

# %% [markdown]
# ## 6. Measure it
#
# Two processes over gloo, one thread each. First the all-reduce alone, by size. The alpha-beta model says latency x
# messages + bytes / bandwidth; its two numbers are fitted to the dots.

# %% tags=["nbval-ignore-output"]
sizes = pick([1 << k for k in range(10, 25, 2)], [1 << k for k in (10, 14, 18, 22)])
shapes = pick([(256, 1), (256, 16), (1024, 1), (1024, 16)], [(256, 1), (512, 4)])
results = measure(2, sizes, shapes, pick(1024, 512), pick(9, 3))
times = results[0]["allreduce"]
link = cost.fit_link(list(times), list(times.values()), 2, "gloo here")
print(f"fitted: {units.show(link.latency, 's')} a message, {units.show(link.bandwidth, 'B/s')}")
_, ax = plots.figure()
ax.loglog(list(times), list(times.values()), "o", color=plots.MEANING["technique"], label="measured, 2 processes")
line = np.geomspace(min(sizes), max(sizes), 60)
model_line = [cost.allreduce_seconds(n, 2, link, "ring") for n in line]
ax.loglog(line, model_line, color=plots.MEANING["prediction"], label="model, fitted")
decode_message = config.hidden_size * 4
ax.axvline(decode_message, color=plots.GREY, ls=":")
ax.annotate(
    "tiny, one token", (decode_message, ax.get_ylim()[1] * 0.5), (4, 0), textcoords="offset points", fontsize=8
)
plots.unit_axis(ax.xaxis, "B", "size of the tensor")
plots.unit_axis(ax.yaxis, "s", "time of one all-reduce")
ax.yaxis.set_minor_formatter(plt.NullFormatter())
ax.set_title("All-reduce over gloo: flat while latency decides, then a line")
ax.legend()
plt.show()

# %% [markdown]
# *Left of the bend a message costs the same whatever its size. Decode stands there: one token's row is a few kB.*
#
# Now a decode step of a small Llama (two layers), on one rank and on two, in alternation. Communication is what a
# rank spends inside collectives, waiting for its peer included.

# %% tags=["nbval-ignore-output"]
rows = results[0]["steps"]
more = measure(4, [], shapes[:2], None, 5)[0]["steps"] if pick(True, False) else {}
table = [(2, *key, row) for key, row in rows.items()] + [(4, *key, row) for key, row in more.items()]
for count, hidden, batch, row in table:
    compute = row["alone"] / count
    sums = 2 * llama_like(hidden).num_layers + 1
    predicted = sums * cost.allreduce_seconds(batch * hidden * 4, count, link, "ring")
    print(
        f"{count} ranks, width {hidden:4d}, batch {batch:2d}: {row['comm'] / row['cut']:4.0%} of it in collectives "
        f"(model {predicted / (predicted + compute):4.0%}); one rank takes {row['alone'] / row['cut']:.2f} x its time"
    )
_, ax = plots.figure(height=0.9 + 0.42 * len(table))
names = [f"{count} ranks, width {hidden}, batch {batch}" for count, hidden, batch, _ in table]
comm = np.array([row["comm"] / row["alone"] for *_, row in table])
rest = np.array([(row["cut"] - row["comm"]) / row["alone"] for *_, row in table])
ax.barh(names, rest, color=plots.MEANING["technique"], label="computing")
ax.barh(names, comm, left=rest, color=plots.RED, label="in collectives")
edge = 4.0  # bars go on beyond it; their length is written beside them
ax.axvline(1, color=plots.GREY, lw=1)
for place, total in enumerate(comm + rest):
    ax.annotate(f"{total:.2g} x", (min(total, edge), place), (5, 0), textcoords="offset points", va="center", size=8)
ax.set_xlim(0, edge)
ax.invert_yaxis()
ax.grid(False, axis="y")
ax.set_xlabel("time of the step / time on one rank")
ax.set_title("A decode step, cut (measured)")
ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
plt.show()

# %% [markdown]
# *Left of the grey line the cut pays, right of it one rank alone is faster (bars longer than the axis carry their
# length). What helps is a wider model: work per
# message grows with width squared, the message with width. What is measured in collectives beyond the model's share
# is waiting: the model knows messages, and not that two processes are never quite in step.*
#
# The same on GPUs, where a machine with two has been measured; and what loading a slice took here:

# %% tags=["nbval-ignore-output"]
for name in ("tensor_parallel.step.hidden1024.batch1.comm_share", "tensor_parallel.step.hidden1024.batch1.speedup"):
    found = recorded(name, workload={"ranks": 2, "device": "cuda", "hidden": 1024, "batch": 1})
    print(f"{name}: {found}")
taken, formula = results[1]["memory"]
if taken:
    print(f"loading: rank 1 took {units.show(taken, 'B')} of its own memory, its slice is {units.show(formula, 'B')}")

# %% [markdown]
# ### Why TP stays inside a node: the model, extrapolated
#
# **A model, not a measurement.** The same formula for a 70B's layer in 16 bits on H100s, batch 8. Bandwidths are
# line rates, latencies those of NCCL's own cost model (their sources below); matrices bound by reading them. NCCL
# picks ring or tree (树) by size, and so does the model.

# %%
for each in cost.LINKS.values():
    print(
        f"{each.name:18s} {units.show(each.bandwidth, 'B/s'):>9s} one way, "
        f"{units.show(each.latency, 's'):>6s} a message"
    )
print(next(iter(cost.LINKS.values())).source)
reveal("18.ring_8", cost.sent_bytes(1.0, 8))
counts = [2, 4, 8, 16, 32]
_, axes = plots.figure(1, 2, width=7.6, height=3.2)
for color, key in zip(plots.PALETTE, ("nvlink4", "pcie5", "net400", "net100")):
    here = cost.LINKS[key]
    for ax, batch in zip(axes, (8, 2048)):
        layer = [
            cost.layer_comm_seconds(big, batch, p, here) + cost.layer_compute_seconds(big, batch, p, cost.H100)
            for p in (1, *counts)
        ]
        ax.loglog((1, *counts), np.array(layer) * big.num_layers, "o-", color=color, label=here.name)
for ax, title in zip(axes, ("Decode, batch 8", "Prefill, 2,048 tokens")):
    plots.plain_log_ticks(ax.xaxis, (1, *counts))
    ax.set_xlabel("ranks")
    ax.set_title(title + " (model)")
    plots.unit_axis(ax.yaxis, "s", "time of a step")
    ax.yaxis.set_minor_formatter(plt.NullFormatter())
axes[0].legend()
plt.show()

# %% [markdown]
# *All 80 layers of a 70B, by the model. Decode: latency and slow links flatten the curve, and at 100 Gb/s it turns
# up again. Prefill: messages are 32 MiB, bandwidth decides, and at 100 Gb/s any cut is slower than one card. Eight
# GPUs in a node share NVLink; the ninth is behind the network. That is why TP is 8 or less, and the rest is
# pipeline (chapter 19) or replicas.*

# %% [markdown]
# ## 7. Where it backfires
#
# Three cases. A small model on a slow link: the bars of section 6 right of the grey line. Ranks that leave the
# node: the model's tokens per second at batch 8, below. And more ranks than KV heads: KV heads are kept several
# times (复制), so KV bytes per rank stop shrinking.

# %%
print("ranks   link                share in communication   decode steps/s   KV of a token on one rank")
kv_of, rate_of = {}, {}
for p, key in ((8, "nvlink4"), (16, "net400"), (16, "net100"), (32, "net100")):
    here = cost.LINKS[key]
    step = big.num_layers * (
        cost.layer_comm_seconds(big, 8, p, here) + cost.layer_compute_seconds(big, 8, p, cost.H100)
    )
    local = tensor.local_config(big, p)
    kv_of[p] = 2 * local.num_layers * local.num_kv_heads * local.head_dim * 2
    share, rate_of[p, key] = cost.comm_share(big, 8, p, here), 1 / step
    print(f"{p:5d}   {here.name:18s}  {share:10.0%} {1 / step:28.0f} {units.show(kv_of[p], 'B'):>18s}")
assert kv_of[8] == kv_of[16] == kv_of[32] and max(rate_of, key=rate_of.get) == (8, "nvlink4")

# %% [markdown]
# Sixteen ranks have twice the devices of eight, and by the model they decode *slower*: the table's second line on a
# network four times as fast as the third's. Their KV of a token is as large on each rank as with eight: 8 KV heads
# are one a rank already.

# %% [markdown]
# ## 8. Play
#
# Share of a 70B layer's time in communication, by the model. Move `ranks` and `batch`, choose the link.


# %% tags=["nbval-ignore-output"]
def draw(ax, ranks, batch, link):
    here = cost.LINKS[link]
    comm, compute = (
        cost.layer_comm_seconds(big, batch, ranks, here),
        cost.layer_compute_seconds(big, batch, ranks, cost.H100),
    )
    one = cost.layer_compute_seconds(big, batch, 1, cost.H100)
    ax.barh(["1 rank"], [one], color=plots.MEANING["naive"])
    ax.barh([f"{ranks} ranks"], [compute], color=plots.MEANING["technique"], label="computing")
    ax.barh([f"{ranks} ranks"], [comm], left=[compute], color=plots.RED, label="communicating")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    plots.unit_axis(ax.xaxis, "s", "time of a layer (model)")
    ax.xaxis.set_major_locator(plt.MaxNLocator(3))
    ax.set_title(f"{here.name}: {comm / (comm + compute):.0%} communication")
    if len(ax.figure.axes) == 1:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2)


explore(
    draw,
    ranks=[2, 4, 8, 16, 32],
    batch=(1, 257, 16, 17),
    link=list(cost.LINKS),
    static=[
        dict(ranks=8, batch=1, link="nvlink4"),
        dict(ranks=8, batch=257, link="nvlink4"),
        dict(ranks=16, batch=257, link="net100"),
    ],
    height=2.4,
)

# %% [markdown]
# *A larger batch sends more and reads the weights once, so the share of communication grows with it, until products,
# not reads, take the time.*

# %% [markdown]
# ## 9. Say it
#
# **"How do you cut a layer?"**
# - *20 seconds.* QKV and gate/up by outputs, the projections after them by inputs. Heads and channels stay on their
#   rank; each half of the layer ends in one all-reduce. Two a layer.
# - *2 minutes.* f(xA)B = f(xA1)B1 + f(xA2)B2 (sections 3, 4). Cut the other way round, the sum comes before the
#   nonlinearity. The bias of the second matrix is added once, after the sum. Embedding and head by vocabulary,
#   logits gathered for sampled rows. Norms are on all ranks. Proved by equal logits on 2, 4, 8 ranks (section 5).
# - *Follow-up: why not one all-reduce?* The norm and the residual before the MLP need the whole row. *Follow-up: 8
#   KV heads on 16 ranks?* Each is kept twice; KV per rank no longer shrinks (section 7).
# - *The number:* 2 all-reduces a layer.
#
# **"How much is sent?"**
# - *20 seconds.* 2 x tokens x width numbers a layer; a ring sends 2 (p - 1) / p of that. A 70B in 16 bits: 32 KiB a
#   token and layer, 2.6 MB a token.
# - *2 minutes.* Derive it, then say that decode does not feel the bytes: at batch 8 a message is 128 KiB, and 160
#   of them wait for each other. Latency x messages is the floor (section 6). Prefill feels the bytes.
# - *Follow-up: ring or tree?* A ring sends the fewest bytes in 2 (p - 1) messages; a tree takes 2 log2 p. NCCL
#   chooses by size. *Follow-up: can it overlap with compute?* Not inside a layer: each needs the other's result.
# - *The number:* 2.6 MB and 160 all-reduces a token for 70B.
#
# **"Why inside a node? TP or PP?"**
# - *20 seconds.* TP talks twice a layer, so it needs NVLink; pipeline parallelism (PP, 流水线并行) talks once a
#   stage and can cross nodes. TP cuts latency, PP only adds capacity.
# - *2 minutes.* Show the two panels of section 6. NVLink 4 is 450 GB/s one way, a 400 Gb/s network 50. TP reads 1/p
#   of the weights for each token: TPOT falls. With PP a token still passes all weights in turn: TPOT stays, and
#   bubbles come on top (chapter 19). So: TP up to the node, PP between nodes, replicas for throughput.
# - *Follow-up: when is TP = 1 best?* When the model fits one card and throughput is what counts: replicas send
#   nothing.
# - *The number:* 9 x between NVLink and a 400 Gb/s network.

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %% tags=["nbval-ignore-output"]
predictions()

# %% [markdown]
# **Exercise:** `exercises/18_tensor_parallel.ipynb`: a row-parallel linear, GQA heads over too many ranks, a
# vocabulary cut in pieces, a layer with a missing all-reduce, the traffic of a 70B.
#
# **Papers:** Shoeybi et al. 2019, *Megatron-LM* (arXiv:1909.08053), the cut; Pope et al. 2022, *Efficiently Scaling
# Transformer Inference* (arXiv:2211.05102), other cuts and their costs; Thakur, Rabenseifner and Gropp 2005,
# *Optimization of Collective Communication Operations in MPICH*, ring and tree.
#
# **Next:** chapter 19, pipeline parallelism: cut by layers, and talk once a stage.
