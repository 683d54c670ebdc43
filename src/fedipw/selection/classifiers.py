"""Selection probabilities from any classifier: folds by client, calibrated scores, estimators.

An :class:`Estimator` makes a :class:`Fit` of coded rows. :class:`Newton` is the default;
:class:`Classifier` takes any scikit-learn classifier, cross-fitted by client if asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
from scipy.special import expit, logit

from fedipw.errors import InputError, NotConvergedError, SeparationError
from fedipw.numerics.checks import check_finite, check_probability, check_rows, some
from fedipw.selection.logistic import (
    DECREMENT_TOL,
    GRADIENT_TOL,
    LogisticFit,
    logistic_fit,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics import BoolArray, FloatArray, IdArray, IntArray
    from fedipw.selection.propensity import PropensityModel
    from fedipw.selection.rowstore import StoredRows

PENALTY = 1.0  # l2 of a fit that would separate without one


def penalty_note(stage: str, error: SeparationError | NotConvergedError) -> str:
    """Return what is said of a stage whose fit got a penalty, the same wherever it is said.

    >>> penalty_note("enrollment", SeparationError(("os[web]",), 90))[:60]
    'enrollment by a fit with a penalty of 1: os separate(s) sele'
    """
    return f"{stage} by a fit with a penalty of {PENALTY:g}: {error.reason}"


def rate_note(stage: str, error: SeparationError | NotConvergedError) -> str:
    """Return what is said of a stage whose fit gave way to one rate for all.

    >>> rate_note("participation", SeparationError(("os[web]",), 90))[:60]
    'participation by a constant rate, not by a model: os separat'
    """
    return f"{stage} by a constant rate, not by a model: {error.reason}"


def fitted_model(
    classifier: Any, X: FloatArray, selected: ArrayLike, names: Sequence[str]
) -> PropensityModel:
    """Return a model fitted in earnest: what scikit-learn would warn of is an error here."""
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415

    from fedipw.selection.propensity import NewtonLogistic, PropensityModel  # noqa: PLC0415

    model = PropensityModel(classifier)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # raised below, with names
        model.fit(X, np.asarray(selected, dtype=bool))
    inner = model.classifier_
    if isinstance(inner, NewtonLogistic) and inner.separation_:
        raise SeparationError(tuple(names[j] for j in inner.separation_), len(X))
    if isinstance(inner, NewtonLogistic) and not inner.converged_:
        raise NotConvergedError(inner.n_iter_, inner.gradient_norm_, GRADIENT_TOL)
    return model


class ScoreMap(Protocol):
    """A map from a classifier's score to a probability."""

    def prob(self, score: FloatArray) -> FloatArray:
        """Return the probabilities of these scores, (m,)."""


class ScoreCalibration(Protocol):
    """How scores are turned into probabilities."""

    def fitted(self, score: FloatArray, selected: BoolArray) -> ScoreMap:
        """Return the map learnt from scores (m,) of rows that did not train the classifier."""


@final
@dataclass(frozen=True, slots=True)
class Unchanged:
    """The map of no calibration: a score is the probability."""

    def prob(self, score: FloatArray) -> FloatArray:
        """Return the scores."""
        return score


@final
@dataclass(frozen=True, slots=True)
class PlattMap:
    """A straight line between log odds: slope below 1 draws over-confident scores together."""

    slope: float
    intercept: float

    def prob(self, score: FloatArray) -> FloatArray:
        """Return the probabilities of scores strictly between 0 and 1, (m,)."""
        mapped: FloatArray = expit(self.intercept + self.slope * _log_odds(score))
        return mapped


