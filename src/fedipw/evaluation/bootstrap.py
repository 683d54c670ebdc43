"""Bootstrap over clients: how an estimate over its own standard error is distributed."""

from __future__ import annotations

import numpy as np

from fedipw.errors import InputError
from fedipw.numerics import FloatArray

REPLICATES = 1000
FEWEST = 3  # units, below which a resample has no variance
_AT_ONCE = 2**22  # cells of the counts made together


def studentised_replicates(
    units: FloatArray,
    shares: FloatArray | None,
    *,
    replicates: int,
    rng: np.random.Generator,
    kept: float = 1.0,
) -> FloatArray:
    r"""Return t statistics of resampled clients or clusters, (B,); NaN where one has no estimate.

    Rao and Wu's rescaled bootstrap: C - 1 of the C units are drawn with replacement, unit c
    :math:`m_c` times. With :math:`d_c` what the unit adds to the error (:class:`Variance`,
    centred), :math:`\omega_c` its share of the sum that the mean divides by and r the part of
    :math:`\sum d_c^2` that the finite population leaves of it,

    .. math:: b_c = 1 + \sqrt r \Big(\frac{C}{C - 1} m_c - 1\Big), \qquad
       \Delta = \frac{\sum b_c d_c}{\sum b_c \omega_c}, \qquad
       t^* = \frac{\Delta}{\widehat{se}(d_c - \Delta\, \omega_c)} \qquad (E39)

    so that the replicates' variance is the design-based one. A unit is drawn with all its
    replies, enrolled and silent ones alike: both phases are in :math:`d_c`, and so is what
    fitting both stages anew would move, to first order. That is one Newton step from the fits
    at hand in place of a fit per replicate.

    Parameters
    ----------
    units
        d, (C,).
    shares
        :math:`\omega`, (C,); none where the mean divides by a constant.
    replicates
        B.
    rng
        Draws the resamples.
    kept
        r, 0 to 1.

    Examples
    --------
    >>> d = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    >>> t = studentised_replicates(d, None, replicates=400, rng=np.random.default_rng(0))
    >>> bool(abs(np.median(t)) < 0.2)
    True
    """
    count = len(units)
    if count < FEWEST:
        raise InputError(f"{count} clients are too few for a bootstrap: use another interval.")
    d = units - units.mean()
    w = np.full(count, 1.0 / count) if shares is None else shares
    constant = shares is None
    found, drawn = np.empty(replicates), max(1, _AT_ONCE // count)
    for first in range(0, replicates, drawn):
        some = min(drawn, replicates - first)
        m = _times_drawn(count, some, rng)
        b = 1.0 + np.sqrt(kept) * (count / (count - 1.0) * m - 1.0)
        total = np.ones(some) if constant else b @ w
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold no respondent
            apart = b @ d / total
            slope = np.zeros(some) if constant else apart
            # sums over the drawn of (d - slope w) and of its square
            sums = m @ d - slope * (m @ w)
            squares = m @ d**2 - 2.0 * slope * (m @ (d * w)) + slope**2 * (m @ w**2)
            within = np.maximum(squares - sums**2 / (count - 1.0), 0.0)
            variance = kept * (count / (count - 1.0)) ** 2 * (count - 1.0) / (count - 2.0) * within
            found[first : first + some] = apart * np.abs(total) / np.sqrt(variance)
    return found


def _times_drawn(count: int, replicates: int, rng: np.random.Generator) -> FloatArray:
    """Return how often each unit is drawn in a replicate, (B, C)."""
    drawn = rng.integers(0, count, size=(replicates, count - 1))
    drawn += count * np.arange(replicates)[:, None]
    times = np.bincount(drawn.ravel(), minlength=replicates * count)
    return times.reshape(replicates, count).astype(np.float64)
