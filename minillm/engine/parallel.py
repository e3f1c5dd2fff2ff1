"""The engine over several ranks: rank 0 schedules, the others compute what it says.

Chapter 18. The scheduler, the sampler and all text live on rank 0 alone. A step is one broadcast: the plan, whole
numbers only (token ids, positions, slots, block tables, block copies). Every rank, rank 0 included, runs what it
reads out of the plan, so their tables cannot differ. Each rank keeps K and V of its own heads in a pool with the same
block numbers. Ranks come from torchrun, or are started here (`minillm.parallel.launch`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.cache.block_pool import BlockTable
from minillm.cache.paged import PagedCache, PagedStep
from minillm.engine.batch import Batch, Entry
from minillm.engine.engine import Engine
from minillm.engine.memory import blocks_in, check_room, kv_budget
from minillm.engine.options import CHOICES, EngineOptions
from minillm.engine.runner import Runner, pack
from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import check_ids
from minillm.model.checkpoint import open_checkpoint
from minillm.model.decoder import Decoder
from minillm.model.hub import resolve
from minillm.model.layout import pack_linears
from minillm.model.shapes import known_shape
from minillm.model.weights import as_device, as_dtype, load_model
from minillm.parallel.groups import PeerLost, all_gather, broadcast
from minillm.parallel.launch import RankError, Ranks, World, join, leave, rank_device, under_torchrun
from minillm.parallel.tensor import apply_tensor_parallel, check_ranks
from minillm.parallel.weights import load_shard
from minillm.quant.named import NAMED, quantize_by_name
from minillm.speculative.make import TRAINED
from minillm.speculative.options import SpeculativeOptions

STOP, SETUP, STEP = range(3)
LISTS = 10  # in a plan
INLINE = 1024  # numbers of the first broadcast; a longer plan sends the rest in a second one
ATTENTIONS = CHOICES["attention"]
COPY_KINDS = ("copy", "swap_out", "swap_in")


@dataclass
class Plan:
    """What one step computes, as `Runner` wants it. copies: as in `Batch`; moves come before them."""

    moves: list[tuple[int, int]]  # slots of accepted draft tokens, from the step before
    copies: list[tuple[str, list[tuple[int, int]]]]
    tokens: Tensor  # [tokens]
    step: PagedStep
    rows: Tensor  # [sampled rows]


def encode(batch: Batch, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> list[int]:
    """A batch as whole numbers: how long each list is, then each list in turn."""
    tokens, step, rows = pack(batch, torch.device("cpu"), num_blocks)
    copies = [
        number
        for group, (kind, pairs) in enumerate(batch.copies)
        for source, target in pairs
        for number in (group, COPY_KINDS.index(kind), source, target)
    ]
    masks = []
    for request, mask in step.masks.items():
        masks += [request, len(mask), *mask.flatten().tolist()]
    tensors = (tokens, step.positions, step.slot_mapping, rows, step.block_tables.flatten())
    lists = [*(part.tolist() for part in tensors), step.query_lengths, step.kv_lengths, copies, masks]
    lists.append([slot for pair in moves for slot in pair])
    return [*map(len, lists), *(int(number) for each in lists for number in each)]


def decode(numbers: Tensor, device: torch.device, num_blocks: int) -> Plan:
    """The inverse of `encode`. numbers: [n] int64 on the CPU."""
    lists = numbers[LISTS:].split(numbers[:LISTS].tolist())
    tokens, positions, slots, rows, tables, queries, lengths, copies, masks, moves = lists
    check_ids("block table", tables.tolist(), num_blocks)
    tokens, positions, slots, rows, tables = (x.to(device) for x in (tokens, positions, slots, rows, tables))
    trees, at = {}, 0
    while at < len(masks):
        request, width = masks[at : at + 2].tolist()
        trees[request] = masks[at + 2 : at + 2 + width**2].view(width, width).bool().to(device)
        at += 2 + width**2
    tables = tables.view(len(queries), -1)  # [requests, widest]
    step = PagedStep(slots, tables, queries.tolist(), lengths.tolist(), positions, trees)
    groups: dict[int, tuple[str, list[tuple[int, int]]]] = {}
    for group, kind, source, target in copies.view(-1, 4).tolist():
        groups.setdefault(group, (COPY_KINDS[kind], []))[1].append((source, target))
    return Plan([tuple(pair) for pair in moves.view(-1, 2).tolist()], list(groups.values()), tokens, step, rows)


def send(kind: int, numbers: Sequence[int], world: World) -> Tensor:
    """Rank 0 tells all ranks; gives back what they will read."""
    message = torch.tensor([kind, len(numbers), *numbers], dtype=torch.long)
    first = torch.zeros(INLINE, dtype=torch.long)
    first[: len(message)] = message[:INLINE]
    broadcast(first, world.control)
    if len(message) > INLINE:
        broadcast(message[INLINE:].clone(), world.control)
    return message[2:]


def receive(world: World) -> tuple[int, Tensor]:
    """(kind, numbers) of rank 0's next message; waits for as long as it takes."""
    first = broadcast(torch.zeros(INLINE, dtype=torch.long), world.control)
    kind, count = first[:2].tolist()
    rest = count + 2 - INLINE
    if rest > 0:
        first = torch.cat((first, broadcast(torch.zeros(rest, dtype=torch.long), world.control)))
    return kind, first[2 : count + 2]


