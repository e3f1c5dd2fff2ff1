# %% [markdown]
# # Exercise 07: prefix caching
#
# Six tasks, about 85 minutes: the key of a block, the longest stored prefix, eviction that respects references, a
# radix tree, an engine that serves a stranger's block, and the figures of a chat. Chapter:
# `notebooks/07_prefix_caching.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. A check may be run as often as you
# like.

# %%
from collections import OrderedDict
from hashlib import sha256

from minillm.lab import check

# %% [markdown]
# ## 1. The key of a block (10 minutes)
#
# **What.** One key for each *whole* block of a prompt. Two keys are equal exactly when the two blocks end equal
# prefixes under the same salt.
# **Why.** K and V of a token depend on every token before it. The same words after other words have other K and V,
# and a key that does not know this serves wrong ones.
#
# A key is a `bytes`, `str` or `int` of a size that does not grow with the prompt. Two different prefixes must never
# share a key because of how tokens and salt are *written down*, nor because a key is short: among 300,000 keys of 32
# bits some are equal. That sha256 itself has no collisions you may assume.
# (Python's own `hash` passes here as well, for nobody here builds a collision. A server is less lucky: chapter 07.)
#
# <details><summary>Hint 1: a nudge</summary>
# What do you need to know about the tokens before a block, and who knows it already?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Keep one running value. It starts from the salt. For each whole block: hash the running value together with the
# block's tokens; the digest is the block's key and the next running value.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Equal keys after different prefixes: the running value is not in the hash. One key too many: the last, partial
# block has none. Equal keys under two salts: the salt is nowhere, or not all of it. Equal keys for [1, 23] and
# [12, 3]: the tokens were joined without a separator. For [1, 0] and [0, 31]: they became one number, by a base that
# a token can exceed.
# </details>


# %%
def block_keys(tokens, block_size, salt=""):
    """A list of len(tokens) // block_size keys. tokens: list of int (0 to 10**6), salt: any str.

    Example: block_keys([1, 2, 3, 4, 5], 2) has two keys; the first is that of block_keys([1, 2, 9], 2), too.
    """
    ### BEGIN SOLUTION
    keys, key = [], sha256(salt.encode()).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        chunk = ",".join(map(str, tokens[start : start + block_size]))
        key = sha256(key + chunk.encode()).digest()
        keys.append(key)
    return keys
    ### END SOLUTION


# %%
check("07.block_keys", block_keys)

# %% [markdown]
# ## 2. The longest stored prefix (15 minutes)
#
# **What.** Which stored blocks may this prompt use? `store` maps a key to `(block, prefix)`, where `prefix` is the
# tuple of *all* tokens up to the block's end. `key_of(parent_key, chunk)` makes a key from the key before (`b""`
# for the first block) and the tuple of the block's tokens. **This `key_of` may collide**: in some of the tests it
# does so all the time. The store also holds other tenants' entries, under keys that `key_of` does not give here.
# **Why.** This is the hit path of the cache. Every rule here is a bug that some engine has had.
#
# - Blocks come in order from the first; where one is missing, nothing behind it can be used.
# - A hit counts only if the stored prefix *is* the prompt's.
# - At least one token of the prompt is left to compute: its logits are what the request came for.
#
# <details><summary>Hint 1: a nudge</summary>
# Of a prompt of 8 tokens in blocks of 4, how many blocks may be used at most? And of 9?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Leave the last token out, then go through the whole blocks of the rest. Make the key from the key before. Look it
# up; compare the stored prefix with tokens[:end]; stop at the first that is missing or differs.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# One block too many where the whole prompt is stored: the last token was served. Too many blocks with a colliding
# key: the tokens are not compared, or only the last block's own. Too many after a gap: `continue` in place of
# `break`. Nothing is ever found: a list is compared with a tuple, or `key_of` was handed a list.
# </details>


