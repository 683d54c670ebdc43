"""A snapshot of a live server's learner beside its ledger, so that a restart reads few rounds.

A snapshot is two files in ``learner/`` of the ledger's directory. ``rows-*.bin`` holds the coded
rows of each closed round, one after the other; new rounds are added at its end. ``learner.npz`` is
the rest, small, written anew after each addition, with the length and the digest of the rows that
belong to it. What a kill leaves beyond that length is not looked at. Where the learner forgets old
rounds (a rolling window, a decay), the rows begin anew in another file once more than half of them
are forgotten, so that the snapshot does not grow with the ledger.

A snapshot is used only if its fingerprint is that of the server that asks: the same designs,
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

import numpy as np

from fedipw.errors import InputError
from fedipw.selection.rowstore import BlockStore
from fedipw.storage.atomic import unwritable
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from fedipw.tables.columns import ID
from fedipw.tables.design import Design, Missing

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.selection.participation import Participation
    from fedipw.selection.steps import Step
    from fedipw.tables.ledger import Ledger
    from fedipw.tables.population import Members
    from fedipw.weighting.replay import Plan
    from fedipw.weighting.weigher import Weigher

EVERY: Final = 20  # rounds between snapshots at most
_FOLDER, _HEAD = "learner", "learner.npz"
_PACKAGES = ("fedipw", "numpy", "polars", "scikit-learn")


class SnapshotUnusedError(Exception):
    """A snapshot that is there and cannot be used, with the reason."""


@final
class Snapshot:
    """The snapshot of one ledger under one plan.

    Parameters
    ----------
    ledger, stage, plan
        Those of the server.
    """

    def __init__(self, ledger: Ledger, stage: EnrollmentStage, plan: Plan) -> None:
        self._ledger, self._stage, self._plan = ledger, stage, plan
        self.directory = ledger.folder / _FOLDER
        self._settings = _settings(stage, plan)
        self._rows: Path | None = None  # the file that this one adds to
        self._length, self._saved = 0, 0  # of that file, and rounds up to its end
        self._first, self._base = 0, dict[str, Any]()  # rounds before its first, and their sums
        self._stamped = 0  # rounds whose files are in the digest of files
        self._digest, self._files = hashlib.sha256(), hashlib.sha256()

    @property
    def rounds(self) -> int:
        """Number of rounds up to the last one in it."""
        return self._saved

    def designs(self) -> dict[str, Design] | None:
        """Return the designs of the steps it was made with, none if there is no snapshot."""
        head = self._head()
        return None if head is None else _designs(head)

    def restore(self, weigher: Weigher, learner: Participation) -> tuple[int, dict[str, int]]:
        """Put the state back into a new learner; return its rounds and the notes so far."""
        head = self._head()
        if head is None:
            raise SnapshotUnusedError("there is none")
        rounds = int(head["rounds"])
        length = int(head["length"])
        try:  # all lies at multiples of 8 bytes
            words = np.fromfile(self.directory / str(head["rows"]), count=length // 8)
        except OSError as error:
            raise SnapshotUnusedError(f"its rows cannot be read: {error.strerror}") from error
        if words.nbytes != length:
            raise SnapshotUnusedError("its rows are cut off")
        digest = hashlib.sha256(words.data)
        if digest.hexdigest() != head["digest"]:
            raise SnapshotUnusedError("its rows are damaged")
        files = hashlib.sha256(b"".join(_stamp(self._ledger, k) for k in range(1, rounds + 1)))
        if files.hexdigest() != head["files"]:
            raise SnapshotUnusedError("the ledger's files have changed since")
        state = dict(head["learner"])
        widths = (
            {} if learner.models else {s.step.name: len(s.step.design.terms) for s in learner.steps}
        )
        first = int(head["first"])
        state["steps"] = _steps(state["steps"], words, range(first, rounds), widths, head["base"])
        learner.restore(state)
        weigher.restore_learnt(head["learnt"])
        self._stage.restore(head["stage"])
        self._rows, self._length = self.directory / str(head["rows"]), length
        self._saved, self._digest, self._files = rounds, digest, files
        self._first, self._base, self._stamped = first, head["base"], rounds
        return rounds, {str(note): int(count) for note, count in head["notes"].items()}

    def save(self, weigher: Weigher, learner: Participation, notes: Mapping[str, int]) -> None:
        """Add the rounds closed since the last time, then write the rest anew."""
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
            "digest": self._digest.hexdigest(), "files": self._files.hexdigest(),
            "learner": learner.head(), "learnt": weigher.learnt_state(),
            "stage": self._stage.state(), "notes": dict(notes),
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
        self._digest = hashlib.sha256()
        self._base = {
            step.step.name: {
                "totals": list(step.totals_before(first)), "sums": step.sums_before(first)
            }
            for step in learner.steps
        }  # fmt: skip
        return self.directory / f"rows-{token_hex(4)}.bin"

    def _add(self, learner: Participation, rows: Path) -> None:
        """Write the rows of the new rounds at the end of the file, and bring them onto the disk."""
        stamps = b"".join(_stamp(self._ledger, k + 1) for k in range(self._stamped, learner.rounds))
        descriptor = os.open(rows, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.truncate(self._length)
            file.seek(self._length)
            for k in range(self._saved, learner.rounds):
                for part in _record(learner, k):
                    file.write(part)
                    self._digest.update(part)
                    self._length += len(part)
            file.flush()
            os.fsync(file.fileno())
        self._files.update(stamps)
        self._saved = self._stamped = learner.rounds

    def _head(self) -> dict[str, Any] | None:
        try:
            return load_checkpoint(self.directory, self._settings, name=_HEAD, remedy="")
        except InputError as error:
            why = "it is damaged" if "damaged" in str(error) else "it is of another server or plan"
            raise SnapshotUnusedError(why) from error


def can_be_saved(steps: tuple[Step, ...]) -> bool:
    """Return whether a restart would bind the same designs: medians move with every round."""
    return not any(s.design.missing is Missing.INDICATOR and s.design.fills for s in steps)


def _settings(stage: EnrollmentStage, plan: Plan) -> str:
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
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


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


def _stamp(ledger: Ledger, index: int) -> bytes:
    """Return number, size and time of a round's file."""
    try:
        found = os.stat(f"{ledger.directory}/round-{index:06d}.parquet")  # a Path takes longer
    except OSError as error:
        raise SnapshotUnusedError(f"round {index} cannot be seen") from error
    return f"{index} {found.st_size} {found.st_mtime_ns}\n".encode()


