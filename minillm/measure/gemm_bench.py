"""`minillm bench gemm`: INT8 and FP8 products against bfloat16's (float32's on a CPU), values first, then time.

Chapter 13. Shapes are LLaMA-7B's matrices under decode and prefill batches. "product" is the bare matrix product of
numbers that are 8 bits already; "layer" is the whole linear: quantise the activations, multiply, put the scales back.
The difference is what dynamic activations cost. FP8 that would be emulated is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from minillm.measure import clock
from minillm.measure.records import Figure, figure
from minillm.model.layout import faster_linear
from minillm.quant.fp8 import FP8Linear, quantize_fp8, scaled_matmul
from minillm.quant.w8a8 import W8A8Linear, int8_matmul

SHAPES = ((4096, 4096), (22016, 4096), (4096, 11008))  # (out, in)
TOLERANCE = 0.06  # of 8-bit layers on normal values, root mean square; an error of a scale or a side is far above


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
            yield from one_size(outputs, inputs, count, repeats, device)


def one_size(outputs: int, inputs: int, count: int, repeats: int, device: torch.device) -> Iterator[Figure]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    linear = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
    x = torch.randn(count, inputs, device=device, dtype=dtype)
    flops = 2 * count * outputs * inputs
    with torch.inference_mode():
        best = faster_linear(linear) or linear  # on a CPU the packed one, which is what the library runs
        wide = lambda: best(x)  # noqa: E731
        expected = x.float() @ linear.weight.float().T
        for name, run, values in candidates(linear, x):
            check(name, values(), expected)
            ratio, seconds = time_pair(wide, run, repeats, device)
            about = {"rows": count, "out": outputs, "in": inputs, "against": str(dtype).removeprefix("torch.")}
            full = f"gemm.{name}.{outputs}x{inputs}.rows{count}"
            yield figure(f"{full}.ratio", ratio.median, "x", spread=ratio.quartiles, workload=about)
            yield figure(f"{full}.rate", flops / seconds, "FLOP/s", workload=about)


def candidates(linear: nn.Linear, x: Tensor) -> Iterator[tuple[str, Callable, Callable]]:
    """(name, what is timed, its result as the wide product would give it)."""
    int8 = W8A8Linear(linear)
    values, scale = int8.quantize_inputs(x)
    product = lambda: int8_matmul(values, int8.values)  # noqa: E731
    yield "int8.product", product, lambda: product() * scale * int8.scale
    yield "int8.layer", lambda: int8(x), lambda: int8(x)
    fp8 = FP8Linear(linear)
    if fp8.emulated is None:
        q = quantize_fp8(x)
        scaled = lambda: scaled_matmul(q, fp8.weight_scaled, torch.bfloat16)  # noqa: E731
        yield "fp8.product", scaled, scaled
        yield "fp8.layer", lambda: fp8(x), lambda: fp8(x)


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
