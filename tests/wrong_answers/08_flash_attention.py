"""Plausible wrong answers to exercise 08, each with text that its message must contain."""

UPDATE = "        total, acc, m = total * factor + p, acc * factor + p * value, new\n"
GUARD = "        if score == -math.inf:\n            continue\n"
ALPHA = "        new_m = tl.maximum(m, tl.max(s, 1))\n        alpha = tl.exp(m - new_m)\n        m = new_m\n"
READ = "            k, v = read(start, min(start + block_n, length))\n"
STOP = "int(positions[-1]) + 1, block_n"
COSTS = "def attention_costs():\n    return "
GOOD = {
    "score_bytes": "4294967296",
    "naive_seconds": "(4 * 4294967296 + 4 * 67108864) / 3.35e12",
    "flash_seconds": "32 * 33558528 * 512 / 989e12",
    "blocks": "2080",
}


def figures(**changed: str) -> str:
    return COSTS + "{" + ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items()) + "}"


WRONG = {
    "08.stream_softmax": {
        "no maximum": (("new = max(m, score)", "new = 0.0"), "overflows"),
        "no rescale": ((UPDATE, UPDATE.replace(" * factor", "")), "rescale them"),
        "sum rescaled, values not": ((UPDATE, UPDATE.replace("acc * factor", "acc")), "values are not"),
        "values rescaled, sum not": ((UPDATE, UPDATE.replace("total * factor", "total")), "expected"),
        "factor upside down": (("math.exp(m - new)", "math.exp(new - m)"), "upside down"),
        "no guard": ((GUARD, ""), "masked key"),
        "lse without m": (("m + math.log(total))", "math.log(total))"), "m is missing"),
        "m starts at 0": (
            ("m, total, acc = -math.inf, 0.0, 0.0\n    for score", "m, total, acc = 0.0, 0.0, 0.0\n    for score"),
            "start at -inf",
        ),
        "nothing seen": ((" if total else (0.0, -math.inf)", ""), "return (0.0, -inf)"),
        "keeps the stream": (
            "def stream_softmax(pairs):\n"
            "    pairs = [(s, v) for s, v in pairs if s != -math.inf]\n"
            "    if not pairs:\n        return 0.0, -math.inf\n"
            "    m = max(s for s, _ in pairs)\n"
            "    total = sum(math.exp(s - m) for s, _ in pairs)\n"
            "    return sum(math.exp(s - m) * v for s, v in pairs) / total, m + math.log(total)",
            "three variables are enough",
        ),
        "keeps copies": (
            "def stream_softmax(pairs):\n"
            "    scores, values = [], []\n"
            "    for score, value in pairs:\n"
            "        scores.append(score * 1.0)\n"
            "        values.append(value * 1.0)\n"
            "    if not scores or max(scores) == -math.inf:\n        return 0.0, -math.inf\n"
            "    s, v = torch.tensor(scores, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)\n"
            "    return (s.softmax(0) @ v).item(), s.logsumexp(0).item()",
            "three variables are enough",
        ),
        "m starts at a large negative number": (
            ("m, total, acc = -math.inf, 0.0, 0.0\n    for score", "m, total, acc = -1e4, 0.0, 0.0\n    for score"),
            "start at -inf",
        ),
        "m starts at -1e9": (
            ("m, total, acc = -math.inf, 0.0, 0.0\n    for score", "m, total, acc = -1e9, 0.0, 0.0\n    for score"),
            "start at -inf",
        ),
        "values of 0 are taken for nothing": ((" if total else (0.0", " if acc else (0.0"), "expected"),
        "two passes": (
            "def stream_softmax(pairs):\n"
            "    m = max((s for s, _ in pairs), default=-math.inf)\n"
            "    total = sum(math.exp(s - m) for s, _ in pairs)\n"
            "    return (0.0, m + math.log(total)) if total else (0.0, -math.inf)",
            "expected",
        ),
        "first score is the maximum": (
            ("new = max(m, score)", "new = score if m == -math.inf else m"),
            "largest score so far",
        ),
        "not divided": (("(acc / total, m", "(acc, m"), "expected"),
        "only the mean": (
            (
                "    return (acc / total, m + math.log(total)) if total else (0.0, -math.inf)",
                "    return acc / total if total else 0.0",
            ),
            "expected",
        ),
        "the example": ("def stream_softmax(pairs):\n    list(pairs)\n    return 20.722, 5.170", "expected"),
    },
    "08.tile_step": {
        "total not rescaled": (("total * alpha + p.sum(-1)", "total + p.sum(-1)"), "old total is not rescaled"),
        "acc not rescaled": (("acc * alpha[:, None] + p @ v", "acc + p @ v"), "old acc is not rescaled"),
        "alpha upside down": (("torch.exp(m - safe)", "torch.exp(safe - m)"), "upside down"),
        "no scale": (("s = q @ k.T * scale", "s = q @ k.T"), "scale is not used"),
        "no mask": (("if mask is not None:", "if False:"), "mask is not used"),
        "no guard": (("torch.where(new_m == -math.inf, torch.zeros_like(new_m), new_m)", "new_m"), "-inf - -inf"),
        "divided": (("acc * alpha[:, None] + p @ v", "(acc * alpha[:, None] + p @ v) / total[:, None]"), "expected"),
        "divided by the new total": (
            (
                "    return new_m, total * alpha + p.sum(-1), acc * alpha[:, None] + p @ v",
                "    total = total * alpha + p.sum(-1)\n"
                "    return new_m, total, (acc * alpha[:, None] + p @ v) / total[:, None]",
            ),
            "do not divide",
        ),
        "safe returned": (("return new_m, total", "return safe, total"), "for the exponentials only"),
        "mask the other way": (("masked_fill(~mask", "masked_fill(mask"), "expected"),
        "maximum of the block alone": (("torch.maximum(m, s.amax(-1))", "s.amax(-1)"), "expected"),
        "one maximum for all rows": (("s.amax(-1))", "s.amax().expand_as(m))"), "expected"),
        "base 2": (("p = torch.exp(s - safe", "p = torch.exp2(s - safe"), "expected"),
        "masked with a large number": (("s.masked_fill(~mask, -math.inf)", "s.masked_fill(~mask, -1e4)"), "expected"),
        "masked with 0": (("s.masked_fill(~mask, -math.inf)", "s * mask"), "expected"),
        "no maximum inside": (
            "def tile_step(state, q, k, v, scale, mask=None):\n"
            "    m, total, acc = state\n"
            "    s = q @ k.T * scale\n"
            "    if mask is not None:\n        s = s.masked_fill(~mask, -math.inf)\n"
            "    new_m = torch.maximum(m, s.amax(-1))\n"
            "    down = new_m.masked_fill(new_m == -math.inf, 0.0).exp()\n"
            "    total, acc = total * m.exp() + s.exp().sum(-1), acc * m.exp()[:, None] + s.exp() @ v\n"
            "    return new_m, total / down, acc / down[:, None]",
            "exp of a large",
        ),
        "maximum clamped": (
            (
                "safe = torch.where(new_m == -math.inf, torch.zeros_like(new_m), new_m)",
                "safe = new_m.clamp(min=-20.0)",
            ),
            "expected",
        ),
        "state changed in place": (
            "def tile_step(state, q, k, v, scale, mask=None):\n"
            "    m, total, acc = state\n"
            "    s = q @ k.T * scale\n"
            "    if mask is not None:\n        s = s.masked_fill(~mask, -math.inf)\n"
            "    new_m = torch.maximum(m, s.amax(-1))\n"
            "    safe = new_m.masked_fill(new_m == -math.inf, 0.0)\n"
            "    p, alpha = torch.exp(s - safe[:, None]), torch.exp(m - safe)\n"
            "    total *= alpha\n    acc *= alpha[:, None]\n"
            "    total += p.sum(-1)\n    acc += p @ v\n    return new_m, total, acc",
            "in place",
        ),
        "guarded only if no row sees a key": (
            ("safe = torch.where(new_m == -math.inf,", "safe = torch.where((new_m == -math.inf).all(),"),
            "-inf - -inf",
        ),
        "p under the old maximum": (
            ("p = torch.exp(s - safe[:, None])", "p = torch.exp(s - m[:, None])"),
            "expected",
        ),
    },
    "08.tiled_attention": {
        "top-left": (("len(q), length - len(q), []", "len(q), 0, []"), "i + length - time"),
        "every block": ((STOP, "length, block_n"), "no query of the tile sees"),
        "one key too many": ((STOP, "min(int(positions[-1]) + 2, length), block_n"), "ends on a border"),
        "strict mask": (("len(k)) <= positions", "len(k)) < positions"), "<=, not <"),
        "no mask": (("scale, mask)\n        rows", "scale, None)\n        rows"), "see the future"),
        "up to the first query": ((STOP, "int(positions[0]) + 1, block_n"), "not after its first"),
        "not divided": (("rows.append(state[2] / state[1][:, None])", "rows.append(state[2])"), "expected"),
        "the last block alone": (("            if state is None:", "            if True:"), "expected"),
        "blocks of one key": (
            ("range(0, int(positions[-1]) + 1, block_n)", "range(0, int(positions[-1]) + 1)"),
            "expected",
        ),
        "reads whole, in one go": (
            "def tiled_attention(q, read, length, block_m, block_n, scale):\n"
            "    k, v = read(0, length)\n"
            "    at = torch.arange(len(q))[:, None] + length - len(q)\n"
            "    s = (q @ k.T * scale).masked_fill(torch.arange(length) > at, -math.inf)\n"
            "    return s.softmax(-1) @ v",
            "reads are not",
        ),
        "reads past the end": (("min(start + block_n, length)", "start + block_n"), "raised"),
        "reads only what is seen of a block": (
            ("min(start + block_n, length)", "min(start + block_n, int(positions[-1]) + 1)"),
            "reads are not",
        ),
        "from the tile's own block": (("range(0, int(", "range(first, int("), "expected"),
        "mask without start": (("torch.arange(start, start + len(k)) <=", "torch.arange(len(k)) <="), "expected"),
        "last tile dropped": (("range(0, time, block_m)", "range(0, time - block_m + 1, block_m)"), "expected"),
        "not scaled": (("tile, k, v, scale, mask", "tile, k, v, 1.0, mask"), "expected"),
        "no running maximum": (
            "def tiled_attention(q, read, length, block_m, block_n, scale):\n"
            "    rows = []\n"
            "    for first in range(0, len(q), block_m):\n"
            "        tile, total, acc = q[first : first + block_m], 0.0, 0.0\n"
            "        at = torch.arange(first, first + len(tile))[:, None] + length - len(q)\n"
            "        for start in range(0, int(at[-1]) + 1, block_n):\n"
            "            k, v = read(start, min(start + block_n, length))\n"
            "            p = (tile @ k.T * scale).exp() * (torch.arange(start, start + len(k)) <= at)\n"
            "            total, acc = total + p.sum(-1), acc + p @ v\n"
            "        rows.append(acc / total[:, None])\n"
            "    return torch.cat(rows)",
            "without the running maximum",
        ),
        "one maximum for the tile": (
            "def tiled_attention(q, read, length, block_m, block_n, scale):\n"
            "    rows = []\n"
            "    for first in range(0, len(q), block_m):\n"
            "        tile, m, total, acc = q[first : first + block_m], torch.tensor(-math.inf), 0.0, 0.0\n"
            "        at = torch.arange(first, first + len(tile))[:, None] + length - len(q)\n"
            "        for start in range(0, int(at[-1]) + 1, block_n):\n"
            "            k, v = read(start, min(start + block_n, length))\n"
            "            s = tile @ k.T * scale\n"
            "            s = s.masked_fill(torch.arange(start, start + len(k)) > at, -math.inf)\n"
            "            new = torch.maximum(m, s.max())\n"
            "            p, alpha, m = (s - new).exp(), (m - new).exp(), new\n"
            "            total, acc = total * alpha + p.sum(-1), acc * alpha + p @ v\n"
            "        rows.append(acc / total[:, None])\n"
            "    return torch.cat(rows)",
            "nan",
        ),
        "reads twice": ((READ, READ + READ), "reads are not"),
    },
    "08.kernel": {
        "alpha is 1": ((ALPHA, ALPHA.replace("alpha = tl.exp(m - new_m)", "alpha = tl.exp(m - m)")), "-inf - -inf"),
        "another form of the bug": (
            (ALPHA, "        m = tl.maximum(m, tl.max(s, 1))\n        alpha = tl.full([BLOCK], 1.0, tl.float32)\n"),
            "alpha is still 1",
        ),
        "alpha from the maximum of the block": (
            (ALPHA, ALPHA.replace("alpha = tl.exp(m - new_m)", "alpha = tl.exp(m - tl.max(s, 1))")),
            "expected",
        ),
        "upside down": ((ALPHA, ALPHA.replace("m - new_m", "new_m - m")), "expected"),
        "total not rescaled": (
            ("total = total * alpha + tl.sum(p, 1)", "total = total + tl.sum(p, 1)"),
            "old total is not",
        ),
        "acc not rescaled": (
            ("acc = acc * alpha[:, None] + tl.dot(p, v)", "acc = acc + tl.dot(p, v)"),
            "old acc is not",
        ),
        "no maximum at all": (
            (ALPHA, "        m = tl.zeros([BLOCK], tl.float32)\n        alpha = m + 1.0\n"),
            "without its maximum",
        ),
        "no running maximum": ((ALPHA, "        m = tl.max(s, 1)\n        alpha = tl.exp(m - m)\n"), "expected"),
        "one maximum for the tile": ((ALPHA, ALPHA.replace("tl.max(s, 1)", "tl.max(s)")), "expected"),
        "m starts at 0": (
            ('m = tl.full([BLOCK], float("-inf"), tl.float32)', "m = tl.zeros([BLOCK], tl.float32)"),
            "expected",
        ),
        "mask changed": (("keys[None, :] <= rows[:, None]", "keys[None, :] < rows[:, None]"), "expected"),
        "mask dropped": (
            ('        s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))\n', ""),
            "as given",
        ),
        "first block only": (("range(0, first + BLOCK, BLOCK)", "range(0, BLOCK, BLOCK)"), "expected"),
        "store not masked": (
            ("acc / total[:, None], mask=rows[:, None] < length)", "acc / total[:, None])"),
            "outside",
        ),
        "not divided": (("acc / total[:, None], mask", "acc, mask"), "as given"),
    },
    "08.attention_costs": {
        "one head": (figures(score_bytes="8192 ** 2 * 2"), "there are 32"),
        "a byte each": (figures(score_bytes="32 * 8192 ** 2"), "2 bytes"),
        "GB": (figures(score_bytes="4.29"), "in bytes"),
        "scores once": (figures(naive_seconds="(4294967296 + 4 * 67108864) / 3.35e12"), "four times"),
        "scores twice": (figures(naive_seconds="(2 * 4294967296 + 4 * 67108864) / 3.35e12"), "four times"),
        "ends missing": (figures(naive_seconds="4 * 4294967296 / 3.35e12"), "are missing"),
        "milliseconds": (figures(naive_seconds="5.21"), "not milliseconds"),
        "not causal": (figures(flash_seconds="32 * 8192 ** 2 * 512 / 989e12"), "above the diagonal"),
        "one product": (figures(flash_seconds="32 * 33558528 * 256 / 989e12"), "two products"),
        "by bandwidth": (figures(flash_seconds="32 * 33558528 * 512 / 3.35e12"), "bytes per second"),
        "nothing skipped": (figures(blocks="64 * 64"), "nothing is skipped"),
        "half of them": (figures(blocks="64 * 64 // 2"), "diagonal"),
        "all heads": (figures(blocks="2080 * 32"), "one head"),
        "text": (figures(blocks="'2080'"), "expected a number"),
        "a key short": (COSTS + "{'blocks': 2080}", "KeyError"),
    },
}
