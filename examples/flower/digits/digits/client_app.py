"""What a node does: describe itself, then train, evaluate or decline."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import LocalWork, Work, World, accuracy, unit_id
from fedipw.flower import declined, describes

app = ClientApp()


def _own(context: Context) -> tuple[World, int]:
    """Return the world and this node's row in it."""
    world = World.of(context.run_config)
    return world, world.row(int(context.node_config["partition-id"]))


@describes(app)
def description(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
    """Return what the server may know before a round: who this is, and the state x."""
    world, row = _own(context)
    return {"unit_id": unit_id(row), "x": world.state(row, server_round)}


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train, unless this client does not take part in the round."""
    world, row = _own(context)
    index = int(message.content["config"]["server-round"])
    if not world.takes_part(row, index, Work.TRAIN):
        return declined(message, "busy")
    config = context.run_config
    work = LocalWork(
        epochs=int(config["local-epochs"]),
        batch_size=int(config["batch-size"]),
        step_size=float(config["step-size"]),
    )
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    images, digits = world.data(row)
    made = work.trained(model, images, digits, world.chance(6, index, row))
    metrics = {"accuracy": accuracy(model, images, digits), "num-examples": len(digits)}
    arrays = ArrayRecord({name: Array(array) for name, array in made.items()})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Report the accuracy of the model on the client's held-out images."""
    world, row = _own(context)
    if not world.takes_part(row, int(message.content["config"]["server-round"]), Work.EVALUATE):
        return declined(message, "busy")
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    images, digits = world.data(row, held_out=True)
    metrics = {"accuracy": accuracy(model, images, digits), "num-examples": len(digits)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
