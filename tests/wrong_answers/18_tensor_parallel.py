"""Plausible wrong answers to exercise 18, each with text that its message must contain."""

ROW = "def row_parallel(x, weight, bias, group):\n    "
HEADS = "def kv_heads_of(rank, ranks, heads, kv_heads):\n    "
CHECKED = HEADS + (
    "if heads % ranks or (kv_heads % ranks and ranks % kv_heads):\n        raise ValueError('no')\n    "
)
EMBED = "def vocab_embedding(tokens, table, start, group):\n    local = tokens - start\n    "
ZEROED = "all_reduce(table[local.masked_fill(away, 0)].masked_fill(away.unsqueeze(-1), 0.0), group)"
FIRST = "x = x + all_reduce(F.linear(heads, out), group)"
LAST = "return x + all_reduce(y, group)"
GOOD = {"layer_kib": "32", "token_mb": "2.62", "ring_mb": "4.59", "messages": "2240", "floor_ms": "6.72"}


def traffic(**changed: str) -> str:
    body = ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items())
    return "def traffic(): return {" + body + "}"


WRONG = {
    "18.row_parallel": {
        "no sum": (ROW + "return F.linear(x, weight, bias)", "sum over ranks is missing"),
        "bias before the sum": (ROW + "return all_reduce(F.linear(x, weight, bias), group)", "once a rank"),
        "mean": (
            ROW
            + "y = all_reduce(F.linear(x, weight), group) / group.size()\n    return y if bias is None else y + bias",
            "mean",
        ),
        "no bias": (ROW + "return all_reduce(F.linear(x, weight), group)", "bias is missing"),
        "bias on rank 0 after the sum": (
            ROW + "y = all_reduce(F.linear(x, weight), group)\n"
            "    return y if bias is None or group.rank() else y + bias",
            "rank 1",
        ),
        "bias must be there": (ROW + "return all_reduce(F.linear(x, weight), group) + bias", "raised"),
        "rank 0 alone sums": (
            ROW + "y = F.linear(x, weight)\n    y = all_reduce(y, group) if group.rank() == 0 else y\n"
            "    return y if bias is None else y + bias",
            "raised",
        ),
        "sums x": (ROW + "return F.linear(all_reduce(x, group), weight, bias)", "in place"),
        "sums twice": (
            ROW + "y = all_reduce(all_reduce(F.linear(x, weight), group) / group.size(), group)\n"
            "    return y if bias is None else y + bias",
            "2 all-reduces where 1",
        ),
        "up to 4 ranks": (
            ROW + "y = all_reduce(F.linear(x, weight), group)\n    y = y if group.size() <= 4 else y / 2\n"
            "    return y if bias is None else y + bias",
            "8 ranks",
        ),
    },
    "18.kv_heads_of": {
        "an empty range": (
            CHECKED + "each = kv_heads // ranks\n    return rank * each, (rank + 1) * each",
            "your range is empty",
        ),
        "in turn": (
            CHECKED + "each = kv_heads // ranks\n"
            "    return (rank * each, (rank + 1) * each) if each else (rank % kv_heads, rank % kv_heads + 1)",
            "not dealt out in turn",
        ),
        "head 0": (
            CHECKED + "each = kv_heads // ranks\n    return (rank * each, (rank + 1) * each) if each else (0, 1)",
            "KV head 0",
        ),
        "all": (CHECKED + "return 0, kv_heads", "saves nothing"),
        "last included": (
            CHECKED + "group, mine = heads // kv_heads, heads // ranks\n"
            "    return rank * mine // group, ((rank + 1) * mine - 1) // group",
            "not included",
        ),
        "rounded up": (
            CHECKED + "each = -(-kv_heads // ranks)\n    return rank * each, (rank + 1) * each",
            "not dealt out in turn",
        ),
        "asserts": (
            (
                '        raise ValueError(f"{ranks} ranks for {heads} query heads and {kv_heads} KV heads")\n',
                "        raise AssertionError\n",
            ),
            "expected ValueError",
        ),
        "query heads": (CHECKED + "return rank * heads // ranks, (rank + 1) * heads // ranks", "query heads"),
        "refuses nothing": (
            ("    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):\n", "    if False:\n"),
            "must divide",
        ),
        "refuses by query heads only": (
            ("heads % ranks or (kv_heads % ranks and ranks % kv_heads)", "heads % ranks"),
            "multiple of them",
        ),
        "refuses replication": (
            ("heads % ranks or (kv_heads % ranks and ranks % kv_heads)", "heads % ranks or kv_heads % ranks"),
            "raised",
        ),
        "floats": (
            (
                "return rank * mine // group, ((rank + 1) * mine - 1) // group + 1",
                "return rank * mine / group, (rank + 1) * mine / group",
            ),
            "expected",
        ),
    },
    "18.vocab_embedding": {
        "clamped": (EMBED + "return all_reduce(table[local.clamp(0, len(table) - 1)], group)", "clamped"),
        "wrapped": (EMBED + "return all_reduce(table[local % len(table)], group)", "wrap around"),
        "last row": (EMBED + "away = (local < 0) | (local >= len(table) - 1)\n    return " + ZEROED, "last row"),
        "first row": (EMBED + "away = (local <= 0) | (local >= len(table))\n    return " + ZEROED, "first row"),
        "from the rank": (
            ("local = tokens - start", "local = tokens - group.rank() * len(table)"),
            "begin at `start`",
        ),
        "negative indices": (EMBED + "away = local >= len(table)\n    return " + ZEROED, "count from the end"),
        "mean": (
            EMBED + "away = (local < 0) | (local >= len(table))\n    return " + ZEROED + " / group.size()",
            "rank 0",
        ),
        "no sum": (
            EMBED + "away = (local < 0) | (local >= len(table))\n"
            "    return table[local.masked_fill(away, 0)].masked_fill(away.unsqueeze(-1), 0.0)",
            "sum over ranks is missing",
        ),
        "all ids": (EMBED + "return all_reduce(table[local], group)", "raised"),
        "changes tokens": (
            EMBED + "tokens -= start\n    away = (local < 0) | (local >= len(table))\n    return " + ZEROED,
            "in place",
        ),
        "flat": (
            EMBED + "away = (local < 0) | (local >= len(table))\n    return " + ZEROED + ".flatten(0, -2)",
            "shape",
        ),
        "equal slices": (
            EMBED + "rows = len(table)\n    away = tokens // rows != start // rows\n    return " + ZEROED,
            "expected",
        ),
    },
    "18.after_attention": {
        "residual inside": ((FIRST, "x = all_reduce(x + F.linear(heads, out), group)"), "once a rank"),
        "second residual inside": ((LAST, "return all_reduce(x + y, group)"), "second residual"),
        "one at the end": (
            "def after_attention(x, heads, out, gate, up, down, group):\n"
            "    first = F.linear(heads, out)\n    h = F.rms_norm(x + first, x.shape[-1:])\n"
            "    y = F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)\n"
            "    return x + all_reduce(first + y, group)",
            "too late",
        ),
        "after the norm": (
            "def after_attention(x, heads, out, gate, up, down, group):\n"
            "    x = x + F.linear(heads, out)\n    h = all_reduce(F.rms_norm(x, x.shape[-1:]), group)\n"
            "    y = F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)\n"
            "    return x + all_reduce(y, group)",
            "norm of parts",
        ),
        "the other one lost": ((LAST, "return x + y"), "MLP's sum"),
        "mean": ((FIRST, "x = x + all_reduce(F.linear(heads, out), group) / group.size()"), "expected"),
        "in place": ((FIRST, "x += all_reduce(F.linear(heads, out), group)"), "by your code"),
        "whole heads, part of the weight": (
            (FIRST, "x = x + F.linear(all_reduce(heads.clone(), group), out)"),
            "rank 0",
        ),
        "three": (
            ("h = F.rms_norm(x, x.shape[-1:])", "h = all_reduce(F.rms_norm(x, x.shape[-1:]), group) / group.size()"),
            "3 all-reduces",
        ),
        "still the same, written otherwise": (
            (FIRST, "x = x + F.linear(heads, out).clone()"),
            "still hold different x",
        ),
        "rank 0 alone": (
            (FIRST, "x = x + (all_reduce(F.linear(heads, out), group) if group.rank() == 0 else 0)"),
            "raised",
        ),
    },
    "18.traffic": {
        "one all-reduce": (traffic(layer_kib="16"), "There are two"),
        "float32": (traffic(layer_kib="64"), "4 bytes"),
        "kB": (traffic(layer_kib="2 * 8192 * 2 / 1e3"), "KiB is 1024"),
        "the embedding's too": (traffic(messages="161 * 14"), "left out"),
        "about": (traffic(messages="2200"), "not the number"),
        "one layer": (traffic(token_mb="2 * 8192 * 2 / 1e6"), "80 layers"),
        "factor 2": (traffic(ring_mb="5.24"), "not 2"),
        "round once": (traffic(ring_mb="2.62 * 7 / 8"), "twice"),
        "not sent": (traffic(ring_mb="2.62"), "brought"),
        "all-reduces": (traffic(messages="160"), "those are all-reduces"),
        "half the messages": (traffic(messages="1120"), "twice"),
        "tree": (traffic(messages="960"), "tree"),
        "a µs too few": (traffic(floor_ms="0.48"), "not for an all-reduce"),
        "µs": (traffic(floor_ms="6720"), "µs"),
        "text": (traffic(token_mb="'2.6 MB'"), "expected a number"),
        "a key short": ("def traffic(): return {'layer_kib': 32}", "KeyError"),
    },
}
