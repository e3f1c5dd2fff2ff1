"""Checks of exercise 03. Oracles: a decoder on the meta device, whose tensors are counted; packing group by group;
adding requests one at a time; a search over lengths; exact fractions.
"""

from fractions import Fraction
from functools import lru_cache
from itertools import product

from minillm.lab.check import Case, Hint, Value, register
from minillm.lab.compare import as_number, mismatch
from minillm.model.config import ModelConfig
from minillm.model.shapes import known_shape


def is_float(got, expected, case):
    return isinstance(got, float) and isinstance(expected, int)


def whole(got, expected):
    """Bytes, blocks and tokens are compared exactly, and 57.0 is not 57: floats lose the digits of real sizes."""
    if expected is not None and isinstance(as_number(got), float):
        return f"expected the integer {expected}, got the float {got!r}"
    return mismatch(got, expected)


FLOAT = Hint("bytes, blocks and tokens are integers: use // and integer factors", when=is_float)


# 1. weight_bytes


@lru_cache
def counted_bytes(config: ModelConfig, bytes_per_weight: int) -> int:
    """Build the decoder without storage and count its tensors; a tied head is one tensor with two names."""
    import torch

    from minillm.model.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(config)
    return sum(p.numel() for p in model.parameters()) * bytes_per_weight


def slip_weights(**slip):
    """weight_bytes with one mistake in it."""

    def wrong(config, bytes_per_weight=2):
        hidden, dim = config.hidden_size, config.head_dim
        q = hidden if slip.get("q_hidden") else config.num_heads * dim
        kv = (config.num_heads if slip.get("mha") else config.num_kv_heads) * dim
        bias = 0 if slip.get("no_bias") else config.qkv_bias
        layer = (q + (1 if slip.get("k_only") else 2) * kv) * (hidden + bias) + hidden * q
        gated = config.gated_mlp or slip.get("always_gated")
        gated = gated and not slip.get("never_gated")
        layer += (3 if gated else 2) * hidden * config.intermediate_size
        layer += 0 if slip.get("no_norms") else 2 * hidden
        tied = (config.tie_embeddings or slip.get("always_tied")) and not slip.get("never_tied")
        total = (1 if tied else 2) * config.vocab_size * hidden + config.num_layers * layer
        total += 0 if slip.get("no_norms") or slip.get("no_last_norm") else hidden
        return total * (1 if slip.get("elements") else 2 if slip.get("two_bytes") else bytes_per_weight)

    return wrong


@register(
    "03.weight_bytes",
    points=2,
    title="What a model weighs",
    hints=[
        FLOAT,
        Hint("a tied head is the embedding: it has no tensor of its own", wrong=slip_weights(never_tied=True)),
        Hint("an untied head is a second [vocab, hidden] table", wrong=slip_weights(always_tied=True)),
        Hint("k and v have num_kv_heads heads, not num_heads", wrong=slip_weights(mha=True)),
        Hint("k and v: one of the two is missing", wrong=slip_weights(k_only=True)),
        Hint("q has heads x head_dim rows, which need not be hidden", wrong=slip_weights(q_hidden=True)),
        Hint("the biases of q, k and v are missing where qkv_bias is set", wrong=slip_weights(no_bias=True)),
        Hint("without a gate the MLP has two matrices", wrong=slip_weights(always_gated=True)),
        Hint("a gated MLP has three matrices: gate, up and down", wrong=slip_weights(never_gated=True)),
        Hint("the norm after the last layer is missing", wrong=slip_weights(no_last_norm=True)),
        Hint("the norms are missing: 2 vectors a layer, and one at the end", wrong=slip_weights(no_norms=True)),
        Hint("that is the number of weights: multiply by bytes_per_weight", wrong=slip_weights(elements=True)),
        Hint("bytes_per_weight is ignored: this is right for 2 bytes only", wrong=slip_weights(two_bytes=True)),
    ],
)
def weight_bytes(rng):
    for name, weights in (  # as counted in the published checkpoints
        ("llama-2-7b", 6_738_415_616),
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.1-8b", 8_030_261_248),
    ):
        yield Case((known_shape(name),), 2 * weights, compare=whole)
    for tied, gated, bias in product((False, True), repeat=3):
        kv_heads = rng.randint(1, 3)
        config = ModelConfig(
            vocab_size=rng.randint(50, 900),
            hidden_size=rng.randint(8, 90),
            intermediate_size=rng.randint(8, 200),
            num_layers=rng.randint(1, 5),
            num_heads=kv_heads * rng.randint(2, 4),
            num_kv_heads=kv_heads,
            head_dim=2 * rng.randint(2, 20),
            max_length=64,
            tie_embeddings=tied,
            gated_mlp=gated,
            qkv_bias=bias,
        )
        size = rng.choice((1, 4, 8))
        yield Case((config, size), counted_bytes(config, size), compare=whole)


