# %% [markdown]
# # 04 Batching
#
# **A forward reads all weights whether it serves one request or many: so let many share it, and let them join and
# leave at every step.**
#
# > *The interviewer asks:* "What is continuous batching, what does it fix that dynamic batching does not, and who
# > pays for it?"
#
# You will be able to
# - compute by hand what share of a static batch's work nobody asked for, and check it on a trace;
# - write the loop of continuous batching in 40 lines, with every request's tokens equal to running it alone;
# - name two costs: time to first token when the batch is full, and tokens that may change with the batch in bf16.
#
# 30 minutes to read. All cells run on `tiny`, which ships with the course.

# %%
import inspect
from collections import deque
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

from minillm import load_model, load_tokenizer
from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import decode, generate_cached, prefill
from minillm.engine.engine import Engine
from minillm.engine.policies import POLICIES, Arrival, make_trace, run_trace
from minillm.engine.runner import pack
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal
from minillm.measure import clock
from minillm.model.decoder import replace_linears
from minillm.model.hub import ASSETS

model = load_model("tiny", dtype="float32")
config, device = model.config, model.device
tokenizer = load_tokenizer("tiny")
text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
words = tokenizer.encode(text[3000:33000])
print(f"model: tiny, on {device}, {torch.get_num_threads()} CPU threads, {config.num_layers} layers")

# %% [markdown]
# ## 1. The waste, measured
#
# **Alone.** One request decodes one token a step, and each step reads every weight. Put more requests into the step:
# how much longer does it take?


# %% tags=["nbval-ignore-output"]
def decode_seconds(rows, length=32):
    """Median seconds of one decode step of `rows` requests that hold `length` tokens each."""
    cache = ContiguousCache(config, rows, length + 1, device=device)
    tokens = torch.tensor(words[: rows * length], device=device).view(rows, length)
    prefill(model, tokens, cache)

    def step():
        cache.truncate(length)
        decode(model, tokens[:, 0], cache)

    return clock.timed(step, repeats=pick(15, 7)).median


sizes = [1, 2, 4, 8, 16, 32]
step_times = [decode_seconds(rows) for rows in sizes]
_, axes = plots.figure(1, 2, width=7.4, height=2.7)
axes[0].plot(sizes, step_times, "o-", color=plots.MEANING["technique"])
axes[0].plot(sizes, [step_times[0] * n for n in sizes], "--", color=plots.MEANING["naive"], label="one after another")
axes[0].set_ylim(0, max(step_times) * 2.2)
plots.unit_axis(axes[0].yaxis, "s", "time of one step")
axes[0].legend()
axes[1].plot(sizes, [n / t for n, t in zip(sizes, step_times)], "o-", color=plots.MEANING["technique"])
plots.unit_axis(axes[1].yaxis, "tokens/s", "decode speed")
for ax in axes:
    ax.set_xlabel("requests in the step")
plt.show()
print(f"32 requests: {step_times[-1] / step_times[0]:.1f} x the time of one, for 32 x the tokens")

# %% [markdown]
# *Left: a step over many requests costs far less than that many steps (tiny, float32). Right: so tokens per second
# grow with the batch.* A request that runs alone wastes what others could have shared: batching (批处理) is the
# cheapest speed-up of all.
#
# **Together, the simple way.** Four requests of unequal length in one tensor. A tensor is a rectangle, so prompts
# are padded (填充) to the longest, and rows that are done go on until the last one is. Count what was computed.

# %%
four = [
    Arrival(0.0, tuple(words[i * 50 : i * 50 + p]), n) for i, (p, n) in enumerate([(6, 5), (14, 20), (3, 9), (10, 3)])
]
batch = run_trace(model, four, "static", size=4, cost=lambda tokens: 1.0)
KINDS = {"prompt": "prefill", "answer": "decode", "padding": "waiting", "idle": "naive"}


def rectangle(ax, result, requests):
    """Rows of the batch, tokens across, as the forward saw them."""
    longest, steps = max(len(r.prompt) for r in requests), max(r.tokens for r in requests)
    for row, request in enumerate(requests):
        pad = longest - len(request.prompt)
        kinds = ["padding"] * pad + ["prompt"] * len(request.prompt) + ["answer"] * (request.tokens - 1)
        kinds += ["idle"] * (longest + steps - 1 - len(kinds))
        for column, kind in enumerate(kinds):
            ax.add_patch(plt.Rectangle((column, row), 0.9, 0.86, color=plots.MEANING[KINDS[kind]]))
    ax.set(xlim=(-0.2, longest + steps), ylim=(len(requests), -0.2), xlabel="token computed", ylabel="request")
    ax.set_yticks(np.arange(len(requests)) + 0.43, range(len(requests)))
    ax.grid(False)
    ax.set_title(f"{result.padding_waste:.0%} of the computed tokens were padding or idle")
    handles = [plt.Rectangle((0, 0), 1, 1, color=plots.MEANING[c]) for c in KINDS.values()]
    ax.legend(handles, KINDS, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=4)


