# %% [markdown]
# # Exercise 03: the memory ledger
#
# Six tasks that rebuild the planner of chapter 03: what a model weighs, what fewer bits save, how many requests fit,
# when the KV cache passes the weights, and a planner that crashes its card. About 75 minutes, no GPU, no network.
#
# Bytes are bytes: 1 GB is 10^9 of them and 1 GiB is 2^30. "KV" is short for keys and values; the KV cache
# (键值缓存) keeps them so that no token is computed twice.

# %%
import math

from minillm.lab import check
from minillm.model.shapes import known_shape

# %% [markdown]
# ## Task 1. What a model weighs (10 minutes, 2 points)
#
# **What.** The bytes of all weights of a Llama-like decoder, from its configuration alone.
#
# **Why.** It is the first line of every ledger, and the one that cannot be negotiated: no request runs without it.
# "7B x 2 bytes" is good enough for a lunch; a planner that places 80 GB needs the real count.
#
# Of the fields of `ModelConfig` you need `vocab_size`, `hidden_size`, `intermediate_size`, `num_layers`, `num_heads`,
# `num_kv_heads`, `head_dim`, `tie_embeddings`, `qkv_bias` and `gated_mlp`. A decoder holds
#
# - a table of token embeddings, [vocab, hidden], and a head of the same shape: one tensor if they are tied
#   (共享权重), two if not;
# - in each layer, four projections: q, [heads x head_dim, hidden]; k and v, [kv_heads x head_dim, hidden] each; and
#   out, [hidden, heads x head_dim]. q, k and v have a bias vector where `qkv_bias` is set; out has none;
# - in each layer, an MLP: gate and up, [ffn, hidden] each, and down, [hidden, ffn]; without a gate only up and down;
# - an RMSNorm (a vector of hidden) before attention and one before the MLP of each layer, and one after the last
#   layer.
#
# `heads x head_dim` need not be `hidden`.


# %%
def weight_bytes(config, bytes_per_weight=2):
    """Bytes of all weights of a Llama-like decoder, an integer.

    config: a ModelConfig, with RMSNorm, rotary positions and no bias but that of q, k and v.
    bytes_per_weight: an integer. Example: Llama-2-7B in 2 bytes is 13,476,831,232.
    """
    ### BEGIN SOLUTION
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = (q_rows + 2 * kv_rows) * (hidden + config.qkv_bias) + hidden * q_rows
    mlp = (3 if config.gated_mlp else 2) * hidden * ffn
    per_layer = attention + mlp + 2 * hidden
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * hidden
    return (tables + config.num_layers * per_layer + hidden) * bytes_per_weight
    ### END SOLUTION


# %%
check("03.weight_bytes", weight_bytes)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# Count rows x columns of every matrix, then add the vectors. Write down one layer, then multiply.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# `q_rows = heads * head_dim`, `kv_rows = kv_heads * head_dim`. A layer: `(q_rows + 2 * kv_rows) * hidden` and the
# bias vectors of those rows, `hidden * q_rows` for out, 2 or 3 matrices of `hidden * ffn`, 2 norms. Around the
# layers: 1 or 2 tables of `vocab * hidden`, and the last norm.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - Too large by a tenth on Llama-3.1-8B and right on Llama-2-7B: k and v were given `num_heads`.
# - Too large by exactly vocab x hidden on some: a tied head was counted again.
# - Too small by `hidden` elements: the norm after the last layer.
# - Right except where head_dim is unusual: q was given `hidden` rows instead of `heads x head_dim`.
# </details>

# %% [markdown]
# ## Task 2. What 4 bits really cost (10 minutes, 2 points)
#
# **What.** The bytes of weight matrices quantised to `bits` bits in groups.
#
# **Why.** "4 bits" is the size of a code, not of a weight. Codes of a group (分组量化) of neighbours in a row share
# a 16-bit scale, and in asymmetric schemes a 16-bit zero point (零点). And what is not quantised stays at 16 bits:
# usually the embedding, the head and the norms. That is how an 8B model "in 4 bits" comes to 5.7 GB and not 4.
#
# Each row is packed by itself: its codes are padded to whole bytes, and its last group may be shorter than the others
# but has a scale (and zero point) of its own.


