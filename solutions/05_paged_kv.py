# %% [markdown]
# # Exercise 05: the paged KV cache
#
# Six tasks, about 80 minutes: where a token is, when a new block is needed, a pool that counts, copy-on-write, a
# pool that shrinks under load, and how many requests fit. Chapter: `notebooks/05_paged_kv.ipynb`.
#
# Replace `raise NotImplementedError`, run the cell, then run the check below it. No tensors in this one: what is
# paged is decided by whole numbers.

# %%
from minillm.cache.block_pool import NoRoom
from minillm.lab import check

# %% [markdown]
# ## 1. The slot mapping (5 minutes)
#
# **What.** A request's tokens lie in blocks; `blocks` names them in order. A slot is a place in the flat cache:
# block b of size s is slots b s to b s + s - 1. Where are tokens `start` to `start + count - 1`? **Why.** The one
# line of indirection in every paged engine: K and V are written there, and read from there.
#
# <details><summary>Hint 1: a nudge</summary>
# Which entry of the table does token 5 need if blocks have 4 slots? And which place in that block?
# </details>
# <details><summary>Hint 2: the plan</summary>
# For each token i: blocks[i // block_size] * block_size + i % block_size.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Right while the table is 0, 1, 2 ...: the table is not used. Right for start 0 only: count from `start`, not from
# 0. Small numbers that repeat: the offset alone, or the block's number not multiplied by its size.
# </details>


