"""Who is enrolled and what stands for the rest: a population table, or totals alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np
import polars as pl

from fedipw.errors import FedIPWError, InputError
from fedipw.numerics.checks import check_positive, some
from fedipw.selection.overlap import Overlap, overlap
from fedipw.selection.tables import CodedTable, TableSettings, known_before_enrollment
from fedipw.tables.design import Design, bound_design
from fedipw.tables.facts import used_parts
from fedipw.tables.formula import formula_clauses
from fedipw.tables.identity import require_unique_ids
from fedipw.tables.members import FROM, UNTIL, Members
from fedipw.tables.partitions import Block, Partitions
from fedipw.tables.population import ENROLLED, ID
from fedipw.tables.tablefile import TableFile
from fedipw.tables.targets import Targets
from fedipw.tables.terms import term_of
from fedipw.weighting.balance import CLIENTS_PER_MOMENT, Balance
from fedipw.weighting.everyone import Everyone
from fedipw.weighting.registry import Facts, Method, SourceKind
from fedipw.weighting.standing import Standing, units_of

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray, FloatArray
    from fedipw.selection.stage import StageModel
    from fedipw.selection.tables import Progress

T = TypeVar("T")
PER_COEFFICIENT = 10  # clients behind each coefficient, before which a constant rate is used


@final
@dataclass(eq=False)
class KnownPopulation:
    """A table of the whole population: enrollment probabilities are fitted on it.

    ``model`` is a fitted model to use as it is, such as a saved one.
    """

    coded: CodedTable
    members: Members
    model: StageModel | None = None
    _last: StageModel | None = field(default=None, init=False)
    _rows: Partitions | None = field(default=None, init=False)  # behind the last fit
    _present: BoolArray | None = field(default=None, init=False)  # who was enrolled in it

    @classmethod
    def of(
        cls,
        table: TableFile,
        formula: str = ".",
        *,
        settings: TableSettings | None = None,
        model: StageModel | None = None,
        later: Collection[str] = (),
        progress: Progress | None = None,
    ) -> KnownPopulation:
        """Return a population from its table, checked and coded.

        ``later`` names columns known only of enrolled clients, such as those of a ledger.
        """
        table.require([ID, ENROLLED])
        _check_flags(table)
        require_unique_ids(table)
        known = {ID, ENROLLED, FROM, UNTIL}
        covariates = tuple(n for n in table.schema if n not in known)
        if not covariates:
            raise InputError(f"{table.path} has no covariate to explain enrollment with.")
        if model is not None:
            used = model.design.columns
            table.require(used)
        else:
            _refuse_later(formula, [name for name in later if name not in table.schema])
            clauses = formula_clauses(formula, covariates, table.schema.names())
            used = tuple(part.column for part in used_parts(clauses, formula))
        known_before_enrollment(table, tuple(dict.fromkeys(used)))
        coded = CodedTable.of(
            table, formula if model is None else model.design, covariates=covariates,
            settings=settings, progress=progress,
        )  # fmt: skip
        inside = table.collect(table.scan().filter(pl.col(ENROLLED)))
        return cls(coded, Members(inside), model)

    @property
    def size(self) -> int:
        """Number of clients of the population that take part, N."""
        return self.coded.partitions.rows

    def require(self, method: Method) -> None:
        """Refuse methods that need the truth, or probabilities that cannot be had."""
        if method.uses_enrollment and self.members.size == self.coded.table.rows:
            raise InputError(
                f"{self.coded.table.path}: all {self.members.size} clients are enrolled: there is "
                "no enrollment stage to correct, or the table lists only enrolled clients. Use "
                "participation-only, or give it as the enrolled table, with population totals."
            )
        if method.source is SourceKind.KNOWN:
            raise InputError(
                f"{method.name} needs true probabilities, which no table holds. Use fedipw."
            )

    @cached_property
    def columns(self) -> tuple[FloatArray, BoolArray]:
        """Design columns of the members, (q, n), and who has all values, (n,)."""
        rows = self.coded.design.rows(self.members.frame, "enrolled clients")
        known = np.ones(self.members.size, dtype=np.bool_) if rows.kept is None else rows.kept
        return rows.columns, known

    def at(self, present: BoolArray, method: Method) -> Standing:
        """Return enrollment when these members are enrolled, fitted on who is enrolled then."""
        columns, known = self.columns
        note, model, rate = "", self.model, np.nan
        if model is None and self.members.changes and self._few(present):
            rate = float(present.sum()) / self.size
            note = f"constant enrollment rate: fewer than {PER_COEFFICIENT} clients a coefficient"
        elif model is None:
            try:
                model = self._fitted(present)
            except FedIPWError as error:
                if method.uses_enrollment:
                    raise
                note = f"no enrollment probabilities: {error}"
        prob = np.full(self.members.size, rate)
        if model is not None:
            prob[known] = model.fit.prob(columns)
        units = units_of(self.members, present & known, prob)
        facts = Facts(float(self.size), float(units.enrolled.sum()))
        if method.balanced:
            facts = self._with_balance(facts, units.enrolled, method)
        return Standing(units=units, facts=facts, model=model, note=note)

    def _few(self, present: BoolArray) -> bool:
        """Return whether too few are enrolled, or left, for a model of enrollment."""
        inside = int(present.sum())
        needed = PER_COEFFICIENT * (len(self.coded.design.terms) + 1)
        return min(inside, self.size - inside) <= needed

    def rows_at(self, present: BoolArray) -> Partitions:
        """Return the population's rows, labelled by which members are enrolled, (n,)."""
        if present.all():
            return self.coded.partitions
        return _Relabelled.of(self.coded.partitions, present[self.columns[1]])

    def _fitted(self, present: BoolArray) -> StageModel:
        start = None
        if self._last is not None:
            if self._present is not None and np.array_equal(present, self._present):
                return self._last
            start = np.append(self._last.fit.coefficients, self._last.fit.intercept)
        self._rows = self.rows_at(present)
        self._last, self._present = self.coded.model(start, self._rows), present.copy()
        return self._last

    def _with_balance(self, facts: Facts, enrolled: BoolArray, method: Method) -> Facts:
        columns, known = self.columns
        full = np.full((self.members.size, len(columns)), 0.0)
        full[known] = columns.T
        plain = self._balance(self.coded.design.names, full, enrolled, self.coded.means())
        if method.balanced != "rich":
            return replace(facts, balance=plain)
        design = rich_design(self.coded, int(enrolled.sum()))
        rows = design.rows(self.members.frame, "enrolled clients")
        kept = np.ones(self.members.size, dtype=np.bool_) if rows.kept is None else rows.kept
        matrix = np.zeros((self.members.size, len(design.terms)))
        matrix[kept] = rows.columns.T
        means = design_means(self.coded.table, design)
        return replace(
            facts, balance=plain, rich=self._balance(design.names, matrix, enrolled, means)
        )

    def _balance(
        self, names: tuple[str, ...], matrix: FloatArray, enrolled: BoolArray, means: FloatArray
    ) -> Balance:
        return Balance(
            names=names, matrix=matrix, enrolled=enrolled, mean=means, population_size=self.size
        )

    def everyone(self) -> Everyone:
        """Return the whole population, in memory."""
        return Everyone.of(self.coded.table)

    def overlap(self, model: StageModel, threshold: float) -> Overlap:
        """Return how far enrollment reaches."""
        return overlap(self.coded, model, threshold=threshold, partitions=self._rows)


