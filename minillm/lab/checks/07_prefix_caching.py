"""Checks of exercise 07. Oracles: dictionaries of whole prefixes, lists with time stamps, content written out.

Chapter 07.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import sha256
from itertools import combinations, pairwise

from minillm.lab.check import Drive, Hint, register
from minillm.lab.compare import describe, mismatch
from minillm.lab.estimates import estimates, slips

# 1. Keys of blocks. Keys themselves are free, so what is compared is which of them are equal.

CROWD = 17_500, 16  # prompts and blocks of each: of 280,000 keys with 32 bits, nine pairs are equal on average
PROBE = 200  # bytes or characters that a key may have: a digest and a salt, and far from a long prompt


def key_pattern(answer, calls):
    """The keys of all calls as numbers: the same number, the same key."""
    seen, found = {}, []
    for tokens, size, salt in calls:
        given = list(tokens)
        keys = answer(given, size, salt) if salt else answer(given, size)
        keys = list(keys) if isinstance(keys, Iterator) else keys
        if given != list(tokens):
            return "tokens were changed in place"
        if not isinstance(keys, list | tuple):
            return f"expected a list of keys, got {describe(keys)}"
        for key in keys:
            if isinstance(key, bool) or not isinstance(key, bytes | str | int):
                return f"a key is a {type(key).__name__}; it must be bytes, str or int"
            if (key.bit_length() // 8 if isinstance(key, int) else len(key)) > PROBE:
                return f"a key is longer than {PROBE} bytes: it must not grow with the prompt"
        found.append([seen.setdefault(key, len(seen)) for key in keys])
    return found


def crowd_pattern(answer, pool):
    """Whether many short prompts, each with a first token of its own, have a key of its own for each block."""
    prompts, blocks = CROWD
    keys = set()
    for i in range(prompts):
        keys.update(answer([7 * i, *pool[i : i + blocks - 1]], 1))
    return DISTINCT if len(keys) == prompts * blocks else f"{prompts * blocks} keys must differ, {len(keys)} do"


DISTINCT = "no two are equal"


def said(got, expected):
    """As `mismatch`, but a text in place of a list is the message itself."""
    return got if isinstance(got, str) and got != expected else mismatch(got, expected)


def expect_pattern(calls):
    seen, found = {}, []
    for tokens, size, salt in calls:
        ends = range(size, len(tokens) + 1, size)
        found.append([seen.setdefault((salt, tuple(tokens[:end])), len(seen)) for end in ends])
    return found


def keys_slip(of_block=None, last=False, salted="start", write=None, swapped=False):
    """block_keys with a mistake in it."""

    def wrong(tokens, size, salt=""):
        keys, key = [], salt if salted == "start" else ""
        for start in range(0, len(tokens) if last else len(tokens) - size + 1, size):
            chunk = tokens[start : start + size]
            text = write(chunk) if write else ",".join(map(str, chunk))
            if of_block:
                keys.append(of_block(salt, key, text))
                key = keys[-1]
            else:
                key = sha256(f"{key}|{text}".encode()).hexdigest()
                keys.append(key)
        return keys

    return wrong


def digest(*parts):
    return sha256("|".join(parts).encode()).hexdigest()


KEYS = {
    "the key before is not in the hash: the same words after other words get the same key": keys_slip(
        lambda salt, key, text: digest(salt, text)
    ),
    "a partial last block has no key: more tokens will still be written into it": keys_slip(last=True),
    "the salt is in no key: two tenants share blocks": keys_slip(salted=None),
    "tokens joined without a separator: [1, 23] and [12, 3] are written alike": keys_slip(
        write=lambda chunk: "".join(map(str, chunk))
    ),
    "salt and tokens run together: `x1` before 2 is written as `x` before 12": keys_slip(
        lambda salt, key, text: digest((key or salt) + text)
    ),
    "the order of the tokens is lost": keys_slip(write=lambda chunk: ",".join(map(str, sorted(chunk)))),
    "the sum of the tokens is not the tokens": keys_slip(write=lambda chunk: str(sum(chunk))),
    "a token does not fit into one byte": keys_slip(write=lambda chunk: ",".join(str(t & 255) for t in chunk)),
    "a token does not fit into two bytes": keys_slip(write=lambda chunk: ",".join(str(t & 65535) for t in chunk)),
    "only the last token of a block is in its key": keys_slip(write=lambda chunk: str(chunk[-1])),
}


def grows(got, expected, case) -> bool:
    return isinstance(got, str) and "grow" in got


def in_group(name):
    return lambda got, expected, case: f"({name})" in case.call


PACKED = "tokens like digits"
WIDTHS = "tokens longer than their field"
SHORTENED = ("500s of long prompts", "blocks of more than 1,000 tokens")
MARKS, LOSSY, MANY = "salts like tokens", "salts of all kinds", "many keys"
GROUPS = {
    PACKED: "tokens as the digits of one number, or a rolling hash: a token may be larger than the base, and carries",
    WIDTHS: "`05d` is a width at least, not at most: larger tokens run into the next; write a mark between tokens",
    SHORTENED[0]: "the text of a long array leaves out its middle: numpy and torch write `...` there",
    SHORTENED[1]: "the text of a long array leaves out its middle: numpy and torch write `...` there",
    MARKS: "salt and tokens are joined by a mark that a salt may hold: hash the salt first, by itself",
    LOSSY: "all of the salt must be in the key as it is: any text, of any length",
    MANY: "the key is too short: of 32 bits some are equal among 300,000; keep 8 bytes or more",
}
BASES = (31, 33, 37, 131, 257, 1000, 10_000, 32_000, 49_152, 50_257, 100_000, 128_256, 151_936, 10**6)
WIDE = [([x, 7], [x // 10, x % 10 * 10**w + 7]) for w, x in enumerate((12, 123, 1234, 12345, 123456), 1)]
WIDE += [([x, 6], [x // 16, x % 16 * 16**w + 6]) for w, x in enumerate((0x12, 0x123, 0x1234, 0x12345), 1)]


@register(
    "07.block_keys",
    points=2,
    title="The key of a block",
    hints=[
        *slips(KEYS),
        Hint("hash the running key together with the block, not the tokens themselves", when=grows),
        Hint("nothing was returned: is there a `return`?", when=lambda got, *_: str(got).endswith("keys, got None")),
        *(Hint(text, when=in_group(name)) for name, text in GROUPS.items()),
    ],
)
def block_keys(rng):
    a, b, c = ([rng.randrange(10**6) for _ in range(4)] for _ in range(3))
    salts = ("ab", "ba", "Ab", " ab", "ab ", "ab\0", "租户", "户租", "t" * 100, "t" * 99 + "u")
    wide, long = [rng.randrange(10, 150_000) for _ in range(70)], rng.choices(range(50), k=600)
    groups = {
        "the same block after different ones": [(a + b, 4, ""), (c + b, 4, ""), (a + c, 4, ""), (b + b, 4, "")],
        LOSSY: [(a, 4, salt) for salt in salts],
        "prompts with a partial last block": [(a + b[:3], 4, ""), (a + b, 4, ""), (a[:3], 4, ""), ([], 4, "")],
        "two salts": [(a + b, 4, "one"), (a + b, 4, "two"), (a + b, 4, ""), (a + b, 4, "one")],
        "other orders": [([1, 2, 3, 4], 2, ""), ([2, 1, 3, 4], 2, ""), ([1, 2, 4, 3], 2, ""), ([3, 4, 1, 2], 2, "")],
        "digits that run together": [([1, 23, 5, 6], 2, ""), ([12, 3, 5, 6], 2, ""), ([1, 2, 3, 5], 2, "")],
        "tokens above 255 and 65535": [
            ([5, 7], 2, ""),
            ([261, 7], 2, ""),
            ([5 + 65536, 7], 2, ""),
            ([5, 263], 2, ""),
            ([5 + 2**17, 7], 2, ""),
            ([5 + 2**19, 7], 2, ""),
            ([1797, 1], 2, ""),  # 5 and 263 in as few bytes as they need, run together
            ([55300, 7], 2, ""),  # no character has this number
        ],
        "sums": [([3, 5], 2, ""), ([4, 4], 2, ""), ([2, 6], 2, ""), ([3, 5, 4, 4], 2, "")],
        "blocks of one token": [([7, 7, 7, 7], 1, ""), ([7, 7, 8, 7], 1, ""), ([0, 0, 0], 1, "")],
        MARKS: [([1, 2, 3, 4], 2, "1,2"), ([1, 2, 1, 2], 2, ""), ([3, 4], 2, "1,2")]
        + [([2], 1, "x1"), ([12], 1, "x"), ([1, 2], 1, "x")]
        + [([2], 1, f"x{mark}1") for mark in string.punctuation + string.whitespace + "\0"],
        "one block after 600 others": [([i, 1], 1, "") for i in range(600)],
        "long prompts": [([first, *long], 4, "tenant") for first in (1, 2)],
        "blocks of 33": [(wide, 33, "")]
        + [([*wide[:at], 7, *wide[at + 1 :]], 33, "") for at in (0, 15, 16, 31, 32, 33, 65)],
    }
    groups[PACKED] = [([1, t], 2, "") for t in (0, 5)]
    groups[PACKED] += [([0, t + base], 2, "") for t in (0, 5) for base in BASES if t + base <= 10**6]
    groups[PACKED] += [([1735, 1, 11859, 1], 4, ""), ([1, 21664, 1, 35522], 4, "")]  # base 1000003, modulo 2**64
    groups[PACKED] += [([9305, 1, 1, 1], 4, ""), ([1, 7195, 30790, 1811], 4, "")]  # and modulo 2**61 - 1
    groups[WIDTHS] = [(tokens, 2, "") for pair in WIDE for tokens in pair]
    middle = [rng.randrange(10**6) for _ in range(2500)]
    middles = [middle, *([*middle[:at], 7, *middle[at + 1 :]] for at in (600, 1250, 1900))]
    groups |= {name: [(tokens, size, "") for tokens in middles] for name, size in zip(SHORTENED, (500, 1250))}
    few = [rng.choices(range(3), k=rng.randint(0, 9)) for _ in range(30)]
    groups["many short prompts"] = [(tokens, 2, rng.choice(["", "x"])) for tokens in few]
    wrong = []  # what has failed so far: neither a wrong answer nor a hint has to wait for the crowd

    def ask(pattern, expected, *args):
        wrong.append(pattern)
        got = pattern(*args)
        if said(got, expected) is None:
            wrong.pop()
        return got

    for name, calls in groups.items():
        text = f"block_keys on {len(calls)} prompt{'s' * (len(calls) > 1)} ({name}); equal numbers are equal keys"
        expected = expect_pattern(calls)
        run = partial(lambda calls, expected, answer: ask(key_pattern, expected, answer, calls), calls, expected)
        yield Drive(run, expected, text, compare=said)
    pool = rng.choices(range(10**6), k=sum(CROWD))
    text = f"block_keys on {CROWD[0]} prompts of {CROWD[1]} blocks ({MANY})"
    yield Drive(
        lambda answer: "asked when all else is right" if wrong else ask(crowd_pattern, DISTINCT, answer, pool),
        DISTINCT,
        text,
        compare=said,
    )


# 2. The longest stored prefix.


def honest(parent, chunk):
    return sha256(parent + repr(chunk).encode()).digest()


def parity(parent, chunk):
    return bytes([sum(chunk) % 2])


def constant(parent, chunk):
    return b"same"


def local(parent, chunk):
    """Two bytes of the block alone: the prefix is not in it."""
    return sha256(repr(chunk).encode()).digest()[:2]


def stored(prompts, size, key_of, missing=()):
    """The store after these prompts, without the blocks in `missing` (which were evicted)."""
    store, block = {}, 0
    for tokens in prompts:
        key = b""
        for end in range(size, len(tokens) + 1, size):
            key = key_of(key, tuple(tokens[end - size : end]))
            if key not in store and block not in missing:
                store[key] = (block, tuple(tokens[:end]))
            block += 1
    return store


def tenant(parent, chunk):
    """The keys of one tenant among others in the same store."""
    return (parent or b"tenant-a") + bytes(chunk)


def expect_prefix(tokens, size, store, key_of):
    """All whole prefixes, each with the entry under its own key; those before the first that is another's."""
    key, held = b"", []
    for prefix in (tuple(tokens[:end]) for end in range(size, len(tokens), size)):
        key = key_of(key, prefix[-size:])
        held.append(store[key][0] if key in store and store[key][1] == prefix else None)
    return held[: held.index(None)] if None in held else held


