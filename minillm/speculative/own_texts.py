"""Texts that the target writes itself, kept with its features: what drafts for it are trained on.

Chapter 17. A draft is right when it says what the target would say, so the best text to learn from is the target's
own answers (as in Medusa's self-distillation and in DistillSpec, arXiv:2401.10774 and 2310.08461). The questions are
its own as well: behind the words that open a user's turn a chat model goes on with a question (Magpie,
arXiv:2406.08464). Where there is no chat template, it goes on with passages that it is given.

All rows of a part are written in lockstep, a token each per forward: nothing is padded, and the features (the last
hidden states, which the head scores) fall out on the way. A part is one file; a stop loses the part that was being
written. Parts depend on (seed, part) alone.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minillm.cache.contiguous import ContiguousCache
from minillm.errors import ParamsError, WeightsError, illegal
from minillm.model.decoder import Decoder
from minillm.model.sampling import Sampler, SamplingParams, SamplingState
from minillm.model.tokenizer import Tokenizer

QUESTION, ANSWER = "Q3u1e5s", "A2n4s6w"  # stand-ins that no template writes by itself
LIKELIEST = 50  # draws are from the likeliest 50: a small model does not come back from a token of the far tail


@dataclass(frozen=True)
class Plan:
    """What decides the texts, apart from the target. rows, length: of a part, in sequences and tokens. answer: tokens
    after which a turn is ended. temperatures: of the answers, row by row in turn; questions are drawn at 1. passage:
    tokens of one, where there are no turns."""

    seed: int = 0
    rows: int = 32
    length: int = 192
    answer: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.7)
    passage: int = 24

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("length", 2), ("answer", 1), ("passage", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ParamsError(illegal(name, value, f"must be a whole number of at least {least}"))
        if not self.temperatures:
            raise ParamsError(illegal("temperatures", self.temperatures, "must hold one or more"))


@dataclass(frozen=True)
class Turns:
    """What a chat template writes: before the first question, between it and its answer, before the next question."""

    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_question: tuple[int, ...]


def turns_of(tokenizer: Tokenizer) -> Turns | None:
    """None: no chat template, or one that does not keep to turns."""
    if tokenizer.chat_template is None:
        return None
    talk = [("user", QUESTION), ("assistant", ANSWER), ("user", QUESTION)]
    text = tokenizer.apply_chat_template([{"role": role, "content": said} for role, said in talk])
    opening, _, rest = text.partition(QUESTION)
    to_answer, _, rest = rest.partition(ANSWER)
    to_question, found, _ = rest.partition(QUESTION)
    parts = [tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (opening, to_answer, to_question)]
    return Turns(*parts) if found and all(parts) else None


class Speaker:
    """One row: what is written for it next, who speaks, and how that one draws."""

    def __init__(
        self,
        turns: Turns | None,
        passage: Callable[[], Sequence[int]],
        ends: Sequence[int],
        longest: int,
        states: tuple[SamplingState, SamplingState],
    ) -> None:
        self.turns, self.passage, self.ends, self.longest, self.states = turns, passage, set(ends), longest, states
        self.forced = deque(turns.opening if turns else passage())
        self.answers, self.said = turns is None, 0

    @property
    def state(self) -> SamplingState:
        return self.states[self.answers]

    def next(self, drawn: int) -> tuple[int, bool]:
        """(the next token, whether it is the target's own answer). drawn: what the target would say."""
        if self.forced:
            return self.forced.popleft(), False
        mine, token, self.said = self.answers, drawn, self.said + 1
        if self.turns is None:
            if drawn in self.ends:
                self.forced = deque(self.passage())
            return token, mine
        behind = self.turns.to_question if mine else self.turns.to_answer
        if drawn in self.ends or drawn == behind[0] or self.said >= self.longest:
            self.forced, self.answers, self.said = deque(behind), not mine, 0
            if drawn not in self.ends or drawn == behind[0]:  # the template's own end of a turn
                token = self.forced.popleft()
        return token, mine and token == drawn


@torch.inference_mode()
def write_part(
    target: Decoder,
    plan: Plan,
    part: int,
    turns: Turns | None,
    passage: Callable[[np.random.Generator, int], Sequence[int]] | None = None,
    ends: Sequence[int] = (),
    tick: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Tensor]:
    """{"tokens" [rows, length] int32, "features" [rows, length, hidden] float16, "answer" [rows, length] bool}.

    answer: where the token is the target's own answer. passage(rng, count) -> tokens, for a target without turns.
    ends: token ids that end a text. tick(tokens): called after every forward.
    """
    config, rng = target.config, np.random.default_rng((plan.seed, part))
    if plan.length > config.max_length:
        raise ParamsError(illegal("length", plan.length, f"must be at most the target's {config.max_length} tokens"))
    if turns is None and passage is None:
        raise ParamsError("passage=None: a target without a chat template needs passages to go on from")
    start, speakers = Sampler(plan.seed).start, []
    for row in range(plan.rows):
        params = [
            SamplingParams(temperature=t, top_k=min(LIKELIEST, config.vocab_size), seed=plan.seed)
            for t in (1.0, plan.temperatures[row % len(plan.temperatures)])
        ]
        states = tuple(start(one, (), 2 * (part * plan.rows + row) + i) for i, one in enumerate(params))
        give = (lambda: passage(rng, plan.passage)) if passage else (lambda: ())
        speakers.append(Speaker(turns, give, ends, plan.answer, states))
    sampler, cache = Sampler(plan.seed), ContiguousCache(config, 1, plan.length, target.dtype, target.device)
    tokens = torch.zeros(plan.rows, plan.length, dtype=torch.int32)
    features = torch.zeros(plan.rows, plan.length, config.hidden_size, dtype=torch.float16)
    answer = torch.zeros(plan.rows, plan.length, dtype=torch.bool)
    shared = min(len(turns.opening), plan.length) - 1 if turns else 0  # alike in all rows, so computed once
    if shared:
        tokens[:, :shared] = torch.tensor([[speaker.next(0)[0] for _ in range(shared)] for speaker in speakers])
        features[:, :shared] = target.hidden(tokens[:1, :shared].long().to(target.device), cache=cache).half()
        tick(plan.rows * shared)
    cache.keep([0] * plan.rows)
    column = [speaker.next(0) for speaker in speakers]  # the last forced token of each
    for place in range(shared, plan.length):
        tokens[:, place] = torch.tensor([token for token, _ in column])
        answer[:, place] = torch.tensor([mine for _, mine in column])
        hidden = target.hidden(tokens[:, place, None].long().to(target.device), cache=cache)[:, 0]  # [rows, hidden]
        features[:, place] = hidden.half()
        drawing = [row for row, speaker in enumerate(speakers) if not speaker.forced]
        drawn = [0] * plan.rows
        if drawing and place + 1 < plan.length:
            found = sampler.sample(target.logits(hidden[drawing]), [speakers[row].state for row in drawing])
            for row, token in zip(drawing, found.checked()):
                drawn[row] = token
        column = [speaker.next(token) for speaker, token in zip(speakers, drawn)]
        tick(plan.rows)
    return {"tokens": tokens, "features": features, "answer": answer}


class OwnTexts:
    """A folder of parts. The first is held out: students are measured on it, never trained."""

    def __init__(self, folder: str | Path) -> None:
        from safetensors import safe_open

        self.folder = Path(folder)
        if not (self.folder / "about.json").is_file():
            raise ParamsError(
                illegal("texts", str(folder), "must be a folder that the target's texts were written to")
            )
        self.about = json.loads((self.folder / "about.json").read_text("utf8"))
        self.parts = [safe_open(path, "pt") for path in sorted(self.folder.glob("part-*.safetensors"))]
        self.rows, self.length = self.about["plan"]["rows"], self.about["plan"]["length"]

    @property
    def tokens(self) -> int:
        """Written so far, held out or not."""
        return len(self.parts) * self.rows * self.length

    def check_fits(self, target: Decoder) -> None:
        """An error if they are another model's."""
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(target.config, name), self.about[name]
            if ours != theirs:
                raise WeightsError(
                    f"the texts in {self.folder} were written by {self.about['target']!r}, whose {name} is {theirs}; "
                    f"this target's is {ours}"
                )
        if len(self.parts) < 2:
            raise ParamsError(f"{self.folder} holds {len(self.parts)} parts: one is held out, so write at least 2")

    def batch(self, step: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """(tokens [sequences, time] int64, features [sequences, time, hidden]): rows drawn by (seed, step) alone."""
        rng = np.random.default_rng((seed, step))
        count = (len(self.parts) - 1) * self.rows
        chosen = rng.choice(count, size=min(count, max(1, tokens // self.length)), replace=False)
        parts = [(self.parts[1 + row // self.rows], int(row % self.rows)) for row in chosen]
        found = {name: [part.get_slice(name)[row] for part, row in parts] for name in ("tokens", "features")}
        return torch.stack(found["tokens"]).long(), torch.stack(found["features"]).float()

    def held_out(self) -> dict[str, Tensor]:
        """The first part, as `write_part` gave it, tokens in int64 and features in float32."""
        part = self.parts[0]
        kinds = {"tokens": torch.long, "features": torch.float32, "answer": torch.bool}
        return {name: part.get_tensor(name).to(kind) for name, kind in kinds.items()}

    @torch.inference_mode()
    def frequent(self, count: int, logits: Callable[[Tensor], Tensor], places: int = 2048) -> Tensor:
        """The `count` most frequent token ids of what is trained on, sorted [count].

        A text of 100,000 tokens holds but a few thousand different ones. So a token is counted where it stands, and
        with its probability where it could have stood: at `places` places, evenly spread, by the target's logits.
        """
        counts = torch.zeros(self.about["vocab_size"], dtype=torch.float64)
        every = max(1, (self.tokens - self.rows * self.length) // places)
        for part in self.parts[1:]:
            counts += part.get_tensor("tokens").flatten().long().bincount(minlength=len(counts))
            features = part.get_tensor("features").flatten(0, 1)[::every].float()  # [places of this part, hidden]
            for some in features.split(64):
                counts += logits(some).softmax(-1).sum(0, dtype=torch.float64)
        return counts.sort(descending=True, stable=True).indices[:count].sort().values


def write(
    target: Decoder,
    name: str,
    folder: str | Path,
    tokens: int,
    plan: Plan | None = None,
    turns: Turns | None = None,
    passage: Callable | None = None,
    ends: Sequence[int] = (),
    show: bool = False,
) -> OwnTexts:
    """Write parts into `folder` until it holds `tokens` tokens; what is there already counts. name: the target's."""
    from safetensors.torch import save_file

    plan, folder = plan or Plan(), Path(folder)
    about = {"target": name, "hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
    about |= {
        "turns": turns is not None,
        "plan": {k: list(v) if k == "temperatures" else v for k, v in asdict(plan).items()},
    }
    note = folder / "about.json"
    if note.is_file() and (found := json.loads(note.read_text("utf8"))) != about:
        odd = next(key for key in about if found.get(key) != about[key])
        raise ParamsError(f"{folder} holds texts of another run: {odd} {found.get(odd)!r} there, {about[odd]!r} now")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(about, indent=2) + "\n", "utf8")
    size = plan.rows * plan.length
    parts = max(2, -(-tokens // size))
    bar = tqdm(total=parts * size, unit="tok", desc="writing", disable=not show)
    for part in range(parts):
        path = folder / f"part-{part:04d}.safetensors"
        if path.is_file():
            bar.update(size)
            continue
        found = write_part(target, plan, part, turns, passage, ends, bar.update)
        save_file(found, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)  # a crash leaves no half of one
    bar.close()
    return OwnTexts(folder)
