"""Places of files: local paths and URLs, read and written alike."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from fedipw.errors import InputError
from fedipw.storage import atomic
from fedipw.storage.remote import Copy, Remote, copies

Place: TypeAlias = Path | Remote

_AT_A_TIME = 8  # files copied from a store
_URL = re.compile(r"^[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_LOCAL = re.compile(r"^(file|local)://", re.IGNORECASE)
_COLLAPSED = re.compile(r"^[a-z][a-z0-9+.-]+:$", re.IGNORECASE)  # the first part of such a Path


def place_of(given: str | Path | Remote) -> Place:
    """Return the path or URL that a text stands for; ``file://`` is a path.

    >>> place_of("people.csv"), place_of("file:///data/people.csv"), place_of("s3://bucket/people/")
    (PosixPath('people.csv'), PosixPath('/data/people.csv'), Remote('s3://bucket/people'))
    """
    if isinstance(given, Remote):
        return given
    if isinstance(given, str) and _LOCAL.match(given):
        return Path(_LOCAL.sub("", given))
    if isinstance(given, str) and _URL.match(given):
        return Remote(given.rstrip("/"))
    path = Path(given)
    start = path.parts[0] if path.parts else ""
    if isinstance(given, Path) and _COLLAPSED.match(start) and not Path(start).exists():
        raise InputError(f"{path}: give a URL as text; a Path takes one of its slashes away.")
    return path


def local_path(given: str | Path, what: str) -> Path:
    """Return a path; raise if it is a URL, where ``what`` must be a local file or directory."""
    place = place_of(given)
    if isinstance(place, Remote):
        raise InputError(f"{place}: {what} is on a local disk, not at a URL.")
    return place


def identity(place: Place) -> tuple[str, str]:
    """Return what two names of one place have in common, links followed."""
    if isinstance(place, Remote):
        return place.identity
    return "", os.path.realpath(place)  # of a loop of links too


def children(directory: Place) -> list[Place]:
    """Return the files and directories in one, in order of their names."""
    return sorted([*directory.iterdir()], key=lambda place: place.name)


def copy_of(place: Place) -> Copy:
    """Return a local copy of a file that lasts as long as it is held; a local file is its own."""
    return copies().copy(place) if isinstance(place, Remote) else Copy(place)


def copies_of(places: Iterable[Place]) -> list[Copy]:
    """Return a copy of each file; some are made at a time."""
    given = list(places)
    if not any(isinstance(place, Remote) for place in given):
        return [copy_of(place) for place in given]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return list(pool.map(copy_of, given))


@contextmanager
def local_file(place: Place) -> Iterator[Path]:
    """Yield a local file with what is at a place, there for as long as it is read."""
    copy = copy_of(place)
    yield copy.path


@contextmanager
def written_path(place: Place, *, cleaned: bool = True) -> Iterator[Path]:
    """Yield an empty local file that becomes the one at the place, unless an error came.

    See :func:`fedipw.storage.atomic.written_path` for ``cleaned``.
    """
    if isinstance(place, Remote):
        with place.written() as temporary:
            yield temporary
    else:
        with atomic.written_path(place, cleaned=cleaned) as temporary:
            yield temporary


def write_texts(texts: Mapping[Place, str]) -> None:
    """Write text files; local ones get their names after those at URLs are there."""
    local = {place: text for place, text in texts.items() if isinstance(place, Path)}
    with ExitStack() as stack:
        for place, text in texts.items():
            if isinstance(place, Remote):
                file = stack.enter_context(place.written())
                file.write_text(text, encoding="utf-8")
    atomic.write_texts(local)


def check_place(place: Place) -> None:
    """Raise if a file cannot be written to a place, before any work is done."""
    if isinstance(place, Remote):
        place.check_writable()
    else:
        atomic.check_place(place)
