"""torch.compile for the decode step: the same layers, in a few generated kernels instead of hundreds of calls.

Chapter 10. PyTorch 2, Ansel et al. 2024 (ASPLOS, doi 10.1145/3620665.3640366). A decode step spends much of its time
between kernels. Compiled, norms, RoPE, activations and residuals melt into the loops around them. Two graphs:

- few rows (1 or 2; up to 8 of 16-bit weights where torch multiplies those a row at a time): a product is written as
  multiply and sum, which the compiler turns into one pass over W in the order it lies in memory. Shapes are frozen:
  one graph for 1, 2, 4 and 8 rows, made the first time it is needed; 3 rows are padded to 4. A linear of another
  kind takes part if it has a `row_form()`; else it is called as it is.
- more rows: the products stay calls, of what `pack` put in the linears' place (oneDNN's, or the kernels of
  `minillm.kernels.linear_cpu`), for there arithmetic sets the time; what lies between is compiled once, for any
  number of rows.

Attention stays outside both, for the cache belongs to whoever called: the graph calls back (`compiled_calls`). With
more rows the projection behind it is part of that call, for a call costs up to 100 us while weights sweep the caches.
Where `whole` can do all layers in one call, no graph is made: that leaves nothing between the kernels at all.
Layers of one kind are compiled once (63 seconds became 20: smollm2-135m, 1 row). What it costs: float32 weights are
held in two layouts (the head's are not, where they are the embedding; 4-bit codes may be too), and making a graph
takes a while: `compile_seconds` says how long.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import math
import shutil
import time
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from minillm.model.attention import LayerInfo
from minillm.model.compiled_calls import Callback, called_linears, register
from minillm.model.config import ModelConfig
from minillm.model.decoder import Block, Decoder, KVCache
from minillm.model.layout import pack_linears, row_at_a_time
from minillm.model.rope import cos_sin, inverse_frequencies
from minillm.model.row_linear import RowLinear

log = logging.getLogger(__name__)

FEW = (1, 2)  # rows; from 3 on, a packed product is as fast as a pass over W with a sum for each row
FEW_OF_16_BITS = (1, 2, 4, 8)  # where oneDNN has none: a step of 8 rows took 86 ms, tiled 110 (smollm2-135m, AVX2)
# All models share the functions that are compiled. What differs between two (an eps, a width) is nevertheless a
# constant in each one's graph; left to itself, the compiler makes it a variable, and may fail over that.
COMPILING = {"recompile_limit": 1024, "automatic_dynamic_shapes": False, "specialize_float": True}
MANY = 0  # the key of the graph for more rows in compile_seconds


class FlatBlock(Block):
    """A Block that the compiler looks at once for all layers that differ in their tensors alone. So the number of a
    layer, which the callbacks need, is a tensor too."""

    forward = torch.compiler.nested_compile_region(Block.forward)


class FlatDecoder(Decoder):
    """A Decoder that holds its rotary frequencies as tensors, so that a graph need not work them out at each step."""

    frequencies: tuple[tuple[Tensor, float], tuple[Tensor, float]]

    def rope_tables(self, positions: Tensor) -> tuple:
        if self.config.positions != "rope":
            return None, None
        plain, local = self.frequencies
        tables = cos_sin(positions, *plain)
        return tables, (cos_sin(positions, *local) if self.config.local_layers else tables)


class WholeStep(Protocol):
    """All layers of a step in one call, for caches that let it (`minillm.kernels.layers_cpu`)."""

    def hidden(self, tokens: Tensor, positions: Tensor | None, cache: KVCache) -> Tensor | None:
        """As `Decoder.hidden`; None, and nothing done, if this cache does not."""


class CompiledDecoder:
    """A Decoder to call like any other: `hidden`, `logits`, and itself; what goes through a cache runs compiled.
    Takes the model over: its linears are packed in place.

    pack: replaces the linears, in place, by what more rows than `few_sizes` are multiplied by.
    whole: makes of the packed model what may do all layers of a step in one call; None, as it may return: nothing.
    many: whether to compile steps of more rows than `few_sizes` too: less to gain, and one more graph to wait for.
    few_sizes: rows that have a graph each, in rising order; fewer rows are padded.
    compile_seconds: rows (MANY: any above few_sizes) -> seconds that their graph took to make.
    why_eager: None, or one line that says why nothing is compiled here.
    """

    def __init__(
        self,
        model: Decoder,
        many: bool = True,
        pack: Callable[[Decoder], Decoder] = pack_linears,
        whole: Callable[[Decoder], WholeStep | None] | None = None,
    ) -> None:
        self.compile_many = many
        self.compile_seconds: dict[int, float] = {}
        self.why_eager = why_not(model)
        if self.why_eager is None:
            self.layers = [block.attn.layer for block in model.layers]
            self.key = register(self)
            linears = linears_of(model)
            called = called_linears(self.key, linears)
            self.few_sizes = FEW_OF_16_BITS if all(map(row_at_a_time, linears.values())) else FEW
            rows = {name: row_form(linear) or called[name] for name, linear in linears.items()}
            self.few = flat_copy(model, rows)
            options = {
                "guard_filter_fn": only_inputs,
                "size_asserts": False,  # 600 of them a step, half a millisecond
                "cpp.enable_floating_point_contract_flag": "fast",  # with FMA
            }
            self._few = torch.compile(_hidden, dynamic=False, fullgraph=True, options=options)
            self._few_logits = torch.compile(_logits, dynamic=False, fullgraph=True, options=options)
            self._many = torch.compile(_hidden_of_many, fullgraph=True, options=options)
        else:
            log.info("decode runs uncompiled: %s", self.why_eager)
        self.model = pack(model)
        self.whole = None if whole is None or self.why_eager is not None else whole(self.model)
        if self.why_eager is None:
            packed = linears_of(self.model)  # of more rows: two products may have become one
            self.many = flat_copy(self.model, called_linears(self.key, packed, first=len(linears)))
            for block in self.many.layers:
                block.attn.out = nn.Identity()  # `attend_out` has done it
            modules = dict(self.model.named_modules())
            self.linears = [modules.get(name) for name in (*linears, *packed)]  # None: it is part of a larger one now

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        rows = tokens.numel()
        if rows and self.whole is not None and (out := self.whole.hidden(tokens, positions, cache)) is not None:
            return out
        if cache is None or not self._ready(rows):
            return self.model.hidden(tokens, positions, cache)
        positions = cache.positions(tokens.shape) if positions is None else positions
        self.cache, self.lead = cache, tokens.shape
        size = self._size(rows)
        step, flat = (self._many, self.many) if size == MANY else (self._few, self.few)
        out = step(flat, self.key, padded(tokens.flatten(), size), padded(positions.flatten(), size))[:rows]
        self.cache = None
        return out.unflatten(0, tokens.shape) if tokens.dim() > 1 else out  # [..., hidden]

    def logits(self, hidden: Tensor) -> Tensor:
        rows = hidden.numel() // self.config.hidden_size
        known = self.whole is None or (self.why_eager is None and self._size(rows) in self.compile_seconds)
        if not known or not self._ready(rows) or (size := self._size(rows)) == MANY:
            return self.model.logits(hidden)
        out = self._few_logits(self.few, self.key, padded(hidden.flatten(0, -2), size))[:rows]  # [rows, vocab]
        return out.unflatten(0, hidden.shape[:-1]) if hidden.dim() > 2 else out

    def __call__(self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        return self.logits(self.hidden(tokens, positions, cache))

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the graph calls: q, k, v [rows, heads, dim]. Those that are no padding are handed to the cache, in the
        caller's leading shape."""
        rows, real = len(q), math.prod(self.lead)
        if rows > real or len(self.lead) > 1:
            q, k, v = (x[:real].view(*self.lead, *x.shape[1:]) for x in (q, k, v))
        out = self.cache.attend(self.layers[index], q, k, v).flatten(0, -3)
        return out if rows == real and out.is_contiguous() else padded(out, rows)

    def attend_out(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same, and the projection behind it, for one call less a layer -> [rows, 1, hidden]."""
        return self.model.layers[index].attn.out(self.attend(index, q, k, v).flatten(-2)).unsqueeze(1)

    def _size(self, rows: int) -> int:
        """The rows of the graph that takes this many; MANY above all sizes."""
        return next((size for size in self.few_sizes if size >= rows), MANY)

    def _ready(self, rows: int) -> bool:
        """Whether steps of this many rows run compiled; makes their graph the first time it is asked."""
        if self.why_eager is not None or rows == 0 or (self._size(rows) == MANY and not self.compile_many):
            return False
        if self._size(rows) not in self.compile_seconds:
            self._compile(self._size(rows))
        return self.why_eager is None

    @torch.inference_mode()
    def _compile(self, kind: int) -> None:
        """Run a step whose attention keeps nothing. A failure here is the compiler's: the model runs uncompiled."""
        start = time.perf_counter()
        rows = kind or 2 * self.few_sizes[-1] + 1
        self.cache, self.lead = Nothing(), (rows,)
        tokens, positions = (torch.zeros(rows, dtype=torch.long) for _ in range(2))  # one passed twice would stay one
        try:
            with warnings.catch_warnings(), torch._dynamo.config.patch(COMPILING):
                warnings.simplefilter("ignore")
                if kind == MANY:
                    for x in (tokens, positions):
                        torch._dynamo.mark_dynamic(x, 0)
                    self._many(self.many, self.key, tokens, positions)
                else:
                    self._few_logits(self.few, self.key, self._few(self.few, self.key, tokens, positions))
        except Exception as error:  # no single base class covers dynamo, inductor and the C++ compiler
            lines = map(str.strip, str(error).strip().splitlines())
            said = " ".join(itertools.islice(lines, 2))  # the first may only say whose error it is
            self.why_eager = f"torch.compile failed: {said}"
            log.warning("decode runs uncompiled: %s", self.why_eager)
        gc.collect()  # of what the compiler left behind: later, in the middle of a step, it took half a second
        self.compile_seconds[kind] = time.perf_counter() - start

    def __deepcopy__(self, memo: dict) -> CompiledDecoder:
        raise TypeError("a compiled decoder cannot be copied: its graphs hold its weights; copy the model before")

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype


class Nothing:
    """A cache for the first run of a graph: it keeps nothing and gives back zeros."""

    def attend(self, layer: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))


