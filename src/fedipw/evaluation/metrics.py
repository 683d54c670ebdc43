"""Metrics clients report: one value per client and round, and how many samples it is a mean of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.ledger import ROUND
from fedipw.tables.population import ID
from fedipw.tables.tablefile import TableFile

if TYPE_CHECKING:
    from pathlib import Path

VALUE: Final = "value"
COUNT: Final = "n"
LARGEST = 1e100  # of a metric; sums of squares stay finite


@dataclass(frozen=True)
class Metrics:
    """What clients reported: ``unit_id``, ``round``, ``value``, and ``n`` where known.

    Examples
    --------
    >>> made = Metrics(pl.DataFrame({"unit_id": ["a", "b"], "round": [1, 1], "value": [0.4, 0.7]}))
    >>> made.rounds, made.of(1)["value"].to_list()
    ((1,), [0.4, 0.7])
    """

    frame: pl.DataFrame
    where: str = "metrics"

    def __post_init__(self) -> None:
        lacking = [n for n in (ID, ROUND, VALUE) if n not in self.frame.columns]
        if lacking:
            raise InputError(
                f"{self.where} has no column {some(map(repr, lacking))}; it has "
                f"{some(self.frame.columns)}."
            )
        if not self.frame.height:
            raise InputError(f"{self.where} has no rows.")
        for name in (ID, ROUND, VALUE, *([COUNT] if COUNT in self.frame.columns else [])):
            if self.frame[name].null_count():
                raise InputError(
                    f"{self.where}: {self.frame[name].null_count()} rows have no {name!r}."
                )
        if not self.frame.schema[ROUND].is_integer():
            raise InputError(f"{self.where}: {ROUND!r} must hold whole numbers.")
        self._check_numbers()
        doubled = [p for p in self._by_round.values() if p[ID].n_unique() != p.height]
        if doubled:
            twice = pl.concat([part.filter(pl.col(ID).is_duplicated()) for part in doubled])
            raise InputError(
                f"{self.where}: {twice.height} rows share {ID} and {ROUND} with another, such as "
                f"{some(str(v) for v in twice.select(ID, ROUND).rows()[:3])}. Keep one value per "
                "client and round."
            )

    def _check_numbers(self) -> None:
        kind = self.frame.schema[VALUE]
        if not (kind.is_numeric() or kind == pl.Boolean):
            raise InputError(f"{self.where}: {VALUE!r} must hold numbers, not {kind}.")
        odd = int((~self.frame[VALUE].cast(pl.Float64).is_finite()).sum())
        if odd:
            raise InputError(f"{self.where}: {odd} values are not finite. Leave such rows out.")
        large = int((self.frame[VALUE].cast(pl.Float64).abs() > LARGEST).sum())
        if large:
            raise InputError(
                f"{self.where}: {large} values are beyond {LARGEST:g}, where squares overflow. "
                "Scale the metric down or leave such rows out."
            )
        if COUNT in self.frame.columns:
            counts = self.frame[COUNT]
            if not counts.dtype.is_numeric() or not bool(
                ((counts > 0) & counts.cast(pl.Float64).is_finite()).all()
            ):  # NaN > 0 holds in Polars
                raise InputError(f"{self.where}: {COUNT!r} must hold finite numbers above 0.")

    @classmethod
    def read(cls, path: Path) -> Metrics:
        """Return the metrics of a .parquet or .csv file, or a directory of parts."""
        table = TableFile(path)
        table.require([ID, ROUND, VALUE])
        names = [n for n in (ID, ROUND, VALUE, COUNT) if n in table.schema]
        return cls(table.collect(table.scan().select(names)), str(path))

    @property
    def has_counts(self) -> bool:
        """Whether rows say how many samples they are a mean of."""
        return COUNT in self.frame.columns

    @cached_property
    def _by_round(self) -> dict[int, pl.DataFrame]:
        parts = self.frame.partition_by(ROUND, as_dict=True)
        return {int(key[0]): part for key, part in parts.items()}

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds with a value, in order."""
        return tuple(sorted(self._by_round))

    def of(self, index: int) -> pl.DataFrame | None:
        """Return the rows of a round, none if it has none."""
        return self._by_round.get(index)

    def against(self, other: Metrics) -> Metrics:
        """Return the differences to another model's metrics on the same clients and rounds."""
        keys = (pl.col(ID).cast(pl.String).alias("(id)"), pl.col(ROUND).cast(pl.Int64).alias("(r)"))
        both = self.frame.with_columns(keys).join(
            other.frame.select(*keys, pl.col(VALUE).alias("(other)")),
            on=["(id)", "(r)"], how="inner", maintain_order="left",
        ).drop("(id)", "(r)")  # fmt: skip
        if both.height != self.frame.height or both.height != other.frame.height:
            raise InputError(
                f"{self.where} and {other.where} must tell of the same clients and rounds: "
                f"{self.frame.height} and {other.frame.height} rows, {both.height} in both."
            )
        apart = pl.col(VALUE).cast(pl.Float64) - pl.col("(other)").cast(pl.Float64)
        made = both.with_columns(apart.alias(VALUE)).drop("(other)")
        return Metrics(made, f"{self.where} less {other.where}")
