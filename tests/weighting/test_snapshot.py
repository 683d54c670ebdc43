"""A restart from a snapshot gives the same weights to the last bit, and a bad one is left aside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.numerics import BoolArray
from fedipw.selection.classifiers import Classifier
from fedipw.selection.enrollment import EnrollmentStage, enrollment_stage
from fedipw.selection.participation import ParticipationSettings, Window
from fedipw.selection.steps import Formulas
from fedipw.tables.design import Missing
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.weighting.live import Live
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan, Replay
from fedipw.weighting.snapshot import EVERY
from fedipw.weighting.weigher import RoundWeights
from worlds import STEPS, Tables, World, drawn

ROUNDS, CUT = EVERY + 8, EVERY + 3


class Given:
    """A population whose clients may join and leave, and rounds drawn for it."""

    def __init__(self, folder: Path, *, steps: int = 1, joining: bool = False) -> None:
        drawn_ = drawn(
            World(
                size=300, rounds=ROUNDS, covariates=("age", "os"), changing=("battery", "network"),
                steps=STEPS if steps == 3 else (),
            )
        )  # fmt: skip
        people, rounds = drawn_.people, drawn_.rounds
        if joining:
            first = pl.int_range(pl.len()) % 7 + 1
            first = pl.when(pl.int_range(pl.len()) % 3 == 0).then(first * 4).otherwise(1)
            people = people.with_columns(enrolled_from=first)
            since = people.select("unit_id", "enrolled_from")
            rounds = [
                t.join(since, on="unit_id", maintain_order="left")
                .filter(pl.col("enrolled_from") <= k)
                .drop("enrolled_from")
                for k, t in enumerate(rounds, 1)
            ]
        Tables(people).write(folder)
        self.folder = folder
        self.rounds = [(t.drop("round", "replied"), t["replied"].to_numpy()) for t in rounds]

    def stage(self) -> EnrollmentStage:
        return enrollment_stage(Population(self.folder / "people.parquet"))

    def live(self, name: str, how: Plan) -> Live:
        return Live(self.stage(), Ledger(self.folder / name), how)


def plan(method: str = "fedipw", *, history: bool = False, **settings: object) -> Plan:
    return Plan(
        method=method_named(method),
        formulas=Formulas(missing=Missing.DROP, history=history),
        settings=ParticipationSettings(**settings),  # type: ignore[arg-type]
    )


def lived(live: Live, rounds: list[tuple[pl.DataFrame, BoolArray]]) -> list[RoundWeights | None]:
    out = []
    for table, replied in rounds:
        live.open(table)
        out.append(live.weigh(replied))
        live.close(replied)
    return out


def same_bits(ours: list[RoundWeights | None], theirs: list[RoundWeights | None]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a is not None
        assert b is not None
        np.testing.assert_array_equal(a.weights, b.weights)
        np.testing.assert_array_equal(a.replies.participation_prob, b.replies.participation_prob)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every round is added that is read from now on."""
    read, seen = Ledger.read, list[int]()

    def watched(self: Ledger, index: int) -> pl.DataFrame:
        seen.append(index)
        return read(self, index)

    monkeypatch.setattr(Ledger, "read", watched)
    return seen


