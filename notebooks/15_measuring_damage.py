# %% [markdown]
# # 15 Measuring damage
#
# **A quantised model is another model. Say how far from the original it is, on what text, on what task, and how sure
# you are; one perplexity says none of that.**
#
# > *The interviewer asks:* "Your 4-bit model has perplexity 36.6, the original 35.8. Is that damage or noise? What
# > would you measure before you ship it, and what could still be broken when perplexity looks fine?"
#
# You will be able to
# - compute perplexity with a stride, and say what window and stride do to it;
# - compare two models with a paired interval, and say how much text a difference of 0.5 % needs;
# - pick a method from memory, speed and quality, and name a break that perplexity cannot see.
#
# 35 minutes to read. All of it runs on `tiny`, which ships with the course; where `smollm2-135m` is present one cell
# of section 6 runs it, and says so.

# %%
import copy
import inspect
import math
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

from minillm import load_model, load_tokenizer
from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import cached_tokens, decode, prefill
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal
from minillm.measure.choices import TALK, end_of_turn, passage, score, turn
from minillm.measure.damage import Method, as_text, judge, kv_bytes, methods, shown, timings, weight_bytes
from minillm.measure.quality import Reference, Windows, bootstrap, difference, perplexity, token_losses
from minillm.model.decoder import Decoder
from minillm.model.hub import ASSETS, is_available
from minillm.model.shapes import known_shapes
from minillm.quant.affine import Scheme, fake_quantize
from minillm.quant.ungrid import ungrid

model = load_model("tiny", dtype="float32")
device = model.device
tokenizer = load_tokenizer("tiny")
text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
words = tokenizer.encode(text)
SAMPLES = pick(16, 4)
calibration = torch.tensor(words[: SAMPLES * 128]).view(SAMPLES, 128)  # the book's beginning
evaluation = words[-pick(4096, 1280) :]  # its end
middle = words[SAMPLES * 128 : -4096]
print(f"model: tiny, on {device}, {torch.get_num_threads()} CPU threads")
print(f"calibration {calibration.numel()} tokens, evaluation {len(evaluation)} others")

# %% [markdown]
# ## 1. The waste, measured
#
# **Perplexity** (困惑度) is exp of the mean loss a token. One model, one text, and how the text was cut: into windows
# (窗口) of so many tokens, whose starts are a **stride** (步长) apart. With stride = window each window starts
# without a past; with a smaller stride windows overlap, and every token is scored once, with more text before it.

# %%
piece = evaluation[-pick(1024, 768) :]
cuts = [(32, 32), (64, 64), (128, 128), (256, 256), (512, 512), (256, 128), (256, 32)]
found = {cut: perplexity(model, piece, *cut, batch=8) for cut in cuts}
for (window, stride), value in found.items():
    print(f"window {window:3d}, stride {stride:3d}: perplexity {value:6.2f}")

(int4,) = judge(model, evaluation, calibration, {}, methods(["INT4"]))
reference = Reference(model, evaluation, window=256)
before, after = reference.perplexity, int4.damage.perplexity
print(f"\ncut alike, {len(evaluation)} tokens: original {before}, INT4 {after}")
spread = max(found.values()) / min(found.values()) - 1
print(f"the cut moves perplexity by {spread:.0%}, INT4 by {int4.damage.ratio.value - 1:.1%}")
assert spread > 5 * abs(int4.damage.ratio.value - 1)

_, ax = plots.figure(height=2.6)
names = [f"{w} / {s}" for w, s in cuts]
ax.bar(names, found.values(), color=[plots.GREY] * 5 + [plots.BLUE] * 2, width=0.6)
ax.set(ylabel="perplexity", xlabel="window / stride, tokens", title="One model, one text (tiny)")
plt.show()

# %% [markdown]
# *Grey: no overlap; blue: overlap. The cut moves the figure far more than 4 bits do, so two perplexities from two
# papers cannot be compared.* Nor do the two perplexities that were cut alike tell the models apart: in brackets each
# has its 95 % **confidence interval** (置信区间), and the two overlap almost wholly. The text decides the figure more
# than the model does.

# %% [markdown]
# ## 2. Predict
#
# - *Windows to run* for 4,096 tokens, window 256, stride 64: after the first window each adds 64 tokens.
# - *Perplexity of a model that knows nothing* and gives each of 2,048 tokens the same chance.
# - *Tokens to see 0.5 %* when two perplexities are compared as they stand: the loss of one token has a standard
#   deviation of about 3 nats (奈特), and 1.96 x 3 / √n is to be 0.005. (Pairs need far fewer: section 6.)
# - *Same answer*: INT4's top-1 agreement (首选一致率) with the original, 0.88 a token. Share of greedy (贪心) answers
#   of 32 tokens that are the same, if agreements were independent: 0.88³².

