"""Both prefix indexes against brute force, and the ways in which other engines served the wrong block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache.block_pool import BlockPool, BlockTable, NoRoom, PoolError, cache_salt
from minillm.cache.prefix_hash import HashIndex, hash_block
from minillm.cache.radix import RadixIndex


def first_token_only(parent, tokens):
    """A hash that collides whenever it can."""
    return bytes([tokens[0] % 2])


def constant(parent, tokens):
    return b"same"


def chained(parent, tokens):
    """A hash that collides in its own block, and keeps all that came before."""
    return parent + bytes([tokens[0] % 2])


KINDS = {
    "hash": HashIndex,
    "radix": RadixIndex,
    "colliding": lambda size: HashIndex(size, first_token_only),
    "constant": lambda size: HashIndex(size, constant),
    "chained": lambda size: HashIndex(size, chained),
}
HONEST = ["hash", "radix"]  # the colliding ones may find less, never something wrong


class BruteForce:
    """Every stored whole-block prefix, in a dictionary keyed by all of its tokens."""

    def __init__(self, block_size):
        self.size, self.block_of = block_size, {}

    def match(self, tokens, salt=""):
        blocks = []
        for end in range(self.size, len(tokens), self.size):  # at most len(tokens) - 1
            block = self.block_of.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, tokens, blocks, salt=""):
        for i, block in enumerate(blocks):
            self.block_of.setdefault((salt, tuple(tokens[: (i + 1) * self.size])), block)


class Engine:
    """The least that uses an index: admit a prompt, keep it or let it go. KV content is the prefix itself."""

    def __init__(self, kind, num_blocks, block_size):
        self.size, self.index = block_size, KINDS[kind](block_size)
        if kind == "radix":
            self.index.evict = lambda evict=self.index.evict: self.evict_oldest_leaf(evict)
        self.pool, self.content = BlockPool(num_blocks, block_size, self.index), {}

    def evict_oldest_leaf(self, evict):
        """The tree's own choice, compared with the one that a look at all leaves gives."""
        nodes = self.index.nodes()
        inner = {node.parent for node in nodes}
        leaves = [node for i, node in enumerate(nodes) if i not in inner and not node.locked[-1]]
        block = evict()
        if leaves:
            assert block == min(leaves, key=lambda node: node.last_used).blocks[-1]
        return block

    def admit(self, tokens, salt=""):
        """-> (table, matched blocks), or None without room."""
        hit = self.pool.match(tokens, salt)
        assert self.index.longest_prefix(tokens, salt) == len(hit) * self.size < max(len(tokens), 1)
        for i, block in enumerate(hit):
            assert self.content[block] == (salt, *tokens[: (i + 1) * self.size]), "another prefix's block"
        self.pool.share(hit)
        table = BlockTable(self.size, hit, len(hit) * self.size)
        try:
            table.append(self.pool, len(tokens) - table.length)
        except NoRoom:
            table.free(self.pool)
            return None
        full = len(tokens) // self.size
        for i in range(len(hit), full):
            self.content[table.blocks[i]] = (salt, *tokens[: (i + 1) * self.size])
        self.pool.insert(tokens[: full * self.size], table.blocks[:full], salt)
        return table, hit


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.sampled_from(["", "a"]), st.booleans()),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("kind", HONEST)
@given(prompts=prompts, block_size=st.integers(1, 4))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_longest_stored_prefix_is_found_exactly(kind, prompts, block_size):
    engine, oracle = Engine(kind, 400, block_size), BruteForce(block_size)
    for tokens, salt, keep in prompts:
        expected = oracle.match(tokens, salt)
        table, hit = engine.admit(tokens, salt)
        assert hit == expected
        full = len(tokens) // block_size
        oracle.insert(tokens[: full * block_size], table.blocks[:full], salt)
        if not keep:
            table.free(engine.pool)
    assert engine.index.stats.evictions == 0
    assert engine.index.stats.queries == sum(len(tokens) for tokens, _, _ in prompts)


@pytest.mark.parametrize("kind", KINDS)
@given(prompts=prompts, block_size=st.integers(1, 4), num_blocks=st.integers(3, 14))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_wrong_block_under_pressure(kind, prompts, block_size, num_blocks):
    """A small pool: blocks are evicted and reused all the time, and content is checked at every hit."""
    engine, running = Engine(kind, num_blocks, block_size), []
    for tokens, salt, keep in prompts * 2:
        admitted = engine.admit(tokens, salt)
        if admitted is None and running:
            running.pop(0).free(engine.pool)
        elif admitted and keep:
            running.append(admitted[0])
        elif admitted:
            admitted[0].free(engine.pool)
        engine.pool.check(running)
        check_tree(engine.index)
    for table in running:
        table.free(engine.pool)
    assert engine.pool.free_count == num_blocks
    assert len(engine.pool.allocate(num_blocks)) == num_blocks  # all that was cached can be evicted
    assert len(engine.index) == 0


