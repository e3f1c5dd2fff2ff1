"""`minillm bench attention`: FLOP/s of a causal forward, beside naive torch, torch's fused kernels, FlexAttention.

Chapter 08. The sizes are those of the FlashAttention papers: 16,384 tokens in all, hidden size 2,048, head dim 64 or
128, 16 bits. FLOPs are counted their way, 4 x length^2 x dim x heads / 2. Values are compared with float32 before
anything is timed, and all kernels of one size run in turn, so that a machine that slows down slows all of them.
The Hopper variant comes after all sizes, beside the plain kernel once more: its figures are `triton_hopper` (warps
specialised), `triton_hopper_w8` (descriptors alone), and the ratios of both to the plain kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.kernels.attention import attention
from minillm.kernels.flash_plan import TileConfig, candidates, hopper_config, why_not_hopper
from minillm.kernels.flash_reference import flash_attention_reference
from minillm.kernels.launch import interpreted, why_not
from minillm.measure import clock
from minillm.measure.bench import NotMeasured
from minillm.measure.machine import ceilings
from minillm.measure.records import Figure, figure

Kernel = Callable[[], Tensor]
NAIVE_BYTES = 8e9  # no naive attention whose scores take more


def bench_attention(
    repeats: int = 5,
    smoke: bool = False,
    lengths: tuple[int, ...] = (),
    dims: tuple[int, ...] = (),
    hopper: bool = True,
) -> Iterator[Figure]:
    """FLOP/s of every kernel at every length and head dim, the share of the matmul ceiling, and ours against the best
    of torch's; then, with `hopper`, what `bench_hopper` gives. smoke: sizes for a test."""
    device, dtype, sizes = problems(smoke, lengths, dims)
    peak = ceilings(device, fast=smoke).peak(dtype)
    yield figure("attention.matmul_ceiling", peak, "FLOP/s", workload={"dtype": str(dtype)})
    for size in sizes:
        q, k, v = inputs(size, device, dtype)
        kernels = make_kernels(q, k, v, device == "cuda", smoke)
        check_values(kernels, q, k, v)
        yield from race(
            kernels, flops(size), peak, repeats, name(size), size | {"dtype": str(dtype)}, device == "cuda"
        )
    if hopper:
        with suppress(NotMeasured):
            yield from bench_hopper(repeats, smoke, lengths, dims)


def bench_hopper(
    repeats: int = 5, smoke: bool = False, lengths: tuple[int, ...] = (), dims: tuple[int, ...] = ()
) -> Iterator[Figure]:
    """FLOP/s of the Hopper variants at the same sizes, and how many times as fast as the plain kernel they are."""
    device, dtype, sizes = problems(smoke, lengths, dims)
    dtype = dtype if device == "cuda" else torch.float16
    for size in sizes:
        q, k, v = inputs(size, device, dtype)
        if device == "cpu" and not smoke:
            raise NotMeasured("there is no GPU")
        kernels = hopper_kernels(q, k, v)
        check_values(kernels, q, k, v)
        samples = seconds_in_turn(kernels, repeats, device == "cuda")
        for each in [each for each in samples if each != "triton"]:
            rates = clock.Timing(tuple(flops(size) / s for s in samples[each]))
            ratio = clock.Timing(tuple(a / b for a, b in zip(samples["triton"], samples[each])))
            for label, unit, found in ((each, "FLOP/s", rates), (f"{each}_gain", "x", ratio)):
                workload = size | {"dtype": str(dtype)}
                yield figure(f"{name(size)}.{label}", found.median, unit, spread=found.quartiles, workload=workload)


