"""Commands and exit codes.

Each command imports what it needs, so that ``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedipw.cli.audit import audit
from fedipw.cli.calibrate import calibrate
from fedipw.cli.evaluate import evaluate
from fedipw.cli.study import study
from fedipw.cli.terminal import bar
from fedipw.cli.weights import weights
from fedipw.errors import FedIPWError, InfeasibleError, PositivityError, WorkerLostError

if TYPE_CHECKING:
    import polars as pl

UNEXPECTED, BAD_INPUT, INFEASIBLE, UNREACHED = 1, 2, 3, 4

app = typer.Typer(
    name="fedipw",
    help="Federated learning that serves the target population.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out, _err = Console(), Console(stderr=True)


@app.callback()
def _root() -> None:
    """Federated learning that serves the target population."""


@app.command("reproduce")
def _reproduce(
    out: Annotated[Path, typer.Option(help="Directory for figure, tables and page.")] = Path(
        "figure1"
    ),
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 10,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 600,
    panels: Annotated[str, typer.Option(help="Panels to make, of A, B, C and D.")] = "ABCD",
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Make the paper's Figure 1: learning under two-stage selection.

    Writes figure1.png, figure1.svg, results.csv, summary.csv, errors.csv, manifest.json and
    index.html.

    Example: fedipw reproduce --out demo --seeds 10
    """
    from fedipw.lab.figure1 import FigureSettings, reproduce

    settings = FigureSettings(panels=panels, seeds=seeds, rounds=rounds, workers=workers)
    with bar("runs") as step:
        made = reproduce(out, settings, step)
    if as_json:
        tables = {"summary": made.summary.to_dicts(), "errors": made.errors.to_dicts()}
        typer.echo(json.dumps({**tables, "enrollment_costs": made.costs}))
    else:
        _print_figure(made.summary)
        _print_errors(made.errors)
        lottery, least = made.costs["lottery_term"], made.costs["efficiency_bound"]
        _out.print(
            f"One draw of enrollment costs the oracle {lottery:.2g} on average, any regular "
            f"weighting at least {least:.2g}.",
            soft_wrap=True,
            highlight=False,
        )
        _out.print(f"Open {out / 'index.html'}", soft_wrap=True)


@app.command("simulate")
def _simulate(
    config: Annotated[Path, typer.Argument(help="Scenario, a TOML file.")],
    out: Annotated[Path, typer.Option(help="Directory for history, summary and page.")] = Path(
        "run"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run one scenario: any population, selection and set of methods.

    Writes history.parquet, summary.json, checkpoint/ and index.html.

    Example: fedipw simulate scenario.toml --out run
    """
    from fedipw.audit.page import number
    from fedipw.audit.style import look_of
    from fedipw.lab.config import scenario_from
    from fedipw.lab.simulate import simulate, theory_notes

    scenario = scenario_from(config)
    with bar("rounds") as step:
        summary = simulate(scenario, out, resume=resume, progress=step)
    if as_json:
        typer.echo(json.dumps(summary))
        return
    table = Table("method", "excess loss", "optimisation", "lottery", "bias", "tail average")
    for name, row in summary["methods"].items():
        parts = row.get("errors", {})
        cells = [parts.get(k) for k in ("optimisation", "lottery", "bias")]
        values = [row["excess_loss"], *cells, row["tail_average_excess_loss"]]
        table.add_row(look_of(name).label, *(number(v) for v in values))
    _out.print(table)
    for note in theory_notes(summary):
        _out.print(note, soft_wrap=True, highlight=False)
    _out.print(f"Open {out / 'index.html'}", soft_wrap=True)


app.command("calibrate")(calibrate)
app.command("weights")(weights)
app.command("evaluate")(evaluate)
app.command("audit")(audit)
app.command("study")(study)


def _print_figure(summary: pl.DataFrame) -> None:
    import polars as pl

    from fedipw.audit.page import number
    from fedipw.audit.style import look_of

    last = summary.group_by("panel", "method", maintain_order=True).agg(pl.all().last())
    table = Table("panel", "method", "at", "excess loss", "sd over seeds")
    names = {"A": "round {:g}", "B": "strength {:g}", "C": "round {:g}", "D": "noise {:g}"}
    over_rounds = pl.col("panel").is_in(["A", "C"])
    some_noise = (pl.col("panel") != "D") | pl.col("x").is_in([0.0, 0.2, 0.5, 1.0])
    every = summary.filter(~over_rounds & some_noise).select(last.columns)
    shown = pl.concat([last.filter(over_rounds), every]).sort("panel", maintain_order=True)
    for row in shown.iter_rows(named=True):
        table.add_row(
            row["panel"],
            look_of(row["method"]).label,
            names[row["panel"]].format(row["x"]),
            number(row["mean"]),
            number(row["sd"]),
        )
    _out.print(table)


def _print_errors(errors: pl.DataFrame) -> None:
    import polars as pl

    from fedipw.audit.page import number
    from fedipw.audit.style import look_of

    parts = ("excess_loss", "optimisation", "lottery", "bias")
    table = Table("method", *(p.replace("_", " ") for p in parts))
    table.title = "last model at strength 1: excess loss in its three parts, mean over seeds"
    means = errors.group_by("strength", "method", maintain_order=True).agg(pl.col(parts).mean())
    for row in means.filter(pl.col("strength") == 1.0).iter_rows(named=True):
        table.add_row(look_of(row["method"]).label, *(number(row[p]) for p in parts))
    _out.print(table)


def main() -> None:
    """Run the command line; errors end in a message and an exit code, never a traceback.

    2 is bad input, 3 targets that no weights on the enrolled clients can meet, 4 a probability
    below the threshold given with ``--strict``.
    """
    try:
        app()
    except FedIPWError as error:
        _err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(_code(error))


def _code(error: FedIPWError) -> int:
    if isinstance(error, InfeasibleError):
        return INFEASIBLE
    if isinstance(error, WorkerLostError):
        return UNEXPECTED
    return UNREACHED if isinstance(error, PositivityError) else BAD_INPUT
