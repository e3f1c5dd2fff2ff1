# %% [markdown]
# # 05 The paged KV cache
#
# **Hand out KV memory in small blocks as tokens arrive, name them in a table, and share them by counting.**
#
# > *The interviewer asks:* "What does PagedAttention page, which waste does it remove, what is left of it, and what
# > happens to the blocks when one prompt gets four answers?"
#
# You will be able to
# - measure internal and external fragmentation of reserved memory, and say by formula what paging leaves of it;
# - follow a block through allocation, fork, copy-on-write and free, and state the invariant that catches every
#   leak;
# - predict how many requests fit in the same memory, and choose a block size with numbers for both ends.
#
# 35 minutes to read. All of it runs on `tiny`, which ships with the course.

# %%
import inspect
import math
import random
from collections import Counter, deque
from contextlib import suppress
from itertools import cycle

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import to_rgb

from minillm import SamplingParams, load_model, load_tokenizer
from minillm.cache.block_pool import BlockPool, BlockTable, NoRoom, blocks_for
from minillm.cache.contiguous import ContiguousCache
from minillm.cache.fragmentation import Arena, held_in_blocks
from minillm.cache.generate import generate_cached
from minillm.cache.paged import PagedCache, PagedStep, cache_bytes
from minillm.engine.beam import beam_search
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import clock
from minillm.model.attention import LayerInfo, attention
from minillm.model.generate import generate_naive
from minillm.model.hub import ASSETS
from minillm.model.sampling import Sampler

model = load_model("tiny", dtype="float32")
config, device = model.config, model.device
tokenizer = load_tokenizer("tiny")
words = tokenizer.encode((ASSETS / "heldout.txt").read_text(encoding="utf-8")[: pick(60_000, 20_000)])
CONTEXT, BLOCK = config.max_length, 16
row_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4  # K and V of one token, float32
print(f"model: tiny, on {device}, {torch.get_num_threads()} CPU threads; context {CONTEXT} tokens")
print(f"{row_bytes} bytes of K and V a token, {units.show(row_bytes * CONTEXT, 'B')} for a full context")

# %% [markdown]
# ## 1. The waste, measured
#
# Chapter 02's cache claims room for the longest text a request may become, and claims it at once. The engine cannot
# know better: a client that sets no limit may use the whole context (上下文长度). Most do not. Below, real
# requests: pieces of a book that the model has not seen, each to be continued to the end of the sentence. After
# every step the cell adds up three things: room that reservation would hold, room held in blocks, tokens stored.


# %% tags=["nbval-ignore-output"]
def make_engine(block_size=BLOCK, num_blocks=None, **options):
    num_blocks = num_blocks or 32 * blocks_for(CONTEXT, block_size)
    return Engine(model, EngineOptions(block_size=block_size, num_blocks=num_blocks, **options), tokenizer)


def watch(engine):
    """Step until done. A row a step: (requests running, tokens stored, slots held in blocks)."""
    rows = []
    while engine.has_work:
        engine.step()
        running = engine.scheduler.running
        if running:
            stored = sum(request.table.length for request in running)
            rows.append((len(running), stored, engine.pool.used_count * engine.pool.block_size))
    return np.array(rows)


rng = random.Random(5)
engine, lengths = make_engine(), []
for i in range(pick(24, 8)):
    start, size = rng.randrange(len(words) - 200), rng.randint(8, 90)
    prompt = words[start : start + size]
    engine.add(prompt, SamplingParams(max_tokens=CONTEXT - size, temperature=0.8, top_k=40, stop=".", seed=i))
rows = watch(engine)

_, ax = plots.figure(height=3.0)
ax.fill_between(
    range(len(rows)), rows[:, 0] * CONTEXT, color=plots.MEANING["waiting"], label="reserved: whole contexts"
)
ax.fill_between(range(len(rows)), rows[:, 2], color=plots.SKY, label=f"held in blocks of {BLOCK}")
ax.plot(rows[:, 1], color="black", lw=1.2, label="tokens stored")
ax.set(xlabel="step", title="KV memory of requests that end with their sentence (tiny)")
plots.unit_axis(ax.yaxis, "tokens", "room for")
ax.legend()
plt.show()
reserved, held = rows[:, 0].sum() * CONTEXT, rows[:, 2].sum()
print(f"over all steps: {1 - rows[:, 1].sum() / reserved:.0%} of reserved room holds no token")
print(f"               {1 - rows[:, 1].sum() / held:.0%} of room held in blocks holds no token")

# %% [markdown]
# *One slot is room for the keys and values of one token. Grey is memory that no other request may use and that
# holds nothing. KV memory is what limits the batch (chapter 03), so grey is batch that was not served.*
#
# Three kinds of waste, by their usual names:
# - **reserved** (预留): the request will use it, later;
# - **internal fragmentation** (内部碎片): held by a request that never uses it;
# - **external fragmentation** (外部碎片): free, but in pieces too small for the request that waits.

# %% [markdown]
# ## 2. Predict
#
# Requests of a chat-like trace: many short, a few long. Memory for 8 full contexts. Write down:
#
# - *Bytes of a block* of 16 tokens: `2 x layers x block_size x kv_heads x head_dim x bytes per number`.
# - *Slots wasted a request* by blocks of B: only the last block is part empty. If every fill is as likely as every
#   other, `(B - 1) / 2`.
# - *Requests that fit* if each reserves the context: `slots / context`. With blocks: `slots / (tokens a running
#   request holds + (B - 1) / 2)`. What does a running request hold, on average? Prompt p and, half-way, a / 2 of
#   its answer; and long answers are seen for longer, so weight by a: `sum a (p + a / 2) / sum a`.
# - *One prompt of 40 tokens, 4 answers of 30*: blocks held at the end if the prompt's blocks are shared, and the
#   blocks that must be copied.


