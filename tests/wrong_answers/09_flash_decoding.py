"""Plausible wrong answers to exercise 09, each with text that its message must contain."""

M = "    m = torch.maximum(lse_a, lse_b)  # [heads]\n"
W = "    w_a, w_b = torch.exp(lse_a - m), torch.exp(lse_b - m)\n"
LSE = "    lse = m + torch.log(total)  # [heads]\n"
TWO = "def merge_two(out_a, lse_a, out_b, lse_b):\n"
MANY = "def merge(outs, lses):\n"
SHIFT = '    m = torch.where(m == float("-inf"), 0.0, m)\n'
CLEAN = "    outs = torch.where(empty[..., None], 0.0, outs)\n"
DIVIDE = (
    "    out = (weights[..., None] * outs).sum(0) / torch.where(total == 0, 1.0, total)[:, None]  # [heads, dim]\n"
)
PART = "place = table[keys // k_pool.shape[1]], keys % k_pool.shape[1]"
EARLY = '    if begin >= end:\n        return torch.zeros_like(q), q.new_full((len(q),), float("-inf"))\n'
CHOOSE = "def choose_splits(programs, tiles, sms): return "
SEARCH = (
    "def choose_splits(programs, tiles, sms):\n"
    "    def time(s):\n"
    "        each = -(-tiles // s)\n"
    "        return {time}\n"
    "    best = min(map(time, range(1, {top})))\n"
    "    return next(s for s in range(1, {top}) if 10 * time(s) <= 11 * best)"
)
ROWS = "    block, slot = table[keys // block_size].long(), keys % block_size\n"
OUT = "    return block * block_stride + slot * slot_stride\n"
AT = "def at_64k():\n    token = 2 * 8 * 128 * 2\n    layer = token * 65536 / 3.35e12\n    return "
GOOD = {
    "layer_us": "layer * 1e6",
    "step_ms": "32 * layer * 1e3",
    "idle_us": "layer * 132 / 8 * 1e6",
    "crossover": "16e9 / (32 * token)",
}


def numbers(**changed: str) -> str:
    return AT + "{" + ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items()) + "}"


