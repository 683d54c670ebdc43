r"""Augmented aggregation: updates regressed on balance columns, weights left with the residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.combining.distinct import DistinctClients
from fedipw.combining.reliance import reliance_on_enrollment, reliance_on_regression
from fedipw.errors import InputError
from fedipw.weighting.pipeline import TIMES_EQUAL_SHARE, Regression
from fedipw.weighting.weigher import ClientNumbers

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from fedipw.numerics import FloatArray, IdArray
    from fedipw.weighting.weigher import RoundWeights

_LEAST_FREEDOM = 0.2  # of the residuals, whatever the regression uses


@final
@dataclass(frozen=True, slots=True, eq=False)
class RegressionRound:
    """A round of a regression: parameters are corrected and learnt from in any pieces, once.

    Pieces may be learnt from by several threads at a time.
    """

    rule: UpdateRegression
    weights: FloatArray  # of the sums to learn from, (k, m): of b Delta', and for the enrolled
    coefficients: FloatArray  # of C in the correction, (q + 1,)
    after: _Moments  # when the round is closed
    clients: ClientNumbers
    found: dict[int, tuple[float, FloatArray]] = field(default_factory=dict)  # by piece

    def correction(self, piece: slice) -> FloatArray:
        r"""Return :math:`(\mu_\Lambda - \sum_S v_i b_i)' \beta` of some parameters."""
        cross = self.rule.cross
        out: FloatArray = self.coefficients.astype(cross.dtype) @ cross[:, piece]
        return out

    def learn(self, piece: slice, sums: FloatArray) -> None:
        """Take the weighted sums of some parameters of the updates, (k, p)."""
        cross, decay = self.rule.cross[:, piece], self.rule.settings.decay
        cross *= decay
        cross += sums[: len(cross)]
        change = 0.0
        if self.rule.plain is not None:
            plain = self.rule.plain[piece]
            plain *= decay
            plain += sums[-1]
            apart = cross[0] / self.after.gram[0, 0] - plain / self.after.plain
            change = float(apart @ apart)
        self.found[piece.start or 0] = change, (cross @ cross.T).astype(np.float64)

    def close(self, squares: FloatArray | None = None) -> None:
        r"""End the round, after all parameters; ``squares`` (m,) are :math:`|\Delta_i|^2`.

        An adaptive regression needs them; without them any other relies on itself wholly.
        """
        self.rule.moments = self.after
        if squares is None:
            if self.rule.plain is not None:
                raise InputError("An adaptive regression needs the squared norms of updates.")
            return
        decay = self.rule.settings.decay
        self.rule.squares = decay * self.rule.squares + float(self.weights[0] @ squares)
        parts = [self.found[start] for start in sorted(self.found)]
        correction = sum(part for part, _ in parts)
        products: FloatArray = sum((part for _, part in parts), np.zeros_like(self.after.gram))
        self.rule.rely(correction, products, self.clients)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """What is remembered beside sums of updates."""

    gram: FloatArray  # A, (q + 1, q + 1)
    replies: float = 0.0  # M, earlier ones less
    rounds: float = 0.0
    plain: float = 0.0  # sum of weights for the enrolled alone
    seen: DistinctClients = field(default_factory=DistinctClients)  # of all rounds

    def next(self, decay: float, sums: RegressionSums) -> _Moments:
        """Return them after a round with these sums."""
        return _Moments(
            decay * self.gram + sums.gram,
            decay * self.replies + sums.replies,
            decay * self.rounds + 1.0,
            decay * self.plain + sums.plain,
            self.seen if sums.unit_ids is None else self.seen.after(sums.unit_ids),
        )

    def among(self, clients: ClientNumbers) -> ClientNumbers:
        """Return the numbers of enrolled clients for those of them that have replied so far.

        All of them count where it is not known who replied.
        """
        seen = self.seen.number
        share = min(1.0, seen / clients.enrolled) if seen else 1.0
        return ClientNumbers(
            share * clients.enrolled, share * clients.effective, share * clients.guarded
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """How well the regression fits what is remembered."""

    residual: float  # s^2, what it leaves of the squared norm of an update
    products: FloatArray  # C C', (q + 1, q + 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegressionSums:
    """What a regression needs of a round's replies beside their updates, b = (1, columns)."""

    mean: FloatArray  # sum of v b over the replies, (q + 1,)
    gram: FloatArray  # sum of u b b', (q + 1, q + 1)
    replies: int
    plain: float = 0.0  # sum of weights for the enrolled alone
    reliance: float = 1.0
    unit_ids: IdArray | None = None  # (m,) whose replies they are, where that is known


