"""What is known of the population by its means: balance columns of clients and their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from fedipw.calibration import Calibration, Distance, Entropy, InverseLogit, calibrated
from fedipw.errors import InputError
from fedipw.numerics.checks import check_finite, check_rows
from fedipw.tables.targets import Targets
from fedipw.tables.terms import Term, rich_terms, term_matrix, term_of

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray
    from fedipw.tables.population import Population

CLIENTS_PER_MOMENT = 25


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

    def __post_init__(self) -> None:
        check_rows(len(self.matrix), enrolled=self.enrolled)
        check_rows(len(self.names), mean=self.mean)
        if self.matrix.shape[1] != len(self.names):
            raise InputError(f"{self.matrix.shape[1]} balance columns, {len(self.names)} names.")

    @classmethod
    def of(cls, population: Population, terms: Sequence[Term]) -> Balance:
        """Return the balance of a full population table on some terms."""
        matrix = np.ascontiguousarray(term_matrix(terms, population.frame))
        names = tuple(t.name for t in terms)
        check_finite(matrix, names, "population table")
        return cls(
            names=names,
            matrix=matrix,
            enrolled=population.enrolled,
            mean=matrix.mean(axis=0),
            population_size=population.size,
        )

    @classmethod
    def of_targets(
        cls, enrolled: pl.DataFrame, targets: Targets, population_size: float
    ) -> Balance:
        """Return the balance of a table of enrolled clients alone, and totals from outside.

        >>> people = pl.DataFrame({"unit_id": [1, 2, 3], "age": [20.0, 30.0, 60.0]})
        >>> balance = Balance.of_targets(people, Targets.of({"age": 45.0}), population_size=100)
        >>> balance.enrollment_weights(Entropy()).round(4)
        array([0.1889, 0.2482, 0.563 ])
        """
        terms = [term_of(name, enrolled.schema) for name in targets.names]
        matrix = np.ascontiguousarray(term_matrix(terms, enrolled))
        check_finite(matrix, targets.names, "enrolled table")
        return cls(
            names=targets.names,
            matrix=matrix,
            enrolled=np.ones(enrolled.height, dtype=np.bool_),
            mean=targets.values,
            population_size=population_size,
            se=targets.se,
        )

    @classmethod
    def rich(cls, population: Population, columns: Sequence[str]) -> Balance:
        """Return the balance on columns, squares and products, as far as clients allow.

        Squares and products are taken if at least 25 enrolled clients stand behind each moment;
        else squares alone if that leaves 25; else the columns. Calibration on more moments than
        that costs more variance than it removes.
        """
        terms = rich_terms(columns, population.frame)
        room = population.enrolled_size // CLIENTS_PER_MOMENT
        single = tuple(t for t in terms if len(t.factors) == 1)
        main = tuple(t for t in single if t.factors[0].power == 1)
        fitting = [chosen for chosen in (terms, single) if len(chosen) <= room]
        return cls.of(population, fitting[0] if fitting else main)

    def calibration(self, distance: Distance | InverseLogit) -> Calibration:
        """Return weights on the enrolled that reproduce the means, in table order."""
        needs_size = isinstance(distance, InverseLogit)
        return calibrated(
            self.matrix[self.enrolled],
            self.mean,
            distance=distance,
            population_size=self.population_size if needs_size else None,
            se=self.se,
            names=self.names,
        )

    def expected_weights(
        self, distance: Distance | InverseLogit, enrollment_prob: FloatArray
    ) -> FloatArray:
        r"""Return q of every client calibrated in the mean over enrollment, (N,); simulations only.

        .. math:: \sum_i \pi^{enr}_i q_i b_i = \mu_b \text{ over the whole table} \qquad (C11)

        What calibration would settle at in a population of many such clients: its bias without the
        chance of one enrollment draw.
        """
        matrix, prob, size = self.matrix, enrollment_prob, self.population_size
        if not isinstance(distance, InverseLogit):
            found = calibrated(
                matrix, self.mean, distance=distance, base=prob, se=self.se, names=self.names
            )
            return found.weights / prob
        inside = prob.sum()
        outside = (size * self.mean - prob @ matrix) / (size - inside)
        others = calibrated(
            matrix, outside, distance=Entropy(), base=prob, population_size=size - inside,
            names=self.names,
        )  # fmt: skip
        return (1.0 + others.ratio) / size

    def enrollment_weights(self, distance: Distance | InverseLogit) -> FloatArray:
        """Return q of every client of the table, (N,).

        A client that is not enrolled gets the weight it would have with its columns; simulations
        use it to average over enrollment.
        """
        found = self.calibration(distance)
        out = found.weights_at(self.matrix)
        out[self.enrolled] = found.weights
        return out
