"""Every rule of the verdict at its limit, just below it and just above it."""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest

from fedipw.audit.values import Audit, FitKind, Level
from fedipw.audit.verdict import break_even, verdict
from fedipw.evaluation.balance import BalanceCell
from fedipw.evaluation.dependence import Dependence

from .handmade import (
    BIASED,
    CORRECTION,
    ENROLLMENT,
    FAIR,
    MODELS,
    PARTICIPATION,
    TOTALS,
    WORTH,
    answer,
    balance,
    empty,
    line,
    metric,
    reach,
    rounds,
    silent,
    sized,
    stage,
    weights,
)

ABOVE = math.nextafter(0.1, 1.0)


def chance(columns: int, units: float) -> float:
    """Return the limit by hand: 1% two-sided, shared by the columns."""
    return NormalDist().inv_cdf(1.0 - 0.01 / (2 * columns)) / math.sqrt(units)


def one_column(*smds: float | None, **sizes: Any) -> Audit:
    return sized(replace(FAIR, balance=balance({"age": smds})), **sizes)


@pytest.mark.parametrize(
    ("smd", "said"), [(0.1, "No"), (-0.1, "No"), (ABOVE, "Yes"), (-0.2, "Yes")]
)
def test_enrollment_is_biased_above_a_tenth_of_a_standard_deviation(smd: float, said: str) -> None:
    found = answer(one_column(smd, 0.0, 0.0, 0.0), ENROLLMENT)
    assert found.answer == said
    assert found.level is (Level.WARN if said == "Yes" else Level.GOOD)
    assert f"{abs(smd):.2f} standard deviations (age; chance alone would explain" in found.text
    assert "AUC of 0.70" in found.text


@pytest.mark.parametrize("columns", [1, 7])
@pytest.mark.parametrize(("enrolled", "population"), [(100, 10_000.0), (100, 125.0), (100, None)])
def test_few_enrolled_need_more_than_chance_gives_all_columns_together(
    columns: int, enrolled: int, population: float | None
) -> None:
    left = 1.0 if population is None else 1.0 - enrolled / population
    limit = max(chance(columns, enrolled / left), 0.1)
    for factor, said in ((1.0 - 1e-9, "No"), (1.0 + 1e-9, "Yes")):
        names = {f"c{k}": (0.0, 0.0, 0.0, 0.0) for k in range(columns - 1)}
        part = balance({**names, "worst": (limit * factor, 0.0, 0.0, 0.0)})
        audit = sized(replace(FAIR, balance=part), enrolled=enrolled, population=population)
        assert answer(audit, ENROLLMENT).answer == said


def test_columns_beyond_both_limits_are_named_the_largest_first() -> None:
    part = balance({"a": (0.2, 0.0), "b": (-0.9, 0.0), "c": (0.1, 0.0)})
    assert "2 column(s) differ: b, a." in answer(replace(FAIR, balance=part), ENROLLMENT).text


def test_a_column_that_does_not_vary_and_differs_is_beyond_any_limit() -> None:
    found = answer(one_column(None, 0.0, 0.0, 0.0, enrolled=2), ENROLLMENT)
    assert found.answer == "Yes"
    assert "without limit (age" in found.text
    left = answer(one_column(0.0, 0.0, 0.0, None), CORRECTION)
    assert left.answer == "Not fully"
    assert "age still differ(s), by up to without limit." in left.text


def test_those_who_reply_are_held_against_the_enrolled_not_the_population() -> None:
    limit = max(chance(1, 1_500), 0.1)
    for apart, said in ((limit - 1e-9, "No"), (limit + 1e-9, "Yes")):
        found = answer(one_column(0.5, 0.5 - apart, 0.0, 0.0), PARTICIPATION)
        assert found.answer == said
        assert "AUC of the fitted steps: participation 0.70." in found.text
    few = chance(1, 50)
    for apart, said in ((few - 1e-9, "No"), (few + 1e-9, "Yes")):
        audit = one_column(0.0, apart, 0.0, 0.0, clients_replied=50)
        assert answer(audit, PARTICIPATION).answer == said


