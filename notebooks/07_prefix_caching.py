# %% [markdown]
# # 07 Prefix caching
#
# **Keep the KV blocks of finished requests, find them again by the tokens that they stand for, and a prompt costs
# only the part that nobody has sent before.**
#
# > *The interviewer asks:* "A thousand users share one system prompt. What do you keep, how do you know that a
# > stored block is the right one, and on which traffic does the cache earn nothing?"
#
# You will be able to
# - predict the hit rate and the TTFT of a chat, a shared document and an agent's tool calls, and measure both;
# - write a cache by chained block hashes in 40 lines, and say what a hash alone does not guarantee;
# - compare block hashes (vLLM) with a radix tree (SGLang), and name the pool size at which either falls apart.
#
# 35 minutes to read. `tiny` ships with the course; where `smollm2-135m` is present one section runs it, and says
# so.

# %%
import inspect
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count

import matplotlib.pyplot as plt
import numpy as np
import torch

from minillm import SamplingParams, load_model, load_tokenizer
from minillm.cache.block_pool import BlockPool, BlockTable, PrefixStats, blocks_for
from minillm.cache.prefix_hash import Entry, HashIndex, hash_block
from minillm.cache.radix import RadixIndex
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.lab import explore, is_fast, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import clock
from minillm.model.generate import generate_naive
from minillm.model.hub import ASSETS, is_available
from minillm.model.layout import pack_linears

model = pack_linears(load_model("tiny", dtype="float32"))
config = model.config
tokenizer = load_tokenizer("tiny")
text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
words = tokenizer.encode(text[:60_000])
SIZE = 16  # tokens a block
print(f"model: tiny, on {model.device}, {torch.get_num_threads()} CPU threads; blocks of {SIZE} tokens")

# %% [markdown]
# ## 1. The waste, measured
#
# Real prompts repeat themselves. Three kinds of traffic, generated here; each request goes on from the prompt *and
# the answer* of its parent: the prompt of a later turn contains what the model really said before.
#
# | trace | shape | what repeats |
# |---|---|---|
# | chat (多轮对话) | users x turns, one system prompt (系统提示词) | the system prompt; each user's whole history |
# | few-shot (少样本) | many questions behind one set of examples, or about one document | all but the question |
# | agent (智能体) | a tree: each call goes on in several ways | tool descriptions; every path down to a fork |


# %%
@dataclass(frozen=True)
class Ask:
    """One request: `tokens` after its parent's prompt and answer (parent None: after nothing)."""

    parent: int | None
    tokens: list


class Words:
    """Pieces of a book, none of them twice."""

    def __init__(self):
        self.place = 0

    def take(self, n):
        self.place += n
        return words[self.place - n : self.place]


def chat(users, turns, system, question):
    book = Words()
    first = book.take(system)
    trace = [Ask(None, first + book.take(question)) for _ in range(users)]
    return trace + [Ask(i, book.take(question)) for i in range(users * (turns - 1))]  # parent: same user, last turn


def few_shot(questions, document, question):
    book = Words()
    first = book.take(document)
    return [Ask(None, first + book.take(question + i % 5)) for i in range(questions)]


def agent(tasks, branches, depth, tools, result):
    book, trace = Words(), []
    first = book.take(tools)
    level = [Ask(None, first + book.take(result)) for _ in range(tasks)]
    for _ in range(depth):
        start = len(trace)
        trace += level
        level = [Ask(start + i, book.take(result)) for i in range(len(level)) for _ in range(branches)]
    return trace


NEW = pick(8, 4)  # tokens of an answer
U, T, S, Q = pick((4, 5, 112, 24), (3, 3, 112, 24))  # users, turns, tokens of the system prompt, of a question
TRACES = {
    "chat": chat(U, T, S, Q),
    "few-shot": few_shot(pick(12, 4), pick(240, 160), 20),
    "agent": agent(pick(2, 1), 2, 3, 96, 28),
}


def waves(trace):
    """The requests in groups: the first turns, then the second ones, ... A request needs its parent's answer."""
    depth = []
    for ask in trace:
        depth.append(0 if ask.parent is None else depth[ask.parent] + 1)
    return [[i for i, d in enumerate(depth) if d == wave] for wave in range(max(depth) + 1)]


@dataclass
class Served:
    """What a trace gave, request by request. ttft: seconds from arrival to the first token."""

    prompts: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    cached: list = field(default_factory=list)
    ttft: list = field(default_factory=list)
    seconds: float = 0.0

    @property
    def hit_rate(self):
        return sum(self.cached) / sum(map(len, self.prompts))


def make_engine(kind, model=model, **options):
    options = {"max_num_seqs": 1, "block_size": SIZE, "num_blocks": 512, **options}
    return Engine(model, EngineOptions(enable_prefix_caching=kind, **options), eos_ids=())


def serve(engine, trace, together=1, new=NEW):
    """Greedy answers of `new` tokens; `together` requests are sent at once, then the next ones."""
    done, asked = [None] * len(trace), SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    for wave in waves(trace):
        for at in range(0, len(wave), together):
            for i in wave[at : at + together]:
                parent = done[trace[i].parent].requests[0].tokens if trace[i].parent is not None else []
                done[i] = engine.add(parent + list(trace[i].tokens), asked)
            while engine.has_work:
                engine.step()
    served = Served(seconds=time.perf_counter() - start)
    for group in done:
        (answer,) = engine.completions(group)
        served.prompts.append(list(group.requests[0].prompt))
        served.outputs.append(answer.token_ids)
        served.cached.append(answer.metrics.cached_tokens)
        served.ttft.append(answer.metrics.ttft)
    return served


