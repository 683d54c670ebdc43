"""Pages in a real browser: they render, reach for no network, and fit a phone."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from fedipw.lab.figure1 import FigureSettings, reproduce
from fedipw.lab.pages import number
from fedipw.lab.scenario import Scenario
from fedipw.lab.simulate import simulate
from fedipw.lab.style import LOOKS, look_of

from .browser import chromium as real_browser
from .browser import opened

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("pages")
    reproduce(base / "figure", FigureSettings(seeds=2, rounds=20, workers=1))
    simulate(Scenario(rounds=20), base / "run")
    return {name: base / name / "index.html" for name in ("figure", "run")}


def chromium(page: Path, *flags: str) -> str:
    assert CHROMIUM is not None
    profile = f"--user-data-dir={page.parent / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, profile, *flags, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("name", ["figure", "run"])
def test_a_page_is_self_contained(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']+)""", text)
    assert not outside, outside
    assert "@import" not in text


@browser
@pytest.mark.parametrize(("name", "drawings"), [("figure", 1), ("run", 6)])
def test_a_page_renders_figure_and_tables(pages: dict[str, Path], name: str, drawings: int) -> None:
    dom = chromium(pages[name], "--dump-dom")
    assert len(re.findall(r"<svg[^>]*viewBox", dom)) >= drawings
    assert dom.count("<table") >= 2
    for method in ("FedAvg", "Participation-only IPW", "FedIPW", "Oracle IPW"):
        assert method in dom


@browser
@pytest.mark.parametrize("width", [1100, 500])
def test_a_page_is_drawn_at_any_width(pages: dict[str, Path], width: int) -> None:
    shot = pages["figure"].parent / f"shot-{width}.png"
    chromium(pages["figure"], f"--window-size={width},1400", f"--screenshot={shot}")
    image = imread(shot)[..., :3]
    assert image.shape[1] == width
    figure = image[: image.shape[0] // 2]
    for method in ("participation-only", "fedipw"):
        colour = np.array([int(LOOKS[method].colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
        assert (np.abs(figure - colour).max(axis=2) < 0.1).sum() > 20, method


@pytest.mark.parametrize("width", [390, 1280])
def test_a_run_shows_curves_with_an_interval(pages: dict[str, Path], width: int) -> None:
    with real_browser() as driver, opened(driver, pages["run"], width=width) as page:
        figures = page.locator("#curves figure")
        methods = 4
        assert figures.count() == 2 + methods  # excess loss, distance, and one each as told
        for k in range(figures.count()):
            assert figures.nth(k).locator("svg path").count() >= 3
        inside = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert inside
    summary = json.loads((pages["run"].parent / "summary.json").read_text())
    lines = summary["evaluation"]
    assert {line["method"] for line in lines} == set(summary["methods"])
    assert all(line["low"] <= line["estimate"] <= line["high"] for line in lines)
    held = np.mean([line["low"] <= line["truth"] <= line["high"] for line in lines])
    assert held > 0.7  # intervals of a run share their draws; each holds about 95 of 100


def test_looks_can_be_told_apart() -> None:
    assert len({look.colour for look in LOOKS.values()}) == len(LOOKS)
    assert len({(look.line, look.marker) for look in LOOKS.values()}) == len(LOOKS)
    assert look_of("fedipw-hajek").colour == look_of("fedipw").colour
    assert look_of("fedipw-hajek").line != look_of("fedipw").line
    assert look_of("something-new").label == "something-new"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01399, "0.014"), (0.0, "0"), (2e-5, "2.0e-05"), (1e-9, "0"), (None, "–"), (np.nan, "–")],
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert number(value) == text
