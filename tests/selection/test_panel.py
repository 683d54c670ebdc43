"""The panel likelihood against stacked rows, differences and plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from fedipw.numerics.newton import Sums
from fedipw.numerics.types import FloatArray
from fedipw.selection import NewtonLogistic
from fedipw.selection.panel import Panel, RoundLog

SHAPES = [  # rounds, clients, varying columns; 512 is the size of a chunk and of a flush
    (1, 1, 1),
    (5, 40, 0),
    (5, 40, 1),
    (7, 30, 3),
    (3, 511, 1),
    (3, 512, 2),
    (2, 1030, 3),
    (511, 3, 1),
    (512, 3, 1),
    (513, 3, 0),
    (1030, 2, 2),
]


def random_panel(rounds: int, clients: int, varying: int, seed: int = 0) -> Panel:
    rng = np.random.default_rng(seed)
    static = np.column_stack([np.ones(clients), rng.normal(size=(clients, 2))])
    x = rng.normal(size=(rounds, varying, clients))
    log_odds = -0.7 + static[:, 1] * 0.5 + 0.4 * x.sum(axis=1)
    return Panel(static=static, varying=x, replied=rng.random((rounds, clients)) < expit(log_odds))


def stacked(panel: Panel) -> FloatArray:
    """Return one row per round and client: constant covariates, then the round's."""
    rounds, varying, _ = panel.varying.shape
    x = panel.varying.transpose(0, 2, 1).reshape(panel.replied.size, varying)
    return np.column_stack([np.tile(panel.static, (rounds, 1)), x])


def plain_sums(panel: Panel, beta: FloatArray) -> Sums:
    X, y = stacked(panel), panel.replied.ravel()
    u = X @ beta
    return Sums(
        float(np.mean(np.logaddexp(0.0, u) - y * u)),
        X.T @ (expit(u) - y) / len(y),
        (X.T * (expit(u) * expit(-u))) @ X / len(y),
    )


