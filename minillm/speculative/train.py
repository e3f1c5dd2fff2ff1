"""Train what drafts for a model: Medusa heads, an EAGLE layer, or a small model. The target stays as it is.

Chapter 17. `python -m minillm.speculative.train --what medusa --minutes 6`, and for a chat model
`python -m minillm.speculative.train --what medusa --model smollm2-135m`. What is learned stands in `lessons.py`. A
draft model starts from `tiny-draft`'s weights; `tiny-distilled` is what became of them.

Texts. "corpus": the books of chapter 00; the target's features are computed batch by batch. "chat" and "passages":
what the target itself writes (`own_texts.py`), once, its features kept beside the text: the forward of a larger model
costs more than what its heads learn from it. Of a large vocabulary heads draft the most frequent tokens alone
(`frequent.py`).

Batches depend on (seed, step) alone, as in `minillm.model.train`, whose parts are used here; `--resume` goes on.
"""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from minillm.errors import MinillmError, ParamsError, WeightsError, illegal
from minillm.model import corpus
from minillm.model.decoder import Decoder
from minillm.model.export import export
from minillm.model.hub import PACKAGED, cache_folder, resolve
from minillm.model.layout import pack_linears
from minillm.model.muon import Muon
from minillm.model.tokenizer import load_tokenizer
from minillm.model.train import MODELS, Progress, Recipe, load_checkpoint, make_batch, rate_factor, save_checkpoint
from minillm.model.weights import load_model
from minillm.speculative.draft_model import check_same_vocabulary
from minillm.speculative.eagle import EagleHead
from minillm.speculative.frequent import DraftHead
from minillm.speculative.heads import heads_path, save_heads
from minillm.speculative.lessons import LOSSES, RANKS, guessed_right
from minillm.speculative.medusa import HEADS, MedusaHeads
from minillm.speculative.own_texts import OwnTexts, Plan, turns_of, write

KINDS = ("medusa", "eagle", "draft")
TEXTS = ("corpus", "chat", "passages")
RECIPE = Recipe(batch=1024, muon_rate=0.005, adam_rate=0.002, warmup=20, cooldown=0.5)
KEPT = 8192  # tokens of a larger vocabulary that may be drafted
OWN = 2  # batches of own texts are larger: the features are there, and Muon's step costs as much as 1000 tokens' loss


def make_student(what: str, target: Decoder, seed: int = 0, vocabulary: Tensor | None = None) -> nn.Module:
    """vocabulary: sorted ids [kept] of the tokens that heads may draft (None: all)."""
    if what not in LOSSES:
        raise ParamsError(illegal("what", what, f"must be one of {', '.join(KINDS)}"))
    torch.manual_seed(seed)
    kept = None if vocabulary is None else len(vocabulary)
    if what == "draft":
        draft = load_model("tiny-draft", dtype="float32", device="cpu").requires_grad_(True)
        check_same_vocabulary(target.config, draft.config)
        return draft
    student = fresh_eagle(target, kept) if what == "eagle" else MedusaHeads(target.config.hidden_size, HEADS, kept)
    if kept is not None:
        student.vocabulary.copy_(vocabulary)
    return student


def fresh_eagle(target: Decoder, kept: int | None) -> EagleHead:
    head, hidden = EagleHead(target.config, kept), target.config.hidden_size
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
    sources: dict[str, np.ndarray] | OwnTexts,
    folder: str | Path,
    *,
    recipe: Recipe = RECIPE,
    tokens: int | None = None,
    minutes: float | None = None,
    resume: bool = False,
    save_every: float = 60.0,
    show: bool = False,
) -> Progress:
    """Train until `tokens` have been seen or `minutes` spent, over all sessions; leave a checkpoint in `folder`.

    sources: the books' tokens by name, or the texts that the target wrote.
    """
    if what not in LOSSES:
        raise ParamsError(illegal("what", what, f"must be one of {', '.join(KINDS)}"))
    if (tokens is None) == (minutes is None):
        raise ParamsError("say how long: tokens or minutes, one of them")
    if own := isinstance(sources, OwnTexts):
        sources.check_fits(target)
    target.eval().requires_grad_(False)
    optimizers, path = make_optimizers(student, recipe), Path(folder) / "checkpoint.pt"
    progress = resumed(path, student, optimizers) if resume else Progress()
    score = DraftHead(target, getattr(student, "vocabulary", None))
    before, last_save = progress.seconds, time.monotonic()
    began = last_save
    bar = tqdm(total=tokens or round(minutes * 60), unit="tok" if tokens else "s", disable=not show)
    while (done := progress.tokens / tokens if tokens else progress.seconds / (60 * minutes)) < 1:
        if own:
            batch, features = sources.batch(progress.step, recipe.batch, recipe.seed)
        else:
            (batch, _), features = make_batch(sources, progress.step, recipe), None  # [sequences, time]
        loss = LOSSES[what](target, student, batch, progress.step, features, score)
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


def resumed(path: Path, student: nn.Module, optimizers: list) -> Progress:
    """`load_checkpoint`, with an error that says what does not fit."""
    if not path.is_file():
        raise ParamsError(f"resume=True: there is no {path} to go on from; start without it")
    try:
        return load_checkpoint(path, student, optimizers)
    except (RuntimeError, KeyError, ValueError) as error:  # another shape, another set of tensors
        raise WeightsError(
            f"{path} is of another student: {str(error).splitlines()[0]}; choose another out"
        ) from error


