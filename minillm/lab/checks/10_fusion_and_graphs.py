"""Checks of exercise 10. Oracles: substitution in text, sizes of meta tensors, float64, all combinations, a dict.

Chapter 10.
"""

from __future__ import annotations

import re
from itertools import combinations
from numbers import Integral

import torch

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.estimates import estimates, slips

VIEWS = ("view", "reshape", "split", "transpose", "unflatten", "flatten", "chunk")
OPS = ("add", "norm", "addcmul", "mul")


def by_text(trace, fusions, drop=VIEWS, longest=True) -> int:
    """Each operation a word in a text, each fusion an alternative of one regular expression."""
    text = "".join(f"<{name}>" for name in trace if name not in drop)
    ordered = sorted(fusions, key=len, reverse=True) if longest else fusions
    patterns = ["".join(re.escape(f"<{name}>") for name in fusion) for fusion in ordered]
    return len(re.findall("|".join([*patterns, "<[^>]*>"]), text))


def overlapping(trace, fusions) -> int:
    """Every place where a fusion fits saves its length less one, even where two share an operation."""
    names = [name for name in trace if name not in VIEWS]
    fits = sum((len(f) - 1) * (tuple(names[i : i + len(f)]) == tuple(f)) for i in range(len(names)) for f in fusions)
    return len(names) - fits


COUNTS = {
    "views launch nothing": lambda t, f: by_text(t, f, drop=()),
    "views between two operations do not keep them apart": lambda t, f: (
        by_text(t, f, drop=()) - sum(n in VIEWS for n in t)
    ),
    "where several fusions fit, take the longest": lambda t, f: by_text(t, f, longest=False),
    "an operation belongs to one fusion only: move on behind it": overlapping,
    "fusions make one launch of several": lambda t, f: by_text(t, []),
    "views are counted, and nothing else": lambda t, f: sum(n in VIEWS for n in t),
    "how often a name comes up counts": lambda t, f: len({n for n in t if n not in VIEWS}),
}


@register("10.count_launches", points=2, title="Count launches", hints=slips(COUNTS))
def count_launches(rng):
    layer = ["norm", "linear", "split", "mul", "roll", "addcmul", "view", "copy", "copy", "softmax", "linear", "add"]
    layer += ["norm", "linear", "chunk", "silu", "mul", "linear", "add"]
    known = [("add", "norm"), ("silu", "mul"), ("mul", "roll", "addcmul", "copy", "copy")]
    cases = [
        (["add", "view", "norm", "linear"], [("add", "norm")]),
        (layer * 12, known),
        (layer * 5, []),
        (["silu", "roll", "addcmul", "mul", "silu", "roll"], [("silu", "roll", "add")]),  # it never fits, to the end
    ]
    cases += [(["add", "norm", "mul", "add", "norm"], [("add", "norm"), ("add", "norm", "mul")])]
    crossing = ["add", "norm", "mul", "silu", "copy"]  # add + norm comes first, the longer one loses
    cases += [(crossing * 9, [("norm", "mul", "silu"), ("add", "norm")])]
    cases += [
        (["add"] * 7, [("add", "add")]),
        ([*VIEWS], known),
        (layer * 3, [*reversed(known), ("add",) * 2]),
    ]
    for _ in range(6):
        trace = [rng.choice(OPS + VIEWS[::3]) for _ in range(rng.randint(40, 300))]
        fusions = {tuple(rng.choice(OPS) for _ in range(rng.randint(2, 4))) for _ in range(rng.randint(1, 5))}
        cases.append((trace, sorted(fusions, key=lambda f: (len(f), f))))
    for trace, fusions in cases:
        call = (
            f"count_launches({trace}, {fusions})" if len(trace) < 8 else f"a trace of {len(trace)}, fusions {fusions}"
        )
        yield Case((trace, fusions), by_text(trace, fusions), call=call)


