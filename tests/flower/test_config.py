"""What users may ask for, and what they are told when they may not."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import (
    Bulyan,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from fedipw.errors import FedIPWError, InfeasibleError, InputError, SeparationError
from fedipw.flower import FedIPW, declined
from fedipw.flower.weighted_sum import weight_key
from fedipw.selection.classifiers import Newton

from .federations import INSIDE, Small


@pytest.mark.parametrize(
    "strategy",
    [FedMedian(), FedTrimmedAvg(), Krum(), MultiKrum(), Bulyan(), FedXgbBagging(), FedXgbCyclic(),
     QFedAvg(client_learning_rate=0.1)],
)  # fmt: skip
def test_strategies_that_would_not_follow_weights_are_refused(strategy: Strategy) -> None:
    with pytest.raises(InputError, match=f"{type(strategy).__name__} chooses or counts"):
        weight_key(strategy)


def test_a_strategy_of_ones_own_says_by_which_metric_it_weighs(tmp_path: Path) -> None:
    class Own(FedAvg):
        pass

    assert weight_key(Own(weighted_by_key="rows")) == "rows"
    strange = Own()
    del strange.weighted_by_key
    with pytest.raises(InputError, match="Own has no weighted_by_key"):
        weight_key(strange)
    small = Small(tmp_path)
    result = small.trained(1, Own(weighted_by_key="rows", fraction_evaluate=0.0), scheme="fedavg")
    assert result.arrays["theta"].numpy() == pytest.approx(1.0)


def totals(where: Path, mean: float = 0.2) -> dict[str, Any]:
    Small(where)
    (where / "targets.csv").write_text(f"name,value\nage,{mean}\n")
    return {
        "population": None, "enrolled": where / "enrolled.parquet",
        "targets": where / "targets.csv",
    }  # fmt: skip


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"population": None}, "Give population=, or enrolled="),
    "half": ({"population": None, "enrolled": "e.csv"}, "enrolled= and targets= go together"),
    "size": ({"population_size": 50}, "population_size= goes with targets="),
    "totals": ({"totals": True}, "totals= goes with targets="),
    "no table": ({"population": "nowhere.parquet"}, "nowhere.parquet"),
    "scheme": ({"scheme": "fedpiw"}, "did you mean fedipw"),
    "rule": ({"scheme": "fednova+fedipw"}, "'fednova.fedipw' is a way of training"),
    "oracle": ({"scheme": "oracle"}, "needs true probabilities"),
    "collapsed": ({"scheme": "collapsed"}, "cannot be live"),
    "missing": ({"missing": "error"}, 'missing="error" would let the gap of one client'),
    "missing name": ({"missing": "fill"}, "missing"),
    "column": ({"enrollment": "hight"}, "'hight' names no column"),
    "later": ({"enrollment": "battery"}, "'battery' names no column|stands only in the ledger"),
    "taken": ({"covariates": ["battery", "age"]}, "'age' cannot be asked of clients"),
    "own": ({"covariates": ["battery", "fate"]}, "'fate' cannot be asked of clients"),
    "lacking": ({"covariates": ["wifi"]}, "names 'battery', which neither"),
    "time": ({"ask_timeout": 0.0}, "ask_timeout"),
    "often": ({"refit_every": 0}, "refit_every"),
    "decay": ({"decay": 0.0}, "decay must lie in"),
    "decayed rows": ({"decay": 0.9, "classifier": "boosting"}, "a classifier or folds take rows"),
    "window": ({"window": 0}, "rolling window is 1 or more"),
    "hours": ({"day_hours": -1.0}, "A cycle has"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    settings, words = BAD[name]
    with pytest.raises(FedIPWError, match=words):
        Small(tmp_path).strategy(**settings)
    assert not (tmp_path / "ledger").exists()


def test_totals_alone_are_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = totals(tmp_path)
    small = Small(tmp_path)
    with caplog.at_level(logging.INFO, "flwr"):
        result = small.trained(2, **known)
    assert result.train_metrics_clientapp[2]["fedipw-weighed"] == INSIDE
    assert any("augmented-online; 12 enrolled clients, 1 population totals" in r.getMessage()
               for r in caplog.records)  # fmt: skip
    with pytest.raises(InputError, match="enrollment= goes with population="):
        small.strategy(**known, enrollment="age")
    fresh = tmp_path / "fresh"
    with pytest.raises(InputError, match="needs a table of the whole population"):
        small.strategy(**known, scheme="fedipw", ledger=fresh)
    with pytest.raises(InputError, match="needs the population size"):
        small.strategy(**known, scheme="efficient", ledger=fresh)


def test_totals_nobody_can_meet_stop_the_run_at_its_first_round(tmp_path: Path) -> None:
    known = totals(tmp_path, mean=99.0)
    with pytest.raises(InfeasibleError):
        Small(tmp_path).trained(1, **known, scheme="calibrated-entropy-hajek", soft=False)
    assert not (tmp_path / "ledger" / "round-000001.parquet").exists()


def test_by_default_they_are_approached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = totals(tmp_path, mean=99.0)
    with caplog.at_level(logging.INFO, "flwr"):
        result = Small(tmp_path).trained(1, **known, scheme="calibrated-entropy-hajek")
    assert result.train_metrics_clientapp[1]["fedipw-weighed"] == INSIDE
    assert any("targets cannot be met: soft" in r.getMessage() for r in caplog.records)


def test_an_empty_model_is_refused(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.start = ArrayRecord()
    with pytest.raises(InputError, match="has no arrays"):
        small.trained()
    small.start = ArrayRecord({"theta": Array("float64", (3,), "torch", b"12")})
    with pytest.raises(ValueError, match="torch"):
        small.trained()


def test_paths_may_be_text(tmp_path: Path) -> None:
    sources: dict[str, dict[str, Any]] = {
        "table": {"population": tmp_path / "people.parquet"},
        "totals": {k: v for k, v in totals(tmp_path).items() if v is not None},
    }
    for name, paths in sources.items():
        models = []
        for kind in (str, Path):
            small, ledger = Small(tmp_path), tmp_path / name / kind.__name__
            given: dict[str, Any] = {key: kind(path) for key, path in paths.items()}
            strategy = FedIPW(FedAvg(fraction_evaluate=0.0), ledger=kind(ledger), **given)
            result = strategy.start(small.grid, small.start, num_rounds=1)
            assert (ledger / "round-000001.parquet").exists()
            models.append(result.arrays["theta"].numpy())
        np.testing.assert_array_equal(models[0], models[1])


def in_pandas(frame: pl.DataFrame) -> Any:
    return pd.DataFrame(frame.to_dict(as_series=False))


def test_tables_may_be_frames_and_targets_a_dict(tmp_path: Path) -> None:
    paths = totals(tmp_path, mean=0.2)
    frame = Small(tmp_path).people
    inside = frame.filter("enrolled").drop("enrolled")
    known: dict[str, dict[str, Any]] = {
        "table file": {"population": tmp_path / "people.parquet"},
        "table polars": {"population": frame},
        "table pandas": {"population": in_pandas(frame)},
        "totals file": paths,
        "totals polars": {"enrolled": inside, "targets": {"age": 0.2}},
        "totals pandas": {"enrolled": in_pandas(inside), "targets": {"age": 0.2}},
        "totals of N": {
            "enrolled": inside,
            "targets": {"age": 20.0},
            "population_size": 100,
            "totals": True,
        },
    }
    found: dict[str, Any] = {}
    for name, given in known.items():
        (tmp_path / name).mkdir()
        small = Small(tmp_path / name, {3: lambda m, _: declined(m)})
        settings = {"ledger": tmp_path / name / "ledger", "participation": "age + battery", **given}
        wrapped = FedIPW(FedAvg(fraction_evaluate=0.0, min_available_nodes=1), **settings)
        result = wrapped.start(small.grid, small.start, num_rounds=3)
        found[name] = result.train_metrics_clientapp[3]["fedipw-weights"]
        assert len(set(found[name])) == INSIDE - 1
    for kind in ("table", "totals"):
        for other in ("polars", "pandas"):
            assert found[f"{kind} {other}"] == found[f"{kind} file"]
    assert found["table file"] != found["totals file"]
    assert found["totals of N"] == found["totals file"]


def test_without_columns_of_its_own_a_formula_asks_for_nothing(tmp_path: Path) -> None:
    small = Small(tmp_path)
    assert small.strategy(participation=".").config.columns == ()
    assert small.strategy(participation="age*battery + last_reply + C(wifi)").config.columns == (
        "battery", "wifi",
    )  # fmt: skip
    assert small.strategy(participation=".", covariates=["wifi"]).config.columns == ("wifi",)


def test_a_penalty_serves_a_federation_that_is_separated(tmp_path: Path) -> None:
    small = Small(tmp_path)
    apart = [10.0 + k if k < INSIDE else float(k) / 100 for k in range(small.people.height)]
    small.people.with_columns(age=pl.Series(apart)).write_parquet(tmp_path / "people.parquet")
    with pytest.raises(SeparationError):
        small.trained(scheme="fedipw", soft=False)
    result = small.trained(scheme="fedipw", l2=1.0)
    assert result.train_metrics_clientapp[1]["fedipw-weighed"] == INSIDE


def test_the_penalty_reaches_both_stages(tmp_path: Path) -> None:
    small = Small(tmp_path)
    plain, shrunk = (small.strategy(l2=l2).config for l2 in (0.0, 0.25))
    assert plain.plan.settings.estimator == Newton()
    assert shrunk.plan.settings.estimator == Newton(l2=0.25)
    everybody = np.ones(INSIDE, dtype=np.bool_)
    models = [config.stage.fitted(everybody, required=True).model for config in (plain, shrunk)]
    slopes = [model.logistic().coefficients[0] for model in models if model is not None]
    assert 0.0 < abs(slopes[1]) < abs(slopes[0])


def test_clients_whose_values_are_missing_are_named_or_weighed_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path)
    gap = pl.when(pl.col("unit_id").is_in(["u0", "u1"])).then(None).otherwise(1.0 * pl.col("age"))
    people = small.people.with_columns(gap.alias("income"))
    shared: dict[str, Any] = {
        "population": people, "enrollment": "age", "scheme": "fedipw-hajek",
    }  # fmt: skip
    with caplog.at_level(logging.INFO, "flwr"):
        result = small.trained(1, **shared)
    lacking = "2 enrolled clients lack a value of 'income', and their replies get no weight"
    assert lacking in caplog.text
    assert "; 2 replies lack a value or have a new level, and get no weight;" in caplog.text
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["fedipw-replied"], metrics["fedipw-weighed"]) == (INSIDE, INSIDE - 2)
    with pytest.raises(InputError, match="missing"):  # a run goes on as it began
        small.trained(2, **shared, missing="indicator")
    caplog.clear()
    with caplog.at_level(logging.INFO, "flwr"):
        found = small.trained(1, **shared, missing="indicator", ledger=tmp_path / "other")
        small.trained(1, **shared, availability="age", ledger=tmp_path / "third")
    assert "get no weight" not in caplog.text
    assert found.train_metrics_clientapp[1]["fedipw-weighed"] == INSIDE
