"""``fedipw evaluate``: a metric on the target population, with an interval."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from typer import Option

from fedipw.cli.options import (
    Cluster,
    Memory,
    ModelOptions,
    Place,
    PopulationOptions,
    Rounds,
    Scheduler,
    check_inputs_kept,
    claim,
    coded_stage,
    keep_to,
    path_or_url,
    scheduled,
)
from fedipw.cli.terminal import bar, say
from fedipw.cli.terminal import out as _out
from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.storage.memory import check_memory

if TYPE_CHECKING:
    from fedipw.evaluation.estimators import Estimate
    from fedipw.evaluation.evaluate import Evaluation

_MEAN = "mean"
_SHOWN = 60  # rows of a table
_SHORT = {"horvitz-thompson": "HT", "prediction-powered": "PPI"}


def evaluate(
    ctx: typer.Context,
    metrics: Annotated[
        Place, Option(parser=path_or_url, help="unit_id, round, value and perhaps n.")
    ],
    rounds: Rounds,
    given: PopulationOptions,
    models: ModelOptions,
    against: Annotated[
        Place | None,
        Option(parser=path_or_url, help="Metrics of another model on the same clients and rounds."),
    ] = None,
    by: Annotated[
        list[str] | None, Option(help="Column of clients to group by, or round; repeatable.")
    ] = None,
    sensitivity: Annotated[
        list[float] | None, Option(help="Odds ratio Lambda, 1 or more; repeatable.")
    ] = None,
    conclusion: Annotated[
        float | None, Option(help="Value at which a conclusion would change.")
    ] = None,
    scheme: Annotated[str | None, Option(help="fedipw, efficient or a calibrated method.")] = None,
    samples: Annotated[
        bool, Option("--samples", help="The mean over samples (n) instead of clients.")
    ] = False,
    quantile: Annotated[
        list[float] | None, Option(help="Quantile of the metric, such as 0.5; repeatable.")
    ] = None,
    ratio_to: Annotated[
        Place | None,
        Option(
            parser=path_or_url,
            help="Another metric of the same replies: the ratio of both totals.",
        ),
    ] = None,
    total: Annotated[
        bool, Option("--total", help="Totals of everyone and of groups of known size.")
    ] = False,
    difference: Annotated[
        list[str] | None,
        Option(help="Differences of groups: rest, pairs, or a group such as os=ios; repeatable."),
    ] = None,
    replicate_weights: Annotated[
        Place | None,
        Option(parser=path_or_url, help="Table of replicate weights for other tools."),
    ] = None,
    replicates: Annotated[int | None, Option(help="How many of them; 50 unless given.")] = None,
    seed: Annotated[int, Option(help="Of the groups that these leave out, of bootstraps.")] = 0,
    predict: Annotated[
        str | None,
        Option(
            help="Add the prediction-powered mean: boosting, forest, linear, or the dotted name of "
            "a scikit-learn regressor of the metric on covariates."
        ),
    ] = None,
    jackknife: Annotated[int, Option(help="Groups of a jackknife over clients; 0 linearises.")] = 0,
    confidence: Annotated[float, Option(help="Of the intervals.")] = 0.95,
    interval: Annotated[
        str, Option(help="Kind of interval: auto, t, logit, beta, jeffreys or bootstrap.")
    ] = "auto",
    resamples: Annotated[int, Option(help="Of a bootstrap over clients.")] = 1000,
    proportion: Annotated[
        bool | None,
        Option(help="Whether the metric is a share; if its values are 0 and 1 by default."),
    ] = None,
    cluster: Cluster = None,
    missing_metrics: Annotated[
        bool, Option("--missing-metrics", help="Leave replies without a metric out.")
    ] = False,
    scheduler: Scheduler = None,
    memory: Memory = None,
    out: Annotated[
        Place | None,
        Option(parser=path_or_url, help="Table of estimates; .csv or .parquet."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Estimate a metric's mean over the whole population from its respondents.

    Both stages are fitted, participation on all rounds. Gives the plain mean of the replies, and
    Horvitz-Thompson, Hajek and GREG means of the population with design-based two-phase standard
    errors, which know that a client enrolls once and replies in related rounds. Quantiles, ratios,
    totals and differences of groups are added on request.

    Example: fedipw evaluate --metrics loss.parquet --population people.parquet --rounds rounds
    """
    from fedipw.evaluation.evaluate import EvaluationPlan, evaluated
    from fedipw.evaluation.intervals import interval_named
    from fedipw.evaluation.logged import Metrics, logged_two_phase
    from fedipw.evaluation.prediction import checked_regression
    from fedipw.evaluation.replicates import REPLICATES
    from fedipw.storage.places import identity
    from fedipw.tables.table import check_results, check_table_path, write_table

    keep_to(memory)
    who = given.read().clustered(cluster)
    if out is not None:
        check_table_path(out)
        check_inputs_kept(out, rounds, *given.paths, metrics, against, ratio_to)
        claim(out)
    _check_replicates(replicate_weights, replicates)
    if replicate_weights is not None:
        check_table_path(replicate_weights)
        check_inputs_kept(replicate_weights, rounds, *given.paths, metrics, against, ratio_to)
        if out is not None and identity(out) == identity(replicate_weights):
            raise InputError(f"--out and --replicate-weights both name {out}.")
        claim(replicate_weights)
    _check_numbers(sensitivity or [], conclusion, jackknife, confidence)
    if against is not None and proportion is None:
        proportion = False  # differences, even if all of them should be 0 or 1
    kind = interval_named(interval, replicates=resamples, proportion=proportion, seed=seed)
    values = Metrics.read(given.table(metrics))
    if against is not None:
        values = values.against(Metrics.read(given.table(against)))
    if ratio_to is not None:
        values = values.over(Metrics.read(given.table(ratio_to)))
    ledger = given.ledger(rounds)
    client = ctx.with_resource(scheduled(scheduler))
    settings = models.settings(method=scheme, fit="pooled", client=client)
    plan = settings.plan(who)
    stage = coded_stage(settings, who, ledger)
    checked_regression(predict, stage)
    with bar("rounds") as step:
        logged = logged_two_phase(
            stage, ledger, values, plan, allow_missing=missing_metrics, progress=step
        )
    asked = EvaluationPlan(
        by=tuple(by or ()), confidence=confidence, odds_ratios=tuple(sensitivity or ()),
        conclusion=conclusion, jackknife=jackknife, by_samples=samples, interval=kind,
        quantiles=tuple(quantile or ()), totals=total, difference=tuple(difference or ()),
        replicates=(replicates or REPLICATES) if replicate_weights is not None else 0, seed=seed,
        predict=predict,
    )  # fmt: skip
    found = evaluated(logged, stage, plan.method.name, asked)
    check_memory()
    if out is not None:
        table = found.table()
        check_results(table, out)
        write_table(table, out)
    if replicate_weights is not None and found.replicates is not None:
        found.replicates.write(replicate_weights)
    written = [path for path in (out, replicate_weights) if path is not None]
    _report(found, written, as_json=as_json, contrast=against is not None)


