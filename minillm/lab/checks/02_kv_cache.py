"""Checks of exercise 02. Oracles: sums written out, sizes of meta tensors, loops in float64, the naive loop.

Chapter 02.
"""

from __future__ import annotations

from numbers import Integral

import torch

from minillm.lab.check import Case, Drive, Hint, register
from minillm.lab.estimates import estimates, slips
from minillm.model.attention import LayerInfo
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder

BYTES = {
    "the factor 2 is missing: K and V are both stored": lambda b, la, h, d, n, s: b * la * h * d * n * s,
    "the batch is missing": lambda b, la, h, d, n, s: 2 * la * h * d * n * s,
    "the layers are missing: each has K and V of its own": lambda b, la, h, d, n, s: 2 * b * h * d * n * s,
    "head_dim is missing: a head stores head_dim numbers a token": lambda b, la, h, d, n, s: 2 * b * la * h * n * s,
    "kv_heads is missing": lambda b, la, h, d, n, s: 2 * b * la * d * n * s,
    "the length is missing": lambda b, la, h, d, n, s: 2 * b * la * h * d * s,
    "that counts numbers; multiply by itemsize for bytes": lambda b, la, h, d, n, s: 2 * b * la * h * d * n,
    "the cache grows with length, not with its square": lambda b, la, h, d, n, s: 2 * b * la * h * d * n * n * s,
}


def too_small(got, expected, case) -> bool:
    return isinstance(got, float) and 0 < got < 1e-5 * expected


@register(
    "02.kv_bytes",
    points=2,
    title="Bytes of a KV cache",
    hints=[*slips(BYTES), Hint("that is in GiB or GB: bytes are asked for", when=too_small)],
)
def kv_bytes(rng):
    kinds = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    shapes = [(1, 2, 1, 4, 8, 4), (8, 32, 32, 128, 4096, 2)]
    shapes += [(*(rng.randint(2, 40) for _ in range(5)), size) for size in (1, 8, 2, 4)]
    for batch, layers, heads, dim, length, size in shapes:
        stored = torch.empty(batch, layers, heads, length, dim, dtype=kinds[size], device="meta")
        yield Case((batch, layers, heads, dim, length, size), stored.nbytes + torch.empty_like(stored).nbytes)


HALF, WIDE = "half: K alone, or one byte a number", "4 bytes a number? 16 bits are 2"
FIGURES = {  # key: expected, {what a slip gives: its name}
    "mha_2048_gib": (
        2 * 2048 * 32 * 32 * 128 * 2 / 2**30,
        {2**30 / 1e9: "that is GB; GiB are asked for", 0.5: HALF, 2.0: WIDE},
    ),
    "mha_8x4096_gb": (
        2 * 8 * 4096 * 32 * 32 * 128 * 2 / 1e9,
        {16.0: "that is GiB; GB are asked for", 2.147: "the batch of 8 is missing", 8.59: HALF, 34.36: WIDE},
    ),
    "gqa_128k_gb": (
        2 * 131072 * 32 * 8 * 128 * 2 / 1e9,
        {16.0: "that is GiB; GB are asked for", 68.72: "GQA stores only its 8 KV heads", 8.59: HALF, 34.36: WIDE},
    ),
    "tokens_24gb": (
        9.5e9 / (2 * 32 * 32 * 128 * 2),
        {
            20027: "the 1 GB for everything else is not taken off",
            43869: "the weights are not taken off",
            45776: "neither the weights nor the 1 GB are taken off",
            36240: HALF,
            72479: "8 KV heads: this is the model with 32",
        },
    ),
}  # fmt: skip


@register("02.figures", points=2, title="Estimate it: four figures")
def figures(rng):
    yield from estimates("figures", FIGURES, 0.03)


