"""W8A8: weights and activations both INT8, so that the product itself runs on integers.

Chapter 13. LLM.int8 (arXiv:2208.07339) names the trouble, SmoothQuant (arXiv:2211.10438) the cure. Weight-only
linears save bytes and multiply in 16 bits; where arithmetic decides (prefill, large batches) only a cheaper product
helps. A scale can leave the sum if it does not depend on the axis k that is summed over:

    y[m, n] = sum over k of x[m, k] W[n, k]  ~  s_x[m] s_w[n] * (sum over k of Qx[m, k] Qw[n, k])

so activations have a scale a token or one in all, weights a scale a row, and never a scale an input channel, which is
where outliers are. The inner sum is exact in INT32 up to 2^31 / 127^2 = 133,144 inputs.

    inputs     scale of the activations                        found
    "token"    one a token                                     while running, on that token alone
    "tensor"   one for all tokens of a call                    while running: a token's result depends on its batch
    "static"   one for all                                     by calibration; values beyond are clipped
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import replace_linears
from minillm.quant.affine import Quantized, Scheme, quantize, round_to
from minillm.quant.linear import linears

INPUTS = ("token", "tensor", "static")
TOKEN, TENSOR, CHANNEL = (Scheme(8, True, granularity) for granularity in ("token", "tensor", "channel"))
MOST_REFUSED = 16  # rows: torch._int_mm on a GPU wants more
FEW_ROWS = 8  # for these, torch's plain loop takes less time than making the weights wide


def int8_matmul(a: Tensor, w: Tensor, kernel: str = "auto") -> Tensor:
    """a int8 [rows, in], w int8 [out, in] -> a @ w.T, int32 [rows, out], exact.

    On a GPU torch's integer product wants more than 16 rows, and sizes that are multiples of 8: rows are filled up
    with zeros, other sizes are multiplied as floats of a width that holds every such sum; kernel="unpack" always is.
    So are many rows on a processor without instructions for 8-bit products, where torch takes 20 times as long.
    """
    for name, value in (("a", a), ("w", w)):
        if value.dtype != torch.int8 or value.dim() != 2:
            raise ParamsError(illegal(name, f"{value.dtype} {list(value.shape)}", "must be int8 with two axes"))
    if a.shape[1] != w.shape[1]:
        raise ParamsError(illegal("a.shape[1]", a.shape[1], f"must be w's, {w.shape[1]}"))
    rows = len(a)
    odd = a.is_cuda and (a.shape[1] % 8 or len(w) % 8)
    slow = a.device.type == "cpu" and rows > FEW_ROWS and not torch.cpu._is_vnni_supported()
    if kernel == "unpack" or not rows or odd or slow:
        wide = torch.float32 if a.shape[1] <= 2**24 // 128**2 else torch.float64
        return (a.to(wide) @ w.to(wide).T).to(torch.int32)
    if a.is_cuda and rows <= MOST_REFUSED:
        a = F.pad(a, (0, 0, 0, 2 * MOST_REFUSED - rows))  # [32, in]
    return torch._int_mm(a.contiguous(), w.T)[:rows]


class W8A8Linear(nn.Module):
    """y = x @ W.T + b on integers. x [..., in] -> [..., out] in x's dtype. Bytes: out * in + 4 * out. Inference only.

    inputs: see the module. largest: with "static", the largest |x| to expect. quantized: the weight's integers where
    they are known, symmetric with a scale a row; by default they are rounded to the nearest here.
    """

    def __init__(
        self,
        linear: nn.Linear,
        inputs: str = "token",
        largest: float | Tensor | None = None,
        kernel: str = "auto",
        quantized: Quantized | None = None,
    ) -> None:
        super().__init__()
        check_inputs(inputs)
        if (inputs == "static") != (largest is not None):
            raise ParamsError(illegal("largest", largest, 'is needed with inputs="static", and only there'))
        weight = linear.weight.detach()
        if not torch.isfinite(weight).all():
            raise ParamsError("the weight holds NaN or infinity: it cannot be quantised")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.inputs, self.kernel = inputs, kernel
        if quantized is not None and quantized.scheme != CHANNEL:
            raise ParamsError(illegal("quantized", quantized.scheme, f"must have the scheme {CHANNEL}"))
        q = quantize(weight.float(), CHANNEL) if quantized is None else quantized
        step = None
        if largest is not None:
            step = torch.as_tensor(largest, dtype=torch.float32, device=weight.device).reshape(1, 1) / TENSOR.high
            step = step.clamp(min=torch.finfo(torch.float32).tiny)
        self.register_buffer("values", q.values)  # int8 [out, in]
        self.register_buffer("scale", q.scale.flatten().float())  # [out]
        self.register_buffer("step", step)  # [1, 1] or None
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def quantize_inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [rows, in] -> (int8 [rows, in], scale [rows, 1] or [1, 1])."""
        rows = rows.float()
        if self.step is not None:
            return round_to(rows, self.step.expand(len(rows), 1).squeeze(-1), None, TENSOR), self.step
        q: Quantized = quantize(rows, TOKEN if self.inputs == "token" else TENSOR)
        return q.values, q.scale.view(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if not len(rows):
            return x.new_zeros(*x.shape[:-1], self.out_features)
        values, scale = self.quantize_inputs(rows)
        y = int8_matmul(values, self.values, self.kernel).float()  # [rows, out]
        y = y * scale * self.scale
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, INT8 x INT8, inputs by {self.inputs}"


def w8a8_model(
    model: nn.Module,
    inputs: str = "token",
    maxima: Mapping[str, Tensor] | None = None,
    keep: Iterable[str] = ("head",),
    kernel: str = "auto",
) -> nn.Module:
    """Replace every nn.Linear by its W8A8 form, in place; returns the model.

    maxima: with inputs="static", the largest |x| by linear, as `smoothquant.channel_maxima` gathers them. keep: names
    or patterns that stay as they are.
    """
    check_inputs(inputs)
    chosen = linears(model, (keep,) if isinstance(keep, str) else tuple(keep))
    if (inputs == "static") != (maxima is not None):
        raise ParamsError(illegal("maxima", maxima, 'is needed with inputs="static", and only there'))
    absent = [name for name in chosen if maxima is not None and name not in maxima]
    if absent:
        raise ParamsError(illegal("maxima", list(maxima)[:3], f"lacks {', '.join(absent[:3])}"))

    def make(name: str, linear: nn.Linear) -> nn.Module | None:
        if name not in chosen:
            return None
        return W8A8Linear(linear, inputs, None if maxima is None else maxima[name].max(), kernel)

    return replace_linears(model, make)


def check_inputs(inputs: str) -> None:
    if inputs not in INPUTS:
        raise ParamsError(illegal("inputs", inputs, f"must be one of {', '.join(INPUTS)}"))