def prefix_slip(limit=lambda n: n - 1, same=lambda stored, prefix, size: stored == prefix, gaps=False):
    def wrong(tokens, size, store, key_of):
        blocks, key = [], b""
        for end in range(size, limit(len(tokens)) + 1, size):
            key = key_of(key, tuple(tokens[end - size : end]))
            entry = store.get(key)
            if entry is None or not same(entry[1], tuple(tokens[:end]), size):
                if gaps:
                    continue
                break
            blocks.append(entry[0])
        return blocks

    return wrong


def prefixes_of(answer, asked, size, store, key_of):
    """What the answer gives for each prompt."""
    found = []
    for tokens in asked:
        given, lent = list(tokens), dict(store)
        blocks = answer(given, size, lent, key_of)
        found.append(list(blocks) if isinstance(blocks, Iterator) else blocks)
        if given != tokens or lent != store:
            return f"{'store' if given == tokens else 'tokens'} changed in place"
    return found


def no_parent(tokens, size, store, key_of):
    blocks = []
    for end in range(size, len(tokens), size):
        block, prefix = store.get(key_of(b"", tuple(tokens[end - size : end])), (None, None))
        if prefix != tuple(tokens[:end]):
            break
        blocks.append(block)
    return blocks


def chunk_list(tokens, size, store, key_of):
    return prefix_slip()(tokens, size, store, lambda parent, chunk: key_of(parent, list(chunk)))


