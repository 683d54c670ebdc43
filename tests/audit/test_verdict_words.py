"""What the verdict says of it all: headlines, next steps, and how often it cries wolf."""

from dataclasses import replace

import numpy as np
import pytest

from fedipw.audit.values import Audit
from fedipw.audit.verdict import judged, verdict
from fedipw.evaluation.balance import BalanceTable, weighted_moments

from .handmade import (
    BIASED,
    ENROLLMENT,
    FAIR,
    TOTALS,
    answer,
    balance,
    empty,
    metric,
    reach,
    rounds,
    silent,
    sized,
    stage,
    weights,
)


def columns(enrolled: float, respondents: float, after: float = 0.0) -> Audit:
    return replace(FAIR, balance=balance({"age": (enrolled, respondents, 0.0, after)}))


SEPARATES = "enrollment by a fit with a penalty of 1: os separate(s) selected from non-selected"
EMPTY = reach(empty=(empty("os = web", 500),))
CARE = reach(share_below=0.02)
HELPS, HURTS = metric(0.5, 0.1, 0.1), metric(0.5, 0.1, -0.1)
HEADLINES = {
    "Respondents look like the population: weighting is not needed on these columns.": FAIR,
    "Enrollment is biased, and weights can correct it.": columns(0.5, 0.5),
    "Participation is biased, and weights can correct it.": columns(0.05, 0.5),
    "Enrollment and participation are biased, and weights can correct it.": columns(0.5, 0.9),
    "Enrollment is biased, and weights can correct it, with care.": replace(
        columns(0.5, 0.5), overlap=CARE
    ),
    "Enrollment is biased, and weights can correct it only in part.": columns(0.5, 0.5, 0.2),
    "Enrollment is biased, but weighting does not help here.": replace(
        columns(0.5, 0.5), metric=HURTS
    ),
    "Enrollment is biased; weights correct it at most in part and do not help here.": replace(
        columns(0.5, 0.5, 0.2), metric=HURTS
    ),
    "Enrollment is biased, and whether weights can correct it is unknown.": sized(
        replace(FAIR, balance=balance({"age": (0.5,)}), weights=()), rounds=0, replies=0
    ),
    "No selection bias is seen in what is known; the rest is unknown.": sized(
        replace(FAIR, balance=balance({"age": (0.05,)}), weights=()), rounds=0, replies=0
    ),
    "No column differs much, yet weighting moves the metric by more than it costs.": replace(
        FAIR, metric=HELPS
    ),
    "No column differs much, but weights cannot stand for the whole population.": replace(
        FAIR, overlap=EMPTY
    ),
}


@pytest.mark.parametrize("headline", HEADLINES)
def test_the_headline_sums_up_what_was_found(headline: str) -> None:
    found = judged(HEADLINES[headline]).verdict
    assert found is not None
    assert found.headline == headline
    assert all(f.rule and f.text and f.question.endswith("?") for f in found.findings)


def test_a_verdict_changes_nothing_else() -> None:
    assert replace(judged(BIASED), verdict=None, card=None) == BIASED
    assert judged(judged(BIASED)) == judged(BIASED)


# Next steps, each with an audit that gives a reason for it and for no other.

