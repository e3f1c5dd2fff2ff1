"""Draft trees: masks against the definition, shapes against all trees there are, one forward against many."""

import itertools
import random

import pytest
import torch

from minillm.cache import paged_plan
from minillm.cache.block_pool import BlockPool, BlockTable, blocks_for
from minillm.cache.paged import PagedCache, PagedStep
from minillm.errors import ParamsError
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.speculative.proposer import Draft
from minillm.speculative.tree import Shape, best_shape, expected_tokens, likeliest_nodes, subtree, tree_mask


def random_tree(rng, nodes, vocab=61):
    return Draft([rng.randrange(vocab) for _ in range(nodes)], [rng.randint(-1, i - 1) for i in range(nodes)])


def make_model(**changes):
    config = ModelConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_length=96,
    ).with_changes(**changes)
    model = init_weights(Decoder(config).double().eval(), 3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(20 if weight.dim() == 2 else 1)  # far from uniform
    return model


@pytest.mark.parametrize("seed", range(6))
def test_the_mask_is_the_definition(seed):
    rng = random.Random(seed)
    known, draft = rng.randint(1, 4), random_tree(rng, rng.randint(1, 20))
    mask = tree_mask(draft, known)
    for i, j in itertools.product(range(known + len(draft)), repeat=2):
        legal = j <= i if i < known else j < known or (j - known) in draft.path(i - known)
        assert bool(mask[i, j]) == legal


def test_the_mask_of_a_chain_is_causal():
    assert torch.equal(tree_mask(Draft([5, 6, 7]), 2), torch.ones(5, 5, dtype=torch.bool).tril())


@pytest.mark.parametrize("changes", [{}, {"windows": (5, None)}, {"num_kv_heads": 1}, {"attention_softcap": 2.0}])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_one_forward_over_a_tree_equals_a_run_of_each_path(changes, attention):
    """Three requests in one step, in blocks that alternate; the third has no draft. (The softmax is in float32.)"""
    model, rng, size = make_model(**changes), random.Random(5), 4
    pool = BlockPool(64, size)
    cache = PagedCache(model.config, 64, size, model.dtype, "cpu", attention=attention)
    requests = []
    for nodes in (9, 14, 0):
        prompt = [rng.randrange(61) for _ in range(rng.randint(7, 18))]
        requests.append((prompt, random_tree(rng, nodes), BlockTable(size)))
    for _ in range(2):  # all tables grow in turns, so their blocks alternate
        for prompt, _, table in requests:
            table.append(pool, len(prompt) // 2 if not table.length else len(prompt) - table.length)

    def forward(parts):
        """parts: (tokens, positions, table, mask or None)."""
        tokens = [t for part in parts for t in part[0]]
        positions = torch.tensor([p for part in parts for p in part[1]])
        slots = [s for t, _, table, _ in parts for s in table.slots(table.length - len(t), len(t))]
        widest = max(len(part[2].blocks) for part in parts)
        tables = torch.tensor([part[2].blocks + [0] * (widest - len(part[2].blocks)) for part in parts])
        lengths, kv = [len(part[0]) for part in parts], [part[2].length for part in parts]
        masks = {i: part[3] for i, part in enumerate(parts) if part[3] is not None}
        cache.begin(PagedStep(torch.tensor(slots), tables, lengths, kv, positions, masks))
        return model(torch.tensor(tokens), positions, cache).split(lengths)

    with torch.no_grad():
        forward([(p, range(len(p)), table, None) for p, _, table in requests])
        parts = []
        for prompt, draft, table in requests:
            last = rng.randrange(61)
            table.append(pool, 1 + len(draft))
            places = [len(prompt), *(len(prompt) + depth for depth in draft.depths())]
            parts.append(([last, *draft.tokens], places, table, tree_mask(draft) if len(draft) else None))
        found = forward(parts)
        for (prompt, draft, _), part, logits in zip(requests, parts, found):
            for node in range(-1, len(draft)):
                text = [*prompt, part[0][0], *(draft.tokens[n] for n in draft.path(node))]
                alone = model(torch.tensor([text]))[0, -1]
                torch.testing.assert_close(logits[node + 1], alone, rtol=1e-4, atol=1e-4)

        # What is accepted moves to where a plain run would have put it; then the text goes on as if nothing was.
        prompt, draft, table = requests[1]
        path = max((draft.path(node) for node in range(len(draft))), key=len)
        slots = table.slots(len(prompt) + 1, len(draft))
        cache.move_slots([(slots[node], slots[i]) for i, node in enumerate(path)])
        table.truncate(pool, len(prompt) + 1 + len(path))
        assert len(table.blocks) == blocks_for(table.length, size)
        table.append(pool, 1)
        text = [*prompt, parts[1][0][0], *(draft.tokens[n] for n in path), 7]
        (after,) = forward([([7], [len(text) - 1], table, None)])
        torch.testing.assert_close(after[0], model(torch.tensor([text]))[0, -1], rtol=1e-4, atol=1e-4)


def places_of(draft, start):
    return [start, *(start + depth for depth in draft.depths())]


@pytest.mark.parametrize("seed", range(24))
def test_any_mix_of_trees_chains_decodes_and_chunks_equals_each_alone(seed, monkeypatch):
    """Many requests in one step, several with as many drafted tokens; blocks in no order, and NaN in all that nobody
    wrote. Each row says what its own path says, run by itself."""
    rng = random.Random(seed)
    monkeypatch.setattr(paged_plan, "BATCH_SPREAD", rng.choice((0.0, paged_plan.BATCH_SPREAD)))
    monkeypatch.setattr(paged_plan, "SHORT", rng.choice((1, 6, paged_plan.SHORT)))
    windows, softcap = rng.choice([(), (5, None), (3, 3)]), rng.choice([None, None, 2.0])
    heads = rng.choice((1, 2, 4))
    model = make_model(windows=windows, attention_softcap=softcap, num_kv_heads=heads)
    size, attention = rng.choice((1, 4, 16)), rng.choice(("naive", "sdpa"))
    pool = BlockPool(12 * blocks_for(96, size), size)
    blocks = pool.allocate(pool.num_blocks)
    rng.shuffle(blocks)
    pool.free(blocks)
    cache = PagedCache(model.config, pool.num_blocks, size, model.dtype, attention=attention)
    cache.k.fill_(float("nan")), cache.v.fill_(float("nan"))
    sizes = [rng.randint(1, 9) for _ in range(2)]  # of drafts: few, so that some are equal
    requests = []
    for _ in range(rng.choice((1, 3, 9))):
        text, table = [rng.randrange(61) for _ in range(rng.randint(1, 40))], BlockTable(size)
        kind = rng.choice(("decode", "chain", "tree", "tree", "chunk", "prompt"))
        known = 0 if kind == "prompt" else rng.randrange(len(text)) if kind == "chunk" else len(text) - 1
        nodes = {"chain": rng.choice(sizes), "tree": rng.choice(sizes)}.get(kind, 0)
        draft = random_tree(rng, nodes)
        draft = Draft(draft.tokens) if kind == "chain" else draft
        requests.append((text, known, draft, table))

    def forward(parts, padding=0):
        """parts: (table, its length before, tokens, positions, mask or None) -> logits of each."""
        slots = [s for table, start, tokens, *_ in parts for s in table.slots(start, len(tokens))] + [-1] * padding
        widest = max(len(part[0].blocks) for part in parts)
        tables = torch.tensor([part[0].blocks + [0] * (widest - len(part[0].blocks)) for part in parts])
        flat = torch.tensor([t for part in parts for t in part[2]] + [0] * padding)
        positions = torch.tensor([p for part in parts for p in part[3]] + [0] * padding)
        lengths = [len(part[2]) for part in parts]
        masks = {i: part[4] for i, part in enumerate(parts) if part[4] is not None}
        kv = [part[1] + len(part[2]) for part in parts]
        cache.begin(PagedStep(torch.tensor(slots), tables, lengths, kv, positions, masks))
        return model(flat, positions, cache)[: sum(lengths)].split(lengths)

    with torch.no_grad():
        first = []
        for text, known, _, table in requests:
            table.append(pool, known)
            if known:
                first.append((table, 0, text[:known], range(known), None))
        if first:
            forward(first)
        parts = []
        for text, known, draft, table in requests:
            tokens = text[known:] + draft.tokens
            table.append(pool, len(tokens))
            places = [*range(known, len(text) - 1), *places_of(draft, len(text) - 1)]
            mask = None if draft.is_chain else tree_mask(draft, len(text) - known)
            parts.append((table, known, tokens, places, mask))
        for (text, known, draft, _), logits in zip(requests, forward(parts, rng.choice((0, 3)))):
            own = model(torch.tensor([text]))[0, known:]
            torch.testing.assert_close(logits[: len(own)], own, rtol=1e-4, atol=1e-4)
            for node in range(len(draft)):
                alone = model(torch.tensor([[*text, *(draft.tokens[n] for n in draft.path(node))]]))[0, -1]
                torch.testing.assert_close(logits[len(own) + node], alone, rtol=1e-4, atol=1e-4)


def test_as_many_tokens_are_attended_together():
    """Five requests: two decodes, two chains and a tree of three tokens each, and one prompt: three calls."""
    new, kv = [1, 3, 3, 1, 3, 40], [30, 32, 31, 31, 33, 60]
    starts = [sum(new[:i]) for i in range(len(new))]
    step = PagedStep(
        torch.arange(sum(new)),
        torch.zeros(6, 4, dtype=torch.long),
        new,
        kv,
        torch.cat([torch.arange(b - a, b) for a, b in zip(new, kv)]),
        {4: tree_mask(Draft([1, 2], [-1, -1]))},
    )
    parts = paged_plan.plan(step, None, torch.zeros(sum(new), 4, 8), 2, 16)
    rows = [
        sorted(p.rows.tolist()) if isinstance(p, paged_plan.Batch) else list(range(p.start, p.end)) for p in parts
    ]
    assert sorted(rows) == sorted(
        [
            [starts[0], starts[3]],
            sorted(starts[i] + t for i in (1, 2, 4) for t in range(3)),
            list(range(starts[5], starts[5] + 40)),
        ]
    )


def all_shapes(depths, ranks, nodes):
    """Every tree of so many nodes, as sets of paths (tuples of ranks) closed under parents."""
    paths = [p for d in range(1, depths + 1) for p in itertools.product(range(ranks), repeat=d)]
    for chosen in itertools.combinations(paths, nodes):
        if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
            yield chosen


@pytest.mark.parametrize("seed", range(4))
def test_the_best_shape_is_the_best_of_all(seed):
    rng = random.Random(seed)
    accuracy = []
    for _ in range(3):
        top = rng.uniform(0.3, 0.8)
        accuracy.append([top, (1 - top) * rng.uniform(0.2, 0.9)])
        accuracy[-1].sort(reverse=True)
    for nodes in (1, 2, 4, 5):
        best = max(sum(value(accuracy, p) for p in tree) for tree in all_shapes(3, 2, nodes))
        shape = best_shape(accuracy, nodes)
        assert len(shape) == nodes
        assert expected_tokens(accuracy, shape) == pytest.approx(1 + best)


def value(accuracy, path):
    product = 1.0
    for depth, rank in enumerate(path):
        product *= accuracy[depth][rank]
    return product


def test_a_shape_is_a_tree_of_distinct_paths():
    shape = best_shape([[0.6, 0.2, 0.1], [0.4, 0.3, 0.0], [0.0, 0.0, 0.0]], 30)
    paths = set()
    for node in range(len(shape)):
        draft = Draft([0] * len(shape), list(shape.parents))
        paths.add(tuple(shape.ranks[n] for n in draft.path(node)))
    assert len(paths) == len(shape) == 30
    assert len(best_shape([[0.5], [0.5]], 9)) == 2  # no more than there are


def test_fill_takes_the_guess_of_the_depth():
    draft = Shape((-1, 0, -1, 2, 0), (0, 1, 2, 0, 0)).fill([[10, 11, 12], [20, 21]])
    assert draft.tokens == [10, 21, 12, 20, 20] and draft.parents == [-1, 0, -1, 2, 0]


@pytest.mark.parametrize(
    ("accuracy", "nodes"), [([[0.5]], 0), ([[0.5]], True), ([[0.5]], 10**6), ([], 3), ([[]], 3), ([[1.5]], 2)]
)
def test_a_shape_that_cannot_be_is_refused(accuracy, nodes):
    with pytest.raises(ParamsError, match=r"nodes|accuracy"):
        best_shape(accuracy, nodes)


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_nodes_are_a_tree(seed):
    rng = random.Random(seed)
    draft = random_tree(rng, 40)
    values = []
    for node in range(40):
        parent = draft.parent(node)
        values.append((values[parent] if parent >= 0 else 0.0) - rng.uniform(1e-5, 1))
    kept = likeliest_nodes(torch.tensor(values), 11)
    assert kept == sorted(kept) and len(kept) == 11
    assert min(values[n] for n in kept) >= max(values[n] for n in range(40) if n not in kept)
    small = subtree(draft.tokens, draft.parents, kept)
    for new, old in enumerate(kept):
        assert [small.tokens[n] for n in small.path(new)] == [draft.tokens[n] for n in draft.path(old)]


def test_nodes_that_may_not_be_are_never_kept():
    assert likeliest_nodes(torch.tensor([-1.0, float("-inf"), -2.0]), 3) == [0, 2]


@pytest.mark.parametrize("seed", range(5))
def test_the_trunk_is_the_first_child_of_the_first_child(seed):
    rng = random.Random(seed)
    draft = random_tree(rng, 25)
    draft.probs = torch.rand(25, 61)
    trunk = draft.trunk()
    assert trunk.is_chain and len(trunk) >= 1
    node = -1
    for place, token in enumerate(trunk.tokens):
        node = min(i for i in range(25) if draft.parent(i) == node)
        assert draft.tokens[node] == token and torch.equal(trunk.probs[place], draft.probs[node])
    assert not any(draft.parent(i) == node for i in range(25))
    chain = Draft([4, 5])
    assert chain.trunk() is chain
