"""Checks of exercise 18. Oracles: the whole product in float64, brute force over heads, torch's lookup, sums by hand.

Chapter 18. Answers run on every rank at once, ranks being threads; what every rank returns is looked at.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.compare import mismatch
from minillm.lab.estimates import estimates
from minillm.parallel.groups import all_reduce, run_threads


def on_ranks(make_args):
    """run(answer): what each rank returned. make_args(rank, ranks) -> fresh arguments without the group."""

    def prepare(ranks):
        def run(answer):
            def rank_main(group):
                args = [a.clone() if torch.is_tensor(a) else a for a in make_args(group.rank(), ranks)]
                kept = [a.clone() if torch.is_tensor(a) else a for a in args]
                got = answer(*args, group)
                changed = [i for i, a in enumerate(args) if torch.is_tensor(a) and not torch.equal(a, kept[i])]
                if changed:
                    raise ValueError(
                        f"argument {changed[0]} was changed in place, by your code or by an all_reduce, which writes "
                        "into what it gets"
                    )
                return got, len([1 for name, _ in group.sent if name == "all_reduce"])

            return run_threads(rank_main, ranks, seconds=15.0)

        return run

    return prepare


def same_on_all(most: int | None = None):
    """Compare every rank's result; most: all-reduces that may be used."""

    def compare(got, expected):
        for rank, (value, _) in enumerate(got):
            if text := mismatch(value, expected):
                return f"rank {rank}: {text}"
        if most is not None and got[0][1] > most:
            return f"{got[0][1]} all-reduces where {most} are enough"
        return None

    return compare


def all_close(got, expected) -> bool:
    return all(torch.is_tensor(v) and mismatch(v, expected) is None for v, _ in got)


def no_sum(x, weight, bias, group):
    return F.linear(x, weight, bias)


def bias_inside(x, weight, bias, group):
    return all_reduce(F.linear(x, weight, bias), group)


def mean(x, weight, bias, group):
    y = all_reduce(F.linear(x, weight), group) / group.size()
    return y if bias is None else y + bias


def no_bias(x, weight, bias, group):
    return all_reduce(F.linear(x, weight), group)


def values_equal(a, b) -> bool:
    return len(a) == len(b) and all(
        torch.is_tensor(x)
        and torch.is_tensor(y)
        and x.shape == y.shape
        and torch.allclose(x.double(), y.double(), 1e-3, 1e-4)
        for (x, _), (y, _) in zip(a, b)
    )


def like(run, wrong):
    """A `when`: this answer gave on every rank what `wrong` gives."""

    def when(got, expected, case):
        if not isinstance(got, list):
            return False
        try:
            return values_equal(got, run(wrong)) and not all_close(got, expected)
        except Exception:  # a mistake that cannot even run on these inputs
            return False

    return when


ROWS = {
    "the sum over ranks is missing: each rank has a part of every sum": no_sum,
    "the bias is added once a rank: add it after the sum": bias_inside,
    "that is the mean of the ranks: parts of a sum are added": mean,
    "the bias is missing": no_bias,
}