def _check_numbers(
    odds: list[float], conclusion: float | None, jackknife: int, confidence: float
) -> None:
    if conclusion is not None and not odds:
        raise InputError("--conclusion goes with --sensitivity, such as --sensitivity 2.")
    if any(not (value >= 1.0) for value in odds):
        raise InputError(f"--sensitivity takes odds ratios of 1 or more, not {min(odds):g}.")
    if jackknife < 0 or jackknife == 1:
        raise InputError(f"--jackknife takes 2 groups or more, or 0, not {jackknife}.")
    if not 0.0 < confidence < 1.0:
        raise InputError(f"--confidence lies between 0 and 1, not {confidence:g}.")


def _check_replicates(path: Place | None, count: int | None) -> None:
    if count is not None and path is None:
        raise InputError("--replicates goes with --replicate-weights, the file to write them to.")
    if count is not None and count < 2:
        raise InputError(f"--replicates takes 2 or more, not {count}.")


def _say_intervals(lines: list[Estimate]) -> None:
    """Say which intervals are not Student's t, and which cannot promise their confidence."""
    for kind in dict.fromkeys(line.interval for line in lines if line.interval != "t"):
        who = some(f"{_full(x)} of {x.group}" for x in lines if x.interval == kind)
        say(f"Intervals by {kind}: {who}.")
    weighted = [line for line in lines if line.estimator != "plain"]  # which is of respondents
    for warning in dict.fromkeys(line.warning for line in weighted if line.warning):
        who = some(f"{_full(x)} of {x.group}" for x in weighted if x.warning == warning)
        say(f"{who} {warning}.")


