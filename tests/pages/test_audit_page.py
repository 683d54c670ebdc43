"""Pages of audits and training runs, as text and in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fedipw.audit.compare import compare_page, written_audit
from fedipw.audit.page import chart_page, count, fixed, share, significant, tidy
from fedipw.audit.pages import audit_page
from fedipw.errors import InputError
from fedipw.lab.pages import Table, sortable
from fedipw.numerics.checks import visible

from .audit_example import example
from .audit_variants import NASTY, bare, hostile, large, totals_only, without_rounds
from .browser import Scheme, all_open, artifacts, asked, chromium, opened, resized

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCHEMES: tuple[tuple[Scheme, str], ...] = (
    ("light", "rgb(246, 247, 249)"),
    ("dark", "rgb(14, 18, 23)"),
)
NAMES = ("full", "totals", "enrollment", "bare", "hostile", "compare", "training")


def training() -> str:
    rng = np.random.default_rng(0)

    def curve(name: str, banded: bool) -> dict[str, Any]:
        value = np.exp(-np.arange(200) / 50) + rng.uniform(0.1, 0.12, 200)
        low, high = (0.9 * value).tolist(), (1.1 * value).tolist()
        band = {"low": low, "high": high} if banded else {"low": None, "high": None}
        return {"name": name, "round": list(range(1, 201)), "value": value.tolist(), **band}

    curves = [curve("FedAvg", True), curve("FedIPW", True), curve(NASTY[0], False)]
    charts = [
        {"curves": curves, "y_label": name, "title": name, "log": log, "caption": caption}
        for name, log, caption in (
            ("Excess loss", True, "Lower is better."),
            ("Distance", False, ""),
        )
    ]
    table = Table(
        caption="Last round", heads=["Method", "loss"], rows=[["FedAvg", "0.3 ± 0.1"], ["b", "–"]]
    )
    return chart_page("A run", charts, [sortable(table)], ["A note."], {"seed": 1})


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    texts = {
        "full": audit_page(example()),
        "totals": audit_page(totals_only()),
        "enrollment": audit_page(without_rounds()),
        "bare": audit_page(bare()),
        "hostile": audit_page(hostile()),
        "large": audit_page(large()),
        "compare": compare_page(example(), example(7, 0.6)),
        "training": training(),
    }
    base = tmp_path_factory.mktemp("audit")
    for name, text in texts.items():
        (base / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: base / f"{name}.html" for name in texts}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.mark.parametrize("make", [example, totals_only, without_rounds, bare, hostile, large])
def test_a_page_gives_back_its_audit(make: Any) -> None:
    audit = make()
    assert written_audit(audit_page(audit)) == written_audit(json.dumps(audit.to_json())) == audit


def test_what_is_no_audit_is_refused() -> None:
    audit = example().to_json()
    page = audit_page(example())
    with pytest.raises(InputError, match="holds no audit"):
        written_audit("<p>nothing here</p>")
    for other in (1, 3):
        with pytest.raises(InputError, match=f"version {other}"):
            written_audit(page.replace('"version":2', f'"version":{other}', 1))
    with pytest.raises(InputError, match="format"):
        written_audit(page.replace("fedipw-audit", "another", 1))
    with pytest.raises(InputError, match="cannot be read"):
        written_audit(page.replace('{"format"', '{"format', 1))
    with pytest.raises(InputError, match="lacks rounds"):
        written_audit(json.dumps({k: v for k, v in audit.items() if k != "rounds"}))
    with pytest.raises(InputError, match=r"damaged in sizes\.population_table"):
        written_audit(json.dumps({**audit, "sizes": {"population": None}}))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_self_contained(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']+)""", markup)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert "url(" not in text.split("</style>")[0]


@pytest.mark.parametrize(
    ("plain", "keys"),
    [(["1,200", "–", "3.5 ± 1"], [1200.0, None, 3.5]), (["−2%", "x", "1"], [None, None, None])],
)
def test_tables_of_text_sort_by_leading_numbers(plain: list[str], keys: list[Any]) -> None:
    table = Table(caption="", heads=["a", "b"], rows=[["r", text] for text in plain])
    assert [row[1].key for row in sortable(table).rows] == keys