_, ax = plots.figure(height=2.4)
rectangle(ax, batch, four)
plt.show()

# %% [markdown]
# *One static batch (静态批处理). Pale: padding left of short prompts. Grey: rows that are done, still computed.
# The last token of an answer is sampled and never run.*
#
# ## 2. Predict
#
# One trace for the whole chapter: 12 requests that arrive at random, 4 slots (槽位). Prompts are pieces of a book,
# answers have a fixed number of tokens, many short, some long. To compare policies on equal terms their clock is
# simulated at first: a forward over *t* tokens takes **20 ms + 0.2 ms x t**. The 20 ms stand for reading the
# weights, the rest for arithmetic; the tokens are computed for real. Section 6 then uses the real clock.

# %%
SLOTS, WINDOW = 4, 0.05


def COST(tokens):
    return 0.020 + 0.0002 * tokens


trace = [
    replace(a, prompt=tuple(words[100 * i : 100 * i + len(a.prompt)]))
    for i, a in enumerate(make_trace(12, 40.0, config.vocab_size, (4, 40), (3, 64), seed=4))
]
print("  arrives  prompt  answer")
for a in trace:
    print(f"  {a.time:5.2f} s  {len(a.prompt):6d}  {a.tokens:6d}")

# %% [markdown]
# Write down four numbers.
#
# - *Waste.* A static batch of B requests computes `B x (longest prompt + longest answer - 1)` tokens; asked for were
#   the sums of `prompt + answer - 1`. The batches are requests 0 to 3, 4 to 7, 8 to 11.
# - *Steps.* Static needs the longest answer of each batch, added up. Continuous batching (连续批处理) keeps all slots
#   busy, so it needs at least `all answer tokens / slots`.
# - *Speed-up.* Their ratio, if every step took as long.
# - *First token under a full batch.* Four requests with 48 tokens to go hold the four slots, a fifth arrives. Its
#   time to first token (TTFT, 首词元延迟) is about `48 steps of 4 tokens + its own prefill`.

# %%
groups = [trace[i : i + SLOTS] for i in range(0, len(trace), SLOTS)]
computed = sum(len(g) * (max(len(a.prompt) for a in g) + max(a.tokens for a in g) - 1) for g in groups)
asked = sum(len(a.prompt) + a.tokens - 1 for a in trace)
static_steps = sum(max(a.tokens for a in g) for g in groups)
least_steps = sum(a.tokens for a in trace) / SLOTS
predict("04.static_waste", 1 - asked / computed)
predict("04.static_steps", static_steps, "steps")
predict("04.speedup", static_steps / least_steps, "x")
predict("04.full_batch_ttft", 48 * COST(SLOTS) + COST(8), "s")

# %% [markdown]
# ## 3. The idea, drawn
#
# Nothing of it needs a model: a request is an arrival and a number of steps, a policy says who sits where, when.


# %%
def plan(requests, slots, window=None):
    """Cells (slot, begin, end, request, kind) in steps. requests: (arrival, steps), in order of arrival.

    window None: continuous. Otherwise a batch starts when it is full, or `window` steps after its first request.
    """
    cells, free, now, first = [], [0] * slots, 0, 0
    if window is None:
        for i, (arrival, steps) in enumerate(requests):
            slot = min(range(slots), key=lambda s: max(free[s], arrival))  # the first slot to be free
            begin = max(free[slot], arrival)
            free[slot] = begin + steps
            cells.append((slot, begin, free[slot], i, "decode"))
        return cells
    while first < len(requests):
        close = max(requests[first][0] + window, now)
        here = [i for i in range(first, min(first + slots, len(requests))) if requests[i][0] <= close]
        full = len(here) == slots or here[-1] == len(requests) - 1
        begin = max(now, requests[here[-1]][0] if full else close)
        now = begin + max(requests[i][1] for i in here)
        for slot, i in enumerate(here):
            done = begin + requests[i][1]
            cells += [(slot, begin, done, i, "decode"), (slot, done, now, i, "idle")]
        first += len(here)
    return cells


SHADES = {"prefill": plots.MEANING["prefill"], "decode": plots.SKY, "idle": plots.MEANING["waiting"]}


