"""What ranks say to each other: all-reduce, all-gather, broadcast; and ranks that are threads, for a notebook.

Chapter 18. The layers take a process group of `torch.distributed` (gloo on CPUs, NCCL on GPUs) and call these
functions. With one rank nothing is sent. A peer that has gone is a `PeerLost`, at once: its socket is closed.

`run_threads` makes every rank a thread of this process, with a group of the same methods whose tensors change hands
in memory: it starts at once, so it is for building and proving; speed is measured between processes
(`minillm.parallel.launch`). Before each collective the threads compare what they bring: a rank that stays away, or
brings another shape, is an error that says so, where processes would wait for each other until the time-out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.errors import ParamsError, illegal


class PeerLost(RuntimeError):
    """Another rank has gone, or did not answer in time."""


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' x, on every rank. In place, where x can be written in place."""
    if group.size() == 1:
        return x
    x = x.contiguous()
    _finish(lambda: group.allreduce([x]), "all_reduce")
    return x


def all_gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's x, in the order of ranks, on every rank; all have one shape."""
    if group.size() == 1:
        return [x]
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    _finish(lambda: group.allgather([parts], [x]), "all_gather")
    return parts


def broadcast(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rank 0's x, written into every rank's."""
    if group.size() > 1:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        _finish(lambda: group.broadcast([x], options), "broadcast")
    return x


def _finish(start: Callable[[], Any], what: str) -> None:
    try:
        start().wait()
    except RuntimeError as error:
        if isinstance(error, PeerLost):
            raise
        raise PeerLost(f"{what}: {str(error).splitlines()[0]}") from error


class Meeting:
    """Where the threads of one run bring their tensors to the n-th collective, and take what the others brought."""

    def __init__(self, ranks: int, seconds: float) -> None:
        self.ranks, self.seconds, self.changed = ranks, seconds, threading.Condition()
        self.tables: dict[int, dict[int, tuple[str, Tensor]]] = {}  # number -> rank -> (what it is, a copy)
        self.taken: dict[int, int] = {}
        self.gone: set[int] = set()

    def leave(self, rank: int) -> None:
        """This rank is done: whoever waits for it, now or later, is told so."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()

    def exchange(self, rank: int, number: int, what: str, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks."""
        with self.changed:
            here = self.tables.setdefault(number, {})
            here[rank] = (what, x.clone())
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(here) == self.ranks or self.gone - here.keys(), self.seconds)
            if len(here) < self.ranks:
                absent = sorted(self.gone - here.keys())
                why = f"rank {absent[0]} has ended" if absent else f"not every rank came in {self.seconds:g} s"
                raise PeerLost(f"rank {rank} waits in its collective {number}, {what}; {why}")
            if len({text for text, _ in here.values()}) > 1:
                told = "; ".join(f"rank {r} brings {here[r][0]}" for r in sorted(here))
                raise PeerLost(f"the ranks disagree on collective {number}: {told}")
            self.taken[number] = self.taken.get(number, 0) + 1
            if self.taken[number] == self.ranks:
                del self.tables[number], self.taken[number]
        return [here[r][1] for r in range(self.ranks)]


class Done:
    """A collective that is over."""

    def wait(self) -> None: ...


class ThreadGroup:
    """A process group whose ranks are threads. `sent` lists this rank's collectives: (name, bytes it brought)."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting
        self.sent: list[tuple[str, int]] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._meeting.ranks

    def allreduce(self, tensors: list[Tensor]) -> Done:
        first, *others = self._exchange("all_reduce", tensors[0])
        for other in others:  # in the order of ranks: the same sum, to the bit, on all
            first = first + other
        tensors[0].copy_(first)
        return Done()

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor]) -> Done:
        for output, brought in zip(outputs[0], self._exchange("all_gather", tensors[0])):
            output.copy_(brought)
        return Done()

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Done:
        tensors[0].copy_(self._exchange("broadcast", tensors[0])[options.rootRank])
        return Done()

    def _exchange(self, name: str, x: Tensor) -> list[Tensor]:
        self.sent.append((name, x.nbytes))
        what = f"{name} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        return self._meeting.exchange(self._rank, len(self.sent), what, x)


def run_threads(function: Callable, ranks: int, *args, seconds: float = 60.0) -> list:
    """function(group, *args) on every rank, each a thread; returns what each gave. The first error is raised."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ParamsError(illegal("ranks", ranks, "must be a whole number of at least 1"))
    meeting = Meeting(ranks, seconds)
    results: list = [None] * ranks
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = function(ThreadGroup(rank, meeting), *args)
        except BaseException as error:  # handed to the caller below
            errors.append(error)
        finally:
            meeting.leave(rank)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerLost)), errors[0])
    return results
