# %% [markdown]
# # Exercise 13: W8A8, SmoothQuant and FP8
#
# Six tasks, about 80 minutes: a product of integers, SmoothQuant's scale, its fold, a cast to E4M3, a smoothed layer
# that got worse, and estimates. Chapter: `notebooks/13_w8a8_fp8.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. Inputs x are rows `[tokens, in]`, a
# weight is W `[out, in]`, the output is x Wᵀ.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. A product of integers (15 minutes)
#
# **What.** Quantise x with a scale a token and W with a scale an output: symmetric, codes -127 to 127, the largest
# |value| of each row becomes 127. Multiply the codes, add up in integers, put both scales back. Return the codes of
# x, the codes of W, and y. A row of zeros stays zeros. **Why.** This is what a W8A8 layer computes at every step;
# which scale goes to which axis is the whole of the design.
#
# <details><summary>Hint 1: a nudge</summary>
# What is the largest value of a product of two codes? Of a sum of 4,096 of them? Which integer type holds that?
# </details>
# <details><summary>Hint 2: the plan</summary>
# scale = |row|max / 127, kept as [rows, 1], at least a tiny number. Round row / scale. Multiply as int32 (or int64,
# or float64, which hold the sums exactly). y[m, n] = sum * scale_x[m] * scale_w[n]: one of the two is transposed.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Small, wild numbers: the sum was made in int8 and wrapped. Right for square x only, or an error about shapes:
# scale_w is a column, and must be a row. NaN: a row of zeros. Codes off by one: truncated, not rounded. All tokens
# coarse but one: one scale for all.
# </details>


# %%
def int8_linear(x, w):
    """x [tokens, in], w [out, in] -> (codes of x int8 [tokens, in], codes of w int8 [out, in], y [tokens, out]).

    Example: x [[1., -4.]], w [[2., 1.5]] -> ([[32, -127]], [[127, 95]], [[-3.9685]]).
    """
    ### BEGIN SOLUTION
    scale_x = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127  # [tokens, 1]
    scale_w = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127  # [out, 1]
    a = (x / scale_x).round().to(torch.int8)
    b = (w / scale_w).round().to(torch.int8)
    sums = a.int() @ b.int().T  # int32 [tokens, out]
    return a, b, sums * scale_x * scale_w.T
    ### END SOLUTION


# %%
check("13.int8_linear", int8_linear)

# %% [markdown]
# ## 2. SmoothQuant's scale (10 minutes)
#
# **What.** s for each input channel, from calibration inputs in batches `[tokens, in]` and the weights that read
# these inputs, `[out, in]` each (q, k and v, say: they share the norm before them, so they must share s):
#
# > `s_j = max|x_j|^alpha / max|W_j|^(1 - alpha)`
#
# the first maximum over all tokens, the second over all rows of all the weights. A channel that is silent (max 0) or
# not read (column 0) gets s = 1. **Why.** x / s and W · s then have their ranges shared out as alpha says.
#
# <details><summary>Hint 1: a nudge</summary>
# Two reductions to [in]. Over which axis each?
# </details>
# <details><summary>Hint 2: the plan</summary>
# torch.cat the batches and the weights along rows; abs, amax over rows; the formula; torch.where for the ones.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Shape [out]: the maximum of each row of W in place of each column. Right for alpha 0.5 only: alpha and 1 - alpha
# swapped. Upside down: s is divided out of x, so a loud channel needs a large s. inf or nan: the silent channels.
# </details>


# %%
def smooth_scale(batches, weights, alpha):
    """batches: list of [tokens, in]; weights: list of [out, in] -> s [in].

    Example: one batch [[8., 0.], [-2., 0.]], one weight [[2., 5.]], alpha 0.5 -> [2., 1.].
    """
    ### BEGIN SOLUTION
    loud = torch.cat(batches).abs().amax(0)  # [in]
    column = torch.cat(weights).abs().amax(0)  # [in]
    s = loud**alpha / column ** (1 - alpha)
    return torch.where((loud > 0) & (column > 0), s, torch.ones_like(s))
    ### END SOLUTION


