"""Checks of exercise 00. Oracles: exact fractions; torch's flop_counter on products without storage; tensors on the
meta device, whose bytes are added up; sorting and interpolating by hand.
"""

from fractions import Fraction
from itertools import pairwise

import numpy as np

from minillm.lab.check import Case, Hint, Value, register
from minillm.lab.compare import as_number, mismatch
from minillm.model.config import ModelConfig
from minillm.model.shapes import known_shape

STEP = 1 / 64  # every time is a multiple: sums and differences are exact, so that borders are borders


def trace(rng, tokens, arrival=None):
    """(arrival, token_times): a TTFT and gaps of very different sizes."""
    arrival = rng.randint(64, 2000) * STEP if arrival is None else arrival
    now, times = arrival + rng.randint(10, 400) * STEP, []
    for _ in range(tokens):
        times.append(now)
        now += rng.choice([1, 2, 3, 5, 8, 60]) * STEP
    return arrival, times


def exact_tpot(times):
    """The mean gap as a fraction; None for one token."""
    gaps = [Fraction(b) - Fraction(a) for a, b in pairwise(times)]
    return sum(gaps) / len(gaps) if gaps else None


# 1. latency


def exact_latency(arrival, times):
    gaps = [float(Fraction(times[i + 1]) - Fraction(times[i])) for i in range(len(times) - 1)]
    tpot = exact_tpot(times)
    ttft, e2e = (float(Fraction(t) - Fraction(arrival)) for t in (times[0], times[-1]))
    return {"ttft": ttft, "itl": gaps, "tpot": None if tpot is None else float(tpot), "e2e": e2e}


def key_is(key, slip):
    """Is the value under `key` wrong, and equal to slip(*args)?"""

    def when(got, expected, case):
        if not isinstance(got, dict) or key not in got or not mismatch(got[key], expected[key]):
            return False
        return mismatch(got[key], slip(*case.args)) is None

    return when


def null_tpot(got, case):
    return len(case.args[1]) == 1 and (isinstance(got, ZeroDivisionError) or (bool(got) and got["tpot"] is not None))


def extra_gap(got, case):
    itl = got.get("itl") if isinstance(got, dict) else None
    return isinstance(itl, list) and len(itl) == len(case.args[1])


@register(
    "00.latency",
    title="What one user saw",
    hints=[
        Hint("one token: there is no gap, so tpot is None", when=lambda got, e, c: null_tpot(got, c)),
        Hint(
            "the time to the first token is not a gap: itl has one value less than there are tokens",
            when=lambda got, e, c: extra_gap(got, c),
        ),
        Hint("ttft counts from the arrival, not from time 0", when=key_is("ttft", lambda a, t: t[0])),
        Hint("e2e counts from the arrival, not from time 0", when=key_is("e2e", lambda a, t: t[-1])),
        Hint("e2e starts at the arrival, not at the first token", when=key_is("e2e", lambda a, t: t[-1] - t[0])),
        Hint("n tokens have n - 1 gaps", when=key_is("tpot", lambda a, t: (t[-1] - t[0]) / len(t))),
        Hint("tpot must leave the TTFT out", when=key_is("tpot", lambda a, t: (t[-1] - a) / len(t))),
        Hint("tpot must leave the TTFT out", when=key_is("tpot", lambda a, t: (t[-1] - a) / max(len(t) - 1, 1))),
        Hint("tpot is the mean of the gaps, not their median", when=key_is("tpot", lambda a, t: median_gap(t))),
    ],
)
def latency(rng):
    for tokens in (5, 2, 9, 3, 1, 30):
        arrival, times = trace(rng, tokens)
        yield Case((arrival, times), exact_latency(arrival, times))


def median_gap(times):
    gaps = sorted(b - a for a, b in zip(times, times[1:]))  # noqa: RUF007
    middle = len(gaps) // 2
    return None if not gaps else (gaps[middle] + gaps[-middle - 1]) / 2


# 2. forward_flops


