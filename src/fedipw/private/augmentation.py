r"""Augmented rounds by secure sums: updates regressed on balance columns that nobody shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from fedipw.combining.regression import RegressionSums, UpdateRegression
from fedipw.errors import InputError
from fedipw.weighting.pipeline import Regression
from fedipw.weighting.weigher import ClientNumbers

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray
    from fedipw.private.calibration import RoundTotals

TEMPER: Final = 0.5  # of the step's weights, as of augmented-online


@final
class PrivateRegression:
    r"""The regression (O20) of a run in which the sums of a round are known and no reply is.

    It learns by the clients' weights e, and corrects the mean of updates that has weights
    :math:`e^t`. The ridge asks for the effective number of enrolled clients under the latter.
    Nobody knows all of these; it is taken as

    .. math:: n = n_E\, \bar\epsilon_r, \qquad
       \epsilon_r = \frac{\big(\sum_{S_r} e_i^t\big)^2}{m_r \sum_{S_r} e_i^{2t}}, \qquad (N7)

    the number of the enrolled times the efficiency of the weights of replies, its mean over earlier
    rounds by their replies :math:`m_r`.

    Parameters
    ----------
    moments
        Number of balance columns, q.
    main
        How many of them, the first, are covariates themselves.
    enrolled
        Number of enrolled clients.
    """

    def __init__(self, moments: int, main: int, enrolled: int) -> None:
        self._moments, self._main, self._enrolled = moments, main, float(enrolled)
        self._settings = Regression(adaptive=False)
        self.rule: UpdateRegression | None = None  # of the model's size, known with the first round
        self._efficiency, self._replies = 0.0, 0.0  # its sum over replies, earlier ones less

    def corrected(self, totals: RoundTotals) -> FloatArray:
        """Return the step of a round, (P,), and learn from it."""
        if totals.cross is None:
            raise InputError("A round without augmentation has no sums of columns and updates.")
        online, q, decay = totals.online, self._moments, self._settings.decay
        if self.rule is None:
            self.rule = UpdateRegression(
                totals.update.size, moments=q, main=self._main, settings=self._settings
            )
        self._efficiency = decay * self._efficiency + totals.contributors * totals.efficiency
        self._replies = decay * self._replies + totals.contributors
        number = max(1.0, self._enrolled * self._efficiency / self._replies)
        gram = np.block(
            [
                [np.array([[online.count]]), online.first[None, :]],
                [online.first[:, None], online.second],
            ]
        )
        sums = RegressionSums(
            mean=np.append(1.0, totals.mean_columns), gram=gram, replies=totals.contributors
        )
        here = self.rule.opened(sums, ClientNumbers(self._enrolled, number, number), np.zeros(q))
        out: FloatArray = totals.step + here.correction(slice(None))
        here.learn(slice(None), np.vstack([totals.update, totals.cross]))
        here.close()
        return out

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        sums = [self._efficiency, self._replies]
        return {"sums": sums, "rule": None if self.rule is None else self.rule.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._efficiency, self._replies = map(float, state["sums"])
        self.rule = None
        if state["rule"] is not None:
            size = np.shape(state["rule"]["cross"])[1]
            self.rule = UpdateRegression(
                size, moments=self._moments, main=self._main, settings=self._settings
            )
            self.rule.restore(state["rule"])
