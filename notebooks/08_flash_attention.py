# %% [markdown]
# # 08 FlashAttention
#
# **Attention over a long prompt without ever storing the matrix of scores: tile by tile, with a running maximum and
# a running sum.**
#
# > *The interviewer asks:* "FlashAttention does no fewer FLOPs than the textbook. Why is it faster, and how can a
# > softmax be computed before all its scores are known?"
#
# You will be able to
# - derive online softmax and rescale a partial result by hand;
# - count the bytes that naive and tiled attention move, and say when the difference matters;
# - read a Triton attention kernel: grid, tiles, causal skip, masks only where they are needed.
#
# 40 minutes to read. It runs on `tiny`'s own queries and keys, and on random ones where they must be longer.

# %%
import inspect
import math

import matplotlib.pyplot as plt
import numpy as np
import torch

from minillm import load_model, load_tokenizer
from minillm.kernels.attention import choose_backend
from minillm.kernels.flash_reference import flash_attention_reference, key_range
from minillm.kernels.launch import interpreted, why_not
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import clock
from minillm.measure.attention_counts import AttentionShape, attention_flops, flash_bytes, naive_bytes, score_bytes
from minillm.measure.peak import LiveBytes
from minillm.model.attention import attend_now, naive_attention, visible
from minillm.model.attention import attention as sdpa
from minillm.model.hub import ASSETS

model, tokenizer = load_model("tiny", dtype="float32"), load_tokenizer("tiny")
config, device = model.config, model.device
words = tokenizer.encode((ASSETS / "heldout.txt").read_text(encoding="utf-8")[:8000])
print(f"model: tiny, on {device}, {torch.get_num_threads()} CPU threads")
print("Triton:", why_not() or ("interpreted, right values without speed" if interpreted() else "compiled"))
print("attention='auto' takes", choose_backend("auto", device))

# %% [markdown]
# ## 1. The waste, measured
#
# Attention is two matrix products with a softmax between them: `softmax(scale * q @ k.T) @ v`. Written that way, the
# scores (分数矩阵) of n tokens are n x n numbers a head: written to memory, read by the mask, by the softmax, and
# again by the second product. The products are nearly all of the FLOPs. Are they also the time?


# %% tags=["nbval-ignore-output"]
def random_qkv(n, heads=4, dim=64, batch=1, seed=0):
    """[batch, n, heads, dim], three times."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, n, heads, dim, generator=generator).to(device) for _ in "qkv"]


def naive(q, k, v):
    """The formula, causal, in the layout of the cache's seam: [batch, time, heads, dim]."""
    mask = visible(q.shape[1], k.shape[1], device=q.device)
    out = naive_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, q.shape[-1] ** -0.5)
    return out.transpose(1, 2)


n = pick(2048, 512)
q, k, v = (x.transpose(1, 2) for x in random_qkv(n))  # [1, heads, n, dim]
mask, scores = ~visible(n, n, device=device), q @ k.mT
weights = scores.softmax(-1)
parts = {
    "q @ k.T": lambda: q @ k.mT,
    "scale": lambda: scores * 0.125,
    "mask": lambda: scores.masked_fill(mask, -math.inf),
    "softmax": lambda: scores.softmax(-1),
    "weights @ v": lambda: weights @ v,
}
seconds = {name: clock.timed(part, pick(7, 3), 1).median for name, part in parts.items()}
flops = {"q @ k.T": 2 * 64, "scale": 1, "mask": 0, "softmax": 4, "weights @ v": 2 * 64}  # a score
_, ax = plots.figure(height=2.4)
for row, values in enumerate((flops, seconds)):
    left, total = 0.0, sum(values.values())
    for (name, value), color in zip(values.items(), plots.PALETTE):
        share = 100 * value / total
        ax.barh(row, share, left=left, color=color, label=name if row else None, height=0.6)
        if share > 7:
            ax.text(left + share / 2, row, f"{share:.0f} %", ha="center", va="center", fontsize=8, color="white")
        left += share