# %%
def longest_prefix(tokens, block_size, store, key_of):
    """The list of blocks that a prompt may share. tokens: list of int.

    Example, with key_of = lambda parent, chunk: parent + bytes(chunk), blocks of 2 and
    store = {b"\\x01\\x02": (7, (1, 2))}: longest_prefix([1, 2, 3], 2, store, key_of) is [7], for [1, 2] it is [].
    """
    ### BEGIN SOLUTION
    blocks, key = [], b""
    for end in range(block_size, len(tokens), block_size):  # at most len(tokens) - 1 tokens
        key = key_of(key, tuple(tokens[end - block_size : end]))
        block, prefix = store.get(key, (None, None))
        if prefix != tuple(tokens[:end]):
            break
        blocks.append(block)
    return blocks
    ### END SOLUTION


# %%
check("07.longest_prefix", longest_prefix)

# %% [markdown]
# ## 3. Eviction that respects references (15 minutes)
#
# **What.** A class that counts who holds a stored block and picks the next one to evict: the least recently used
# among those that *nobody* holds.
# **Why.** A block that a running request reads must never be evicted; among the rest, the order decides the hit
# rate.
#
# - `hold(blocks)`: one more request holds each of these (all in this list are stored blocks; new ones included).
# - `let_go(blocks)`: one request fewer. `blocks` is in the order of the prompt. A block nobody holds any more may
#   be evicted, and of one such list the *tail* goes before the head: without its head a tail cannot be found.
# - `evict()`: forget the least recently let go block that nobody holds, and return it; `None` if there is none.
#
# <details><summary>Hint 1: a nudge</summary>
# A block is held by two requests, and one of them finishes. May it go?
# </details>
# <details><summary>Hint 2: the plan</summary>
# A dictionary of counts, and an OrderedDict of blocks with count 0. `hold` takes a block out of it, `let_go` puts
# it at the end once its count is 0, going through the list from the back; `evict` takes the first.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# A held block is evicted: `hold` must take it out of the queue, and `let_go` must look at the count. Head before
# tail: go through the list in reverse. An old block goes too early: being let go again makes it the most recent
# one.
# </details>


# %%
class Evictor:
    """Counts of stored blocks, and the order in which they may go.

    Example: e = Evictor(); e.hold([4, 5]); e.let_go([4, 5]); e.evict() is 5, then 4, then None.
    """

    def __init__(self):
        ### BEGIN SOLUTION
        self.counts, self.unheld = {}, OrderedDict()  # unheld: least recently let go first
        ### END SOLUTION

    def hold(self, blocks):
        """One more request holds each of these."""
        ### BEGIN SOLUTION
        for block in blocks:
            self.counts[block] = self.counts.get(block, 0) + 1
            self.unheld.pop(block, None)
        ### END SOLUTION

    def let_go(self, blocks):
        """One request fewer holds each of these."""
        ### BEGIN SOLUTION
        for block in reversed(blocks):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.unheld[block] = None
        ### END SOLUTION

    def evict(self):
        """The block that goes next, or None."""
        ### BEGIN SOLUTION
        if not self.unheld:
            return None
        block, _ = self.unheld.popitem(last=False)
        del self.counts[block]
        return block
        ### END SOLUTION


# %%
check("07.evictor", Evictor)

# %% [markdown]
# ## 4. A radix tree (25 minutes)
#
# **What.** A tree whose edges carry stretches of tokens; here a block is one token, so an edge can be split
# anywhere.
#
# - `match(tokens)`: how many tokens, from the first on, are stored as the beginning of something.
# - `insert(tokens)`: store them; return how many tokens are *new*.
# - `edges()`: the stretches on all edges as a list of tuples, in any order. No token is stored twice, no edge is
#   empty, and an edge is not cut where nothing parts or ends.
#
# **Why.** It is the index of SGLang. Splitting is the whole difficulty: after `insert([1, 2, 3])` and
# `insert([1, 2, 4])`, the stretch `(1, 2)` is shared, and `(3,)` and `(4,)` hang below it.
#
# <details><summary>Hint 1: a nudge</summary>
# When you stand at a node and the next token is t, how many of its edges can begin with t?
# </details>
# <details><summary>Hint 2: the plan</summary>
# A node is a stretch and a dictionary from first token to child. Walk: take the child by the next token, count how
# many tokens agree. All of the stretch: go on below. Part of it: split. The node keeps the part that agrees; a new
# child gets the rest, *and all of the old children*. Then hang what is left of the new tokens below.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# `match` too small after a split: the old children were lost, or stayed at the upper half. Tokens twice in
# `edges()`: the split made a copy. `insert` counts too much: only what was not stored is new. Fails on what ends
# inside an edge: nothing is left to hang below it then, and nothing may be added.
# </details>


