"""What is compared between two audits, what is not and why, and what each knew."""

from dataclasses import replace

import pytest

from fedipw.audit.compare import changes, compare_page, information, not_compared
from fedipw.audit.values import Audit, FitKind
from fedipw.audit.verdict import judged
from fedipw.selection.coefficients import Coefficient

from .handmade import BIASED, FAIR, metric, sized, stage, weights
from .handmade import TOTALS as BY_TOTALS

COEFFICIENT = Coefficient.of("age", 0.5, 0.1)
FULL = replace(
    BIASED,
    stages=tuple(stage(n, coefficients=(COEFFICIENT,)) for n in ("enrollment", "participation")),
    metric=metric(0.5, 0.1, 0.1),
)
assert BIASED.balance is not None
TOTALS = sized(
    replace(
        BIASED,
        settings=replace(BIASED.settings, enrollment="age, income"),
        stages=(stage("participation"),),
        overlap=None,
        balance=replace(BIASED.balance, scale_from="enrolled weighted"),
    ),
    population=None, **BY_TOTALS, population_known=None,
)  # fmt: skip


def test_each_audit_says_what_it_knew() -> None:
    knew = information(FULL)
    assert knew["Population"] == "table of all clients, N = 10,000"
    assert knew["Rounds"] == "20 with 8,000 replies"
    assert knew["Metric"] == "loss, 20 rounds"
    assert knew["Enrollment by"] == "logistic regression on every covariate"
    less = information(sized(TOTALS, rounds=0))
    assert less["Population"] == "totals alone (age, income)"
    assert (less["Rounds"], less["Metric"], less["Enrollment by"]) == (
        "no ledger", "none", "no model",
    )  # fmt: skip


def test_the_same_audit_twice_has_nothing_apart_and_no_change() -> None:
    assert not_compared(FULL, FULL) == {}
    (line,) = changes(judged(FULL), judged(FULL))
    assert line.startswith("The difference from the population that moved most")
    assert ": 0.50 before, 0.50 after." in line


@pytest.mark.parametrize(
    ("after", "section", "reason"),
    [
        (TOTALS, "balance", "of the population before and of the enrolled weighted after"),
        (TOTALS, "coefficients of enrollment", "Coefficients of enrollment are known only before"),
        (TOTALS, "metric", "Estimates of a metric are known only before."),
        (
            replace(FULL, metric=replace(metric(0.5, 0.1, 0.1), name="accuracy")), "metric",
            "The metric is loss before and accuracy after.",
        ),
        (
            replace(FULL, stages=(FULL.stages[0], stage("participation", kind=FitKind.RATE))),
            "coefficients of participation",
            "Participation is by logistic regression before and by constant rate after.",
        ),
        (
            replace(FULL, stages=(FULL.stages[0], stage("participation", formula="age"))),
            "coefficients of participation",
            "The formula of participation is '.' before and 'age' after.",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_named_and_left_out(
    after: Audit, section: str, reason: str
) -> None:
    assert reason in not_compared(FULL, after)[section]
    page = compare_page(judged(FULL), judged(after))
    assert "What cannot be compared" in page
    if section == "balance":
        assert 'id="plot-love-0"' not in page
    if section == "metric":
        assert 'id="metric"' not in page
    if section.startswith("coefficients"):
        assert f"Coefficients of {section.rpartition(' ')[2]}</h3>" not in page


def test_answers_by_another_rule_or_without_a_check_are_not_set_against_each_other() -> None:
    plain, measured = judged(BIASED), judged(FULL)  # worth it by columns, and by the metric
    said = changes(plain, measured)
    assert not any("worth its variance" in line for line in said)
    assert "Metric: none before, loss, 20 rounds after." in said
    page = compare_page(plain, measured)
    assert "Not compared: answered by another rule before" in page
    unchecked = judged(replace(BIASED, stages=()))
    assert not any("Do the models" in line for line in changes(plain, unchecked))
    assert "not known in both" in compare_page(plain, unchecked)


def test_answers_that_changed_are_told() -> None:
    said = changes(judged(FAIR), judged(replace(BIASED, weights=(weights(),))))
    assert "Do the enrolled differ from the population? No before, Yes after." in said
