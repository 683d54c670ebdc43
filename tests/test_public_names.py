"""What `import fedipw` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from matplotlib.figure import Figure

import fedipw
from worlds import World, drawn

WORLD = World(
    rounds=6, seed=3, covariates=("age", "region"), changing=("battery",), metric=pl.col("age"),
    reply=-1.2 + 2.2 * pl.col("battery"), noise=0.0,
)  # fmt: skip
HEAVY = ("polars", "numba", "sklearn", "flwr", "scipy", "numpy", "matplotlib")


def test_importing_it_loads_nothing_heavy() -> None:
    code = f"import sys, fedipw; print([m for m in {HEAVY} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_name_is_there() -> None:
    assert 14 <= len(fedipw.__all__) <= 18
    for name in fedipw.__all__:
        assert getattr(fedipw, name) is not None
    assert set(fedipw.__all__) <= set(dir(fedipw))
    with pytest.raises(AttributeError, match="no attribute 'weights'"):
        fedipw.weights  # noqa: B018


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[pl.DataFrame, fedipw.Ledger, Any]:
    folder = tmp_path_factory.mktemp("public")
    tables = drawn(WORLD)
    tables.write(folder)
    return tables.people, fedipw.Ledger(folder / "rounds"), tables.metrics


SETTINGS: dict[str, Any] = {"enrollment": "age + region", "participation": "battery"}


def test_weights_of_frames_and_files_are_the_same(made: Any, tmp_path: Path) -> None:
    devices, ledger, _ = made
    devices.write_parquet(tmp_path / "devices.parquet")
    found = fedipw.weigh(devices, ledger, **SETTINGS)
    for population in (
        str(tmp_path / "devices.parquet"),
        tmp_path / "devices.parquet",
        pd.DataFrame(devices.to_dict(as_series=False)),
        devices.lazy(),
        fedipw.Population(devices),
    ):
        again = fedipw.weigh(population, str(ledger.directory), **SETTINGS)
        np.testing.assert_allclose(again.table["weight"], found.table["weight"], rtol=1e-12)
    assert "fedipw" in repr(found)
    assert "<table" in found._repr_html_()
    assert found.to_pandas()["weight"].tolist() == found.to_polars()["weight"].to_list()
    assert found.summary()["weighed"] == found.table.height
    assert isinstance(found.plot(), Figure)


def test_totals_take_the_place_of_the_table(made: Any) -> None:
    devices, ledger, _ = made
    inside = devices.filter("enrolled")
    means = {"age": float(devices["age"].mean()), "region[north]": 0.25}
    population = fedipw.Population.from_totals(inside, means, size=400)
    found = fedipw.weigh(population, ledger, participation="battery")
    assert found.method == "calibrated-entropy-hajek"
    assert "enrollment_weight" in found.table.columns


def test_evaluate_and_audit(made: Any, tmp_path: Path) -> None:
    devices, ledger, metric = made
    found = fedipw.evaluate(metric, devices, ledger, by="region", **SETTINGS)
    line = found.of("hajek")
    assert line.low < float(devices["age"].mean()) < line.high  # a draw that holds it
    assert found.to_pandas().shape == found.to_polars().shape
    report = fedipw.audit(devices, ledger, metrics=metric, by="region", **SETTINGS)
    report.save(tmp_path / "report.html", tmp_path / "report.json")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert report.to_json()["metric"]["name"] == "metric"
    assert repr(report).startswith("Report: ")


def test_wrong_input_says_what_is_right(made: Any) -> None:
    devices, ledger, _ = made
    calls: dict[str, Any] = {
        "no setting scheme; there are method": lambda: fedipw.weigh(devices, ledger, scheme="x"),
        "rounds is a Ledger or the path of one, not int": lambda: fedipw.weigh(devices, 3),  # type: ignore[arg-type]
        "not int": lambda: fedipw.weigh(3, ledger),  # type: ignore[arg-type]
        "fit is one of past, pooled": lambda: fedipw.weigh(devices, ledger, fit="later"),
        "No classifier 'bosting'": lambda: fedipw.weigh(devices, ledger, classifier="bosting"),
        "Targets are values by name": lambda: fedipw.calibrate(devices, 3),  # type: ignore[arg-type]
        "No distance 'l1'": lambda: fedipw.calibrate(devices, {"age": 41.0}, distance="l1"),
        "A metric belongs to replies": lambda: fedipw.audit(devices, metrics=devices),
    }
    for said, call in calls.items():
        with pytest.raises(fedipw.InputError, match=said):
            call()
