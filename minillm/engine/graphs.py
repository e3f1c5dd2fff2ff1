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
from typing import Protocol

import torch
from torch import Tensor

from minillm.cache.block_pool import blocks_for
from minillm.cache.paged import PagedCache
from minillm.engine.batch import Batch
from minillm.engine.options import EngineOptions
from minillm.engine.runner import Runner
from minillm.engine.static_step import KernelStaticCache, StaticCache, StepBuffers
from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import check_ids
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


class DecodeGraphs:
    """One captured decode step per batch size. `run` is the only way in."""

    def __init__(self, model: Decoder, cache: PagedCache, sizes: Sequence[int], backend: Backend) -> None:
        config, device = model.config, model.device
        if not sizes or any(not isinstance(s, int) or s < 1 for s in sizes):
            raise ParamsError(illegal("sizes", tuple(sizes), "must be whole numbers of at least 1"))
        self.sizes, self.num_blocks = tuple(sorted(set(sizes))), cache.num_blocks
        self.max_blocks = blocks_for(config.max_length, cache.block_size)
        self.buffers = StepBuffers(self.sizes[-1], self.max_blocks, device)
        self.output = torch.zeros(self.sizes[-1], config.vocab_size, dtype=model.dtype, device=device)
        self.replays: dict[int, Callable[[], object]] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self.replays[size] = self._capture(model, cache, size, backend)

    @torch.inference_mode()
    def _capture(self, model: Decoder, cache: PagedCache, size: int, backend: Backend) -> Callable:
        tokens, positions, slots, lengths, tables = self.buffers.views(size)
        kind = KernelStaticCache if cache.attention == "triton" else StaticCache
        view, output = kind(cache, positions, slots, lengths, tables), self.output[:size]

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
        same = torch.equal(output.isnan(), expected.isnan())  # the pool may hold NaN: no one has written to it yet
        if not same or (output.float() - expected.float()).nan_to_num().abs().amax() > 1e-2 * largest:
            raise RuntimeError(f"the graph of batch size {size} does not give what the step gives")

    def fits(self, batch: Batch) -> bool:
        """Decodes only: one token a request, each sampled, no more requests than the largest size."""
        entries = batch.entries.values()
        return 0 < len(entries) <= self.sizes[-1] and all(e.width == 1 and e.samples for e in entries)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Logits [requests, vocab], in the order of the batch."""
        for request in batch.entries:
            check_ids("block table", request.table.blocks, self.num_blocks)
        rows = [
            (request.tokens[e.start], e.start, request.table.slots(e.start, 1)[0], request.table.blocks)
            for request, e in batch.entries.items()
        ]
        size = padded_size(len(rows), self.sizes)
        self.buffers.fill(rows, size)
        self.replays[size]()
        return self.output[: len(rows)].clone()  # the next replay writes over `output`


def make_runner(model: Decoder, cache: PagedCache, options: EngineOptions) -> Runner:
    """The runner an engine asks for: with graphs for every batch it may form, or without."""
    return (
        GraphRunner(model, cache, batch_sizes(options.max_num_seqs)) if options.cuda_graphs else Runner(model, cache)
    )


class GraphRunner(Runner):
    """A runner whose pure decode steps are replayed; every other step runs as before.

    Where graphs cannot be had, `why_eager` says so in one line and every step runs as before.
    """

    def __init__(
        self, model: Decoder, cache: PagedCache, sizes: Sequence[int], backend: Backend | None = None
    ) -> None:
        super().__init__(model, cache)
        self.graphs, self.why_eager, self.replayed = None, no_graphs(model) if backend is None else None, 0
        if self.why_eager is None:
            try:
                self.graphs = DecodeGraphs(model, cache, sizes, backend or CudaBackend())
            except (RuntimeError, torch.OutOfMemoryError) as error:
                self.why_eager = f"capture failed: {str(error).splitlines()[0]}"
        if self.why_eager is not None:
            log.info("decode runs without CUDA graphs: %s", self.why_eager)

    def run(self, batch: Batch) -> Tensor:
        if self.graphs is None or self.keep_hidden or not self.graphs.fits(batch):
            return super().run(batch)
        self.copy(batch)
        self.replayed += 1
        return self.graphs.run(batch)


def no_graphs(model: Decoder) -> str | None:
    """Why this model cannot be captured here; None: it can."""
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}, and graphs are CUDA's"
    return None
