"""What an audit's numbers say, in words, by rules that are stated beside every answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from scipy.special import ndtri

from fedipw.audit.card import audit_card
from fedipw.audit.training import RELIED, UNRELIED, Means, advice, mean_reliance
from fedipw.audit.values import (
    Audit,
    Finding,
    Level,
    MetricPart,
    PopulationSource,
    SilentGroup,
    StagePart,
    Verdict,
    WeightPart,
)
from fedipw.evaluation.balance import (
    ENROLLED_WEIGHTED,
    RESPONDENTS,
    RESPONDENTS_WEIGHTED,
    BalanceLine,
    BalanceTable,
)
from fedipw.evaluation.dependence import ERRORS as BEYOND
from fedipw.evaluation.dependence import ODDS_RATIO
from fedipw.numerics.checks import some
from fedipw.selection.overlap import Cell
from fedipw.selection.saved import ENROLLMENT
from fedipw.tables.columns import ENROLLED
from fedipw.weighting.methods import method_named
from fedipw.weighting.pipeline import Probabilities

SMD = 0.1  # standardised difference commonly called unbalanced
CHANCE = 0.01  # of calling a fair sample biased, over all columns together
OFF = 0.1  # by which a model's totals may miss
ERRORS = 3.0  # standard errors they may miss by chance
BELOW = 0.01  # share of the population with a small probability that is worth a warning
LEFT_EMPTY = 1e-4  # chance of a fair enrollment to leave a cell empty, below which it is not chance
HEAVY = 0.25  # share of the total weight in 1% of the weights
DEFF = 5.0  # design effect that is worth a warning
MOST_NAMED = 10  # groups that weights cannot correct, in the summary


@dataclass(frozen=True, slots=True)
class Question:
    """What an audit is asked, and the rule by which it answers."""

    question: str
    rule: str

    def answered(self, answer: str, level: Level, text: str) -> Finding:
        """Return an answer with its rule."""
        return Finding(
            question=self.question, answer=answer, level=level, text=text, rule=self.rule
        )


_BIAS_RULE: Final = (
    f"Yes if a standardised mean difference exceeds {SMD:g} and what a fair sample of this size "
    f"would exceed with a chance of {CHANCE:.0%} over all columns together."
)
ENROLLMENT_BIAS: Final = Question("Do the enrolled differ from the population?", _BIAS_RULE)
REPLY_BIAS: Final = Question("Do respondents differ from the enrolled?", _BIAS_RULE)
CORRECTION: Final = Question(
    "Can weights correct it?",
    f"Not fully if enrollment has no model, a model has no maximum without a penalty, a subgroup "
    "has nobody enrolled, or nobody who ever replied, that a fair selection of clients would leave "
    f"empty with a chance below {LEFT_EMPTY:g}, a weighted difference stays above {SMD:g} and "
    "chance, or replies depend on the metric itself; with care if another subgroup is empty or "
    "silent, more than "
    f"{BELOW:.0%} of the population is below the probability threshold, 1% of the weights hold "
    f"more than {HEAVY:.0%} of their sum, the design effect exceeds {DEFF:g}, or weights are "
    "negative.",
)
_WORTH: Final = "Is weighting worth its variance here?"
WORTH_MEASURED: Final = Question(
    _WORTH,
    "Yes if it moves the metric by more than two standard errors of the difference and the "
    "squared bias it removes exceeds the variance it adds (E32).",
)
WORTH_EXPECTED: Final = Question(
    _WORTH,
    "With n clients that replied, design effect d, largest difference B before and B' after "
    "weighting, it pays for a metric whose correlation with the worst column exceeds "
    "sqrt(((d - 1) / n) / (B^2 - B'^2)); below 0.2 it probably does, from 1 on it cannot.",
)
DEPENDENCE: Final = Question(
    "Do replies depend on the metric itself?",
    "Yes if, among clients with the same fitted probability, a standard deviation of the metric in "
    f"a client's other rounds changes its odds of a reply by a factor of {ODDS_RATIO:g} or more, "
    f"up or down, beyond {BEYOND:g} standard errors (E64). It cannot be seen in a single round.",
)
UPDATES: Final = Question(
    "Do updates show that enrollment weights matter?",
    f"By the mean reliance of a server on them (O21) over the last quarter of the rounds: yes from "
    f"{RELIED:g} on, no up to {UNRELIED:g}, in part between.",
)
MODELS: Final = Question(
    "Do the models of selection hold?",
    f"Yes if the selected are within {OFF:.0%} of what each model expects, overall and over the "
    f"last quarter of the rounds, and the estimated population size within {OFF:.0%}, or within "
    f"{ERRORS:g} standard errors where those are larger; not quite if a model has no maximum "
    "without a penalty. Only models are checked: in part where a stage has a constant rate or no "
    "model, or there is no round to check it on.",
)


def judged(audit: Audit, means: Means | None = None) -> Audit:
    """Return an audit with its verdict and its card; ``means`` is what the federation can do."""
    made = replace(audit, verdict=verdict(audit, means))
    return replace(made, card=audit_card(made))


def verdict(audit: Audit, means: Means | None = None) -> Verdict:
    """Return answers to the questions an audit is made for, and what to do next."""
    enrollment, participation = _enrollment(audit), _participation(audit)
    correction, worth = _correction(audit), _worth(audit)
    return Verdict(
        headline=_depending(audit, _headline(enrollment, participation, correction, worth)),
        findings=(
            enrollment,
            participation,
            correction,
            worth,
            *_dependence(audit),
            *_updates(audit),
            _models(audit),
        ),
        uncorrected=tuple(_uncorrected(audit)),
        next_steps=(*_use(audit, correction, worth), *_next(audit)),
        training=advice(audit, means or Means()),
    )


# Differences between groups, and whether chance explains them.


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest difference of a group, and whether chance explains it."""

    size: float
    name: str
    chance: float  # difference a fair sample would exceed with probability CHANCE
    above: tuple[str, ...]  # columns beyond both limits, the largest first

    @property
    def words(self) -> str:
        """The size for people."""
        return "without limit" if math.isinf(self.size) else f"{self.size:.2f} standard deviations"


