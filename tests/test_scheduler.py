"""The scheduler without a model: a symbolic memory stands in for K and V, a hash for the next token.

Every slot holds the name of the prefix whose KV it would hold. Before a token is computed, all slots before it must
name its own prefix; after that its slot is written. So a block that is lost, shared by accident, copied too late or
served to the wrong request is found, and the tokens of every request must be those it gets alone.
"""

import subprocess
import sys
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache.block_pool import BlockPool
from minillm.cache.prefix_hash import HashIndex
from minillm.cache.radix import RadixIndex
from minillm.engine.options import EngineOptions
from minillm.engine.request import Request, State
from minillm.engine.scheduler import Scheduler
from minillm.errors import ParamsError, PromptError

INDEXES = {"off": lambda size: None, "hash": HashIndex, "radix": RadixIndex}


def next_token(tokens, answer=0):
    return crc32(repr((answer, tokens)).encode()) % 3


def alone(prompt, limit, answer=0):
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(next_token(tokens, answer))
    return tokens[len(prompt) :]


class World:
    """A scheduler, and the memory that its batches would write."""

    def __init__(self, **changes):
        defaults = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
        defaults["num_host_blocks"] = 64 if changes.get("preemption") == "swap" else 0
        self.options = EngineOptions(**{**defaults, **changes, "keep_log": True})
        size = self.options.block_size
        self.pool = BlockPool(self.options.num_blocks, size, INDEXES[self.options.enable_prefix_caching](size))
        self.host = BlockPool(self.options.num_host_blocks, size) if self.options.num_host_blocks else None
        self.scheduler = Scheduler(self.options, self.pool, self.host)
        self.memory = {"device": {}, "host": {}}  # block -> {offset: name}
        self.requests = []

    def add(self, prompt, limit=3, n=1, **fields):
        name = f"r{len(self.requests)}"
        group = [Request(f"{name}.{i}", list(prompt), limit, answer=i, **fields) for i in range(n)]
        group[0].forks = group[1:]
        self.scheduler.add(group[0])
        self.requests.append(group)
        return group[0]

    def step(self):
        batch = self.scheduler.schedule()
        options, waiting = self.options, self.scheduler.num_waiting
        assert batch.num_tokens <= options.max_num_batched_tokens and batch.budget >= 0
        assert len(self.scheduler.running) <= options.max_num_seqs
        assert batch.entries or not self.scheduler.has_work, "a step in which nobody gets on"
        self.check()
        for kind, pairs in batch.copies:
            source, target = {
                "copy": ("device", "device"),
                "swap_out": ("device", "host"),
                "swap_in": ("host", "device"),
            }[kind]
            read = [dict(self.memory[source].get(a, {})) for a, _ in pairs]
            for (_, b), content in zip(pairs, read):
                self.memory[target][b] = content
        for request, entry in batch.entries.items():
            self.compute(request, entry)
        sampled = {
            r: next_token(r.tokens, r.answer)
            for owner in batch.sampling
            for r in (owner, *owner.forks)
            if not r.finished
        }
        self.scheduler.update(batch, sampled)
        self.scheduler.finish([r for r in sampled if len(r.output) >= r.limit])
        assert self.scheduler.num_waiting <= waiting + sum(len(g) for g in self.requests)
        self.check()
        return batch

    def compute(self, request, entry):
        assert request.state is State.RUNNING and not request.on_host and entry.start == request.computed
        assert 0 < entry.count <= request.remaining and entry.samples == (entry.count == request.remaining)
        assert self.options.enable_chunked_prefill or entry.samples
        size = self.options.block_size
        for i in range(entry.end):
            block, name = request.table.blocks[i // size], (request.salt, tuple(request.tokens[: i + 1]))
            if i < entry.start:
                assert self.memory["device"][block][i % size] == name, f"{request} reads another prefix at token {i}"
            else:
                assert self.pool.count(block) == 1 and not self.pool.holds(block), "writes where others read"
                self.memory["device"].setdefault(block, {})[i % size] = name

    def check(self):
        every = [r for group in self.requests for r in group if r.table is not None]
        self.pool.check([r.table for r in every if not r.on_host])
        if self.host is not None:
            self.host.check([r.table for r in every if r.on_host])
        for group in self.requests:
            for r in group:
                assert (r.state is State.RUNNING) == (r in self.scheduler.running)
                assert not r.finished or not r.table or not r.table.blocks
        assert self.scheduler.running == sorted(self.scheduler.running, key=lambda r: r.order), "most urgent first"

    def run(self, most=3000):
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "requests that never end"
        assert self.pool.free_count == self.pool.num_blocks
        assert self.host is None or self.host.free_count == self.host.num_blocks
        return self

    def outputs(self):
        return [[r.output for r in group] for group in self.requests]


PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 24)).map(lambda s: [(s[0] * i) % 3 for i in range(s[1])])
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "limit": st.integers(1, 12),
        "n": st.sampled_from([1, 1, 1, 3]),
        "priority": st.integers(0, 3),
        "salt": st.sampled_from(["", "", "other"]),
        "arrival": st.integers(0, 12),
        "abort": st.sampled_from([None, None, None, 0, 1, 3, 7]),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 5]),
        "max_num_seqs": st.integers(1, 5),
        "enable_prefix_caching": st.sampled_from(["off", "hash", "radix"]),
        "enable_chunked_prefill": st.booleans(),
        "prefill_first": st.booleans(),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "victim": st.sampled_from(["least_urgent", "fewest_tokens"]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "ageing": st.integers(1, 20),
        "headroom": st.integers(0, 2),
    }
)


