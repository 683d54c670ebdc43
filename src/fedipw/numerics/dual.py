"""Sums over rows of the calibration dual: the compiled core of every distance.

A row's ratio of weight to base is g = F(u) with u linear in the multipliers. Three families of F
serve all distances; ``family`` and two numbers ``low`` and ``high`` choose one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedipw.numerics import CodeArray, FloatArray, IntArray
from fedipw.numerics.compiled import compiled, exp, log1p_unit, sigmoid
from fedipw.numerics.threads import over_ranges

CLIPPED, EXPONENTIAL, LOGISTIC = 0, 1, 2
_BLOCK = 64  # rows whose columns fit in the nearest cache
_PARTS = 16  # sums are added up in this many parts, whatever the number of threads
_TILE = 4


@compiled
def _family(
    u: FloatArray, family: int, low: float, high: float, ratio: FloatArray, slope: FloatArray
) -> None:
    """Leave F(u) and F'(u) in ``ratio`` and ``slope``."""
    if family == EXPONENTIAL:
        for i in range(u.size):
            g = exp(u[i])
            ratio[i] = g
            slope[i] = g
    elif family == CLIPPED:  # 1 + u held in [low, high]
        for i in range(u.size):
            free = 1.0 + u[i]
            g = low if free < low else free
            g = high if g > high else g
            ratio[i] = g
            slope[i] = 1.0 if g == free else 0.0
    else:  # between low and high with F(0) = F'(0) = 1 (Deville & Särndal's logit)
        steep = (high - low) / ((1.0 - low) * (high - 1.0))
        shift = np.log((1.0 - low) / (high - 1.0))
        for i in range(u.size):
            prob = sigmoid(steep * u[i] + shift)
            ratio[i] = low + (high - low) * prob
            slope[i] = (high - low) * steep * prob * (1.0 - prob)


@compiled
def _potential(
    u: FloatArray, ratio: FloatArray, weight: FloatArray, family: int, low: float, high: float
) -> float:
    """Return the weighted sum of the integral of F."""
    total = 0.0
    if family == EXPONENTIAL:
        for i in range(u.size):
            total += weight[i] * ratio[i]
    elif family == CLIPPED:
        for i in range(u.size):  # g (1 + u) - g^2 / 2 is right inside and outside the bounds
            total += weight[i] * ratio[i] * (1.0 + u[i] - 0.5 * ratio[i])
    else:
        steep = (high - low) / ((1.0 - low) * (high - 1.0))
        shift = np.log((1.0 - low) / (high - 1.0))
        for i in range(u.size):
            v = steep * u[i] + shift
            soft = log1p_unit(exp(-abs(v))) + 0.5 * (v + abs(v))
            total += weight[i] * (low * u[i] + (high - low) / steep * soft)
    return total


@compiled
def _products(block: FloatArray, scaled: FloatArray, rows: int, hessian: FloatArray) -> None:
    """Add the lower triangle of ``scaled @ block'``, four columns by two in registers."""
    for j in range(0, block.shape[0], _TILE):
        s0, s1, s2, s3 = scaled[j], scaled[j + 1], scaled[j + 2], scaled[j + 3]
        for k in range(0, j + _TILE, 2):
            c0, c1 = block[k], block[k + 1]
            a00 = a01 = a10 = a11 = a20 = a21 = a30 = a31 = 0.0
            for i in range(rows):
                a00 += s0[i] * c0[i]
                a01 += s0[i] * c1[i]
                a10 += s1[i] * c0[i]
                a11 += s1[i] * c1[i]
                a20 += s2[i] * c0[i]
                a21 += s2[i] * c1[i]
                a30 += s3[i] * c0[i]
                a31 += s3[i] * c1[i]
            hessian[j, k] += a00
            hessian[j, k + 1] += a01
            hessian[j + 1, k] += a10
            hessian[j + 1, k + 1] += a11
            hessian[j + 2, k] += a20
            hessian[j + 2, k + 1] += a21
            hessian[j + 3, k] += a30
            hessian[j + 3, k + 1] += a31