def gap_of(
    balance: BalanceTable | None, group: str, units: float, against: str | None = None
) -> Gap | None:
    """Return the gap of a group of so many clients to the population, or to another group.

    There is none where the group, or every column, is unknown or hidden.
    """
    groups = {group} if against is None else {group, against}
    if balance is None or not balance.lines or not groups <= {*balance.groups}:
        return None
    apart = {line.name: _apart(line, group, against) for line in balance.lines}
    chance = float(-ndtri(CHANCE / (2 * len(apart)))) * math.sqrt(1.0 / max(units, 1.0))
    ordered = sorted(apart, key=lambda name: -apart[name])
    above = tuple(name for name in ordered if apart[name] > max(SMD, chance))
    return Gap(apart[ordered[0]], ordered[0], chance, above)


def _apart(line: BalanceLine, group: str, against: str | None) -> float:
    mine = line.groups[group]
    mean, smd = line.mean, 0.0 if against is None else line.groups[against].smd
    if mine.smd is not None and smd is not None:
        return abs(mine.smd - smd)
    if against is not None:
        mean = line.groups[against].mean
    return 0.0 if math.isclose(mine.mean, mean, rel_tol=1e-9) else math.inf  # there is no scale


def _gap(audit: Audit, group: str) -> Gap | None:
    """Return the gap of respondents to the enrolled, of any other group to the population."""
    sizes = audit.sizes
    units = {
        ENROLLED: float(sizes.enrolled),
        ENROLLED_WEIGHTED: sizes.enrolled / _design_effect(audit, "enrollment"),
        RESPONDENTS: float(sizes.clients_replied),
        RESPONDENTS_WEIGHTED: sizes.clients_replied / _design_effect(audit, "replies"),
    }[group]
    if group == ENROLLED and sizes.population is not None:
        units /= max(1.0 - sizes.enrolled / sizes.population, 1e-9)
    return gap_of(audit.balance, group, units, ENROLLED if group == RESPONDENTS else None)


def _weighted_gap(audit: Audit) -> Gap | None:
    """Return the gap that weights leave: of the replies, or of the enrolled without replies."""
    replies = audit.balance is not None and RESPONDENTS_WEIGHTED in audit.balance.groups
    return _gap(audit, RESPONDENTS_WEIGHTED if replies else ENROLLED_WEIGHTED)


def _design_effect(audit: Audit, name: str) -> float:
    return next((w.design_effect for w in audit.weights if w.name == name), 1.0)


