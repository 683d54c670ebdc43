"""The JAX trainer against the compiled one on the same draws, and what it does not do."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from fedipw.errors import InputError
from fedipw.lab.clients import ArrayClients, ClientData
from fedipw.lab.engine import LocalWork, LogisticTrainer, RoundWork
from fedipw.lab.engine.jaxtrainer import JaxTrainer
from fedipw.lab.engine.local import batch_rows
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import FederatedLogistic
from fedipw.numerics.threads import limit_threads, thread_count

L2, N, P = 0.05, 40, 6
ZERO = {"a": np.zeros(P - 1), "b": np.zeros(())}
WEIGHTS = np.linspace(-0.2, 0.5, N)


def logistic(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    u = x @ p["a"] + p["b"]
    return jnp.logaddexp(0.0, u) - y * u


def ridge(p: dict[str, jax.Array]) -> jax.Array:
    return 0.5 * L2 * (p["a"] @ p["a"] + p["b"] ** 2)


@cache
def clients() -> ClientData:
    return Testbed(size=N, rows=4, rows_max=40).draw(np.random.default_rng(0)).clients


def arrays(data: ClientData) -> ArrayClients:
    return ArrayClients(features=data.features, labels=data.labels, offsets=data.offsets)


@cache
def pair(
    batch: int | None, dtype: str = "float64", block: int | None = None
) -> tuple[JaxTrainer, LogisticTrainer]:
    """Return both trainers; shared by the tests, because compiling takes longest."""
    work, data = LocalWork(steps=3, step_size=0.3, batch_size=batch), clients()
    ours = JaxTrainer(logistic, ZERO, arrays(data), work, penalty=ridge, dtype=dtype, block=block)
    return ours, LogisticTrainer(data, work, L2)


def assert_agreement(batch: int | None, dtype: str, block: int | None, task: RoundWork) -> None:
    ours, engine = pair(batch, dtype, block)
    atol, weights = 1e-10 if dtype == "float64" else 1e-5, WEIGHTS[: len(task.clients)]
    np.testing.assert_allclose(ours.updates(task), engine.updates(task), rtol=0, atol=atol)
    total = engine.total(task, weights)
    np.testing.assert_allclose(ours.total(task, weights), total, rtol=0, atol=atol)


@settings(max_examples=15)
@given(m=st.integers(9, N), key=st.integers(0, 2**63 - 1), seed=st.integers(0, 1000))
@pytest.mark.parametrize("batch", [None, 7])
def test_float64_agrees_with_the_compiled_trainer(
    batch: int | None, m: int, key: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    who, steps = rng.choice(N, m, replace=False), rng.integers(0, 9, m)
    steps[0] = 8  # one shape for all examples: shapes follow the longest
    task = RoundWork(clients=who, theta=rng.normal(size=P), key=key, steps=steps)
    assert_agreement(batch, "float64", None, task)


@pytest.mark.parametrize("block", [1, 4])
def test_float32_agrees_with_steps_pull_and_corrections_together(block: int) -> None:
    rng = np.random.default_rng(block)
    task = RoundWork(
        clients=rng.choice(N, 13, replace=False),
        theta=rng.normal(size=P),
        key=11,
        steps=rng.integers(1, 9, 13),
        proximal=0.4,
        corrections=rng.normal(size=(13, P)),
    )
    assert_agreement(7, "float32", block, task)


@pytest.mark.parametrize("extra", ["proximal", "corrections"])
def test_pull_and_corrections_alone_agree(extra: str) -> None:
    rng = np.random.default_rng(5)
    values: dict[str, Any] = {"proximal": 1.5, "corrections": rng.normal(size=(9, P))}
    task = RoundWork(
        clients=np.arange(9), theta=rng.normal(size=P), key=3, **{extra: values[extra]}
    )
    ours, engine = pair(None)
    np.testing.assert_allclose(ours.updates(task), engine.updates(task), rtol=0, atol=1e-12)


def test_a_batch_as_large_as_the_data_is_the_full_gradient() -> None:
    work = LocalWork(steps=3, step_size=0.3, batch_size=int(clients().counts.max()))
    trainer = JaxTrainer(logistic, ZERO, arrays(clients()), work, penalty=ridge, dtype=np.float64)
    first, second = (
        trainer.updates(RoundWork(clients=np.arange(9), theta=np.ones(P), key=key))
        for key in (1, 2)
    )
    assert first.tobytes() == second.tobytes()  # chance plays no part
    full = pair(None)[1].updates(RoundWork(clients=np.arange(9), theta=np.ones(P), key=1))
    np.testing.assert_allclose(first, full, rtol=0, atol=1e-12)


def test_large_clients_are_taken_in_pieces() -> None:
    """One client of 1,500 rows among small ones: its gradient is a sum over pieces."""
    rng = np.random.default_rng(2)
    counts = np.array([3, 1500, 1, 64, 65, 20])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    data = ClientData(
        features=rng.normal(size=(offsets[-1], P - 1)),
        labels=rng.integers(0, 2, offsets[-1]).astype(np.int8),
        offsets=offsets,
    )
    work = LocalWork(steps=2, step_size=0.5)
    ours = JaxTrainer(logistic, ZERO, arrays(data), work, penalty=ridge, dtype=np.float64)
    task = RoundWork(clients=np.array([1, 0, 4, 2, 5, 3]), theta=rng.normal(size=P), key=0)
    expected = LogisticTrainer(data, work, L2).updates(task)
    np.testing.assert_allclose(ours.updates(task), expected, rtol=0, atol=1e-12)


def test_cohort_sizes_do_not_compile_again() -> None:
    traced = []

    def counting(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        traced.append(x.shape)
        return logistic(p, x, y)

    trainer = JaxTrainer(counting, ZERO, arrays(clients()), LocalWork(batch_size=3))
    rng, sizes = np.random.default_rng(0), [5, 50, 500]
    per_size = []
    for m in sizes:
        before = len(traced)
        who = rng.integers(0, N, m)
        trainer.total(RoundWork(clients=who, theta=np.zeros(P), key=1), np.ones(m))
        per_size.append(len(traced) - before)
    assert all(per_size)  # one shape each
    known = len(traced)
    for m in [1, 2, 7, 8, 9, 33, 64, 65, 300, 512, 513, 700, 1100, *rng.integers(1, 900, 20)]:
        who = rng.integers(0, N, m)
        trainer.total(RoundWork(clients=who, theta=np.zeros(P), key=1), np.ones(m))
    assert len(traced) == known


def test_a_cohort_of_several_calls_is_their_sum() -> None:
    rng = np.random.default_rng(4)
    who, weights = rng.integers(0, N, 1300), rng.normal(size=1300)
    task = RoundWork(clients=who, theta=rng.normal(size=P), key=9)
    ours, engine = pair(7)
    np.testing.assert_allclose(ours.total(task, weights), engine.total(task, weights), atol=1e-10)


def wide(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    return jnp.tanh(x @ p["w"]) @ p["v"]


@pytest.fixture(scope="module")
def network() -> JaxTrainer:
    """A network of 65,536 parameters, 256 kB a client: what could grow would show."""
    rng = np.random.default_rng(0)
    params = {"w": 0.05 * rng.normal(size=(255, 256)), "v": 0.05 * rng.normal(size=256)}
    data = ArrayClients(
        features=rng.normal(size=(60, 255)), labels=rng.normal(size=60), offsets=np.arange(0, 61, 6)
    )
    work = LocalWork(steps=2, step_size=0.01, batch_size=4)
    return JaxTrainer(lambda p, x, y: (wide(x, p) - y) ** 2, params, data, work)


def test_memory_does_not_grow_with_the_cohort(network: JaxTrainer) -> None:
    few, many = network.call_bytes(10), network.call_bytes(500)
    drawn = 2 * 4 * 4  # bytes of the rows a client draws
    assert many - few < 512 * (drawn + 64) + 4096  # 490 more updates would be 128 MB
    assert network.call_bytes(5000) == many  # calls of 512


def test_rows_are_drawn_as_they_are_needed() -> None:
    """All draws of the round at once would be 40 MB."""
    work = LocalWork(steps=50, batch_size=4)
    trainer = JaxTrainer(logistic, ZERO, arrays(clients()), work)

    def peak(size: int) -> int:
        who = np.resize(np.arange(N), size)
        task, weights = RoundWork(clients=who, theta=np.zeros(P), key=0), np.ones(size)
        trainer.total(task, weights)  # compiles
        tracemalloc.start()
        trainer.total(task, weights)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(50_000) - peak(2_000) < 48_000 * 40  # a few numbers of each client


def test_the_rule_for_blocks() -> None:
    def made(
        loss: Callable[..., jax.Array], params: Any, shape: tuple[int, ...] = (4,)
    ) -> JaxTrainer:
        data = ArrayClients(
            features=np.ones((2, *shape)), labels=np.ones(2), offsets=np.array([0, 1, 2])
        )
        return JaxTrainer(loss, params, data)

    def dense(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return p["w"].sum() * x[:, 0] - y

    def convolving(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        out = jax.lax.conv_general_dilated(x[:, None], p["w"], (1, 1), "SAME")
        return out.sum(axis=(1, 2, 3)) - y

    sizes = {100: 16, 2**15: 16, 2**15 + 1: 8, 101_770: 4, 2**18: 2, 2**20: 1}
    assert {n: made(dense, {"w": np.zeros(n)}).block for n in sizes} == sizes
    assert made(convolving, {"w": np.zeros((1, 1, 3, 3))}, (4, 4)).block == 1
    assert pair(7, "float32", 4)[0].block == 4


def test_same_inputs_same_bytes(network: JaxTrainer) -> None:
    task, weights = RoundWork(clients=np.arange(10), theta=network.start, key=5), np.full(10, 0.1)
    first, threads = network.total(task, weights).tobytes(), thread_count()
    assert all(network.total(task, weights).tobytes() == first for _ in range(20))
    limit_threads(1)
    try:
        assert network.total(task, weights).tobytes() == first
    finally:
        limit_threads(threads)


def test_one_client_that_blows_up_is_seen_and_harms_no_other() -> None:
    def root(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sqrt(x[:, 0] + 0.0 * p["b"]) * p["b"] - y  # NaN below zero

    data = ArrayClients(
        features=np.array([[4.0], [-1.0], [9.0]]), labels=np.zeros(3), offsets=np.arange(4)
    )
    trainer = JaxTrainer(root, {"b": np.ones(())}, data, LocalWork(step_size=1.0), block=2)
    task = RoundWork(clients=np.arange(3), theta=np.ones(1), key=0)
    assert np.isnan(trainer.updates(task)[:, 0]).tolist() == [False, True, False]
    assert np.isnan(trainer.total(task, np.array([1.0, 0.0, 1.0]))).all()  # whatever its weight
    fine = RoundWork(clients=np.array([0, 2, 0]), theta=np.ones(1), key=0)
    assert np.isfinite(trainer.total(fine, np.ones(3))).all()  # an empty place beside the last
    assert np.isnan(trainer.losses(np.ones(1))).tolist() == [False, True, False]


def test_clients_may_use_any_optimizer_afresh_each_round() -> None:
    data, optimizer = arrays(clients()), optax.adam(0.1)
    work = LocalWork(steps=4, batch_size=5)
    trainer = JaxTrainer(logistic, ZERO, data, work, optimizer=optimizer)
    task = RoundWork(clients=np.array([3, 9]), theta=np.full(P, 0.2), key=8, proximal=0.3)
    drawn = batch_rows(data.offsets, task.clients, np.array([4, 4]), 5, 8)

    def local(theta: dict[str, Any], x: Any, y: Any, sent: dict[str, Any]) -> Any:
        pull = sum(((theta[k] - sent[k]) ** 2).sum() for k in theta)
        return logistic(theta, x, y).mean() + 0.15 * pull

    for row, batches in enumerate(drawn):
        sent = jax.tree.map(jnp.asarray, trainer.tree(task.theta))
        y, state = sent, optimizer.init(sent)
        for batch in batches:
            at = batch[batch >= 0]
            x, labels = data.features[at].astype(np.float32), data.labels[at]
            moves, state = optimizer.update(jax.grad(local)(y, x, labels, sent), state, y)
            y = optax.apply_updates(y, moves)
        expected = ravel_pytree(y)[0] - task.theta
        for _ in range(2):
            np.testing.assert_allclose(trainer.updates(task)[row], expected, atol=2e-6)


def shares(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return y + 0.0 * p["b"] * x[:, 0]


def test_losses_are_those_of_the_target_objective() -> None:
    theta = np.random.default_rng(0).normal(size=P)
    ours = pair(7)[0]
    losses, target = ours.losses(theta), FederatedLogistic(clients(), L2, np.ones(N))
    assert losses.mean() == pytest.approx(target.losses(theta)[0], rel=1e-12)
    some = np.array([31, 2, 2, 17])
    np.testing.assert_allclose(ours.losses(theta, some), losses[some], rtol=1e-12)
    ones = ours.means(shares, theta)
    np.testing.assert_allclose(ones, clients().label_share, rtol=1e-12)


def test_trees_and_vectors_are_the_same_model() -> None:
    ours = pair(7)[0]
    theta = np.arange(6.0)
    tree = ours.tree(theta)
    assert tree["a"].tolist() == [0, 1, 2, 3, 4]
    assert float(tree["b"]) == 5.0
    assert np.asarray(ravel_pytree(tree)[0], dtype=np.float64).tobytes() == theta.tobytes()
    start = ours.start
    start += 1.0  # a copy
    assert not ours.start.any()


def test_jax_settings_are_left_alone() -> None:
    pair(7)[0].losses(np.zeros(P))
    assert jnp.asarray(np.zeros(1)).dtype == jnp.float32


def test_nobody_gives_nothing() -> None:
    nobody = RoundWork(clients=np.array([], dtype=np.int64), theta=np.zeros(P), key=0)
    assert pair(7)[0].updates(nobody).shape == (0, P)
    assert not pair(7)[0].total(nobody, np.array([])).any()


def task_of(**changes: Any) -> RoundWork:
    return RoundWork(**{"clients": np.arange(2), "theta": np.zeros(P), "key": 0, **changes})


@pytest.mark.parametrize(
    ("changes", "weights", "message"),
    [
        ({"theta": np.zeros(4)}, 2, r"shape \(4,\), not \(6,\)"),
        ({"clients": np.array([0, N, -1])}, 3, f"not among them: {N}, -1"),
        ({"clients": np.array([0.0, 1.0])}, 2, "vector of positions"),
        ({"steps": np.array([1, -1])}, 2, "0 or more"),
        ({"steps": np.array([1])}, 2, "steps has 1 rows, expected 2"),
        ({}, 3, "weights has 3 rows, expected 2"),
    ],
)
def test_bad_tasks_are_refused(changes: dict[str, Any], weights: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pair(7)[0].total(task_of(**changes), np.ones(weights))


def mean_loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return logistic(p, x, y).mean()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": mean_loss}, r"one loss per row, not \(\)"),
        ({"loss": lambda p, x, y: (x @ p["a"], y)}, "2 arrays"),
        ({"penalty": lambda p: p["a"]}, r"scalar, not of shape \(5,\)"),
        ({"params": {"a": np.zeros(5), "b": np.array(np.nan)}}, r"\['b'\] must be finite"),
        ({"params": {"a": np.zeros(5), "b": np.array(1)}}, r"\['b'\] must be finite floating"),
        ({"params": {}}, "no arrays"),
        ({"dtype": np.float16}, "float32 or float64, not float16"),
        ({"block": 0}, "block must be at least 1"),
    ],
)
def test_bad_models_are_refused(changes: dict[str, Any], message: str) -> None:
    made: dict[str, Any] = {"loss": logistic, "params": ZERO, "clients": arrays(clients())}
    with pytest.raises(InputError, match=message):
        JaxTrainer(**{**made, **changes})


def test_a_measure_must_have_one_value_per_row() -> None:
    with pytest.raises(InputError, match=r"1024 rows gave \(\) values"):
        pair(7)[0].means(mean_loss, np.zeros(P))


IMAGES = np.zeros((3, 2, 2))
LABELS = np.zeros(3, dtype=np.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": LABELS[:2]}, "disagree on rows"),
        ({"offsets": np.array([0])}, "There are no clients"),
        ({"offsets": np.array([0, 2])}, "rise from 0 to the number of rows, 3"),
        ({"offsets": np.array([0, 2, 1, 3])}, "rise from 0"),
        ({"offsets": np.array([0, 2, 2, 3])}, r"1 clients have no rows \(client 1\)"),
        ({"offsets": np.array([0.0, 3.0])}, "vector of integers"),
        (
            {"features": np.where(np.arange(12).reshape(3, 2, 2) == 9, np.nan, 0.0)},
            "features have missing or infinite values, first in row 2 of client 1",
        ),
        ({"labels": np.array([0.0, np.inf, 0.0])}, "labels have missing .* row 1 of client 0"),
        ({"labels": np.array([0, 1, 2**40])}, "more than 32 bits, first in row 2"),
        ({"labels": np.array(["a", "b", "c"])}, "labels must be numbers"),
    ],
)
def test_bad_client_data_are_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"features": IMAGES, "labels": LABELS, "offsets": np.array([0, 2, 3])}
    assert ArrayClients(**given).size == 2
    with pytest.raises(InputError, match=message):
        ArrayClients(**{**given, **changes})


def test_the_engine_works_without_jax() -> None:
    script = """
import sys
import fedipw.lab.engine
assert "jax" not in sys.modules and "optax" not in sys.modules
sys.modules["jax"] = None  # as if it were not installed
try:
    import fedipw.lab.engine.jaxtrainer
except ImportError as error:
    assert "pip install 'fedipw[jax]'" in str(error), error
else:
    raise AssertionError("imported")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
