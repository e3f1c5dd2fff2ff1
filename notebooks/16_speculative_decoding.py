# %% [markdown]
# # 16 Speculative decoding
#
# **A cheap draft guesses the next k tokens, one forward of the target checks them all, and a rule of acceptance makes
# sure that nobody can tell.**
#
# > *The interviewer asks:* "How can a small model make a large one faster without changing a single probability?
# > Derive the rule, give the speed-up, and tell me when you would switch it off."
#
# You will be able to
# - say why checking k tokens costs about one decode step, and measure where that stops being so;
# - write accept, residual and bonus, and prove in five lines that the target's distribution is kept;
# - choose the draft and its length from two numbers, acceptance and cost, and show the cases in which it loses.
#
# 30 minutes to read. All of it runs on `tiny`, with `tiny-draft` as the small model.

# %%
import inspect
import itertools

import matplotlib.pyplot as plt
import numpy as np
import torch

from minillm import LLM, SamplingParams, load_model, load_tokenizer
from minillm.cache.contiguous import ContiguousCache
from minillm.engine.speculation import SpeculationStats, Speculator
from minillm.engine.speculative_bench import PREDICTABLE
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal
from minillm.measure import clock
from minillm.speculative import verify as library
from minillm.speculative.analysis import acceptance, best_k, expected_tokens, speedup
from minillm.speculative.make import make_lengths, make_proposer
from minillm.speculative.options import SpeculativeOptions

target, draft = load_model("tiny", dtype="float32"), load_model("tiny-draft", dtype="float32")
tokenizer, device = load_tokenizer("tiny"), target.device
encode = tokenizer.encode
millions = [sum(p.numel() for p in m.parameters()) / 1e6 for m in (target, draft)]
print(f"target: tiny, {millions[0]:.2f}M parameters, {target.config.num_layers} layers; ", end="")
print(
    f"draft: tiny-draft, {millions[1]:.2f}M, {draft.config.num_layers} layers; same {target.config.vocab_size} tokens"
)
print(f"on {device}, {torch.get_num_threads()} CPU threads")

# %% [markdown]
# ## 1. The waste, measured
#
# A decode step (解码步) reads every weight to make one token: 2 FLOPs for each weight, far below the roofline's ridge
# (chapter 00). The same read could serve more tokens, if only we knew them. One forward over m tokens at a context of
# 128, against one over a single token, in pairs:


# %% tags=["nbval-ignore-output"]
def step_ratio(m, context=128, repeats=9):
    """Seconds of a forward over m tokens / over 1."""
    cache = ContiguousCache(target.config, 1, context + m, device=device)
    cache.k.normal_()
    cache.v.normal_()

    @torch.inference_mode()
    def step(count):
        cache.lengths = [context] * target.config.num_layers
        target(torch.full((1, count), 7, device=device), cache=cache)

    return clock.paired(lambda: step(m), lambda: step(1), repeats=repeats).ratio.median


sizes = pick([1, 2, 3, 5, 9, 17, 33, 65], [1, 5, 17])
ratios = [step_ratio(m, repeats=pick(15, 5)) for m in sizes]
_, ax = plots.figure(height=2.9)
ax.loglog(sizes, ratios, "o-", color=plots.MEANING["technique"], label="measured")
ax.loglog(sizes, sizes, "--", color=plots.MEANING["naive"], label="if each token cost a step")
ax.set(
    xlabel="tokens in the forward", ylabel="x one decode step", title="Tokens that ride along (tiny, this machine)"
)
plots.plain_log_ticks(ax.xaxis, sizes)
plots.plain_log_ticks(ax.yaxis, [1, 2, 5, 10, 20, 50])
ax.legend()
plt.show()
print(", ".join(f"{m} tokens: {r:.2f} steps" for m, r in zip(sizes, ratios)))

# %% [markdown]
# *The distance between the lines is what speculation lives on: what a step pays once, the read of the weights above
# all. It stops growing where arithmetic takes over and the curve climbs as steeply as the dashes. On an H100 that is
# after about 295 tokens: its ridge in bf16, 989 TFLOP/s over 3.35 TB/s, in FLOP per byte.* But token t + 2 depends on
# t + 1. So somebody must guess.