# %%
def quantized_bytes(shapes, bits, group, asymmetric=False):
    """Bytes of the matrices once quantised, an integer.

    shapes: list of (rows, columns). bits: bits of one code, 1 to 16. group: weights that share a scale, >= 1.
    asymmetric: a 2-byte zero point beside each 2-byte scale.
    Example: quantized_bytes([(1, 128)], 4, 128) is 66: 64 bytes of codes and one scale.
    """
    ### BEGIN SOLUTION
    total = 0
    for rows, columns in shapes:
        codes = -(-columns * bits // 8)  # bytes a row, rounded up
        groups = -(-columns // group)  # groups a row, rounded up
        total += rows * (codes + groups * (4 if asymmetric else 2))
    return total
    ### END SOLUTION


# %%
check("03.quantized_bytes", quantized_bytes)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# Two kinds of bytes: codes and the parameters of the groups. Count both for one row, then multiply by rows.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Codes of a row: `ceil(columns * bits / 8)`. Groups of a row: `ceil(columns / group)`. Each costs 2 or 4 bytes. In
# integers, `-(-a // b)` is a / b rounded up.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - A little too small, only at odd shapes: `//` rounds down where a last, shorter group still needs its scale.
# - Too small by a few percent everywhere: the scales are missing. At 4 bits and group 32 they are an eighth of the
#   codes.
# - Right except in asymmetric cases: the zero point costs 2 bytes beside the 2 of the scale.
# - A float: divide with `//`.
# </details>

# %% [markdown]
# ## Task 3. The largest batch that fits (15 minutes, 2 points)
#
# **What.** How many requests of one length fit in a budget of bytes, in closed form.
#
# **Why.** An engine has to know before it starts: one request too many is not slow, it is an out-of-memory error
# (显存溢出) that ends all the others. One too few is throughput thrown away. The borders matter, so this is integer
# arithmetic.
#
# A request of `length` tokens holds whole blocks of `block` tokens (chapter 05 shows why), at `kv_per_token` bytes a
# token, and while it runs it needs `per_request` bytes more for its activations.


# %%
def largest_batch(budget, weights, kv_per_token, length, per_request=0, block=1):
    """The largest number of requests that fit, an integer >= 0.

    budget: bytes we may use. weights: bytes that are taken once. kv_per_token: bytes of K and V of one token.
    length: tokens of each request. per_request: further bytes a request. block: tokens are claimed in multiples.
    Example: largest_batch(1000, 400, 10, 15, block=16) is 3: 160 bytes each, 480 of the 600 that are left.
    """
    ### BEGIN SOLUTION
    blocks = -(-length // block)
    each = blocks * block * kv_per_token + per_request
    return max(0, budget - weights) // each
    ### END SOLUTION


# %%
check("03.largest_batch", largest_batch)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# What is left after the weights, divided by what one request costs.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Round `length` up to a multiple of `block`, multiply by `kv_per_token`, add `per_request`. Then `(budget - weights)
# // each`, and 0 where the weights alone do not fit.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - One too many now and then: the length was not rounded up to whole blocks, or the division was rounded to nearest.
# - One too few where everything fits exactly: a `<` where `<=` is meant. A card that is full to the last byte is
#   legal.
# - Negative: the weights do not fit, so the answer is 0.
# </details>

# %% [markdown]
# ## Task 4. When the cache passes the weights (15 minutes, 3 points)
#
# **What.** The shortest length at which the KV of `batch` requests takes more bytes than the weights.
#
# **Why.** Below that length, fewer bits for the weights is the first thing to try; above it, fewer bits or fewer
# heads for the cache. Models with a sliding window (滑动窗口) keep at most `window` tokens in some layers, so the
# cache grows more slowly past the window, and where all layers have one it may never get there.


# %%
def crossover(weights, kv_per_token_layer, windows, batch=1):
    """The least length, in tokens, at which KV bytes > weight bytes (more, not equal). None where there is none.

    weights: bytes of the weights, >= 0. kv_per_token_layer: bytes of K and V of one token in ONE layer.
    windows: one entry a layer: None keeps every token, an integer w keeps the last w. batch: requests of that length.
    Examples: crossover(1000, 10, [None, None]) is 51; with windows [None, 20] it is 81; with [20] it is None.
    """
    ### BEGIN SOLUTION
    each = kv_per_token_layer * batch
    borders = [*sorted({w for w in windows if w is not None}), math.inf]
    start, stored = 0, 0  # at length `start` the layers hold `stored` tokens together
    for border in borders:  # between two borders the cache grows by the same amount a token
        growing = sum(1 for w in windows if w is None or w >= border)
        if growing:
            needed = start + ((weights - stored * each) // (growing * each) + 1)
            if needed <= border:
                return needed
        if border == math.inf:
            return None
        start, stored = border, stored + growing * (border - start)
    ### END SOLUTION


# %%
check("03.crossover", crossover)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# How many tokens do all layers hold together at length n? That sum never shrinks as n grows.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# `kv(n) = batch * kv_per_token_layer * sum(n if w is None else min(n, w) for w in windows)`. Without windows the
# answer is `weights // (batch * layers * kv_per_token_layer) + 1`. With windows, either walk from window to window,
# or search: if every layer has a window and `kv(max window)` is not more than the weights, there is none; else double
# n until it is enough, then halve the interval. Real answers run to millions of tokens, so trying each n in turn is
# too slow.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - One too small where the division has no remainder: equal is not more, so it is floor + 1 and not ceil.
# - Right for `None`, too small with windows: a layer with a window stops growing at the window.
# - Too small by a factor: every layer stores the token, and K and V are already in `kv_per_token_layer`.
# </details>

# %% [markdown]
# ## Task 5. Debug it: the planner that crashed the card (15 minutes, 3 points)
#
# **What.** At its start an engine turns what is left of the card into KV blocks. The planner below looks right, and
# starts up on the models its author tried. **Three** of its lines are wrong, each in a way that serving engines or
# calculators have been wrong: one gives a model the wrong number of blocks by a whole factor, one misreads what the
# fraction is a fraction of, and one is wrong by at most one block, which is enough to crash.
#
# **The contract.** `utilisation` is the share of the card's **total** memory that this engine may use, weights,
# activations and all, so that the rest stays free for whatever else lives on the card. `weights` and `activations`
# are bytes that the engine needs beside the cache. A block holds K and V of `block_size` tokens in all layers. What
# is returned must fit.


# %%
def plan_blocks(total, weights, activations, utilisation, config, block_size=16, kv_bytes=2):
    """How many KV blocks to allocate, an integer >= 0.

    total: bytes of the card. weights, activations: bytes. utilisation: 0 to 1. config: a ModelConfig.
    Example: an 80e9-byte card, Llama-3.1-8B in 2 bytes with 2e9 of activations, 0.9: 25,720 blocks.
    """
    ### BEGIN SOLUTION
    available = total * utilisation - weights - activations
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bytes
    return max(0, int(available // (per_token * block_size)))
    ### END SOLUTION
    ### BEGIN GIVEN
    # available = (total - weights - activations) * utilisation
    # per_token = 2 * config.num_layers * config.num_heads * config.head_dim * kv_bytes
    # return max(0, round(available / (per_token * block_size)))
    ### END GIVEN


# %%
check("03.plan_blocks", plan_blocks)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# Work through a card of 100 bytes with 50 of weights at utilisation 0.9 by hand. How much may the cache have?
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# One line at a time: the budget is `total * utilisation`, and weights and activations come out of the budget. Then
# ask who stores keys in a model with grouped queries. Then ask what happens when 10.6 blocks fit.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - A factor 4 or 8 too few on GQA models, right on MHA models: only KV heads are stored.
# - A few percent too many: the fraction was taken of what is left, so the engine uses more than its share.
# - One too many in about half of the cases: a block that fits in part does not fit.
# </details>

# %% [markdown]
# ## Task 6. Estimate it: a 70B model for 32 users (5 minutes, 1 point)
#
# **What.** Llama-3.1-70B (80 layers, 64 query heads, 8 KV heads, head dimension 128; 70.55 billion parameters) in
# 16-bit weights and 16-bit KV, for 32 users at 32,768 tokens each. How many **GB** (10^9 bytes) do weights and KV
# take together?
#
# **Why.** This is the question at the whiteboard. Do it on paper with round numbers first: within 3 % is right. Then
# ask yourself how many 80 GB cards that is if 90 % of each may be used, and whether you would rather buy them or
# halve the KV.

# %%
### BEGIN SOLUTION
seventy_b_gigabytes = (70.55e9 * 2 + 2 * 80 * 8 * 128 * 2 * 32768 * 32) / 1e9
### END SOLUTION

# %%
check("03.estimate_70b", seventy_b_gigabytes)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# Two lines: the weights, and the KV of one token times all tokens.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Weights: 2 bytes x 70.55e9. KV of a token: 2 (K and V) x layers x KV heads x head dimension x 2 bytes, about 0.33
# MB. Tokens: 32 x 32,768, about a million.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - About 450: GiB, not GB.
# - About 344 or 141: only one of the two lines.
# - About 313: K without V.
# - Near 2,900: 64 query heads instead of 8 KV heads.
# - A number with eight or more digits: bytes, not GB.
# </details>

# %% [markdown]
# ## When all is green
#
# Put your functions together: does Llama-3.1-8B at 4 bits, in groups of 128, fit a 24 GB card with eight users at
# 8,192 tokens each?

# %% tags=["solution-only"]
model = known_shape("llama-3.1-8b")
hidden, ffn, kv_rows = model.hidden_size, model.intermediate_size, model.num_kv_heads * model.head_dim
matrices = [(hidden + 2 * kv_rows, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)] * model.num_layers
in_16_bits = 2 * sum(rows * columns for rows, columns in matrices)
weights = weight_bytes(model) - in_16_bits + quantized_bytes(matrices, 4, 128)
per_token = 2 * model.num_layers * kv_rows * 2
users = largest_batch(24 * 10**9 * 9 // 10, weights, per_token, 8192, 2 * 10**8, 16)
print(f"weights {weights / 1e9:.2f} GB; {users} users at 8,192 tokens, 0.2 GB of activations each")
