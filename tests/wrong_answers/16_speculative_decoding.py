"""Plausible wrong answers to exercise 16, each with text that its message must contain."""

A = "    a = float(torch.minimum(p, q).sum())\n"
LEFT = "    left = (p - q).clamp(min=0)  # [vocab]\n    total = left.sum()\n"
SCALED = "left / total if total > 0 else p"
KEEP = "uniforms[i] * q[i, x] >= p[i, x]"
LAW = "law = acceptance_and_residual(p[i], q[i])[1]"
REPLACE = "    replacement = left / left.sum() if left.sum() > 0 else p\n"
WHILE = "    while keep < min(len(held), len(text) - 1) and held[keep] == text[keep]:\n"
GAINS = "sum(a**i for i in range(k + 1)) / (1 + k * (c + v))"

WRONG = {
    "16.residual": {
        "not scaled": ((SCALED, "left"), "not scaled"),
        "mirrored": ((LEFT, LEFT.replace("(p - q)", "(q - p)")), "what is refused"),
        "p": ((SCALED, "p"), "not p"),
        "negative parts": ((LEFT, LEFT.replace(".clamp(min=0)", "")), "expected"),
        "masked": ((LEFT, "    left = p * (p > q)\n    total = left.sum()\n"), "do not mask"),
        "overlap": ((A, "    a = float((p * q).sum())\n"), "not sum p q"),
        "refusal": ((A, "    a = 1 - float(torch.minimum(p, q).sum())\n"), "refusal"),
        "mean of ratios": ((A, "    a = float((p / q).nan_to_num(posinf=1.0).clamp(max=1).mean())\n"), "expected"),
        "0 / 0": ((A, "    a = float((q * (p / q).clamp(max=1)).sum())\n"), "divides by nothing"),
        "equal distributions": ((SCALED, "left / total"), "p equals q"),
        "epsilon": ((SCALED, "left / (total + 1e-3)"), "expected"),
        "nearly equal": ((SCALED, "left / total if total > 1e-3 else p"), "not p"),
        "only a": ((f"return a, {SCALED}", "return a"), "expected"),
    },
    "16.verify": {
        "from p": ((LAW, "law = p[i]"), "not from p"),
        "from the last row": ((LAW, "law = p[len(tokens)]"), "place of the refusal"),
        "upside down": ((KEEP, "uniforms[i] * p[i, x] >= q[i, x]"), "upside down"),
        "with probability p": ((KEEP, "uniforms[i] >= p[i, x]"), "min(1, p(x) / q(x))"),
        "p below q": ((KEEP, "p[i, x] < q[i, x]"), "the uniform number decides"),
        "one row": ((LAW, "law = acceptance_and_residual(p[0], q[0])[1]"), "expected"),
        "the row after": ((LAW, "law = p[i + 1]"), "expected"),
        "mirrored": ((LAW, "law = acceptance_and_residual(q[i], p[i])[1]"), "(q - p)+"),
        "no bonus": (
            ("        law = p[len(tokens)]\n", "        return said\n"),
            "bonus is missing",
        ),
        "goes on": (
            "def verify(p, q, tokens, uniforms):\n"
            "    said = []\n"
            "    for i, x in enumerate(tokens):\n"
            "        if uniforms[i] * q[i, x] >= p[i, x]:\n"
            "            law = acceptance_and_residual(p[i], q[i])[1]\n"
            "            x = int((law.cumsum(0) <= uniforms[-1]).sum())\n"
            "        said.append(x)\n"
            "    return [*said, int((p[-1].cumsum(0) <= uniforms[-1]).sum())]",
            "did not happen",
        ),
        "equality is kept": ((KEEP, "uniforms[i] * q[i, x] > p[i, x]"), "is refused"),
        "the likeliest": (("int((law.cumsum(0) <= uniforms[len(tokens)]).sum())", "int(law.argmax())"), "expected"),
        "another uniform": (("<= uniforms[len(tokens)]", "<= uniforms[0]"), "expected"),
        "impossible at 0": (("(law.cumsum(0) <= uniforms", "(law.cumsum(0) < uniforms"), "expected"),
        "a guarded ratio": ((KEEP, "uniforms[i] >= p[i, x] / (q[i, x] + 1e-3)"), "expected"),
        "the refused token too": (
            (
                "            break\n        said.append(x)\n",
                "            said.append(x)\n            break\n        said.append(x)\n",
            ),
            "expected",
        ),
    },
    "16.law_of_first": {
        "p": ((REPLACE, "    return p\n"), "describe the verifier"),
        "from p still": ((REPLACE, "    replacement = p.clone()\n"), "still drawn from p"),
        "not scaled": ((REPLACE, "    replacement = left\n"), "scaled"),
        "mirrored": (
            (
                REPLACE,
                "    left = (q - p).clamp(min=0)\n    replacement = left / left.sum() if left.sum() > 0 else p\n",
            ),
            "what was refused",
        ),
        "equal distributions": ((REPLACE, "    replacement = left / left.sum()\n"), "nan"),
        "nothing comes back": (("    return kept + refused * replacement\n", "    return kept\n"), "less than 1"),
        "always": (("kept + refused * replacement", "kept + replacement"), "as often"),
        "what is not kept of p": (
            (REPLACE, "    left = (p - q * keep).clamp(min=0)\n    replacement = left / left.sum()\n"),
            "expected",
        ),
        "by its own share": (("    refused = (q * (1 - keep)).sum()\n", "    refused = 1 - keep\n"), "expected"),
        "refused by p": (
            ("    refused = (q * (1 - keep)).sum()\n", "    refused = (p * (1 - keep)).sum()\n"),
            "expected",
        ),
        "its own rule": (
            ("    kept = q * keep  # [vocab]\n", "    kept = torch.minimum(p, q)\n"),
            "expected",
        ),
    },
    "16.catch_up": {
        "nothing to feed": ((WHILE, WHILE.replace(" - 1)", ")")), "last token must be fed"),
        "the bonus alone": (("return keep, text[keep:]", "return keep, text[-1:]"), "hole"),
        "lengths": ((WHILE, "    while keep < min(len(held), len(text) - 1):\n"), "not lengths"),
        "all again": (("return keep, text[keep:]", "return 0, text"), "may stay"),
        "equal places": (
            "def catch_up(held, text):\n"
            "    keep = sum(x == y for x, y in zip(held, text[:-1]))\n"
            "    return keep, text[keep:]",
            "only the common beginning",
        ),
        "two tokens": (
            (
                "    return keep, text[keep:]\n",
                "    keep = max(0, min(keep, len(text) - 2))\n    return keep, text[keep:]\n",
            ),
            "expected",
        ),
        "one step back": (
            "def catch_up(held, text):\n"
            "    keep = min(len(held), len(text) - 1)\n"
            "    keep -= held[:keep] != text[:keep]\n"
            "    return keep, text[keep:]",
            "expected",
        ),
        "the last six only": (
            (
                "    keep = 0\n",
                "    keep = max(0, min(len(held), len(text) - 1) - 6)\n",
            ),
            "expected",
        ),
        "an empty cache": (
            ("    keep = 0\n", "    keep = 0 if held else len(text) - 1\n"),
            "lacks the whole text",
        ),
        "what is dropped": (("return keep, text[keep:]", "return keep, held[keep:]"), "expected"),
    },
    "16.best_length": {
        "no bonus": ((GAINS, "(sum(a**i for i in range(1, k + 1)) if k else 1) / (1 + k * (c + v))"), "a^0"),
        "a times k": ((GAINS, "(1 + a * k) / (1 + k * (c + v))"), "all before it"),
        "all or nothing": ((GAINS, "(1 + k * a**k) / (1 + k * (c + v))"), "kept in part"),
        "free drafts": ((GAINS, "sum(a**i for i in range(k + 1)) / (1 + k * v)"), "cost of drafting"),
        "no v": ((GAINS, "sum(a**i for i in range(k + 1)) / (1 + k * c)"), "v is missing"),
        "v once": ((GAINS, "sum(a**i for i in range(k + 1)) / (1 + k * c + v)"), "each drafted token"),
        "never 0": (
            "def best_length(a, c, v, most):\n"
            "    gains = [sum(a**i for i in range(k + 1)) / (1 + k * (c + v)) for k in range(1, most + 1)]\n"
            "    return gains.index(max(gains)) + 1, max(gains)",
            "speed-up 1",
        ),
        "closed form at a = 1": ((GAINS, "(1 - a ** (k + 1)) / (1 - a) / (1 + k * (c + v))"), "raised"),
        "the largest of equals": (
            "def best_length(a, c, v, most):\n"
            "    gains = [sum(a**i for i in range(k + 1)) / (1 + k * (c + v)) for k in range(most + 1)]\n"
            "    return max(k for k in range(most + 1) if gains[k] == max(gains)), max(gains)",
            "expected",
        ),
        "most is left out": (("for k in range(most + 1)]", "for k in range(most)]"), "expected"),
        "tokens, not speed": (
            ("max(gains)\n", "sum(a**i for i in range(gains.index(max(gains)) + 1))\n"),
            "expected",
        ),
    },
}
