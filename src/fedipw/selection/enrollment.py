"""Enrollment: the probability that a client of the population is enrolled, however it is known.

A stage answers for the members of a population whichever way the rest is known: a model fitted on a
table of everybody, on a reference sample, or, with totals alone, no probability at all and balance
columns to calibrate on.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from operator import add
from typing import TYPE_CHECKING, Any, final

import numpy as np
import polars as pl
from scipy.special import expit

from fedipw.errors import FedIPWError, InputError, NotConvergedError, SeparationError
from fedipw.numerics.checks import check_finite, check_probability, check_rows, some
from fedipw.numerics.logistic import logistic_sums
from fedipw.numerics.newton import Sums, newton_minimum
from fedipw.selection.classifiers import PENALTY, Newton, penalty_note
from fedipw.selection.coded import CodedTable, Progress, TableSettings, known_before_enrollment
from fedipw.selection.logistic import LogisticFit
from fedipw.selection.overlap import Overlap, overlap
from fedipw.selection.saved import ENROLLMENT, StageModel, block_prob
from fedipw.tables.columns import ENROLLED, ID
from fedipw.tables.design import Design, DesignRows, bound_design
from fedipw.tables.formula import sorted_levels, term_matrix, term_of
from fedipw.tables.partitions import Block, Changed, Partitions
from fedipw.tables.population import Members, Population, ReferenceSample

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fedipw.numerics import BoolArray, FloatArray, IntArray

PER_COEFFICIENT = 10  # clients behind each coefficient, before which a constant rate is used
CLIENTS_PER_MOMENT = {"rich": 25, "wide": 8}  # enrolled, behind each moment of a balance map


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a method must know of the population."""

    method: str
    probabilities: bool = False  # of enrollment, estimated
    truth: bool = False  # true probabilities, as only a simulation has them
    everyone: bool = False  # the clients that are not enrolled
    size: bool = False  # of the population
    balance: frozenset[str] = frozenset()  # kinds of population means: main, rich, wide
    takes_base: bool = True  # whether it weighs clients by base weights
    strict: bool = False  # whether population means that cannot be met are an error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnrollmentFit:
    """Enrollment probabilities of the members at one time."""

    prob: FloatArray  # (n,), NaN where not known
    known: BoolArray  # (n,) who has all values
    model: StageModel | None = None
    note: str = ""  # why there is no model, where one was asked for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BalanceColumns:
    """Balance columns of the members and their population means."""

    names: tuple[str, ...]
    matrix: FloatArray  # (n, q)
    mean: FloatArray  # (q,)
    se: FloatArray | None = None  # (q,)
    leading: int | None = None  # columns that are covariates, before squares and products
    base: FloatArray | None = None  # (n,) weights that calibration starts from, alike if none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceRows:
    """The rows of a reference sample that have all values, coded."""

    design: Design
    columns: FloatArray  # (m, q)
    weights: FloatArray  # (m,) design weights


class EnrollmentStage(ABC):
    """What is known of enrollment, asked the same way however it is known."""

    population: Population
    coded: CodedTable | None = None  # the population's rows, where everybody is listed
    reference: ReferenceRows | None = None  # those of a reference sample, where there is one

    @property
    def members(self) -> Members:
        """Everybody who is enrolled at some time."""
        return self.population.members

    @property
    def base(self) -> FloatArray | None:
        """Base weights of the members, (n,); none where they count alike."""
        return self.population.member_base

    @property
    def own(self) -> FloatArray | None:
        """Clients that each member is itself, (n,), where rows stand for more than one."""
        return None

    def check_base(self, needs: Needs) -> None:
        """Raise if base weights were given to a method that does not use them."""
        if self.population.base is not None and not needs.takes_base:
            raise InputError(
                f"{needs.method} takes no base weights: use fedipw, participation-only or a "
                "calibrated method, or leave the base weights out."
            )

    @property
    @abstractmethod
    def size(self) -> float | None:
        """Clients of the population that take part, N; none if unknown."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """What it rests on, for people."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to what was given, a sentence each, as of the last fit."""
        return ()

    @abstractmethod
    def require(self, needs: Needs) -> None:
        """Raise if a method needs more than is known."""

    @abstractmethod
    def fitted(self, present: BoolArray, *, required: bool) -> EnrollmentFit:
        """Return probabilities when these members are enrolled, (n,)."""

    @abstractmethod
    def balance(self, kind: str, enrolled: BoolArray) -> BalanceColumns:
        """Return balance columns, ``main``, or ``rich`` or ``wide`` as the enrolled allow."""

    def softly(self) -> EnrollmentStage:
        """Return the stage with a penalty on fits that have no maximum, instead of an error."""
        return self

    @property
    def narrowed(self) -> str:
        """What is said where clients are left out for missing values; empty if none is."""
        return ""

    def basis(self) -> dict[str, Any]:
        """Return plain values that differ once anything has changed that fits depend on."""
        return self.population.stamp()

    def state(self) -> dict[str, Any]:
        """Return what the next fit starts from, where clients join and leave."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back; an empty one is that before the first fit."""
        del state

    def overlap(self, model: StageModel | None, threshold: float) -> Overlap | None:
        """Return how near enrollment comes to leaving clients out; none if that is not known."""
        del model, threshold
        return None


