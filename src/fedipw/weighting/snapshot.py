"""A snapshot of a learner, so that a restart, or a longer ledger, costs few rounds.

A snapshot is two files: in ``learner/`` of the ledger's directory for a live server, in a directory
of its own for a replay (:mod:`fedipw.weighting.resume`). ``rows-*.bin`` holds the coded
rows of each closed round, one after the other; new rounds are added at its end. ``learner.npz`` is
the rest, small, written anew after each addition, with length and checksum of the rows that
belong to it. What a kill leaves beyond that length is not looked at. Where the learner forgets old
rounds (a rolling window, a decay), the rows begin anew in another file once more than half of them
are forgotten, so that the snapshot does not grow with the ledger. Rows beyond those that memory
has room for are not loaded: fits read them from the file.

A snapshot is used only if its fingerprint is that of whoever asks: the same designs,
formulas, settings, method, clients and versions, and the same files of rounds, by size and time.
Whatever else is found is left aside, and the ledger is read instead: it alone says what happened.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, final
from zlib import crc32

import numpy as np

from fedipw.errors import InputError
from fedipw.selection.rowstore import BlockStore, block_edges
from fedipw.storage.atomic import unwritable
from fedipw.storage.checkpoint import checkpoint_fingerprint, load_checkpoint, save_checkpoint
from fedipw.storage.scratch import Room, Scratch, Stored
from fedipw.tables.columns import ID
from fedipw.tables.design import Design, Missing

if TYPE_CHECKING:
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.selection.participation import Participation
    from fedipw.selection.steps import Step
    from fedipw.tables.ledger import Ledger
    from fedipw.tables.population import Members
    from fedipw.weighting.replay import Plan
    from fedipw.weighting.weigher import Weigher

EVERY: Final = 20  # rounds between snapshots at most
_FOLDER, _HEAD = "learner", "learner.npz"
_LAYOUT = 2  # of the file of rows
_FLOATS, _LABELS, _CODES = np.dtype(np.float64), np.dtype(np.int8), np.dtype(np.int32)
_PACKAGES = ("fedipw", "numpy", "polars", "scikit-learn")


class SnapshotUnusedError(Exception):
    """A snapshot that is there and cannot be used, with the reason."""


@final
class Snapshot:
    """The snapshot of one ledger under one plan.

    Parameters
    ----------
    ledger, stage, plan
        Those of the server or the replay.
    directory
        Where it lies; ``learner/`` of the ledger's directory by default.
    basis
        What else the state depends on, as plain values.
    """

    def __init__(
        self,
        ledger: Ledger,
        stage: EnrollmentStage,
        plan: Plan,
        *,
        directory: Path | None = None,
        basis: Mapping[str, Any] | None = None,
    ) -> None:
        self._ledger, self._stage, self._plan = ledger, stage, plan
        self.directory = ledger.folder / _FOLDER if directory is None else directory
        self._settings = _settings(stage, plan, basis or {})
        self._loaded: dict[str, Any] | None = None  # the head, once it is read
        self._rows: Path | None = None  # the file that this one adds to
        self._length, self._saved = 0, 0  # of that file, and rounds up to its end
        self._first, self._base = 0, dict[str, Any]()  # rounds before its first, and their sums
        self._stamped = 0  # rounds whose files are in the digest of files
        self._checksum, self._files = 0, hashlib.sha256()

    @property
    def rounds(self) -> int:
        """Number of rounds up to the last one in it."""
        return self._saved

    def designs(self) -> dict[str, Design] | None:
        """Return the designs of the steps it was made with, none if there is no snapshot."""
        head = self._head()
        return None if head is None else _designs(head)

    def more(self) -> dict[str, Any]:
        """Return what was saved beside the learner; empty if there is no snapshot."""
        head = self._head()
        return {} if head is None else head["more"]

    def checked(self) -> int:
        """Return the rounds in it, 0 without a snapshot; raise if their files have changed."""
        head = self._head()
        if head is None:
            return 0
        self._stamps(head)
        return int(head["rounds"])

    def _stamps(self, head: Mapping[str, Any]) -> Any:
        """Return the digest of the files of the rounds, or raise if it is another now."""
        closed = range(int(head["rounds"]))
        files = hashlib.sha256(b"".join(_stamp(self._ledger, k) for k in closed))
        if files.hexdigest() != head["files"]:
            raise SnapshotUnusedError("the ledger's files have changed since")
        return files

    def restore(self, weigher: Weigher, learner: Participation) -> tuple[int, dict[str, int]]:
        """Put the state back into a new learner; return its rounds and the notes so far."""
        head = self._head()
        if head is None:
            raise SnapshotUnusedError("there is none")
        rounds, first, length = int(head["rounds"]), int(head["first"]), int(head["length"])
        files = self._stamps(head)
        state = dict(head["learner"])
        widths = (
            {} if learner.models else {s.step.name: len(s.step.design.terms) for s in learner.steps}
        )
        try:
            path = self.directory / str(head["rows"])
            # a file that was not touched since is not read through
            known = int(head["checksum"]) if _file_stamp(path) == head["stamp"] else None
            rows = _SavedRows(
                path, range(first, rounds), widths, head["base"], length=length, known=known
            )
            if rows.checksum != head["checksum"]:
                raise SnapshotUnusedError("its rows are damaged")
            state["steps"] = {name: rows.state(name, step) for name, step in state["steps"].items()}
            learner.restore(state)
        except OSError as error:
            raise SnapshotUnusedError(f"its rows cannot be read: {error.strerror}") from error
        weigher.restore_learnt(head["learnt"])
        self._stage.restore(head["stage"])
        self._rows, self._length = self.directory / str(head["rows"]), length
        self._saved, self._checksum, self._files = rounds, rows.checksum, files
        self._first, self._base, self._stamped = first, head["base"], rounds
        return rounds, {str(note): int(count) for note, count in head["notes"].items()}

    def save(
        self,
        weigher: Weigher,
        learner: Participation,
        notes: Mapping[str, int],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the rounds closed since the last time, then write the rest anew, ``more`` with it."""
        self._loaded = None
        try:
            self.directory.mkdir(exist_ok=True)
            gone = learner.forgotten
            if self._rows is None or 2 * gone > self._first + self._saved:
                self._rows = self._begin(learner, gone)
            self._add(learner, self._rows)
        except OSError as error:
            self._rows = None  # what of it was written is not known
            raise unwritable(self.directory, error) from error
        head = {
            "rounds": learner.rounds, "rows": self._rows.name, "length": self._length,
            "first": self._first, "base": self._base,
            "checksum": self._checksum, "files": self._files.hexdigest(),
            "stamp": _file_stamp(self._rows),
            "learner": learner.head(), "learnt": weigher.learnt_state(),
            "stage": self._stage.state(), "notes": dict(notes), "more": dict(more or {}),
            "designs": json.dumps({s.step.name: s.step.design.to_json() for s in learner.steps}),
        }  # fmt: skip
        save_checkpoint(self.directory, head, self._settings, name=_HEAD)
        for path in self.directory.glob("rows-*.bin"):
            if path != self._rows:
                with suppress(OSError):
                    path.unlink()

    def _begin(self, learner: Participation, first: int) -> Path:
        """Begin a new file of rows with those of round ``first``, counted from 0; return it."""
        self._length, self._first, self._saved = 0, first, first
        self._checksum = 0
        self._base = {
            step.step.name: {
                "totals": list(step.totals_before(first)), "sums": step.sums_before(first)
            }
            for step in learner.steps
        }  # fmt: skip
        return self.directory / f"rows-{token_hex(4)}.bin"

    def _add(self, learner: Participation, rows: Path) -> None:
        """Write the rows of the new rounds at the end of the file, and bring them onto the disk."""
        stamps = b"".join(_stamp(self._ledger, k) for k in range(self._stamped, learner.rounds))
        descriptor = os.open(rows, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.truncate(self._length)
            file.seek(self._length)
            for k in range(self._saved, learner.rounds):
                for part in _record(learner, k):
                    file.write(part)
                    self._checksum = crc32(part, self._checksum)
                    self._length += len(part)
            file.flush()
            os.fsync(file.fileno())
        self._files.update(stamps)
        self._saved = self._stamped = learner.rounds

    def _head(self) -> dict[str, Any] | None:
        try:
            if self._loaded is None:
                self._loaded = load_checkpoint(
                    self.directory, self._settings, name=_HEAD, remedy=""
                )
            return self._loaded
        except InputError as error:
            raise SnapshotUnusedError(self._why(str(error))) from error

    def _why(self, error: str) -> str:
        """Return why the head cannot be used: damage, or what differs from what it was made of."""
        if "damaged" in error:
            return "it is damaged"
        why, written = "it was saved under another plan", checkpoint_fingerprint(self._path)
        with suppress(ValueError, TypeError, AttributeError):
            then, now = json.loads(written or ""), json.loads(self._settings)
            other = [name for name in now if then.get(name) != now[name]]
            why += f" (changed: {', '.join(other)})" if other else ""
        return why

    @property
    def _path(self) -> Path:
        return self.directory / _HEAD


def can_be_saved(steps: tuple[Step, ...]) -> bool:
    """Return whether a restart would bind the same designs: medians move with every round."""
    return not any(s.design.missing is Missing.INDICATOR and s.design.fills for s in steps)


def _settings(stage: EnrollmentStage, plan: Plan, basis: Mapping[str, Any]) -> str:
    """Return the fingerprint of what a learner's state depends on besides the rounds."""
    models = {} if plan.models is None else {n: m.to_json() for n, m in plan.models.items()}
    told = {
        "method": repr(plan.method),
        "formulas": repr(plan.formulas),
        "settings": repr(plan.settings),
        "models": models,
        "enrollment": [type(stage).__name__, stage.formula, str(stage.size)],
        "members": _members(stage.members),
        "versions": {name: version(name) for name in _PACKAGES},
        "layout": _LAYOUT,
        **basis,
    }
    return json.dumps({name: _short_digest(part) for name, part in told.items()})


def _short_digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _members(members: Members) -> str:
    """Return a digest of the clients and what is known of them."""
    found = hashlib.sha256(
        json.dumps({n: str(t) for n, t in members.frame.schema.items()}).encode()
    )
    found.update(members.frame.hash_rows(seed=1).to_numpy().tobytes())
    found.update(members.frame[ID].hash(seed=2).to_numpy().tobytes())
    if members.former is not None:
        found.update(members.former.tobytes())
    return found.hexdigest()


def _stamp(ledger: Ledger, k: int) -> bytes:
    """Return number, size and time of the file of a ledger's k-th round, counted from 0."""
    index = ledger.since + k
    try:
        found = os.stat(f"{ledger.directory}/round-{index:06d}.parquet")  # a Path takes longer
    except OSError as error:
        raise SnapshotUnusedError(f"round {index} cannot be seen") from error
    return f"{index} {found.st_size} {found.st_mtime_ns}\n".encode()


def _file_stamp(path: Path) -> list[int]:
    """Return what changes when a file is written to."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def _record(learner: Participation, k: int) -> Iterator[bytes]:
    """Yield what is kept of a round: each step's rows, how many passed, sums, and its blocks."""
    for step in () if learner.models else learner.steps:
        assert isinstance(step.store, BlockStore)
        columns, labels, clients = step.store.round(k)
        yield np.array([len(clients), int(labels.sum())], dtype=np.int64).tobytes()
        yield step.sums_before(k + 1).tobytes()
        for first, last in block_edges(len(columns), len(clients)):
            yield np.ascontiguousarray(columns[:, first:last]).tobytes()
            yield _padded(labels[first:last].astype(np.int8))
            yield _padded(clients[first:last].astype(np.int32))


@final
class _SavedRows:
    """The rows in a file of rounds, read once: they stay where they are.

    Parameters
    ----------
    path
        The file.
    rounds
        Those in it, counted from 0.
    widths
        Number of columns of each step.
    base
        Sums of the rounds before the first, by step.
    length
        Bytes of the file that belong to the snapshot.
    known
        The checksum, where the file was not touched: only the sums of its rounds are read then.
    """

    def __init__(
        self,
        path: Path,
        rounds: range,
        widths: Mapping[str, int],
        base: Mapping[str, Any],
        *,
        length: int,
        known: int | None,
    ) -> None:
        self._start, self.checksum, self._at, self._length = rounds.start, known or 0, 0, length
        self._skips = known is not None
        self._scratch, self._room = Scratch.over(path), Room()
        self._rounds: dict[str, dict[str, Any]] = {name: {} for name in widths}
        self._totals = {
            name: [(int(base[name]["totals"][0]), int(base[name]["totals"][1]))] for name in widths
        }
        self._sums = {name: [np.array(base[name]["sums"])] for name in widths}
        with path.open("rb") as self._file:
            for k in rounds:
                for name, width in widths.items():
                    self._rounds[name][str(k)] = self._record(name, width)
        if self._at != length:
            raise SnapshotUnusedError("its rows are of another length")

    def _record(self, name: str, width: int) -> dict[str, Any]:
        """Return where the next record has its blocks; take its sums and how many passed."""
        rows, passed = self._next(16).view(np.int64).tolist()
        if not 0 <= passed <= rows <= self._length:
            raise SnapshotUnusedError("its rows are damaged")
        self._sums[name].append(self._next(8 * width).view(np.float64).copy())
        places = []
        for first, last in block_edges(width, rows):
            size = last - first
            arrays = (
                (_FLOATS, (width, size)), (_LABELS, (size,)), (_FLOATS, (0,)), (_CODES, (size,))
            )  # fmt: skip
            places.append(Stored(self._at, arrays))
            self._pass(8 * width * size)
            self._pass(size + -size % 8)
            self._pass(4 * (size + size % 2))
        count, done = self._totals[name][-1]
        self._totals[name].append((count + rows, done + passed))
        return {"file": self._scratch, "places": places}

    def _next(self, size: int) -> Any:
        """Return the next bytes of the file, until more are asked for."""
        if size > self._length - self._at:
            raise SnapshotUnusedError("its rows are damaged")
        found = self._room.of(size)
        if self._file.readinto(found.data) != size:
            raise SnapshotUnusedError("its rows are cut off")
        if not self._skips:
            self.checksum = crc32(found.data, self.checksum)
        self._at += size
        return found

    def _pass(self, size: int) -> None:
        """Go over the next bytes of the file, which the checksum counts."""
        if not self._skips:
            self._next(size)
            return
        if size > self._length - self._at:
            raise SnapshotUnusedError("its rows are damaged")
        self._file.seek(size, os.SEEK_CUR)
        self._at += size

    def state(self, name: str, head: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a step, its rows where they are."""
        rounds = self._rounds.get(name, {})
        return {
            **head,
            "store": {"rounds": rounds, "frame": head["frame"], "gone": self._start},
            "gone": self._start,
            "totals": self._totals.get(name, [(0, 0)]),
            # with saved models no rows are kept
            "sums": self._sums.get(name) or [np.array(head["fitted_sums"]["columns"])],
        }


def _padded(array: np.ndarray) -> bytes:
    """Return an array's bytes, filled up to a multiple of 8."""
    data = array.tobytes()
    return data + bytes(-len(data) % 8)


def _designs(head: Mapping[str, Any]) -> dict[str, Design]:
    try:
        saved = json.loads(head["designs"])
        return {name: Design.from_json(design) for name, design in saved.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotUnusedError("its designs are damaged") from error
