"""Rounds as they happen: the weights a ledger gives later, kills and resumes, bad rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.numerics import BoolArray
from fedipw.selection.enrollment import EnrollmentStage, enrollment_stage
from fedipw.selection.participation import ParticipationSettings, Window
from fedipw.selection.steps import Formulas
from fedipw.tables.design import Missing
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.weighting.live import Live
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan, Replay
from fedipw.weighting.weigher import RoundWeights
from worlds import STEPS, Tables, World, drawn


@dataclass
class Rounds:
    """A population on disk, and rounds drawn for it."""

    folder: Path
    stage: EnrollmentStage
    rounds: list[tuple[pl.DataFrame, BoolArray]]

    def ledger(self, name: str = "rounds") -> Ledger:
        return Ledger(self.folder / name)


def world(folder: Path, *, steps: int = 1) -> Rounds:
    """Network 3g occurs from round 4 on; in round 6 nobody replies."""
    odds = -0.5 + 0.6 * pl.col("age") + pl.col("battery") + 0.5 * (pl.col("network") == "wifi")
    given = drawn(
        World(
            rounds=8, covariates=("age", "os"), changing=("network", "battery"),
            steps=STEPS if steps == 3 else (),
            enrollment=0.7 * pl.col("age") + 0.5 * (pl.col("os") == "ios"),
            reply=pl.when(pl.col("round") != 6).then(odds).otherwise(-np.inf),
        )
    )  # fmt: skip
    for index in (1, 2, 3):
        given = given.changed(index, network=pl.col("network").replace("3g", "4g"))
    Tables(given.people).write(folder)
    rounds = [(t.drop("round", "replied"), t["replied"].to_numpy()) for t in given.rounds]
    return Rounds(folder, enrollment_stage(Population(folder / "people.parquet")), rounds)


def plan(method: str = "fedipw", missing: Missing = Missing.DROP, **settings: object) -> Plan:
    return Plan(
        method=method_named(method),
        formulas=Formulas(missing=missing),
        settings=ParticipationSettings(**settings),  # type: ignore[arg-type]
    )


def lived(live: Live, rounds: list[tuple[pl.DataFrame, BoolArray]]) -> list[RoundWeights | None]:
    out = []
    for table, replied in rounds:
        live.open(table)
        out.append(live.weigh(replied))
        live.close(replied)
    return out


def offline(given: Rounds, how: Plan, ledger: Ledger) -> dict[int, pl.DataFrame]:
    return {table["round"][0]: table for table in Replay(given.stage, ledger, how)}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("method", ["fedipw", "fedipw-hajek", "participation-only", "greg"])
def test_live_weights_are_those_of_the_finished_ledger(
    tmp_path: Path, method: str, steps: int
) -> None:
    given = world(tmp_path, steps=steps)
    how, ledger = plan(method, refit_every=2), given.ledger()
    found = lived(Live(given.stage, ledger, how), given.rounds)
    later = offline(given, how, ledger)
    assert set(later) == {k for k, f in enumerate(found, 1) if f is not None}
    assert 6 not in later  # nobody replied
    for index, table in later.items():
        live = found[index - 1]
        assert live is not None
        assert live.replies.unit_ids.tolist() == table["unit_id"].to_list()
        np.testing.assert_allclose(live.weights, table["weight"], rtol=1e-8)
        np.testing.assert_allclose(
            live.replies.participation_prob, table["participation_prob"], rtol=1e-8
        )


@pytest.mark.parametrize("cut", [1, 3, 4, 6, 7])
def test_a_program_that_was_killed_goes_on_with_the_same_weights(tmp_path: Path, cut: int) -> None:
    given = world(tmp_path)
    how = plan(refit_every=3)
    whole = lived(Live(given.stage, given.ledger("whole"), how), given.rounds)
    first = Live(given.stage, given.ledger("cut"), how)
    lived(first, given.rounds[:cut])
    first.open(given.rounds[cut][0])  # killed while a round is open
    again = Live(given.stage, given.ledger("cut"), how)
    assert again.rounds == cut
    for new, old in zip(lived(again, given.rounds[cut:]), whole[cut:], strict=True):
        assert (new is None) == (old is None)
        if new is not None and old is not None:
            np.testing.assert_allclose(new.weights, old.weights, rtol=1e-10)
    for index in given.ledger("whole").rounds:
        same = given.ledger("cut").read(index).equals(given.ledger("whole").read(index))
        assert same
    assert again.rounds == len(given.rounds)


def test_totals_alone_serve_as_well(tmp_path: Path) -> None:
    given = world(tmp_path)
    known = {"age": 0.0, "os[ios]": 0.5}
    stage = enrollment_stage(Population.from_totals(tmp_path / "people.parquet", known))
    how = plan("calibrated-entropy")
    found = lived(Live(stage, given.ledger(), how), given.rounds[:5])
    later = list(Replay(stage, given.ledger(), how))
    for live, table_later in zip(found, later, strict=True):
        assert live is not None
        np.testing.assert_allclose(live.weights, table_later["weight"], rtol=1e-8)


def test_a_round_is_in_the_ledger_when_close_returns(tmp_path: Path) -> None:
    given = world(tmp_path)
    live = Live(given.stage, given.ledger(), plan())
    table, replied = given.rounds[0]
    live.open(table)
    assert live.rounds == 0
    live.weigh(replied)
    live.close(replied)
    assert live.rounds == 1
    assert given.ledger().read(1)["replied"].to_list() == replied.tolist()


def test_rounds_open_and_close_in_turn(tmp_path: Path) -> None:
    given = world(tmp_path)
    live = Live(given.stage, given.ledger(), plan())
    table, replied = given.rounds[0]
    for call in (live.weigh, live.close):
        with pytest.raises(InputError, match="No round is open"):
            call(replied)
    live.open(table)
    with pytest.raises(InputError, match="Round 1 is open"):
        live.open(table)
    with pytest.raises(InputError, match="replied"):
        live.weigh(replied[:-1])
    live.close(replied)
    assert live.rounds == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.head(5), "have no row"),
        (lambda t: t.drop("invited"), "no column invited"),
        (lambda t: t.with_columns(unit_id=pl.col("unit_id") + 10_000), "not enrolled"),
        (lambda t: pl.concat([t, t.head(1)]), "more than once"),
        (lambda t: t.with_columns(mood=pl.lit(1.0)), "mood"),
    ],
)
def test_a_round_that_cannot_be_is_refused_and_leaves_nothing(
    tmp_path: Path, change: object, message: str
) -> None:
    given = world(tmp_path)
    live = Live(given.stage, given.ledger(), plan())
    lived(live, given.rounds[:1])
    table, replied = given.rounds[1]
    with pytest.raises(InputError, match=message):
        live.open(change(table))  # type: ignore[operator]
    assert live.rounds == 1
    live.open(table)  # and it goes on
    assert live.weigh(replied) is not None


def test_plans_that_need_the_future_are_refused(tmp_path: Path) -> None:
    given = world(tmp_path)
    with pytest.raises(InputError, match="yet to come"):
        Live(given.stage, given.ledger(), plan(window=Window.POOLED))
    with pytest.raises(InputError, match="collapsed"):
        Live(given.stage, given.ledger(), plan("collapsed"))
    rare = Plan(method=method_named("fedipw"), formulas=Formulas(lump_below=0.1))
    with pytest.raises(InputError, match="Rare levels"):
        Live(given.stage, given.ledger(), rare)