@final
@dataclass(frozen=True, slots=True)
class Platt:
    r"""Logistic regression of the label on the logit of the score, by maximum likelihood.

    :math:`\text{logit}\, \pi = a + b\, \text{logit}\, s`. Over the rows it is fitted on, the mean
    probability equals the share selected. A score of exactly 0 or 1 has no logit and is refused.

    >>> score, label = np.array([0.2, 0.2, 0.2, 0.8, 0.8, 0.8]), np.array([0, 0, 1, 0, 1, 1]) == 1
    >>> round(Platt().fitted(score, label).slope, 9)  # log 2 / log 4
    0.5
    >>> Platt().fitted(score, label).prob(score).round(3)
    array([0.333, 0.333, 0.333, 0.667, 0.667, 0.667])
    """

    def fitted(self, score: FloatArray, selected: BoolArray) -> PlattMap:
        """Return the line through these log odds."""
        column = _log_odds(score)[:, None]
        line = fitted_model(None, column, selected, ("logit of the score",)).classifier_
        return PlattMap(float(line.coef_[0, 0]), float(line.intercept_[0]))


@final
@dataclass(frozen=True, slots=True, eq=False)
class IsotonicMap:
    """Steps that never go down, joined by straight lines; constant beyond the first and last."""

    score: FloatArray  # (k,) ascending
    level: FloatArray  # (k,) probabilities there

    def prob(self, score: FloatArray) -> FloatArray:
        """Return the probabilities of any scores, (m,)."""
        mapped: FloatArray = np.interp(score, self.score, self.level)
        return mapped


@final
@dataclass(frozen=True, slots=True)
class Isotonic:
    """The non-decreasing map of least squared error.

    Its lowest step is 0 whenever the lowest scores it is fitted on are all of unselected rows, and
    a selected row of another fold that falls on it has no weight: this is an error, and with
    scores from a model fine enough to have few ties hardly avoidable. ``rows_per_class`` is the way
    out: neighbouring steps are pooled, from the lowest up, until each holds at least so many
    selected and so many unselected rows.

    >>> score, label = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0, 0, 1, 1]) == 1
    >>> Isotonic().fitted(score, label).level
    array([0., 0., 1., 1.])
    >>> Isotonic(rows_per_class=2).fitted(score, label).level
    array([0.5, 0.5])
    """

    rows_per_class: int = 0

    def __post_init__(self) -> None:
        if self.rows_per_class < 0:
            raise InputError(f"rows_per_class must be 0 or more, not {self.rows_per_class!r}.")

    def fitted(self, score: FloatArray, selected: BoolArray) -> IsotonicMap:
        """Return the steps through these labels."""
        held = int(min(selected.sum(), (~selected).sum()))
        if held < self.rows_per_class:
            raise InputError(f"{held} rows of one kind cannot give {self.rows_per_class} per step.")
        at, rank, rows = np.unique(score, return_inverse=True, return_counts=True)
        ones = np.bincount(rank, weights=selected).astype(np.int64)
        from sklearn.isotonic import isotonic_regression  # noqa: PLC0415

        level = isotonic_regression(ones / rows, sample_weight=rows)
        first = np.flatnonzero(np.diff(level, prepend=-1.0))  # where each step begins
        first = _pooled(first, ones, rows - ones, self.rows_per_class)
        last = np.append(first[1:], len(at)) - 1
        share = np.add.reduceat(ones, first) / np.add.reduceat(rows, first)
        ends = np.column_stack([at[first], at[last]]).ravel()
        once = np.append(True, np.diff(ends) > 0.0)  # a step of one score has one end
        return IsotonicMap(ends[once], np.repeat(share, 2)[once])


