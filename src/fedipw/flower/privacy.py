"""Differential privacy: Gaussian noise scaled to a client's largest influence, and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianNoise:
    r"""Noise on the weighted sum of updates, before the server's own step.

    .. math:: \sum_{i \in S} w_i \Delta_i + N(0, (z\, C \max_{i \in S} |w_i|)^2 I), \qquad (O7)

    with updates clipped to norm C (O6) before they are weighted. It protects updates: two runs are
    neighbours if they differ in that one client's updates are zero in one of them. Its influence on
    a sum is then at most :math:`C \max |w_i|`, each round is one Gaussian mechanism of multiplier
    z, and R of them cost as much as one of :math:`z / \sqrt R`. There is no amplification by
    sampling, since participation is not secret. The server is trusted; weights,
    participation, refusals and metrics are public: :doc:`/flower-privacy` has all assumptions.

    Parameters
    ----------
    multiplier
        z, the noise's standard deviation over the largest influence.
    delta
        The delta at which epsilon is reported.
    max_epsilon
        A round that would spend more is not begun: training ends before it.
    seed
        For tests only: noise that can be repeated protects nothing.
    """

    multiplier: float
    delta: float
    max_epsilon: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        check_positive(self.multiplier, "multiplier")
        if not 0.0 < self.delta < 1.0:
            raise InputError(f"delta must lie between 0 and 1, not {self.delta!r}.")
        if self.max_epsilon is not None:
            check_positive(self.max_epsilon, "max_epsilon")


class NoisySums:
    """The noise of each round, accounted by Rényi differential privacy."""

    def __init__(self, settings: GaussianNoise, clients: int) -> None:
        self.settings = settings
        config = PrivacyConfig(
            target_delta=settings.delta,
            population_size=clients,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
            max_epsilon=settings.max_epsilon,
        )
        try:
            self._accountant = RdpAccountant(config)
        except ImportError as error:
            raise InputError(f"Accounting needs another package: {error}") from error
        self._event = GaussianPrivacyEvent(
            noise_multiplier=settings.multiplier, sample_size=clients, population_size=clients
        )

    @property
    def epsilon(self) -> float:
        """Epsilon spent so far."""
        if not self._accountant.num_releases:
            return 0.0
        return float(self._accountant.get_epsilon(self.settings.delta))

    @property
    def exhausted(self) -> str:
        """Why there is nothing left for another round; empty if there is."""
        limit = self.settings.max_epsilon
        if limit is None or not self._accountant.would_exceed(self._event):
            return ""
        return (
            f"another round would spend more than epsilon {limit:g} at delta "
            f"{self.settings.delta:g}; {self.epsilon:.4g} is spent. Train fewer rounds, or with "
            "more noise."
        )

    def spend(self) -> None:
        """Account for one noisy sum."""
        self._accountant.compose(self._event)

    def noise(
        self, index: int, model: Mapping[str, NDArray[Any]], influence: float
    ) -> dict[str, NDArray[Any]]:
        """Return noise in the shape of a model, for a round with this largest influence."""
        seed = self.settings.seed
        rng = np.random.default_rng() if seed is None else np.random.default_rng([seed, index])
        scale = self.settings.multiplier * influence
        return {
            key: (scale * rng.standard_normal(array.shape)).astype(array.dtype)
            for key, array in model.items()
        }

    def state(self) -> dict[str, Any]:
        """Return the privacy spent, as plain values."""
        return self._accountant.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Put a saved state back."""
        try:
            self._accountant.load_state_dict(state)
        except ValueError as error:
            raise InputError(
                f"The privacy spent before does not fit these settings: {error}"
            ) from error