def enrollment_stage(
    population: Population,
    formula: str = ".",
    *,
    settings: TableSettings | None = None,
    model: StageModel | None = None,
    later: Collection[str] = (),
    progress: Progress | None = None,
) -> EnrollmentStage:
    """Return the enrollment stage of a population, by what is known of it.

    Parameters
    ----------
    population
        With a table of everybody, a reference sample or totals.
    formula
        What enrollment depends on; totals have none.
    settings
        How it is fitted and where the work is done.
    model
        A fitted model to use as it is, such as a saved one.
    later
        Columns known only of enrolled clients, such as those of a ledger.
    progress
        Receives rows read and rows in all.
    """
    if population.targets is not None:
        if formula.strip() != "." or model is not None:
            raise InputError("An enrollment formula needs a population table: totals calibrate.")
        return TotalsEnrollment(population)
    settings = TableSettings() if settings is None else settings
    if population.sample is not None:
        if model is not None:
            raise InputError(
                "A saved model of enrollment needs a table of the whole population: with a "
                "reference sample it is fitted on both."
            )
        return SampleEnrollment(population, population.sample, formula, settings)
    return TableEnrollment(
        population, formula, settings=settings, model=model, later=later, progress=progress
    )


@final
class TableEnrollment(EnrollmentStage):
    """Everybody is listed: enrollment probabilities are fitted on the whole population."""

    coded: CodedTable
    _penalty = 1.0  # mean base weight of a row, by which penalties grow

    def __init__(
        self,
        population: Population,
        formula: str,
        *,
        settings: TableSettings,
        model: StageModel | None = None,
        later: Collection[str] = (),
        progress: Progress | None = None,
    ) -> None:
        table, covariates = population.clients, population.covariates
        table.require([ID, ENROLLED])
        population.check()
        if not covariates:
            raise InputError(f"{table.name} has no covariate to explain enrollment with.")
        if model is not None:
            design = model.design
            table.require(design.columns)
        else:
            _refuse_later(formula, [name for name in later if name not in table.schema])
            design = bound_design(
                formula, table.scan(), covariates, missing=settings.missing,
                lump_below=settings.lump_below, where=table.name, checked=False,
            )  # fmt: skip
        known_before_enrollment(table, design.columns)
        if population.base is not None and not isinstance(settings.estimator, Newton):
            raise InputError(
                "Base weights go with logistic regression fitted once: leave out the base weights, "
                "or --classifier, --folds and --score-calibration."
            )
        if population.base is not None and isinstance(settings.estimator, Newton):
            # the penalty of a row's mean weight: a common factor of base weights changes nothing
            self._penalty = float(population.size or table.rows) / table.rows
            settings = replace(settings, estimator=Newton(settings.estimator.l2 * self._penalty))
        self.population, self.model = population, model
        self.coded = CodedTable.of(
            table, design, weight=population.base, covariates=covariates, settings=settings,
            progress=progress,
        )  # fmt: skip
        self._last: StageModel | None = None
        self._note = ""  # on the last fit
        self._present: BoolArray | None = None  # who was enrolled in the last fit

    @property
    def notes(self) -> tuple[str, ...]:
        """What base weights mean for errors, and whether the last fit was penalised."""
        base = (
            "Rows of the population count by their base weights; a row is one draw of enrollment, "
            "however many clients it stands for."
        )
        made = [base] if self.population.base is not None else []
        return (*made, *([f"{self._note[:1].upper()}{self._note[1:]}."] if self._note else []))

    @property
    def size(self) -> float:
        """Number of clients of the population that take part, N, by base weights if any."""
        return float(self.coded.rows) if self.population.base is None else self.coded.size

    @property
    def own(self) -> FloatArray | None:
        """Clients that each member's row stands for, (n,)."""
        return self.base

    @property
    def formula(self) -> str:
        """The formula of the model."""
        return self.coded.design.formula

    def require(self, needs: Needs) -> None:
        """Refuse methods that need the truth, or probabilities that cannot be had."""
        self.check_base(needs)
        if needs.probabilities and self.members.listed == self.coded.table.rows:
            raise InputError(
                f"{self.coded.table.name}: all {self.members.listed} clients are enrolled: there "
                "is no enrollment stage to correct, or the table lists only enrolled clients. Use "
                "participation-only, or give it as the enrolled table, with population totals."
            )
        if needs.truth:
            raise InputError(
                f"{needs.method} needs true probabilities, which no table holds. Use fedipw."
            )

    def softly(self) -> EnrollmentStage:
        """Return the stage with a penalty on fits that have no maximum, instead of an error."""
        if self.coded.settings.soft:
            return self
        made = copy(self)
        made.coded = replace(self.coded, settings=replace(self.coded.settings, soft=True))
        return made

    @property
    def narrowed(self) -> str:
        """What is said where clients are left out for missing values."""
        listed = float(self.population.size or self.coded.table.rows)
        return narrowed_to(self.size, listed) if self.coded.left_out else ""

    @cached_property
    def _coded_members(self) -> DesignRows:
        rows = self.coded.design.rows(self.members.frame, "enrolled clients")
        return _without(rows, self.members.gone)

    def fitted(self, present: BoolArray, *, required: bool) -> EnrollmentFit:
        """Return probabilities, by a model fitted on who is enrolled now."""
        columns, known = self._coded_members.columns, self._coded_members.known
        note, model, rate = "", self.model, np.nan
        if model is None and self.members.dated and self._few(present):
            rate = float(present.sum() if self.base is None else self.base[present].sum())
            rate /= self.size
            note = f"constant enrollment rate: fewer than {PER_COEFFICIENT} clients a coefficient"
        elif model is None:
            try:
                model = self._fitted(present)
                note = self._note
            except FedIPWError as error:
                if required:
                    raise
                note = _no_prob(error)
        prob = np.full(self.members.size, rate)
        if model is not None:
            seen = self._member_rows if model.fit.cross_fitted else None
            prob[known] = model.fit.prob(columns, seen)
        if model is not None and required:  # a classifier may be sure of clients that enrolled
            inside = np.where(present & known, prob, 1.0)
            check_probability(inside, "fitted probability of enrolled clients")
        return EnrollmentFit(prob=prob, known=known, model=model, note=note)

    @cached_property
    def _member_rows(self) -> IntArray:
        """The rows of the coded table that the members with all values have."""
        return self.coded.partitions.reduced(_labelled_rows, _joined)

    def _few(self, present: BoolArray) -> bool:
        """Return whether too few are enrolled, or left, for a model of enrollment."""
        inside = int(present.sum())
        needed = PER_COEFFICIENT * (len(self.coded.design.terms) + 1)
        return min(inside, self.coded.rows - inside) <= needed

    def rows_at(self, present: BoolArray) -> Partitions:
        """Return the population's rows, labelled by which members are enrolled, (n,)."""
        return relabelled(self.coded, present, self._coded_members.known)

    def _fitted(self, present: BoolArray) -> StageModel:
        start = None
        if self._last is not None:
            if self._present is not None and np.array_equal(present, self._present):
                return self._last
            start = getattr(self._last.fit, "point", None)
        rows, self._note = self.rows_at(present), ""
        try:
            self._last = self.coded.model(start, rows)
        except (SeparationError, NotConvergedError) as error:
            settings = self.coded.settings
            if not settings.soft or settings.estimator != Newton():
                raise error.within(ENROLLMENT) from None
            self._note = penalty_note(ENROLLMENT, error)
            found = self.coded.model(None, rows, Newton(l2=PENALTY * self._penalty))
            self._last = replace(found, note=self._note)
        self._present = present.copy()
        return self._last

    def basis(self) -> dict[str, Any]:
        """Return what the population, the fits and a saved model are."""
        settings = self.coded.settings
        return {
            **super().basis(),
            "settings": repr(replace(settings, client=None, scratch=None)),
            "model": None if self.model is None else self.model.to_json(),
        }

    def state(self) -> dict[str, Any]:
        """Return the last fit, from which the next one starts."""
        last = None if self._last is None else self._last.fit
        if not isinstance(last, LogisticFit) or self._present is None:
            return {}  # others are fitted alike wherever they start
        return {"fit": last.state(), "present": self._present, "note": self._note}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put the last fit back, or forget it."""
        self._last, self._present, self._note = None, None, ""
        if not state:
            return
        fit = LogisticFit.restored(self.coded.design.names, self.coded.frame, state["fit"])
        self._present, self._note = np.array(state["present"]), str(state["note"])
        self._last = StageModel(
            stage=ENROLLMENT, design=self.coded.design, fit=fit, left_out=self.coded.left_out,
            note=self._note,
        )  # fmt: skip

    def balance(self, kind: str, enrolled: BoolArray) -> BalanceColumns:
        """Return the enrollment model's columns, or those with squares and products."""
        if kind in CLIENTS_PER_MOMENT:
            # the wide map stays the same while clients join and leave
            count = self.members.size if kind == "wide" else int(enrolled.sum())
            design = rich_design(self.coded, count, kind)
            rows = design.rows(self.members.frame, "enrolled clients")
            mean = self.population.moments(design).mean
        else:
            design, rows, mean = self.coded.design, self._coded_members, self.coded.means()
        main = len(self.coded.design.terms)
        return BalanceColumns(
            names=design.names, matrix=rows.matrix(), mean=mean, leading=main, base=self.base
        )

    def overlap(self, model: StageModel | None, threshold: float) -> Overlap | None:
        """Return how near enrollment comes to leaving clients out."""
        if model is None:
            return None
        present = self._present if self.model is None else None
        rows = None if present is None else self.rows_at(present)
        return overlap(self.coded, model, threshold=threshold, partitions=rows)

    def everyone_prob(self, model: StageModel) -> FloatArray:
        """Return the fitted probability of every client of the table, enrolled or not, (N,)."""
        prob_of = block_prob(model.fit, self.coded.frame)
        return self.coded.partitions.reduced(prob_of, _joined)


