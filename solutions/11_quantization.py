# %% [markdown]
# # Exercise 11: quantisation
#
# Six tasks, about 75 minutes: quantise by hand, pack and unpack, a product that meets its scales once a group, a sign
# bug in packed INT4, and bits for a memory budget. Chapter: `notebooks/11_quantization.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. A check may be run as often as you
# like.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. Quantise by hand (15 minutes)
#
# **What.** Each row of a matrix becomes whole numbers of `bits` bits under a scale (and zero point) of its own, such
# that `x ~ scale * (q - zero)`.
# **Why.** All of chapters 11 to 14 is a choice of these three.
#
# | | q lies in | scale | zero |
# |---|---|---|---|
# | symmetric | -(2^(bits-1) - 1) .. 2^(bits-1) - 1 | max abs x / (2^(bits-1) - 1) | 0 |
# | asymmetric | 0 .. 2^bits - 1 | (high - low) / (2^bits - 1) | -low / scale, rounded |
#
# low and high are the row's smallest and largest number, *stretched to hold 0*: a row of numbers from 5 to 6 has the
# range 0 .. 6. No row is all zeros.
#
# <details><summary>Hint 1: a nudge</summary>
# What shape must the scale have to divide each row by its own? And does `min` over a matrix give what you want?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Symmetric: `amax(-1)` of the absolute values. Asymmetric: `amin(-1).clamp(max=0)` and `amax(-1).clamp(min=0)`.
# Divide with `scale[:, None]`, add the zero point, round, clamp to the range.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# One scale for all rows: the maximum of the matrix. 16 steps in place of 15: the range has 2^bits numbers and one
# step fewer. A row of positive numbers is off: the range does not hold 0. Off by one half of the time: `int()` and
# `.to(int)` cut off, they do not round.
# </details>


# %%
def quantise(x, bits, symmetric):
    """x [rows, n] float -> (q [rows, n] integers, scale [rows], zero [rows]); zero holds whole numbers.

    Example: quantise(torch.tensor([[-7.0, 3.2, 1.0]]), 4, True) is ([[-7, 3, 1]], [1.0], [0]).
    """
    ### BEGIN SOLUTION
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale = x.abs().amax(-1) / top
        q = (x / scale[:, None]).round().clamp(-top, top)
        return q.to(torch.int32), scale, torch.zeros_like(scale)
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    zero = (-low / scale).round()
    q = (x / scale[:, None] + zero[:, None]).round().clamp(0, 2**bits - 1)
    return q.to(torch.int32), scale, zero
    ### END SOLUTION


# %%
check("11.quantise", quantise)

# %% [markdown]
# ## 2. Pack (10 minutes)
#
# **What.** Codes of 2, 4 or 8 bits go side by side into bytes: 8 / bits neighbours of the last axis share a byte, the
# first in the lowest bits.
# **Why.** INT4 in a byte each is INT8 with worse quality.
#
# <details><summary>Hint 1: a nudge</summary>
# At 4 bits: which two columns share a byte, and which of them is multiplied by 16?
# </details>
# <details><summary>Hint 2: the plan</summary>
# View the last axis as [n / per, per] with per = 8 / bits; shift column i left by bits * i; sum (or `|`) over the
# last axis.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Nibbles swapped: the first code goes into the *low* bits. The first half of a row packed with its second half:
# that is GGUF's order, neighbours are asked for. Values over 255 or negative: the sum was made in int8. Right at 4
# bits only: the 16 is written into the code.
# </details>


# %%
def pack(codes, bits):
    """codes [..., n] uint8, each in 0 .. 2^bits - 1, n a multiple of 8 / bits -> uint8 [..., n * bits / 8].

    Example: pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8), 4) is [0x21, 0x0F] = [33, 15].
    """
    ### BEGIN SOLUTION
    per = 8 // bits
    groups = codes.unflatten(-1, (-1, per)).to(torch.int32)  # [..., bytes, per]
    shifts = bits * torch.arange(per)
    return (groups << shifts).sum(-1).to(torch.uint8)
    ### END SOLUTION


# %%
check("11.pack", pack)

