# %% [markdown]
# # Exercise 04: batching
#
# Six tasks, about 75 minutes: left padding, the waste of a static batch, a dynamic batcher, the loop of continuous
# batching, and two faults that were found in production. Chapter: `notebooks/04_batching.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. A check may be run as often as you
# like.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. Left padding (10 minutes)
#
# **What.** Prompts of unequal length as one rectangle, padded at the *left*, with the mask and the positions that
# make each row equal to running it alone.
# **Why.** The next token is read from the last column, for all rows at once, so all prompts must end there. And
# rotary embedding must not notice the padding.
#
# <details><summary>Hint 1: a nudge</summary>
# At which position is a prompt's first real token when it runs alone?
# </details>
# <details><summary>Hint 2: the plan</summary>
# pad = longest - len(prompt). Row: [pad_id] * pad + prompt. Mask: column >= pad. Positions: column - pad, and 0
# where that is negative.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Real tokens at the left: that is right padding. Positions 0, 1, 2, ... in every row: counted from the pad.
# Negative positions: clamp them at 0. Mask all inverted: True means a real token. A mask made by `tokens != pad_id`
# fails when a prompt contains that id.
# </details>


# %%
def left_pad(prompts, pad_id):
    """(tokens int64, mask bool, positions int64), each a tensor [batch, longest]. prompts: lists of token ids.

    mask: True at real tokens. positions: 0 at a row's first real token, and at its padding.
    Example: left_pad([[7], [5, 6]], 9) is [[9, 7], [5, 6]], [[False, True], [True, True]], [[0, 0], [0, 1]].
    """
    ### BEGIN SOLUTION
    longest = max(map(len, prompts))
    tokens = torch.tensor([[pad_id] * (longest - len(p)) + list(p) for p in prompts])  # [batch, longest]
    pads = torch.tensor([longest - len(p) for p in prompts])[:, None]  # [batch, 1]
    columns = torch.arange(longest)
    return tokens, columns >= pads, (columns - pads).clamp(min=0)
    ### END SOLUTION


# %%
check("04.left_pad", left_pad)

# %% [markdown]
# ## 2. Estimate it: the waste of static batching (10 minutes)
#
# **What.** The share of computed tokens that nobody asked for, over a list of requests cut into batches of `size` in
# order (the last may be smaller).
# **Why.** It says what continuous batching can remove, before anything is built. Where time goes with the tokens
# computed, a waste of 50 % is a speed-up of at most 2.
#
# Each batch computes its prefill, padded to its longest prompt, then decode steps for all its rows until its
# longest answer is done. The prefill gives the first token; the last token of an answer is not run. So a request
# alone computes prompt + answer - 1 tokens.
#
# <details><summary>Hint 1: a nudge</summary>
# A batch is a rectangle. How wide is it?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Per batch: computed = rows x (longest prompt + longest answer - 1); asked = sum(prompt + answer - 1). Add both up
# over all batches, then 1 - asked / computed.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Slightly low or high everywhere: the last token of each answer is counted. Right for one batch only: batches were
# averaged, or taken as one. Complement: that is the useful share. Wrong for the last batch only: it was filled up to
# `size` rows.
# </details>


# %%
def static_waste(prompts, answers, size):
    """Share between 0 and 1, not rounded. prompts, answers: tokens of each request, lists of equal length.

    Example: static_waste([2, 4], [3, 1], 2): computed 2 x (4 + 3 - 1) = 12, asked for 4 + 4 = 8, waste 1/3.
    """
    ### BEGIN SOLUTION
    computed = asked = 0
    for first in range(0, len(prompts), size):
        p, n = prompts[first : first + size], answers[first : first + size]
        computed += len(p) * (max(p) + max(n) - 1)
        asked += sum(p) + sum(n) - len(p)
    return 1 - asked / computed
    ### END SOLUTION


# %%
check("04.static_waste", static_waste)

