# %% [markdown]
# # 17 Medusa and EAGLE
#
# **Draft from what the target has already computed, draft several continuations at once, and verify the whole tree
# in one forward.**
#
# > *The interviewer asks:* "A chain of draft tokens dies at its first wrong guess. How do Medusa and EAGLE get more
# > tokens out of one target call, what does tree attention mask, and why do neither pay at batch 32?"
#
# You will be able to
# - build the mask and the positions of a draft tree, and keep the accepted path in the cache;
# - choose the tree with the most expected tokens for a budget of nodes, by formula;
# - say what Medusa's heads do not know, what EAGLE adds, and which acceptance rule changes the distribution.
#
# 35 minutes to read. All of it runs on `tiny`, with heads that ship with the course.

# %%
import inspect

import matplotlib.pyplot as plt
import numpy as np
import torch

from minillm import SamplingParams, load_model, load_tokenizer
from minillm.cache.generate import generate_cached
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.speculation import Speculator
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal
from minillm.measure import clock
from minillm.model.attention import naive_attention
from minillm.model.hub import ASSETS
from minillm.model.sampling import Sampler
from minillm.speculative.draft_model import DraftModel
from minillm.speculative.eagle import Eagle, EagleHead
from minillm.speculative.heads import load_heads, read_facts
from minillm.speculative.medusa import Medusa, MedusaHeads, typical
from minillm.speculative.proposer import Context, Draft
from minillm.speculative.train import guessed_right
from minillm.speculative.tree import best_shape, expected_tokens, tree_mask
from minillm.speculative.verify import verify

model = load_model("tiny", dtype="float32", device="cpu")
tokenizer, config = load_tokenizer("tiny"), model.config
facts = {kind: read_facts("tiny", kind) for kind in ("medusa", "eagle")}
heads = load_heads(MedusaHeads(config.hidden_size, len(facts["medusa"]["accuracy"])), "tiny", "medusa")
layer = load_heads(EagleHead(config), "tiny", "eagle")
small = load_model("tiny-draft", dtype="float32", device="cpu")
text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
held_out = np.array(tokenizer.encode(text[: pick(60_000, 24_000)]))
starts = range(900, 9000, 900)[: pick(8, 3)]
prompts = [held_out[i : i + 24].tolist() for i in starts]
print(f"model: tiny, on cpu, {torch.get_num_threads()} threads; {len(prompts)} prompts from a book it has not read")
for kind, part in (("Medusa", heads), ("EAGLE", layer), ("tiny-draft", small), ("tiny", model)):
    print(f"{kind:>11s}: {sum(p.numel() for p in part.parameters()):>9,} parameters")
for kind, fact in facts.items():
    print(f"{kind}: trained on {fact['tokens']:,} tokens in {fact['seconds'] / 60:.0f} minutes")

# %% [markdown]
# ## 1. The waste, measured
#
# Chapter 16's draft is a chain. At its first wrong token it ends, and what was drafted behind that is thrown away.
# But when the draft's first choice is wrong, is its second right? Below, on text that nothing here was trained on:
# how often is the guess of each rank what the target itself would say?

# %%
accuracy = {
    "EAGLE, next token": guessed_right("eagle", model, layer, held_out)[0],
    **{
        f"Medusa, {d + 1} ahead": row
        for d, row in enumerate(guessed_right("medusa", model, heads, held_out))
        if d in (0, 1, 3)
    },
}
_, ax = plots.figure(height=3.0)
for i, (name, row) in enumerate(accuracy.items()):
    ax.plot(range(1, 9), np.cumsum(row), "os^d"[i] + "-", color=plots.PALETTE[i], label=name)
ax.set(
    xlabel="guesses that are tried",
    ylabel="one of them is right",
    ylim=(0, 1),
    title="The second guess is worth a try (tiny)",
)
ax.legend()
plt.show()
one = accuracy["EAGLE, next token"]
assert sum(one[:4]) > 1.3 * one[0]
print(f"EAGLE's first guess is right at {one[0]:.0%} of the places; one of its first four at {sum(one[:4]):.0%}")
print(
    f"so at {(sum(one[:4]) - one[0]) / (1 - one[0]):.0%} of the places where a chain would die, a fan of four lives"
)

