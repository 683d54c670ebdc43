"""The enrolled clients of a table, in memory: who they are, what is known of them, and since when.

A table may say that enrollment changes over time with the columns ``enrolled_from`` (first round or
moment) and ``enrolled_until`` (the first one no longer), null where there is no such limit.
Whole numbers are rounds; dates and times are compared with the ledger's column ``opened_at``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.ledger import OPENED_AT
from fedipw.tables.population import ENROLLED, ID

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, IntArray

FROM: Final = "enrolled_from"
UNTIL: Final = "enrolled_until"


@dataclass(frozen=True)
class Members:
    """Enrolled clients: ``unit_id``, covariates, and dates where enrollment changes.

    Examples
    --------
    >>> people = pl.DataFrame({"unit_id": ["a", "b"], "age": [30, 61], "enrolled_from": [None, 3]})
    >>> members = Members(people)
    >>> members.covariates, members.rows_of(pl.Series(["b", "a"]), "round 1").tolist()
    (('age',), [1, 0])
    >>> members.present(2).tolist(), members.present(3).tolist()
    ([True, False], [True, True])
    """

    frame: pl.DataFrame

    def __post_init__(self) -> None:
        if ID not in self.frame.columns:
            raise InputError(
                f"The table of clients has no {ID!r} column; it has {some(self.frame.columns)}."
            )
        ids = self.frame[ID]
        if not len(ids):
            raise InputError("No client is enrolled: there is nobody to weigh.")
        if ids.null_count():
            raise InputError(f"{ids.null_count()} enrolled clients have no {ID}.")
        if ids.n_unique() != len(ids):
            twice = ids.filter(ids.is_duplicated()).unique(maintain_order=True)
            raise InputError(
                f"{ID} must be unique; {len(twice)} enrolled client(s) stand more than once: "
                f"{some(twice.to_list())}. Keep one row per client."
            )
        for name in (FROM, UNTIL):
            if name in self.frame.columns:
                _check_moment(self.frame[name])

    @property
    def size(self) -> int:
        """Number of clients that are enrolled at some time."""
        return self.frame.height

    @property
    def covariates(self) -> tuple[str, ...]:
        """What is known of every client."""
        return tuple(n for n in self.frame.columns if n not in {ID, ENROLLED, FROM, UNTIL})

    @property
    def changes(self) -> bool:
        """Whether clients join or leave."""
        return FROM in self.frame.columns or UNTIL in self.frame.columns

    @cached_property
    def _places(self) -> pl.DataFrame:
        return self.frame.select(ID).with_row_index("(place)")

    def rows_of(self, ids: pl.Series, where: str) -> IntArray:
        """Return the rows of clients by identifier, (m,); raise if one is not enrolled."""
        asked = pl.DataFrame({ID: self._like_ours(ids, where)})
        found = asked.join(self._places, on=ID, how="left", maintain_order="left")["(place)"]
        if found.null_count():
            strange = ids.filter(found.is_null())
            raise InputError(
                f"{where}: {len(strange)} client(s) are not enrolled according to the table of "
                f"clients: {some(strange.to_list())}. Correct {ENROLLED!r} there, or leave their "
                "rows out here."
            )
        return found.to_numpy().astype(np.int64)

    def _like_ours(self, ids: pl.Series, where: str) -> pl.Series:
        """Return identifiers in the type of the table: numbers and their text are the same."""
        ours, theirs = self.frame.schema[ID], ids.dtype
        if ours == theirs:
            return ids
        if ours.is_integer() and theirs.is_integer():
            return ids.cast(ours, strict=False)  # a number too large is nobody's
        if ours == pl.String and theirs.is_integer():
            return ids.cast(pl.String)
        if ours.is_integer() and theirs == pl.String:
            numbers = ids.cast(ours, strict=False)  # what is no number is nobody's, nor is 007
            return numbers.set(numbers.cast(pl.String) != ids, None)
        raise InputError(f"{where}: {ID} is {theirs}, in the table of clients it is {ours}.")

    def present(self, index: int, opened_at: date | datetime | None = None) -> BoolArray:
        """Return who is enrolled in a round, (n,)."""
        inside = np.ones(self.size, dtype=np.bool_)
        for name in (FROM, UNTIL):
            if name not in self.frame.columns:
                continue
            moment: int | date | datetime = index
            if isinstance(self.frame.schema[name], pl.Date | pl.Datetime):
                if opened_at is None:
                    raise InputError(
                        f"{name!r} holds {self.frame.schema[name]}: round {index} of the ledger "
                        f"needs a column {OPENED_AT!r} to compare it with."
                    )
                moment = opened_at
            limit = pl.col(name)
            kept = limit <= moment if name == FROM else limit > moment
            try:
                inside &= self.frame.select(kept.fill_null(True)).to_series().to_numpy()
            except pl.exceptions.PolarsError as error:
                raise InputError(
                    f"{name!r} holds {self.frame.schema[name]}, which cannot be compared with "
                    f"{moment!r} of round {index}: give both the same kind and time zone."
                ) from error
        return inside


def _check_moment(column: pl.Series) -> None:
    kind = column.dtype
    if not (kind.is_integer() or kind in {pl.Date, pl.Null} or isinstance(kind, pl.Datetime)):
        raise InputError(
            f"{column.name!r} must hold round numbers or dates, not {kind}. Times in a CSV file "
            "are text: use Parquet."
        )
