"""Options that several commands share, with their help, and what commands make of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedipw.cli.terminal import bar
from fedipw.errors import InputError

if TYPE_CHECKING:
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.tables.ledger import Ledger
    from fedipw.tables.population import Population
    from fedipw.weighting.settings import Settings


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
Scheduler = Annotated[
    str | None, typer.Option(help="Dask scheduler for the fits, tcp://host:port.")
]


def given_population(
    population: Path | None,
    enrolled: Path | None,
    targets: Path | None,
    size: float | None,
    reference: Path | None = None,
    reference_weight: str | None = None,
) -> Population:
    """Return the population of the tables given, or raise if they do not go together."""
    from fedipw.tables.population import Population

    if (population is None) == (enrolled is None):
        raise InputError("Give --population, or --enrolled together with --targets or --reference.")
    if (reference is None) != (reference_weight is None):
        raise InputError("--reference and --reference-weight go together.")
    if population is not None:
        if size is not None:
            raise InputError(
                "--population-size goes with --targets: a population table has its own."
            )
        if targets is not None or reference is not None:
            given = "--targets" if reference is None else "--reference"
            raise InputError(
                f"--enrolled and {given} go together: a population table lists everybody."
            )
        return Population(population)
    assert enrolled is not None
    if reference is not None and reference_weight is not None:
        if targets is not None or size is not None:
            raise InputError("--reference takes the place of --targets and --population-size.")
        return Population.from_sample(enrolled, reference, reference_weight)
    if targets is None:
        raise InputError("--enrolled and --targets go together, or --enrolled and --reference.")
    return Population.from_totals(enrolled, targets, size)


def check_inputs_kept(out: Path, rounds: Path | None, *inputs: Path | None) -> None:
    """Raise if the output would take the place of an input."""
    place = out.resolve()
    given = {path.resolve(): path for path in inputs if path is not None}
    if place in given:
        raise InputError(f"{out} is an input: write it elsewhere.")
    for folder in place.parents:  # a table in parts would have one part more
        if folder in given:
            raise InputError(f"{out} lies in the table {given[folder]}: write it elsewhere.")
    if rounds is not None and rounds.resolve() in place.parents:
        raise InputError(f"{out} lies in the ledger {rounds}: write it elsewhere.")


def check_probabilities(**options: float | None) -> None:
    """Raise if an option that takes a probability has something else."""
    for name, value in options.items():
        if value is not None and not 0.0 < value < 1.0:
            raise InputError(f"--{name} takes a probability between 0 and 1, not {value}.")


def coded_stage(
    settings: Settings, population: Population, ledger: Ledger | None
) -> EnrollmentStage:
    """Return the enrollment stage, with a bar while the population is read."""
    later = () if ledger is None else ledger.covariates
    if not population.lists_everyone:
        return settings.stage(population, later=later)
    with bar("population rows") as step:
        return settings.stage(population, later=later, progress=step)


@contextmanager
def scheduled(address: str | None) -> Iterator[object]:
    """Yield a client of a Dask scheduler that is left at the end, none without an address."""
    if address is None:
        yield None
        return
    from fedipw.tables.cluster import connected

    with connected(address) as client:
        yield client
