# %% [markdown]
# # 11 Quantisation
#
# **Store each weight as a small whole number and share one scale among neighbours: decode reads a quarter or an
# eighth of the bytes, and the model hardly notices.**
#
# > *The interviewer asks:* "How do you go from float to INT4 and back? What do symmetric, asymmetric, per channel and
# > per group mean, what does a zero point cost, and when is a quantised model slower than the original?"
#
# You will be able to
# - quantise a matrix by hand, pack it two weights to a byte, and bound its error before you run anything;
# - count the bits a weight really takes, scales and zero points included, and the tokens/s that should follow;
# - name three cases in which it backfires: zero points that buy nothing, prefill, and a benchmark without damage.
#
# 40 minutes to read. `tiny` ships with the course; where `smollm2-135m` is present some cells run it, and say so.

# %%
import copy
import inspect
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from minillm import load_model, load_tokenizer
from minillm.kernels.launch import interpreted, why_not
from minillm.lab import explore, is_fast, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import clock
from minillm.measure.machine import ceilings
from minillm.measure.quality import bootstrap, difference, exp_interval, token_losses
from minillm.measure.quantized_bench import step, weights_read
from minillm.model.hub import ASSETS, is_available
from minillm.model.layout import pack_linears
from minillm.quant import affine, formats
from minillm.quant.affine import Scheme, dequantize, fake_quantize, quantize
from minillm.quant.linear import QuantLinear, as_module, linears, model_bytes, quantize_model, rtn
from minillm.quant.named import quantize_by_name
from minillm.quant.packing import pack, unpack
from minillm.quant.ungrid import distinct_in_groups, ungrid

torch.set_grad_enabled(False)
model = load_model("tiny", dtype="float32")
config, device = model.config, model.device
text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
tokens = load_tokenizer("tiny").encode(text[: pick(40_000, 8_000)])[: pick(4096, 1024)]
big_name = pick("smollm2-135m" if is_available("smollm2-135m") else "tiny", "tiny")
print(f"on {device}, {torch.get_num_threads()} CPU threads; larger cells run {big_name}")

# %% [markdown]
# ## 1. The waste, measured
#
# A float32 weight has 24 significant bits. How many of them does the model use? Keep fewer: round every matrix row to
# *b*-bit integers times one scale, put the floats back, and measure the loss on a book that the model was not trained
# on. A 95 % interval stands beside each value: it resamples blocks of tokens in pairs (chapter 15 tells how).


# %%
def rounded(scheme, name="tiny", fresh=None):
    """The model with every linear but the head rounded to the scheme and back, still in floats."""
    changed = load_model(name, dtype="float32") if fresh is None else fresh()
    for layer_name, linear in linears(changed, keep=("head",)).items():
        linear.weight.copy_(rtn(layer_name, linear, scheme).dequantize())
    return changed


losses = {"float32": token_losses(model, tokens, 256)}
for bits in (8, 6, 5, 4, 3, 2):
    losses[f"{bits} bits"] = token_losses(rounded(Scheme(bits)), tokens, 256)
for kind, loss in losses.items():
    extra = difference(loss, losses["float32"])
    print(f"{kind:8s} perplexity {exp_interval(bootstrap(loss))!s:28}  loss {extra.value:+.4f} nats against float32")
assert abs(difference(losses["8 bits"], losses["float32"]).value) < 0.01

# %% [markdown]
# 8 of 32 bits carry the model; the other 24 are read from memory for every token that is generated, and change
# nothing. Decode is bound by exactly those reads (chapter 00). Below about 4 bits the damage grows fast: this is
# round-to-nearest (RTN, 就近取整) with one scale a row, and the rest of this chapter and the next are about doing
# better with the same bits.

# %% [markdown]
# ## 2. Predict
#
# Quantisation (量化) in one line: **x ≈ scale x (q - zero)**, q a whole number of *b* bits. Five numbers first.
#
# - *Bits a weight.* INT4 with a 16-bit scale (缩放因子) for each group of 32: 4 + 16/32. With a 16-bit zero point
#   (零点) as well: 4 + 32/32.
# - *Bytes of the model.* Linears of the layers at that width; embedding, head and norms stay in float32 here.
# - *Error of rounding.* A value falls anywhere between two steps, so its error is uniform in ±½ step: root mean
#   square 1/√12 of a step.
# - *What one bit is worth.* Half the step, so half the error.
# - *Speed.* If decode only reads weights: bytes before / bytes after.