@pytest.mark.parametrize(
    ("how", "steps", "joining"),
    [
        (plan(refit_every=3), 1, False),
        (plan("fedipw-hajek", refit_every=3, history=True), 3, False),
        (plan("participation-only", refit_every=4, last=6), 1, False),
        (plan("participation-only", refit_every=4, decay=0.9), 1, False),
        (plan("fedipw-hajek", refit_every=3, last=4), 3, False),
        (plan(refit_every=3, last=2, estimator=Classifier(folds=2)), 1, False),
        (plan("greg", window=Window.SAME_ROUND), 1, False),
        (plan("calibrated-online", refit_every=3), 1, False),
        (plan(refit_every=3, history=True), 1, True),
        (plan("calibrated-online", refit_every=3), 1, True),
    ],
    ids=[
        "past",
        "steps",
        "rolling",
        "decay",
        "steps, rolling",
        "folds, rolling",
        "same-round",
        "online",
        "joining",
        "joining-online",
    ],
)
def test_a_restart_reads_the_rounds_after_it_and_weighs_the_same_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Plan, steps: int, joining: bool
) -> None:
    given = Given(tmp_path, steps=steps, joining=joining)
    never_stopped = lived(given.live("whole", how), given.rounds)
    stopped = given.live("cut", how)
    lived(stopped, given.rounds[:CUT])
    assert stopped._snapshot is not None
    saved = stopped._snapshot.rounds  # after the last fit, or after EVERY rounds without one
    assert CUT - EVERY < saved <= CUT
    shutil.copytree(tmp_path / "cut", tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "learner")
    read = counted(monkeypatch)
    again = given.live("cut", how)
    assert read == list(range(saved + 1, CUT + 1))
    assert again.rounds == CUT
    with_snapshot = lived(again, given.rounds[CUT:])
    read.clear()
    without = given.live("bare", how)
    assert read == list(range(1, CUT + 1))
    same_bits(with_snapshot, lived(without, given.rounds[CUT:]))
    same_bits(with_snapshot, never_stopped[CUT:])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(bytes(data))


def _rows(folder: Path) -> Path:
    return next(folder.glob("rows-*.bin"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: _flip(f / "learner.npz"),
        lambda f: _flip(_rows(f)),
        lambda f: _rows(f).write_bytes(_rows(f).read_bytes()[:-8]),
        lambda f: _rows(f).unlink(),
        lambda f: (f / "learner.npz").write_bytes(b""),
        lambda f: (f.parent / "round-000002.parquet").touch(),
    ],
    ids=["head", "rows", "cut", "gone", "empty", "touched"],
)
def test_a_damaged_snapshot_is_left_aside_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], object]
) -> None:
    given, how = Given(tmp_path), plan(refit_every=3)
    whole = lived(given.live("whole", how), given.rounds)
    lived(given.live("cut", how), given.rounds[:CUT])
    spoil(tmp_path / "cut" / "learner")
    read = counted(monkeypatch)
    again = given.live("cut", how)
    assert read == list(range(1, CUT + 1))
    assert any("was not used" in note for note in again.notes)
    same_bits(lived(again, given.rounds[CUT:]), whole[CUT:])


@pytest.mark.parametrize(
    "other",
    [plan(refit_every=4), plan("fedipw-hajek", refit_every=3), plan(refit_every=3, history=True)],
)
def test_a_snapshot_of_another_plan_is_left_aside(tmp_path: Path, other: Plan) -> None:
    given = Given(tmp_path)
    lived(given.live("cut", plan(refit_every=3)), given.rounds[:CUT])
    assert any("another plan" in note for note in given.live("cut", other).notes)


def test_a_snapshot_of_other_clients_is_left_aside(tmp_path: Path) -> None:
    given, how = Given(tmp_path), plan(refit_every=3)
    lived(given.live("cut", how), given.rounds[:CUT])
    path = tmp_path / "people.parquet"
    people = pl.read_parquet(path)
    people.with_columns(pl.col("age") + 0.5 * pl.col("enrolled")).write_parquet(path)
    assert any("another plan" in note for note in given.live("cut", how).notes)


def test_what_a_kill_left_behind_the_rows_is_written_over(tmp_path: Path) -> None:
    given, how = Given(tmp_path), plan(refit_every=3)
    lived(given.live("cut", how), given.rounds[:CUT])
    rows = _rows(tmp_path / "cut" / "learner")
    clean = rows.read_bytes()
    rows.write_bytes(clean + b"half a record")
    again = given.live("cut", how)
    assert not again.notes
    again._save()
    added = rows.read_bytes()
    assert added.startswith(clean)
    assert b"half a record" not in added
    assert not given.live("cut", how).notes


def test_a_level_that_is_new_after_the_snapshot_is_bound_as_without_one(tmp_path: Path) -> None:
    given, how = Given(tmp_path), plan(refit_every=3)
    fresh = pl.when(pl.int_range(pl.len()) < 3).then(pl.lit("5g")).otherwise("network")
    late = [(t.with_columns(network=fresh), r) for t, r in given.rounds[EVERY:]]
    given.rounds[EVERY:] = late
    whole = lived(given.live("whole", how), given.rounds)
    lived(given.live("cut", how), given.rounds[:CUT])
    again = given.live("cut", how)
    assert not any("was not used" in note for note in again.notes)
    same_bits(lived(again, given.rounds[CUT:]), whole[CUT:])


