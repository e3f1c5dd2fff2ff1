"""The C++ kernels for a CPU: compiled once a machine, loaded through ctypes.

Chapters 09 and 10. The compiler that `torch.compile` needs anyway takes a few seconds; what it made is kept beside
the models, under a name that changes with the sources, the flags and the compiler.
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

from minillm.model.hub import cache_folder

log = logging.getLogger(__name__)

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
DTYPES = (torch.float32, torch.bfloat16)
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
VECTORS = {  # by what torch found this processor to have
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma"),
}


class Layer(ctypes.Structure):
    """As in layers.cpp: tensors of a layer (None: there is none), and its window (0: none)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("norm", "q_norm", "k_norm", "qkv_bias", "qkv", "out")),
        *((name, ctypes.c_void_p) for name in ("mlp_norm", "gate_up", "down")),
        ("window", ctypes.c_int64),
    ]


class DecoderShape(ctypes.Structure):
    """As in layers.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "dim", "ffn")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "softcap")),
        ("is_bfloat16", ctypes.c_bool),
    ]


class DecoderStep(ctypes.Structure):
    """As in layers.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "blocks", "block_size", "max_blocks", "rows", "n")),
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "keys", "values", "slots", "tables")),
        *((name, ctypes.c_void_p) for name in ("places", "requests", "lengths", "stretches")),
        *((name, ctypes.c_void_p) for name in ("normed", "qkv", "attended")),
    ]


def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """One sentence that says why the kernels cannot run; None: they can. Compiles them the first time it is asked."""
    if device.type != "cpu":
        return f"the tensors are on {device.type}, and this kernel is for a CPU"
    if dtype not in DTYPES:
        return f"it reads float32 and bfloat16, not {dtype}"
    try:
        library()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def vector_flags() -> tuple[str, ...]:
    """What this processor has, if torch uses it. A processor with tiles (AMX) multiplies 16 bits faster in a library
    that knows them, so it gets no instruction for pairs."""
    capability = torch.backends.cpu.get_cpu_capability()
    pairs = capability == "AVX512" and has("avx512_bf16") and not has("amx_tile")
    return (*VECTORS.get(capability, ()), *(("-mavx512bf16",) if pairs else ()))


def has(instructions: str) -> bool:
    """Whether torch says that the processor has them; it may be too old to say."""
    return bool(getattr(torch.cpu, f"_is_{instructions}_supported", lambda: False)())


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled sources. OSError: no compiler, or it failed."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"it needs a C++ compiler, and there is none of {', '.join(COMPILERS)}")
    flags = (*FLAGS, *vector_flags())
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    texts = b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))
    name = hashlib.sha256(texts + version + " ".join(flags).encode()).hexdigest()[:16]
    path = cache_folder() / "kernels" / f"minillm-{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # then moved: another process may do the same
            made = Path(folder) / path.name
            command = [compiler, *flags, *SOURCES, "-o", made]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                log.debug("%s: %s", compiler, done.stderr)
                raise OSError(f"{compiler} failed: {(done.stderr.strip() or 'no message').splitlines()[0]}")
            os.replace(made, path)
    loaded = ctypes.CDLL(str(path))
    flag, size, number, pointer = ctypes.c_bool, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    loaded.paged_decode.argtypes = [flag, *[size] * 7, *[number] * 2, pointer, size, *[pointer] * 7, ctypes.c_int]
    loaded.paged_prefill.argtypes = [flag, *[size] * 7, *[number] * 2, pointer, size, *[pointer] * 5, ctypes.c_int]
    loaded.paged_store.argtypes = [size, size, pointer, size, pointer, size, *[pointer] * 3]
    loaded.linear.argtypes = [flag, *[size] * 3, *[pointer] * 3, ctypes.c_int]
    loaded.mlp.argtypes = [flag, *[size] * 3, *[pointer] * 4, ctypes.c_int]
    loaded.decoder_layers.argtypes = [*[pointer] * 3, ctypes.c_int]
    loaded.linear_pairs.restype = flag
    for name in ("paged_decode", "paged_prefill", "paged_store", "linear", "mlp", "decoder_layers"):
        getattr(loaded, name).restype = None
    return loaded
