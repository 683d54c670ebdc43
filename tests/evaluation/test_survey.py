"""Statistics against R's survey package on its api data: one phase, where formulas coincide.

Schools enroll with known probabilities and all reply, so (E23) is what R calls Poisson sampling.
R's other designs draw with replacement: weights of 1e12 leave nothing of the population seen, the
schools of a district are the rounds of one client, and R's factor n / (n - 1) is put in by hand.
Three things of ours are left out here on purpose: leverages, which raise each part as a jackknife
would, Satterthwaite's degrees of freedom, where R counts units less one, and (for totals drawn with
replacement) squares of the clients' own contributions, where R takes them about their mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.special import stdtrit

from fedipw.evaluation.estimators import Group, HajekMean, HorvitzThompsonMean, Linear
from fedipw.evaluation.phases import KnownEnrollment
from fedipw.evaluation.quantiles import Distribution, population_quantiles
from fedipw.evaluation.sample import TwoPhase
from fedipw.evaluation.statistics import Contrast, Difference, Ratio, Total
from fedipw.numerics import FloatArray

FOLDER = Path(__file__).parents[1] / "reference"
R: dict[str, Any] = json.loads((FOLDER / "api_statistics.json").read_text())
CLOSE = 1e-9
SEEN_NOTHING = 1e12


class Schools:
    """A design of R's as a two-phase sample."""

    def __init__(self, name: str) -> None:
        self.numbers, self.poisson = R[name], name.endswith("poisson")
        self.table = pl.read_csv(FOLDER / f"api_{name.split('_', maxsplit=1)[0]}.csv")
        one = "dnum" if name.startswith("clus1") else "snum"
        code = self.table[one].rank("dense").to_numpy().astype(int) - 1
        within = self.table.select(pl.int_range(pl.len()).over(one)).to_series().to_numpy()
        self.many = float(within.max() + 1)
        self.kappa = 1.0 if self.poisson else SEEN_NOTHING
        own = np.zeros(code.max() + 1)
        own[code] = self["pw"] * self.kappa
        self.sample = TwoPhase(
            client=code, round=within.astype(int), prob=np.ones(len(code)), rounds=int(self.many),
            enrollment=KnownEnrollment(weights=own),
        )  # fmt: skip

    def __getitem__(self, column: str) -> FloatArray:
        return self.table[column].to_numpy().astype(float)

    def level(self, value: str) -> Group:
        """Schools of a type, as rounds of their districts where those are the clients."""
        flags = (self.table["stype"] == value).to_numpy()
        inside = np.zeros(self.sample.clients, dtype=bool)
        inside[self.sample.client[flags]] = True
        return Group(name=value, inside=inside)

    def se(self, linear: Linear) -> float:
        """The standard error without leverages, drawn as R draws."""
        n = self.sample.clients
        factor = 1.0 if self.poisson else n / (n - 1)
        found = self.sample.variance(linear.values[:, None]).variance[0]
        return float(np.sqrt(factor * found))


DESIGNS = pytest.mark.parametrize(
    "schools", [Schools(name) for name in R if name != "versions"],
    ids=[name for name in R if name != "versions"],
)  # fmt: skip
ONE_STAGE = pytest.mark.parametrize(
    "schools", [Schools(f"strat_{how}") for how in ("poisson", "replacement")],
    ids=["poisson", "replacement"],
)  # fmt: skip


@DESIGNS
def test_means_and_their_intervals(schools: Schools) -> None:
    expected, df = schools.numbers["mean"], schools.numbers["df"]
    found = HajekMean().linear(schools.sample, schools["api00"], Group())
    se = schools.se(found)
    assert found.estimate == pytest.approx(expected["estimate"], rel=CLOSE)
    assert se == pytest.approx(expected["se"], rel=CLOSE)
    reach = float(stdtrit(df, 0.975)) * se
    assert found.estimate - reach == pytest.approx(expected["low"], rel=CLOSE)
    assert found.estimate + reach == pytest.approx(expected["high"], rel=CLOSE)


@DESIGNS
@pytest.mark.parametrize(("name", "over", "under"), [("tested", "api.stu", "enroll"),
                                                     ("growth", "api00", "api99")])  # fmt: skip
def test_ratios(schools: Schools, name: str, over: str, under: str) -> None:
    expected = schools.numbers["ratio"][name]
    found = Ratio(schools[under]).linear(schools.sample, schools[over], Group())
    assert found.estimate == pytest.approx(expected["estimate"], rel=CLOSE)
    assert schools.se(found) == pytest.approx(expected["se"], rel=CLOSE)


