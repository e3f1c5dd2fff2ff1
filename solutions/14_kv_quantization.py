# %% [markdown]
# # Exercise 14: KV-cache quantisation
#
# Five tasks, about 70 minutes: round keys and values, keep the books of the window, attend over both kinds of keys,
# mend blocks that lose their scales, and count the bytes. Chapter: `notebooks/14_kv_quantization.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. A check may be run as often as you
# like.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. Two directions (15 minutes)
#
# **What.** Round one head's keys and values to `bits` bits and back: x ~ low + scale * code, code 0 .. 2^bits - 1,
# where low is the smallest of the numbers that share a scale, and scale = (largest - smallest) / (2^bits - 1). Keys
# share by `group` consecutive tokens of one channel; values by all channels of one token. **Why.** It is all of
# KIVI's idea, and which axis is which is what people get wrong.
#
# <details><summary>Hint 1: a nudge</summary>
# In k [tokens, dim], along which axis do the numbers lie that share a scale? And in v?
# </details>
# <details><summary>Hint 2: the plan</summary>
# View k as [tokens / group, group, dim] and take amin and amax over axis 1, with keepdim. For v over axis 1 of
# [tokens, dim]. One helper with an axis does both.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Keys right with one group only: amin over all tokens, or groups that take every n-th token. NaN: a channel that
# never changes has scale 0; give it any other. A little off everywhere: 2^bits steps in place of 2^bits - 1, or cut
# off in place of rounded.
# </details>


# %%
def round_kv(k, v, bits, group):
    """k, v [tokens, dim] float, tokens a multiple of group -> (k, v) rounded, as floats again, same shapes.

    Example: bits 2, group 2, k = v = [[0., 10.], [3., 40.]] gives k as it is, and v the same.
    """

    ### BEGIN SOLUTION
    def there_and_back(x, axis):
        low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        return low + ((x - low) / scale).round() * scale

    keys = there_and_back(k.unflatten(0, (-1, group)), 1).flatten(0, 1)  # [tokens, dim]
    return keys, there_and_back(v, 1)
    ### END SOLUTION


# %%
check("14.round_kv", round_kv)

# %% [markdown]
# ## 2. The books of the window (15 minutes)
#
# **What.** Tokens are rounded `residual` at a time, as a unit, the moment the unit is complete. Query p sees the
# tokens before its own unit rounded, and its own unit, itself included, as it is. A step adds `new` tokens to a cache
# of `start`. Say which tokens it rounds, which it leaves unrounded, and how many rounded ones each new query sees.
# **Why.** The rule looks at positions only: a prompt in one step or in ten gives the same text.
#
# <details><summary>Hint 1: a nudge</summary>
# `start` tokens were there: which of them are still unrounded? They belong to the first unit that this step may fill.
# </details>
# <details><summary>Hint 2: the plan</summary>
# With R = residual: units begin at multiples of R. Rounded now: from start // R * R up to end // R * R, where end =
# start + new. Unrounded after: from there to end. Query p: p // R * R.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right for steps from 0 only: the waiting tokens before `start` are rounded with the new ones. Wrong for long steps:
# a step can fill several units. Each query needs its own number. The query that completes a unit still sees it
# unrounded: p // R * R, not (p + 1) // R * R.
# </details>


