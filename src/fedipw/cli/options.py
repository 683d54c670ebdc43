"""Options that several commands share, with their help."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class FitName(StrEnum):
    """Names of windows on the command line."""

    PAST = "past"
    POOLED = "pooled"
    SAME_ROUND = "same-round"


class MissingName(StrEnum):
    """Names of policies on the command line."""

    ERROR = "error"
    INDICATOR = "indicator"
    DROP = "drop"


Rounds = Annotated[Path, typer.Option(help="Ledger: a directory of closed rounds.")]
PopulationTable = Annotated[
    Path | None,
    typer.Option(help="Population table: a .parquet or .csv file, or a directory of parts."),
]
EnrolledTable = Annotated[Path | None, typer.Option(help="Enrolled clients alone, with --targets.")]
TargetsTable = Annotated[Path | None, typer.Option(help="Population means: name,value[,se].")]
PopulationSize = Annotated[float | None, typer.Option(help="N, with --targets where it is known.")]
Enrollment = Annotated[str, typer.Option(help="Formula of enrollment; . is every covariate.")]
Participation = Annotated[
    str, typer.Option(help="Formula of participation, or of a reply once invited.")
]
Availability = Annotated[
    str, typer.Option(help="Formula of availability, where the ledger tells it.")
]
History = Annotated[
    bool, typer.Option("--history", help="Add what past rounds say of each client.")
]
Fit = Annotated[FitName, typer.Option(help="Rounds that a round's participation is fitted on.")]
Window = Annotated[int | None, typer.Option(help="Of past rounds, only the last this many.")]
RefitEvery = Annotated[int, typer.Option(help="Rounds between fits on past rounds.")]
DayLength = Annotated[float, typer.Option(help="Rounds in a day, for the clock.")]
SchemeName = Annotated[
    str | None, typer.Option(help="Method; fedipw, or calibrated-quadratic with --targets.")
]
MissingPolicy = Annotated[
    MissingName, typer.Option(help="What becomes of missing values and unknown levels.")
]
LumpBelow = Annotated[
    float | None, typer.Option(help="Merge levels with a smaller share of the rows.")
]
Threshold = Annotated[float, typer.Option(help="Probability counted as small in the report.")]
Strict = Annotated[
    float | None, typer.Option(help="Stop with code 4 if a probability is below this.")
]
ReferenceTable = Annotated[
    Path | None,
    typer.Option(help="Reference sample of the population, with --enrolled, in place of totals."),
]
ReferenceWeight = Annotated[
    str | None, typer.Option(help="Column of the reference sample's design weights.")
]
ClassifierName = Annotated[
    str | None,
    typer.Option(
        help="Classifier of both stages: logistic, boosting, forest, or a dotted name such as "
        "sklearn.ensemble.ExtraTreesClassifier. Cross-fitted by client."
    ),
]
Folds = Annotated[
    int | None, typer.Option(help="Folds of clients for cross-fitting; 5 by default, 0 for none.")
]
ScoreCalibrationName = Annotated[
    str | None, typer.Option(help="Calibration of a classifier's scores: platt or isotonic.")
]
Ridge = Annotated[float, typer.Option(help="Ridge penalty on coefficients.")]
