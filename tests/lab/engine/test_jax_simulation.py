"""The JAX trainer inside the loop, and the example that uses it."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedipw.errors import InputError
from fedipw.lab.clients import ArrayClients
from fedipw.lab.engine import RuleSettings, Simulation, Training
from fedipw.lab.engine.intermittent import CAFed
from fedipw.lab.engine.jaxtrainer import JaxTrainer
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Testbed
from loading import example

ROOT = Path(__file__).parents[3]
L2 = 0.05


def logistic(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    u = x @ p["a"] + p["b"]
    return jnp.logaddexp(0.0, u) - y * u


def ridge(p: dict[str, jax.Array]) -> jax.Array:
    return 0.5 * L2 * (p["a"] @ p["a"] + p["b"] ** 2)


def run(training: Training, *, by_jax: bool) -> Simulation:
    """Return three rounds of rules that use every field of a task, by either trainer."""
    methods = (
        "fedprox+fedipw", "fednova", "scaffold+fedipw", "fednova+fedawe+fedipw", "focus", "cafed",
    )  # fmt: skip
    rules = RuleSettings(cafed=CAFed(alone=3))
    scenario = Scenario(population=Testbed(size=60), rounds=3, methods=methods, rules=rules)
    made = scenario.simulation(limits=False)
    data = made.federation.rows
    trainer = JaxTrainer(
        logistic,
        {"a": np.zeros(5), "b": np.zeros(())},
        ArrayClients(features=data.features, labels=data.labels, offsets=data.offsets),
        training.work,
        penalty=ridge,
        dtype=np.float64,
    )
    simulation = Simulation(
        made.federation,
        made._weighers,
        training,
        np.random.default_rng(0),
        compositions=made._methods,
        trainer=trainer if by_jax else None,
    )
    simulation.advance(3)
    return simulation


def test_all_rules_give_the_same_run_with_either_trainer() -> None:
    training = Training(l2=L2, steps=np.tile([1, 2, 4], 20))
    ours, engine = (run(training, by_jax=by_jax).history().iterates for by_jax in (True, False))
    assert np.abs(engine[:, -1]).max() > 0.01
    np.testing.assert_allclose(ours, engine, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return example("digits_cnn")


def test_the_convolution_of_the_example_is_laxs(digits: ModuleType) -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 8, 8, 3)), rng.normal(size=(27, 4))
    numbers = ("NHWC", "HWIO", "NHWC")
    with jax.enable_x64(True):
        expected = jax.lax.conv_general_dilated(
            jnp.asarray(x),
            jnp.asarray(kernel.reshape(3, 3, 3, 4)),
            (1, 1),
            "SAME",
            dimension_numbers=numbers,
        )
        np.testing.assert_allclose(digits.convolved(x, kernel), expected, atol=1e-12)


def test_the_example_learns_and_prints_the_rows_of_its_page(digits: ModuleType) -> None:
    found = digits.summary(seeds=1, size=100, rounds=5)
    page = (ROOT / "docs" / "augmented.md").read_text(encoding="utf-8")
    for line, (name, values) in zip(
        digits.printed(found).splitlines()[1:], found.items(), strict=True
    ):
        assert line.startswith(name)
        assert f"\n{name}" in page
        assert values[0, 0] < np.log(10.0)  # better than knowing nothing


@pytest.mark.parametrize(
    ("name", "rule"), [("scaffold", "SCAFFOLD"), ("fednova+fedipw", "FedNova"), ("focus", "FOCUS")]
)
def test_rules_that_need_plain_steps_refuse_another_optimizer(name: str, rule: str) -> None:
    made = Scenario(population=Testbed(size=30), methods=(name,)).simulation(limits=False)
    data = made.federation.rows
    images = ArrayClients(features=data.features, labels=data.labels, offsets=data.offsets)
    params = {"a": np.zeros(5), "b": np.zeros(())}
    with pytest.raises(InputError, match=f"{rule} needs local steps that are a step size times"):
        Simulation(
            made.federation,
            made._weighers,
            made.training,
            np.random.default_rng(0),
            compositions=made._methods,
            trainer=JaxTrainer(logistic, params, images, optimizer=optax.adam(0.1)),
        )


def test_clients_of_another_model_need_its_trainer() -> None:
    made = Scenario(population=Testbed(size=30), methods=("fedavg",)).simulation(limits=False)
    data = made.federation.rows
    images = ArrayClients(features=data.features, labels=data.labels, offsets=data.offsets)
    federation = replace(made.federation, clients=images)
    with pytest.raises(InputError, match="data of another model: pass its trainer"):
        Simulation(federation, made._weighers, made.training, np.random.default_rng(0))