@DESIGNS
@pytest.mark.parametrize("k", range(6))
def test_quantiles_and_woodruff_intervals(schools: Schools, k: int) -> None:
    expected, df, y = schools.numbers["quantile"][k], schools.numbers["df"], schools["api00"]
    (line,) = population_quantiles(schools.sample, y, [expected["at"]])
    assert line.estimate == expected["estimate"]
    below = (y <= line.estimate).astype(float)
    share = HajekMean().linear(schools.sample, below, Group())
    assert share.estimate == pytest.approx(expected["share"], rel=CLOSE)
    assert schools.se(share) == pytest.approx(expected["share_se"], rel=CLOSE)
    known, t = Distribution.of(y, schools.sample.weights), float(stdtrit(df, 0.975))
    ends = [known.inverse(share.estimate + sign * t * schools.se(share)) for sign in (-1, 1)]
    for got, name in zip(ends, ("low", "high"), strict=True):
        # a value of the data, so no tolerance; R has none where the share's interval leaves 0 to 1
        assert np.isnan(got) if expected[name] is None else got == expected[name]
    if expected["se"] is not None:
        assert (ends[1] - ends[0]) / (2 * t) == pytest.approx(expected["se"], rel=CLOSE)


def test_the_case_without_a_lower_limit_is_among_them() -> None:
    assert sum(q["low"] is None for name in R if name != "versions" for q in R[name]["quantile"])


@ONE_STAGE
def test_domain_means_and_differences_with_their_covariance(schools: Schools) -> None:
    y = schools["api00"]
    levels = {value: schools.level(value) for value in ("E", "H", "M")}
    for value, expected in schools.numbers["domain_mean"].items():
        found = HajekMean().linear(schools.sample, y, levels[value])
        assert found.estimate == pytest.approx(expected["estimate"], rel=CLOSE)
        assert schools.se(found) == pytest.approx(expected["se"], rel=CLOSE)
    for expected in schools.numbers["difference"]:
        sides = Contrast(levels[expected["first"]], levels[expected["second"]])
        found = Difference.between(HajekMean(), [sides]).linear(schools.sample, y, sides.both())
        assert found.estimate == pytest.approx(expected["estimate"], rel=CLOSE)
        assert schools.se(found) == pytest.approx(expected["se"], rel=CLOSE)


@ONE_STAGE
def test_totals_of_everyone_and_of_domains(schools: Schools) -> None:
    y, sample, n = schools["enroll"], schools.sample, schools.sample.clients
    for value, expected in [("all", schools.numbers["total"]),
                            *schools.numbers["domain_total"].items()]:  # fmt: skip
        inside = None if value == "all" else schools.level(value).inside
        group = Group(name=value, inside=inside, size=1000.0)  # any size: it cancels
        total = Total.over(HorvitzThompsonMean(), [group])
        found = total.linear(sample, y, group)
        assert found.estimate / schools.kappa == pytest.approx(expected["estimate"], rel=CLOSE)
        if schools.poisson:
            assert schools.se(found) == pytest.approx(expected["se"], rel=CLOSE)
            continue
        own = sample.influence(found.values[:, None])[:, 0] / schools.kappa
        about_mean = np.sqrt(n / (n - 1) * ((own - own.mean()) ** 2).sum())
        assert about_mean == pytest.approx(expected["se"], rel=CLOSE)


def test_the_difference_between_types_of_a_districts_schools_has_their_covariance() -> None:
    # districts have schools of several types: the sides of a difference share clients
    schools = Schools("clus1_replacement")
    y, sample = schools["api00"], schools.sample
    flags = {v: (schools.table["stype"] == v).to_numpy().astype(float) for v in ("E", "H")}
    means = {v: float(sample.weights * f @ y / (sample.weights @ f)) for v, f in flags.items()}
    u = {v: f * (y - means[v]) / (sample.weights @ f) for v, f in flags.items()}
    linear = Linear(means["E"] - means["H"], u["E"] - u["H"], np.zeros(sample.clients))
    (expected,) = [
        d for d in schools.numbers["difference"] if (d["first"], d["second"]) == ("E", "H")
    ]
    assert linear.estimate == pytest.approx(expected["estimate"], rel=CLOSE)
    assert schools.se(linear) == pytest.approx(expected["se"], rel=CLOSE)
    apart = [schools.se(Linear(0.0, u[v], linear.leverage)) for v in ("E", "H")]
    assert abs(np.hypot(apart[0], apart[1]) / expected["se"] - 1) > 0.05
