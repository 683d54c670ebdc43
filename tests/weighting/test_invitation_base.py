"""The base ``invitation``: calibration as you go under unequal invitations, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from cli.command import Files, fedipw
from fedipw.calibration import Entropy, calibrated
from fedipw.numerics import FloatArray
from fedipw.selection.participation import Source
from fedipw.weighting.balance import Balance
from fedipw.weighting.methods import method_named
from fedipw.weighting.weigher import EnrollmentState, Replies
from worlds import MEASURED, World

PRESETS = ("calibrated-online", "augmented-online")
WORLD = replace(MEASURED, rounds=6, steps=("available", "invite_prob"))


def state_of(size: int = 40) -> EnrollmentState:
    rng = np.random.default_rng(3)
    matrix = rng.normal(size=(size, 2))
    balance = Balance(
        names=("age", "income"), matrix=matrix, enrolled=np.ones(size, dtype=np.bool_),
        mean=np.array([0.3, -0.2]), population_size=np.nan, se=None, leading=None,
    )  # fmt: skip
    return EnrollmentState(
        unit_ids=np.arange(size), sample_counts=np.ones(size, dtype=np.int64),
        enrolled=balance.enrolled, prob=np.full(size, np.nan), population_size=np.nan,
        balances={"rich": balance, "wide": balance},
    )  # fmt: skip


def asked(state: EnrollmentState, index: int, rows: Any, invite_prob: FloatArray) -> Replies:
    return state.replies(index, np.asarray(rows), np.ones(len(rows)), Source.NONE, invite_prob)


@pytest.mark.parametrize("name", PRESETS)
def test_equal_invitations_leave_every_number_as_it_was(name: str) -> None:
    """Also where rounds differ in how likely an invitation was."""
    state, rng = state_of(), np.random.default_rng(0)
    now, before = (method_named(m).at(state) for m in (name, f"{name}, base=equal"))
    for index, prob in enumerate((0.3, 0.9, 1.0, 1 / 3, 0.07), start=1):
        replies = asked(state, index, rng.permutation(25)[:15], np.full(15, prob))
        one, other = now.weighed(replies), before.weighed(replies)
        np.testing.assert_array_equal(one.weights, other.weights)
        now, before = now.after(replies), before.after(replies)
        assert now.learnt is not None
        assert before.learnt is not None
        np.testing.assert_array_equal(now.learnt.second, before.learnt.second)


def test_a_client_half_as_likely_counts_twice() -> None:
    """The weights, and what is learnt, are those of a round in which it had replied twice."""
    state = state_of()
    weighing = method_named("calibrated-online, guard=none").at(state)
    warm = asked(state, 1, range(20), np.ones(20))
    weighing = weighing.after(warm)
    unequal = asked(state, 2, [3, 7, 30], np.array([0.4, 0.8, 0.8]))
    doubled = asked(state, 2, [3, 3, 7, 30], np.ones(4))
    w, d = weighing.weights(unequal), weighing.weights(doubled)
    np.testing.assert_allclose(w, [d[0] + d[1], d[2], d[3]], rtol=1e-12)
    first = method_named("calibrated-online").at(state)  # alone, so that m = S1 / S0 is its own
    learnt = [first.after(replies).learnt for replies in (unequal, doubled)]
    assert learnt[0] is not None
    assert learnt[1] is not None
    np.testing.assert_allclose(learnt[0].coefficients, learnt[1].coefficients, rtol=1e-12)


def test_expected_weights_do_not_depend_on_the_invitations() -> None:
    state, rng = state_of(), np.random.default_rng(1)
    weighing = method_named("calibrated-online, guard=none").at(state)
    for index in range(1, 6):
        weighing = weighing.after(asked(state, index, rng.permutation(25)[:15], np.ones(15)))
    reply, invite = rng.uniform(0.1, 0.9, 40), rng.uniform(0.05, 1.0, 40)
    plain = weighing.expected_weights(asked(state, 6, range(40), np.ones(40)), reply)
    found = weighing.expected_weights(asked(state, 6, range(40), invite), reply * invite)
    np.testing.assert_allclose(found, plain, rtol=1e-12)
    equal = method_named("calibrated-online, guard=none, base=equal").at(state, weighing.learnt)
    other = equal.expected_weights(asked(state, 6, range(40), invite), reply * invite)
    assert np.abs(other / plain - 1.0).max() > 0.2


def weighed(where: Path, world: World, *options: object, **edits: pl.Expr) -> pl.DataFrame:
    where.mkdir(exist_ok=True)
    files = Files.of(world, where)
    files.edit_all(**edits)
    return files.put().weighed(*options)[0]


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_else_of_the_ledger_is_read(tmp_path: Path, name: str) -> None:
    """Other covariates of rounds and other availability leave the weights as they are."""
    option = ("--scheme", name)
    found = weighed(tmp_path / "a", WORLD, *option)["weight"]
    other = weighed(tmp_path / "b", WORLD, *option, x=pl.col("x").sin() * 3.0)["weight"]
    free = weighed(
        tmp_path / "c", WORLD, *option, available=pl.lit(value=True),
        invite_prob=pl.col("invite_prob").fill_null(0.9), x=pl.col("x").fill_null(0.0),
    )["weight"]  # fmt: skip
    np.testing.assert_array_equal(found.to_numpy(), other.to_numpy())
    np.testing.assert_array_equal(found.to_numpy(), free.to_numpy())
    base = weighed(tmp_path / "d", WORLD, "--scheme", f"{name}, base=equal")["weight"]
    assert (found - base).abs().max() > 1e-3  # type: ignore[operator]


def estimate_of(found: dict[str, Any]) -> dict[str, Any]:
    (line,) = [e for e in found["estimates"] if e["estimator"] == "hajek"]
    assert isinstance(line, dict)
    return line


def test_evaluation_calibrates_replies_over_their_invitations(tmp_path: Path) -> None:
    """Entropy calibration of all replies with base (W21), normalised round by round."""
    files = Files.of(replace(WORLD, steps=("invite_prob",)), tmp_path).put()
    files.targets("age,0.0", "rich[yes],0.5")
    method = ("--scheme", "calibrated-online")
    found = estimate_of(files.evaluated(*method, source="targets"))
    people = files.people.select("unit_id", age="age", rich=(pl.col("rich") == "yes").cast(float))
    log = pl.concat(files.rounds).select("unit_id", "round", "invite_prob")
    rows = files.metrics.join(people, on="unit_id", maintain_order="left")
    rows = rows.join(log, on=["unit_id", "round"], maintain_order="left")
    raw = 1.0 / pl.col("invite_prob")
    base = rows.select((raw / raw.mean().over("round")).alias("d"))["d"].to_numpy()
    weights = calibrated(
        rows.select("age", "rich").to_numpy(), np.array([0.0, 0.5]), distance=Entropy(), base=base
    ).weights
    value = rows["value"].to_numpy()
    assert found["estimate"] == pytest.approx(float(weights @ value), rel=1e-9)
    files.edit_all(invite_prob=pl.lit(0.37))
    same = estimate_of(files.put().evaluated(*method, source="targets"))
    files.rounds = [table.drop("invite_prob") for table in files.rounds]
    without = estimate_of(files.put().evaluated(*method, source="targets"))
    for key in ("estimate", "se", "low", "high"):
        assert same[key] == pytest.approx(without[key], rel=1e-12)
    assert found["estimate"] != pytest.approx(without["estimate"], rel=1e-4)


def test_audits_take_unequal_invitations(tmp_path: Path) -> None:
    files = Files.of(WORLD, tmp_path).put()
    code, _, err = fedipw(
        "audit", *files.given(), "--scheme", "calibrated-online", "--out", tmp_path / "audit.html"
    )
    assert code == 0, err