def scan(tokens, size, store, key_of):
    by_prefix, blocks = {prefix: block for block, prefix in store.values()}, []
    for end in range(size, len(tokens), size):
        if tuple(tokens[:end]) not in by_prefix:
            break
        blocks.append(by_prefix[tuple(tokens[:end])])
    return blocks


def block_left(tokens, size, store, key_of):
    return prefix_slip(lambda n: n - size)(tokens, size, store, key_of)


PREFIX = {
    "the last token was served: nothing is left to compute, and there are no logits": prefix_slip(lambda n: n),
    "a collision served another prompt's block: compare the whole prefix, not the last block's tokens": prefix_slip(
        same=lambda stored, prefix, size: stored[-size:] == prefix[-size:]
    ),
    "a key proposes, the tokens decide: a collision served another prompt's block": prefix_slip(
        same=lambda stored, prefix, size: True
    ),
    "a collision served another prompt's block: equal lengths are not equal tokens": prefix_slip(
        same=lambda stored, prefix, size: len(stored) == len(prefix)
    ),
    "behind a missing block nothing can be used: stop there": prefix_slip(gaps=True),
    "one token has to be left to compute, not a whole block": block_left,
    "one token has to be left to compute, not two": prefix_slip(lambda n: n - 2),
    "the key before was not handed to key_of": no_parent,
    "key_of was handed a list: it takes the block's tokens as a tuple": chunk_list,
    "nothing is found: a list never equals a tuple, so compare what is stored with tuple(tokens[:end])": prefix_slip(
        same=lambda stored, prefix, size: False
    ),
    "an entry counts only under the key that key_of gives: others stand for another tenant, or model": scan,
}