# 2. quantized_bytes


def packed_bytes(shapes, bits, group, asymmetric=False) -> int:
    """Pack one row group by group, in a string of bits, as a packer would."""
    total = 0
    for rows, columns in shapes:
        stored, scales = "", 0
        for start in range(0, columns, group):
            stored += "0" * (bits * len(range(start, min(start + group, columns))))
            scales += 1
        codes = len([stored[i : i + 8] for i in range(0, len(stored), 8)])
        total += rows * (codes + scales * (2 + 2 * bool(asymmetric)))
    return total


def up(a, b):
    return (a + b - 1) // b


def slip_packed(codes, groups, each=lambda asymmetric: 4 if asymmetric else 2):
    def wrong(shapes, bits, group, asymmetric=False):
        return sum(r * (codes(c * bits, 8) + groups(c, group) * each(asymmetric)) for r, c in shapes)

    return wrong


def down(a, b):
    return a // b


def byte_a_code(shapes, bits, group, asymmetric=False):
    return sum(r * (c + up(c, group) * (4 if asymmetric else 2)) for r, c in shapes)


def whole_matrix(shapes, bits, group, asymmetric=False):
    return sum(up(r * c * bits, 8) + up(r * c, group) * (4 if asymmetric else 2) for r, c in shapes)


@register(
    "03.quantized_bytes",
    points=2,
    title="What 4 bits really cost",
    hints=[
        FLOAT,
        Hint("the scales (and zero points) are missing", wrong=slip_packed(up, up, lambda asymmetric: 0)),
        Hint("asymmetric groups store a zero point as well", wrong=slip_packed(up, up, lambda asymmetric: 2)),
        Hint("only asymmetric groups store a zero point", wrong=slip_packed(up, up, lambda asymmetric: 4)),
        Hint("a scale is 2 bytes, not 4", wrong=slip_packed(up, up, lambda a: 8 if a else 4)),
        Hint("a shorter last group needs a scale too: round the groups up", wrong=slip_packed(up, down)),
        Hint("a row takes whole bytes: round the bytes of its codes up", wrong=slip_packed(down, up)),
        Hint("rows round up: the bytes of codes and the groups of each row", wrong=slip_packed(down, down)),
        Hint("each row is packed and grouped by itself, not the matrix as a whole", wrong=whole_matrix),
        Hint("a code takes `bits` bits, not a whole byte", wrong=byte_a_code),
    ],
)
def quantized_bytes(rng):
    yield Case(([(1, 128)], 4, 128), 66, compare=whole)
    yield Case(([], 4, 128), 0, compare=whole)
    yield Case(([(3, 5)], 4, 2, True), packed_bytes([(3, 5)], 4, 2, True), compare=whole)
    yield Case(([(6, 256), (2, 64)], 4, 64, True), packed_bytes([(6, 256), (2, 64)], 4, 64, True), compare=whole)
    yield Case(([(7, 63)], 8, 9999), packed_bytes([(7, 63)], 8, 9999), compare=whole)
    yield Case(([(2, 600)], 4, 256), packed_bytes([(2, 600)], 4, 256), compare=whole)
    yield Case(([(5, 50)], 3, 7), packed_bytes([(5, 50)], 3, 7), compare=whole)  # a group does not end at a byte
    for _ in range(6):
        shapes = [(rng.randint(1, 40), rng.randint(1, 300)) for _ in range(rng.randint(1, 4))]
        args = (shapes, rng.choice((2, 3, 4, 5, 8)), rng.choice((1, 7, 32, 48, 128)), rng.random() < 0.5)
        yield Case(args, packed_bytes(*args), compare=whole)