def test_a_snapshot_that_cannot_be_written_is_noted_and_the_round_closed(tmp_path: Path) -> None:
    given, how = Given(tmp_path), plan(refit_every=3)
    live = given.live("cut", how)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "learner").write_text("in the way")
    lived(live, given.rounds[:CUT])
    assert live.rounds == CUT
    assert any("no snapshot of the learner" in note for note in live.notes)


def test_reading_a_ledger_lists_its_directory_once_whatever_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "rounds")
    row = {"unit_id": ["a", "b"], "invited": [True, True], "replied": [True, False]}
    for index in range(1, 31):
        ledger.append(index, pl.DataFrame(row))
    listed = 0
    listing = os.listdir

    def watched(path: Path) -> list[str]:
        nonlocal listed
        listed += 1
        return listing(path)

    monkeypatch.setattr("fedipw.tables.ledger.os.listdir", watched)
    counts = []
    for length in (10, 30):
        listed = 0
        for index in range(length + 1, 31):
            ledger.path(index).rename(tmp_path / f"{index}")
        assert len(list(Ledger(ledger.directory))) == length
        counts.append(listed)
        for index in range(length + 1, 31):
            (tmp_path / f"{index}").rename(ledger.path(index))
    assert counts[0] == counts[1] <= 2
    listed = 0
    ledger.append(31, pl.DataFrame(row))
    assert listed == 0
    with pytest.raises(InputError, match="cannot be closed"):
        ledger.append(33, pl.DataFrame(row))


@pytest.mark.parametrize("window", [{"last": 4}, {"decay": 0.003}], ids=["rolling", "decay"])
def test_what_a_server_keeps_does_not_grow_with_its_rounds(
    tmp_path: Path, window: dict[str, Any]
) -> None:
    """Rows of four rounds are read by any fit; snapshots after every third, as after a fit."""
    given, how = (
        Given(tmp_path),
        plan("participation-only", refit_every=3, per_coefficient=2.0, **window),
    )
    assert how.settings.reach == 4
    live, sizes, kept = given.live("long", how), [], []
    for _ in range(3):
        lived(live, given.rounds)
        (rows,) = (tmp_path / "long" / "learner").glob("rows-*.bin")
        sizes.append(rows.stat().st_size + (rows.parent / "learner.npz").stat().st_size)
        assert live._learner is not None
        kept.append(live.rounds - live._learner.forgotten)
    assert live.rounds == 3 * ROUNDS
    assert max(kept) == 4
    one_round = sizes[0] / 4  # there are four rounds in it at least
    assert max(sizes) <= (2 * 4 + 3) * one_round
    again, other = given.live("long", how), given.rounds[0]
    assert again.replayed < EVERY
    for one, two in zip(lived(live, [other]), lived_alone(again, other), strict=True):
        assert one is not None
        assert two is not None
        assert one.weights.tobytes() == two.weights.tobytes()


def lived_alone(live: Live, round_: tuple[pl.DataFrame, BoolArray]) -> list[RoundWeights | None]:
    """Return the weights of a round that is opened and not closed."""
    live.open(round_[0])
    return [live.weigh(round_[1])]


def test_a_server_with_saved_models_restarts_from_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given(tmp_path)
    lived(given.live("first", plan()), given.rounds)
    models = Replay(given.stage(), Ledger(tmp_path / "first"), plan()).learn().pooled()
    how = replace(plan(), models=models)
    whole = lived(given.live("whole", how), given.rounds)
    lived(given.live("cut", how), given.rounds[:CUT])
    seen = counted(monkeypatch)
    resumed = given.live("cut", how)
    assert not resumed.notes
    assert resumed.replayed == CUT - EVERY
    assert set(seen) == set(range(EVERY + 1, CUT + 1))
    same_bits(lived(resumed, given.rounds[CUT:]), whole[CUT:])
