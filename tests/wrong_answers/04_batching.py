"""Plausible wrong answers to exercise 04, each with text that its message must contain."""

RETURN = "return tokens, columns >= pads, (columns - pads).clamp(min=0)"
COMPUTED = "computed += len(p) * (max(p) + max(n) - 1)"
ASKED = "asked += sum(p) + sum(n) - len(p)"
WHERE = "return torch.where(greedy, logits.argmax(-1), sampled)"
TAKE = "if token == eos or len(answers[i]) == requests[i][1]:"
ANSWERS = "    return answers\n"
CLOSE = "close, batch = arrivals[i] + window, []"
START = "arrivals[batch[-1]] if len(batch) == size else close"

RIGHT = """
def left_pad(prompts, pad_id):
    longest = max(map(len, prompts))
    tokens = torch.tensor([p + [pad_id] * (longest - len(p)) for p in prompts])
    mask = torch.arange(longest) < torch.tensor([len(p) for p in prompts])[:, None]
    return tokens, mask, torch.arange(longest).expand(len(prompts), longest)
"""
STATIC = """
def serve(requests, slots, prefill, decode, eos=None):
    answers, done = [[] for _ in requests], lambda i: len(answers[i]) == requests[i][1] or answers[i][-1] == eos
    for first in range(0, len(requests), slots):
        rows = range(first, min(first + slots, len(requests)))
        for i in rows:
            answers[i].append(prefill(i - first, requests[i][0]))
        while any(not done(i) for i in rows):
            last = {i - first: answers[i][-1] for i in rows if not done(i)}
            for slot, token in decode(last).items():
                answers[first + slot].append(token)
    return answers
"""
PADDED = STATIC.replace("for i in rows if not done(i)}", "for i in rows}").replace(
    "                answers[first + slot].append(token)",
    "                if not done(first + slot):\n                    answers[first + slot].append(token)",
)
ONE_BY_ONE = """
def serve(requests, slots, prefill, decode, eos=None):
    answers = []
    for prompt, count in requests:
        tokens = [prefill(0, prompt)]
        while len(tokens) < count and tokens[-1] != eos:
            tokens.append(decode({0: tokens[-1]})[0])
        answers.append(tokens)
    return answers
"""
FINISHING = """
def serve(requests, slots, prefill, decode, eos=None):
    finished, waiting, running = [], list(requests), {}

    def settle():
        for slot, (answer, count) in list(running.items()):
            if len(answer) == count or answer[-1] == eos:
                finished.append(running.pop(slot)[0])

    while waiting or running:
        while waiting and len(running) < slots:
            slot = min(set(range(slots)) - set(running))
            prompt, count = waiting.pop(0)
            running[slot] = [prefill(slot, prompt)], count
            settle()
        if running:
            for slot, token in decode({s: a[-1] for s, (a, _) in running.items()}).items():
                running[slot][0].append(token)
            settle()
    return finished
"""