# %%
def make_trace(count, seed=1):
    """(prompt, answer) lengths in tokens; both fit the context together."""
    rng = random.Random(seed)

    def draw(median, spread):
        return max(4, min(CONTEXT // 2, round(rng.lognormvariate(math.log(median), spread))))

    return [(draw(40, 0.7), draw(60, 0.8)) for _ in range(count)]


trace, slots = make_trace(pick(240, 120)), 8 * CONTEXT
average = sum(a * (p + a / 2) for p, a in trace) / sum(a for _, a in trace)
prompt_length, answer_length, n = 40, 30, 4
stored = prompt_length + answer_length - 1  # the last token of an answer is never run, so it is never stored
predict("05.block_bytes", 2 * config.num_layers * BLOCK * config.num_kv_heads * config.head_dim * 4, "B")
predict("05.wasted_slots", (BLOCK - 1) / 2, "tokens")
predict("05.fit_reserved", slots / CONTEXT, "requests")
predict("05.fit_paged", slots / (average + (BLOCK - 1) / 2), "requests")
whole = prompt_length // BLOCK  # blocks full of prompt: nobody writes into them again
predict("05.fork_blocks", whole + n * (blocks_for(stored, BLOCK) - whole), "blocks")
predict("05.fork_copies", n - 1 if prompt_length % BLOCK else 0, "blocks")

# %% [markdown]
# ## 3. The idea, drawn
#
# An operating system gives a process pages, not a stretch of memory. Three requests, 48 slots, first both ways:


# %%
def strip(ax, spans, size, title, total=48):
    """Boxes along one row of memory. spans: (start, length, colour, text)."""
    for start, length, color, text in spans:
        ax.add_patch(plt.Rectangle((start, 0), length, 1, facecolor=color, edgecolor="white", lw=0.4))
        ax.text(start + length / 2, 0.5, text, ha="center", va="center", fontsize=8)
    for border in range(0, total + 1, size):
        ax.axvline(border, color="black", lw=0.9)
    ax.set(xlim=(-0.3, total + 0.3), ylim=(0, 1), yticks=[], xticks=range(0, total + 1, 8))
    ax.set_title(title, loc="left")
    ax.grid(False)


COLORS = {"A": "#56B4E9", "B": "#E69F00", "C": "#7FC97F"}
PALE, FREE = {"A": "#DCEFFA", "B": "#FAEBCB", "C": "#E0F2E0"}, "#F2F2F2"
_, axes = plots.figure(2, 1, width=7.2, height=2.9)
strip(
    axes[0],
    [
        (0, 9, COLORS["A"], "A: 9 tokens"),
        (9, 11, PALE["A"], "held, empty"),
        (20, 5, COLORS["B"], "B: 5"),
        (25, 15, PALE["B"], "held, empty"),
        (40, 8, FREE, "hole: C needs 20"),
    ],
    48,
    "Reserved: 20 slots each, in one stretch. C waits",
)
needs = {"A": [9, [0, 3, 5]], "B": [5, [1, 4]], "C": [10, [2, 6, 9]]}
boxes = [(block * 4, 4, FREE, "") for block in range(12)]
for name, (tokens, blocks) in needs.items():
    for i, block in enumerate(blocks):
        used = min(4, tokens - 4 * i)
        boxes.append((block * 4, used, COLORS[name], f"{name}{i}" if used > 1 else name))
        if used < 4:
            boxes.append((block * 4 + used, 4 - used, PALE[name], ""))
strip(axes[1], boxes, 4, "Paged: blocks of 4, wherever they are free. Tables: A 0 3 5, B 1 4, C 2 6 9")
axes[1].set_xlabel("slot")
plt.show()

# %% [markdown]
# *Pale: held and empty. Grey: free. Below, no request holds more than 3 empty slots, and every free block serves
# anyone.* The **block table** (块表) of a request lists its blocks in order. Token *i* is in slot
#
# > `block_table[i // block_size] * block_size + i % block_size`
#
# and that is all the indirection there is: the **slot mapping** (槽位映射). Now one prompt with two answers. The
# picture is drawn from the library's own pool and tables, step by step.


# %%
def whiteboard(ax, title, pool, tables, memory):
    """Tables above, blocks below; `memory` holds a word a slot."""
    size = pool.block_size
    place = {block: block * (size + 0.7) for block in range(pool.num_blocks)}
    for block, x in place.items():
        for offset in range(size):
            word = memory.get(block * size + offset, "")
            ax.add_patch(
                plt.Rectangle((x + offset, 0), 1, 1, facecolor="#EAF4FB" if word else "white", edgecolor="#888")
            )
            ax.text(x + offset + 0.5, 0.5, word, ha="center", va="center", fontsize=7)
        count = pool.count(block)
        text = f"block {block}: count {count}" if count else f"block {block}: free"
        ax.text(x + size / 2, -0.55, text, ha="center", fontsize=7.5, weight="bold" if count > 1 else "normal")
    for row, (name, table) in enumerate(tables.items()):
        y, color = 4.2 - 1.25 * row, COLORS[name]
        ax.text(-0.1, y + 0.45, name, ha="right", va="center", fontsize=9, weight="bold")
        for i, block in enumerate(table.blocks):
            x = 0.3 + 1.2 * i
            ax.add_patch(plt.Rectangle((x, y), 1, 0.9, facecolor=color, edgecolor="black", lw=0.8, zorder=3))
            ax.text(x + 0.5, y + 0.45, str(block), ha="center", va="center", fontsize=8, zorder=4)
            target = (place[block] + size * (0.35 + 0.3 * row), 1.05)
            ax.annotate("", target, (x + 0.5, y), zorder=2, arrowprops=dict(arrowstyle="->", color=color, lw=1.4))
    ax.set(xlim=(-1, place[pool.num_blocks - 1] + size + 0.3), ylim=(-0.9, 5.3))
    ax.set_title(title, fontsize=9, loc="left")
    ax.axis("off")


def put(memory, table, start, text):
    for slot, word in zip(table.slots(start, table.length - start), text.split()):
        memory[slot] = word


pool, memory, a = BlockPool(3, 4), {}, BlockTable(4)
_, axes = plots.figure(2, 2, width=7.6, height=4.6)
a.append(pool, 6)
put(memory, a, 0, "the cat sat on the mat")
whiteboard(axes[0, 0], "1  A has read the prompt, 6 tokens", pool, {"A": a}, memory)
b = a.fork(pool)
whiteboard(axes[0, 1], "2  fork: B gets A's table; counts go up", pool, {"A": a, "B": b}, memory)
for source, target in b.append(pool, 1):  # the copies the tensors must follow
    memory.update({target * 4 + i: memory[source * 4 + i] for i in range(4) if source * 4 + i in memory})
put(memory, b, 6, "but")
whiteboard(axes[1, 0], "3  B writes: block 1 is shared, so copy first", pool, {"A": a, "B": b}, memory)
assert a.append(pool, 1) == []
put(memory, a, 6, "and")
whiteboard(axes[1, 1], "4  A writes: block 1 is A's alone, no copy", pool, {"A": a, "B": b}, memory)
plt.show()
pool.check([a, b])

# %% [markdown]
# *Block 0 is full of prompt: nobody writes into it again, so it stays shared to the end. Block 1 is half full: the
# first that writes copies it (写时复制, copy-on-write), the last one keeps the original. Four answers need three
# copies, and none at all if the prompt fills its last block.*
#
# The **invariant**, in one line: *free + held = all, and a block's count (引用计数) is the number of tables that
# hold it.*

# %% [markdown]
# ## 4. Build it
#
# A pool with counts, and a table that stands behind the decoder's seam of chapter 02. The decoder asks for
# positions once a forward: that is when room is made.


# %%
class SmallPool:
    """K and V of all requests, in blocks, and how many tables hold each block."""

    def __init__(self, config, blocks, size, device="cpu"):
        shape = (config.num_layers, blocks, size, config.num_kv_heads, config.head_dim)
        self.k, self.v, self.size = torch.empty(shape, device=device), torch.empty(shape, device=device), size
        self.count, self.free = [0] * blocks, list(range(blocks))

    def take(self):
        block = self.free.pop(0)
        self.count[block] = 1
        return block

    def drop(self, block):
        self.count[block] -= 1
        if self.count[block] == 0:
            self.free.append(block)


class SmallTable:
    """One request's blocks: token i is in block blocks[i // size], row i % size."""

    def __init__(self, pool, blocks=(), length=0):
        self.pool, self.blocks, self.length = pool, list(blocks), length

    def fork(self):
        for block in self.blocks:
            self.pool.count[block] += 1
        return SmallTable(self.pool, self.blocks, self.length)

    def positions(self, shape):  # [1, time]: make room for so many tokens
        pool, start, place = self.pool, self.length, self.length // self.pool.size
        if place < len(self.blocks) and pool.count[old := self.blocks[place]] > 1:  # copy-on-write
            self.blocks[place] = new = pool.take()
            pool.k[:, new], pool.v[:, new] = pool.k[:, old], pool.v[:, old]
            pool.drop(old)
        self.length += shape[-1]
        while len(self.blocks) * pool.size < self.length:
            self.blocks.append(pool.take())
        return torch.arange(start, self.length, device=pool.k.device).expand(shape)

    def attend(self, layer, q, k, v):  # q [1, time, heads, dim]
        i = torch.arange(self.length, device=q.device)
        slots = torch.tensor(self.blocks, device=q.device)[i // self.pool.size] * self.pool.size + i % self.pool.size
        keys, values = (x[layer.index].flatten(0, 1) for x in (self.pool.k, self.pool.v))  # [slots, kv_heads, dim]
        keys[slots[-q.shape[1] :]], values[slots[-q.shape[1] :]] = k[0], v[0]
        stored = (x[slots].transpose(0, 1)[None] for x in (keys, values))  # [1, kv_heads, length, dim]
        return attention(q.transpose(1, 2), *stored, scale=layer.scale).transpose(1, 2)


# %% [markdown]
# Same tokens? Three requests of unequal length grow in turn, a token each, so that their blocks are interleaved in
# one pool; then one prompt is forked into four answers that begin with its four likeliest next tokens. Every text
# must be the one that the naive loop of chapter 01 makes alone.


# %%
@torch.inference_mode()
def advance(table, tokens):
    """Feed tokens; return the logits of the last."""
    return model(torch.tensor([tokens], device=device), cache=table)[0, -1]


steps, size = pick(24, 10), 4
prompts = [words[100:105], words[300:308], words[500:517]]
pool = SmallPool(config, 64, size, device)
tables = [SmallTable(pool) for _ in prompts]
answers = [[advance(table, prompt).argmax().item()] for table, prompt in zip(tables, prompts)]
for _ in range(steps - 1):
    for table, answer in zip(tables, answers):
        answer.append(advance(table, answer[-1:]).argmax().item())
for table, prompt, answer in zip(tables, prompts, answers):
    assert answer == generate_naive(model, prompt, steps)
    print(f"prompt of {len(prompt):2d}, block table {table.blocks}")
print(f"3 requests, {steps} tokens each, blocks of {size}: equal to the naive loop")

root, prompt = SmallTable(pool), prompts[1] + prompts[0][:2]
firsts = advance(root, prompt).topk(4).indices.tolist()
forks = [root, *(root.fork() for _ in range(3))]
before, held = list(root.blocks), sum(c > 0 for c in pool.count)
answers = [[first] for first in firsts]
for _ in range(steps - 1):
    for table, answer in zip(forks, answers):
        answer.append(advance(table, answer[-1:]).argmax().item())
for first, answer in zip(firsts, answers):
    assert answer == [first, *generate_naive(model, [*prompt, first], steps - 1)]
print(f"prompt of {len(prompt)}, blocks {before}, 4 answers of {steps} tokens: equal to the naive loop")
print("block tables now:", *(f"{table.blocks[: len(before) + 1]}..." for table in forks))
assert all(c == sum(b in t.blocks for t in (*tables, *forks)) for b, c in enumerate(pool.count))

# %% [markdown]
# ## 5. The library's version
#
# In two files, since *who holds what* needs no tensor. `block_pool` decides:

# %%
print(inspect.getsource(BlockTable.append))
print(inspect.getsource(BlockPool.allocate))

# %% [markdown]
# `paged` stores and reads, for the tokens of many requests packed in a row:

# %%
print(inspect.getsource(PagedCache.attend))

# %% [markdown]
# | it adds | because |
# |---|---|
# | `NoRoom` before anything is changed | a half-made allocation leaks blocks (exercise, task 5) |
# | `PoolError` on a double free, on sharing a free block | else two requests would write into one block |
# | the least recently freed block first; cached blocks last | so that chapter 07 can find old prefixes again |
# | one packed `[tokens]` for all requests, prompts and decodes mixed | the linears see one matrix (chapter 04) |
# | gather indices and masks planned once a step | they are the same in all layers |
# | `copy_blocks`, `swap_out`, `swap_in` | copy-on-write, and preemption (chapter 06), as real copies |
#
# **Same tokens, proved.** Prompts around block borders, all at once, at four block sizes; 512 is the whole context,
# so that setting *is* contiguous reservation. Then four sampled answers (并行采样, parallel sampling, `n=4`)
# against the same draws on chapter 02's contiguous cache, which shares nothing.


# %%
def run(engine, prompts, params):
    """Token ids of every answer."""
    groups = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [answer.token_ids for group in groups for answer in engine.completions(group)]


prompts = [
    words[50 * i : 50 * i + length] for i, length in enumerate(pick([1, 2, 15, 16, 17, 31, 32, 33], [1, 16, 17]))
]
expected = [generate_naive(model, prompt, steps) for prompt in prompts]
for size in (1, 5, 16, CONTEXT):
    engine = make_engine(size)
    assert run(engine, prompts, SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)) == expected
    assert engine.pool.free_count == engine.pool.num_blocks
print(f"{len(prompts)} prompts x {steps} tokens x block sizes 1, 5, 16, {CONTEXT}: equal to the naive loop")

params = SamplingParams(max_tokens=steps, temperature=1.0, top_k=20, seed=7, ignore_eos=True, n=4)
prompt, sampler, alone = words[700:721], Sampler(), []
for index in range(params.n):
    state = sampler.start(params, prompt, index)
    draw = lambda logits: torch.tensor(sampler.sample(logits, [state]).token_ids, device=device)  # noqa: B023, E731
    alone.append(generate_cached(model, prompt, steps, draw))
for size in (1, 5, 16, CONTEXT):
    assert run(make_engine(size), [prompt], params) == alone
print(f"n=4 x {steps} sampled tokens x 4 block sizes: equal to 4 contiguous caches")

# %% [markdown]
# **No block lost.** Random operations on the pool, with a word for every token in a list beside it: after each
# operation, the table that was touched must still read back its own words, and a failed one must have changed
# nothing.


# %%
def random_operations(count, num_blocks=24, size=4, seed=0):
    rng, pool, memory, seen = random.Random(seed), BlockPool(num_blocks, size), {}, Counter()
    live, fresh = [], iter(range(10**9))  # [table, its words]

    def grow(table, text, n):
        pairs = table.append(pool, n)
        for source, target in pairs:
            for i in range(size):
                memory[target * size + i] = memory.get(source * size + i)
        text += [next(fresh) for _ in range(n)]
        memory.update(zip(table.slots(len(text) - n, n), text[-n:]))
        seen["copied blocks"] += len(pairs)

    for step in range(count):
        what = rng.choice(("new", "append", "append", "append", "fork", "truncate", "free")) if live else "new"
        if len(live) == 9 and what in ("new", "fork"):
            what = "free"  # else the pool would be full all the time, and most operations refused
        table, text = rng.choice(live) if live and what != "new" else (BlockTable(size), [])
        before = pool.free_count, list(table.blocks), table.length
        try:
            if what == "new":
                grow(table, text, rng.randint(1, 3 * size))
                live.append((table, text))
            elif what == "append":
                grow(table, text, rng.randint(1, size))
            elif what == "fork":
                live.append((table.fork(pool), list(text)))
            elif what == "truncate":
                del text[rng.randint(0, len(text)) :]
                table.truncate(pool, len(text))
            else:
                live.remove((table, text))
                table.free(pool)
                text = []
            seen[what] += 1
        except NoRoom:
            assert before == (pool.free_count, table.blocks, table.length), "a failed allocation changed something"
            seen["refused, nothing changed"] += 1
        assert [memory[slot] for slot in table.slots(0, len(text))] == text, "somebody else's words"
        if step % 10 == 0:
            pool.check([table for table, _ in live])
    for table, _ in live:
        table.free(pool)
    pool.check([])
    assert pool.free_count == num_blocks
    return seen


seen = random_operations(pick(100_000, 5_000))
print(", ".join(f"{name} {times}" for name, times in sorted(seen.items())))
assert seen["copied blocks"] > sum(seen.values()) / 50 and seen["refused, nothing changed"] < sum(seen.values()) / 2
print("no block lost, none freed twice, none shared by accident")

# %% [markdown]
# ## 6. Measure it
#
# ### Bytes, and half a block

# %%
cache = PagedCache(config, 10, BLOCK)
reveal("05.block_bytes", cache.nbytes / 10)
assert cache.nbytes == cache_bytes(config, 10, BLOCK, torch.float32) == 10 * BLOCK * row_bytes
final = [p + a - 1 for p, a in trace]
reveal("05.wasted_slots", held_in_blocks(final, BLOCK).wasted / len(final))

# %% [markdown]
# ### Where the memory goes
#
# The trace of section 2 through memory for 8 contexts, counted step by step: no model, so nothing depends on the
# machine. Three ways to give room: **context**, a stretch of 512; **known length**, a stretch of exactly what the
# request will need, which no real engine can know; **blocks** of 16. Who finds no room waits. Averages over the
# steps in which somebody waits. `Arena` is the library's plain allocator: stretches, the first hole that is large
# enough. With blocks nobody knows how long a text gets, so the pool may run dry: then the youngest request gives its
# blocks back and starts again later (preemption, 抢占, chapter 06). To make that rare, a newcomer is let in only if a
# block stays free for each request that runs already: the **headroom**.


# %%
class Stretches:
    """Contiguous room, first fit. size(prompt, answer): slots asked for."""

    def __init__(self, slots, size):
        self.arena, self.size, self.starts = Arena(slots), size, {}

    def admit(self, key, length, final):
        self.starts[key] = start = self.arena.allocate(self.size(final))
        return start is not None

    def grow(self, key):
        return True

    def release(self, key):
        self.arena.free(self.starts.pop(key))

    def held(self, key, final):
        return self.size(final)


class Blocks:
    """The library's pool. A request comes in if its blocks are free and one more for each that runs."""

    def __init__(self, slots, size):
        self.pool, self.tables = BlockPool(slots // size, size), {}

    def admit(self, key, length, final):
        if blocks_for(length, self.pool.block_size) + len(self.tables) > self.pool.free_count:
            return False
        self.tables[key] = BlockTable(self.pool.block_size)
        self.tables[key].append(self.pool, length)
        return True

    def grow(self, key):
        try:
            self.tables[key].append(self.pool, 1)
        except NoRoom:
            return False
        return True

    def release(self, key):
        self.tables.pop(key).free(self.pool)

    def held(self, key, final):
        return len(self.tables[key].blocks) * self.pool.block_size


def serve(room, trace, slots):
    """All requests, first come first served, a token a step each. -> shares of memory, requests running ..."""
    waiting, running = deque((i, p, p + a - 1) for i, (p, a) in enumerate(trace)), {}
    shares, counts, steps, preempted = [], [], 0, 0
    while waiting or running:
        while waiting and room.admit(*waiting[0]):
            key, length, final = waiting.popleft()
            running[key] = [length, final]
        if waiting:
            held = [(room.held(key, final), length, final) for key, (length, final) in running.items()]
            tokens = sum(length for _, length, _ in held)
            later = sum(min(h, final) - length for h, length, final in held)
            never = sum(max(h - final, 0) for h, _, final in held)
            shares.append((tokens, later, never, slots - tokens - later - never))
            counts.append(len(running))
        for key in list(running):
            if key not in running:
                continue
            if running[key][0] == running[key][1]:
                room.release(key)
                del running[key]
                continue
            while key in running and not room.grow(key):
                victim = max(running)
                room.release(victim)
                waiting.appendleft((victim, *running.pop(victim)))
                preempted += 1
            if key in running:
                running[key][0] += 1
        steps += 1
    return dict(shares=np.mean(shares, 0) / slots, running=np.mean(counts), steps=steps, preempted=preempted)


policies = {
    "context": Stretches(slots, lambda final: CONTEXT),
    "known length": Stretches(slots, lambda final: final),
    f"blocks of {BLOCK}": Blocks(slots, BLOCK),
}
results = {name: serve(room, trace, slots) for name, room in policies.items()}
kinds = ["tokens", "reserved, used later", "held, never used (internal)", "free in holes (external)", "headroom"]
shares = {name: [*result["shares"], 0.0] for name, result in results.items()}
shares[f"blocks of {BLOCK}"][3:] = [0.0, shares[f"blocks of {BLOCK}"][3]]  # all blocks are alike: there are no holes
print(f"{len(trace)} requests, {slots} slots{'':8s}" + "  ".join(f"{k.split(' (')[0]:>20s}" for k in kinds))
for name, parts in shares.items():
    print(f"{name:28s}" + "  ".join(f"{share:20.1%}" for share in parts))

_, ax = plots.figure(width=7.2, height=2.5)
left = np.zeros(len(results))
shades = (plots.BLUE, plots.SKY, plots.ORANGE, plots.GREY, plots.MEANING["waiting"])
for i, (kind, color) in enumerate(zip(kinds, shades)):
    part = np.array([parts[i] for parts in shares.values()]) * 100
    ax.barh(range(len(results)), part, left=left, color=color, label=kind, height=0.62)
    left += part
ax.set_yticks(range(len(results)), results)
ax.invert_yaxis()
ax.grid(False, axis="y")
ax.set(xlabel="share of KV memory, %", title="KV memory while requests wait", xlim=(0, 100))
ax.figure.legend(loc="outside lower center", ncols=2)
plt.show()

# %% [markdown]
# *Dark blue is work. With blocks, what is free while a request waits is headroom, not fragments: any of it would
# serve. What is held and not yet used is the open end of last blocks, and nearly all of it will be.* vLLM's
# announcement (June 2023) puts the waste of the systems before it at 60 % to 80 % of KV memory and its own at under 4
# %. Those are its figures, for its models and requests; ours stand in the table above.
#
# Fewer slots wasted is more requests at once, and at a step's fixed cost more requests at once is throughput:

# %%
reveal("05.fit_reserved", results["context"]["running"])
reveal("05.fit_paged", results[f"blocks of {BLOCK}"]["running"])
for name, result in results.items():
    print(
        f"{name:14s} {result['running']:5.1f} at once, {result['steps']:5d} steps, {result['preempted']} preemptions"
    )
assert results[f"blocks of {BLOCK}"]["running"] > results["known length"]["running"] > results["context"]["running"]

# %% [markdown]
# Blocks beat even the allocator that knows the future: it, too, holds room from the first token that is used only
# at the last. The prediction leaves the headroom out, and the queue's last requests.
#
# ### The same with the model
#
# Memory for 4 contexts. Once as 4 blocks of 512, which is reservation; once as 128 blocks of 16. Same bytes, same
# requests, same code, in alternation.

# %% tags=["nbval-ignore-output"]
pairs = make_trace(pick(20, 10), seed=2)
requests = [(words[60 * i : 60 * i + p // 2 + 1], a // pick(2, 4) + 1) for i, (p, a) in enumerate(pairs)]
expected, seen = {}, {}


def answer_all(block_size):
    """Run the requests in memory for 4 contexts; note (peak of running requests, steps, preemptions) in `seen`."""
    # headroom of a block a request is 16 tokens, or a whole context: only where blocks are small does it make sense
    engine = make_engine(block_size, 4 * CONTEXT // block_size, max_num_seqs=64, headroom=int(block_size < CONTEXT))
    assert engine.runner.cache.nbytes == 4 * CONTEXT * row_bytes
    each = [SamplingParams(max_tokens=a, temperature=0, ignore_eos=True) for _, a in requests]
    groups = [engine.add(prompt, params) for (prompt, _), params in zip(requests, each)]
    peak = 0
    while engine.has_work:
        engine.step()
        peak = max(peak, len(engine.scheduler.running))
    tokens = [engine.completions(group)[0].token_ids for group in groups]
    assert expected.setdefault("tokens", tokens) == tokens
    seen[block_size] = peak, engine.scheduler.steps, sum(r.preemptions for g in groups for r in g.requests)


pair = clock.paired(lambda: answer_all(CONTEXT), lambda: answer_all(BLOCK), repeats=pick(3, 2), warmup=0)
tokens = sum(a for _, a in requests)
for size in (CONTEXT, BLOCK):
    print(f"blocks of {size:3d}: at most {seen[size][0]:2d} requests at once, {seen[size][1]} steps")
print(f"{tokens / pair.b.median:.0f} tokens/s paged; reserved takes {pair.ratio} x as long for the same tokens")
plots.beside(
    [
        dict(name="reserved", here=tokens / pair.a.median, recorded=recorded("paged.reserved_throughput")),
        dict(name="paged", here=tokens / pair.b.median, recorded=recorded("paged.throughput")),
    ],
    "tokens/s",
    f"{len(requests)} requests in memory for 4 contexts (tiny)",
)
plt.show()

# %% [markdown]
# *The same tokens, in fewer and fuller steps. How much faster that is depends on how nearly a step of many rows
# costs the same as a step of few; on a GPU, nearly always.* Against Orca that knows every length beforehand, the
# paper reports a gain of 1.3 x for single answers and 2.3 x for beams of width 6 (Kwon et al. 2023, section 6.3;
# OPT-13B, Alpaca; its gain, not ours).
#
# ### One prompt, n answers


# %%
def sample_n(prompt_length, n, answer):
    """(blocks held at the most, blocks copied) by one prompt with n sampled answers."""
    engine = make_engine()
    copied, copy = [], engine.runner.cache.copy_blocks
    engine.runner.cache.copy_blocks = lambda pairs: (copied.extend(pairs), copy(pairs))
    engine.add(words[:prompt_length], SamplingParams(max_tokens=answer, seed=3, ignore_eos=True, n=n))
    peak = 0
    while engine.has_work:
        engine.step()
        peak = max(peak, engine.pool.used_count)
    engine.pool.check([])
    return peak, len(copied)


peak, copies = sample_n(prompt_length, n, answer_length)
reveal("05.fork_blocks", peak)
reveal("05.fork_copies", copies)
print(f"{'prompt':>7s}{'n':>3s}{'blocks shared':>15s}{'not shared':>12s}{'saved':>7s}{'copied':>8s}")
for p in pick([15, 16, 17, 40, 128, 256], [16, 17, 40]):
    peak, copies = sample_n(p, n, answer_length)
    apart = n * blocks_for(p + answer_length - 1, BLOCK)
    print(f"{p:7d}{n:3d}{peak:15d}{apart:12d}{1 - peak / apart:7.0%}{copies:8d}")
    assert copies == (n - 1 if p % BLOCK else 0)

# %% [markdown]
# A prompt that ends on a block border costs no copy: its last block is full, nobody writes into it, and each answer
# begins a block of its own. The longer the prompt beside the answer, the more is saved. The paper measured 6.1 % to
# 9.8 % of blocks saved for parallel sampling on Alpaca's short prompts and 16.2 % to 30.5 % on ShareGPT's (section
# 6.3; its figures, not ours).
#
# ### Beam search: sharing that changes every step
#
# **Beam search** (束搜索) keeps the `width` likeliest texts so far, not the likeliest next token. Each step it
# extends all of them, and keeps the best `width` of the results: some texts get two children, some none. From the
# cache it needs nothing new. A survivor forks its parent's table, the others are freed, and two beams that are about
# to write into one shared block get a copy.


# %%
def log_probability(prompt, answer):
    """Sum of ln p of the answer's tokens, from one plain forward of the model."""
    with torch.inference_mode():
        tokens = torch.tensor([prompt + answer], device=device)
        logprobs = model(tokens)[0, len(prompt) - 1 : -1].float().log_softmax(-1)  # [answer, vocab]
    return logprobs[range(len(answer)), answer].sum().item()


start, beam_tokens = words[1600:1640], pick(24, 16)
greedy = generate_naive(model, start, beam_tokens)
searches = {w: beam_search(model, start, w, beam_tokens, length_penalty=0.0) for w in (1, 2, 4, 8)}
print(f"{'width':>5s}{'ln p of the best':>18s}{'greedy':>9s}{'blocks held':>13s}{'not shared':>12s}{'copied':>8s}")
for width, found in searches.items():
    best = found.beams[0]
    print(
        f"{width:5d}{best.score:18.2f}{log_probability(start, greedy):9.2f}{found.most_blocks:13d}"
        f"{found.unshared_blocks:12d}{found.copied_blocks:8d}"
    )
    assert all(abs(b.score - log_probability(start, b.tokens)) < 1e-2 for b in found.beams)
assert searches[1].beams[0].tokens == greedy and searches[1].copied_blocks == 0
assert searches[4].beams[0].score > log_probability(start, greedy)

texts = [beam.tokens for beam in searches[4].beams]
alike = [[sum(t[: i + 1] == text[: i + 1] for t in texts) for i in range(beam_tokens)] for text in texts]
_, ax = plots.figure(width=7.6, height=2.3)
shades = ["#FFFFFF", "#CFE3F1", "#7FB6DA", plots.BLUE]
for row, text in enumerate(texts):
    for i, token in enumerate(text):
        color = shades[alike[row][i] - 1]
        ax.add_patch(plt.Rectangle((i, row), 1, 0.9, facecolor=color, edgecolor="#C8C8C8", lw=0.5))
        word = tokenizer.decode([token]).strip()[:7]
        dark = "white" if alike[row][i] > 2 else "black"
        ax.text(i + 0.5, row + 0.45, word, fontsize=pick(6, 7), ha="center", va="center", color=dark)
for border in range(-len(start) % BLOCK, beam_tokens, BLOCK):
    ax.axvline(border, color=plots.RED, lw=1.6)
ax.set(
    xlim=(0, beam_tokens),
    ylim=(4, 0),
    xlabel="output token",
    ylabel="ln p",
    title="Four beams: who still shares what",
)
ax.set_yticks([r + 0.45 for r in range(4)], [f"{b.score:.1f}" for b in searches[4].beams])
ax.grid(False)
plt.show()

# %% [markdown]
# *A row is a beam, with its ln p; the darker a token, the more of the four beams have the same text up to it; a red
# line is a block border.* A block is shared until the beams in it part. The copies are those of the last, half-full
# block, never of the whole text, which is what contiguous rows would copy at each split. The best beam is likelier
# than greedy's text: greedy cannot take a worse token now for a better one later. The paper saved 37.6 % to 55.2 %
# of blocks on Alpaca and 44.3 % to 66.3 % on ShareGPT (section 6.3; its figures, not ours).
#
# **Paper and product.** The paper is of 2023. vLLM V1 has no forks: a request with n answers becomes n requests,
# which share the prompt's blocks through the prefix cache (chapter 07), whole blocks only, so that nothing is ever
# copied on write; and beam search runs outside the engine, on ordinary requests. Sharing by counting is still what
# both stand on.

# %% [markdown]
# ### What indirection costs
#
# Paging saves memory. It does not make attention faster, since keys no longer lie in a row. Ours gathers them
# first: read, write, read again, three times the bytes of reading in place. One layer, 8 requests of equal length,
# a decode step, contiguous and paged in alternation; the orange mark is that factor 3.


# %% tags=["nbval-ignore-output"]
def decode_ratio(length, batch=8, repeats=11):
    """Seconds of one paged attention step / one contiguous step, in turn."""
    one, layer = config.with_changes(num_layers=1), LayerInfo(0, config.scale)
    q = torch.randn(batch, 1, config.num_heads, config.head_dim, device=device)
    k, v = torch.randn(2, batch, length, config.num_kv_heads, config.head_dim, device=device)
    whole = ContiguousCache(one, batch, length, device=device)
    whole.k[0], whole.v[0] = k.transpose(1, 2), v.transpose(1, 2)
    per = blocks_for(length, BLOCK)
    paged = PagedCache(one, batch * per, BLOCK, device=device)
    order = torch.randperm(batch * per, generator=torch.Generator().manual_seed(0)).view(batch, per).to(device)
    i = torch.arange(length, device=device)
    places = order[:, i // BLOCK] * BLOCK + i % BLOCK  # [batch, length]
    for store, rows in ((paged.k, k), (paged.v, v)):
        store[0].flatten(0, 1)[places.flatten()] = rows.flatten(0, 1)
    paged.begin(PagedStep(places[:, -1].contiguous(), order, [1] * batch, [length] * batch, i))

    def contiguous_step():
        whole.lengths[0] = length - 1
        return whole.attend(layer, q, k[:, -1:], v[:, -1:])

    def paged_step():
        return paged.attend(layer, q[:, 0], k[:, -1], v[:, -1])

    assert torch.allclose(contiguous_step()[:, 0], paged_step(), atol=1e-5)
    return clock.paired(paged_step, contiguous_step, repeats=repeats).ratio


lengths, ratios = pick([64, 256, 1024, 2048], [64, 256, 1024]), []
for length in lengths:
    ratio = decode_ratio(length)
    ratios.append(ratio.median)
    print(f"{length:5d} tokens: the paged step takes {ratio} x the time of the contiguous one")
plots.beside(
    [
        dict(name=f"{x} tokens", here=y, recorded=recorded("paged.attention_overhead"), prediction=3)
        for x, y in zip(lengths, ratios)
    ],
    "x",
    "Decode attention, paged / contiguous",
)
plt.show()

# %% [markdown]
# *Above 1, paging costs time; the output is the same, asserted.* Where arithmetic sets the time, or K and V fit in
# the processor's caches, the ratio stays below 3. A kernel that reads through the table (chapter 09) has no second
# copy; the paper's own kernel took 20 % to 26 % longer in attention than FasterTransformer's contiguous one (section
# 7.1; its figure, not ours). Attention is a part of the step, the batch is all of it: that is why the trade is a good
# one.

# %% [markdown]
# ## 7. Where it backfires: the block size
#
# **Very large.** A block of the whole context is reservation again. **Very small.** A block of one token wastes
# nothing, and there is a table entry, a trip to the free list and a separate read for every single token. Both
# ends, measured: what is wasted (counted on the trace), the time to read blocks from all over a pool that is larger
# than the caches (index by block, `tiny`'s rows of one layer), and the bookkeeping of a 512-token text, both beside
# block size 16.


# %% tags=["nbval-ignore-output"]
def read_seconds(sizes, tokens, pool_tokens, repeats):
    """{size: time of gathering `tokens` tokens of K in blocks of that size / one contiguous copy of as many}."""
    width = config.num_kv_heads * config.head_dim
    store, out = torch.randn(pool_tokens, width, device=device), torch.empty(tokens, width, device=device)

    def ratio(size):
        blocks = store.view(-1, size * width)
        order = torch.randperm(len(blocks), device=device)
        picks = cycle(order[: len(order) // (tokens // size) * (tokens // size)].view(-1, tokens // size))
        starts = cycle(range(0, pool_tokens, tokens))  # other places each time, so that none is in a cache already
        target = out.view(-1, size * width)

        def contiguous():
            start = next(starts)
            out.copy_(store[start : start + tokens])

        return clock.paired(
            lambda: torch.index_select(blocks, 0, next(picks), out=target), contiguous, repeats=repeats
        ).ratio.median

    return {size: ratio(size) for size in sizes}


def bookkeeping(size):
    """Admit a text as long as the context, and free it again."""
    pool, table = BlockPool(blocks_for(CONTEXT, size), size), BlockTable(size)
    table.append(pool, CONTEXT)
    table.free(pool)


sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
wasted = [held_in_blocks(final, size).waste for size in sizes]
served = {size: serve(Blocks(slots, size), trace, slots) for size in sizes[:-1]}
served[CONTEXT] = results["context"]
reads = read_seconds(sizes, *pick((16384, 2**18, 9), (8192, 2**17, 5)))
books = {
    size: clock.paired(lambda size=size: bookkeeping(size), lambda: bookkeeping(BLOCK), repeats=21).ratio.median
    for size in sizes
}
print(f"{'block size':>10s}{'wasted':>9s}{'at once':>9s}{'steps':>7s}{'reading':>9s}{'bookkeeping':>13s}")
for size, waste in zip(sizes, wasted):
    result = served[size]
    print(
        f"{size:10d}{waste:9.1%}{result['running']:9.1f}{result['steps']:7d}{reads[size]:8.2f}x{books[size]:12.2f}x"
    )
_, axes = plots.figure(1, 2, width=7.6, height=3.0)
axes[0].plot(sizes, [w * 100 for w in wasted], "o-", color=plots.RED)
axes[0].set_ylabel("held, no token, %", color=plots.RED)
at_once = axes[0].twinx()
at_once.plot(sizes, [served[s]["running"] for s in sizes], "s-", color=plots.BLUE)
at_once.set_ylabel("requests at once", color=plots.BLUE)
at_once.set_ylim(0, None)
at_once.grid(False)
axes[0].set_title("Large blocks waste memory")
axes[1].plot(sizes, [reads[s] for s in sizes], "o-", color=plots.GREEN, label="reading / contiguous copy")
axes[1].plot(sizes, [books[s] for s in sizes], "s-", color=plots.PINK, label="bookkeeping / block size 16")
axes[1].axhline(1, color=plots.GREY, lw=0.8, ls=":")
axes[1].set_title("Small blocks waste time")
for ax in axes:
    ax.set_xscale("log", base=2)
    plots.plain_log_ticks(ax.xaxis, [1, 4, 16, 64, 256])
    ax.set(xlabel="block size, tokens", ylim=(0, None))
axes[1].legend()
plt.show()

# %% [markdown]
# *Left: counted, the same on every machine. Right: this machine.* From 1 to 16 waste grows to 6 % and a sixth of the
# requests at once is lost; from 16 to 256 three quarters of the rest. At 256 as few run as with reservation: each
# holds a block or two, and wants one kept free. Bookkeeping falls fast up to 16 and little after. Engines sit there:
# vLLM's default is 16 (`CacheConfig` in its documentation). Waste is counted at the end of each text here; section 1
# counted it at every step, while texts were shorter, so it found more. Our own `PagedCache` gathers by slot, so the
# green curve is what a kernel gains that reads whole blocks. A jump at its right end is torch, which copies so few,
# large rows on one thread.
#
# And the whole engine, in memory for 4 contexts, at the ends:

# %% tags=["nbval-ignore-output"]
for size in pick([1, 256], [1]):
    pair = clock.paired(lambda: answer_all(size), lambda: answer_all(BLOCK), repeats=pick(3, 1), warmup=0)  # noqa: B023
    print(
        f"blocks of {size:3d}: {seen[size][0]:2d} at once, {seen[size][1]:4d} steps, {seen[size][2]} preemptions, "
        f"{pair.ratio.median:.2f} x the time of blocks of {BLOCK}"
    )

# %% [markdown]
# The small end hardly shows: this engine gathers by slot whatever the size, and its bookkeeping is microseconds
# beside a forward. It would show where a kernel reads block by block (chapter 09), or prefix caching hashes them
# (07).
#
# Two more cases in which paging buys nothing: every request as long as the context (nothing is reserved in vain,
# and the gather is still paid, section 6), and a single request (nobody wants the memory that it leaves).

# %% [markdown]
# ## 8. Play
#
# A pool of 128 slots. A request arrives every few steps and grows by a token a step until it ends. Move the step
# and the block size; the title counts.


# %% tags=["nbval-ignore-output"]
def pool_at(step, block_size, total=128):
    """(pool, {name: table}) after so many steps of a small fixed trace; who finds no room is left out."""
    pool, tables, ends = BlockPool(total // block_size, block_size), {}, {}
    lengths = [(9, 14), (17, 5), (5, 30), (12, 9), (21, 12), (6, 20), (14, 26), (8, 9)]
    for now in range(step + 1):
        for name in [name for name in tables if ends[name] == now]:
            tables.pop(name).free(pool)
        for table in tables.values():
            with suppress(NoRoom):
                table.append(pool, 1)
        if now % 2 == 0:
            prompt, answer = lengths[now // 2 % len(lengths)]
            table, name = BlockTable(block_size), f"r{now // 2}"
            try:
                table.append(pool, prompt)
            except NoRoom:
                continue
            tables[name], ends[name] = table, now + answer
    return pool, tables


def draw(ax, step, block_size):
    pool, tables = pool_at(step, block_size)
    total, across = 128, 32
    grid = np.ones((total // across, across, 3)) * 0.95
    for index, table in tables.items():
        color = np.array(to_rgb(plots.PALETTE[int(index[1:]) % 6]))
        held = [block * block_size + i for block in table.blocks for i in range(block_size)]
        for place, slot in enumerate(held):
            grid[slot // across, slot % across] = color if place < table.length else 0.75 + 0.25 * color
    ax.imshow(grid, aspect="auto", extent=(0, across, total // across, 0))
    for row in range(total // across):
        for border in range(0, across + 1, min(block_size, across)):  # a block of 64 fills two rows
            ax.vlines(border, row, row + 1, color="white", lw=1.6)
        if row * across % block_size == 0:
            ax.axhline(row, color="white", lw=3)
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    stored = sum(table.length for table in tables.values())
    text = f"{len(tables)} requests, {stored} tokens in {pool.used_count * block_size} slots of {total}"
    if ax.figure.axes == [ax]:
        ax.set_title(text)
    else:
        ax.set_xlabel(f"{len(tables)} requests, {stored} tokens\nin {pool.used_count * block_size} slots", fontsize=8)


explore(
    draw,
    step=(0, 40, 1, 13),
    block_size=[8, 1, 2, 4, 16, 32, 64],
    static=[dict(block_size=1), dict(block_size=8), dict(block_size=64)],
    height=2.4,
)

# %% [markdown]
# *A colour is a request; pale is held and empty; grey is free. Four rows of 32 slots, the same moment at three
# block sizes. At 64 the pool is two blocks, so two requests hold all of it, whatever they store.*

# %% [markdown]
# ## 9. Say it
#
# **"What is PagedAttention?"**
# - *20 seconds.* KV memory is cut into fixed-size blocks in one pool. A request has a table of blocks and takes a
#   new one when the last is full. Attention reads through the table. So memory is claimed by need, not by the
#   longest possible text.
# - *2 minutes.* Start from the grey area of section 1: reservation. Name the three wastes, show the bars of section
#   6. Then the table and the slot formula (section 3), the 40 lines (section 4), same tokens at every block size
#   (section 5). What it buys is requests at once, hence throughput (section 6, "The same with the model").
# - *Follow-up: does it make attention faster?* No: section 6, "What indirection costs". The batch pays for it.
# - *The number:* at most block_size - 1 empty slots a request, half of that on average (`05.wasted_slots`).
#
# **"Internal or external fragmentation?"**
# - *20 seconds.* Internal: held and never used; paging leaves less than a block a request. External: free but in
#   pieces too small; paging leaves none, since all blocks are alike.
# - *2 minutes.* The table of section 6, row by row. Reserving the context: mostly internal. Knowing the length: no
#   internal, but holes, and room held for later. Blocks: what is free is headroom. Then what is bought with it:
#   the running requests below the table.
# - *Follow-up: why does even the oracle lose?* It holds from the first token what is used at the last.
# - *The number:* 60 to 80 % of KV memory wasted before, under 4 % after: vLLM's figures, from its announcement.
#   Ours: section 6.
#
# **"One prompt, four answers: what happens to the blocks?"**
# - *20 seconds.* Fork copies the table and raises counts; no KV is copied. The first to write into a shared,
#   half-full block copies that block. Full blocks stay shared. n answers cost at most n - 1 copies.
# - *2 minutes.* The four pictures of section 3. Then the table "One prompt, n answers": no copy on a block border.
#   Then the invariant: free + held = all, count = tables that hold it; and the random operations that check it
#   (section 5).
# - *Follow-up: what goes wrong in practice?* A failed allocation that has already raised counts; a slot computed
#   before the copy; a block freed while shared. Exercise, tasks 3 to 5.
# - *The number:* n - 1 copies, or 0 when the prompt is a multiple of the block size.
#
# **"How do you choose the block size?"**
# - *20 seconds.* 16. Large blocks waste (B - 1) / 2 slots a request and share less; small ones cost table entries,
#   bookkeeping and scattered reads.
# - *2 minutes.* Both panels of section 7, then the engine at the ends. Say that a block of the whole context is
#   reservation. On a GPU a kernel must have enough of a block to fill its threads, and prefix caching (chapter 07)
#   shares whole blocks only, which argues for small.
# - *Follow-up: how many requests fit?* slots / (average tokens held + (B - 1) / 2), less headroom: section 2.
# - *Follow-up: and how many blocks does the pool get?* What is left. vLLM runs one forward of the largest step it may
#   meet and notes the peak; of the share of the card that `gpu_memory_utilization` names it takes off weights and
#   that peak, and divides by the bytes of a block in all layers. Chapter 03 does the same by formula.
# - *The number:* 16 tokens; for LLaMA-7B in 16 bits 8 MiB a block, by the formula of section 2.

# %%
print(f"a block of 16 tokens, LLaMA-7B, 16 bits: {2 * 32 * 16 * 32 * 128 * 2 / 2**20:.0f} MiB")

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %%
predictions()

# %% [markdown]
# **Exercise:** `exercises/05_paged_kv.ipynb`: slots, growth, a pool with counts, copy-on-write, a pool that shrinks
# under load, and how many requests fit.
#
# **Papers:** Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*
# (arXiv:2309.06180); Prabhu et al. 2024, *vAttention* (arXiv:2405.04437), which leaves the paging to the GPU's own
# page tables and keeps the cache contiguous for kernels.
#
# **Next:** chapter 06 decides who gets the blocks when there are not enough.