def _print(table: Table, lines: list[Estimate]) -> None:
    """Print some estimates, with as many of their numbers as the table has columns for."""
    for line in lines:
        row = (
            escape(line.group),
            _named(line),
            f"{line.estimate:.5g}",
            f"{line.se:.3g}" if math.isfinite(line.se) else "–",
            f"{line.low:.5g}" if math.isfinite(line.low) else "–",
            f"{line.high:.5g}" if math.isfinite(line.high) else "–",
            f"{line.effective_sample_size:.1f}",
            str(line.clients),
        )
        table.add_row(*row[: len(table.columns)])
    _out.print(table, rows=_SHOWN, grouped=True)


def _report(found: Evaluation, written: list[Place], *, as_json: bool, contrast: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found.to_json(), allow_nan=False))
        return
    lines = [x for x in found.estimates if math.isfinite(x.estimate)]
    means = [x for x in lines if x.statistic == _MEAN]
    others = [x for x in lines if x.statistic != _MEAN]
    _print(Table("group", "mean", "estimate", "se", "low", "high", "eff. n", "clients"), means)
    if others:
        _print(Table("group", "statistic", "estimate", "se", "low", "high"), others)
    for reason in dict.fromkeys(line.reason for line in found.estimates if line.reason):
        groups = [f"{_full(x)} of {x.group}" for x in found.estimates if x.reason == reason]
        say(f"{some(groups)}: {reason}.")
    _say_intervals([line for line in lines if math.isfinite(line.low)])
    if contrast:
        say("Values are differences: the first model less the second, on the same clients.")
    moved = found.moved
    say(f"Weighting moves the mean by {moved.difference:+.4g} (standard error {moved.se:.2g}).")
    for bounds in found.sensitivity:
        say(
            f"If unobserved drivers move the odds of enrollment by up to {bounds.odds_ratio:g}: "
            f"{bounds.low:.5g} to {bounds.high:.5g}; centred error of the weights up to "
            f"{bounds.weight_error:.3g}. If they move those of replies too: {bounds.both_low:.5g} "
            f"to {bounds.both_high:.5g}."
        )
    at = found.reverses_at
    if at is not None:
        say("No odds ratio of enrollment changes the conclusion." if math.isinf(at) else
            f"The conclusion changes at an odds ratio of enrollment of {at:.4g}.")  # fmt: skip
    if not found.sensitivity and found.sensitivity_reason != "not asked for":
        say(f"No sensitivity analysis: {found.sensitivity_reason}.")
    for note in found.notes:
        say(note)
    if found.replicates is not None:
        say(
            f"Replicate weights: {found.replicates.count}, to be used with scale "
            f"{found.replicates.scale:.6g}, which takes nothing off for the finite population"
            + ("." if found.replicates.scale_finite is None else
               f"; {found.replicates.scale_finite:.6g} does, for the mean of this metric.")
        )  # fmt: skip
    for path in written:
        say(f"Wrote {path}")


def _named(line: Estimate) -> str:
    """Return the statistic and the estimator of a line, briefly."""
    return _full(line, _SHORT.get(line.estimator, line.estimator))


def _full(line: Estimate, estimator: str = "") -> str:
    """Return the statistic and the estimator of a line; a mean goes without saying."""
    by = estimator or line.estimator
    return by if line.statistic == _MEAN else f"{line.statistic} {by}"
