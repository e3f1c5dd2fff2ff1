# %% [markdown]
# # Exercise 01: the blocks of a decoder
#
# Six tasks, from 5 to 20 minutes each. Write plain torch; any layout and any number of lines is right if the values
# are. A check calls your function on shapes it has not shown you, in more than one dtype, and compares with a
# float64 loop. `minillm grade exercises/01_decoder.ipynb` prints your score.

# %%
import math

import torch
import torch.nn.functional as F

from minillm.lab import check
from minillm.model.rope import cos_sin, rotate

# %% [markdown]
# ## 1. RMSNorm (5 minutes)
#
# **What.** Divide each vector by its root mean square, then multiply by a learned gain: `x / sqrt(mean(x²) + eps) *
# weight`. **Why.** It stands before every block. Its sum of squares is the first thing to overflow in half
# precision, so every engine computes it in float32 and returns the dtype that came in.
#
# <details><summary>Hint 1: a nudge</summary>
#
# 300 is a fine float16 number. 300² is not: the largest float16 is 65504.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# To float32; mean of squares over the last axis with `keepdim=True`; add `eps` under the root; divide; multiply by
# the gain; back to the dtype of `x`.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# Right on large inputs, too large on small ones: `eps` stands outside the root, or is missing. Wrong by an offset:
# the mean was subtracted, which is LayerNorm. All zeros or inf in float16: the squares overflowed.
# </details>


# %%
def rms_norm(x, weight, eps):
    """x [..., size], weight [size] -> [..., size] in x's dtype, computed in float32.

    Example: rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0) is [0.8485, 1.1314]: the mean square is 12.5.
    """
    ### BEGIN SOLUTION
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [..., size]
    return (normed * weight.float()).to(x.dtype)
    ### END SOLUTION


# %%
check("01.rms_norm", rms_norm)

# %% [markdown]
# ## 2. Rotary positions (15 minutes)
#
# **What.** Split the channels of each head into pairs. Turn pair i, seen as a point (a, b), counter-clockwise by
# `position · theta^(-2i / dim)`: `(a cos - b sin, a sin + b cos)`.
# **Why.** After that, q·k depends on the distance of two tokens alone.
#
# Two layouts are in use: channel i with i + dim/2 (Hugging Face), or 2i with 2i + 1 (the paper, llama.cpp). Take
# either; the check accepts both, and tests the property itself.
#
# <details><summary>Hint 1: a nudge</summary>
#
# The angles are one outer product: positions by frequencies, [time, dim / 2]. Heads share them.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Frequencies from `torch.arange(0, dim, 2) / dim`; angles in float32; `cos` and `sin` with an axis of 1 for the
# heads; two halves (or even and odd channels) `a`, `b`; put the turned halves back where they came from.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# Right at position 0 only: the pairs and the angles follow different layouts. Lengths are kept but values are not:
# the sign of `sin` is turned round, or the exponent is i/dim instead of 2i/dim. Right for 0, 1, 2, ... only: the
# positions you were given are not used.
# </details>


# %%
def rope(x, positions, theta):
    """x [time, heads, dim], positions [time] int64 (any integers from 0, in any order) -> x turned, in x's dtype.

    Example: one pair, [[[1.0, 0.0]]], at position 1 becomes [[[0.5403, 0.8415]]]: cos 1 and sin 1.
    """
    ### BEGIN SOLUTION
    dim = x.shape[-1]
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [dim / 2]
    angle = positions[:, None, None].float() * frequencies  # [time, 1, dim / 2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, -1)  # [time, heads, dim / 2] each
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)
    ### END SOLUTION


# %%
check("01.rope", rope)

# %% [markdown]
# ## 3. Grouped-query attention, causal at the bottom right (15 minutes)
#
# **What.** Scaled dot-product attention in which `heads / kv_heads` neighbouring query heads share one KV head, and
# the queries are the *last* `time` of the `length` tokens. **Why.** One mask rule serves prefill (time = length),
# decode (time = 1) and a chunk of a prompt (anything between).
#
# <details><summary>Hint 1: a nudge</summary>
#
# Query i of this call is token `length - time + i` of the sequence. Query head h reads KV head `h // group`.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Repeat each KV head `group` times in place (`repeat_interleave` on the head axis), or reshape q to [batch,
# kv_heads, group, time, dim]. Scores times `dim ** -0.5`; `-inf` where key > length - time + i; softmax; times v.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# Right for time = length only: the mask is aligned to the top left. Right for MHA and MQA only: KV heads are tiled
# (0 1 0 1) where they must be repeated (0 0 1 1). NaN at large scores: an exp without the softmax's own care.
# </details>