# 3. largest_batch


def add_one_by_one(budget, weights, kv_per_token, length, per_request=0, block=1) -> int:
    """Admit requests until the next one would not fit."""
    used, batch = weights, 0
    while True:
        held = 0
        while held < length:
            held += block
        used += held * kv_per_token + per_request
        if used > budget:
            return batch
        batch += 1


def slip_batch(round_up=True, rows=True, strict=False, weights_in=True, clamp=True, nearest=False, add=0):
    def wrong(budget, weights, kv_per_token, length, per_request=0, block=1):
        held = up(length, block) * block if round_up else length
        each = held * kv_per_token + (per_request if rows else 0)
        left = budget - (weights if weights_in else 0)
        count = (left - strict) // each if not nearest else round(left / each)
        return max(0, count + add) if clamp else count + add

    return wrong


def round_down(budget, weights, kv_per_token, length, per_request=0, block=1):
    return max(0, budget - weights) // (length // block * block * kv_per_token + per_request)


def by_float(budget, weights, kv_per_token, length, per_request=0, block=1):
    return max(0, int((budget - weights) / (up(length, block) * block * kv_per_token + per_request)))


def once(budget, weights, kv_per_token, length, per_request=0, block=1):
    return max(0, budget - weights - per_request) // (up(length, block) * block * kv_per_token)


