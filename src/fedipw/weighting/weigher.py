"""The weigher: told of each round before it opens and after it closes, it hands out weights."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, final

from fedipw.errors import InputError
from fedipw.numerics.checks import check_rows
from fedipw.weighting.functions import trimmed
from fedipw.weighting.rounds import RoundOpening, RoundReplies, RoundWeights
from fedipw.weighting.schemes import Scheme, weighed

if TYPE_CHECKING:
    from fedipw.numerics.types import BoolArray
    from fedipw.weighting.sources import Propensities


class _Phase(Enum):
    BETWEEN = "between rounds"
    OPEN = "open"


@final
class Weigher:
    """Weights of a round's replies under one or more schemes that share their probabilities.

    Every engine uses it the same way, round after round:

    1. ``open`` with what is known before the round;
    2. ``weights`` with who replied, unless nobody did;
    3. ``close`` with who replied.

    Parameters
    ----------
    propensities
        The source of probabilities.
    schemes
        Schemes by name.
    trim
        Cut weights at this multiple of the round's mean weight (W7); off by default.

    Examples
    --------
    >>> import numpy as np
    >>> from fedipw.weighting import HorvitzThompson, Known, RoundOpening
    >>> from fedipw.weighting.sources import Units
    >>> units = Units(unit_ids=np.array(["a", "b", "c"]), sample_counts=np.ones(3, dtype=int),
    ...               enrolled=np.array([True, True, False]), static=np.empty((3, 0)),
    ...               enrollment_prob=np.array([0.5, 0.8, 0.5]))
    >>> weigher = Weigher(Known(units), {"oracle": HorvitzThompson(3)})
    >>> weigher.open(RoundOpening(index=1, covariates=np.empty((2, 0)),
    ...                           participation_prob=np.array([0.4, 0.5])))
    >>> weigher.weights(np.array([True, False]))["oracle"].weights  # 1 / (3 * 0.5 * 0.4)
    array([1.66666667])
    >>> weigher.close(np.array([True, False]))
    """

    def __init__(
        self,
        propensities: Propensities,
        schemes: Mapping[str, Scheme],
        *,
        trim: float | None = None,
    ) -> None:
        self.propensities, self.schemes, self.trim = propensities, dict(schemes), trim
        self._phase = _Phase.BETWEEN

    def open(self, opening: RoundOpening) -> None:
        """Take what is known before a round."""
        if self._phase is _Phase.OPEN:
            raise InputError(f"Round {opening.index} opens while another is open: close it first.")
        if opening.rows is None:
            enrolled = int(self.propensities.units.enrolled.sum())
            check_rows(enrolled, covariates=opening.matrix())
        self.propensities.open(opening)
        self._phase = _Phase.OPEN

    def weights(self, replied: BoolArray) -> dict[str, RoundWeights]:
        """Return each scheme's weights of the replies; ``replied`` is (n,) over the enrolled."""
        self._require_open()
        replies = self.propensities.replies(replied)
        return {name: self._weighted(scheme, replies) for name, scheme in self.schemes.items()}

    def close(self, replied: BoolArray) -> None:
        """Take the replies of the round, none included."""
        self._require_open()
        self.propensities.close(replied)
        self._phase = _Phase.BETWEEN

    def _weighted(self, scheme: Scheme, replies: RoundReplies) -> RoundWeights:
        weights, note = weighed(scheme, replies)
        if not weights.any():
            note = "no reply carries weight"
        if self.trim is None:
            return RoundWeights(replies=replies, weights=weights, note=note)
        report = trimmed(weights, self.trim)
        return RoundWeights(replies=replies, weights=report.weights, trimming=report, note=note)

    def _require_open(self) -> None:
        if self._phase is not _Phase.OPEN:
            raise InputError("No round is open: call open() first.")

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs; only between rounds."""
        if self._phase is _Phase.OPEN:
            raise InputError("A round is open: state is saved between rounds.")
        return self.propensities.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        self.propensities.restore(state)
