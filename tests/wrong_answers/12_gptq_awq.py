"""Wrong answers to exercise 12: {task: {name: (answer, text in the message)}}."""

MOMENTS = "def moments(batches):\n    rows = [x.flatten(0, 1) for x in batches]\n    "
MEAN = "return tokens.T @ tokens / len(tokens), tokens.abs().mean(0)"
NEW = "new[:, j + 1 :] -= torch.outer(rounded - w[:, j], change)"
SOLVE = "change = torch.linalg.solve(h[j + 1 :, j + 1 :], h[j + 1 :, j])"
DAMP = "damped = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)"
CLAMP = ".round().clamp(-top, top)"
STEP = "        w = compensate(w, damped, j, code * scale)\n"
SCALE = "s = x.abs().mean(0) ** alpha"
ERROR = "error = ((w - q) @ x.T).square().sum().item()"
ORDER = "order = h.diagonal().argsort(descending=True)"
BACK = "return codes[:, order.argsort()]"
SORTED = "codes = sweep(w[:, order], h[order][:, order], scale, bits)"
COSTS = "def costs():\n    n, m = 4096, 11008\n    weights = 32 * (4 * n**2 + 3 * n * m)\n    return "
GOOD = {
    "hessians": "4 * (3 * n**2 + m**2)",
    "activations": "128 * 2048 * 2 * (3 * n + m)",
    "factor": "32 / 3 * (3 * n**3 + m**3)",
    "packed": "weights * (4 + 20 / 128) / 8",
}


def figures(**changed: str) -> str:
    return COSTS + "{" + ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items()) + "}"


