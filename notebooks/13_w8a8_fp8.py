# %% [markdown]
# # 13 W8A8, SmoothQuant and FP8
#
# **Quantise the activations too, and the product itself runs on 8-bit units. What stands in the way is a few channels
# that are many times louder than the rest.**
#
# > *The interviewer asks:* "INT8 weights halve the bytes. What do INT8 activations buy on top, why do they break some
# > models, what does SmoothQuant do about it, and why does FP8 have less of the problem?"
#
# You will be able to
# - say which scales can leave a sum of products, and therefore why an outlier channel hurts;
# - derive SmoothQuant's scale, fold it, and choose alpha by measuring;
# - cast to E4M3 by hand, and say when eight bits of integer beat eight bits of float.
#
# 35 minutes to read. All of it runs on `tiny`, which ships with the course; where `smollm2-135m` is present two cells
# of section 6 run it, and say so.

# %%
import copy
import inspect

import matplotlib.pyplot as plt
import numpy as np
import torch

from minillm import LLM, SamplingParams, load_model, load_tokenizer
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal
from minillm.measure import clock
from minillm.measure.gemm_bench import one_size
from minillm.measure.quality import Reference, difference
from minillm.model.hub import ASSETS, is_available
from minillm.model.layout import faster_linear
from minillm.quant.affine import Scheme
from minillm.quant.fp8 import E4M3, E5M2, cast, cast_by_hand, fp8_model, numbers, why_emulated
from minillm.quant.linear import as_module, quantize_model, rtn
from minillm.quant.smoothquant import channel_maxima, inject_outliers, smooth_model, smoothing_scale
from minillm.quant.ungrid import ungrid
from minillm.quant.w8a8 import W8A8Linear, w8a8_model

original = load_model("tiny", dtype="float32")
config, device = original.config, original.device
tokenizer = load_tokenizer("tiny")
text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
words = tokenizer.encode(text)
calibration = torch.tensor(words[: 8 * 128]).view(8, 128)
evaluation = words[-pick(4096, 1024) :]  # the other end of the book
reference = Reference(original, evaluation, window=256)


def fresh(model=original):
    return copy.deepcopy(model)


print(f"model: tiny, on {device}, {torch.get_num_threads()} CPU threads")
print(f"calibration: {calibration.numel()} tokens; evaluation: {len(evaluation)} others")
print(f"FP8 here: {why_emulated(device) or 'on matrix units'}")

# %% [markdown]
# ## 1. The waste, measured
#
# Chapter 11's linears read 8-bit weights and multiply in 16 bits: **W8A16**. At batch 1 reading is all there is, and
# half the bytes is half the time. With many rows (a prompt, a large batch) arithmetic decides, and unpacking is work
# on top. **W8A8** multiplies integers by integers. One linear of 576 inputs and 1,536 outputs, time over that of the
# wide product, paired:


# %% tags=["nbval-ignore-output"]
def over_wide(rows, inputs=576, outputs=1536):
    """{name: seconds / seconds of the wide product}. Few rows: over many matrices, so that none waits in a cache."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    forms = {"wide": [], "W8A16": [], "W8A8": []}
    for _ in range(18 if rows < 64 else 1):
        linear = torch.nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
        forms["W8A16"].append(as_module(rtn("", linear, Scheme(8))))
        forms["W8A8"].append(W8A8Linear(linear))
        forms["wide"].append(faster_linear(linear) or linear)

    def run(name):
        return lambda: [m(x) for m in forms[name]]

    with torch.inference_mode():
        return {
            name: clock.paired(run(name), run("wide"), repeats=pick(21, 7)).ratio.median for name in ("W8A16", "W8A8")
        }


rows = [1, 32, 512]
found = {n: over_wide(n) for n in rows}
_, ax = plots.figure(height=2.6)
for offset, name, color in ((-0.18, "W8A16", plots.ORANGE), (0.18, "W8A8", plots.BLUE)):
    ax.bar(np.arange(3) + offset, [found[n][name] for n in rows], 0.34, color=color, label=name)
ax.axhline(1, color="black", lw=0.9)
ax.set_xticks(range(3), [f"{n} row{'s' if n > 1 else ''}" for n in rows])
ax.set(ylabel="time / wide product's", title="8-bit weights, with wide and with 8-bit activations")
ax.legend()
plt.show()
for n in rows:
    print(f"{n:4d} rows: " + ", ".join(f"{name} {value:.2f} x" for name, value in found[n].items()))

# %% [markdown]
# *Below 1 is faster than the wide product (float32 on a CPU, bfloat16 on a GPU).* So activations should be integers
# as well. Just do it? Below: `tiny` as it is, and `tiny` with two **outlier channels** (离群通道): the gain of each
# norm is multiplied by 60 in two channels, the columns behind it divided by 60. The function is the same. *This
# outlier is made by hand*; section 6 looks for real ones.

# %%
FACTOR, LOUD = 60, (5, 100)
loud = inject_outliers(fresh(), FACTOR, LOUD)
damage = {}
for name, model in (("tiny", original), ("outliers", loud)):
    for inputs in ("token", "tensor"):
        damage[name, inputs] = reference.damage(w8a8_model(fresh(model), inputs))
same = reference.damage(loud)
print(f"outliers, float: perplexity x {same.ratio.value:.6f}, KL {abs(same.mean_kl.value):.1e}")
for (name, inputs), found in damage.items():
    print(f"{name:9s} W8A8, a scale a {inputs:7s} perplexity x {found.ratio!s:24s} KL {found.mean_kl}")
assert damage["outliers", "token"].mean_kl.low > 20 * damage["tiny", "token"].mean_kl.high
assert same.mean_kl.value < 1e-6

# %% [markdown]
# *KL (KL 散度): mean divergence from the float model's prediction, in nats a token; in brackets 95 % intervals from
# chapter 12's paired bootstrap.* The same function, the same 8 bits, and two channels of 192 make the damage.

# %% [markdown]
# ## 2. Predict
#
# - *Codes left.* One channel of a token is 60 x as loud as another. They share a scale of 127 steps: on how many
#   steps does the quiet channel's largest value lie? 127 / 60.
# - *The longest sum.* INT8 products are added up in INT32: how many of 127 x 127 fit under 2³¹?
# - *E4M3's worst error*, relative: 3 bits of mantissa (尾数) are 8 steps from one power of two to the next. Half a
#   step, at the worst place, which is just above the power of two: 1 / 17.
# - *Where INT8 and E4M3 tie.* INT8 errs by A / (127 √12) (root mean square), A being the largest value that shares
#   the scale. E4M3's step in [2ᵉ, 2ᵉ⁺¹] is 2ᵉ / 8, and numbers spread evenly there have a mean square of 7/3 4ᵉ: it
#   errs by 1 / (8 √12 √(7/3)) of the numbers' own size. Equal at A / size = 127 / (8 √(7/3)).

# %%
predict("13.codes_left", 127 / FACTOR, "steps")
predict("13.longest_sum", 2**31 // 127**2, "inputs")
predict("13.e4m3_worst", 1 / 17)
predict("13.tie", 127 / (8 * (7 / 3) ** 0.5))

# %% [markdown]
# ## 3. The idea, drawn
#
# A scale may leave a sum only if it does not depend on what is summed over:
#
# > `y[m,n] = Σₖ x[m,k] W[n,k] ≈ s_x[m] · s_w[n] · Σₖ Qx[m,k] Qw[n,k]`
#
# A scale a token m and a scale an output n are outside. A scale an input channel k would sit inside the sum, and the
# sum would not be one of integers. But outliers live in channels.


# %%
def matrix(ax, data, title, xlabel, ylabel, marks, color):
    ax.imshow(data, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel, xticks=[], yticks=[])
    ax.grid(False)
    for row in marks:
        ax.annotate(
            "s",
            (data.shape[1] - 0.35, row),
            annotation_clip=False,
            va="center",
            color=color,
            weight="bold",
            fontsize=9,
        )


generator = np.random.default_rng(3)
x_drawn, w_drawn = np.abs(generator.normal(size=(5, 12))), np.abs(generator.normal(size=(7, 12)))
x_drawn[:, 4] *= 12
fig, axes = plots.figure(1, 4, width=9.0, height=2.4)
matrix(
    axes[0],
    x_drawn / x_drawn.max(1, keepdims=True),
    "x: a scale a token",
    "channel k",
    "token m",
    range(5),
    "#D55E00",
)
matrix(axes[1], w_drawn / w_drawn.max(), "W: a scale an output", "channel k", "output n", range(7), "#009E73")
s = np.sqrt(x_drawn.max(0) / w_drawn.max(0))
xs, ws = x_drawn / s, w_drawn * s
matrix(axes[2], xs / xs.max(1, keepdims=True), "x / s", "channel k", "token m", range(5), "#D55E00")
matrix(axes[3], ws / ws.max(1, keepdims=True), "W · s", "channel k", "output n", range(7), "#009E73")
plt.show()

# %% [markdown]
# *Dark: close to the largest value that shares the scale. Left: one loud channel takes the whole range of every
# token, the others fall on the lowest codes. Right, **SmoothQuant** (平滑量化): divide channel k of x by s_k,
# multiply column k of W by s_k. The product is the same, and half of the trouble has gone to the weights, which have
# room. The division is folded into the norm before, so it costs nothing.*
#
# > `s_k = max|x_k|^α / max|W_k|^(1-α)`
#
# And the other way out: numbers whose step grows with their size.

# %%
_, axes = plots.figure(2, 1, width=8.2, height=2.3)
integers = np.arange(0, 128) / 127 * 448
for ax, codes, title, color in (
    (axes[0], integers, "INT8: 127 equal steps up to the largest", plots.BLUE),
    (axes[1], numbers(E4M3).numpy(), "FP8 E4M3, S.EEEE.MMM: 8 steps from each power of two to the next", plots.RED),
):
    ax.vlines(codes, 0, 1, color=color, lw=0.5)
    ax.set(xlim=(-1, 449), yticks=[], ylim=(0, 1))
    ax.set_title(title, loc="left", fontsize=9)
    ax.grid(False)
axes[1].set_xlabel("value, largest = 448")
plt.show()
for low, high in ((0, 7), (7, 28), (28, 448)):
    counts = [int(((codes > low) & (codes <= high)).sum()) for codes in (integers, numbers(E4M3).numpy())]
    print(f"codes in ({low:3d}, {high:3d}]: INT8 {counts[0]:3d}, E4M3 {counts[1]:3d}")

# %% [markdown]
# *Each line is a code; both have eight bits.* A channel 60 x quieter than the outlier lives in the first row of that
# table: two codes of an integer, dozens of a float. In return the float is coarser near the top.

# %% [markdown]
# ## 4. Build it


# %%
def to_int8(x):
    """Rows: x [rows, n] -> int8 [rows, n], scale [rows, 1]."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round().to(torch.int8), scale


