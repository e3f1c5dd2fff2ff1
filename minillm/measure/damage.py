"""One table for chapters 11 to 14: what each method saves, what it costs in quality, and how sure that is.

Chapter 15. Every method starts from a copy of the same float32 model, sees the same calibration text, and is judged
on the same other tokens and the same questions, so every comparison is paired (`quality.py`, `choices.py`):

    saves     bytes of the weights, bytes of K and V a token; decode and prefill time against the unchanged model
    costs     perplexity / the original's, KL(original || changed), top-1 agreement, accuracy less the original's

Bytes are those of a server: what stays in floating point (embedding, head, norms) counts 2 bytes a number. All
linears but the head are quantised, groups have 64 weights; one scheme for all methods, so that methods are compared
and not settings. Values are computed on weights that lie on the grid, so that no kernel's rounding is mixed in; times
are those of the kernels that would serve them, and there is no time where a method has none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import decode, prefill
from minillm.cache.kv_format import FORMATS, kv_format
from minillm.cache.quantized import QuantizedCache
from minillm.errors import ParamsError, illegal
from minillm.measure.choices import Model, Question, Scores, score
from minillm.measure.clock import Paired, paired
from minillm.measure.counts import kv_bytes_per_token
from minillm.measure.quality import Damage, Interval, Reference
from minillm.model.decoder import Decoder
from minillm.model.layout import pack_linears
from minillm.quant.affine import Scheme
from minillm.quant.awq import awq_model
from minillm.quant.fp8 import fp8_model, why_emulated
from minillm.quant.gptq import LayerResult, gptq_model
from minillm.quant.linear import linears, quantize_model, rtn
from minillm.quant.smoothquant import channel_maxima, smooth_model
from minillm.quant.w8a8 import w8a8_model

KEEP = ("head",)
GROUP = 64
Change = Callable[[Decoder, Tensor], object]  # changes a model in place; sees calibration tokens [samples, length]


@dataclass(frozen=True)
class Method:
    """change: what it does to a copy of the model. bits: of a weight of a linear with so many inputs, scales too.

    kv: a format of the cache, or None for 16 bits. serve: puts in the kernels that would serve it, None if none can.
    """

    name: str
    chapter: int
    change: Change = lambda model, calibration: None
    bits: Callable[[int], float] = lambda inputs: 16.0
    kv: str | None = None
    serve: Callable[[Decoder], object] | None = None

    def run(self, model: Decoder) -> Model:
        """What is judged: tokens [batch, time] -> logits. K and V pass through the cache, if it has fewer bits."""
        if self.kv is None:
            return model

        def through(tokens: Tensor) -> Tensor:
            return model(tokens, cache=self.cache(model, *tokens.shape))

        through.device, through.config = model.device, model.config
        return through

    def cache(self, model: Decoder, batch: int, length: int) -> ContiguousCache | QuantizedCache:
        where = dict(dtype=model.dtype, device=model.device)
        if self.kv is None:
            return ContiguousCache(model.config, batch, length, **where)
        return QuantizedCache(model.config, batch, length, self.kv, **where)


def scheme(bits: int) -> Scheme:
    """A scale a row at 8 bits, a scale and a zero point a group below."""
    return Scheme(8) if bits == 8 else Scheme(bits, False, "group", GROUP)


def weight_only(bits: int, how: str = "") -> Method:
    """how: "" (round to nearest), "GPTQ" or "AWQ"."""
    form = scheme(bits)
    change: Change = {
        "": lambda model, calibration: round_weights(model, form),
        "GPTQ": lambda model, calibration: gptq_model(model, calibration, form, act_order=True, keep=KEEP),
        "AWQ": lambda model, calibration: awq_model(model, calibration, form, keep=KEEP),
    }[how]

    def serve(model: Decoder) -> None:
        settings = dict(bits=bits, group_size=form.group_size, symmetric=form.symmetric, keep=KEEP)
        quantize_model(model, **settings)

    fast = serve if bits in (4, 8) and not how else None  # GPTQ and AWQ are served by the same kernels
    name = f"INT{bits} {how}".strip()
    return Method(name, 12 if how else 11, change, lambda n: form.bits_per_weight((1, n), zero_bits=8), serve=fast)


@torch.no_grad()
def round_weights(model: Decoder, form: Scheme) -> None:
    for name, linear in linears(model, KEEP).items():
        linear.weight.copy_(rtn(name, linear, form).dequantize())


def w8a8(model: Decoder, calibration: Tensor | None = None) -> None:
    w8a8_model(model, keep=KEEP)


def smoothquant(model: Decoder, calibration: Tensor) -> None:
    smooth_model(model, channel_maxima(model, calibration, KEEP))
    w8a8_model(model, keep=KEEP)


def fp8(model: Decoder, calibration: Tensor | None = None) -> None:
    fp8_model(model, keep=KEEP)


def wide(inputs: int) -> float:
    """8 bits and a float32 scale a row."""
    return 8 + 32 / inputs


METHODS: tuple[Method, ...] = (
    Method("bfloat16", 1, lambda model, calibration: model.bfloat16()),
    *(weight_only(bits, how) for bits in (8, 4, 3, 2) for how in ("", *(("GPTQ", "AWQ") if bits < 8 else ()))),
    Method("W8A8", 13, w8a8, wide, serve=w8a8),
    Method("W8A8 SmoothQuant", 13, smoothquant, wide),
    Method("FP8", 13, fp8, wide, serve=fp8),
    *(Method(f"KV {name.upper()}", 14, kv=name, serve=lambda model: None) for name in FORMATS),
)


def methods(names: Iterable[str] | None = None) -> list[Method]:
    """Those of METHODS with these names, in this order; all by default."""
    known = {method.name: method for method in METHODS}
    for name in names or ():
        if name not in known:
            raise ParamsError(illegal("names", name, f"must be of {', '.join(known)}"))
    return [known[name] for name in (known if names is None else names)]


@dataclass(frozen=True)
class Row:
    """One method, judged. scores and original: the changed and the unchanged model's answers, by task.

    layers: output error of each linear / that of rounding it to the nearest, where the method tells (GPTQ and AWQ).
    """

    name: str
    chapter: int
    weight_bytes: float
    kv_bytes: float
    damage: Damage
    scores: dict[str, Scores]
    original: dict[str, Scores]
    layers: dict[str, float] = field(default_factory=dict)


def judge(
    model: Decoder,
    tokens: Tensor | list[int],
    calibration: Tensor,
    questions: dict[str, list[Question]],
    chosen: Iterable[Method] | None = None,
    window: int = 256,
    batch: int = 4,
) -> Iterator[Row]:
    """Rows as they are measured. tokens: to judge on. calibration [samples, length]: others. questions: by task."""
    reference = Reference(model, tokens, window, batch=batch)
    original = {task: score(model, asked) for task, asked in questions.items()}
    for method in METHODS if chosen is None else chosen:
        changed = copy.deepcopy(model)
        told = method.change(changed, calibration)
        results = {k: r for k, r in told.items() if isinstance(r, LayerResult)} if isinstance(told, dict) else {}
        layers = {linear: result.error / max(result.rtn_error, 1e-30) for linear, result in results.items()}
        run = method.run(changed)
        scores = {task: score(run, asked) for task, asked in questions.items()}
        sizes = weight_bytes(model, method.bits), kv_bytes(model, method.kv)
        yield Row(method.name, method.chapter, *sizes, reference.damage(run), scores, original, layers)


def weight_bytes(model: nn.Module, bits: Callable[[int], float] = lambda inputs: 16.0) -> float:
    """Every number once: 2 bytes each, those of the quantised linears `bits` of their row's length."""
    chosen = linears(model, KEEP)
    small = {id(linear.weight): bits(linear.in_features) / 8 for linear in chosen.values()}
    return sum(p.numel() * small.get(id(p), 2) for p in {id(p): p for p in model.parameters()}.values())


