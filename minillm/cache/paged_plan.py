"""Who is attended with whom: a step of the paged cache, planned once for all its layers.

Chapter 05. Requests are attended in batches, for one by one each would launch kernels of its own: those with as many
query tokens and contexts of similar length together. Padding to the longest context of all would make the short ones
as slow as the longest. Most of a batch are decodes; stretches of a few tokens go the same way, drafts above all,
chains and trees alike (chapters 16 and 17). A prompt is work enough for a call by itself. A kernel that reads blocks
where they lie needs no such care: it gets all rows in one list, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.model.attention import visible

BATCH_TOKENS = 2048  # of one gathered batch on a CPU: more would leave its cache before it is attended
BATCH_SPREAD = 0.75  # the shortest of a batch is at least this long, as a part of the longest
SHORT = 32  # query tokens of a request, up to which batching it is faster than a call of its own
SHORT_ROWS = 8  # the same for a kernel that reads a request's K and V again for each of its rows

Stretch = tuple[int, int, int]  # of one request: (tokens its queries see, its first row, its number in the step)


@dataclass
class PagedStep:
    """One forward's tokens: requests one after another, then padding, if any.

    slot_mapping: [tokens] int64, the slot each token's K and V go to; -1: padding, not written.
    block_tables: [requests, max_blocks] int64, padded with 0.
    query_lengths: tokens of each request in this step. kv_lengths: tokens each has in all, this step's included.
    positions: [tokens] int64.
    masks: of a request whose tokens are a tree, [its tokens, its tokens]: True where a row may look (chapter 17).
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_lengths: list[int]
    kv_lengths: list[int]
    positions: Tensor
    masks: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Batch:
    """n requests attended together, `time` query tokens of each. Where a request is shorter than the batch, its last
    slot is repeated and masked: a request reads no slot but its own, so not even NaN in a neighbour's reaches it."""

    rows: Tensor  # [n * time] places in the packed tokens
    time: int
    slots: Tensor  # [n * length]
    mask: Tensor | None  # [n or 1, 1, 1 or groups * time, length], True where a query may look; None: everywhere
    bias: Tensor | None  # the same as 0 and -inf


@dataclass
class Rows:
    """Rows that are attended each by itself, in place: of `requests`' tokens, the first `lengths`."""

    rows: Tensor  # [n] places in the packed tokens
    requests: Tensor  # [n]
    lengths: Tensor  # [n]
    checked: bool = False


@dataclass
class Stretches:
    """Prompts and chunks of them, read in place: of each [first row, rows, request, tokens before them]."""

    table: Tensor  # [n, 4]
    checked: bool = False


@dataclass
class Chunk:
    """One request's stretch of tokens in order, by itself: a prompt, or a large part of one."""

    start: int
    end: int
    slots: Tensor | None  # [kv length]; None: the step brings all of the request's tokens, nothing needs reading


Part = Batch | Chunk | Rows | Stretches


def plan(
    step: PagedStep, window: int | None, q: Tensor, kv_heads: int, block_size: int, in_place: bool = False
) -> list[Part]:
    """All rows of the step, each once. q [tokens, heads, dim]: its heads, type and device count, not its values.
    in_place: what is no tree is read in place: decodes, short chains of drafts as `Rows`, the rest as `Stretches`."""
    parts, start = [], 0
    short: dict[int, list[Stretch]] = {}  # by query tokens
    for request, (new, length) in enumerate(zip(step.query_lengths, step.kv_lengths)):
        first = 0 if window is None else max(0, length - new - window + 1)  # the oldest token any query sees
        if in_place and request not in step.masks:
            pass
        elif new == 1 or request in step.masks or 1 < new <= min(SHORT, length - 1):
            short.setdefault(new, []).append((length - first, start, request))
        elif new:
            slots = None if new == length else find_slots(step, [request], [first], [length], block_size)
            parts.append(Chunk(start, start + new, slots))
        start += new
    if in_place:
        parts += parts_in_place(step)
    groups = q.shape[1] // kv_heads
    for time, stretches in short.items():
        parts += [
            batch_of(step, time, group, window, q, groups, block_size) for group in batches(stretches, q.is_cuda)
        ]
    return parts


