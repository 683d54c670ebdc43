"""Participation probabilities of rounds as they open and close, by one learner for all engines.

A simulation of a thousand rounds, a ledger of a billion rows and a live server differ only in
where coded rows lie (:mod:`fedipw.selection.rowstore`). A round is coded once; a refit starts
where the last one ended, moved by the newest rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from math import ceil, log
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import polars as pl

from fedipw.errors import InputError, NotConvergedError, SeparationError
from fedipw.numerics.checks import LARGEST, SMALLEST, check_offsets, check_rows, some
from fedipw.selection.classifiers import (
    PENALTY,
    Estimator,
    Fit,
    Newton,
    Rate,
    penalty_note,
    rate_note,
)
from fedipw.selection.logistic import LogisticFit, likelihood_sums
from fedipw.selection.rowstore import UNWEIGHTED, BlockStore, PanelStore, RowStore
from fedipw.selection.saved import StageModel
from fedipw.selection.steps import (
    AVAILABILITY_COLUMNS,
    REPLY_COLUMNS,
    TIME_COLUMNS,
    Clock,
    ReplyHistory,
)
from fedipw.tables.columns import ASKED, AVAILABLE, INVITE_PROB, INVITED, REPLIED
from fedipw.tables.design import Missing

if TYPE_CHECKING:
    from pathlib import Path

    from fedipw.numerics import BoolArray, FloatArray, IntArray
    from fedipw.selection.rowstore import StoredRows
    from fedipw.selection.steps import Step
    from fedipw.tables.design import Design
    from fedipw.tables.ledger import Round
    from fedipw.tables.population import Members


# what values of clients can raise in coding and fitting; an error of this program is none of them
FAILURES = (InputError, ArithmeticError, np.linalg.LinAlgError, ValueError)


# share of all weight that rounds left out by a decay have at most, where rounds list as many rows
FORGOTTEN = 1e-10


class Window(Enum):
    """Which rounds the probabilities of round r are fitted on."""

    PAST = "past"  # rounds before r: predictable, the assumption behind the theory
    POOLED = "pooled"  # all rounds, r and later ones among them
    SAME_ROUND = "same-round"  # round r alone, as the paper writes it; for comparison


class Source(Enum):
    """Where a round's participation probabilities came from."""

    MODEL = "model"
    PAST_RATE = "reply rate of past rounds"
    ROUND_RATE = "reply rate of this round"
    PENALISED = "model with a penalty, without one it separates"
    SEPARATED_RATE = "reply rate, the model separates"
    UNCONVERGED_RATE = "reply rate, the model did not converge"
    FAILED_RATE = "reply rate, the fit failed"
    GAPS = "mean gap between replies"
    FREQUENCY = "share of rounds replied in"
    KNOWN = "known"
    NONE = "not modelled"

    @property
    def is_rate(self) -> bool:
        """Whether it is one rate for all clients, which is no model."""
        return self in _RATES


