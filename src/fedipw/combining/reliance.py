"""How far enrollment weights are relied on: as far as updates show that they matter."""

from __future__ import annotations

import numpy as np

FEW_CLIENTS = 10.0  # effective clients on which no evidence counts against weights
TIMES_NOISE = (1.0, 2.0)  # of the correction over its noise: where reliance begins, and is whole


def reliance_on_enrollment(correction: float, noise: float, effective: float) -> float:
    r"""Return :math:`\Lambda`, between 0 (participation alone) and 1 (enrollment weights whole).

    .. math::
       \Lambda = \Lambda_0 + (1 - \Lambda_0) \min(1, \max(0, R - 1)), \quad
       R = \frac{|\bar\Delta_q - \bar\Delta_E|^2}
       {s^2 \left[(1 + N_{enr}/M)/n - 1/N_{enr}\right]}, \quad
       \Lambda_0 = \min(1, 10/n) \qquad (O21)

    The numerator is what enrollment weights change: the mean update of the rounds remembered under
    them, less that of the enrolled. The denominator is its noise if they change nothing, since
    rounds do not renew who is enrolled: :math:`s^2` is what balance columns leave of the updates'
    squared norm, n the effective number of enrolled clients under their weights, M the replies
    remembered. R is about 1 where selection says nothing about updates; few clients can show
    nothing, and keep their weights.

    >>> reliance_on_enrollment(3e-3, 1e-3, effective=300), reliance_on_enrollment(0.0, 1e-3, 4)
    (1.0, 1.0)
    >>> round(reliance_on_enrollment(1.5e-3, 1e-3, effective=200), 3)
    0.525
    """
    least = min(1.0, FEW_CLIENTS / effective)
    if not noise > 0.0:
        return 1.0  # nothing to lose
    low, high = TIMES_NOISE
    shown = float(np.clip((correction / noise - low) / (high - low), 0.0, 1.0))
    return least + (1.0 - least) * shown