# %% [markdown]
# ## 3. Unpack three bits (10 minutes)
#
# **What.** At 3 bits nothing fits a byte: eight codes fill three bytes, one little-endian stream of 24 bits. Code i
# is bits 3 i to 3 i + 2 of `byte0 + 256 byte1 + 65536 byte2`; two of the eight lie across a byte's edge. **Why.**
# Widths that do not divide 8 are where unpacking code goes wrong.
#
# <details><summary>Hint 1: a nudge</summary>
# Make one 24-bit number of three bytes first. In which type does it fit?
# </details>
# <details><summary>Hint 2: the plan</summary>
# View as [..., words, 3]; to int32; shift by 0, 8, 16 and sum. Then shift right by 0, 3, ..., 21, `& 7`, and
# flatten the last two axes.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# The first two codes right, the third wrong: it has two bits in byte 0 and one in byte 1. Everything mirrored:
# bytes or codes taken from the high end. Everything after the first word zero: the shift was made in uint8, and ran
# out of it.
# </details>


# %%
def unpack3(packed):
    """packed uint8 [..., 3 * words] -> codes uint8 [..., 8 * words].

    Example: unpack3(torch.tensor([0b10_001_000, 0, 0], dtype=torch.uint8)) is [0, 1, 2, 0, 0, 0, 0, 0].
    """
    ### BEGIN SOLUTION
    words = packed.unflatten(-1, (-1, 3)).to(torch.int32)  # [..., words, 3]
    words = (words << torch.tensor([0, 8, 16])).sum(-1, keepdim=True)  # [..., words, 1]
    return (words >> (3 * torch.arange(8)) & 7).flatten(-2).to(torch.uint8)
    ### END SOLUTION


# %%
check("11.unpack3", unpack3)

# %% [markdown]
# ## 4. Scales in the product (15 minutes)
#
# **What.** `y = x @ W.T` where `W[n, k] = scale[n, g] * (codes[n, k] - zero[n, g])` and g = k // group is the group
# of column k. **Why.** This is the inner loop of every W4A16 kernel. There, the scale is met once a group: y[m, n]
# = sum over g of scale[n, g] * (sum over k in g of x[m, k] codes[n, k] - zero[n, g] * sum over k in g of x[m, k]).
# Either form passes.
#
# <details><summary>Hint 1: a nudge</summary>
# How many neighbours of a row share a scale? Only shapes tell you.
# </details>
# <details><summary>Hint 2: the plan</summary>
# View codes as [out, groups, group] in float, subtract zero[..., None], multiply by scale[..., None], flatten, and
# multiply. Or einsum over x as [rows, groups, group].
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right with one group only: columns belong to group k // group, not k % groups. Off by a constant a column of y: the
# zero point goes off *before* the scale. Huge values: uint8 arithmetic below 0 wraps round; go to float first.
# </details>


# %%
def group_linear(x, codes, scale, zero):
    """x [rows, in], codes uint8 [out, in], scale and zero [out, groups] -> [rows, out], all float but the codes.

    Example: x = [[1., 2.]], codes = [[3, 5]], scale = [[0.5, 2.]], zero = [[1., 4.]] gives [[1 * 1.0 + 2 * 2.0]].
    """
    ### BEGIN SOLUTION
    out, groups = scale.shape
    whole = codes.view(out, groups, -1).float() - zero[..., None]  # [out, groups, group]
    x = x.view(len(x), groups, -1)  # [rows, groups, group]
    sums = torch.einsum("mgk,ngk->mng", x, whole)  # [rows, out, groups]
    return (sums * scale).sum(-1)
    ### END SOLUTION


# %%
check("11.group_linear", group_linear)

