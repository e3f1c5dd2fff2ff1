"""The block pool against a model: random operations, after each of which the pool's invariant must hold.

`World` is the model. It keeps, beside the pool, a memory in which every slot holds the name of a prefix (an id for
"these tokens, in this order, under this salt"), written as the engine would write K and V. A table whose slots do not
name its own prefixes shares a block by accident, lost one, or was served another request's.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minillm.cache.block_pool import BlockPool, BlockTable, NoRoom, PoolError, blocks_for, cache_salt
from minillm.cache.fragmentation import Arena, held_in_blocks, held_in_reservations
from minillm.cache.prefix_hash import HashIndex
from minillm.cache.radix import RadixIndex
from minillm.errors import ParamsError

INDEXES = {"off": lambda block_size: None, "hash": HashIndex, "radix": RadixIndex}


class Sequence:
    def __init__(self, table, tokens, salt, home="device"):
        self.table, self.tokens, self.salt, self.home = table, tokens, salt, home


class World:
    def __init__(self, num_blocks, block_size, host_blocks, index):
        self.size, self.index = block_size, INDEXES[index](block_size)
        self.pools = {
            "device": BlockPool(num_blocks, block_size, self.index),
            "host": BlockPool(host_blocks, block_size),
        }
        self.pool = self.pools["device"]
        self.memory = {home: [None] * (pool.num_blocks * block_size) for home, pool in self.pools.items()}
        self.names, self.sequences, self.waiting, self.seen = {}, [], [], {}

    def name(self, sequence, i):
        """The id of tokens[: i + 1] under the salt."""
        parent = (sequence.salt,)
        for token in sequence.tokens[: i + 1]:
            parent = self.names.setdefault((parent, token), len(self.names))
        return parent

    def count(self, event):
        self.seen[event] = self.seen.get(event, 0) + 1

    def copy(self, pairs, source="device", target="device"):
        size = self.size
        read = [self.memory[source][a * size : (a + 1) * size] for a, _ in pairs]
        for (_, b), content in zip(pairs, read):
            self.memory[target][b * size : (b + 1) * size] = content

    def write(self, sequence, start):
        """What a forward does: write the new tokens' slots, then tell the index about full blocks."""
        table, parent = sequence.table, self.name(sequence, start - 1) if start else (sequence.salt,)
        for slot, token in zip(table.slots(start, table.length - start), sequence.tokens[start:]):
            parent = self.names.setdefault((parent, token), len(self.names))
            block = slot // self.size
            assert self.pool.count(block) == 1 and not self.pool.holds(block), "written while not this table's alone"
            self.memory["device"][slot] = parent
        full = table.length // self.size
        self.pool.insert(sequence.tokens[: full * self.size], table.blocks[:full], sequence.salt)

    def unchanged_after(self, action):
        """Run it. On NoRoom nothing may have changed; True if it went through."""
        before = self.snapshot()
        try:
            action()
        except NoRoom:
            assert self.snapshot() == before, "a failed allocation changed something"
            self.count("no room")
            return False
        return True

    def snapshot(self):
        pools = [([p.count(b) for b in range(p.num_blocks)], p.free_count) for p in self.pools.values()]
        held = [self.pool.holds(b) for b in range(self.pool.num_blocks)]
        return pools, held, [(list(s.table.blocks), s.table.length, s.home) for s in self.sequences]

    # The operations.

    def admit(self, tokens, salt):
        hit = self.pool.match(tokens, salt)
        assert len(hit) * self.size <= len(tokens) - 1
        self.pool.share(hit)
        table = BlockTable(self.size, hit, len(hit) * self.size)
        try:
            pairs = table.append(self.pool, len(tokens) - table.length)
        except NoRoom:
            table.free(self.pool)
            self.waiting.append((tokens, salt))
            return
        assert not pairs, "a prefix hit needs no copy: only whole blocks are shared"
        sequence = Sequence(table, list(tokens), salt)
        self.sequences.append(sequence)
        self.write(sequence, len(hit) * self.size)
        self.count("cache hit" if hit else "cache miss")

    def append(self, sequence, tokens):
        start = sequence.table.length
        if self.unchanged_after(lambda: self.copy(sequence.table.append(self.pool, len(tokens)))):
            sequence.tokens += tokens
            self.write(sequence, start)

    def rewrite(self, sequence, keep, token):
        """Roll back to `keep` tokens, then write another one: copy-on-write where others hold the block."""
        sequence.table.truncate(self.pool, keep)
        del sequence.tokens[keep:]
        before = self.pool.free_count
        pairs = []
        if self.unchanged_after(lambda: pairs.extend(sequence.table.writable(self.pool, keep))):
            self.copy(pairs)
            assert sequence.table.writable(self.pool, keep) == []
            self.count("copy" if pairs else "no copy")
            assert self.pool.free_count <= before
            self.append(sequence, [token])

    def fork(self, sequence):
        free = self.pool.free_count
        twin = sequence.table.fork(self.pool)
        assert self.pool.free_count == free, "a fork costs no block"
        self.sequences.append(Sequence(twin, list(sequence.tokens), sequence.salt))

    def free(self, sequence):
        blocks = list(sequence.table.blocks)
        sequence.table.free(self.pools[sequence.home])
        self.sequences.remove(sequence)
        return blocks

    def preempt(self, sequence):
        """By recompute: everything goes, the tokens wait to be admitted again."""
        self.free(sequence)
        if sequence.tokens:
            self.waiting.append((sequence.tokens, sequence.salt))

    def resume(self):
        if self.waiting:
            self.admit(*self.waiting.pop(0))

    def swap(self, sequence):
        there = "host" if sequence.home == "device" else "device"
        pairs = []
        swap = lambda: pairs.extend(sequence.table.swap(self.pools[sequence.home], self.pools[there]))  # noqa: E731
        if self.unchanged_after(swap):
            self.copy(pairs, sequence.home, there)
            sequence.home = there
            self.count("swap to " + there + (", shared" if len(pairs) < len(sequence.table.blocks) else ""))

    def abuse(self, sequence):
        """Free more often than held; share a free block: an error that changes nothing."""
        pool, blocks = self.pools[sequence.home], sequence.table.blocks
        bad = [(pool.free, [blocks[0]] * (pool.count(blocks[0]) + 1)), (pool.free, [*blocks, pool.num_blocks])]
        unheld = [b for b in range(pool.num_blocks) if not pool.count(b)]
        bad += [(pool.free, [*blocks, b]) for b in unheld[:1]]
        bad += [(pool.share, [*blocks, b]) for b in unheld if not pool.holds(b)][:1]
        before = self.snapshot()
        for method, argument in bad:
            with pytest.raises(PoolError):
                method(argument)
            assert self.snapshot() == before
        self.count("abuse")

    # What must hold.

    def check(self, everything=True):
        for home, pool in self.pools.items():
            pool.check([s.table for s in self.sequences if s.home == home])
        for sequence in self.sequences if everything else self.sequences[-1:]:
            table, memory, parent = sequence.table, self.memory[sequence.home], (sequence.salt,)
            assert table.length == len(sequence.tokens)
            for slot, token in zip(table.slots(0, table.length), sequence.tokens):
                parent = self.names.setdefault((parent, token), len(self.names))
                assert memory[slot] == parent, "a table reads what it did not write"

    def close(self):
        for sequence in list(self.sequences):
            self.free(sequence)
        self.check()
        for pool in self.pools.values():
            assert pool.free_count == pool.num_blocks, "blocks were lost"
            blocks = pool.allocate(pool.num_blocks)
            assert sorted(blocks) == list(range(pool.num_blocks))
            pool.free(blocks)


