"""The panel likelihood against blocks, stacked rows, differences and plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from fedipw.errors import InputError, SeparationError
from fedipw.numerics import BoolArray, FloatArray, IntArray
from fedipw.numerics.newton import Sums
from fedipw.selection.classifiers import WARM_DECREMENT_TOL
from fedipw.selection.logistic import (
    LogisticFit,
    block_sums,
    likelihood_sums,
    logistic_fit,
)
from fedipw.selection.propensity import NewtonLogistic
from fedipw.selection.rowstore import BlockStore, Panel, PanelStore
from fedipw.tables.partitions import Frame, sum_over

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
seeds = st.integers(0, 2**32 - 1)


def panel_of(
    static: FloatArray, varying: FloatArray, labels: BoolArray, static_at: IntArray | None = None
) -> Panel:
    """Return a panel of constant columns (n, q_z) and columns (R, q_x, n), as they are.

    ``static_at`` (q_z,) are the places of the constant columns in the design; the first by default.
    """
    q = static.shape[1] + varying.shape[1]
    at = np.arange(static.shape[1]) if static_at is None else static_at
    return Panel(
        static=np.column_stack([np.ones(len(static)), static]),
        varying=varying,
        labels=np.asarray(labels, dtype=np.bool_),
        static_at=at,
        varying_at=np.setdiff1d(np.arange(q), at),
        order=np.argsort([q, *at, *np.setdiff1d(np.arange(q), at)]),
        passed=int(labels.sum()),
        frame=Frame(np.zeros(q), np.ones(q)),
        clients=np.arange(len(static)),
        members=len(static),
    )


def random_panel(
    rounds: int, clients: int, varying: int, seed: int = 0, static: int = 2, *, mixed: bool = False
) -> Panel:
    rng = np.random.default_rng(seed)
    z, x = rng.normal(size=(clients, static)), rng.normal(size=(rounds, varying, clients))
    log_odds = -0.7 + (0.5 * z[:, 0] if static else 0.0) + 0.4 * x.sum(axis=1)
    places = rng.permutation(static + varying)[:static] if mixed else None
    return panel_of(z, x, rng.random((rounds, clients)) < expit(log_odds), places)


def stacked(panel: Panel) -> FloatArray:
    """Return one row per round and client, columns in the order of the design, (R n, q)."""
    rounds, _, clients = panel.varying.shape
    X = np.empty((rounds, clients, len(panel.static_at) + len(panel.varying_at)))
    for place, column in zip(panel.static_at, panel.static.T[1:], strict=True):
        X[:, :, place] = column
    for k, place in enumerate(panel.varying_at):
        X[:, :, place] = panel.varying[:, k]
    return X.reshape(rounds * clients, -1)


def plain_sums(panel: Panel, beta: FloatArray) -> Sums:
    X, y = np.column_stack([stacked(panel), np.ones(panel.rows)]), panel.labels.ravel()
    u = X @ beta
    return Sums(
        float(np.sum(np.logaddexp(0.0, u) - y * u)),
        X.T @ (expit(u) - y),
        (X.T * (expit(u) * expit(-u))) @ X,
    )


def names_of(panel: Panel) -> list[str]:
    return [f"c{j}" for j in range(len(panel.static_at) + len(panel.varying_at))]


def fit_of(panel: Panel, start: FloatArray | None = None) -> LogisticFit:
    return logistic_fit(panel, names_of(panel), frame=panel.frame, start=start)


def assert_same_sums(panel: Panel, beta: FloatArray) -> None:
    got, counts = panel.likelihood_sums(beta)
    u = stacked(panel) @ beta[:-1] + beta[-1]
    rounding = 1e-15 * float(1.0 + np.abs(u).sum())  # of losses that are small beside log odds
    for expected in (plain_sums(panel, beta), sum_over(panel, lambda b: block_sums(b, beta)[0])):
        scale = 1.0 + np.abs(expected.hessian).max()
        np.testing.assert_allclose(got.value, expected.value, rtol=1e-12, atol=rounding)
        np.testing.assert_allclose(got.gradient, expected.gradient, rtol=1e-12, atol=1e-13 * scale)
        np.testing.assert_allclose(got.hessian, expected.hessian, rtol=1e-12, atol=1e-13 * scale)
    assert got.largest == pytest.approx(np.abs(u).max(), rel=1e-12)
    assert (counts.rows, counts.weight) == (panel.rows, panel.rows)
    assert counts.selected == panel.labels.sum()
    assert likelihood_sums(panel, beta)[0].value == got.value  # a fit asks the panel itself


@pytest.mark.parametrize("spread", [0.5, 20.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_equal_those_of_the_stacked_rows(shape: tuple[int, int, int], spread: float) -> None:
    panel = random_panel(*shape, mixed=True)
    assert_same_sums(panel, spread * np.random.default_rng(1).normal(size=shape[2] + 3))


@settings(max_examples=80)
@given(
    rounds=st.integers(1, 9),
    clients=st.integers(1, 40),
    static=st.integers(0, 4),
    varying=st.integers(0, 4),
    spread=st.floats(0.0, 30.0),
    seed=seeds,
)
def test_sums_equal_those_over_blocks_wherever_constant_columns_stand(
    rounds: int, clients: int, static: int, varying: int, spread: float, seed: int
) -> None:
    panel = random_panel(rounds, clients, varying, seed, static, mixed=True)
    rng = np.random.default_rng(seed)
    assert_same_sums(panel, spread * rng.normal(size=static + varying + 1))


def test_the_running_product_never_overflows() -> None:
    panel = random_panel(1500, 3, 1)  # at zero every factor is 2, and 2**1024 is no double
    at, counts = panel.likelihood_sums(np.zeros(4))
    assert at.value / counts.weight == pytest.approx(np.log(2.0), rel=1e-13)


@pytest.mark.parametrize("varying", [0, 1, 3])
def test_derivatives_equal_central_differences(varying: int) -> None:
    panel = random_panel(20, 50, varying, mixed=True)
    beta = np.random.default_rng(2).normal(size=varying + 3)
    (at, _), h, n = panel.likelihood_sums(beta), 1e-5, panel.rows
    for j, step in enumerate(h * np.eye(len(beta))):
        (up, _), (down, _) = (panel.likelihood_sums(b) for b in (beta + step, beta - step))
        slope = (up.value - down.value) / (2.0 * h)
        np.testing.assert_allclose(at.gradient[j] / n, slope / n, rtol=1e-8, atol=1e-10)
        column = (up.gradient - down.gradient) / (2.0 * h)
        np.testing.assert_allclose(at.hessian[j] / n, column / n, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", [(6, 60, 0), (6, 60, 1), (9, 40, 3), (3, 700, 2), (600, 5, 1)])
def test_the_fit_equals_that_of_the_stacked_rows(shape: tuple[int, int, int]) -> None:
    panel = random_panel(*shape, mixed=True)
    fit = fit_of(panel).checked()
    expected = NewtonLogistic().fit(stacked(panel), panel.labels.ravel())
    np.testing.assert_allclose(fit.coefficients, expected.coef_[0], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(fit.intercept, expected.intercept_[0], rtol=1e-9)
    np.testing.assert_allclose(fit.standard_errors, expected.standard_errors_, rtol=1e-8)


@settings(max_examples=40)
@given(seed=seeds, away=st.floats(0.0, 2.0))
def test_a_warm_start_gives_the_answer_of_a_cold_start(seed: int, away: float) -> None:
    panel = random_panel(8, 60, 1, seed, mixed=True)
    cold = fit_of(panel).point
    push = np.random.default_rng(seed).normal(size=4)
    np.testing.assert_allclose(fit_of(panel, cold + away * push).point, cold, atol=1e-9)


def test_a_fit_on_more_rounds_may_start_from_the_fit_on_fewer() -> None:
    panel = random_panel(30, 80, 2)
    static = panel.static[:, 1:]
    start = fit_of(panel_of(static, panel.varying[:29], panel.labels[:29])).point
    warm, cold = fit_of(panel, start), fit_of(panel)
    np.testing.assert_allclose(warm.point, cold.point, atol=1e-9)
    assert warm.iterations < cold.iterations
    hasty = logistic_fit(
        panel, names_of(panel), frame=panel.frame, start=cold.point,
        decrement_tol=WARM_DECREMENT_TOL,
    )  # fmt: skip
    np.testing.assert_allclose(hasty.point, cold.point, atol=1e-9)
    assert hasty.passes == 1  # from so near, one pass is a fit


def test_collinear_columns_leave_the_probabilities_alone() -> None:
    panel = random_panel(6, 60, 1)
    static = np.column_stack([panel.static[:, 1:], panel.static[:, 1] + 1.0])
    wide = panel_of(static, panel.varying, panel.labels)
    fit = fit_of(wide).checked()
    assert fit.collinear == ("c2",)
    expected = fit_of(panel).prob(stacked(panel).T)
    np.testing.assert_allclose(fit.prob(stacked(wide).T), expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("complete", ("c2",)), ("a client that never replies", ("c1",)), ("a rare round", ("c2",))],
)
def test_separation_is_flagged_and_named(kind: str, columns: tuple[str, ...]) -> None:
    panel = random_panel(10, 50, 1)
    static, varying, labels = panel.static[:, 1:].copy(), panel.varying.copy(), panel.labels.copy()
    if kind == "complete":
        labels = varying[:, 0] > 0.2
    elif kind == "a client that never replies":
        static[:, 1] = 0.0
        static[7, 1] = 1.0
        labels[:, 7] = False
    else:
        varying[:, 0] = 0.0
        varying[3, 0, :4] = 1.0
        labels[3, :4] = True
    with pytest.raises(SeparationError) as caught:
        fit_of(panel_of(static, varying, labels)).checked()
    assert caught.value.columns == columns


@pytest.mark.parametrize("steepness", [1.0, 8.0, 25.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_false_alarm_on_overlap_with_large_coefficients(steepness: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    varying = rng.normal(size=(40, 1, 100))
    log_odds = steepness * (varying[:, 0] - 0.5)
    labels = rng.random((40, 100)) < expit(log_odds)
    varying[0, 0, :2], labels[0, :2] = [0.8, 0.2], [False, True]  # wrong side, whatever the draw
    fit = fit_of(panel_of(np.empty((100, 0)), varying, labels))
    assert fit.converged
    assert fit.separating == ()


# The store behind it


def filled(rounds: int = 23) -> tuple[PanelStore, FloatArray, FloatArray, BoolArray]:
    """Return a store of 5 clients among 9 with its static columns, covariates and labels."""
    rng = np.random.default_rng(3)
    static, clients = rng.normal(size=(1, 9)), np.array([8, 1, 3, 0, 6])
    x, labels = rng.normal(size=(rounds, 2, 5)), rng.random((rounds, 5)) < 0.5
    store = PanelStore(static, np.array([1]), 3)
    for now, replied in zip(x, labels, strict=True):
        store.append(store.whole(now, clients), replied.astype(np.int8), clients)
    return store, static[:, clients], x, labels


def test_the_store_grows_without_losing_a_round() -> None:
    store, static, x, labels = filled()
    for first, last in [(0, 23), (0, 1), (5, 9), (22, 23)]:
        X, y, clients = store.rounds(first, last).matrix()
        expected = np.empty((last - first, 5, 3))
        expected[:, :, 1] = static[0]
        expected[:, :, [0, 2]] = x[first:last].transpose(0, 2, 1)
        np.testing.assert_allclose(X, expected.reshape(-1, 3), rtol=1e-13, atol=1e-14)
        np.testing.assert_array_equal(y, labels[first:last].ravel())
        np.testing.assert_array_equal(clients, np.tile([8, 1, 3, 0, 6], last - first))


def test_some_rounds_are_a_view_of_all() -> None:
    store, *_ = filled()
    beta = np.random.default_rng(4).normal(size=4)
    whole, parts = store.rounds(0, 23), [store.rounds(0, 9), store.rounds(9, 23)]
    assert all(np.shares_memory(part.varying, whole.varying) for part in parts)
    sums = [part.likelihood_sums(beta)[0].value for part in parts]
    assert sum(sums) == pytest.approx(whole.likelihood_sums(beta)[0].value, rel=1e-13)


def test_rows_and_frame_are_those_of_blocks() -> None:
    """The same rows in blocks are standardised by the same first round, and sum to the same."""
    store, _, x, labels = filled()
    blocks, clients = BlockStore(9), np.array([8, 1, 3, 0, 6])
    for now, replied in zip(x, labels, strict=True):
        blocks.append(store.whole(now, clients), replied.astype(np.int8), clients)
    assert store.frame is not None
    assert blocks.frame is not None
    np.testing.assert_array_equal(store.frame.centre, blocks.frame.centre)
    np.testing.assert_array_equal(store.frame.scale, blocks.frame.scale)
    beta = np.random.default_rng(4).normal(size=4)
    for first, last in [(0, 23), (3, 4), (7, 20)]:
        panel, rows = store.rounds(first, last), blocks.rounds(first, last)
        assert panel.rows == rows.rows
        here, there = likelihood_sums(panel, beta)[0], likelihood_sums(rows, beta)[0]
        np.testing.assert_allclose(here.hessian, there.hessian, rtol=1e-12, atol=1e-13)
        for mine, theirs in zip(panel.matrix(), rows.matrix(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_folds_are_of_the_clients_in_the_panel() -> None:
    store, *_ = filled()
    folds = store.rounds(0, 23).fold_of(2, np.random.default_rng(0))
    inside = [0, 1, 3, 6, 8]
    assert set(folds[inside].tolist()) == {0, 1}
    assert (np.delete(folds, inside) == -1).all()
    with pytest.raises(InputError, match="6 folds over 5 clients: need 2 to 5"):
        store.rounds(0, 23).fold_of(6, np.random.default_rng(0))


def test_a_store_without_rounds_has_nothing_to_fit() -> None:
    for store in (PanelStore(np.empty((0, 4)), np.arange(0), 1), BlockStore(4)):
        with pytest.raises(InputError, match="There are no rows to fit on"):
            store.rounds(0, 0)
