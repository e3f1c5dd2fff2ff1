# %% [markdown]
# # Exercise 08: FlashAttention
#
# Five tasks, about 75 minutes: softmax of a stream, one tile, the loop that skips, a Triton kernel with a bug, and
# the bytes by formula. Chapter: `notebooks/08_flash_attention.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. No GPU is needed: Triton runs in its
# interpreter.

# %%
import math

import torch

from minillm.lab import check

# %% [markdown]
# ## 1. Softmax of a stream (15 minutes)
#
# **What.** `pairs` gives (score, value) once, one after another, and there may be millions of them. Return the
# softmax-weighted mean of the values and the log of the sum of exp(score). Keep a fixed number of variables. A score
# of
# -inf is a masked key. If there is no pair, or all are masked: `(0.0, -inf)`. **Why.** It is the whole idea of
# FlashAttention, without tensors.
#
# <details><summary>Hint 1: a nudge</summary>
# exp(1000) overflows. What do you subtract, if you do not know the largest score yet?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Keep m, total, acc. For each pair: new = max(m, score); factor = exp(m - new); p = exp(score - new); total = total *
# factor + p; acc the same with p * value. At the end acc / total and m + log(total).
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# nan: -inf - -inf, at masked keys before the first real one. Overflow: no maximum is subtracted. Right for falling
# scores only: the old sum is not rescaled. The second value is `m + log(total)`, not `log(total)`.
# </details>


# %%
def stream_softmax(pairs):
    """(sum of softmax(score) x value, log-sum-exp of the scores), in one pass.

    Example: stream_softmax(iter([(2.0, 10.0), (5.0, 20.0), (3.0, 30.0)])) is about (20.722, 5.170).
    """
    ### BEGIN SOLUTION
    m, total, acc = -math.inf, 0.0, 0.0
    for score, value in pairs:
        if score == -math.inf:
            continue
        new = max(m, score)
        factor, p = math.exp(m - new), math.exp(score - new)
        total, acc, m = total * factor + p, acc * factor + p * value, new
    return (acc / total, m + math.log(total)) if total else (0.0, -math.inf)
    ### END SOLUTION


# %%
check("08.stream_softmax", stream_softmax)

# %% [markdown]
# ## 2. One tile (15 minutes)
#
# **What.** The same for a tile of M queries and a block of N keys. `state` is what the keys before gave: m [M] the
# largest score, total [M] the sum of exp(score - m), acc [M, v dim] the sum of exp(score - m) x value. Return the
# new state. A query that has not seen any key yet has m = -inf, total = 0, acc = 0, and must keep them if the mask
# hides the whole block. **Why.** This is the body of the kernel's loop.
#
# <details><summary>Hint 1: a nudge</summary>
# Task 1 with rows in place of numbers. What is -inf - -inf?
# </details>
# <details><summary>Hint 2: the plan</summary>
# s = q @ k.T * scale; where the mask is False: -inf. new_m = maximum(m, s.amax(-1)). safe = new_m with -inf replaced
# by 0. p = exp(s - safe[:, None]), alpha = exp(m - safe). Then total and acc, acc with alpha[:, None].
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# nan in some rows: the guard is missing. acc too large: the old acc was not multiplied by alpha. All off by a bit:
# the scale is missing. Note that the *returned* m of an empty row is -inf, not 0.
# </details>


# %%
def tile_step(state, q, k, v, scale, mask=None):
    """state (m [M], total [M], acc [M, v dim]), q [M, dim], k [N, dim], v [N, v dim] -> the new (m, total, acc).

    mask [M, N] bool: True where the query may look; None: everywhere.
    Example: one query without a history, one key with score 3 and value [7] -> m [3], total [1], acc [[7]].
    """
    ### BEGIN SOLUTION
    m, total, acc = state
    s = q @ k.T * scale  # [M, N]
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    new_m = torch.maximum(m, s.amax(-1))  # [M]
    safe = torch.where(new_m == -math.inf, torch.zeros_like(new_m), new_m)
    p = torch.exp(s - safe[:, None])  # [M, N]
    alpha = torch.exp(m - safe)  # [M]
    return new_m, total * alpha + p.sum(-1), acc * alpha[:, None] + p @ v
    ### END SOLUTION