GROWTH = {
    "the new tensor holds the new token as well: step i writes prompt + i": lambda p, s, b: (
        b * sum(p + i for i in range(s))
    ),
    "the stored prompt is copied at every step too": lambda p, s, b: b * sum(i + 1 for i in range(s)),
    "the prompt is copied at every step, not once": lambda p, s, b: b * (p + s * (s + 1) // 2),
    "that is the preallocated cache: concatenation writes all that is stored, at each step": lambda p, s, b: b * s,
    "that is what the last step writes: add up all steps": lambda p, s, b: b * (p + s),
    "one step too many": lambda p, s, b: b * sum(p + i for i in range(1, s + 2)),
    "too large for a float to hold exactly: use // on ints": lambda p, s, b: round(b * (s * p + s * (s + 1) / 2)),
    "reads are not asked for: count what is written": lambda p, s, b: (
        b * sum(2 * (p + i) - 1 for i in range(1, s + 1))
    ),
}


def whole(got, expected):
    if isinstance(got, Integral) and not isinstance(got, bool):  # NumPy's too, where they do not overflow
        return None if got == expected else f"expected {expected}, got {got}"
    return f"expected an int, {expected}, got {got!r}"


@register(
    "02.concat_writes",
    points=2,
    title="What growing costs",
    hints=[
        *slips(GROWTH),
        Hint("a float cannot hold every such number: use // on ints", when=lambda got, *_: isinstance(got, float)),
    ],
)
def concat_writes(rng):
    sizes = [(3, 2, 10), (7, 1, 3), (5, 0, 8), (0, 4, 1)]
    sizes += [(rng.randint(2, 90), rng.randint(2, 60), rng.randint(2, 9000)) for _ in range(3)]
    for prompt, steps, size in [*sizes, (131, 20_001, 10**12 + 39)]:
        expected = sum((prompt + i) * size for i in range(1, steps + 1))
        yield Case((prompt, steps, size), expected, compare=whole)


def rows(time: int, length: int, sees) -> torch.Tensor:
    """A mask by two loops: sees(query's row, key, position of row 0)."""
    return torch.tensor([[bool(sees(i, j, length - time)) for j in range(length)] for i in range(time)])


def seen(sees):
    return lambda time, length: rows(time, length, sees)


MASKS = {
    "aligned at the top left: the queries are the last `time` tokens of `length`": seen(lambda i, j, p: j <= i),
    "a query sees itself: <= in place of <": seen(lambda i, j, p: j < p + i),
    "inverted: True means that the query may look": seen(lambda i, j, p: j > p + i),
    "each query also sees one token of its future": seen(lambda i, j, p: j <= p + i + 1),
    "no mask: the queries of one call must not see each other's future": seen(lambda i, j, p: True),
    "only the new tokens are seen: those stored before are visible too": seen(lambda i, j, p: p <= j <= p + i),
    "rows are queries, columns are keys: [time, length]": lambda t, n: rows(t, n, lambda i, j, p: j <= p + i).T,
}


@register(
    "02.causal_mask",
    points=2,
    title="The mask of a chunk",
    hints=[
        *slips(MASKS),
        Hint("a bool tensor is asked for, not numbers to add", when=lambda got, *_: dtype_of(got) != torch.bool),
    ],
)
def causal_mask(rng):
    sizes = [(2, 4), (4, 4), (1, 6), (1, 1), (5, 12), (3, 9)]
    for time, length in [*sizes, *((rng.randint(2, 6), rng.randint(7, 15)) for _ in range(2)), (37, 301)]:
        yield Case((time, length), rows(time, length, lambda i, j, p: j <= p + i))


def dtype_of(got):
    return getattr(got, "dtype", torch.bool)


def brute(q, k, v, scale, mask="right", order="interleave", scaling="layer"):
    """Attention over stored k, v, head by head in float64. q [batch, time, heads, dim] -> same shape."""
    q, k, v = q.double(), k.double(), v.double()
    time, length, heads, kv_heads = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    group, out = heads // kv_heads, torch.empty_like(q)
    factor = {"layer": scale, "dim": q.shape[-1] ** -0.5, "none": 1.0}[scaling]
    shift = {"right": length - time, "top-left": 0, "strict": length - time - 1, "none": length}[mask]
    for h in range(heads):
        kv = h // group if order == "interleave" else h % kv_heads
        scores = torch.einsum("btd,bnd->btn", q[:, :, h], k[:, :, kv]) * factor
        hidden = torch.tensor([[j > i + shift for j in range(length)] for i in range(time)])
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[:, :, h] = torch.einsum("btn,bnd->btd", weights, v[:, :, kv])
    return out


class Slip:
    """A cache with a mistake built in: what a reader's Cache is compared with, to name the mistake."""

    mask, order, scaling = "right", "interleave", "layer"
    one_count, at_zero, restart = False, False, False

    def __init__(self, config, batch, max_length):
        shape = (config.num_layers, 2, batch, max_length, config.num_kv_heads, config.head_dim)
        self.kv, self.stored = torch.zeros(shape), [0] * config.num_layers

    def positions(self, shape):
        start = 0 if self.restart else self.stored[-1]
        return torch.arange(start, start + shape[-1]).expand(shape)

    def attend(self, layer, q, k, v):
        start = max(self.stored) if self.one_count else self.stored[layer.index]
        end, at = start + q.shape[1], 0 if self.at_zero else start
        self.kv[layer.index, 0, :, at : at + q.shape[1]] = k
        self.kv[layer.index, 1, :, at : at + q.shape[1]] = v
        self.stored = [end if self.one_count or i == layer.index else n for i, n in enumerate(self.stored)]
        k, v = self.kv[layer.index, :, :, :end]
        return brute(q, k, v, layer.scale, self.mask, self.order, self.scaling).float()


def slip(**flags):
    return type("Slip", (Slip,), flags)


CACHES = {
    "one count for all layers: each layer needs its own, they store one after the other": slip(one_count=True),
    "the mask is aligned at the top left: query i of a call sits at position stored + i": slip(mask="top-left"),
    "no causal mask: the tokens of one call see their own future": slip(mask="none"),
    "KV heads are laid out as 0 1 0 1; head h uses h // group: repeat_interleave": slip(order="tile"),
    "the factor on q @ k is layer.scale, not head_dim ** -0.5": slip(scaling="dim"),
    "the factor layer.scale is missing": slip(scaling="none"),
    "every call writes at row 0 again": slip(at_zero=True),
    "positions start again at 0 in each call: they go on from what is stored": slip(restart=True),
    "a query sees itself: <= in place of <": slip(mask="strict"),
}


@register("02.cache", points=4, title="A cache of your own", hints=slips(CACHES), limit_s=10)
def cache(rng):
    plans = [(1, 1, 2, 2, 4, [3]), (1, 1, 4, 4, 8, [5, 1, 1]), (3, 1, 4, 2, 8, [4, 1, 1])]
    plans += [(2, 3, 6, 2, 4, [3, 4, 1, 2]), (2, 2, 4, 1, 6, [1, 1, 3]), (1, 1, 4, 2, 8, [200, 1, 70, 1, 3])]
    for layers, batch, heads, kv_heads, dim, chunks in plans:
        calls = make_calls(rng, chunks, layers, batch, heads, kv_heads, dim)
        what = f"Cache (layers={layers}, batch={batch}, heads={heads}/{kv_heads}), calls of {chunks} tokens"
        run = drive(small(layers, heads, kv_heads, dim), batch, max(24, sum(chunks)), calls)
        yield Drive(run, outputs(calls), what)
    expected = [torch.tensor([row] * 2) for row in ([0, 1, 2], [3], [4, 5])]
    yield Drive(run_positions, expected, "positions of calls of 3, 1 and 2 tokens, batch 2", dtype=torch.int64)
    one, other = make_calls(rng), make_calls(rng)
    yield Drive(
        lambda answer: alternate(answer, one, other),
        [*outputs(one), *outputs(other)],
        "two caches in turn",
        hints=[on_list("two caches share their tensors or counts: make them in __init__, not on the class")],
    )
    yield Drive(
        drive(small(2, 4, 2, 8), 1, 9, one, reuse=True),
        outputs(one),
        "Cache, with the memory of k and v used again after each call",
        hints=[on_list("the cache keeps a reference to k and v: copy them")],
    )
    model, prompt = random_model(rng), rng.ints(50, 2, 7)
    naive = naive_logits(model, prompt)
    yield Drive(lambda answer: cached_logits(model, prompt, answer), naive, "generation by a 3-layer decoder")
    grows = "reserve K and V for max_length in __init__ and write into them; do not grow by cat"
    yield Drive(
        room_report,
        "room reserved once",
        "__init__, then three calls",
        hints=[Hint(grows, when=lambda got, *_: isinstance(got, str))],
    )
    full = "when the room is used up, raise ValueError before anything is written; not earlier"
    yield Drive(
        fill_up,
        ["outputs", "ValueError", "outputs"],
        "Cache with room for 8 tokens, calls of 6, 3 and 2 tokens",
        hints=[Hint(full, when=lambda *_: True)],
    )


def on_list(text: str) -> Hint:
    return Hint(text, when=lambda got, *_: isinstance(got, list))


def small(layers, heads, kv_heads, dim) -> ModelConfig:
    return ModelConfig(50, 24, 40, layers, heads, kv_heads, dim, 64)


def make_calls(rng, chunks=(6, 1, 2), layers=2, batch=1, heads=4, kv_heads=2, dim=8):
    """(layer, q, k, v) of each call of `attend`, layer by layer, chunk by chunk."""
    return [
        (LayerInfo(i, 0.7), rng.tensor(batch, t, heads, dim), *rng.tensor(2, batch, t, kv_heads, dim))
        for t in chunks
        for i in range(layers)
    ]


def drive(config, batch, room, calls, reuse=False):
    """A run: make a cache, make the calls, return every output. reuse: overwrite k and v after each call."""

    def run(answer):
        made, outs = answer(config, batch, room), []
        for layer, q, k, v in calls:
            given = q.clone(), k.clone(), v.clone()
            outs.append(made.attend(layer, *given))
            untouched("attend", given, (q, k, v))
            k, v = given[1:]
            if reuse:
                k.fill_(7.0)
                v.fill_(-7.0)
        return outs

    return run


def untouched(name, given, before):
    """Only what the task says may be changed in place."""
    if not all(torch.equal(a, b) for a, b in zip(given, before)):
        raise AssertionError(f"{name} changed q, k or v in place; leave them as they were")


def outputs(calls) -> list[torch.Tensor]:
    """What each call must return: attention over all K and V that its layer has been given so far."""
    given, outs = {}, []
    for layer, q, k, v in calls:
        given.setdefault(layer.index, []).append((k, v))
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*given[layer.index]))
        outs.append(brute(q, keys, values, layer.scale))
    return outs


