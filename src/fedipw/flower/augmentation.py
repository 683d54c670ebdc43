"""Augmented aggregation on a server: a regression of updates, kept between rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from fedipw.combining.regression import RegressionRound, UpdateRegression
from fedipw.errors import InputError
from fedipw.flower.screen import SentModel, arrays_of
from fedipw.flower.weighted_sum import WeightedReply
from fedipw.numerics import FloatArray
from fedipw.numerics.compiled import compiled, squared_distance
from fedipw.numerics.threads import over_ranges
from fedipw.weighting.balance import Balance
from fedipw.weighting.pipeline import Regression, Weighing
from fedipw.weighting.weigher import RoundWeights

_PIECE = 16_384  # parameters whose sums are made at once, by each thread
_GROUP = 8  # replies whose updates are added to the sums at once
_CALL = 4 * _GROUP  # replies of one call of the kernel: short calls would wait for each other
_STRIP = 512  # parameters of a group whose updates stay in the processor's nearest memory


@final
class Augmenter:
    """The correction (O20) that a regression of earlier updates adds to a round's weighted sum.

    It keeps q + 1 arrays of the model's size, one more if it is adaptive, in the model's floating
    type, and reads the replies once. Buffers take no part: they are averaged (O22).
    """

    def __init__(self, how: Regression) -> None:
        self._how = how
        self._rule: UpdateRegression | None = None
        self._scale: FloatArray | None = None  # of the balance columns, from the first round on
        self._names: tuple[str, ...] = ()
        self._arrays: tuple[str, ...] = ()  # of the model that take part

    def correction(
        self,
        replies: Sequence[WeightedReply],
        found: RoundWeights,
        weighing: Weighing,
        sent: SentModel,
    ) -> dict[str, NDArray[Any]]:
        """Return what is added to the model, by array, and learn from the replies' updates.

        ``replies`` are in the order of ``found``.
        """
        balance = weighing.state.balance_for(weighing.method.name, self._how.balance)
        if self._rule is None:
            floating = sent.parameters
            if not floating:
                raise InputError(
                    f"{weighing.method.name} regresses updates, and no array of the model is "
                    "floating-point, buffers aside: use a method without a regression, such as "
                    "fedipw-hajek."
                )
            self._arrays = tuple(floating)
            dtype = np.result_type(*(array.dtype for array in floating.values()))
            self._rule = UpdateRegression(
                sum(array.size for array in floating.values()),
                moments=len(balance.names),
                main=balance.main,
                settings=self._how,
                dtype=max(dtype, np.dtype(np.float32)),
            )
            self._scale, self._names = balance.scale, balance.names
        elif balance.names != self._names:
            self._follow(balance)
        b = balance.standardised(found.replies.rows, self._scale)
        enrolled = balance.standardised(np.flatnonzero(balance.enrolled), self._scale).mean(axis=0)
        here = self._rule.round(found, b, enrolled)
        factors = np.array([reply.factor for reply in replies])
        clipped = here.weights * factors
        records = [arrays_of(reply.message.content) for reply in replies]
        # the screen's norms are of all parameters; a run begun before buffers were told apart has
        # sums of more
        every = set(self._arrays) == set(sent.parameters)
        squares = np.array([reply.norm for reply in replies]) ** 2 if every else 0.0
        out, first = {}, 0
        for name in self._arrays:
            model = sent.arrays[name]
            views = [sent.layouts[name].view(record[name]) for record in records]
            if not every:
                squares = squares + np.array([squared_distance(view, model) for view in views])
            made = _added(here, first, clipped, views, model)
            out[name] = made.reshape(model.shape).astype(model.dtype, copy=False)
            first += model.size
        here.close(factors**2 * squares)
        return out

    @property
    def reliance(self) -> float:
        """How far enrollment weights are relied on in the next round (O21)."""
        return 1.0 if self._rule is None else self._rule.reliance

    def _follow(self, balance: Balance) -> None:
        """Go on with other balance columns: when clients join or leave, their number may change."""
        assert self._rule is not None
        assert self._scale is not None
        known = {name: k for k, name in enumerate(self._names)}
        places, scale = [known.get(name) for name in balance.names], balance.scale
        for new, old in enumerate(places):
            if old is not None:
                scale[new] = self._scale[old]
        self._rule = self._rule.over(places, balance.main)
        self._scale, self._names = scale, balance.names

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, to be saved before the next round; empty at first.

        The q + 1 arrays of the model's size are not copied, and are saved one by one.
        """
        if self._rule is None:
            return {}
        rule = self._rule.state(copy=False)
        rule["cross"] = list(rule["cross"])
        return {
            "rule": rule,
            "scale": self._scale,
            "names": list(self._names),
            "arrays": list(self._arrays),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a saved state back."""
        if not state:
            return
        self._scale, self._names = np.array(state["scale"]), tuple(state["names"])
        self._arrays = tuple(state["arrays"])
        cross = state["rule"]["cross"]
        self._rule = UpdateRegression(
            len(cross[0]),
            moments=len(cross) - 1,
            main=int(state["rule"]["main"]),
            settings=self._how,
            dtype=cross[0].dtype,
        )
        self._rule.restore(state["rule"])


def _added(
    here: RegressionRound,
    first: int,
    weights: FloatArray,
    replies: Sequence[NDArray[Any]],
    model: NDArray[Any],
) -> NDArray[Any]:
    """Return the correction of an array, whose parameters begin at ``first``, and learn from it.

    ``weights`` (k, m) are of the updates of the replies, a row for each sum to learn from.
    """
    dtype, base = here.rule.cross.dtype, _read_only(model.reshape(-1))
    flat = [_read_only(reply.reshape(-1)) for reply in replies]
    flat += [base] * (-len(flat) % _CALL)  # they move nothing
    rows = np.zeros((len(weights), len(flat)), dtype=dtype)
    rows[:, : len(replies)] = weights
    out = np.empty(len(base), dtype=dtype)

    def work(start: int, stop: int) -> None:
        for piece in _pieces(start * _PIECE, min(stop * _PIECE, len(base))):
            place = slice(first + piece.start, first + piece.stop)
            out[piece] = here.correction(place)
            sums = np.zeros((len(rows), piece.stop - piece.start), dtype=dtype)
            origin = _of_type(base[piece], dtype)
            for k in range(0, len(replies), _CALL):
                some = tuple(_of_type(reply[piece], dtype) for reply in flat[k : k + _CALL])
                used = min(_CALL, len(replies) - k)
                _add_updates(sums, rows[:, k : k + _CALL], origin, some, used)
            here.learn(place, sums)

    count = -(-len(base) // _PIECE)
    over_ranges(count, work, work=float(len(base) * len(flat) * len(rows)))
    return out


@compiled
def _add_updates(
    sums: NDArray[Any],
    weights: NDArray[Any],
    origin: NDArray[Any],
    replies: tuple[NDArray[Any], ...],
    used: int,
) -> None:
    """Add the weighted updates of the first replies, ``used`` of them, to sums, (k, p).

    ``weights`` are (k, 32), zero for replies that are not used. The updates of a group are made
    once for a few parameters and used in all k sums: a product of matrices, but without a copy of
    the replies, and without threads other than the caller's.
    """
    moved = np.empty(_GROUP * _STRIP, dtype=sums.dtype)
    for first in range(0, len(origin), _STRIP):
        last = min(first + _STRIP, len(origin))
        here = origin[first:last]
        for group in range(0, used, _GROUP):
            for i in range(_GROUP):
                reply, update = replies[group + i][first:last], moved[i * _STRIP : (i + 1) * _STRIP]
                for t in range(len(here)):
                    update[t] = reply[t] - here[t]
            for j in range(len(sums)):
                total, w = sums[j, first:last], weights[j, group : group + _GROUP]
                w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
                for t in range(len(total)):
                    total[t] += (
                        (w0 * moved[t] + w1 * moved[t + _STRIP])
                        + (w2 * moved[t + 2 * _STRIP] + w3 * moved[t + 3 * _STRIP])
                    ) + (
                        (w4 * moved[t + 4 * _STRIP] + w5 * moved[t + 5 * _STRIP])
                        + (w6 * moved[t + 6 * _STRIP] + w7 * moved[t + 7 * _STRIP])
                    )


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a flat array that the kernel can take, a copy only if its bytes are not aligned."""
    out = np.require(array, requirements=("C", "A")).view()
    out.flags.writeable = False
    return out


def _of_type(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    return array if array.dtype == dtype else _read_only(array.astype(dtype))


def _pieces(first: int, last: int) -> Iterator[slice]:
    for start in range(first, last, _PIECE):
        yield slice(start, min(start + _PIECE, last))