BYTES = {
    "the weight is one row, whatever the rows": lambda r, w, b: (
        5 * r * w * b + r * w * b,
        4 * r * w * b + r * w * b,
    ),
    "the weight is read as well": lambda r, w, b: (5 * r * w * b, 4 * r * w * b),
    "the fused kernel writes summed too: it is needed later": lambda r, w, b: (
        (5 * r * w + w) * b,
        (3 * r * w + w) * b,
    ),
    "as two kernels the sum is written and read again": lambda r, w, b: ((4 * r * w + w) * b, (4 * r * w + w) * b),
    "that counts numbers; multiply by itemsize": lambda r, w, b: (5 * r * w + w, 4 * r * w + w),
    "as one and as two kernels are swapped": lambda r, w, b: ((4 * r * w + w) * b, (5 * r * w + w) * b),
    "reads count as well as writes": lambda r, w, b: (2 * r * w * b, 2 * r * w * b),
}


def plain(got):
    """A list for an array or a tensor."""
    return got.tolist() if hasattr(got, "tolist") else got


def whole_pair(got, expected):
    got = plain(got)
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        return f"expected two ints, {expected}, got {got!r}"
    if not all(isinstance(x, Integral) and not isinstance(x, bool) for x in got):
        return f"expected two ints, {expected}, got {got!r}"
    return None if tuple(got) == expected else f"expected {expected}, got {tuple(got)}"


@register("10.add_norm_bytes", points=1, title="Bytes of a residual add and a norm", hints=slips(BYTES))
def add_norm_bytes(rng):
    kinds = {2: torch.bfloat16, 4: torch.float32, 1: torch.int8}
    sizes = [(1, 10, 2), (32, 4096, 2), (8192, 8192, 4)]
    for rows, width, size in [
        *sizes,
        *((rng.randint(2, 999), rng.randint(2, 9999), rng.choice((1, 2, 4))) for _ in range(4)),
    ]:
        x = torch.empty(rows, width, dtype=kinds[size], device="meta")
        w = torch.empty(width, dtype=kinds[size], device="meta")
        residual, branch, summed, normed = x, x, x, x
        add, norm = [residual, branch, summed], [summed, w, normed]
        one = [residual, branch, w, summed, normed]
        expected = tuple(sum(t.nbytes for t in kernel) for kernel in (add + norm, one))
        yield Case((rows, width, size), expected, compare=whole_pair)


def norm_like(
    mean=None, center=False, root=True, no_eps=False, rounded=True, source="sum", narrow=False, weigh=True, order="ns"
):
    """A slip: the answer with one thing wrong."""

    def wrong(branch, residual, weight, eps):
        dtype = residual.dtype
        summed = (branch.float() + residual.float()).to(dtype)
        x = {"sum": summed, "residual": residual, "branch": branch}[source].float()
        x = x if rounded else branch.float() + residual.float()
        if center:
            x = x - x.mean(-1, keepdim=True)
        square = (x.to(dtype) * x.to(dtype)).float() if narrow else x.square()
        width = x.shape[-1] if mean is None else mean(x.shape[-1])
        average, eps = square.sum(-1, keepdim=True) / width, 0.0 if no_eps else eps
        scale = 1 / (average + eps).sqrt() if root else 1 / (average.sqrt() + eps)
        y = (x * scale * (weight.float() if weigh else 1.0)).to(dtype)
        return (y, summed) if order == "ns" else (summed, y) if order == "sn" else (y, y)

    wrong.in_torch = True
    return wrong


NORMS = {
    "divide by width, not by the power of two above it": norm_like(mean=lambda w: 1 << (w - 1).bit_length()),
    "the mean of squares, not their sum": norm_like(mean=lambda w: 1),
    "RMSNorm takes no mean away: that is LayerNorm": norm_like(center=True),
    "eps belongs under the root": norm_like(root=False),
    "eps is missing": norm_like(no_eps=True),
    "the sum is normed, not the residual alone": norm_like(source="residual"),
    "the sum is normed, not the branch alone": norm_like(source="branch"),
    "the weight is missing": norm_like(weigh=False),
    "normed and summed are swapped": norm_like(order="sn"),
    "summed is the sum before the norm": norm_like(order="nn"),
    "squares do not fit into 16 bits: work in float32": norm_like(narrow=True),
    "the sum is rounded to its dtype before it is normed": norm_like(rounded=False),
}
EXACT = {torch.float32: (2e-5, 2e-6), torch.float16: (2e-3, 2e-3)}