def alternate(answer, one, other):
    caches = [answer(small(2, 4, 2, 8), 1, 9) for _ in range(2)]
    outs = [[], []]
    for pair in zip(one, other):
        for out, made, (layer, *qkv) in zip(outs, caches, pair):
            out.append(made.attend(layer, *(x.clone() for x in qkv)))
    return outs[0] + outs[1]


def run_positions(answer):
    made, found = answer(small(2, 2, 2, 4), 2, 12), []
    for time in (3, 1, 2):
        found.append(made.positions(torch.Size([2, time])))
        for index in range(2):
            made.attend(LayerInfo(index, 0.5), *torch.ones(3, 2, time, 2, 4))
    return found


def fill_up(answer):
    made, found = answer(small(1, 2, 2, 4), 1, 8), []
    for time in (6, 3, 2):
        try:
            made.attend(LayerInfo(0, 0.5), *torch.ones(3, 1, time, 2, 4))
            found.append("outputs")
        except NotImplementedError:
            raise
        except Exception as error:
            found.append("ValueError" if isinstance(error, ValueError) else type(error).__name__)
    return found


def tensors_in(value, depth: int = 3) -> list[torch.Tensor]:
    """All tensors held by an object, its lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [t for item in value for t in tensors_in(item, depth - 1)]
        if depth and isinstance(value, list | tuple)
        else []
    )


def room_report(answer) -> str:
    """Is the room reserved when the cache is made, and does it stay where it is?"""
    made = answer(small(2, 4, 2, 8), 3, 40)
    need = 2 * 2 * 3 * 2 * 8 * 40 * 4  # K and V, layers, batch, heads, dim, tokens, bytes
    stores = [{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(made)}]
    if sum(stores[0].values()) < need:
        return "less than K and V is reserved in __init__"
    for time in (4, 1, 1):
        for index in range(2):
            k, v = torch.ones(2, 3, time, 2, 8)
            made.attend(LayerInfo(index, 0.3), torch.ones(3, time, 4, 8), k, v)
    after = {t.untyped_storage().data_ptr() for t in tensors_in(made)}
    moved = [size for pointer, size in stores[0].items() if pointer not in after]
    return "the tensors were allocated anew" if sum(moved) >= need // 4 else "room reserved once"


def random_model(rng) -> Decoder:
    """Random weights, large enough that attention and positions matter."""
    model = Decoder(small(3, 4, 2, 8)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.4, generator=rng.generator)
    return model


@torch.inference_mode()
def naive_logits(model, prompt, steps=5):
    """Greedy tokens by the naive loop, and the logits that chose them."""
    tokens, chosen = prompt, []
    for _ in range(steps):
        chosen.append(model(tokens)[:, -1])
        tokens = torch.cat((tokens, chosen[-1].argmax(-1, keepdim=True)), dim=1)
    return [tokens[:, prompt.shape[1] :], torch.stack(chosen)]


@torch.inference_mode()
def cached_logits(model, prompt, answer, steps=5):
    made = answer(model.config, prompt.shape[0], prompt.shape[1] + steps)
    chosen = [model(prompt, cache=made)[:, -1]]
    while len(chosen) < steps:
        chosen.append(model(chosen[-1].argmax(-1, keepdim=True), cache=made)[:, -1])
    return [torch.stack([row.argmax(-1) for row in chosen], dim=1), torch.stack(chosen)]


def given_decode_step(q, k, v, keys, values, lengths, scale):
    """The function as the reader is given it."""
    batch, kv_heads, room, dim = keys.shape
    slots = torch.arange(batch)
    keys[slots, :, lengths] = k
    values[slots, :, lengths] = v
    lengths += 1
    q = q.reshape(batch, kv_heads, -1, dim)  # [batch, kv_heads, group, dim]
    scores = q @ keys.transpose(2, 3) * scale  # [batch, kv_heads, group, room]
    unused = torch.arange(room) >= lengths.max()  # [room]
    scores = scores.masked_fill(unused, float("-inf"))
    return (scores.softmax(-1) @ values).reshape(batch, -1, dim)


ROOM, DIM = 16, 8


def step_slip(sees=lambda n: n, at=lambda n: n, erase=False, copy=False):
    """A decode step with a mistake. sees(lengths after): keys seen; at(lengths before): where rows go."""

    def step(q, k, v, keys, values, lengths, scale):
        place, out = at(lengths).tolist(), torch.empty_like(q)
        keys, values = (keys.clone(), values.clone()) if copy else (keys, values)
        lengths += 1
        for b, count in enumerate(sees(lengths).tolist()):
            keys[b, :, place[b]], values[b, :, place[b]] = k[b], v[b]
            if erase:
                keys[b, :, lengths[b] :], values[b, :, lengths[b] :] = 0.0, 0.0
            stored = (x[b, :, :count].transpose(0, 1)[None] for x in (keys, values))  # [1, count, kv_heads, dim]
            out[b] = brute(q[b][None, None], *stored, scale)[0, 0]
        return out

    return step


def longest(n):
    return n.max().expand(len(n))


STEPS = {
    "a slot still sees rows up to the longest slot's length: those of its last tenant": step_slip(longest),
    "zeroed keys are not masked keys: a score of 0 still gets the weight e^0": step_slip(longest, erase=True),
    "cut to the shortest slot: others do not see all of their text": step_slip(lambda n: n.min().expand(len(n))),
    "one stale row is still seen: lengths count the new token already": step_slip(lambda n: (n + 1).clamp(max=ROOM)),
    "the new token does not see itself": step_slip(lambda n: (n - 1).clamp(min=1)),
    "rows are written behind the longest slot's text, not behind the slot's own": step_slip(at=longest),
    "keys and values must be changed in place: the next step reads them": step_slip(copy=True),
}


def not_in_place(got, expected, case) -> bool:
    """The three steps left no trace in `lengths`."""
    return isinstance(got, list) and len(got) == len(expected) and got[-1] == [n - 3 for n in expected[-1]]


@register(
    "02.decode_step",
    points=3,
    title="Debug it: the answer that quoted a stranger",
    given=given_decode_step,
    hints=[
        *slips(STEPS),
        Hint("lengths must be changed in place: the next step reads them", when=not_in_place),
    ],
)
def decode_step(rng):
    """restart: {step: slot freed before it}."""
    plans = [([5, 5], 2, 2, {}), ([5, 2, 0], 4, 2, {}), ([0], 2, 1, {})]
    plans += [([7, 3], 6, 2, {1: 0}), ([1, 8, 4], 3, 3, {2: 1}), ([12, 13], 2, 1, {})]
    for i, (lengths, heads, kv_heads, restart) in enumerate(plans):
        batch = len(lengths)
        steps = [(rng.tensor(batch, heads, DIM), *rng.tensor(2, batch, kv_heads, DIM)) for _ in range(3)]
        full = rng.tensor(2, batch, kv_heads, ROOM, DIM)  # every row holds something: earlier tenants
        plan = (torch.tensor(lengths), full, steps, restart, (0.5, 0.9, 0.2)[i % 3])
        text = f"decode_step 3 times, slots of {lengths} tokens"
        text += f", slot {next(iter(restart.values()))} taken over on the way" if restart else ""
        yield Drive(lambda answer, plan=plan: run_slots(answer, *plan), expect_slots(*plan), text)


def run_slots(answer, lengths, full, steps, restart, scale):
    lengths, keys, values, outs = lengths.clone(), full[0].clone(), full[1].clone(), []
    for i, (q, k, v) in enumerate(steps):
        if i in restart:
            lengths[restart[i]] = 0
        given = q.clone(), k.clone(), v.clone()
        outs.append(answer(*given, keys, values, lengths, scale))
        untouched("decode_step", given, (q, k, v))
    return [*outs, lengths.tolist()]


def expect_slots(lengths, full, steps, restart, scale):
    """The same with a list of rows per slot: what a slot was given since it was taken over, and nothing else."""
    held = [[(full[0, b, :, i], full[1, b, :, i]) for i in range(n)] for b, n in enumerate(lengths.tolist())]
    outs = []
    for i, (q, k, v) in enumerate(steps):
        if i in restart:
            held[restart[i]] = []
        out = torch.empty_like(q)
        for b, own in enumerate(held):
            own.append((k[b], v[b]))
            stored = (torch.stack(part)[None] for part in zip(*own))  # [1, n, kv_heads, dim] each
            out[b] = brute(q[b][None, None], *stored, scale)[0, 0]
        outs.append(out)
    return [*outs, [len(own) for own in held]]