def _enrollment(audit: Audit) -> Finding:
    gap = _gap(audit, ENROLLED)
    if gap is None:
        return ENROLLMENT_BIAS.answered("Unknown", Level.UNKNOWN, "No column is known of both.")
    auc = next((s.auc for s in audit.stages if s.stage == ENROLLMENT), None)
    more = "" if auc is None else f" A model tells them apart with an AUC of {auc:.2f}."
    return _difference(ENROLLMENT_BIAS, gap, "the enrolled and the population", more)


def _participation(audit: Audit) -> Finding:
    gap = _gap(audit, RESPONDENTS)
    if gap is None:
        why = "No column is known of both." if audit.sizes.replies else "Nobody replied."
        why = why if audit.sizes.rounds else "No round is known."
        return REPLY_BIAS.answered("Unknown", Level.UNKNOWN, why)
    later = [s for s in audit.stages if s.stage != ENROLLMENT and s.auc is not None]
    aucs = ", ".join(f"{s.stage} {s.auc:.2f}" for s in later)
    more = f" AUC of the fitted steps: {aucs}." if aucs else ""
    return _difference(REPLY_BIAS, gap, "respondents and the enrolled", more)


def _difference(question: Question, gap: Gap, who: str, more: str) -> Finding:
    text = f"The largest difference between {who} is {gap.words} ({gap.name}; "
    text += f"chance alone would explain {gap.chance:.2f})"
    if not gap.above:
        return question.answered("No", Level.GOOD, f"{text}.{more}")
    text += f"; {len(gap.above)} column(s) differ: {some(gap.above)}.{more}"
    return question.answered("Yes", Level.WARN, text)


# Whether weights can correct it.


def _correction(audit: Audit) -> Finding:
    bad, care = _obstacles(audit), _cautions(audit)
    if bad:
        return CORRECTION.answered("Not fully", Level.BAD, " ".join([*bad, *care]))
    if not audit.weights:
        return CORRECTION.answered("Unknown", Level.UNKNOWN, "No weight could be computed.")
    left = _weighted_gap(audit)
    done = "" if left is None else f"After weighting the largest difference is {left.size:.2f}. "
    source = audit.sizes.population_source
    if source is PopulationSource.TOTALS:
        done += "As far as the given totals show; what they leave out may still differ. "
    if source is PopulationSource.SAMPLE:
        done += "As far as the reference sample shows; what it leaves out may still differ. "
    if care:
        return CORRECTION.answered("With care", Level.WARN, done + " ".join(care))
    if audit.sizes.population_table:
        done += (
            f"Every subgroup looked at of {audit.settings.min_cell} clients or more has enrolled "
        )
        done += "clients to stand for it."
    return CORRECTION.answered("Yes", Level.GOOD, done.strip())


def _without_model(audit: Audit) -> bool:
    """Return whether a population is known, and weights have no model of who of it enrolls."""
    if audit.overlap is None or audit.overlap.smallest_prob is not None:
        return False
    method = method_named(audit.settings.scheme)
    return not (method.calibration.balance or method.needs.everyone)


def _empty(audit: Audit, *, by_chance: bool) -> list[Cell]:
    if audit.overlap is None:
        return []
    rate = audit.sizes.enrolled / (audit.sizes.population or math.inf)
    return [
        cell
        for cell in audit.overlap.empty
        if ((1.0 - rate) ** cell.population >= LEFT_EMPTY) == by_chance
    ]


def _silent(audit: Audit, *, by_chance: bool) -> list[SilentGroup]:
    """Return the groups that never replied: those a fair draw of clients could miss, or not."""
    rate = audit.sizes.clients_replied / (audit.sizes.enrolled or math.inf)
    return [
        group
        for group in audit.silent
        if ((1.0 - rate) ** group.clients >= LEFT_EMPTY) == by_chance
    ]


def _named(cells: Sequence[Cell]) -> str:
    return some(f"{c.name} ({c.population:,} clients)" for c in cells)


def _quiet(groups: Sequence[SilentGroup]) -> str:
    return some(f"{g.name} ({g.clients:,} enrolled clients)" for g in groups)


