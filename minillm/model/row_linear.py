"""A product for a few rows as multiply and sum: what torch.compile turns into one pass over W.

Chapter 10. With one or two rows a product is a read of W and little else. Written out, the compiler reads W in the
order it lies in memory and melts what comes before and after into the same loop; `compiled` uses it for decode steps,
and quantised linears have forms of their own (`quant/row_forms.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RowLinear(nn.Module):
    """y = x @ W.T + b for a few rows, as multiply and sum in float32: right anywhere, fast only when compiled.

    The compiler reads a row of W once and has a sum for each row of x beside it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        import torch._inductor.inductor_prims  # noqa: F401 - it defines the operator of `written_out`; a second's import

        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = written_out(x.float())  # [rows, in]
        y = side_by_side(lambda row, weight: (weight.float() * rows[row]).sum(-1), x.shape[0], self.weight)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def side_by_side(product: Callable[..., Tensor], rows: int, *weights: Tensor) -> Tensor:
    """product(row, *weights) [out] for each row of x -> [rows, out]. For 1 or 2 rows, on the two halves of the
    weights' rows in one loop: what is loaded of x serves both, and while one row's sum is put together the other row
    is still being read. (One row at a time reached 77 % of the read bandwidth, two 88 %: smollm2-135m, float32, 2
    threads.) More rows have sums enough of their own."""
    parts = list(zip(*(w.chunk(2 if rows <= 2 else 1) for w in weights), strict=True))
    return torch.cat([product(row, *part) for row in range(rows) for part in parts]).view(rows, -1)


def written_out(x: Tensor) -> Tensor:
    """x [rows, n], as a tensor of its own: else the compiler computes it again, norm and all, for each row of W."""
    return torch.ops.prims.inductor_force_stride_order(x, [x.shape[-1], 1])
