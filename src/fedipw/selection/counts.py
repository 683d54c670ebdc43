"""Numbers of samples of clients, from the table of clients: never from what clients report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics.checks import LARGEST, some
from fedipw.tables.columns import ID

if TYPE_CHECKING:
    from fedipw.numerics import IntArray
    from fedipw.selection.enrollment import EnrollmentStage


def member_counts(stage: EnrollmentStage, column: str) -> IntArray:
    """Return the numbers of samples of the members, (n,); raise if one is missing or below 1.

    >>> from fedipw.selection.enrollment import enrollment_stage
    >>> from fedipw.tables.population import Population
    >>> phones = pl.DataFrame({"unit_id": ["a", "b"], "age": [30, 61], "n": [12, 40]})
    >>> stage = enrollment_stage(Population.from_totals(phones, {"age": 41.0, "n": 20.0}))
    >>> member_counts(stage, "n").tolist(), mean_count(stage, "n")
    ([12, 40], 20.0)
    """
    members = stage.members
    if column not in members.covariates:
        raise InputError(
            f"examples: the table of clients has no column {column!r}; it has "
            f"{some(members.covariates)}."
        )
    values = members.frame[column]
    if not values.dtype.is_numeric():
        raise InputError(f"examples: {column!r} must hold numbers of samples, not {values.dtype}.")
    numbers = values.cast(pl.Float64).fill_null(np.nan).to_numpy().copy()
    numbers[members.gone] = 1.0  # they count no more
    good = (numbers >= 1.0) & (numbers <= LARGEST) & (numbers == np.floor(numbers))
    if not good.all():
        raise InputError(
            f"examples: {column!r} must be a whole number, 1 or more, for every enrolled client; "
            f"that of {some(members.frame[ID].filter(pl.Series(~good)).to_list())} is not."
        )
    return numbers.astype(np.int64)


def mean_count(stage: EnrollmentStage, column: str) -> float:
    r"""Return the mean number of samples of the population's clients, :math:`\bar n = T / N`.

    From the table of everybody it is the column's mean over the clients that take part; beside
    totals it is the target of that name. Where neither says, there is none, and an error.
    """
    if stage.coded is not None:
        table, rows = stage.coded.table, stage.coded.listed_rows()
        value = pl.col(column).cast(pl.Float64)
        bad = value.is_null() | ~value.is_finite() | (value < 0)
        mean, lacking = table.collect(rows.select(value.mean(), bad.sum().alias("(bad)"))).row(0)
        if lacking:
            raise InputError(
                f"examples: {lacking} clients of the population have no number of samples in "
                f"{column!r}, so their total is not known. Use a method whose weights sum to one, "
                "such as fedipw-hajek: it needs the counts of enrolled clients only."
            )
        return float(mean)
    targets = stage.population.targets
    if targets is not None and column in targets.names:
        return float(targets.values[targets.names.index(column)])
    raise InputError(
        f"examples: the population's mean of {column!r} is not among the totals, so the number of "
        "samples of clients that never enrolled is not known. Add it to the targets, or use a "
        "method whose weights sum to one, such as calibrated-entropy-hajek."
    )
