"""Wrong answers to exercise 00, and what the check must say to each."""

LATENCY = """
def latency(arrival, token_times):
    itl = [b - a for a, b in pairwise(token_times)]
    tpot = sum(itl) / len(itl) if itl else None
    return {"ttft": token_times[0] - arrival, "itl": itl, "tpot": tpot, "e2e": token_times[-1] - arrival}
"""
GOOD = "good += times[0] - arrival <= ttft_limit and tpot <= tpot_limit"
RETURN = "return 0.0 if end is None else good / (end - min(arrival for arrival, _ in requests))"
GIVEN = """
def summarise(clients):
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
        "output_tokens_per_s": sum(speeds) + 0.0,
        "mean_tpot": sum(tpots) / len(tpots),
        "p99_ttft": sum(p99s) / len(p99s),
    }
"""
DURATION = "max(times[-1] for _, _, times in requests) - min(arrival for _, arrival, _ in requests)"
TPOTS = "[(times[-1] - times[0]) / (len(times) - 1) for _, _, times in requests if len(times) > 1]"
P99 = "float(np.percentile(ttfts, 99))"

WRONG = {
    "00.latency": {
        "ttft from 0": (LATENCY.replace("token_times[0] - arrival", "token_times[0]"), "not from time 0"),
        "e2e from 0": (
            LATENCY.replace('"e2e": token_times[-1] - arrival', '"e2e": token_times[-1]'),
            "not from time 0",
        ),
        "e2e from the first token": (
            LATENCY.replace("[-1] - arrival", "[-1] - token_times[0]"),
            "starts at the arrival",
        ),
        "tpot over n": (LATENCY.replace("/ len(itl)", "/ len(token_times)"), "n - 1 gaps"),
        "tpot over n, one token too": (
            LATENCY.replace("/ len(itl) if itl else None", "/ len(token_times)"),
            "n - 1 gaps",
        ),
        "tpot with ttft": (
            LATENCY.replace("sum(itl) / len(itl)", "(token_times[-1] - arrival) / len(token_times)"),
            "leave the TTFT out",
        ),
        "tpot is e2e over gaps": (
            LATENCY.replace("sum(itl) / len(itl)", "(token_times[-1] - arrival) / len(itl)"),
            "leave the TTFT out",
        ),
        "median gap": (LATENCY.replace("sum(itl) / len(itl)", "float(np.median(itl))"), "not their median"),
        "zero for one token": (LATENCY.replace("else None", "else 0.0"), "tpot is None"),
        "nan for one token": (LATENCY.replace("else None", "else float('nan')"), "tpot is None"),
        "divides by zero": (LATENCY.replace(" if itl else None", ""), "ZeroDivisionError"),
        "ttft among the gaps": (
            LATENCY.replace("pairwise(token_times)", "pairwise([arrival, *token_times])"),
            "not a gap",
        ),
        "itl is the mean": (LATENCY.replace('"itl": itl', '"itl": tpot'), "expected"),
        "a tuple": ("def latency(arrival, times): return times[0] - arrival, times[-1] - arrival", "expected a dict"),
        "milliseconds": (
            LATENCY.replace("token_times[0] - arrival", "1000 * (token_times[0] - arrival)"),
            "expected",
        ),
        "sorts in place": (LATENCY.replace("    itl =", "    token_times.reverse()\n    itl ="), "in place"),
        "pops": (
            LATENCY.replace(
                "    itl =", "    first = token_times.pop(0)\n    token_times = [first, *token_times]\n    itl ="
            ),
            "in place",
        ),
    },
    "00.forward_flops": {
        "one FLOP": (("return 2 * batch", "return batch"), "two FLOPs"),
        "MHA": (
            ("config.num_kv_heads * config.head_dim\n", "config.num_heads * config.head_dim\n"),
            "kv_heads x head_dim",
        ),
        "q is hidden": (
            (
                "hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim,",
                "hidden, q, kv = config.hidden_size, config.hidden_size,",
            ),
            "need not be hidden",
        ),
        "no gate": (("3 * hidden", "2 * hidden"), "three matrices"),
        "no out": ((" + q * hidden +", " +"), "out projection"),
        "no head": ((" + hidden * config.vocab_size", ""), "head is missing"),
        "tied head free": (
            ("hidden * config.vocab_size", "hidden * config.vocab_size * (not config.tie_embeddings)"),
            "its product is done",
        ),
        "last token scored": (
            (
                "return 2 * batch * new * (weights + attention)",
                "head = hidden * config.vocab_size\n"
                "    return 2 * batch * (new * (weights - head + attention) + head)",
            ),
            "not only the last",
        ),
        "no attention": (("(weights + attention)", "weights"), "attention is missing"),
        "scores only": (("attention = 2 * q", "attention = q"), "two products"),
        "KV heads attend": (("attention = 2 * q", "attention = 2 * kv"), "num_heads"),
        "no context": (("(context + new)", "new"), "context + new"),
        "context only": (("(context + new)", "context"), "see each other"),
        "causal": (("(context + new)", "(context + (new + 1) / 2)"), "causal mask hides"),
        "one layer attends": (("(context + new) * config.num_layers", "(context + new)"), "every layer"),
        "embedding": (("hidden * config.vocab_size", "2 * hidden * config.vocab_size"), "multiplies nothing"),
        "no batch": (("2 * batch * new", "2 * new"), "batch is missing"),
        "batch twice": (("attention = 2 * q", "attention = 2 * batch * q"), "expected"),
        "by the book, 2 N": (
            "def forward_flops(c, new, context=0, batch=1): return 2 * 10**9 * new * batch",
            "expected",
        ),
        "context + 1": (("(context + new)", "(context + 1)"), "expected"),
        "the example": ("def forward_flops(c, new, context=0, batch=1): return 962743762944", "expected"),
    },
    "00.decode_bytes": {
        "weights each": (("parameters * weight_bytes", "parameters * weight_bytes * len(contexts)"), "once a step"),
        "K only": (("token = 2 *", "token = 1 *"), "factor 2"),
        "MHA": (
            ("config.num_kv_heads * config.head_dim * kv", "config.num_heads * config.head_dim * kv"),
            "num_kv_heads",
        ),
        "no cache": ((" + token * sum(contexts)", ""), "cache is missing"),
        "one layer": (("2 * config.num_layers * config", "2 * config"), "every layer"),
        "first context": (("sum(contexts)", "len(contexts) * contexts[0]"), "sum them"),
        "longest context": (("sum(contexts)", "len(contexts) * max(contexts)"), "no padding"),
        "one request": (("sum(contexts)", "contexts[0]"), "not only the first"),
        "new token": (("sum(contexts)", "sum(contexts, len(contexts))"), "left out"),
        "one size": (("config.head_dim * kv_bytes", "config.head_dim * weight_bytes"), "size of its own"),
        "always 2": (
            "def decode_bytes(c, n, contexts, weight_bytes=2, kv_bytes=2):\n"
            "    return 2 * n + 4 * c.num_layers * c.num_kv_heads * c.head_dim * sum(contexts)",
            "not always 2",
        ),
        "hidden / heads": (
            ("config.head_dim * kv_bytes", "config.hidden_size // config.num_heads * kv_bytes"),
            "expected",
        ),
        "GB": (("return parameters", "return 1e-9 * parameters"), "expected"),
        "mean context": (("sum(contexts)", "(sum(contexts) // len(contexts))"), "expected"),
        "the example": ("def decode_bytes(*a, **k): return 16524288000", "expected"),
    },
    "00.goodput": {
        "share": ((RETURN, "return good / len(requests)"), "share"),
        "tokens": ((GOOD, f"good += len(times) * ({GOOD[8:]})"), "not tokens"),
        "all": ((GOOD, "good += 1"), "good or not"),
        "either": ((GOOD, GOOD.replace(" and ", " or ")), "both targets"),
        "no ttft": ((GOOD, "good += tpot <= tpot_limit"), "TTFT target"),
        "no tpot": ((GOOD, "good += times[0] - arrival <= ttft_limit"), "TPOT target"),
        "strict": ((GOOD, GOOD.replace("<=", "<")), "<="),
        "strict ttft": ((GOOD, GOOD.replace("<= ttft", "< ttft")), "expected"),
        "strict tpot": ((GOOD, GOOD.replace("<= tpot", "< tpot")), "expected"),
        "one token is bad": (("else 0.0\n", "else float('inf')\n"), "any TPOT"),
        "worst gap": (
            (GOOD, "tpot = max([b - a for a, b in pairwise(times)], default=0)\n        " + GOOD),
            "mean gap",
        ),
        "tpot with ttft": (
            (GOOD, "tpot = (times[-1] - arrival) / len(times)\n        " + GOOD),
            "leaves the TTFT out",
        ),
        "ttft from 0": ((GOOD, GOOD.replace(" - arrival", "")), "from the arrival"),
        "clock from 0": ((RETURN, "return 0.0 if end is None else good / end"), "not at time 0"),
        "from the first token": (
            (RETURN, "return 0.0 if end is None else good / (end - min(t[0] for _, t in requests if t))"),
            "not at the first token",
        ),
        "to the last arrival": (
            (RETURN, "a = [a for a, _ in requests]\n    return 0.0 if end is None else good / (max(a) - min(a))"),
            "last token, not with the last arrival",
        ),
        "failed requests do not start the run": (
            (RETURN, RETURN.replace("in requests)", "in [r for r in requests if r[1]])")),
            "request that failed",
        ),
        "in the order given": (
            (
                RETURN,
                "done = [t for _, t in requests if t]\n"
                "    return good / (done[-1][-1] - requests[0][0]) if done else 0.0",
            ),
            "any order",
        ),
        "sum of times": (
            (RETURN, "return good / sum(t[-1] - a for a, t in requests if t) if end else 0.0"),
            "overlap",
        ),
        "the mean is judged": (
            """
def goodput(requests, ttft_limit, tpot_limit):
    done = [(a, t) for a, t in requests if t]
    if not done:
        return 0.0
    ttft = sum(t[0] - a for a, t in done) / len(done)
    tpots = [(t[-1] - t[0]) / (len(t) - 1) for _, t in done if len(t) > 1]
    fine = ttft <= ttft_limit and (not tpots or sum(tpots) / len(tpots) <= tpot_limit)
    return fine * len(done) / (max(t[-1] for _, t in done) - min(a for a, _ in requests))
""",
            "not the mean",
        ),
        "fails on no tokens": (("        if not times:\n            continue\n", ""), "failed: skip it"),
        "none when nothing came": (("0.0 if end is None", "None if end is None"), "goodput is 0.0"),
        "a count": ((RETURN, "return good"), "expected"),
        "sorts in place": (("good, end = 0, None", "requests.sort()\n    good, end = 0, None"), "in place"),
    },
    "00.summarise": {
        "nothing mended": (GIVEN, "speeds cannot be added"),
        "only prompts mended": (
            GIVEN.replace("(prompt_tokens + len(token_times))", "len(token_times)"),
            "cannot be added",
        ),
        "prompts counted": (
            ("tokens = sum(len(times) for _, _, times", "tokens = sum(p + len(times) for p, _, times"),
            "prompt tokens",
        ),
        "mean speed": (
            ("tokens / duration", "sum(len(t) / (t[-1] - a) for _, a, t in requests) / len(requests)"),
            "cannot be added",
        ),
        "sum of e2e": (("tokens / duration", "tokens / sum(t[-1] - a for _, a, t in requests)"), "overlap"),
        "per client": (
            (
                "tokens / duration",
                "sum(sum(len(t) for *_, t in c) / "
                "(max(t[-1] for *_, t in c) - min(a for _, a, _ in c)) for c in clients)",
            ),
            "one duration for all",
        ),
        "from 0": ((DURATION, "max(times[-1] for _, _, times in requests)"), "not at time 0"),
        "first tokens left out": (("tokens / duration", "(tokens - len(requests)) / duration"), "is output too"),
        "last in the list": ((DURATION, "requests[-1][2][-1] - requests[0][1]"), "expected"),
        "tpot as given": (
            (TPOTS, "[(times[-1] - arrival) / len(times) for _, arrival, times in requests]"),
            "TTFT is still in it",
        ),
        "tpot as given, singles out": (
            (TPOTS, "[(times[-1] - a) / len(times) for _, a, times in requests if len(times) > 1]"),
            "TTFT is still in it",
        ),
        "tpot over n": ((TPOTS, TPOTS.replace("(len(times) - 1)", "len(times)")), "n - 1 gaps"),
        "tpot of singles 0": (
            (TPOTS, "[(times[-1] - times[0]) / max(len(times) - 1, 1) for _, _, times in requests]"),
            "not counted as 0",
        ),
        "gaps pooled": (
            (TPOTS, "[b - a for _, _, times in requests for a, b in pairwise(times)]"),
            "pooled gaps",
        ),
        "mean of clients": (
            (
                "sum(tpots) / len(tpots)",
                "np.mean([np.mean([(t[-1] - t[0]) / (len(t) - 1) for *_, t in c if len(t) > 1]) for c in clients])",
            ),
            "mean over requests",
        ),
        "divides by zero": ((TPOTS, TPOTS.replace(" if len(times) > 1", "")), "no gap"),
        "P99s averaged": (
            (P99, "np.mean([np.percentile([t[0] - a for _, a, t in c], 99) for c in clients])"),
            "cannot be averaged",
        ),
        "P99s weighted": (
            (P99, "sum(len(c) * np.percentile([t[0] - a for _, a, t in c], 99) for c in clients) / len(requests)"),
            "weighted or not",
        ),
        "worst client": (
            (P99, "max(np.percentile([t[0] - a for _, a, t in c], 99) for c in clients)"),
            "worst client",
        ),
        "maximum": ((P99, "max(ttfts)"), "the maximum"),
        "P90": ((P99, "float(np.percentile(ttfts, 90))"), "expected"),
        "nearest rank": ((P99, "sorted(ttfts)[int(0.99 * (len(ttfts) - 1))]"), "expected"),
        "ttft from 0": (("[times[0] - arrival for", "[times[0] for"), "from the arrival"),
        "P99 of e2e": (("[times[0] - arrival for", "[times[-1] - arrival for"), "P99 of e2e"),
        "first client only": (
            ("for client in clients for request in client", "for request in clients[0]"),
            "expected",
        ),
    },
    "00.estimate": {
        "no cache": (6675, "caches are missing"),
        "one cache": (6257, "cache of their own"),
        "MHA": (698.3, "8 KV heads"),
        "K only": (3225, "factor 2"),
        "per user": (66.4, "one user's share"),
        "weights each": (195.5, "once a step"),
        "fp32": (1063, "2 bytes, not 4"),
        "int8": (4252, "2 bytes, not 1"),
        "no weights": (3120, "weights are missing"),
        "seconds": (0.01505, "time of a step"),
        "milliseconds": (15.05, "in ms"),
        "text": ("'2126 tokens/s'", "expected a number"),
        "a guess": (2500, "expected"),
    },
}
