"""Plausible wrong answers to exercise 05, each with text that its message must contain."""

SLOT = "def slot_mapping(blocks, block_size, start, count): return "
SPAN = " for i in range(start, start + count)]"
NEEDED = "    needed = -(-(length + count) // block_size) - len(blocks)\n"
COPY = "        old, (new,) = blocks[-1], pool.allocate(1)\n        blocks[-1] = new\n        pool.free([old])\n"
RETURN = "    return blocks[length // size] * size + length % size, copies"
ADMIT = "    new = pool.allocate(-(-tokens // pool.block_size) - len(prefix))\n    pool.share(prefix)\n"
FREE = (
    "        if any(self.counts[block] < blocks.count(block) for block in blocks):\n"
    '            raise ValueError("freed more often than held")\n'
)
EACH = "        for block in blocks:\n            if self.counts[block] == 0:\n"
ALLOCATE = "new = pool.allocate(-(-tokens // pool.block_size) - len(prefix))\n"
LOWER = "            self.counts[block] -= 1\n"
MANY = "def how_many():\n    slots = 8e9 / (2 * 32 * 8 * 128 * 2)\n    return "
GOOD = {"reserved": "14", "paged_16": "slots / 508", "paged_512": "slots / 756", "shared_blocks": "166"}


def figures(**changed: str) -> str:
    return MANY + "{" + ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items()) + "}"


KEEPER = """
class Pool:
    def __init__(self, num_blocks):
        self.num_blocks, self.tables = num_blocks, []

    @property
    def free_count(self):
        return len(self.unused())

    def unused(self):
        return [block for block in range(self.num_blocks) if not self.count(block)]

    def count(self, block):
        return sum(table.count(block) for table in self.tables)

    def allocate(self, n):
        if n > self.free_count:
            raise NoRoom
        blocks = self.unused()[:n]
        self.tables.append(blocks)
        return blocks

    def share(self, blocks):
        if not all(map(self.count, blocks)):
            raise ValueError
        self.tables.append(blocks)

    def free(self, blocks):
        if any(self.count(block) < blocks.count(block) for block in blocks):
            raise ValueError
        for block in blocks:
            next(table for table in self.tables if block in table).remove(block)
"""

