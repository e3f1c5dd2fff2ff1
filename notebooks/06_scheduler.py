# %% [markdown]
# # 06 The scheduler
#
# **Before every forward, hand out a budget of tokens: one to each running request, what is left to the prompts, and
# blocks to all of them.**
#
# > *The interviewer asks:* "A 30,000-token prompt arrives while fifty users are reading their answers. What do they
# > see, what does chunked prefill change, and what happens when the KV memory runs out?"
#
# You will be able to
# - draw the inter-token latency of running requests when a long prompt arrives, chunked and not, and predict both;
# - write a scheduler with two queues, a token budget and preemption in 40 lines, and show what each rule is for;
# - say when to swap a victim and when to recompute it, and why nobody waits for ever.
#
# 35 minutes to read. `tiny` ships with the course; where `smollm2-135m` is present the first figure runs it, and says
# so.

# %%
import inspect
import itertools
import random
import time
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import torch

from minillm import SamplingParams, load_model, load_tokenizer
from minillm.cache.block_pool import BlockPool, blocks_for
from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import prefill
from minillm.cache.paged import PagedCache
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.errors import PromptError
from minillm.lab import explore, is_fast, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import clock
from minillm.measure.counts import kv_bytes_per_token
from minillm.model.generate import generate_naive
from minillm.model.hub import ASSETS, is_available
from minillm.model.layout import pack_linears
from minillm.model.shapes import known_shape

tiny = pack_linears(load_model("tiny", dtype="float32"))
config, device = tiny.config, tiny.device
text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
words = load_tokenizer("tiny").encode(text[:20_000])
print(f"model: tiny, on {device}, {torch.get_num_threads()} CPU threads; context {config.max_length} tokens")

# %% [markdown]
# ## 1. The waste, measured
#
# Six streams are being answered, one token each a step. Then a long prompt arrives. The engine of chapters 04 and 05
# computes a prompt in one forward; here the streams' tokens are in that forward too, so nobody is left out, and still
# everybody waits for it. What a reader of a stream feels is the gap between two tokens: ITL, inter-token latency
# (词元间延迟). What the newcomer feels is TTFT, time to first token (首词元延迟).


# %%
@dataclass
class Served:
    """Seconds, counted from the arrival of the long prompt."""

    gaps: list  # (when it ended, the gap) of every two neighbouring tokens of a stream, before the arrival as well
    ttft: float  # of the newcomer
    steps: list  # (seconds, tokens) of every forward from then on
    chunks: list  # prompt tokens of the newcomer, forward by forward

    @property
    def worst(self):
        return max(gap for end, gap in self.gaps if end > 0)


def ask(new):
    return SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)


def serve(model, streams, late, budget, chunked=True, new=20, **options):
    """`streams` have six tokens each when the prompt `late` arrives; they go on until they have `new`."""
    options = {"max_num_seqs": len(streams) + 1, "num_blocks": 192, "keep_log": True, **options}
    whole = max(budget, model.config.max_length)
    options |= {"max_num_batched_tokens": budget if chunked else whole, "enable_chunked_prefill": chunked}
    engine = Engine(model, EngineOptions(**options), eos_ids=())
    running = [engine.add(prompt, ask(new)).requests[0] for prompt in streams]
    while min(len(request.output) for request in running) < 6:
        engine.step()
    before, start = len(engine.scheduler.log), time.perf_counter()
    newcomer, seconds = engine.add(late, ask(4), arrival=start).requests[0], [start]
    while engine.has_work:
        engine.step()
        seconds.append(time.perf_counter())
    log = engine.scheduler.log[before:]
    gaps = [
        (end - start, end - begin)
        for request in running
        for begin, end in itertools.pairwise(request.answer.token_times)
    ]
    steps = [(took, step.tokens) for took, step in zip(np.diff(seconds), log)]
    chunks = [n for step in log for name, _, n, kind in step.entries if name == newcomer.id and kind == "prefill"]
    return Served(gaps, newcomer.answer.token_times[0] - start, steps, chunks)


real = is_available("smollm2-135m") and not is_fast()
name = "smollm2-135m" if real else "tiny"
model = pack_linears(load_model(name, dtype="float32")) if real else tiny
ids = load_tokenizer(name).encode(text[:20_000])
R, P = 6, pick(512 if real else 440, 320)  # streams, tokens of the long prompt
streams, late = [ids[40 * i : 40 * i + 16] for i in range(R)], ids[1000 : 1000 + P]
print(f"model: {name}; {R} streams, then a prompt of {P} tokens")

# %% tags=["nbval-ignore-output"]
serve(model, streams, late[:32], 64, new=8)  # warm-up
whole = serve(model, streams, late, P + R, chunked=False)


def draw_gaps(ax, served, color, label):
    ends, gaps = zip(*served.gaps)
    ax.plot(ends, gaps, "o", color=color, ms=4, alpha=0.7, label=label)
    ax.axvline(served.ttft, color=color, ls=":", lw=1.4)
    ax.set_xlabel("seconds since the long prompt arrived (dotted: its first token)")
    plots.unit_axis(ax.yaxis, "s", "gap between two tokens")
    ax.set_ylim(0, None)


_, ax = plots.figure(height=2.8)
draw_gaps(ax, whole, plots.MEANING["naive"], "prompt computed in one forward")
ax.set_title(f"Six streams when a prompt of {P} tokens arrives ({name})")
ax.legend()
plt.show()
usual = np.median([s for s, n in whole.steps if n == R])
print(f"a decode step takes {units.show(usual, 's')}; the step with the prompt {whole.worst / usual:.1f} x as long")

# %% [markdown]
# *Every dot is one token of one stream. Six of them hang, on one spot, above all others: in that step each stream
# waited for the newcomer's whole prompt.* The median gap does not show it; the worst one is what a user remembers,
# and it grows with the longest prompt that anybody sends. This is head-of-line blocking (队头阻塞) by a stranger.

