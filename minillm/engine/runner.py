"""The runner: one batch of the scheduler becomes one forward of the model.

Chapter 04 and 05. All tokens of the batch are packed into one row, [tokens]: prompts whole or in chunks, and single
decode tokens, with no padding between. Every layer but attention treats a token by itself, so packing costs nothing
there; attention learns from a `PagedStep` which tokens belong together and where their keys and values are. Only the
tokens that are sampled from reach the head. No policy here: what to run was decided by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.cache.block_pool import BlockTable
from minillm.cache.paged import PagedCache, PagedStep
from minillm.engine.batch import Batch, Entry
from minillm.kernels.launch import check_ids
from minillm.model.decoder import Decoder
from minillm.speculative.tree import tree_mask


class Runner:
    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        self.model, self.cache = model, cache
        self.keep_hidden = False  # for drafts that read the target's features (chapter 17)
        self.hidden: Tensor | None = None  # [tokens, hidden] of the last forward, if they are to be kept

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Logits [rows, vocab], one row for each request of batch.sampling, in that order; with a draft, one more for
        each of its tokens."""
        self.copy(batch)
        tokens, step, rows = pack(batch, self.model.device, self.cache.num_blocks)
        self.cache.begin(step)
        hidden = self.model.hidden(tokens, step.positions, self.cache)  # [tokens, hidden]
        self.hidden = hidden if self.keep_hidden else None
        return self.model.logits(hidden[rows])  # [rows, vocab]

    def keep(self, entry: Entry, table: BlockTable, accepted: Sequence[int]) -> None:
        """Move the K and V of a draft's accepted nodes to where they would be had nothing else been drafted."""
        slots = table.slots(entry.end, len(entry.draft))
        moves = [(slots[node], slots[i]) for i, node in enumerate(accepted) if node != i]
        if moves:  # a chain's nodes are where they belong
            self.cache.move_slots(moves)

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
    masks = {}
    for request, entry in batch.entries.items():
        draft = entry.draft
        tokens += request.tokens[entry.start : entry.end]
        tokens += draft.tokens
        positions += range(entry.start, entry.end)
        positions += [entry.end - 1 + depth for depth in draft.depths()]
        slots += request.table.slots(entry.start, entry.width)
        check_ids("block table", request.table.blocks, num_blocks)
        if not draft.is_chain:
            masks[len(tables)] = tree_mask(draft, entry.count).to(device)
        tables.append(request.table.blocks)
        query_lengths.append(entry.width)
        kv_lengths.append(entry.start + entry.width)
        if entry.samples:
            rows += range(len(tokens) - 1 - len(draft), len(tokens))
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
        masks=masks,
    )
    return flat, step, rows
