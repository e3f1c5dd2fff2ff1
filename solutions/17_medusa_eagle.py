# %% [markdown]
# # Exercise 17: Medusa and EAGLE
#
# Five tasks, about 60 minutes: who sees whom in a draft tree, which path is accepted, which tree to draft, a cache
# that remembers what was never said, and what it all costs on a real card. Chapter:
# `notebooks/17_medusa_eagle.ipynb`.
#
# A tree is a list `parents`: of node i the index of its parent, smaller than i; -1 is the last known token, which the
# target has not computed yet. In the forward, row 0 is that token and row i + 1 is node i.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it.

# %%
import torch

from minillm.lab import check

# %% [markdown]
# ## 1. The tree's mask (10 minutes)
#
# **What.** `stored` tokens are in the cache. Rows: the last known token, then the nodes. Columns: the stored tokens,
# then the same rows again. True where a row may look: at everything stored, at the last known token, at its own
# ancestors, at itself. **Why.** This mask is all that lets one forward hold many continuations.
#
# <details><summary>Hint 1: a nudge</summary>
# A node sees all that its parent sees, and itself.
# </details>
# <details><summary>Hint 2: the plan</summary>
# All False, [1 + n, stored + 1 + n]. Row 0: the first stored + 1 columns. Row i + 1: copy the row of its parent (row
# parents[i] + 1), then set its own column, stored + 1 + i. Parents come first, so one pass is enough.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right for chains only: that is a causal mask, and cousins see each other. One level is missing: the parent was set,
# its ancestors were not. Everything one column to the left: the last known token has a column too.
# </details>


# %%
def tree_mask(parents, stored):
    """Bool tensor [1 + nodes, stored + 1 + nodes].

    Example: tree_mask([-1, -1, 0], 1) is
    [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 1]] as booleans.
    """
    ### BEGIN SOLUTION
    n = len(parents)
    mask = torch.zeros(1 + n, stored + 1 + n, dtype=torch.bool)
    mask[0, : stored + 1] = True
    for i, parent in enumerate(parents):
        mask[i + 1] = mask[parent + 1]
        mask[i + 1, stored + 1 + i] = True
    return mask
    ### END SOLUTION


# %%
check("17.tree_mask", tree_mask)

# %% [markdown]
# ## 2. The accepted path (10 minutes)
#
# **What.** `said[r]` is the target's likeliest token after row r (row 0: after the last known token). Follow the tree
# from the top as long as a child holds what was said. Return the accepted nodes and the tokens that come out: theirs,
# and one more. Siblings hold different tokens. **Why.** It is the whole of greedy verification; sampled verification
# differs only in how `said` is drawn.
#
# <details><summary>Hint 1: a nudge</summary>
# At each row only its own children count, wherever else the tree holds that token.
# </details>
# <details><summary>Hint 2: the plan</summary>
# at = -1. Loop: t = said[at + 1]; output t; find a node with parent `at` and token t; none: stop; else accept it and
# go on from it.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# One token too few: the last thing the target said comes out too, the bonus or the correction. Accepted nodes that
# are no path: a cousin's token was matched. said[i] for node i: node i is row i + 1.
# </details>


# %%
def accept(tokens, parents, said):
    """(accepted nodes, tokens that come out), two lists of ints.

    Example: accept([5, 6, 7], [-1, -1, 1], [6, 0, 7, 9]) is ([1, 2], [6, 7, 9]).
    """
    ### BEGIN SOLUTION
    at, nodes, out = -1, [], []
    while True:
        out.append(said[at + 1])
        found = [i for i, parent in enumerate(parents) if parent == at and tokens[i] == out[-1]]
        if not found:
            return nodes, out
        at = found[0]
        nodes.append(at)
    ### END SOLUTION


# %%
check("17.accept", accept)

# %% [markdown]
# ## 3. The best tree (15 minutes)
#
# **What.** `accuracy[d][r]`: how often the guess of rank r for depth d + 1 is right; depths count as independent. A
# node is a path of ranks, such as (0, 2): the likeliest first token, then the third likeliest. Choose `count`
# nodes, a tree, with the most expected accepted tokens: the sum over nodes of the product of accuracies along the
# path. **Why.** This is how Medusa's static tree is made. A budget of nodes is a budget of rows in the forward.
#
# <details><summary>Hint 1: a nudge</summary>
# No node is likelier than its parent. So what happens if you simply take the likeliest nodes?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Keep a list of nodes that could be added; at first the paths (r,) of depth 1. Take the one with the largest product,
# add its children (path + (r,), for each r, while there is a depth left) to the list, repeat.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# All of depth 1: the children of what was taken were never candidates. A plain chain: siblings were not. Accuracies
# of the wrong depth: a node of depth d reads accuracy[d - 1]. The last accuracy alone is not the path's.
# </details>


