# %% [markdown]
# # Exercise 02: the KV cache
#
# Six tasks, about 75 minutes: the bytes of a cache, three figures worth knowing, the price of growing by
# concatenation, the mask, a cache of your own, and one that shows a request what another wrote. Chapter:
# `notebooks/02_kv_cache.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. A check may be run as often as you
# like.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. Bytes of a KV cache (5 minutes)
#
# **What.** The bytes that keys and values of `batch` sequences of `length` tokens take.
# **Why.** It is the formula of every capacity question: KV memory decides how many requests fit on a card.
#
# <details><summary>Hint 1: a nudge</summary>
# For one token in one layer, how many numbers are stored? And is it the query heads or the KV heads that count?
# </details>
# <details><summary>Hint 2: the plan</summary>
# One token in one layer: K and V, each kv_heads x head_dim numbers. Multiply by layers, by tokens, by sequences, by
# bytes a number.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Half of what is expected: K alone, without V. Too large by the size of a GQA group: query heads in place of KV heads
# (they are not even an argument here). Right for batch 1 only: the batch is missing.
# </details>


# %%
def kv_bytes(batch, layers, kv_heads, head_dim, length, itemsize):
    """Bytes of K and V together. length: tokens a sequence; itemsize: bytes a number (2 for bfloat16).

    Example: kv_bytes(1, 2, 1, 4, 8, 4) is 512.
    """
    ### BEGIN SOLUTION
    return 2 * batch * layers * kv_heads * head_dim * length * itemsize
    ### END SOLUTION


# %%
check("02.kv_bytes", kv_bytes)

# %% [markdown]
# ## 2. Estimate it: four figures (10 minutes)
#
# **What.** Four numbers, to within 3 %. Write down the expression, not a number you remember. 16-bit numbers
# throughout; GB is 10^9 bytes, GiB is 2^30; 128 K tokens are 131,072.
#
# | key | what |
# |---|---|
# | `"mha_2048_gib"` | the cache of LLaMA-7B (32 layers, 32 KV heads of 128), 1 x 2,048 tokens, in **GiB** |
# | `"mha_8x4096_gb"` | the cache of the same model, 8 x 4,096 tokens, in **GB** |
# | `"gqa_128k_gb"` | the cache of a 7B with GQA (32 layers, 8 KV heads of 128), 1 x 128 K tokens, in **GB** |
# | `"tokens_24gb"` | LLaMA-7B on a 24 GB card, 13.5 GB weights, 1 GB for the rest: **tokens** that fit |
#
# **Why.** Interviewers ask for these three and expect the arithmetic, not the memory of it. The fourth is the formula
# turned round.
#
# <details><summary>Hint 1: a nudge</summary>
# Bytes a token first. For LLaMA-7B that is a round number of KiB.
# </details>
# <details><summary>Hint 2: the plan</summary>
# 2 x 32 x 32 x 128 x 2 bytes = 512 KiB a token; times the tokens, all sequences together; divided by 2^30 or 10^9.
# The last: free bytes / bytes a token.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# 16.0 where GB was asked: that is GiB. Four times too large on the third: 32 KV heads in place of 8. Half of
# everything: V is missing. The last near 20,000 or 44,000: the 1 GB, or the weights, were not taken off.
# </details>


