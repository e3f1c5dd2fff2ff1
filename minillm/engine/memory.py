"""How much memory the block pool may take, when nobody says.

Chapter 05. On a GPU the pool gets what the weights left, less a share for activations: every block more is a request
that need not wait. On a CPU the memory belongs to others as well, so the pool stays modest.
"""

from __future__ import annotations

import os

import torch

GPU_SHARE = 0.85  # of what is free now; the rest is for activations
CPU_SHARE = 0.25  # of the machine's memory
CPU_MOST = 4 << 30  # bytes


def kv_budget(device: torch.device) -> int:
    """Bytes for K and V on this device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system says
        memory = 8 << 30
    return min(CPU_MOST, int(memory * CPU_SHARE))
