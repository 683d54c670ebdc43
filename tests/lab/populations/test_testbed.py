"""The synthetic population: its design to the bit, its draws by their documented moments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad
from scipy.special import expit

from fedipw.errors import InputError
from fedipw.lab.testbed import PopulationDraw, Testbed
from fedipw.numerics import FloatArray

FALSE_ALARM = 1e-6  # of each comparison of a statistic with its law, two-sided
LIMIT = float(stats.norm.isf(FALSE_ALARM / 2))


def draw(seed: int = 0, **settings: Any) -> PopulationDraw:
    return Testbed(**settings).draw(np.random.default_rng(seed))


def all_bytes(drawn: PopulationDraw) -> tuple[bytes, ...]:
    data = drawn.clients
    return (
        drawn.population.matrix().tobytes(),
        data.features.tobytes(),
        data.labels.tobytes(),
        data.offsets.tobytes(),
    )


def z_score(sample: FloatArray, mean: float) -> float:
    """Return (sample mean - mean) over its standard error."""
    return float((sample.mean() - mean) / (sample.std(ddof=1) / np.sqrt(len(sample))))


def test_the_design_is_the_documented_one() -> None:
    M, C, w0 = Testbed().design()
    rng = np.random.default_rng(12345)
    raw_M, raw_C, raw_w = (
        rng.standard_normal((3, 5)),
        rng.standard_normal((3, 5)),
        rng.standard_normal(5),
    )
    for j in range(3):
        np.testing.assert_allclose(M[j], raw_M[j] / np.sqrt((raw_M[j] ** 2).sum()), rtol=1e-15)
        np.testing.assert_allclose(C[j], raw_C[j] / np.sqrt((raw_C[j] ** 2).sum()), rtol=1e-15)
    np.testing.assert_allclose(w0, 2.0 * raw_w / np.sqrt((raw_w**2).sum()), rtol=1e-15)


def test_the_defaults_are_the_documented_ones() -> None:
    bed = Testbed()
    assert (bed.size, bed.rows, bed.features) == (1000, 20, 5)
    assert (bed.shift, bed.loadings) == (0.6, (1.0, 1.0, 0.3))
    assert (bed.concept_shift, bed.coefficient_noise) == (1.0, 0.3)
    assert (bed.intercept_loadings, bed.intercept_noise) == ((0.6, 0.6, 0.0), 0.15)


@pytest.mark.parametrize("settings", [{"size": 30}, {"size": 30, "rows": 3, "rows_max": 9}])
def test_the_same_seed_gives_the_same_bytes(settings: dict[str, int]) -> None:
    assert all_bytes(draw(5, **settings)) == all_bytes(draw(5, **settings))
    differ = [
        a != b
        for a, b in zip(
            all_bytes(draw(5, **settings))[:3], all_bytes(draw(6, **settings))[:3], strict=True
        )
    ]
    assert all(differ)


def test_shapes_and_identifiers() -> None:
    drawn = draw(size=7, rows=4, features=3)
    assert drawn.population.unit_ids.tolist() == list(range(7))
    assert drawn.population.covariates == ("z1", "z2", "z3")
    assert drawn.clients.features.shape == (28, 3)
    assert drawn.clients.counts.tolist() == [4] * 7


def test_covariates_have_their_documented_laws() -> None:
    """Six comparisons, each with false alarm 1e-6."""
    Z = draw(1, size=20_000, rows=1).population.matrix()
    n = len(Z)
    assert set(Z[:, 0]) == {-1.0, 1.0}
    assert stats.binomtest(int((Z[:, 0] > 0).sum()), n).pvalue > FALSE_ALARM
    assert np.abs(Z[:, 1]).max() == 2.5
    assert stats.binomtest(int((Z[:, 1] == 2.5).sum()), n, stats.norm.sf(2.5)).pvalue > FALSE_ALARM
    inner = Z[np.abs(Z[:, 1]) < 2.5, 1]
    truncated = stats.truncnorm(-2.5, 2.5)
    assert stats.kstest(inner, truncated.cdf).pvalue > FALSE_ALARM
    assert stats.kstest(Z[:, 2], stats.norm.cdf).pvalue > FALSE_ALARM
    for a, b in ((0, 1), (1, 2)):
        assert abs(np.corrcoef(Z[:, a], Z[:, b])[0, 1]) * np.sqrt(n) < LIMIT


def test_features_are_normal_around_the_shifted_mean() -> None:
    """Given Z the residuals are independent N(0, 1): seven comparisons, false alarm 1e-6 each."""
    bed = Testbed(size=5000, rows=8)  # two blocks of clients
    drawn = bed.draw(np.random.default_rng(2))
    M, _, _ = bed.design()
    Z = drawn.population.matrix()
    mean = 0.6 * (Z * np.array([1.0, 1.0, 0.3])) @ M
    noise = drawn.clients.features - np.repeat(mean, 8, axis=0)
    n = noise.size
    assert abs(noise.sum()) / np.sqrt(n) < LIMIT
    low, high = stats.chi2(n).interval(1.0 - FALSE_ALARM)
    assert low < (noise**2).sum() < high
    for j in range(3):  # no trace of any covariate is left
        score = (np.repeat(Z[:, j], 8) @ noise.sum(axis=1)) / np.sqrt((Z[:, j] ** 2).sum() * 8 * 5)
        assert abs(score) < LIMIT
    for part in (noise[: 4096 * 8], noise[4096 * 8 :]):
        assert abs(part.sum()) / np.sqrt(part.size) < LIMIT


def test_labels_follow_the_documented_model() -> None:
    """Without client noise P(y = 1 | x, Z) is known: nine scores, false alarm 1e-6 each."""
    bed = Testbed(size=5000, rows=8, coefficient_noise=0.0, intercept_noise=0.0)
    drawn = bed.draw(np.random.default_rng(3))
    _, C, w0 = bed.design()
    Z = np.repeat(drawn.population.matrix(), 8, axis=0)
    x, y = drawn.clients.features, drawn.clients.labels
    W = w0 + (Z * np.array([1.0, 1.0, 0.3])) @ C
    prob = expit((x * W).sum(axis=1) + 0.6 * Z[:, 0] + 0.6 * Z[:, 1])
    directions = np.column_stack([np.ones(len(y)), x, Z])
    score = directions.T @ (y - prob)
    deviation = np.sqrt((directions**2).T @ (prob * (1.0 - prob)))
    assert np.abs(score / deviation).max() < LIMIT


def test_client_intercepts_have_the_documented_spread() -> None:
    """Pairs of labels of a client agree as often as N(0, sd^2) intercepts make them: 1e-6."""
    sd = 1.5
    drawn = draw(
        4,
        size=100_000,
        rows=4,
        features=1,
        coefficient_norm=0.0,
        concept_shift=0.0,
        coefficient_noise=0.0,
        intercept_loadings=(0.0, 0.0, 0.0),
        intercept_noise=sd,
    )
    ones = drawn.clients.label_share * 4
    both = ones * (ones - 1.0) / 12.0  # unbiased for the client's squared probability
    expected = quad(lambda g: expit(sd * g) ** 2 * stats.norm.pdf(g), -9, 9, epsabs=1e-12)[0]
    assert abs(z_score(both, expected)) < LIMIT
    assert abs(z_score(both, 0.25)) > LIMIT  # what no spread at all would give


def test_client_coefficients_have_the_documented_spread() -> None:
    """E|E[(2y - 1) x | W]|^2 with W = sd N(0, I_5), by pairs of rows of a client: 1e-6."""
    sd, d = 1.2, 5
    drawn = draw(
        5,
        size=100_000,
        rows=4,
        shift=0.0,
        coefficient_norm=0.0,
        concept_shift=0.0,
        coefficient_noise=sd,
        intercept_loadings=(0.0, 0.0, 0.0),
        intercept_noise=0.0,
    )
    signed = (2.0 * drawn.clients.labels - 1.0)[:, None] * drawn.clients.features
    own = signed.reshape(-1, 4, d)
    pairs = ((own.sum(axis=1) ** 2).sum(axis=1) - (own**2).sum(axis=(1, 2))) / 12.0

    # E[(2y - 1) x | W] = W E[2 sigma'(|W| g)] by Stein's identity; both integrals on fine grids
    length, g = np.linspace(0.0, 9.0, 601), np.linspace(-9.0, 9.0, 601)
    u = sd * np.outer(length, g)
    slope = np.trapezoid(2.0 * expit(u) * expit(-u) * stats.norm.pdf(g), g, axis=1)
    expected = np.trapezoid((sd * length * slope) ** 2 * stats.chi(d).pdf(length), length)
    assert abs(z_score(pairs, float(expected))) < LIMIT
    assert abs(z_score(pairs, 0.0)) > LIMIT


def test_rows_max_spreads_the_counts_evenly() -> None:
    """Counts are uniform on rows to rows_max: chi-square with false alarm 1e-6."""
    counts = draw(6, size=6000, rows=3, rows_max=8, features=1).clients.counts
    assert set(counts.tolist()) == {3, 4, 5, 6, 7, 8}
    assert stats.chisquare(np.bincount(counts)[3:]).pvalue > FALSE_ALARM


def test_rows_max_equal_to_rows_is_allowed() -> None:
    assert draw(size=5, rows=3, rows_max=3).clients.counts.tolist() == [3] * 5


@pytest.mark.parametrize("name", ["size", "rows", "features"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_that_are_not_positive_are_refused_by_name(name: str, value: int) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(InputError, match=rf"{name} must be a finite number above 0, not {value}"):
        Testbed(**settings)


def test_rows_max_below_rows_is_refused() -> None:
    with pytest.raises(InputError, match="rows_max = 4 is below rows = 5"):
        Testbed(rows=5, rows_max=4)
