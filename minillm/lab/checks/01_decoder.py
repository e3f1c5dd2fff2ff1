"""Checks of exercise 01. Oracles are float64 loops and closed forms, none of them the library's own modules."""

import math

import torch

from minillm.lab.cases import Rng
from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.compare import mismatch
from minillm.model.rope import cos_sin, rotate

# 1. RMSNorm


def _norm(x, weight, eps, *, axis=-1, center=False, outside=False, total=False, gain=True, wide=torch.float64):
    """RMSNorm in `wide`; the keywords make one mistake each."""
    w = x.to(wide)
    if center:
        w = w - w.mean(axis, keepdim=True)
    square = w.square()
    mean = square.sum(axis, keepdim=True) if total else square.mean(axis, keepdim=True)
    scaled = w / (mean.sqrt() + eps) if outside else w / (mean + eps).sqrt()
    return (scaled * weight.to(wide) if gain else scaled).to(x.dtype)


def _slip(**slip):
    return lambda x, weight, eps: _norm(x, weight, eps, **slip)


@register(
    "01.rms_norm",
    points=1,
    title="RMSNorm",
    hints=[
        Hint(
            "return the dtype of x, whatever it was computed in",
            when=lambda got, expected, case: isinstance(got, torch.Tensor) and got.dtype != expected.dtype,
        ),
        Hint("the mean is subtracted: that is LayerNorm; RMSNorm only divides", wrong=_slip(center=True)),
        Hint("eps belongs under the root, added to the mean of squares", wrong=_slip(outside=True)),
        Hint("eps is not used", wrong=lambda x, weight, eps: _norm(x, weight, 0.0)),
        Hint("the mean of squares is wanted, not their sum", wrong=_slip(total=True)),
        Hint("the gain `weight` is not used", wrong=_slip(gain=False)),
        Hint("normalise over the last axis, each vector by itself", wrong=_slip(axis=0)),
        Hint("one mean over the whole tensor: each vector has its own", wrong=_slip(axis=None)),
        Hint(
            "the squares overflow in half precision: compute in float32, return x's dtype",
            when=lambda got, expected, case: (
                expected.dtype == torch.float16
                and isinstance(got, torch.Tensor)
                and got.shape == expected.shape
                and (got.isnan().any() or got.isinf().any() or (got == 0).all(-1).any())
            ),
        ),
    ],
)
def rms_norm(rng):
    shapes = [(4, 16), (2, 3, 32), (7,), (1, 5, 1, 24), (16, 16), (3, 1501)]
    for shape, scale, eps in zip(shapes, (1.0, 0.05, 2.0, 1e-3, 1.0, 1.0), (1e-5, 1e-2, 1e-5, 1e-4, 0.3, 1e-5)):
        x, weight = rng.tensor(*shape, scale=scale) + 0.7 * scale, rng.tensor(shape[-1])
        yield Case((x, weight, eps), _norm(x, weight, eps), dtype=torch.float32)
    x = torch.cat((torch.zeros(1, 8), rng.tensor(1, 8)))  # a row of zeros stays zeros
    yield Case((x, torch.ones(8), 1e-6), _norm(x, torch.ones(8), 1e-6), dtype=torch.float32)
    for dtype, scale, rtol in ((torch.float16, 900.0, 4e-3), (torch.bfloat16, 3.0, 2e-2)):
        x, weight = rng.tensor(3, 64, scale=scale, dtype=dtype), rng.tensor(64, dtype=dtype)
        yield Case((x, weight, 1e-5), _norm(x, weight, 1e-5), dtype=dtype, rtol=rtol, atol=rtol)


# 2. Rotary positions

SPLIT, JOINT = "channels i and i + dim/2", "channels 2i and 2i + 1"


