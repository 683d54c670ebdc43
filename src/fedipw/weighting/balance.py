"""What is known of the population by its means: balance columns of clients and their targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedipw.calibration import (
    Calibration,
    Distance,
    Entropy,
    InverseLogit,
    Slack,
    calibrated,
)
from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows
from fedipw.selection.enrollment import BalanceColumns

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balance:
    """Balance columns b of the clients of a table and their population means.

    With a full table the means are the table's own; with totals alone the table lists the enrolled
    and the means come from outside, with standard errors where they are estimates.
    """

    names: tuple[str, ...]
    matrix: FloatArray  # (N, q), one row per client of the table
    enrolled: BoolArray  # (N,)
    mean: FloatArray  # mu_b, (q,)
    population_size: float
    se: FloatArray | None = None  # (q,)
    leading: int | None = None  # columns that are covariates, before squares and products
    base: FloatArray | None = None  # (N,) weights that calibration starts from, alike if none

    def __post_init__(self) -> None:
        check_rows(len(self.matrix), enrolled=self.enrolled)
        check_rows(len(self.names), mean=self.mean)
        if self.matrix.shape[1] != len(self.names):
            raise InputError(f"{self.matrix.shape[1]} balance columns, {len(self.names)} names.")

    @classmethod
    def of(
        cls, columns: BalanceColumns, enrolled: BoolArray, population_size: float | None
    ) -> Balance:
        """Return the balance of clients of whom some are enrolled, (n,).

        >>> columns = BalanceColumns(names=("age",), matrix=np.array([[20.0], [30.0], [60.0]]),
        ...                          mean=np.array([45.0]))
        >>> balance = Balance.of(columns, np.ones(3, dtype=bool), population_size=100)
        >>> balance.enrollment_weights(balance.calibration(Entropy())).round(4)
        array([0.1889, 0.2482, 0.563 ])
        """
        return cls(
            names=columns.names,
            matrix=columns.matrix,
            enrolled=enrolled,
            mean=columns.mean,
            population_size=np.nan if population_size is None else float(population_size),
            se=columns.se,
            leading=columns.leading,
            base=columns.base,
        )

    @property
    def main(self) -> int:
        """Number of columns that are covariates themselves, the first."""
        return len(self.names) if self.leading is None else self.leading

    @property
    def scale(self) -> FloatArray:
        """Root mean square distance of the enrolled to the population's mean, (q,).

        1 where it is zero.
        """
        inside = self.matrix[self.enrolled]
        spread = np.sqrt(np.mean((inside - self.mean) ** 2, axis=0))
        return np.where(spread > 0.0, spread, 1.0)

    def standardised(
        self, rows: IntArray | slice = slice(None), scale: FloatArray | None = None
    ) -> FloatArray:
        """Return the columns of some clients about the population's mean, in units of their scale.

        ``scale`` (q,) is one of an earlier time, (m, q).
        """
        b: FloatArray = (self.matrix[rows] - self.mean) / (self.scale if scale is None else scale)
        return b

    def leading_columns(self) -> Balance:
        """Return the balance of the covariates alone, without squares and products."""
        return self._of(np.arange(len(self.names)) < self.main)

    def varying(self) -> Balance:
        """Return the balance of the columns that vary among the enrolled."""
        return self._of(np.ptp(self.matrix[self.enrolled], axis=0) > 0.0)

    def _of(self, kept: BoolArray) -> Balance:
        return replace(
            self,
            names=tuple(name for name, keep in zip(self.names, kept, strict=True) if keep),
            matrix=self.matrix[:, kept],
            mean=self.mean[kept],
            se=None if self.se is None else self.se[kept],
            leading=int(kept[: self.main].sum()),
        )

    def calibration(
        self,
        distance: Distance | InverseLogit,
        *,
        noise_aware: bool = False,
        slack: Slack | None = None,
        base: FloatArray | None = None,
    ) -> Calibration:
        """Return weights on the enrolled that reproduce the means, in table order.

        With ``noise_aware`` the means are shrunk towards the enrolled by their standard errors;
        ``base`` (n,) are weights to start from, times those of the clients themselves.
        """
        if self.base is not None:
            base = self.base[self.enrolled] * (1.0 if base is None else base)
        return calibrated(
            self.matrix[self.enrolled],
            self.mean,
            distance=distance,
            population_size=self.population_size if distance.needs_size else None,
            se=self.se if noise_aware else None,
            slack=slack,
            base=base,
            names=self.names,
        )

    def expected_weights(
        self,
        distance: Distance | InverseLogit,
        enrollment_prob: FloatArray,
        *,
        noise_aware: bool = False,
    ) -> FloatArray:
        r"""Return q of every client calibrated in the mean over enrollment, (N,); simulations only.

        .. math:: \sum_i \pi^{enr}_i q_i b_i = \mu_b \text{ over the whole table} \qquad (C11)

        What calibration would settle at in a population of many such clients: its bias without the
        chance of one enrollment draw.
        """
        matrix, prob, size = self.matrix, enrollment_prob, self.population_size
        if not isinstance(distance, InverseLogit):
            found = calibrated(
                matrix,
                self.mean,
                distance=distance,
                base=prob,
                se=self.se if noise_aware else None,
                names=self.names,
            )
            return found.weights / prob
        inside = prob.sum()
        outside = (size * self.mean - prob @ matrix) / (size - inside)
        others = calibrated(
            matrix, outside, distance=Entropy(), base=prob, population_size=size - inside,
            names=self.names,
        )  # fmt: skip
        return (1.0 + others.ratio) / size

    def enrollment_weights(self, found: Calibration) -> FloatArray:
        """Return q of every client of the table, (N,), by a calibration of the enrolled.

        A client that is not enrolled gets the weight it would have with its columns; simulations
        use it to average over enrollment.
        """
        out = found.weights_at(self.matrix)
        out[self.enrolled] = found.weights
        return out