def _pooled(first: IntArray, ones: IntArray, zeros: IntArray, least: int) -> IntArray:
    """Return the beginnings of steps that are left when each must hold ``least`` of both labels."""
    kept, held = [0], np.zeros(2, dtype=np.int64)
    steps = zip(np.add.reduceat(ones, first), np.add.reduceat(zeros, first), first, strict=True)
    for one, zero, begin in steps:
        if begin and held.min() >= least:
            kept.append(int(begin))
            held[:] = 0
        held += (one, zero)
    if held.min() < least and len(kept) > 1:  # the highest scores join the step below
        kept.pop()
    return np.array(kept)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossFit:
    """A classifier fitted once per fold of clients, on the other folds.

    ``models[k]`` saw no row of fold k. ``maps[k]`` was fitted on the out-of-fold scores and labels
    of the other folds; labels of fold k reach it only through models that gave these scores.
    """

    prob: FloatArray  # (n,) of each row, by its fold's model and map
    score: FloatArray  # (n,) of each row, by its fold's model alone
    fold_of: IntArray  # (n,) from 0
    models: tuple[PropensityModel, ...]
    maps: tuple[ScoreMap, ...]

    def calibrated(self, selected: ArrayLike, calibration: ScoreCalibration) -> CrossFit:
        """Return the same models with maps fitted on their scores and the labels (n,)."""
        y = _flags(selected)
        check_rows(len(self.fold_of), selected=y)
        own = [self.fold_of == k for k in range(len(self.models))]
        maps = tuple(calibration.fitted(self.score[~mine], y[~mine]) for mine in own)
        prob = np.empty(len(y))
        for to_prob, mine in zip(maps, own, strict=True):
            prob[mine] = to_prob.prob(self.score[mine])
        name = f"probability of selected rows, calibrated by {calibration!r},"
        check_probability(np.where(y, prob, 1.0), name)
        return replace(self, prob=prob, maps=maps)

    def prob_at(self, X: ArrayLike) -> FloatArray:
        """Return the mean over the folds of P(selected) of new clients with covariates (m, q)."""
        return ClassifierFit(self.models, self.maps).prob(np.asarray(X).T)


def client_folds(
    selected: ArrayLike, groups: IdArray, *, folds: int = 5, rng: np.random.Generator
) -> IntArray:
    """Draw the fold of each row, (n,), from 0: all rows of a client share one.

    The share selected is kept about equal between folds, so who is in which fold depends on the
    labels ``selected`` (n,) as well as on chance. ``groups`` (n,) names the client of each row.

    >>> client_folds([0, 0, 1, 1], np.array([7, 7, 8, 8]), folds=2, rng=np.random.default_rng(0))
    array([1, 1, 0, 0])
    """
    y, groups = _flags(selected), np.asarray(groups)
    check_rows(len(y), groups=groups)
    clients = len(np.unique(groups))
    if folds < 2 or folds > clients:
        raise InputError(f"{folds} folds over {clients} clients: need 2 to {clients}.")
    rare = int(min(y.sum(), (~y).sum()))
    if rare < folds:
        raise InputError(
            f"{int(y.sum())} of {len(y)} rows are selected: with {folds} folds each needs rows of "
            f"both kinds. Use at most {rare} folds, or a model that needs no cross-fitting."
        )
    chance = int(rng.integers(2**31))
    alone = clients == len(y)  # one row each: the plain split is fast for any number
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # noqa: PLC0415

    kind = StratifiedKFold if alone else StratifiedGroupKFold
    fold_of = np.empty(len(y), dtype=np.int64)
    split = kind(folds, shuffle=True, random_state=chance).split(y, y, None if alone else groups)
    for fold, (_, own) in enumerate(split):
        fold_of[own] = fold
    return fold_of


def drawn_folds(clients: IntArray, members: int, folds: int, rng: np.random.Generator) -> IntArray:
    """Draw the folds of some of the members by chance alone, -1 for the others, (members,).

    >>> drawn_folds(np.array([4, 0, 2]), 5, 3, np.random.default_rng(0))
    array([ 2, -1,  0, -1,  1])
    """
    if not 2 <= folds <= len(clients):
        raise InputError(f"{folds} folds over {len(clients)} clients: need 2 to {len(clients)}.")
    out = np.full(members, -1)
    out[np.sort(clients)] = rng.permutation(len(clients)) % folds  # whatever order rows come in
    return out