def check_tree(index):
    """A block in one node; children that start differently; what `nodes` says is what `holds` says."""
    if not isinstance(index, RadixIndex):
        return
    nodes = index.nodes()
    blocks = [block for node in nodes for block in node.blocks]
    assert len(blocks) == len(set(blocks)) == len(index) and all(map(index.holds, blocks))
    first = [(node.parent, node.salt, node.tokens[: index.block_size]) for node in nodes]
    assert len(first) == len(set(first))
    assert all(node.blocks and len(node.tokens) == len(node.blocks) * index.block_size for node in nodes)


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_the_last_token_is_always_left_to_compute(kind):
    engine = Engine(kind, 10, 4)
    engine.admit(list(range(8)))
    assert len(engine.pool.match(list(range(8)))) == 1, "eight stored tokens, eight asked: the last block is computed"
    assert len(engine.pool.match(list(range(9)))) == 2
    assert engine.pool.match([0]) == engine.pool.match([]) == []


@pytest.mark.parametrize("kind", HONEST)
def test_salt_and_adapter_separate(kind):
    engine = Engine(kind, 40, 2)
    keys = ["", cache_salt("alice"), cache_salt("bob"), cache_salt("", "alice"), cache_salt("alice", "lora")]
    first = {key: engine.admit([1, 2, 3], key)[0].blocks[0] for key in keys}
    assert len(set(first.values())) == len(keys)
    assert {key: engine.pool.match([1, 2, 3], key) for key in keys} == {key: [first[key]] for key in keys}


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_was_reused_is_not_found_under_its_old_tokens(kind):
    engine = Engine(kind, 2, 2)
    engine.admit([1, 2, 3, 4])[0].free(engine.pool)
    engine.admit([5, 6, 7, 8])[0].free(engine.pool)
    assert engine.pool.match([1, 2, 3, 4, 0]) == []
    assert engine.index.stats.evictions > 0
    assert len(engine.pool.match([5, 6, 7, 8, 0])) == 2 or kind not in HONEST


def test_a_child_of_an_evicted_block_is_not_served_to_a_colliding_prefix():
    """[1 1 | 9 9] is stored; its head is evicted; [3 3], whose hash is the same, takes the head's place. The old tail
    has the right key and the right tokens, and must still not be found after [3 3]."""
    index = HashIndex(2, chained)
    index.insert([1, 1, 9, 9], [0, 1])
    index.release(0)
    assert index.evict() == 0
    index.insert([3, 3], [2])
    assert index.match([3, 3, 9, 9, 0]) == [2]
    assert index.match([1, 1, 9, 9, 0]) == []
    index.release(2)
    index.evict()
    index.insert([1, 1], [3])
    assert index.match([1, 1, 9, 9, 0]) == [3, 1], "its own head, computed again, makes the tail reachable"


def test_what_follows_a_colliding_block_is_not_stored_behind_the_other():
    """[1 1] is stored; [3 3 | 9 9] comes, whose first hash is the same. Its tail must not hang on [1 1]: the tail's
    key is the one that [1 1 | 9 9] will ask for, but its K and V are those after [3 3]."""
    index = HashIndex(2, chained)
    index.insert([1, 1], [0])
    index.insert([3, 3, 9, 9], [1, 2])
    assert index.match([1, 1, 9, 9, 0]) == [0]
    assert index.match([3, 3, 9, 9, 0]) == [] and not index.holds(2)


def test_hashes_are_chained_and_cover_every_token():
    a = hash_block(b"", [1, 2])
    assert a == hash_block(b"", [1, 2]) and len(a) == 32
    assert len({a, hash_block(b"", [2, 1]), hash_block(b"x", [1, 2]), hash_block(b"", [1, 2**40])}) == 4


@pytest.mark.parametrize("kind", HONEST)
def test_held_blocks_are_never_evicted_and_the_oldest_goes_first(kind):
    engine = Engine(kind, 6, 1)
    old, held, new = [engine.admit(tokens)[0] for tokens in ([1, 2], [3, 4], [5, 6])]
    old.free(engine.pool)
    new.free(engine.pool)
    assert engine.pool.free_count == 4
    got = engine.pool.allocate(4)
    assert got == [1, 0, 5, 4], "least recently used first, and of a prefix its tail first"
    assert engine.pool.match([3, 4, 0]) == held.blocks
    with pytest.raises(NoRoom):
        engine.pool.allocate(1)


@pytest.mark.parametrize("kind", HONEST)
def test_a_hit_refreshes(kind):
    engine = Engine(kind, 4, 1)
    pool = engine.pool
    for tokens in ([1, 2], [3, 4]):
        engine.admit(tokens)[0].free(pool)
    hit = pool.match([1, 2, 0])
    pool.share(hit)
    pool.free(hit)
    assert pool.allocate(2) == [3, 2]
    assert pool.match([1, 2, 0]) == hit and not pool.match([3, 4, 0])