# %% [markdown]
# *Cumulative: at x = 1 a chain's chance, at x = 4 that of four siblings. The target's forward is bound by reading
# weights (chapter 16), so the siblings cost little more than the chain, as long as the batch is small.*

# %% [markdown]
# ## 2. Predict
#
# - *Bytes of the Medusa heads* in 16 bits: H heads, each one matrix d x d and a bias: `2 H (d² + d)`. The vocabulary
#   matrix is the target's.
# - *True entries of a tree's mask*: the last known token sees itself; a node of depth t sees that token and t nodes:
#   `1 + sum over nodes of (1 + depth)`.
# - *Tokens a call* with Medusa: the bonus, and each node that is right with all nodes above it. If depths were
#   independent: `1 + sum over nodes of the product of accuracies down to it`. For a chain of 4 and the best tree
#   of 12.

# %%
table = facts["medusa"]["accuracy"]  # [depth][rank], measured when the heads were trained
chain, tree = best_shape([row[:1] for row in table], 4), best_shape(table, 12)
H, d = len(table), config.hidden_size
predict("17.medusa_bytes", 2 * H * (d * d + d), "B")
predict("17.mask_entries", 1 + sum(1 + depth for depth in tree.depths), "entries")
predict("17.chain_tokens", expected_tokens([row[:1] for row in table], chain), "tokens")
predict("17.tree_tokens", expected_tokens(table, tree), "tokens")

# %% [markdown]
# ## 3. The idea, drawn
#
# A draft tree (草稿树) as EAGLE makes it for a real text. All its nodes go through the target in one forward, in one
# row of tokens. Two of them may stand at the same **position** without seeing each other: that is what the **tree
# attention mask** (树注意力掩码) is for.


# %%
def whiteboard(axes, draft, names):
    depths, below, y, top = draft.depths(), draft.children(), {}, [0.0]

    def place(node):  # leaves from the top down, parents in the middle of their children
        kids = below[node + 1]
        if not kids:
            y[node] = top[0]
            top[0] -= 1
        else:
            for kid in kids:
                place(kid)
            y[node] = (y[kids[0]] + y[kids[-1]]) / 2

    place(-1)
    for node in range(-1, len(draft)):
        x = 0 if node < 0 else depths[node]
        if node >= 0:
            parent = draft.parent(node)
            px = 0 if parent < 0 else depths[parent]
            axes[0].plot([px, x], [y[parent], y[node]], color=plots.GREY, lw=1, zorder=1)
        color = "#FAEBCB" if node < 0 else "#DCEFFA"
        axes[0].text(
            x, y[node], names[node + 1], ha="center", va="center", fontsize=7.5, zorder=2,
            bbox=dict(boxstyle="round,pad=0.25", facecolor=color, edgecolor="#777", lw=0.6),
        )  # fmt: skip
    axes[0].set(
        xlim=(-0.5, max(depths) + 0.5),
        xticks=range(max(depths) + 1),
        yticks=[],
        xlabel="position after the last known token",
    )
    axes[0].set_title("The tree", loc="left")
    axes[0].grid(False)
    mask = tree_mask(draft)
    axes[1].imshow(~mask, cmap="Greys", vmin=-0.4, vmax=1.3)
    axes[1].set(xticks=range(len(mask)), yticks=range(len(mask)))
    axes[1].set_xticklabels(names, rotation=90, fontsize=6.5)
    axes[1].set_yticklabels(names, fontsize=6.5)
    axes[1].set_title("The mask: a row sees the light columns", loc="left", fontsize=9)
    axes[1].grid(False)


@torch.no_grad()
def eagle_draft(prompt, most=4, nodes=9):
    eagle = Eagle(model, layer, 1, nodes=nodes)
    eagle.observe("a", 0, model.hidden(torch.tensor([prompt[:-1]]))[0])
    state = Sampler(0).start(SamplingParams(temperature=0), prompt)
    return eagle.propose([Context("a", prompt, most, state)])[0]


example = tokenizer.encode("And the LORD said to")
draft = eagle_draft(example)
names = [repr(tokenizer.decode([t]))[1:-1] for t in (example[-1], *draft.tokens)]
_, axes = plots.figure(1, 2, width=7.6, height=3.4)
whiteboard(axes, draft, names)
plt.show()
assert int(tree_mask(draft).sum()) == 1 + sum(1 + depth for depth in draft.depths())
reveal("17.mask_entries", int(tree_mask(Draft([0] * len(tree), list(tree.parents))).sum()))