def random_operation(world, rng):
    here = [s for s in world.sequences if s.home == "device"]
    tokens = lambda most: [rng.choice((0, 0, 0, 1)) for _ in range(rng.randint(1, most))]  # noqa: E731
    roll = rng.random()
    if not here or roll < 0.16:
        return world.admit(tokens(5 * world.size), rng.choice(("", "", "s")))
    sequence = rng.choice(here)
    if roll < 0.55:
        world.append(sequence, tokens(3))
    elif roll < 0.65 and len(world.sequences) < 12:
        world.fork(sequence)
    elif roll < 0.78:
        world.free(rng.choice(world.sequences))
    elif roll < 0.84:
        world.rewrite(
            sequence, rng.randint(max(0, sequence.table.length - 3), sequence.table.length), rng.choice((0, 1))
        )
    elif roll < 0.88:
        world.preempt(sequence)
    elif roll < 0.92:
        world.resume()
    elif roll < 0.99:
        world.swap(rng.choice(world.sequences))
    elif sequence.table.blocks:
        world.abuse(sequence)


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("index", INDEXES)
def test_the_invariant_holds_over_many_random_operations(index, block_size):
    rng, seen = random.Random(block_size), {}
    for _ in range(6):  # 3 indexes x 3 block sizes x 6 worlds x 2000 = 108 000 operations
        world = World(rng.randint(8, 24), block_size, rng.randint(0, 1) * 7 + 1, index)
        for step in range(2000):
            random_operation(world, rng)
            world.check(everything=step % 20 == 0)
        world.close()
        seen = {event: seen.get(event, 0) + times for event, times in (world.seen | seen).items()}
    expected = {"no room", "cache miss", "swap to host", "swap to device", "abuse", "no copy"}
    expected |= {"swap to host, shared", "swap to device, shared"}
    expected |= {"copy"} if block_size > 1 else set()  # of blocks of one token, none is ever half full
    expected |= {"cache hit"} if index != "off" else set()
    assert expected <= seen.keys()


