"""Checks of exercise 08. Oracles: closed forms in float64 over all scores at once; sums counted one by one."""

import math
import tracemalloc

import torch

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.estimates import estimates, slips


def has_nan(got, expected, case):
    return isinstance(got, tuple) and any(torch.is_tensor(x) and bool(x.isnan().any()) for x in got)


# 1


FEW = 64_000  # bytes: 20,000 kept numbers are more, however they are kept


def streamed(pairs):
    """What an answer gives, and whether it kept the stream: the most memory that Python held meanwhile."""

    def run(answer):
        others = tracemalloc.is_tracing()
        tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            got = answer((score + 0.0, value + 0.0) for score, value in pairs)
            held = tracemalloc.get_traced_memory()[1] - before
        finally:
            if not others:
                tracemalloc.stop()
        if isinstance(got, tuple | list) and len(got) == 2:
            got = tuple(float(x) if isinstance(x, float | int) else x for x in got)
        return got, "few numbers kept" if held < FEW else f"{held / 1000:.0f} kB kept at once"

    return run


def online(pairs, guard=True, rescale=True, rescale_acc=True, top=True, log=True, first=None):
    m, total, acc = -math.inf if first is None else first, 0.0, 0.0
    for score, value in pairs:
        if guard and score == -math.inf:
            continue
        new = max(m, score) if top else 0.0
        factor = (math.exp(m - new) if rescale else 1.0) if m != -math.inf or rescale else 1.0
        p = math.exp(score - new)
        total, m, acc = total * factor + p, new, acc * (factor if rescale_acc else 1.0) + p * value
    if not total:
        return 0.0, -math.inf
    return acc / total, (m if log else 0.0) + math.log(total)


def swallowing(**slip):
    """online() with a slip, through `streamed`'s answer signature."""
    return lambda pairs: online(pairs, **slip)


STREAM_SLIPS = {
    "the old sums are worth exp(old m - new m) under a new maximum: rescale them": swallowing(rescale=False),
    "the sum is rescaled, the values are not": swallowing(rescale_acc=False),
    "the log-sum-exp is m + log(total): m is missing": swallowing(log=False),
    "start at -inf: under any larger m every exponential of very small scores is 0": swallowing(first=0.0),
}


@register(
    "08.stream_softmax",
    points=2,
    title="Softmax of a stream",
    hints=[
        *slips(STREAM_SLIPS),
        Hint("exp overflows: subtract the largest score so far", when=lambda g, e, c: isinstance(g, OverflowError)),
        Hint(
            "nan: -inf - -inf, at a masked key before the first real one; or exp(old m - new m) upside down",
            when=lambda g, e, c: isinstance(g, tuple) and any(x != x for x in g[0] if isinstance(x, float)),
        ),
        Hint("nothing seen: return (0.0, -inf)", when=lambda g, e, c: isinstance(g, ZeroDivisionError | ValueError)),
        Hint(
            "the stream was kept: three variables are enough",
            when=lambda g, e, c: isinstance(g, tuple) and "at once" in str(g[-1]),
        ),
    ],
)
def stream_softmax(rng):
    streams = [
        [(2.0, 10.0), (5.0, 20.0), (3.0, 30.0)],
        [(rng.uniform(-3, 3), rng.uniform(-5, 5)) for _ in range(50)],
        [(float(i), float(i % 7)) for i in range(40)],
        [(-float(i), float(i % 5)) for i in range(40)],
        [(1000.0 + rng.uniform(-3, 3), rng.uniform(-5, 5)) for _ in range(30)],
        [(-1000.0 + rng.uniform(-3, 3), 0.0) for _ in range(30)],  # values of 0 are keys too
        [(-2e9 + rng.uniform(-3, 3), rng.uniform(-5, 5)) for _ in range(30)],
        [(-math.inf, 4.0), (1.0, 2.0), (-math.inf, 9.0), (3.0, -1.0)],
        [(150.0 * i, float(i % 5)) for i in range(20)],
        [(-math.inf, 1.0)] * 5,
        [],
        [(0.0, 3.0)],
        [(rng.uniform(-300, 300), rng.uniform(-5, 5)) for _ in range(20_000)],
    ]
    for pairs in streams:
        scores = torch.tensor([s for s, _ in pairs], dtype=torch.float64)
        values = torch.tensor([v for _, v in pairs], dtype=torch.float64)
        lse = scores.logsumexp(0).item() if len(pairs) else -math.inf
        mean = 0.0 if lse == -math.inf else (scores.softmax(0) @ values).item()
        yield Drive(
            streamed(pairs),
            ((mean, lse), "few numbers kept"),
            f"stream_softmax of {len(pairs)} pairs",
            rtol=1e-6,
            atol=1e-9,
        )


