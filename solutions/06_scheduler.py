# %% [markdown]
# # Exercise 06: the scheduler
#
# Six tasks, about 80 minutes: who is admitted, one step under a token budget, a preemption that loses nothing, a key
# under which nobody starves, a queue that stopped for ever, and seven estimates. No tensors anywhere. Chapter:
# `notebooks/06_scheduler.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. A check may be run as often as you
# like.

# %%
from dataclasses import dataclass, field

from minillm.lab import check

# %% [markdown]
# ## 1. Admission by free blocks (5 minutes)
#
# **What.** How many requests, counted from the head of the waiting queue, may start now? Each needs a free slot, and
# blocks for all its tokens. After each admission `spare` blocks must still be free: a fixed number here, where the
# library keeps `headroom` blocks for each request that runs.
# **Why.** A request that is let in without room is thrown out again one step later. And a queue that lets small
# requests past a large head may never serve the large one.
#
# <details><summary>Hint 1: a nudge</summary>
# Go through the queue in order, keep count of what is still free. What happens at the first one that does not fit?
# </details>
# <details><summary>Hint 2: the plan</summary>
# blocks = -(-tokens // block_size). Stop when no slot is left, or when free - blocks < spare. Else subtract and
# count.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Too many: blocks rounded down, or you went on after the first that did not fit, or each request was compared with
# all the free blocks and not with what the ones before it left. One too few: exactly `spare` left is enough.
# </details>