WRONG = {
    "09.merge_two": {
        "the mean": (TWO + "    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)", "weigh alike"),
        "swapped": ((W, "    w_a, w_b = torch.exp(lse_b - m), torch.exp(lse_a - m)\n"), "swapped"),
        "no shift": ((M, "    m = torch.zeros_like(lse_a)\n"), "overflows"),
        "shift by the smaller": ((M, "    m = torch.minimum(lse_a, lse_b)\n"), "expected"),
        "not divided": (("/ total[:, None]", "/ 1"), "not divided"),
        "the larger LSE": (
            TWO
            + "    m = torch.maximum(lse_a, lse_b)\n    a, b = torch.exp(lse_a - m), torch.exp(lse_b - m)\n"
            + "    return (a[:, None] * out_a + b[:, None] * out_b) / (a + b)[:, None], m",
            "forgets the smaller",
        ),
        "LSEs added": ((LSE, "    lse = lse_a + lse_b\n"), "do not add"),
        "no m in the LSE": ((LSE, "    lse = torch.log(total)\n"), "shift m is missing"),
        "no log in the LSE": ((LSE, "    lse = m + total\n"), "with the log"),
        "LSEs as weights": (
            TWO
            + "    total = lse_a + lse_b\n"
            + "    out = (lse_a[:, None] * out_a + lse_b[:, None] * out_b) / total[:, None]\n"
            + "    return out, torch.logaddexp(lse_a, lse_b)",
            "not the LSEs",
        ),
        "one shift for all heads": ((M, "    m = torch.maximum(lse_a, lse_b).max()\n"), "nan"),
        "the larger part alone": (
            TWO
            + "    first = (lse_a > lse_b)[:, None]\n"
            + "    return torch.where(first, out_a, out_b), torch.logaddexp(lse_a, lse_b)",
            "expected",
        ),
        "weights without a last dimension": (("(w_a[:, None] * out_a", "(w_a * out_a"), "raised"),
        "only the output": (("    return out, lse\n", "    return out\n"), "expected"),
        "base 2": (
            (W, "    w_a, w_b = torch.exp2(lse_a - m), torch.exp2(lse_b - m)\n"),
            "expected",
        ),
    },
    "09.merge": {
        "0 x NaN": ((CLEAN, ""), "0 x NaN"),
        "all empty not guarded": ((SHIFT, ""), "-inf - (-inf)"),
        "LSE 0 where all are empty": (
            (
                "    return out, m + torch.log(total)",
                "    return out, m + torch.log(torch.where(total == 0, 1.0, total))",
            ),
            "is -inf, not 0",
        ),
        "NaN hidden": ((CLEAN, "    outs = outs.nan_to_num(posinf=0.0)\n"), "hidden"),
        "result cleaned": (
            (DIVIDE, DIVIDE + "    out = out.nan_to_num()\n"),
            "expected nan",
        ),
        "no shift": (("    m = lses.amax(0)  # [heads]\n", "    m = torch.zeros_like(lses[0])\n"), "overflows"),
        "the mean": (
            ("    weights = torch.exp(lses - m)  # [splits, heads]\n", "    weights = torch.ones_like(lses)\n"),
            "expected",
        ),
        "the mean, exact LSE": (
            MANY
            + "    outs = torch.where((lses == float('-inf'))[..., None], 0.0, outs)\n"
            + "    return outs.mean(0), lses.logsumexp(0)",
            "not alike",
        ),
        "divided by an epsilon": (
            ("torch.where(total == 0, 1.0, total)[:, None]", "(total + 1e-2)[:, None]"),
            "expected",
        ),
        "empty parts dropped for all heads": (
            MANY
            + "    keep = ~(lses == float('-inf')).any(1)\n"
            + "    outs, lses = outs[keep], lses[keep]\n"
            + "    weights = torch.softmax(lses, 0)\n"
            + "    return (weights[..., None] * outs).sum(0), lses.logsumexp(0)",
            "expected",
        ),
        "empty for all heads, or not at all": (
            MANY
            + "    empty = lses == float('-inf')\n"
            + "    outs, lses, none = outs[~empty.all(1)], lses[~empty.all(1)], empty.all(0)\n"
            + "    if not len(outs):\n"
            + "        return torch.zeros(outs.shape[1:]), torch.full((outs.shape[1],), float('-inf'))\n"
            + "    m = torch.where(none, 0.0, lses.amax(0))\n"
            + "    weights = torch.exp(lses - m)\n"
            + "    out = (weights[..., None] * outs).sum(0) / weights.sum(0)[:, None]\n"
            + "    return torch.where(none[:, None], 0.0, out), m + weights.sum(0).log()",
            "got nan",
        ),
        "softmax of the LSEs": (
            MANY
            + "    outs = torch.where((lses == float('-inf'))[..., None], 0.0, outs)\n"
            + "    return (lses.softmax(0)[..., None] * outs).sum(0), lses.logsumexp(0)",
            "got nan",
        ),
        "one m for all heads": (("lses.amax(0)  # [heads]", "lses.max().expand(lses.shape[1])"), "expected"),
        "a low LSE is taken for empty": (
            ('    empty = lses == float("-inf")  # [splits, heads]\n', "    empty = lses < -1e3\n"),
            "expected",
        ),
        "changes its input": ((CLEAN, "    outs[empty] = 0.0\n"), "in place"),
        "pairs only": (
            MANY
            + "    m = torch.maximum(lses[0], lses[-1])\n"
            + "    w = torch.exp(torch.stack((lses[0], lses[-1])) - m)\n"
            + "    out = (w[..., None] * torch.stack((outs[0], outs[-1]))).sum(0) / w.sum(0)[:, None]\n"
            + "    return out, m + w.sum(0).log()",
            "expected",
        ),
    },
    "09.paged_part": {
        "no table": ((PART, "place = keys // k_pool.shape[1], keys % k_pool.shape[1]"), "table is not used"),
        "keys from 0": (
            ("    keys = torch.arange(begin, end)\n", "    keys = torch.arange(end - begin)\n"),
            "not from 0",
        ),
        "slot from the part": (
            (PART, "place = table[keys // k_pool.shape[1]], (keys - begin) % k_pool.shape[1]"),
            "counts in the text",
        ),
        "all keys so far": (("torch.arange(begin, end)", "torch.arange(end)"), "belong to this part"),
        "from the start of begin's block": (
            ("torch.arange(begin, end)", "torch.arange(begin // k_pool.shape[1] * k_pool.shape[1], end)"),
            "inside a block",
        ),
        "blocks of a power of two": (
            (PART, "place = table[keys >> (k_pool.shape[1].bit_length() - 1)], keys & (k_pool.shape[1] - 1)"),
            "slot was read",
        ),
        "one key too many": (("torch.arange(begin, end)", "torch.arange(begin, end + 1)"), "raised"),
        "one key too few": (("torch.arange(begin, end)", "torch.arange(begin, end - 1)"), "expected"),
        "not scaled": (("scale * (q @ k.T)", "q @ k.T"), "not scaled"),
        "scaled by the dimension": (("scale * (q @ k.T)", "(q @ k.T) / q.shape[-1] ** 0.5"), "expected"),
        "LSE of unscaled scores": (("scores.logsumexp(-1)", "scores.logsumexp(-1) / scale"), "scaled scores"),
        "LSE in base 2": (("scores.logsumexp(-1)", "scores.logsumexp(-1) / 0.6931471805599453"), "base 2"),
        "the largest score": (("scores.logsumexp(-1)", "scores.amax(-1)"), "expected"),
        "the sum, no log": (("scores.logsumexp(-1)", "scores.exp().sum(-1)"), "expected"),
        "an empty part is not caught": ((EARLY, ""), "empty part"),
        "an empty part has LSE 0": (('float("-inf"))', "0.0)"), "empty part"),
        "an empty part is NaN": (("torch.zeros_like(q), q", "torch.full_like(q, float('nan')), q"), "empty part"),
        "not normalised": (
            ("scores.softmax(-1) @ v", "(scores - scores.amax(-1, keepdim=True)).exp() @ v"),
            "expected",
        ),
        "no maximum": (
            (
                "    return scores.softmax(-1) @ v, scores.logsumexp(-1)",
                "    p = scores.exp()\n    return p @ v / p.sum(-1, keepdim=True), p.sum(-1).log()",
            ),
            "largest was not taken away",
        ),
        "one maximum for the group": (
            (
                "    return scores.softmax(-1) @ v, scores.logsumexp(-1)",
                "    p = (scores - scores.max()).exp()\n"
                "    return p @ v / p.sum(-1, keepdim=True), scores.max() + p.sum(-1).log()",
            ),
            "largest was not taken away",
        ),
        "softmax over the group": (("scores.softmax(-1) @ v", "scores.softmax(0) @ v"), "expected"),
        "blocks of 4": ((PART, "place = table[keys // 4], keys % 4"), "raised"),
        "K for V": (("v_pool[place]", "k_pool[place]"), "expected"),
    },
    "09.choose_splits": {
        "rounded down": (CHOOSE + "max(1, min(tiles, sms // programs))", "only where it divides"),
        "rounded up": (CHOOSE + "max(1, min(tiles, -(-sms // programs)))", "rounded up"),
        "as many as SMs": (CHOOSE + "min(tiles, sms)", "already"),
        "as many as tiles": (CHOOSE + "tiles", "expected"),
        "never": (CHOOSE + "1", "expected"),
        "the least time": (("if 10 * time(s) <= 11 * best", "if time(s) == best"), "within 10 %"),
        "under 10 %": (("<= 11 * best", "< 11 * best"), "expected"),
        "the largest": (
            ("return next(s for s in range(1, tiles + 1)", "return max(s for s in range(1, tiles + 1)"),
            "expected",
        ),
        "tiles rounded down": (
            SEARCH.format(time="-(-programs * -(-tiles // each) // sms) * (tiles // s)", top="tiles + 1"),
            "rounded up",
        ),
        "waves not rounded": (
            SEARCH.format(time="programs * -(-tiles // each) / sms * each", top="tiles + 1"),
            "waves are rounded up",
        ),
        "no waves": (SEARCH.format(time="each", top="tiles + 1"), "waves are missing"),
        "waves alone": (SEARCH.format(time="-(-programs * -(-tiles // each) // sms)", top="tiles + 1"), "expected"),
        "never all tiles": (
            SEARCH.format(time="-(-programs * -(-tiles // each) // sms) * each", top="max(2, tiles)"),
            "expected",
        ),
        "at most 32": (
            SEARCH.format(time="-(-programs * -(-tiles // each) // sms) * each", top="min(tiles, 32) + 1"),
            "expected",
        ),
        "at most 256": (
            SEARCH.format(time="-(-programs * -(-tiles // each) // sms) * each", top="min(tiles, 256) + 1"),
            "expected",
        ),
        "at most as many as SMs": (
            SEARCH.format(time="-(-programs * -(-tiles // each) // sms) * each", top="min(tiles, sms) + 1"),
            "expected",
        ),
        "powers of two": (
            ("return next(s for s in range(1, tiles + 1) if", "return next(s for s in (2**i for i in range(12)) if"),
            "expected",
        ),
        "within a fifth": (("<= 11 * best", "<= 12 * best"), "expected"),
        "the time": (
            ("return next(s for s in range(1, tiles + 1)", "return next(time(s) for s in range(1, tiles + 1)"),
            "expected",
        ),
    },
    "09.row_offsets": {
        "widened after the product": (
            (
                ROWS + OUT,
                "    block, slot = table[keys // block_size], keys % block_size\n"
                "    return (block * block_stride).long() + slot * slot_stride\n",
            ),
            "before the product",
        ),
        "the result widened": (
            (
                ROWS + OUT,
                "    block, slot = table[keys // block_size], keys % block_size\n"
                "    offset = block * block_stride + slot * slot_stride\n    return offset.to(torch.int64)\n",
            ),
            "before the product",
        ),
        "the stride widened, as a number": (
            (
                ROWS + OUT,
                "    block, slot = table[keys // block_size], keys % block_size\n"
                "    return (block * int(block_stride) + slot * int(slot_stride)).long()\n",
            ),
            "before the product",
        ),
        "float32": (
            ((ROWS), "    block, slot = table[keys // block_size].float(), keys % block_size\n"),
            "int64",
        ),
        "float32, int64 again": (
            (
                ROWS + OUT,
                "    block, slot = table[keys // block_size].float(), keys % block_size\n"
                "    return (block * block_stride + slot * slot_stride).long()\n",
            ),
            "24 bits",
        ),
        "absolute value": (
            (
                ROWS + OUT,
                "    block, slot = table[keys // block_size], keys % block_size\n"
                "    return (block * block_stride + slot * slot_stride).abs().long()\n",
            ),
            "expected",
        ),
        "unsigned": (
            (
                ROWS + OUT,
                "    block, slot = table[keys // block_size], keys % block_size\n"
                "    return (block * block_stride + slot * slot_stride).long() % 2**32\n",
            ),
            "expected",
        ),
        "clamped": (
            (
                ROWS + OUT,
                "    block, slot = table[keys // block_size].clamp(max=2**31 // block_stride), keys % block_size\n"
                "    return block.long() * block_stride + slot * slot_stride\n",
            ),
            "expected",
        ),
        "no slot": ((OUT, "    return block * block_stride\n"), "slot in the block"),
        "slots one behind the other": ((OUT, "    return (block * block_size + slot) * slot_stride\n"), "expected"),
        "no table": (
            ((ROWS), "    block, slot = (keys // block_size).long(), keys % block_size\n"),
            "table is not used",
        ),
        "bytes": ((OUT, "    return 2 * (block * block_stride + slot * slot_stride)\n"), "expected"),
    },
    "09.at_64k": {
        "K without V": (numbers(layer_us="layer / 2 * 1e6"), "half of the bytes"),
        "32 heads stored": (numbers(layer_us="4 * layer * 1e6"), "8 are stored"),
        "all layers": (numbers(layer_us="32 * layer * 1e6"), "one layer's"),
        "seconds": (numbers(layer_us="layer"), "microseconds"),
        "one layer a step": (numbers(step_ms="layer * 1e3"), "all 32 layers"),
        "step in microseconds": (numbers(step_ms="32 * layer * 1e6"), "not microseconds"),
        "one program": (numbers(idle_us="132 * layer * 1e6"), "not one"),
        "a program a query head": (numbers(idle_us="132 / 32 * layer * 1e6"), "share it"),
        "faster with fewer": (numbers(idle_us="8 / 132 * layer * 1e6"), "grows"),
        "all SMs": (numbers(idle_us="layer * 1e6"), "only 8"),
        "one layer against all weights": (numbers(crossover="16e9 / token"), "all 32 layers"),
        "query heads in the crossover": (numbers(crossover="16e9 / (32 * token) / 4"), "8 are stored"),
        "a key missing": (AT + "{'layer_us': layer * 1e6}", "keys"),
        "rounded": (numbers(step_ms="3.0"), "expected"),
    },
}