@final
class TotalsEnrollment(EnrollmentStage):
    """Only the enrolled are listed, and population means are known: enrollment is calibrated."""

    def __init__(self, population: Population) -> None:
        assert population.targets is not None
        frame = population.members.frame
        terms = [term_of(name, frame.schema) for name in population.targets.names]
        columns = {term.level[0] for term in terms if term.level is not None}
        levels = {column: sorted_levels(frame[column]) for column in columns}
        self._bound = population.targets.on(terms, frame.schema, levels)
        self._targets, self._terms = self._bound.targets, terms
        self.population = population.with_targets(self._targets)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which shares were rescaled."""
        return self._targets.notes

    @property
    def size(self) -> float | None:
        """The population's size, where it was given."""
        return self.population.size

    @property
    def formula(self) -> str:
        """Names of the targets."""
        return ", ".join(self._targets.names)

    def require(self, needs: Needs) -> None:
        """Raise if a method needs the clients that are not enrolled."""
        self.check_base(needs)
        if needs.probabilities or needs.truth or needs.everyone:
            self.population.everyone(needs.method)
        if needs.size and self.size is None:
            raise InputError(f"{needs.method} needs the population size.")
        if needs.strict and needs.balance:
            self._bound.required()

    def fitted(self, present: BoolArray, *, required: bool) -> EnrollmentFit:
        """Return that no probability is known, and what was done to the targets."""
        del required
        del present
        return EnrollmentFit(
            prob=np.full(self.members.size, np.nan),
            known=~self.members.gone,
            note=" ".join(self.notes),
        )

    def balance(self, kind: str, enrolled: BoolArray) -> BalanceColumns:
        """Return the columns the targets name; there is no richer map than what was given."""
        del kind, enrolled
        matrix = np.ascontiguousarray(term_matrix(self._terms, self.members.frame))
        moments = self.population.moments(self._targets.names)
        matrix[self.members.gone] = moments.mean  # they count no more, whatever is known of them
        check_finite(matrix, self._targets.names, "enrolled table")
        return BalanceColumns(
            names=self._targets.names, matrix=matrix, mean=moments.mean, se=moments.se,
            base=self.base,
        )  # fmt: skip