# %% [markdown]
# ## 2. Predict
#
# *Acceptance* (接受率) a: the probability that a draft token is kept, given that those before it were. k: draft
# tokens a round. c: cost of one draft step in target steps. Write down:
#
# - *Tokens a call of the target* at a = 0.6, k = 4, if tokens are kept independently: `1 + a + a^2 + a^3 + a^4`.
# - *Acceptance* of p = (0.5, 0.3, 0.2, 0) by q = (0.2, 0.3, 0.1, 0.4): `sum min(p, q)`.
# - *Speed-up* at a = 0.3, k = 4, c = 0.3: `(1 + a + ... + a^4) / (1 + 4 c)`.
# - *Best k* for a = 0.8, c = 0.1: try 1, 2, 3 ...

# %%
predict("16.tokens", sum(0.6**i for i in range(5)), "tokens")
predict("16.acceptance", 0.2 + 0.3 + 0.1 + 0, "1")
predict("16.loss", sum(0.3**i for i in range(5)) / (1 + 4 * 0.3), "x")
predict("16.best_k", max(range(1, 20), key=lambda k: sum(0.8**i for i in range(k + 1)) / (1 + 0.1 * k)), "tokens")

# %% [markdown]
# ## 3. The idea, drawn
#
# The draft says x, drawn from q. The target says p. Keep x with probability min(1, p(x) / q(x)); if it is refused,
# draw from what q left short: the *residual distribution* (残差分布) (p - q)+, scaled to sum 1.

# %%
p = np.array([0.5, 0.3, 0.2, 0.0])
q = np.array([0.2, 0.3, 0.1, 0.4])


def draw_bars(ax, p, q):
    """Kept draws (min), refused draws (q above p), and the residual that replaces them (p above q)."""
    places, low = np.arange(len(p)), np.minimum(p, q)
    ax.bar(places, low, 0.7, color=plots.BLUE, label="kept: min(p, q)")
    ax.bar(places, p - low, 0.7, low, color=plots.GREEN, label="missing: residual (p - q)+")
    ax.bar(places, q - low, 0.7, low, color="white", edgecolor=plots.RED, hatch="///", label="refused: (q - p)+")
    for x in places:
        ax.plot([x - 0.35, x + 0.35], [p[x], p[x]], color="black", lw=2)
    ax.set(xticks=places, xlabel="token", ylabel="probability")


_, ax = plots.figure(height=3.0)
draw_bars(ax, p, q)
ax.set_title("Black: the target's p. Refused mass moves to where q fell short")
ax.legend()
plt.show()
reveal("16.acceptance", acceptance(p, q))

# %% [markdown]
# *Green and red areas are equal, so filling one from the other gives exactly p.* The proof:
#
# > P(token = x) = P(drafted x and kept) + P(refused) residual(x)
# > = q(x) min(1, p(x) / q(x)) + P(refused) (p(x) - q(x))+ / sum (p - q)+
# > = min(q(x), p(x)) + P(refused) (p(x) - q(x))+ / sum (p - q)+
# > and P(refused) = 1 - sum min(p, q) = sum p - min(p, q) = sum (p - q)+
# > so P(token = x) = min(p(x), q(x)) + (p(x) - q(x))+ = **p(x)**
#
# After a refusal the rest of the draft is thrown away: it continued a text that did not happen. If all k are kept,
# the last row of the same forward gives one token more, the *bonus* (奖励词元). Greedy decoding (贪心) is the
# limit: p is one token, keep the draft while it agrees.

# %% [markdown]
# ## 4. Build it
#
# Accept, residual, bonus; and the loop. No caches yet: forwards over the whole text.


# %%
def small_verify(p, tokens, q, rng):
    """p [k + 1, vocab], tokens [k] drawn from q [k, vocab] -> the tokens that are said, 1 to k + 1 of them."""
    said = []
    for i, x in enumerate(tokens):
        if rng.random() * q[i, x] < p[i, x]:  # with probability min(1, p / q)
            said.append(x)
            continue
        left = np.maximum(p[i] - q[i], 0)
        return [*said, rng.choice(len(left), p=left / left.sum())]
    return [*said, rng.choice(p.shape[1], p=p[-1] / p[-1].sum())]


@torch.inference_mode()
def law(model, text, rows, temperature):
    """The distribution after each of the last `rows` tokens, [rows, vocab]."""
    logits = model(torch.tensor([text], device=device))[0, -rows:].double().cpu()
    best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (best if temperature == 0 else (logits / temperature).softmax(-1)).numpy()


