# %% [markdown]
# # Exercise 09: FlashDecoding and paged attention
#
# Six tasks, about 80 minutes: merge two parts, merge many with empty ones, attend over a part of a paged cache,
# choose a split count, find the offset that overflows, and how long a step must take at 64k tokens. Chapter:
# `notebooks/09_flash_decoding.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. Plain torch; what is a program on a
# GPU is a function here.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. Merge two parts (10 minutes)
#
# **What.** The keys were cut in two. Each part gave its attention output, already divided by its own sum, and the
# log-sum-exp (LSE) of its scores. Give the output and the LSE over all keys. LSEs may be in the thousands, of either
# sign; neither part is empty here. **Why.** One formula joins the splits of FlashDecoding, the steps of ring
# attention, and a shared prefix with a request's own tokens.
#
# <details><summary>Hint 1: a nudge</summary>
# exp(LSE) is the denominator that the part has divided by. What is out times that?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Largest of the two LSEs, m. Weights exp(lse - m). out = (w_a out_a + w_b out_b) / (w_a + w_b);
# lse = m + log(w_a + w_b). A weight is [heads]: give it a last dimension before it meets [heads, dim].
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# nan or inf at large LSEs: exp before the largest was taken away. The mean of both: the parts weigh alike only if
# their LSEs are equal. Outputs grow: not divided by the sum of weights. LSE right only when one part is far larger:
# that is max, log of the sum is missing.
# </details>


# %%
def merge_two(out_a, lse_a, out_b, lse_b):
    """outs [heads, dim], lses [heads] -> (out [heads, dim], lse [heads]) over the keys of both parts.

    Example: outs [[1.0]] and [[3.0]], both lse [0.0] -> ([[2.0]], [0.6931]).
    """
    ### BEGIN SOLUTION
    m = torch.maximum(lse_a, lse_b)  # [heads]
    w_a, w_b = torch.exp(lse_a - m), torch.exp(lse_b - m)
    total = w_a + w_b
    out = (w_a[:, None] * out_a + w_b[:, None] * out_b) / total[:, None]  # [heads, dim]
    lse = m + torch.log(total)  # [heads]
    return out, lse
    ### END SOLUTION


# %%
check("09.merge_two", merge_two)

# %% [markdown]
# ## 2. Merge many, some of them empty (15 minutes)
#
# **What.** Any number of parts at once. A part with LSE -inf saw no key: its row of `outs` was never written and may
# hold anything, NaN too. Where all parts of a head are empty, the output is zeros and the LSE is -inf. **Why.** The
# grid is as wide as the longest request; short requests leave splits empty, and a padded row of a captured batch has
# no keys at all. A NaN there spreads to the whole batch two layers later.
#
# <details><summary>Hint 1: a nudge</summary>
# 0 x NaN is NaN. And what is -inf - (-inf)?
# </details>
# <details><summary>Hint 2: the plan</summary> m = lses.amax(0), but 0 where that is -inf. Weights exp(lses - m): 0
# for empty parts. Before you multiply, replace the outs of empty parts by zeros (torch.where). Divide by the total,
# or by 1 where the total is 0.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# nan in every head: NaN of an unwritten part came through a weight of 0. nan in one head only: all its parts are
# empty. Zeros are right but the LSE is 0 there: it must stay -inf. Real NaN of a part that did see keys must stay
# visible: nan_to_num hides it.
# </details>


# %%
def merge(outs, lses):
    """outs [splits, heads, dim], lses [splits, heads] -> (out [heads, dim], lse [heads])."""
    ### BEGIN SOLUTION
    empty = lses == float("-inf")  # [splits, heads]
    m = lses.amax(0)  # [heads]
    m = torch.where(m == float("-inf"), 0.0, m)
    weights = torch.exp(lses - m)  # [splits, heads]
    total = weights.sum(0)  # [heads]
    outs = torch.where(empty[..., None], 0.0, outs)
    out = (weights[..., None] * outs).sum(0) / torch.where(total == 0, 1.0, total)[:, None]  # [heads, dim]
    return out, m + torch.log(total)
    ### END SOLUTION


