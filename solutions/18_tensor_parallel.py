# %% [markdown]
# # Exercise 18: tensor parallelism
#
# Five tasks, about 70 minutes: a row-parallel linear, KV heads for too many ranks, an embedding cut by vocabulary, a
# layer whose ranks drift apart, and the traffic of a 70B. Chapter: `notebooks/18_tensor_parallel.ipynb`.
#
# A function with a `group` argument runs on every rank at once. `group.rank()` and `group.size()` say who you are,
# and `all_reduce(x, group)` gives the sum of all ranks' `x`, on every rank. The checks run your functions on 1 to 8
# ranks (threads) and look at what every rank returns.

# %%
import torch.nn.functional as F

from minillm.lab import check
from minillm.parallel.groups import all_reduce

# %% [markdown]
# ## 1. A row-parallel linear (10 minutes)
#
# **What.** `y = x @ weight.T + bias`, cut by inputs: each rank has some columns of the weight and the matching part
# of x. Every rank must return the whole y. **Why.** It is the only layer of Megatron's cut that talks; everything
# else works on a rank's own heads and channels.
#
# <details><summary>Hint 1: a nudge</summary> What each rank can compute alone is a part of every sum. And the bias:
# how often may it be added?
# </details>
# <details><summary>Hint 2: the plan</summary> F.linear without the bias, all_reduce, then the bias.
# </details>
# <details><summary>Hint 3: my values look wrong</summary> Right on one rank only: the sum over ranks is missing.
# Off by a multiple of the bias: it was added before the sum, once a rank. Too small by the number of ranks: that is
# the mean.
# </details>


# %%
def row_parallel(x, weight, bias, group):
    """x [tokens, in / ranks], weight [out, in / ranks]: this rank's parts. bias [out], whole, or None.

    Returns y [tokens, out], the same on every rank.
    Example: on 2 ranks with x = [[1.]] and weight = [[2.]] on both, bias = [10.]: y is [[14.]].
    """
    ### BEGIN SOLUTION
    y = all_reduce(F.linear(x, weight), group)
    return y if bias is None else y + bias
    ### END SOLUTION


# %%
check("18.row_parallel", row_parallel)

# %% [markdown]
# ## 2. KV heads for too many ranks (15 minutes)
#
# **What.** A model has `heads` query heads and `kv_heads` KV heads; query head h uses KV head `h // (heads //
# kv_heads)`. Query heads are dealt out in order, equally many a rank. Which KV heads must a rank keep? With more
# ranks than KV heads, several ranks keep the same one. Refuse what does not divide. **Why.** It decides how KV
# memory shrinks with ranks, and where it stops. Off by one here gives fluent nonsense.
#
# Legal: ranks divides heads; and ranks divides kv_heads, or is a multiple of it. Else raise `ValueError`.
#
# <details><summary>Hint 1: a nudge</summary> Which query heads does the rank have? Which KV heads do these use?
# </details>
# <details><summary>Hint 2: the plan</summary> Its query heads are rank * heads // ranks up to (rank + 1) * heads //
# ranks. Divide the first and the last of them by the group size. Before that, two tests with %.
# </details>
# <details><summary>Hint 3: my values look wrong</summary> An empty range: kv_heads // ranks is 0 with more ranks
# than KV heads. Always the first KV head: all ranks would attend to the same keys. rank % kv_heads deals them out
# in turn: neighbours use the same one.
# </details>


# %%
def kv_heads_of(rank, ranks, heads, kv_heads):
    """(first, last) of the KV heads that this rank keeps, `last` not included, as ints.

    Example: kv_heads_of(3, 4, 8, 2) is (1, 2); kv_heads_of(1, 2, 8, 4) is (2, 4).
    """
    ### BEGIN SOLUTION
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(f"{ranks} ranks for {heads} query heads and {kv_heads} KV heads")
    group, mine = heads // kv_heads, heads // ranks
    return rank * mine // group, ((rank + 1) * mine - 1) // group + 1
    ### END SOLUTION


# %%
check("18.kv_heads_of", kv_heads_of)

# %% [markdown]
# ## 3. An embedding cut by vocabulary (15 minutes)
#
# **What.** Each rank keeps some rows of the embedding table, those of the ids from `start` on. Look tokens up, so
# that every rank gets every embedding. **Why.** The tables of a 70B are 4 GB in 16 bits, and every row is in demand
# on every rank.
#
# <details><summary>Hint 1: a nudge</summary> Each id belongs to exactly one rank. What must the others bring to the
# sum?
# </details>
# <details><summary>Hint 2: the plan</summary> Subtract start; mark ids below 0 or beyond the rank's rows; look up
# row 0 in their place; set the marked results to 0; all_reduce.
# </details>
# <details><summary>Hint 3: my values look wrong</summary> An index error: ids of other ranks reached the table.
# Plausible but wrong values: a negative index counts from the end in Python, or clamped ids were not set to 0
# afterwards. The last row of each slice is 0: > in place of >=.
# </details>