def cross_fit(
    classifier: Any,
    X: ArrayLike,
    selected: ArrayLike,
    fold_of: IntArray,
    *,
    names: Sequence[str] | None = None,
    calibration: ScoreCalibration | None = None,
) -> CrossFit:
    """Fit P(selected) of the rows of each fold on the rows of the others.

    Parameters
    ----------
    classifier
        Any scikit-learn classifier with ``predict_proba``; unpenalised logistic regression if
        ``None``.
    X
        Covariates, (n, q).
    selected
        Labels, (n,).
    fold_of
        Fold of each row from 0, (n,); see :func:`client_folds`.
    names
        Names of the columns, for error messages.
    calibration
        :class:`Platt`, :class:`Isotonic` or another map of scores; none by default.

    Examples
    --------
    >>> from sklearn.ensemble import HistGradientBoostingClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(2000, 2))
    >>> y = rng.random(2000) < np.where(X[:, 0] > 0, 0.8, 0.2)
    >>> folds = client_folds(y, np.arange(2000), rng=rng)
    >>> boosting = HistGradientBoostingClassifier(max_depth=1, random_state=0)
    >>> fit = cross_fit(boosting, X, y, folds, calibration=Platt())
    >>> fit.prob.shape, fit.prob_at([[1.0, 0.0], [-1.0, 0.0]]).round(1)
    ((2000,), array([0.8, 0.2]))
    """
    y, Z = _flags(selected), np.asarray(X, dtype=np.float64)
    names = _checked_names(Z, len(y), names)
    fold_of = np.asarray(fold_of)
    check_rows(len(y), fold_of=fold_of)
    folds = _checked_folds(fold_of, y)
    own = [fold_of == k for k in range(folds)]
    models = tuple(fitted_model(classifier, Z[~mine], y[~mine], names) for mine in own)
    score = np.empty(len(y))
    for model, mine in zip(models, own, strict=True):
        score[mine] = model.predict_proba(Z[mine])[:, 1]
    fit = CrossFit(
        prob=score, score=score, fold_of=fold_of, models=models, maps=(Unchanged(),) * folds
    )
    return fit if calibration is None else fit.calibrated(y, calibration)


def cross_fitted_prob(
    classifier: Any,
    X: ArrayLike,
    selected: ArrayLike,
    groups: IdArray,
    *,
    folds: int = 5,
    rng: np.random.Generator,
    names: Sequence[str] | None = None,
    calibration: ScoreCalibration | None = None,
) -> FloatArray:
    """Return each row's P(selected), (n,), from a model that never saw its client.

    ``groups`` (n,) names the client of each row; all rows of a client share a fold, so that neither
    its own selection nor its other rounds shape its probability. The models and maps behind it are
    those of :func:`cross_fit` with the folds of :func:`client_folds`.

    >>> rng = np.random.default_rng(0)
    >>> X, y = rng.normal(size=(60, 1)), rng.random(60) < 0.5
    >>> prob = cross_fitted_prob(None, X, y, np.arange(60), folds=3, rng=rng)
    >>> prob.shape
    (60,)
    """
    fold_of = client_folds(selected, groups, folds=folds, rng=rng)
    return cross_fit(classifier, X, selected, fold_of, names=names, calibration=calibration).prob


class Fit(Protocol):
    """Probabilities of rows, whatever they were learnt by."""

    @property
    def constant(self) -> tuple[str, ...]:
        """Columns that never varied in the rows it was learnt from, where that is known."""

    @property
    def cross_fitted(self) -> bool:
        """Whether clients that it has seen get a model that did not see them."""

    def prob(self, columns: FloatArray, clients: IntArray | None = None) -> FloatArray:
        """Return the probability of rows that lie by column, (q, m) to (m,).

        ``clients`` (m,) are those the rows belong to, where the fit has seen them: a cross-fitted
        one answers with a model that did not.
        """


