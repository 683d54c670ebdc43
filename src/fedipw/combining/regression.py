r"""Augmented aggregation: updates regressed on balance columns, weights left with the residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.weighting.pipeline import Regression

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from fedipw.numerics import FloatArray
    from fedipw.weighting.weigher import RoundWeights


@final
@dataclass(frozen=True, slots=True, eq=False)
class RegressionRound:
    """A round of a regression: parameters are corrected and learnt from in any pieces, once."""

    rule: UpdateRegression
    weights: FloatArray  # v_i b_i before the guard, (q + 1, m): of the sums to learn from
    columns: FloatArray  # b with its constant, (m, q + 1)
    coefficients: FloatArray  # of C in the correction, (q + 1,)

    def correction(self, piece: slice) -> FloatArray:
        r"""Return :math:`(\mu - \sum_S v_i b_i)' \beta` of some parameters."""
        cross = self.rule.cross
        out: FloatArray = self.coefficients.astype(cross.dtype) @ cross[:, piece]
        return out

    def learn(self, piece: slice, sums: FloatArray) -> None:
        r"""Take :math:`\sum v_i b_i \Delta_i` of some parameters, (q + 1, p)."""
        cross = self.rule.cross[:, piece]
        cross *= self.rule.settings.decay
        cross += len(self.columns) * sums

    def close(self) -> None:
        """End the round, after all parameters."""
        self.rule.add(self.weights @ self.columns, len(self.columns))


@final
class UpdateRegression:
    r"""The population mean of what balance columns predict of updates, and weighted residuals.

    .. math::
       \beta_{r-1} &= (A_{r-1} + \rho A_{r-1}[0, 0]\, D)^{-1} C_{r-1}, \qquad
       D = \text{diag}(0, 1, \ldots, 1), \quad \rho = (k / n)^2 + c\, q / M, \\
       \text{step}_r &= \sum_{S_r} v_i \Delta_i
       + \Big(\mu - \sum_{S_r} v_i b_i\Big)' \beta_{r-1}, \\
       A_r &= g A_{r-1} + m_r \sum_{S_r} u_i b_i b_i', \qquad
       C_r = g C_{r-1} + m_r \sum_{S_r} u_i b_i \Delta_i' \qquad (O20)

    b is (1, standardised moments), so :math:`\mu = (1, 0, \ldots, 0)`; :math:`m_r` is the
    number of replies, n the effective number of enrolled clients, M the replies remembered and
    q the moments in use. The step is by guarded weights v, what is learnt by the weights before
    the guard, u. The coefficients come from earlier rounds: the step is consistent if either
    the weights or the regression is right, and its noise is that of the residuals. It is linear
    in updates: q + 2 weighted sums of the same replies, none of them kept, and q + 1 arrays of
    the model's size for all clients together.

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
    >>> from fedipw.weighting.weigher import RoundWeights
    >>> rng, equal = np.random.default_rng(0), np.full(20, 0.05)
    >>> rule = UpdateRegression(2, moments=1, settings=Regression(few_clients=0, few_replies=0))
    >>> for _ in range(9):  # updates are 1 + 3 b and -b; b of the replies is too large by 1
    ...     b = 1.0 + rng.standard_normal((20, 1))
    ...     updates = np.column_stack([1.0 + 3.0 * b[:, 0], -b[:, 0]])
    ...     given = RoundWeights(replies=None, weights=equal, unguarded=equal, effective_clients=20)
    ...     step = rule.step(given, b, lambda rows: rows @ updates)
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
        self._gram = np.zeros((moments + 1, moments + 1))
        self.cross = np.zeros((moments + 1, size), dtype=dtype)
        self._remembered = 0.0  # replies, earlier ones less

    def round(self, given: RoundWeights, b: FloatArray) -> RegressionRound:
        """Return what a round does to the regression, parameters piece by piece.

        ``b`` (m, q) are the standardised balance columns of the replies.
        """
        used = self.used
        coefficients = np.zeros(len(self._gram))
        if used > 1:
            gram = self._gram[:used, :used]
            ridge = (self.settings.few_clients / given.effective_clients) ** 2
            ridge += self.settings.few_replies * (used - 1) / self._remembered
            penalty = ridge * gram[0, 0] * np.diag(np.append(0.0, np.ones(used - 1)))
            apart = np.eye(1, used)[0]
            apart[0] -= given.weights.sum()
            apart[1:] -= given.weights @ b[:, : used - 1]
            coefficients[:used] = np.linalg.solve(gram + penalty, apart)
        full = np.column_stack([np.ones(len(b)), b])
        return RegressionRound(self, (given.unguarded[:, None] * full).T, full, coefficients)

    def step(
        self, given: RoundWeights, b: FloatArray, sums: Callable[[FloatArray], FloatArray]
    ) -> FloatArray:
        """Return (O20) of a round and learn from it, (P,).

        ``sums`` gives weighted sums of updates, (k, P), for k rows of weights, (k, m).
        """
        here, everything = self.round(given, b), slice(None)
        found = sums(np.vstack([here.weights, given.weights]))
        total: FloatArray = found[-1] + here.correction(everything)
        here.learn(everything, found[:-1])
        here.close()
        return total

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
        made._gram[np.ix_(new, new)] = self._gram[np.ix_(old, old)]
        made.cross[new] = self.cross[old]
        made._remembered = self._remembered
        return made

    def add(self, gram: FloatArray, replies: int) -> None:
        """Take a round's sum of v b b', (q + 1, q + 1)."""
        self._gram = self.settings.decay * self._gram + replies * gram
        self._remembered = self.settings.decay * self._remembered + replies

    @property
    def used(self) -> int:
        """Number of coefficients in use, the constant among them; 0 before the first round."""
        room = self._remembered / self.settings.per_moment
        if not self._remembered:
            return 0
        if room >= len(self._gram) - 1:
            return len(self._gram)
        return self._main + 1 if room >= self._main else 1

    def state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the arrays; without ``copy`` those of the model's size change with a round."""
        return {
            "gram": self._gram.copy(),
            "cross": self.cross.copy() if copy else self.cross,
            "remembered": self._remembered,
            "main": self._main,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved arrays back."""
        self._gram, self.cross = np.array(state["gram"]), np.array(state["cross"])
        self._remembered, self._main = float(state["remembered"]), int(state["main"])
