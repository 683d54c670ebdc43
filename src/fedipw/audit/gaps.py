"""Differences between the groups of an audit, and whether chance explains them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy.special import ndtri

from fedipw.evaluation.balance import ENROLLED_WEIGHTED, PARTICIPANTS, PARTICIPANTS_WEIGHTED
from fedipw.tables.population import ENROLLED

if TYPE_CHECKING:
    from fedipw.audit.parts import Audit, BalanceLine, BalancePart

SMD = 0.1  # standardised difference commonly called unbalanced
CHANCE = 0.01  # of calling a fair sample biased, over all columns together


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest difference of a group, and whether chance explains it."""

    size: float
    name: str
    chance: float  # difference a fair sample would exceed with probability CHANCE
    above: tuple[str, ...]  # columns beyond both limits, the largest first

    @property
    def biased(self) -> bool:
        """Whether some column is beyond both limits."""
        return bool(self.above)

    @property
    def words(self) -> str:
        """The size for people."""
        return "without limit" if math.isinf(self.size) else f"{self.size:.2f} standard deviations"


def gap_of(
    balance: BalancePart, group: str, units: float, against: str | None = None
) -> Gap | None:
    """Return the gap of a group of so many clients to the population, or to another group.

    There is none where the group, or every column, is unknown or hidden.
    """
    groups = {group} if against is None else {group, against}
    if not balance.lines or not groups <= {*balance.groups}:
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


def gaps(audit: Audit) -> tuple[Gap | None, Gap | None]:
    """Return the gap of the enrolled to the population, and of those who reply to the enrolled."""
    balance, sizes = audit.balance, audit.sizes
    if balance is None:
        return None, None
    left = 1.0 if sizes.population is None else max(1.0 - sizes.enrolled / sizes.population, 1e-9)
    return (
        gap_of(balance, ENROLLED, sizes.enrolled / left),
        gap_of(balance, PARTICIPANTS, sizes.clients_replied, against=ENROLLED),
    )


def weighted_gap(audit: Audit) -> Gap | None:
    """Return the gap that weights leave: of the replies, or of the enrolled without replies."""
    if audit.balance is None:
        return None
    replies = PARTICIPANTS_WEIGHTED in audit.balance.groups
    group = PARTICIPANTS_WEIGHTED if replies else ENROLLED_WEIGHTED
    units = audit.sizes.clients_replied if replies else audit.sizes.enrolled
    return gap_of(audit.balance, group, units / _design_effect(audit, replies=replies))


def enrolled_weighted_gap(audit: Audit) -> Gap | None:
    """Return the gap that weights leave between the enrolled and the population."""
    if audit.balance is None:
        return None
    units = audit.sizes.enrolled / _design_effect(audit, replies=False)
    return gap_of(audit.balance, ENROLLED_WEIGHTED, units)


def _design_effect(audit: Audit, *, replies: bool) -> float:
    wanted = "replies" if replies else "enrollment"
    return next((w.design_effect for w in audit.weights if w.name == wanted), 1.0)