# %%
check("09.merge", merge)

# %% [markdown]
# ## 3. One part, straight from the blocks (15 minutes)
#
# **What.** One request, one KV head and the query heads that share it. Attend over keys `begin` to `end - 1` only,
# read through the block table, and return the output and the LSE of that part. With begin >= end the part is empty:
# zeros and -inf. `scale` multiplies the scores. **Why.** This is what one program of the paged kernel does.
#
# <details><summary>Hint 1: a nudge</summary>
# Exercise 05, task 1: where is key i? Only the keys of this part are looked up.
# </details>
# <details><summary>Hint 2: the plan</summary>
# keys = torch.arange(begin, end). k = k_pool[table[keys // block_size], keys % block_size], the block size is
# k_pool.shape[1]. scores = scale * q @ k.T; logsumexp over keys; softmax times v.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# nan: a slot was read that nobody wrote, so the table or the range is wrong. Right for begin 0 only: positions count
# in the text, not in the part. Right while the table is 0, 1, 2 ...: the table is not used. LSE off by a factor: the
# scores were not scaled. An error from an empty part: return early.
# </details>


# %%
def paged_part(q, k_pool, v_pool, table, begin, end, scale):
    """q [group, dim]; k_pool, v_pool [blocks, block_size, dim]; table [blocks of the request] int64.

    -> (out [group, dim], lse [group]) over keys begin .. end - 1.
    """
    ### BEGIN SOLUTION
    if begin >= end:
        return torch.zeros_like(q), q.new_full((len(q),), float("-inf"))
    keys = torch.arange(begin, end)
    place = table[keys // k_pool.shape[1]], keys % k_pool.shape[1]
    k, v = k_pool[place], v_pool[place]  # [keys, dim]
    scores = scale * (q @ k.T)  # [group, keys]
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
    ### END SOLUTION


# %%
check("09.paged_part", paged_part)

# %% [markdown]
# ## 4. Choose the splits (15 minutes)
#
# **What.** `programs` programs without splits, each with `tiles` tiles of keys, on `sms` SMs that run one program at
# a time. With s splits a part has `ceil(tiles / s)` tiles, so `ceil(tiles / that)` parts have work; the others are
# empty and cost nothing. Waves: `programs x parts / sms`, rounded up. Time: `waves x tiles a part`. Return the
# smallest s from 1 to `tiles` whose time is at most 10 % above the least. **Why.** One split too many is a second
# wave for a few programs, twice the time; and every split is a partial result more to merge, so near the best the
# fewest win.
#
# <details><summary>Hint 1: a nudge</summary>
# tiles is at most a few thousand, and this runs once a step. Must it be clever?
# </details>
# <details><summary>Hint 2: the plan</summary>
# A function time(s) with three rounded-up divisions, -(-a // b). The least over range(1, tiles + 1). Then the first s
# with 10 * time(s) <= 11 * least.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# sms // programs: right when it divides, wrong when tiles do not. Far too many splits: that is the very least time,
# not within 10 % of it. Right at batch 1 only: the waves are missing.
# </details>


# %%
def choose_splits(programs, tiles, sms):
    """The smallest split count within 10 % of the least time. Example: choose_splits(2, 12, 8) is 4."""

    ### BEGIN SOLUTION
    def time(splits):
        each = -(-tiles // splits)
        parts = -(-tiles // each)
        return -(-programs * parts // sms) * each

    best = min(map(time, range(1, tiles + 1)))
    return next(s for s in range(1, tiles + 1) if 10 * time(s) <= 11 * best)
    ### END SOLUTION


# %%
check("09.choose_splits", choose_splits)

# %% [markdown]
# ## 5. Debug it: right until the pool is large (10 minutes)
#
# **What.** The line of a paged kernel that turns keys into places in memory: for each key, the distance in numbers
# from the start of the pool to the key's row. Tables, like most engines', are int32. All tests pass. On a card with a
# large pool the engine dies of an illegal memory access, or answers nonsense, and only for requests whose blocks come
# late in the pool. The line is in the function below; the arithmetic is what the GPU does. Find it and mend it: the
# result is int64 and right for any pool. **Why.** vLLM's Triton decode kernel had it (pull request 47671: page ids
# above about 7,700), and FlashInfer's and others' likewise.
#
# <details><summary>Hint 1: a nudge</summary>
# Call it with block 40,000 and a stride of 65,536. What is the product, and what is the largest int32?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Widen one factor before the product: block.long() * stride.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Still negative, now in int64: widened after the product, when the damage was done. Right to seven digits: a float32
# has 24 bits.
# </details>


# %%
def row_offsets(table, keys, block_size, block_stride, slot_stride):
    """table [blocks] int32, keys [n] int32, strides in numbers -> offset of each key's row, [n] int64.

    Example: table [7, 2], keys [0, 5], block_size 4, block_stride 64, slot_stride 16 -> [448, 144].
    """
    ### BEGIN SOLUTION
    block, slot = table[keys // block_size].long(), keys % block_size
    return block * block_stride + slot * slot_stride
    ### END SOLUTION
    ### BEGIN GIVEN
    # block, slot = table[keys // block_size], keys % block_size
    # return (block * block_stride + slot * slot_stride).long()
    ### END GIVEN


# %%
check("09.row_offsets", row_offsets)

# %% [markdown]
# ## 6. Estimate it: 64k tokens (10 minutes)
#
# **What.** Llama 3.1 8B: 32 layers, 32 query heads, 8 KV heads of 128; weights 16 GB (16 x 10^9 bytes) and K and V in
# 16-bit numbers. An H100 with 3.35 x 10^12 bytes/s and 132 SMs. One request of 65,536 tokens. To 3 %:
#
# | key | what |
# |---|---|
# | `"layer_us"` | the least time to read one layer's K and V, in microseconds |
# | `"step_ms"` | the least time of attention in a whole step, all layers, in milliseconds |
# | `"idle_us"` | the same as `layer_us` if each SM reads 1/132 of the bandwidth and only 8 have a program |
# | `"crossover"` | the context, in tokens, at which a step reads as many bytes of K and V as of weights |
#
# **Why.** "How fast can it be?" comes before "how fast is it?".
#
# <details><summary>Hint 1: a nudge</summary>
# Bytes of K and V of one token in one layer. Everything else is a product or a quotient of it.
# </details>
# <details><summary>Hint 2: the plan</summary>
# 2 x 8 x 128 x 2 = 4,096 bytes a token and layer. Times 65,536, over the bandwidth. Times 32. Divided by 8 / 132.
# Weights over 4,096 x 32.
# </details>
# <details><summary>Hint 3: my values look wrong</summary> Half: K without V, or one byte a number. Four times: 32
# heads where 8 are stored. A crossover 32 times too long: bytes of one layer against the weights of all.
# </details>


# %%
def at_64k():
    """Return a dict with the four keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    token = 2 * 8 * 128 * 2  # bytes in one layer
    layer = token * 65536 / 3.35e12  # seconds
    return {
        "layer_us": layer * 1e6,
        "step_ms": 32 * layer * 1e3,
        "idle_us": layer * 132 / 8 * 1e6,
        "crossover": 16e9 / (32 * token),
    }
    ### END SOLUTION


# %%
check("09.at_64k", at_64k)

# %% [markdown]
# **Done?** Cut a request's keys at random, call your `paged_part` for each cut and your `merge` for all: that is
# FlashDecoding from paged blocks, and it equals `torch.softmax` over everything. Next: exercise 10, what is left
# between the kernels.
