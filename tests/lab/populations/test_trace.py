"""Availability from real files: what is read, in which order, and every way a log can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.lab.clients import ClientData
from fedipw.lab.mechanisms import TraceAvailability
from fedipw.lab.mechanisms.trace import TraceProcess
from fedipw.tables import Population

PEOPLE = Population.of({"unit_id": ["a", "b", "c"], "age": [1, 2, 3]})
CLIENTS = ClientData(
    features=np.zeros((3, 1)), labels=np.zeros(3, dtype=np.int8), offsets=np.arange(4)
)
LOG: dict[str, list[Any]] = {  # two rounds, shuffled, with two covariates
    "round": [2, 1, 2, 1, 1, 2],
    "unit_id": ["c", "b", "a", "c", "a", "b"],
    "replied": [True, False, False, True, True, True],
    "battery": [0.9, 0.2, 0.7, 0.3, 0.1, 0.8],
    "apps": [9, 2, 7, 3, 1, 8],
}


def written(path: Path, columns: dict[str, list[Any]]) -> Path:
    frame = pl.DataFrame(columns)
    if path.suffix == ".csv":
        frame.write_csv(path)
    else:
        frame.write_parquet(path)
    return path


def started(path: Path, *, cycle: bool = False, people: Population = PEOPLE) -> TraceProcess:
    return TraceAvailability(path=path, cycle=cycle).start(
        people, CLIENTS, np.random.default_rng(0)
    )


def log_without(name: str) -> dict[str, list[Any]]:
    return {key: values for key, values in LOG.items() if key != name}


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_rounds_come_in_order_and_clients_in_the_populations_order(
    tmp_path: Path, name: str
) -> None:
    process = started(written(tmp_path / name, LOG))
    assert process.columns == ("battery", "apps")
    first, second = process.advance(), process.advance()
    assert (first.index, second.index) == (1, 2)
    assert first.replied.tolist() == [True, False, True]
    assert second.replied.tolist() == [False, True, True]
    np.testing.assert_array_equal(first.covariates, [[0.1, 1.0], [0.2, 2.0], [0.3, 3.0]])
    np.testing.assert_array_equal(second.covariates, [[0.7, 7.0], [0.8, 8.0], [0.9, 9.0]])
    assert first.participation_prob is None


def test_integer_identifiers_and_no_covariates(tmp_path: Path) -> None:
    people = Population.of({"unit_id": [30, 10, 20]})
    path = written(
        tmp_path / "log.csv",
        {"round": [1, 1, 1], "unit_id": [10, 20, 30], "replied": [True, False, False]},
    )
    process = started(path, people=people)
    drawn = process.advance()
    assert process.columns == ()
    assert drawn.covariates.shape == (3, 0)
    assert drawn.replied.tolist() == [False, True, False]


def test_ten_rounds_are_ordered_as_numbers(tmp_path: Path) -> None:
    people = Population.of({"unit_id": [1]})
    path = written(
        tmp_path / "log.csv",
        {
            "round": [10, 2, 1, 9],
            "unit_id": [1] * 4,
            "replied": [True] * 4,
            "x": [10.0, 2.0, 1.0, 9.0],
        },
    )
    process = started(path, people=people)
    assert [float(process.advance().covariates[0, 0]) for _ in range(4)] == [1.0, 2.0, 9.0, 10.0]


def test_clients_outside_the_population_are_named(tmp_path: Path) -> None:
    extra: dict[str, list[Any]] = {
        "round": [1, 2],
        "unit_id": ["z", "z"],
        "replied": [True, True],
        "battery": [0.5, 0.5],
        "apps": [1, 1],
    }
    path = written(tmp_path / "log.csv", {key: LOG[key] + extra[key] for key in LOG})
    with pytest.raises(InputError, match=r"names 1 clients that are not in the population \(z\)"):
        started(path)


def test_the_end_of_the_log_is_an_error_unless_it_cycles(tmp_path: Path) -> None:
    path = written(tmp_path / "log.parquet", LOG)
    once = started(path)
    once.advance()
    once.advance()
    with pytest.raises(InputError, match=r"holds 2 rounds and round 3 .*set cycle = true"):
        once.advance()
    again = started(path, cycle=True)
    drawn = [again.advance() for _ in range(5)]
    assert [r.index for r in drawn] == [1, 2, 3, 4, 5]
    for r in (2, 4):
        np.testing.assert_array_equal(drawn[r].replied, drawn[0].replied)
        np.testing.assert_array_equal(drawn[r].covariates, drawn[0].covariates)
    np.testing.assert_array_equal(drawn[3].replied, drawn[1].replied)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No trace file .*absent\.csv"):
        started(tmp_path / "absent.csv")


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("round,unit_id,replied\n1,a,true\n")
    with pytest.raises(InputError, match=r"must be \.csv or \.parquet, not log\.txt"):
        started(path)


@pytest.mark.parametrize("name", ["round", "unit_id", "replied"])
def test_a_missing_column_is_named(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "log.csv", log_without(name))
    with pytest.raises(InputError, match=rf"log\.csv has no column {name}; it has "):
        started(path)


@pytest.mark.parametrize("kept", [0, 3, 8, 100, -9])
def test_a_truncated_parquet_file_is_an_error_that_names_it(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path / "log.parquet", LOG)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"log\.parquet cannot be read .*write it again"):
        started(path)


def test_an_empty_csv_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("")
    with pytest.raises(InputError, match=r"log\.csv cannot be read"):
        started(path)


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_a_log_without_rows_is_refused(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, {"round": [], "unit_id": [], "replied": []})
    with pytest.raises(InputError, match="has no rows"):
        started(path)


def test_a_text_covariate_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", {**LOG, "network": ["wifi"] * 6})
    with pytest.raises(InputError, match="must be numeric; network are not"):
        started(path)


def test_a_missing_covariate_is_named_with_round_and_row(tmp_path: Path) -> None:
    gap = {**LOG, "battery": [0.9, None, 0.7, 0.3, 0.1, 0.8]}
    path = written(tmp_path / "log.parquet", gap)
    with pytest.raises(InputError, match=r"round 1: .*'battery' \(1 of 3 rows, first at row 1\)"):
        started(path)


def test_a_duplicated_client_is_refused_with_its_round(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", {**LOG, "unit_id": ["c", "b", "c", "c", "a", "b"]})
    with pytest.raises(InputError, match="round 2 names a unit_id more than once"):
        started(path)


def test_an_absent_client_is_named_with_its_round(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", {key: values[1:] for key, values in LOG.items()})
    with pytest.raises(InputError, match=r"round 2 lacks 1 of 3 clients \(c\)\. Give every"):
        started(path)


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
@pytest.mark.parametrize(
    "replied", [[True, False, None, True, True, True], [1, 0, 0, 1, 1, 1], ["yes"] * 6]
)
def test_replies_that_are_not_true_or_false_are_refused(
    tmp_path: Path, name: str, replied: list[Any]
) -> None:
    path = written(tmp_path / name, {**LOG, "replied": replied})
    with pytest.raises(InputError, match="replied must be true or false in every row"):
        started(path)


def test_a_missing_round_number_is_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "log.parquet", {**LOG, "round": [2, 1, None, 1, 1, 2]})
    with pytest.raises(InputError, match="1 rows have no round"):
        started(path)


def test_identifiers_of_another_type_are_explained(tmp_path: Path) -> None:
    people = Population.of({"unit_id": [1, 2, 3]})
    path = written(tmp_path / "log.csv", LOG)
    with pytest.raises(InputError, match="unit_id is String but the population's is Int64"):
        started(path, people=people)
