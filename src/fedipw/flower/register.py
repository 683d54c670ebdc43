"""The register of a run: everybody who was ever enrolled, so that enrollment may change.

A table of clients may have other rows when a server is started again. Closed rounds list clients
that have left since, and not those that joined. The register keeps who they were: it is the file
``enrolled.parquet`` beside the checkpoint, one row per client in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics import IntArray
from fedipw.numerics.checks import some
from fedipw.tables.columns import ENROLLED, FROM, ID, UNTIL
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Members
from fedipw.tables.table import read_table, write_table

FILE: Final = "enrolled.parquet"
_JOINED, _LEFT = "fedipw-joined", "fedipw-left"  # rounds: the first, and the first no longer
_EVALUATION = "fedipw-evaluation"  # evaluations that were closed when it last joined or left
_KEY, _OWN = "(key)", (_JOINED, _LEFT, _EVALUATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrollmentChange:
    """What is other in the table of clients than when rounds were last trained.

    >>> str(EnrollmentChange(joined=12, left=3, other=5))
    '12 clients joined, 3 left, 5 have other covariates'
    >>> str(EnrollmentChange(left=1, lost=("age",)))
    '1 client left, age is not in the table any more'
    """

    joined: int = 0
    left: int = 0
    other: int = 0  # clients whose covariates are other than before
    gained: tuple[str, ...] = ()  # columns
    lost: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.other or self.gained or self.lost)

    def __str__(self) -> str:
        counts = ((self.joined, "joined"), (self.left, "left"), (self.other, "other covariates"))
        said: list[str] = []
        for count, what in counts:
            if count:
                noun = "" if said else " client" if count == 1 else " clients"
                verb = ("has " if count == 1 else "have ") if what.startswith("other") else ""
                said.append(f"{count:,}{noun} {verb}{what}")
        for names, what in ((self.gained, "new"), (self.lost, "not in the table any more")):
            if names:
                said.append(f"{some(names)} {'is' if len(names) == 1 else 'are'} {what}")
        return ", ".join(said)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Register:
    """Everybody who was ever enrolled in a run, and the members it has now.

    ``members`` are those the table lists, in its order, and then those that left. ``slots`` (n,)
    is the place of each in the order in which they came, which never changes.
    """

    path: Path
    saved: pl.DataFrame | None  # as it is on disk
    frame: pl.DataFrame
    members: Members
    slots: IntArray
    change: EnrollmentChange

    @classmethod
    def of(cls, ledger: Path, members: Members) -> Register:
        """Return the register of the run in a ledger's directory, for the members of a table."""
        path = ledger / "checkpoint" / FILE
        closed, evaluations = len(Ledger(ledger).rounds), len(Ledger(ledger / "evaluation").rounds)
        saved = _read(path) if closed and path.exists() else None
        if saved is None:
            frame, change = _begun(members), EnrollmentChange()
        else:
            frame, change = _followed(saved, members, closed, evaluations)
        union = _union(frame, members)
        return cls(
            path=path, saved=saved, frame=frame, members=union, change=change,
            slots=_places(frame[ID], union.frame[ID]),
        )  # fmt: skip

    @property
    def founders(self) -> int:
        """Number of clients that were enrolled when the run began."""
        return int((self.frame[_JOINED] == 1).sum())

    @property
    def evaluation_since(self) -> int:
        """The first evaluation since which the same clients are enrolled."""
        return int(self.frame[_EVALUATION].max()) + 1  # type: ignore[arg-type]

    def save(self) -> None:
        """Write it, before the first round with these members; nothing if it is on disk.

        The ledger is held meanwhile.
        """
        on_disk = _read(self.path) if self.path.exists() else None
        if on_disk is not None and on_disk.equals(self.frame):
            return
        if self.saved is not None and (on_disk is None or not on_disk.equals(self.saved)):
            raise InputError(
                f"{self.path} was changed by another server since this strategy was made: make it "
                "anew."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_table(self.frame, self.path)


def _begun(members: Members) -> pl.DataFrame:
    return _about(members).with_columns(
        pl.lit(1, dtype=pl.Int64).alias(_JOINED),
        pl.lit(None, dtype=pl.Int64).alias(_LEFT),
        pl.lit(0, dtype=pl.Int64).alias(_EVALUATION),
    )


def _about(members: Members) -> pl.DataFrame:
    """Return identifiers and covariates."""
    return members.frame.select(ID, *members.covariates)


def _followed(
    saved: pl.DataFrame, members: Members, closed: int, evaluations: int
) -> tuple[pl.DataFrame, EnrollmentChange]:
    """Return the register for the members of now, and what has changed since it was saved."""
    now, key = _about(members), pl.col(ID).cast(pl.String).alias(_KEY)
    here, there = now.with_columns(key), saved.with_columns(key)
    listed, inside = pl.col(_KEY).is_in(here[_KEY].implode()), pl.col(_LEFT).is_null()
    left = there.select(inside & ~listed).to_series()
    back = there.select(~inside & listed).to_series()
    new = here.filter(~pl.col(_KEY).is_in(there[_KEY].implode()))
    known = [n for n in now.columns if n != ID]
    before = [n for n in saved.columns if n not in {ID, *_OWN}]
    shared = [n for n in known if n in before]
    stayed = there.filter(inside & listed)
    pairs = stayed.join(here, on=_KEY, how="left", maintain_order="left", suffix="(now)")
    other = pairs.select(
        pl.any_horizontal(
            [_differs(n, saved.schema[n], now.schema[n]) for n in shared] or [pl.lit(False)]
        ).alias("(other)")
    )["(other)"]
    change = EnrollmentChange(
        joined=new.height + int(back.sum()),
        left=int(left.sum()),
        other=int(other.sum()),
        gained=tuple(n for n in known if n not in before),
        lost=tuple(n for n in before if n not in known),
    )
    if not change:
        return saved, change
    current = there.select(_KEY, *_OWN).join(
        here.drop(ID), on=_KEY, how="left", maintain_order="left"
    )
    gone = there.select(~listed).to_series()
    columns: list[pl.Series] = [saved[ID].cast(now.schema[ID], strict=False)]
    for name in known:  # what was last known of those that left
        values = current[name]
        if name in before:
            values = values.zip_with(~gone, saved[name].cast(now.schema[name], strict=False))
        columns.append(values)
    moved = left | back
    evaluated = pl.Series([evaluations] * saved.height, dtype=pl.Int64)
    last = pl.Series([closed + 1] * saved.height, dtype=pl.Int64)
    columns += [
        saved[_JOINED].zip_with(~back, last).alias(_JOINED),
        saved[_LEFT].set(back, None).zip_with(~left, last).alias(_LEFT),
        saved[_EVALUATION].zip_with(~moved, evaluated).alias(_EVALUATION),
    ]
    fresh = new.drop(_KEY).with_columns(
        pl.lit(closed + 1, dtype=pl.Int64).alias(_JOINED),
        pl.lit(None, dtype=pl.Int64).alias(_LEFT),
        pl.lit(evaluations, dtype=pl.Int64).alias(_EVALUATION),
    )
    whole = pl.DataFrame(columns)
    return pl.concat([whole, fresh.select(whole.columns)]), change


def _differs(name: str, before: pl.DataType, now: pl.DataType) -> pl.Expr:
    """Return whether a column's value is another than before; numbers are compared as numbers."""
    kind = None
    if before != now:
        kind = pl.Float64 if before.is_numeric() and now.is_numeric() else pl.String
    pair = [pl.col(name), pl.col(f"{name}(now)")]
    old, new = pair if kind is None else [column.cast(kind, strict=False) for column in pair]
    return old.ne_missing(new)


def _union(frame: pl.DataFrame, members: Members) -> Members:
    """Return the members of now, then those that left; as they are if nobody ever came or went."""
    if not (frame[_LEFT].is_not_null().any() or (frame[_JOINED] > 1).any()):
        return members
    gone = frame.filter(pl.col(_LEFT).is_not_null()).drop(_OWN)
    own = members.frame
    lacking = [
        pl.lit(False if n == ENROLLED else None).cast(own.schema[n]).alias(n)
        for n in own.columns
        if n in {ENROLLED, FROM, UNTIL}
    ]
    whole = pl.concat([own, gone.with_columns(lacking).select(own.columns)])
    former = np.zeros(whole.height, dtype=np.bool_)
    former[own.height :] = True
    return Members(whole, former)


def _places(register: pl.Series, ids: pl.Series) -> IntArray:
    place = {unit: k for k, unit in enumerate(register.cast(pl.String).to_list())}
    return np.array([place[unit] for unit in ids.cast(pl.String).to_list()], dtype=np.int64)


def _read(path: Path) -> pl.DataFrame:
    frame = read_table(path)
    lacking: Sequence[str] = [n for n in (ID, *_OWN) if n not in frame.columns]
    if lacking:
        raise InputError(f"{path} is damaged: it has no column {some(map(repr, lacking))}.")
    return frame