_RATES = frozenset({
    Source.PAST_RATE, Source.ROUND_RATE, Source.SEPARATED_RATE, Source.UNCONVERGED_RATE,
    Source.FAILED_RATE,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipationSettings:
    r"""How participation is fitted.

    ``last`` makes a rolling window of past rounds; ``decay`` g lets the rows of the past count less
    the older they are:

    .. math:: \min_\beta \sum_{s < r} g^{\,r - 1 - s} \sum_i \ell_{is}(\beta), \qquad (P10)

    with :math:`\ell_{is}` the negative log-likelihood of a row (P1). Rounds whose weight is below
    1e-10 are left out. With ``forgets`` the rows that no later fit reads are dropped, as a server
    does that runs for ever; all rounds can then no longer be fitted at once.

    With ``refit_every`` 10 the first ten rounds are refitted one by one, while there is little to
    learn from, and every tenth after that. With ``rarer_after`` 100, fits on all past rounds become
    rarer after so many, in proportion: every twentieth after 200. All of them together then take
    time in proportion to the number of rounds, not to its square.

    A constant rate is used, and recorded, until both kinds of rows, by their weight, exceed
    ``per_coefficient`` times the coefficients. ``estimator`` is maximum likelihood by default, or
    any classifier. A maximum that does not exist, or is not
    reached, is replaced by that of a penalised likelihood if ``soft``, else by the rate, with a
    note.
    """

    window: Window = Window.PAST
    last: int | None = None  # of past rounds, only this many
    decay: float = 1.0  # weight of a round, relative to the one after it
    refit_every: int = 10  # rounds between fits on past rounds
    rarer_after: int | None = None  # rounds, where fits on all of the past are to become rarer
    per_coefficient: float = 10.0
    estimator: Estimator = field(default_factory=Newton)
    soft: bool = False  # whether a fit that separates gets a penalty
    clock: Clock = field(default_factory=Clock)  # of the columns that tell the time
    forgets: bool = False  # whether rows beyond a rolling window or a decay are dropped

    def __post_init__(self) -> None:
        if self.refit_every < 1:
            raise InputError(f"refit_every must be 1 or more, not {self.refit_every}.")
        if self.rarer_after is not None and self.rarer_after < 1:
            raise InputError(f"rarer_after must be 1 or more, not {self.rarer_after}.")
        if self.last is not None and (self.last < 1 or self.window is not Window.PAST):
            raise InputError("A rolling window is 1 or more of the past rounds.")
        if not 0.0 < self.decay <= 1.0:
            raise InputError(f"decay must lie in (0, 1], not {self.decay!r}: 1 forgets nothing.")
        if self.decay < 1.0 and self.window is not Window.PAST:
            raise InputError(
                f"decay discounts past rounds by their age, and the {self.window.value} fit counts "
                "all of its rounds alike: use the fit past, or leave decay out."
            )
        if self.decay < 1.0 and not self.estimator.weights_rows:
            raise InputError(
                "decay weights the rows of a likelihood, and a classifier or folds take rows as "
                "they are: use logistic regression without folds, or a rolling window."
            )

    @property
    def rounds_fitted(self) -> str:
        """The rounds of a fit in words.

        >>> ParticipationSettings(last=50, decay=0.9).rounds_fitted
        'past, the last 50, decay 0.9'
        """
        last = "" if self.last is None else f", the last {self.last}"
        return self.window.value + last + (f", decay {self.decay:g}" if self.decay < 1.0 else "")

    @property
    def reach(self) -> int | None:
        """Number of past rounds that a fit reads at most; none if all."""
        if self.decay == 1.0:
            return self.last
        most = max(1, ceil(log(FORGOTTEN) / log(self.decay)))
        return most if self.last is None else min(most, self.last)

    def first(self, past: int) -> int:
        """Return the first of the rounds to fit on, counted from 0, after this many."""
        return 0 if self.reach is None else max(0, past - self.reach)

    def weights(self, first: int, last: int) -> FloatArray:
        """Return the weights of rounds first up to last, (last - first,); (0,) if all count once.

        >>> ParticipationSettings(decay=0.5).weights(0, 3)
        array([0.25, 0.5 , 1.  ])
        """
        if self.decay == 1.0:
            return UNWEIGHTED
        return self.decay ** np.arange(last - first - 1.0, -1.0, -1.0)

    def due(self, past: int, fitted_on: int) -> bool:
        """Return whether a round with this many before it asks for a new fit.

        >>> how = ParticipationSettings(refit_every=10, rarer_after=100)
        >>> how.due(20, fitted_on=10), how.due(210, fitted_on=200), how.due(223, fitted_on=200)
        (True, False, True)
        """
        wait = float(self.refit_every)
        if self.rarer_after is not None and self.reach is None:
            wait *= max(1.0, past / self.rarer_after)
        return past <= self.refit_every or past - fitted_on >= wait


class ReplyProb(NamedTuple):
    """Participation probabilities of a round's replies, and where they come from."""

    prob: FloatArray  # (m,)
    known: BoolArray  # (m,) false where a row was left out because values are missing
    source: Source


class StepRows(NamedTuple):
    """One step of a round: the rows that could pass it, what they were given, and who did."""

    name: str
    among: str | None  # the flag of those rows; all of the round if none
    label: str  # the flag of those who passed
    prob: FloatArray  # (m,); NaN where a row has not all its values, or nothing is known of it
    passed: BoolArray  # (m,)
    source: Source | None  # none where the round was given no probability


class StepFit(NamedTuple):
    """What a round was given for a step: a fit, where it is from, and the rows it was made of."""

    fit: Fit
    source: Source
    rows: int = 0  # fitted on
    sums: FloatArray | None = None  # (q,) of their columns; none of a saved fit

    @property
    def found(self) -> tuple[Fit, Source]:
        """The fit and its source."""
        return self.fit, self.source


class RoundCounts(NamedTuple):
    """What deciding on a step's fits needs of a closed round, and no row of it."""

    rows: int  # with all their values
    passed: int  # of those
    sums: FloatArray  # (q,) of their columns
    left_out: int  # rows without some value
    share: float  # that passed, of all that could; NaN if nobody could

    def own_share(self) -> float:
        """Return the share that passed."""
        return self.share


class _Coded(NamedTuple):
    """The rows of a round that could pass a step, coded once."""

    places: IntArray  # (m,) in the round
    columns: FloatArray  # (q, k) of the rows that have all their values
    kept: BoolArray | None  # (m,) which rows those are; all if none

    def known(self) -> BoolArray:
        return np.ones(len(self.places), dtype=np.bool_) if self.kept is None else self.kept

    def within(self, chosen: BoolArray) -> FloatArray:
        """Return the columns of those of the chosen rows, (m,), that have all their values."""
        inside = chosen if self.kept is None else chosen[self.kept]
        return self.columns if inside.all() else self.columns[:, inside]


StoreMaker = Callable[["Coder"], RowStore]


@final
class Participation:
    r"""P(replied | enrolled) of rounds that open and close (P5).

    Parameters
    ----------
    members
        The clients and what is known of them.
    steps
        What to fit (:func:`fedipw.selection.steps.participation_steps`).
    settings
        How to fit it.
    models
        Fitted steps by name to use as they are instead, such as saved ones.
    certain
        Steps without a model among them that everybody passes, of probability 1.
    given
        What each round is given for each step, by the number of rounds before it, where that was
        decided before; rounds are then counted from the first of these.
    store
        Makes the place for a step's rows; blocks by default, :func:`panel` for rounds that list
        the same clients.
    scratch
        Directory for coded rounds beyond 256 MiB.
    guarded
        Whether a round whose values cannot be coded or fitted is left aside, in ``failures``, and
        the former fit used instead of an error.

    Examples
    --------
    >>> from fedipw.selection.steps import Formulas, participation_steps
    >>> from fedipw.tables.population import Members
    >>> from fedipw.tables.ledger import Round
    >>> rng = np.random.default_rng(0)
    >>> members = Members(pl.DataFrame({"unit_id": range(200), "age": rng.normal(size=200)}))
    >>> def coming(index):
    ...     table = pl.DataFrame({"battery": rng.normal(size=200)})
    ...     return Round(index=index, rows=np.arange(200), table=table)
    >>> model = Participation(members, participation_steps(coming(1), members, Formulas()))
    >>> for index in range(1, 4):
    ...     model.open(coming(index))
    ...     replied = rng.random(200) < 0.3
    ...     print(index, model.prob(replied).source.value)
    ...     _ = model.close(replied)
    1 reply rate of this round
    2 model
    3 model
    """

    def __init__(  # noqa: PLR0913
        self,
        members: Members,
        steps: Sequence[Step],
        settings: ParticipationSettings | None = None,
        *,
        models: Mapping[str, StageModel] | None = None,
        certain: Collection[str] = (),
        given: Mapping[int, Mapping[str, StepFit]] | None = None,
        store: StoreMaker | None = None,
        scratch: Path | None = None,
        guarded: bool = False,
    ) -> None:
        self.members, self.settings = members, settings or ParticipationSettings()
        self.models = dict(models or {})
        known = {*self.models, *certain}
        lacking = [s.name for s in steps if models is not None and s.name not in known]
        if lacking:
            raise InputError(f"There is no saved model of {some(lacking)}.")
        standardised = self.settings.estimator.standardises
        self._make: StoreMaker = store or (
            lambda _: BlockStore(members.size, standardised=standardised, scratch=scratch)
        )
        coders = [Coder(step, members) for step in steps]
        self.steps = tuple(StepLearner(coder, self.settings, self._make(coder)) for coder in coders)
        wanted = {name for step in steps for name in step.design.columns}
        self._history = _History(members.size, frozenset(wanted), self.settings.clock)
        self._given = given
        self.rounds = min(given, default=0) if given else 0  # closed
        self._open: Round | None = None
        self._table = pl.DataFrame()  # of the open round, with history
        self._used: dict[str, StepFit] = {}  # in the open round
        self._coded: dict[str, _Coded] = {}
        self.notes: Counter[str] = Counter()  # rounds in which a fit had to leave something aside
        self._guarded = guarded
        self.failures: Counter[str] = Counter()  # what was left aside instead of an error

    @property
    def forgotten(self) -> int:
        """Number of rounds, from the first on, of which no rows are kept."""
        return min((step.gone for step in self.steps), default=0)

    def open(self, round_: Round) -> None:
        """Take what is known of a round's clients, with availability and invitations."""
        self._history.joined(round_)
        self._open, self._table = round_, self._history.added(round_)
        self._used, self._coded = {}, {}

    @property
    def remembers(self) -> bool:
        """Whether what was before a round counts in its columns."""
        return self._history.remembers

    def memory(self) -> dict[str, Any]:
        """Return what is remembered of clients and time before the coming round."""
        return {"rounds": self.rounds, "history": self._history.state()}

    def remember(self, memory: Mapping[str, Any] | None, rounds: int) -> None:
        """Begin after this many rounds, with what is remembered of them, if anything."""
        self.rounds = rounds
        if memory is not None:
            self._history.restore(memory["history"])

    def skip(self, round_: Round, replied: BoolArray) -> None:
        """Take a closed round for what it is remembered by alone."""
        self._history.joined(round_)
        self._history.begin(round_)
        self._history.after(round_, replied)
        self.rounds += 1

    def prob(self, replied: BoolArray) -> ReplyProb:
        """Return (P5) of the replies, which of them it is known for, and its source.

        ``replied`` (n,) is over the round's rows; who replied is used only by the same-round fit
        and by a first round without any past.
        """
        opened = self._opened()
        check_rows(len(opened.rows), replied=replied)
        count = int(np.count_nonzero(replied))
        if not count:
            raise InputError(f"Nobody replied in round {self.rounds + 1}: skip it and record it.")
        prob, known = np.ones(count), np.ones(count, dtype=np.bool_)
        parts = [self._step_prob(step, replied) for step in self.steps]
        for part in parts:
            prob, known = prob * part.prob, known & part.known
        if self.steps[-1].step.among == INVITED:
            invited = self._table[INVITE_PROB].cast(pl.Float64).to_numpy()
            prob = prob * invited[replied]
        return ReplyProb(prob, known, _source(parts))

    def step_rows(self, replied: BoolArray) -> tuple[StepRows, ...]:
        """Return each step of the open round with all rows that could pass it.

        Probabilities are by the fits that ``prob`` has used. Where it was not asked, as in a round
        without replies, they are by the last fit or the rate of past rounds: nothing is fitted, so
        later rounds are weighed as if this had not been asked.
        """
        return tuple(self._rows_of(step, replied) for step in self.steps)

    def close(self, replied: BoolArray) -> tuple[BoolArray, ...]:
        """Take the replies of the open round, (n,); return which rows each step is fitted on."""
        opened = self._opened()
        check_rows(len(opened.rows), replied=replied)
        taken: tuple[BoolArray, ...] = ()
        if not self.models and self._given is None:
            taken = tuple(self._append(step, replied, opened.rows) for step in self.steps)
        self._history.after(opened, replied)
        self.rounds += 1
        if self.settings.forgets:
            first = min(step.needed(self.settings.first(self.rounds)) for step in self.steps)
            for step in () if self.models else self.steps:
                step.forget(first)
        self._open, self._coded = None, {}
        return taken

    def decided(self, counts: Mapping[str, RoundCounts], replies: int) -> dict[str, StepFit]:
        """Return what the coming round is given, by what was counted of it: it need not be here.

        That is what ``prob`` would use with this many replies, or ``step_rows`` without any.
        """
        if replies:
            return {
                step.step.name: self._past(step, counts[step.step.name].own_share)
                for step in self.steps
            }
        known = {step.step.name: self._known_fit(step) for step in self.steps}
        return {name: found for name, found in known.items() if found is not None}

    def count(self, counts: Mapping[str, RoundCounts]) -> None:
        """Take what was counted of a closed round, whose rows lie in the stores elsewhere."""
        for step in self.steps:
            step.count(counts[step.step.name])
        self.rounds += 1

    def _append(self, learner: StepLearner, replied: BoolArray, rows: IntArray) -> BoolArray:
        """Let a step take the open round; return which rows it is fitted on."""
        try:
            return learner.append(self._rows(learner), self._passed(learner, replied), rows)
        except FAILURES as error:
            self._fail(f"round {self.rounds + 1} is not fitted on", learner, error)
            self._coded[learner.step.name] = nothing = learner.none(self._rows(learner).places)
            return learner.append(nothing, self._passed(learner, replied), rows)

    def _fail(self, what: str, learner: StepLearner, error: Exception) -> None:
        """Record a failure, or raise it where nobody asked to go on."""
        if not self._guarded:
            raise error
        reason = str(error).split("\n", maxsplit=1)[0][:160] or type(error).__name__
        self.failures[f"{what} in the step {learner.step.name}: {reason}"] += 1

    def predicted(self, round_: Round) -> FloatArray:
        """Return (P5) of any clients under the fits of the open round, as if all were asked, (m,).

        Where invitations are a step of their own, the round has each client's probability. Reply
        history must not be needed, since only members have one; the clock is everybody's.
        """
        if self._history.of_clients:
            raise InputError("Clients outside the log have no reply history to predict from.")
        prob, table = np.ones(len(round_.rows)), self._history.added(round_)
        for learner in self.steps:
            columns, kept = learner.coder.code(table, round_.rows, f"round {round_.index}")
            if kept is not None and not kept.all():
                raise InputError(f"Round {round_.index}: a value is missing.")
            if learner.step.name not in self._used:
                raise InputError("No fit was used in the open round: call prob(replied) first.")
            prob *= self._used[learner.step.name].fit.prob(columns, round_.rows)
        if self.steps[-1].step.among == INVITED:
            prob *= round_.table[INVITE_PROB].cast(pl.Float64).to_numpy()
        return prob

    def pooled(self, *, certain: bool = False) -> dict[str, StageModel]:
        """Return the steps fitted on all closed rounds, each counting alike.

        With ``certain`` a step that everybody passed, of probability 1, is left out; otherwise it
        is an error.
        """
        chosen = [s for s in self.steps if not (certain and s.rate(0, self.rounds) == 1.0)]
        for step in chosen:
            whole = (step.fitted_from, step.fitted_on) == (0, self.rounds) and step.evenly
            if step.fit is None or not whole:
                step.settle(0, self.rounds)
                self._note(step)
        return {step.step.name: step.model() for step in chosen}

    def fitted(self, *, errors: bool = True) -> dict[str, StageModel]:
        """Return the models given, or the last fit of each step that has one.

        Without ``errors`` their standard errors are those before the last step, and no row is read.
        """
        if self.models:
            return dict(self.models)
        found = [step for step in self.steps if step.found is not None]
        return {step.step.name: step.model(errors=errors) for step in found}

    def require_models(self) -> None:
        """Raise the failure of a step that is left with a constant rate for lack of a maximum."""
        for step in self.steps:
            if step.failure is not None and step.mended is None:
                raise step.failure.within(step.step.name)

    def _note(self, learner: StepLearner) -> None:
        """Record what took the place of a fit that has no maximum."""
        if learner.note:
            self.notes[learner.note] += 1

    def _opened(self) -> Round:
        if self._open is None:
            raise InputError("No round is open: call open(round) first.")
        return self._open

    def _rows(self, learner: StepLearner) -> _Coded:
        """Return the rows of the open round that could pass a step, coded when first asked for."""
        name, opened = learner.step.name, self._opened()
        if name not in self._coded:
            places = learner.step.rows(self._table, len(opened.rows))
            table = self._table
            if len(places) < len(opened.rows):
                table = table[places]
            try:
                columns, kept = learner.coder.code(
                    table, opened.rows[places], f"round {self.rounds + 1}"
                )
                self._coded[name] = _Coded(places, columns, kept)
            except FAILURES as error:
                self._fail(f"round {self.rounds + 1} cannot be coded", learner, error)
                self._coded[name] = learner.none(places)
        return self._coded[name]

    def _passed(self, learner: StepLearner, replied: BoolArray) -> BoolArray:
        """Return which of the rows that could pass a step did, (m,)."""
        label, places = learner.step.label, self._rows(learner).places
        flags = replied if label == REPLIED else self._table[label].to_numpy()
        return flags[places]

    def _step_prob(self, learner: StepLearner, replied: BoolArray) -> ReplyProb:
        coded, where = self._rows(learner), f"replies of round {self.rounds + 1}"
        used = self._fit_for(learner, replied)
        self._used[learner.step.name] = used
        fit, source = used.found
        chosen = replied[coded.places]
        clients, columns = self._opened().rows[coded.places[chosen]], coded.within(chosen)
        known = None if coded.kept is None else coded.kept[chosen]
        found = fit.prob(columns, clients if known is None else clients[known])
        if not isinstance(fit, Rate):
            if learner.has_levels:
                found[self._unseen(used, learner, columns, where)] = np.nan
            self._note_unvaried(fit, learner.step.design.names, columns)
        if self._guarded:  # nobody is weighed by what is no probability
            found = np.where((found >= SMALLEST) & (found <= 1.0), found, np.nan)
        prob = found
        if known is not None:
            prob = np.full(len(known), np.nan)
            prob[known] = found
        return ReplyProb(prob, ~np.isnan(prob), source)

    def _fit_for(self, learner: StepLearner, replied: BoolArray) -> StepFit:
        if self._given is not None:
            return self._given[self.rounds][learner.step.name]
        if self.models:
            return self._saved(learner)
        if self.settings.window is Window.SAME_ROUND:
            return self._same_round(learner, replied)
        return self._past(learner, lambda: self._round_share(learner, replied))

    def _saved(self, learner: StepLearner) -> StepFit:
        """Return the fit given for a step, or the probability of one that everybody passes."""
        model = self.models.get(learner.step.name)
        if model is None:
            return StepFit(Rate(1.0), Source.MODEL)
        return StepFit(model.fit, Source.PENALISED if model.note else Source.MODEL)

    def _past(self, learner: StepLearner, share: Callable[[], float]) -> StepFit:
        """Return what past rounds say; ``share`` of the round's own rows passed."""
        first, last = self.settings.first(self.rounds), self.rounds
        rate = learner.rate(first, last)
        if rate is None:  # no past to learn from
            return StepFit(Rate(share()), Source.ROUND_RATE)
        if not learner.enough(first, last):
            return StepFit(Rate(rate), Source.PAST_RATE)
        if learner.fit is not None and not self.settings.due(last, learner.fitted_on):
            return StepFit(learner.fit, Source.MODEL, *learner.fitted_sums)
        before = learner.fit
        try:
            found, source = learner.refitted(first, last, rate)
            self._note(learner)
            return StepFit(found, source, *learner.fitted_sums)
        except FAILURES as error:
            self._fail("a fit failed", learner, error)
            learner.fit = before
        if before is None:
            return StepFit(Rate(rate), Source.FAILED_RATE)
        return StepFit(before, Source.MODEL, *learner.fitted_sums)

    def _same_round(self, learner: StepLearner, replied: BoolArray) -> StepFit:
        coded = self._rows(learner)
        own = StepLearner(learner.coder, self.settings, self._make(learner.coder))
        again = coded._replace(columns=coded.columns.copy())  # the store changes them
        own.append(again, self._passed(learner, replied), self._opened().rows)
        rate = own.rate(0, 1)
        if rate is None:  # no reply has all its values
            return StepFit(Rate(self._round_share(learner, replied)), Source.ROUND_RATE)
        if not own.enough(0, 1):
            return StepFit(Rate(rate), Source.ROUND_RATE)
        found, source = own.refitted(0, 1, rate)
        self._note(own)
        return StepFit(found, source, *own.fitted_sums)

    def _round_share(self, learner: StepLearner, replied: BoolArray) -> float:
        return float(self._passed(learner, replied).mean())

    def _rows_of(self, learner: StepLearner, replied: BoolArray) -> StepRows:
        step, coded, used = learner.step, self._rows(learner), self._known_fit(learner)
        prob = np.full(len(coded.places), np.nan)
        if used is not None:
            fit, clients = used.fit, self._opened().rows[coded.places][coded.known()]
            found = fit.prob(coded.columns, clients)
            if not isinstance(fit, Rate) and self._has_unseen():
                for here in self._fresh(used, learner, coded.columns).values():
                    found[here] = np.nan
            prob[coded.known()] = found
        source = None if used is None else used.source
        passed = self._passed(learner, replied)
        return StepRows(step.name, step.among, step.label, prob, passed, source)

    def _known_fit(self, learner: StepLearner) -> StepFit | None:
        """Return what the open round was given, or would be without a new fit; none if nothing."""
        if learner.step.name in self._used:
            return self._used[learner.step.name]
        if self._given is not None:
            return self._given[self.rounds].get(learner.step.name)
        if self.models:
            return self._saved(learner)
        if self.settings.window is Window.SAME_ROUND:
            return None
        if learner.fit is not None:
            return StepFit(learner.fit, Source.MODEL, *learner.fitted_sums)
        rate = learner.rate(self.settings.first(self.rounds), self.rounds)
        return None if rate is None else StepFit(Rate(rate), Source.PAST_RATE)

    def _note_unvaried(self, fit: Fit, names: Sequence[str], columns: FloatArray) -> None:
        """Record numbers that vary now and never did in the fit: their coefficient is 0."""
        if fit.constant and columns.shape[1]:
            for name in fit.constant:
                if np.ptp(columns[names.index(name)]) > 0.0:
                    self.notes[f"{name} varies, and never did in the rounds fitted on"] += 1

    def _has_unseen(self) -> bool:
        """Return whether rows can have levels that the fit has not seen."""
        return bool(self.models) or self.settings.window is not Window.SAME_ROUND

    def _unseen(
        self, used: StepFit, learner: StepLearner, columns: FloatArray, where: str
    ) -> BoolArray:
        """Return rows with a level that no row of the fit had, (m,): the fit says nothing about it.

        They are left out under the policy drop, and an error otherwise.
        """
        fresh = np.zeros(columns.shape[1], dtype=np.bool_)
        if not self._has_unseen():
            return fresh  # every row was fitted on
        for name, here in self._fresh(used, learner, columns).items():
            if here.any() and learner.step.design.missing is not Missing.DROP:
                raise InputError(
                    f"{where}: {name} occurs in {int(here.sum())} replies and in no row of the "
                    "rounds fitted on, so nothing is known of it. Leave such rows out (missing: "
                    "drop), merge rare levels, leave the column out, or use the pooled fit."
                )
            fresh |= here
        return fresh

    def _fresh(
        self, used: StepFit, learner: StepLearner, columns: FloatArray
    ) -> dict[str, BoolArray]:
        if used.sums is None:  # a saved fit knows only which columns never varied
            names, constant = learner.step.design.names, used.fit.constant
            terms = [t for t in learner.step.design.terms if t.level and t.name in constant]
            return {t.name: columns[names.index(t.name)] != 0.0 for t in terms}
        return learner.step.fresh(used.sums, used.rows, columns)

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs to go on to the same bytes; only between rounds."""
        return {
            "rounds": self.rounds,
            "history": self._history.state(),
            "notes": dict(self.notes),
            "steps": {step.step.name: step.state() for step in self.steps},
        }

    def head(self) -> dict[str, Any]:
        """Return the state without the rows of the rounds."""
        frames = {s.step.name: s.store.frame for s in self.steps}
        named = {
            name: None if frame is None else {"centre": frame.centre, "scale": frame.scale}
            for name, frame in frames.items()
        }
        steps = {s.step.name: {**s.head(), "frame": named[s.step.name]} for s in self.steps}
        history, notes = self._history.state(), dict(self.notes)
        return {"rounds": self.rounds, "history": history, "notes": notes, "steps": steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self.rounds, self._open = int(state["rounds"]), None
        self._history.restore(state["history"])
        self.notes = Counter(state["notes"])
        for step in self.steps:
            step.restore(state["steps"][step.step.name])


def panel(estimator: Estimator) -> StoreMaker:
    """Return a maker of panels: rounds list the same clients, each with all its values."""

    def make(coder: Coder) -> RowStore:
        static = coder.static
        if static is None or static[1] is not None:
            raise InputError("A panel needs all values of every client.")
        return PanelStore(
            static[0], coder.static_at, len(coder.step.design.terms),
            standardised=estimator.standardises,
        )  # fmt: skip

    return make


@final
class Coder:
    """What a step's design makes of a round's rows.

    Terms of the table of clients are coded once for everybody; those of the round, round by round.
    """

    def __init__(self, step: Step, members: Members) -> None:
        self.step, self.members = step, members
        own, design = set(members.covariates), step.design
        ours = [all(f.column in own for f in term.factors) for term in design.terms]
        static = np.array(ours, dtype=np.bool_)
        self.static_at, self._varying_at = np.flatnonzero(static), np.flatnonzero(~static)
        self._own = [c for c in design.columns if c in own]
        self._fixed, self._varying = _part(design, self.static_at), _part(design, self._varying_at)
        self._crossed = [c for c in self._varying.columns if c in own]  # with columns of the round
        plain = all(len(t.factors) == 1 and t.factors[0].is_plain for t in self._varying.terms)
        self._plain = [t.factors[0].column for t in self._varying.terms] if plain else None

    @cached_property
    def static(self) -> tuple[FloatArray, BoolArray | None] | None:
        """Columns that do not change, (q_z, N), and who has all values; all if none.

        None where somebody has a value the design cannot code: whether that matters shows when a
        round lists them.
        """
        if not len(self.static_at):
            return np.empty((0, self.members.size)), None
        try:
            coded = self._fixed.rows(self.members.frame, "enrolled clients")
        except InputError:
            return None
        if coded.kept is None or coded.kept.all():
            return coded.columns, None
        columns = np.full((len(self.static_at), self.members.size), np.nan)
        columns[:, coded.kept] = coded.columns
        return columns, coded.kept

    def code(
        self, table: pl.DataFrame, rows: IntArray, where: str
    ) -> tuple[FloatArray, BoolArray | None]:
        """Return the columns of rows that have all values, (q, k), and which those are, (m,)."""
        static = self.static
        if static is None:
            coded = self.step.design.rows(self._joined(table, rows, self._own), where)
            return coded.columns, coded.kept
        varying, kept = self._changing(table, rows, where)
        fixed, whole = static
        if whole is not None:
            mine = whole[rows]
            varying = varying[:, mine] if kept is None else varying[:, mine[kept]]
            kept = mine if kept is None else kept & mine
        chosen = rows if kept is None else rows[kept]
        out = np.empty((len(self.step.design.terms), len(chosen)))
        out[self._varying_at] = varying
        out[self.static_at] = fixed[:, chosen]
        return out, kept

    def _joined(self, table: pl.DataFrame, rows: IntArray, own: Sequence[str]) -> pl.DataFrame:
        """Return a round's table with columns of the table of clients."""
        if not own:
            return table
        known = self.members.frame.select(own)[rows]
        return table.hstack(known.get_columns()) if table.width else known

    def _changing(
        self, table: pl.DataFrame, rows: IntArray, where: str
    ) -> tuple[FloatArray, BoolArray | None]:
        """Return the columns of the round, (q_x, k), and which rows have all values."""
        if not len(self._varying_at):
            return np.empty((0, len(rows))), None
        if self._plain is not None:
            direct = _numbers(table, self._plain)
            if direct is not None:
                return direct, None
        coded = self._varying.rows(self._joined(table, rows, self._crossed), where)
        return coded.columns, coded.kept


def _part(design: Design, places: IntArray) -> Design:
    """Return a design with some of its terms."""
    terms = tuple(design.terms[j] for j in places)
    used = {factor.column for term in terms for factor in term.factors}
    return replace(design, terms=terms, kinds={c: k for c, k in design.kinds.items() if c in used})


def _numbers(table: pl.DataFrame, names: Sequence[str]) -> FloatArray | None:
    """Return columns of finite floats as they stand, (q, m); none if one is anything else."""
    out = np.empty((len(names), table.height))
    for j, name in enumerate(names):
        series = table.get_column(name, default=None)
        if series is None or series.dtype != pl.Float64 or series.null_count():
            return None
        out[j] = series.to_numpy()
    if not out.size:
        return out
    largest = np.maximum(out.max(axis=1), -out.min(axis=1))  # NaN if one is
    usual = (largest <= LARGEST) & ((largest >= SMALLEST) | (largest == 0.0))
    return out if usual.all() else None


@final
class StepLearner:
    """The coded rounds of one step of participation and its fits."""

    def __init__(self, coder: Coder, settings: ParticipationSettings, store: RowStore) -> None:
        self.coder, self.step, self.settings, self.store = coder, coder.step, settings, store
        self._totals: list[tuple[int, int]] = [(0, 0)]  # rows and passes before each round
        self._sums: list[FloatArray] = [np.zeros(len(self.step.design.terms))]  # of the columns
        self.gone = 0  # rounds that were forgotten; the lists begin there
        self.has_levels = any(term.level is not None for term in self.step.design.terms)
        self.left_out = 0
        self.counted: RoundCounts | None = None  # of the last round
        self.fit: Fit | None = None
        self.fitted_from = self.fitted_on = 0  # rounds of the fit
        self.evenly = settings.decay == 1.0  # whether they counted alike in it
        self.fitted_sums = 0, self._sums[0]  # number of its rows and sums of their columns
        self.fits = self.passes = 0
        self.failure: SeparationError | NotConvergedError | None = None  # of the last fit
        self.mended: Fit | None = None  # what took its place, by a penalty
        self.note = ""  # on what took its place

    @property
    def found(self) -> Fit | None:
        """The last fit, or the one with a penalty in its place."""
        return self.mended if self.fit is None else self.fit

    def append(self, coded: _Coded, passed: BoolArray, rows: IntArray) -> BoolArray:
        """Take a closed round and return which of its rows are fitted on, (n,).

        ``passed`` (m,) is over the rows that could pass, ``rows`` (n,) are all clients listed.
        """
        known, share = coded.kept, float(passed.mean()) if len(passed) else np.nan
        if known is not None:
            passed = passed[known]
        labels = passed.astype(np.int8)
        places = coded.places if known is None else coded.places[known]
        taken = np.zeros(len(rows), dtype=np.bool_)
        taken[places] = True
        sums, left_out = coded.columns.sum(axis=1), 0 if known is None else int((~known).sum())
        if self.store.frame is None:
            check_offsets(coded.columns, self.step.design.names, "rounds")
        self.store.append(coded.columns, labels, rows[places])
        self.count(RoundCounts(len(labels), int(labels.sum()), sums, left_out, share))
        return taken

    def count(self, found: RoundCounts) -> None:
        """Take what was counted of a closed round."""
        (count, done), sums = self._totals[-1], self._sums[-1]
        self._totals.append((count + found.rows, done + found.passed))
        self._sums.append(sums + found.sums)
        self.left_out += found.left_out
        self.counted = found

    def none(self, places: IntArray) -> _Coded:
        """Return rows that could pass, (m,), none of which can be coded."""
        columns = np.empty((len(self.step.design.terms), 0))
        return _Coded(places, columns, np.zeros(len(places), dtype=np.bool_))

    def totals(self, first: int, last: int) -> tuple[int, int, FloatArray]:
        """Return rows, passes and column sums of rounds first up to last."""
        first, last = first - self.gone, last - self.gone
        (n0, s0), (n1, s1) = self._totals[first], self._totals[last]
        return n1 - n0, s1 - s0, self._sums[last] - self._sums[first]

    def needed(self, first: int) -> int:
        """Return the first round to keep where later fits read from round ``first`` on.

        A classifier's rows stay as long as it is the last fit: a restart fits it again.
        """
        again = self.fit is not None and not isinstance(self.fit, LogisticFit)
        return min(first, self.fitted_from) if again else first

    def forget(self, first: int) -> None:
        """Drop what is kept of rounds before ``first``."""
        self.store.forget(first)
        self._totals, self._sums = (
            self._totals[first - self.gone :],
            self._sums[first - self.gone :],
        )
        self.gone = first

    def counts(self, first: int, last: int) -> tuple[float, float]:
        """Return the weight of the rows of rounds first up to last, and of those that passed."""
        weights = self.settings.weights(first, last)
        if not len(weights):
            rows, passed, _ = self.totals(first, last)
            return rows, passed
        within = self._totals[first - self.gone : last + 1 - self.gone]
        both = weights @ np.diff(np.array(within), axis=0)
        return float(both[0]), float(both[1])

    def rate(self, first: int, last: int) -> float | None:
        """Return the share that passed in rounds first up to last, none without such rows."""
        rows, passed = self.counts(first, last)
        return passed / rows if passed > 0 else None

    def enough(self, first: int, last: int) -> bool:
        """Return whether both kinds of rows are many enough for a model."""
        all_rows, _, sums = self.totals(first, last)
        rows, passed = self.counts(first, last)
        needed = self.settings.per_coefficient * self.step.coefficients(sums, all_rows)
        return min(passed, rows - passed) > needed

    def stored(self, first: int, last: int, *, evenly: bool = False) -> StoredRows:
        """Return the rows of rounds first up to last with their weights, or all counting alike."""
        weights = UNWEIGHTED if evenly else self.settings.weights(first, last)
        return self.store.rounds(first, last, weights)

    def refitted(self, first: int, last: int, rate: float) -> tuple[Fit, Source]:
        """Return a new fit, or what takes its place if it has no maximum or did not get there."""
        failure: SeparationError | NotConvergedError
        try:
            return self.refit(first, last), Source.MODEL
        except SeparationError as error:
            failure, source = error, Source.SEPARATED_RATE
        except NotConvergedError as error:
            failure, source = error, Source.UNCONVERGED_RATE
        if self._mend(first, last, failure):
            assert self.mended is not None
            return self.mended, Source.PENALISED
        self.note = rate_note(self.step.name, failure)
        return Rate(rate), source

    def settle(self, first: int, last: int) -> None:
        """Fit, with a penalty where that is asked for and there is no maximum, or raise.

        All rounds count alike.
        """
        try:
            self.refit(first, last, evenly=True)
        except (SeparationError, NotConvergedError) as error:
            if not self._mend(first, last, error, evenly=True):
                raise error.within(self.step.name) from None

    def _mend(
        self,
        first: int,
        last: int,
        error: SeparationError | NotConvergedError,
        *,
        evenly: bool = False,
    ) -> bool:
        """Return whether a fit that has no maximum got a penalty instead.

        That is not kept as the last fit: the next round tries the maximum again.
        """
        self.fit, self.failure, self.mended = None, error, None
        if not self.settings.soft or self.settings.estimator != Newton():
            return False
        rows = self.stored(first, last, evenly=evenly)
        try:
            found = Newton(l2=PENALTY).fitted(rows, self.step.design.names, None)
        except NotConvergedError:
            return False
        self.mended, self.fits, self.passes = found, self.fits + 1, self.passes + found.passes
        self._fitted(first, last)
        self.evenly = evenly or self.settings.decay == 1.0
        self.note = penalty_note(self.step.name, error)
        return True

    def refit(self, first: int, last: int, *, evenly: bool = False) -> Fit:
        """Fit on rounds first up to last, from the last fit on; their weights may be left out."""
        rows, passed, _ = self.totals(first, last)
        if self.store.frame is None or not rows:
            raise InputError(
                f"No row of {last - first} round(s) tells of the step {self.step.name!r}: there is "
                "nothing to fit it on."
            )
        if passed in {0, rows}:
            raise InputError(
                f"The step {self.step.name!r} cannot be fitted: {passed} of the {rows} rows of "
                f"rounds {first + 1} to {last} passed it."
            )
        evenly = evenly or self.settings.decay == 1.0
        start = self._start(first, last) if evenly == self.evenly else None
        found = self.settings.estimator.fitted(
            self.stored(first, last, evenly=evenly), self.step.design.names, start
        )
        self.fits, self.evenly = self.fits + 1, evenly
        self.failure, self.mended, self.note = None, None, ""
        if isinstance(found, LogisticFit):
            self.passes += found.passes
        self.fit = found
        self._fitted(first, last)
        return found

    def _fitted(self, first: int, last: int) -> None:
        """Record what the last fit was made of."""
        count, _, sums = self.totals(first, last)
        self.fitted_from, self.fitted_on, self.fitted_sums = first, last, (count, sums)

    def _start(self, first: int, last: int) -> FloatArray | None:
        """Return the last fit moved one Newton step by the newest rounds alone, none if none.

        At the last fit the older rounds' gradient is zero and their Hessian is known, so this step
        costs no pass over them, and the fit that follows is a pass or two. A decay scales both.
        """
        fit, frame = self.fit, self.store.frame
        if not isinstance(fit, LogisticFit) or frame is None:
            return None
        point = fit.point
        # rows that a rolling window drops had a gradient, rows that a decay drops hardly one
        keeps = self.settings.last is None or first == self.fitted_from == 0
        moves = keeps and first <= self.fitted_on < last
        if not moves or fit.information is None or self.settings.window is not Window.PAST:
            return point
        new = self.stored(self.fitted_on, last)
        if not new.rows:
            return point
        beta = frame.matrix() @ point
        at, _ = likelihood_sums(new, beta)
        faded = self.settings.decay ** (last - self.fitted_on) * fit.information
        hessian, step = faded + at.hessian, np.zeros(len(beta))
        if fit.dropped:
            kept = np.flatnonzero(fit.kept)
            step[kept] = _solved(hessian[np.ix_(kept, kept)], at.gradient[kept])
        else:
            step = _solved(hessian, at.gradient)
        moved: FloatArray = frame.inverse() @ (beta - step)
        return moved

    def model(self, *, errors: bool = True) -> StageModel:
        """Return the last fit with its design, and the errors of its coefficients."""
        fit = self.found
        if fit is None:
            raise InputError(f"The step {self.step.name!r} has no fit.")
        # the last step of a fit is taken without another look
        if errors and isinstance(fit, LogisticFit) and self.fitted_from >= self.gone:
            rows = self.stored(self.fitted_from, self.fitted_on, evenly=self.evenly)
            fit = fit.informed_by(rows)
        return StageModel(
            stage=self.step.name, design=self.step.design, fit=fit, left_out=self.left_out,
            note=self.note,
        )  # fmt: skip

    def sums_before(self, k: int) -> FloatArray:
        """Return the column sums of the rounds before round k, counted from 0, (q,)."""
        return self._sums[k - self.gone]

    def totals_before(self, k: int) -> tuple[int, int]:
        """Return rows and passes of the rounds before round k, counted from 0."""
        return self._totals[k - self.gone]

    def head(self) -> dict[str, Any]:
        """Return what is needed of the last fit."""
        fit = self.fit
        return {
            "left_out": self.left_out,
            "fitted": None if fit is None else [self.fitted_from, self.fitted_on],
            "fitted_sums": {"rows": self.fitted_sums[0], "columns": self.fitted_sums[1]},
            "fit": fit.state() if isinstance(fit, LogisticFit) else None,
            "fits": self.fits,
            "passes": self.passes,
        }

    def state(self) -> dict[str, Any]:
        """Return the rows, and what is needed of the last fit."""
        return {
            "store": self.store.state(),
            "totals": [list(pair) for pair in self._totals],
            "sums": np.array(self._sums),
            "gone": self.gone,
            **self.head(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back; a classifier is fitted again on the rows it was fitted on."""
        self._restore_fit(state)
        self.fits, self.passes = int(state["fits"]), int(state["passes"])

    def _restore_fit(self, state: Mapping[str, Any]) -> None:
        self.store.restore(state["store"])
        self._totals = [(int(n), int(s)) for n, s in state["totals"]]
        self._sums, self.gone = list(np.array(state["sums"])), int(state["gone"])
        self.left_out, self.fit = int(state["left_out"]), None
        if state["fitted"] is None:
            return
        first, last = (int(edge) for edge in state["fitted"])
        if state["fit"] is None:
            self.refit(first, last)
            return
        frame = self.store.frame
        assert frame is not None
        self.fit = LogisticFit.restored(self.step.design.names, frame, state["fit"])
        self.fitted_from, self.fitted_on = first, last
        seen = state["fitted_sums"]
        self.fitted_sums = int(seen["rows"]), np.array(seen["columns"])


@final
class _History:
    """History and clock columns of the rounds so far, kept only where a design wants them."""

    def __init__(self, members: int, columns: frozenset[str], clock: Clock) -> None:
        self._members, self._clock = members, clock
        self.of_clients = columns & {*REPLY_COLUMNS, *AVAILABILITY_COLUMNS}
        self._wanted = self.of_clients | (columns & {*TIME_COLUMNS})
        self._replies = self._available = ReplyHistory.of(members)
        self._origin: float | None = 0.0 if clock.day_hours is None else None  # of the clock

    @property
    def remembers(self) -> bool:
        """Whether a design wants any of the columns."""
        return bool(self._wanted)

    def begin(self, round_: Round) -> None:
        """Let the clock begin with the first round."""
        if self._origin is None and self._wanted & {*TIME_COLUMNS}:
            self._time(round_)

    def joined(self, round_: Round) -> None:
        """Count those listed for the first time from now on."""
        if self._wanted:
            present = round_.present(self._members)
            self._replies = self._replies.joined(present)
            self._available = self._available.joined(present)

    def added(self, round_: Round) -> pl.DataFrame:
        """Return a round's table with the history and clock columns its designs want."""
        wanted = self._wanted - set(round_.table.columns)
        if not wanted:
            return round_.table
        made: dict[str, FloatArray] = {}
        if wanted & self.of_clients:
            past = self._replies.matrix()[round_.rows]
            made |= dict(zip(REPLY_COLUMNS, past.T, strict=True))
            if AVAILABLE in round_.table.columns:
                there = self._available.matrix()[round_.rows]
                made |= dict(zip(AVAILABILITY_COLUMNS, there.T, strict=True))
        if wanted & {*TIME_COLUMNS}:
            made |= self._time(round_)
        more = [pl.Series(name, values) for name, values in made.items() if name in wanted]
        return round_.table.hstack(more) if round_.table.width else pl.DataFrame(more)

    def _time(self, round_: Round) -> dict[str, FloatArray]:
        """Return the clock's columns of the coming round."""
        now = self._clock.time(round_.table, self._replies.rounds + 1)
        if self._origin is None:
            self._origin = now
        values = self._clock.columns(now, self._origin)
        return {name: np.full(len(round_.rows), value) for name, value in values.items()}

    def after(self, round_: Round, replied: BoolArray) -> None:
        """Take the replies of a closed round, (n,) over its rows."""
        if not self._wanted:
            return
        present = round_.present(self._members)
        self._replies = self._replies.after(self._spread(round_, replied), present)
        if AVAILABLE in round_.table.columns:
            there = self._spread(round_, round_.table[AVAILABLE].to_numpy())
            if ASKED in round_.table.columns:  # of the others it is not known
                present = self._spread(round_, round_.table[ASKED].to_numpy())
            self._available = self._available.after(there, present)

    def _spread(self, round_: Round, flags: BoolArray) -> BoolArray:
        out = np.zeros(self._members, dtype=np.bool_)
        out[round_.rows] = flags
        return out

    def state(self) -> dict[str, Any]:
        """Return both histories, and when the clock began."""
        return {
            "replies": self._replies.state(),
            "available": self._available.state(),
            "origin": self._origin,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved histories back."""
        self._replies = ReplyHistory.restored(state["replies"])
        self._available = ReplyHistory.restored(state["available"])
        origin = state["origin"]
        self._origin = None if origin is None else float(origin)


def _solved(matrix: FloatArray, right: FloatArray) -> FloatArray:
    """Return the solution, or the least one where there are many."""
    try:
        return np.asarray(np.linalg.solve(matrix, right), dtype=np.float64)
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(matrix, right)[0], dtype=np.float64)


def _source(parts: Sequence[ReplyProb]) -> Source:
    """Return where probabilities are from; a step that everybody passed tells nothing."""
    told = [part for part in parts if not (part.prob[part.known] == 1.0).all()] or parts[-1:]
    rates = [part.source for part in told if part.source is not Source.MODEL]
    return rates[-1] if rates else Source.MODEL