# 2


def lift(q, k, level, scale) -> None:
    """Scores of even rows by about `level`, of odd ones by its negative: past 88 an exponential leaves float32, far
    below 0 it is 0, and no maximum serves two rows."""
    q[::2, 0], q[1::2, 0], k[:, 0] = 4.0, -4.0, level / (4 * scale)


def state_of(q, k, v, scale, mask):
    """(m, total, acc) of all these keys, in float64, at once."""
    s = (q.double() @ k.double().T * scale).masked_fill(~mask, -math.inf)
    m = s.amax(-1) if s.shape[-1] else torch.full((len(q),), -math.inf, dtype=torch.float64)
    p = torch.exp(s - m.masked_fill(m == -math.inf, 0.0)[:, None])
    return m, p.sum(-1), p @ v.double()


def step(alpha_total=True, alpha_acc=True, upside_down=False, scaled=True, guard=True, masked=True, p_old=False):
    """tile_step with a slip."""

    def tile_step(state, q, k, v, scale, mask=None):
        m, total, acc = state
        s = q @ k.T * (scale if scaled else 1.0)
        if mask is not None and masked:
            s = s.masked_fill(~mask, -math.inf)
        new_m = torch.maximum(m, s.amax(-1))
        safe = new_m.masked_fill(new_m == -math.inf, 0.0) if guard else new_m
        alpha = torch.exp(safe - m if upside_down else m - safe)
        p = torch.exp(s - (m if p_old else safe)[:, None])
        one = torch.ones_like(alpha)
        total = total * (alpha if alpha_total else one) + p.sum(-1)
        return new_m, total, acc * (alpha if alpha_acc else one)[:, None] + p @ v

    return tile_step


def divided(state, q, k, v, scale, mask=None):
    m, total, acc = step()(state, q, k, v, scale, mask)
    return m, total, acc / total[:, None]


def safe_returned(state, q, k, v, scale, mask=None):
    m, total, acc = step()(state, q, k, v, scale, mask)
    return m.masked_fill(m == -math.inf, 0.0), total, acc


STEPS = {
    "the old total is not rescaled by alpha": step(alpha_total=False),
    "the old acc is not rescaled by alpha": step(alpha_acc=False),
    "neither the old total nor the old acc is rescaled": step(alpha_total=False, alpha_acc=False),
    "alpha is upside down: exp(old m - new m), at most 1": step(upside_down=True),
    "scale is not used": step(scaled=False),
    "the mask is not used": step(masked=False),
    "p must be taken under the new maximum": step(p_old=True),
    "do not divide yet: acc stays a sum until the last block": divided,
    "a row that has seen nothing keeps m = -inf: `safe` is for the exponentials only": safe_returned,
}


