"""Targets that cannot be met: weights all the same, a note of what is left, or an error."""

from dataclasses import replace

import numpy as np
import pytest

from fedipw.calibration import Entropy
from fedipw.errors import InfeasibleError, InputError
from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.participation import Source
from fedipw.weighting.balance import Balance
from fedipw.weighting.methods import method_named
from fedipw.weighting.pipeline import OfEnrolled, Weighing
from fedipw.weighting.weigher import EnrollmentState

RIDGES = (1e-2, 0.1, 1.0)  # of (C8), in turn, until ten clients count, as documented
METHODS = ("calibrated-entropy-hajek", "calibrated-quadratic", "efficient-hajek", "augmented")


def enrolled_state(
    columns: dict[str, FloatArray], mean: list[float], enrolled: BoolArray | None = None
) -> EnrollmentState:
    matrix = np.column_stack(list(columns.values()))
    inside = np.ones(len(matrix), dtype=bool) if enrolled is None else enrolled
    balance = Balance(
        names=tuple(columns), matrix=matrix, enrolled=inside, mean=np.array(mean),
        population_size=500.0,
    )  # fmt: skip
    return EnrollmentState(
        unit_ids=np.arange(len(matrix)), sample_counts=np.ones(len(matrix), dtype=np.int64),
        enrolled=inside, prob=np.full(len(matrix), np.nan), population_size=500.0,
        balances=dict.fromkeys(("main", "rich", "wide"), balance),
    )  # fmt: skip


def q_of(weighing: Weighing) -> FloatArray:
    q = weighing.enrollment_weights
    assert q is not None
    return q


@pytest.fixture
def columns() -> dict[str, FloatArray]:
    rng = np.random.default_rng(3)
    return {"age": rng.normal(40.0, 10.0, 30), "income": rng.exponential(2.0, 30)}


@pytest.mark.parametrize("name", METHODS)
def test_targets_out_of_reach_are_approached_and_the_rest_is_named(
    name: str, columns: dict[str, FloatArray]
) -> None:
    """The weights minimise (C8): its gradient is zero, worked out here by hand.

    With entropy g log g - g + 1 that is log q_i = c - sum_j (a_j - mu_j) b_ij / (ridge sd_j^2),
    a the means that are reached.
    """
    mean = [float(columns["age"].max()) + 1.0, 2.5]
    weighing = method_named(name).at(enrolled_state(columns, mean))
    q, b = q_of(weighing), np.column_stack(list(columns.values()))
    assert (q > 0.0).all()
    assert q.sum() == pytest.approx(1.0, rel=1e-12)
    reached, sd = q @ b, b.std(axis=0, ddof=1)
    assert b[:, 0].mean() < reached[0] < mean[0]
    rests = {
        ridge: np.log(q) + b @ ((reached - np.array(mean)) / (ridge * sd**2)) for ridge in RIDGES
    }
    ridge = min(RIDGES, key=lambda r: float(np.ptp(rests[r])))
    # the solver stops at misses of 1e-12, and terms of log q are 100 times a miss: 1e-8 and more
    np.testing.assert_allclose(rests[ridge], rests[ridge].mean(), rtol=0.0, atol=1e-7)
    assert ridge > RIDGES[0]  # with the smallest one client would stand for everybody
    assert 1.0 / (q**2).sum() >= 10.0 or ridge == RIDGES[-1]
    left = np.abs((reached - np.array(mean)) / sd).max()
    assert weighing.note == (
        "targets cannot be met: soft calibration by entropy, largest difference left "
        f"{left:.2g} standard deviations"
    )


@pytest.mark.parametrize("name", METHODS)
def test_targets_within_reach_are_met_and_nothing_is_noted(
    name: str, columns: dict[str, FloatArray]
) -> None:
    mean = [44.0, 2.5]
    weighing = method_named(name).at(enrolled_state(columns, mean))
    assert weighing.note == ""
    b = np.column_stack(list(columns.values()))
    np.testing.assert_allclose(q_of(weighing) @ b, mean, rtol=1e-7)


def test_strictly_it_is_an_error(columns: dict[str, FloatArray]) -> None:
    state = enrolled_state(columns, [float(columns["age"].max()) + 1.0, 2.5])
    method = method_named("calibrated-entropy-hajek")
    strict = replace(method, calibration=OfEnrolled(Entropy(), strict=True))
    with pytest.raises(InfeasibleError, match="In conflict: age = "):
        strict.at(state)
    assert method.at(state).note


@pytest.mark.parametrize("name", METHODS)
def test_a_column_that_does_not_vary_among_the_enrolled_is_named(
    name: str, columns: dict[str, FloatArray]
) -> None:
    """Nobody outside a region enrolled: the other covariate is still balanced, softly."""
    enrolled = np.arange(30) < 24
    columns = {"age": columns["age"], "north": np.where(enrolled, 1.0, 0.0)}
    mean = [float(columns["age"][enrolled].mean()) + 5.0, 0.8]
    weighing = method_named(name).at(enrolled_state(columns, mean, enrolled))
    assert weighing.note.startswith(
        "targets cannot be met: soft calibration by entropy without north, which does not vary "
        "among the enrolled, largest difference left "
    )
    q, age = q_of(weighing)[enrolled], columns["age"][enrolled]
    assert q.sum() == pytest.approx(1.0, rel=1e-12)
    # (C8) leaves about ridge times the shift in standard deviations
    assert abs(q @ age - mean[0]) < 0.02 * age.std()
    assert abs(age.mean() - mean[0]) > 0.4 * age.std()


def test_an_enrolled_table_without_variation_counts_all_alike() -> None:
    state = enrolled_state({"north": np.ones(8), "old": np.zeros(8)}, [0.4, 0.1])
    for name in METHODS:
        weighing = method_named(name).at(state)
        np.testing.assert_allclose(q_of(weighing), 1.0 / 8.0, rtol=1e-15)
        assert weighing.note == (
            "targets cannot be met: no covariate varies among the enrolled, who count alike"
        )
        replies = state.replies(1, np.array([1, 4]), np.array([0.5, 0.5]), Source.NONE)
        assert weighing.weighed(replies).weights.sum() == pytest.approx(
            1.0 if weighing.self_normalised else 0.5, rel=1e-12
        )


def test_methods_that_need_means_say_so(columns: dict[str, FloatArray]) -> None:
    state = replace(enrolled_state(columns, [44.0, 2.5]), balances={})
    for name in (*METHODS, "calibrated-online", "augmented-online"):
        with pytest.raises(InputError, match=f"{name} needs population means of the covariates"):
            method_named(name).at(state)
