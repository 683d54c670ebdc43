"""``fedipw simulate``: one scenario from a file, with checkpoints, a history and a page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from fedipw.audit.page import Table, number
from fedipw.audit.pages import training_page
from fedipw.audit.style import look_of
from fedipw.errors import InputError
from fedipw.lab.curves import evaluations, run_curves
from fedipw.lab.engine import Simulation
from fedipw.lab.files import check_directory, environment, staged
from fedipw.lab.scenario import Scenario
from fedipw.lab.theory import ErrorParts, FederatedLogistic, error_parts
from fedipw.lab.theory_report import constants_of, method_report, problem_report
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint

_CHECKPOINTS = 20  # about this many over a run


def simulate(
    scenario: Scenario,
    out: Path,
    *,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run a scenario and write history, summary, checkpoint and page; returns the summary.

    A run killed at any moment goes on with ``resume`` and ends in the same bytes as one that was
    never stopped. Without ``resume`` an unfinished run of the same directory is an error, so that
    nothing is lost by accident.
    """
    check_directory(out)
    checkpoint = out / "checkpoint"
    fingerprint = _fingerprint(scenario)
    run = scenario.simulation(limits=scenario.has_limits)
    if resume:
        state = load_checkpoint(checkpoint, fingerprint)
        if state is None:
            raise InputError(f"Nothing to resume: no checkpoint in {checkpoint}.")
        run.restore(state)
    elif (checkpoint / "checkpoint.npz").exists() and not (out / "summary.json").exists():
        raise InputError(
            f"{out} holds an unfinished run. Add --resume to go on with it, or choose another "
            "--out."
        )
    every = max(1, scenario.rounds // _CHECKPOINTS)

    def after(done: int) -> None:
        if done % every == 0 or done == scenario.rounds:
            save_checkpoint(checkpoint, run.state(), fingerprint)
        if progress is not None:
            progress(done, scenario.rounds)

    if not resume:
        save_checkpoint(checkpoint, run.state(), fingerprint)
        (out / "summary.json").unlink(missing_ok=True)  # from here on this run is unfinished
    run.advance(scenario.rounds - run.rounds, after=after)
    return _written(scenario, run, out)


def _written(scenario: Scenario, run: Simulation, out: Path) -> dict[str, Any]:
    target = scenario.objective(run.federation)
    best = target.minimum()
    history = run.history()
    frame = history.frame(target, best.point)
    parts = {
        name: error_parts(target, limit, history.of(name)[-1]) for name, limit in run.limits.items()
    }
    evaluated, missing = evaluations(scenario, run, target)
    summary = _summary(scenario, run, target, frame, parts) | {"evaluation": evaluated}
    page = training_page(
        "A simulated run under two-stage selection",
        run_curves(frame, evaluated),
        _tables(summary),
        [*_notes(summary), *([missing] if missing else [])],
        scenario.settings(),
    )
    with staged(out) as stage:
        frame.write_parquet(stage / "history.parquet")
        (stage / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        (stage / "index.html").write_text(page, encoding="utf-8")
    return summary


def _summary(
    scenario: Scenario,
    run: Simulation,
    target: FederatedLogistic,
    frame: pl.DataFrame,
    parts: dict[str, ErrorParts],
) -> dict[str, Any]:
    history, best = run.history(), target.minimum()
    population, problem = run.federation.population, constants_of(scenario, run, target)
    methods = {}
    for name in history.methods:
        mine = frame.filter(pl.col("method") == name)
        average = history.tail_average(name, scenario.training.tail)
        row: dict[str, Any] = {
            "excess_loss": mine["excess_loss"][-1],
            "distance": mine["distance"][-1],
            "tail_average_excess_loss": float(target.losses(average)[0] - best.value),
            "mean_effective_replies": mine["effective_replies"].drop_nans().mean(),
            "mean_weight_sum": mine["weight_sum"].drop_nans().mean(),
            "trimmed": int(mine["trimmed"].sum()),
            "theta": history.of(name)[-1].tolist(),
        }
        if name in parts:
            part = parts[name]
            row["errors"] = {
                "optimisation": part.optimisation,
                "lottery": part.lottery,
                "bias": part.bias,
            }
            if problem is not None:
                row["theory"] = method_report(scenario, run, target, problem, name)
        methods[name] = row
    return {
        "seed": scenario.seed,
        "rounds": history.rounds,
        "skipped_rounds": int(history.skipped.sum()),
        "population_size": population.size,
        "enrolled_size": population.enrolled_size,
        "mean_replies": float(history.replies.mean()),
        "target": scenario.target.value,
        "best_loss": best.value,
        "best_theta": best.point.tolist(),
        "theory": {} if problem is None else problem_report(scenario, run, target, problem),
        "methods": methods,
        **environment(),
    }


def _tables(summary: dict[str, Any]) -> list[Table]:
    methods = summary["methods"]
    tables = [
        Table(
            caption="After the last round",
            heads=[
                "Method",
                "excess loss",
                "distance",
                "tail-averaged excess",
                "effective replies",
            ],
            rows=[
                [
                    look_of(name).label,
                    number(row["excess_loss"]),
                    number(row["distance"]),
                    number(row["tail_average_excess_loss"]),
                    number(row["mean_effective_replies"], 3),
                ]
                for name, row in methods.items()
            ],
        )
    ]
    if all("errors" in row for row in methods.values()):
        tables.append(
            Table(
                caption="The excess loss in its three parts",
                heads=["Method", "optimisation", "enrollment lottery", "bias"],
                rows=[
                    [look_of(name).label, *(number(v) for v in row["errors"].values())]
                    for name, row in methods.items()
                ],
            )
        )
    if all(row.get("theory") for row in methods.values()):
        tables.append(
            Table(
                caption="Weight errors, the floor they leave (exact and first-order), the bound",
                heads=["Method", "raw", "centred", "rms", "exact floor", "first order", "bound"],
                rows=[_theory_row(name, row) for name, row in methods.items()],
            )
        )
    if summary["theory"].get("sensitivity"):
        tables.append(_sensitivity(summary["theory"]["sensitivity"]))
    return tables


def _sensitivity(lines: list[dict[str, Any]]) -> Table:
    return Table(
        caption="If something unobserved moves the odds of enrollment: error of the weights, and "
        "the excess loss it can leave (worst found; bound, where there is one)",
        heads=["Odds ratio", "centred error", "floor found", "bound"],
        rows=[
            [
                f"{line['odds_ratio']:g}",
                *(number(line[k]) for k in ("weight_error", "floor", "largest_floor")),
            ]
            for line in lines
        ],
    )


def _theory_row(name: str, row: dict[str, Any]) -> list[str]:
    theory = row["theory"]
    errors = [theory["weight_error"][k] for k in ("raw", "centred", "rms")]
    values = [*errors, row["errors"]["bias"], theory["first_order_floor"], theory["bound"]["total"]]
    return [look_of(name).label, *(number(v) for v in values)]


def _notes(summary: dict[str, Any]) -> list[str]:
    return [
        f"{summary['enrolled_size']:,} of {summary['population_size']:,} clients enrolled.",
        f"{summary['mean_replies']:.1f} replies a round on average.",
        f"{summary['skipped_rounds']} of {summary['rounds']} rounds skipped: nobody replied.",
        f"The target is the mean over {summary['target']}s of the whole population.",
        *theory_notes(summary),
    ]


def theory_notes(summary: dict[str, Any]) -> list[str]:
    """Return what theory says of the run, in sentences."""
    problem = summary["theory"]
    if not problem:
        return []
    lottery, least = number(problem["lottery_term"]), number(problem["efficiency_bound"])
    return [
        f"Mean excess loss over draws of enrollment: {lottery} for the oracle's limit.",
        f"No regular weighting has a mean below {least}.",
        *(
            f"{look_of(name).label}: {row['theory']['bound']['statement']}."
            for name, row in summary["methods"].items()
        ),
    ]


def _fingerprint(scenario: Scenario) -> str:
    return hashlib.sha256(json.dumps(scenario.settings()).encode()).hexdigest()