@final
@dataclass(frozen=True, slots=True)
class Rate:
    """One probability for all rows."""

    rate: float
    constant: tuple[str, ...] = ()
    cross_fitted: bool = False

    def prob(self, columns: FloatArray, clients: IntArray | None = None) -> FloatArray:
        """Return the rate, m times."""
        del clients
        return np.full(columns.shape[1], self.rate)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ClassifierFit:
    """A fitted classifier, or one for each fold of clients, fitted on the other folds."""

    models: tuple[PropensityModel, ...]
    maps: tuple[ScoreMap, ...]
    fold_of: IntArray | None = None  # (n,) of the clients, -1 for those it has not seen
    constant: tuple[str, ...] = ()

    @property
    def cross_fitted(self) -> bool:
        """Whether there is a model for each fold."""
        return self.fold_of is not None

    def prob(self, columns: FloatArray, clients: IntArray | None = None) -> FloatArray:
        """Return each row's probability from the model that never saw its client, (m,).

        Rows of clients in no fold get the mean over the folds' models.
        """
        X = np.ascontiguousarray(columns.T)
        if self.fold_of is None or clients is None:
            return self._mean(X)
        prob, fold = np.empty(len(X)), self.fold_of[clients]
        for k in np.unique(fold).tolist():
            here = fold == k
            prob[here] = self._mean(X[here]) if k < 0 else self._of(k, X[here])
        return prob

    def _mean(self, X: FloatArray) -> FloatArray:
        mean: FloatArray = np.mean([self._of(k, X) for k in range(len(self.models))], axis=0)
        return mean

    def _of(self, k: int, X: FloatArray) -> FloatArray:
        return self.maps[k].prob(self.models[k].predict_proba(X)[:, 1])


class Estimator(Protocol):
    """How probabilities are made of coded rows."""

    @property
    def weights_rows(self) -> bool:
        """Whether rows may count less than once."""

    @property
    def standardises(self) -> bool:
        """Whether columns are stored with about mean 0 and deviation 1."""

    def fitted(
        self, rows: StoredRows, names: Sequence[str], start: FloatArray | None = None
    ) -> Fit:
        """Return the fit; ``start`` (q + 1,) is a point near it, for those that can use one."""


@final
@dataclass(frozen=True, slots=True)
class Newton:
    """Maximum-likelihood logistic regression, with a ridge penalty if asked (P4)."""

    l2: float = 0.0
    standardises = weights_rows = True

    def fitted(
        self, rows: StoredRows, names: Sequence[str], start: FloatArray | None = None
    ) -> LogisticFit:
        """Return the maximum; raise if there is none."""
        tolerance = DECREMENT_TOL if start is None else WARM_DECREMENT_TOL
        found = logistic_fit(
            rows, names, frame=rows.frame, l2=self.l2, start=start, decrement_tol=tolerance
        )
        return found.checked()


# Newton's error after a step is of the order of the decrement before it: 1e-12 in the mean
# log-likelihood. From a start that near, one pass is a fit.
WARM_DECREMENT_TOL = 1e-12


