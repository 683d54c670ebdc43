"""Augmented aggregation on a server: a regression of updates, kept between rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from fedipw.combining.regression import RegressionRound, UpdateRegression
from fedipw.errors import InputError
from fedipw.flower.screen import SentModel, arrays_of
from fedipw.flower.update_sums import over_updates
from fedipw.flower.weighted_sum import WeightedReply
from fedipw.numerics import FloatArray
from fedipw.numerics.compiled import squared_distance
from fedipw.weighting.balance import Balance
from fedipw.weighting.pipeline import Regression, Weighing
from fedipw.weighting.weigher import RoundWeights


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
        *,
        summed: bool = False,
    ) -> dict[str, NDArray[Any]]:
        """Return what is added to the model, by array, and learn from the replies' updates.

        ``replies`` are in the order of ``found``. With ``summed`` the weighted sum of the updates
        is in it.
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
        used = np.array([reply.weight for reply in replies]) * factors if summed else None
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
            made = _added(here, first, clipped, views, model, summed=used)
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
    *,
    summed: FloatArray | None = None,
) -> NDArray[Any]:
    """Return the correction of an array, whose parameters begin at ``first``, and learn from it.

    ``weights`` (k, m) are of the updates of the replies, a row for each sum to learn from. The sum
    of the updates by ``summed`` (m,) is added to what is returned, in the same reading.
    """
    rows = weights if summed is None else np.vstack([weights, summed])
    out = np.empty(model.size, dtype=here.rule.cross.dtype)

    def use(piece: slice, sums: NDArray[Any]) -> None:
        place = slice(first + piece.start, first + piece.stop)
        out[piece] = here.correction(place)
        if summed is not None:
            out[piece] += sums[-1]
        here.learn(place, sums[: len(weights)])

    over_updates(rows, replies, model, out.dtype, use)
    return out
