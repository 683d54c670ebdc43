"""``fedipw study``: methods by scenarios by seeds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedipw.cli.terminal import bar, say
from fedipw.cli.terminal import out as _out

if TYPE_CHECKING:
    from fedipw.lab.study import StudyTables
    from fedipw.lab.studyfile import Study

_LOST_WORKER, _STOPPED = 1, 130


def study(
    file: Annotated[Path, typer.Argument(help="Study, a TOML file.", metavar="STUDY")],
    out: Annotated[Path, typer.Option(help="Directory for tables, figures and page.")] = Path(
        "study"
    ),
    workers: Annotated[
        int | None, typer.Option(help="Processes; as many as there are processors by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")] = False,
) -> None:
    """Run methods by scenarios by seeds, and compare them.

    Writes results.parquet, curves.parquet, summary.parquet, summary.csv, comparison.csv, ranks.csv,
    figures, manifest.json and index.html. What is done is kept in parts/: after a stop or a kill
    the same command goes on.

    Example: fedipw study examples/studies/breaks.toml --out breaks
    """
    from fedipw.lab.study import StudyStoppedError, run_study
    from fedipw.lab.studyfile import study_from

    described = study_from(file)
    processes = (os.cpu_count() or 1) if workers is None else workers
    try:
        with bar("jobs") as step:
            found = run_study(described, out, workers=processes, progress=step)
    except StudyStoppedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_LOST_WORKER) from error
    except KeyboardInterrupt:
        kept = f"What is done is kept in {out / 'parts'}; the same command goes on from there."
        typer.echo(f"Stopped. {kept}", err=True)
        raise typer.Exit(_STOPPED) from None
    if as_json:
        names = ("summary", "comparison", "ranks")
        typer.echo(json.dumps({name: getattr(found, name).to_dicts() for name in names}))
        return
    _print(described, found)
    say(f"Open {out / 'index.html'}")


def _print(described: Study, found: StudyTables) -> None:
    from fedipw.audit.page import number
    from fedipw.audit.style import look_of

    verdicts = {(r["scenario"], r["method"]): r["verdict"] for r in found.comparison.to_dicts()}
    say(f"Mean over seeds of the {described.measure.words}, and of the limit's.")
    for case in described.cases:
        reference = look_of(described.references[case.name]).label
        rows = [row for row in found.summary.to_dicts() if row["scenario"] == case.name]
        lost = any(row["failures"] for row in rows)
        title = f"{case.title}; against {reference}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for head in ("mean", "se", "limit", "rank", *(["failed"] if lost else [])):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("verdict")
        for row in rows:
            table.add_row(
                look_of(row["method"]).label,
                *(number(row[name]) for name in ("mean", "se", "limit_mean")),
                f"{row['mean_rank']:.1f}",
                *([str(row["failures"])] if lost else []),
                verdicts.get((case.name, row["method"]), ""),
            )
        _out.print(table)