@final
@dataclass(frozen=True, slots=True, eq=False)
class Classifier:
    """Any scikit-learn classifier, cross-fitted by client, its scores calibrated.

    Parameters
    ----------
    classifier
        With ``predict_proba``; unpenalised logistic regression if none.
    folds
        Nobody's probability comes from a model that saw its rows; none fits once on all rows.
    calibration
        :class:`Platt` or :class:`Isotonic` on scores of folds left out.
    seed
        Of the folds: whole numbers, as of :func:`numpy.random.default_rng`.
    """

    classifier: Any = None
    folds: int | None = None
    calibration: ScoreCalibration | None = None
    seed: int | Sequence[int] = 0
    standardises = weights_rows = False

    def __post_init__(self) -> None:
        if self.calibration is not None and self.folds is None:
            raise InputError("Scores are calibrated out of fold: give the number of folds.")

    def fitted(
        self, rows: StoredRows, names: Sequence[str], start: FloatArray | None = None
    ) -> ClassifierFit:
        """Return the classifier fitted on all rows, or one per fold."""
        del start
        X, selected, clients = rows.matrix()
        if self.folds is None:
            return ClassifierFit(
                (fitted_model(self.classifier, X, selected, names),), (Unchanged(),)
            )
        folds = rows.fold_of(self.folds, np.random.default_rng(self.seed))
        own = folds[clients]
        if self.calibration is None:
            models = tuple(
                fitted_model(self.classifier, X[own != k], selected[own != k], names)
                for k in range(self.folds)
            )
            return ClassifierFit(models, (Unchanged(),) * self.folds, folds)
        found = cross_fit(
            self.classifier, X, selected, own, names=names, calibration=self.calibration
        )
        return ClassifierFit(found.models, found.maps, folds)


Recipe = tuple[str, str, dict[str, Any]]  # module, class and settings
CLASSIFIERS: dict[str, Recipe] = {
    "boosting": ("sklearn.ensemble", "HistGradientBoostingClassifier", {"random_state": 0}),
    "forest": (
        "sklearn.ensemble",
        "RandomForestClassifier",
        {"random_state": 0, "min_samples_leaf": 20, "n_estimators": 200},
    ),
}
# Without pooling, some selected client of any table of size falls on a step of probability 0.
SCORE_CALIBRATIONS: dict[str, ScoreCalibration] = {
    "platt": Platt(),
    "isotonic": Isotonic(rows_per_class=10),
}
FOLDS = 5


def estimator_named(
    name: Any = None,
    *,
    folds: int | None = None,
    calibration: str | None = None,
    l2: float = 0.0,
    seed: int | Sequence[int] = 0,
) -> Estimator:
    """Return an estimator by the name of its classifier.

    ``logistic`` is maximum likelihood; ``boosting`` and ``forest`` are scikit-learn's; a dotted
    name such as ``sklearn.ensemble.ExtraTreesClassifier`` is any classifier that can be imported,
    with its own defaults, and a classifier may be given itself. Classifiers are cross-fitted with
    five folds of clients unless ``folds`` says otherwise; 0 fits once on all rows.

    >>> estimator_named("boosting").folds
    5
    >>> estimator_named("bosting")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: No classifier 'bosting'. Known: logistic, boosting, forest, or the...
    """
    if name is None or name == "logistic":
        if not folds and calibration is None:
            return Newton(l2)
        from fedipw.selection.propensity import NewtonLogistic  # noqa: PLC0415

        classifier = NewtonLogistic(l2) if l2 else None
    elif l2:
        raise InputError(f"l2 is a penalty of logistic regression; {name} has settings of its own.")
    else:
        classifier = seeded(_made(name))
    if calibration is not None and calibration not in SCORE_CALIBRATIONS:
        raise InputError(
            f"No calibration of scores {calibration!r}; there is {some(SCORE_CALIBRATIONS)}."
        )
    return Classifier(
        classifier=classifier,
        folds=FOLDS if folds is None else folds or None,
        calibration=None if calibration is None else SCORE_CALIBRATIONS[calibration],
        seed=seed,
    )


def seeded(estimator: Any) -> Any:
    """Return an estimator of scikit-learn that gives the same fit twice: without a seed it gets 0.

    >>> from sklearn.ensemble import ExtraTreesClassifier
    >>> seeded(ExtraTreesClassifier()).random_state
    0
    """
    if getattr(estimator, "random_state", 0) is not None:
        return estimator
    from sklearn.base import clone  # noqa: PLC0415

    return clone(estimator).set_params(random_state=0)


