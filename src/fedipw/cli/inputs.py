"""What commands share of their input: where clients and rounds are, and how they are fitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedipw.cli.terminal import bar
from fedipw.errors import InputError

if TYPE_CHECKING:
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.tables.ledger import Ledger
    from fedipw.tables.population import Population
    from fedipw.weighting.settings import Settings


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
