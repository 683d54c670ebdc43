r"""Invitation design: whom a server invites, with probabilities that it knows exactly.

Inviting clients in proportion to what they stand for makes the weights of a round nearly equal, and
a round's mean less noisy for the same number of invitations. The probability of every invitation is
in the ledger (``invite_prob``), so estimates stay what they were in the mean.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, Self, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, FloatArray, IntArray
    from fedipw.weighting.pipeline import Method

UNIFORM, PROPORTIONAL = "uniform", "proportional"
_LEAST_SCORE = 1e-9  # of the largest
_BITS = 62  # of a whole number that holds cumulative probabilities


@final
@dataclass(frozen=True, slots=True)
class InclusionProbabilities:
    r"""Inclusion probabilities in proportion to scores, within bounds.

    .. math:: a_i = \min\big(1, \max(f, \kappa s_i)\big), \qquad \sum_i a_i = m \qquad (I1)

    ``solved`` finds the one :math:`\kappa` for m of n units with scores s.

    Examples
    --------
    >>> design = InclusionProbabilities.solved(np.array([1.0, 1.0, 2.0, 36.0]), 2, floor=0.3)
    >>> design.prob(np.array([1.0, 1.0, 2.0, 36.0])).tolist()
    [0.3, 0.3, 0.4, 1.0]
    """

    scale: float  # kappa
    floor: float  # f

    @classmethod
    def solved(cls, scores: FloatArray, number: int, *, floor: float = 0.0) -> Self:
        """Return the probabilities of scores (n,) that sum to ``number``, none below ``floor``.

        The sum is piecewise linear in kappa and never falls, with a knot wherever a unit leaves the
        floor or reaches 1: the knots around the solution say which units lie between the bounds,
        and kappa is what the bounds leave over the sum of their scores.
        """
        size, s = len(scores), scores
        _check(s, number, floor)
        if number == size:
            return cls(np.inf, floor)
        knots = np.sort(np.concatenate([floor / s, 1.0 / s]))
        # the first knot at which enough are invited
        after = bisect_left(knots, True, key=lambda k: cls(k, floor).prob(s).sum() >= number)
        if after == 0:
            return cls(0.0, floor)  # the floor alone sums to the number
        low, high = knots[after - 1], knots[min(after, len(knots) - 1)]
        capped = 1.0 / s <= low
        between = ~capped & (floor / s <= low)
        full, moved = np.count_nonzero(capped), np.count_nonzero(between)
        rest = number - full - floor * (size - full - moved)
        kappa = rest / s[between].sum() if between.any() else high
        return cls(float(np.clip(kappa, low, high)), floor)

    @classmethod
    def of(cls, scores: FloatArray, number: int, relative_floor: float) -> Self:
        """Return the probabilities of a round: 1 for all if they are no more than ``number``.

        ``relative_floor`` is in units of the uniform probability.
        """
        size = len(scores)
        if size <= number:
            return cls(np.inf, 1.0)
        return cls.solved(scores, number, floor=relative_floor * number / size)

    def prob(self, scores: FloatArray) -> FloatArray:
        """Return a of units with these scores, (n,)."""
        if np.isinf(self.scale):
            return np.ones(len(scores))
        out: FloatArray = np.minimum(1.0, np.maximum(self.floor, self.scale * scores))
        return out


def _check(scores: FloatArray, number: int, floor: float) -> None:
    size = len(scores)
    if not 1 <= number <= size:
        raise InputError(f"{number} invitations cannot be sent to {size} clients, once to each.")
    if not 0.0 <= floor <= 1.0:
        raise InputError(f"The least probability must lie between 0 and 1, not {floor!r}.")
    if floor * size > number * (1.0 + 1e-12):
        raise InputError(
            f"Probabilities of at least {floor:g} for {size} clients sum to {floor * size:g} or "
            f"more, not to {number} invitations."
        )
    odd = ~(np.isfinite(scores) & (scores > 0.0))
    if odd.any():
        raise InputError(
            f"Scores must be finite and above 0; {int(odd.sum())} of {size} are not, such as "
            f"{float(scores[odd][0])!r}."
        )


def systematic_sample(prob: FloatArray, order: IntArray, start: float) -> IntArray:
    r"""Return a sample of exactly :math:`\sum a` units with inclusion probabilities a, in order.

    .. math:: i \in S \iff c_{i-1} \le u + j < c_i \text{ for some } j = 0, 1, \ldots, \qquad
       c_i = \sum_{k \le i} a_k \qquad (I2)

    with units in ``order`` (n,) and ``start`` u uniform in [0, 1). Probabilities must sum to a
    whole number. They are counted in whole multiples of a power of two that sum to it exactly, so
    that rounding neither changes the size of a sample nor takes a unit twice; a probability is
    kept to about 1e-12.

    Examples
    --------
    >>> systematic_sample(np.array([0.5, 0.25, 0.25, 1.0]), np.array([0, 1, 2, 3]), 0.6).tolist()
    [1, 3]
    """
    total = float(prob.sum())
    number, size = round(total), len(prob)
    if abs(total - number) > 1e-6 * max(1.0, total):
        raise InputError(f"Probabilities sum to {total:g}: a sample needs a whole number.")
    unit = 2 ** min(52, _BITS - max(number, size).bit_length())
    lengths = np.rint(prob[order] * unit).astype(np.int64)
    lack = number * unit - int(lengths.sum())  # by rounding: probabilities below 1 make up for it
    room = np.where(lengths < unit, unit - lengths if lack > 0 else lengths, 0)
    lengths += np.sign(lack) * np.diff(np.minimum(np.cumsum(room), abs(lack)), prepend=0)
    ends = np.cumsum(lengths)
    points = int(start * unit) + unit * np.arange(number, dtype=np.int64)
    chosen: IntArray = order[np.searchsorted(ends, points, side="right")]
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitations:
    """How many clients are invited in a round, and with which probabilities.

    ``uniform`` invites all alike, ``proportional`` in proportion to their enrollment weights.

    Parameters
    ----------
    kind
        ``uniform`` or ``proportional``.
    number
        Invitations a round; none for as many as the wrapped strategy would send.
    floor
        Least probability of an available client, relative to that of uniform invitations: in
        (0, 1], where 1 is uniform.
    rest
        A client is invited at most once in so many rounds; 1 for no limit.

    Examples
    --------
    >>> Invitations(number=200, rest=5)
    Invitations(kind='proportional', number=200, floor=0.1, rest=5)
    """

    kind: Literal["uniform", "proportional"] = "proportional"
    number: int | None = None
    floor: float = 0.1
    rest: int = 1

    def __post_init__(self) -> None:
        if self.kind not in {UNIFORM, PROPORTIONAL}:
            raise InputError(f"Invitations are uniform or proportional, not {self.kind!r}.")
        for name in ("number", "rest"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (value is None and name == "number") and (not whole or value < 1):
                raise InputError(f"{name} of invitations must be a whole number from 1 on, not "
                                 f"{value!r}.")  # fmt: skip
        if not 0.0 < self.floor <= 1.0:
            raise InputError(
                f"floor is relative to uniform invitations and lies in (0, 1], not {self.floor!r}."
            )

    @classmethod
    def of(cls, given: str | Invitations) -> Invitations:
        """Return invitations by their kind, or as they are."""
        if isinstance(given, Invitations):
            return given
        return cls(kind=given)  # type: ignore[arg-type]  # checked there

    @property
    def plain(self) -> bool:
        """Whether a strategy's own uniform sampling does all that is asked for."""
        return self.kind == UNIFORM and self.number is None and self.rest == 1

    def check_size(self, enrolled: int) -> None:
        """Raise if more are to be invited than are enrolled."""
        if self.number is not None and self.number > enrolled:
            raise InputError(
                f"{self.number} invitations a round are more than the {enrolled} enrolled clients: "
                "lower number."
            )

    def check_method(self, method: Method) -> None:
        """Raise if a method has no enrollment weights to invite by."""
        if self.kind == PROPORTIONAL and not method.weighs_enrollment:
            raise InputError(
                f"Proportional invitations follow enrollment weights, and {method.name} has none, "
                "or some below zero: name a method that corrects enrollment, such as augmented, or "
                "invite uniformly."
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Invited:
    """Who is invited in a round, of the clients that are available."""

    flags: BoolArray  # (n,)
    prob: FloatArray  # (n,) of an invitation before it was drawn
    probabilities: InclusionProbabilities  # behind it
    note: str = ""  # what could not be done as asked


@final
class InvitationDesign:
    r"""Draws invitations round by round, a function of seed, round and the available clients.

    With ``rest`` k > 1 every client belongs to one of k groups, drawn from seed and identifier, and
    round r invites among group r mod k alone: a client's invitations lie at least k rounds apart.
    Over the draw of groups and samples the probability of an invitation is

    .. math:: P(\text{invited}) = a_i / k \qquad (I3)

    with a (I1) among the available clients of the group. For those of other groups it is what it
    would be at the same kappa.

    Examples
    --------
    >>> design = InvitationDesign(Invitations(number=2), seed=1)
    >>> found = design.drawn(1, ["a", "b", "c"], np.array([1.0, 1.0, 2.0]), number=3)
    >>> found.prob.tolist(), int(found.flags.sum())
    ([0.5, 0.5, 1.0], 2)
    """

    def __init__(self, settings: Invitations, seed: int) -> None:
        self.settings, self.seed = settings, seed

    def drawn(
        self, index: int, unit_ids: Sequence[object], scores: FloatArray | None, number: int
    ) -> Invited:
        """Return the invitations of a round.

        Parameters
        ----------
        index
            The round.
        unit_ids
            Identifiers of the available clients, n.
        scores
            Their enrollment weights, (n,); none if not known yet: all count alike.
        number
            Invitations where the settings name none.
        """
        how, size = self.settings, len(unit_ids)
        if scores is None or how.kind == UNIFORM:
            scores = np.ones(size)
        check_rows(size, scores=scores)
        if size and (scores >= 0.0).all():  # without weight: invited at the floor
            scores = np.maximum(scores, _LEAST_SCORE * scores.max())
        candidates = np.flatnonzero(self.group(unit_ids) == index % how.rest)
        wanted = how.number or number
        design = InclusionProbabilities.of(scores[candidates], wanted, how.floor)
        flags, note = np.zeros(size, dtype=np.bool_), ""
        if len(candidates) > wanted:
            rng = np.random.default_rng([*f"{self.seed}/invitations/{index}".encode()])
            order = rng.permutation(len(candidates))
            prob = design.prob(scores[candidates])
            flags[candidates[systematic_sample(prob, order, rng.random())]] = True
        else:
            flags[candidates] = True
            if len(candidates) < wanted:
                of = f" of group {index % how.rest + 1} of {how.rest}" if how.rest > 1 else ""
                note = f"all {len(candidates)} available clients{of} are invited, not {wanted}"
        return Invited(flags, design.prob(scores) / how.rest, design, note)

    def group(self, unit_ids: Sequence[object]) -> IntArray:
        """Return the group of each client, 0 to k - 1, (n,)."""
        rest = self.settings.rest
        if rest == 1:
            return np.zeros(len(unit_ids), dtype=np.int64)
        drawn = (sha256(f"{self.seed}/group/{unit}".encode()).digest()[:8] for unit in unit_ids)
        return np.array([int.from_bytes(one, "big") % rest for one in drawn], dtype=np.int64)
