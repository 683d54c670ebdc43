"""The loop: draw a round, weigh its replies, train, step; all methods on the same draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedipw.engine.history import History
from fedipw.engine.local import LocalWork, RoundWork, client_updates, weighted_update
from fedipw.engine.memory import UpdateMemory
from fedipw.engine.server import PlainStep, ServerStep, State
from fedipw.errors import DivergedError, InputError
from fedipw.numerics.checks import check_positive, check_rows
from fedipw.theory.limit import LimitWeights
from fedipw.weights.rounds import RoundOpening, RoundWeights

if TYPE_CHECKING:
    from fedipw.data.clients import ClientData
    from fedipw.data.mechanisms import ParticipationProcess, RoundDraw
    from fedipw.data.population import Population
    from fedipw.numerics.types import BoolArray, FloatArray, IntArray
    from fedipw.weights.weigher import Weigher

SKIPPED = "skipped: nobody replied"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Federation:
    """A population with enrollment drawn, its clients' data, and how they take part."""

    population: Population
    clients: ClientData
    participation: ParticipationProcess
    enrollment_prob: FloatArray | None = None  # (N,) true, where known

    def __post_init__(self) -> None:
        if self.population.size != self.clients.size:
            raise InputError(
                f"The population has {self.population.size} clients, the data {self.clients.size}."
            )
        _ = self.population.enrolled_size  # enrollment must have been drawn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    r"""How the model is trained.

    .. math:: \theta_{r+1} = \theta_r + \gamma \sum_{i \in S_r} w_{ir} \Delta_{ir} \qquad (O3)

    With an ``optimizer`` the server steps by its rule instead, such as :class:`Adam` (O10).
    """

    work: LocalWork = field(default_factory=LocalWork)
    server_step: float = 1.0  # gamma
    l2: float = 0.05
    steps: IntArray | None = None  # (N,) local steps K_i of each client, where they differ
    start: FloatArray | None = None  # (d + 1,), zero by default
    optimizer: ServerStep | None = None  # in place of the plain step

    def __post_init__(self) -> None:
        check_positive(self.server_step, "server_step")
        if self.optimizer is not None and self.server_step != 1.0:
            raise InputError("The optimizer has a step size of its own: leave server_step out.")
        if not self.l2 >= 0.0:
            raise InputError(f"l2 must be 0 or more, not {self.l2!r}.")
        if self.steps is not None and (self.steps < 1).any():
            raise InputError("Every client needs at least one local step.")


@final
class Simulation:
    """A run that can be advanced, saved between rounds and resumed to the same bytes.

    All methods of all weighers see the same rounds: who replied, with which covariates, and which
    mini-batches each client draws depend on the seed alone, never on a method.

    Parameters
    ----------
    federation
        Clients and how they take part.
    weighers
        Each with the schemes that share its probabilities.
    training
        Local work and server step.
    rng
        Chance of mini-batches.
    limits_from
        Collect limit weights from this round on (needs true probabilities); off by default.
    memories
        Enrollment weights (N,) of the methods that keep each client's latest update (O5).
    """

    def __init__(
        self,
        federation: Federation,
        weighers: Sequence[Weigher],
        training: Training,
        rng: np.random.Generator,
        *,
        limits_from: int | None = None,
        memories: Mapping[str, FloatArray] | None = None,
    ) -> None:
        self.federation, self.training = federation, training
        self._weighers, self._rng = tuple(weighers), rng
        self._rows = np.flatnonzero(federation.population.enrolled)
        self.methods = tuple(name for w in self._weighers for name in w.schemes)
        if not self.methods or len(set(self.methods)) != len(self.methods):
            raise InputError(f"Methods must be named once each, not {self.methods}.")
        if training.steps is not None:
            check_rows(federation.clients.size, steps=training.steps)
        start = training.start
        zero = np.zeros(federation.clients.n_parameters) if start is None else start
        self._iterates = [np.tile(zero, (len(self.methods), 1))]
        self._records: list[_RoundRecord] = []
        self._memories = {
            name: UpdateMemory(omega, len(zero)) for name, omega in (memories or {}).items()
        }
        self._server: ServerStep = training.optimizer or PlainStep(training.server_step)
        self._moments: dict[str, State] = {name: {} for name in self.methods}
        self._limits_from = limits_from
        self._limits = self._new_limits()

    def _new_limits(self) -> dict[str, LimitWeights]:
        if self._limits_from is None:
            return {}
        truth = self.federation.enrollment_prob
        if truth is None:
            raise InputError("Limits need true enrollment probabilities.")
        enrolled = self.federation.population.enrolled
        return {name: LimitWeights(enrolled, truth) for name in self.methods}

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return len(self._records)

    @property
    def limits(self) -> Mapping[str, LimitWeights]:
        """Limit weights by method, where asked for."""
        return self._limits

    def advance(self, rounds: int, *, after: Callable[[int], None] | None = None) -> None:
        """Run more rounds; ``after`` is called with the number done after each."""
        for _ in range(rounds):
            self._round()
            if after is not None:
                after(self.rounds)

    def _round(self) -> None:
        draw = self.federation.participation.advance()
        replied = draw.replied[self._rows]
        key = int(self._rng.integers(2**63))
        known = draw.participation_prob
        opening = RoundOpening(
            index=draw.index,
            covariates=draw.covariates[self._rows],
            participation_prob=None if known is None else known[self._rows],
        )
        iterate, weighed = self._iterates[-1].copy(), []
        for weigher in self._weighers:
            weigher.open(opening)
            if replied.any():
                given = weigher.weights(replied)
                self._add_limits(weigher, draw)
                for name, weights in given.items():
                    position = self.methods.index(name)
                    iterate[position] = self._stepped(
                        name, iterate[position], weights, replied, key
                    )
                    weighed.append(weights)
            weigher.close(replied)
        self._iterates.append(iterate)
        self._records.append(_record(int(replied.sum()), weighed, len(self.methods)))

    def _stepped(
        self, name: str, theta: FloatArray, weights: RoundWeights, replied: BoolArray, key: int
    ) -> FloatArray:
        who = self._rows[replied]
        own = self.training.steps
        task = RoundWork(clients=who, theta=theta, key=key, steps=None if own is None else own[who])
        clients, work, l2 = self.federation.clients, self.training.work, self.training.l2
        memory = self._memories.get(name)
        if memory is None:
            total = weighted_update(clients, work, l2, task, weights.weights)
        else:
            updates = client_updates(clients, work, l2, task)
            total = memory.total(who, updates, weights.weights)
        following, self._moments[name] = self._server.step(
            theta, total, self._moments[name], self.rounds + 1
        )
        if not np.isfinite(following).all():
            raise DivergedError(name, self.rounds + 1, float(weights.weights.max()))
        return following

    def _add_limits(self, weigher: Weigher, draw: RoundDraw) -> None:
        if self._limits_from is None or draw.index < self._limits_from:
            return
        if draw.participation_prob is None:
            raise InputError("Limits need true participation probabilities; a trace has none.")
        units = weigher.propensities.everyone(draw.covariates, draw.participation_prob)
        for name, scheme in weigher.schemes.items():
            self._limits[name].add(scheme, units, draw.participation_prob, weigher.trim)

    def history(self) -> History:
        """Return everything so far."""
        records, shape = self._records, (self.rounds, len(self.methods))
        return History(
            methods=self.methods,
            iterates=np.stack(self._iterates, axis=1),
            replies=np.array([r.replies for r in records], dtype=np.int64),
            weight_sum=np.array([r.weight_sum for r in records]).reshape(shape).T,
            effective_replies=np.array([r.effective for r in records]).reshape(shape).T,
            trimmed=np.array([r.trimmed for r in records], dtype=np.int64).reshape(shape).T,
            trimmed_mass=np.array([r.trimmed_mass for r in records]).reshape(shape).T,
            source=np.array([r.source for r in records], dtype=object).reshape(shape).T,
            negative=np.array([r.negative for r in records], dtype=np.int64).reshape(shape).T,
            note=np.array([r.note for r in records], dtype=object).reshape(shape).T,
        )

    def state(self) -> dict[str, Any]:
        """Return arrays and plain values from which ``restore`` continues to the same bytes."""
        return {
            "iterates": np.stack(self._iterates),
            "records": [r.plain() for r in self._records],
            "participation": self.federation.participation.state(),
            "training_rng": self._rng.bit_generator.state,
            "weighers": {str(k): w.state() for k, w in enumerate(self._weighers)},
            "limits": {name: limit.state() for name, limit in self._limits.items()},
            "memories": {name: memory.state() for name, memory in self._memories.items()},
            "moments": {name: dict(state) for name, state in self._moments.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back into a simulation built from the same settings and seed."""
        self._iterates = list(np.array(state["iterates"]))
        self._records = [_RoundRecord(*plain) for plain in state["records"]]
        self.federation.participation.restore(state["participation"])
        self._rng.bit_generator.state = state["training_rng"]
        for k, weigher in enumerate(self._weighers):
            weigher.restore(state["weighers"].get(str(k), {}))
        for name, limit in self._limits.items():
            limit.restore(state["limits"][name])
        for name, memory in self._memories.items():
            memory.restore(state["memories"][name])
        self._moments = {name: dict(state["moments"][name]) for name in self.methods}


