"""Checks of exercise 06. Oracles: brute force, exact fractions, a server written another way, sums.

Chapter 06. All is counting; nothing here imports the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.compare import whole
from minillm.lab.estimates import estimates, slips

# 1. Admission.


def admit_slip(up=True, stop=True, take=True, edge=0, spare_counts=True, slots_count=True, each=False):
    def admit(waiting, slots, free, block_size, spare):
        count = 0
        for tokens in waiting:
            blocks = ceil(tokens / block_size) if up else tokens // block_size
            fits = free - blocks >= (spare if spare_counts else 0) + edge
            if (slots_count and count == slots) or (not fits and stop):
                break
            count += fits
            free -= (blocks + spare * each) * (fits and take)
        return count

    return admit


ADMIT = {
    "blocks are rounded up: a block that is begun is taken": admit_slip(up=False),
    "the first that does not fit ends it: nobody overtakes the head of the queue": admit_slip(stop=False),
    "what earlier ones took is gone: subtract it from the free blocks": admit_slip(take=False),
    "spare is a fixed number, not one for each that is admitted": admit_slip(each=True),
    "exactly `spare` blocks left are enough": admit_slip(edge=1),
    "`spare` blocks must stay free": admit_slip(spare_counts=False),
    "no more than there are slots": admit_slip(slots_count=False),
    "those are tokens: compare blocks with blocks": lambda w, s, f, b, p: admit_slip()(w, s, f, 1, p),
}


@register("06.admit", points=2, title="Admission by free blocks", hints=slips(ADMIT))
def admit(rng):
    cases = [([8, 9, 1], 4, 5, 4, 1), ([], 3, 9, 4, 0), ([40, 1, 1], 4, 5, 4, 0), ([4, 4, 4], 0, 9, 4, 0)]
    cases += [([4, 4, 4, 4], 9, 4, 4, 1), ([1, 1, 1], 9, 2, 4, 0), ([4, 5, 8], 2, 30, 4, 3), ([9], 1, 1, 8, 0)]
    for _ in range(8):
        waiting = [rng.randint(1, 40) for _ in range(rng.randint(3, 9))]
        cases.append((waiting, rng.randint(1, 8), rng.randint(4, 24), rng.choice([1, 3, 4, 16]), rng.randint(0, 3)))
    long = [rng.randint(1, 4000) for _ in range(90)]
    cases += [(long, 80, 9000, 16, 40), (long, 300, 3001, 33, 5)]
    for waiting, slots, free, size, spare in cases:
        fitting = [
            k
            for k in range(min(slots, len(waiting)) + 1)
            if k == 0 or sum((t + size - 1) // size for t in waiting[:k]) + spare <= free
        ]
        yield Case((waiting, slots, free, size, spare), max(fitting), compare=whole)


# 2. One step.


def plan_slip(order="decodes first", each=False, samples="last", all_left=False, first=True):
    def plan_step(requests, budget):
        places = list(range(len(requests)))
        decoding = {i: t - c == 1 and (c > 0 or not first) for i, (t, c) in enumerate(requests)}
        if order != "as they come":
            places.sort(key=lambda i: decoding[i] is (order == "prefills first"))
        given, left = [0] * len(requests), budget
        for i in places:
            wanted = requests[i][0] - (0 if all_left else requests[i][1])
            given[i] = min(wanted, budget if each else left)
            if all_left == "whole" and given[i] < wanted:
                given[i] = 0
            left -= given[i]
        sampled = {
            "last": lambda n, t, c: n == t - c,
            "any": lambda n, t, c: n > 0,
            "decodes": lambda n, t, c: n == 1 and t - c == 1 and c > 0,
            "always": lambda n, t, c: True,
        }[samples]
        return [(n, sampled(n, t, c)) for n, (t, c) in zip(given, requests)]

    return plan_step


def whole_only(requests, budget):
    right = plan_slip()
    out, left = [None] * len(requests), budget
    for one in (True, False):
        for i, (t, c) in enumerate(requests):
            if (t - c == 1 and c > 0) is one:
                out[i] = right([(t, c)], t - c)[0] if t - c <= left else (0, False)
                left -= out[i][0]
    return out


PLANS = {
    "a prompt of one token is not a decode: nothing of it is computed yet": plan_slip(first=False),
    "the budget is for all requests of the step together, not for each": plan_slip(each=True),
    "prompts went first: a chunk rides along with the decodes, it does not push them out": plan_slip(
        "prefills first"
    ),
    "in the order of the list a prompt can push decodes out: decodes come first": plan_slip("as they come"),
    "only the last chunk samples: the logits of any other predict a token of the prompt": plan_slip(samples="any"),
    "a prompt whose last token is computed samples as well: that is its first new token": plan_slip(
        samples="decodes"
    ),
    "one that gets nothing, or not all, has no logits to sample from": plan_slip(samples="always"),
    "what is computed already is not computed again: tokens - computed": plan_slip(all_left=True),
    "a prompt may be cut: what does not fit whole gets what is left": whole_only,
}


def total_above(got, expected, case) -> bool:
    return isinstance(got, list) and all(isinstance(x, tuple) for x in got) and sum(x[0] for x in got) > case.args[1]


@register("06.plan_step", points=3, title="One step under a token budget", hints=slips(PLANS))
def plan_step(rng):
    cases = [([(20, 8), (9, 8)], 6), ([(5, 0)], 5), ([(5, 0), (7, 6), (3, 2)], 2), ([(12, 9), (30, 0)], 8)]
    cases += [([(1, 0), (4, 3), (6, 5)], 2), ([(9, 0), (8, 7), (9, 4), (5, 4)], 12), ([], 4), ([(7, 6), (9, 2)], 1)]
    cases += [([(6, 0), (6, 0), (6, 0)], 13), ([(9, 0), (2, 1), (4, 0), (2, 1)], 4)]
    for _ in range(6):
        requests = []
        for _ in range(rng.randint(3, 8)):
            tokens = rng.randint(2, 30)
            requests.append((tokens, rng.choice([0, tokens - 1, tokens - 1, rng.randrange(tokens)])))
        cases.append((requests, rng.randint(2, 40)))
    crowd = [(n, n - 1) for n in rng.sample(range(2, 3000), 70)] + [(rng.randint(2, 1500), 0) for _ in range(9)]
    rng.shuffle(crowd)
    cases += [(crowd, 2048), (crowd, 67)]
    for requests, budget in cases:
        # One token at a time: who is next in line for it?
        given = [0] * len(requests)
        line = [i for i, (t, c) in enumerate(requests) if c == t - 1 and c]
        line += [i for i in range(len(requests)) if i not in line]
        for place in [i for i in line for _ in range(requests[i][0] - requests[i][1])][:budget]:
            given[place] += 1
        expected = [(n, c + n == t) for n, (t, c) in zip(given, requests)]
        yield Case((requests, budget), expected, compare=whole)


# 3. Preemption.


@dataclass(eq=False)
class Sequence:
    name: str
    arrival: int
    tokens: list
    prompt_length: int
    computed: int
    blocks: list = field(default_factory=list)


def room_slip(
    pick=max, keep=1, all_of_them=False, words=True, computed=0, forget=True, give=True, place="arrival", gone=True
):
    def make_room(needed, running, waiting, free):
        victims = []
        while (len(free) < needed or all_of_them) and len(running) > keep:
            victim = pick(running, key=lambda s: s.arrival) if pick in (min, max) else running[-1]
            if gone:
                running.remove(victim)
            free += victim.blocks if give else []
            victim.blocks = [] if forget else victim.blocks
            victim.computed = victim.computed if computed is None else victim.prompt_length if computed else 0
            victim.tokens = victim.tokens if words else victim.tokens[: victim.prompt_length]
            at = sum(s.arrival < victim.arrival for s in waiting)
            waiting.insert({"arrival": at, "end": len(waiting), "front": 0}[place], victim)
            victims.append(victim.name)
            if not gone:
                break
        return victims

    return make_room


def spare_slip(first):
    """make_room that spares the request with the arrival `first(running, waiting)`, whoever runs."""

    def make_room(needed, running, waiting, free):
        arrival = first(running, waiting)
        others = [s for s in running if s.arrival != arrival]
        victims = room_slip(keep=0)(needed, others, waiting, free)
        running[:] = [s for s in running if s.name not in victims]
        return victims

    return make_room


ROOMS = {
    "the words it has said are lost: tokens stay, only their KV is gone": room_slip(words=False),
    "its KV is gone, so nothing of it is computed: computed = 0": room_slip(computed=None),
    "the prompt's KV is gone as well: computed = 0": room_slip(computed=1),
    "the victim still names blocks that belong to others now": room_slip(forget=False),
    "a leak: the victim's blocks must go to the free list": room_slip(give=False),
    "the first to arrive was taken: the last to arrive goes first": room_slip(pick=min),
    "running is in no order: look for the largest arrival": room_slip(pick=None),
    "the first of those that run is spared, not the first of all: one that waits does not get on": spare_slip(
        lambda running, waiting: min(s.arrival for s in running + waiting)
    ),
    "the first of those that run is spared, and its arrival need not be 0": spare_slip(lambda *_: 0),
    "the first to arrive is never a victim: somebody must get on": room_slip(keep=0),
    "more victims than needed: stop as soon as there is room": room_slip(all_of_them=True),
    "at the end of the queue it waits behind requests that came later": room_slip(place="end"),
    "the front is not its place when earlier ones wait": room_slip(place="front"),
    "the victim is still in running: it would be given tokens again": room_slip(gone=False),
}


def not_in_place(got, expected, case) -> bool:
    return isinstance(got, dict) and bool(got["victims"]) and got["running"] == got["before"]


@register(
    "06.make_room",
    points=4,
    title="Preempt by recompute",
    hints=[
        *slips(ROOMS),
        Hint("running, waiting and free must be changed in place: the caller looks at them", when=not_in_place),
    ],
)
def make_room(rng):
    plans = [(3, [2, 3], [], 1), (4, [1, 2, 3], [], 0), (2, [3, 1], [], 2), (9, [2, 2, 2], [], 0), (1, [5], [], 0)]
    plans += [(5, [2, 4, 3, 1], [2, 7], 1), (6, [3, 3, 3], [1, 9], 2), (7, [1, 6, 2, 2, 2], [4, 11], 0)]
    for needed, held, queued, free in plans:
        order = [a for a in range(20) if a not in queued][: len(held)]
        rng.shuffle(order)
        yield room_case(needed, list(zip(order, held)), queued, free, rng)
    for queued in ([7], [1, 5], [0, 3]):  # all of it is too little; in two of them an earlier one waits
        yield room_case(20, [(4, 3), (2, 1), (6, 2)], queued, 1, rng)
    for _ in range(4):
        arrivals = rng.sample(range(30), 9)
        running = [(a, rng.randint(1, 5)) for a in arrivals[:6]]
        yield room_case(rng.randint(4, 16), running, sorted(arrivals[6:]), rng.randint(0, 3), rng)
    arrivals = rng.sample(range(500), 60)
    running = [(a, rng.randint(1, 9)) for a in arrivals[:40]]
    yield room_case(sum(n for _, n in running) // 2, running, sorted(arrivals[40:]), 2, rng)


def room_case(needed, running, queued, free, rng):
    ids = list(range(400))
    rng.shuffle(ids)
    running = [(a, [ids.pop() for _ in range(n)], rng.randint(1, 9), rng.randint(1, 9)) for a, n in running]
    spare = [ids.pop() for _ in range(free)]

    def run(answer):
        live = [sequence(*each) for each in running]
        waiting = [Sequence(f"q{a}", a, [a] * 4, 4, 0) for a in queued]
        everyone, left = live + waiting, list(spare)
        running_list = list(live)
        victims = answer(needed, running_list, waiting, left)
        return {
            "victims": list(victims) if isinstance(victims, Iterator | tuple) else victims,
            "before": sorted(s.name for s in live),
            "running": sorted(s.name for s in running_list),
            "waiting": [s.name for s in waiting],
            "free": sorted(left, key=lambda b: (isinstance(b, list), b)),  # a list in it is a slip, to be shown
            "sequences": {s.name: state(s) for s in everyone},
        }

    late_first = sorted(running, reverse=True)
    count = next(
        k for k in range(len(running)) if k == len(running) - 1 or free_after(spare, late_first, k) >= needed
    )
    victims = late_first[:count]
    names = [f"r{a}" for a, *_ in victims]
    back = [(a, f"r{a}") for a, *_ in victims] + [(a, f"q{a}") for a in queued]
    states = {}
    for each in running:
        s = sequence(*each)
        states[s.name] = (s.tokens, 0, [], *state(s)[3:]) if s.name in names else state(s)
    states |= {f"q{a}": ([a] * 4, 0, [], 4, a) for a in queued}
    expected = {
        "victims": names,
        "before": sorted(f"r{a}" for a, *_ in running),
        "running": sorted(f"r{a}" for a, *_ in running if f"r{a}" not in names),  # in any order
        "waiting": [name for _, name in sorted(back)],
        "free": sorted(spare + [b for _, blocks, *_ in victims for b in blocks]),
        "sequences": states,
    }
    text = ", ".join(f"r{a} with {len(blocks)}" for a, blocks, *_ in running)
    text = text if len(running) < 9 else f"{len(running)} requests with {sum(len(b) for _, b, *_ in running)}"
    text = f"make_room({needed}, [{text} blocks], {len(queued)} waiting, {len(spare)} free)"
    return Drive(run, expected, text, compare=compare_rooms)


def free_after(spare, late_first, count) -> int:
    return len(spare) + sum(len(blocks) for _, blocks, *_ in late_first[:count])


def sequence(arrival, blocks, prompt, said) -> Sequence:
    tokens = [arrival * 100 + i for i in range(prompt + said)]
    return Sequence(f"r{arrival}", arrival, tokens, prompt, len(tokens) - 1, list(blocks))


def state(s):
    return tuple(list(x) if isinstance(x, list) else x for x in (getattr(s, name) for name in STATE))


STATE = ("tokens", "computed", "blocks", "prompt_length", "arrival")
SHOWN = {
    "victims": "returned",
    "running": "running is then",
    "waiting": "waiting is then",
    "free": "the free blocks are then",
}


def compare_rooms(got, expected):
    for key, text in SHOWN.items():
        if got[key] != expected[key]:
            return f"{text} {got[key]}, expected {expected[key]}"
    for name, wanted in expected["sequences"].items():
        for what, one, other in zip(STATE, got["sequences"][name], wanted):
            if one != other:
                return f"{name}.{what} is then {one}, expected {other}"
    return None


# 4. Priority.

KEYS = {
    "past 2^53 a float drops digits: stay with whole numbers": lambda p, a, g: (float(p * g + a), a),
    "arrival must count between different priorities as well, or the low ones starve": lambda p, a, g: (p, a),
    "that is first come, first served: the priority is ignored": lambda p, a, g: (a, p),
    "the sign of arrival: who came earlier goes first": lambda p, a, g: (p * g - a, a),
    "the sign of the priority: 0 is the most urgent": lambda p, a, g: (a - p * g, a),
    "of equals the one that arrived first goes first: the tie is missing": lambda p, a, g: p * g + a,
    "of equals the one that arrived first goes first: your tie prefers the more urgent": lambda p, a, g: (
        p * g + a,
        p,
    ),
    "priority / ageing turns it round: one level is worth `ageing` steps": lambda p, a, g: (p / g + a, a),
    "ageing is ignored: a level is worth `ageing` steps of waiting": lambda p, a, g: (p + a, a),
    "rounded down, requests that differ come out equal": lambda p, a, g: (p + a // g, a),
    "division: floats that should be equal differ in the last bit; use whole numbers": lambda p, a, g: (p + a / g, a),
}


@register("06.queue_key", points=2, title="Priority with ageing", hints=slips(KEYS))
def queue_key(rng):
    plans = [([(2, 0), (0, 21)], 10), ([(2, 0), (0, 19)], 10), ([(0, 30), (3, 0)], 10), ([(0, 4), (0, 2)], 5)]
    for ageing in (1, 3, 7, 10, 49, 1000):
        some = [(rng.randint(0, 5), rng.randint(0, 4 * ageing)) for _ in range(20)]
        base = rng.randint(0, 50)
        some += [(p, base + (5 - p) * ageing) for p in range(6)]  # equal urgency
        some = list(dict.fromkeys(some))
        rng.shuffle(some)
        plans.append((some, ageing))
    plans.append(([(3, 10**16), (0, 3 * 10**16 + 10**16 + 1), (0, 3 * 10**16 + 10**16 - 1), (0, 9 * 10**15)], 10**16))
    for requests, ageing in plans:
        now = max(a for _, a in requests) + 5
        urgency = {(p, a): p - Fraction(now - a, ageing) for p, a in requests}
        expected = sorted(requests, key=lambda r: (urgency[r], r[1]))
        yield Drive(
            lambda answer, requests=requests, ageing=ageing: sorted(requests, key=lambda r: answer(*r, ageing)),
            expected,
            f"{len(requests)} (priority, arrival) sorted by queue_key(..., ageing={ageing})",
        )
    yield Drive(patient, [30 + 5, 3 + 5, 0 + 5], "the step at which a priority 3 that came at step 5 is served")


def patient(answer):
    """One urgent request comes every step and one is served; a priority 3 comes at step 5."""
    found = []
    for ageing, priority in ((10, 3), (1, 3), (10, 0)):
        queue = []
        for step in range(60):
            queue += [(priority, step, "patient")] if step == 5 else []
            queue.append((0, step, "urgent"))
            first = min(queue, key=lambda r: answer(r[0], r[1], ageing))
            queue.remove(first)
            if first[2] == "patient":
                found.append(step)
                break
        else:
            found.append("never")
    return found


# 5. Debug it.


def given_serve(arrivals, num_blocks, block_size, steps):
    """The function as the reader is given it."""
    free, waiting, running, finished, refused = num_blocks, [], [], [], []
    for step in range(steps):
        for name, prompt, new in arrivals.get(step, []):
            waiting.append({"name": name, "tokens": prompt, "end": prompt + new, "blocks": 0})
        for r in list(running):  # room for one more token each
            while r in running and -(-r["tokens"] // block_size) - r["blocks"] > free:
                victim = running.pop()  # the last to come; it may be r itself
                free += victim["blocks"]
                victim["blocks"] = 0
                waiting.insert(0, victim)
            if r in running:
                free -= -(-r["tokens"] // block_size) - r["blocks"]
                r["blocks"] = -(-r["tokens"] // block_size)
        while waiting and -(-waiting[0]["tokens"] // block_size) <= free:
            running.append(waiting.pop(0))
            running[-1]["blocks"] = -(-running[-1]["tokens"] // block_size)
            free -= running[-1]["blocks"]
        for r in list(running):  # the forward: everybody who runs says a token
            r["tokens"] += 1
            if r["tokens"] == r["end"]:
                running.remove(r)
                free += r["blocks"]
                finished.append(r["name"])
    return finished, refused


def longest(prompt, new, size, pool):
    return ceil((prompt + new - 1) / size) <= pool


def serve_slip(fits=longest, skip=False, late=False, free=False, cut=False):
    """Who runs in a step: all from the head of the line on whose blocks together are no more than the pool's."""

    def serve(arrivals, num_blocks, block_size, steps):
        line, finished, refused, used = [], [], [], 0
        for step in range(steps):
            for name, prompt, new in arrivals.get(step, []):
                pool = num_blocks - used if free else num_blocks
                if late or fits(prompt, new, block_size, pool):
                    line.append([name, prompt, prompt + new, new])
                elif cut and ceil(prompt / block_size) <= pool:
                    line.append([name, prompt, pool * block_size + 1, new])
                else:
                    refused.append(name)
            while late and line and not fits(line[0][1], line[0][2] - line[0][1], block_size, num_blocks):
                refused.append(line.pop(0)[0])
            used = 0
            for request in list(line):
                blocks = ceil(request[1] / block_size)
                if used + blocks > num_blocks:
                    if skip:
                        continue
                    break
                used += blocks
                request[1] += 1
                if request[1] == request[2]:
                    line.remove(request)
                    finished.append(request[0])
        return finished, refused

    return serve