# %%
predict("15.windows", 1 + math.ceil((4096 - 256) / 64))
predict("15.uniform", 2048)
predict("15.tokens_unpaired", (1.96 * 3 / 0.005) ** 2)
predict("15.same_answer", 0.88**32)

# %% [markdown]
# ## 3. The idea, drawn

# %%
_, axes = plots.figure(1, 3, width=9.4, height=2.9)
ax = axes[0]
for row, (start, end, first) in enumerate(Windows(8, 3).spans(17)):
    ax.barh(row, first - start, left=start, color=plots.GREY, alpha=0.35, height=0.6)
    ax.barh(row, end - first, left=first, color=plots.BLUE, height=0.6)
ax.set(title="stride 3, window 8", xlabel="token of the text", yticks=[], xticks=range(0, 18, 4))
ax.text(8.6, 0, "blue: scored here", va="center", fontsize=8)
ax.text(11.5, 1, "grey: only read", va="center", fontsize=8, color=plots.GREY)
ax.invert_yaxis()
ax.grid(False)

ax, labels = axes[1], ["the", "a", "his", "Anne", "<end>"]
p, q = np.array([0.40, 0.34, 0.14, 0.10, 0.02]), np.array([0.35, 0.39, 0.10, 0.10, 0.06])
places = np.arange(5)
ax.bar(places - 0.2, p, 0.38, color=plots.GREY, label="original p")
ax.bar(places + 0.2, q, 0.38, color=plots.ORANGE, label="changed q")
ax.annotate(
    "came next:\nall that perplexity\nlooks at", (3, 0.11), (2.1, 0.27), fontsize=8, arrowprops={"arrowstyle": "->"}
)
ax.annotate("top-1 differs", (0.6, 0.4), (1.1, 0.44), fontsize=8)
ax.set_xticks(places, labels)
ax.set(title=f"loss equal, KL {(p * np.log(p / q)).sum():.3f}", ylim=(0, 0.5))
ax.legend(loc="upper right", bbox_to_anchor=(1, 0.9))

ax = axes[2]
for row, (interval, color, name) in enumerate(
    [
        (bootstrap(reference.loss), plots.GREY, "original"),
        (bootstrap(int4.damage.loss), plots.ORANGE, "INT4"),
    ]
):
    ax.plot([interval.low, interval.high], [row, row], color=color, lw=4)
    ax.plot(interval.value, row, "o", color="black", ms=4)
    ax.text(interval.low, row - 0.18, name, fontsize=8)
gap = difference(int4.damage.loss, reference.loss)
centre = reference.loss.mean().item()
ax.plot([centre + gap.low, centre + gap.high], [2, 2], color=plots.BLUE, lw=4)
ax.plot(centre + gap.value, 2, "o", color="black", ms=4)
ax.text(centre, 1.78, "original + paired difference", fontsize=8, ha="center")
ax.axvline(centre, color=plots.GREY, lw=0.8, ls="--")
ax.set(title="two intervals, and one of pairs", xlabel="loss, nats a token", yticks=[], ylim=(2.5, -0.6))
ax.grid(False, axis="y")
plt.show()

# %% [markdown]
# *Left: every token is scored once, in the first window that holds it. Middle: the token that came has the same
# chance under both models, so perplexity sees nothing; **KL divergence** (KL 散度), Σ p ln(p / q), sees every bar,
# and top-1 agreement sees what greedy decoding would do. Right, measured: a hard sentence is hard for both models.
# The difference on the same tokens, **paired** (配对), leaves that out, and its interval is many times narrower.*
#
# The interval comes from the **bootstrap** (自助法): draw as many values as there are, with replacement, take the
# mean, repeat 2,000 times, and read off the middle 95 %. Draw blocks of 32 neighbouring tokens, not single ones: a
# hard passage is hard for many tokens in a row.

# %% [markdown]
# ## 4. Build it


# %%
@torch.inference_mode()
def small_losses(run, tokens, window, stride):
    """Loss of every token but the first, each scored once. run: tokens [1, time] -> logits [1, time, vocab]."""
    tokens, losses, done = torch.as_tensor(tokens, device=device), [], 1
    for start in range(0, len(tokens), stride):
        part = tokens[start : start + window]
        new = start + len(part) - max(done, start + 1)  # tokens that no window has scored yet
        if new > 0:
            logits = run(part[None])[0, :-1].float()  # [time - 1, vocab]: row i says what token i + 1 is
            losses.append(F.cross_entropy(logits[-new:], part[-new:], reduction="none"))
        done = start + len(part)
        if done == len(tokens):
            break
    return torch.cat(losses)


@torch.inference_mode()
def small_distance(logits, changed):
    """logits [n, vocab] of both models -> (KL(p || q) [n], 1 where both put the same token first [n])."""
    p, q = logits.log_softmax(-1), changed.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), (p.argmax(-1) == q.argmax(-1)).float()


