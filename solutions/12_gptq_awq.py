# %% [markdown]
# # Exercise 12: GPTQ and AWQ
#
# Six tasks, about 85 minutes: the moments of a linear's inputs, GPTQ's update for one column, the whole sweep, a
# scale for AWQ, a conversion with act-order that went wrong, and what calibration costs.
# Chapter: `notebooks/12_gptq_awq.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. A weight is W `[out, in]`, inputs x
# are rows `[tokens, in]`, the output is x Wᵀ.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. The moments of the inputs (10 minutes)
#
# **What.** Two means over all calibration tokens: H = E[x xᵀ], and E|x| of each channel. The inputs come in batches
# of unequal size, `[batch, time, in]` each; what comes later must not weigh more. **Why.** H is all that GPTQ knows
# of the text, E|x| all that AWQ's scale knows. Kept as means, they cost the same for any amount of text.
#
# <details><summary>Hint 1: a nudge</summary>
# How many tokens does a batch of shape [3, 5, in] hold? Which of two batches should weigh more?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Flatten each batch to [tokens, in]. Add up x.T @ x and |x|.sum(0), add up the tokens, divide at the end.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right for one batch only: a mean of the batches' means. Too large by a factor: not divided, or divided by the number
# of batches, or of samples. H with a zero mean taken off: that is a covariance; the mean belongs to the error too.
# </details>


# %%
def moments(batches):
    """batches: tensors [batch, time, in] -> (H [in, in], mean of |x| [in]) over all tokens.

    Example: one batch [[[1., -2.]]] -> ([[1., -2.], [-2., 4.]], [1., 2.]).
    """
    ### BEGIN SOLUTION
    tokens = torch.cat([x.flatten(0, 1) for x in batches])  # [tokens, in]
    return tokens.T @ tokens / len(tokens), tokens.abs().mean(0)
    ### END SOLUTION


# %%
check("12.moments", moments)

# %% [markdown]
# ## 2. GPTQ's update for one column (15 minutes)
#
# **What.** Column j of W has been rounded: the output error of a row is (Δ H Δᵀ), where Δ is the row's change, and
# Δ_j = `rounded - W[:, j]` may not be undone. Columns before j are final too: Δ is 0 there. Which change of columns
# j + 1, j + 2, ... makes the error least? Return the new W: column j rounded, later columns changed, earlier ones as
# they are. H is positive definite; no damping here. **Why.** This is the whole of GPTQ; the rest is bookkeeping.
#
# <details><summary>Hint 1: a nudge</summary>
# Two columns: minimise H_11 a² + 2 H_12 a b + H_22 b² over b, for a given a. Then let b be a vector.
# </details>
# <details><summary>Hint 2: the plan</summary>
# Let R be the columns after j. The slope in Δ_R is 2 (Δ_j H_jR + Δ_R H_RR), so Δ_R = -Δ_j H_jR H_RR⁻¹. For all rows
# at once: an outer product of Δ_j [out] and a vector. `torch.linalg.solve` is better than an inverse.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# The error gets larger: the sign. H_jR / H_RR taken element by element is right for two columns only. Inverting all
# of H, or H with the columns before j in it, lets final columns move.
# </details>


# %%
def compensate(w, h, j, rounded):
    """w [out, in], h [in, in], rounded [out]: column j after rounding -> the new w [out, in].

    Example: w [[1., 1.]], h [[1., .5], [.5, 1.]], j 0, rounded [0.] -> [[0., 1.5]].
    """
    ### BEGIN SOLUTION
    new = w.clone()
    new[:, j] = rounded
    change = torch.linalg.solve(h[j + 1 :, j + 1 :], h[j + 1 :, j])  # [columns after j]
    new[:, j + 1 :] -= torch.outer(rounded - w[:, j], change)
    return new
    ### END SOLUTION


# %%
check("12.compensate", compensate)

