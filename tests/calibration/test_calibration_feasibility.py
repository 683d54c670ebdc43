"""Targets that can and cannot be met, against the full linear programme over all weights."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import brentq, linprog

from fedipw.calibration import (
    Box,
    Distance,
    Entropy,
    Linear,
    Logit,
    Margins,
    Quadratic,
    Ridge,
    calibrated,
)
from fedipw.errors import InfeasibleError
from fedipw.numerics import FloatArray


def least_slack(
    b: FloatArray, target: FloatArray, share: FloatArray, span: tuple[float, float]
) -> float:
    """Return min over all weights of the largest miss in standard deviations, by one programme."""
    n, q = b.shape
    z = (b - target) / b.std(axis=0, ddof=1)
    low, high = span
    found = linprog(
        np.append(np.zeros(n), 1.0),
        A_ub=np.block([[z.T, -np.ones((q, 1))], [-z.T, -np.ones((q, 1))]]),
        b_ub=np.zeros(2 * q),
        A_eq=np.append(np.ones(n), 0.0)[None, :],
        b_eq=[1.0],
        bounds=[(low * p, None if np.isinf(high) else high * p) for p in share] + [(0.0, None)],
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert found.status == 0
    return float(np.asarray(found.fun))


def reach(
    b: FloatArray, share: FloatArray, towards: FloatArray, span: tuple[float, float]
) -> float:
    """Return how many times ``towards`` the mean can go from the share-weighted mean."""
    n, q = b.shape
    centre = share @ b
    low, high = span
    found = linprog(
        np.append(np.zeros(n), -1.0),
        A_eq=np.block([[(b - centre).T, -towards[:, None]], [np.ones((1, n)), np.zeros((1, 1))]]),
        b_eq=np.append(np.zeros(q), 1.0),
        bounds=[(low * p, None if np.isinf(high) else high * p) for p in share] + [(0.0, None)],
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert found.status == 0
    return -float(np.asarray(found.fun))


def columns(rng: np.random.Generator, n: int, q: int) -> FloatArray:
    """Columns of four kinds: normal, skewed, heavy-tailed and counts."""
    kinds = [rng.normal(size=n), rng.exponential(size=n), rng.standard_t(2, n), rng.poisson(3.0, n)]
    return np.column_stack([kinds[j] for j in rng.permutation(4)[:q]])


DISTANCES: list[Distance] = [
    Quadratic(),
    Entropy(),
    Quadratic(0.2, 3.0),
    Quadratic(0.1),
    Logit(0.2, 3.0),
]


@pytest.mark.parametrize("distance", DISTANCES, ids=str)
def test_what_is_refused_and_the_least_slack_agree_with_the_full_programme(
    distance: Distance,
) -> None:
    refused = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        n, q = int(rng.integers(8, 50)), int(rng.integers(1, 4))
        b, base = columns(rng, n, q), rng.uniform(0.5, 3.0, n)
        target = b.mean(axis=0) + rng.normal(size=q) * b.std(axis=0) * rng.choice([0.1, 0.6, 1.5])
        optimum = least_slack(b, target, base / base.sum(), distance.family[1:])
        if optimum == 0.0:
            result = calibrated(b, target, distance=distance, base=base)
            assert result.largest_violation < 1e-10
            continue
        refused += 1
        with pytest.raises(InfeasibleError) as caught:
            calibrated(b, target, distance=distance, base=base)
        error = caught.value
        assert error.least_slack == pytest.approx(optimum, rel=1e-6, abs=1e-8)
        with pytest.raises(InfeasibleError):
            calibrated(b, target, distance=distance, base=base, slack=Box(0.99 * optimum))
        wider = calibrated(b, target, distance=distance, base=base, slack=Box(1.01 * optimum))
        assert wider.largest_violation <= 1.01 * optimum + 1e-10
        nearest = np.array([error.nearest[f"b{j + 1}"] for j in range(q)])
        gap = np.abs(nearest - target) / b.std(axis=0, ddof=1)
        assert gap.max() == pytest.approx(optimum, rel=1e-6, abs=1e-8)
        assert least_slack(b, nearest, base / base.sum(), distance.family[1:]) < 1e-8
    assert 3 <= refused <= 7


@pytest.mark.parametrize(
    ("distance", "size"), [(Quadratic(), 1.2), (Entropy(), 1.2), (Quadratic(0.2, 3.0), 0.4)]
)
def test_the_conflict_is_minimal(distance: Distance, size: float) -> None:
    """What is named cannot be met together, and can without any one of its members."""
    sizes = set()
    for seed in range(6):
        rng = np.random.default_rng(100 + seed)
        b = rng.normal(size=(60, 4))
        target = rng.choice([-1.0, 1.0], 4) * size * rng.uniform(0.8, 1.2, 4)
        share = np.full(60, 1.0 / 60)
        try:
            calibrated(b, target, distance=distance)
        except InfeasibleError as error:
            named = [int(name[1:]) - 1 for name, *_ in error.conflict]
            sizes.add(len(named))
            assert least_slack(b[:, named], target[named], share, distance.family[1:]) > 1e-9
            for left in combinations(named, len(named) - 1):
                kept = list(left)
                if kept:
                    assert least_slack(b[:, kept], target[kept], share, distance.family[1:]) == 0.0
            for j, (_, wanted, least, largest) in zip(named, error.conflict, strict=True):
                assert wanted == target[j]
                assert (least, largest) == (b[:, j].min(), b[:, j].max())
    assert max(sizes) > 1


@pytest.mark.parametrize("distance", DISTANCES, ids=str)
def test_a_thousandth_inside_the_border_is_solved_and_a_thousandth_outside_refused(
    distance: Distance,
) -> None:
    for seed in range(6):
        rng = np.random.default_rng(200 + seed)
        n, q = int(rng.integers(20, 60)), int(rng.integers(1, 4))
        b, towards = columns(rng, n, q), rng.normal(size=q)
        share = np.full(n, 1.0 / n)
        border = reach(b, share, towards, distance.family[1:])
        inside = b.mean(axis=0) + 0.999 * border * towards
        result = calibrated(b, inside, distance=distance)
        assert result.largest_violation < 1e-10
        np.testing.assert_allclose(result.weights @ b, inside, rtol=0.0, atol=1e-9 * np.ptp(b))
        with pytest.raises(InfeasibleError):
            calibrated(b, b.mean(axis=0) + 1.001 * border * towards, distance=distance)


def test_a_target_inside_every_range_but_outside_the_hull_names_both_columns() -> None:
    b = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.1], [3.0, 3.0], [4.0, 4.0]])
    with pytest.raises(InfeasibleError, match="No weights on the 5 enrolled") as caught:
        calibrated(b, [1.0, 3.0], names=["age", "score"])
    assert [name for name, *_ in caught.value.conflict] == ["age", "score"]
    assert "leave a constraint out or coarsen it" in caught.value.ways_out
    text = str(caught.value)
    assert "age = 1 (enrolled clients span 0 to 4)" in text
    assert "Ways out: correct the targets" in text


def test_a_target_outside_one_range_names_that_column_alone() -> None:
    b = np.random.default_rng(0).uniform(size=(30, 3))
    for distance in (Quadratic(), Entropy(), Logit(0.1, 3.0), Quadratic(0.1, 3.0)):
        with pytest.raises(InfeasibleError) as caught:
            calibrated(b, [0.5, 1.2, 0.5], distance=distance, names=["a", "b", "c"])
        assert [name for name, *_ in caught.value.conflict] == ["b"]
        assert caught.value.nearest["b"] <= 1.0
    result = calibrated(b, [0.5, 1.2, 0.5], distance=Linear())
    assert result.largest_violation < 1e-12
    assert result.negative > 0


SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.0], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ([0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ([1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
        ([0.5, 0.0], [1 / 3, 1 / 3, 0.0, 0.0, 1 / 3, 0.0]),
        ([0.25, 0.0], [7 / 12, 1 / 12, 0.0, 0.0, 1 / 3, 0.0]),
    ],
)
def test_a_target_on_a_vertex_or_face_is_met_exactly_by_the_quadratic_distance(
    target: list[float], expected: list[float]
) -> None:
    result = calibrated(SQUARE, target)
    np.testing.assert_allclose(result.weights, expected, rtol=0.0, atol=1e-12)
    assert result.largest_violation < 1e-12


@pytest.mark.parametrize("target", [[0.0, 0.0], [1.0, 1.0], [0.5, 0.0], [0.25, 0.0]])
def test_a_target_on_the_border_is_refused_by_distances_that_never_reach_it(
    target: list[float],
) -> None:
    for distance in (Entropy(), Logit(0.0, 10.0)):
        with pytest.raises(InfeasibleError, match="on the border") as caught:
            calibrated(SQUARE, target, distance=distance, names=["x", "y"])
        named = {name for name, *_ in caught.value.conflict}
        assert named == {"y"} if target[1] == 0.0 and target[0] > 0.0 else named <= {"x", "y"}
        assert "use the quadratic distance" in caught.value.ways_out


def test_a_target_that_needs_every_ratio_at_a_bound_is_refused_by_the_logit_distance() -> None:
    b = np.arange(4.0)[:, None]
    with pytest.raises(InfeasibleError, match="on the border"):
        calibrated(b, [2.5], distance=Logit(0.0, 2.0))
    exact = calibrated(b, [2.5], distance=Quadratic(0.0, 2.0))
    np.testing.assert_allclose(exact.ratio, [0.0, 0.0, 2.0, 2.0], atol=1e-12)


@pytest.mark.parametrize("inside", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_entropy_solves_targets_a_millionth_inside_the_border(inside: float) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        b = rng.normal(size=(50, 2))
        corner = b[np.argmax(b @ rng.normal(size=2))]
        target = (1.0 - inside) * corner + inside * b.mean(axis=0)
        result = calibrated(b, target, distance=Entropy())
        assert result.largest_violation < 1e-10
        assert result.weights.max() > 1.0 - 60.0 * inside
        assert result.weights.min() > 0.0


@pytest.mark.parametrize("target", [8.9, 8.99, 8.9999, 0.0001, 1e-5])
def test_extreme_tilts_of_one_column_equal_the_root_of_its_mean(target: float) -> None:
    """Ten equally spaced rows, tilted until nearly all weight lies on the last or the first."""
    x = np.arange(10.0)

    def weights(tilt: float) -> FloatArray:
        raw = np.exp(tilt * (x - (9.0 if tilt > 0.0 else 0.0)))
        return np.asarray(raw / raw.sum())

    tilt = brentq(lambda t: float(weights(t) @ x) - target, -30.0, 30.0, xtol=1e-15, rtol=1e-14)
    result = calibrated(x[:, None], [target], distance=Entropy())
    np.testing.assert_allclose(result.weights, weights(tilt), rtol=1e-8)
    assert result.multipliers[0] == pytest.approx(tilt, rel=1e-9)


def test_margins_with_an_empty_cell_in_the_way_name_the_two_levels() -> None:
    """Nobody young is rural: 80% young and 80% rural cannot be had together."""
    codes = np.array([[0, 0]] * 5 + [[1, 0]] * 5 + [[1, 1]] * 5)
    design = Margins(codes, (("young", "old"), ("urban", "rural")))
    for distance in (Quadratic(), Entropy(), Logit(0.0, 10.0)):
        with pytest.raises(InfeasibleError) as caught:
            calibrated(design, [0.8, 0.2, 0.2, 0.8], distance=distance)
        assert {name for name, *_ in caught.value.conflict} == {"young", "urban"}
        sd = design.moments.deviation
        assert caught.value.least_slack == pytest.approx(0.6 / (sd[0] + sd[2]), rel=1e-7)


def test_a_box_as_wide_as_the_gap_makes_any_target_feasible_and_a_ridge_always_does() -> None:
    b = np.random.default_rng(5).uniform(size=(40, 2))
    target, sd = np.array([3.0, 0.5]), b.std(axis=0, ddof=1)
    gap = (3.0 - b[:, 0].max()) / sd[0]
    with pytest.raises(InfeasibleError, match="enrolled clients span"):
        calibrated(b, target, slack=Box(0.99 * gap))
    for distance in (Quadratic(), Entropy(), Logit(0.2, 3.0)):
        wide = calibrated(b, target, distance=distance, slack=Box(3.0 / sd[0]))
        assert wide.largest_violation <= 3.0 / sd[0] + 1e-12
        soft = calibrated(b, target, distance=distance, slack=Ridge(1.0))
        assert soft.weights.sum() == pytest.approx(1.0, abs=1e-12)
        assert 0.0 < soft.violation[0] < (3.0 - b[:, 0].mean()) / sd[0]
