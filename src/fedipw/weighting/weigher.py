"""The weigher, and the values it takes and gives: one weight per reply, for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
import polars as pl

from fedipw.errors import EmptyRoundError, InputError, NotConvergedError, SeparationError
from fedipw.numerics.checks import check_rows
from fedipw.selection.counts import mean_count, member_counts
from fedipw.selection.enrollment import EnrollmentFit
from fedipw.selection.participation import Source
from fedipw.tables.columns import ID, INVITE_PROB
from fedipw.weighting.balance import Balance
from fedipw.weighting.functions import effective_sample_size
from fedipw.weighting.online import OnlineState

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IdArray, IntArray
    from fedipw.selection.enrollment import EnrollmentStage
    from fedipw.selection.saved import StageModel
    from fedipw.tables.ledger import Round
    from fedipw.weighting.functions import TrimReport
    from fedipw.weighting.pipeline import Method, Weighing
    from fedipw.weighting.sources import ParticipationSource

FEW_REPLIES = 5.0  # effective replies below which a round is warned of
LEARNT = "learnt"  # by calibrations that go on from round to round, in a saved state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnrollmentState:
    """Enrollment at one time: n clients of a table, who is enrolled, and with which probability."""

    unit_ids: IdArray  # (n,)
    sample_counts: IntArray  # (n,)
    enrolled: BoolArray  # (n,)
    prob: FloatArray  # (n,), NaN where not known
    population_size: float  # N, NaN where not known
    balances: Mapping[str, Balance] = field(default_factory=dict)  # by kind: main, rich, wide
    true_prob: FloatArray | None = None  # (n,) in simulations
    model: StageModel | None = None
    note: str = ""  # why there is no model, where one was asked for
    mean_count: float = np.nan  # mean number of samples of the population's clients, T / N
    base: FloatArray | None = None  # (n,) base weights d, alike if none

    def __post_init__(self) -> None:
        check_rows(
            len(self.unit_ids), sample_counts=self.sample_counts, enrolled=self.enrolled,
            prob=self.prob,
        )  # fmt: skip

    @property
    def enrolled_size(self) -> float:
        """Number of enrolled clients, N_enr."""
        return float(np.count_nonzero(self.enrolled))

    @property
    def enrolled_mass(self) -> float:
        """Sum of the base weights of the enrolled: their number where they count alike."""
        return self.enrolled_size if self.base is None else float(self.base[self.enrolled].sum())

    def base_of(self, rows: IntArray | BoolArray | slice) -> FloatArray | float:
        """Return the base weights of some clients, (m,), or 1 where all count alike."""
        return 1.0 if self.base is None else self.base[rows]

    def balance_for(self, method: str, kind: str) -> Balance:
        """Return the balance columns a method needs, or raise if they are not known."""
        if kind not in self.balances:
            raise InputError(f"{method} needs population means of the covariates.")
        return self.balances[kind]

    def replies(
        self,
        index: int,
        rows: IntArray,
        participation_prob: FloatArray,
        source: Source,
        invite_prob: FloatArray | None = None,
    ) -> Replies:
        """Return what is known of the clients in ``rows`` of the table, all invited by default."""
        return Replies(
            index=index,
            unit_ids=self.unit_ids[rows],
            rows=rows,
            enrollment_prob=self.prob[rows],
            participation_prob=participation_prob,
            sample_counts=self.sample_counts[rows],
            source=source,
            invite_prob=np.ones(len(rows)) if invite_prob is None else invite_prob,
            mean_count=self.mean_count,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replies:
    """What is known of the clients that replied in a round; row i is one of them."""

    index: int
    unit_ids: IdArray  # (m,)
    rows: IntArray  # (m,) rows of the table behind them
    enrollment_prob: FloatArray  # (m,)
    participation_prob: FloatArray  # (m,)
    sample_counts: IntArray  # (m,)
    source: Source  # where the participation probabilities came from
    invite_prob: FloatArray  # (m,) the server's own, 1 where it is not known
    mean_count: float = np.nan  # of all clients of the population, T / N

    def __post_init__(self) -> None:
        rows = {
            len(self.unit_ids),
            len(self.rows),
            len(self.enrollment_prob),
            len(self.participation_prob),
            len(self.sample_counts),
            len(self.invite_prob),
        }
        if len(rows) != 1:
            raise InputError(f"round {self.index}: fields disagree on rows: {sorted(rows)}")
        if rows == {0}:
            raise EmptyRoundError("no reply has all the values needed")

    @property
    def inclusion_prob(self) -> FloatArray:
        r"""The product of the two stages, :math:`p = \pi^{enr} \pi^{part}` (S1), (m,)."""
        return self.enrollment_prob * self.participation_prob


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Largest standardised differences from the population's means, before a round."""

    enrolled: float  # of all enrolled clients, unweighted
    respondents: float  # of the weighted replies remembered, NaN before the first round