def kv_bytes(model: Decoder, kv: str | None = None) -> float:
    """K and V of one token of all layers, once it is rounded."""
    return kv_bytes_per_token(model.config) if kv is None else kv_format(kv).token_bytes(model.config)


def timings(
    model: Decoder, method: Method, prompt: int = 64, tokens: int = 16, repeats: int = 5
) -> tuple[Paired, Paired] | None:
    """(decode, prefill): the unchanged model as a, the served method as b, in alternation, batch 1.

    decode: `tokens` tokens after a prompt of `prompt`; prefill: that prompt. None where no kernel serves the method,
    or where FP8 would be emulated.
    """
    if method.serve is None or (method.serve is fp8 and why_emulated(model.device) is not None):
        return None
    plain = Method("", 0)
    base, served = copy.deepcopy(model), copy.deepcopy(model)
    method.serve(served)
    pair = [(plain, pack_linears(base)), (method, pack_linears(served))]  # what stays float is packed in both
    ids = torch.randint(5, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)

    def reader(form: Method, decoder: Decoder) -> Callable[[], None]:
        return lambda: prefill(decoder, ids, form.cache(decoder, 1, prompt)).argmax(-1).tolist()

    def writer(form: Method, decoder: Decoder) -> Callable[[], None]:
        cache = form.cache(decoder, 1, prompt + tokens)
        first = prefill(decoder, ids, cache).argmax(-1)  # [1]

        def run() -> None:
            cache.truncate(prompt)
            token = first
            for _ in range(tokens):
                token = decode(decoder, token, cache).argmax(-1)
            token.tolist()

        return run

    return tuple(paired(*(make(*each) for each in pair), repeats, warmup=1) for make in (writer, reader))


def as_text(rows: Iterable[Row]) -> str:
    """The table, a method a line. [low, high]: 95 % intervals, all of them paired with the original."""
    rows = list(rows)
    tasks = list(rows[0].scores) if rows else []
    heads = "".join(f"{task + ', change':>22s}{'flips':>7s}" for task in tasks)
    lines = [f"{'':16s}{'weights':>10s}{'KV/token':>9s}{'perplexity x':>22s}{'KL, nats':>26s}{'top-1':>22s}{heads}"]
    for row in rows:
        d = row.damage
        line = f"{row.name:16s}{row.weight_bytes / 1e6:7.2f} MB{row.kv_bytes:7.0f} B"
        line += f"{shown(d.ratio):>22s}{shown(d.mean_kl, 4):>26s}{shown(d.agreement):>22s}"
        for task in tasks:
            gain, flips = row.scores[task].gain(row.original[task]), row.scores[task].flips(row.original[task])
            line += f"{shown(gain, 2, '+'):>22s}{flips.value:7.2f}"
        lines.append(line)
    return "\n".join(lines)


def shown(interval: Interval, digits: int = 3, sign: str = "") -> str:
    value, low, high = (f"{x:{sign}.{digits}f}" for x in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]"