# %% [markdown]
# *Left: nodes in one column share a position. Right: the same nodes in the order in which they are packed; below the
# diagonal, dark squares are cousins, which would have been visible in a chain. All stored tokens of the text stand to
# the left of this square, and every row sees them.*
#
# Where do the guesses come from, without a second model to feed?
# - **Medusa** (多头草稿): extra heads on the target's last hidden state. Head *d* says the token *d* places beyond
#   the next one. It is one small matrix a head, and no head knows what the others chose.
# - **EAGLE** (特征级草稿): one decoder layer that continues **features** (特征), the hidden states that the target's
#   head scores. A feature does not say which token was drawn from it; EAGLE feeds that token's embedding beside it:
#   `f'[i+1] = layer(fuse([embed(t[i+1]), f[i]]))`. Each guess knows the path above it.

# %% [markdown]
# ## 4. Build it
#
# A tree-masked cache, and Medusa's loop over it. Positions are `n + depth`; what is accepted stays in the cache, in
# order, and the rest is dropped.


# %%
class SmallTreeCache:
    """K and V of what is kept, then of the tree in flight. mask [new, new]: who sees whom among the new."""

    def __init__(self):
        self.k, self.v, self.length = {}, {}, 0

    def attend(self, layer, q, k, v):  # q [new, heads, dim]
        for store, new in ((self.k, k), (self.v, v)):
            old = store.get(layer.index, new[:0])[: self.length]
            store[layer.index] = torch.cat((old, new))  # [length + new, kv_heads, dim]
        mask = torch.cat((self.mask.new_ones(len(q), self.length), self.mask), 1)  # [new, length + new]
        heads_first = (x.transpose(0, 1)[None] for x in (q, self.k[layer.index], self.v[layer.index]))
        return naive_attention(*heads_first, mask, layer.scale)[0].transpose(0, 1)

    def keep(self, rows):
        index = torch.tensor([*range(self.length), *(self.length + r for r in rows)])
        for store in (self.k, self.v):
            store.update({i: x[index] for i, x in store.items()})
        self.length += len(rows)


@torch.inference_mode()
def medusa_tokens(prompt, count, shape):
    cache, out, calls = SmallTreeCache(), [], 0
    tokens, depths, below = prompt, list(range(len(prompt))), None
    cache.mask = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
    while len(out) < count:
        positions = torch.tensor(depths) + cache.length
        h = model.hidden(torch.tensor(tokens), positions, cache)  # [new, hidden]
        said, path = model.logits(h).argmax(-1).tolist(), list(range(len(prompt))) if below is None else [0]
        while below and (right := [c for c in below[path[-1]] if tokens[c + 1] == said[path[-1]]]):
            path.append(right[0] + 1)  # node c is row c + 1
        out += [said[row] for row in (path[-1:] if below is None else path)]
        cache.keep(path)
        guesses = model.logits(heads(h[path[-1]])).topk(8).indices.tolist()  # [heads, 8]
        draft = shape.fill(guesses)
        tokens, depths, below = [out[-1], *draft.tokens], [0, *draft.depths()], draft.children()
        cache.mask, calls = tree_mask(draft), calls + 1
    return out[:count], calls


count = pick(48, 24)
plain = [generate_cached(model, prompt, count) for prompt in prompts]
ours = [medusa_tokens(prompt, count, tree) for prompt in prompts]
assert [tokens for tokens, _ in ours] == plain
print(
    f"{len(prompts)} x {count} tokens, the same as plain greedy decoding, in {sum(c for _, c in ours)} target calls"
)

# %% [markdown]
# ## 5. The library's version
#
# In the engine a tree is an entry of the batch like any other: some requests bring one, some a chunk of a prompt.
# The mask goes to the paged cache in the step's plan; `Runner.keep` moves the accepted nodes' K and V to the slots
# where a plain run would have written them; the block table is cut behind them. One `verify` judges chains and trees.

# %%
print(inspect.getsource(tree_mask))
print(inspect.getsource(EagleHead.forward))
print(inspect.getsource(Medusa.propose))