def _uncorrected(audit: Audit) -> Iterator[str]:
    """Yield what weights cannot correct, a sentence each."""
    for group in audit.silent[:MOST_NAMED]:
        chance = ", which may be chance" if group in _silent(audit, by_chance=True) else ""
        size = "" if group.population is None else f", {group.population:,} in the population"
        yield (
            f"{group.name}: none of {group.clients:,} enrolled clients ({group.rows:,} rows{size}) "
            f"ever replied{chance}. No reply can be weighted to stand for them."
        )
    cells = () if audit.overlap is None else audit.overlap.empty
    for cell in cells[:MOST_NAMED]:
        chance = ", which may be chance" if cell in _empty(audit, by_chance=True) else ""
        yield (
            f"{cell.name}: none of {cell.population:,} clients of the population is enrolled"
            f"{chance}. No weight can stand for them."
        )
    more = max(0, len(audit.silent) - MOST_NAMED) + max(0, len(cells) - MOST_NAMED)
    if more:
        yield f"{more:,} more such groups are listed below."
    left = _left_out(audit)
    if left:
        yield (
            f"{left:,.0f} clients with a missing value or an unknown level: they are left out of "
            "the target population."
        )


def _left_out(audit: Audit) -> float:
    sizes = audit.sizes
    if sizes.population is None or sizes.population_known is None:
        return 0.0
    return max(0.0, sizes.population - sizes.population_known)


def _refused(audit: Audit) -> list[str]:
    """Return the stages for whose models weights end in an error, without a penalty."""
    method = method_named(audit.settings.scheme)
    fitted = method.base.probabilities in {Probabilities.FITTED, Probabilities.COLLAPSED}
    needed = {s.stage: method.needs.probabilities if s.stage == ENROLLMENT else fitted
              for s in audit.stages}  # fmt: skip
    return [s.stage for s in audit.stages if s.note and needed[s.stage]]


def _mended(audit: Audit) -> list[str]:
    """Return what is said of models that have no maximum without a penalty."""
    out = [f"{s.note[:1].upper()}{s.note[1:]}." for s in audit.stages if s.note]
    if _refused(audit) and not audit.settings.soft:
        out.append("Without --soft, fedipw weights and fedipw evaluate end in an error here.")
    return out


def _obstacles(audit: Audit) -> list[str]:
    out, empty, gap = [], _empty(audit, by_chance=False), _weighted_gap(audit)
    silent = _silent(audit, by_chance=False)
    if empty:
        out.append(f"Nobody is enrolled in {_named(empty)}: no weight can stand for them.")
    if silent:
        out.append(f"Nobody ever replied of {_quiet(silent)}: no weight can stand for them.")
    penalised = [stage.stage for stage in audit.stages if stage.note]
    if penalised:
        out.append(
            f"The model of {' and '.join(penalised)} has no maximum without a penalty, and no "
            "weight stands for clients that can never be selected."
        )
    if _without_model(audit):
        out.append("Enrollment has no model, so weights do not correct for it.")
    if gap is not None and gap.above:
        out.append(f"After weighting {some(gap.above)} still differ(s), by up to {gap.words}.")
    if _replies_depend(audit):
        out.append(
            "Replies depend on the metric itself, beyond the covariates: weights made of these "
            "leave a bias in it."
        )
    return out


def _replies_depend(audit: Audit) -> bool:
    found = None if audit.metric is None else audit.metric.dependence
    return found is not None and found.matters


def _dependence(audit: Audit) -> Iterator[Finding]:
    """Yield whether replies depend on the metric, where that can be seen."""
    found = None if audit.metric is None else audit.metric.dependence
    if found is None or audit.metric is None:
        return
    text = f"Given the covariates, clients have {found.words}, by {found.clients:,} clients whose "
    text += f"{audit.metric.name} is known from another round."
    if not found.matters:
        yield DEPENDENCE.answered("No", Level.GOOD, text)
        return
    text += " What is estimated is biased towards clients that reply often, and of clients that "
    text += "never reply nothing is known."
    yield DEPENDENCE.answered("Yes", Level.BAD, text)


def _cautions(audit: Audit) -> list[str]:
    out, empty = [], _empty(audit, by_chance=True)
    if empty:
        out.append(f"Nobody is enrolled in {_named(empty)}, which may be chance.")
        if not _without_model(audit):
            out.append("For them weights rest on a model fitted elsewhere.")
    silent = _silent(audit, by_chance=True)
    if silent:
        out.append(f"Nobody ever replied of {_quiet(silent)}, which may be chance.")
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


# Whether weighting pays.


