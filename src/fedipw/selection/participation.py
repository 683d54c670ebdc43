"""Participation probabilities round by round, fitted on what was known before each round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.errors import InputError, NotConvergedError, SeparationError
from fedipw.numerics.checks import check_finite, check_rows
from fedipw.selection.crossfit import ScoreCalibration, cross_fit
from fedipw.selection.history import COLUMNS, ReplyHistory
from fedipw.selection.model import fitted_model
from fedipw.selection.panel import Panel, RoundLog
from fedipw.selection.predictors import ByFold, Classified, Linear, Predictor, Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedipw.numerics.types import BoolArray, FloatArray, IntArray


class FitWindow(Enum):
    """Which rounds the probabilities of round r are fitted on."""

    PAST = "past"  # rounds before r: predictable, the assumption behind the theory
    SAME_ROUND = "same-round"  # round r alone, as the paper writes it; for comparison


class Source(Enum):
    """Where a round's participation probabilities came from."""

    MODEL = "model"
    PAST_RATE = "reply rate of past rounds"
    ROUND_RATE = "reply rate of this round"
    SEPARATED_RATE = "reply rate, the model separates"
    UNCONVERGED_RATE = "reply rate, the model did not converge"
    GAPS = "mean gap between replies"
    KNOWN = "known"
    NONE = "not modelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipationSettings:
    """How participation is fitted.

    ``classifier`` is any scikit-learn classifier, unpenalised logistic regression by default;
    ``folds`` cross-fits by client: nobody's probability comes from a model that saw its replies;
    ``calibration`` (``Platt()``, ``Isotonic()``) maps scores of folds left out to probabilities.
    Until replies and non-replies each exceed ``per_coefficient`` times the number of coefficients a
    constant reply rate is used, and recorded.
    """

    window: FitWindow = FitWindow.PAST
    classifier: Any = None
    folds: int | None = None
    calibration: ScoreCalibration | None = None
    per_coefficient: float = 10.0
    history: bool = False
    day_length: float = 24.0

    def __post_init__(self) -> None:
        if self.calibration is not None and self.folds is None:
            raise InputError("Scores are calibrated out of fold: give the number of folds.")