# %%
def answer(proposer=None, lengths=4, params=None, walk=None, texts=prompts):
    """Tokens of every prompt, one request at a time, and what was counted."""
    params = params or SamplingParams(max_tokens=count, temperature=0)
    speculator = proposer and Speculator(proposer, lengths, walk)
    engine = Engine(model, EngineOptions(num_blocks=64), tokenizer, eos_ids=(), seed=0, speculator=speculator)
    said = []
    for prompt in texts:
        group = engine.add(prompt, params)
        while engine.has_work:
            engine.step()
        said.append(engine.completions(group)[0].token_ids)
    return said, speculator and speculator.stats


def medusa(nodes=12, tree=True):
    return Medusa(model, heads, table, nodes=nodes, tree=tree)


def eagle(nodes=12, tree=True):
    return Eagle(model, layer, 8, nodes=nodes, tree=tree)


rates = {}
for name, proposer in (("Medusa", medusa()), ("Medusa, chain", medusa(tree=False)), ("EAGLE", eagle())):
    said, stats = answer(proposer)
    assert said == plain
    rates[name] = stats.tokens_per_call
    if name == "Medusa, chain":
        reveal("17.chain_tokens", stats.tokens_per_call)
    elif name == "Medusa":
        reveal("17.tree_tokens", stats.tokens_per_call)
    print(f"{name:>14s}: the same tokens, {stats.tokens_per_call:.2f} a call")
reveal("17.medusa_bytes", sum(p.numel() * 2 for p in heads.parameters()))

# %% [markdown]
# The prediction for trees is on text from a book; the run is on what the model itself says, which repeats itself more
# and so is easier to guess.
#
# ## 6. Measure it
#
# Tokens a call at **equal verification**: every method gets the same number of draft tokens in the target's forward.
# In brackets the drafting is added: multiply-adds of target and draft for each token that comes out, in units of a
# plain token.


# %%
def weights_read(module):
    """Multiply-adds a token: matrices, the embedding left out (it is looked up)."""
    return sum(p.numel() for name, p in module.named_parameters() if p.dim() == 2 and "embed" not in name)


head_cost = config.vocab_size * config.hidden_size
full = weights_read(model) + head_cost
draft_cost = {
    "draft model": weights_read(small) + config.vocab_size * small.config.hidden_size,
    "Medusa": weights_read(heads) / H + head_cost,  # a head
    "EAGLE": weights_read(layer) + head_cost,
}
budgets, results = pick([1, 2, 4, 8, 16], [2, 8]), {}
methods = {
    "draft model, chain": lambda n: (DraftModel(small, 2), n, n),
    "Medusa, chain": lambda n: (medusa(tree=False), n, H),
    "Medusa, tree": lambda n: (medusa(n), 4, H),
    "EAGLE, chain": lambda n: (eagle(tree=False), n, n),
    "EAGLE, tree": lambda n: (eagle(n), min(n, 6), 1 + 4 * (min(n, 6) - 1)),
}
for name, make in methods.items():
    for n in budgets:
        if (name == "Medusa, chain" and n > H) or (name == "EAGLE, chain" and n > 8):
            continue
        proposer, lengths, fed = make(n)
        said, stats = answer(proposer, lengths)
        assert said == plain
        rows = 1 + stats.drafted / stats.calls
        compute = (rows * full + fed * draft_cost[name.split(",")[0]]) / stats.tokens_per_call / full
        results[name, n] = (stats.tokens_per_call, rows, compute)
print(f"{'':>20s}" + "".join(f"{f'{n} nodes':>20s}" for n in budgets))
for name in methods:
    cells = [results.get((name, n)) for n in budgets]
    print(f"{name:>20s}" + "".join(f"{f'{c[0]:.2f} ({c[2]:.1f} x)' if c else '':>20s}" for c in cells))
print("tokens a call, and in brackets multiply-adds a token against plain decoding")

_, ax = plots.figure(height=3.2)
for i, name in enumerate(methods):
    points = [results[name, n][:2] for n in budgets if (name, n) in results]
    ax.plot(
        [rows for _, rows in points], [t for t, _ in points], "osD^v"[i] + "-", color=plots.PALETTE[i], label=name
    )
