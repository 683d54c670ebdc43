"""Options that several commands share, in groups, and what commands make of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

from typer import Context, Option

from fedipw.cli.terminal import bar, manner, notice
from fedipw.errors import InputError, PositivityError

if TYPE_CHECKING:
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.storage import places
    from fedipw.tables.ledger import Ledger
    from fedipw.tables.population import Population
    from fedipw.tables.table import Table
    from fedipw.weighting.resume import SavedRun
    from fedipw.weighting.settings import Settings

    Place: TypeAlias = places.Place
else:
    Place = str  # Typer knows no unions; the parser makes what it is


ID = "unit_id"  # as in tables.columns, which would load all that tables need


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


def path_or_url(text: str) -> Place:
    """Return where a file or directory is, as an option names it."""
    from fedipw.storage.places import place_of

    return place_of(text)


def local_directory(text: str) -> Path:
    """Return a directory of saved models, which is on a local disk."""
    from fedipw.storage.places import local_path

    return local_path(text, "a directory of models")


Id = Annotated[
    str, Option("--id", help="Column of the clients' identifiers in tables, and in rounds.")
]
Separator = Annotated[
    str | None,
    Option(help="Of .csv and .tsv files, such as ';'; by default the one of their header."),
]
Rounds = Annotated[Place, Option(parser=path_or_url, help="Ledger: a directory of closed rounds.")]
State = Annotated[
    Path | None,
    Option(
        help="Directory of what earlier runs have learnt: of a ledger that grew, only new rounds "
        "are read. Saved to at the end."
    ),
]
Scheduler = Annotated[
    str | None,
    Option(help="Dask scheduler whose workers read and weigh, tcp://host:port."),
]
Memory = Annotated[
    str | None,
    Option(help="Memory to keep to, such as 3GB: rows beyond go to TMPDIR; an error if it cannot."),
]
Cluster = Annotated[
    str | None,
    Option(help="Column of what clients share, such as a person: the unit of standard errors."),
]
Threshold = Annotated[float, Option(help="Probability counted as small in the report.")]
Strict = Annotated[float | None, Option(help="Stop with code 4 if a probability is below this.")]


@dataclass(frozen=True, kw_only=True)
class PopulationOptions:
    """Which tables tell of the population."""

    population: Annotated[
        Place | None,
        Option(
            parser=path_or_url,
            help="Population table: a .parquet or .csv file, or a directory of parts.",
        ),
    ] = None
    enrolled: Annotated[
        Place | None,
        Option(parser=path_or_url, help="Enrolled clients alone, with --targets."),
    ] = None
    targets: Annotated[
        Place | None, Option(parser=path_or_url, help="Population means: name,value[,se].")
    ] = None
    population_size: Annotated[
        float | None, Option(help="N, with --targets where it is known.")
    ] = None
    totals: Annotated[
        bool,
        Option("--totals", help="Targets are totals, counts of levels; with --population-size."),
    ] = False

    reference: Annotated[
        Place | None,
        Option(
            parser=path_or_url,
            help="Reference sample of the population, with --enrolled, in place of totals.",
        ),
    ] = None
    reference_weight: Annotated[
        str | None, Option(help="Column of the reference sample's design weights.")
    ] = None
    base: Annotated[
        str | None, Option(help="Column of base weights: clients that each row stands for.")
    ] = None
    id: Id = ID
    separator: Separator = None

    def table(self, path: Place) -> Table:
        """Return a table of clients as the options say that it is written."""
        from fedipw.tables.table import Table

        return Table(path, id=self.id, separator=self.separator)

    def ledger(self, rounds: Place) -> Ledger:
        """Return the ledger of a directory; raise if it has no closed rounds, or not all."""
        from fedipw.tables.ledger import Ledger

        made = Ledger(rounds, id=self.id)
        made.require_rounds()
        return made

    @property
    def paths(self) -> tuple[Place | None, ...]:
        """The tables."""
        return self.population, self.enrolled, self.targets, self.reference

    def read(self) -> Population:
        """Return the population of the tables given, or raise if they do not go together."""
        from fedipw.tables.population import Population
        from fedipw.tables.table import Table

        targets, size, reference = self.targets, self.population_size, self.reference
        if (self.population is None) == (self.enrolled is None):
            raise InputError(
                "Give --population, or --enrolled together with --targets or --reference."
            )
        if (reference is None) != (self.reference_weight is None):
            raise InputError("--reference and --reference-weight go together.")
        if self.totals and targets is None:
            raise InputError("--totals goes with --targets: it says what their values are.")
        if self.population is not None:
            if size is not None:
                raise InputError(
                    "--population-size goes with --targets: a population table has its own."
                )
            if targets is not None or reference is not None:
                given = "--targets" if reference is None else "--reference"
                raise InputError(
                    f"--enrolled and {given} go together: a population table lists everybody."
                )
            return Population(self.table(self.population), base=self.base)
        assert self.enrolled is not None
        if reference is not None and self.reference_weight is not None:
            if targets is not None or size is not None:
                raise InputError("--reference takes the place of --targets and --population-size.")
            if self.base is not None:
                raise InputError(
                    "--base goes with --population or --targets: the enrolled beside a reference "
                    "sample have no base weights."
                )
            sample = Table(reference, separator=self.separator)
            return Population.from_sample(self.table(self.enrolled), sample, self.reference_weight)
        if targets is None:
            raise InputError("--enrolled and --targets go together, or --enrolled and --reference.")
        check_totals(size, totals=self.totals)
        means = Table(targets, separator=self.separator)
        return Population.from_totals(
            self.table(self.enrolled), means, size, totals=self.totals, base=self.base
        )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How both stages are modelled; fields are those of ``Settings``."""

    enrollment: Annotated[str, Option(help="Formula of enrollment; . is every covariate.")] = "."
    participation: Annotated[
        str, Option(help="Formula of participation, or of a reply once invited.")
    ] = "."
    availability: Annotated[
        str, Option(help="Formula of availability, where the ledger records it.")
    ] = "."
    history: Annotated[
        bool, Option("--history", help="Add what past rounds say of each client.")
    ] = False
    day_length: Annotated[float, Option(help="Rounds in a day, for the clock.")] = 24.0
    day_hours: Annotated[
        float | None,
        Option(help="Hours in a day, for a clock by the ledger's opened_at instead of rounds."),
    ] = None
    classifier: Annotated[
        str | None,
        Option(
            help="Classifier of both stages: logistic, boosting, forest, or a dotted name such as "
            "sklearn.ensemble.ExtraTreesClassifier. Cross-fitted by client."
        ),
    ] = None
    folds: Annotated[
        int | None, Option(help="Folds of clients for cross-fitting; 5 by default, 0 for none.")
    ] = None
    score_calibration: Annotated[
        str | None, Option(help="Calibration of a classifier's scores: platt or isotonic.")
    ] = None
    missing: Annotated[
        MissingName, Option(help="What becomes of missing values and unknown levels.")
    ] = MissingName.ERROR
    lump_below: Annotated[
        float | None, Option(help="Merge levels with a smaller share of the rows.")
    ] = None
    l2: Annotated[float, Option(help="Ridge penalty on coefficients.")] = 0.0
    soft: Annotated[
        bool,
        Option("--soft", help="Approach targets that cannot be met; penalise fits that separate."),
    ] = False

    def settings(self, **more: Any) -> Settings:
        """Return the settings of a job, with ``more`` of them."""
        from fedipw.weighting.settings import Settings

        return Settings(**asdict(self), **more)