def by_prompt(prompt, new, size, pool):
    return ceil(prompt / size) <= pool


def with_last(prompt, new, size, pool):
    return ceil((prompt + new) / size) <= pool


SERVE = {
    "the prompt fits but its answer does not: it grows, preempts itself and begins again": serve_slip(by_prompt),
    "the last new token is never fed back: prompt + new - 1, and exactly the pool is enough": serve_slip(with_last),
    "one that fills the pool exactly can run": serve_slip(lambda p, n, s, k: ceil((p + n - 1) / s) < k),
    "blocks are rounded up": serve_slip(lambda p, n, s, k: (p + n - 1) // s <= k),
    "tokens against blocks: round up to blocks first": serve_slip(lambda p, n, s, k: p + n - 1 <= k),
    "what is free now does not matter: compare with all blocks of the pool": serve_slip(free=True),
    "what is free now does not matter; compare with the whole pool": serve_slip(by_prompt, free=True),
    "still stands still: nobody was refused": serve_slip(lambda *_: True),
    "the head was skipped: what can never run is refused, what can is not overtaken": serve_slip(
        lambda *_: True, skip=True
    ),
    "right about whom to refuse, but others overtake the head of the queue now": serve_slip(skip=True),
    "refused late: say so when it arrives, not when it comes to the head of the queue": serve_slip(late=True),
    "an answer was cut short in silence: refuse the request": serve_slip(cut=True),
}


def pairs(got, expected):
    got = tuple(map(list, got)) if isinstance(got, (tuple, list)) and len(got) == 2 else got
    if got == expected:
        return None
    return f"expected (finished, refused) = {expected}, got {got}"


@register(
    "06.serve", points=4, title="Debug it: the queue that stopped", given=given_serve, hints=slips(SERVE), limit_s=8
)
def serve(rng):
    plans = [({0: [("a", 3, 2), ("b", 99, 1)]}, 4, 4, 9), ({0: [("a", 20, 1), ("b", 3, 2)]}, 4, 4, 20)]
    plans += [
        ({0: [("a", 14, 6), ("b", 3, 2)]}, 4, 4, 40),
        ({0: [("a", 14, 3), ("b", 9, 8)], 1: [("c", 2, 4)]}, 4, 4, 60),
    ]
    plans += [({0: [("a", 9, 6)], 1: [("b", 12, 9), ("c", 13, 2), ("d", 2, 2)], 2: [("e", 1, 30)]}, 4, 4, 4)]
    plans += [({0: [("a", 2, 9)], 2: [("b", 15, 2), ("c", 1, 2)], 3: [("d", 2, 2)]}, 4, 4, 60)]
    plans += [
        ({0: [("a", 17, 1), ("b", 16, 1)]}, 4, 4, 9),
        ({0: [("a", 7, 1), ("b", 8, 1)], 3: [("c", 1, 8)]}, 7, 1, 40),
    ]
    for _ in range(9):
        pool, size = rng.randint(3, 12), rng.choice([1, 2, 4, 5])
        arrivals: dict = {}
        for i in range(10):
            step = rng.randint(0, 12)
            arrivals.setdefault(step, []).append((f"r{i}", rng.randint(1, pool * size), rng.randint(1, size + 3)))
        plans.append((arrivals, pool, size, rng.choice([20, 200])))
    for plan in plans:
        yield Case(plan, serve_slip()(*plan), compare=pairs)


# 6. Estimate it.

SECONDS = "that is seconds; ms are asked for"
FIGURES = {  # key: expected, {what a slip gives: its name}
    "whole_gap_ms": (
        216.4,
        {
            0.2164: SECONDS,
            214.8: "the streams' 32 tokens are in that forward, too",
            206.4: "the fixed 10 ms are missing",
        },
    ),
    "steps": (
        9,
        {8: "512 are not all the prompt's: 32 go to the streams; a step begun is a step", 8.533: "round up"},
    ),
    "chunk_gap_ms": (
        35.6,
        {
            0.0356: SECONDS,
            34.0: "the decodes ride in the same step: 512 tokens",
            37.2: "the streams' 32 tokens are part of the 512, not on top",
            25.6: "the fixed 10 ms are missing",
        },
    ),
    "ttft_ms": (
        309.2,
        {
            0.3092: SECONDS,
            320.4: "the last step is smaller: what is left of the prompt, and the streams",
            284.8: "the last step is missing",
            216.4: "that is the prompt in one forward",
            229.2: "each step pays its 10 ms",
            294.8: "the streams' 32 tokens a step cost time as well, in all nine",
            296.4: "the streams' 32 tokens a step cost time as well",
            297.6: "the streams' 32 tokens are part of the 512, not on top: chunks of 480",
            307.6: "the streams' 32 tokens are in the last step, too",
        },
    ),
    "swap_ms": (
        2 * 2048 * 2**19 / 25e9 * 1e3,
        {42.95: "out and back: twice", 0.0859: SECONDS, 80.0: "2^19 bytes, and GB are 10^9"},
    ),
    "recompute_ms": (
        2 * 6.7e9 * 2048 / 150e12 * 1e3,
        {91.48: "2 FLOPs a parameter and token", 0.18295: SECONDS, 0.08933: "that is one token; there are 2,048"},
    ),
    "even_gb_s": (
        2 * 2**19 * 150e12 / (2 * 6.7e9) / 1e9,
        {5.869: "the KV crosses the bus twice", 23.48: "2 FLOPs a parameter and token", 11.738e9: "in GB/s, please"},
    ),
}  # fmt: skip


@register("06.figures", points=3, title="Estimate it: seven figures")
def figures(rng):
    yield from estimates("figures", FIGURES, 0.005)
