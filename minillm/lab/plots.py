"""One plot style for the whole course, and the figures that several chapters draw.

Importing this module applies the style: Okabe and Ito's colours, which stay apart for colour-blind readers; a white
background, so that figures read in a dark theme; axes with units; sizes that keep a notebook small. All chapters.
"""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from minillm.lab import units
from minillm.lab.recorded import Recorded

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PINK, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#6E6E6E"
PALETTE = [BLUE, ORANGE, GREEN, RED, PINK, SKY, GREY]

# One meaning, one colour, in every chapter.
MEANING = {
    "naive": GREY,
    "technique": BLUE,
    "prediction": ORANGE,
    "ceiling": RED,
    "prefill": GREEN,
    "decode": BLUE,
    "waiting": "#C8C8C8",
    "recorded": PINK,
}

LABEL = 0.25  # width of a value's label, as a share of the axis
WIDTH, HEIGHT, DPI = 6.4, 3.4, 90  # inches, inches, dots per inch: 20 to 40 KB a PNG


def use() -> None:
    """Apply the course's style to matplotlib."""
    matplotlib.rcParams.update(
        {
            "figure.figsize": (WIDTH, HEIGHT),
            "figure.dpi": DPI,
            "savefig.dpi": DPI,
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "savefig.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.prop_cycle": matplotlib.cycler(color=PALETTE),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#E4E4E4",
            "grid.linewidth": 0.8,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.labelsize": 9,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "legend.fontsize": 8,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "lines.markersize": 4,
            "font.family": "DejaVu Sans",  # ships with matplotlib, so every machine draws the same
        }
    )


use()


def figure(rows: int = 1, columns: int = 1, width: float = WIDTH, height: float | None = None):
    """(figure, axes) at the course's size; a second row adds height, columns share the width."""
    height = height or (HEIGHT if rows == 1 else 2.6 * rows)
    return plt.subplots(rows, columns, figsize=(width, height))


