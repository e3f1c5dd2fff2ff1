"""Stop strings in a stream: end the text before the first stop string, and never show a part of one.

Chapter 01. A stop string may begin in one token and end in another. So text that could still become a stop
string is held back until the next piece decides. What was released can never be part of a match. The outcome
is the same however the text was cut into pieces.
"""

from collections.abc import Sequence


class StopChecker:
    """Feed it pieces of text; it gives back what may be shown now. `stopped` is the stop string it met."""

    def __init__(self, stops: Sequence[str] = ()):
        self.stops = tuple(stops)
        self.stopped: str | None = None
        self._held = ""  # the longest end of the text so far with which some stop string begins

    def feed(self, piece: str) -> str:
        if self.stopped is not None:
            return ""
        text, self.stopped = truncate(self._held + piece, self.stops)
        keep = 0 if self.stopped is not None else _possible_start(text, self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """No more text will come: give back what was held."""
        held, self._held = self._held, ""
        return held


def truncate(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """(text before the stop string that is complete first, that string); (text, None) if none occurs.

    Of two that are complete at the same character, the longer wins: it starts earlier.
    """
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` might be the beginning of a stop string."""
    most = min(len(text), max(map(len, stops), default=1) - 1)
    for length in range(most, 0, -1):
        if any(stop.startswith(text[len(text) - length :]) for stop in stops):
            return length
    return 0
