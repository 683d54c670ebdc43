"""Server steps by optax: those of the engine where both exist, and runs that go on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from fedipw.errors import InputError
from fedipw.lab.engine import Momentum, PlainStep, ServerStep
from fedipw.lab.engine.jaxtrainer import OptaxStep
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint

SUMS = np.random.default_rng(0).normal(size=(6, 4))


def moved(
    step: ServerStep, theta: np.ndarray, sums: np.ndarray, state: Mapping[str, Any]
) -> tuple[np.ndarray, Mapping[str, Any]]:
    for total in sums:
        theta, state = step.step(theta, total, state, 1)
    return theta, state


@pytest.mark.parametrize(
    ("ours", "engine"),
    [
        (optax.sgd(0.5), PlainStep(0.5)),
        (optax.sgd(0.3, momentum=0.8), Momentum(size=0.3, beta=0.8)),
    ],
)
def test_sgd_is_the_engines_own_step(
    ours: optax.GradientTransformation, engine: ServerStep
) -> None:
    expected, _ = moved(engine, np.ones(4), SUMS, {})
    found, _ = moved(OptaxStep(ours), np.ones(4), SUMS, {})
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    assert found.dtype == np.float64


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.5),
        optax.adam(0.1),
        optax.adamw(optax.exponential_decay(0.1, 2, 0.5), weight_decay=0.1),
    ],
)
def test_a_saved_state_goes_on_to_the_same_bytes(
    optimizer: optax.GradientTransformation, tmp_path: Path
) -> None:
    whole, _ = moved(OptaxStep(optimizer), np.ones(4), SUMS, {})
    theta, state = moved(OptaxStep(optimizer), np.ones(4), SUMS[:3], {})
    save_checkpoint(tmp_path, {"theta": theta, "state": dict(state)}, "print")
    saved = load_checkpoint(tmp_path, "print")
    assert saved is not None
    resumed, _ = moved(OptaxStep(optimizer), saved["theta"], SUMS[3:], saved["state"])
    assert resumed.tobytes() == whole.tobytes()


def test_a_state_of_another_optimizer_is_refused() -> None:
    _, state = moved(OptaxStep(optax.adam(0.1)), np.ones(4), SUMS[:1], {})
    for other in (optax.sgd(0.1, momentum=0.9), optax.sgd(0.1)):
        with pytest.raises(InputError, match="another server optimizer"):
            OptaxStep(other).step(np.ones(4), SUMS[0], state, 2)
    with pytest.raises(InputError, match="another server optimizer"):
        OptaxStep(optax.adam(0.1)).step(np.ones(3), SUMS[0, :3], state, 2)
