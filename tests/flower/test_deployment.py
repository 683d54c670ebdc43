"""Processes on loopback: clients fail, a node and the server are killed, and training goes on.

Then enrollment grows; one client is silent until the timeout, one lies, one takes another's name.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import Message
from loopback import Deployment, Process, end, owned, until

from cli.command import fedipw
from fedipw.flower import InProcessGrid
from fedipw.tables.ledger import Ledger

from .deployment_app.faulty.client_app import HANGS_IN, HELD, HELD_IN, LAST
from .deployment_app.faulty.client_app import app as client_app
from .deployment_app.faulty.server_app import ENROLLMENT, PARTICIPATION, trained

APP = Path(__file__).parent / "deployment_app"
BEHAVIOURS = ("ordinary", "odd", "raises", "declines", "nan", "hangs")
LOST = BEHAVIOURS.index("hangs")  # the node that is killed
ROUNDS, SIZE, ENROLLED = 3, 40, 20
JOINED = ("silent", "lies")  # behaviours of the clients that join after these rounds
CHANGES = BEHAVIOURS.index("declines")  # the node that takes the name of node 0's client
PATIENCE, TIMEOUT = 300.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What two starts of a server left behind."""

    people: Path
    units: list[int]  # by node
    ledger: Path
    marks: Path
    log: str  # of the second start
    joined: list[int]  # clients of the third start, by their nodes
    grown: Path  # the ledger after the third start
    grown_log: str
    left: list[Process]  # after the deployment was stopped

    @property
    def rounds(self) -> pl.DataFrame:
        """The rows of clients that have a node, all rounds."""
        frame = Ledger(self.ledger).scan().collect()
        return frame.filter(pl.col("unit_id").is_in(self.units))

    def outcomes(self, index: int) -> list[str | None]:
        """Return the outcome of each node's invitation in a round."""
        here = self.rounds.filter(pl.col("round") == index)
        told = dict(zip(here["unit_id"], here["fate"], strict=True))
        return [told[unit] for unit in self.units]

    def later(self, index: int) -> dict[int, dict[str, Any]]:
        """Return the rows of a round of the third start, by client."""
        return {row["unit_id"]: row for row in Ledger(self.grown).read(index).to_dicts()}

    def times_trained(self, index: int, node: int) -> int:
        """Return how often a node was asked to train in a round."""
        return len(list(self.marks.glob(f"{index}-{node}-*")))


def written_people(path: Path) -> list[int]:
    """Write a population of which half enrolled, and return the clients that have nodes."""
    rng = np.random.default_rng(3)
    age = rng.normal(45.0, 12.0, SIZE)
    wish = (age - 45.0) / 12.0 + rng.logistic(scale=1.5, size=SIZE)
    inside = wish >= np.sort(wish)[-ENROLLED]
    frame = pl.DataFrame({"unit_id": range(100, 100 + SIZE), "age": age, "enrolled": inside})
    frame.write_parquet(path)
    return frame.filter("enrolled")["unit_id"].sample(len(BEHAVIOURS), seed=0).to_list()


def written_more(path: Path, people: Path) -> list[int]:
    """Write the population with two more enrolled clients, and return those."""
    frame = pl.read_parquet(people)
    more = frame.filter(~pl.col("enrolled"))["unit_id"][: len(JOINED)]
    grown = pl.col("enrolled") | pl.col("unit_id").is_in(more.implode())
    frame.with_columns(grown.alias("enrolled")).write_parquet(path)
    return more.to_list()


