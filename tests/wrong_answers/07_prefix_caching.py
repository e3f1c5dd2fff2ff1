"""Plausible wrong answers to exercise 07, each with text that its message must contain."""

KEYS = "def block_keys(tokens, block_size, salt=''):\n"
LOOP = "for start in range(0, len(tokens) - block_size + 1, block_size):"
CHUNK = '",".join(map(str, tokens[start : start + block_size]))'
HASH = "sha256(key + chunk.encode()).digest()"

PREFIX = "if prefix != tuple(tokens[:end]):\n            break"

EVICTOR = """
class Evictor:
    counts, unheld = {}, OrderedDict()

    def hold(self, blocks):
        for block in blocks:
            self.counts[block] = self.counts.get(block, 0) + 1
            self.unheld.pop(block, None)

    def let_go(self, blocks):
        for block in reversed(blocks):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.unheld[block] = None

    def evict(self):
        return self.unheld.popitem(last=False)[0] if self.unheld else None
"""

SPLIT = "below = {stretch[same]: [stretch[same:], below]}"
HOLD = """    for block in hit:
        counts[block] += 1
        if block in free:
            free.remove(block)
"""
TAKE = "    fresh = [free.pop(0) for _ in keys[len(hit) :]]\n    for block in fresh:"
FORGET = "        if block in key_of:\n            del block_of[key_of.pop(block)]"

CHAIN = "def block_keys(tokens, block_size, salt=''):\n    keys, key = [], {start}\n" + (
    "    for start in range(0, len(tokens) - block_size + 1, block_size):\n"
    "        chunk = tokens[start : start + block_size]\n"
    "        {step}\n"
    "        keys.append(key)\n"
    "    return keys"
)


def chain(step: str, start: str = "sha256(salt.encode()).hexdigest()") -> str:
    """block_keys with another step from key to key, or another start."""
    return CHAIN.replace("{start}", start).replace("{step}", step)


def hashed(text: str) -> str:
    return chain(f"key = sha256((key + {text}).encode()).hexdigest()")


def rolling(base: str, modulo: str = "2**64") -> str:
    start = "int(sha256(salt.encode()).hexdigest()[:15], 16)"
    return chain(f"for t in chunk: key = (key * {base} + t + 1) % ({modulo})", start)


def joined(mark: str) -> str:
    """The salt and the whole prefix, joined by a mark."""
    return KEYS + (
        "    ends = range(block_size, len(tokens) + 1, block_size)\n"
        f"    return [sha256({mark!r}.join([salt, *map(str, tokens[:end])]).encode()).digest() for end in ends]"
    )


REDUCE = "__import__('functools').reduce"
FIGURES = {
    "prompt_tokens": "19500",
    "hit_rate": "19000 / 19500",
    "ttft_ratio": "25 / 305",
    "working_set": "401000",
}


def figures(**changed: str) -> str:
    body = ", ".join(f"{key!r}: {value}" for key, value in {**FIGURES, **changed}.items())
    return f"def chat_figures():\n    return {{{body}}}"


