"""``fedipw weights``: one weight per reply of a ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer import Option

from fedipw.cli.options import (
    FitName,
    Memory,
    Place,
    PopulationOptions,
    Rounds,
    Scheduler,
    State,
    Strict,
    Threshold,
    WeightOptions,
    check_free,
    check_inputs_kept,
    check_probabilities,
    check_strict,
    claim,
    coded_stage,
    going_on,
    keep_to,
    local_directory,
    path_or_url,
    scheduled,
)
from fedipw.cli.terminal import bar, say
from fedipw.cli.terminal import out as _out
from fedipw.errors import InputError
from fedipw.storage.memory import check_memory

if TYPE_CHECKING:
    from fedipw.selection.overlap import Overlap
    from fedipw.weighting.replay import Record, Replay
    from fedipw.weighting.resume import SavedRun
    from fedipw.weighting.spread import SpreadReplay


_SMALL_P = 1e-4  # below which a p-value is shown as smaller than it


def weights(
    rounds: Rounds,
    out: Annotated[
        Place,
        Option(
            parser=path_or_url,
            help="File for one row per reply, .parquet or .csv, or a directory of parts.",
        ),
    ],
    given: PopulationOptions,
    asked: WeightOptions,
    threshold: Threshold = 0.01,
    strict: Strict = None,
    save_models: Annotated[
        Path | None,
        Option(parser=local_directory, metavar="PATH", help="Directory for the fitted models."),
    ] = None,
    models_table: Annotated[
        bool,
        Option("--models-table", help="Show coefficients: odds ratios, 95% intervals, p-values."),
    ] = False,
    state: State = None,
    scheduler: Scheduler = None,
    memory: Memory = None,
    as_json: Annotated[bool, Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Weigh every reply of a ledger by the inverse of its two selection probabilities.

    Writes unit_id, round, enrollment_prob, participation_prob, inclusion_prob and weight (and
    enrollment_weight where enrollment is calibrated), one row per reply. A name without a suffix is
    a directory, which gets the rows in parts. Tables, ledgers and outputs can be URLs. Ends with
    code 3 if no weights can meet the targets, 4 if a probability is below --strict.

    Example: fedipw weights --population people.parquet --rounds rounds --out weights.parquet
    """
    from fedipw.tables.parts import check_output
    from fedipw.weighting.spread import replay_of

    if save_models is not None and save_models.exists() and not save_models.is_dir():
        raise InputError(f"{save_models} is no directory.")
    keep_to(memory)
    who = given.read()
    for place in (out, *([] if state is None else [state])):
        check_inputs_kept(place, rounds, *given.paths)
    check_output(out)
    check_probabilities(strict=strict, threshold=threshold)
    if save_models is not None and asked.fit is FitName.SAME_ROUND:
        raise InputError("The same-round fit has a model for each round: there is none to save.")
    ledger = given.ledger(rounds)
    check_free(save_models)
    claim(out)
    with scheduled(scheduler) as client:
        settings = asked.settings(client=client)
        if save_models is not None:
            settings.check_saved()
        wanted = models_table or save_models is not None
        plan = replace(settings.plan(who), errors=wanted)
        stage, saved = coded_stage(settings, who, ledger), going_on(state, "weights")
        with ExitStack() as stack:
            with bar("rounds") as step:
                replay = replay_of(stage, ledger, plan, progress=step, saved=saved)
                stack.enter_context(_written(out, replay, saved))
            check_memory()
            record = replay.record
            if not record.weighed_replies:
                raise InputError(
                    "No round has a reply that can be weighed: there is nothing to write."
                )
            found = stage.overlap(record.enrollment, threshold)
            least = None if found is None else found.smallest[0]
            if record.enrollment is not None and record.enrollment.note:
                least = 0.0  # without its penalty
            check_strict(strict, least, record.smallest_participation)
            if save_models is not None:
                _save(save_models, record)
    summary = _summary(record, found, plan.method.name, out, models_table=models_table)
    if as_json:
        typer.echo(json.dumps(summary, allow_nan=False))
        return
    _report(record, found, summary)
    if models_table:
        _show_models(record)
    say(f"Wrote {out}")


@contextmanager
def _written(out: Place, replay: Replay | SpreadReplay, saved: SavedRun | None) -> Iterator[None]:
    """Weigh all rounds; their tables become one file, or parts, unless what follows fails.

    Workers of a cluster write parts themselves. With a saved state it keeps the tables, those of
    earlier runs among them.
    """
    import polars as pl

    from fedipw.tables.parts import is_in_parts, written_parts, written_rows

    if replay.spread and is_in_parts(out):
        with written_parts(out) as parts:
            parts.check(replay.run(parts.write))
            yield
        return
    with written_rows(out) as write:
        for table in replay:
            if saved is None:
                write(table)
            else:
                saved.keep(table)
        for path in () if saved is None else saved.tables:
            write(pl.read_parquet(path))
        yield