class Machine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis, which shrinks a failure to the few that matter."""

    @initialize(
        blocks=st.integers(1, 12),
        size=st.integers(1, 4),
        host=st.integers(1, 6),
        index=st.sampled_from(sorted(INDEXES)),
    )
    def start(self, blocks, size, host, index):
        self.world = World(blocks, size, host, index)

    def pick(self, data, home="device"):
        return data.draw(st.sampled_from([s for s in self.world.sequences if home in (s.home, "any")]))

    def some(self):
        return any(s.home == "device" for s in self.world.sequences)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(["", "s"]))
    def admit(self, tokens, salt):
        self.world.admit(tokens, salt)

    @precondition(some)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, data, tokens):
        self.world.append(self.pick(data), tokens)

    @precondition(some)
    @rule(data=st.data(), back=st.integers(0, 5), token=st.integers(0, 1))
    def rewrite(self, data, back, token):
        sequence = self.pick(data)
        self.world.rewrite(sequence, max(0, sequence.table.length - back), token)

    @precondition(some)
    @rule(data=st.data())
    def fork(self, data):
        self.world.fork(self.pick(data))

    @precondition(lambda self: self.world.sequences)
    @rule(data=st.data())
    def free(self, data):
        self.world.free(self.pick(data, "any"))

    @precondition(some)
    @rule(data=st.data())
    def preempt(self, data):
        self.world.preempt(self.pick(data))

    @rule()
    def resume(self):
        self.world.resume()

    @precondition(lambda self: self.world.sequences)
    @rule(data=st.data())
    def swap(self, data):
        self.world.swap(self.pick(data, "any"))

    @precondition(lambda self: any(s.table.blocks for s in self.world.sequences if s.home == "device"))
    @rule(data=st.data())
    def abuse(self, data):
        self.world.abuse(data.draw(st.sampled_from([s for s in self.world.sequences if s.table.blocks])))

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestMachine = Machine.TestCase


def test_blocks_are_handed_out_least_recently_freed_first():
    pool = BlockPool(4, 2)
    a, b = pool.allocate(2), pool.allocate(2)
    pool.free(b)
    pool.free(a)
    assert pool.allocate(4) == [b[1], b[0], a[1], a[0]]


def test_failed_allocation_leaves_everything_as_it_was():
    pool = BlockPool(3, 4)
    table = BlockTable(4)
    table.append(pool, 5)
    with pytest.raises(NoRoom, match="2 blocks were asked for; 1 of 3 are free"):
        table.append(pool, 8)
    assert (pool.free_count, table.length, len(table.blocks)) == (1, 5, 2)
    table.append(pool, 7)  # what fits still fits, to the last slot of the pool
    assert (pool.free_count, table.length, table.slots(4, 2)) == (
        0,
        12,
        [table.blocks[1] * 4, table.blocks[1] * 4 + 1],
    )


def test_copy_on_write_after_a_fork():
    pool, table = BlockPool(8, 4), BlockTable(4)
    table.append(pool, 6)
    twin, triplet = table.fork(pool), table.fork(pool)
    assert [pool.count(b) for b in table.blocks] == [3, 3] and pool.free_count == 6
    assert twin.needs(pool, 1) == 1 and twin.needs(pool, 0) == 0
    ((source, target),) = twin.append(pool, 1)
    assert source == table.blocks[1] and twin.blocks == [table.blocks[0], target]
    assert triplet.append(pool, 1) == [(source, triplet.blocks[1])]
    assert table.append(pool, 1) == [], "the last holder writes in place"
    for each in (table, twin, triplet):
        each.free(pool)
    pool.check([])
    assert pool.free_count == 8


def test_a_fork_at_a_block_border_copies_nothing():
    pool, table = BlockPool(8, 4), BlockTable(4)
    table.append(pool, 8)
    twin = table.fork(pool)
    assert twin.append(pool, 1) == [] and twin.blocks[:2] == table.blocks


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8"])
def test_a_bad_size_is_one_clear_error(bad):
    with pytest.raises(ParamsError, match="num_blocks"):
        BlockPool(bad, 4)
    with pytest.raises(ParamsError, match="block_size"):
        BlockPool(4, bad)


def test_arithmetic():
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("1:a", ""), ("1", ":a")]
    assert len({cache_salt(*pair) for pair in pairs}) == len(pairs)


def test_internal_waste():
    lengths = [1, 16, 17, 40]
    paged, reserved = held_in_blocks(lengths, 16), held_in_reservations(lengths, 64)
    assert (paged.slots, paged.used, paged.wasted) == (96 + 16, 74, 38)
    assert (reserved.slots, reserved.wasted, reserved.waste) == (256, 182, 182 / 256)
    assert held_in_blocks(lengths, 1).waste == 0 == held_in_blocks([], 16).waste
    pool = BlockPool(10, 16)
    for length in lengths:
        BlockTable(16).append(pool, length)
    assert pool.used_count * 16 == paged.slots


def test_external_waste():
    arena = Arena(100)
    starts = [arena.allocate(20) for _ in range(5)]
    assert starts == [0, 20, 40, 60, 80] and arena.allocate(1) is None and arena.holes == []
    arena.free(20)
    arena.free(60)
    assert (arena.free_slots, arena.allocate(30), arena.useless_slots(30)) == (40, None, 40)
    assert arena.allocate(15) == 20 and arena.holes == [(35, 5), (60, 20)] and arena.useless_slots(15) == 10
    arena.free(40)
    assert arena.holes == [(35, 45)]
    assert BlockPool(100, 1).allocate(100)  # blocks: whatever is free serves


def forked(count=3, tokens=10):
    """A prompt of `tokens` tokens and its forks, each with one token of its own, in blocks of 4."""
    device, host, table = BlockPool(16, 4), BlockPool(16, 4), BlockTable(4)
    table.append(device, tokens)
    tables = [table, *(table.fork(device) for _ in range(count - 1))]
    for each in tables:
        each.append(device, 1)
    return device, host, tables


def test_forks_that_are_swapped_share_their_blocks_on_the_host_and_again_on_the_device():
    device, host, tables = forked()
    assert device.used_count == 5  # two whole blocks, and three last ones
    assert [len(table.swap(device, host)) for table in tables] == [3, 1, 1]
    assert (device.used_count, host.used_count) == (0, 5)
    assert [len(table.swap(host, device)) for table in tables] == [3, 1, 1]
    assert (device.used_count, host.used_count) == (5, 0)
    device.check(tables)


def test_a_fork_that_comes_back_shares_what_its_sibling_kept_on_the_device():
    device, host, (first, second, third) = forked()
    assert len(second.swap(device, host)) == 3
    first.append(device, 9)  # its last block fills up, and it takes two more
    kept = list(first.blocks[:2])
    assert second.swap_needs(host, device) == 1
    assert len(second.swap(host, device)) == 1 and second.blocks[:2] == kept
    device.check([first, second, third])
    host.check([])


def test_a_block_that_was_written_since_is_copied_and_not_shared():
    device, host, table = BlockPool(8, 4), BlockPool(8, 4), BlockTable(4)
    table.append(device, 6)
    twin = table.fork(device)
    twin.swap(device, host)
    table.truncate(device, 5)
    table.append(device, 1)  # another token at place 5, in the block that twin's copy was made of
    ((_, target),) = twin.swap(host, device)
    assert twin.blocks[0] == table.blocks[0] and twin.blocks[1] == target != table.blocks[1]
    table.swap(device, host)
    table.free(host)
    fresh = BlockTable(4)
    fresh.append(host, 8)  # the host's blocks serve another: not twins of anything now
    assert len(twin.swap(device, host)) == 2


def test_a_block_made_writable_has_no_copy_elsewhere_any_more():
    device, host, table = BlockPool(8, 4), BlockPool(8, 4), BlockTable(4)
    table.append(device, 8)
    twin = table.fork(device)
    twin.swap(device, host)
    assert table.writable(device, 4) == [], "its alone now: written in place"
    assert len(twin.swap(host, device)) == 1 and twin.blocks[0] == table.blocks[0] != twin.blocks[1]


def test_a_swap_without_room_changes_nothing_even_where_part_is_there_already():
    device, host, (first, second, _) = forked()
    first.swap(device, host)
    host.allocate(13)
    before = [host.count(block) for block in range(16)]
    with pytest.raises(NoRoom, match="1 blocks were asked for; 0 of 16 are free"):
        second.swap(device, host)
    assert [host.count(block) for block in range(16)] == before and device.count(second.blocks[0]) == 2


def test_writing_into_the_middle_copies_every_shared_block_from_there():
    pool, table = BlockPool(8, 2), BlockTable(2)
    table.append(pool, 6)
    twin, old = table.fork(pool), list(table.blocks)
    assert twin.writable(pool, 3) == [(old[1], twin.blocks[1]), (old[2], twin.blocks[2])]
    assert twin.blocks[0] == old[0] and table.blocks == old
    pool.check([table, twin])
    with pytest.raises(NoRoom):
        pool.allocate(4)
    other, before = table.fork(pool), pool.free_count
    pool.allocate(before - 2)
    with pytest.raises(NoRoom):
        other.writable(pool, 0)  # three copies, two blocks
    assert (pool.free_count, other.blocks) == (2, old)
