"""Prediction-powered means: any cross-fitted regression of the metric on Z, its power tuned.

Any function of Z can take the place of GREG's linear model where the population's rows are known:
its mean over them is exact. Here it is any regression of scikit-learn, and the replies decide by
how much it is believed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, Self, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.evaluation.estimators import (
    CLIENTS_PER_TERM,
    EVERYONE,
    Group,
    HajekMean,
    Linear,
    MeanEstimator,
)
from fedipw.evaluation.logged import LoggedSample
from fedipw.evaluation.phases import client_sums
from fedipw.evaluation.sample import TwoPhase
from fedipw.numerics import FloatArray, IntArray
from fedipw.numerics.checks import check_rows, some
from fedipw.selection.classifiers import (
    FOLDS,
    Recipe,
    drawn_folds,
    is_estimator,
    named_object,
    seeded,
)
from fedipw.selection.coded import CodedTable
from fedipw.selection.enrollment import EnrollmentStage
from fedipw.tables.cells import Cells
from fedipw.tables.columns import ID
from fedipw.tables.partitions import rows_per_block

NAME: Final = "prediction-powered"
CLIENTS_PER_FOLD = 10  # that replied, or clusters of them; below it there is no regression
TERMS = 2  # a mean and a power
_CELL = "(cell)"
_TREES: dict[str, Any] = {"random_state": 0, "n_estimators": 200, "min_samples_leaf": 5}
_STEPS: dict[str, Any] = {
    "random_state": 0, "max_iter": 100, "max_leaf_nodes": 4, "min_samples_leaf": 10,
    "max_bins": 63, "early_stopping": False,
}  # fmt: skip
_LINE: Recipe = ("sklearn.linear_model", "LinearRegression", {})
REGRESSORS: dict[str, Recipe] = {
    "boosting": ("sklearn.ensemble", "HistGradientBoostingRegressor", _STEPS),
    "forest": ("sklearn.ensemble", "RandomForestRegressor", _TREES),
    "linear": _LINE,
}
OF_FLAGS: dict[str, Recipe] = {  # in place of those where the metric is 0 or 1
    "boosting": ("sklearn.ensemble", "HistGradientBoostingClassifier", _STEPS),
    "forest": ("sklearn.ensemble", "RandomForestClassifier", _TREES),
    "linear": _LINE,
}


@final
@dataclass(frozen=True, slots=True, eq=False)
class Regressor:
    """A regression of scikit-learn, not fitted: of numbers, and of a metric that is 0 or 1."""

    name: str
    of_numbers: Any  # none if it is a classifier
    of_flags: Any

    @classmethod
    def named(cls, name: Any) -> Regressor:
        """Return ``boosting``, ``forest``, ``linear``, that of a dotted name, or the one given.

        Boosting and forests give a metric that is 0 or 1 the probability of their classifiers. A
        classifier of another name serves such metrics alone.

        >>> Regressor.named("linear").of_numbers
        LinearRegression()
        >>> Regressor.named("bosting")
        Traceback (most recent call last):
        ...
        fedipw.errors.InputError: No regression 'bosting'. Known: boosting, forest, linear, or...
        """
        from sklearn.base import is_classifier, is_regressor  # noqa: PLC0415 (slow to load)

        made = named_object(name, REGRESSORS, "regression")
        known = name if isinstance(name, str) else type(made).__name__
        if known in OF_FLAGS:
            return cls(known, made, named_object(known, OF_FLAGS, "regression"))
        if is_estimator(made, "predict") and is_regressor(made):
            return cls(known, seeded(made), seeded(made))
        if is_estimator(made, "predict_proba") and is_classifier(made):
            return cls(known, None, seeded(made))
        raise InputError(
            f"No regression {name!r}. Known: {', '.join(REGRESSORS)}, or the dotted name of a "
            "scikit-learn regressor, or one itself."
        )

    def chosen(self, values: FloatArray) -> Any:
        """Return what is fitted to these values of a metric, (m,)."""
        if np.isin(values, (0.0, 1.0)).all():
            return self.of_flags
        if self.of_numbers is None:
            raise InputError(f"{self.name} is a classifier, and the metric is not 0 or 1")
        return self.of_numbers


class Model(Protocol):
    """A fitted regression."""

    def at(self, X: FloatArray) -> FloatArray:
        """Return predictions of rows (m, q), (m,)."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Scaled:
    model: Any
    centre: float
    scale: float

    def at(self, X: FloatArray) -> FloatArray:
        out: FloatArray = self.centre + self.scale * np.asarray(self.model.predict(X), dtype=float)
        return out


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Chance:
    model: Any

    def at(self, X: FloatArray) -> FloatArray:
        chance: FloatArray = self.model.predict_proba(X)[:, 1]
        return chance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossFitted:
    """A regression fitted once per fold of clients, on the replies of the other folds."""

    regression: Regressor
    models: tuple[Model, ...]  # models[k] saw no reply of fold k
    fold_of: IntArray  # (n,) of the enrolled; -1 for those that never replied
    own: FloatArray  # (n,) predictions by the model of the client's fold; NaN for the others

    @classmethod
    def of(
        cls,
        regression: Regressor,
        Z: FloatArray,
        sample: TwoPhase,
        values: FloatArray,
        *,
        order: IntArray | None = None,
        folds: int = FOLDS,
        seed: int = 0,
    ) -> CrossFitted:
        r"""Return the predictions of every client that replied, by a model that never saw it.

        .. math:: m_k = \text{regression of } \bar y_i \text{ on } Z_i,\ i \notin F_k, \qquad
           \bar y_i = \frac{\sum_r w_{ir} y_{ir}}{\sum_r w_{ir}} \qquad (E55)

        Folds :math:`F_k` are drawn by chance alone, and all replies of a client, or of a cluster,
        share one. Clients count alike, however often they replied. A metric that is 0 or 1 is given
        to classifiers as it is.

        Parameters
        ----------
        regression
            Which one.
        Z
            Covariates of the enrolled, (n, q).
        sample, values
            The replies and their y, (m,).
        order
            The enrolled in an order that does not depend on the rows of a file, (n,).
        folds, seed
            Their number, and the seed they are drawn by.

        Raises
        ------
        InputError
            If too few clients replied, or the regression fails.
        """
        check_rows(sample.clients, Z=Z)
        heard = np.bincount(sample.client, minlength=sample.clients)
        order = np.arange(sample.clients) if order is None else order
        rows = order[heard[order] > 0]
        units = rows if sample.clusters is None else sample.clusters.code[rows]
        rank = _first_places(units)
        count = int(rank.max(initial=-1)) + 1
        if count < CLIENTS_PER_FOLD * folds:
            kind = "clients" if sample.clusters is None else "clusters of clients"
            raise InputError(
                f"{count} {kind} replied, {folds} folds of {CLIENTS_PER_FOLD} need "
                f"{CLIENTS_PER_FOLD * folds}"
            )
        fold = drawn_folds(np.arange(count), count, folds, np.random.default_rng(seed))[rank]
        fold_of = np.full(sample.clients, -1)
        fold_of[rows] = fold
        from sklearn.base import is_classifier  # noqa: PLC0415 (slow to load)

        chosen = regression.chosen(values)
        row, y, weights = _training(sample, values, rows, split=is_classifier(chosen))
        own, models = np.full(sample.clients, np.nan), []
        for k in range(folds):
            mine, others = rows[fold == k], fold[row] != k
            with _failures(regression):
                model = _fitted(chosen, Z[rows[row[others]]], y[others], weights[others])
                own[mine] = _predicted(model, Z[mine])
            models.append(model)
        return cls(regression=regression, models=tuple(models), fold_of=fold_of, own=own)

    def means(
        self, coded: CodedTable, cells: Mapping[str, Cells], base: str | None = None
    ) -> dict[str, FloatArray]:
        r"""Return every model's mean over the population and over the cells of columns, (K,) each.

        .. math:: \bar m_{kD} = \frac{1}{N_D} \sum_{i \in D} m_k(Z_i) \qquad (E56)

        The table is read once, in batches; what is kept does not grow with it. Clients that the
        missing-value policy leaves out of the population are left out here too, and a row counts
        by the column ``base`` where there is one.
        """
        table, design, folds = coded.table, coded.design, len(self.models)
        more = () if base is None else (base,)
        names = tuple(dict.fromkeys((*design.columns, *cells, *more)))
        sums: dict[str, FloatArray] = {}
        done = 0
        for batch in table.batches(names, rows=rows_per_block(len(design.terms) + folds)):
            rows = design.rows(batch, f"{table.name} from row {done + 1}")
            done += batch.height
            X = np.ascontiguousarray(rows.columns.T)
            if not len(X):
                continue
            with _failures(self.regression):
                each = np.column_stack([_predicted(model, X) for model in self.models])
            each = np.column_stack([each, np.ones(len(X))])  # the last counts
            if base is not None:
                each *= batch[base].cast(pl.Float64).to_numpy()[rows.known, None]
            _add(sums, EVERYONE, each.sum(axis=0))
            for cell in cells.values():
                level = batch.select(cell.expression().alias(_CELL))[_CELL].to_numpy()[rows.known]
                found, code = np.unique(level.astype(str), return_inverse=True)
                parts = np.column_stack([np.bincount(code, column) for column in each.T])
                for name, part in zip(found.tolist(), parts, strict=True):
                    _add(sums, cell.named(name), part)
        return {name: total[:-1] / total[-1] for name, total in sums.items()}