WRONG = {
    "05.slot_mapping": {
        "two bytes a slot": (
            "right = slot_mapping\n"
            "def slot_mapping(blocks, block_size, start, count):\n"
            "    return [s % 65536 for s in right(blocks, block_size, start, count)]",
            "expected",
        ),
        "no table": (SLOT + "list(range(start, start + count))", "table is not used"),
        "block not multiplied": (SLOT + "[blocks[i // block_size] + i % block_size" + SPAN, "multiply"),
        "no offset": (SLOT + "[blocks[i // block_size] * block_size" + SPAN, "offset in the block is missing"),
        "offset alone": (SLOT + "[i % block_size" + SPAN, "which block"),
        "from 0": (
            SLOT + "[blocks[i // block_size] * block_size + i % block_size for i in range(count)]",
            "not at token `start`",
        ),
        "count is the end": (
            SLOT + "[blocks[i // block_size] * block_size + i % block_size for i in range(start, count)]",
            "start + count - 1",
        ),
        "offset not restarted": (SLOT + "[blocks[i // block_size] * block_size + i" + SPAN, "restart"),
        "offset from the call": (
            SLOT + "[blocks[i // block_size] * block_size + (i - start) % block_size" + SPAN,
            "not of its place in this call",
        ),
        "blocks of 4": (SLOT + "[blocks[i // 4] * 4 + i % 4" + SPAN, "raised"),
        "the example": (SLOT + "[31, 8, 9]", "expected"),
        "floats": (SLOT + "[blocks[i // block_size] * block_size * 1.0 + i % block_size" + SPAN, "expected ints"),
        "one too many": (
            SLOT + "[blocks[i // block_size] * block_size + i % block_size for i in range(start, start + count + 1)]",
            "expected 3 items",
        ),
        "sorted": (
            SLOT + "sorted(blocks[i // block_size] * block_size + i % block_size" + SPAN[:-1] + ")",
            "expected",
        ),
    },
    "05.append": {
        "32 blocks at most": (
            "def append(blocks, length, count, block_size, free):\n"
            "    needed = min(-(-(length + count) // block_size) - len(blocks), 32)\n"
            "    if needed > len(free):\n"
            "        raise NoRoom\n"
            "    blocks += [free.pop(0) for _ in range(needed)]\n"
            "    return length + count",
            "expected",
        ),
        "one too many on a border": (
            (NEEDED, "    needed = (length + count) // block_size + 1 - len(blocks)\n"),
            "n // size + 1",
        ),
        "rounded down": ((NEEDED, "    needed = (length + count) // block_size - len(blocks)\n"), "rounded down"),
        "at most one": ((NEEDED, NEEDED + "    needed = min(needed, 1)\n"), "several blocks"),
        "held ones not taken off": (
            (NEEDED, "    needed = -(-(length + count) // block_size)\n"),
            "already holds",
        ),
        "room in the last block not used": (
            (NEEDED, "    needed = -(-count // block_size)\n"),
            "expected",
        ),
        "from the end": (("free.pop(0)", "free.pop()"), "front of the free list"),
        "looks while taking": (
            "def append(blocks, length, count, block_size, free):\n"
            "    while len(blocks) * block_size < length + count:\n"
            "        if not free:\n"
            "            raise NoRoom\n"
            "        blocks.append(free.pop(0))\n"
            "    return length + count",
            "after NoRoom",
        ),
        "IndexError": (("    if needed > len(free):", "    if False:"), "raised IndexError"),
        "refuses the last block": (("if needed > len(free):", "if needed >= len(free):"), "expected"),
        "a new list": (
            (
                "    for _ in range(needed):\n        blocks.append(free.pop(0))\n",
                "    blocks = blocks + free[:needed]\n    free = free[needed:]\n",
            ),
            "in place",
        ),
        "a length with a point": (("    return length + count", "    return (length + count) / 1"), "expected ints"),
        "a slice of what is missing": (
            (
                "    for _ in range(needed):\n        blocks.append(free.pop(0))\n",
                "    blocks += free[:needed]\n    del free[:needed]\n",
            ),
            "the need is negative",
        ),
        "a spare block is not seen": (
            (NEEDED, "    needed = -(-(length + count) // block_size) - -(-length // block_size)\n"),
            "count len(blocks)",
        ),
        "gives the spare block back": (
            (
                "    for _ in range(needed):\n",
                "    for _ in range(-needed):\n        free.insert(0, blocks.pop())\n    for _ in range(needed):\n",
            ),
            "expected",
        ),
        "returns nothing": (("    return length + count", "    length += count"), "return"),
        "MemoryError": (('raise NoRoom(f"{needed} blocks', 'raise MemoryError(f"{needed} blocks'), "MemoryError"),
    },
    "05.pool": {
        "64 blocks at most": (
            "class Small(Pool):\n"
            "    def __init__(self, num_blocks):\n"
            "        super().__init__(min(num_blocks, 64))\n"
            "Pool = Small",
            "IndexError",
        ),
        "free ignores counts": (
            (
                LOWER + "            if self.counts[block] == 0:\n",
                "            self.counts[block] = 0\n            if True:\n",
            ),
            "last table lets go",
        ),
        "share counts nothing": (
            (
                "        for block in blocks:\n            self.counts[block] += 1\n",
                "        pass\n",
            ),
            "share must raise",
        ),
        "never put back": (
            ("                self.unused.append(block)\n", "                pass\n"),
            "expected",
        ),
        "allocate not atomic": (
            (
                "        if n > len(self.unused):\n"
                '            raise NoRoom(f"{n} asked for, {len(self.unused)} free")\n'
                "        blocks, self.unused = self.unused[:n], self.unused[n:]\n"
                "        for block in blocks:\n"
                "            self.counts[block] = 1\n"
                "        return blocks\n",
                "        blocks = []\n"
                "        for _ in range(n):\n"
                "            if not self.unused:\n"
                '                raise NoRoom("full")\n'
                "            blocks.append(self.unused.pop(0))\n"
                "            self.counts[blocks[-1]] = 1\n"
                "        return blocks\n",
            ),
            "failed allocation",
        ),
        "share not atomic": (
            (
                "        if any(self.counts[block] == 0 for block in blocks):\n"
                '            raise ValueError("a free block cannot be shared")\n'
                "        for block in blocks:\n",
                "        for block in blocks:\n"
                "            if self.counts[block] == 0:\n"
                '                raise ValueError("free")\n',
            ),
            "failed share",
        ),
        "free not atomic": (
            (
                FREE + "        for block in blocks:\n",
                EACH + "                raise ValueError\n",
            ),
            "failed free",
        ),
        "double free allowed": (
            (
                FREE + "        for block in blocks:\n",
                "        for block in blocks:\n            if self.counts[block] == 0:\n                continue\n",
            ),
            "double free",
        ),
        "a block twice in a list": (("< blocks.count(block) for", "== 0 for"), "twice"),
        "a free block shared": (
            ("if any(self.counts[block] == 0 for block in blocks):", "if False:"),
            "free block was shared",
        ),
        "keeps the lists": (KEEPER, "the caller empties that"),
        "empties the list it is given": (
            (
                "        for block in blocks:\n            self.counts[block] += 1\n",
                "        while blocks:\n            self.counts[blocks.pop()] += 1\n",
            ),
            "changed the list",
        ),
        "allocate returns nothing": (
            (
                "            self.counts[block] = 1\n        return blocks\n",
                "            self.counts[block] = 1\n",
            ),
            "returned None, not a list",
        ),
        "count returns nothing": (
            ("        return self.counts[block]\n", "        self.counts[block]\n"),
            "count() returned None",
        ),
        "free_count with brackets": (
            ("    @property\n    def free_count", "    def free_count"),
            "a property, no brackets",
        ),
        "a set of blocks": (
            ("            self.counts[block] += 1\n", "            self.counts[block] = 2\n"),
            "expected",
        ),
        "counts on the class": (
            (
                "        self.counts = [0] * num_blocks\n",
                "        Pool.all = getattr(Pool, 'all', [0] * 99)\n        self.counts = Pool.all\n",
            ),
            "expected",
        ),
        "no room for nothing": (
            ("        if n > len(self.unused):", "        if n > len(self.unused) or not self.unused:"),
            "expected allocate(0): done",
        ),
        "counts start at 1": (("self.counts = [0] * num_blocks", "self.counts = [1] * num_blocks"), "expected"),
        "one block short": (("list(range(num_blocks))", "list(range(1, num_blocks))"), "expected"),
        "allocates shared": (
            ("            self.counts[block] = 1\n", "            self.counts[block] += 2\n"),
            "expected",
        ),
        "ValueError when full": (('raise NoRoom(f"{n} asked', 'raise ValueError(f"{n} asked'), "expected"),
    },
    "05.next_slot": {
        "the offset wraps at 16": (
            "right = next_slot\n"
            "def next_slot(pool, blocks, length):\n"
            "    slot, copies = right(pool, blocks, length)\n"
            "    offset = slot % pool.block_size\n"
            "    return slot - offset + offset % 16, copies",
            "read wrong",
        ),
        "no copy": (("    elif pool.count(blocks[-1]) > 1:", "    elif False:"), "no copy"),
        "slot before the copy": (
            "def next_slot(pool, blocks, length):\n"
            "    size, copies = pool.block_size, []\n"
            "    if length % size == 0:\n"
            "        blocks += pool.allocate(1)\n"
            "    slot = blocks[-1] * size + length % size\n"
            "    if length % size and pool.count(blocks[-1]) > 1:\n"
            "        old, (new,) = blocks[-1], pool.allocate(1)\n"
            "        blocks[-1] = new\n"
            "        pool.free([old])\n"
            "        copies.append((old, new))\n"
            "    return slot, copies",
            "slot was computed before",
        ),
        "old count kept": ((COPY, COPY.replace("        pool.free([old])\n", "")), "must go down"),
        "all counts dropped": (
            (COPY, COPY.replace("pool.free([old])", "pool.free([old] * pool.count(old))")),
            "others still hold",
        ),
        "always a copy": (("    elif pool.count(blocks[-1]) > 1:", "    else:"), "needs no copy"),
        "copy on the border": (
            "def next_slot(pool, blocks, length):\n"
            "    size, copies = pool.block_size, []\n"
            "    if blocks and pool.count(blocks[-1]) > 1:\n"
            "        old, (new,) = blocks[-1], pool.allocate(1)\n"
            "        blocks[-1] = new\n"
            "        pool.free([old])\n"
            "        copies.append((old, new))\n"
            "    if length % size == 0:\n"
            "        blocks += pool.allocate(1)\n"
            "    return blocks[length // size] * size + length % size, copies",
            "on a block border",
        ),
        "free first": (
            (
                COPY,
                "        old = blocks[-1]\n        pool.free([old])\n"
                "        (new,) = pool.allocate(1)\n        blocks[-1] = new\n",
            ),
            "allocate first",
        ),
        "copy the wrong way": (("copies.append((old, new))", "copies.append((new, old))"), "wrong"),
        "slot of the last token": (
            (RETURN, RETURN.replace("length % size, copies", "(length - 1) % size, copies")),
            "wrong",
        ),
        "table not changed": ((COPY, COPY.replace("        blocks[-1] = new\n", "")), "expected"),
        "no new block": (
            ("    if length % size == 0:\n", "    if length % size == 0 and not blocks:\n"),
            "raised IndexError",
        ),
        "a block too early": (
            ("    if length % size == 0:\n", "    if (length + 1) % size == 0 or not blocks:\n"),
            "expected",
        ),
        "copies all blocks": (
            (
                COPY + "        copies.append((old, new))\n",
                "        fresh = pool.allocate(len(blocks))\n        copies = list(zip(blocks, fresh))\n"
                "        pool.free(list(blocks))\n        blocks[:] = fresh\n",
            ),
            "expected",
        ),
        "slot only": ((RETURN, RETURN.replace(", copies", "")), "two values"),
        "a new list": (
            ("        blocks += pool.allocate(1)\n", "        blocks = blocks + pool.allocate(1)\n"),
            "change it in place",
        ),
        "popped before there is room": (
            (
                COPY,
                "        old = blocks.pop()\n        (new,) = pool.allocate(1)\n        blocks.append(new)\n"
                "        pool.free([old])\n",
            ),
            "NoRoom, but the table had changed",
        ),
        "a float": ((RETURN, RETURN.replace("length % size, copies", "length % size * 1.0, copies")), "not an int"),
        "copies none": ((RETURN, RETURN.replace(", copies", ", []")), "wrong"),
    },
    "05.admit": {
        "16 shared blocks at most": (
            "def admit(pool, prefix, tokens):\n"
            "    prefix = prefix[:16]\n"
            "    new = pool.allocate(-(-tokens // pool.block_size) - len(prefix))\n"
            "    pool.share(prefix)\n"
            "    return [*prefix, *new]",
            "expected",
        ),
        "swallows NoRoom": (
            (
                ADMIT,
                "    try:\n        " + ALLOCATE + "    except NoRoom:\n        return None\n    pool.share(prefix)\n",
            ),
            "must still get out",
        ),
        "takes back too much": (
            (
                ADMIT,
                "    pool.share(prefix)\n    try:\n        " + ALLOCATE + ""
                "    except NoRoom:\n        for block in prefix:\n"
                "            pool.free([block] * pool.count(block))\n        raise\n",
            ),
            "not all",
        ),
        "frees what was not shared": (
            (
                ADMIT,
                "    try:\n        " + ALLOCATE + ""
                "    except NoRoom:\n        pool.free(prefix)\n        raise\n    pool.share(prefix)\n",
            ),
            "never shared",
        ),
        "no share": ((ADMIT, ADMIT.replace("    pool.share(prefix)\n", "")), "not shared"),
        "without the prefix": (("    return [*prefix, *new]", "    return new"), "lacks the prefix"),
        "all new": (
            (
                ADMIT + "    return [*prefix, *new]",
                "    return pool.allocate(-(-tokens // pool.block_size))",
            ),
            "only the rest",
        ),
        "too strict": (
            (ADMIT, "    if -(-tokens // pool.block_size) > pool.free_count:\n        raise NoRoom\n" + ADMIT),
            "need no room",
        ),
        "catches, frees, forgets to raise": (
            (
                ADMIT,
                "    pool.share(prefix)\n    try:\n        " + ALLOCATE + ""
                "    except NoRoom:\n        pool.free(prefix)\n        new = []\n",
            ),
            "expected",
        ),
        "one block to spare": (
            (
                ADMIT,
                "    if -(-tokens // pool.block_size) - len(prefix) >= pool.free_count:\n        raise NoRoom\n"
                + ADMIT,
            ),
            "are enough",
        ),
        "rounded down": (
            (ADMIT, ADMIT.replace("-(-tokens // pool.block_size)", "tokens // pool.block_size")),
            "expected",
        ),
        "another name for the bug": (
            (
                ADMIT,
                "    pool.share(prefix)\n    more = -(-tokens // pool.block_size) - len(prefix)\n"
                "    new = pool.allocate(more)\n",
            ),
            "counts raised",
        ),
        "the prefix is changed": (
            ("    return [*prefix, *new]", "    prefix += new\n    return prefix"),
            "was changed",
        ),
        "NoRoom on a table that needs nothing": (
            (ADMIT, "    if not pool.free_count:\n        raise NoRoom\n" + ADMIT),
            "expected",
        ),
    },
    "05.how_many": {
        "not rounded": (figures(reserved="slots / 4096"), "round down"),
        "rounded up": (figures(reserved="15"), "round down"),
        "32 heads": (figures(reserved="slots // 4 // 4096"), "8"),
        "V missing": (figures(paged_16="2 * slots / 508"), "V is missing"),
        "no waste in small blocks": (figures(paged_16="slots / 500"), "waste is missing"),
        "a whole small block": (figures(paged_16="slots / 516"), "not a whole one"),
        "rounded to whole blocks": (figures(paged_16="slots / 512"), "is an average"),
        "no waste": (figures(paged_512="slots / 500"), "waste is missing"),
        "waste of 8": (figures(paged_512="slots / 508"), "256 tokens"),
        "a whole block": (figures(paged_512="slots / 1012"), "not a whole one"),
        "blocks, not requests": (figures(paged_16="slots / 16"), "how many blocks"),
        "not shared": (figures(shared_blocks="8 * 75"), "nothing is shared"),
        "63 shared": (figures(shared_blocks="63 + 8 * (75 - 62)"), "only the full ones"),
        "13 blocks of their own": (figures(shared_blocks="62 + 8 * (75 - 63)"), "only the full ones"),
        "text": (figures(paged_16="'120'"), "expected a number"),
        "a key short": (MANY + "{'reserved': 14}", "KeyError"),
    },
}
