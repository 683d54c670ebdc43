"""New levels in every round: few rounds are read anew, and the ledger tells the weights."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from cli.command import fedipw
from fedipw.flower import declined
from fedipw.flower.covariates import LEVELS_MOST
from fedipw.flower.levels import CategoryLevels
from fedipw.tables import Ledger

from ..federations import INSIDE, Small, moved, theta_of


def busy(message: Any, index: int) -> Any:
    who = int(message.metadata.dst_node_id)
    return declined(message) if (3 * index + who) % 5 < 2 else moved(message, index)


def attacked(where: Path, rounds: int, attackers: int = 1, **settings: Any) -> Any:
    """Train; some clients answer a level nobody has heard of, another one in every round."""
    where.mkdir()
    small = Small(where, dict.fromkeys(range(INSIDE), busy))
    given: dict[str, Any] = {
        "participation": "net",
        "scheme": "fedipw",
        "refit_every": 1,
        "average": None,
        **settings,
    }
    wrapped, result = small.strategy(**given), None
    for index in range(wrapped.rounds.closed + 1, rounds + 1):
        for k in range(INSIDE):
            evil = k < attackers
            small.told[k] = {"net": f"evil {index}" if evil else ("4g" if k % 2 else "5g")}
        result = wrapped.start(small.grid, small.start, num_rounds=index)
    return small, wrapped, result


def test_a_new_level_each_round_is_not_read_anew_each_round(tmp_path: Path) -> None:
    _, wrapped, result = attacked(tmp_path / "a", 20)
    assert wrapped._weighed.live.replayed < 2 * 20
    assert result.train_metrics_clientapp[20]["fedipw-other-levels"] == 1
    assert result.train_metrics_clientapp[20]["fedipw-weighed"] > 0


def test_three_clients_together_make_levels_at_doubling_rounds_only(tmp_path: Path) -> None:
    rounds = 20
    small, wrapped, _ = attacked(tmp_path / "a", rounds, attackers=3)
    levels = set(Ledger(small.where / "ledger").scan().collect()["net"].unique())
    assert levels == {"4g", "5g", "(other)", *(f"evil {2**k}" for k in range(5))}
    assert 0 < wrapped._weighed.live.replayed < 2 * rounds


def test_the_ledger_tells_the_weights(tmp_path: Path) -> None:
    small, _, result = attacked(tmp_path / "a", 12)
    code, _, errors = fedipw(
        "weights", "--population", small.where / "people.parquet", "--rounds",
        small.where / "ledger", "--participation", "net", "--scheme", "fedipw", "--missing", "drop",
        "--refit-every", "1", "--soft", "--out", tmp_path / "weights.parquet",
    )  # fmt: skip
    assert code == 0, errors
    offline = pl.read_parquet(tmp_path / "weights.parquet")
    for index in range(1, 13):
        mine = offline.filter(pl.col("round") == index)["weight"].to_numpy()
        used = result.train_metrics_clientapp[index]["fedipw-weights"]
        np.testing.assert_allclose(used, mine, rtol=1e-8)


def test_a_resumed_run_admits_the_same_levels(tmp_path: Path) -> None:
    whole, _, expected = attacked(tmp_path / "whole", 9, attackers=3)
    parts, _, _ = attacked(tmp_path / "parts", 5, attackers=3)
    again = parts.strategy(participation="net", scheme="fedipw", refit_every=1, average=None)
    for index in range(6, 10):
        for k in range(3):
            parts.told[k] = {"net": f"evil {index}"}
        found = again.start(parts.grid, parts.start, num_rounds=index)
    assert theta_of(found.arrays).tobytes() == theta_of(expected.arrays).tobytes()
    for index in range(1, 10):
        ours, theirs = (
            Ledger(s.where / "ledger").read(index).drop("opened_at") for s in (parts, whole)
        )
        assert ours.equals(theirs)


def test_declared_levels_are_known_from_the_start(tmp_path: Path) -> None:
    declared = {"net": ["4g", "5g", *(f"evil {k}" for k in range(1, 13))]}
    small, wrapped, result = attacked(tmp_path / "a", 12, covariates=declared)
    assert wrapped._weighed.live.replayed == 0
    assert small.round(12)["u0"]["net"] == "evil 12"
    assert result.train_metrics_clientapp[12]["fedipw-other-levels"] == 0


def test_a_level_that_half_of_the_answers_have_is_admitted_at_once(tmp_path: Path) -> None:
    small, wrapped, _ = attacked(tmp_path / "a", 6, attackers=6)
    assert [small.round(k)["u0"]["net"] for k in range(1, 7)] == [f"evil {k}" for k in range(1, 7)]
    assert wrapped._weighed.live.replayed == 1 + 2 + 3 + 4 + 5


def test_numbers_taken_as_categories_are_admitted_alike(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    small = Small(tmp_path / "a", dict.fromkeys(range(INSIDE), busy))
    wrapped = small.strategy(participation="C(hour)", scheme="fedipw", refit_every=1)
    for index in range(1, 12):
        for k in range(INSIDE):
            small.told[k] = {"hour": 1000.0 + index if k == 0 else float(k % 2)}
        result: Any = wrapped.start(small.grid, small.start, num_rounds=index)
    assert wrapped._weighed.live.replayed < 2 * 11
    assert small.round(11)["u0"]["hour"] is None
    assert result.train_metrics_clientapp[11]["fedipw-weighed"] > 0


def test_levels_are_bounded_in_number_and_in_what_is_remembered() -> None:
    levels = CategoryLevels(["net"], {}, (), 1000)
    rows = np.arange(1000)
    for index in range(1, 40):
        told = [f"{index} {k // 3}" if k < 900 else "wifi" for k in range(1000)]
        table, others = levels.applied(pl.DataFrame({"net": told}), rows, index)
        assert set(table["net"][900:]) == {"wifi"}
        assert others >= 900 - 3 * LEVELS_MOST
    (state,) = levels.state().values()
    assert len(state["admitted"]) == LEVELS_MOST
    assert len(state["waiting"]) <= 4 * LEVELS_MOST
