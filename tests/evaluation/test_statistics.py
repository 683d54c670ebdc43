"""Quantiles, ratios, totals and differences: closed forms, every outcome, properties, coverage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import stdtrit
from scipy.stats import binom

from fedipw.errors import InputError
from fedipw.evaluation.estimators import (
    Estimate,
    Group,
    HajekMean,
    HorvitzThompsonMean,
    MeanEstimator,
    jackknife_means,
    population_means,
)
from fedipw.evaluation.phases import KnownEnrollment
from fedipw.evaluation.quantiles import Distribution, population_quantiles
from fedipw.evaluation.sample import TwoPhase
from fedipw.evaluation.statistics import Contrast, Difference, Ratio, Total, contrasts
from fedipw.numerics import FloatArray
from two_phase_worlds import drawn_world

SEEDS = st.integers(0, 2**32 - 1)


def known(kappa: FloatArray, prob: FloatArray | None = None) -> TwoPhase:
    """Every enrolled client replies once, in one round."""
    client = np.arange(len(kappa))
    return TwoPhase(
        client=client, round=0 * client, prob=np.ones(len(kappa)) if prob is None else prob,
        rounds=1, enrollment=KnownEnrollment(weights=kappa, population_size=round(kappa.sum())),
    )  # fmt: skip


@dataclass
class Replies:
    """A sample with both phases known, two metrics and two subgroups."""

    sample: TwoPhase
    y: FloatArray
    x: FloatArray
    inside: np.ndarray

    @classmethod
    def drawn(cls, seed: int, clients: int = 30, rounds: int = 3) -> Replies:
        rng = np.random.default_rng(seed)
        replied = rng.random((clients, rounds)) < 0.7
        replied[:4, 0] = True  # two of each subgroup
        client, round_ = np.nonzero(replied)
        sample = TwoPhase(
            client=client, round=round_, prob=rng.uniform(0.5, 1.0, len(client)), rounds=rounds,
            enrollment=KnownEnrollment(weights=rng.uniform(1.0, 8.0, clients)),
        )  # fmt: skip
        m = len(client)
        inside = np.arange(clients) % 2 == 0
        return cls(sample, rng.normal(1.0, 2.0, m).round(1), rng.uniform(0.5, 9.0, m), inside)

    @property
    def sides(self) -> Contrast:
        return Contrast(
            Group(name="a", inside=self.inside, size=60.0),
            Group(name="b", inside=~self.inside, size=75.0),
        )

    def one(self, estimator: MeanEstimator, group: Group | None = None) -> Estimate:
        chosen = Group(size=135.0) if group is None else group
        (line,) = population_means(self.sample, self.y, [estimator], [chosen])
        return line

    def difference(self, inner: MeanEstimator, sides: Contrast | None = None) -> Estimate:
        chosen = self.sides if sides is None else sides
        return self.one(Difference.between(inner, [chosen]), chosen.both())


def numbers(line: Estimate) -> list[float]:
    return [line.estimate, line.se, line.low, line.high]


# Closed forms; every outcome of a design is in test_two_phase.py.


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.98])
def test_woodruff_interval_of_a_simple_random_sample_in_closed_form(p: float) -> None:
    # n of N with equal weights: the share at or below is k/n; each term is raised by 1/(1 - 1/n)
    n, size = 50, 400
    y = np.random.default_rng(3).permutation(np.arange(1.0, n + 1))
    (line,) = population_quantiles(known(np.full(n, size / n)), y, [p])
    k = int(np.ceil(n * p - 1e-9))
    share = k / n
    se = np.sqrt((1 - n / size) * share * (1 - share) / n) / (1 - 1 / n)
    # (E29): k terms of (1 - share)^2 and n - k of share^2
    terms = np.repeat([(1 - share) ** 2, share**2], [k, n - k])
    freedom = terms.sum() ** 2 / (terms**2).sum()
    reach = stdtrit(freedom, 0.975) * se
    assert line.estimate == k
    for got, at in ((line.low, share - reach), (line.high, share + reach)):
        if 0.0 <= at <= 1.0:
            assert got == max(np.ceil(n * at - 1e-9), 1.0)
        else:
            assert np.isnan(got)
            assert "the interval has no" in line.reason
            assert np.isnan(line.se)
    if not line.reason:
        t = stdtrit(line.freedom, 0.975)
        assert line.se == pytest.approx((line.high - line.low) / (2 * t), rel=1e-12)


def test_leverage_makes_the_error_of_a_ratio_that_of_ratios_without_each_client() -> None:
    rng = np.random.default_rng(9)
    y, x, kappa = rng.normal(size=12), rng.uniform(0.0, 4.0, 12), rng.uniform(1.5, 9.0, 12)
    x[3] = 0.0  # a client may have no samples
    (got,) = population_means(known(kappa), y, [Ratio(x)])
    without = []
    for i in range(12):
        rest = np.delete(np.arange(12), i)
        without.append((kappa[rest] @ y[rest]) / (kappa[rest] @ x[rest]))
    squares = (1 - 1 / kappa) * (np.array(without) - got.estimate) ** 2
    assert got.estimate == pytest.approx((kappa @ y) / (kappa @ x), rel=1e-12)
    assert got.se**2 == pytest.approx(squares.sum(), rel=1e-12)


# Properties.


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_quantiles_follow_monotone_maps_of_the_metric(seed: int) -> None:
    data = Replies.drawn(seed)
    at, groups = (0.2, 0.5, 0.9), [Group(), *data.sides]
    plain = population_quantiles(data.sample, data.y, at, groups)
    mapped = population_quantiles(data.sample, 1e9 * np.exp(data.y), at, groups)
    for one, two in zip(plain, mapped, strict=True):
        assert (one.statistic, one.group) == (two.statistic, two.group)
        for name in ("estimate", "low", "high"):
            expected = 1e9 * np.exp(getattr(one, name))
            np.testing.assert_equal(getattr(two, name), expected)  # the same replies: no rounding


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_a_total_is_the_size_times_the_mean(seed: int) -> None:
    data = Replies.drawn(seed)
    for group in (
        Group(size=135.0),
        *data.sides,
        Group(name="r", size=135.0, rounds=np.array([1])),
    ):
        for mean in (HorvitzThompsonMean(), HajekMean()):
            line = data.one(Total.over(mean, [group]), group)
            assert line.statistic == "total"
            assert line.estimator == mean.name
            expected = np.multiply(float(group.size or 0.0), numbers(data.one(mean, group)))
            np.testing.assert_allclose(numbers(line), expected, rtol=1e-9, atol=1e-9)


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_a_difference_turned_round_has_the_other_sign_and_the_same_error(seed: int) -> None:
    data = Replies.drawn(seed)
    for inner in (HorvitzThompsonMean(), HajekMean(), Ratio(data.x)):
        there, back = (data.difference(inner, s) for s in (data.sides, Contrast(*data.sides[::-1])))
        assert back.estimate == -there.estimate
        assert (back.se, back.freedom) == (there.se, there.freedom)
        assert (back.low, back.high) == (-there.high, -there.low)
        sides = [data.one(inner, side).estimate for side in data.sides]
        assert there.estimate == sides[0] - sides[1]


def test_disjoint_clients_with_known_probabilities_have_no_covariance() -> None:
    data = Replies.drawn(4)
    for inner in (HorvitzThompsonMean(), HajekMean()):
        apart = [data.one(inner, side).se for side in data.sides]
        assert data.difference(inner).se == pytest.approx(np.hypot(apart[0], apart[1]), rel=1e-12)


def test_the_sides_of_a_difference_share_the_models_of_both_stages() -> None:
    data = drawn_world(np.random.default_rng(5), 400)
    sides = [data.sides[0], data.sides[1]]
    for inner in data.estimators:
        lines = population_means(data.sample, data.y, [inner], sides)
        (line,) = population_means(
            data.sample, data.y, [Difference.between(inner, [data.sides])], [data.sides.both()]
        )
        assert line.estimate == lines[0].estimate - lines[1].estimate
        assert abs(line.se / np.hypot(lines[0].se, lines[1].se) - 1) > 1e-4
        u = [inner.linear(data.sample, data.y, side) for side in sides]
        exact = data.sample.variance(
            (u[0].values - u[1].values)[:, None],
            np.maximum(u[0].leverage, u[1].leverage)[:, None],
        )
        assert line.se**2 == pytest.approx(exact.variance[0], rel=1e-12)


@given(SEEDS, st.sampled_from([1e-14, 1e-3, 1e14]))
@settings(max_examples=15, deadline=None)
def test_a_ratio_to_itself_is_one_and_to_one_the_mean_in_any_unit(seed: int, unit: float) -> None:
    data = Replies.drawn(seed)
    data.y = np.abs(data.y) + 0.1
    assert numbers(data.one(Ratio(data.y))) == [1.0, 0.0, 1.0, 1.0]
    ones = np.ones(len(data.y))
    np.testing.assert_allclose(
        numbers(data.one(Ratio(ones))), numbers(data.one(HajekMean())), rtol=1e-12
    )
    free, scaled = data.one(Ratio(data.x)), data.one(Ratio(unit * data.x))
    np.testing.assert_allclose(
        np.multiply(unit, numbers(scaled)), numbers(free), rtol=1e-9, atol=1e-12
    )


def test_samples_count_in_quantiles_and_ratios_as_rows_would() -> None:
    data = Replies.drawn(6)
    counts = np.random.default_rng(6).integers(1, 5, len(data.y))
    lines = population_quantiles(data.sample, data.y, [0.3, 0.8], counts=counts.astype(float))
    weights, y = np.repeat(data.sample.weights, counts), np.repeat(data.y, counts)
    for line, p in zip(lines, (0.3, 0.8), strict=True):
        assert line.estimate == Distribution.of(y, weights).inverse(p)
    found = data.one(Ratio(data.x, counts.astype(float)))
    expected = (weights @ y) / (weights @ np.repeat(data.x, counts))
    assert found.estimate == pytest.approx(expected, rel=1e-12)


def test_a_census_knows_its_quantiles() -> None:
    y = np.random.default_rng(8).normal(size=21)
    lines = population_quantiles(known(np.ones(21)), y, [0.25, 0.5])
    for line, p in zip(lines, (0.25, 0.5), strict=True):
        assert line.estimate == np.quantile(y, p, method="inverted_cdf")
        assert (line.se, line.low, line.high) == (0.0, line.estimate, line.estimate)


@pytest.mark.parametrize(
    ("y", "p"), [(np.arange(20.0), 0.99), (np.repeat([0.0, 1.0], [6, 14]), 0.5)],
    ids=["largest of all", "yes and no"],
)  # fmt: skip
def test_the_largest_value_seen_has_the_lower_limit_of_the_next_and_none_above(
    y: FloatArray, p: float
) -> None:
    sample = known(np.full(20, 4.0))
    (line,) = population_quantiles(sample, y, [p])
    (share,) = population_means(sample, (y < y[-1]).astype(float), [HajekMean()])
    assert line.estimate == y[-1]
    assert line.low == Distribution.of(y, np.ones(20)).inverse(share.low) < y[-1]
    assert np.isnan([line.high, line.se]).all()
    assert line.reason == "too few values lie beyond it: the interval has no high end"


def test_equal_values_have_no_interval() -> None:
    (line,) = population_quantiles(known(np.full(20, 4.0)), np.full(20, 0.3), [0.5])
    assert line.estimate == 0.3
    assert np.isnan([line.low, line.high, line.se]).all()
    assert line.reason.endswith("the interval has no low and no high end")


def test_a_jackknife_gives_all_of_them_errors() -> None:
    data = drawn_world(np.random.default_rng(12), 500)

    def lines(count: int) -> list[Estimate]:
        def means(*given: object) -> tuple[Estimate, ...]:
            rng = np.random.default_rng(1)
            if count:
                return jackknife_means(*given, rng=rng, count=count)  # type: ignore[arg-type]
            return population_means(*given)  # type: ignore[arg-type]

        groups = [Group(size=500.0), *data.sides]
        inner = [HorvitzThompsonMean(), HajekMean(), Ratio(data.x)]
        totals = [Total.over(mean, groups) for mean in inner[:2]]
        made = list(means(data.sample, data.y, [*totals, inner[2]], groups))
        both = [Difference.between(each, [data.sides]) for each in inner]
        made += means(data.sample, data.y, both, [data.sides.both()])
        made += population_quantiles(data.sample, data.y, [0.5], groups, means=means)
        return made

    for one, two in zip(lines(0), lines(60), strict=True):
        assert (one.statistic, one.group, one.estimate) == (two.statistic, two.group, two.estimate)
        # the spread of 60 groups is known to a fifth, what is left of it to less; limits of
        # quantiles jump from reply to reply. A side or a size left unscaled would be off by 5 to 60
        assert 0.4 < two.se / one.se < 2.0, (one, two)


# Refusals.


def test_what_has_no_estimate_says_why() -> None:
    data = Replies.drawn(2)
    nameless = Group(name="a", inside=data.inside)
    total = data.one(Total.over(HajekMean(), [nameless]), nameless)
    assert total.reason == "the size of the group in the population is not known"
    zero = data.one(Ratio(0.0 * data.x))
    assert zero.reason == "the denominator of the ratio adds up to 0, not above 0"
    assert np.isnan([total.estimate, zero.estimate]).all()
    alone = np.arange(30) == 0
    sides = Contrast(Group(name="one", inside=alone), Group(name="others", inside=~alone))
    assert data.difference(HajekMean(), sides).reason == ("1 client of one replied: no difference")
    signed = KnownEnrollment(weights=np.array([3.0, -1.0, 2.0]), signed=True)
    sample = TwoPhase(
        client=np.arange(3), round=np.zeros(3, dtype=int), prob=np.ones(3), rounds=1,
        enrollment=signed,
    )  # fmt: skip
    (line,) = population_quantiles(sample, np.arange(3.0), [0.5])
    assert line.reason == "weights are below 0, or all 0: there is no distribution of the group"
    assert np.isnan(line.estimate)
    for p in (0.0, 1.0, np.nan):
        with pytest.raises(InputError, match="A quantile is taken between 0 and 1"):
            population_quantiles(data.sample, data.y, [p])


def test_differences_are_asked_for_by_rest_pairs_or_a_level() -> None:
    levels = np.arange(6) % 3
    groups = [Group(name=f"os = {k}", inside=levels == k, size=10.0 + k) for k in range(3)]
    weeks = [Group(name=f"round = {k}", size=33.0, rounds=np.array([k])) for k in range(4)]
    columns, everyone = {"os": groups, "round": weeks}, Group(size=33.0)
    pairs = contrasts(columns, ["pairs"], everyone)
    assert len(pairs) == 3 + 6
    assert pairs[1].name == "os = 0 less os = 2"
    rest = contrasts(columns, ["rest"], everyone)
    assert [x.name for x in rest[:2]] == ["os = 0 less the rest", "os = 1 less the rest"]
    assert rest[1].second.size == 22.0
    assert rest[1].second.inside is not None
    np.testing.assert_array_equal(rest[1].second.inside, levels != 1)
    assert rest[3].second.rounds is not None
    assert rest[3].second.rounds.tolist() == [1, 2, 3]
    for word in ("os=1", "os = 1"):
        assert [x.name for x in contrasts(columns, [word, "os=1"], everyone)] == [
            "os = 0 less os = 1", "os = 2 less os = 1",
        ]  # fmt: skip
    assert contrasts(columns, [], everyone) == []
    many = {"id": [Group(name=f"id = {k}") for k in range(30)]}
    for asked, where, said in (
        (["os=9"], columns, "no subgroup 'os=9'.*there are os = 0, os = 1"),
        (["rest"], {}, "name a column to group by"),
        (["pairs"], many, "435 pairs of levels, more than 200"),
        (["rest"], {"os": groups[:1]}, "'os' has one level"),
    ):
        with pytest.raises(InputError, match=said):
            contrasts(where, asked, everyone)


# Coverage.


REPLICATIONS = 1000


def test_intervals_hold_the_truth_of_a_small_world() -> None:
    """All nine are within what a coverage of 95% gives, but once in a million times."""
    size, held = 300, dict.fromkeys(
        ["quantile 0.5", "quantile 0.9", "ratio", "total hajek", "total greg", "total of a hajek",
         "total of a greg", "difference hajek", "difference greg"], 0,
    )  # fmt: skip
    for k in range(REPLICATIONS):
        data = drawn_world(np.random.default_rng([5, k]), size)
        _, hajek, greg = data.estimators
        groups = [Group(size=float(size)), data.sides[0]]
        lines = [
            *population_quantiles(data.sample, data.y, [0.5, 0.9]),
            *population_means(data.sample, data.y, [Ratio(data.x)]),
            *population_means(
                data.sample, data.y, [Total.over(m, groups) for m in (hajek, greg)], groups
            ),
            *population_means(
                data.sample, data.y,
                [Difference.between(m, [data.sides]) for m in (hajek, greg)], [data.sides.both()],
            ),
        ]  # fmt: skip
        truths = [name.replace(" hajek", "").replace(" greg", "") for name in held]
        for name, true, line in zip(held, truths, lines, strict=True):
            held[name] += line.low <= data.truth[true] <= line.high
    rare = 0.5e-6 / len(held)
    low, high = (binom.ppf(at, REPLICATIONS, 0.95) for at in (rare, 1.0 - rare))
    assert all(low <= count <= high for count in held.values()), (low, high, held)