def _turn(x, positions, theta, layout=SPLIT, *, sign=1, step=2, mixed=False, axis=0, power=-1):
    """RoPE in float64, in either layout; the keywords make one mistake each."""
    dim = x.shape[-1]
    w = x.double()
    frequency = theta ** (power * torch.arange(dim // 2).double() * step / dim)  # [dim / 2]
    angle = positions.double().unsqueeze(-1) * frequency  # [time, dim / 2]
    angle = angle.unsqueeze(1 - axis)  # the axis of the heads
    cos, sin = angle.cos(), sign * angle.sin()
    if mixed:  # pairs in one layout, angles in the other
        other = (lambda t: t.repeat_interleave(2, -1)) if layout == SPLIT else (lambda t: torch.cat((t, t), -1))
        cos, sin = other(cos), other(sin)
        if layout == SPLIT:
            a, b = w.chunk(2, -1)
            crossed = torch.cat((-b, a), -1)
        else:
            crossed = torch.stack((-w[..., 1::2], w[..., ::2]), -1).flatten(-2)
        return (w * cos + crossed * sin).to(x.dtype)
    a, b = w.chunk(2, -1) if layout == SPLIT else (w[..., ::2], w[..., 1::2])
    one, two = a * cos - b * sin, a * sin + b * cos
    joined = torch.cat((one, two), -1) if layout == SPLIT else torch.stack((one, two), -1).flatten(-2)
    return joined.to(x.dtype)


def _either(rtol):
    """Compare with both layouts; expected is (split, joint)."""

    def compare(got, expected):
        found = [mismatch(got, e, rtol, rtol, e.dtype) for e in expected]
        return None if None in found else f"in the layout {SPLIT}: {found[0]}"

    return compare


def _both(text, **slip):
    return [Hint(text, wrong=lambda x, p, theta, at=at: _turn(x, p, theta, at, **slip)) for at in (SPLIT, JOINT)]


def _ignoring(x, positions, theta, layout):
    return _turn(x, torch.arange(len(positions)), theta, layout)


@register(
    "01.rope",
    points=2,
    title="Rotary positions",
    hints=[
        Hint(
            "return the dtype of x, whatever the angles were computed in",
            when=lambda got, expected, case: (
                isinstance(got, torch.Tensor) and case.args and got.dtype != case.args[0].dtype
            ),
        ),
        *_both("turned the wrong way round: (a, b) becomes (a cos - b sin, a sin + b cos)", sign=-1),
        *_both("the exponent is 2i / dim for pair i, from 0 to just under 1", step=1),
        *_both("the frequencies grow: the exponent of theta is negative", power=1),
        *_both("pairs follow one layout and angles the other", mixed=True),
        *[
            Hint("the positions are not used: they need not be 0, 1, 2, ...", wrong=w)
            for w in (
                lambda x, p, theta: _ignoring(x, p, theta, SPLIT),
                lambda x, p, theta: _ignoring(x, p, theta, JOINT),
            )
        ],
        *[
            Hint("theta is not used", wrong=w)
            for w in (
                lambda x, p, theta: _turn(x, p, 1e4, SPLIT),
                lambda x, p, theta: _turn(x, p, 1e4, JOINT),
            )
        ],
        Hint("x is returned as it came", wrong=lambda x, p, theta: x),
        Hint(
            "compute the angles in float32 and return x's dtype: bfloat16 has no exact number for large positions",
            when=lambda got, expected, case: case.args and case.args[0].dtype == torch.bfloat16,
        ),
    ],
)
def rope(rng):
    for time, heads, dim, theta, high in (
        (1, 1, 2, 10000.0, 9),
        (5, 2, 8, 10000.0, 50),
        (6, 6, 16, 500.0, 2000),
        (9, 3, 32, 500000.0, 6000),
    ):
        x, positions = rng.tensor(time, heads, dim), rng.ints(high, time) + 1
        expected = tuple(_turn(x, positions, theta, layout) for layout in (SPLIT, JOINT))
        yield Case((x, positions, theta), expected, rtol=2e-3, atol=2e-3, compare=_either(2e-3))
    x = rng.tensor(4, 2, 16)
    rising = torch.arange(4)
    expected = tuple(_turn(x, rising, 1e4, layout) for layout in (SPLIT, JOINT))
    yield Case((x, rising, 1e4), expected, compare=_either(1e-4))

    q, k = rng.tensor(6, 2, 32), rng.tensor(6, 2, 32)
    at_q, at_k = torch.arange(6) * 3 + 4, torch.arange(6)

    def moved(answer):  # the same distances, everything 700 tokens later
        near, far = ((answer(q, at_q + s, 1e4) * answer(k, at_k + s, 1e4)).sum(-1) for s in (0, 700))
        return far - near

    yield Drive(moved, torch.zeros(6, 2), "q·k at equal distances, 700 tokens later, minus q·k before", atol=5e-3)
    yield Drive(
        lambda answer: answer(q, at_q, 1e4).norm(dim=-1), q.norm(dim=-1), "rope(q, ...).norm(dim=-1)", rtol=1e-3
    )
    x, positions = rng.tensor(3, 2, 16, dtype=torch.bfloat16), torch.tensor([4001, 777, 3])
    expected = tuple(_turn(x, positions, 1e4, layout) for layout in (SPLIT, JOINT))
    yield Case((x, positions, 1e4), expected, rtol=2e-2, atol=2e-2, compare=_either(2e-2))


# 3. Grouped-query attention


def _attend(q, k, v, *, tile=False, top_left=False, mask=True, scale=None, strict=False, late=False, over=-1):
    """Attention in float64, a head at a time; the keywords make one mistake each."""
    batch, heads, time, dim = q.shape
    kv_heads, length = k.shape[1:3]
    q, k, v, kind = q.double(), k.double(), v.double(), q.dtype
    out = torch.zeros(batch, heads, time, v.shape[-1], dtype=torch.float64)
    last = torch.arange(time)[:, None] + (0 if top_left else length - time) - int(strict)
    hidden = (torch.arange(length) > last) & mask  # [time, length]
    for h in range(heads):
        at = h % kv_heads if tile else h // (heads // kv_heads)
        scores = q[:, h] @ k[:, at].mT * (dim**-0.5 if scale is None else scale(dim))  # [batch, time, length]
        if late:
            weights = scores.softmax(over).masked_fill(hidden, 0.0)
        else:
            weights = scores.masked_fill(hidden, -math.inf).softmax(over)
        out[:, h] = weights @ v[:, at]
    return out.to(kind)


def _attend_hint(text, **slip):
    return Hint(text, wrong=lambda q, k, v: _attend(q, k, v, **slip))


@register(
    "01.attention",
    points=3,
    title="Grouped-query attention, causal at the bottom right",
    hints=[
        _attend_hint("KV heads are tiled (0 1 0 1); neighbouring query heads share one (0 0 1 1)", tile=True),
        _attend_hint("the mask is aligned to the top left: query i is token length - time + i", top_left=True),
        _attend_hint("no causal mask", mask=False),
        _attend_hint("the scores are not divided by sqrt(dim)", scale=lambda dim: 1.0),
        _attend_hint("the scores are divided by dim, not by its root", scale=lambda dim: 1 / dim),
        _attend_hint("a token must see itself: the mask starts one too early", strict=True),
        _attend_hint("masked after the softmax: the rest no longer sums to 1", late=True),
        _attend_hint("the softmax goes over the keys, the last axis", over=-2),
        Hint(
            "nan: an exp that overflows (use softmax), or a row with nothing to look at",
            when=lambda got, expected, case: isinstance(got, torch.Tensor) and bool(got.isnan().any()),
        ),
    ],
)
def attention(rng):
    for batch, heads, kv_heads, time, length, dim, v_dim, scale in (
        (1, 2, 2, 4, 4, 8, 8, 1.0),
        (2, 4, 2, 5, 5, 8, 8, 1.0),
        (2, 6, 2, 3, 7, 16, 16, 1.0),
        (3, 8, 1, 1, 9, 4, 4, 1.0),
        (1, 8, 4, 2, 6, 8, 12, 1.0),
        (2, 4, 4, 6, 11, 8, 8, 12.0),
        (1, 6, 3, 37, 301, 16, 16, 1.0),
    ):
        q, k = rng.tensor(batch, heads, time, dim, scale=scale), rng.tensor(batch, kv_heads, length, dim, scale=scale)
        v = rng.tensor(batch, kv_heads, length, v_dim)
        yield Case((q, k, v), _attend(q, k, v), rtol=1e-3, atol=1e-4)


# 4. The nucleus


def _nucleus(logits, top_p, *, crossing=True, in_place=True, first_row=False, least=False, raw=False, extra=0):
    """Token by token in Python floats; the keywords make one mistake each."""
    keep = torch.zeros_like(logits, dtype=torch.bool)
    for row, (scores, p) in enumerate(zip(logits.double(), top_p.tolist())):
        p = top_p[0].item() if first_row else p
        chances = (scores if raw else scores.softmax(-1)).tolist()
        order = sorted(range(len(chances)), key=lambda i: chances[i], reverse=not least)
        total, kept = 0.0, 0
        while kept < len(order) and total < p:
            total += chances[order[kept]]
            kept += 1
        kept += extra if crossing or p == 1 else -1
        for place in range(min(kept, len(order))):
            keep[row, order[place] if in_place else place] = True
    return keep


def _nucleus_hint(text, **slip):
    return Hint(text, wrong=lambda logits, top_p: _nucleus(logits, top_p, **slip))


@register(
    "01.nucleus",
    points=2,
    title="The nucleus of top-p",
    hints=[
        _nucleus_hint("the token that crosses top_p was dropped: the set has to reach top_p", crossing=False),
        _nucleus_hint("one token too many: stop at the token that crosses", extra=1),
        _nucleus_hint("the mask is in sorted order: carry it back to the tokens' own places", in_place=False),
        _nucleus_hint("each row has its own top_p", first_row=True),
        _nucleus_hint("sorted the wrong way round: the likeliest come first", least=True),
        _nucleus_hint("these are logits: take the softmax before you add", raw=True),
        Hint("True marks the tokens that stay", wrong=lambda logits, top_p: ~_nucleus(logits, top_p)),
        Hint(
            "every token is kept when top_p is 1, even where a float32 sum reaches 1 early",
            when=lambda got, expected, case: (
                isinstance(got, torch.Tensor)
                and got.shape == expected.shape
                and not got[case.args[1] == 1].bool().all()
            ),
        ),
        Hint(
            "that fixes the number of tokens: it depends on the row",
            when=lambda got, expected, case: (
                isinstance(got, torch.Tensor)
                and got.shape == expected.shape
                and len(got) > 2
                and got.sum(-1).unique().numel() == 1
                and expected.sum(-1).unique().numel() > 1
            ),
        ),
    ],
)
def nucleus(rng):
    for batch, vocab, scale in ((3, 5, 1.0), (3, 12, 1.0), (4, 50, 2.0), (2, 400, 3.0), (2, 300, 0.5)):
        logits = rng.tensor(batch, vocab, scale=scale)
        top_p = torch.tensor([rng.uniform(0.3, 0.99) for _ in range(batch)])
        yield Case((logits, top_p), _nucleus(logits, top_p))
    peaked = rng.tensor(3, 9)
    peaked[:, 4] += 9.0  # the best token alone passes every top_p
    yield Case((peaked, torch.tensor([0.5, 1e-6, 0.9])), _nucleus(peaked, torch.tensor([0.5, 1e-6, 0.9])))
    masked = rng.tensor(2, 8)
    masked[:, 2:5] = -math.inf  # a step before has dropped these
    yield Case((masked, torch.tensor([0.7, 0.95])), _nucleus(masked, torch.tensor([0.7, 0.95])))
    even = rng.tensor(1, 200, scale=0.1)  # so flat that 0.99 and 0.95 keep other numbers
    yield Case((even, torch.tensor([0.99])), _nucleus(even, torch.tensor([0.99])))
    mixed = rng.tensor(4, 3000, scale=4.0)  # rows at 1 beside rows below it
    top_p = torch.tensor([1.0, 0.8, 1.0, 0.95])
    yield Case((mixed, top_p), _nucleus(mixed, top_p) | (top_p == 1)[:, None])
    flat = rng.tensor(2, 6, scale=0.3)
    yield Case((flat, torch.ones(2)), torch.ones(2, 6, dtype=torch.bool))
    large = rng.tensor(2, 5000, scale=4.0)  # a float32 sum reaches 1 before the end
    yield Case((large, torch.ones(2)), torch.ones(2, 5000, dtype=torch.bool))


# 5. Estimate it

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, DIM, FFN, CONTEXT = 151936, 4096, 36, 32, 8, 128, 12288, 8192


def _matrices(kv_heads=KV_HEADS, mlp=3):
    qkv, out = WIDTH * (HEADS + 2 * kv_heads) * DIM, HEADS * DIM * WIDTH
    return LAYERS * (qkv + out + mlp * WIDTH * FFN)


TABLE = VOCAB * WIDTH  # the embedding; the head has as many
SEEN = 4 * LAYERS * HEADS * DIM * CONTEXT  # FLOPs of scores and weighted sums


def _part(key, expected, wrong):
    def read(answer):
        if not isinstance(answer, dict) or key not in answer:
            return f"no {key!r}: estimate must be a dict with parameters, flops and kv_bytes"
        return answer[key]

    hints = [
        Hint(
            text, when=lambda got, e, case, value=value: isinstance(got, int | float) and abs(got / value - 1) < 0.012
        )
        for text, value in wrong
    ]
    return Drive(read, float(expected), f'estimate["{key}"]', rtol=0.02, hints=hints)


@register("01.estimate", points=2, title="Estimate it: another 8B")
def estimate(rng):
    yield _part(
        "parameters",
        _matrices() + 2 * TABLE,
        [
            ("one of embedding and head is missing: they are not tied", _matrices() + TABLE),
            ("embedding and head are missing", _matrices()),
            ("K and V have 8 heads, not 32", _matrices(kv_heads=HEADS) + 2 * TABLE),
            ("a gated MLP has three matrices", _matrices(mlp=2) + 2 * TABLE),
            ("in billions: give the number itself", (_matrices() + 2 * TABLE) / 1e9),
        ],
    )
    yield _part(
        "flops",
        2 * (_matrices() + TABLE) + SEEN,
        [
            ("attention over the 8192 tokens of context is missing", 2 * (_matrices() + TABLE)),
            ("a multiply and an add each: the factor 2 is missing", _matrices() + TABLE + SEEN / 2),
            ("the embedding is looked up, not multiplied", 2 * (_matrices() + 2 * TABLE) + SEEN),
            ("the head scores the vocabulary: its FLOPs are missing", 2 * _matrices() + SEEN),
            ("every query head attends: 32, not 8", 2 * (_matrices() + TABLE) + SEEN / 4),
            ("scores and weighted sum: attention has two products", 2 * (_matrices() + TABLE) + SEEN / 2),
            ("one decode step, not a prefill of 8192 tokens", 8192 * (2 * (_matrices() + TABLE) + SEEN)),
        ],
    )
    kv = 2 * LAYERS * KV_HEADS * DIM * 2
    yield _part(
        "kv_bytes",
        kv,
        [
            ("only KV heads are stored: 8, not 32", 4 * kv),
            ("K and V are two: the factor 2 is missing (or bfloat16 has 2 bytes)", kv / 2),
            ("bfloat16 has 2 bytes, not 4", 2 * kv),
            ("all 36 layers store keys and values", kv / LAYERS),
            ("one token of context, not 8192", kv * CONTEXT),
            ("bytes, not KiB", kv / 1024),
        ],
    )


# 6. Debug it


def given(q, k, v, inverse, chunk):
    """The exercise's own code, bug included."""
    keys, out = [], []
    for start in range(0, len(q), chunk):
        piece = slice(start, start + chunk)
        time = len(q[piece])
        positions = torch.arange(time)
        cos, sin = cos_sin(positions, inverse)  # [time, 1, dim] each
        turned_q = rotate(q[piece, None], cos, sin)[:, 0]  # [time, dim]
        keys.append(rotate(k[piece, None], cos, sin)[:, 0])
        scores = turned_q @ torch.cat(keys).T * q.shape[-1] ** -0.5  # [time, start + time]
        future = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
        out.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[: start + time])
    return torch.cat(out)


def _whole(q, k, v, inverse, chunk, *, at_q=None, at_k=None, top_left=False):
    """All tokens at once in float64; at_q, at_k(positions, chunk): the mistaken places of queries and keys."""
    place = torch.arange(len(q))
    angle_of = [(at(place, chunk) if at else place).double()[:, None] * inverse.double() for at in (at_q, at_k)]
    turned = []
    for x, angle in zip((q.double(), k.double()), angle_of):
        a, b = x.chunk(2, -1)
        turned.append(torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1))
    scores = turned[0] @ turned[1].T * q.shape[-1] ** -0.5  # [length, length]
    last = place % chunk if top_left else place
    return (scores.masked_fill(place > last[:, None], -math.inf).softmax(-1) @ v.double()).to(q.dtype)