def test_all_enrolled_alike_in_a_column_cannot_be_told_apart_by_replying() -> None:
    same = one_column(None, None, 0.0, 0.0)  # both lie at 5, and the scale is 0
    assert answer(same, ENROLLMENT).answer == "Yes"
    assert answer(same, PARTICIPATION).answer == "No"
    cells = {**line("age", (None, None)).groups, "respondents": BalanceCell(mean=6.0, smd=None)}
    part = replace(balance({"age": (None, None)}), lines=(replace(line("age", ()), groups=cells),))
    assert answer(replace(FAIR, balance=part), PARTICIPATION).answer == "Yes"


@pytest.mark.parametrize("part", [None, balance({})])
def test_without_columns_nothing_is_known_of_bias(part: Any) -> None:
    audit = replace(FAIR, balance=part)
    for question in (ENROLLMENT, PARTICIPATION):
        assert answer(audit, question).answer == "Unknown"
        assert "No column is known of both." in answer(audit, question).text
    assert "seen in what is known" in verdict(audit).headline


def test_without_rounds_or_replies_participation_is_unknown_and_says_why() -> None:
    part = balance({"age": (0.5,), "income": (0.0,)})
    silent = sized(replace(FAIR, balance=part), replies=0, clients_replied=0)
    assert answer(silent, PARTICIPATION).text == "Nobody replied."
    unknown = answer(sized(silent, rounds=0), PARTICIPATION)
    assert (unknown.answer, unknown.level) == ("Unknown", Level.UNKNOWN)
    assert unknown.text == "No round is known."
    assert answer(sized(silent, rounds=0), ENROLLMENT).answer == "Yes"


# Whether weights correct it.


def test_weights_that_leave_no_difference_and_no_part_out_correct_it() -> None:
    found = answer(BIASED, CORRECTION)
    assert (found.answer, found.level) == ("Yes", Level.GOOD)
    assert found.text.startswith("After weighting the largest difference is 0.02. ")
    assert "Every subgroup looked at of 10 clients or more has enrolled" in found.text


@pytest.mark.parametrize(("population", "said"), [(41, "With care"), (42, "Not fully")])
def test_an_empty_part_counts_where_a_fair_enrollment_would_hardly_leave_it_empty(
    population: int, said: str
) -> None:
    assert ((1 - 0.2) ** population >= 1e-4) == (said == "With care")  # a fifth is enrolled
    audit = replace(BIASED, overlap=reach(empty=(empty("os = web", population),)))
    found = answer(audit, CORRECTION)
    assert found.answer == said
    assert f"Nobody is enrolled in os = web ({population} clients)" in found.text
    assert ("may be chance" in found.text) == (said == "With care")
    assert ("no weight can stand for them" in found.text) == (said == "Not fully")


def test_enrollment_without_a_model_is_not_corrected_unless_weights_are_balanced() -> None:
    audit = replace(BIASED, overlap=reach(smallest_prob=None, share_below=None))
    assert "Enrollment has no model" in answer(audit, CORRECTION).text
    assert answer(audit, CORRECTION).answer == "Not fully"
    for scheme, said in (
        ("greg", "Yes"),
        ("collapsed", "Yes"),
        ("participation-only", "Not fully"),
    ):
        settings = replace(audit.settings, scheme=scheme)
        assert answer(replace(audit, settings=settings), CORRECTION).answer == said


@pytest.mark.parametrize("effect", [1.0, 4.0, 40.0])
def test_a_difference_that_stays_is_judged_by_the_effective_number_of_clients(
    effect: float,
) -> None:
    limit = max(chance(1, 1_500 / effect), 0.1)
    for factor, said in ((1.0 - 1e-9, {"Yes", "With care"}), (1.0 + 1e-9, {"Not fully"})):
        audit = one_column(0.5, 0.5, 0.0, -limit * factor)
        audit = replace(audit, weights=(weights("enrollment"), weights(design_effect=effect)))
        assert answer(audit, CORRECTION).answer in said