@register(
    "07.longest_prefix",
    points=3,
    title="The longest stored prefix",
    hints=slips(PREFIX),
)
def longest_prefix(rng):
    def prompt(n, words=50):
        return [rng.randrange(words) for _ in range(n)]

    for key_of in (honest, parity, constant, local):
        name = key_of.__name__ if key_of is not honest else "no collisions"
        for size in (1, 4, 3):
            base = prompt(4 * size)
            others = [base[: 2 * size] + prompt(2 * size), prompt(3 * size), base[:size] + prompt(size)]
            swapped = prompt(size) + base[size:]
            asked = [base, [*base, 7], base[:-1], base[: size + 1], base[:1], [], [*others[0], 3], [*swapped, 1]]
            asked += [base[:size][::-1] + base[size:]] if size > 1 else []  # the same tokens, another order
            asked += [others[1] + [2], prompt(2 * size), prompt(size) + base[:size] + [9]]
            asked += [base[:size] + others[1][size : 2 * size] + [3]]  # the second block of another prompt
            asked += [others[2] + base[2 * size : 3 * size] + [8]]  # only the block between them is another
            for missing in ((), (1,)):
                store = stored([base, *others], size, key_of, missing)
                expected = [expect_prefix(tokens, size, store, key_of) for tokens in asked]
                run = partial(prefixes_of, asked=asked, size=size, store=store, key_of=key_of)
                text = f"longest_prefix on {len(asked)} prompts, blocks of {size}, keys: {name}"
                yield Drive(run, expected, text + (", one block evicted" if missing else ""))
    base = prompt(33 * 40, 150_000)
    asked = [base, [*base, 7], base[:-1], [*base[: 33 * 25 + 32], 7], base[: 33 * 9 + 16] + prompt(90)]
    store = stored([base], 33, honest)
    expected = [expect_prefix(tokens, 33, store, honest) for tokens in asked]
    yield Drive(
        partial(prefixes_of, asked=asked, size=33, store=store, key_of=honest),
        expected,
        f"longest_prefix on {len(asked)} prompts of up to {len(base) + 1} tokens, blocks of 33",
    )
    asked = [[1, 2, 3], [3, 4, 5], [3, 4, 1, 2, 9]]
    store = {b"tenant-b\x01\x02": (7, (1, 2)), b"tenant-a\x03\x04": (8, (3, 4))}
    store |= {b"tenant-b\x03\x04\x01\x02": (9, (3, 4, 1, 2))}
    yield Drive(
        partial(prefixes_of, asked=asked, size=2, store=store, key_of=tenant),
        [expect_prefix(tokens, 2, store, tenant) for tokens in asked],
        f"longest_prefix on {len(asked)} prompts, blocks of 2, keys: two tenants in one store",
    )


# 3. Eviction. A script of calls; the oracle keeps a list of (moment, block) and looks through all of it.


class Slip:
    """An Evictor with a mistake. order: of a list that is let go; fresh: does letting go renew? held: evict those?"""

    def __init__(self, forward=False, fifo=False, counted=True, revived=True, newest=False, emptied=None):
        self.forward, self.fifo, self.counted, self.revived = forward, fifo, counted, revived
        self.newest, self.emptied, self.counts, self.queue, self.first = newest, emptied, {}, [], {}

    def hold(self, blocks):
        for block in blocks:
            self.counts[block] = self.counts.get(block, 0) + 1
            self.first.setdefault(block, len(self.first))
            if self.revived and block in self.queue:
                self.queue.remove(block)

    def let_go(self, blocks):
        for block in blocks if self.forward else reversed(blocks):
            self.counts[block] -= 1
            if not self.counts[block] or not self.counted:
                if block in self.queue:
                    if not self.revived:
                        continue
                    self.queue.remove(block)
                self.queue.append(block)

    def evict(self):
        if not self.queue:
            if self.emptied is not None:
                raise self.emptied
            return None
        if self.fifo:
            self.queue.sort(key=self.first.get)
        block = self.queue.pop(-1 if self.newest else 0)
        self.counts.pop(block, None)
        self.first.pop(block, None)
        return block


class Twice(Slip):
    """Blocks stay in the queue while they are held again, and are looked at when they come up."""

    def __init__(self):
        super().__init__(revived=False)

    def let_go(self, blocks):
        for block in reversed(blocks):
            self.counts[block] -= 1
            self.queue += [block] if not self.counts[block] else []

    def evict(self):
        while self.queue:
            block = self.queue.pop(0)
            if self.counts.get(block) == 0:
                del self.counts[block]
                return block
        return None


EVICT = {
    "a block that was held again stands in the queue twice, and its old place counts": lambda: Twice(),
    "the head goes before the tail: let the blocks go from the back": lambda: Slip(forward=True),
    "a block that another request still holds was evicted: look at the count": lambda: Slip(counted=False),
    "a block that is held again was evicted: hold must take it out of the queue": lambda: Slip(revived=False),
    "first in, first out: being let go again makes a block the most recent one": lambda: Slip(fifo=True),
    "the most recently used went first": lambda: Slip(newest=True),
    "evict() of nothing is None, not an error": lambda: Slip(emptied=KeyError("empty")),
}


