"""A Flower grid in one process, to try a strategy and its clients without a server or Ray.

Messages go straight to a ClientApp. Flower publishes the class ``Grid`` but not what a message
needs outside a run, so one import here goes deeper than an app's code should.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

RAISED = 2  # Flower's code of an error a client raised
Loses = Callable[[Message], bool]


class InProcessGrid(Grid):
    """Nodes of one ClientApp, called one after the other: for tutorials, tests and benchmarks.

    Parameters
    ----------
    app
        What every node runs.
    nodes
        Configuration of each node (``context.node_config``) by its identifier.
    loses
        Messages that never arrive.

    Examples
    --------
    >>> from flwr.app import MetricRecord
    >>> app = ClientApp()
    >>> @app.query()
    ... def battery(message, context):
    ...     told = MetricRecord({"battery": context.node_config["battery"]})
    ...     return Message(RecordDict({"state": told}), reply_to=message)
    >>> grid = InProcessGrid(app, {1: {"battery": 0.9}, 2: {"battery": 0.4}})
    >>> questions = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    >>> [reply.content["state"]["battery"] for reply in grid.send_and_receive(questions)]
    [0.9, 0.4]
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: Mapping[int, Mapping[str, Any]],
        loses: Loses = lambda _: False,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.loses = app, loses
        self.contexts = {
            node: Context(
                run_id=1, node_id=node, node_config=dict(config), state=RecordDict(), run_config={}
            )
            for node, config in nodes.items()
        }
        self.online = set(nodes)
        self._numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """There is no record of the run."""
        raise NotImplementedError

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message."""
        return Message(
            content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl
        )

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are online."""
        return sorted(self.online)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver messages, and keep the answers."""
        sent = []
        for message in messages:
            number = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = number  # as sending does
            sent.append(number)
            reply = self._reply(message)
            if reply is not None:
                reply.metadata.__dict__["_message_id"] = f"message-{next(self._numbers)}"
                self._replies[number] = reply
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers to messages."""
        return [self._replies.pop(n) for n in message_ids if n in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Deliver messages and return the answers; nobody is waited for."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node not in self.online or self.loses(message):
            return None
        try:
            return self.app(message, self.contexts[node])
        except Exception as error:  # as a SuperNode does
            return Message(Error(RAISED, repr(error)), reply_to=message)