# %%
check("08.tile_step", tile_step)

# %% [markdown]
# ## 3. The loop that skips (20 minutes)
#
# **What.** Causal attention of one head. q [time, dim] holds the *last* `time` of `length` positions; K and V lie in
# slow memory, and `read(start, stop)` fetches rows start .. stop - 1 of both. Work on tiles of `block_m` queries;
# for each tile read blocks of `block_n` keys (the last one may be shorter), starting at 0, and only those that some
# query of the tile may see. Return [time, v dim]. `tile_step` from task 2 may be used. **Why.** Half of a causal
# matrix is never needed; a kernel that visits it takes twice as long. The check counts your reads.
#
# <details><summary>Hint 1: a nudge</summary>
# At which position does query i stand, if the queries are the last of the keys? Which is the last key that the last
# query of a tile sees?
# </details>
# <details><summary>Hint 2: the plan</summary>
# For first in range(0, time, block_m): last = min(first + block_m, time) - 1; stop = last + length - time + 1. For
# start in range(0, stop, block_n): read(start, min(start + block_n, length)); mask[i, j] = start + j <= first + i +
# length - time. After the loop acc / total[:, None].
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right when time == length, wrong for a chunk: `length - time` is missing. Too many reads: stop is too large, or
# every block is read. nan: a row with an empty block without the guard of task 2. Off in the last rows: the last
# tile is shorter.
# </details>


# %%
def tiled_attention(q, read, length, block_m, block_n, scale):
    """q [time, dim] -> [time, v dim]; read(start, stop) -> (k [stop - start, dim], v [stop - start, v dim]).

    Example: time 4, length 6, block_m = block_n = 2: the first tile stands at positions 2 and 3 and reads (0, 2) and
    (2, 4); the second reads (0, 2), (2, 4) and (4, 6).
    """
    ### BEGIN SOLUTION
    time, shift, rows = len(q), length - len(q), []
    for first in range(0, time, block_m):
        tile = q[first : first + block_m]  # [M, dim]
        positions = torch.arange(first, first + len(tile))[:, None] + shift  # [M, 1]
        state = None
        for start in range(0, int(positions[-1]) + 1, block_n):
            k, v = read(start, min(start + block_n, length))
            if state is None:
                state = (
                    torch.full((len(tile),), -math.inf),
                    torch.zeros(len(tile)),
                    torch.zeros(len(tile), v.shape[-1]),
                )
            mask = torch.arange(start, start + len(k)) <= positions  # [M, N]
            state = tile_step(state, tile, k, v, scale, mask)
        rows.append(state[2] / state[1][:, None])
    return torch.cat(rows)
    ### END SOLUTION


# %%
check("08.tiled_attention", tiled_attention)

# %% [markdown]
# ## 4. Debug it: right up to 16 tokens (15 minutes)
#
# **What.** A causal kernel in Triton, one head, a program a tile of queries. Every unit test passes: they use
# prompts of up to 16 tokens. In production long prompts give fluent nonsense. No NaN, no crash; the numbers are of
# the right size. Find the line, mend it. The check runs the function through `triton.jit`, in the interpreter where
# there is no GPU. **Why.** An attention kernel that is wrong by a factor looks plausible: only a reference tells.
#
# `tl.load(p + offsets, mask, other)` reads, `tl.dot` multiplies tiles, `tl.program_id(0)` is the tile's number.
#
# <details><summary>Hint 1: a nudge</summary>
# BLOCK is 16. What happens at the second block of keys that does not happen at the first?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Go through the loop with task 1's three numbers, line by line. What is `alpha` in the second round?
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Still right up to 16 only: alpha is still 1. All nan: alpha = exp(-inf - -inf), taken before the new maximum. Wrong
# even for short prompts: something that was right has changed; the mask and the scale are right as given.
# </details>

