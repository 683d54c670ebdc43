"""What an audit's numbers say, in words, by rules that are stated beside every answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fedipw.audit.gaps import CHANCE, SMD, Gap, enrolled_weighted_gap, gap_of, gaps, weighted_gap
from fedipw.audit.modelcheck import ERRORS, OFF, model_faults
from fedipw.audit.parts import Audit, EmptyPart, Finding, Level, Verdict
from fedipw.audit.remarks import METRIC_UNUSED
from fedipw.evaluation.balance import PARTICIPANTS, PARTICIPANTS_WEIGHTED
from fedipw.numerics.checks import some
from fedipw.selection.stage import ENROLLMENT
from fedipw.weighting.registry import SourceKind, method_named

if TYPE_CHECKING:
    from fedipw.audit.parts import MetricPart, WeightPart

BELOW = 0.01  # share of the population with a small probability that is worth a warning
LEFT_EMPTY = 1e-4  # chance of a fair enrollment to leave a part empty, below which it is not chance
HEAVY = 0.25  # share of the total weight in 1% of the weights
DEFF = 5.0  # design effect that is worth a warning


def judged(audit: Audit) -> Audit:
    """Return an audit with its verdict."""
    return replace(audit, verdict=verdict(audit))


def verdict(audit: Audit) -> Verdict:
    """Return answers to the questions an audit is made for, and what to do next."""
    enrollment, participation = _enrollment(audit), _participation(audit)
    correction, worth, models = _correction(audit), _worth(audit), _models(audit)
    findings = tuple(
        f for f in (enrollment, participation, correction, worth, models) if f is not None
    )
    return Verdict(
        headline=_headline(enrollment, participation, correction, worth),
        findings=findings,
        next_steps=_next(audit),
    )


_BIAS_RULE = (
    f"Yes if a standardised mean difference exceeds {SMD:g} and what a fair sample of this size "
    f"would exceed with a chance of {CHANCE:.0%} over all columns together."
)


def _enrollment(audit: Audit) -> Finding:
    gap, question = gaps(audit)[0], "Do the enrolled differ from the population?"
    if gap is None:
        return Finding(question=question, answer="Unknown", level=Level.UNKNOWN,
                       text="No column is known of both.", rule=_BIAS_RULE)  # fmt: skip
    auc = next((s.auc for s in audit.stages if s.stage == ENROLLMENT), None)
    more = "" if auc is None else f" A model tells them apart with an AUC of {auc:.2f}."
    return _difference(question, gap, "the enrolled and the population", more)


def _participation(audit: Audit) -> Finding:
    gap, question = gaps(audit)[1], "Do those who reply differ from the enrolled?"
    if gap is None:
        why = "No column is known of both." if audit.sizes.replies else "Nobody replied."
        why = why if audit.sizes.rounds else "No round is known."
        return Finding(question=question, answer="Unknown", level=Level.UNKNOWN,
                       text=why, rule=_BIAS_RULE)  # fmt: skip
    aucs = [f"{s.stage} {s.auc:.2f}" for s in audit.stages
            if s.stage != ENROLLMENT and s.auc is not None]  # fmt: skip
    more = f" AUC of the fitted steps: {', '.join(aucs)}." if aucs else ""
    return _difference(question, gap, "those who reply and the enrolled", more)


def _difference(question: str, gap: Gap, who: str, more: str) -> Finding:
    chance = f"chance alone would explain {gap.chance:.2f}"
    if gap.biased:
        text = f"The largest difference between {who} is {gap.words} ({gap.name}; {chance})"
        text += f"; {len(gap.above)} column(s) differ: {some(gap.above)}." + more
        return Finding(
            question=question, answer="Yes", level=Level.WARN, text=text, rule=_BIAS_RULE
        )
    text = f"The largest difference between {who} is {gap.words} ({gap.name}; {chance}).{more}"
    return Finding(question=question, answer="No", level=Level.GOOD, text=text, rule=_BIAS_RULE)


def _correction(audit: Audit) -> Finding:
    question = "Can weights correct it?"
    rule = (
        f"Not fully if enrollment has no model, a part of the population has nobody enrolled that "
        f"a fair enrollment would leave empty with a chance below {LEFT_EMPTY:g}, or a weighted "
        f"difference stays above {SMD:g} and chance; with care if another part is empty, more than "
        f"{BELOW:.0%} of the population is below the probability threshold, 1% of the weights hold "
        f"more than {HEAVY:.0%} of their sum, the design effect exceeds {DEFF:g}, or weights are "
        "negative."
    )
    bad, care = _obstacles(audit), _cautions(audit)
    if bad:
        return Finding(question=question, answer="Not fully", level=Level.BAD,
                       text=" ".join([*bad, *care]), rule=rule)  # fmt: skip
    if not audit.weights:
        text = "No weight could be computed."
        return Finding(
            question=question, answer="Unknown", level=Level.UNKNOWN, text=text, rule=rule
        )
    left = weighted_gap(audit)
    done = "" if left is None else f"After weighting the largest difference is {left.size:.2f}. "
    if not audit.sizes.population_table:
        done += "As far as the given totals tell; what they leave out may still differ. "
    if care:
        return Finding(question=question, answer="With care", level=Level.WARN,
                       text=done + " ".join(care), rule=rule)  # fmt: skip
    text = f"{done}Every part looked at of {audit.settings.min_cell} clients or more has enrolled "
    text += "clients to stand for it."
    if not audit.sizes.population_table:
        text = done.strip()
    return Finding(question=question, answer="Yes", level=Level.GOOD, text=text, rule=rule)


def _without_model(audit: Audit) -> bool:
    """Return whether a population is known, and weights have no model of who of it enrolls."""
    if audit.overlap is None or audit.overlap.smallest_prob is not None:
        return False
    method = method_named(audit.settings.scheme)
    return not method.balanced and method.source is not SourceKind.COLLAPSED


def _empty(audit: Audit, *, by_chance: bool) -> list[EmptyPart]:
    """Return the parts with nobody enrolled that chance explains, or those it does not."""
    if audit.overlap is None:
        return []
    rate = audit.sizes.enrolled / (audit.sizes.population or math.inf)
    return [
        cell for cell in audit.overlap.empty
        if ((1.0 - rate) ** cell.population >= LEFT_EMPTY) == by_chance
    ]  # fmt: skip


def _named(cells: list[EmptyPart]) -> str:
    return some(f"{c.name} ({c.population:,} clients)" for c in cells)


def _obstacles(audit: Audit) -> list[str]:
    out, empty, gap = [], _empty(audit, by_chance=False), weighted_gap(audit)
    if empty:
        out.append(f"Nobody is enrolled in {_named(empty)}: no weight can stand for them.")
    if _without_model(audit):
        out.append("Enrollment has no model, so weights do not correct for it.")
    if gap is not None and gap.biased:
        out.append(f"After weighting {some(gap.above)} still differ(s), by up to {gap.words}.")
    return out


def _cautions(audit: Audit) -> list[str]:
    out, empty = [], _empty(audit, by_chance=True)
    if empty:
        out.append(f"Nobody is enrolled in {_named(empty)}, which may be chance.")
        if not _without_model(audit):
            out.append("For them weights rest on a model fitted elsewhere.")
    below = None if audit.overlap is None else audit.overlap.share_below
    if audit.overlap is not None and below is not None and below > BELOW:
        out.append(
            f"{below:.1%} of the population has an enrollment probability below "
            f"{audit.overlap.threshold:g}."
        )
    for part in audit.weights:
        if part.top_share > HEAVY:
            out.append(f"1% of the {_of(part)} weights hold {part.top_share:.0%} of their sum.")
        elif part.design_effect > DEFF:
            out.append(f"The {_of(part)} weights have a design effect of {part.design_effect:.1f}.")
        if part.negative:
            out.append(f"{part.negative} {_of(part)} weights are negative.")
    return out


def _of(part: WeightPart) -> str:
    return "reply" if part.name == "replies" else part.name


def _worth(audit: Audit) -> Finding:
    if audit.metric is not None and audit.metric.gain is not None:
        return _worth_measured(audit.metric)
    return _worth_expected(audit)


def _worth_measured(metric: MetricPart) -> Finding:
    question = "Is weighting worth its variance here?"
    rule = (
        "Yes if it moves the metric by more than two standard errors of the difference and the "
        "squared bias it removes exceeds the variance it adds (E32)."
    )
    assert metric.moved is not None
    assert metric.moved_error is not None
    assert metric.gain is not None
    moves = f"Weighting moves {metric.name} by {metric.moved:+.4g} (standard error "
    moves += f"{metric.moved_error:.2g})"
    if abs(metric.moved) <= 2.0 * metric.moved_error:
        text = f"{moves}: no more than chance. Weighting does not help this metric; it only adds "
        text += "variance. That it is fair to use the plain mean holds for this metric alone."
        return Finding(question=question, answer="No", level=Level.WARN, text=text, rule=rule)
    if metric.gain <= 0.0:
        text = f"{moves}, but the variance it adds outweighs the bias it removes: with these "
        text += "replies weighting hurts. More clients or calibrated weights would change that."
        return Finding(question=question, answer="No", level=Level.WARN, text=text, rule=rule)
    text = f"{moves}: the plain mean is off by more than weighting adds in variance."
    return Finding(question=question, answer="Yes", level=Level.GOOD, text=text, rule=rule)


def _worth_expected(audit: Audit) -> Finding:
    question = "Is weighting worth its variance here?"
    rule = (
        "With n clients that replied, design effect d, largest difference B before and B' after "
        "weighting, it pays for a metric whose correlation with the worst column exceeds "
        "sqrt(((d - 1) / n) / (B^2 - B'^2)); below 0.2 it probably does, from 1 on it cannot."
    )
    even = break_even(audit)
    if even is None:
        return Finding(question=question, answer="Unknown", level=Level.UNKNOWN,
                       text="There are no weights of replies to judge.", rule=rule)  # fmt: skip
    if not any(gap is not None and gap.biased for gap in gaps(audit)):
        text = "There is no difference beyond chance for weights to remove: weighting does not "
        text += "help on these columns and adds variance."
        return Finding(question=question, answer="No", level=Level.GOOD, text=text, rule=rule)
    if even >= 1.0:
        text = "Whatever the metric, the variance weights add outweighs the difference they remove."
        return Finding(question=question, answer="No", level=Level.WARN, text=text, rule=rule)
    text = f"It pays for a metric correlated by more than {even:.2f} with the worst column. Give "
    text += "the metric of your replies to see whether yours is."
    answer, level = ("Probably", Level.GOOD) if even < 0.2 else ("It depends", Level.WARN)
    return Finding(question=question, answer=answer, level=level, text=text, rule=rule)


def break_even(audit: Audit) -> float | None:
    r"""Return the correlation of a metric with the worst column at which weighting pays.

    .. math:: R^* = \sqrt{\frac{(d - 1)/n}{B^2 - B'^2}} \qquad (E33)

    infinite where weighting removes no difference; none without weights of replies.
    """
    part = next((w for w in audit.weights if w.name == "replies"), None)
    clients = audit.sizes.clients_replied
    if part is None or audit.balance is None or not clients:
        return None
    before = gap_of(audit.balance, PARTICIPANTS, math.inf)
    after = gap_of(audit.balance, PARTICIPANTS_WEIGHTED, math.inf)
    if before is None:
        return None
    removed = before.size**2 - (0.0 if after is None else after.size**2)
    if not removed > 0.0:
        return math.inf
    return math.sqrt(max(part.design_effect - 1.0, 0.0) / clients / removed)


def _models(audit: Audit) -> Finding | None:
    if not audit.stages:
        return None
    question = "Do the models of selection hold?"
    rule = (
        f"Yes if the selected are within {OFF:.0%} of what each model expects, overall and over "
        f"the last quarter of the rounds, and the estimated population size within {OFF:.0%}, or "
        f"within {ERRORS:g} standard errors where those are larger."
    )
    off = [*model_faults(audit).enrollment, *model_faults(audit).participation]
    if off:
        text = some(off)[0].upper() + some(off)[1:] + "."
        return Finding(question=question, answer="Not quite", level=Level.WARN, text=text,
                       rule=rule)  # fmt: skip
    worst = max(s.expected_error for s in audit.stages)
    text = f"Observed rates follow fitted probabilities; the mean gap is {worst:.3f} at most."
    return Finding(question=question, answer="Yes", level=Level.GOOD, text=text, rule=rule)


def _headline(enrollment: Finding, participation: Finding, correction: Finding, worth: Finding
) -> str:  # fmt: skip
    biased = [name for name, f in (("enrollment", enrollment), ("participation", participation))
              if f.answer == "Yes"]  # fmt: skip
    if not biased:
        return _unbiased(correction, worth, {enrollment.answer, participation.answer})
    start = f"{' and '.join(biased).capitalize()} {'are' if len(biased) > 1 else 'is'} biased"
    mend = {
        "Yes": "and weights can correct it",
        "With care": "and weights can correct it, with care",
        "Not fully": "and weights can correct it only in part",
    }.get(correction.answer, "and whether weights can correct it is unknown")
    if worth.answer == "No" and correction.answer == "Not fully":
        return f"{start}; weights correct it at most in part and do not help here."
    if worth.answer == "No":
        return f"{start}, but weighting does not help here."
    return f"{start}, {mend}."


def _unbiased(correction: Finding, worth: Finding, answers: set[str]) -> str:
    if worth.answer == "Yes":
        return "No column differs much, yet weighting moves the metric by more than it costs."
    if correction.answer == "Not fully":
        return "No column differs much, but weights cannot stand for the whole population."
    if "Unknown" in answers:
        return "No selection bias is seen in what is known; the rest is unknown."
    return "Those who train look like the population: weighting is not needed on these columns."


def _next(audit: Audit) -> tuple[str, ...]:
    out = [*_next_for_enrollment(audit)]
    if any(p.top_share > HEAVY or p.design_effect > DEFF for p in audit.weights):
        out.append(
            "Prefer Hájek or calibrated forms, which heavy weights disturb less; trim only where "
            "it is reported."
        )
    if model_faults(audit).participation:
        out.append("Refit on a rolling window (--window) or add history and clock (--history).")
    if not audit.sizes.population_table:
        out.append("A population table, or totals of more columns and of products, tells more.")
    if not audit.sizes.rounds:
        out.append("Keep a ledger of rounds: without it participation cannot be corrected.")
    if audit.metric is None and METRIC_UNUSED not in audit.unknown:
        out.append("Give the clients' metric (--metrics) to see how much selection matters for it.")
    elif _measured_in_vain(audit.metric):
        out.append("For this metric report the plain mean beside the weighted one.")
    out.append("Keep the JSON file and compare later: fedipw audit --compare BEFORE AFTER.")
    return tuple(out)


def _measured_in_vain(metric: MetricPart | None) -> bool:
    if metric is None or metric.gain is None:
        return False
    return _worth_measured(metric).answer == "No"


def _next_for_enrollment(audit: Audit) -> Iterator[str]:
    if audit.overlap is not None and audit.overlap.empty:
        yield (
            f"Enroll clients where there are none ({some(c.name for c in audit.overlap.empty)}), "
            "or say that the model is not for them."
        )
    left, enrolled = weighted_gap(audit), enrolled_weighted_gap(audit)
    still = left is not None and left.biased
    method = method_named(audit.settings.scheme)
    whole = method.uses_enrollment or method.balanced or method.source is SourceKind.COLLAPSED
    if _without_model(audit):
        yield (
            "Merge or leave out the columns that part the enrolled from the rest (--lump-below, "
            "--enrollment), so that enrollment has a model."
        )
    elif still and not whole:
        yield "Use a scheme that corrects for enrollment: fedipw, or a calibrated one with totals."
    elif (enrolled is not None and enrolled.biased) or model_faults(audit).enrollment:
        yield (
            "Add squares or products to the enrollment formula, or use calibrated weights "
            "(calibrated-entropy, efficient), which reproduce the population's means."
        )
    elif still:
        yield "Add squares or products to the participation formula, or history (--history)."
