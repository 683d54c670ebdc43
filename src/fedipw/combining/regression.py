r"""Augmented aggregation: updates regressed on balance columns, weights left with the residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.weighting.pipeline import Regression

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from fedipw.numerics import FloatArray
    from fedipw.weighting.weigher import RoundWeights


@final
class UpdateRegression:
    r"""The population mean of what balance columns predict of updates, and weighted residuals.

    .. math::
       \beta_{r-1} &= (A_{r-1} + \rho A_{r-1}[0, 0]\, I)^{-1} C_{r-1}, \\
       \text{step}_r &= \sum_{S_r} v_i \Delta_i
       + \Big(\mu - \sum_{S_r} v_i b_i\Big)' \beta_{r-1}, \\
       A_r &= g A_{r-1} + m_r \sum_{S_r} v_i b_i b_i', \qquad
       C_r = g C_{r-1} + m_r \sum_{S_r} v_i b_i \Delta_i' \qquad (O20)

    b is (1, standardised moments), so :math:`\mu = (1, 0, \ldots, 0)`; :math:`m_r` is the number
    of replies. The coefficients come from earlier rounds: the step is consistent if either the
    weights or the regression is right, and its noise is that of the residuals. It is linear in
    updates: q + 1 weighted sums of the same replies, none of them kept, and q + 1 arrays of the
    model's size for all clients together.

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
    >>> rule = UpdateRegression(2, moments=1, settings=Regression(ridge=0.0))
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
        self._settings = settings or Regression()
        self._main = moments if main is None else main
        self._gram = np.zeros((moments + 1, moments + 1))
        self._cross = np.zeros((moments + 1, size), dtype=dtype)
        self._remembered = 0.0  # replies, earlier ones less

    def step(
        self, given: RoundWeights, b: FloatArray, sums: Callable[[FloatArray], FloatArray]
    ) -> FloatArray:
        """Return (O20) of a round and learn from it, (P,).

        Parameters
        ----------
        given
            Weights of the replies.
        b
            Their standardised balance columns, (m, q).
        sums
            Gives weighted sums of updates, (k, P), for k rows of weights, (k, m).
        """
        full = given.unguarded
        rows = (full[:, None] * np.column_stack([np.ones(len(b)), b])).T
        found = sums(np.vstack([rows, given.weights]))
        total: FloatArray = found[-1] + self.correction(given, b)
        self.learn(full, b, found[:-1])
        return total

    def correction(self, given: RoundWeights, b: FloatArray) -> FloatArray:
        r"""Return :math:`(\mu - \sum_S v_i b_i)' \beta`, (P,)."""
        used = self.used
        if used < 2:
            return np.zeros(self._cross.shape[1])
        gram = self._gram[:used, :used]
        ridge = self._settings.ridge * (used - 1) / given.effective_clients
        penalty = ridge * gram[0, 0] * np.diag(np.append(0.0, np.ones(used - 1)))
        apart = np.eye(1, used)[0]
        apart[0] -= given.weights.sum()
        apart[1:] -= given.weights @ b[:, : used - 1]
        out: FloatArray = np.linalg.solve(gram + penalty, apart) @ self._cross[:used]
        return out

    def learn(self, weights: FloatArray, b: FloatArray, sums: FloatArray) -> None:
        r"""Take a round's sums :math:`\sum v_i b_i \Delta_i`, (q + 1, P), constant first."""
        full = np.column_stack([np.ones(len(b)), b])
        g, m = self._settings.decay, len(weights)
        self._gram = g * self._gram + m * (weights[:, None] * full).T @ full
        self._cross *= g
        self._cross += m * sums
        self._remembered = g * self._remembered + m

    @property
    def used(self) -> int:
        """Number of coefficients in use, the constant among them; 0 before the first round."""
        room = self._remembered / self._settings.per_moment
        if not self._remembered:
            return 0
        if room >= len(self._gram) - 1:
            return len(self._gram)
        return self._main + 1 if room >= self._main else 1

    def state(self) -> dict[str, Any]:
        """Return the arrays."""
        return {
            "gram": self._gram.copy(),
            "cross": self._cross.copy(),
            "remembered": self._remembered,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved arrays back."""
        self._gram, self._cross = np.array(state["gram"]), np.array(state["cross"])
        self._remembered = float(state["remembered"])
