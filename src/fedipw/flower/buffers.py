"""Buffers of a model: arrays that are averaged, and not moved by a weighted sum of updates.

Running means and variances of normalisation layers and integer counters are no parameters: a
Horvitz--Thompson sum, a correction or an optimiser's step can make a variance negative, and a mean
of integers is not an integer. They are averaged by self-normalised weights and keep their type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import some
from fedipw.numerics.types import in_type

BUFFER_NAMES = frozenset(
    {
        "running_mean", "running_var", "num_batches_tracked",  # PyTorch
        "moving_mean", "moving_variance", "moving_var",  # Keras, MXNet
    }
)  # fmt: skip
NON_NEGATIVE = frozenset({"running_var", "num_batches_tracked", "moving_variance", "moving_var"})
_AT_ONCE = 1_048_576  # numbers of all replies that are averaged at once


def last_part(name: str) -> str:
    """Return the last part of an array's dotted name.

    >>> last_part("layer1.0.bn2.running_var")
    'running_var'
    """
    return name.replace("/", ".").rpartition(".")[2]


def buffer_names(
    arrays: Mapping[str, NDArray[Any]], patterns: Sequence[str] = ()
) -> frozenset[str]:
    """Return which arrays of a model are buffers.

    All arrays of integers or of true and false; those whose name ends in one of ``BUFFER_NAMES``
    after a dot or a slash; and those whose name matches a pattern, as file names do.

    >>> model = {"fc.weight": np.zeros(3), "bn.running_var": np.ones(3), "seen": np.array(7),
    ...          "fc.ema": np.zeros(3)}
    >>> sorted(buffer_names(model, ["*.ema"]))
    ['bn.running_var', 'fc.ema', 'seen']
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in arrays):
            raise InputError(
                f"buffers={pattern!r} matches no array of the model, which has {some(arrays)}."
            )
    return frozenset(
        name
        for name, array in arrays.items()
        if array.dtype.kind != "f"
        or last_part(name) in BUFFER_NAMES
        or any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def buffer_limit(distances: Sequence[float], multiple: float | None, fewest: int) -> float:
    """Return how far from the buffer that was sent a reply's may lie in a round.

    ``multiple`` times the median distance: zero where most replies left the buffer as it was, and
    without a limit in rounds of less than ``fewest`` replies.

    >>> buffer_limit([1.0, 2.0, 900.0], 10.0, 3), buffer_limit([0.0, 0.0, 5.0], 10.0, 3)
    (20.0, 0.0)
    """
    if multiple is None or len(distances) < fewest:
        return np.inf
    return multiple * float(np.median(distances))


def buffer_mean(
    replies: Sequence[NDArray[Any]], weights: ArrayLike, factors: ArrayLike, sent: NDArray[Any]
) -> NDArray[Any]:
    r"""Return the mean of a buffer by self-normalised weights, in the type of the one sent.

    .. math:: \bar b = \sum_{i \in S} v_i \big((1 - c_i)\, b + c_i b_i\big), \quad
       v_i = \frac{\max(0, w_i)}{\sum_{j \in S} \max(0, w_j)}, \quad
       c_i = \min\Big(1, \frac{k \operatorname{med}_j \lVert b_j - b \rVert}
       {\lVert b_i - b \rVert}\Big) \qquad (O22)

    with b as it was sent and :math:`v_i` equal where no weight is positive. Every number lies
    between the smallest and the largest of b and the replies, so variances stay at zero or above;
    one client moves the buffer by at most :math:`v_i k` times the median distance. Integers are
    rounded at the end.

    Parameters
    ----------
    replies
        :math:`b_i`, m arrays of the shape of ``sent``.
    weights
        :math:`w_i`, (m,), of either sign.
    factors
        :math:`c_i`, (m,), in [0, 1].
    sent
        b.

    Examples
    --------
    >>> buffer_mean([np.array([1.0, 4.0]), np.array([3.0, 0.0])], [0.3, 0.1], [1, 1], np.zeros(2))
    array([1.5, 3. ])
    >>> buffer_mean([np.array(10), np.array(15)], [2.0, -1.0], [1, 1], np.array(0))
    array(10)
    """
    shares, c = hajek_shares(weights), np.asarray(factors, dtype=np.float64)
    flat, origin = [reply.reshape(-1) for reply in replies], sent.reshape(-1)
    out = np.empty_like(origin)
    whole, step = origin.dtype.kind in "iu" and bool((c == 1.0).all()), _AT_ONCE // len(flat) + 1
    for start in range(0, len(origin), step):
        piece = slice(start, start + step)
        block = np.stack([reply[piece] for reply in flat])
        held = c[:, None] * block + (1.0 - c[:, None]) * origin[piece].astype(np.float64)
        out[piece] = in_type(shares @ held, origin.dtype)
        if whole:  # integers beyond 2**53 that all agree on are kept to the last digit
            same = (block == block[0]).all(axis=0)
            out[piece][same] = block[0][same]
    return out.reshape(sent.shape)


def hajek_shares(weights: ArrayLike) -> FloatArray:
    """Return weights as shares of one: negative ones count nothing, equal ones if none counts.

    >>> hajek_shares([3.0, -1.0, 1.0]), hajek_shares([-1.0, 0.0])
    (array([0.75, 0.  , 0.25]), array([0.5, 0.5]))
    """
    positive = np.maximum(np.asarray(weights, dtype=np.float64), 0.0)
    if not positive.any():
        return np.full(len(positive), 1.0 / len(positive))
    positive = positive / positive.max()  # the sum of huge ones would overflow
    shares: FloatArray = positive / positive.sum()
    return shares
