"""CUDA graphs: record the launches of one decode step once, then replay them all with a single call.

Chapter 10. A decode step of a small batch launches hundreds of kernels that each run for a few microseconds; the CPU
needs about as long to launch one. A graph keeps the whole list on the GPU. In exchange everything about it is frozen:
shapes, addresses, and the path through the code. So

- there is one graph per batch size of a short list; a step with fewer requests is padded up to the next size;
- inputs are copied INTO fixed buffers before each replay; a new tensor in their place would never be read;
- padding rows have slot -1 (nothing is written) and length 0 (nothing is read);
- nothing in the step may ask the GPU for a value: lengths and block tables are read on the device.

Memory: intermediates of all sizes share one pool; the largest size is captured first, so that the smaller ones fit
into what it took. What a graph returns is never reused, so all sizes return through one shared buffer. Prefill is not
captured: its kernels are long enough to hide their launches, and its shapes never repeat.

`EagerBackend` keeps the same contract without CUDA, by calling the function again: the tests use it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.cache.block_pool import blocks_for
from minillm.cache.paged import PagedCache
from minillm.engine.batch import Batch
from minillm.engine.runner import Runner
from minillm.errors import ParamsError, illegal
from minillm.model.attention import LayerInfo, naive_attention
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder

log = logging.getLogger(__name__)


def batch_sizes(most: int) -> tuple[int, ...]:
    """Sizes to capture for up to `most` requests: 1, 2, 4, then every 8th, and `most` itself."""
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ParamsError(illegal("most", most, "must be a whole number of at least 1"))
    return (*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most)


def padded_size(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that holds `count` requests; None if there is none."""
    return min((size for size in sizes if size >= count), default=None)


def graph_bytes(config: ModelConfig, sizes: Sequence[int], itemsize: int, shared_output: bool = True) -> int:
    """Bytes that the graphs keep allocated, by formula: the widest moment of the largest step, and the outputs.

    One layer's widest moment is its MLP: gate and up, their product, the residual and the normed input. The logits
    come back in one buffer of the largest size, or, without `shared_output`, in one of their own per size.
    """
    wide = config.intermediate_size * (3 if config.gated_mlp else 2) + 2 * config.hidden_size
    moment = max(wide, config.vocab_size)  # the head's result, before it is copied out, is a moment too
    rows = max(sizes) if shared_output else sum(sizes)
    return itemsize * (max(sizes) * moment + rows * config.vocab_size)


class Backend(Protocol):
    """Records what `function` launches; the returned call launches the same again, on the same addresses."""

    def capture(self, function: Callable[[], object]) -> Callable[[], object]: ...


