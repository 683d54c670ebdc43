"""One step of the wrapped strategy: from weighted replies to the next model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, final

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedipw.errors import DivergedError
from fedipw.flower.arrays import array_view
from fedipw.flower.augmentation import Augmenter
from fedipw.flower.memory import ClientMemory
from fedipw.flower.outcomes import RoundOutcomes
from fedipw.flower.privacy import NoisySums
from fedipw.flower.probe import AVERAGING, counts_unsaid
from fedipw.flower.reply_metrics import metric_contents, only_real_replies, own_function
from fedipw.flower.screen import Screened, SentModel
from fedipw.flower.weighted_sum import (
    WeightedReply,
    buffer_means,
    finished_model,
    moved_model,
    summed_model,
    summed_replies,
    summed_reply,
)
from fedipw.weighting.pipeline import Weighing
from fedipw.weighting.weigher import RoundWeights


class RoundInput(NamedTuple):
    """What a step needs of a round besides its replies."""

    found: RoundWeights
    weighing: Weighing
    sent: SentModel
    limit: float  # the norm that updates are clipped to


@final
class Stepper:
    """The wrapped strategy with what is added to the weighted sum it steps by.

    At most one of noise, a regression and a memory is there.

    Parameters
    ----------
    strategy, key
        The wrapped strategy, and the metric by which it weights.
    noise, augmenter, memory
        What moves the model beside the replies.
    clip
        C, the norm that noise is scaled to.
    method
        Name of the method.
    """

    def __init__(
        self,
        strategy: Strategy,
        key: str,
        *,
        noise: NoisySums | None,
        augmenter: Augmenter | None,
        memory: ClientMemory | None,
        clip: float | None,
        method: str,
    ) -> None:
        self._strategy, self._key, self._clip, self._method = strategy, key, clip, method
        self._noise, self._augmenter, self._memory = noise, augmenter, memory

    def step(
        self, index: int, replies: Sequence[WeightedReply], given: RoundInput
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the wrapped strategy's model and metrics after the weighted sum (O8)."""
        sent, largest = given.sent, max(abs(reply.weight) for reply in replies)
        # a memory's model lies in a file: the strategy reads it without one copy more
        averages = type(self._strategy) in AVERAGING and self._memory is None
        means, contents, moved = buffer_means(replies, sent), None, None
        if own_function(self._strategy) is not None:
            weights = [reply.weight for reply in replies]
            contents = metric_contents([reply.message for reply in replies], weights, self._key)
        if self._noise is not None:
            assert self._clip is not None
            noise = self._noise.noise(index, sent.arrays, largest * self._clip)
            moved = moved_model(sent, noise)
        elif self._augmenter is not None:
            shift = self._augmenter.correction(
                replies, given.found, given.weighing, sent, summed=averages
            )
            moved = moved_model(sent, shift)
        elif self._memory is not None:
            replies = self._memory.weighted(replies)
            moved = self._memory.correction(index, replies, given.found, sent, given.limit)
        if averages:
            if self._augmenter is None or moved is None:
                moved = summed_model(replies, sent, moved)
            messages = summed_reply(replies, self._key, sent, moved, means)
        else:
            messages = summed_replies(replies, self._key, sent, moved, means)
        unsaid = counts_unsaid() if averages else nullcontext()
        try:
            with only_real_replies(self._strategy, contents), unsaid:
                arrays, metrics = self._strategy.aggregate_train(index, messages)
        finally:
            if self._memory is not None:
                self._memory.release()
        if arrays is not None:
            arrays = finished_model(arrays, sent, means)
            if not all(np.isfinite(array_view(array)).all() for array in arrays.values()):
                raise DivergedError(self._method, index, largest)
            if self._noise is not None:
                self._noise.spend()
        return arrays, metrics


def screened_replies(
    outcomes: RoundOutcomes, weights: Mapping[int, float], screening: Screened
) -> list[WeightedReply]:
    """Return the replies that have a weight, with what the screen found of them."""
    return [
        WeightedReply(
            outcomes.replies[place],
            weight,
            screening.factors[place],
            screening.norms[place],
            screening.buffers.get(place, {}),
        )
        for place, weight in weights.items()
    ]