def draw_slots(ax, cells, slots, title=""):
    """Slot by time. The number is the request's."""
    for slot, begin, end, _, kind in cells:
        ax.barh(slot, end - begin, left=begin, height=0.82, color=SHADES[kind], edgecolor="white", linewidth=0.6)
    for slot, begin, request in {(c[0], min(d[1] for d in cells if d[3] == c[3]), c[3]) for c in cells}:
        ax.text(begin, slot, f" {request}", va="center", fontsize=7)
    ax.set(ylim=(slots - 0.5, -0.5), yticks=range(slots), ylabel="slot")
    ax.grid(False, axis="y")
    ax.set_title(title)


toy = [(0, 4), (1, 9), (6, 2), (7, 6), (8, 3), (9, 5), (13, 2)]
figure, axes = plots.figure(3, 1, width=6.4, height=4.2)
for ax, (name, window) in zip(axes, {"static": 10**6, "dynamic, window 2": 2, "continuous": None}.items()):
    cells = plan(toy, 3, window)
    draw_slots(ax, cells, 3, f"{name}: done after step {max(c[2] for c in cells)}")
    ax.plot([t for t, _ in toy], [-0.62] * len(toy), "v", color=plots.MEANING["ceiling"], clip_on=False)
    ax.set_xlim(-0.2, 24)
axes[-1].set_xlabel("step")
handles = [plt.Rectangle((0, 0), 1, 1, color=SHADES[kind]) for kind in ("decode", "idle")]
figure.legend(handles, ["a token a step", "done, still computed"], loc="outside lower center", ncols=2)
plt.show()

# %% [markdown]
# *Seven requests (red: arrivals), three slots. Static waits for a full batch, then for its longest answer.
# Dynamic (动态批处理) stops waiting when the window is over; the grey stays. Continuous asks after every step: who
# is done, who may come in? There is no batch any more, only slots, hence "iteration-level scheduling" (迭代级调度)
# in the Orca paper.*
#
# ## 4. Build it
#
# Requests in one step now have unequal lengths: one is at token 7, its neighbour at token 300. Linears do not care,
# they work row by row. Only attention does, so the cache keeps a length for each slot. Two details carry the weight:
# - **a row's positions come from its own length**, not from the batch;
# - **a slot is freed by setting its length to 0**; the mask hides what the last tenant left.


# %%
class SlotCache:
    def __init__(self, config, slots, room, device="cpu"):
        shape = (config.num_layers, slots, room, config.num_kv_heads, config.head_dim)
        self.k, self.v = torch.zeros(2, *shape, device=device)  # zeros: a masked NaN would still be NaN
        self.lengths = [0] * slots

    def positions(self, shape):  # of the slots in self.rows: each goes on from its own length
        start = torch.tensor([self.lengths[s] for s in self.rows], device=self.k.device)
        return start[:, None] + torch.arange(shape[1], device=self.k.device)  # [rows, time]

    def attend(self, layer, q, k, v):
        at, rows = self.positions(q.shape), torch.tensor(self.rows, device=q.device)
        self.k[layer.index, rows[:, None], at] = k  # [rows, time, kv_heads, dim]
        self.v[layer.index, rows[:, None], at] = v
        keys, values = self.k[layer.index, rows], self.v[layer.index, rows]  # [rows, room, kv_heads, dim]
        mask = torch.arange(keys.shape[1], device=q.device) <= at[:, :, None]  # [rows, time, room]
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, mask[:, None], scale=layer.scale, enable_gqa=True)
        return out.transpose(1, 2)  # [rows, time, heads, dim]


@torch.inference_mode()
def small_serve(model, requests, slots):
    """requests: (prompt, number of new tokens) each. Answers in the order of the requests."""
    cache = SlotCache(model.config, slots, max(len(p) + n for p, n in requests), model.device)
    queue, running, answers = deque(range(len(requests))), {}, [[] for _ in requests]

    def forward(rows, tokens):
        cache.rows = rows
        logits = model(torch.tensor(tokens, device=model.device), cache=cache)[:, -1]
        for slot, token in zip(rows, logits.argmax(-1).tolist()):
            cache.lengths[slot] += len(tokens[0])
            answers[running[slot]].append(token)
            if len(answers[running[slot]]) == requests[running[slot]][1]:
                del running[slot]  # leaves at once; its slot is free for the next step

    while queue or running:
        for slot in [s for s in range(slots) if s not in running][: len(queue)]:
            running[slot], cache.lengths[slot] = queue.popleft(), 0
            forward([slot], [requests[running[slot]][0]])  # prefill
        if running:
            forward(list(running), [[answers[i][-1]] for i in running.values()])  # decode, all slots at once
    return answers


