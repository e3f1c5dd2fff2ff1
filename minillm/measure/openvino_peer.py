"""OpenVINO GenAI as a peer: the same weights and requests, in another Python, in the same run.

Chapter 04. Its packages ask for other versions than ours, so they live in an environment of their own (`pip install
torch openvino-genai optimum-intel`) and `minillm bench throughput --peer-python PATH` names its Python. That runs
`openvino_child`, which waits while we are timed, and is timed by itself: neither start, conversion nor the way there
and back is counted.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from minillm.measure.bench import NotMeasured
from minillm.model.export import export
from minillm.model.weights import load_model

CHILD = Path(__file__).with_name("openvino_child.py")
EXACT, ROUNDED = "openvino.float32", "openvino.default"
KV_GB = 1  # room for keys and values: enough that no request waits for it
Work = Sequence[tuple[list[int], int]]  # (prompt, exact number of new tokens)
Peer = Callable[[object, Work], tuple[float, list[list[int]]]]  # -> (seconds, the new tokens of each request)


class Child:
    """A process that answers each JSON line with one. NotMeasured if it cannot be started."""

    def __init__(self, command: Sequence[str], errors: Path) -> None:
        self.errors = errors
        try:
            with errors.open("w") as said:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, encoding="utf-8"
                )
        except OSError as error:
            raise NotMeasured(f"{command[0]} cannot be run: {error.strerror}") from None

    def ask(self, question: dict) -> dict:
        """RuntimeError, with the last line that the process said, if it has ended."""
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            said = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RuntimeError(f"the peer's process ended: {said[-1] if said else 'it said nothing'}")
        return json.loads(answer)

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def openvino_peers(model: str, python: str | None, sequences: int, step_tokens: int) -> Iterator[dict[str, Peer]]:
    """{"openvino.float32": peer, "openvino.default": peer}, on the float32 weights of `model`, with as many threads
    as torch has. float32: products and KV cache in float32; default: what OpenVINO chooses, such as a KV cache of 8
    bits, so its tokens may be others. Sizes: requests at once, tokens a step. NotMeasured, in one line, if that
    Python lacks something."""
    if python is None:
        raise NotMeasured("name a Python that has openvino-genai and optimum-intel: --peer-python PATH")
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    plain = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    pipelines = {EXACT: plain | exact, ROUNDED: plain}
    scheduler = {
        "max_num_batched_tokens": step_tokens,
        "max_num_seqs": sequences,
        "cache_size": KV_GB,
        "dynamic_split_fuse": True,
        "enable_prefix_caching": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        child = Child([python, str(CHILD)], Path(folder, "errors.txt"))
        try:
            export(load_model(model, dtype="float32", device="cpu"), folder)
            told = child.ask({"model": folder, "pipelines": pipelines, "scheduler": scheduler})
            if "missing" in told:
                raise NotMeasured(f"{python} lacks the package {told['missing']}")
            yield {name: peer(child, name) for name in pipelines}
        finally:
            child.close()


def peer(child: Child, name: str) -> Peer:
    """Called as the peers that run here are: the model they are given is another copy of what the child has."""

    def run(_: object, work: Work) -> tuple[float, list[list[int]]]:
        answer = child.ask({"pipeline": name, "work": work})
        return answer["seconds"], answer["texts"]

    return run
