"""``fedipw audit``: who is missing, how much it matters, how far to trust the weights."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from fedipw.cli.options import (
    ALWAYS,
    Cluster,
    Memory,
    Place,
    PopulationOptions,
    Scheduler,
    State,
    Strict,
    Threshold,
    WeightOptions,
    check_inputs_kept,
    check_probabilities,
    check_strict,
    claim,
    coded_stage,
    going_on,
    keep_to,
    path_or_url,
    scheduled,
)
from fedipw.cli.terminal import bar, say
from fedipw.errors import InputError
from fedipw.storage.memory import check_memory

if TYPE_CHECKING:
    from fedipw.api import Report
    from fedipw.audit.values import Audit


def _print_schema(wanted: bool) -> None:
    if wanted:
        from fedipw.audit.schema import audit_schema

        typer.echo(json.dumps(audit_schema(), indent=1))
        raise typer.Exit


def audit(
    ctx: typer.Context,
    out: Annotated[Place, Option(parser=path_or_url, help="The page, an .html file.")],
    given: PopulationOptions,
    asked: WeightOptions,
    rounds: Annotated[
        Place | None, Option(parser=path_or_url, help="Ledger: a directory of closed rounds.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        Option(help="Two audits (page or JSON), before and after.", metavar="BEFORE AFTER"),
    ] = None,
    training: Annotated[
        bool, Option("--training", help="The training page of a Flower server's --rounds.")
    ] = False,
    metrics: Annotated[
        Place | None,
        Option(parser=path_or_url, help="Metric of the replies: unit_id, round, value."),
    ] = None,
    metric_name: Annotated[str, Option(help="What the metric is called.")] = "metric",
    by: Annotated[
        list[str] | None, Option(help="Column to group the metric by; repeatable.")
    ] = None,
    cluster: Cluster = None,
    title: Annotated[str, Option(help="Title of the page.")] = "Selection audit",
    threshold: Threshold = 0.01,
    min_cell: Annotated[
        int, Option(help="Subgroups with fewer clients or rows are not shown.")
    ] = 10,
    keeps_updates: Annotated[
        bool | None, Option(help="Whether a server may keep every client's latest update.")
    ] = None,
    invitations: Annotated[
        bool | None, Option(help="Whether a server chooses whom to invite.")
    ] = None,
    strict: Strict = None,
    state: State = None,
    scheduler: Scheduler = None,
    memory: Memory = None,
    as_json: Annotated[
        Place | None,
        Option("--json", parser=path_or_url, help="File for the same numbers as JSON."),
    ] = None,
    card: Annotated[
        Place | None,
        Option(parser=path_or_url, help="File for a summary like a model card, in Markdown."),
    ] = None,
    schema: Annotated[
        bool,
        Option(
            "--schema",
            help="Print the JSON schema of audits.",
            callback=_print_schema,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Say who is missing, how much it matters, and how far weights can be trusted.

    Writes one self-contained page, and the same numbers as JSON. With --compare two earlier audits
    are set side by side. With --training the page is of a Flower server's run, from its ledger
    alone: metrics of the target population, weights and outcomes by round. No client is named, and
    small subgroups are not shown.

    Example: fedipw audit --population people.parquet --rounds rounds --out report.html
    """
    from fedipw.api import Report
    from fedipw.audit.compare import compare_page
    from fedipw.audit.gather import MetricRequest, audit_facts
    from fedipw.audit.training import Means
    from fedipw.audit.verdict import judged
    from fedipw.evaluation.logged import Metrics
    from fedipw.storage.places import check_place, identity, write_texts
    from fedipw.weighting.replay import Record

    del schema
    written = {identity(path): path for path in (out, as_json, card) if path is not None}
    earlier = [path_or_url(text) for text in compare or ()]
    for path in written.values():
        check_place(path)
        check_inputs_kept(path, rounds, *given.paths, metrics, *earlier)
    if len(written) < 1 + (as_json is not None) + (card is not None):
        raise InputError(f"{out}: the page, the JSON file and the card need a file each.")
    claim(out, as_json, card)
    if training:
        _write_training(ctx, out, rounds, title)
        return
    if compare is not None:
        _check_alone(ctx, {"out", "compare"}, "--compare takes two audits that were made before")
        before, after = map(_earlier, earlier)
        write_texts({out: compare_page(before, after)})
        say(f"Wrote {out}")
        return
    keep_to(memory)
    who = given.read().clustered(cluster)
    check_probabilities(strict=strict, threshold=threshold)
    if min_cell < 1:
        raise InputError(f"--min-cell must be 1 or more, not {min_cell}.")
    if metrics is not None and rounds is None:
        raise InputError("--metrics goes with --rounds: a metric belongs to replies.")
    if state is not None:
        if rounds is None:
            raise InputError("--state goes with --rounds: it holds what was learnt from them.")
        check_inputs_kept(state, rounds, *given.paths, metrics)
    settings, metric = asked.settings(client=ctx.with_resource(scheduled(scheduler))), None
    ledger = None if rounds is None else given.ledger(rounds)
    if metrics is not None:
        values = Metrics.read(given.table(metrics))
        metric = MetricRequest(values=values, name=metric_name, by=tuple(by or ()))
    plan, record = settings.plan(who), Record()
    stage = coded_stage(settings, who, ledger)
    with bar("rounds") as step:
        found = audit_facts(
            stage, ledger, plan, threshold=threshold, min_cell=min_cell, title=title,
            metric=metric, observers=[record], progress=step, saved=going_on(state, "audit"),
        )  # fmt: skip
    check_memory()
    least = _smallest_enrollment(found)
    check_strict(strict, least, record.smallest_participation)
    means = Means(memory=keeps_updates, invitations=invitations)
    _write(Report(judged(found, means)), out, as_json, card)


