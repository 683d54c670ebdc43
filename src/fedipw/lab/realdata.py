"""Populations of real clients: nothing is made up but who takes part, so the truth is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.clients import ClientData
from fedipw.lab.mechanisms.daily import DailyParticipation
from fedipw.lab.mechanisms.enrollment import LogisticEnrollment
from fedipw.lab.realtables import RealCounts, RealTable, real_source, real_table
from fedipw.lab.testbed import PopulationDraw
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray, IntArray

ENROLLMENT = (1.0, 0.8)  # coefficients of the two drivers, as on the testbed
STRENGTH = 0.75  # at 1 the least enrollment probability of some sets is about 0.003
PARTICIPATION = (0.4, 0.6)
LOADINGS = (0.0, 0.4)  # of the drivers on the pre-round covariate


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPopulation:
    """Clients of a real data set, all of them or a random part.

    The table of the population holds the data set's client-level covariates. They are no features
    of the model unless ``covariates_in_model`` is true: then what selection depends on is in the
    model too, and weighting has little left to mend.

    Parameters
    ----------
    name
        ``randhie``, ``insteval-students``, ``chem97``, ``nlswork``, ``insteval-lecturers`` or
        ``vietnam``.
    size
        Number of clients drawn without replacement; all by default. Columns keep the scale of the
        whole data set.
    covariates_in_model
        Whether the model has the covariates as features.

    Examples
    --------
    >>> draw = RealPopulation(name="vietnam").draw(np.random.default_rng(0))
    >>> draw.population.covariates, draw.clients.features.shape
    (('expenditure', 'schooling', 'insured_share'), (27765, 6))
    """

    name: str
    size: int | None = None
    covariates_in_model: bool = False

    def __post_init__(self) -> None:
        real_source(self.name)
        if self.size is not None and self.size < 1:
            raise InputError(f"size must be 1 or more, or left out for all, not {self.size}.")

    @property
    def counts(self) -> RealCounts:
        """Rows and clients of the whole data set, read, dropped and kept."""
        return real_table(self.name).counts

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the model's features, (d,)."""
        table = real_table(self.name)
        return table.feature_names + self.covariates_in_model * table.covariate_names

    def draw(self, rng: np.random.Generator) -> PopulationDraw:
        """Return the population and its clients' data; chance only picks a part of given size."""
        table = real_table(self.name)
        N = table.counts.clients
        if self.size is None:
            chosen = np.arange(N)
        elif self.size <= N:
            chosen = np.sort(rng.choice(N, self.size, replace=False))
        else:
            raise InputError(f"{self.name} has {N} clients and size = {self.size} were asked for.")
        Z = table.covariates[chosen]
        columns = {name: Z[:, j] for j, name in enumerate(table.covariate_names)}
        ids = {"unit_id": table.unit_ids[chosen]}
        clients = _clients(table, chosen, Z if self.covariates_in_model else None)
        return PopulationDraw(population=Population.of({**ids, **columns}), clients=clients)

    def enrollment(self, *, strength: float = STRENGTH, rate: float = 0.5) -> LogisticEnrollment:
        """Return enrollment on the data set's two drivers.

        >>> RealPopulation(name="randhie").enrollment().coefficients
        {'schooling': 1.0, 'income': 0.8}
        """
        return LogisticEnrollment(
            coefficients=self._loaded(ENROLLMENT), strength=strength, rate=rate
        )

    def participation(self, *, rate: float = 0.25) -> DailyParticipation:
        """Return daily participation on the same drivers, with the testbed's coefficients."""
        return DailyParticipation(
            coefficients=self._loaded(PARTICIPATION),
            covariate_loadings=self._loaded(LOADINGS),
            rate=rate,
        )

    def _loaded(self, values: tuple[float, float]) -> dict[str, float]:
        drivers = real_source(self.name).drivers.items()
        return {name: sign * value for (name, sign), value in zip(drivers, values, strict=True)}


def _clients(table: RealTable, chosen: IntArray, added: FloatArray | None) -> ClientData:
    """Return the rows of the chosen clients, with their covariates as features where added."""
    counts = np.diff(table.offsets)[chosen]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = np.repeat(table.offsets[chosen] - offsets[:-1], counts) + np.arange(offsets[-1])
    features = table.features[rows]
    if added is not None:
        features = np.hstack([features, np.repeat(added, counts, axis=0)])
    return ClientData(
        features=np.ascontiguousarray(features), labels=table.labels[rows], offsets=offsets
    )
