"""The figure of the README: milliseconds a token, without and with a KV cache. `python docs/readme_figure.py`."""

import time
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from minillm import load_model, load_tokenizer
from minillm.cache.generate import cached_tokens
from minillm.lab import plots
from minillm.measure.records import device_name
from minillm.model.generate import naive_tokens
from minillm.model.hub import is_available

name = "smollm2-135m" if is_available("smollm2-135m") else "tiny"
model, prompt = load_model(name), load_tokenizer(name).encode("The sea was")
TOKENS = 256


def gaps(generate) -> list[float]:
    """Milliseconds between one token and the next."""
    for _ in generate(model, prompt, 4):
        pass  # warm-up
    stamps = [time.perf_counter()]
    for _ in generate(model, prompt, TOKENS):
        stamps.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in pairwise(stamps)]


plots.use()
figure, ax = plt.subplots(figsize=(7.2, 3.0))
for label, generate, meaning in (("naive", naive_tokens, "naive"), ("KV cache", cached_tokens, "technique")):
    ax.plot(range(1, TOKENS + 1), gaps(generate), label=label, color=plots.MEANING[meaning], lw=1.2)
ax.set_xlabel("output token")
ax.set_ylabel("ms a token")
ax.set_ylim(bottom=0)
ax.legend(frameon=False)
ax.set_title(f"{name}, {str(model.dtype)[6:]}, {device_name()}", fontsize=9)
figure.savefig(Path(__file__).parent / "kv_cache.png", dpi=110, bbox_inches="tight", facecolor="white")
