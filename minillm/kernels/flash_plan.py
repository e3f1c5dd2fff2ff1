"""What is decided before a FlashAttention launch: are the arguments legal, and how large are the tiles.

Chapter 08. No Triton here: these rules can be read, and tested, without it. Every check comes before the first
allocation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import FLOATS, check_tensor, interpreted, power_of_two

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LOG2_E = math.log2(math.e)
VARIANTS = ("plain", "auto", "hopper")


@dataclass(frozen=True)
class TileConfig:
    """Queries and keys a tile, warps a program, key blocks in flight."""

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 2

    def shared_bytes(self, dim: int, v_dim: int, itemsize: int) -> int:
        """Shared memory (SRAM) that one program holds: the tile of q, and `stages` blocks of k and v."""
        d, dv = power_of_two(dim), power_of_two(v_dim)
        return itemsize * (self.block_m * d + self.stages * self.block_n * (d + dv))


@dataclass(frozen=True)
class Plan:
    """A checked launch. scale and inner_scale as the kernel wants them: see `plan_attention`."""

    scale: float
    inner_scale: float
    v_scale: float
    causal: bool
    window: int
    time: int
    length: int
    tiles: int
    programs: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    out_dtype: torch.dtype
    config: TileConfig
    variant: str  # "plain" or "hopper"


def default_config(dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> TileConfig:
    """The largest tile of a short list that fits the shared memory: `minillm bench attention` times them all."""
    if device.type != "cuda":
        return TileConfig(64, 64)
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    itemsize = 4 if dtype == torch.float32 else 2
    return next(iter(candidates(dim, v_dim, itemsize, limit)), TileConfig(16, 16, 4, 1))


def candidates(dim: int, v_dim: int, itemsize: int, limit: int) -> list[TileConfig]:
    """Tiles worth trying, best guess first, none of which spills registers when compiled for an A100 or an H100.

    limit: bytes of shared memory. float32 products take three tensor-core passes, whose operands fill registers.
    """
    widest = power_of_two(max(dim, v_dim))
    if itemsize == 4:
        shapes = [(64, 32, 4, 2)] if widest <= 64 else []
        shapes += [(32, 32, 8, 2), (32, 16, 4, 2), (16, 16, 4, 1)]
    elif widest > 128:
        shapes = [(128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 1)]
    else:
        shapes = [(128, 128, 8, 3), (128, 128, 8, 2)] if limit > 200_000 else []  # Hopper and later
        shapes += [(128, 64, 4, 3)] if widest <= 64 else []
        shapes += [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)]
    fits = [TileConfig(*shape) for shape in shapes]
    return [c for c in fits if c.shared_bytes(dim, v_dim, itemsize) <= limit]


def hopper_config(dim: int, v_dim: int) -> TileConfig:
    """Tiles of `flash_hopper`: 4 warps a group, as Triton's warp specialisation asks for; under 227 KB with what it
    adds to `shared_bytes`."""
    widest = power_of_two(max(dim, v_dim))
    return TileConfig(128, 128, 4, 3 if widest <= 64 else 2) if widest <= 128 else TileConfig(128, 64, 4, 2)


def why_not_hopper(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """One sentence that says why `flash_hopper` cannot take these tensors; None: it can."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it multiplies float16 and bfloat16, not {q.dtype}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[-1] % 8:
            return f"{name}.shape[-1]={x.shape[-1]} is no multiple of 8: TMA moves 16 bytes at a time"
        if x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:-1]) or x.stride(-3) <= 0:
            return f"{name} has rows that do not start at a multiple of 16 bytes: TMA needs that; call .contiguous()"
    if not interpreted():
        capability = torch.cuda.get_device_capability(q.device)
        if capability[0] != 9:
            return f"it is written for compute capability 9.x, this GPU has {capability[0]}.{capability[1]}"
    return None