# %% [markdown]
# ## 5. Debug it: weights that are never negative (15 minutes)
#
# **What.** A loader reads a checkpoint whose INT4 weights are *signed*: two's complement in four bits, -8 .. 7, two
# to a byte, the even column in the low half. Its unit test packs 0, 1, ..., 7 and is green. In production the model
# speaks, but badly: its perplexity has doubled. Find the line and mend it. **Why.** Formats differ in one bit of
# meaning (offset or two's complement, low half or high half first), and a wrong reading still gives plausible
# weights.
#
# <details><summary>Hint 1: a nudge</summary>
# Print the smallest weight of the even and of the odd columns.
# </details>
# <details><summary>Hint 2: the plan</summary>
# In four bits, 8 to 15 stand for -8 to -1. For the high half, an arithmetic shift of an int8 copies the sign bit
# down by itself. What copies it down for the low half? Shift it up first; or subtract 16 where the code is over 7;
# or `(code ^ 8) - 8`.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# All weights shifted by 8: subtracting 8 is for codes with an offset, not for two's complement. The odd columns
# broke: they were right. -8 became 8: `>` 7, not `>` 8. Everything zero or huge: the shift ran in uint8.
# </details>


# %%
def read_signed(packed, scale):
    """packed uint8 [out, in / 2], scale [out, groups] -> float32 [out, in].

    Example: read_signed(torch.tensor([[0xF7]], dtype=torch.uint8), torch.tensor([[0.5]])) is [[3.5, -0.5]].
    """
    ### BEGIN SOLUTION
    low = (packed << 4).view(torch.int8) >> 4  # the sign bit goes to the top, then the shift copies it down
    high = packed.view(torch.int8) >> 4
    values = torch.stack((low, high), -1).flatten(-2)  # [out, in]
    out, groups = scale.shape
    return (values.view(out, groups, -1) * scale[..., None]).view(out, -1)
    ### END SOLUTION
    ### BEGIN GIVEN
    # low = packed & 15
    # high = packed.view(torch.int8) >> 4
    # values = torch.stack((low.to(torch.int8), high), -1).flatten(-2)  # [out, in]
    # out, groups = scale.shape
    # return (values.view(out, groups, -1) * scale[..., None]).view(out, -1)
    ### END GIVEN


# %%
check("11.read_signed", read_signed)

# %% [markdown]
# ## 6. Estimate it: bits for a memory budget (10 minutes)
#
# **What.** Four numbers; write the expressions. Graded to 1 %, the first to 0.4 %, the last exactly. GB is 10^9
# bytes.
#
# | key | what |
# |---|---|
# | `"bits"` | **bits a weight** of INT4 in groups of 128, a 16-bit scale and a 4-bit zero point each |
# | `"gb"` | **GB** of LLaMA-7B: 6.476e9 layer weights at INT4, group 32, 16-bit scale, no zero; 0.262e9 in 16 bits |
# | `"tokens_per_s"` | the same model, batch 1, 1000 GB/s, no KV; of the 16-bit part half is read (the head) |
# | `"widest"` | **whole bits** that fit 68.7e9 weights on 48 GB, 10 GB for KV; groups of 64, 16-bit scale |
#
# **Why.** "Which quantisation do you need for this card?" is asked in this form, and the overhead decides it.
#
# <details><summary>Hint 1: a nudge</summary>
# A scale of 16 bits for 32 weights: how much of it does one weight pay?
# </details>
# <details><summary>Hint 2: the plan</summary>
# bits + (scale bits + zero bits) / group. Bytes = weights * bits / 8. Tokens/s = bandwidth / bytes read a token.
# For the last: free bytes * 8 / weights, less the overhead, rounded down.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# 4.125: the zero point is missing. 3.76 GB: no overhead, 4 bits flat. 240 tokens/s: the embedding is looked up, not
# read. 5 for the last: KV or the scales were left out; a fraction: only whole widths exist here.
# </details>


# %%
def budget():
    """Return a dict with the four keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    layers = 6.476e9 * (4 + 16 / 32) / 8  # bytes
    return {
        "bits": 4 + (16 + 4) / 128,
        "gb": (layers + 0.262e9 * 2) / 1e9,
        "tokens_per_s": 1000e9 / (layers + 0.131e9 * 2),
        "widest": int((48e9 - 10e9) * 8 / 68.7e9 - 16 / 64),
    }
    ### END SOLUTION


# %%
check("11.budget", budget)

# %% [markdown]
# **Done?** Put your pieces together: `quantise` a layer of `load_model("tiny")`, `pack` it, and let `group_linear`
# take the place of an `nn.Linear` through `replace_linears`. Next: exercise 12, integers chosen with more care.
