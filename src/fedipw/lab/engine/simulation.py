"""The loop: draw a round, weigh its replies, train, step; all methods on the same draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import polars as pl

from fedipw.errors import DivergedError, InputError
from fedipw.lab.clients import ClientData
from fedipw.lab.engine.composition import Composition
from fedipw.lab.engine.history import History
from fedipw.lab.engine.local import LocalWork, LogisticTrainer, RoundWork, Trainer
from fedipw.lab.engine.server import PlainStep, ServerStep, State
from fedipw.lab.theory.limit import LimitWeights
from fedipw.numerics.checks import LARGEST, check_positive, check_rows
from fedipw.tables.columns import INVITE_PROB, INVITED
from fedipw.tables.ledger import Round
from fedipw.weighting.weigher import RoundWeights

if TYPE_CHECKING:
    from fedipw.lab.clients import ArrayClients
    from fedipw.lab.invitations import RoundInvitations
    from fedipw.lab.mechanisms import ParticipationProcess, RoundDraw
    from fedipw.numerics import FloatArray, IntArray
    from fedipw.tables.population import Population
    from fedipw.weighting.invitations import Invited
    from fedipw.weighting.weigher import Weigher

_SKIPPED: Mapping[str, Any] = {  # what a method's round without replies is recorded as
    "weight_sum": float("nan"),
    "effective_replies": float("nan"),
    "reliance": float("nan"),
    "trimmed": 0,
    "trimmed_mass": 0.0,
    "source": "skipped: nobody replied",
    "negative": 0,
    "note": "",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Federation:
    """A population with enrollment drawn, its clients' data, and how they take part."""

    population: Population
    clients: ClientData | ArrayClients
    participation: ParticipationProcess
    enrollment_prob: FloatArray | None = None  # (N,) true, where known
    invitations: RoundInvitations | None = None  # all enrolled are asked if none

    def __post_init__(self) -> None:
        if self.population.listed != self.clients.size:
            raise InputError(
                f"The population has {self.population.listed} clients, the data "
                f"{self.clients.size}."
            )
        _ = self.population.enrolled_size  # enrollment must have been drawn

    @property
    def rows(self) -> ClientData:
        """The clients' data as logistic regression needs them."""
        if not isinstance(self.clients, ClientData):
            raise InputError("These clients have data of another model: pass its trainer.")
        return self.clients


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    r"""How the model is trained.

    .. math:: \theta_{r+1} = \theta_r + \gamma \sum_{i \in S_r} w_{ir} \Delta_{ir} \qquad (O3)

    With an ``optimizer`` the server steps by its rule instead, such as :class:`Adam` (O10), but for
    methods that have a server step of their own.
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
        Each with the methods that share its probabilities.
    training
        Local work and server step.
    rng
        Chance of mini-batches.
    compositions
        How each method trains, by name; by default every scheme is a method that sums its replies.
    trainer
        Local training; by default the compiled logistic regression on the federation's clients.
    limits_from
        Collect limit weights from this round on (needs true probabilities); off by default.
    keep_iterates
        Keep the model after every round, not only the last: off for large models.
    """

    def __init__(
        self,
        federation: Federation,
        weighers: Sequence[Weigher],
        training: Training,
        rng: np.random.Generator,
        *,
        compositions: Mapping[str, Composition] | None = None,
        trainer: Trainer | None = None,
        limits_from: int | None = None,
        keep_iterates: bool = True,
    ) -> None:
        self.federation, self.training = federation, training
        self._weighers, self._rng = tuple(weighers), rng
        self._rows = np.flatnonzero(federation.population.enrolled)
        self._methods = dict(compositions or _plain_sums(self._weighers))
        _check_weights(self._methods, self._weighers)
        if training.steps is not None:
            check_rows(federation.population.listed, steps=training.steps)
        self.trainer = trainer or LogisticTrainer(federation.rows, training.work, training.l2)
        start = self.trainer.start if training.start is None else training.start
        for composition in self._methods.values():
            composition.begin(self.trainer, self._task(self._rows, start, 0))
        self._keep = keep_iterates
        self._iterates = [np.tile(start, (len(self._methods), 1))]
        self._records: list[dict[str, Any]] = []  # of each round
        self._server: ServerStep = training.optimizer or PlainStep(training.server_step)
        self._moments: dict[str, State] = {name: {} for name in self._methods}
        self._limits_from = limits_from
        self._drawn: tuple[int, Invited | None] | None = None  # invitations of the last round
        self.limits = self._new_limits()  # by method, where asked for

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(self._methods)

    @property
    def models(self) -> Mapping[str, FloatArray]:
        """The latest model of each method, (P,)."""
        return dict(zip(self._methods, self._iterates[-1], strict=True))

    def _new_limits(self) -> dict[str, LimitWeights]:
        if self._limits_from is None:
            return {}
        truth = self.federation.enrollment_prob
        if truth is None:
            raise InputError("Limits need true enrollment probabilities.")
        enrolled = self.federation.population.enrolled
        keys = {_limit_key(name, of) for name, of in self._methods.items()}
        made = {key: LimitWeights(enrolled, truth) for key in sorted(keys)}
        return {name: made[_limit_key(name, of)] for name, of in self._methods.items()}

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return len(self._records)

    def advance(self, rounds: int, *, after: Callable[[int], None] | None = None) -> None:
        """Run more rounds; ``after`` is called with the number done after each."""
        for _ in range(rounds):
            self._round()
            if after is not None:
                after(self.rounds)

    def _round(self) -> None:
        draw = self.federation.participation.advance()
        invited = self.invited(draw.index)
        replied = draw.replied[self._rows]
        if invited is not None:
            replied = replied & invited.flags[self._rows]
        key = int(self._rng.integers(2**63))
        coming = self.known(draw, self._rows)
        given: dict[str, RoundWeights] = {}
        reliance = {of.weights: of.reliance for of in self._methods.values()}
        for weigher in self._weighers:
            weigher.open(coming)
            if replied.any():
                given |= weigher.weigh(replied, reliance)
                self._add_limits(weigher, draw)
            weigher.close(replied)
        before, weighed = self._iterates[-1], []
        following = before.copy()
        if given:
            task = self._task(self._rows[replied], before[0], key)
            for position, name in enumerate(self._methods):
                weights = given[self._methods[name].weights]
                mine = replace(task, theta=before[position])
                following[position], note = self._stepped(name, mine, weights)
                weighed.append(replace(weights, note=note) if note else weights)
        if not self._keep:
            self._iterates.clear()
        self._iterates.append(following)
        self._records.append(_record(int(replied.sum()), weighed, len(self._methods)))

    def known(self, draw: RoundDraw, rows: IntArray) -> Round:
        """Return what is known of some clients before a round's replies."""
        prob, names = draw.participation_prob, self.federation.participation.columns
        columns = [pl.Series(name, draw.covariates[rows, j]) for j, name in enumerate(names)]
        invited = self.invited(draw.index)
        if invited is not None:
            columns.append(pl.Series(INVITED, invited.flags[rows]))
            columns.append(pl.Series(INVITE_PROB, invited.prob[rows]))
            prob = None if prob is None else prob * invited.prob
        return Round(
            index=draw.index,
            rows=rows,
            table=columns[0].to_frame().hstack(columns[1:]) if columns else pl.DataFrame(),
            participation_prob=None if prob is None else prob[rows],
        )

    def invited(self, index: int) -> Invited | None:
        """Return the invitations of a round, by client of the population; none if all are asked."""
        if self._drawn is None or self._drawn[0] != index:
            of = self.federation.invitations
            self._drawn = index, None if of is None else of.drawn(index)
        return self._drawn[1]

    def _task(self, who: IntArray, theta: FloatArray, key: int) -> RoundWork:
        own = self.training.steps
        return RoundWork(clients=who, theta=theta, key=key, steps=None if own is None else own[who])

    def _stepped(self, name: str, task: RoundWork, weights: RoundWeights) -> tuple[FloatArray, str]:
        """Return a method's next model, and what it could not do."""
        composition = self._methods[name]
        found = composition.total(self.trainer, task, weights)
        if found.total is None:
            return task.theta, found.note
        server = composition.server or self._server
        following, self._moments[name] = server.step(
            task.theta, found.total, self._moments[name], self.rounds + 1
        )
        if not (np.abs(following) <= LARGEST).all():
            raise DivergedError(name, self.rounds + 1, float(weights.weights.max()))
        return following, found.note

    def _add_limits(self, weigher: Weigher, draw: RoundDraw) -> None:
        if self._limits_from is None or draw.index < self._limits_from:
            return
        if draw.participation_prob is None:
            raise InputError("Limits need true participation probabilities; a trace has none.")
        everyone = np.arange(len(draw.replied))
        units, done = weigher.everyone(self.known(draw, everyone)), set()
        for name, composition in self._methods.items():
            limit = self.limits[name]
            if composition.weights not in weigher.methods or id(limit) in done:
                continue
            done.add(id(limit))
            work = self._relative_work(composition)
            if composition.memory_weights is None:
                weighing, prob = weigher.weighings[composition.weights], draw.participation_prob
                invited = self.invited(draw.index)
                prob = prob if invited is None else prob * invited.prob
                limit.add(weighing, units, prob, work=work)
            elif limit.rounds == 0 or composition.counted is not None:
                # memory averages participation out, the same in every round but for who counts
                of, ones = composition.memory_weights, np.ones(len(draw.replied))
                limit.add(of.weighing, of.everyone(), ones, work=work)

    def _relative_work(self, composition: Composition) -> FloatArray | None:
        """Return what unequal work and being left out do to the clients' weights, (N,)."""
        steps = self.training.steps
        if steps is None or not composition.follows_work:
            return composition.counted
        relative: FloatArray = steps / steps.mean()
        return relative if composition.counted is None else relative * composition.counted

    def history(self) -> History:
        """Return everything so far."""
        if not self._keep:
            raise InputError(
                "Only the last models were kept; they are in `models`. Pass keep_iterates=True "
                "for a history."
            )
        records, shape = self._records, (self.rounds, len(self.methods))
        kinds = {int: np.int64, float: np.float64, str: object}
        by_method = {
            name: np.array([r[name] for r in records], dtype=kinds[type(empty)]).reshape(shape).T
            for name, empty in _SKIPPED.items()
        }
        return History(
            methods=self.methods,
            iterates=np.stack(self._iterates, axis=1),
            replies=np.array([r["replies"] for r in records], dtype=np.int64),
            **by_method,
        )

    def state(self) -> dict[str, Any]:
        """Return arrays and plain values from which ``restore`` continues to the same bytes."""
        return {
            "iterates": np.stack(self._iterates),
            "records": self._records,
            "participation": self.federation.participation.state(),
            "training_rng": self._rng.bit_generator.state,
            "weighers": {str(k): w.state() for k, w in enumerate(self._weighers)},
            "limits": {name: limit.state() for name, limit in self.limits.items()},
            "memories": {name: method.state() for name, method in self._methods.items()},
            "moments": {name: dict(state) for name, state in self._moments.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back into a simulation built from the same settings and seed."""
        self._iterates = list(np.array(state["iterates"]))
        self._records = [dict(record) for record in state["records"]]
        self.federation.participation.restore(state["participation"])
        self._rng.bit_generator.state = state["training_rng"]
        for k, weigher in enumerate(self._weighers):
            weigher.restore(state["weighers"].get(str(k), {}))
        for name, limit in self.limits.items():
            limit.restore(state["limits"][name])
        for name, method in self._methods.items():
            method.restore(state["memories"][name])
        self._moments = {name: dict(state["moments"][name]) for name in self.methods}


def _plain_sums(weighers: Sequence[Weigher]) -> dict[str, Composition]:
    names = [name for weigher in weighers for name in weigher.methods]
    return {name: Composition(name) for name in names}


def _check_weights(methods: Mapping[str, Composition], weighers: Sequence[Weigher]) -> None:
    names = [name for weigher in weighers for name in weigher.methods]
    if not names or len(set(names)) != len(names):
        raise InputError(f"Methods must be named once each, not {tuple(names)}.")
    for name, composition in methods.items():
        if composition.weights not in names:
            raise InputError(f"{name} reads weights {composition.weights!r}; there are {names}.")


def _limit_key(name: str, composition: Composition) -> tuple[str, bool]:
    """Return what methods with one limit share."""
    memory = composition.memory_weights is not None
    return (name if memory else composition.weights, composition.follows_work)


def _record(replies: int, weighed: Sequence[RoundWeights], methods: int) -> dict[str, Any]:
    """Return a round as plain values: its replies, and of all else one value a method."""
    if not weighed:
        return {"replies": 0, **{name: [empty] * methods for name, empty in _SKIPPED.items()}}
    cut = [w.trimming for w in weighed]
    return {
        "replies": replies,
        "weight_sum": [w.total for w in weighed],
        "effective_replies": [w.effective_replies for w in weighed],
        "reliance": [w.reliance for w in weighed],
        "trimmed": [0 if t is None else t.changed for t in cut],
        "trimmed_mass": [0.0 if t is None else t.mass for t in cut],
        "source": [w.replies.source.value for w in weighed],
        "negative": [w.negative for w in weighed],
        "note": [w.note for w in weighed],
    }