WRONG = {
    "04.left_pad": {
        "a pad of 0 is none": (
            "right = left_pad\ndef left_pad(prompts, pad_id): return right(prompts, pad_id or 1)",
            "expected",
        ),
        "two bytes a token": (
            "right = left_pad\n"
            "def left_pad(prompts, pad_id):\n"
            "    return (lambda t, m, p: (t.to(torch.int16).long(), m, p))(*right(prompts, pad_id))",
            "expected",
        ),
        "right padding": (RIGHT, "padding at the right"),
        "positions from the pad": (
            (RETURN, "return tokens, columns >= pads, columns.expand_as(tokens)"),
            "from the pad",
        ),
        "negative positions": ((RETURN, "return tokens, columns >= pads, columns - pads"), "negative"),
        "mask inverted": ((RETURN, "return tokens, columns < pads, (columns - pads).clamp(min=0)"), "inverted"),
        "mask by id": (
            (RETURN, "return tokens, tokens != pad_id, (columns - pads).clamp(min=0)"),
            "from the lengths",
        ),
        "positions from 1": (
            (RETURN, "return tokens, columns >= pads, (columns - pads + 1).clamp(min=0)"),
            "start at 1",
        ),
        "always 0": (("[[pad_id] * (longest", "[[0] * (longest"), "pad_id is an argument"),
        "mask of ints": ((RETURN, "return tokens, (columns >= pads).long(), (columns - pads).clamp(min=0)"), "bool"),
        "int32": (
            (RETURN, "return tokens.int(), columns >= pads, (columns - pads).clamp(min=0).int()"),
            "expected int64",
        ),
        "positions of row 0": (
            (RETURN, "return tokens, columns >= pads, (columns - pads[0]).clamp(min=0).expand_as(tokens)"),
            "expected",
        ),
        "changes the prompts": (
            "def left_pad(prompts, pad_id):\n"
            "    longest = max(map(len, prompts))\n"
            "    pads = torch.tensor([longest - len(p) for p in prompts])[:, None]\n"
            "    for p in prompts:\n"
            "        p[:0] = [pad_id] * (longest - len(p))\n"
            "    columns = torch.arange(longest)\n"
            "    return torch.tensor(prompts), columns >= pads, (columns - pads).clamp(min=0)",
            "in place",
        ),
        "squeezed": (
            (RETURN, "return tokens.squeeze(), (columns >= pads).squeeze(), (columns - pads).clamp(min=0).squeeze()"),
            "expected shape",
        ),
        "plain lists": (
            (RETURN, "return tokens.tolist(), (columns >= pads).tolist(), (columns - pads).clamp(min=0).tolist()"),
            "tokens: expected a tensor, got list",
        ),
        "numpy's int32": (
            (RETURN, "return tokens, columns >= pads, (columns - pads).clamp(min=0).int().numpy()"),
            "positions: expected a tensor, got ndarray",
        ),
        "the example": (
            "def left_pad(prompts, pad_id): return (torch.tensor([[9, 7], [5, 6]]),"
            " torch.tensor([[False, True], [True, True]]), torch.tensor([[0, 0], [0, 1]]))",
            "expected",
        ),
    },
    "04.static_waste": {
        "batches of 16 at most": (
            "right = static_waste\n"
            "def static_waste(prompts, answers, size):\n"
            "    return right(prompts, answers, min(size, 16))",
            "expected",
        ),
        "useful share": (("return 1 - asked / computed", "return asked / computed"), "useful share"),
        "last token computed": (
            (
                f"{COMPUTED}\n        {ASKED}",
                "computed += len(p) * (max(p) + max(n))\n        asked += sum(p) + sum(n)",
            ),
            "never run",
        ),
        "last token in the rectangle": (
            (COMPUTED, "computed += len(p) * (max(p) + max(n))"),
            "not off what is computed",
        ),
        "one batch": (
            "def static_waste(p, n, size): return 1 - (sum(p) + sum(n) - len(p)) / (len(p) * (max(p) + max(n) - 1))",
            "batches of size",
        ),
        "prompts only": (
            (f"{COMPUTED}\n        {ASKED}", "computed += len(p) * max(p)\n        asked += sum(p)"),
            "only the padding",
        ),
        "answers only": (
            (
                f"{COMPUTED}\n        {ASKED}",
                "computed += len(p) * (max(n) - 1)\n        asked += sum(n) - len(p)",
            ),
            "only the finished rows",
        ),
        "full last batch": ((COMPUTED, "computed += size * (max(p) + max(n) - 1)"), "rows that are left"),
        "per cent": (("return 1 - asked / computed", "return 100 * (1 - asked / computed)"), "per cent"),
        "over what was asked": (
            ("return 1 - asked / computed", "return computed / asked - 1"),
            "of what is computed",
        ),
        "averaged": (
            "def static_waste(prompts, answers, size):\n"
            "    shares = []\n"
            "    for i in range(0, len(prompts), size):\n"
            "        p, n = prompts[i : i + size], answers[i : i + size]\n"
            "        shares.append(1 - (sum(p) + sum(n) - len(p)) / (len(p) * (max(p) + max(n) - 1)))\n"
            "    return sum(shares) / len(shares)",
            "averaged",
        ),
        "three digits": (("return 1 - asked / computed", "return round(1 - asked / computed, 3)"), "rounded"),
        "four digits": (("return 1 - asked / computed", "return round(1 - asked / computed, 4)"), "rounded"),
        "longest pair": ((COMPUTED, "computed += len(p) * (max(map(sum, zip(p, n))) - 1)"), "expected"),
        "the example": ("def static_waste(prompts, answers, size): return 1 / 3", "expected"),
    },
    "04.batches": {
        "batches of 16 at most": (
            "right = batches\ndef batches(arrivals, size, window): return right(arrivals, min(size, 16), window)",
            "expected",
        ),
        "restarting window": (
            (
                "            batch.append(i)\n",
                "            batch.append(i)\n            close = arrivals[i] + window\n",
            ),
            "not from the latest",
        ),
        "strict": (("arrivals[i] <= close", "(arrivals[i] < close or not batch)"), "still in"),
        "full waits": ((START, "close"), "full batch starts at once"),
        "knows the future": (
            (START, "close if len(batch) < size and i < len(arrivals) else arrivals[batch[-1]]"),
            "nobody",
        ),
        "no size": (("and len(batch) < size ", ""), "size is ignored"),
        "no window": ((CLOSE, "close, batch = float('inf'), []"), "expected"),
        "size only": (
            "def batches(arrivals, size, window):\n"
            "    rows = list(range(len(arrivals)))\n"
            "    groups = [rows[i : i + size] for i in range(0, len(rows), size)]\n"
            "    return [(g, arrivals[g[-1]]) for g in groups]",
            "window is ignored",
        ),
        "always starts at the last arrival": ((START, "arrivals[batch[-1]]"), "expected"),
        "one more than size": (("len(batch) < size", "len(batch) <= size"), "expected"),
        "lists of arrivals": (("batch.append(i)", "batch.append(arrivals[i])"), "raised"),
    },
    "04.serve": {
        "8 slots at most": (
            "right = serve\n"
            "def serve(requests, slots, prefill, decode, eos=None):\n"
            "    return right(requests, min(slots, 8), prefill, decode, eos)",
            "expected",
        ),
        "static": (STATIC, "static batching"),
        "padded": (PADDED, "still decoded"),
        "one by one": (ONE_BY_ONE, "more decode calls"),
        "one admission": (
            ("while waiting and len(running) < slots:", "if waiting and len(running) < slots:"),
            "only one",
        ),
        "no eos": ((TAKE, "if len(answers[i]) == requests[i][1]:"), "eos is ignored"),
        "eos dropped": (
            (ANSWERS, "    return [a[:-1] if a and a[-1] == eos else a for a in answers]\n"),
            "eos stays",
        ),
        "one more": ((TAKE, "if token == eos or len(answers[i]) > requests[i][1]:"), "more than max_tokens"),
        "last come": (("running[slot] = waiting.pop(0)", "running[slot] = waiting.pop()"), "first come"),
        "finishing order": (FINISHING, "order of finishing"),
        "one slot too many": (("len(running) < slots:", "len(running) <= slots:"), "raised"),
        "slots from 1": (
            ("min(set(range(slots)) - set(running))", "min(set(range(1, slots + 1)) - set(running))"),
            "slot",
        ),
        "decodes one by one": (
            (
                "            tokens = decode({slot: answers[i][-1] for slot, i in running.items()})\n"
                "            for slot, token in tokens.items():\n"
                "                take(slot, token)\n",
                "            for slot, i in list(running.items()):\n"
                "                take(slot, decode({slot: answers[i][-1]})[slot])\n",
            ),
            "all running slots in one call",
        ),
        "an eos of 0 is none": (
            (TAKE, "if (eos and token == eos) or len(answers[i]) == requests[i][1]:"),
            "an eos of 0",
        ),
        "one list for all answers": (
            (
                "answers, waiting, running = [[] for _ in requests]",
                "answers, waiting, running = [[]] * len(requests)",
            ),
            "share one list",
        ),
        "takes the requests away": (
            "def serve(requests, slots, prefill, decode, eos=None):\n"
            "    answers, running = [], {}\n"
            "    while requests or running:\n"
            "        while requests and len(running) < slots:\n"
            "            slot = min(set(range(slots)) - set(running))\n"
            "            prompt, count = requests.pop(0)\n"
            "            answers.append([prefill(slot, prompt)])\n"
            "            if answers[-1][-1] != eos and count > 1:\n"
            "                running[slot] = answers[-1], count\n"
            "        if running:\n"
            "            for slot, token in decode({s: a[-1] for s, (a, _) in running.items()}).items():\n"
            "                answer, count = running[slot]\n"
            "                answer.append(token)\n"
            "                if token == eos or len(answer) == count:\n"
            "                    del running[slot]\n"
            "    return answers",
            "in place",
        ),
        "a prompt that ends with eos is done": (
            (TAKE, "if eos in (token, requests[i][0][-1]) or len(answers[i]) == requests[i][1]:"),
            "an eos in the prompt",
        ),
        "a prompt that ends with eos is not started": (
            "right = serve\n"
            "def serve(requests, slots, prefill, decode, eos=None):\n"
            "    rest = [r for r in requests if r[0][-1] != eos]\n"
            "    found = iter(right(rest, slots, prefill, decode, eos))\n"
            "    return [[] if r[0][-1] == eos else next(found) for r in requests]",
            "expected",
        ),
        "eos is always 7": ((TAKE, "if token == 7 or len(answers[i]) == requests[i][1]:"), "expected"),
        "slot by count": (("slot = min(set(range(slots)) - set(running))", "slot = len(running)"), "expected"),
        "as many as were free before": (
            ("while waiting and len(running) < slots:", "for _ in range(min(len(waiting), slots - len(running))):"),
            "expected",
        ),
        "answers by prompt": (
            (
                ANSWERS,
                "    return [{str(p): a for (p, _), a in zip(requests, answers)}[str(q)] for q, _ in requests]\n",
            ),
            "expected",
        ),
    },
    "04.choose": {
        "one byte a token": (
            "right = choose\n"
            "def choose(logits, temperatures, noise):\n"
            "    return right(logits, temperatures, noise) % 256",
            "expected",
        ),
        "as before, rearranged": (
            (WHERE, "return logits.argmax(-1) if bool(greedy.all()) else sampled"),
            "still sampled",
        ),
        "one greedy, all greedy": (
            (WHERE, "return logits.argmax(-1) if bool(greedy.any()) else sampled"),
            "all rows greedy",
        ),
        "all greedy": ((WHERE, "return logits.argmax(-1)"), "greedy now"),
        "largest temperature": (
            ("probabilities = (logits / safe[:, None])", "probabilities = (logits / safe.max())"),
            "largest",
        ),
        "first temperature": (
            ("probabilities = (logits / safe[:, None])", "probabilities = (logits / safe[0])"),
            "first row",
        ),
        "clamped": (
            "def choose(logits, temperatures, noise):\n"
            "    p = (logits / temperatures.clamp(min=0.01)[:, None]).softmax(-1)\n"
            "    return (p / noise).argmax(-1)",
            "small temperature",
        ),
        "0 is a very small temperature": (
            "def choose(logits, temperatures, noise):\n"
            "    p = (logits / temperatures.clamp(min=1e-8)[:, None]).softmax(-1)\n"
            "    return (p / noise).argmax(-1)",
            "expected",
        ),
        "0 is 1e-30": (
            "def choose(logits, temperatures, noise):\n"
            "    p = (logits / temperatures.clamp(min=1e-30)[:, None]).softmax(-1)\n"
            "    return (p / noise).argmax(-1)",
            "small temperature",
        ),
        "0 is the smallest number": (
            "def choose(logits, temperatures, noise):\n"
            "    p = (logits / temperatures.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).softmax(-1)\n"
            "    return (p / noise).argmax(-1)",
            "expected",
        ),
        "0 is 1e-20": (
            "def choose(logits, temperatures, noise):\n"
            "    safe = torch.where(temperatures == 0, 1e-20, temperatures)\n"
            "    return ((logits / safe[:, None]).softmax(-1) / noise).argmax(-1)",
            "small temperature",
        ),
        "the smallest number, no dice": (
            "def choose(logits, temperatures, noise):\n"
            "    p = (logits / temperatures.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).softmax(-1)\n"
            "    return (p / torch.where(temperatures[:, None] == 0, 1.0, noise)).argmax(-1)",
            "logits of about 25",
        ),
        "exp overflows": (
            (
                "    probabilities = (logits / safe[:, None]).softmax(-1)",
                "    weights = (logits / safe[:, None]).exp()\n"
                "    probabilities = weights / weights.sum(-1, keepdim=True)",
            ),
            "takes off the largest",
        ),
        "bfloat16": ((".softmax(-1)", ".bfloat16().softmax(-1)"), "32 bits"),
        "half precision": ((".softmax(-1)", ".half().softmax(-1)"), "32 bits"),
        "probabilities in half precision": ((".softmax(-1)", ".softmax(-1).half()"), "32 bits"),
        "under 1e-5 is 0": (("temperatures == 0", "temperatures < 1e-5"), "only 0 is"),
        "close to 0 is 0": (
            ("temperatures == 0", "temperatures.isclose(torch.zeros(()), atol=1e-6)"),
            "only 0 is",
        ),
        "isclose": (("temperatures == 0", "temperatures.isclose(torch.zeros(()))"), "only 0 is"),
        "a very small temperature is 0": (("temperatures == 0", "temperatures < 0.01"), "only 0 is"),
        "a small temperature is 0": (("temperatures == 0", "temperatures < 0.1"), "expected"),
        "temperature lost": (("(logits / safe[:, None])", "logits"), "lost"),
        "argmin": (("(probabilities / noise).argmax(-1)", "(noise / probabilities).argmax(-1)"), "expected"),
        "other way round": ((WHERE, "return torch.where(greedy, sampled, logits.argmax(-1))"), "expected"),
        "no noise": (("(probabilities / noise).argmax(-1)", "probabilities.argmax(-1)"), "greedy now"),
        "own dice": (("(probabilities / noise).argmax(-1)", "probabilities.multinomial(1)[:, 0]"), "expected"),
        "in place": (
            ("safe = torch.where(greedy, 1.0, temperatures)", "temperatures[greedy] = 1.0\n    safe = temperatures"),
            "work on a copy",
        ),
        "int32": (
            (WHERE, WHERE + ".int()"),
            "int64",
        ),
        "softmax over rows": ((".softmax(-1)", ".softmax(0)"), "expected"),
        "any cold row is greedy": (("greedy = temperatures == 0", "greedy = temperatures < 0.5"), "expected"),
        "multiplied": (("logits / safe[:, None]", "logits * safe[:, None]"), "expected"),
    },
    "04.advance": {
        "the same, rearranged": (
            (
                "    for slot, token in tokens.items():\n"
                "        answers[owners[slot]].append(token)\n"
                "    fresh = []\n"
                "    for slot in sorted(owners):\n"
                "        if len(answers[owners[slot]]) >= limits[owners[slot]]:\n",
                "    fresh = []\n"
                "    for slot in sorted(owners):\n"
                "        if len(answers[owners[slot]]) >= limits[owners[slot]] - 1:\n",
            ),
            "expected",
        ),
        "one early": (
            ("if len(answers[owners[slot]]) >= limits", "if len(answers[owners[slot]]) + 1 >= limits"),
            "early",
        ),
        "one late": (
            ("if len(answers[owners[slot]]) >= limits", "if len(answers[owners[slot]]) > limits"),
            "for one token",
        ),
        "keeps its slot": (
            (
                "            del owners[slot]\n            if waiting:\n                owners[slot]",
                "            if waiting:\n                owners[slot]",
            ),
            "keeps its slot",
        ),
        "last come": (("owners[slot] = waiting.pop(0)", "owners[slot] = waiting.pop()"), "front"),
        "copies": (
            ("    fresh = []\n", "    fresh, owners, waiting = [], dict(owners), list(waiting)\n"),
            "in place",
        ),
        "no fresh": (("    return fresh\n", "    return []\n"), "expected"),
        "counts limits down": (
            (
                "        answers[owners[slot]].append(token)\n    fresh = []\n",
                "        answers[owners[slot]].append(token)\n        limits[owners[slot]] -= 1\n    fresh = []\n",
            ),
            "changed `limits`",
        ),
        "takes the tokens away": (
            (
                "    for slot, token in tokens.items():\n        answers[owners[slot]].append(token)\n",
                "    for slot in list(tokens):\n        answers[owners[slot]].append(tokens.pop(slot))\n",
            ),
            "changed `tokens`",
        ),
        "freed, not fresh": (
            (
                "                fresh.append(slot)",
                "            fresh.append(slot)",
            ),
            "expected",
        ),
        "token lost": (
            (
                "    for slot, token in tokens.items():\n        answers[owners[slot]].append(token)\n",
                "    for slot, token in tokens.items():\n"
                "        if len(answers[owners[slot]]) + 1 < limits[owners[slot]]:\n"
                "            answers[owners[slot]].append(token)\n",
            ),
            "expected",
        ),
        "token to the next": (
            "def advance(owners, waiting, answers, limits, tokens):\n"
            "    fresh = []\n"
            "    for slot in sorted(owners):\n"
            "        if len(answers[owners[slot]]) + 1 >= limits[owners[slot]]:\n"
            "            del owners[slot]\n"
            "            if waiting:\n"
            "                owners[slot] = waiting.pop(0)\n"
            "                fresh += [slot]\n"
            "    for slot in owners:\n"
            "        answers[owners[slot]] += [tokens[slot]]\n"
            "    return fresh",
            "given away before",
        ),
    },
}