# %%
def attention(q, k, v):
    """q [batch, heads, time, dim], k [batch, kv_heads, length, dim], v [batch, kv_heads, length, v_dim]
    -> [batch, heads, time, v_dim]. heads is a multiple of kv_heads, time is at most length.

    Example: with time = length = 1 the result is v itself, once for each query head of its group.
    """
    ### BEGIN SOLUTION
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [batch, heads, length, dim]
    time, length = q.shape[2], k.shape[2]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # [batch, heads, time, length]
    future = torch.ones(time, length, dtype=torch.bool, device=q.device).triu(length - time + 1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v
    ### END SOLUTION


# %%
check("01.attention", attention)

# %% [markdown]
# ## 4. The nucleus (10 minutes)
#
# **What.** Which tokens does top-p keep? The smallest set of likeliest tokens whose probabilities *reach* top_p.
# **Why.** A widely copied version drops the token that crosses the line. With top_p = 0.5 and a best token of 0.9
# nothing is left, and the next softmax is NaN.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Ask of each token: how much probability do the tokens *above* it hold? It stays while that is less than top_p.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Softmax; sort descending, keep the order; cumulative sum minus the token's own share; compare with each row's top_p;
# carry the answers back to where the tokens were (`scatter`).
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# One token short in every row: the crossing token was dropped. The right number of tokens at the wrong places: the
# mask is still in sorted order. Right for the first row only: top_p is one value a row. A few short at
# top_p = 1: a float32 sum over a large vocabulary reaches 1 before its last token.
# </details>


# %%
def nucleus(logits, top_p):
    """logits [batch, vocab], top_p [batch] in (0, 1] -> bool [batch, vocab], True for the tokens that stay.
    At top_p = 1 every token stays, however large the vocabulary.

    Example: probabilities 0.5, 0.3, 0.2 at top_p 0.6 -> True, True, False.
    """
    ### BEGIN SOLUTION
    ordered, order = logits.softmax(-1).sort(-1, descending=True)  # [batch, vocab] each
    above = ordered.cumsum(-1) - ordered  # [batch, vocab]: what the likelier tokens hold
    keep = (above < top_p[:, None]) | (top_p[:, None] == 1)  # [batch, vocab], in sorted order
    return torch.zeros_like(keep).scatter(-1, order, keep)
    ### END SOLUTION


# %%
check("01.nucleus", nucleus)

# %% [markdown]
# ## 5. Estimate it: another 8B (10 minutes)
#
# The shape of Qwen3 8B: vocabulary 151936, width 4096, 36 layers, 32 query heads and 8 KV heads of 128 channels, a
# gated feed-forward of width 12288, the head not tied to the embedding. Pen and paper first. Within 2 % is right, so
# norms may be left out.
#
# - `parameters`: all of them.
# - `flops`: of one decode step whose context, the new token included, is 8192 tokens.
# - `kv_bytes`: of one token of context, in bfloat16.
#
# <details><summary>Hint 1: a nudge</summary>
#
# A matrix of n parameters costs 2n FLOPs a token. One matrix is only looked up, not multiplied.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Per layer: width · (32 + 2 · 8) · 128 for q, k, v; 32 · 128 · width for out; 3 · width · 12288. Attention itself,
# per layer and token of context: a dot product of 128 and a sum of 128, for each of 32 heads: 4 · 32 · 128 FLOPs.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# 8 % low in parameters: one of embedding and head is missing. A fifth low in flops: attention over the context was
# left out. 4 times too large in kv_bytes: query heads were counted where KV heads are stored.
# </details>

# %%
### BEGIN SOLUTION
matrices = 36 * (4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288)
estimate = {
    "parameters": matrices + 2 * 151936 * 4096,
    "flops": 2 * (matrices + 151936 * 4096) + 4 * 36 * 32 * 128 * 8192,
    "kv_bytes": 2 * 36 * 8 * 128 * 2,
}
### END SOLUTION

# %%
check("01.estimate", estimate)

# %% [markdown]
# ## 6. Debug it: a prompt in chunks (15 minutes)
#
# **What.** Chunked prefill runs a long prompt in pieces, so that other requests need not wait; keys and values of
# earlier pieces are kept. The result must equal the whole prompt at once, whatever the chunk. This one does for short
# prompts, passed its author's test, and made long prompts subtly worse.
# **Why.** Nothing crashes and the text stays fluent. Find the line and mend it; leave the rest as it is.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Compare `chunk=3` and `chunk=100` on 8 tokens: which rows differ first?
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# The first chunk is always right. So is the mask: it is the one of task 3. What does a token of the second chunk
# think its own place in the prompt is?
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# Only the first row of each later chunk is right or nearly so: queries and keys disagree about where 0 is. Wrong for
# a last, shorter chunk only: the place was counted with the length of this piece and not from where it starts.
# </details>


# %%
def chunked_attention(q, k, v, inverse, chunk):
    """One head of a whole prompt, `chunk` tokens at a time. q, k, v [length, dim]; inverse [dim / 2]: radians a
    position.

    Returns [length, dim], the same for every chunk >= 1.
    """
    keys, out = [], []
    for start in range(0, len(q), chunk):
        piece = slice(start, start + chunk)
        time = len(q[piece])
        ### BEGIN SOLUTION
        positions = torch.arange(start, start + time)
        ### END SOLUTION
        ### BEGIN GIVEN
        # positions = torch.arange(time)
        ### END GIVEN
        cos, sin = cos_sin(positions, inverse)  # [time, 1, dim] each
        turned_q = rotate(q[piece, None], cos, sin)[:, 0]  # [time, dim]
        keys.append(rotate(k[piece, None], cos, sin)[:, 0])
        scores = turned_q @ torch.cat(keys).T * q.shape[-1] ** -0.5  # [time, start + time]
        future = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
        out.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[: start + time])
    return torch.cat(out)


# %%
check("01.chunked_attention", chunked_attention)

# %% [markdown] tags=["solution-only"]
# ## All together
#
# The first three tasks make the attention half of a layer. Chapter 02 stops repeating it for old tokens.

# %% tags=["solution-only"]
x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
w = torch.randn(64 + 2 * 32, 64, generator=torch.Generator().manual_seed(1)) / 8  # 4 query heads, 2 KV heads of 16
heads = F.linear(rms_norm(x, torch.ones(64), 1e-5), w).unflatten(-1, (-1, 16))  # [5, 8, 16]
place = torch.arange(5)
q, k, v = rope(heads[:, :4], place, 1e4), rope(heads[:, 4:6], place, 1e4), heads[:, 6:]
print(attention(*(t.transpose(0, 1)[None] for t in (q, k, v))).shape)
