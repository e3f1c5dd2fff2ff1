"""Plausible wrong answers to exercise 10, each with text that its message must contain."""

COUNT = """
def count_launches(trace, fusions):
    names = [name for name in trace if name not in VIEWS]
"""
LOOP = """    at = launches = 0
    while at < len(names):
        fits = [len(f) for f in fusions if tuple(names[at : at + len(f)]) == tuple(f)]
        at += {step}
        launches += 1
    return launches
"""
BYTES = "def add_norm_bytes(rows, width, itemsize): return "

SIZES = "def choose_sizes(steps, most):\n    ns = sorted(n for n in steps if steps[n])\n    return "

ESTIMATE = "def estimates():\n    cpu, gpu = 512 * 5e-6, 512 * 2e-6\n    return "
GOOD = {
    "ceiling": "1 / cpu",
    "ceiling_fused": "1 / (288 * 5e-6)",
    "waits": "1 - gpu / cpu",
    "graph_gain": "cpu / gpu",
    "logits_mb": "63 * 128256 * 2 / 1e6",
}


def estimate(**changed: str) -> str:
    return ESTIMATE + "{" + ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items()) + "}"


SLOTS = "        self.slots.fill_(-1)\n        self.slots[:n] = torch.tensor(slots)"
TOKENS = "        self.tokens.zero_()\n        self.tokens[:n] = torch.tensor(tokens)"

