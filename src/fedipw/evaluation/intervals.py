r"""Intervals of a mean: their kinds, which one is used when, and what they cannot promise.

Kinds are objects, named in :data:`INTERVALS`. :class:`Automatic` chooses: for a metric of 0 and 1
an interval inside [0, 1] (:class:`Jeffreys`), else Student's t where the estimate is about
symmetric, and a bootstrap over clients where it is skewed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, final

import numpy as np
from scipy.special import betaincinv, expit, logit, ndtri, stdtrit

from fedipw.errors import InputError
from fedipw.evaluation.bootstrap import REPLICATES, studentised_replicates
from fedipw.numerics import FloatArray

SKEWED = 0.1  # skewness of an estimate, from which a bootstrap is used
TOO_SKEWED = 0.2  # from which Student's t would miss on one side about 1.7 times too often
FEW_REPLIED = 10  # clients, or clusters, below which resamples hold too few of them
FEW_EVENTS = 10  # clients, or clusters, with an event, and without
FEW_EFFECTIVE = 20.0  # effective number of clients, or clusters, that replied
MOST_OF_VARIANCE = 0.5  # share of one client, or cluster
MOST = 1_000_000  # resamples of a bootstrap
_LIMIT = 1e12  # sum of a beta distribution's parameters from which it is normal
EVENTS_OF_RATE = 10.0  # events at which the variance counts as much as the rate's own (E38)


class Ends(NamedTuple):
    """An interval, and which kind it is."""

    low: float
    high: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """An estimate, its error, and what the error is made of; units are clients or clusters."""

    estimate: float
    se: float
    freedom: float  # degrees of freedom of the standard error
    confidence: float
    replied: int  # units of the group that replied
    effective: float  # effective number of them
    units: FloatArray  # (C,) what each unit adds to the error
    shares: FloatArray | None = None  # (C,) of the sum that the mean divides by
    events: int | None = None  # units with a 1, or with a 0 if fewer; none if values are others
    clustered: bool = False

    @property
    def skewness(self) -> float:
        r"""Skewness of the estimate, as its units tell it.

        .. math:: \gamma = \frac{\sum_c d_c^3}{\left(\sum_c d_c^2\right)^{3/2}} \qquad (E41)

        That of one unit over the root of their number, if all are alike.
        """
        largest = float(np.abs(self.units).max(initial=0.0))
        if not largest > 0.0:
            return 0.0
        d = self.units / largest  # cubes of what is very small or large
        return float((d**3).sum() / (d**2).sum() ** 1.5)

    @property
    def largest(self) -> float:
        """Largest share of one unit in the sum of squares."""
        largest = float(np.abs(self.units).max(initial=0.0))
        if not largest > 0.0:
            return 0.0
        return float(1.0 / ((self.units / largest) ** 2).sum())

    @property
    def alpha(self) -> float:
        """Probability of a miss on either side together."""
        return 1.0 - self.confidence

    def proportion(self, kind: str) -> float:
        """Return the estimate, or raise if it is no share of 0 and 1."""
        if self.events is None:
            raise InputError(f"{kind} intervals are for metrics of 0 and 1 alone: use auto or t")
        if not 0.0 <= self.estimate <= 1.0:
            raise InputError(f"the estimate {self.estimate:.4g} of a share lies outside 0 to 1")
        return self.estimate


class Interval(ABC):
    """A way from an estimate and its error to an interval."""

    name: ClassVar[str]
    of_shares: ClassVar[bool] = False  # whether it is for metrics of 0 and 1 alone

    @abstractmethod
    def ends(self, known: Evidence) -> Ends:
        """Return the interval; raise InputError where there is none of this kind."""

    def is_share(self, values: FloatArray) -> bool:
        """Return whether a metric is a share, found by its values of 0 and 1 alone, (m,)."""
        share = bool(np.isin(values, (0.0, 1.0)).all())
        if self.of_shares and not share:
            raise InputError(
                f"{self.name} intervals are for metrics of 0 and 1; this one has other values: use "
                "auto, t or bootstrap, or say that it is a share (proportion)."
            )
        return share

    def resampled(self, replicates: int, seed: int) -> Interval:
        """Return the same with so many replicates, where it has some."""
        del replicates, seed
        return self


@final
@dataclass(frozen=True, slots=True)
class StudentT(Interval):
    """Symmetric about the estimate, by Student's t with the degrees of freedom (E29).

    >>> known = Evidence(estimate=1.0, se=0.5, freedom=1e9, confidence=0.95, replied=9,
    ...                  effective=9.0, units=np.ones(9))
    >>> [round(end, 4) for end in StudentT().ends(known)[:2]]
    [0.02, 1.98]
    """

    name = "t"

    def ends(self, known: Evidence) -> Ends:
        """Return estimate less and plus t se."""
        reach = _t(known.freedom, 0.5 + 0.5 * known.confidence) * known.se
        return Ends(known.estimate - reach, known.estimate + reach, self.name)


@final
@dataclass(frozen=True, slots=True)
class Logit(Interval):
    r"""Symmetric on the scale of log odds, for metrics of 0 and 1.

    .. math:: \text{logit}\, \hat p \pm t_\nu\, \frac{\widehat{se}}{\hat p (1 - \hat p)}
       \qquad (E37)

    R's ``svyciprop(method = "logit")``, given the same standard error and degrees of freedom. With
    no event, or nothing else, log odds are infinite: the interval is then that of :class:`Beta`.
    """

    name = "logit"
    of_shares = True

    def ends(self, known: Evidence) -> Ends:
        """Return the ends of (E37)."""
        p = known.proportion(self.name)
        if p in (0.0, 1.0):
            return Beta().ends(known)
        low, high = logit_ends(p, known.se, known.freedom, known.confidence)
        return Ends(min(low, p), max(high, p), self.name)  # log odds and back are not exact


def logit_ends(p: float, se: float, freedom: float, confidence: float) -> tuple[float, float]:
    """Return the ends of (E37) for a share strictly between 0 and 1.

    >>> [round(end, 4) for end in logit_ends(0.5, 0.1, 30.0, 0.95)]
    [0.3064, 0.6936]
    """
    reach = _t(freedom, 0.5 + 0.5 * confidence) * se / (p * (1.0 - p))
    low, high = float(expit(logit(p) - reach)), float(expit(logit(p) + reach))
    return min(low, p), max(high, p)  # it holds p, but for rounding where se is tiny


@final
@dataclass(frozen=True, slots=True)
class Beta(Interval):
    r"""Korn and Graubard's interval: Clopper and Pearson's on the effective number.

    .. math:: n^* = \frac{\hat p (1 - \hat p)}{\hat V}
       \Big(\frac{t_{n - 1}}{t_\nu}\Big)^2, \qquad
       \big[B_{\alpha/2}(n^* \hat p,\, n^* (1 - \hat p) + 1),\;
       B_{1 - \alpha/2}(n^* \hat p + 1,\, n^* (1 - \hat p))\big] \qquad (E42)

    with quantiles B of beta distributions: R's ``svyciprop(method = "beta")``, given the same
    variance, number n of respondents and degrees of freedom. With no event, or nothing else, the
    variance says nothing, and n* is the effective number of respondents.
    """

    name = "beta"
    of_shares = True

    def ends(self, known: Evidence) -> Ends:
        """Return the ends of (E42)."""
        p = known.proportion(self.name)
        if p in (0.0, 1.0):
            return Ends(*_clopper_pearson(p, known.effective, known.alpha), self.name)
        found = beta_ends(p, known.se**2, known.replied, known.freedom, known.confidence)
        return Ends(*found, self.name)


def beta_ends(
    p: float, variance: float, replied: int, freedom: float, confidence: float
) -> tuple[float, float]:
    """Return the ends of (E42) for a share strictly between 0 and 1.

    >>> [round(end, 4) for end in beta_ends(0.3, 0.3 * 0.7 / 10, 10, 9.0, 0.95)]  # 3 of 10
    [0.0667, 0.6525]
    """
    if not variance > 0.0:  # everybody was seen
        return p, p
    upper = 0.5 + 0.5 * confidence
    number = p * (1.0 - p) / variance * (_t(replied - 1.0, upper) / _t(freedom, upper)) ** 2
    return _clopper_pearson(p, number, 1.0 - confidence)


def _clopper_pearson(p: float, number: float, alpha: float) -> tuple[float, float]:
    some, others = number * p, number * (1.0 - p)
    low = _beta_quantile(some, others + 1.0, 0.5 * alpha) if some > 0.0 else 0.0
    high = _beta_quantile(some + 1.0, others, 1.0 - 0.5 * alpha) if others > 0.0 else 1.0
    return min(low, p), max(high, p)  # it holds p, but for rounding at large numbers


def _beta_quantile(a: float, b: float, at: float) -> float:
    """Return a quantile of a beta distribution.

    Beyond a + b of 1e12 by its normal limit, where SciPy's search may end in NaN: the terms left
    out, of the order 1/(a + b), are below 1e-12.

    >>> round(_beta_quantile(4e11, 6e11, 0.975), 9), round(_beta_quantile(4e12, 6e12, 0.975), 9)
    (0.40000096, 0.400000304)
    """
    total = a + b
    if total < _LIMIT:
        return float(betaincinv(a, b, at))
    spread = np.sqrt(a / total * (b / total) / total)
    return float(np.clip(a / total + ndtri(at) * spread, 0.0, 1.0))


@final
@dataclass(frozen=True, slots=True)
class Jeffreys(Interval):
    r"""Jeffreys' interval on an effective number that few events cannot upset.

    A variance from a handful of events is hardly known: it is far too small whenever the events
    fell to clients with small weights. It is drawn towards that of the same share if weights had
    nothing to do with events, :math:`\hat p (1 - \hat p) / n_{eff}` with the effective number of
    respondents, the more so the fewer the k events (or non-events):

    .. math:: \frac{1}{n^*} = \frac{k}{k + 10} \frac{\hat V}{\hat p (1 - \hat p)}
       + \frac{10}{k + 10} \frac{1}{n_{eff}}, \qquad
       B_{\alpha/2},\, B_{1 - \alpha/2}\; \text{of}\;
       \text{Beta}(n^* \hat p + \tfrac12,\, n^* (1 - \hat p) + \tfrac12) \qquad (E38)

    With no event the lower end is 0, with nothing else the upper end is 1.

    >>> known = Evidence(estimate=0.0, se=0.0, freedom=1.0, confidence=0.95, replied=30,
    ...                  effective=20.0, units=np.zeros(30), events=0)
    >>> low, high, kind = Jeffreys().ends(known)
    >>> low, round(high, 4), kind
    (0.0, 0.1166, 'jeffreys')
    """

    name = "jeffreys"
    of_shares = True

    def ends(self, known: Evidence) -> Ends:
        """Return the ends of (E38)."""
        p, events = known.proportion(self.name), known.events or 0
        each = p * (1.0 - p)
        if each > 0.0 and not known.se > 0.0:  # everybody was seen
            return Ends(p, p, self.name)
        inverse = 1.0 / known.effective
        if each > 0.0:
            known_by = events / (events + EVENTS_OF_RATE)
            inverse = known_by * known.se**2 / each + (1.0 - known_by) * inverse
        number = 1.0 / inverse
        shape = number * p + 0.5, number * (1.0 - p) + 0.5
        low, high = (_beta_quantile(*shape, at) for at in (0.5 * known.alpha,
                                                           1.0 - 0.5 * known.alpha))  # fmt: skip
        # an estimate near an end would lie outside by a hair
        low, high = min(low, p), max(high, p)
        return Ends(0.0 if p == 0.0 else low, 1.0 if p == 1.0 else high, self.name)


@final
@dataclass(frozen=True, slots=True)
class BootstrapT(Interval):
    r"""Percentile-t of a bootstrap over clients or clusters, whose ends may lie apart unequally.

    .. math:: \big[\hat\mu - c\, t^*_{1 - \alpha/2}\, \widehat{se},\;
       \hat\mu - c\, t^*_{\alpha/2}\, \widehat{se}\big], \qquad
       c = t_\nu / z \qquad (E40)

    with the quantiles of (E39), of Student's t (E29) and of a normal distribution. The bootstrap
    sees the skewness that the sample has, and not the clients that nobody saw: quantiles are raised
    as Student's t raises those of a normal distribution. Coverage is measured in the docs.
    """

    replicates: int = REPLICATES
    seed: int = 0
    name = "bootstrap"

    def __post_init__(self) -> None:
        if not 1 <= self.replicates <= MOST:
            raise InputError(f"A bootstrap takes 1 to {MOST} resamples, not {self.replicates}.")

    def resampled(self, replicates: int, seed: int) -> BootstrapT:
        """Return it with so many replicates."""
        return BootstrapT(replicates, seed)

    def ends(self, known: Evidence) -> Ends:
        """Return the ends of (E40)."""
        if self.replicates < 20.0 / known.alpha:
            raise InputError(
                f"{self.replicates} replicates of a bootstrap are too few for a confidence of "
                f"{known.confidence:g}: use {int(np.ceil(20.0 / known.alpha))} or more"
            )
        squares = float((known.units**2).sum())
        if not (known.se > 0.0 and squares > 0.0):
            return StudentT().ends(known)
        t = studentised_replicates(
            known.units, known.shares, replicates=self.replicates,
            rng=np.random.default_rng(self.seed), kept=min(known.se**2 / squares, 1.0),
        )  # fmt: skip
        t = t[~np.isnan(t)]
        if len(t) < 0.99 * self.replicates:
            raise InputError("more than one in 100 resamples have no estimate: use t")
        upper = 0.5 + 0.5 * known.confidence
        raised = _t(known.freedom, upper) / float(ndtri(upper))
        low = raised * float(np.quantile(t, 1.0 - upper, method="lower"))
        high = raised * float(np.quantile(t, upper, method="higher"))
        if not (np.isfinite(low) and np.isfinite(high)):
            raise InputError("too many resamples of a bootstrap have no variance: use t")
        return Ends(known.estimate - high * known.se, known.estimate - low * known.se, self.name)


@final
@dataclass(frozen=True, slots=True)
class Automatic(Interval):
    """The recommended interval.

    :class:`Jeffreys` for metrics of 0 and 1; else :class:`BootstrapT` where the estimate's skewness
    (E41) is beyond 0.1 and ten clients or clusters replied, and :class:`StudentT` elsewhere.
    """

    replicates: int = REPLICATES
    seed: int = 0
    name = "auto"

    def __post_init__(self) -> None:
        BootstrapT(self.replicates, self.seed)  # the same settings

    def resampled(self, replicates: int, seed: int) -> Automatic:
        """Return it with so many replicates."""
        return Automatic(replicates, seed)

    def ends(self, known: Evidence) -> Ends:
        """Return those of the kind that suits."""
        if known.events is not None:
            return Jeffreys().ends(known)
        if abs(known.skewness) <= SKEWED or known.replied < FEW_REPLIED:
            return StudentT().ends(known)
        return BootstrapT(self.replicates, self.seed).ends(known)


@final
@dataclass(frozen=True, slots=True)
class Said(Interval):
    """An interval of a metric that is said to be a share, with values from 0 to 1, or not to be."""

    kind: Interval
    share: bool
    name = "said"

    def ends(self, known: Evidence) -> Ends:
        """Return those of the kind."""
        return self.kind.ends(known)

    def is_share(self, values: FloatArray) -> bool:
        """Return what was said, or raise if values (m,) or the kind contradict it."""
        if self.share and not ((values >= 0.0) & (values <= 1.0)).all():
            raise InputError(
                f"A share has values from 0 to 1; these run from {values.min():.6g} to "
                f"{values.max():.6g}."
            )
        if self.kind.of_shares and not self.share:
            raise InputError(
                f"{self.kind.name} intervals are for shares: use auto, t or bootstrap."
            )
        return self.share


_KINDS: Final = (Automatic(), StudentT(), Logit(), Beta(), Jeffreys(), BootstrapT())
INTERVALS: Final[dict[str, Interval]] = {kind.name: kind for kind in _KINDS}


def interval_named(
    name: str,
    *,
    replicates: int = REPLICATES,
    proportion: bool | None = None,
    seed: int = 0,
) -> Interval:
    """Return a kind of interval by its name.

    Parameters
    ----------
    name
        One of :data:`INTERVALS`.
    replicates, seed
        Of a bootstrap, where it comes to one.
    proportion
        Whether the metric is a share, with values from 0 to 1; found by default, if its values are
        0 and 1 alone.

    Examples
    --------
    >>> interval_named("bootstrap", replicates=2000)
    BootstrapT(replicates=2000, seed=0)
    """
    if name not in INTERVALS:
        raise InputError(f"There is no interval {name!r}; there are {', '.join(INTERVALS)}.")
    if seed < 0:
        raise InputError(f"A seed is 0 or more, not {seed}.")
    kind = INTERVALS[name].resampled(replicates, seed)
    return kind if proportion is None else Said(kind, proportion)


def cautions(known: Evidence) -> Iterator[str]:
    """Yield why an interval cannot promise its coverage, by stated rules.

    Fewer than 10 clients with an event, or without one; an effective number below 20; skewness
    (E41) beyond 0.2; one client with more than half of the variance. With clusters, clusters take
    the place of clients.

    >>> few = Evidence(estimate=0.1, se=0.1, freedom=3.0, confidence=0.95, replied=12,
    ...                effective=8.0, units=np.array([1.0, -1.0, 1.0, -1.0]), events=2)
    >>> list(cautions(few))
    ['2 clients with the rarer of 0 and 1, fewer than 10', 'an effective number of 8.0 clients...
    """
    who = "cluster" if known.clustered else "client"
    if known.events is not None and known.events < FEW_EVENTS:
        many = "" if known.events == 1 else "s"
        yield f"{known.events} {who}{many} with the rarer of 0 and 1, fewer than {FEW_EVENTS}"
    if known.effective < FEW_EFFECTIVE:
        yield f"an effective number of {known.effective:.1f} {who}s, below {FEW_EFFECTIVE:g}"
    if known.events is None and abs(known.skewness) > TOO_SKEWED:
        yield f"skewness {known.skewness:.2f} of the estimate, beyond {TOO_SKEWED:g}"
    if known.largest > MOST_OF_VARIANCE:
        yield f"one {who} with {known.largest:.0%} of the variance"


def _t(freedom: float, upper: float) -> float:
    return float(stdtrit(max(freedom, 1.0), upper))
