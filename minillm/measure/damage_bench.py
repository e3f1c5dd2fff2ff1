"""`minillm bench damage`: the table of chapter 15 on a real model, as figures.

Chapter 15. smollm2-135m with its weights off the 4-bit grid of the offline file (`quant/ungrid.py`), judged on the
end of the held-out book, calibrated on its beginning. GPTQ and AWQ of a real model take minutes on a CPU: there they
are left out, unless they are asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from minillm.measure.bench import NotMeasured
from minillm.measure.choices import passage, turn
from minillm.measure.damage import METHODS, Row, judge, methods
from minillm.measure.records import Figure, figure
from minillm.model.hub import ASSETS, is_available
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model
from minillm.quant.ungrid import ungrid


def bench_damage(
    model: str = "smollm2-135m",
    names: Iterable[str] | None = None,
    tokens: int | None = None,
    questions: int | None = None,
    repeats: int = 1,
    smoke: bool = False,
) -> Iterator[Figure]:
    """Figures damage.METHOD.ratio (perplexity / the original's), .kl, .top1, .TASK (change of accuracy), .bytes.

    spread: 95 % intervals, paired with the original. tokens, questions: a task; by default 2,048 and 48, on a GPU
    16,384 and 200. smoke: the shipped model, few of each. repeats is not used: the figures are no times.
    """
    if smoke:
        model, tokens, questions, names = "tiny", 384, 4, names or ("INT4", "INT4 GPTQ", "KV INT2")
    if not is_available(model):
        raise NotMeasured(f"{model} is not on this machine: run minillm pull {model}")
    decoder, tokenizer = load_model(model, dtype="float32"), load_tokenizer(model)
    gpu = decoder.device.type == "cuda"
    if names is None:
        names = [m.name for m in METHODS if gpu or m.chapter != 12]
    chosen = methods(names)
    tokens, count = tokens or (16_384 if gpu else 2048), questions or (200 if gpu else 48)
    if model != "tiny":
        ungrid(decoder)
    text = (ASSETS / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    samples = 4 if smoke else 64
    tokens = min(tokens, len(ids) - samples * 128)
    calibration = torch.tensor(ids[: samples * 128], device=decoder.device).view(samples, 128)
    tasks = {
        "passage": passage(ids[samples * 128 :], count, seed=1),
        "turn": turn(tokenizer, text, count, seed=1),
    }
    workload = {"tokens": tokens, "window": 256, "questions": count, "calibration": samples * 128}
    for row in judge(decoder, ids[-tokens:], calibration, tasks, chosen):
        yield from figures_of(row, model, workload)


def figures_of(row: Row, model: str, workload: dict) -> Iterator[Figure]:
    prefix = f"damage.{row.name.lower().replace(' ', '_')}"
    damage = row.damage
    intervals = {"ratio": (damage.ratio, "x"), "kl": (damage.mean_kl, "nats"), "top1": (damage.agreement, "1")}
    for task, scores in row.scores.items():
        intervals[task] = scores.gain(row.original[task]), "1"
    for name, (found, unit) in intervals.items():
        spread = (found.low, found.high)
        yield figure(f"{prefix}.{name}", found.value, unit, spread=spread, model=model, workload=workload)
    yield figure(f"{prefix}.bytes", row.weight_bytes, "B", model=model, workload=workload)
    yield figure(f"{prefix}.kv_bytes", row.kv_bytes, "B", model=model, workload=workload)


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"damage": bench_damage}