@final
class ListedEnrollment(EnrollmentStage):
    """The enrolled are listed by identifier and nothing is known of them: no weight of theirs."""

    def __init__(self, population: Population) -> None:
        known = population.members.covariates
        if known:
            raise InputError(
                f"{population.clients.name} has {some(map(repr, known))}: where clients keep their "
                f"covariates to themselves, a table of {ID} alone is what the server needs."
            )
        self.population = population

    @property
    def size(self) -> float | None:
        """The population's size, where it was given."""
        return self.population.size

    @property
    def formula(self) -> str:
        """Nothing is known that enrollment could depend on."""
        return ""

    def require(self, needs: Needs) -> None:
        """Raise if a method needs anything of the clients."""
        if needs.probabilities or needs.truth or needs.everyone or needs.balance:
            raise InputError(f"{needs.method} needs covariates, and only identifiers are known.")

    def fitted(self, present: BoolArray, *, required: bool) -> EnrollmentFit:
        """Return that no probability is known."""
        del present, required
        return EnrollmentFit(prob=np.full(self.members.size, np.nan), known=~self.members.gone)

    def balance(self, kind: str, enrolled: BoolArray) -> BalanceColumns:
        """Raise: no column is known."""
        del enrolled
        raise InputError(f"Balance columns ({kind}) need covariates: only identifiers are known.")