def small_generate(prompt, count, k, temperature, rng):
    text, calls = list(prompt), 0
    while len(text) < len(prompt) + count:
        guess, q = list(text), []
        for _ in range(k):
            q.append(law(draft, guess, 1, temperature)[0])
            guess.append(rng.choice(len(q[-1]), p=q[-1]))
        p = law(target, guess, k + 1, temperature)  # one call for k + 1 rows
        text += small_verify(p, guess[len(text) :], np.array(q), rng)
        calls += 1
    return text[len(prompt) :][:count], calls


rng, prompt, count = np.random.default_rng(0), encode(PREDICTABLE[0]), pick(40, 20)
plain = LLM("tiny", dtype="float32")
wanted = plain.generate([prompt], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))[0].token_ids
said, calls = small_generate(prompt, count, 4, 0, rng)
assert said == wanted
print(f"greedy: the same {count} tokens as plain decoding, in {calls} calls of the target")
lines = sum(len(inspect.getsource(f).splitlines()) for f in (small_verify, law, small_generate))
print(f"{lines} lines")

# %% [markdown]
# **Sampled: by counting.** Draft tokens from q, verified against p, on the four tokens of the figure. Beside it a
# verifier that looks right and is not: after a refusal it draws from p, not from the residual.

# %%
trials = pick(200_000, 40_000)
x = rng.choice(4, trials, p=q)
kept = rng.random(trials) * q[x] < p[x]
residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
right = np.where(kept, x, rng.choice(4, trials, p=residual))
biased = np.where(kept, x, rng.choice(4, trials, p=p))
print(f"{'token':>6s}{'p':>8s}{'rejection':>11s}{'biased':>9s}")
for token in range(4):
    print(f"{token:6d}{p[token]:8.3f}{(right == token).mean():11.3f}{(biased == token).mean():9.3f}")


def chi_square(tokens):
    counts, expected = np.bincount(tokens, minlength=4)[p > 0], trials * p[p > 0]
    return ((counts - expected) ** 2 / expected).sum()


print(f"chi-square with 2 degrees of freedom: {chi_square(right):.1f}, biased {chi_square(biased):.0f}")
assert chi_square(right) < 25 < chi_square(biased)

# %% [markdown]
# *Drawing from p after a refusal counts what min(p, q) gave a second time: tokens that the draft likes come too
# often. The text still reads well, which is why only counting finds it.*

# %% [markdown]
# ## 5. The library's version
#
# `speculative/verify.py`, chains and trees alike:

# %%
print(inspect.getsource(library.reject))
print(inspect.getsource(library.residual))

# %% [markdown]
# | it adds | because |
# |---|---|
# | p after penalties, temperature, top-k, top-p | what plain decoding draws from is what must be kept |
# | a draft with no q (looked up): draw from p, keep what agrees | the same law; with a seed, the same tokens |
# | drafts get budget and blocks that nobody wants | a guess must not delay a prompt or evict a cached prefix |
# | refused tokens: `BlockTable.truncate` | the pool is as if they had never been |
# | the draft's cache is compared with the text | after a full acceptance it lacks two tokens (card 4) |
# | tokens are handed over one by one | max_tokens, stop strings, end-of-text cut inside an accepted run |
#
# Mixed batches, chunked prefill, preemption, prefix caches: `tests/test_same_tokens.py` runs every proposer through
# all pairs of these. Here, greedy, in the engine:

# %%
prompts = [encode(text) for text in PREDICTABLE]
params = SamplingParams(max_tokens=pick(64, 16), temperature=0, ignore_eos=True)
texts = [out.token_ids for out in plain.generate(prompts, params)]
METHODS = {
    "ngram": "prompt lookup",
    "tiny-draft": "small model",
    "tiny-distilled": "small, distilled",
    "self-int4": "its 4-bit copy",
    "exit-3": "its 3 layers",
}


def speculate(method, k=4, adaptive=False, to=plain):
    """Put a proposer before an engine; returns its running counts."""
    options = SpeculativeOptions(method, num_tokens=k, adaptive=adaptive)
    proposer = make_proposer(options, "tiny", to.model, tokenizer, 32)
    to.engine.speculator = Speculator(proposer, make_lengths(options))
    return to.engine.speculator


for method, name in METHODS.items():
    stats = speculate(method).stats
    assert [out.token_ids for out in plain.generate(prompts, params)] == texts, method
    print(f"{name:17s} same tokens; {stats.tokens_per_call:.2f} tokens a call")
plain.engine.speculator = None

# %% [markdown]
# ## 6. Measure it
#
# ### Acceptance against k and temperature
#
# Counted with `tiny-draft`. Each point is a run of all prompts; the line is the formula with the acceptance that was
# found at k = 1.