# %%
def slot_mapping(blocks, block_size, start, count):
    """Slots of tokens start .. start + count - 1, a list of ints.

    Example: slot_mapping([7, 2], 4, 3, 3) is [31, 8, 9].
    """
    ### BEGIN SOLUTION
    return [blocks[i // block_size] * block_size + i % block_size for i in range(start, start + count)]
    ### END SOLUTION


# %%
check("05.slot_mapping", slot_mapping)

# %% [markdown]
# ## 2. When is a new block needed? (10 minutes)
#
# **What.** Give a request room for `count` more tokens. It holds `blocks` and has `length` tokens in them; `free`
# lists the free blocks, the one to take next at the front. Change both lists in place and return the new length. If
# there are too few free blocks, raise `NoRoom` and change nothing. A request may hold a spare block, one with no
# token in it yet: it keeps it, and fills it first. Nothing is shared in this task. **Why.** It runs for every
# request at every step. A block too early is memory for nobody; a block too late is a write into somebody else's.
#
# <details><summary>Hint 1: a nudge</summary>
# A request of 8 tokens in blocks of 4: how much room is left in its last block?
# </details>
# <details><summary>Hint 2: the plan</summary>
# Blocks for n tokens: -(-n // block_size), division rounded up. Needed: blocks for length + count, less those it
# has. Look at `len(free)` before you take anything.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# One block too many when length + count is a multiple of the size: `n // size + 1` is not "rounded up". A long
# prompt gets one block: more than one may be needed. After NoRoom lists have changed: count first, then take. Right
# results, wrong blocks: `pop()` takes from the end.
# </details>


# %%
def append(blocks, length, count, block_size, free):
    """Room for `count` more tokens. Changes `blocks` and `free`; returns the new length. Raises NoRoom.

    Example: blocks = [5], length 3, count 2, block_size 4, free = [8, 1] -> returns 5; blocks [5, 8], free [1].
    """
    ### BEGIN SOLUTION
    needed = -(-(length + count) // block_size) - len(blocks)
    if needed > len(free):
        raise NoRoom(f"{needed} blocks needed, {len(free)} free")
    for _ in range(needed):
        blocks.append(free.pop(0))
    return length + count
    ### END SOLUTION


# %%
check("05.append", append)

# %% [markdown]
# ## 3. A pool that counts (20 minutes)
#
# **What.** The pool of all blocks, 0 to num_blocks - 1, each with the number of tables that hold it.
#
# | method | does | error, nothing changed |
# |---|---|---|
# | `allocate(n)` | returns a list of n free blocks, each now of count 1 | `NoRoom` if fewer are free |
# | `share(blocks)` | a fork: one more table holds each of them | `ValueError` if one of them is free |
# | `free(blocks)` | one table fewer holds each; at count 0 it is free | `ValueError` if one of them is free already |
# | `count(block)` | its count | |
# | `free_count` | how many blocks are free (a property: no brackets) | |
#
# Which free block is handed out first is up to you. Lists that go in or come out are the caller's, who may change
# them afterwards. **Why.** With the invariant "free + held = all, and a count is the number of tables that hold the
# block", every leak and every double use is found by one assertion.
#
# <details><summary>Hint 1: a nudge</summary>
# A block with count 2 is freed. Who may use it now?
# </details>
# <details><summary>Hint 2: the plan</summary>
# A list of counts, all 0, and a list of free blocks. In each method: first look whether all of it is possible,
# raise if not; then change.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Blocks handed out twice: freed while others hold them. free_count falls for ever: never put back. Counts changed
# after an error: checked inside the loop that changes. A list that frees a block twice needs two tables: [3, 3]
# with count 1 is an error.
# </details>


# %%
class Pool:
    """Blocks 0 .. num_blocks - 1 and how many tables hold each."""

    def __init__(self, num_blocks):
        ### BEGIN SOLUTION
        self.counts = [0] * num_blocks
        self.unused = list(range(num_blocks))
        ### END SOLUTION

    @property
    def free_count(self):
        """How many blocks are free."""
        ### BEGIN SOLUTION
        return len(self.unused)
        ### END SOLUTION

    def count(self, block):
        """The number of tables that hold this block."""
        ### BEGIN SOLUTION
        return self.counts[block]
        ### END SOLUTION

    def allocate(self, n):
        """A list of n blocks of count 1, or NoRoom."""
        ### BEGIN SOLUTION
        if n > len(self.unused):
            raise NoRoom(f"{n} asked for, {len(self.unused)} free")
        blocks, self.unused = self.unused[:n], self.unused[n:]
        for block in blocks:
            self.counts[block] = 1
        return blocks
        ### END SOLUTION

    def share(self, blocks):
        """One more table holds each of these."""
        ### BEGIN SOLUTION
        if any(self.counts[block] == 0 for block in blocks):
            raise ValueError("a free block cannot be shared")
        for block in blocks:
            self.counts[block] += 1
        ### END SOLUTION

    def free(self, blocks):
        """One table fewer holds each of these."""
        ### BEGIN SOLUTION
        if any(self.counts[block] < blocks.count(block) for block in blocks):
            raise ValueError("freed more often than held")
        for block in blocks:
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.unused.append(block)
        ### END SOLUTION


# %%
check("05.pool", Pool)

# %% [markdown]
# ## 4. Copy-on-write (20 minutes)
#
# **What.** One more token for one of several answers to a prompt. They share blocks: `pool` is a `BlockPool` of the
# library, with `allocate(n)`, `share(blocks)`, `free(blocks)` and `count(block)`. The request's `blocks` hold
# `length` tokens. Make the place for the next token this request's alone, change `blocks` in place, and return
#
# - the slot to write to, and
# - the list of `(source, target)` block copies that must be made before the write: at most one.
#
# If the pool has no block for it, let `NoRoom` out, with nothing changed. **Why.** The answers are right only if
# nobody's token lands in somebody else's text, and cheap only if nothing is copied without need.
#
# <details><summary>Hint 1: a nudge</summary>
# Three cases: the last block is full; it has room and is this request's alone; it has room and others hold it too.
# </details>
# <details><summary>Hint 2: the plan</summary>
# length % block_size == 0: allocate a block, append it, no copy, however many share the old one. Else, if
# pool.count(blocks[-1]) > 1: allocate, note (old, new), put new into the table, free the old *once*. The slot comes
# last, from the table as it is now.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# Other answers change: the slot was computed before the copy, or there was no copy. Copies on a block border: the
# last block is full, nobody writes there. Fewer and fewer free blocks: the old block's count was not lowered. A
# copy for the last holder: count 1 needs none.
# </details>


# %%
def next_slot(pool, blocks, length):
    """(slot of the next token, block copies to make first). Changes `blocks` and `pool`.

    Example: block size 4, blocks [2], length 3, count of block 2 is 2, block 5 is the next free one
    -> (5 * 4 + 3, [(2, 5)]), blocks [5], count of block 2 is 1.
    """
    ### BEGIN SOLUTION
    size, copies = pool.block_size, []
    if length % size == 0:
        blocks += pool.allocate(1)
    elif pool.count(blocks[-1]) > 1:
        old, (new,) = blocks[-1], pool.allocate(1)
        blocks[-1] = new
        pool.free([old])
        copies.append((old, new))
    return blocks[length // size] * size + length % size, copies
    ### END SOLUTION


# %%
check("05.next_slot", next_slot)

# %% [markdown]
# ## 5. Debug it: the pool that shrank (15 minutes)
#
# **What.** A request comes in whose first tokens are known: `prefix` names blocks that another request holds and
# that hold just these tokens, full ones. The function gives it a table: the prefix, shared, and new blocks for the
# rest. When there is no room it raises `NoRoom`, and the engine tries again at the next step.
#
# It works in every test. In production, under load, the number of free blocks sinks over hours; when the last
# request has ended some blocks are still "held", by nobody. After a restart all is well again, for hours. Find the
# line and mend it. **Why.** A call that fails must leave things as they were. The fault sits in the path that only
# runs when memory is short.
#
# <details><summary>Hint 1: a nudge</summary>
# Fill the pool, call it, catch `NoRoom`, look at `pool.count` of the prefix. Now call it a hundred times.
# </details>
# <details><summary>Hint 2: the plan</summary>
# Either allocate before you share, so that the call that can fail comes first, or catch NoRoom, free what was
# shared, and raise again.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# No error any more, but a wrong table: NoRoom must still get out. Free blocks grow beyond what is free: something
# was freed that was not shared here. All prefix blocks lost: free lowers by one what share raised by one, not more.
# </details>


# %%
def admit(pool, prefix, tokens):
    """Blocks for a text of `tokens` tokens that begins with what `prefix` holds. Raises NoRoom.

    Example: block size 4, prefix [3, 7], tokens 10 -> [3, 7, b] with a new block b; counts of 3 and 7 are one higher.
    """
    ### BEGIN SOLUTION
    new = pool.allocate(-(-tokens // pool.block_size) - len(prefix))
    pool.share(prefix)
    return [*prefix, *new]
    ### END SOLUTION
    ### BEGIN GIVEN
    # pool.share(prefix)
    # new = pool.allocate(-(-tokens // pool.block_size) - len(prefix))
    # return [*prefix, *new]
    ### END GIVEN


# %%
check("05.admit", admit)

# %% [markdown]
# ## 6. Estimate it: how many fit? (10 minutes)
#
# **What.** A 7B with grouped-query attention: 32 layers, 8 KV heads of 128, 16-bit numbers. 8 GB (8 x 10^9 bytes)
# are left for KV. Context 4,096 tokens; a running request holds 500 tokens on average. Write down expressions. The
# first and the fourth exactly, `paged_16` to 0.5 %, `paged_512` to 3 %.
#
# | key | what |
# |---|---|
# | `"reserved"` | requests that fit if each reserves its context (round down) |
# | `"paged_16"` | requests that fit in blocks of 16; count half a block of waste a request |
# | `"paged_512"` | the same in blocks of 512 |
# | `"shared_blocks"` | blocks of 16 held by one prompt of 1,000 tokens with 8 answers of 200 stored tokens each |
#
# **Why.** "How many users does this card serve?" is the capacity question, and this is its arithmetic.
#
# <details><summary>Hint 1: a nudge</summary>
# Bytes a token, then tokens in 8 GB. All four need only that and the block size.
# </details>
# <details><summary>Hint 2: the plan</summary>
# 2 x 32 x 8 x 128 x 2 bytes a token. Slots = 8e9 / that. Divide by 4,096; by 500 + 8; by 500 + 256. Last: 1,000
# tokens fill 62 blocks and half of a 63rd. The 62 stay shared; from there on each answer has its own.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
# 4 x too few: 32 KV heads in place of 8. Twice too many: V is missing. 600 blocks: nothing is shared. 63 + 8 x ...:
# the half-full block is written by all, so each has its own.
# </details>


# %%
def how_many():
    """Return a dict with the four keys of the table; numbers as values."""
    ### BEGIN SOLUTION
    slots = 8e9 / (2 * 32 * 8 * 128 * 2)
    shared = 1000 // 16
    return {
        "reserved": slots // 4096,
        "paged_16": slots / (500 + 16 / 2),
        "paged_512": slots / (500 + 512 / 2),
        "shared_blocks": shared + 8 * (-(-1200 // 16) - shared),
    }
    ### END SOLUTION


# %%
check("05.how_many", how_many)

# %% [markdown]
# **Done?** Put your `Pool` under the library's tables: `BlockTable` asks for no more than what you have written and
# a `holds(block)` that says False (chapter 07 gives it a better answer). Next: exercise 06, who gets the blocks
# when there are not enough.
