"""FedIPW on Flower: a strategy that wraps another and reweights its replies."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from logging import getLogger
from pathlib import Path
from typing import Any, final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedipw.errors import InputError
from fedipw.flower.arrays import array_view, packed_record
from fedipw.flower.asking import AskSample
from fedipw.flower.augmentation import Augmenter
from fedipw.flower.config import RunConfig
from fedipw.flower.door import Door
from fedipw.flower.evaluation import Evaluator
from fedipw.flower.identity import FILE as IDENTITIES
from fedipw.flower.identity import Identities
from fedipw.flower.invitations import Inviter
from fedipw.flower.journal import SERVER, TRAINED, InnerState, Journal
from fedipw.flower.loop import LastModels, refuse_unknown
from fedipw.flower.memory import FOLDER, ClientMemory
from fedipw.flower.outcomes import (
    InvitedRounds,
    RoundOutcomes,
    Rounds,
    add_metrics,
    log_private_round,
    log_round,
    round_counts,
    round_metrics,
)
from fedipw.flower.preflight import check_writable
from fedipw.flower.privacy import GaussianNoise, NoisySums
from fedipw.flower.private import Private, refuse_with_private
from fedipw.flower.private_training import METHOD, PrivateTraining
from fedipw.flower.probe import check_follows_weights
from fedipw.flower.progress import (
    EVALUATE,
    TRAIN,
    Callback,
    Reporter,
    plain_line,
    summary_lines,
    warnings_once,
)
from fedipw.flower.roster import Attendance, Roster, VisibleGrid
from fedipw.flower.run_config import run_settings
from fedipw.flower.screen import Names, Screen, SentModel, screened
from fedipw.flower.step import RoundInput, Stepper, screened_replies
from fedipw.flower.weighted_sum import (
    LARGEST_SUM,
    weight_key,
    weights_size,
)
from fedipw.numerics.checks import check_positive, some
from fedipw.storage.places import local_path
from fedipw.tables.columns import ID
from fedipw.tables.ledger import Ledger
from fedipw.tables.table import TableLike
from fedipw.tables.targets import TargetsLike
from fedipw.weighting.invitations import Invitations
from fedipw.weighting.live import GrowingLedger
from fedipw.weighting.settings import Settings

_LOG = getLogger("flwr.fedipw")


@final
class FedIPW(Strategy):
    r"""Any Flower strategy, its replies weighted by inverse selection probabilities.

    In every round clients are asked for their identifier and current state; the wrapped strategy
    samples among those that answer and configures what they are sent. Replies are screened, each
    gets its weight (1/N included) from the method, and the wrapped strategy steps by

    .. math:: \theta + \sum_{i \in S} w_i \Delta_i \qquad (O8)

    in place of its plain mean. The round is in the ledger, and the model beside it, before it
    counts as closed: a server that was killed goes on after the last closed round when it is
    started again with the same settings.

    Parameters
    ----------
    strategy
        The strategy to wrap: FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad, FedProx, or another
        that averages replies by ``weighted_by_key``; a copy of another is tried on known arrays
        before the first round, and refused if it ignores weights.
    ledger
        Directory for the rounds; the models go to ``checkpoint`` in it, evaluations to
        ``evaluation``.
    population, enrolled, targets, population_size, totals
        A table of the whole population; or one of the enrolled clients with population means,
        and the population's size where a method needs it; ``totals`` says that the targets are
        totals, to be divided by it.
    enrollment, participation, availability, history
        Formulas of the stages, as of ``fedipw weights``. Covariates that ``participation`` names
        and the table does not have are asked of the clients before every round.
    missing
        ``"drop"``: replies of clients whose values are missing from the table get no weight, and
        the log says so; ``"indicator"``: missing is a value of its own.
    covariates
        The covariates to ask for, where the formula does not name them all: names, or a mapping
        from names to what answers may be, ``(low, high)`` of numbers, a list of levels, or a
        :class:`fedipw.flower.Covariate`. Other answers are not used.
    scheme
        The method; by default ``augmented`` for a population table, ``augmented-online`` for
        totals; with noise ``fedipw-hajek`` and ``calibrated-entropy-hajek``. ``efficient-hajek``,
        ``mifa+efficient`` and others with a memory keep a vector of each client on disk;
        ``scaffold+efficient`` needs :class:`fedipw.flower.ControlVariate` in the clients.
    trim
        Cut weights at this multiple of a round's mean.
    screen
        The conditions replies must meet, and the norm updates are clipped to.
    buffers
        Patterns (``"*.ema"``) of arrays that are averaged by self-normalised weights and never
        moved by a weighted sum or an optimiser (O22), beside those that are found: integers, and
        the running statistics of normalisation layers.
    noise
        Gaussian noise on the weighted sum; needs ``Screen(clip=...)`` and a model without buffers.
        With ``private`` clients add it, each a share, before anything is summed.
    private
        Train by secure sums: ``enrolled`` lists identifiers alone, clients run
        :class:`fedipw.flower.PrivateClient`, keep their covariates, weigh themselves towards the
        ``targets`` (``calibrated-online``) and show the server only totals. Needs
        ``Screen(clip=...)``.
    refit_every, window, decay
        Rounds between fits of participation; of past rounds only the last ``window`` are fitted on,
        or older ones count less, by ``decay`` a round, such as 0.95.
    day_length, day_hours
        Rounds of a cycle of the clock columns ``hour_sin`` and ``hour_cos``; or its hours, for a
        clock by ``opened_at``.
    classifier, folds, score_calibration
        A classifier of both stages by name (``boosting``), or a scikit-learn one; folds of clients
        for cross-fitting, five by default; ``platt`` or ``isotonic``.
    l2
        Ridge penalty on the coefficients of both stages, for small federations in which covariates
        separate those selected from the rest.
    ask_timeout
        Seconds to wait for clients' descriptions.
    patience
        Seconds that a round waits while no further client can be used, after which the run ends
        with an error that says what was heard; none to wait for ever.
    ask
        Ask a sample of the enrolled clients before each round, a fraction or their number, instead
        of all (P8).
    authenticated
        Whether Flower authenticates nodes: a client is then held by its node's public key, in
        ``identities.json`` beside the ledger.
    winsorise
        Numbers that clients answer are taken inside this quantile of what the other clients
        answered; none to take them as they are.
    average
        The model returned is the average of the models of this last fraction of the rounds, and
        ``last_model`` the last one; none to return the last.
    soft
        Whether targets that no weights on the enrolled can meet are approached, and an enrollment
        model that separates gets a penalty, with a note in the log; else both are errors.
    examples
        Column of the table of clients with their numbers of samples: the target is then the mean
        over the population's samples (W8), (W22), not over its clients. What clients report as
        their number of examples is never used.
    subgroups
        Columns of the table of clients: evaluation also gives metrics of their levels, with
        intervals.
    cluster
        Column of the table of clients of what they share, such as a person with several devices:
        the unit of evaluation's standard errors, and no covariate.
    callbacks
        Called with a :class:`~fedipw.flower.progress.RoundReport` after the training and after the
        evaluation of each round. One that raises is logged and does not end the run.
    invitations
        ``uniform``, the wrapped strategy's own sampling; ``proportional`` to enrollment weights;
        or :class:`~fedipw.weighting.invitations.Invitations` with their number, a floor and a rest
        between invitations. Clients are invited to evaluate by the wrapped strategy.
    seed
        Of the wrapped strategy's sampling and of invitations, so that a resumed run samples as it
        would have.
    clock
        Source of a round's ``opened_at``.

    Examples
    --------
    >>> import polars as pl
    >>> from flwr.serverapp.strategy import FedAdam
    >>> devices = pl.DataFrame({"unit_id": range(6), "age": [30, 41, 52, 28, 60, 45],
    ...                         "enrolled": [True, False, True, True, False, False]})
    >>> strategy = FedIPW(
    ...     FedAdam(eta=0.01),
    ...     population=devices,  # or the path of a table
    ...     enrollment="age",
    ...     participation="age + battery",  # battery is asked of the clients
    ...     ledger="ledger",
    ... )
    >>> for line in strategy.config.lines():
    ...     print(line)
    augmented; 3 enrolled clients of 6
    availability ~ ., reply ~ age + battery
    asked before every round: battery

    In a server app, ``strategy.start(grid, initial_arrays, num_rounds=100)`` then trains.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        ledger: str | Path,
        population: TableLike | None = None,
        enrolled: TableLike | None = None,
        targets: TargetsLike | None = None,
        population_size: float | None = None,
        totals: bool = False,
        enrollment: str = ".",
        participation: str = ".",
        availability: str = ".",
        history: bool = False,
        missing: str = "drop",
        covariates: Sequence[str] | Mapping[str, Any] | None = None,
        scheme: str | None = None,
        trim: float | None = None,
        screen: Screen | None = None,
        buffers: Sequence[str] = (),
        noise: GaussianNoise | None = None,
        private: Private | None = None,
        refit_every: int = 10,
        window: int | None = None,
        decay: float = 1.0,
        day_length: float = 24.0,
        day_hours: float | None = None,
        classifier: Any = None,
        folds: int | None = None,
        score_calibration: str | None = None,
        l2: float = 0.0,
        ask_timeout: float = 60.0,
        patience: float | None = 3600.0,
        ask: float | None = None,
        authenticated: bool = False,
        winsorise: float | None = 0.99,
        average: float | None = 0.2,
        soft: bool = True,
        examples: str | None = None,
        subgroups: Sequence[str] = (),
        cluster: str | None = None,
        callbacks: Sequence[Callback] = (),
        invitations: str | Invitations = "uniform",
        seed: int = 0,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.strategy, self.key = strategy, weight_key(strategy)
        self.screen = Screen() if screen is None else screen
        self.buffers = (buffers,) if isinstance(buffers, str) else tuple(buffers)
        self.config = RunConfig.of(
            population=population, enrolled=enrolled, targets=targets,
            population_size=population_size, totals=totals, covariates=covariates,
            augment=noise is None, private=private is not None,
            ledger=local_path(ledger, "a server's ledger"), examples=examples, cluster=cluster,
            settings=Settings(
                method=scheme if private is None else "fedavg", enrollment=enrollment,
                participation=participation,
                availability=availability, history=history, refit_every=refit_every,
                window=window, decay=decay, day_length=day_length, day_hours=day_hours,
                classifier=classifier, folds=folds, score_calibration=score_calibration, l2=l2,
                trim=trim, missing=missing, soft=soft,
            ),
        )  # fmt: skip
        if noise is not None and self.screen.clip is None:
            raise InputError("Noise needs a bounded influence: pass screen=Screen(clip=...).")
        how_invited = Invitations.of(invitations)
        if private is not None:
            refuse_with_private(
                scheme=scheme not in {None, METHOD},
                participation=participation != ".", availability=availability != ".",
                history=history, trim=trim is not None, covariates=bool(covariates),
                examples=examples is not None, subgroups=bool(subgroups),
                cluster=cluster is not None, classifier=classifier is not None,
                invitations=not how_invited.plain, buffers=bool(self.buffers),
            )  # fmt: skip
        self._directory, self._seed, self._clock = Path(ledger), seed, clock
        members, rounds = self.config.stage.members, Ledger(self._directory)
        register = self.config.register
        self.noise = None if noise is None else NoisySums(noise, register.founders)
        sample = None if ask is None else AskSample(ask, seed)
        shared = self._shared(private, how_invited, sample)
        self.journal = Journal(self._directory / "checkpoint", {**self.config.settings, **shared})
        self.config.stage.require(self.config.plan.method.needs)
        self.journal.check(len(rounds.rounds))  # other settings are named before anything fails
        how = self.config.plan.method.augmentation.regression
        self.augmenter = None if how is None else Augmenter(how)
        if noise is not None and self.augmenter is not None:
            raise InputError(
                f"{self.config.plan.method.name} keeps sums of updates that the noise of this "
                "guarantee does not cover: with noise use a method without a regression, such as "
                "fedipw-hajek."
            )
        self.memory = self._remembered(noise)
        self._stepper = Stepper(
            strategy, self.key, noise=self.noise, augmenter=self.augmenter, memory=self.memory,
            clip=self.screen.clip, method=self.config.plan.method.name,
        )  # fmt: skip
        wait = patience if patience is None else check_positive(patience, "patience")
        asked = self.config.asked(rounds)
        declared = self.config.declared
        self.door = Door(members, self.config.columns, declared, self.config.coded, winsorise)
        self.weighed: Rounds | None = None  # rounds whose replies are weighed here
        self.private: PrivateTraining | None = None
        if private is None:
            self.weighed = Rounds(self.config.stage, rounds, self.config.replies, self.door)
        else:
            self.private = self._private(private)
        self.rounds: InvitedRounds = self.weighed or InvitedRounds(GrowingLedger(rounds, members))
        keys = self._directory / IDENTITIES if authenticated else None
        self.roster = Roster(
            members, asked, check_positive(ask_timeout, "ask_timeout"), declared=declared,
            identities=Identities(members.frame[ID].to_list(), keys), patience=wait, sample=sample,
        )  # fmt: skip
        self.inviter = None
        if not how_invited.plain:
            self.inviter = Inviter(how_invited, self._weighed.live, seed)
        self.evaluator = Evaluator(
            self.config,
            self._directory / "evaluation",
            self.journal,
            self.key,
            door=self.door,
            subgroups=subgroups,
        )
        self._inner, self._reporter = InnerState(strategy), Reporter(callbacks)
        self._last_models = LastModels(average)
        self.last_model: ArrayRecord | None = None  # after the last closed round
        self._sent: SentModel | None = None
        self._names: Names | None = None  # of records and metrics in earlier rounds
        self._probed = False
        self._ttl: float | None = None

    @classmethod
    def from_run_config(
        cls, strategy: Strategy, run_config: Mapping[str, Any], **given: Any
    ) -> FedIPW:
        """Return the strategy with the settings of an app's configuration, ``fedipw-...``.

        ``run_config`` is ``context.run_config``; :func:`~fedipw.flower.run_config.run_settings`
        has its keys. ``given`` are further arguments, such as ``callbacks``; one that both give is
        an error.
        """
        found = run_settings(run_config, given)
        return cls(strategy, **found, **given)

    def _shared(
        self, private: Private | None, how_invited: Invitations, sample: AskSample | None
    ) -> dict[str, Any]:
        """Return settings beside the configuration's that a resumed run must share."""
        shared: dict[str, Any] = {}
        if private is not None:
            shared["private"] = private.to_json() | {"clip": self.screen.clip}
        if not how_invited.plain:
            shared["invitations"] = how_invited.to_json() | {"seed": self._seed}
        if self.buffers:
            shared["buffers"] = list(self.buffers)
        if sample is not None:
            shared["ask"] = [sample.size, sample.seed]
        return shared

    def _private(self, private: Private) -> PrivateTraining:
        """Return the rounds of private training."""
        targets = self.config.stage.population.targets
        if targets is None or self.screen.clip is None:
            raise InputError(
                "private= needs enrolled=, a table of identifiers, with targets=, and "
                "screen=Screen(clip=...), by which clients bound their updates."
            )
        return PrivateTraining(
            private, targets, self.screen.clip, strategy=self.strategy, key=self.key,
            enrolled=self.config.stage.members.listed, noise=self.noise,
        )  # fmt: skip

    @property
    def _weighed(self) -> Rounds:
        """The rounds, where the server weighs their replies."""
        assert self.weighed is not None
        return self.weighed

    def _remembered(self, noise: GaussianNoise | None) -> ClientMemory | None:
        """Return the memory of a method that has one."""
        method = self.config.plan.method
        if not method.augmentation.memory:
            return None
        if noise is not None:
            raise InputError(
                f"{method.name} keeps each client's vector and adds it to every later round, which "
                "the noise of this guarantee does not cover: with noise use a method without a "
                "memory, such as fedipw-hajek."
            )
        folder = self._directory / "checkpoint" / FOLDER
        return ClientMemory(method, self.config.stage, folder, self.config.register.slots)

    def summary(self) -> None:
        """Log the settings, the bound on a client's influence among them."""
        if self.private is not None:
            lines = self.private.lines()
        else:
            lines = [
                *self.config.lines(),
                f"replies with updates beyond norm {self.screen.max_norm:g} are refused",
                self.config.influence(self.screen),
            ]
        if self.inviter is not None:
            lines += [self.inviter.line()]
        if self.memory is not None:
            lines += [self.memory.influence()]
            lines += [self.memory.line()] if self.memory.begun else []
        if self.noise is not None:
            lines += [f"{self.noise.settings}; epsilon spent so far {self.noise.epsilon:.4g}"]
        for line in lines:
            _LOG.info("\t├──> FedIPW: %s", line)
        if self.private is None and (lacking := self.config.without_weight()):
            _LOG.warning("FedIPW: %s", lacking)
        self.strategy.summary()

    def start(  # noqa: PLR0917
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
        **more: Any,
    ) -> Result:
        """Train until ``num_rounds`` rounds are closed, those of an earlier start among them.

        Parameters are those of :meth:`flwr.serverapp.strategy.Strategy.start`. A message lives no
        longer than ``timeout``, so that a client that is late is free for the next round.
        ``initial_arrays`` are used if no round is closed yet. ``should_stop`` is called after every
        round with its number and all results so far, such as
        :class:`~fedipw.flower.stopping.StopWhen`; a run that it ends returns its last model, since
        the average of the last models begins at a round that was set before. The ledger is locked
        meanwhile: a second server is refused before it does anything.
        """
        refuse_unknown(more)
        began, self._ttl = time.monotonic(), timeout
        self._probe()
        train_config = train_config or ConfigRecord()
        evaluate_config = evaluate_config or ConfigRecord()
        with self.rounds.live.holding(), warnings_once():
            check_writable(self.journal.directory)
            arrays, result = self._resumed(initial_arrays)
            self.config.register.save()
            _LOG.info("Starting FedIPW(%s): %d rounds, %d of them done before",
                      type(self.strategy).__name__, num_rounds, self.rounds.closed)  # fmt: skip
            self.summary()
            self._last_models.begin(num_rounds, self.rounds.closed)
            result.arrays = self.last_model = arrays
            for index in range(self.rounds.closed, num_rounds + 1):
                if index > self.rounds.closed:
                    spent = "" if self.noise is None else self.noise.exhausted
                    if spent:
                        _LOG.warning("FedIPW ends after %d rounds: %s", index - 1, spent)
                        break
                    _LOG.info("")
                    _LOG.info("[ROUND %d/%d]", index, num_rounds)
                    sent = self.configure_train(index, arrays, train_config, grid)
                    replies = grid.send_and_receive(messages=sent, timeout=timeout)
                    made, metrics = self.aggregate_train(index, replies)
                    arrays = arrays if made is None else made
                    _put(result.train_metrics_clientapp, index, metrics)
                    self._reporter.report(index, TRAIN, metrics, arrays)
                result.arrays = self.last_model = arrays
                if index > 0:
                    self._evaluated(index, arrays, evaluate_config, grid, result)
                if evaluate_fn is not None and self.journal.read(SERVER, index) is None:
                    found = evaluate_fn(index, arrays)
                    self.journal.write(SERVER, index, found)
                    _put(result.evaluate_metrics_serverapp, index, found)
                if index > 0 and should_stop is not None and should_stop(index, result):
                    _LOG.info("FedIPW: should_stop ends the run after round %d", index)
                    break
        mean = self._last_models.mean(self.last_model)
        result.arrays = result.arrays if mean is None else mean
        _LOG.info("FedIPW finished in %.2fs", time.monotonic() - began)
        for line in summary_lines(result):
            _LOG.info("\t└──> %s", line)
        return result

    def _probe(self) -> None:
        """Try once, before any state is restored, whether the wrapped strategy follows weights."""
        if not self._probed:
            check_follows_weights(self.strategy, self.key)
            self._probed = True

    def _evaluated(
        self, index: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, result: Result
    ) -> None:
        """Let clients evaluate a round's model, unless they did before."""
        if self.evaluator.done(index) is not None:
            return
        sent = list(self.configure_evaluate(index, arrays, config, grid))
        if sent:
            replies = grid.send_and_receive(messages=sent, timeout=self._ttl)
            metrics = self.aggregate_evaluate(index, replies)
            _put(result.evaluate_metrics_clientapp, index, metrics)
            self._reporter.report(index, EVALUATE, metrics, arrays)
        else:
            self.evaluator.skip(index)

    def _resumed(self, initial: ArrayRecord) -> tuple[ArrayRecord, Result]:
        """Return the model after the last closed round, and all metrics so far."""
        result, done = Result(), self.rounds.closed
        if not done:
            self.door.restore(None)
            self._begin_memory(initial, {})
            return initial, result
        arrays, state = self.journal.load_model(done)
        if {k: v.shape for k, v in arrays.items()} != {k: v.shape for k, v in initial.items()}:
            raise InputError(
                f"The model of round {done} in {self.journal.directory} has other arrays than "
                "initial_arrays: train it on, or begin with an empty ledger."
            )
        if {k: v.dtype for k, v in arrays.items()} != {k: v.dtype for k, v in initial.items()}:
            _LOG.warning(
                "FedIPW: the model of round %d is put in the types of initial_arrays", done
            )
            views = {name: array_view(array) for name, array in arrays.items()}
            arrays = packed_record(views, initial)
        self._inner.restore(state["inner"])
        self._names = None if state.get("names") is None else _tuples(json.loads(state["names"]))
        self.door.restore(state.get("answers"))
        if (self.noise is None) != (state["noise"] is None):
            before = "without noise" if state["noise"] is None else "with noise"
            raise InputError(
                f"The rounds in {self._directory} were trained {before}: their privacy guarantee "
                "would not hold for the rest. Go on as before, or begin with an empty ledger."
            )
        if self.noise is not None:
            self.noise.restore(state["noise"])
        if self.augmenter is not None:
            self.augmenter.restore(state["augmentation"])
        if self.private is not None:
            self.private.restore(state["private"])
        self._begin_memory(arrays, state.get("memory"))
        self._last_models.restore(state["tail"])
        for index in range(done + 1):
            _put(result.train_metrics_clientapp, index, self.journal.metrics(TRAINED, index))
            _put(result.evaluate_metrics_clientapp, index, self.evaluator.done(index))
            _put(result.evaluate_metrics_serverapp, index, self.journal.metrics(SERVER, index))
        _LOG.info("FedIPW: %d rounds are done; going on from %s", done, self.journal.directory)
        if self.config.register.change:
            _LOG.warning("FedIPW: the table of clients has changed since round %d: %s. Rounds go "
                         "on with it as it is; what clients did before counts as it was", done,
                         self.config.register.change)  # fmt: skip
        return arrays, result

    def _begin_memory(self, model: ArrayRecord, state: Mapping[str, Any] | None) -> None:
        """Let the memory take up the model, and what was saved with it."""
        if self.memory is None:
            return
        if state is None:
            raise InputError(
                f"The rounds in {self._directory} were trained without the memory of "
                f"{self.config.plan.method.name}: go on as before, or begin with an empty ledger."
            )
        sent = SentModel.of(model, self.buffers)
        self.memory.begin(sent.arrays, state, sent.buffers)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients for their state, let the wrapped strategy invite some, open the round."""
        closed = self.rounds.closed
        if server_round != closed + 1:
            raise InputError(
                f"The ledger {self._directory} has {closed} closed rounds, so the next is "
                f"{closed + 1}, not {server_round}. FedIPW.start goes on where a run ended; "
                "another loop needs an empty ledger."
            )
        if self.noise is not None and self.noise.exhausted:
            raise InputError(f"Round {server_round} is not begun: {self.noise.exhausted}")
        self._probe()
        sent = self._sent = SentModel.of(arrays, self.buffers)
        if self.noise is not None and sent.buffers:
            raise InputError(
                f"The guarantee of noise does not cover buffers, which are averaged without any: "
                f"{some(sorted(sent.buffers))}. Use layers without running statistics, such as "
                "GroupNorm, or leave buffers out of what clients send."
            )
        self.roster.open(server_round, self._clock())
        visible = VisibleGrid(grid, self.roster)
        visible.get_node_ids()
        with self._sampling(server_round, "train"):
            given = sent.readable()
            messages = list(self.strategy.configure_train(server_round, given, config, visible))
        sent.send_plain(messages, given)
        attendance = self.roster.attendance()
        if not messages and attendance.nodes:
            self._nobody_invited(server_round, len(attendance.nodes))
        prob = None
        if self.inviter is not None and messages:
            messages, prob = self.inviter.directed(server_round, attendance, messages)
        self._limit_life(messages)
        self.rounds.open(attendance, messages, prob)
        if self.private is not None:
            self.private.invite(grid, server_round, self.rounds, sent)
        if self.memory is not None:
            self._open_memory(server_round, arrays, attendance, messages)
        return messages

    def _nobody_invited(self, index: int, available: int) -> None:
        """Raise if the wrapped strategy never invites anybody; else the round is recorded."""
        said = f"the wrapped strategy invited none of {available} available clients"
        if not getattr(self.strategy, "fraction_train", 0.0):
            raise InputError(f"Round {index}: {said}: set its fraction_train above 0.")
        _LOG.warning("FedIPW: %s in round %d: it is recorded and skipped", said, index)

    def _open_memory(
        self, index: int, model: ArrayRecord, attendance: Attendance, messages: Sequence[Message]
    ) -> None:
        """Let the memory take enrollment as it is, and add to invitations what clients need."""
        assert self.memory is not None
        if not self.memory.begun:  # another loop than start, and the first round
            self._begin_memory(model, {})
        if attendance.present.any():
            self.memory.open(self._weighed.live.weighing, attendance.present)
            row_of = dict(zip(attendance.nodes, attendance.rows.tolist(), strict=True))
            rows = [row_of[message.metadata.dst_node_id] for message in messages]
            self.memory.invite(index, messages, rows)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Weigh the replies, let the wrapped strategy step, and close the round."""
        if self._sent is None:
            raise InputError(f"Round {server_round} was not opened: call configure_train first.")
        sent, outcomes = self._sent, RoundOutcomes.of(self.rounds.invited, replies)
        if self.private is not None:
            arrays, metrics = self._private_step(server_round, outcomes, sent)
        else:
            arrays, metrics = self._weighed_step(server_round, outcomes, sent)
        model = sent.record if arrays is None else arrays
        noise = None if self.noise is None else self.noise.state()
        kept = {} if self.augmenter is None else self.augmenter.state()
        self._last_models.add(server_round, model)
        tail = self._last_models.state()
        state = {
            "inner": self._inner.packed(), "noise": noise, "augmentation": kept, "tail": tail,
            "names": None if self._names is None else json.dumps(self._names),
            "answers": self.door.state(),
        }  # fmt: skip
        if self.memory is not None:
            state["memory"] = self.memory.state()
        if self.private is not None:
            state["private"] = self.private.state()
        with self.rounds.live.closing():  # another server's checkpoint is left alone
            self.journal.save_model(server_round, model, state)
            self.journal.write(TRAINED, server_round, metrics)
            self.rounds.close(outcomes)
            self.journal.forget_models(server_round)
        if self.memory is not None:
            self.memory.close()
        self._sent = None
        return arrays, metrics

    def _weighed_step(
        self, server_round: int, outcomes: RoundOutcomes, sent: SentModel
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Screen and weigh the replies, and let the wrapped strategy step by them."""
        screening = screened(outcomes, sent, self.screen, key=self.key, before=self._names)
        self._names = screening.names
        if self.memory is not None:
            self.memory.screened(outcomes, self.rounds.rows, sent, self.screen)
        reliance = 1.0 if self.augmenter is None else self.augmenter.reliance
        found, weights = self._weighed.weights(outcomes, reliance)
        arrays, metrics = None, MetricRecord()
        weighted = screened_replies(outcomes, weights, screening)
        bounded = weights_size(weighted) <= LARGEST_SUM  # NaN is not
        if found is not None and not bounded:
            _LOG.warning("FedIPW: no step in round %d: the weights are too large to add updates "
                         "by (%.3g in sum, at most %.3g)", server_round, weights_size(weighted),
                         LARGEST_SUM)  # fmt: skip
            add_metrics(metrics, {"steps-skipped": 1})
        elif found is not None and (found.weights.any() or self.memory is not None):
            weighing = self._weighed.live.weighing
            arrays, own = self._stepper.step(
                server_round, weighted, RoundInput(found, weighing, sent, screening.limit)
            )
            metrics = MetricRecord() if own is None else own
        private = self.noise is not None
        add_metrics(metrics, round_metrics(self.rounds.available, outcomes, found))
        add_metrics(metrics, screening.metrics(found, private=private))
        add_metrics(metrics, {"winsorised": self.rounds.winsorised, **self._heard()})
        if self.noise is not None:
            add_metrics(metrics, {"epsilon": self.noise.epsilon})
        if self.memory is not None and found is not None:
            add_metrics(metrics, self.memory.metrics(screening.limit))
        ids, said = self.rounds.ids, plain_line(metrics)
        log_round("training", server_round, outcomes, found, ids, said=said)
        if screening.not_finite:
            place, name = next(iter(screening.not_finite.items()))
            _LOG.warning("FedIPW: metrics of %d replies are not finite and left out of the means, "
                         "%r of %r first", len(screening.not_finite), name,
                         self.rounds.ids[place])  # fmt: skip
        return arrays, metrics

    def _private_step(
        self, server_round: int, outcomes: RoundOutcomes, sent: SentModel
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Lead the round's sum to its end, and let the wrapped strategy step by it."""
        assert self.private is not None
        arrays, metrics, values = self.private.step(server_round, outcomes, sent)
        add_metrics(metrics, round_counts(self.rounds.available, outcomes))
        add_metrics(metrics, values | self._heard())
        if self.noise is not None:
            add_metrics(metrics, {"epsilon": self.noise.epsilon})
        log_private_round(server_round, outcomes, values)
        return arrays, metrics

    def _heard(self) -> dict[str, float | list[float]]:
        """Return what of clients' answers could not be used in the round."""
        found = self.roster.identities
        return {
            "other-levels": self.rounds.others, "unusable-nodes": self.roster.hearing.nodes,
            "contested": found.contested, "stand-ins": found.stand_ins,
            "fits-failed": self.rounds.live.failed,
        }  # fmt: skip

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the wrapped strategy invite clients to evaluate, if it does, and open that round."""
        if self.private is not None:  # metrics in clear would be of single clients
            return []
        self.roster.open(server_round, self._clock())
        visible = VisibleGrid(grid, self.roster)
        with self._sampling(server_round, "evaluate"):
            sent = list(self.strategy.configure_evaluate(server_round, arrays, config, visible))
        if sent:
            self._limit_life(sent)
            self.evaluator.open(self.roster.attendance(), sent)
        return sent

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return metrics weighted for the target population, plain ones, and intervals."""
        return self.evaluator.aggregated(self.strategy, server_round, replies)

    @contextmanager
    def _sampling(self, index: int, work: str) -> Iterator[None]:
        """Make the wrapped strategy's sampling a function of seed and round."""
        state = random.getstate()
        random.seed(f"{self._seed}/{work}/{index}")
        try:
            yield
        finally:
            random.setstate(state)

    def _limit_life(self, messages: Sequence[Message]) -> None:
        if self._ttl is not None:
            for message in messages:
                message.metadata.ttl = self._ttl


def _tuples(value: Any) -> Any:
    """Return lists, as JSON has them, as the tuples they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _put(metrics: dict[int, MetricRecord], index: int, found: MetricRecord | None) -> None:
    if found:
        metrics[index] = found