@final
@dataclass(frozen=True, eq=False)
class KnownTotals:
    """Enrolled clients alone, and population means from outside: enrollment is calibrated."""

    members: Members
    targets: Targets
    population_size: float | None = None

    @classmethod
    def of(
        cls, table: TableFile, targets: Targets, population_size: float | None = None
    ) -> KnownTotals:
        """Return the enrolled of a table; rows with ``enrolled`` false are ignored."""
        require_unique_ids(table)
        if population_size is not None:
            check_positive(population_size, "population_size")
        query = table.scan()
        if ENROLLED in table.schema:
            query = query.filter(pl.col(ENROLLED))
        members = Members(table.collect(query))
        for name in targets.names:
            term_of(name, members.frame.schema)
        return cls(members, targets, population_size)

    def require(self, method: Method) -> None:
        """Raise if a method needs the clients that are not enrolled."""
        if method.uses_enrollment or method.source in {SourceKind.KNOWN, SourceKind.COLLAPSED}:
            raise InputError(
                f"{method.name} needs a table of the whole population. With totals alone use a "
                "calibrated method, such as calibrated-quadratic."
            )
        sized = "inverse-logit" in method.name or method.balanced == "rich"
        if sized and self.population_size is None:
            raise InputError(f"{method.name} needs the population size.")

    def everyone(self) -> Everyone:
        """Refuse: nobody else is known."""
        raise InputError("Totals tell nothing of single clients that are not enrolled.")

    def at(self, present: BoolArray, method: Method) -> Standing:
        """Return the standing when these members are enrolled; probabilities are not known."""
        units = units_of(self.members, present, np.full(self.members.size, np.nan))
        size = np.nan if self.population_size is None else self.population_size
        facts = Facts(size, float(present.sum()))
        if method.balanced:
            balance = Balance.of_targets(self.members.frame, self.targets, size)
            balance = replace(balance, enrolled=present)
            facts = replace(facts, balance=balance, rich=balance)
        return Standing(units=units, facts=facts)


