"""The server: a Flower strategy, wrapped so that it serves the whole population."""

from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedipw.flower import FedIPW
from $package.task import first_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train; started again with the same ledger, it goes on where it was."""
    config = context.run_config
    strategy = FedIPW.from_run_config(FedAvg(min_available_nodes=2), config)
    start = ArrayRecord({name: Array(array) for name, array in first_model().items()})
    strategy.start(grid, start, num_rounds=int(config["num-server-rounds"]))