ax.set(yticks=[0, 1], xlim=(0, 100), xlabel="share, %", title=f"Naive attention over {n} tokens, step by step")
ax.set_yticklabels(["FLOPs", "time"])
ax.invert_yaxis()
ax.grid(False)
ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=5)
plt.show()
between = sum(seconds[name] for name in ("scale", "mask", "softmax")) / sum(seconds.values())
print(
    f"scale, mask and softmax: {5 / 261:.0%} of the FLOPs, {between:.0%} of the time; one matrix of scores is",
    end=" ",
)
print(units.show(scores.nbytes, "B"))

# %% [markdown]
# *The three steps in the middle do next to nothing per number. Their time is the passage of n x n numbers through
# memory: on a GPU between HBM (显存) and the SM (流多处理器), here between DRAM and cache.*

# %% [markdown]
# ## 2. Predict
#
# Causal attention, 4 heads of 64, float32. Write down:
#
# - *Peak bytes* of naive attention at n = 1,024: two matrices (scores, and what comes of them),
#   `2 x heads x n x n x 4`.
# - *How peak memory grows*: the exponent p of n^p, naive. Tiled, the bytes that one more token adds: a row of the
#   output, `heads x dim x 4`, and a log-sum-exp a head.
# - *Share of blocks visited* if tiles are 64 x 64 and n = 1,024: above the diagonal nobody looks.
#   `(n / B + 1) / (2 n / B)`.
# - *Bytes moved*, naive against tiled, n = 4,096 with tiles of 128 queries. Naive: q, k, v and the output once, the
#   scores four times. Tiled: q and the output once, k and v once for each tile of queries that sees them, so about
#   `n / 128 / 2` times.

# %%
heads, dim, itemsize = 4, 64, 4
predict("08.naive_peak", 2 * heads * 1024**2 * itemsize, "B")
predict("08.naive_exponent", 2.0, "")
predict("08.tiled_a_token", heads * dim * itemsize + heads * 4, "B")
predict("08.visited", (1024 / 64 + 1) / (2 * 1024 / 64), "")
naive_numbers = 4 * 4096 * dim + 4 * 4096**2  # a head
flash_numbers = 2 * 4096 * dim + 4096 / 128 / 2 * 2 * 4096 * dim
predict("08.bytes_ratio", naive_numbers / flash_numbers, "x")

# %% [markdown]
# ## 3. The idea, drawn
#
# Softmax needs the largest score, so that no exponential overflows, and the sum of all. **Online softmax**
# (在线 softmax; Milakov and Gimelshein 2018) keeps both *so far*. When a larger score comes, what was summed under
# the old maximum is worth `exp(old - new)` of what it was. Three scores, 2, 5, 3, with values 10, 20, 30:

# %%
m, total, acc, rows = -math.inf, 0.0, 0.0, []
for score, value in zip((2.0, 5.0, 3.0), (10.0, 20.0, 30.0)):
    new_m = max(m, score)
    alpha, p = math.exp(m - new_m), math.exp(score - new_m)
    total, acc, m = total * alpha + p, acc * alpha + p * value, new_m
    rows.append((score, m, alpha, p, total, acc, acc / total))
print(f"{'score':>6s}{'m':>6s}{'alpha':>8s}{'p':>8s}{'sum':>8s}{'acc':>9s}{'acc/sum':>9s}")
for row in rows:
    print("{:6.0f}{:6.0f}{:8.3f}{:8.3f}{:8.3f}{:9.3f}{:9.3f}".format(*row))
exact = (torch.tensor([2.0, 5.0, 3.0]).softmax(0) @ torch.tensor([10.0, 20.0, 30.0])).item()
print(f"softmax in one go: {exact:.3f}")
assert math.isclose(acc / total, exact, rel_tol=1e-6)

