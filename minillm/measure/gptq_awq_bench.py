"""`minillm bench gptq-awq`: chapter 12's table on a real model, every layer of it, as figures.

Chapter 12. smollm2-135m with its weights off the 4-bit grid of the offline file (`quant/ungrid.py`), calibrated on
the beginning of the held-out book and judged on its end. Groups have 64 weights: the papers' 128 do not divide the
576 inputs of its linears. It takes about a quarter of an hour of one CPU thread. The figures are no times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from minillm.measure.bench import NotMeasured
from minillm.measure.damage import GROUP, KEEP, Change, Method, Row, judge, round_weights, scheme
from minillm.measure.quality import difference
from minillm.measure.records import Figure, figure
from minillm.model.hub import ASSETS, is_available
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model
from minillm.quant.awq import awq_model
from minillm.quant.calibrate import InputStats, collect
from minillm.quant.gptq import gptq_model
from minillm.quant.ungrid import ungrid

LENGTH, WINDOW = 128, 256  # tokens of a calibration sample, and of a window of the text that is judged on


def ways(bits: int, stats: dict[str, InputStats]) -> dict[str, Change]:
    """What chapter 12 compares, over all linears but the head. stats: the moments of the float model, for AWQ."""
    form = scheme(bits)
    return {
        "rtn": lambda model, text: round_weights(model, form),
        "gptq": lambda model, text: gptq_model(model, text, form, keep=KEEP),
        "awq": lambda model, text: awq_model(model, text, form, keep=KEEP, stats=stats),
        "gptq_act_order": lambda model, text: gptq_model(model, text, form, act_order=True, keep=KEEP),
    }


def bench_gptq_awq(
    model: str = "smollm2-135m",
    widths: tuple[int, ...] = (4, 3, 2),
    samples: int = 32,
    tokens: int = 2048,
    repeats: int = 1,
    smoke: bool = False,
) -> Iterator[Figure]:
    """Figures gptq_awq.float.perplexity, and a way of rounding: gptq_awq.intB.WAY.ratio (perplexity / the float
    model's), .kl, .top1, .layer_worst and .layer_mean (over the linears, output error / that of rounding to the
    nearest on the same inputs), gptq_awq.intB.WAY_less_OTHER.loss and .kl.

    spread: 95 % intervals, paired over the same tokens. samples: of LENGTH tokens, to calibrate on; tokens: to judge
    on. smoke: the shipped model, 3 bits, few of both. repeats is not used: the figures are no times.
    """
    if smoke:
        model, widths, samples, tokens = "tiny", (3,), 8, 512
    if not is_available(model):
        raise NotMeasured(f"{model} is not on this machine: run minillm pull {model}")
    decoder = load_model(model, dtype="float32")
    if model != "tiny":
        ungrid(decoder)
    ids = load_tokenizer(model).encode((ASSETS / "heldout.txt").read_text(encoding="utf-8"))
    if samples * LENGTH + tokens > len(ids):
        raise NotMeasured(f"the book has {len(ids)} tokens: fewer than {samples * LENGTH} + {tokens}")
    calibration = torch.tensor(ids[: samples * LENGTH], device=decoder.device).view(samples, LENGTH)
    stats = collect(decoder, calibration, KEEP)
    changes = {bits: ways(bits, stats) for bits in widths}
    methods = [Method(f"int{b}.{name}", 12, changes[b][name]) for name in changes[widths[0]] for b in widths]
    about = {"tokens": tokens, "window": WINDOW, "calibration": samples * LENGTH, "group": GROUP}
    seen: list[Row] = []
    for row in judge(decoder, ids[-tokens:], calibration, {}, methods, WINDOW):
        for name, value, unit, spread in figures_of(row, seen):
            yield figure(f"gptq_awq.{name}", value, unit, spread=spread, model=model, workload=about)
        seen.append(row)


def figures_of(row: Row, others: list[Row]) -> Iterator[tuple[str, float, str, tuple[float, float] | None]]:
    """(name, value, unit, interval) of one row, by itself and less each of the others at its width."""
    damage = row.damage
    if not others:
        yield "float.perplexity", math.exp(damage.reference_loss.double().mean().item()), "1", None
    intervals = {"ratio": (damage.ratio, "x"), "kl": (damage.mean_kl, "nats"), "top1": (damage.agreement, "1")}
    for part, (found, unit) in intervals.items():
        yield f"{row.name}.{part}", found.value, unit, (found.low, found.high)
    if row.layers:
        shares = list(row.layers.values())
        yield f"{row.name}.layer_worst", max(shares), "x", None
        yield f"{row.name}.layer_mean", sum(shares) / len(shares), "x", None
    width = row.name.split(".")[0]
    for other in (each for each in others if each.name.startswith(f"{width}.")):
        for part in ("loss", "kl"):
            gap = difference(getattr(damage, part), getattr(other.damage, part))
            name = f"{row.name}_less_{other.name.removeprefix(f'{width}.')}.{part}"
            yield name, gap.value, "nats", (gap.low, gap.high)


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"gptq-awq": bench_gptq_awq}