def _first_places(codes: IntArray) -> IntArray:
    """Return codes from 0 in the order in which they first appear, (m,)."""
    _, first, code = np.unique(codes, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    return place[code]


def _training(
    sample: TwoPhase, values: FloatArray, rows: IntArray, *, split: bool
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return rows to train on: places in ``rows``, values, and how much each counts.

    A classifier has the ones and the zeros of a client as two rows that share its weight, if there
    are both.
    """
    total = client_sums(sample.client, 1.0 / sample.prob, sample.clients)[rows]
    mean = client_sums(sample.client, values / sample.prob, sample.clients)[rows] / total
    place = np.arange(len(rows))
    if not split:
        return place, mean, np.ones(len(rows))
    y, share = np.repeat([1.0, 0.0], len(rows)), np.append(mean, 1.0 - mean)
    kept = share > 0.0
    return np.tile(place, 2)[kept], y[kept], share[kept]


def _fitted(estimator: Any, X: FloatArray, y: FloatArray, weights: FloatArray) -> Model:
    """Return an estimator fitted to values (n,) of rows (n, q) that count so much, (n,)."""
    from sklearn.base import clone, is_classifier  # noqa: PLC0415 (slow to load)
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415
    from sklearn.utils.validation import has_fit_parameter  # noqa: PLC0415

    model = clone(estimator)
    alike = bool((weights == 1.0).all()) or not has_fit_parameter(model, "sample_weight")
    more = {} if alike else {"sample_weight": weights}
    with warnings.catch_warnings():  # of a fit that did not converge: any function is valid
        warnings.simplefilter("ignore", ConvergenceWarning)
        if is_classifier(model):
            if len(np.unique(y)) < 2:
                raise InputError(f"all values outside one fold of the clients are {y[0]:g}")
            return _Chance(model.fit(X, y, **more))
        centre, scale = float(y.mean()), float(y.std()) or 1.0
        # boosting keeps gradients in single precision
        return _Scaled(model.fit(X, (y - centre) / scale, **more), centre, scale)


def _predicted(model: Model, X: FloatArray) -> FloatArray:
    predicted = model.at(X)
    if predicted.shape != (len(X),) or not np.isfinite(predicted).all():
        raise InputError("predictions are not one finite number for each client")
    return predicted


@contextmanager
def _failures(regression: Regressor) -> Iterator[None]:
    """Turn whatever a regression raises into the reason for which there is no estimate."""
    try:
        yield
    except Exception as error:  # of scikit-learn or of whoever wrote the regression
        raise InputError(f"the regression {regression.name} failed: {error}") from error


def _add(sums: dict[str, FloatArray], name: str, part: FloatArray) -> None:
    sums[name] = sums[name] + part if name in sums else part


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PredictionPoweredMean(MeanEstimator):
    r"""Hájek's mean, moved by what predictions say of those who did not reply.

    With :math:`k(i)` the fold of a client and :math:`c_{ir} = m_{k(i)}(Z_i) - \bar m_{k(i)D}`
    (E55, E56), whose mean over the group is 0 whatever the models are,

    .. math:: \hat\mu = \frac{\sum w_{ir} D_i (y_{ir} - \lambda c_{ir})}{\sum w_{ir} D_i}
       = \hat\mu_{Hajek} + \lambda \sum_k s_k \left(\bar m_{kD} - \hat m_{kD}\right), \qquad
       u_{ir} = \frac{D_i (y_{ir} - \lambda c_{ir} - \hat\mu)}{\sum w_{ir} D_i} \qquad (E57)

    with :math:`s_k` the share of the weights in fold k and :math:`\hat m_{kD}` Hájek's mean of
    the fold's predictions. So the population is predicted by the average of all folds' models,
    weighted by :math:`s_k`, whether a client replied or not, and a reply by the model that did not
    see its client. Given the other folds a fold's model is a fixed function, so u is that of
    Hájek's mean of :math:`y - \lambda c`; a client has no leverage on its own prediction. The power
    :math:`\lambda` is that of :meth:`tuned`: 0 is Hájek's mean, 1 the difference estimator of
    Cassel, Särndal and Wretman (1976).

    Examples
    --------
    >>> from fedipw.evaluation.phases import KnownEnrollment
    >>> sample = TwoPhase(client=np.arange(12), round=np.zeros(12, dtype=int), prob=np.ones(12),
    ...                   rounds=1, enrollment=KnownEnrollment(weights=np.full(12, 2.0)))
    >>> Z = np.arange(12.0)
    >>> sure = PredictionPoweredMean(
    ...     own=Z, fold_of=np.zeros(12, dtype=int), means={"everyone": np.array([7.0])},
    ...     powers={"everyone": 1.0}, fixed=True)
    >>> sure.linear(sample, 3.0 + Z, Group()).estimate  # y = 3 + Z, of mean 7 in the population
    10.0
    """

    own: FloatArray  # (n,) predictions of the enrolled that replied
    fold_of: IntArray  # (n,)
    means: Mapping[str, FloatArray]  # (K,) of the models over the population, by group
    powers: Mapping[str, float]  # by group
    fixed: bool = False  # whether the powers were given, not tuned on these replies
    name = NAME

    @classmethod
    def tuned(
        cls,
        fit: CrossFitted,
        means: Mapping[str, FloatArray],
        sample: TwoPhase,
        values: FloatArray,
        groups: Sequence[Group],
    ) -> Self:
        r"""Return the mean with the power that makes its estimated variance least.

        .. math:: \lambda = \min\Big(1, \max\Big(0, \frac{\hat C}{\hat V(u^m)}\Big)\Big),
           \qquad \hat C = \tfrac12 \big[\hat V(u^y + u^m) - \hat V(u^y) - \hat V(u^m)\big]
           \qquad (E58)

        with :math:`\hat V` of (E23), and :math:`u^y` and :math:`u^m` the values u of Hájek's
        means of y and of c. Both stages as they were fitted are in :math:`\hat V`: what they take
        from y by themselves is not counted to the predictions. Where :math:`\hat V(u^m)` is not
        above 0 the power is 0. Each group has its own.
        """
        made = cls(own=fit.own, fold_of=fit.fold_of, means=means, powers={})
        powers = {}
        for group in groups:
            try:
                powers[group.name] = made._power(sample, values, group)
            except InputError:  # linear() raises it again, and the line has it
                continue
        return cls(own=fit.own, fold_of=fit.fold_of, means=means, powers=powers)

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        r"""Return the estimate and u.

        A tuned power is the coefficient of a regression through the origin. Where it is not at 0
        or 1, the leverage of a client on it is added to that on the mean,

        .. math:: h_i = \frac{(\kappa_i \hat t^m_i)^2}{\sum_j (\kappa_j \hat t^m_j)^2}
           \qquad (E59)

        with :math:`\hat t^m_i` the client's total (E19) of :math:`u^m`.
        """
        centred = self._supported(sample, group)
        if group.name not in self.powers:
            raise InputError("no power was tuned for the group")
        power = self.powers[group.name]
        found = HajekMean().linear(sample, values - power * centred, group)
        if self.fixed or not 0.0 < power < 1.0:
            return found
        predicted = HajekMean().linear(sample, centred, group).values[:, None]
        squares = (sample.enrollment.weights * sample.totals(predicted)[:, 0]) ** 2
        share = squares / (squares.sum() or 1.0)
        return found._replace(leverage=np.minimum(found.leverage + share, 1.0))

    def centred(self, sample: TwoPhase, group: Group) -> FloatArray:
        """Return the predictions less their model's mean over the group, c of (E57), (m,)."""
        key = EVERYONE if group.inside is None else group.name
        if key not in self.means:
            raise InputError("the population's rows of the group are not known")
        return (self.own - self.means[key][self.fold_of])[sample.client]

    def _supported(self, sample: TwoPhase, group: Group) -> FloatArray:
        """Return c, if enough clients of the group replied."""
        seen = len(np.unique(sample.client[group.flags(sample) > 0.0]))
        needed = TERMS * CLIENTS_PER_TERM
        if seen < needed:
            raise InputError(f"{seen} clients replied, the power of a prediction needs {needed}")
        return self.centred(sample, group)

    def _power(self, sample: TwoPhase, values: FloatArray, group: Group) -> float:
        y = HajekMean().linear(sample, values, group)
        m = HajekMean().linear(sample, self._supported(sample, group), group).values
        columns = np.column_stack([y.values, m, y.values + m])
        leverage = np.column_stack([y.leverage] * 3)
        each, predicted, both = sample.variance(columns, leverage).variance
        if not predicted > 0.0:
            return 0.0
        return float(np.clip(0.5 * (both - each - predicted) / predicted, 0.0, 1.0))


@final
@dataclass(frozen=True, slots=True)
class NoPrediction(MeanEstimator):
    """What takes the place of a prediction-powered mean that could not be made: why not."""

    reason: str
    name = NAME

    def linear(self, sample: TwoPhase, values: FloatArray, group: Group) -> Linear:
        """Raise with the reason."""
        del sample, values, group
        raise InputError(self.reason)


class Powered(NamedTuple):
    """A prediction-powered mean, and what people should know of it."""

    mean: MeanEstimator
    notes: tuple[str, ...] = ()


def checked_regression(predict: Any, stage: EnrollmentStage) -> Regressor | None:
    """Return the regression asked for, none if none is; raise if it cannot be used here."""
    if predict is None:
        return None
    if stage.coded is None:
        raise InputError(
            "A prediction-powered mean needs a table of the whole population: the mean of the "
            "predictions over it follows from no totals and no sample. Leave the prediction out; "
            "GREG is the regression that totals allow."
        )
    return Regressor.named(predict)


def powered_mean(
    logged: LoggedSample,
    stage: EnrollmentStage,
    predict: Any,
    groups: Sequence[Group],
    *,
    cells: Mapping[str, Cells],
    seed: int = 0,
) -> Powered:
    """Return the prediction-powered mean of logged replies, on the columns of the enrollment model.

    Parameters
    ----------
    logged, stage
        The replies, and what is known of enrollment: a table of the whole population.
    predict
        A regression, as of :meth:`Regressor.named`.
    groups, cells
        Groups to estimate for, and how the columns behind them are cut.
    seed
        Of the folds.
    """
    regression, coded = checked_regression(predict, stage), stage.coded
    assert regression is not None
    assert coded is not None
    enrolled = stage.members.frame[logged.members]
    Z = coded.design.rows(enrolled, "enrolled clients").matrix()
    order = enrolled[ID].cast(pl.String).arg_sort().to_numpy()
    try:
        fit = CrossFitted.of(
            regression, Z, logged.sample, logged.values, order=order.astype(np.int64), seed=seed
        )
        means = fit.means(coded, cells, stage.population.base)
    except InputError as error:
        return Powered(NoPrediction(str(error)))
    found = PredictionPoweredMean.tuned(fit, means, logged.sample, logged.values, groups)
    powers = [f"{power:.2f} for {name}" for name, power in found.powers.items()]
    kind = "clients" if logged.sample.clusters is None else "clusters"
    told = f"Predictions by {regression.name}, {len(fit.models)} folds of {kind}"
    return Powered(found, (f"{told}; power {some(powers)}.",) if powers else ())