def _save(directory: Path, record: Record) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{directory} cannot be made: {error.strerror}.") from error
    for name, model in record.models().items():
        model.save(directory / f"{name}.json")


def _summary(
    record: Record, found: Overlap | None, method: str, out: Place, *, models_table: bool
) -> dict[str, Any]:
    from fedipw.selection.coefficients import coefficient_notes

    table = record.models_table() if models_table else None
    models: dict[str, Any] = {}
    for name, model in record.models().items():
        models[name] = {
            "formula": model.design.formula, "left_out": model.left_out, "dropped": model.dropped,
            "note": model.note,
        }  # fmt: skip
        if table is not None:
            rows = table.filter(stage=name).drop("stage")
            models[name]["coefficients"] = rows.to_dicts()
            models[name]["coefficient_notes"] = list(coefficient_notes(model))
    overlap = None if found is None else found.to_json()
    return {
        "out": str(out), "method": method, **record.to_json(), "overlap": overlap, "models": models,
    }  # fmt: skip


def _show_models(record: Record) -> None:
    """Print the coefficients of the models, with how they should be taken."""
    from fedipw.selection.coefficients import coefficient_notes

    rows = record.models_table()
    for stage, model in record.models().items():
        title = f"Model of {stage}: odds ratios (OR) with 95% intervals"
        table = Table(title=title, title_justify="left")
        table.add_column("term", overflow="fold")
        for head in ("coef", "se", "OR", "low", "high", "p"):
            table.add_column(head, justify="right", no_wrap=True)
        for name, *numbers, p in rows.filter(stage=stage).drop("stage").iter_rows():
            small = p is not None and p < _SMALL_P
            table.add_row(escape(name), *map(_short, numbers), "<0.0001" if small else _short(p))
        if table.row_count:
            _out.print(table)
        for note in coefficient_notes(model):
            say(f"{stage.capitalize()}: {note}")
    if not record.participation:
        say("Participation: a constant rate, not a model, so there are no coefficients.")


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _report(record: Record, found: Overlap | None, summary: dict[str, Any]) -> None:
    method = summary["method"]
    table = Table("participation from", "rounds")
    for source, count in record.sources.items():
        table.add_row(source, str(count))
    _out.print(table)
    say(
        f"{record.weighed_replies} replies of {record.rounds} rounds weighed by {method}; weights "
        f"of a round sum to {_shown(summary['mean_weight_sum'])} and count as "
        f"{_shown(summary['mean_effective_replies'])} replies on average."
    )
    say(
        f"Smallest participation probability {_shown(summary['smallest_participation_prob'])}; "
        f"{record.refits} participation fits, {record.passes} passes over their rounds."
    )
    if record.population:
        say(record.population)
    for line in () if found is None else found.lines():
        say(line)
    if summary["enrolled_effective"] is not None:
        say(
            f"Enrollment by calibration: the enrolled clients count as "
            f"{_shown(summary['enrolled_effective'])}."
        )
    if record.rows_left_out:
        say(f"{record.rows_left_out} rows of the ledger were left out of the fits: no value.")
    if record.left_out:
        say(f"{record.left_out} replies have a missing value or an unknown level: no weight.")
    for index, why in list(record.skipped.items())[:5]:
        say(f"Round {index} skipped: {why}.")
    if len(record.skipped) > 5:
        say(f"... and {len(record.skipped) - 5} more rounds skipped.")
    for line in _remarks(record, method):
        say(line)


def _remarks(record: Record, method: str) -> Iterator[str]:
    """Yield what there is to know of the weights besides."""
    from fedipw.weighting.methods import method_named
    from fedipw.weighting.replay import note_sentence, rate_sentence

    for note, count in record.notes.items():
        yield note_sentence(note, count)
    if record.rate_rounds:
        yield rate_sentence("participation", record.rate_rounds)
    if record.few_effective:
        yield (
            f"Warning: in {record.few_effective} rounds few replies carry the weight (they count "
            "as fewer than 5, or than a third of them)."
        )
    if record.imbalance is not None:
        yield (
            f"Largest standardised difference from the population: {record.imbalance.enrolled:.2g} "
            f"for the enrolled, {record.imbalance.respondents:.2g} for the weighted replies."
        )
    if method_named(method).augmentation.balance:
        yield "These are the weights alone: the regression of updates belongs to training."
    if record.negative:
        yield f"{record.negative} weights are negative."
    if record.trimmed:
        yield f"{record.trimmed} weights were cut."


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
