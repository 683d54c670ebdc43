"""What the loop of a run needs around its rounds: its arguments, and the last models averaged."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from logging import getLogger
from typing import Any, final

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedipw.combining.tail import TailAverage, tail_length
from fedipw.errors import InputError
from fedipw.flower.arrays import array_view, packed_record

_LOG = getLogger("flwr.fedipw")


def refuse_unknown(more: Mapping[str, Any]) -> None:
    """Raise for arguments that are not Flower's, or that its release has and ours not yet."""
    for name in more:
        if name in signature(Strategy.start).parameters:
            raise InputError(
                f"{name}= is new in this release of Flower, and FedIPW.start does not have it yet: "
                "leave it out."
            )
        raise InputError(f"FedIPW.start has no argument {name!r}.")


@final
class LastModels:
    """The average of the models after the last rounds of a run, a fraction of them; none for off.

    It begins at a round that is set when a run starts, and goes on after a restart.
    """

    def __init__(self, fraction: float | None) -> None:
        if fraction is not None:
            tail_length(1, fraction)  # or it raises
        self._fraction, self._tail, self._first = fraction, TailAverage(), 1

    def begin(self, rounds: int, closed: int) -> None:
        """Prepare the average of a run of so many rounds, of which some are closed."""
        if self._fraction is None:
            self._tail, self._first = TailAverage(), rounds + 1
            return
        first = rounds - tail_length(rounds, self._fraction) + 1
        if first != self._first:  # another end than the saved average was for
            self._tail = TailAverage()
        self._first = first
        missed = closed - first + 1 - self._tail.count
        if missed > 0:
            _LOG.warning("FedIPW: the average leaves out %d rounds that closed before this start "
                         "set its end", missed)  # fmt: skip

    def add(self, index: int, model: ArrayRecord) -> None:
        """Take the model after a round, if it is among the last."""
        if index >= self._first:
            self._tail.add({name: array_view(array) for name, array in model.items()})

    def mean(self, last: ArrayRecord | None) -> ArrayRecord | None:
        """Return the average in the types of the last model, none if fewer than two are in it."""
        if self._tail.count < 2 or last is None:
            return None
        _LOG.info("FedIPW returns the average of the models after the last %d rounds; last_model "
                  "is the last one", self._tail.count)  # fmt: skip
        return packed_record(self._tail.mean(), last)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"first": self._first, **self._tail.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self._tail, self._first = TailAverage.of(state), int(state["first"])