def small_w8a8(x, w):
    (a, scale_x), (b, scale_w) = to_int8(x), to_int8(w)
    return torch._int_mm(a, b.T) * scale_x * scale_w.T  # int32 [tokens, out], then both scales


def small_scale(x, w, alpha):
    return x.abs().amax(0) ** alpha / w.abs().amax(0) ** (1 - alpha)  # [in]


def small_e4m3(x):
    """What is left of x after a cast: no bits, only arithmetic."""
    x = x.clamp(-448, 448)  # saturate
    exponent = torch.log2(x.abs().clamp(min=2.0**-20)).floor().clamp(min=-6)
    step = 2 ** (exponent - 3)  # 8 steps from 2^e to 2^(e+1); equal steps below 2^-6
    return (x / step).round() * step


def small_fp8(x, w):
    scale_x, scale_w = (t.abs().amax(-1, keepdim=True) / 448 for t in (x, w))
    return small_e4m3(x / scale_x) @ small_e4m3(w / scale_w).T * scale_x * scale_w.T


caught = {}
hook = original.layers[2].attn.qkv.register_forward_pre_hook(lambda module, args: caught.update(x=args[0]))
with torch.no_grad():
    original.hidden(calibration.to(device))
hook.remove()
x, w = caught["x"].flatten(0, 1), original.layers[2].attn.qkv.weight.detach()
spoilt = x.clone()
spoilt[:, LOUD] *= FACTOR  # here the weights do not make up for it: this x is just loud


def error_of(y, x):
    return ((y - x @ w.T).square().mean() / (x @ w.T).square().mean()).sqrt().item()


for name, data in (("as it is", x), (f"two channels x {FACTOR}", spoilt)):
    s = small_scale(data, w, 0.5)
    figures = {"INT8": small_w8a8(data, w), "smoothed INT8": small_w8a8(data / s, w * s), "E4M3": small_fp8(data, w)}
    print(f"{name:20s} " + ", ".join(f"{key} {error_of(y, data):.2%}" for key, y in figures.items()))
    rest = [k for k in range(x.shape[1]) if k not in LOUD]
    quiet = to_int8(data)[0][:, rest].abs().max(1).values.float().median()
    print(f"{'':20s} largest code of an ordinary channel, median token: {quiet:.0f}")

one = torch.full((1, 2), 1.0, device=device)
one[0, 1] = FACTOR
reveal("13.codes_left", (one / to_int8(one)[1])[0, 0])

# %% [markdown]
# *Output error of `layers.2.attn.qkv`, root mean square over that of the output.* A tenth of the codes is left to the
# ordinary channels, and smoothing brings them back. E4M3 does not notice; without outliers it is the coarser one.

# %% [markdown]
# ## 5. The library's version

# %%
print(inspect.getsource(W8A8Linear.forward))
print(inspect.getsource(W8A8Linear.quantize_inputs))

# %%
print(inspect.getsource(cast_by_hand))

# %% [markdown]
# | it adds | because |
# |---|---|
# | scales by token, by tensor, static | static ones cost nothing at run time, and clip what calibration did not see |
# | exact sums where `torch._int_mm` refuses a shape | float64 holds every such sum |
# | folds into norms (with biases), V's rows, up's rows | the division must be free, in every family of chapter 01 |
# | one scale for query heads that share a KV head | they read the same V |
# | saturation, NaN, subnormal numbers | torch's cast of 1000 to E4M3 was NaN before version 2.12 |
# | `why_emulated` | FP8 without FP8 matrix units is a study of rounding, not of speed |
#
# **Proved.** Three things: small equals library; the cast by hand equals torch's, bit by bit, on every bfloat16
# there is; smoothing changes nothing before rounding.

