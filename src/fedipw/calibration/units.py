"""Calibration of a table of enrolled clients to named targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.calibration.design import BalanceDesign, Dense, Margins
from fedipw.calibration.result import Calibration
from fedipw.calibration.solve import calibrated
from fedipw.errors import InputError
from fedipw.numerics.checks import some
from fedipw.tables.population import ENROLLED, ID, Population
from fedipw.tables.terms import Term, term_matrix, term_of

if TYPE_CHECKING:
    from fedipw.calibration.distances import Distance, InverseLogit
    from fedipw.calibration.result import Slack
    from fedipw.numerics.types import FloatArray
    from fedipw.tables.targets import Targets

OTHERS = "all others"
_REST = 1e-6  # of a category's share: what is left counts as nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balancing:
    """Columns that targets are about, with what they must average to."""

    design: BalanceDesign
    target: FloatArray  # (q,)
    se: FloatArray | None  # (q,)


def balancing(frame: pl.DataFrame, targets: Targets) -> Balancing:
    """Return the balance columns of the rows of a table, and their targets.

    Targets that are all levels of categories become ``Margins``: no matrix is built.
    """
    terms = [term_of(name, frame.schema) for name in targets.names]
    for term in terms:
        _require_known(term, frame)
    if all(term.level is not None for term in terms):
        return _margins(frame, terms, targets)
    return Balancing(
        design=Dense(term_matrix(terms, frame), targets.names), target=targets.values, se=targets.se
    )


def calibrated_table(
    frame: pl.DataFrame,
    targets: Targets,
    *,
    distance: Distance | InverseLogit | None = None,
    base: str | None = None,
    population_size: float | None = None,
    slack: Slack | None = None,
) -> tuple[pl.DataFrame, Calibration]:
    """Return ``unit_id, weight`` of the enrolled rows of a table, weights summing to 1.

    Rows with ``enrolled`` false are ignored; a table without that column lists enrolled clients.
    ``base`` names the column of base weights. See :func:`fedipw.calibration.calibrated`.

    Examples
    --------
    >>> from fedipw.tables import Targets
    >>> people = pl.DataFrame({"unit_id": ["a", "b", "c"], "os": ["ios", "ios", "android"]})
    >>> table, _ = calibrated_table(people, Targets.of({"os[android]": 0.6}))
    >>> table["weight"].round(6).to_list()
    [0.2, 0.2, 0.6]
    """
    people = Population(frame)
    rows = frame.filter(pl.Series(people.enrolled)) if ENROLLED in frame.columns else frame
    balance = balancing(rows, targets)
    found = calibrated(
        balance.design,
        balance.target,
        distance=distance,
        base=None if base is None else _base(rows, base),
        population_size=population_size,
        slack=slack,
        se=balance.se,
    )
    return pl.DataFrame({ID: rows[ID], "weight": found.weights}), found


def _base(rows: pl.DataFrame, name: str) -> FloatArray:
    if name not in rows.columns:
        raise InputError(f"No base weight column {name!r}; the table has {some(rows.columns)}.")
    if not rows[name].dtype.is_numeric():
        raise InputError(f"The base weight column {name!r} holds {rows[name].dtype}, not numbers.")
    return rows[name].cast(pl.Float64).fill_null(np.nan).to_numpy()


def _require_known(term: Term, frame: pl.DataFrame) -> None:
    """Raise where a category has missing values: a row without a level is in no share."""
    for factor in term.factors:
        missing = frame[factor.column].null_count()
        if missing:
            raise InputError(
                f"{factor.column!r} is missing in {missing} of {frame.height} enrolled rows, and "
                f"{term.name} is a target. Fill it, for instance with a level of its own, or drop "
                "the rows."
            )
        if factor.column in {ID, ENROLLED}:
            raise InputError(f"{term.name}: {factor.column!r} is no covariate.")


def _margins(frame: pl.DataFrame, terms: list[Term], targets: Targets) -> Balancing:
    """Return codes of each category; what a category's targets leave over is one more level."""
    columns: dict[str, list[int]] = {}
    for j, term in enumerate(terms):
        columns.setdefault(term.factors[0].column, []).append(j)
    codes = np.empty((frame.height, len(columns)), dtype=np.int32)
    levels, target, errors = [], [], []
    se = np.zeros(len(terms)) if targets.se is None else targets.se
    for v, (column, members) in enumerate(columns.items()):
        place = np.full(frame.height, len(members), dtype=np.int32)
        for k, j in enumerate(members):
            place[terms[j].values(frame) == 1.0] = k
        names = [targets.names[j] for j in members]
        shares = targets.values[members].tolist()
        rest = 1.0 - sum(shares)
        others = bool((place == len(members)).any())
        if others or rest > _REST:
            names.append(f"{column}[{OTHERS}]")
            shares.append(max(0.0, rest))
            errors.append([*se[members].tolist(), float(np.linalg.norm(se[members]))])
        else:
            errors.append(se[members].tolist())
        codes[:, v] = place
        levels.append(tuple(names))
        target.append(shares)
    return Balancing(
        design=Margins(codes, tuple(levels)),
        target=np.concatenate([np.array(t) for t in target]),
        se=None if targets.se is None else np.concatenate([np.array(e) for e in errors]),
    )
