"""Checks of exercise 05. Oracles: slots counted out, texts kept as plain lists beside the memory, a dict of counters.

Chapter 05.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from minillm.cache.block_pool import BlockPool, NoRoom
from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.compare import as_number, describe, floats, whole
from minillm.lab.estimates import estimates, slips


def until_wrong(lines, expected: list | None = None) -> list[str]:
    """The lines of an answer, up to the first that is not as expected: what comes after would only confuse. An
    exception counts only if all was right before it."""
    got = []
    try:
        for line in lines:
            got.append(line)
            if expected is not None and line != expected[len(got) - 1]:
                break
    except Exception:
        if expected is None or got == expected[: len(got)]:
            raise
    return got


def lines_differ(got, expected):
    if not isinstance(got, list):
        return f"expected a list, got {got!r}"
    for line, right in zip(got, expected):
        if line != right:
            return f"expected {right}\n  got      {line}"
    return None if len(got) == len(expected) else "not all operations were run"


def operations(lines, right, what: str) -> Drive:
    """lines(answer): a generator of a line an operation. right: an answer that is known to be right."""
    expected = until_wrong(lines(right))
    return Drive(lambda answer: until_wrong(lines(answer), expected), expected, what, compare=lines_differ)


# 1


SLOTS = {
    "the table is not used: the tokens lie where the table says, not in a row": lambda b, s, t, n: list(
        range(t, t + n)
    ),
    "the block's number is not its first slot: multiply it by block_size": lambda b, s, t, n: [
        b[i // s] + i % s for i in range(t, t + n)
    ],
    "the offset in the block is missing": lambda b, s, t, n: [b[i // s] * s for i in range(t, t + n)],
    "only the offset in the block: which block?": lambda b, s, t, n: [i % s for i in range(t, t + n)],
    "that starts at token 0, not at token `start`": lambda b, s, t, n: [b[i // s] * s + i % s for i in range(n)],
    "that is `start` to `count`: the last token is start + count - 1": lambda b, s, t, n: [
        b[i // s] * s + i % s for i in range(t, n)
    ],
    "the offset must restart in each block: i % block_size": lambda b, s, t, n: [
        b[i // s] * s + i for i in range(t, t + n)
    ],
    "the offset is that of the token in the text, i % block_size, not of its place in this call": lambda b, s, t, n: [
        b[i // s] * s + (i - t) % s for i in range(t, t + n)
    ],
    "those are the slots' block numbers: slots are asked for": lambda b, s, t, n: [
        b[i // s] for i in range(t, t + n)
    ],
}


@register("05.slot_mapping", points=1, title="The slot mapping", hints=slips(SLOTS))
def slot_mapping(rng):
    plans = [([7, 2], 4, 3, 3), ([5], 8, 0, 8), ([9, 0, 4], 1, 0, 3), ([3, 1], 16, 16, 1), ([6, 2], 4, 5, 0)]
    for size in (2, 3, 5, 16):
        blocks = rng.sample(range(40), rng.randint(3, 6))
        start = rng.randint(1, size * 2 - 1)
        plans.append((blocks, size, start, rng.randint(1, len(blocks) * size - start)))
    plans.append((rng.sample(range(5000), 70), 33, 41, 2000))  # numbers that no byte holds, nor two of them
    for blocks, size, start, count in plans:
        everything = [slot for block in blocks for slot in range(block * size, block * size + size)]
        yield Case((blocks, size, start, count), everything[start : start + count], compare=whole)


# 2


def growing(needed=lambda n, size, have: -(-n // size) - have, end=False, early=True):
    """An `append` with a mistake in it."""

    def append(blocks, length, count, block_size, free):
        more = needed(length + count, block_size, len(blocks))
        if early and more > len(free):
            raise NoRoom
        for _ in range(more):
            if not free:
                raise NoRoom
            blocks.append(free.pop() if end else free.pop(0))
        return length + count

    return append


def sliced(blocks, length, count, block_size, free):
    more = -(-(length + count) // block_size) - len(blocks)
    if more > len(free):
        raise NoRoom
    blocks += free[:more]
    del free[:more]
    return length + count


def by_length(blocks, length, count, block_size, free):
    """What it holds is taken to be what `length` needs."""
    more = -(-(length + count) // block_size) - -(-length // block_size)
    return growing(lambda n, size, have: more)(blocks, length, count, block_size, free)


APPENDS = {
    "one block too many on a block border: rounding up is -(-n // size), not n // size + 1": growing(
        lambda n, size, have: n // size + 1 - have
    ),
    "rounded down: the last, part-filled block is missing": growing(lambda n, size, have: n // size - have),
    "several blocks may be needed at once: a prompt is longer than a block": growing(
        lambda n, size, have: min(1, -(-n // size) - have)
    ),
    "the blocks that it already holds are not taken off": growing(lambda n, size, have: -(-n // size)),
    "take from the front of the free list: pop(0)": growing(end=True),
    "after NoRoom something had changed: count what is needed before you take the first block": growing(early=False),
    "a request may hold a spare block: then the need is negative, and free[:-1] is nearly all of it": sliced,
    "a request may hold a spare block: count len(blocks), not what `length` needs": by_length,
}


def appended(plan):
    """A run: one call on copies. -> [what was returned or "NoRoom", blocks, free]."""
    blocks, length, count, size, free = plan

    def run(answer):
        mine, left = list(blocks), list(free)
        try:
            got = answer(mine, length, count, size, left)
        except NoRoom:
            got = "NoRoom"
        return [got, mine, left]

    return run


def append_by_tokens(blocks, length, count, size, free):
    """Token by token: a block is taken when a token finds every held slot used."""
    mine, left = list(blocks), list(free)
    for token in range(length, length + count):
        if token >= len(mine) * size:
            if not left:
                return ["NoRoom", list(blocks), list(free)]
            mine, left = [*mine, left[0]], left[1:]
    return [length + count, mine, left]


def unchanged(got, expected, case) -> bool:
    """The right length was returned, and both lists are as they were."""
    blocks, _, _, _, free = case.args
    return got == [expected[0], list(blocks), list(free)]


@register(
    "05.append",
    points=2,
    title="When is a new block needed?",
    hints=[
        Hint("the new length is not returned", when=lambda got, *_: isinstance(got, list) and got[0] is None),
        Hint("no block was taken: is one needed here? And are `blocks` and `free` changed in place?", when=unchanged),
        *slips(APPENDS),
    ],
)
def append(rng):
    plans = [([5], 3, 2, 4, [8, 1]), ([5], 3, 1, 4, [8, 1]), ([5], 4, 1, 4, [8, 1]), ([], 0, 8, 4, [3, 0, 6])]
    plans += [
        ([], 0, 1, 4, []),
        ([2], 4, 1, 4, []),
        ([2], 3, 1, 4, []),
        ([2, 7], 8, 9, 4, [1, 5]),
        ([4], 2, 0, 4, [9]),
    ]
    plans += [([], 0, 13, 4, [5, 3, 8, 0, 1]), ([6, 1, 2], 3, 2, 1, [4, 9]), ([3], 16, 1, 16, [8, 2])]
    plans += [([5, 6], 2, 1, 4, [8, 1, 3]), ([5, 6], 4, 3, 4, [8, 1, 3])]  # a block to spare
    for _ in range(4):
        size, held = rng.randint(2, 7), rng.randint(0, 3)
        blocks = rng.sample(range(30), held + rng.randint(1, 4))
        length = max(0, held * size - rng.randint(0, size - 1))
        plans.append((blocks[:held], length, rng.randint(1, 3 * size), size, blocks[held:]))
    many = rng.sample(range(900), 200)
    plans += [(many[:40], 40 * 29 - 3, 2000, 29, many[40:]), ([], 0, 8000, 129, many)]
    for plan in plans:
        blocks, length, count, size, free = plan
        call = f"append({blocks}, {length}, {count}, {size}, free={free}), then [result, blocks, free]"
        drive = Drive(appended(plan), append_by_tokens(*plan), call, compare=whole)
        drive.args = plan  # for `unchanged`
        yield drive


# 3


class PoolModel:
    """What a pool must do, with a Counter and no lists; `slip` builds a mistake in."""

    def __init__(self, num_blocks, slip=""):
        self.held, self.num_blocks, self.slip, self.given = Counter(), num_blocks, slip, []

    @property
    def free_count(self):
        return self.num_blocks - sum(count > 0 for count in self.held.values())

    def count(self, block):
        return self.held[block]

    def allocate(self, n):
        if n > self.free_count and self.slip != "half":
            raise NoRoom
        blocks = [block for block in range(self.num_blocks) if not self.held[block]][:n]
        self.held.update(blocks)
        if len(blocks) < n:
            raise NoRoom
        return blocks

    def share(self, blocks):
        for block in blocks:
            if not self.held[block]:
                raise ValueError
            if self.slip == "half share":
                self.held[block] += 1
        if self.slip not in ("half share", "no share"):
            self.held.update(blocks)

    def free(self, blocks):
        times = Counter(blocks)
        for block in blocks:
            if self.held[block] < (1 if self.slip == "half free" else times[block]):
                raise ValueError
            if self.slip == "half free":
                self.held[block] -= 1
        if self.slip != "half free":
            self.held = Counter(
                {b: 0 if self.slip == "all" and b in times else n - times[b] for b, n in self.held.items()}
            )


def pool_slip(name):
    return lambda num_blocks: PoolModel(num_blocks, name)


POOLS = {
    "a shared block is free only when the last table lets go: lower the count by one, look whether it is 0": "all",
    "share must raise the count, or the first free takes the block from the others": "no share",
    "a failed allocation has changed something: compare n with what is free first": "half",
    "a failed share has changed counts: check all blocks before you raise any": "half share",
    "a failed free has changed counts: check all blocks before you lower any": "half free",
}


def plain(x):
    """A Python number for a number of numpy's or torch's."""
    number = as_number(x)
    return x if number is None else number


def play(plan, num_blocks):
    """The operations one by one. Blocks are named by the allocation that gave them: any order of the free list is
    right. Counts are shown of all groups that somebody holds, and added up over all blocks."""

    def lines(answer):
        pool, groups, holders = answer(num_blocks), [], []
        for what, value in plan:
            outcome = "done"
            try:
                if what == "allocate":
                    taken = {block for blocks, n in zip(groups, holders) if n for block in blocks}
                    blocks, outcome = allocated(pool, value, num_blocks, taken)
                    groups.append(blocks)
                    holders.append(1)
                else:
                    outcome = handed(getattr(pool, what), [block for i in value for block in groups[i]])
                    for i in value if outcome == "done" else ():
                        holders[i] += 1 if what == "share" else -1
            except (NoRoom, ValueError) as error:
                outcome = type(error).__name__
            counts = {i: [plain(pool.count(b)) for b in group] for i, group in enumerate(groups) if holders[i] > 0}
            each = [plain(pool.count(block)) for block in range(num_blocks)]
            total = "unknown: count() returned None" if None in each else sum(each)
            yield f"{what}({value}): {outcome}; free {free_blocks(pool)}, counts {counts}, in all {total}"

    return lines


def allocated(pool, n, num_blocks, taken):
    """(a copy of the list, the outcome). The list itself is the caller's, who empties it."""
    given = pool.allocate(n)
    if not isinstance(given, Iterable):
        return [], f"returned {describe(given)}, not a list of blocks"
    blocks = [plain(block) for block in given]
    if isinstance(given, list):
        given.clear()
    if len(set(blocks)) != n or len(blocks) != n or not set(blocks) <= set(range(num_blocks)):
        return blocks, f"gave {blocks}"
    return blocks, "gave a block that others hold" if taken & set(blocks) else "done"


