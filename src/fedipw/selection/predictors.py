"""What a participation fit can be: a rate, a logistic model, a classifier, or one per fold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from fedipw.numerics.logistic import sigmoids
from fedipw.selection.crossfit import ScoreMap, Unchanged

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray, IntArray
    from fedipw.selection.model import PropensityModel


class Predictor(Protocol):
    """Probabilities from constant covariates (m, 1 + q_z) and covariates of the round (m, q_x)."""

    def prob(self, static: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return P(A = 1), (m,)."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Rate:
    """One rate for all."""

    rate: float

    def prob(self, static: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return the rate, m times."""
        del covariates
        return np.full(len(static), self.rate)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """Logistic regression with these coefficients: constant covariates first, then the round's."""

    coefficients: FloatArray

    def prob(self, static: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return the fitted probabilities, (m,)."""
        q = static.shape[1]
        return sigmoids(
            static @ self.coefficients[:q] + covariates @ self.coefficients[q:], shift=0.0
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Classified:
    """A fitted scikit-learn classifier, its scores calibrated or as they are."""

    model: PropensityModel
    to_prob: ScoreMap = field(default_factory=Unchanged)

    def prob(self, static: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return the classifier's probabilities, (m,)."""
        score = self.model.predict_proba(np.column_stack([static[:, 1:], covariates]))
        return self.to_prob.prob(score[:, 1])


@final
@dataclass(frozen=True, slots=True, eq=False)
class ByFold:
    """One model per fold of clients, fitted on the other folds."""

    models: tuple[Classified, ...]
    fold_of: IntArray  # (n,)

    def own(self, static: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return each enrolled client's probability from the model that never saw it, (n,)."""
        prob = np.empty(len(static))
        for fold, model in enumerate(self.models):
            mine = self.fold_of == fold
            prob[mine] = model.prob(static[mine], covariates[mine])
        return prob

    def prob(self, static: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return the mean over the folds' models, for clients in none of them, (m,)."""
        mean: FloatArray = np.mean([m.prob(static, covariates) for m in self.models], axis=0)
        return mean
