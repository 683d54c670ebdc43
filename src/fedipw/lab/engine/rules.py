"""Rules of training with their settings: what each published method adds to a weighting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from fedipw.combining.memory import ControlVariates, LatestUpdates, Memory, UpdateMemory
from fedipw.errors import InputError
from fedipw.lab.engine.intermittent import (
    F3AST,
    CAFed,
    FedAWE,
    Focus,
    IntermittentRule,
    IntermittentSettings,
)
from fedipw.lab.engine.server import Adam, Amplified, Momentum, PlainStep, ServerStep, Yogi
from fedipw.lab.gaps import CUTOFF
from fedipw.lab.recipes import Recipe, Slot

if TYPE_CHECKING:
    from fedipw.lab.engine.local import LocalWork, RoundWork
    from fedipw.numerics import BoolArray, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProx:
    r"""The local loss plus :math:`(\mu/2) |y - \theta|^2`, see (O13)."""

    mu: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.mu < np.inf:
            raise InputError(f"mu must be 0 or more, not {self.mu!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FedNova:
    r"""Updates divided by the work behind them.

    .. math:: \tau_{eff} \sum_{i \in S} w_i \frac{\Delta_i}{\tau_i}, \qquad
       \tau_{eff} = \frac{\sum_S w_i \tau_i}{\sum_S w_i} \qquad (O16)

    takes the place of the sum in (O3); :math:`\tau_i = K_i`, with FedProx's pull
    :math:`\tau_i = \sum_{k < K_i} (1 - \eta\mu)^k`. With memory :math:`\tau_{eff} = \sum_E
    \omega_i \tau_i`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAU:
    """Participation by the mean gap between replies, a gap closed at ``cutoff`` rounds (P6)."""

    cutoff: int = CUTOFF

    def __post_init__(self) -> None:
        if self.cutoff < 1:
            raise InputError(f"cutoff must be at least 1 round, not {self.cutoff}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Debiased:
    """Participation by the share of rounds a client replied in (B1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold:
    """Control variates (O15), renewed after ``every`` rounds."""

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"every must be at least 1 round, not {self.every}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mifa:
    """Latest updates (O14); ``wait`` keeps the model until all were seen, this long at most."""

    wait: int | None = None

    def __post_init__(self) -> None:
        if self.wait is not None and self.wait < 1:
            raise InputError(f"wait must be at least 1 round, not {self.wait}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FedVarp:
    """Latest updates as a control (O5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings:
    """Settings of every rule; the fields are the rules' names."""

    fedprox: FedProx = field(default_factory=FedProx)
    fednova: FedNova = field(default_factory=FedNova)
    fedau: FedAU = field(default_factory=FedAU)
    debiased: Debiased = field(default_factory=Debiased)
    scaffold: Scaffold = field(default_factory=Scaffold)
    mifa: Mifa = field(default_factory=Mifa)
    fedvarp: FedVarp = field(default_factory=FedVarp)
    fedawe: FedAWE = field(default_factory=FedAWE)
    focus: Focus = field(default_factory=Focus)
    f3ast: F3AST = field(default_factory=F3AST)
    cafed: CAFed = field(default_factory=CAFed)
    amplified: Amplified = field(default_factory=Amplified)
    fedavgm: Momentum = field(default_factory=lambda: Momentum(size=0.1))
    fedadam: Adam = field(default_factory=lambda: Adam(size=0.02))
    fedyogi: Yogi = field(default_factory=Yogi)

    def server(self, recipe: Recipe) -> ServerStep | None:
        """Return the server's step of a method, none for the run's own."""
        if recipe.intermittent is not None and recipe.intermittent.moves_model:
            return PlainStep()
        name = recipe.rules.get(Slot.SERVER)
        return None if name is None else getattr(self, name)

    def memory(
        self, recipe: Recipe, enrolled: BoolArray, omega: FloatArray, start: FloatArray
    ) -> Memory | None:
        """Return an empty memory of a method that has one; ``omega`` (N,) sums to one."""
        if recipe.memory == "scaffold":
            return ControlVariates(enrolled, omega, start, every=self.scaffold.every)
        if recipe.memory == "mifa":
            return LatestUpdates(enrolled, omega, start, wait=self.mifa.wait)
        keeps = recipe.memory is not None and recipe.intermittent is None
        return UpdateMemory(enrolled, omega, start) if keeps else None

    def intermittent(
        self, recipe: Recipe, enrolled: BoolArray, omega: FloatArray, start: FloatArray
    ) -> IntermittentRule | None:
        """Return the rule of a method for clients that come and go, if it has one."""
        if recipe.intermittent is None:
            return None
        settings: IntermittentSettings = getattr(self, recipe.intermittent.memory)
        return settings.rule(enrolled, omega, start)

    def proximal(self, recipe: Recipe) -> float:
        """Return the pull of the local loss, 0 without FedProx."""
        return self.fedprox.mu if Slot.LOCAL in recipe.rules else 0.0


RULE_SETTINGS: Mapping[str, type] = {
    f.name: type(getattr(RuleSettings(), f.name)) for f in fields(RuleSettings)
}


def work_done(task: RoundWork, work: LocalWork) -> FloatArray:
    r"""Return the work :math:`\tau_i` behind each update in (O16), (m,).

    >>> from fedipw.lab.engine import LocalWork, RoundWork
    >>> task = RoundWork(clients=np.arange(2), theta=np.zeros(3), key=0, steps=np.array([1, 3]))
    >>> work_done(task, LocalWork())
    array([1., 3.])
    """
    steps = task.local_steps(work).astype(np.float64)
    pull = work.step_size * task.proximal
    if pull == 0.0:
        return steps
    done: FloatArray = (1.0 - (1.0 - pull) ** steps) / pull
    return done
