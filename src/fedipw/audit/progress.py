"""The page of a training run, from the ledger of a server and the metrics beside it.

A Flower server writes the metrics of every round to ``checkpoint`` in its ledger's directory. Most
of them come from clients: whatever cannot be read, or is not a finite number, is left out, and the
page says how much.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import polars as pl

from fedipw.audit.page import Column, SortTable, chart_page, table
from fedipw.errors import InputError
from fedipw.tables.columns import FATE, INVITED, REPLIED
from fedipw.tables.ledger import Ledger

METRICS_MAX: Final = 12  # of one kind, with a chart each
CURVES_MAX: Final = 7  # of one chart, as many as there are colours
_TARGET = re.compile(r"^(?P<name>.+?)(?:\[(?P<group>.*)\])?-target$", re.DOTALL)
_OWN = "fedipw-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What a run's files tell, by round."""

    rounds: tuple[int, ...]
    invited: tuple[int, ...]
    outcomes: tuple[Mapping[str, int], ...]  # of the invitations of each round, in words
    trained: Mapping[int, Mapping[str, float]]  # metrics of training by round
    evaluated: Mapping[int, Mapping[str, float]]
    files: str = "the files of metrics"  # where all of them are
    unread: int = 0  # files of metrics that could not be read
    settings: Mapping[str, Any] = field(default_factory=dict)


def training_run(ledger: Ledger) -> TrainingRun:
    """Return what a server's ledger and the metrics beside it tell."""
    folder, rounds = ledger.folder / "checkpoint", ledger.require_rounds()
    invited, outcomes = [], []
    for index in rounds:
        frame = ledger.read(index)
        invited.append(int(frame[INVITED].sum()))
        outcomes.append(_outcomes(frame))
    trained, lost = _metrics(folder, "train", rounds)
    evaluated, more = _metrics(folder, "evaluate", rounds)
    if not trained:
        raise InputError(
            f"{folder} holds no metrics of these rounds: a training page needs the ledger of a "
            "Flower server. fedipw audit without --training reads any ledger."
        )
    return TrainingRun(
        rounds=rounds, invited=tuple(invited), outcomes=tuple(outcomes), trained=trained,
        evaluated=evaluated, unread=lost + more, files=f"the files in {folder}",
        settings={"ledger": str(ledger.directory), "rounds": len(rounds)},
    )  # fmt: skip


def _outcomes(frame: pl.DataFrame) -> dict[str, int]:
    """Return the number of invitations by outcome; those of ``refused: ...`` are one."""
    if FATE in frame.columns and frame.schema[FATE] == pl.String:
        words = frame[FATE].drop_nulls().str.split(":").list.first().to_list()
        return dict(sorted(Counter(words).items()))
    replied = int(frame[REPLIED].sum())
    return {"replied": replied, "silent": int(frame[INVITED].sum()) - replied}


def _metrics(
    folder: Path, kind: str, rounds: Iterable[int]
) -> tuple[dict[int, dict[str, float]], int]:
    """Return metrics that are one finite number, by round, and how many files cannot be read."""
    out, lost = {}, 0
    for index in rounds:
        try:
            text = (folder / f"{kind}-{index:06d}.json").read_text(encoding="utf-8")
            found = json.loads(text)["metrics"]
            kept = {} if found is None else dict(found)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            lost += 1
            continue
        numbers = {str(k): float(v) for k, v in kept.items() if _is_number(v)}
        if numbers:
            out[index] = numbers
    return out, lost


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def training_page(run: TrainingRun, title: str = "Training round by round") -> str:
    """Return the page: target metrics with intervals, weights, reliance and outcomes by round."""
    return chart_page(
        title,
        [*_target_charts(run), *_trained_charts(run), *_weight_charts(run), _outcome_chart(run)],
        _tables(run),
        _notes(run),
        run.settings,
    )


def _names(run: TrainingRun) -> list[str]:
    """Return the metrics that clients report when they evaluate."""
    keys = _keys(run.evaluated)
    return [key.removesuffix("-plain") for key in keys if key.endswith("-plain")]


def _keys(found: Mapping[int, Mapping[str, float]]) -> dict[str, None]:
    """Return the names of metrics in the order in which they occur."""
    return dict.fromkeys(key for metrics in found.values() for key in metrics)


def _series(found: Mapping[int, Mapping[str, float]], key: str) -> list[float | None]:
    return [metrics.get(key) for metrics in found.values()]


def _curve(
    name: str, found: Mapping[int, Mapping[str, float]], key: str, *, band: bool = False
) -> dict[str, Any]:
    """Return a curve over the rounds that have a value, with its interval."""
    here = {index: metrics for index, metrics in found.items() if key in metrics}
    whole = band and all(f"{key}-{end}" in m for m in here.values() for end in ("low", "high"))
    return {
        "name": name, "round": list(here), "value": _series(here, key),
        "low": _series(here, f"{key}-low") if whole else None,
        "high": _series(here, f"{key}-high") if whole else None,
    }  # fmt: skip


