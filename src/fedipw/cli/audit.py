"""``fedipw audit``: who is missing, how much it matters, how far to trust the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedipw.cli.options import (
    Availability,
    ClassifierName,
    DayLength,
    EnrolledTable,
    Enrollment,
    Fit,
    FitName,
    Folds,
    History,
    LumpBelow,
    MissingName,
    MissingPolicy,
    Participation,
    PopulationSize,
    PopulationTable,
    RefitEvery,
    Scheduler,
    SchemeName,
    ScoreCalibrationName,
    Strict,
    TargetsTable,
    Threshold,
    Window,
    check_inputs_kept,
    check_probabilities,
    coded_stage,
    given_population,
    scheduled,
)
from fedipw.cli.terminal import bar, say
from fedipw.errors import InputError, PositivityError

if TYPE_CHECKING:
    from fedipw.audit.values import Audit
    from fedipw.weighting.replay import Record


def audit(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="The page, an .html file.")],
    population: PopulationTable = None,
    enrolled: EnrolledTable = None,
    targets: TargetsTable = None,
    population_size: PopulationSize = None,
    rounds: Annotated[
        Path | None, typer.Option(help="Ledger: a directory of closed rounds.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two audits (page or JSON), before and after.", metavar="BEFORE AFTER"),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Metric of the replies: unit_id, round, value.")
    ] = None,
    metric_name: Annotated[str, typer.Option(help="What the metric is called.")] = "metric",
    by: Annotated[
        list[str] | None, typer.Option(help="Column to group the metric by; repeatable.")
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Selection audit",
    enrollment: Enrollment = ".",
    participation: Participation = ".",
    availability: Availability = ".",
    history: History = False,
    participation_fit: Fit = FitName.PAST,
    window: Window = None,
    refit_every: RefitEvery = 10,
    day_length: DayLength = 24.0,
    classifier: ClassifierName = None,
    folds: Folds = None,
    score_calibration: ScoreCalibrationName = None,
    scheme: SchemeName = None,
    missing: MissingPolicy = MissingName.ERROR,
    lump_below: LumpBelow = None,
    threshold: Threshold = 0.01,
    min_cell: Annotated[
        int, typer.Option(help="Parts with fewer clients or rows are not shown.")
    ] = 10,
    strict: Strict = None,
    scheduler: Scheduler = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="File for the same numbers as JSON.")
    ] = None,
) -> None:
    """Say who is missing, how much it matters, and how far weights can be trusted.

    Writes one self-contained page, and the same numbers as JSON. With --compare two earlier audits
    are set side by side. No client is named, and small parts of the population are not shown.

    Example: fedipw audit --population people.parquet --rounds rounds --out report.html
    """
    from fedipw.audit.compare import compare_page
    from fedipw.audit.gather import MetricRequest, audit_facts
    from fedipw.evaluation.logged import Metrics
    from fedipw.storage.atomic import check_place, write_texts
    from fedipw.tables.ledger import Ledger
    from fedipw.weighting.replay import Record
    from fedipw.weighting.settings import Settings

    for path in (out, *([] if as_json is None else [as_json])):
        check_place(path)
        check_inputs_kept(path, rounds, population, enrolled, targets, metrics, *(compare or ()))
    if as_json is not None and as_json.resolve() == out.resolve():
        raise InputError(f"{out} cannot be both the page and the JSON file.")
    if compare is not None:
        _check_alone(ctx)
        before, after = (_earlier(path) for path in compare)
        write_texts({out: compare_page(before, after)})
        say(f"Wrote {out}")
        return
    who = given_population(population, enrolled, targets, population_size)
    check_probabilities(strict=strict, threshold=threshold)
    if min_cell < 1:
        raise InputError(f"--min-cell must be 1 or more, not {min_cell}.")
    if metrics is not None and rounds is None:
        raise InputError("--metrics goes with --rounds: a metric belongs to replies.")
    settings = Settings(
        method=scheme, enrollment=enrollment, participation=participation,
        availability=availability, history=history, fit=participation_fit.value, window=window,
        refit_every=refit_every, day_length=day_length, classifier=classifier, folds=folds,
        score_calibration=score_calibration, missing=missing.value, lump_below=lump_below,
        client=ctx.with_resource(scheduled(scheduler)),
    )  # fmt: skip
    ledger = None if rounds is None else Ledger(rounds)
    if ledger is not None:
        ledger.require_rounds()
    asked = None
    if metrics is not None:
        asked = MetricRequest(values=Metrics.read(metrics), name=metric_name, by=tuple(by or ()))
    plan, record = settings.plan(who), Record()
    stage = coded_stage(settings, who, ledger)
    with bar("rounds") as step:
        found = audit_facts(
            stage, ledger, plan, threshold=threshold, min_cell=min_cell, title=title,
            metric=asked, observers=[record], progress=step,
        )  # fmt: skip
    if strict is not None:
        _require(strict, found, plan.method.name, record)
    _write(found, out, as_json)


def _require(strict: float, found: Audit, asked: str, record: Record) -> None:
    """Raise if a probability is below the threshold."""
    least = None if found.overlap is None else found.overlap.smallest_prob
    parted = found.settings.scheme != asked  # probabilities of enrollment run to 0
    if found.overlap is not None and (found.overlap.empty or found.overlap.empty_small or parted):
        least = 0.0  # nobody of a subgroup of the population is enrolled
    if least is not None and least < strict:
        raise PositivityError("enrollment probability of the population", least, strict)
    if record.smallest_participation < strict:
        raise PositivityError(
            "participation probability of a reply", record.smallest_participation, strict
        )


def _check_alone(ctx: typer.Context) -> None:
    """Raise if an option stands beside --compare that says nothing there."""
    from fedipw.numerics.checks import some

    more = []
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        named = source is not None and source.name != "DEFAULT"
        if named and option.name not in {"out", "compare"}:
            more.append(option.opts[0])
    if more:
        raise InputError(
            "--compare takes two audits that were made before, and nothing else but --out: leave "
            f"out {some(more)}."
        )


def _write(found: Audit, out: Path, as_json: Path | None) -> None:
    from fedipw.audit.pages import audit_page
    from fedipw.audit.verdict import judged
    from fedipw.storage.atomic import write_texts

    found = judged(found)
    texts = {out: audit_page(found)}
    if as_json is not None:
        texts[as_json] = json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n"
    write_texts(texts)
    assert found.verdict is not None
    say(found.verdict.headline)
    for finding in found.verdict.findings:
        say(f"{finding.question} {finding.answer}. {finding.text}")
    for line in found.unknown:
        say(f"Unknown: {line}")
    say(f"Wrote {out}" if as_json is None else f"Wrote {out} and {as_json}")


def _earlier(path: Path) -> Audit:
    """Return the numbers of an audit that was written before, from its page or its JSON file."""
    from fedipw.audit.compare import written_audit

    try:
        return written_audit(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    except InputError as error:
        raise InputError(f"{path} is not an audit of this program: {error}") from error
