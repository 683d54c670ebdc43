"""For a ClientApp: describe the client to the server, and decline an invitation.

The names that server and clients share are here: a client's process imports nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedipw.errors import InputError

UNIT_ID: Final = "unit_id"  # identifies a client, in its answers as in tables
ACTION: Final = "fedipw"  # of the query that asks a client for its description
RECORD: Final = "fedipw"  # of question and answer
SERVER_ROUND: Final = "server-round"
COLUMNS: Final = "columns"  # the covariates asked for
DECLINED_CODE: Final = 1000  # error codes from here on are free for an app to use

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
