"""Pages that the command itself makes from files, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

from cli.command import succeeded
from fedipw.audit.compare import paired_rates, written_audit
from fedipw.audit.values import RateLine, RatePart
from worlds import World, drawn

from .browser import Scheme, all_open, artifacts, asked, chromium, opened, resized

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCHEMES: tuple[Scheme, ...] = ("light", "dark")
SYSTEMS = ("android", "ios", "web")


def world(seed: int, strength: float, rounds: int) -> World:
    """Return 2,000 clients, hourly rounds and a loss; the older the client, the rarer."""
    old, ios, wifi = pl.col("age"), pl.col("os") == "ios", pl.col("net") == "wifi"
    night = ((pl.col("round") - 4) / 24 * 2 * np.pi).cos()
    return World(
        size=2_000, rounds=rounds, seed=seed, ids="zq-{}", hours=1,
        covariates=("age", "os", "region", "memory_gb"), changing=("battery", "net"),
        enrollment=-0.2 - strength * old + 0.5 * ios + 0.05 * pl.col("memory_gb"),
        reply=-1.5 + 0.8 * night + pl.col("battery") + 0.5 * wifi - 0.3 * old,
        metric=0.6 + 0.1 * old, noise=0.1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("command")
    for name, seed, strength, rounds in (("before", 1, 0.9, 48), ("after", 2, 0.3, 24)):
        where = base / name
        drawn(world(seed, strength, rounds)).write(where)
        succeeded(
            "audit", "--population", where / "people.parquet", "--rounds", where / "rounds",
            "--metrics", where / "loss.parquet", "--metric-name", "loss", "--by", "os",
            "--title", f"Keyboard model, {name}", "--out", base / f"{name}.html",
        )  # fmt: skip
    both = (base / "before.html", base / "after.html")
    succeeded("audit", "--compare", *both, "--out", base / "compare.html")
    return {name: base / f"{name}.html" for name in ("before", "after", "compare")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def marks(page: Page) -> dict[str, int]:
    """Return how many marks each plot has."""
    found: dict[str, int] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("figure.plot")].map((f) =>
          [f.id.slice(5), f.querySelectorAll(".canvas .mark, .canvas .line").length]))"""
    )
    return found


def plots_of(audit: dict[str, Any]) -> set[str]:
    """Return the plots that a full audit must have."""
    numbered = {
        "weight": audit["weights"],
        "overlap": audit["stages"],
        "reliability": audit["stages"],
        "rates": audit["rates"],
        "heat": audit["heat"],
    }
    some = {f"{kind}-{k}" for kind, parts in numbered.items() for k in range(len(parts))}
    return some | {f"{kind}-0" for kind in ("love", "rounds", "everyone", "groups", "sensitivity")}


@pytest.mark.parametrize("name", ["before", "compare"])
def test_a_page_of_the_command_can_be_read_on_desk_and_phone_by_day_and_night(
    browser: Browser, pages: dict[str, Path], tmp_path: Path, name: str
) -> None:
    with opened(browser, pages[name]) as page:  # fails on any complaint of the console
        for width in (1280, 390):
            resized(page, width)
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                if (width > 390) == (scheme == "light"):  # pictures of the desk by day, ...
                    shot = artifacts(tmp_path) / f"command-{name}-{width}-{scheme}.png"
                    page.screenshot(path=str(shot), full_page=True)
                    assert shot.stat().st_size > 20_000
                all_open(page, True)
                assert asked(page, "lowContrast(4.5)")["poor"] == []
                wide = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
                assert wide[0] <= wide[1]
                all_open(page, False)
            assert asked(page, "clashes()") == []
            assert asked(page, "smallTexts(11)") == []
            assert all(count > 0 for count in marks(page).values())


def test_a_page_of_the_command_has_every_plot_and_its_verdict(
    browser: Browser, pages: dict[str, Path]
) -> None:
    text = pages["before"].read_text()
    audit = written_audit(text).to_json()
    assert "zq-" not in text
    assert len(audit["heat"]) == 3
    assert audit["heat"][0]["hours"] == list(range(24))
    with opened(browser, pages["before"]) as page:
        assert {*marks(page)} == plots_of(audit)
        assert page.locator(".headline").text_content() == audit["verdict"]["headline"]
        assert page.locator("article.finding").count() == 6
        told = page.locator("#metric").inner_text()
        assert "loss" in told
        page.locator("#metric summary").first.click()
        for system in SYSTEMS:
            assert f"os = {system}" in page.locator("#metric").inner_text()


def test_a_comparison_shows_that_enrollment_came_nearer_to_the_population(
    browser: Browser, pages: dict[str, Path]
) -> None:
    texts = (pages[name].read_text() for name in ("before", "after"))
    first, second = (written_audit(text).to_json() for text in texts)
    smds = [
        next(x for x in audit["balance"]["lines"] if x["name"] == "age")["groups"]["enrolled"][
            "smd"
        ]
        for audit in (first, second)
    ]
    assert smds[0] < smds[1] < 0.0
    with opened(browser, pages["compare"]) as page:
        ages = page.locator("#replies figure", has_text="Reply rate by age")
        assert ages.locator(".canvas .mark").count() == 10  # fifths of each audit, in five rows
        assert ages.locator("text.name").count() == 5
        all_open(page)
        body = page.locator("body").inner_text()
        for smd in smds:
            assert f"{abs(smd):.3f}" in body
        for audit in (first, second):
            assert audit["verdict"]["headline"] in body
            assert audit["rates"][0]["lines"][0]["level"] in body


def rates(column: str, *levels: str, hidden: int = 0) -> list[RatePart]:
    lines = tuple(RateLine(level=level, rows=10, replies=1, rate=0.1) for level in levels)
    return [RatePart(column=column, lines=lines, hidden=hidden)]


def test_levels_are_paired_by_name_and_fifths_in_their_order() -> None:
    old, new = rates("os", "ios", "web"), rates("os", "android", "ios")
    names = [("android", None, "android"), ("ios", "ios", "ios"), ("web", "web", None)]
    assert paired_rates(old, new) == {"os": names}
    cut = rates("age", "(-inf, 20]", "(20, 1000]", "(1000, inf]", "(missing)")
    again = rates("age", "(-inf, 20]", "(20, 35.5]", "(35.5, inf]")
    assert paired_rates(cut, again)["age"] == [
        ("(-inf, 20]", "(-inf, 20]", "(-inf, 20]"),
        ("(20, 35.5] (was (20, 1000])", "(20, 1000]", "(20, 35.5]"),
        ("(35.5, inf] (was (1000, inf])", "(1000, inf]", "(35.5, inf]"),
        ("(missing)", "(missing)", None),
    ]
    some = rates("age", "(-inf, 30]", "(40, inf]", hidden=1)  # which fifths are left is not known
    assert [row[0] for row in paired_rates(some, again)["age"]] == [
        "(-inf, 20]", "(20, 35.5]", "(35.5, inf]", "(-inf, 30]", "(40, inf]",
    ]  # fmt: skip
    assert paired_rates(cut, rates("os", "ios")).keys() == {"os", "age"}