def run_script(answer, script):
    evictor, found = answer(), []
    for call, blocks in script:
        if call == "evict":
            found.append(evictor.evict())
        else:
            given = list(blocks)
            getattr(evictor, call)(given)
            if given != blocks:
                found.append(f"{call} changed its list in place")
            given.clear()  # the caller's list is the caller's
    return found


def expect_script(script):
    counts, moment, found = {}, {}, []
    for now, (call, blocks) in enumerate(script):
        if call == "hold":
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        elif call == "let_go":
            for place, block in enumerate(blocks):
                counts[block] -= 1
                moment[block] = (now, -place)
        else:
            idle = [block for block, held in counts.items() if held == 0]
            found.append(min(idle, key=moment.get) if idle else None)
            if idle:
                del counts[found[-1]]
    return found


def script_text(script):
    calls = [f"{call}({'' if call == 'evict' else blocks})" for call, blocks in script]
    return "; ".join(calls[:9]) + ("; ..." if len(calls) > 9 else "")


@register("07.evictor", points=3, title="Eviction that respects references", hints=slips(EVICT))
def evictor(rng):
    hold, go, evict = (lambda *b: ("hold", list(b))), (lambda *b: ("let_go", list(b))), ("evict", [])
    scripts = [
        [hold(4, 5), go(4, 5), evict, evict, evict],
        [evict, hold(1), evict, go(1), evict],
        [hold(1, 2, 3), hold(1, 2), go(1, 2, 3), evict, evict, go(1, 2), evict, evict],
        [hold(1, 2), go(1, 2), hold(3), go(3), hold(1, 2), evict, go(1, 2), evict, evict, evict],
        [hold(0), go(0), evict, hold(0), evict, go(0), evict, evict],
        [hold(1), hold(2), go(2), go(1), evict, evict],
        [hold(7, 8), go(7, 8), hold(7), go(7), evict, evict],
    ]
    for _ in range(6):  # two evictors' worth of traffic each
        script, tables, stored_now = [], [], []
        for _ in range(60):
            choice = rng.random()
            if choice < 0.4 or not tables:
                known = rng.sample(stored_now, rng.randint(0, len(stored_now)))[:3] if stored_now else []
                new = [b for b in range(40) if b not in stored_now]
                blocks = known + rng.sample(new, min(len(new), rng.randint(1, 2)))
                stored_now += [b for b in blocks if b not in stored_now]
                tables.append(blocks)
                script.append(("hold", blocks))
            elif choice < 0.75:
                script.append(("let_go", tables.pop(rng.randrange(len(tables)))))
            else:
                script.append(evict)
                gone = expect_script(script)[-1]
                if gone is not None:
                    stored_now.remove(gone)
        scripts.append(script + [evict] * 3)
    crowd = rng.sample(range(10**5), 120)
    scripts.append(
        [hold(*crowd), go(*crowd[60:]), hold(*crowd[90:]), go(*crowd[:60]), *[evict] * 91, go(*crowd[90:]), evict]
    )
    for script in scripts:
        yield Drive(
            lambda answer, script=script: run_script(answer, script), expect_script(script), script_text(script)
        )


# 4. The radix tree. The oracle is the set of all stored prefixes.


def run_tree(answer, calls):
    tree, found, ends = answer(), [], []
    for call, tokens in calls:
        if call != "edges":
            given = list(tokens)
            found.append(getattr(tree, call)(given))
            if given != list(tokens):
                return f"{call} changed its list in place"
            given.clear()
            ends += [tuple(tokens)] if call == "insert" else []
        else:
            found.append(judge_edges(tree.edges(), ends))
    return found


def judge_edges(edges, ends):
    """One line on the shape: right, or what is wrong with it."""
    edges = list(edges) if isinstance(edges, Iterable) else edges
    if not isinstance(edges, list) or not all(isinstance(edge, Iterable) for edge in edges):
        return f"edges() gave {describe(edges)}: it must be a list of tuples"
    edges = [tuple(edge) for edge in edges]
    prefixes = {end[:n] for end in ends for n in range(1, len(end) + 1)}
    if any(not edge for edge in edges):
        return "an edge is empty"
    if sorted(t for edge in edges for t in edge) != sorted(prefix[-1] for prefix in prefixes):
        return f"the edges hold {sum(map(len, edges))} tokens, {len(prefixes)} are stored (or they are others)"
    following = Counter(prefix[:-1] for prefix in prefixes)
    needed = {
        prefix for prefix in prefixes if following[prefix] != 1
    }  # where paths part, and where they end for good
    allowed = needed | set(ends) - {()}
    if not len(needed) <= len(edges) <= len(allowed):
        return f"{len(edges)} edges, where {len(needed)} to {len(allowed)} are enough"
    if not tiles(stretches(needed, allowed), edges):
        return f"{describe(edges)} are no stretches between the places where paths part or end"
    return "edges are right"


def stretches(needed, allowed):
    """(tokens, places inside where an edge may end) from each needed cut to the next one below it."""
    found = []
    for prefix in needed:
        top = next((n for n in range(len(prefix) - 1, 0, -1) if prefix[:n] in needed), 0)
        found.append((prefix[top:], [n - top for n in range(top + 1, len(prefix)) if prefix[:n] in allowed]))
    return found