# %% [markdown]
# ## 2. Predict
#
# Give each step a **token budget** (词元预算) of B. R streams take R of it, so a prompt of P tokens advances by B - R
# a step: chunked prefill (分块预填充). With step time = a + b x tokens, where a and b come from two points of the
# figure above (the decode step, R tokens; the tall one, P + R):
#
# - *steps to prefill:* n = ceil(P / (B - R));
# - *worst gap:* a + b B, whatever P is;
# - *TTFT:* n steps, that is n a + b (P + n R): later than in one forward, by (n - 1)(a + b R).
#
# (b is the price of a token with a short past. A token also attends to all before it; what that adds to a prompt of
# 30,000 tokens is counted in section 7.)
#
# And two that need no clock:
# - *a swapped victim:* L tokens in blocks of S are moved out and back, so 2 x ceil(L / S) x S x bytes a token;
# - *the wait of a request of priority p* among urgent ones (priority 0) that never stop coming, when one level is
#   worth g steps of waiting: p g steps.

# %% tags=["nbval-ignore-output"]
B = pick(128 if real else 64, 64)
tall = next(s for s, n in whole.steps if n >= P)
b = max(tall - usual, 1e-9) / P  # s a token
a = max(usual - b * R, 0.0)  # s a step
n = blocks_for(P, B - R)  # the same rounding up
print(f"a = {units.show(a, 's')} a step, b = {units.show(b, 's')} a token")
predict("06.steps", n, "steps")
predict("06.worst_gap", a + b * B, "s")
predict("06.ttft", n * a + b * (P + n * R), "s")
predict("06.swap_bytes", 2 * blocks_for(200, 16) * 16 * kv_bytes_per_token(config, 4), "B")
predict("06.wait", 3 * 8, "steps")

# %% [markdown]
# ## 3. The idea, drawn

# %%
BLUE, GREEN, RED = plots.MEANING["decode"], plots.MEANING["prefill"], plots.MEANING["ceiling"]


def draw_steps(ax, decodes, prompt, budget, steps, title):
    """A column a step, a square a token."""
    left = prompt
    for step in range(steps):
        chunk = 0 if step < 2 else min(left, budget - decodes)
        left -= chunk
        for i in range(decodes + chunk):
            color = BLUE if i < decodes else GREEN
            ax.add_patch(plt.Rectangle((step, i), 0.86, 1, facecolor=color, edgecolor="white", lw=0.8))
    ax.axhline(budget, color=RED, lw=1.2, ls="--")
    ax.set(xlim=(-0.3, steps), ylim=(0, 22), xlabel="step", ylabel="tokens in the forward", title=title)
    ax.set_xticks(np.arange(steps) + 0.43, range(1, steps + 1))
    ax.set_yticks(range(0, 21, 4))
    ax.grid(False)


figure, axes = plots.figure(1, 2, width=7.2, height=3.0)
draw_steps(axes[0], 3, 17, 20, 9, "one forward a prompt")
draw_steps(axes[1], 3, 17, 8, 9, "budget 8: chunks ride along")
kinds = {"decode: one token of a stream": BLUE, "prefill: the new prompt's tokens": GREEN}
handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in kinds.values()] + [plt.Line2D([], [], color=RED, ls="--")]
figure.legend(handles, [*kinds, "largest step"], loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# *Three streams; a prompt of 17 tokens arrives before step 3. The height of a column is the time of that step, and so
# the gap that all three streams see. The green area is the same left and right.* A decode step reads all weights for
# three tokens; the green ones ride in the same forward and share that reading. Sarathi-Serve calls it stall-free
# batching, DeepSpeed-FastGen SplitFuse.
#
# Two queues and one way back:


# %%
def box(ax, x, y, label, color):
    ax.add_patch(plt.Rectangle((x, y), 2.4, 0.8, facecolor=color, edgecolor="black", lw=0.8))
    ax.text(x + 1.2, y + 0.4, label, ha="center", va="center", fontsize=8)


def arrow(ax, start, end, label, at):
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "lw": 1.2})
    ax.text(*at, label, ha="center", va="center", fontsize=7.5)


_, ax = plots.figure(width=7.2, height=2.3)
box(ax, 0, 1.6, "waiting\nno blocks", "#E8E8E8")
box(ax, 4.6, 1.6, "running\nowns blocks", "#CFE3F2")
box(ax, 9.2, 1.6, "finished\nblocks are free", "#D9EFE6")
box(ax, 4.6, 0, "preempted\ntokens kept, KV gone", "#F6DDCF")
arrow(ax, (2.4, 2.0), (4.6, 2.0), "a slot, budget and\nblocks are free", (3.5, 2.55))
arrow(ax, (7.0, 2.0), (9.2, 2.0), "end of text, limit,\nabort", (8.1, 2.55))
arrow(ax, (5.8, 1.6), (5.8, 0.8), "no block for a more urgent one", (8.0, 1.2))
arrow(ax, (4.6, 0.4), (1.2, 1.6), "back to its old\nplace in the queue", (1.6, 0.55))
ax.set(xlim=(-0.1, 11.8), ylim=(-0.1, 2.9))
ax.axis("off")
plt.show()

# %% [markdown]
# *A preempted (被抢占) request keeps its tokens, those that it has said included. What it loses is their KV: dropped
# and computed again (recompute, 重算), or moved to host memory and back (swap, 换出).*

# %% [markdown]
# ## 4. Build it
#
# No tensor is needed to decide who runs. A request is four numbers: tokens it has, tokens it ends with, tokens whose
# KV is computed, blocks it holds.


# %%
@dataclass(eq=False)
class Small:
    name: str
    tokens: int  # prompt and answer so far
    end: int  # tokens when it is done
    computed: int = 0
    blocks: int = 0


