"""Part files of a study: what is done is kept, and what is kept fits the settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

from fedipw.errors import InputError
from fedipw.lab.files import check_directory
from fedipw.lab.studyfile import Study
from fedipw.lab.studyjob import Job

try:
    import fcntl
except ImportError:  # pragma: no cover, no such locks on Windows
    fcntl = None  # type: ignore[assignment]

_SETTINGS, _PARTS, _LOCK = "study.json", "parts", ".lock"
_SHOWN = 3  # settings that are named where a directory holds another study
_REMEDY = "Choose another --out, or remove the directory."


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


def fingerprint_of(settings: Mapping[str, Any]) -> str:
    """Return a digest of the settings, in which the order of scenarios counts."""
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


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
    (out / _PARTS).mkdir(parents=True, exist_ok=True)
    with (out / _PARTS / _LOCK).open("w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(
                    f"Another process runs a study in {out}. Wait for it, or choose another --out."
                ) from None
        _write(out / _SETTINGS, (json.dumps(settings, indent=2) + "\n").encode())
        yield Parts(out / _PARTS)


class Parts:
    """The part files of one study."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

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
        temporary = self.directory / f".{job.file}.partial"
        part.write_parquet(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(self.directory / job.file)

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


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    with suppress(OSError):
        if path.read_bytes() == content:
            return
    temporary.write_bytes(content)
    temporary.replace(path)
