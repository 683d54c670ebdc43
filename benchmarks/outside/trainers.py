"""Local training on any gradient, in NumPy: the models of published experiments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fedipw.lab.engine import LocalWork, RoundWork
    from fedipw.numerics import FloatArray, IntArray

# the gradients (m, P) of clients (m,) at models of their own (m, P), in a round and a local step
Gradient = Callable[["IntArray", "FloatArray", int, int], "FloatArray"]


@dataclass(kw_only=True)
class GradientTrainer:
    """Gradient steps of a round's clients side by side; ``work`` may be changed between rounds."""

    gradient: Gradient
    loss: Callable[[FloatArray, IntArray], FloatArray]  # (m,) of clients at a model
    start: FloatArray  # (P,)
    work: LocalWork
    clients: int  # N
    plain_sgd: bool = True
    momentum: float = 0.0  # of local steps
    velocity: FloatArray | None = None  # (N, P) kept between rounds, if momentum is

    def updates(self, task: RoundWork) -> FloatArray:
        """Return each client's update (O2), (m, P)."""
        theta, steps = task.theta, task.local_steps(self.work)
        y = np.tile(theta, (len(task.clients), 1))
        velocity = np.zeros_like(y) if self.velocity is None else self.velocity[task.clients]
        for k in range(int(steps.max())):
            slope = self.gradient(task.clients, y, task.key, k) + task.proximal * (y - theta)
            if task.corrections is not None:
                slope = slope + task.corrections
            velocity = self.momentum * velocity + slope
            y = y - self.work.step_size * velocity * (steps > k)[:, None]
        if self.velocity is not None:
            self.velocity[task.clients] = velocity
        moved: FloatArray = y - theta
        return moved

    def total(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return the weighted sum of updates, (P,)."""
        total: FloatArray = weights @ self.updates(task)
        return total

    def sums(self, task: RoundWork, weights: FloatArray) -> FloatArray:
        """Return weighted sums of updates, (k, P), for rows of weights, (k, m)."""
        sums: FloatArray = weights @ self.updates(task)
        return sums

    def losses(self, theta: FloatArray, clients: IntArray | None = None) -> FloatArray:
        """Return the loss of these clients or of all at a model."""
        return self.loss(theta, np.arange(self.clients) if clients is None else clients)
