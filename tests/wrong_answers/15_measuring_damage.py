"""Wrong answers to exercise 15: {task: {name: (answer, text in the message)}}."""

FIRST = "max(done, start + 1)"
ROWS = "logits[first - start - 1 : -1]"
TERMS = "terms = (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0)"
KL = "terms.sum(-1).mean().item()"
AGREE = "agree.float().mean().item()"
MEANS = "means = sums[drawn].sum(1) / lengths[drawn].sum(1)"
PAIR = "blocks = (a - b).split(block)"
ENDS = "torch.tensor([0.025, 0.975])"
LOGITS = "logits = run(torch.cat((context, choice))[None])[0, len(context) - 1 : -1]"
SCORE = "-F.cross_entropy(logits, choice).item()"
TOTAL = "total, count = total + losses.sum(), count + len(losses)"
RESULT = "(total / count).exp().item()"
CHOICE = "def choice_scores(run, context, choices):\n    return "
WHOLE = "def perplexity_of(windows):\n    every = torch.cat(windows)\n    return "
NEEDED = "def text_needed():\n    return "
GOOD = {
    "alone": "(1.96 * 3.0 / 0.005) ** 2",
    "paired": "4 * (1.96 * 0.2 / 0.005) ** 2",
    "forwards": "1 + (1_000_000 - 2048) / 512",
    "questions": "(1.96 / 0.02) ** 2 * 0.10",
    "same": "0.99**100",
}


def figures(**changed: str) -> str:
    return NEEDED + "{" + ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items()) + "}"