@torch.inference_mode()
def execute(runner: Runner, plan: Plan) -> Tensor:
    """Logits [rows, vocab], the same on every rank."""
    if plan.moves:
        runner.cache.move_slots(plan.moves)
    runner.copy(plan)
    runner.cache.begin(plan.step)
    hidden = runner.model.hidden(plan.tokens, plan.step.positions, runner.cache)  # [tokens, hidden]
    runner.hidden = hidden if runner.keep_hidden else None
    return runner.model.logits(hidden[plan.rows])


class ParallelRunner(Runner):
    """Rank 0's runner: sends the plan, then does its own part. ranks: the processes it started; None: torchrun's."""

    def __init__(self, model: Decoder, cache: PagedCache, world: World, ranks: Ranks | None = None) -> None:
        super().__init__(model, cache)
        self.world, self.ranks, self.lost = world, ranks, ""
        self.moves: list[tuple[int, int]] = []
        setup = [cache.num_blocks, cache.block_size, cache.host_k.shape[1], ATTENTIONS.index(cache.attention)]
        self._guarded(lambda: send(SETUP, setup, world))

    def run(self, batch: Batch) -> Tensor:
        if self.lost:
            raise RankError(f"{self.lost}; make a new LLM")
        return self._guarded(lambda: self._run(batch))

    def _run(self, batch: Batch) -> Tensor:
        numbers = send(STEP, encode(batch, self.cache.num_blocks, self.moves), self.world)
        self.moves = []
        return execute(self, decode(numbers, self.model.device, self.cache.num_blocks))

    def keep(self, entry: Entry, table: BlockTable, accepted: Sequence[int]) -> None:
        """As in Runner, on every rank: at the beginning of the next step."""
        slots = table.slots(entry.end, len(entry.draft))
        self.moves += [(slots[node], slots[i]) for i, node in enumerate(accepted) if node != i]

    def _guarded(self, action: Callable):
        """Whatever ends a step halfway leaves the ranks out of step: they are ended, and the error says why."""
        try:
            return action()
        except PeerLost as error:
            self.world = None
            found = RankError(f"a rank is gone ({error}); torchrun says which")
            found = self.ranks.blame(error) if self.ranks else found
            self.lost = str(found)
            raise found from None
        except BaseException as error:
            self.lost, self.world = f"the ranks were ended after {type(error).__name__}", None
            if self.ranks:
                self.ranks.close(kill=True)
            raise

    def close(self) -> None:
        """Tell the ranks to end, and wait until they have. Twice is harmless."""
        if self.lost:
            return
        self.lost = "the ranks were closed"
        with contextlib.suppress(PeerLost):  # gone already
            send(STOP, [], self.world)
        self.world = None
        self.ranks.close() if self.ranks else leave()


def follow(model: Decoder, world: World) -> None:
    """What ranks 1, 2, .. do until rank 0 says stop: read a plan, compute it, drop the result."""
    runner = None
    while True:
        kind, numbers = receive(world)
        if kind == STOP:
            return
        if kind == SETUP:
            blocks, size, host, attention = numbers.tolist()
            how = ATTENTIONS[attention]
            cache = PagedCache(model.config, blocks, size, model.dtype, model.device, host, how)
            runner = Runner(model, cache)
        else:
            execute(runner, decode(numbers, model.device, runner.cache.num_blocks))


