"""Where enrollment stands: the probabilities of the members, and facts for schemes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedipw.tables.members import Members
from fedipw.tables.population import ID
from fedipw.weighting.registry import Facts, Method
from fedipw.weighting.sources import Units

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray
    from fedipw.selection.stage import StageModel
    from fedipw.weighting.everyone import Everyone


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Standing:
    """Enrollment at one time: probabilities of the members and facts for schemes."""

    units: Units  # over all members; ``enrolled`` are those present
    facts: Facts
    model: StageModel | None = None
    note: str = ""  # why there is no model, where one was asked for


class People(Protocol):
    """The enrolled clients, and what is known of the population they stand for."""

    @property
    def members(self) -> Members:
        """Everybody who is enrolled at some time."""
        ...

    def require(self, method: Method) -> None:
        """Raise if a method needs more than is known."""
        ...

    def at(self, present: BoolArray, method: Method) -> Standing:
        """Return enrollment when these members are enrolled, (n,)."""
        ...

    def everyone(self) -> Everyone:
        """Return the whole population, for the collapsed comparison."""
        ...


def units_of(members: Members, enrolled: BoolArray, prob: FloatArray) -> Units:
    """Return members as units of a weigher, with their enrollment probabilities."""
    return Units(
        unit_ids=members.frame[ID].to_numpy(),
        sample_counts=np.ones(members.size, dtype=np.int64),
        enrolled=enrolled,
        enrollment_prob=prob,
        static=np.empty((members.size, 0)),
    )