def handed(method, blocks):
    """Call share or free with a list that is the caller's, who empties it. -> the outcome"""
    given, outcome = list(blocks), "done"
    try:
        method(given)
    except (NoRoom, ValueError) as error:
        outcome = type(error).__name__
    if given != blocks:
        outcome = "changed the list that it was given"
    given.clear()
    return outcome


def free_blocks(pool):
    free = pool.free_count
    return "? (free_count is a method: make it a property, no brackets)" if callable(free) else plain(free)


def accepted(operation: str):
    """A `when`: the first wrong line is this operation, done where it had to be refused."""

    def when(got, expected, case) -> bool:
        line = got[-1] if isinstance(got, list) and got else ""
        return line.startswith(operation) and ": done" in line and ": ValueError" in expected[len(got) - 1]

    return when


def uncounted(got, expected, case) -> bool:
    """The first wrong line is an allocation after which nothing is held."""
    line = got[-1] if isinstance(got, list) and got else ""
    return line.startswith("allocate") and ": done" in line and line.endswith("in all 0")


@register(
    "05.pool",
    points=3,
    title="A pool that counts",
    hints=[
        *slips({text: pool_slip(name) for text, name in POOLS.items()}),
        Hint("no count went up; or it stands in the list that you returned: the caller empties that", when=uncounted),
        Hint("a list may name a block twice: [b, b] needs two tables that hold b", when=accepted("free([0, 0])")),
        Hint("a block of count 0 was freed again: that is a double free, raise ValueError", when=accepted("free")),
        Hint("a free block was shared: it has no content, raise ValueError", when=accepted("share")),
    ],
)
def pool(rng):
    """Groups of blocks are named by the allocation that gave them: share([0]) shares what allocation 0 gave."""
    plans = [
        (4, [("allocate", 3), ("free", [0]), ("allocate", 4), ("free", [1]), ("allocate", 0)]),
        (4, [("allocate", 2), ("share", [0]), ("free", [0]), ("allocate", 2), ("free", [0]), ("allocate", 2)]),
        (3, [("allocate", 2), ("allocate", 2), ("allocate", 1), ("allocate", 1), ("allocate", 0), ("free", [0])]),
        (3, [("allocate", 1), ("free", [0]), ("free", [0]), ("allocate", 3)]),
        (4, [("allocate", 1), ("allocate", 1), ("free", [1]), ("free", [0, 1]), ("allocate", 3)]),
        (4, [("allocate", 1), ("allocate", 1), ("free", [1]), ("share", [0, 1]), ("allocate", 3)]),
        (3, [("allocate", 1), ("free", [0, 0]), ("share", [0]), ("free", [0, 0]), ("allocate", 3)]),
        (3, [("allocate", 1), ("free", [0]), ("share", [0]), ("allocate", 3)]),
        (3, [("allocate", 1), ("share", [0, 0]), ("free", [0, 0]), ("free", [0]), ("allocate", 3)]),
        (3, [("allocate", 1), ("share", [0]), ("share", [0]), ("free", [0]), ("free", [0]), ("free", [0])]),
    ]
    for num_blocks in (5, 7, 9):
        plans.append((num_blocks, random_plan(rng, num_blocks)))
    plans.append((300, random_plan(rng, 300, most=70)))
    for num_blocks, plan in plans:
        what = f"Pool({num_blocks}), {len(plan)} operations; group i is what allocation i gave"
        yield operations(play(plan, num_blocks), PoolModel, what)