# %%
check("13.smooth_scale", smooth_scale)

# %% [markdown]
# ## 3. Fold it in (10 minutes)
#
# **What.** A norm gives `x = normed * gain + bias` (bias may be None), and the weights read x. Change gain, bias and
# weights so that the new x is the old x / s and every output is what it was. Return all three; leave the arguments as
# they are. **Why.** At run time SmoothQuant then costs nothing. What is forgotten here is found weeks later, in a
# family that has that one part.
#
# <details><summary>Hint 1: a nudge</summary>
# Divide x by s: what is x made of?
# </details>
# <details><summary>Hint 2: the plan</summary>
# gain / s, bias / s where there is one, and each weight times s: s multiplies columns, the last axis.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right for RMSNorm only: the bias. Outputs off by s squared: both sides multiplied. Only q is right: all weights read
# x. A shape error, or right for square weights only: rows were multiplied.
# </details>


# %%
def fold(gain, bias, weights, s):
    """gain [in], bias [in] or None, weights: list of [out, in], s [in] -> (gain, bias, weights), new ones.

    Example: gain [2., 6.], bias None, weights [[[1., 1.]]], s [1., 3.] -> ([2., 2.], None, [[[1., 3.]]]).
    """
    ### BEGIN SOLUTION
    return gain / s, None if bias is None else bias / s, [w * s for w in weights]
    ### END SOLUTION


# %%
check("13.fold", fold)

# %% [markdown]
# ## 4. A cast to E4M3 (20 minutes)
#
# **What.** What is left of float32 numbers after a cast to FP8 E4M3, as float32. Between 2ᵉ and 2ᵉ⁺¹ there are 8
# equal steps of 2ᵉ⁻³. The smallest e is -6; below 2⁻⁶ the steps stay as they are there, down to 0. The largest
# number is 448; what is beyond, infinity too, saturates. To the nearest, ties to the even code; NaN stays NaN. Use
# arithmetic, not torch's FP8 types. **Why.** "Three bits of mantissa" becomes a picture, and you see where the range
# ends.
#
# <details><summary>Hint 1: a nudge</summary>
# If you know the step at x, the rest is `(x / step).round() * step`. What decides the step?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Clamp to ±448. `torch.frexp(x)` gives x = m 2ᵏ with 0.5 <= |m| < 1, so e = k - 1 (or floor of log2). Clamp e from
# below at -6. step = 2^(e - 3). torch.round takes ties to the even integer, which is the even code.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# All too fine or too coarse by 2: e against k, or 3 bits against 2 or 4. Small numbers become 0: no subnormal steps.
# Small numbers too exact: e not clamped. 480 or inf: not saturated. Some ties wrong: floor(x + 0.5) is not to even.
# NaN for 0: log2(0).
# </details>


# %%
def e4m3(x):
    """x float32 [...] -> float32 [...], each a number of E4M3.

    Example: [1.06, 1.0625, 17., 0.001, 500.] -> [1., 1., 16., 0.001953125, 448.].
    """
    ### BEGIN SOLUTION
    x = x.clamp(-448, 448)
    exponent = (torch.frexp(x).exponent - 1).clamp(min=-6)
    step = torch.exp2((exponent - 3).float())
    return (x / step).round() * step
    ### END SOLUTION


# %%
check("13.e4m3", e4m3)

# %% [markdown]
# ## 5. Debug it: smoothing made it worse (15 minutes)
#
# **What.** A layer, smoothed and quantised in one go: x / s and W · s, a scale a token, a scale an output, codes,
# the product, the scales. Without s (all ones) it is fine. With SmoothQuant's s, outputs have errors as large as the
# outputs themselves. In float everything agrees. Find what is wrong and mend it. **Why.** Each line is right by
# itself. It is their order.
#
# <details><summary>Hint 1: a nudge</summary>
# Print the largest |x / s / scale_x| before it is rounded. What should it be, for every token?
# </details>
# <details><summary>Hint 2: the plan</summary>
# A scale must be that of the numbers that are rounded. Which numbers are rounded?
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# No wild outputs any more, but no exact match: clamping hides the fault, the range is still the old one. One side
# mended, the other not: both are smoothed. Off by s: a scale put back that was never taken out.
# </details>