@register(
    "08.tile_step",
    points=3,
    title="One tile",
    hints=[
        *slips(STEPS),
        Hint(
            "nan: a row with no key so far has -inf - -inf, put 0 in the place of its maximum; or exp of a large "
            "score, from which the largest so far was not taken away",
            when=has_nan,
        ),
    ],
)
def tile_step(rng):
    for rows, before, new, dim, v_dim, masked, level in (
        (4, 6, 5, 8, 8, False, None),
        (7, 0, 9, 16, 5, False, None),
        (5, 12, 3, 4, 9, True, None),
        (16, 16, 16, 32, 32, True, None),
        (6, 0, 8, 8, 3, True, None),
        (33, 40, 20, 8, 12, True, None),
        (3, 1, 1, 2, 1, False, None),
        (9, 5, 7, 8, 4, True, 120.0),
        (9, 5, 7, 8, 4, True, -120.0),
    ):
        scale = rng.choice([0.1, 0.35, 1.7])
        q, k = rng.tensor(rows, dim, scale=2.0), rng.tensor(before + new, dim)
        v = rng.tensor(before + new, v_dim)
        if level is not None:
            lift(q, k, level, scale)
        seen = torch.ones(rows, before + new, dtype=torch.bool)
        if masked:
            seen = torch.rand(rows, before + new, generator=rng.generator) < 0.5
            blind, kept, first = rng.sample(range(rows), 3)
            seen[blind] = False  # sees nothing at all
            seen[kept, before:] = False  # sees nothing new
            seen[first, :before] = False  # sees its first key now
            seen[first, -1] = True
        old = state_of(q, k[:before], v[:before], scale, seen[:, :before])
        state = tuple(x.float() for x in old)
        expected = tuple(x.float() for x in state_of(q, k, v, scale, seen))
        mask = seen[:, before:] if masked else None
        call = f"tile_step on {rows} queries, {before} keys before, {new} new ones" + (
            ", with a mask" if masked else ""
        )
        yield Case((state, q, k[before:], v[before:], scale, mask), expected, call=call)


# 3


class Memory:
    """K and V in slow memory: notes every read."""

    def __init__(self, k, v) -> None:
        self.k, self.v, self.reads = k, v, []

    def read(self, start, stop):
        start, stop = int(start), int(stop)
        if not 0 <= start < stop <= len(self.k):
            raise IndexError(f"read({start}, {stop}) of {len(self.k)} rows")
        self.reads.append((start, stop))
        return self.k[start:stop].clone(), self.v[start:stop].clone()


def attended(problem):
    """An answer's output, and what it read."""
    q, k, v, block_m, block_n, scale = problem

    def run(answer):
        memory = Memory(k, v)
        out = answer(q.clone(), memory.read, len(k), block_m, block_n, scale)
        return out, sorted(memory.reads)

    return run


def looped(shift_used=True, visit_all=False, late=0, strict=False, masked=True, one_short=False):
    """tiled_attention with a slip."""

    def tiled(q, read, length, block_m, block_n, scale):
        shift, rows = length - len(q) if shift_used else 0, []
        for first in range(0, len(q), block_m):
            tile = q[first : first + block_m]
            at = torch.arange(first, first + len(tile))[:, None] + shift
            stop = length if visit_all else min(int(at[-1]) + 1 + late, length)
            if one_short:
                stop = int(at[0]) + 1
            state = None
            for start in range(0, stop, block_n):
                k, v = read(start, min(start + block_n, length))
                if state is None:
                    n = len(tile)
                    state = torch.full((n,), -math.inf), torch.zeros(n), torch.zeros(n, v.shape[-1])
                keys = torch.arange(start, start + len(k))
                mask = (keys < at if strict else keys <= at) if masked else None
                state = step()(state, tile, k, v, scale, mask)
            rows.append(state[2] / state[1][:, None])
        return torch.cat(rows)

    return tiled


LOOPS = {
    "queries are the last of the keys: query i stands at i + length - time": looped(shift_used=False),
    "blocks that no query of the tile sees are read: stop after the tile's last query": looped(visit_all=True),
    "one key too many: a block is read that nobody sees when a tile ends on a border": looped(late=1),
    "a query sees itself: <=, not <": looped(strict=True),
    "no mask: on the diagonal queries see the future": looped(masked=False),
    "stop after the *last* query of the tile, not after its first": looped(one_short=True),
}


def only_reads_differ(got, expected, case):
    return (
        isinstance(got, tuple)
        and torch.is_tensor(got[0])
        and got[0].shape == expected[0].shape
        and torch.allclose(got[0].double(), expected[0].double(), rtol=1e-4, atol=1e-5)
    )