WRONG = {
    "15.strided_losses": {
        "overlap scored again": ((FIRST, "start + 1"), "in every window"),
        "no stop": (("        if end == len(tokens):\n            break\n", "        done = 1\n"), "scored again"),
        "last stride of the first": (
            (FIRST, "max(done, start + 1, start + len(part) - stride)"),
            "all of its tokens are new",
        ),
        "row of the token itself": ((ROWS, "logits[first - start :]"), "token i + 1"),
        "the whole text": (
            "def strided_losses(run, tokens, window, stride):\n"
            "    return F.cross_entropy(run(tokens[None])[0, :-1], tokens[1:], reduction='none')",
            "at once",
        ),
        "no stride": (
            ("range(0, len(tokens), stride)", "range(0, len(tokens), window)"),
            "the stride is not used",
        ),
        "stride 1": (("range(0, len(tokens), stride)", "range(0, len(tokens))"), "not one"),
        "no context": (
            (
                "logits = run(part[None])[0]",
                "logits = run(part[max(0, first - start - 1) :][None])[0]\n"
                "            logits = torch.cat((torch.zeros(max(0, first - start - 1), logits.shape[1]), logits))",
            ),
            "lost what stands before",
        ),
        "bits": (("return torch.cat(losses)", "return torch.cat(losses) / 0.6931471805599453"), "nats"),
        "logarithms": (("return torch.cat(losses)", "return -torch.cat(losses)"), "negative"),
        "mean": (("return torch.cat(losses)", "return torch.cat(losses).mean()"), "expected"),
        "probabilities": (("return torch.cat(losses)", "return (-torch.cat(losses)).exp()"), "expected"),
        "last short window lost": (
            ("        if first < end:\n", "        if first < end and (len(part) == window or start == 0):\n"),
            "expected",
        ),
        "64 tokens of a window": (
            ("part = tokens[start : start + window]", "part = tokens[start : start + min(window, 64)]"),
            "331 tokens",
        ),
        "token 0 guessed": (("return torch.cat(losses)", "return torch.cat([torch.zeros(1), *losses])"), "expected"),
        "one token short": ((ROWS, "logits[first - start - 1 : -1][:-1]"), "expected"),
        "the example": (
            "def strided_losses(run, tokens, window, stride): return torch.zeros(9 if stride == 3 else 7)",
            "expected",
        ),
    },
    "15.distance": {
        "other way round": (
            (TERMS, "terms = (q.exp() * (q - p)).masked_fill(p == -torch.inf, 0.0)"),
            "other way round",
        ),
        "bits": ((KL, "terms.sum(-1).mean().item() / 0.6931471805599453"), "bits"),
        "sum": ((KL, "terms.sum().item()"), "a sum over tokens"),
        "mean of all": ((KL, "terms.mean().item()"), "mean over all numbers"),
        "sign": ((KL, "-terms.sum(-1).mean().item()"), "never negative"),
        "nan": ((TERMS, "terms = p.exp() * (p - q)"), "rules out adds 0"),
        "cross entropy": (
            (TERMS, "terms = -(p.exp() * q).masked_fill(p == -torch.inf, 0.0)"),
            "own entropy",
        ),
        "both ways": (
            (TERMS, "terms = ((p.exp() - q.exp()) * (p - q) / 2).masked_fill(p == -torch.inf, 0.0)"),
            "both ways",
        ),
        "count": ((AGREE, "agree.float().sum().item()"), "a count"),
        "differ": ((AGREE, "1 - agree.float().mean().item()"), "share that differ"),
        "an infinite difference": (
            (TERMS, "terms = (p.exp() * (p - q).masked_fill((p - q).isinf(), 0.0))"),
            "rules out adds 0",
        ),
        "overflow": (
            (
                "p, q = original.log_softmax(-1), changed.log_softmax(-1)",
                "p, q = (x - x.exp().sum(-1, keepdim=True).log() for x in (original, changed))",
            ),
            "expected",
        ),
        "infinity as 0": ((TERMS, "terms = (p.exp() * (p - q)).nan_to_num(0.0, 0.0, 0.0)"), "divergence infinite"),
        "guarded logarithms": (
            (TERMS, "terms = p.exp() * ((p.exp() + 1e-30) / (q.exp() + 1e-30)).log()"),
            "expected",
        ),
        "banned everywhere": (
            (TERMS, "terms = (p.exp() * (p - q))[:, (p > -torch.inf).all(0)]"),
            "not ruled out in the others",
        ),
        "rows with a ban left out": (
            (TERMS, "terms = p.exp() * (p - q)\n    terms = terms[terms.isfinite().all(-1)]"),
            "expected",
        ),
        "any of the equal ones": (
            (
                "agree = original.argmax(-1) == changed.argmax(-1)",
                "best = original.argmax(-1, keepdim=True)\n"
                "    agree = changed.gather(-1, best) == changed.amax(-1, keepdim=True)",
            ),
            "takes the first",
        ),
        "absolute": ((KL, "terms.abs().sum(-1).mean().item()"), "expected"),
        "clamped": ((KL, "terms.clamp(min=0).sum(-1).mean().item()"), "expected"),
        "squares": ((TERMS, "terms = (p.exp() - q.exp()) ** 2"), "expected"),
        "argmin": (
            (
                "agree = original.argmax(-1) == changed.argmax(-1)",
                "agree = original.argmin(-1) == changed.argmin(-1)",
            ),
            "expected",
        ),
        "positions": (
            ("agree = original.argmax(-1) == changed.argmax(-1)", "agree = original.argmax(0) == changed.argmax(0)"),
            "expected",
        ),
        "first token": ((KL, "terms.sum(-1)[0].item()"), "expected"),
        "KL only": ((f"return {KL}, {AGREE}", f"return {KL}"), "expected"),
    },
    "15.paired_interval": {
        "b - a": ((PAIR, "blocks = (b - a).split(block)"), "the difference is a - b"),
        "apart": (
            "def paired_interval(a, b, block, drawn):\n"
            "    ends = []\n"
            "    for x in (a, b):\n"
            "        parts = x.split(block)\n"
            "        sums = torch.stack([p.sum() for p in parts])\n"
            "        lengths = torch.tensor([float(len(p)) for p in parts])\n"
            "        means = sums[drawn].sum(1) / lengths[drawn].sum(1)\n"
            "        ends.append(means.quantile(torch.tensor([0.025, 0.975])).tolist())\n"
            "    return ends[0][0] - ends[1][1], ends[0][1] - ends[1][0]",
            "resampled apart",
        ),
        "ends": (
            "def paired_interval(a, b, block, drawn):\n"
            "    ends = []\n"
            "    for x in (a, b):\n"
            "        parts = x.split(block)\n"
            "        sums = torch.stack([p.sum() for p in parts])\n"
            "        lengths = torch.tensor([float(len(p)) for p in parts])\n"
            "        means = sums[drawn].sum(1) / lengths[drawn].sum(1)\n"
            "        ends.append(means.quantile(torch.tensor([0.025, 0.975])).tolist())\n"
            "    return ends[0][0] - ends[1][0], ends[0][1] - ends[1][1]",
            "ends of two intervals",
        ),
        "mean of means": ((MEANS, "means = (sums / lengths)[drawn].mean(1)"), "mean of block means"),
        "length of the text": ((MEANS, "means = sums[drawn].sum(1) / len(a)"), "another length"),
        "90 percent": ((ENDS, "torch.tensor([0.05, 0.95])"), "5 % and 95 %"),
        "swapped": (("return low, high", "return high, low"), "high comes before low"),
        "a alone": ((PAIR, "blocks = a.split(block)"), "b was not used"),
        "normal": (
            "def paired_interval(a, b, block, drawn):\n"
            "    d = a - b\n"
            "    half = 1.96 * d.std() / len(d) ** 0.5\n"
            "    return (d.mean() - half).item(), (d.mean() + half).item()",
            "resample the blocks",
        ),
        "exp": (("return low, high", "return torch.tensor([low, high]).exp().tolist()"), "without exp"),
        "single tokens": (
            (PAIR, "blocks = (a - b).split(1)\n    drawn = drawn % len(blocks)"),
            "single tokens",
        ),
        "absolute": ((PAIR, "blocks = (a - b).abs().split(block)"), "able to cancel"),
        "sums": ((MEANS, "means = sums[drawn].sum(1)"), "expected"),
        "extremes": ((ENDS, "torch.tensor([0.0, 1.0])"), "expected"),
        "not drawn": ((MEANS, "means = sums / lengths"), "expected"),
        "half of the samples": ((MEANS, "drawn = drawn[: (len(drawn) + 1) // 2]\n    " + MEANS), "expected"),
        "columns": ((MEANS, "means = sums[drawn].sum(0) / lengths[drawn].sum(0)"), "expected"),
        "short block dropped": (
            (
                "    lengths =",
                "    sums = sums if len(a) % block == 0 else torch.cat((sums[:-1], sums[:1]))\n    lengths =",
            ),
            "expected",
        ),
        "the example": ("def paired_interval(a, b, block, drawn): return 0.55, 2.45", "expected"),
    },
    "15.choice_scores": {
        "sum": ((SCORE, "-F.cross_entropy(logits, choice, reduction='sum').item()"), "a sum"),
        "context in the mean": (
            CHOICE + "[-F.cross_entropy(run(ids[None])[0, :-1], ids[1:]).item()\n"
            "            for ids in (torch.cat((context, c)) for c in choices)]",
            "context's own tokens",
        ),
        "both lengths": (
            (SCORE, "-F.cross_entropy(logits, choice, reduction='sum').item() / (len(context) + len(choice))"),
            "length of context and choice",
        ),
        "row late": ((LOGITS, LOGITS.replace("len(context) - 1 : -1", "len(context) :")), "context's last row"),
        "no first token": (
            CHOICE + "[-F.cross_entropy(run(torch.cat((context, c))[None])[0, len(context) : -1], c[1:]).item()\n"
            "            if len(c) > 1 else 0.0 for c in choices]",
            "first token of each choice",
        ),
        "no context": (
            CHOICE + "[-F.cross_entropy(run(c[None])[0, :-1], c[1:]).item() for c in choices]",
            "without the context",
        ),
        "sign": ((SCORE, SCORE[1:]), "log-likelihoods, at most 0"),
        "probabilities": (
            ("return scores", "return torch.tensor(scores).exp().tolist()"),
            "place of their logarithms",
        ),
        "mean of probabilities": (
            (SCORE, "logits.softmax(-1).gather(-1, choice[:, None]).mean().item()"),
            "mean of probabilities",
        ),
        "first only": ((SCORE, "-F.cross_entropy(logits[:1], choice[:1]).item()"), "only the first token"),
        "last only": ((SCORE, "-F.cross_entropy(logits[-1:], choice[-1:]).item()"), "only the last token"),
        "the best": (("return scores", "return max(range(len(scores)), key=scores.__getitem__)"), "expected"),
        "four choices": (("return scores", "return scores[:4]"), "expected"),
        "128 tokens of context": (
            ("    scores = []\n    for choice", "    scores, context = [], context[:128]\n    for choice"),
            "expected",
        ),
        "logits": ((SCORE, "logits.gather(-1, choice[:, None]).mean().item()"), "expected"),
        "from the first row": ((LOGITS, LOGITS.replace("len(context) - 1 : -1", ": len(choice)")), "expected"),
        "all in one text": (
            "def choice_scores(run, context, choices):\n"
            "    scores = []\n"
            "    for choice in choices:\n"
            "        logits = run(torch.cat((context, choice))[None])[0, len(context) - 1 : -1]\n"
            "        scores.append(-F.cross_entropy(logits, choice).item())\n"
            "        context = torch.cat((context, choice))\n"
            "    return scores",
            "expected",
        ),
        "normalised over choices": (
            ("return scores", "return torch.tensor(scores).softmax(-1).tolist()"),
            "expected",
        ),
    },
    "15.perplexity_of": {
        "the bug, rewritten": (
            "def perplexity_of(windows): return torch.stack([x.mean() for x in windows]).mean().exp().item()",
            "mean of the windows' means",
        ),
        "mean of perplexities": (
            "def perplexity_of(windows): return torch.stack([x.mean().exp() for x in windows]).mean().item()",
            "windows' perplexities",
        ),
        "weighted perplexities": (
            ("total + losses.sum()", "total + losses.mean().exp() * len(losses)"),
            "expected",
        ),
        "weighted, right exp": (
            "def perplexity_of(windows):\n"
            "    return (sum(x.mean().exp() * len(x) for x in windows) / sum(map(len, windows))).item()",
            "weighted by their tokens",
        ),
        "exp of tokens": (WHOLE + "every.exp().mean().item()", "single losses"),
        "last left out": (
            "def perplexity_of(windows):\n"
            "    kept = windows[:-1] if len(windows) > 1 else windows\n"
            "    return torch.cat(kept).mean().exp().item()",
            "last window",
        ),
        "full only": (
            "def perplexity_of(windows):\n"
            "    most = max(map(len, windows))\n"
            "    return torch.cat([x for x in windows if len(x) == most]).mean().exp().item()",
            "only full windows",
        ),
        "64 windows": (("for losses in windows:", "for losses in windows[:64]:"), "300 windows"),
        "loss": ((RESULT, "(total / count).item()"), "mean loss"),
        "power of two": ((RESULT, "2 ** (total / count).item()"), "exp belongs to nats"),
        "median": (WHOLE + "every.median().exp().item()", "median"),
        "count of windows": ((TOTAL, "total, count = total + losses.sum(), count + 1"), "expected"),
        "longest": ((RESULT, "(total / (len(windows) * max(map(len, windows)))).exp().item()"), "expected"),
        "shifted weights": (
            "def perplexity_of(windows):\n"
            "    pairs = zip(windows, [*windows[1:], windows[0]])\n"
            "    return (sum(x.mean() * len(y) for x, y in pairs) / sum(map(len, windows))).exp().item()",
            "wrong length",
        ),
        "the example": ("def perplexity_of(windows): return 4.4817", "expected"),
    },
    "15.text_needed": {
        "no 1.96": (figures(alone="(3.0 / 0.005) ** 2"), "the factor is missing"),
        "no square": (figures(alone="1.96 * 3.0 / 0.005"), "the square is missing"),
        "percent": (figures(alone="(1.96 * 3.0 / 0.5) ** 2"), "0.5 % is 0.005"),
        "half width": (figures(alone="(1.96 * 3.0 / 0.0025) ** 2"), "half of the interval"),
        "no neighbours": (figures(paired="(1.96 * 0.2 / 0.005) ** 2"), "factor 4 for neighbours"),
        "four standard deviations": (figures(paired="(4 * 1.96 * 0.2 / 0.005) ** 2"), "it is the variance"),
        "fewer tokens": (figures(paired="(1.96 * 0.2 / 0.005) ** 2 / 4"), "more tokens are needed"),
        "not the pairs'": (figures(paired="4 * (1.96 * 3.0 / 0.005) ** 2"), "standard deviation, 0.2"),
        "no overlap": (figures(forwards="1_000_000 / 2048"), "without overlap"),
        "stride 1": (figures(forwards="1_000_000 - 2048"), "stride 1"),
        "tokens read": (figures(forwards="2048 * (1 + (1_000_000 - 2048) / 512)"), "not windows"),
        "flips squared": (figures(questions="(1.96 * 0.10 / 0.02) ** 2"), "is the root"),
        "unpaired": (figures(questions="(1.96 / 0.02) ** 2 * 0.25"), "unpaired"),
        "all flip": (figures(questions="(1.96 / 0.02) ** 2"), "as if it flipped"),
        "one token": (figures(same="0.99"), "all of its tokens"),
        "changed": (figures(same="1 - 0.99**100"), "share that change"),
        "linear": (figures(same="1 - 100 * 0.01"), "not linear"),
        "percentage": (figures(same="100 * 0.99**100"), "percentage"),
        "text": (figures(alone="'1.4 million'"), "expected"),
        "a key short": (NEEDED + "{'alone': (1.96 * 3.0 / 0.005) ** 2}", "KeyError"),
    },
}
