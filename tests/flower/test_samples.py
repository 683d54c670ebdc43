"""The mean over samples as target: counts from the table of clients, never from replies."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

from cli.command import fedipw
from fedipw.errors import InputError
from fedipw.flower import declined

from .federations import Small, answered, theta

ROUNDS = 3


def liar(message: Message, index: int) -> Message:
    """Reply, now and then, and claim a great many examples."""
    if index == 2:
        return declined(message)
    return answered(message, {"theta": theta(message) + 1.0}, **{"num-examples": 10**9})


def federation(where: Path) -> tuple[Small, dict[str, int]]:
    where.mkdir(exist_ok=True)
    small = Small(where, behaviours=dict.fromkeys((3, 5), liar))
    counts = (7 * pl.int_range(pl.len()) % 11 + 1).alias("n_samples")
    people = small.people.with_columns(counts)
    people.write_parquet(where / "people.parquet")
    return small, dict(zip(people["unit_id"], people["n_samples"], strict=True))


def inclusion(small: Small, scheme: str, **settings: Any) -> pl.DataFrame:
    """Return the command's probabilities and client weights of every reply, by round."""
    sources = settings.get("sources", ["--population", small.where / "people.parquet",
                                       "--enrollment", "age"])  # fmt: skip
    code, _, err = fedipw(
        "weights", *sources, "--participation", "battery", "--rounds", small.where / "ledger",
        "--scheme", scheme, "--missing", "drop", "--soft", "--out", small.where / "w.parquet",
        "--availability", "age",
    )  # fmt: skip
    assert code == 0, err
    return pl.read_parquet(small.where / "w.parquet")


@pytest.mark.parametrize("scheme", ["fedipw", "fedipw-hajek", None])
def test_weights_are_a_plain_loop_over_trusted_counts(tmp_path: Path, scheme: str | None) -> None:
    small, counts = federation(tmp_path)
    total = sum(counts.values())
    result = small.trained(
        ROUNDS, scheme=scheme, examples="n_samples", enrollment="age", availability="age"
    )
    offline = inclusion(small, "fedipw")
    assert not small.strategy(examples="n_samples", enrollment="age", availability="age",
                              scheme=scheme).augmenter  # fmt: skip
    for index in range(1, ROUNDS + 1):
        told = result.train_metrics_clientapp[index]["fedipw-weights"]
        mine = offline.filter(round=index)
        expected = []
        for unit, prob in zip(mine["unit_id"], mine["inclusion_prob"], strict=True):
            expected.append(counts[unit] / (total * prob))  # (W22)
        if scheme != "fedipw":
            expected = [weight / sum(expected) for weight in expected]  # (W8)
        np.testing.assert_allclose(told, expected, rtol=1e-10)


def test_with_totals_the_mean_count_is_a_target(tmp_path: Path) -> None:
    """Calibrated to totals, a weight is q n / (p nbar), nbar the population's mean count."""
    small, counts = federation(tmp_path)
    people = pl.read_parquet(tmp_path / "people.parquet")
    people.filter("enrolled").drop("enrolled").write_parquet(tmp_path / "enrolled.parquet")
    mean = float(np.mean(list(counts.values())))
    (tmp_path / "targets.csv").write_text(f"name,value\nage,0.1\nn_samples,{mean}\n")
    given: dict[str, Any] = {
        "population": None, "enrolled": tmp_path / "enrolled.parquet",
        "targets": tmp_path / "targets.csv", "availability": "age", "examples": "n_samples",
    }  # fmt: skip
    result = small.trained(ROUNDS, scheme="calibrated-quadratic", **given)
    sources = ["--enrolled", tmp_path / "enrolled.parquet", "--targets", tmp_path / "targets.csv"]
    offline = inclusion(small, "calibrated-quadratic", sources=sources)
    for index in range(1, ROUNDS + 1):
        told = result.train_metrics_clientapp[index]["fedipw-weights"]
        mine = offline.filter(round=index)
        expected = [
            weight * counts[unit] / mean
            for unit, weight in zip(mine["unit_id"], mine["weight"], strict=True)
        ]
        np.testing.assert_allclose(told, expected, rtol=1e-10)


def test_evaluation_is_of_samples_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"enrollment": "age", "availability": "age"}
    told = {}
    for name, examples in (("clients", None), ("samples", "n_samples")):
        one, counts = federation(tmp_path / name)
        result = one.trained(
            2, FedAvg(min_available_nodes=1), scheme="fedipw-hajek", examples=examples, **settings
        )
        told[name] = result.evaluate_metrics_clientapp[2]
    evaluation = tmp_path / "samples" / "ledger" / "evaluation"
    metrics = pl.read_parquet(evaluation / "metrics" / "loss" / "round-000002.parquet")
    trusted = pl.Series([counts[unit] for unit in metrics["unit_id"]])
    metrics.with_columns(trusted.alias("n")).write_parquet(tmp_path / "m.parquet")
    code, out, err = fedipw(
        "evaluate", "--population", tmp_path / "samples" / "people.parquet", "--rounds", evaluation,
        "--metrics", tmp_path / "m.parquet", "--samples", "--scheme", "fedipw-hajek",
        "--enrollment", "age", "--participation", "battery", "--availability", "age", "--missing",
        "drop", "--json",
    )  # fmt: skip
    assert code == 0, err
    lines = {(e["estimator"], e["group"]): e for e in json.loads(out)["estimates"]}
    found = lines["hajek", "everyone"]
    for key, part in (("", "estimate"), ("-low", "low"), ("-high", "high")):
        assert told["samples"][f"loss-target{key}"] == pytest.approx(found[part], rel=1e-9)
    assert abs(told["samples"]["loss-target"] - told["clients"]["loss-target"]) > 1e-3


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (pl.col("n_samples"), {"examples": "rows"}, "has no column 'rows'"),
        (pl.lit("many").alias("n_samples"), {}, "must hold numbers of samples"),
        (pl.when(pl.col("unit_id") == "u3").then(0).otherwise(pl.col("n_samples"))
         .alias("n_samples"), {}, "that of u3 is not"),
        (pl.when(pl.col("enrolled")).then(pl.col("n_samples")).alias("n_samples"),
         {"scheme": "fedipw"}, "48 clients of the population have no number of samples"),
        (pl.col("n_samples"), {"scheme": "augmented"}, "without memory and regression"),
        (pl.col("n_samples"), {"scheme": "mifa+efficient"}, "without memory and regression"),
    ],
)  # fmt: skip
def test_counts_that_cannot_be_are_refused(
    tmp_path: Path, change: pl.Expr, settings: dict[str, Any], words: str
) -> None:
    small, _ = federation(tmp_path)
    table = pl.read_parquet(tmp_path / "people.parquet").with_columns(change)
    table.write_parquet(tmp_path / "people.parquet")
    with pytest.raises(InputError, match=words):
        small.strategy(**{"examples": "n_samples", "enrollment": "age", **settings})


def test_without_their_mean_among_the_totals_only_shares_are_known(tmp_path: Path) -> None:
    small, _ = federation(tmp_path)
    people = pl.read_parquet(tmp_path / "people.parquet").filter("enrolled").drop("enrolled")
    given: dict[str, Any] = {"population": None, "enrolled": people, "targets": {"age": 0.1}}
    with pytest.raises(InputError, match="mean of 'n_samples' is not among the totals"):
        small.strategy(examples="n_samples", scheme="calibrated-quadratic", **given)
    small.strategy(examples="n_samples", scheme="calibrated-quadratic-hajek", **given)