def why_not(model: Decoder) -> str | None:
    """Why this model cannot be compiled here; None: it can."""
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}, where a CUDA graph does the same"
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")):
        return "torch.compile needs a C++ compiler, and there is none"
    return None


def linears_of(model: nn.Module) -> dict[str, nn.Module]:
    """By name, nn.Linear and whatever stands in for one or for several: packed, quantised, an MLP in one call."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if hasattr(module, "out_features") and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def row_form(linear: nn.Module) -> nn.Module | None:
    """The form of a linear that compiles well for a few rows, on the same weights; None: it has none."""
    if type(linear) is nn.Linear:
        return RowLinear(linear)
    return linear.row_form() if hasattr(linear, "row_form") else None


def flat_copy(model: Decoder, linears: dict[str, nn.Module]) -> FlatDecoder:
    """The same weights, not copied, under other linears."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    skipped = {id(model.get_submodule(name)): linears[name] for name in linears}
    flat = copy.deepcopy(model, shared | skipped)
    flat.__class__ = FlatDecoder
    for block in flat.layers:
        block.__class__ = FlatBlock
        block.attn.layer = torch.tensor(block.attn.layer.index)
    if model.config.positions == "rope":
        flat.frequencies = tuple(inverse_frequencies(model.config, local, model.device) for local in (False, True))
    return flat


def padded(x: Tensor, rows: int) -> Tensor:
    """A copy of x [n, ...] with at least so many rows, zeros behind its own; and with the strides that the graph was
    made for: a view of one row may have any."""
    out = x.new_zeros((max(rows, len(x)), *x.shape[1:]))
    out[: len(x)] = x
    return out


def _hidden(flat: FlatDecoder, key: str, tokens: Tensor, positions: Tensor) -> Tensor:
    return flat.hidden(tokens, positions, Callback(key))


def _hidden_of_many(flat: FlatDecoder, key: str, tokens: Tensor, positions: Tensor) -> Tensor:
    return flat.hidden(tokens, positions, Callback(key, flat.config.hidden_size))


def _logits(flat: FlatDecoder, key: str, hidden: Tensor) -> Tensor:
    return flat.logits(hidden)


INPUTS = {"key", "tokens", "positions", "hidden"}


def only_inputs(entries) -> list[bool]:
    """Check what changes between calls, the rows and whose weights; not the hundreds of weights that stay."""
    return [entry.name.removeprefix("L['").removesuffix("']") in INPUTS for entry in entries]