# %%
def smoothed_linear(x, w, s):
    """x [tokens, in], w [out, in], s [in] -> y [tokens, out], near x wᵀ. Codes -127 to 127.

    Example: x [[100., 1.]], w [[1., 3.]], s [10., 1.] -> [[103.0628]].
    """
    ### BEGIN SOLUTION
    x, w = x / s, w * s
    scale_x = x.abs().amax(1, keepdim=True) / 127
    scale_w = w.abs().amax(1, keepdim=True) / 127
    a = (x / scale_x).round().to(torch.int8)
    b = (w / scale_w).round().to(torch.int8)
    return (a.int() @ b.int().T) * scale_x * scale_w.T
    ### END SOLUTION
    ### BEGIN GIVEN
    # scale_x = x.abs().amax(1, keepdim=True) / 127
    # scale_w = w.abs().amax(1, keepdim=True) / 127
    # x, w = x / s, w * s
    # a = (x / scale_x).round().to(torch.int8)
    # b = (w / scale_w).round().to(torch.int8)
    # return (a.int() @ b.int().T) * scale_x * scale_w.T
    ### END GIVEN


# %%
check("13.smoothed_linear", smoothed_linear)

# %% [markdown]
# ## 6. Estimate it: codes, bytes, rows (10 minutes)
#
# **What.** Write down expressions; graded to 0.5 %. The card: an H100, 1,979 x 10¹² INT8 operations/s, 989 x 10¹²
# bfloat16 ones, 3.35 x 10¹² bytes/s (its data sheet, dense).
#
# | key | what |
# |---|---|
# | `"codes"` | the code of a value 2.0 in a token whose largest is 90, INT8 symmetric; not rounded |
# | `"worst"` | the largest relative error of a cast to E4M3, in its normal range |
# | `"bytes"` | a W8A8 linear, 4,096 inputs, 11,008 outputs: INT8 codes and a float32 scale an output |
# | `"rows"` | rows from which such an INT8 product waits for arithmetic, not for reading W; count only W's bytes |
# | `"speedup"` | of a prefill that spends 80 % of its time in products, when these run twice as fast |
#
# **Why.** The first two say what quality costs, the last three when the speed is there.
#
# <details><summary>Hint 1: a nudge</summary>
# Rows: each byte of W is read once and used in one multiplication and one addition a row.
# </details>
# <details><summary>Hint 2: the plan</summary>
# codes = 2 / (90 / 127). worst: half a step of 2ᵉ/8, at the tie just above 2ᵉ: (1/16) / (1 + 1/16). rows: 2 rows
# operations a byte = operations/s over bytes/s. speedup: 1 / (0.2 + 0.8 / 2).
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# rows twice too large: a multiplication and an addition are two operations. 2 x speed-up: a fifth of the time does
# not change. worst 1/8: that is a whole step.
# </details>


# %%
def estimates():
    """Return a dict with the five keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    return {
        "codes": 2 / (90 / 127),
        "worst": (1 / 16) / (1 + 1 / 16),
        "bytes": 4096 * 11008 + 4 * 11008,
        "rows": 1979e12 / 3.35e12 / 2,
        "speedup": 1 / (0.2 + 0.8 / 2),
    }
    ### END SOLUTION


# %%
check("13.estimates", estimates)

# %% [markdown]
# **Done?** Work out the rows for bfloat16 too: half the operations, twice the bytes. Then put your `int8_linear` into
# `tiny` with `replace_linears` and look at the text it writes. Next: exercise 14, the keys and values.
