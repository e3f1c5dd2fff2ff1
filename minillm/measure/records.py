"""One record per measured figure: what was measured, on what, with which versions.

All chapters. `minillm bench --json` writes these, `notebooks/measurements/*.json` keeps those measured on a GPU, and
`minillm.lab.recorded` reads them beside the reader's own. A figure that was not measured has no record.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path

REQUIRED = ("name", "value", "unit", "device")


@dataclass(frozen=True)
class Figure:
    """One measured figure. spread: (25th, 75th percentile) in the same unit, or None for an exact count.

    workload: what was run, as "decode, batch 1, 64 tokens" or a dict of such settings.
    """

    name: str
    value: float
    unit: str
    spread: tuple[float, float] | None = None
    model: str = ""
    workload: str | dict = ""
    device: str = ""
    versions: dict = field(default_factory=dict)
    commit: str = ""

    def __post_init__(self) -> None:
        number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not number or not math.isfinite(self.value):
            raise ValueError(
                f"{self.name}: value={self.value!r} must be a finite number; leave out what was not measured"
            )


def figure(name: str, value: float, unit: str, *, spread=None, model: str = "", workload: str | dict = "") -> Figure:
    """A Figure of this machine, now: device, versions and commit filled in."""
    spread = None if spread is None else tuple(float(x) for x in spread)
    return Figure(name, value, unit, spread, model, workload, device_name(), versions(), commit())


def to_json(figures: Iterable[Figure]) -> str:
    return json.dumps([asdict(f) for f in figures], indent=2, ensure_ascii=False)


def write(figures: Iterable[Figure], path: str | Path) -> None:
    Path(path).write_text(to_json(figures) + "\n", encoding="utf-8")


def read(path: str | Path) -> list[Figure]:
    """The records of one file: a list of them, or a single one. Fields that a Figure does not have are ignored."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    return [_parse(row, path.name) for row in (content if isinstance(content, list) else [content])]


def _parse(row: object, source: str) -> Figure:
    if not isinstance(row, dict):
        raise ValueError(f"{source}: a record must be an object, not {type(row).__name__}")
    missing = [name for name in REQUIRED if name not in row]
    if missing:
        raise ValueError(f"{source}: a record lacks {', '.join(missing)}")
    known = {name: row[name] for name in Figure.__dataclass_fields__ if name in row}
    if isinstance(known.get("spread"), list):
        known["spread"] = tuple(known["spread"])
    return Figure(**known)


def device_name() -> str:
    """The GPU's name if there is one, else the processor's and torch's thread count: "AMD EPYC, 2 threads"."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor_name()}, {torch.get_num_threads()} threads"


@lru_cache(maxsize=1)
def processor_name() -> str:
    """The processor's own name; platform.processor() knows only its family on Linux."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return " ".join(value.split())
    if platform.system() == "Darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
        if name:
            return name
    return platform.processor() or platform.machine() or "unknown processor"


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(terse=True),
    }
    for name in ("minillm", "triton", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or ""
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return found


def versions() -> dict[str, str]:
    """Versions a figure depends on: Python, torch, triton, transformers where installed, CUDA and driver on a GPU."""
    return dict(_versions())


@lru_cache(maxsize=1)
def commit() -> str:
    """Short commit of this checkout, "+" if files differ from it, "" where there is no git."""
    here = Path(__file__).parent
    if not _output("git", "ls-files", "records.py", folder=here):  # installed, perhaps inside some other checkout
        return ""
    found = _output("git", "rev-parse", "--short", "HEAD", folder=here)
    changed = found and _output("git", "status", "--porcelain", "--untracked-files=no", folder=here)
    return found + ("+" if changed else "")


def _output(*command: str, folder: Path | None = None) -> str:
    """What a command prints, or "" if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
