"""Checks of exercise 04. Oracles: rows written out one by one, counted cells, a clock that ticks, requests run alone.

Chapter 04.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MappingView

import torch

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.compare import as_number, describe, mismatch
from minillm.lab.estimates import slips


def rectangle(prompts, pad_id, left=True, position=lambda column, pad: max(column - pad, 0), real=lambda x: x):
    """The three tensors, cell by cell."""
    longest = max(map(len, prompts))
    tokens, mask, positions = ([[0] * longest for _ in prompts] for _ in range(3))
    for row, prompt in enumerate(prompts):
        pad = longest - len(prompt)
        for column in range(longest):
            index = column - pad if left else column
            inside = 0 <= index < len(prompt)
            tokens[row][column] = prompt[index] if inside else pad_id
            mask[row][column] = real(inside)
            positions[row][column] = position(column, pad)
    return torch.tensor(tokens), torch.tensor(mask), torch.tensor(positions)


def by_id(prompts, pad_id):
    tokens, _, positions = rectangle(prompts, pad_id)
    return tokens, tokens != pad_id, positions


def right(prompts, pad_id):
    return rectangle(prompts, pad_id, left=False, position=lambda column, pad: column)


PADS = {
    "that is padding at the right: the last column must hold each prompt's last token": right,
    "positions are counted from the pad: a row's first real token is at 0": lambda p, i: rectangle(
        p, i, position=lambda column, pad: column
    ),
    "positions of the padding are negative: put 0 there": lambda p, i: rectangle(
        p, i, position=lambda column, pad: column - pad
    ),
    "the mask is inverted: True at real tokens": lambda p, i: rectangle(p, i, real=lambda x: not x),
    "a prompt may contain pad_id: make the mask from the lengths": by_id,
    "positions start at 1: the first real token is at 0": lambda p, i: rectangle(
        p, i, position=lambda column, pad: max(column - pad + 1, 0)
    ),
    "pad_id is an argument: 0 is not always the pad": lambda p, i: rectangle(p, 0),
}


def same_and_long(got, expected):
    """The values, and tensors of these very types."""
    got = list(got) if isinstance(got, Iterator) else got
    wrong = mismatch(got, expected)
    for name, one, other in zip(("tokens", "mask", "positions"), [] if wrong else got, expected):
        if not isinstance(one, torch.Tensor):
            return f"{name}: expected a tensor, got {type(one).__name__}, {describe(one)}"
        if one.dtype != other.dtype:
            return f"{name}: expected {str(other.dtype)[6:]}, got {str(one.dtype)[6:]}"
    return wrong


@register("04.left_pad", points=2, title="Left padding", hints=slips(PADS))
def left_pad(rng):
    fixed = [([[7], [5, 6]], 9), ([[4, 5, 6], [8]], 0), ([[3, 3], [8, 9]], 1), ([[2, 7, 2, 5], [2], [6, 2]], 2)]
    fixed += [([[4, 5]], 0), ([[4], [5]], 0)]  # one row, one column
    random = [
        (
            [[rng.randint(0, 30) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(2, 5))],
            rng.randint(31, 60),
        )
        for _ in range(3)
    ]
    long = [[rng.randint(0, 150_000) for _ in range(rng.randint(1, 300))] for _ in range(40)]
    for prompts, pad_id in [*fixed, *random, (long, 151_643)]:
        yield Case((prompts, pad_id), rectangle(prompts, pad_id), compare=same_and_long)


def cells(prompts, answers, size):
    """(computed, asked for) of each batch, counted cell by cell: prompt columns, then decode columns."""
    found = []
    for first in range(0, len(prompts), size):
        rows = list(zip(prompts, answers))[first : first + size]
        width, steps = max(p for p, _ in rows), max(n for _, n in rows)
        grid = [[c >= width - p for c in range(width)] + [s < n for s in range(1, steps)] for p, n in rows]
        found.append((sum(map(len, grid)), sum(map(sum, grid)), len(rows), width, steps))
    return found


def ratio(count):
    """A slip: count(computed, asked, rows, width, steps) -> (computed, asked) of one batch."""

    def waste(prompts, answers, size):
        both = [count(*batch) for batch in cells(prompts, answers, size)]
        return 1 - sum(a for _, a in both) / sum(c for c, _ in both)

    return waste


def exact_waste(prompts, answers, size):
    return ratio(lambda c, a, *_: (c, a))(prompts, answers, size)


def averaged(prompts, answers, size):
    each = [1 - a / c for c, a, *_ in cells(prompts, answers, size)]
    return sum(each) / len(each)


def prompts_only(prompts, answers, size):
    return exact_waste(prompts, [1] * len(prompts), size)


def answers_only(prompts, answers, size):
    return exact_waste([0] * len(prompts), answers, size)


WASTES = {
    "that is the useful share: the waste is 1 minus it": lambda p, n, s: 1 - exact_waste(p, n, s),
    "the last token of an answer is sampled and never run: answer - 1": ratio(lambda c, a, r, *_: (c + r, a + r)),
    "the last token is taken off what was asked for, not off what is computed": ratio(lambda c, a, r, *_: (c + r, a)),
    "batches are averaged: add up tokens over all batches first": averaged,
    "cut the list into batches of size": lambda p, n, s: exact_waste(p, n, len(p)),
    "finished rows are computed too: that counts only the padding of prompts": prompts_only,
    "prompts are padded too: that counts only the finished rows": answers_only,
    "that is in per cent: a share between 0 and 1": lambda p, n, s: 100 * exact_waste(p, n, s),
    "waste is a share of what is computed, not of what was asked for": lambda p, n, s: (
        1 / (1 - exact_waste(p, n, s)) - 1
    ),
    "the last batch has only the rows that are left": lambda p, n, s: ratio(
        lambda c, a, r, width, steps: (s * (width + steps - 1), a)
    )(p, n, s),
}


def rounded(got, expected, case) -> bool:
    value = as_number(got)
    return value is not None and any(value == round(expected, digits) for digits in range(1, 6))


@register(
    "04.static_waste",
    points=2,
    title="Estimate it: the waste of static batching",
    hints=[*slips(WASTES), Hint("the share is rounded: return it as it is", when=rounded)],
)
def static_waste(rng):
    fixed = [([2, 4], [3, 1], 2), ([5], [7], 4), ([3, 9, 4, 4, 8], [1, 20, 6, 2, 5], 2)]
    for _ in range(4):
        count = rng.randint(5, 14)
        prompts = [rng.randint(1, 60) for _ in range(count)]
        fixed.append((prompts, [rng.randint(1, 80) for _ in prompts], rng.randint(2, 4)))
    prompts = [rng.randint(1, 700) for _ in range(101)]
    fixed.append((prompts, [rng.randint(1, 300) for _ in prompts], 32))
    for args in fixed:
        yield Case(args, exact_waste(*args), rtol=1e-6, atol=1e-9)


def ticking(arrivals, size, window, restart=False, strict=False, wait=False, prophet=False, grid=False):
    """A clock that visits every arrival and every deadline in order. The flags are mistakes."""
    found, open_, deadline = [], [], math.inf
    for i, now in enumerate(arrivals):
        if open_ and (now > deadline or (strict and now >= deadline)):
            found.append((open_, deadline))
            open_ = []
        if not open_ or restart:
            deadline = (math.floor(now / window) + 1) * window if grid and window else now + window
        open_ = [*open_, i]
        if len(open_) == size:
            found.append((open_, deadline if wait else now))
            open_ = []
    if open_:
        found.append((open_, arrivals[-1] if prophet else deadline))
    return found


def size_only(arrivals, size, window):
    rows = list(range(len(arrivals)))
    return [(rows[i : i + size], arrivals[rows[i : i + size][-1]]) for i in range(0, len(rows), size)]


def flawed(function, **flags):
    return lambda *args: function(*args, **flags)


BATCHES = {
    "the window counts from the first request of a batch, not from the latest": flawed(ticking, restart=True),
    "a request that arrives exactly at the close is still in: <=": flawed(ticking, strict=True),
    "a full batch starts at once: it need not wait for the window": flawed(ticking, wait=True),
    "the batcher cannot know that nobody else will come: the last one waits for its window": flawed(
        ticking, prophet=True
    ),
    "windows do not lie on a fixed grid: one opens with a batch's first request": flawed(ticking, grid=True),
    "size is ignored: a batch closes when it is full": lambda a, s, w: ticking(a, 10**9, w),
    "the window is ignored: a batch also closes when it is over": size_only,
}


@register("04.batches", points=2, title="A dynamic batcher", hints=slips(BATCHES))
def batches(rng):
    fixed = [([0.0, 1.0, 5.0], 2, 2.0), ([], 3, 1.0), ([2.0, 2.0, 2.0, 2.0, 2.0], 2, 0.5), ([1.0, 2.0, 3.0], 8, 2.0)]
    fixed += [([0.5, 1.0, 1.5, 2.0, 4.0], 3, 1.0), ([0.0, 1.0], 4, 0.0), ([1.0, 2.0], 1, 3.0)]
    for _ in range(3):
        now, arrivals = 0.0, []
        for _ in range(rng.randint(8, 14)):
            now += rng.choice([0.0, 0.25, 0.5, 1.0, 3.0])  # sums without rounding
            arrivals.append(now)
        fixed.append((arrivals, rng.randint(2, 4), rng.choice([0.75, 1.0, 1.5])))
    fixed.append(([i / 64 for i in range(300)], 40, 1.0))
    for args in fixed:
        yield Case(args, ticking(*args))


EOS = 7


def next_token(history) -> int:
    """A model without weights: depends on every token before, and on their order."""
    state = 1
    for token in history:
        state = (state * 31 + token + 1) % 100_003
    return state % 12


class Machine:
    """Slots that remember what they were given; counts calls and rows."""

    def __init__(self, slots):
        self.slots, self.held = slots, {}
        self.order, self.calls, self.rows = [], 0, 0

    def prefill(self, slot, prompt):
        if slot not in range(self.slots):
            raise ValueError(f"there is no slot {slot!r}: they are 0 to {self.slots - 1}")
        self.held[slot] = list(prompt)
        self.order.append(list(prompt))
        return next_token(prompt)

    def decode(self, last):
        if not last:
            raise ValueError("decode was called without a slot")
        self.calls, self.rows = self.calls + 1, self.rows + len(last)
        for slot, token in last.items():
            self.held[slot].append(token)
        return {slot: next_token(self.held[slot]) for slot in last}


def drive(requests, slots, eos):
    def run(answer):
        machine = Machine(slots)
        given = [(list(prompt), count) for prompt, count in requests]
        answers = answer(given, slots, machine.prefill, machine.decode, eos)
        if isinstance(answers, Iterator | MappingView):
            answers = list(answers)  # a generator runs now, before the calls are counted
        return {
            "answers": answers if given == requests else "requests was changed in place",
            "prefilled": machine.order,
            "decode calls": machine.calls,
            "rows decoded": machine.rows,
        }

    return run


def alone(prompt, count, eos):
    tokens = []
    while len(tokens) < count and (not tokens or tokens[-1] != eos):
        tokens.append(next_token([*prompt, *tokens]))
    return tokens


def expect(requests, slots, eos):
    """Answers one by one; calls by counting how many decodes each slot still owes."""
    answers = [alone(prompt, count, eos) for prompt, count in requests]
    owed, calls, busy = [len(a) - 1 for a in answers], 0, []
    rows = sum(owed)
    while owed or busy:
        while owed and len(busy) < slots:
            busy += [n for n in [owed.pop(0)] if n]
        if busy:
            calls, busy = calls + 1, [n - 1 for n in busy if n > 1]
    prefilled = [list(prompt) for prompt, _ in requests]
    return {"answers": answers, "prefilled": prefilled, "decode calls": calls, "rows decoded": rows}


def loop(flaw):
    """The loop with one mistake in it."""

    def serve(requests, slots, prefill, decode, eos=None):
        answers, waiting, running, finished = [[] for _ in requests], list(range(len(requests))), {}, []

        def done(i):
            limit = requests[i][1] + (flaw == "one more")
            if flaw == "prompt's eos" and requests[i][0][-1] == eos:
                return True
            ends = {"no eos": (), "no zero": (eos,) if eos else ()}.get(flaw, (eos,))
            return len(answers[i]) >= limit or answers[i][-1] in ends

        def leave():
            for slot in [s for s, i in running.items() if done(i)]:
                finished.append(answers[running.pop(slot)])

        while waiting or running:
            if flaw != "static" or not running:
                added = 0
                while waiting and len(running) < slots and not (flaw == "one" and added):
                    slot = min(set(range(slots)) - set(running))
                    i = running[slot] = waiting.pop(-1 if flaw == "last first" else 0)
                    answers[i].append(prefill(slot, requests[i][0]))
                    added += 1
                    if flaw not in ("late", "static"):
                        leave()
                if flaw == "static":
                    leave()
            if running:
                for slot, token in decode({s: answers[i][-1] for s, i in running.items()}).items():
                    answers[running[slot]].append(token)
                leave()
        if flaw == "drop eos":
            answers = [a[:-1] if a and a[-1] == eos else a for a in answers]
        return finished if flaw == "finishing order" else answers

    return serve


SERVES = {
    "answers come back in the order of finishing: return them in the order of the requests": loop("finishing order"),
    "slots are refilled only when all are done: that is static batching": loop("static"),
    "only one request is admitted an iteration: fill every free slot": loop("one"),
    "a request can be done after its prefill: look before you decode it": loop("late"),
    "an eos of 0 is an eos: compare with None, not by truth": loop("no zero"),
    "eos is ignored: it ends an answer": loop("no eos"),
    "eos stays in the answer, as its last token": loop("drop eos"),
    "an eos in the prompt ends nothing: only tokens of the answer count": loop("prompt's eos"),
    "one token more than max_tokens": loop("one more"),
    "the queue is served from its end: first come, first served": loop("last first"),
}


def endless(got, expected, case) -> bool:
    return type(got).__name__ == "OutOfTime"


def more_rows(got, expected, case) -> bool:
    return isinstance(got, dict) and got["rows decoded"] > expected["rows decoded"]


def more_calls(got, expected, case) -> bool:
    return isinstance(got, dict) and got["decode calls"] > expected["decode calls"]


@register(
    "04.serve",
    points=4,
    title="The iteration-level loop",
    hints=[
        *slips(SERVES),
        Hint("no request is ever done: is the limit jumped over, or do all answers share one list?", when=endless),
        Hint("finished requests are still decoded: take them out at once", when=more_rows),
        Hint("more decode calls than are needed: decode all running slots in one call", when=more_calls),
    ],
    limit_s=3,
)
def serve(rng):
    def requests(count, longest):
        return [
            ([rng.randint(0, 11) for _ in range(rng.randint(1, 6))], rng.randint(1, longest)) for _ in range(count)
        ]

    same = [([3, 1, 4], 5), ([3, 1, 4], 2), ([3, 1, 4], 5)]
    plans = [(requests(3, 6), 1, None), (requests(7, 9), 3, None), ([], 2, None), (requests(2, 5), 8, None)]
    plans += [([([5], 1)] * 5, 2, None), (same, 2, None), (requests(12, 12), 4, EOS), (requests(9, 20), 2, 0)]
    plans.append(([([3, EOS], 4), ([EOS], 3), ([5, EOS, 2], 4), ([EOS, EOS], 5)], 2, EOS))
    plans.append((requests(70, 60), 33, None))
    for asked, slots, eos in plans:
        limits = [count for _, count in asked[:12]] + ["..."] * (len(asked) > 12)
        what = f"serve, max_tokens {limits}, slots={slots}, eos={eos}"
        yield Drive(drive(asked, slots, eos), expect(asked, slots, eos), what)


def given_choose(logits, temperatures, noise):
    """The function as the reader is given it."""
    greedy = temperatures == 0  # [rows]
    if greedy.all():
        return logits.argmax(-1)
    safe = torch.where(greedy, 1.0, temperatures)
    probabilities = (logits / safe[:, None]).softmax(-1)  # [rows, vocab]
    return (probabilities / noise).argmax(-1)


def row_by_row(logits, temperatures, noise, change=lambda t: t, floor=0.0):
    """Each row as if it were alone, in float64. change: what becomes of the temperatures first."""
    out = []
    for row, t, e in zip(logits.double(), change(temperatures).tolist(), noise.double()):
        t = max(t, floor)
        scores = row.tolist() if t == 0 else [x / t - math.log(y) for x, y in zip(row.tolist(), e.tolist())]
        out.append(scores.index(max(scores)))
    return torch.tensor(out)


def temperature(change):
    return lambda logits, t, noise: row_by_row(logits, t, noise, change)


CHOICES = {
    "a row of temperature 0 is still sampled when its neighbour is": temperature(
        lambda t: t if (t == 0).all() else torch.where(t == 0, torch.ones(()), t)
    ),
    "one greedy row makes all rows greedy": temperature(lambda t: t * (t != 0).all()),
    "all rows are greedy now": temperature(torch.zeros_like),
    "all rows use the largest temperature": temperature(lambda t: (t > 0) * t.max()),
    "all rows use the first row's temperature": temperature(
        lambda t: (t > 0) * (t[0] if t[0] > 0 else torch.ones(()))
    ),
    "a small temperature is not 0: near a tie it still throws dice": lambda lo, t, n: row_by_row(
        lo, t, n, floor=0.01
    ),
    "only 0 is greedy: a row of a small temperature still throws dice": temperature(lambda t: t * (t >= 0.01)),
    "the temperature of sampled rows is lost": temperature(lambda t: (t > 0).float()),
}


def right_but_mutated(got, expected, case) -> bool:
    return isinstance(got, torch.Tensor) and got.dtype == expected.dtype and torch.equal(got, expected)


@register(
    "04.choose",
    points=2,
    title="Debug it: the greedy user who got dice",
    given=given_choose,
    hints=[
        Hint("the next step may read what it was given again: work on a copy", when=right_but_mutated),
        *slips(CHOICES),
    ],
)
def choose(rng):
    plans = [[0.0, 0.0], [0.8, 1.3], [0.0, 0.8, 0.0, 1.5], [2.0, 0.0, 0.5], [0.0], [0.7]]
    plans += [[rng.choice([0.0, 0.3, 1.0, 4.0]) for _ in range(40)], [rng.choice([0.2, 2.0]) for _ in range(40)]]
    for temperatures in plans:
        rows = len(temperatures)
        logits, noise = rng.tensor(rows, 9), torch.empty(rows, 9).exponential_(generator=rng.generator) + 1e-3
        close = rows if rows < 40 else rows // 2  # rows with a close call: noise turns it over
        logits[:close, 4] = logits[:close].max(-1).values + 0.002
        logits[:close, 2] = logits[:close, 4] - 0.001
        noise[:close, 2] = noise[:close, 4] * 0.5
        args = (logits, torch.tensor(temperatures), noise)
        call = f"choose(logits, temperatures={temperatures[:6]}{' ...' * (rows > 6)}, noise)"
        yield Case(args, row_by_row(*args), call=call, dtype=torch.int64)
    tiny = ([5e-6, 0.0, 0.9], [0.9, 0.0, 1e-7], [1e-9, 0.9])
    for temperatures in ([0.0, 1e-4, 0.05, 0.0], [0.0, 0.0], [1e-3, 0.02], *tiny):  # only 0 is 0
        logits = rng.tensor(len(temperatures), 9) * 2**-60  # close calls, all of them
        noise = torch.empty(len(temperatures), 9).exponential_(generator=rng.generator) + 1e-3
        args = (logits, torch.tensor(temperatures), noise)
        call = f"choose(logits of about 1e-18, temperatures={temperatures}, noise)"
        yield Case(args, row_by_row(*args), call=call, dtype=torch.int64)
    rows, vocab = 5, 3001
    logits, noise = rng.tensor(rows, vocab), torch.empty(rows, vocab).exponential_(generator=rng.generator) + 1e-3
    args = (logits, torch.tensor([0.0, 0.7, 0.0, 1.2, 0.3]), noise)
    call = f"choose(logits, temperatures={args[1].tolist()}, noise), {vocab} tokens"
    yield Case(args, row_by_row(*args), call=call, dtype=torch.int64)
    yield from hard_rows(rng)


def hard_rows(rng):
    """Exact ties, logits of about 25, and the two best within 0.1 % of each other."""

    def case(logits, temperatures, noise, what, *hints):
        args = (logits, torch.tensor(temperatures), noise)
        call = f"choose(logits, temperatures={temperatures[:6]}{' ...' * (len(temperatures) > 6)}, noise), {what}"
        return Case(args, row_by_row(*args), call=call, dtype=torch.int64, hints=list(hints))

    def exponential(rows):
        return torch.empty(rows, 9).exponential_(generator=rng.generator) + 1e-3

    logits, noise = rng.tensor(4, 9), exponential(4)
    logits[:, 3] = logits[:, 6] = logits.max(-1).values + 0.5
    noise[:, 6] = noise[:, 3] * 0.5  # dice would take the later one
    what = "the two best logits are equal: the first wins"
    yield case(logits, [0.0, 0.8, 0.0, 0.0], noise, what)
    logits, noise = rng.tensor(6, 9) * 2 + 25, exponential(6)
    large = Hint("exp of such a logit is not a number: softmax takes off the largest first", when=finds_tokens)
    yield case(logits, [0.0, 0.2, 0.0, 0.25, 0.2, 0.0], noise, "logits of about 25", large)
    temperatures = [rng.choice([0.3, 0.7, 1.0, 1.5]) for _ in range(40)]
    logits, noise = rng.tensor(40, 9), exponential(40)
    p = (logits.double() / torch.tensor(temperatures)[:, None]).softmax(-1)
    best = (p / noise.double()).topk(2, -1)
    margins = torch.linspace(2e-4, 1e-3, 40, dtype=torch.float64)[:, None]  # float32 is good for 1e-5
    second = best.indices[:, 1:]
    noise.scatter_(1, second, (p.gather(1, second) / (best.values[:, :1] * (1 - margins))).float())
    narrow = Hint("these are close calls: keep the probabilities in 32 bits", when=finds_tokens)
    yield case(logits, temperatures, noise, "the two best p / noise within 0.1 %", narrow)


def finds_tokens(got, expected, case) -> bool:
    return isinstance(got, torch.Tensor) and got.shape == expected.shape and not torch.equal(got, expected)


def given_advance(owners, waiting, answers, limits, tokens):
    """The function as the reader is given it."""
    fresh = []
    for slot in sorted(owners):
        if len(answers[owners[slot]]) + 1 >= limits[owners[slot]]:  # done with this step's token
            del owners[slot]
            if waiting:
                owners[slot] = waiting.pop(0)
                fresh.append(slot)
    for slot, token in tokens.items():
        if slot in owners:
            answers[owners[slot]].append(token)
    return fresh


def books(flaw):
    """The bookkeeping with one mistake."""

    def advance(owners, waiting, answers, limits, tokens):
        if flaw == "before":
            return given_advance(owners, waiting, answers, limits, tokens)
        fresh = []
        for slot in sorted(owners):
            request = owners[slot]
            done = len(answers[request]) + (flaw == "early") >= limits[request] + (flaw == "late") - (flaw != "lost")
            if not (flaw == "lost" and done):
                answers[request].append(tokens[slot])
            if done and (waiting or flaw != "stays"):
                del owners[slot]
                if waiting:
                    owners[slot] = waiting.pop(-1 if flaw == "last" else 0)
                    fresh.append(slot)
        return fresh

    return advance


ADVANCES = {
    "slots are still given away before the tokens are recorded": books("before"),
    "the last token of an answer is lost: it must be recorded before the slot is given away": books("lost"),
    "answers end one token early: after recording, done is len(answer) == limit": books("early"),
    "answers run on for one token: done is len(answer) == limit": books("late"),
    "a request that is done keeps its slot when nobody waits": books("stays"),
    "waiting is taken from its front": books("last"),
}


def not_in_place(got, expected, case) -> bool:
    """New owners are reported, and the owners are those of the start."""
    if not isinstance(got, list) or not any(step["fresh"] for step in got):
        return False
    owners = start(*case.args)[0]
    return all(step["owners"] == owners for step in got)


@register(
    "04.advance",
    points=3,
    title="Debug it: somebody else's word",
    given=given_advance,
    hints=[
        Hint("owners, waiting and answers must be changed in place", when=not_in_place),
        *slips(ADVANCES),
    ],
)
def advance(rng):
    plans = [([1, 2], 1), ([3, 1, 2, 2], 2), ([2], 1), ([4, 4], 2)]
    plans += [([rng.randint(1, 5) for _ in range(rng.randint(5, 9))], rng.randint(2, 3)) for _ in range(3)]
    for limits, slots in plans:
        what = f"advance, step after step: limits {limits}, {slots} slot{'s' * (slots > 1)}"
        run = Drive(lambda answer, p=(limits, slots): walk(answer, *p), story(limits, slots), what, compare=steps)
        run.args = (limits, slots)  # for `not_in_place`
        yield run


def steps(got, expected):
    """What differs; a text is a fault that `walk` has found."""
    return got if isinstance(got, str) else mismatch(got, expected)


def start(limits, slots):
    count = len(limits)
    busy = min(slots, count)
    owners = {slot: slot for slot in reversed(range(busy))}
    return owners, list(range(busy, count)), {i: [] for i in range(count)}, dict(enumerate(limits))


def state(owners, waiting, answers, fresh):
    answers = {i: list(a) for i, a in answers.items()}
    return {"owners": dict(owners), "waiting": list(waiting), "answers": answers, "fresh": fresh}


def walk(answer, limits, slots):
    """State after each step. A token names its request and its place in the answer."""
    owners, waiting, answers, limits = start(limits, slots)
    found, made = [], dict.fromkeys(limits, 0)
    for _ in range(sum(limits.values()) + 2):
        if not owners:
            break
        tokens = {slot: 100 * request + made[request] for slot, request in owners.items()}
        for request in owners.values():
            made[request] += 1
        given = dict(limits), dict(tokens)
        fresh = answer(owners, waiting, answers, *given)
        if isinstance(fresh, Iterator):
            fresh = list(fresh)  # a generator runs now
        for name, after, before in zip(("limits", "tokens"), given, (limits, tokens)):
            if after != before:
                return f"your function changed `{name}`; only the first three arguments may change"
        found.append(state(owners, waiting, answers, fresh))
    return found


def story(limits, slots):
    """The same without slots that change hands: each request's tokens, cut off at the step."""
    owners, waiting, _, _ = start(limits, slots)
    said, found = [0] * len(limits), []
    while owners:
        for request in owners.values():
            said[request] += 1
        fresh = []
        for slot in range(slots):
            if slot in owners and said[owners[slot]] == limits[owners[slot]]:
                del owners[slot]
                if waiting:
                    owners[slot], *waiting = waiting
                    fresh.append(slot)
        answers = {i: [100 * i + k for k in range(n)] for i, n in enumerate(said)}
        found.append(state(owners, waiting, answers, fresh))
    return found