@final
class SampleEnrollment(EnrollmentStage):
    """The rest is known by a reference sample: enrollment is fitted on both (P3)."""

    reference: ReferenceRows

    def __init__(
        self, population: Population, sample: ReferenceSample, formula: str, settings: TableSettings
    ) -> None:
        self.population = population
        table, known = sample.table, sample.table.schema
        own = [n for n in population.covariates if n in known and n != sample.weight]
        self._design = bound_design(
            formula, table.scan(), own, missing=settings.missing, lump_below=settings.lump_below,
            where=table.name,
        )  # fmt: skip
        rows = self._design.rows(
            table.collect(table.scan().select(self._design.columns)), table.name
        )
        self.reference = ReferenceRows(
            design=self._design, columns=rows.columns.T, weights=sample.weights[rows.known]
        )
        self._listed = float(sample.weights.sum())  # with rows that lack a value
        self._note = "enrollment by a reference sample"
        if settings.estimator != Newton():
            self._note += ", by logistic regression without a penalty"

    @property
    def notes(self) -> tuple[str, ...]:
        """That there is a reference sample, and what it cannot be fitted by."""
        return (f"{self._note[:1].upper()}{self._note[1:]}.",)

    @property
    def size(self) -> float:
        """Sum of the design weights of the sample that takes part, about N."""
        return float(self.reference.weights.sum())

    @property
    def narrowed(self) -> str:
        """What is said where rows of the sample are left out for missing values."""
        return narrowed_to(self.size, self._listed) if self.size < self._listed else ""

    @property
    def formula(self) -> str:
        """The formula of the model."""
        return self._design.formula

    def require(self, needs: Needs) -> None:
        """Refuse what needs every client of the population."""
        if needs.truth or needs.everyone:
            self.population.everyone(needs.method)

    def fitted(self, present: BoolArray, *, required: bool) -> EnrollmentFit:
        """Return probabilities fitted on who is enrolled now and the sample."""
        rows = _without(
            self._design.rows(self.members.frame, "enrolled clients"), self.members.gone
        )
        known = rows.known
        prob, inside = np.full(self.members.size, np.nan), rows.columns.T[present[known]]
        try:
            fit = reference_sample_fit(
                inside, self.reference.columns, self.reference.weights, self._design.names
            )
        except FedIPWError as error:
            if required:
                raise
            return EnrollmentFit(prob=prob, known=known, note=_no_prob(error))
        prob[known] = fit.prob_at(rows.columns.T)
        return EnrollmentFit(prob=prob, known=known, note=self._note)

    def balance(self, kind: str, enrolled: BoolArray) -> BalanceColumns:
        """Return the model's columns with the sample's estimates of their means."""
        del kind, enrolled
        rows = self._design.rows(self.members.frame, "enrolled clients")
        moments = self.population.moments(self._design)
        return BalanceColumns(
            names=self._design.names, matrix=rows.matrix(), mean=moments.mean, se=moments.se
        )