@pytest.mark.parametrize("kind", HONEST)
def test_two_requests_that_compute_the_same_prefix_at_once(kind):
    """Neither could hit. The index keeps the blocks of the first, then only the second goes on; all of the first's
    blocks are unreferenced below and above what the second holds, and every one can still be evicted."""
    engine = Engine(kind, 6, 1)
    pool, index = engine.pool, engine.index
    a, b = BlockTable(1), BlockTable(1)
    a.append(pool, 2)
    b.append(pool, 3)
    pool.insert([1, 2], a.blocks)
    pool.insert([1, 2, 3], b.blocks)
    assert pool.match([1, 2, 3, 0]) == [*a.blocks, b.blocks[2]] and not index.holds(b.blocks[0])
    a.free(pool)
    pool.check([b])
    assert pool.free_count == 3
    pool.allocate(3)
    assert pool.match([1, 2, 3, 0]) == []
    b.free(pool)
    assert pool.free_count == 3


@pytest.mark.parametrize("kind", HONEST)
def test_saying_that_a_block_holds_other_tokens_is_an_error(kind):
    engine = Engine(kind, 6, 2)
    table, _ = engine.admit([1, 2, 3, 4])
    for tokens, blocks in [([9, 9], table.blocks[:1]), ([1, 2], table.blocks[1:]), ([1, 2, 9, 9], table.blocks)]:
        with pytest.raises(PoolError):
            engine.pool.insert(tokens, blocks)
    with pytest.raises(PoolError, match="do not fill"):
        engine.pool.insert([1, 2, 3], table.blocks)
    with pytest.raises(PoolError, match="held by no table"):
        engine.pool.insert([1, 2], [5])
    fresh = engine.pool.allocate(1) * 2
    with pytest.raises(PoolError):
        engine.pool.insert([7, 7, 8, 8], fresh)
    assert engine.pool.match([1, 2, 3, 4, 0]) == table.blocks and len(engine.index) == 2


def test_the_tree_splits_where_prefixes_part():
    index = RadixIndex(2)
    index.insert([1, 1, 2, 2, 3, 3], [0, 1, 2])
    index.insert([1, 1, 2, 2, 4, 4], [0, 1, 3])
    index.insert([1, 1, 5, 5], [0, 4])
    index.insert([1, 1, 2, 2, 4, 4, 6, 6], [0, 1, 3, 5])
    index.insert([1, 1], [6], salt="s")
    assert [(n.depth, n.parent, n.salt, n.tokens, n.blocks) for n in index.nodes()] == [
        (0, None, "", (1, 1), (0,)),
        (1, 0, "", (2, 2), (1,)),
        (2, 1, "", (3, 3), (2,)),
        (2, 1, "", (4, 4, 6, 6), (3, 5)),
        (1, 0, "", (5, 5), (4,)),
        (0, None, "s", (1, 1), (6,)),
    ]
    index.release(2)
    assert [n.locked for n in index.nodes()][2] == (False,) and index.evict() == 2 and index.evict() is None


def test_the_waiting_queue_can_be_ordered_by_what_is_cached():
    for kind in HONEST:
        engine = Engine(kind, 20, 2)
        engine.admit([1, 2, 3, 4, 5, 6])
        waiting = [[9, 9, 9], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9, 9]]
        queries = engine.index.stats.queries
        waiting.sort(key=engine.index.longest_prefix, reverse=True)
        assert waiting[0] == [1, 2, 3, 4, 5] and waiting[-1] == [9, 9, 9]
        assert engine.index.stats.queries == queries, "looking is not asking"


@pytest.mark.parametrize("kind", HONEST)
def test_hit_rate_is_counted_in_tokens(kind):
    engine = Engine(kind, 20, 2)
    engine.admit([1, 2, 3, 4])
    engine.admit([1, 2, 3, 4, 5, 6])
    stats = engine.index.stats
    assert (stats.queries, stats.hits, stats.hit_rate) == (10, 4, 0.4)


@pytest.mark.parametrize("kind", HONEST)
def test_deep_and_wide_prefixes(kind):
    """A chat of 1050 turns that branches at each, and a prompt of 5000 blocks that shares none: no recursion."""
    index = KINDS[kind](1)
    pool, chat = BlockPool(9000, 1, index), []

    def admit(tokens):
        hit = pool.match(tokens)
        pool.share(hit)
        blocks = hit + pool.allocate(len(tokens) - len(hit))
        pool.insert(tokens, blocks)
        pool.free(blocks)

    for turn in range(1050 if kind == "radix" else 200):
        chat.append(turn)
        admit([*chat, -1])
    admit(list(range(2000, 7000)))
    check_tree(index)
    assert len(pool.allocate(9000)) == 9000 and len(index) == 0