@register(
    "08.tiled_attention",
    points=3,
    title="The loop that skips",
    hints=[
        *slips(LOOPS),
        Hint("the values are right, the reads are not: blocks start at 0, block_n each", when=only_reads_differ),
        Hint("nan: the guard of task 2, a row that saw no block, or exp without the running maximum", when=has_nan),
    ],
)  # fmt: skip
def tiled_attention(rng):
    for time, length, block_m, block_n, dim, v_dim, level in (
        (4, 6, 2, 2, 8, 8, None),
        (16, 16, 4, 4, 8, 8, None),
        (33, 33, 8, 16, 16, 5, None),
        (7, 40, 3, 8, 8, 12, None),
        (1, 50, 16, 16, 4, 4, None),
        (64, 64, 16, 8, 8, 8, None),
        (20, 75, 64, 10, 8, 3, None),
        (130, 300, 32, 64, 16, 16, None),
        (20, 31, 8, 4, 8, 8, 120.0),
        (20, 31, 8, 4, 8, 8, -120.0),
    ):
        scale = rng.choice([0.2, 0.5])
        q, k, v = rng.tensor(time, dim, scale=2.0), rng.tensor(length, dim), rng.tensor(length, v_dim)
        if level is not None:
            lift(q, k, level, scale)
        at = torch.arange(time)[:, None] + length - time
        seen = torch.arange(length) <= at
        _, total, acc = state_of(q, k, v, scale, seen)
        reads = []
        for first in range(0, time, block_m):
            last = min(first + block_m, time) - 1
            for start in range(0, length, block_n):
                if seen[last, start]:
                    reads.append((start, min(start + block_n, length)))
        expected = (acc / total[:, None]).float(), sorted(reads)
        call = f"tiled_attention, {time} queries, {length} keys, tiles of {block_m} x {block_n}: (output, reads)"
        yield Drive(attended((q, k, v, block_m, block_n, scale)), expected, call)


# 4

GIVEN = """
def kernel(q_pointer, k_pointer, v_pointer, out_pointer, length, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    d = tl.arange(0, D)
    rows = first + tl.arange(0, BLOCK)
    q = tl.load(q_pointer + rows[:, None] * D + d[None, :], mask=rows[:, None] < length, other=0.0)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for start in range(0, first + BLOCK, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        k = tl.load(k_pointer + keys[:, None] * D + d[None, :], mask=keys[:, None] < length, other=0.0)
        v = tl.load(v_pointer + keys[:, None] * D + d[None, :], mask=keys[:, None] < length, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1))
        m = new_m
        alpha = tl.exp(m - new_m)
        p = tl.exp(s - m[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p, v)
    tl.store(out_pointer + rows[:, None] * D + d[None, :], acc / total[:, None], mask=rows[:, None] < length)
"""


