r"""A private round with noise: moments and updates of calibration as you go, in one noisy sum.

The vector of a client is that of :class:`~fedipw.private.calibration.RoundTerms`. Noise is scaled
to the longest vector of any client, so its parts are bounded by their Euclidean norms: a weight at
most :math:`W u`, standardised columns within a radius, an update no longer than the clip.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive
from fedipw.private.calibration import RoundTerms, RoundTotals
from fedipw.private.noise import Entropy, NoiseShare, NormedPart, NormedParts
from fedipw.private.sums import SumRequest, SumResult
from fedipw.weighting.online import OnlineSums

if TYPE_CHECKING:
    from fedipw.numerics import FloatArray

NOISY: Final = "train-noisy"  # the purpose of these sums
_PARTS: Final = ("weight", "first", "second", "update")
_CUT: Final = ("weight", "first", "update")  # beside which stands what was cut: weight, columns


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyTerms:
    r"""What a client adds to a round with noise, and what the server reads from the sum.

    .. math:: \Big[\frac{e_i}{W u},\; \frac{e_i b_i}{W u\, \rho},\; \frac{e_i b_i b_i'}{W u\,
       \rho^2},\; \frac{e_i c_i \Delta_i}{W u\, C}\Big], \qquad |b_i| \le \rho \qquad (N6)

    each part divided by the root of their number, so that the vector is no longer than 1. The noise
    of a part is then its bound times that of the vector: columns within a smaller radius, fewer of
    them, a smaller largest weight and a shorter clip all mean less noise, and more that is cut.
    The step divides the sum of weighted updates by the number of contributors times the mean weight
    u of earlier rounds, not by the noisy sum of weights, which may be close to zero. Columns beyond
    the radius are shortened to it. How many clients shortened a part is in the sum,
    with noise too.

    Examples
    --------
    >>> from fedipw.private.calibration import BalanceMap, TermLimits
    >>> balance = BalanceMap(names=("age",), mean=np.zeros(1), scale=np.ones(1))
    >>> terms = RoundTerms(balance=balance, coefficients=np.zeros(1), unit=1.0, parameters=2,
    ...                    limits=TermLimits(clip=1.0, largest_weight=4.0))
    >>> noisy = NoisyTerms(terms=terms, radius=2.0, multiplier=1.0, fewest=50)
    >>> round(noisy.noise_sd("update", 100), 1), round(noisy.noise_sd("second", 100), 1)
    (11.7, 46.8)
    """

    terms: RoundTerms
    radius: float  # rho, of standardised columns
    multiplier: float  # z
    fewest: int  # contributors below which a sum is not opened
    without: int = 0  # of them that may add no noise

    def __post_init__(self) -> None:
        check_positive(self.radius, "radius")
        if self.terms.augmented:
            raise InputError(
                "Noise for the products of columns and updates of an augmentation would be as many "
                "times larger as there are columns: leave it out."
            )

    @property
    def parts(self) -> NormedParts:
        """The layout of a client's vector."""
        how, q = self.terms.limits, len(self.terms.balance.names)
        most = how.largest_weight * self.terms.unit
        return NormedParts(
            weight=NormedPart(1, most),
            first=NormedPart(q, most * self.radius),
            second=NormedPart(q * (q + 1) // 2, most * self.radius**2),
            update=NormedPart(self.terms.parameters, most * how.clip),
        )

    @property
    def noise(self) -> NoiseShare:
        """The noise that each client adds its share of."""
        return NoiseShare(
            multiplier=self.multiplier, fewest=self.fewest, without=self.without,
            length=self.parts.length,
        )  # fmt: skip

    def noise_sd(self, part: str, contributors: int) -> float:
        """Return the standard deviation of the noise of a total, in its own units."""
        return self.parts.noise_sd(part, self.noise.sum_sd(contributors))

    @property
    def request(self) -> SumRequest:
        """The sum that clients are asked to add to."""
        own = {
            "radius": self.radius, "multiplier": self.multiplier, "fewest": self.fewest,
            "without": self.without,
        }  # fmt: skip
        public = {**self.terms.request.public, "noise": own}
        return SumRequest(
            purpose=NOISY, length=self.parts.length, bound=self.noise.bound, public=public
        )

    @classmethod
    def of(cls, public: Mapping[str, Any]) -> NoisyTerms:
        """Return the terms of a request, as a client reads them; InputError if they are none."""
        terms = RoundTerms.of(public)
        try:
            own = public["noise"]
            return cls(
                terms=terms, radius=float(own["radius"]), multiplier=float(own["multiplier"]),
                fewest=int(own["fewest"]), without=int(own["without"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"These are no terms of a round with noise: {error}.") from error

    def vector(self, base: float, b: FloatArray, update: FloatArray) -> FloatArray:
        """Return a client's vector before noise, no longer than 1; see ``contribution``."""
        length = float(np.linalg.norm(b))
        near = b if length <= self.radius else b * (self.radius / length)
        made = self.terms.parts.unpacked(self.terms.contribution(base, near, update))
        beyond = np.array([made["cut"][0], length > self.radius, made["cut"][2]]) > 0.0
        cut = [name for name, over in zip(_CUT, beyond, strict=True) if over]
        return self.parts.packed({name: made[name] for name in _PARTS}, cut)

    def contribution(
        self, base: float, b: FloatArray, update: FloatArray, source: Entropy = os.urandom
    ) -> FloatArray:
        """Return what a client adds: its vector on the grid, with its share of the noise.

        Parameters
        ----------
        base
            Its base weight d.
        b
            Its standardised balance columns, (q,).
        update
            Its update, (P,).
        source
            Of unpredictable bytes; another one is for tests alone.
        """
        return self.noise.added(self.vector(base, b, update), source)

    def totals(self, found: SumResult) -> RoundTotals:
        """Return the noisy totals of a sum that was opened."""
        return self.read(self.noise.opened(found), found.contributors)

    def read(self, total: FloatArray, contributors: int) -> RoundTotals:
        """Return the totals in a noisy vector, (length,); counts of what was cut are rounded."""
        (values, clipped), q = self.parts.unpacked(total), len(self.terms.balance.names)
        second = np.zeros((q, q))
        second[np.triu_indices(q)] = values["second"]
        cut = [round(clipped[name]) for name in _CUT]
        count = float(values["weight"][0])
        if not count > 0.0:
            raise InputError(
                f"Noise left a sum of weights of {count:.4g}, which is none: the round has no step."
            )
        full = second + np.triu(second, 1).T
        return RoundTotals(
            online=OnlineSums(count=count, first=values["first"], second=full),
            square=np.nan, cut=(cut[0], cut[1], cut[2]), update=values["update"], cross=None,
            contributors=contributors, clipped=0, tolerance=0.0, efficiency=np.nan,
            mean_columns=values["first"] / count,
            step=values["update"] / (contributors * self.terms.unit),
        )  # fmt: skip