# %% [markdown]
# ## 3. The whole sweep (20 minutes)
#
# **What.** GPTQ of a matrix on a symmetric grid: codes are whole numbers from -(2^(bits-1) - 1) to 2^(bits-1) - 1,
# `scale` `[out]` is given, one a row. Add `damping` times the mean of H's diagonal to H's diagonal, then go through
# the columns in order: round, clamp, compensate. Return the codes, int8. You may use your `compensate`, or the
# Cholesky form of the chapter: the codes are the same. **Why.** What is stored is codes; a code out of range is a
# wrong weight after packing.
#
# <details><summary>Hint 1: a nudge</summary>
# Which W does column 5 get rounded from: the first one, or the one that columns 0 to 4 have changed?
# </details>
# <details><summary>Hint 2: the plan</summary>
# h = h + damping * h.diagonal().mean() * eye. For each j: code = (w[:, j] / scale).round().clamp(-top, top), keep it,
# w = compensate(w, h, j, code * scale).
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Equal to rounding at once: W was not changed, or column j was read from the old one. Right at 4 bits, wrong at 2:
# no clamp, or the range -2^(bits-1). Wrong for few tokens only: damping is missing, or added to all of H.
# </details>


# %%
def sweep(w, h, scale, bits, damping=0.01):
    """w [out, in], h [in, in], scale [out] -> codes int8 [out, in].

    Example: w [[0.4, 1.4]], h [[1., .9], [.9, 1.]], scale [1.], bits 4, damping 0. -> [[0, 2]].
    """
    ### BEGIN SOLUTION
    top, codes = 2 ** (bits - 1) - 1, torch.zeros(w.shape, dtype=torch.int8)
    damped = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    for j in range(w.shape[1]):
        code = (w[:, j] / scale).round().clamp(-top, top)
        codes[:, j] = code.to(torch.int8)
        w = compensate(w, damped, j, code * scale)
    return codes
    ### END SOLUTION


# %%
check("12.sweep", sweep)

# %% [markdown]
# ## 4. A scale for AWQ (15 minutes)
#
# **What.** `quantise(w)` rounds a weight `[out, in]` and returns what is left of it, as floats. For each alpha of
# `alphas`: s = E|x|^alpha a channel, scale W's columns by s, quantise, and undo the scale. Return the alpha with the
# least output error E|(W - Q) x|² on `x`, and Q `[out, in]`, the weight as it acts on the unscaled x. **Why.** One
# number a layer is all that AWQ fits; it can hardly overfit.
#
# <details><summary>Hint 1: a nudge</summary>
# With alpha = 0, what is s? Your result must then be plain rounding.
# </details>
# <details><summary>Hint 2: the plan</summary>
# s = x.abs().mean(0) ** alpha; q = quantise(w * s) / s; error = ((w - q) @ x.T) squared, summed. Keep the best.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# s on the rows: it belongs to input channels, W's columns. Q much larger than W: the scale was not undone. Always
# alpha 0: the error was measured on the weights, not on outputs. Nearly right: E|x|, not the root of E x².
# </details>


# %%
def choose_alpha(w, x, quantise, alphas):
    """w [out, in], x [tokens, in], quantise: [out, in] -> [out, in], alphas: list -> (alpha, q [out, in])."""
    ### BEGIN SOLUTION
    best = None
    for alpha in alphas:
        s = x.abs().mean(0) ** alpha
        q = quantise(w * s) / s
        error = ((w - q) @ x.T).square().sum().item()
        if best is None or error < best[0]:
            best = (error, alpha, q)
    return best[1], best[2]
    ### END SOLUTION


# %%
check("12.choose_alpha", choose_alpha)

