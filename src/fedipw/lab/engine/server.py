"""The server's step: what is made of a round's weighted sum of updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

State = Mapping[str, "FloatArray"]  # empty before the first step


class ServerStep(Protocol):
    """How the model moves, given the weighted sum of updates; state is passed and returned."""

    def step(
        self, theta: FloatArray, total: FloatArray, state: State, index: int
    ) -> tuple[FloatArray, State]:
        """Return the next model (d,) and state, for the sum (d,) of round ``index``."""


@final
@dataclass(frozen=True, slots=True)
class PlainStep:
    r"""The sum times a step size, :math:`\theta + \gamma \sum_S w \Delta` (O3)."""

    size: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.size, "size")

    def step(
        self, theta: FloatArray, total: FloatArray, state: State, index: int
    ) -> tuple[FloatArray, State]:
        """Return the next model, (d,)."""
        del index
        return theta + self.size * total, state


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum:
    r"""Server momentum.

    .. math:: m \leftarrow \beta m + \sum_S w \Delta, \quad \theta \leftarrow \theta + \gamma m
       \qquad (O9)
    """

    size: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        check_positive(self.size, "size")
        _check_decay(self.beta, "beta")

    def step(
        self, theta: FloatArray, total: FloatArray, state: State, index: int
    ) -> tuple[FloatArray, State]:
        """Return the next model (d,) and momentum."""
        del index
        m = self.beta * state["m"] + total if state else total.copy()
        return theta + self.size * m, {"m": m}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adaptive:
    """Rules that divide by a root mean square of which each has its own."""

    size: float = 0.1
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_positive(self.size, "size")
        check_positive(self.tau, "tau")
        _check_decay(self.beta_1, "beta_1")
        _check_decay(self.beta_2, "beta_2")

    def step(
        self, theta: FloatArray, total: FloatArray, state: State, index: int
    ) -> tuple[FloatArray, State]:
        """Return the next model (d,) and moments."""
        zero = np.zeros_like(total)
        m = self.beta_1 * state.get("m", zero) + (1.0 - self.beta_1) * total
        v = self._second(state.get("v", zero), total**2)
        size = self.size * self._correction(index)
        return theta + size * m / (np.sqrt(v) + self.tau), {"m": m, "v": v}

    def _second(self, v: FloatArray, square: FloatArray) -> FloatArray:
        """Return the second moment after another square, (d,)."""
        return self.beta_2 * v + (1.0 - self.beta_2) * square

    def _correction(self, index: int) -> float:
        """Return the factor of a round's step, for moments that start at zero."""
        scale = np.sqrt(1.0 - self.beta_2 ** (index + 1.0))
        return float(scale / (1.0 - self.beta_1 ** (index + 1.0)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(_Adaptive):
    r"""FedAdam (Reddi et al. 2021) with g the weighted sum, of which it keeps the size.

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
       v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
       \theta \leftarrow \theta + \gamma
       \frac{\sqrt{1 - \beta_2^{r+1}}}{1 - \beta_1^{r+1}} \frac{m}{\sqrt v + \tau} \qquad (O10)

    in round r, as Flower has it.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Yogi(_Adaptive):
    r"""FedYogi (Reddi et al. 2021): v moves by signs, so that it forgets slowly.

    .. math:: v \leftarrow v - (1 - \beta_2)\, g^2\, \mathrm{sign}(v - g^2), \quad
       \theta \leftarrow \theta + \gamma \frac{m}{\sqrt v + \tau} \qquad (O11)

    with m as in (O10).
    """

    size: float = 0.01

    def _second(self, v: FloatArray, square: FloatArray) -> FloatArray:
        moved: FloatArray = v - (1.0 - self.beta_2) * square * np.sign(v - square)
        return moved

    def _correction(self, index: int) -> float:
        del index
        return 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Amplified:
    r"""Plain steps, and every P rounds a longer stride along what they made (Wang and Ji 2022).

    .. math:: \theta \leftarrow \theta + (a - 1)\,(\theta - \theta_{prev}) \qquad (O17)

    after the plain step (O3) of every P-th round; :math:`\theta_{prev}` is the model after the
    stride before. If nobody replied in such a round the stride waits for the next reply. It is
    stable for factors below 2 wherever plain steps are.
    """

    every: int = 10  # P, in rounds
    factor: float = 1.5  # the amplification a
    size: float = 1.0  # of the plain step

    def __post_init__(self) -> None:
        check_positive(self.size, "size")
        check_positive(self.factor, "factor")
        if self.every < 1:
            raise InputError(f"every must be at least 1 round, not {self.every}.")

    def step(
        self, theta: FloatArray, total: FloatArray, state: State, index: int
    ) -> tuple[FloatArray, State]:
        """Return the next model (d,), and the model and round of the last stride."""
        anchor, since = state.get("anchor", theta), state.get("since", np.zeros(1))
        following = theta + self.size * total
        if index - since[0] < self.every:
            return following, {"anchor": anchor, "since": since}
        following = following + (self.factor - 1.0) * (following - anchor)
        return following, {"anchor": following, "since": np.array([float(index)])}


def _check_decay(value: float, name: str) -> None:
    if not 0.0 <= value < 1.0:
        raise InputError(f"{name} must lie in [0, 1), not {value!r}.")