def launched(args):
    """The answer through triton.jit, compiled or interpreted, on these tensors; a slip in torch as it is."""

    def run(answer):
        if getattr(answer, "in_torch", False):
            return (*answer(*args), "")
        from minillm.kernels.launch import interpreted, require_triton

        require_triton()
        import triton

        if "NotImplementedError" in answer.__code__.co_names:
            answer(*[None] * answer.__code__.co_argcount)  # a stub says so itself, not through the interpreter
        branch, residual, weight, eps = args
        (rows, width), device = residual.shape, "cpu" if interpreted() else "cuda"
        block, size = triton.next_power_of_2(width), rows * width
        wide = 8 * max(size, block)  # a wrong offset reads and writes here, and not somebody else's memory
        rooms = [torch.full((3 * wide,), 7.0, dtype=residual.dtype, device=device) for _ in range(5)]
        inputs = [room[wide : wide + x.numel()] for room, x in zip(rooms, (branch, residual, weight))]
        outs = [room[wide : wide + size] for room in rooms[3:]]
        for place, x in zip(inputs, args):
            place.copy_(x.flatten())
        try:
            triton.jit(answer)[(rows,)](*inputs, *outs, width, eps, BLOCK=block)
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            raise error from None
        note = ""
        if any(not torch.equal(a.cpu(), b.flatten()) for a, b in zip(inputs, args)):
            note = "an input was written to"
        elif any(bool((torch.cat((room[:wide], room[wide + size :])) != 7).any()) for room in rooms[3:]):
            note = "something behind the last row was written: is there a mask?"
        return (*(out.view(rows, width).cpu() for out in outs), note)

    return run


def compare_norms(dtype, unrounded):
    """unrounded: float64, what the norm would be of a sum that kept all its digits. The two differ by less than a
    rounding of the result does, number by number; over all numbers it shows which one was normed."""
    relative, floor = EXACT[dtype]

    def compare(got, expected):
        for name, x, want in zip(("summed", "normed"), (got[1], got[0]), (expected[1], expected[0])):
            limit = relative * want.abs() + floor * want.abs().max()
            fine = (x.double() - want).abs() <= limit
            if not bool(fine.all()):
                row, column = (~fine).nonzero()[0].tolist()
                text = (
                    f"{name}: expected {want[row, column]:.6g} at [{row}, {column}], got {x[row, column].item():.6g}"
                )
                return f"{text}; {got[2]}" if got[2] else text
        apart = [(got[0].double() - x).norm() for x in (unrounded, expected[0])]
        if dtype == torch.float16 and apart[0] < apart[1]:
            return "normed: the sum was normed before it was rounded"
        return got[2] or None

    return compare


@register("10.add_norm", points=3, title="The fused kernel", hints=slips(NORMS), limit_s=30.0)
def add_norm(rng):
    """Widths between powers of two; tiny values, where eps decides; values whose squares overflow 16 bits."""
    plans = [(3, 64, torch.float32, 1.0), (2, 65, torch.float32, 1e-3), (4, 200, torch.float32, 2e-3)]
    plans += [(1, 1, torch.float32, 1.0), (5, 1000, torch.float32, 3.0), (3, 96, torch.float16, 300.0)]
    plans += [(2, 384, torch.float16, 1.0), (7, 33, torch.float32, 50.0)]
    for i, (rows, width, dtype, scale) in enumerate(plans):
        branch, residual = (rng.tensor(rows, width, scale=scale).to(dtype) for _ in range(2))
        weight, eps = (rng.tensor(width) * 0.5 + 1).to(dtype), (1e-5, 1e-6)[i % 2]
        summed = (branch.float() + residual.float()).to(dtype).double()
        whole = branch.double() + residual.double()
        normed, unrounded = (
            x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double() for x in (summed, whole)
        )
        call = f"the kernel on {rows} rows of {width}, {str(dtype).removeprefix('torch.')}, eps {eps}"
        run = launched((branch, residual, weight, eps))
        yield Drive(run, (normed, summed, ""), call, compare=compare_norms(dtype, unrounded))


def waste_of(sizes, steps) -> int:
    """Rows computed for nothing; -1: a step does not fit."""
    total = 0
    for n, times in steps.items():
        if times:
            holds = [s for s in sizes if s >= n]
            if not holds:
                return -1
            total += (min(holds) - n) * times
    return total


