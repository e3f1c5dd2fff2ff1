# %% [markdown]
# # Exercise 10: fusion, compilation and CUDA graphs
#
# Six tasks, about 75 minutes: launches counted, bytes saved, a fused kernel of your own, batch sizes worth capturing,
# a graph that reads yesterday's tensor, and the ceilings that launches set. Chapter:
# `notebooks/10_fusion_and_graphs.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. A check may be run as often as you
# like.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. Count launches (10 minutes)
#
# **What.** A trace is a list of operation names, in order. Names in `VIEWS` launch nothing; every other is one
# launch. A fusion is a tuple of names: where these operations follow one another (views between them do not count),
# they become one launch. Go through the trace once, from the left; where several fusions match, take the longest.
# How many launches are left? **Why.** Launches a token is the first number to ask for when a GPU idles, and it is
# counted from a trace.
#
# <details><summary>Hint 1: a nudge</summary>
# What would the trace look like if views had never been in it?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Drop the views. Keep a position; at each one, of the fusions that match there take the longest; move on by its
# length, or by 1 if none matches; count one launch either way.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Too many with views in between: they were left in. Too few: operations were used by two fusions. Right without
# `("add", "norm", "mul")` and wrong with it: the first match was taken, not the longest.
# </details>

# %%
VIEWS = {"view", "reshape", "split", "transpose", "unflatten", "flatten", "chunk"}


def count_launches(trace, fusions):
    """Launches of a trace, an int. trace: list of names; fusions: list of tuples of two names or more.

    Example: count_launches(["add", "view", "norm", "linear"], [("add", "norm")]) is 2.
    """
    ### BEGIN SOLUTION
    names = [name for name in trace if name not in VIEWS]
    at = launches = 0
    while at < len(names):
        fits = [len(f) for f in fusions if tuple(names[at : at + len(f)]) == tuple(f)]
        at += max(fits, default=1)
        launches += 1
    return launches
    ### END SOLUTION


# %%
check("10.count_launches", count_launches)

# %% [markdown]
# ## 2. Bytes of a residual add and a norm (10 minutes)
#
# **What.** `summed = residual + branch`, then `normed = RMSNorm(summed) * weight`, on `rows` rows of `width`
# numbers of `itemsize` bytes. `summed` is needed later as well, so both results are written. Bytes that go through
# memory as two kernels, and as one. **Why.** Neither operation does work worth naming: their time is these bytes.
#
# <details><summary>Hint 1: a nudge</summary>
# A kernel reads each of its inputs once and writes each of its outputs once. List them for each kernel.
# </details>
# <details><summary>Hint 2: the plan</summary>
# Add: reads 2, writes 1. Norm: reads 1 and the weight (one row), writes 1. Fused: reads 2 and the weight, writes 2.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Off by a row: the weight is `width` numbers, whatever the rows. Fused too small by a third: `summed` has to be
# written too. Off by a factor: numbers were counted, not bytes.
# </details>


# %%
def add_norm_bytes(rows, width, itemsize):
    """(bytes as two kernels, bytes as one), ints. Example: add_norm_bytes(1, 10, 2) is (120, 100)."""
    ### BEGIN SOLUTION
    block, weight = rows * width * itemsize, width * itemsize
    return 5 * block + weight, 4 * block + weight
    ### END SOLUTION


# %%
check("10.add_norm_bytes", add_norm_bytes)

# %% [markdown]
# ## 3. The fused kernel (20 minutes)
#
# **What.** Both results of task 2 in one pass, as a Triton kernel: program i owns row i. Sum and mean are taken in
# float32; the sum is rounded to its dtype *before* it is normed, as it would be on its way through memory. The check
# runs your function through `triton.jit`; without a GPU that is Triton's interpreter.
# **Why.** It is the first fusion every engine makes, and the kernel in which all the small mistakes can be made.
#
# `tl.load(p + offsets, mask=..., other=0.0)` reads, `tl.store(p + offsets, x, mask=...)` writes, `x.to(tl.float32)`
# converts, `tl.sum(x, 0)` adds up, `tl.rsqrt` is one over the root. `summed.dtype.element_ty` is the dtype behind a
# pointer.
#
# <details><summary>Hint 1: a nudge</summary>
# `tl.arange` wants a power of two: what do the places behind the row's end hold, and what do they count for?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Load residual and branch with `mask=column < width, other=0.0`, convert to float32, add, convert to the result's
# dtype, store, convert to float32 again. Mean of squares is the sum over the row divided by `width`. Times
# `tl.rsqrt(mean + eps)`, times weight; store with the same mask.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right for a width of 64 only: divided by BLOCK, or no mask. Infinite in float16: squares were taken in 16 bits
# (300 x 300 does not fit). Every row like the first: the row's offset is missing. Off where values are tiny: eps
# belongs under the root.
# </details>