# %%
class RadixTree:
    """A compressed prefix tree over tokens.

    Example: t = RadixTree(); t.insert([1, 2, 3]) is 3; t.insert([1, 2, 4]) is 1; t.match([1, 2, 9]) is 2;
    sorted(t.edges()) is [(1, 2), (3,), (4,)].
    """

    def __init__(self):
        ### BEGIN SOLUTION
        self.children = {}  # first token -> [stretch, children]
        ### END SOLUTION

    def match(self, tokens):
        """How many tokens, from the first on, are stored."""
        ### BEGIN SOLUTION
        children, place = self.children, 0
        while place < len(tokens) and tokens[place] in children:
            stretch, children = children[tokens[place]]
            for token in stretch:
                if place == len(tokens) or token != tokens[place]:
                    return place
                place += 1
        return place
        ### END SOLUTION

    def insert(self, tokens):
        """Store tokens; returns how many of them are new."""
        ### BEGIN SOLUTION
        children, place = self.children, 0
        while place < len(tokens) and tokens[place] in children:
            node = children[tokens[place]]
            stretch, below = node
            same = 0
            while same < len(stretch) and place + same < len(tokens) and stretch[same] == tokens[place + same]:
                same += 1
            place += same
            if place == len(tokens):
                return 0
            if same < len(stretch):  # they part inside: split
                below = {stretch[same]: [stretch[same:], below]}
                node[:] = [stretch[:same], below]
            children = below
        rest = tuple(tokens[place:])
        if rest:
            children[rest[0]] = [rest, {}]
        return len(rest)
        ### END SOLUTION

    def edges(self):
        """The stretches on all edges, a list of tuples in any order."""
        ### BEGIN SOLUTION
        found, todo = [], list(self.children.values())
        while todo:
            stretch, children = todo.pop()
            found.append(stretch)
            todo += children.values()
        return found
        ### END SOLUTION


# %%
check("07.radix_tree", RadixTree)

# %% [markdown]
# ## 5. Debug it: the answer about somebody else's contract (15 minutes)
#
# **What.** Under load, some answers are about another customer's document. `admit` gives a prompt its blocks:
# stored ones as far as they go, free ones for the rest. With a large pool every test passes. Two things are wrong
# once blocks are *reused*; mend both.
# **Why.** Both have happened in real engines, both are silent, and both need a full pool to show.
#
# - `keys`: one key for each whole block of the prompt (the last token is taken care of elsewhere).
# - `free`: list of blocks nobody holds, least recently used first. Stored blocks stay in it until they are needed.
# - `counts`: list, holders of each block. `block_of`: key to block, `key_of`: block to key, of what is stored now.
# - A prompt that ends lets its blocks go from the back, so a tail is always evicted before its head: what is stored
#   of a prompt has no gaps.
# - All four are changed in place. Returns `(blocks of the prompt, number of reused ones)`. There is always room.
#
# <details><summary>Hint 1: a nudge</summary>
# A pool of three blocks. Admit a prompt of three, let it go, admit another one of three. What does `block_of` say
# now about the first prompt?
# </details>
# <details><summary>Hint 2: the plan</summary>
# First: a block that gets new content must leave the index under its old key. Second: the blocks that were just
# found are still in `free` when the fresh ones are taken. Which comes first, holding or taking?
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Reused blocks after their content is gone: the old key is still in `block_of`. A block twice in one table: hold
# the found blocks, and take them out of `free`, before taking fresh ones. `key_of` and `block_of` must agree with
# each other.
# </details>


