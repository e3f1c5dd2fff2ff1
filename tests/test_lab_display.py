"""What chapters show: units, predictions, recorded figures, plots, the widget, and a light import of minillm."""

import io
import json
import subprocess
import sys

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal, units, widgets


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2**30, "B", "1.07 GB"),
        (2**30, "GiB", "1 GiB"),
        (17.18e9, "bytes", "17.2 GB"),
        (0.00321, "s", "3.21 ms"),
        (1e-6, "s", "1 µs"),
        (0, "B", "0 B"),
        (41.234, "tokens/s", "41.2 tokens/s"),
        (999.9, "B", "1,000 B"),
        (12345, "steps", "12,300 steps"),
        (0.5, "", "0.5"),
        (None, "B", "not measured"),
    ],
)
def test_units_read_as_a_person_says_them(value, unit, text):
    assert units.show(value, unit) == text


def test_fast_mode_picks(monkeypatch):
    monkeypatch.setenv("MINILLM_FAST", "1")
    assert pick("full", "quick") == "quick"
    monkeypatch.setenv("MINILLM_FAST", "0")
    assert pick("full", "quick") == "full"


def test_prediction_stands_beside_measurement(capsys):
    predict("97.bytes", 1e9, "B")
    reveal("97.bytes", 1.25e9)
    predict("97.none", None, "s")
    reveal("97.none", 2.0)
    assert capsys.readouterr().out.splitlines() == [
        "97.bytes  predicted 1 GB",
        "97.bytes  predicted 1 GB  measured 1.25 GB  ratio 1.25",
        "97.none  predicted no prediction",
        "97.none  predicted no prediction  measured 2 s",
    ]
    table = predictions()
    assert "97.bytes" in repr(table)
    assert "<td>1.25 GB</td>" in table._repr_html_()
    with pytest.raises(ValueError, match="one unit"):
        reveal("97.bytes", 1.0, "s")


@pytest.mark.parametrize("value", ["12", [1.0], 1j, {}, float("nan"), float("inf"), 10**400])
def test_a_prediction_that_is_no_number_is_one_clear_error(value):
    for call in (predict, reveal):
        with pytest.raises(ValueError, match=r"97\.odd: .* is not a finite number"):
            call("97.odd", value)


def test_recorded_figures_and_their_absence(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_MEASUREMENTS", str(tmp_path))
    nothing = recorded("decode.rate")
    assert not nothing
    assert nothing.value is None
    assert str(nothing) == "not measured"
    record = {"name": "decode.rate", "value": 3e12, "unit": "B/s", "device": "a GPU", "model": "tiny", "new_key": 1}
    (tmp_path / "a.json").write_text(json.dumps([record, {**record, "model": "other", "value": 1e12}]))
    assert str(recorded("decode.rate", model="tiny")) == "3 TB/s (a GPU)"
    assert recorded("decode.rate").value == 1e12
    (tmp_path / "b.json").write_text('[{"name": "x"}]')
    with pytest.raises(ValueError, match=r"b.json: a record lacks value"):
        recorded("x")


def test_every_figure_is_white_and_small(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_MEASUREMENTS", str(tmp_path))
    n = [64, 128, 256, 512]
    plots.scaling(n, {"naive": [x**2 * 1e-6 for x in n], "cache": [x * 1e-5 for x in n]}, "tokens", "s", "time")
    plots.bars(["a", "b"], [1e6, None], "B", title="bytes", better="less")
    plots.timeline({f"request {i}": [(i, i + 1, "prefill"), (i + 1, i + 4, "decode")] for i in range(8)})
    plots.roofline({"decode": (0.5, 1e9), "prefill": (90, 5e10)}, 1e11, 1e10)
    row = {"name": "decode", "here": 1e9, "recorded": recorded("x"), "prediction": 1.1e9, "ceiling": 2e9}
    both = plots.beside([row, {"name": "prefill", "here": 2e9}], "B/s")
    alone = plots.beside([{"name": "decode", "here": 1e9}], "B/s")
    assert [t.get_text() for t in both.get_legend().get_texts()] == ["here", "recorded GPU", "prediction", "ceiling"]
    assert [t.get_text() for t in alone.get_legend().get_texts()] == ["here"]  # names only what is drawn
    plots.beside([row], "B/s", log=True)
    for number in plt.get_fignums():
        buffer = io.BytesIO()
        plt.figure(number).savefig(buffer, format="png")
        assert len(buffer.getvalue()) < 60_000
        assert plt.figure(number).get_facecolor() == (1, 1, 1, 1)
    plt.close("all")
    assert plots.slope(n, [x**2 for x in n]) == pytest.approx(2.0)


def test_explore_draws_the_static_figures_and_reacts_to_its_slider(monkeypatch):
    drawn, shown = [], []
    monkeypatch.setattr("IPython.display.display", shown.append)
    explore(
        lambda ax, n, kind: drawn.append((n, kind)), n=(1, 9, 2), kind=["a", "b"], static=[{"n": 3}, {"kind": "b"}]
    )
    assert drawn == [(3, "a"), (1, "b"), (1, "a")]
    slider = shown[-1].children[0]
    assert type(slider).__name__ == "IntSlider"
    assert slider.continuous_update is False
    slider.value = 5
    assert drawn[-1] == (5, "a")
    plt.close("all")


def test_static_figures_keep_what_they_say_themselves():
    explore(lambda ax, n: ax.set_title(f"{n} squared is {n * n}"), n=(1, 9, 2), static=[{"n": 3}])
    titles = [ax.get_title() for number in plt.get_fignums() for ax in plt.figure(number).axes]
    assert titles[0] == "n 3\n3 squared is 9"
    plt.close("all")


def test_controls():
    assert widgets.control("x", (0.0, 1.0)).step == 0.05
    assert widgets.control("x", (0, 8, 2, 4)).value == 4
    assert widgets.control("x", True).value is True
    with pytest.raises(ValueError, match="control 'x'"):
        widgets.control("x", "text")


def test_importing_the_package_or_the_lab_loads_nothing_heavy():
    code = (
        "import sys, minillm, minillm.lab, minillm.lab.check, minillm.lab.grade;"
        "heavy = {'matplotlib', 'ipywidgets', 'jupytext', 'torch', 'nbclient', 'nbval'} & set(sys.modules);"
        "from minillm.lab import check, predict, recorded;"
        "assert callable(check) and callable(predict) and callable(recorded);"
        "print(sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("log", [False, True])
def test_no_tick_runs_through_the_label_of_a_measurement(log):
    """The label's text box, as it is drawn, against the ticks of its row."""
    for prediction, ceiling in ((3.05, None), (2.0, 3.2), (3.3, 3.6), (1.0, None), (3.1, 30.0)):
        rows = [{"name": "a", "here": 3.0, "prediction": prediction, "ceiling": ceiling}, {"name": "b", "here": 4.0}]
        ax = plots.beside(rows, "x", log=log)
        ax.figure.canvas.draw()
        box = ax.texts[0].get_window_extent()
        for tick in (t for t in (prediction, ceiling) if t is not None):
            x = ax.transData.transform((tick, 0))[0]
            assert not box.x0 < x < box.x1, (prediction, ceiling, tick)
        plt.close(ax.figure)
