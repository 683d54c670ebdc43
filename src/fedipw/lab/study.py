"""``fedipw study``: methods by scenarios by seeds, in parallel, resumed after any kill.

A job is a scenario with one seed and all its methods. Its part file is written whole, so what is
done is kept, and what is kept must fit the settings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.combining.tail import tail_length
from fedipw.errors import DivergedError, FedIPWError, InputError, WorkerLostError
from fedipw.lab.comparison import RESULT, StudyTables
from fedipw.lab.engine import History, Simulation
from fedipw.lab.files import environment, fingerprint_of
from fedipw.lab.pool import pooled
from fedipw.lab.scenario import Scenario
from fedipw.lab.study_file import Case, Study
from fedipw.lab.theory import FederatedLogistic, error_parts
from fedipw.storage.atomic import (
    check_directory,
    remove_abandoned,
    write_text,
    written_directory,
    written_path,
)
from fedipw.storage.lock import locked
from fedipw.tables.table import check_results

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray, IntArray

PART: Mapping[str, Any] = {
    **RESULT,
    "curve_round": pl.List(pl.Int64),
    "curve_excess_loss": pl.List(pl.Float64),
    "seconds": pl.Float64,
    "fingerprint": pl.String,
}
Progress = Callable[[int, int], None]
_WARM_ROUNDS = 3
_TRIES = 3  # seeds that are tried before a scenario counts as impossible
_POINTS = 20  # of a curve, evenly over its rounds, and as many more towards its start
_SETTINGS, _PARTS = "study.json", "parts"
_SHOWN = 3  # settings that are named where a directory holds another study
_REMEDY = "Choose another --out, or remove the directory."


class StudyStoppedError(WorkerLostError):
    """A study that lost a worker: ``done`` of ``total`` jobs are kept in ``out``."""

    def __init__(self, out: Path, done: int, total: int) -> None:
        super().__init__(out, done, total)
        self.out, self.done, self.total = out, done, total

    def __str__(self) -> str:
        return (
            f"{WorkerLostError()} {self.done} of {self.total} jobs are kept in "
            f"{self.out / _PARTS}; the same command goes on from there."
        )


def run_study(
    study: Study, out: Path, *, workers: int = 1, progress: Progress | None = None
) -> StudyTables:
    """Run what is not done yet, then write tables, figures and page to ``out``.

    Parts of an earlier run of the same study in ``out`` are used. The results do not depend on the
    number of processes, ``workers``; ``progress`` is called with the jobs done and all of them.
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

        def step(done: int) -> None:
            if progress is not None:
                progress(len(jobs) - len(missing) + done, len(jobs))

        try:
            _run(missing, parts, workers, step)
        except WorkerLostError as error:
            raise StudyStoppedError(out, parts.count(jobs), len(jobs)) from error
        merged = parts.merged(jobs)
        tables = StudyTables.of(study, merged)
        seconds = {"wall": time.perf_counter() - began, "jobs": _job_seconds(merged)}
        _write(out, tables, _manifest(study, workers, seconds, len(missing)))
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


def _run(jobs: Sequence[Job], parts: Parts, workers: int, step: Callable[[int], None]) -> None:
    step(0)
    if not jobs:
        return
    short = replace(jobs[0].scenario, rounds=min(_WARM_ROUNDS, jobs[0].scenario.rounds))
    warm = replace(jobs[0], scenario=short)
    by_file = {job.file: job for job in jobs}
    done = pooled(Job.finished, jobs, min(workers, len(jobs)), warm=warm)
    for count, (file, part) in enumerate(done, start=1):
        parts.save(by_file[file], part)
        step(count)


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
        "titles": study.titles,
        "settings": settings,
        "fingerprint": fingerprint_of(settings),
        "workers": workers,
        "jobs_run": ran,
        "seconds": {"wall": round(seconds["wall"], 2), "jobs": seconds["jobs"]},
        **environment(),
    }


def _write(out: Path, tables: StudyTables, manifest: dict[str, Any]) -> None:
    from fedipw.lab.study_page import draw_curves, draw_results, study_page  # noqa: PLC0415

    for name in ("results", "curves", "summary", "comparison", "ranks"):
        check_results(getattr(tables, name), out / name)
    with written_directory(out) as stage:
        tables.results.write_parquet(stage / "results.parquet")
        tables.curves.write_parquet(stage / "curves.parquet")
        tables.summary.write_parquet(stage / "summary.parquet")
        tables.summary.write_csv(stage / "summary.csv")
        tables.comparison.write_csv(stage / "comparison.csv")
        tables.ranks.write_csv(stage / "ranks.csv")
        draw_results(stage, tables)
        drawn = draw_curves(stage, tables)
        (stage / "manifest.json").write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")
        page = study_page(stage, tables, manifest, curves=drawn)
        (stage / "index.html").write_text(page, encoding="utf-8")


