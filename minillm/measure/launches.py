"""What a step launches: operations counted one by one, and the time between them.

Chapter 10. On a GPU each operation that computes is at least one kernel launch, on a CPU one library call. Both are
counted at torch's dispatcher. Under `torch.inference_mode()` composite operations (linear, rms_norm,
scaled_dot_product_attention) pass it whole and count as one, as on a GPU; without it they pass as their parts. Views
(reshape, split, transpose) and bare allocations launch nothing and are left out. A fusion is counted as one launch by
wrapping it in `LaunchCount.one`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "detach", "detach_"}
VIEWS = {"reshape", "flatten", "_unsafe_view", "_reshape_alias", "unflatten", "broadcast_tensors", "contiguous"}


class LaunchCount(TorchDispatchMode):
    """`with LaunchCount() as count: step()`; then `count.total`, and `count.names`, a Counter by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.names.total()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if launches(function):
            self.names[function._schema.name.split("::")[1]] += 1
        return function(*args, **(kwargs or {}))

    def one(self, function: Callable, name: str | None = None) -> Callable:
        """The same function, counted as a single launch, whatever it does inside."""

        def single(*args, **kwargs):
            self.names[name or function.__name__] += 1
            with _disable_current_modes():
                return function(*args, **kwargs)

        return single


def launches(function) -> bool:
    """Whether an operation of torch's computes, by its schema: a view's result is an alias that it does not write."""
    schema = function._schema
    if schema.name.split("::")[1] in ALLOCATIONS | VIEWS:
        return False
    aliases = [result.alias_info for result in schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


@dataclass(frozen=True)
class Op:
    """One operation on the profiler's clock, in seconds from the first one's start."""

    name: str
    start: float
    end: float


def timeline(step: Callable[[], object], warmup: int = 3) -> list[Op]:
    """The outermost operations of one call, in order, as torch's profiler saw them on the CPU."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(warmup):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step()
    events = sorted(
        ((e.name, e.time_range.start, e.time_range.end) for e in prof.events() if "::" in e.name),
        key=lambda e: (e[1], -e[2]),
    )
    found: list[Op] = []
    last = -1.0
    for name, start, end in events:
        if start >= last:  # not inside the one before
            found.append(Op(name.split("::")[1], start, end))
            last = end
    first = found[0].start if found else 0.0
    return [Op(op.name, (op.start - first) / 1e6, (op.end - first) / 1e6) for op in found]


def gaps(ops: list[Op]) -> list[float]:
    """Seconds from the end of each operation to the start of the next."""
    return [b.start - a.end for a, b in pairwise(ops)]


def gpu_launches(step: Callable[[], object]) -> int:
    """Launch calls of one step as CUDA's own tracer counts them; a whole graph is one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    return sum(e.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")) for e in prof.events())


def overhead_share(layers: int, launches_per_layer: int, launch_seconds: float, kernel_seconds: float) -> float:
    """Share of a step in which the device waits for the CPU, if launches and kernels overlap perfectly.

    A step takes the longer of the two: `layers x launches x launch_seconds` on the CPU, `kernel_seconds` on the GPU.
    """
    cpu = layers * launches_per_layer * launch_seconds
    return max(0.0, 1.0 - kernel_seconds / cpu) if cpu else 0.0