# %% [markdown]
# ## 5. Debug it: act-order made it worse (15 minutes)
#
# **What.** A conversion with act-order: columns are sorted by falling H_jj, swept (`sweep(w, h, scale, bits)`, as in
# task 3; your own is not needed, one is passed in), and sorted back. On one layer it was tried on, it gave the
# expected gain. On most others the output error is far above plain rounding. No shape is wrong, every code is in
# range, and with the channels already sorted all is well. Find the line and mend it. **Why.** A permutation (排列)
# applied twice looks just like one that was undone, when it happens to be its own inverse.
#
# <details><summary>Hint 1: a nudge</summary>
# Take three columns with H diagonal 1, 3, 2. Write `order` down. Where is column 0 after sorting? Where does the
# last line put it?
# </details>
# <details><summary>Hint 2: the plan</summary>
# order says which column comes first, second, ... To go back, ask for each column at which place it stands: the
# inverse permutation, order.argsort(). Or write into a result: codes[:, order] = sorted codes.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# No act-order at all is not the mend: codes must be those of the sorted sweep. H must be permuted in rows and in
# columns. Rising instead of falling order rounds the quiet channels first.
# </details>


# %%
def with_act_order(w, h, scale, bits, sweep):
    """Sort columns by falling H_jj, sweep, undo the sorting -> codes [out, in] in the order of w's columns."""
    ### BEGIN SOLUTION
    order = h.diagonal().argsort(descending=True)
    codes = sweep(w[:, order], h[order][:, order], scale, bits)
    return codes[:, order.argsort()]
    ### END SOLUTION
    ### BEGIN GIVEN
    # order = h.diagonal().argsort(descending=True)
    # codes = sweep(w[:, order], h[order][:, order], scale, bits)
    # return codes[:, order]
    ### END GIVEN


# %%
check("12.with_act_order", with_act_order)

# %% [markdown]
# ## 6. Estimate it: what does the conversion cost? (10 minutes)
#
# **What.** A LLaMA-7B: 32 blocks, hidden 4,096, FFN 11,008; linears q, k, v, o of 4,096 x 4,096, gate and up of
# 11,008 outputs, down of 11,008 inputs. q, k, v share their inputs, and so do gate and up. Write down expressions:
# the first three to 3 %, the last to 0.2 %.
#
# | key | what |
# |---|---|
# | `"hessians"` | bytes of the H's of one block in float32, one H for linears that share inputs |
# | `"activations"` | bytes of these four inputs themselves, for 128 samples of 2,048 tokens in 16 bits |
# | `"factor"` | FLOPs of a Cholesky factorisation, n³ / 3, of each such H, over all 32 blocks |
# | `"packed"` | bytes of all linears: 4-bit codes; a 16-bit scale and a 4-bit zero point a group of 128 |
#
# **Why.** These four decide whether a conversion fits the card on the desk, and what is gained by it.
#
# <details><summary>Hint 1: a nudge</summary>
# Four sets of inputs a block: what q, k, v read; what o reads; what gate and up read; what down reads. How wide?
# </details>
# <details><summary>Hint 2: the plan</summary>
# widths = [4096, 4096, 4096, 11008]. 4 x the sum of squares; 128 x 2048 x 2 x the sum; 32 x the sum of cubes / 3.
# Weights: 32 x (4 x 4096² + 3 x 4096 x 11008), times (4 + 20 / 128) / 8 bytes.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Hessians too large: one a linear, seven in place of four. Down's H is 11,008 wide: its inputs, not its outputs.
# Packed 3.7 % too small: scales and zero points are missing.
# </details>


# %%
def costs():
    """Return a dict with the four keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    widths = [4096, 4096, 4096, 11008]
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    return {
        "hessians": 4 * sum(n**2 for n in widths),
        "activations": 128 * 2048 * 2 * sum(widths),
        "factor": 32 * sum(n**3 / 3 for n in widths),
        "packed": weights * (4 + (16 + 4) / 128) / 8,
    }
    ### END SOLUTION


# %%
check("12.costs", costs)

# %% [markdown]
# **Done?** Run your `sweep` on a real linear of `tiny`, with `collect` of `minillm.quant.calibrate` for H, and beat
# `rtn` on it. Then calibrate on something else. Next: exercise 13, outliers in the activations.
