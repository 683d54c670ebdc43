"""Calibrated weights equal those of R and of a general convex solver (tests/reference/README.md).

R's packages stop at 1e-13, and agree to 11 digits weight by weight. An interior-point solver's
gap of 1e-12 leaves its weights right to about 1e-9 of the largest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedipw.calibration import (
    BalanceDesign,
    Box,
    Calibration,
    Distance,
    Entropy,
    Linear,
    Logit,
    Margins,
    Quadratic,
    Ridge,
    Slack,
    calibrated,
)
from fedipw.errors import InfeasibleError
from fedipw.numerics import FloatArray

FOLDER = Path(__file__).parents[1] / "reference"
SMALL = pl.read_csv(FOLDER / "small20_solutions_R.csv", null_values="NA")
SOLVER = pl.read_csv(FOLDER / "small20_solutions_cvxpy.csv")
SOLVER_META: dict[str, Any] = json.loads((FOLDER / "small20_cvxpy.json").read_text())
SMALL_META: dict[str, Any] = json.loads((FOLDER / "small20_R.json").read_text())
X = SMALL.select("x1", "x2", "x3").to_numpy()
D = SMALL["d"].to_numpy()
MU, MU_BAD = np.array(SOLVER_META["mu"]), np.array(SOLVER_META["mu_bad"])

SCHOOLS = pl.read_csv(FOLDER / "api_apiclus1_weights.csv")
MARGINS = pl.read_csv(FOLDER / "api_apiclus1_rake_margins.csv")
API: dict[str, dict[str, Any]] = json.loads((FOLDER / "api_calibration.json").read_text())
N = 6194
STYPE = np.column_stack([SCHOOLS["stype"].to_numpy() == level for level in "EHM"]).astype(float)
STYPE_SHARES = np.array([4421, 755, 1018]) / N


def test_the_rows_and_targets_are_those_the_references_solved() -> None:
    table = pl.read_csv(FOLDER / "small20.csv")
    for name in ("id", "x1", "x2", "x3", "d"):
        np.testing.assert_array_equal(table[name].to_numpy(), SMALL[name].to_numpy())
    assert SMALL_META["target_means"] == MU.tolist()
    assert pytest.approx(SMALL_META["total"], rel=1e-14) == D.sum()
    assert SCHOOLS["stype"].to_list() == MARGINS["stype"].to_list()
    assert pytest.approx(6194.00032424927, rel=1e-12) == SCHOOLS["pw"].sum()


@pytest.mark.parametrize(
    ("column", "distance"),
    [
        ("survey_linear", Linear()),
        ("survey_linear_nonneg", Quadratic()),
        ("survey_raking", Entropy()),
        ("survey_logit_0.05_4", Logit(0.05, 4.0)),
        ("sampling_linear", Linear()),
        ("quadprog_chi2_nonneg", Quadratic()),
    ],
)
def test_weights_with_base_weights_equal_rs(column: str, distance: Distance) -> None:
    result = calibrated(X, MU, distance=distance, base=D)
    expected = SMALL[column].to_numpy()
    np.testing.assert_allclose(result.weights * D.sum(), expected, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(result.ratio, expected / D, rtol=1e-11, atol=1e-14)
    summary = SMALL_META["summary"][column]
    assert result.effective_sample_size == pytest.approx(summary["ess"], rel=1e-11)
    assert result.negative == (SMALL[column] < -1e-14).sum()
    half_square = 0.5 * summary["chi2"] / D.sum()
    if not isinstance(distance, Entropy | Logit):
        assert result.distance == pytest.approx(half_square, rel=1e-12)
    if isinstance(distance, Entropy):
        assert result.distance == pytest.approx(summary["kl"] / D.sum(), rel=1e-11)


@pytest.mark.parametrize(
    ("column", "distance"),
    [("sampling_raking", Entropy()), ("sampling_logit_0.05_4", Logit(0.05, 4.0))],
)
def test_weights_equal_those_of_the_sampling_package_within_its_own_misses(
    column: str, distance: Distance
) -> None:
    """That package stops at totals off by 3e-5, R's survey at 5e-12."""
    assert SMALL_META["summary"][column]["max_abs_constraint"] > 1e-5
    result = calibrated(X, MU, distance=distance, base=D)
    np.testing.assert_allclose(result.weights * D.sum(), SMALL[column].to_numpy(), rtol=1e-5)
    assert result.largest_violation < 1e-12