def _check_flags(table: TableFile) -> None:
    flag = pl.col(ENROLLED)
    query = table.scan().select(
        flag.sum().alias("inside"), flag.null_count().alias("missing"), pl.len().alias("rows")
    )
    inside, missing, rows = table.collect(query).row(0)
    if missing:
        raise InputError(
            f"{table.path}: {ENROLLED!r} must be true or false in every row; {missing} are missing."
        )
    if inside == 0:
        raise InputError(f"{table.path}: no client of {rows} is enrolled: nobody is to be weighed.")


def _refuse_later(formula: str, later: Sequence[str]) -> None:
    named = [n for n in later if re.search(rf"(?<!\w){re.escape(n)}(?!\w)", formula)]
    if named:
        raise InputError(
            f"{some(map(repr, named))} stands only in the ledger: it is known after enrollment and "
            "cannot explain it. Leave it to the participation stage."
        )


def design_means(table: TableFile, design: Design) -> FloatArray:
    """Return the mean of each design column over the rows of a table, (q,)."""
    total, rows = np.zeros(len(design.terms)), 0
    for batch in table.batches(design.columns):
        coded = design.rows(batch, str(table.path))
        total, rows = total + coded.columns.sum(axis=1), rows + coded.columns.shape[1]
    return total / rows


def rich_design(coded: CodedTable, enrolled: int) -> Design:
    """Return columns, squares and products, as far as the enrolled allow.

    The rule is that of :meth:`Balance.rich`: 25 enrolled clients behind each moment.
    """
    plain, table = coded.design, coded.table
    numbers = [c for c in plain.columns if plain.kinds[c] == "number"]
    quoted = {c: f"`{c.replace('`', '``')}`" for c in plain.columns}
    many = table.collect(table.scan().select(pl.col(numbers).n_unique())).row(0) if numbers else ()
    squares = [f"{quoted[c]}**2" for c, n in zip(numbers, many, strict=True) if n > 2]
    pairs = [
        f"{quoted[a]}:{quoted[b]}"
        for i, a in enumerate(plain.columns)
        for b in plain.columns[i + 1 :]
    ]
    main = list(quoted.values())
    room = enrolled // CLIENTS_PER_MOMENT
    for terms in ([*main, *squares, *pairs], [*main, *squares], main):
        design = bound_design(
            " + ".join(terms), table.scan(), plain.columns, missing=plain.missing,
            where=str(table.path),
        )  # fmt: skip
        if len(design.terms) <= room:
            break
    return design


@final
@dataclass(frozen=True, eq=False)
class _Relabelled:
    """The rows of a population with other members enrolled."""

    inner: Partitions
    present: BoolArray  # of the members among the rows, in their order
    before: dict[int, int]  # members before a block, by its first row

    @classmethod
    def of(cls, inner: Partitions, present: BoolArray) -> _Relabelled:
        counts = inner.reduced(_members_in, _appended)
        before, total = {}, 0
        for start, members in counts:
            before[start], total = total, total + members
        if total != len(present):
            raise InputError(f"{total} members among the rows, {len(present)} in the table.")
        return cls(inner, present, before)

    @property
    def rows(self) -> int:
        return self.inner.rows

    def reduced(self, function: Callable[[Block], T], combine: Callable[[T, T], T]) -> T:
        return self.inner.reduced(lambda block: function(self._now(block)), combine)

    def _now(self, block: Block) -> Block:
        labels, first = block.labels.copy(), self.before[block.start]
        ones = np.flatnonzero(labels)
        labels[ones] = self.present[first : first + len(ones)]
        return block._replace(labels=labels)


def _members_in(block: Block) -> list[tuple[int, int]]:
    return [(block.start, int(np.count_nonzero(block.labels)))]


def _appended(a: list[Any], b: list[Any]) -> list[Any]:
    return a + b