# %%
from minillm.kernels.fused_norm import tl  # noqa: E402  (triton.language, with the interpreter chosen first)


def add_norm_kernel(branch, residual, weight, normed, summed, width, eps, BLOCK: tl.constexpr):
    """One row of summed = residual + branch and normed = RMSNorm(summed) * weight.

    branch, residual, normed, summed: pointers to [rows, width], contiguous; weight: to [width]; float32 or float16.
    BLOCK: the power of two at or above width. In torch: summed * rsqrt(mean(summed ** 2) + eps) * weight.
    """
    ### BEGIN SOLUTION
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(branch + row * width + column, mask=inside, other=0.0).to(tl.float32)
    x = x.to(summed.dtype.element_ty)
    tl.store(summed + row * width + column, x, mask=inside)
    x = x.to(tl.float32)
    mean = tl.sum(x * x, 0) / width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(mean + eps) * gain
    tl.store(normed + row * width + column, y.to(normed.dtype.element_ty), mask=inside)
    ### END SOLUTION


# %%
check("10.add_norm", add_norm_kernel)

# %% [markdown]
# ## 4. Which batch sizes to capture (15 minutes)
#
# **What.** `steps[n]` decode steps ran with n requests. With graphs for some sizes, a step of n requests runs in
# the smallest size >= n; the rows above n are computed for nothing. Choose at most `most` sizes with the least rows
# computed for nothing over all steps. Every n must fit. **Why.** Each size costs memory and start-up time; too few
# waste work. Engines ship a fixed list; yours fits the load.
#
# <details><summary>Hint 1: a nudge</summary>
# A size that nobody has is never better than the largest n below it. So sizes are some of the n, and the largest is
# one.
# </details>
# <details><summary>Hint 2: the plan</summary>
# Sort the n. best[j][k]: least waste if the first j of them are covered by k sizes, the j-th being one. It comes
# from best[i][k - 1] for some i < j, plus the waste of those between at size j. Keep the choice to read the sizes
# back. Trying all combinations is too slow for 30 different n.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# A size smaller than the largest n: some steps do not fit. Powers of two, or evenly spaced: they do not look at
# `steps`. Nearly right: the most frequent n, taken greedily, is not the best set.
# </details>


# %%
def choose_sizes(steps, most):
    """Sizes, a sorted list of at most `most` ints. steps: {requests: number of steps}.

    Example: choose_sizes({1: 100, 7: 1, 8: 5}, 2) is [1, 8].
    """
    ### BEGIN SOLUTION
    counts = sorted(n for n in steps if steps[n] > 0)

    def waste(first, last):
        return sum((counts[last] - counts[i]) * steps[counts[i]] for i in range(first, last + 1))

    best = [(waste(0, j), [counts[j]]) for j in range(len(counts))]  # with one size
    for _ in range(most - 1):
        more = []
        for j in range(len(counts)):
            options = [best[j]] + [(best[i][0] + waste(i + 1, j), [*best[i][1], counts[j]]) for i in range(j)]
            more.append(min(options))
        best = more
    return best[-1][1]
    ### END SOLUTION


# %%
check("10.choose_sizes", choose_sizes)

# %% [markdown]
# ## 5. Debug it: the graph that wrote into yesterday's slot (15 minutes)
#
# **What.** `Replayer` captures a decode step the first time it runs and replays it from then on. `capture` below
# has the contract of a CUDA graph: it reads **the tensors it was given at capture**, at every replay, and its
# result lands in the same tensor each time. With the same requests step after step all is well. When a request ends
# and another takes its row, its keys go into the wrong slot. Find the line and mend it. **Why.** Nothing raises,
# and the text stays fluent: two requests simply share a slot. This is the bug to know.
#
# A step with fewer requests than rows is padded: token 0, slot -1 (nothing is written). What `run` returned must not
# change when `run` is called again.
#
# <details><summary>Hint 1: a nudge</summary>
# Which of the two inputs is a new tensor at every call?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Make both buffers once. Each call writes *into* them, the padding too, and replays.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# First call right, later ones not: a name was bound to a new tensor, while the graph holds the old one. Right until
# the batch shrinks: the padding rows still hold the last batch's slots. Earlier results change: a view of the
# output was returned; the next replay writes over it. Capturing again at each call is not a mend: it is what a
# graph was to save.
# </details>