@pytest.mark.parametrize(
    ("column", "distance"),
    [("quadprog_uniform_nonneg_q", Quadratic()), ("quadprog_uniform_unrestricted_q", Linear())],
)
def test_weights_without_base_weights_equal_quadprogs(column: str, distance: Distance) -> None:
    result = calibrated(X, MU, distance=distance)
    np.testing.assert_allclose(result.weights, SMALL[column].to_numpy(), rtol=1e-11, atol=1e-15)


def test_rows_at_zero_are_exactly_zero() -> None:
    result = calibrated(X, MU)
    zeros = SMALL_META["summary"]["quadprog_uniform_nonneg_q"]["n_zero"]
    assert (result.weights == 0.0).sum() == zeros == 5


@pytest.mark.parametrize(
    ("column", "distance", "slack", "target"),
    [
        ("uniform_nonneg_q", Quadratic(), None, MU),
        ("uniform_bounded_q_max_0.12", Quadratic(0.0, 0.12 * 20), None, MU),
        ("entropy_uniform_q", Entropy(), None, MU),
        ("sbw_tol0.05_q", Quadratic(), Box(0.05), MU),
        ("sbw_tol0.1_q", Quadratic(), Box(0.1), MU),
        ("soft_quad_lam0.01_infeasible_mu_q", Quadratic(), Ridge(0.01), MU_BAD),
        ("soft_quad_lam0.1_infeasible_mu_q", Quadratic(), Ridge(0.1), MU_BAD),
        ("soft_quad_lam1.0_infeasible_mu_q", Quadratic(), Ridge(1.0), MU_BAD),
    ],
)
def test_weights_equal_the_general_solvers(
    column: str, distance: Distance, slack: Slack | None, target: FloatArray
) -> None:
    assert SOLVER_META[column]["status"] == "optimal"
    result = calibrated(X, target, distance=distance, slack=slack)
    expected = SOLVER[column].to_numpy()
    np.testing.assert_allclose(result.weights, expected, rtol=0.0, atol=1e-9 * expected.max())


@pytest.mark.parametrize(
    ("column", "distance"),
    [("chi2_nonneg_w", Quadratic()), ("chi2_bounded_g_0.05_3_w", Quadratic(0.05, 3.0))],
)
def test_weights_with_base_weights_equal_the_general_solvers(
    column: str, distance: Quadratic
) -> None:
    assert SOLVER_META[column]["status"] == "optimal"
    result = calibrated(X, MU, distance=distance, base=D)
    expected = SOLVER[column].to_numpy()
    np.testing.assert_allclose(
        result.weights * D.sum(), expected, rtol=0.0, atol=1e-9 * expected.max()
    )
    assert result.ratio.min() >= distance.low
    assert result.ratio.max() <= distance.high


@pytest.mark.parametrize("penalty", [0.01, 0.1, 1.0])
def test_the_soft_objective_is_the_general_solvers(penalty: float) -> None:
    result = calibrated(X, MU_BAD, slack=Ridge(penalty))
    miss = (result.weights @ X - MU_BAD) / np.array(SOLVER_META["sd_ddof1"])
    mine = 2.0 * result.distance + (miss**2).sum() / penalty
    theirs = SOLVER_META[f"soft_quad_lam{penalty}_infeasible_mu_q"]["objective"]
    assert mine == pytest.approx(theirs, rel=1e-11)


def test_a_small_ridge_comes_near_the_nearest_mean() -> None:
    nearest = SOLVER["closest_feasible_to_infeasible_mu_q"].to_numpy() @ X
    gaps = [
        np.abs(calibrated(X, MU_BAD, slack=Ridge(penalty)).weights @ X - nearest).max()
        for penalty in (1e-2, 1e-3, 1e-4)
    ]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-3


