"""What commands share of their input: who is known, what is fitted, how missing values go."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fedipw.cli.options import FitName, MissingName
from fedipw.cli.terminal import bar
from fedipw.errors import InputError

if TYPE_CHECKING:
    from fedipw.selection import StageModel, TableSettings
    from fedipw.tables import Ledger
    from fedipw.weighting.logrun import LogPlan
    from fedipw.weighting.people import KnownPopulation, KnownTotals


def check_sources(
    population: Path | None, enrolled: Path | None, targets: Path | None, size: float | None
) -> None:
    """Raise unless there is a population table, or enrolled clients and totals."""
    if (population is None) == (enrolled is None):
        raise InputError("Give --population, or --enrolled together with --targets.")
    if (enrolled is None) != (targets is None):
        raise InputError("--enrolled and --targets go together.")
    if population is not None and size is not None:
        raise InputError("--population-size goes with --targets: a population table has its own.")


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


def table_options(
    missing: MissingName, lump_below: float | None, l2: float, scheduler: str | None,
    stack: ExitStack,
) -> TableSettings:  # fmt: skip
    """Return how tables are fitted; a scheduler is left when the stack closes."""
    from fedipw.selection import TableSettings
    from fedipw.tables.cluster import connected
    from fedipw.tables.design import Missing

    client = None if scheduler is None else stack.enter_context(connected(scheduler))
    return TableSettings(missing=Missing(missing), lump_below=lump_below, l2=l2, client=client)


def log_plan(
    scheme: str,
    formulas: tuple[str, str, bool],
    options: TableSettings,
    fit: tuple[FitName, int | None, int, float, float],
    trim: float | None,
    models: Path | None,
) -> LogPlan:
    """Return how a ledger is turned into weights, from options."""
    from fedipw.selection import Formulas, LogSettings, LogWindow
    from fedipw.weighting.logrun import LogPlan
    from fedipw.weighting.registry import method_named

    window, last, every, day, l2 = fit
    return LogPlan(
        method=method_named(scheme),
        formulas=Formulas(
            reply=formulas[0],
            availability=formulas[1],
            history=formulas[2],
            missing=options.missing,
            lump_below=options.lump_below,
        ),
        settings=LogSettings(
            window=LogWindow(window), last=last, refit_every=every, day_length=day, l2=l2
        ),
        trim=trim,
        models=None if models is None else _participation_models(models),
    )


def _participation_models(directory: Path) -> dict[str, StageModel]:
    from fedipw.selection.stage import ENROLLMENT, STAGES, StageModel

    names = [name for name in STAGES if name != ENROLLMENT]
    found = {n: directory / f"{n}.json" for n in names if (directory / f"{n}.json").exists()}
    if not found:
        raise InputError(f"{directory} holds no saved participation model.")
    return {name: StageModel.load(path, name) for name, path in found.items()}


def known_people(
    population: Path | None,
    enrolled: Path | None,
    targets: Path | None,
    size: float | None,
    formula: str,
    options: TableSettings,
    models: Path | None,
    ledger: Ledger | None,
) -> KnownPopulation | KnownTotals:
    """Return the population of the tables given."""
    from fedipw.selection.stage import ENROLLMENT, StageModel
    from fedipw.tables.tablefile import TableFile
    from fedipw.tables.targets import Targets
    from fedipw.weighting.people import KnownPopulation, KnownTotals

    if population is None:
        assert enrolled is not None
        assert targets is not None
        return KnownTotals.of(TableFile(enrolled), Targets.read(targets), size)
    model = None if models is None else StageModel.load(models / f"{ENROLLMENT}.json", ENROLLMENT)
    with bar("population rows") as step:
        return KnownPopulation.of(
            TableFile(population), formula, settings=options, model=model,
            later=() if ledger is None else ledger.covariates, progress=step,
        )  # fmt: skip
