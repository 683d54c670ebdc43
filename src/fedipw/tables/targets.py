"""Population targets: names, means or totals, and their standard errors where known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import polars as pl

from fedipw.errors import InfeasibleError, InputError
from fedipw.numerics.checks import LARGEST, check_magnitude, check_positive, check_rows, some
from fedipw.tables.formula import level_named, level_text, near, nearest_first
from fedipw.tables.table import Table, TableLike, odd_number

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray
    from fedipw.tables.formula import Term

_TEXT = (pl.String, pl.Categorical, pl.Enum, pl.Null)
SHARES = 1e-6  # by which the shares of one category may miss 1 in any case
_SAME = 1e-12  # a sum of shares nearer to 1 than this is 1
TargetsLike: TypeAlias = "Mapping[str, float] | TableLike | Targets"


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    r"""Population means by name; a share for one level of a category.

    Published shares are rounded. Those of k levels, written with d decimals, may together miss 1 by

    .. math:: \Big|\sum_{l=1}^k p_l - 1\Big| \le \tfrac12 k\, 10^{-d} \qquad (C13)

    by rounding alone, d being the most decimals of any of them, without zeros at the end; of totals
    it is that over N. Shares of all levels that the enrolled have are rescaled within it and
    refused beyond it (:meth:`on`).

    Examples
    --------
    >>> Targets.of({"age": 45.0, "os[android]": 0.7}).names
    ('age', 'os[android]')
    >>> Targets.of({"age": 45_000.0, "os[android]": 700}, totals=1_000).values
    array([45. ,  0.7])
    >>> Targets.of({"os[ios]": 0.6, "os[android]": 0.7})
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: The shares of 'os' sum to 1.3, more than 1: os[ios] = 0.6, ...
    """

    names: tuple[str, ...]
    values: FloatArray  # (q,) means
    se: FloatArray | None = None  # (q,)
    totals: float | None = None  # N, where totals were given: means are those over N
    decimals: tuple[int, ...] | None = None  # (q,) as written; those of the means where not given
    where: str = ""  # the table they stand in
    notes: tuple[str, ...] = ()  # what was done to them

    def __post_init__(self) -> None:
        check_rows(len(self.names), values=self.values)
        if not self.names:
            raise InputError("There are no targets.")
        twice = sorted({n for n in self.names if self.names.count(n) > 1})
        if twice:
            raise InputError(f"{some(twice)}: each target must be given once.")
        self._check_numbers()
        groups: dict[str, list[int]] = {}
        for j, name in enumerate(self.names):
            found = level_named(name)
            if found is not None:
                groups.setdefault(found[0], []).append(j)
        for column, members in groups.items():
            self._check_shares(column, members)

    def _check_numbers(self) -> None:
        bad = [n for n, v in zip(self.names, self.values, strict=True) if not np.isfinite(v)]
        if bad:
            raise InputError(f"The target value of {some(bad)} is missing or infinite.")
        huge = [n for n, v in zip(self.names, self.values, strict=True) if abs(v) > LARGEST]
        if huge:
            raise InputError(f"The target value of {some(huge)} is beyond {LARGEST:g}.")
        if self.se is not None:
            check_rows(len(self.names), se=self.se)
            odd = [n for n, e in zip(self.names, self.se, strict=True) if not 0.0 <= e <= LARGEST]
            if odd:
                raise InputError(
                    f"The standard error of {some(odd)} must be a number from 0 to {LARGEST:g}. "
                    "Leave out a target about which nothing is known."
                )

    @property
    def _unit(self) -> float:
        """What 1 was written as: N of totals."""
        return 1.0 if self.totals is None else self.totals

    def _listed(self, members: Sequence[int]) -> str:
        return some(f"{self.names[j]} = {self.values[j] * self._unit:.10g}" for j in members)

    def _check_share(self, j: int) -> None:
        """Raise if the j-th target is no share of a population."""
        if -SHARES <= self.values[j] <= 1.0 + SHARES:
            return
        if self.totals is not None:
            raise InputError(
                f"{self._listed([j])}: the count of a level lies between 0 and N = "
                f"{self.totals:.10g}. Correct it or the population size."
            )
        raise InputError(
            f"{self._listed([j])}: the share of a level lies between 0 and 1. If this is a count, "
            "divide by N or pass --totals (totals=) with the population size; if it is a "
            "percentage, divide by 100."
        )

    def _check_shares(self, column: str, members: Sequence[int]) -> None:
        """Raise if shares of levels of a column are none, or sum to more than rounding explains."""
        for j in members:
            self._check_share(j)
        total = float(self.values[members].sum())
        if total - 1.0 > self._rounding(members):
            whole = "1" if self.totals is None else f"N = {self.totals:.10g}"
            raise InputError(
                f"The {self._kind} of {column!r} sum to {total * self._unit:.10g}, more than "
                f"{whole}: {self._listed(members)}. {self._explained(members)}"
            )

    @property
    def _kind(self) -> str:
        return "shares" if self.totals is None else "counts"

    def _rounding(self, members: Sequence[int]) -> float:
        """Return by how much shares may miss 1 (C13), or what arithmetic loses."""
        most = self._decimals(members)
        exact = self.totals is None and most == 0  # 0 and 1 are no rounded shares
        rounded = 0.0 if exact else 0.5 * len(members) * 10.0**-most / self._unit
        return max(rounded * (1.0 + 1e-9), SHARES)  # 1.1 - 1 is more than 0.1

    def _decimals(self, members: Sequence[int]) -> int:
        written = self.decimals
        found = tuple(map(_decimals, self.values)) if written is None else written
        return max(found[j] for j in members)

    def _explained(self, members: Sequence[int]) -> str:
        most = self._rounding(members) * self._unit
        return (
            f"Rounding to {self._decimals(members)} decimals explains a miss of {most:.3g} at most."
        )

    def _repr_html_(self) -> str:
        columns = {"name": self.names, "value": self.values}
        errors = {} if self.se is None else {"se": self.se}
        return pl.DataFrame(columns | errors)._repr_html_()

    @classmethod
    def of(
        cls,
        values: Mapping[str, float],
        se: Mapping[str, float] | None = None,
        *,
        totals: float | None = None,
    ) -> Self:
        """Return targets from values by name; ``totals`` is N where they are totals."""
        errors = None if se is None else np.array([float(se.get(n, 0.0)) for n in values])
        given = np.array([float(v) for v in values.values()])
        return cls._given(tuple(values), given, errors, totals)

    @classmethod
    def _given(
        cls,
        names: tuple[str, ...],
        values: FloatArray,
        se: FloatArray | None,
        totals: float | None,
        where: str = "",
    ) -> Self:
        """Return targets as they were written."""
        size = 1.0 if totals is None else check_positive(totals, "population_size")
        check_magnitude(size, "population_size")
        return cls(
            names, values / size, None if se is None else se / size, totals,
            decimals=tuple(map(_decimals, values)), where=where,
        )  # fmt: skip

    @classmethod
    def given(cls, source: TargetsLike, *, totals: float | None = None) -> Targets:
        """Return targets as they come: values by name, a file or frame, or targets already.

        ``totals`` is N where the values are totals.

        >>> Targets.given(pl.DataFrame({"name": ["age"], "value": [45.0]})).names
        ('age',)
        """
        if isinstance(source, Targets):
            if totals is not None:
                raise InputError("Targets hold means already: say totals where they are made.")
            return source
        if isinstance(source, Mapping):
            return cls.of(source, totals=totals)
        known = isinstance(source, str | Path | pl.LazyFrame | Table)
        if known or hasattr(source, "__arrow_c_stream__"):
            return cls.read(source, totals=totals)
        raise InputError(
            "Targets are values by name (a dict), a path or a frame with the columns name, value "
            f"and optionally se, or Targets, not {type(source).__name__}."
        )

    @classmethod
    def read(cls, source: TableLike, *, totals: float | None = None) -> Self:
        """Return the targets of a table with columns ``name``, ``value`` and optionally ``se``.

        ``totals`` is N where values and their standard errors are of totals.
        """
        table = Table(source)
        try:
            frame = table.collect()
        except InputError as error:
            if "more fields" not in str(error):
                raise
            raise InputError(
                f'{error} A name that holds a comma stands in quotes, as in "agecat[(0,19]]",0.2.'
            ) from error
        for column in ("name", "value"):
            if column not in frame.columns:
                raise InputError(
                    f"{table.name} has no column {column!r}; it has {some(frame.columns)}. Targets "
                    "are name,value and optionally se."
                )
        try:
            if not (frame["name"].dtype.is_numeric() or frame["name"].dtype in _TEXT):
                raise InputError(f"column 'name' must hold text, not {frame['name'].dtype}.")
            names = frame["name"].cast(pl.String)
            if names.null_count():
                raise InputError(f"row {int(names.is_null().arg_max() or 0) + 1} has no name.")
            se = _numbers(frame, "se") if "se" in frame.columns else None
            values = _numbers(frame, "value")
            return cls._given(tuple(names.to_list()), values, se, totals, table.name)
        except InputError as error:
            raise InputError(f"{table.name}: {error}") from error

    def on(
        self, terms: Sequence[Term], schema: pl.Schema, levels: Mapping[str, Sequence[str]]
    ) -> BoundTargets:
        """Return the targets as they hold for clients whose columns have these levels.

        Shares of all levels that the clients have are rescaled to sum to 1 if rounding explains
        the miss (C13). What no weights on these clients can meet as a level is missing, or because
        shares miss 1 by more, is returned with them.

        Parameters
        ----------
        terms
            What the names stand for in the clients' table (``term_of``), (q,).
        schema
            Of that table.
        levels
            Levels that the clients have of each column of which a level is a target.
        """
        groups: dict[str, dict[str, int]] = {}
        for j, term in enumerate(terms):
            first = term.factors[0]
            if len(term.factors) == 1 and first.is_plain and schema[first.column] == pl.Boolean:
                self._on_file(self._check_share, j)
            if term.level is None:
                continue
            column, written = term.level
            level = level_text(written, schema[column], column)
            if groups.setdefault(column, {}).setdefault(level, j) != j:
                both = some([self.names[groups[column][level]], self.names[j]])
                raise InputError(f"{self._at}{both} are the same level: give it once.")
        found: Targets = self
        faults: list[InfeasibleError | InputError] = []
        for column, listed in groups.items():
            members, known = list(listed.values()), levels[column]
            self._on_file(self._check_shares, column, members)
            found = found._rescaled(column, members, complete=set(known) <= set(listed))
            faults += [
                self._without_clients(column, level, j, known)
                for level, j in listed.items()
                if level not in known and self.values[j] > SHARES
            ]
            if set(known) <= set(listed) and len(members) > 1:
                faults += self._too_few(column, members)
        return BoundTargets(found, tuple(faults))

    def _on_file(self, check: Callable[..., None], *given: object) -> None:
        """Check something, and name the table in what it raises."""
        try:
            check(*given)
        except InputError as error:
            raise InputError(f"{self._at}{error}") from error

    @property
    def _at(self) -> str:
        return f"{self.where}: " if self.where else ""

    def _rescaled(self, column: str, members: list[int], *, complete: bool) -> Targets:
        """Return the targets with shares of a column that sum to 1, if rounding explains a miss."""
        total = float(self.values[members].sum())
        miss = total - 1.0
        rounded = _SAME < abs(miss) <= self._rounding(members)
        if not rounded or (miss < 0.0 and not (complete and len(members) > 1)):
            return self
        values, se = self.values.copy(), None if self.se is None else self.se.copy()
        values[members] /= total
        if se is not None:
            se[members] /= total
        whole = "1" if self.totals is None else f"N = {self.totals:.10g}"
        note = (
            f"The {self._kind} of {column!r} sum to {total * self._unit:.10g}, which rounding to "
            f"{self._decimals(members)} decimals explains: rescaled to sum to {whole}."
        )
        return replace(self, values=values, se=se, notes=(*self.notes, note))

    def _without_clients(
        self, column: str, level: str, j: int, known: Sequence[str]
    ) -> InfeasibleError:
        return InfeasibleError(
            f"{self._at}no enrolled client has {self.names[j]}{near(level, known)} Levels of "
            f"{column!r}: {some(nearest_first(level, known))}.",
            ((self.names[j], float(self.values[j]), 0.0, 0.0),),
            ways_out=(
                "correct the name of the level",
                "merge it with another that enrolled clients have",
                "leave this target out: nobody enrolled can stand for those it is about",
            ),
        )

    def _too_few(self, column: str, members: Sequence[int]) -> list[InputError]:
        """Return why shares of all levels there are cannot sum to so little, where they do."""
        total = float(self.values[members].sum())
        if 1.0 - total <= self._rounding(members):
            return []
        whole = "1" if self.totals is None else f"N = {self.totals:.10g}"
        return [
            InputError(
                f"{self._at}the {self._kind} of {column!r} sum to {total * self._unit:.10g}, not "
                f"{whole}, and enrolled clients have no other level: {self._listed(members)}. "
                f"{self._explained(members)} Correct them, or merge the level that is left out "
                "with one that enrolled clients have."
            )
        ]


@dataclass(frozen=True, slots=True, eq=False)
class BoundTargets:
    """Targets as they hold for some clients, and what no weights on these can meet."""

    targets: Targets
    faults: tuple[InfeasibleError | InputError, ...]

    def required(self) -> Targets:
        """Return the targets, or raise the first fault."""
        for fault in self.faults:
            raise fault
        return self.targets


def _decimals(value: float) -> int:
    """Return how many decimals a number has as it is written shortest."""
    if not np.isfinite(value):
        return 0
    exponent = Decimal(repr(float(value))).normalize().as_tuple().exponent
    return max(0, -int(exponent))


def _numbers(frame: pl.DataFrame, column: str) -> FloatArray:
    given = frame[column]
    if not given.dtype.is_numeric() and given.null_count() < len(given):
        raise InputError(f"{odd_number(given)}.")
    if given.dtype == pl.Float32:  # 0.1 as it was written, not 0.10000000149
        given = given.cast(pl.String)
    values = given.cast(pl.Float64)
    return values.fill_null(0.0 if column == "se" else np.nan).to_numpy().copy()
