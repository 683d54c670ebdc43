"""Named, independent random streams of one seed: common random numbers for every scheme."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_NAMES = ("population", "enrollment", "participation", "training")


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
        children = np.random.SeedSequence(seed).spawn(len(_NAMES))
        made = {n: np.random.default_rng(c) for n, c in zip(_NAMES, children, strict=True)}
        return cls(**made)
