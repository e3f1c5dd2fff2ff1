"""FlashDecoding: one query a sequence, its keys split over many programs, merged by their log-sum-exps. Triton.

Chapter 09. Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding for long-context inference". Read the torch twin in
`decoding_reference` first; it has the same lines.

Bytes that must move: K and V once, 2 x batch x kv_heads x length x dim x bytes a number; q and the output are nothing
beside them. FLOPs: 4 x batch x heads x length x dim. That is 2 x group / (bytes a number) FLOP a byte, where a group
is the query heads that share a KV head: far below any GPU's ridge. What counts is that every SM keeps bytes in
flight, and that K and V are read once, so all query heads of a group sit in one tile. Splits add 2 x splits x batch x
heads x dim x 4 bytes: partial results, written and read again.

Scores are kept in base 2: exp2 is what the hardware has, and log2(e) goes into the scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import check_ids, check_tensor, interpreted, power_of_two
from minillm.kernels.splits import MOST_SPLITS, choose_splits

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def to_logits(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """q @ k as softmax sees it: scaled, capped, in base 2."""
    scores *= scale
    if HAS_SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh(x) = 2 sigmoid(2 x) - 1
    return scores * LOG2_E


@triton.jit
def absorb(acc, m, total, scores, v):
    """One step of online softmax (chapter 08). acc [M, D], m and total [M], scores [M, N], v [N, D]."""
    new_m = tl.maximum(m, tl.max(scores, 1))  # [M]
    base = tl.where(new_m == float("-inf"), 0.0, new_m)  # nothing seen yet: exp2(-inf - 0) is 0, not NaN
    p = tl.exp2(scores - base[:, None])  # [M, N]
    rescale = tl.exp2(m - base)  # [M]
    total = total * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")  # [M, D]
    return acc, new_m, total


@triton.jit
def finish(acc, m, total):
    """(output [M, D], natural log-sum-exp [M]) of a part; zeros and -inf for a row that saw nothing."""
    seen = total != 0  # NaN counts as seen, and stays visible
    total = tl.where(seen, total, 1.0)
    return acc / total[:, None], tl.where(seen, (m + tl.log2(total)) * LN_2, float("-inf"))


@triton.jit
def decode_kernel(
    q, k, v, lengths, outs, lses,
    q_batch, q_head, k_batch, k_head, k_key, v_batch, v_head, v_key,
    out_split, out_batch, out_head, lse_split, lse_batch,
    scale, softcap, window, kv_heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One program: one split of one sequence's keys, for the GROUP query heads of one KV head."""
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head, split, splits = tl.program_id(0) % kv_heads, tl.program_id(1), tl.num_programs(1)
    rows, d = tl.arange(0, M), tl.arange(0, D)
    head = kv_head * GROUP + rows  # [M]
    q_mask = (rows < GROUP)[:, None] & (d < DIM)[None, :]  # [M, D]
    q_tile = tl.load(q + batch * q_batch + head[:, None] * q_head + d[None, :], mask=q_mask, other=0.0).to(COMPUTE)

    last = tl.load(lengths + batch).to(tl.int32)
    first = last * 0
    if HAS_WINDOW:
        first = tl.maximum(last - window, 0)
    first_tile, last_tile = first // N, (last + N - 1) // N
    tiles_each = (last_tile - first_tile + splits - 1) // splits
    begin = first_tile + split * tiles_each
    end = tl.minimum(begin + tiles_each, last_tile)

    m, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for tile in range(begin, end):
        key = tile * N + tl.arange(0, N)  # [N]
        here = (key >= first) & (key < last)
        kv_mask = here[:, None] & (d < DIM)[None, :]  # [N, D]
        key_offset = key.to(tl.int64)[:, None]  # 64 bits: key x stride can pass 2^31
        k_tile = tl.load(
            k + batch * k_batch + kv_head * k_head + key_offset * k_key + d[None, :], mask=kv_mask, other=0.0
        ).to(COMPUTE)
        v_tile = tl.load(
            v + batch * v_batch + kv_head * v_head + key_offset * v_key + d[None, :], mask=kv_mask, other=0.0
        ).to(COMPUTE)
        scores = to_logits(tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
        scores = tl.where(here[None, :], scores, float("-inf"))  # [M, N]
        acc, m, total = absorb(acc, m, total, scores, v_tile)

    out, lse = finish(acc, m, total)
    out_at = outs + split.to(tl.int64) * out_split + batch * out_batch + head[:, None] * out_head + d[None, :]
    tl.store(out_at, out.to(outs.dtype.element_ty), mask=q_mask)
    tl.store(lses + split * lse_split + batch * lse_batch + head, lse, mask=rows < GROUP)


@triton.jit
def merge_kernel(
    outs, lses, out, lse, rows, splits, out_row,
    DIM: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """outs [splits, rows, DIM] float32, lses [splits, rows] -> out [rows, DIM], lse [rows]. One program: D numbers
    of one row. A split with LSE -inf saw nothing: it is not read."""
    row = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, SPLITS), tl.program_id(1) * D + tl.arange(0, D)
    part = tl.load(lses + split * rows + row, mask=split < splits, other=float("-inf"))  # [SPLITS]
    m = tl.max(part, 0)
    base = tl.where(m == float("-inf"), 0.0, m)
    weights = tl.exp(part - base)  # [SPLITS]
    total = tl.sum(weights, 0)
    mask = (part != float("-inf"))[:, None] & (d < DIM)[None, :]  # [SPLITS, D]
    at = outs + (split.to(tl.int64)[:, None] * rows + row) * DIM + d[None, :]
    x = tl.load(at, mask=mask, other=0.0)  # [SPLITS, D]
    merged = tl.sum(x * weights[:, None], 0) / tl.where(total == 0, 1.0, total)  # [D]
    tl.store(out + row * out_row + d, merged.to(out.dtype.element_ty), mask=d < DIM)
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(total == 0, float("-inf"), base + tl.log(tl.where(total == 0, 1.0, total))))


