"""What ranks say to each other: all-reduce, all-gather, broadcast; and ranks that are threads, for a notebook.

Chapter 18. The layers take a process group of `torch.distributed` (gloo on CPUs, NCCL on GPUs) and call these
functions. With one rank nothing is sent. A peer that has gone is a `PeerLost`, at once: its socket is closed.

`run_threads` makes every rank a thread of this process. Between them is the same gloo over the same sockets, so what
is proved there holds between processes; the threads share one interpreter, so their speed says nothing. Before each
collective the threads compare what they bring: a rank that stays away, or brings another shape, is an error that says
so, where processes would wait for each other until the time-out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
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
    """Where the threads of one run compare what each brings to its n-th collective."""

    def __init__(self, ranks: int, seconds: float) -> None:
        self.ranks, self.seconds, self.changed = ranks, seconds, threading.Condition()
        self.brought: dict[int, dict[int, str]] = {}  # number of the collective -> rank -> what
        self.gone: set[int] = set()

    def leave(self, rank: int) -> None:
        """This rank is done: whoever waits for it, now or later, is told so."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()

    def compare(self, rank: int, number: int, what: str) -> None:
        with self.changed:
            here = self.brought.setdefault(number, {})
            here[rank] = what
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(here) == self.ranks or self.gone - here.keys(), self.seconds)
            if len(here) < self.ranks:
                absent = sorted(self.gone - here.keys())
                why = f"rank {absent[0]} has ended" if absent else f"not every rank came in {self.seconds:g} s"
                raise PeerLost(f"rank {rank} waits in its collective {number}, {what}; {why}")
            if len(set(here.values())) > 1:
                told = "; ".join(f"rank {r} brings {here[r]}" for r in sorted(here))
                raise PeerLost(f"the ranks disagree on collective {number}: {told}")


class ThreadGroup:
    """A gloo group of threads. `sent` lists this rank's collectives: (name, bytes of the tensor it brought)."""

    def __init__(self, gloo: dist.ProcessGroupGloo, meeting: Meeting) -> None:
        self.gloo, self.meeting, self.sent = gloo, meeting, []

    def rank(self) -> int:
        return self.gloo.rank()

    def size(self) -> int:
        return self.gloo.size()

    def allreduce(self, tensors: list[Tensor]):
        self._meet("all_reduce", tensors[0])
        return self.gloo.allreduce(tensors)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor]):
        self._meet("all_gather", tensors[0])
        return self.gloo.allgather(outputs, tensors)

    def broadcast(self, tensors: list[Tensor], options):
        self._meet("broadcast", tensors[0])
        return self.gloo.broadcast(tensors, options)

    def _meet(self, name: str, x: Tensor) -> None:
        self.sent.append((name, x.nbytes))
        shown = f"{name} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        self.meeting.compare(self.rank(), len(self.sent), shown)


def run_threads(function: Callable, ranks: int, *args, seconds: float = 60.0) -> list:
    """function(group, *args) on every rank, each a thread; returns what each gave. The first error is raised."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ParamsError(illegal("ranks", ranks, "must be a whole number of at least 1"))
    store, meeting = dist.HashStore(), Meeting(ranks, seconds)
    results: list = [None] * ranks
    errors: list[BaseException] = []
    alive: list = []  # every group, until all threads are done: one that is freed closes its sockets

    def work(rank: int) -> None:
        try:
            gloo = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=seconds))
            alive.append(gloo)
            with torch.inference_mode():
                results[rank] = function(ThreadGroup(gloo, meeting), *args)
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
