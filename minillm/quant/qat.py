"""Quantisation-aware training in one page: round in the forward pass, and in the backward pass pretend not to.

Chapter 12. Rounding has slope 0 almost everywhere, so no gradient gets through it. The straight-through estimator
(Bengio et al. 2013, arXiv:1308.3432) takes it for the identity: w + stop_gradient(round(w) - w) is round(w) on the
way forward and w on the way back. Float weights collect small steps until one of them crosses to the next integer.
The loss is KL(original || rounded) on any text, the model's own included (LLM-QAT, Liu et al. 2023,
arXiv:2305.17888), so no labels and no training set are needed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder, replace_linears
from minillm.quant.affine import Quantized, Scheme, fake_quantize
from minillm.quant.calibrate import calibration_tokens
from minillm.quant.linear import linears, rtn


class StraightThroughLinear(nn.Module):
    """A linear that computes with its rounded weight and learns its float one. x [..., in] -> [..., out]."""

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone())
        self.bias, self.scheme = linear.bias, scheme

    def forward(self, x: Tensor) -> Tensor:
        rounded = fake_quantize(self.weight.detach(), self.scheme)
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


def train_rounded(
    model: Decoder,
    teacher: Decoder,
    tokens: Tensor,
    scheme: Scheme,
    *,
    steps: int = 200,
    batch: int = 8,
    lr: float = 1e-3,
    keep: Iterable[str] = ("head",),
    seed: int = 0,
) -> tuple[dict[str, Quantized], list[float]]:
    """Train the weights of model's linears so that, rounded, they answer as `teacher` does. In place.

    tokens [samples, length]; a batch is drawn at each step. Afterwards the model holds rounded float weights. Returns
    their integers by name, and the loss of each step: mean KL(teacher || model) in nats a token.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ParamsError(illegal("steps", steps, "must be a whole number of at least 1"))
    if not isinstance(batch, int) or batch < 1:
        raise ParamsError(illegal("batch", batch, "must be a whole number of at least 1 sample"))
    if not 0 < lr < float("inf"):
        raise ParamsError(illegal("lr", lr, "must be above 0"))
    tokens, chosen = calibration_tokens(model, tokens), linears(model, keep)
    replace_linears(model, lambda name, linear: StraightThroughLinear(linear, scheme) if name in chosen else None)
    trained = {name: model.get_submodule(name) for name in chosen}
    optimizer = torch.optim.Adam([linear.weight for linear in trained.values()], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        part = tokens[torch.randint(len(tokens), (batch,), generator=generator)]  # [batch, length]
        with torch.no_grad():
            wanted = teacher(part).log_softmax(-1).flatten(0, 1)  # [tokens, vocab]
        with torch.enable_grad():
            got = model(part).log_softmax(-1).flatten(0, 1)
            loss = F.kl_div(got, wanted, reduction="batchmean", log_target=True)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    found = {}
    for name, linear in trained.items():
        linear.requires_grad_(False)
        q = found[name] = rtn(name, linear, scheme)
        plain = nn.Linear(linear.weight.shape[1], linear.weight.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter(q.dequantize().to(linear.weight.dtype), requires_grad=False)
        plain.bias = linear.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, plain)
    return found, losses
