"""Linears of a compiled decoder on a CPU, in C++: right for one row and for a batch (`linear.cpp` has the loops).

Chapter 10. A library has to choose an order of W for a number of rows; oneDNN's is slow for a few, and torch has none
for 16 bits on a processor without instructions for them. Here W lies in panels that suit any number of rows; 16 bits
are multiplied in pairs, where the processor can, or widened as they are read; and a row's output does not depend on
the rows beside it, to the last bit.

Bytes: W, once, in its own dtype. FLOPs: 2 x rows x in x out. Up to about 8 rows the bytes set the time
(smollm2-135m's layers, float32, AVX-512, 2 cores: 16 ms for 1 row, 15 for 8, 21 for 16, 36 for 32).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.kernels.cpp import DTYPES, library, why_not
from minillm.model.decoder import MLP, Decoder, replace_linears
from minillm.model.layout import faster_linear, row_at_a_time


class TiledLinear(nn.Module):
    """y = x @ W.T + b with W in panels [panels, in, wide], summed in float32. x [..., in] in W's dtype -> [..., out]
    in the same. Inference only. wide: outputs of a panel, which linear.cpp chose for this processor."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = panels(linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        y = product(x.float(), self.packed, self.in_features, self.out_features)  # [..., out]
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def panels(weight: Tensor) -> Tensor:
    """weight [out, in] as the loop reads it, zeros behind it: [panels, in, wide]; of 16 bits, where the processor
    multiplies pairs, [panels, in / 2, wide, 2]."""
    wide, pair = library().linear_wide(), 2 if weight.dtype == torch.bfloat16 and library().linear_pairs() else 1
    weight = nn.functional.pad(weight, (0, -weight.shape[1] % pair, 0, -weight.shape[0] % wide))
    split = weight.unflatten(1, (-1, pair)).unflatten(0, (-1, wide))  # [panels, wide, in / pair, pair]
    packed = split.transpose(1, 2).contiguous()  # [panels, in / pair, wide, pair]
    return packed if pair == 2 else packed.squeeze(-1)


def whole(packed: Tensor, inputs: int, outputs: int) -> Tensor:
    """The weight [outputs, inputs] behind its `panels`."""
    paired = packed if packed.dim() == 4 else packed.unsqueeze(-1)
    return paired.transpose(1, 2).flatten(2).flatten(0, 1)[:outputs, :inputs]


class TiledMLP(nn.Module):
    """The gated MLP of two TiledLinears as one call: what lies between them stays in a cache and in float32.
    x [..., hidden] -> [..., hidden]. To a compiled decoder it is one more linear.

    gate_up: the panels of gate, then those of up."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.in_features, self.out_features = mlp.gate_up.in_features, mlp.down.out_features
        self.ffn = mlp.down.in_features
        self.gate_up, self.down = mlp.gate_up.packed, mlp.down.packed
        if self.ffn % library().linear_wide():  # a panel has some of both
            weight = whole(self.gate_up, self.in_features, 2 * self.ffn)
            self.gate_up = torch.cat([panels(part) for part in weight.chunk(2)])

    def forward(self, x: Tensor) -> Tensor:
        rows = checked(x.float(), self.in_features)
        y = torch.empty((*x.shape[:-1], self.out_features), dtype=torch.float32)
        library().mlp(
            self.down.dtype == torch.bfloat16,
            *(rows.numel() // self.in_features, self.in_features, self.ffn),
            *(tensor.data_ptr() for tensor in (rows, self.gate_up, self.down, y)),
            torch.get_num_threads(),
        )
        return y.to(x.dtype)


def joins(mlp: nn.Module) -> bool:
    """Whether a TiledMLP can stand for it: gated by silu, no bias, both products tiled, as wide out as in."""
    parts = [getattr(mlp, name, None) for name in ("gate_up", "down")]
    tiled = all(isinstance(part, TiledLinear) and part.bias is None for part in parts)
    return tiled and mlp.gated and mlp.activation == "silu" and parts[0].in_features == parts[1].out_features


def checked(x: Tensor, inputs: int) -> Tensor:
    """x [..., inputs] as the kernels read it. ParamsError, if it is another's."""
    if x.shape[-1] != inputs or x.dtype != torch.float32 or x.device.type != "cpu":
        legal = f"must be [..., {inputs}] of float32 on a CPU"
        raise ParamsError(illegal("x", f"{list(x.shape)} of {x.dtype} on {x.device}", legal))
    return x.contiguous()


def product(x: Tensor, packed: Tensor, inputs: int, outputs: int) -> Tensor:
    """x [..., inputs] float32, packed: `panels` of a weight [outputs, inputs] -> [..., outputs] float32."""
    x = checked(x, inputs)
    held = (packed.shape[1] * packed.shape[3:].numel(), packed.shape[0] * packed.shape[2])
    if held[0] < inputs or held[1] < outputs:
        raise ParamsError(illegal("packed", list(packed.shape), f"must be the panels of a [{outputs}, {inputs}]"))
    rows = x.numel() // inputs
    y = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32)
    library().linear(
        packed.dtype == torch.bfloat16,
        *(rows, inputs, outputs),
        *(tensor.data_ptr() for tensor in (x, packed, y)),
        torch.get_num_threads(),
    )
    return y


def tile_linears(model: Decoder) -> Decoder:
    """Replace every linear in place: by a TiledLinear, or, of 16 bits on a processor with instructions that
    `linear.cpp` does not know, by what `faster_linear` has; then every MLP that `joins`, by a TiledMLP."""

    def make(name: str, linear: nn.Linear) -> nn.Module | None:
        weight = linear.weight
        if weight.dtype in DTYPES and why_not(weight.dtype, weight.device) is None:
            narrow = weight.dtype == torch.bfloat16
            if not narrow or library().linear_pairs() or row_at_a_time(linear):
                return TiledLinear(linear)
        return faster_linear(linear)

    replace_linears(model, make)
    for block in model.layers:
        if joins(block.mlp):
            block.mlp = TiledMLP(block.mlp)
    return model
