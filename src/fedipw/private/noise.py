r"""Gaussian noise that clients add to their part of a secure sum, and what it costs.

No party has to be trusted with the noise: each client adds a share of it before its vector is
masked, and the server opens a sum that is noisy already. Noise is drawn on a grid, so that the
rounding of secure sums takes nothing from it, and from the operating system's generator
(``os.urandom``). NumPy's generators are made for simulations: who knows some of their output, such
as the noise of a coordinate known to be zero, can compute the rest of it and subtract it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedipw.numerics import FloatArray
    from fedipw.private.sums import SumResult

Entropy: TypeAlias = Callable[[int], bytes]  # so many unpredictable bytes
_STEPS: Final = 64.0  # of the grid in the standard deviation of a share, at least
_ROUNDED: Final = 50.0  # rounding to the grid adds one part in twice this to a client's norm
_TAIL: Final = 12.0  # standard deviations beyond which noise is never drawn
_FLAG: Final = 0.25  # of a part that was clipped, in units of the norm of a part


def discrete_gaussian(size: int, sd: float, source: Entropy = os.urandom) -> NDArray[np.int64]:
    r"""Return whole numbers with the discrete Gaussian distribution, (size,).

    .. math:: P(k) \propto e^{-k^2 / 2 \sigma^2}, \qquad k = 0, \pm 1, \pm 2, \ldots

    By rejection from a discrete Laplace distribution (Canonne, Kamath and Steinke 2020), with
    uniform numbers of 53 bits in place of exact ones: the distribution is off by about
    :math:`2^{-50}`. ``source`` is for tests alone: noise that can be repeated protects nothing.

    >>> draws = discrete_gaussian(20_000, 64.0)
    >>> bool(abs(draws.mean()) < 3.0), bool(abs(draws.std() / 64.0 - 1.0) < 0.04)  # by chance 1e-9
    (True, True)
    """
    check_positive(sd, "sd")
    scale = float(np.floor(sd) + 1.0)
    out: list[NDArray[np.int64]] = []
    missing = size
    while missing > 0:
        tries = 2 * missing + 16
        uniform = (_uniforms(3 * tries, source)).reshape(3, tries)
        magnitude = np.floor(-scale * np.log(uniform[0]))
        negative = uniform[1] < 0.5
        accept = np.exp(-((magnitude - sd**2 / scale) ** 2) / (2.0 * sd**2))
        # zero has two signs, and counts once
        kept = (uniform[2] < accept) & ~(negative & (magnitude == 0.0))
        drawn = np.where(negative, -magnitude, magnitude)[kept].astype(np.int64)[:missing]
        out.append(drawn)
        missing -= len(drawn)
    return np.concatenate(out) if out else np.empty(0, dtype=np.int64)


def _uniforms(size: int, source: Entropy) -> FloatArray:
    """Return numbers strictly between 0 and 1, (size,)."""
    words = np.frombuffer(source(8 * size), dtype="<u8") >> np.uint64(11)
    out: FloatArray = (words.astype(np.float64) + 0.5) * 2.0**-53
    return out


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseShare:
    r"""A client's share of the noise of a sum in which no vector is longer than 1.

    Each client rounds its vector to a grid of step g and adds discrete Gaussian noise of variance
    :math:`\tau^2`,

    .. math:: \tau = \frac{z\, (1 + \tfrac12 g \sqrt L)}{\sqrt{k - c}}, \qquad
       \text{sd of the sum of n} = \tau \sqrt n \ge z\, (1 + \tfrac12 g \sqrt L)
       \;\text{ for }\; n \ge k - c. \qquad (N5)

    A sum is opened for at least k contributors, so that it has its noise whoever drops out, even if
    c of them add none or reveal theirs. The price is the factor :math:`\sqrt{n / (k - c)}`: choose
    k close to the number that usually answer. One client's vector, rounded, is no longer than
    :math:`1 + \tfrac12 g \sqrt L`, so the sum is a Gaussian mechanism of multiplier z. The sum of n
    discrete Gaussians is not one exactly; with :math:`\tau \ge 64 g` what that adds to its
    Rényi divergences is below :math:`10 n e^{-2 \pi^2 \cdot 64^2 / 2}`, nothing (Kairouz, Liu and
    Steinke 2021, theorem 1).

    Examples
    --------
    >>> noise = NoiseShare(multiplier=1.0, fewest=100, length=3)
    >>> f"{noise.share_sd:.3f}", f"{noise.sum_sd(400):.2f}"
    ('0.100', '2.00')
    >>> sent = noise.added(np.array([0.6, 0.0, 0.8]))
    >>> bool((np.abs(sent / noise.grid - np.rint(sent / noise.grid)) < 1e-6).all())
    True
    """

    multiplier: float  # z
    fewest: int  # k, contributors below which a sum is not opened
    length: int  # L
    without: int = 0  # c, of them that may add no noise

    def __post_init__(self) -> None:
        check_positive(self.multiplier, "multiplier")
        if not 0 <= self.without < self.fewest or self.length < 1:
            raise InputError(
                f"Noise is shared by {self.fewest} contributors less {self.without} that may add "
                f"none, in {self.length} coordinates: all must leave at least one."
            )

    @property
    def honest(self) -> int:
        """Contributors that add their share, at least."""
        return self.fewest - self.without

    @property
    def grid(self) -> float:
        """The step g: a share's deviation over 64, less for long vectors or much noise."""
        share = self.multiplier / np.sqrt(self.honest)
        return float(min(share / _STEPS, 1.0 / (_ROUNDED * np.sqrt(self.length))))

    @property
    def sensitivity(self) -> float:
        """Longest vector of a client after rounding."""
        return float(1.0 + 0.5 * self.grid * np.sqrt(self.length))

    @property
    def share_sd(self) -> float:
        """Standard deviation of a client's noise in each coordinate."""
        return float(self.multiplier * self.sensitivity / np.sqrt(self.honest))

    @property
    def bound(self) -> float:
        """On coordinates with their noise, for the request; noise is never that large."""
        return float(1.0 + self.grid + _TAIL * self.share_sd)

    def sum_sd(self, contributors: int) -> float:
        """Return the standard deviation of the noise of a sum, if all add their share."""
        return float(self.share_sd * np.sqrt(contributors))

    def added(self, vector: FloatArray, source: Entropy = os.urandom) -> FloatArray:
        """Return a client's vector on the grid with its noise, (L,)."""
        if vector.shape != (self.length,):
            raise InputError(f"A vector of shape {vector.shape} is not one of {self.length}.")
        if not float(np.linalg.norm(vector)) <= 1.0 + 1e-9:
            raise InputError(
                f"A vector of length {np.linalg.norm(vector):.4g} is to be hidden by noise for "
                "length 1: scale it, and clip it (NormedParts)."
            )
        noise = discrete_gaussian(self.length, self.share_sd / self.grid, source)
        whole = np.rint(vector / self.grid) + noise.astype(np.float64)
        out: FloatArray = whole * self.grid
        return out

    def opened(self, result: SumResult) -> FloatArray:
        """Return the noisy total of a sum on the grid, where rounding has no part in it, (L,).

        InputError if it is of too few, rounded too coarsely, or larger than any clients can have.
        """
        if result.contributors < self.fewest:
            raise InputError(
                f"{result.contributors} contributors, and noise for {self.fewest}: this sum must "
                "not be used."
            )
        if result.clipped or not result.error < 0.5 * self.grid:
            raise InputError(
                f"Secure sums round by up to {result.error:.2g} and the noise has a grid of "
                f"{self.grid:.2g}; {result.clipped} numbers were cut. Use words of 64 bits and the "
                "bound of the noise."
            )
        most = result.contributors + _TAIL * self.sum_sd(result.contributors)
        if float(np.abs(result.total).max()) > most:
            raise InputError(
                f"a total of {np.abs(result.total).max():.4g} is more than {result.contributors} "
                f"vectors of length 1 and their noise can have, {most:.4g}: a client sent "
                "something else"
            )
        out: FloatArray = np.rint(result.total / self.grid) * self.grid
        return out


