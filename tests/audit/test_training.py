"""What an audit says of training: the method it recommends and why, and what updates have shown."""

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from fedipw.audit.training import Means, advice, recorded_reliance
from fedipw.audit.values import Audit, PopulationSource, Sizes
from fedipw.audit.verdict import UPDATES, verdict
from fedipw.tables.ledger import Ledger

from .handmade import BIASED, FAIR, rounds, weights


def federation(
    *,
    table: bool = True,
    enrolled: int = 500,
    replies: int = 4_000,
    design_effect: float = 1.5,
    invited: float = 1.0,
    reliance: float | None = None,
) -> Audit:
    """Return the audit of fifty rounds."""
    lines = tuple(
        replace(line, invited=invited * line.enrolled, reliance=reliance)
        for line in rounds(*([1.0] * 50), enrolled=float(enrolled))
    )
    sizes = Sizes(
        population=10_000.0 if table else None, population_table=table,
        population_source=PopulationSource.TABLE if table else PopulationSource.TOTALS,
        population_known=None,
        enrolled=enrolled, rounds=50, rows=50 * enrolled, replies=replies, clients_replied=enrolled,
    )  # fmt: skip
    part = replace(weights("enrollment"), design_effect=design_effect)
    return replace(BIASED, sizes=sizes, rounds=lines, weights=(part,))


def said(audit: Audit, **means: bool) -> str:
    return " ".join(advice(audit, Means(**means)))


def test_the_default_of_what_is_known() -> None:
    assert said(federation()).startswith("Train with augmented: the whole population is known")
    assert "Train with augmented-online: the population is known by totals alone" in said(
        federation(table=False)
    )
    assert advice(federation(enrolled=0), Means()) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replies": 4_000}, "clients replied 8 times each so far, too seldom to renew it"),
        ({"enrolled": 60, "replies": 3_000}, "with 60 enrolled clients it lost to FedAvg"),
    ],
)
def test_a_memory_is_advised_against_with_the_reason(changes: dict[str, int], words: str) -> None:
    audit = federation(**changes)  # type: ignore[arg-type]
    assert words in said(audit, memory=True)
    assert "memory" not in said(audit)  # nobody asked
    assert "memory" not in said(audit, memory=False)


def test_a_memory_is_advised_for_clients_that_come_back() -> None:
    audit = federation(enrolled=150, replies=4_500)
    assert "Better, since the server may keep one update" in said(audit, memory=True)
    assert "efficient-hajek. Clients replied 30 times each" in said(audit, memory=True)
    assert "If the server may keep one update" in said(audit)
    assert "efficient" not in said(audit, memory=False)


def test_invitations_are_advised_where_they_are_the_servers_and_weights_uneven() -> None:
    uneven = federation(design_effect=4.0, invited=0.4)
    assert 'invitations="proportional": the design effect of enrollment weights is 4' in said(
        uneven
    )
    assert "proportional" not in said(uneven, invitations=False)
    everybody = federation(design_effect=4.0)
    assert "invitations" not in said(everybody)  # the ledger shows that all are invited
    assert "proportional" in said(everybody, invitations=True)
    even = federation(design_effect=1.2, invited=0.4)
    assert "invitations" not in said(even)
    assert "Uniform invitations will do" in said(even, invitations=True)


@pytest.mark.parametrize(
    ("reliance", "answer"), [(1.0, "Yes"), (0.75, "Yes"), (0.5, "In part"), (0.1, "No")]
)
def test_what_updates_show_is_a_finding(reliance: float, answer: str) -> None:
    found = verdict(federation(reliance=reliance))
    (finding,) = [one for one in found.findings if one.question == UPDATES.question]
    assert finding.answer == answer
    assert f"{reliance:.2f}" in finding.text
    assert ("participation-only-hajek does as well" in " ".join(found.training)) == (answer == "No")


def test_without_a_server_nothing_is_said_of_updates() -> None:
    assert UPDATES.question not in {one.question for one in verdict(FAIR).findings}
    assert verdict(federation()).training == advice(federation(), Means())


def test_reliance_is_read_beside_the_ledger_and_damage_is_left_out(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rounds")
    for index in range(1, 8):
        ledger.append(
            index, pl.DataFrame({"unit_id": ["a"], "round": [index], "invited": [True],
                                 "replied": [True]})
        )  # fmt: skip
    assert recorded_reliance(ledger) == {}
    assert recorded_reliance(None) == {}
    folder = tmp_path / "rounds" / "checkpoint"
    folder.mkdir()
    texts = {
        1: json.dumps({"metrics": {"fedipw-reliance": 0.25}}),
        2: json.dumps({"metrics": None}),
        3: "{",
        4: json.dumps({"metrics": {"fedipw-reliance": "high"}}),
        5: json.dumps({"metrics": {"fedipw-reliance": 7.0}}),
        6: json.dumps([1]),
    }
    for index, text in texts.items():
        (folder / f"train-{index:06d}.json").write_text(text)
    assert recorded_reliance(ledger) == {1: 0.25}