def seen_before(served):
    """Of each prompt, the tokens that begin an earlier prompt and answer in the same way: their KV was computed."""

    def common(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

    texts = [prompt + output[:-1] for prompt, output in zip(served.prompts, served.outputs)]
    return [max((common(p, q) for q in texts[:i]), default=0) for i, p in enumerate(served.prompts)]


# %% tags=["nbval-ignore-output"]
serve(make_engine("off"), TRACES["chat"][:1])  # warm-up
off = {name: serve(make_engine("off"), trace) for name, trace in TRACES.items()}
_, axes = plots.figure(1, 3, width=8.4, height=2.7)
for ax, (name, served) in zip(axes, off.items()):
    groups = waves(TRACES[name]) if name != "few-shot" else [[0], list(range(1, len(TRACES[name])))]
    lengths, seen = [len(p) for p in served.prompts], seen_before(served)
    old = [np.mean([seen[i] for i in g]) for g in groups]
    new = [np.mean([lengths[i] - seen[i] for i in g]) for g in groups]
    ax.bar(range(len(groups)), old, color=plots.MEANING["naive"], label="computed before")
    ax.bar(range(len(groups)), new, bottom=old, color=plots.MEANING["prefill"], label="new")
    xlabel = {"chat": "turn", "few-shot": "question", "agent": "depth of the call"}[name]
    ax.set_xticks(range(len(groups)), ["first", "later"] if name == "few-shot" else range(1, len(groups) + 1))
    ax.set(xlabel=xlabel, title=f"{name}: {sum(seen) / sum(lengths):.0%} computed before")
    ax.grid(False, axis="x")
axes[0].set_ylabel("prompt tokens, mean")
axes[0].legend(loc="upper left")
axes[0].set_ylim(0, axes[0].get_ylim()[1] * 1.3)
plt.show()
first, last = (np.median([off["chat"].ttft[i] for i in waves(TRACES["chat"])[turn]]) for turn in (0, -1))
print(f"chat, no prefix cache: TTFT of the last turn is {last / first:.2f} x that of the first (tiny)")

# %% [markdown]
# *Grey: tokens whose K and V were in the pool a moment ago, and were thrown away and computed again.* In a chat the
# grey part grows with every turn, and TTFT with it, while the user types the same few words each time.

# %% [markdown]
# ## 2. Predict
#
# Keep the blocks, and look each prompt up. With u users, t turns, S tokens of system prompt, q tokens a question, a
# tokens an answer, rounding to whole blocks left out:
#
# - prompt of turn i (from 0): `S + q + i (q + a)`
# - found of it: `S + i (q + a)`, since all but the new question was computed; for the very first request nothing
# - hit rate (命中率) = found / sent, summed over all requests
#
# Time to first token (首词元延迟) of a long prompt follows a line, `A + B x computed tokens`: measured without a
# cache at two lengths, that of the whole prompt and that of what a hit leaves, it predicts the warm one.
#
# The last one is a guess. Users come back in turns, each to a context of their own. If the pool holds *three
# quarters* of what they come back for, how much of the hit rate survives? Three quarters is what most people write
# down.

# %% tags=["nbval-ignore-output"]
sent = U * sum(S + Q + i * (Q + NEW) for i in range(T))
found = U * sum(S + i * (Q + NEW) for i in range(T)) - S  # the very first request finds nothing
predict("07.chat_hit_rate", found / sent)

real = is_available("smollm2-135m") and not is_fast()
big_name = "smollm2-135m" if real else "tiny"
big = pack_linears(load_model(big_name, dtype="float32")) if real else model
L = 512 if real else pick(480, 240)  # tokens of the long shared prompt
ids = load_tokenizer(big_name).encode(text[:40_000])


def first_token(engine, prompt):
    """Seconds from arrival to the first token."""
    group = engine.add(prompt, SamplingParams(max_tokens=1, temperature=0.0))
    while engine.has_work:
        engine.step()
    return engine.completions(group)[0].metrics.ttft


left = L + 8 - L // SIZE * SIZE  # tokens that a hit on L leaves of a prompt of L + 8
bare = make_engine("off", big, num_blocks=64)
short_long = {n: np.median([first_token(bare, ids[:n]) for _ in range(pick(6, 3))][1:]) for n in (left, L)}
B = (short_long[L] - short_long[left]) / (L - left)
A = short_long[L] - B * L
predict("07.ttft_ratio", max(A + B * left, 0.0) / (A + B * (L + 8)))
print(f"{big_name}: TTFT = {units.show(A, 's')} + {units.show(B, 's')} x computed tokens; a hit leaves {left}")
predict("07.storm_hits_kept", 0.75)

# %% [markdown]
# ## 3. The idea, drawn
#
# K and V of a token depend on *all* tokens before it. So a block may be reused only after the same prefix, and the
# question "is my prefix stored?" must be quick. Two answers.
#
# **Chained hashes** (链式哈希). A block's key is the hash of its own tokens *and of the key before it*. One
# dictionary look-up a block; equal keys mean equal prefixes.


# %%
def draw_chain(ax, prompts, size=2):
    colors = {}
    palette = iter(
        ["#9CC5E3", "#F3C97A", "#8FD3BE", "#E9A98B", "#DDB5CE", "#C9C9C9", "#F5EFA0", "#B7C7D9", "#E8D5B5"]
    )
    for row, (name, prompt) in enumerate(prompts.items()):
        key = b""
        ax.text(-0.12, -row, name, ha="right", va="center", fontsize=8)
        for place in range(len(prompt) // size):
            chunk = prompt[place * size : (place + 1) * size]
            key = sha256(key + " ".join(chunk).encode()).digest()
            if key not in colors:
                colors[key] = next(palette)
            box = plt.Rectangle((place * 1.25, -row - 0.28), 1, 0.56, fc=colors[key], ec="black", lw=0.8)
            ax.add_patch(box)
            ax.text(place * 1.25 + 0.5, -row + 0.1, " ".join(chunk), ha="center", va="center", fontsize=9)
            ax.text(
                place * 1.25 + 0.5,
                -row - 0.15,
                key.hex()[:6],
                ha="center",
                va="center",
                fontsize=7,
                family="monospace",
            )
            if place:
                ax.annotate(
                    "", (place * 1.25, -row), (place * 1.25 - 0.25, -row), arrowprops={"arrowstyle": "->", "lw": 1.2}
                )
    ax.set(xlim=(-0.9, 5.0), ylim=(-len(prompts) + 0.5, 0.5))
    ax.axis("off")


_, ax = plots.figure(height=2.4)
draw_chain(
    ax,
    {
        "request 1": ["You", "are", "a", "bot", ".", "Hi", "there", "!"],
        "request 2": ["You", "are", "a", "bot", ".", "Bye", "now", "!"],
        "request 3": ["You", "are", "a", "poet", ".", "Hi", "there", "!"],
    },
)
ax.set_title("A block's key is the hash of its tokens and of the key before it (same colour, same KV)")
plt.show()

# %% [markdown]
# *Request 2 shares two blocks with request 1. Request 3 ends in the same words as request 1, `. Hi` and `there !`,
# and shares neither of these blocks: other words came before, so K and V are others. The arrow is what tells them
# apart.*
#
# **A radix tree** (基数树). A path from the root spells a prefix; a node holds the blocks of one stretch. Where two
# prefixes part inside a node, the node is split. This is the library's own tree, fed with five requests.


# %%
class Vocabulary(dict):
    def __missing__(self, word):
        self[word] = len(self)
        return self[word]


def draw_tree(ax, nodes, names, size=2):
    """Nodes of RadixIndex.nodes(), root at the left."""
    children = {i: [j for j, n in enumerate(nodes) if n.parent == i] for i in range(len(nodes))}
    y, rows = {}, count()
    for i in reversed(range(len(nodes))):  # children stand after their parents
        y[i] = np.mean([y[j] for j in children[i]]) if children[i] else next(rows)
    x, width = {}, {}
    for i, node in enumerate(nodes):
        parts = [" ".join(names[t] for t in node.tokens[k : k + size]) for k in range(0, len(node.tokens), size)]
        label = " | ".join(parts)
        width[i] = 0.125 * len(label) + 0.25
        x[i] = 0.7 if node.parent is None else x[node.parent] + width[node.parent] + 0.55
        start = (0.15, y_root) if node.parent is None else (x[node.parent] + width[node.parent], y[node.parent])
        ax.plot([start[0], x[i]], [start[1], y[i]], color=plots.GREY, lw=1, zorder=1)
        face = "#9CC5E3" if any(node.locked) else "#EDEDED"
        ax.add_patch(plt.Rectangle((x[i], y[i] - 0.3), width[i], 0.6, fc=face, ec="black", lw=0.8, zorder=2))
        ax.text(x[i] + width[i] / 2, y[i], label, ha="center", va="center", fontsize=8, zorder=3)
    ax.plot(0.15, y_root, "ko", ms=5)
    ax.set(xlim=(0, max(x[i] + width[i] for i in x) + 0.1), ylim=(-0.6, max(y.values()) + 0.6))
    ax.axis("off")


requests = [
    "You are a bot . Hi there !",
    "You are a bot . Bye now !",
    "You are a bot . Hi there ! Hello . And you",
    "You are a poet . Sing to me",
    "Translate : le chat",
]
ids_of = Vocabulary()
tree, running = RadixIndex(2), {}
pool = BlockPool(40, 2, tree)
_, axes = plt.subplots(2, 1, figsize=(8.2, 4.0), height_ratios=(2, 4))
for i, request in enumerate(requests):
    tokens = [ids_of[word] for word in request.split()]
    hit = pool.match(tokens)
    pool.share(hit)
    table = BlockTable(2, hit, 2 * len(hit))
    table.append(pool, len(tokens) - table.length)
    pool.insert(tokens, table.blocks)
    running[i] = table
    names, y_root = list(ids_of), 0.5 if i == 1 else 1.5
    if i == 1:
        draw_tree(axes[0], tree.nodes(), names)
        axes[0].set_title("After two requests: split where they part")
for i in (0, 1, 3):
    running[i].free(pool)  # three are finished; the others still run
draw_tree(axes[1], tree.nodes(), names)
axes[1].set_title("After five requests")
right = max(ax.get_xlim()[1] for ax in axes)
for ax in axes:
    ax.set_xlim(0, right)
plt.show()

# %% [markdown]
# *`|` separates blocks of two words. Blue: a running request holds it (a lock, 锁定); grey: nobody does, it stays
# until room is needed. Request 2 split request 1's node; request 3, the next turn of 1, made its leaf longer;
# request 4 split `You are | a bot` behind `You are`. Eviction (淘汰) takes the least recently used (最近最少使用)
# grey leaf, never an inner node: what is stored can always be reached.*

# %% [markdown]
# ## 4. Build it
#
# The block pool asks an index seven questions (`PrefixIndex` in `minillm.cache.block_pool`). Here is one in 40 lines.
# Four details carry the weight:
# - **the parent's key is in the key**: otherwise the same words after other words would match;
# - **the tokens are compared on a hit**: a hash proposes, the comparison decides;
# - **the last token is never served**: its logits are what the request came for, so one token must be left to
#   compute;
# - **an evicted block takes its key along**: the block will hold something else in a moment.


# %%
class SmallPrefixCache:
    """key -> (block, all tokens up to its end); unreferenced blocks in order of their last use."""

    def __init__(self, block_size):
        self.block_size, self.stats = block_size, PrefixStats()
        self.entries, self.key_of, self.unreferenced = {}, {}, OrderedDict()

    def prefixes(self, tokens, salt):
        key, size = salt.encode(), self.block_size
        for end in range(size, len(tokens) + 1, size):  # whole blocks only
            key = sha256(key + repr(tokens[end - size : end]).encode()).digest()
            yield key, (salt, *tokens[:end])

    def find(self, tokens, salt):
        blocks = []
        for key, prefix in self.prefixes(list(tokens[:-1]), salt):  # the last token is left to compute
            block, stored = self.entries.get(key, (None, None))
            if stored != prefix:  # not stored, or a collision
                break
            blocks.append(block)
        return blocks

    def longest_prefix(self, tokens, salt=""):
        return len(self.find(tokens, salt)) * self.block_size

    def match(self, tokens, salt=""):
        blocks, size = self.find(tokens, salt), self.block_size
        self.stats.queries, self.stats.hits = self.stats.queries + len(tokens), self.stats.hits + size * len(blocks)
        return blocks

    def insert(self, tokens, blocks, salt=""):
        for block, (key, prefix) in zip(blocks, self.prefixes(list(tokens), salt)):
            if key not in self.entries:  # stored already: the older block stays
                self.entries[key], self.key_of[block] = (block, prefix), key

    def holds(self, block):
        return block in self.key_of

    def reference(self, block):
        self.unreferenced.pop(block, None)

    def release(self, block):
        self.unreferenced[block] = None  # at the end: the most recently used

    def evict(self):
        if self.unreferenced:
            block, _ = self.unreferenced.popitem(last=False)
            del self.entries[self.key_of.pop(block)]  # the key goes with the content
            return block


small = SmallPrefixCache(4)
small.insert([1, 2, 3, 4, 5, 6, 7, 8], [10, 11])
print("longer prompt:        blocks", small.match([1, 2, 3, 4, 5, 6, 7, 8, 9]))
print("the very same prompt: blocks", small.match([1, 2, 3, 4, 5, 6, 7, 8]))
print("other first block:    blocks", small.match([9, 2, 3, 4, 5, 6, 7, 8, 9]))
print("another salt:         blocks", small.match([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="tenant B"))

# %% [markdown]
# The very same prompt finds one block, not two: eight tokens fill two blocks, and the eighth must be computed. A
# whole block is given up for it, since a block is the unit of sharing.
#
# A **salt** (盐) separates tenants: without one, a stranger can time your server and learn whether somebody has
# sent a given prefix. It also stands for whatever else changes K and V, such as a LoRA adapter.

# %% [markdown]
# ## 5. The library's version
#
# The same look-up, from source, and the comparison that a hit must pass:

# %%
print(inspect.getsource(HashIndex._find))
print(inspect.getsource(Entry.follows))

# %% [markdown]
# | `HashIndex` adds | because |
# |---|---|
# | an entry points at its predecessor, keeps one block of tokens | the small one keeps and compares O(n²) tokens |
# | `insert` raises when a block is said to hold other tokens | a stale key is silent: the text is only subtly off |
# | nothing changes when `insert` raises | one bad request must not harm the others |
#
# And the tree's split; the lower half becomes a child and takes the children along:

# %%
print(inspect.getsource(RadixIndex._split))

# %% [markdown]
# | | chained hashes | radix tree |
# |---|---|---|
# | look-up | one dictionary look-up a block | a walk, one look-up a node, tokens compared on the way |
# | trusts | a hash, then compares tokens | tokens only |
# | evicts | any unreferenced block; what came after it may stay, unreachable for a while | leaves only |
# | knows | single blocks | what hangs below what: can order a queue, be drawn, be sent to a router |
# | granularity | whole blocks | whole blocks here; SGLang's can go down to single tokens |
#
# **Same tokens, proved.** Each trace, greedy, float32: without a cache, then with a cold (冷) cache, then again with
# what the first pass left (warm, 热); for both indexes, on one trace for the small cache too, and for some requests
# against the naive loop of chapter 01. Then once more with a hash function that gives *every* block the same key: all
# is a collision (哈希碰撞), and the comparison has to catch each one.

# %%
INDEXES = {
    "small": SmallPrefixCache,
    "hash": HashIndex,
    "radix": RadixIndex,
    "colliding": lambda size: HashIndex(size, lambda parent, tokens: b"same"),
}


def engine_with(index, **options):
    """An engine whose pool asks this index."""
    engine = make_engine("hash", **options)
    engine.pool.index = index
    return engine


runs, checked = {}, 0
for name, trace in TRACES.items():
    for i in range(0, len(trace), pick(5, 6)):
        assert generate_naive(model, off[name].prompts[i], NEW) == off[name].outputs[i]
    for kind, make in INDEXES.items():
        if kind in ("small", "colliding") and name != "few-shot":
            continue  # one trace is enough for these
        engine = engine_with(make(SIZE))
        cold, warm = runs[name, kind] = serve(engine, trace), serve(engine, trace)
        assert cold.outputs == warm.outputs == off[name].outputs
        assert all(found < len(prompt) for found, prompt in zip(warm.cached, warm.prompts))
        engine.pool.check([])
        checked += 2 * len(trace)
        print(f"{name:9s} {kind:10s} found: cold {cold.hit_rate:4.0%}, warm {warm.hit_rate:4.0%} of the prompts")
print(f"{checked} answers from {len(INDEXES)} indexes: all equal to those without a prefix cache")

# %% [markdown]
# The colliding index finds next to nothing, and serves nothing wrong. What if it trusted its keys? Take a hash of
# two bits, so that there are four keys in all, and six prompts that share not one token at the start.


# %% tags=["nbval-ignore-output"]
class Trusting(HashIndex):
    """A prefix cache that believes its hash. Never do this."""

    def _find(self, tokens, salt):
        blocks = []
        for key, _ in self._keys(tokens[:-1], salt):
            if key not in self._entries:
                break
            blocks.append(self._entries[key].block)
        return list(dict.fromkeys(blocks))  # a table must not name a block twice


def two_bits(parent, tokens):
    return bytes([hash_block(parent, tokens)[0] & 3])


six = [Ask(None, words[500 * i : 500 * i + 40]) for i in range(6)]
plain = serve(make_engine("off"), six)
believed = serve(engine_with(Trusting(SIZE, two_bits)), six)
compared = serve(engine_with(HashIndex(SIZE, two_bits)), six)
assert sum(seen_before(plain)) < SIZE and compared.outputs == plain.outputs
assert sum(found > 0 for found in believed.cached) >= 2  # six first blocks, four keys
wrong = [i for i in range(6) if believed.outputs[i] != plain.outputs[i]]
print(f"compared: served {sum(compared.cached)} tokens of strangers, 0 of 6 answers changed")
print(f"believed: served {sum(believed.cached)} tokens of strangers, {len(wrong)} of 6 answers changed")
for i in wrong[:1]:
    print(repr(tokenizer.decode(plain.outputs[i])), "became", repr(tokenizer.decode(believed.outputs[i])))

# %% [markdown]
# Nothing crashes: the answers are fluent and belong to another prompt. With sha256 accidents do not happen. But vLLM,
# which does not compare tokens, long used Python's own `hash`, whose collisions a caller could *build* once its start
# value was known (CVE-2025-25183, February 2025); its default is sha256 since. The comparison here costs one look at
# tokens that are at hand.

# %% [markdown]
# ## 6. Measure it
#
# ### Hit rate and TTFT, turn by turn

# %% tags=["nbval-ignore-output"]
reveal("07.chat_hit_rate", runs["chat", "hash"][0].hit_rate)

_, axes = plots.figure(1, 2, width=8.2, height=2.9)
turns = range(1, T + 1)
per_turn = waves(TRACES["chat"])
for label, served, color in (
    ("no prefix cache", off["chat"], plots.MEANING["naive"]),
    ("hash, cold start", runs["chat", "hash"][0], plots.MEANING["technique"]),
    ("radix, cold start", runs["chat", "radix"][0], plots.GREEN),
    ("hash, same trace again", runs["chat", "hash"][1], plots.SKY),
):
    axes[0].plot(turns, [np.median([served.ttft[i] for i in g]) for g in per_turn], "o-", color=color, label=label)
axes[0].set(xlabel="turn of the chat", title="TTFT by turn (tiny)")
axes[0].set_xticks(list(turns))
plots.unit_axis(axes[0].yaxis, "s", "TTFT, median over users")
axes[0].set_ylim(0, axes[0].get_ylim()[1] * 1.35)
axes[0].legend(loc="upper left", fontsize=7)
bars = {}
for name in TRACES:
    best = sum(seen_before(off[name])) / sum(map(len, off[name].prompts))
    bars[name] = [best, runs[name, "hash"][0].hit_rate, runs[name, "radix"][0].hit_rate]
for k, (label, color) in enumerate(
    (("computed before", plots.MEANING["ceiling"]), ("hash", plots.MEANING["technique"]), ("radix", plots.GREEN))
):
    places = np.arange(len(bars)) + (k - 1) * 0.27
    axes[1].bar(places, [b[k] for b in bars.values()], 0.25, color=color, label=label)
axes[1].set_xticks(range(len(bars)), bars)
axes[1].set(ylabel="share of prompt tokens", ylim=(0, 1.25), title="Hit rate, cold start")
axes[1].set_yticks(np.linspace(0, 1, 6))
axes[1].legend(ncols=3, loc="upper center")
axes[1].grid(False, axis="x")
plt.show()
for name in TRACES:
    h, r = runs[name, "hash"][0], runs[name, "radix"][0]
    print(f"{name:9s} hit rate: hash {h.hit_rate:.1%}, radix {r.hit_rate:.1%}, computed before {bars[name][0]:.1%}")

# %% [markdown]
# *Left: with a cache TTFT stays level while the conversation grows. Right: both indexes find the same, the whole
# blocks of what was computed before. The gap to the red bar is rounding: to blocks, and by the one token that is
# never served.*
#
# Where a large pool holds everything, hash or tree is a matter of taste. The difference comes with pressure and
# with the order of the queue, below.
#
# ### TTFT, cold against warm
#
# One long shared prompt and eight new tokens. Cold: an empty cache. Warm: the prompt is stored. In alternation.

# %% tags=["nbval-ignore-output"]
pairs = []
engine = make_engine("hash", big, num_blocks=blocks_for(L + 16, SIZE) * pick(14, 8))
for r in range(pick(6, 4)):
    shared = ids[r * 7 + 1 : r * 7 + 1 + L]  # begins with another token each time: cold again
    cold_s = first_token(engine, shared + ids[2000 + 8 * r : 2008 + 8 * r])
    warm_s = first_token(engine, shared + ids[4000 + 8 * r : 4008 + 8 * r])
    pairs.append((cold_s, warm_s))
pairs = pairs[1:]  # the first warms the machine up
ratio = clock.Timing(tuple(w / c for c, w in pairs))
reveal("07.ttft_ratio", ratio.median)
print(f"{big_name}: {L} shared tokens + 8 new: warm / cold TTFT {ratio}")
plots.beside(
    [
        dict(
            name="cold",
            here=float(np.median([c for c, _ in pairs])),
            recorded=recorded("prefix.ttft_cold"),
            prediction=A + B * (L + 8),
        ),
        dict(
            name="warm",
            here=float(np.median([w for _, w in pairs])),
            recorded=recorded("prefix.ttft_warm"),
            prediction=max(A + B * left, 0.0),
            ceiling=B * left,
        ),
    ],
    "s",
    f"TTFT of {L} shared + 8 new tokens ({big_name})",
)
plt.show()

# %% [markdown]
# *Orange: the line of section 2. Red: B x the new tokens, without A, the least a hit can cost.* A stands between
# red and orange: the floor of a step, in which weights are read once, however few tokens are new. What the bar has
# beyond orange is the look-up, and attention to all that was found. So the ratio falls with the length of the prompt,
# and a hit on a short one saves little.
#
# ### Throughput
#
# Several requests at once, in alternation with a run without the cache. A hit saves prefill, never decode.

# %% tags=["nbval-ignore-output"]
gain = {}
for name, trace in TRACES.items():
    rounds = [
        {
            kind: serve(make_engine(kind, max_num_seqs=4), trace, together=4).seconds
            for kind in ("off", "hash", "radix")
        }
        for _ in range(pick(3, 1))
    ]
    for kind in ("hash", "radix"):
        gain[name, kind] = clock.Timing(tuple(r["off"] / r[kind] for r in rounds))
        print(f"{name:9s} {kind:5s} throughput {gain[name, kind]} x that without a prefix cache")
plots.bars(
    [f"{name}, {kind}" for name, kind in gain],
    [g.median for g in gain.values()],
    "x",
    f"Throughput with a cold prefix cache / without ({NEW} new tokens, tiny)",
    colors=[plots.MEANING["technique"] if kind == "hash" else plots.GREEN for _, kind in gain],
    better="more",
)
plt.axvline(1.0, color=plots.GREY, lw=1, ls=":")
plt.show()

# %% [markdown]
# *Dotted: no difference.* The gain is Amdahl's law (阿姆达尔定律): prefill's share of the work, times the hit rate.
# With long answers the same hit rate buys less; with one-word answers about a long document it buys the most.
#
# For comparison, and not ours: the SGLang paper (arXiv:2312.07104) reports up to 6.4 x the throughput of other
# systems on its workloads, whole system against whole system, with hit rates of 50 % to 99 %; vLLM's V1
# announcement (January 2025) reports near-zero loss of throughput at a hit rate of 0 %, which is why its cache is
# on by default.
#
# ### A burst misses together
#
# In this library a block can be found once it has been *computed*. Requests of the same step cannot help each other:

# %%
burst = TRACES["few-shot"][:6]
served = serve(make_engine("hash", max_num_seqs=6), burst, together=6)
print(f"cached tokens of {len(burst)} questions about one document, sent at once:", served.cached)
one_by_one = serve(make_engine("hash"), burst)
print("the same, one after the other:                            ", one_by_one.cached)
assert sum(served.cached) < sum(one_by_one.cached) and served.outputs == one_by_one.outputs

# %% [markdown]
# The first step had a budget of 512 tokens and took in all prompts that it had room for, all of them cold. After a
# restart, send one request with the system prompt first ("warm the cache"), then open the door.
#
# It need not be so: vLLM V1 and nano-vllm enter a block when it is *allocated*, so that the second request of a step
# may share it; each layer writes K and V before attention reads them. The price is care: a step that fails must take
# its entries back, or the index promises what was never written.
#
# ### The order of the queue
#
# Questions about three documents arrive interleaved, and the pool has room for about one. First come, first served:
# every question finds its document just evicted. A cache-aware order (缓存感知调度) takes, among those who wait,
# the one with the longest stored prefix; with a limit on how often the head of the queue may be passed over.


# %%
def interleaved(documents, questions, document, question):
    book = Words()
    firsts = [book.take(document) for _ in range(documents)]
    return [Ask(None, firsts[i % documents] + book.take(question)) for i in range(documents * questions)]


document = pick(192, 96)
mixed = interleaved(3, pick(5, 3), document, 20)
room = blocks_for(document + 20 + NEW, SIZE) + 4
results = {}
for kind in ("hash", "radix"):
    for label, options in (("first come", {}), ("cache-aware", {"lookahead": len(mixed)})):
        engine = make_engine(kind, num_blocks=room, **options)
        results[kind, label] = serve(engine, mixed, together=len(mixed))
        print(
            f"{kind:5s} {label:11s} pool of {room} blocks: hit rate {results[kind, label].hit_rate:4.0%}, "
            f"{engine.pool.index.stats.evictions:3d} evictions"
        )
assert len({str(r.outputs) for r in results.values()}) == 1
assert all(results[k, "cache-aware"].hit_rate > results[k, "first come"].hit_rate for k in ("hash", "radix"))

# %% [markdown]
# Same answers, other order, same pool. The SGLang paper proves that a depth-first order over the tree is optimal for
# a batch that is known in advance, given room for its longest request, and that longest-shared-prefix-first is such
# an order; served online, its hit rates were 96 % of optimal on average. The price is fairness, hence `patience` in
# `EngineOptions`.

# %% [markdown]
# ## 7. Where it backfires
#
# ### No shared prefix
#
# Every prompt is hashed, stored and never asked for again. Or it *looks* shared: a time stamp or a user name at the
# top of the system prompt makes every prefix unique from the first block on.

# %% tags=["nbval-ignore-output"]
book = Words()
stranger = [Ask(None, book.take(128)) for _ in range(pick(10, 4))]
stamped = [Ask(None, [i + 10, *words[:96], *words[3000 + 24 * i : 3024 + 24 * i]]) for i in range(len(stranger))]
for name, trace in (("strangers", stranger), ("time stamp first", stamped)):
    served = serve(make_engine("hash"), trace)
    assert sum(served.cached) == 0
    print(f"{name:17s} hit rate {served.hit_rate:.0%}")
moved = [Ask(None, [*words[:96], *words[3000 + 24 * i : 3024 + 24 * i], i + 10]) for i in range(len(stranger))]
print(f"time stamp last   hit rate {serve(make_engine('hash'), moved).hit_rate:.0%}")

pair = clock.paired(
    lambda: serve(make_engine("hash"), stranger),
    lambda: serve(make_engine("off"), stranger),
    repeats=pick(7, 2),
    warmup=pick(1, 0),
)
print(f"strangers: time with the cache / without {pair.ratio}")

index, long = HashIndex(SIZE), list(range(4096))
hashing = clock.timed(lambda: index.longest_prefix(long), repeats=20).median
walking = clock.timed(lambda: sum(1 for _ in index._keys(long, "")), repeats=20).median
print(f"hashing all blocks of a prompt of 4,096 tokens: {units.show(walking, 's')}; a miss in the first block ")
print(
    f"stops the look-up after {units.show(hashing, 's')}; the prompt's prefill takes {B * 4096 / walking:,.0f} x that"
)

# %% [markdown]
# The last line says why the loss is small: hashing is nothing beside computing. What is lost is the gain, by one
# careless line in a template. Put what changes last.
#
# ### Eviction storms
#
# Users come back in turns, each with a context of their own (a contract, a code base) behind the shared system
# prompt, and a new question each time. `replay` asks the index alone, without a model, what a pool of a given size
# would find; it is checked against the engine first.

# %%
KINDS = {"hash": HashIndex, "radix": RadixIndex}


def replay(trace, kind, num_blocks, new=NEW):
    """(hit rate, evictions) of a trace served one by one; answers are made-up tokens."""
    pool, fresh, said, hits, sent = BlockPool(num_blocks, SIZE, KINDS[kind](SIZE)), count(10**6), [], [], 0
    for ask in trace:
        prompt = (said[ask.parent] if ask.parent is not None else []) + list(ask.tokens)
        hit = pool.match(prompt)
        pool.share(hit)
        table = BlockTable(SIZE, hit, len(hit) * SIZE)
        tokens = prompt + [next(fresh) for _ in range(new)]
        table.append(pool, len(tokens) - 1 - table.length)  # the last token is never fed back
        full = (len(tokens) - 1) // SIZE
        pool.insert(tokens[: full * SIZE], table.blocks[:full])
        table.free(pool)
        said.append(tokens)
        hits.append(len(hit) * SIZE)
        sent += len(prompt)
    return sum(hits) / sent, pool.index.stats.evictions, hits


for name, trace in TRACES.items():
    order = [i for wave in waves(trace) for i in wave]
    assert order == list(range(len(trace)))
    for kind in KINDS:
        assert replay(trace, kind, 512)[2] == runs[name, kind][0].cached
print("replay finds exactly what the engine found, request by request")


def returning(users, rounds, system, context, question):
    """Each user comes back `rounds` times, one after the other, about the same context."""
    book = Words()
    first = book.take(system)
    own = [first + book.take(context) for _ in range(users)]
    return [Ask(None, own[i % users] + book.take(question)) for i in range(users * rounds)]


users, rounds, system, context = pick((8, 4, 32, 128), (6, 3, 32, 128))
storm = returning(users, rounds, system, context, SIZE - NEW)  # question and answer fill no whole block
need = system // SIZE + users * (context // SIZE)  # blocks that keep what all users come back for
sizes = sorted({max(round(need * share), (system + context) // SIZE + 1) for share in np.linspace(0.2, 1.3, 34)})
curves = {kind: [replay(storm, kind, size) for size in sizes] for kind in KINDS}
full_rate = replay(storm, "hash", 4096)[0]
tight = round(0.75 * need)
reveal("07.storm_hits_kept", replay(storm, "hash", tight)[0] / full_rate)

_, axes = plots.figure(1, 2, width=8.2, height=2.9)
for kind, color, style in (("hash", plots.MEANING["technique"], "o-"), ("radix", plots.GREEN, "s--")):
    axes[0].plot([s / need for s in sizes], [c[0] for c in curves[kind]], style, color=color, label=kind)
    axes[1].plot([s / need for s in sizes], [c[1] / len(storm) for c in curves[kind]], style, color=color, label=kind)
axes[0].axhline(full_rate, color=plots.MEANING["ceiling"], lw=1, ls=":", label="endless pool")
axes[0].plot([0, 1], [0, full_rate], color=plots.MEANING["prediction"], lw=1, ls="--", label="in proportion")
axes[0].set(xlabel="pool / working set", ylabel="hit rate", ylim=(0, 1.35), title=f"{users} users in turns")
axes[0].set_yticks(np.linspace(0, 1, 6))
axes[0].legend(loc="upper left", ncols=2)
axes[1].set(xlabel="pool / working set", ylabel="blocks evicted a request", title="Evictions")
for ax in axes:
    ax.axvline(1.0, color=plots.GREY, lw=0.8, ls=":")
plt.show()

# %% [markdown]
# *Working set (工作集): the blocks that hold the system prompt once and every user's context.* Below it the hit
# rate does not fall in proportion (orange), it falls off a cliff. Least recently used is the worst rule for users
# who come round in a circle: what it throws out is always what is asked for next. What survives is the system
# prompt, which every request refreshes. Hash and tree fall alike: both follow the same clock. And now with the
# model, in time:

# %% tags=["nbval-ignore-output"]
pools = {"room for all": need + users + 8, "three quarters": tight}
times, seen = {label: [] for label in pools}, {}
for _ in range(pick(2, 1)):
    without = serve(make_engine("off"), storm)
    for label, blocks in pools.items():
        engine = make_engine("hash", num_blocks=blocks)
        served = serve(engine, storm)
        assert served.outputs == without.outputs
        times[label].append(without.seconds / served.seconds)
        seen[label] = served.hit_rate, engine.pool.index.stats.evictions / len(storm)
for label, (rate, evicted) in seen.items():
    print(
        f"{label:14s} {pools[label]:4d} blocks: hit rate {rate:4.0%}, {evicted:4.1f} evictions a request, "
        f"throughput {np.median(times[label]):.2f} x that without a prefix cache"
    )

# %% [markdown]
# What to do about a storm: a larger pool (fewer bits, chapter 14), a second tier in host memory, cache-aware order,
# fewer users per replica (route a user to the replica that holds their prefix), or admission control. And watch
# evictions a request beside the hit rate: few hits without evictions is traffic that shares nothing; with them, a
# pool that is too small.

# %% [markdown]
# ## 8. Play
#
# What each round of users finds, by the index alone. Make the pool smaller, or add users.


# %% tags=["nbval-ignore-output"]
def draw(ax, users, pool_blocks, index):
    rounds, length = 5, 32 + 128 + SIZE - NEW
    rate, evictions, hits = replay(returning(users, rounds, 32, 128, SIZE - NEW), index, pool_blocks)
    found = [np.mean(hits[r * users : (r + 1) * users]) for r in range(rounds)]
    ax.bar(range(1, rounds + 1), [length] * rounds, color=plots.MEANING["prefill"], label="computed")
    ax.bar(range(1, rounds + 1), found, color=plots.MEANING["technique"], label="found in the cache")
    ax.set(xlabel="round", ylabel="prompt tokens", ylim=(0, 250))
    ax.set_title(f"{users} users, {pool_blocks} blocks: hit rate {rate:.0%}, {evictions} evictions")
    if ax.figure.axes == [ax]:
        ax.legend(loc="upper left", ncols=2)


explore(
    draw,
    users=(1, 16, 1, 8),
    pool_blocks=(16, 160, 4, 72),
    index=["hash", "radix"],
    static=[dict(pool_blocks=72), dict(pool_blocks=64), dict(pool_blocks=48)],
    height=3.0,
)

# %% [markdown]
# *Eight users, a working set of 66 blocks. Blue is found, green computed. Two blocks too few already cost every
# user the end of their context; three quarters of the set leave the system prompt alone.*

# %% [markdown]
# ## 9. Say it
#
# **"How does prefix caching work?"**
# - *20 seconds.* KV blocks of finished requests stay in the pool. A new prompt is cut into blocks; each block's key
#   is a hash of its tokens and the key before it; as long as keys are found, the request shares these blocks, and
#   prefill starts behind them.
# - *2 minutes.* Draw the chain (section 3): K and V depend on all that came before, so the parent's key must be in
#   the key. A hit raises reference counts; blocks nobody holds stay, in order of last use, and are evicted when the
#   free list is empty. The last token is always computed, for its logits. Tokens are compared on a hit (section 5),
#   so a collision costs a hit and never an answer. A salt separates tenants and adapters.
# - *Follow-up: what if the whole prompt is stored?* Then its last block is computed again; an engine without that
#   rule has nothing to run and no logits.
# - *The number:* TTFT warm / cold is about (tokens left / tokens in all) plus the floor of one step (section 6).
#
# **"Block hashes or a radix tree?"**
# - *20 seconds.* They find the same blocks (section 6). Hashes are a dictionary, simple and flat; the tree compares
#   tokens, evicts leaves only, and knows which requests hang together.
# - *2 minutes.* vLLM hashes, SGLang keeps a tree. Under hashes a parent may be evicted before its child; freeing
#   tail first avoids it. The tree gives cache-aware scheduling: serve those who share a branch one after the other
#   ("The order of the queue", section 6). It pays with splits, locks and pointers in Python on the hot path.
# - *Follow-up: why not evict inner nodes?* What hangs below could no longer be reached, and would take up room.
# - *The number:* SGLang's paper: hit rates from 50 % to 99 %, up to 6.4 x throughput, theirs, on their workloads.
#
# **"When does it not help?"**
# - *20 seconds.* No shared prefix; long answers, since decode is untouched; a pool below the working set.
# - *2 minutes.* A time stamp at the top of the prompt gives a hit rate of 0 (section 7). A burst after a restart
#   misses together (section 6). Below the working set LRU falls off a cliff: users in turns always ask for what was
#   just evicted. Cost without hits: hashing, a vanishing share of prefill.
# - *Follow-up: the chat history is the same, and still the last turn misses. Why?* What comes back is text. If the
#   client sends the answer as a string, tokenising it again may cut it elsewhere; if the template strips the
#   reasoning of earlier turns, the prefix ends where the first of them stood. And with several replicas the router
#   must know who holds what.
# - *Follow-up: few hits: how do you tell a storm from traffic that shares nothing?* By evictions a request, and by
#   the age of what is evicted.
# - *The number:* working set = shared prefix + users x what is their own; stay above it.
#
# **"Is it safe to share a cache between customers?"**
# - *20 seconds.* Contents do not leak if tokens are compared; timing does: a fast first token says that somebody
#   sent this prefix. Salt by tenant.
# - *2 minutes.* Show the salt in section 4 and the colliding hash in section 5. What else must be in the key:
#   adapter, image contents, anything that changes K and V without changing token ids.
# - *Follow-up: what does a salt cost?* The hits between tenants, the public system prompt included.
# - *The number:* 0 tokens of strangers served when keys collide and tokens are compared (section 5).

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %% tags=["nbval-ignore-output"]
predictions()

# %% [markdown]
# **Exercise:** `exercises/07_prefix_caching.ipynb`: chained keys, the longest stored prefix, eviction that respects
# references, a radix tree, an engine that serves a stranger's block, and the hit rate of a chat by formula.
#
# **Papers:** Zheng et al. 2024, *SGLang: Efficient Execution of Structured Language Model Programs*
# (arXiv:2312.07104), for RadixAttention and cache-aware scheduling; Kwon et al. 2023, *Efficient Memory Management
# for Large Language Model Serving with PagedAttention* (arXiv:2309.06180), for the blocks that can be shared; Gim
# et al. 2024, *Prompt Cache* (arXiv:2311.04934), for reuse of pieces that are not prefixes.
#
# **Next:** Part III leaves the scheduler and goes down to kernels: chapter 08, FlashAttention.