@dataclass(frozen=True, slots=True)
class _RoundRecord:
    """One round: scalars, one per method except the number of replies."""

    replies: int
    weight_sum: Sequence[float]
    effective: Sequence[float]
    trimmed: Sequence[int]
    trimmed_mass: Sequence[float]
    source: Sequence[str]
    negative: Sequence[int]
    note: Sequence[str]

    def plain(self) -> list[Any]:
        return [
            self.replies,
            list(self.weight_sum),
            list(self.effective),
            list(self.trimmed),
            list(self.trimmed_mass),
            list(self.source),
            list(self.negative),
            list(self.note),
        ]


def _record(replies: int, weighed: Sequence[RoundWeights], methods: int) -> _RoundRecord:
    if not weighed:
        nan, none = [float("nan")] * methods, [0] * methods
        empty = [""] * methods
        return _RoundRecord(0, nan, nan, none, [0.0] * methods, [SKIPPED] * methods, none, empty)
    return _RoundRecord(
        replies,
        [w.total for w in weighed],
        [w.effective_replies for w in weighed],
        [0 if w.trimming is None else w.trimming.changed for w in weighed],
        [0.0 if w.trimming is None else w.trimming.mass for w in weighed],
        [w.replies.source.value for w in weighed],
        [w.negative for w in weighed],
        [w.note for w in weighed],
    )