@settings(max_examples=150, deadline=None)
@given(OPTIONS, st.lists(REQUESTS, min_size=1, max_size=8), st.data())
def test_any_options_give_every_request_the_tokens_it_gets_alone(options, wanted, data):
    longest = max(len(w["prompt"]) + w["limit"] - 1 for w in wanted)
    least = -(-longest // options["block_size"])
    options["num_blocks"] = data.draw(st.integers(least, 3 * least), label="num_blocks")
    if options["preemption"] == "swap":
        options["num_host_blocks"] = data.draw(st.integers(0, 2 * least), label="num_host_blocks")
    floor = options["max_num_seqs"] if options["enable_chunked_prefill"] else max(longest, options["max_num_seqs"])
    options["max_num_batched_tokens"] = data.draw(st.integers(floor, floor + 20), label="max_num_batched_tokens")
    if options["enable_prefix_caching"] != "off":
        options["lookahead"] = data.draw(st.integers(1, 4), label="lookahead")
        options["patience"] = 3
    world = World(**options)
    todo, aborts = list(wanted), []
    for step in range(3000):
        for w in [w for w in todo if w["arrival"] <= step]:
            todo.remove(w)
            fields = {key: w[key] for key in ("prompt", "limit", "n", "priority", "salt")}
            world.add(**fields)
            w["group"] = world.requests[-1]
            if w["abort"] is not None:
                aborts.append((step + w["abort"], w["group"]))
        for group in [group for when, group in aborts if when == step]:
            world.scheduler.finish(group)
            world.check()
        if not todo and not world.scheduler.has_work:
            break
        world.step()
    world.run()
    for w in wanted:
        for i, request in enumerate(w["group"]):
            expected = alone(w["prompt"], w["limit"], i)
            assert request.finished and request.output == expected[: len(request.output)]
            assert w["abort"] is not None or request.output == expected


def entries(world, step):
    return [(name.partition(".")[0], count, kind) for name, _, count, kind in world.scheduler.log[step].entries]


def test_a_chunk_rides_with_the_decodes():
    world = World(max_num_batched_tokens=6)
    world.add([1] * 3, 8)
    world.step()
    world.add([2] * 14, 2)
    for _ in range(3):
        world.step()
    assert [entries(world, i) for i in (1, 2, 3)] == [
        [("r0", 1, "decode"), ("r1", 5, "prefill")],
        [("r0", 1, "decode"), ("r1", 5, "prefill")],
        [("r0", 1, "decode"), ("r1", 4, "prefill")],
    ]


def test_a_prompt_of_one_token_is_a_prefill():
    world = World()
    world.add([1], 2)
    world.run()
    assert [entries(world, i) for i in (0, 1)] == [[("r0", 1, "prefill")], [("r0", 1, "decode")]]


def test_without_chunks_prefill_first_stalls_the_decodes_and_decode_first_makes_the_prompt_wait():
    for prefill_first in (True, False):
        world = World(enable_chunked_prefill=False, prefill_first=prefill_first, max_num_batched_tokens=14)
        world.add([1] * 3, 4)
        world.step()
        world.add([2] * 13, 2)
        world.step()
        assert entries(world, 1) == (
            [("r1", 13, "prefill")] if prefill_first else [("r0", 1, "decode"), ("r1", 13, "prefill")]
        )
    world = World(enable_chunked_prefill=False, max_num_batched_tokens=13, max_num_seqs=2)
    world.add([1] * 3, 4)
    world.step()
    world.add([2] * 12, 2)
    world.add([2] * 11, 2)
    world.run()
    assert [s.admitted for s in world.scheduler.log][:3] == [["r0.0"], ["r1.0"], []]


def test_without_chunks_only_what_is_not_cached_of_a_prompt_must_fit_the_step():
    world = World(enable_chunked_prefill=False, enable_prefix_caching="hash")
    world.add([1] * 13, 1)
    world.run()
    world.add([2] * 3, 4)
    world.step()
    late = world.add([1] * 16, 1)  # twelve are cached; sixteen would not fit beside the decode
    assert world.step().admitted == [late]
    assert entries(world, 2) == [("r1", 1, "decode"), ("r2", 4, "prefill")]


def test_prefill_first_with_chunks_gives_decodes_the_rest():
    world = World(prefill_first=True, max_num_batched_tokens=8)
    world.add([1] * 3, 6)
    world.step()
    world.add([2] * 10, 2)
    world.step()
    world.step()
    assert entries(world, 1) == [("r1", 8, "prefill")]
    assert entries(world, 2) == [("r1", 2, "prefill"), ("r0", 1, "decode")]


def test_first_come_first_served():
    world = World(max_num_seqs=2)
    for length in (5, 2, 9, 1):
        world.add([1] * length, 4)
    world.run()
    assert [name for s in world.scheduler.log for name in s.admitted] == ["r0.0", "r1.0", "r2.0", "r3.0"]


def test_the_urgent_go_first_and_the_patient_are_served_in_the_end():
    world = World(policy="priority", ageing=10, max_num_seqs=1)
    slow = world.add([2, 2], 2, priority=4)
    for _ in range(60):  # one urgent request arrives every step, more than can be served
        world.add([1], 1, priority=0)
        world.step()
        if slow.finished:
            break
    admitted = [name for s in world.scheduler.log for name in s.admitted]
    assert slow.finished and 30 <= admitted.index("r0.0") <= 45
    never = World(policy="priority", ageing=10**9, max_num_seqs=1)
    slow = never.add([2, 2], 2, priority=4)
    for _ in range(60):
        never.add([1], 1, priority=0)
        never.step()
    assert slow.state is State.WAITING, "without ageing it would starve: the test would prove nothing"


def preempted(world):
    return [name.partition(".")[0] for step in world.scheduler.log for name, _ in step.preempted]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("chunked", [True, False])
def test_an_urgent_request_takes_the_slot_of_the_least_urgent_one(preemption, chunked):
    world = World(policy="priority", max_num_seqs=3, preemption=preemption, enable_chunked_prefill=chunked)
    for level in (2, 5, 2):
        world.add([1] * 3, 9, priority=level)
    world.step()
    urgent = world.add([2] * 5, 2, priority=0)
    batch = world.step()
    assert batch.admitted == [urgent] and urgent in batch.sampling, "its whole prompt is computed in this very step"
    assert batch.preempted == [(world.requests[1][0], preemption)]
    assert len(batch.entries) == 3, "and the others decode beside it"
    world.run()
    assert preempted(world) == ["r1"], "whoever made way comes back when there is a slot, and pushes nobody out"
    assert world.outputs() == [[alone([1] * 3, 9)]] * 3 + [[alone([2] * 5, 2)]]


def test_without_chunks_an_urgent_prompt_is_computed_whole_before_the_decodes():
    world = World(policy="priority", max_num_seqs=3, enable_chunked_prefill=False, max_num_batched_tokens=8)
    for _ in range(3):
        world.add([1] * 2, 5, priority=1)
        world.step()
    urgent = world.add([2] * 7, 2, priority=0)
    batch = world.step()
    assert batch.entries[urgent].count == 7 and urgent in batch.sampling and len(batch.entries) == 2
    world.run()
    assert world.outputs() == [[alone([1] * 2, 5)]] * 3 + [[alone([2] * 7, 2)]]


def test_an_urgent_request_takes_as_many_blocks_as_it_needs_and_no_more():
    world = World(policy="priority", num_blocks=8, block_size=2, headroom=0, max_num_batched_tokens=20)
    for level in (1, 2, 3, 3):
        world.add([1] * 3, 2, priority=level)
    world.step()
    urgent = world.add([2] * 6, 2, priority=0)
    batch = world.step()
    assert batch.admitted == [urgent] and [r.priority for r, _ in batch.preempted] == [3, 3]
    world.run()
    assert world.outputs() == [[alone([1] * 3, 2)]] * 4 + [[alone([2] * 6, 2)]]


def test_a_step_that_preempts_admits_only_the_one_it_made_way_for():
    world = World(policy="priority", num_blocks=8, block_size=2, headroom=0)
    world.add([1] * 3, 5, priority=0)
    world.add([1] * 11, 2, priority=3)
    world.step()
    urgent, next_one = world.add([2] * 5, 2, priority=0), world.add([2] * 2, 2, priority=0)
    batch = world.step()
    assert batch.preempted == [(world.requests[1][0], "recompute")]
    assert batch.admitted == [urgent] and world.pool.free_count >= 1, "there was room, and still nobody else came"
    assert world.step().admitted == [next_one]
    world.run()


def test_nobody_is_pushed_out_in_vain_or_by_an_equal():
    world = World(policy="priority", num_blocks=12, block_size=2, headroom=0, max_num_seqs=4)
    world.add([1] * 8, 6, priority=0)
    world.add([1] * 3, 6, priority=3)
    world.step()
    world.add([2] * 17, 1, priority=0)  # nine blocks: more than are free and r1 could give
    world.add([2] * 3, 1, priority=3)
    for _ in range(3):
        assert not world.step().preempted
    world.run()
    assert world.outputs()[2:] == [[alone([2] * 17, 1)], [alone([2] * 3, 1)]]
    plain = World(policy="fcfs", max_num_seqs=1)
    plain.add([1] * 3, 9, priority=9)
    plain.step()
    plain.add([2] * 3, 1, priority=0)
    plain.run()
    assert preempted(plain) == [], 'only policy="priority" looks at priorities'


def test_forks_are_not_pushed_out_for_blocks_that_they_share():
    """Each holds 5 blocks, all of them together 7: that is not enough, however often the shared ones are counted."""
    world = World(policy="priority", num_blocks=12, headroom=0, max_num_batched_tokens=40)
    world.add([1] * 14, 3, priority=0)
    world.add([1] * 18, 6, n=3, priority=1)
    for _ in range(2):
        world.step()
    assert world.pool.free_count == 1
    world.add([2] * 35, 1, priority=0)  # nine blocks
    batch = world.step()
    assert not batch.preempted and not batch.admitted
    world.run()


@pytest.mark.parametrize("victim", ["least_urgent", "fewest_tokens"])
def test_among_equals_priority_is_first_come_first_served(victim):
    """One that lost its place to make room is older than some who run; it does not push them out."""
    logs = []
    for policy in ("fcfs", "priority"):
        world = World(policy=policy, victim=victim, num_blocks=9, block_size=2, headroom=0, max_num_batched_tokens=20)
        for length, limit in ((4, 9), (2, 9), (6, 3), (3, 4)):
            world.add([1] * length, limit, priority=2)
        world.run()
        logs.append(world.scheduler.log)
    assert logs[0] == logs[1] and any(step.preempted for step in logs[0])


def test_nobody_is_pushed_out_where_the_headroom_would_still_be_missing():
    world = World(policy="priority", num_blocks=8, block_size=2, headroom=2, max_num_batched_tokens=20)
    world.add([1] * 3, 4, priority=0)
    world.add([1] * 3, 3, priority=3)
    world.step()
    assert world.pool.free_count == 4
    world.add([2] * 10, 1, priority=0)  # five blocks and two for r0: more than r1's two and the free ones
    batch = world.step()
    assert not batch.preempted and not batch.admitted
    world.run()
    assert preempted(world) == []


def test_who_waited_long_enough_is_not_pushed_out_any_more():
    def run(ageing, most):
        """A slow request of level 4; an urgent one arrives every second step, and takes two."""
        world = World(policy="priority", ageing=ageing, max_num_seqs=1)
        slow = world.add([2, 2], 12, priority=4)
        for step in range(most):
            if step % 2:
                world.add([1], 2, priority=0)
            world.step()
            if slow.finished:
                break
        return world, slow, step

    world, slow, step = run(ageing=10, most=200)
    times = preempted(world).count("r0")
    assert slow.finished and slow.output == alone([2, 2], 12) and 1 <= times <= 40 and 40 <= step <= 70
    never = run(ageing=10**9, most=200)[1]
    assert not never.finished, "without ageing it would starve: the test would prove nothing"


def test_victims_for_an_urgent_request_may_be_chosen_by_what_they_lose():
    world = World(policy="priority", victim="fewest_tokens", max_num_seqs=3, max_num_batched_tokens=20)
    for length in (6, 3, 6):
        world.add([1] * length, 5, priority=1 + (length > 3))
    world.step()
    world.add([2] * 2, 1, priority=0)
    world.run()
    assert preempted(world) == ["r1"], "r2 is less urgent, and has more to lose"


def test_forks_swapped_for_an_urgent_request_keep_sharing_their_prompt():
    world = World(policy="priority", preemption="swap", max_num_seqs=4, num_blocks=12, headroom=0)
    world.add([1] * 18, 6, n=3, priority=1)
    for _ in range(3):
        world.step()
    assert world.pool.used_count == 4 + 3
    world.add([2] * 41, 1, priority=0)
    world.step()
    assert world.host.used_count == 4 + 3 and world.scheduler.log[-1].preempted == [
        (f"r0.{i}", "swap") for i in (2, 1, 0)
    ]
    for _ in range(40):
        if any(r.on_host for r in world.requests[0]) or world.requests[1][0].table.blocks:
            world.step()
    assert world.pool.used_count <= 4 + 3 + 3, "and again on the device"
    world.run()
    assert world.outputs() == [[alone([1] * 18, 6, i) for i in range(3)], [alone([2] * 41, 1)]]


def test_forks_come_back_from_the_host_where_there_is_room_for_what_they_share_once():
    world = World(policy="priority", preemption="swap", num_blocks=10, headroom=0, max_num_batched_tokens=40)
    forks = world.add([1] * 18, 6, n=3, priority=1).forks
    for _ in range(2):
        world.step()
    world.add([2] * 33, 1, priority=0)
    assert len(world.step().preempted) == 3
    assert world.step().admitted == [world.requests[0][0], *forks], "7 blocks, not 15"
    world.run()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_least_urgent_is_preempted_and_comes_back_first(preemption):
    world = World(num_blocks=6, block_size=2, headroom=0, preemption=preemption, max_num_batched_tokens=20)
    for _ in range(3):
        world.add([1, 1, 1, 1], 5)
    world.run()
    log = world.scheduler.log
    assert [p for s in log for p in s.preempted] == [("r2.0", preemption), ("r1.0", preemption)]
    assert [name for s in log for name in s.admitted] == ["r0.0", "r1.0", "r2.0", "r1.0", "r2.0"]
    assert world.outputs() == [[alone([1] * 4, 5)]] * 3
    computed = {r: sum(count for s in log for name, _, count, _ in s.entries if name == r) for r in ("r1.0", "r2.0")}
    # Prompt 4 and answer 5, whose last token is not computed: 8. Recomputed: 6 of r1's tokens, 4 of r2's.
    assert computed == ({"r1.0": 8, "r2.0": 8} if preemption == "swap" else {"r1.0": 14, "r2.0": 12})


def test_a_victim_may_be_chosen_by_what_it_would_lose():
    world = World(num_blocks=8, block_size=2, headroom=0, victim="fewest_tokens", max_num_batched_tokens=20)
    world.add([1] * 4, 9)
    world.add([1] * 2, 9)
    world.add([1] * 6, 9)
    while not any(s.preempted for s in world.scheduler.log):
        world.step()
    assert next(s for s in world.scheduler.log if s.preempted).preempted[0][0] == "r1.0"
    world.run()


def test_the_most_urgent_is_no_victim_even_if_it_would_lose_the_least():
    world = World(num_blocks=8, block_size=2, headroom=0, victim="fewest_tokens", max_num_batched_tokens=20)
    for length in (2, 4, 6):
        world.add([1] * length, 9)
    world.run()
    assert "r0" not in preempted(world) and "r1" in preempted(world)


def test_headroom_avoids_thrashing():
    def preemptions(headroom):
        world = World(num_blocks=16, block_size=1, headroom=headroom, max_num_batched_tokens=32)
        for _ in range(6):
            world.add([1] * 2, 10)
        world.run()
        return sum(len(s.preempted) for s in world.scheduler.log)

    assert preemptions(3) < preemptions(0)


def test_who_is_admitted_leaves_headroom_for_each_who_runs():
    for num_blocks in (4, 5):
        world = World(num_blocks=num_blocks, headroom=1)
        world.add([1] * 3, 2)
        world.step()
        late = world.add([2] * 12, 1)  # three blocks beside r0's one: the fifth is r0's headroom
        assert world.step().admitted == [late] * (num_blocks == 5)


def test_who_comes_back_from_the_host_leaves_headroom_for_each_who_runs():
    for num_blocks in (4, 5):
        world = World(policy="priority", preemption="swap", num_blocks=num_blocks, max_num_seqs=2, headroom=1)
        world.add([1], 4, priority=0)
        slow = world.add([1] * 8, 3, priority=3)
        for _ in range(2):
            world.step()
        world.add([2], 1, priority=0)  # for one step, in the slot of r1
        assert world.step().preempted == [(slow, "swap")] and world.host.used_count == 3
        assert world.step().admitted == [slow] * (num_blocks == 5), "three blocks beside r0's one and its headroom"
        world.run()


def test_what_can_never_fit_is_refused_at_once_and_the_rest_goes_on():
    world = World(num_blocks=4, block_size=4)
    world.add([1] * 16, 1)  # exactly the pool
    with pytest.raises(PromptError, match="need 5 blocks of 4, and the pool has 4"):
        world.add([1] * 16, 2)
    whole = World(enable_chunked_prefill=False, max_num_batched_tokens=8)
    with pytest.raises(PromptError, match="max_num_batched_tokens=8"):
        whole.add([1] * 8, 2)
    world.run()
    assert world.outputs() == [[alone([1] * 16, 1)]]


def test_the_longest_cached_prefix_goes_first_but_not_for_ever():
    world = World(enable_prefix_caching="radix", lookahead=4, patience=2, max_num_seqs=1, block_size=2)
    shared = [1, 2, 1, 0, 2, 2]
    world.add(shared, 1)
    world.run()
    world.add([0] * 6, 1)
    for _ in range(4):
        world.add([*shared, 1], 1)
    world.run()
    assert [name for s in world.scheduler.log for name in s.admitted][1:4] == ["r2.0", "r3.0", "r1.0"]


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_second_turn_finds_the_answer_of_the_first_in_the_cache(index):
    world = World(enable_prefix_caching=index)
    first = world.add([1] * 5, 12)
    world.run()
    second = world.add([*first.tokens, 2, 2], 1)
    world.run()
    assert len(second.prompt) == 19 and second.cached_tokens == 16


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_what_is_found_again_after_a_preemption_is_no_hit_of_the_prompt(index):
    world = World(policy="priority", max_num_seqs=1, enable_prefix_caching=index)
    slow = world.add([1] * 9, 3, priority=2)
    world.step()
    world.add([2] * 2, 1, priority=0)
    world.run()
    log = world.scheduler.log
    assert preempted(world) == ["r0"] and [e for s in log for e in s.entries if e[0] == "r0.0"][1][1] == 8
    assert slow.cached_tokens == 0, "it found its own blocks"


@pytest.mark.parametrize("slots", [2, 4])
def test_forks_found_of_the_prompt_what_their_owner_found(slots):
    world = World(enable_prefix_caching="hash", max_num_seqs=slots)
    world.add([1] * 9, 1)
    world.run()
    world.add([1] * 12, 2, n=3)
    world.run()
    assert [r.cached_tokens for r in world.requests[1]] == [8, 8, 8]


def test_a_prefix_cached_under_another_salt_moves_nobody_forward():
    world = World(enable_prefix_caching="hash", lookahead=4, max_num_seqs=1)
    world.add([1] * 9, 1)
    world.run()
    world.add([2] * 9, 1)
    world.add([1] * 9, 1, salt="other")
    world.run()
    assert [name for s in world.scheduler.log for name in s.admitted] == ["r0.0", "r1.0", "r2.0"]


def test_who_waits_on_the_host_is_not_passed_over_for_a_cached_prefix():
    world = World(enable_prefix_caching="hash", lookahead=4, max_num_seqs=1, policy="priority", preemption="swap")
    world.add([1] * 9, 1)
    world.run()
    slow = world.add([2] * 3, 3, priority=2)
    world.step()
    world.add([2] * 2, 1, priority=0)
    world.add([1] * 9, 1, priority=2)
    world.step()
    assert slow.on_host
    world.run()
    assert [name for s in world.scheduler.log for name in s.admitted][2:] == ["r2.0", "r1.0", "r3.0"]


def test_forks_share_the_prompt_and_copy_only_what_they_write():
    world = World(block_size=4, max_num_seqs=4)
    world.add([1] * 10, 3, n=3)
    world.step()
    assert world.pool.used_count == 3, "three answers, one prompt"
    batch = world.step()
    assert sum(len(pairs) for kind, pairs in batch.copies if kind == "copy") == 2, "the last to write has it alone"
    assert world.pool.used_count == 5
    world.run()
    assert world.outputs() == [[alone([1] * 10, 3, i) for i in range(3)]]


def test_forks_run_before_who_came_after_their_owner():
    world = World(max_num_seqs=4)
    world.add([1] * 20, 3, n=3)  # two steps
    late = world.add([2] * 3, 3)
    for _ in range(2):
        world.step()
    assert world.scheduler.running == [*world.requests[0], late]


def test_a_fork_aborted_before_its_owner_has_computed_the_prompt_never_starts():
    world = World()
    owner = world.add([1] * 20, 3, n=3)  # two steps
    world.step()
    fork, other = owner.forks
    world.scheduler.finish([fork])
    world.step()
    assert fork.finished and world.scheduler.running == [owner, other]
    world.run()
    assert world.outputs() == [[alone([1] * 20, 3), [], alone([1] * 20, 3, 2)]]


def test_more_forks_than_slots_wait_and_lose_nothing():
    world = World(max_num_seqs=2)
    world.add([1] * 5, 4, n=5)
    world.run()
    assert world.outputs() == [[alone([1] * 5, 4, i) for i in range(5)]]


def test_a_queue_of_ten_thousand_costs_a_step_no_more():
    world = World(max_num_seqs=4)
    for i in range(10_000):
        world.scheduler.add(Request(f"q{i}", [1, 2], 3))
    looked_at = []
    plain, world.scheduler._pop_waiting = world.scheduler._pop_waiting, lambda: looked_at.append(1) or plain()
    batch = world.scheduler.schedule()
    assert len(batch.entries) == len(looked_at) == 4 and world.scheduler.num_waiting == 9_996


ILLEGAL = {
    "max_num_seqs=0": {"max_num_seqs": 0},
    "block_size=True": {"block_size": True},
    "preemption='drop'": {"preemption": "drop"},
    "enable_prefix_caching=True": {"enable_prefix_caching": True},
    "enable_chunked_prefill=1": {"enable_chunked_prefill": 1},
    "max_num_batched_tokens=8": {"max_num_batched_tokens": 8},  # fewer than max_num_seqs
    "num_host_blocks=4": {"num_host_blocks": 4},  # without swap
    "lookahead=4": {"lookahead": 4},  # without a prefix cache
}


@pytest.mark.parametrize("message", ILLEGAL)
def test_illegal_options_and_mixes_are_one_clear_error(message):
    with pytest.raises(ParamsError, match=message):
        EngineOptions(**ILLEGAL[message])


def test_the_scheduler_needs_no_torch():
    code = "import sys, minillm.engine.scheduler; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
