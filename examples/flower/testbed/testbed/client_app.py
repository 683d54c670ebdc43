"""What a node does: describe itself, then train, evaluate or decline."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedipw.flower import declined, describes
from testbed.task import Work, World, loss, trained

app = ClientApp()


def _own(context: Context) -> tuple[World, int]:
    """Return the world and this node's row in it."""
    world = World.of(context.run_config)
    return world, world.row(int(context.node_config["partition-id"]))


@describes(app)
def description(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
    """Return what the server may know before a round: who this is, and the state x."""
    world, row = _own(context)
    return {
        "unit_id": world.unit_id(row),
        "x": float(world.round(server_round).covariates[row, 0]),
    }


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train, unless this client does not take part in the round."""
    world, row = _own(context)
    if not world.takes_part(row, int(message.content["config"]["server-round"]), Work.TRAIN):
        return declined(message, "busy")
    theta = message.content["arrays"]["theta"].numpy()
    features, labels = world.data(row)
    made = trained(
        theta, features, labels,
        int(context.run_config["local-steps"]), float(context.run_config["step-size"]),
    )  # fmt: skip
    metrics = {"loss": loss(theta, features, labels), "num-examples": len(labels)}
    content = RecordDict(
        {"arrays": ArrayRecord({"theta": Array(made)}), "metrics": MetricRecord(metrics)}
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Report the loss of the model on the client's held-out data."""
    world, row = _own(context)
    if not world.takes_part(row, int(message.content["config"]["server-round"]), Work.EVALUATE):
        return declined(message, "busy")
    features, labels = world.data(row, held_out=True)
    found = loss(message.content["arrays"]["theta"].numpy(), features, labels)
    metrics = MetricRecord({"loss": found, "num-examples": len(labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
