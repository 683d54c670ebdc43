"""Invitations of a simulation: m of the enrolled a round, by the design that Flower uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import numpy as np

from fedipw.errors import InputError
from fedipw.weighting.invitations import PROPORTIONAL, InvitationDesign, Invitations, Invited
from fedipw.weighting.methods import method_named

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IdArray
    from fedipw.weighting.pipeline import Method, Weighing


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedInvitations(Invitations):
    """Invitations that all methods of a scenario share; ``number`` must be given.

    ``method`` is the one whose enrollment weights proportional invitations follow. One that learns
    its weights from the replies, such as ``augmented-online``, must be among the scenario's.

    >>> SimulatedInvitations(number=200).method
    'efficient'
    """

    method: str = "efficient"

    def __post_init__(self) -> None:
        Invitations.__post_init__(self)
        if self.number is None:
            raise InputError("[invitations] needs number, the invitations of a round.")
        self.check_method(self.scores_of)

    @property
    def learns(self) -> bool:
        """Whether invitations follow what a method learns from replies."""
        return self.kind == PROPORTIONAL and self.scores_of.calibration.pools_respondents

    @property
    def scores_of(self) -> Method:
        """The method whose enrollment weights are followed."""
        return method_named(self.method)


@final
class RoundInvitations:
    """Invitations of the enrolled, round by round; all of them are available.

    Parameters
    ----------
    design
        How invitations are drawn.
    unit_ids, enrolled
        The population and who of it is enrolled, (N,).
    weighing
        Returns the method that proportional invitations follow, as it is before a round.
    """

    def __init__(
        self,
        design: InvitationDesign,
        unit_ids: IdArray,
        enrolled: BoolArray,
        weighing: Callable[[], Weighing],
    ) -> None:
        design.settings.check_size(int(np.count_nonzero(enrolled)))
        self._design, self._weighing = design, weighing
        self._rows, self._size = np.flatnonzero(enrolled), len(enrolled)
        self._ids = unit_ids[self._rows].tolist()

    def drawn(self, index: int) -> Invited:
        """Return the invitations of a round, with a row for every client of the population.

        Clients that are not enrolled have the probability they would have, for limits.
        """
        settings = self._design.settings
        assert settings.number is not None
        scores = np.ones(self._size)
        if settings.kind == PROPORTIONAL:
            scores = _scores(self._weighing())
        found = self._design.drawn(index, self._ids, scores[self._rows], settings.number)
        flags = np.zeros(self._size, dtype=np.bool_)
        flags[self._rows] = found.flags
        prob = found.probabilities.prob(scores) / settings.rest
        return replace(found, flags=flags, prob=prob)


def _scores(weighing: Weighing) -> FloatArray:
    """Return what each client of the population stands for, were it enrolled, (N,)."""
    learnt = weighing.standing() if weighing.learnt is not None else None
    q = weighing.enrollment_weights if learnt is None else learnt
    return 1.0 / weighing.state.prob if q is None else q
