"""A client: says who it is and how it is, then trains, evaluates or declines."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedipw.flower import declined, describes
from $package.task import accuracy, battery, data, loss, takes_part, trained

app = ClientApp()


def own(context: Context) -> str:
    """Return the identifier of this client in the population table."""
    config = context.node_config
    return str(config.get("unit-id", config.get("partition-id", 0)))


@describes(app)
def description(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
    """Return what the server may know before a round: nothing else leaves the client."""
    return {"unit_id": own(context), "battery": battery(own(context), server_round)}


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own data."""
    if not takes_part(own(context), int(message.content["config"]["server-round"])):
        return declined(message, "low battery")
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    x, y = data(own(context))
    made = trained(model, x, y, float(context.run_config.get("learning-rate", 0.1)))
    metrics = MetricRecord({"loss": loss(made, x, y), "num-examples": len(y)})
    arrays = ArrayRecord({name: Array(array) for name, array in made.items()})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on data that the client does not train on."""
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    x, y = data(own(context), held_out=True)
    found = {"loss": loss(model, x, y), "accuracy": accuracy(model, x, y), "num-examples": len(y)}
    return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=message)
