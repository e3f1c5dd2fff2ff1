"""Checks of exercise 17. Oracles: ancestors counted out node by node, paths walked as texts, all paths there are.

Chapter 17.
"""

from __future__ import annotations

import itertools
from math import prod
from operator import index

import torch

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.estimates import estimates


def tree(rng, nodes: int) -> list[int]:
    return [rng.randint(-1, i - 1) for i in range(nodes)]


def above(parents: list[int], node: int) -> list[int]:
    """The path from the top down to `node`."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


# 1


def masked(parents, stored, sees) -> torch.Tensor:
    """sees(row node, column node) of two nodes; what all may see is the same for every answer."""
    n = len(parents)
    rows = [[True] * (stored + 1) + [False] * n]
    rows += [[True] * (stored + 1) + [bool(sees(i, j)) for j in range(n)] for i in range(n)]
    return torch.tensor(rows)


def right_mask(parents, stored):
    return masked(parents, stored, lambda i, j: j in above(parents, i))


MASKS = {
    "that is the causal mask: a node sees its own ancestors, not all that were packed before it": lambda p, s: masked(
        p, s, lambda i, j: j <= i
    ),
    "a node sees itself and its parent, but not the ancestors above": lambda p, s: masked(
        p, s, lambda i, j: j in (i, p[i])
    ),
    "a node must see itself": lambda p, s: masked(p, s, lambda i, j: j != i and j in above(p, i)),
    "rows and columns are swapped: ancestors see their descendants": lambda p, s: masked(
        p, s, lambda i, j: i in above(p, j)
    ),
    "siblings do not see one another": lambda p, s: masked(p, s, lambda i, j: j in above(p, i) or p[i] == p[j]),
    "that is True where a row may NOT look": lambda p, s: ~right_mask(p, s),
    "a mask of booleans is asked for": lambda p, s: right_mask(p, s).float(),
    "the stored tokens have columns too, and come first": lambda p, s: right_mask(p, 0),
}


@register("17.tree_mask", points=2, title="The tree's mask", hints=[Hint(t, wrong=w) for t, w in MASKS.items()])
def tree_mask(rng):
    yield Case(([-1, 0, 0, 1, -1], 2), right_mask([-1, 0, 0, 1, -1], 2))
    yield Case(([-1, -1, 0, 0, 1, 2, 3, 5], 3), right_mask([-1, -1, 0, 0, 1, 2, 3, 5], 3))
    yield Case(([], 4), right_mask([], 4))
    yield Case(([-1, 0, 1, 2], 0), right_mask([-1, 0, 1, 2], 0))
    deep = [max(i - 1 - i % 3, -1) for i in range(100)]  # 34 deep: two of three nodes are leaves
    yield Case((deep, 1), right_mask(deep, 1))
    for nodes in (6, 13, 27, 64, 90):
        parents, stored = tree(rng, nodes), rng.randint(0, 40)
        yield Case((parents, stored), right_mask(parents, stored))


# 2


def walked(tokens, parents, said):
    """By texts: the longest node whose whole path is what was said above each of its nodes."""
    fits = [
        path
        for path in (above(parents, node) for node in range(len(tokens)))
        if all(tokens[n] == said[parents[n] + 1] for n in path)
    ]
    path = max(fits, key=len, default=[])
    return path, [tokens[n] for n in path] + [said[path[-1] + 1 if path else 0]]


def flat_match(tokens, parents, said):
    """Follows tokens wherever they stand in the tree."""
    at, nodes = -1, []
    while True:
        found = [i for i in range(at + 1, len(tokens)) if tokens[i] == said[at + 1]]
        if not found:
            return nodes, [tokens[n] for n in nodes] + [said[at + 1]]
        at = found[0]
        nodes.append(at)


def row_is_node(tokens, parents, said):
    at, nodes = -1, []
    while True:
        found = [i for i, p in enumerate(parents) if p == at and tokens[i] == said[max(at, 0)]]
        if not found:
            return nodes, [tokens[n] for n in nodes] + [said[max(at, 0)]]
        at = found[0]
        nodes.append(at)


def first_child(tokens, parents, said):
    at, nodes = -1, []
    while True:
        found = [i for i, p in enumerate(parents) if p == at][:1]
        if not found or tokens[found[0]] != said[at + 1]:
            return nodes, [tokens[n] for n in nodes] + [said[at + 1]]
        at = found[0]
        nodes.append(at)


ACCEPTS = {
    "the last token is missing: what the target said where the draft was left comes out too": lambda *a: (
        walked(*a)[0],
        walked(*a)[1][:-1],
    ),
    "the accepted nodes are no path: only children of the last accepted node count": flat_match,
    "said[0] comes after the last known token, said[i + 1] after node i": row_is_node,
    "all siblings must be tried, not the first alone": first_child,
    "rows are returned, not nodes: row i + 1 is node i": lambda *a: ([n + 1 for n in walked(*a)[0]], walked(*a)[1]),
    "the tree's tokens are returned, not the nodes' numbers": lambda t, p, s: (
        [t[n] for n in walked(t, p, s)[0]],
        walked(t, p, s)[1],
    ),
}


def grown(rng, nodes: int, wrong: float, deep: bool = False):
    """A tree with distinct siblings; the target says one of a node's children, or, at times, none of them. deep: the
    tree is long, and the target follows its longest path."""
    parents = [i - 1 if deep and rng.random() < 0.6 else p for i, p in enumerate(tree(rng, nodes))]
    tokens, taken = [], {}
    for parent in parents:
        used = taken.setdefault(parent, set())
        used.add(token := rng.choice([t for t in range(nodes + 3) if t not in used]))
        tokens.append(token)
    said = []
    for row in range(nodes + 1):
        below = [tokens[i] for i, parent in enumerate(parents) if parent == row - 1]
        free = [t for t in range(nodes + 5) if t not in below]
        said.append(rng.choice(below) if below and rng.random() > wrong else rng.choice(free))
    if deep:
        for node in max((above(parents, node) for node in range(nodes)), key=len):
            said[parents[node] + 1] = tokens[node]
    return tokens, parents, said


@register("17.accept", points=2, title="The accepted path", hints=[Hint(t, wrong=w) for t, w in ACCEPTS.items()])
def accept(rng):
    for args in (
        ([5, 6, 7], [-1, -1, 1], [6, 0, 7, 9]),
        ([5, 6, 7, 6], [-1, -1, 0, 0], [5, 6, 1, 2, 8]),
        ([3, 4], [-1, 0], [9, 4, 4]),
        ([3, 8, 4, 4], [-1, -1, 0, 1], [8, 4, 4, 5, 6]),
        ([], [], [4]),
    ):
        yield Case(args, walked(*args))
    for nodes, wrong in ((4, 0.3), (9, 0.1), (20, 0.1), (40, 0.05), (40, 0.0), (80, 0.0), (80, 0.1)):
        args = grown(rng, nodes, wrong)
        yield Case(args, walked(*args))
    for nodes in (12, 60, 150):
        args = grown(rng, nodes, 0.0, deep=True)
        yield Case(args, walked(*args))


# 3


def value(accuracy, path) -> float:
    return prod(accuracy[depth][rank] for depth, rank in enumerate(path))


def all_paths(accuracy):
    return [
        p for d in range(1, len(accuracy) + 1) for p in itertools.product(*(range(len(row)) for row in accuracy[:d]))
    ]


def best(accuracy, count):
    return sorted(all_paths(accuracy), key=lambda p: -value(accuracy, p))[:count]


def ranks(got) -> list[tuple[int, ...]]:
    """Paths as tuples of ints, from whatever holds integers."""
    return [tuple(index(rank) for rank in path) for path in got]


def same_tree(got, expected):
    try:
        paths = ranks(got)
    except TypeError:
        return f"expected a list of paths (tuples of ranks), got {got!r}"
    if len(set(paths)) != len(paths):
        return "a path stands in it twice"
    if len(paths) != len(expected):
        return f"expected {len(expected)} paths, got {len(paths)}"
    lost = [p for p in paths if len(p) > 1 and p[:-1] not in paths]
    if lost:
        return f"{lost[0]} has no parent {lost[0][:-1]} in the tree"
    for path in sorted(set(paths) - set(expected)):
        return f"{path} is in it, but a likelier path is not: {sorted(set(expected) - set(paths))[0]}"
    return None


def by(key):
    return lambda accuracy, count: sorted(all_paths(accuracy), key=lambda p: key(accuracy, p))[:count]


TREES = {
    "only the likeliest guess of each depth: siblings are candidates too": lambda a, n: [
        (0,) * d for d in range(1, min(n, len(a)) + 1)
    ],
    "breadth first: a deep node may be likelier than a wide one": by(lambda a, p: (len(p), -value(a, p))),
    "a node counts by the whole product down to it, not by its own accuracy": by(
        lambda a, p: (-a[len(p) - 1][p[-1]], len(p))
    ),
    "every depth reads accuracy[0]: depth d is row d - 1": lambda a, n: best([a[0]] * len(a), n),
    "a child reads the row of its parent's depth: depth d is row d - 1": lambda a, n: best([a[0], *a][: len(a)], n),
}


@register(
    "17.best_tree",
    points=3,
    title="The best tree",
    hints=[Hint(text, when=lambda got, _, case, w=w: matches(got, w(*case.args))) for text, w in TREES.items()],
)
def best_tree(rng):
    yield Case(([[0.6, 0.3], [0.4, 0.1]], 3), best([[0.6, 0.3], [0.4, 0.1]], 3), compare=same_tree)
    for depths, ranks, count in ((1, 5, 4), (4, 3, 10), (5, 2, 12), (3, 8, 30), (5, 5, 64), (6, 1, 6)):
        accuracy = []
        for _ in range(depths):
            left, row = 1.0, []
            for _ in range(ranks):
                row.append(left * rng.uniform(0.25, 0.6))
                left -= row[-1]
            accuracy.append(sorted(row, reverse=True))
        yield Case((accuracy, count), best(accuracy, count), compare=same_tree)


def matches(got, other) -> bool:
    try:
        return set(ranks(got)) == set(other)
    except TypeError:
        return False


# 4


def buggy_settle(memory, known, path):
    for place, node in enumerate(path):
        memory[known + place] = memory[known + node]
    del memory[known + (path[-1] + 1 if path else 0) :]
    return len(memory)


def no_copy(memory, known, path):
    del memory[known + len(path) :]
    return len(memory)


def nothing_cut(memory, known, path):
    for place, node in enumerate(path):
        memory[known + place] = memory[known + node]
    return known + len(path)


def bonus_too(memory, known, path):
    for place, node in enumerate(path):
        memory[known + place] = memory[known + node]
    del memory[known + len(path) + 1 :]
    return len(memory)


def a_new_list(memory, known, path):
    return known + len(path)


SETTLES = {
    "what lies between the accepted nodes is still there: cut behind the path's length, not behind its last "
    "node": buggy_settle,
    "the right length, but the accepted nodes have not moved: copy before you cut": no_copy,
    "nothing is cut: the rejected nodes stay in the cache": nothing_cut,
    "one place too many is kept: the bonus token is not computed yet": bonus_too,
    "`memory` itself must change: a new list is seen by nobody": a_new_list,
}


@register(
    "17.settle",
    points=2,
    title="Debug it: words that were never said",
    given=buggy_settle,
    hints=[Hint(text, wrong=wrong) for text, wrong in SETTLES.items()],
)
def settle(rng):
    cases = [(2, 4, [1, 3]), (3, 3, [0, 1, 2]), (1, 5, []), (0, 6, [0, 5]), (4, 7, [6])]
    for nodes in (9, 20, 50, 120):
        path = sorted(rng.sample(range(nodes), rng.randint(2, nodes // 2)))
        cases.append((rng.randint(1, 70), nodes, path))
    for known, nodes, path in cases:
        memory = [f"t{i}" for i in range(known)] + [f"n{i}" for i in range(nodes)]
        expected = memory[:known] + [memory[known + node] for node in path]

        def run(answer, memory=memory, known=known, path=path):
            mine = list(memory)
            length = answer(mine, known, list(path))
            return mine, length

        shown = f"settle({memory if nodes < 9 else f'{known} of text and {nodes} nodes'}, {known}, {path})"
        yield Drive(run, (expected, len(expected)), shown)


# 5

HEADS = 5 * (4096**2 + 4096) * 2 / 1e6
FIGURES = {  # key: expected, {what a slip gives: its name}
    "heads_mb": (
        HEADS,
        {
            2 * HEADS: "4 bytes a weight: 16 bits are 2",
            HEADS / 2: "a byte a weight: 16 bits are 2",
            HEADS / 5: "that is one head; there are 5",
            HEADS * 1e6 / 2**20: "that is MiB; 10^6 is asked for",
        },
    ),
    "own_vocabulary_mb": (
        HEADS + 5 * 4096 * 128256 * 2 / 1e6,
        {
            HEADS + 4096 * 128256 * 2 / 1e6: "that is one vocabulary matrix; each head has its own",
            5 * 4096 * 128256 * 2 / 1e6: "the heads' own matrices are missing",
            (HEADS + 5 * 4096 * 128256 * 2 / 1e6) / 1e3: "gigabytes; megabytes are asked for",
        },
    ),
    "tokens_per_call": (
        2.2,
        {
            1.2: "the token that comes out in any case is missing: 1 +",
            2.8: "the lower nodes count only if their parents are right: 0.6 x 0.5, not 0.5",
            1.8: "the lower nodes are missing",
            1.9: "the alternative's branch is missing",
        },
    ),
    "batch": (
        800e12 / 3.35e12 / 26,
        {
            800e12 / 3.35e12: "that is rows; each request brings 26",
            800e12 / 3.35e12 / 25: "25 nodes and the last known token: 26 rows",
            800e12 / 3.35e12 / 26 / 2: "2 bytes and 2 FLOP a weight cancel",
            800e12 / 3.35e12 / 26 * 2: "2 FLOP a weight and row",
        },
    ),
}


@register("17.estimates", points=2, title="Estimate it: an 8B model on one card")
def card_figures(rng):
    yield from estimates("estimates", FIGURES, 0.02)
