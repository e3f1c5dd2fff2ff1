"""Two multiple-choice tasks made from a text, and how they are scored.

Chapter 15. A task asks for what a model is used for; perplexity asks for everything at once. A question is a context
and some continuations; the model's answer is the one it finds likeliest:

    score(choice) = sum of log p(token | context, tokens of the choice before it) / number of tokens

Without the division ("none") long choices lose to short ones. (EleutherAI's lm-evaluation-harness divides by
characters in its acc_norm, so that models with other tokenisers compare; here two models share one.) What is asked:

    passage   32 tokens of the text; which of `ways` pieces of the text, of different lengths, comes next?
    turn      a chat whose answers are the text's own sentences; is the answer over, or which token comes next? Half
              the answers are over, half are cut inside a sentence, so that neither habit alone passes.

The questions are drawn from a text and a seed, and nothing but the reader's own text is needed to make more.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ParamsError, PromptError, illegal
from minillm.measure.quality import Interval, bootstrap
from minillm.model.tokenizer import Tokenizer

Model = Callable[[Tensor], Tensor]  # tokens [batch, time] -> logits [batch, time, vocab]
NORMALISE = ("tokens", "none")
TALK = ("What happened then?", "What do you say to that?", "And what did they do?", "Tell me more about it.")
SENTENCE = re.compile(r"(?<=[.!?] )[A-Z][A-Za-z,;' -]{30,140}\.(?= [A-Z])")


@dataclass(frozen=True)
class Question:
    """context and choices: token ids. answer: index of the right choice."""

    kind: str
    context: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer: int

    def __post_init__(self) -> None:
        if not self.context:
            raise PromptError(illegal("context", self.context, "must hold at least one token"))
        if len(self.choices) < 2 or not all(self.choices):
            raise PromptError(illegal("choices", self.choices, "must be at least two, of at least one token each"))
        if not 0 <= self.answer < len(self.choices):
            raise PromptError(illegal("answer", self.answer, f"must be from 0 to {len(self.choices) - 1}"))


@dataclass(frozen=True)
class Scores:
    """A value a question: scores [n][choices], chosen and right, indices [n]."""

    kind: str
    scores: tuple[tuple[float, ...], ...]
    chosen: Tensor
    right: Tensor

    @property
    def correct(self) -> Tensor:
        return (self.chosen == self.right).float()

    @property
    def accuracy(self) -> Interval:
        return bootstrap(self.correct, block=1)  # questions are drawn one by one: none is another's neighbour

    def flips(self, other: Scores) -> Interval:
        """Share of the questions whose answer changed from right to wrong, or from wrong to right."""
        return bootstrap((self.correct != self._same(other).correct).float(), block=1)

    def gain(self, other: Scores) -> Interval:
        """Accuracy minus the other's, paired: both answered the same questions."""
        return bootstrap(self.correct - self._same(other).correct, block=1)

    def _same(self, other: Scores) -> Scores:
        if not torch.equal(self.right, other.right):
            raise ParamsError(illegal("other", f"{len(other.right)} answers", "must be to the same questions"))
        return other


def passage(
    tokens: Sequence[int],
    count: int = 100,
    context: int = 32,
    length: tuple[int, int] = (6, 12),
    ways: int = 4,
    seed: int = 0,
) -> list[Question]:
    """Which piece comes next? The wrong ones are from elsewhere in the same text. length: of a choice, from, to."""
    tokens, (least, most) = list(tokens), length
    check_count(count, ways)
    if not isinstance(context, int) or context < 1:
        raise ParamsError(illegal("context", context, "must be a whole number of at least 1 token"))
    if not 1 <= least <= most:
        raise ParamsError(illegal("length", length, "must be (from, to) with 1 <= from <= to"))
    if len(tokens) < context + 4 * ways * most:
        raise PromptError(illegal("tokens", len(tokens), f"must be at least {context + 4 * ways * most}"))
    rng, questions = random.Random(seed), []
    for _ in range(count):
        start = rng.randint(context, len(tokens) - most)
        starts = [start]
        while len(starts) < ways:
            other = rng.randint(0, len(tokens) - most)
            if abs(other - start) >= most:  # not the right answer, or a part of it
                starts.append(other)
        choices = [tuple(tokens[i : i + rng.randint(least, most)]) for i in starts]
        questions.append(shuffled(rng, "passage", tokens[start - context : start], choices))
    return questions


