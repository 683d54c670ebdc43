"""The loop: the server step, common random numbers, skipped rounds, resuming."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedipw.errors import DivergedError, InputError
from fedipw.lab.engine import LogisticTrainer
from fedipw.lab.engine.local import LocalWork, RoundWork
from fedipw.lab.mechanisms import (
    DailyParticipation,
    DataAvailability,
    MarkovAvailability,
    SineParticipation,
)
from fedipw.lab.scenario import PropensitySettings, Scenario, TrainingSettings
from fedipw.lab.testbed import Testbed
from fedipw.selection.participation import Window
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint

SMALL = Scenario(
    seed=5,
    rounds=12,
    methods=("fedavg", "participation-only", "fedipw-hajek", "oracle", "collapsed"),
    population=Testbed(size=120, rows=5, rows_max=15),
    training=TrainingSettings(local_steps=3, step_size=0.2, batch_size=4, server_step=1.3),
)


def test_a_run_equals_the_server_rule_round_by_round() -> None:
    """Oracle and FedAvg, from the drawn rounds and the definitions of weights and step."""
    scenario = replace(SMALL, methods=("fedavg", "oracle"))
    run = scenario.simulation()
    run.advance(12)
    twin = scenario.simulation()  # the same seed, to look at its draws
    federation, rng = twin.federation, twin._rng
    enrolled, prob = federation.population.enrolled, federation.enrollment_prob
    assert prob is not None
    work = LocalWork(steps=3, step_size=0.2, batch_size=4)
    fedavg, oracle = np.zeros(6), np.zeros(6)
    for _ in range(12):
        draw = federation.participation.advance()
        assert draw.participation_prob is not None
        key = int(rng.integers(2**63))
        who = np.flatnonzero(enrolled & draw.replied)
        weights = 1 / (120 * prob[who] * draw.participation_prob[who])
        updates = LogisticTrainer(federation.rows, work, 0.05).updates(
            RoundWork(clients=who, theta=fedavg, key=key)
        )
        fedavg = fedavg + 1.3 * updates.mean(axis=0)
        updates = LogisticTrainer(federation.rows, work, 0.05).updates(
            RoundWork(clients=who, theta=oracle, key=key)
        )
        oracle = oracle + 1.3 * weights @ updates
    history = run.history()
    np.testing.assert_allclose(history.of("fedavg")[-1], fedavg, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(history.of("oracle")[-1], oracle, rtol=1e-12, atol=1e-13)


def test_every_method_sees_the_same_draws_whoever_runs_beside_it() -> None:
    together = SMALL.simulation()
    together.advance(12)
    for name in SMALL.methods:
        alone = replace(SMALL, methods=(name,)).simulation()
        alone.advance(12)
        assert alone.history().of(name).tobytes() == together.history().of(name).tobytes()


def test_another_seed_is_another_run() -> None:
    one, two = SMALL.simulation(), replace(SMALL, seed=6).simulation()
    one.advance(2)
    two.advance(2)
    assert not np.array_equal(one.history().iterates, two.history().iterates)


def test_empty_rounds_are_skipped_and_recorded() -> None:
    rare = replace(
        SMALL,
        rounds=30,
        methods=("fedavg", "fedipw"),
        population=Testbed(size=30),
        participation=DataAvailability(rate=0.05),
        training=TrainingSettings(step_size=0.05),
    )
    run = rare.simulation(limits=False)
    run.advance(30)
    history = run.history()
    assert 0 < history.skipped.sum() < 30
    for r in np.flatnonzero(history.skipped):
        for name in history.methods:
            np.testing.assert_array_equal(history.of(name)[r + 1], history.of(name)[r])
        assert set(history.source[:, r]) == {"skipped: nobody replied"}
        assert np.isnan(history.weight_sum[:, r]).all()
    assert np.isfinite(history.iterates).all()


MECHANISMS = [
    DailyParticipation(), MarkovAvailability(), DataAvailability(label=1.0), SineParticipation(),
]  # fmt: skip


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("stop", [1, 7])
def test_a_resumed_run_ends_in_the_same_bytes(
    mechanism: DailyParticipation, stop: int, tmp_path: Path
) -> None:
    scenario = replace(SMALL, participation=mechanism, rounds=12)
    whole = scenario.simulation()
    whole.advance(12)
    first = scenario.simulation()
    first.advance(stop)
    save_checkpoint(tmp_path, first.state(), "settings")
    second = scenario.simulation()
    state = load_checkpoint(tmp_path, "settings")
    assert state is not None
    second.restore(state)
    assert second.rounds == stop
    second.advance(12 - stop)
    one, two = whole.history(), second.history()
    assert one.iterates.tobytes() == two.iterates.tobytes()
    np.testing.assert_array_equal(one.weight_sum, two.weight_sum)
    np.testing.assert_array_equal(one.source, two.source)
    for name in scenario.methods:
        left, right = whole.limits[name].given_enrolled, second.limits[name].given_enrolled
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize(
    "propensity",
    [
        PropensitySettings(window=Window.SAME_ROUND),
        PropensitySettings(folds=3),
        PropensitySettings(history=True),
        PropensitySettings(decay=0.8, participation=". + hour_sin + z1:elapsed", day_length=7.0),
    ],
    ids=["same-round", "cross-fitted", "history", "decay and clock"],
)
def test_other_propensity_settings_resume_too(
    propensity: PropensitySettings, tmp_path: Path
) -> None:
    scenario = replace(SMALL, propensity=propensity, methods=("fedipw",))
    whole, first, second = (scenario.simulation(limits=False) for _ in range(3))
    whole.advance(8)
    first.advance(5)
    save_checkpoint(tmp_path, first.state(), "settings")
    state = load_checkpoint(tmp_path, "settings")
    assert state is not None
    second.restore(state)
    second.advance(3)
    assert whole.history().iterates.tobytes() == second.history().iterates.tobytes()


def test_tail_average_is_the_mean_of_the_last_iterates() -> None:
    run = SMALL.simulation(limits=False)
    run.advance(10)
    history = run.history()
    np.testing.assert_allclose(
        history.tail_average("oracle", 0.25), history.of("oracle")[-3:].mean(axis=0), rtol=1e-14
    )
    with pytest.raises(InputError, match="fraction"):
        history.tail_average("oracle", 0.0)
    with pytest.raises(InputError, match="No method 'x'"):
        history.of("x")


def test_divergence_is_an_error_with_its_round() -> None:
    wild = replace(SMALL, methods=("oracle",), training=TrainingSettings(step_size=1e300))
    run = wild.simulation(limits=False)
    with pytest.raises(DivergedError, match="oracle diverged in round"):
        run.advance(12)


def test_trimming_is_recorded_in_the_history() -> None:
    run = replace(SMALL, trim=1.5).simulation(limits=False)
    run.advance(5)
    history = run.history()
    oracle = history.methods.index("oracle")
    assert history.trimmed[oracle].sum() > 0
    assert (history.trimmed_mass[oracle] > 0).any()
    assert history.trimmed[history.methods.index("fedavg")].sum() == 0


def test_local_steps_may_follow_a_covariate() -> None:
    scenario = replace(
        SMALL, training=TrainingSettings(local_steps=3, steps_coefficients={"z1": 2.0})
    )
    run = scenario.simulation(limits=False)
    steps = run.training.steps
    assert steps is not None
    z1 = run.federation.population.matrix(["z1"])[:, 0]
    np.testing.assert_array_equal(steps, np.where(z1 > 0, 5, 1))
    run.advance(2)


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    run = SMALL.simulation(limits=False)
    run.advance(2)
    save_checkpoint(tmp_path, run.state(), "these settings")
    with pytest.raises(InputError, match="other settings"):
        load_checkpoint(tmp_path, "those settings")
    file = tmp_path / "checkpoint.npz"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InputError, match=r"damaged.*Remove it"):
        load_checkpoint(tmp_path, "these settings")
    assert load_checkpoint(tmp_path / "nowhere", "these settings") is None