def least_waste(steps, most) -> int:
    """By trying: every set of at most `most` of the n, the largest always in. Few n only."""
    counts = sorted(n for n in steps if steps[n])
    rest, top = counts[:-1], counts[-1]
    best = None
    for k in range(min(most - 1, len(rest)) + 1):
        for chosen in combinations(rest, k):
            found = waste_of((*chosen, top), steps)
            best = found if best is None else min(best, found)
    return best


def least_waste_on_a_line(steps, most) -> int:
    """For many n: cheapest path over the n in which each edge i -> j covers (i, j] at size j, with at most `most`
    edges; by relaxation, most times over all edges."""
    counts = [0, *sorted(n for n in steps if steps[n])]
    cost = {0: 0}
    for _ in range(most):
        cost = {
            j: min(
                cost.get(j, 10**18),
                *(
                    c + sum((j - n) * steps.get(n, 0) for n in counts[1:] if i < n <= j)
                    for i, c in cost.items()
                    if i < j
                ),
            )
            for j in counts[1:]
        } | {0: 0}
    return cost[counts[-1]]


def good_sizes(steps, most, least):
    def compare(got, expected):
        got = plain(got)
        if not isinstance(got, (list, tuple)) or not all(
            isinstance(x, Integral) and not isinstance(x, bool) for x in got
        ):
            return f"expected a list of ints, got {got!r}"
        if len(got) > most:
            return f"at most {most} sizes, got {len(got)}"
        if list(got) != sorted(set(got)):
            return f"expected a sorted list without repeats, got {list(got)}"
        wasted = waste_of(got, steps)
        if wasted < 0:
            return f"{max(n for n in steps if steps[n])} requests fit into none of {list(got)}"
        return None if wasted == least else f"{list(got)} computes {wasted} rows for nothing; {least} is possible"

    return compare


def frequent(steps, most):
    top = max(n for n in steps if steps[n])
    others = sorted((n for n in steps if steps[n] and n != top), key=lambda n: (-steps[n], n))
    return sorted([*others[: most - 1], top])


def powers(steps, most):
    top = max(n for n in steps if steps[n])
    return sorted({top, *(2**i for i in range(12) if 2**i < top)})[-most:]