class NormedPart(NamedTuple):
    """Numbers of one kind in a vector: how many, and the largest Euclidean norm of them."""

    length: int
    norm: float


class Unpacked(NamedTuple):
    """A sum by its parts, and how many clients shortened each: an estimate, as it has noise."""

    values: dict[str, FloatArray]
    clipped: dict[str, float]


@final
class NormedParts:
    r"""Several kinds of numbers in one vector of length at most 1, each with its own norm.

    A part beyond its norm :math:`C_j` is shortened to it by the client, and a flag beside it says
    so. With K parts the vector holds :math:`x_j / (C_j \sqrt{K (1 + 1/16)})`, so that the noise of
    a part is proportional to its own norm:
    :math:`C_j \sqrt{K (1 + 1/16)}` times that of the vector.

    Examples
    --------
    >>> parts = NormedParts(update=NormedPart(2, 5.0), moments=NormedPart(1, 1.0))
    >>> vector = parts.packed({"update": np.array([30.0, 40.0]), "moments": np.array([0.5])})
    >>> bool(np.linalg.norm(vector) <= 1.0)
    True
    >>> values, clipped = parts.unpacked(vector)
    >>> values["update"].round(9), round(clipped["update"], 9), clipped["moments"]
    (array([3., 4.]), 1.0, 0.0)
    """

    def __init__(self, **parts: NormedPart) -> None:
        for name, part in parts.items():
            check_positive(part.norm, f"norm of {name}")
        self._parts = dict(parts)
        self._unit = float(1.0 / np.sqrt(len(parts) * (1.0 + _FLAG**2)))

    @property
    def length(self) -> int:
        """Coordinates in all, the flags of parts among them."""
        return sum(part.length + 1 for part in self._parts.values())

    def packed(self, values: Mapping[str, FloatArray], cut: Collection[str] = ()) -> FloatArray:
        """Return a client's vector, (length,), with parts beyond their norm shortened.

        ``cut`` names parts that were shortened before.
        """
        out: list[FloatArray] = []
        for name, part in self._parts.items():
            own = np.ravel(values[name]).astype(np.float64)
            size = float(np.linalg.norm(own))
            if own.shape != (part.length,) or not np.isfinite(size):
                raise InputError(f"{name}: {part.length} finite numbers, not {own.shape[0]}.")
            over = size > part.norm or name in cut
            out += [own * self._unit / max(size, part.norm), np.array([_FLAG * self._unit * over])]
        return np.concatenate(out)

    def summed(self, sums: Mapping[str, FloatArray], cut: Mapping[str, float]) -> FloatArray:
        """Return the sum of vectors whose parts add up to these, none of them beyond its norm.

        ``cut`` says how many clients shortened a part before. For simulations: no single vector is
        needed.
        """
        out: list[FloatArray] = []
        for name, part in self._parts.items():
            flag = np.array([_FLAG * self._unit * cut[name]])
            out += [np.ravel(sums[name]) * (self._unit / part.norm), flag]
        return np.concatenate(out)

    def unpacked(self, total: FloatArray) -> Unpacked:
        """Return the values of a sum by part, and the number of clients that shortened theirs."""
        if total.shape != (self.length,):
            raise InputError(f"A vector of shape {total.shape} is not one of {self.length} parts.")
        values, clipped, start = {}, {}, 0
        for name, part in self._parts.items():
            end = start + part.length
            values[name] = total[start:end] * (part.norm / self._unit)
            clipped[name] = float(total[end]) / (_FLAG * self._unit)
            start = end + 1
        return Unpacked(values, clipped)

    def noise_sd(self, name: str, sum_sd: float) -> float:
        """Return the standard deviation of a part's noise, where that of the vector is given."""
        return float(sum_sd * self._parts[name].norm / self._unit)


