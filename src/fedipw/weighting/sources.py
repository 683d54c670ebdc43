"""Where probabilities come from: two fitted stages, the truth, or one collapsed model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows
from fedipw.selection import ParticipationModel, Source
from fedipw.weighting.rounds import RoundOpening, RoundReplies

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray, IdArray, IntArray
    from fedipw.selection import EnrollmentFit
    from fedipw.tables.population import Population


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """The N clients of a table and which of them are enrolled (n of them)."""

    unit_ids: IdArray  # (N,)
    sample_counts: IntArray  # (N,)
    enrolled: BoolArray  # (N,)
    enrollment_prob: FloatArray  # (N,), read only where needed
    static: FloatArray  # (N, q_z) covariates that do not change from round to round

    def __post_init__(self) -> None:
        check_rows(
            len(self.unit_ids),
            sample_counts=self.sample_counts,
            enrolled=self.enrolled,
            enrollment_prob=self.enrollment_prob,
            static=self.static,
        )

    def replies(
        self, index: int, rows: IntArray, participation_prob: FloatArray, source: Source
    ) -> RoundReplies:
        """Return what is known of the clients in ``rows`` of the table."""
        return RoundReplies(
            index=index,
            unit_ids=self.unit_ids[rows],
            rows=rows,
            enrollment_prob=self.enrollment_prob[rows],
            participation_prob=participation_prob,
            sample_counts=self.sample_counts[rows],
            source=source,
        )


class Propensities(Protocol):
    """A source of both stages' probabilities, told of each round as it opens and closes."""

    @property
    def units(self) -> Units:
        """The table behind it."""
        ...

    def open(self, opening: RoundOpening) -> None:
        """Take what is known before a round."""
        ...

    def replies(self, replied: BoolArray) -> RoundReplies:
        """Return what is known of those who replied; ``replied`` is (n,) over the enrolled."""
        ...

    def close(self, replied: BoolArray) -> None:
        """Take the replies of the round, (n,)."""
        ...

    def everyone(self, covariates: FloatArray, true_prob: FloatArray) -> RoundReplies:
        """Return all N units as if all had replied; simulations only, (N, q) and (N,)."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs to go on to the same bytes."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        ...


@final
class Unmodelled:
    """No probabilities at all, for schemes that read none; both stages stand as 1."""

    def __init__(self, units: Units) -> None:
        self.units, self._rows, self._index = units, np.flatnonzero(units.enrolled), 0

    def open(self, opening: RoundOpening) -> None:
        """Take what is known before a round."""
        self._index = opening.index

    def replies(self, replied: BoolArray) -> RoundReplies:
        """Return who replied."""
        rows = self._rows[replied]
        return self.units.replies(self._index, rows, np.ones(len(rows)), Source.NONE)

    def close(self, replied: BoolArray) -> None:
        """Learn nothing."""

    def everyone(self, covariates: FloatArray, true_prob: FloatArray) -> RoundReplies:
        """Return all units."""
        del covariates
        ones = np.ones_like(true_prob)
        return self.units.replies(self._index, np.arange(len(ones)), ones, Source.NONE)

    def state(self) -> dict[str, Any]:
        """Return nothing: nothing is learnt."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back nothing."""


@final
class TwoStage:
    """FedIPW's own source: fitted enrollment and a participation model of the enrolled."""

    @classmethod
    def of(
        cls, population: Population, enrollment: EnrollmentFit, columns: Sequence[str]
    ) -> TwoStage:
        """Return a source from a table and its enrollment fit.

        Participation is fitted on all covariates of the table and on ``columns``, the pre-round
        covariates of each round; every client counts for one sample.
        """
        static = population.matrix()
        units = Units(
            unit_ids=population.unit_ids,
            sample_counts=np.ones(population.size, dtype=np.int64),
            enrolled=population.enrolled,
            enrollment_prob=enrollment.prob,
            static=static,
        )
        enrolled = static[population.enrolled]
        return cls(units, ParticipationModel(enrolled, population.covariates, columns))

    def __init__(self, units: Units, participation: ParticipationModel) -> None:
        self.units, self._participation = units, participation
        self._rows, self._index = np.flatnonzero(units.enrolled), 0
        self._prob = np.ones(len(self._rows))
        self._source = Source.PAST_RATE

    def open(self, opening: RoundOpening) -> None:
        """Take what is known before a round."""
        self._index = opening.index
        self._participation.open(opening.matrix())

    def replies(self, replied: BoolArray) -> RoundReplies:
        """Return what is known of those who replied."""
        self._prob, self._source = self._participation.prob(replied)
        rows = self._rows[replied]
        return self.units.replies(self._index, rows, self._prob[replied], self._source)

    def close(self, replied: BoolArray) -> None:
        """Take the replies of the round."""
        self._participation.close(replied)

    def everyone(self, covariates: FloatArray, true_prob: FloatArray) -> RoundReplies:
        """Return all units under the present fits."""
        del true_prob
        prob = self._participation.elsewhere(self.units.static, covariates)
        prob[self._rows] = self._prob  # the enrolled keep their own, cross-fitted or not
        return self.units.replies(self._index, np.arange(len(prob)), prob, self._source)

    def state(self) -> dict[str, Any]:
        """Return the participation model's state."""
        return self._participation.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._participation.restore(state)


