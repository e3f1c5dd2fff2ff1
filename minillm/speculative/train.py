"""Train what drafts for a model: Medusa heads, an EAGLE layer, or a small model. The target stays as it is.

Chapter 17. `python -m minillm.speculative.train --what medusa --minutes 6`. All three learn from the target's whole
distributions, not from the text's one next token: a draft is right when it says what the target would say.

    medusa   head d at i:   KL(p(. | ..i+d), head d)           Medusa-1 (arXiv:2401.10774): the target is frozen
    eagle    f'_{i+1}:      smooth L1 to f_{i+1} + KL(p(. | ..i+1), head(f'_{i+1}))                (arXiv:2401.15077)
             then once more with f' in place of f below it, as when it drafts        (the idea of arXiv:2503.01840)
    draft    q at i:        KL(p(. | ..i), q), from `tiny-draft`'s weights on       DistillSpec (arXiv:2310.08461)

Batches depend on (seed, step) alone, as in `minillm.model.train`, whose parts are used here; `--resume` goes on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from minillm.errors import ParamsError, illegal
from minillm.model import corpus
from minillm.model.decoder import Decoder
from minillm.model.export import export
from minillm.model.hub import cache_folder, resolve
from minillm.model.muon import Muon
from minillm.model.train import Progress, Recipe, load_checkpoint, make_batch, rate_factor, save_checkpoint
from minillm.model.weights import load_model
from minillm.speculative.eagle import EagleHead
from minillm.speculative.heads import heads_path, save_heads
from minillm.speculative.medusa import HEADS, MedusaHeads

KINDS = ("medusa", "eagle", "draft")
RECIPE = Recipe(batch=1024, muon_rate=0.005, adam_rate=0.002, warmup=20, cooldown=0.5)
SHARE = 4  # Medusa scores every 4th place of a batch: its heads cost a vocabulary each
RANKS = 8  # guesses a depth whose accuracy is measured
FADE = 0.8  # a later Medusa head counts less in the loss, as in the paper


def kl(target: Tensor, draft: Tensor) -> Tensor:
    """Mean KL(p, q) in nats of two sets of logits [..., vocab]."""
    p, q = target.float().log_softmax(-1).flatten(0, -2), draft.float().log_softmax(-1).flatten(0, -2)
    return F.kl_div(q, p, log_target=True, reduction="batchmean")


def medusa_loss(target: Decoder, heads: MedusaHeads, tokens: Tensor, step: int) -> Tensor:
    """tokens [sequences, time]. Places step % SHARE, + SHARE, ... of each sequence."""
    count = len(heads.layers)
    with torch.no_grad():
        h = target.hidden(tokens)  # [sequences, time, hidden]
        at = torch.arange(step % SHARE, tokens.shape[1] - count, SHARE)
        wanted = [target.logits(h[:, at + d]) for d in range(1, count + 1)]  # [sequences, places, vocab] each
    said = heads(h[:, at])  # [sequences, places, heads, hidden]
    return sum(FADE**d * kl(wanted[d], target.logits(said[:, :, d])) for d in range(count))


def eagle_loss(target: Decoder, head: EagleHead, tokens: Tensor, step: int) -> Tensor:
    with torch.no_grad():
        features = target.hidden(tokens)  # [sequences, time, hidden]
        embedded, wanted = target.embed(tokens[:, 1:]), target.logits(features[:, 1:])
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)  # of the pairs
    said = head(features[:, :-1], embedded, positions)  # [sequences, time - 1, hidden]
    below = torch.cat((features[:, :1], said[:, :-1]), 1)  # the draft's own features, one place later
    again = head(below, embedded, positions)
    losses = [F.smooth_l1_loss(x, features[:, 1:]) + kl(wanted, target.logits(x)) for x in (said, again)]
    return losses[0] + losses[1]


def draft_loss(target: Decoder, draft: Decoder, tokens: Tensor, step: int) -> Tensor:
    with torch.no_grad():
        wanted = target(tokens)
    return kl(wanted, draft(tokens))


LOSSES = {"medusa": medusa_loss, "eagle": eagle_loss, "draft": draft_loss}


def make_student(what: str, target: Decoder, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if what == "medusa":
        return MedusaHeads(target.config.hidden_size, HEADS)
    if what == "draft":
        return load_model("tiny-draft", dtype="float32", device="cpu").requires_grad_(True)
    head, hidden = EagleHead(target.config), target.config.hidden_size
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.02)
        head.fuse.weight[:, hidden:] += torch.eye(hidden)  # at first: the feature as it came
        head.norm.weight.copy_(target.norm.weight)
    return head


def make_optimizers(student: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for embeddings, biases and norms."""
    embeddings = {id(m.weight) for m in student.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in student.parameters() if p.dim() == 2 and id(p) not in embeddings]
    inside = {id(p) for p in matrices}
    others = [p for p in student.parameters() if id(p) not in inside]
    found = [
        Muon(matrices, lr=recipe.muon_rate),
        torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def run(
    what: str,
    target: Decoder,
    student: nn.Module,
    sources: dict[str, np.ndarray],
    folder: str | Path,
    *,
    recipe: Recipe = RECIPE,
    tokens: int | None = None,
    minutes: float | None = None,
    resume: bool = False,
    save_every: float = 60.0,
    show: bool = False,
) -> Progress:
    """Train until `tokens` have been seen or `minutes` spent, over all sessions; leave a checkpoint in `folder`."""
    if what not in LOSSES:
        raise ParamsError(illegal("what", what, f"must be one of {', '.join(KINDS)}"))
    if (tokens is None) == (minutes is None):
        raise ParamsError("say how long: tokens or minutes, one of them")
    target.eval().requires_grad_(False)
    optimizers, path = make_optimizers(student, recipe), Path(folder) / "checkpoint.pt"
    progress = load_checkpoint(path, student, optimizers) if resume else Progress()
    before, last_save = progress.seconds, time.monotonic()
    began = last_save
    bar = tqdm(total=tokens or round(minutes * 60), unit="tok" if tokens else "s", disable=not show)
    while (done := progress.tokens / tokens if tokens else progress.seconds / (60 * minutes)) < 1:
        batch, _ = make_batch(sources, progress.step, recipe)  # [sequences, time]
        loss = LOSSES[what](target, student, batch, progress.step)
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate_factor(progress.step, done, recipe)
            optimizer.step()
            optimizer.zero_grad()
        progress.step, progress.tokens = progress.step + 1, progress.tokens + batch.numel()
        progress.seconds = before + time.monotonic() - began
        if progress.step % 10 == 0:
            bar.n = progress.tokens if tokens else min(round(progress.seconds), bar.total)
            bar.set_postfix_str(f"step {progress.step} loss {loss.item():.3f}")
        if time.monotonic() - last_save > save_every:
            save_checkpoint(path, student, optimizers, progress)
            last_save = time.monotonic()
    bar.close()
    save_checkpoint(path, student, optimizers, progress)
    return progress


@torch.no_grad()
def guessed_right(what: str, target: Decoder, student: nn.Module, tokens: np.ndarray, time_: int = 256) -> list:
    """[depth][rank]: how often the guess of that rank is the target's own choice (its likeliest token), given that
    the text up to there is the text; for EAGLE and a draft model one depth, for Medusa one a head."""
    rows = torch.from_numpy(np.asarray(tokens[: len(tokens) // time_ * time_], dtype=np.int64)).view(-1, time_)
    hits, seen = 0, 0
    for part in rows.split(16):
        features = target.hidden(part)
        choice = target.logits(features).argmax(-1)  # [rows, time]: the token after each place
        if what == "medusa":
            depth = len(student.layers)
            guesses = target.logits(student(features[:, :-depth])).topk(RANKS).indices  # [rows, places, heads, ranks]
            right = torch.stack([choice[:, d : time_ - depth + d] for d in range(1, depth + 1)], -1)
        elif what == "eagle":
            positions = torch.arange(time_ - 1).expand(len(part), -1)
            said = student(features[:, :-1], target.embed(part[:, 1:]), positions)
            guesses = target.logits(said).topk(RANKS).indices[:, :, None]  # [rows, places, 1, ranks]
            right = choice[:, 1:, None]
        else:
            guesses, right = student(part).topk(RANKS).indices[:, :, None], choice[:, :, None]
        hits = hits + (guesses == right[..., None]).double().sum((0, 1))  # [depths, ranks]
        seen += right.shape[0] * right.shape[1]
    return [[round(float(x), 4) for x in row] for row in hits / seen]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.speculative.train", description=__doc__.split("\n")[0])
    parser.add_argument("--what", choices=KINDS, required=True)
    parser.add_argument("--model", default="tiny", help="the target")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="training time, all sessions together (default: 10)")
    budget.add_argument("--tokens", type=int, help="training tokens, all sessions together")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where checkpoints go (default: the cache folder)")
    parser.add_argument("--export", type=Path, help="folder for the result (default: the cache folder's heads)")
    parser.add_argument("--resume", action="store_true", help="go on after a stop")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_model(args.model, dtype="float32", device="cpu")
    student = make_student(args.what, target)
    sources = corpus.training_tokens(resolve(args.model))
    held_out = sources.pop("heldout")
    folder = args.out or cache_folder() / "training" / f"{Path(args.model).name}-{args.what}"
    minutes = args.minutes or (None if args.tokens else 10)
    progress = run(
        args.what,
        target,
        student,
        sources,
        folder,
        tokens=args.tokens,
        minutes=minutes,
        resume=args.resume,
        show=True,
    )
    student.bfloat16().float()  # as it is stored
    accuracy = guessed_right(args.what, target, student, held_out)
    facts = {
        "target": Path(args.model).name,
        "parameters": sum(p.numel() for p in student.parameters()),
        **vars(progress),
        "accuracy": accuracy,
        "measured": "share of places of heldout.txt where the guess of that rank is the target's likeliest token",
    }
    place = args.export or cache_folder() / "heads"
    if args.what == "draft":
        export(student, place / f"{facts['target']}-draft-distilled", facts, torch.bfloat16)
    else:
        save_heads(student, heads_path(args.model, args.what, place), facts)
    print(f"{progress.tokens:,} tokens; the likeliest guess is right at: {[row[0] for row in accuracy]}")


if __name__ == "__main__":
    main()