@final
class ParticipationModel:
    r"""P(A = 1 | E = 1, Z, X) of n enrolled clients, told of rounds as they open and close.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> model = ParticipationModel(rng.normal(size=(200, 1)), ("z",), ("x",))
    >>> for index in range(1, 4):
    ...     model.open(rng.normal(size=(200, 1)))
    ...     replied = rng.random(200) < 0.3
    ...     prob, source = model.prob(replied)
    ...     model.close(replied)
    ...     print(index, source.value)
    1 reply rate of this round
    2 model
    3 model
    """

    def __init__(
        self,
        static: FloatArray,
        static_names: Sequence[str],
        names: Sequence[str],
        settings: ParticipationSettings | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.settings = ParticipationSettings() if settings is None else settings
        self.names = (*names, *(COLUMNS if self.settings.history else ()))
        self._offered, self._static_names = len(names), tuple(static_names)
        check_finite(static, self._static_names, "enrolled clients")
        self._static = np.column_stack([np.ones(len(static)), static])
        self._log = RoundLog(len(static), len(self.names))
        self._history = ReplyHistory.of(len(static))
        self._coefficients = np.zeros(self._static.shape[1] + len(self.names))
        self._hessian: FloatArray | None = None  # of the log-likelihood at the last fit
        self._current: FloatArray | None = None
        self._fitted: Predictor = Rate(0.5)
        self._folds = _fold_of(len(static), self.settings.folds, rng)

    @property
    def rounds(self) -> int:
        """Number of closed rounds."""
        return self._log.rounds

    def open(self, covariates: FloatArray) -> None:
        """Take the pre-round covariates of all n clients, (n, q)."""
        if covariates.shape != (len(self._static), self._offered):
            raise InputError(
                f"Round {self.rounds + 1}: covariates have shape {covariates.shape}, expected "
                f"({len(self._static)}, {self._offered})."
            )
        check_finite(covariates, self.names[: self._offered], f"round {self.rounds + 1}")
        self._current = self._with_history(covariates)

    def prob(self, replied: BoolArray) -> tuple[FloatArray, Source]:
        """Return everyone's probability in the open round, (n,), and where it came from.

        ``replied`` is used only by the same-round fit, and by a first round without any past.
        """
        current = self._opened()
        check_rows(len(self._static), replied=replied)
        if not replied.any():
            raise InputError(f"Nobody replied in round {self.rounds + 1}: skip it and record it.")
        if self.settings.window is FitWindow.SAME_ROUND:
            log = RoundLog(len(self._static), len(self.names))
            log.append(current, replied)
        else:
            log = self._log
        self._fitted, source = self._fit(log, replied)
        if isinstance(self._fitted, ByFold):
            return self._fitted.own(self._static, current), source
        return self._fitted.prob(self._static, current), source

    def close(self, replied: BoolArray) -> None:
        """Take the replies of the open round, (n,)."""
        current = self._opened()
        check_rows(len(self._static), replied=replied)
        self._log.append(current, replied)
        self._history = self._history.after(replied)
        self._current = None

    def elsewhere(self, static: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return what the last fit says of any clients, enrolled or not, (m,)."""
        if self.settings.history:
            raise InputError("Clients outside the log have no reply history to predict from.")
        return self._fitted.prob(np.column_stack([np.ones(len(static)), static]), covariates)

    def _opened(self) -> FloatArray:
        if self._current is None:
            raise InputError("No round is open: call open(covariates) first.")
        return self._current

    def _with_history(self, covariates: FloatArray) -> FloatArray:
        if not self.settings.history:
            return covariates
        past = self._history.matrix(day_length=self.settings.day_length)
        return np.column_stack([covariates, past])

    def _fit(self, log: RoundLog, replied: BoolArray) -> tuple[Predictor, Source]:
        if log.replies == 0:  # no past to learn from
            return Rate(float(replied.mean())), Source.ROUND_RATE
        rate = Rate(log.replies / (log.rounds * len(self._static)))
        same = self.settings.window is FitWindow.SAME_ROUND
        constant = Source.ROUND_RATE if same else Source.PAST_RATE
        needed = self.settings.per_coefficient * len(self._coefficients)
        if min(log.replies, log.rounds * len(self._static) - log.replies) <= needed:
            return rate, constant
        try:
            return self._model(log), Source.MODEL
        except SeparationError:
            return rate, Source.SEPARATED_RATE
        except NotConvergedError:
            return rate, Source.UNCONVERGED_RATE

    def _model(self, log: RoundLog) -> Predictor:
        panel = log.panel(self._static)
        if self._folds is not None and self.settings.calibration is not None:
            return self._calibrated(panel, self._folds, self.settings.calibration)
        if self._folds is not None:
            models = tuple(
                self._classified(panel, self._folds != fold)
                for fold in range(int(self._folds.max()) + 1)
            )
            return ByFold(models, self._folds)
        if self.settings.classifier is not None:
            return self._classified(panel, np.ones(len(self._static), dtype=bool))
        fit = panel.fit(self._start(panel))
        if fit.separated:
            raise SeparationError(("participation covariates",), panel.replied.size)
        self._coefficients = fit.result.checked().point
        self._hessian = fit.result.hessian * panel.replied.size
        return Linear(self._coefficients)

    def _start(self, panel: Panel) -> FloatArray:
        """Return the last fit moved one Newton step by the newest round alone.

        At the last fit the older rounds' gradient is zero and their Hessian known, so this step
        costs no pass over them, and the fit that follows needs one pass instead of two.
        """
        if self._hessian is None or self.settings.window is FitWindow.SAME_ROUND:
            return self._coefficients
        rows = panel.replied.shape[1]
        new = panel.last_round().sums(self._coefficients)
        hessian, gradient = self._hessian + rows * new.hessian, rows * new.gradient
        step: FloatArray = np.linalg.lstsq(hessian, gradient)[0]
        return self._coefficients - step

    def _classified(self, panel: Panel, who: BoolArray) -> Classified:
        X, replied = self._rows(panel, who)
        names = (*self._static_names, *self.names)
        return Classified(fitted_model(self.settings.classifier, X, replied, names))

    def _calibrated(self, panel: Panel, folds: IntArray, calibration: ScoreCalibration) -> ByFold:
        X, replied = self._rows(panel, np.ones(len(folds), dtype=bool))
        fit = cross_fit(
            self.settings.classifier,
            X,
            replied,
            np.tile(folds, len(panel.varying)),
            names=(*self._static_names, *self.names),
            calibration=calibration,
        )
        return ByFold(tuple(map(Classified, fit.models, fit.maps)), folds)

    def _rows(self, panel: Panel, who: BoolArray) -> tuple[FloatArray, BoolArray]:
        """Return all rounds of some clients as rows, one round after the other."""
        rounds = len(panel.varying)
        X = np.column_stack(
            [
                np.tile(panel.static[who, 1:], (rounds, 1)),
                panel.varying[:, :, who].transpose(0, 2, 1).reshape(-1, len(self.names)),
            ]
        )
        return X, panel.replied[:, who].ravel()

    def state(self) -> dict[str, Any]:
        """Return the rounds seen and the last coefficients."""
        panel = self._log.panel(self._static)
        return {
            "varying": panel.varying.copy(),
            "replied": panel.replied.copy(),
            "coefficients": self._coefficients.copy(),
            "hessian": None if self._hessian is None else self._hessian.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._log = RoundLog(len(self._static), len(self.names))
        self._history = ReplyHistory.of(len(self._static))
        for covariates, replied in zip(state["varying"], state["replied"], strict=True):
            self._log.append(covariates.T, replied)
            self._history = self._history.after(replied)
        self._coefficients = np.array(state["coefficients"])
        self._hessian = None if state["hessian"] is None else np.array(state["hessian"])


def _fold_of(
    clients: int, folds: int | None, rng: np.random.Generator | None
) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    if folds is None:
        return None
    if rng is None:
        raise InputError("Cross-fitting draws folds: pass rng=numpy.random.default_rng(seed).")
    if not 2 <= folds <= clients:
        raise InputError(f"{folds} folds over {clients} clients: need 2 to {clients}.")
    return rng.permutation(clients) % folds
