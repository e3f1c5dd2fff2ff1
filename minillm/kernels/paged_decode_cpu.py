"""Paged decode attention on a CPU, in C++: no gather, no padding (`paged_decode.cpp` has the loop).

Chapter 09. PagedAttention, Kwon et al. 2023 (arXiv:2309.06180). What the Triton kernel of `paged_attention` does for
a GPU. The compiler runs once a machine, for about three seconds; what it made is kept beside the models.

Bytes: K and V that a row sees, once: 2 x length x kv_heads x dim x bytes per element. FLOPs: 4 x heads x length x
dim.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal
from minillm.kernels.launch import check_ids
from minillm.model.hub import cache_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_decode.cpp")
DTYPES = (torch.float32, torch.bfloat16)
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
VECTORS = {  # by what torch found this processor to have
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma"),
}


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    requests: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q [rows, heads, dim], keys and values [blocks, block_size, kv_heads, dim], float32 or bfloat16 -> [rows, heads,
    dim] in q's dtype, computed in float32.

    tables: [requests, max_blocks], block ids. requests, lengths: [rows], whose table a row reads and how many of its
    tokens, the row's own included; length 0: a row of zeros. All three int64. window: only the last so many.
    """
    for name, x, axes in (("q", q, 3), ("keys", keys, 4), ("values", values, 4), ("tables", tables, 2)):
        if x.dim() != axes:
            raise ParamsError(illegal(f"{name}.shape", list(x.shape), f"must have {axes} axes"))
    everything = {"q": q, "keys": keys, "values": values, "tables": tables, "requests": requests, "lengths": lengths}
    for name, x in everything.items():
        if x.device.type != "cpu":
            raise ParamsError(illegal(f"{name}.device", x.device, "must be a CPU"))
    rows, heads, dim = q.shape
    blocks, block_size, kv_heads, _ = keys.shape
    for name, x in (("requests", requests), ("lengths", lengths)):
        if x.shape != (rows,):
            raise ParamsError(illegal(f"{name}.shape", list(x.shape), f"must be [{rows}], one for each row of q"))
    if window is not None and window < 1:
        raise ParamsError(illegal("window", window, "must be None or at least 1"))
    for name, x in (("keys", keys), ("values", values)):
        if x.dtype not in DTYPES or x.dtype != keys.dtype:
            raise ParamsError(illegal(f"{name}.dtype", x.dtype, "must be float32 or bfloat16, the same for both"))
        if x.shape != keys.shape or x.shape[3] != dim or not x.is_contiguous():
            legal = f"must be [blocks, block_size, kv_heads, {dim}], contiguous, the same for both"
            raise ParamsError(illegal(f"{name}.shape", list(x.shape), legal))
    if heads % kv_heads:
        raise ParamsError(illegal("q.shape", list(q.shape), f"heads must be a multiple of kv_heads={kv_heads}"))
    for name, x in (("tables", tables), ("requests", requests), ("lengths", lengths)):
        if x.dtype != torch.long:
            raise ParamsError(illegal(f"{name}.dtype", x.dtype, "must be int64"))
    check_ids("tables", tables, blocks)
    check_ids("requests", requests, len(tables))
    check_ids("lengths", lengths, tables.shape[1] * block_size + 1)
    tensors = tuple(x.contiguous() for x in (q.float(), keys, values, tables, requests, lengths))
    out = torch.empty(q.shape, dtype=torch.float32)  # [rows, heads, dim]
    library().paged_decode(
        keys.dtype == torch.bfloat16,
        *(rows, heads, kv_heads, dim, block_size, tables.shape[1], window or 0),
        *(scale, softcap or 0.0),
        *(x.data_ptr() for x in (*tensors, out)),
        torch.get_num_threads(),
    )
    return out.to(q.dtype)


def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """One sentence that says why this kernel cannot run; None: it can. Compiles it the first time it is asked."""
    if device.type != "cpu":
        return f"the cache is on {device.type}, and this kernel is for a CPU"
    if dtype not in DTYPES:
        return f"it reads float32 and bfloat16, not {dtype}"
    try:
        library()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled source. OSError: no compiler, or it failed."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"it needs a C++ compiler, and there is none of {', '.join(COMPILERS)}")
    flags = (*FLAGS, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), ()))
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    name = hashlib.sha256(SOURCE.read_bytes() + version + " ".join(flags).encode()).hexdigest()[:16]
    path = cache_folder() / "kernels" / f"paged_decode-{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # then moved: another process may do the same
            made = Path(folder) / path.name
            done = subprocess.run([compiler, *flags, SOURCE, "-o", made], capture_output=True, text=True, timeout=300)
            if done.returncode:
                log.debug("%s: %s", compiler, done.stderr)
                raise OSError(f"{compiler} failed: {(done.stderr.strip() or 'no message').splitlines()[0]}")
            os.replace(made, path)
    loaded = ctypes.CDLL(str(path))
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.paged_decode.argtypes = [ctypes.c_bool, *[size] * 7, *[ctypes.c_float] * 2, *[pointer] * 7, ctypes.c_int]
    loaded.paged_decode.restype = None
    return loaded
