"""For a ClientApp: who this client is and how it does, and how it says no."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedipw.errors import InputError
from fedipw.flower.words import (
    ACTION,
    COLUMNS,
    DECLINED_CODE,
    RECORD,
    SERVER_ROUND,
    UNIT_ID,
)

Description = Mapping[str, float | int | bool | str]
Describe = Callable[[Context, int], Description]


def describes(app: ClientApp) -> Callable[[Describe], Describe]:
    """Register what tells the server who a client is and how it does before a round.

    The function is called with the context and the number of the round, and returns ``unit_id``
    and the covariates the server may ask for. Only those asked for are sent.

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
            asked = message.content.config_records[RECORD]
            told = dict(describe(context, int(asked[SERVER_ROUND])))  # type: ignore[arg-type]
            if UNIT_ID not in told:
                raise InputError(
                    f"A client's description needs {UNIT_ID!r}; it has {sorted(told)}."
                )
            wanted = [UNIT_ID, *(name for name in asked[COLUMNS] if name in told)]  # type: ignore[union-attr]
            record = ConfigRecord({name: told[name] for name in wanted})
            return Message(RecordDict({RECORD: record}), reply_to=message)

        return describe

    return register


def declined(message: Message, reason: str = "") -> Message:
    """Return a client's no to an invitation; the ledger records it as such."""
    return Message(Error(DECLINED_CODE, reason), reply_to=message)
