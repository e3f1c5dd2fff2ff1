# %% [markdown]
# # Exercise 16: speculative decoding
#
# Five tasks, about 65 minutes: acceptance and residual of two distributions, the verifier, a verifier that looks
# right and is not, what the draft's cache lacks, and the best draft length. Chapter:
# `notebooks/16_speculative_decoding.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. p is the target's distribution, q
# the draft's; `vocab` is small.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. What is kept, and what replaces the rest (10 minutes)
#
# **What.** A draft token is drawn from q and kept with probability min(1, p(x) / q(x)). Return the probability that
# it is kept, over all x, and the distribution to draw from if it is not. Where p equals q nothing is ever refused;
# return p then. **Why.** The first number is the acceptance a, on which every speed-up depends; the second is what
# makes speculation exact.
#
# <details><summary>Hint 1: a nudge</summary>
# q(x) min(1, p(x) / q(x)): what is that without a division? And where does the target want more than the draft gave?
# </details>
# <details><summary>Hint 2: the plan</summary>
# a = torch.minimum(p, q).sum(). left = (p - q).clamp(min=0); divide it by its sum, unless that is 0.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# nan: divided by q where q is 0, or by a sum of 0. Residual sums to less than 1: not scaled. Negative entries: not
# clamped. Mirrored: q - p is what is refused, p - q what is missing.
# </details>


# %%
def acceptance_and_residual(p, q):
    """p, q [vocab] float64, each summing to 1 -> (a, residual [vocab]).

    Example: p = [0.5, 0.5, 0.0], q = [0.25, 0.25, 0.5] -> (0.5, [0.5, 0.5, 0.0]).
    """
    ### BEGIN SOLUTION
    a = float(torch.minimum(p, q).sum())
    left = (p - q).clamp(min=0)  # [vocab]
    total = left.sum()
    return a, left / total if total > 0 else p
    ### END SOLUTION


# %%
check("16.residual", acceptance_and_residual)

# %% [markdown]
# ## 2. The verifier (20 minutes)
#
# **What.** The draft said k tokens, token i drawn from q[i]. One forward gave p[0] to p[k]. Go through the draft:
# keep token x at place i if `uniforms[i] * q[i, x] < p[i, x]`. At the first that is refused, draw one token from
# the residual of that place and stop. If all are kept, draw the bonus from p[k]. That last draw uses `uniforms[k]`
# in every case: the first token whose running sum of probabilities exceeds it. **Why.** This function is all of
# speculative decoding that must be right; the rest only makes it fast.
#
# <details><summary>Hint 1: a nudge</summary>
# A loop with two ways out. How many tokens come out of k draft tokens at least, and at most?
# </details>
# <details><summary>Hint 2: the plan</summary>
# For each i: keep and go on, or set law = residual of p[i], q[i] and break. Without a break (for ... else) law =
# p[k]. The draw: int((law.cumsum(0) <= uniforms[k]).sum()).
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Always k tokens: the bonus is missing, or the refused token was left in. A right first token and a wrong last one:
# drawn from p[i] where the residual was meant, or from p[k] after a refusal. Tokens after a refusal: those continued
# a text that did not happen.
# </details>


# %%
def verify(p, q, tokens, uniforms):
    """p [k + 1, vocab], q [k, vocab] float64, tokens: k ids, uniforms: k + 1 numbers in [0, 1) -> list of token ids.

    Example: p = [[1, 0], [0, 1]], q = [[1, 0]], tokens [0], uniforms [0.9, 0.2] -> [0, 1].
    """
    ### BEGIN SOLUTION
    said = []
    for i, x in enumerate(tokens):
        if uniforms[i] * q[i, x] >= p[i, x]:
            law = acceptance_and_residual(p[i], q[i])[1]  # [vocab]
            break
        said.append(x)
    else:
        law = p[len(tokens)]
    return [*said, int((law.cumsum(0) <= uniforms[len(tokens)]).sum())]
    ### END SOLUTION


# %%
check("16.verify", verify)

# %% [markdown]
# ## 3. Debug it: it looks right (15 minutes)
#
# **What.** The function gives the probability of each token to come out of one round's first place, by going through
# all draft tokens. It should give p, whatever q is. It does not, although every text that this verifier wrote read
# well. Find the slip in the verifier that it describes, and mend it, so that the law is p again. q may be 0 where p
# is not, and the other way round. **Why.** Such a bias survives every test that looks at texts, and greedy tests as
# well. Only the law shows it.
#
# <details><summary>Hint 1: a nudge</summary>
# Call it with p = [0.5, 0.5] and q = [0.9, 0.1]. Which token comes too often, and when was it counted twice?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Acceptance is right. After a refusal the replacement is drawn from p; it must be drawn from the residual.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Returning p itself passes no check here: the last check hands in another acceptance rule and expects its law. nan:
# a residual of sum 0 (p equals q) was divided.
# </details>