# %%
from minillm.kernels.flash_attention import tl  # noqa: E402  (triton.language, with the interpreter chosen first)


def kernel(q_pointer, k_pointer, v_pointer, out_pointer, length, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """q, k, v, out [length, D], contiguous float32. Program i owns queries i x BLOCK to (i + 1) x BLOCK - 1."""
    first = tl.program_id(0) * BLOCK
    d = tl.arange(0, D)
    rows = first + tl.arange(0, BLOCK)
    q = tl.load(q_pointer + rows[:, None] * D + d[None, :], mask=rows[:, None] < length, other=0.0)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for start in range(0, first + BLOCK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        k = tl.load(k_pointer + keys[:, None] * D + d[None, :], mask=keys[:, None] < length, other=0.0)
        v = tl.load(v_pointer + keys[:, None] * D + d[None, :], mask=keys[:, None] < length, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
        ### BEGIN SOLUTION
        new_m = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp(m - new_m)
        m = new_m
        ### END SOLUTION
        ### BEGIN GIVEN
        # new_m = tl.maximum(m, tl.max(s, 1))
        # m = new_m
        # alpha = tl.exp(m - new_m)
        ### END GIVEN
        p = tl.exp(s - m[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p, v)
    tl.store(out_pointer + rows[:, None] * D + d[None, :], acc / total[:, None], mask=rows[:, None] < length)


# %%
check("08.kernel", kernel)

# %% [markdown]
# ## 5. Estimate it: bytes, FLOPs, blocks (10 minutes)
#
# **What.** One causal attention over 8,192 tokens, 32 heads of 128 (no grouping), 16 bits, on a card of 3.35e12 B/s
# and 989e12 FLOP/s. Write down expressions, to 3 %.
#
# | key | what |
# |---|---|
# | `"score_bytes"` | bytes of the matrix of scores, all heads |
# | `"naive_seconds"` | time to move naive attention's bytes: q, k, v, output once, scores four times |
# | `"flash_seconds"` | time of the FLOPs at full speed, counting only the pairs that see each other |
# | `"blocks"` | blocks visited by one head, tiles of 128 x 128 (exactly) |
#
# **Why.** "Is it limited by memory or by arithmetic, and by how much?" is asked of every kernel.
#
# <details><summary>Hint 1: a nudge</summary>
# Which of the four grow with the square of the length?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Scores: heads x n x n x 2. Naive: (4 x scores + 4 x heads x n x 128 x 2) / 3.35e12. FLOPs: a pair costs 2 x 128 for
# q.k and 2 x 128 for weight x v; there are n (n + 1) / 2 pairs a head. Blocks: 64 rows of 1, 2, 3 ... 64 blocks.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Twice too long in flash: the pairs above the diagonal are counted. Half: a multiplication *and* an addition. A
# quarter in naive: the scores pass four times. 4,096 blocks: nothing is skipped.
# </details>


# %%
def attention_costs():
    """Return a dict with the four keys of the table; numbers as values, in bytes, seconds and blocks."""
    ### BEGIN SOLUTION
    n, heads, dim = 8192, 32, 128
    scores = heads * n * n * 2
    tiles = n // 128
    return {
        "score_bytes": scores,
        "naive_seconds": (4 * scores + 4 * heads * n * dim * 2) / 3.35e12,
        "flash_seconds": heads * n * (n + 1) / 2 * 4 * dim / 989e12,
        "blocks": tiles * (tiles + 1) // 2,
    }
    ### END SOLUTION


# %%
check("08.attention_costs", attention_costs)

# %% [markdown]
# **Done?** Give your kernel of task 4 fewer queries than keys, as a chunk of a prompt has. Next: exercise 09, where
# one query meets a long cache.
