# %% [markdown]
# # Exercise 15: measuring damage
#
# Six tasks, about 80 minutes: losses with a stride, KL and top-1 agreement, a paired interval, the scores of a
# multiple-choice question, a nightly perplexity that jumps, and how much text a claim needs.
# Chapter: `notebooks/15_measuring_damage.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. A model is a function `run`: tokens
# `[batch, time]` to logits `[batch, time, vocab]`; row i says what token i + 1 is. It remembers nothing between
# calls.

# %%
import torch
import torch.nn.functional as F

from minillm.lab import check

# %% [markdown]
# ## 1. Losses with a stride (15 minutes)
#
# **What.** Windows start at token 0, stride, 2 x stride, ... and hold `window` tokens, the last one what is left; no
# further window starts once one has reached the end. Return -ln p of every token, each scored once: in the first
# window that holds it, with all that stands before it *in that window*. The first token of the text has nothing
# before it and is not scored; with stride = window neither is the first of each later window. **Why.** Perplexity is
# exp of the mean of these; every further figure starts from them.
#
# <details><summary>Hint 1: a nudge</summary>
# Write the windows of 10 tokens at window 4, stride 3 on paper. Which tokens of the second window are new?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Keep `done`, how many tokens some window has held (at first 1: token 0 is not scored). For each start: part =
# tokens[start : start + window]; logits = run(part[None])[0]; score tokens max(done, start + 1) .. end - 1 with
# logits one row earlier; done = end; stop at the end of the text.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Too many losses: tokens of the overlap are scored twice, or a window started after the end was reached. Numbers that
# look like noise: row i of the logits is about token i + 1. Right for stride = window only: every window's later
# `stride` tokens were taken, but the first window has more new ones.
# </details>


# %%
def strided_losses(run, tokens, window, stride):
    """tokens [n] int64, n >= 2; 1 <= stride <= window -> losses [scored], nats, in the order of the text.

    Example: n 10, window 4, stride 3 -> 9 losses; window 4, stride 4 -> 7 (tokens 0, 4 and 8 are not scored).
    """
    ### BEGIN SOLUTION
    losses, done = [], 1
    for start in range(0, len(tokens), stride):
        part = tokens[start : start + window]
        end, first = start + len(part), max(done, start + 1)
        if first < end:
            logits = run(part[None])[0]  # [time, vocab]
            losses.append(F.cross_entropy(logits[first - start - 1 : -1], part[first - start :], reduction="none"))
        done = end
        if end == len(tokens):
            break
    return torch.cat(losses)
    ### END SOLUTION


# %%
check("15.strided_losses", strided_losses)

# %% [markdown]
# ## 2. KL and top-1 agreement (10 minutes)
#
# **What.** From the logits of the original and of the changed model on the same tokens: the mean over tokens of
# KL(original || changed) = Σ p ln(p / q), and the share of tokens for which both put the same token first. A logit of
# the original may be -inf, a token that it rules out: that token adds nothing. One that the changed model alone rules
# out makes the divergence infinite. Logits may be in the hundreds. **Why.** Neither can cancel: a token that got
# worse is not made up for by one that got better.
#
# <details><summary>Hint 1: a nudge</summary>
# What is 0 x ln 0, here, and what does torch say it is?
# </details>
# <details><summary>Hint 2: the plan</summary>
# log_softmax of both over the last axis. terms = p * (log p - log q), 0 where p is 0; sum over the vocabulary, mean
# over tokens. argmax of both, compared, as floats, mean.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# nan: 0 x -inf. inf: exp of a logit of 300 overflows; log_softmax does not. Close but different: the divergence was
# taken the other way round, or in bits. `F.kl_div(a, b)` is KL(b || a), and its default "mean" divides by all
# numbers.
# </details>


