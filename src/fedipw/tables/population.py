"""The population table: one row per client, who is enrolled, and pre-enrollment covariates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import check_finite, check_rows, some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike

    from fedipw.numerics.types import BoolArray, FloatArray, IdArray

ID = "unit_id"
ENROLLED = "enrolled"
YES, NO = ("true", "1", "yes"), ("false", "0", "no")  # how files write flags, in any case


@dataclass(frozen=True, eq=False)
class Population:
    """A checked table with one row per client of the target population.

    ``frame`` holds ``unit_id`` (unique, not null), optionally ``enrolled`` (bool), and covariates.
    A covariate that is null for every non-enrolled row is *post-enrollment*: it exists only because
    the client enrolled, so it can never explain enrollment.

    Examples
    --------
    >>> population = Population.of({"unit_id": ["a", "b"], "age": [30, 61], "enrolled": [True, False]})
    >>> population.size, population.enrolled_size, population.covariates
    (2, 1, ('age',))
    >>> population.matrix(["height"])
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: No covariate column 'height' in the population table; it has age.
    """  # noqa: E501

    frame: pl.DataFrame

    def __post_init__(self) -> None:
        if ID not in self.frame.columns:
            raise InputError(
                f"The population table has no {ID!r} column; it has "
                f"{some(self.frame.columns)}. Every client needs an identifier."
            )
        if self.frame.height == 0:
            raise InputError("The population table has no rows.")
        ids = self.frame[ID]
        if ids.null_count():
            raise InputError(f"{ids.null_count()} rows of the population table have no {ID}.")
        if ids.n_unique() != len(ids):
            twice = ids.filter(ids.is_duplicated()).unique(maintain_order=True)
            raise InputError(
                f"{ID} must be unique; {len(twice)} value(s) stand more than once: "
                f"{some(twice.to_list())}. Keep one row per client."
            )
        if ENROLLED in self.frame.columns:
            self._check_enrolled()

    def _check_enrolled(self) -> None:
        flags = self.frame[ENROLLED]
        if flags.dtype != pl.Boolean or flags.null_count():
            raise InputError(
                f"{ENROLLED!r} must be true or false in every row, not {flags.dtype} with "
                f"{flags.null_count()} nulls."
            )
        if not flags.any():
            raise InputError(
                f"No client of {self.frame.height} is enrolled: there is nobody to train and "
                f"nothing to weight. Check the {ENROLLED!r} column or the enrollment mechanism."
            )

    @classmethod
    def of(cls, columns: Mapping[str, ArrayLike | Sequence[object]]) -> Population:
        """Return a population from columns by name."""
        return cls(pl.DataFrame(dict(columns)))

    @property
    def size(self) -> int:
        """Number of clients, N."""
        return self.frame.height

    @cached_property
    def unit_ids(self) -> IdArray:
        """Identifiers, (N,)."""
        return self.frame[ID].to_numpy()

    @cached_property
    def enrolled(self) -> BoolArray:
        """Who is enrolled, (N,)."""
        if ENROLLED not in self.frame.columns:
            raise InputError(
                f"The population table has no {ENROLLED!r} column. Draw enrollment first, or add "
                "the column."
            )
        return self.frame[ENROLLED].to_numpy()

    @property
    def enrolled_size(self) -> int:
        """Number of enrolled clients, N_enr."""
        return int(self.enrolled.sum())

    @property
    def covariates(self) -> tuple[str, ...]:
        """Names of all covariate columns."""
        return tuple(c for c in self.frame.columns if c not in {ID, ENROLLED})

    @cached_property
    def post_enrollment(self) -> frozenset[str]:
        """Covariates that are null in every non-enrolled row (and not in every row)."""
        outside = self.frame.filter(~pl.Series(self.enrolled))
        if outside.height == 0:
            return frozenset()
        return frozenset(
            name
            for name in self.covariates
            if outside[name].null_count() == outside.height
            and self.frame[name].null_count() < self.frame.height
        )

    def matrix(self, columns: Sequence[str] | None = None) -> FloatArray:
        """Return covariates as floats, (N, q), in the order asked for; all of them by default."""
        names = self.covariates if columns is None else tuple(columns)
        self.require(names)
        text = [n for n in names if not (_is_number(self.frame[n]))]
        if text:
            kinds = some(f"{n!r} ({self.frame[n].dtype})" for n in text)
            raise InputError(f"Covariates must be numeric or boolean; {kinds} are not.")
        out = np.empty((self.size, len(names)))
        for j, name in enumerate(names):
            out[:, j] = self.frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
        check_finite(out, names, "population table")
        return out

    def require(self, names: Sequence[str]) -> None:
        """Raise if a name is not a covariate."""
        for name in names:
            if name not in self.covariates:
                raise InputError(
                    f"No covariate column {name!r} in the population table; it has "
                    f"{some(self.covariates)}."
                )

    def with_enrolled(self, enrolled: BoolArray) -> Population:
        """Return the same clients with other enrollment flags."""
        check_rows(self.size, enrolled=enrolled)
        if np.asarray(enrolled).dtype != np.bool_:
            raise InputError(f"enrolled must be true or false, not {np.asarray(enrolled).dtype}.")
        return Population(self.frame.with_columns(pl.Series(ENROLLED, enrolled)))


def _is_number(series: pl.Series) -> bool:
    return series.dtype.is_numeric() or series.dtype == pl.Boolean