@dataclass(frozen=True, slots=True)
class ClientNumbers:
    """How many clients are enrolled, and how many they count as under their weights (W10)."""

    enrolled: float
    effective: float  # under enrollment weights
    guarded: float  # under those that a round's replies are given, guarded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundWeights:
    """The weights of a round's replies under one method, and what its guard changed."""

    replies: Replies
    weights: FloatArray  # (m,), 1/N included
    raw: FloatArray  # (m,) before guard and normalisation, where their scale says something
    within: FloatArray  # (m,) as raw, for the enrolled alone: participation without enrollment
    reliance: float = 1.0  # on enrollment weights, Lambda (O21)
    trimming: TrimReport | None = None
    clients: ClientNumbers | None = None  # for augmentation
    imbalance: Imbalance | None = None  # of calibration as you go
    note: str = ""  # what the method could not do in this round

    @property
    def few(self) -> bool:
        """Whether few replies carry the weight: fewer than 5, or than a third of them (W10)."""
        effective = self.effective_replies
        return effective < FEW_REPLIES or effective < len(self.weights) / 3.0

    @property
    def negative(self) -> int:
        """Number of negative weights, which linear calibration and GREG can give."""
        return int((self.weights < 0.0).sum())

    @property
    def total(self) -> float:
        """Sum of weights: 1 on average for Horvitz–Thompson, 1 exactly for untrimmed Hájek."""
        return float(self.weights.sum())

    @property
    def effective_replies(self) -> float:
        """Effective sample size of the round (W10)."""
        return effective_sample_size(self.weights) if self.weights.any() else 0.0


class EnrollmentSource(Protocol):
    """Enrollment as it is when some of n clients are enrolled."""

    @property
    def clients(self) -> int:
        """Number of clients that may be enrolled, n."""
        ...

    def at(self, present: BoolArray) -> EnrollmentState:
        """Return enrollment when these are enrolled, (n,)."""
        ...


@final
class StagedEnrollment:
    """Enrollment as a stage knows it, with what some methods need of it.

    ``examples`` names the column of the table of clients that holds their numbers of samples, for
    methods whose target is the mean over samples.
    """

    def __init__(
        self, stage: EnrollmentStage, *methods: Method, examples: str | None = None
    ) -> None:
        self.stage = stage
        self._counts, self._mean_count = np.ones(stage.members.size, dtype=np.int64), np.nan
        if examples is not None:
            self._counts = member_counts(stage, examples)
            if any(method.normalisation.reads_total for method in methods):
                self._mean_count = mean_count(stage, examples)
        self._last: tuple[BoolArray, EnrollmentState] | None = None
        self._needs = [method.needs for method in methods]
        for needs in self._needs:
            stage.require(needs)

    @property
    def clients(self) -> int:
        """Everybody who is enrolled at some time."""
        return self.stage.members.size

    def at(self, present: BoolArray) -> EnrollmentState:
        """Return enrollment when these members are enrolled; the last one asked for is kept."""
        if self._last is None or not np.array_equal(present, self._last[0]):
            self._last = present.copy(), self._found(present)
        return self._last[1]

    def _found(self, present: BoolArray) -> EnrollmentState:
        members = self.stage.members
        if any(needs.everyone for needs in self._needs):  # enrollment is no stage of its own
            fit = EnrollmentFit(prob=np.ones(members.size), known=~members.gone)
        else:
            fit = self.stage.fitted(present, required=any(n.probabilities for n in self._needs))
        enrolled, prob = present & fit.known, fit.prob
        size = self.stage.size
        kinds = frozenset().union(*(needs.balance for needs in self._needs))
        balances = {
            kind: Balance.of(self.stage.balance(kind, enrolled), enrolled, size) for kind in kinds
        }
        return EnrollmentState(
            unit_ids=members.frame[ID].to_numpy(),
            sample_counts=self._counts,
            mean_count=self._mean_count,
            enrolled=enrolled,
            prob=prob,
            population_size=np.nan if size is None else float(size),
            model=fit.model,
            note=fit.note,
            balances=balances,
            base=self.stage.base,
        )