def node_config(node: int, units: list[int], marks: Path) -> dict[str, Any]:
    behaviour = (*BEHAVIOURS, *JOINED)[node]
    return {
        "node": node, "unit": units[node], "behaviour": behaviour, "marks": str(marks),
        "other": units[HELD],
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Kill a node in round 2 and the server in round 3, start it again, and with more clients.

    Most of the time goes into waiting for the SuperLink to notice that a node is gone, some 46 s,
    and for a client that is silent.
    """
    where = tmp_path_factory.mktemp("deployment")
    marks, ledger, people = where / "marks", where / "ledger", where / "people.parquet"
    marks.mkdir()
    (marks / "hold").touch()
    units = written_people(people)
    config = f'people="{people}" ledger="{ledger}" rounds={ROUNDS}'
    with Deployment(where / "flower") as deployment:
        for node in range(len(units)):
            deployment.add_node(node_config(node, units, marks))
        first = deployment.submitted(APP, config)
        _wait(marks, HANGS_IN, LOST)
        end([deployment.nodes[LOST]], at_once=True)
        _wait(marks, HELD_IN, HELD)
        deployment.kill_server_app()
        end([first], at_once=True)
        (marks / "hold").unlink()
        second = deployment.submitted(APP, f"{config} nodes={len(units) - 1}")
        log = deployment.finished(second, PATIENCE)
        closed, more = where / "closed", where / "more.parquet"
        shutil.copytree(ledger, closed)
        joined = written_more(more, people)
        everybody = [*units, *joined]
        for node in range(len(units), len(everybody)):
            deployment.add_node(node_config(node, everybody, marks))
        third = deployment.submitted(
            APP,
            f'people="{more}" ledger="{ledger}" rounds={LAST} nodes={len(everybody) - 1} '
            f"timeout={TIMEOUT}",
        )
        grown_log = deployment.finished(third, PATIENCE)
    return Finished(
        people=people, units=units, ledger=closed, marks=marks, log=log, joined=joined,
        grown=ledger, grown_log=grown_log, left=owned(deployment.started),
    )  # fmt: skip


def _wait(marks: Path, index: int, node: int) -> None:
    until(lambda: any(marks.glob(f"{index}-{node}-*")), f"node {node} in round {index}", PATIENCE)


@pytest.fixture(scope="module")
def uninterrupted(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of the same clients in one process, where no server is killed."""
    where = tmp_path_factory.mktemp("uninterrupted")
    (where / "marks").mkdir()

    def loses(message: Message) -> bool:
        config = message.content.config_records.get("config")
        gone = config is not None and config["server-round"] == HANGS_IN
        gone = gone and message.metadata.dst_node_id == LOST + 1
        if gone:
            grid.online.discard(LOST + 1)
        return gone

    nodes = {
        node + 1: node_config(node, finished.units, where / "marks")
        for node in range(len(finished.units))
    }
    grid = InProcessGrid(client_app, nodes, loses)
    trained(grid, finished.people, where / "ledger", ROUNDS)
    return where / "ledger"


def test_all_rounds_are_in_the_ledger_once(finished: Finished) -> None:
    assert Ledger(finished.ledger).rounds == tuple(range(1, ROUNDS + 1))
    checkpoints = finished.ledger / "checkpoint"
    trained_rounds = sorted(path.name for path in checkpoints.glob("train-*.json"))
    assert trained_rounds == [f"train-{index:06d}.json" for index in range(1, ROUNDS + 1)]
    models = [path.name for path in checkpoints.glob("round-*.npz")]
    assert models == [f"round-{ROUNDS:06d}.npz"]


def test_the_ledger_records_the_outcome_of_every_invitation(finished: Finished) -> None:
    refused = "refused: NaN or infinite values"
    raised = "raised: <class 'RuntimeError'>:<'out of memory'>"
    always = [raised, "declined", refused]
    assert finished.outcomes(1) == ["replied", "replied", *always, "replied"]
    assert finished.outcomes(2) == ["replied", "declined", *always, "lost"]
    assert finished.outcomes(3) == ["replied", "replied", *always, None]
    replied = pl.col("fate") == "replied"
    assert finished.rounds.select((replied.fill_null(False) == pl.col("replied")).all()).item()


def test_a_killed_node_is_not_available_later(finished: Finished) -> None:
    lost = finished.rounds.filter(pl.col("unit_id") == finished.units[LOST]).sort("round")
    assert lost["available"].to_list() == [True, True, False]
    assert lost["battery"].is_null().to_list() == [False, False, True]
    others = finished.rounds.filter(pl.col("unit_id") != finished.units[LOST])
    assert others["available"].all()


def test_the_killed_server_goes_on_with_the_round_it_was_in(finished: Finished) -> None:
    assert f"{ROUNDS} rounds, {HELD_IN - 1} of them done before" in finished.log
    times = [finished.times_trained(index, HELD) for index in range(1, ROUNDS + 1)]
    assert times == [1, 1, 2]


def test_the_weights_are_those_of_the_command(finished: Finished, tmp_path: Path) -> None:
    code, _, errors = fedipw(
        "weights", "--population", finished.people, "--rounds", finished.ledger,
        "--enrollment", ENROLLMENT, "--participation", PARTICIPATION, "--missing", "drop",
        "--out", tmp_path / "weights.parquet", "--scheme", "augmented", "--soft",
    )  # fmt: skip
    assert code == 0, errors
    offline = pl.read_parquet(tmp_path / "weights.parquet")
    assert offline["enrollment_prob"].n_unique() > 2
    told = [_metrics(finished.ledger, index) for index in range(1, ROUNDS + 1)]
    # on enrollment weights: that of so few different clients is no evidence against them (O21)
    assert {metrics["fedipw-reliance"] for metrics in told} == {1.0}
    for index, metrics in enumerate(told, 1):
        mine, used = offline.filter(pl.col("round") == index), metrics["fedipw-weights"]
        assert len(used) == mine.height == finished.outcomes(index).count("replied")
        q, prob = (mine[name].to_numpy() for name in ("enrollment_weight", "participation_prob"))
        raised = (q / prob) ** 0.75  # tempered; nobody is capped
        np.testing.assert_allclose(used, raised / raised.sum(), rtol=1e-10)
        np.testing.assert_allclose(used, mine["weight"].to_numpy(), rtol=1e-10)


def test_the_model_is_that_of_an_uninterrupted_run(finished: Finished, uninterrupted: Path) -> None:
    mine, other = (_model(ledger) for ledger in (finished.ledger, uninterrupted))
    assert np.linalg.norm(mine) > 0.1
    np.testing.assert_allclose(mine, other, rtol=1e-12)
    drop = ["opened_at", "fate"]
    ours, theirs = (
        Ledger(ledger).scan().collect().drop(drop) for ledger in (finished.ledger, uninterrupted)
    )
    assert ours.equals(theirs)


def test_enrollment_that_grew_is_noticed_and_joins_the_rounds(finished: Finished) -> None:
    assert f"{len(JOINED)} clients joined" in finished.grown_log
    assert Ledger(finished.grown).rounds == tuple(range(1, LAST + 1))
    for index in range(1, LAST + 1):
        there = set(finished.later(index))
        assert len(there) == ENROLLED + len(JOINED) * (index > ROUNDS)
        assert (set(finished.joined) <= there) == (index > ROUNDS)
    for index in range(1, ROUNDS + 1):
        name = f"round-{index:06d}.parquet"
        assert (finished.grown / name).read_bytes() == (finished.ledger / name).read_bytes()


def test_a_silent_client_costs_its_round_the_timeout_and_no_more(finished: Finished) -> None:
    silent = finished.joined[JOINED.index("silent")]
    assert finished.later(LAST - 1)[silent]["fate"] == "replied"
    assert finished.later(LAST)[silent]["fate"] in {"silent", "expired"}
    assert finished.later(LAST)[finished.units[HELD]]["fate"] == "replied"


def test_a_liar_is_taken_near_the_others(finished: Finished) -> None:
    """Batteries lie between 0 and 1, so quartiles are at most 1 apart."""
    liar = finished.joined[JOINED.index("lies")]
    for index in range(ROUNDS + 1, LAST + 1):
        assert finished.later(index)[liar]["fate"] == "replied"
        assert -3.0 <= finished.later(index)[liar]["battery"] <= 1.0
        metrics = _metrics(finished.grown, index)
        assert metrics["fedipw-winsorised"] >= 1
        assert max(metrics["fedipw-weights"]) <= 5.0 / len(metrics["fedipw-weights"]) + 1e-12


def test_a_client_that_takes_anothers_name_is_neither(finished: Finished) -> None:
    rows = finished.later(LAST)
    assert finished.later(LAST - 1)[finished.units[CHANGES]]["fate"] == "declined"
    assert not rows[finished.units[CHANGES]]["available"]
    assert rows[finished.units[HELD]]["available"]
    assert _metrics(finished.grown, LAST)["fedipw-unusable-nodes"] >= 1
    assert "has named several clients" in finished.grown_log


def test_no_process_is_left(finished: Finished) -> None:
    assert finished.left == []


def _metrics(ledger: Path, index: int) -> dict[str, Any]:
    path = ledger / "checkpoint" / f"train-{index:06d}.json"
    metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return metrics


def _model(ledger: Path) -> "np.ndarray[Any, np.dtype[np.float64]]":
    with np.load(ledger / "checkpoint" / f"round-{ROUNDS:06d}.npz", allow_pickle=False) as file:
        (name,) = (name for name in file.files if name.startswith("/model/"))
        return np.asarray(file[name])
