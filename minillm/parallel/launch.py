"""Ranks as processes: started by torchrun, or from a script or notebook, and ended in every case.

Chapter 18. `join` makes a `World`, this process's place among the ranks: a DeviceMesh whose one axis is "tensor"
(later chapters add axes), and a gloo group for plans. Under torchrun all ranks run the same script and find each
other by its environment. Elsewhere `Ranks` starts the others with torch.multiprocessing and is rank 0 itself.

A rank that dies closes its sockets: the collective that the others are in fails at once, they end too, and rank 0
says who was first and how. A rank that hangs is found by the time-out of the data group. An exit, an error and an
interrupt of rank 0 end the others: they are daemons, and they end when rank 0's socket closes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from minillm.errors import ParamsError, illegal
from minillm.parallel.groups import PeerLost

LONG = timedelta(days=365)  # a rank may wait for the next plan as long as nobody asks anything
GUARD = 'a script that starts ranks itself must run under `if __name__ == "__main__":`, or be started by torchrun'


class RankError(RuntimeError):
    """A rank died or did not answer; the message names it. The other ranks have been ended."""


@dataclass
class World:
    """One rank's place. group: for tensors, of the device. control: gloo, for plans, without a time-out."""

    group: dist.ProcessGroup
    control: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_device(device: torch.device, rank: int) -> torch.device:
    """GPU number `rank` of this machine for each rank; the CPU for all."""
    return torch.device("cuda", rank) if device.type == "cuda" else device


def check_devices(device: torch.device, ranks: int) -> None:
    count = torch.cuda.device_count() if device.type == "cuda" else ranks
    if ranks > count:
        raise ParamsError(illegal("tensor_parallel_size", ranks, f"this machine has {count} CUDA devices"))


def join(device: torch.device, seconds: float = 60.0, store: dist.Store | None = None, rank=0, size=0) -> World:
    """Become a rank. Without a store: of torchrun's environment. seconds: the longest wait for a peer's tensor."""
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        raise ParamsError("this process is a rank already: close the other parallel model first (llm.close())")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, limit = ("nccl" if device.type == "cuda" else "gloo"), timedelta(seconds=seconds)
    if store is None:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tensor",))
    return World(mesh.get_group("tensor"), dist.new_group(backend="gloo", timeout=LONG), device)


def leave() -> None:
    """The opposite of `join`; harmless twice."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # of peers that have gone
            dist.destroy_process_group()


class Ranks:
    """This process as rank 0, and size - 1 others, each running worker(world, *args).

    worker must be importable: a function of a module, not of a notebook. It ends by returning; `close` waits for
    that, or, with kill=True, does not. threads: CPU threads of each rank (default: an equal share of this process's).
    """

    def __init__(
        self,
        size: int,
        worker: Callable,
        *args,
        device: str | torch.device = "cpu",
        seconds: float = 60.0,
        threads: int | None = None,
    ) -> None:
        from torch.multiprocessing import start_processes

        device = torch.device(device)
        if not isinstance(size, int) or isinstance(size, bool) or size < 2:
            raise ParamsError(illegal("size", size, "must be a whole number of at least 2"))
        if dist.is_initialized():
            raise ParamsError("this process is a rank already: close the other parallel model first (llm.close())")
        check_devices(device, size)
        self.size, self.open, self._threads = size, True, torch.get_num_threads()
        self.world: World | None = None
        share = max(1, self._threads // size) if threads is None else threads
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)  # any free port
        job = (store.port, size, str(device), seconds, share, worker, args)
        self.context = start_processes(_worker, job, nprocs=size - 1, join=False, daemon=True, start_method="spawn")
        atexit.register(self.close, kill=True)
        try:
            self._await_all(store, time.monotonic() + max(120.0, seconds))
            torch.set_num_threads(share)
            self.world = join(rank_device(device, 0), seconds, store, 0, size)
        except BaseException:
            self.close(kill=True)
            raise

    def _await_all(self, store: dist.Store, deadline: float) -> None:
        """Until every process is up: one that fails at its start is reported, and not waited for."""
        names = [f"up{rank}" for rank in range(1, self.size)]
        while not store.check(names):
            if (found := self._dead(0.05)) is not None:
                raise RankError(f"{found}; it had not joined yet: {GUARD}")
            if time.monotonic() > deadline:
                raise RankError(f"not all of {self.size} ranks came up in time")

    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return self.context.pids()

    def blame(self, error: BaseException, patience: float = 5.0) -> RankError:
        """After a `PeerLost`: end all ranks, and say which one died and how."""
        deadline, found = time.monotonic() + patience, None
        while found is None and time.monotonic() < deadline:
            found = self._dead(0.2)
        hung = [f"{i + 1} (process {p.pid})" for i, p in enumerate(self.context.processes) if p.is_alive()]
        self.close(kill=True)
        silent = (
            f"no answer in time; of {self.size} ranks still there were {', '.join(hung) or 'none'}: all are ended"
        )
        return RankError(found or silent)

    def _dead(self, seconds: float) -> str | None:
        from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

        try:
            self.context.join(seconds, grace_period=1.0)
        except ProcessExitedException as error:
            how = error.signal_name or f"exit code {error.exit_code}"
            return f"rank {error.error_index + 1} of {self.size} (process {error.error_pid}) died: {how}"
        except ProcessRaisedException as error:
            last = str(error).strip().splitlines()[-1]
            return f"rank {error.error_index + 1} of {self.size} (process {error.error_pid}) failed: {last}"
        return None

    def close(self, kill: bool = False) -> None:
        """End the ranks and give this process its threads back. Twice is harmless."""
        if not self.open:
            return
        self.open = False
        atexit.unregister(self.close)
        processes = self.context.processes
        if not kill:
            _join(processes, 5.0)
        for process in processes:
            if process.is_alive():
                process.terminate()
        _join(processes, 2.0)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        self.world = None  # the groups' own threads end here, and not while the interpreter does
        leave()
        torch.set_num_threads(self._threads)


def _join(processes, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _worker(index: int, port: int, size: int, device: str, seconds: float, threads: int, worker, args) -> None:
    """What a started process runs. A lost peer is no fault of its own: it ends without one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a notebook's interrupt reaches all; rank 0 decides
    torch.set_num_threads(threads)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    store.set(f"up{index + 1}", "1")
    try:
        world = join(rank_device(torch.device(device), index + 1), seconds, store, index + 1, size)
        worker(world, *args)
    except PeerLost:
        os._exit(0)  # rank 0 knows, or is gone itself; nothing here is worth an orderly end
    leave()


def run_processes(function: Callable, size: int, *args, device: str | torch.device = "cpu", **options) -> list:
    """function(world, *args) on every rank, each a process; returns what each gave. function must be importable."""
    ranks = Ranks(size, _send_result, function, args, device=device, **options)
    try:
        results = _gather(ranks.world, function(ranks.world, *args))
    except PeerLost as error:
        raise ranks.blame(error) from None
    except BaseException:
        ranks.close(kill=True)
        raise
    ranks.close()
    return results


def _send_result(world: World, function: Callable, args: tuple) -> None:
    _gather(world, function(world, *args))


def _gather(world: World, result) -> list | None:
    results = [None] * world.size if world.rank == 0 else None
    try:
        dist.gather_object(result, results, group=world.control)
    except RuntimeError as error:
        raise PeerLost(f"gather: {error}") from error
    return results