@register("18.row_parallel", points=2, title="A row-parallel linear")
def row_parallel(rng):
    for ranks, tokens, width, out, biased in [
        (1, 2, 4, 3, True), (2, 3, 8, 5, True), (4, 5, 12, 6, True), (3, 1, 9, 7, False), (8, 4, 64, 33, True),
    ]:  # fmt: skip
        x, weight = rng.tensor(tokens, width), rng.tensor(out, width)
        bias = rng.tensor(out, scale=3.0) if biased else None

        def args(rank, ranks, x=x, weight=weight, bias=bias):
            part = slice(rank * x.shape[1] // ranks, (rank + 1) * x.shape[1] // ranks)
            return x[:, part], weight[:, part], bias

        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        run = on_ranks(args)(ranks)
        hints = [Hint(text, when=like(run, wrong)) for text, wrong in ROWS.items()]
        call = f"row_parallel on {ranks} ranks, x {[tokens, width]}, {'a' if biased else 'no'} bias"
        yield Drive(run, expected, call, compare=same_on_all(1), hints=hints)


def brute_heads(rank, ranks, heads, kv_heads):
    owners = [h // (heads // kv_heads) for h in range(heads) if h * ranks // heads == rank]
    return min(owners), max(owners) + 1


HEADS = {
    "with more ranks than KV heads each is kept by several ranks: your range is empty": (
        lambda r, p, h, k: (r * (k // p), (r + 1) * (k // p))
    ),
    "neighbouring ranks use the same KV head: they are not dealt out in turn": (
        lambda r, p, h, k: brute_heads(r, p, h, k) if p <= k else (r % k, r % k + 1)
    ),
    "all ranks keep KV head 0: their query heads use others": (
        lambda r, p, h, k: brute_heads(r, p, h, k) if p <= k else (0, 1)
    ),
    "every rank keeps all KV heads: that is right, and saves nothing": lambda r, p, h, k: (0, k),
    "that is how many, not which": lambda r, p, h, k: (0, max(1, k // p)),
    "`last` is not included": lambda r, p, h, k: (brute_heads(r, p, h, k)[0], brute_heads(r, p, h, k)[1] - 1),
    "those are the query heads": lambda r, p, h, k: (r * h // p, (r + 1) * h // p),
}


@register(
    "18.kv_heads_of",
    points=2,
    title="KV heads for too many ranks",
    hints=[Hint(text, wrong=wrong) for text, wrong in HEADS.items()],
)
def kv_heads_of(rng):
    shapes = [(4, 8, 2), (2, 8, 4), (8, 64, 8), (16, 64, 8), (6, 12, 2), (3, 9, 3), (32, 32, 1), (4, 16, 16)]
    for ranks, heads, kv_heads in shapes:
        for rank in sorted({0, ranks - 1, rng.randrange(ranks), rng.randrange(ranks)}):
            yield Case((rank, ranks, heads, kv_heads), brute_heads(rank, ranks, heads, kv_heads))
    for ranks, heads, kv_heads in [(2, 9, 3), (3, 12, 2), (4, 6, 2), (16, 8, 8), (5, 14, 2), (4, 12, 3), (2, 6, 3)]:
        why = Hint("ranks must divide the query heads", when=lambda *_: True) if heads % ranks else Hint(
            "ranks must divide the KV heads, or be a multiple of them", when=lambda *_: True
        )  # fmt: skip
        yield Case((0, ranks, heads, kv_heads), raises=ValueError, hints=[why])


def clamped(tokens, table, start, group):
    return all_reduce(table[(tokens - start).clamp(0, len(table) - 1)], group)


def wrapped(tokens, table, start, group):
    return all_reduce(table[(tokens - start) % len(table)], group)


def looked_up(local, elsewhere, table):
    """Rows of the table, and 0 for ids of other ranks."""
    return table[local.masked_fill(elsewhere, 0)].masked_fill(elsewhere.unsqueeze(-1), 0.0)


def last_lost(tokens, table, start, group):
    local = tokens - start
    return all_reduce(looked_up(local, (local < 0) | (local >= len(table) - 1), table), group)


def first_lost(tokens, table, start, group):
    local = tokens - start
    return all_reduce(looked_up(local, (local <= 0) | (local >= len(table)), table), group)


def from_the_end(tokens, table, start, group):
    local = tokens - start
    return all_reduce(looked_up(local, local >= len(table), table), group)


def by_rank(tokens, table, start, group):
    local = tokens - group.rank() * len(table)
    return all_reduce(looked_up(local, (local < 0) | (local >= len(table)), table), group)


def not_summed(tokens, table, start, group):
    local = tokens - start
    return looked_up(local, (local < 0) | (local >= len(table)), table)


TABLES = {
    "slices differ in length: they begin at `start`, not at rank * len(table)": by_rank,
    "ids below `start` became negative indices, which count from the end of the table": from_the_end,
    "ids of other ranks must bring 0 to the sum: clamped ids bring a row": clamped,
    "ids of other ranks wrap around and bring a row: set them to 0": wrapped,
    "the last row of each slice is lost: >= len(table), not more": last_lost,
    "the first row of each slice is lost: < 0, not <= 0": first_lost,
    "the sum over ranks is missing": not_summed,
}


@register("18.vocab_embedding", points=2, title="An embedding cut by vocabulary")
def vocab_embedding(rng):
    for ranks, vocab, hidden, shape in [(1, 5, 3, (4,)), (2, 10, 4, (2, 7)), (3, 11, 4, (12,)), (4, 203, 6, (3, 40))]:
        table, tokens = rng.tensor(vocab, hidden), rng.ints(vocab, *shape)
        edges = [r * vocab // ranks for r in range(ranks + 1)]
        tokens.view(-1)[: min(len(edges), tokens.numel())] = torch.tensor(
            [max(0, e - 1) for e in edges][: tokens.numel()]
        )  # the last id of each slice is always asked for
        tokens.view(-1)[-1] = edges[-2]  # and the first of the last slice

        def args(rank, ranks, table=table, tokens=tokens, edges=edges):
            return tokens, table[edges[rank] : edges[rank + 1]], edges[rank]

        run = on_ranks(args)(ranks)
        hints = [Hint(text, when=like(run, wrong)) for text, wrong in TABLES.items()]
        call = f"vocab_embedding on {ranks} ranks, {vocab} ids, tokens {list(shape)}"
        yield Drive(run, F.embedding(tokens, table), call, compare=same_on_all(1), hints=hints)


def missing(x, heads, out, gate, up, down, group):
    x = x + F.linear(heads, out)
    h = F.rms_norm(x, x.shape[-1:])
    y = F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
    return x + all_reduce(y, group)


def residual_inside(x, heads, out, gate, up, down, group):
    x = all_reduce(x + F.linear(heads, out), group)
    h = F.rms_norm(x, x.shape[-1:])
    y = F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
    return x + all_reduce(y, group)


def residual_inside_twice(x, heads, out, gate, up, down, group):
    x = x + all_reduce(F.linear(heads, out), group)
    h = F.rms_norm(x, x.shape[-1:])
    return all_reduce(x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down), group)


def one_at_the_end(x, heads, out, gate, up, down, group):
    first = F.linear(heads, out)
    h = F.rms_norm(x + first, x.shape[-1:])
    y = F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
    return x + all_reduce(first + y, group)


def after_norm(x, heads, out, gate, up, down, group):
    x = x + F.linear(heads, out)
    h = all_reduce(F.rms_norm(x, x.shape[-1:]), group)
    y = F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
    return x + all_reduce(y, group)


def second_lost(x, heads, out, gate, up, down, group):
    x = x + all_reduce(F.linear(heads, out), group)
    h = F.rms_norm(x, x.shape[-1:])
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


LAYERS = {
    "the ranks still hold different x after the first line": missing,
    "the residual is counted once a rank: it is whole already, keep it out of the all_reduce": residual_inside,
    "the second residual is counted once a rank: keep it out of the all_reduce": residual_inside_twice,
    "one sum at the end comes too late: the norm and silu saw a part": one_at_the_end,
    "a norm of parts is no part of a norm: sum before it": after_norm,
    "now the MLP's sum is missing": second_lost,
}


@register("18.after_attention", points=3, title="Debug it: ranks that drift apart", given=missing)
def after_attention(rng):
    for ranks, tokens, hidden, width, ffn in [
        (1, 2, 8, 8, 12),
        (2, 3, 8, 16, 12),
        (4, 5, 16, 16, 24),
        (8, 2, 24, 64, 40),
    ]:
        x, heads, out = rng.tensor(tokens, hidden), rng.tensor(tokens, width), rng.tensor(hidden, width, scale=0.4)
        gate, up = rng.tensor(ffn, hidden, scale=0.4), rng.tensor(ffn, hidden, scale=0.4)
        down = rng.tensor(hidden, ffn, scale=0.4)

        def args(rank, ranks, x=x, heads=heads, out=out, gate=gate, up=up, down=down):
            a = slice(rank * heads.shape[1] // ranks, (rank + 1) * heads.shape[1] // ranks)
            m = slice(rank * len(gate) // ranks, (rank + 1) * len(gate) // ranks)
            return x, heads[:, a], out[:, a], gate[m], up[m], down[:, m]

        middle = x.double() + heads.double() @ out.double().T
        eps = torch.finfo(torch.float32).eps
        h = middle / (middle.square().mean(-1, keepdim=True) + eps).sqrt()
        g = h @ gate.double().T
        expected = middle + (g * torch.sigmoid(g) * (h @ up.double().T)) @ down.double().T
        run = on_ranks(args)(ranks)
        hints = [Hint(text, when=like(run, wrong)) for text, wrong in LAYERS.items()]
        call = f"after_attention on {ranks} ranks, x {[tokens, hidden]}"
        yield Drive(run, expected, call, compare=same_on_all(2), hints=hints)


ONE, BYTE = "one all-reduce a layer? There are two", "1 byte a number? 16 bits are 2"
TRAFFIC = {  # see `estimates`
    "layer_kib": (
        sum(8192 * 2 for _ in range(2)) / 1024,
        0.01,
        {16.0: ONE + "; or " + BYTE, 64.0: "4 bytes? 16 bits are 2", 32.768: "that is kB; a KiB is 1024 bytes"},
    ),
    "token_mb": (sum(2 * 8192 * 2 for _ in range(80)) / 1e6, {1.31: ONE + "; or " + BYTE, 0.0328: "all 80 layers"}),
    "ring_mb": (
        sum(2 * 8192 * 2 for _ in range(80)) * 14 / 8 / 1e6,
        {
            5.24: "the factor is 2 (p - 1) / p, not 2",
            2.294: "a ring goes round twice: 2 (p - 1) / p",
            2.621: "that is what is brought; a ring sends 2 (p - 1) / p of it",
            36.7: "a message of the ring is n / p bytes, not n",
        },
    ),
    "messages": (
        sum(14 for _ in range(160)),
        0,
        {
            2254: "the embedding is left out",
            1120: "half: a ring goes round twice, 2 (p - 1); and a layer has two all-reduces",
            160: "those are all-reduces; each is 2 (p - 1) messages",
            2560: "2 (p - 1), not 2 p",
            960: "that is a tree's 2 log2 p; rings are asked for",
        },
    ),
    "floor_ms": (
        sum(14 for _ in range(160)) * 3e-3,
        {
            0.48: "3 µs is for a message, not for an all-reduce",
            3.36: "half: a ring goes round twice; and a layer has two all-reduces",
            6720.0: "that is in µs",
            0.00672: "that is in seconds",
        },
    ),
}


@register("18.traffic", points=2, title="Estimate it: the traffic of a 70B")
def traffic(rng):
    yield from estimates("traffic", TRAFFIC, 0.03)
