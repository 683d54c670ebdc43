"""Invitations in simulations: who is asked, the truth that follows, limits, resumption, files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.lab.config import scenario_from
from fedipw.lab.engine import Simulation
from fedipw.lab.invitations import SimulatedInvitations
from fedipw.lab.mechanisms import DailyParticipation
from fedipw.lab.scenario import Scenario
from fedipw.lab.simulate import simulate
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import error_parts

BASE = Scenario(
    rounds=30, population=Testbed(size=300),
    methods=("fedavg", "oracle", "fedipw-hajek", "efficient", "augmented", "augmented-online"),
)  # fmt: skip
DESIGNS = {
    "uniform": SimulatedInvitations(kind="uniform", number=40),
    "proportional": SimulatedInvitations(number=40),
    "rested": SimulatedInvitations(number=15, rest=3),
    "learnt": SimulatedInvitations(number=40, method="augmented-online"),
    "fitted": SimulatedInvitations(number=40, method="fedipw"),
}


def run_of(scenario: Scenario, rounds: int | None = None, *, limits: bool = False) -> Simulation:
    run = scenario.simulation(limits=limits)
    run.advance(rounds or scenario.rounds)
    return run


@pytest.mark.parametrize("name", DESIGNS)
def test_rounds_have_so_many_invitations_and_replies_are_among_them(name: str) -> None:
    how = DESIGNS[name]
    run = replace(BASE, invitations=how).simulation(limits=False)
    inside = np.flatnonzero(run.federation.population.enrolled)
    process = replace(BASE).simulation(limits=False).federation.participation
    last = np.full(run.federation.population.listed, -100)
    for index in range(1, 7):
        draw = process.advance()
        invitations = run.federation.invitations
        assert invitations is not None
        found = invitations.drawn(index)
        assert found.flags.sum() == how.number
        assert not found.flags[~run.federation.population.enrolled].any()
        assert ((found.prob > 0.0) & (found.prob <= 1.0)).all()
        if how.rest == 1:
            assert found.prob[inside].sum() == pytest.approx(how.number, rel=1e-12)
        assert (index - last[found.flags] >= how.rest).all()
        last[found.flags] = index
        run.advance(1)
        assert run.history().replies[-1] == np.count_nonzero(found.flags & draw.replied)


def test_a_scenario_without_invitations_keeps_its_numbers() -> None:
    """All enrolled are invited with certainty: the same replies, probabilities and models."""
    plain = run_of(BASE)
    everybody = plain.federation.population.enrolled_size
    whole = replace(BASE, invitations=SimulatedInvitations(kind="uniform", number=everybody))
    same = run_of(whole)
    for method in BASE.methods:
        np.testing.assert_allclose(
            same.history().of(method), plain.history().of(method), rtol=0.0, atol=1e-9
        )
    assert "invitations" not in BASE.settings()
    assert whole.settings()["invitations"]["number"] == everybody


@pytest.mark.parametrize("name", DESIGNS)
def test_the_oracle_has_one_limit_whatever_the_invitations(name: str) -> None:
    """Its weights are over the true inclusion probability, the invitation's among them."""
    scenario = replace(BASE, methods=("oracle", "fedavg", "augmented-online"), rounds=20)
    excess = []
    for how in (None, DESIGNS[name]):
        run = run_of(replace(scenario, invitations=how), limits=True)
        target = scenario.objective(run.federation)
        excess.append(
            [error_parts(target, run.limits[m], np.zeros(6)).limit for m in ("oracle", "fedavg")]
        )
    np.testing.assert_allclose(excess[0][0], excess[1][0], rtol=0.0, atol=1e-9)
    far = float(np.abs(excess[0][1] - excess[1][1]).max())
    assert far > 0.02 if name != "uniform" else far < 1e-9