@lru_cache(maxsize=256)
def epsilon_spent(multiplier: float, sums: int, delta: float) -> float:
    """Return the epsilon of so many noisy sums at delta, by Rényi accounting.

    The accountant is Google's ``dp-accounting``, the one behind
    :class:`~fedipw.flower.privacy.NoisySums`. Every sum is a Gaussian mechanism, and each counts
    for every client: there is no amplification by sampling, since who takes part is not secret.

    >>> round(epsilon_spent(10.0, 100, 1e-5), 2)
    4.73
    """
    check_positive(multiplier, "multiplier")
    if not 0.0 < delta < 1.0:
        raise InputError(f"delta must lie between 0 and 1, not {delta!r}.")
    if sums < 1:
        return 0.0
    try:
        from dp_accounting import GaussianDpEvent  # noqa: PLC0415 (an extra)
        from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            "Accounting for noise needs dp-accounting: pip install 'fedipw[flower]'."
        ) from error
    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(multiplier), sums)
    return float(accountant.get_epsilon(delta))


def multiplier_for(epsilon: float, sums: int, delta: float) -> float:
    """Return the least noise multiplier, to 0.1%, with which so many sums cost epsilon at most.

    >>> z = multiplier_for(8.0, 300, 1e-5)
    >>> bool(epsilon_spent(z, 300, 1e-5) <= 8.0 < epsilon_spent(0.99 * z, 300, 1e-5))
    True
    """
    check_positive(epsilon, "epsilon")
    low, high = 1e-3, 1.0
    while epsilon_spent(high, sums, delta) > epsilon:
        low, high = high, 2.0 * high
    while high > 1.0005 * low:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if epsilon_spent(middle, sums, delta) <= epsilon else (
            middle, high)  # fmt: skip
    return high
