"""The roofline: how fast a piece of work can be on this machine, given how many FLOPs it does per byte it moves.

Chapter 00. Roofline, Williams, Waterman and Patterson 2009 (CACM 52(4)). Work of intensity I (FLOPs per byte) runs at
no more than min(peak, bandwidth x I). Left of the ridge, where the two meet, memory is the limit: decode at batch 1
does about half a FLOP per byte in float32. Right of it arithmetic is: a long prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minillm.measure.counts import Counts
from minillm.measure.machine import Ceilings


@dataclass(frozen=True)
class Roofline:
    """peak in FLOP/s, bandwidth in bytes/s."""

    peak: float
    bandwidth: float
    label: str = ""

    def __post_init__(self) -> None:
        for name in ("peak", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be > 0")

    @property
    def ridge(self) -> float:
        """The intensity, in FLOPs per byte, from which arithmetic is the limit."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOP/s that work of this intensity can reach."""
        return min(self.peak, self.bandwidth * intensity)

    def least_seconds(self, counts: Counts) -> float:
        """No run of this work can be shorter on this machine: reading and computing overlap, the slower decides."""
        return max(counts.total_flops / self.peak, counts.total_bytes / self.bandwidth)

    def curve(self, low: float = 0.1, high: float = 1000.0, points: int = 100) -> tuple[np.ndarray, np.ndarray]:
        """(intensity, attainable FLOP/s), evenly spaced on a logarithmic axis, for a plot."""
        x = np.geomspace(low, high, points)
        return x, np.minimum(self.peak, self.bandwidth * x)


@dataclass(frozen=True)
class Placement:
    """A measured run on the roofline. Shares are of the ceilings; 1.0 is all that the machine was seen to do."""

    name: str
    intensity: float  # FLOPs per byte
    flops_per_second: float
    bytes_per_second: float
    share_of_peak: float
    share_of_bandwidth: float
    bound: str  # "memory" or "compute": which ceiling the work meets first
    seconds: float
    least_seconds: float

    @property
    def share_of_roof(self) -> float:
        """Least possible time / measured time: the share of the ceiling that limits this work."""
        return self.least_seconds / self.seconds


def roofline(ceilings: Ceilings, dtype: str = "float32") -> Roofline:
    """The roofline of a measured machine for matrix products in one dtype."""
    name = str(dtype).removeprefix("torch.")
    return Roofline(ceilings.peak(name), ceilings.read_bandwidth, f"{ceilings.device}, {name}")


def place(counts: Counts, seconds: float, roof: Roofline, name: str = "") -> Placement:
    """Put a run on the roofline: what it had to do (`counts`) over how long it took."""
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r} must be > 0")
    flops, moved = counts.total_flops / seconds, counts.total_bytes / seconds
    return Placement(
        name=name,
        intensity=counts.intensity,
        flops_per_second=flops,
        bytes_per_second=moved,
        share_of_peak=flops / roof.peak,
        share_of_bandwidth=moved / roof.bandwidth,
        bound="memory" if counts.intensity < roof.ridge else "compute",
        seconds=seconds,
        least_seconds=roof.least_seconds(counts),
    )
