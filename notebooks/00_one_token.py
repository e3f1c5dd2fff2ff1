# %% [markdown]
# # 00 One token
#
# **A language model answers one token (词元) at a time; this chapter counts what one token costs, measures it, and
# asks who waits for it.**
#
# > *The interviewer asks:* "Your service makes 2000 tokens per second. Is that good? What limits it, and would your
# > users agree?"
#
# You will be able to
# 1. count the work and the bytes of a forward pass from a model's configuration, and say which of the two limits it;
# 2. define time to first token (TTFT), inter-token latency (ITL), time per output token (TPOT), end-to-end latency,
#    throughput and goodput, and compute each from a list of times;
# 3. tell a good throughput figure from one that no user would thank you for.
#
# Reading time: 25 minutes; the exercise: an hour. No graphics processor (GPU, 图形处理器) and no network needed.
#
# **Welcome.** Every chapter is a notebook like this one: run a cell with Shift+Enter and change whatever you like.
# Before a measurement you write a number down (`predict`), then the cell shows yours beside what was measured
# (`reveal`). No number in the text was measured somewhere else: your machine prints its own. Each chapter has an
# exercise in `exercises/` that checks itself.

# %%
import inspect
import time
from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np
import torch

from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import cached_tokens, decode, prefill
from minillm.engine.rungs import MANY, PREFIX, climb_many, many, prefix
from minillm.lab import explore, is_fast, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure.clock import SLO, RequestTimes, summary, timed
from minillm.measure.counts import counted_flops, forward_counts, kv_bytes_per_token, parameter_count, weight_bytes
from minillm.measure.ladder import QUICK, climb, timed_request
from minillm.measure.machine import ceilings
from minillm.measure.roofline import Roofline, place, roofline
from minillm.model.decoder import Decoder
from minillm.model.hub import is_available
from minillm.model.shapes import known_shape
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model

# %% [markdown]
# The real model is `smollm2-135m` where `minillm pull smollm2-135m` has fetched it, else `tiny`, which ships with the
# course. The cell says which. It also measures two ceilings of this machine: how fast it can read memory, and how
# fast it can multiply matrices.

# %% tags=["nbval-ignore-output"]
name = pick(full="smollm2-135m" if is_available("smollm2-135m") else "tiny", quick="tiny")
model = load_model(name)
config, element = model.config, model.embed.weight.element_size()
kind = str(model.dtype).removeprefix("torch.")
machine = ceilings(model.device, fast=is_fast())
roof = roofline(machine, kind)

text = files("minillm.model").joinpath("assets/heldout.txt").read_text(encoding="utf-8")
book = load_tokenizer(name).encode(text[:20_000])  # token ids of a novel: the prompts of this chapter
prompt = book[: pick(full=256, quick=128)]
print(f"model    {name}, {kind}: {config.num_layers} layers, width {config.hidden_size}")
print(f"machine  {machine}")

# %% [markdown]
# ## The waste, measured
# An answer has two phases. **Prefill** (预填充) reads the whole prompt in one forward pass (前向传播) and gives the
# first token. **Decode** (解码) gives each further token, one pass apiece. Here is what each phase gets out of this
# machine.

# %% tags=["nbval-ignore-output"]
new_tokens = pick(full=32, quick=24)
list(cached_tokens(model, prompt, 2))  # warm-up, not counted
runs = [timed_request(lambda: cached_tokens(model, prompt, new_tokens))[1] for _ in range(2)]
times = min(runs, key=lambda run: run.e2e)  # when each token came, in the quickest run

