"""Settings from a run's configuration, and the app that ``fedipw new`` writes."""

import importlib
import re
import subprocess
import sys
import tomllib
from inspect import signature
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg

from cli.command import fedipw
from fedipw.errors import InputError
from fedipw.flower import FedIPW, InProcessGrid
from fedipw.flower.run_config import KINDS, run_settings
from fedipw.tables import Ledger

from .federations import Small

NODES, ROUNDS = 40, 2
DOCS = Path(__file__).parents[2] / "docs" / "flower-reference.md"


def test_settings_are_those_given_in_code(tmp_path: Path) -> None:
    small = Small(tmp_path)
    config = {
        "num-server-rounds": 3, "fedipw-population": str(tmp_path / "people.parquet"),
        "fedipw-ledger": str(tmp_path / "ledger"), "fedipw-participation": "battery",
        "fedipw-l2": 1, "fedipw-refit-every": 4, "fedipw-scheme": "", "fedipw-average": "none",
        "fedipw-subgroups": "age", "fedipw-soft": True,
    }  # fmt: skip
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    made = FedIPW.from_run_config(inner, config, seed=0)
    same = small.strategy(l2=1.0, refit_every=4, average=None, subgroups=("age",))
    assert made.config.settings == same.config.settings
    result = made.start(small.grid, small.start, num_rounds=2)
    assert list(result.train_metrics_clientapp) == [1, 2]


@pytest.mark.parametrize(
    ("config", "given", "words"),
    [
        ({"fedipw-enrolment": "age"}, {}, "did you mean fedipw-enrollment?"),
        ({"fedipw-zzz": 1}, {}, "fedipw-zzz, which is no setting; there are"),
        ({"fedipw-l2": "much"}, {}, "fedipw-l2 in the run's configuration must be a number"),
        ({"fedipw-folds": True}, {}, "must be a whole number, not True"),
        ({"fedipw-history": "yes"}, {}, "must be true or false"),
        ({"fedipw-seed": 1}, {"seed": 2}, "seed stands in the run's configuration and in"),
        ({"fedipw-seed": 1}, {}, "set fedipw-ledger"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    config: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        FedIPW.from_run_config(FedAvg(), config, **given)


def test_every_plain_argument_has_a_key_and_a_line_in_the_docs() -> None:
    arguments = set(signature(FedIPW).parameters) - {"strategy"}
    objects = {"screen", "noise", "private", "clock", "callbacks"}
    assert set(KINDS) >= arguments - objects - OTHERS
    assert set(KINDS) <= arguments
    text = DOCS.read_text(encoding="utf-8")
    assert not [n for n in KINDS if f"`fedipw-{n.replace('_', '-')}`" not in text]
    assert run_settings({"seed": 3}) == {}


OTHERS: set[str] = set()  # arguments that are objects, of other modules


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "try-it"
    code, out, err = fedipw("new", where)
    assert code == 0, err
    assert str(where / "try_it" / "server_app.py") in out
    monkeypatch.syspath_prepend(str(where))
    return where


def test_the_new_app_trains_in_process(app: Path, tmp_path: Path) -> None:
    task = importlib.import_module("try_it.task")
    server = importlib.import_module("try_it.server_app")
    client = importlib.import_module("try_it.client_app")
    try:
        task.population().write_parquet(tmp_path / "population.parquet")
        config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
        run = config["config"] | {
            "num-server-rounds": ROUNDS, "fedipw-ledger": str(tmp_path / "ledger"),
            "fedipw-population": str(tmp_path / "population.parquet"),
        }  # fmt: skip
        grid = InProcessGrid(client.app, {1 + k: {"partition-id": k} for k in range(NODES)})
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run)
        server.main(grid, context)
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "try_it"]:
            del sys.modules[name]
    assert Ledger(tmp_path / "ledger").rounds == (1, 2)
    metrics = tmp_path / "ledger" / "evaluation" / "metrics"
    assert {path.name for path in metrics.iterdir()} == {"loss", "accuracy"}
    assert pl.read_parquet(tmp_path / "ledger" / "round-000002.parquet")["replied"].sum() > 10


def test_the_new_app_is_one_that_flower_builds(app: Path) -> None:
    server = (app / "try_it" / "server_app.py").read_text().splitlines()
    assert len(server) < 40
    program = Path(sys.executable).with_name("flwr")
    done = subprocess.run(
        [program, "build", "--app", app], cwd=app.parent, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(app.parent.glob("*.fab"))


def test_nothing_is_ever_overwritten(app: Path) -> None:
    before = {path: path.read_bytes() for path in app.rglob("*") if path.is_file()}
    code, _, err = fedipw("new", app)
    assert code == 2
    assert "is there already" in err
    (app.parent / "empty").mkdir()
    assert fedipw("new", app.parent / "empty")[0] == 2
    assert {path: path.read_bytes() for path in app.rglob("*") if path.is_file()} == before
    assert [p.name for p in app.parent.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["1st", "my app", "läbel"])
def test_a_name_that_is_no_package_is_refused(tmp_path: Path, name: str) -> None:
    code, _, err = fedipw("new", tmp_path / name)
    assert code == 2
    assert "cannot be the name of an app" in err
    assert not list(tmp_path.iterdir())