def tiles(stretches, edges) -> bool:
    """Are the edges these stretches, each whole or cut at some of its places? All that may be left is kept."""
    left = {frozenset(Counter(edges).items())}
    for tokens, places in sorted(stretches, key=lambda stretch: len(stretch[1])):
        ways = [
            Counter(tokens[a:b] for a, b in pairwise((0, *some, len(tokens))))
            for count in range(len(places) + 1)
            for some in combinations(places, count)
        ]
        left = {
            frozenset((have - way).items())
            for have in (Counter(dict(one)) for one in left)
            for way in ways
            if way <= have
        }
    return frozenset() in left


def expect_tree(calls):
    prefixes, found = {()}, []
    for call, tokens in calls:
        if call == "edges":
            found.append("edges are right")
            continue
        own = {tuple(tokens[:n]) for n in range(len(tokens) + 1)}
        found.append(len(own - prefixes) if call == "insert" else max(len(p) for p in own & prefixes))
        prefixes |= own if call == "insert" else set()
    return found


class Tree:
    """A RadixTree with a mistake in it."""

    mistake = ""

    def __init__(self):
        self.top = {}

    def match(self, tokens):
        children, place = self.top, 0
        while place < len(tokens) and tokens[place] in children:
            stretch, below = children[tokens[place]]
            same = agree(stretch, tokens[place:])
            if self.mistake == "whole edges" and same < len(stretch):
                return place
            place += same
            if same < len(stretch):
                return place
            children = below
        return place

    def insert(self, tokens):
        tokens = tuple(tokens)
        children, place = self.top, 0
        while place < len(tokens) and tokens[place] in children:
            node = children[tokens[place]]
            stretch, below = node
            same = agree(stretch, tokens[place:])
            place += same
            if place == len(tokens):
                return len(tokens) if self.mistake == "all new" else 0
            if same < len(stretch):
                if self.mistake == "overwrite":
                    children[stretch[0]] = [stretch[:same], {}]
                    below = children[stretch[0]][1]
                elif self.mistake == "children lost":
                    below = {stretch[same]: [stretch[same:], {}]}
                    node[:] = [stretch[:same], below]
                elif self.mistake == "children above":
                    below[stretch[same]] = [stretch[same:], {}]
                    node[0] = stretch[:same]
                elif self.mistake == "not cut":
                    below[stretch[same]] = [stretch[same:], {}]
                else:
                    below = {stretch[same]: [stretch[same:], below]}
                    node[:] = [stretch[:same], below]
            children = below
        rest = tokens[place:]
        if self.mistake == "one token an edge":
            for token in rest:
                children[token] = [(token,), {}]
                children = children[token][1]
        elif rest:
            children[rest[0]] = [rest, {}]
        return len(tokens) if self.mistake == "all new" else len(rest)

    def edges(self):
        found, todo = [], list(self.top.values())
        while todo:
            stretch, below = todo.pop()
            found.append(stretch)
            todo += below.values()
        return found