# %% [markdown]
# After each row `acc / sum` is the exact answer for the keys seen so far: nothing is approximate. **alpha** is the
# whole trick: 0 at the first score (nothing was there), 0.05 when 5 beats 2, 1 when the maximum stays.
#
# Now tiles (分块). A program owns a tile of queries and walks along the keys, block by block; on the chip (片上
# SRAM) it holds one block of K and V, and for each query m, the sum and acc.


# %%
def tile_picture(ax, time, length, block_m, block_n, current=None):
    """Scores as a grid of tiles: skipped, visited without a mask, visited with one; `current` (query, key) dark."""
    for first in range(0, time, block_m):
        last = min(first + block_m, time) - 1
        visited = dict(key_range(first, last, time, length, block_n).blocks(block_n))
        for key in range(0, length, block_n):
            color = "#F2F2F2" if key not in visited else ("#FAE3B4" if visited[key] else "#BFE0F5")
            if current is not None and (first, key) == current:
                color = plots.BLUE
            width, height = min(block_n, length - key), last + 1 - first
            ax.add_patch(plt.Rectangle((key, first), width, height, facecolor=color, edgecolor="white", lw=1.5))
    shift = length - time
    corners = [(0, -shift), *((x + 1, x + 1 - shift) for x in range(length))]
    ax.plot([x for x, _ in corners], [max(0, y) for _, y in corners], color="black", lw=0.8)
    ax.set(xlim=(0, length), ylim=(time, 0), xlabel="key", ylabel="query", aspect="equal")
    ax.grid(False)


_, axes = plots.figure(1, 3, width=7.6, height=2.9)
for ax, (time, title) in zip(axes, ((64, "prefill"), (24, "the last 24 of 64"), (64, "who does what"))):
    tile_picture(ax, time, 64, 8, 8)
    ax.set_title(title)
ax.add_patch(plt.Rectangle((0, 40), 48, 8, fill=False, edgecolor=plots.RED, lw=2))
ax.annotate("", (48, 44), (0, 44), arrowprops=dict(arrowstyle="->", color=plots.RED, lw=1.8))
ax.text(34, 12, "skipped", ha="center", fontsize=8)
ax.text(64, 36, "one program:\nm, sum, acc", ha="right", fontsize=8, color=plots.RED)
plt.show()

# %% [markdown]
# *Blue: all queries of the tile see all keys of the block, no mask is needed. Yellow: on the diagonal, masked. Grey:
# nobody sees them, never loaded. Middle: a chunk of a prompt (chapter 06) stands at the end of its keys
# ("bottom-right"). Right: the red program is the only one that needs these queries; programs never talk.*

# %% [markdown]
# ## 4. Build it
#
# One tile, then the loop. Tensors of one head; the step is the three-number table with rows instead of numbers.


# %%
def tile_step(state, q, k, v, mask=None):
    """One block of keys into (m, total, acc). q [M, dim], k [N, dim], v [N, dim], mask [M, N]: True where seen."""
    m, total, acc = state
    s = q @ k.T * q.shape[-1] ** -0.5  # [M, N]
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    new_m = torch.maximum(m, s.amax(-1))  # [M]
    alpha, p = torch.exp(m - new_m), torch.exp(s - new_m[:, None])  # [M], [M, N]
    return new_m, total * alpha + p.sum(-1), acc * alpha[:, None] + p @ v


def small_flash(q, k, v, size=64):
    """Causal attention of one head, [n, dim] each. Holds size x size scores at a time."""
    out = torch.empty_like(q)
    for first in range(0, len(q), size):  # a program each
        tile = q[first : first + size]  # [M, dim]
        state = torch.full((len(tile),), -math.inf), torch.zeros(len(tile)), torch.zeros_like(tile)
        for block in range(0, first + len(tile), size):  # keys after the tile's last query: skipped
            keys = slice(block, min(block + size, len(k)))
            diagonal = torch.ones(len(tile), len(k[keys]), dtype=torch.bool).tril() if block == first else None
            state = tile_step(state, tile, k[keys], v[keys], diagonal)
        out[first : first + size] = state[2] / state[1][:, None]
    return out