pairs = [(list(a.prompt), a.tokens) for a in trace]
alone = [generate_cached(model, prompt, count) for prompt, count in pairs]
assert small_serve(model, pairs, SLOTS) == alone
assert small_serve(model, pairs, 1) == small_serve(model, pairs[::-1], 3)[::-1] == alone
print("12 requests in 4 slots, in 1 slot, in 3 slots in reversed order: every token as alone")

# %% [markdown]
# ## 5. The library's version
#
# A step of the engine, from source:

# %%
print(inspect.getsource(Engine._step))

# %% [markdown]
# | it adds | because |
# |---|---|
# | a scheduler with a budget of tokens | a prompt may share a forward with decodes (chapter 06) |
# | `pack`: all tokens of a step in one row `[tokens]`, no padding | slots differ in time, not only in length |
# | blocks in place of a slot's reserved room | room for the longest answer, held from the start, is waste (05) |
# | sampling by each row's own parameters | a greedy user sits beside a sampling one (the exercise has that fault) |
# | `abort`, errors that end one request alone | a batch has many owners |
#
# What does a mixed step look like? Watch `pack` on a real batch: one prompt joins two decoding requests.

# %%
engine = Engine(model, eos_ids=())
for a in trace[:2]:
    engine.add(a.prompt)
engine.step()
engine.add(trace[2].prompt)
step = engine.scheduler.schedule()
tokens, plan_of_step, rows = pack(step, device, engine.pool.num_blocks)
print(f"requests {[r.id for r in step.entries]} bring {plan_of_step.query_lengths} tokens: one row of {len(tokens)}")
print(f"positions {plan_of_step.positions.tolist()}")
print(f"each request's keys: {plan_of_step.kv_lengths} tokens; sampled from rows {rows.tolist()}")

# %% [markdown]
# Linears, norms and the head see one matrix of that many rows. Attention alone goes request by request: Orca calls
# it *selective batching* (选择性批处理). Where one request ends and the next begins is said by the running sums of
# the token counts; the variable-length kernels of FlashAttention take them as `cu_seqlens`.
#
# **Same tokens, proved.** Three policies of the library, the loop above, and each request alone, greedy, float32:

# %%
results = {policy: run_trace(model, trace, policy, size=SLOTS, window=WINDOW, cost=COST) for policy in POLICIES}
for policy, result in results.items():
    assert result.outputs == alone, policy
print(f"{len(trace)} requests x {len(POLICIES)} policies: every token equal to running the request alone")

# %% [markdown]
# ## 6. Measure it
#
# ### One trace, three timelines


# %%
def merged(cells):
    """Neighbouring cells of the same slot, request and kind as one bar."""
    bars = {}
    for c in cells:
        key = (c.slot, c.request, c.kind)
        begin = bars[key][0] if key in bars else c.begin
        bars[key] = (begin, c.end)
    return [(slot, *span, request, kind) for (slot, request, kind), span in bars.items()]


figure, axes = plots.figure(3, 1, width=7.4, height=5.0)
end = max(c.end for r in results.values() for c in r.cells)
for ax, (policy, result) in zip(axes, results.items()):
    draw_slots(ax, merged(result.cells), SLOTS, f"{policy}: done at {max(c.end for c in result.cells):.2f} s")
    ax.plot([a.time for a in trace], [-0.62] * len(trace), "v", color=plots.MEANING["ceiling"], clip_on=False)
    ax.set_xlim(-0.01, end * 1.02)
    plots.unit_axis(ax.xaxis, "s", "")