def _chart(
    title: str, caption: str, label: str, curves: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    return {"title": title, "caption": caption, "y_label": label, "log": False,
            "curves": [curve for curve in curves if curve["round"]]}  # fmt: skip


def _target_charts(run: TrainingRun) -> list[dict[str, Any]]:
    charts = []
    for name in _names(run)[:METRICS_MAX]:
        target = _curve("Target population, 95% interval", run.evaluated, f"{name}-target",
                        band=True)  # fmt: skip
        plain = _curve("Respondents, plain mean", run.evaluated, f"{name}-plain")
        caption = (
            "Each model as the clients that evaluate it report: weighted for the whole population, "
            "with the interval of that round alone, and as they are."
        )
        charts.append(_chart(f"{name} of the target population", caption, name, [target, plain]))
        groups = _groups(run, name)
        if groups:
            curves = [
                _curve(group, run.evaluated, f"{name}[{group}]-target")
                for group in groups[:CURVES_MAX]
            ]
            caption = "Weighted means by subgroup; their intervals are in the table below."
            charts.append(_chart(f"{name} by subgroup", caption, name, curves))
    return [chart for chart in charts if chart["curves"]]


def _groups(run: TrainingRun, name: str) -> list[str]:
    matches = (_TARGET.match(key) for key in _keys(run.evaluated))
    return [m["group"] for m in matches if m and m["name"] == name and m["group"]]


def _trained_names(run: TrainingRun) -> list[str]:
    """Return the metrics that clients report when they train."""
    return [key for key in _keys(run.trained) if not key.startswith(_OWN)]


def _trained_charts(run: TrainingRun) -> list[dict[str, Any]]:
    own = _trained_names(run)[:METRICS_MAX]
    caption = "As clients report while they train, weighted: on data they fit the model to."
    return [
        _chart(f"{name} in training", caption, name, [_curve("Weighted", run.trained, name)])
        for name in own
    ]


def _weight_charts(run: TrainingRun) -> list[dict[str, Any]]:
    trained = run.trained
    effective = [
        _curve("Effective replies", trained, f"{_OWN}effective-replies"),
        _curve("Replies with a weight", trained, f"{_OWN}weighed"),
    ]
    largest = [_curve("Largest weight", trained, f"{_OWN}weight-largest")]
    sums = [_curve("Sum of weights", trained, f"{_OWN}weight-sum")]
    values = [value for value in sums[0]["value"] if value is not None]
    if values and max(values) - min(values) < 1e-6:  # shares: there is nothing to see
        sums = []
    relied = [_curve("Reliance", trained, f"{_OWN}reliance")]
    charts = [
        _chart("Replies and how many they count as", "Kish's effective number of a round's "
               "replies: how many equal weights would be as precise.", "Replies", effective),
        _chart("Largest weight", "What one reply carried at most.", "Weight", largest),
        _chart("Sum of weights", "1 on average where probabilities are right.", "Sum", sums),
        _chart("Reliance on enrollment weights", "As far as updates show that enrollment weights "
               "matter: 1 is wholly, 0 leaves participation weights alone.", "Reliance Λ", relied),
    ]  # fmt: skip
    return [chart for chart in charts if chart["curves"]]


def _outcome_chart(run: TrainingRun) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for found in run.outcomes:
        total.update(found)
    shown = [name for name, _ in total.most_common(CURVES_MAX)]
    curves = [
        {"name": name, "round": list(run.rounds), "low": None, "high": None,
         "value": [found.get(name, 0) for found in run.outcomes]}
        for name in shown
    ]  # fmt: skip
    return _chart("Outcomes of invitations", "How each round's invitations to train ended.",
                  "Invitations", curves)  # fmt: skip


def _tables(run: TrainingRun) -> list[SortTable]:
    out = []
    if run.evaluated:
        last = max(run.evaluated)
        rows = []
        for key, estimate in run.evaluated[last].items():
            match = _TARGET.match(key)
            if match:
                low, high = (run.evaluated[last].get(f"{key}-{end}") for end in ("low", "high"))
                rows.append([match["name"], match["group"] or "everyone", estimate, low, high])
        columns = [Column("Metric", "text"), Column("Group", "text"), Column("Estimate"),
                   Column("Low"), Column("High")]  # fmt: skip
        if rows:
            out.append(table(f"Target population after round {last}", columns, rows))
    heads = (("Effective replies", "effective-replies"), ("Largest weight", "weight-largest"),
             ("Reliance", "reliance"))  # fmt: skip
    columns = [Column("Round", "text"), Column("Invited", "count"), Column("Replied", "count"),
               *(Column(head) for head, _ in heads)]  # fmt: skip
    lines = [
        [str(index), invited, found.get("replied", 0),
         *(run.trained.get(index, {}).get(_OWN + key) for _, key in heads)]
        for index, invited, found in zip(run.rounds, run.invited, run.outcomes, strict=True)
    ]  # fmt: skip
    out.append(table("Rounds", columns, lines))
    return out


def _notes(run: TrainingRun) -> list[str]:
    replied = sum(found.get("replied", 0) for found in run.outcomes)
    out = [
        f"{len(run.rounds):,} rounds, {sum(run.invited):,} invitations, {replied:,} replies.",
    ]
    if run.evaluated:
        out.append("Each interval is of one round. Over many rounds some of them miss the truth: "
                   "the best of many looks better than it is.")  # fmt: skip
    else:
        out.append("No round was evaluated: there is no metric of the target population.")
    curves = sum(max(0, len(_groups(run, name)) - CURVES_MAX) for name in _names(run))
    for more, what in (
        (len(_names(run)) - METRICS_MAX, "metrics of evaluation"),
        (len(_trained_names(run)) - METRICS_MAX, "metrics of training"),
        (curves, "curves of subgroups"),
    ):
        if more > 0:
            out.append(f"{more:,} further {what} are not drawn: {run.files} have every number.")
    if run.unread:
        out.append(f"{run.unread:,} files of metrics could not be read and are left out.")
    return out