# %%
def figures():
    """Return a dict with the four keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    mha, gqa = 2 * 32 * 32 * 128 * 2, 2 * 32 * 8 * 128 * 2  # bytes a token
    return {
        "mha_2048_gib": mha * 2048 / 2**30,
        "mha_8x4096_gb": mha * 8 * 4096 / 1e9,
        "gqa_128k_gb": gqa * 131072 / 1e9,
        "tokens_24gb": (24e9 - 13.5e9 - 1e9) / mha,
    }
    ### END SOLUTION


# %%
check("02.figures", figures)

# %% [markdown]
# ## 3. What growing costs (10 minutes)
#
# **What.** A cache that grows by `torch.cat` holds `prompt` tokens. Then come `steps` decode steps; each makes a new
# tensor that holds everything stored so far *and* the new token. How many bytes do those steps write?
# **Why.** The answer is quadratic: the term that the cache removed from the FLOPs comes back in bytes.
#
# <details><summary>Hint 1: a nudge</summary>
# How many tokens does the first step write? And the second? The new tensor holds the new token too.
# </details>
# <details><summary>Hint 2: the plan</summary>
# Step i (from 1) writes prompt + i tokens. Sum over i, in whole numbers: 1 + 2 + ... + s is s (s + 1) // 2.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Short by one token a step: the new token is not counted. The same for every prompt: what was stored before is not
# copied in your sum. Far too small: that is the preallocated cache, one row a step. A float that is off in its last
# digits: `/` in place of `//`.
# </details>


# %%
def concat_writes(prompt, steps, token_bytes):
    """Bytes written by `steps` concatenating decode steps, as an int. token_bytes: K and V of one token, all layers.

    Example: concat_writes(3, 2, 10) is (4 + 5) * 10 = 90.
    """
    ### BEGIN SOLUTION
    return token_bytes * (steps * prompt + steps * (steps + 1) // 2)
    ### END SOLUTION


# %%
check("02.concat_writes", concat_writes)

# %% [markdown]
# ## 4. The mask of a chunk (10 minutes)
#
# **What.** A call brings `time` new tokens; with them the cache holds `length` tokens (`length >= time`). Which keys
# may each of the new queries see? The new tokens are the *last* of the stored ones.
# **Why.** Prefill has time = length, decode has time = 1, chunked prefill and draft verification lie between. A mask
# that is right for prefill only is the classic bug of a first cache.
#
# <details><summary>Hint 1: a nudge</summary>
# At which position of the text does query 0 of this call sit?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Query i sits at position length - time + i and sees keys 0 to that position, its own included. Compare two
# `torch.arange`, one as a column.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right for (4, 4), wrong for (2, 5): aligned at the top left, query 0 sees only key 0. One True too few in each row:
# a query sees itself, `<=`. Everything inverted: True means "may look" here. Row 0 of (1, 6) must be all True.
# </details>


# %%
def causal_mask(time, length):
    """Bool tensor [time, length]: True where a query may look at a key.

    Example: causal_mask(2, 4) is [[True, True, True, False], [True, True, True, True]].
    """
    ### BEGIN SOLUTION
    query = torch.arange(length - time, length)[:, None]  # [time, 1]
    return torch.arange(length) <= query  # [time, length]
    ### END SOLUTION


# %%
check("02.causal_mask", causal_mask)

# %% [markdown]
# ## 5. A cache of your own (20 minutes)
#
# **What.** A class that stands behind the decoder's seam. The decoder calls `positions` once and then `attend` once
# per layer, for each call of the model; a call may bring one token or many. Reserve the room in `__init__`; each call
# writes its new rows only.
# **Why.** This is the object all later chapters change: paged, quantised, windowed, shared.
#
# - `layer.index` says which layer calls, `layer.scale` is the factor on `q @ k`.
# - Query head h uses KV head `h // (heads // kv_heads)`.
# - The caller may use the memory of k and v again after the call: copy what you keep.
# - When the room is used up, raise `ValueError` before anything is written.
#
# Any layout is fine, and so is `torch.nn.functional.scaled_dot_product_attention` or your own `causal_mask`.
#
# <details><summary>Hint 1: a nudge</summary>
# In one call of the model, layer 0 stores its tokens before layer 1 has seen any. Who counts what?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Two tensors [layers, batch, kv_heads, max_length, head_dim] and one count per layer. In `attend`: end = count +
# time; write rows count to end; take rows up to end; repeat KV heads with `repeat_interleave`; scores, mask, softmax
# in float32, weights @ values.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right for one layer only: one count shared by all. First call right, later ones wrong: the mask, or rows written at
# 0 again. Wrong with grouped heads only: `repeat` lays heads out as 0 1 0 1, `repeat_interleave` as 0 0 1 1. Right
# alone, wrong in a model: positions do not go on. Right alone, wrong beside a second cache: tensors on the class.
# </details>


# %%
class Cache:
    """A KV cache for one batch of equally long sequences."""

    def __init__(self, config, batch, max_length):
        """config has num_layers, num_kv_heads, head_dim. Room for max_length tokens a sequence, float32."""
        ### BEGIN SOLUTION
        shape = (config.num_layers, batch, config.num_kv_heads, max_length, config.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.stored = [0] * config.num_layers
        ### END SOLUTION

    def positions(self, shape):
        """int64 tensor of that shape, [batch, time]: the positions of the next tokens, 0 for the very first."""
        ### BEGIN SOLUTION
        start = self.stored[-1]
        return torch.arange(start, start + shape[-1]).expand(shape)
        ### END SOLUTION

    def attend(self, layer, q, k, v):
        """Store k and v [batch, time, kv_heads, head_dim]; attend q [batch, time, heads, head_dim] -> q's shape."""
        ### BEGIN SOLUTION
        start, time = self.stored[layer.index], q.shape[1]
        end = start + time
        if end > self.keys.shape[3]:
            raise ValueError(f"room for {self.keys.shape[3]} tokens, {end} asked for")
        self.keys[layer.index, :, :, start:end] = k.transpose(1, 2)  # [batch, kv_heads, time, dim]
        self.values[layer.index, :, :, start:end] = v.transpose(1, 2)
        self.stored[layer.index] = end
        group = q.shape[2] // k.shape[2]
        keys = self.keys[layer.index, :, :, :end].repeat_interleave(group, dim=1)  # [batch, heads, end, dim]
        values = self.values[layer.index, :, :, :end].repeat_interleave(group, dim=1)
        scores = q.transpose(1, 2) @ keys.transpose(2, 3) * layer.scale  # [batch, heads, time, end]
        visible = torch.arange(end) <= torch.arange(start, end)[:, None]  # [time, end]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ values).transpose(1, 2)  # [batch, time, heads, dim]
        ### END SOLUTION