WRONG = {
    "12.moments": {
        "mean of means": (
            MOMENTS
            + "h = sum(x.T @ x / len(x) for x in rows) / len(rows)\n"
            + "    return h, sum(x.abs().mean(0) for x in rows) / len(rows)",
            "few tokens weighs as much",
        ),
        "sums": ((MEAN, "return tokens.T @ tokens, tokens.abs().sum(0)"), "divide by the number of tokens"),
        "by samples": (
            MOMENTS
            + "n = sum(len(x) for x in batches)\n"
            + "    return sum(x.T @ x for x in rows) / n, sum(x.abs().sum(0) for x in rows) / n",
            "number of samples",
        ),
        "by batches": (
            MOMENTS
            + "n = len(batches)\n"
            + "    return sum(x.T @ x for x in rows) / n, sum(x.abs().sum(0) for x in rows) / n",
            "not of tokens",
        ),
        "covariance": ((MEAN, "return tokens.T.cov(correction=0), tokens.abs().mean(0)"), "covariance"),
        "no abs": ((MEAN, "return tokens.T @ tokens / len(tokens), tokens.mean(0)"), "signs cancel"),
        "root mean square": (
            (MEAN, "return tokens.T @ tokens / len(tokens), tokens.square().mean(0).sqrt()"),
            "root of the mean square",
        ),
        "last batch": (("for x in batches])", "for x in batches[-1:]])"), "last batch"),
        "twice": ((MEAN, "return 2 * tokens.T @ tokens / len(tokens), tokens.abs().mean(0)"), "factor 2"),
        "the other way": ((MEAN, "return tokens @ tokens.T / len(tokens), tokens.abs().mean(0)"), "expected"),
        "absolute moments": (
            (MEAN, "return tokens.abs().T @ tokens.abs() / len(tokens), tokens.abs().mean(0)"),
            "expected",
        ),
        "H only": ((MEAN, "return tokens.T @ tokens / len(tokens)"), "expected"),
    },
    "12.compensate": {
        "sign": ((NEW, NEW.replace("-=", "+=")), "the sign"),
        "diagonal": (
            (SOLVE, "change = h[j + 1 :, j] / h.diagonal()[j + 1 :]"),
            "diagonal alone",
        ),
        "no update": ((NEW, "pass"), "no later column makes up"),
        "all columns move": (
            "def compensate(w, h, j, rounded):\n"
            "    new, others = w.clone(), [k for k in range(len(h)) if k != j]\n"
            "    change = torch.linalg.solve(h[others][:, others], h[others, j])\n"
            "    new[:, others] -= torch.outer(rounded - w[:, j], change)\n"
            "    new[:, j] = rounded\n"
            "    return new",
            "they may not move",
        ),
        "whole inverse": (
            (SOLVE, "inverse = torch.linalg.inv(h)\n    change = -inverse[j, j + 1 :] / inverse[j, j]"),
            "only H from column j on",
        ),
        "old column": (("    new[:, j] = rounded\n", ""), "keeps its old value"),
        "next only": (
            (
                SOLVE,
                "change = torch.zeros(len(h) - j - 1)\n"
                "    if j + 1 < len(h):\n"
                "        change[0] = h[j + 1, j] / h[j + 1, j + 1]",
            ),
            "only the next column",
        ),
        "H itself": ((SOLVE, "change = h[j + 1 :, j]"), "place of its inverse"),
        "changes its input": (("new = w.clone()", "new = w"), "in place"),
        "rounds by itself": (
            ("    new[:, j] = rounded\n", "    rounded = w[:, j].round()\n    new[:, j] = rounded\n"),
            "once more",
        ),
        "always column 0": (
            "def compensate(w, h, j, rounded):\n"
            "    new = w.clone()\n"
            "    new[:, j] = rounded\n"
            "    new[:, j + 1 :] -= torch.outer(rounded - w[:, j], torch.linalg.solve(h[1:, 1:], h[1:, 0])[j:])\n"
            "    return new",
            "expected",
        ),
        "damped": (
            (SOLVE, SOLVE.replace("h[j + 1 :, j + 1 :]", "h[j + 1 :, j + 1 :] + 0.1 * torch.eye(len(h) - j - 1)")),
            "expected",
        ),
        "the example": ("def compensate(w, h, j, rounded):\n    return torch.tensor([[0.0, 1.5]])", "expected"),
    },
    "12.sweep": {
        "to the nearest": ((STEP, ""), "rounding to the nearest"),
        "no clamp": ((CLAMP, ".round()"), "clamp is missing"),
        "range": (("top, codes = 2 ** (bits - 1) - 1,", "top, codes = 2 ** (bits - 1),"), "symmetric codes end"),
        "no damping": ((DAMP, "damped = h + 1e-7 * torch.eye(len(h))"), "damping is missing"),
        "damping everywhere": ((DAMP, "damped = h + damping * h.diagonal().mean()"), "diagonal only"),
        "absolute damping": ((DAMP, "damped = h + damping * torch.eye(len(h))"), "share of the mean"),
        "sign": (
            (
                STEP,
                "        new = compensate(w, damped, j, code * scale)\n"
                "        w = torch.cat((new[:, : j + 1], 2 * w[:, j + 1 :] - new[:, j + 1 :]), 1)\n",
            ),
            "errors add up",
        ),
        "old column": (
            ("code = (w[:, j] / scale)", "start = w if j == 0 else start\n        code = (start[:, j] / scale)"),
            "rounding to the nearest",
        ),
        "codes, not weights": ((STEP, STEP.replace("code * scale", "code")), "expected"),
        "not int8": (("dtype=torch.int8)", "dtype=torch.int32)"), "int8"),
        "whole inverse": (
            (
                STEP,
                "        inverse = torch.linalg.inv(damped)\n"
                "        error = w[:, j] - code * scale\n"
                "        w = w.clone()\n"
                "        w[:, j + 1 :] -= torch.outer(error, inverse[j, j + 1 :] / inverse[j, j])\n",
            ),
            "what is left of it",
        ),
        "next only": (
            (
                STEP,
                "        error = w[:, j] - code * scale\n"
                "        w = w.clone()\n"
                "        if j + 1 < len(h):\n"
                "            w[:, j + 1] += error * damped[j, j + 1] / damped[j + 1, j + 1]\n",
            ),
            "all later ones",
        ),
        "from the right": (("for j in range(w.shape[1]):", "for j in reversed(range(w.shape[1])):"), "expected"),
        "the clamp comes after the update": (
            (
                "codes[:, j] = code.to(torch.int8)",
                "code, codes[:, j] = (w[:, j] / scale).round(), code.to(torch.int8)",
            ),
            "expected",
        ),
        "the trace": ((DAMP, DAMP.replace("mean()", "sum()")), "expected"),
        "the diagonal's own share": ((DAMP, "damped = h + damping * torch.diag(h.diagonal())"), "expected"),
        "damped twice": (
            (STEP, STEP.replace("damped, j", "damped + damping * h.diagonal().mean() * torch.eye(len(h)), j")),
            "expected",
        ),
        "floor": ((CLAMP, ".floor().clamp(-top, top)"), "expected"),
    },
    "12.choose_alpha": {
        "not undone": (("q = quantise(w * s) / s", "q = quantise(w * s)"), "not undone"),
        "weight error": ((ERROR, "error = (w - q).square().sum().item()"), "error of the weights"),
        "root mean square": ((SCALE, "s = x.square().mean(0).sqrt() ** alpha"), "not the root"),
        "maximum": ((SCALE, "s = x.abs().amax(0) ** alpha"), "largest |x|"),
        "signed mean": ((SCALE, "s = x.mean(0).abs() ** alpha"), "with its sign"),
        "worst": (("error < best[0]", "error > best[0]"), "largest error"),
        "upside down": ((SCALE, "s = x.abs().mean(0) ** -alpha"), "upside down"),
        "a factor": ((SCALE, "s = x.abs().mean(0) * alpha + 1e-9"), "exponent"),
        "plain rounding": ("def choose_alpha(w, x, quantise, alphas): return 0.0, quantise(w)", "every alpha"),
        "first": ((ERROR, "error = 0.0"), "first alpha"),
        "last": (("error < best[0]", "True"), "last alpha"),
        "signs cancel": ((ERROR, "error = ((w - q) @ x.T).sum().square().item()"), "signs cancel"),
        "scaled input missing": ((ERROR, "error = ((w - q * s) @ x.T).square().sum().item()"), "expected"),
        "rows": ((SCALE, "s = w.abs().mean(0) ** alpha"), "expected"),
        "absolute error": ((ERROR, "error = ((w - q) @ x.T).abs().sum().item()"), "expected"),
        "half the tokens": ((ERROR, "error = ((w - q) @ x[::2].T).square().sum().item()"), "expected"),
        "q only": (("return best[1], best[2]", "return best[2]"), "expected"),
        "stops at the first rise": (
            (
                "        if best is None or",
                "        if best is not None and error > best[0]:\n            break\n        if best is None or",
            ),
            "try every one",
        ),
        "mean of powers": ((SCALE, "s = (x.abs() ** alpha).mean(0)"), "expected"),
        "diagonal of H": ((ERROR, "error = ((w - q).square() * x.square().mean(0)).sum().item()"), "expected"),
        "relative error of each token": (
            (ERROR, "error = (((w - q) @ x.T).square().sum(0) / (w @ x.T).square().sum(0)).sum().item()"),
            "expected",
        ),
    },
    "12.with_act_order": {
        "not undone": ((BACK, "return codes"), "still in the sorted order"),
        "no act-order": (
            "def with_act_order(w, h, scale, bits, sweep): return sweep(w, h, scale, bits)",
            "no act-order at all",
        ),
        "rising": ((ORDER, "order = h.diagonal().argsort()"), "quiet channels first"),
        "H as it was": ((SORTED, "codes = sweep(w[:, order], h, scale, bits)"), "rows and columns"),
        "H rows only": ((SORTED, "codes = sweep(w[:, order], h[order], scale, bits)"), "rows only"),
        "flipped": ((BACK, "return codes.flip(1)"), "reversal"),
        "the bug again": ((BACK, "back = order.clone()\n    return codes[:, back]"), "not its inverse"),
        "weights as they were": ((SORTED, "codes = sweep(w, h[order][:, order], scale, bits)"), "expected"),
        "three times": ((BACK, "return codes[:, order][:, order]"), "expected"),
        "by row sums of H": ((ORDER, "order = h.sum(0).argsort(descending=True)"), "expected"),
        "H columns only": ((SORTED, "codes = sweep(w[:, order], h[:, order], scale, bits)"), "expected"),
        "by column size": ((ORDER, "order = w.square().sum(0).argsort(descending=True)"), "expected"),
    },
    "12.costs": {
        "seven H": (figures(hessians="4 * (6 * n**2 + m**2)"), "share theirs"),
        "down is narrow": (figures(hessians="16 * n**2"), "as wide as its inputs"),
        "H in 16 bits": (figures(hessians="2 * (3 * n**2 + m**2)"), "float32"),
        "all blocks": (figures(hessians="128 * (3 * n**2 + m**2)"), "one block at a time"),
        "float32 inputs": (figures(activations="128 * 2048 * 4 * (3 * n + m)"), "16 bits were asked for"),
        "one sample": (figures(activations="2048 * 2 * (3 * n + m)"), "one sample"),
        "all inputs": (figures(activations="128 * 2048 * 2 * (6 * n + m)"), "not seven"),
        "one block's factors": (figures(factor="(3 * n**3 + m**3) / 3"), "32 are asked for"),
        "n cubed": (figures(factor="32 * (3 * n**3 + m**3)"), "not n^3"),
        "codes only": (figures(packed="weights / 2"), "scales and zero points are missing"),
        "bits": (figures(packed="weights * (4 + 20 / 128)"), "not bytes"),
        "no zero points": (figures(packed="weights * (4 + 16 / 128) / 8"), "zero points are missing"),
        "text": (figures(packed="'3.4 GB'"), "expected"),
        "a key short": (COSTS + "{'hessians': 4 * (3 * n**2 + m**2)}", "KeyError"),
    },
}
