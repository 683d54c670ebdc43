"""Private training beside the open method, on the same draws, with clients lost at every stage.

``python -m benchmarks.private_equality`` trains the testbed and the digits by ``calibrated-online``
in the open and by secure sums, and saves the largest difference of a parameter. The open method
caps a reply's share of a round, for which it must see all weights of the round; private weights
are capped by the mean of earlier rounds instead. The two are equal without these caps; how far the
caps are apart is saved beside them. A client that is
lost before its masked vector has arrived is lost to the open run too; one that is lost after it is
in the sum.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedipw.flower import (
    FedIPW,
    InProcessGrid,
    Private,
    PrivateClient,
    Screen,
    declined,
    describes,
)
from fedipw.flower.private_client import RECORD, STAGE
from fedipw.lab.engine import LocalWork, LogisticTrainer, RoundWork
from fedipw.lab.files import environment
from fedipw.lab.scenario import Scenario
from fedipw.lab.testbed import Testbed

RESULTS = Path(__file__).parent / "results" / "private_equality.json"
STAGES = ("train", "share", "mask", "open")  # at which clients are lost
TURNS = "turns"  # at each of them in turn, by round
SHARES: Mapping[str, float] = {"none": 0.0, "one": 1e-9, "a fifth": 0.2}
L2 = 0.05
# calibrated-online without its cap on a reply's share of a round, which needs all weights of it
OPEN = "base=invitation, calibration=online, normalisation=hajek"
CAPPED = "calibrated-online"
Model = dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A federation with known draws: who replies in a round, and what it trains."""

    name: str
    ids: Sequence[str]
    covariates: pl.DataFrame  # of the clients, in the order of ids
    targets: Mapping[str, float]
    spread: Mapping[str, float]  # as the open method finds it among the enrolled
    start: Model
    replies: Callable[[int, int], bool]  # of a client in a round
    trained: Callable[[int, int, Model], Model]
    clip: float  # of updates, above all of them; the step of the code follows from it

    def lost(self, index: int, share: float) -> frozenset[int]:
        """Return the clients of a round that are lost in the middle, one at least if any."""
        there = [k for k in range(len(self.ids)) if self.replies(k, index)]
        count = min(int(np.ceil(share * len(there))), len(there))
        rng = np.random.default_rng([len(self.ids), index])
        return frozenset(rng.choice(there, count, replace=False).tolist())


def moments(frame: pl.DataFrame, inside: pl.DataFrame, names: Sequence[str]) -> tuple[Any, Any]:
    """Return population means of main effects, squares and products, and the enrolled's spread."""
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i:]]
    terms = {name: pl.col(name) for name in names}
    terms |= {f"{a}**2" if a == b else f"{a}:{b}": pl.col(a) * pl.col(b) for a, b in pairs}
    means, spread = {}, {}
    for name, term in terms.items():
        means[name] = float(frame.select(term.mean()).item())
        found = float(inside.select(((term - means[name]) ** 2).mean().sqrt()).item())
        spread[name] = found or 1.0  # as the open method has it where nothing varies
    return means, spread


def case_of_testbed(size: int, rounds: int, seed: int = 0) -> Case:
    """Return the lab's testbed: logistic regression, ten of its clients or more a round."""
    scenario = Scenario(
        seed=seed, rounds=rounds, population=Testbed(size=size), methods=("fedavg",)
    )
    federation = scenario.simulation(limits=False).federation
    draws = [federation.participation.advance() for _ in range(rounds)]
    frame, rows = federation.population.frame, federation.rows
    inside = np.flatnonzero(federation.population.enrolled)
    members = frame[inside]
    targets, spread = moments(frame, members, ("z1", "z2"))
    trainer = LogisticTrainer(rows, LocalWork(), L2)

    def trained(k: int, index: int, model: Model) -> Model:
        del index
        work = RoundWork(clients=np.array([inside[k]]), theta=model["theta"], key=0)
        return {"theta": model["theta"] + trainer.updates(work)[0]}

    return Case(
        name="testbed", ids=[str(i) for i in members["unit_id"].to_list()],
        covariates=members.select("z1", "z2"), targets=targets, spread=spread,
        start={"theta": np.zeros(rows.n_parameters)},
        replies=lambda k, index: bool(draws[index - 1].replied[inside[k]]), trained=trained,
        clip=5.0,
    )  # fmt: skip


