"""Go on where an earlier replay of a ledger ended: only rounds that are new are read and weighed.

A directory holds what a replay has learnt: the snapshot of its learner
(:mod:`fedipw.weighting.snapshot`), what its observers have counted, and the tables it made, one
file a round in ``tables-*/``. A later replay of the same population, under the same options, of a
ledger whose first rounds are the same files, starts after those rounds and ends in the same bytes
as one that reads all of them. It is saved once a minute and at the end, so that a long replay that
was killed goes on too.

Whatever differs, be it an option, the population, a round, a level that occurs for the first time
or damage, all rounds are read, with a warning that says why: the ledger alone says what happened.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, final

import polars as pl

from fedipw.errors import FedIPWWarning, InputError
from fedipw.numerics.threads import without_collection
from fedipw.selection.participation import Window
from fedipw.selection.steps import Step, participation_steps
from fedipw.storage.atomic import unwritable
from fedipw.storage.lock import locked
from fedipw.tables.columns import ROUND
from fedipw.tables.design import Missing
from fedipw.tables.ledger import Ledger
from fedipw.weighting.snapshot import Snapshot, SnapshotUnusedError

if TYPE_CHECKING:
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.selection.participation import Participation
    from fedipw.tables.population import Members
    from fedipw.weighting.replay import Plan, RoundRun

SECONDS: Final = 60.0  # between two times that a replay is saved
# what values of another kind than were saved can raise
_TOGETHER = 250_000  # rows of tables that are written at once
_STRANGE = (ValueError, KeyError, TypeError, IndexError, AttributeError)


@contextmanager
def saved_run(directory: str | Path, job: str, *, seconds: float = SECONDS) -> Iterator[SavedRun]:
    """Hold the part of a directory that belongs to a job, such as ``weights``, for this block.

    Examples
    --------
    >>> import tempfile
    >>> with saved_run(tempfile.mkdtemp(), "weights") as saved:
    ...     saved.directory.name
    'weights'
    """
    place = Path(directory) / job
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{place} cannot be made: {error.strerror}.") from error
    with locked(place, f"runs {job} from it"):
        yield SavedRun(place, seconds=seconds)


@final
class SavedRun:
    """What one replay has learnt, in a directory that nobody else writes to meanwhile.

    Parameters
    ----------
    directory
        Where it lies (:func:`saved_run`).
    seconds
        Time between two saves on the way.
    """

    def __init__(self, directory: Path, *, seconds: float = SECONDS) -> None:
        self.directory, self._seconds = directory, seconds
        self._last = time.monotonic()
        self._job: tuple[EnrollmentStage, Ledger, Plan] | None = None
        self._snapshot: Snapshot | None = None
        self._folder = directory / f"tables-{token_hex(4)}"
        self._digests: dict[str, str] = {}  # of the tables, by file
        self._waiting: list[pl.DataFrame] = []  # tables that are in no file yet

    def bind(self, stage: EnrollmentStage, ledger: Ledger, plan: Plan) -> None:
        """Take what is to be replayed; raise if every round would be weighed anew anyway."""
        if plan.settings.window is Window.POOLED and plan.models is None:
            raise InputError(
                "The pooled fit is made on all rounds, so that every new round changes every "
                "weight: there is nothing to go on from. Leave --state (state=) out, or use the "
                "fit past or same-round."
            )
        self._job = stage, ledger, plan
        self._snapshot = self._fresh()

    def _fresh(self) -> Snapshot:
        assert self._job is not None
        stage, ledger, plan = self._job
        basis = {
            "population": stage.basis(),
            "examples": plan.examples,
            "ledger": [ledger.since, ledger.id],
        }
        return Snapshot(ledger, stage, plan, directory=self.directory, basis=basis)

    def steps(
        self, clients: Members, bound: Callable[[], tuple[Step, ...]]
    ) -> tuple[Step, ...] | None:
        """Return the steps that were saved, none if there are none or new rounds change them.

        Levels of categories are those of all rounds. Those of new rounds alone are looked up,
        unless a median or a share of rows, which move with every round, is part of a design.
        """
        assert self._job is not None
        assert self._snapshot is not None
        _, ledger, plan = self._job
        try:
            done = self._snapshot.checked()
            if not done:
                return None
            designs = self._snapshot.designs() or {}
            saved = tuple(
                Step(name=name, design=designs[name], label=label, among=among)
                for name, label, among in self._snapshot.more()["steps"]
            )
            whole = plan.formulas.missing is Missing.INDICATOR or plan.formulas.lump_below
            if plan.models is not None or whole:
                if [_told(step) for step in bound()] != [_told(step) for step in saved]:
                    raise SnapshotUnusedError("with the new rounds covariates are coded otherwise")
            elif ledger.since + done <= ledger.rounds[-1]:
                _check_levels(ledger, done, clients, plan, saved)
            return saved
        except SnapshotUnusedError as error:
            self._leave(str(error))
        except _STRANGE as error:
            self._leave(f"it does not fit ({error or type(error).__name__})")
        return None

    def restored(self, run: RoundRun, learner: Participation) -> bool:
        """Put everything back into a new run; return whether that could be done."""
        assert self._job is not None
        assert self._snapshot is not None
        before, snapshot = [observer.state() for observer in run.observers], self._snapshot
        try:
            more = snapshot.more()
            self._check_tables(more["tables"])
            with without_collection():  # a few objects for each of many rounds
                snapshot.restore(run.weigher, learner)
            run.weigher.resume(more["weigher"], learner.rounds)
            for observer, saved in zip(run.observers, more["observers"], strict=True):
                if saved["kind"] != type(observer).__name__:
                    raise SnapshotUnusedError("it counted something else")
                if run.weigher.weighings:
                    observer.enrolled(run.weighing)
                observer.restore(saved["state"])
        except SnapshotUnusedError as error:
            self._leave(str(error))
        except _STRANGE as error:
            self._leave(f"it does not fit ({error or type(error).__name__})")
        else:
            return True
        for observer, state in zip(run.observers, before, strict=True):
            observer.restore(state)
        self._job[0].restore({})
        return False

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._last >= self._seconds

    def save(self, run: RoundRun, learner: Participation, *, ended: bool = False) -> None:
        """Save what was learnt from the rounds so far; ``ended`` if there are no more of them.

        What goes wrong is warned of: the results are what the command is about. A step whose last
        fit has no maximum is tried again in the next round, and not saved.
        """
        assert self._snapshot is not None
        self._last = time.monotonic()
        if learner.rounds == self._snapshot.rounds:
            return
        failed = [step.step.name for step in learner.steps if step.failure is not None]
        if failed:
            if ended:
                self._warn(f"was not saved: the model of {failed[0]} has no maximum so far")
            return
        self._write_tables()
        more = {
            "weigher": run.weigher.progress(),
            "observers": [{"kind": type(o).__name__, "state": o.state()} for o in run.observers],
            "steps": [[s.step.name, s.step.label, s.step.among] for s in learner.steps],
            "tables": {"folder": self._folder.name, "digests": dict(self._digests)},
        }
        try:
            self._snapshot.save(run.weigher, learner, {}, more)
        except (InputError, SnapshotUnusedError) as error:
            self._warn(f"was not saved: {error}")
            return
        for folder in self.directory.glob("tables-*"):
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)

    def keep(self, table: pl.DataFrame) -> None:
        """Keep the table of a round, (m, .) with its number; it counts from the next save on."""
        self._waiting.append(table)
        if sum(one.height for one in self._waiting) >= _TOGETHER:
            self._write_tables()

    def _write_tables(self) -> None:
        """Write the tables that wait as one file."""
        if not self._waiting:
            return
        table, self._waiting = pl.concat(self._waiting), []
        name, buffer = f"{table[ROUND][0]:06d}.parquet", io.BytesIO()
        table.write_parquet(buffer)
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / name).write_bytes(buffer.getbuffer())
        except OSError as error:
            raise unwritable(self._folder, error) from error
        self._digests[name] = hashlib.sha256(buffer.getbuffer()).hexdigest()

    @property
    def tables(self) -> list[Path]:
        """Files of the tables of all rounds, in order."""
        self._write_tables()
        return [self._folder / name for name in self._digests]

    def _check_tables(self, saved: Mapping[str, Any]) -> None:
        """Go on with the tables that were saved, or raise if one is not what it was."""
        folder = self.directory / str(saved["folder"])
        for name, digest in saved["digests"].items():
            try:
                found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            except OSError as error:
                why = f"{folder.name}/{name} cannot be read: {error.strerror}"
                raise SnapshotUnusedError(why) from error
            if found != digest:
                raise SnapshotUnusedError(f"{folder.name}/{name} is damaged")
        self._folder, self._digests = folder, dict(saved["digests"])

    def _leave(self, why: str) -> None:
        """Begin anew beside what is there, and say why."""
        self._snapshot = self._fresh()
        self._folder, self._digests = self.directory / f"tables-{token_hex(4)}", {}
        self._waiting = []
        self._warn(f"was not used, all rounds are read: {why}")

    def _warn(self, text: str) -> None:
        warnings.warn(f"{self.directory} {text}.", FedIPWWarning, stacklevel=2)


def _told(step: Step) -> Any:
    """Return a step as plain values."""
    return step.name, step.label, step.among, step.design.to_json()


def _check_levels(
    ledger: Ledger, done: int, clients: Members, plan: Plan, saved: Sequence[Step]
) -> None:
    """Raise if a category has a level in the rounds after some that no earlier round had."""
    new = Ledger(ledger.directory, ledger.since + done, id=ledger.id)
    steps = participation_steps(new, clients, plan.formulas, in_one=plan.collapsed)
    for step, known in zip(steps, saved, strict=True):
        for column, levels in step.design.levels.items():
            fresh = sorted(set(levels) - set(known.design.levels[column]))
            if fresh:
                raise SnapshotUnusedError(f"{column!r} has a new level, {fresh[0]!r}")