# %%
def admit(waiting, slots, free, block_size, spare):
    """How many requests from the head of the queue start now.

    waiting: tokens of each waiting request, in order. slots: how many more may run. free: free blocks.
    Example: admit([8, 9, 1], 4, 5, 4, 1) is 1: 2 blocks leave 3, 3 more would leave 0, and 1 must stay.
    """
    ### BEGIN SOLUTION
    admitted = 0
    for tokens in waiting[:slots]:
        blocks = -(-tokens // block_size)
        if free - blocks < spare:
            break
        free -= blocks
        admitted += 1
    return admitted
    ### END SOLUTION


# %%
check("06.admit", admit)

# %% [markdown]
# ## 2. One step under a token budget (15 minutes)
#
# **What.** A request is the pair (tokens it has, tokens whose KV is computed). Hand out at most `budget` tokens to
# the requests of one step: first to all that decode (one token is missing, and it is not the first of a prompt),
# then to the others in their order, each as much as is left. And say which of them get a **new token** from this
# forward.
# **Why.** It is all of chunked prefill. The chunk rides along with the decodes; and only the last chunk of a prompt
# ends in logits that anyone may sample from. An engine that samples after every chunk talks nonsense, and no crash
# tells it.
#
# <details><summary>Hint 1: a nudge</summary>
# Two passes over the same list. A request that gets nothing is in the result as well.
# </details>
# <details><summary>Hint 2: the plan</summary>
# given = [0] * len(requests). Pass 1: those with tokens - computed == 1 and computed > 0. Pass 2: the rest. Each gets
# min(tokens - computed, what is left). It samples where given equals tokens - computed.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Sum above the budget: the budget was given to each. Decodes with 0 beside a long prompt: prompts went first. A
# chunk in the middle that samples: compare with what remains, not with 0. A second chunk too large: computed was
# not subtracted. The result in another order: keep the places of the input.
# </details>


# %%
def plan_step(requests, budget):
    """A list with one pair for each request, in the same order: (tokens it gets, True if it samples a new token).

    requests: list of (tokens, computed), computed < tokens. All of them may run.
    Example: plan_step([(20, 8), (9, 8)], 6) is [(5, False), (1, True)].
    """
    ### BEGIN SOLUTION
    given = [0] * len(requests)
    for decoding in (True, False):
        for i, (tokens, computed) in enumerate(requests):
            if (tokens - computed == 1 and computed > 0) is decoding:
                given[i] = min(tokens - computed, budget)
                budget -= given[i]
    return [(n, n == tokens - computed) for n, (tokens, computed) in zip(given, requests)]
    ### END SOLUTION


# %%
check("06.plan_step", plan_step)

# %% [markdown]
# ## 3. Preempt by recompute (15 minutes)
#
# **What.** A running request needs `needed` free blocks and there are fewer. Take running requests back, the last
# to arrive first, until there are enough; never the first to arrive of those that run. A victim's blocks go to the
# free list; it goes to the waiting queue, which is ordered by arrival; when it comes back it must say on where it
# stopped, and compute what it lost.
# **Why.** Preemption is what makes full memory safe. Each of its four effects (blocks, computed, tokens, queues),
# when forgotten, is a bug that real engines have had: a leak, stale KV, lost words, starvation.
#
# Change `running`, `waiting` and `free` and the victims in place; return the victims' names, in the order taken. If
# even the first to arrive alone leaves too little, take all the others and return.
#
# <details><summary>Hint 1: a nudge</summary>
# Of tokens, computed and blocks: which still tell the truth once the blocks belong to somebody else?
# </details>
# <details><summary>Hint 2: the plan</summary>
# While len(free) < needed and len(running) > 1: remove the one with the largest arrival from running; free += its
# blocks; blocks = []; computed = 0; tokens stay; insert it into waiting before the first that arrived later.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# More victims than expected: stop as soon as there is room. Blocks lost: freed before they were added to `free`, or
# the victim still names them. Words lost: tokens were cut to the prompt. At the end of the queue: it would wait
# behind requests that came later. `running` is not sorted.
# </details>


# %%
@dataclass(eq=False)
class Sequence:
    """Task 3's request. tokens: prompt and answer so far; computed: tokens whose KV is in `blocks`."""

    name: str
    arrival: int
    tokens: list
    prompt_length: int
    computed: int = 0
    blocks: list = field(default_factory=list)


def make_room(needed, running, waiting, free):
    """Preempt until `free`, a list of block ids, holds `needed` of them. Returns the names of the victims.

    running: list of Sequence, in any order. waiting: list of Sequence, by arrival.
    """
    ### BEGIN SOLUTION
    victims = []
    while len(free) < needed and len(running) > 1:
        victim = max(running, key=lambda s: s.arrival)
        running.remove(victim)
        free += victim.blocks
        victim.blocks = []
        victim.computed = 0
        place = sum(other.arrival < victim.arrival for other in waiting)
        waiting.insert(place, victim)
        victims.append(victim.name)
    return victims
    ### END SOLUTION


# %%
check("06.make_room", make_room)

# %% [markdown]
# ## 4. Priority with ageing (10 minutes)
#
# **What.** Priority 0 is the most urgent. A request gains one level for every `ageing` steps that it waits, so at
# step `now` its urgency is `priority - (now - arrival) / ageing`: the smallest goes first, of equals the one that
# arrived first. Write a **sort key that does not use `now`** and gives this order at every moment.
# **Why.** Without ageing one low request starves under a steady stream of urgent ones. With a key that changes, a
# queue of ten thousand must be sorted at every step; with one that does not, a heap keeps it.
#
# <details><summary>Hint 1: a nudge</summary>
# Take two requests and write down the difference of their urgencies. What happens to `now`?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Multiply the urgency by `ageing` (it is positive: the order stays) and leave out what is the same for all. The tie
# goes in as a second element of a tuple.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Low priorities starve: arrival counts only between equals. The young go first: the sign of arrival. Wrong in rare
# ties only: division, so that floats that should be equal differ; stay with whole numbers. Wrong order of equals:
# add the arrival.
# </details>


# %%
def queue_key(priority, arrival, ageing):
    """Something that Python can compare: the smaller goes first. All three are ints, ageing > 0.

    Example: queue_key(2, 0, 10) comes before queue_key(0, 21, 10), and after queue_key(0, 19, 10).
    """
    ### BEGIN SOLUTION
    return (priority * ageing + arrival, arrival)
    ### END SOLUTION


# %%
check("06.queue_key", queue_key)

# %% [markdown]
# ## 5. Debug it: the queue that stopped (20 minutes)
#
# **What.** A small server, by counts. Its tests are green. In production it stands still now and then: the process is
# alive, steps run, and nobody gets another token. Find out which requests do that to it, and **refuse them at once**,
# when they arrive: their names go to `refused`. Everything that can run must still be taken, in the order it came.
# **Why.** One such request, and all behind it wait for ever. To let the others past it is no cure: then it waits
# for ever itself, and so does a large request that would have fitted.
#
# <details><summary>Hint 1: a nudge</summary>
# 4 blocks of 4. Send a prompt of 20 tokens, then a short one, and look. Then a prompt of 14 that wants 6 new
# tokens: what happens when it runs alone and needs a fifth block?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Not the prompt counts but the most tokens whose KV it will ever hold. The last new token is said and never fed
# back, so that is prompt + new - 1. Compare the blocks for them with all blocks of the pool, not with those free
# now.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Still stands still: you compare the prompt only, and it grows until it preempts itself. Refuses one that fits
# exactly: the last token is counted, or `>=`. Refuses when busy: you look at the free blocks. Finishes in another
# order: the head of the queue was skipped.
# </details>


# %%
def serve(arrivals, num_blocks, block_size, steps):
    """Run `steps` steps. Returns (names in the order they finished, names refused in the order they came).

    arrivals: {step: [(name, prompt tokens, new tokens), ...]}; at least one new token each.
    Example: serve({0: [("a", 3, 2), ("b", 99, 1)]}, 4, 4, 9) is (["a"], ["b"]).
    """
    ### BEGIN SOLUTION
    free, waiting, running, finished, refused = num_blocks, [], [], [], []
    for step in range(steps):
        for name, prompt, new in arrivals.get(step, []):
            if -(-(prompt + new - 1) // block_size) > num_blocks:
                refused.append(name)
                continue
            waiting.append({"name": name, "tokens": prompt, "end": prompt + new, "blocks": 0})
        for r in list(running):  # room for one more token each
            while r in running and -(-r["tokens"] // block_size) - r["blocks"] > free:
                victim = running.pop()  # the last to come; it may be r itself
                free += victim["blocks"]
                victim["blocks"] = 0
                waiting.insert(0, victim)
            if r in running:
                free -= -(-r["tokens"] // block_size) - r["blocks"]
                r["blocks"] = -(-r["tokens"] // block_size)
        while waiting and -(-waiting[0]["tokens"] // block_size) <= free:
            running.append(waiting.pop(0))
            running[-1]["blocks"] = -(-running[-1]["tokens"] // block_size)
            free -= running[-1]["blocks"]
        for r in list(running):  # the forward: everybody who runs says a token
            r["tokens"] += 1
            if r["tokens"] == r["end"]:
                running.remove(r)
                free += r["blocks"]
                finished.append(r["name"])
    return finished, refused
    ### END SOLUTION
    ### BEGIN GIVEN
    # free, waiting, running, finished, refused = num_blocks, [], [], [], []
    # for step in range(steps):
    #     for name, prompt, new in arrivals.get(step, []):
    #         waiting.append({"name": name, "tokens": prompt, "end": prompt + new, "blocks": 0})
    #     for r in list(running):  # room for one more token each
    #         while r in running and -(-r["tokens"] // block_size) - r["blocks"] > free:
    #             victim = running.pop()  # the last to come; it may be r itself
    #             free += victim["blocks"]
    #             victim["blocks"] = 0
    #             waiting.insert(0, victim)
    #         if r in running:
    #             free -= -(-r["tokens"] // block_size) - r["blocks"]
    #             r["blocks"] = -(-r["tokens"] // block_size)
    #     while waiting and -(-waiting[0]["tokens"] // block_size) <= free:
    #         running.append(waiting.pop(0))
    #         running[-1]["blocks"] = -(-running[-1]["tokens"] // block_size)
    #         free -= running[-1]["blocks"]
    #     for r in list(running):  # the forward: everybody who runs says a token
    #         r["tokens"] += 1
    #         if r["tokens"] == r["end"]:
    #             running.remove(r)
    #             free += r["blocks"]
    #             finished.append(r["name"])
    # return finished, refused
    ### END GIVEN


# %%
check("06.serve", serve)

# %% [markdown]
# ## 6. Estimate it: seven figures (15 minutes)
#
# **What.** To within 0.5 %; write expressions. A GPU on which a step takes **10 ms + 0.05 ms x tokens**. 32 streams
# decode when a prompt of 4,096 tokens arrives. Then memory runs out: the victim has 2,048 tokens of LLaMA-7B KV
# (512 KiB = 2^19 bytes a token, 6.7e9 parameters); the bus moves 25 GB/s, prefill reaches 150 TFLOP/s at 2 FLOPs a
# parameter and token.
#
# | key | what |
# |---|---|
# | `"whole_gap_ms"` | worst gap of the streams, the prompt in one forward with their tokens, **ms** |
# | `"steps"` | forwards that compute the prompt, token budget 512, decodes first |
# | `"chunk_gap_ms"` | worst gap of the streams then, **ms** |
# | `"ttft_ms"` | from the first of those steps to the newcomer's first token, **ms** (the last chunk is smaller) |
# | `"swap_ms"` | the victim's KV to the host and back, **ms** |
# | `"recompute_ms"` | computing the victim's KV again, **ms** |
# | `"even_gb_s"` | the bus at which both take as long, **GB/s** (10^9 bytes) |
#
# **Why.** Two divisions each, and they settle a budget and a preemption policy before anybody builds one.
#
# <details><summary>Hint 1: a nudge</summary>
# How many tokens of a step of 512 are left to the prompt?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Chunks of 512 - 32 = 480. TTFT: the full steps, then one with what is left of the prompt plus 32. Swap: 2 x tokens x
# bytes / bus. Recompute: 2 x parameters x tokens / FLOP/s. Even: 2 x bytes a token / (2 x parameters / FLOP/s).
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# 8 steps: the streams' 32 tokens a step are not taken off, or you rounded down. 34 ms: the chunk without the
# decodes that it rides with. 320 ms: the last step taken as full. Half a swap: out, but not back. Seconds where ms
# are asked.
# </details>


# %%
def figures():
    """Return a dict with the seven keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    chunk = 512 - 32
    full, rest = divmod(4096, chunk)
    seconds_per_token = 2 * 6.7e9 / 150e12
    return {
        "whole_gap_ms": 10 + 0.05 * (4096 + 32),
        "steps": full + (rest > 0),
        "chunk_gap_ms": 10 + 0.05 * 512,
        "ttft_ms": full * (10 + 0.05 * 512) + 10 + 0.05 * (rest + 32),
        "swap_ms": 2 * 2048 * 2**19 / 25e9 * 1e3,
        "recompute_ms": 2048 * seconds_per_token * 1e3,
        "even_gb_s": 2 * 2**19 / seconds_per_token / 1e9,
    }
    ### END SOLUTION


# %%
check("06.figures", figures)

# %% [markdown]
# **Done?** Read `minillm/engine/scheduler.py` and find your six answers in it: `_place`, `_continue`, `_preempt`,
# `add`, `refuse_if_hopeless`. Next: exercise 07, prompts that need not be computed at all.