def case_of_digits(size: int, enrolled: int, seed: int = 0) -> Case:
    """Return the network of the digits example, 2,410 parameters."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flower" / "digits"))
    try:
        task: Any = import_module("digits.task")
    finally:
        sys.path.pop(0)
    world = task.World(size, enrolled, 0.5, seed)
    frame = world.population
    members = frame.filter("enrolled")
    targets, spread = moments(frame, members, ("z1", "z2"))
    work = task.LocalWork(epochs=1, batch_size=10, step_size=0.3)

    def trained(k: int, index: int, model: Model) -> Model:
        row = world.row(k)
        return dict(work.trained(model, *world.data(row), world.chance(6, index, row)))

    return Case(
        name="digits", ids=members["unit_id"].to_list(), covariates=members.select("z1", "z2"),
        targets=targets, spread=spread, start=task.first_model(seed),
        replies=lambda k, index: world.takes_part(world.row(k), index, task.Work.TRAIN),
        trained=trained, clip=5.0,
    )  # fmt: skip


@dataclass
class Run:
    """One training of a case, private or open."""

    case: Case
    rounds: int
    private: Private | None
    stage: str = "train"
    share: float = 0.0
    scheme: str = OPEN
    index: int = 0  # of the round that is under way
    opened: list[int] = field(default_factory=list)  # contributors of each private round
    cut: int = 0  # weights, columns and updates beyond their bounds, in all rounds

    @cached_property
    def app(self) -> ClientApp:
        app, case = ClientApp(), self.case

        @describes(app)
        def about(context: Context, server_round: int) -> dict[str, float | int | bool | str]:
            del server_round
            return {"unit_id": case.ids[int(context.node_config["k"])]}

        def covariates(context: Context, server_round: int) -> dict[str, Any]:
            del server_round
            return case.covariates.row(int(context.node_config["k"]), named=True)

        def train(message: Message, context: Context) -> Message:
            k, index = int(context.node_config["k"]), _round(message)
            if not case.replies(k, index):
                return declined(message, "busy")
            sent = message.content.array_records["arrays"]
            model = {name: a.numpy() for name, a in sent.items()}
            made = case.trained(k, index, model)
            arrays = ArrayRecord({name: Array(np.asarray(a)) for name, a in made.items()})
            content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
            return Message(content, reply_to=message)

        if self.private is None:
            app.train()(train)
        else:
            PrivateClient(app, covariates=covariates, smallest=3).train(train)
        return app

    def loses(self, message: Message) -> bool:
        """Return whether a message does not reach its client."""
        kind, k = message.metadata.message_type, message.metadata.dst_node_id - 1000
        if kind == "train":
            self.index = _round(message)
        if kind not in {"train", "query.fedipw_sum"} or not self.share:
            return False
        at = "train" if kind == "train" else message.content[RECORD][STAGE]
        stage = STAGES[self.index % len(STAGES)] if self.stage == TURNS else self.stage
        before = self.private is None and stage != "open" and at == "train"
        return (at == stage or before) and k in self.case.lost(self.index, self.share)

    def model(self) -> np.ndarray[Any, Any]:
        """Return the parameters after the last round, in one vector."""
        case = self.case
        nodes = {1000 + k: {"k": k} for k in range(len(case.ids))}
        table = pl.DataFrame({"unit_id": list(case.ids)})
        if self.private is None:
            table = table.hstack(case.covariates)
        open_settings: dict[str, Any] = {} if self.private else {"scheme": self.scheme}
        with tempfile.TemporaryDirectory() as scratch:
            strategy = FedIPW(
                FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1),
                enrolled=table, targets=case.targets, ledger=Path(scratch) / "ledger",
                screen=Screen(clip=case.clip), private=self.private, average=None, **open_settings,
            )  # fmt: skip
            start = ArrayRecord({name: Array(np.asarray(a)) for name, a in case.start.items()})
            grid = InProcessGrid(self.app, nodes, self.loses)
            result = strategy.start(grid, start, num_rounds=self.rounds)
        told: list[Any] = [
            m for m in result.train_metrics_clientapp.values() if m.get("fedipw-sum-opened")
        ]
        self.opened = [int(m["fedipw-contributors"]) for m in told]
        kinds = ("weights-cut", "columns-cut", "updates-clipped")
        self.cut = sum(int(m[f"fedipw-{kind}"]) for m in told for kind in kinds)
        return np.concatenate([np.ravel(a.numpy()) for a in result.arrays.values()])


def _round(message: Message) -> int:
    found: Any = message.content.config_records["config"]["server-round"]
    return int(found)


def difference(case: Case, rounds: int, stage: str, share: float, bits: int = 32) -> dict[str, Any]:
    """Return how far the private model is from the open one, and how many were in its sums."""
    how = Private(spread=case.spread, minimum=3, bits=bits, largest_weight=20.0)
    private = Run(case, rounds, how, stage, share)
    theirs, ours = Run(case, rounds, None, stage, share).model(), private.model()
    start = np.concatenate([np.ravel(a) for a in case.start.values()])
    return {
        "case": case.name, "stage": stage, "lost": share, "rounds": rounds, "bits": bits,
        "difference": float(np.abs(ours - theirs).max()),
        "moved": float(np.abs(theirs - start).max()),
        "contributors": private.opened, "cut": private.cut,
    }  # fmt: skip


def main(rounds: int) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found, caps = [], {}
    for case in (case_of_testbed(160, rounds), case_of_digits(90, 36)):
        ways = (Run(case, rounds, None, scheme=scheme).model() for scheme in (OPEN, CAPPED))
        caps[case.name] = float(np.abs(np.subtract(*ways)).max())
        for name, share in SHARES.items():
            for stage in STAGES if share else STAGES[:1]:
                made = difference(case, rounds, stage, share) | {"lost": name}
                print(made["case"], name, stage, f"{made['difference']:.2e}", flush=True)
                found.append(made)
    made = {"environment": environment(), "runs": found, "open_cap_changes": caps}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    main(parser.parse_args().rounds)