@dataclass(frozen=True, kw_only=True)
class WeightOptions(ModelOptions):
    """How rounds are weighed as they came."""

    method: Annotated[
        str | None,
        Option(
            "--scheme", help="Method; fedipw-hajek, or calibrated-entropy-hajek with --targets."
        ),
    ] = None
    fit: Annotated[
        FitName,
        Option("--participation-fit", help="Rounds that a round's participation is fitted on."),
    ] = FitName.PAST
    window: Annotated[int | None, Option(help="Of past rounds, only the last this many.")] = None
    decay: Annotated[
        float,
        Option(help="Weight of a past round relative to the one after it; 1 counts all alike."),
    ] = 1.0
    refit_every: Annotated[int, Option(help="Rounds between fits on past rounds.")] = 10
    trim: Annotated[
        float | None, Option(help="Cut weights at this multiple of a round's mean.")
    ] = None
    models: Annotated[
        Path | None,
        Option(
            parser=local_directory,
            metavar="PATH",
            help="Directory of saved models to use instead of fitting.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """How much any command says."""

    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Print tables and errors alone, no sentences.")
    ] = False
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Print versions, times and warnings of libraries too.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What becomes of files that stand where outputs go; :func:`claim` looks at it."""

    force: Annotated[bool, Option("--force", help="Replace output files that are there.")] = False


_running: list[Context] = []  # the command that runs is the last
ALWAYS = frozenset({"quiet", "verbose", "force", "help"})  # options that go with all others


def flat(command: Callable[..., None], *more: type[Any]) -> Callable[..., None]:
    """Return a command that takes the options of its groups one by one, as Typer wants them.

    ``more`` are groups that the command itself does not look at; :class:`CommonOptions` are held
    while it runs.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {n: kind for n, kind in hints.items() if is_dataclass(kind)}
    single = {}
    for name, given in inspect.signature(command).parameters.items():
        if name not in groups:
            single[name] = given.replace(annotation=hints[name])
            continue
        kinds = get_type_hints(groups[name], include_extras=True)
        for one in fields(groups[name]):
            single[one.name] = given.replace(
                name=one.name, default=one.default, annotation=kinds[one.name]
            )
    for group in more:
        kinds = get_type_hints(group, include_extras=True)
        for one in fields(group):
            single[one.name] = inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default,
                annotation=kinds[one.name],
            )  # fmt: skip

    asks = "ctx" in single
    single["ctx"] = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=Context)

    @wraps(command)
    def called(ctx: Context, **given: Any) -> None:
        said = {name: given[name] for group in more for name in (f.name for f in fields(group))}
        given = {name: value for name, value in given.items() if name not in said}
        made = {
            name: kind(**{one.name: given.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
        }
        if asks:
            given["ctx"] = ctx
        _running.append(ctx)
        try:
            with manner(quiet=said.get("quiet", False), verbose=said.get("verbose", False)):
                command(**made, **given)
        finally:
            _running.pop()

    options = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in single.values()]
    called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in options}
    return called


def check_inputs_kept(out: Place, rounds: Place | None, *inputs: Place | None) -> None:
    """Raise if the output would take the place of an input."""
    from fedipw.storage.places import identity

    place = identity(out)
    given = {identity(path): path for path in inputs if path is not None}
    ledger = None if rounds is None else identity(rounds)
    if place in given or place == ledger:
        raise InputError(f"{out} is an input: write it elsewhere.")
    for path, named in given.items():  # a directory of parts is replaced as a whole
        if place in _folders(path):
            raise InputError(f"{out} holds the input {named}: write it elsewhere.")
    for folder in _folders(place):  # a table in parts would have one part more
        if folder in given:
            raise InputError(f"{out} lies in the table {given[folder]}: write it elsewhere.")
        if folder == ledger:
            raise InputError(f"{out} lies in the ledger {rounds}: write it elsewhere.")


def _folders(place: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the directories that a place is in."""
    store, path = place
    return [(store, str(folder)) for folder in PurePosixPath(path).parents]


def claim(*places: Place | None) -> None:
    """Hold the outputs of this command until it ends, or raise if another one writes them.

    Nothing is written over: a file that is there, or a directory that holds something, is an error
    without ``--force``. An output at a URL cannot be held.
    """
    from fedipw.storage.lock import claimed

    command = _running[-1]
    given = [place for place in places if place is not None]
    check_free(*given)
    for place in given:
        if isinstance(place, Path):
            command.with_resource(claimed(place, f"runs fedipw {command.info_name} for it"))


def check_free(*places: Place | None) -> None:
    """Raise if something would be written over without ``--force``; say so with it."""
    for place in places:
        if place is None or not _is_taken(place):
            continue
        if not _running[-1].params.get("force"):
            raise InputError(
                f"{place} is there already: choose another name, or add --force to replace it."
            )
        notice(f"notice: {place} is there already and will be replaced (--force).")


def _is_taken(place: Place) -> bool:
    from fedipw.storage.places import children

    try:
        if place.is_dir():
            return bool(children(place))
        return os.path.lexists(place) if isinstance(place, Path) else place.exists()
    except OSError:  # what cannot be looked at cannot be written either, which is told later
        return False


def check_totals(size: float | None, *, totals: bool) -> None:
    """Raise if totals are given without what they are divided by."""
    if totals and size is None:
        raise InputError("--totals needs --population-size: totals are divided by N.")


def check_probabilities(**options: float | None) -> None:
    """Raise if an option that takes a probability has something else."""
    for name, value in options.items():
        if value is not None and not 0.0 < value < 1.0:
            raise InputError(f"--{name} takes a probability between 0 and 1, not {value}.")


def check_strict(strict: float | None, enrollment: float | None, participation: float) -> None:
    """Raise if the smallest probability of a stage is below the threshold, where there is one."""
    if strict is None:
        return
    if enrollment is not None and enrollment < strict:
        raise PositivityError("enrollment probability of the population", enrollment, strict)
    if participation < strict:
        raise PositivityError("participation probability of a reply", participation, strict)


def coded_stage(
    settings: Settings, population: Population, ledger: Ledger | None
) -> EnrollmentStage:
    """Return the enrollment stage, with a bar while the population is read."""
    later = () if ledger is None else ledger.covariates
    if not population.lists_everyone:
        return settings.stage(population, later=later)
    with bar("population rows") as step:
        return settings.stage(population, later=later, progress=step)


def going_on(state: Path | None, job: str) -> SavedRun | None:
    """Return what earlier runs of a job have learnt, held until the command ends; none if none."""
    if state is None:
        return None
    from fedipw.weighting.resume import saved_run

    return _running[-1].with_resource(saved_run(state, job))


def keep_to(memory: str | None) -> None:
    """Keep to a limit of memory until this command ends."""
    from fedipw.storage.memory import bytes_of, memory_limit

    size = None if memory is None else bytes_of(memory)
    _running[-1].with_resource(memory_limit(size))


@contextmanager
def scheduled(address: str | None) -> Iterator[object]:
    """Yield a client of a Dask scheduler that is left at the end, none without an address."""
    if address is None:
        yield None
        return
    from fedipw.tables.cluster import connected

    with connected(address) as client:
        yield client