# %% [markdown]
# ## 3. A dynamic batcher (10 minutes)
#
# **What.** Which requests go together, and when does their batch start? A batch opens with its first request and
# closes when `size` requests are in it, or `window` seconds after that first one, whichever comes first. It starts
# when it closes. There is always a free machine.
# **Why.** It is what inference servers did before LLMs, and still do for embeddings. The two knobs trade waiting for
# batch size.
#
# <details><summary>Hint 1: a nudge</summary>
# A batcher cannot know that nobody else will come.
# </details>
# <details><summary>Hint 2: the plan</summary>
# Take the first request, close = its arrival + window. Take following ones while they arrive at or before close and
# there is room. Full: start at the last one's arrival. Otherwise: start at close.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Everything waits for ever or goes in one batch: the window restarts with each request. Full batches start late:
# they need not wait. The last batch starts early: the batcher looked into the future. A request exactly at close is
# missing: `<=`.
# </details>


# %%
def batches(arrivals, size, window):
    """List of (list of request indices, start time). arrivals: seconds, ascending.

    Example: batches([0.0, 1.0, 5.0], 2, 2.0) is [([0, 1], 1.0), ([2], 7.0)].
    """
    ### BEGIN SOLUTION
    found, i = [], 0
    while i < len(arrivals):
        close, batch = arrivals[i] + window, []
        while i < len(arrivals) and len(batch) < size and arrivals[i] <= close:
            batch.append(i)
            i += 1
        found.append((batch, arrivals[batch[-1]] if len(batch) == size else close))
    return found
    ### END SOLUTION


# %%
check("04.batches", batches)

# %% [markdown]
# ## 4. The iteration-level loop (20 minutes)
#
# **What.** Continuous batching over slots 0 to `slots - 1`. Two functions compute:
# - `prefill(slot, prompt)` forgets what the slot held, reads the prompt, returns the first new token;
# - `decode(last)` takes {slot: that slot's last token}, runs them in one step, returns {slot: next token}.
#
# In each iteration, fill free slots in order of the requests, until none is free or nobody waits; then one `decode`
# of all that run. A request is done at `max_tokens`, or when it gives the token `eos` (which stays in its answer; an
# `eos` in its prompt does not count). Who is done, even after the prefill, leaves its slot at once and is never
# decoded again.
# **Why.** These lines are the heart of every serving engine.
#
# <details><summary>Hint 1: a nudge</summary>
# The only state is {slot: request}, a queue, and the answers.
# </details>
# <details><summary>Hint 2: the plan</summary>
# while queue or running: while queue and len(running) < slots: choose a free slot, prefill, append; keep it in
# running unless done. Then if running: decode({slot: answers[request][-1]}), append each, remove who is done.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Too many decode calls: slots are refilled only when all are done, or one an iteration. Too many rows: finished
# requests are still decoded; look at max_tokens = 1. Answers of the right kind in the wrong places: in order of
# finishing, not of the requests.
# </details>


# %%
def serve(requests, slots, prefill, decode, eos=None):
    """Answers, a list of tokens for each request, in the order of `requests`: (prompt, max_tokens) each.

    Example: with slots=1 it is prefill(0, prompt), then decode({0: token}) until done, request after request.
    """
    ### BEGIN SOLUTION
    answers, waiting, running = [[] for _ in requests], list(range(len(requests))), {}

    def take(slot, token):
        i = running[slot]
        answers[i].append(token)
        if token == eos or len(answers[i]) == requests[i][1]:
            del running[slot]

    while waiting or running:
        while waiting and len(running) < slots:
            slot = min(set(range(slots)) - set(running))
            running[slot] = waiting.pop(0)
            take(slot, prefill(slot, requests[running[slot]][0]))
        if running:
            tokens = decode({slot: answers[i][-1] for slot, i in running.items()})
            for slot, token in tokens.items():
                take(slot, token)
    return answers
    ### END SOLUTION


# %%
check("04.serve", serve)

