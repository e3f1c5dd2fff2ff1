"""The steps between logits and a token, each for a batch in which every row has its own value.

Chapter 01. Each function takes float32 logits [batch, vocab] and one value a row [batch], and returns new
logits in which a dropped token is -inf; `draw` turns weights into token ids. `sampling.py` orders the steps.
Top-p is the nucleus of Holtzman et al. 2020 (arXiv:1904.09751), min-p is from Nguyen et al. 2024
(arXiv:2407.01082), the repetition penalty from Keskar et al. 2019 (arXiv:1909.05858).
"""

import torch

LARGEST = torch.finfo(torch.float32).max
PART = 256  # of a row, in `likeliest`


def likeliest(logits):
    """logits.argmax(-1) [...]: the lowest id of the largest; a NaN counts as the largest.

    On a CPU torch looks for a place one number at a time, for a value many at once (24 rows of 49152: 0.96 ms and
    0.04). So the largest of each part comes first, and the place is sought among those, then in one part.
    """
    parts = logits.shape[-1] // PART
    if logits.device.type != "cpu" or parts < 2:
        return logits.argmax(-1)
    head, tail = logits.split((parts * PART, logits.shape[-1] - parts * PART), dim=-1)
    tops = head.unflatten(-1, (parts, PART)).amax(-1)  # [..., parts]
    part = tops.argmax(-1, keepdim=True)  # [..., 1]
    inside = head.gather(-1, part * PART + torch.arange(PART)).argmax(-1, keepdim=True)  # [..., 1]
    best = part * PART + inside  # [..., 1]
    if tail.shape[-1]:
        last = tail.argmax(-1, keepdim=True)  # [..., 1]
        two = torch.cat((logits.gather(-1, best), tail.gather(-1, last)), dim=-1)  # [..., 2]
        best = torch.where(two.argmax(-1, keepdim=True) == 0, best, parts * PART + last)
    return best.squeeze(-1)


def apply_penalties(logits, in_prompt, output_counts, repetition, frequency, presence):
    """Make what was already said less likely.

    logits, in_prompt (bool), output_counts [batch, vocab]; repetition, frequency, presence [batch].
    """
    in_output = output_counts > 0
    factor = torch.where(in_prompt | in_output, repetition[:, None], 1.0)  # [batch, vocab]
    penalised = torch.where(logits > 0, logits / factor, logits * factor)  # towards -inf on both sides of 0
    penalised = penalised - frequency[:, None] * output_counts - presence[:, None] * in_output
    # Huge logits must not overflow to inf, and a masked token (-inf) stays masked.
    return penalised.clamp(-LARGEST, LARGEST).masked_fill(logits.isneginf(), -torch.inf)


def apply_temperature(logits, temperature):
    """Sharpen (below 1) or flatten (above 1). logits [batch, vocab], temperature [batch]; 0 is left as it is.

    The largest logit becomes 0 first. That changes no probability, and nothing can overflow upwards.
    """
    temperature = torch.where(temperature > 0, temperature, 1.0)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def mask_min_p(logits, min_p):
    """Drop tokens with probability under min_p times the largest. logits [batch, vocab], min_p [batch]."""
    floor = logits.amax(-1) + min_p.log()  # [batch]; in logits a ratio is a difference
    return logits.masked_fill(logits < floor[:, None].float(), -torch.inf)


def mask_top_k(logits, top_k):
    """Keep the k largest, and all that equal the k-th. logits [batch, vocab], top_k [batch], 1 or more."""
    top_k = top_k.clamp(max=logits.shape[-1]).long()
    largest = logits.topk(int(top_k.max())).values  # [batch, largest k], descending
    kth = largest.gather(-1, top_k[:, None] - 1)  # [batch, 1]
    return logits.masked_fill(logits < kth, -torch.inf)


def mask_top_p(logits, top_p, head=4096):
    """Keep the smallest set of likeliest tokens that reaches top_p. logits [batch, vocab], top_p [batch].

    The token that crosses top_p stays, so there is always one. Of equal tokens at the border the lower ids
    stay. The likeliest `head` tokens nearly always suffice: finding 4096 of 49152 costs an eighth of a sort.
    """
    ordered = logits.topk(min(head, logits.shape[-1])).values  # [batch, head], descending
    kept = _nucleus_size(logits, ordered, top_p)
    if ordered.shape[-1] < logits.shape[-1] and bool((kept == head).any()):
        ordered = logits.sort(dim=-1, descending=True).values  # [batch, vocab]
        kept = _nucleus_size(logits, ordered, top_p)
    least = ordered.gather(-1, kept[:, None] - 1)  # [batch, 1]: the last one kept
    keep = logits >= least  # [batch, vocab]
    surplus = keep.sum(-1) - kept  # [batch]: equals of the last one that have to go, the highest ids first
    if bool((surplus > 0).any()):
        equal = logits == least  # [batch, vocab]
        keep &= ~equal | (equal.cumsum(-1) <= (equal.sum(-1) - surplus)[:, None])
    return logits.masked_fill(~keep, -torch.inf)


def draw(weights, uniforms):
    """One index a row, with probability weight / sum. weights [batch, vocab], uniforms [batch] in [0, 1)."""
    # float32 would lose the tail; one copy, summed in place, halves the memory traffic.
    cumulative = weights.to(torch.float64, copy=True).cumsum_(-1)  # [batch, vocab]
    point = uniforms * cumulative[:, -1]  # [batch]; below the total, since a float64 under 1 is at most 1 - 2**-53
    # right=True: the first index whose cumulative sum exceeds the point. Its weight is above 0.
    index = torch.searchsorted(cumulative, point[:, None], right=True)[:, 0]  # [batch]
    return index.clamp(max=weights.shape[-1] - 1)  # only a NaN row needs this


def _nucleus_size(logits, ordered, top_p):
    peak = ordered[:, :1]  # [batch, 1]
    total = (logits - peak).exp().sum(-1, dtype=torch.float64)  # [batch]
    likeliest = (ordered - peak).double().exp()  # [batch, head]: probability times total
    before = likeliest.cumsum(-1) - likeliest  # [batch, head]: mass of all that rank higher; starts at exactly 0
    return (before < (top_p * total)[:, None]).sum(-1).clamp(min=1)  # [batch]