@final
class Known:
    """True probabilities, as only a simulation has them (the oracle)."""

    def __init__(self, units: Units) -> None:
        self.units, self._rows = units, np.flatnonzero(units.enrolled)
        self._opening: RoundOpening | None = None

    def open(self, opening: RoundOpening) -> None:
        """Take what is known before a round."""
        if opening.participation_prob is None:
            raise InputError(
                "The oracle needs true participation probabilities; a trace or a log has none. "
                "Use an estimated scheme."
            )
        self._opening = opening

    def replies(self, replied: BoolArray) -> RoundReplies:
        """Return what is known of those who replied."""
        if self._opening is None or self._opening.participation_prob is None:
            raise InputError("No round is open.")
        prob = self._opening.participation_prob[replied]
        return self.units.replies(self._opening.index, self._rows[replied], prob, Source.KNOWN)

    def close(self, replied: BoolArray) -> None:
        """Learn nothing: everything is known."""

    def everyone(self, covariates: FloatArray, true_prob: FloatArray) -> RoundReplies:
        """Return all units with their true probabilities."""
        del covariates
        index = 0 if self._opening is None else self._opening.index
        return self.units.replies(index, np.arange(len(true_prob)), true_prob, Source.KNOWN)

    def state(self) -> dict[str, Any]:
        """Return nothing: nothing is learnt."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back nothing."""


@final
class Collapsed:
    """One model of P(A = 1 | Z, X) over the whole population: the misspecified comparison.

    X of a client that never enrolled does not exist; it is filled with the mean of the enrolled
    clients' X of the round. ``enrollment_prob`` is 1 and ``participation_prob`` the one model's.
    """

    def __init__(self, units: Units, model: ParticipationModel) -> None:
        self.units, self._model = units, model
        self._rows, self._index = np.flatnonzero(units.enrolled), 0
        self._source = Source.PAST_RATE

    def open(self, opening: RoundOpening) -> None:
        """Take what is known before a round and fill the rest."""
        self._index = opening.index
        known = opening.matrix()
        filled = np.tile(known.mean(axis=0), (len(self.units.unit_ids), 1))
        filled[self._rows] = known
        self._model.open(filled)

    def replies(self, replied: BoolArray) -> RoundReplies:
        """Return what is known of those who replied."""
        prob, self._source = self._model.prob(self._everywhere(replied))
        rows = self._rows[replied]
        return self._units_replies(rows, prob[rows])

    def close(self, replied: BoolArray) -> None:
        """Take the replies of the round."""
        self._model.close(self._everywhere(replied))

    def everyone(self, covariates: FloatArray, true_prob: FloatArray) -> RoundReplies:
        """Return all units under the one model, with their own X (simulations have it)."""
        del true_prob
        prob = self._model.elsewhere(self.units.static, covariates)
        return self._units_replies(np.arange(len(prob)), prob)

    def _units_replies(self, rows: IntArray, prob: FloatArray) -> RoundReplies:
        return RoundReplies(
            index=self._index,
            unit_ids=self.units.unit_ids[rows],
            rows=rows,
            enrollment_prob=np.ones(len(rows)),
            participation_prob=prob,
            sample_counts=self.units.sample_counts[rows],
            source=self._source,
        )

    def _everywhere(self, replied: BoolArray) -> BoolArray:
        out = np.zeros(len(self.units.unit_ids), dtype=bool)
        out[self._rows] = replied
        return out

    def state(self) -> dict[str, Any]:
        """Return the model's state."""
        return self._model.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._model.restore(state)