@register(
    "03.largest_batch",
    points=2,
    title="The largest batch that fits",
    hints=[
        FLOAT,
        Hint("negative: where the weights do not fit, the answer is 0 requests", wrong=slip_batch(clamp=False)),
        Hint("a request holds whole blocks: round its length up", wrong=slip_batch(round_up=False)),
        Hint("round the length up to whole blocks, not down", wrong=round_down),
        Hint("per_request is ignored", wrong=slip_batch(rows=False)),
        Hint("per_request is needed by each request, not once", wrong=once),
        Hint("a budget that is full to the last byte is legal: `<=`, not `<`", wrong=slip_batch(strict=True)),
        Hint("the weights come out of the budget first", wrong=slip_batch(weights_in=False)),
        Hint("a float has 53 bits: int(a / b) is off at large sizes where a // b is exact", wrong=by_float),
        Hint("a request that fits in part does not fit: round down", wrong=slip_batch(nearest=True)),
        Hint("one request too many", wrong=slip_batch(add=1)),
    ],
)
def largest_batch(rng):
    yield Case((1000, 400, 10, 15), 4, compare=whole)
    yield Case((1000, 400, 10, 15), 3, {"block": 16}, compare=whole)
    yield Case((1000, 1000, 10, 15), 0, compare=whole)
    yield Case((1000, 5000, 10, 15, 7, 16), 0, compare=whole)
    for _ in range(4):  # exactly full, one byte short, one byte over
        kv, length, rows, block = rng.randint(2, 40), rng.randint(1, 90), rng.randint(0, 300), rng.choice((1, 16, 32))
        each = up(length, block) * block * kv + rows
        count, weights = rng.randint(2, 30), rng.randint(1, 9999)
        for budget in (weights + count * each, weights + count * each - 1, weights + count * each + each // 2 + 1):
            args = (budget, weights, kv, length, rows, block)
            yield Case(args, add_one_by_one(*args), compare=whole)
    yield Case((9 * 10**17 + 10, 3, 1, 1), 9 * 10**17 + 7, compare=whole)


# 4. crossover


def searched(weights, kv_per_token_layer, windows, batch=1):
    """Double the length until KV is larger, then halve the interval; the sum over layers is taken each time."""

    def larger(n):
        tokens = 0
        for window in windows:
            tokens += n if window is None else min(n, window)
        return tokens * kv_per_token_layer * batch > weights

    if all(w is not None for w in windows) and not larger(max(windows)):
        return None
    low, high = 0, 1  # larger(low) is false
    while not larger(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if larger(middle) else (middle, high)
    return high


def slip_crossover(windows_out=False, batch_in=True, layers_in=True, equal=False, last=False, ignore=False):
    def wrong(weights, kv_per_token_layer, windows, batch=1):
        if ignore:
            windows = [None] * len(windows)
        if windows_out:
            windows = [w for w in windows if w is None]
            if not windows:
                return None
        windows = windows if layers_in else windows[:1]
        found = searched(weights - equal, kv_per_token_layer, windows, batch if batch_in else 1)
        return None if found is None else found - last

    return wrong


def ceiling(weights, kv_per_token_layer, windows, batch=1):
    found = searched(weights, kv_per_token_layer, windows, batch)
    each = kv_per_token_layer * len(windows) * batch
    return up(weights, each) if all(w is None for w in windows) else found


@register(
    "03.crossover",
    points=3,
    title="When the cache passes the weights",
    limit_s=3.0,
    hints=[
        FLOAT,
        Hint("more, not equal: the cache must be strictly larger", wrong=slip_crossover(equal=True)),
        Hint("more, not equal: floor + 1, not the ceiling", wrong=ceiling),
        Hint("that is the last length at which it is not larger: one more", wrong=slip_crossover(last=True)),
        Hint("a layer with a window holds at most its window; they are ignored", wrong=slip_crossover(ignore=True)),
        Hint("layers with a window still hold their last w tokens", wrong=slip_crossover(windows_out=True)),
        Hint("each request has its own cache: batch is ignored", wrong=slip_crossover(batch_in=False)),
        Hint("every layer stores the token, not only one", wrong=slip_crossover(layers_in=False)),
        Hint(
            "where every layer has a window, the cache may never pass the weights: return None",
            when=lambda got, expected, case: expected is None,
        ),
        Hint(
            "there is a length: a layer without a window grows without end, and small windows may be enough",
            when=lambda got, expected, case: got is None,
        ),
    ],
)
def crossover(rng):
    yield Case((1000, 10, [None, None]), 51, compare=whole)
    yield Case((1000, 10, [None, 20]), 81, compare=whole)
    yield Case((1000, 10, [20]), None, compare=whole)
    yield Case((1000, 10, [20, 80]), None, compare=whole)  # 100 tokens at the most: equal, not more
    yield Case((1000, 10, [20, 81]), 81, compare=whole)
    yield Case((1000, 10, [50, 50, 7]), 47, compare=whole)
    for _ in range(4):
        layers, each, batch = rng.randint(1, 12), rng.randint(1, 99), rng.randint(2, 9)
        weights = layers * each * batch * rng.randint(5, 500) + rng.choice((0, 0, 1, 5))
        args = (weights, each, [None] * layers, batch)
        yield Case(args, searched(*args), compare=whole)
    for _ in range(8):
        layers, each, batch = rng.randint(2, 12), rng.randint(1, 99), rng.randint(1, 9)
        windows = [rng.choice((None, rng.randint(1, 200), 64)) for _ in range(layers)]
        weights = layers * each * batch * rng.randint(1, 250) + rng.choice((0, 1, 5))
        args = (weights, each, windows, batch)
        yield Case(args, searched(*args), compare=whole)
    gemma = (18_483_411_968, 8192, [4096, None] * 21, 1)
    yield Case(gemma, searched(*gemma), compare=whole)
    for batch in (1, 100):
        args = (16_060_522_496, 4096, [None] * 32, batch)
        yield Case(args, searched(*args), compare=whole)
    long = (16_060_522_496, 64, [None] * 32, 1)
    yield Case(long, searched(*long), compare=whole)


# 5. plan_blocks


def given(total, weights, activations, utilisation, config, block_size=16, kv_bytes=2):
    available = (total - weights - activations) * utilisation
    per_token = 2 * config.num_layers * config.num_heads * config.head_dim * kv_bytes
    return max(0, round(available / (per_token * block_size)))


def exact_blocks(total, weights, activations, utilisation, config, block_size=16, kv_bytes=2, **bug) -> int:
    """In fractions, block by block of bytes; with bugs of the given code left in where they are named."""
    share = Fraction(utilisation).limit_denominator(1000)
    left = Fraction(total) * share - weights - activations
    if bug.get("fraction"):
        left = (total - weights - activations) * share
    heads = config.num_heads if bug.get("heads") else config.num_kv_heads
    block = Fraction(kv_bytes) * 2 * config.num_layers * heads * config.head_dim * block_size
    count = left / block
    return max(0, round(count) if bug.get("nearest") else count.numerator // count.denominator)


BUGS = {
    "heads": "it still counts query heads: only KV heads store keys and values",
    "fraction": "the fraction is still taken of what is left: it is a share of the card's total memory",
    "nearest": "it still rounds to the nearest: a block that fits in part does not fit",
}


def still(*names):
    def wrong(*args, **kwargs):
        return exact_blocks(*args, **kwargs, **dict.fromkeys(names, True))

    return Hint("; ".join(BUGS[name] for name in names), wrong=wrong)


@register(
    "03.plan_blocks",
    points=3,
    title="Debug it: the planner",
    given=given,
    hints=[
        FLOAT,
        *(still(name) for name in BUGS),
        still("heads", "fraction"),
        still("heads", "nearest"),
        still("fraction", "nearest"),
        still("heads", "fraction", "nearest"),
        Hint(
            "where weights and activations do not fit in the share, the answer is 0, not a negative number",
            when=lambda got, expected, case: expected == 0 and isinstance(got, int) and got < 0,
        ),
        Hint("activations are ignored", wrong=lambda t, w, a, *rest, **kw: exact_blocks(t, w, 0, *rest, **kw)),
        Hint(
            "rounded up: the last block fits only in part",
            when=lambda got, expected, case: expected and got == expected + 1,
        ),
    ],
)
def plan_blocks(rng):
    eight = known_shape("llama-3.1-8b")
    yield Case((80 * 10**9, 16_060_522_496, 2 * 10**9, 0.9, eight), 25_720, compare=whole)
    yield Case((24 * 10**9, 16_060_522_496, 6 * 10**9, 0.9, eight), 0, compare=whole)
    yield Case((16 * 10**9, 16_060_522_496, 10**9, 1.0, eight), 0, compare=whole)
    for _ in range(9):
        kv_heads = rng.randint(1, 8)
        config = ModelConfig(
            vocab_size=100,
            hidden_size=rng.choice((96, 200)),
            intermediate_size=64,
            num_layers=rng.randint(1, 40),
            num_heads=kv_heads * rng.choice((2, 4, 8)),
            num_kv_heads=kv_heads,
            head_dim=rng.choice((32, 64, 128)),
            max_length=64,
        )
        size, kv_bytes = rng.choice((8, 16, 32)), rng.choice((1, 2, 4))
        block = 2 * config.num_layers * kv_heads * config.head_dim * size * kv_bytes
        used = rng.choice((0.5, 0.75, 0.85, 0.9))
        weights, activations = rng.randint(1, 400) * block, rng.randint(2, 9) * block
        # The share holds `count` blocks and 3/4, 1/4 or exactly nothing of another.
        count, part = rng.randint(20, 900), rng.choice((0.75, 0.75, 0.25, 0.0)) if used in (0.5, 0.75) else 0.75
        needed = weights + activations + round((count + part) * block)
        total = round(needed / Fraction(used).limit_denominator(100))
        args = (total, weights, activations, used, config, size, kv_bytes)
        yield Case(args, exact_blocks(*args), compare=whole)


# 6. estimate_70b


@register("03.estimate_70b", title="Estimate it: 70B for 32 users")
def estimate_70b(rng):
    weights, tokens = 2 * 70.55e9, 32 * 32768
    kv = sum(2 * 8 * 128 * 2 for _ in range(80)) * tokens
    both = (weights + kv) / 1e9
    yield Value(
        both,
        rtol=0.03,
        what="weights and KV, GB",
        hints=[
            Hint("that is GiB; GB are asked for", wrong=both * 1e9 / 2**30),
            Hint("the weights are missing", wrong=kv / 1e9),
            Hint("the KV cache is missing", wrong=weights / 1e9),
            Hint("K without V: the factor 2 is missing", wrong=(weights + kv / 2) / 1e9),
            Hint("only the 8 KV heads store keys and values, not the 64 query heads", wrong=(weights + 8 * kv) / 1e9),
            Hint("16 bits are 2 bytes: the weights were counted at 4", wrong=(2 * weights + kv) / 1e9),
            Hint("16 bits are 2 bytes: the weights were counted at 1", wrong=(weights / 2 + kv) / 1e9),
            Hint("32 users: that is the KV of one", wrong=(weights + kv / 32) / 1e9),
            Hint("in bytes; GB are asked for", wrong=both * 1e9),
        ],
    )