# %%
layer = W8A8Linear(torch.nn.Linear(*w.T.shape, bias=False, device=device))
layer.values, layer.scale = to_int8(w)[0], to_int8(w)[1].flatten()
assert torch.allclose(layer(x), small_w8a8(x, w), atol=1e-4 * (x @ w.T).abs().max().item())
every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
for form, last in ((E4M3, 464), (E5M2, 61440)):  # from half a step above the largest number on, casts differ
    inside = every.float().abs() < last
    theirs, mine = every.to(form.dtype).view(torch.uint8), cast_by_hand(every, form)
    assert torch.equal(mine[inside], theirs[inside])
    assert torch.equal(mine[~every.isnan()], cast(every, form).view(torch.uint8)[~every.isnan()])
    above = torch.tensor([2.0 * last, float("inf"), float("nan")])
    print(
        f"{form.name}: {int(inside.sum())} values bit-equal; {above[0]:g}, inf, nan -> here "
        f"{cast(above, form).float().tolist()}, torch {torch.__version__.split('+')[0]} "
        f"{above.to(form.dtype).float().tolist()}"
    )
assert torch.equal(small_e4m3(every.float()[~every.isnan()]), cast(every, E4M3).float()[~every.isnan()])

maxima = channel_maxima(loud, calibration)
smoothed = fresh(loud)
scales = smooth_model(smoothed, maxima, 0.5)
with torch.no_grad():
    before, after = loud(calibration[:2].to(device)), smoothed(calibration[:2].to(device))
change = ((after - before).abs().max() / before.abs().max()).item()
print(f"SmoothQuant: {len(scales)} linears smoothed, logits changed by {change:.1e}")
assert change < 1e-5

spread = torch.exp2(torch.rand(10**6, generator=torch.Generator().manual_seed(0)) * 8)
reveal("13.e4m3_worst", ((cast(spread).float() - spread).abs() / spread).max())
ends = []
for k in (133_144, 133_152):  # 17 rows and multiples of 8: what a GPU's integer product asks for
    full = torch.full((17, k), 127, dtype=torch.int8, device=device)
    ends.append(int(torch._int_mm(full, full[:8].T)[0, 0]))
