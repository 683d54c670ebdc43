"""Gaussian noise scaled to the largest influence of a client, and what it has cost so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianNoise:
    r"""Noise on the weighted sum of updates, before the server's own step.

    .. math:: \sum_{i \in S} w_i \Delta_i + N(0, (z\, C \max_{i \in S} |w_i|)^2 I), \qquad (O7)

    with updates clipped to norm C (O6) before they are weighted. What is protected are updates: two
    runs are neighbours if they differ in that one client's updates are zero in one of them. Its
    influence on a sum is then at most :math:`C \max |w_i|`, each round is one Gaussian mechanism of
    multiplier z, and R of them cost what one of multiplier :math:`z / \sqrt R` does. Nothing is
    gained from sampling, since who takes part is neither random nor secret. This holds if

    - the server is trusted: it sees every update, and noise is its own;
    - covariates, enrollment, who was invited, who replied and when, and so the weights and the
      largest of them, are public and the same in both runs: they must not depend on a client's
      training data;
    - so is which replies the screen refused: a client whose update is beyond ``max_norm`` or not
      finite shows just that, in the weights of all others and in the ledger;
    - metrics that clients report, in training and evaluation, are public: they get no noise;
    - the wrapped strategy reads updates through their weighted mean alone, as Flower's own do;
    - only models of closed rounds are released: a round that a crash cut off is trained anew with
      fresh noise, and the sum it had before does not count;
    - numbers count as real numbers: noise is NumPy's (PCG64), rounded to the model's type, and not
      safe against attacks on low-order digits. Noise far below the resolution of large parameters
      in float32 is lost.

    Parameters
    ----------
    multiplier
        z, the noise's standard deviation over the largest influence.
    delta
        At which epsilon is reported.
    max_epsilon
        A round that would spend more is not begun: training ends before it.
    seed
        For tests: noise somebody can repeat protects nothing.
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
    """Noise for round after round, accounted by Rényi differential privacy."""

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
        """Return what was spent, as plain values."""
        return self._accountant.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Put a saved state back."""
        try:
            self._accountant.load_state_dict(state)
        except ValueError as error:
            raise InputError(
                f"The privacy spent before does not fit these settings: {error}"
            ) from error