def pick_variant(variant: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """What will run, plain or hopper. auto takes hopper on a Hopper GPU for what it supports; the interpreter runs it
    when asked by name."""
    if variant not in VARIANTS:
        raise ParamsError(illegal("variant", variant, f"must be one of {', '.join(VARIANTS)}"))
    if variant == "plain" or (variant == "auto" and interpreted()):
        return "plain"
    reason = why_not_hopper(q, k, v)
    if variant == "hopper" and reason is not None:
        raise ParamsError(illegal("variant", variant, f"cannot run: {reason}"))
    return "hopper" if reason is None else "plain"


def plan_attention(
    q: Tensor, k: Tensor, v: Tensor,
    scale, causal, window, softcap, starts_q, starts_k, longest, scales, out_dtype, config, variant="plain",
) -> Plan:  # fmt: skip
    """Check everything, then count the programs.

    The kernel works in base 2: weights are 2^(s x scale - m). Without a soft cap s = q.k and scale = scale x log2(e);
    with one s = tanh(q.k x inner_scale), inner_scale = scale / softcap, and scale = softcap x log2(e).
    """
    packed = starts_q is not None or starts_k is not None
    check_shapes(q, k, v, packed)
    check_options(causal, window, softcap, scales)
    dim = q.shape[-1]
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ParamsError(illegal("scale", scale, "must be a finite number above 0"))
    scale = (dim**-0.5 if scale is None else scale) * scales[0] * scales[1]
    if packed:
        check_starts(q, k, starts_q, starts_k, longest)
        rows, time, length = len(starts_q) - 1, longest, 0
    elif longest is not None:
        raise ParamsError(illegal("longest", longest, "goes with starts_q and starts_k"))
    else:
        rows, time, length = q.shape[0], q.shape[1], k.shape[1]
    variant = pick_variant(variant, q, k, v)
    if config is None and variant == "hopper":
        config = hopper_config(dim, v.shape[-1])
    config = config or default_config(dim, v.shape[-1], q.dtype, q.device)
    for name, block in (("block_m", config.block_m), ("block_n", config.block_n)):
        if block < 16 or block & (block - 1):
            raise ParamsError(illegal(name, block, "must be a power of two of 16 or more"))
    if variant == "hopper" and config.warps == 4 and config.block_m < 128:
        raise ParamsError(
            illegal("block_m", config.block_m, "must be 128 or more where two groups of warps share it")
        )
    heads, tiles = q.shape[-2], -(-time // config.block_m)
    if out_dtype is not None and out_dtype not in FLOATS:
        raise ParamsError(illegal("out_dtype", out_dtype, f"must be one of {', '.join(map(str, FLOATS))}"))
    return Plan(
        scale=(scale if softcap is None else softcap) * LOG2_E,
        inner_scale=0.0 if softcap is None else scale / softcap,
        v_scale=scales[2],
        causal=causal,
        window=window or 0,
        time=time,
        length=length,
        tiles=tiles,
        programs=tiles * heads * rows,
        out_shape=(*q.shape[:-1], v.shape[-1]),
        lse_shape=(heads, q.shape[0]) if packed else (q.shape[0], heads, q.shape[1]),
        out_dtype=out_dtype or (torch.bfloat16 if q.dtype in FP8 else q.dtype),
        config=config,
        variant=variant,
    )


def check_shapes(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    free = [None, None, None] if packed else [None, None, None, None]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, free, (*FLOATS, *FP8), q.device)
        if tensor.dtype != q.dtype:
            raise ParamsError(illegal(f"{name}.dtype", tensor.dtype, f"must be {q.dtype}, as q's"))
        if not 1 <= tensor.shape[-1] <= 256:
            raise ParamsError(illegal(f"{name}.shape[-1]", tensor.shape[-1], "a head dim is 1 to 256"))
    if q.dtype in FP8 and not interpreted() and torch.cuda.get_device_capability(q.device) < (8, 9):
        raise ParamsError(illegal("q.dtype", q.dtype, "float8 needs a GPU of compute capability 8.9 or more"))
    batch = [] if packed else [q.shape[0]]
    check_tensor("k", k, [*batch, None, None, q.shape[-1]], (q.dtype,), q.device)
    check_tensor("v", v, [*k.shape[:-1], None], (q.dtype,), q.device)
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ParamsError(illegal("heads", q.shape[-2], f"must be a multiple of the {k.shape[-2]} KV heads"))


def check_options(causal: bool, window: int | None, softcap: float | None, scales: tuple) -> None:
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ParamsError(illegal("window", window, "must be an integer >= 1, or None"))
    if window is not None and not causal:
        raise ParamsError(illegal("window", window, "needs causal=True: it looks back, not ahead"))
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ParamsError(illegal("softcap", softcap, "must be a finite number above 0, or None"))
    if len(scales) != 3 or not all(math.isfinite(s) and s > 0 for s in scales):
        raise ParamsError(illegal("scales", scales, "must be three finite numbers above 0, for q, k and v"))


def check_starts(q: Tensor, k: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, longest: int | None) -> None:
    """Values are looked at only where that waits for nobody: on the CPU."""
    if starts_q is None or starts_k is None or longest is None:
        raise ParamsError("packed attention needs all three: starts_q, starts_k, longest")
    check_tensor("starts_q", starts_q, [None], (torch.int32, torch.int64), q.device)
    check_tensor("starts_k", starts_k, [len(starts_q)], (torch.int32, torch.int64), q.device)
    if len(starts_q) < 2:
        raise ParamsError(
            illegal("starts_q", starts_q.tolist(), "must have one number more than there are sequences")
        )
    if not isinstance(longest, int) or longest < 0:
        raise ParamsError(illegal("longest", longest, "must be an integer >= 0"))
    if q.device.type != "cpu":
        return
    for name, starts, tokens in (("starts_q", starts_q, len(q)), ("starts_k", starts_k, len(k))):
        values = starts.tolist()
        if values[0] != 0 or values[-1] != tokens or sorted(values) != values:
            raise ParamsError(illegal(name, values, f"must rise from 0 to {tokens}, the number of tokens"))
    most = int(starts_q.diff().max())
    if longest < most:
        raise ParamsError(illegal("longest", longest, f"one sequence has {most} queries"))
