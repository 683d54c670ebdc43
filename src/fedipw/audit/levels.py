"""Which terms of a model may be shown: those whose levels have enough clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np
import polars as pl

from fedipw.audit.parts import Coefficient
from fedipw.audit.tallies import Levels, Tally
from fedipw.tables.partitions import Block, Partitions, sum_over
from fedipw.tables.terms import MISSING, OTHER, Factor, Term

if TYPE_CHECKING:
    from fedipw.numerics.types import IntArray
    from fedipw.selection.stage import StageModel
    from fedipw.tables.frames import Frame

_TRUE, _FALSE = "true", "false"
_FLAG = "flag"


def nonzero_rows(partitions: Partitions, frame: Frame) -> IntArray:
    """Return in how many rows each column is not 0, (q,), by one pass."""
    return sum_over(partitions, partial(_nonzero, frame=frame))


def _nonzero(block: Block, frame: Frame) -> IntArray:
    centre, scale = frame.centre[:, None], frame.scale[:, None]
    values = np.abs(centre + scale * block.columns)
    return np.asarray((values > 1e-9 * (np.abs(centre) + scale)).sum(axis=1), dtype=np.int64)


def small_terms(
    terms: Sequence[Term],
    counts: IntArray,
    rows: int,
    *,
    min_cell: int,
    kinds: Mapping[str, str],
    levels: Mapping[str, Sequence[str]] | None = None,
) -> frozenset[str]:
    """Return the names of terms that tell of some clients, but fewer than ``min_cell``.

    Parameters
    ----------
    terms, counts
        Terms and in how many rows each is not 0, (q,).
    rows
        Number of all rows.
    min_cell
        The fewest clients to be told of.
    kinds
        What each column holds: number, flag or category.
    levels
        Of each category, the one without a term among them: it is looked at too.
    """
    small = {
        term.name
        for term, n in zip(terms, counts.tolist(), strict=True)
        if (_marks(term, kinds) and 0 < n < min_cell)
        or (_is_flag(term, kinds) and 0 < rows - n < min_cell)
    }
    own = {term.level: n for term, n in zip(terms, counts.tolist(), strict=True) if term.level}
    for column, known in (levels or {}).items():
        beside = [own[column, level] for level in known if (column, level) in own]
        if len(beside) == len(known) - 1 and 0 < rows - sum(beside) < min_cell:
            small |= {f"{column}[{level}]" for level in known if (column, level) not in own}
    return frozenset(small)


def _marks(term: Term, kinds: Mapping[str, str]) -> bool:
    """Return whether a term is 0 but for the rows of a level, a flag or of missing values."""
    return any(
        f.level is not None or f.missing or kinds.get(f.column) == _FLAG for f in term.factors
    )


def _is_flag(term: Term, kinds: Mapping[str, str]) -> bool:
    return len(term.factors) == 1 and kinds.get(term.factors[0].column) == _FLAG


def coefficients_but(model: StageModel, hidden: frozenset[str]) -> tuple[Coefficient, ...]:
    """Return a model's coefficients without the hidden ones; those left out of the fit are 0."""
    fit = model.fit
    errors = fit.standard_errors[:-1].tolist()
    return tuple(
        Coefficient(name=name, value=value, standard_error=error if np.isfinite(error) else None)
        for name, value, error in zip(fit.names, fit.coefficients.tolist(), errors, strict=True)
        if name not in hidden
    )


def shown_coefficients(
    model: StageModel, frame: pl.DataFrame, tallies: Sequence[Tally], min_cell: int
) -> tuple[tuple[Coefficient, ...], int]:
    """Return the coefficients whose levels have enough clients, and how many are hidden.

    Levels of columns of ``frame`` are counted there, those of the ledger in ``tallies``; a level
    that was not counted is hidden.
    """
    known = _Clients(frame, {t.column: t for t in tallies}, model.design.lumped, min_cell)
    kinds = model.design.kinds
    hidden = frozenset(
        term.name
        for term in model.design.terms
        if not all(known.enough(factor, kinds[factor.column]) for factor in term.factors)
    )
    return coefficients_but(model, hidden), len(hidden)


@final
class _Clients:
    """Whether enough clients have a level."""

    def __init__(
        self,
        frame: pl.DataFrame,
        tallies: Mapping[str, Tally],
        lumped: Mapping[str, Sequence[str]],
        min_cell: int,
    ) -> None:
        self._frame, self._tallies = frame, tallies
        self._lumped, self._min_cell = lumped, min_cell
        self._counts: dict[str, dict[str, int]] = {}

    def enough(self, factor: Factor, kind: str) -> bool:
        if factor.level is None and not factor.missing:
            return kind != _FLAG or all(
                self._large(factor.column, (text,), empty=True) for text in (_TRUE, _FALSE)
            )
        level = MISSING if factor.missing else factor.level
        levels = (level,) if level != OTHER else tuple(self._lumped.get(factor.column, ()))
        return self._large(factor.column, tuple(str(x) for x in levels))

    def _large(self, column: str, levels: Sequence[str], *, empty: bool = False) -> bool:
        """Return whether a union of levels has enough clients; ``empty``: or none at all."""
        if column in self._frame.columns:
            counts = self._counts_of(column)
            n = sum(counts.get(level, 0) for level in levels)
            return n >= self._min_cell or (empty and n == 0)
        tally = self._tallies.get(column)
        if tally is None:
            return False
        places = [k for k, label in enumerate(tally.coder.labels) if label in levels]
        clients = {c for k in places for c in tally.few.get(k, ())}
        found = any(k in tally.many for k in places) or len(clients) >= self._min_cell
        return found or (empty and not places)

    def _counts_of(self, column: str) -> dict[str, int]:
        if column not in self._counts:
            coder = Levels()
            counts = np.bincount(coder.codes(self._frame[column]), minlength=len(coder.labels))
            self._counts[column] = dict(zip(coder.labels, counts.tolist(), strict=True))
        return self._counts[column]
