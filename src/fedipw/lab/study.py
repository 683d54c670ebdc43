"""``fedipw study``: methods by scenarios by seeds, in parallel, resumed after any kill."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from fedipw.errors import FedIPWError, InputError, WorkerLostError
from fedipw.lab.comparison import comparison_table, rank_table, summary_table
from fedipw.lab.files import environment, staged
from fedipw.lab.pool import pooled
from fedipw.lab.study_figure import StudyView, draw_curves, draw_results
from fedipw.lab.study_page import study_page
from fedipw.lab.studyfile import Case, Study
from fedipw.lab.studyjob import RESULT, Job, finished
from fedipw.lab.studyparts import Parts, fingerprint_of, jobs_of, kept_parts, settings_of

Progress = Callable[[int, int], None]
_WARM_ROUNDS = 3
_TRIES = 3  # seeds that are tried before a scenario counts as impossible


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StudyTables:
    """What a study found.

    ``results`` has one row per scenario, seed and method; ``curves`` excess loss at some forty
    rounds of each; ``summary`` one row per scenario and method; ``comparison`` one per scenario and
    method other than the reference; ``ranks`` one per method that every scenario has.
    """

    results: pl.DataFrame
    curves: pl.DataFrame
    summary: pl.DataFrame
    comparison: pl.DataFrame
    ranks: pl.DataFrame


class StudyStoppedError(FedIPWError, RuntimeError):
    """A study that lost a worker; what was done is kept.

    Attributes
    ----------
    out, done, total
        Where, and how many jobs are kept of how many.
    """

    def __init__(self, out: Path, done: int, total: int, why: str) -> None:
        super().__init__(out, done, total, why)
        self.out, self.done, self.total, self.why = out, done, total, why

    def __str__(self) -> str:
        return (
            f"{self.why} {self.done} of {self.total} jobs are kept in {self.out / 'parts'}; the "
            "same command goes on from there."
        )


def run_study(
    study: Study, out: Path, *, workers: int = 1, progress: Progress | None = None
) -> StudyTables:
    """Run what is not done yet, then write tables, figures and page to ``out``.

    Parameters
    ----------
    study
        As `study_from` reads it.
    out
        A directory; parts of an earlier run of the same study in it are used.
    workers
        Processes. The results do not depend on them.
    progress
        Called with the number of jobs done and of all.
    """
    if workers < 1:
        raise InputError(f"--workers must be at least 1, not {workers}.")
    began = time.perf_counter()
    jobs = jobs_of(study)
    with kept_parts(out, study) as parts:
        missing = [job for job in jobs if not parts.done(job)]
        if missing:
            for case in study.cases:
                _check_case(case, study.seeds)
        try:
            _run(missing, parts, workers, _counted(progress, len(jobs) - len(missing), len(jobs)))
        except WorkerLostError as error:
            raise StudyStoppedError(out, parts.count(jobs), len(jobs), str(error)) from error
        merged = parts.merged(jobs)
        tables = _tables(study, merged)
        seconds = {"wall": time.perf_counter() - began, "jobs": _job_seconds(merged)}
        _write(study, out, tables, _manifest(study, workers, seconds, len(missing)))
    return tables


def _check_case(case: Case, seeds: Sequence[int]) -> None:
    """Raise if a scenario cannot be built with any of the first seeds.

    One seed may fail by chance, as when nobody enrolls; then it is a row of the results.
    """
    error = InputError("")
    for seed in seeds[:_TRIES]:
        try:
            replace(case.scenario, seed=seed).simulation(limits=False)
        except InputError as found:
            error = found
        except FedIPWError:
            return
        else:
            return
    raise InputError(f"Scenario {case.name!r}: {error}") from error


def _counted(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    def step(done: int) -> None:
        if progress is not None:
            progress(before + done, total)

    return step


def _run(jobs: Sequence[Job], parts: Parts, workers: int, step: Callable[[int], None]) -> None:
    step(0)
    if not jobs:
        return
    first = jobs[0]
    rounds = min(_WARM_ROUNDS, first.scenario.rounds)
    warm = replace(first, scenario=replace(first.scenario, rounds=rounds))
    by_file = {job.file: job for job in jobs}
    done = pooled(finished, jobs, min(workers, len(jobs)), warm=warm)
    for count, (file, part) in enumerate(done, start=1):
        parts.save(by_file[file], part)
        step(count)


def _tables(study: Study, merged: pl.DataFrame) -> StudyTables:
    results = merged.select(list(RESULT))
    curves = (
        merged.select("scenario", "method", "seed", "curve_round", "curve_excess_loss")
        .rename({"curve_round": "round", "curve_excess_loss": "excess_loss"})
        .drop_nulls()
        .explode("round", "excess_loss")
    )
    measure = study.measure.column
    return StudyTables(
        results=results,
        curves=curves,
        summary=summary_table(results, measure),
        comparison=comparison_table(results, measure, study.references),
        ranks=rank_table(results, measure),
    )


def _job_seconds(merged: pl.DataFrame) -> dict[str, float]:
    """Return the seconds of all jobs by scenario."""
    each = merged.unique(["scenario", "seed"], maintain_order=True)
    sums = each.group_by("scenario", maintain_order=True).agg(pl.col("seconds").sum().round(3))
    return dict(sums.iter_rows())


def _manifest(study: Study, workers: int, seconds: dict[str, Any], ran: int) -> dict[str, Any]:
    settings = settings_of(study)
    return {
        "command": "fedipw study",
        "title": study.title,
        "measure": study.measure.column,
        "references": study.references,
        "titles": {case.name: case.title for case in study.cases},
        "settings": settings,
        "fingerprint": fingerprint_of(settings),
        "workers": workers,
        "jobs_run": ran,
        "seconds": {"wall": round(seconds["wall"], 2), "jobs": seconds["jobs"]},
        **environment(),
    }


def _write(study: Study, out: Path, tables: StudyTables, manifest: dict[str, Any]) -> None:
    view = StudyView(
        title=study.title,
        scenarios={case.name: case.title for case in study.cases},
        methods=study.methods,
        references=study.references,
        measure=study.measure.column,
        words=study.measure.words,
        seeds=len(study.seeds),
        rounds={case.name: case.scenario.rounds for case in study.cases},
        results=tables.results,
        curves=tables.curves,
        summary=tables.summary,
        comparison=tables.comparison,
        ranks=tables.ranks,
    )
    with staged(out) as stage:
        tables.results.write_parquet(stage / "results.parquet")
        tables.curves.write_parquet(stage / "curves.parquet")
        tables.summary.write_parquet(stage / "summary.parquet")
        tables.summary.write_csv(stage / "summary.csv")
        tables.comparison.write_csv(stage / "comparison.csv")
        tables.ranks.write_csv(stage / "ranks.csv")
        draw_results(stage, view)
        drawn = draw_curves(stage, view)
        (stage / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        page = study_page(stage, view, manifest, curves=drawn)
        (stage / "index.html").write_text(page, encoding="utf-8")
