"""Figures and page of a study: in a real browser, at two widths, with failures and many methods."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib.image import imread

from fedipw.lab.comparison import RESULT, StudyTables
from fedipw.lab.scenario import Scenario
from fedipw.lab.study import PART
from fedipw.lab.study_file import Case, Study
from fedipw.lab.study_page import MOST_CURVES, draw_curves, draw_results, study_page
from fedipw.lab.style import look_of
from fedipw.weighting.methods import METHODS

from .browser import artifacts, chromium, opened

MEASURE = "tail_excess_loss"
NAMES = ("fedavg", "participation-only", "fedipw", "efficient")


def view_of(methods: Sequence[str] = NAMES, scenarios: int = 1, seeds: int = 6) -> StudyTables:
    """A study with made-up numbers; the third method fails in two seeds of the first scenario."""
    rng = np.random.default_rng(3)
    names = {f"s{k}": f"scenario {k} with a rather long title" for k in range(scenarios)}
    rows = []
    for name in names:
        for seed in range(seeds):
            for k, method in enumerate(methods):
                lost = k == 2 and seed < 2 and name == "s0"
                loss = float(rng.gamma(2.0) * 10.0 ** (-1.0 - k % 4))
                number = None if lost else loss
                rows.append(
                    {
                        **dict.fromkeys(PART),
                        "scenario": name,
                        "method": method,
                        "seed": seed,
                        MEASURE: number,
                        "limit_excess_loss": number,
                        "bias": number,
                        "failure": "No <weights> & no luck." if lost else None,
                        "curve_round": [1, 5, 20, 50],
                        "curve_excess_loss": [loss + 1 / r for r in (1, 5, 20, 50)],
                    }
                )
    scenario = Scenario(rounds=50, methods=methods)
    study = Study(
        title="A made-up study",
        cases=tuple(Case(name=n, title=title, scenario=scenario) for n, title in names.items()),
        seeds=tuple(range(seeds)),
        reference=methods[min(1, len(methods) - 1)],
    )
    return StudyTables.of(study, pl.DataFrame(rows, schema=dict(PART)))


def page_in(directory: Path, view: StudyTables) -> Path:
    directory.mkdir(exist_ok=True)
    draw_results(directory, view)
    drawn = draw_curves(directory, view)
    page = directory / "index.html"
    page.write_text(study_page(directory, view, {"settings": {}}, curves=drawn))
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_in(tmp_path_factory.mktemp("study") / "page", view_of(scenarios=4))


def test_the_page_is_self_contained_and_escapes_what_failed(page: Path) -> None:
    text = page.read_text()
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']+)""", text)
    assert not outside, outside
    assert "FedIPW failed in 2 of 6 seeds. Seed 0: No &lt;weights&gt; &amp; no luck." in text
    assert len(re.findall(r"<svg[^>]*viewBox", text)) == 2
    assert not re.findall(
        r'\sid="[^"]*(?:figure|axes|axis|text|patch)_1"', text
    )  # in both drawings


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_any_width(page: Path, width: int, tmp_path: Path) -> None:
    with chromium() as browser, opened(browser, page, width=width) as shown:
        assert shown.locator("svg").count() == 2
        assert shown.locator("table").count() == 3 + 4 + 4
        for method in NAMES:
            assert look_of(method).label in shown.content()
        assert "no difference shown" in shown.content()
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shown.screenshot(path=artifacts(tmp_path) / f"study-{width}.png", full_page=True)


@pytest.mark.parametrize(("methods", "scenarios"), [(1, 1), (10, 3), (25, 8)])
def test_figures_of_any_size_have_every_label_and_no_overlap(
    methods: int, scenarios: int, tmp_path: Path
) -> None:
    names = tuple(METHODS)[:methods]
    view = view_of(names, scenarios, seeds=2)
    draw_results(tmp_path, view)
    drawn = draw_curves(tmp_path, view)
    assert drawn == (methods <= MOST_CURVES)
    text = (tmp_path / "figure.svg").read_text()
    for name in names:
        assert f">{look_of(name).label}<" in text
    image = imread(tmp_path / "figure.png")
    assert image.shape[0] / methods > 30  # pixels of a row, at 180 an inch
    assert drawn == (tmp_path / "curves.png").exists()


def test_a_mean_far_off_is_told_in_numbers(tmp_path: Path) -> None:
    view = view_of()
    far = view.summary.with_columns(
        mean=pl.when(pl.col("method") == "fedavg").then(1e40).otherwise("mean")
    )
    draw_results(tmp_path, replace(view, summary=far))
    assert ">1e+40 →<" in (tmp_path / "figure.svg").read_text()


def test_a_study_in_which_all_failed_is_drawn(tmp_path: Path) -> None:
    view = view_of()
    lost = view.results.with_columns(
        pl.lit(None, pl.Float64).alias(MEASURE), failure=pl.lit("diverged")
    )
    curves = {name: pl.lit(None, kind) for name, kind in PART.items() if name not in RESULT}
    gone = StudyTables.of(view.study, lost.with_columns(**curves))
    text = page_in(tmp_path / "gone", gone).read_text()
    assert "6 of 6 failed" in text