def agree(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def tree_slip(mistake):
    return type("Tree", (Tree,), {"mistake": mistake})


TREES = {
    "a match may end inside an edge: count the tokens that agree": "whole edges",
    "only what was not stored is new": "all new",
    "a split threw the lower half away": "overwrite",
    "the old children were lost in the split: they belong to the lower half": "children lost",
    "the old children stayed at the upper half: they belong below the lower one": "children above",
    "the upper half was not shortened: tokens are stored twice": "not cut",
    "one token an edge: a plain trie; an edge carries a whole stretch": "one token an edge",
}


def shape(word):
    return lambda got, expected, case: (
        isinstance(got, list) and any(isinstance(line, str) and word in line for line in got)
    )


@register(
    "07.radix_tree",
    points=4,
    title="A radix tree",
    hints=[
        *slips({text: tree_slip(mistake) for text, mistake in TREES.items()}),
        Hint("an empty edge: when nothing is left, nothing hangs below", when=shape("an edge is empty")),
        Hint("an edge was cut where nothing parts or ends", when=shape("are enough")),
        Hint("an edge is a stretch of what was stored, in its order", when=shape("no stretches")),
        Hint("nothing was returned: is there a `return`?", when=shape("edges() gave None")),
        Hint("edges() does not hold each stored token once", when=shape("the edges hold")),
    ],
)
def radix_tree(rng):
    insert, match, edges = (lambda *t: ("insert", list(t))), (lambda *t: ("match", list(t))), ("edges", [])
    scripts = [
        [match(1, 2), insert(1, 2, 3), edges, insert(1, 2, 4), match(1, 2, 9), match(1, 2, 3, 5), edges],
        [insert(1, 2, 3, 4), match(1, 2), match(1, 2, 3, 4, 5), match(2), match(), insert(), edges],
        [insert(1, 2, 3, 4), insert(1, 2, 3, 4), insert(1, 2), edges, insert(1, 2, 3, 4, 5), match(1, 2, 3, 4, 5, 6)],
        [
            insert(1, 2, 3, 4),
            insert(1, 2, 3, 5),
            insert(1, 9),
            edges,
            match(1, 2, 3, 5),
            match(1, 2, 3, 4),
            match(1, 9),
        ],
        [insert(1, 1, 1, 1), insert(1, 1, 2), insert(1), match(1, 1, 1, 2), edges, insert(2), insert(2, 2), edges],
    ]
    for words in (2, 2, 3, 5):
        calls = []
        for _ in range(40):
            tokens = [rng.randrange(words) for _ in range(rng.randint(0, 9))]
            calls += [(rng.choice(["insert", "match"]), tokens)] + [edges] * (rng.random() < 0.2)
        scripts.append([*calls, edges])
    base = [rng.randrange(150_000) for _ in range(400)]
    cuts = [insert(*base[:at], 7, *base[at:]) for at in (399, 128, 33, 270)]
    far = [match(*base[:at], 9) for at in (64, 129, 257, 400)]
    scripts.append([insert(*base), *cuts, *far, match(*base[:33], 7, *base[33:200]), edges])
    for calls in scripts:
        shown = [f"{tokens[:9]}{' ...' * (len(tokens) > 9)}" if call != "edges" else "" for call, tokens in calls[:7]]
        text = "; ".join(f"{call}({tokens})" for (call, _), tokens in zip(calls, shown))
        text += "; ..." if len(calls) > 7 else ""
        yield Drive(lambda answer, calls=calls: run_tree(answer, calls), expect_tree(calls), text)


# 5. Debug it. Content is kept beside the pool: what each block really holds.


def given_admit(keys, free, counts, block_of, key_of):
    """The function as the reader is given it."""
    hit = []
    for key in keys:
        if key not in block_of:
            break
        hit.append(block_of[key])
    fresh = [free.pop(0) for _ in keys[len(hit) :]]
    for block in hit:
        counts[block] += 1
        if block in free:
            free.remove(block)
    for block, key in zip(fresh, keys[len(hit) :]):
        counts[block] = 1
        block_of[key], key_of[block] = block, key
    return hit + fresh, len(hit)


def run_pool(answer, num_blocks, events):
    """events: a prompt's keys to admit, or the number of the admitted prompt that ends."""
    free, counts, block_of, key_of = list(range(num_blocks)), [0] * num_blocks, {}, {}
    content, tables, found = {}, [], []
    for event in events:
        if isinstance(event, int):
            for block in reversed(tables[event]):
                counts[block] -= 1
                if counts[block] == 0:
                    free.append(block)
            continue
        keys = list(event)
        result = answer(keys, free, counts, block_of, key_of)
        try:
            blocks, reused = result
            tables.append(list(blocks))
        except (TypeError, ValueError):
            return [*found, f"expected a pair, (blocks, how many were reused), got {describe(result)}"]
        if keys != list(event):
            return [*found, "keys were changed in place"]
        for block, key in zip(blocks[reused:], keys[reused:]):
            content[block] = key  # prefill writes
        reads = [content.get(block) for block in blocks]
        if reads != keys:
            return [*found, f"prompt {keys} reads blocks that hold {reads}"]
        stale = [key for key, block in block_of.items() if content.get(block) != key]
        if stale:
            return [*found, f"block_of names blocks that hold something else now: {sorted(stale)}"]
        if {b: k for k, b in block_of.items()} != key_of:
            return [*found, "block_of and key_of do not agree"]
        found.append([list(blocks), reused, list(free), list(counts)])
    return found


def expect_pool(num_blocks, events):
    """The same from the rules: a list of blocks by time of last use, and what each holds."""
    holds, users, idle, tables, found = {}, [0] * num_blocks, list(range(num_blocks)), [], []
    for event in events:
        if isinstance(event, int):
            for block in tables[event][::-1]:
                users[block] -= 1
                idle += [block] if users[block] == 0 else []
            continue
        where = {key: block for block, key in holds.items()}
        reused = next((i for i, key in enumerate(event) if key not in where), len(event))
        table = [where[key] for key in event[:reused]]
        idle = [block for block in idle if block not in table]
        table += idle[: len(event) - reused]
        idle = idle[len(event) - reused :]
        for block, key in zip(table, event):
            users[block] += 1
            holds[block] = key
        tables.append(table)
        found.append([list(table), reused, list(idle), list(users)])
    return found


def forget(block, block_of, key_of):
    if block in key_of:
        del block_of[key_of.pop(block)]


def admit_slip(first="hold", stale=False, remove=True, count=True, forgotten=True, everything=False):
    """admit with a mistake. first: what comes first; stale: is the old key kept?"""

    def wrong(keys, free, counts, block_of, key_of):
        hit = []
        for key in keys:
            if key not in block_of:
                break
            hit.append(block_of[key])
        fresh = [free.pop(0) for _ in keys[len(hit) :]] if first == "take" else None
        for block in hit:
            counts[block] += count
            if block in free and remove:
                free.remove(block)
        fresh = [free.pop(0) for _ in keys[len(hit) :]] if fresh is None else fresh
        for block in fresh:
            if not stale:
                forget(block, block_of, key_of)
        if everything:
            for block in [b for b in key_of if counts[b] == 0]:
                forget(block, block_of, key_of)
        for block, key in zip(fresh, keys[len(hit) :]):
            counts[block] = 1
            block_of[key], key_of[block] = block, key
        return hit + fresh, len(hit)

    return wrong


ADMIT = {
    "the other bug is there: a block gets new content, block_of still finds it under its old key": admit_slip(
        stale=True
    ),
    "the other bug is there: a fresh block may be one that was just found, hold those first": admit_slip("take"),
    "a found block that nobody held must leave `free`": admit_slip(remove=False),
    "a found block has one holder more": admit_slip(count=False),
    "that forgets every idle block: only those that get new content go": admit_slip(everything=True),
}


def says(word):
    return lambda got, expected, case: isinstance(got, list) and bool(got) and word in str(got[-1])


@register(
    "07.admit",
    points=3,
    title="Debug it: the answer about somebody else's contract",
    given=given_admit,
    hints=[
        *slips(ADMIT),
        Hint("block_of and key_of must change together", when=says("do not agree")),
        Hint("an old key still finds a block with new content", when=says("hold something else")),
        Hint("a prompt was given a block with other content", when=says("reads blocks")),
    ],
)
def admit(rng):
    plans = [
        (3, ["abc", 0, "xyz", 1, "abc"]),
        (4, ["abc", 0, "abd", 1, "abe", 2]),
        (3, ["ab", 0, "abc", 1, "abd"]),
        (4, ["ab", "ab", 0, "xy", 1, 2, "abx", 3]),
        (5, ["abc", "abd", 0, 1, "vwx", 2, "abc"]),
        (2, ["a", 0, "b", 1, "c", 2, "a", 3, "b"]),
        (6, ["abcd", 0, "abxy", 1, "ab", 2, "mnop", 3, "abcd"]),
        (3, ["", "abc", 0, 1]),
    ]
    for num_blocks, events in plans:
        yield pool_case(num_blocks, [e if isinstance(e, int) else prefixes(e) for e in events])
    for _ in range(5):
        num_blocks, events, running, admitted, held = 9, [], [], 0, 0
        for _ in range(30):
            word = "".join(rng.choice("ab") for _ in range(rng.randint(1, 4)))
            if held + len(word) <= num_blocks and rng.random() < 0.6:
                events.append(prefixes(word))
                running.append((admitted, len(word)))
                admitted, held = admitted + 1, held + len(word)
            elif running:
                number, size = running.pop(rng.randrange(len(running)))
                events.append(number)
                held -= size
        yield pool_case(num_blocks, events)
    long = [f"{rng.choice('ab') * 30}{i:03d}" for i in range(6)]
    events = [e for i, word in enumerate(long) for e in (prefixes(word), i)]
    yield pool_case(75, [*events, prefixes(long[-1] + "x" * 20)])


def prefixes(word):
    """The key of a block stands for all up to its end."""
    return [word[: i + 1] for i in range(len(word))]


def pool_case(num_blocks, events):
    shown = ["end of prompt " + str(e) if isinstance(e, int) else f"admit({e[:9]})" for e in events[:6]]
    expected = expect_pool(num_blocks, events)
    text = f"pool of {num_blocks}: " + "; ".join(shown) + ("; ..." if len(events) > 6 else "")
    return Drive(partial(run_pool, num_blocks=num_blocks, events=events), expected, text, compare=last_said)


def last_said(got, expected):
    """As `mismatch`, but a text at the end of the list is the message itself."""
    return got[-1] if got and isinstance(got[-1], str) else mismatch(got, expected)


# 6. Estimate it.

FIGURES = {  # key: expected, {what a slip gives: its name}
    "prompt_tokens": (
        sum(1050 + 200 * i for i in range(10)),
        {
            1000 + 10 * 50: "each turn sends all that was said so far, not its question alone",
            2850: "that is the last turn's prompt: add up all ten",
            sum(1050 + 50 * i for i in range(10)): "the answers become part of the next prompt",
            sum(1200 + 200 * i for i in range(10)): "a turn's own answer is not in its prompt",
            10 * 1050: "prompts grow: what was said before is sent again",
        },
    ),
    "hit_rate": (
        19000 / 19500,
        0.001,
        {
            0.97171: "that is the mean of the turns' rates: divide all found tokens by all sent ones",
            2800 / 2850: "that is turn 10 alone; all ten are asked for",
            1 - 500 / 21000: "a turn's own answer is not in its prompt",
            18000 / 19500: "the system prompt was there already: turn 1 finds it, too",
            (19000 - 150 * 9) / 19500: "answers are stored, too: all but the new question is found",
            10000 / 19500: "not only the system prompt is found: earlier turns are, too",
            97.4359: "a share between 0 and 1 is asked for",
        },
    ),
    "ttft_ratio": (
        25 / 305,
        {
            50 / 2850: "the 20 ms that every step costs are left out",
            305 / 25: "that is cold / warm",
            20 / 305: "the 50 new tokens are computed, too",
            25 / 125: "the cold prompt of turn 10 is 2,850 tokens",
            25.0: "that is the warm TTFT in ms; the ratio is asked for",
        },
    ),
    "working_set": (
        1000 + 200 * 2000,
        0.001,
        {
            200 * 3000: "the system prompt is shared: it counts once",
            1000 + 200 * 1850: "the last answer is stored, too",
            3000: "200 conversations are asked for",
            200 * 2000: "the system prompt takes room as well, once",
        },
    ),
}


@register("07.chat_figures", points=2, title="Estimate it: a chat service")
def chat_figures(rng):
    yield from estimates("chat_figures", FIGURES, 0.01)