@compiled
def _dense_part(
    X: FloatArray,
    base: FloatArray,
    centre: FloatArray,
    inverse_scale: FloatArray,
    point: FloatArray,
    family: int,
    low: float,
    high: float,
    start: int,
    stop: int,
    ratio: FloatArray,
    sums: FloatArray,
    hessian: FloatArray,
) -> None:
    """Add rows start to stop. ``sums`` gets the value, the largest u and the gradient."""
    q = X.shape[1]
    wide = hessian.shape[0] if hessian.shape[0] > 0 else q + 1
    block, scaled = np.zeros((wide, _BLOCK)), np.zeros((wide, _BLOCK))
    room = np.empty((3, _BLOCK))
    for first in range(start, stop, _BLOCK):
        last = min(stop, first + _BLOCK)
        m = last - first
        u, slope, weight = room[0, :m], room[1, :m], room[2, :m]
        for i in range(m):
            for j in range(q):
                block[j, i] = (X[first + i, j] - centre[j]) * inverse_scale[j]
        u[:] = point[q]
        for j in range(q):
            column = block[j]
            for i in range(m):
                u[i] += point[j] * column[i]
        if base.size > 1:
            weight[:] = base[first:last]
        else:
            weight[:] = base[0]
        block[q, :m] = 1.0
        g = ratio[first:last]
        _family(u, family, low, high, g, slope)
        sums[0] += _potential(u, g, weight, family, low, high)
        largest = sums[1]
        for i in range(m):
            largest = u[i] if u[i] > largest else largest
            slope[i] *= weight[i]
            weight[i] *= g[i]
        sums[1] = largest
        for j in range(q + 1):
            column = block[j]
            total = 0.0
            for i in range(m):
                total += weight[i] * column[i]
            sums[2 + j] += total
        if hessian.shape[0] > 0:
            for j in range(q + 1):
                for i in range(m):
                    scaled[j, i] = slope[i] * block[j, i]
            _products(block, scaled, m, hessian)