# %%
def vocab_embedding(tokens, table, start, group):
    """tokens int64, any shape; table [rows, hidden]: the rows of ids start .. start + rows - 1 (rows differ by rank).

    Returns [*tokens.shape, hidden], the same on every rank. `tokens` must not be changed.
    """
    ### BEGIN SOLUTION
    local = tokens - start
    elsewhere = (local < 0) | (local >= len(table))
    x = table[local.masked_fill(elsewhere, 0)]  # [..., hidden]
    return all_reduce(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)
    ### END SOLUTION


# %%
check("18.vocab_embedding", vocab_embedding)

# %% [markdown]
# ## 4. Debug it: ranks that drift apart (15 minutes)
#
# **What.** The part of a layer after attention: project the heads, add the residual, norm, MLP, add the residual.
# On one rank it is right. On two the text is fluent for a few words, then nonsense, and the ranks' hidden states
# differ. One collective is missing. Mend it, and keep it at two all-reduces: that is all a layer needs. **Why.**
# Nothing crashes and every shape is right: this bug has to be found by comparing ranks.
#
# <details><summary>Hint 1: a nudge</summary>
# After which line do two ranks first hold different x?
# </details>
# <details><summary>Hint 2: the plan</summary>
# `out` is cut by inputs, like `down`. What it gives is a part of a sum.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# The residual counted once a rank: x was put inside the all_reduce. Equal on all ranks but wrong: one sum at the end
# cannot repair it, since the norm and silu saw a part. Right with three all-reduces: one of them sums what is whole.
# </details>


# %%
def after_attention(x, heads, out, gate, up, down, group):
    """x [tokens, hidden], the same on all ranks; heads [tokens, width / ranks]: what this rank's heads gave.

    out [hidden, width / ranks], gate and up [ffn / ranks, hidden], down [hidden, ffn / ranks]: this rank's slices.
    Returns [tokens, hidden], the same on every rank.
    """
    ### BEGIN SOLUTION
    x = x + all_reduce(F.linear(heads, out), group)
    h = F.rms_norm(x, x.shape[-1:])
    y = F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
    return x + all_reduce(y, group)
    ### END SOLUTION
    ### BEGIN GIVEN
    # x = x + F.linear(heads, out)
    # h = F.rms_norm(x, x.shape[-1:])
    # y = F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
    # return x + all_reduce(y, group)
    ### END GIVEN


# %%
check("18.after_attention", after_attention)

# %% [markdown]
# ## 5. Estimate it: the traffic of a 70B (15 minutes)
#
# **What.** Llama 3.1 70B: 80 layers, width 8192, 16-bit activations, 8 ranks, one token. Within 3 %, KiB within 1 %,
# messages exactly. Embedding and head are left out: layers only.
#
# | key | what |
# |---|---|
# | `"layer_kib"` | KiB that the two all-reduces of one layer bring together (the tensors themselves) |
# | `"token_mb"` | the same for all layers, in **MB** (10^6) |
# | `"ring_mb"` | what one rank sends for it in ring all-reduces, in **MB** |
# | `"messages"` | messages that follow one another in these rings, all layers |
# | `"floor_ms"` | milliseconds that a token waits for them at least, at 3 µs a message |
#
# **Why.** The last line is why decode on many ranks is bound by latency, whatever the bandwidth.
#
# <details><summary>Hint 1: a nudge</summary> A ring of p ranks takes 2 (p - 1) messages, each of n / p bytes.
# </details>
# <details><summary>Hint 2: the plan</summary> 2 x 8192 x 2 bytes a layer; times 80; times 2 x 7 / 8; 80 x 2
# all-reduces x 14 messages; times 3 µs.
# </details>
# <details><summary>Hint 3: my values look wrong</summary> Half: one all-reduce a layer, or 1 byte a number. 1,120
# messages: (p - 1), but a ring goes round twice. 5.24 as ring_mb: the factor is 2 (p - 1) / p, not 2.
# </details>


# %%
def traffic():
    """Return a dict with the five keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    layer = 2 * 8192 * 2
    messages = 80 * 2 * 2 * (8 - 1)
    return {
        "layer_kib": layer / 1024,
        "token_mb": 80 * layer / 1e6,
        "ring_mb": 80 * layer * 2 * 7 / 8 / 1e6,
        "messages": messages,
        "floor_ms": messages * 3e-6 * 1e3,
    }
    ### END SOLUTION


# %%
check("18.traffic", traffic)

# %% [markdown]
# **Done?** `minillm bench tensor-parallel` measures the all-reduces of this machine, and
# `LLM("tiny", tensor_parallel_size=2)` runs the engine on two processes. Next: exercise 19, pipeline parallelism.
