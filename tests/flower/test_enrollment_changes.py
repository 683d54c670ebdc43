"""Clients join and leave between two starts: the change is named, and everything goes on."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

from fedipw.errors import InputError
from fedipw.flower import InProcessGrid, declined
from fedipw.flower.register import EnrollmentChange, Register
from fedipw.selection.enrollment import enrollment_stage
from fedipw.tables import Ledger, Population
from fedipw.tables.population import Members

from .federations import INSIDE, Small, answered, theta

NODES = 20
BEFORE, AFTER = 3, 6
NOW = {f"u{k}" for k in (*range(2, 12), 14, 15, 16)}  # u0 and u1 have left
EVERY = FedAvg(min_train_nodes=1, min_available_nodes=1)


def steady(k: int) -> Any:
    """Return a client that always moves the model by its own number, and declines at times."""

    def behaviour(message: Message, index: int) -> Message:
        if (index + k) % 5 == 0:
            return declined(message, "busy")
        return answered(message, {"theta": theta(message) + 0.01 * k}, loss=0.1 * k)

    return behaviour


def federation(where: Path) -> Small:
    where.mkdir(exist_ok=True)
    small = Small(where, behaviours={k: steady(k) for k in range(NODES)})
    small.grid = InProcessGrid(small.app(), {100 + k: {"k": k} for k in range(NODES)})
    return small


def changed(small: Small) -> None:
    """Let u0 leave, strike u1 off the table, let three others join, and make u5 older."""
    table = pl.read_parquet(small.where / "people.parquet")
    inside = pl.col("unit_id").is_in([*NOW])
    age = pl.when(pl.col("unit_id") == "u5").then(pl.col("age") + 1).otherwise(pl.col("age"))
    made = table.filter(pl.col("unit_id") != "u1").with_columns(inside.alias("enrolled"), age)
    made.write_parquet(small.where / "people.parquet")


def inner() -> FedAvg:
    return FedAvg(min_train_nodes=1, min_available_nodes=1)


@pytest.mark.parametrize(
    "scheme",
    [None, "fedipw", "fedavg", "calibrated-online", "efficient-hajek", "mifa+efficient",
     "greg-nonnegative"],
)  # fmt: skip
def test_a_run_goes_on_when_clients_joined_and_left(
    tmp_path: Path, scheme: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    small = federation(tmp_path)
    small.trained(BEFORE, inner(), scheme=scheme)
    changed(small)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = small.trained(AFTER, inner(), scheme=scheme)
    (line,) = [r.getMessage() for r in caplog.records if "table of clients" in r.getMessage()]
    assert "since round 3: 3 clients joined, 2 left, 1 has other covariates." in line
    for kind in ("", "evaluation"):
        ledger = Ledger(tmp_path / "ledger" / kind)
        first = {f"u{k}" for k in range(INSIDE)}
        assert [set(ledger.read(r)["unit_id"]) for r in (BEFORE, AFTER)] == [first, NOW]
    told = result.train_metrics_clientapp[AFTER]
    assert told["fedipw-available"] == len(NOW)
    assert told["fedipw-weighed"] == told["fedipw-replied"] > 0
    assert {"loss-target-low", "loss-target-high"} <= set(result.evaluate_metrics_clientapp[AFTER])
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr"):
        small.trained(AFTER + 1, inner(), scheme=scheme)
    assert not [r for r in caplog.records if "table of clients" in r.getMessage()]


@pytest.mark.parametrize("scheme", [None, "efficient-hajek"])
def test_after_a_change_a_restart_changes_nothing(tmp_path: Path, scheme: str | None) -> None:
    ends = []
    for name, stops in (("whole", (AFTER,)), ("parts", (BEFORE, 4, 5, AFTER))):
        small = federation(tmp_path / name)
        small.trained(BEFORE, inner(), scheme=scheme)
        changed(small)
        for rounds in stops:
            result = small.trained(rounds, inner(), scheme=scheme, average=None)
        ends.append(result)
    whole, parts = ends
    np.testing.assert_array_equal(parts.arrays["theta"].numpy(), whole.arrays["theta"].numpy())
    assert parts.train_metrics_clientapp == whole.train_metrics_clientapp


def test_weights_after_a_change_are_of_the_new_table_and_the_old_replies(tmp_path: Path) -> None:
    """Weights are 1/(N pi p): pi fitted on the table as it is now, p on who replied before."""
    small = federation(tmp_path)
    settings: dict[str, Any] = {"scheme": "fedipw", "enrollment": "age"}  # p is still a rate
    small.trained(BEFORE, **settings)
    changed(small)
    small.trained(BEFORE + 1, **settings)
    rounds = Ledger(tmp_path / "ledger")
    before = pl.concat([rounds.read(r) for r in range(1, BEFORE + 1)])
    reply = before.filter("invited")["replied"].mean()
    table = pl.read_parquet(tmp_path / "people.parquet")
    stage = enrollment_stage(Population(table), "age")
    everybody = np.ones(stage.members.size, dtype=np.bool_)
    pi = dict(zip(stage.members.frame["unit_id"], stage.fitted(everybody, required=True).prob,
                  strict=True))  # fmt: skip
    now = rounds.read(BEFORE + 1).filter("replied")["unit_id"].to_list()
    told = small.strategy(**settings).journal.metrics("train", BEFORE + 1)
    assert told is not None
    expected = [1.0 / (table.height * pi[unit] * reply) for unit in now]
    np.testing.assert_allclose(told["fedipw-weights"], expected, rtol=1e-7)


def test_a_memory_keeps_each_clients_own_vector(tmp_path: Path) -> None:
    """MIFA over equal weights steps by the mean of the latest updates of those enrolled."""
    small = federation(tmp_path)
    small.trained(BEFORE, scheme="mifa", average=None)
    changed(small)
    before = small.strategy(scheme="mifa").journal.load_model(BEFORE)[0]["theta"].numpy()
    result = small.trained(BEFORE + 1, scheme="mifa", average=None)
    new = [k for k in (14, 15, 16) if (BEFORE + 1 + k) % 5]  # others of them have not replied yet
    kept = [*range(2, 12), *new]
    step = sum(0.01 * k for k in kept) / len(NOW)
    np.testing.assert_allclose(result.arrays["theta"].numpy(), before + step, rtol=1e-12)
    files = {p.name[:6] for p in (tmp_path / "ledger/checkpoint/memory").glob("0*.npy")}
    assert len(files) == len(kept)


def test_totals_follow_an_enrolled_table_that_changes(tmp_path: Path) -> None:
    small = federation(tmp_path)
    people = pl.read_parquet(tmp_path / "people.parquet")
    given: dict[str, Any] = {"population": None, "enrolled": tmp_path / "e.parquet"}
    given["targets"] = {"age": float(people["age"].mean())}  # type: ignore[arg-type]
    people.filter("enrolled").drop("enrolled").write_parquet(tmp_path / "e.parquet")
    small.trained(BEFORE, inner(), **given)
    people.filter(pl.col("unit_id").is_in([*NOW])).drop("enrolled").write_parquet(
        tmp_path / "e.parquet"
    )
    result = small.trained(AFTER, inner(), **given)
    assert result.train_metrics_clientapp[AFTER]["fedipw-available"] == len(NOW)
    assert "loss-target" in result.evaluate_metrics_clientapp[AFTER]


def test_a_client_comes_back(tmp_path: Path) -> None:
    small = federation(tmp_path)
    table = pl.read_parquet(tmp_path / "people.parquet")
    small.trained(2, scheme="efficient-hajek")
    away = pl.col("enrolled") & (pl.col("unit_id") != "u3")
    table.with_columns(away).write_parquet(tmp_path / "people.parquet")
    small.trained(4, scheme="efficient-hajek")
    table.write_parquet(tmp_path / "people.parquet")
    small.trained(6, scheme="efficient-hajek")
    ledger = Ledger(tmp_path / "ledger")
    assert ["u3" in set(ledger.read(r)["unit_id"]) for r in (2, 3, 5)] == [True, False, True]


def test_other_columns_and_types_are_named(tmp_path: Path) -> None:
    def register(**columns: Any) -> Register:
        return Register.of(tmp_path, Members(pl.DataFrame({"unit_id": ["a", "b"], **columns})))

    register(age=[1, 2], os=["x", "y"]).save()
    Ledger(tmp_path).append(1, pl.DataFrame({"unit_id": ["a", "b"], "invited": True,
                                             "replied": True}))  # fmt: skip
    assert not register(age=[1.0, 2.0], os=["x", "y"]).change  # the same numbers
    assert register(age=[1, 2], os=["x", "z"]).change == EnrollmentChange(other=1)
    assert register(age=[1, None], wifi=[True, True]).change == EnrollmentChange(
        other=1, gained=("wifi",), lost=("os",)
    )


def test_a_damaged_register_is_named(tmp_path: Path) -> None:
    small = federation(tmp_path)
    small.trained(1)
    path = tmp_path / "ledger" / "checkpoint" / "enrolled.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"enrolled.parquet"):
        small.trained(2)
    pl.DataFrame({"unit_id": ["u0"]}).write_parquet(path)
    with pytest.raises(InputError, match=r"enrolled.parquet is damaged: it has no column"):
        small.trained(2)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"scheme": "participation-only"}, "scheme: 'augmented' -> 'participation-only'"),
        ({"participation": "wifi"}, "columns: 'battery' -> 'wifi'; participation: 'battery' -> "),
        ({"enrollment": "age**2", "l2": 1.0}, r"enrollment: '.' -> 'age\*\*2'; l2: 0.0 -> 1.0"),
        ({"classifier": "boosting", "folds": 2}, "classifier: none -> 'boosting'; folds: none"),
    ],
)  # fmt: skip
def test_other_settings_are_named(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    small = federation(tmp_path)
    small.trained(2)
    changed(small)
    with pytest.raises(InputError, match=words):
        small.trained(3, **other)