# %% [markdown]
# Equal to the formula, at lengths around the tile's border, on the queries and keys of the real model: layer 0 over
# a page of a book.


# %%
class Recorder:
    """Stands where a cache stands, and keeps what each layer attends over."""

    def __init__(self):
        self.seen = []

    def positions(self, shape):
        return torch.arange(shape[-1], device=device).expand(shape)

    def attend(self, layer, q, k, v):
        self.seen.append((q, k, v))
        return attend_now(layer, q, k, v)


recorder = Recorder()
with torch.inference_mode():
    model(torch.tensor([words[: config.max_length]], device=device), cache=recorder)
real = [tuple(x.clone() for x in layer) for layer in recorder.seen]
q, k, v = real[0]
print("tiny, layer 0: q", list(q.shape), "k", list(k.shape))
for length in (1, 2, 63, 64, 65, 200, config.max_length):
    one = [x[0, :length, 0].cpu() for x in (q, k, v)]
    expected = naive(*(x[None, :, None] for x in one))[0, :, 0]
    torch.testing.assert_close(small_flash(*one), expected, rtol=1e-4, atol=1e-5)
print("small_flash equals the formula at 1, 2, 63, 64, 65, 200 and", config.max_length, "tokens")

# %% [markdown]
# ## 5. The library's version
#
# In Triton, and the same in torch line for line (`flash_reference`) for those who read no Triton yet. The inner loop:

# %%
SOURCE = "minillm.kernels.flash_attention"
if why_not() is None:
    from minillm.kernels.flash_attention import flash_attention, over_keys

    print(inspect.getsource(over_keys.fn))
else:
    print(inspect.getsource(flash_attention_reference))

# %% [markdown]
# `tl.load` brings a tile from HBM, `tl.dot` multiplies two tiles on the tensor cores, `tl.program_id` says which tile
# of queries this program owns. What it adds to the lines of section 4:
#
# | it adds | because |
# |---|---|
# | `exp2` with log2(e) in the scale | one multiply-add and one instruction a score; `exp` costs one multiply more |
# | three loops: masked, full, masked | a full block needs no comparison; most blocks of a long prompt are full |
# | `kv_head = head // GROUP` | grouped queries (GQA, 分组查询注意力) read K and V where they lie, not repeated |
# | `starts_q`, `starts_k` | sequences packed in a row (变长批), no padding |
# | `safe` | a row that has seen nothing has maximum -inf, and -inf - -inf is NaN |
# | the log-sum-exp (对数和指数) as a second output | two parts of one attention can be merged: chapter 09 |
# | last tiles first | they see most keys; started last, they would run alone |
# | 64-bit offsets, one moving address | 2^31 numbers are not many; a tensor of addresses would fill the registers |
#
# **Proved.** Against float64, on the model's own tensors and on shapes that do not fit the tiles: window, soft cap,
# fewer queries than keys, K and V of different dims. The rule is the flash-attention project's: at most twice the
# error of the formula in the same dtype.


