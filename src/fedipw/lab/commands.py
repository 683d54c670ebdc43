"""The lab's commands: ``fedipw reproduce``, ``fedipw simulate`` and ``fedipw study``.

Each imports what it needs, so that ``--help`` answers at once.
"""

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
from fedipw.lab.pages import number
from fedipw.storage.lock import claimed

if TYPE_CHECKING:
    import polars as pl

    from fedipw.lab.comparison import StudyTables

_STOPPED = 130
_JSON = typer.Option("--json", help="Print the summary as JSON.")


def reproduce(
    out: Annotated[Path, typer.Option(help="Directory for all files.")] = Path("figure1"),
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 10,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 600,
    panels: Annotated[str, typer.Option(help="Panels to make, of A, B, C and D.")] = "ABCD",
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Make the paper's Figure 1: learning under two-stage selection.

    Writes figure1.png, figure1.svg, results.csv, summary.csv, errors.csv, manifest.json and
    index.html.

    Example: fedipw reproduce --out demo --seeds 10
    """
    from fedipw.lab.figure1 import FigureSettings
    from fedipw.lab.figure1 import reproduce as reproduced

    settings = FigureSettings(panels=panels, seeds=seeds, rounds=rounds, workers=workers)
    with claimed(out, "runs fedipw reproduce for it"), bar("runs") as step:
        made = reproduced(out, settings, step)
    if as_json:
        tables = {"summary": made.summary.to_dicts(), "errors": made.errors.to_dicts()}
        typer.echo(json.dumps({**tables, "enrollment_costs": made.costs}, allow_nan=False))
        return
    _print_figure(made.summary)
    _print_errors(made.errors)
    lottery, least = made.costs["lottery_term"], made.costs["efficiency_bound"]
    say(
        f"One draw of enrollment costs the oracle {lottery:.2g} on average, and any regular "
        f"weighting that is consistent under selection at least {least:.2g}."
    )
    say(f"Open {out / 'index.html'}")


def simulate(
    config: Annotated[Path, typer.Argument(help="Scenario, a TOML file.")],
    out: Annotated[Path, typer.Option(help="Directory for all files.")] = Path("run"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Run one scenario: any population, selection and set of methods.

    Writes history.parquet, summary.json, checkpoint/ and index.html.

    Example: fedipw simulate scenario.toml --out run
    """
    from fedipw.lab.config import scenario_from
    from fedipw.lab.run_page import theory_notes
    from fedipw.lab.simulate import simulate as simulated
    from fedipw.lab.style import look_of

    scenario = scenario_from(config)
    with claimed(out, "runs fedipw simulate for it"), bar("rounds") as step:
        summary = simulated(scenario, out, resume=resume, progress=step)
    if as_json:
        typer.echo(json.dumps(summary, allow_nan=False))
        return
    table = Table("method", "excess loss", "optimisation", "lottery", "bias", "tail average")
    for name, row in summary["methods"].items():
        parts = row.get("errors", {})
        cells = [parts.get(k) for k in ("optimisation", "lottery", "bias")]
        values = [row["excess_loss"], *cells, row["tail_average_excess_loss"]]
        table.add_row(look_of(name).label, *(number(v) for v in values))
    _out.print(table)
    for line in (*theory_notes(summary), f"Open {out / 'index.html'}"):
        say(line)


def study(
    file: Annotated[Path, typer.Argument(help="Study, a TOML file.", metavar="STUDY")],
    out: Annotated[Path, typer.Option(help="Directory for all files.")] = Path("study"),
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
    from fedipw.lab.study import run_study
    from fedipw.lab.study_file import study_from

    described = study_from(file)
    processes = (os.cpu_count() or 1) if workers is None else workers
    try:
        with claimed(out, "runs fedipw study for it"), bar("jobs") as step:
            found = run_study(described, out, workers=processes, progress=step)
    except KeyboardInterrupt:
        kept = f"What is done is kept in {out / 'parts'}; the same command goes on from there."
        typer.echo(f"Stopped. {kept}", err=True)
        raise typer.Exit(_STOPPED) from None
    if as_json:
        names = ("summary", "comparison", "ranks")
        tables = {name: getattr(found, name).to_dicts() for name in names}
        typer.echo(json.dumps(tables, allow_nan=False))
        return
    _print_study(found)
    say(f"Open {out / 'index.html'}")


def _print_figure(summary: pl.DataFrame) -> None:
    import polars as pl

    from fedipw.lab.style import look_of

    last = summary.group_by("panel", "method", maintain_order=True).agg(pl.all().last())
    table = Table("panel", "method", "at", "excess loss", "sd over seeds")
    names = {"A": "round {:g}", "B": "strength {:g}", "C": "round {:g}", "D": "noise {:g}"}
    over_rounds = pl.col("panel").is_in(["A", "C"])
    some_noise = (pl.col("panel") != "D") | pl.col("x").is_in([0.0, 0.2, 0.5, 1.0])
    every = summary.filter(~over_rounds & some_noise).select(last.columns)
    shown = pl.concat([last.filter(over_rounds), every]).sort("panel", maintain_order=True)
    for row in shown.iter_rows(named=True):
        at = names[row["panel"]].format(row["x"])
        values = (number(row["mean"]), number(row["sd"]))
        table.add_row(row["panel"], look_of(row["method"]).label, at, *values)
    _out.print(table)


def _print_errors(errors: pl.DataFrame) -> None:
    import polars as pl

    from fedipw.lab.style import look_of

    parts = ("excess_loss", "optimisation", "lottery", "bias")
    table = Table("method", *(p.replace("_", " ") for p in parts))
    table.title = "last model at strength 1: excess loss in its three parts, mean over seeds"
    means = errors.group_by("strength", "method", maintain_order=True).agg(pl.col(parts).mean())
    for row in means.filter(pl.col("strength") == 1.0).iter_rows(named=True):
        table.add_row(look_of(row["method"]).label, *(number(row[p]) for p in parts))
    _out.print(table)


def _print_study(found: StudyTables) -> None:
    from fedipw.lab.style import look_of

    verdicts = {(r["scenario"], r["method"]): r["verdict"] for r in found.comparison.to_dicts()}
    say(f"Mean over seeds of the {found.study.measure.words}, and of the limit's.")
    for case in found.study.cases:
        reference = look_of(found.study.references[case.name]).label
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
