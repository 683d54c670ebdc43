"""The server's step: its first moves by hand, and runs that go on."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.lab.engine import Adam, Momentum, PlainStep, ServerStep, Simulation, Training, Yogi
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Testbed
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint

STEPS: list[ServerStep] = [PlainStep(0.5), Momentum(), Adam(), Yogi()]


def moved(step: ServerStep, sums: list[float]) -> list[float]:
    theta, out = np.zeros(1), []
    state: Mapping[str, Any] = {}
    for index, total in enumerate(sums, start=1):
        theta, state = step.step(theta, np.array([total]), state, index)
        out.append(float(theta[0]))
    return out


def test_first_moves_are_those_of_the_equations() -> None:
    assert moved(PlainStep(0.5), [2.0, 4.0]) == [1.0, 3.0]
    assert moved(Momentum(size=0.5, beta=0.5), [2.0, 4.0]) == [1.0, 1.0 + 0.5 * 5.0]
    first = 0.1 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2) * 0.2 / (np.sqrt(0.01 * 4.0) + 1e-3)
    assert moved(Adam(), [2.0])[0] == pytest.approx(first, rel=1e-12)
    assert moved(Yogi(), [2.0])[0] == pytest.approx(0.01 * 0.2 / (0.2 + 1e-3), rel=1e-12)


def test_adaptive_steps_keep_the_size_of_the_sum() -> None:
    """With a large tau the step is nearly linear: a sum twice as long moves twice as far."""
    for kind in (Adam, Yogi):
        step = kind(tau=1e3)
        assert moved(step, [2.0])[0] == pytest.approx(2.0 * moved(step, [1.0])[0], rel=1e-3)


def run(optimizer: ServerStep) -> Simulation:
    plain = Scenario(population=Testbed(size=60), rounds=6, methods=("fedipw", "fedavg"))
    made = plain.simulation(limits=False)
    return Simulation(
        made.federation, made._weighers, Training(optimizer=optimizer), np.random.default_rng(0)
    )


@pytest.mark.parametrize("step", STEPS, ids=lambda s: type(s).__name__)
def test_a_resumed_run_keeps_the_moments(tmp_path: Path, step: ServerStep) -> None:
    whole, first, second = run(step), run(step), run(step)
    whole.advance(6)
    first.advance(3)
    save_checkpoint(tmp_path, first.state(), "x")
    state = load_checkpoint(tmp_path, "x")
    assert state is not None
    second.restore(state)
    second.advance(3)
    for name in whole.methods:
        np.testing.assert_array_equal(second.history().of(name), whole.history().of(name))


def test_a_plain_step_is_the_engines_default() -> None:
    plain = run(PlainStep(1.0))
    plain.advance(4)
    default = Scenario(population=Testbed(size=60), rounds=6, methods=("fedipw", "fedavg"))
    other = default.simulation(limits=False)
    other.advance(4)
    np.testing.assert_array_equal(plain.history().of("fedipw"), other.history().of("fedipw"))


@pytest.mark.parametrize(
    ("kind", "bad"),
    [(PlainStep, {"size": 0.0}), (Momentum, {"beta": 1.0}), (Adam, {"beta_1": -0.1}),
     (Adam, {"tau": 0.0}), (Yogi, {"beta_2": 1.0}), (Yogi, {"size": float("nan")})],
)  # fmt: skip
def test_settings_without_meaning_are_refused(kind: Any, bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        kind(**bad)


def test_an_optimizer_has_a_step_size_of_its_own() -> None:
    with pytest.raises(InputError, match="leave server_step out"):
        replace(Training(optimizer=Adam()), server_step=0.5)
