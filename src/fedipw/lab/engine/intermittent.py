"""Published rules for clients that come and go: FedAWE, FOCUS, F3AST and CA-Fed.

Each keeps something of every enrolled client (a model, a gradient, a rate, a loss) and decides by
itself how a round's updates are combined, so it reads no weights of replies. Enrollment weights
(W16) take the place of the weights that the papers give to clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from fedipw.combining.memory import MemorySum
from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive, check_probability, check_rows

if TYPE_CHECKING:
    from fedipw.lab.engine.local import RoundWork, Trainer
    from fedipw.numerics import BoolArray, FloatArray, IntArray


class IntermittentRule(Protocol):
    """A rule that trains a round's clients in its own way and keeps a state of each."""

    follows_work: bool  # whether clients that do more local steps count for more
    gradient_steps: bool  # whether a local step must be the step size times a gradient

    def begin(self, trainer: Trainer, task: RoundWork) -> None:
        """Take all enrolled clients as if they trained, before the first round."""
        ...

    def total(
        self, trainer: Trainer, task: RoundWork, index: int, scale: FloatArray | None
    ) -> MemorySum:
        """Return what takes the place of the weighted sum (O3) in round ``index``, from 1.

        ``scale`` (m,) multiplies updates (O16); none where work is not evened out.
        """
        ...

    @property
    def counted(self) -> FloatArray | None:
        """Share of each client's weight that counts now, (N,); none if all count whole."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what is kept as arrays and plain values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        ...


class IntermittentSettings(Protocol):
    """Settings of a rule for clients that come and go."""

    def rule(
        self, enrolled: BoolArray, enrollment_weights: FloatArray, start: FloatArray
    ) -> IntermittentRule:
        """Return the rule before the first round; weights (N,) sum to one over the enrolled."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FedAWE:
    """Missed rounds are echoed, and clients train on from their own last model (B2)."""

    size: float = 1.0  # of the echoed updates, eta_g

    def __post_init__(self) -> None:
        check_positive(self.size, "size")

    def rule(
        self, enrolled: BoolArray, enrollment_weights: FloatArray, start: FloatArray
    ) -> EchoedUpdates:
        """Return the rule before the first round."""
        return EchoedUpdates(enrolled, enrollment_weights, start, size=self.size)