def _restarted(place, chunk):
    return place % chunk


def _counted(place, chunk):  # index of the chunk x the length of this piece
    pieces = [place[start : start + chunk] for start in range(0, len(place), chunk)]
    return torch.cat([torch.arange(len(p)) + i * len(p) for i, p in enumerate(pieces)])


def _debug_hint(text, **slip):
    return Hint(text, wrong=lambda q, k, v, inverse, chunk: _whole(q, k, v, inverse, chunk, **slip))


@register(
    "01.chunked_attention",
    points=2,
    title="Debug it: a prompt in chunks",
    given=given,
    hints=[
        _debug_hint("positions restart at 0 in every chunk", at_q=_restarted, at_k=_restarted),
        _debug_hint("the keys know their place now, the queries still restart in every chunk", at_q=_restarted),
        _debug_hint("the queries know their place now, the keys still restart in every chunk", at_k=_restarted),
        _debug_hint(
            "a last, shorter chunk is misplaced: its first token is token `start`", at_q=_counted, at_k=_counted
        ),
        _debug_hint("the mask was right: query i of a chunk sees all earlier chunks", top_left=True),
        _debug_hint("queries and keys disagree by one token", at_q=lambda place, chunk: place + 1),
    ],
)
def chunked_attention(rng: Rng):
    for length, dim, chunk, theta in (
        (6, 8, 6, 1e4),
        (8, 8, 4, 1e4),
        (11, 16, 4, 1e4),
        (7, 4, 1, 100.0),
        (9, 32, 5, 1e4),
        (300, 8, 64, 1e4),  # long enough that positions kept in a byte, or wrapped at a power of two, show
    ):
        q, k = rng.tensor(length, dim, scale=2.0), rng.tensor(length, dim, scale=2.0)
        v, inverse = rng.tensor(length, dim), theta ** -(torch.arange(0, dim, 2) / dim)
        expected = _whole(q, k, v, inverse, chunk)
        yield Case((q, k, v, inverse, chunk), expected, rtol=1e-3, atol=1e-4)
