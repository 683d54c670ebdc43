"""How wrong weights can be, and how far a weighted metric moves, under unobserved selection."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from fedipw.errors import InputError
from fedipw.evaluation.phases import client_sums
from fedipw.numerics import CodeArray, FloatArray
from fedipw.numerics.checks import (
    LARGEST,
    check_finite,
    check_positive,
    check_probability,
    check_rows,
)

_LARGEST = 1e100  # weight of one stage; products of two and their sums stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightErrors:
    r"""Three sizes of the weight ratio's distance from a constant.

    .. math::
       \epsilon_{raw} = \max_i |\rho_i - 1|, \qquad
       \epsilon_{centred} = \frac{\rho_{max} - \rho_{min}}{\rho_{max} + \rho_{min}}, \qquad
       \epsilon_{rms} = \sqrt{\text{mean}\,(\rho_i/\bar\rho - 1)^2} \qquad (T3)

    A constant ratio only rescales the step, so the raw error can be large where nothing is biased;
    the centred and the mean-square errors then vanish. Bounds stated for the centred error hold
    with the server step multiplied by ``step_factor`` :math:`c = (\rho_{max} + \rho_{min})/2`, as
    long as :math:`c\gamma \ge 1` and :math:`p_{min}` bounds :math:`c\hat p` too.
    """

    raw: float
    centred: float
    rms: float
    step_factor: float


def sensitivity_ratios(prob: ArrayLike, odds_ratio: float) -> tuple[FloatArray, FloatArray]:
    r"""Return the least and largest rho if unobserved drivers move the odds by up to Lambda.

    Under the marginal sensitivity model (Tan 2006) the true :math:`1/\pi` lies in
    :math:`1 + (1/\hat\pi - 1)[1/\Lambda, \Lambda]`, so

    .. math:: \rho = \frac{\pi}{\hat\pi} \in
       \left[\frac{1}{\hat\pi + (1 - \hat\pi)\Lambda},\;
       \frac{1}{\hat\pi + (1 - \hat\pi)/\Lambda}\right] \qquad (T4)

    >>> low, high = sensitivity_ratios([0.5], 1.0)
    >>> float(low[0]), float(high[0])
    (1.0, 1.0)
    """
    if not (np.isfinite(odds_ratio) and odds_ratio >= 1.0):
        raise InputError(f"Lambda is an odds ratio of at least 1, not {odds_ratio!r}.")
    hat = check_probability(prob, "prob")
    return 1.0 / (hat + (1.0 - hat) * odds_ratio), 1.0 / (hat + (1.0 - hat) / odds_ratio)


def sensitivity_errors(prob: ArrayLike, odds_ratio: float) -> WeightErrors:
    """Return the largest errors the marginal sensitivity model allows at Lambda.

    Raw and centred errors are attained, the centred one by two different clients at opposite ends
    of their ranges; the root mean square is an upper bound, the largest coefficient of variation
    of numbers no further apart.
    """
    low, high = sensitivity_ratios(prob, odds_ratio)
    raw = max(float(high.max()) - 1.0, 1.0 - float(low.min()))
    if len(low) == 1:  # a single client has nobody to differ from
        return WeightErrors(raw=raw, centred=0.0, rms=0.0, step_factor=float(low[0] + high[0]) / 2)
    highest, lowest = np.argsort(high)[-2:], np.argsort(low)[:2]
    pairs = [(float(high[i]), float(low[j])) for i in highest for j in lowest if i != j]
    top, bottom = max(pairs, key=lambda pair: pair[0] / pair[1])
    return WeightErrors(
        raw=raw,
        centred=(top - bottom) / (top + bottom),
        rms=(top - bottom) / (2.0 * float(np.sqrt(top * bottom))),
        step_factor=0.5 * (top + bottom),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityBounds:
    """The least and largest value of a weighted mean that the odds ratios allow.

    Both are attained by some weights in the box (E1). They hold no sampling error: for an interval,
    redraw clients and take quantiles of the bounds.
    """

    low: float
    high: float
    estimate: float  # with the probabilities as given
    odds_ratio: float  # Lambda of enrollment
    participation_odds_ratio: float
    n_clients: int  # with an enrollment multiplier of their own
    n_rows: int


def sensitivity_bounds(
    outcome: ArrayLike,
    enrollment_prob: ArrayLike,
    participation_prob: ArrayLike,
    odds_ratio: float,
    *,
    participation_odds_ratio: float = 1.0,
    groups: ArrayLike | None = None,
    population_size: float | None = None,
    rounds: int = 1,
) -> SensitivityBounds:
    r"""Bounds of a weighted mean of replies under the marginal sensitivity model.

    The true inverse probabilities lie in a box around those given (Tan 2006): for row r of client i

    .. math:: w_{ir} = u_i v_{ir}, \qquad
       u_i \in 1 + \Big(\frac{1}{\hat\pi^{enr}_i} - 1\Big)\Big[\frac1\Lambda, \Lambda\Big], \qquad
       v_{ir} \in 1 + \Big(\frac{1}{\hat\pi^{part}_{ir}} - 1\Big)
       \Big[\frac{1}{\Lambda_p}, \Lambda_p\Big] \qquad (E1)

    A client enrolls once, so its rows share u; participation may err in every row by itself. The
    bounds of the Hájek mean, all rows pooled, are (Zhao, Small and Bhattacharya 2019)

    .. math:: \mu_{low} = \min_{u, v}\, \frac{\sum w_{ir}\, y_{ir}}{\sum w_{ir}}, \qquad
       \mu_{high} = \max_{u, v}\, \frac{\sum w_{ir}\, y_{ir}}{\sum w_{ir}} \qquad (E2)

    A mean of at most :math:`\theta` is possible if and only if :math:`g(\theta) \le 0`, with

    .. math:: g(\theta) = \min_{u, v} \sum_{i, r} w_{ir} (y_{ir} - \theta)
       = \sum_i \min_u u_i S_i(\theta), \qquad
       S_i(\theta) = \sum_r \min_v v_{ir} (y_{ir} - \theta) \qquad (E3)

    since u is positive: v takes its upper end in rows with :math:`y < \theta`, then u takes its
    upper end for clients with :math:`S_i < 0`, and both their lower ends elsewhere. Without errors
    of participation that is a threshold on the client's mean
    :math:`\sum_r v_{ir} y_{ir} / \sum_r v_{ir}`; without groups, on y. As g is concave, piecewise
    linear and decreasing, its root is the lower bound, and Newton's steps
    :math:`\theta \leftarrow \sum w y / \sum w`, with the weights of (E3) at :math:`\theta`, fall
    from the estimate to it in a few passes over the rows, exactly. The upper bound is minus the
    lower bound of :math:`-y`.

    Of the Horvitz–Thompson mean, given a population size and R rounds:

    .. math:: \mu_{low} = \frac{1}{N R} \sum_i \min_u u_i S_i(0) \qquad (E4)

    The box is all that is asked of the weights. That true weights also reproduce the population's
    covariates is not used, so the truth under the model can be narrower, never wider.

    Parameters
    ----------
    outcome
        y of the replies, for instance the loss of a client or 1 where it was served, (m,).
    enrollment_prob, participation_prob
        Of the two stages, each in (0, 1], (m,).
    odds_ratio
        Lambda, at least 1: by how much an unobserved driver may multiply or divide the odds of
        enrollment.
    participation_odds_ratio
        The same for participation.
    groups
        The client of each row, (m,), whose rows must then agree on the enrollment probability.
        Without it every row is a client of its own, which is never narrower.
    population_size
        N, for the Horvitz–Thompson mean in place of Hájek's.
    rounds
        R, the number of rounds the rows were pooled from; only Horvitz–Thompson depends on it.

    Examples
    --------
    >>> bounds = sensitivity_bounds([0.0, 1.0], [0.5, 0.5], [1.0, 1.0], odds_ratio=2.0)
    >>> bounds.low, bounds.estimate, bounds.high  # weights 3 and 1.5, 2 and 2, 1.5 and 3
    (0.333..., 0.5, 0.666...)
    """
    replies = _replies(
        outcome, enrollment_prob, participation_prob, groups, participation_odds_ratio,
        population_size, rounds,
    )  # fmt: skip
    return _bounds(replies, odds_ratio)


def odds_ratio_at(
    value: float,
    outcome: ArrayLike,
    enrollment_prob: ArrayLike,
    participation_prob: ArrayLike,
    *,
    participation_odds_ratio: float = 1.0,
    groups: ArrayLike | None = None,
    population_size: float | None = None,
    rounds: int = 1,
) -> float:
    r"""The least odds ratio of enrollment whose bounds include ``value``.

    With :math:`k_i = 1/\hat\pi^{enr}_i - 1` and the sums :math:`S_i(\theta)` of (E3) at the value
    :math:`\theta`, which do not depend on :math:`\Lambda`, the lower bound is at most
    :math:`\theta` once

    .. math:: a - b \Lambda + \frac{c}{\Lambda} \le 0, \qquad
       a = \sum_i S_i, \quad b = \sum_{S_i < 0} k_i |S_i|, \quad c = \sum_{S_i > 0} k_i S_i,
       \qquad \Lambda = \frac{a + \sqrt{a^2 + 4 b c}}{2 b} \qquad (E5)

    so no search is needed. The mirror image gives values above the estimate; for Horvitz–Thompson
    take :math:`S_i(0)` and :math:`a = \sum_i S_i(0) - N R \theta`. A conclusion that holds on one
    side of ``value`` survives unobserved drivers of enrollment weaker than this;
    :func:`fedipw.lab.theory.sensitivity_errors` turns the odds ratio into an error of the weights.

    Parameters
    ----------
    value
        Where the conclusion would change.
    outcome, enrollment_prob, participation_prob, participation_odds_ratio, groups
        As in :func:`sensitivity_bounds`.
    population_size, rounds
        As there.

    Returns
    -------
    float
        1 if the bounds include the value without any error of enrollment, ``inf`` if they never
        do: the Hájek mean cannot leave the range of the outcomes.

    Examples
    --------
    >>> odds_ratio_at(0.25, [0.0, 1.0], [0.5, 0.5], [1.0, 1.0])  # weights 4 and 4/3
    3.0
    >>> odds_ratio_at(-1.0, [0.0, 1.0], [0.5, 0.5], [1.0, 1.0])
    inf
    """
    if not abs(value) <= LARGEST:
        raise InputError(
            f"The value to be reached must be finite, {LARGEST:g} at most, not {value!r}."
        )
    replies = _replies(
        outcome, enrollment_prob, participation_prob, groups, participation_odds_ratio,
        population_size, rounds,
    )  # fmt: skip
    bounds = _bounds(replies, 1.0)
    if bounds.low <= value <= bounds.high:
        return 1.0
    if value > bounds.high:
        replies, value = replies.mirrored(), -value
    return max(1.0, _falling_root(replies, float(value)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Replies:
    """Checked replies and the box of their participation; row r is of client ``client[r]``."""

    outcome: FloatArray  # (m,)
    origin: float  # their median
    client: CodeArray  # (m,), 0 to n - 1
    enrollment_prob: FloatArray  # (n,)
    participation: FloatArray  # (m,) 1/probability as given
    participation_low: FloatArray  # (m,)
    participation_high: FloatArray  # (m,)
    participation_odds_ratio: float
    size: float | None  # N R for Horvitz–Thompson

    def least_sums(self, centre: float) -> tuple[FloatArray, FloatArray]:
        """S (E3), (n,), and the participation weights that attain it, (m,).

        At ``centre`` for Hájek and at 0 for Horvitz–Thompson, whose weights are not divided by
        their sum.
        """
        above = self.outcome - centre if self.size is None else self.outcome
        weights = np.where(above < 0.0, self.participation_high, self.participation_low)
        return self.client_sums(weights * above), weights

    def client_sums(self, values: FloatArray) -> FloatArray:
        return client_sums(self.client, values, len(self.enrollment_prob))

    def mean(self, enrollment: FloatArray, participation: FloatArray) -> float:
        """Weighted mean of the outcomes; about the origin, so that equal ones give themselves."""
        if self.size is not None:
            sums = self.client_sums(participation * self.outcome)
            return float((enrollment * sums).sum()) / self.size
        weights = enrollment[self.client] * participation
        return self.origin + float((weights * (self.outcome - self.origin)).sum() / weights.sum())

    def mirrored(self) -> _Replies:
        return replace(self, outcome=-self.outcome, origin=-self.origin)


def _replies(  # noqa: PLR0917
    outcome: ArrayLike,
    enrollment_prob: ArrayLike,
    participation_prob: ArrayLike,
    groups: ArrayLike | None,
    participation_odds_ratio: float,
    population_size: float | None,
    rounds: int,
) -> _Replies:
    y = np.asarray(outcome, dtype=np.float64)
    enrollment = check_probability(enrollment_prob, "enrollment_prob")
    participation = check_probability(participation_prob, "participation_prob")
    if y.ndim != 1 or enrollment.ndim != 1 or participation.ndim != 1:
        raise InputError("Outcomes and probabilities must have one axis: a row for each reply.")
    if len(y) == 0:
        raise InputError("There is no reply to take a mean of.")
    check_rows(len(y), enrollment_prob=enrollment, participation_prob=participation)
    check_finite(y[:, None], ["outcome"], "Replies")
    client: CodeArray = np.arange(len(y))
    if groups is not None:
        client, enrollment = _clients(np.asarray(groups), enrollment)
    low, high = _inverse_box(participation, participation_odds_ratio)
    size = None
    if population_size is not None:
        size = check_positive(population_size, "population_size") * check_positive(rounds, "rounds")
    return _Replies(
        outcome=y,
        origin=float(np.median(y)),
        client=client,
        enrollment_prob=enrollment,
        participation=_inverse_box(participation, 1.0)[0],
        participation_low=low,
        participation_high=high,
        participation_odds_ratio=participation_odds_ratio,
        size=size,
    )


def _clients(groups: np.ndarray, enrollment_prob: FloatArray) -> tuple[CodeArray, FloatArray]:
    """Code of each row's client, (m,), and the clients' enrollment probabilities, (n,)."""
    if groups.ndim != 1:
        raise InputError("groups must have one axis: the client of each row.")
    check_rows(len(enrollment_prob), groups=groups)
    names, first, client = np.unique(groups, return_index=True, return_inverse=True)
    prob = enrollment_prob[first]
    differ = np.flatnonzero(prob[client] != enrollment_prob)
    if differ.size:
        row = int(differ[0])
        raise InputError(
            f"{differ.size} rows differ in enrollment_prob from the first row of their client (row "
            f"{row}, client {names[client[row]]}: {enrollment_prob[row]:.6g} and "
            f"{prob[client[row]]:.6g}). A client enrolls once: give all its rows one probability."
        )
    return client, prob


def _inverse_box(prob: FloatArray, odds_ratio: float) -> tuple[FloatArray, FloatArray]:
    """Least and largest 1/probability (E1), from the ratios of (T4)."""
    least, largest = sensitivity_ratios(prob, odds_ratio)
    with np.errstate(over="ignore"):
        low, high = 1.0 / (prob * largest), 1.0 / (prob * least)
    if not high.max() < _LARGEST:
        raise InputError(
            f"An odds ratio of {odds_ratio:g} on probabilities down to {prob.min():g} makes "
            f"weights above {_LARGEST:g}, beyond what floating point can sum: lower it."
        )
    return low, high


def _bounds(replies: _Replies, odds_ratio: float) -> SensitivityBounds:
    """Both bounds and the estimate, all from the same sums so that no error means no width."""
    box = _inverse_box(replies.enrollment_prob, odds_ratio)
    given = _inverse_box(replies.enrollment_prob, 1.0)[0]
    estimate = replies.mean(given, replies.participation)
    return SensitivityBounds(
        low=_lowest_mean(replies, box, estimate),
        high=-_lowest_mean(replies.mirrored(), box, -estimate),
        estimate=estimate,
        odds_ratio=odds_ratio,
        participation_odds_ratio=replies.participation_odds_ratio,
        n_clients=len(given),
        n_rows=len(replies.outcome),
    )


def _lowest_mean(
    replies: _Replies, enrollment: tuple[FloatArray, FloatArray], start: float
) -> float:
    """The lower bound: (E4) at once, (E2) by Newton's steps on (E3) from the estimate."""
    low, high = enrollment
    best = start
    while True:
        sums, participation = replies.least_sums(best)
        mean = replies.mean(np.where(sums < 0.0, high, low), participation)
        if not mean < best:  # the same weights again: the root
            return best
        best = mean


def _falling_root(replies: _Replies, value: float) -> float:
    """Lambda at which the lower bound falls to ``value`` (E5), in its form without cancellation."""
    sums, _ = replies.least_sums(value)
    moved = (1.0 / replies.enrollment_prob - 1.0) * sums
    a = float(sums.sum()) - (0.0 if replies.size is None else replies.size * value)
    b, c = -float(moved[sums < 0.0].sum()), float(moved[sums > 0.0].sum())
    root = math.hypot(a, 2.0 * math.sqrt(b) * math.sqrt(c))
    if a > 0.0:
        return (a + root) / (2.0 * b) if b > 0.0 else math.inf
    return 2.0 * c / (root - a) if root > a else math.inf