def settings_of(study: Study) -> dict[str, Any]:
    """Return all that the results depend on, as plain values."""
    return {
        "fedipw": version("fedipw"),
        "seeds": list(study.seeds),
        "scenarios": {
            case.name: {k: v for k, v in case.scenario.settings().items() if k != "seed"}
            for case in study.cases
        },
    }


def jobs_of(study: Study) -> list[Job]:
    """Return every scenario with every seed, in the order results are kept in."""
    fingerprint = fingerprint_of(settings_of(study))
    return [
        Job(
            name=case.name,
            scenario=replace(case.scenario, seed=seed),
            file=f"scenario-{k:03d}-seed-{seed}.parquet",
            fingerprint=fingerprint,
        )
        for k, case in enumerate(study.cases)
        for seed in study.seeds
    ]


@contextmanager
def kept_parts(out: Path, study: Study) -> Iterator[Parts]:
    """Yield the part files of a study in ``out``, for this process alone.

    Raises if the directory holds parts of other settings, or if another process works there.
    """
    check_directory(out)
    settings = settings_of(study)
    _check_settings(out, settings)
    made = [path for path in (out / _PARTS, out) if not path.exists()]
    try:
        (out / _PARTS).mkdir(parents=True, exist_ok=True)
        with locked(out / _PARTS, "runs a study"):
            remove_abandoned(out / _PARTS)
            write_text(out / _SETTINGS, json.dumps(settings, indent=2) + "\n")
            yield Parts(out / _PARTS)
    finally:
        for path in made:  # of a study that could not even begin; what holds anything stays
            with suppress(OSError):
                path.rmdir()


@dataclass(frozen=True)
class Parts:
    """The part files of one study."""

    directory: Path

    def done(self, job: Job) -> bool:
        """Whether a job's part is there; one that was cut short counts as missing.

        A part of something else is an error: it was not written by this study.
        """
        path = self.directory / job.file
        if not path.exists():
            return False
        try:
            part = pl.read_parquet(path)
        except (pl.exceptions.PolarsError, OSError):
            return False
        if not job.fits(part):
            raise InputError(f"{path} is not of this study: it holds other rows. {_REMEDY}")
        return True

    def save(self, job: Job, part: pl.DataFrame) -> None:
        """Write a part: a kill leaves all of it, or none."""
        with written_path(self.directory / job.file) as temporary:
            part.write_parquet(temporary)

    def merged(self, jobs: Sequence[Job]) -> pl.DataFrame:
        """Return all parts in the order of the jobs."""
        return pl.concat([pl.read_parquet(self.directory / job.file) for job in jobs])

    def count(self, jobs: Sequence[Job]) -> int:
        """Return how many jobs have a part."""
        return sum((self.directory / job.file).exists() for job in jobs)


