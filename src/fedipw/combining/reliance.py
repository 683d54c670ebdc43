"""How far enrollment weights and a regression are relied on: as far as updates show it."""

from __future__ import annotations

import numpy as np

FEW_CLIENTS = 10.0  # effective clients on which no evidence counts against weights
TIMES_NOISE = (1.0, 2.0)  # of the correction over its noise: where reliance begins, and is whole
FEW_FOR_REGRESSION = 50.0  # effective clients on which no evidence counts against a regression
TIMES_REGRESSION_NOISE = (4.0, 8.0)  # the same of a regression's correction


def reliance_on_enrollment(correction: float, noise: float, effective: float) -> float:
    r"""Return :math:`\Lambda`, between 0 (participation alone) and 1 (enrollment weights whole).

    .. math::
       \Lambda = \Lambda_0 + (1 - \Lambda_0) \min(1, \max(0, R - 1)), \quad
       R = \frac{|\bar\Delta_q - \bar\Delta_E|^2}{s^2 \left(1/n - 1/D\right)}, \quad
       \Lambda_0 = \min(1, 10/n) \qquad (O21)

    The numerator is what enrollment weights change: the mean update of the rounds remembered under
    them, less that of the enrolled. The denominator is its noise if they change nothing, since
    rounds repeat clients: :math:`s^2` is what balance columns leave of the updates' squared norm,
    D the number of different clients that have replied so far (O23) and n their effective number
    under enrollment weights. R is about 1 where selection says nothing about updates; few clients
    can show nothing, and keep their weights.

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


def reliance_on_regression(correction: float, noise: float, effective: float) -> float:
    r"""Return :math:`\kappa`, by which the correction of a regression is multiplied.

    .. math::
       \kappa = \kappa_0 + (1 - \kappa_0) \min\Big(1, \max\Big(0, \frac{K - 4}{4}\Big)\Big), \quad
       K = \frac{|C'a|^2}{s^2 A_{00}\, a'Aa / n}, \quad \kappa_0 = \min(1, 50/n), \\
       a = (A + A_{00} \text{diag}(0, \rho_1, \ldots, \rho_q))^{-1}
       \Big(\mu_\Lambda - \sum_{S_r} v_i b_i\Big) \qquad (O24)

    :math:`C'a` is the correction of (O20), and the denominator of K its noise: that of coefficients
    learnt from n effective clients, those of (O21), with :math:`s^2` each of what balance columns
    leave. Where columns predict updates K is large, where clients hold one row of data each it can
    be near 1. With few clients bias matters more than noise, and the correction is kept.

    >>> [reliance_on_regression(K, 1.0, effective=500) for K in (3.0, 6.0, 9.0)]
    [0.1, 0.55, 1.0]
    >>> reliance_on_regression(3.0, 1.0, effective=30)
    1.0
    """
    least = min(1.0, FEW_FOR_REGRESSION / effective)
    if not noise > 0.0:
        return 1.0
    low, high = TIMES_REGRESSION_NOISE
    shown = float(np.clip((correction / noise - low) / (high - low), 0.0, 1.0))
    return least + (1.0 - least) * shown