def test_bounds_that_r_answers_with_na_are_refused_with_a_proof() -> None:
    assert SMALL["survey_linear_0.2_2.5"].null_count() == 20
    assert SOLVER_META["chi2_bounded_g_0.2_2.5_w"]["status"] == "infeasible"
    assert SOLVER_META["feasible_g_0.2_2.5"] is False
    for distance in (Quadratic(0.2, 2.5), Logit(0.2, 2.5)):
        with pytest.raises(InfeasibleError, match=r"ratios between 0\.2 and 2\.5") as caught:
            calibrated(X, MU, distance=distance, base=D)
        assert 0.0 < caught.value.least_slack < 1.0


def test_the_mean_the_linear_programme_refuses_is_refused() -> None:
    assert SOLVER_META["feasibility"] == {"mu": True, "mu_bad": False}
    for distance in (Quadratic(), Entropy(), Logit(0.0, 50.0)):
        with pytest.raises(InfeasibleError, match="enrolled clients span"):
            calibrated(X, MU_BAD, distance=distance)


METHODS: dict[str, Distance] = {
    "linear": Linear(),
    "linear_bounded_0.6_1.6": Quadratic(0.6, 1.6),
    "raking": Entropy(),
    "logit_0.5_2": Logit(0.5, 2.0),
}


def schools(variables: str, distance: Distance) -> Calibration:
    columns, target, names = STYPE, STYPE_SHARES, ["E", "H", "M"]
    if variables == "stype_api99":
        columns = np.column_stack([STYPE, SCHOOLS["api99"].to_numpy()])
        target, names = np.append(STYPE_SHARES, 3914069 / N), [*names, "api99"]
    base = SCHOOLS["pw"].to_numpy()
    return calibrated(columns, target, distance=distance, base=base, population_size=N, names=names)


@pytest.mark.parametrize("variables", ["stype", "stype_api99"])
@pytest.mark.parametrize("method", METHODS)
def test_the_schools_weights_and_summaries_equal_rs(variables: str, method: str) -> None:
    name = f"apiclus1__{variables}__{method}"
    result, summary = schools(variables, METHODS[method]), API[name]
    weights = N * result.weights
    np.testing.assert_allclose(weights, SCHOOLS[name].to_numpy(), rtol=1e-11)
    mine = {
        "sum_w": weights.sum(),
        "ess_kish": result.effective_sample_size,
        "g_min": result.ratio.min(),
        "g_max": result.ratio.max(),
        "total_enroll": weights @ SCHOOLS["enroll"].to_numpy(),
        "mean_api00": result.weights @ SCHOOLS["api00"].to_numpy(),
    }
    for key, value in mine.items():
        assert value == pytest.approx(summary[key], rel=1e-11), key
    totals = [summary["stype_totals"][f"stype{level}"] for level in "EHM"]
    np.testing.assert_allclose(N * result.achieved[:3], totals, rtol=1e-12)
    assert result.dropped == {"M": "follows from E, H"}


def test_the_published_total_comes_out() -> None:
    """The survey package's documentation has 3638487 for linear calibration on both variables."""
    result = schools("stype_api99", Linear())
    assert round(N * result.weights @ SCHOOLS["enroll"].to_numpy()) == 3638487


@pytest.mark.parametrize("dense", [False, True])
def test_raking_on_margins_equals_iterative_proportional_fitting(dense: bool) -> None:
    codes = np.column_stack(
        [
            MARGINS["stype"].replace_strict({"E": 0, "H": 1, "M": 2}).to_numpy(),
            MARGINS["sch.wide"].replace_strict({"No": 0, "Yes": 1}).to_numpy(),
        ]
    )
    margins = Margins(codes, (("E", "H", "M"), ("No", "Yes")))
    matrix = margins.dense()
    balance: FloatArray | BalanceDesign = matrix if dense else margins
    target = np.array([4421, 755, 1018, 1072, 5122]) / N
    base = MARGINS["pw"].to_numpy()
    result = calibrated(balance, target, distance=Entropy(), base=base, population_size=N)
    np.testing.assert_allclose(N * result.weights, MARGINS["w"].to_numpy(), rtol=1e-11)
    ess = API["apiclus1_rake_margins"]["ess_kish"]
    assert result.effective_sample_size == pytest.approx(ess, rel=1e-11)
    total = N * result.weights @ SCHOOLS["enroll"].to_numpy()
    assert total == pytest.approx(API["apiclus1_rake_margins"]["total_enroll"], rel=1e-11)
