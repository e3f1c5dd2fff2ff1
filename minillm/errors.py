"""The errors a caller of minillm can meet.

All are `ValueError`: the input was wrong, nothing was allocated yet, and the message says what is legal.
Catch `MinillmError` to catch every one of them and nothing else.
"""


class MinillmError(ValueError):
    """Base of all errors below."""


class ConfigError(MinillmError):
    """A model's config.json is incomplete, contradictory or out of range."""


class WeightsError(MinillmError):
    """A weight file is missing, cut short, unsafe, or does not fit its config."""


class UnknownModelError(MinillmError):
    """No model goes by this name here."""


class UnsupportedArchitectureError(MinillmError):
    """The model exists, but minillm has no decoder for its family."""


class PromptError(MinillmError):
    """A prompt is empty, too long, or holds a token id outside the vocabulary."""


class ParamsError(MinillmError):
    """A sampling parameter or an engine option is outside its legal range."""


class LogitsError(MinillmError):
    """The model gave one row of logits that no token can be drawn from (NaN, +inf, or all masked)."""


def illegal(argument: str, value: object, legal: str) -> str:
    """The one form of message for a bad argument: `top_p=2: must be above 0 and at most 1`."""
    try:
        shown = repr(value)
    except ValueError:  # Python refuses to print whole numbers of more than 4300 digits
        shown = "(a huge number)"
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return f"{argument}={shown}: {legal}"