print(f"sums of 127 x 127 in INT32: {ends}")
reveal("13.longest_sum", ends[0] // 127**2)
assert ends[0] == 133_144 * 127**2 and ends[1] < 0

# %% [markdown]
# The tie of section 2, measured: normal numbers, with one value a row that grows. What is compared is the error of
# the other values.

# %%
generator = torch.Generator().manual_seed(0)
plain = torch.randn(256, 4096, generator=generator)
ratios = [4, 6, 8, 10, 12, 16, 24, 48, 100]
errors = {"INT8": [], "E4M3": [], "E5M2": []}
for ratio in ratios:
    data = plain.clamp(-ratio, ratio)
    data[:, 0] = ratio
    for name, back in (
        ("INT8", (to_int8(data)[0] * to_int8(data)[1])),
        *(
            (form.name.upper(), cast(data * form.largest / ratio, form).float() * ratio / form.largest)
            for form in (E4M3, E5M2)
        ),
    ):
        errors[name].append((back - data)[:, 1:].square().mean().sqrt().item())
_, ax = plots.figure(height=3.0)
for (name, values), color in zip(errors.items(), (plots.BLUE, plots.RED, plots.PINK)):
    ax.loglog(ratios, [v * 100 for v in values], "o-", color=color, label=name)
gap = np.log(np.array(errors["INT8"]) / np.array(errors["E4M3"]))
cross = int(np.argmax(gap > 0))
tie = np.exp(np.interp(0, gap[cross - 1 : cross + 1], np.log(ratios[cross - 1 : cross + 1])))
ax.axvline(tie, color=plots.GREY, lw=0.9, ls=":")
plots.plain_log_ticks(ax.xaxis, ratios)
plots.plain_log_ticks(ax.yaxis, [1, 2, 5, 10, 20])
ax.set(xlabel="largest value in the row / root mean square of the others", ylabel="error, % of the others")
ax.set_title("Eight bits, three ways to spend them")
ax.legend()
plt.show()
reveal("13.tie", tie)

# %% [markdown]
# *Normal numbers alone have their largest of 4,096 near 4: there INT8 is the finer one by far. INT8's error is the
# outlier's; a float's is each number's own.* The tie comes a little later than predicted: normal numbers crowd at the
# low end of their largest octave, where a step of 1/8 octave is the most.

# %% [markdown]
# ## 6. Measure it
#
# ### Who is loud?
#
# The largest |x| of each channel over the calibration text; drawn is the loudest channel over the median one, for the
# input of every linear.


# %% tags=["nbval-ignore-output"]
def real_model():
    """smollm2-135m off its 4-bit grid (chapter 11), its calibration text and its tokens to be judged on."""
    model = ungrid(load_model("smollm2-135m", dtype="float32"))
    ids = load_tokenizer("smollm2-135m").encode(text)
    return model, torch.tensor(ids[: 4 * 128]).view(4, 128), ids[-512:]


PARTS = {"attn.qkv": plots.BLUE, "attn.out": plots.SKY, "mlp.gate_up": plots.GREEN, "mlp.down": plots.RED}
big = real_model() if is_available("smollm2-135m") and pick(True, False) else None
profiles = {"tiny": channel_maxima(original, calibration)}
if big:
    profiles["smollm2-135m"] = channel_maxima(*big[:2])
_, axes = plots.figure(1, len(profiles), width=4.4 * len(profiles), height=3.0)
for ax, (name, seen) in zip(np.atleast_1d(axes), profiles.items()):
    for part, color in PARTS.items():
        tops = [(v.max() / v.median()).item() for key, v in seen.items() if key.endswith(part)]
        ax.semilogy(range(len(tops)), tops, "o-", ms=3.5, color=color, label=part)
    ticks, top = ([1, 2, 4, 8], 20) if name == "tiny" else ([1, 10, 100, 1000], 40_000)
    ax.set(xlabel="layer", title=f"{name}: loudest / median channel", ylim=(1, top))
    plots.plain_log_ticks(ax.yaxis, ticks)
    ax.legend(ncols=2, loc="upper center", fontsize=7.5)
plt.show()
for name, seen in profiles.items():
    key = max(seen, key=lambda k: seen[k].max() / seen[k].median())
    v = seen[key]
    print(f"{name}: {key}, channel {int(v.argmax())}: up to {v.max():.0f}, {v.max() / v.median():.0f} x the median")
if big:
    seen = []
    hook = big[0].layers[int(key.split(".")[1])].mlp.down.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    with torch.no_grad():
        big[0].hidden(big[1][:1].to(device))
    hook.remove()
    tokens = seen[0][0].abs().amax(-1)  # [time]
    print(
        f"  by token: position {int(tokens.argmax())} reaches {tokens.max():.0f}, "
        f"the next one {tokens.topk(2).values[1]:.1f}"
    )
else:
    print("smollm2-135m is not here, or this is fast mode")

# %% [markdown]
# *`tiny` has no outliers worth the name. The larger model's are in the inputs of `mlp.down`, the product of two
# branches, and the loudest is a single number: one channel of the first token of the text, where attention parks what
# it does not need (Sun et al. 2024 call them massive activations, 极大激活).* The SmoothQuant and LLM.int8 papers
# found theirs in the inputs of qkv and of the first MLP matrix: systematic, in the same few channels for all tokens,
# in models from 6.7 billion parameters on. We stand in for those by hand.

# %% [markdown]
# ### Repaired?
#
# `tiny` with the two channels of section 1. Everything in 8 bits; the head in float.

# %% tags=["nbval-ignore-output"]
smooth_maxima = channel_maxima(smoothed, calibration)
variants = {
    "weights only (W8A16)": lambda: quantize_model(fresh(loud), bits=8, group_size=None, kernel="unpack"),
    "INT8, token": lambda: w8a8_model(fresh(loud)),
    "INT8, tensor": lambda: w8a8_model(fresh(loud), "tensor"),
    "INT8, static": lambda: w8a8_model(fresh(loud), "static", maxima),
    "SmoothQuant, token": lambda: w8a8_model(fresh(smoothed)),
    "SmoothQuant, tensor": lambda: w8a8_model(fresh(smoothed), "tensor"),
    "SmoothQuant, static": lambda: w8a8_model(fresh(smoothed), "static", smooth_maxima),
    "FP8 E4M3, row": lambda: fp8_model(fresh(loud)),
    "FP8 E4M3, tensor": lambda: fp8_model(fresh(loud), granularity="tensor"),
    "FP8 E5M2, row": lambda: fp8_model(fresh(loud), "e5m2"),
}
results = {name: reference.damage(make()) for name, make in variants.items()}


def forest(results, title):
    """Mean KL with its interval, a line a variant."""
    _, ax = plots.figure(height=0.8 + 0.26 * len(results))
    for place, (name, found) in enumerate(results.items()):
        kl = found.mean_kl
        color = {"I": plots.GREY, "S": plots.BLUE, "F": plots.RED}.get(name[0], plots.GREEN)
        ax.plot([kl.low, kl.high], [place, place], color=color, lw=3)
        ax.plot(kl.value, place, "o", color=color, markeredgecolor="black", mew=0.5)
    ax.set_yticks(range(len(results)), list(results))
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set(xlabel="KL from the float model, nats a token", title=title)
    plt.show()


forest(results, f"Two channels x {FACTOR} (tiny)")
print(f"{'':22s}{'perplexity / float':>26s}{'top-1 agreement':>26s}")
for name, found in results.items():
    print(f"{name:22s}{found.ratio!s:>26s}{found.agreement!s:>26s}")
assert results["SmoothQuant, token"].mean_kl.high < results["INT8, token"].mean_kl.low / 20
assert results["SmoothQuant, token"].mean_kl.high < results["FP8 E4M3, row"].mean_kl.low

# %% [markdown]
# *Points and 95 % intervals, logarithmic.* The order is not that of a slogan:
#
# - **Outliers hurt the activations**, not the weights: W8A16 hardly notices.
# - **A scale a tensor or a static one is far worse than one a token**, since the loudest token of all sets it. Two
#   requests in a batch then share a scale: a token's result depends on who else is there.
# - **SmoothQuant repairs all three.**
# - **FP8 needs no repair, and is the coarser one**: three bits of mantissa against INT8's seven for the values near
#   the top. FP8's fame is not precision; it is that nothing has to be calibrated, and that training uses it.
#
# ### A real outlier
#
# `smollm2-135m`, all 30 layers, as it is: nothing is injected. Its outliers are in `mlp.down`, so the authors' places
# (inputs of norms) do not reach them; the fold through up's rows does.

# %% tags=["nbval-ignore-output"]
real = {}
if big:
    model, sample, judged = big
    seen, ref = profiles["smollm2-135m"], Reference(model, judged, window=256)

    def smooth(alpha, sites="all"):
        changed = fresh(model)
        smooth_model(changed, seen, alpha, sites)
        return changed

    real["INT8, token"] = ref.damage(w8a8_model(fresh(model)))
    real["INT8, static"] = ref.damage(w8a8_model(fresh(model), "static", seen))
    real["SmoothQuant norms 0.5, token"] = ref.damage(w8a8_model(smooth(0.5, "norms")))
    for alpha in (0.0, 0.5, 0.75, 1.0):
        real[f"SmoothQuant all {alpha}, token"] = ref.damage(w8a8_model(smooth(alpha)))
    changed = smooth(0.75)
    real["SmoothQuant all 0.75, static"] = ref.damage(
        w8a8_model(changed, "static", channel_maxima(fresh(changed), sample))
    )
    real["FP8 E4M3, row"] = ref.damage(fp8_model(fresh(model)))
    forest(real, f"smollm2-135m, perplexity {ref.perplexity.value:.1f}")
    for name, found in real.items():
        print(f"{name:30s} perplexity x {found.ratio!s:24s} top-1 {found.agreement.value:.1%}")
else:
    print("smollm2-135m is not here, or this is fast mode")
print(f"recorded on a GPU, INT8 a token, perplexity x {recorded('damage.w8a8.ratio')}")

# %% [markdown]
# *One number in one layer ruins a static scale, and no scale a token but its own token's.* With a scale a token the
# damage comes from elsewhere: channels of qkv's inputs that are 10 to 30 x the median in every token, and those the
# authors' places do reach. Compare alphas 0, 0.5, 0.75 and 1 before you read on. The authors used 0.5 for OPT and
# BLOOM; public W8A8 recipes for Llama 3 set 0.7 to 0.8 and smooth `down_proj` through `up_proj` as we do here.

# %% [markdown]
# ### Speed of the product
#
# INT8 and FP8 tensor cores do twice the operations of bfloat16's (an H100's data sheet, dense: 1,979 against 989
# TFLOP/s). "Product" is the bare product of 8-bit numbers; "layer" also finds the scales, rounds, and puts the scales
# back. Speed over the wide product of torch:

# %% tags=["nbval-ignore-output"]
lines = []
for count in pick((1, 16, 256), (1, 64)):
    for each in one_size(1536, 576, count, pick(15, 5), device):
        if each.name.endswith(".ratio"):
            kind, part = each.name.split(".")[1:3]
            low, high = each.spread
            print(f"{kind} {part:8s} {count:4d} rows: {each.value:.2f} x [{low:.2f}, {high:.2f}]")
            if part == "layer" or count > 1:
                known = recorded(f"gemm.{kind}.{part}.4096x4096.rows{512 if count > 1 else 1}.ratio")
                rows_text = f"{count} row{'s' if count > 1 else ''}"
                lines.append(dict(name=f"{kind} {part}, {rows_text}", here=each.value, recorded=known, prediction=2))
plots.beside(lines, "x", "Speed of 8 bits over wide (recorded: 4096 x 4096)")
plt.show()
print(f"FP8: {why_emulated(device) or 'measured above'}")

# %% [markdown]
# *Orange: the 2 x of the data sheet. A CPU with INT8 instructions (VNNI) may be above it, since its wide side
# is float32, four times as wide.* At one row what is won is bytes, and W8A16 has won those too (section 1): the
# rounding of activations comes on top. With many rows it is the gap between "product" and "layer": that is why
# engines fuse the quantisation of x into the norm before it.
#
# And as an engine runs it:

# %% tags=["nbval-ignore-output"]
prompts = [words[200 * i : 200 * i + 40] for i in range(4)]
params = SamplingParams(max_tokens=pick(24, 8), temperature=0.0, ignore_eos=True)
answers = {}
for name in (None, "w8a8", "fp8"):
    outputs = LLM("tiny", dtype="float32", quantization=name).generate(prompts, params)
    answers[name] = [out.token_ids for out in outputs]
for name in ("w8a8", "fp8"):
    same = sum(a == b for mine, theirs in zip(answers[name], answers[None]) for a, b in zip(mine, theirs))
    print(f'LLM("tiny", quantization="{name}"): {same} of {sum(map(len, answers[None]))} greedy tokens as in float32')
print(repr(tokenizer.decode(answers["w8a8"][0])))

# %% [markdown]
# ## 7. Where it backfires: alpha at 0 and 1
#
# First, why the outliers of section 1 cannot tell: make x_k f times louder and W_k f times quieter, and s_k becomes
# f times larger, for *any* alpha. SmoothQuant undoes every such fold exactly. What alpha decides is what becomes of
# ranges that the weights do not mirror. So: `tiny` as it is, all four kinds of linear smoothed.

# %%
alphas = pick([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.5, 1.0])
curve, own = {}, channel_maxima(original, calibration)
for alpha in alphas:
    model = fresh()
    smooth_model(model, own, alpha, "all")
    curve[alpha] = reference.damage(w8a8_model(model))
naive = damage["tiny", "token"]
_, ax = plots.figure(height=2.8)
kls = [curve[alpha].mean_kl for alpha in alphas]
ax.errorbar(
    alphas,
    [k.value for k in kls],
    yerr=np.array([[k.value - k.low, k.high - k.value] for k in kls]).T,
    fmt="o-",
    color=plots.BLUE,
    capsize=3,
    label="SmoothQuant",
)
ax.axhspan(naive.mean_kl.low, naive.mean_kl.high, color=plots.GREY, alpha=0.35, label="not smoothed")
ax.set(xlabel="alpha", ylabel="KL, nats a token", title="W8A8, a scale a token (tiny, no outliers)", ylim=(0, None))
ax.legend()
plt.show()
for alpha in (0.0, 1.0):
    worse = difference(curve[alpha].kl, naive.kl)
    print(f"alpha {alpha:.0f}, KL more than without smoothing: {worse}")
    assert worse.low > 0
twice = []
for model in (fresh(), fresh(loud)):
    smooth_model(model, channel_maxima(model, calibration), 0.0)
    twice.append(model.layers[2].attn.qkv.weight)
print(f"alpha 0, with and without the outliers: weights differ by {(twice[0] - twice[1]).abs().max():.1e}")
assert torch.allclose(*twice, rtol=1e-3, atol=1e-5)

# %% [markdown]
# *Grey: plain W8A8.* At **alpha 0** every weight column gets the same range and the activations take what the weights
# had: columns that are small because they matter little make their channels loud. At **alpha 1** every channel of x
# is equally loud and the weights are spoilt. Both ends are worse than doing nothing. Where nothing is loud the middle
# wins nothing either: measure before you smooth.
#
# Three more ways to lose:
#
# - **One request.** At one row W8A8 reads the bytes of W8A16 and rounds as well (section 1).
# - **E5M2 for inference.** Two bits of mantissa: the last line of the table in section 6. Its range is for gradients.
# - **Casting without saturation.** One value above the range, and a row is gone:

# %%
row = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)) * 100
scale = row.abs().max() / 448 / 1.5  # a static scale from a quieter text
for name, cast_to in (("saturating", lambda v: cast(v, E5M2)), ("torch's E5M2 cast", lambda v: v.to(E5M2.dtype))):
    y = cast_to(row / scale * E5M2.largest / 448).float() @ torch.randn(
        64, 2, generator=torch.Generator().manual_seed(1)
    )
    print(f"{name:18s} {y.flatten().tolist()}")