# %%
def capture(function, *inputs):
    """(replay, output): `replay()` runs function on these very tensors and writes into this very output."""
    output = function(*inputs)
    return lambda: output.copy_(function(*inputs)), output


class Replayer:
    """step(tokens [rows], slots [rows]) -> [rows, ...] is captured once, by the given `capture`, for `rows` rows."""

    def __init__(self, step, rows, capture=capture):
        self.step, self.rows, self.capture, self.replay = step, rows, capture, None
        self.tokens = torch.zeros(rows, dtype=torch.long)
        self.slots = torch.full((rows,), -1)

    def run(self, tokens, slots):
        """Results of the first len(tokens) rows. tokens, slots: lists of ints, no longer than rows."""
        ### BEGIN SOLUTION
        n = len(tokens)
        self.tokens.zero_()
        self.tokens[:n] = torch.tensor(tokens)
        self.slots.fill_(-1)
        self.slots[:n] = torch.tensor(slots)
        if self.replay is None:
            self.replay, self.output = self.capture(self.step, self.tokens, self.slots)
        else:
            self.replay()
        return self.output[:n].clone()
        ### END SOLUTION
        ### BEGIN GIVEN
        # n = len(tokens)
        # self.tokens.zero_()
        # self.tokens[:n] = torch.tensor(tokens)
        # self.slots = torch.tensor(slots + [-1] * (self.rows - n))
        # if self.replay is None:
        #     self.replay, self.output = self.capture(self.step, self.tokens, self.slots)
        # else:
        #     self.replay()
        # return self.output[:n].clone()
        ### END GIVEN


# %%
check("10.replayer", Replayer)

# %% [markdown]
# ## 6. Estimate it: what launches cost (10 minutes)
#
# **What.** Five numbers, to within 3 %. A model of 32 layers, 16 launches a layer, nothing outside the layers;
# launching takes the CPU 5 µs; CPU and GPU overlap perfectly, so a step takes the longer of the two. Write down the
# expression.
#
# | key | what |
# |---|---|
# | `"ceiling"` | tokens/s at batch 1 that launching allows, however fast the GPU |
# | `"ceiling_fused"` | the same with 9 launches a layer |
# | `"waits"` | with 16 launches and kernels of 2 µs each: **share** of the step in which the GPU waits |
# | `"graph_gain"` | the same kernels replayed from a graph, launched by one call of 10 µs: times as fast as eager |
# | `"logits_mb"` | graphs for 1, 2, 4, 8, 16, 32 rows, each with 16-bit logits of 128,256 words: **MB** (10^6) |
#
# **Why.** With these a trace is not needed to say whether a graph will help.
#
# <details><summary>Hint 1: a nudge</summary>
# Launches a token first. Then the longer of two lanes.
# </details>
# <details><summary>Hint 2: the plan</summary>
# 512 launches x 5 µs is the CPU's lane, 512 x 2 µs the GPU's. The GPU waits for what the CPU's lane is longer. A
# graph runs its kernels one after another and is launched once: 512 x 2 µs is then the longer lane.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# The inverse: seconds a token, not tokens a second. 1.5 where 2.5 was asked: times as fast, not how much faster.
# 0.4 is the share in which the GPU works. Half or double: 16 bits are 2 bytes.
# </details>


# %%
def estimates():
    """Return a dict with the five keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    launch, kernel = 5e-6, 2e-6
    cpu, gpu = 32 * 16 * launch, 32 * 16 * kernel
    return {
        "ceiling": 1 / cpu,
        "ceiling_fused": 1 / (32 * 9 * launch),
        "waits": 1 - gpu / cpu,
        "graph_gain": cpu / max(gpu, 10e-6),
        "logits_mb": (1 + 2 + 4 + 8 + 16 + 32) * 128256 * 2 / 1e6,
    }
    ### END SOLUTION


# %%
check("10.estimates", estimates)

# %% [markdown]
# **Done?** Put your kernel into a model: `fuse(load_model("tiny"), Ops(...))` of `minillm.kernels.fused` takes any
# functions with the right signatures. Next: exercise 11, fewer bits.
