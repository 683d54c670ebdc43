"""What calibrated weights satisfy whatever the data: optimality, invariances, special cases."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fedipw.calibration import (
    Box,
    Dense,
    Distance,
    Entropy,
    InverseLogit,
    Linear,
    Logit,
    Margins,
    Quadratic,
    Ridge,
    Slack,
    Status,
    calibrated,
)
from fedipw.errors import InfeasibleError
from fedipw.numerics import FloatArray, threads
from fedipw.numerics.threads import limit_threads

DISTANCES: list[Distance] = [
    Linear(),
    Quadratic(),
    Quadratic(0.2, 4.0),
    Entropy(),
    Logit(0.2, 4.0),
]
each_distance = pytest.mark.parametrize("distance", DISTANCES, ids=str)
seeds = st.integers(0, 2**32 - 1)


def problem(seed: int, n: int = 40, q: int = 3) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Columns, base weights, and the means of weights with ratios between 0.35 and 2.9."""
    rng = np.random.default_rng(seed)
    b = np.column_stack(
        [rng.normal(size=n), rng.exponential(size=n), rng.random(n) < 0.4, rng.gamma(0.5, size=n)]
    )[:, :q]
    base = rng.uniform(0.5, 3.0, n)
    q0 = base * rng.uniform(0.6, 1.7, n)
    return b, base, q0 @ b / q0.sum()


def inverse_slope(distance: Distance, u: FloatArray) -> FloatArray:
    """F in plain NumPy."""
    if isinstance(distance, Linear):
        out = 1.0 + u
    elif isinstance(distance, Quadratic):
        out = np.clip(1.0 + u, distance.low, distance.high)
    elif isinstance(distance, Entropy):
        out = np.exp(u)
    else:
        assert isinstance(distance, Logit)
        low, high = distance.low, distance.high
        e = np.exp((high - low) / ((1.0 - low) * (high - 1.0)) * u)
        out = (low * (high - 1.0) + high * (1.0 - low) * e) / (high - 1.0 + (1.0 - low) * e)
    return np.asarray(out)


@each_distance
def test_the_cost_is_the_integral_of_the_inverse_of_f(distance: Distance) -> None:
    u, h = np.linspace(-0.6, 2.0, 27), 1e-6
    ratio = inverse_slope(distance, u)
    slope = (distance.cost(ratio + h) - distance.cost(ratio - h)) / (2.0 * h)
    np.testing.assert_allclose(slope, u, atol=1e-8)
    assert distance.cost(np.ones(1))[0] == 0.0
    for value in (0.5, 1.0, 2.5):
        back = inverse_slope(distance, np.array([distance.family.inverse(value)]))
        assert back[0] == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize("end", [0.2, 4.0])
def test_the_cost_of_the_logit_distance_is_finite_at_its_bounds(end: float) -> None:
    near = abs(end - 1e-9)
    cost = Logit(0.2, 4.0).cost(np.array([end, near]))
    assert np.isfinite(cost).all()
    assert cost[0] == pytest.approx(cost[1], rel=1e-6)
    assert Entropy().cost(np.array([0.0]))[0] == 1.0


@each_distance
@settings(max_examples=60)
@given(seed=seeds, size=st.sampled_from([0.4, 1.0, 2.0]))
def test_the_optimality_conditions_hold(distance: Distance, seed: int, size: float) -> None:
    """Constraints met, and ratios are F at the reported multipliers: enough in a convex problem."""
    b, base, target = problem(seed)
    n_total = size * base.sum()
    span = distance.family[1:]
    if not span[0] / 0.35 < size < span[1] / 2.9:
        return
    result = calibrated(b, target, distance=distance, base=base, population_size=n_total)
    assert result.status is Status.CONVERGED
    assert result.weights.sum() == pytest.approx(1.0, abs=1e-12)
    miss = np.abs(result.weights @ (b - target)) / b.std(axis=0, ddof=1)
    assert miss.max() < 1e-10
    np.testing.assert_allclose(result.ratio, n_total * result.weights / base, rtol=1e-12)
    recomputed = inverse_slope(distance, b @ result.multipliers[:-1] + result.multipliers[-1])
    np.testing.assert_allclose(result.ratio, recomputed, rtol=1e-9, atol=1e-11)
    assert span[0] <= result.ratio.min()
    assert result.ratio.max() <= span[1]
    cost = base @ distance.cost(result.ratio) / base.sum()
    assert result.distance == pytest.approx(cost, rel=1e-9, abs=1e-15)