@final
class EchoedUpdates:
    r"""FedAWE: an update counts once for every round since its client's last one.

    .. math:: \theta_{r+1} = \frac{\sum_{i \in S_r} \omega_i \big(x_i + \gamma_g (r - \tau_i)
       \Delta_i(x_i)\big)}{\sum_{i \in S_r} \omega_i}, \qquad
       x_i \leftarrow \theta_{r+1}, \;\; \tau_i \leftarrow r \;\; (i \in S_r) \qquad (B2)

    Algorithm 1 of Xiang et al. (2024): a client trains from :math:`x_i`, the model it received at
    the end of its last round :math:`\tau_i` (the start before the first), not from the newest one.
    :math:`\Delta_i(x_i)` is its update (O2) from there. Published for equal :math:`\omega`. Mixing
    by :math:`\omega` keeps :math:`\sum_E \omega_i x_i` as equal weights keep the mean, so that
    under enrollment weights it aims at :math:`\sum_E \omega_i f_i`. It moves the model itself: the
    run's server step is not applied. Clients last seen in the same round share one kept model.

    Parameters
    ----------
    enrolled
        Who can ever reply, (N,).
    enrollment_weights
        :math:`\omega` of every client, (N,), none below 0.
    start
        The model before the first round, (P,).
    size
        :math:`\gamma_g`, of the echoed updates.

    Examples
    --------
    >>> from fedipw.lab.engine import LogisticTrainer, RoundWork
    >>> from fedipw.lab.testbed import Testbed
    >>> trainer = LogisticTrainer(Testbed(size=3).draw(np.random.default_rng(0)).clients)
    >>> rule = EchoedUpdates(np.ones(3, dtype=bool), np.full(3, 1 / 3), trainer.start)
    >>> task = RoundWork(clients=np.array([1]), theta=trainer.start, key=0)
    >>> moved = rule.total(trainer, task, 4, None).total  # rounds 1 to 3 were missed
    >>> np.allclose(moved, 4 * trainer.updates(task)[0])
    True
    """

    follows_work = True
    gradient_steps = False
    counted = None

    def __init__(
        self,
        enrolled: BoolArray,
        enrollment_weights: FloatArray,
        start: FloatArray,
        *,
        size: float = 1.0,
    ) -> None:
        _check_weights("fedawe", enrolled, enrollment_weights)
        self._omega, self._size = enrollment_weights, check_positive(size, "size")
        self._last = np.zeros(len(enrolled), dtype=np.int64)  # round of each client's last reply
        self._enrolled = enrolled
        self._models: dict[int, FloatArray] = {0: start.copy()}  # by round

    @property
    def mean_model(self) -> FloatArray:
        """The weighted mean of the clients' own models, which the authors evaluate, (P,)."""
        share = self._omega[self._enrolled] / self._omega[self._enrolled].sum()
        last = self._last[self._enrolled]
        mean: FloatArray = sum(
            (share[last == of].sum() * model for of, model in self._models.items()), np.zeros(1)
        )
        return mean

    def begin(self, trainer: Trainer, task: RoundWork) -> None:
        """Take the first model, from which every client starts."""
        del trainer
        self._models = {0: task.theta.copy()}

    def total(
        self, trainer: Trainer, task: RoundWork, index: int, scale: FloatArray | None
    ) -> MemorySum:
        """Return the next model (B2) less the present one."""
        rows = task.clients
        share, mass = self._omega[rows], float(self._omega[rows].sum())
        if mass == 0.0:
            return MemorySum(total=None, note=_WEIGHTLESS)
        share = share / mass
        by = share if scale is None else share * scale
        following = np.zeros(len(task.theta))
        for last in np.unique(self._last[rows]):
            mine, own = self._last[rows] == last, self._models[int(last)]
            moved = trainer.total(_of(task, mine, own), by[mine])
            following += share[mine].sum() * own + self._size * (index - last) * moved
        self._last[rows] = index
        self._models[index] = following
        kept = set(np.unique(self._last[self._enrolled]).tolist())
        self._models = {last: model for last, model in self._models.items() if last in kept}
        return MemorySum(total=following - task.theta)

    def state(self) -> dict[str, Any]:
        """Return the kept models and the round of each client's last reply."""
        return {
            "last": self._last.copy(),
            "rounds": np.array(list(self._models), dtype=np.int64),
            "models": np.stack(list(self._models.values())),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved models back."""
        self._last = np.array(state["last"])
        rounds, models = np.array(state["rounds"]).tolist(), np.array(state["models"])
        self._models = dict(zip(rounds, models, strict=True))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """Steps along the sum of all clients' latest gradients, tracked in local steps (B4)."""

    size: float = 1.0  # of a server step, in local step sizes; as published the number of clients

    def __post_init__(self) -> None:
        check_positive(self.size, "size")

    def rule(
        self, enrolled: BoolArray, enrollment_weights: FloatArray, start: FloatArray
    ) -> TrackedGradients:
        """Return the rule before the first round."""
        return TrackedGradients(enrolled, enrollment_weights, start, size=self.size)


@final
class TrackedGradients:
    r"""FOCUS: local steps along what a client's gradient changed, a server step along their sum.

    .. math:: y_0 = \theta, \quad y_k = y_{k-1} - \eta\,(g_i(y_{k-1}) - h_i) \;\; (k < K_i), \quad
       h_i \leftarrow g_i(y_{K_i - 1}) \;\; (i \in S_r), \qquad
       \theta \leftarrow \theta - \gamma_f\, \eta \sum_{i \in E} \omega_i h_i \qquad (B4)

    (Ying, Li and Yang 2025.) :math:`h_i` is the gradient that ended the client's last local work,
    zero before the first. As published the server adds the changes of :math:`h_i` up with weight
    one and steps by :math:`\eta`: :math:`\gamma_f = N_{enr}` at :math:`\omega = 1/N_{enr}`. At the
    solution :math:`h_i = g_i(\theta)`, no client moves, and no participation probability is needed.
    The equations are those of the authors' code. The last gradient is found from two updates, one
    with a step fewer, so clients are trained twice. Parameters are those of
    :class:`EchoedUpdates`; ``size`` is :math:`\gamma_f`.

    >>> from fedipw.lab.engine import LogisticTrainer, RoundWork
    >>> from fedipw.lab.testbed import Testbed
    >>> trainer = LogisticTrainer(Testbed(size=3).draw(np.random.default_rng(0)).clients)
    >>> rule = TrackedGradients(np.ones(3, dtype=bool), np.full(3, 1 / 3), trainer.start)
    >>> task = RoundWork(clients=np.array([1]), theta=trainer.start, key=0)
    >>> moved = rule.total(trainer, task, 1, None).total  # gradients of the others count as zero
    >>> np.allclose(moved, trainer.updates(task)[0] / 3)
    True
    """

    follows_work = False
    gradient_steps = True
    counted = None

    def __init__(
        self,
        enrolled: BoolArray,
        enrollment_weights: FloatArray,
        start: FloatArray,
        *,
        size: float = 1.0,
    ) -> None:
        check_rows(len(enrolled), enrollment_weights=enrollment_weights)
        self._omega, self._size = enrollment_weights, check_positive(size, "size")
        self._place = np.cumsum(enrolled) - 1
        self._gradients = np.zeros((int(enrolled.sum()), len(start)))
        self._sum = np.zeros(len(start))

    def begin(self, trainer: Trainer, task: RoundWork) -> None:
        """Take nothing: gradients start at zero."""

    def total(
        self, trainer: Trainer, task: RoundWork, index: int, scale: FloatArray | None
    ) -> MemorySum:
        """Return the server's step in (B4) and keep the new gradients."""
        del index, scale  # gradients are not divided by the work behind them
        rows, place = task.clients, self._place[task.clients]
        before = self._gradients[place]
        steps, eta = task.local_steps(trainer.work), trainer.work.step_size
        tracked = replace(task, steps=steps, corrections=-before)
        found = -trainer.updates(tracked)
        if steps.max() > 1:
            found += trainer.updates(replace(tracked, steps=steps - 1))
        # the difference of the two is the last step, eta times what the gradient changed
        change = found / eta
        self._gradients[place] = before + change
        self._sum = self._sum + self._omega[rows] @ change
        return MemorySum(total=-self._size * eta * self._sum)

    def state(self) -> dict[str, Any]:
        """Return the kept gradients and their weighted sum."""
        return {"gradients": self._gradients.copy(), "sum": self._sum.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved gradients back."""
        self._gradients, self._sum = np.array(state["gradients"]), np.array(state["sum"])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class F3AST:
    """Weights by a running rate, of the clients for which they are largest (B3)."""

    beta: float = 0.001  # by which a round moves the rates
    capacity: int | None = None  # clients used in a round at most; all that reply by default

    def __post_init__(self) -> None:
        if not 0.0 < self.beta <= 1.0:
            raise InputError(f"beta must lie in (0, 1], not {self.beta!r}.")
        if self.capacity is not None and self.capacity < 1:
            raise InputError(f"capacity must be at least 1 client, not {self.capacity}.")

    def rule(
        self, enrolled: BoolArray, enrollment_weights: FloatArray, start: FloatArray
    ) -> RunningRates:
        """Return the rule before the first round."""
        del start
        return RunningRates(enrolled, enrollment_weights, self)


@final
class RunningRates:
    r"""F3AST: the rate at which a client is used, as an exponential average over rounds.

    .. math:: C_r = \text{the } M \text{ replies with the largest } \omega_i / \rho_i, \qquad
       \rho_i \leftarrow (1 - \beta)\, \rho_i + \beta\, 1\{i \in C_r\}, \qquad
       \sum_{i \in C_r} \frac{\omega_i}{\rho_i} \Delta_i \qquad (B3)

    takes the place of the sum in (O3) (Ribero, Vikalo and de Veciana 2023). The largest
    :math:`\omega_i/\rho_i` are the steepest descent of the variance :math:`\sum \omega_i^2/\rho_i`
    that they minimise. Rates are updated before they divide, as in the authors' code, and start
    alike at :math:`M_1 / N_{enr}`, :math:`M_1` the clients used in the first round: that round is a
    plain mean for equal :math:`\omega`. Without a capacity all replies are used. A server would not
    have invited the replies that are left out here; training does not tell the difference.

    Parameters
    ----------
    enrolled
        Who can ever reply, (N,).
    enrollment_weights
        :math:`\omega` of every client, (N,), none below 0.
    settings
        :math:`\beta` and M.

    Examples
    --------
    >>> from fedipw.lab.engine import LogisticTrainer, RoundWork
    >>> from fedipw.lab.testbed import Testbed
    >>> trainer = LogisticTrainer(Testbed(size=3).draw(np.random.default_rng(0)).clients)
    >>> rule = RunningRates(np.ones(3, dtype=bool), np.full(3, 1 / 3), F3AST(beta=0.1))
    >>> task = RoundWork(clients=np.array([1]), theta=trainer.start, key=0)
    >>> _ = rule.total(trainer, task, 1, None)
    >>> rule.state()["rates"].round(3).tolist()  # 0.9 / 3, and 0.1 more for the client used
    [0.3, 0.4, 0.3]
    """

    follows_work = True
    gradient_steps = False
    counted = None

    def __init__(
        self, enrolled: BoolArray, enrollment_weights: FloatArray, settings: F3AST
    ) -> None:
        _check_weights("f3ast", enrolled, enrollment_weights)
        self._omega, self._settings = enrollment_weights, settings
        self._size = int(enrolled.sum())
        self._rates = np.ones(len(enrolled))  # alike until the first replies
        self._rounds = 0  # whose replies the rates count

    def begin(self, trainer: Trainer, task: RoundWork) -> None:
        """Take nothing: rates start with the first replies."""

    def total(
        self, trainer: Trainer, task: RoundWork, index: int, scale: FloatArray | None
    ) -> MemorySum:
        """Return (B3) and move the rates, by rounds without replies too."""
        rows, most = task.clients, self._settings.capacity
        used = np.arange(len(rows))
        if most is not None and len(rows) > most:
            used = np.sort(np.argsort(-self._omega[rows] / self._rates[rows], kind="stable")[:most])
        if not self._rounds:
            self._rates = np.full(len(self._omega), len(used) / self._size)
            self._rounds = index - 1
        self._rates *= (1.0 - self._settings.beta) ** (index - self._rounds)
        self._rates[rows[used]] += self._settings.beta
        self._rounds = index
        weights = np.zeros(len(rows))
        weights[used] = self._omega[rows[used]] / self._rates[rows[used]]
        total = trainer.total(task, weights if scale is None else weights * scale)
        left = len(rows) - len(used)
        return MemorySum(total=total, note=f"{left} replies beyond the capacity" if left else "")

    def state(self) -> dict[str, Any]:
        """Return the rates."""
        return {"rates": self._rates.copy(), "rounds": self._rounds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved rates back."""
        self._rates, self._rounds = np.array(state["rates"]), int(state["rounds"])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CAFed:
    """Clients that come rarely, or for long at a time, are left out where that costs less (B5)."""

    smoothing: float = 0.0  # of a client's loss over its rounds
    tolerance: float = 0.0  # by which leaving a client out must lower the error
    bias: float = 1.0  # factor of the bias term
    alone: int = 1000  # local steps after which a client's loss alone is taken as its least

    def __post_init__(self) -> None:
        if not 0.0 <= self.smoothing < 1.0:
            raise InputError(f"smoothing must lie in [0, 1), not {self.smoothing!r}.")
        for name in ("tolerance", "bias"):
            if not 0.0 <= getattr(self, name) < np.inf:
                raise InputError(f"{name} must be 0 or more, not {getattr(self, name)!r}.")
        if self.alone < 1:
            raise InputError(f"alone must be at least 1 local step, not {self.alone}.")

    def rule(
        self, enrolled: BoolArray, enrollment_weights: FloatArray, start: FloatArray
    ) -> CorrelationAware:
        """Return the rule before the first round."""
        del start
        return CorrelationAware(enrolled, enrollment_weights, self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownChains:
    """Availability of clients that are two-state Markov chains, where a study knows it."""

    availability: FloatArray  # (N,) stationary probability of a reply
    correlation: FloatArray  # (N,) second eigenvalue of the chain

    def __post_init__(self) -> None:
        check_probability(self.availability, name="availability")
        check_rows(len(self.availability), correlation=self.correlation)


@final
class CorrelationAware:
    r"""CA-Fed: inverse availability weights, without the clients that slow training down.

    .. math:: w_i = \frac{\omega_i}{\hat\pi_i} \;\; (i \in S_r \cap C), \qquad
       C \text{ lowers } \; \frac{\sum_C \omega_i (\hat f_i - f_i^\star)}{\sum_C \omega_i}
       + \kappa \max_{i \in E} (\hat f_i - f_i^\star)\, \Big(1 - \sum_C \omega_i\Big)^2 \qquad (B5)

    (Rodio et al. 2023.) Starting from all enrolled clients, first those with the largest
    :math:`|\hat\lambda_i|` and then those with the smallest :math:`\hat\pi_i` are tried one after
    the other, and left out where that lowers the error by at least the tolerance. One minus the sum
    is the total variation distance of the paper, since :math:`w_i \hat\pi_i = \omega_i`.

    :math:`\hat f_i` is the client's loss at the present model when it last replied, smoothed; the
    mean of the first round's for those not seen. :math:`f_i^\star` is its loss after ``alone``
    local steps by itself. Availability :math:`\hat\pi_i` and correlation :math:`\hat\lambda_i =
    \hat P(1 \to 1) + \hat P(0 \to 0) - 1` are counted with one reply and one miss, and one
    transition of each kind, beforehand; the authors' scripts take them as known, as ``known`` does
    here.

    Parameters
    ----------
    enrolled
        Who can ever reply, (N,).
    enrollment_weights
        :math:`\omega` of every client, (N,), none below 0.
    settings
        Smoothing, tolerance and factor.
    known
        True chains in place of counts.

    Examples
    --------
    >>> from fedipw.lab.engine import LogisticTrainer, RoundWork
    >>> from fedipw.lab.testbed import Testbed
    >>> trainer = LogisticTrainer(Testbed(size=3).draw(np.random.default_rng(0)).clients)
    >>> rule = CorrelationAware(np.ones(3, dtype=bool), np.full(3, 1 / 3), CAFed(bias=1e6))
    >>> task = RoundWork(clients=np.array([1]), theta=trainer.start, key=0)
    >>> moved = rule.total(trainer, task, 1, None).total  # a reply in a round: (1 + 1) / (1 + 2)
    >>> np.allclose(moved, trainer.updates(task)[0] / 3 / (2 / 3))
    True
    >>> rule.counted.tolist()  # bias is too dear to leave anybody out
    [1.0, 1.0, 1.0]
    """

    follows_work = True
    gradient_steps = False

    def __init__(
        self,
        enrolled: BoolArray,
        enrollment_weights: FloatArray,
        settings: CAFed,
        known: KnownChains | None = None,
    ) -> None:
        _check_weights("cafed", enrolled, enrollment_weights)
        if known is not None:
            check_rows(len(enrolled), availability=known.availability)
        self._rows = np.flatnonzero(enrolled)
        self._omega, self._settings, self._known = enrollment_weights, settings, known
        self._losses = np.full(len(enrolled), np.nan)
        self._least = np.zeros(len(enrolled))
        self._counted = np.ones(len(enrolled))
        self._replies = np.zeros(len(enrolled), dtype=np.int64)
        # transitions from a miss and from a reply, to a miss and to a reply
        self._moves = np.zeros((len(enrolled), 2, 2), dtype=np.int64)
        self._present = np.zeros(len(enrolled), dtype=np.int64)  # in the last round
        self._rounds = 0

    @property
    def counted(self) -> FloatArray:
        """One for clients that count, zero for those left out, (N,)."""
        return self._counted

    def begin(self, trainer: Trainer, task: RoundWork) -> None:
        """Train every enrolled client alone to find its least loss."""
        steps = np.full(len(task.clients), self._settings.alone)
        models = task.theta + trainer.updates(replace(task, steps=steps))
        for client, model in zip(task.clients, models, strict=True):
            self._least[client] = trainer.losses(model, np.array([client]))[0]

    def total(
        self, trainer: Trainer, task: RoundWork, index: int, scale: FloatArray | None
    ) -> MemorySum:
        """Return the sum under the weights (B5)."""
        rows = task.clients
        self._hear(rows, trainer.losses(task.theta, rows))
        self._count(rows, index)
        availability, correlation = self._chains()
        self._counted = np.ones(len(self._omega))
        self._counted[self._left_out(availability, correlation)] = 0.0
        weights = self._counted[rows] * self._omega[rows] / availability[rows]
        left = f"{int((self._counted == 0.0).sum())} clients left out"
        if not weights.any():
            return MemorySum(total=None, note=f"{left}, all replies among them")
        total = trainer.total(task, weights if scale is None else weights * scale)
        return MemorySum(total=total, note="" if self._counted.all() else left)

    def _hear(self, rows: IntArray, losses: FloatArray) -> None:
        """Take the losses of a round's replies."""
        if np.isnan(self._losses).all():
            self._losses[:] = losses.mean()
            self._losses[rows] = losses
            return
        smoothing = self._settings.smoothing
        self._losses[rows] = smoothing * self._losses[rows] + (1.0 - smoothing) * losses

    def _count(self, rows: IntArray, index: int) -> None:
        """Count replies and transitions up to a round; in rounds passed over nobody replied."""
        clients = np.arange(len(self._omega))
        for passed in range(self._rounds + 1, index + 1):
            coming = np.zeros(len(clients), dtype=np.int64)
            if passed == index:
                coming[rows] = 1
            if passed > 1:
                self._moves[clients, self._present, coming] += 1
            self._present = coming
        self._replies[rows] += 1
        self._rounds = index

    def _chains(self) -> tuple[FloatArray, FloatArray]:
        """Return availability and correlation of every client, (N,) each."""
        if self._known is not None:
            return self._known.availability, self._known.correlation
        moves = self._moves + 1.0
        staying = moves[:, [0, 1], [0, 1]] / moves.sum(axis=2)
        correlation: FloatArray = staying.sum(axis=1) - 1.0
        share = (self._replies + 1.0) / float(self._rounds + 2)
        return np.asarray(share, dtype=np.float64), correlation

    def _left_out(self, availability: FloatArray, correlation: FloatArray) -> list[int]:
        """Return the clients left out."""
        excess, rows = self._losses - self._least, self._rows
        cost = self._settings.bias * float(excess[rows].max())
        out: dict[int, None] = {}
        mass, loss = float(self._omega[rows].sum()), float(self._omega[rows] @ excess[rows])
        count, error = len(rows), loss / mass + cost * (1.0 - mass) ** 2
        for order in (-np.abs(correlation[rows]), availability[rows]):
            for client in rows[np.argsort(order, kind="stable")].tolist():
                share = float(self._omega[client])
                rest = mass - share
                if client in out or count == 1 or rest <= 0.0:
                    continue
                less = loss - share * float(excess[client])
                found = less / rest + cost * (1.0 - rest) ** 2
                if error - found >= self._settings.tolerance:
                    out[client] = None
                    mass, loss, error, count = rest, less, found, count - 1
        return list(out)

    def state(self) -> dict[str, Any]:
        """Return losses, counts and who counts."""
        return {
            "losses": self._losses.copy(),
            "counted": self._counted.copy(),
            "replies": self._replies.copy(),
            "moves": self._moves.copy(),
            "present": self._present.copy(),
            "rounds": self._rounds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved losses and counts back."""
        self._losses, self._counted, self._replies, self._moves, self._present = (
            np.array(state[key]) for key in ("losses", "counted", "replies", "moves", "present")
        )
        self._rounds = int(state["rounds"])


_WEIGHTLESS = "no reply has an enrollment weight"


def _of(task: RoundWork, mine: BoolArray, theta: FloatArray) -> RoundWork:
    """Return the work of some of a round's clients, from a model of their own."""
    steps = None if task.steps is None else task.steps[mine]
    return replace(task, clients=task.clients[mine], theta=theta, steps=steps)


def _check_weights(rule: str, enrolled: BoolArray, omega: FloatArray) -> None:
    check_rows(len(enrolled), enrollment_weights=omega)
    below = int((omega[enrolled] < 0.0).sum())
    if below:
        raise InputError(
            f"{rule} needs enrollment weights that are not negative, and {below} are: use fedipw "
            "or calibrated-entropy, whose weights are positive."
        )
