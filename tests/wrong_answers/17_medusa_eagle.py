"""Plausible wrong answers to exercise 17, each with text that its message must contain."""

COPY = "        mask[i + 1] = mask[parent + 1]\n"
FOUND = "        found = [i for i, parent in enumerate(parents) if parent == at and tokens[i] == out[-1]]\n"
MOVE = "        memory[known + place] = memory[known + node]\n"
CUT = "    del memory[known + len(path) :]\n"
CHILDREN = "            open_ |= {(*path, r): value * a for r, a in enumerate(accuracy[len(path)])}\n"
GOOD = {
    "heads_mb": "heads / 1e6",
    "own_vocabulary_mb": "(heads + 5 * 4096 * 128256 * 2) / 1e6",
    "tokens_per_call": "2.2",
    "batch": "800 / 3.35 / 26",
}


def figures(**changed: str) -> str:
    body = ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items())
    return f"def estimates():\n    heads = 5 * (4096 * 4096 + 4096) * 2\n    return {{{body}}}"


WRONG = {
    "17.tree_mask": {
        "causal": ((COPY, "        mask[i + 1, : stored + 1 + i] = True\n"), "causal mask"),
        "parent only": (
            (COPY, COPY.replace("mask[parent + 1]", "mask[0]") + "        mask[i + 1, stored + 1 + parent] = True\n"),
            "ancestors above",
        ),
        "not itself": (("        mask[i + 1, stored + 1 + i] = True\n", ""), "expected"),
        "not itself, but ancestors": (
            "right = tree_mask\ndef tree_mask(parents, stored):\n    mask = right(parents, stored)\n"
            "    for i in range(len(parents)):\n        mask[i + 1, stored + 1 + i] = False\n    return mask",
            "see itself",
        ),
        "transposed": (
            "right = tree_mask\ndef tree_mask(parents, stored):\n    mask = right(parents, stored)\n"
            "    mask[1:, stored + 1 :] = mask[1:, stored + 1 :].T.clone()\n    return mask",
            "swapped",
        ),
        "siblings too": (
            "right = tree_mask\ndef tree_mask(parents, stored):\n    mask = right(parents, stored)\n"
            "    for i, p in enumerate(parents):\n        for j, q in enumerate(parents):\n"
            "            if p == q:\n                mask[i + 1, stored + 1 + j] = True\n    return mask",
            "siblings",
        ),
        "inverted": ((" return mask", " return ~mask"), "may NOT look"),
        "floats": ((" return mask", " return mask.float()"), "booleans"),
        "no stored columns": ((" return mask", " return mask[:, stored:]"), "stored tokens have columns"),
        "the last known token has no column": (
            ("mask[i + 1, stored + 1 + i] = True", "mask[i + 1, stored + i] = True"),
            "expected",
        ),
        "64 nodes at most": ((COPY, "        if i > 63:\n            break\n" + COPY), "expected"),
        "13 levels at most": (
            "def tree_mask(parents, stored):\n    n = len(parents)\n"
            "    mask = torch.zeros(1 + n, stored + 1 + n, dtype=torch.bool)\n    mask[:, : stored + 1] = True\n"
            "    for i in range(n):\n        node = i\n        for _ in range(13):\n            if node >= 0:\n"
            "                mask[i + 1, stored + 1 + node] = True\n                node = parents[node]\n"
            "    return mask",
            "expected",
        ),
        "uint8 bits": ((" return mask", " return mask.to(torch.uint8)"), "expected"),
    },
    "17.accept": {
        "no bonus": (("return nodes, out", "return nodes, out[:-1]"), "comes out too"),
        "anywhere in the tree": ((FOUND, FOUND.replace("parent == at", "i > at")), "no path"),
        "said of the node": (("said[at + 1]", "said[max(at, 0)]"), "after node i"),
        "first child only": (
            (
                FOUND,
                "        found = [i for i, parent in enumerate(parents) if parent == at][:1]\n"
                "        found = [i for i in found if tokens[i] == out[-1]]\n",
            ),
            "all siblings",
        ),
        "rows": (("return nodes, out", "return [n + 1 for n in nodes], out"), "rows are returned"),
        "tokens for nodes": (
            ("return nodes, out", "return [tokens[n] for n in nodes], out"),
            "not the nodes' numbers",
        ),
        "chains only": ((FOUND, FOUND.replace("parent == at", "parent == at and i == at + 1")), "expected"),
        "a cousin of the same depth": (
            "def accept(tokens, parents, said):\n    depth, at = [], {}\n"
            "    for i, parent in enumerate(parents):\n"
            "        depth.append(0 if parent < 0 else depth[parent] + 1)\n        at[depth[i], tokens[i]] = i\n"
            "    nodes, out = [], [said[0]]\n    while (len(nodes), out[-1]) in at:\n"
            "        nodes.append(at[len(nodes), out[-1]])\n        out.append(said[nodes[-1] + 1])\n"
            "    return nodes, out",
            "expected",
        ),
        "4 at most": (("        if not found:", "        if not found or len(nodes) > 3:"), "expected"),
        "12 at most": (("        if not found:", "        if not found or len(nodes) > 11:"), "expected"),
        "one level": (("        nodes.append(at)\n", "        return [at], [*out, said[at + 1]]\n"), "expected"),
        "out twice": (("return nodes, out", "return out, nodes"), "expected"),
    },
    "17.best_tree": {
        "chain": (
            "def best_tree(accuracy, count):\n    return [(0,) * d for d in range(1, min(count, len(accuracy)) + 1)]",
            "siblings are candidates",
        ),
        "breadth first": (("max(open_, key=open_.get)", "min(open_, key=lambda p: (len(p), -open_[p]))"), "breadth"),
        "own accuracy": (
            (
                "    open_, chosen =",
                "    import itertools\n"
                "    every = [p for d in range(1, len(accuracy) + 1)\n"
                "             for p in itertools.product(*(range(len(r)) for r in accuracy[:d]))]\n"
                "    every.sort(key=lambda p: (-accuracy[len(p) - 1][p[-1]], len(p)))\n"
                "    return every[:count]\n"
                "    open_, chosen =",
            ),
            "whole product",
        ),
        "children by their own accuracy": ((CHILDREN, CHILDREN.replace("value * a", "a")), "likelier path"),
        "first row for all": ((CHILDREN, CHILDREN.replace("accuracy[len(path)]", "accuracy[0]")), "accuracy[0]"),
        "no children": ((CHILDREN, "            pass\n"), "raised"),
        "only the first child": (
            (CHILDREN, CHILDREN.replace("accuracy[len(path)])", "accuracy[len(path)][:1])")),
            "likelier",
        ),
        "one more": (("len(chosen) < count", "len(chosen) <= count"), "paths, got"),
        "least likely": (("max(open_", "min(open_"), "likelier path"),
        "sums": ((CHILDREN, CHILDREN.replace("value * a", "value + a")), "likelier path"),
        "without parents": (("    return chosen", "    return [p for p in chosen if len(p) > 1]"), "paths"),
        "the parent's row": ((CHILDREN, CHILDREN.replace("[len(path)]", "[len(path) - 1]")), "parent's depth"),
        "lists in lists": (("    return chosen", "    return [[list(path)] for path in chosen]"), "tuples of ranks"),
        "text": (("    return chosen", "    return ['0', '1', '00'][:count]"), "tuples of ranks"),
        "values with the paths": (("    return chosen", "    return [(0.5, p) for p in chosen]"), "tuples of ranks"),
        "takes from accuracy": (
            ("    open_, chosen =", "    accuracy.append([])\n    open_, chosen ="),
            "changed its argument",
        ),
        "numbers": (("    return chosen", "    return list(range(count))"), "list of paths"),
        "twice": (("    return chosen", "    return chosen[:-1] + chosen[:1]"), "twice"),
    },
    "17.settle": {
        "another name for the bug": ((CUT, "    del memory[known + max(path, default=-1) + 1 :]\n"), "still there"),
        "cut only": ((MOVE, "        pass\n"), "have not moved"),
        "nothing cut": ((CUT + "    return len(memory)", "    return known + len(path)"), "nothing is cut"),
        "one more": ((CUT, "    del memory[known + len(path) + 1 :]\n"), "bonus"),
        "a new list": (
            "def settle(memory, known, path):\n"
            "    memory = memory[:known] + [memory[known + n] for n in path]\n    return len(memory)",
            "itself must change",
        ),
        "cut before the copy": (
            "def settle(memory, known, path):\n    del memory[known + len(path):]\n"
            "    for place, node in enumerate(path):\n        memory[known + place] = memory[known + node]\n"
            "    return len(memory)",
            "raised IndexError",
        ),
        "the text is cut": ((CUT, "    del memory[: known]\n    del memory[len(path) :]\n"), "expected"),
        "rows for nodes": ((MOVE, MOVE.replace("known + node]", "known + node - 1]")), "expected"),
        "backwards": (
            ("for place, node in enumerate(path):", "for place, node in reversed(list(enumerate(path))):"),
            "expected",
        ),
        "an empty path": ((CUT, "    if path:\n        del memory[known + len(path) :]\n"), "expected"),
        "returns nothing": (("    return len(memory)", "    return None"), "expected"),
        "returns what was accepted": (("    return len(memory)", "    return len(path)"), "expected"),
    },
    "17.estimates": {
        "4 bytes": (figures(heads_mb="2 * heads / 1e6"), "4 bytes"),
        "one head": (figures(heads_mb="heads / 5e6"), "there are 5"),
        "MiB": (figures(heads_mb="heads / 2**20"), "MiB"),
        "one vocabulary": (figures(own_vocabulary_mb="(heads + 4096 * 128256 * 2) / 1e6"), "each head has its own"),
        "vocabularies alone": (figures(own_vocabulary_mb="5 * 4096 * 128256 * 2 / 1e6"), "own matrices are missing"),
        "gigabytes": (figures(own_vocabulary_mb="(heads + 5 * 4096 * 128256 * 2) / 1e9"), "gigabytes"),
        "no bonus": (figures(tokens_per_call="1.2"), "comes out in any case"),
        "without parents": (figures(tokens_per_call="1 + 0.6 + 0.2 + 0.5 + 0.5"), "parents are right"),
        "one level": (figures(tokens_per_call="1.8"), "lower nodes are missing"),
        "rows": (figures(batch="800 / 3.35"), "each request brings 26"),
        "25 rows": (figures(batch="800 / 3.35 / 25"), "26 rows"),
        "half": (figures(batch="800 / 3.35 / 52"), "cancel"),
        "a key short": ("def estimates():\n    return {'heads_mb': 167.8}", "KeyError"),
    },
}