def _worth(audit: Audit) -> Finding:
    if audit.metric is not None and audit.metric.gain is not None:
        return _worth_measured(audit.metric)
    even = break_even(audit)
    if even is None:
        text = "There are no weights of replies to judge."
        return WORTH_EXPECTED.answered("Unknown", Level.UNKNOWN, text)
    if not any(gap and gap.above for gap in (_gap(audit, ENROLLED), _gap(audit, RESPONDENTS))):
        text = "There is no difference beyond chance for weights to remove: weighting does not "
        text += "help on these columns and adds variance."
        return WORTH_EXPECTED.answered("No", Level.GOOD, text)
    if even >= 1.0:
        text = "Whatever the metric, the variance weights add outweighs the difference they remove."
        return WORTH_EXPECTED.answered("No", Level.WARN, text)
    text = f"It pays for a metric correlated by more than {even:.2f} with the worst column. Give "
    text += "the metric of your replies to see whether yours is."
    if even < 0.2:
        return WORTH_EXPECTED.answered("Probably", Level.GOOD, text)
    return WORTH_EXPECTED.answered("It depends", Level.WARN, text)


def _worth_measured(metric: MetricPart) -> Finding:
    assert metric.moved is not None
    assert metric.moved_error is not None
    assert metric.gain is not None
    moves = f"Weighting moves {metric.name} by {metric.moved:+.4g} (standard error "
    moves += f"{metric.moved_error:.2g})"
    if abs(metric.moved) <= 2.0 * metric.moved_error:
        text = f"{moves}: no more than chance. Weighting does not help this metric; it only adds "
        text += "variance. That it is fair to use the plain mean holds for this metric alone."
        return WORTH_MEASURED.answered("No", Level.WARN, text)
    if metric.gain <= 0.0:
        text = f"{moves}, but the variance it adds outweighs the bias it removes: with these "
        text += "replies weighting hurts. More clients or calibrated weights would change that."
        return WORTH_MEASURED.answered("No", Level.WARN, text)
    text = f"{moves}: the plain mean is off by more than weighting adds in variance."
    return WORTH_MEASURED.answered("Yes", Level.GOOD, text)


def break_even(audit: Audit) -> float | None:
    r"""Return the correlation of a metric with the worst column at which weighting pays.

    .. math:: R^* = \sqrt{\frac{(d - 1)/n}{B^2 - B'^2}} \qquad (E33)

    infinite where weighting removes no difference; none without weights of replies.
    """
    part = next((w for w in audit.weights if w.name == "replies"), None)
    before = gap_of(audit.balance, RESPONDENTS, math.inf)
    after = gap_of(audit.balance, RESPONDENTS_WEIGHTED, math.inf)
    if part is None or before is None or not audit.sizes.clients_replied:
        return None
    removed = before.size**2 - (0.0 if after is None else after.size**2)
    if not removed > 0.0:
        return math.inf
    return math.sqrt(max(part.design_effect - 1.0, 0.0) / audit.sizes.clients_replied / removed)


# Whether the models of selection agree with what happened, beyond what chance explains.


def _enrollment_faults(audit: Audit) -> list[str]:
    return [*_stage_faults(s for s in audit.stages if s.stage == ENROLLMENT), *_size_faults(audit)]


def _participation_faults(audit: Audit) -> list[str]:
    later = (s for s in audit.stages if s.stage != ENROLLMENT)
    return [*_stage_faults(later), *_last_round_faults(audit)]


def _beyond(ratio: float, expected: float) -> bool:
    """Return whether observed by expected is off, for a count with this mean."""
    return abs(ratio - 1.0) > max(OFF, ERRORS / math.sqrt(expected) if expected > 0.0 else OFF)


def _stage_faults(stages: Iterable[StagePart]) -> Iterator[str]:
    for stage in stages:
        ratio = stage.calibration_ratio
        expected = sum(bin_.count * bin_.mean_prob for bin_ in stage.reliability)
        if ratio is None or not _beyond(ratio, expected):
            continue
        if ratio > 0.0:
            yield f"{stage.stage} expects {1.0 / ratio:.2f} times those selected"
        else:
            yield f"{stage.stage} expects {expected:.0f} and none were selected"


