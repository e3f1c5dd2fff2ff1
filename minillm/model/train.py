"""Train `tiny` and `tiny-draft` from scratch on one CPU core, and stop and go on at will.

Chapter 00. `python -m minillm.model.train --model tiny --minutes 75`. Weight matrices are moved by Muon (`muon.py`),
everything else by AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101). The learning rate warms up, stays, and falls
to zero over the last part of the run (the trapezoid of Hägele et al. 2024, arXiv:2405.18392). `--resume` goes on
after a stop; `--extend` makes a finished run longer: it goes back to where the fall began, with a larger budget.

Batches depend on (seed, step) alone, so a resumed run sees exactly what an uninterrupted one would have seen.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minillm.model import corpus
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.export import export
from minillm.model.muon import Muon

TINY = ModelConfig(
    vocab_size=corpus.VOCABULARY,
    hidden_size=192,
    intermediate_size=512,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    max_length=512,
    tie_embeddings=True,
    bos_id=0,
    eos_ids=(0, 2),
)
MODELS = {
    "tiny": TINY,
    "tiny-draft": TINY.with_changes(
        hidden_size=128, intermediate_size=320, num_layers=2, num_heads=4, num_kv_heads=1
    ),
}
LONG, LONG_EVERY = 512, 4  # every 4th batch has sequences of the full context, the others of half of it


@dataclass(frozen=True)
class Recipe:
    """What decides a run's result, apart from the texts. batch: tokens a step. cooldown: share of the run."""

    seed: int = 0
    batch: int = 3072
    muon_rate: float = 0.005
    adam_rate: float = 0.004
    weight_decay: float = 0.01
    warmup: int = 40
    cooldown: float = 0.35