# %% [markdown]
# ## 5. Debug it: the greedy user who got dice (10 minutes)
#
# **What.** Rows of one step belong to different users, each with a temperature of their own; 0 means greedy. All
# tests, all greedy or all sampled, are green. In production a user who asked for temperature 0 gets another answer
# now and then, only when the server is busy. Find the fault and mend it.
# **Why.** Continuous batching seats strangers side by side. A shortcut for "the batch" is a decision about somebody
# else.
#
# Sampling here: divide logits by the temperature, softmax, divide by the row's exponential noise, take the largest
# (it draws token i with probability p_i). Keep that, so that a seed gives what it gave before.
#
# <details><summary>Hint 1: a nudge</summary>
# Follow a row of temperature 0 whose neighbour has 0.8.
# </details>
# <details><summary>Hint 2: the plan</summary>
# Compute both answers for all rows, the greedy and the sampled, and choose row by row with `torch.where`.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Sampled rows became greedy: the choice is still made for the batch. Every row uses one temperature: keep [:, None].
# Nearly right, wrong on close calls: a small temperature is not 0, and 0 is not a small one. NaN: 0 / 0 before it is
# replaced.
# </details>


# %%
def choose(logits, temperatures, noise):
    """Token ids, int64 [rows]. logits and noise [rows, vocab], temperatures [rows] >= 0.

    Of equal logits a greedy row takes the first, as argmax does.
    """
    ### BEGIN SOLUTION
    greedy = temperatures == 0  # [rows]
    safe = torch.where(greedy, 1.0, temperatures)
    probabilities = (logits / safe[:, None]).softmax(-1)  # [rows, vocab]
    sampled = (probabilities / noise).argmax(-1)
    return torch.where(greedy, logits.argmax(-1), sampled)
    ### END SOLUTION
    ### BEGIN GIVEN
    # greedy = temperatures == 0  # [rows]
    # if greedy.all():
    #     return logits.argmax(-1)
    # safe = torch.where(greedy, 1.0, temperatures)
    # probabilities = (logits / safe[:, None]).softmax(-1)  # [rows, vocab]
    # return (probabilities / noise).argmax(-1)
    ### END GIVEN


# %%
check("04.choose", choose)

# %% [markdown]
# ## 6. Debug it: the answer that begins with somebody else's word (15 minutes)
#
# **What.** The bookkeeping after a step: `tokens` has just been computed for the slots, whose owners at that time
# stand in `owners`. Somebody made it "faster" by giving slots away before the tokens are recorded. Since then
# answers end one token early, and others begin with a token that is not theirs. Mend it.
# **Why.** Engines overlap bookkeeping with the GPU's work, and this fault comes with it: results of step t meet the
# slots of step t + 1. It shows one user's text to another.
#
# <details><summary>Hint 1: a nudge</summary>
# One slot, a request with one token to go, another waiting. Who owns the slot when the token is recorded?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Record all tokens under the owners of the step. Then see who has reached the limit, and give those slots away.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# One token too many or too few: after recording, done means len(answer) == limit, without the + 1. The last owner
# of a slot never leaves: remove it even when nobody waits. The order of service changed: waiting is taken from the
# front.
# </details>


# %%
def advance(owners, waiting, answers, limits, tokens):
    """Record one step. Changes the first three in place; returns the slots that have a new owner, ascending.

    owners {slot: request}, waiting [request, ...], answers {request: [token, ...]}, limits {request: tokens},
    tokens {slot: token} of every owned slot; the last two stay as they are. A slot whose request is done goes to the
    first who waits, or to nobody.
    """
    ### BEGIN SOLUTION
    for slot, token in tokens.items():
        answers[owners[slot]].append(token)
    fresh = []
    for slot in sorted(owners):
        if len(answers[owners[slot]]) >= limits[owners[slot]]:
            del owners[slot]
            if waiting:
                owners[slot] = waiting.pop(0)
                fresh.append(slot)
    return fresh
    ### END SOLUTION
    ### BEGIN GIVEN
    # fresh = []
    # for slot in sorted(owners):
    #     if len(answers[owners[slot]]) + 1 >= limits[owners[slot]]:  # done with this step's token
    #         del owners[slot]
    #         if waiting:
    #             owners[slot] = waiting.pop(0)
    #             fresh.append(slot)
    # for slot, token in tokens.items():
    #     if slot in owners:
    #         answers[owners[slot]].append(token)
    # return fresh
    ### END GIVEN


# %%
check("04.advance", advance)

# %% [markdown]
# **Done?** Feed your `serve` the real model: the `SlotCache` of the chapter gives you `prefill` and `decode` in a
# few lines. Next: exercise 05, where a slot no longer reserves its room.