# %%
lengths, temperatures = pick([1, 2, 4, 8], [1, 4]), pick([0.0, 0.7, 1.2], [0.0, 1.0])
per_call, rate = {}, {}
for temperature, k in itertools.product(temperatures, lengths):
    stats = speculate("tiny-draft", k).stats
    some = [
        SamplingParams(max_tokens=pick(48, 24), temperature=temperature, ignore_eos=True, seed=i) for i in range(4)
    ]
    plain.generate(prompts, some)
    per_call[temperature, k], rate[temperature, k] = stats.tokens_per_call, stats.acceptance
plain.engine.speculator = None
_, axes = plots.figure(1, 2, width=7.6, height=3.0)
for temperature, color in zip(temperatures, plots.PALETTE):
    axes[0].plot(lengths, [rate[temperature, k] for k in lengths], "o-", color=color, label=f"T = {temperature:g}")
    axes[1].plot(lengths, [per_call[temperature, k] for k in lengths], "o", color=color)
    a = rate[temperature, lengths[0]]
    axes[1].plot(lengths, [expected_tokens(a, k) for k in lengths], "--", color=color)
axes[0].set(xlabel="draft tokens k", ylabel="acceptance a", ylim=(0, 1), title="Kept, of those looked at")
axes[1].set(xlabel="draft tokens k", ylabel="tokens a call", title="Points counted, lines by formula")
axes[0].legend()
plt.show()
runs = (rng.random((100_000, 4)) < 0.6).cumprod(1).sum(1)  # kept tokens of 100,000 rounds
reveal("16.tokens", 1 + runs.mean())

# %% [markdown]
# *Acceptance hardly depends on k; tokens a call saturate at 1 / (1 - a), so the eighth guess is worth little. The
# formula takes tokens for independent; texts have easy and hard stretches, which is why points leave the lines.
# Temperature moves acceptance both ways: sampled texts are harder to foresee, but a draft that draws may be kept
# where a likeliest token would not.*
#
# ### Five drafts at equal length
#
# k = 4, greedy, batch 1. c is measured: one proposal of 4 tokens against a plain step. From a and c the formula says
# the speed-up; beside it the paired measurement.


# %% tags=["nbval-ignore-output"]
class Timed:
    """A proposer that counts its own seconds."""

    wants_hidden = False

    def __init__(self, inner):
        self.inner, self.seconds, self.tokens = inner, 0.0, 0
        self.observe, self.release = inner.observe, inner.release

    def propose(self, contexts):
        found = []
        self.seconds += clock.seconds(lambda: found.extend(self.inner.propose(contexts)))
        self.tokens += max(map(len, found))
        return found


one = SamplingParams(max_tokens=pick(64, 24), temperature=0, ignore_eos=True)
some_prompts = prompts[:2]


def run(speculator=None):
    plain.engine.speculator = speculator
    for each in some_prompts:
        plain.generate([each], one)


def rates(method, k=4, adaptive=False, repeats=None):
    """(acceptance, c, speed-up by formula, measured speed-up) of one proposer at batch 1."""
    speculator = speculate(method, k, adaptive)
    speculator.proposer = timed = Timed(speculator.proposer)
    run(speculator)  # warms up
    speculator.stats, timed.seconds, timed.tokens = SpeculationStats(), 0.0, 0
    pair = clock.paired(lambda: run(), lambda: run(speculator), repeats or pick(3, 2), warmup=0)
    step = pair.a.median / (len(some_prompts) * one.max_tokens)
    stats, cost = speculator.stats, timed.seconds / max(timed.tokens, 1) / step
    plain.engine.speculator = None
    return stats.acceptance, cost, speedup(stats.acceptance, k, cost), pair.ratio.median


table = {}
print(f"{'draft':17s}{'a':>7s}{'c':>8s}{'by formula':>12s}{'measured':>10s}")
for method, name in METHODS.items():
    table[name] = rates(method)
    a, c, by_formula, measured = table[name]
    print(f"{name:17s}{a:7.2f}{c:8.3f}{by_formula:11.2f}x{measured:9.2f}x")
plots.bars(list(table), [row[3] for row in table.values()], "x", "Tokens/s over plain decoding (k = 4, this machine)")
plt.axvline(1, color=plots.GREY, lw=0.8, ls=":")
plt.show()