@each_distance
def test_other_weights_that_meet_the_targets_are_farther(distance: Distance) -> None:
    for seed in range(5):
        b, base, target = problem(seed)
        share = base / base.sum()
        low, high = np.clip(distance.family[1:], -5.0, 50.0)
        result = calibrated(b, target, distance=distance, base=base)
        for draw in range(4):
            found = linprog(
                np.random.default_rng(draw).normal(size=len(b)),
                A_eq=np.column_stack([np.ones(len(b)), b]).T,
                b_eq=np.append(1.0, target),
                bounds=[(low * p, high * p) for p in share.tolist()],
            )
            assert found.status == 0
            for step in (1.0, 0.1, 0.01):
                other = (1.0 - step) * result.ratio + step * np.asarray(found.x) / share
                cost = share @ distance.cost(np.clip(other, *distance.family[1:]))
                assert cost > result.distance


@each_distance
@pytest.mark.parametrize("slack", [Box(0.02), Ridge(0.05)], ids=str)
@pytest.mark.parametrize("size", [1.0, 1.3])
def test_soft_calibration_meets_its_own_conditions(
    distance: Distance, slack: Slack, size: float
) -> None:
    """Multipliers in standard units: at the edge of a box or 0; proportional to misses of a ridge.

    With N = size * sum(base) multipliers belong to totals over the base, misses to means.
    """
    for seed in range(8):
        b, base, target = problem(seed)
        n_total, sd = size * base.sum(), b.std(axis=0, ddof=1)
        result = calibrated(
            b, target, distance=distance, base=base, slack=slack, population_size=n_total
        )
        miss = (result.weights @ b - target) / sd
        lam = result.multipliers[:-1] * sd
        recomputed = inverse_slope(distance, b @ result.multipliers[:-1] + result.multipliers[-1])
        np.testing.assert_allclose(result.ratio, recomputed, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(result.violation, np.abs(miss), atol=1e-12)
        if isinstance(slack, Ridge):
            np.testing.assert_allclose(miss, -slack.penalty * size * lam, atol=1e-10)
        else:
            assert np.abs(miss).max() <= slack.width + 1e-11
            active = lam != 0.0
            np.testing.assert_allclose(miss[active], -slack.width * np.sign(lam[active]), atol=1e-9)


def test_a_box_of_no_width_is_exact_calibration_and_a_wide_one_keeps_the_base() -> None:
    b, base, target = problem(3)
    for distance in DISTANCES:
        exact = calibrated(b, target, distance=distance, base=base)
        zero = calibrated(b, target, distance=distance, base=base, slack=Box(0.0))
        np.testing.assert_allclose(zero.weights, exact.weights, rtol=1e-9)
        wide = calibrated(b, target, distance=distance, base=base, slack=Box(10.0))
        np.testing.assert_allclose(wide.weights, base / base.sum(), rtol=1e-12)
        soft = calibrated(b, target, distance=distance, base=base, slack=Ridge(1e9))
        np.testing.assert_allclose(soft.weights, base / base.sum(), rtol=1e-8)
        tight = calibrated(b, target, distance=distance, base=base, slack=Ridge(1e-9))
        np.testing.assert_allclose(tight.weights, exact.weights, rtol=1e-6, atol=1e-9)


@each_distance
@settings(max_examples=25)
@given(seed=seeds)
def test_doubled_rows_equal_doubled_base_weights(distance: Distance, seed: int) -> None:
    b, base, target = problem(seed)
    twice = np.random.default_rng(seed).random(len(b)) < 0.3
    more = calibrated(
        np.vstack([b, b[twice]]), target, distance=distance, base=np.append(base, base[twice])
    )
    once = calibrated(b, target, distance=distance, base=np.where(twice, 2.0, 1.0) * base)
    n = len(b)
    together = more.weights[:n].copy()
    together[twice] += more.weights[n:]
    np.testing.assert_allclose(together, once.weights, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(more.ratio[:n], once.ratio, rtol=1e-9, atol=1e-11)
    assert more.distance == pytest.approx(once.distance, rel=1e-9)


@each_distance
@pytest.mark.parametrize("slack", [None, Box(0.01), Ridge(0.1)], ids=str)
def test_a_target_that_is_the_base_weighted_mean_keeps_the_base_weights(
    distance: Distance, slack: Slack | None
) -> None:
    b, base, _ = problem(1)
    target = base @ b / base.sum()
    result = calibrated(b, target, distance=distance, base=base, slack=slack)
    np.testing.assert_allclose(result.weights, base / base.sum(), rtol=1e-12)
    assert result.distance == pytest.approx(0.0, abs=1e-15)
    equal = calibrated(b, b.mean(axis=0), distance=distance, slack=slack)
    np.testing.assert_allclose(equal.weights, 1.0 / len(b), rtol=1e-12)
    assert equal.effective_sample_size == pytest.approx(len(b), rel=1e-12)


@settings(max_examples=25)
@given(seed=seeds)
def test_tighter_bounds_never_bring_the_weights_nearer(seed: int) -> None:
    b, base, target = problem(seed)
    bounds = [(0.0, np.inf), (0.0, 6.0), (0.1, 4.5), (0.2, 4.0), (0.3, 3.2)]
    rules: list[Distance] = [Linear(), *(Quadratic(low, high) for low, high in bounds)]
    costs = [calibrated(b, target, distance=rule, base=base).distance for rule in rules]
    assert all(later >= earlier * (1.0 - 1e-12) for earlier, later in pairwise(costs))


@settings(max_examples=25)
@given(seed=seeds)
def test_wider_boxes_never_take_the_weights_farther(seed: int) -> None:
    b, base, target = problem(seed)
    costs = [
        calibrated(b, target, base=base, slack=Box(width)).distance
        for width in (0.0, 0.01, 0.05, 0.2)
    ]
    assert all(later <= earlier * (1.0 + 1e-9) + 1e-18 for earlier, later in pairwise(costs))


@each_distance
@settings(max_examples=25)
@given(seed=seeds)
def test_the_order_of_rows_and_columns_does_not_matter(distance: Distance, seed: int) -> None:
    b, base, target = problem(seed)
    rng = np.random.default_rng(seed)
    rows, cols = rng.permutation(len(b)), rng.permutation(b.shape[1])
    first = calibrated(b, target, distance=distance, base=base)
    other = calibrated(b[rows][:, cols], target[cols], distance=distance, base=base[rows])
    np.testing.assert_allclose(other.weights, first.weights[rows], rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(other.achieved, first.achieved[cols], rtol=1e-10, atol=1e-10)


@each_distance
@pytest.mark.parametrize("slack", [None, Box(0.02), Ridge(0.1)], ids=str)
@pytest.mark.parametrize(
    ("factor", "shift", "tolerance"),
    [
        (-3.0, 2.0, 1e-10),
        (1e6, 1e8, 1e-9),
        (1e-9, 0.0, 1e-10),
        (1e150, 0.0, 1e-10),
        (1.0, 1e6, 1e-7),
    ],
)
def test_an_affine_change_of_the_columns_does_not_matter(
    distance: Distance, slack: Slack | None, factor: float, shift: float, tolerance: float
) -> None:
    """Tolerances are 1e-10, and with a shift of s standard deviations about 1000 s times 1e-16.

    Shifting rounds the data at s times 1e-16; weights pass that on some tens of times enlarged.
    """
    for seed in range(4):
        b, base, target = problem(seed)
        first = calibrated(b, target, distance=distance, base=base, slack=slack)
        other = calibrated(
            factor * b + shift, factor * target + shift, distance=distance, base=base, slack=slack
        )
        np.testing.assert_allclose(
            other.weights, first.weights, rtol=tolerance, atol=tolerance / len(b)
        )


@each_distance
def test_a_linear_change_of_the_columns_does_not_matter(distance: Distance) -> None:
    b, base, target = problem(7)
    change = np.array([[1.0, 0.5, 0.0], [2.0, -1.0, 3.0], [0.0, 1.0, 1.0]])
    first = calibrated(b, target, distance=distance, base=base)
    other = calibrated(b @ change, target @ change, distance=distance, base=base)
    np.testing.assert_allclose(other.weights, first.weights, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(change @ other.multipliers[:3], first.multipliers[:3], rtol=1e-8)


@each_distance
@pytest.mark.parametrize("slack", [None, Box(0.02)], ids=str)
def test_a_constraint_given_twice_changes_nothing(distance: Distance, slack: Slack | None) -> None:
    b, base, target = problem(5)
    twice, targets = (
        np.column_stack([b, b[:, 0], 2.0 * b[:, 1] - 1.0]),
        np.append(target, target[0]),
    )
    result = calibrated(
        twice, np.append(targets, 2.0 * target[1] - 1.0), distance=distance, base=base, slack=slack
    )
    first = calibrated(b, target, distance=distance, base=base, slack=slack)
    np.testing.assert_allclose(result.weights, first.weights, rtol=1e-8, atol=1e-12)
    if slack is None:
        assert result.dropped == {"b4": "follows from b1", "b5": "follows from b2"}
        assert (result.multipliers[3:5] == 0.0).all()
        assert result.largest_violation < 1e-10


@each_distance
@pytest.mark.parametrize("slack", [None, Box(0.02), Ridge(0.1)], ids=str)
def test_rows_without_a_base_weight_are_as_if_left_out(
    distance: Distance, slack: Slack | None
) -> None:
    b, base, target = problem(6)
    out = np.arange(0, len(b), 7)
    more = np.insert(b, out, b[out] + 50.0, axis=0)
    zeros = np.insert(base, out, 0.0)
    result = calibrated(more, target, distance=distance, base=zeros, slack=slack)
    first = calibrated(b, target, distance=distance, base=base, slack=slack)
    np.testing.assert_array_equal(result.weights[zeros > 0.0], first.weights)
    np.testing.assert_array_equal(result.weights[zeros == 0.0], 0.0)
    assert result.ratio.shape == zeros.shape


def test_a_single_row_with_a_base_weight_carries_all() -> None:
    b = np.array([[0.0, 1.0], [1.0, 5.0], [3.0, 2.0]])
    for distance in DISTANCES:
        result = calibrated(b, [1.0, 5.0], distance=distance, base=[0.0, 2.0, 0.0])
        np.testing.assert_allclose(result.weights, [0.0, 1.0, 0.0], rtol=1e-14, atol=0.0)
        with pytest.raises(InfeasibleError, match="All 1 enrolled clients have b1 = 1"):
            calibrated(b, [2.0, 5.0], distance=distance, base=[0.0, 2.0, 0.0])


@each_distance
@pytest.mark.parametrize("scale", [1e-6, 0.1, 7.0, 1e9])
def test_the_scale_of_the_base_weights_does_not_matter(distance: Distance, scale: float) -> None:
    b, base, target = problem(8)
    first = calibrated(b, target, distance=distance, base=base)
    other = calibrated(b, target, distance=distance, base=scale * base)
    np.testing.assert_allclose(other.weights, first.weights, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(other.ratio, first.ratio, rtol=1e-10, atol=1e-12)
    assert other.population_size == pytest.approx(scale * first.population_size, rel=1e-14)


@pytest.mark.parametrize("distance", [Linear(), Quadratic(), Entropy()], ids=str)
def test_the_population_size_moves_ratios_alone_for_distances_without_bounds(
    distance: Distance,
) -> None:
    """The entropy tilt is the same for any total; so is the linear one, and this quadratic one."""
    b, base, target = problem(9)
    first = calibrated(b, target, distance=distance, base=base)
    for size in (0.5, 10.0, 1e4):
        other = calibrated(
            b, target, distance=distance, base=base, population_size=size * base.sum()
        )
        np.testing.assert_allclose(other.weights, first.weights, rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(other.ratio, size * first.ratio, rtol=1e-9, atol=1e-9)


def test_one_binary_column_has_its_closed_form() -> None:
    """Post-stratification: each stratum's weight is its share over its number of clients."""
    x = np.repeat([0.0, 1.0], [30, 10])[:, None]
    for distance in DISTANCES:
        result = calibrated(x, [0.4], distance=distance)
        np.testing.assert_allclose(result.weights, np.where(x[:, 0] == 1.0, 0.04, 0.02), rtol=1e-11)


def test_linear_weights_have_their_closed_form() -> None:
    b, base, target = problem(10)
    x = np.column_stack([np.ones(len(b)), b])
    gram = (base[:, None] * x).T @ x
    wanted = base.sum() * np.append(1.0, target)
    expected = base * (1.0 + x @ np.linalg.solve(gram, wanted - base @ x))
    result = calibrated(b, target, distance=Linear(), base=base)
    np.testing.assert_allclose(result.weights * base.sum(), expected, rtol=1e-11)
    assert result.iterations == 1


@each_distance
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("slack", [None, Box(0.02), Ridge(0.1)], ids=str)
def test_margins_equal_the_matrix_of_indicators(
    distance: Distance, with_base: bool, slack: Slack | None
) -> None:
    rng = np.random.default_rng(11)
    codes = np.column_stack([rng.integers(0, k, 300) for k in (2, 3, 5)])
    levels = (("a", "b"), ("c", "d", "e"), ("f", "g", "h", "i", "j"))
    design = Margins(codes, levels)
    matrix = design.dense()
    np.testing.assert_array_equal(matrix.sum(axis=1), 3.0)
    base = rng.uniform(0.5, 2.0, 300) if with_base else None
    q0 = rng.uniform(0.6, 1.7, 300) * (1.0 if base is None else base)
    target = q0 @ matrix / q0.sum()
    one = calibrated(design, target, distance=distance, base=base, slack=slack)
    two = calibrated(Dense(matrix, design.names), target, distance=distance, base=base, slack=slack)
    np.testing.assert_allclose(one.weights, two.weights, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(one.achieved, two.achieved, rtol=1e-10)
    np.testing.assert_allclose(one.deviation, two.deviation, rtol=1e-12)
    assert one.dropped == two.dropped
    if slack is None:
        assert list(one.dropped) == ["b", "e", "j"]


@pytest.mark.parametrize("distance", [*DISTANCES, InverseLogit()], ids=str)
def test_the_weight_a_client_would_have_is_that_of_the_enrolled(
    distance: Distance | InverseLogit,
) -> None:
    b, _, target = problem(15)
    result = calibrated(b, target, distance=distance, population_size=2.0 * len(b))
    np.testing.assert_allclose(result.weights_at(b), result.weights, rtol=1e-10, atol=1e-14)
    between = result.weights_at(b[:1] / 2.0 + b[1:2] / 2.0)
    assert between.shape == (1,)
    assert min(result.weights[:2]) <= between[0] <= max(result.weights[:2])


@each_distance
def test_the_layout_of_the_matrix_does_not_matter(distance: Distance) -> None:
    b, base, target = problem(12)
    first = calibrated(np.ascontiguousarray(b), target, distance=distance, base=base)
    frozen = b.copy()
    frozen.flags.writeable = False
    for other in (np.asfortranarray(b), np.repeat(b, 2, axis=0)[::2], frozen):
        result = calibrated(other, target, distance=distance, base=base)
        np.testing.assert_allclose(result.weights, first.weights, rtol=1e-13, atol=1e-16)
    assert b.flags.writeable


def test_the_inputs_are_left_as_they_were() -> None:
    b, base, target = problem(13)
    before = b.copy(), base.copy(), target.copy()
    calibrated(b, target, base=base, distance=Entropy())
    for now, then in zip((b, base, target), before, strict=True):
        np.testing.assert_array_equal(now, then)


@each_distance
@pytest.mark.parametrize("margins", [False, True])
def test_the_number_of_threads_does_not_change_a_bit(distance: Distance, margins: bool) -> None:
    rng = np.random.default_rng(14)
    n = 30_000
    if margins:
        design: Margins | Dense = Margins(
            rng.integers(0, 3, (n, 2)), (("a", "b", "c"), ("d", "e", "f"))
        )
        target = np.array([0.3, 0.3, 0.4, 0.25, 0.35, 0.4])
    else:
        design = Dense(rng.normal(size=(n, 4)), ("a", "b", "c", "d"))
        target = np.array([0.1, 0.2, -0.1, 0.0])
    before = threads._Limit.threads
    try:
        found = []
        for count in (1, 2, 3, 5):
            limit_threads(count)
            found.append(calibrated(design, target, distance=distance))
    finally:
        limit_threads(before)
    for other in found[1:]:
        assert other.weights.tobytes() == found[0].weights.tobytes()
        assert other.multipliers.tobytes() == found[0].multipliers.tobytes()