# %%
def float64_formula(q, k, v, window=None, softcap=None):
    """[batch, time, heads, v dim], every step in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    mask = visible(q.shape[2], k.shape[2], window, device=q.device)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    return (s.masked_fill(~mask, -math.inf).softmax(-1) @ v).transpose(1, 2)


cases = {"tiny, layer 0": (*real[0], {}), "tiny, last layer": (*real[-1], {})}
a, b, c = random_qkv(150, 4, 80)
cases["dim 80, 2 KV heads, window 70"] = (a, b[:, :, :2], c[:, :, :2], dict(window=70))
cases["70 queries, 150 keys, v dim 48"] = (a[:, :70], b, c[..., :48], dict(softcap=20.0))
for name, (q, k, v, options) in cases.items():
    exact = float64_formula(q, k, v, **options)
    mask = visible(q.shape[1], k.shape[1], options.get("window"), device=device)
    plain = naive_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), mask, q.shape[-1] ** -0.5, options.get("softcap")
    ).transpose(1, 2)
    allowed = 2 * (plain - exact).abs().max().item() + 2e-6
    errors = {"twin": (flash_attention_reference(q, k, v, **options) - exact).abs().max().item()}
    if why_not() is None:
        errors["triton"] = (flash_attention(q, k, v, **options) - exact).abs().max().item()
    assert max(errors.values()) <= allowed
    print(f"{name:32s}" + ", ".join(errors) + ": within twice torch's own error")

# %% [markdown]
# ## 6. Measure it
#
# ### Memory: n^2 against n
#
# Bytes of all tensors alive, at the highest, counted while it runs.


# %%
def peak(function, *tensors):
    with LiveBytes() as live:
        function(*tensors)
    return live.peak


def tiled(q, k, v, block=64):
    return flash_attention_reference(q, k, v, block_m=block, block_n=block)


lengths = pick([256, 512, 1024, 2048, 4096], [256, 512, 1024])
peaks = {"naive": [], "tiled": []}
for n in lengths:
    peaks["naive"].append(peak(naive, *random_qkv(n)))
    peaks["tiled"].append(peak(tiled, *random_qkv(n)))
reveal("08.naive_peak", peaks["naive"][lengths.index(1024)])
reveal("08.naive_exponent", plots.slope(lengths, peaks["naive"]))
reveal("08.tiled_a_token", (peaks["tiled"][-1] - peaks["tiled"][-2]) / (lengths[-1] - lengths[-2]))
plots.scaling(lengths, peaks, "tokens", "B", "peak", "Peak memory of one attention, 4 heads of 64, float32")
plt.show()
llama = AttentionShape(1, 32, 32768, 32768, 128)
print(f"one matrix of scores, 32 heads, 32,768 tokens, 16 bits: {units.show(score_bytes(llama, 2), 'B')}")

# %% [markdown]
# *The tiled line is its output and log-sum-exp, plus tiles of a fixed size, which weigh at short lengths. A prompt
# of 32,768 tokens on a 32-head model would need 69 GB for one layer's scores: naive attention does not become slow
# there, it stops.*
#
# ### Bytes and blocks, counted

# %%
visited = [
    (first, key) for first in range(0, 1024, 64) for key, _ in key_range(first, first + 63, 1024, 1024, 64).blocks(64)
]
reveal("08.visited", len(visited) / 16**2)
shape = AttentionShape(1, heads, 4096, 4096, dim)
reveal("08.bytes_ratio", naive_bytes(shape, itemsize) / flash_bytes(shape, itemsize, 128, 128))
print(f"{'n':>7s}{'FLOPs':>14s}{'naive':>12s}{'tiled':>12s}{'ratio':>8s}   FLOP/B naive, tiled   (4 x 64, 16 bits)")
for n in (128, 512, 1024, 4096, 16384):
    s = AttentionShape(1, heads, n, n, dim)
    f, a, b = attention_flops(s), naive_bytes(s, 2), flash_bytes(s, 2, 128, 128)
    print(
        f"{n:7d}{units.show(f, 'FLOP'):>14s}{units.show(a, 'B'):>12s}{units.show(b, 'B'):>12s}{a / b:7.1f}x", end=""
    )
    print(f"{f / a:12.0f}{f / b:8.0f}")

# %% [markdown]
# An H100 needs about 295 FLOP for each byte to keep its tensor cores busy (989 TFLOP/s in 16 bits, 3.35 TB/s, from
# its data sheet). Naive attention offers 16, whatever the length: it runs at the speed of memory. Tiled it offers 128
# and grows with the tile, and most of what remains comes from L2, since neighbouring programs read the same K and V.
#
# ### Time
#
# Naive, our torch twin and torch's own fused kernel (`scaled_dot_product_attention`, the same idea in C++), in
# alternation. On a CPU the cache plays the part of SRAM. Ratios are naive's time over the other's, pair by pair.

# %% tags=["nbval-ignore-output"]
lengths = pick([64, 256, 512, 1024, 2048, 4096], [64, 256, 1024])
ratios = {"tiled (torch twin)": [], "scaled_dot_product_attention": []}


def fused(q, k, v):
    return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), scale=q.shape[-1] ** -0.5)


with torch.inference_mode():
    for n in lengths:
        q, k, v = random_qkv(n)
        torch.testing.assert_close(tiled(q, k, v, 256), naive(q, k, v), rtol=1e-4, atol=1e-5)
        for name, other in zip(ratios, (lambda: tiled(q, k, v, 256), lambda: fused(q, k, v))):  # noqa: B023
            ratios[name].append(clock.paired(lambda: naive(q, k, v), other, pick(7, 3), 1).ratio)  # noqa: B023
_, ax = plots.figure()
for (name, found), color in zip(ratios.items(), (plots.BLUE, plots.GREEN)):
    middle, sides = [r.median for r in found], np.array([r.quartiles for r in found]).T
    ax.errorbar(lengths, middle, abs(sides - middle), fmt="o-", color=color, label=name, capsize=2)
counted = [naive_bytes(s, 4) / flash_bytes(s, 4, 256, 256) for s in (AttentionShape(1, 4, n, n, 64) for n in lengths)]
ax.plot(lengths, counted, "--", color=plots.MEANING["prediction"], label="bytes, counted")
ax.axhline(1, color="black", lw=0.8)
ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="naive / other", title="Against naive attention, here")
plots.plain_log_ticks(ax.xaxis, lengths)
ax.yaxis.set_major_formatter(lambda value, _: f"{value:g} x")
ax.legend()
plt.show()
for name, found in ratios.items():
    print(f"{name:30s}" + "  ".join(f"{n}: {r.median:.2f} x" for n, r in zip(lengths, found)))

# %% [markdown]
# *Above 1 the tiled form is faster. The bytes are a bound on what tiling can win; the products cost the same either
# way, so time follows bytes only as far as memory was the limit.*
#
# On a GPU, beside what the papers print. FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) on an H100 80GB SXM5,
# forward, causal, head dim 128, 16,384 tokens in all, TFLOP/s:
#
# | tokens | standard | FlashAttention-2 | Triton | cuDNN | FlashAttention-3 |
# |---|---|---|---|---|---|
# | 512 | 26 | 191 | 146 | 315 | 292 |
# | 1k | 31 | 260 | 273 | 410 | 423 |
# | 4k | 35 | 319 | 353 | 518 | 579 |
# | 16k | out of memory | 335 | 378 | 539 | 616 |
#
# Those are its figures. Ours, from `minillm bench attention` at the same sizes. The last name is `flash_hopper.py`
# (`flash_attention(..., variant="hopper")`), the same loop the Hopper way: a descriptor a matrix, from which the TMA
# fetches whole tiles, and warps with roles, one group that loads and two that multiply. Of version 3 it lacks the
# softmax under the next block's product, and FP8. The kernel of section 5 is the one to read.

# %%
for n in (512, 1024, 4096, 16384):
    names = ("naive", "sdpa_flash", "flex", "triton", "triton_hopper")
    rows = {name: recorded(f"attention.d128.n{n}.{name}") for name in names}
    print(f"{n:6d} tokens  " + ", ".join(f"{name}: {figure}" for name, figure in rows.items()))

# %% [markdown]
# ## 7. Where it backfires: short sequences, and decode
#
# Tiling saves the trips of the scores. Where there are few scores there is little to save: at n = dim the scores
# weigh as much as q. And one query at a time, as in decode, has n scores against 2 n dim numbers of K and V.

# %%
grid = [16, 32, 64, 128, 256, 512, 1024, 4096, 16384]
prefill, decode = [], []
for n in grid:
    for series, time in ((prefill, n), (decode, 1)):
        s = AttentionShape(1, 1, time, n, 64)
        series.append(naive_bytes(s, 2) / flash_bytes(s, 2, 128, 128))
_, ax = plots.figure(height=2.8)
ax.loglog(grid, prefill, "o-", color=plots.MEANING["prefill"], label="prefill: n queries")
ax.loglog(grid, decode, "o-", color=plots.MEANING["decode"], label="decode: one query")
ax.axhline(1, color="black", lw=0.8)
ax.set(xlabel="keys", title="Bytes, naive / tiled, head dim 64 (counted)")
plots.plain_log_ticks(ax.xaxis, grid)
ax.set_yticks([1, 2, 4, 8], ["1 x", "2 x", "4 x", "8 x"])
ax.yaxis.set_minor_formatter(lambda *_: "")
ax.legend()
plt.show()
print(f"decode, any length: {decode[-1]:.3f} x; prefill of 64: {prefill[2]:.2f} x")
assert decode[-1] < 1.04 and prefill[2] < 2.1 < prefill[-1]

# %% [markdown]
# *In decode the bytes are those of K and V, tiled or not: 3 % to save. And one tile of queries is one program a head:
# most of a GPU idles. Both are chapter 09's subject.* Now in time: the twin here, at short lengths, pays for its
# Python loop, as a kernel pays for its launch.

# %% tags=["nbval-ignore-output"]
with torch.inference_mode():
    for n in (16, 64, 128):
        q, k, v = random_qkv(n)
        ratio = clock.paired(lambda: naive(q, k, v), lambda: tiled(q, k, v, 16), pick(15, 7), 2).ratio  # noqa: B023
        print(f"{n:4d} tokens in tiles of 16: naive / tiled time {ratio.median:.2g} x")
        if n == 128:
            assert ratio.median < 1, "tiny tiles should lose"

# %% [markdown]
# Tiles of 16 lose: 16 times as many loads of K and V as one tile of 256 would make, and a handful of operations for
# each. That is why a kernel's tile is as large as SRAM and registers allow, and no larger.

# %% [markdown]
# ## 8. Play
#
# One head, 24 tokens of `tiny`'s layer 0. Move the step: which block of K and V is on the chip, and what the program
# holds for its first four queries.

# %% tags=["nbval-ignore-output"]
q, k, v = (x[:, :24, :1] for x in real[0])
walks = {}
for block in (4, 8, 12):
    walks[block] = []
    flash_attention_reference(q, k, v, block_m=block, block_n=block, watch=walks[block].append)


def draw(ax, step, block):
    walk = walks[block]
    now = walk[min(step, len(walk) - 1)]
    tile_picture(ax, 24, 24, block, block, current=(now.first_query, now.first_key))
    if ax.figure.axes != [ax]:
        return
    m, total = now.m[0, 0] * math.log(2), now.total[0, 0]
    lines = [f"query {now.first_query + i}: m {m[i]:6.2f}  sum {total[i]:5.2f}" for i in range(4)]
    ax.text(25, 3, "\n".join(["running maximum and sum", *lines]), va="top", fontsize=8, family="monospace")
    ax.set_title(f"step {min(step, len(walk) - 1) + 1} of {len(walk)}", loc="left")


explore(
    draw,
    step=(0, 20, 1, 12),
    block=[4, 8, 12],
    static=[dict(step=0), dict(step=5), dict(step=12)],
    height=3.0,
)

# %% [markdown]
# *Dark: the block on the chip. With small blocks more of the upper triangle is skipped, and K and V are read more
# often.*

# %% [markdown]
# ## 9. Say it
#
# **"Why is FlashAttention faster if it does not save FLOPs?"**
# - *20 seconds.* Naive attention is limited by memory: it writes and reads an n x n matrix four times, for two
#   products. Tiled, the scores never leave the chip. Fewer bytes, same FLOPs, exact result.
# - *2 minutes.* The bars of section 1: 2 % of the FLOPs in the middle, a large part of the time. Then bytes (section
#   6): 16 FLOP a byte naive, whatever the length; tiled it grows with the tile. Name the ridge of the card (chapter
#   00). Then memory: n^2 against n, which is what lets a long prompt run at all.
# - *Follow-up: does it help decode?* 3 % of the bytes (section 7). Decode needs splits over the keys: chapter 09.
# - *The number:* 69 GB for one layer's scores at 32 heads and 32,768 tokens, in 16 bits.
#
# **"Derive online softmax."**
# - *20 seconds.* Keep the maximum m, the sum and the weighted values so far. A new block: new m, multiply the old sum
#   and values by exp(old m - new m), add the block's. Divide once, at the end.
# - *2 minutes.* The table of three numbers (section 3). Say why the maximum: exp(89) overflows float32. Say what
#   alpha is in each row. Then rows instead of numbers (section 4); the merge of two parts is the same formula.
# - *Follow-up: a row whose keys are all masked?* m is -inf, and -inf - -inf is NaN: guard it, give 0 and -inf.
# - *The number:* two numbers a query, m and sum, beside the output.
#
# **"FlashAttention 1, 2, 3: what changed?"**
# - *20 seconds.* 1: tiles and online softmax. 2: programs own queries, not keys, so they never talk, and the
#   division waits to the end. 3: Hopper's asynchrony: loads by TMA, producer and consumer warps, softmax of one block
#   under the product of the next, FP8.
# - *2 minutes.* The picture of section 3, right: in version 2 a program owns a row of tiles. That also splits one
#   long sequence over the SMs. Then the table of section 6: version 2 reaches 335 TFLOP/s on an H100, version 3 616.
# - *Follow-up: why was version 2 at a third of an H100?* It waits: load, multiply, softmax in turn. Exponentials are
#   slow (a few special units an SM), so they must hide under products.
# - *The number:* 35 % of the H100's peak for version 2, up to 75 % (740 TFLOP/s) for version 3: the FlashAttention-3
#   paper's figures. The last row of the table is 34 % and 62 %: causal, at head dim 128.
#
# **"Walk me through a kernel."**
# - *20 seconds.* Grid: tiles of queries x heads x sequences. Load q once. Loop over key blocks up to the diagonal:
#   load k, dot, scale, mask only on the diagonal, update m, sum, acc, load v, dot. Divide, store the output and the
#   log-sum-exp.
# - *2 minutes.* Section 5, top to bottom: exp2, the three loops, GQA by integer division, 64-bit offsets.
# - *Follow-up: what limits the tile?* SRAM for q and the blocks in flight, registers for acc and scores: section 7
#   for tiles that are too small.
# - *The number:* 53 % of the blocks at 1,024 tokens in tiles of 64 (`08.visited`); half, for long ones.

# %%
print(f"float32 exp(88) = {torch.tensor(88.0).exp():.2e}, exp(89) = {torch.tensor(89.0).exp()}")
print(f"scores, 32 heads, 32,768 tokens, 16 bits: {score_bytes(llama, 2) / 1e9:.1f} GB")
s = AttentionShape(1, 32, 4096, 4096, 64)
a, b = (attention_flops(s) / moved for moved in (naive_bytes(s, 2), flash_bytes(s, 2, 128)))
print(f"naive: {a:.0f} FLOP/B, in tiles of 128 queries: {b:.0f}")

# %% [markdown]
# ## 10. Predictions, exercise, papers, next

# %%
predictions()

# %% [markdown]
# **Exercise:** `exercises/08_flash_attention.ipynb`: softmax of a stream, a tile step, the loop with causal skip, a
# Triton kernel with a bug, and bytes by formula.
#
# **Papers:** Milakov and Gimelshein 2018, *Online normalizer calculation for softmax* (arXiv:1805.02867); Dao et al.
# 2022, *FlashAttention* (arXiv:2205.14135); Dao 2023, *FlashAttention-2* (arXiv:2307.08691); Shah et al. 2024,
# *FlashAttention-3* (arXiv:2407.08608).
#
# **Next:** chapter 09 keeps a GPU busy when there is one query a sequence, and reads K and V from paged blocks.