WRONG = {
    "07.block_keys": {
        "16 tokens of a block": (
            "import hashlib\n"
            "def block_keys(tokens, block_size, salt=''):\n"
            "    keys, key = [], repr(salt).encode()\n"
            "    for end in range(block_size, len(tokens) + 1, block_size):\n"
            "        key = hashlib.sha256(key + repr(tokens[end - block_size:end][:16]).encode()).digest()\n"
            "        keys.append(key)\n"
            "    return keys",
            "expected",
        ),
        "no parent": ((HASH, "sha256(salt.encode() + b'|' + chunk.encode()).digest()"), "the key before"),
        "partial block": ((LOOP, "for start in range(0, len(tokens), block_size):"), "partial last block"),
        "no salt": (("sha256(salt.encode()).digest()", "b''"), "salt"),
        "no separator": ((CHUNK, "''.join(map(str, tokens[start : start + block_size]))"), "separator"),
        "salt and tokens without a separator": (
            KEYS + "    keys, key = [], salt\n"
            "    for end in range(block_size, len(tokens) + 1, block_size):\n"
            "        key = sha256((key + ','.join(map(str, tokens[end - block_size : end]))).encode()).hexdigest()\n"
            "        keys.append(key)\n"
            "    return keys",
            "salt and tokens run together",
        ),
        "salt and prefix joined by commas": (
            KEYS + "    ends = range(block_size, len(tokens) + 1, block_size)\n"
            "    return [sha256(','.join(map(str, (salt, *tokens[:end]))).encode()).digest() for end in ends]",
            "expected",
        ),
        "the last 64 tokens": (
            KEYS + "    ends = range(block_size, len(tokens) + 1, block_size)\n"
            "    return [sha256(repr((salt, end, tokens[:end][-64:])).encode()).digest() for end in ends]",
            "expected",
        ),
        "17 bits": ((CHUNK, "','.join(str(t % 2**17) for t in tokens[start : start + block_size])"), "expected"),
        "as few bytes as fit": (
            (
                f"chunk = {CHUNK}",
                "chunk = b''.join(t.to_bytes(-(-t.bit_length() // 8) or 1, 'little') "
                "for t in tokens[start : start + block_size]).decode('latin1')",
            ),
            "expected",
        ),
        "chr()": ((CHUNK, "''.join(chr(t) for t in tokens[start : start + block_size])"), "raised"),
        "sorted": ((CHUNK, "','.join(map(str, sorted(tokens[start : start + block_size])))"), "order"),
        "sum": ((CHUNK, "str(sum(tokens[start : start + block_size]))"), "sum"),
        "one byte": ((CHUNK, "','.join(str(t % 256) for t in tokens[start : start + block_size])"), "one byte"),
        "two bytes": ((CHUNK, "','.join(str(t % 65536) for t in tokens[start : start + block_size])"), "two bytes"),
        "bytes()": ((f"chunk = {CHUNK}", "chunk = str(bytes(tokens[start : start + block_size]))"), "raised"),
        "the last token": ((CHUNK, "str(tokens[start + block_size - 1])"), "only the last token"),
        "the prefix itself": (
            KEYS + "    ends = range(block_size, len(tokens) + 1, block_size)\n"
            "    return [repr((salt, tokens[:end])) for end in ends]",
            "running key",
        ),
        "tuples": (
            KEYS + "    ends = range(block_size, len(tokens) + 1, block_size)\n"
            "    return [(salt, tuple(tokens[:end])) for end in ends]",
            "must be bytes, str or int",
        ),
        "one key": (KEYS + "    return sha256(repr((salt, tokens)).encode()).digest()", "list of keys"),
        "parent of the prompt's start": (
            KEYS + "    first = repr((salt, tokens[:block_size]))\n"
            "    ends = range(block_size, len(tokens) + 1, block_size)\n"
            "    return [sha256((first + repr(tokens[end - block_size : end])).encode()).digest() for end in ends]",
            "expected",
        ),
        "random": (
            KEYS + "    import os\n    return [os.urandom(8) for _ in range(len(tokens) // block_size)]",
            "expected",
        ),
        "short digest": ((HASH, "sha256(key + chunk.encode()).digest()[:1]"), "expected"),
        **{f"rolling, {base}": (rolling(base), "rolling hash") for base in ("31", "33", "131", "50257", "1000003")},
        "rolling, 31 modulo 10^9 + 7": (rolling("31", "10**9 + 7"), "rolling hash"),
        "rolling, 131 modulo 2^61 - 1": (rolling("131", "2**61 - 1"), "rolling hash"),
        "rolling, 1000003 modulo 2^61 - 1": (rolling("1000003", "2**61 - 1"), "rolling hash"),
        **{
            f"packed, {base}": (hashed(f"str({REDUCE}(lambda n, t: n * {base} + t, chunk, 0))"), "carries")
            for base in ("1000", "50257", "128256", "10**6")
        },
        **{
            f"padded, {width}": (hashed(f"''.join(f'{{t:{width}}}' for t in chunk)"), "not at most")
            for width in ("02d", "03d", "04d", "05d", "03x", "04x")
        },
        "text of an array": (hashed("str(__import__('numpy').array(chunk))"), "leaves out its middle"),
        "text of an array of the prefix": (
            KEYS + "    import numpy as np\n"
            "    ends = range(block_size, len(tokens) + 1, block_size)\n"
            "    return [sha256((repr(salt) + str(np.array(tokens[:end]))).encode()).digest() for end in ends]",
            "leaves out its middle",
        ),
        "6 digits": (chain("key = sha256(f'{key}|{chunk}'.encode()).hexdigest()[:6]"), "too short"),
        "8 digits": (chain("key = sha256(f'{key}|{chunk}'.encode()).hexdigest()[:8]"), "too short"),
        "24 bits": (chain("key = hash((key, *chunk)) % 2**24", "hash(salt)"), "too short"),
        "crc32": (
            chain("key = __import__('zlib').crc32(repr(chunk).encode(), key)", "len(salt) and hash(salt) % 2**32"),
            "too short",
        ),
        "FNV-1a, 32 bits": (
            chain(
                "for t in [*chunk, 0xFFFFFF]: key = (key ^ t) * 16777619 % 2**32",
                "int(sha256(salt.encode()).hexdigest()[:8], 16)",
            ),
            "too short",
        ),
        **{
            f"joined by {name}": (joined(mark), "a mark that a salt may hold")
            for name, mark in {"newline": "\n", "#": "#", "full stop": ".", "zero": "\0", "tab": "\t"}.items()
        },
        **{
            f"salt, {text}": (chain("key = sha256(f'{key}|{chunk}'.encode()).hexdigest()", start), "all of the salt")
            for text, start in {
                "sum of its letters": "str(sum(map(ord, salt)))",
                "sorted": "str(sorted(salt))",
                "stripped": "repr(salt.strip())",
                "in small letters": "repr(salt.lower())",
                "first 64 letters": "repr(salt[:64])",
                "ASCII": "salt.encode('ascii')",
                "zeros cut": "repr(salt.rstrip(chr(0)))",
            }.items()
        },
        "salt as the key of an HMAC": (
            chain("key = __import__('hmac').new(salt.encode(), f'{key}|{chunk}'.encode(), 'sha256').digest()", "b''"),
            "all of the salt",
        ),
        "nothing": (KEYS + "    pass", "is there a `return`"),
    },
    "07.longest_prefix": {
        "32 blocks at most": (
            "right = longest_prefix\n"
            "def longest_prefix(tokens, block_size, store, key_of):\n"
            "    return right(tokens, block_size, store, key_of)[:32]",
            "expected",
        ),
        "the last token served": (
            ("range(block_size, len(tokens), block_size)", "range(block_size, len(tokens) + 1, block_size)"),
            "no logits",
        ),
        "not compared": ((PREFIX, "if block is None:\n            break"), "tokens decide"),
        "the last block compared": (
            (
                PREFIX,
                "if not prefix or list(prefix[-block_size:]) != tokens[end - block_size : end]:\n            break",
            ),
            "not the last block's tokens",
        ),
        "lengths compared": (
            (PREFIX, "if prefix is None or len(prefix) != end:\n            break"),
            "equal lengths",
        ),
        "length and last block compared": (
            (
                PREFIX,
                "last = tokens[end - block_size : end]\n"
                "        if not prefix or len(prefix) != end or list(prefix[-block_size:]) != last:\n"
                "            break",
            ),
            "expected",
        ),
        "length and first block compared": (
            (
                PREFIX,
                "if not prefix or len(prefix) != end or list(prefix[:block_size]) != tokens[:block_size]:\n"
                "            break",
            ),
            "expected",
        ),
        "takes what it finds": (("store.get(key", "store.pop(key"), "store changed in place"),
        "goes on after a gap": ((PREFIX, "if prefix != tuple(tokens[:end]):\n            continue"), "stop there"),
        "a whole block left": (
            (
                "range(block_size, len(tokens), block_size)",
                "range(block_size, len(tokens) - block_size + 1, block_size)",
            ),
            "one token",
        ),
        "two tokens left": (
            ("range(block_size, len(tokens), block_size)", "range(block_size, len(tokens) - 1, block_size)"),
            "one token",
        ),
        "no parent": (("key_of(key, tuple", "key_of(b'', tuple"), "key before"),
        "nothing": ("def longest_prefix(tokens, block_size, store, key_of): return []", "expected"),
        "count": (("return blocks", "return len(blocks)"), "expected"),
        "only longest": (("blocks.append(block)", "blocks = [block]"), "expected"),
        "a list against a tuple": ((PREFIX, PREFIX.replace("tuple(tokens[:end])", "tokens[:end]")), "never equals"),
        "a list to key_of": (
            ("key_of(key, tuple(tokens[end - block_size : end]))", "key_of(key, tokens[end - block_size : end])"),
            "handed a list",
        ),
        "key_of ignored": (
            "def longest_prefix(tokens, block_size, store, key_of):\n"
            "    stored, blocks = {prefix: block for block, prefix in store.values()}, []\n"
            "    for end in range(block_size, len(tokens), block_size):\n"
            "        if tuple(tokens[:end]) not in stored:\n"
            "            break\n"
            "        blocks.append(stored[tuple(tokens[:end])])\n"
            "    return blocks",
            "another tenant",
        ),
        "own hash": (
            (
                "key_of(key, tuple(tokens[end - block_size : end]))",
                "sha256(key + repr(tuple(tokens[end - block_size : end])).encode()).digest()",
            ),
            "expected",
        ),
        "by scanning the store": (
            "def longest_prefix(tokens, block_size, store, key_of):\n"
            "    return [b for b, p in store.values() if tuple(tokens[: len(p)]) == p and len(p) < len(tokens)]",
            "expected",
        ),
    },
    "07.evictor": {
        "64 idle blocks at most": (
            "class Small(Evictor):\n"
            "    done = 0\n"
            "    def evict(self):\n"
            "        self.done += 1\n"
            "        return super().evict() if self.done <= 64 else None\n"
            "Evictor = Small",
            "expected",
        ),
        "head first": (("in reversed(blocks)", "in blocks"), "from the back"),
        "count ignored": (
            (
                "            if self.counts[block] == 0:\n                self.unheld[block] = None",
                "            self.unheld[block] = None",
            ),
            "still holds",
        ),
        "hold leaves it in the queue": (
            ("            self.unheld.pop(block, None)\n", ""),
            "take it out of the queue",
        ),
        "twice in the queue": (
            "class Evictor:\n"
            "    def __init__(self):\n        self.counts, self.queue = {}, []\n"
            "    def hold(self, blocks):\n"
            "        for block in blocks:\n            self.counts[block] = self.counts.get(block, 0) + 1\n"
            "    def let_go(self, blocks):\n"
            "        for block in reversed(blocks):\n"
            "            self.counts[block] -= 1\n"
            "            if self.counts[block] == 0:\n                self.queue.append(block)\n"
            "    def evict(self):\n"
            "        while self.queue:\n"
            "            block = self.queue.pop(0)\n"
            "            if self.counts.get(block) == 0:\n"
            "                del self.counts[block]\n                return block\n",
            "in the queue twice",
        ),
        "newest first": (("popitem(last=False)", "popitem()"), "most recently used went first"),
        "raises when empty": (("        if not self.unheld:\n            return None\n", ""), "not an error"),
        "-1 when empty": (
            ("            return None\n        block, _", "            return -1\n        block, _"),
            "expected",
        ),
        "shared by all": (EVICTOR, "expected"),
        "reverses in place": (
            ("for block in reversed(blocks):", "blocks.reverse()\n        for block in blocks:"),
            "in place",
        ),
        "counts held blocks as sets": (("self.counts.get(block, 0) + 1", "1"), "raised"),
        "by number": (
            (
                "block, _ = self.unheld.popitem(last=False)",
                "block = min(self.unheld)\n        del self.unheld[block]",
            ),
            "expected",
        ),
    },
    "07.radix_tree": {
        "256 tokens at most": (
            "class Small(RadixTree):\n"
            "    def match(self, tokens):\n"
            "        return super().match(tokens[:256])\n"
            "RadixTree = Small",
            "expected",
        ),
        "whole edges only": (
            (
                "            for token in stretch:",
                "            if tuple(tokens[place : place + len(stretch)]) != stretch:\n"
                "                return place\n"
                "            for token in stretch:",
            ),
            "inside an edge",
        ),
        "all new": (("return len(rest)", "return len(tokens)"), "not stored is new"),
        "children lost": ((SPLIT, "below = {stretch[same]: [stretch[same:], {}]}"), "children were lost"),
        "children above": ((SPLIT, "below[stretch[same]] = [stretch[same:], {}]"), "stayed at the upper half"),
        "upper not shortened": (("node[:] = [stretch[:same], below]", "node[:] = [stretch, below]"), "expected"),
        "split off by one": (
            ("node[:] = [stretch[:same], below]", "node[:] = [stretch[: same + 1], below]"),
            "expected",
        ),
        "empty edge": (
            (
                "        if rest:\n            children[rest[0]] = [rest, {}]",
                "        children[rest[0] if rest else None] = [rest, {}]",
            ),
            "empty edge",
        ),
        "plain trie": (
            "class RadixTree:\n"
            "    def __init__(self): self.top = {}\n"
            "    def match(self, tokens):\n"
            "        at, n = self.top, 0\n"
            "        while n < len(tokens) and tokens[n] in at: at, n = at[tokens[n]], n + 1\n"
            "        return n\n"
            "    def insert(self, tokens):\n"
            "        new, at = len(tokens) - self.match(tokens), self.top\n"
            "        for t in tokens: at = at.setdefault(t, {})\n"
            "        return new\n"
            "    def edges(self):\n"
            "        out, todo = [], [self.top]\n"
            "        while todo:\n"
            "            at = todo.pop()\n"
            "            out += [(t,) for t in at]\n"
            "            todo += at.values()\n"
            "        return out",
            "plain trie",
        ),
        "a set of prefixes": (
            "class RadixTree:\n"
            "    def __init__(self): self.all = {()}\n"
            "    def match(self, t): return max(n for n in range(len(t) + 1) if tuple(t[:n]) in self.all)\n"
            "    def insert(self, t):\n"
            "        new = len(t) - self.match(t)\n"
            "        self.all |= {tuple(t[:n]) for n in range(len(t) + 1)}\n"
            "        return new\n"
            "    def edges(self): return sorted(self.all - {()})",
            "each stored token once",
        ),
        "stretches turned round": (("found.append(stretch)", "found.append(stretch[::-1])"), "in its order"),
        "stretches sorted": (("found.append(stretch)", "found.append(tuple(sorted(stretch)))"), "in its order"),
        "cut at other places": (
            "class Soup(RadixTree):\n"
            "    def edges(self):\n"
            "        found = super().edges()\n"
            "        soup = [token for edge in found for token in edge]\n"
            "        return [(t,) for t in soup[: len(found) - 1]] + [tuple(soup[len(found) - 1 :])] * bool(found)\n"
            "RadixTree = Soup",
            "in its order",
        ),
        "moved by one token": (
            "class Moved(RadixTree):\n"
            "    def edges(self):\n"
            "        found = super().edges()\n"
            "        soup = iter([t for e in found[1:] + found[:1] for t in e])\n"
            "        return [tuple(next(soup) for _ in edge) for edge in found]\n"
            "RadixTree = Moved",
            "in its order",
        ),
        "edges without return": (("        return found\n", "        pass\n"), "edges() gave None"),
        "edges in one row": (("found.append(stretch)", "found.extend(stretch)"), "must be a list of tuples"),
        "shared by all": (
            (
                "        self.children = {}  # first token",
                "        RadixTree.kept = self.children = RadixTree.__dict__.get('kept') or {}  # first token",
            ),
            "expected",
        ),
    },
    "07.admit": {
        "16 keys looked up": (
            "right = admit\n"
            "def admit(keys, free, counts, block_of, key_of):\n"
            "    for key in keys[16:]:\n"
            "        if key in block_of:\n"
            "            del key_of[block_of.pop(key)]\n"
            "    return right(keys, free, counts, block_of, key_of)",
            "expected",
        ),
        "order mended, stale key left": ((FORGET, "        pass"), "old key"),
        "stale key mended, order left": (
            "def admit(keys, free, counts, block_of, key_of):\n"
            "    hit = []\n"
            "    for key in keys:\n"
            "        if key not in block_of:\n"
            "            break\n"
            "        hit.append(block_of[key])\n"
            "    fresh = [free.pop(0) for _ in keys[len(hit) :]]\n"
            "    for block in hit:\n"
            "        counts[block] += 1\n"
            "        if block in free:\n"
            "            free.remove(block)\n"
            "    for block in fresh:\n"
            "        if block in key_of:\n"
            "            del block_of[key_of.pop(block)]\n"
            "    for block, key in zip(fresh, keys[len(hit) :]):\n"
            "        counts[block] = 1\n"
            "        block_of[key], key_of[block] = block, key\n"
            "    return hit + fresh, len(hit)",
            "hold those first",
        ),
        "not out of free": ((HOLD, "    for block in hit:\n        counts[block] += 1\n"), "must leave `free`"),
        "no count": ((HOLD, HOLD.replace("+= 1", "= counts[block] or 0")), "one holder more"),
        "count set to 1": ((HOLD, HOLD.replace("+= 1", "= 1")), "expected"),
        "index emptied": (
            (
                FORGET,
                FORGET + "\n    for block in [b for b in key_of if counts[b] == 0]:"
                "\n        del block_of[key_of.pop(block)]",
            ),
            "every idle block",
        ),
        "block_of left": ((FORGET, "        key_of.pop(block, None)"), "old key"),
        "never reuses": (("        hit.append(block_of[key])", "        break"), "do not agree"),
        "most recent first": (
            (
                "free.pop(0) for _ in keys[len(hit) :]]\n    for block in fresh:",
                "free.pop() for _ in keys[len(hit) :]]\n    for block in fresh:",
            ),
            "expected",
        ),
        "the blocks alone": (("return hit + fresh, len(hit)", "return hit + fresh"), "expected a pair"),
        "no return": (("    return hit + fresh, len(hit)\n", ""), "expected a pair"),
        "new lists": (
            (
                TAKE,
                "    n = len(keys) - len(hit)\n    fresh, free = free[:n], free[n:]\n    for block in fresh:",
            ),
            "expected",
        ),
    },
    "07.chat_figures": {
        "questions only": (figures(prompt_tokens="1000 + 10 * 50"), "all that was said"),
        "the last prompt": (figures(prompt_tokens="2850"), "all ten"),
        "without answers": (figures(prompt_tokens="sum(1050 + 50 * i for i in range(10))"), "answers become"),
        "own answer": (figures(prompt_tokens="sum(1200 + 200 * i for i in range(10))"), "own answer"),
        "first turn missed": (figures(hit_rate="18000 / 19500"), "turn 1 finds it"),
        "answers not found": (figures(hit_rate="(19000 - 1350) / 19500"), "answers are stored"),
        "mean of the rates": (
            figures(hit_rate="sum(1 - 50 / (1050 + 200 * i) for i in range(10)) / 10"),
            "mean of the turns",
        ),
        "the last turn": (figures(hit_rate="2800 / 2850"), "turn 10 alone"),
        "own answer found": (figures(hit_rate="1 - 500 / 21000"), "not in its prompt"),
        "two digits": (figures(hit_rate="0.97"), "more than 0.1 %"),
        "percent": (figures(hit_rate="100 * 19000 / 19500"), "between 0 and 1"),
        "no floor": (figures(ttft_ratio="50 / 2850"), "20 ms"),
        "upside down": (figures(ttft_ratio="305 / 25"), "cold / warm"),
        "not shared": (figures(working_set="200 * 3000"), "counts once"),
        "last answer missing": (figures(working_set="1000 + 200 * 1850"), "last answer"),
        "without the system prompt": (figures(working_set="200 * 2000"), "takes room"),
        "one conversation": (figures(working_set="3000"), "200 conversations"),
        "text": (figures(hit_rate="'97 %'"), "expected a number"),
    },
}
