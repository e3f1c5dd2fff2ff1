"""The runner: one batch of the scheduler becomes one forward of the model.

Chapter 04 and 05. All tokens of the batch are packed into one row, [tokens]: prompts whole or in chunks, and single
decode tokens, with no padding between. Every layer but attention treats a token by itself, so packing costs nothing
there; attention learns from a `PagedStep` which tokens belong together and where their keys and values are. Only the
tokens that are sampled from reach the head. No policy here: what to run was decided by the scheduler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.cache.paged import PagedCache, PagedStep
from minillm.engine.batch import Batch
from minillm.kernels.launch import check_ids
from minillm.model.decoder import Decoder


class Runner:
    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        self.model, self.cache = model, cache

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Logits [rows, vocab], one row for each request of batch.sampling, in that order."""
        self.copy(batch)
        tokens, step, rows = pack(batch, self.model.device, self.cache.num_blocks)
        self.cache.begin(step)
        hidden = self.model.hidden(tokens, step.positions, self.cache)  # [tokens, hidden]
        return self.model.logits(hidden[rows])  # [rows, vocab]

    def copy(self, batch: Batch) -> None:
        """Block copies, in the order the scheduler decided them: copy-on-write, and swaps to and from the host."""
        for kind, pairs in batch.copies:
            if kind == "copy":
                self.cache.copy_blocks(pairs)
            else:
                sources, targets = (list(side) for side in zip(*pairs))
                (self.cache.swap_out if kind == "swap_out" else self.cache.swap_in)(sources, targets)


def pack(batch: Batch, device: torch.device, num_blocks: int) -> tuple[Tensor, PagedStep, Tensor]:
    """(token ids [tokens], what attention needs to know, indices [rows] of the tokens to sample from). Block ids are
    looked at here, while they are lists: a kernel would read whatever memory a wrong one names."""
    tokens, positions, slots, tables, query_lengths, kv_lengths, rows = [], [], [], [], [], [], []
    for request, entry in batch.entries.items():
        tokens += request.tokens[entry.start : entry.end]
        positions += range(entry.start, entry.end)
        slots += request.table.slots(entry.start, entry.count)
        check_ids("block table", request.table.blocks, num_blocks)
        tables.append(request.table.blocks)
        query_lengths.append(entry.count)
        kv_lengths.append(entry.end)
        if entry.samples:
            rows.append(len(tokens) - 1)
    widest = max(map(len, tables))
    padded = [table + [0] * (widest - len(table)) for table in tables]
    flat, positions, slots, rows = (
        torch.tensor(values, dtype=torch.long, device=device) for values in (tokens, positions, slots, rows)
    )
    step = PagedStep(
        slot_mapping=slots,  # [tokens]
        block_tables=torch.tensor(padded, device=device),  # [requests, widest]
        query_lengths=query_lengths,
        kv_lengths=kv_lengths,
        positions=positions,  # [tokens]
    )
    return flat, step, rows