def _check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    path = out / _SETTINGS
    if not path.exists():
        if (out / _PARTS).is_dir() and any((out / _PARTS).glob("*.parquet")):
            raise InputError(f"{out} holds parts of a study without its {_SETTINGS}. {_REMEDY}")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error}). {_REMEDY}") from error
    if before == settings and json.dumps(before) == json.dumps(settings):
        return
    old, new = dict(_flat(before)), dict(_flat(settings))
    names = [n for n in dict.fromkeys([*new, *old]) if old.get(n) != new.get(n)]
    told = "; ".join(f"{n} was {_told(old, n)}, is now {_told(new, n)}" for n in names[:_SHOWN])
    more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise InputError(
        f"{out} holds a study with other settings: {told or 'scenarios in another order'}{more}. "
        f"{_REMEDY}"
    )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _told(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A scenario, with the seed it is run with, and what its part file must hold."""

    name: str
    scenario: Scenario
    file: str
    fingerprint: str

    def part(self) -> pl.DataFrame:
        """Run it: one row per method, in the scenario's order.

        A method that fails keeps its row, with the reason and no numbers; the others are run
        without it, which changes nothing for them.
        """
        began = time.perf_counter()
        rows = _rows(self.scenario)
        shared = {
            "scenario": self.name,
            "seed": self.scenario.seed,
            "seconds": time.perf_counter() - began,
            "fingerprint": self.fingerprint,
        }
        empty = dict.fromkeys(PART)
        return pl.DataFrame(
            [{**empty, **rows[m], **shared, "method": m} for m in self.scenario.methods],
            schema=dict(PART),
        )

    def finished(self) -> tuple[str, pl.DataFrame]:
        """Return the file and the part."""
        return self.file, self.part()

    def fits(self, part: pl.DataFrame) -> bool:
        """Whether a part is one of this job: its columns, scenario, seed, methods, settings."""
        return (
            dict(part.schema) == dict(PART)
            and part["method"].to_list() == list(self.scenario.methods)
            and set(part["scenario"]) == {self.name}
            and set(part["seed"]) == {self.scenario.seed}
            and set(part["fingerprint"]) == {self.fingerprint}
        )


def curve_rounds(rounds: int) -> IntArray:
    """Return the rounds at which a curve is kept: some forty, denser at the start.

    >>> curve_rounds(12).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    >>> len(curve_rounds(600)), int(curve_rounds(600)[-1])
    (37, 600)
    """
    points = min(rounds, _POINTS)
    both = [np.linspace(1, rounds, points), np.geomspace(1, rounds, points)]
    return np.unique(np.rint(both).astype(np.int64))


def _rows(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return each method's columns: all together, or one at a time if one of them fails."""
    try:
        return _together(scenario, limits=scenario.has_limits)
    except FedIPWError:
        return {name: _alone(scenario, name) for name in scenario.methods}


def _alone(scenario: Scenario, name: str) -> dict[str, Any]:
    """Return the columns of one method; a limit that cannot be had does not cost it the rest."""
    single = replace(scenario, methods=(name,))
    try:
        return _together(single, limits=scenario.has_limits)[name]
    except DivergedError as error:
        return {"failure": str(error)}
    except FedIPWError as error:
        first = str(error)
    try:
        return {**_together(single, limits=False)[name], "limit_failure": first}
    except FedIPWError as error:
        return {"failure": str(error)}


def _together(scenario: Scenario, *, limits: bool) -> dict[str, dict[str, Any]]:
    with np.errstate(over="ignore", invalid="ignore"):  # a method that leaves the finite numbers
        run = scenario.simulation(limits=limits)
        run.advance(scenario.rounds)
        target, history = scenario.objective(run.federation), run.history()
        best = target.minimum()
        shared = {
            "best_loss": best.value,
            "enrolled_size": run.federation.population.enrolled_size,
            "mean_replies": float(history.replies.mean()),
            "skipped_rounds": int(history.skipped.sum()),
        }
        return {
            name: {
                **shared,
                **_losses(scenario, history, target, name),
                "distance": float(np.linalg.norm(history.of(name)[-1] - best.point)),
                "mean_effective_replies": _effective(history, name),
                **_limit(run, target, history.of(name)[-1], name),
            }
            for name in scenario.methods
        }


def _losses(
    scenario: Scenario, history: History, target: FederatedLogistic, name: str
) -> dict[str, Any]:
    """Return the losses of a method's last, averaged and kept models, in one pass over the data."""
    iterates = history.of(name)
    tail = iterates[-tail_length(history.rounds, scenario.training.tail) :]
    rounds = curve_rounds(history.rounds)
    average = history.tail_average(name, scenario.training.tail)
    losses = target.losses(np.vstack([average, tail, iterates[rounds]])) - target.minimum().value
    if not np.isfinite(losses).all():
        raise FedIPWError(
            f"{name} diverged: its loss is no longer finite. Lower the local step size, the number "
            "of local steps or the server step, trim the weights, or use the Hájek form."
        )
    return {
        "excess_loss": float(losses[len(tail)]),
        "tail_excess_loss": float(losses[0]),
        "mean_tail_loss": float(losses[1 : 1 + len(tail)].mean()),
        "curve_round": rounds.tolist(),
        "curve_excess_loss": losses[1 + len(tail) :].tolist(),
    }


def _effective(history: History, name: str) -> float | None:
    sizes = history.effective_replies[history.methods.index(name)]
    known = sizes[np.isfinite(sizes)]
    return float(known.mean()) if len(known) else None


def _limit(
    run: Simulation, target: FederatedLogistic, last: FloatArray, name: str
) -> dict[str, Any]:
    weights = run.limits.get(name)
    if weights is None:
        return {}
    parts = error_parts(target, weights, last)
    names = ("limit_excess_loss", "optimisation", "lottery", "bias")
    return {name: getattr(parts, name) for name in names}