# %% [markdown]
# *Read a against c. The 4-bit copy guesses best and is no cheap draft: it has as many layers as the target. The small
# model has a third of the layers and guesses worse. Trained on to say what the target says instead of what the books
# say (DistillSpec), it costs the same and is kept more often. Looking up costs nothing, and these texts repeat
# themselves. The formula takes verifying 5 tokens for one step and a draft at each; section 1 says what the first is
# worth here, and where nothing was found to copy there was no draft.* On GPUs the
# papers report 2 to 3 x (Leviathan et al., T5-XXL) and 2 to 2.5 x (Chen et al., Chinchilla 70B): their figures, not
# ours.
#
# ### Batches

# %% tags=["nbval-ignore-output"]
batches, gain = pick([1, 2, 4, 8, 16], [1, 4]), {}
for batch in batches:
    many = (prompts * 8)[:batch]

    def go(speculator, many=many):
        plain.engine.speculator = speculator
        plain.generate(many, one)

    speculator = speculate("ngram", 6)
    pair = clock.paired(lambda: go(None), lambda: go(speculator), pick(3, 1), warmup=1)  # noqa: B023
    gain[batch] = pair.ratio.median
plain.engine.speculator = None
_, ax = plots.figure(height=2.7)
ax.plot(batches, list(gain.values()), "o-", color=plots.MEANING["technique"], label="prompt lookup, k = 6")
ax.axhline(1, color=plots.GREY, lw=0.8, ls=":")
ax.set_xscale("log", base=2)
plots.plain_log_ticks(ax.xaxis, batches)
ax.set(
    xlabel="requests at once", ylabel="x plain decoding", ylim=(0, None), title="The gain fades as the batch grows"
)
ax.legend()
plt.show()
for name in (
    "speculative.tiny.ngram.t0.ratio",
    "speculative.tiny.tiny-draft.t0.ratio",
    "speculative.tiny.batch32.ratio",
):
    print(f"recorded on a GPU, {name}: {recorded(name)}")

# %% [markdown]
# *A batch of 32 already reads the weights once for 32 tokens: the waste of section 1 is gone, and refused tokens are
# arithmetic that somebody else wanted.*

# %% [markdown]
# ## 7. Where it backfires
#
# **Acceptance 0.3.** The target's own first 3 layers, through a last norm and head that never saw them, guess badly.
# Four guesses at 0.3 or more of a step each:

# %% tags=["nbval-ignore-output"]
a, c, by_formula, fixed = rates("exit-3")
*_, adaptive = rates("exit-3", adaptive=True, repeats=pick(5, 2))
print(f"exit-3: acceptance {a:.2f}, c {c:.2f}. Fixed k = 4: {fixed:.2f} x plain (formula {by_formula:.2f})")
print(f"adaptive length: {adaptive:.2f} x plain; it measured, and stopped")
reveal("16.loss", fixed)

# %% [markdown]
# *A slow-down, and no test of correctness would have shown it.* `AdaptiveLength` measures plain steps, drafted steps
# and acceptance while it decodes, and picks k. It tries with one request of the batch first, and after a loss waits
# until plain steps have paid it off, 1 % of a step each; after each loss in a row longer. It is the default of
# `LLM(speculative=...)`.
#
# **A small target.** Draft for `tiny-draft`, two layers, with its own 8-bit copy, two layers as well. Nearly every
# guess is kept, k = 4, and this is what is won of the 5 x that it looks like:

# %% tags=["nbval-ignore-output"]
little = LLM("tiny-draft", dtype="float32")
options = SpeculativeOptions("self-int8", adaptive=False)
spec = Speculator(make_proposer(options, "tiny-draft", little.model, None, 1), make_lengths(options))


def go_little(speculator):
    little.engine.speculator = speculator
    little.generate(prompts[:1], one)


pair = clock.paired(lambda: go_little(None), lambda: go_little(spec), pick(5, 2), warmup=1)
print(f"acceptance {spec.stats.acceptance:.2f}, {spec.stats.tokens_per_call:.2f} tokens a call, ", end="")
print(f"{pair.ratio.median:.2f} x plain decoding")

# %% [markdown]
# *Whoever is cheap already has nothing to win: with c near 1 even a = 1 gives (k + 1) / (1 + k) = 1.*

# %% [markdown]
# ## 8. Play
#
# Speed-up against k for your a and c; v is what each drafted token adds to the verifying forward.