def parts_in_place(step: PagedStep) -> list[Part]:
    """`Rows` for decodes and short chains of drafts, if there are any; then `Stretches` for all that is no tree."""
    rows: list[tuple[int, int, int]] = []  # (row, request, tokens it sees)
    stretches: list[tuple[int, int, int, int]] = []  # (first row, rows, request, tokens before them)
    start, device = 0, step.positions.device
    for request, (new, length) in enumerate(zip(step.query_lengths, step.kv_lengths)):
        if request in step.masks:
            pass
        elif new <= min(SHORT_ROWS, max(1, length - 1)):
            rows += [(start + i, request, length - new + 1 + i) for i in range(new)]
        else:
            stretches.append((start, new, request, length - new))
        start += new
    parts: list[Part] = []
    if rows:
        parts.append(Rows(*torch.tensor(rows, device=device).T.contiguous()))
    if stretches:
        parts.append(Stretches(torch.tensor(stretches, device=device)))
    return parts


def batches(stretches: list[Stretch], whole: bool) -> list[list[Stretch]]:
    """Stretches of as many query tokens each, in groups that see similar lengths. whole: in one group, for a device
    where launches cost more than padding."""
    groups: list[list[Stretch]] = []
    for stretch in sorted(stretches, reverse=True):
        group = groups[-1] if groups else None
        longest = group[0][0] if group else 0
        if group and (whole or (stretch[0] >= BATCH_SPREAD * longest and (len(group) + 1) * longest <= BATCH_TOKENS)):
            group.append(stretch)
        else:
            groups.append([stretch])
    return groups


def batch_of(
    step: PagedStep, time: int, group: list[Stretch], window: int | None, q: Tensor, groups: int, block_size: int
) -> Batch:
    """groups: query heads to a KV head; they go in as that head's queries (`PagedCache._together`)."""
    seen, starts, requests = (list(values) for values in zip(*group))
    ends = [step.kv_lengths[request] for request in requests]
    firsts = [end - length for end, length in zip(ends, seen)]
    slots = find_slots(step, requests, firsts, ends, block_size)
    rows = torch.tensor(starts, device=q.device)[:, None] + torch.arange(time, device=q.device)  # [n, time]
    alike = min(seen) == max(seen) and step.masks.keys().isdisjoint(requests)
    if alike and time == 1:
        return Batch(rows.flatten(), time, slots, None, None)
    if alike:
        mask = visible(time, max(seen), window, device=q.device)[None]  # [1, time, length]
    else:
        mask = visible_in(step, rows, requests, firsts, seen, window)  # [n, time, length]
    if time > 1:
        mask = mask.repeat(1, groups, 1)  # [n or 1, groups * time, length]
    mask = mask.unsqueeze(1)  # [n or 1, 1, groups * time, length]
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    return Batch(rows.flatten(), time, slots, mask, bias)


def visible_in(
    step: PagedStep, rows: Tensor, requests: Sequence[int], firsts: list[int], seen: list[int], window: int | None
) -> Tensor:
    """[n, time, length], True where a query may look: at what is stored from token `firsts` on, and at the step's own
    tokens before it, or, in a tree, above it; as far back as a window goes. rows [n, time]: places of the queries."""
    time, device = rows.shape[1], rows.device
    key = torch.arange(max(seen), device=device)  # [length]
    firsts, seen = (torch.tensor(values, device=device)[:, None] for values in (firsts, seen))  # [n, 1]
    chain = torch.ones(time, time, dtype=torch.bool, device=device).tril()
    own = torch.stack([step.masks.get(request, chain) for request in requests])  # [n, time, time]
    places = seen - time + torch.arange(time, device=device)  # [n, time]: of the own tokens among the keys
    mask = (key < seen - time)[:, None].repeat(1, time, 1)  # [n, time, length]
    mask.scatter_(2, places[:, None].expand(-1, time, -1), own)
    if window is None:
        return mask
    query = step.positions[rows]  # [n, time]
    position = (firsts + key).scatter(1, places, query)  # [n, length]: siblings of a tree share one
    return mask & (position[:, None] > query[:, :, None] - window)


def find_slots(
    step: PagedStep, requests: Sequence[int], starts: Sequence[int], ends: Sequence[int], block_size: int
) -> Tensor:
    """Slots of tokens starts[i] .. ends[i] - 1 of each request, the last repeated up to the longest, flattened."""
    tables, length = step.block_tables, max(end - start for start, end in zip(starts, ends))
    rows, starts, ends = (torch.tensor(x, device=tables.device).unsqueeze(-1) for x in (requests, starts, ends))
    places = torch.minimum(starts + torch.arange(length, device=tables.device), ends - 1)  # [n, length]
    blocks = tables[rows, places // block_size]  # [n, length]
    return (blocks * block_size + places % block_size).flatten()