WRONG = {
    "10.count_launches": {
        "views counted": (
            (
                "names = [name for name in trace if name not in VIEWS]",
                "names = list(trace)",
            ),
            "views",
        ),
        "views keep apart": (
            """
def count_launches(trace, fusions):
    names, at, launches = list(trace), 0, 0
    while at < len(names):
        fits = [len(f) for f in fusions if tuple(names[at : at + len(f)]) == tuple(f)]
        launches += names[at] not in VIEWS
        at += max(fits, default=1)
    return launches
""",
            "views between",
        ),
        "the first that fits": (COUNT + LOOP.format(step="fits[0] if fits else 1"), "take the longest"),
        "the shortest": (COUNT + LOOP.format(step="min(fits, default=1)"), "longest"),
        "overlapping fusions": (
            COUNT
            + """
    fits = sum(len(f) - 1 for i in range(len(names)) for f in fusions if tuple(names[i : i + len(f)]) == tuple(f))
    return len(names) - fits
""",
            "one fusion only",
        ),
        "the fewest possible": (
            COUNT
            + """
    least = [0] * (len(names) + 1)
    for i in reversed(range(len(names))):
        fits = [len(f) for f in fusions if tuple(names[i : i + len(f)]) == tuple(f)]
        least[i] = 1 + min(least[i + n] for n in (1, *fits))
    return least[0]
""",
            "expected",
        ),
        "the longest fusion first, all over the trace": (
            COUNT
            + """
    text = "".join(f"<{name}>" for name in names)
    for fusion in sorted(fusions, key=len, reverse=True):
        text = text.replace("".join(f"<{name}>" for name in fusion), "<*>")
    return text.count("<")
""",
            "expected",
        ),
        "names as one text": (
            COUNT
            + """
    text, launches = " ".join(names), 0
    while text:
        fits = [" ".join(f) for f in fusions if text.startswith(" ".join(f))]
        text = text[len(max(fits, key=len, default=text.split(" ")[0])) :].lstrip()
        launches += 1
    return launches
""",
            "expected",
        ),
        "a fusion cut off by the end of the trace": (
            COUNT
            + LOOP.format(step="max(fits, default=1)").replace(
                "tuple(names[at : at + len(f)]) == tuple(f)", "all(a == b for a, b in zip(names[at:], f))"
            ),
            "expected",
        ),
        "a short list of views": (
            (
                "names = [name for name in trace if name not in VIEWS]",
                'names = [name for name in trace if name not in ("view", "split", "reshape", "chunk")]',
            ),
            "expected",
        ),
        "no fusion": (COUNT + "    return len(names)\n", "fusions make one"),
        "a set": (COUNT + "    return len(set(names))\n", "how often"),
        "pairs only": (
            COUNT + LOOP.format(step="2 if 2 in fits else 1"),
            "expected",
        ),
        "the example": ("def count_launches(trace, fusions): return 2", "expected"),
        "the trace is emptied": (
            """
def count_launches(trace, fusions):
    for name in [name for name in trace if name in VIEWS]:
        trace.remove(name)
    names = trace
"""
            + LOOP.format(step="max(fits, default=1)"),
            "in place",
        ),
    },
    "10.add_norm_bytes": {
        "no weight": (BYTES + "(5 * rows * width * itemsize, 4 * rows * width * itemsize)", "weight is read"),
        "a weight a row": (BYTES + "(6 * rows * width * itemsize, 5 * rows * width * itemsize)", "one row"),
        "sum not written": (
            BYTES + "((5 * rows + 1) * width * itemsize, (3 * rows + 1) * width * itemsize)",
            "writes summed",
        ),
        "sum not read again": (
            BYTES + "((4 * rows + 1) * width * itemsize, (4 * rows + 1) * width * itemsize)",
            "read again",
        ),
        "numbers": (BYTES + "((5 * rows + 1) * width, (4 * rows + 1) * width)", "itemsize"),
        "swapped": (
            BYTES + "((4 * rows + 1) * width * itemsize, (5 * rows + 1) * width * itemsize)",
            "swapped",
        ),
        "always 2 bytes": (BYTES + "((5 * rows + 1) * width * 2, (4 * rows + 1) * width * 2)", "expected"),
        "one number": (BYTES + "(4 * rows + 1) * width * itemsize", "two ints"),
        "floats": (BYTES + "((5 * rows + 1) * width * itemsize / 1, 0.0)", "two ints"),
    },
    "10.add_norm": {
        "divided by BLOCK": (("mean = tl.sum(x * x, 0) / width", "mean = tl.sum(x * x, 0) / BLOCK"), "power of two"),
        "no mask at all": (("inside = column < width", "inside = column < BLOCK"), "expected"),
        "no mask at the last store": (
            ("y.to(normed.dtype.element_ty), mask=inside)", "y.to(normed.dtype.element_ty))"),
            "is there a mask",
        ),
        "the sum of squares": (("mean = tl.sum(x * x, 0) / width", "mean = tl.sum(x * x, 0)"), "not their sum"),
        "weight missing": (("tl.rsqrt(mean + eps) * gain", "tl.rsqrt(mean + eps)"), "weight is missing"),
        "eps outside": (("tl.rsqrt(mean + eps)", "(1.0 / (tl.sqrt(mean) + eps))"), "under the root"),
        "no eps": (("tl.rsqrt(mean + eps)", "tl.rsqrt(mean)"), "eps is missing"),
        "eps of 1e-5, whatever is given": (("tl.rsqrt(mean + eps)", "tl.rsqrt(mean + 1e-5)"), "expected"),
        "rows BLOCK apart": (
            ("    inside = column < width", "    inside = column < width\n    row = row * BLOCK // width"),
            "expected",
        ),
        "rows BLOCK apart in the output": (
            ("tl.store(normed + row * width + column", "tl.store(normed + row * BLOCK + column"),
            "expected",
        ),
        "one row for all": (("row, column = tl.program_id(0), tl.arange", "row, column = 0, tl.arange"), "expected"),
        "a LayerNorm": (
            (
                "mean = tl.sum(x * x, 0)",
                "x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)\n    mean = tl.sum(x * x, 0)",
            ),
            "LayerNorm",
        ),
        "the residual alone": (
            (
                "    x += tl.load(branch + row * width + column, mask=inside, other=0.0).to(tl.float32)\n"
                "    x = x.to(summed.dtype.element_ty)\n"
                "    tl.store(summed + row * width + column, x, mask=inside)",
                "    z = x + tl.load(branch + row * width + column, mask=inside, other=0.0).to(tl.float32)\n"
                "    tl.store(summed + row * width + column, z.to(summed.dtype.element_ty), mask=inside)",
            ),
            "residual alone",
        ),
        "swapped": (
            (
                "    tl.store(summed + row * width + column, x, mask=inside)\n    x = x.to(tl.float32)",
                "    tl.store(normed + row * width + column, x, mask=inside)\n    x = x.to(tl.float32)\n"
                "    normed = summed",
            ),
            "swapped",
        ),
        "normed twice": (
            (
                "    tl.store(normed + row",
                "    tl.store(summed + row * width + column, y.to(summed.dtype.element_ty), mask=inside)\n"
                "    tl.store(normed + row",
            ),
            "before the norm",
        ),
        "squares in 16 bits": (
            ("    x = x.to(tl.float32)\n    mean = tl.sum(x * x, 0) / width", "    mean = tl.sum(x * x, 0) / width"),
            "do not fit",
        ),
        "normed before it is rounded": (
            (
                "    x = x.to(summed.dtype.element_ty)\n"
                "    tl.store(summed + row * width + column, x, mask=inside)\n    x = x.to(tl.float32)\n",
                "    tl.store(summed + row * width + column, x.to(summed.dtype.element_ty), mask=inside)\n",
            ),
            "rounded to its dtype before",
        ),
        "summed not stored": (("    tl.store(summed + row * width + column, x, mask=inside)\n", ""), "summed"),
        "residual in place": (
            (
                "    tl.store(summed + row * width + column, x, mask=inside)",
                "    tl.store(summed + row * width + column, x, mask=inside)\n"
                "    tl.store(residual + row * width + column, x, mask=inside)",
            ),
            "input was written",
        ),
        "the example's width": (
            ("    inside = column < width", "    width = 64\n    inside = column < width"),
            "expected",
        ),
    },
    "10.choose_sizes": {
        "the most frequent": (
            """
def choose_sizes(steps, most):
    top = max(n for n in steps if steps[n])
    rest = sorted((n for n in steps if steps[n] and n != top), key=lambda n: (-steps[n], n))
    return sorted([*rest[: most - 1], top])
""",
            "most frequent",
        ),
        "powers of two": (
            """
def choose_sizes(steps, most):
    top = max(n for n in steps if steps[n])
    return sorted({top, *(2**i for i in range(12) if 2**i < top)})[-most:]
""",
            "powers of two",
        ),
        "evenly spaced": (
            """
def choose_sizes(steps, most):
    top = max(n for n in steps if steps[n])
    return sorted({-(-top * (i + 1) // most) for i in range(most)})
""",
            "evenly spaced",
        ),
        "one at a time": (
            """
def choose_sizes(steps, most):
    ns = [n for n in steps if steps[n]]
    chosen = [max(ns)]
    def waste(sizes):
        return sum((min(s for s in sizes if s >= n) - n) * steps[n] for n in ns)
    while len(chosen) < most:
        chosen.append(min(ns, key=lambda n: waste([*chosen, n])))
    return sorted(set(chosen))
""",
            "one size after another",
        ),
        "all combinations": (
            """
def choose_sizes(steps, most):
    from itertools import combinations
    ns = sorted(n for n in steps if steps[n])
    def waste(sizes):
        return sum((min(s for s in sizes if s >= n) - n) * steps[n] for n in ns)
    return min(([*few, ns[-1]] for few in combinations(ns[:-1], min(most, len(ns)) - 1)), key=waste)
""",
            "too many",
        ),
        "one for all": (SIZES + "ns[-1:]", "one size for all"),
        "without the largest": (SIZES + "ns[:-1][:most] or ns[:1]", "fit into none"),
        "all of them": (SIZES + "ns", "at most"),
        "not sorted": (SIZES + "ns[::-1][:1] + ns[: most - 1]", "sorted"),
        "a tensor of floats": (SIZES + "[float(n) for n in ns[-most:]]", "list of ints"),
        "the last few": (SIZES + "ns[-most:]", "is possible"),
        "sizes that never ran": (
            (
                "counts = sorted(n for n in steps if steps[n] > 0)",
                "counts = sorted(steps)",
            ),
            "never ran",
        ),
    },
    "10.replayer": {
        "tokens rebound, slots mended": (
            (
                TOKENS,
                "        self.tokens = torch.tensor(tokens + [0] * (self.rows - n))",
            ),
            "tokens are a new tensor",
        ),
        "still the slots": (
            (SLOTS, "        self.slots = torch.tensor([*slots, *[-1] * (self.rows - n)])"),
            "still a new tensor",
        ),
        "stale slots and tokens": (
            (
                TOKENS + "\n" + SLOTS,
                "        self.tokens[:n], self.slots[:n] = torch.tensor(tokens), torch.tensor(slots)",
            ),
            "slots and tokens",
        ),
        "stale padding": ((SLOTS, "        self.slots[:n] = torch.tensor(slots)"), "padding rows still"),
        "stale tokens": ((TOKENS, "        self.tokens[:n] = torch.tensor(tokens)"), "it should be 0"),
        "padding at slot 0": (
            (SLOTS, "        self.slots.zero_()\n        self.slots[:n] = torch.tensor(slots)"),
            "slot 0",
        ),
        "a view returned": (("return self.output[:n].clone()", "return self.output[:n]"), "earlier result"),
        "captured each time": (("if self.replay is None:", "if True:"), "captured"),
        "no graph at all": (
            (
                "        if self.replay is None:\n"
                "            self.replay, self.output = self.capture(self.step, self.tokens, self.slots)\n"
                "        else:\n"
                "            self.replay()",
                "        self.output = self.step(self.tokens, self.slots)",
            ),
            "captured 0 times",
        ),
        "replayed after the capture too": (
            ("        else:\n            self.replay()", "        self.replay()"),
            "expected",
        ),
        "captured, then eager": (
            ("            self.replay()\n", "            self.output = self.step(self.tokens, self.slots)\n"),
            "are replays",
        ),
        "nothing returned": (("        return self.output[:n].clone()\n", ""), "returned None"),
        "all rows returned": (("return self.output[:n].clone()", "return self.output.clone()"), "expected"),
    },
    "10.estimates": {
        "seconds a token": (estimate(ceiling="cpu"), "seconds a token"),
        "no layers": (estimate(ceiling="1 / (16 * 5e-6)"), "layers are missing"),
        "16 launches": (estimate(ceiling_fused="1 / cpu"), "9 launches"),
        "seconds, fused": (estimate(ceiling_fused="288 * 5e-6"), "seconds a token"),
        "works": (estimate(waits="gpu / cpu"), "works"),
        "per cent": (estimate(waits="100 * (1 - gpu / cpu)"), "share"),
        "lanes added": (estimate(graph_gain="(cpu + gpu) / gpu"), "longer one"),
        "how much faster": (estimate(graph_gain="cpu / gpu - 1"), "times as fast"),
        "kernels forgotten": (estimate(graph_gain="cpu / 10e-6"), "one after another"),
        "the largest alone": (estimate(logits_mb="32 * 128256 * 2 / 1e6"), "largest alone"),
        "MiB": (estimate(logits_mb="63 * 128256 * 2 / 2**20"), "10^6"),
        "one byte": (estimate(logits_mb="63 * 128256 / 1e6"), "2 bytes"),
        "text": (estimate(waits="'60 %'"), "expected a number"),
        "a key short": (ESTIMATE + "{'ceiling': 1 / cpu}", "KeyError"),
    },
}
