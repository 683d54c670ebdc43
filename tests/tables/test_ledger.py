"""The round ledger on disk."""

import json
from pathlib import Path

import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.tables.ledger import Ledger

ROWS = {
    "unit_id": ["a", "b", "c"],
    "available": [True, True, False],
    "invited": [True, True, False],
    "invite_prob": [0.5, 0.5, None],
    "replied": [True, False, False],
    "battery": [0.9, 0.2, None],
}


def frame(**changes: object) -> pl.DataFrame:
    return pl.DataFrame({**ROWS, **changes})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "rounds")
    for index in (1, 2, 3):
        made.append(index, frame())
    return made


def test_rounds_come_back_in_order(ledger: Ledger) -> None:
    assert ledger.rounds == (1, 2, 3)
    assert ledger.covariates == ("battery",)
    assert [set(part["round"]) for part in ledger] == [{1}, {2}, {3}]
    assert ledger.read(2).drop("round").equals(frame())
    names = sorted(p.name for p in ledger.directory.iterdir())
    assert names == ["ledger.json", *(f"round-00000{k}.parquet" for k in (1, 2, 3))]


def test_a_round_being_written_is_not_seen(ledger: Ledger) -> None:
    (ledger.folder / ".round-000004.parquet.partial").write_bytes(b"half")
    assert Ledger(ledger.directory).rounds == (1, 2, 3)
    assert len(list(Ledger(ledger.directory))) == 3


def test_only_the_next_round_can_be_closed(ledger: Ledger) -> None:
    for index in (3, 5):
        with pytest.raises(InputError, match=f"Round {index} cannot be closed.* last .* is 3"):
            ledger.append(index, frame())


def test_missing_and_truncated_rounds_are_named(ledger: Ledger) -> None:
    path = ledger.folder / "round-000003.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"round-000003\.parquet is not a readable parquet table"):
        list(Ledger(ledger.directory))
    (ledger.folder / "round-000002.parquet").unlink()
    with pytest.raises(InputError, match=r"round 2 is missing; rounds 1 to 3 are expected"):
        list(Ledger(ledger.directory))
    with pytest.raises(InputError, match="No ledger directory"):
        list(Ledger(ledger.directory / "none"))


def test_other_columns_and_types_are_named(ledger: Ledger) -> None:
    with pytest.raises(InputError, match=r"column 'battery' is String, in .*01\.parquet it is"):
        ledger.append(4, frame(battery=["full", "low", None]))
    with pytest.raises(InputError, match="also network"):
        ledger.append(4, frame(network=["wifi", "wifi", None]))
    with pytest.raises(InputError, match="no battery"):
        ledger.append(4, frame().drop("battery"))
    changed = frame(battery=[1, 2, None]).with_columns(round=pl.lit(3, dtype=pl.Int64))
    changed.write_parquet(ledger.folder / "round-000003.parquet")
    with pytest.raises(InputError, match=r"round-000003\.parquet: column 'battery' is Int64"):
        list(Ledger(ledger.directory))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit_id": ["a", "a", "c"]}, "unit_id a stands more than once"),
        ({"unit_id": ["a", None, "c"]}, "1 rows have no unit_id"),
        ({"replied": [True, False, True]}, r"1 client\(s\) replied without being invited: c"),
        ({"invited": [True, True, True]}, r"1 client\(s\) invited without being available: c"),
        ({"replied": [1, 0, 0]}, "'replied' must be true or false"),
        ({"replied": [True, None, False]}, "with 1 nulls"),
        ({"invite_prob": [0.5, None, None]}, r"'invite_prob' must lie in \(0, 1\].*unit_id b"),
        ({"invite_prob": [0.5, 1.5, None]}, r"1 row\(s\) do not"),
        ({"round": [7, 7, 7]}, "column 'round' holds 7"),
    ],
)
def test_rounds_that_cannot_be(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    ledger = Ledger(tmp_path / "rounds")
    with pytest.raises(InputError, match=message):
        ledger.append(1, frame(**changes))
    with pytest.raises(InputError, match="has no column replied"):
        ledger.append(1, frame().drop("replied"))
    assert ledger.rounds == ()
    assert not ledger.directory.exists()


def test_other_versions_are_refused(ledger: Ledger) -> None:
    path = ledger.folder / "ledger.json"
    path.write_text(json.dumps({"version": 2}))
    with pytest.raises(InputError, match="has version 2, this program reads 1"):
        list(Ledger(ledger.directory))
    path.write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        list(Ledger(ledger.directory))
    path.unlink()
    assert len(list(Ledger(ledger.directory))) == 3


def test_rounds_before_a_first_one_are_left_alone(ledger: Ledger) -> None:
    rounds = ledger.rounds
    assert len(rounds) > 1
    later = Ledger(ledger.directory, since=rounds[1])
    assert later.rounds == rounds[1:]
    assert [frame["round"][0] for frame in later] == list(rounds[1:])
    (ledger.folder / f"round-{rounds[0]:06d}.parquet").unlink()
    later.require_rounds()
    with pytest.raises(InputError, match=f"round {rounds[0]} is missing"):
        ledger.require_rounds()


def test_a_fate_is_no_covariate(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    flags = {"invited": True, "replied": [True, False], "fate": ["replied", "declined"]}
    ledger.append(1, pl.DataFrame({"unit_id": ["a", "b"], **flags, "battery": [0.1, 0.2]}))
    assert ledger.covariates == ("battery",)


def test_a_ledger_is_named_by_text_or_path(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "rounds"), since=3)
    assert ledger == Ledger(tmp_path / "rounds", 3)
    ledger.append(3, frame())
    assert Ledger(tmp_path / "rounds", since=3).rounds == (3,)
    with pytest.raises(InputError, match="given as str or Path, not list"):
        Ledger([tmp_path])  # type: ignore[arg-type]
