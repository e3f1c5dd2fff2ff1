"""Tensor parallelism: every rank holds a slice of every matrix, and a layer needs two all-reduces.

Chapter 18. Megatron-LM, Shoeybi et al. 2019 (arXiv:1909.08053). A matrix is cut in one of two ways:

    by columns of x @ A (rows of our weight [out, in])   every rank gives some outputs       nothing is sent
    by rows of x @ B (columns of our weight)             every rank gives a part of the sum  one all-reduce

Cut q, k, v and gate, up the first way and the projections after them the second: what the first leaves on a rank is
just what the second needs there, so attention and MLP have one all-reduce each. Attention is cut by heads. With more
ranks than KV heads each KV head is kept by several ranks. The embedding is cut by vocabulary (a rank looks up its
own ids, the others are 0, the sum is the embedding), and so is the head: its logits are gathered, for sampled rows
only, since the decoder scores no others.

`apply_tensor_parallel` changes an untouched model in place, quantised or not. Cut first, rewrite for speed after
(`pack_linears`): a packed layout cannot be cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.parallel.groups import all_gather, all_reduce
from minillm.quant.affine import Quantized
from minillm.quant.linear import QuantLinear, as_module

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """What a rank keeps of one parameter [out, in]: rows, stacked in this order, and columns. None: all of them."""

    rows: tuple[Range, ...] | None = None
    columns: Range | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        rows = whole[0] if self.rows is None else sum(end - start for start, end in self.rows)
        return (rows, *(whole[1:] if self.columns is None else (self.columns[1] - self.columns[0],)))

    def of(self, whole: Tensor) -> Tensor:
        """A copy, so that the whole can be freed."""
        if self.columns is not None:
            whole = whole[:, self.columns[0] : self.columns[1]]
        return torch.cat([whole[start:end] for start, end in self.rows or ((0, len(whole)),)])


def share(size: int, rank: int, ranks: int) -> Range:
    """The rank's part of 0 .. size - 1; sizes differ by one where they must."""
    return size * rank // ranks, size * (rank + 1) // ranks


def why_illegal(config: ModelConfig, ranks: int) -> str | None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % ranks:
        return f"must divide the {heads} query heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"must divide the {kv_heads} KV heads, or be a multiple of them"
    if config.intermediate_size % ranks:
        return f"must divide the MLP's width, {config.intermediate_size}"
    return None if config.vocab_size >= ranks else f"must be at most the vocabulary, {config.vocab_size}"


def legal_ranks(config: ModelConfig) -> list[int]:
    return [ranks for ranks in range(1, config.num_heads + 1) if why_illegal(config, ranks) is None]


def check_ranks(config: ModelConfig, ranks: int, name: str = "tensor_parallel_size") -> None:
    """ParamsError, with the legal counts, for a number of ranks that this model cannot be cut into."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ParamsError(illegal(name, ranks, "must be a whole number of at least 1"))
    if (why := why_illegal(config, ranks)) is not None:
        legal = ", ".join(map(str, legal_ranks(config)))
        raise ParamsError(illegal(name, ranks, f"{why}; this model can have {legal}"))


def kv_heads_of(config: ModelConfig, rank: int, ranks: int) -> Range:
    """The KV heads that a rank keeps: its share, or, with more ranks than KV heads, the one its query heads use."""
    if ranks <= config.num_kv_heads:
        return share(config.num_kv_heads, rank, ranks)
    head = rank * config.num_kv_heads // ranks
    return head, head + 1


def local_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """One rank's model as a config: what its KV cache is made for."""
    return config.with_changes(
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, config.num_kv_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
    )


def cut(config: ModelConfig, parameter: str, rank: int, ranks: int) -> Cut:
    """What the rank keeps of a parameter, by its name. Norms, learned positions and biases of sums are kept whole."""
    module, _, kind = parameter.rpartition(".")
    dim = config.head_dim
    heads, ffn = share(config.num_heads, rank, ranks), share(config.intermediate_size, rank, ranks)
    if module.endswith("attn.qkv"):
        kv, rows, start = kv_heads_of(config, rank, ranks), [], 0
        for (first, last), count in ((heads, config.num_heads), (kv, config.num_kv_heads), (kv, config.num_kv_heads)):
            rows.append(((start + first) * dim, (start + last) * dim))
            start += count
        return Cut(tuple(rows))
    if module.endswith("mlp.gate_up"):
        up = (ffn[0] + config.intermediate_size, ffn[1] + config.intermediate_size)
        return Cut((ffn, up) if config.gated_mlp else (ffn,))
    if module in ("embed", "head"):
        return Cut((share(config.vocab_size, rank, ranks),))
    if kind == "weight" and module.endswith("attn.out"):
        return Cut(None, (heads[0] * dim, heads[1] * dim))
    if kind == "weight" and module.endswith("mlp.down"):
        return Cut(None, ffn)
    return Cut()


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_r @ W_r.T, plus the bias once. x_r [..., in / ranks] -> y [..., out], on every rank."""

    def __init__(self, linear: nn.Module, bias: Tensor | None, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.bias, self.group = linear, bias, group

    def forward(self, x: Tensor) -> Tensor:
        y = all_reduce(self.linear(x), self.group)  # [..., out]
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows start .. of the table here; ids of other ranks' rows give 0 before the sum. [...] -> [..., hidden]."""

    def __init__(self, weight: nn.Parameter, start: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.start, self.group = weight, start, group

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)  # [..., hidden]
        return all_reduce(x.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


class VocabParallelHead(nn.Module):
    """Every rank scores its part of the vocabulary; the parts are gathered. [..., hidden] -> [..., vocab]."""

    def __init__(self, linear: nn.Module, vocab: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.vocab, self.group = linear, vocab, group

    def forward(self, hidden: Tensor) -> Tensor:
        here, ranks = self.linear(hidden), self.group.size()  # [..., about vocab / ranks]
        sizes = [end - start for start, end in (share(self.vocab, rank, ranks) for rank in range(ranks))]
        parts = all_gather(F.pad(here, (0, max(sizes) - here.shape[-1])), self.group)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes)], dim=-1)