def _last_round_faults(audit: Audit) -> Iterator[str]:
    known = [
        ((line.last - line.first + 1) * line.enrolled * line.expected_rate, line.calibration_ratio)
        for line in audit.rounds
        if line.expected_rate is not None and line.calibration_ratio is not None
    ]
    late = known[-max(1, len(known) // 4) :]
    expected = sum(count for count, _ in late)
    if not expected > 0.0:
        return
    ratio = sum(count * ratio for count, ratio in late) / expected
    if _beyond(ratio, expected):
        yield f"in the last rounds {ratio:.2f} replies came for each expected"


def _size_faults(audit: Audit) -> Iterator[str]:
    overlap, population = audit.overlap, audit.sizes.population
    if overlap is None or overlap.estimated_size is None or not population:
        return
    left_out = sum(s.left_out for s in audit.stages if s.stage == ENROLLMENT)
    known = population - left_out  # weights stand for clients with all their values
    ratio = overlap.estimated_size / known if known > 0.0 else math.inf
    if _beyond(ratio, overlap.effective_sample_size or math.inf):
        yield f"weights of the enrolled sum to {ratio:.2f} times the population"


def _updates(audit: Audit) -> Iterator[Finding]:
    relied = mean_reliance(audit)
    if relied is None:
        return
    answer = "Yes" if relied >= RELIED else "No" if relied <= UNRELIED else "In part"
    text = f"The server relied on enrollment weights by {relied:.2f}, where 1 is wholly."
    yield UPDATES.answered(answer, Level.GOOD if answer == "Yes" else Level.WARN, text)


def _models(audit: Audit) -> Finding:
    faults, open_ = [*_enrollment_faults(audit), *_participation_faults(audit)], _unchecked(audit)
    mended = _mended(audit)
    if faults or mended:
        text = some(faults)
        off = [f"{text[0].upper()}{text[1:]}."] if faults else []
        return MODELS.answered("Not quite", Level.WARN, " ".join([*off, *mended, *open_]))
    models = [s for s in audit.stages if s.is_model]
    if not models:
        return MODELS.answered("Not checked", Level.UNKNOWN, " ".join(open_))
    worst = max(s.expected_error for s in models)
    text = (
        f"Observed rates of {' and '.join(s.stage for s in models)} follow fitted probabilities; "
        f"the mean gap is {worst:.3f} at most."
    )
    if open_:
        return MODELS.answered("In part", Level.UNKNOWN, " ".join([text, *open_]))
    return MODELS.answered("Yes", Level.GOOD, text)


_NO_CHECK: Final = {
    PopulationSource.TABLE: "Enrollment has no model to check.",
    PopulationSource.SAMPLE: "The model of enrollment, by a reference sample, was not checked.",
    PopulationSource.TOTALS: (
        "Enrollment has no model to check: only totals of the population are known."
    ),
}


def _unchecked(audit: Audit) -> list[str]:
    """Return what of selection no model was checked for, a sentence each."""
    out, names = [], {s.stage for s in audit.stages}
    if ENROLLMENT not in names:
        out.append(_NO_CHECK[audit.sizes.population_source])
    if not names - {ENROLLMENT}:
        why = "no round was given a probability before it closed"
        why = why if audit.sizes.rounds else "no ledger of rounds was given"
        out.append(f"Participation was not checked: {why}.")
    for stage in audit.stages:
        name = stage.stage.capitalize()
        if not stage.is_model:
            out.append(f"{name} was given a constant rate, not a model: there is none to check.")
        elif 2 * stage.rate_rounds >= audit.sizes.rounds > 0 and stage.rate_rounds:
            out.append(
                f"{name} was given a constant rate, not a model, in {stage.rate_rounds} of "
                f"{audit.sizes.rounds} rounds."
            )
    return out


# The headline, and what to do next.


def _headline(
    enrollment: Finding, participation: Finding, correction: Finding, worth: Finding
) -> str:
    stages = {"enrollment": enrollment.answer, "participation": participation.answer}
    biased = [name for name, answer in stages.items() if answer == "Yes"]
    if not biased:
        return _unbiased(correction, worth, {*stages.values()})
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


def _depending(audit: Audit, headline: str) -> str:
    """Return a headline that ends in the warning, where replies depend on the metric."""
    if not _replies_depend(audit):
        return headline
    return f"{headline[:-1]}; replies depend on the metric itself, which no weight corrects."


def _unbiased(correction: Finding, worth: Finding, answers: set[str]) -> str:
    if worth.answer == "Yes":
        return "No column differs much, yet weighting moves the metric by more than it costs."
    if correction.answer == "Not fully":
        return "No column differs much, but weights cannot stand for the whole population."
    if "Unknown" in answers:
        return "No selection bias is seen in what is known; the rest is unknown."
    return "Respondents look like the population: weighting is not needed on these columns."


def _use(audit: Audit, correction: Finding, worth: Finding) -> Iterator[str]:
    """Say how to use the weights, where there are any and they help."""
    weighed = any(part.name == "replies" for part in audit.weights)
    if not weighed or worth.answer == "No" or correction.answer == "Unknown":
        return
    soft = " --soft" if _refused(audit) else ""
    start = "Use the weights"
    if correction.answer == "Not fully":
        start += ", for those they can stand for"
    files = {
        PopulationSource.TABLE: "population=FILE",
        PopulationSource.TOTALS: "enrolled=FILE, targets=FILE",
    }.get(audit.sizes.population_source)
    flower = f" In Flower: FedIPW(strategy, {files}, ledger=DIR), which weighs every round."
    yield (
        f"{start}: {audit.settings.command}{soft}, with the other options of this audit, writes "
        "one weight per reply; average metrics or updates of the replies with them."
        f"{flower if files else ''}"
    )


def _next(audit: Audit) -> tuple[str, ...]:
    out = [*_next_for_groups(audit), *_next_for_enrollment(audit)]
    if any(p.top_share > HEAVY or p.design_effect > DEFF for p in audit.weights):
        out.append(
            "Prefer Hájek or calibrated forms, which heavy weights disturb less; trim only where "
            "it is reported."
        )
    if _participation_faults(audit):
        out.append("Refit on a rolling window (--window) or add history and clock (--history).")
    if not audit.sizes.population_table:
        out.append("A population table, or totals of more columns and products, would show more.")
    if not audit.sizes.rounds:
        out.append("Keep a ledger of rounds: without it participation cannot be corrected.")
    if _replies_depend(audit):
        out.append(
            "Find covariates that explain why clients with another metric reply (--history adds "
            "their past replies), follow up clients that do not reply, and report bounds of both "
            "stages (fedipw evaluate --sensitivity) beside any estimate."
        )
    metric = audit.metric
    if metric is None:
        out.append("Give the clients' metric (--metrics) to see how much selection matters for it.")
    elif metric and metric.gain is not None and _worth_measured(metric).answer == "No":
        out.append("For this metric report the plain mean beside the weighted one.")
    out.append("Keep the JSON file and compare later: fedipw audit --compare BEFORE AFTER.")
    return tuple(out)


def _next_for_groups(audit: Audit) -> Iterator[str]:
    if audit.overlap is not None and audit.overlap.empty:
        yield (
            f"Enroll clients where there are none ({some(c.name for c in audit.overlap.empty)}), "
            "merge such a level with one that has some (--lump-below), or say that the model is "
            "not for them."
        )
    if audit.silent:
        yield (
            f"Invite or recruit clients where none ever replied "
            f"({some(group.name for group in audit.silent)}) until some do, merge such a level "
            "with one that replies (--lump-below), or say that the model is not for them."
        )
    refused = _refused(audit)
    if refused:
        yield (
            f"Merge or leave out the columns that separate in the model of {' and '.join(refused)} "
            "(--lump-below, or its formula), or pass --soft to weigh by the penalised fit shown "
            "here."
        )


def _next_for_enrollment(audit: Audit) -> Iterator[str]:
    left, enrolled = _weighted_gap(audit), _gap(audit, ENROLLED_WEIGHTED)
    still = left is not None and bool(left.above)
    method = method_named(audit.settings.scheme)
    needs = method.needs
    whole = method.uses_enrollment or bool(needs.balance) or needs.everyone
    if _without_model(audit):
        yield (
            "Name fewer columns in the enrollment formula (--enrollment), or merge levels "
            "(--lump-below), so that enrollment has a model."
        )
    elif still and not whole:
        yield "Use a scheme that corrects for enrollment: fedipw, or a calibrated one with totals."
    elif any(stage.note for stage in audit.stages):
        return  # first the groups and columns that separate
    elif (enrolled is not None and enrolled.above) or _enrollment_faults(audit):
        yield (
            "Add squares or products to the enrollment formula, or use calibrated weights "
            "(calibrated-entropy, efficient), which reproduce the population's means."
        )
    elif still:
        yield "Add squares or products to the participation formula, or history (--history)."