@dataclass
class Progress:
    """Where a run stands: steps done, tokens seen, seconds spent, all sessions together."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def rate_factor(step: int, done: float, recipe: Recipe) -> float:
    """The trapezoid. done: share of the budget that is used up, 0 to 1."""
    warm = min(1.0, (step + 1) / recipe.warmup)
    return warm * min(1.0, max(0.0, 1 - done) / recipe.cooldown)


def make_batch(sources: dict[str, np.ndarray], step: int, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each [sequences, time] int64: random places in the sources, drawn by their share of MIX."""
    rng = np.random.default_rng((recipe.seed, step))
    time_ = LONG if step % LONG_EVERY == LONG_EVERY - 1 else LONG // 2
    names = sorted(sources)
    shares = np.array([corpus.MIX.get(name, 1.0) for name in names])
    rows = []
    for name in rng.choice(names, size=max(1, recipe.batch // time_), p=shares / shares.sum()):
        tokens = sources[name]
        start = rng.integers(0, max(1, len(tokens) - time_))
        rows.append(np.asarray(tokens[start : start + time_ + 1], dtype=np.int64))
    both = torch.from_numpy(np.stack(rows))  # [sequences, time + 1]
    return both[:, :-1], both[:, 1:]


def make_optimizers(model: Decoder, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding (which is also the head) and the norms."""
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    muon = Muon(matrices, lr=recipe.muon_rate, weight_decay=recipe.weight_decay)
    adam = torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


@torch.no_grad()
def held_out_loss(model: Decoder, tokens: np.ndarray, time_: int = LONG // 2, rows: int = 16) -> float:
    """Mean cross-entropy (nats a token) over the text in whole windows of `time_` tokens."""
    count = (len(tokens) - 1) // time_
    inputs = torch.from_numpy(np.asarray(tokens[: count * time_], dtype=np.int64)).view(count, time_)
    targets = torch.from_numpy(np.asarray(tokens[1 : count * time_ + 1], dtype=np.int64)).view(count, time_)
    total = sum(
        F.cross_entropy(
            model(inputs[i : i + rows]).flatten(0, 1), targets[i : i + rows].flatten(), reduction="sum"
        ).item()
        for i in range(0, count, rows)
    )
    return total / (count * time_)


def train_step(
    model: Decoder, optimizers: list, batch: tuple[Tensor, Tensor], factor: float, micro: int = 1536
) -> Tensor:
    """One update from one batch, in pieces of `micro` tokens so that the activations stay in the cache."""
    inputs, targets = batch  # [sequences, time]
    rows = max(1, micro // inputs.shape[1])
    total = torch.zeros(())
    for x, y in zip(inputs.split(rows), targets.split(rows)):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / targets.numel()
        loss.backward()
        total += loss.detach()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
        optimizer.zero_grad()
    return total


def save_checkpoint(path: Path, model: Decoder, optimizers: list, progress: Progress) -> None:
    """Everything a run needs to go on; written beside, then renamed, so a crash leaves the old one whole."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": vars(progress),
        "rng": torch.get_rng_state(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def load_checkpoint(path: Path, model: Decoder, optimizers: list) -> Progress:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    torch.set_rng_state(state["rng"])
    return Progress(**state["progress"])


def run(
    model: Decoder,
    sources: dict[str, np.ndarray],
    recipe: Recipe,
    folder: str | Path,
    *,
    tokens: int | None = None,
    minutes: float | None = None,
    resume: str | None = None,
    save_every: float = 180.0,
    held_out: np.ndarray | None = None,
    show: bool = False,
) -> Progress:
    """Train until `tokens` have been seen or `minutes` spent, over all sessions; leave checkpoints in `folder`.

    resume: None, "checkpoint" (the latest) or "plateau" (the one before the learning rate began to fall).
    """
    folder, optimizers = Path(folder), make_optimizers(model, recipe)
    progress = load_checkpoint(folder / f"{resume}.pt", model, optimizers) if resume else Progress()
    bar = tqdm(
        total=tokens or round(minutes * 60), unit="tok" if tokens else "s", unit_scale=bool(tokens), disable=not show
    )
    if not resume:
        (folder / "plateau.pt").unlink(missing_ok=True)
    last_save = began = time.monotonic()
    before = progress.seconds
    falling = resume == "checkpoint" and (folder / "plateau.pt").exists()
    model.train()
    while True:
        done = progress.tokens / tokens if tokens else progress.seconds / (60 * minutes)
        if done >= 1:
            break
        if 1 - done < recipe.cooldown and not falling:
            falling = True
            save_checkpoint(folder / "plateau.pt", model, optimizers, progress)
        batch = make_batch(sources, progress.step, recipe)
        loss = train_step(model, optimizers, batch, rate_factor(progress.step, done, recipe))
        progress.step, progress.tokens = progress.step + 1, progress.tokens + batch[0].numel()
        progress.seconds = before + time.monotonic() - began
        if show and progress.step % 10 == 0:
            bar.n = progress.tokens if tokens else min(round(progress.seconds), bar.total)
            bar.set_postfix_str(
                f"step {progress.step} loss {loss:.3f} {progress.tokens / progress.seconds:,.0f} tok/s"
            )
        if time.monotonic() - last_save > save_every:
            save_checkpoint(folder / "checkpoint.pt", model, optimizers, progress)
            last_save = time.monotonic()
            if held_out is not None and show:
                lost = held_out_loss(model, held_out[: 16 * LONG])
                tqdm.write(f"{progress.tokens:,} tokens: held-out loss {lost:.3f} (first 8k tokens)")
    bar.close()
    save_checkpoint(folder / "checkpoint.pt", model, optimizers, progress)
    return progress


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.model.train", description="Train tiny or tiny-draft.")
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="training time, all sessions together")
    budget.add_argument("--tokens", type=int, help="training tokens, all sessions together")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where checkpoints go (default: the cache folder)")
    parser.add_argument("--export", type=Path, help="where the finished model goes (default: the package's assets)")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_const", const="checkpoint", dest="resume", help="go on after a stop")
    start.add_argument(
        "--extend", action="store_const", const="plateau", dest="resume", help="make a finished run longer"
    )
    parser.add_argument(
        "--export-now", action="store_true", help="export the latest checkpoint as it is; do not train"
    )
    for name in ("muon-rate", "adam-rate", "cooldown", "weight-decay"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Recipe, name.replace("-", "_")))
    parser.add_argument("--batch", type=int, default=Recipe.batch, help="tokens a step")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = Recipe(
        batch=args.batch,
        muon_rate=args.muon_rate,
        adam_rate=args.adam_rate,
        cooldown=args.cooldown,
        weight_decay=args.weight_decay,
    )
    folder = args.out or corpus.cache_folder().parent / "training" / args.model
    model = init_weights(Decoder(MODELS[args.model]), recipe.seed)
    sources = corpus.training_tokens(corpus.ASSETS / args.model)
    held_out = sources.pop("heldout")
    if args.export_now:
        progress = load_checkpoint(folder / "checkpoint.pt", model, make_optimizers(model, recipe))
    else:
        tokens, minutes = args.tokens, args.minutes or (None if args.tokens else 75)
        progress = run(
            model,
            sources,
            recipe,
            folder,
            tokens=tokens,
            minutes=minutes,
            resume=args.resume,
            held_out=held_out,
            show=True,
        )
    model.eval().bfloat16().float()  # as it is shipped: the loss is of the rounded weights
    loss = held_out_loss(model, held_out)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        **vars(progress),
        "recipe": asdict(recipe),
        "held_out_loss": round(loss, 4),
        "held_out": f"nats a token on heldout.txt, windows of {LONG // 2} tokens",
        "torch": torch.__version__,
    }
    export(model, args.export or corpus.ASSETS / args.model, facts, torch.bfloat16)
    print(f"{progress.tokens:,} tokens, {progress.seconds / 60:.0f} minutes, held-out loss {loss:.4f}")


if __name__ == "__main__":
    main()
