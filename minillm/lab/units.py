"""Numbers with units, written as a person would say them: 1.07 GB, 3.2 ms, 41 tokens/s. All chapters."""

import math

# Units that take a prefix. Powers of 1000 throughout: 1 GB is 10^9 bytes; 1 GiB, 2^30 bytes, is asked for by name.
PREFIXED = {"B", "B/s", "FLOP", "FLOP/s", "s", "params", "W", "J", "tokens", "FLOP/B"}
ALIASES = {"bytes": "B", "byte": "B", "seconds": "s", "flops": "FLOP", "FLOPs": "FLOP", "bytes/s": "B/s"}
LARGE = ["", "k", "M", "G", "T", "P", "E"]
SMALL = ["", "m", "µ", "n", "p"]
BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def scale(value: float, unit: str) -> tuple[float, str]:
    """(factor, unit with prefix) so that value / factor lies in [1, 1000). Unknown units keep factor 1."""
    unit = ALIASES.get(unit, unit)
    if unit in BINARY:
        return BINARY[unit], unit
    if unit not in PREFIXED or value == 0 or not math.isfinite(value):
        return 1.0, unit
    power = math.floor(math.log10(abs(value)) / 3 + 1e-12)
    if power >= 0:
        power = min(power, len(LARGE) - 1)
        return 1000.0**power, LARGE[power] + unit
    if unit != "s":
        return 1.0, unit
    power = max(power, -(len(SMALL) - 1))
    return 1000.0**power, SMALL[-power] + unit


def show(value: float | None, unit: str = "", digits: int = 3) -> str:
    """`show(1.0737e9, "B")` is "1.07 GB"; `show(2**30, "GiB")` is "1 GiB": bytes in, binary unit out."""
    if value is None:
        return "not measured"
    value = float(value)
    factor, label = scale(value, unit)
    return f"{number(value / factor, digits)} {label}".strip()


def number(value: float, digits: int = 3) -> str:
    """Significant digits without an exponent where a person would not write one."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size >= 6 or size < -4:
        return f"{value:.{digits}g}"
    text = f"{round(value, digits - 1 - size):,.{max(0, digits - 1 - size)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