# %% [markdown]
# ## 8. Play
#
# Inputs and weights of `layers.2.attn.qkv`, channel by channel. Make two channels louder; turn alpha.


# %% tags=["nbval-ignore-output"]
x_shown = x[:: max(1, len(x) // 256)]
order = x_shown.abs().amax(0).argsort(descending=True)


def draw(ax, alpha, louder):
    data = x_shown.clone()
    data[:, LOUD] *= louder
    s = smoothing_scale(data.abs().amax(0), w, alpha)
    tops = [(data / s).abs().amax(0)[order].cpu(), (w * s).abs().amax(0)[order].cpu()]
    for top, color, label in zip(tops, (plots.ORANGE, plots.GREEN), ("max |x / s|", "max |W s|")):
        ax.semilogy(top / top.median(), color=color, lw=1, label=label)
    right = data @ w.T
    errors = [(small_w8a8(a, b) - right).norm() / right.norm() for a, b in ((data, w), (data / s, w * s))]
    ax.set(xlabel="channel", ylabel="over the median", ylim=(0.05, 300))
    ax.legend(loc="upper right", fontsize=7)
    words = f"output error {errors[1]:.2%}, not smoothed {errors[0]:.2%}"
    if ax.figure.axes == [ax]:
        ax.set_title(words)
    else:
        ax.set_xlabel(words.replace(", ", "\n"), fontsize=8)


explore(
    draw,
    alpha=(0.0, 1.0, 0.05, 0.5),
    louder=[60, 1, 10, 200],
    static=[dict(alpha=0.0), dict(alpha=0.5), dict(alpha=1.0)],
    height=3.0,
)

# %% [markdown]
# *Two spikes of x, 60 x, that the weights do not mirror. A flat line is a range without outliers. At 0.5 the spikes
# are shared; at 0 x keeps them and takes the weights' unevenness too; at 1 the weights have them all.*

# %% [markdown]
# ## 9. Say it
#
# **"What does W8A8 buy over 8-bit weights?"**
# - *20 seconds.* Weight-only saves bytes, so it speeds up decode at small batches. W8A8 also runs the product on
#   8-bit units, twice as fast on tensor cores, so it speeds up prefill and large batches. Quality costs more, since
#   activations have outliers.
# - *2 minutes.* The bars of section 1: one row, 512 rows. Then the formula of section 3: which scales can leave the
#   sum. Then what dynamic scales cost: "Speed of the product", product against layer.
# - *Follow-up: which would you use for a chat at batch 1?* Weight-only, 4 bits. W8A8 or FP8 for throughput.
# - *The number:* 2 x the operations of bfloat16; INT32 sums are safe up to 133,144 inputs (`13.longest_sum`).
#
# **"What is SmoothQuant?"**
# - *20 seconds.* Divide each input channel by s, multiply the weight's column by s; fold the division into the norm
#   before. Same function, but the outlier channel is shared between activations and weights. s is the channel's
#   largest input to the alpha over the column's largest weight to the one minus alpha.
# - *2 minutes.* The four matrices of section 3; exact before rounding (section 5); the forest of section 6; the curve
#   of section 7. Where it folds: norms; through V and up as well.
# - *Follow-up: alpha?* 0.5 to 0.8, by measuring. 0 and 1 are worse than nothing (section 7).
# - *The number:* a channel 60 x louder leaves the others 2 codes of 127 (`13.codes_left`).
#
# **"INT8 or FP8?"**
# - *20 seconds.* Same bytes, same speed. E4M3 has 8 steps an octave, so it errs 2 to 6 % of each value and ignores
#   outliers; INT8 has 127 equal steps, finer unless the largest value is over ten times the typical one. FP8 needs no
#   calibration; INT8 runs on older cards.
# - *2 minutes.* The number lines of section 3, the crossing of section 5, the forest of section 6: FP8 unaffected by
#   outliers, smoothed INT8 better than FP8 on both of our models.
# - *Follow-up: E4M3 or E5M2?* E4M3 forward, E5M2 for gradients; section 6 shows what the lost bit costs.
# - *The number:* they tie where the largest value is about 10 x the root mean square (`13.tie`).
#
# **"Per tensor or per token, dynamic or static?"**
# - *20 seconds.* Per token, dynamic, for quality: a loud token harms only itself, and batching changes nothing.
#   Static per tensor is cheapest and needs both calibration and smoothing.
# - *2 minutes.* The three INT8 lines of section 6, then the real outlier: one number at the first token. Then the
#   cost of dynamic: one more pass over x, fused into the norm.
# - *Follow-up: per channel?* It would stand inside the sum. That is what SmoothQuant folds away.
# - *The number:* one value in one layer of a 135M model decides the static scale of that layer (section 6).

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %%
predictions()

# %% [markdown]
# **Exercise:** `exercises/13_w8a8_fp8.ipynb`: an integer product with a scale a token, SmoothQuant's scale and its
# fold, a cast to E4M3, a smoothed layer that got worse, and estimates.
#
# **Papers:** Xiao et al. 2022, *SmoothQuant* (arXiv:2211.10438); Dettmers et al. 2022, *LLM.int8()*
# (arXiv:2208.07339), which keeps the outlier channels in 16 bits; Micikevicius et al. 2022, *FP8 Formats for Deep
# Learning* (arXiv:2209.05433); Sun et al. 2024, *Massive Activations in Large Language Models* (arXiv:2402.17762).
#
# **Next:** chapter 14 quantises what is left in 16 bits: the keys and values.