def spaced(steps, most):
    top = max(n for n in steps if steps[n])
    return sorted({-(-top * (i + 1) // most) for i in range(most)})


def greedy(steps, most):
    chosen = [max(n for n in steps if steps[n])]
    while len(chosen) < most:
        chosen.append(min((n for n in steps if steps[n]), key=lambda n: waste_of([*chosen, n], steps)))
    return sorted(set(chosen))


SIZES = {
    "the most frequent n need not be the best sizes: what lies below them counts too": frequent,
    "powers of two do not look at steps": powers,
    "evenly spaced sizes do not look at steps": spaced,
    "one size after another, each the best at its turn, is not the best set": greedy,
    "one size for all: you may have `most`": lambda s, m: [max(n for n in s if s[n])],
}


def never_ran(got, expected, case) -> bool:
    return isinstance(got, (list, tuple)) and any(case.args[0].get(n) == 0 for n in got)


def too_slow(got, expected, case) -> bool:
    return type(got).__name__ == "OutOfTime"


@register(
    "10.choose_sizes",
    points=3,
    title="Which batch sizes to capture",
    hints=[
        *slips(SIZES),
        Hint("a size for steps that never ran", when=never_ran),
        Hint(
            "all combinations of 40 kinds are too many: build the best sets up, one size more at a time",
            when=too_slow,
        ),
    ],
    limit_s=4.0,
)
def choose_sizes(rng):
    plans = [({1: 100, 7: 1, 8: 5}, 2), ({4: 9}, 3), ({1: 5, 2: 5, 3: 5, 30: 1}, 3), ({5: 10, 6: 11, 9: 2, 40: 0}, 2)]
    plans += [({1: 30, 10: 40, 11: 35, 20: 40, 21: 30, 32: 3}, 3)]
    for kinds, most in ((9, 3), (12, 4), (10, 1), (6, 9)):
        plans.append(({n: rng.randint(1, 60) for n in rng.sample(range(1, 65), kinds)}, most))
    plans += [({n: rng.randint(0, 90) for n in range(1, 41)} | {41: 7}, 6)]
    for steps, most in plans:
        least = least_waste(steps, most) if len(steps) < 20 else least_waste_on_a_line(steps, most)
        shown = (
            f"choose_sizes({steps}, {most})"
            if len(steps) < 7
            else f"{len(steps)} kinds of batch, at most {most} sizes"
        )
        yield Case((steps, most), least, compare=good_sizes(steps, most, least), call=shown)


def capture(function, *inputs):
    output = function(*inputs)
    return lambda: output.copy_(function(*inputs)), output


class GivenReplayer:
    """The class of the exercise, with its bug."""

    def __init__(self, step, rows, capture=capture):
        self.step, self.rows, self.capture, self.replay = step, rows, capture, None
        self.tokens = torch.zeros(rows, dtype=torch.long)
        self.slots = torch.full((rows,), -1)

    def run(self, tokens, slots):
        n = len(tokens)
        self.tokens.zero_()
        self.tokens[:n] = torch.tensor(tokens)
        self.slots = torch.tensor(slots + [-1] * (self.rows - n))
        if self.replay is None:
            self.replay, self.output = self.capture(self.step, self.tokens, self.slots)
        else:
            self.replay()
        return self.output[:n].clone()


def replaying(bring, result=torch.clone, again=False):
    """A slip: bring(buffers, tokens, slots, first) fills the buffers its own way."""

    class Slip(GivenReplayer):
        def run(self, tokens, slots):
            bring(self, tokens, slots, self.replay is None)
            if self.replay is None or again:
                self.replay, self.output = self.capture(self.step, self.tokens, self.slots)
            else:
                self.replay()
            return result(self.output[: len(tokens)])

    return Slip


def right(self, tokens, slots, first):
    stale_padding(self, tokens, slots, first)
    self.tokens[len(tokens) :], self.slots[len(slots) :] = 0, -1


def stale_padding(self, tokens, slots, first):
    self.tokens[: len(tokens)], self.slots[: len(slots)] = torch.tensor(tokens), torch.tensor(slots)


def stale_slots(self, tokens, slots, first):
    self.tokens.zero_()
    stale_padding(self, tokens, slots, first)


def padding_at_zero(self, tokens, slots, first):
    right(self, tokens, slots, first)
    self.slots[len(slots) :] = 0


def rebound_tokens(self, tokens, slots, first):
    right(self, tokens, slots, first)
    self.tokens = self.tokens.clone()
    if not first:
        self.kept.copy_(self.before)
    self.kept, self.before = (self.tokens, self.tokens.clone()) if first else (self.kept, self.before)


SLIPS = {
    "the slots are still a new tensor: the graph reads the one of its capture": GivenReplayer,
    "padding rows still hold the last batch's slots": replaying(stale_slots),
    "padding rows still hold the last batch's slots and tokens": replaying(stale_padding),
    "padding rows have slot -1: slot 0 is somebody's": replaying(padding_at_zero),
    "an earlier result changed: a view of the output was returned, and the next replay writes over it": replaying(
        right, result=lambda x: x
    ),
    "the tokens are a new tensor: the graph reads the one of its capture": replaying(rebound_tokens),
}


def drive(answer, plan, rows):
    """(results of each call, taken at the end; the store; captures; replays; largest token of a padding row)."""
    store, captures, replays, padded = torch.zeros(64, dtype=torch.long), [], [], set()

    def step(tokens, slots):
        real = slots >= 0
        padded.update(tokens[~real].tolist())
        place = slots.clamp(min=0)
        store.index_put_((place,), torch.where(real, tokens + 1, 0), accumulate=True)
        return torch.stack((tokens * 3 + 1, torch.where(real, store[place], 0)), -1)  # [rows, 2]

    def counted(function, *inputs):
        captures.append(1)
        replay, output = capture(function, *inputs)
        return lambda: (replays.append(1), replay())[1], output

    object_ = answer(step, rows, counted)
    outs = [object_.run(list(tokens), list(slots)) for tokens, slots in plan]
    return (
        [out if out is None else torch.as_tensor(out).tolist() for out in outs],
        store.tolist(),
        len(captures),
        len(replays),
        max(padded, default=0),
    )


def by_dict(plan):
    store, outs = [0] * 64, []
    for tokens, slots in plan:
        for token, slot in zip(tokens, slots):
            store[slot] += token + 1
        outs.append([[3 * token + 1, store[slot]] for token, slot in zip(tokens, slots)])
    return outs, store, 1, len(plan) - 1, 0


def compare_runs(got, expected):
    outs, store, captures, replays, padding = got
    if captures != 1:
        return f"captured {captures} times: once is enough, and what a graph is for"
    for i, (a, b) in enumerate(zip(outs, expected[0])):
        if a != b:
            return f"call {i + 1} returned {a}, expected {b}"
    bad = [slot for slot, (a, b) in enumerate(zip(store, expected[1])) if a != b]
    if bad:
        return f"slot {bad[0]} holds {store[bad[0]]}, expected {expected[1][bad[0]]}"
    if replays != expected[3]:
        return f"replayed {replays} times in {len(outs)} calls: all but the first are replays"
    return f"a padding row holds token {padding}: it should be 0" if padding else None


@register(
    "10.replayer",
    points=3,
    title="Debug it: the graph that wrote into yesterday's slot",
    given=GivenReplayer,
    hints=slips(SLIPS),
)
def replayer(rng):
    """Batches that keep, change, shrink and grow; slots differ within a batch."""
    plans = [([([5, 6], [1, 2])], 2), ([([5, 6, 7], [3, 4, 9]), ([8, 9, 2], [3, 4, 9])], 3)]
    plans += [([([5, 6], [1, 2]), ([7, 8], [1, 30])], 2), ([([5, 6, 4], [10, 20, 30]), ([7], [11])], 3)]
    plans += [([([5], [40]), ([7, 3, 9, 1], [2, 41, 42, 50]), ([6, 2], [50, 7])], 4)]
    for rows in (5, 8):
        plan = []
        for _ in range(9):
            n = rng.randint(1, rows)
            plan.append(([rng.randint(1, 99) for _ in range(n)], rng.sample(range(64), n)))
        plans.append((plan, rows))
    for plan, rows in plans:
        shown = (
            f"{rows} rows; " + ", ".join(f"run({t}, {s})" for t, s in plan[:3]) + (", ..." if len(plan) > 3 else "")
        )
        yield Drive(lambda answer, p=plan, r=rows: drive(answer, p, r), by_dict(plan), shown, compare=compare_runs)


GUESS = {  # key: expected, {what a slip gives: its name}
    "ceiling": (
        1 / sum(5e-6 for _ in range(32) for _ in range(16)),
        {2.56e-3: "that is seconds a token: tokens a second are asked for", 12500: "the layers are missing"},
    ),
    "ceiling_fused": (
        1 / sum(5e-6 for _ in range(32) for _ in range(9)),
        {1.44e-3: "that is seconds a token: tokens a second are asked for", 390.6: "9 launches a layer, not 16"},
    ),
    "waits": (
        (5 - 2) / 5,
        {0.4: "that is the share in which the GPU works", 60: "a share is asked for, not per cent",
         0.286: "the lanes overlap: a step takes the longer one, not their sum"},
    ),
    "graph_gain": (
        2.5,
        {1.5: "times as fast, not how much faster", 256.0: "the kernels still have to run, one after another",
         0.4: "eager time over replayed time", 3.5: "the lanes overlap: a step takes the longer one, not their sum"},
    ),
    "logits_mb": (
        sum(torch.empty(n, 128256, dtype=torch.bfloat16, device="meta").nbytes for n in (1, 2, 4, 8, 16, 32)) / 1e6,
        {8.08: "16 bits are 2 bytes", 8.21: "all sizes keep theirs, not the largest alone", 15.41: "MB are 10^6",
         32.3: "16 bits are 2 bytes", 16.16e6: "MB are asked for"},
    ),
}  # fmt: skip


@register("10.estimates", points=2, title="Estimate it: what launches cost")
def launch_figures(rng):
    yield from estimates("estimates", GUESS, 0.03)
