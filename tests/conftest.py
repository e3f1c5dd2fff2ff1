"""What all tests share: one thread a worker, a seed, fast notebooks, no network, no window."""

import os
import shutil
import sys

import pytest

# Before torch is imported, and inherited by every kernel and command that a test starts: `make test` has two workers.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("MINILLM_FAST", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # whoever fetches in a test gets an error at once, not a time-out
# Kernels run in Triton's interpreter unless a GPU can be seen: set here too, since torch.compile may be what imports
# triton first. (Asking torch for a GPU here would cost every test that starts a process two seconds.)
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # ipykernel's debugger otherwise warns in every kernel


@pytest.fixture(autouse=True)
def _seed():
    """Random numbers drawn without a generator do not depend on which tests ran before."""
    if "torch" in sys.modules:  # importing it here would cost every process two seconds
        sys.modules["torch"].manual_seed(0)