def test_horvitz_thompson_weights_sum_to_one_on_average() -> None:
    """The oracle's sum over 400 rounds: within 5 standard errors of what the enrolled stand for.

    Invitations of different rounds are independent and replies nearly so; false alarm below 1e-4.
    """
    how = SimulatedInvitations(number=60)
    scenario = Scenario(
        rounds=400, population=Testbed(size=300), methods=("oracle",), invitations=how,
        participation=DailyParticipation(autocorrelation=0.0),
    )  # fmt: skip
    run = run_of(scenario)
    prob, enrolled = run.federation.enrollment_prob, run.federation.population.enrolled
    assert prob is not None
    sums = run.history().weight_sum[0]
    expected = float((1.0 / prob[enrolled]).sum()) / len(prob)
    assert abs(sums.mean() - expected) < 5.0 * sums.std() / np.sqrt(len(sums))


@pytest.mark.parametrize("name", DESIGNS)
def test_a_stopped_run_goes_on_to_the_same_bytes(name: str) -> None:
    scenario = replace(BASE, invitations=DESIGNS[name], rounds=12)
    whole, first = run_of(scenario), run_of(scenario, 5)
    again = scenario.simulation(limits=False)
    again.restore(first.state())
    again.advance(7)
    np.testing.assert_array_equal(again.history().iterates, whole.history().iterates)


def test_files_describe_invitations(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(
        '[invitations]\nkind = "proportional"\nnumber = 200\nfloor = 0.2\nrest = 2\n'
        'method = "fedipw"\n'
    )
    found = scenario_from(path).invitations
    assert found == SimulatedInvitations(number=200, floor=0.2, rest=2, method="fedipw")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("number = 0", "whole number from 1 on, not 0"),
        ("number = 2.5", "number"),
        ('kind = "some"\nnumber = 3', "uniform.*proportional"),
        ("number = 3\nfloor = 2.0", "in .0, 1., not 2.0"),
        ("", "needs number"),
        ('number = 3\nmethod = "fedavg"', "fedavg has none"),
        ('number = 3\nmethod = "fedpiw"', "did you mean fedipw"),
        ('number = 3\nmethod = "calibrated-online"', "add it to the methods"),
        ("number = 3\nnumbr = 3", "unknown key 'numbr'; did you mean 'number'"),
    ],
)
def test_bad_files_are_refused_with_the_reason(tmp_path: Path, table: str, reason: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(f"[invitations]\n{table}\n")
    with pytest.raises(InputError, match=reason):
        scenario_from(path)


def test_more_invitations_than_enrolled_are_refused() -> None:
    how: dict[str, Any] = {"invitations": SimulatedInvitations(number=290)}
    with pytest.raises(InputError, match="290 invitations a round are more than the"):
        replace(BASE, **how).simulation()


def evaluated(where: Path, seed: int, how: SimulatedInvitations | None) -> dict[str, Any]:
    """Return the last evaluation of a run."""
    scenario = Scenario(
        seed=seed, rounds=40, population=Testbed(size=600), methods=("fedipw-hajek",),
        invitations=how,
    )  # fmt: skip
    line = simulate(scenario, where)["evaluation"][-1]
    assert isinstance(line, dict)
    return line


def test_inviting_everybody_is_evaluated_as_no_invitations_at_all(tmp_path: Path) -> None:
    size = Scenario(population=Testbed(size=600)).simulation().federation.population.enrolled_size
    whole = SimulatedInvitations(kind="uniform", number=size)
    one, other = (evaluated(tmp_path / f"{how}"[:4], 0, how) for how in (None, whole))
    for key in ("estimate", "low", "high"):
        assert one[key] == pytest.approx(other[key], rel=1e-9)


def test_intervals_of_runs_with_invitations_hold_the_truth(tmp_path: Path) -> None:
    """Of 12 intervals at 95%, one a population, fewer than 9 hold it with a chance of .2%."""
    how, held = SimulatedInvitations(number=100), 0
    for seed in range(12):
        line = evaluated(tmp_path / str(seed), seed, how)
        held += line["low"] <= line["truth"] <= line["high"]
    assert held >= 9


def test_learnt_invitations_have_no_interval_and_the_page_says_why(tmp_path: Path) -> None:
    how = SimulatedInvitations(number=40, method="augmented-online")
    scenario = replace(BASE, methods=("augmented-online",), rounds=10, invitations=how)
    assert simulate(scenario, tmp_path / "run")["evaluation"] == []
    page = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert "had learnt before each round" in page