# %%
def admit(keys, free, counts, block_of, key_of):
    """Give a prompt its blocks. Returns (blocks, how many were reused). Changes free, counts, block_of, key_of."""
    ### BEGIN SOLUTION
    hit = []
    for key in keys:
        if key not in block_of:
            break
        hit.append(block_of[key])
    for block in hit:
        counts[block] += 1
        if block in free:
            free.remove(block)
    fresh = [free.pop(0) for _ in keys[len(hit) :]]
    for block in fresh:
        if block in key_of:
            del block_of[key_of.pop(block)]
    for block, key in zip(fresh, keys[len(hit) :]):
        counts[block] = 1
        block_of[key], key_of[block] = block, key
    return hit + fresh, len(hit)
    ### END SOLUTION
    ### BEGIN GIVEN
    # hit = []
    # for key in keys:
    #     if key not in block_of:
    #         break
    #     hit.append(block_of[key])
    # fresh = [free.pop(0) for _ in keys[len(hit) :]]
    # for block in hit:
    #     counts[block] += 1
    #     if block in free:
    #         free.remove(block)
    # for block, key in zip(fresh, keys[len(hit) :]):
    #     counts[block] = 1
    #     block_of[key], key_of[block] = block, key
    # return hit + fresh, len(hit)
    ### END GIVEN


# %%
check("07.admit", admit)

# %% [markdown]
# ## 6. Estimate it: a chat service (10 minutes)
#
# **What.** Four numbers, the first and the third to within 1 %, `hit_rate` and `working_set` to within 0.1 %. A
# system prompt of 1,000 tokens, then 10 turns: a question of 50 tokens, an answer of 150. Each turn's prompt is all
# that was said so far. Leave rounding to blocks out; answers count as stored.
#
# | key | what |
# |---|---|
# | `"prompt_tokens"` | prompt tokens sent in one conversation, all ten turns together |
# | `"hit_rate"` | hit rate (tokens) of one conversation whose system prompt *another user has already brought in* |
# | `"ttft_ratio"` | TTFT warm / cold of turn 10, if TTFT = 20 ms + 0.1 ms x computed tokens |
# | `"working_set"` | tokens of KV that 200 such conversations fill after turn 10, system prompt shared |
#
# **Why.** The first three say what the cache earns; the last says from which pool size on it earns it.
#
# <details><summary>Hint 1: a nudge</summary>
# What is the prompt of turn 1? Of turn 2? By how much does it grow each time?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Prompt of turn i from 0: 1,050 + 200 i. Found of it: all but the 50 new tokens. TTFT: put computed tokens in the
# line, once all of them, once 50. Working set: what is shared counts once.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# A hit rate near 0.92: the system prompt was counted as missed in turn 1. 0.9717: the mean of ten rates, not the
# rate of all tokens. TTFT ratio 0.0175: the 20 ms are left out. 600,000: the system prompt was counted 200 times.
# 371,000: the last answer is missing.
# </details>


# %%
def chat_figures():
    """Return a dict with the four keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    prompts = [1000 + 50 + 200 * turn for turn in range(10)]
    found = [prompt - 50 for prompt in prompts]
    return {
        "prompt_tokens": sum(prompts),
        "hit_rate": sum(found) / sum(prompts),
        "ttft_ratio": (20 + 0.1 * 50) / (20 + 0.1 * prompts[-1]),
        "working_set": 1000 + 200 * 10 * 200,
    }
    ### END SOLUTION


# %%
check("07.chat_figures", chat_figures)

# %% [markdown]
# **Done?** Give `SmallPrefixCache` of the chapter your own `block_keys`, and run the chapter's traces with it: the
# answers must not change. Next: Part III, kernels.
