"""Files by URL, in an object store or wherever fsspec reaches: the only place that knows fsspec.

Everything else reads and writes local files. A file of a URL is copied to the temporary directory
before it is read, and copied to its URL once it is whole. What a copy is of is asked of the store
(its ETag, or its size and time), so that a file is copied again only if it has changed.
"""

from __future__ import annotations

import atexit
import errno
import re
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, final

from fedipw.errors import FedIPWError, InputError, UnwritableError
from fedipw.storage.atomic import scratch_directory

KEPT: Final = 4 * 2**30  # bytes of copies that are kept while nobody reads them
_PASSWORD = re.compile(r"//([^/:@]*):[^/@]*@")
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "version_id")  # first one that a store has
_TIMES = ("mtime", "modified", "last_modified", "LastModified", "updated", "created")
# stores that show all of a file or nothing; elsewhere it is written under another name
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "memory"}


@final
@dataclass(frozen=True, repr=False)
class Remote:
    """A file or directory at a URL, with those methods of a path that tables and ledgers use.

    Credentials are the store's business: fsspec and its packages take them from the environment.
    ``str`` leaves out passwords and signatures.

    Examples
    --------
    >>> people = Remote("s3://bucket/people")
    >>> str(people / "part-000000.parquet"), people.name, people.suffix
    ('s3://bucket/people/part-000000.parquet', 'people', '')
    >>> print(Remote("ftp://me:secret@host/people.csv?signature=ab"))
    ftp://me:***@host/people.csv
    """

    url: str
    # of the file when it was listed, so that it is not asked for again
    version: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return _PASSWORD.sub(r"//\1:***@", self.url.partition("?")[0])

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"

    def __truediv__(self, name: str) -> Remote:
        inner, chain, outer = self.url.partition("::")
        if "://" in inner:  # of a chain such as zip://folder::s3://bucket/file.zip
            return Remote(f"{inner.rstrip('/')}/{name}{chain}{outer}")
        return Remote(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        inner = next(part for part in self.url.split("::") if "://" in part)
        return inner.partition("://")[2].partition("?")[0].rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The name from its last point on."""
        return Path(self.name).suffix

    @property
    def identity(self) -> tuple[str, str]:
        """What kind of store it is in and its path there, by which places are compared."""
        files, path = self._opened()
        return type(files).__name__, path.rstrip("/")

    def is_dir(self) -> bool:
        """Return whether it is a directory: something has a name that begins with it."""
        return self._info().get("type") == "directory"

    def is_file(self) -> bool:
        """Return whether there is such a file."""
        return self._info().get("type") == "file"

    def exists(self) -> bool:
        """Return whether there is a file or a directory."""
        return bool(self._info())

    def iterdir(self) -> Iterator[Remote]:
        """Yield the files and directories in it, with the versions that they have now."""
        files, path = self._opened()
        with self._asked():
            files.invalidate_cache()
            found = files.ls(path, detail=True)
        for info in found:
            full = str(info["name"]).rstrip("/")
            if full != path.rstrip("/"):  # where a store keeps an empty file for the directory
                child = self / full.rpartition("/")[2]
                yield Remote(child.url, _version(info))

    def check_writable(self) -> None:
        """Raise if the store, or the bucket, is not there, before any work is done."""
        files, path = self._opened()
        if files.root_marker:
            return
        bucket = path.partition("/")[0]
        with self._asked(UnwritableError):
            there = files.exists(bucket)
        if not there:
            raise InputError(f"{self} cannot be written: {bucket!r} is not there, or not yours.")

    def put(self, file: Path) -> None:
        """Copy a local file there; a reader sees all of it or nothing."""
        files, path = self._opened()
        with self._asked(UnwritableError):
            if not _WHOLE.isdisjoint(_protocols(files)):
                files.put_file(str(file), path)
                return
            folder, _, name = path.rpartition("/")
            beside = f"{folder}/.{name}.{token_hex(8)}.partial"
            files.makedirs(folder, exist_ok=True)
            try:
                files.put_file(str(file), beside)
                files.mv(beside, path)
            except BaseException:
                with suppress(Exception):
                    files.rm_file(beside)
                raise

    @contextmanager
    def written(self) -> Iterator[Path]:
        """Yield an empty local file that is put there at the end, unless an error came."""
        made = copies().new(self.name)
        try:
            yield made
            self.put(made)
        finally:
            made.unlink(missing_ok=True)

    def mark(self) -> None:
        """Make an empty file there."""
        with self.written():
            pass

    def copied_to(self, other: Remote) -> None:
        """Copy a file within its store, where nothing travels."""
        files, path = self._opened()
        with other._asked(UnwritableError):
            files.copy(path, other._opened()[1])

    def remove(self) -> None:
        """Remove a file, or a directory with all that is in it, if it is there."""
        files, path = self._opened()
        with self._asked(UnwritableError):
            files.invalidate_cache()
            if files.exists(path):
                files.rm(path, recursive=True)

    def fetched_to(self, file: Path) -> None:
        """Copy the file to a local one."""
        files, path = self._opened()
        try:
            with self._asked():
                files.get_file(path, str(file))
        except InputError as error:
            if getattr(error.__cause__, "errno", None) != errno.ENOSPC:
                raise
            raise InputError(
                f"{self} cannot be copied to {file.parent}: no space is left there. Free some, or "
                "set TMPDIR to a larger disk."
            ) from error

    def current(self) -> Remote:
        """Return the file with the version that it has now; raise if there is none."""
        info = self._info()
        if info.get("type") != "file":
            raise InputError(f"No file {self}.")
        return Remote(self.url, _version(info))

    def _info(self) -> dict[str, Any]:
        """Return what the store tells of it, nothing if it is not there."""
        files, path = self._opened()
        with self._asked():
            files.invalidate_cache()
            try:
                return dict(files.info(path))
            except (FileNotFoundError, NotADirectoryError):
                return {}

    def _opened(self) -> tuple[Any, str]:
        """Return the file system and the path in it."""
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415
        except ImportError:
            raise InputError(
                f"{self}: URLs need the extra `remote`: pip install 'fedipw[remote]'."
            ) from None
        with self._asked():
            files, path = url_to_fs(self.url)
            return files, str(path)

    @contextmanager
    def _asked(self, kind: type[InputError] = InputError) -> Iterator[None]:
        """Turn whatever goes wrong with a store into an error that names the URL."""
        try:
            yield
        except FedIPWError:
            raise
        except Exception as error:  # each store has errors of its own
            done = "written" if kind is UnwritableError else "read"
            said = str(error).split("\n", maxsplit=1)[0].replace(self.url, str(self))
            if not isinstance(error, OSError) or not said:
                said = f"{type(error).__name__}: {said}"
            raise kind(f"{self} cannot be {done}: {said.removesuffix('.')}.") from error


@final
class Copy:
    """A local copy of a remote file, there for as long as this object is."""

    def __init__(self, path: Path) -> None:
        self.path = path


@dataclass
class _Kept:
    path: Path
    url: str
    users: int = 0
    size: int = -1  # bytes, once it is there
    lock: threading.Lock = field(default_factory=threading.Lock)


@final
class Copies:
    """Copies of remote files in a directory of this process, which goes with it.

    A copy stays for as long as somebody reads it. Afterwards it is kept for a next time if no more
    than :data:`KEPT` bytes are, the earliest ones: whoever reads all files of a directory again and
    again finds as many of them as there is room for.
    """

    def __init__(self, directory: Path, kept: int = KEPT) -> None:
        self._directory, self._most = directory, kept
        self._files: dict[tuple[str, str | None], _Kept] = {}
        self._lock = threading.Lock()

    def new(self, name: str) -> Path:
        """Return a new empty file, whose name ends like the one given."""
        path = self._directory / f"{token_hex(8)}-{name[-100:]}"
        path.touch(exist_ok=False)
        return path

    def copy(self, remote: Remote) -> Copy:
        """Return a copy of the file as it is now, or as it was when it was listed."""
        remote = remote if remote.version is not None else remote.current()
        key = (remote.url, remote.version)
        with self._lock:
            if key not in self._files:
                self._files[key] = _Kept(self.new(remote.name), remote.url)
            kept = self._files[key]
            kept.users += 1
        made = Copy(kept.path)
        weakref.finalize(made, self._released, key)
        with kept.lock:
            if kept.size < 0:
                remote.fetched_to(kept.path)
                kept.size = kept.path.stat().st_size
        return made

    def _released(self, key: tuple[str, str | None]) -> None:
        with self._lock:
            kept = self._files[key]
            kept.users -= 1
            if kept.users:
                return
            total = sum(one.size for one in self._files.values())
            # a file that has changed since, or did not come, is of no use any more
            stale = any(url == kept.url and key[1] != at for url, at in self._files)
            if stale or kept.size < 0 or total > self._most:
                del self._files[key]
                kept.path.unlink(missing_ok=True)


@cache
def copies() -> Copies:
    """Return the copies of this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    place = Path(tempfile.gettempdir()) / "fedipw-copies"
    return Copies(stack.enter_context(scratch_directory(place)))


def _version(info: dict[str, Any]) -> str:
    """Return what changes when a file does, of what a store tells of it."""
    known = next((info[name] for name in _VERSIONS if info.get(name)), None)
    if known is None:
        time: Any = next((info[name] for name in _TIMES if info.get(name)), None)
        known = time.timestamp() if hasattr(time, "timestamp") else time
    return f"{known} {info.get('size')}"


def _protocols(files: Any) -> set[str]:
    given = files.protocol
    return {given} if isinstance(given, str) else set(given)