def marks_expected(audit: dict[str, Any]) -> dict[str, int]:
    smds = [c["smd"] for line in audit["balance"]["lines"] for c in line["groups"].values()]
    rounds = [
        line[k]
        for line in audit["rounds"]
        for k in ("reply_rate", "calibration_ratio", "effective_replies", "reliance")
    ]
    estimates = audit["metric"]["estimates"]
    everyone = [e for e in estimates if e["group"] == "everyone"]
    counts = {
        "love-0": sum(smd is not None for smd in smds),
        "rounds-0": sum(value is not None for value in rounds),
        "everyone-0": len(everyone),
        "groups-0": sum(e["estimate"] is not None for e in estimates),
        "sensitivity-0": 2 * len(audit["metric"]["sensitivity"]),
    }
    sizes: tuple[tuple[str, str, Callable[[Any], int]], ...] = (
        ("weight", "weights", lambda p: len(p["multiples"]["counts"])),
        ("overlap", "stages", lambda p: len(p["prob"]["counts"])),
        ("reliability", "stages", lambda p: len(p["reliability"])),
        ("rates", "rates", lambda p: len(p["lines"])),
        ("heat", "heat", lambda p: len(p["hours"]) * len(p["levels"])),
    )
    for kind, key, size in sizes:
        counts |= {f"{kind}-{k}": size(part) for k, part in enumerate(audit[key])}
    return counts


