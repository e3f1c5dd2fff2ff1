"""`minillm bench gemm`: INT8 and FP8 products against bfloat16's (float32's on a CPU), values first, then time.

Chapter 13. Shapes are LLaMA-7B's matrices under decode and prefill batches. "product" is the bare matrix product of
numbers that are 8 bits already; "layer" is the whole linear: quantise the activations, multiply, put the scales back.
The difference is what dynamic activations cost. FP8 that would be emulated is not timed. With few rows, where reading
the weights decides, a timing goes through copies of the matrix, so that none of them waits in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from minillm.measure import clock
from minillm.measure.records import Figure, figure
from minillm.model.layout import faster_linear
from minillm.quant.fp8 import FP8Linear, quantize_fp8, scaled_matmul
from minillm.quant.w8a8 import W8A8Linear, int8_matmul

SHAPES = ((4096, 4096), (22016, 4096), (4096, 11008))  # (out, in)
TOLERANCE = 0.06  # of 8-bit layers on normal values, root mean square; an error of a scale or a side is far above
FEW_ROWS = 64
TOUCHED = {"cpu": 64e6, "cuda": 256e6}  # bytes of wide weights that a timing of few rows goes through

Runs = list[Callable[[], Tensor]]


def bench_gemm(
    shapes: Iterable[tuple[int, int]] = SHAPES,
    rows: Iterable[int] = (1, 16, 512, 4096),
    repeats: int = 5,
    smoke: bool = False,
) -> Iterator[Figure]:
    """Figures gemm.FORMAT.PART.OUTxIN.rowsN.ratio (over the wide product) and .rate. smoke: a tiny size, anywhere."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if smoke:
        shapes, rows, repeats = ((64, 32),), (17,), 1
    elif device.type == "cpu":
        rows = [n for n in rows if n <= 512]  # a second a product
    for outputs, inputs in shapes:
        for count in rows:
            yield from one_size(outputs, inputs, count, repeats, device, 0 if smoke else None)


def one_size(
    outputs: int, inputs: int, count: int, repeats: int, device: torch.device, touched: float | None = None
) -> Iterator[Figure]:
    """Ratio and rate of each product and layer at one size. touched: bytes, by default TOUCHED."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    linear = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
    x = torch.randn(count, inputs, device=device, dtype=dtype)
    touched = TOUCHED[device.type] if touched is None else touched
    copies = max(1, math.ceil(touched / linear.weight.nbytes)) if count <= FEW_ROWS else 1
    flops = 2 * count * outputs * inputs * copies
    with torch.inference_mode():
        # On a CPU the packed linear is the opponent: it is what the library runs in float32.
        wide = [partial(wide_layer(linear), x) for _ in range(copies)]
        expected = x.float() @ linear.weight.float().T
        for name, runs, values in candidates(linear, x, copies):
            check(name, values(), expected)
            ratio, seconds = time_pair(partial(each, wide), partial(each, runs), repeats, device)
            about = {"rows": count, "out": outputs, "in": inputs, "against": str(dtype).removeprefix("torch.")}
            full = f"gemm.{name}.{outputs}x{inputs}.rows{count}"
            yield figure(f"{full}.ratio", ratio.median, "x", spread=ratio.quartiles, workload=about)
            yield figure(f"{full}.rate", flops / seconds, "FLOP/s", workload=about)


def wide_layer(linear: nn.Linear) -> nn.Module:
    """A linear with a weight of its own, in the form that this machine runs fastest."""
    own = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    own.weight = nn.Parameter(linear.weight.detach().clone())
    return faster_linear(own) or own


def candidates(linear: nn.Linear, x: Tensor, copies: int) -> Iterator[tuple[str, Runs, Callable[[], Tensor]]]:
    """(name, what is timed, one result as the wide product would give it)."""
    int8 = [W8A8Linear(linear) for _ in range(copies)]
    values, scale = int8[0].quantize_inputs(x)
    products = [partial(int8_matmul, values, m.values) for m in int8]
    yield "int8.product", products, lambda: products[0]() * scale * int8[0].scale
    yield "int8.layer", [partial(m, x) for m in int8], partial(int8[0], x)
    fp8 = [FP8Linear(linear) for _ in range(copies)]
    if fp8[0].emulated is None:
        q = quantize_fp8(x)
        scaled = [partial(scaled_matmul, q, m.weight_scaled, torch.bfloat16) for m in fp8]
        yield "fp8.product", scaled, scaled[0]
        yield "fp8.layer", [partial(m, x) for m in fp8], partial(fp8[0], x)


def each(runs: Runs) -> None:
    for run in runs:
        run()


def check(name: str, got: Tensor, expected: Tensor) -> None:
    error = ((got.float() - expected).square().mean() / expected.square().mean()).sqrt().item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name}: its values differ by {error:.1%}, so it is not timed")


def time_pair(a: Callable, b: Callable, repeats: int, device: torch.device) -> tuple[clock.Timing, float]:
    """(the paired ratio a / b, b's seconds)."""
    if device.type != "cuda":
        pair = clock.paired(a, b, repeats)
        return pair.ratio, pair.b.median
    samples = [[clock.timed(f, 20, 3, cuda_events=True).median for f in (a, b)] for _ in range(repeats)]
    return clock.Timing(tuple(x / y for x, y in samples)), clock.Timing(tuple(y for _, y in samples)).median


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"gemm": bench_gemm}
