"""Asking a sample of the clients: who is drawn, and probabilities that stay right (P8)."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedipw.audit.replay import expected_share
from fedipw.errors import InputError
from fedipw.flower import declined
from fedipw.flower.asking import AskSample
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import Source, StepRows
from fedipw.selection.steps import Formulas
from fedipw.tables import Ledger
from fedipw.tables.design import Missing
from fedipw.tables.population import Population
from fedipw.weighting.live import Live
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan

from .federations import INSIDE, Small, moved


def test_a_sample_follows_seed_and_round() -> None:
    present = np.ones(50, dtype=np.bool_)
    one, other = AskSample(0.2, 1), AskSample(0.2, 2)
    assert (one.drawn(3, present) == one.drawn(3, present)).all()
    assert (one.drawn(3, present) != one.drawn(4, present)).any()
    assert (one.drawn(3, present) != other.drawn(3, present)).any()
    present[:40] = False
    assert not one.drawn(3, present)[:40].any()
    assert AskSample(7).drawn(1, present).sum() == 7
    assert AskSample(70).prob(present) == 1.0
    assert AskSample(0.5).prob(np.zeros(3, dtype=np.bool_)) == 1.0


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.5, 0, True, float("nan"), "all"])
def test_a_sample_is_a_fraction_or_a_number(bad: Any) -> None:
    with pytest.raises(InputError, match="ask is a fraction"):
        AskSample(bad)


def test_every_client_is_drawn_as_often() -> None:
    """400 rounds, 12 clients, 3 drawn: each count is binomial(400, 1/4), sd 8.7.

    A count beyond 5 sd in one of twelve has a chance below 1e-5.
    """
    sample, present = AskSample(3, 5), np.ones(12, dtype=np.bool_)
    counts = sum(sample.drawn(index, present).astype(int) for index in range(1, 401))
    assert np.abs(counts - 100.0).max() < 5 * 8.7


def test_invitation_probabilities_are_those_of_all_draws() -> None:
    """(P8) against enumeration: 5 clients, 3 of them available, 2 asked, k of those invited.

    Every sample of two is as likely; of the n available in it min(n, 1) is invited. Weights
    1 / invite_prob of the invited add up to the number available, on average over all draws.
    """
    clients, available, asked = range(5), {0, 2, 3}, 2
    a, total, draws = asked / 5, 0.0, list(combinations(clients, asked))
    for drawn in draws:
        here = [i for i in drawn if i in available]
        if here:  # one of them is invited: probability a * 1/n, whoever it is
            total += 1.0 / (a * 1.0 / len(here)) / len(draws)
    assert total == pytest.approx(len(available), rel=1e-12)


def test_a_sample_is_asked_and_the_ledger_says_so(tmp_path: Path) -> None:
    small = Small(tmp_path)
    result = small.trained(4, ask=0.25)
    for index in range(1, 5):
        rows = small.round(index)
        asked = {unit for unit, row in rows.items() if row["asked"]}
        assert len(asked) == 3
        assert {unit for unit, row in rows.items() if row["available"]} == asked
        assert {rows[unit]["invite_prob"] for unit in asked} == {0.25}
        assert all(rows[unit]["battery"] is not None for unit in asked)
    # once for the identifier, then a quarter in each round
    assert len(small.asked) == INSIDE + 4 * 3
    assert result.train_metrics_clientapp[4]["fedipw-available"] == 3
    again = small.trained(5, ask=0.25)
    assert again.train_metrics_clientapp[5]["fedipw-weighed"] == 3
    with pytest.raises(InputError, match="under other settings"):
        small.trained(6, ask=0.5)


def test_resuming_asks_the_same_clients(tmp_path: Path) -> None:
    models = []
    for name, stops in (("whole", [5]), ("parts", [2, 5])):
        (tmp_path / name).mkdir()
        small = Small(tmp_path / name, dict.fromkeys(range(INSIDE), sometimes))
        for rounds in stops:
            result = small.trained(rounds, ask=5, refit_every=1)
        models.append(result.arrays["theta"].numpy().tobytes())
        ledger = [Ledger(small.where / "ledger").read(k).drop("opened_at") for k in range(1, 6)]
        models.append(pl.concat(ledger).rows())
    assert models[:2] == models[2:]


def sometimes(message: Any, index: int) -> Any:
    who = int(message.metadata.dst_node_id)
    return declined(message) if (2 * index + who) % 7 < 3 else moved(message, index)


def lived(where: Path, share: float | None) -> tuple[Live, list[float], Ledger]:
    """Open and close 40 rounds of 200 clients, half of them often away; a share is asked."""
    rng, clients = np.random.default_rng(3), 200
    often = np.arange(clients) % 2 == 0
    devices = Population.of({"unit_id": np.arange(clients), "often": often.astype(float),
                             "age": rng.normal(size=clients), "enrolled": True})  # fmt: skip
    formulas = Formulas(reply="often", availability="often", missing=Missing.DROP)
    plan = Plan(method=method_named("participation-only"), formulas=formulas)
    live = Live(enrollment_stage(devices), Ledger(where), plan)
    sample, everybody, sums = AskSample(share or 1), np.ones(clients, dtype=np.bool_), []
    for index in range(1, 41):
        asked = everybody if share is None else sample.drawn(index, everybody)
        available = asked & (rng.random(clients) < np.where(often, 0.9, 0.4))
        a = 1.0 if share is None else sample.prob(everybody)
        n = int(available.sum())
        k = n // 2
        invited = np.zeros(clients, dtype=np.bool_)
        invited[rng.choice(np.flatnonzero(available), k, replace=False)] = True
        table = pl.DataFrame({
            "unit_id": np.arange(clients), "available": available, "invited": invited,
            "invite_prob": np.where(available, a * k / max(n, 1), np.nan),
        }).with_columns(pl.col("invite_prob").fill_nan(None))  # fmt: skip
        live.open(table if share is None else table.with_columns(pl.Series("asked", asked)))
        replied = invited & (rng.random(clients) < 0.7)
        found = live.weigh(replied)
        sums.append(0.0 if found is None else found.total)
        live.close(replied)
    return live, sums[10:], live.ledger


def test_weights_add_up_on_average_whoever_is_asked(tmp_path: Path) -> None:
    """Participation-only Horvitz–Thompson weights add up to 1 in the mean over rounds.

    Over 30 rounds the mean has the standard error that the rounds themselves show; a mean beyond 5
    of them has a chance below 1e-6 if it were normal. Were the 30% asked not counted, the mean
    would be 0.3; were availability fitted on those not asked too, it would be 3.3.
    """
    live, sums, ledger = lived(tmp_path / "asked", 0.3)
    error = float(np.std(sums, ddof=1) / np.sqrt(len(sums)))
    assert abs(np.mean(sums) - 1.0) < 5.0 * error
    assert error < 0.06
    assert live._learner is not None
    availability = live._learner.steps[0]
    rows, passed, _ = availability.totals(0, 40)
    assert rows == 40 * 60
    assert 0.55 < passed / rows < 0.75  # 0.65 is true; 5 sd are 0.05
    again = Live(live.stage, ledger, live.plan)  # a restart binds the same steps
    assert again._learner is not None
    assert again._learner.steps[0].totals(0, 40)[:2] == (rows, passed)


def test_an_audit_expects_as_many_replies_as_there_are() -> None:
    """(E18) of 100 clients: 40 asked, half of those available, half of those invited, all reply."""
    flags = {"asked": 40, "available": 20, "invited": 10, "replied": 10}
    table = pl.DataFrame(
        {name: [k < count for k in range(100)] for name, count in flags.items()}
    ).with_columns(pl.when("available").then(0.4 * 0.5).alias("invite_prob"))
    yes = np.ones(10, dtype=np.bool_)
    steps = [
        StepRows("availability", "asked", "available", np.full(40, 0.5), np.arange(40) < 20,
                 Source.MODEL),
        StepRows("reply", "invited", "replied", np.ones(10), yes, Source.MODEL),
    ]  # fmt: skip
    share, ratio = expected_share(table, steps)
    assert share == pytest.approx(0.10, rel=1e-12)  # 10 of 100 replied
    assert ratio == pytest.approx(1.0, rel=1e-12)