axes[-1].set_xlabel("simulated time")
handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in SHADES.values()]
figure.legend(handles, ["prefill", "decode", "done, still computed"], loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# *Slots by time. Red marks: arrivals. Padding inside a prefill is part of its green bar.*

# %%
print("policy       steps  waste  tokens/s   TTFT P50    P90    ITL P50    P99")
for policy, result in results.items():
    s = result.summary
    steps = len({c.begin for c in result.cells})
    ttft, itl = s.ttft.percentiles, s.itl.percentiles
    print(
        f"{policy:11s} {steps:6d} {result.padding_waste:6.0%} {s.output_throughput:9.0f} "
        f"{ttft[50]:8.2f} s {ttft[90]:4.2f} s {itl[50] * 1e3:6.1f} ms {itl[99] * 1e3:4.1f} ms"
    )
static, dynamic, continuous = (results[p] for p in POLICIES)
reveal("04.static_waste", static.padding_waste)
reveal("04.static_steps", len({c.begin for c in static.cells}))
reveal("04.speedup", continuous.summary.output_throughput / static.summary.output_throughput)
assert abs(static.padding_waste - (1 - asked / computed)) < 1e-9
assert continuous.padding_waste == 0

# %% [markdown]
# The waste is exact. The speed-up is less than the bound: requests arrive over time, and at the end the slots run
# empty one by one. And dynamic loses to static here, on both counts: its window closes on the first three requests,
# the fourth and all behind it wait for their longest answer of 38 tokens, and the steps add up to more. A window pays
# while requests come slowly; under load it makes batches that are not full. Now the whole distributions: TTFT, and
# the gap between two tokens of a request, inter-token latency (ITL, 词元间延迟).

# %%
_, axes = plots.figure(1, 2, width=7.4, height=2.9)
for policy, color in zip(POLICIES, (plots.MEANING["naive"], plots.ORANGE, plots.MEANING["technique"])):
    times = results[policy].times
    for ax, values in zip(axes, ([t.ttft for t in times], [gap for t in times for gap in t.itl])):
        ax.step([*sorted(values), max(values)], [*np.linspace(0, 1, len(values)), 1.0], color=color, label=policy)
for ax, label in zip(axes, ("time to first token", "inter-token latency")):
    plots.unit_axis(ax.xaxis, "s", label)
    ax.set_ylabel("share of values below")
    ax.xaxis.set_major_locator(plt.MaxNLocator(4))
axes[0].set_xlim(left=0)
axes[0].legend(loc="lower right")
plt.show()

# %% [markdown]
# *Left: continuous batching wins TTFT, because nobody waits for a stranger's longest answer. Right: it loses a
# little of the ITL tail: when a prompt joins, the step is longer for all who decode. In a closed batch nobody ever
# joins.*
#
# ### The real clock
#
# Fit the same two numbers on this machine, pace the arrivals to it, predict the throughput with the fitted clock,
# then run for real, the policies in alternation.

# %% tags=["nbval-ignore-output"]
slope, floor = np.polyfit(sizes[:4], step_times[:4], 1)
slope = max(slope, 0.0)


def fitted(tokens):
    return floor + slope * tokens


paced = [replace(a, time=a.time * fitted(SLOTS) / COST(SLOTS)) for a in trace]
options = dict(size=SLOTS, window=WINDOW * fitted(SLOTS) / COST(SLOTS))
speed = {policy: [] for policy in POLICIES}
first = {policy: [] for policy in POLICIES}
for _ in range(pick(5, 1)):
    for policy in POLICIES:
        run = run_trace(model, paced, policy, **options)
        assert run.outputs == alone
        speed[policy].append(run.summary.output_throughput)
        first[policy].append(run.summary.ttft.percentiles[50])
print(f"this machine: a step takes {floor * 1e3:.2f} ms + {slope * 1e3:.3f} ms a token")
for name, table, over in (("throughput", speed, False), ("TTFT P50", first, True)):
    ratio = clock.Timing(tuple(s / c if over else c / s for s, c in zip(table["static"], table["continuous"])))
    print(f"{name}: {'static / continuous' if over else 'continuous / static'} {ratio}")
plots.beside(
    [
        dict(
            name=policy,
            here=float(np.median(speed[policy])),
            recorded=recorded(f"tiny.batching.{policy}.tokens_per_s"),
            prediction=run_trace(model, paced, policy, cost=fitted, **options).summary.output_throughput,
            ceiling=SLOTS / fitted(SLOTS),
        )
        for policy in POLICIES
    ],
    "tokens/s",
    "Output tokens per second, 12 requests in 4 slots (tiny)",
)
plt.show()

# %% [markdown]
# *Orange: the fitted clock. Red: four tokens every step, no prompt, no empty slot.* The clock was fitted on decode
# steps of a bare loop, so it can be wrong in two directions. A prompt's tokens are cheaper than decodes, which read
# keys of their own each: that favours who computes most of them, padding included. And a step of the engine costs
# more than its tokens, since on a small model its bookkeeping (plans, sampling) is no longer small beside the
# forward; a larger model hides that.
#
# **What papers report.** Quoted, not measured here; each depends on its baseline, model and answer lengths:
#
# | claim | source |
# |---|---|
# | 36.9 x FasterTransformer's throughput at the same latency, GPT-3 175B | Yu et al. 2022, Orca (OSDI), abstract |
# | 23 x static batching, with vLLM: paging (05) and kernels are in it | Anyscale 2023, on continuous batching |
#
# Ours are the two ratios printed above, for four slots. With enough requests waiting and steps of equal time the
# bound is the prediction of section 2, `slots x (longest answer of each batch, summed) / all answer tokens`: the
# spread of the answer lengths decides, not the engine.
#
# ### Do tokens change with the batch?
#
# In float32, above: no. In bf16 they can. A number in bf16 has 8 significant bits, and addition in limited precision
# depends on its order. A matrix kernel is free to choose its order by the shape of the call, and the shape holds the
# batch size. One dot product, three orders:

# %%
generator = torch.Generator().manual_seed(0)
a, b = torch.randn(2, 192, generator=generator).bfloat16()


def summed(parts):
    """The dot product in `parts` pieces, each rounded to bf16, and so is their running sum."""
    total = torch.zeros((), dtype=torch.bfloat16)
    for x, y in zip(a.chunk(parts), b.chunk(parts)):
        total = total + (x.double() @ y.double()).bfloat16()
    return total.item()


print("bf16, split into 1, 4, 8 pieces:", [summed(n) for n in (1, 4, 8)], f"  exact {(a.double() @ b.double()):.6f}")
assert len({summed(n) for n in (1, 4, 8)}) > 1

# %% [markdown]
# Now the whole model. First with this machine's own kernels. Then with a linear layer that splits its sum the more,
# the fewer rows it has, as GPU kernels do ("split-K": with few rows, pieces of the sum are spread over idle cores).


# %% tags=["nbval-ignore-output"]
class SplitK(torch.nn.Module):
    """x @ W.T in 8 pieces for one row, 4 for a few, 1 from 8 rows on."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        rows = x.shape[:-1].numel()
        parts = 8 if rows == 1 else 4 if rows < 8 else 1
        return sum(p @ w.T for p, w in zip(x.chunk(parts, -1), self.weight.chunk(parts, 1)))


def generate_rows(model, prompts, steps):
    """(tokens [batch][steps], logits [batch, steps, vocab]) of prompts of equal length, as one batch."""
    cache = ContiguousCache(model.config, len(prompts), len(prompts[0]) + steps, model.dtype, device)
    logits = [prefill(model, torch.tensor(prompts, device=device), cache)]
    while len(logits) < steps:
        logits.append(decode(model, logits[-1].argmax(-1), cache))
    logits = torch.stack(logits, 1).float()
    return logits.argmax(-1).tolist(), logits


prompts, steps = [words[400 * i : 400 * i + 16] for i in range(8)], pick(48, 24)
for dtype, kernel in (("float32", "split-K"), ("bfloat16", "own"), ("bfloat16", "split-K")):
    other = load_model("tiny", dtype=dtype)
    if kernel == "split-K":
        replace_linears(other, lambda name, linear: SplitK(linear))
    together, wide = generate_rows(other, prompts, steps)
    single = [generate_rows(other, [p], steps) for p in prompts]
    narrow = torch.cat([logits for _, logits in single])  # [8, steps, vocab]
    flips = sum(t[0] != b for (t, _), b in zip(single, together))
    best = narrow.topk(2).values
    lead, gap = best[..., 0] - best[..., 1], (narrow - wide)[:, :2].abs().max().item()
    print(
        f"{dtype:8s} {kernel:7s} batch 1 against 8: {flips} of 8 answers change; logits differ by up "
        f"to {gap:.1e}; smallest lead of a token {lead.min():.1e}, exact ties {(lead == 0).sum()}"
    )
assert gap > 0  # the last line, bf16 and split-K: the rounding of a row depends on its batch

# %% [markdown]
# Read the three numbers of a line together: **a token can flip where the difference reaches the lead.** In float32
# the difference is far below it. In bf16 logits have steps so coarse that best and second-best may even tie
# exactly. Whether *this* machine's kernels change their order is their business (a line with difference 0 means
# they do not, at these shapes); an engine cannot promise it. One flipped token, and the rest of the answer is
# another text. Neither text is wrong. But "temperature 0 is deterministic" holds only for a fixed batch, or with
# batch-invariant kernels, which cost speed.
#
# That is why the course proves equal tokens in float32.
#
# ## 7. Where it backfires
#
# ### Batch 1
#
# One slot, one request at a time: nobody to share with. Steps and simulated times are the same for all policies, and
# what is left of continuous batching is its bookkeeping. Against the bare loop of chapter 02, paired:

# %% tags=["nbval-ignore-output"]
queue_of_three = [replace(a, time=0.0) for a in trace[:3]]
one = {p: run_trace(model, queue_of_three, p, size=1, cost=COST) for p in ("static", "continuous")}
ends = {p: [t.token_times[-1] for t in r.times] for p, r in one.items()}
assert np.allclose(ends["static"], ends["continuous"])
print(f"simulated, one slot: both finish at {', '.join(f'{t:.2f}' for t in ends['static'])} s")

solo = queue_of_three[1]
pair = clock.paired(
    lambda: run_trace(model, [solo], "continuous", size=1),
    lambda: generate_cached(model, list(solo.prompt), solo.tokens),
    repeats=pick(9, 3),
    warmup=1,
)
print(f"real clock: the engine takes {pair.ratio} x the bare loop's time for one request")

# %% [markdown]
# ### TTFT under a full batch
#
# Continuous batching admits at every step, but only into a free slot. Four long answers hold the four; a fifth
# request, which wants a single token, arrives right behind them.

# %%
long = [Arrival(0.0, tuple(words[50 * i : 50 * i + 8]), 48) for i in range(SLOTS)]
short = Arrival(0.001, tuple(words[500:508]), 1)
full = run_trace(model, [*long, short], "continuous", size=SLOTS, cost=COST).times[-1]
roomy = run_trace(model, [*long, short], "continuous", size=SLOTS + 1, cost=COST).times[-1]
reveal("04.full_batch_ttft", full.ttft)
print(f"queued {full.queue:.2f} s of it. With a fifth slot: TTFT {roomy.ttft:.3f} s")

joiner = Arrival(0.2, tuple(words[:256]), 2)
gaps = run_trace(model, [*long[:3], joiner], "continuous", size=SLOTS, cost=COST).times[0].itl
print(f"a prompt of 256 tokens joins: a neighbour's ITL goes from {min(gaps) * 1e3:.1f} to {max(gaps) * 1e3:.1f} ms")

# %% [markdown]
# More slots, then? They cost KV memory (chapter 05), and each step serves more requests, so ITL grows. And no
# number of slots helps when more arrives than the machine can do. The same trace, arriving faster and faster:

# %%
capacity = SLOTS / COST(SLOTS) / np.mean([a.tokens for a in trace])  # requests a second, all slots always busy
rate = (len(trace) - 1) / (trace[-1].time - trace[0].time)
loads, curves = pick([0.25, 0.5, 1.0, 2.0, 4.0], [0.25, 4.0]), {}
for policy in ("static", "continuous"):
    for load in loads:
        crowd = [replace(a, time=a.time * rate / (load * capacity)) for a in trace]
        curves[policy, load] = run_trace(model, crowd, policy, size=SLOTS, cost=COST).summary
_, axes = plots.figure(1, 2, width=7.4, height=2.8)
for policy, color in (("static", plots.MEANING["naive"]), ("continuous", plots.MEANING["technique"])):
    axes[0].plot(loads, [curves[policy, x].ttft.percentiles[90] for x in loads], "o-", color=color, label=policy)
    axes[1].plot(loads, [curves[policy, x].output_throughput for x in loads], "o-", color=color, label=policy)
plots.unit_axis(axes[0].yaxis, "s", "TTFT, P90")
plots.unit_axis(axes[1].yaxis, "tokens/s", "throughput")
for ax in axes:
    ax.set_xscale("log")
    plots.plain_log_ticks(ax.xaxis, loads)
    ax.set_xlabel("load, arrivals / capacity")
    ax.set_ylim(bottom=0)
    ax.legend()
plt.show()
lowest, highest = curves["continuous", loads[0]], curves["continuous", loads[-1]]
assert highest.ttft.percentiles[90] > 3 * lowest.ttft.percentiles[90]

# %% [markdown]
# *Simulated clock. Load 1: as many tokens asked for per second as four busy slots can give. Static has a long TTFT
# even at low load: it waits for its batch to fill. Continuous answers at once, until the slots are full; from there
# on TTFT is queueing.* So high throughput and high TTFT come together: report both, at a stated load. Chapter 28
# turns requests away in time.
#
# ## 8. Play
#
# All requests are waiting, 24 of them. How much do the slots waste, by the spread of the answer lengths?


# %% tags=["nbval-ignore-output"]
def draw(ax, spread, slots):
    rng = np.random.default_rng(0)
    requests = [(0, max(1, round(10 * np.exp(spread * x - spread**2 / 2)))) for x in rng.standard_normal(24)]
    closed, open_ = plan(requests, slots, window=0), plan(requests, slots)
    ends = [max(c[2] for c in cells) for cells in (closed, open_)]
    useful = sum(n for _, n in requests) / slots
    ax.barh([0, 1], [useful] * 2, color=SHADES["decode"], label="tokens asked for / slots")
    ax.barh([0, 1], [e - useful for e in ends], left=[useful] * 2, color=SHADES["idle"], label="empty or done rows")
    ax.set_yticks([0, 1], ["static", "continuous"])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set_xlabel("steps")
    ax.set_title(f"continuous needs {ends[0] / ends[1]:.2f} x fewer steps")
    if ax is ax.figure.axes[0]:
        ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)


explore(
    draw,
    spread=(0.0, 1.5, 0.1, 0.8),
    slots=(1, 12, 1, 4),
    static=[dict(spread=0.0), dict(spread=0.8), dict(slots=1)],
    height=2.5,
)

# %% [markdown]
# *Equal answers, or one slot: nothing to win. With spread, static pays for the longest of each batch.*
#
# ## 9. Say it
#
# **"What is continuous batching?"**
# - *20 seconds.* The batch is chosen anew at every step: who is done leaves at once, who waits takes the slot. A
#   static batch runs until its longest answer is done.
# - *2 minutes.* Decode reads all weights per step, so rows share them: section 1's plot. Static pads prompts and
#   keeps finished rows (the rectangle). Iteration-level scheduling removes both (section 3's three timelines). It
#   needs a length, a position and a mask per row, linears over packed tokens, attention per request (sections 4 and
#   5). Tokens are equal to running alone (section 5).
# - *Follow-up: and dynamic batching?* It fixes when a batch starts (window, size), not when it ends.
# - *The number:* waste = 1 - sum(prompt + answer - 1) / (B x (longest prompt + longest answer - 1)).
#
# **"What does it cost?"**
# - *20 seconds.* TTFT is queueing once the slots are full, a joining prompt stretches everybody's ITL, and at batch
#   1 it is overhead only.
# - *2 minutes.* Section 7: the fifth request waits for a slot; TTFT against load; the gap when 256 tokens join.
#   Slots cost KV memory. Remedies: chunked prefill (06), paging (05), admission (28).
# - *Follow-up: throughput doubled, users complain. Why?* P90 TTFT at that load: section 7's left plot.
# - *Follow-up: does a larger batch always give more tokens per second?* No. Rows share the weights, but nobody shares
#   the K and V that each row reads, so these grow with the batch. And beyond the ridge of the roofline (chapter 00)
#   arithmetic is the limit: an H100 does some 295 FLOPs in the time it reads a byte (989 TFLOP/s, 3.35 TB/s), so in
#   16 bits about 295 rows, if there were only weights.
# - *The number:* TTFT of a full batch = steps until the first slot is free x step time + own prefill.
#
# **"Papers say 23 x or 36.9 x. Will I get that?"**
# - *20 seconds.* Those are peaks over a weak baseline. The gain is bounded by what the baseline idles: no spread in
#   answer lengths, no gain.
# - *2 minutes.* Derive the bound (section 2), move the slider (section 8), compare with section 6's ratio. Then name
#   what else is in the quoted figures: more requests in memory, better kernels.
# - *Follow-up: how would you measure it?* One trace, open-loop arrivals, both policies, same kernels; TTFT and ITL
#   beside throughput.
# - *The number:* speed-up <= slots x (longest answer of each batch, summed) / all answer tokens.
#
# **"Temperature 0, same prompt, another answer. Bug?"**
# - *20 seconds.* Probably not: another batch size, another order of additions, another rounding; in bf16 a near-tie
#   flips.
# - *2 minutes.* Section 6: one dot product in three orders; difference against lead; the split-K layer. Then how to
#   tell it from a bug: repeat in float32, or with a fixed batch. If it still differs, look for state of another row.
# - *Follow-up: can one forbid it?* Batch-invariant kernels, at a price in speed.
# - *The number:* 8 significant bits: steps of 1/16 for logits between 8 and 16.
#
# ## 10. Predictions, exercise, papers, next

# %% tags=["nbval-ignore-output"]
predictions()

# %% [markdown]
# **Exercise:** `exercises/04_batching.ipynb`: left padding, the waste by formula, a dynamic batcher, the
# iteration-level loop, and two faults that engines had: a greedy row beside sampled ones, and answers that begin
# with somebody else's words.
#
# **Papers:** Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models* (OSDI
# 2022), for iteration-level scheduling and selective batching; Kwon et al. 2023 (arXiv:2309.06180), for the memory
# it needs.
#
# **Next:** chapter 05. Each slot here reserved room for the longest answer. Paging claims it as tokens arrive.
