"""Input that cannot be used, constraints that say nothing new, and results at the edges."""

from __future__ import annotations

import numpy as np
import pytest

from fedipw.calibration import (
    Box,
    Calibration,
    Dense,
    Distance,
    Entropy,
    InverseLogit,
    Linear,
    Logit,
    Margins,
    Quadratic,
    Ridge,
    Status,
    calibrated,
)
from fedipw.errors import FedIPWError, InfeasibleError, InputError
from fedipw.numerics import FloatArray

B = np.random.default_rng(0).normal(size=(30, 2))
TARGET = [0.1, -0.1]
DISTANCES: list[Distance] = [Linear(), Quadratic(), Quadratic(0.1, 5.0), Entropy(), Logit(0.1, 5.0)]
each_distance = pytest.mark.parametrize("distance", DISTANCES, ids=str)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 7, 29])
def test_missing_and_infinite_values_are_named_with_their_column(value: float, row: int) -> None:
    b = B.copy()
    b[row, 1] = value
    with pytest.raises(InputError, match=r"column height has missing.*30 enrolled"):
        calibrated(b, TARGET, names=["age", "height"])


def test_values_too_large_to_square_are_refused_and_large_ones_solved() -> None:
    with pytest.raises(InputError, match="too large"):
        calibrated(1e200 * B, [1e199, 1e199])
    result = calibrated(1e150 * B, [1e149, -1e149], distance=Entropy())
    plain = calibrated(B, TARGET, distance=Entropy())
    np.testing.assert_allclose(result.weights, plain.weights, rtol=1e-10)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_missing_targets_are_named(value: float) -> None:
    with pytest.raises(InputError, match="target of height is missing"):
        calibrated(B, [0.0, value], names=["age", "height"])


@pytest.mark.parametrize("target", [[0.1], [0.1, 0.2, 0.3], [[0.1, 0.2]], 0.1])
def test_targets_of_another_shape_are_refused(target: object) -> None:
    with pytest.raises(InputError, match=r"Targets have shape .*expected \(2,\)"):
        calibrated(B, target)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(30,), (2, 3, 5), ()])
def test_balance_columns_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected \\(rows, columns\\)"):
        calibrated(np.zeros(shape), TARGET)


def test_no_columns_and_too_few_rows_are_refused() -> None:
    with pytest.raises(InputError, match="at least one target"):
        calibrated(np.empty((5, 0)), [])
    with pytest.raises(InputError, match="1 enrolled clients are fewer than 2 constraints"):
        calibrated(B[:1], TARGET)
    with pytest.raises(InputError, match="0 enrolled clients are fewer than 2 constraints"):
        calibrated(B[:0], TARGET)