# %%
check("02.cache", Cache)

# %% [markdown]
# ## 6. Debug it: the answer that quoted a stranger (20 minutes)
#
# **What.** A server keeps one cache with a row ("slot") per request, each filled to its own length. The function runs
# one decode step for all slots. Its tests, with prompts of equal length, are green. In production a long request
# ends, a short one takes over its slot (its length starts at 0 again, nothing is erased), and now and then an answer
# quotes the request that was there before. Find the line and mend it.
# **Why.** Stale rows after a slot is reused are a data leak between users; nothing crashes.
#
# Not erasing is right: a slot is freed by setting its length, which costs nothing. Keep it that way, and keep the
# function free of loops over slots if you can.
#
# <details><summary>Hint 1: a nudge</summary>
# With equal lengths all is well. Which line treats all slots alike?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Each slot needs a mask of its own: [batch, room], from its own length. Then it has to broadcast over KV heads and
# groups.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Closer, but still off: zeroed keys are not masked keys, their score is 0 and e^0 is not 0. One stale row still seen:
# `>` in place of `>=`, now that lengths already count the new token. The new token does not see itself: the mask was
# made before the lengths grew. A shape error, or slots and heads mixed up: index the mask as [:, None, None].
# </details>


# %%
def decode_step(q, k, v, keys, values, lengths, scale):
    """One decode step for every slot. Changes keys, values and lengths in place; returns [batch, heads, dim].

    q [batch, heads, dim], k and v [batch, kv_heads, dim]: the new token of each slot.
    keys, values [batch, kv_heads, room, dim]: slot b holds lengths[b] tokens; what lies behind is left from before.
    lengths [batch] int64: tokens stored in each slot, before the call without the new one.
    """
    ### BEGIN SOLUTION
    batch, kv_heads, room, dim = keys.shape
    slots = torch.arange(batch)
    keys[slots, :, lengths] = k
    values[slots, :, lengths] = v
    lengths += 1
    q = q.reshape(batch, kv_heads, -1, dim)  # [batch, kv_heads, group, dim]
    scores = q @ keys.transpose(2, 3) * scale  # [batch, kv_heads, group, room]
    unused = torch.arange(room) >= lengths[:, None]  # [batch, room]
    scores = scores.masked_fill(unused[:, None, None], float("-inf"))
    return (scores.softmax(-1) @ values).reshape(batch, -1, dim)
    ### END SOLUTION
    ### BEGIN GIVEN
    # batch, kv_heads, room, dim = keys.shape
    # slots = torch.arange(batch)
    # keys[slots, :, lengths] = k
    # values[slots, :, lengths] = v
    # lengths += 1
    # q = q.reshape(batch, kv_heads, -1, dim)  # [batch, kv_heads, group, dim]
    # scores = q @ keys.transpose(2, 3) * scale  # [batch, kv_heads, group, room]
    # unused = torch.arange(room) >= lengths.max()  # [room]
    # scores = scores.masked_fill(unused, float("-inf"))
    # return (scores.softmax(-1) @ values).reshape(batch, -1, dim)
    ### END GIVEN


# %%
check("02.decode_step", decode_step)

# %% [markdown]
# **Done?** Put your `Cache` behind the real model: `generate_cached(load_model("tiny"), prompt, 32,
# cache=Cache(...))` from `minillm.cache.generate` gives the naive loop's tokens. Next: exercise 03, what else is in
# the memory.