def random_plan(rng, num_blocks, count=40, most=4):
    """Operations on groups that somebody holds; some allocations cannot be met."""
    free, holders, sizes, plan = num_blocks, [], [], []
    for _ in range(count):
        alive = [i for i, n in enumerate(holders) if n]
        what = rng.choice(("allocate", "share", "free", "free")) if alive else "allocate"
        if what == "allocate":
            size = rng.randint(1, most)
            if size <= free:
                free -= size
                holders.append(1)
                sizes.append(size)
            plan.append((what, size))
        else:
            i = rng.choice(alive)
            holders[i] += 1 if what == "share" else -1
            free += 0 if holders[i] else sizes[i]
            plan.append((what, [i]))
    return plan


# 4


def writing(always=False, never=False, border=False, early=False, keep=False, all_of_it=False, first=False):
    """A `next_slot` with a mistake in it."""

    def next_slot(pool, blocks, length):
        size, copies = pool.block_size, []
        slot = blocks[length // size] * size + length % size if length % size else None
        if length % size == 0 and not (border and blocks and pool.count(blocks[-1]) > 1):
            blocks += pool.allocate(1)
        elif not never and (always or pool.count(blocks[-1]) > 1):
            old = blocks[-1]
            if first:
                pool.free([old])
            (new,) = pool.allocate(1)
            blocks[-1] = new
            if all_of_it:
                pool.free([old] * pool.count(old))
            elif not keep and not first:
                pool.free([old])
            copies.append((old, new))
            if length % size == 0:
                blocks += pool.allocate(1)
        if not early or slot is None:
            slot = blocks[length // size] * size + length % size
        return slot, copies

    return next_slot


WRITES = {
    "no copy: the last block is shared, others read what is written there": writing(never=True),
    "the slot was computed before the copy: the token lands in the block that the others hold": writing(early=True),
    "the old block's count must go down: this table no longer holds it": writing(keep=True),
    "the others still hold the old block: lower its count by one": writing(all_of_it=True),
    "a block that only this table holds needs no copy": writing(always=True),
    "after NoRoom a count had changed: allocate first, then free the old block": writing(first=True),
    "on a block border the last block is full: nobody writes there, so it stays shared": writing(border=True),
}


class Texts:
    """Answers to one prompt, with every word in the memory of slots, and beside it in plain lists."""

    def __init__(self, num_blocks, size):
        self.pool, self.size, self.memory = BlockPool(num_blocks, size), size, {}
        self.tables, self.words = [], []

    def write(self, next_slot, i, word):
        """One token through the answer under test. -> "NoRoom", or how many blocks were copied."""
        table, length = self.tables[i], len(self.words[i])
        before = list(table)
        try:
            slot, copies = next_slot(self.pool, table, length)
        except NoRoom:
            return "NoRoom" if table == before else "NoRoom, but the table had changed"
        if len(table) * self.size <= length:
            return "the table has no block for the new token"
        if floats(slot):
            return f"slot {slot!r} is not an int"
        for source, target in copies:
            for k in range(self.size):
                self.memory[target * self.size + k] = self.memory.get(source * self.size + k)
        self.memory[int(slot)] = word
        self.words[i].append(word)
        return f"{len(copies)} copied"

    def read(self, i):
        """What attention would read through the table."""
        places = [block * self.size + k for block in self.tables[i] for k in range(self.size)]
        return [self.memory.get(place) for place in places[: len(self.words[i])]]

    def fork(self, i):
        self.pool.share(self.tables[i])
        self.tables.append(list(self.tables[i]))
        self.words.append(list(self.words[i]))

    def leave(self, i):
        self.pool.free(self.tables[i])
        self.tables[i], self.words[i] = [], []


def perform(plan, num_blocks, size):
    """A line an operation: the outcome, whether every text reads right, and the counts of its blocks."""

    def lines(answer):
        texts, fresh = Texts(num_blocks, size), iter(range(10**6))
        for what, i in plan:
            outcome = "done"
            if what == "new":
                texts.tables.append([])
                texts.words.append([])
            elif what == "write":
                outcome = texts.write(answer, i, next(fresh))
            else:
                getattr(texts, what)(i)
            wrong = [k for k, words in enumerate(texts.words) if texts.read(k) != words]
            read = f"texts {wrong} read wrong" if wrong else "every text reads right"
            counts = [[texts.pool.count(block) for block in table] for table in texts.tables]
            yield f"{what} {i}: {outcome}, {read}, counts {counts}, free {texts.pool.free_count}"

    return lines


def written_out(pool, blocks, length):
    """The rule, by looking at who else could be reading the place."""
    size = pool.block_size
    place, offset = divmod(length, size)
    if place == len(blocks):
        blocks.append(pool.allocate(1)[0])
        return blocks[place] * size, []
    mine = blocks[place]
    if pool.count(mine) == 1:
        return mine * size + offset, []
    blocks[place] = pool.allocate(1)[0]
    pool.free([mine])
    return blocks[place] * size + offset, [(mine, blocks[place])]


def table_kept(got, expected, case) -> bool:
    return isinstance(got, list) and "the table has no block" in got[-1]


def rewrote_table(got, expected, case):
    return isinstance(got, (TypeError, ValueError)) and "unpack" in str(got)


@register(
    "05.next_slot",
    points=3,
    title="Copy-on-write",
    hints=[
        *slips(WRITES),
        Hint("two values are asked for: (slot, copies)", when=rewrote_table),
        Hint("on a block border a block is added, to `blocks` itself: change it in place", when=table_kept),
    ],
)
def next_slot(rng):
    def text(tokens):
        return [("new", 0), *[("write", 0)] * tokens]

    plans = [
        (8, 4, text(9)),
        (8, 4, [*text(6), ("fork", 0), ("write", 1), ("write", 0), ("write", 1), ("write", 0), ("write", 1)]),
        (8, 4, [*text(8), ("fork", 0), ("write", 1), ("write", 0), ("write", 1)]),
        (9, 4, [*text(5), *[("fork", 0)] * 3, *[("write", i) for i in (2, 0, 3, 1, 1, 2)]]),
        (6, 3, [*text(4), ("fork", 0), ("leave", 0), ("write", 1), ("fork", 1), ("write", 2), ("write", 1)]),
        (2, 4, [*text(6), ("fork", 0), ("write", 1), ("leave", 0), ("write", 1)]),
        (2, 4, [*text(8), ("fork", 0), ("write", 1), ("write", 0), ("leave", 1)]),
        (6, 1, [*text(2), ("fork", 0), ("write", 1), ("write", 0), ("write", 0)]),
    ]
    for _ in range(4):
        size, plan, alive, made = rng.randint(2, 5), text(rng.randint(1, 9)), [0], 1
        for _ in range(40):
            what = rng.choice(("write", "write", "write", "fork", "leave"))
            i = rng.choice(alive)
            if what == "leave" and len(alive) == 1:
                what = "write"
            plan.append((what, i))
            if what == "fork":
                alive.append(made)
                made += 1
            elif what == "leave":
                alive.remove(i)
        plans.append((rng.randint(5, 10), size, plan))
    plans.append((40, 19, [*text(90), ("fork", 0), ("write", 1), ("write", 0), *[("fork", 1)] * 20, ("write", 20)]))
    for num_blocks, size, plan in plans:
        what = f"next_slot for forked texts, {len(plan)} operations, {num_blocks} blocks of {size}"
        yield operations(perform(plan, num_blocks, size), written_out, what)


# 5


def given_admit(pool, prefix, tokens):
    """The function as the reader is given it."""
    pool.share(prefix)
    new = pool.allocate(-(-tokens // pool.block_size) - len(prefix))
    return [*prefix, *new]


def swallow(pool, prefix, tokens):
    new = -(-tokens // pool.block_size) - len(prefix)
    if new > pool.free_count:
        return None
    pool.share(prefix)
    return [*prefix, *pool.allocate(new)]


def clear_all(pool, prefix, tokens):
    pool.share(prefix)
    try:
        return [*prefix, *pool.allocate(-(-tokens // pool.block_size) - len(prefix))]
    except NoRoom:
        for block in prefix:
            pool.free([block] * pool.count(block))
        raise


def unshared(pool, prefix, tokens):
    return [*prefix, *pool.allocate(-(-tokens // pool.block_size) - len(prefix))]


def unasked(pool, prefix, tokens):
    new = pool.allocate(-(-tokens // pool.block_size) - len(prefix))
    pool.share(prefix)
    return new


def all_new(pool, prefix, tokens):
    return pool.allocate(-(-tokens // pool.block_size))


def too_strict(pool, prefix, tokens):
    if -(-tokens // pool.block_size) > pool.free_count:
        raise NoRoom
    new = pool.allocate(-(-tokens // pool.block_size) - len(prefix))
    pool.share(prefix)
    return [*prefix, *new]


def one_to_spare(pool, prefix, tokens):
    new = -(-tokens // pool.block_size) - len(prefix)
    if new >= pool.free_count:
        raise NoRoom
    pool.share(prefix)
    return [*prefix, *pool.allocate(new)]


def freed_twice(pool, prefix, tokens):
    try:
        new = pool.allocate(-(-tokens // pool.block_size) - len(prefix))
    except NoRoom:
        pool.free(prefix)
        raise
    pool.share(prefix)
    return [*prefix, *new]


ADMITS = {
    "exactly as many free blocks as are needed are enough": one_to_spare,
    "blocks that are shared need no room: only the new ones must be free": too_strict,
    "a failed call still leaves the prefix's counts raised: nobody will ever free them": given_admit,
    "NoRoom must still get out: the engine waits for it": swallow,
    "the prefix's other holders lost their blocks: take back one count, not all": clear_all,
    "what was never shared is freed: a failed call took a count that was not its own": freed_twice,
    "the prefix is used but not shared: when its owner leaves, this text's blocks are free": unshared,
    "the table lacks the prefix": unasked,
    "the prefix's blocks are there to be used: only the rest needs new ones": all_new,
}


def requests(num_blocks, size, held, calls):
    """An owner holds `held` blocks; then calls of (prefix blocks, tokens, does it stay?).

    A line a call: the outcome, counts of the owner's blocks, and what is free during and after it.
    """

    def lines(answer):
        pool = BlockPool(num_blocks, size)
        owner, other = pool.allocate(held), pool.allocate(1)
        pool.free(other)  # so that block numbers are not in a row with what comes
        for shared, tokens, stays in calls:
            prefix, before = owner[:shared], pool.free_count
            mine = list(prefix)
            try:
                table = answer(pool, mine, tokens)
            except NoRoom:
                outcome = "NoRoom"
            else:
                outcome = table_fault(pool, table, prefix, owner, tokens)
                during = before - pool.free_count
                outcome += f", {during} blocks taken"
                outcome += "" if mine == prefix else ", your argument `prefix` was changed"
                if table is not None and not stays:
                    pool.free(table)
            counts = [pool.count(block) for block in owner]
            state = f"counts {counts}, free {pool.free_count}"
            yield f"admit(prefix of {shared}, {tokens} tokens): {outcome}; {state}"

    return lines


def table_fault(pool, table, prefix, owner, tokens) -> str:
    table = list(table) if isinstance(table, tuple) else table
    if not isinstance(table, list):
        return f"gave {table!r}"
    if table[: len(prefix)] != prefix:
        return "the table does not begin with the prefix"
    if len(table) != -(-tokens // pool.block_size):
        return f"{len(table)} blocks for {tokens} tokens"
    rest = table[len(prefix) :]
    if len(set(rest)) != len(rest) or set(rest) & set(owner):
        return "the rest is not new blocks"
    return "a table of prefix and new blocks"


def admit_by_hand(pool, prefix, tokens):
    """Room is counted first."""
    blocks, covered = [], len(prefix) * pool.block_size
    missing = sum(1 for start in range(covered, tokens, pool.block_size))
    if missing > pool.free_count:
        raise NoRoom
    for block in prefix:
        pool.share([block])
        blocks.append(block)
    for _ in range(missing):
        blocks += pool.allocate(1)
    return blocks


@register("05.admit", points=3, title="Debug it: the pool that shrank", given=given_admit, hints=slips(ADMITS))
def admit(rng):
    plans = [
        (8, 4, 2, [(2, 10, False), (2, 9, False), (2, 8, False)]),
        (3, 4, 2, [(1, 8, True), (2, 8, False), (2, 9, False), (2, 8, True)]),
        (4, 4, 2, [(2, 24, False), (2, 10, False)]),
        (4, 4, 2, [(2, 20, False)] * 5 + [(2, 16, False)]),
        (5, 4, 3, [(1, 40, False), (2, 40, False), (3, 13, True), (3, 17, False), (3, 20, False)]),
        (4, 3, 1, [(0, 9, False), (0, 12, False), (1, 12, False), (1, 13, False)]),
        (6, 2, 4, [(4, 9, True), (4, 10, True), (4, 10, False), (3, 8, False)]),
    ]
    for _ in range(3):
        held = rng.randint(1, 4)
        calls = [(rng.randint(0, held), rng.randint(17, 40), rng.random() < 0.3) for _ in range(8)]
        plans.append((held + rng.randint(3, 6), 4, held, calls))
    plans.append((90, 17, 50, [(50, 1200, False), (50, 1530, False), (50, 1531, False), (33, 1000, True)]))
    for num_blocks, size, held, calls in plans:
        what = f"admit {len(calls)} times, {num_blocks} blocks of {size}, {held} held by the prefix's owner"
        yield operations(requests(num_blocks, size, held, calls), admit_by_hand, what)


# 6

TOKENS = 8e9 / (2 * 32 * 8 * 128 * 2)
HALF, HEADS, WIDE = "K alone: V is missing", "32 KV heads: this model has 8", "4 bytes a number? 16 bits are 2"
OWN = "the half-full 63rd block is written by every answer: only the full ones stay shared"
REST = "an answer goes on in its own copy of the 63rd block: blocks for 1,200 tokens, less the 62 shared ones"
WHOLE = "half a block of waste, not a whole one"
NO_WASTE = "the waste is missing"
ROUNDED = "500 is an average, so it is not rounded up to whole blocks: add half a block"
FIGURES = {  # key: expected, relative tolerance, {what a slip gives: its name}
    "reserved": (
        14,
        0.0,
        {
            TOKENS / 4096: "round down: a part of a request does not run",
            15: "round down: a part of a request does not run",
            3: HEADS,
            29: HALF,
            7: WIDE,
            13: "8 GB are 8e9 bytes here",
            122: "each reserves 4,096 tokens, not what it holds",
        },
    ),
    "paged_16": (
        TOKENS / 508,
        0.005,
        {
            TOKENS / 500: NO_WASTE,
            TOKENS / 516: WHOLE,
            TOKENS / 512: ROUNDED,
            TOKENS / 4 / 508: HEADS,
            TOKENS * 2 / 508: HALF,
            TOKENS / 2 / 508: WIDE,
            TOKENS / 16: "that is how many blocks there are: divide by those of a request",
            TOKENS / 4096: "each holds 500 tokens and half a block, not its context",
        },
    ),
    "paged_512": (
        TOKENS / 756,
        0.03,
        {
            TOKENS / 508: "half a block is 256 tokens here",
            TOKENS / 1012: WHOLE,
            TOKENS / 500: NO_WASTE,
            TOKENS / 4 / 756: HEADS,
            TOKENS * 2 / 756: HALF,
            TOKENS / 2 / 756: WIDE,
        },
    ),
    "shared_blocks": (
        166,
        0.0,
        {
            600: "nothing is shared in that",
            **dict.fromkeys((159, 167, 158), OWN),
            **dict.fromkeys((162, 163, 174, 175), REST),
            75: "that is one answer",
        },
    ),
}


@register("05.how_many", points=2, title="Estimate it: how many fit?")
def how_many(rng):
    yield from estimates("how_many", FIGURES)
