"""Server steps by optax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np

from fedipw.errors import InputError

if TYPE_CHECKING:
    import optax

    from fedipw.lab.engine.server import State
    from fedipw.numerics.types import FloatArray


@final
@dataclass(frozen=True, slots=True)
class OptaxStep:
    r"""A server step by any optax transformation, in float64.

    .. math:: (u, o) \leftarrow \mathrm{opt}\Big(-\sum_{i \in S} w_i \Delta_i,\, o,\, \theta\Big),
       \quad \theta \leftarrow \theta + u \qquad (O19)

    The weighted sum with its sign changed stands for the gradient. The state is kept as plain
    arrays, so that a run can be saved and resumed.

    >>> import optax
    >>> server = OptaxStep(optax.sgd(0.5, momentum=0.9))
    >>> theta, state = server.step(np.zeros(2), np.array([1.0, -2.0]), {}, 1)
    >>> theta.tolist(), {name: leaf.tolist() for name, leaf in state.items()}
    ([0.5, -1.0], {'0': [-1.0, 2.0]})
    """

    optimizer: optax.GradientTransformation

    def step(
        self, theta: FloatArray, total: FloatArray, state: State, index: int
    ) -> tuple[FloatArray, State]:
        """Return the next model (P,) and the leaves of optax's state, by number."""
        del index
        with jax.enable_x64(True):
            first = jax.eval_shape(self.optimizer.init, theta)
            leaves, structure = jax.tree.flatten(first)
            if state:
                before = jax.tree.unflatten(structure, _restored(state, leaves))
            else:
                before = self.optimizer.init(theta)
            following, after = _stepped(self.optimizer, theta, total, before)
        kept = {str(k): np.asarray(leaf) for k, leaf in enumerate(jax.tree.leaves(after))}
        return np.array(following), kept


def _restored(state: State, leaves: list[jax.ShapeDtypeStruct]) -> list[Any]:
    found = [state.get(str(k)) for k in range(len(leaves))]
    shapes = [None if value is None else value.shape for value in found]
    if len(state) != len(leaves) or shapes != [leaf.shape for leaf in leaves]:
        raise InputError("The saved state is of another server optimizer or model.")
    return found


@partial(jax.jit, static_argnums=0)
def _stepped(
    optimizer: optax.GradientTransformation, theta: Any, total: Any, state: Any
) -> tuple[jax.Array, Any]:
    moves, state = optimizer.update(-total, state, theta)
    return theta + moves, state