# %%
def distance(original, changed):
    """logits [tokens, vocab] of both models -> (mean KL in nats, top-1 agreement from 0 to 1), two floats.

    Example: [[0., 0.]] and [[0., 1.0986]] (q = 1/4, 3/4) -> KL 0.1438; of the tied pair argmax takes the first: 0.0.
    """
    ### BEGIN SOLUTION
    p, q = original.log_softmax(-1), changed.log_softmax(-1)
    terms = (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0)  # [tokens, vocab]
    agree = original.argmax(-1) == changed.argmax(-1)
    return terms.sum(-1).mean().item(), agree.float().mean().item()
    ### END SOLUTION


# %%
check("15.distance", distance)

# %% [markdown]
# ## 3. A paired interval (15 minutes)
#
# **What.** `a` and `b` are losses of two models on the same tokens. Cut the tokens into blocks of `block` neighbours
# (the last may be shorter). `drawn` `[samples, blocks]` says which blocks each resampled text is made of. For each
# of them, compute the mean of a - b over its *tokens*; return the 2.5 % and the 97.5 % quantile of these means
# (`torch.quantile`). **Why.** Hard passages are hard for both models; in pairs they cancel.
#
# <details><summary>Hint 1: a nudge</summary>
# Two blocks of 4 tokens and one of 2: what is the mean over the tokens of a text of blocks 0, 2, 2?
# </details>
# <details><summary>Hint 2: the plan</summary>
# d = a - b; blocks = d.split(block). Sums of the blocks [blocks], their lengths [blocks]. means =
# sums[drawn].sum(1) / lengths[drawn].sum(1); then the quantiles.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Many times too wide: a and b were resampled apart and their ends subtracted. Slightly off, where the last block is
# short: a mean of block means. Too narrow: 5 % and 95 %.
# </details>


# %%
def paired_interval(a, b, block, drawn):
    """a, b [n] losses; drawn [samples, blocks] int64, block numbers -> (low, high), two floats.

    Example: a [1., 2., 3., 4.], b [1., 1., 1., 1.], block 2, drawn [[0, 0], [1, 1]] -> means 0.5 and 2.5, so
    (0.55, 2.45).
    """
    ### BEGIN SOLUTION
    blocks = (a - b).split(block)
    sums = torch.stack([part.sum() for part in blocks])  # [blocks]
    lengths = torch.tensor([float(len(part)) for part in blocks])
    means = sums[drawn].sum(1) / lengths[drawn].sum(1)  # [samples]
    low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high
    ### END SOLUTION


# %%
check("15.paired_interval", paired_interval)

# %% [markdown]
# ## 4. The scores of a multiple-choice question (15 minutes)
#
# **What.** For each choice: the mean over its tokens of ln p(token | context and the tokens of the choice before it).
# The answer is the choice with the highest score; return all scores. **Why.** A sum would let short choices win, and
# a score that counts the context adds the same number, but divided by another length.
#
# <details><summary>Hint 1: a nudge</summary>
# The context has 5 tokens. Which row of the logits is about the first token of a choice?
# </details>
# <details><summary>Hint 2: the plan</summary>
# ids = torch.cat((context, choice)); logits = run(ids[None])[0]; rows len(context) - 1 .. len(ids) - 2 are about the
# choice; log_softmax, gather, mean.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Too negative for long choices: a sum. Near the right values but not equal: the context's tokens are in the mean, or
# the choice's first token is not, or the choice was read without its context.
# </details>


# %%
def choice_scores(run, context, choices):
    """context [n] int64, choices: list of [length] int64 of different lengths -> list of floats, one a choice."""
    ### BEGIN SOLUTION
    scores = []
    for choice in choices:
        logits = run(torch.cat((context, choice))[None])[0, len(context) - 1 : -1]  # [length, vocab]
        scores.append(-F.cross_entropy(logits, choice).item())
    return scores
    ### END SOLUTION


# %%
check("15.choice_scores", choice_scores)

