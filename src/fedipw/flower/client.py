"""For a ClientApp: describe the client, decline an invitation, keep SCAFFOLD's control variate.

The names that server and clients share are here: a client's process imports nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fedipw.errors import InputError

UNIT_ID: Final = "unit_id"  # identifies a client, in its answers as in tables
ACTION: Final = "fedipw"  # of the query that asks a client for its description
RECORD: Final = "fedipw"  # of question and answer
SERVER_ROUND: Final = "server-round"
COLUMNS: Final = "columns"  # the covariates asked for
DECLINED_CODE: Final = 1000  # error codes from here on are free for an app to use
CONTROL: Final = "fedipw-control"  # the mean of control variates, and what a reply says of its own
CONTROL_OWN: Final = "fedipw-control-own"  # a client's own, sent to a node that may not have it
CONTROL_STATE: Final = "fedipw-control-state"  # what the server knows of a client's own
ROUND, ACCEPTED, FACTOR = "round", "accepted", "factor"  # in that record
BASE, LENGTH = "base", "length"  # in a reply's record
_PENDING: Final = "fedipw-control-pending"  # in a client's state, until the server has accepted it

Description = Mapping[str, float | int | bool | str]
Describe = Callable[[Context, int], Description]


def describes(app: ClientApp) -> Callable[[Describe], Describe]:
    """Register the function that identifies and describes a client before a round.

    It is called with the context and the number of the round, and returns ``unit_id`` and the
    covariates the server may ask for. Only those asked for are sent.

    Examples
    --------
    >>> app = ClientApp()
    >>> @describes(app)
    ... def description(context: Context, server_round: int) -> dict[str, float | str]:
    ...     return {"unit_id": context.node_config["unit-id"], "battery": 0.8, "network": "wifi"}
    """

    def register(describe: Describe) -> Describe:
        @app.query(ACTION)
        def answer(message: Message, context: Context) -> Message:
            question = message.content.config_records[RECORD]
            known = dict(describe(context, int(question[SERVER_ROUND])))  # type: ignore[arg-type]
            if UNIT_ID not in known:
                raise InputError(
                    f"A client's description needs {UNIT_ID!r}; it has {sorted(known)}."
                )
            asked = [UNIT_ID, *(name for name in question[COLUMNS] if name in known)]  # type: ignore[union-attr]
            record = ConfigRecord({name: known[name] for name in asked})
            return Message(RecordDict({RECORD: record}), reply_to=message)

        return describe

    return register


def declined(message: Message, reason: str = "") -> Message:
    """Return a client's refusal of an invitation; the ledger records it as such."""
    return Message(Error(DECLINED_CODE, reason), reply_to=message)


Arrays = dict[str, NDArray[Any]]