# %%
def law_of_first(p, q, keep):
    """p, q [vocab] float64; keep [vocab]: the probability that a drafted x is kept, for the real rule
    min(1, p / q) -> the probability of each token to come out, [vocab]."""
    ### BEGIN SOLUTION
    left = (p - q).clamp(min=0)  # [vocab]
    replacement = left / left.sum() if left.sum() > 0 else p
    kept = q * keep  # [vocab]
    refused = (q * (1 - keep)).sum()
    return kept + refused * replacement
    ### END SOLUTION
    ### BEGIN GIVEN
    # replacement = p
    # kept = q * keep  # [vocab]
    # refused = (q * (1 - keep)).sum()
    # return kept + refused * replacement
    ### END GIVEN


# %%
check("16.law_of_first", law_of_first)

# %% [markdown]
# ## 4. What the draft's cache lacks (10 minutes)
#
# **What.** `held` are the tokens whose K and V the draft's cache holds, `text` is what the sequence became. Return
# how many of the held tokens stay (the rest is rolled back) and which tokens must be fed before the next guess can
# be made. The logits of the last token of `text` are what the guess is read from, so that token is always fed, even
# if it is held. **Why.** After k of k were kept, the draft has never computed its own last guess, nor the bonus.
# Feed the bonus alone, and the cache has a hole: the output stays right, and acceptance falls without a trace.
#
# <details><summary>Hint 1: a nudge</summary>
# The longest common beginning. What is the most of it that may stay?
# </details>
# <details><summary>Hint 2: the plan</summary>
# keep = 0; while it is below both lengths, and below len(text) - 1, and held[keep] == text[keep]: keep += 1. Feed
# text[keep:].
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# One token is fed where two are expected: the bonus alone. Nothing is fed: the last token must be. Right only while
# nothing was refused: tokens are compared, not lengths.
# </details>


# %%
def catch_up(held, text):
    """held, text: lists of token ids, text not empty -> (tokens of held that stay, tokens to feed).

    Example: held [5, 6, 7, 8], text [5, 6, 7, 8, 9, 4] -> (4, [9, 4]); held [5, 6, 7, 8], text [5, 6, 3] -> (2, [3]).
    """
    ### BEGIN SOLUTION
    keep = 0
    while keep < min(len(held), len(text) - 1) and held[keep] == text[keep]:
        keep += 1
    return keep, text[keep:]
    ### END SOLUTION


# %%
check("16.catch_up", catch_up)

# %% [markdown]
# ## 5. Estimate it: how long should a draft be? (10 minutes)
#
# **What.** Acceptance a (independent for each token), c the cost of a draft step and v what each drafted token adds
# to the verifying forward, both in target steps. Return the k from 0 to `most` with the most tokens a step of time,
# the smallest of equals, and that speed-up: expected tokens a round, over `1 + k (c + v)`. **Why.** k is set once
# in most configurations, and a and c change with the text and the batch.
#
# <details><summary>Hint 1: a nudge</summary>
# Token i of the draft is kept only if all before it were. And one token comes in any case.
# </details>
# <details><summary>Hint 2: the plan</summary>
# Tokens: 1 + a + a^2 + ... + a^k, a sum, so that a = 1 needs no special case. max over range(most + 1).
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# One too few tokens: the bonus (the sum starts at a^0). Always `most`: the cost is missing. Never 0: k = 0 has
# speed-up 1, and sometimes that is the best.
# </details>


# %%
def best_length(a, c, v, most):
    """-> (k, speed-up). Example: best_length(0.5, 0.25, 0.0, 8) is (1, 1.2)."""
    ### BEGIN SOLUTION
    gains = [sum(a**i for i in range(k + 1)) / (1 + k * (c + v)) for k in range(most + 1)]
    return gains.index(max(gains)), max(gains)
    ### END SOLUTION


# %%
check("16.best_length", best_length)

# %% [markdown]
# **Done?** Put your `verify` into the loop of the chapter's section 4, count 10,000 first tokens at temperature 1,
# and compare them with the target's own distribution. Next: exercise 17, drafts that are trees.