# %%
def window_step(start, new, residual):
    """start, new, residual: whole numbers -> a dict of three lists of whole numbers:

    "rounded": the tokens (positions) that this step rounds. "floats": those that are unrounded after it.
    "sees": for each new token, in order, how many rounded tokens it sees.
    Example: window_step(6, 3, 4) is {"rounded": [4, 5, 6, 7], "floats": [8], "sees": [4, 4, 8]}.
    """
    ### BEGIN SOLUTION
    end = start + new
    border = end // residual * residual
    return {
        "rounded": list(range(start // residual * residual, border)),
        "floats": list(range(border, end)),
        "sees": [p // residual * residual for p in range(start, end)],
    }
    ### END SOLUTION


# %%
check("14.window_step", window_step)

# %% [markdown]
# ## 3. One query over both (15 minutes)
#
# **What.** Attention of one query over rounded keys and values and over the window. Keys come as (codes, scale, low)
# with a scale and a low for each group of consecutive tokens and channel; values as (codes, scale, low) with one of
# each a token. There may be no rounded tokens yet. **Why.** This is a decode step. A kernel does the same without
# writing the floats anywhere.
#
# <details><summary>Hint 1: a nudge</summary>
# How many softmaxes are there?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Rounded keys: low + scale * codes, with scale and low repeated for the tokens of a group
# (`repeat_interleave`; the group is len(codes) // len(scale)). Put the window's keys behind them, take q @ k * scale,
# one softmax, and the weighted sum of all values.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Outputs up to twice too large, or off where the window is short: a softmax for each part. Right with one group
# only: `repeat` interleaves groups. ZeroDivisionError: no rounded tokens, no groups.
# </details>


# %%
def attend(q, keys, values, window_k, window_v, factor):
    """q [dim]; keys = (codes uint8 [n, dim], scale [groups, dim], low [groups, dim]); values = (codes uint8 [n, dim],
    scale [n], low [n]); window_k, window_v [m, dim], m >= 1; factor: on q @ k -> the output [dim].

    Example: with n = 0 and m = 1 the output is window_v[0].
    """
    ### BEGIN SOLUTION
    codes, scale, low = keys
    group = len(codes) // max(len(scale), 1)
    rounded_k = codes * scale.repeat_interleave(group, 0) + low.repeat_interleave(group, 0)  # [n, dim]
    codes, scale, low = values
    rounded_v = codes * scale[:, None] + low[:, None]  # [n, dim]
    k, v = torch.cat((rounded_k, window_k)), torch.cat((rounded_v, window_v))  # [n + m, dim]
    return (k @ q * factor).softmax(0) @ v
    ### END SOLUTION


# %%
check("14.attend", attend)

# %% [markdown]
# ## 4. Debug it: two requests, one block (15 minutes)
#
# **What.** Blocks of values, a token at a time: `write` rounds a token into a place of a block, `copy` is the
# copy-on-write of a fork, `read` gives floats. One request alone is always right. Under load, texts of forked
# requests drift, and so do those of requests that were given a block which another one had before. Two bugs.
# **Why.** Codes mean nothing without their scale and low, and each place that moves or reuses codes can forget that.
#
# <details><summary>Hint 1: a nudge</summary>
# What makes three arrays out of one token? Follow each of the three through `copy`, and through a second `write` to
# the same place.
# </details>
# <details><summary>Hint 2: the plan</summary>
# `copy` must move all that `write` wrote. `write` must not use anything that was there before it.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Forks still off by a constant a token: the low end. Reused places still clipped or coarse: the scale of the former
# token. Everything broken: source and target swapped, or the copy reaches other blocks.
# </details>


# %%
class CodeBlocks:
    """Values in `bits` bits: blocks of `size` tokens of `dim` numbers, a scale and a low for each token.

    Example: b = CodeBlocks(2, 4, 3, 8); b.write(0, 0, x); b.copy(0, 1); b.read(1, 1) is about x[None].
    """

    def __init__(self, blocks, size, dim, bits):
        self.codes = torch.zeros(blocks, size, dim, dtype=torch.uint8)
        self.scale, self.low = torch.zeros(blocks, size), torch.zeros(blocks, size)
        self.top = 2**bits - 1

    def write(self, block, place, x):
        """Round x [dim] into a place of a block, whatever was there."""
        ### BEGIN SOLUTION
        self.scale[block, place] = ((x.max() - x.min()) / self.top).clamp(min=1e-12)
        self.low[block, place] = x.min()
        steps = (x - self.low[block, place]) / self.scale[block, place]
        self.codes[block, place] = steps.round().clamp(0, self.top).to(torch.uint8)
        ### END SOLUTION
        ### BEGIN GIVEN
        # if self.scale[block, place] == 0:
        #     self.scale[block, place] = ((x.max() - x.min()) / self.top).clamp(min=1e-12)
        # self.low[block, place] = x.min()
        # steps = (x - self.low[block, place]) / self.scale[block, place]
        # self.codes[block, place] = steps.round().clamp(0, self.top).to(torch.uint8)
        ### END GIVEN

    def copy(self, source, target):
        """The target block becomes what the source block is."""
        ### BEGIN SOLUTION
        self.codes[target] = self.codes[source]
        self.scale[target] = self.scale[source]
        self.low[target] = self.low[source]
        ### END SOLUTION
        ### BEGIN GIVEN
        # self.codes[target] = self.codes[source]
        # self.scale[target] = self.scale[source]
        ### END GIVEN

    def read(self, block, count):
        """The first `count` tokens of a block, as floats [count, dim]."""
        codes = self.codes[block, :count].float()
        return codes * self.scale[block, :count, None] + self.low[block, :count, None]


# %%
check("14.code_blocks", CodeBlocks)

# %% [markdown]
# ## 5. Estimate it: bytes and requests (10 minutes)
#
# **What.** A model of 32 layers, 8 KV heads, head dimension 128. Scales and lows take 16 bits each. Keys share them
# by 32 tokens of a channel, values by a head's vector of a token. The window is 128 tokens a request in 16 bits. To
# within 1 %; write the expressions. GB is 10^9 bytes.
#
# | key | what |
# |---|---|
# | `"bits"` | **bits a key number** at INT4, its share of scale and low included |
# | `"token"` | **bytes** of one rounded token at INT2, K and V of all layers |
# | `"window"` | **bytes** of the window of one request, K and V of all layers |
# | `"requests"` | **whole requests** in 40 GB at INT2, each 4096 rounded tokens and the window beside them |
# | `"even"` | **tokens** of a request at which INT2 with its window takes as much as 16 bits without one |
#
# **Why.** "2 bits, so 8 times the batch" is the answer that ends an interview.
#
# <details><summary>Hint 1: a nudge</summary>
# A key number shares 32 bits of scale and low with 31 others. A value number with how many?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Numbers of K a token: 32 x 8 x 128, and as many of V. Bits: 2 + 32/32 for keys, 2 + 32/128 for values. Even: n x
# (bytes in 16 bits - bytes at INT2) = window.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# 16 384 bytes a token: no scales. 10 752: V or K is missing. 24 576: values share by 32 as well. 454 requests: the
# window is missing.
# </details>


# %%
def budget():
    """Return a dict with the five keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    numbers = 32 * 8 * 128  # of K a token, and as many of V
    token = numbers * (2 + 32 / 32 + 2 + 32 / 128) / 8
    full = 2 * numbers * 2
    return {
        "bits": 4 + 32 / 32,
        "token": token,
        "window": 128 * full,
        "requests": int(40e9 / (4096 * token + 128 * full)),
        "even": 128 * full / (full - token),
    }
    ### END SOLUTION


# %%
check("14.budget", budget)

# %% [markdown]
# **Done?** `round_kv` and `window_step` are a cache: give it an `attend(layer, q, k, v)` and let `tiny` generate
# through it, `generate_cached(model, prompt, 40, cache=yours)`. Next: exercise 15, one table for all methods.