def test_without_replies_the_weighted_enrolled_are_judged() -> None:
    for smd, said in ((0.1, "Yes"), (0.2, "Not fully")):
        part = balance({"age": (0.5,)})
        cells = {"enrolled": part.lines[0].groups["enrolled"]}
        cells["enrolled weighted"] = BalanceCell(mean=smd, smd=smd)
        lines = (replace(part.lines[0], groups=cells),)
        part = replace(part, groups=("enrolled", "enrolled weighted"), lines=lines)
        audit = sized(replace(FAIR, balance=part), rounds=0, replies=0, clients_replied=0)
        audit = replace(audit, weights=(weights("enrollment"),))
        assert answer(audit, CORRECTION).answer == said


@pytest.mark.parametrize(
    ("changes", "limit", "words"),
    [
        (lambda x: {"overlap": reach(share_below=x)}, 0.01, "enrollment probability below 0.01"),
        (lambda x: {"weights": (weights(top_share=x),)}, 0.25, "1% of the reply weights hold 25%"),
        (lambda x: {"weights": (weights(design_effect=x),)}, 5.0, "design effect of 5.0"),
        (lambda x: {"weights": (weights("enrollment", top_share=x),)}, 0.25, "enrollment weights"),
        (lambda x: {"weights": (weights(negative=int(x > 0)),)}, 0.0, "1 reply weights are negat"),
    ],
)
def test_care_is_asked_for_above_a_limit_and_not_at_it(
    changes: Any, limit: float, words: str
) -> None:
    assert answer(replace(BIASED, **changes(limit)), CORRECTION).answer == "Yes"
    found = answer(replace(BIASED, **changes(math.nextafter(limit, 9.0))), CORRECTION)
    assert (found.answer, found.level) == ("With care", Level.WARN)
    assert words in found.text
    assert found.text.startswith("After weighting the largest difference is 0.02. ")


def test_without_weights_correction_is_unknown() -> None:
    part = balance({"age": (0.5, 0.5)})
    found = answer(replace(FAIR, weights=(), balance=part), CORRECTION)
    assert (found.answer, found.level) == ("Unknown", Level.UNKNOWN)


def test_totals_alone_promise_no_more_than_totals_tell() -> None:
    audit = sized(replace(BIASED, overlap=None), **TOTALS)
    found = answer(audit, CORRECTION)
    assert found.answer == "Yes"
    assert "As far as the given totals show" in found.text
    assert "Every subgroup" not in found.text


# Whether it is worth it.


@pytest.mark.parametrize(
    ("moved", "gain", "said", "words"),
    [
        (0.2, 1.0, "No", "does not help"),
        (-0.2, 1.0, "No", "does not help"),
        (math.nextafter(0.2, 1.0), 1e-9, "Yes", "off by more than weighting adds"),
        (-0.3, 1e-9, "Yes", "off by more than weighting adds"),
        (0.3, 0.0, "No", "weighting hurts"),
        (-0.3, -1e-9, "No", "weighting hurts"),
    ],
)
def test_a_metric_must_move_by_more_than_chance_and_pay_for_its_variance(
    moved: float, gain: float, said: str, words: str
) -> None:
    audit = replace(BIASED, metric=metric(moved, 0.1, gain))
    found = answer(audit, WORTH)
    assert found.answer == said
    assert words in found.text
    assert f"loss by {moved:+.4g} (standard error 0.1)" in found.text
    helps = "and weights can correct it." if said == "Yes" else "but weighting does not help here."
    assert verdict(audit).headline == f"Enrollment and participation are biased, {helps}"
    step = "For this metric report the plain mean beside the weighted one."
    assert (step in verdict(audit).next_steps) == (said == "No")


def test_a_metric_of_unknown_gain_leaves_the_question_to_the_columns() -> None:
    audit = replace(BIASED, metric=metric(0.1, 0.1, None))
    assert answer(audit, WORTH) == answer(BIASED, WORTH)