USE = (
    "Use the weights: fedipw weights --population FILE --rounds DIR --scheme fedipw --out w.parquet"
)
ALWAYS = "Keep the JSON file and compare later: fedipw audit --compare BEFORE AFTER."
KNOWN = replace(BIASED, metric=HELPS)
ONLY = replace(KNOWN.settings, scheme="participation-only")
STAYS = replace(KNOWN, balance=balance({"age": (0.5, 0.5, 0.0, 0.3)}))
STEPS = {
    "Enroll clients where there are none (os = web)": replace(KNOWN, overlap=EMPTY),
    "Name fewer columns in the enrollment formula": replace(
        KNOWN, overlap=reach(smallest_prob=None, share_below=None, estimated_size=None)
    ),
    "Use a scheme that corrects for enrollment": replace(STAYS, settings=ONLY),
    "Add squares or products to the enrollment formula": replace(
        KNOWN, balance=balance({"age": (0.5, 0.5, 0.3, 0.3)})
    ),
    "Add squares or products to the participation formula": STAYS,
    "Prefer Hájek or calibrated forms": replace(KNOWN, weights=(weights(design_effect=6.0),)),
    "Refit on a rolling window": replace(KNOWN, rounds=rounds(*[2.0] * 8)),
    "A population table, or totals of more columns": sized(replace(KNOWN, overlap=None), **TOTALS),
    "Invite or recruit clients where none ever replied (os = web) until some do": replace(
        KNOWN, silent=(silent("os = web", 120),)
    ),
    "Merge or leave out the columns that separate in the model of enrollment": replace(
        KNOWN, stages=(stage("enrollment", note=SEPARATES), stage("participation"))
    ),
    "Keep a ledger of rounds": sized(KNOWN, rounds=0),
    "Give the clients' metric (--metrics)": BIASED,
    "For this metric report the plain mean": replace(BIASED, metric=HURTS),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_next_step_is_there_exactly_where_its_reason_is(step: str) -> None:
    *use, first, last = verdict(STEPS[step]).next_steps
    assert first.startswith(step)
    assert last == ALWAYS
    hurts = step.startswith("For this metric report the plain mean")
    assert len(use) == (0 if hurts else 1)  # nobody is told to use weights that do not help
    assert all(line.startswith("Use the weights") for line in use)


def test_without_a_reason_one_uses_the_weights_and_keeps_the_numbers() -> None:
    use, last = verdict(KNOWN).next_steps
    assert use.startswith(USE)
    assert "FedIPW(strategy, population=FILE, ledger=DIR)" in use
    assert last == ALWAYS


def test_weights_that_do_not_help_are_not_to_be_used() -> None:
    for audit in (FAIR, replace(BIASED, metric=HURTS), replace(KNOWN, weights=())):
        assert not any("Use the weights" in step for step in verdict(audit).next_steps)
    (use, *_) = verdict(sized(replace(KNOWN, overlap=None), **TOTALS)).next_steps
    assert "FedIPW(strategy, enrolled=FILE, targets=FILE, ledger=DIR)" in use
    (use, *_) = verdict(STEPS["Merge or leave out the columns that separate in the model of "
                              "enrollment"]).next_steps  # fmt: skip
    assert use.startswith("Use the weights, for those they can stand for: fedipw weights")
    assert "--out w.parquet --soft, with" in use


def test_an_enrollment_model_that_is_off_asks_for_a_richer_formula_not_for_a_window() -> None:
    (_, first, _) = verdict(replace(KNOWN, overlap=reach(estimated_size=15_000.0))).next_steps
    assert first.startswith("Add squares or products to the enrollment formula")
    (_, first, _) = verdict(
        replace(KNOWN, stages=(stage("participation", calibration_ratio=2.0),))
    ).next_steps
    assert first.startswith("Refit on a rolling window")


# How often it cries wolf.


def drawn(rng: np.random.Generator, size: int, enrolled: int) -> Audit:
    """Return the audit of a population of which some are enrolled at random."""
    os = rng.choice(3, size, p=[0.6, 0.3, 0.1])
    table = np.column_stack(
        [rng.normal(size=size), rng.lognormal(size=size), rng.random(size) < 0.15]
        + [os == k for k in range(3)]
    ).T.astype(float)
    inside = rng.permutation(size) < enrolled
    names = ("age", "income", "old", "os[a]", "os[b]", "os[c]")
    groups = {"enrolled": weighted_moments(table, inside.astype(float))}
    found = BalanceTable.of(names, weighted_moments(table), groups)
    return sized(replace(FAIR, balance=found), population=float(size), enrolled=enrolled)


@pytest.mark.parametrize(
    ("size", "enrolled"), [(120, 30), (120, 100), (1_000, 300), (20_000, 5_000)]
)
def test_enrollment_at_random_is_hardly_ever_called_biased(size: int, enrolled: int) -> None:
    """At 1% a draw, more than 7 of 200 draws come with a chance of 0.1%.

    At the largest size only differences above 0.1 count, far beyond chance: none may come.
    """
    rng = np.random.default_rng(20)
    wrong = sum(answer(drawn(rng, size, enrolled), ENROLLMENT).answer == "Yes" for _ in range(200))
    assert wrong <= (7 if size < 20_000 else 0)