def unit_axis(axis, unit: str, label: str) -> None:
    """Label one axis (`ax.xaxis` or `ax.yaxis`) and write its ticks with prefixes: 500 MB, 1 GB."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: units.show(value, unit)))
    axis.set_label_text(label)


def bars(labels, values, unit: str, title: str = "", ax=None, colors=None, spread=None, better: str = ""):
    """Horizontal bars with their values written out. A value of None, or an empty Recorded, says "not measured"."""
    ax = ax or figure(height=0.7 + 0.36 * len(labels))[1]
    values = [v.value if isinstance(v, Recorded) else v for v in values]
    places = np.arange(len(values))
    lengths = [0.0 if v is None else float(v) for v in values]
    ax.barh(places, lengths, color=colors or BLUE, height=0.62, xerr=spread, error_kw={"lw": 1, "capsize": 2})
    for place, value, length in zip(places, values, lengths):
        ax.annotate(
            units.show(value, unit), (length, place), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    ax.set_yticks(places, labels)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set_xlim(0, (max(lengths) or 1.0) * 1.22)
    unit_axis(ax.xaxis, unit, f"{better} is better" if better else units.ALIASES.get(unit, unit))
    ax.set_title(title)
    return ax


def slope(sizes, times) -> float:
    """The exponent p of times ~ sizes^p: the least-squares slope in log-log."""
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(times, float)), 1)[0])


def scaling(sizes, series: dict, size_label: str, unit: str, label: str, title: str = "", ax=None, fit_from: int = 0):
    """A log-log plot of each series, its fitted exponent in the legend. `fit_from`: the first index fitted."""
    ax = ax or figure()[1]
    for color, (name, times) in zip(PALETTE, series.items()):
        power = slope(sizes[fit_from:], times[fit_from:])
        ax.loglog(sizes, times, "o-", color=color, label=f"{name}: n^{power:.2f}")
    ax.set_xlabel(size_label)
    unit_axis(ax.yaxis, unit, label)
    ax.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    plain_log_ticks(ax.xaxis, sizes)
    ax.set_title(title)
    ax.legend()
    return ax


def plain_log_ticks(axis, values) -> None:
    """Tick a logarithmic axis at these values, written in full."""
    axis.set_major_locator(matplotlib.ticker.FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def timeline(rows: dict, title: str = "", ax=None, unit: str = "s", colors: dict | None = None):
    """Bars over time: rows = {"request 1": [(start, end, "prefill"), (start, end, "decode"), ...], ...}."""
    colors = {**MEANING, **(colors or {})}
    ax = ax or figure(height=0.9 + 0.3 * len(rows))[1]
    kinds = list(dict.fromkeys(kind for spans in rows.values() for _, _, kind in spans))
    spare = iter(PALETTE)
    colors = {kind: colors.get(kind) or next(spare) for kind in kinds}
    for place, spans in enumerate(rows.values()):
        for start, end, kind in spans:
            ax.barh(place, end - start, left=start, height=0.7, color=colors[kind], edgecolor="white", linewidth=0.5)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    unit_axis(ax.xaxis, unit, "time")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[kind]) for kind in kinds]
    ax.legend(handles, kinds, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.set_title(title)
    return ax


def roofline(points: dict, flops_per_s: float, bytes_per_s: float, title: str = "", ax=None):
    """The ceiling min(FLOP/s, intensity x B/s) with points = {name: (FLOP per byte, FLOP/s reached)} under it."""
    ax = ax or figure()[1]
    ridge = flops_per_s / bytes_per_s  # FLOP/B
    at = [p[0] for p in points.values()] + [ridge]
    x = np.geomspace(min(at) / 4, max(at) * 4, 200)
    ax.loglog(x, np.minimum(flops_per_s, x * bytes_per_s), color=MEANING["ceiling"], label="this machine's ceiling")
    ax.axvline(ridge, color=GREY, lw=0.8, ls=":")
    ax.annotate(
        f"ridge {ridge:.3g} FLOP/B", (ridge, 0.02), (3, 0), ("data", "axes fraction"), "offset points", fontsize=8
    )
    for color, (name, (intensity, rate)) in zip(PALETTE, points.items()):
        share = rate / min(flops_per_s, intensity * bytes_per_s)
        ax.plot(intensity, rate, "o", color=color, markersize=7, label=f"{name}: {share:.0%} of the ceiling")
    ax.set_xlabel("arithmetic intensity, FLOP/B")
    unit_axis(ax.yaxis, "FLOP/s", "speed")
    ax.set_title(title)
    ax.legend()
    return ax


def beside(rows: list[dict], unit: str, title: str = "", ax=None, log: bool = False):
    """This machine beside the recorded GPU, with prediction and ceiling on the same axis.

    Each row: {"name", "here"} and, where there are any, "recorded" (a Recorded), "prediction", "ceiling" (numbers).
    """
    ax = ax or figure(height=1.0 + 0.62 * len(rows))[1]
    numbers = [row.get(key) for row in rows for key in ("here", "prediction", "ceiling")]
    numbers += [row["recorded"].value for row in rows if row.get("recorded")]
    numbers = [v for v in numbers if v is not None]
    for place, row in enumerate(rows):
        ticks = [row[key] for key in ("prediction", "ceiling") if row.get(key) is not None]
        gpu = row.get("recorded")
        pairs = [(row["here"], MEANING["technique"], -0.2), (gpu.value if gpu else None, MEANING["recorded"], 0.2)]
        for value, color, offset in pairs if "recorded" in row else pairs[:1]:
            ax.barh(place + offset, value or 0.0, 0.36, color=color)
            text = units.show(value, unit) + (f" ({gpu.device})" if gpu and color == MEANING["recorded"] else "")
            left = value or ax.get_xlim()[0] if log else value or 0.0
            if color == MEANING["technique"]:
                left = _clear_of(left, ticks, numbers, log)
            ax.annotate(text, (left, place + offset), (5, 0), textcoords="offset points", va="center", fontsize=8)
        for key in ("prediction", "ceiling"):
            if row.get(key) is not None:
                ax.vlines(row[key], place - 0.42, place + 0.02, color=MEANING[key], lw=2.2, zorder=3)
    ax.set_yticks(range(len(rows)), [row["name"] for row in rows])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    if log:
        ax.set_xscale("log")
    else:
        ax.xaxis.set_major_locator(plt.MaxNLocator(5))  # "1,000 tokens/s" is a wide tick
    ax.set_xlim(right=max(numbers) * (6 if log else 1.25))
    unit_axis(ax.xaxis, unit, "")
    names = {"technique": "here", "recorded": "recorded GPU", "prediction": "prediction"}
    names["ceiling"] = "least possible" if unit == "s" else "ceiling"  # a bound on times lies below them
    shown = {
        "technique",
        *(key for row in rows for key in names if (key == "recorded" and key in row) or row.get(key) is not None),
    }
    handles = [plt.Rectangle((0, 0), 1, 1, color=MEANING[key]) for key in names if key in shown]
    labels = [name for key, name in names.items() if key in shown]
    ax.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)
    ax.set_title(title)
    return ax


def _clear_of(left: float, ticks: list[float], numbers: list[float], log: bool) -> float:
    """Where a value's label may begin, so that no tick runs through it: right of each one that would."""
    for tick in sorted(ticks):
        if log:
            low = min(v for v in numbers if v > 0)
            reach = left * (6 * max(numbers) / low) ** LABEL
        else:
            reach = left + LABEL * 1.25 * max(numbers)
        if left <= tick <= reach:
            left = tick
    return left