def test_every_plot_draws_what_the_audit_holds(browser: Browser, pages: dict[str, Path]) -> None:
    audit = example().to_json()
    with opened(browser, pages["full"]) as page:
        drawn = page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll("figure.plot")].map((f) =>
              [f.id.slice(5), f.querySelectorAll(".canvas .mark").length]))"""
        )
        assert drawn == marks_expected(audit)
        bins = page.locator("#plot-overlap-0 .mark").first.get_attribute("data-bins")
        assert int(bins or 0) == len(audit["stages"][0]["prob"]["edges"]) - 1
        hidden = sum(r is None for row in audit["heat"][0]["rate"] for r in row)
        assert page.locator("#plot-heat-0 .hidden-cell.mark").count() == hidden
        for figure in page.locator("figure.plot").all():
            assert (figure.locator(".read").text_content() or "").strip()
            assert figure.locator("text.label").count() >= 1


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("totals", ("overlap", "models")),
        ("enrollment", ("replies", "rounds", "metric", "notes")),
        ("bare", ("summary", "plot-love-0", "plot-groups-0", "plot-weight-0")),
    ],
)
def test_absent_parts_are_not_drawn(
    browser: Browser, pages: dict[str, Path], name: str, absent: tuple[str, ...]
) -> None:
    with opened(browser, pages[name]) as page:
        for section in absent:
            assert page.locator(f"#{section}").count() == 0
            assert page.locator(f"nav a[href='#{section}']").count() == 0
        for figure in page.locator("figure.plot").all():
            assert figure.locator(".canvas .mark").count() > 0


@pytest.mark.parametrize("name", ["compare", "training"])
def test_other_pages_draw_their_marks(browser: Browser, pages: dict[str, Path], name: str) -> None:
    with opened(browser, pages[name]) as page:
        wanted = {"compare": ".mark", "training": ".line"}[name]
        for figure in page.locator("figure.plot").all():
            assert figure.locator(f".canvas {wanted}").count() >= 3
        if name == "training":
            assert page.locator("#plot-curves-0 .band").count() == 2
            page.locator("#plot-curves-0 .legend button").nth(0).click()
            assert page.locator("#plot-curves-0 .canvas .line").count() == 2
        else:
            first = page.locator("#plot-love-0 .canvas").inner_html()
            page.get_by_role("button", name="respondents", exact=True).click()
            assert page.locator("#plot-love-0 .canvas").inner_html() != first


def column_texts(page: Page, table: str, column: int) -> list[str]:
    texts: list[str] = page.locator(f"{table} tbody tr > :nth-child({column})").all_text_contents()
    return texts


def test_tables_sort_both_ways_with_missing_last(browser: Browser, pages: dict[str, Path]) -> None:
    lines = example().to_json()["balance"]["lines"]
    smds = [line["groups"]["respondents"]["smd"] for line in lines]
    known = sorted(smd for smd in smds if smd is not None)
    with opened(browser, pages["full"]) as page:
        all_open(page)
        head = page.locator("#balance thead th", has_text="SMD, respondents").first
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        assert column_texts(page, "#balance", 5) == [*map(fixed, known), "–"]
        head.locator("button").press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        assert column_texts(page, "#balance", 5) == [*map(fixed, known[::-1]), "–"]
        page.locator("#balance thead th button").first.press("Space")
        assert head.get_attribute("aria-sort") is None
        names = column_texts(page, "#balance", 1)
        assert names == sorted(names, key=str.lower)


def test_hover_keys_and_touch_tell_exact_values(browser: Browser, pages: dict[str, Path]) -> None:
    audit = example().to_json()
    rates = audit["rates"][0]["lines"]
    with opened(browser, pages["full"], has_touch=True) as page:
        tip = page.locator(".tip")
        bar = page.locator("#plot-rates-0 .mark").nth(2)
        bar.hover()
        told = tip.text_content() or ""
        for text in (rates[2]["level"], share(rates[2]["rate"]), count(rates[2]["rows"])):
            assert text in told
        page.mouse.move(1, 1)
        assert tip.is_hidden()
        page.locator("#plot-love-0 .canvas svg").focus()
        page.keyboard.press("End")
        page.keyboard.press("Home")
        worst = max(
            (x for x in audit["balance"]["lines"] if x["groups"]["respondents"]["smd"]),
            key=lambda x: abs(x["groups"]["respondents"]["smd"]),
        )
        told = tip.text_content() or ""
        assert worst["name"] in told
        assert fixed(worst["groups"]["respondents"]["smd"]) in told
        page.keyboard.press("Escape")
        assert tip.is_hidden()
        cell = page.locator("#plot-heat-0 .mark").nth(7)
        cell.scroll_into_view_if_needed()
        cell.tap()
        assert tip.is_visible()
        assert share(audit["heat"][0]["rate"][0][7]) in (tip.text_content() or "")


def test_the_probes_see_faults(browser: Browser, tmp_path: Path) -> None:
    page_file = tmp_path / "faults.html"
    page_file.write_text(
        """<body style="background: #fff"><p style="color: #999">grey</p><p>black</p>
        <p style="opacity: .5">faint</p><p style="font-size: 9px">small</p>
        <figure id="plot-x"><div class="canvas"><svg width="200" height="50">
        <rect class="mark" x="100" width="50" height="40" /><text y="20">first</text>
        <text x="5" y="22">second</text><text x="110" y="20">on it</text>
        <text x="190" y="20">far out</text></svg></div></figure>"""
    )
    with opened(browser, page_file) as page:
        assert [p[0] for p in asked(page, "lowContrast(4.5)")["poor"]] == ["grey", "faint"]
        assert asked(page, "smallTexts(11)") == ["small"]
        assert {c[1] for c in asked(page, "clashes()")} == {"text", "mark", "outside"}


def test_groups_of_the_love_plot_can_be_hidden(browser: Browser, pages: dict[str, Path]) -> None:
    with opened(browser, pages["full"]) as page:
        marks = page.locator("#plot-love-0 .canvas .mark")
        before = marks.count()
        button = page.locator("#plot-love-0 .legend button").first
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        assert marks.count() == before - 14


def test_browser_and_python_write_numbers_alike(browser: Browser, pages: dict[str, Path]) -> None:
    rng = np.random.default_rng(6)
    values = [*(rng.normal(0, 10.0 ** rng.integers(-9, 9, 300))), *rng.uniform(0, 1, 100)]
    values += [0.0, 0.125, -0.0625, 0.5, 2.5, 0.0005, 9.995, 99.95, 999.5, 1e15, 1e-7, 1e300, -1e22]
    values = [float(v) for v in values]
    with opened(browser, pages["full"]) as page:
        for name, text in (
            *(("count", count), ("fixed", fixed), ("number", significant)),
            *(("share", share), ("tidy", tidy)),
        ):
            small = [v for v in values if abs(v) < 1e15] if name != "number" else values
            told = page.evaluate(
                "([name, values]) => values.map(window.fedipw.format[name])", [name, small]
            )
            assert told == [text(v) for v in small]
            assert page.evaluate("(name) => window.fedipw.format[name](null)", name) == "–"


@pytest.mark.parametrize("name", NAMES)
def test_no_width_scrolls_sideways_or_shrinks_text(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    with opened(browser, pages[name]) as page:
        all_open(page)
        for width in (1280, 768, 390, 320):
            resized(page, width)
            wide = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert wide[0] <= wide[1], (name, width, wide)
            assert asked(page, "smallTexts(11)") == []
            assert asked(page, "clashes()") == [], (name, width)
            assert page.evaluate(
                """[...document.querySelectorAll(".canvas > svg")].every((s) =>
                  s.clientWidth <= s.parentNode.clientWidth
                  && s.viewBox.baseVal.width === s.clientWidth)"""
            )


@pytest.mark.parametrize("name", ["full", "compare", "training"])
def test_all_text_can_be_read(
    browser: Browser, pages: dict[str, Path], tmp_path: Path, name: str
) -> None:
    with opened(browser, pages[name]) as page:
        switch = page.locator(".legend button").first
        for width in (1280, 390):
            resized(page, width)
            for scheme, ground in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                page.evaluate("window.scrollTo(0, 0)")
                shot = artifacts(tmp_path) / f"audit-{name}-{width}-{scheme}.png"
                page.screenshot(path=str(shot), full_page=True)
                assert shot.stat().st_size > 20_000
                all_open(page, True)
                switch.click()
                page.locator(".canvas svg").first.press("Home")
                assert page.locator(".tip").is_visible()
                told = asked(page, "lowContrast(4.5)")
                switch.click()
                all_open(page, False)
                assert told["poor"] == []
                assert told["texts"] > 50
                assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground


def test_paper_is_white_and_shows_every_table(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    with opened(browser, pages["full"], scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        page.evaluate("new Promise(requestAnimationFrame)")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
        assert asked(page, "lowContrast(4.5)")["poor"] == []
        heights = page.evaluate(
            "[...document.querySelectorAll('details:not(.long) table')].map((t) => t.offsetHeight)"
        )
        assert len(heights) > 6
        assert min(heights) > 20
        widest = page.evaluate(
            "Math.max(...[...document.querySelectorAll('.canvas svg')].map((s) => s.clientWidth))"
        )
        assert widest < 690
    with opened(browser, pages["full"]) as page:
        made = page.pdf(path=str(artifacts(tmp_path) / "audit.pdf"), format="A4")
        assert made.startswith(b"%PDF")
        assert not page.locator("html.paper").count()


def test_names_are_text_whatever_they_hold(browser: Browser, pages: dict[str, Path]) -> None:
    with opened(browser, pages["hostile"], width=390) as page:
        all_open(page)
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2
        body = page.locator("body").inner_text()
        assert all(visible(name) in body for name in NASTY)
        assert (page.locator("h1").text_content() or "") == NASTY[1]
        page.locator("#plot-love-0 .canvas svg").press("Home")
        assert page.locator(".tip b").text_content() in NASTY
        for _ in NASTY:
            page.keyboard.press("ArrowDown")
            box = page.locator(".tip").bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390


def test_many_lines_open_on_demand(browser: Browser, pages: dict[str, Path]) -> None:
    assert pages["large"].stat().st_size < 5e6
    with opened(browser, pages["large"]) as page:
        assert page.locator("#plot-love-0 text.name").count() == 40
        page.locator("#plot-love-0 .more").click()
        assert page.locator("#plot-love-0 text.name").count() == 200
        assert asked(page, "clashes()") == []


def test_tables_stand_without_a_script(browser: Browser, pages: dict[str, Path]) -> None:
    with opened(browser, pages["full"], java_script_enabled=False) as page:
        assert page.locator("noscript p").is_visible()
        assert page.locator("figure.plot").first.is_hidden()
        page.locator("#balance summary").click()
        assert page.locator("#balance table").is_visible()