def narrowed_to(known: float, listed: float) -> str:
    """Return what is said where those without all values are left out of the population.

    >>> narrowed_to(360, 400)[:75]
    'The target population is now the 360 of 400 clients whose values are known:'
    """
    return (
        f"The target population is now the {known:,.0f} of {listed:,.0f} clients whose values are "
        f"known: {listed - known:,.0f} with a missing value or an unknown level are left out "
        "(--missing drop), and weights and estimates say nothing of them."
    )


def _without(rows: DesignRows, gone: BoolArray) -> DesignRows:
    """Return what a design makes of a table without some of its rows, (n,)."""
    if not gone.any():
        return rows
    kept = rows.known & ~gone
    return replace(rows, columns=rows.columns[:, kept[rows.known]], kept=kept)


def member_columns(coded: CodedTable, members: Members) -> tuple[FloatArray, BoolArray]:
    """Return design columns of members that have all values, (q, k), and who those are, (n,)."""
    rows = coded.design.rows(members.frame, "enrolled clients")
    return rows.columns, rows.known


def relabelled(coded: CodedTable, present: BoolArray, known: BoolArray) -> Partitions:
    """Return the population's rows, labelled by which members are enrolled, (n,).

    ``known`` (n,) are the members with all values, those that have a row.
    """
    inside = present[known]
    if inside.all():
        return coded.partitions
    before, total = {}, 0  # members before a block, by its first row
    for start, members in coded.partitions.reduced(_members_in, add):
        before[start], total = total, total + members
    if total != len(inside):
        raise InputError(f"{total} members among the rows, {len(inside)} in the table.")
    return Changed(coded.partitions, partial(_labelled, present=inside, before=before))


def _members_in(block: Block) -> list[tuple[int, int]]:
    return [(block.start, int(np.count_nonzero(block.labels)))]


def _labelled(block: Block, present: BoolArray, before: Mapping[int, int]) -> Block:
    labels, first = block.labels.copy(), before[block.start]
    ones = np.flatnonzero(labels)
    labels[ones] = present[first : first + len(ones)]
    return block._replace(labels=labels)


def _no_prob(error: FedIPWError) -> str:
    return f"no enrollment probabilities: {error}"


def _labelled_rows(block: Block) -> IntArray:
    return block.start + np.flatnonzero(block.labels)


def _joined(a: Any, b: Any) -> Any:
    return np.concatenate([a, b])


def _refuse_later(formula: str, later: Sequence[str]) -> None:
    named = [n for n in later if re.search(rf"(?<!\w){re.escape(n)}(?!\w)", formula)]
    if named:
        raise InputError(
            f"{some(map(repr, named))} stands only in the ledger: it is known after enrollment and "
            "cannot explain it. Leave it to the participation stage."
        )


def rich_design(coded: CodedTable, enrolled: int, kind: str = "rich") -> Design:
    """Return columns, squares and products, as far as the enrolled allow.

    Squares and products are taken if at least 25 enrolled clients stand behind each moment; else
    squares alone if that leaves 25; else the columns. Calibration on more moments than that costs
    more variance than it removes. The ``wide`` map, of regressions, needs 8.
    """
    plain, table = coded.design, coded.table
    numbers = [c for c in plain.columns if plain.kinds[c] == "number"]
    quoted = {c: f"`{c.replace('`', '``')}`" for c in plain.columns}
    many = table.collect(table.scan().select(pl.col(numbers).n_unique())).row(0) if numbers else ()
    squares = [f"{quoted[c]}**2" for c, n in zip(numbers, many, strict=True) if n > 2]
    main = list(quoted.values())
    room = enrolled // CLIENTS_PER_MOMENT[kind]

    def bound(terms: list[str]) -> Design:
        return bound_design(
            " + ".join(terms), table.scan(), plain.columns, missing=plain.missing,
            where=table.name,
        )  # fmt: skip

    least = bound(main)
    vary = len({f.column for t in least.terms for f in t.factors if not f.missing})
    whole = len(least.terms) + len(squares)
    if whole + vary * (vary - 1) // 2 <= room:  # else there are too many pairs even to name
        pairs = [f"{quoted[a]}:{quoted[b]}" for a, b in combinations(plain.columns, 2)]
        design = bound([*main, *squares, *pairs])
        if len(design.terms) <= room:
            return design
    return bound([*main, *squares]) if whole <= room else least


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceFit:
    """A logistic enrollment model fitted on the enrolled and a reference sample."""

    prob: FloatArray  # of the enrolled, (n,)
    coefficients: FloatArray  # (q,)
    intercept: float
    population_size: float  # sum of the design weights

    def prob_at(self, Z: FloatArray) -> FloatArray:
        """Return P(E = 1 | Z) of other clients, (m,)."""
        prob: FloatArray = expit(Z @ self.coefficients + self.intercept)
        return prob