def load_rank(world: World, name: str, dtype, quantization: str | None) -> Decoder:
    """This rank's part of a model. Integers are chosen on the whole, then cut: the same on any number of ranks."""
    if quantization is None:
        return pack_linears(load_shard(name, world.group, dtype, world.device))
    whole = quantize_by_name(load_model(name, dtype, world.device), quantization, kernel="unpack")
    return pack_linears(apply_tensor_parallel(whole, world.group))


def smallest_budget(world: World) -> int:
    """Bytes for K and V that every rank has; called on all of them, and waits for the slowest to load."""
    mine = torch.tensor([kv_budget(world.device)], dtype=torch.long)
    return min(int(each) for each in all_gather(mine, world.control))


def rank_main(world: World, name: str, dtype, quantization: str | None) -> None:
    """Ranks 1, 2, ..: load, agree on the room, follow."""
    model = load_rank(world, name, dtype, quantization)
    smallest_budget(world)
    follow(model, world)


@dataclass
class ParallelModel:
    """Rank 0's part of a model, the engine options for it, and its ranks (None: torchrun's)."""

    model: Decoder
    options: EngineOptions
    world: World
    ranks: Ranks | None
    runner: ParallelRunner | None = None

    def attach(self, engine: Engine) -> None:
        """From now on the engine's steps run on all ranks."""
        self.runner = engine.runner = ParallelRunner(self.model, engine.runner.cache, self.world, self.ranks)
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self.world = None
        if self.runner is not None:
            self.runner.close()
        elif self.ranks is not None:
            self.ranks.close(kill=True)


def start_parallel(
    name: str,
    size: int,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    quantization: str | None,
    options: EngineOptions,
    compile: bool = False,
    speculative: SpeculativeOptions | None = None,
) -> ParallelModel:
    """Load a model over `size` ranks. Under torchrun every rank calls this; on all but rank 0 it follows rank 0 to
    the end and then leaves the process."""
    check_mix(size, options, compile, speculative, quantization)
    shape = str(name).startswith("shape:")
    check_ranks(known_shape(str(name)) if shape else open_checkpoint(resolve(name)).config, size)
    device, dtype = as_device(device), as_dtype(dtype)
    if under_torchrun():
        return _under_torchrun(name, size, dtype, device, quantization, options)
    ranks = Ranks(size, rank_main, name, dtype, quantization, device=device)
    try:
        return _rank_zero(ranks.world, ranks, name, dtype, quantization, options)
    except (PeerLost, torch.distributed.DistError) as error:
        raise ranks.blame(error) from None
    except BaseException:
        ranks.close(kill=True)
        raise


def _rank_zero(world, ranks, name, dtype, quantization, options) -> ParallelModel:
    model = load_rank(world, name, dtype, quantization)
    room = blocks_in(smallest_budget(world), model.config, options, model.dtype)
    options = options.resolved(model.config, room)
    check_room(options, model.config, model.dtype, model.device)
    return ParallelModel(model, options, world, ranks)


def _under_torchrun(name, size, dtype, device, quantization, options) -> ParallelModel:
    found, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if found != size:
        raise ParamsError(illegal("tensor_parallel_size", size, f"torchrun started {found} ranks"))
    world = join(rank_device(device, local))
    if world.rank == 0:
        return _rank_zero(world, None, name, dtype, quantization, options)
    with contextlib.suppress(PeerLost):  # who failed says so itself, and torchrun ends the others
        rank_main(world, name, dtype, quantization)
    leave()
    raise SystemExit(0)


def check_mix(
    size: int,
    options: EngineOptions,
    compile: bool,
    speculative: SpeculativeOptions | None,
    quantization: str | None = None,
) -> None:
    """What several ranks do not do is refused before any process is started."""
    mixes = {
        "compile=True": compile,
        "cuda_graphs=True": options.cuda_graphs,
        f"kv_cache_dtype={options.kv_cache_dtype!r}": options.kv_cache_dtype != "auto",
        # a token's scale is that of its largest input, and no rank sees all of them
        f"quantization={quantization!r}": "activations" in NAMED.get(quantization, {}),
    }
    if speculative is not None:  # drafts that run the target itself would call its sums on rank 0 alone
        own = speculative.bits or speculative.layers or speculative.method in TRAINED
        mixes[f"speculative={speculative.method!r}"] = bool(own)
    for mix, wanted in mixes.items():
        if wanted:
            raise ParamsError(illegal("tensor_parallel_size", size, f"cannot be combined with {mix}"))
