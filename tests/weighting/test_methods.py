"""One contract for every registered method, and what sets methods apart."""

from itertools import product

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.selection import Source
from fedipw.weighting import METHODS, Balance, Facts, RoundReplies, Target, method_named, trimmed
from fedipw.weighting.schemes import ParticipationOnly, expected_weights

_COLUMNS = np.random.default_rng(5).standard_normal((50, 2))
BALANCE = Balance(
    names=("a", "b"),
    matrix=_COLUMNS,
    enrolled=np.arange(50) < 20,
    mean=np.array([0.05, -0.1]),
    population_size=50,
)
FACTS = Facts(population=50, enrolled=20, balance=BALANCE, rich=BALANCE)
SIGNED = [n for n in METHODS if n.startswith(("greg", "calibrated-linear"))]


def replies(m: int = 7, seed: int = 0) -> RoundReplies:
    rng = np.random.default_rng(seed)
    return RoundReplies(
        index=3,
        unit_ids=np.arange(m),
        rows=rng.permutation(20)[np.arange(m) % 20],
        enrollment_prob=rng.uniform(0.1, 1.0, m),
        participation_prob=rng.uniform(0.05, 1.0, m),
        sample_counts=rng.integers(1, 30, m),
        source=Source.MODEL,
    )


def subset(given: RoundReplies, rows: np.ndarray) -> RoundReplies:
    return RoundReplies(
        index=given.index,
        unit_ids=given.unit_ids[rows],
        rows=given.rows[rows],
        enrollment_prob=given.enrollment_prob[rows],
        participation_prob=given.participation_prob[rows],
        sample_counts=given.sample_counts[rows],
        source=given.source,
    )


@pytest.mark.parametrize("name", METHODS)
def test_weights_are_one_per_reply_follow_the_rows_and_are_not_negative(name: str) -> None:
    scheme, given = method_named(name).scheme_for(FACTS), replies()
    weights = scheme.weights(given)
    assert weights.shape == (7,)
    assert np.all(weights >= 0) or name in SIGNED
    assert weights.any()
    order = np.random.default_rng(1).permutation(7)
    np.testing.assert_allclose(scheme.weights(subset(given, order)), weights[order], rtol=1e-14)


@pytest.mark.parametrize("name", METHODS)
def test_self_normalised_weights_sum_to_one_and_others_stand_alone(name: str) -> None:
    scheme, given = method_named(name).scheme_for(FACTS), replies()
    part = subset(given, np.array([0, 3]))
    if scheme.self_normalised:
        assert np.isclose(scheme.weights(given).sum(), 1.0)
        assert np.isclose(scheme.weights(part).sum(), 1.0)
    else:
        np.testing.assert_array_equal(scheme.weights(part), scheme.weights(given)[[0, 3]])


ALONE = [n for n, m in METHODS.items() if not m.scheme_for(FACTS).self_normalised]
TOGETHER = [n for n in METHODS if n not in ALONE]


@pytest.mark.parametrize("name", ALONE)
def test_expected_weights_against_enumeration(name: str) -> None:
    scheme, given = method_named(name).scheme_for(FACTS), replies(6)
    chance = np.random.default_rng(2).uniform(0.2, 0.9, 6)
    mean = np.zeros(6)
    for present in product([True, False], repeat=6):
        rows = np.flatnonzero(present)
        if rows.size:
            prob = np.where(present, chance, 1 - chance).prod()
            mean[rows] += prob * scheme.weights(subset(given, rows))
    np.testing.assert_allclose(expected_weights(scheme, given, chance), mean, rtol=1e-12)


@pytest.mark.parametrize("name", TOGETHER)
def test_expected_weights_are_the_limit_of_large_rounds(name: str) -> None:
    """Six kinds of client, 400 of each: false alarm below 1e-6 (six standard errors)."""
    scheme, copies, rng = method_named(name).scheme_for(FACTS), 400, np.random.default_rng(3)
    kinds = np.repeat(np.arange(6), copies)
    given = subset(replies(6), kinds)
    chance = np.random.default_rng(2).uniform(0.2, 0.9, 6)[kinds]
    mean = np.zeros(6)
    for _ in range(400):
        rows = np.flatnonzero(rng.random(len(kinds)) < chance)
        mean += np.bincount(kinds[rows], scheme.weights(subset(given, rows)), minlength=6) / 400
    expected = np.bincount(kinds, expected_weights(scheme, given, chance), minlength=6)
    near_zero = 1e-3 * expected.max()  # GREG can leave a kind almost without weight
    np.testing.assert_allclose(mean, expected, rtol=0.03, atol=near_zero)


@pytest.mark.parametrize("name", METHODS)
def test_expected_trimmed_weights_are_the_limit_of_large_rounds(name: str) -> None:
    """As above with weights cut at 1.2 times the mean: false alarm below 1e-6."""
    scheme, copies, rng = method_named(name).scheme_for(FACTS), 400, np.random.default_rng(4)
    kinds = np.repeat(np.arange(6), copies)
    given = subset(replies(6), kinds)
    chance = np.random.default_rng(2).uniform(0.2, 0.9, 6)[kinds]
    mean = np.zeros(6)
    for _ in range(400):
        rows = np.flatnonzero(rng.random(len(kinds)) < chance)
        cut = trimmed(scheme.weights(subset(given, rows)), 1.2).weights
        mean += np.bincount(kinds[rows], cut, minlength=6) / 400
    expected = np.bincount(kinds, expected_weights(scheme, given, chance, trim=1.2), minlength=6)
    near_zero = 1e-3 * expected.max() / expected.sum()
    share = expected / expected.sum()
    np.testing.assert_allclose(mean / mean.sum(), share, rtol=0.03, atol=near_zero)


def test_the_table_of_weights() -> None:
    given = replies()
    enroll, part = given.enrollment_prob, given.participation_prob
    table = {
        "fedavg": np.full(7, 1 / 7),
        "participation-only": 1 / (20 * part),
        "fedipw": 1 / (50 * enroll * part),
        "fedipw-hajek": (1 / (enroll * part)) / (1 / (enroll * part)).sum(),
        "participation-only-hajek": (1 / part) / (1 / part).sum(),
    }
    for name, expected in table.items():
        weights = method_named(name).scheme_for(FACTS).weights(given)
        np.testing.assert_allclose(weights, expected, rtol=1e-14, err_msg=name)


def test_normalising_participation_by_the_population_only_shortens_the_step() -> None:
    given = replies()
    by_enrolled, literal = ParticipationOnly(20), ParticipationOnly(50)
    np.testing.assert_allclose(literal.weights(given) * 2.5, by_enrolled.weights(given))


def test_sample_target_weighs_by_rows_and_has_no_horvitz_thompson_form() -> None:
    given = replies()
    weights = method_named("fedipw-hajek").scheme_for(FACTS, Target.SAMPLE).weights(given)
    raw = given.sample_counts / given.inclusion_prob
    np.testing.assert_allclose(weights, raw / raw.sum(), rtol=1e-13)
    plain = method_named("fedavg").scheme_for(FACTS, Target.SAMPLE).weights(given)
    np.testing.assert_allclose(plain, given.sample_counts / given.sample_counts.sum(), rtol=1e-13)
    with pytest.raises(InputError, match=r"fedipw is a Horvitz–Thompson form.*fedipw-hajek"):
        method_named("fedipw").scheme_for(FACTS, Target.SAMPLE)


def test_an_unknown_method_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean participation-only"):
        method_named("participaton-only")