def random_config(rng):
    kv_heads = rng.choice([1, 2, 3])
    sizes = {name: rng.randint(5, 60) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads, dim, tied = kv_heads * rng.choice([2, 4]), rng.choice([4, 6, 10]), rng.random() < 0.5
    return ModelConfig(
        **sizes,
        num_layers=rng.randint(2, 4),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_length=4096,
        tie_embeddings=tied,
    )


def counted(config, new, context=0, batch=1):
    """torch's own count of the products, run on tensors without storage."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    def empty(*shape):
        return torch.empty(shape, device="meta")

    tokens, hidden, ffn, dim = batch * new, config.hidden_size, config.intermediate_size, config.head_dim
    x, heads = empty(tokens, hidden), config.num_heads
    shapes = [heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim, ffn, ffn]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for _ in range(config.num_layers):
            for columns in shapes:
                x @ empty(hidden, columns)
            empty(tokens, heads * dim) @ empty(heads * dim, hidden)
            empty(tokens, ffn) @ empty(ffn, hidden)
            scores = empty(batch * heads, new, dim) @ empty(batch * heads, dim, context + new)
            scores @ empty(batch * heads, context + new, dim)
        x @ empty(hidden, config.vocab_size)
    return counter.get_total_flops()


def slip_flops(**slip):
    """forward_flops with one mistake in it."""

    def wrong(config, new, context=0, batch=1):
        hidden, dim = config.hidden_size, config.head_dim
        q = hidden if slip.get("q_hidden") else config.num_heads * dim
        kv = (config.num_heads if slip.get("mha") else config.num_kv_heads) * dim
        layer = hidden * (q + 2 * kv) + (0 if slip.get("no_out") else q * hidden)
        layer += (2 if slip.get("no_gate") else 3) * hidden * config.intermediate_size
        scored = slip.get("scored", new * batch) if not slip.get("last") else batch
        head = (
            0 if slip.get("no_head") or (slip.get("tied") and config.tie_embeddings) else hidden * config.vocab_size
        )
        length = context if slip.get("old_only") else new if slip.get("no_context") else context + new
        pairs = new * (context * 2 + new + 1) / 2 if slip.get("causal") else new * length
        each = q if slip.get("q_hidden") == "all" else config.num_heads * dim
        each = config.num_kv_heads * dim if slip.get("kv_attention") else each
        each = 0 if slip.get("no_attention") else each * (1 if slip.get("scores_only") else 2)
        attention = each * pairs * batch * (1 if slip.get("one_layer") else config.num_layers)
        table = hidden * config.vocab_size if slip.get("embedding") else 0
        tokens = new if slip.get("no_batch") else new * batch
        if slip.get("no_batch"):
            attention, scored = attention / batch, new
        return round(
            slip.get("factor", 2) * (tokens * (config.num_layers * layer + table) + attention + scored * head)
        )

    return wrong


@register(
    "00.forward_flops",
    points=2,
    title="The FLOPs of a forward pass",
    hints=[
        Hint("a multiply and an add are two FLOPs", wrong=slip_flops(factor=1)),
        Hint("k and v have kv_heads x head_dim columns, not heads x head_dim", wrong=slip_flops(mha=True)),
        Hint("heads x head_dim need not be hidden", wrong=slip_flops(q_hidden="all")),
        Hint("heads x head_dim need not be hidden", wrong=slip_flops(q_hidden="matrices")),
        Hint("the gated MLP has three matrices: gate, up and down", wrong=slip_flops(no_gate=True)),
        Hint("the out projection is missing", wrong=slip_flops(no_out=True)),
        Hint("a tied head has no weights of its own, but its product is done", wrong=slip_flops(tied=True)),
        Hint("the head is missing: every new token is scored", wrong=slip_flops(no_head=True)),
        Hint("here every new token passes the head, not only the last", wrong=slip_flops(last=True)),
        Hint("attention is missing", wrong=slip_flops(no_attention=True)),
        Hint("attention has two products: scores, then values", wrong=slip_flops(scores_only=True)),
        Hint("query heads share keys, but each multiplies with them: num_heads", wrong=slip_flops(kv_attention=True)),
        Hint("new tokens also see the stored ones: context + new", wrong=slip_flops(no_context=True)),
        Hint("new tokens also see each other: context + new", wrong=slip_flops(old_only=True)),
        Hint("count all pairs, also those that the causal mask hides", wrong=slip_flops(causal=True)),
        Hint("every layer attends", wrong=slip_flops(one_layer=True)),
        Hint("looking up an embedding multiplies nothing", wrong=slip_flops(embedding=True)),
        Hint("the batch is missing", wrong=slip_flops(no_batch=True)),
    ],
)
def forward_flops(rng):
    for new, context, batch in ((7, 0, 1), (1, 50, 1), (1, 33, 5), (12, 20, 3), (1, 0, 1)):
        config = random_config(rng)
        yield Case((config, new, context, batch), counted(config, new, context, batch))
    config = random_config(rng)
    yield Case((config, 9), counted(config, 9))
    shape = known_shape("llama-3.1-70b")
    yield Case((shape, 1, 5000, 3), counted(shape, 1, 5000, 3))


# 3. decode_bytes


def read_bytes(config, parameters, contexts, weight_bytes=2, kv_bytes=2):
    """Add up the bytes of tensors without storage."""
    import torch

    types = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}
    total = torch.empty(parameters, dtype=types[weight_bytes], device="meta").nbytes
    for length in contexts:
        for _ in range(config.num_layers):
            k = torch.empty(config.num_kv_heads, length, config.head_dim, dtype=types[kv_bytes], device="meta")
            total += k.nbytes + torch.empty_like(k).nbytes
    return total


def slip_bytes(**slip):
    """decode_bytes with one mistake in it."""

    def wrong(config, parameters, contexts, weight_bytes=2, kv_bytes=2):
        heads = config.num_heads if slip.get("mha") else config.num_kv_heads
        size = weight_bytes if slip.get("one_size") else 2 if slip.get("two") else kv_bytes
        token = (1 if slip.get("k_only") else 2) * config.num_layers * heads * config.head_dim * size
        token = token // config.num_layers if slip.get("one_layer") else token
        stored = sum(contexts)
        if slip.get("first"):
            stored = len(contexts) * contexts[0]
        elif slip.get("longest"):
            stored = len(contexts) * max(contexts)
        elif slip.get("one"):
            stored = contexts[0]
        elif slip.get("plus"):
            stored += len(contexts)
        weights = parameters * (2 if slip.get("two") else weight_bytes)
        weights *= len(contexts) if slip.get("weights_each") else 1
        return weights + (0 if slip.get("no_kv") else token * stored)

    return wrong


def whole(got, expected):
    """Bytes are compared exactly: floats lose the digits of real sizes, so a float must at least be the number."""
    number = as_number(got)
    if isinstance(number, float) and number == expected:
        return None
    return mismatch(got, expected)


@register(
    "00.decode_bytes",
    points=2,
    title="What a decode step reads",
    hints=[
        Hint("the weights are read once a step, whatever the batch", wrong=slip_bytes(weights_each=True)),
        Hint("K and V are both read: a factor 2 in the cache", wrong=slip_bytes(k_only=True)),
        Hint("the cache holds num_kv_heads, not num_heads", wrong=slip_bytes(mha=True)),
        Hint("the KV cache is missing", wrong=slip_bytes(no_kv=True)),
        Hint("every layer has a cache of its own", wrong=slip_bytes(one_layer=True)),
        Hint("each request reads its own context: sum them", wrong=slip_bytes(first=True)),
        Hint("each request reads its own context: no padding to the longest", wrong=slip_bytes(longest=True)),
        Hint("every request of the batch reads its cache, not only the first", wrong=slip_bytes(one=True)),
        Hint("the new token's own K and V were to be left out", wrong=slip_bytes(plus=True)),
        Hint("the cache has a size of its own: kv_bytes", wrong=slip_bytes(one_size=True)),
        Hint("weight_bytes and kv_bytes are arguments, not always 2", wrong=slip_bytes(two=True)),
    ],
)
def decode_bytes(rng):
    for sizes in ((2, 2), (4, 2), (1, 2), (2, 1), (4, 4)):
        contexts = [rng.randint(1, 3000) for _ in range(rng.randint(2, 6))]
        args = (random_config(rng), rng.randint(1000, 10**6), contexts, *sizes)
        yield Case(args, read_bytes(*args), compare=whole)
    config = known_shape("llama-3.1-8b")
    for contexts in ([8192], [1, 5000, 131072]):
        yield Case((config, 8 * 10**9, contexts), read_bytes(config, 8 * 10**9, contexts), compare=whole)


# 4. goodput


def exact_goodput(requests, ttft_limit, tpot_limit):
    good, ends = 0, []
    for arrival, times in requests:
        if times:
            ends.append(Fraction(times[-1]))
            late = Fraction(times[0]) - Fraction(arrival) > Fraction(ttft_limit)
            good += not late and (exact_tpot(times) or 0) <= Fraction(tpot_limit)
    if not ends:
        return 0.0
    return float(good / (max(ends) - min(Fraction(arrival) for arrival, _ in requests)))


def slip_goodput(**slip):
    """goodput with one mistake in it."""

    def wrong(requests, ttft_limit, tpot_limit):
        done = [(a, t) for a, t in requests if t]
        if not done:
            return 0.0

        def ttft(a, t):
            return t[0] - a

        def tpot(t):
            if len(t) == 1:
                return float("inf") if slip.get("one_is_bad") else 0.0
            return (t[-1] - t[0]) / (len(t) - 1)

        def good(a, t):
            if slip.get("strict"):
                return ttft(a, t) < ttft_limit and tpot(t) < tpot_limit
            first, rest = ttft(a, t) <= ttft_limit, tpot(t) <= tpot_limit
            if slip.get("worst_gap"):
                rest = all(y - x <= tpot_limit for x, y in pairwise(t))
            if slip.get("whole_tpot"):
                rest = (t[-1] - a) / len(t) <= tpot_limit
            if slip.get("from_zero"):
                first = t[0] <= ttft_limit
            if slip.get("any"):
                return first or rest
            return (first or bool(slip.get("no_ttft"))) and (rest or bool(slip.get("no_tpot")))

        kept = [(a, t) for a, t in done if good(a, t)]
        arrivals, ends = [a for a, _ in requests], [t[-1] for _, t in done]
        duration = max(ends) - (0 if slip.get("clock_zero") else min(arrivals))
        if slip.get("first_token"):
            duration = max(ends) - min(t[0] for _, t in done)
        if slip.get("last_arrival"):
            duration = max(arrivals) - min(arrivals)
        if slip.get("done_only"):
            duration = max(ends) - min(a for a, _ in done)
        if slip.get("listed"):
            duration = done[-1][1][-1] - requests[0][0]
        if slip.get("sum"):
            duration = sum(t[-1] - a for a, t in done)
        if slip.get("good_span"):
            if not kept:
                return 0.0
            duration = max(t[-1] for _, t in kept) - min(a for a, _ in kept)
        if slip.get("mean"):
            firsts, rests = [ttft(a, t) for a, t in done], [tpot(t) for _, t in done if len(t) > 1]
            fine = sum(firsts) / len(firsts) <= ttft_limit and sum(rests) / max(len(rests), 1) <= tpot_limit
            return len(done) * fine / duration
        if slip.get("all"):
            return len(done) / duration
        if slip.get("tokens"):
            return sum(len(t) for _, t in kept) / duration
        if slip.get("share"):
            return len(kept) / len(requests)
        return len(kept) / duration

    return wrong


@register(
    "00.goodput",
    points=2,
    title="Goodput",
    hints=[
        Hint("that is a share; goodput is good requests per second", wrong=slip_goodput(share=True)),
        Hint("goodput here counts requests, not tokens", wrong=slip_goodput(tokens=True)),
        Hint("every request was counted, good or not", wrong=slip_goodput(all=True)),
        Hint("equal to the limit is good: <=", wrong=slip_goodput(strict=True)),
        Hint("judge each request, not the mean of all", wrong=slip_goodput(mean=True)),
        Hint("a good request meets both targets, not one of them", wrong=slip_goodput(any=True)),
        Hint("the TTFT target is not looked at", wrong=slip_goodput(no_ttft=True)),
        Hint("the TPOT target is not looked at", wrong=slip_goodput(no_tpot=True)),
        Hint("an answer of one token meets any TPOT", wrong=slip_goodput(one_is_bad=True)),
        Hint("TPOT is the mean gap; one long gap may be within it", wrong=slip_goodput(worst_gap=True)),
        Hint("TPOT leaves the TTFT out", wrong=slip_goodput(whole_tpot=True)),
        Hint("TTFT counts from the arrival", wrong=slip_goodput(from_zero=True)),
        Hint("the run starts at the first arrival, not at time 0", wrong=slip_goodput(clock_zero=True)),
        Hint("the run starts at the first arrival, not at the first token", wrong=slip_goodput(first_token=True)),
        Hint("the run ends with the last token, not with the last arrival", wrong=slip_goodput(last_arrival=True)),
        Hint(
            "the run begins with the first arrival, also of a request that failed", wrong=slip_goodput(done_only=True)
        ),
        Hint(
            "requests come in any order: take the smallest arrival, the largest end", wrong=slip_goodput(listed=True)
        ),
        Hint("requests overlap: use the time of the whole run, not the sum of theirs", wrong=slip_goodput(sum=True)),
        Hint("the run lasts as long as all requests, not only the good ones", wrong=slip_goodput(good_span=True)),
        Hint("no token at all: goodput is 0.0", when=lambda got, e, c: not any(t for _, t in c.args[0])),
        Hint("a request without tokens failed: skip it", when=lambda got, e, c: isinstance(got, IndexError)),
    ],
)
def goodput(rng):
    for _ in range(5):
        requests = [trace(rng, rng.choice([1, 2, 3, 6, 9])) for _ in range(12)]
        requests += [(rng.randint(0, 60) * STEP, []), (rng.randint(64, 2000) * STEP, [])]
        rng.shuffle(requests)
        args = (requests, rng.choice([150, 250]) * STEP, rng.choice([4, 12]) * STEP)
        yield Case(args, exact_goodput(*args))
    even = [(3.0, [4.0, 4.25, 4.5]), (2.0, [3.0, 3.25]), (2.5, [3.75, 4.0]), (2.25, [3.25, 3.5, 4.0])]
    yield Case((even, 1.0, 0.25), exact_goodput(even, 1.0, 0.25))
    single = [(1.0, [1.5]), (2.0, [9.0]), (0.5, [])]
    yield Case((single, 1.0, 0.5), exact_goodput(single, 1.0, 0.5))
    yield Case(([(1.0, []), (2.0, [])], 1.0, 0.5), 0.0)


# 5. summarise


def buggy(clients):
    speeds, tpots, p99s = [], [], []
    for client in clients:
        ttfts = []
        for prompt_tokens, arrival, token_times in client:
            e2e = token_times[-1] - arrival
            speeds.append((prompt_tokens + len(token_times)) / e2e)
            tpots.append(e2e / len(token_times))
            ttfts.append(token_times[0] - arrival)
        p99s.append(np.percentile(ttfts, 99))
    return {
        "output_tokens_per_s": sum(speeds),
        "mean_tpot": sum(tpots) / len(tpots),
        "p99_ttft": sum(p99s) / len(p99s),
    }


def flat(clients):
    return [request for client in clients for request in client]


def percentile(values, p):
    """Sort, then interpolate between the two neighbours."""
    values, place = sorted(values), Fraction(p, 100) * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return float(values[low] + (Fraction(values[high]) - Fraction(values[low])) * (place - low))


def mean(values):
    values = list(values)
    return float(sum(map(Fraction, values)) / len(values))


def span(clients):
    return max(t[-1] for _, _, t in flat(clients)) - min(a for _, a, _ in flat(clients))


def exact_summary(clients):
    requests = flat(clients)
    return {
        "output_tokens_per_s": sum(len(t) for _, _, t in requests) / span(clients),
        "mean_tpot": mean(exact_tpot(t) for _, _, t in requests if len(t) > 1),
        "p99_ttft": percentile([t[0] - a for _, a, t in requests], 99),
    }


def client_p99s(clients):
    return [percentile([t[0] - a for _, a, t in client], 99) for client in clients]


def said(key, text, slip):
    return Hint(text, when=key_is(key, slip))


RATE, TPOT, P99 = "output_tokens_per_s", "mean_tpot", "p99_ttft"
SPEEDS = "tokens/s: requests do not all run for the whole time, so their speeds cannot be added; use one duration"
PROMPTS = "tokens/s: prompt tokens are not output"
TTFT_IN = "mean_tpot: the TTFT is still in it"


@register(
    "00.summarise",
    points=3,
    title="Debug it: the benchmark that flatters",
    given=buggy,
    hints=[
        said(RATE, SPEEDS, lambda c: sum((p + len(t)) / (t[-1] - a) for p, a, t in flat(c))),
        said(RATE, SPEEDS, lambda c: sum(len(t) / (t[-1] - a) for _, a, t in flat(c))),
        said(RATE, SPEEDS, lambda c: mean(len(t) / (t[-1] - a) for _, a, t in flat(c))),
        said(RATE, PROMPTS, lambda c: sum(p + len(t) for p, _, t in flat(c)) / span(c)),
        said(
            RATE,
            "tokens/s: requests overlap, so the run is shorter than the sum of their times",
            lambda c: sum(len(t) for _, _, t in flat(c)) / sum(t[-1] - a for _, a, t in flat(c)),
        ),
        said(
            RATE,
            "tokens/s: clients do not start and stop together; use one duration for all of them",
            lambda c: sum(sum(len(t) for _, _, t in one) / span([one]) for one in c),
        ),
        said(
            RATE,
            "tokens/s: the run starts at the first arrival, not at time 0",
            lambda c: sum(len(t) for _, _, t in flat(c)) / max(t[-1] for _, _, t in flat(c)),
        ),
        said(
            RATE,
            "tokens/s: the first token of each request is output too",
            lambda c: sum(len(t) - 1 for _, _, t in flat(c)) / span(c),
        ),
        said(TPOT, TTFT_IN, lambda c: mean((t[-1] - a) / len(t) for _, a, t in flat(c))),
        said(TPOT, TTFT_IN, lambda c: mean((t[-1] - a) / len(t) for _, a, t in flat(c) if len(t) > 1)),
        said(TPOT, TTFT_IN, lambda c: mean((t[-1] - a) / (len(t) - 1) for _, a, t in flat(c) if len(t) > 1)),
        said(
            TPOT,
            "mean_tpot: n tokens have n - 1 gaps",
            lambda c: mean((t[-1] - t[0]) / len(t) for _, _, t in flat(c) if len(t) > 1),
        ),
        said(
            TPOT,
            "mean_tpot: n tokens have n - 1 gaps",
            lambda c: mean((t[-1] - t[0]) / len(t) for _, _, t in flat(c)),
        ),
        said(
            TPOT,
            "mean_tpot: answers of one token have no TPOT and are left out, not counted as 0",
            lambda c: mean(exact_tpot(t) or 0 for _, _, t in flat(c)),
        ),
        said(
            TPOT,
            "mean_tpot: one value a request, then their mean; pooled gaps let long answers weigh more",
            lambda c: sum(t[-1] - t[0] for _, _, t in flat(c)) / sum(len(t) - 1 for _, _, t in flat(c)),
        ),
        said(
            TPOT,
            "mean_tpot: clients have different numbers of requests; take the mean over requests",
            lambda c: mean(mean(exact_tpot(t) for _, _, t in one if len(t) > 1) for one in c),
        ),
        said(P99, "p99_ttft: percentiles of clients cannot be averaged", lambda c: mean(client_p99s(c))),
        said(P99, "p99_ttft: the worst client's P99 is not the P99 of all", lambda c: max(client_p99s(c))),
        said(
            P99,
            "p99_ttft: percentiles cannot be averaged, weighted or not",
            lambda c: sum(p * len(one) for p, one in zip(client_p99s(c), c)) / len(flat(c)),
        ),
        said(P99, "p99_ttft: that is the maximum", lambda c: max(t[0] - a for _, a, t in flat(c))),
        said(P99, "p99_ttft: TTFT counts from the arrival", lambda c: percentile([t[0] for _, _, t in flat(c)], 99)),
        said(P99, "p99_ttft: that is the P99 of e2e", lambda c: percentile([t[-1] - a for _, a, t in flat(c)], 99)),
        Hint("one token: there is no gap to divide by", when=lambda got, e, c: isinstance(got, ZeroDivisionError)),
    ],
)
def summarise(rng):
    for sizes in ((4, 3), (2, 30, 5), (1, 9, 2, 14), (60, 1), (12,)):
        clients = []
        for size in sizes:
            traces = [trace(rng, rng.choice([1, 2, 4, 7, 15]) if i else 6) for i in range(size)]
            clients.append([(rng.randint(1, 90), *one) for one in traces])
        yield Case((clients,), exact_summary(clients))


# 6. estimate


@register("00.estimate", points=2, title="Estimate it: the ceiling of a server")
def estimate(rng):
    weights, token, users, length, bandwidth = 2 * 8.03e9, 2 * 32 * 8 * 128 * 2, 32, 8192, 3.35e12
    cache = token * users * length

    def rate(moved, tokens=users):
        return tokens * bandwidth / moved

    yield Value(
        rate(weights + cache),
        rtol=0.04,
        hints=[
            Hint("the weights are missing", when=lambda got, e, c: abs(as_number(got) / rate(cache) - 1) < 0.01),
            Hint("the KV caches are missing", wrong=rate(weights)),
            Hint("every user has a cache of their own", wrong=rate(weights + cache / users)),
            Hint("8 KV heads, not 32: query heads share them", wrong=rate(weights + 4 * cache)),
            Hint("K and V: a factor 2 in the cache", wrong=rate(weights + cache / 2)),
            Hint("that is one user's share; the question is for all 32", wrong=rate(weights + cache, 1)),
            Hint("the weights are read once a step, not once a user", wrong=rate(users * weights + cache)),
            Hint("bf16 has 2 bytes, not 4", wrong=rate(2 * (weights + cache))),
            Hint("bf16 has 2 bytes, not 1", wrong=rate((weights + cache) / 2)),
            Hint("that is the time of a step; how many steps, and tokens, fit in a second?", wrong=0.01505),
            Hint("that is the time of a step in ms; tokens per second were asked for", wrong=15.05),
        ],
    )
