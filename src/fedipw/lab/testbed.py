"""The synthetic population: client covariates that move data, labels and selection together.

All chance of a run comes from the named streams of one seed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedipw.errors import InputError
from fedipw.lab.clients import ClientData
from fedipw.numerics.checks import check_positive
from fedipw.numerics.logistic import sigmoids
from fedipw.tables.population import Population

if TYPE_CHECKING:
    from fedipw.lab.mechanisms.base import ParticipationProcess
    from fedipw.numerics import BoolArray, FloatArray, IntArray

_BLOCK_CLIENTS = 4096  # part of the definition of a draw: features and labels alternate by block


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """One generator for each source of chance.

    A stream's draws do not depend on how much another was used, so every scheme, and every point of
    a sweep, sees the same clients, the same enrollment uniforms and the same rounds.

    >>> a, b = Streams.of(7), Streams.of(7)
    >>> _ = a.population.random(1000)
    >>> float(a.enrollment.random()) == float(b.enrollment.random())
    True
    """

    population: np.random.Generator
    enrollment: np.random.Generator
    participation: np.random.Generator
    training: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Streams:
        """Return the streams of a seed."""
        names = tuple(f.name for f in fields(cls))
        children = np.random.SeedSequence(seed).spawn(len(names))
        return cls(**dict(zip(names, map(np.random.default_rng, children), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedSelection:
    """Both stages of a population as they were observed."""

    enrolled: BoolArray  # (N,)
    process: ParticipationProcess


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PopulationDraw:
    """One finite population: its table (no enrollment yet) and every client's data.

    Selection is to be simulated unless it is ``observed``.
    """

    population: Population
    clients: ClientData
    observed: ObservedSelection | None = None


class PopulationModel(Protocol):
    """Where finite populations come from: the testbed, or real clients."""

    def draw(self, rng: np.random.Generator) -> PopulationDraw:
        """Return a population and its clients' data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    r"""Federated logistic regression with covariate and concept shift along Z.

    .. math::
       Z_i &= (\pm 1,\; N(0,1) \text{ clipped to } \pm 2.5,\; N(0,1)), \qquad
       \tilde Z_i = Z_i \odot \text{loadings} \\
       x_{ij} &= \text{shift}\, \tilde Z_i M + N(0, I_d), \qquad
       W_i = w_0 + \text{concept\_shift}\, \tilde Z_i C + \text{coefficient\_noise}\, N(0, I_d) \\
       P(y_{ij} = 1) &= \sigma(x_{ij}' W_i + a_i), \qquad
       a_i = 0.6 z_{i1} + 0.6 z_{i2} + N(0, 0.15^2) \qquad (D1)

    M and C (3 x d, unit rows) and :math:`w_0` (norm 2) come from ``design_seed`` and stay fixed
    over seeds. ``rows_max`` gives clients between ``rows`` and ``rows_max`` rows.

    >>> draw = Testbed(size=50).draw(np.random.default_rng(0))
    >>> draw.population.covariates, draw.clients.features.shape
    (('z1', 'z2', 'z3'), (1000, 5))
    """

    __test__ = False  # not a test class

    size: int = 1000
    rows: int = 20
    rows_max: int | None = None
    features: int = 5
    shift: float = 0.6
    loadings: tuple[float, float, float] = (1.0, 1.0, 0.3)
    concept_shift: float = 1.0
    coefficient_norm: float = 2.0
    coefficient_noise: float = 0.3
    intercept_loadings: tuple[float, float, float] = (0.6, 0.6, 0.0)
    intercept_noise: float = 0.15
    clip: float = 2.5
    design_seed: int = 12345

    def __post_init__(self) -> None:
        for name in ("size", "rows", "features"):
            value = check_positive(getattr(self, name), name)
            if value != int(value):
                raise InputError(f"{name} must be a whole number, not {value!r}.")
        if self.rows_max is not None and self.rows_max < self.rows:
            raise InputError(f"rows_max = {self.rows_max} is below rows = {self.rows}.")

    def design(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return M (3, d), C (3, d) and w_0 (d,), the same for every seed."""
        rng = np.random.default_rng(self.design_seed)
        shape = (3, self.features)
        M, C, w0 = (rng.standard_normal(s) for s in (shape, shape, self.features))
        return (
            M / np.linalg.norm(M, axis=1, keepdims=True),
            C / np.linalg.norm(C, axis=1, keepdims=True),
            self.coefficient_norm * w0 / np.linalg.norm(w0),
        )

    def draw(self, rng: np.random.Generator) -> PopulationDraw:
        """Return a population and its clients' data, (D1)."""
        N = self.size
        Z = np.empty((N, 3))
        Z[:, 0] = 2.0 * rng.integers(0, 2, N) - 1.0
        Z[:, 1] = np.clip(rng.standard_normal(N), -self.clip, self.clip)
        Z[:, 2] = rng.standard_normal(N)
        columns = {"unit_id": np.arange(N), **{f"z{j + 1}": Z[:, j] for j in range(3)}}
        return PopulationDraw(population=Population.of(columns), clients=self.clients_given(Z, rng))

    def clients_given(self, Z: FloatArray, rng: np.random.Generator) -> ClientData:
        """Return data of clients with these covariates (n, 3), all but Z drawn anew."""
        M, C, w0 = self.design()
        n = len(Z)
        loaded = Z * np.array(self.loadings)
        W = w0 + self.concept_shift * loaded @ C
        W += self.coefficient_noise * rng.standard_normal((n, self.features))
        intercepts = Z @ np.array(self.intercept_loadings)
        intercepts += self.intercept_noise * rng.standard_normal(n)
        counts = np.full(n, self.rows, dtype=np.int64)
        if self.rows_max is not None:
            counts = rng.integers(self.rows, self.rows_max, n, endpoint=True)
        return _local_data(self.shift * loaded @ M, W, intercepts, counts, rng)


def _local_data(
    means: FloatArray,
    coefficients: FloatArray,
    intercepts: FloatArray,
    counts: IntArray,
    rng: np.random.Generator,
) -> ClientData:
    """Draw features and labels block by block into arrays made once."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    features = np.empty((int(offsets[-1]), means.shape[1]))
    labels = np.empty(int(offsets[-1]), dtype=np.int8)
    for first in range(0, len(counts), _BLOCK_CLIENTS):
        last = min(first + _BLOCK_CLIENTS, len(counts))
        rows = slice(int(offsets[first]), int(offsets[last]))
        owner = np.repeat(np.arange(first, last), counts[first:last])
        block = features[rows]
        rng.standard_normal(out=block)
        block += means[owner]
        score = np.einsum("ij,ij->i", block, coefficients[owner]) + intercepts[owner]
        labels[rows] = rng.random(len(score)) < sigmoids(score, 0.0)
    return ClientData(features=features, labels=labels, offsets=offsets)
