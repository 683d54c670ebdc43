"""Participation that drifts: a small run of the benchmark, and tables that are its results."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from benchmarks.drifting import CASES, CLOCK, KNOWN, METHODS, PAST, WAYS, main, tracked, trained

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "benchmarks" / "results" / "drifting.json"


def test_a_clock_follows_a_fast_cycle_and_other_fits_do_not() -> None:
    """One seed, 72 rounds of a cycle of 24: log odds are off by less than half as much."""
    found = tracked(("fast", 7, 72))
    assert set(found["paths"]) == {*WAYS}
    assert {len(path) for path in found["paths"].values()} == {72}
    others = [off for way, off in found["error"].items() if way != CLOCK]
    assert found["error"][CLOCK] < 0.5 * min(others)


def test_a_run_has_every_way_and_method() -> None:
    rows = pl.DataFrame(trained(("change", 7, 12)))
    assert rows.height == len(WAYS) * len(METHODS)
    assert rows.select(pl.col("tail", "raw").is_finite().all()).row(0) == (True, True)
    plain = rows.filter(method="fedavg")
    assert plain["tail"].n_unique() == 1  # common random numbers: it reads no probabilities


def test_tables_of_the_docs_are_those_of_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--saved", str(RESULT), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for method in METHODS[1:]:
        page = ROOT / "docs" / "_static" / f"drifting-{method}.md"
        assert page.read_text(encoding="utf-8") in printed


def test_the_page_claims_what_the_results_hold() -> None:
    saved = json.loads(RESULT.read_text())
    assert saved["seeds"] >= 20
    found = pl.DataFrame(saved["summary"])
    assert found.height == len(CASES) * len(WAYS) * len(METHODS)
    for method in METHODS[1:]:
        for case in ("sine", "fast", "scaled"):
            at = found.filter(case=case, method=method, way=CLOCK)
            for measure in ("tail_ratio", "raw_ratio"):
                assert at[measure].item() <= 1.15, (case, method, measure)
    hajek = found.filter(method="fedipw-hajek", way=PAST)
    assert hajek.filter(case="sine")["raw_ratio"].item() > 3.0
    assert found.filter(way=KNOWN)["tail_ratio"].unique().to_list() == [1.0]