# %% tags=["nbval-ignore-output"]
def play(ax, a, c, v):
    ks = np.arange(0, 17)
    ax.plot(ks, [speedup(a, int(k), c, v) for k in ks], "o-", color=plots.BLUE, markersize=4)
    best = best_k(a, c, v, 16)
    ax.plot(best, speedup(a, best, c, v), "s", color=plots.GREEN, markersize=8)
    ax.margins(y=0.1)
    ax.axhline(1, color=plots.GREY, lw=0.8, ls=":")
    ax.set(xlabel="draft tokens k")
    ax.set_ylim(bottom=0)
    title = f"best k = {best}: {speedup(a, best, c, v):.2f} x"
    if ax.figure.axes == [ax]:
        ax.set(ylabel="x plain decoding", title=title)
    else:
        ax.set_xlabel(f"draft tokens k\n{title}", fontsize=8)


explore(
    play,
    a=(0.05, 0.95, 0.05, 0.7),
    c=[0.1, 0.01, 0.05, 0.2, 0.4, 0.8],
    v=[0.0, 0.02, 0.1],
    static=[dict(a=0.3, c=0.4), dict(a=0.6, c=0.2), dict(a=0.8, c=0.1), dict(a=0.9, c=0.01)],
    height=2.6,
)
reveal("16.best_k", best_k(0.8, 0.1))

# %% [markdown]
# *It wins for some k if and only if a > c + v: then k = 1 wins already. The curve is flat near its top, so a k that
# is one off hardly matters; a k = 8 at a = 0.3 does.*

# %% [markdown]
# ## 9. Say it
#
# **"How does speculative decoding work, and why is it exact?"**
# - *20 seconds.* A draft says k tokens, the target checks them in one forward, which costs about one step because
#   decoding waits for weights. A token is kept with probability min(1, p / q), else one is drawn from (p - q)+. The
#   sum of both is p.
# - *2 minutes.* The two bars of section 3 and the five lines under them; the bonus; greedy as the limit.
# - *Follow-up: what if you draw from p after a refusal?* Tokens that the draft likes come too often (section 4).
# - *The number:* 1 - a is the total variation distance of p and q.
#
# **"What speed-up do you expect?"**
# - *20 seconds.* (1 - a^(k+1)) / (1 - a) tokens a call, over 1 + k c steps. At a = 0.8, k = 4: 3.4 tokens; with
#   c = 0.1, 2.4 x.
# - *2 minutes.* The panels of section 6: a from the draft, saturation at 1 / (1 - a), points beside the formula.
# - *Follow-up: when is k = 0 best?* When a <= c (plus what verifying adds).
# - *The number:* 2 to 3 x in the papers; what this machine gives is in section 6.
#
# **"When do you switch it off?"**
# - *20 seconds.* Large batches, where the weights' read is shared already; poor drafts; small targets. Measure
#   acceptance and both costs, and choose k at every step.
# - *2 minutes.* Section 7's two failures and the batch figure; then how the adaptive rule bounds the loss.
# - *Follow-up: memory?* The draft's weights and its KV cache are blocks that requests do not get.
# - *The number:* never under 0.95 x plain is what the adaptive length aims at.
#
# **"What happens to the KV caches?"**
# - *20 seconds.* The target wrote K and V for all k drafts; the refused ones are rolled back in the block table. The
#   draft's cache lacks the last draft token and the bonus after a full acceptance: both must be fed first.
# - *2 minutes.* `DraftModel`: compare, truncate, feed the difference; `Scheduler.update`: truncate to what was said.
# - *Follow-up: what if the bonus alone is fed?* A hole: every later guess sees a text that nobody wrote. The output
#   stays right and acceptance falls, so only a counter shows it.
# - *The number:* 2 tokens to feed after k of k were kept, else 1.

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %%
print(f"a = 0.8, k = 4: {expected_tokens(0.8, 4):.2f} tokens; c = 0.1: {speedup(0.8, 4, 0.1):.2f} x")


predictions()

# %% [markdown]
# **Exercise:** `exercises/16_speculative_decoding.ipynb`: accept and reject, the residual, the biased verifier, what
# the draft's cache lacks, and the best k.
#
# **Papers:** Leviathan, Kalman and Matias 2023, *Fast inference from transformers via speculative decoding*
# (arXiv:2211.17192); Chen et al. 2023, *Accelerating large language model decoding with speculative sampling*
# (arXiv:2302.01318); Stern, Shazeer and Uszkoreit 2018, *Blockwise parallel decoding* (arXiv:1811.03115); Miao et al.
# 2024, *SpecInfer* (arXiv:2305.09781); Zhang et al. 2024, *Draft and Verify* (arXiv:2309.08168).
#
# **Next:** chapter 17: heads on the target itself, and drafts that are trees.