# %%
def best_tree(accuracy, count):
    """A list of `count` paths (tuples of ranks), in any order; every path's parent is in it too.

    Example: best_tree([[0.6, 0.3], [0.4, 0.1]], 3) is [(0,), (1,), (0, 0)].
    """
    ### BEGIN SOLUTION
    open_, chosen = {(r,): a for r, a in enumerate(accuracy[0])}, []
    while len(chosen) < count:
        path = max(open_, key=open_.get)
        value = open_.pop(path)
        chosen.append(path)
        if len(path) < len(accuracy):
            open_ |= {(*path, r): value * a for r, a in enumerate(accuracy[len(path)])}
    return chosen
    ### END SOLUTION


# %%
check("17.best_tree", best_tree)

# %% [markdown]
# ## 4. Debug it: words that were never said (15 minutes)
#
# **What.** After verification the cache is settled: `memory` is a list, what is stored at each place. The first
# `known` places hold the text; behind them lie the tree's nodes, in order. The accepted path moves down to where a
# plain run would have put it, and the rest is cut. `memory` is changed in place; the new length is returned.
#
# It has served chains for a year. Since trees were switched on, texts drift: every token is accepted by the rules,
# and yet after some steps the answer is not what plain decoding says. Find the line and mend it. **Why.** A cousin
# that stays in the cache is attended to by every later token, as if it had been said.
#
# <details><summary>Hint 1: a nudge</summary>
# Try it on a path that leaves gaps: known = 2, four nodes, path [1, 3]. How long should the memory be?
# </details>
# <details><summary>Hint 2: the plan</summary>
# As many places stay behind the text as nodes were accepted. A path is as long as its last node's index + 1 only if
# it is a chain.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Nothing accepted: nothing of the tree stays. Right length, wrong things: copy before you cut. The list that was
# handed in must change: `del memory[n:]`, not a new list.
# </details>


# %%
def settle(memory, known, path):
    """Keep the text and the accepted path, in order. Returns the new length.

    Example: memory = ["a", "b", "w", "x", "y", "z"], known 2, path [1, 3] -> memory ["a", "b", "x", "z"], returns 4.
    """
    ### BEGIN SOLUTION
    for place, node in enumerate(path):
        memory[known + place] = memory[known + node]
    del memory[known + len(path) :]
    return len(memory)
    ### END SOLUTION
    ### BEGIN GIVEN
    # for place, node in enumerate(path):
    #     memory[known + place] = memory[known + node]
    # del memory[known + (path[-1] + 1 if path else 0) :]
    # return len(memory)
    ### END GIVEN


# %%
check("17.settle", settle)

# %% [markdown]
# ## 5. Estimate it: an 8B model on one card (10 minutes)
#
# **What.** Hidden size 4096, vocabulary 128 256, weights in 16 bits. The card: 3.35 TB/s, and 800 TFLOP/s in 16 bits.
# - `heads_mb`: megabytes (10^6) of 5 Medusa heads, one 4096 x 4096 matrix and a bias each, the vocabulary matrix
#   shared;
# - `own_vocabulary_mb`: the same if each head also has a vocabulary matrix of its own;
# - `tokens_per_call`: a tree of one first guess right with 0.6, its alternative with 0.2, and below each of these one
#   node, right with 0.5 given that its parent is;
# - `batch`: requests, each with a tree of 25 nodes, at which the forward turns from bound by reading weights to bound
#   by arithmetic: rows x 2 FLOP a weight take as long as reading the weight's 2 bytes. Rows: 26 a request.
#
# **Why.** The first two say why heads are shared or small; the last says where a tree stops being free.
#
# <details><summary>Hint 1: a nudge</summary>
# Which of the four are plain products? For the third, remember the token that comes out whatever happens.
# </details>
# <details><summary>Hint 2: the plan</summary>
# 2 bytes a weight. Tokens: 1 + the sum over nodes of the probability that the path is right. Rows at the ridge:
# FLOP/s / bytes/s, times 2 bytes, over 2 FLOP; then divide by 26.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Half: 4-byte and 2-byte weights mixed up. Tokens above 2.2: the lower nodes count 0.5 each, without their parents.
# Batch 240: that is rows, not requests.
# </details>


# %%
def estimates():
    """{"heads_mb": ..., "own_vocabulary_mb": ..., "tokens_per_call": ..., "batch": ...}; not rounded."""
    ### BEGIN SOLUTION
    heads = 5 * (4096 * 4096 + 4096) * 2
    return {
        "heads_mb": heads / 1e6,
        "own_vocabulary_mb": (heads + 5 * 4096 * 128256 * 2) / 1e6,
        "tokens_per_call": 1 + 0.6 + 0.2 + 0.6 * 0.5 + 0.2 * 0.5,
        "batch": 800e12 / 3.35e12 * 2 / 2 / 26,
    }
    ### END SOLUTION


# %%
check("17.estimates", estimates)