prefill_counts = forward_counts(config, len(prompt), dtype_bytes=element, scored=1)
decode_counts = forward_counts(config, 1, context=len(prompt) + new_tokens // 2, dtype_bytes=element)
one = [place(prefill_counts, times.ttft, roof, "prefill"), place(decode_counts, times.tpot, roof, "decode")]

_, axes = plots.figure(1, 2, height=1.7)
for ax, field, title in zip(axes, ("share_of_peak", "share_of_bandwidth"), ("arithmetic", "memory bandwidth")):
    shares = [100 * getattr(run, field) for run in one]
    plots.bars(
        [run.name for run in one], shares, "%", f"{title} in use", ax, [plots.MEANING[run.name] for run in one]
    )
    ax.set_xlabel("% of this machine's measured ceiling")
plt.show()

# %% [markdown]
# *One request, measured: decode uses a small part of the arithmetic that prefill uses, and leaves the rest idle.*
#
# That idle arithmetic is the waste: most of this course is about using it. Decode spends its time on reading weights
# instead, the right-hand panel. (Over 100 % there would mean that weights stayed in the processor's cache: a small
# model fits in a large one. A small model on a busy machine, or on a GPU that waits for Python, uses little of
# either.)

# %% [markdown]
# ## Predict
# A model of `N` weights does one multiplication and one addition per weight and token: **2 N FLOPs** (floating-point
# operations, 浮点运算) a token. And to do it, it must read every weight once: **N x bytes per weight**. So no decode
# step is faster than bytes / bandwidth (带宽), and no prefill of `n` tokens faster than 2 N n / (FLOP/s). Five
# numbers, before anything below shows them; change them if you disagree.

# %% tags=["nbval-ignore-output"]
N = parameter_count(config)
predict("00.weight_bytes", N * element, "B")
predict("00.flops_per_token", 2 * N, "FLOP")
predict("00.decode_step", N * element / machine.read_bandwidth, "s")
predict("00.prefill", 2 * N * len(prompt) / machine.peak(kind), "s")
predict("00.batch_16_gain", 16, "x")  # tokens/s of 16 requests over one: the weights are read once for all

# %% [markdown]
# ## The idea, drawn
# **Arithmetic intensity** (算术强度) is FLOPs divided by bytes moved. Below the *ridge*, FLOP/s divided by bytes/s,
# memory decides the speed; above it, arithmetic. That is the **roofline** (屋顶线) model.

# %%
_, ax = plots.figure(height=3.0)
ax.loglog([0.1, 10, 300], [0.1, 10, 10], color=plots.MEANING["ceiling"], lw=3)
ax.plot([10, 10], [0.02, 10], ":", color=plots.GREY)
for label, phase, x, y in (("one request", "decode", 0.5, 0.5), ("many", "decode", 3, 3), ("", "prefill", 100, 10)):
    ax.plot(x, y, "o", ms=9, color=plots.MEANING[phase])
    ax.text(1.2 * x, 0.75 * y, f"{phase}\n{label}", va="top", fontsize=9)
ax.annotate("", (2.5, 3.2), (0.55, 0.7), arrowprops={"arrowstyle": "->", "color": plots.BLUE, "lw": 1.5})
ax.text(0.8, 2.2, "batch more requests:\nsame weights, more FLOPs", ha="right", fontsize=8)
ax.text(0.17, 0.08, "slope: bytes/s", fontsize=8, color=plots.RED)
ax.text(50, 13, "roof: FLOP/s", fontsize=8, color=plots.RED)
ax.text(11, 0.03, "ridge = (FLOP/s) / (bytes/s)", fontsize=8)
ax.set(xlabel="arithmetic intensity: FLOPs per byte", ylabel="speed: FLOP/s", xticks=[], yticks=[], ylim=(0.02, 40))
ax.minorticks_off()
ax.set_title("Memory decides on the slope, arithmetic under the roof")
plt.show()

# %% [markdown]
# *A sketch for the whiteboard, without units: one request decodes far down the slope; prefill stands under the flat
# roof; a bigger batch (批次) walks up the slope.*
#
# ## Build it
# All of the chapter in under 40 lines: count, measure the two ceilings, describe a request.
# - Prefill of n tokens is `count(config, n, 0)`. A decode step is `count(config, 1, context)`.
# - The **KV cache** (键值缓存) keeps each token's keys and values, so that decode need not compute them again
#   (chapter 02 builds it). It must be read too.


# %%
def count(config, new, context, batch=1, element=4):
    """(FLOPs, bytes) of one forward: `batch` sequences, each with `context` tokens in the cache and `new` ones."""
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * config.intermediate_size  # qkv, out, gate + up + down
    head = hidden * config.vocab_size
    flops = 2 * batch * new * (config.num_layers * layer + head)  # a multiply and an add for each weight and token
    flops += 4 * batch * new * (context + new) * q * config.num_layers  # scores, then values
    norms = (2 * config.num_layers + 1) * hidden
    rows = batch * new * hidden  # of the embedding, those looked up
    weights = config.num_layers * layer + norms + head + rows  # each read once, whatever the batch
    cache = 2 * kv * batch * (context + new + new) * config.num_layers  # K and V: read all, write the new ones
    return flops, (weights + cache) * element


def fastest(function, repeats=5):
    """Seconds of the fastest call: noise only ever slows, and a ceiling is what was reached."""
    return timed(function, repeats, warmup=1).best


def read_ceiling(device, mib=128):
    """Bytes/s: multiply a matrix far larger than the cache by a vector, which reads it once."""
    x = torch.randn(1024, 1024, device=device).repeat(mib // 4, 1)  # [rows, 1024] float32
    v = torch.randn(1024, device=device)
    return x.nbytes / fastest(lambda: x @ v)


def matmul_ceiling(device, dtype, size=1024):
    """FLOP/s: a square matrix product, 2 size^3 FLOPs."""
    x, w = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / fastest(lambda: torch.nn.functional.linear(x, w))


def describe(arrival, token_times):
    """What one user saw, in seconds."""
    ttft, e2e = token_times[0] - arrival, token_times[-1] - arrival
    itl = np.diff(token_times)
    return {"ttft": ttft, "itl": itl, "tpot": (e2e - ttft) / (len(token_times) - 1), "e2e": e2e}


# %% [markdown]
# ## The library's version
# `minillm.measure.counts` adds what real models need: tied heads, biases, sliding windows, prefill that scores its
# last token only, weights and cache in different types, and the causal mask (因果掩码), which lets a kernel skip
# almost half of the pairs. Its heart:

# %%
source = inspect.getsource(forward_counts)
print(source[source.index("    flops = {") : source.index("    return Counts")])

# %% [markdown]
# Three independent counts must agree exactly: ours, the library's, and torch's own `flop_counter`, which watches the
# operations as they run. torch can watch a model that has no weights at all (device `meta`), so we can check a 70B
# (70 billion weights) on a laptop.

# %%
# bf16 (bfloat16): 2 bytes a number
work = {"prefill of 64": dict(new=64, context=0, batch=2), "decode at 300": dict(new=1, context=300, batch=4)}


def watched(decoder, new, context, batch):
    """FLOPs as torch counts them in our decoder, on the device without memory."""
    cache = ContiguousCache(decoder.config, batch, context + new, device="meta")
    cache.lengths = [context] * decoder.config.num_layers
    return counted_flops(lambda: decoder(torch.zeros(batch, new, dtype=torch.long, device="meta"), cache=cache))


print(f"{'model':<15}{'work':<15}{'FLOPs, all three':>22}{'bytes, both':>18}   weights in bf16")
for label in pick(full=("smollm2-135m", "llama-3.1-8b", "llama-3.1-70b"), quick=("llama-3.1-8b",)):
    shape = known_shape(label)
    with torch.device("meta"):
        decoder = Decoder(shape)
    for job, sizes in work.items():
        flops, moved = count(shape, **sizes, element=2)
        library = forward_counts(shape, sizes["new"], sizes["context"], sizes["batch"], dtype_bytes=2, causal=False)
        assert flops == library.total_flops == watched(decoder, **sizes)
        assert moved == library.total_bytes
        print(f"{label:<15}{job:<15}{flops:>22,}{moved:>18,}   {units.show(weight_bytes(shape, 2), 'B')}")

# %% [markdown]
# And on the real, loaded model: the bytes of its parameters, and the FLOPs of a real decode step. The second is a
# little over 2 N: that is attention, which reads the context.

# %%
assert sum(p.nbytes for p in model.parameters()) == weight_bytes(config, element)
reveal("00.weight_bytes", sum(p.nbytes for p in model.parameters()))
cache = ContiguousCache(config, 1, len(prompt) + 1, model.dtype, model.device)
logits = prefill(model, torch.tensor([prompt], device=model.device), cache)
flops = counted_flops(lambda: decode(model, logits.argmax(-1), cache))
assert flops == count(config, 1, len(prompt))[0]
reveal("00.flops_per_token", flops)

# %% [markdown]
# ## Measure it
# First the ceilings. A data sheet says what a chip could do; blame a kernel only for what this machine was seen to
# do. The library tries several kernels and sizes and keeps the best, so its ceilings are as high as ours or higher,
# up to noise.

# %% tags=["nbval-ignore-output"]
ours = read_ceiling(model.device), matmul_ceiling(model.device, model.dtype)
for who, (read, multiply) in {"ours": ours, "library": (roof.bandwidth, roof.peak)}.items():
    print(f"{who:<8} read {units.show(read, 'B/s')}, matmul {units.show(multiply, 'FLOP/s')} in {kind}")
print(f"recorded on a GPU: read {recorded('machine.read_bandwidth')}")
print(f"ridge of this machine: {roof.ridge:.3g} FLOPs per byte")
reveal("00.prefill", times.ttft)
reveal("00.decode_step", times.tpot)

# %% [markdown]
# Both are floors: a ratio above 1 is what Python, small matrices and everything else on your machine add. Later
# chapters hunt that factor.
#
# Now prefill of growing prompts and decode at growing batch, placed on the roofline. Each point is FLOPs by formula
# over measured seconds.


# %% tags=["nbval-ignore-output"]
def timed_prefill(new):
    tokens = torch.tensor([book[:new]], device=model.device)  # [1, new]
    cache = ContiguousCache(config, 1, new, model.dtype, model.device)

    def run():
        cache.truncate(0)
        prefill(model, tokens, cache)

    counts = forward_counts(config, new, dtype_bytes=element, scored=1)
    return place(counts, timed(run, repeats, 1).median, roof, f"prefill {new}")


def timed_decode(batch, context=32):
    tokens = torch.tensor([book[i : i + context] for i in range(batch)], device=model.device)  # [batch, context]
    cache = ContiguousCache(config, batch, context + 1, model.dtype, model.device)
    token = prefill(model, tokens, cache).argmax(-1)  # [batch]

    def run():
        cache.truncate(context)
        decode(model, token, cache)

    counts = forward_counts(config, 1, context, batch, dtype_bytes=element)
    return place(counts, timed(run, repeats, 1).median, roof, f"decode, batch {batch}")


repeats = 3
placed = [timed_decode(b) for b in (1, 4, 16)] + [timed_prefill(n) for n in (16, len(prompt))]
points = {run.name: (run.intensity, run.flops_per_second) for run in placed}
ax = plots.roofline(points, roof.peak, roof.bandwidth, f"{name} on this machine, {kind}")
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# *Decode starts at the far left, at about 2 FLOPs per weight read, and moves right in proportion to the batch;
# prefill of n tokens lies near decode of n requests, since both use each weight n times.*

# %% tags=["nbval-ignore-output"]
gpu = recorded("decode.bfloat16.batch1.bandwidth_share"), recorded("prefill.peak_share")
rows = [
    dict(name="decode, batch 1:\nof the bandwidth", here=placed[0].share_of_bandwidth, recorded=gpu[0], ceiling=1.0),
    dict(name="longest prefill:\nof the FLOP/s", here=placed[-1].share_of_peak, recorded=gpu[1], ceiling=1.0),
]
plots.beside(rows, "", f"{name} here, beside a recorded GPU, as a share of the ceiling")
plt.show()

# %% [markdown]
# *Each phase against the ceiling that limits it on large models. A GPU figure appears once the course has one on
# record.*
#
# ### One request, seen by its user
# From the trace of the first cell: the request arrives, waits for prefill, then tokens drip.
# - **TTFT**, time to first token (首词元延迟): arrival to first token, waiting in a queue included.
# - **ITL**, inter-token latency (词元间延迟): each gap between two tokens. **TPOT**, time per output token
#   (单词元耗时): their mean over one request.
# - **End-to-end** (端到端延迟): arrival to last token. Always e2e = TTFT + TPOT x (tokens - 1).

# %% tags=["nbval-ignore-output"]
seen = describe(times.arrival, times.token_times)
assert np.allclose([seen["ttft"], seen["tpot"], seen["e2e"]], [times.ttft, times.tpot, times.e2e])
assert np.isclose(seen["e2e"], seen["ttft"] + seen["tpot"] * (new_tokens - 1))

at = [moment - times.arrival for moment in times.token_times]
_, ax = plots.figure(height=1.9)
ax.barh(0, seen["ttft"], color=plots.MEANING["prefill"], height=0.5)
for start, gap in zip(at, seen["itl"]):
    ax.barh(0, gap, left=start, color=plots.MEANING["decode"], height=0.5, edgecolor="white", linewidth=0.6)
ax.annotate("TTFT", (seen["ttft"] / 2, 0.32), ha="center", fontsize=9)
ax.annotate("one gap: ITL; their mean: TPOT", ((at[0] + at[-1]) / 2, 0.32), ha="center", fontsize=9)
ax.annotate("", (at[-1], -0.42), (0, -0.42), arrowprops={"arrowstyle": "<->", "color": plots.GREY})
ax.annotate("end-to-end", (at[-1] / 2, -0.6), ha="center", va="top", fontsize=9)
ax.set(ylim=(-0.95, 0.65), yticks=[])
plots.unit_axis(ax.xaxis, "s", "time since arrival")
plt.show()
print(
    f"{new_tokens} tokens   " + "   ".join(f"{key} {units.show(seen[key], 's')}" for key in ("ttft", "tpot", "e2e"))
)
print("itl  " + "   ".join(f"p{p} {units.show(np.percentile(seen['itl'], p), 's')}" for p in (50, 90, 99)))

# %% [markdown]
# *A real request of this machine. Prefill handles the whole prompt in the green block; each blue block is one decode
# step.*
#
# ### One machine, seen by its owner
# **Throughput** (吞吐量) is tokens per second over all users. The owner of the machine wants it high, as the machine
# costs the same idle or busy. Watch both sides as the batch grows. The price is an assumption for the arithmetic:
# write your own.

# %% tags=["nbval-ignore-output"]
PRICE = 2.0  # an assumption: currency units for one hour of this machine
sizes = pick(full=[1, 2, 4, 8, 16, 32], quick=[1, 4, 16])
batches = {b: timed_decode(b) for b in sizes}
rate = {b: b / run.seconds for b, run in batches.items()}  # tokens/s of the machine
cost = {b: PRICE / 3600 / r * 1e6 for b, r in rate.items()}  # for a million tokens
print(f"{'batch':>5}{'machine tok/s':>15}{'user tok/s':>12}{'TPOT':>10}{'a million tokens':>18}")
for b, run in batches.items():
    print(f"{b:>5}{rate[b]:>15.1f}{1 / run.seconds:>12.1f}{units.show(run.seconds, 's'):>10}{cost[b]:>18.2f}")
reveal("00.batch_16_gain", rate[16] / rate[1])

# %% tags=["nbval-ignore-output"]
_, (left, right) = plots.figure(1, 2, height=2.9)
user = [1 / run.seconds for run in batches.values()]
for ax, values in ((left, list(rate.values())), (right, list(cost.values()))):
    ax.plot(user, values, "o-")
    for b, x, y in zip(sizes, user, values):
        ax.annotate(
            f"batch {b}" if b in (1, sizes[-1]) else b, (x, y), (5, 4), textcoords="offset points", fontsize=8
        )
    ax.set(xlabel="one user's speed, tokens/s", xlim=(0, 1.25 * max(user)), ylim=(0, 1.15 * max(values)))
left.set(title="throughput", ylabel="all users, tokens/s")
right.set(title=f"cost, at {PRICE:g} an hour", ylabel="for a million tokens")
plt.show()

# %% [markdown]
# *Each point is a batch size. Moving left along the curve, each user gets slower while the machine makes more tokens,
# each of them cheaper. Latency, throughput, cost: a setting trades them; only a technique moves the whole curve.*
#
# That is the **triangle**: for one model on one machine, low latency (延迟), high throughput and low cost pull
# against each other. Every chapter from here pushes the curve outward, and says for whom.

# %% [markdown]
# ### The ladder
# The course in one place: one technique more on each rung, the same tokens on all of them. It is the first part of
# what `minillm tour` prints, which goes on to compiled steps and weights of fewer bits. First one request:


# %% tags=["nbval-ignore-output"]
def ladder(steps):
    """Print rungs as a table, a part for each workload."""
    heads, workload = ("chapter", "tokens/s", "gain", "TTFT", "TPOT", "weights", "KV", "bandwidth"), None
    for s in steps:
        if s.workload != workload:
            print(f"{s.workload}\n{'rung':<34}" + "".join(f"{head:>10}" for head in heads))
            workload = s.workload
        cells = [s.chapter, f"{s.tokens_per_second:.1f}", f"{s.speedup:.2f}x"]
        cells += [units.show(s.ttft, "s"), units.show(s.tpot, "s")]
        cells += [units.show(s.weight_bytes, "B"), units.show(s.kv_bytes, "B")]
        cells += ["" if s.bandwidth_share is None else f"{s.bandwidth_share:.0%}"]
        print(f"{s.name:<34}" + "".join(f"{cell:>10}" for cell in cells))


print(f"{name}, {kind}, prompt of 48 tokens, greedy")
ladder(climb(model, book[:48], pick(full=16, quick=12), machine, QUICK, repeats=pick(full=2, quick=1)))

# %% [markdown]
# *bandwidth: bytes a token must move, over TPOT, over the measured read bandwidth. Without a cache (first rung) each
# token is a prefill of all text so far.*
#
# Then the techniques that one request cannot show (on `tiny`): many requests at once, and a prompt that begins as an
# earlier one did.

# %% tags=["nbval-ignore-output"]
tiny = model if name == "tiny" else load_model("tiny")
workloads = [(many(tiny, count=pick(full=16, quick=8)), MANY), (prefix(tiny), PREFIX)]
ladder(climb_many(tiny, workloads, repeats=pick(full=3, quick=1)))

# %% [markdown]
# *All requests are there at the start, so TTFT, here the median, includes the wait. Three rungs have the same bytes
# for K and V: what paging gains is requests at once. The prefix cache gains the first token, and nothing after it.*

# %% [markdown]
# ## Where it backfires
# "Batching makes tokens cheaper, so let us wait until the batch is full." Here is that server, on `tiny`: one
# machine, a queue, three policies. Computing takes real time; while the server has nothing to do, its clock skips to
# the next arrival, so that you need not wait.


# %%
def serve(tiny, arrivals, prompts, tokens, take):
    """Run requests in static batches, first come first served. take(waiting, coming) -> how many to start now.

    Returns (requests with the time of every token, seconds the machine was busy).
    """
    requests = [RequestTimes(a, prompt_tokens=len(p)) for a, p in zip(arrivals, prompts)]
    now, busy, done = 0.0, 0.0, 0
    while done < len(requests):
        waiting = sum(a <= now for a in arrivals[done:])
        size = take(waiting, len(requests) - done - waiting)
        if size == 0:
            now = arrivals[done + waiting]  # idle until the next request comes
            continue
        batch, start = requests[done : done + size], time.perf_counter()
        for request in batch:
            request.scheduled = now
        cache = ContiguousCache(tiny.config, size, len(prompts[0]) + tokens, tiny.dtype, tiny.device)
        logits = prefill(tiny, torch.tensor(prompts[done : done + size], device=tiny.device), cache)  # [size, vocab]
        for step in range(tokens):
            token = logits.argmax(-1)  # [size]
            token.tolist()  # the user has it only once the device is done
            for request in batch:
                request.token(now + time.perf_counter() - start)
            if step + 1 < tokens:
                logits = decode(tiny, token, cache)
        spent = time.perf_counter() - start
        now, busy, done = now + spent, busy + spent, done + size
    return requests, busy


FULL = 8
policies = {
    "one by one": lambda waiting, coming: min(waiting, 1),
    f"wait for {FULL}": lambda waiting, coming: FULL if waiting >= FULL else waiting if not coming else 0,
    "whoever is here": lambda waiting, coming: min(waiting, FULL),
}

# %% [markdown]
# **Goodput** (有效吞吐) counts only requests that met every target of a service level objective (**SLO**,
# 服务水平目标). Ours is modest: first token within twice the time that a whole answer takes alone, and then no slower
# than a quarter of the speed of an idle machine.

# %% tags=["nbval-ignore-output"]
tiny_book = book if name == "tiny" else load_tokenizer("tiny").encode(text[:20_000])
requests_count, answer = pick(full=(24, 16), quick=(16, 8))
prompts = [tiny_book[32 * i : 32 * i + 32] for i in range(requests_count)]
alone = [serve(tiny, [0.0], prompts[:1], answer, policies["one by one"])[0][0] for _ in range(5)][1:]
e2e, tpot = (float(np.median([getattr(r, key) for r in alone])) for key in ("e2e", "tpot"))
slo = SLO(ttft=2 * e2e, tpot=4 * tpot)

# Speed counts only after correctness: a request's logits do not depend on its neighbours in the batch.
rows = torch.tensor(prompts[:FULL], device=tiny.device)  # [FULL, 32]
together, apart = tiny(rows)[:, -1], torch.cat([tiny(row[None])[:, -1] for row in rows])  # [FULL, vocab] each
assert (together - apart).abs().max() < 1e-3 * apart.abs().max() or tiny.dtype != torch.float32


def run_all(interval):
    """Every policy on the same requests, one every `interval` seconds: the middle of some alternating rounds."""
    arrivals = [i * interval for i in range(requests_count)]
    count = pick(full=3, quick=1)
    rounds = [{p: serve(tiny, arrivals, prompts, answer, take) for p, take in policies.items()} for _ in range(count)]
    return {p: sorted((r[p] for r in rounds), key=lambda run: run[1])[count // 2] for p in policies}


def show_runs(title, runs):
    heads = ("busy tok/s", "clock tok/s", "P50 TTFT", "P99 TTFT", "P50 TPOT", "good", "goodput/s")
    print(f"\n{title}\n{'policy':<16}" + "".join(f"{head:>12}" for head in heads))
    for label, (requests, busy) in runs.items():
        s = summary(requests, slo)
        cells = [f"{s.output_tokens / busy:.0f}", f"{s.output_throughput:.0f}"]
        times = s.ttft.percentiles[50], s.ttft.percentiles[99], s.tpot.percentiles[50]
        cells += [units.show(t, "s") for t in times] + [f"{s.good_requests}/{s.requests}", f"{s.goodput:.2f}"]
        print(f"{label:<16}" + "".join(f"{cell:>12}" for cell in cells))


quiet, rush = run_all(2 * e2e), run_all(e2e / 4)
print(f"tiny; SLO: TTFT <= {units.show(slo.ttft, 's')}, TPOT <= {units.show(slo.tpot, 's')}")
show_runs("quiet: one request in the time of 2 answers", quiet)
show_runs("rush: 4 requests in the time of one answer", rush)

# %% tags=["nbval-ignore-output"]
_, (left, right) = plots.figure(1, 2, height=2.9)
speeds = [summary(requests).output_tokens / busy for requests, busy in quiet.values()]
colors = [plots.GREY, plots.SKY, plots.BLUE]
plots.bars(list(quiet), speeds, "", "what the slide shows", left, colors)
left.set_xlabel("tokens per busy second")
for color, (label, (requests, _)) in zip(colors, quiet.items()):
    right.plot(range(1, requests_count + 1), [r.ttft for r in requests], "o-", ms=3, lw=1, color=color, label=label)
right.axhline(slo.ttft, color=plots.RED, ls="--", lw=1.2, label="the SLO")
right.set(xlabel="request", yscale="log")
plots.unit_axis(right.yaxis, "s", "TTFT")
right.yaxis.set_minor_formatter(plt.NullFormatter())
right.set_title("what users see")
right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()

# %% [markdown]
# *The quiet hour. Waiting for a full batch gives the best tokens per busy second, and the first to come waits for
# seven others to arrive.*
#
# - On the quiet server "wait for 8" has the best figure on the slide and the worst TTFT. Per second on the clock it
#   makes no more than the others: users come at the same pace. Its goodput shows it.
# - In the rush "one by one" is the policy that fails: its queue grows without end, and every TTFT with it.
# - "Whoever is here" batches when there is something to batch. It still makes newcomers wait for a whole batch;
#   chapter 04 repairs that.
#
# So ask of any tokens/s: of the machine or of a user? Busy or on the clock? At which load, with which P99 (the 99th
# percentile, 百分位数) of TTFT?

# %% [markdown]
# ## Play
# Move the batch and the context. The dot is one decode step in bf16 (2 bytes a number); the line behind it is all
# batches up to 1024. H100 is its data sheet (3.35 TB/s, 989 TFLOP/s), not a measurement.

# %% tags=["nbval-ignore-output"]
machines = {"H100 data sheet": Roofline(989e12, 3.35e12), "this machine": Roofline(roof.peak, roof.bandwidth)}


def draw(ax, batch, context, shape, hardware):
    here, shown = machines[hardware], known_shape(shape)
    x, y = here.curve(0.5, 3000)
    ax.loglog(x, y, color=plots.MEANING["ceiling"])
    trail = [forward_counts(shown, 1, context, b, dtype_bytes=2).intensity for b in 2 ** np.arange(11)]
    ax.plot(trail, [here.attainable(i) for i in trail], ".", ms=4, color=plots.GREY)
    counts = forward_counts(shown, 1, context, batch, dtype_bytes=2)
    ax.plot(counts.intensity, here.attainable(counts.intensity), "o", ms=9, color=plots.MEANING["decode"])
    step = here.least_seconds(counts)
    kv = counts.kv_read / counts.total_bytes
    speed = f"{batch / step:,.0f} tokens/s\nTPOT {units.show(step, 's')}"
    note = f"{counts.intensity:.3g} FLOP/B\nKV {kv:.0%} of bytes\n{speed}"
    ax.text(0.04, 1.0, note, transform=ax.transAxes, va="top", fontsize=7)
    ax.set(xlabel="FLOP/B", ylim=(y[0] / 2, 50 * here.peak))
    plots.unit_axis(ax.yaxis, "FLOP/s", "")
    ax.yaxis.set_minor_formatter(plt.NullFormatter())


explore(
    draw,
    batch=(1, 1024, 1),
    context=(0, 32768, 1024, 1024),
    shape=["llama-3.1-8b", "llama-2-7b", "llama-3.1-70b", "smollm2-135m"],
    hardware=list(machines),
    static=[dict(batch=1), dict(batch=256), dict(batch=256, context=16384)],
)

# %% [markdown]
# *The best that llama-3.1-8b could do on one H100 by these formulas. Batch moves the dot to the right. Context pulls
# it back: each request brings its own KV cache, which no other shares, so the intensity stops growing however large
# the batch, and memory stays the limit.*
#
# ## Say it
# The numbers of the cards. (The first panel above says a little more than the 209: of the embedding table a step
# reads only one row.)

# %%
big, bandwidth, peak = known_shape("llama-3.1-8b"), 3.35e12, 989e12
print(f"weights in bf16           {weight_bytes(big, 2) / 1e9:.2f} GB")
print(f"batch-1 decode ceiling    {bandwidth / weight_bytes(big, 2):.0f} tokens/s at 3.35 TB/s")
print(f"ridge                     {peak / bandwidth:.0f} FLOP/B")
print(f"KV of one token           {kv_bytes_per_token(big, 2) / 1024:.0f} KiB")
work = forward_counts(big, 2048, dtype_bytes=2, scored=1).total_flops
print(f"prefill of 2048, at peak  {work / peak * 1e3:.0f} ms")
predictions()

# %% [markdown]
# **Card 1. Why is decode slow on a chip with so many FLOPs?**
# - *20 seconds.* One token uses each weight once: 2 FLOPs per weight, 2 bytes per weight in bf16, so 1 FLOP per byte.
#   An H100 needs about 295 to be busy. Decode therefore runs at the speed of memory: bytes over bandwidth.
# - *2 minutes.* Draw the roofline (section *The idea, drawn*). Prefill of n tokens uses each weight n times, so it
#   stands under the flat roof; decode of one request is far left on the slope. Three ways to move: batch (same
#   weights, more FLOPs), fewer bytes (quantisation, grouped-query attention), more tokens per pass (speculative
#   decoding).
# - *Follow-up.* "So batch 295 and you are done?" No: KV reads grow with batch x context and are shared by nobody
#   (section *Play*, third panel).
# - *Number.* 8B in bf16 on 3.35 TB/s: 16 GB, about 209 tokens/s at batch 1. Shown in the cell above.
#
# **Card 2. TTFT, ITL, TPOT?**
# - *20 seconds.* TTFT: arrival to first token, queue and prefill included. ITL: one gap. TPOT: their mean over a
#   request, (e2e - TTFT) / (tokens - 1). e2e = TTFT + TPOT x (tokens - 1).
# - *2 minutes.* Draw the trace (section *One request, seen by its user*). TTFT grows with the prompt and the queue;
#   ITL with the batch and with whatever interrupts decode. Report percentiles per request, with the load beside them.
# - *Follow-up.* "Mean TPOT is fine, users complain of stutter?" Look at P99 of ITL: TPOT is a mean and hides a pause.
# - *Number.* Minus 1: a request of n tokens has n - 1 gaps (`describe` in *Build it*).
#
# **Card 3. Throughput rose and users complain. How?**
# - *20 seconds.* Throughput is the machine's, latency is the user's. A bigger batch raises the first and worsens the
#   second. Count goodput: requests per second that met the SLO.
# - *2 minutes.* Section *Where it backfires*: waiting for a full batch wins tokens per busy second and loses nearly
#   every SLO; in a rush, one by one loses instead. The policy has to follow the load.
# - *Follow-up.* "Which load did your benchmark use?" If it sent all requests at once, its TTFT says nothing about a
#   quiet hour.
# - *Number.* The `good` column of that table.
#
# **Card 4. What does a token cost?**
# - *20 seconds.* Machine price per hour, over 3600, over tokens per second of the machine. So cost falls exactly as
#   throughput rises.
# - *2 minutes.* Section *One machine, seen by its owner*: the same points against a user's speed. Latency,
#   throughput, cost: pick a point on the curve; a technique moves the curve.
# - *Follow-up.* "Why do input tokens cost less than output tokens?" Prefill stands under the roof of arithmetic,
#   decode under that of memory: far fewer machine-seconds a token.
# - *Number.* 2 FLOPs per weight and token (section *Predict*, checked in *The library's version*).
#
# ## Exercise, papers, next
# - Exercise: `exercises/00_one_token.ipynb`, six tasks, about an hour. `minillm grade exercises/00_one_token.ipynb`
#   grades it.
# - Papers: Williams, Waterman, Patterson 2009, *Roofline* (CACM 52(4)). Pope et al. 2022, *Efficiently Scaling
#   Transformer Inference* (arXiv:2211.05102): counting for inference. Zhong et al. 2024, *DistServe*
#   (arXiv:2401.09670): goodput.
# - Next: `01_decoder` builds the model that ran here, from tensors up.
