"""Checks of exercise 09. Oracles: softmax over all keys in float64, tiles counted one by one, Python's whole numbers.

Chapter 09.
"""

from __future__ import annotations

import math

import torch

from minillm.lab.check import Case, Hint, register
from minillm.lab.estimates import slips

EMPTY = float("-inf")


def item(got, i):
    """Part i of a pair, or None."""
    return got[i] if isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[i], torch.Tensor) else None


def has_nan(got, *_) -> bool:
    return any(x is not None and bool(x.isnan().any()) for x in (item(got, 0), item(got, 1)))


def exact(scores, values):
    """float64: scores [heads, keys], values [heads, keys, dim] -> (out [heads, dim], lse [heads])."""
    out, lse = [], []
    for row, value in zip(scores.double(), values.double()):
        out.append(row.softmax(0) @ value if len(row) else torch.zeros(value.shape[-1], dtype=torch.float64))
        lse.append(row.logsumexp(0) if len(row) else torch.tensor(EMPTY, dtype=torch.float64))
    return torch.stack(out), torch.stack(lse)


def pieces(scores, values, bounds):
    """float32 outputs and LSEs of parts [a, b) of the keys; an empty part is zeros and -inf."""
    parts = [exact(scores[:, a:b], values[:, a:b]) for a, b in bounds]
    return torch.stack([p[0] for p in parts]).float(), torch.stack([p[1] for p in parts]).float()


# 1


def two(weigh=lambda a, b: (torch.exp(a), torch.exp(b)), lse=None, divide=True):
    """A merge_two with a mistake in it. LSEs are shifted by the larger one, unless `weigh` does not want it."""

    def merge_two(out_a, lse_a, out_b, lse_b):
        m = torch.maximum(lse_a, lse_b)
        w_a, w_b = weigh(lse_a - m, lse_b - m)
        total = w_a + w_b if divide else torch.ones_like(m)
        out = (w_a[:, None] * out_a + w_b[:, None] * out_b) / total[:, None]
        return out, torch.logaddexp(lse_a, lse_b) if lse is None else lse(lse_a, lse_b)

    return merge_two


def unshifted(out_a, lse_a, out_b, lse_b):
    w_a, w_b = torch.exp(lse_a), torch.exp(lse_b)
    return (w_a[:, None] * out_a + w_b[:, None] * out_b) / (w_a + w_b)[:, None], torch.log(w_a + w_b)


TWO = {
    "the parts weigh alike only if their LSEs are equal: weights exp(LSE)": two(
        lambda a, b: (torch.ones_like(a), torch.ones_like(b))
    ),
    "the weights are swapped: a part's own LSE weighs its own output": two(lambda a, b: (torch.exp(b), torch.exp(a))),
    "weights are exp(LSE), not the LSEs": lambda oa, la, ob, lb: (
        (la[:, None] * oa + lb[:, None] * ob) / (la + lb)[:, None],
        torch.logaddexp(la, lb),
    ),
    "not divided by the sum of the weights": two(divide=False),
    "exp of a large LSE overflows: take the larger of the two away first": unshifted,
    "the LSE of both is m + log(sum of weights): the maximum alone forgets the smaller part": two(lse=torch.maximum),
    "LSEs do not add: their exponentials do": two(lse=torch.add),
    "the shift m is missing from the LSE: m + log(sum of weights)": two(
        lse=lambda a, b: torch.logaddexp(a, b) - torch.maximum(a, b)
    ),
    "the LSE is m + log(sum of weights), with the log": two(
        lse=lambda a, b: torch.maximum(a, b) + torch.exp(torch.logaddexp(a, b) - torch.maximum(a, b))
    ),
}