@final
class UpdateRegression:
    r"""The population mean of what balance columns predict of updates, and weighted residuals.

    .. math::
       \beta_{r-1} &= (A_{r-1} + A_{r-1}[0, 0]\, \text{diag}(0, \rho_1, \ldots, \rho_q))^{-1}
       C_{r-1}, \qquad \rho_j = (k / n)^2 + c\, q / M + [j > q_0]\, c'\, q / n, \\
       \text{step}_r &= \sum_{S_r} v_i \Delta_i
       + \Big(\mu - \sum_{S_r} v_i b_i\Big)' \beta_{r-1}, \\
       A_r &= g A_{r-1} + \sum_{S_r} u_i b_i b_i', \qquad
       C_r = g C_{r-1} + \sum_{S_r} u_i b_i \Delta_i' \qquad (O20)

    b is (1, standardised moments), so :math:`\mu = (1, 0, \ldots, 0)`; n is the effective number
    of enrolled clients, times the share of them that has replied so far (O23), M the replies
    remembered, q the moments in use and :math:`q_0` those that are covariates: rounds repeat
    clients, so squares and products are held back by clients, not by replies. The step is by the
    round's weights v, normalised and guarded; what is learnt by weights u that are neither, so
    that a heavy reply among few counts as it should over all rounds, but at most
    :math:`\max(8, 5/m)` times what a round has weighed so far. The coefficients come from earlier
    rounds: the step is consistent if either the weights or the regression is right, and its noise
    is that of the residuals. It is linear in updates: q + 2 weighted sums of the same replies, none
    of them kept, and q + 1 arrays of the model's size for all clients together.

    Where squared norms of updates are known, the correction is multiplied by :math:`\kappa`, which
    is small where it is hardly more than noise, see :func:`reliance_on_regression`.

    An adaptive regression keeps one array more and finds out how far enrollment weights are worth
    their noise, see :func:`reliance_on_enrollment`. With a reliance :math:`\Lambda` the mean
    aimed at is :math:`\mu_\Lambda = \Lambda \mu + (1 - \Lambda) \bar b_E`, between that of the
    population and that of the enrolled.

    Parameters
    ----------
    size
        Number of parameters of the model, P.
    moments
        Number of balance columns, q.
    main
        How many of them, the first, are covariates themselves: squares and products after them are
        used only when enough replies are remembered.
    settings
        Decay, ridge and the replies behind each moment.
    dtype
        Of the arrays that are kept.

    Examples
    --------
    >>> from fedipw.selection.participation import Source
    >>> from fedipw.weighting.weigher import EnrollmentState, RoundWeights
    >>> rng, equal, ids = np.random.default_rng(0), np.full(20, 0.05), np.arange(20)
    >>> everybody = EnrollmentState(unit_ids=ids, sample_counts=ids + 1, enrolled=ids >= 0,
    ...                             prob=np.ones(20), population_size=20.0)
    >>> rule = UpdateRegression(2, moments=1, settings=Regression(few_clients=0, few_replies=0))
    >>> for r in range(9):  # updates are 1 + 3 b and -b; b of the replies is too large by 1
    ...     b = 1.0 + rng.standard_normal((20, 1))
    ...     updates = np.column_stack([1.0 + 3.0 * b[:, 0], -b[:, 0]])
    ...     replies = everybody.replies(r, ids, np.ones(20), Source.KNOWN)
    ...     given = RoundWeights(replies=replies, weights=equal, raw=equal, within=equal,
    ...                          clients=ClientNumbers(20.0, 20.0, 20.0))
    ...     step = rule.step(given, b, np.ones(1), lambda rows: rows @ updates)
    >>> step.round(6) + 0.0  # the population's mean of b is zero
    array([1., 0.])
    """

    def __init__(
        self,
        size: int,
        *,
        moments: int,
        main: int | None = None,
        settings: Regression | None = None,
        dtype: DTypeLike = np.float64,
    ) -> None:
        self.settings = settings or Regression()
        self._main = moments if main is None else main
        self.cross = np.zeros((moments + 1, size), dtype=dtype)
        self.moments = _Moments(np.zeros((moments + 1, moments + 1)))
        self.reliance = 1.0  # on enrollment weights, in the next round
        self.plain = np.zeros(size, dtype=dtype) if self.settings.adaptive else None
        self.squares = 0.0  # weighted squared norms of updates
        self._fit: _Fit | None = None  # where squared norms are known

    def round(self, given: RoundWeights, b: FloatArray, enrolled: FloatArray) -> RegressionRound:
        """Return what a round does to the regression, parameters piece by piece.

        ``b`` (m, q) are the standardised balance columns of the replies, ``enrolled`` (q,) their
        mean over all enrolled clients.
        """
        assert given.clients is not None
        full = np.column_stack([np.ones(len(b)), b])
        raw = self._bounded(given.raw)
        rows = (raw[:, None] * full).T
        sums = RegressionSums(
            mean=given.weights @ full, gram=rows @ full, replies=len(full),
            plain=float(given.within.sum()), reliance=given.reliance,
            unit_ids=given.replies.unit_ids,
        )  # fmt: skip
        if self.plain is not None:
            rows = np.vstack([rows, given.within])
        return self.opened(sums, given.clients, enrolled, rows)

    def opened(
        self,
        sums: RegressionSums,
        clients: ClientNumbers,
        enrolled: FloatArray,
        rows: FloatArray | None = None,
    ) -> RegressionRound:
        """Return what a round with these sums does to the regression.

        ``rows`` (k, m) are the weights by which updates are still to be added up; none where their
        sums come from elsewhere.
        """
        used, coefficients = self.used, np.zeros(len(sums.mean))
        if used > 1:
            aim = np.append(1.0, (1.0 - sums.reliance) * enrolled)[:used]
            apart = aim - sums.mean[:used]
            coefficients[:used] = np.linalg.solve(self._penalised(clients), apart)
            coefficients *= self._relied(coefficients[:used], clients)
        after = self.moments.next(self.settings.decay, sums)
        rows = np.empty((0, 0)) if rows is None else rows
        return RegressionRound(self, rows, coefficients, after, clients)

    def step(
        self,
        given: RoundWeights,
        b: FloatArray,
        enrolled: FloatArray,
        sums: Callable[[FloatArray], FloatArray],
        squares: FloatArray | None = None,
    ) -> FloatArray:
        """Return (O20) of a round and learn from it, (P,).

        ``sums`` gives weighted sums of updates, (k, P), for k rows of weights, (k, m); ``squares``
        (m,) their squared norms, where they are known.
        """
        here, everything = self.round(given, b, enrolled), slice(None)
        found = sums(np.vstack([here.weights, given.weights]))
        total: FloatArray = found[-1] + here.correction(everything)
        here.learn(everything, found[:-1])
        here.close(squares)
        return total

    def rely(self, correction: float, products: FloatArray, clients: ClientNumbers) -> None:
        """Set what is relied on in the next round.

        ``correction`` is the squared norm of what enrollment weights change of the mean update,
        for an adaptive one; ``products`` (q + 1, q + 1) is C C'.
        """
        used, mass, replied = self.used, self.moments.gram[0, 0], self.moments.among(clients)
        if used < 1 or not mass > 0.0:
            return
        gram = self.moments.gram[:used, :used]
        inverse = np.linalg.inv(self._penalised(clients))
        hat = inverse @ gram
        explained = np.sum((2.0 * inverse - hat @ inverse) * products[:used, :used])
        left = max(self.squares - float(explained), 0.0) / mass
        left /= max(1.0 - float(np.trace(hat)) / replied.effective, _LEAST_FREEDOM)
        self._fit = _Fit(left, products)
        if self.plain is not None:
            noise = left * (1.0 / replied.effective - 1.0 / replied.enrolled)
            self.reliance = reliance_on_enrollment(correction, noise, replied.effective)

    def _relied(self, solved: FloatArray, clients: ClientNumbers) -> float:
        """Return how far a correction with these coefficients of C is relied on, kappa."""
        if self._fit is None:
            return 1.0
        used, number = len(solved), self.moments.among(clients).effective
        spread = float(solved @ self.moments.gram[:used, :used] @ solved)
        noise = self._fit.residual * self.moments.gram[0, 0] * spread / number
        correction = float(solved @ self._fit.products[:used, :used] @ solved)
        return reliance_on_regression(correction, noise, number)

    def over(self, places: Sequence[int | None], main: int) -> UpdateRegression:
        """Return the regression on other moments; those it knows keep what was learnt of them.

        ``places`` (q,) says which of the present moments each is, none if it is new: it begins as
        if it had been at its population mean so far. The first ``main`` are covariates.
        """
        made = UpdateRegression(
            self.cross.shape[1],
            moments=len(places),
            main=main,
            settings=self.settings,
            dtype=self.cross.dtype,
        )
        pairs = [(0, 0), *((new + 1, old + 1) for new, old in enumerate(places) if old is not None)]
        new, old = map(list, zip(*pairs, strict=True))
        gram = made.moments.gram
        gram[np.ix_(new, new)] = self.moments.gram[np.ix_(old, old)]
        made.moments = replace(self.moments, gram=gram)
        made.cross[new] = self.cross[old]
        made.plain, made.squares, made.reliance = self.plain, self.squares, self.reliance
        if self._fit is not None:
            products = np.zeros_like(gram)
            products[np.ix_(new, new)] = self._fit.products[np.ix_(old, old)]
            made._fit = replace(self._fit, products=products)
        return made

    def _penalised(self, clients: ClientNumbers) -> FloatArray:
        """Return A with its ridge, of the coefficients in use."""
        used, kept, settings = self.used, self.moments, self.settings
        number, moments = kept.among(clients).guarded, used - 1
        ridge = np.zeros(used)
        ridge[1:] = (settings.few_clients / number) ** 2
        ridge[1:] += settings.few_replies * moments / kept.replies
        ridge[1 + self._main :] += settings.few_products * moments / number
        out: FloatArray = kept.gram[:used, :used] + kept.gram[0, 0] * np.diag(ridge)
        return out

    def _bounded(self, raw: FloatArray) -> FloatArray:
        """Return the weights to learn with, none too large a part of what is known, (m,)."""
        if not self.moments.rounds:
            return raw
        mean = self.moments.gram[0, 0] / self.moments.rounds
        most = max(self.settings.largest, TIMES_EQUAL_SHARE / max(len(raw), 1)) * mean
        return np.clip(raw, -most, most)

    @property
    def used(self) -> int:
        """Number of coefficients in use, the constant among them; 0 before the first round."""
        room, most = self.moments.replies / self.settings.per_moment, len(self.moments.gram)
        if not self.moments.replies:
            return 0
        if room >= most - 1:
            return most
        return self._main + 1 if room >= self._main else 1

    def state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the arrays; without ``copy`` those of the model's size change with a round."""
        large = {"cross": self.cross} | ({} if self.plain is None else {"plain": self.plain})
        kept = self.moments
        return {
            **({name: array.copy() for name, array in large.items()} if copy else large),
            "gram": kept.gram,
            "sizes": [kept.replies, kept.rounds, kept.plain],
            "seen": kept.seen.smallest,
            "main": self._main,
            "squares": self.squares,
            "reliance": self.reliance,
            **({} if self._fit is None else {"fit": asdict(self._fit)}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved arrays back."""
        self.cross = np.array(state["cross"])
        self.plain = np.array(state["plain"]) if "plain" in state else None
        replies, rounds, plain = map(float, state["sizes"])
        seen = DistinctClients(np.array(state.get("seen", ()), dtype=np.uint64))
        self.moments = _Moments(np.array(state["gram"]), replies, rounds, plain, seen)
        self._main, self.squares = int(state["main"]), float(state["squares"])
        self.reliance, fit = float(state["reliance"]), state.get("fit")
        self._fit = fit and _Fit(float(fit["residual"]), np.array(fit["products"]))
