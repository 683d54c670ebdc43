"""``fedipw calibrate``: weights on enrolled clients from population totals."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from fedipw.cli.options import ID, Id, Memory, Place, Separator, path_or_url
from fedipw.cli.terminal import out as _out
from fedipw.cli.terminal import say
from fedipw.errors import InputError

if TYPE_CHECKING:
    from fedipw.calibration import Calibration

_SHOWN = 30  # rows of the table of targets


class DistanceName(StrEnum):
    """Names of distances on the command line."""

    QUADRATIC = "quadratic"
    ENTROPY = "entropy"
    LOGIT = "logit"
    LINEAR = "linear"
    INVERSE_LOGIT = "inverse-logit"


def calibrate(
    units: Annotated[
        Place,
        Argument(parser=path_or_url, help="Enrolled clients: a table file or a directory."),
    ],
    targets: Annotated[
        Place, Option(parser=path_or_url, help="Population means: name,value[,se].")
    ],
    out: Annotated[
        Place,
        Option(
            parser=path_or_url, help="File for unit_id,weight, by suffix, or a directory of parts."
        ),
    ],
    distance: Annotated[
        DistanceName, Option(help="How weights keep near the base.")
    ] = DistanceName.QUADRATIC,
    base: Annotated[str | None, Option(help="Column of base weights; 1 if none.")] = None,
    bounds: Annotated[
        str | None,
        Option(help="LOW,HIGH on weight * N / base (quadratic and logit).", metavar="L,H"),
    ] = None,
    population_size: Annotated[
        float | None, Option(help="N; the sum of the base weights if not given.")
    ] = None,
    totals: Annotated[
        bool, Option("--totals", help="Targets are population totals, counts of levels.")
    ] = False,
    slack: Annotated[
        float | None, Option(help="Allow each mean to miss by this many sd(b).")
    ] = None,
    id: Id = ID,  # noqa: A002
    separator: Separator = None,
    scheduler: Annotated[
        str | None, Option(help="Dask scheduler to calibrate on, tcp://host:port.")
    ] = None,
    memory: Memory = None,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Weigh enrolled clients so that their means are the population's.

    Writes one row per enrolled client, unit_id and weight, the weights summing to 1. A column se in
    the targets makes noisy totals count for less. Ends with exit code 3 if no weights can meet the
    targets, with the constraints in conflict and the nearest that can be met.

    Tables are .parquet, .csv, .csv.gz, .tsv or .feather files, or directories of .parquet files, by
    path or URL. A table of more than two million rows is read in blocks instead of at once; the
    workers of a Dask cluster must see its files. An output without a suffix is a directory, which
    gets the rows in parts.

    Example: fedipw calibrate enrolled.parquet --targets census.csv --out weights.parquet
    """
    from fedipw.calibration import Box, calibrated_table, distance_named
    from fedipw.cli.options import check_inputs_kept, check_totals, claim, keep_to, scheduled
    from fedipw.storage.memory import check_memory
    from fedipw.tables.parts import check_output, written_rows
    from fedipw.tables.table import Table as FileTable
    from fedipw.tables.targets import Targets

    keep_to(memory)
    check_inputs_kept(out, None, units, targets)
    check_output(out)
    check_totals(population_size, totals=totals)
    claim(out)
    rule = distance_named(distance.value, None if bounds is None else _bounds(bounds))
    with scheduled(scheduler) as client:
        table, found = calibrated_table(
            FileTable(units, id=id, separator=separator),
            Targets.read(
                FileTable(targets, separator=separator), totals=population_size if totals else None
            ),
            distance=rule,
            base=base,
            population_size=population_size,
            slack=None if slack is None else Box(slack),
            client=client,
        )
    check_memory()
    with written_rows(out) as write:
        write(table)
    if as_json:
        typer.echo(
            json.dumps(
                {"out": str(out), "distance_name": distance.value, **_plain(found)}, allow_nan=False
            )
        )
    else:
        _print(found, table.height, out)


def _bounds(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--bounds {text!r}: give two numbers, as in 0.2,5.") from None
    return low, high


def _plain(found: Calibration) -> dict[str, Any]:
    return {
        "status": found.status.value,
        "iterations": found.iterations,
        "population_size": found.population_size,
        "effective_sample_size": found.effective_sample_size,
        "largest_violation": found.largest_violation,
        "distance": found.distance,
        "ratio": [float(found.ratio.min()), float(found.ratio.max())],
        "negative_weights": found.negative,
        "constraints": [
            {"name": n, "target": float(g), "aimed_at": float(t), "achieved": float(a)}
            for n, g, t, a in zip(
                found.names, found.given, found.target, found.achieved, strict=True
            )
        ],
        "dropped": found.dropped,
        "rare": found.rare,
        "notes": [*found.notes, *found.warnings()],
    }


def _print(found: Calibration, rows: int, out: Place) -> None:
    from fedipw.calibration.tables import OTHERS

    moved = bool((found.given != found.target).any())
    table = Table("target", "value", *(["aimed at"] if moved else []), "achieved", "miss in sd")
    lines = zip(
        found.names, found.given, found.target, found.achieved, found.violation, strict=True
    )
    for name, given, target, achieved, miss in lines:
        middle = [f"{target:.6g}"] if moved else []
        table.add_row(escape(name), f"{given:.6g}", *middle, f"{achieved:.6g}", f"{miss:.1e}")
    _out.print(table, rows=_SHOWN)
    say(
        f"{rows} enrolled clients, effective {found.effective_sample_size:.1f}; weight * N / base "
        f"from {found.ratio.min():.4g} to {found.ratio.max():.4g}; {found.status.value} after "
        f"{found.iterations} steps."
    )
    if found.negative:
        say(f"{found.negative} weights are negative; the quadratic distance has none.")
    for name, reason in found.dropped.items():
        if not name.endswith(f"[{OTHERS}]"):
            say(f"Not needed: {name}, {reason}.")
    for name, share in found.rare.items():
        aim = float(found.target[found.names.index(name)])
        say(
            f"Rare: {name}, {share * rows:.0f} enrolled client(s) ({share:.2%}) stand for "
            f"{aim:.2%} of the population."
        )
    for line in (*found.notes, *found.warnings()):
        say(line)
    say(f"Wrote {out}")
