"""Bytes and FLOPs of attention over a whole sequence, naive and tiled, counted before anything is timed.

Chapter 08. What must pass between memory and the chip (HBM and SRAM on a GPU, DRAM and cache on a CPU) if each step
reads its inputs and writes its outputs once. FlashAttention, Dao et al. 2022 (arXiv:2205.14135), counts the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.kernels.flash_reference import key_range


@dataclass(frozen=True)
class AttentionShape:
    """`time` queries that are the last of `length` keys; kv_heads and v_dim default to heads and dim."""

    batch: int
    heads: int
    time: int
    length: int
    dim: int
    kv_heads: int | None = None
    v_dim: int | None = None
    causal: bool = True

    @property
    def pairs(self) -> int:
        """Query and key that see each other, in one head of one sequence."""
        if not self.causal:
            return self.time * self.length
        return sum(max(0, min(self.length, self.length - self.time + i + 1)) for i in range(self.time))


def attention_flops(shape: AttentionShape) -> int:
    """One multiplication and one addition for each number of q.k and of weight x v, over the pairs that count."""
    dims = shape.dim + (shape.v_dim or shape.dim)
    return 2 * shape.batch * shape.heads * shape.pairs * dims


def ends_bytes(shape: AttentionShape, itemsize: int) -> tuple[int, int, int]:
    """Bytes of (q, k and v together, output)."""
    v_dim, kv_heads = shape.v_dim or shape.dim, shape.kv_heads or shape.heads
    q = shape.batch * shape.heads * shape.time * shape.dim * itemsize
    kv = shape.batch * kv_heads * shape.length * (shape.dim + v_dim) * itemsize
    return q, kv, shape.batch * shape.heads * shape.time * v_dim * itemsize


def score_bytes(shape: AttentionShape, itemsize: int) -> int:
    """Bytes of one matrix of scores, all heads. Naive attention has two of them: scores and weights."""
    return shape.batch * shape.heads * shape.time * shape.length * itemsize


def naive_bytes(shape: AttentionShape, itemsize: int) -> int:
    """q @ k writes the scores; softmax reads and writes them; weights @ v reads them: four times time x length."""
    return sum(ends_bytes(shape, itemsize)) + 4 * score_bytes(shape, itemsize)


def flash_bytes(shape: AttentionShape, itemsize: int, block_m: int, block_n: int = 64) -> int:
    """q and the output once; of k and v, for each tile of block_m queries of each head, the blocks it visits."""
    v_dim = shape.v_dim or shape.dim
    rows = 0
    for first in range(0, shape.time, block_m):
        last = min(first + block_m, shape.time) - 1
        keys = key_range(first, last, shape.time, shape.length, block_n, shape.causal)
        rows += keys.high - keys.low
    q, _, out = ends_bytes(shape, itemsize)
    return q + out + shape.batch * shape.heads * rows * (shape.dim + v_dim) * itemsize
