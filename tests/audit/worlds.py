"""Worlds to audit: a population, its closed rounds, and their audit through JSON."""

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from cli import command
from fedipw.audit.gather import audit_facts
from fedipw.selection.coded import TableSettings
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import ParticipationSettings, Window
from fedipw.selection.steps import Formulas
from fedipw.tables import Ledger, Missing, Population
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan

Array = np.ndarray[Any, Any]
NET = ("wifi", "cell")


@dataclass(frozen=True)
class World:
    """A population and its closed rounds."""

    people: pl.DataFrame
    rounds: tuple[pl.DataFrame, ...]

    @property
    def inside(self) -> pl.DataFrame:
        return self.people.filter("enrolled")

    @property
    def log(self) -> pl.DataFrame:
        """All rows with what is known of their clients."""
        return pl.concat(self.rounds).join(
            self.people.drop("enrolled"), on="unit_id", maintain_order="left"
        )

    def changed(self, index: int, **columns: pl.Expr) -> "World":
        rounds = list(self.rounds)
        rounds[index - 1] = rounds[index - 1].with_columns(**columns)
        return replace(self, rounds=tuple(rounds))

    def put(self, where: Path) -> None:
        self.people.write_parquet(where / "people.parquet")
        self.inside.drop("enrolled").write_parquet(where / "enrolled.parquet")
        (where / "rounds").mkdir()
        for k, table in enumerate(self.rounds, 1):
            table.write_parquet(where / "rounds" / f"round-{k:06d}.parquet")


def sigmoid(odds: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-odds))


def world(
    seed: int = 0, *, size: int = 400, rounds: int = 12, steps: bool = False, clock: bool = False
) -> World:
    """Return a world of one step, or of three; rounds open every five hours."""
    rng = np.random.default_rng(seed)
    z, system = (
        rng.normal(size=size),
        rng.choice(["android", "ios", "web"], size, p=[0.5, 0.3, 0.2]),
    )
    rooms = rng.integers(1, 5, size)
    odds = 0.1 + 0.8 * z + 0.5 * (system == "ios") - 0.2 * rooms
    people = pl.DataFrame(
        {
            "unit_id": [f"zq{i}zq" for i in range(size)],
            "enrolled": rng.random(size) < sigmoid(odds),
            "z1": z,
            "os": system,
            "flat": np.ones(size),
            "rooms": rooms,
        }
    )
    inside = people.filter("enrolled")
    n, z1, made = inside.height, inside["z1"].to_numpy(), []
    for k in range(1, rounds + 1):
        x, net, prob = rng.normal(size=n), rng.choice(NET, n), rng.uniform(0.5, 1.0, n)
        there = (rng.random(n) < sigmoid(1.0 + 0.5 * z1)) | (not steps)
        invited = there & ((rng.random(n) < prob) | (not steps))
        replied = invited & (rng.random(n) < sigmoid(-0.3 + 0.8 * x + 0.4 * z1))
        unseen = pl.Series(~there)
        columns: dict[str, Any] = {
            "round": np.full(n, k),
            "unit_id": inside["unit_id"],
            "invited": invited,
            "replied": replied,
            "x": pl.Series(x).set(unseen, None),
            "net": pl.Series(net).set(unseen, None),
        }
        if steps:
            columns |= {"available": there, "invite_prob": pl.Series(prob).set(unseen, None)}
        if clock:
            opened = datetime(2026, 3, 1) + timedelta(hours=5 * k)
            columns["opened_at"] = [opened] * n
        made.append(pl.DataFrame(columns))
    return World(people, tuple(made))


def planned(
    method: str = "fedipw", *, fit: str = "past", missing: str = "error", **settings: Any
) -> Plan:
    return Plan(
        method=method_named(method),
        formulas=Formulas(missing=Missing(missing)),
        settings=ParticipationSettings(window=Window(fit), **settings),
    )


def gathered(
    given: World,
    where: Path,
    plan: Plan,
    *,
    ledger: bool = True,
    targets: dict[str, float] | None = None,
    population_size: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the audit of a world, through JSON without any number that is not finite."""
    given.put(where)
    rounds = Ledger(where / "rounds")
    people = Population(where / "people.parquet")
    if targets is not None:
        people = Population.from_totals(where / "enrolled.parquet", targets, population_size)
    stage = enrollment_stage(
        people,
        settings=TableSettings(missing=plan.formulas.missing),
        later=rounds.covariates,
    )
    audit = audit_facts(stage, rounds if ledger else None, plan, **options)
    assert audit.metric is None
    assert audit.verdict is None
    found: dict[str, Any] = json.loads(json.dumps(audit.to_json(), allow_nan=False))
    return found


def fedipw(*arguments: object) -> None:
    """Run a command in this process, to a good end."""
    code, _, err = command.fedipw(*arguments)
    assert code == 0, err
