"""From logits to a token in one kernel, greedy or drawn: no softmax, no cumulative sum, one read. Triton.

Chapter 10. The Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030): if E_i are independent
exponentials, argmax(logit_i / temperature - log E_i) is a draw from softmax(logits / temperature). So a draw is an
argmax like any other, and an argmax needs one pass.

The random numbers come from a counter, not from a state: Philox (Salmon et al. 2011) maps (seed, step, token id) to
a number. A request that brings its own seed gets the same draws whoever shares its batch.

Bytes that must move: rows x vocab x b read, one id a row written. torch's way (divide, softmax, exponential noise,
divide, argmax) reads and writes the row four more times, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.launch import check_tensor, power_of_two, require_triton

GREEDY_BELOW = 1e-5  # a temperature under this would swamp the noise in float32 anyway


@triton.jit
def sample_kernel(
    logits, temperatures, seeds, steps, tokens, row_stride, vocab,
    GREEDY_BELOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one row, BLOCK ids at a time. Of equal scores the lowest id wins, as in torch.argmax."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    seed, step = tl.load(seeds + row), tl.load(steps + row)
    greedy = temperature < GREEDY_BELOW
    inverse = tl.where(greedy, 1.0, 1.0 / tl.maximum(temperature, GREEDY_BELOW))
    best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], -1, tl.int64)
    broken = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = ids < vocab
        x = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
        broken = tl.maximum(broken, tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0))
        u = tl.maximum(tl.rand(seed, (step << 32) | ids.to(tl.int64)), 2.3283064365386963e-10)  # [BLOCK], 2^-32 up
        # E = -log(1 - u); near 0 by its series, since 1 - u would round to multiples of 6e-8 there
        noise = tl.where(u < 1e-3, u * (1.0 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))
        score = tl.where(greedy, x, x * inverse - tl.log(noise))
        score = tl.where(x > float("-inf"), score, float("-inf"))  # a masked token is never drawn
        high = tl.max(score, 0)
        first = tl.min(tl.where((score == high) & inside, ids.to(tl.int64), vocab), 0)
        better = high > best  # strictly: an equal score in a later block has a higher id
        best_id = tl.where(better, first, best_id)
        best = tl.where(better, high, best)
    tl.store(tokens + row, tl.where(broken > 0, -1, best_id))


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """One token id a row, [rows] int64, from logits [rows, vocab].

    temperatures [rows] float32, 0: greedy. seeds, steps [rows] int64: a row's random numbers are a function of these
    two and nothing else; steps below 2^31. -1 where nothing can be drawn: a NaN, +inf, or every token masked.
    """
    require_triton()
    rows, vocab = logits.shape
    check_tensor("logits", logits, [rows, vocab])
    check_tensor("temperatures", temperatures, [rows], dtypes=[torch.float32], device=logits.device)
    for name, numbers in (("seeds", seeds), ("steps", steps)):
        check_tensor(name, numbers, [rows], dtypes=[torch.int64], device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block = min(power_of_two(vocab), 4096)
        sample_kernel[(rows,)](
            logits, temperatures, seeds, steps, tokens, logits.stride(0), vocab,
            GREEDY_BELOW=GREEDY_BELOW, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return tokens
