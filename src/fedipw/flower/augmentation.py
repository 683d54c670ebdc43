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
from fedipw.numerics.threads import over_ranges
from fedipw.weighting.balance import Balance
from fedipw.weighting.pipeline import Regression, Weighing
from fedipw.weighting.weigher import RoundWeights

_PIECE = 8192  # parameters of all replies that are held at once, by each thread


@final
class Augmenter:
    """The correction (O20) that a regression of earlier updates adds to a round's weighted sum.

    It keeps q + 1 arrays of the model's size, in the model's floating type, and reads the replies
    once. Arrays that are not floating-point in the first round take no part, then or later: a
    strategy that averages integers makes them floating-point.
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
            floating = {k: v for k, v in sent.arrays.items() if v.dtype.kind == "f"}
            if not floating:
                raise InputError(
                    f"{weighing.method.name} regresses updates, and no array of the model is "
                    "floating-point: use a method without a regression, such as fedipw-hajek."
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
        here = self._rule.round(found, b)
        clipped = here.weights * np.array([reply.factor for reply in replies])
        records = [arrays_of(reply.message.content) for reply in replies]
        out, first = {}, 0
        for name in self._arrays:
            model = sent.arrays[name]
            views = [sent.layouts[name].view(record[name]) for record in records]
            made = _added(here, first, clipped, views, model)
            out[name] = made.reshape(model.shape).astype(model.dtype, copy=False)
            first += model.size
        here.close()
        return out

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
        """Return what a resumed run needs; empty before the first round."""
        if self._rule is None:
            return {}
        return {
            "rule": self._rule.state(),
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
            cross.shape[1],
            moments=cross.shape[0] - 1,
            main=int(state["rule"]["main"]),
            settings=self._how,
            dtype=cross.dtype,
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

    ``weights`` (q + 1, m) are of the updates of the replies.
    """
    flat, base = [reply.reshape(-1) for reply in replies], model.reshape(-1)
    dtype = here.rule.cross.dtype
    out, rows = np.empty(len(base), dtype=dtype), weights.astype(dtype)

    def work(start: int, stop: int) -> None:
        moved = np.empty((len(flat), _PIECE), dtype=dtype)
        for piece in _pieces(start * _PIECE, min(stop * _PIECE, len(base))):
            width = piece.stop - piece.start
            for k, reply in enumerate(flat):
                np.subtract(reply[piece], base[piece], out=moved[k, :width], casting="same_kind")
            place = slice(first + piece.start, first + piece.stop)
            out[piece] = here.correction(place)
            here.learn(place, rows @ moved[:, :width])

    count = -(-len(base) // _PIECE)
    over_ranges(count, work, work=float(len(base) * len(flat) * len(rows)))
    return out


def _pieces(first: int, last: int) -> Iterator[slice]:
    for start in range(first, last, _PIECE):
        yield slice(start, min(start + _PIECE, last))