def named_object(name: Any, known: Mapping[str, Recipe], kind: str) -> Any:
    """Return what is made by a name of ours or by a dotted one, or what is given; none if unknown.

    >>> named_object("boosting", CLASSIFIERS, "classifier")
    HistGradientBoostingClassifier(random_state=0)
    """
    if not isinstance(name, str):
        return name
    if name in known:
        module, attribute, settings = known[name]
        return getattr(import_module(module), attribute)(**settings)
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)() if module else None
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"The {kind} {name!r} cannot be made: {error}.") from error


def is_estimator(made: Any, method: str) -> bool:
    """Return whether something is an object of scikit-learn, not its class, that has a method.

    >>> from fedipw.selection.propensity import NewtonLogistic
    >>> is_estimator(NewtonLogistic(), "predict_proba"), is_estimator(NewtonLogistic, "fit")
    (True, False)
    """
    able = hasattr(made, method) and hasattr(made, "__sklearn_tags__")
    return able and not isinstance(made, type)


def _made(name: Any) -> Any:
    """Return a classifier by a name of ours or by a dotted one, or the one given."""
    from sklearn.base import is_classifier  # noqa: PLC0415

    made = named_object(name, CLASSIFIERS, "classifier")
    if not is_estimator(made, "predict_proba") or not is_classifier(made):
        raise InputError(
            f"No classifier {name!r}. Known: logistic, {', '.join(CLASSIFIERS)}, or the dotted "
            "name of a scikit-learn classifier with predict_proba, or one itself."
        )
    return made


def _log_odds(score: FloatArray) -> FloatArray:
    bad = ~((score > 0.0) & (score < 1.0))
    if bad.any():
        raise InputError(
            f"{int(bad.sum())} of {score.size} scores are not strictly between 0 and 1 "
            f"({some(sorted(set(score[bad].tolist())))}), so they have no logit. Make the "
            "classifier less sure (larger leaves, fewer steps, a penalty), or calibrate with "
            "Isotonic(), which uses only the order of scores."
        )
    odds: FloatArray = logit(score)
    return odds


def _flags(selected: ArrayLike) -> BoolArray:
    values = np.asarray(selected)
    if values.ndim != 1:
        raise InputError(f"selected has shape {values.shape}, expected (n,).")
    flags = values.astype(bool)
    if not (values == flags).all():
        wrong = values[values != flags].tolist()
        raise InputError(f"selected must be true or false (1 or 0), not {some(wrong)}.")
    return flags


def _checked_names(X: FloatArray, rows: int, names: Sequence[str] | None) -> Sequence[str]:
    if X.ndim != 2 or not X.shape[1]:
        raise InputError(f"X has shape {X.shape}, expected (n, q) with q of 1 or more.")
    check_rows(rows, X=X)
    names = [f"column {j}" for j in range(X.shape[1])] if names is None else names
    if len(names) != X.shape[1]:
        raise InputError(f"{len(names)} names for {X.shape[1]} columns of X.")
    check_finite(X, names, "cross-fitting")
    return names


def _checked_folds(fold_of: IntArray, y: BoolArray) -> int:
    """Return the number of folds, each with rows of its own and both labels outside."""
    if not np.issubdtype(fold_of.dtype, np.integer) or not len(fold_of) or fold_of.min() < 0:
        raise InputError("fold_of must hold whole numbers from 0, one per row.")
    rows = np.bincount(fold_of)
    ones = np.bincount(fold_of, weights=y)
    if len(rows) < 2 or not rows.all():
        raise InputError(
            f"Rows per fold are {some(rows.tolist())}: need two folds or more and none empty. Use "
            "fewer folds if a few clients hold most rows."
        )
    for fold in range(len(rows)):
        others, chosen = len(y) - int(rows[fold]), int(ones.sum() - ones[fold])
        if chosen in {0, others}:
            raise InputError(
                f"Of the {others} rows outside fold {fold}, {chosen} are selected: "
                "nothing to tell the two kinds apart. Use fewer folds, or draw them again."
            )
    return len(rows)
