"""Prompt lookup: what followed the last few tokens when they stood here before?

Chapter 16. Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding); the reference to copy
from as in LLMA (Yang et al. 2023, arXiv:2304.04487). No model, no cache, microseconds: the draft of choice where
answers repeat their prompt (edits, quotes, code) and useless where they do not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from minillm.errors import ParamsError, illegal
from minillm.speculative.proposer import NOTHING, Context, Draft


class NGram:
    """Looks the last `longest` tokens up first, then fewer, down to `shortest`; the latest earlier place wins."""

    wants_hidden = False

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        if not isinstance(shortest, int) or shortest < 1:
            raise ParamsError(illegal("shortest", shortest, "must be a whole number of at least 1"))
        if not isinstance(longest, int) or longest < shortest:
            raise ParamsError(illegal("longest", longest, f"must be a whole number of at least shortest={shortest}"))
        self.longest, self.shortest = longest, shortest
        self._places: dict[Hashable, tuple[list[int], dict[tuple[int, ...], int]]] = {}

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        return [self._propose(context) for context in contexts]

    def _propose(self, context: Context) -> Draft:
        if context.most < 1:
            return NOTHING
        tokens, places = context.tokens, self._index(context)
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            place = places.get(tuple(tokens[-n:]))
            if place is not None:
                found = list(tokens[place : place + context.most])
                while len(found) < context.most:  # it ran into the end: the text repeats itself, so go round
                    found.append(found[len(found) - (len(tokens) - place)])
                return Draft(found)
        return NOTHING

    def _index(self, context: Context) -> dict[tuple[int, ...], int]:
        """n-gram -> the place after its latest occurrence, the one at the very end left out. Grows with the text."""
        tokens = context.tokens
        seen, places = self._places.setdefault(context.key, ([0], {}))
        for end in range(seen[0] + 1, len(tokens)):  # n-grams that end before the last token
            for n in range(self.shortest, min(self.longest, end) + 1):
                places[tuple(tokens[end - n : end])] = end
        seen[0] = len(tokens) - 1
        return places

    def observe(self, key: Hashable, start: int, hidden) -> None:
        pass

    def release(self, key: Hashable) -> None:
        self._places.pop(key, None)