def _smallest_enrollment(found: Audit) -> float | None:
    """Return the smallest probability; 0 where nobody of a subgroup is enrolled."""
    from fedipw.selection.saved import ENROLLMENT

    if found.overlap is None:
        return None
    # without its penalty, a model that separates has probabilities that run to 0
    separated = any(part.note for part in found.stages if part.stage == ENROLLMENT)
    if found.overlap.empty or found.overlap.empty_small or separated:
        return 0.0
    return found.overlap.smallest_prob


def _write_training(ctx: typer.Context, out: Place, rounds: Place | None, title: str) -> None:
    """Write the page of a training run."""
    from fedipw.audit.progress import training_page, training_run
    from fedipw.storage.places import write_texts
    from fedipw.tables.ledger import Ledger

    taken = {"out", "training", "rounds", "title"}
    _check_alone(ctx, taken, "--training takes --rounds, the ledger of a Flower server")
    if rounds is None:
        raise InputError("--training goes with --rounds, the ledger of a Flower server.")
    named = ctx.get_parameter_source("title")
    own = named is not None and named.name != "DEFAULT"
    page = training_page(training_run(Ledger(rounds)), title if own else "Training round by round")
    write_texts({out: page})
    say(f"Wrote {out}")


def _check_alone(ctx: typer.Context, taken: Collection[str], why: str) -> None:
    """Raise if an option stands there that says nothing beside those that are taken."""
    from fedipw.numerics.checks import some

    more = []
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        named = source is not None and source.name != "DEFAULT"
        if named and option.name not in ALWAYS.union(taken):
            more.append(option.opts[0])
    if more:
        raise InputError(f"{why}, and nothing else but --out: leave out {some(more)}.")


def _write(report: Report, out: Place, as_json: Place | None, card: Place | None) -> None:
    report.save(out, as_json, card)
    found = report.audit
    assert found.verdict is not None
    say(found.verdict.headline)
    for finding in found.verdict.findings:
        say(f"{finding.question} {finding.answer}. {finding.text}")
    for line in found.verdict.uncorrected:
        say(f"Not corrected: {line}")
    for line in found.unknown:
        say(f"Unknown: {line}")
    for line in found.verdict.next_steps:
        say(f"Next: {line}")
    for line in found.verdict.training:
        say(line)
    say(f"Wrote {' and '.join(str(path) for path in (out, as_json, card) if path is not None)}")


def _earlier(path: Place) -> Audit:
    """Return the numbers of an audit that was written before, from its page or its JSON file."""
    from fedipw.audit.compare import written_audit
    from fedipw.storage.places import local_file

    try:
        with local_file(path) as file:
            return written_audit(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    except InputError as error:
        raise InputError(f"{path} is not an audit of this program: {error}") from error