def reference_sample_fit(
    enrolled: FloatArray,
    reference: FloatArray,
    design_weights: ArrayLike,
    names: Sequence[str] | None = None,
) -> ReferenceFit:
    r"""Fit P(E = 1 | Z) when the population is known through a probability sample of it.

    .. math:: \sum_{i \in E} z_i - \sum_{j \in R} d_j\, \pi(z_j) z_j = 0, \qquad
       \text{logit}\, \pi(z) = z'\beta, \qquad (P3)

    the pseudo-maximum-likelihood of Chen, Li and Wu (2020): the reference sample's weighted sum
    stands for the population's. z contains the constant.

    Parameters
    ----------
    enrolled
        Covariates of the enrolled clients, (n, q).
    reference
        The same covariates of the reference sample, (m, q), which may contain enrolled clients.
    design_weights
        Inverse inclusion probabilities of the reference sample, (m,); they sum to about N.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> Z = rng.standard_normal((20_000, 1))
    >>> inside = rng.random(20_000) < expit(-1.0 + Z[:, 0])
    >>> sample = rng.choice(20_000, 2_000, replace=False)
    >>> fit = reference_sample_fit(Z[inside], Z[sample], np.full(2_000, 10.0))
    >>> bool(abs(fit.coefficients[0] - 1.0) < 0.15), fit.population_size
    (True, 20000.0)
    """
    names = names or [f"z{j + 1}" for j in range(enrolled.shape[1])]
    weights = np.asarray(design_weights, dtype=np.float64)
    _check(enrolled, reference, weights, names)
    share = weights / weights.sum()
    centre = share @ reference
    scale = np.sqrt(share @ (reference - centre) ** 2)
    if (scale == 0.0).any():
        constant = [n for n, s in zip(names, scale, strict=True) if s == 0.0]
        raise InputError(
            f"{', '.join(constant)} is constant in the reference sample: leave it out."
        )
    size = float(weights.sum())
    inside = np.append(((enrolled - centre) / scale).sum(axis=0), len(enrolled)) / size
    outside = np.ascontiguousarray((reference - centre) / scale)
    never = np.zeros(len(reference), dtype=np.int8)

    def objective(beta: FloatArray) -> Sums:
        at = logistic_sums(outside, never, share, beta)  # sum of d log(1 + e^u) over the sample
        return at._replace(value=at.value - float(inside @ beta), gradient=at.gradient - inside)

    start = np.zeros(len(names) + 1)
    start[-1] = np.log(len(enrolled) / (size - len(enrolled)))
    found = newton_minimum(objective, start, gradient_tol=1e-12, max_iterations=100)
    if not found.converged:
        raise NotConvergedError(found.iterations, found.gradient_norm, 1e-12)
    beta = found.point[:-1] / scale
    intercept = float(found.point[-1] - beta @ centre)
    prob = check_probability(expit(enrolled @ beta + intercept), "fitted enrollment probability")
    return ReferenceFit(prob=prob, coefficients=beta, intercept=intercept, population_size=size)


def _check(
    enrolled: FloatArray, reference: FloatArray, weights: FloatArray, names: Sequence[str]
) -> None:
    if enrolled.ndim != 2 or reference.ndim != 2 or enrolled.shape[1] != reference.shape[1]:
        raise InputError(
            f"Enrolled {enrolled.shape} and reference sample {reference.shape} need the same "
            "columns."
        )
    check_rows(len(reference), design_weights=weights)
    check_finite(enrolled, names, "enrolled clients")
    check_finite(reference, names, "reference sample")
    if not (np.isfinite(weights).all() and (weights > 0.0).all()):
        raise InputError("Design weights must be finite and above 0.")
    if weights.sum() <= len(enrolled):
        raise InputError(
            f"The design weights sum to {weights.sum():.6g}, no more than the {len(enrolled)} "
            "enrolled clients: they must sum to about the population size."
        )
    if len(reference) <= enrolled.shape[1]:
        raise InputError(f"{len(reference)} reference rows are too few for {len(names)} columns.")
