"""Into how many parts should a decode's keys be split? Arithmetic on the grid of programs, no tensors.

Chapter 09. A decode step has one query a sequence. With one program for each sequence and KV head, a batch of 1 and 8
KV heads is 8 programs, on a GPU of 132 streaming multiprocessors (SMs): 124 of them have nothing to do. Splitting the
keys into s parts gives 8 s programs and one small merge. Too many splits cost: each writes a partial result that the
merge reads again, and a part shorter than a tile is no work at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from minillm.errors import ParamsError, illegal

TILE = 64  # keys a program reads at a step
MOST_SPLITS = 128  # what the merge kernel holds at once
NEAR = 1.1  # fewer splits win if they are at most this much slower


@dataclass(frozen=True)
class Grid:
    """Programs on `slots` places that run at once. Time is counted in tiles: what one program reads at a step."""

    programs: int  # without splits: sequences x KV heads (x tiles of queries)
    length: int  # keys
    splits: int
    slots: int  # SMs x programs that fit on one
    tile: int = TILE

    @property
    def tiles(self) -> int:
        """Tiles of the whole length."""
        return -(-self.length // self.tile)

    @property
    def tiles_each(self) -> int:
        """Tiles of one split."""
        return -(-self.tiles // self.splits)

    @property
    def busy_splits(self) -> int:
        """Splits that have a tile; the others are empty."""
        return -(-self.tiles // self.tiles_each) if self.tiles else 0

    @property
    def waves(self) -> int:
        """Rounds of programs until all have run, if all took equally long."""
        return -(-self.programs * self.busy_splits // self.slots)

    @property
    def occupancy(self) -> float:
        """Share of the slots that work, over all waves."""
        return self.programs * self.busy_splits / (self.waves * self.slots) if self.waves else 0.0

    @property
    def steps(self) -> int:
        """Tiles one after another until the last program is done: the time, if every slot reads equally fast."""
        return self.waves * self.tiles_each


@lru_cache(maxsize=4096)
def choose_splits(programs: int, length: int, slots: int, tile: int = TILE, most: int = MOST_SPLITS) -> int:
    """The fewest splits whose time, in steps, is within NEAR of the best; 1 where the programs fill the slots.

    FlashAttention's `num_splits_heuristic` decides likewise, by the occupancy of the last wave.
    """
    for name, value, least in (("programs", programs, 1), ("length", length, 0), ("slots", slots, 1)):
        if value < least:
            raise ParamsError(illegal(name, value, f"must be at least {least}"))
    grids = [Grid(programs, length, splits, slots, tile) for splits in range(1, most + 1)]
    grids = [grid for grid in grids if grid.splits == max(1, grid.busy_splits)]  # no empty splits
    best = min(grid.steps for grid in grids)
    return next(grid.splits for grid in grids if grid.steps <= NEAR * best)