def test_names_are_one_per_column_and_unique() -> None:
    with pytest.raises(InputError, match=r"named once each; age is not"):
        calibrated(B, TARGET, names=["age", "age"])
    with pytest.raises(InputError, match="names has 1 rows, expected 2"):
        calibrated(B, TARGET, names=["age"])
    assert calibrated(B, TARGET).names == ("b1", "b2")
    with pytest.raises(InputError, match=r"shape \(30, 2\), expected \(rows, 1\)"):
        Dense(B, ("age",))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (np.ones(29), r"Base weights have shape \(29,\), expected \(30,\)"),
        (np.ones((30, 1)), r"Base weights have shape \(30, 1\)"),
        (np.append(np.ones(29), -1.0), "0 are missing or infinite, 1 negative"),
        (np.append(np.ones(29), np.nan), "1 are missing or infinite, 0 negative"),
        (np.append(np.ones(29), np.inf), "1 are missing or infinite, 0 negative"),
        (np.zeros(30), "The base weights sum to 0"),
    ],
)
def test_base_weights_that_cannot_be_used_are_refused(base: FloatArray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        calibrated(B, TARGET, base=base)


@pytest.mark.parametrize("size", [0.0, -3.0, np.nan, np.inf])
def test_population_sizes_must_be_positive_and_finite(size: float) -> None:
    for distance in (Quadratic(), InverseLogit()):
        with pytest.raises(InputError, match="population_size must be a finite number above 0"):
            calibrated(B, TARGET, distance=distance, population_size=size)


@pytest.mark.parametrize(
    ("low", "high"), [(-0.1, 2.0), (2.0, 2.0), (3.0, 2.0), (np.nan, 2.0), (0.0, np.nan)]
)
def test_bounds_of_the_quadratic_distance_are_checked(low: float, high: float) -> None:
    with pytest.raises(InputError, match=r"0 <= LOW < HIGH, not .*use the linear distance"):
        Quadratic(low, high)


@pytest.mark.parametrize(
    ("low", "high"),
    [(-0.1, 2.0), (1.0, 2.0), (0.5, 1.0), (0.5, 0.9), (0.0, np.inf), (np.nan, 2.0), (0.0, np.nan)],
)
def test_bounds_of_the_logit_distance_are_checked(low: float, high: float) -> None:
    with pytest.raises(InputError, match="0 <= LOW < 1 < HIGH, both finite"):
        Logit(low, high)


@pytest.mark.parametrize("width", [-1e-9, np.nan, np.inf])
def test_the_width_of_a_box_is_checked(width: float) -> None:
    with pytest.raises(InputError, match="A slack must be 0 or more"):
        Box(width)


@pytest.mark.parametrize("penalty", [0.0, -1.0, np.nan, np.inf])
def test_the_penalty_of_a_ridge_is_checked(penalty: float) -> None:
    with pytest.raises(InputError, match="penalty must be a finite number above 0"):
        Ridge(penalty)


def test_codes_that_name_no_level_and_wrong_shapes_are_refused() -> None:
    for codes in (np.array([[0], [2]]), np.array([[0], [-1]])):
        with pytest.raises(InputError, match="A code names no level"):
            Margins(codes, (("a", "b"),))
    with pytest.raises(InputError, match=r"Codes have shape \(2, 1\), expected \(rows, 2\)"):
        Margins(np.array([[0], [1]]), (("a", "b"), ("c",)))
    with pytest.raises(InputError, match=r"Codes have shape \(2,\)"):
        Margins(np.array([0, 1]), (("a", "b"),))


@pytest.mark.parametrize(
    ("distance", "size", "total"),
    [
        (Quadratic(0.5, 2.0), 75.0, "2.5"),
        (Quadratic(0.5, 2.0), 10.0, "0.333333"),
        (Logit(0.5, 2.0), 60.0, "2"),
        (Logit(0.5, 2.0), 15.0, "0.5"),
        (Quadratic(1.5), 30.0, "1"),
    ],
)
def test_bounds_that_cannot_hold_the_total_are_refused(
    distance: Distance, size: float, total: str
) -> None:
    with pytest.raises(
        InfeasibleError, match=rf"sum to {size:g}, {total} times the base"
    ) as caught:
        calibrated(B, B.mean(axis=0), distance=distance, population_size=size)
    assert "widen the bounds" in caught.value.ways_out


def test_a_total_at_the_end_of_closed_bounds_leaves_every_ratio_there() -> None:
    for size, ratio in ((60.0, 2.0), (15.0, 0.5)):
        result = calibrated(B, B.mean(axis=0), distance=Quadratic(0.5, 2.0), population_size=size)
        np.testing.assert_array_equal(result.ratio, ratio)


@each_distance
def test_a_constant_column_with_its_value_as_target_is_dropped_and_named(
    distance: Distance,
) -> None:
    b = np.column_stack([B[:, 0], np.full(30, 7.0), B[:, 1]])
    result = calibrated(b, [0.1, 7.0, -0.1], distance=distance, names=["a", "seven", "b"])
    assert result.dropped == {"seven": "constant, 7, for all enrolled clients"}
    plain = calibrated(B, TARGET, distance=distance)
    np.testing.assert_allclose(result.weights, plain.weights, rtol=1e-12)
    assert result.multipliers[1] == 0.0
    assert result.achieved[1] == 7.0
    assert result.violation[1] == 0.0


@each_distance
@pytest.mark.parametrize("slack", [None, Box(0.1), Ridge(0.1)], ids=str)
def test_a_constant_column_with_another_target_is_refused(
    distance: Distance, slack: Box | Ridge | None
) -> None:
    b = np.column_stack([B, np.full(30, 7.0)])
    with pytest.raises(InfeasibleError, match=r"All 30 enrolled clients have c = 7.*mean of 7\.1"):
        calibrated(b, [*TARGET, 7.1], distance=distance, slack=slack, names=["a", "b", "c"])


def test_a_level_nobody_has_is_refused_unless_its_target_is_zero() -> None:
    design = Margins(np.array([[0], [1], [0], [1], [1]]), (("city", "town", "farm"),))
    with pytest.raises(InfeasibleError, match="All 5 enrolled clients have farm = 0") as caught:
        calibrated(design, [0.5, 0.3, 0.2])
    assert caught.value.conflict == (("farm", 0.2, 0.0, 0.0),)
    assert any("merge the level" in way for way in caught.value.ways_out)
    result = calibrated(design, [0.5, 0.5, 0.0])
    assert set(result.dropped) == {"farm", "town"}
    np.testing.assert_allclose(result.weights, [1 / 4, 1 / 6, 1 / 4, 1 / 6, 1 / 6], rtol=1e-12)


@each_distance
def test_a_column_that_follows_from_others_is_dropped_and_named(distance: Distance) -> None:
    b = np.column_stack([B, 2.0 * B[:, 0] - 3.0 * B[:, 1] + 5.0])
    result = calibrated(b, [0.1, -0.1, 5.5], distance=distance, names=["x", "y", "sum"])
    assert result.dropped == {"sum": "follows from x, y"}
    assert result.largest_violation < 1e-12
    plain = calibrated(B, TARGET, distance=distance)
    np.testing.assert_allclose(result.weights, plain.weights, rtol=1e-10)


@each_distance
def test_a_column_that_follows_from_others_with_another_target_is_refused(
    distance: Distance,
) -> None:
    b = np.column_stack([B, B[:, 0] + B[:, 1]])
    with pytest.raises(InfeasibleError, match=r"from x, y.*make it 0\.3, not 0\.4") as caught:
        calibrated(b, [0.1, 0.2, 0.4], distance=distance, names=["x", "y", "sum"])
    assert [name for name, *_ in caught.value.conflict] == ["x", "y", "sum"]
    assert "allow a tolerance with a slack" in caught.value.ways_out


def test_shares_that_do_not_sum_to_one_are_refused_and_rounded_ones_noted() -> None:
    rng = np.random.default_rng(2)
    design = Margins(rng.integers(0, 3, (60, 1)), (("a", "b", "c"),))
    with pytest.raises(InfeasibleError, match=r"c follows from a, b.*make it 0\.4, not 0\.5"):
        calibrated(design, [0.3, 0.3, 0.5])
    result = calibrated(design, [0.3333333, 0.3333333, 0.3333333])
    assert result.dropped["c"] == "follows from a, b; its target is off by -1e-07"
    assert result.violation[2] == pytest.approx(1e-7 / result.deviation[2], rel=1e-4)


def test_a_column_that_follows_from_many_names_the_first_eight() -> None:
    rng = np.random.default_rng(3)
    design = Margins(rng.integers(0, 12, (400, 1)), (tuple("abcdefghijkl"),))
    result = calibrated(design, design.moments.mean)
    assert result.dropped == {"l": "follows from a, b, c, d, e, f, g, h and 3 more"}


def test_dependence_is_found_in_many_rows_too() -> None:
    """Above 40,000 rows a subsample is looked at first; a dependence it shows is then checked."""
    rng = np.random.default_rng(4)
    b = rng.normal(size=(50_000, 2))
    b = np.column_stack([b, b[:, 0] - b[:, 1]])
    result = calibrated(b, [0.1, 0.0, 0.1])
    assert result.dropped == {"b3": "follows from b1, b2"}
    b[3, 2] += 40.0  # one row that no subsample of every second row holds
    result = calibrated(b, [0.1, 0.0, 0.1005])
    assert result.dropped == {}
    assert result.weights @ b == pytest.approx([0.1, 0.0, 0.1005], abs=1e-10)


def test_levels_that_few_clients_must_carry_are_called_rare() -> None:
    n = 200
    b = np.zeros((n, 5))
    b[:8, 0], b[8:18, 1], b[:, 2] = 1.0, 1.0, np.linspace(0.0, 1.0, n)
    b[50:150, 3], b[190:195, 4] = 1.0, 1.0
    names = ["few", "enough", "line", "many", "harmless"]
    targets = [0.09, 0.12, 0.5, 0.4, 0.04]  # of shares 0.04, 0.05, ., 0.5, 0.025
    result = calibrated(b, targets, names=names)
    assert result.rare == pytest.approx({"few": 0.04})
    assert calibrated(b, [0.08, *targets[1:]], names=names).rare == {}
    base = np.where(b[:, 0] == 1.0, 2.0, 1.0)  # they stand for twice as many already
    assert calibrated(b, targets, names=names, base=base).rare == {}
    codes = np.repeat([0, 1], [4, 196])[:, None]
    assert calibrated(Margins(codes, (("few", "many"),)), [0.1, 0.9]).rare == {"few": 0.02}
    many = np.repeat([0, 1], [40, 1960])[:, None]  # 2% of them, and forty clients
    assert calibrated(Margins(many, (("few", "many"),)), [0.1, 0.9]).rare == {}


@pytest.mark.parametrize(
    ("n", "target", "least"), [(100, 0.95, 10.0), (1000, 0.9999, 100.0), (12, 0.99, 6.0)]
)
def test_targets_that_few_clients_meet_are_warned_of(n: int, target: float, least: float) -> None:
    """Ones at one client in n: q of it is the target, so the effective number is known."""
    b = np.zeros((n, 1))
    b[0] = 1.0
    found = calibrated(b, [target], distance=Entropy(), names=["one"])
    left = 1.0 / (target**2 + (1.0 - target) ** 2 / (n - 1))
    assert found.effective_sample_size == pytest.approx(left, rel=1e-9)
    (text,) = found.warnings()
    assert text == (
        f"Warning: the targets are nearly infeasible. Calibration leaves {left:.1f} effective "
        f"clients of {n}.0, fewer than {least:.1f}, and {target:.1%} of the weight to one of "
        "them; one pulls most."
    )
    assert calibrated(b, [1.5 / n], distance=Entropy(), names=["one"]).warnings() == ()


def test_one_client_alone() -> None:
    for distance in DISTANCES:
        result = calibrated(np.array([[3.0]]), [3.0], distance=distance)
        np.testing.assert_array_equal(result.weights, [1.0])
        assert result.status is Status.CONVERGED
        with pytest.raises(InfeasibleError, match="All 1 enrolled clients have b1 = 3"):
            calibrated(np.array([[3.0]]), [4.0], distance=distance)


def test_two_clients_and_one_column_have_one_answer() -> None:
    for distance in (Linear(), Quadratic(), Entropy(), Logit(0.0, 3.0)):
        result = calibrated(np.array([[1.0], [5.0]]), [2.0], distance=distance)
        np.testing.assert_allclose(result.weights, [0.75, 0.25], rtol=1e-11)


def test_as_many_constraints_as_clients_have_one_answer_or_none() -> None:
    rng = np.random.default_rng(5)
    b = rng.normal(size=(3, 2))
    wanted = np.array([0.2, 0.3, 0.5])
    for distance in (Linear(), Quadratic(), Entropy(), Logit(0.0, 3.0)):
        result = calibrated(b, wanted @ b, distance=distance)
        np.testing.assert_allclose(result.weights, wanted, rtol=1e-9)
    square = rng.normal(size=(3, 3))
    result = calibrated(square, wanted @ square, distance=Entropy())
    assert list(result.dropped) == ["b3"]
    np.testing.assert_allclose(result.weights, wanted, rtol=1e-9)


def test_integers_and_lists_are_taken_as_numbers() -> None:
    rows = [[20], [30], [60]]
    one = calibrated(np.array(rows), [45], distance=Entropy(), base=[1, 1, 1])
    two = calibrated(np.array(rows, dtype=float), np.array([45.0]), distance=Entropy())
    np.testing.assert_allclose(one.weights, two.weights, rtol=1e-12)


def test_the_result_describes_itself() -> None:
    result: Calibration = calibrated(
        B, TARGET, distance=Linear(), population_size=60.0, names=["x", "y"]
    )
    assert result.names == ("x", "y")
    assert result.population_size == 60.0
    assert result.slack is None
    assert result.rare == {}
    assert result.status.value == "converged"
    np.testing.assert_array_equal(result.target, TARGET)
    np.testing.assert_allclose(result.deviation, B.std(axis=0, ddof=1), rtol=1e-12)
    np.testing.assert_allclose(result.achieved, result.weights @ B, rtol=1e-12)
    assert result.largest_violation == result.violation.max()
    assert result.negative == int((result.weights < 0.0).sum())
    ess = result.weights.sum() ** 2 / (result.weights**2).sum()
    assert result.effective_sample_size == pytest.approx(ess)
    assert calibrated(B, TARGET, slack=Box(0.1)).slack == Box(0.1)


def test_negative_weights_of_the_linear_distance_are_counted() -> None:
    b = np.arange(10.0)[:, None]
    result = calibrated(b, [8.0], distance=Linear())
    assert result.negative == int((result.weights < 0.0).sum()) > 0
    assert calibrated(b, [8.0]).negative == 0


def test_every_refusal_is_an_error_of_this_package_with_ways_out() -> None:
    with pytest.raises(FedIPWError) as caught:
        calibrated(B, [10.0, 0.0], names=["x", "y"])
    error = caught.value
    assert isinstance(error, InfeasibleError)
    assert isinstance(error, ValueError)
    assert error.conflict[0][:2] == ("x", 10.0)
    assert set(error.nearest) == {"x", "y"}
    text = str(error)
    assert text.startswith("No weights on the 30 enrolled clients meet the targets. In conflict: x")
    assert f"(each within {error.least_slack:.4g} standard deviations of its target)" in text
    assert f"allow a tolerance with a slack above {error.least_slack:.4g}" in text