@final
class FixedEnrollment:
    """Enrollment that was drawn once and does not change."""

    def __init__(self, state: EnrollmentState) -> None:
        self._state = state

    @property
    def clients(self) -> int:
        """All clients of the table."""
        return len(self._state.unit_ids)

    def at(self, present: BoolArray) -> EnrollmentState:
        """Return the state, for those who are enrolled in it."""
        if not np.array_equal(present, self._state.enrolled):
            raise InputError("Rounds must list every enrolled client, and nobody else.")
        return self._state


@final
class GivenEnrollment:
    """Enrollment that was fitted elsewhere, for a weigher that was begun with it."""

    def __init__(self, clients: int) -> None:
        self._clients = clients

    @property
    def clients(self) -> int:
        """All clients of the table."""
        return self._clients

    def at(self, present: BoolArray) -> EnrollmentState:
        """Raise: nothing is fitted here."""
        raise InputError(f"Enrollment of {int(present.sum())} clients was not fitted beforehand.")


@final
class Weigher:
    """Weights of a round's replies under one or more methods that share their probabilities.

    Every engine uses it the same way, round after round:

    1. ``open`` with what is known before the round;
    2. ``weigh`` with who replied;
    3. ``close`` with who replied.

    Parameters
    ----------
    enrollment
        Who is enrolled, with which probability; asked again whenever somebody joins or leaves.
    participation
        The source of participation probabilities.
    methods
        Methods by name.

    Examples
    --------
    >>> import polars as pl
    >>> from fedipw.tables.ledger import Round
    >>> from fedipw.weighting.methods import method_named
    >>> from fedipw.weighting.sources import TrueParticipation
    >>> state = EnrollmentState(unit_ids=np.array(["a", "b", "c"]), population_size=3.0,
    ...                         sample_counts=np.ones(3, dtype=int), prob=np.array([0.5, 0.8, 0.5]),
    ...                         enrolled=np.array([True, True, False]))
    >>> weigher = Weigher(FixedEnrollment(state), TrueParticipation(),
    ...                   {"oracle": method_named("oracle")})
    >>> weigher.open(Round(index=1, rows=np.array([0, 1]), table=pl.DataFrame(),
    ...                    participation_prob=np.array([0.4, 0.5])))
    >>> weigher.weigh(np.array([True, False]))["oracle"].weights  # 1 / (3 * 0.5 * 0.4)
    array([1.66666667])
    >>> _ = weigher.close(np.array([True, False]))
    """

    def __init__(
        self,
        enrollment: EnrollmentSource,
        participation: ParticipationSource,
        methods: Mapping[str, Method],
    ) -> None:
        self.enrollment, self.participation = enrollment, participation
        self.methods = dict(methods)
        self.weighings: dict[str, Weighing] = {}  # at the present enrollment, by method
        self.enrollments = 0  # times enrollment was fitted or calibrated
        self.left_out = 0  # replies without a weight because values are missing
        self._present: BoolArray | None = None
        self._rows: IntArray | None = None  # of the last round with anybody
        self._open: Round | None = None
        self._replies: Replies | None = None  # that were weighed in the open round
        self._learnt: dict[str, OnlineState] = {}  # restored, before the first round

    @property
    def enrolled(self) -> EnrollmentState:
        """Enrollment as of the last round that was opened with anybody enrolled."""
        if not self.weighings:
            raise InputError("No round was opened yet.")
        return next(iter(self.weighings.values())).state

    def open(self, round_: Round) -> None:
        """Take what is known before a round."""
        if self._open is not None:
            raise InputError(f"Round {round_.index} opens while another is open: close it first.")
        if len(round_.rows) and round_.rows is not self._rows:
            self._rows = round_.rows
            self.enroll(round_.present(self.enrollment.clients), round_.index)
        self.participation.open(round_)
        self._open = round_

    def enroll(self, present: BoolArray, index: int) -> bool:
        """Take who is enrolled in a round, (n,); return whether that has changed."""
        if self._present is not None and np.array_equal(present, self._present):
            return False
        self._enroll(present, index)
        return True

    def start(self, weighings: Mapping[str, Weighing], present: BoolArray) -> None:
        """Begin with methods at an enrollment that was fitted elsewhere, of these clients, (n,)."""
        self.weighings, self._present = dict(weighings), present

    def _enroll(self, present: BoolArray, index: int) -> None:
        try:
            state = self.enrollment.at(present)
        except (SeparationError, NotConvergedError) as error:
            if present.all():
                raise
            raise InputError(
                f"Enrollment as it stood in round {index} ({int(present.sum())} clients) cannot be "
                f"fitted: {error}"
            ) from error
        self._present = present
        learnt = self._learnt | {n: w.learnt for n, w in self.weighings.items() if w.learnt}
        self.weighings = {
            name: method.at(state, learnt.get(name)) for name, method in self.methods.items()
        }
        self.enrollments += 1

    def weighing_at(self, name: str, present: BoolArray) -> Weighing:
        """Return a method as it will be in a round with these clients enrolled, (n,)."""
        if self._present is not None and np.array_equal(present, self._present):
            return self.weighings[name]
        before = self.weighings.get(name)
        learnt = self._learnt.get(name) if before is None else before.learnt
        return self.methods[name].at(self.enrollment.at(present), learnt)

    def weigh(
        self, replied: BoolArray, reliance: Mapping[str, float] | None = None
    ) -> dict[str, RoundWeights]:
        """Return each method's weights of the replies; ``replied`` (n,) is over the round's rows.

        ``reliance`` is how far methods rely on enrollment weights (O21), wholly by default.

        Raises
        ------
        EmptyRoundError
            If there is nothing to weigh: nobody is enrolled, nobody replied, or no reply has the
            values a model needs.
        """
        opened = self._opened()
        check_rows(len(opened.rows), replied=replied)
        if not len(opened.rows):
            raise EmptyRoundError("nobody is enrolled")
        if not replied.any():
            raise EmptyRoundError("nobody replied")
        state, rows = self.enrolled, opened.rows[replied]
        prob, known, source = self.participation.prob(replied)
        known = known & state.enrolled[rows]  # in the enrollment stage too
        invited = _invite_prob(opened)[replied]
        if not known.all():
            self.left_out += int((~known).sum())
            prob, rows, invited = prob[known], rows[known], invited[known]
        replies, relied = state.replies(opened.index, rows, prob, source, invited), reliance or {}
        found = {
            name: weighing.weighed(replies, relied.get(name, 1.0))
            for name, weighing in self.weighings.items()
        }
        self._replies = replies  # a round that cannot be weighed teaches nothing
        return found

    def close(self, replied: BoolArray) -> tuple[BoolArray, ...]:
        """Take the replies of the round, none included; return which rows are fitted on."""
        self._opened()
        taken = self.participation.close(replied)
        if self._replies is not None:
            self.weighings = {n: w.after(self._replies) for n, w in self.weighings.items()}
        self._open = self._replies = None
        return taken

    def everyone(self, round_: Round) -> Replies:
        """Return clients of a round as if all had replied; simulations use it for limits."""
        prob = self.participation.predicted(round_)
        invited = _invite_prob(round_)
        return self.enrolled.replies(round_.index, round_.rows, prob, Source.NONE, invited)

    def _opened(self) -> Round:
        if self._open is None:
            raise InputError("No round is open: call open(round) first.")
        return self._open

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs; only between rounds."""
        if self._open is not None:
            raise InputError("A round is open: state is saved between rounds.")
        learnt = self.learnt_state()
        return self.participation.state() | ({LEARNT: learnt} if learnt else {})

    def learnt_state(self) -> dict[str, Any]:
        """Return what calibrations have learnt that go on from round to round, by method."""
        return {n: w.learnt.to_arrays() for n, w in self.weighings.items() if w.learnt}

    def restore_learnt(self, state: Mapping[str, Any]) -> None:
        """Put back what was learnt, before the first round."""
        self._learnt = {name: OnlineState.of(saved) for name, saved in state.items()}

    def progress(self) -> dict[str, Any]:
        """Return what ``resume`` needs beside the state of participation; only between rounds."""
        return {
            "present": self._present, "enrollments": self.enrollments, "left_out": self.left_out,
            LEARNT: self.learnt_state(),
        }  # fmt: skip

    def resume(self, saved: Mapping[str, Any], index: int) -> None:
        """Go on after round ``index``: enrollment as it was then, and what was counted so far."""
        self.restore_learnt(saved[LEARNT])
        if saved["present"] is not None:
            self._enroll(saved["present"], index)
        self.enrollments, self.left_out = int(saved["enrollments"]), int(saved["left_out"])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back, before the first round."""
        self.restore_learnt(state.get(LEARNT, {}))
        self.participation.restore(state)


def _invite_prob(round_: Round) -> FloatArray:
    """Return the server's probability of inviting each client of a round, 1 if it says nothing."""
    if INVITE_PROB not in round_.table.columns:
        return np.ones(len(round_.rows))
    return round_.table[INVITE_PROB].cast(pl.Float64).to_numpy()
