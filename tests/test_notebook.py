"""Results in a notebook: HTML, figures that belong to nobody else, progress."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

import fedipw
from fedipw import progress
from fedipw.errors import InputError
from fedipw.figures import estimates_figure, love_figure
from worlds import World, drawn

WORLD = World(
    rounds=4, seed=3, covariates=("age", "region"), changing=("battery",), metric=pl.col("age"),
    reply=-1.2 + 2.2 * pl.col("battery"), noise=0.0,
)  # fmt: skip
SETTINGS: dict[str, Any] = {"enrollment": "age + region", "participation": "battery"}
ODD = "<b>$x$</b> 北"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return every kind of result, of clients whose region has a name that breaks things."""
    folder = tmp_path_factory.mktemp("notebook")
    tables = drawn(WORLD)
    tables.write(folder)
    odd = pl.col("region").replace({"north": ODD})
    people, rounds = tables.people.with_columns(odd), fedipw.Ledger(folder / "rounds")
    population = fedipw.Population(people)
    return {
        "population": population,
        "ledger": rounds,
        "targets": fedipw.Targets.of({"age": 0.1, f"region[{ODD}]": 0.2}, se={"age": 0.01}),
        "example": fedipw.example(),
        "weights": fedipw.weigh(population, rounds, **SETTINGS),
        "calibrated": fedipw.calibrate(people.filter("enrolled"), {"age": 0.1}),
        "evaluation": fedipw.evaluate(tables.metrics, people, rounds, by="region", **SETTINGS),
        "report": fedipw.audit(people, rounds, **SETTINGS),
        "enrolled": people.filter("enrolled").drop("enrolled"),
    }


RESULTS = ("population", "ledger", "targets", "example", "weights", "calibrated", "evaluation",
           "report")  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_html_without_foreign_tags(made: dict[str, Any], name: str) -> None:
    text = made[name]._repr_html_()
    assert text.startswith(("<p>", "<div>"))
    assert "<b>" not in text
    if name in {"population", "targets"}:
        assert "&lt;b&gt;" in text


FIGURES = {
    "weights": ("plot",),
    "calibrated": ("plot",),
    "evaluation": ("plot",),
    "report": ("plot", "love_plot", "overlap_plot"),
}


@pytest.mark.parametrize(("name", "method"), [(n, m) for n, all_ in FIGURES.items() for m in all_])
def test_plots_are_figures_that_touch_nothing_else(
    made: dict[str, Any], name: str, method: str, tmp_path: Path
) -> None:
    before = dict(mpl.rcParams)
    figure = getattr(made[name], method)()
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "figure.png")  # a letter without a glyph would be a warning
    assert (tmp_path / "figure.png").stat().st_size > 5_000
    as_shown = getattr(figure, "_repr_png_", bytes)()  # a notebook needs no pyplot
    assert as_shown[1:4] == b"PNG"
    assert dict(mpl.rcParams) == before
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_title()
    assert "matplotlib.pyplot" not in sys.modules or not mpl.pyplot.get_fignums()  # type: ignore[attr-defined]


def test_intervals_are_drawn_where_they_are(made: dict[str, Any]) -> None:
    found = made["evaluation"]
    axes = found.plot("age").axes[0]
    assert "mean of age, with 95% intervals" in axes.get_xlabel()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["plain mean of the replies", "Horvitz–Thompson", "Hájek", "GREG"]
    hajek = axes.containers[2]
    segment = hajek[2][0].get_segments()[0]
    line = found.of("hajek")
    np.testing.assert_allclose(segment[:, 0], [line.low, line.high], rtol=1e-12)
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names[0] == "everyone"
    assert any("x" in name for name in names)


def test_a_love_plot_has_every_difference(made: dict[str, Any]) -> None:
    balance = made["report"].audit.balance
    axes = love_figure(balance).axes[0]
    drawn_lines = {line.get_label(): line for line in axes.lines}
    for group in balance.groups:
        expected = [one.groups[group].smd for one in balance.lines]
        found = np.asarray(drawn_lines[group].get_xdata(), dtype=np.float64)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    before, after = (
        np.abs(np.asarray(drawn_lines[name].get_xdata(), dtype=np.float64)).max()
        for name in ("enrolled", "enrolled weighted")
    )
    assert after < before


def test_letters_of_the_font_that_is_drawn_are_kept() -> None:
    rows = {"group": ["القاهرة", "Київ", "\ue000"], "estimator": "plain",
            "estimate": [1.0, 2.0, 3.0], "low": 0.5, "high": 3.5, "confidence": 0.95}  # fmt: skip
    names = estimates_figure(pl.DataFrame(rows)).axes[0].get_yticklabels()
    assert [name.get_text() for name in names] == ["القاهرة", "Київ", r"\ue000"]


def test_totals_have_balance_and_no_overlap(made: dict[str, Any]) -> None:
    population = fedipw.Population.from_totals(made["enrolled"], {"age": 0.1}, size=400)
    report = fedipw.audit(population, made["ledger"], participation="battery")
    assert len(report.plot().axes) == 1
    with pytest.raises(InputError, match="overlap needs a table of the whole population"):
        report.overlap_plot()


def test_progress_is_shown_where_it_is_wanted(
    made: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(wanted: bool | None) -> str:
        fedipw.weigh(made["population"], made["ledger"], progress=wanted, **SETTINGS)
        return capsys.readouterr().err

    assert said(None) == said(False) == ""
    shown = said(True)
    assert shown.endswith("rounds 4 of 4" + " " * (len(shown) - len(shown.rstrip()) - 1) + "\n")
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # as in a notebook
    assert said(None) == ""  # it was done before anyone would wonder
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    assert "rounds 4 of 4" in said(None)
    assert said(False) == ""
