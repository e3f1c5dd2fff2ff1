"""One control that changes a figure, with a static small-multiple above it for readers without a kernel.

    def draw(ax, length, kv_heads): ...
    explore(draw, length=(128, 4096, 128), kv_heads=[1, 2, 8], static=[dict(length=128), dict(length=4096)])

All chapters ("Play").
"""

import textwrap
from collections.abc import Callable
from typing import Any

from minillm.lab import plots


def explore(
    draw: Callable, *, static: list[dict] | None = None, height: float = plots.HEIGHT, **controls: Any
) -> None:
    """Draw `draw(ax, **values)` again at every change of a control.

    A control is (low, high), (low, high, step) or (low, high, step, start) for a slider, a list for a menu, True or
    False for a box, or any ipywidgets control. `static` lists settings to draw side by side, without a kernel;
    a setting leaves out what keeps its starting value.
    """
    import ipywidgets
    import matplotlib.pyplot as plt
    from IPython.display import display

    made = {name: control(name, value) for name, value in controls.items()}
    start = {name: widget.value for name, widget in made.items()}
    if static:
        _, axes = plots.figure(1, len(static), height=min(height, 2.8))
        for ax, setting in zip([axes] if len(static) == 1 else axes, static):
            draw(ax, **{**start, **setting})
            settings = ", ".join(f"{label(key)} {value}" for key, value in setting.items())
            told = textwrap.fill(ax.get_title(), 84 // len(static))  # what the figure itself has to say
            ax.set_title(f"{settings}\n{told}" if told else settings, fontsize=7.5)
        plt.show()

    def redraw(**values):
        _, ax = plots.figure(height=height)
        draw(ax, **values)
        plt.show()

    output = ipywidgets.interactive_output(redraw, made)
    output.layout.min_height = f"{height * plots.DPI:.0f}px"  # the page does not jump while a figure is redrawn
    display(ipywidgets.VBox([*made.values(), output]))


def label(name: str) -> str:
    return name.replace("_", " ")


def control(name: str, value: Any):
    """An ipywidgets control from its short form. Sliders report when they are let go, not on the way."""
    import ipywidgets

    style = {"style": {"description_width": "initial"}, "description": label(name)}
    if isinstance(value, bool):
        return ipywidgets.Checkbox(value=value, **style)
    if isinstance(value, list):
        return ipywidgets.Dropdown(options=value, value=value[0], **style)
    if isinstance(value, tuple) and len(value) in (2, 3, 4):
        low, high, step, start = (*value, *(None, None))[:4] if len(value) == 2 else (*value, None)[:4]
        whole = all(isinstance(v, int) for v in value)
        slider = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
        step = step or (1 if whole else (high - low) / 20)
        size = {"layout": {"width": "420px"}}
        first = low if start is None else start
        return slider(value=first, min=low, max=high, step=step, continuous_update=False, **style, **size)
    if isinstance(value, ipywidgets.Widget):
        return value
    raise ValueError(f"control {name!r}: expected a tuple, a list, a bool or a widget, got {value!r}")