@register("09.merge_two", points=2, title="Merge two parts", hints=slips(TWO))
def merge_two(rng):
    yield Case(
        (torch.tensor([[1.0]]), torch.zeros(1), torch.tensor([[3.0]]), torch.zeros(1)),
        (torch.tensor([[2.0]]), torch.tensor([math.log(2)])),
    )
    for heads, keys, dim, spread, level in (
        (3, 7, 4, 1, 0),
        (5, 40, 8, 3, 2),
        (2, 90, 16, 4, 3000),
        (4, 9, 3, 2, -3000),
    ):
        scores, values = rng.tensor(heads, keys, scale=spread) + level, rng.tensor(heads, keys, dim)
        outs, lses = pieces(scores, values, [(0, keys // 3), (keys // 3, keys)])
        out, lse = exact(scores, values)
        yield Case(
            (outs[0], lses[0], outs[1], lses[1]), (out.float(), lse.float()), rtol=1e-5, atol=1e-5 + 1e-6 * abs(level)
        )
    levels = torch.tensor([1000.0, 0.0, -1000.0])[:, None]  # heads have nothing to do with each other
    scores, values = rng.tensor(3, 20, scale=2.0) + levels, rng.tensor(3, 20, 4)
    outs, lses = pieces(scores, values, [(0, 9), (9, 20)])
    out, lse = exact(scores, values)
    yield Case((outs[0], lses[0], outs[1], lses[1]), (out.float(), lse.float()), rtol=1e-5, atol=1e-3)
    far = torch.tensor([500.0, -500.0])  # one part far above the other: it alone counts, and nothing overflows
    outs = rng.tensor(2, 2, 3)
    yield Case(
        (outs[0], far, outs[1], -far),
        (torch.stack((outs[0, 0], outs[1, 1])), torch.tensor([500.0, 500.0])),
        rtol=1e-5,
    )


# 2


def many(shift=True, keep=True, guard=True, low=True, hide=False):
    """A merge with one of its guards left out."""

    def merge(outs, lses):
        m = lses.amax(0) if shift else torch.zeros_like(lses[0])
        if guard:
            m = torch.where(m == EMPTY, 0.0, m)
        weights = torch.exp(lses - m)
        total = weights.sum(0)
        if hide:
            outs = outs.nan_to_num()
        elif keep:
            outs = torch.where((lses == EMPTY)[..., None], 0.0, outs)
        safe = torch.where(total == 0, 1.0, total) if guard else total
        lse = m + torch.log(total if low else safe)
        return (weights[..., None] * outs).sum(0) / safe[:, None], lse

    return merge


def even(outs, lses):
    """Every part weighs alike."""
    return torch.where((lses == EMPTY)[..., None], 0.0, outs).mean(0), lses.logsumexp(0)


MANY = {
    "outs of an empty part may be NaN, and 0 x NaN is NaN: put zeros there before you multiply": many(keep=False),
    "where all parts of a head are empty, -inf - (-inf) is NaN: shift by 0 there, divide by 1": many(guard=False),
    "exp of a large LSE overflows: take the largest away first": many(shift=False),
    "where all parts are empty the LSE is -inf, not 0": many(low=False),
    "NaN of a part that saw keys is hidden: only empty parts are to be left out": many(hide=True),
    "parts weigh by exp(LSE), not alike": even,
}


@register("09.merge", points=3, title="Merge many, some of them empty", hints=slips(MANY))
def merge(rng):
    for splits, heads, keys, level in (
        (1, 2, 5, 0),
        (3, 4, 20, 0),
        (7, 3, 50, 0),
        (16, 2, 40, 2000),
        (5, 3, 12, -2000),
    ):
        scores, values = rng.tensor(heads, keys, scale=3.0) + level, rng.tensor(heads, keys, 4)
        cuts = sorted(rng.randint(0, keys) for _ in range(splits - 1))
        bounds = list(zip([0, *cuts], [*cuts, keys]))
        if splits > 2:
            bounds[1:1] = [(bounds[0][1], bounds[0][1])] * 2  # empty for certain
        outs, lses = pieces(scores, values, bounds)
        out, lse = exact(scores, values)
        outs[lses == EMPTY] = rng.choice((math.nan, 7.0, math.inf))
        tolerance = 1e-5 + 1e-6 * abs(level)
        yield Case((outs, lses), (out.float(), lse.float()), rtol=1e-5, atol=tolerance)
    levels = torch.tensor([1000.0, 0.0, -1000.0])[:, None]  # heads have nothing to do with each other
    scores, values = rng.tensor(3, 30, scale=2.0) + levels, rng.tensor(3, 30, 4)
    outs, lses = pieces(scores, values, [(0, 9), (9, 9), (9, 22), (22, 30)])
    out, lse = exact(scores, values)
    yield Case((outs, lses), (out.float(), lse.float()), rtol=1e-5, atol=1e-3)
    outs, lses = rng.tensor(4, 3, 5), rng.tensor(4, 3)
    lses[:, 1] = EMPTY  # one head of three has no keys at all
    lses[2, 0] = lses[0, 2] = EMPTY  # and parts that are empty for one head alone
    outs[lses == EMPTY] = math.nan
    weights = lses.double().softmax(0).nan_to_num()
    expected = (weights[..., None] * outs.double().nan_to_num()).sum(0).float()
    yield Case((outs, lses), (expected, lses.double().logsumexp(0).float()), rtol=1e-5)
    yield Case((torch.full((3, 2, 4), 7.0), torch.full((3, 2), EMPTY)), (torch.zeros(2, 4), torch.full((2,), EMPTY)))
    outs = rng.tensor(3, 2, 4)
    outs[1, 0, 2] = math.nan  # a part that did see keys: this NaN is news
    lses = torch.zeros(3, 2)
    yield Case((outs, lses), (outs.double().mean(0).float(), torch.full((2,), math.log(3))), rtol=1e-5)


# 3


def paged(positions=None, scaled=True, base2=False, unscaled_lse=False, first=None):
    """A paged_part with a mistake in it."""

    def paged_part(q, k_pool, v_pool, table, begin, end, scale):
        size = k_pool.shape[1]
        if begin >= end:
            return torch.zeros_like(q), q.new_full((len(q),), EMPTY)
        keys = torch.arange(first(begin, size) if first else begin, end)
        block, slot = (positions or (lambda t, i, s, b: (t[i // s], i % s)))(table, keys, size, begin)
        k, v = k_pool[block, slot], v_pool[block, slot]
        scores = q @ k.T * (scale if scaled else 1.0)
        lse = scores.logsumexp(-1)
        return scores.softmax(-1) @ v, lse / math.log(2) if base2 else lse / scale if unscaled_lse else lse

    return paged_part


PAGED = {
    "the table is not used: block i of the text is block table[i] of the pool": paged(
        positions=lambda t, i, s, b: (i // s, i % s)
    ),
    "keys count in the text, from `begin`: not from 0": paged(
        positions=lambda t, i, s, b: (t[(i - b) // s], (i - b) % s)
    ),
    "the slot counts in the text: key % block_size, not its place in this part": paged(
        positions=lambda t, i, s, b: (t[i // s], (i - b) % s)
    ),
    "only keys begin .. end - 1 belong to this part": paged(first=lambda begin, size: 0),
    "begin may lie inside a block: the keys before it in that block are not of this part": paged(
        first=lambda begin, size: begin // size * size
    ),
    "the scores are not scaled": paged(scaled=False),
    "the LSE is of the scaled scores": paged(unscaled_lse=True),
    "natural logarithms, please: that LSE is in base 2": paged(base2=True),
}


@register(
    "09.paged_part",
    points=3,
    title="One part, straight from the blocks",
    hints=[
        Hint(
            "an empty part (begin >= end) is zeros and -inf",
            when=lambda got, expected, case: case.args[4] >= case.args[5],
        ),
        Hint(  # before the slips: in a pool of NaN all of them give NaN
            "nan: a slot was read that holds no key of this part; or exp of a score from which its row's largest was "
            "not taken away",
            when=has_nan,
        ),
        *slips(PAGED),
    ],
)
def paged_part(rng):
    plans = [(1, 1, 4, 8, 0, 8), (4, 16, 8, 70, 0, 70), (4, 16, 8, 70, 33, 58), (3, 5, 16, 43, 7, 8)]
    plans += [
        (8, 1, 4, 21, 10, 21),
        (2, 256, 8, 300, 200, 300),
        (4, 16, 8, 70, 64, 70),
        (2, 4, 4, 9, 5, 5),
        (2, 4, 4, 9, 9, 7),
    ]
    for group, size, dim, length, begin, end in plans:
        count = -(-length // size)
        blocks = rng.sample(range(1, count + 6), count)
        k_pool, v_pool = torch.full((2, count + 6, size, dim), math.nan)
        k, v, q = rng.tensor(length, dim), rng.tensor(length, dim), rng.tensor(group, dim)
        for i in range(begin, max(begin, end)):  # NaN wherever this part has no key
            k_pool[blocks[i // size]][i % size], v_pool[blocks[i // size]][i % size] = k[i], v[i]
        scale = rng.choice((0.25, 0.5, 1.7))
        scores = scale * (q.double() @ k[begin : max(begin, end)].double().T)
        out, lse = exact(scores, v[begin : max(begin, end)].expand(group, -1, -1))
        yield Case((q, k_pool, v_pool, torch.tensor(blocks), begin, end, scale), (out.float(), lse.float()))
    k_pool, v_pool, q = (
        rng.tensor(9, 4, 8),
        rng.tensor(9, 4, 8),
        rng.tensor(3, 8),
    )  # no NaN: a wrong slot is a wrong value
    table = torch.tensor([8, 3, 0, 5])
    rows = [int(table[i // 4]) * 4 + i % 4 for i in range(6, 15)]
    for levels in (None, torch.tensor([150.0, 0.0, -150.0])):  # then each row's scores lie far from the others'
        if levels is not None:
            q[:, 0], k_pool[..., 0] = levels / 0.3, 1.0
        k, v = k_pool.view(36, 8)[rows], v_pool.view(36, 8)[rows]
        out, lse = exact(0.3 * (q.double() @ k.double().T), v.expand(3, -1, -1))
        yield Case((q.clone(), k_pool.clone(), v_pool, table, 6, 15, 0.3), (out.float(), lse.float()))


# 4


def time_of(programs, tiles, sms, splits) -> int:
    """Counted out: deal the tiles to parts, the parts to waves of programs; a wave takes as long as a full part."""
    each = 0
    while each * splits < tiles:
        each += 1
    parts, dealt = 0, 0
    while dealt < tiles:
        dealt, parts = dealt + each, parts + 1
    waves, started = 0, 0
    while started < programs * parts:
        started, waves = started + sms, waves + 1
    return waves * each


def fewest(programs, tiles, sms) -> int:
    times = [time_of(programs, tiles, sms, splits) for splits in range(1, tiles + 1)]
    return next(i for i, time in enumerate(times, 1) if 10 * time <= 11 * min(times))


def by_time(time, pick=min, near=11):
    def choose(programs, tiles, sms):
        times = {s: time(programs, tiles, sms, s) for s in range(1, tiles + 1)}
        best = min(times.values())
        return pick(s for s, t in times.items() if 10 * t <= near * best)

    return choose


def ceil(a, b):
    return -(-a // b)


def honest(programs, tiles, sms, s):
    each = ceil(tiles, s)
    return ceil(programs * ceil(tiles, each), sms) * each


CHOICES = {
    "sms // programs is right only where it divides: compare the times of all counts": lambda p, t, n: max(
        1, min(t, n // p)
    ),
    "rounded up, the last wave runs for a few programs: compare the times of all counts": lambda p, t, n: max(
        1, min(t, ceil(n, p))
    ),
    "tiles a part are rounded up: the longest part is the time": by_time(
        lambda p, t, n, s: ceil(p * ceil(t, ceil(t, s)), n) * (t // s)
    ),
    "waves are rounded up: the last one takes as long as a full one": by_time(
        lambda p, t, n, s: p * ceil(t, ceil(t, s)) / n * ceil(t, s)
    ),
    "the waves are missing: more programs than SMs take turns": by_time(lambda p, t, n, s: ceil(t, s)),
    "the tiles of a part are missing from the time": by_time(lambda p, t, n, s: ceil(p * ceil(t, ceil(t, s)), n)),
    "that is the very least time: any within 10 % of it will do, and the smallest count of those wins": by_time(
        honest, near=10
    ),
    "of all counts within 10 % of the least time the smallest wins": by_time(honest, pick=max),
    "as many splits as SMs forgets the programs that are there already": lambda p, t, n: min(t, n),
    "as many splits as tiles: a wave too many is as slow as any other": lambda p, t, n: t,
}


@register("09.choose_splits", points=2, title="Choose the splits", hints=slips(CHOICES))
def choose_splits(rng):
    plans = [(2, 12, 8), (1, 1, 132), (8, 1024, 132), (132, 64, 132), (512, 1024, 132), (1, 300, 132), (7, 45, 20)]
    plans += [(3, 16, 10), (5, 9, 108), (133, 10, 132), (66, 7, 132), (1, 5, 4), (1, 1024, 528), (9, 100, 66)]
    plans += [(22, 109, 16)]  # one time is exactly 10 % above the least
    plans += [(rng.randint(1, 90), rng.randint(2, 200), rng.choice((16, 66, 108, 132))) for _ in range(12)]
    for plan in plans:
        yield Case(plan, fewest(*plan))


# 5


def given_row_offsets(table, keys, block_size, block_stride, slot_stride):
    """The function as the reader is given it."""
    block, slot = table[keys // block_size], keys % block_size
    return (block * block_stride + slot * slot_stride).long()


def offsets(kind=torch.int64, place=lambda t, i, s: (t[i // s], i % s), both=True):
    def row_offsets(table, keys, block_size, block_stride, slot_stride):
        block, slot = place(table, keys, block_size)
        rows = block.to(kind) * block_stride
        return (rows + slot * slot_stride if both else rows).long()

    return row_offsets


OFFSETS = {
    "still 32 bits when it is multiplied: widen the block id before the product, not the result": given_row_offsets,
    "a float32 holds 24 bits: large offsets are rounded. Use int64": offsets(torch.float32),
    "the slot in the block is missing": offsets(both=False),
    "the table is not used": offsets(place=lambda t, i, s: (i // s, i % s)),
}


@register(
    "09.row_offsets",
    points=2,
    title="Debug it: right until the pool is large",
    given=given_row_offsets,
    hints=[
        *slips(OFFSETS),
        Hint(
            "a negative offset: the product passed 2^31 in int32",
            when=lambda got, *_: isinstance(got, torch.Tensor) and bool((got < 0).any()),
        ),
        Hint(
            "the result must be int64",
            when=lambda got, *_: isinstance(got, torch.Tensor) and got.dtype != torch.int64,
        ),
    ],
)
def row_offsets(rng):
    plans = [
        ([7, 2], [0, 5], 4, 64, 16),
        ([40_000, 3], [1, 17, 31], 16, 65_536, 4096),
        ([7767, 7768], [0, 480], 480, 276_480, 576),
        ([5, 30_000], [3, 20, 31], 16, 131_072, 128),  # heads lie between the slots of two blocks
    ]
    for _ in range(6):
        size = rng.choice((1, 5, 16, 64))
        slot_stride = rng.choice((64, 128, 1023, 8192))
        table = [rng.randint(0, 2**31 - 1) for _ in range(rng.randint(2, 6))]
        table[0] = rng.randint(2**20, 2**22)
        keys = [rng.randrange(len(table) * size) for _ in range(9)] + [size - 1]
        plans.append((table, keys, size, slot_stride * size, slot_stride))
    for table, keys, size, block_stride, slot_stride in plans:
        expected = [table[i // size] * block_stride + (i % size) * slot_stride for i in keys]
        yield Case(
            (
                torch.tensor(table, dtype=torch.int32),
                torch.tensor(keys, dtype=torch.int32),
                size,
                block_stride,
                slot_stride,
            ),
            torch.tensor(expected, dtype=torch.int64),
            dtype=torch.int64,
        )


# 6


def when_key(key: str, wrong: float, text: str) -> Hint:
    def matches(got, expected, case) -> bool:
        return isinstance(got, dict) and key in got and math.isclose(float(got[key]), wrong, rel_tol=0.03)

    return Hint(text, when=matches)


LAYER = 80.13  # microseconds; the cases below count it out


@register(
    "09.at_64k",
    points=2,
    title="Estimate it: 64k tokens",
    hints=[
        when_key("layer_us", LAYER / 2, "half of the bytes: K and V, 2 bytes a number"),
        when_key("layer_us", LAYER * 4, "32 query heads share 8 KV heads: 8 are stored"),
        when_key("layer_us", LAYER * 32, "`layer_us` is one layer's"),
        when_key("layer_us", LAYER / 1e6, "microseconds: x 10^6"),
        when_key("step_ms", LAYER / 1e3, "`step_ms` is of all 32 layers"),
        when_key("step_ms", LAYER * 32, "milliseconds, not microseconds"),
        when_key("idle_us", LAYER * 132, "8 programs read at the same time, not one"),
        when_key("idle_us", LAYER * 132 / 32, "one program a KV head: the group's query heads share it"),
        when_key("idle_us", LAYER * 8 / 132, "fewer SMs read more slowly: the time grows by 132 / 8"),
        when_key("idle_us", LAYER, "only 8 of the 132 SMs read"),
        when_key("crossover", 16e9 / 4096, "K and V of all 32 layers stand against the weights of all"),
        when_key("crossover", 16e9 / 4096 / 32 / 4, "32 query heads share 8 KV heads: 8 are stored"),
        when_key("crossover", 16e9 / 4096 / 32 * 2, "half of the bytes: K and V, 2 bytes a number"),
    ],
)
def at_64k(rng):
    numbers_of_layer = sum(8 * 128 * 65536 for _ in ("K", "V"))
    seconds = numbers_of_layer * 2 / 3.35e12
    expected = {
        "layer_us": seconds * 1e6,
        "step_ms": sum(seconds for _ in range(32)) * 1e3,
        "idle_us": numbers_of_layer * 2 / (8 * 3.35e12 / 132) * 1e6,
        "crossover": 16e9 / (numbers_of_layer * 2 * 32 / 65536),
    }
    yield Case((), expected, rtol=0.03)