@pytest.mark.parametrize("spread", [0.5, 20.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_equal_those_of_the_stacked_rows(shape: tuple[int, int, int], spread: float) -> None:
    panel = random_panel(*shape)
    beta = spread * np.random.default_rng(1).normal(size=panel.n_coefficients)
    got, expected = panel.sums(beta), plain_sums(panel, beta)
    np.testing.assert_allclose(got.value, expected.value, rtol=1e-12)
    np.testing.assert_allclose(got.gradient, expected.gradient, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(got.hessian, expected.hessian, rtol=1e-12, atol=1e-13)


def test_the_running_product_never_overflows() -> None:
    panel = random_panel(1500, 3, 1)  # at zero every factor is 2, and 2**1024 is no double
    assert panel.sums(np.zeros(4)).value == pytest.approx(np.log(2.0), rel=1e-13)


@pytest.mark.parametrize("varying", [0, 1, 3])
def test_derivatives_equal_central_differences(varying: int) -> None:
    panel = random_panel(20, 50, varying)
    beta = np.random.default_rng(2).normal(size=panel.n_coefficients)
    at, h = panel.sums(beta), 1e-5
    for j, step in enumerate(h * np.eye(len(beta))):
        up, down = panel.sums(beta + step), panel.sums(beta - step)
        slope = (up.value - down.value) / (2.0 * h)
        np.testing.assert_allclose(at.gradient[j], slope, rtol=1e-8, atol=1e-10)
        column = (up.gradient - down.gradient) / (2.0 * h)
        np.testing.assert_allclose(at.hessian[j], column, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", [(6, 60, 0), (6, 60, 1), (9, 40, 3), (3, 700, 2), (600, 5, 1)])
def test_the_fit_equals_that_of_the_stacked_rows(shape: tuple[int, int, int]) -> None:
    panel = random_panel(*shape)
    fit = panel.fit(np.zeros(panel.n_coefficients))
    assert fit.result.converged
    assert not fit.separated
    rows = stacked(panel)[:, 1:]
    expected = NewtonLogistic().fit(rows, panel.replied.ravel())
    np.testing.assert_allclose(fit.result.point[1:], expected.coef_[0], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(fit.result.point[0], expected.intercept_[0], rtol=1e-9)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), away=st.floats(0.0, 2.0))
def test_a_warm_start_gives_the_answer_of_a_cold_start(seed: int, away: float) -> None:
    panel = random_panel(8, 60, 1, seed)
    cold = panel.fit(np.zeros(4)).result.point
    push = np.random.default_rng(seed).normal(size=4)
    np.testing.assert_allclose(panel.fit(cold + away * push).result.point, cold, atol=1e-9)


def test_a_fit_on_more_rounds_may_start_from_the_fit_on_fewer() -> None:
    panel = random_panel(30, 80, 2)
    fewer = Panel(static=panel.static, varying=panel.varying[:29], replied=panel.replied[:29])
    start = fewer.fit(np.zeros(5)).result.point
    warm, cold = panel.fit(start).result, panel.fit(np.zeros(5)).result
    np.testing.assert_allclose(warm.point, cold.point, atol=1e-9)
    assert warm.iterations < cold.iterations


def test_collinear_columns_leave_the_probabilities_alone() -> None:
    panel = random_panel(6, 60, 1)
    wide = Panel(
        static=np.column_stack([panel.static, panel.static[:, 1] + 1.0]),
        varying=panel.varying,
        replied=panel.replied,
    )
    fit = wide.fit(np.zeros(5))
    assert fit.result.converged
    assert not fit.separated
    got = expit(stacked(wide) @ fit.result.point)
    expected = expit(stacked(panel) @ panel.fit(np.zeros(4)).result.point)
    np.testing.assert_allclose(got, expected, rtol=1e-8)


@pytest.mark.parametrize("kind", ["complete", "a client that never replies", "a rare round"])
def test_separation_is_flagged(kind: str) -> None:
    panel = random_panel(10, 50, 1)
    static, varying, replied = panel.static.copy(), panel.varying.copy(), panel.replied.copy()
    if kind == "complete":
        replied = varying[:, 0] > 0.2
    elif kind == "a client that never replies":
        static[:, 2] = 0.0
        static[7, 2] = 1.0
        replied[:, 7] = False
    else:
        varying[:, 0] = 0.0
        varying[3, 0, :4] = 1.0
        replied[3, :4] = True
    fit = Panel(static=static, varying=varying, replied=replied).fit(np.zeros(4))
    assert fit.separated


@pytest.mark.parametrize("steepness", [1.0, 8.0, 25.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_false_alarm_on_overlap_with_large_coefficients(steepness: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    varying = rng.normal(size=(40, 1, 100))
    log_odds = steepness * (varying[:, 0] - 0.5)
    replied = rng.random((40, 100)) < expit(log_odds)
    varying[0, 0, :2], replied[0, :2] = [0.8, 0.2], [False, True]  # wrong side, whatever the draw
    fit = Panel(static=np.ones((100, 1)), varying=varying, replied=replied).fit(np.zeros(2))
    assert fit.result.converged
    assert not fit.separated


def test_the_log_grows_without_losing_a_round() -> None:
    rng = np.random.default_rng(3)
    log, static = RoundLog(clients=5, columns=2), np.ones((5, 1))
    covariates, replied = rng.normal(size=(23, 5, 2)), rng.random((23, 5)) < 0.5
    for count, (x, answers) in enumerate(zip(covariates, replied, strict=True), start=1):
        log.append(x, answers)
        panel = log.panel(static)
        np.testing.assert_array_equal(panel.varying, covariates[:count].transpose(0, 2, 1))
        np.testing.assert_array_equal(panel.replied, replied[:count])
        assert (log.rounds, log.replies) == (count, replied[:count].sum())


def test_the_last_round_alone() -> None:
    panel = random_panel(6, 40, 2)
    last = panel.last_round()
    beta = np.random.default_rng(4).normal(size=5)
    only = Panel(static=panel.static, varying=panel.varying[5:], replied=panel.replied[5:])
    assert last.sums(beta).value == only.sums(beta).value
    assert last.replied.shape == (1, 40)
