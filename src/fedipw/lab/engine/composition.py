"""One method put together: its weights, its local work, its memory and its server step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.combining.memory import ControlVariates, Memory, MemorySum, MemoryWeights
from fedipw.combining.regression import UpdateRegression
from fedipw.errors import InputError
from fedipw.lab.engine.rules import RuleSettings, work_done
from fedipw.lab.recipes import Slot

if TYPE_CHECKING:
    from fedipw.lab.engine.intermittent import IntermittentRule
    from fedipw.lab.engine.local import RoundWork, Trainer
    from fedipw.lab.engine.server import ServerStep
    from fedipw.lab.recipes import Recipe
    from fedipw.numerics import FloatArray
    from fedipw.weighting.balance import Balance
    from fedipw.weighting.pipeline import Regression
    from fedipw.weighting.weigher import RoundWeights


@dataclass(frozen=True, slots=True, eq=False)
class Regressed:
    """A regression of updates and the standardised balance columns of every client."""

    rule: UpdateRegression
    columns: FloatArray  # (N, q)
    enrolled: FloatArray  # (q,) their mean over the enrolled

    @classmethod
    def of(cls, balance: Balance, settings: Regression, size: int) -> Regressed:
        """Return it before the first round, for a model of ``size`` parameters."""
        columns = balance.standardised()
        rule = UpdateRegression(
            size, moments=columns.shape[1], main=balance.main, settings=settings
        )
        return cls(rule, columns, columns[balance.enrolled].mean(axis=0))

    def step(
        self, trainer: Trainer, task: RoundWork, weights: RoundWeights, scale: FloatArray | None
    ) -> FloatArray:
        """Return what takes the place of the weighted sum, (P,); ``scale`` (m,) is of updates."""
        by = 1.0 if scale is None else scale
        b = self.columns[task.clients]
        updates = trainer.updates(task) * np.reshape(by, (-1, 1))
        squares: FloatArray = np.sum(updates.astype(np.float64) ** 2, axis=1)
        return self.rule.step(weights, b, self.enrolled, lambda rows: rows @ updates, squares)


@final
@dataclass(eq=False)
class Composition:
    """How a method trains, given the weights of a round's replies."""

    weights: str  # name of the weights it reads
    _: KW_ONLY
    proximal: float = 0.0  # FedProx's pull (O13)
    evened: bool = False  # whether updates are divided by the work behind them (O16)
    server: ServerStep | None = None  # its own server step; the run's otherwise
    memory: Memory | None = None  # what it remembers
    intermittent: IntermittentRule | None = None  # in place of memory, for clients that come and go
    memory_weights: MemoryWeights | None = None  # under which enrollment weights
    reply_scale: float = 1.0  # of the replies' weights where memory has a use of them
    regression: Regressed | None = None  # of updates on balance columns (O20)
    _mean_work: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if (self._keeps is None) != (self.memory_weights is None):
            raise InputError("Memory and its enrollment weights come together.")

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        settings: RuleSettings,
        start: FloatArray,
        memory_weights: MemoryWeights | None = None,
        regression: Regressed | None = None,
    ) -> Composition:
        """Return a method's composition; one with memory needs weights for it."""
        memory = rule = None
        if recipe.memory is not None:
            if memory_weights is None:
                raise InputError(f"{recipe.name} needs enrollment weights for its memory.")
            enrolled = memory_weights.weighing.state.enrolled
            of = (recipe, enrolled, memory_weights.enrollment_weights, start)
            memory, rule = settings.memory(*of), settings.intermittent(*of)
        return cls(
            recipe.weighting,
            proximal=settings.proximal(recipe),
            evened=Slot.WORK in recipe.rules,
            server=settings.server(recipe),
            memory=memory,
            intermittent=rule,
            memory_weights=None if recipe.memory is None else memory_weights,
            reply_scale=memory_weights.scale if memory_weights and recipe.weighs_replies else 1.0,
            regression=regression,
        )

    def begin(self, trainer: Trainer, task: RoundWork) -> None:
        """Take all enrolled clients as if they trained, and check that the pull is stable."""
        pull = self.proximal * trainer.work.step_size
        if pull >= 1.0:
            raise InputError(
                f"FedProx's pull times the local step is {pull:.3g} and must be below 1: lower mu "
                "or the step size."
            )
        if not (self.follows_work or trainer.plain_sgd):
            raise InputError(
                f"{self._stepwise} needs local steps that are a step size times a gradient, and "
                "these clients have an optimizer of their own: leave it, or the rule, out."
            )
        if self.intermittent is not None:
            self.intermittent.begin(trainer, task)
        if self.evened and self.memory_weights is not None:
            work = work_done(replace(task, proximal=self.proximal), trainer.work)
            self._mean_work = float(self.memory_weights.enrollment_weights[task.clients] @ work)

    @property
    def reliance(self) -> float:
        """How far it relies on enrollment weights in the next round (O21)."""
        return 1.0 if self.regression is None else self.regression.rule.reliance

    @property
    def follows_work(self) -> bool:
        """Whether clients that do more local steps count for more."""
        if self.intermittent is not None and not self.intermittent.follows_work:
            return False
        return not (self.evened or isinstance(self.memory, ControlVariates))

    @property
    def counted(self) -> FloatArray | None:
        """Share of each client's weight that counts now, (N,); none if all count whole."""
        return None if self.intermittent is None else self.intermittent.counted

    @property
    def _stepwise(self) -> str:
        """The rule that needs plain gradient steps, for messages."""
        if self.evened:
            return "FedNova"
        return "SCAFFOLD" if self.intermittent is None else "FOCUS"

    @property
    def _keeps(self) -> Memory | IntermittentRule | None:
        return self.memory or self.intermittent

    def total(self, trainer: Trainer, task: RoundWork, given: RoundWeights) -> MemorySum:
        """Return what takes the place of the weighted sum in (O3), (P,)."""
        weights = given.weights
        task = replace(task, proximal=self.proximal)
        scale = self._scale(task, trainer, weights)
        if self.intermittent is not None:
            return self.intermittent.total(trainer, task, given.replies.index, scale)
        if self.memory is None or self.memory_weights is None:
            if self.regression is not None:
                return MemorySum(total=self.regression.step(trainer, task, given, scale))
            reached = weights if scale is None else weights * scale
            return MemorySum(total=trainer.total(task, reached))
        task = replace(task, corrections=self.memory.corrections(task.clients))
        updates = trainer.updates(task)
        if scale is not None:
            updates = updates * scale[:, None]
        lengths = trainer.work.step_size * task.local_steps(trainer.work).astype(np.float64)
        return self.memory.total(task.clients, updates, self.reply_scale * weights, lengths)

    def _scale(self, task: RoundWork, trainer: Trainer, weights: FloatArray) -> FloatArray | None:
        """Return the factor of each update in (O16), (m,), or nothing."""
        if not self.evened:
            return None
        work, mass = work_done(task, trainer.work), float(weights.sum())
        if self._mean_work is not None:
            return self._mean_work / work
        mean = float(weights @ work) / mass if mass else 0.0  # no reply carries weight
        return mean / work

    def state(self) -> dict[str, Any]:
        """Return the memory, if any."""
        kept = self._keeps or (self.regression and self.regression.rule)
        return kept.state() if kept else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved memory back."""
        kept = self._keeps or (self.regression and self.regression.rule)
        if kept:
            kept.restore(state)
