"""Beam search on shared blocks: keep the `width` likeliest texts, not only the likeliest next token.

Chapter 05. All beams begin with the prompt, and most share more than that: a beam that continues another one takes
over its blocks (`BlockTable.fork`), and a block is copied only when two beams are about to write into the same one
(PagedAttention, Kwon et al. 2023, section 4.4, arXiv:2309.06180). Contiguous room would mean a copy of the whole text
each time a beam splits.

The score of a text is the sum of its log-probabilities / length ** length_penalty, as in transformers. It runs on the
pool, tables and runner of the engine, without the scheduler: all beams are in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch

from minillm.cache.block_pool import BlockPool, BlockTable, blocks_for
from minillm.cache.paged import PagedCache, cache_bytes
from minillm.engine.batch import Batch
from minillm.engine.request import Request
from minillm.engine.runner import Runner
from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder
from minillm.model.generate import check_prompt
from minillm.model.weights import device_memory

MOST_PENALTY = 10  # of either sign; length ** 10 is a float for any context


@dataclass(frozen=True)
class Beam:
    """A finished text. score: sum of log-probabilities / length ** length_penalty."""

    tokens: list[int]
    score: float


@dataclass
class BeamResult:
    """beams: likeliest first. most_blocks: held at any time. unshared_blocks: held then, if no beam shared any.
    copied_blocks: in all."""

    beams: list[Beam]
    most_blocks: int = 0
    unshared_blocks: int = 0
    copied_blocks: int = 0


def beam_search(
    model: Decoder,
    prompt: Sequence[int],
    width: int = 4,
    max_tokens: int = 32,
    *,
    eos_ids: Iterable[int] = (),
    length_penalty: float = 1.0,
    block_size: int = 16,
) -> BeamResult:
    """The best texts of up to max_tokens new tokens; those that met end-of-text include it."""
    check_prompt(prompt, model.config)
    for name, value in (("width", width), ("max_tokens", max_tokens), ("block_size", block_size)):
        if not _is_integer(value) or value < 1:
            raise ParamsError(illegal(name, value, "must be a whole number of at least 1"))
    if not _is_number(length_penalty) or not -MOST_PENALTY <= length_penalty <= MOST_PENALTY:  # NaN fails this too
        legal = f"must be a number from -{MOST_PENALTY} to {MOST_PENALTY}"
        raise ParamsError(illegal("length_penalty", length_penalty, legal))
    eos_ids = _ids(eos_ids)
    width, block_size = int(width), int(block_size)
    limit = min(int(max_tokens), model.config.max_length + 1 - len(prompt))
    blocks = 2 * blocks_for(len(prompt) + limit, block_size)  # of a beam and its successor, for a moment
    _check_memory(model, width, blocks, block_size)
    room = width * blocks
    pool, cache = (
        BlockPool(room, block_size),
        PagedCache(model.config, room, block_size, model.dtype, model.device),
    )
    runner, result, finished = Runner(model, cache), BeamResult([]), []
    first = Request("beam", prompt, limit, table=BlockTable(block_size))
    running: list[tuple[Request, float]] = [(first, 0.0)]  # with the sum of log-probabilities
    for length in range(1, limit + 1):
        logprobs = _forward(runner, pool, running, result)  # [beams, vocab]
        candidates = _best(running, logprobs, (1 + max(1, len(eos_ids))) * width)  # enough without those that end
        chosen = []
        for rank, (parent, token, total) in enumerate(candidates):
            if token in eos_ids:
                if rank < width:
                    finished.append(Beam([*running[parent][0].output, token], total / length**length_penalty))
            elif len(chosen) < width:
                chosen.append((parent, token, total))
        running = _continue(pool, running, chosen, limit)
        finished = sorted(finished, key=lambda beam: -beam.score)[:width]
        if not running:  # every token of the vocabulary ends a text
            break
        if len(finished) == width and finished[-1].score >= running[0][1] / length**length_penalty:
            break
    else:
        finished += [Beam(beam.output, total / limit**length_penalty) for beam, total in running]
    for beam, _ in running:
        beam.table.free(pool)
    pool.check([])
    result.beams = sorted(finished, key=lambda beam: -beam.score)[:width]
    return result


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _ids(eos_ids: Iterable[int]) -> frozenset[int]:
    found = tuple(eos_ids) if isinstance(eos_ids, Iterable) else (None,)
    if not all(_is_integer(token) and token >= 0 for token in found):
        legal = "must be a list of token ids (whole numbers of at least 0); () where no token ends a text"
        raise ParamsError(illegal("eos_ids", eos_ids, legal))
    return frozenset(int(token) for token in found)


def _check_memory(model: Decoder, width: int, blocks: int, block_size: int) -> None:
    """Refuse what the memory could not hold if it were empty. blocks: of one beam."""
    if (total := device_memory(model.device)) is None:
        return
    for name, value, unit in (
        ("block_size", block_size, cache_bytes(model.config, 2, 1, model.dtype)),  # a beam has two blocks or more
        ("width", width, cache_bytes(model.config, blocks, block_size, model.dtype)),
    ):
        if value > total // unit:
            legal = f"at most {total // unit} fits the {total / 1e9:.1f} GB of memory of {model.device}"
            raise ParamsError(illegal(name, value, legal))


def _forward(runner: Runner, pool: BlockPool, running: list[tuple[Request, float]], result: BeamResult):
    """One step of all beams -> log-probabilities [beams, vocab]."""
    batch = Batch(0, sum(beam.remaining for beam, _ in running))
    for beam, _ in running:
        if pairs := beam.table.append(pool, beam.remaining):
            batch.copies.append(("copy", pairs))
            result.copied_blocks += len(pairs)
        batch.add(beam, beam.remaining)
    logprobs = runner.run(batch).float().log_softmax(-1)
    for beam, _ in running:
        beam.computed = len(beam.tokens)
    if pool.used_count > result.most_blocks:
        result.most_blocks = pool.used_count
        result.unshared_blocks = sum(len(beam.table.blocks) for beam, _ in running)
    return logprobs


def _best(running: list[tuple[Request, float]], logprobs: torch.Tensor, count: int) -> list[tuple[int, int, float]]:
    """The likeliest continuations over all beams: (beam, token, sum of log-probabilities), best first."""
    vocab = logprobs.shape[-1]
    totals = logprobs + torch.tensor([total for _, total in running], device=logprobs.device)[:, None]
    values, places = totals.flatten().topk(min(count, totals.numel()))
    return [(place // vocab, place % vocab, value) for place, value in zip(places.tolist(), values.tolist())]


def _continue(
    pool: BlockPool,
    running: list[tuple[Request, float]],
    chosen: list[tuple[int, int, float]],
    limit: int,
) -> list[tuple[Request, float]]:
    """The new beams, each on the blocks of the one that it continues; blocks that no beam needs are free."""
    following = []
    for parent, token, total in chosen:
        old = running[parent][0]
        beam = Request("beam", old.prompt, limit, table=old.table.fork(pool), computed=old.computed)
        beam.tokens = [*old.tokens, token]
        following.append((beam, total))
    for old, _ in running:
        old.table.free(pool)
    return following
