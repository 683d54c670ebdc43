"""The benchmark of large ledgers on small ones: its files, runs, comparisons and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from benchmarks.large import by_hand, commands, workload
from benchmarks.large.__main__ import RESULTS, TABLE, main
from benchmarks.large.agreement import compared_weights
from scipy.special import expit

POOLED = commands.COMMANDS[1]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    main(["write", "--clients", "30000", "--enrolled", "600", "--rounds", "10", "--data",
          str(folder)])  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def measured(data: Path) -> dict[str, Any]:
    """Pooled weights of ten rounds, as the benchmark runs and saves them."""
    saved = data / "results" / "large.json"
    words = ["run", "--data", str(data), "--rounds", "10", "--commands", POOLED.name]
    main([*words, "--out", str(saved)])
    found: dict[str, Any] = json.loads(saved.read_text())
    return found


def test_shorter_ledgers_are_links_to_the_first_rounds(data: Path) -> None:
    logs = workload.logs(data)
    assert [log.length for log in logs] == [1, 5, 10]
    enrolled = workload.counts(data)["enrolled"]
    for log in logs:
        assert log.rows == log.length * enrolled
        first = "round-000001.parquet"
        assert (log.rounds / first).samefile(logs[-1].rounds / first)
        replies = pl.scan_parquet(log.rounds / "round-*.parquet").filter("replied").collect()
        for name in workload.TRUTH:
            metric = pl.read_parquet(log.metric(name))
            assert metric.select("round", "unit_id").equals(replies.select("round", "unit_id"))


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_wanted_share_enrolls(share: float) -> None:
    """A mean over a million draws; its standard error is below 0.0005, of a share in 1,000s."""
    rng = np.random.default_rng(5)
    z, ios = rng.standard_normal((2, 1_000_000)), rng.random(1_000_000) < 1 / 3
    prob = expit(workload.intercept(share) + 0.8 * z[0] - 0.5 * z[1] + 0.5 * ios)
    error = prob.std() / 1000.0
    assert abs(prob.mean() - share) < 5.0 * error  # false alarm below 1e-6


def test_a_run_reports_what_a_command_took(measured: dict[str, Any], data: Path) -> None:
    (row,) = measured["runs"]
    replies = pl.read_parquet(workload.Log(data, 10).metric("loss")).height
    assert (row["command"], row["result_rows"]) == (POOLED.name, replies)
    assert row["seconds"] > 0.0
    assert 0.05 < row["gigabytes"] < 3.0


@pytest.mark.usefixtures("measured")
def test_weights_by_hand_are_those_of_the_command(data: Path, tmp_path: Path) -> None:
    """Polars and scikit-learn: the same likelihoods, to the tolerance of a solver."""
    log, out = workload.Log(data, 10), tmp_path / "by-hand.parquet"
    by_hand.main("scikit-learn", str(log.people), str(log.rounds), str(out))
    ours = POOLED.results(commands.place(data / "out" / "10", POOLED))
    found = compared_weights(ours, out)
    assert found.numbers == 4 * pl.read_parquet(out).height
    assert found.largest < 1e-5


def test_an_earlier_run_is_used_only_for_the_same_command(tmp_path: Path) -> None:
    out, seen = tmp_path / "run", tmp_path / "seen"

    def line(word: str) -> list[str]:
        return ["/bin/sh", "-c", f"echo {word} >> {seen}"]

    first = commands.known(line("a"), out)
    assert commands.known(line("a"), out) == first
    commands.known(line("b"), out)
    assert seen.read_text().split() == ["a", "b"]
    with pytest.raises(commands.FailedError, match="run ended with 3"):
        commands.known(["/bin/sh", "-c", "exit 3"], out)


def test_a_weight_that_differs_is_found(tmp_path: Path) -> None:
    old, new = tmp_path / "old.parquet", tmp_path / "new.parquet"
    frame = pl.DataFrame({"unit_id": [3, 1, 2], "round": [1, 1, 2], "weight": [1e-7, 2e-7, 1.0]})
    frame.write_parquet(old)
    frame.reverse().write_parquet(new)  # the order does not count
    assert compared_weights(old, new).largest == 0.0
    small = pl.col("weight") == 1e-7
    off = pl.when(small).then(pl.col("weight") * (1 + 1e-8)).otherwise("weight")
    frame.with_columns(weight=off).write_parquet(new)
    found = compared_weights(old, new)
    assert found.largest == pytest.approx(1e-8, rel=1e-6)
    assert [d.place for d in found.differences] == ["weight"]
    frame.head(2).write_parquet(new)
    assert compared_weights(old, new).largest == np.inf


def test_growth_tells_linear_from_quadratic() -> None:
    def rows(power: int) -> list[dict[str, object]]:
        return [
            {"command": "weights", "rows": n * 1_000_000, "seconds": 20.0 + 0.5 * n**power}
            for n in (10, 50, 100)
        ]

    linear, square = (commands.growth(rows(power))["weights"] for power in (1, 2))
    assert linear["slope_ratio"] == pytest.approx(1.0)
    assert linear["seconds_per_million"] == pytest.approx([2.5, 0.9, 0.7])
    assert linear["ratio"] == pytest.approx(0.7 / 2.5)
    assert square["slope_ratio"] == pytest.approx(150.0 / 60.0)


def test_tables_of_the_docs_are_those_of_the_results(tmp_path: Path) -> None:
    page = tmp_path / "table.md"
    main(["table", "--results", str(RESULTS), "--out", str(page)])
    assert page.read_text(encoding="utf-8") == TABLE.read_text(encoding="utf-8")
