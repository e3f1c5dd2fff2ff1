"""`minillm bench decode-attention`: bytes of K and V read a second by one decode step's attention, context by batch.

Chapter 09. On a GPU: FlashDecoding with the splits that it chooses and with one, the paged kernel, torch's attention
on contiguous K and V, and the gather of chapter 05, all on the same numbers, in turn. Calls are recorded in a CUDA
graph, so the GPU's time is measured and not Python's. K and V of several calls together are larger than the GPU's
cache. On a CPU, where Triton has no speed, torch's attention and the gather remain. Values are compared before
anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels.launch import why_not
from minillm.kernels.splits import choose_splits
from minillm.measure import clock
from minillm.measure.machine import ceilings
from minillm.measure.records import Figure, figure
from minillm.model.attention import naive_attention

BLOCK = 16
GPU_SIZES = ((1, 1024), (1, 4096), (1, 16384), (1, 65536), (8, 1024), (8, 8192), (64, 512), (64, 8192))
CPU_SIZES = ((1, 256), (1, 1024), (1, 4096), (8, 256), (8, 1024))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass
class Step:
    """Inputs of `sets` decode steps: batch rows that all have `context` keys, in a row and in shuffled blocks."""

    q: Tensor  # [batch, heads, dim]
    k: Tensor  # [sets, batch, kv_heads, context, dim]
    v: Tensor
    k_pool: Tensor  # [blocks, BLOCK, kv_heads, dim]
    v_pool: Tensor
    tables: Tensor  # [sets, batch, blocks a row]
    lengths: Tensor  # [batch]

    @property
    def nbytes(self) -> int:
        """Of K and V that one step reads."""
        return 2 * self.k[0].nbytes

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def make_step(batch: int, context: int, heads: int, kv_heads: int, dim: int, dtype, device, sets: int) -> Step:
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    per = -(-context // BLOCK)
    k, v = (randn(sets, batch, kv_heads, context, dim) for _ in range(2))
    order = torch.randperm(sets * batch * per, generator=generator, device=device).view(sets, batch, per)
    pools = []
    for x in (k, v):
        padded = F.pad(x, (0, 0, 0, per * BLOCK - context)).transpose(
            2, 3
        )  # [sets, batch, per x BLOCK, kv_heads, dim]
        pool = torch.empty(sets * batch * per, BLOCK, kv_heads, dim, dtype=dtype, device=device)
        pool[order.flatten()] = padded.reshape(-1, BLOCK, kv_heads, dim)
        pools.append(pool)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    return Step(randn(batch, heads, dim), k, v, *pools, order, lengths)


def sdpa(step: Step, i: int) -> Tensor:
    """The query heads of a group go in as that KV head's queries, so a key is read once."""
    q = step.q.unflatten(1, (step.k.shape[2], -1))  # [batch, kv_heads, group, dim]
    return F.scaled_dot_product_attention(q, step.k[i], step.v[i], scale=step.scale).flatten(1, 2)


def gathered(step: Step, i: int, rows: tuple[Tensor | None, Tensor | None] = (None, None)) -> Tensor:
    """Chapter 05: collect the blocks in a row, then attend. rows: memory for K's and V's; None: new memory."""
    context = step.k.shape[3]
    k, v = (
        torch.index_select(pool, 0, step.tables[i].flatten(), out=row)
        .view(len(step.q), -1, *pool.shape[2:])[:, :context]
        .transpose(1, 2)
        for pool, row in zip((step.k_pool, step.v_pool), rows)
    )  # [batch, kv_heads, context, dim]
    q = step.q.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(q, k, v, scale=step.scale).flatten(1, 2)


def decoding(splits: int | None) -> Callable[[Step, int], Tensor]:
    from minillm.kernels.flash_decoding import flash_decoding

    return lambda s, i: flash_decoding(s.q, s.k[i], s.v[i], s.lengths, scale=s.scale, splits=splits)[0]