def problems(smoke: bool, lengths: tuple[int, ...], dims: tuple[int, ...]) -> tuple[str, torch.dtype, list[dict]]:
    """Device, dtype, and every size: batch x length and heads x dim are the same in all of them."""
    on_gpu = torch.cuda.is_available() and not interpreted()
    tokens, width = (16384, 2048) if on_gpu else (2048, 256)
    lengths = lengths or ((512, 1024, 2048, 4096, 8192, 16384) if on_gpu else (512, 1024, 2048))
    dims = dims or ((64, 128) if on_gpu else (64,))
    if smoke:
        tokens, width, lengths, dims = 128, 64, (64, 128), (32,)
    sizes = [
        dict(batch=max(1, tokens // length), heads=max(1, width // dim), length=length, dim=dim)
        for dim in dims
        for length in lengths
    ]
    return ("cuda", torch.bfloat16, sizes) if on_gpu else ("cpu", torch.float32, sizes)


def name(size: dict) -> str:
    return f"attention.d{size['dim']}.n{size['length']}"


def flops(size: dict) -> int:
    return 2 * size["length"] ** 2 * size["dim"] * size["heads"] * size["batch"]


def inputs(size: dict, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v [batch, heads, length, dim], the same ones each time."""
    shape = [size[x] for x in ("batch", "heads", "length", "dim")]
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(*shape, device=device, generator=generator).to(dtype) for _ in "qkv"]


def make_kernels(q: Tensor, k: Tensor, v: Tensor, on_gpu: bool, smoke: bool) -> dict[str, Kernel]:
    """name -> a call that returns [batch, heads, time, dim]."""
    scale = q.shape[-1] ** -0.5
    kernels: dict[str, Kernel] = {}
    if q.shape[0] * q.shape[1] * q.shape[2] ** 2 * 4 <= NAIVE_BYTES:
        kernels["naive"] = lambda: attention(q, k, v, scale=scale, backend="naive")
    if not on_gpu:
        kernels["sdpa"] = lambda: attention(q, k, v, scale=scale, backend="sdpa")
        seam = [x.transpose(1, 2) for x in (q, k, v)]  # [batch, time, heads, dim]
        kernels["twin"] = lambda: flash_attention_reference(*seam, block_m=256, block_n=256).transpose(1, 2)
        if smoke and why_not() is None:  # interpreted: the value is worth checking, the time is not
            kernels["triton"] = lambda: attention(q, k, v, scale=scale, backend="triton")
        return kernels
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def torch_kernel(backend: SDPBackend) -> Kernel:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        kernels[f"sdpa_{name.split('_')[0].lower()}"] = torch_kernel(getattr(SDPBackend, name))
    kernels["flex"] = flex_kernel(q, k, v)
    kernels["triton"] = lambda: attention(q, k, v, scale=scale, backend="triton")
    kernels.update(tile_kernels(q, k, v))
    return {name: run for name, run in kernels.items() if runs(run)}


def flex_kernel(q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """torch's FlexAttention: a Triton kernel that torch.compile writes from a mask function."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch, head, query, key):
        return query >= key

    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask)


def tile_kernels(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Kernel]:
    """Ours with every candidate tile: the records say whether `default_config` takes the best."""
    from minillm.kernels.flash_attention import flash_attention

    limit = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
    seam = [x.transpose(1, 2) for x in (q, k, v)]
    return {
        f"triton_{c.block_m}x{c.block_n}_w{c.warps}_s{c.stages}": lambda c=c: flash_attention(
            *seam, config=c
        ).transpose(1, 2)
        for c in candidates(q.shape[-1], v.shape[-1], q.element_size(), limit)[:4]
    }


def hopper_kernels(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Kernel]:
    """The plain kernel, and the Hopper variant with its warps specialised and not."""
    seam = [x.transpose(1, 2) for x in (q, k, v)]
    reason = why_not() or why_not_hopper(*seam)
    if reason is not None:
        raise NotMeasured(reason)
    from minillm.kernels.flash_attention import flash_attention

    split = hopper_config(q.shape[-1], v.shape[-1])
    together = TileConfig(split.block_m, split.block_n, 8, split.stages)
    return {
        "triton": lambda: flash_attention(*seam).transpose(1, 2),
        "triton_hopper": lambda: flash_attention(*seam, variant="hopper").transpose(1, 2),
        "triton_hopper_w8": lambda: flash_attention(*seam, variant="hopper", config=together).transpose(1, 2),
    }


def runs(kernel: Kernel) -> bool:
    """Whether this torch has the kernel for this GPU."""
    try:
        kernel()
    except RuntimeError:
        return False
    return True


def check_values(kernels: dict[str, Kernel], q: Tensor, k: Tensor, v: Tensor) -> None:
    """The first two sequences' worth of heads against float32; raises by name."""
    few = [x[:1, :2].float() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*few, is_causal=True)
    for name, run in kernels.items():
        error = (run()[:1, :2].float() - expected).abs().max().item()
        limit = 1e-4 if q.dtype == torch.float32 and not q.is_cuda else 0.03
        if not error <= limit:
            raise RuntimeError(f"{name} is {error:.2e} off float32 (limit {limit})")


def race(
    kernels: dict[str, Kernel], flops: int, peak: float, repeats: int, prefix: str, workload: dict, on_gpu: bool
) -> Iterator[Figure]:
    samples = seconds_in_turn(kernels, repeats, on_gpu)
    for name, seconds in samples.items():
        rates = clock.Timing(tuple(flops / s for s in seconds))
        yield figure(f"{prefix}.{name}", rates.median, "FLOP/s", spread=rates.quartiles, workload=workload)
    ours = "triton" if on_gpu else "twin"
    yield figure(f"{prefix}.ceiling_share", flops / (peak * _median(samples[ours])), "1", workload=workload)
    theirs = min((n for n in samples if n.startswith("sdpa")), key=lambda n: _median(samples[n]), default=None)
    for name in dict.fromkeys(("naive", theirs)):
        if name in samples:
            ratio = clock.Timing(tuple(a / b for a, b in zip(samples[name], samples[ours])))
            label = "naive" if name == "naive" else "sdpa"
            yield figure(f"{prefix}.against_{label}", ratio.median, "x", spread=ratio.quartiles, workload=workload)


def seconds_in_turn(kernels: dict[str, Kernel], repeats: int, on_gpu: bool) -> dict[str, list[float]]:
    """Seconds of each kernel, all of them once a turn; the first turn warms up and is not kept."""
    samples: dict[str, list[float]] = {name: [] for name in kernels}
    for turn in range(repeats + 1):
        for name, run in kernels.items():
            seconds = clock.timed(run, 1, 1 if turn == 0 else 0, cuda_events=on_gpu).median
            if turn:
                samples[name].append(seconds)
    return samples


def _median(values: list[float]) -> float:
    return sorted(values)[math.floor(len(values) / 2)]


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"attention": bench_attention, "attention-hopper": bench_hopper}