class CudaBackend:
    """torch.cuda.CUDAGraph; all graphs of one backend share a memory pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], object]) -> Callable[[], object]:
        side = torch.cuda.Stream()  # warm-up off the default stream: compilation and workspaces are not recorded
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            function()
        return graph.replay


class EagerBackend:
    """No graph: the replay is the function itself, reading and writing the tensors it read at its capture."""

    def capture(self, function: Callable[[], object]) -> Callable[[], object]:
        function()
        return function


class StepBuffers:
    """The fixed addresses that every graph reads: one row a request, filled from the host by one copy.

    token, position, slot (-1: padding), length (0: padding), then the block table. int64 throughout.
    """

    def __init__(self, rows: int, max_blocks: int, device: torch.device) -> None:
        self.host = torch.zeros(rows, 4 + max_blocks, dtype=torch.long, pin_memory=device.type == "cuda")
        self.device = torch.zeros(rows, 4 + max_blocks, dtype=torch.long, device=device)

    def fill(self, requests: Sequence[tuple[int, int, int, Sequence[int]]], size: int) -> None:
        """requests: (token, position, slot, block table); rows up to `size` become padding."""
        rows = self.host.numpy()
        for i, (token, position, slot, table) in enumerate(requests):
            rows[i, :4] = token, position, slot, position + 1
            rows[i, 4 : 4 + len(table)] = table
        rows[len(requests) : size] = 0
        rows[len(requests) : size, 2] = -1
        self.device[:size].copy_(self.host[:size])  # INTO the buffer: the graph knows this address and no other

    def views(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """tokens, positions, slots, lengths, each [size], and tables [size, max_blocks]."""
        rows = self.device[:size]
        return rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4:]


Attend = Callable[[LayerInfo, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class StaticCache:
    """The cache as a captured step sees it: where to write and how far to read are tensors, not Python numbers."""

    cache: PagedCache
    token_positions: Tensor  # [n]
    slots: Tensor  # [n]
    lengths: Tensor  # [n], this step's token included
    tables: Tensor  # [n, max_blocks]
    attend_paged: Attend

    def positions(self, shape: torch.Size) -> Tensor:
        return self.token_positions.view(shape)

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.k[layer.index], self.cache.v[layer.index]  # [blocks, block_size, kv_heads, dim]
        write(keys, k, self.slots)
        write(values, v, self.slots)
        return self.attend_paged(layer, q, keys, values, self.tables, self.lengths)


def write(stored: Tensor, new: Tensor, slots: Tensor) -> None:
    """new [n, kv_heads, dim] into its slots; -1 writes nothing. The shape may not depend on how many those are, so a
    padding row writes once more what a real row writes: the first one's value, to the first one's slot.

    With no real row at all, slot 0 is written with what it holds."""
    flat = stored.flatten(0, 1)  # [slots, kv_heads, dim]
    real = slots >= 0  # [n]
    first = real.to(torch.uint8).argmax()  # 0-dim: no value leaves the device
    target = torch.where(real, slots, slots[first].clamp(min=0))  # [n]
    source = new.to(flat.dtype)
    source = torch.where(real[:, None, None], source, source[first])  # [n, kv_heads, dim]
    source = torch.where(real.any(), source, flat[:1])
    flat.index_copy_(0, target, source)


def attend_whole_tables(
    layer: LayerInfo, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor
) -> Tensor:
    """Fixed shapes in plain torch: gather every table to its full width and mask. q [n, heads, dim] -> the same.

    It reads max_blocks blocks a row however short the text: the price of a shape that may not change. The Triton
    kernel of chapter 09 has a fixed grid and reads what is there.
    """
    block_size = keys.shape[1]
    place = torch.arange(tables.shape[1] * block_size, device=q.device)  # [room]
    seen = place < lengths[:, None]  # [n, room]
    if layer.window is not None:
        seen = seen & (place >= lengths[:, None] - layer.window)
    own = torch.minimum(place, (lengths[:, None] - 1).clamp(min=0))  # past the end: the last token, so never a
    blocks = tables.gather(1, own // block_size)  # stranger's, whose NaN would pass through a mask [n, room]
    slots = blocks * block_size + own % block_size
    k, v = (x.flatten(0, 1)[slots].to(q.dtype).transpose(1, 2) for x in (keys, values))  # [n, kv_heads, room, dim]
    grouped = q.unflatten(1, (k.shape[1], -1))  # [n, kv_heads, group, dim]
    mask = (seen | (lengths == 0)[:, None])[:, None, None]  # [n, 1, 1, room]
    if layer.softcap is None:
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=layer.scale)
    else:
        out = naive_attention(grouped, k, v, mask, layer.scale, layer.softcap)
    return torch.where((lengths > 0)[:, None, None], out.flatten(1, 2), 0.0)  # [n, heads, dim]


class DecodeGraphs:
    """One captured decode step per batch size. `run` is the only way in."""

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        sizes: Sequence[int],
        backend: Backend,
        attend: Attend = attend_whole_tables,
    ) -> None:
        config, device = model.config, model.device
        if not sizes or any(not isinstance(s, int) or s < 1 for s in sizes):
            raise ParamsError(illegal("sizes", tuple(sizes), "must be whole numbers of at least 1"))
        self.sizes = tuple(sorted(set(sizes)))
        self.max_blocks = blocks_for(config.max_length, cache.block_size)
        self.buffers = StepBuffers(self.sizes[-1], self.max_blocks, device)
        self.output = torch.zeros(self.sizes[-1], config.vocab_size, dtype=model.dtype, device=device)
        self.replays: dict[int, Callable[[], object]] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self.replays[size] = self._capture(model, cache, size, backend, attend)

    @torch.inference_mode()
    def _capture(self, model: Decoder, cache: PagedCache, size: int, backend: Backend, attend: Attend) -> Callable:
        tokens, positions, slots, lengths, tables = self.buffers.views(size)
        view, output = StaticCache(cache, positions, slots, lengths, tables, attend), self.output[:size]

        def step() -> None:
            output.copy_(model(tokens, positions, view))

        vocab = model.config.vocab_size
        self.buffers.fill([(i % vocab, 0, -1, [0]) for i in range(size)], size)
        replay = backend.capture(step)
        self._compare(step, replay, size)
        return replay

    def _compare(self, step: Callable, replay: Callable, size: int) -> None:
        """A replay must give what the step gives; else the capture missed something and must not be used."""
        output = self.output[:size]
        step()
        expected = output.clone()
        output.fill_(-1.0)
        replay()
        largest = expected.float().nan_to_num().abs().amax().clamp(min=1e-6)
        if (output.float() - expected.float()).nan_to_num().abs().amax() > 1e-2 * largest:
            raise RuntimeError(f"the graph of batch size {size} does not give what the step gives")

    def fits(self, batch: Batch) -> bool:
        """Decodes only: one token a request, each sampled, no more requests than the largest size."""
        entries = batch.entries.values()
        return 0 < len(entries) <= self.sizes[-1] and all(e.count == 1 and e.samples for e in entries)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Logits [requests, vocab], in the order of the batch."""
        rows = [
            (request.tokens[e.start], e.start, request.table.slots(e.start, 1)[0], request.table.blocks)
            for request, e in batch.entries.items()
        ]
        size = padded_size(len(rows), self.sizes)
        self.buffers.fill(rows, size)
        self.replays[size]()
        return self.output[: len(rows)].clone()  # the next replay writes over `output`


class GraphRunner(Runner):
    """A runner whose pure decode steps are replayed; every other step runs as before.

    Where graphs cannot be had, `why_eager` says so in one line and every step runs as before.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        sizes: Sequence[int],
        backend: Backend | None = None,
        attend: Attend = attend_whole_tables,
    ) -> None:
        super().__init__(model, cache)
        self.graphs, self.why_eager, self.replayed = None, no_graphs(model) if backend is None else None, 0
        if self.why_eager is None:
            try:
                self.graphs = DecodeGraphs(model, cache, sizes, backend or CudaBackend(), attend)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                self.why_eager = f"capture failed: {str(error).splitlines()[0]}"
        if self.why_eager is not None:
            log.info("decode runs without CUDA graphs: %s", self.why_eager)

    def run(self, batch: Batch) -> Tensor:
        if self.graphs is None or not self.graphs.fits(batch):
            return super().run(batch)
        self.copy(batch)
        self.replayed += 1
        return self.graphs.run(batch)


def no_graphs(model: Decoder) -> str | None:
    """Why this model cannot be captured here; None: it can."""
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}, and graphs are CUDA's"
    return None
