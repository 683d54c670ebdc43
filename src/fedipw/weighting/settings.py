"""What users say of a job, in words: formulas, windows, classifiers, methods; made into objects."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedipw.errors import InputError
from fedipw.selection.classifiers import Newton, estimator_named
from fedipw.selection.coded import Progress, TableSettings
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import ParticipationSettings, Window
from fedipw.selection.saved import ENROLLMENT, STAGES, StageModel
from fedipw.selection.steps import Clock, Formulas
from fedipw.tables.design import Missing
from fedipw.weighting.methods import default_method, method_named
from fedipw.weighting.replay import Plan

if TYPE_CHECKING:
    from fedipw.selection.classifiers import Estimator
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.tables.population import Population


RARER_AFTER = 100  # rounds: fits on all of the past are then made in proportion to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How both selection stages are estimated and turned into weights.

    Parameters
    ----------
    method
        A name or a combination of choices (:func:`fedipw.weighting.methods.method_named`);
        :func:`~fedipw.weighting.methods.default_method` where none is named.
    enrollment, participation, availability
        Formulas; ``.`` is every covariate a stage may use.
    history
        Add what past rounds say of each client.
    fit, window, decay, refit_every
        Rounds that participation is fitted on: ``past``, ``pooled`` or ``same-round``; of past
        rounds only the last ``window``, or older ones with less weight, by ``decay`` a round;
        rounds between fits, after 100 rounds in proportion to their number where all are fitted on.
    day_length, day_hours
        Rounds in a day, for the clock; hours instead, for a clock by the ledger's ``opened_at``.
    classifier, folds, score_calibration
        ``logistic``, ``boosting``, ``forest``, the dotted name of a scikit-learn classifier or one
        itself, for both stages; folds of clients for cross-fitting, 0 for none; ``platt`` or
        ``isotonic``.
    l2
        Ridge penalty of logistic regression.
    trim
        Cut weights at this multiple of a round's mean.
    soft
        Approach targets that no weights on the enrolled can meet, and penalise models that
        separate, with a note. Else both are errors; rounds in which participation separates at
        first, and no longer after the last round, have a constant rate, with a note.
    missing, lump_below
        ``error``, ``indicator`` or ``drop``; share of rows below which levels are merged.
    models
        Directory of saved models to use instead of fitting.
    client
        A ``distributed.Client`` on whose workers all work on rows is done.
    """

    method: str | None = None
    enrollment: str = "."
    participation: str = "."
    availability: str = "."
    history: bool = False
    fit: str = "past"
    window: int | None = None
    decay: float = 1.0
    refit_every: int = 10
    day_length: float = 24.0
    day_hours: float | None = None
    classifier: Any = None
    folds: int | None = None
    score_calibration: str | None = None
    l2: float = 0.0
    trim: float | None = None
    soft: bool = False
    missing: str = "error"
    lump_below: float | None = None
    models: Path | None = None
    client: Any = None

    def estimator(self) -> Estimator:
        """Return how probabilities are made of rows."""
        return estimator_named(
            self.classifier, folds=self.folds, calibration=self.score_calibration, l2=self.l2
        )

    def check_saved(self) -> None:
        """Raise if the models that will be fitted cannot be saved."""
        if not isinstance(self.estimator(), Newton):
            raise InputError(
                "Only logistic regression fitted once can be saved: a classifier, or one model per "
                "fold, has no coefficients to write. Leave --save-models out, or --classifier, "
                "--folds and --score-calibration."
            )

    def plan(self, population: Population, *, training: bool = False) -> Plan:
        """Return how rounds of a population are turned into weights.

        ``training`` is whether updates are at hand, for methods that augment.
        """
        everyone = population.targets is None
        name = self.method or default_method(everyone=everyone, training=training)
        method = method_named(name).trimmed(self.trim)
        return Plan(
            method=method if self.soft else method.strictly(),
            formulas=Formulas(
                reply=self.participation,
                availability=self.availability,
                history=self.history,
                missing=_member(Missing, self.missing, "missing"),
                lump_below=self.lump_below,
            ),
            settings=ParticipationSettings(
                window=_member(Window, self.fit, "fit"),
                last=self.window,
                decay=self.decay,
                refit_every=self.refit_every,
                clock=Clock(day_length=self.day_length, day_hours=self.day_hours),
                soft=self.soft,
                estimator=self.estimator(),
                rarer_after=RARER_AFTER,
            ),
            client=self.client,
            models=None if self.models is None else _participation_models(self.models),
        )

    def stage(
        self,
        population: Population,
        *,
        later: Collection[str] = (),
        progress: Progress | None = None,
    ) -> EnrollmentStage:
        """Return the enrollment stage; ``later`` names columns known only of enrolled clients."""
        if population.targets is not None and self.enrollment.strip() != ".":
            raise InputError(
                "--enrollment goes with --population: with --targets it is calibrated."
            )
        model = None
        if self.models is not None and population.lists_everyone:
            model = StageModel.load(self.models / f"{ENROLLMENT}.json", ENROLLMENT)
        return enrollment_stage(
            population,
            self.enrollment,
            settings=TableSettings(
                missing=_member(Missing, self.missing, "missing"),
                lump_below=self.lump_below,
                estimator=self.estimator(),
                soft=self.soft,
                client=self.client,
            ),
            model=model,
            later=later,
            progress=progress,
        )


def _member(kind: Any, value: str, name: str) -> Any:
    """Return a member of an enumeration by its value."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise InputError(f"{name} is one of {known}, not {value!r}.") from None


def _participation_models(directory: Path) -> dict[str, StageModel]:
    names = [name for name in STAGES if name != ENROLLMENT]
    found = {n: directory / f"{n}.json" for n in names if (directory / f"{n}.json").exists()}
    if not found:
        raise InputError(f"{directory} holds no saved participation model.")
    return {name: StageModel.load(path, name) for name, path in found.items()}