def turn(tokenizer: Tokenizer, text: str, count: int = 100, ways: int = 4, seed: int = 0) -> list[Question]:
    """Is the answer over? Choices of one token: the end of turn, and tokens that a sentence of the text has there."""
    check_count(count, ways)
    end = end_of_turn(tokenizer)
    sentences = [" ".join(found.split()) for found in SENTENCE.findall(text)]
    if len(sentences) < 2 * ways:
        raise PromptError(illegal("text", f"{len(sentences)} sentences", f"must hold at least {2 * ways}"))
    rng, questions = random.Random(seed), []
    for number in range(count):
        said, *others = rng.sample(sentences, ways)
        start = tokenizer.apply_chat_template([{"role": "user", "content": rng.choice(TALK)}])
        prompt, answer = (tokenizer.encode(part, add_special_tokens=False) for part in (start, said))
        if number % 2:  # cut inside: what comes next, and not the end
            cut = rng.randint(2, len(answer) - 2)
            right, context = answer[cut], prompt + answer[:cut]
            wrong = [end, *first_tokens(tokenizer, others, {right, end}, ways - 2, rng)]
        else:  # over: the end, and not another sentence
            right, context = end, prompt + answer
            wrong = first_tokens(tokenizer, others, {end}, ways - 1, rng)
        questions.append(shuffled(rng, "turn", context, [(right,), *((token,) for token in wrong)]))
    return questions


def first_tokens(tokenizer: Tokenizer, sentences: list[str], taken: set[int], count: int, rng) -> list[int]:
    """First tokens of these sentences, each another; of words in them, where two sentences begin alike."""
    words = " ".join(sentences).split()
    found: list[int] = []
    for word in [sentence.split()[0] for sentence in sentences] + rng.sample(words, len(words)):
        token = tokenizer.encode(" " + word, add_special_tokens=False)[0]
        if token not in taken and token not in found:
            found.append(token)
        if len(found) == count:
            return found
    raise PromptError(illegal("text", "its sentences", "must have more different words"))


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The token that closes an answer in the model's own chat template."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    before = tokenizer.apply_chat_template(talk[:1])
    after = tokenizer.apply_chat_template(talk, add_generation_prompt=False)
    written = tokenizer.encode(after[len(before) :], add_special_tokens=False)
    closing = [token for token in written if token in tokenizer.eos_ids]
    if not closing:
        raise PromptError(
            "the chat template closes an answer with no end token: there is no turn task for this model"
        )
    return closing[0]


def shuffled(rng: random.Random, kind: str, context: Sequence[int], choices: list[tuple[int, ...]]) -> Question:
    """choices[0] is right; where it stands is drawn."""
    order = rng.sample(range(len(choices)), len(choices))
    return Question(kind, tuple(context), tuple(choices[i] for i in order), order.index(0))


@torch.inference_mode()
def score(model: Model, questions: Iterable[Question], normalise: str = "tokens", batch: int = 16) -> Scores:
    """The model's answers. Choices of one question that differ in their last token only cost one row together.

    Rows are padded on the right, which no token before the padding can see.
    """
    if normalise not in NORMALISE:
        raise ParamsError(illegal("normalise", normalise, f"must be one of {', '.join(NORMALISE)}"))
    questions = list(questions)
    if not questions:
        raise ParamsError(illegal("questions", "none", "must be at least one"))
    rows = sorted({q.context + choice[:-1] for q in questions for choice in q.choices}, key=len)  # what is read
    wanted: dict[tuple[int, ...], list[tuple[int, int, int, tuple[int, ...]]]] = {row: [] for row in rows}
    for i, q in enumerate(questions):
        for j, choice in enumerate(q.choices):
            wanted[q.context + choice[:-1]].append((i, j, len(q.context) - 1, choice))
    scores = [[0.0] * len(q.choices) for q in questions]
    device = getattr(model, "device", None)
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        longest = len(part[-1])
        ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in part], device=device)
        for row, logits in zip(part, model(ids)):  # [longest, vocab]
            for i, j, first, choice in wanted[row]:
                logp = logits[first : first + len(choice)].float().log_softmax(-1)  # [choice, vocab]
                found = logp[torch.arange(len(choice)), list(choice)].sum().item()
                scores[i][j] = found / len(choice) if normalise == "tokens" else found
    chosen = torch.tensor([max(range(len(row)), key=row.__getitem__) for row in scores])
    kinds = {q.kind for q in questions}
    right = torch.tensor([q.answer for q in questions])
    return Scores(kinds.pop() if len(kinds) == 1 else "mixed", tuple(map(tuple, scores)), chosen, right)


def check_count(count: int, ways: int) -> None:
    if not isinstance(count, int) or count < 1:
        raise ParamsError(illegal("count", count, "must be a whole number of at least 1 question"))
    if not isinstance(ways, int) or ways < 2:
        raise ParamsError(illegal("ways", ways, "must be a whole number of at least 2 choices"))
