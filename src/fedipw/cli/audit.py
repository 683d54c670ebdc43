"""``fedipw audit``: who is missing, how much it matters, how far to trust the weights."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedipw.cli.inputs import (
    check_inputs_kept,
    check_sources,
    known_people,
    log_plan,
    table_options,
)
from fedipw.cli.options import (
    Availability,
    DayLength,
    EnrolledTable,
    Enrollment,
    Fit,
    FitName,
    History,
    LumpBelow,
    MissingName,
    MissingPolicy,
    Participation,
    PopulationSize,
    PopulationTable,
    RefitEvery,
    SchemeName,
    Strict,
    TargetsTable,
    Threshold,
    Window,
)
from fedipw.cli.terminal import bar, say
from fedipw.errors import InputError, PositivityError, SeparationError

if TYPE_CHECKING:
    from fedipw.audit.parts import Audit
    from fedipw.tables import Ledger
    from fedipw.weighting.logrun import LogPlan
    from fedipw.weighting.people import KnownPopulation, KnownTotals


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
    scheme: SchemeName = None,
    missing: MissingPolicy = MissingName.ERROR,
    lump_below: LumpBelow = None,
    threshold: Threshold = 0.01,
    min_cell: Annotated[
        int, typer.Option(help="Parts with fewer clients or rows are not shown.")
    ] = 10,
    strict: Strict = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="File for the same numbers as JSON.")
    ] = None,
) -> None:
    """Say who is missing, how much it matters, and how far weights can be trusted.

    Writes one self-contained page, and the same numbers as JSON. With --compare two earlier audits
    are set side by side. No client is named, and small parts of the population are not shown.

    Example: fedipw audit --population people.parquet --rounds rounds --out report.html
    """
    from fedipw.audit.pages import compare_page
    from fedipw.tables.tables import check_place, write_texts

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
    check_sources(population, enrolled, targets, population_size)
    _check_numbers(threshold, strict, min_cell)
    if targets is not None and enrollment != ".":
        raise InputError("--enrollment goes with --population: with --targets it is calibrated.")
    if metrics is not None and rounds is None:
        raise InputError("--metrics goes with --rounds: a metric belongs to replies.")
    with ExitStack() as stack:
        options = table_options(missing, lump_below, 0.0, None, stack)
        plan = log_plan(
            scheme or ("fedipw" if targets is None else "calibrated-quadratic"),
            (participation, availability, history),
            options,
            (participation_fit, window, refit_every, day_length, 0.0),
            None,
            None,
        )
        ledger = _ledger(rounds)
        people = known_people(
            population, enrolled, targets, population_size, enrollment, options, None, ledger
        )
        found = _audited(people, ledger, plan, (threshold, strict, min_cell), title)
        if metrics is not None:
            assert ledger is not None
            found = _with_metric(
                found, people, ledger, plan, (metrics, metric_name, tuple(by or ()))
            )
    _write(found, out, as_json)


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


def _check_numbers(threshold: float, strict: float | None, min_cell: int) -> None:
    for option, value in (("--strict", strict), ("--threshold", threshold)):
        if value is not None and not 0.0 < value < 1.0:
            raise InputError(f"{option} takes a probability between 0 and 1, not {value}.")
    if min_cell < 1:
        raise InputError(f"--min-cell must be 1 or more, not {min_cell}.")


def _ledger(rounds: Path | None) -> Ledger | None:
    from fedipw.tables.ledger import Ledger

    if rounds is None:
        return None
    ledger = Ledger(rounds)
    ledger.require_rounds()
    return ledger


def _audited(
    people: KnownPopulation | KnownTotals,
    ledger: Ledger | None,
    plan: LogPlan,
    numbers: tuple[float, float | None, int],
    title: str,
) -> Audit:
    from fedipw.audit.gather import audit_facts
    from fedipw.weighting.logrun import LogRecord

    threshold, strict, min_cell = numbers
    record = LogRecord()
    with bar("rounds") as step:
        found = audit_facts(
            people, ledger, plan, threshold=threshold, min_cell=min_cell, title=title,
            progress=step, record=record,
        )  # fmt: skip
    if strict is None:
        return found
    least = None if found.overlap is None else found.overlap.smallest_prob
    parted = found.settings.scheme != plan.method.name  # probabilities of enrollment run to 0
    if found.overlap is not None and (found.overlap.empty or found.overlap.empty_small or parted):
        least = 0.0  # nobody of a part of the population is enrolled
    if least is not None and least < strict:
        raise PositivityError("enrollment probability of the population", least, strict)
    if record.smallest_participation < strict:
        raise PositivityError(
            "participation probability of a reply", record.smallest_participation, strict
        )
    return found


def _with_metric(
    found: Audit,
    people: KnownPopulation | KnownTotals,
    ledger: Ledger,
    plan: LogPlan,
    asked: tuple[Path, str, tuple[str, ...]],
) -> Audit:
    from fedipw.audit.metricpart import metric_notes, metric_part
    from fedipw.audit.remarks import METRIC_UNUSED, NO_METRIC, parted
    from fedipw.evaluation import EvaluationPlan, Metrics, logged_two_phase

    path, name, by = asked
    values = Metrics.read(path)
    try:
        with bar("rounds of the metric") as step:
            logged = logged_two_phase(people, ledger, values, plan, progress=step)
    except SeparationError as error:
        note = f"Nothing is said of {name} on the population: {parted(error)}, so no weights lead "
        note += "there. Merge or leave out those columns (--lump-below, --enrollment)."
        unknown = tuple(METRIC_UNUSED if x == NO_METRIC else x for x in found.unknown)
        return replace(found, notes=(*found.notes, note), unknown=unknown)
    small = found.settings.min_cell
    part = metric_part(
        logged, people, plan.method.name, name=name, plan=EvaluationPlan(by=by), min_cell=small
    )
    notes = (*found.notes, *logged.notes(), *metric_notes(part, small))
    unknown = tuple(line for line in found.unknown if line != NO_METRIC)
    return replace(found, metric=part, notes=notes, unknown=unknown)


def _write(found: Audit, out: Path, as_json: Path | None) -> None:
    from fedipw.audit.pages import audit_page
    from fedipw.audit.verdict import judged
    from fedipw.tables.tables import write_texts

    found = judged(found)
    values = found.to_json()
    texts = {out: audit_page(values)}
    if as_json is not None:
        texts[as_json] = json.dumps(values, indent=1, allow_nan=False) + "\n"
    write_texts(texts)
    assert found.verdict is not None
    say(found.verdict.headline)
    for finding in found.verdict.findings:
        say(f"{finding.question} {finding.answer}. {finding.text}")
    for line in found.unknown:
        say(f"Unknown: {line}")
    say(f"Wrote {out}" if as_json is None else f"Wrote {out} and {as_json}")


def _earlier(path: Path) -> dict[str, Any]:
    """Return the numbers of an audit that was written before, from its page or its JSON file."""
    from fedipw.audit.pages import written_audit

    try:
        return written_audit(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    except InputError as error:
        raise InputError(f"{path} is not an audit of this program: {error}") from error