def _record(learner: Participation, k: int) -> Iterator[bytes]:
    """Yield what is kept of a round: for each step sums, columns, labels and clients."""
    for step in () if learner.models else learner.steps:
        assert isinstance(step.store, BlockStore)
        columns, labels, clients = step.store.round(k)
        yield np.array([len(clients)], dtype=np.int64).tobytes()
        yield step.sums_before(k + 1).tobytes()
        yield np.ascontiguousarray(columns).tobytes()
        yield _padded(labels.astype(np.int8))
        yield _padded(clients.astype(np.int32))


def _steps(
    heads: Mapping[str, Any],
    words: FloatArray,
    rounds: range,
    widths: Mapping[str, int],
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the states of the steps, with their rows as views of what the file held.

    ``rounds``, counted from 0, are those in the file; ``base`` has the sums of those before.
    """
    counts, small, places = words.view(np.int64), words.view(np.int8), words.view(np.int32)
    stores: dict[str, dict[str, Any]] = {name: {} for name in widths}
    totals: dict[str, list[tuple[int, int]]] = {
        name: [(int(base[name]["totals"][0]), int(base[name]["totals"][1]))] for name in widths
    }
    sums = {name: [np.array(base[name]["sums"])] for name in widths}
    at = 0
    for k in map(str, rounds):
        for name, width in widths.items():
            rows = counts.item(at)
            columns = at + 1 + width
            labels = columns + width * rows
            clients = labels + -(-rows // 8)
            sums[name].append(words[at + 1 : columns])
            mine = small[8 * labels : 8 * labels + rows]
            stores[name][k] = {
                "columns": words[columns:labels].reshape(width, rows),
                "labels": mine,
                "clients": places[2 * clients : 2 * clients + rows],
            }
            count, done = totals[name][-1]
            totals[name].append((count + rows, done + int(np.count_nonzero(mine))))
            at = clients + -(-rows // 2)
    if at != len(words):
        raise SnapshotUnusedError("its rows are of another length")
    return {
        name: {
            **head,
            "store": {"rounds": stores.get(name, {}), "frame": head["frame"], "gone": rounds.start},
            "gone": rounds.start,
            "totals": totals.get(name, [(0, 0)]),
            # with saved models no rows are kept
            "sums": sums.get(name) or [np.array(head["fitted_sums"]["columns"])],
        }
        for name, head in heads.items()
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