def paged(step: Step, i: int) -> Tensor:
    from minillm.kernels.paged_attention import paged_attention

    starts = torch.arange(len(step.q) + 1, dtype=torch.int32, device=step.q.device)
    return paged_attention(
        step.q,
        step.k_pool,
        step.v_pool,
        step.tables[i],
        starts,
        step.lengths,
        scale=step.scale,
        max_query=1,
        max_length=step.k.shape[3],
    )


def bench_decode_attention(
    sizes: tuple[tuple[int, int], ...] | None = None, repeats: int = 5, smoke: bool = False
) -> Iterator[Figure]:
    """Figures decode_attention.batchB.contextC.NAME (B/s) and, for ours, .share of the read bandwidth and .splits.

    sizes: (batch, context). smoke: tiny sizes, anywhere; the kernels' values are checked, in the interpreter if need
    be, and they are timed on a GPU only.
    """
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    heads, kv_heads, dim = (32, 8, 128) if on_gpu else (8, 2, 64)
    sizes = sizes or (((2, 100),) if smoke else GPU_SIZES if on_gpu else CPU_SIZES)
    methods: dict[str, Callable[[Step, int], Tensor]] = {"sdpa": sdpa, "gathered": gathered}
    kernels = {}
    if why_not() is None and (on_gpu or smoke):
        kernels = {"flash_decoding": decoding(None), "one_split": decoding(1), "paged": paged}
        methods |= kernels if on_gpu else {}
    bandwidth = ceilings(device, fast=smoke).read_bandwidth
    for batch, context in sizes:
        one = 2 * batch * kv_heads * context * dim * dtype.itemsize
        sets = max(1, min(16, 2**28 // one)) if on_gpu else 1 if smoke else max(1, min(8, 2**26 // one))
        step = make_step(batch, context, heads, kv_heads, dim, dtype, device, sets)
        check(step, {**methods, **kernels}, dtype)
        name = f"decode_attention.batch{batch}.context{context}"
        about = {"batch": batch, "context": context, "heads": heads, "kv_heads": kv_heads, "dim": dim}
        about |= {"dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
        for method, seconds in time_in_turn(step, methods, sets, repeats).items():
            rate = clock.Timing(tuple(step.nbytes / s for s in seconds.samples))
            yield figure(f"{name}.{method}", rate.median, "B/s", spread=rate.quartiles, workload=about)
            yield figure(f"{name}.{method}.share", rate.median / bandwidth, "1", workload=about)
        if on_gpu:
            from minillm.kernels.flash_decoding import program_slots

            splits = choose_splits(batch * kv_heads, context, program_slots(device))
            yield figure(f"{name}.splits", splits, "1", workload=about)


def check(step: Step, methods: dict, dtype: torch.dtype) -> None:
    """Every method against the formula in float32, on the first set; a fast wrong kernel is not a result."""
    q, k, v = step.q.unsqueeze(2).float(), step.k[0].float(), step.v[0].float()
    expected = torch.cat(
        [naive_attention(*(x[i : i + 1] for x in (q, k, v)), None, step.scale) for i in range(len(q))]
    )
    for name, method in methods.items():
        error = (method(step, 0).float() - expected.squeeze(2)).abs().max() / expected.abs().max()
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"{name}: the result is {error:.1e} of its size away")


def time_in_turn(step: Step, methods: dict, sets: int, repeats: int) -> dict[str, clock.Timing]:
    """Seconds of one call of each, over all sets a sample: A B C A B C."""
    calls = {
        name: recorded(lambda m=method: [m(step, i) for i in range(sets)], step.q) for name, method in methods.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(clock.timed(call, 1, 1, cuda_events=step.q.is_cuda).median / sets)
    return {name: clock.Timing(tuple(s)) for name, s in samples.items()}


def recorded(function: Callable[[], object], like: Tensor) -> Callable[[], object]:
    """On a GPU the same launches as one CUDA graph; elsewhere the function."""
    if not like.is_cuda:
        return function
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"decode-attention": bench_decode_attention}