def flash_decoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q [batch, heads, dim], k and v [batch, kv_heads, max length, dim], any strides but the last; lengths [batch]:
    keys that each row has. -> (out as q, natural log-sum-exp [batch, heads] float32); zeros and -inf at length 0.

    splits: None chooses by the number of SMs and the longest K could be, without looking at `lengths`, which stay on
    the device: the same launch serves every step, and a CUDA graph can hold it.
    """
    batch, heads, dim = check_heads(q, k, 1)
    kv_heads, most = k.shape[1], k.shape[2]
    check_tensor("k", k, (batch, kv_heads, most, dim), device=q.device)
    check_tensor("v", v, (batch, kv_heads, most, dim), (k.dtype,), q.device)
    check_tensor("lengths", lengths, (batch,), (torch.int32, torch.int64), q.device)
    check_ids("lengths", lengths, most + 1)
    check_options(window, softcap, splits)
    splits = splits or choose_splits(batch * kv_heads or 1, min(most, window or most), program_slots(q.device))
    out, lse = results(q)
    outs, lses = partials(out, lse, splits)
    group, shape = heads // kv_heads, tile_shape(dim, q.dtype)
    if batch:
        decode_kernel[batch * kv_heads, splits](
            q, k, v, lengths, outs, lses,
            *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *outs.stride()[:3], *lses.stride()[:2],
            scale, softcap or 0.0, window or 0, kv_heads,
            GROUP=group, DIM=dim, M=power_of_two(group), HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None, **shape,
        )  # fmt: skip
    if splits > 1:
        launch_merge(outs, lses, out, lse)
    return out.to(q.dtype), lse


def results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for out, as q, and lse [rows, heads]. The interpreter truncates where it should round to bfloat16: there,
    out stays in float32 until torch rounds it."""
    rounds = interpreted() and q.dtype == torch.bfloat16
    out = torch.empty(q.shape, dtype=torch.float32 if rounds else q.dtype, device=q.device)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def partials(out: Tensor, lse: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Where programs write: outs [splits, ..., dim] float32, lses [splits, ...]. One split writes the result."""
    if splits == 1:
        return out.unsqueeze(0), lse.unsqueeze(0)
    return out.new_empty((splits, *out.shape), dtype=torch.float32), lse.new_empty((splits, *lse.shape))


def launch_merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """outs [splits, rows, heads, dim], lses [splits, rows, heads] -> out and lse, without the first."""
    splits, rows, dim = len(outs), lse.numel(), out.shape[-1]
    if rows:
        width = power_of_two(dim) if interpreted() else 32  # narrow: a row's merge is then several programs
        merge_kernel[rows, -(-dim // width)](
            outs, lses, out, lse, rows, splits, dim, DIM=dim, SPLITS=power_of_two(splits), D=width
        )


def check_heads(q: Tensor, k: Tensor, kv_dim: int) -> tuple[int, int, int]:
    """Shape of q [rows, heads, dim]. kv_dim: which dimension of k counts its heads."""
    check_tensor("q", q, (None, None, None))
    if not isinstance(k, Tensor) or k.dim() != 4:
        raise ParamsError(illegal("k", getattr(k, "shape", k), "must have 4 dimensions"))
    rows, heads, dim = q.shape
    kv_heads = k.shape[kv_dim]
    if not kv_heads or heads % kv_heads:
        raise ParamsError(illegal("q.shape", list(q.shape), f"heads must be a multiple of the {kv_heads} KV heads"))
    if not 0 < dim <= 256:
        raise ParamsError(illegal("q.shape", list(q.shape), "the last dimension must be from 1 to 256"))
    return rows, heads, dim


def check_options(window: int | None, softcap: float | None, splits: int | None) -> None:
    if window is not None and window < 1:
        raise ParamsError(illegal("window", window, "must be None or at least 1"))
    if softcap is not None and not softcap > 0:
        raise ParamsError(illegal("softcap", softcap, "must be None or above 0"))
    if splits is not None and not 1 <= splits <= MOST_SPLITS:
        raise ParamsError(illegal("splits", splits, f"must be None or from 1 to {MOST_SPLITS}"))


def program_slots(device: torch.device) -> int:
    """Programs that run at once: two an SM. The interpreter runs one after another."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def tile_shape(dim: int, dtype: torch.dtype, stages: int = 3) -> dict:
    """Tile and launch settings by rule, not by timing: a decode step must launch at once, in a graph as well. Keys a
    tile so that the stages of K and V fit in 99 KB of shared memory, the least of any GPU from Ampere on; products in
    the input's dtype, save in the interpreter."""
    width = power_of_two(dim)
    keys = max(16, min(64, 64 * 256 // (width * dtype.itemsize)))
    compute = (
        tl.float32 if interpreted() or dtype == torch.float32 else getattr(tl, str(dtype).removeprefix("torch."))
    )
    return {"D": width, "N": keys, "COMPUTE": compute, "num_warps": 4, "num_stages": stages}
