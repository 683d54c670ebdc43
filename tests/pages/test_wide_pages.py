"""Pages of 300 columns, 200 levels and 2,000 rounds: small, quick to read, and nothing is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedipw.audit.compare import compare_page, written_audit
from fedipw.audit.page import SHOWN_ROWS, Column, Importance, chart_page, size, table
from fedipw.audit.pages import audit_page
from fedipw.audit.progress import TrainingRun, training_page
from fedipw.evaluation.balance import BalanceLine

from .audit_variants import LEVELS, WIDE, large, wide
from .browser import all_open, asked, chromium, opened, resized

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROUNDS = 2_000
LIMIT = 5_000_000  # bytes


def trained() -> str:
    """Return the page of a long run with many metrics and subgroups."""
    rounds = tuple(range(1, ROUNDS + 1))
    own = {"fedipw-effective-replies": 9.5, "fedipw-weighed": 12.0, "fedipw-weight-largest": 0.2}
    reported = {f"metric {k}": float(k) for k in range(20)}
    evaluated: dict[str, float] = {}
    for name in ("loss", "accuracy"):
        evaluated |= {f"{name}-plain": 0.5, f"{name}-target": 0.4}
        evaluated |= {f"{name}-target-low": 0.3, f"{name}-target-high": 0.5}
        evaluated |= {f"{name}[age in {level}]-target": 0.4 for level in LEVELS}
    return training_page(
        TrainingRun(
            rounds=rounds, invited=(40,) * ROUNDS, outcomes=({"replied": 30, "late": 10},) * ROUNDS,
            trained={r: {**own, **reported, "loss": 1.0 / r} for r in rounds},
            evaluated={r: {**evaluated, "loss-target": 1.0 / r} for r in rounds},
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    texts = {
        "audit": audit_page(wide()),
        "compare": compare_page(wide(), wide()),
        "training": trained(),
    }
    base = tmp_path_factory.mktemp("wide")
    for name, text in texts.items():
        (base / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: base / f"{name}.html" for name in texts}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def fits(page: Page) -> bool:
    across: bool = page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    return across and asked(page, "clashes()") == [] and asked(page, "smallTexts(11)") == []


def test_wide_pages_are_below_five_megabytes(pages: dict[str, Path]) -> None:
    assert {name: path.stat().st_size < LIMIT for name, path in pages.items()} == dict.fromkeys(
        pages, True
    )


def test_a_wide_page_gives_back_its_audit(pages: dict[str, Path]) -> None:
    assert written_audit(pages["audit"].read_text(encoding="utf-8")) == wide()


@pytest.mark.parametrize("name", ["audit", "compare", "training"])
def test_wide_pages_fit_a_desk_and_a_phone(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    with opened(browser, pages[name]) as page:
        assert fits(page)
        assert page.evaluate("document.querySelectorAll('*').length") < 30_000
        resized(page, 390)
        assert fits(page)


def test_a_plot_draws_the_largest_and_says_how_many_there_are(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with opened(browser, pages["audit"]) as page:
        assert page.locator("#plot-love-0 text.name").count() == 40
        part = page.locator("#plot-love-0 .part").text_content()
        assert part == "40 of 2,290 are drawn: the largest differences."
        rates = page.locator("#plot-rates-0")
        assert rates.locator("text.name").count() == 12
        assert rates.locator(".part").text_content() == "12 of 200 are drawn: the largest levels."
        largest = sorted(wide().rates[0].lines, key=lambda line: -line.rows)[:12]
        assert rates.locator("text.name").all_text_contents() == [x.level for x in largest]
        rates.locator(".more").click()
        assert rates.locator("text.name").count() == len(LEVELS)
        groups = page.locator("#plot-groups-0 text.name").all_text_contents()
        assert groups[:2] == ["everyone", f"category_0 = {LEVELS[0]}"]
        assert len(groups) == 13
        assert "The 6 levels of most rows, of 200." in page.locator("#plot-heat-0").inner_text()
        assert "mean of 10 rounds in a row" in page.locator("#plot-rounds-0").inner_text()
        assert "largest 200; 1,234 more are not listed" in page.locator("#overlap").inner_text()
        warned = page.locator("#metric .warning li")
        assert warned.count() == 6
        assert (warned.last.text_content() or "").startswith("And 195 more, in the column")


def test_a_long_table_begins_with_what_matters_and_has_every_row(
    browser: Browser, pages: dict[str, Path]
) -> None:
    audit = wide()
    assert audit.balance is not None

    def largest(line: BalanceLine) -> float:
        return max(abs(cell.smd or 0.0) for cell in line.groups.values())

    lines = sorted(audit.balance.lines, key=largest, reverse=True)
    with opened(browser, pages["audit"]) as page:
        all_open(page)
        box = page.locator("#balance .table")
        rows = box.locator("tbody tr")
        assert rows.count() == SHOWN_ROWS
        assert box.locator(".rest span").text_content() == (
            "400 of 2,290 rows are shown: those with the largest differences."
        )
        names = box.locator("tbody th").all_text_contents()
        assert names == [line.name for line in lines[:SHOWN_ROWS]]
        box.locator("thead button").first.click()  # all rows are sorted, not those shown alone
        assert rows.count() == len(WIDE)
        assert box.locator(".rest").count() == 0
        names = box.locator("tbody th").all_text_contents()
        assert names[0] == f"category_0 = {LEVELS[0]}"
        assert sorted(names) == sorted(WIDE)
        # what was data is written as the rows of the page are
        last = next(line for line in lines if line.name == "number_000")
        cells = box.locator("tbody tr", has_text="number_000").locator("td").all_text_contents()
        made = next(iter(table("", [Column("")] * 2, [[last.mean, last.sd]]).rows))
        assert cells[:2] == [cell.text for cell in made]
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_search_looks_at_every_row(browser: Browser, pages: dict[str, Path]) -> None:
    with opened(browser, pages["audit"]) as page:
        all_open(page)
        box = page.locator("#models .table", has=page.locator("input"))
        box.locator("input").fill("Category_9[level number 19")
        shown = box.locator("tbody tr:visible")
        assert shown.count() == 2 * 10  # in both stages
        box.locator("input").fill("")
        assert shown.count() == 2 * len(WIDE)


def test_a_long_run_is_drawn_by_means_and_its_table_has_every_round(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with opened(browser, pages["training"]) as page:
        figure = page.locator("#plot-curves-0")
        assert "A point is the mean of 10 rounds in a row." in figure.inner_text()
        figure.locator(".canvas svg").press("Home")
        assert page.locator(".tip b").text_content() == "Rounds 1 to 10"
        body = page.locator("body").inner_text()
        assert "\n9 further metrics of training are not drawn" in body  # 20 and the loss
        assert "386 further curves of subgroups are not drawn" in body
        rounds = page.locator("#tables .table").last
        assert rounds.locator("tbody tr").count() == SHOWN_ROWS
        rounds.locator(".rest button").click()
        assert rounds.locator("tbody th").last.text_content() == str(ROUNDS)


def test_points_are_means_of_rounds_in_a_row() -> None:
    found = [index for index in range(1, ROUNDS + 1) if index % 3]  # some rounds have no value
    curve = {"name": "a", "round": found, "value": [float(k) for k in found],
             "low": [k - 1.0 for k in found], "high": None}  # fmt: skip
    chart = {"title": "t", "caption": "c.", "y_label": "y", "log": False, "curves": [curve]}
    page = chart_page("run", [chart], [], [], {})
    data = re.search(r'id="training-data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    (drawn,) = json.loads(data[1])
    (made,) = drawn["curves"]
    assert drawn["each"] == 10
    assert made["round"] == [10 * k + 5.5 for k in range(200)]
    for k in range(200):
        inside = [index for index in found if 10 * k < index <= 10 * k + 10]
        assert made["value"][k] == pytest.approx(sum(inside) / len(inside), rel=1e-6)
        assert made["low"][k] == pytest.approx(made["value"][k] - 1.0, abs=1e-3)
    assert made["high"] is None


def test_short_tables_stay_in_order() -> None:
    by_size = Importance("largest", lambda row: size(row[0]))
    rows = [[float(k % 7)] for k in range(SHOWN_ROWS)]
    short = table("t", [Column("x")], rows, by_size)
    assert [row[0].key for row in short.rows] == [row[0] for row in rows]
    assert short.rest == ()
    longer = table("t", [Column("x")], [*rows, [99.0]], by_size)
    assert longer.rows[0][0].key == 99.0
    assert (len(longer.rows), len(longer.rest), longer.size) == (SHOWN_ROWS, 1, SHOWN_ROWS + 1)


def test_rounds_one_by_one_are_all_in_the_page() -> None:
    assert len(large().rounds) > SHOWN_ROWS
    assert "400 of 500 rows are shown: the first." in audit_page(large())
