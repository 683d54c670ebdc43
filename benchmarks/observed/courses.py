"""Twenty-two course presentations in which replies depend on the outcome: what weights cannot mend.

Clients are the registrations of a presentation of the Open University, everybody is enrolled,
rounds are its tutor-marked assessments and a reply is a submission in time. The metric is whether
the course was passed, known for everybody and, to those who estimate, of those who submit. Students
who will not pass stop submitting, most of them without ever having submitted.

Fixed beforehand: participation is logistic with main effects of what is known at registration, once
alone and once with the reply history. Estimated are the plain mean of all replies, the Hájek mean
by ``fedipw.evaluate``, its bounds at odds ratios of 2, 3 and 5, and the audit's answers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import fedipw
from fedipw.audit.verdict import CORRECTION, DEPENDENCE
from fedipw.lab.observed import ObservedTables, RecordedReplies
from fedipw.lab.open_data import PASSED, OuladPopulation, oulad_presentations

ODDS_RATIOS = (2.0, 3.0, 5.0)


def own_means(frame: pl.DataFrame, columns: tuple[str, ...]) -> dict[str, float]:
    """Return the means and shares of a table that is the whole population."""
    out: dict[str, float] = {}
    for column in columns:
        if frame[column].dtype.is_numeric():
            out[column] = float(frame[column].cast(pl.Float64).to_numpy().mean())
            continue
        counts = frame[column].value_counts(normalize=True).sort(column)
        out |= {f"{column}[{level}]": share for level, share in counts.iter_rows()}
    return out


def course(name: str, tables: ObservedTables) -> dict[str, Any]:
    """Return a presentation's truth, estimates, bounds and what the audit says."""
    assert isinstance(tables.replies, RecordedReplies)
    replied = tables.replies.replied
    rounds, clients = len(replied), tables.clients
    never = ~replied.any(axis=0)
    passed = tables.outcomes[PASSED].to_numpy()
    everybody = fedipw.Population.from_totals(
        clients, own_means(clients, tables.covariates), size=clients.height
    )
    with tempfile.TemporaryDirectory() as scratch:
        ledger = tables.ledger(Path(scratch) / "rounds", rounds)
        metric = tables.metric(PASSED, rounds)
        given: Mapping[str, Any] = {"soft": True}
        found = fedipw.evaluate(metric, everybody, ledger, sensitivity=ODDS_RATIOS, **given)
        past = fedipw.evaluate(metric, everybody, ledger, history=True, **given)
        report = fedipw.audit(everybody, ledger, metrics=metric, metric_name=PASSED, **given)
    answers = {one.question: one.answer for one in report.audit.verdict.findings}  # type: ignore[union-attr]
    depends = found.dependence
    return {
        "presentation": name,
        "registrations": clients.height,
        "rounds": rounds,
        "reply_rate": float(replied.mean()),
        "never": float(never.mean()),
        "never_passed": float(passed[never].mean()),
        "truth": tables.truth(PASSED),
        "plain": _line(found, "plain"),
        "hajek": _line(found, "hajek"),
        "hajek_history": _line(past, "hajek"),
        "bounds": {
            f"{one.odds_ratio:g}": {
                "enrollment": [one.low, one.high], "both": [one.both_low, one.both_high]
            }
            for one in found.sensitivity
        },
        "odds_ratio": None if depends is None else depends.odds_ratio,
        "odds_ratio_low": None if depends is None else depends.low,
        "odds_ratio_high": None if depends is None else depends.high,
        "warned": depends is not None and depends.matters,
        "correction": answers[CORRECTION.question],
        "dependence": answers.get(DEPENDENCE.question),
        "headline": report.audit.verdict.headline,  # type: ignore[union-attr]
    }  # fmt: skip


def _line(found: Any, estimator: str) -> dict[str, float]:
    line = found.of(estimator)
    return {"estimate": line.estimate, "se": line.se, "low": line.low, "high": line.high}


def courses(data: Path, repeats: int = 1) -> dict[str, Any]:
    """Return all presentations; nothing is drawn, so there is nothing to repeat."""
    del repeats
    found = [
        course(name, OuladPopulation(path=data, presentation=name).tables())
        for name in oulad_presentations(data)
    ]
    sizes = np.array([one["registrations"] for one in found], dtype=np.float64)

    def mean(values: list[float]) -> float:
        return float(np.average(values, weights=sizes))

    return {
        "courses": found,
        "registrations": int(sizes.sum()),
        "never": mean([one["never"] for one in found]),
        "warned": sum(one["warned"] for one in found),
    }