class SmallScheduler:
    def __init__(self, budget, slots, blocks, size):
        self.budget, self.slots, self.free, self.size = budget, slots, blocks, size
        self.waiting, self.running = [], []  # both in order of arrival

    def takes_room(self, r, tokens):  # the blocks that so many tokens of r need, if they are free
        new = max(0, -(-tokens // self.size) - r.blocks)
        if new > self.free:
            return False
        self.free, r.blocks = self.free - new, r.blocks + new
        return True

    def step(self):
        plan, left, victims = {}, self.budget, []
        for r in sorted(self.running, key=lambda r: r.tokens - r.computed > 1):  # decodes first, then chunks
            n = min(r.tokens - r.computed, left)
            while n and r in self.running:
                if self.takes_room(r, r.computed + n):
                    plan[r], left = n, left - n
                    break
                victims.append(self.running.pop())  # the last that came; it may be r itself
                left += plan.pop(victims[-1], 0)
                self.release(victims[-1])
                self.waiting.insert(0, victims[-1])
        while self.waiting and left and not victims and len(self.running) < self.slots:
            if not self.takes_room(self.waiting[0], self.waiting[0].tokens):
                break  # nobody overtakes the head of the queue
            self.running.append(r := self.waiting.pop(0))
            plan[r] = min(r.tokens, left)
            left -= plan[r]
        return plan, victims

    def update(self, plan):
        for r, n in plan.items():
            r.computed += n
            if r.computed == r.tokens:  # the last chunk, or a decode: one token is sampled
                r.tokens += 1
                if r.tokens == r.end:
                    self.running.remove(r)
                    self.release(r)

    def release(self, r):
        self.free, r.blocks, r.computed = self.free + r.blocks, 0, 0


methods = [m for m in vars(SmallScheduler).values() if inspect.isfunction(m)]
print(f"{1 + sum(len(inspect.getsource(m).splitlines()) for m in methods)} lines of scheduler")

# %% [markdown]
# `update` stands for the forward. Run it on a trace with too little memory, and draw the **iteration log**
# (迭代日志).


# %%
def run_small(arrivals, budget, slots, blocks, size):
    """arrivals: (step, name, prompt, new). Returns [(entries, victims)]; entry: (name, first token, count, kind)."""
    scheduler, log, todo = SmallScheduler(budget, slots, blocks, size), [], sorted(arrivals)
    while todo or scheduler.waiting or scheduler.running:
        while todo and todo[0][0] <= len(log):
            _, name, prompt, new = todo.pop(0)
            scheduler.waiting.append(Small(name, prompt, prompt + new))
        plan, victims = scheduler.step()
        kinds = {r: "decode" if r.computed and r.tokens - r.computed == 1 else "prefill" for r in plan}
        entries = [(r.name, r.computed, n, kinds[r]) for r, n in plan.items()]
        log.append((entries, [r.name for r in victims]))
        scheduler.update(plan)
    return log


def draw_log(ax, log, arrivals, title=""):
    """A row a request, a column a step; the number of prompt tokens in a chunk; x: preempted."""
    names = [name for _, name, *_ in arrivals]
    came = {name: step for step, name, *_ in arrivals}
    ends = {name: x for x, (entries, _) in enumerate(log) for name, *_ in entries}
    for y, who in enumerate(names):
        ax.barh(y, ends[who] + 1 - came[who], left=came[who], height=0.8, color=plots.MEANING["waiting"])
    for x, (entries, victims) in enumerate(log):
        for who, _, count, kind in entries:
            y = names.index(who)
            ax.barh(y, 0.92, left=x, height=0.8, color=plots.MEANING[kind])
            if kind == "prefill":
                ax.text(x + 0.46, y, str(count), ha="center", va="center", fontsize=6.5, color="white")
        for who in victims:
            ax.text(x + 0.46, names.index(who), "x", ha="center", va="center", color=RED, fontsize=11, weight="bold")
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="step", title=title, xlim=(0, len(log)))
    ax.invert_yaxis()
    ax.grid(False)


ARRIVALS = [(0, "A", 6, 14), (0, "B", 9, 14), (4, "C", 14, 4), (5, "D", 4, 6)]
POOL = dict(budget=8, slots=4, blocks=9, size=4)
log = run_small(ARRIVALS, **POOL)
_, ax = plots.figure(width=7.2, height=2.4)
draw_log(ax, log, ARRIVALS, "Budget 8 tokens a step, 9 blocks of 4")
plt.show()
print("tokens a step:", [sum(n for _, _, n, _ in entries) for entries, _ in log])

# %% [markdown]
# *Green: prompt tokens, their number written in; blue: one decode token; grey: waiting; x: preempted. No step is
# larger than 8. C waits although slots are free: its blocks are not. D, small and behind it, is not let past. In
# step 11 A needs a block, and B, the last that came, loses its own; in step 18 C loses its own to B.* B comes back
# with green cells that cover its prompt **and** the words it had said: its tokens were never lost, only their KV.


# %% [markdown]
# ## 5. The library's version

# %%
print(inspect.getsource(Scheduler.schedule))
print(inspect.getsource(Scheduler._continue))

# %% [markdown]
# | it adds | because |
# |---|---|
# | `refuse_if_hopeless` when a request is added | one that could not run even alone blocks all behind it for ever |
# | the queue is a heap by (urgency, arrival) | a step costs what runs, not what waits: ten thousand may queue |
# | `policy="priority"` with `ageing` | urgent first, and nobody starves (饥饿) |
# | `_make_way` | an urgent request that waits takes the place of less urgent ones that run |
# | `headroom` blocks kept free at admission | a request admitted into the last block is preempted a step later |
# | `preemption="swap"`, `victim=` | another price for the same room; another choice of who pays |
# | `prefill_first` | prompts before decodes: a shorter TTFT, and gaps for those who stream (the policy table below) |
# | tokens that a draft proposes (chapter 16) | they need budget and room like any others |
# | real block tables, shared by counting | prefix hits and `n > 1` share blocks; a shared block is not free yet |
# | a `Batch` of plans and block copies | it is data: the runner computes it, a test checks it, a figure draws it |
#
# **Same plan, proved.** With first come first served and no headroom both must plan the same steps, entry by entry,
# on random traces with random pools.


# %%
def next_token(tokens):
    """Stands for a model: depends on all tokens and on their order."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + len(tokens)) % 97


def drive(arrivals, priorities=None, **options):
    """The library's scheduler without a model. Returns (scheduler, requests by name, names that were refused)."""
    options = {"block_size": 4, "headroom": 0, "keep_log": True, **options}
    options["num_host_blocks"] = options["num_blocks"] if options.get("preemption") == "swap" else 0
    options = EngineOptions(**options)
    host = BlockPool(options.num_host_blocks, options.block_size) if options.num_host_blocks else None
    scheduler = Scheduler(options, BlockPool(options.num_blocks, options.block_size), host)
    requests, refused, todo = {}, [], sorted(arrivals)
    while todo or scheduler.has_work:
        while todo and todo[0][0] <= scheduler.steps:
            _, name, prompt, new = todo.pop(0)
            request = Request(name, [(7 * i + len(name)) % 97 for i in range(prompt)], new)
            request.priority = (priorities or {}).get(name, 0)
            try:
                scheduler.add(request)
                requests[name] = request
            except PromptError:
                refused.append(name)
        batch = scheduler.schedule()
        scheduler.update(batch, {r: next_token(r.tokens) for r in batch.sampling})
        scheduler.finish([r for r in batch.sampling if len(r.output) == r.limit])
    assert scheduler.pool.free_count == scheduler.pool.num_blocks, "a block was lost"
    return scheduler, requests, refused


def plain(log):
    return [(step.entries, [name for name, _ in step.preempted]) for step in log]


rng, same, preempted = random.Random(6), 0, 0
for _ in range(pick(200, 60)):
    trace = [(rng.randint(0, 9), f"{i:02d}", rng.randint(1, 30), rng.randint(1, 12)) for i in range(8)]
    least = max(blocks_for(p + n - 1, 4) for _, _, p, n in trace)
    size = dict(budget=rng.randint(5, 40), slots=5, blocks=rng.randint(least, 2 * least), size=4)
    small = run_small(trace, **size)
    library, *_ = drive(trace, num_blocks=size["blocks"], max_num_batched_tokens=size["budget"], max_num_seqs=5)
    assert small == plain(library.log)
    same, preempted = same + len(small), preempted + sum(len(v) for _, v in small)
print(f"{same} steps planned alike; {preempted} preemptions among them")

# %% [markdown]
# **Same tokens, proved.** A policy may move work about, but not change what is said. Five requests, greedy (贪心), on
# the real `tiny`, under ten policies, against the naive loop. The counts show that the policies did differ.

# %%
sizes = [8, 20, 12, 16, 28]
prompts, new = [words[90 * i : 90 * i + size] for i, size in enumerate(sizes)], pick(24, 14)
expected = [generate_naive(tiny, prompt, new) for prompt in prompts]
tight = dict(num_blocks=blocks_for(max(sizes) + new, 4) + 4, headroom=0)
POLICIES = {
    "whole prompts": dict(max_num_batched_tokens=512, enable_chunked_prefill=False),
    "whole prompts first": dict(max_num_batched_tokens=512, enable_chunked_prefill=False, prefill_first=True),
    "chunks, budget 32": dict(max_num_batched_tokens=32),
    "chunks, budget 5": dict(max_num_batched_tokens=5),
    "chunks first, budget 16": dict(max_num_batched_tokens=16, prefill_first=True),
    "priority": dict(max_num_batched_tokens=32, policy="priority", ageing=4, max_num_seqs=2),
    "tight, recompute": dict(max_num_batched_tokens=32, **tight),
    "tight, swap": dict(max_num_batched_tokens=32, preemption="swap", **tight),
    "tight, swap, 6 host blocks": dict(max_num_batched_tokens=32, preemption="swap", num_host_blocks=6, **tight),
    "tight, fewest tokens": dict(max_num_batched_tokens=32, victim="fewest_tokens", **tight),
}
print(f"{'policy':28s} forwards  tokens computed  largest step  recomputed  swapped")
for policy, options in POLICIES.items():
    base = {"block_size": 4, "num_blocks": 128, "max_num_seqs": 5, "keep_log": True}
    engine = Engine(tiny, EngineOptions(**{**base, **options}), eos_ids=())
    groups = [engine.add(prompt, ask(new), priority=i % 3) for i, prompt in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    assert [engine.completions(group)[0].token_ids for group in groups] == expected, policy
    log = engine.scheduler.log
    tokens, lost = [step.tokens for step in log], [how for step in log for _, how in step.preempted]
    print(
        f"{policy:28s} {len(log):8d} {sum(tokens):16d} {max(tokens):13d} {lost.count('recompute'):11d} "
        f"{lost.count('swap'):8d}"
    )
    assert bool(lost) == policy.startswith("tight")
print("all equal to the naive loop, token for token")

# %% [markdown]
# Read down "tokens computed": recomputing adds to it, swapping does not (unless the host is full: then it falls
# back to recomputing).
#
# **Paper and product.** The paper on PagedAttention is of 2023. What vLLM's documentation says since (its pages on
# tuning and on V1, read in 2026):
#
# | | paper, and vLLM V0 | vLLM V1 |
# |---|---|---|
# | a step | prompts first, on their own (chunks were an option) | one budget; decodes first, then chunks |
# | a request in it | in its prefill or its decode phase | a number of tokens to compute, as in section 4 |
# | preemption | recompute, or swap for several answers to one prompt | recompute; swapping was taken out |
#
# SGLang mixes chunks with decodes where `enable_mixed_chunk` is set.

# %% [markdown]
# ## 6. Measure it
#
# ### Gaps, with and without chunks
#
# The same arrival as in section 1, now with a budget. Both ways in turn, several times; the table below the figure
# has the median of the paired ratios.

# %% tags=["nbval-ignore-output"]
pairs = []
for _ in range(pick(2 if real else 5, 2)):
    pairs.append((serve(model, streams, late, P + R, chunked=False), serve(model, streams, late, B)))
whole, chunked = pairs[-1]

figure, axes = plots.figure(1, 2, width=7.2, height=3.0)
axes[1].sharex(axes[0])
draw_gaps(axes[0], whole, plots.MEANING["naive"], "")
axes[0].set_title("one forward a prompt")
draw_gaps(axes[1], chunked, plots.MEANING["technique"], "")
axes[1].set_title(f"chunks, budget {B}")
axes[1].axhline(a + b * B, color=plots.MEANING["prediction"], lw=1.6)
top = 1.15 * max(whole.worst, chunked.worst)
for ax in axes:
    ax.set_ylim(0, top)
    ax.set_xlabel("seconds since the prompt arrived")
plt.show()
reveal("06.steps", len(chunked.chunks))
reveal("06.worst_gap", np.median([each.worst for _, each in pairs]))
reveal("06.ttft", np.median([each.ttft for _, each in pairs]))
gap_ratio = float(np.median([one.worst / many.worst for one, many in pairs]))
ttft_ratio = float(np.median([many.ttft / one.ttft for one, many in pairs]))
print(
    f"{name}: worst gap, whole / chunked {gap_ratio:.2f} x; TTFT of the newcomer, chunked / whole {ttft_ratio:.2f} x"
)
assert len(chunked.chunks) == n and max(t for _, t in chunked.steps) <= B

# %% [markdown]
# *The figure to draw in an interview. Left: one tall gap, as high as the prompt is long. Right: a plateau at the
# height of the budget (orange: predicted), as wide as the prefill takes. Dotted: the newcomer's first token.* By the
# formula it comes (n - 1)(a + b R) later; with few, large chunks that is within what a busy machine scatters, and
# section 7 shows where it is not. Chunking does not make anything faster. It takes the newcomer's cost, spreads it,
# and bounds what a stream can feel by something that the operator sets instead of something that a stranger sends.

# %% tags=["nbval-ignore-output"]
plots.beside(
    [
        dict(
            name="worst gap,\nwhole / chunked",
            here=gap_ratio,
            prediction=(a + b * (P + R)) / (a + b * B),
            recorded=recorded("scheduler.worst_gap_ratio"),
        ),
        dict(
            name="TTFT,\nchunked / whole",
            here=ttft_ratio,
            prediction=(n * a + b * (P + n * R)) / (a + b * (P + R)),
            recorded=recorded("scheduler.ttft_ratio"),
        ),
    ],
    "x",
    f"What chunks give the streams, and cost the newcomer ({name})",
)
plt.show()

# %% [markdown]
# *The worst gap is a maximum, so one hiccup of a busy machine moves it; the steps do not depend on the clock at all.*
#
# ### The knob
#
# `tiny`, a prompt of the same kind, budgets from almost nothing to the whole prompt.

# %% tags=["nbval-ignore-output"]
prompt = words[1000 : 1000 + pick(440, 320)]
little = [words[40 * i : 40 * i + 16] for i in range(R)]
budgets = pick([10, 16, 32, 64, 128, 256, len(prompt) + R], [16, 64, len(prompt) + R])
sweep = {size: [] for size in budgets}
for _ in range(pick(3, 1)):
    for size in budgets:  # in turn, so that drift falls on all
        sweep[size].append(serve(tiny, little, prompt, size, new=12 + blocks_for(len(prompt), size - R)))
gap = {size: np.median([one.worst for one in runs]) for size, runs in sweep.items()}
ttft = {size: np.median([one.ttft for one in runs]) for size, runs in sweep.items()}

_, ax = plots.figure(height=3.0)
ax.plot(budgets, [gap[s] for s in budgets], "o-", color=plots.MEANING["technique"], label="worst gap of the streams")
ax.plot(budgets, [ttft[s] for s in budgets], "s-", color=GREEN, label="TTFT of the newcomer")
ax.set(
    xscale="log", yscale="log", xlabel="token budget", title=f"A prompt of {len(prompt)} tokens, {R} streams (tiny)"
)
plots.plain_log_ticks(ax.xaxis, budgets)
plots.unit_axis(ax.yaxis, "s", "time")
ax.legend()
plt.show()

# %% [markdown]
# *From right to left: the gap falls with the budget, until the fixed cost of a step is all that is left of it (a
# worst gap is also the largest of ever more steps, so noise may lift the left end); the TTFT rises with the number of
# steps, up to a token a step at a budget of R + 1.* The corner between them is where to stand. On a GPU it lies near
# the ridge of the roofline (屋顶线, chapter 00): up to there more tokens in a step are almost free.
#
# ### Swap against recompute
#
# What bringing a victim of L tokens back costs. Recompute: a prefill of L tokens. Swap: its blocks to the host and
# back. Real copies, real prefill, timed in turn.

# %% tags=["nbval-ignore-output"]
cache = PagedCache(config, 64, 16, torch.float32, device, host_blocks=64)
cache.k.normal_(), cache.v.normal_()
lengths, back = pick([32, 64, 128, 256, 448], [64, 256]), []


def swap_both_ways(blocks, host):
    cache.swap_out(blocks, host)
    cache.swap_in(host, blocks)


@torch.inference_mode()
def recompute(tokens):
    prefill(tiny, tokens, ContiguousCache(config, 1, tokens.shape[1], device=device))


for length in lengths:
    tokens = torch.tensor([words[:length]], device=device)
    blocks = random.Random(1).sample(range(64), blocks_for(length, 16))
    host = random.Random(2).sample(range(64), len(blocks))
    back.append(
        clock.paired(
            lambda: recompute(tokens),  # noqa: B023
            lambda: swap_both_ways(blocks, host),  # noqa: B023
            repeats=pick(9, 3),
        )
    )
_, ax = plots.figure(height=2.8)
ax.plot(lengths, [p.a.median for p in back], "o-", color=plots.MEANING["naive"], label="recompute: prefill again")
ax.plot(lengths, [p.b.median for p in back], "s-", color=plots.MEANING["technique"], label="swap: out and in")
ax.set(xlabel="tokens of the victim", title="Bringing a victim back (tiny)", xscale="log", yscale="log")
plots.plain_log_ticks(ax.xaxis, lengths)
plots.unit_axis(ax.yaxis, "s", "time")
ax.legend()
plt.show()
print("recompute / swap: " + ", ".join(f"{size} tokens {p.ratio.median:.1f} x" for size, p in zip(lengths, back)))
held = list(range(blocks_for(200, 16)))  # a victim of 200 tokens
moved = 2 * sum(store[:, held].nbytes for store in (cache.k, cache.v))
reveal("06.swap_bytes", moved)

# %% [markdown]
# *On a CPU, "device" and "host" are the same memory, so a swap is a copy and no bus is crossed: this figure flatters
# swapping.* With a GPU the copy crosses PCIe, and the two prices are, a token:
#
# - swap: `2 x KV bytes a token / bus bandwidth`;
# - recompute: `2 x parameters / FLOP/s` of prefill (attention left out).
#
# They do not depend on L, so there is a break-even (盈亏平衡) bandwidth. By arithmetic, no measurement, for a card
# that reaches 150 TFLOP/s in prefill:

# %%
FLOPS = 150e12
print("LLaMA-7B shapes in 16 bits      KV/token     recompute   break-even bus bandwidth")
for kv_heads in (32, 8, 1):
    shape = known_shape("llama-7b").with_changes(num_kv_heads=kv_heads)
    kv = kv_bytes_per_token(shape, 2)
    seconds = 2 * 6.7e9 / FLOPS  # parameters as for 32 KV heads: a little high for the others
    even = 2 * kv / seconds
    columns = f"{units.show(kv, 'B'):>28s} {units.show(seconds, 's'):>13s} {units.show(even, 'B/s'):>17s}"
    print(f"{kv_heads:2d} KV heads {columns}")

# %% [markdown]
# A bus faster than the last column favours swapping; 25 GB/s is what PCIe 4 x16 gives large copies. So by bytes alone
# swapping wins, the more so with few KV heads. What speaks against it in practice:
# - **small pieces.** Blocks lie scattered; layer by layer each is a small copy with a fixed price;
# - **host memory** must be there, pinned; when it is full the engine recomputes anyway;
# - **recompute batches**: its tokens ride in the budget beside decodes, and a prefix cache (chapter 07) may still
#   hold most of them.
#
# ### Nobody waits for ever
#
# One slot. Every step brings `load` urgent requests of one step each; at step 10 comes one of priority 3. Its key is
# `priority x ageing + arrival`: an urgent one that comes later than 3 x ageing steps after it goes behind it.


# %%
def wait_of_the_patient(ageing, load, most):
    urgent = [(step, f"u{step}.{i}", 1, 1) for step in range(most) for i in range(load)]
    options = dict(num_blocks=8, max_num_seqs=1, max_num_batched_tokens=8, policy="priority", ageing=ageing)
    scheduler, *_ = drive([*urgent, (10, "patient", 1, 1)], {"patient": 3}, **options)
    return next(i for i, step in enumerate(scheduler.log) if "patient" in step.admitted) - 10


ageings, most, waits, never = pick([1, 2, 4, 8, 16, 32], [2, 8, 16]), pick(240, 120), {}, {}
for load in (1, 2):
    waits[load] = [wait_of_the_patient(g, load, most) for g in ageings]
    never[load] = wait_of_the_patient(10**9, load, most)
reveal("06.wait", waits[1][ageings.index(8)])
_, ax = plots.figure(height=2.8)
for load, marker, color in ((1, "o", BLUE), (2, "s", plots.ORANGE)):
    ax.plot(ageings, waits[load], marker + "-", color=color, label=f"{load} urgent a step, one served")
    ax.axhline(never[load], color=color, ls="--", label="the same without ageing")
ax.set(xlabel="ageing: steps of waiting worth one level", ylabel="steps waited", title="Priority 3 among priority 0")
ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
plt.show()
assert waits[1] == [3 * g for g in ageings] and waits[2] == [10 + 2 * 3 * g for g in ageings]
assert never == {1: most - 10, 2: 2 * most - 10}

# %% [markdown]
# *With ageing (老化) the wait is bounded: 3 x ageing x load, and what stood in the queue when it came (10 urgent ones
# at load 2, for ten steps had brought two each). Without, it lasts as long as the others keep coming: the dashed
# lines are where this trace ends.* All who wait gain at the same rate, so their order never changes, and a heap can
# keep it without being sorted again.
#
# What if the slots are taken already, by requests that are less urgent? Then the urgent one would wait for the
# longest of their answers. So it takes the place of the least urgent. Two conditions: that one is of a lower level,
# so nobody is pushed out by the one that it pushed out; and it has the larger key, so a request that has waited its
# ageing is safe from those who come later. With `ageing=10`, one of level 2 that came at step 0 has the key 20: it
# gives way to an urgent one of step 19, not to one of step 21. Two slots, long answers of level 2, and at step 4 an
# urgent prompt:


# %%
def first_step(policy):
    long = [(0, "a", 4, 40), (0, "b", 4, 40)]
    options = dict(num_blocks=32, max_num_seqs=2, max_num_batched_tokens=16, policy=policy)
    scheduler, *_ = drive([*long, (4, "urgent", 4, 2)], {"a": 2, "b": 2}, **options)
    started = next(step for step in scheduler.log if "urgent" in step.admitted)
    return started.step, [name for name, _ in started.preempted], len(scheduler.log)


for policy in ("fcfs", "priority"):
    step, victims, steps = first_step(policy)
    print(
        f"{policy:9s} the urgent one starts at step {step:2d}; preempted: {victims or 'nobody'}; {steps} steps in all"
    )
assert first_step("priority")[:2] == (4, ["b"]) and first_step("fcfs")[0] == 40

# %% [markdown]
# One experiment is no proof, so: random traces, four priorities, pools as small as the largest request, both kinds of
# preemption. Everybody finishes, with the tokens of a run alone, and no block is lost (`drive` asserts it).


# %%
def alone(prompt, new):
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


rng, finished, preemptions = random.Random(7), 0, 0
for number in range(pick(200, 60)):
    trace = [(rng.randint(0, 20), f"{i:02d}", rng.randint(1, 30), rng.randint(1, 12)) for i in range(12)]
    scheduler, requests, refused = drive(
        trace,
        {name: rng.randint(0, 3) for _, name, *_ in trace},
        num_blocks=max(blocks_for(p + n - 1, 4) for _, _, p, n in trace),
        max_num_seqs=4,
        max_num_batched_tokens=rng.randint(4, 20),
        policy="priority",
        ageing=rng.randint(1, 20),
        preemption=["recompute", "swap"][number % 2],
        victim=["least_urgent", "fewest_tokens"][number // 2 % 2],
    )
    assert not refused and len(requests) == 12
    assert all(r.finished and r.output == alone(r.prompt, r.limit) for r in requests.values())
    finished, preemptions = finished + 12, preemptions + sum(r.preemptions for r in requests.values())
print(f"{finished} requests finished with their own tokens, through {preemptions} preemptions; none starved")
_, requests, refused = drive([(0, "huge", 60, 5), (0, "fine", 8, 4)], num_blocks=15, max_num_batched_tokens=32)
print(f"refused at once: {refused}; finished: {list(requests)}")

# %% [markdown]
# The last line is the other way to starve. `huge` has a prompt that fits 15 blocks of 4, but no room for its answer.
# Taken in, it would reach the last block, find no victim but itself, and begin again; all behind it would wait. So it
# is refused when it is added.

# %% [markdown]
# ## 7. Where it backfires
#
# **Chunks too small.** Every chunk pays the fixed cost of a step again, reads all weights again, and its attention
# reads the KV of all chunks before it again. From the sweep of section 6, counted and measured:

# %% tags=["nbval-ignore-output"]
largest = budgets[-1]
print("budget   forwards   K and V read by the chunks   TTFT, x the one-forward TTFT   worst gap, x")
for size in budgets:
    chunks = sweep[size][0].chunks
    read = sum(itertools.accumulate(chunks))  # each chunk attends to itself and all before it
    ratios = [float(np.median([x / y for x, y in zip(*both)])) for both in (
        ([s.ttft for s in sweep[size]], [s.ttft for s in sweep[largest]]),
        ([s.worst for s in sweep[size]], [s.worst for s in sweep[largest]]),
    )]  # fmt: skip
    print(f"{size:6d} {len(chunks):10d} {read:20d} tokens {ratios[0]:25.2f} {ratios[1]:19.2f}")

# %% [markdown]
# The third column is P for one forward and about P² / (2 x chunk) for many: small next to the weights until the
# prompt is very long, then not. The last two columns are the trade: the worst gap stops falling once the fixed cost
# is most of a step, while the TTFT goes on rising with the number of steps.
#
# **Prompts too long.** A token attends to all before it, so the last chunks of a long prompt cost more than the
# first, and the streams feel it. FLOPs of one token, by formula: linears `2 x their parameters`, attention `4 x
# hidden size x layers x tokens before it`.

# %%
shape = known_shape("llama-7b")
linears = 2 * (6.7e9 - shape.vocab_size * shape.hidden_size)  # the embedding is a look-up
print("LLaMA-7B      linears   attention   a chunk costs, x the first")
for position in (512, 4096, 30_000, 128_000):
    attending = 4 * shape.hidden_size * shape.num_layers * position
    growth = (linears + attending) / linears
    print(f"token {position:7,d} {linears / 1e9:6.1f} {attending / 1e9:10.1f} GFLOP {growth:17.2f}")

# %% [markdown]
# So `a + b B` bounds the gap for prompts of some thousand tokens. At 30,000 the same chunk takes more than twice as
# long, and an engine that must keep an ITL there makes its chunks smaller as it gets deeper, or prefills elsewhere
# (chapter 30).
#
# **Thrashing (抖动).** Admission that looks only at the blocks a request needs *now*, with many slots and long
# answers: everyone is let in, all grow, and all day long somebody is thrown out to make room for somebody who will
# be thrown out. Twelve requests, prompts of 16, answers of 48; a pool for two and a half of them. By counts:


# %%
def overcommit(slots, headroom, **options):
    trace = [(0, f"{i:02d}", 16, 48) for i in range(12)]
    return drive(trace, num_blocks=40, max_num_batched_tokens=64, max_num_seqs=slots, headroom=headroom, **options)[
        0
    ].log


useful = 12 * (16 + 48 - 1)
slots = [1, 2, 4, 8, 12]
waste = {h: [sum(s.tokens for s in overcommit(k, h)) / useful for k in slots] for h in (0, 1, 6)}
forwards = {h: [len(overcommit(k, h)) for k in slots] for h in (0, 1, 6)}
figure, axes = plots.figure(1, 2, width=7.2, height=2.8)
for (headroom, values), marker in zip(waste.items(), "os^"):
    axes[0].plot(slots, values, marker + "-", label=f"headroom {headroom}")
    axes[1].plot(slots, forwards[headroom], marker + "-", label=f"headroom {headroom}")
axes[0].set(xlabel="max_num_seqs", ylabel="tokens computed / needed", title="Work done twice", ylim=(0.95, None))
axes[1].set(xlabel="max_num_seqs", ylabel="forwards", title="Steps for all requests", ylim=(0, None))
axes[0].legend()
plt.show()
assert waste[0][0] == 1.0 and waste[0][-1] > waste[6][-1]

# %% [markdown]
# *Counted, no clock. Left: with room for everyone to come in, tokens are computed more than once; headroom (blocks
# kept free for each running request at admission) buys that back. Right: it is not all loss: even a thrashing
# server makes fewer forwards than one that runs a single request.* Whether the extra tokens hurt depends on what a
# token costs, so measure it. Three settings on `tiny`, in turn:

# %% tags=["nbval-ignore-output"]
SETTINGS = {"2 slots": (2, 0), "12 slots": (12, 0), "12 slots, headroom 6": (12, 6)}


def run_overcommitted(slots, headroom):
    """Seconds, tokens computed, preemptions, longest gap between two tokens of an answer, median TTFT."""
    new, pool = pick(48, 24), pick(40, 25)
    options = dict(block_size=4, num_blocks=pool, max_num_seqs=slots, headroom=headroom, keep_log=True)
    engine = Engine(tiny, EngineOptions(max_num_batched_tokens=64, **options), eos_ids=())
    groups = [engine.add(words[30 * i : 30 * i + 16], ask(new)) for i in range(12)]
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    log, took = engine.scheduler.log, time.perf_counter() - start
    times = [group.requests[0].answer.token_times for group in groups]
    first = np.median([when[0] - start for when in times])
    return (
        took,
        sum(s.tokens for s in log),
        sum(len(s.preempted) for s in log),
        max(np.diff(when).max() for when in times),
        first,
    )


runs = {key: [] for key in SETTINGS}
for _ in range(pick(3, 1)):
    for key, setting in SETTINGS.items():
        runs[key].append(run_overcommitted(*setting))
print(f"{'setting':22s} tokens computed  preempted   x 2 slots: time   longest gap in an answer   median TTFT")
for key, found in runs.items():
    took, gaps, ttft = [float(np.median([x[i] / y[i] for x, y in zip(found, runs["2 slots"])])) for i in (0, 3, 4)]
    print(f"{key:22s} {found[0][1]:15d} {found[0][2]:10d} {took:17.2f} {gaps:26.1f} {ttft:13.2f}")

# %% [markdown]
# The gap is where thrashing shows first: an answer that was begun stops in the middle, for as long as it takes to
# get blocks again. Total time may even fall, because a batch of more is cheap on this machine, and so may the TTFT:
# with two slots the others wait outside, unbegun. Goodput under an ITL target does not care about either. The signal
# to watch in production is preemptions per second: zero is healthy, a steady trickle means too many slots or too
# little headroom. (SGLang estimates instead: it reserves a share of each request's `max_new_tokens`, the
# `new_token_ratio`, lets it sink while all goes well, and raises it when it has to take a request back.)

# %% [markdown]
# ## 8. Play
#
# **A simulation**: the library's scheduler plans, no model runs, and a step takes `a + b x tokens` with the two
# figures that section 2 read off this machine. Move the budget.


# %% tags=["nbval-ignore-output"]
def simulate(budget, streams, prompt):
    """(end, gap) of the streams' steps, and the TTFT of a prompt that arrives at time 0."""
    options = EngineOptions(
        max_num_batched_tokens=max(budget, streams + 1), max_num_seqs=streams + 1, num_blocks=10**4
    )
    scheduler = Scheduler(options, BlockPool(10**4, options.block_size))
    for i in range(streams):
        scheduler.add(Request(f"s{i}", [1], 10**4))

    def step():
        batch = scheduler.schedule()
        scheduler.update(batch, {r: 0 for r in batch.sampling})
        return a + b * batch.num_tokens

    while scheduler.num_waiting or any(not r.decoding for r in scheduler.running):
        step()
    late, now, gaps = Request("late", [1] * prompt, 8), 0.0, []
    scheduler.add(late)
    while not late.output:
        took = step()
        now += took
        gaps.append((now, took))
    first = now
    for _ in range(6):
        took = step()
        now += took
        gaps.append((now, took))
    return gaps, first


def draw(ax, budget, streams, prompt):
    gaps, first = simulate(budget, streams, prompt)
    alone, _ = simulate(prompt + streams, streams, prompt)
    ends, heights = zip(*gaps)
    ax.stairs(heights, [0, *ends], color=plots.MEANING["technique"], fill=True, alpha=0.75)
    ax.axvline(first, color=GREEN, lw=1.6)
    plots.unit_axis(ax.xaxis, "s", "simulated time")
    plots.unit_axis(ax.yaxis, "s", "gap")
    ax.xaxis.set_major_locator(plt.MaxNLocator(3))
    ax.set_ylim(0, 1.1 * max(gap for _, gap in alone))
    ax.set_title(f"simulated: worst gap {units.show(max(heights), 's')}, TTFT {units.show(first, 's')} (green)")


explore(
    draw,
    budget=(16, 544, 16, 64),
    streams=(1, 15, 1, 6),
    prompt=(64, 512, 64, 512),
    static=[dict(budget=32), dict(budget=128), dict(budget=544)],
    height=2.8,
)

# %% [markdown]
# *512 prompt tokens, 6 streams. Height: the gap that the streams see; green: the newcomer's first token. Small
# budget: low and wide; large budget: tall and narrow. The area stays nearly the same, plus one fixed cost a step.*

# %% [markdown]
# ## 9. Say it
#
# **"What is chunked prefill, and whom does it help?"**
# - *20 seconds.* A step has a token budget. Decodes take one each, a prompt gets what is left, over as many steps
#   as it needs. It helps those who are streaming: their worst gap is bounded by the budget and not by a stranger's
#   prompt. The newcomer waits n - 1 step costs longer.
# - *2 minutes.* Draw section 3, then the figure of section 6: one tall gap against a plateau. Decode reads all
#   weights for a few tokens, so it leaves arithmetic unused; chunk tokens fill it. n = ceil(P / (B - R)) steps, gap
#   a + b B, TTFT n a + b (P + n R). Only the last chunk samples. Same tokens: section 5. At 30,000 tokens add what
#   attention costs: it more than doubles a 7B model's chunk (section 7).
# - *Follow-up: how do you choose the budget?* From the ITL target: B = (target - a) / b; not below the point where
#   a step's fixed cost dominates (section 7), on a GPU not below the ridge. *Follow-up: and without decodes
#   running?* Then chunks help nobody; use the largest budget.
# - *Follow-up: who goes first in a step, prompts or decodes?* Prompts first gives the best TTFT and stalls those who
#   stream: vLLM's old default. With a budget, decodes go first, one token each, and prompts fill the rest.
# - *The number:* ceil(P / (B - R)) steps.
#
# **"KV memory is full. What now?"**
# - *20 seconds.* Preempt the least urgent running request: free its blocks, keep its tokens, put it back at its
#   place in the queue. On return its prefill covers prompt and answer so far; or its blocks were swapped to the
#   host.
# - *2 minutes.* Admission by free blocks with headroom makes it rare; preemption makes it safe. Never the most
#   urgent, so someone always gets on. Swap costs 2 x KV bytes / bus, recompute 2 x parameters / FLOP/s a token: the
#   table of section 6; and small copies, host memory and prefix hits speak for recompute.
# - *Follow-up: what is the classic bug?* The request comes back with its prompt alone, and repeats itself or loses
#   its words: `computed = 0` is right, `tokens = prompt` is not. The exercise has its relatives.
# - *The number:* 12 GB/s, about: the bus above which swapping LLaMA-7B's KV beats recomputing it at 150 TFLOP/s
#   (section 6).
#
# **"Can a request wait for ever?"**
# - *20 seconds.* In three ways: low priority under a steady stream of urgent ones, being overtaken for want of
#   room, and being too large to run at all. Ageing, a head of the queue that is never skipped, and a refusal at
#   once.
# - *2 minutes.* The key `priority x ageing + arrival` does not change while one waits, so a heap keeps it. The wait
#   is bounded by priority x ageing x load plus the queue it met (section 6). The price of not skipping the head is an
#   idle slot now and then (D in section 4).
# - *Follow-up: too large, how is it counted?* Prompt + limit - 1 tokens in whole blocks: the last token is never
#   fed back.
# - *The number:* p x g x load steps, plus the queue it met.
#
# **"Your server slows down with more concurrency. Why?"**
# - *20 seconds.* Look at preemptions first: overcommitted KV memory computes tokens twice (section 7).
# - *2 minutes.* Show tokens computed / needed against `max_num_seqs`, then the longest gap inside an answer. Fewer
#   slots or more headroom; then smaller KV (GQA, quantised), then more memory.
# - *Follow-up: is throughput the sign?* Not always: totals may look fine while answers stop in the middle.
# - *The number:* preemptions per second: 0.

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %% tags=["nbval-ignore-output"]
predictions()

# %% [markdown]
# **Exercise:** `exercises/06_scheduler.ipynb`: admission by blocks, a step under a budget, a preemption that loses
# nothing, a key that never starves, a queue that stopped for ever, and seven estimates.
#
# **Papers:** Yu et al. 2022, *Orca* (OSDI), for scheduling by iteration; Kwon et al. 2023, *PagedAttention*
# (arXiv:2309.06180), for preemption by swap and by recompute; Holmes et al. 2024, *DeepSpeed-FastGen*
# (arXiv:2401.08671), for SplitFuse; Agrawal et al. 2024, *Sarathi-Serve* (arXiv:2403.02310), for chunks that ride
# with decodes.
#
# **Next:** chapter 07 makes a prompt shorter before it is scheduled: what another request has computed already need
# not be computed again.