@pytest.mark.parametrize("after", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("effect", [1.25, 3.0])
def test_break_even_is_its_closed_form(after: float, effect: float) -> None:
    part = balance({"age": (0.5, -0.7, 0.0, after), "income": (0.0, 0.6, 0.0, 0.0)})
    audit = replace(FAIR, balance=part, weights=(weights(design_effect=effect),))
    wanted = math.sqrt((effect - 1.0) / 1_500 / (0.7**2 - after**2))
    assert break_even(audit) == pytest.approx(wanted, rel=1e-12)


def test_break_even_has_its_ends() -> None:
    assert break_even(replace(BIASED, weights=(weights("enrollment"),))) is None
    assert break_even(replace(BIASED, balance=None)) is None
    assert break_even(sized(BIASED, clients_replied=0)) is None
    assert break_even(replace(BIASED, weights=(weights(design_effect=1.0),))) == 0.0
    for smds in ((0.5, 0.5, 0.0, 0.5), (0.5, None, 0.0, None), (0.5, 0.1, 0.0, -0.2)):
        assert break_even(one_column(*smds)) == math.inf
    assert break_even(one_column(0.5, None, 0.0, 0.1)) == 0.0


@pytest.mark.parametrize(
    ("even", "said"),
    [(0.199, "Probably"), (0.201, "It depends"), (0.999, "It depends"), (1.001, "No")],
)
def test_without_a_metric_the_answer_follows_the_break_even_correlation(
    even: float, said: str
) -> None:
    effect = 1.0 + 1_500 * (0.7**2 - 0.02**2) * even**2
    audit = replace(BIASED, weights=(weights(design_effect=effect),))
    assert break_even(audit) == pytest.approx(even)
    found = answer(audit, WORTH)
    assert found.answer == said
    if said != "No":
        assert f"correlated by more than {even:.2f} with the worst column" in found.text


def test_without_bias_weighting_is_not_worth_its_variance() -> None:
    found = answer(FAIR, WORTH)
    assert (found.answer, found.level) == ("No", Level.GOOD)
    assert "no difference beyond chance" in found.text
    assert answer(replace(FAIR, weights=()), WORTH).answer == "Unknown"


# Whether the models hold.


def off(audit: Audit) -> str | None:
    found = answer(audit, MODELS)
    assert (found.answer, found.level) in {("Yes", Level.GOOD), ("Not quite", Level.WARN)}
    return None if found.answer == "Yes" else found.text


@pytest.mark.parametrize("name", ["enrollment", "participation"])
def test_a_model_is_off_by_more_than_a_tenth_and_three_standard_errors(name: str) -> None:
    def with_ratio(ratio: float | None, rows: int = 10_000) -> str | None:
        curve = replace(stage(name).reliability[0], count=rows)
        part = stage(name, calibration_ratio=ratio, reliability=(curve,))
        other = "participation" if name == "enrollment" else "enrollment"
        return off(replace(FAIR, stages=(part, stage(other))))

    assert with_ratio(None) is with_ratio(1.0999) is with_ratio(0.9001) is None
    assert with_ratio(0.5) == f"{name.capitalize()} expects 2.00 times those selected."
    assert with_ratio(1.2) is not None
    assert with_ratio(1.2, rows=1_000) is None  # 200 expected: three errors are 0.212
    assert with_ratio(1.22, rows=1_000) is not None
    assert with_ratio(0.0) == f"{name.capitalize()} expects 2000 and none were selected."


def test_the_last_quarter_of_the_rounds_is_looked_at_by_itself() -> None:
    steady = [1.0] * 15
    for ratio, fine in ((1.099, True), (0.901, True), (0.89, False), (1.2, False)):
        found = off(replace(FAIR, rounds=rounds(*steady, *[ratio] * 5)))
        assert (found is None) == fine
    assert found == "In the last rounds 1.20 replies came for each expected."
    assert off(replace(FAIR, rounds=rounds(*[1.5] * 15, *[1.0] * 5))) is None
    assert off(replace(FAIR, rounds=rounds(*steady, *[1.2] * 5, enrolled=200.0))) is None  # 200
    assert off(replace(FAIR, rounds=rounds(*steady, *[1.22] * 5, enrolled=200.0))) is not None
    assert off(replace(FAIR, rounds=rounds(None, None))) is None
    merged = replace(rounds(1.2, enrolled=200.0)[0], last=10)  # ten rounds in one line
    assert off(replace(FAIR, rounds=(merged,))) is not None


def test_weights_of_the_enrolled_must_sum_to_the_clients_with_all_their_values() -> None:
    for size, ratio in ((11_100.0, 1.11), (8_900.0, 0.89)):
        found = off(replace(FAIR, overlap=reach(estimated_size=size)))
        assert found == f"Weights of the enrolled sum to {ratio} times the population."
    for size in (10_999.0, 9_001.0):
        assert off(replace(FAIR, overlap=reach(estimated_size=size))) is None
    few = reach(estimated_size=11_900.0, effective_sample_size=225.0)  # three errors are 0.2
    assert off(replace(FAIR, overlap=few)) is None
    dropped = (stage("enrollment", left_out=3_000), stage("participation"))
    assert off(replace(FAIR, stages=dropped, overlap=reach(estimated_size=7_000.0))) is None
    assert off(replace(FAIR, stages=dropped)) is not None


# A tick means that a check was made.


def test_a_tick_is_given_where_both_stages_have_a_model_that_was_checked() -> None:
    found = answer(FAIR, MODELS)
    assert (found.answer, found.level) == ("Yes", Level.GOOD)
    assert found.text == (
        "Observed rates of enrollment and participation follow fitted probabilities; the mean gap "
        "is 0.010 at most."
    )


RATE = stage("participation", kind=FitKind.RATE, rate_rounds=20)


@pytest.mark.parametrize(
    ("audit", "answered", "words"),
    [
        (replace(FAIR, stages=()), "Not checked", "Enrollment has no model to check."),
        (replace(FAIR, stages=(RATE,)), "Not checked", "Participation was given a constant rate"),
        (replace(FAIR, stages=(stage("enrollment"), RATE)), "In part", "not a model"),
        (replace(FAIR, stages=(stage("participation"),)), "In part", "Enrollment has no model"),
        (
            sized(replace(FAIR, stages=(stage("participation"),)), **TOTALS),
            "In part", "only totals of the population are known",
        ),
        (
            sized(replace(FAIR, stages=(stage("enrollment"),)), rounds=0), "In part",
            "Participation was not checked: no ledger of rounds was given.",
        ),
        (
            replace(FAIR, stages=(stage("enrollment"),)), "In part",
            "Participation was not checked: no round was given a probability before it closed.",
        ),
        (
            replace(FAIR, stages=(stage("enrollment"), stage("participation", rate_rounds=10))),
            "In part", "Participation was given a constant rate, not a model, in 10 of 20 rounds.",
        ),
    ],
)  # fmt: skip
def test_no_tick_where_something_was_not_checked(audit: Audit, answered: str, words: str) -> None:
    found = answer(audit, MODELS)
    assert (found.answer, found.level) == (answered, Level.UNKNOWN)
    assert words in found.text
    if answered == "Not checked":
        assert "follow fitted probabilities" not in found.text


def test_a_constant_rate_in_fewer_than_half_of_the_rounds_leaves_the_tick() -> None:
    audit = replace(FAIR, stages=(stage("enrollment"), stage("participation", rate_rounds=9)))
    assert answer(audit, MODELS).answer == "Yes"


NOTE = "enrollment by a fit with a penalty of 1: os separate(s) selected from non-selected clients"


@pytest.mark.parametrize("soft", [True, False])
def test_a_model_that_separates_has_no_tick_and_says_what_weights_do(soft: bool) -> None:
    stages = (stage("enrollment", kind=FitKind.PENALISED, note=NOTE), stage("participation"))
    audit = replace(BIASED, stages=stages, settings=replace(BIASED.settings, soft=soft))
    found = answer(audit, MODELS)
    assert (found.answer, found.level) == ("Not quite", Level.WARN)
    assert "Enrollment by a fit with a penalty of 1: os separate(s)" in found.text
    refused = "Without --soft, fedipw weights and fedipw evaluate end in an error here."
    assert (refused in found.text) == (not soft)
    correction = answer(audit, CORRECTION)
    assert (correction.answer, correction.level) == ("Not fully", Level.BAD)
    assert "The model of enrollment has no maximum without a penalty" in correction.text
    only = replace(audit, settings=replace(audit.settings, scheme="participation-only"))
    assert refused not in answer(only, MODELS).text  # it needs no model of enrollment


# Groups that never reply.


@pytest.mark.parametrize(("clients", "said"), [(6, "With care"), (7, "Not fully")])
def test_a_group_that_never_replies_is_what_weights_cannot_correct(clients: int, said: str) -> None:
    assert ((1 - 0.75) ** clients >= 1e-4) == (said == "With care")  # three in four replied
    audit = replace(BIASED, silent=(silent("os = web", clients),))
    found = answer(audit, CORRECTION)
    assert found.answer == said
    assert f"Nobody ever replied of os = web ({clients} enrolled clients)" in found.text
    assert ("which may be chance" in found.text) == (said == "With care")
    assert ("no weight can stand for them" in found.text) == (said == "Not fully")
    (line,) = verdict(audit).uncorrected
    assert line.startswith(f"os = web: none of {clients} enrolled clients ({20 * clients} rows)")
    assert line.endswith("No reply can be weighted to stand for them.")
    assert ("which may be chance" in line) == (said == "With care")
    assert any(step.startswith("Invite or recruit") for step in verdict(audit).next_steps)


def test_what_is_left_out_for_missing_values_is_not_corrected() -> None:
    (line,) = verdict(sized(BIASED, population_known=9_000.0)).uncorrected
    assert line.startswith("1,000 clients with a missing value or an unknown level")
    assert verdict(BIASED).uncorrected == ()


@pytest.mark.parametrize(
    ("dependence", "answered"),
    [
        (Dependence(odds_ratio=2.0, low=1.8, high=2.2, errors=14.0, clients=900), "Yes"),
        (Dependence(odds_ratio=0.5, low=0.4, high=0.6, errors=-9.0, clients=900), "Yes"),
        (Dependence(odds_ratio=1.2, low=1.1, high=1.3, errors=5.0, clients=900), "No"),
        (Dependence(odds_ratio=2.0, low=0.9, high=4.4, errors=1.8, clients=40), "No"),
    ],
)
def test_replies_that_depend_on_the_metric_are_not_corrected(
    dependence: Dependence, answered: str
) -> None:
    part = replace(metric(-0.05, 0.01, 0.002), dependence=dependence)
    audit = replace(BIASED, metric=part)
    found = answer(audit, "Do replies depend")
    assert found.answer == answered
    assert found.level == ("bad" if answered == "Yes" else "good")
    correction = answer(audit, "Can weights correct it")
    assert (correction.answer == "Not fully") == (answered == "Yes")
    steps = " ".join(verdict(audit).next_steps)
    assert ("report bounds of both" in steps) == (answered == "Yes")
    for one in (audit, replace(FAIR, metric=part)):  # whatever else is said
        warned = verdict(one).headline.endswith("on the metric itself, which no weight corrects.")
        assert warned == (answered == "Yes")


def test_without_a_metric_of_several_rounds_nothing_is_said_of_dependence() -> None:
    for audit in (BIASED, replace(BIASED, metric=metric(-0.05, 0.01, 0.002))):
        questions = [one.question for one in verdict(audit).findings]
        assert not any(one.startswith("Do replies depend") for one in questions)
