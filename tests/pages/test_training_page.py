"""The page of a training run holds what a server's files hold, whatever clients wrote there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from flwr.serverapp.strategy import FedAvg

from cli.command import fedipw
from fedipw.audit.progress import training_page, training_run
from fedipw.errors import InputError
from fedipw.tables import Ledger
from flower.federations import Small

from .browser import Scheme, chromium, opened

ROUNDS = 3
NASTY = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    where = tmp_path_factory.mktemp("trained")
    small = Small(where)
    result = small.trained(ROUNDS, FedAvg(min_available_nodes=1), subgroups=("age",))
    return where, result


def charts_of(page: str) -> dict[str, Any]:
    """Return the charts of a page by title, from the data it embeds."""
    found = re.search(r'<script[^>]*id="training-data"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return {chart["title"]: chart for chart in json.loads(found[1])}


def test_the_page_holds_the_numbers_of_the_run(trained: tuple[Path, Any]) -> None:
    where, result = trained
    code, out, err = fedipw(
        "audit", "--rounds", where / "ledger", "--training", "--out", where / "page.html"
    )
    assert code == 0, err
    assert f"Wrote {where / 'page.html'}" in out
    charts = charts_of((where / "page.html").read_text(encoding="utf-8"))
    told = result.evaluate_metrics_clientapp
    target, plain = charts["loss of the target population"]["curves"]
    assert target["round"] == [1, 2, 3]
    for key, part in (("", "value"), ("-low", "low"), ("-high", "high")):
        assert target[part] == [told[r][f"loss-target{key}"] for r in (1, 2, 3)]
    assert plain["value"] == [told[r]["loss-plain"] for r in (1, 2, 3)]
    groups = charts["loss by subgroup"]["curves"]
    assert all(curve["name"].startswith("age in ") for curve in groups)
    train = result.train_metrics_clientapp
    (largest,) = charts["Largest weight"]["curves"]
    assert largest["value"] == [train[r]["fedipw-weight-largest"] for r in (1, 2, 3)]
    (relied,) = charts["Reliance on enrollment weights"]["curves"]
    assert relied["value"] == [train[r]["fedipw-reliance"] for r in (1, 2, 3)]
    (replied,) = charts["Outcomes of invitations"]["curves"]
    assert (replied["name"], replied["value"]) == ("replied", [12, 12, 12])


def test_an_audit_reads_the_ledger_of_the_same_run(trained: tuple[Path, Any]) -> None:
    where, _ = trained
    code, _, err = fedipw(
        "audit", "--population", where / "people.parquet", "--rounds", where / "ledger",
        "--participation", "battery", "--missing", "drop", "--out", where / "audit.html",
    )  # fmt: skip
    assert code == 0, err


def test_what_clients_named_is_written_out_and_what_is_damaged_is_counted(
    trained: tuple[Path, Any], tmp_path: Path
) -> None:
    where, _ = trained
    shutil.copytree(where / "ledger", tmp_path / "copy")
    ledger = Ledger(tmp_path / "copy")
    folder = ledger.folder / "checkpoint"
    for index, metrics in ((1, {NASTY: 1.0}), (2, {"loss": 10**400, "x": [1], "ok": True})):
        path = folder / f"train-{index:06d}.json"
        path.write_text(json.dumps({"metrics": {**metrics, "fedipw-weighed": 3}}))
    (folder / "train-000003.json").write_text('{"metrics": [')
    evaluated = {f"{NASTY}-plain": 1.0, f"{NASTY}-target": 2.0}
    (folder / "evaluate-000001.json").write_text(json.dumps({"metrics": evaluated}))
    page = training_page(training_run(ledger))
    assert "<img src=x" not in page
    assert "\u202e" not in page.replace("\\u202e", "")
    assert "\x1b" not in page
    assert "1 files of metrics could not be read" in page
    with chromium() as browser:
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        with opened(browser, path) as view:
            assert view.locator("svg").count() >= 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_drawn_without_complaint(
    trained: tuple[Path, Any], tmp_path: Path, scheme: Scheme
) -> None:
    path = tmp_path / "page.html"
    path.write_text(training_page(training_run(Ledger(trained[0] / "ledger"))), encoding="utf-8")
    with chromium() as browser, opened(browser, path, scheme=scheme) as view:
        assert view.locator("figure:has(svg)").count() == len(charts_of(path.read_text("utf-8")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--training"], "--training goes with --rounds"),
        (["--training", "--rounds", "{}", "--metrics", "m.csv"], "leave out --metrics"),
        (["--training", "--rounds", "{}/nowhere"], "No ledger directory"),
    ],
)
def test_options_that_do_not_go_together(
    trained: tuple[Path, Any], tmp_path: Path, options: list[str], words: str
) -> None:
    given = [option.format(trained[0] / "ledger") for option in options]
    code, _, err = fedipw("audit", *given, "--out", tmp_path / "page.html")
    assert code == 2
    assert words in err


def test_a_ledger_without_a_server_says_so(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rounds")
    ledger.append(1, pl.DataFrame({"unit_id": ["a"], "invited": [True], "replied": [True]}))
    with pytest.raises(InputError, match="needs the ledger of a Flower server"):
        training_run(ledger)
