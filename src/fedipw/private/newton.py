r"""Participation fitted over rows that stay with the clients they are about.

A client keeps its own rows: covariates of the rounds it was in, and whether it replied. At a point
:math:`\beta` that the server sends, it adds its score, its Hessian and its log-likelihood to a
secure sum when it is next reachable. The server takes Newton's step from the totals. It is the fit
of :func:`~fedipw.selection.logistic.logistic_fit`, with clients as partitions: the same code, the
same stop, and without loss the same coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from fedipw.errors import InputError, SeparationError
from fedipw.numerics.checks import check_rows
from fedipw.numerics.logistic import ColumnSums, column_sums
from fedipw.private.sums import Part, Parts, SecureSums, SumNotOpenedError, SumRequest, SumResult
from fedipw.selection.logistic import SUSPECT, Counts, LogisticFit, fitted
from fedipw.tables.partitions import Block, Frame

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray

PARTICIPATION: Final = "participation"  # the purpose of these sums
_ENDED: Final = 1e-12  # a Newton step whose decrement is this small needs no further exchange
_TINY: Final = 1e-7  # a margin that counts as zero, for columns within 1 of zero


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPlan:
    """What clients are told about the columns of their rows, the same for all and for all passes.

    Bounds are public and do not come from anybody's data. A value outside of the range of its
    column is cut to it by the client, and rows beyond ``most_rows`` are left out, the oldest first;
    the sums count both.
    """

    names: tuple[str, ...]
    low: FloatArray  # (q,)
    high: FloatArray  # (q,)
    most_rows: int  # of a client

    def __post_init__(self) -> None:
        check_rows(len(self.names), low=self.low, high=self.high)
        if not (np.isfinite(self.low) & np.isfinite(self.high) & (self.low < self.high)).all():
            raise InputError("Every column needs a finite range with its low end below its high.")
        if self.most_rows < 1:
            raise InputError(f"A client needs room for at least one row, not {self.most_rows!r}.")

    @property
    def frame(self) -> Frame:
        """The change of columns that takes their ranges to -1 to 1."""
        return Frame(0.5 * (self.low + self.high), 0.5 * (self.high - self.low))

    def request(self, number: int, beta: FloatArray, move: FloatArray) -> SumRequest:
        """Return what a pass asks for at a point, (q + 1,), reached by a move, (q + 1,)."""
        public = {
            "pass": number, "opened": 0, "beta": beta.tolist(), "move": move.tolist(),
            "low": self.low.tolist(), "high": self.high.tolist(), "most_rows": self.most_rows,
        }  # fmt: skip
        return SumRequest(purpose=PARTICIPATION, length=_parts(public).length, public=public)


def _parts(public: Mapping[str, Any]) -> Parts:
    r"""Return the parts of a contribution, with bounds that hold whatever the rows are.

    With |x| at most 1 the log odds are at most :math:`|\beta|_1`, a row's loss is at most that and
    log 2, its score at most 1, and its curvature at most 1/4.
    """
    size, most = len(public["beta"]), float(public["most_rows"])
    odds = float(np.abs(public["beta"]).sum())
    return Parts(
        value=Part(1, most * (odds + np.log(2.0))),
        gradient=Part(size, most),
        hessian=Part(size * (size + 1) // 2, 0.25 * most),
        counts=Part(2, most),
        margins=Part(4, most),
        extreme=Part(1, 1.0),
        cut=Part(1, most * size),
        left_out=Part(1, _MOST_LEFT_OUT),
    )


_MOST_LEFT_OUT: Final = 2.0**31


def likelihood_contribution(request: SumRequest, rows: Block) -> FloatArray:
    r"""Return what a client adds to a pass: its sums of (P1), its counts, and its margins.

    ``rows`` are the client's own, columns (q, m) in their own units, the newest last. Beside the
    likelihood it counts on which side of two directions its rows lie, those of :math:`\beta` and of
    the last step: if in a total no row lies on the wrong side, that direction separates.

    Examples
    --------
    >>> plan = RowPlan(names=("x",), low=np.zeros(1), high=np.ones(1), most_rows=10)
    >>> rows = Block(np.array([[0.0, 0.5, 1.0]]), np.array([0, 1, 1], np.int8), np.empty(0))
    >>> request = plan.request(1, np.zeros(2), np.zeros(2))
    >>> added = likelihood_contribution(request, rows)
    >>> np.allclose(added[0] * 10 * np.log(2), 3 * np.log(2)), added.max().round(2)
    (True, np.float64(0.3))
    """
    public = request.public
    beta, move = (np.array(public[name], dtype=np.float64) for name in ("beta", "move"))
    low, high = (np.array(public[name], dtype=np.float64) for name in ("low", "high"))
    if rows.columns.shape[0] + 1 != len(beta):
        raise InputError(
            f"Rows of {rows.columns.shape[0]} columns, and a point of {len(beta) - 1} and a "
            "constant: they belong to different formulas."
        )
    if not np.isfinite(rows.columns).all():
        raise InputError("A row has values that are missing or infinite: leave it out.")
    last = slice(max(rows.rows - int(public["most_rows"]), 0), None)
    columns, labels = rows.columns[:, last], rows.labels[last]
    inside = np.clip(columns, low[:, None], high[:, None])
    frame = Frame(0.5 * (low + high), 0.5 * (high - low))
    inside_frame = np.ascontiguousarray(frame.standard(inside.copy()))
    at = column_sums(inside_frame, labels, np.empty(0), beta)
    sides = [_sides(inside_frame, labels, gamma) for gamma in (beta, move)]
    return _parts(public).packed(
        value=np.array([at.value]),
        gradient=at.gradient,
        hessian=at.hessian[np.tril_indices(len(beta))],
        counts=np.array([len(labels), np.count_nonzero(labels)], dtype=np.float64),
        margins=np.concatenate(sides),
        extreme=np.array([float(at.largest > SUSPECT)]),
        cut=np.array([float(np.count_nonzero(inside != columns))]),
        left_out=np.array([float(min(rows.rows - len(labels), _MOST_LEFT_OUT))]),
    )


def _sides(columns: FloatArray, labels: Any, gamma: FloatArray) -> FloatArray:
    """Return how many rows lie on the right and on the wrong side of a direction, (2,)."""
    largest = float(np.abs(gamma).max())
    if not largest > 0.0:
        return np.array([0.0, float(len(labels))])  # separates nothing
    margin = (gamma[:-1] @ columns + gamma[-1]) / largest * (2.0 * labels - 1.0)
    return np.array([np.count_nonzero(margin > _TINY), np.count_nonzero(margin < -_TINY)], float)


@final
class OncePerPass:
    """A client's side: its rows, added once to every pass however often it is asked.

    A pass may take several secure sums, one for each time that some clients are reachable. The
    request says how many of them were opened so far. Where that number has grown since the client
    sent its vector, it is in, or lost; else its sum was not opened, and it sends the vector again.
    So no client counts twice. One that drops out while its sum is formed is missing in that pass.
    """

    def __init__(self, rows: Block) -> None:
        self.rows = rows
        self._sent = (0, 0)  # pass, and sums opened before

    def __call__(self, request: SumRequest) -> FloatArray | None:
        """Return the client's vector, or none if this pass has it."""
        number, opened = int(request.public["pass"]), int(request.public["opened"])
        if self._sent[0] == number and opened > self._sent[1]:
            return None
        self._sent = number, opened
        return likelihood_contribution(request, self.rows)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One sum over the clients, at one point: who is in it, and what they left out of it."""

    clients: int
    rows: int
    cut: int  # values outside of their column's range
    left_out: int  # rows beyond the most of a client
    sums: int  # secure sums it took, one a time that clients were reachable
    not_opened: int  # of them, with too few clients


@final
class ClientRows:
    """Rows that stay with clients, known to a fit by secure sums.

    Parameters
    ----------
    sums
        Secure sums over the clients that are reachable, each of whom has part in a pass once
        (:class:`OncePerPass`).
    plan
        Columns, their ranges, and the most rows of a client.
    clients
        How many there are in all. A pass ends when so many have answered.
    patience
        Most secure sums of a pass. What is missing then stays missing, and is reported.
    fewest
        Clients in a pass below which there is no fit.
    """

    def __init__(
        self, sums: SecureSums, plan: RowPlan, *, clients: int, patience: int = 1, fewest: int = 10
    ) -> None:
        if patience < 1 or clients < 1:
            raise InputError("A pass needs at least one client and one sum.")
        self.plan, self.passes = plan, list[Pass]()
        self._sums, self.clients = sums, clients
        self._patience, self._fewest = patience, fewest
        self._before: FloatArray | None = None
        self._value_error = 0.0

    @property
    def value_error(self) -> float:
        """What coding adds to the mean log-likelihood; any amount where rows came or went."""
        if len(self.passes) > 1 and self.passes[-1].rows != self.passes[-2].rows:
            return np.inf
        return self._value_error

    def counts(self) -> Counts:
        """Return the number of rows, by a pass at zero."""
        return self.sums(np.zeros(len(self.plan.names) + 1))[1]

    def sums(self, beta: FloatArray) -> tuple[ColumnSums, Counts]:
        """Return the sums of a pass; SeparationError where its counts prove separation."""
        before = np.zeros_like(beta) if self._before is None else self._before
        request = self.plan.request(len(self.passes) + 1, beta, beta - before)
        self._before = beta.copy()
        total, error = self._passed(request)
        found = _parts(request.public).unpacked(total)
        value_bound = float(self.plan.most_rows * (np.abs(beta).sum() + np.log(2.0)))
        rows, selected = (round(float(x)) for x in found["counts"])
        self._value_error = 2.0 * error * value_bound / max(rows, 1)
        self._check_separation(found["margins"].round(), request, rows)
        size = len(beta)
        hessian = np.zeros((size, size))
        hessian[np.tril_indices(size)] = found["hessian"]
        # a maximum is no sum: whether any client is beyond what looks like separation is one
        largest = np.inf if found["extreme"].round()[0] else 0.0
        full = hessian + np.tril(hessian, -1).T
        sums = ColumnSums(float(found["value"][0]), found["gradient"], full, largest)
        return sums, Counts(rows, float(rows), float(selected))

    def separating(self, kept: BoolArray) -> tuple[int, ...]:
        """Return none: a pass whose counts prove separation has ended the fit."""
        del kept
        return ()

    def _passed(self, request: SumRequest) -> tuple[FloatArray, float]:
        """Return the total of a pass and the bound on the coding error of its coordinates."""
        total, clients, error, made, not_opened = np.zeros(request.length), 0, 0.0, 0, 0
        while made < self._patience and clients < self.clients:
            made += 1
            public = {**request.public, "opened": made - 1 - not_opened}
            try:
                found = self._sums.sum(replace(request, public=public))
            except SumNotOpenedError:
                not_opened += 1
                continue
            _check_bounds(found)
            total, clients = total + found.total, clients + found.contributors
            error += found.error
        if clients < self._fewest:
            raise SumNotOpenedError(
                f"{clients} clients answered in {made} sums of a pass, fewer than {self._fewest}: "
                "there is no fit of participation. Wait longer (patience), or use the base of "
                "known invitation probabilities."
            )
        parts = _parts(request.public).unpacked(total)
        rows, cut, left_out = (
            round(float(parts[name][0])) for name in ("counts", "cut", "left_out")
        )
        self.passes.append(
            Pass(clients=clients, rows=rows, cut=cut, left_out=left_out, sums=made,
                 not_opened=not_opened)
        )  # fmt: skip
        return total, error

    def _check_separation(self, margins: FloatArray, request: SumRequest, rows: int) -> None:
        for (right, wrong), key in zip(margins.reshape(2, 2), ("beta", "move"), strict=True):
            if wrong == 0.0 and right > 0.0:
                gamma = np.abs(request.public[key])
                used = gamma[:-1] > _TINY * gamma.max()
                raise SeparationError(
                    tuple(n for n, u in zip(self.plan.names, used, strict=True) if u), rows
                )


def _check_bounds(found: SumResult) -> None:
    if found.clipped:
        raise InputError(
            f"{found.clipped} numbers of a pass were beyond bounds that hold for all rows within "
            "the plan: a client does not follow it."
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrivateFit:
    """A participation fit by secure sums, and what it could not see.

    ``fit`` is exactly the pooled fit over the rows that took part. A client that never answers has
    no row in it, and those are the rows without replies: probabilities are then those among clients
    that answer, and too high for all enrolled.
    """

    fit: LogisticFit
    passes: tuple[Pass, ...]
    clients: int  # listed

    @property
    def answered(self) -> int:
        """Clients in the pass with fewest of them."""
        return min(found.clients for found in self.passes)

    @property
    def steady(self) -> bool:
        """Whether all passes had the same number of clients and rows."""
        return len({(found.clients, found.rows) for found in self.passes}) == 1

    def missing(self, *, invited: int, replied: int) -> MissingRows:
        """Return the rows that are not in the fit, of those the server knows of by its own record.

        ``invited`` and ``replied`` count the server's invitations and replies of the same rounds.
        """
        last = self.passes[-1]
        return MissingRows(
            clients=self.clients - last.clients,
            rows=invited - last.rows,
            replies=replied - round(self.fit.selected),
            rate=self.fit.selected / max(last.rows, 1),
            rate_of_all=replied / invited if invited else np.nan,
            steady=self.steady,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRows:
    """What a fit by secure sums left out, from counts that the server has anyway."""

    clients: int  # listed, and not in the last pass
    rows: int  # invitations without a row
    replies: int  # of these
    rate: float  # of replies among the rows in the fit
    rate_of_all: float  # among all invitations
    steady: bool  # whether all passes had the same number of clients and rows

    @property
    def note(self) -> str:
        """What this means for probabilities; empty where nothing is missing."""
        if not self.rows and not self.clients and self.steady:
            return ""
        mixed = "" if self.steady else " Passes had different clients: it is the fit of none."
        return (
            f"{self.clients} clients and {self.rows} invitations with {self.replies} replies are "
            f"not in the participation fit: its rate of replies is {self.rate:.4g}, that of all "
            f"invitations {self.rate_of_all:.4g}. Its probabilities are those among clients that "
            f"answer.{mixed}"
        )


def private_fit(
    rows: ClientRows, *, max_iter: int = 25, decrement_tol: float = _ENDED
) -> PrivateFit:
    r"""Fit participation over rows that stay with clients.

    .. math:: \beta^{+} = \beta - \Big(\sum_i H_i(\beta)\Big)^{-1} \sum_i g_i(\beta) \qquad (N1)

    with the Hessian and score of client i in (P1), added by secure sums. Rounding moves the total
    score by at most n times :math:`\tfrac12 h + 2^{-52} B` for n clients (M1), and coefficients by
    the inverse Hessian times that: use 64-bit words.

    Separation is not searched for, as no row can be seen, but it is proved where it shows: a pass
    counts the rows on the wrong side of the present point and of the last step, and none on the
    wrong side is a proof. The columns it names may be more than the fewest.

    Parameters
    ----------
    rows
        The clients' rows, behind secure sums.
    max_iter
        Limit on Newton steps; each is an exchange with all clients.
    decrement_tol
        A step whose decrement is this small is taken without another exchange. Where other clients
        answer in every pass, the step does not become small, and the fit is not converged.

    Examples
    --------
    >>> from fedipw.private.sums import LocalSums
    >>> rng, clients = np.random.default_rng(0), []
    >>> for _ in range(40):
    ...     x = rng.uniform(-1.0, 1.0, (1, 9))
    ...     replied = (rng.random(9) < 1.0 / (1.0 + np.exp(-x[0]))).astype(np.int8)
    ...     keeper = OncePerPass(Block(x, replied, np.empty(0)))
    ...     clients.append({PARTICIPATION: keeper})
    >>> plan = RowPlan(names=("x",), low=-np.ones(1), high=np.ones(1), most_rows=9)
    >>> store = ClientRows(LocalSums(clients, minimum=10, bits=64), plan, clients=40)
    >>> found = private_fit(store)
    >>> found.fit.converged, found.answered, found.fit.rows
    (True, 40, 360)
    """
    names = rows.plan.names
    fit = fitted(rows, names, frame=rows.plan.frame, max_iter=max_iter, decrement_tol=decrement_tol)
    return PrivateFit(fit=fit, passes=tuple(rows.passes), clients=rows.clients)
