"""Weighted federated logistic regression: the target objective and the one a scheme minimises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import expit

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows
from fedipw.numerics.logistic import logistic_losses, logistic_sums, softplus_divergence
from fedipw.numerics.newton import NewtonResult, Sums, newton_minimum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedipw.lab.clients import ClientData
    from fedipw.numerics import FloatArray


def target_weights(clients: ClientData, *, by_sample: bool = False) -> FloatArray:
    """Return each client's share in the target objective: equal, or by its number of rows, (N,)."""
    counts = clients.counts
    return counts / counts.sum() if by_sample else np.full(clients.size, 1.0 / clients.size)


@dataclass(frozen=True, slots=True, eq=False)
class FederatedLogistic:
    r"""A weighted mean of the clients' regularised logistic losses.

    .. math::
       f_i(\theta) = \frac{1}{n_i} \sum_j \left[\log(1 + e^{u_{ij}}) - y_{ij} u_{ij}\right]
       + \frac{l_2}{2} |\theta|^2, \qquad
       F_v(\theta) = \frac{\sum_i v_i f_i(\theta)}{\sum_i v_i} \qquad (O1)

    with :math:`u_{ij} = x_{ij}'\theta_{1..d} + \theta_{d+1}`. Equal weights v give the target
    objective F; a scheme's expected weights (L1) give the objective it really minimises. Some
    weights may be negative, as linear calibration gives them: if that leaves no minimum,
    ``minimum`` says so.

    >>> from fedipw.lab.testbed import Testbed
    >>> clients = Testbed(size=100).draw(np.random.default_rng(0)).clients
    >>> target = FederatedLogistic(clients, 0.05, target_weights(clients))
    >>> best = target.minimum()
    >>> best.gradient_norm < 1e-10
    True
    """

    clients: ClientData
    l2: float
    client_weights: FloatArray  # (N,)

    def __post_init__(self) -> None:
        check_rows(self.clients.size, client_weights=self.client_weights)
        if not self.l2 >= 0.0:
            raise InputError(f"l2 must be 0 or more, not {self.l2!r}.")
        total = self.client_weights.sum()
        if not (np.isfinite(total) and total > 0.0):
            raise InputError(f"Client weights must be finite with a positive sum, not {total!r}.")

    def require_equal_weights(self, what: str) -> None:
        """Raise unless all clients weigh the same."""
        if not np.allclose(self.client_weights, self.client_weights[0]):
            raise InputError(f"{what} is for the mean over clients; the weights differ.")

    def sums(self, theta: FloatArray) -> Sums:
        """Return value, gradient and Hessian at a point, (d + 1,)."""
        value, gradient = 0.0, np.zeros(len(theta))
        hessian = np.zeros((len(theta), len(theta)))
        for rows, weight in self._chunks():
            x, y = self.clients.features[rows], self.clients.labels[rows]
            part = logistic_sums(x, y, weight, theta)
            value += part.value
            gradient += part.gradient
            hessian += part.hessian
        return Sums(
            value + 0.5 * self.l2 * float(theta @ theta),
            gradient + self.l2 * theta,
            hessian + self.l2 * np.eye(len(theta)),
        )

    def client_gradients(self, theta: FloatArray) -> FloatArray:
        """Return the gradient of every client's own loss, (N, d + 1)."""
        out = np.empty((self.clients.size, len(theta)))
        for who, rows in self.clients.chunks():
            x = self.clients.features[rows]
            residual = expit(x @ theta[:-1] + theta[-1]) - self.clients.labels[rows]
            starts = self.clients.offsets[who] - self.clients.offsets[who.start]
            out[who, :-1] = np.add.reduceat(residual[:, None] * x, starts, axis=0)
            out[who, -1] = np.add.reduceat(residual, starts)
        return out / self.clients.counts[:, None] + self.l2 * theta

    def client_losses(self, theta: FloatArray) -> FloatArray:
        """Return every client's own loss f, (N,)."""
        out = np.empty(self.clients.size)
        for who, rows in self.clients.chunks():
            u = self.clients.features[rows] @ theta[:-1] + theta[-1]
            starts = self.clients.offsets[who] - self.clients.offsets[who.start]
            loss = np.log1p(np.exp(-np.abs(u))) + np.maximum(u, 0.0) - self.clients.labels[rows] * u
            out[who] = np.add.reduceat(loss, starts)
        return out / self.clients.counts + 0.5 * self.l2 * float(theta @ theta)

    def losses(self, thetas: FloatArray) -> FloatArray:
        """Return the value at each row of ``thetas`` (T, d + 1), in one pass over the data."""
        thetas = np.atleast_2d(thetas)
        total: FloatArray = 0.5 * self.l2 * np.einsum("td,td->t", thetas, thetas)
        for rows, weight in self._chunks():
            x, y = self.clients.features[rows], self.clients.labels[rows]
            total = total + logistic_losses(x, y, weight, thetas)
        return total

    def excess(self, theta: FloatArray, minimiser: FloatArray) -> float:
        """Return F at ``theta`` less F at its minimiser, (d + 1,) each.

        The sum of what each loss rises above its tangent at the minimiser, and the slope that
        Newton's method left there. No large terms cancel: excesses far below the rounding of F are
        right.
        """
        move = theta - minimiser
        total = float(self.sums(minimiser).gradient @ move) + 0.5 * self.l2 * float(move @ move)
        for rows, weight in self._chunks():
            x = self.clients.features[rows]
            at, shift = x @ minimiser[:-1] + minimiser[-1], x @ move[:-1] + move[-1]
            total += float(weight @ softplus_divergence(at, shift))
        return total

    def minimum(self, start: FloatArray | None = None) -> NewtonResult:
        """Return the minimiser by Newton, gradient norm below 1e-10 (an error otherwise)."""
        first = np.zeros(self.clients.n_parameters) if start is None else start
        return newton_minimum(self.sums, first, gradient_tol=1e-11).checked()

    def _chunks(self) -> Iterator[tuple[slice, FloatArray]]:
        """Rows in bounded pieces with the weight of each row."""
        counts = self.clients.counts
        share = self.client_weights / self.client_weights.sum() / counts
        for who, rows in self.clients.chunks():
            yield rows, np.repeat(share[who], counts[who])
