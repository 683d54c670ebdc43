"""Ratios, totals and differences of subgroups: more than means, with the same two-phase error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple, final

import numpy as np

from fedipw.errors import InputError
from fedipw.evaluation.estimators import (
    MEAN,
    SMALLEST_GROUP,
    Group,
    Linear,
    MeanEstimator,
)
from fedipw.evaluation.phases import client_sums
from fedipw.evaluation.sample import TwoPhase
from fedipw.numerics import BoolArray, FloatArray
from fedipw.numerics.checks import check_rows, some

RATIO: Final = "ratio"
TOTAL: Final = "total"
DIFFERENCE: Final = "difference"
REST: Final = "rest"  # each subgroup against all others together
PAIRS: Final = "pairs"  # each subgroup against each other one
CONTRASTS_MAX = 200  # differences of one column
_UNKNOWN: Final = "the size of the group in the population is not known"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ratio(MeanEstimator):
    r"""Total of the metric over the total of another, both over the same clients and rounds.

    .. math:: \hat Q = \frac{\sum w_{ir} D_i y_{ir}}{\sum w_{ir} D_i x_{ir}}, \qquad
       u_{ir} = \frac{D_i (y_{ir} - \hat Q x_{ir})}{\sum w_{ir} D_i x_{ir}} \qquad (E47)

    The population's errors per sample, say, if y counts a client's errors and x its samples. It is
    not the mean of the clients' own ratios. With ``counts``, (m,), :math:`D_i` is multiplied by
    them.

    Examples
    --------
    >>> from fedipw.evaluation.estimators import population_means
    >>> from fedipw.evaluation.phases import KnownEnrollment
    >>> phase = KnownEnrollment(weights=np.array([2.0, 3.0, 5.0]), population_size=10)
    >>> sample = TwoPhase(client=np.arange(3), round=np.zeros(3, dtype=int), prob=np.ones(3),
    ...                   rounds=1, enrollment=phase)
    >>> errors, samples = np.array([1.0, 4.0, 2.0]), np.array([10.0, 20.0, 40.0])
    >>> found, = population_means(sample, errors, [Ratio(samples)])
    >>> found.statistic, round(found.estimate, 4)  # 24 over 280
    ('ratio', 0.0857)
    """

    under: FloatArray  # x, (m,)
    counts: FloatArray | None = None  # (m,)
    name = "hajek"
    statistic = RATIO

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Return the estimate and u."""
        flags = group.flags(sample)
        check_rows(len(flags), under=self.under)
        if self.counts is not None:
            check_rows(len(flags), counts=self.counts)
            flags = flags * self.counts
        weights = sample.weights * flags
        total = float(weights @ self.under)
        if not total > 0.0:
            raise InputError(f"the denominator of the ratio adds up to {total:g}, not above 0")
        estimate = float(weights @ values) / total
        shares = client_sums(sample.client, weights * self.under / total, sample.clients)
        u = flags * (values - estimate * self.under) / total
        unit = float(weights.sum()) / total
        return Linear(estimate, u, shares, unit=unit, shares=shares)

    def part(self, chosen: BoolArray) -> Ratio:
        """Return the same for some of the replies, (m,)."""
        counts = None if self.counts is None else self.counts[chosen]
        return Ratio(self.under[chosen], counts)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Total(MeanEstimator):
    r"""Known size of the group times a mean over it.

    .. math:: \hat T = N_D\, \hat\mu, \qquad u^T_{ir} = N_D\, u_{ir} \qquad (E48)

    Over several rounds it is the total of one of them, on average. With Horvitz–Thompson's mean it
    is the weighted sum itself; with Hájek's and GREG's it is adjusted to the known size.

    Examples
    --------
    >>> from fedipw.evaluation.estimators import HajekMean, population_means
    >>> from fedipw.evaluation.phases import KnownEnrollment
    >>> phase = KnownEnrollment(weights=np.full(3, 4.0), population_size=15)
    >>> sample = TwoPhase(client=np.arange(3), round=np.zeros(3, dtype=int), prob=np.ones(3),
    ...                   rounds=1, enrollment=phase)
    >>> everyone = Group(size=15)
    >>> found, = population_means(sample, np.array([1.0, 2.0, 6.0]),
    ...                           [Total.over(HajekMean(), [everyone])], [everyone])
    >>> found.statistic, found.estimate
    ('total', 45.0)
    """

    mean: MeanEstimator
    sizes: Mapping[str, float | None]  # of the groups, by name
    statistic = TOTAL

    @classmethod
    def over(cls, mean: MeanEstimator, groups: Sequence[Group]) -> Total:
        """Return the totals of these groups by a mean."""
        return cls(mean, {group.name: group.size for group in groups})

    @property
    def name(self) -> str:
        """That of the mean."""
        return self.mean.name

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Return the estimate and u."""
        size = self.sizes.get(group.name)  # not that of the group: a jackknife makes it smaller
        if size is None:
            raise InputError(_UNKNOWN)
        found = self.mean.linear(sample, values, group)
        return Linear(
            size * found.estimate, size * found.values, found.leverage,
            unit=size * found.unit, shares=found.shares,
        )  # fmt: skip

    def part(self, chosen: BoolArray) -> Total:
        """Return the same for some of the replies, (m,)."""
        return Total(self.mean.part(chosen), self.sizes)


class Contrast(NamedTuple):
    """Two subgroups to be told apart."""

    first: Group
    second: Group

    @property
    def name(self) -> str:
        """Of the difference, in tables."""
        return f"{self.first.name} less {self.second.name}"

    def both(self) -> Group:
        """Return the clients, or the rounds, of either side: those a difference is from."""
        one, two = self
        inside, rounds = one.inside, one.rounds
        if one.inside is not None and two.inside is not None:
            inside = one.inside | two.inside
        if one.rounds is not None and two.rounds is not None:
            rounds = np.union1d(one.rounds, two.rounds)
        return Group(name=self.name, inside=inside, size=_sum(one.size, two.size), rounds=rounds)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Difference(MeanEstimator):
    r"""Difference of a statistic between two subgroups.

    .. math:: \hat d = \hat\theta_1 - \hat\theta_2, \qquad u_{ir} = u^{(1)}_{ir} - u^{(2)}_{ir}
       \qquad (E49)

    The variance (E23) of u holds the covariance of both sides: they share the models of both
    stages, the regression of a GREG mean, and, between rounds, the clients.

    Examples
    --------
    >>> from fedipw.evaluation.estimators import HajekMean, population_means
    >>> from fedipw.evaluation.phases import KnownEnrollment
    >>> phase = KnownEnrollment(weights=np.full(4, 4.0), population_size=16)
    >>> sample = TwoPhase(client=np.arange(4), round=np.zeros(4, dtype=int), prob=np.ones(4),
    ...                   rounds=1, enrollment=phase)
    >>> ios = np.array([True, True, False, False])
    >>> sides = Contrast(Group(name="ios", inside=ios), Group(name="android", inside=~ios))
    >>> found, = population_means(sample, np.array([1.0, 3.0, 6.0, 8.0]),
    ...                           [Difference.between(HajekMean(), [sides])], [sides.both()])
    >>> found.group, found.estimate
    ('ios less android', -5.0)
    """

    inner: MeanEstimator
    sides: Mapping[str, Contrast]  # by the name of the difference

    @classmethod
    def between(cls, inner: MeanEstimator, contrasts: Sequence[Contrast]) -> Difference:
        """Return the differences of these subgroups by an estimator."""
        return cls(inner, {sides.name: sides for sides in contrasts})

    @property
    def name(self) -> str:
        """That of the estimator."""
        return self.inner.name

    @property
    def statistic(self) -> str:
        """A difference, and of what unless it is of means."""
        kind = self.inner.statistic
        return DIFFERENCE if kind == MEAN else f"{DIFFERENCE} of {kind}s"

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Return the estimate and u."""
        sides = self.sides[group.name]
        whole = sides.both().size
        # a jackknife gives the group a smaller size: both sides stand for the same share of theirs
        share = 1.0 if whole is None or group.size is None else group.size / whole
        one, two = (self._side(sample, values, side.scaled(share)) for side in sides)
        return Linear(
            one.estimate - two.estimate,
            one.values - two.values,
            # exact where a client moves one side alone, or both alike as in a regression
            np.maximum(one.leverage, two.leverage),
            unit=max(one.unit, two.unit),
        )

    def _side(self, sample: TwoPhase, values: FloatArray, side: Group) -> Linear:
        clients = len(np.unique(sample.client[side.flags(sample) > 0.0]))
        if clients < SMALLEST_GROUP:
            raise InputError(f"{clients or 'no'} client of {side.name} replied: no difference")
        return self.inner.linear(sample, values, side)

    def part(self, chosen: BoolArray) -> Difference:
        """Return the same for some of the replies, (m,)."""
        return Difference(self.inner.part(chosen), self.sides)


