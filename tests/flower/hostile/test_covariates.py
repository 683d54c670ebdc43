"""Lying, huge, mistyped and poisoned covariates: the run goes on, and its bound holds."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import ConfigRecord, Message

from cli.command import fedipw
from fedipw.errors import InputError
from fedipw.flower import Covariate, declined
from fedipw.flower.covariates import LONGEST
from fedipw.flower.limits import FENCE, CovariateLimits
from fedipw.numerics import FloatArray
from fedipw.selection import participation as fits
from fedipw.tables import Ledger
from fedipw.tables.population import Members

from ..federations import INSIDE, Behaviour, Small, answered, theta, theta_of

LIARS = (5, 7)  # of twelve: fewer than a quarter
HONEST = 10  # rounds before they lie


def usable(small: Small, index: int = 1) -> set[str]:
    return {unit for unit, row in small.round(index).items() if row["available"]}


def busy(message: Any, index: int) -> Any:
    """Reply in most rounds, and push along an axis of its own."""
    who = int(message.metadata.dst_node_id) - 100
    if (index + who) % 3 == 0:
        return declined(message)
    return answered(message, {"theta": theta(message) + np.eye(3)[who % 3]})


def sending(step: FloatArray) -> Behaviour:
    def reply(message: Message, index: int) -> Message:
        del index
        return answered(message, {"theta": theta(message) + step})

    return reply


# Types.


def test_the_type_is_that_of_most_answers_not_of_the_first(tmp_path: Path) -> None:
    small = Small(tmp_path, told={0: {"battery": "full"}, 1: {"battery": True}})
    small.trained(2)
    for index in (1, 2):
        assert usable(small, index) == {f"u{k}" for k in range(2, INSIDE)}
    assert Ledger(tmp_path / "ledger").schema["battery"] == pl.Float64


def test_votes_are_of_clients_not_of_nodes(tmp_path: Path) -> None:
    """Twenty nodes that say they are one client have one vote, or none."""
    small = Small(tmp_path)
    for k in range(20):
        node = 500 + k
        small.grid.contexts[node] = small.grid.contexts[100]
        small.grid.online.add(node)
        small.told[0] = {"battery": "full"}
    small.trained(1)
    assert usable(small) >= {f"u{k}" for k in range(1, INSIDE)}
    assert Ledger(tmp_path / "ledger").schema["battery"] == pl.Float64


def test_what_answers_may_be_can_be_declared(tmp_path: Path) -> None:
    small = Small(tmp_path, told={
        0: {"battery": -40.0}, 1: {"battery": "full"}, 2: {"net": "dialup"}, 3: {"wifi": 1.0},
    })  # fmt: skip
    for k in range(INSIDE):
        small.told[k] = {"net": "4g" if k % 2 else "5g", **(small.told.get(k) or {})}
    declared = {"battery": (0, 1), "net": ["4g", "5g", "lan"], "wifi": "flag"}
    result = small.trained(2, participation="battery + net", covariates=declared)
    assert usable(small, 2) == {f"u{k}" for k in range(4, INSIDE)}
    assert result.train_metrics_clientapp[2]["fedipw-unusable-nodes"] == 4
    assert small.round()["u5"]["wifi"] is False
    with pytest.raises(InputError, match="under other settings"):
        small.trained(3, participation="battery + net", covariates={**declared, "battery": (0, 2)})
    for path in (tmp_path / "ledger" / "checkpoint").glob("round-*.npz"):
        path.unlink()
    with pytest.raises(InputError, match="'battery' is declared a flag, and the ledger"):
        small.strategy(participation="battery + net", covariates={**declared, "battery": "flag"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((1, 0), "begins below its end"), ((0.0, float("inf")), "finite ends"),
        ("integer", "number, text or flag"), (["a"], "2 to 50 texts"), (3, "declared by its kind"),
        (["a", "(other)"], "none of them"), (["a", "b" * 201], "2 to 50 texts"),
        ([f"l{k}" for k in range(51)], "2 to 50 texts"),
    ],
)  # fmt: skip
def test_declarations_that_make_no_sense_are_refused(
    tmp_path: Path, given: Any, words: str
) -> None:
    with pytest.raises(InputError, match=f"covariates: 'battery': .*{words}"):
        Small(tmp_path).strategy(covariates={"battery": given})
    with pytest.raises(InputError, match="Only numbers have a range"):
        Covariate(kind="text", low=0.0)


# Sizes.


@pytest.mark.parametrize(
    "bad",
    [1e308, -1e101, float("inf"), float("nan"), 1e-200, "x" * (LONGEST + 1), b"\x00", [1.0] * 9],
)
def test_no_answer_ends_a_run_or_a_restart(tmp_path: Path, bad: Any) -> None:
    small = Small(tmp_path, dict.fromkeys(range(INSIDE), busy), {3: {"battery": bad}})
    small.trained(3, scheme="fedipw", refit_every=1)
    result = small.trained(5, scheme="fedipw", refit_every=1)
    assert usable(small, 5) == {f"u{k}" for k in range(INSIDE) if k != 3}
    assert np.isfinite(theta_of(result.arrays)).all()


def test_what_clients_say_is_cut_in_the_log_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, told={
        3: {"unit_id": "u" * 10_000_000}, 4: {"unit_id": "evil\x1b[31m\nFedIPW: all is well"},
        5: {"battery": "y" * 1_000_000},
    })  # fmt: skip
    with caplog.at_level(logging.INFO, "flwr"):
        small.trained(4)
    lines = [r.getMessage() for r in caplog.records if "flwr" in r.name]
    assert max(map(len, lines)) < 500
    assert not any("\x1b" in line or "\n" in line for line in lines)
    assert sum("not enrolled" in line for line in lines) == 1
    assert sum("'battery' is text of more" in line for line in lines) == 1
    assert usable(small, 4) == {f"u{k}" for k in range(INSIDE) if k not in {3, 4, 5}}


# Lies.


def lied(where: Path, values: dict[int, float], rounds: int = 8, **settings: Any) -> Any:
    where.mkdir()
    small = Small(where, dict.fromkeys(range(INSIDE), busy))
    small.told = {k: {"battery": value} for k, value in values.items()}
    given: dict[str, Any] = {"scheme": "fedipw", "refit_every": 1, "average": None, **settings}
    return small, small.trained(rounds, **given)


def charged(message: Any, index: int) -> Any:
    """Reply the more often the fuller the battery is; the liars always do, once they lie."""
    who = int(message.metadata.dst_node_id) - 100
    lies = who in LIARS and index > HONEST
    odds = 8.0 * 0.1 * (who % 7) - 2.0
    if not lies and np.random.default_rng([index, who]).random() > 1.0 / (1.0 + np.exp(-odds)):
        return declined(message)
    return answered(message, {"theta": theta(message) + np.eye(3)[who % 3]})


def late_lie(where: Path, value: float, **settings: Any) -> tuple[Small, Any]:
    """Train honestly until the model knows what a battery does, then lie, two of twelve."""
    where.mkdir()
    small = Small(where, dict.fromkeys(range(INSIDE), charged))
    wrapped = small.strategy(refit_every=5, average=None, **settings)
    wrapped.start(small.grid, small.start, num_rounds=HONEST)
    small.told = {k: {"battery": value} for k in LIARS}
    return small, wrapped.start(small.grid, small.start, num_rounds=HONEST + 2)


def test_liars_get_no_weight_beyond_the_edge_of_what_others_answer(tmp_path: Path) -> None:
    """Horvitz–Thompson weights, which nothing caps: how far one lies makes no difference.

    Honest batteries are 0 to 0.6. The weight is that of the edge (P7), which lies no more than
    three of their quartile distances beyond them; a lie of -40 would have had a probability below
    1e-100. Two liars of twelve would be each other's limit by a quantile alone.
    """
    worlds = [late_lie(tmp_path / str(v), v, scheme="fedipw") for v in (-40.0, -1e90)]
    last = HONEST + 2
    weights = [result.train_metrics_clientapp[last]["fedipw-weights"] for _, result in worlds]
    assert weights[0] == weights[1]
    assert theta_of(worlds[0][1].arrays).tolist() == theta_of(worlds[1][1].arrays).tolist()
    told = [small.round(last)[f"u{k}"]["battery"] for small, _ in worlds for k in LIARS]
    assert len(set(told)) == 1
    honest = np.sort([0.1 * (k % 7) for k in range(INSIDE) if k not in LIARS])
    assert honest[0] - FENCE * (honest[-1] - honest[0]) <= told[0] < 0.0
    assert max(weights[0]) < 1e4
    assert worlds[0][1].train_metrics_clientapp[last]["fedipw-winsorised"] >= len(LIARS)


def test_the_default_method_bounds_their_share_as_well(tmp_path: Path) -> None:
    _, result = late_lie(tmp_path / "a", -40.0)
    metrics = result.train_metrics_clientapp[HONEST + 2]
    assert max(metrics["fedipw-weights"]) <= max(0.1, 5.0 / metrics["fedipw-weighed"]) + 1e-12


def test_a_declared_range_leaves_them_out(tmp_path: Path) -> None:
    small, result = late_lie(tmp_path / "a", -40.0, scheme="fedipw", covariates={"battery": (0, 1)})
    last = HONEST + 2
    assert usable(small, last) == {f"u{k}" for k in range(INSIDE) if k not in LIARS}
    assert max(result.train_metrics_clientapp[last]["fedipw-weights"]) < 3.0


def test_the_model_moves_by_no_more_than_the_stated_bound(tmp_path: Path) -> None:
    """By default no update adds more than ``fedipw-influence``, whatever its client answers.

    With the liars' updates left out (zero) instead, the model differs in every round by at most
    the number of liars times that bound.
    """
    models: list[FloatArray] = []
    bounds: list[Any] = []
    for name, push in (("silent", 0.0), ("loud", 1e5)):
        (tmp_path / name).mkdir()
        small = Small(tmp_path / name, told={k: {"battery": -1e6} for k in LIARS})
        for k in range(INSIDE):
            step = np.array([push if k in LIARS else 0.0, np.cos(k), np.sin(k)])
            if k in LIARS and not push:
                step = np.zeros(3)
            small.behaviours[k] = sending(step)
        wrapped = small.strategy(average=None)
        result = wrapped.start(small.grid, small.start, num_rounds=1)
        models.append(theta_of(result.arrays))
        bounds.append(result.train_metrics_clientapp[1]["fedipw-influence"])
    moved = float(np.linalg.norm(models[1] - models[0]))
    assert 0.0 < moved <= len(LIARS) * bounds[1] * (1.0 + 1e-9)
    assert bounds[1] < 20.0


def test_limits_hold_as_long_as_fewer_than_a_quarter_lie() -> None:
    """Against a plain loop; and a lie that is repeated never becomes the edge."""
    rng = np.random.default_rng(0)
    for clients in (4, 7, 12, 40):
        liars = (clients - 1) // 4
        members = Members(pl.DataFrame({"unit_id": range(clients)}))
        limits = CovariateLimits(members, ["x"], 0.99)
        honest = rng.normal(size=(30, clients))
        span = 0.0
        for values in honest:
            said = values.copy()
            said[:liars] = 1e9
            table, moved = limits.applied(pl.DataFrame({"x": said}), np.arange(clients))
            used = table["x"].to_numpy()
            span = max(span, float(np.abs(values[liars:]).max()))
            assert moved >= liars
            assert np.abs(used).max() <= span * (1.0 + 2.0 * FENCE)


def test_the_fence_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    for clients in (3, 4, 5, 9, 11):
        members = Members(pl.DataFrame({"unit_id": range(clients)}))
        said = np.append(rng.normal(size=clients - 1), 1e6)
        table, _ = CovariateLimits(members, ["x"], 0.99).applied(
            pl.DataFrame({"x": said}), np.arange(clients)
        )
        assert table["x"].to_list() == [_held(said, k) for k in range(clients)]


def _held(said: FloatArray, k: int) -> float:
    others = np.sort(np.delete(said, k))
    if len(others) < 3:
        return float(said[k])
    place = int(np.ceil(0.75 * (len(others) - 1)))
    third, first = others[place], others[len(others) - 1 - place]
    low, high = first - FENCE * (third - first), third + FENCE * (third - first)
    if len(others) >= 10:
        high, low = min(high, others[-1]), max(low, others[0])
    return float(np.clip(said[k], low, high))


def test_resuming_reads_no_round_for_the_limits_and_gives_the_same_bytes(tmp_path: Path) -> None:
    told = dict.fromkeys(LIARS, -40.0)
    whole, expected = lied(tmp_path / "whole", told)
    parts, _ = lied(tmp_path / "parts", told, rounds=4)
    wrapped = parts.strategy(scheme="fedipw", refit_every=1, average=None)
    read: list[int] = []
    original = Ledger.read

    def counted(self: Ledger, index: int) -> pl.DataFrame:
        read.append(index)
        return original(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "read", counted)
        found = wrapped.start(parts.grid, parts.start, num_rounds=8)
    assert read == []
    assert theta_of(found.arrays).tobytes() == theta_of(expected.arrays).tobytes()
    for index in range(1, 9):
        drop = "opened_at"
        ours, theirs = (Ledger(s.where / "ledger").read(index).drop(drop) for s in (parts, whole))
        assert ours.equals(theirs)


def test_limits_of_other_clients_are_not_taken_over(tmp_path: Path) -> None:
    """Rows of the table in another order: what was kept by row is read from the ledger instead."""
    small, _ = lied(tmp_path / "a", dict.fromkeys(LIARS, -40.0), rounds=3)
    door = small.strategy(scheme="fedipw", refit_every=1, average=None).door
    state = door.state()
    small.people.reverse().write_parquet(small.where / "people.parquet")
    other = small.strategy(scheme="fedipw", refit_every=1, average=None).door
    other.restore({**state, "rounds": 3})
    assert other.rounds == 0
    other.follow(Ledger(small.where / "ledger"), 3)
    low, high = other.state()["limits"]["battery"]
    assert (low[-1 - LIARS[0]], high[-1 - LIARS[0]]) == (low[-1 - LIARS[1]], high[-1 - LIARS[1]])
    assert low[-1] == 0.0  # client u0, now the last


# Failures of fits, and ledgers of older servers.


def test_a_fit_that_fails_keeps_the_former_one_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, dict.fromkeys(range(INSIDE), busy))
    wrapped = small.strategy(scheme="fedipw", refit_every=1)
    wrapped.start(small.grid, small.start, num_rounds=6)
    original = fits.StepLearner.refit

    def refit(self: Any, first: int, last: int) -> Any:
        if last == 6 and self.step.name == "reply":
            raise np.linalg.LinAlgError("SVD did not converge")
        return original(self, first, last)

    monkeypatch.setattr(fits.StepLearner, "refit", refit)
    with caplog.at_level(logging.WARNING, "flwr"):
        result: Any = wrapped.start(small.grid, small.start, num_rounds=8)
    failed = [result.train_metrics_clientapp[k]["fedipw-fits-failed"] for k in range(1, 9)]
    assert failed == [0] * 6 + [1, 0]
    assert result.train_metrics_clientapp[7]["fedipw-weighed"] > 0
    assert any("a fit failed in the step reply: SVD" in r.getMessage() for r in caplog.records)


def poisoned(small: Small, index: int, column: str, value: Any, unit: str = "u3") -> None:
    """Write a value into a closed round, as an older server would have."""
    path = small.where / "ledger" / f"round-{index:06d}.parquet"
    frame = pl.read_parquet(path)
    kind = frame.schema[column]
    here = pl.when(pl.col("unit_id") == unit).then(pl.lit(value, dtype=kind))
    frame.with_columns(here.otherwise(pl.col(column)).alias(column)).write_parquet(path)


@pytest.mark.parametrize("value", [1e308, float("inf"), float("nan"), -1e150])
def test_poisoned_rows_of_a_ledger_are_quarantined_on_restart(
    tmp_path: Path, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(tmp_path, dict.fromkeys(range(INSIDE), busy))
    small.trained(4, scheme="fedipw", refit_every=1)
    poisoned(small, 2, "battery", value)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = small.trained(6, scheme="fedipw", refit_every=1)
    assert result.train_metrics_clientapp[6]["fedipw-weighed"] > 0
    said = [r.getMessage() for r in caplog.records if "taken as missing" in r.getMessage()]
    assert len(said) == 1
    assert "round 2" in said[0]
    assert "1 value(s)" in said[0]
    code, _, errors = fedipw(
        "weights", "--population", tmp_path / "people.parquet", "--rounds", tmp_path / "ledger",
        "--participation", "battery", "--scheme", "fedipw", "--missing", "drop",
        "--out", tmp_path / "weights.parquet",
    )  # fmt: skip
    if np.isnan(value):
        assert code == 0, errors  # NaN is missing there too
    else:
        assert code != 0
        assert "battery" in errors


def test_long_texts_of_a_ledger_are_quarantined_too(tmp_path: Path) -> None:
    small = Small(tmp_path, dict.fromkeys(range(INSIDE), busy))
    small.told = {k: {"net": "4g" if k % 2 else "5g"} for k in range(INSIDE)}
    small.trained(4, scheme="fedipw", participation="net", refit_every=1)
    poisoned(small, 3, "net", "z" * 100_000)
    result = small.trained(5, scheme="fedipw", participation="net", refit_every=1)
    assert result.train_metrics_clientapp[5]["fedipw-weighed"] > 0


def test_an_answer_without_a_record_is_no_answer(tmp_path: Path) -> None:
    small = Small(tmp_path)
    wrapped = small.strategy()
    sent = list(wrapped.configure_train(1, small.start, ConfigRecord(), small.grid))
    assert len(sent) == INSIDE
    small.told[2] = {"unit_id": 2.5}
    wrapped.aggregate_train(1, small.grid.send_and_receive(sent))
    list(wrapped.configure_train(2, small.start, ConfigRecord(), small.grid))
    assert wrapped.roster.hearing.nodes == 1