def own_texts(model: str, texts: str, folder: Path, tokens: int, seed: int, show: bool = True) -> OwnTexts:
    """What the target writes, in `folder`, as far as it is missing. texts: "chat", by the model's template, or
    "passages", of the books, which it goes on with."""
    tokenizer, turns, passage = load_tokenizer(model), None, None
    if texts == "chat" and (turns := turns_of(tokenizer)) is None:
        raise ParamsError(illegal("texts", texts, f"needs a chat template with turns, and {model!r} has none"))
    if turns is None:
        sources = corpus.training_tokens(tokenizer.backend)
        sources.pop("heldout")
        names = sorted(sources)

        def passage(rng: np.random.Generator, count: int) -> list[int]:
            text = sources[names[rng.integers(len(names))]]
            start = rng.integers(len(text) - count)
            return [int(token) for token in text[start : start + count]]

    target = pack_linears(load_model(model, dtype="float32", device="cpu"))
    length = min(Plan.length, target.config.max_length)
    ends = tuple(dict.fromkeys((*target.config.eos_ids, *tokenizer.eos_ids)))
    plan = Plan(seed=seed, length=length)
    return write(target, Path(model).name, folder, tokens, plan, turns, passage, ends, show)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.speculative.train", description=__doc__.split("\n")[0])
    parser.add_argument("--what", choices=KINDS, required=True)
    parser.add_argument("--model", default="tiny", help="the target")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="training time, all sessions together (default: 10)")
    budget.add_argument("--tokens", type=int, help="training tokens, all sessions together")
    parser.add_argument(
        "--texts", choices=TEXTS, help="default: corpus for tiny; else chat, passages where there is no chat template"
    )
    parser.add_argument("--write", type=int, default=100_000, help="tokens the target writes (default: %(default)s)")
    parser.add_argument("--kept", type=int, default=KEPT, help="tokens that heads may draft (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where texts and checkpoints go (default: the cache folder)")
    parser.add_argument("--export", type=Path, help="folder for the result (default: the cache folder's heads)")
    parser.add_argument("--resume", action="store_true", help="go on after a stop")
    args = parser.parse_args()
    try:
        train(args)
    except MinillmError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def train(args: argparse.Namespace) -> None:
    name, kept = Path(args.model).name, None
    for argument, least in (("kept", RANKS), ("write", 1), ("minutes", 0), ("tokens", 1), ("threads", 1)):
        value = getattr(args, argument)
        if value is not None and value < least:
            raise ParamsError(illegal(argument, value, f"must be at least {least}"))
    torch.set_num_threads(args.threads)
    folder = args.out or cache_folder() / "training"
    target = load_model(args.model, dtype="float32", device="cpu")
    if args.what == "draft":
        check_same_vocabulary(
            target.config, MODELS["tiny-draft"], load_tokenizer(args.model), load_tokenizer("tiny-draft")
        )
    usual = "corpus" if name in PACKAGED else "chat" if turns_of(load_tokenizer(args.model)) else "passages"
    texts = args.texts or usual
    if texts != "corpus":
        sources = own_texts(args.model, texts, folder / f"{name}-{texts}", args.write, args.seed)
        held_out = sources.held_out()
        if args.kept < target.config.vocab_size and args.what != "draft":
            kept = sources.frequent(args.kept, target.logits).clone()
    else:
        sources = corpus.training_tokens(load_tokenizer(args.model).backend)
        held_out = {"tokens": sources.pop("heldout")}
    student, own = make_student(args.what, target, args.seed, kept), isinstance(sources, OwnTexts)
    progress = run(
        args.what,
        target,
        student,
        sources,
        folder / f"{name}-{args.what}",
        recipe=replace(RECIPE, seed=args.seed, batch=RECIPE.batch * (OWN if own else 1)),
        tokens=args.tokens,
        minutes=args.minutes or (None if args.tokens else 10),
        resume=args.resume,
        show=True,
    )
    student.bfloat16().float()  # as it is stored
    accuracy = guessed_right(
        args.what,
        target,
        student,
        held_out["tokens"],
        features=held_out.get("features"),
        counted=held_out.get("answer"),
    )
    read = "its own answers, held out," if own else "heldout.txt"
    facts = {
        "target": name,
        "parameters": sum(p.numel() for p in student.parameters()),
        **vars(progress),
        "seed": args.seed,
        "texts": texts,
        "accuracy": accuracy,
        "measured": f"share of places of {read} where the guess of that rank is the target's likeliest token",
    }
    if own:
        facts["written"] = sources.tokens
    if kept is not None:
        covered = torch.isin(held_out["tokens"], student.vocabulary).double().mean()
        facts |= {"kept": len(kept), "covered": round(float(covered), 4)}
    place = args.export or cache_folder() / "heads"
    if args.what == "draft":
        export(student, place / f"{name}-distilled", facts, torch.bfloat16)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve("tiny-draft") / file, place / f"{name}-distilled" / file)
    else:
        save_heads(student, heads_path(args.model, args.what, place), facts)
    print(f"{progress.tokens:,} tokens; the likeliest guess is right at: {[row[0] for row in accuracy]}")


if __name__ == "__main__":
    main()