# %% [markdown]
# ## 5. Debug it: the perplexity that jumps (10 minutes)
#
# **What.** A nightly job reports the perplexity of one model. Last night ten words were added to the end of the text
# and it jumped by half; the week before, the stride was changed and it moved though the losses of the tokens hardly
# did. The losses are right, each token is scored once, and for windows of equal length all is well. `windows` holds
# the losses of the newly scored tokens of each window. Find the fault and mend it. **Why.** No token's loss is wrong,
# so nothing looks wrong until two runs are compared.
#
# <details><summary>Hint 1: a nudge</summary>
# The last window may have scored three tokens, the first 511. How much does each of these tokens count?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Sum all losses, count all tokens, divide, and take exp once, at the end.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# exp of each window's mean, averaged, is larger still: exp is convex. Dropping the short window loses its tokens.
# </details>


# %%
def perplexity_of(windows):
    """windows: list of tensors [tokens scored in this window], nats -> perplexity, a float.

    Example: [[1., 1., 1.], [3.]] -> exp(6 / 4) = 4.4817.
    """
    ### BEGIN SOLUTION
    total, count = 0.0, 0
    for losses in windows:
        total, count = total + losses.sum(), count + len(losses)
    return (total / count).exp().item()
    ### END SOLUTION
    ### BEGIN GIVEN
    # total, count = 0.0, 0
    # for losses in windows:
    #     total, count = total + losses.mean(), count + 1
    # return (total / count).exp().item()
    ### END GIVEN


# %%
check("15.perplexity_of", perplexity_of)

# %% [markdown]
# ## 6. Estimate it: how much text does a claim need? (15 minutes)
#
# **What.** An interval of 95 % is the mean ± 1.96 standard errors; for small differences, a difference of mean losses
# of 0.005 nats is 0.5 % of perplexity. Write down expressions, to 2 %:
#
# | key | what |
# |---|---|
# | `"alone"` | tokens until one perplexity is known to ± 0.5 % |
# | `"paired"` | tokens until the ratio of two perplexities is |
# | `"forwards"` | windows to run over 1,000,000 tokens, window 2,048, stride 512 |
# | `"questions"` | questions until a drop of accuracy of 0.02 is just outside ± 1.96 standard errors, paired |
# | `"same"` | share of greedy answers of 100 tokens that stay the same |
#
# A token's loss has a standard deviation of 3.0 nats; for `"alone"` take tokens as independent. A token's difference
# between the two models has 0.2 nats, and neighbours are alike, so that the variance of its mean is 4 x that of
# independent tokens. A question counts +1, -1 or 0 in the difference of accuracies, and 10 % of the answers flip
# (neglect 0.02²). For `"same"`: top-1 agreement 0.99 a token, independent.
#
# **Why.** Most differences between methods that are reported are smaller than what the text can tell.
#
# <details><summary>Hint 1: a nudge</summary>
# The standard error of a mean is the standard deviation / √n. Set 1.96 times it to 0.005 and solve for n.
# </details>
# <details><summary>Hint 2: the plan</summary>
# alone: (1.96 x 3.0 / 0.005)². paired: 4 x (1.96 x 0.2 / 0.005)². forwards: 1 + what is left after the first window,
# over the stride. questions: the variance of a question's difference is 0.10; (1.96 / 0.02)² x 0.10. same: 0.99^100.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# A factor of 3.84: 1.96² is missing. A factor of 4 in "paired": variances add, so the 4 stands outside the square.
# forwards 4 x too small: with the window in place of the stride.
# </details>


# %%
def text_needed():
    """Return a dict with the five keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    return {
        "alone": (1.96 * 3.0 / 0.005) ** 2,
        "paired": 4 * (1.96 * 0.2 / 0.005) ** 2,
        "forwards": 1 + (1_000_000 - 2048) / 512,
        "questions": (1.96 / 0.02) ** 2 * 0.10,
        "same": 0.99**100,
    }
    ### END SOLUTION


# %%
check("15.text_needed", text_needed)

# %% [markdown]
# **Done?** Take your `strided_losses` to `tiny` and to a copy of it with one row of its head set to 0, the end of
# turn. What do your losses on `heldout.txt` say, and what does a chat? Next: exercise 16, drafts that are proposed
# and verified.