def dense_sums(
    X: FloatArray,
    base: FloatArray,
    centre: FloatArray,
    scale: FloatArray,
    point: FloatArray,
    family: tuple[int, float, float],
    ratio: FloatArray,
    *,
    hessian: bool,
) -> tuple[float, float, FloatArray, FloatArray | None]:
    r"""Return the dual's sums over the rows of a matrix.

    .. math:: \sum_i p_i \Phi(u_i), \quad \max_i u_i, \quad \sum_i p_i F(u_i) \tilde x_i, \quad
       \sum_i p_i F'(u_i) \tilde x_i \tilde x_i', \qquad
       u_i = \lambda'\tilde x_i, \quad \tilde x_i = ((x_i - c)/s,\, 1).

    ``X`` (n, q), ``base`` (n,) or (1,) where all are alike, ``point`` (q + 1,) with the constant
    last. ``ratio`` (n,) is left with F(u). One read of the data, a few blocks of working memory.
    """
    n, q = X.shape
    wide = -(-(q + 1) // _TILE) * _TILE if hessian else 0
    inverse = 1.0 / scale

    def add(start: int, stop: int, sums: FloatArray, square: FloatArray) -> None:
        _dense_part(X, base, centre, inverse, point, *family, start, stop, ratio, sums, square)

    return _added(n, q + 1, wide, add, work=float(n * q * (q if hessian else 4)))


@compiled
def _margins_part(
    codes: CodeArray,
    offsets: IntArray,
    base: FloatArray,
    point: FloatArray,
    family: int,
    low: float,
    high: float,
    start: int,
    stop: int,
    ratio: FloatArray,
    sums: FloatArray,
    hessian: FloatArray,
) -> None:
    """As ``_dense_part`` for indicators given by codes; the last place of ``point`` is constant."""
    n_variables = codes.shape[1]
    constant = point.size - 1
    room = np.empty((3, _BLOCK))
    places = np.empty((_BLOCK, n_variables), dtype=np.int64)
    for first in range(start, stop, _BLOCK):
        last = min(stop, first + _BLOCK)
        m = last - first
        u, slope, weight = room[0, :m], room[1, :m], room[2, :m]
        for i in range(m):
            total = point[constant]
            for v in range(n_variables):
                places[i, v] = offsets[v] + codes[first + i, v]
                total += point[places[i, v]]
            u[i] = total
            weight[i] = base[first + i] if base.size > 1 else base[0]
        g = ratio[first:last]
        _family(u, family, low, high, g, slope)
        sums[0] += _potential(u, g, weight, family, low, high)
        for i in range(m):
            sums[1] = max(sums[1], u[i])
            mass = weight[i] * g[i]
            sums[2 + constant] += mass
            for v in range(n_variables):
                sums[2 + places[i, v]] += mass
        if hessian.shape[0] > 0:
            for i in range(m):
                mass = weight[i] * slope[i]
                for v in range(n_variables):
                    row = hessian[places[i, v]]
                    for k in range(v + 1):
                        row[places[i, k]] += mass


def margin_sums(
    codes: CodeArray,
    offsets: IntArray,
    base: FloatArray,
    point: FloatArray,
    family: tuple[int, float, float],
    ratio: FloatArray,
    *,
    hessian: bool,
) -> tuple[float, float, FloatArray, FloatArray | None]:
    """As :func:`dense_sums` for raw indicators of categories, which are never built.

    ``codes`` (n, V) holds a level of each variable, ``offsets`` (V,) the place of its first level
    in ``point``; the last place is the constant.
    """
    n, size = len(codes), len(point)

    def add(start: int, stop: int, sums: FloatArray, square: FloatArray) -> None:
        _margins_part(codes, offsets, base, point, *family, start, stop, ratio, sums, square)

    work = float(n * codes.shape[1] ** (2 if hessian else 1))
    found = _added(n, size, size if hessian else 0, add, work=work)
    square = found[3]
    if square is not None:
        places = np.arange(size - 1)  # the constant meets each indicator in the indicator alone
        square[-1, :-1] = square[:-1, -1] = square[places, places]
        first = slice(offsets[0], offsets[1] if len(offsets) > 1 else size - 1)
        square[-1, -1] = square[places, places][first].sum()
    return found


def _parts(n: int) -> list[int]:
    count = max(1, min(_PARTS, n // _BLOCK))
    return [n * k // count for k in range(count + 1)]


def _added(
    n: int,
    size: int,
    wide: int,
    add: Callable[[int, int, FloatArray, FloatArray], None],
    *,
    work: float,
) -> tuple[float, float, FloatArray, FloatArray | None]:
    """Return the sums of rows that ``add`` makes in parts, a square only where it is ``wide``."""
    parts = _parts(n)
    sums = np.zeros((len(parts) - 1, size + 2))
    sums[:, 1] = -np.inf
    squares = np.zeros((len(parts) - 1, wide, wide))

    def share(start: int, stop: int) -> None:
        for k in range(start, stop):
            add(parts[k], parts[k + 1], sums[k], squares[k])

    over_ranges(len(parts) - 1, share, work=work)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at what is not finite
        total = sums.sum(axis=0)
    whole = None
    if wide:
        lower = np.tril(squares.sum(axis=0)[:size, :size])
        whole = lower + np.tril(lower, -1).T
    return float(total[0]), float(sums[:, 1].max()), total[2:], whole


@compiled
def _moments_part(X: FloatArray, shift: FloatArray, start: int, stop: int, out: FloatArray) -> None:
    for first in range(start, stop, _BLOCK):
        last = min(stop, first + _BLOCK)
        for j in range(X.shape[1]):
            one = two = 0.0
            least, largest = out[2, j], out[3, j]
            for i in range(first, last):
                x = X[i, j]
                d = x - shift[j]
                one += d
                two += d * d
                least = x if x < least else least
                largest = x if x > largest else largest
            out[0, j] += one
            out[1, j] += two
            out[2, j] = least
            out[3, j] = largest


def column_moments(X: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return mean, sum of squares about it, least and largest of each column, (q,) each.

    A NaN or an infinity in a column makes its mean or its squares a NaN.
    """
    n, q = X.shape
    parts, shift = _parts(n), np.array(X[0], dtype=np.float64)
    out = np.zeros((len(parts) - 1, 4, q))
    out[:, 2], out[:, 3] = np.inf, -np.inf

    def work(start: int, stop: int) -> None:
        for k in range(start, stop):
            _moments_part(X, shift, parts[k], parts[k + 1], out[k])

    over_ranges(len(parts) - 1, work, work=float(n * q))
    with np.errstate(invalid="ignore", over="ignore"):
        mean = out[:, 0].sum(axis=0) / n
        squares = np.maximum(out[:, 1].sum(axis=0) - n * mean**2, 0.0)
    return shift + mean, squares, out[:, 2].min(axis=0), out[:, 3].max(axis=0)


def l1_quadratic_step(
    hessian: FloatArray, gradient: FloatArray, point: FloatArray, penalty: FloatArray
) -> FloatArray:
    r"""Return s that minimises g's + s'Hs/2 + sum_j penalty_j |point_j + s_j|, H positive definite.

    Feature-sign search (Lee et al. 2006): guess the signs of z = point + s, solve the quadratic
    they leave, stop at the best change of sign on the way, and bring in the zero that promises
    most; exact after finitely many guesses.

    Slopes are taken as g + Hs, not from H z alone: near the minimum s is small where z is not, and
    slopes keep the digits of the gradient. They are sums of q + 1 products and terms, so that an
    excess over the penalty below :math:`(q + 2)\,\epsilon\,(|g| + |H||s| + \text{penalty})` is
    rounding.
    """
    q, eps = len(gradient), float(np.finfo(np.float64).eps)
    z = point.copy()
    free = penalty == 0.0
    sign = np.where(free, 0.0, np.sign(z))
    solved = False
    for _ in range(100 * (q + 1)):
        active = free | (sign != 0.0)
        step = z - point
        slope = gradient + hessian @ step
        if solved:
            rounding = np.abs(gradient) + np.abs(hessian) @ np.abs(step) + penalty
            excess = np.abs(slope) - penalty - (q + 2) * eps * rounding
            excess[active] = 0.0
            j = int(np.argmax(excess))
            if excess[j] <= 0.0:
                break
            sign[j], active[j] = -np.sign(slope[j]), True
        square, start = hessian[np.ix_(active, active)], z[active]
        wish = -(slope + penalty * sign)[active]
        goal = start + np.linalg.lstsq(square, wish, rcond=1e-15)[0]
        z[active] = _best_on_the_way(start, goal, square, slope[active], penalty[active])
        signs = np.where(free, 0.0, np.sign(z))
        solved = np.array_equal(signs, sign) and np.array_equal(z[active], goal)
        sign = signs
    return z - point


def _best_on_the_way(
    start: FloatArray, goal: FloatArray, H: FloatArray, slope: FloatArray, penalty: FloatArray
) -> FloatArray:
    """Return the best of the goal and the points where a coordinate changes its sign.

    ``slope`` is that of the quadratic at the start, (q,).
    """
    whole = goal - start
    crossing = np.flatnonzero((start * goal < 0.0) & (penalty > 0.0))
    best, lowest = goal, np.inf
    for j in (-1, *crossing.tolist()):
        z = goal if j < 0 else start - start[j] / whole[j] * whole
        if j >= 0:
            z[j] = 0.0
        move = z - start
        gain = penalty @ (np.abs(z) - np.abs(start))
        value = float(0.5 * move @ H @ move + slope @ move + gain)
        if value < lowest:
            best, lowest = z, value
    return best
