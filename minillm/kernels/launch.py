"""What all kernels share: where they run, what their launchers refuse, how a configuration is picked.

Chapters 08 to 10. Triton compiles for a GPU. Without one, `TRITON_INTERPRET=1` makes it run the same source in
Python, one program of the grid after another: right values, no speed. Triton reads that variable when it is imported,
so `choose_interpreter` sets it first; `minillm.kernels` calls it before any kernel module can be loaded.

Two rules of the interpreter that every kernel here follows:
- bfloat16 arithmetic is silently wrong in it. Either the launcher hands over `computable(x)`, or the kernel takes
  `UPCAST: tl.constexpr` (pass `interpreted()`) and converts to float32 after a load; the store converts back. On a
  GPU products run in the input's own dtype.
- It has no clock worth tuning by: `autotune` takes the first configuration there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.errors import ParamsError, illegal

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def choose_interpreter() -> None:
    """Ask Triton to interpret where there is no CUDA device. A value that the user has set stays."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def why_not() -> str | None:
    """One sentence that says why Triton kernels cannot run in this process; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it exists for Linux)"
    if interpreted():
        standard = sys.modules.get("triton.language.standard")
        if standard is not None and type(standard.cdiv).__name__ == "JITFunction":
            return "Triton was imported for a GPU first: set TRITON_INTERPRET=1, or import minillm.kernels earlier"
        return None
    if not torch.cuda.is_available():
        return "TRITON_INTERPRET is switched off, and there is no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"Triton needs compute capability 8.0, this GPU has {torch.cuda.get_device_capability()}"
    return None


def require_triton() -> None:
    """Raise what `why_not` says."""
    reason = why_not()
    if reason is not None:
        raise ParamsError(f"Triton kernels cannot run here: {reason}")


def computable(x: Tensor) -> Tensor:
    """x as the kernel's arithmetic is right on it: in the interpreter, bfloat16 and float8 become float32."""
    narrow = x.dtype == torch.bfloat16 or x.dtype.itemsize == 1
    return x.float() if narrow and x.is_floating_point() and interpreted() else x


def autotune(configs: Sequence, key: Sequence[str]) -> Callable:
    """`triton.autotune` on a GPU: each configuration is timed once for each value of `key`. Keys are dims and dtypes,
    never lengths, so a new length tunes nothing. In the interpreter the first configuration is taken.

        @autotune([triton.Config({"BLOCK_M": 64}, num_warps=4)], key=["HEAD_DIM"])
        @triton.jit
        def kernel(...)
    """
    if not interpreted():
        import triton

        return triton.autotune(configs=list(configs), key=list(key))
    return lambda kernel: FirstConfig(kernel, configs[0].kwargs)


class FirstConfig:
    """A kernel with one configuration bound to it: `kernel[grid](...)`, as after `triton.autotune`."""

    def __init__(self, kernel, settings: dict) -> None:
        self.kernel, self.settings = kernel, dict(settings)

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel[grid](*args, **{**self.settings, **kwargs})


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two >= n and >= least: tiles have such sides, and `tl.dot` wants 16 at least."""
    return max(least, 1 << (n - 1).bit_length())


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
) -> None:
    """Shape (None: any length), dtype, device, and unit stride of the last dimension, before anything is launched."""
    if not isinstance(tensor, Tensor):
        raise ParamsError(illegal(name, tensor, "must be a tensor"))
    got = list(tensor.shape)
    if len(got) != len(shape) or any(want is not None and want != size for want, size in zip(shape, got)):
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ParamsError(illegal(f"{name}.shape", got, f"must be {wanted}"))
    if tensor.dtype not in dtypes:
        raise ParamsError(illegal(f"{name}.dtype", tensor.dtype, f"must be one of {', '.join(map(str, dtypes))}"))
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ParamsError(illegal(f"{name}.stride(-1)", tensor.stride(-1), "must be 1; call .contiguous()"))
    wanted = device or tensor.device
    if tensor.device != wanted:
        raise ParamsError(illegal(f"{name}.device", tensor.device, f"must be {wanted}, as the other tensors"))
    if not interpreted() and tensor.device.type != "cuda":
        raise ParamsError(illegal(f"{name}.device", tensor.device, "compiled kernels need CUDA tensors"))


def check_ids(name: str, ids: Tensor | Sequence[int], limit: int, padding: bool = False) -> None:
    """Every id in 0 .. limit - 1 (and -1 with `padding`): an id outside would read or write somebody else's memory.

    Lists and CPU tensors are checked; ids on a GPU are not, since looking at them would wait for the device. Whoever
    builds such a tensor checks it while it is still a list.
    """
    if isinstance(ids, Tensor):
        if ids.device.type != "cpu" or not ids.numel():
            return
        low, high = int(ids.min()), int(ids.max())
    elif not len(ids):
        return
    else:
        low, high = min(ids), max(ids)
    least = -1 if padding else 0
    for value in (low, high):
        if not least <= value < limit:
            raise ParamsError(illegal(name, value, f"ids must be from {least} to {limit - 1}"))