def small_interval(a, b, block=32, samples=2000):
    """95 % interval of the mean of a - b, [n] each, same tokens: (low, high)."""
    blocks = (a - b).double()[: len(a) // block * block].view(-1, block).mean(1)  # [blocks]
    drawn = torch.randint(len(blocks), (samples, len(blocks)), generator=torch.Generator().manual_seed(1))
    return blocks[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


int4_model = copy.deepcopy(model)
methods(["INT4"])[0].change(int4_model, calibration)
a, b = (small_losses(run, piece, 256, 128) for run in (int4_model, model))
low, high = small_interval(a, b)
with torch.no_grad():
    first = torch.tensor([piece[:256]], device=device)
    kl, agree = small_distance(model(first)[0], int4_model(first)[0])
print(f"perplexity {b.mean().exp():.2f} -> {a.mean().exp():.2f}, x {math.exp(low):.3f} .. {math.exp(high):.3f}")
print(f"first window: KL {kl.mean():.4f} nats, top-1 agreement {agree.mean():.3f}")

# %% [markdown]
# ## 5. The library's version

# %%
print(inspect.getsource(Windows.spans))
print(inspect.getsource(Reference.damage))

# %%
print(inspect.getsource(score))

# %% [markdown]
# | it adds | because |
# |---|---|
# | the original's answers are kept | each changed model runs once, and every figure is paired |
# | windows in batches, logits dropped at once | 4,096 tokens x 49,152 logits are 800 MB |
# | a last block that is not full, at least 8 blocks | short texts |
# | a tokens' sum over their number, a choice | longer choices would lose by their length |
#
# **Proved.** The small versions and the library's agree (the interval nearly: the small one leaves the last, shorter
# block out); and, where transformers is installed, so does the loop of its own page on the perplexity of fixed-length
# models: same windows, its model, its loss.

# %%
try:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    oracle = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32).eval()
except ImportError:
    print("transformers is not installed: its column is left out")
    oracle = None


@torch.inference_mode()
def transformers_perplexity(window, stride):
    total = count = done = 0
    for start in range(0, len(piece), stride):
        ids = torch.tensor([piece[start : start + window]])
        labels = ids.clone()
        labels[:, : max(0, done - start)] = -100  # scored by an earlier window
        fresh = (labels[:, 1:] != -100).sum().item()
        if fresh:
            total, count = total + oracle(ids, labels=labels).loss.item() * fresh, count + fresh
        done = start + ids.shape[1]
        if done == len(piece):
            return math.exp(total / count)


for window, stride in pick([(256, 256), (256, 100), (512, 128)], [(256, 100)]):
    library = token_losses(model, piece, window, stride)
    assert torch.allclose(small_losses(model, piece, window, stride).cpu(), library, atol=1e-3)
    ours = library.mean().exp().item()
    theirs = None if oracle is None else transformers_perplexity(window, stride)
    print(f"window {window}, stride {stride}: ours {ours:.4f}, transformers {theirs and round(theirs, 4)}")
    assert theirs is None or abs(ours / theirs - 1) < 1e-3
kept = Reference(model, piece[:256], window=256).damage(int4_model)
assert torch.allclose(kept.kl, kl[:-1].cpu(), atol=1e-4) and torch.equal(kept.agree, agree[:-1].cpu())
lib = difference(*(token_losses(m, piece, 256, 128) for m in (int4_model, model)))
print(f"interval of the difference: small {low:.4f} .. {high:.4f}, library {lib.low:.4f} .. {lib.high:.4f} nats")
reveal("15.windows", len(Windows(256, 64).spans(4096)))
reveal("15.uniform", perplexity(lambda ids: torch.zeros(*ids.shape, 2048), piece, 256))

# %% [markdown]
# ## 6. Measure it
#
# ### One table over chapters 11 to 14
#
# Besides distances a **multiple-choice task** (多项选择) or two: what the model is *for*. Both are made from the
# book's middle, by `minillm.measure.choices`:
#
# - *passage*: 24 tokens of the book; which of four pieces comes next? Scored by log-likelihood a token.
# - *turn*: a chat whose answer is a sentence of the book, whole or cut. Is the answer over, or what comes next?
#
# Every method quantises all linears but the head, in groups of 64 below 8 bits.

# %%
questions = {
    "passage": passage(middle, pick(48, 16), context=24),
    "turn": turn(tokenizer, text[20_000:220_000], pick(80, 32)),
}
for asked in (questions["passage"][0], questions["turn"][0], questions["turn"][1]):
    print(asked.kind, "|", repr(tokenizer.decode(asked.context[-24:], skip_special_tokens=False)))
    for index, choice in enumerate(asked.choices):
        print(
            "   ", "->" if index == asked.answer else "  ", repr(tokenizer.decode(choice, skip_special_tokens=False))
        )
original = {task: score(model, asked) for task, asked in questions.items()}
for task, answers in original.items():
    print(f"{task}: the original has {shown(answers.accuracy, 2)} right, a guess {1 / 4:.2f}")

# %% tags=["nbval-ignore-output"]
chosen = methods(pick(None, ["bfloat16", "INT8", "INT4", "INT3", "INT2", "W8A8", "KV INT8", "KV INT2"]))
start, rows = time.perf_counter(), {}
for row in judge(model, evaluation, calibration, questions, chosen):
    rows[row.name] = row
print(as_text(rows.values()))
print(f"\n{len(rows)} methods, {time.perf_counter() - start:.0f} s; [low, high]: 95 %, paired with the original")

# %%
COLOR = {1: plots.GREY, 11: plots.BLUE, 12: plots.GREEN, 13: plots.ORANGE, 14: plots.PINK}
panels = {
    "perplexity / original": lambda row: row.damage.ratio,
    "KL, nats": lambda row: row.damage.mean_kl,
    "top-1 agreement": lambda row: row.damage.agreement,
    "passage, change": lambda row: row.scores["passage"].gain(row.original["passage"]),
    "turn, change": lambda row: row.scores["turn"].gain(row.original["turn"]),
}
_, axes = plots.figure(1, len(panels), width=10, height=0.8 + 0.23 * len(rows))
for ax, (title, value) in zip(axes, panels.items()):
    for place, row in enumerate(rows.values()):
        interval = value(row)
        ax.plot([interval.low, interval.high], [place, place], color=COLOR[row.chapter], lw=3)
        ax.plot(interval.value, place, "o", color=COLOR[row.chapter], ms=4, markeredgecolor="black", mew=0.4)
    ax.axvline({"perplexity / original": 1, "top-1 agreement": 1}.get(title, 0), color="black", lw=0.7)
    ax.set_title(title, fontsize=9)
    ax.set_yticks(range(len(rows)), rows if ax is axes[0] else [""] * len(rows))
    ax.invert_yaxis()
axes[0].set_xscale("log")
axes[0].set_xticks([1, 1.5, 2.5], ["1", "1.5", "2.5"])
axes[0].minorticks_off()
axes[1].set_xscale("log")
axes[2].set_xlim(0.35, 1.03)
plt.show()

hidden = [row for row in rows.values() if row.damage.ratio.low <= 1 <= row.damage.ratio.high]
worst = min(hidden, key=lambda row: row.damage.agreement.value)
print(f"perplexity cannot tell from the original: {', '.join(row.name for row in hidden)}")
print(f"of these {worst.name} changes the most greedy tokens: top-1 agreement {shown(worst.damage.agreement)}")
assert worst.damage.agreement.high < 0.97

# %% [markdown]
# *Dot and bar: value and 95 % interval. Grey: bfloat16 without any method, the floor of what "no damage" means on
# 16-bit hardware. Blue: rounding to the nearest; green: GPTQ, AWQ; orange: 8-bit products; pink: the cache.*
#
# Four things to read off:
# - **KL and top-1 order the methods; perplexity cannot.** Several ratios have an interval that holds 1, while up to
#   one greedy token in twenty is another one. Errors that help one token and harm the next cancel in a mean of
#   losses. They do not cancel in KL, which is never negative.
# - **A ratio below 1 is no gain.** A model that is changed at random is sometimes luckier on a few thousand tokens.
# - **The tasks saturate.** INT2, whose perplexity has more than doubled, still answers most of what the original did.
#   Four choices are a coarse ruler, and a few dozen questions a short one. Count **flips** (翻转), the answers that
#   changed in either direction: at INT2 they are at least twice what accuracy, their difference, shows.
# - **Not one method dents the turn task.** Remember that in section 7.
#
# ### How sure, and how much text?
#
# The standard error of a mean falls with √n. From the measured losses: tokens needed until the interval is ± 0.5 %,
# for two perplexities side by side and for pairs. Then the prediction of section 2 on greedy answers.


# %%
def tokens_needed(values, goal=0.005):
    """n x (half width now / goal)²: what the block bootstrap says, scaled by 1 / √n."""
    interval = bootstrap(values)
    return len(values) * ((interval.high - interval.low) / 2 / goal) ** 2


alone = 1.96 * reference.loss.std().item()
reveal("15.tokens_unpaired", (alone / 0.005) ** 2)
print(f"one perplexity, ± 0.5 %:   {tokens_needed(reference.loss):>10,.0f} tokens (blocks counted as blocks)")
for name in ("INT4", "INT3", "INT2"):
    pairs = rows[name].damage.loss - rows[name].damage.reference_loss
    print(f"{name} / original, ± 0.5 %: {tokens_needed(pairs):>10,.0f} tokens")
assert tokens_needed(rows["INT4"].damage.loss - reference.loss) < tokens_needed(reference.loss) / 10


@torch.inference_mode()
def greedy(run, prompts, count):
    """prompts [n, time] -> tokens [n, count], the likeliest each time."""
    cache = ContiguousCache(run.config, len(prompts), prompts.shape[1] + count, run.dtype, run.device)
    tokens = [prefill(run, prompts, cache).argmax(-1)]
    while len(tokens) < count:
        tokens.append(decode(run, tokens[-1], cache).argmax(-1))
    return torch.stack(tokens, 1)


prompts = torch.tensor(middle[: pick(64, 24) * 16], device=device).view(-1, 16)
ours, theirs = (greedy(m, prompts, 32) for m in (model, int4_model))
same = (ours == theirs).float().cumprod(1)  # 1 until the first token that differs
reveal("15.same_answer", same[:, -1].mean())
print(f"INT4: the first {same.sum(1).mean():.1f} of 32 tokens are the same, {same[:, -1].mean():.0%} of the answers")

# %% [markdown]
# To know a perplexity alone to half a per cent takes a shelf of novels; to know the ratio of two takes a chapter or
# two of one. And after a handful of tokens the greedy answer of the 4-bit model is another text.
#
# ### A real model
#
# `smollm2-135m`, off its 4-bit grid (`ungrid`, chapter 11), few windows. Below it, bits a byte: perplexity counts
# tokens, and two vocabularies cut the same text into different tokens.


# %% tags=["nbval-ignore-output"]
def real_model(tokens, asked, names):
    """(model, ids of the book, ids to judge on, questions), after the table of these methods."""
    real, voice = ungrid(load_model("smollm2-135m", dtype="float32")), load_tokenizer("smollm2-135m")
    ids = voice.encode(text)
    tasks = {"turn": turn(voice, text[20_000:220_000], asked)}
    found = list(judge(real, ids[-tokens:], None, tasks, methods(names)))
    print(f"smollm2-135m: {tokens} tokens, window 256; turn: {shown(found[0].original['turn'].accuracy, 2)} right")
    print(as_text(found))
    over = end_of_turn(voice)
    for name, scores in ("original", found[0].original), *((row.name, row.scores) for row in found):
        said = sum(q.choices[i] == (over,) for q, i in zip(tasks["turn"], scores["turn"].chosen))
        print(f"{name:13s} says that the answer is over {said} times of {asked}")
    lost = found[0].damage.reference_loss.mean().item()
    for name, loss, count in (("tiny", reference.loss.mean().item(), len(words)), ("smollm2-135m", lost, len(ids))):
        bits = loss / math.log(2) * count / len(text.encode())
        print(f"{name:13s} perplexity {math.exp(loss):5.1f}, {count} tokens of the book, {bits:.2f} bits a byte")
    return real, voice, ids, ids[-tokens:], tasks


CALIBRATED = {"rtn": "nearest", "gptq_act_order": "GPTQ, act-order", "awq": "AWQ"}
kl = recorded("damage.int4_gptq.kl")
print(f"recorded on a GPU, smollm2-135m: KL of INT4 GPTQ {kl}, of INT4 {recorded('damage.int4.kl')}")
for bits in (4, 3, 2):
    known = {name: recorded(f"gptq_awq.int{bits}.{way}.kl") for way, name in CALIBRATED.items()}
    shown_kl = ", ".join(f"{name} {found.value:.3f}" for name, found in known.items() if found)
    print(f"recorded by minillm bench gptq-awq, smollm2-135m, KL at {bits} bits: {shown_kl or 'not measured'}")
smollm2 = None
if not is_available("smollm2-135m"):
    print("smollm2-135m is not here: minillm pull smollm2-135m")
elif not pick(True, False):
    print("left out in fast mode")
else:
    smollm2 = real_model(tokens=512, asked=12, names=["INT8", "INT4", "KV INT2"])

# %% [markdown]
# *Four bits without calibration hurt this model more than they hurt `tiny`; with 512 tokens the interval says how
# much is known. The model with the higher perplexity needs fewer bits for the book: it cuts the text into fewer
# tokens, each harder. Compare perplexities under one tokeniser, or bits a byte. And look at the sign of the turn
# column: a damaged model may score higher on a small task, here by saying "over" more readily. That is no gain.*

# %% [markdown]
# ### The selection table
#
# What is saved depends on what fills the memory. Bytes for a Llama-3.1-8B, by formula, at one request and at 64
# requests of 8,192 tokens; speed here, on `tiny`, beside the same model in float32; quality from the table above.
# A quantised cache can stand beside quantised weights: the last row is both, judged together.

# %% tags=["nbval-ignore-output"]
with torch.device("meta"):
    large = Decoder(known_shapes()["llama-3.1-8b"])  # shapes only: no memory
gptq, int4_kernels = methods(["INT4 GPTQ", "INT4"])
both = replace(gptq, name="INT4 GPTQ + KV INT8", kv="int8", serve=int4_kernels.serve)
rows |= {row.name: row for row in judge(model, evaluation, calibration, questions, [both])}
plan = [Method("16 bits", 1), *methods(["INT8", "W8A8", "INT4", "KV INT8", "KV INT2"]), both]


def ratios(pairs):
    return ("-", "-") if pairs is None else tuple(f"{p.ratio.median:.2f}" for p in pairs)


speeds = {m.name: timings(model, m, prompt=64, tokens=pick(16, 4), repeats=pick(7, 2)) for m in plan}
print(
    f"{'':20s}{'weights':>9s}{'KV, 64 x 8k':>13s}{'1 request':>11s}{'64':>9s}{'decode x':>10s}{'prefill x':>11s}"
    f"{'perplexity x':>24s}{'KL':>9s}"
)
for m in plan:
    weights, token = weight_bytes(large, m.bits), kv_bytes(large, m.kv)
    line = f"{m.name:20s}{weights / 1e9:6.1f} GB{64 * 8192 * token / 1e9:10.1f} GB"
    line += f"{(weights + 8192 * token) / 1e9:8.1f} GB{(weights + 64 * 8192 * token) / 1e9:6.1f} GB"
    line += "".join(f"{x:>10s}" for x in ratios(speeds[m.name]))
    row = rows.get(m.name)
    line += (
        f"{'1':>25s}{'0':>9s}" if row is None else f"{shown(row.damage.ratio):>25s}{row.damage.mean_kl.value:9.4f}"
    )
    print(line)

# %% tags=["nbval-ignore-output"]
head = model.head.weight.numel()
linear = sum(p.numel() for p in model.parameters() if p.dim() == 2) - head
beside = []
for name, key in (("INT8", "int8"), ("INT4", "int4")):
    (m,) = methods([name])
    ceiling = (head + linear) / (head + weight_bytes(model, m.bits) / 4 - head / 2)
    beside.append(
        dict(
            name=name, here=speeds[name][0].ratio.median, recorded=recorded(f"quantized.{key}.ratio"), ceiling=ceiling
        )
    )
plots.beside(beside, "x", "Decode, batch 1: speed / the unquantised model's")
plt.show()

# %% [markdown]
# *Ceiling: bytes of the weights read a token, before / after, here with the head left in float32.* At one request the
# weights are the memory and the time: W4A16. At 64 long requests the cache is most of the memory: KV INT8 saves more
# than 4-bit weights do. Prefill multiplies, so only 8-bit products can help it, where the machine has them.

# %% [markdown]
# ## 7. Where it backfires: fine perplexity, a broken task
#
# The head of a small model is a large part of its bytes, and many of its rows belong to tokens that a given text
# never uses: of a vocabulary of 49,152 nine in ten, of `tiny`'s 2,048 one in five. An idea that looks good on every
# plot so far: count the tokens of the book, keep the rows that occur at 8 bits, and round the rows that never occur
# to 2. What can go wrong, if they never occur?


# %%
end = end_of_turn(tokenizer)


def rare_rows(bits, symmetric=True, keep=(), book=words):
    """Rows of the head whose token the book does not have, at `bits`; the others, and those in keep, at 8."""

    def change(changed, calibration):
        weight = changed.head.weight.detach()
        rare = torch.bincount(torch.tensor(book, device=weight.device), minlength=len(weight)) == 0
        rare[list(keep)] = False
        small = fake_quantize(weight, Scheme(8))
        small[rare] = fake_quantize(weight[rare], Scheme(bits, symmetric))
        changed.head = torch.nn.Linear(*weight.T.shape, bias=False)  # no longer tied to the embedding
        changed.head.weight = torch.nn.Parameter(small, requires_grad=False)

    return Method(
        f"rare INT{bits} {'symmetric' if symmetric else 'asymmetric'}{', end kept' if keep else ''}", 15, change
    )


variants = [rare_rows(2), rare_rows(2, False), rare_rows(2, keep=(end,))]
broken = {row.name: row for row in judge(model, evaluation, None, questions, variants)}
print(
    f"{model.config.vocab_size - len(set(words))} of {model.config.vocab_size} tokens never occur; "
    f"one of them is {tokenizer.token_text(end)}"
)
heads = f"{'':30s}{'perplexity x':>22s}{'KL':>8s}{'top-1':>7s}{'passage':>9s}"
print(f"{heads}{'turn: over':>12s}{'cut':>6s}{'ln p(end), over':>17s}")
over = torch.tensor([q.choices[q.answer] == (end,) for q in questions["turn"]])
table = [("original", None, original["passage"], original["turn"])]
table += [(name, row.damage, row.scores["passage"], row.scores["turn"]) for name, row in broken.items()]
for name, d, first_task, second in table:
    line = f"{name:30s}" + (
        f"{'1':>22s}{'0':>8s}{'1':>7s}"
        if d is None
        else f"{shown(d.ratio):>22s}{d.mean_kl.value:8.4f}{d.agreement.value:7.3f}"
    )
    right, sure = second.correct, [row[i] for row, i, is_over in zip(second.scores, second.right, over) if is_over]
    line += f"{first_task.accuracy.value:9.2f}{right[over].mean():12.2f}{right[~over].mean():6.2f}"
    print(f"{line}{np.mean(sure):17.2f}")
bad = broken["rare INT2 symmetric"]
assert bad.damage.ratio.value < rows["INT4"].damage.ratio.high and bad.damage.agreement.value > 0.95
assert bad.scores["turn"].correct[over].mean() < 0.3 < 0.9 < original["turn"].correct[over].mean()
assert broken["rare INT2 symmetric, end kept"].scores["turn"].correct[over].mean() > 0.9

# %%
stuck = copy.deepcopy(model)
rare_rows(2).change(stuck, None)
LIMIT = pick(96, 48)


def answered(run, line):
    """(greedy tokens until the end of turn, did it come before LIMIT?)"""
    said = []
    prompt = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": line}]), False)
    for token in cached_tokens(run, prompt, LIMIT):
        if token == end:
            return said, True
        said.append(token)
    return said, False


ended = {}
for name, run in {"original": model, "rare INT2": stuck}.items():
    answers = [
        answered(run, line) for line in (*TALK, "What is a hacker?", "Define kluge.", "Who are you?", "Speak!")
    ]
    ended[name] = sum(done for _, done in answers)
    print(f"{name}: {ended[name]} of {len(answers)} answers end within {LIMIT} tokens")
    print("   ", repr(tokenizer.decode(answers[4][0]))[:200])
assert ended["rare INT2"] < ended["original"]

_, axes = plots.figure(1, 2, width=8.4, height=2.8)
names = ["INT4", "INT3", "INT2", *broken]
for ax, what in zip(axes, ("perplexity", "turn")):
    for place, name in enumerate(names):
        row = {**rows, **broken}[name]
        value = row.damage.ratio.value if what == "perplexity" else row.scores["turn"].correct[over].mean().item()
        ax.barh(place, value, color=plots.RED if row.chapter == 15 else plots.BLUE, height=0.6)
        ax.text(value, place, f" {value:.2f}", va="center", fontsize=8)
    ax.set_yticks(range(len(names)), names if ax is axes[0] else [""] * len(names))
    ax.invert_yaxis()
    ax.grid(False, axis="y")
axes[0].set(title="reported: perplexity x", xlim=(0, 3))
axes[1].set(title="used: share of answers that end", xlim=(0, 1.2))
plt.show()

# %% [markdown]
# *Red: the head's rare rows rounded; blue: whole methods.* At 2 bits, symmetric, perplexity stays within about a per
# cent, 98 of 100 greedy tokens and the passage task stay as they were, and the model never ends an answer again:
# every request runs to its token limit. The end of a turn has one row of the head, no novel contains it, and its
# ln p, where answers are over, fell by a few nats.
#
# - **Perplexity is blind by construction:** it reads the chance of tokens that came. A token that never comes costs
#   only the little mass it takes from others.
# - **Which setting breaks is luck.** Asymmetric 2 bits happens to err upwards on this one row, and passes with nearly
#   the same perplexity. No figure on the book foretells which.
# - **The cure is cheap, once it is seen:** keep that row, or count tokens (and calibrate) on chats. INT2 above, with
#   perplexity more than doubled, ends its answers.
# - Judge on text like the one that will be served, special tokens and all; then on what must happen: it stops, the
#   JSON parses, the tool call has its brackets.

# %% tags=["nbval-ignore-output"]
if smollm2 is not None:
    real, voice, ids, judged, tasks = smollm2
    print(f"smollm2-135m: {real.config.vocab_size - len(set(ids))} of {real.config.vocab_size} tokens never occur")
    for row in judge(real, judged, None, tasks, [rare_rows(4, book=ids)]):
        finished = torch.tensor([q.choices[q.answer] == (end_of_turn(voice),) for q in tasks["turn"]])
        was, now = (x["turn"].correct[finished].mean() for x in (row.original, row.scores))
        print(f"{row.name:22s} perplexity x {shown(row.damage.ratio)}, answers that are over: {was:.2f} -> {now:.2f}")
del smollm2

# %% [markdown]
# ## 8. Play
#
# How many tokens does it take to tell a method from the original? Grey: the two perplexities on their own; blue: the
# ratio from pairs. When blue leaves the line at 1, the damage is seen.


# %% tags=["nbval-ignore-output"]
def draw(ax, tokens, method):
    d = rows[method].damage
    base = d.reference_loss.mean().item()
    tokens = min(tokens, len(d.loss))
    changed, before, pairs = d.loss[:tokens], d.reference_loss[:tokens], (d.loss - d.reference_loss)[:tokens]
    for place, (values, centre, color) in enumerate(
        [(before, base, plots.GREY), (changed, base, plots.ORANGE), (pairs, 0.0, plots.BLUE)]
    ):
        interval = bootstrap(values, samples=500)
        low, high = math.exp(interval.low - centre), math.exp(interval.high - centre)
        ax.plot([low, high], [place] * 2, color=color, lw=6, solid_capstyle="butt")
        ax.plot(math.exp(interval.value - centre), place, "o", color="black", ms=2)
    ax.text(1, 2.4, f"{low:.3f} to {high:.3f}", fontsize=8, ha="center", va="center")  # of the last, the pairs
    ax.axvline(1, color="black", lw=0.8)
    ax.set_yticks([0, 1, 2], ["original", method, "ratio, paired"])
    ax.set(ylim=(2.7, -0.6), xlabel="perplexity, relative", xlim=(0.7, 1.4))


explore(
    draw,
    tokens=(128, len(evaluation) - 128, 128, 512),
    method=[name for name in ("INT4", "INT3", "INT8", "W8A8", "KV INT2") if name in rows],
    static=[dict(tokens=256), dict(tokens=1024), dict(tokens=len(evaluation) - 128)],
    height=2.6,
)

# %% [markdown]
# *Each bar: 95 % interval. The two upper bars hardly part at any length; the lowest does, for INT4 within a few
# thousand tokens.*

# %% [markdown]
# ## 9. Say it
#
# **"Perplexity 36.6 against 35.8: damage or noise?"**
# - *20 seconds.* Not to be told from the two numbers: each is uncertain by several per cent. Take the difference of
#   losses token by token on the same text, resample it in blocks, and see whether the interval holds 0.
# - *2 minutes.* The right panel of section 3; why hard passages cancel in pairs; why blocks and not tokens; the table
#   of section 6. Then what a window and a stride do to either number (section 1).
# - *Follow-up: two papers report 5.68 and 5.47 for one model?* Window, stride, first tokens scored or not, tokeniser,
#   text clean-up. Rerun both in one loop.
# - *The number:* with about 3 nats of spread a token, ± 0.5 % takes over a million tokens unpaired
#   (`15.tokens_unpaired`); in pairs, for INT4, about a hundredth of it (section 6, "How sure").
#
# **"What do you measure besides perplexity?"**
# - *20 seconds.* KL and top-1 agreement with the original, which cannot cancel; a task of the product with flips
#   counted; and what must happen, such as stopping.
# - *2 minutes.* The middle panel of section 3: equal loss, other distribution. The rows of the table whose perplexity
#   ratio holds 1 and whose top-1 does not. Then why a four-way task is coarse: INT2 keeps most of its answers.
# - *Follow-up: accuracy is equal, are the models?* Count flips. Dutta et al. 2024 found them on models of equal
#   accuracy, and found KL to go along with them.
# - *The number:* agreement 0.88 a token is another text within 32 tokens for most answers (`15.same_answer`).
#
# **"Which method for which deployment?"**
# - *20 seconds.* Few requests: weights fill the memory and the bandwidth, W4A16. Many or long requests: the cache
#   does, 8-bit KV. Prefill-bound: 8-bit products, W8A8 or FP8. Quality order: 8 bits anywhere, then 4 with GPTQ or
#   AWQ, and below that measure twice.
# - *2 minutes.* The selection table: bytes at 1 and at 64 requests; which column each method moves.
# - *Follow-up: can they be combined?* Weights and cache are independent, and damage roughly adds: the last row.
# - *The number:* Llama-3.1-8B in 16 bits holds 16 GB of weights; 64 x 8,192 tokens of cache are 69 GB (section 6).
#
# **"Perplexity is fine and users complain. Where do you look?"**
# - *20 seconds.* At tokens and contexts that the evaluation text does not have: end of turn, brackets, code, long
#   context, other languages. Perplexity never asked about them.
# - *2 minutes.* Section 7: one row of the head; which measures saw it, which did not; that the setting which broke
#   was luck; the cure.
# - *Follow-up: how would you have caught it?* A task that needs the token; share of answers that hit the limit;
#   evaluation text in the chat template.
# - *The number:* perplexity within about 1 %, answers that end: nearly all before, nearly none after (section 7).

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %%
predictions()

# %% [markdown]
# **Exercise:** `exercises/15_measuring_damage.ipynb`: perplexity with a stride, KL and top-1, a paired bootstrap in
# blocks, a multiple-choice scorer, a nightly perplexity that jumps, and how much text a claim needs.
#
# **Papers:** Efron 1979, *Bootstrap methods: another look at the jackknife*; Dutta et al. 2024, *Accuracy is not all
# you need* (arXiv:2407.09141); Frantar et al. 2022, *GPTQ* (arXiv:2210.17323), for the perplexity convention of
# windows without overlap; and the page *Perplexity of fixed-length models* of transformers' documentation.
#
# **Next:** chapter 16 leaves the model as it is and gets more tokens out of each step.