def launched(q, k, v, scale):
    """The answer, compiled or interpreted, on these tensors."""

    def run(answer):
        from minillm.kernels.launch import interpreted, require_triton

        require_triton()
        import triton

        device = "cpu" if interpreted() else "cuda"
        tensors = [x.to(device) for x in (q, k, v)]
        # What the kernel must not touch lies around its output.
        room = torch.full((len(q) + 64, q.shape[1]), 7.0, device=device)
        out = room[32 : 32 + len(q)]
        try:
            triton.jit(answer)[(-(-len(q) // 16),)](*tensors, out, len(q), scale, D=q.shape[1], BLOCK=16)
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            raise error from None
        around = torch.cat([room[:32], room[32 + len(q) :]])
        return out.cpu(), "nothing else written" if bool((around == 7).all()) else "wrote outside the output"

    return run


def by_tiles(rescale_total, rescale_acc):
    """Kernel outcomes of the usual slips, in torch: (q, k, v, scale) -> output."""

    def run(q, k, v, scale):
        rows = []
        for first in range(0, len(q), 16):
            tile = q[first : first + 16]
            n = len(tile)
            state = torch.full((n,), -math.inf), torch.zeros(n), torch.zeros(n, q.shape[1])
            for start in range(0, first + n, 16):
                mask = torch.arange(start, min(start + 16, len(k))) <= torch.arange(first, first + n)[:, None]
                one = step(alpha_total=rescale_total, alpha_acc=rescale_acc)
                state = one(state, tile, k[start : start + 16], v[start : start + 16], scale, mask)
            rows.append(state[2] / state[1][:, None])
        return torch.cat(rows)

    return run


def gives(problem, rescale_total, rescale_acc):
    """Whether the kernel's output is that of this slip."""
    wrong = by_tiles(rescale_total, rescale_acc)(*problem)

    def when(got, expected, case):
        return (
            isinstance(got, tuple) and torch.is_tensor(got[0]) and torch.allclose(got[0], wrong, rtol=1e-4, atol=1e-5)
        )

    return when


@register("08.kernel", points=3, title="Debug it: right up to 16 tokens", given=GIVEN, limit_s=120)
def kernel(rng):
    for length, dim in ((16, 16), (5, 32), (17, 16), (64, 32), (100, 16), (161, 64)):
        scale = rng.choice([0.3, 0.6])
        q, k, v = rng.tensor(length, dim, scale=2.0), rng.tensor(length, dim), rng.tensor(length, dim)
        high = length == 100
        if high:
            lift(q, k, 110.0, scale)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        _, total, acc = state_of(q, k, v, scale, seen)
        problem = q, k, v, scale
        hints = [
            Hint(
                "alpha is still 1 in the second round: m has moved when it is taken",
                when=gives(problem, False, False),
            ),
            Hint("the old total is not rescaled", when=gives(problem, False, True)),
            Hint("the old acc is not rescaled", when=gives(problem, True, False)),
            Hint(
                "nan: -inf - -inf, take alpha from the old and the new maximum; or exp without its maximum",
                when=has_nan,
            ),
        ]
        if length <= 16:
            right = "short prompts were right as given: the mask, the scale and the loop's end need no change"
            hints.append(Hint(right, when=lambda got, expected, case: isinstance(got, tuple)))
        yield Drive(
            launched(q, k, v, scale),
            ((acc / total[:, None]).float(), "nothing else written"),
            f"kernel on {length} tokens of dim {dim}: (output, what it wrote)",
            rtol=1e-3 if torch.cuda.is_available() or high else 1e-4,  # a float32 near 110 is worth 1e-5 more or less
            atol=2e-2 if torch.cuda.is_available() else 1e-4 if high else 1e-5,
            hints=hints,
        )


# 5

N, SCORES = 8192, 32 * 8192 * 8192 * 2
ENDS = 32 * 8192 * 128 * 2
PAIRS = sum(i + 1 for i in range(N))
FIGURES = {  # key: expected, relative tolerance, {what a slip gives: its name}
    "score_bytes": (
        SCORES,
        0.03,
        {
            SCORES / 32: "that is one head: there are 32",
            SCORES / 2: "16 bits are 2 bytes",
            SCORES * 2: "16 bits are 2 bytes",
            SCORES / 1e9: "in bytes, not GB",
        },
    ),
    "naive_seconds": (
        (4 * SCORES + 4 * ENDS) / 3.35e12,
        0.01,
        {
            SCORES / 3.35e12: "the scores pass four times: written, read, written, read",
            (SCORES + 4 * ENDS) / 3.35e12: "the scores pass four times: written, read, written, read",
            (2 * SCORES + 4 * ENDS) / 3.35e12: "the scores pass four times: written, read, written, read",
            4 * SCORES / 3.35e12: "q, k, v and the output are missing",
            4 * ENDS / 3.35e12: "the scores are missing",
            (4 * SCORES + 4 * ENDS) / 3.35e9: "in seconds, not milliseconds",
        },
    ),
    "flash_seconds": (
        32 * PAIRS * 512 / 989e12,
        0.03,
        {
            32 * N * N * 512 / 989e12: "the pairs above the diagonal are never looked at",
            32 * PAIRS * 256 / 989e12: "two products, and a multiplication and an addition each: 4 x dim a pair",
            32 * PAIRS * 128 / 989e12: "two products, and a multiplication and an addition each: 4 x dim a pair",
            PAIRS * 512 / 989e12: "that is one head: there are 32",
            32 * PAIRS * 512 / 989e9: "in seconds, not milliseconds",
            32 * PAIRS * 512 / 3.35e12: "FLOPs are divided by FLOP/s, not by bytes per second",
        },
    ),
    "blocks": (
        64 * 65 // 2,
        0.0,
        {
            4096: "nothing is skipped in that",
            2048: "the diagonal's blocks are visited too: 1 + 2 + ... + 64",
            2016: "the diagonal's blocks are visited too: 1 + 2 + ... + 64",
            2080 * 32: "one head, not all",
        },
    ),
}


@register("08.attention_costs", points=2, title="Estimate it: bytes, FLOPs, blocks")
def attention_costs(rng):
    yield from estimates("attention_costs", FIGURES)