def contrasts(
    columns: Mapping[str, Sequence[Group]], asked: Sequence[str], everyone: Group
) -> list[Contrast]:
    """Return the differences that are asked for, each once.

    Parameters
    ----------
    columns
        Subgroups by the column that tells them apart.
    asked
        ``rest``: each subgroup less all others of its column together. ``pairs``: each pair of a
        column. Or a subgroup, such as ``os=ios``: each other one of its column less it.
    everyone
        The population, for the size of the rest.

    Examples
    --------
    >>> ios = np.array([True, False, False])
    >>> groups = [Group(name="os = ios", inside=ios), Group(name="os = android", inside=~ios)]
    >>> [c.name for c in contrasts({"os": groups}, ["rest"], Group())]
    ['os = ios less the rest', 'os = android less the rest']
    >>> [c.name for c in contrasts({"os": groups}, ["os=ios"], Group())]
    ['os = android less os = ios']
    """
    if asked and not columns:
        raise InputError("A difference is one of subgroups: name a column to group by (--by).")
    found: dict[str, Contrast] = {}
    for kind in dict.fromkeys(asked):
        for made in _asked(columns, kind, everyone):
            found.setdefault(made.name, made)
    return list(found.values())


def _asked(
    columns: Mapping[str, Sequence[Group]], kind: str, everyone: Group
) -> Iterator[Contrast]:
    if kind not in (REST, PAIRS):
        plain = kind.replace(" ", "")
        near = [(c, g) for c, groups in columns.items() for g in groups
                if g.name.replace(" ", "") == plain]  # fmt: skip
        if not near:
            names = [group.name for groups in columns.values() for group in groups]
            raise InputError(
                f"There is no subgroup {kind!r} to take differences to: there are {some(names)}, "
                f"and {REST!r} and {PAIRS!r}."
            )
        for column, reference in near:
            yield from (Contrast(g, reference) for g in columns[column] if g is not reference)
        return
    for column, groups in columns.items():
        if len(groups) < 2:
            raise InputError(f"{column!r} has one level among the replies: no difference.")
        if kind == REST:
            yield from (Contrast(group, _rest(group, groups, everyone)) for group in groups)
            continue
        many = len(groups) * (len(groups) - 1) // 2
        if many > CONTRASTS_MAX:
            raise InputError(
                f"{column!r} has {many} pairs of levels, more than {CONTRASTS_MAX}: take "
                f"differences to one level, such as {groups[0].name!r}, or to the {REST!r}."
            )
        yield from (Contrast(one, two) for one, two in combinations(groups, 2))


def _rest(group: Group, groups: Sequence[Group], everyone: Group) -> Group:
    """Return all other clients, or all other rounds."""
    if group.rounds is not None:
        others = [g.rounds for g in groups if g is not group and g.rounds is not None]
        return Group(name="the rest", size=everyone.size, rounds=np.concatenate(others))
    assert group.inside is not None
    size = None if group.size is None else _sum(everyone.size, -group.size)
    return Group(name="the rest", inside=~group.inside, size=size)


def _sum(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one + two