@final
class ControlVariate:
    r"""SCAFFOLD's control variate of a client, kept in its context between rounds.

    .. math:: y \leftarrow y - \eta\,(g_i(y) + c - c_i), \qquad
       c_i^+ = c_i - c + \frac{\theta - y}{K \eta} \qquad (O15)

    Add ``corrections``, :math:`c - c_i` by array, to every local gradient; the local steps must be
    plain ones, a step size times a gradient. :math:`c_i^+` waits in the context until the server
    has accepted the round, and is dropped if it has not: a reply that was lost or refused changes
    nothing.

    Examples
    --------
    In a ``ClientApp``, with ``gradient`` the client's own::

        @app.train()
        def train(message, context):
            control = ControlVariate.of(message, context)
            model = {k: v.numpy() for k, v in message.content["arrays"].items()}
            for _ in range(10):
                for name, slope in gradient(model).items():
                    model[name] = model[name] - 0.1 * (slope + control.corrections[name])
            record = ArrayRecord({k: Array(v) for k, v in model.items()})
            metrics = MetricRecord({"num-examples": 20})
            content = RecordDict({"arrays": record, "metrics": metrics})
            return control.reply(Message(content, reply_to=message), steps=10, step_size=0.1)
    """

    def __init__(
        self, message: Message, context: Context, mean: Arrays, own: Arrays, base: int
    ) -> None:
        self._message, self._context = message, context
        self._mean, self._base = mean, base
        self.corrections: Arrays = {name: c - own[name] for name, c in mean.items()}

    @classmethod
    def of(cls, message: Message, context: Context) -> Self:
        """Return the control variate of an invitation; InputError if the server sent none."""
        records = message.content.array_records
        if CONTROL not in records or CONTROL_STATE not in message.content.config_records:
            raise InputError(
                "The server sent no control variates: its scheme is not a scaffold one, such as "
                "scaffold+efficient."
            )
        mean = {name: array.numpy() for name, array in records[CONTROL].items()}
        told = message.content.config_records[CONTROL_STATE]
        accepted, factor = int(told[ACCEPTED]), float(told[FACTOR])  # type: ignore[arg-type]
        own, base = _settled(context, mean, accepted, factor)
        if CONTROL_OWN in records:  # this node may have lost it
            own, base = {k: array.numpy() for k, array in records[CONTROL_OWN].items()}, accepted
        _keep(context, own, base)
        return cls(message, context, mean, own, base)

    def reply(self, reply: Message, *, steps: int, step_size: float) -> Message:
        r"""Return a reply that says what the server needs, the new :math:`c_i` kept aside.

        ``steps`` and ``step_size`` are K and :math:`\eta` of the local work behind it.
        """
        length = float(steps) * float(step_size)
        if not (math.isfinite(length) and length > 0.0):
            raise InputError(f"steps times step_size must be positive, not {length!r}.")
        trained = next(iter(reply.content.array_records.values()))
        records = self._message.content.array_records
        sent = next(r for k, r in records.items() if k not in {CONTROL, CONTROL_OWN})
        pending = {
            name: control_change(sent[name].numpy(), trained[name].numpy(), mean, length)
            for name, mean in self._mean.items()
        }
        index = self._message.content.config_records[CONTROL_STATE][ROUND]
        state = self._context.state
        state[_PENDING] = _record(pending)
        state.config_records[CONTROL_STATE][ROUND] = index
        reply.content[CONTROL] = ConfigRecord({BASE: self._base, LENGTH: length})
        return reply


def control_change(
    sent: NDArray[Any], trained: NDArray[Any], mean: NDArray[Any], length: float
) -> NDArray[Any]:
    r"""Return :math:`c_i^+ - c_i = -(c + (y - \theta) / (K \eta))`, in the type of c.

    Server and client compute it alike, so that both keep the same numbers.

    >>> control_change(np.zeros(2), np.array([-1.0, 0.5]), np.array([0.5, 0.0]), length=0.5)
    array([ 1.5, -1. ])
    """
    update = trained.astype(mean.dtype, copy=False) - sent.astype(mean.dtype, copy=False)
    change: NDArray[Any] = -(mean + update / mean.dtype.type(length))
    return change


def _settled(context: Context, mean: Arrays, accepted: int, factor: float) -> tuple[Arrays, int]:
    """Return a client's own control variate after the round the server accepted last.

    Zeros, and round 0, if the context does not have it: the server then counts it from zero.
    """
    state, zeros = context.state, {name: np.zeros_like(c) for name, c in mean.items()}
    records, known = state.array_records, state.config_records.get(CONTROL_STATE)
    if not accepted or known is None or CONTROL not in records:
        return zeros, 0
    own = {name: array.numpy() for name, array in records[CONTROL].items()}
    base, waiting = int(known[BASE]), int(known.get(ROUND, 0))  # type: ignore[arg-type]
    if waiting == accepted and _PENDING in records:
        change = {name: array.numpy() for name, array in records[_PENDING].items()}
        own = {k: c.dtype.type(factor) * (c + change[k]) for k, c in own.items()}
        base = accepted
    same = {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in mean.items()}
    return (own, base) if base == accepted and same else (zeros, 0)


def _keep(context: Context, own: Arrays, base: int) -> None:
    context.state[CONTROL] = _record(own)
    context.state[CONTROL_STATE] = ConfigRecord({BASE: base, ROUND: 0})
    if _PENDING in context.state:
        del context.state[_PENDING]


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
