"""What an audit's numbers say, in words, by rules that are stated beside every answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scipy.special import ndtri

from fedipw.audit.parts import Audit, Finding, Level, Verdict
from fedipw.data.population import ENROLLED
from fedipw.evaluation.balance import ENROLLED_WEIGHTED, PARTICIPANTS, PARTICIPANTS_WEIGHTED
from fedipw.numerics.checks import some
from fedipw.propensity.stage import ENROLLMENT

if TYPE_CHECKING:
    from fedipw.audit.parts import BalancePart, MetricPart, WeightPart

SMD = 0.1  # standardised difference commonly called unbalanced
CHANCE = 0.01  # of calling a fair sample biased, over all columns together
BELOW = 0.01  # share of the population with a small probability that is worth a warning
OFF = 0.1  # by which a model's totals may miss
HEAVY = 0.25  # share of the total weight in 1% of the weights
DEFF = 5.0  # design effect that is worth a warning


@dataclass(frozen=True, slots=True)
class _Gap:
    """The largest difference of a group, and whether chance explains it."""

    size: float
    name: str
    chance: float  # difference a fair sample would exceed with probability CHANCE
    above: tuple[str, ...]  # columns beyond both limits, the largest first

    @property
    def biased(self) -> bool:
        return bool(self.above)


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


def _gap(balance: BalancePart, group: str, units: float, against: str | None = None) -> _Gap:
    apart = {}
    for line in balance.lines:
        mine = line.groups[group].smd if group in line.groups else None
        other = 0.0 if against is None else line.groups[against].smd
        apart[line.name] = math.inf if mine is None or other is None else abs(mine - other)
    chance = float(-ndtri(CHANCE / (2 * max(len(apart), 1)))) * math.sqrt(1.0 / max(units, 1.0))
    ordered = sorted(apart, key=lambda name: -apart[name])
    first = ordered[0] if ordered else ""
    limit = max(SMD, chance)
    above = tuple(name for name in ordered if apart[name] > limit)
    return _Gap(apart.get(first, 0.0), first, chance, above)


def _gaps(audit: Audit) -> tuple[_Gap | None, _Gap | None]:
    """Return the gap of the enrolled to the population, and of participants to the enrolled."""
    balance, sizes = audit.balance, audit.sizes
    if balance is None:
        return None, None
    left = 1.0 if sizes.population is None else max(1.0 - sizes.enrolled / sizes.population, 1e-9)
    first = _gap(balance, ENROLLED, sizes.enrolled / left) if ENROLLED in balance.groups else None
    second = None
    if PARTICIPANTS in balance.groups:
        second = _gap(balance, PARTICIPANTS, sizes.clients_replied, against=ENROLLED)
    return first, second


_BIAS_RULE = (
    f"Yes if a standardised mean difference exceeds {SMD:g} and what a fair sample of this size "
    f"would exceed with a chance of {CHANCE:.0%} over all columns together."
)


def _enrollment(audit: Audit) -> Finding:
    gap, question = _gaps(audit)[0], "Do the enrolled differ from the population?"
    if gap is None:
        return Finding(question=question, answer="Unknown", level=Level.UNKNOWN,
                       text="No column is known of both.", rule=_BIAS_RULE)  # fmt: skip
    auc = next((s.auc for s in audit.stages if s.stage == ENROLLMENT), None)
    more = "" if auc is None else f" A model tells them apart with an AUC of {auc:.2f}."
    return _difference(question, gap, "the enrolled and the population", more)


def _participation(audit: Audit) -> Finding:
    gap, question = _gaps(audit)[1], "Do those who reply differ from the enrolled?"
    if gap is None:
        why = "no round is known" if not audit.sizes.rounds else "no column is known of both"
        return Finding(question=question, answer="Unknown", level=Level.UNKNOWN,
                       text=f"{why.capitalize()}.", rule=_BIAS_RULE)  # fmt: skip
    aucs = [f"{s.stage} {s.auc:.2f}" for s in audit.stages
            if s.stage != ENROLLMENT and s.auc is not None]  # fmt: skip
    more = f" AUC of the fitted steps: {', '.join(aucs)}." if aucs else ""
    return _difference(question, gap, "those who reply and the enrolled", more)


def _difference(question: str, gap: _Gap, who: str, more: str) -> Finding:
    size = "without limit" if math.isinf(gap.size) else f"{gap.size:.2f} standard deviations"
    chance = f"chance alone would explain {gap.chance:.2f}"
    if gap.biased:
        text = f"The largest difference between {who} is {size} ({gap.name}; {chance})"
        text += f"; {len(gap.above)} column(s) differ: {some(gap.above)}." + more
        return Finding(
            question=question, answer="Yes", level=Level.WARN, text=text, rule=_BIAS_RULE
        )
    text = f"The largest difference between {who} is {size} ({gap.name}; {chance}).{more}"
    return Finding(question=question, answer="No", level=Level.GOOD, text=text, rule=_BIAS_RULE)


def _correction(audit: Audit) -> Finding:
    question = "Can weights correct it?"
    rule = (
        f"Not fully if part of the population has nobody enrolled, or a weighted difference stays "
        f"above {SMD:g}; with care if more than {BELOW:.0%} of the population is below the "
        f"probability threshold, 1% of the weights hold more than {HEAVY:.0%} of their sum, or the "
        f"design effect exceeds {DEFF:g}."
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
    left = _after(audit)
    done = "" if left is None else f"After weighting the largest difference is {left:.2f}. "
    if not audit.sizes.population_table:
        done += "As far as the given totals tell; what they leave out may still differ. "
    if care:
        return Finding(question=question, answer="With care", level=Level.WARN,
                       text=done + " ".join(care), rule=rule)  # fmt: skip
    text = done + "Every part of the population looked at has enrolled clients to stand for it."
    if not audit.sizes.population_table:
        text = done.strip()
    return Finding(question=question, answer="Yes", level=Level.GOOD, text=text, rule=rule)


def _weighted_group(audit: Audit) -> str | None:
    groups = () if audit.balance is None else audit.balance.groups
    wanted = (PARTICIPANTS_WEIGHTED, ENROLLED_WEIGHTED)
    return next((name for name in wanted if name in groups), None)


def _after(audit: Audit) -> float | None:
    group = _weighted_group(audit)
    if group is None or audit.balance is None:
        return None
    return _gap(audit.balance, group, math.inf).size


def _obstacles(audit: Audit) -> list[str]:
    out = []
    if audit.overlap is not None and audit.overlap.empty:
        cells = [f"{c.name} ({c.population:,} clients)" for c in audit.overlap.empty]
        out.append(f"Nobody is enrolled in {some(cells)}: no weight can stand for them.")
    group = _weighted_group(audit)
    if group is not None and audit.balance is not None:
        units = audit.sizes.clients_replied or audit.sizes.enrolled
        found = [w for w in audit.weights if w.name == "replies"] or list(audit.weights)
        spread = found[0].design_effect if found else 1.0
        gap = _gap(audit.balance, group, units / spread)
        if gap.biased:
            out.append(
                f"After weighting {some(gap.above)} still differ(s), by up to {gap.size:.2f} "
                "standard deviations."
            )
    return out


def _cautions(audit: Audit) -> list[str]:
    out = []
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
        "sqrt(((d - 1) / n) / (B^2 - B'^2)); below 0.2 the answer is yes, above 1 no."
    )
    even = break_even(audit)
    if even is None:
        return Finding(question=question, answer="Unknown", level=Level.UNKNOWN,
                       text="There are no weights of replies to judge.", rule=rule)  # fmt: skip
    first, second = _gaps(audit)
    if not any(gap is not None and gap.biased for gap in (first, second)):
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
    balance, clients = audit.balance, audit.sizes.clients_replied
    if part is None or balance is None or not clients or PARTICIPANTS not in balance.groups:
        return None
    before = _gap(balance, PARTICIPANTS, math.inf).size
    after = _after(audit) if PARTICIPANTS_WEIGHTED in balance.groups else None
    removed = before**2 - (0.0 if after is None else after**2)
    if not removed > 0.0:
        return math.inf
    return math.sqrt(max(part.design_effect - 1.0, 0.0) / clients / removed)


def _models(audit: Audit) -> Finding | None:
    if not audit.stages:
        return None
    question = "Do the models of selection hold?"
    rule = (
        f"Yes if the selected are within {OFF:.0%} of what each model expects, overall and over "
        f"the last quarter of the rounds, and the estimated population size within {OFF:.0%}."
    )
    off = [
        f"{stage.stage} expects {1.0 / ratio:.2f} times those selected"
        for stage in audit.stages
        if (ratio := stage.calibration_ratio) and abs(ratio - 1.0) > OFF
    ]
    ratios = [r.calibration_ratio for r in audit.rounds if r.calibration_ratio is not None]
    late = ratios[-max(1, len(ratios) // 4) :]
    if late and abs(sum(late) / len(late) - 1.0) > OFF:
        off.append(f"in the last rounds {sum(late) / len(late):.2f} replies came for each expected")
    reach = audit.overlap
    if reach is not None and reach.estimated_size is not None and audit.sizes.population:
        ratio = reach.estimated_size / audit.sizes.population
        if abs(ratio - 1.0) > OFF:
            off.append(f"weights of the enrolled sum to {ratio:.2f} times the population")
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
        unknown = [f for f in (enrollment, participation) if f.answer == "Unknown"]
        if unknown:
            return "No selection bias is seen in what is known; the rest is unknown."
        return "Those who train look like the population: weighting is not needed on these columns."
    start = f"{' and '.join(biased).capitalize()} {'are' if len(biased) > 1 else 'is'} biased"
    mend = {
        "Yes": "and weights can correct it",
        "With care": "and weights can correct it, with care",
        "Not fully": "and weights can correct it only in part",
    }.get(correction.answer, "and whether weights can correct it is unknown")
    if worth.answer == "No":
        return f"{start}, but weighting does not help here."
    return f"{start}, {mend}."


def _next(audit: Audit) -> tuple[str, ...]:
    out = []
    if audit.overlap is not None and audit.overlap.empty:
        out.append(
            f"Enroll clients where there are none ({some(c.name for c in audit.overlap.empty)}), "
            "or say that the model is not for them."
        )
    if any("still differ" in line for line in _obstacles(audit)):
        out.append(
            "Add squares or products to the enrollment formula, or use calibrated weights "
            "(calibrated-entropy, efficient), which reproduce the population's means."
        )
    if any(p.top_share > HEAVY or p.design_effect > DEFF for p in audit.weights):
        out.append(
            "Prefer Hájek or calibrated forms, which heavy weights disturb less; trim only where "
            "it is reported."
        )
    models = _models(audit)
    if models is not None and models.answer != "Yes":
        out.append("Refit on a rolling window (--window) or add history and clock (--history).")
    if not audit.sizes.population_table:
        out.append("A population table, or totals of more columns and of products, tells more.")
    if not audit.sizes.rounds:
        out.append("Keep a ledger of rounds: without it participation cannot be corrected.")
    if audit.metric is None:
        out.append("Give the clients' metric (--metrics) to see how much selection matters for it.")
    elif audit.metric.gain is not None and _worth_measured(audit.metric).answer == "No":
        out.append("For this metric report the plain mean beside the weighted one.")
    out.append("Keep the JSON file and compare later: fedipw audit --compare BEFORE AFTER.")
    return tuple(out)