ax.set(
    xlabel="tokens in the target's forward",
    ylabel="tokens a call",
    ylim=(1, None),
    title="Tokens a call at equal verification (tiny, greedy)",
)
ax.legend()
plt.show()
most = max(budgets)
assert results["Medusa, tree", most][0] > results["Medusa, chain", min(budgets)][0]

# %% [markdown]
# *Each curve flattens: the next node is always less likely than the one before. A chain pays for depth, a tree for
# breadth. Few nodes are better spent on EAGLE's chain than on its tree: the tree takes the paths that the draft finds
# likeliest, and the draft is less sure than it is right, so it branches too early for a greedy target. By how much?*

# %%
with torch.inference_mode():
    rows = torch.from_numpy(held_out[: len(held_out) // 256 * 256]).view(-1, 256)[:20]  # [20, 256]
    features, positions = model.hidden(rows), torch.arange(255).expand(len(rows), -1)
    sure, first = model.logits(layer(features[:, :-1], model.embed(rows[:, 1:]), positions)).softmax(-1).max(-1)
    right = (first == model.logits(features[:, 1:]).argmax(-1)).float().mean()
assert sure.mean() < right
print(
    f"EAGLE gives its first choice {sure.mean():.2f} on average; "
    f"a greedy target makes the same choice at {right:.2f} of the places"
)

# %% [markdown]
# The heads here were trained for minutes on a busy CPU core, on the few tokens that the first cell prints;
# `tiny-draft` saw the whole corpus. So this is not a ranking of the methods: published ones train for days, and then
# EAGLE leads (the papers report 2.7 to 3.5 x for EAGLE on LLaMA2-Chat 70B, 2.2 to 3.6 x for Medusa: their models,
# their GPUs).
#
# Time, on this machine, against plain decoding: pairs of runs that alternate.

# %% tags=["nbval-ignore-output"]
some = prompts[: pick(3, 1)]
for name, make in (("EAGLE, tree of 8", lambda: eagle(8)), ("Medusa, tree of 8", lambda: medusa(8))):
    pair = clock.paired(lambda: answer(texts=some), lambda: answer(make(), texts=some), repeats=pick(5, 2), warmup=1)  # noqa: B023
    print(f"{name}: {pair.ratio.median:.2f} x plain decoding's speed at batch 1")
for name in ("speculative.tiny.eagle.t0.ratio", "speculative.tiny.medusa.t0.ratio"):
    print(f"on a GPU, {name}: {recorded(name) or 'not measured'}")

# %% [markdown]
# Under 1 it loses. `tiny` is so small that its step costs little more than a level of drafting: dozens of small
# operations, each paying for its launch. That is chapter 16's second failure, a target too cheap to be worth guessing
# for. Tokens a call is what carries over to a large target; time does not.

# %% [markdown]
# **Sampling: typical acceptance (典型接受).** Medusa's paper offers another rule than rejection sampling: keep a
# drafted token where `p(x) > min(epsilon, delta exp(-entropy))`. It keeps more. It also **changes the
# distribution**: whatever was drafted and is likely enough comes out every time. One real place of a text, the two
# likeliest tokens drafted, the next token drawn over and over:

# %%
with torch.no_grad():
    logits = model(torch.tensor([prompts[0]]))[0, -1:]  # [1, vocab]
p = logits.softmax(-1)[0]
top = p.topk(6).indices
guess = Draft(top[:2].tolist(), [-1, -1])
trials, shares = pick(4000, 1000), {}
for name, walk in (("exact", None), ("typical", typical())):
    states = [Sampler(0).start(SamplingParams(temperature=1.0, seed=i), [1]) for i in range(trials)]
    verdicts = verify(logits.expand(3 * trials, -1), [guess] * trials, states, walk)
    drawn = torch.tensor([v.tokens[0] for v in verdicts])
    shares[name] = torch.bincount(drawn, minlength=config.vocab_size) / trials
noise = 4 * (0.25 / trials) ** 0.5
assert (shares["exact"][top] - p[top]).abs().max() < noise
distance = {name: float((share[top] - p[top]).abs().max()) for name, share in shares.items()}
_, ax = plots.figure(height=2.8)
for i, (name, share) in enumerate((("the model's own", p), *shares.items())):
    ax.bar(np.arange(6) + 0.27 * (i - 1), share[top], 0.25, color=plots.PALETTE[i], label=name)
ax.set_xticks(range(6), [repr(tokenizer.decode([t])) for t in top.tolist()])
ax.set(ylabel="share of draws", title="The next token: exact and typical acceptance")
ax.legend()
plt.show()
print(f"largest difference from p: exact {distance['exact']:.3f}, typical {distance['typical']:.3f}")

# %% [markdown]
# *Exact verification draws what the model would draw. Typical acceptance says one drafted token as often as it is
# drafted. It suits a product that wants plausible text fast; it does not suit an evaluation.*

# %%
warm = SamplingParams(max_tokens=count, temperature=1.0, seed=3)
for name, walk in (("exact", None), ("typical", typical())):
    said, stats = answer(medusa(), params=warm, walk=walk)
    same = said == answer(params=warm)[0]
    print(f"temperature 1, {name:>7s}: {stats.tokens_per_call:.2f} tokens a call; as plain with this seed: {same}")
    assert walk is not None or same

# %% [markdown]
# ## 7. Where it backfires: large batches
#
# A tree of 12 is 13 tokens in the forward where plain decoding has one. At batch 1 most of the forward's time is
# fixed cost, so 13 tokens take far less than 13 times as long. At batch 32 it is 416 tokens against 32: arithmetic,
# and each token costs what it costs. Speculation wins while `time(batch x 13) / time(batch)` stays under the tokens a
# call.


# %% tags=["nbval-ignore-output"]
@torch.inference_mode()
def forward(rows):
    model(torch.full((rows, 1), 7))  # rows tokens, weights read once


batches = pick([1, 2, 4, 8, 16, 32, 64], [1, 8, 32])
cost = []
for batch in batches:
    pair = clock.paired(lambda: forward(13 * batch), lambda: forward(batch), repeats=pick(15, 7), warmup=2)  # noqa: B023
    cost.append(pair.ratio.median)
gain = rates["EAGLE"]  # 12 nodes, section 5
_, ax = plots.figure(height=3.0)
ax.plot(batches, cost, "o-", color=plots.RED, label="cost: 13 tokens a request against 1")
ax.axhline(gain, color=plots.BLUE, label=f"gain: EAGLE's tokens a call, {gain:.2f}")
ax.set_xscale("log", base=2)
plots.plain_log_ticks(ax.xaxis, batches)
ax.set(
    xlabel="requests in the batch",
    ylabel="ratio",
    ylim=(0, None),
    title="A tree's cost grows with the batch, its gain does not",
)
ax.legend()
plt.show()
for batch, ratio in zip(batches, cost):
    print(f"batch {batch:3d}: the tree's forward takes {ratio:5.2f} x plain's; drafting comes on top")

# %% [markdown]
# *Where red is above blue, plain decoding is faster. This is the forward alone: the drafting and the bookkeeping come
# on top. On a GPU the crossing lies further right, at the batch where decode meets the roofline's ridge (chapter 00),
# and moves left by the factor 13. So engines speculate at low load and stop at high load: `AdaptiveLength` of
# chapter 16 does, from its own measurements.*

# %% [markdown]
# ## 8. Play
#
# The best tree for a budget of nodes, if the first guess is right with probability `first`, the second in 40 % of
# the other cases, and each later one 0.6 times as often as the one before. A sure draft wants a chain; an unsure
# one wants a fan.


# %% tags=["nbval-ignore-output"]
def draw(ax, nodes, first):
    row = [first, *((1 - first) * 0.4 * 0.6**r for r in range(5))]
    shape = best_shape([row] * 8, nodes)
    draft = Draft([0] * len(shape), list(shape.parents))
    depths, width = draft.depths(), {}
    place = {-1: (0, 0)}
    for node, depth in enumerate(depths):
        place[node] = (depth, -width.get(depth, 0))
        width[depth] = width.get(depth, 0) + 1
    for node in range(len(draft)):
        (x0, y0), (x1, y1) = place[draft.parent(node)], place[node]
        ax.plot([x0, x1], [y0, y1], "o-", color=plots.BLUE, ms=4, lw=0.9)
    ax.set(xlim=(-0.4, 8.4), ylim=(-7, 0.8), yticks=[], xticks=range(0, 9, 2))
    ax.grid(False)
    label = f"{expected_tokens([row] * 8, shape):.2f} tokens a call, depth {max(depths)}"
    if ax.figure.axes == [ax]:
        ax.set_title(label)
    ax.set_xlabel(label if ax.figure.axes != [ax] else "depth", fontsize=8)


explore(
    draw,
    nodes=(1, 24, 1, 8),
    first=[0.5, 0.3, 0.7, 0.9],
    static=[dict(first=0.3), dict(first=0.6), dict(first=0.9)],
    height=2.4,
)

# %% [markdown]
# *Eight nodes at three first-guess accuracies. Medusa fixes one such tree for all texts; EAGLE-2 grows another at
# every step, from the draft's own probabilities, which tell where it is sure.*

# %% [markdown]
# ## 9. Say it
#
# **"What is tree attention?"**
# - *20 seconds.* Many draft continuations share prefixes: a tree. Its nodes are packed into one forward; each sees
#   the stored text, its ancestors and itself. Positions are the depth, so siblings share one. One forward then
#   holds the target's answer after every node.
# - *2 minutes.* The two pictures of section 3. Then the 40 lines of section 4: mask, positions, walk, keep. In the
#   engine: K and V of the accepted path move together, the block table is cut (section 5).
# - *Follow-up: is it lossless?* Yes: the walk follows what the target says; greedy is identical (section 5), sampled
#   text is what plain decoding draws with the same seed (section 6).
# - *The number:* a tree of n nodes has `1 + sum (1 + depth)` visible pairs (`17.mask_entries`).
#
# **"Medusa or EAGLE?"**
# - *20 seconds.* Medusa: extra heads on the last hidden state, all guesses at once, each blind to the others. EAGLE:
#   one layer, step by step, on the target's features and the chosen token, so each guess knows its path. EAGLE
#   accepts more, and costs a small forward a level.
# - *2 minutes.* Section 1's curves: accuracy falls with the distance for Medusa's heads. Then why the token goes in:
#   the feature does not say what was drawn from it. Then section 6's table at equal nodes.
# - *Follow-up: why static trees for one, dynamic for the other?* EAGLE's probabilities are conditional on the path,
#   so they say where to branch (EAGLE-2). Medusa's are not; its shape comes from average accuracies.
# - *The number:* H (d² + d) weights for Medusa when the vocabulary matrix is shared; one layer for EAGLE.
#
# **"What does typical acceptance give up?"**
# - *20 seconds.* The distribution. It keeps a drafted token if p is above an entropy-dependent threshold, with no
#   dice.
# - *2 minutes.* The bars of section 6. Rejection sampling is exact and keeps less at high temperature; typical keeps
#   more, and the draft decides what is said among the likely tokens.
# - *Follow-up: at temperature 0?* Both are the same: keep what is the likeliest.
# - *The number:* epsilon 0.09 and delta 0.3, the defaults of Medusa's code.
#
# **"When does it not pay?"**
# - *20 seconds.* At large batches: the forward is then bound by arithmetic, and 13 tokens a request cost 13 times.
# - *2 minutes.* Section 7's crossing. Say what moves it: nodes, acceptance, the roofline's ridge.
# - *Follow-up: what should an engine do?* Measure and switch off (chapter 16), or shrink the tree as the batch grows.
# - *The number:* it wins while time(batch x (nodes + 1)) / time(batch) is under tokens a call.

# %%
print(
    f"at these accuracies a chain of 4 gives {expected_tokens([r[:1] for r in table], chain):.2f} tokens a call, "
    f"a tree of 12 gives {expected_tokens(table, tree):.2f}"
)

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %%
predictions()

# %% [markdown]
# **Exercise:** `exercises/17_medusa_eagle.ipynb`: the mask, the accepted path, the best tree, a cache that keeps
# words that were never said, and what a tree may cost.
#
# **Papers:** Miao et al. 2024, *SpecInfer* (arXiv:2305.09781); Cai et al. 2024, *Medusa* (arXiv:2401.10774); Li et
# al. 2024, *EAGLE* (arXiv:2401.15077) and *EAGLE-2* (arXiv:2406.16858); Li et al. 2025, *EAGLE-3* (arXiv:2503.01840).
#
# **Next:** chapter 18 puts one model on several devices.
