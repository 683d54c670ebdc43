"""A probe of a strategy: whether it averages replies by the weights it is given."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import LogRecord, getLogger
from typing import Any, final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as known
from flwr.serverapp.strategy import Strategy

from fedipw.errors import InputError
from fedipw.numerics import FloatArray

AVERAGING = frozenset(
    {known.FedAvg, known.FedAvgM, known.FedAdam, known.FedYogi, known.FedAdagrad, known.FedProx}
)  # Flower's own, which tests compare with the engine
_NODES = 1_000
_SENT = np.array([0.5, -0.25, 1.0, 2.0])
# the plain mean of the updates has the other sign than the weighted sum, element by element: an
# optimiser that only follows signs goes another way
_UPDATES = np.array([[1.0, -2.0, 0.5, -1.0], [-3.0, 5.0, -2.0, 4.0], [0.5, -1.0, 0.25, -0.5]])
_WEIGHTS = (1.5, 0.25, 0.75)
_LOG = getLogger("flwr.fedipw")


@contextmanager
def counts_unsaid() -> Iterator[None]:
    """Keep Flower from logging how many replies it received, where they are not the clients'."""

    def said(record: LogRecord) -> bool:
        return not record.getMessage().startswith("aggregate_train: Received")

    logger = getLogger("flwr")
    logger.addFilter(said)
    try:
        yield
    finally:
        logger.removeFilter(said)


def check_follows_weights(strategy: Strategy, key: str) -> None:
    """Refuse a strategy that does not average replies by the metric ``key``.

    A copy of it aggregates known arrays twice: three replies under unequal weights, and replies
    that all are their weighted sum (O8). One that follows weights makes the same model of both. A
    class of Flower's that is known to is not tried. One that cannot be copied, or that fails on
    arrays that are not its model's, is not refused: the log has a warning.

    >>> from flwr.serverapp.strategy import FedAvg
    >>> check_follows_weights(FedAvg(), "num-examples")
    """
    name = type(strategy).__name__
    if type(strategy) in AVERAGING:
        return
    target = _SENT + np.array(_WEIGHTS) @ _UPDATES
    state = random.getstate()
    try:
        by_weights = _stepped(strategy, key, [*(_SENT + _UPDATES), _SENT, _SENT])
        at_once = _stepped(strategy, key, [target] * (len(_WEIGHTS) + 2))
    except Exception as error:
        # a strategy of somebody's own may need its own model, files or services
        _LOG.warning("FedIPW: whether %s follows weights could not be tried (%s: %s): it must "
                     "average replies by %r", name, type(error).__name__, error, key)  # fmt: skip
        return
    finally:
        random.setstate(state)
    if not np.allclose(by_weights, at_once, rtol=1e-5, atol=1e-5):
        raise InputError(
            f"{name} does not follow weights: it has weighted_by_key={key!r}, but made other "
            "models of replies under unequal weights and of their weighted mean. Let it average "
            "replies by that metric, or wrap FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi or "
            "FedProx."
        )


def _stepped(strategy: Strategy, key: str, models: list[FloatArray]) -> FloatArray:
    """Return the model that a copy of a strategy makes of replies with these models."""
    tried = copy.deepcopy(strategy)
    name = getattr(strategy, "arrayrecord_key", "arrays")
    sent = ArrayRecord({"probe": Array(_SENT)})
    list(tried.configure_train(1, sent, ConfigRecord(), _NobodyGrid()))
    weights = (*_WEIGHTS, 1.0, -sum(_WEIGHTS))
    replies = []
    for node, (model, weight) in enumerate(zip(models, weights, strict=True), start=1):
        invitation = Message(RecordDict(), dst_node_id=node, message_type="train")
        content = RecordDict(
            {
                name: ArrayRecord({"probe": Array(np.asarray(model))}),
                "metrics": MetricRecord({key: weight}),
            }
        )
        replies.append(Message(content, reply_to=invitation))
    with counts_unsaid():
        arrays, _ = tried.aggregate_train(1, replies)
    if arrays is None:
        raise ValueError("it made no model of five replies")
    return np.asarray(arrays["probe"].numpy(), dtype=np.float64)


@final
class _NobodyGrid(Grid):
    """A grid with nodes to sample and nobody behind them."""

    def set_run(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    @property
    def run(self) -> Any:
        raise NotImplementedError("nothing runs while a strategy is tried")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError("no messages are sent while a strategy is tried")

    def get_node_ids(self) -> Iterable[int]:
        return range(1, _NODES + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("no messages are sent while a strategy is tried")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError("no messages are sent while a strategy is tried")

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        raise NotImplementedError("no messages are sent while a strategy is tried")