# %%
layer_weights = sum(m.weight.numel() for m in linears(model, keep=("head",)).values())
kept = sum(p.numel() for p in model.parameters()) - layer_weights
predict("11.bits_int4_g32", 4 + 16 / 32, "bits")
predict("11.bytes_int4", layer_weights * 4.5 / 8 + kept * 4, "B")
predict("11.rms_step", 1 / math.sqrt(12), "steps")
predict("11.one_bit", 2.0, "x")
predict("11.speedup_int4", 32 / 5, "x")  # from float32; the CPU's kernel reads a scale and an offset: 5 bits

# %% [markdown]
# ## 3. The idea, drawn


# %%
def number_line(ax, values, scheme, label=""):
    """Values above, the grid below, each value's way to its grid point; scale and zero in the title."""
    q = quantize(values, scheme)
    scale, zero = q.scale.flatten()[0].item(), 0.0 if q.zero is None else q.zero.flatten()[0].item()
    low, high = (-(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1)) if scheme.symmetric else (0, 2**scheme.bits)
    grid = [(code - zero) * scale for code in range(low, high)]
    for place, code in zip(grid, range(low, high)):
        unused = scheme.symmetric and code == low
        ax.plot([place] * 2, [-0.12, 0.12], color="#C8C8C8" if unused else plots.MEANING["technique"], lw=1.4)
        if scheme.bits <= 4 and ax.get_window_extent().width > 400:  # else they would overlap
            ax.text(
                place, -0.22, str(code), ha="center", va="top", fontsize=7, color="#999999" if unused else "black"
            )
    back = dequantize(q)
    for x, y in zip(values.flatten().tolist(), back.flatten().tolist()):
        ax.plot([x, y], [0.75, 0.16], color=plots.MEANING["prediction"], lw=0.9)
    ax.plot(values.flatten(), [0.75] * values.numel(), "o", color=plots.MEANING["naive"], markersize=4)
    ax.axvline(0, color="black", lw=0.6, ls=":")
    ax.set(ylim=(-0.75, 1.0), yticks=[])
    ax.grid(False)
    error = (back - values).square().mean().sqrt().item()
    ax.set_title(f"{label}scale {scale:.3f}, zero {zero:.3g}, rms error {error:.3f}", fontsize=9)


sample = torch.tensor([[-0.42, -0.18, -0.05, 0.0, 0.07, 0.21, 0.33, 0.58, 0.91, 1.3]])
_, axes = plots.figure(2, 1, height=3.4)
number_line(axes[0], sample, Scheme(4, True), "symmetric: ")
number_line(axes[1], sample, Scheme(4, False), "asymmetric: ")
plt.show()

# %% [markdown]
# *Grey: the numbers. Blue: the grid of 4 bits. Orange: rounding. Symmetric (对称): the grid is centred on 0, and
# spends half of itself on negative numbers that hardly occur here. Asymmetric (非对称): the zero point moves it
# onto the data, so that the step is smaller. In both, 0 stays 0.*
#
# Who shares a scale is the second choice:


# %%
def sharing(ax, kind, rows=4, columns=12, group=4):
    """A weight matrix [out, in], one colour for all that share a scale."""
    shades = ["#CFE3F2", "#7FB2D9", "#F2D4B0", "#E0A458", "#CBE3C8", "#86BF80", "#E8CFE0", "#C78FB5"]
    for i in range(rows):
        for j in range(columns):
            block = {"tensor": 0, "channel": i, "group": i * (columns // group) + j // group}[kind]
            ax.add_patch(plt.Rectangle((j, i), 0.94, 0.9, color=shades[block % len(shades)]))
    count = {"tensor": 1, "channel": rows, "group": rows * columns // group}[kind]
    ax.set(xlim=(-0.1, columns), ylim=(rows, -0.1), xticks=[], yticks=[], xlabel="in", ylabel="out")
    ax.grid(False)
    ax.set_title(f"per {kind}: {count} scale{'s' * (count > 1)}", fontsize=9)


_, axes = plots.figure(1, 3, width=7.6, height=1.7)
for ax, kind in zip(axes, ("tensor", "channel", "group")):
    sharing(ax, kind)
plt.show()

# %% [markdown]
# *One colour, one scale. Per tensor (逐张量); per channel (逐通道), one a row of W, which costs nothing in the
# product: the scale multiplies a finished output; per group (分组), which follows outliers closely but is met
# inside the sum. For activations the rows are tokens: per token (逐词元).*

# %% [markdown]
# ## 4. Build it
#
# Quantise, pack two codes to a byte, and multiply. A symmetric INT4 value is negative half of the time; what is
# packed is its *code*, the value + 8, so that no sign bit runs into the neighbour.


# %%
def small_quantize(w, bits, group, symmetric=True):
    """w [out, in] -> codes [out, in] in 0 .. 2^bits - 1, scale [out, groups, 1], zero [out, groups, 1] in codes."""
    g = w.view(len(w), -1, group)  # [out, groups, group]
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale = g.abs().amax(-1, keepdim=True) / top
        zero = torch.full_like(scale, 2 ** (bits - 1))
        q = (g / scale).round() + zero
    else:
        low, high = g.amin(-1, keepdim=True).clamp(max=0), g.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / (2**bits - 1)
        zero = (-low / scale).round()
        q = ((g / scale).add(zero).round()).clamp(0, 2**bits - 1)
    return q.to(torch.uint8).view_as(w), scale, zero


def small_pack(codes):
    """[out, in] -> [out, in / 2]: the even column in the low half, the odd one in the high half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def small_unpack(packed):
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # [out, in]


def small_linear(x, packed, scale, zero):
    """x [rows, in] -> [rows, out], the weights dequantised on their way."""
    codes = small_unpack(packed).unflatten(-1, (scale.shape[1], -1)).float()  # [out, groups, group]
    return x @ ((codes - zero) * scale).flatten(1).T


weight = model.layers[2].mlp.down.weight.cpu()  # [192, 512]
codes, scale, zero = small_quantize(weight, 4, 32)
packed = small_pack(codes)
assert torch.equal(small_unpack(packed), codes)
x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
drift = (small_linear(x, packed, scale, zero) - x @ weight.T).square().mean() / (x @ weight.T).square().mean()
print(
    f"{units.show(weight.nbytes, 'B')} of floats -> {units.show(packed.nbytes, 'B')} packed + {scale.numel()} scales"
)
off = (small_unpack(packed).view_as(weight).unflatten(1, (16, 32)) - zero) * scale - weight.unflatten(1, (16, 32))
print(f"largest error / step {(off.abs() / scale).max():.3f}")
print(f"the product is {drift.sqrt():.1%} off, root mean square")

# %% [markdown]
# ## 5. The library's version
#
# The same arithmetic, with the granularities and checks, from source:

# %%
print(inspect.getsource(affine.parameters))
print(inspect.getsource(affine.round_to))

# %% [markdown]
# | it adds | because |
# |---|---|
# | blocks of any granularity, as one last axis | tensor, channel, group and token are the same code |
# | `zero="float"` | GGUF's Q4_1 and torch's kernel do not round the zero point |
# | scales rounded to 16 bits *before* the integers are chosen | the integers then fit the scale that will be used |
# | 2, 3, 5, 6 and 7 bits as well | eight 3-bit codes fill three bytes; one stream of bits for all widths |
# | `kernel=` | `QuantLinear` unpacks, then multiplies: right everywhere. Fast forms unpack in registers |
#
# **Equal, proved:** the 40 lines against the library, packed against unpacked, every kernel against float64.

# %%
for symmetric in (True, False):
    codes, scale, zero = small_quantize(weight, 4, 32, symmetric)
    q = quantize(weight, Scheme(4, symmetric, "group", 32))
    assert torch.equal(q.codes(), codes) and torch.equal(q.scale, scale[..., 0])
    assert torch.equal(pack(codes, 4), small_pack(codes))
    assert torch.allclose(small_linear(x, small_pack(codes), scale, zero), x @ q.dequantize().T, atol=1e-4)
for bits in (2, 3, 4, 8):
    q = quantize(weight, Scheme(bits))
    assert torch.equal(unpack(pack(q.codes(), bits), bits), q.codes())
    assert torch.equal(
        QuantLinear(rtn("", nn.Linear(512, 192), Scheme(bits))).weight().isfinite().all(), torch.tensor(True)
    )
linear = nn.Linear(512, 192, bias=False)
linear.weight.copy_(weight)
for scheme in (Scheme(8), Scheme(4, True, "group", 32), Scheme(4, False, "group", 32)):
    q = rtn("", linear, scheme)
    exact = x.bfloat16().double() @ q.dequantize().double().T
    module = as_module(q, kernel="auto")
    error = (module(x.bfloat16()).double() - exact).abs().max() / exact.abs().max()
    print(f"{type(module).__name__:12s} {scheme.bits} bits, {scheme.granularity}: error {error:.1e} of the largest")
    assert error < 2**-6

# %% [markdown]
# On a CPU the fast forms are torch's own kernels, which take 16-bit activations: W4A16 is "4-bit weights, 16-bit
# activations". On a GPU the kernel is ours, in Triton. Its heart, from source: a scale is met once a group, *after*
# the sum of small whole numbers, and a zero point costs one more sum, that of x.

# %%
if why_not() is None:
    from minillm.kernels import matmul

    source = inspect.getsource(matmul.vector_kernel.kernel.fn if interpreted() else matmul.vector_kernel.fn.fn)
    print(source[source.index("        for i in tl.static_range") : source.index("    if HAS_BIAS")])
    q = rtn("", linear, Scheme(4, False, "group", 32))
    exact = x.double() @ q.dequantize().double().T
    where = "in Triton's interpreter" if interpreted() else "on this GPU"
    got = as_module(q, kernel="triton").to(device)(x.to(device)).cpu()
    print(f"{where}: error {(got - exact).abs().max() / exact.abs().max():.1e} of the largest output")
    assert (got - exact).abs().max() < 1e-4 * exact.abs().max()
else:
    print(f"not run here: {why_not()}")

# %% [markdown]
# **Blocks in files.** GGUF, llama.cpp's format, keeps scales and codes together, block after block. The library reads
# and makes four of its formats; values are bit-equal with the `gguf` package's.

# %%
from gguf import GGMLQuantizationType  # noqa: E402
from gguf.quants import dequantize as gguf_dequantize  # noqa: E402

rows = weight[:, :512]
print(f"{'':6s}{'weights':>8s}{'bytes':>7s}{'bits/weight':>13s}{'error / rms weight':>20s}")
for name, form in formats.FORMATS.items():
    raw = formats.quantize_blocks(rows, name)
    back = formats.dequantize_blocks(raw, name)
    theirs = gguf_dequantize(raw.numpy(), GGMLQuantizationType[name])
    assert np.array_equal(back.numpy(), theirs)
    error = ((back - rows).square().mean() / rows.square().mean()).sqrt()
    print(f"{name:6s}{form.weights:8d}{form.size:7d}{form.bits_per_weight:13.2f}{error:20.4f}")

# %% [markdown]
# Q4_0 is symmetric, Q4_1 has an offset (and half a bit more), and Q4_K pays for its offsets by quantising the scales
# themselves: 6-bit scales and offsets under two 16-bit ones, for 256 weights.

# %% [markdown]
# ## 6. Measure it
#
# ### Bytes and the half step
#
# Bytes first, because they are exact; then the error in steps, over all weights of all layers.

# %%
reveal("11.bits_int4_g32", Scheme(4, True, "group", 32).bits_per_weight((192, 512)))
small = quantize_model(load_model("tiny", dtype="float32"), bits=4, group_size=32, kernel="unpack")
reveal("11.bytes_int4", model_bytes(small))
assert model_bytes(small) == layer_weights * 4.5 / 8 + kept * 4

steps = []
for linear in linears(model, keep=("head",)).values():
    q = quantize(linear.weight, Scheme(4, True, "channel"))
    steps.append(((dequantize(q) - linear.weight) / q.scale).flatten())
reveal("11.rms_step", torch.cat(steps).square().mean().sqrt().item())
assert torch.cat(steps).abs().max() <= 0.5001


# %%
def weight_error(scheme, of=model):
    """Error of all layer weights, root mean square, over that of the weights."""
    pairs = [(fake_quantize(m.weight, scheme), m.weight) for m in linears(of, keep=("head",)).values()]
    wrong, total = (
        sum(s.item() for s in column)
        for column in zip(*(((a - b).square().sum(), b.square().sum()) for a, b in pairs))
    )
    return math.sqrt(wrong / total)


widths = [2, 3, 4, 5, 6, 7, 8]
outliers = load_model("tiny", dtype="float32")
for linear in linears(outliers, keep=("head",)).values():
    flat = linear.weight.view(-1)
    flat[::1009] = flat[::1009] * 10  # 1009 is a prime: the places wander over the columns
kinds = {"per tensor": ("tensor", None), "per channel": ("channel", None), "group 32": ("group", 32)}
_, axes = plots.figure(1, 2, width=7.6, height=3.2)
for ax, of, title in ((axes[0], model, "tiny as it is"), (axes[1], outliers, "1 weight in 1000 made 10 x larger")):
    for (label, (granularity, group)), color in zip(kinds.items(), plots.PALETTE):
        kind = [Scheme(b, True, granularity, group) for b in widths]
        curve = [weight_error(scheme, of) for scheme in kind]
        ax.semilogy(
            [k.bits_per_weight((300, 300)) for k in kind], curve, "o-", color=color, label=label, markersize=3
        )
    line = [curve[-1] * 2.0 ** (8 - b) for b in widths]
    ax.semilogy([b + 0.5 for b in widths], line, "--", color=plots.MEANING["ceiling"], label="half the error a bit")
    if of is model:
        reveal("11.one_bit", (curve[2] / curve[-1]) ** (1 / 4))  # group 32, from 4 bits to 8
    ax.set(xlabel="bits a weight, scales included", ylim=(3e-3, 1.5), title=title)
axes[0].set_ylabel("error / rms weight")
axes[0].legend()
plt.show()

# %% [markdown]
# *Each bit halves the error (6 dB), until so few levels are left that a symmetric grid misses one of four. Left:
# `tiny` has short rows and few outliers; a scale a row is nearly as good as groups, which cost half a bit and gain
# about as much. Right: one outlier stretches the steps of all that share its scale, of a whole row or of 31
# neighbours. Large models have outliers.*
#
# ### What the model feels
#
# Weight error is not what a user sees. Loss on held-out text, RTN, symmetric:

# %%
schemes = {
    "8 bits, row": Scheme(8),
    "4 bits, row": Scheme(4),
    "4 bits, group 64": Scheme(4, True, "group", 64),
    "4 bits, group 32": Scheme(4, True, "group", 32),
    "3 bits, group 32": Scheme(3, True, "group", 32),
    "2 bits, group 32": Scheme(2, True, "group", 32),
}


def quality(name, fresh, ids, schemes):
    """Perplexity of every scheme with its interval, and the loss over float32 from pairs of tokens."""
    base = token_losses(fresh(), ids, 256)
    print(f"{name}, {len(base)} tokens, windows of 256: float32 perplexity {exp_interval(bootstrap(base))}")
    extra = {}
    for label, scheme in schemes.items():
        loss = token_losses(rounded(scheme, fresh=fresh), ids, 256)
        extra[label] = (difference(loss, base), loss)
        bits = scheme.bits_per_weight((576, 576))
        print(f"{label:26s} {bits:5.2f} bits/weight  perplexity {loss.mean().exp():8.2f}  loss {extra[label][0]}")
    return extra


def fresh_tiny():
    return load_model("tiny", dtype="float32")


tiny_quality = quality("tiny", fresh_tiny, tokens, schemes)
assert (
    tiny_quality["8 bits, row"][0].value
    < tiny_quality["4 bits, row"][0].value
    < tiny_quality["3 bits, group 32"][0].value
)

# %% [markdown]
# ### Bytes against time
#
# One token at a time, in alternation with our float32. The prediction is bytes over bytes; the ceiling is the read
# bandwidth measured here over the bytes that are left.

# %% tags=["nbval-ignore-output"]
machine = ceilings(fast=is_fast())
dtype = None if device.type == "cuda" else "float32"
base = load_model(big_name, dtype=dtype)
before = model_bytes(base) - (0 if base.config.tie_embeddings else base.embed.weight.nbytes)  # tied: it is the head
pack_linears(base)
count, table = pick(16, 6), []
run_base = step(base, 32, count)
for name in ("int8", "int4"):
    quantised = quantize_by_name(load_model(big_name, dtype=dtype), name)
    pair = clock.paired(run_base, step(quantised, 32, count), repeats=pick(5, 3), warmup=1)
    after = weights_read(quantised)
    table.append(
        dict(
            name=name,
            here=count / pair.b.median,
            recorded=recorded(f"quantized.{name}.rate"),
            prediction=count / pair.a.median * before / after,
            ceiling=machine.read_bandwidth / after,
        )
    )
    if name == "int4":
        reveal("11.speedup_int4", pair.ratio.median)
    reads = f"reads {units.show(after, 'B')} a token for {units.show(before, 'B')}"
    print(f"{big_name} {name}: {reads}; {pair.ratio} x the unquantised speed")
plots.beside(table, "tokens/s", f"Decode, batch 1 ({big_name})", log=True)
plt.show()

# %% [markdown]
# *Orange: our float32 speed x ratio of bytes. Red: bandwidth / bytes.* The bytes shrink as promised; the time
# shrinks by less. What is left is everything that is not reading weights: launching a few hundred small operators a
# token, norms, attention. The smaller the model, the larger that share, and on `tiny` it is nearly all. Chapter 10
# is the cure: `LLM("smollm2-135m", quantization="int4", compile=True)`.
#
# Compiled, what costs is the work on each integer before it can be multiplied. `minillm/quant/row_forms.py` reads
# eight 4-bit codes as one 32-bit word and never shifts: `word & (15 << 4 i)` is code i times 16 to the i, so it is
# multiplied by x / 16 to the i, made once a call. Making the graph takes a minute, so here are the figures of one run
# of `minillm bench quantized`, with llama.cpp on the same weights beside it.

# %%
for name in ("int8", "int4"):
    gain, share, peer = (
        recorded(f"quantized.{name}.{part}")
        for part in ("compiled.ratio", "compiled.bandwidth_share", "over_llama_cpp")
    )
    print(f"smollm2-135m {name} compiled, tokens/s over our float32: {gain}")
    print(f"  share of the read bandwidth: {share}; over llama.cpp: {peer}")

# %% [markdown]
# *Neither is near the bandwidth: a small model on a CPU is bound by arithmetic long before bytes.* llama.cpp rounds
# the inputs to 8 bits as well and multiplies integers, several in one instruction; we multiply floats. That is what
# 8 bits are behind by.

# %% [markdown]
# ## 7. Where it backfires
#
# ### Zero points on weights that are symmetric already
#
# Weights are centred on 0. A zero point then moves the grid by next to nothing, but it has to be stored (half a bit a
# weight at group 32, 11 % more bytes to read) and multiplied (the extra sum). What does it buy?

# %%
contest = {
    "symmetric, group 32": Scheme(4, True, "group", 32),
    "asymmetric, group 32": Scheme(4, False, "group", 32),
    "float zero, group 32": Scheme(4, False, "group", 32, "float"),
    "symmetric, group 16": Scheme(4, True, "group", 16),
}
more = load_tokenizer("tiny").encode(text[: pick(100_000, 12_000)])[: pick(16_384, 2048)]  # small differences
found = quality("tiny", fresh_tiny, more, contest)
for label, scheme in contest.items():
    print(f"{label:22s} error of the weights {weight_error(scheme):.4f}")
for other in ("symmetric, group 32", "symmetric, group 16"):
    versus = difference(found["asymmetric, group 32"][1], found[other][1])
    print(f"loss of asymmetric, group 32, less that of {other}: {versus}")
    assert versus.high > 0  # no gain that these tokens can tell from chance
float_zero = "loss of float zero, group 32, less that of symmetric, group 32:"
print(float_zero, difference(found["float zero, group 32"][1], found["symmetric, group 32"][1]))

# %% [markdown]
# The asymmetric grid has 17 % less error in the weights: it uses all 16 codes, where the symmetric one leaves one
# unused. In the loss there is no gain that these tokens can tell from chance. Error of the weights counts all of them
# alike; what the model feels is the error of its outputs, where a weight that meets large inputs counts for more. And
# a whole zero point clips the largest weights of a group by up to half a step: a range of -a .. a wants zero = 7.5. A
# float zero point does not clip; it gains on `tiny`, and loses on `smollm2-135m` (the last line of the table further
# down). Chapter 12 measures outputs, not weights. At 2 bits the balance turns: of four levels none can be spared.

# %%
two = {
    "2 bits symmetric, group 32": Scheme(2, True, "group", 32),
    "2 bits asymmetric, group 32": Scheme(2, False, "group", 32),
}
at_two = quality("tiny", fresh_tiny, tokens, two)
assert at_two["2 bits asymmetric, group 32"][0].value < at_two["2 bits symmetric, group 32"][0].value

# %% [markdown]
# ### Many rows at once
#
# In prefill, or in a large batch, a weight that was read is used for hundreds of rows. Reading is then no longer
# the limit; arithmetic is, and unpacking is arithmetic on top. One linear, INT4 against the same matrix in 16 and
# 32 bits:

# %% tags=["nbval-ignore-output"]
size = pick(2048, 1024)
wide = nn.Linear(size, size, bias=False).to(device)
packed4 = as_module(rtn("", wide, Scheme(4, True, "group", 32)))
plain32 = pack_linears(nn.Sequential(wide))
plain16 = pack_linears(nn.Sequential(nn.Linear(size, size, bias=False).to(device, torch.bfloat16)))
counts, against = pick([1, 4, 16, 64, 256], [1, 8, 64]), {"float32": [], "bfloat16": []}
for n in counts:
    batch = torch.randn(n, size, device=device)
    half = batch.bfloat16()
    for kind, plain, given in (("float32", plain32, batch), ("bfloat16", plain16, half)):
        pair = clock.paired(lambda: plain(given), lambda: packed4(half), repeats=pick(9, 5), warmup=2)  # noqa: B023
        against[kind].append(pair.ratio.median)
    print(f"{n:4d} rows: INT4 is " + ", ".join(f"{v[-1]:.2f} x as fast as {k}" for k, v in against.items()))

_, ax = plots.figure(height=3.0)
for (kind, ratios), color in zip(against.items(), plots.PALETTE):
    ax.loglog(counts, ratios, "o-", color=color, label=f"against {kind}")
ax.axhline(1, color="black", lw=0.8)
plots.plain_log_ticks(ax.xaxis, counts)
plots.plain_log_ticks(ax.yaxis, [0.125, 0.25, 0.5, 1, 2, 4])
ax.set(xlabel="rows of x (tokens at once)", ylabel="speed-up of INT4", title=f"One linear of {size} x {size}")
ax.legend()
plt.show()

# %% [markdown]
# *Below the line the quantised product is the slower one.* Weight-only quantisation buys tokens/s at small batches
# and memory at all batches. Where compute is the limit, the activations must be integers too, so that the products
# themselves are cheaper: W8A8, chapter 13.
#
# ### A benchmark without damage
#
# Models are often at hand only as a file that was quantised before. Dequantised, it looks like floats; but it lies
# on a grid, and rounding it again to the same grid costs nothing. Any method looks perfect on it. Here is the trap,
# set and sprung: weights that went through Q4_1 once, then INT4, group 32, with a float zero point.


# %%
def on_a_grid(changed):
    """As a Q4_1 file gives its weights back."""
    for linear in linears(changed, keep=("head",)).values():
        raw = formats.quantize_blocks(linear.weight.cpu(), "Q4_1")
        linear.weight.copy_(formats.dequantize_blocks(raw, "Q4_1"))
    return changed


def trap(name, fresh, ids):
    """INT4 on the file as it is, and on the same function with its grid broken."""
    free = Scheme(4, False, "group", 32, "float")
    stuck, mended = fresh(), ungrid(fresh())
    sample = torch.tensor([ids[:64]], device=stuck.device)
    before = stuck(sample)
    changed = (mended(sample) - before).abs().max() / before.abs().max()
    print(f"{name}: ungrid changes logits by {changed:.0e} of the largest")
    assert changed < 1e-3
    cost = {}
    for kind, make in (("on its grid", fresh), ("grid broken", lambda: ungrid(fresh()))):
        base = make()
        levels = distinct_in_groups(base.layers[0].mlp.down.weight)
        error = weight_error(free, base)
        cost[kind] = difference(token_losses(rounded(free, fresh=make), ids, 256), token_losses(base, ids, 256))
        print(
            f"  {kind}: {levels:4.1f} different numbers in a group of 32; INT4 error {error:.4f}, loss {cost[kind]}"
        )
    return cost


cost = trap("tiny, through Q4_1", lambda: on_a_grid(fresh_tiny()), tokens)
assert abs(cost["on its grid"].value) < 0.002

# %% [markdown]
# `ungrid` keeps the function and breaks the grid: columns of a linear are scaled against the gains of the norm before
# it, rows of V against columns of O, rows of up against columns of down, by mild factors drawn for each channel. The
# logits stay; neighbours no longer share a grid, and INT4 costs what it costs on weights that were never rounded. The
# lesson for any benchmark you read: *what were the weights before?*
#
# The same on a real file, where it is present; the offline `smollm2-135m` is a Q4_1 file.

# %%
if big_name == "smollm2-135m":
    big_ids = load_tokenizer(big_name).encode(text[:6000])[:512]

    loaded = load_model(big_name, dtype="float32")

    def fresh_big():
        return copy.deepcopy(loaded)

    on_grid = distinct_in_groups(fresh_big().layers[0].mlp.down.weight) <= 16
    print(f"smollm2-135m here {'lies on a 4-bit grid' if on_grid else 'was never on a 4-bit grid'}")
    if on_grid:
        trap(big_name, fresh_big, big_ids)
    ladder = {k: v for k, v in schemes.items() if "64" not in k and "2 bits" not in k} | contest
    kind = f"{big_name}, grid broken" if on_grid else big_name
    found = quality(kind, (lambda: ungrid(fresh_big())) if on_grid else fresh_big, big_ids, ladder)
    print(float_zero, difference(found["float zero, group 32"][1], found["symmetric, group 32"][1]))
else:
    print("smollm2-135m: not run here (minillm pull smollm2-135m, and full mode)")

# %% [markdown]
# `tiny` has spare bits in its weights; a model that was trained on many more tokens for each parameter has fewer, and
# the same rounding hurts it more: 4 bits are no free lunch, which is why chapter 12 exists.

# %% [markdown]
# ## 8. Play
#
# The number line, with data of your choice. Pull an outlier out and watch the step grow for everyone; take bits away;
# shift the data and switch the zero point on.


# %% tags=["nbval-ignore-output"]
def play(ax, bits, outlier, shift, symmetric):
    values = torch.linspace(-1, 1, 13)[None].pow(3) * 0.8 + shift
    values[0, -1] = values[0, -1] * outlier
    number_line(ax, values, Scheme(bits, symmetric))
    if bits > 4:
        ax.set_xlabel(f"{2**bits} grid points")


explore(
    play,
    bits=(2, 8, 1, 4),
    outlier=(1.0, 5.0, 0.5, 1.0),
    shift=(-1.0, 1.0, 0.25, 0.0),
    symmetric=[True, False],
    static=[dict(outlier=4.0), dict(shift=1.0), dict(shift=1.0, symmetric=False)],
    height=2.6,
)

# %% [markdown]
# *With one outlier of 4 x the others, most of the codes lie where no data is: the step is set by the largest number
# of a group, the error by the step. Shifted data waste half a symmetric grid; the zero point wins it back.*

# %% [markdown]
# ## 9. Say it
#
# **"What is quantisation?"**
# - *20 seconds.* x ≈ scale x (q - zero): whole numbers of b bits, one scale for a tensor, a row or a group. Rounding
#   errs by at most half a step, 1/√12 of a step on average. Decode reads weights, so bytes saved are time saved.
# - *2 minutes.* Symmetric: scale = max|x| / (2^(b-1) - 1), no zero. Asymmetric: scale = (max - min) / (2^b - 1), zero
#   = -min/scale, rounded so that 0 stays 0 (section 3). Granularity: one outlier stretches the step of all that share
#   its scale, so groups of 32 to 128 at 4 bits, a scale a row at 8. Count the overhead: 4.5 bits with a 16-bit scale
#   a group of 32. Each bit is a factor of 2 in error (section 6). 8 bits a row: next to nothing; 4 bits in groups:
#   little on `tiny`, over ten per cent of perplexity on smollm2; 3 and 2: much, and there the method matters (GPTQ,
#   AWQ).
# - *Follow-up: why per channel of the output, not of the input?* A scale of a row of W leaves the sum: it
#   multiplies a finished output. A scale of a column would sit inside the sum, at every product.
# - *The number:* 4.5 bits a weight for INT4, group 32; error x ½ a bit.
#
# **"Symmetric or asymmetric?"**
# - *20 seconds.* Weights are symmetric: use no zero point. Activations after a ReLU or GELU, and values in the KV
#   cache, are not. At 2 bits use it anyway: a symmetric grid has three levels, not four.
# - *2 minutes.* A zero point costs bytes (half a bit at group 32 in 16 bits) and one sum of x a group in the
#   kernel. First part of section 7: 17 % less weight error at 4 bits, and no better model; a whole zero point clips
#   the largest weights by up to half a step. GGUF's Q4_K makes zero points nearly free by quantising them too.
# - *Follow-up: must the zero point be a whole number?* Only if an exact 0 matters (padding, ReLU); Q4_1 and torch's
#   kernel keep it as a float.
# - *The number:* 5.0 bits against 4.5.
#
# **"Is a quantised model faster?"**
# - *20 seconds.* At small batches, up to the ratio of bytes. In prefill and large batches it is not, and may be
#   slower: unpacking is extra arithmetic where arithmetic is the limit.
# - *2 minutes.* The red and the orange marks of section 6: bytes fall by the formula; time falls by less, because
#   launches, norms and attention stay. Then the crossing in section 7. W4A16 computes in 16 bits; only integer
#   activations (W8A8) or FP8 speed up the products themselves.
# - *Follow-up: what makes the kernel fast?* Unpack in registers, never write the floats back; scale after the sum,
#   once a group; long contiguous reads. *Follow-up: what does it save at all batches?* Memory: more room for KV,
#   larger batches.
# - *The number:* at most 32 / 5 over float32, 16 / 4.5 over 16 bits.
#
# **"How would you check a claim of lossless 4-bit?"**
# - *20 seconds.* Ask what the weights were before. A checkpoint that was 4-bit once lies on a grid, and every
#   method is lossless on it. Count the different numbers in a group: 16 or fewer gives it away.
# - *2 minutes.* The trap of section 7, its repair by function-preserving folds, and intervals: compare on the same
#   tokens, in pairs; a difference whose interval holds 0 has not been shown.
# - *Follow-up: is perplexity enough?* No, see chapter 15.
# - *The number:* 16 different numbers in 32.

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %% tags=["nbval-ignore-output"]
predictions()

# %% [markdown]
# **Exercise:** `exercises/11_quantization.ipynb`: quantise by hand, pack and unpack, group scales in the product, a
# sign bug in a packed INT4, and bits for a memory budget.
#
# **Papers:** Jacob et al. 2018, *Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
# Inference* (arXiv:1712.05877), for scale and zero point; Dettmers et al. 2022, *LLM.int8()* (arXiv:2208.07339),
# for rows, columns and outliers; Dettmers and Zettlemoyer 2023, *The case for 4-bit precision* (arXiv:2212.09720),
# for why 4 bits in small blocks is the place to be at a given number of bytes.
#
# **Next:** chapter 12 chooses the integers with care: GPTQ and AWQ against round-to-nearest, at the same bits.