def apply_tensor_parallel(model: Decoder, group: dist.ProcessGroup, kernel: str = "auto") -> Decoder:
    """Keep this rank's slice of every matrix, in place, and let the layers talk over the group.

    kernel: for quantised linears, as in `quantize_model`. They must be in the plain form (kernel="unpack") before.
    """
    check_untouched(model)
    config, rank, ranks = model.config, group.rank(), group.size()
    check_ranks(config, ranks)
    tied = getattr(model.head, "weight", None) is model.embed.weight
    pieces: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # all is checked and cut before anything is changed
        if name.endswith(("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")) or (name == "head" and not tied):
            pieces[name] = take(module, name, cut(config, f"{name}.weight", rank, ranks), kernel)
    embed = nn.Parameter(
        cut(config, "embed.weight", rank, ranks).of(model.embed.weight.detach()), requires_grad=False
    )
    biases = {name: module.bias for name, module in model.named_modules() if name in pieces}
    for name, piece in pieces.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, piece)
    model.embed.weight = embed
    if tied:
        model.head.weight = embed
    return wire(model, group, biases)


def check_untouched(model: Decoder) -> None:
    if not isinstance(model, Decoder):
        legal = "must be a Decoder; compile or pack it after the cut"
        raise ParamsError(illegal("model", type(model).__name__, legal))
    if isinstance(model.head, VocabParallelHead):
        raise ParamsError("model: is cut already; apply_tensor_parallel takes a whole one")


def wire(model: Decoder, group: dist.ProcessGroup, biases: dict[str, Tensor | None] | None = None) -> Decoder:
    """Turn a decoder whose weights are a rank's slices into that rank: head counts, sums, gathered logits.

    biases: those of the linears whose outputs are summed (default: what the linears have).
    """
    config, ranks = model.config, group.size()
    model.config = local_config(config, ranks)
    for index, block in enumerate(model.layers):
        block.attn.heads, block.attn.kv_heads = model.config.num_heads, model.config.num_kv_heads
        for parent, child in ((block.attn, "out"), (block.mlp, "down")):
            linear = getattr(parent, child)
            name = f"layers.{index}.{'attn' if child == 'out' else 'mlp'}.{child}"
            bias = linear.bias if biases is None else biases[name]
            linear.bias = None
            setattr(parent, child, RowParallelLinear(linear, bias, group))
    start = share(config.vocab_size, group.rank(), ranks)[0]
    model.embed = VocabParallelEmbedding(model.embed.weight, start, group)
    model.head = VocabParallelHead(model.head, config.vocab_size, group)
    return model


def take(module: nn.Module, name: str, part: Cut, kernel: str = "auto") -> nn.Module:
    """The same linear with some of its rows and their biases, or some of its columns and no bias."""
    bias = module.bias if part.columns is None else None
    bias = None if bias is None else part.of(bias.detach())
    if isinstance(module, nn.Linear):
        weight = part.of(module.weight.detach())
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return linear
    if isinstance(module, QuantLinear):
        return as_module(take_quantized(module.quantized(), name, part), bias, kernel)
    legal = 'cannot be cut: cut before it is packed; quantise with kernel="unpack"'
    raise ParamsError(f"{name} is a {type(module).__name__}, which {legal}")


def take_quantized(q: Quantized, name: str, part: Cut) -> Quantized:
    """Integers with the scales and zero points that belong to them. Groups must not be cut in two."""
    scheme, values = q.scheme, part.of(q.values)
    if scheme.granularity == "tensor":
        return Quantized(values, q.scale, q.zero, scheme)
    columns = part.columns
    if columns is not None and scheme.granularity == "group":
        if columns[0] % scheme.group_size or columns[1] % scheme.group_size:
            legal = f"must divide the {columns[1] - columns[0]} inputs of {name} on one rank"
            raise ParamsError(illegal("group_size", scheme.group_size, legal))
        columns = (columns[0] // scheme.group_size, columns[1] // scheme.group_size)
    elif columns is not None:
        columns = None  # a scale a row: every rank has the whole row's
    scales = Cut(part.rows, columns)
    return Quantized(values, scales.of(q.scale), None if q.zero is None else scales.of(q.zero), scheme)
