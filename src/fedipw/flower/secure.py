r"""Weights applied by the client, so that secure aggregation shows the server only the sum.

Flower's SecAgg+ adds up vectors that the server cannot read one by one. A client that knows its
weight sends :math:`w_i \Delta_i`, and the server learns :math:`\sum_i w_i \Delta_i` and no term of
it. It receives its weight, or the models behind it (:class:`WeightModel`), and then keeps its
covariates to itself.

Clients report ``num_examples = 1`` and the workflow has ``max_weight = 1``: a weight reported as a
number of examples would reach the server in clear.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self, final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import check_positive, check_probability
from fedipw.numerics.logistic import sigmoids
from fedipw.selection.saved import AVAILABILITY, ENROLLMENT, PARTICIPATION, REPLY, StageModel
from fedipw.tables.design import Design

FORMAT: Final = "fedipw-weight-model"
VERSION: Final = 2
Covariates = Mapping[str, float | bool | str | None]
_STEPS: Final = ((), (PARTICIPATION,), (AVAILABILITY,), (REPLY,), (AVAILABILITY, REPLY))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageProbability:
    """P(selected | x) of a stage: its design and coefficients, and nothing else of the fit."""

    stage: str
    design: Design
    coefficients: FloatArray  # (q,)
    intercept: float
    unseen: tuple[str, ...] = ()  # levels no row of the fit had

    @classmethod
    def of(cls, model: StageModel) -> Self:
        """Return the design and coefficients of a fitted stage."""
        fit = model.logistic()
        levels = [term.name for term in model.design.terms if term.level]
        return cls(
            stage=model.stage, design=model.design, coefficients=fit.coefficients,
            intercept=fit.intercept, unseen=tuple(n for n in levels if n in fit.constant),
        )  # fmt: skip

    def prob(self, covariates: Covariates) -> float:
        """Return the probability of one client; InputError where the model has none."""
        known = {name: [covariates[name]] for name in self.design.columns if name in covariates}
        rows = self.design.rows(pl.DataFrame(known), "covariates")
        if rows.kept is not None and not rows.kept.all():
            gaps = sorted(name for name, lost in rows.missing.items() if lost)
        else:
            index = self.design.names.index
            gaps = [name for name in self.unseen if rows.columns[index(name), 0] != 0.0]
        if gaps:
            raise InputError(
                f"{', '.join(gaps)}: missing, or a level that no row behind the model of "
                f"{self.stage} had. There is no weight: decline the invitation."
            )
        odds = self.coefficients @ rows.columns + self.intercept
        return float(sigmoids(np.ascontiguousarray(odds), shift=0.0)[0])

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``from_json``."""
        coefficients = self.coefficients.tolist()
        return {
            "stage": self.stage, "design": self.design.to_json(), "coefficients": coefficients,
            "intercept": self.intercept, "unseen": list(self.unseen),
        }  # fmt: skip

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """Return the stage that ``to_json`` made plain values of."""
        design = Design.from_json(saved["design"])
        coefficients = np.array(saved["coefficients"], dtype=np.float64)
        intercept = float(saved["intercept"])
        if coefficients.shape != (len(design.names),):
            raise ValueError(f"{coefficients.size} coefficients of {len(design.names)} columns")
        if not np.isfinite([*coefficients, intercept]).all():
            raise ValueError("a coefficient is not a finite number")
        unseen = tuple(name for name in design.names if name in saved["unseen"])
        return cls(
            stage=str(saved["stage"]), design=design, coefficients=coefficients,
            intercept=intercept, unseen=unseen,
        )  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightModel:
    r"""The models behind the weights, with which a client computes its own.

    .. math:: w_i = \frac{1}{N\, \pi^{enr}_i\, \pi^{part}_i} \quad (W2) \qquad \text{or} \qquad
       w_i = \frac{q_i}{\pi^{part}_i} \quad (W11)

    with :math:`\pi^{part}_i` the product of its steps (P5). The weight is the one the server would
    find with the same models, covariates and invitation. Weights that depend on the other replies
    of a round are not among these: trimmed ones and GREG; for Hájek's see :func:`hajek_mean`.

    Examples
    --------
    >>> from fedipw.selection.coded import table_model
    >>> from fedipw.tables import Table
    >>> people = pl.DataFrame({"unit_id": range(5), "os": ["ios", "ios", "web", "web", "web"],
    ...                        "enrolled": [True, False, True, False, True]})
    >>> model = table_model(Table(people), "os")  # half of ios is enrolled
    >>> text = WeightModel.horvitz_thompson(model, (), population_size=5).to_json()
    >>> round(WeightModel.from_json(text).weight({"os": "ios"}, invite_prob=0.25), 9)
    1.6
    """

    factor: float  # 1/N, or the client's calibrated weight q_i
    stages: tuple[StageProbability, ...]  # enrollment, unless it is calibrated, and participation

    def __post_init__(self) -> None:
        if not math.isfinite(self.factor):
            raise InputError(f"An enrollment weight must be finite, not {self.factor!r}.")

    @classmethod
    def horvitz_thompson(
        cls, enrollment: StageModel, participation: Iterable[StageModel], population_size: float
    ) -> Self:
        """Return the model of (W2), the same for all clients."""
        if enrollment.stage != ENROLLMENT:
            raise InputError(f"A model of {enrollment.stage} is not one of enrollment.")
        factor = 1.0 / check_positive(population_size, "population_size")
        stages = StageProbability.of(enrollment), *_participation(participation)
        return cls(factor=factor, stages=stages)

    @classmethod
    def calibrated(cls, enrollment_weight: float, participation: Iterable[StageModel]) -> Self:
        """Return the model of (W11) for the client with this calibrated enrollment weight."""
        return cls(factor=float(enrollment_weight), stages=_participation(participation))

    def weight(self, covariates: Covariates, invite_prob: float = 1.0) -> float:
        """Return the weight of the client with these covariates, invited with this probability.

        The server knows the probability of an invitation; 1 where all clients are invited. Columns
        of a client's history, where a model has them, are among its covariates.
        """
        prob = float(check_probability(invite_prob, "invite_prob"))
        for stage in self.stages:
            prob *= stage.prob(covariates)
        return self.factor / float(check_probability(prob, "inclusion_prob"))

    def to_json(self) -> str:
        """Return a text that fits into a message's configuration."""
        stages = [stage.to_json() for stage in self.stages]
        saved = {"format": FORMAT, "version": VERSION, "factor": self.factor, "stages": stages}
        return json.dumps(saved, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the model of a text that ``to_json`` made."""
        try:
            saved = json.loads(text)
            if saved["format"] != FORMAT or saved["version"] != VERSION:
                raise ValueError(f"{saved['format']!r}, version {saved['version']!r}")
            stages = tuple(map(StageProbability.from_json, saved["stages"]))
            return cls(factor=float(saved["factor"]), stages=stages)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"This is no weight model as written by to_json: {error}.") from error


def _participation(models: Iterable[StageModel]) -> tuple[StageProbability, ...]:
    found = sorted(map(StageProbability.of, models), key=lambda step: step.stage)
    steps = tuple(step.stage for step in found)
    if steps not in _STEPS:
        raise InputError(
            f"Participation is one step, or availability and reply; not {', '.join(steps)}."
        )
    return tuple(found)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPoint:
    r"""How SecAgg+ writes numbers: the whole multiples of h = 2 c / Q within :math:`\pm c`.

    Clients round each value at random to one of its two neighbours, so that it is right on
    average. The sum over n clients is therefore unbiased and off by

    .. math:: \Big| \hat s - \sum_i w_i \Delta_i \Big| < n h, \qquad
       \text{sd} \le \tfrac{1}{2} \sqrt n\, h, \qquad h = \frac{2 c}{Q} \qquad (O12)

    in each coordinate. Values beyond c would be cut silently; sums of more than ``largest_round``
    clients would wrap around. Weights contain 1/N, so products are small: choose c just above the
    largest product to be expected, not the workflow's 8.

    Examples
    --------
    >>> fixed = FixedPoint(clipping_range=0.5)
    >>> fixed.largest_round, f"{fixed.error(100):.2g}"
    (1023, '2.4e-05')
    """

    clipping_range: float = 8.0  # c
    quantization_range: int = 2**22  # Q
    modulus_range: int = 2**32

    def __post_init__(self) -> None:
        check_positive(self.clipping_range, "clipping_range")
        if not 0 < self.quantization_range < self.modulus_range:
            raise InputError(
                f"quantization_range {self.quantization_range} must lie between 0 and "
                f"modulus_range {self.modulus_range}."
            )

    @property
    def largest_round(self) -> int:
        """Most clients whose sum does not wrap around."""
        return (self.modulus_range - 1) // self.quantization_range

    def error(self, clients: int) -> float:
        """Return the bound (O12) on the error of each coordinate of a sum."""
        return clients * 2.0 * self.clipping_range / self.quantization_range

    def settings(self) -> dict[str, Any]:
        """Return the workflow's arguments, with weights that clients apply themselves."""
        clipping_range = float(self.clipping_range)
        return {**asdict(self), "clipping_range": clipping_range, "max_weight": 1.0}


def scaled_update(
    sent: Sequence[NDArray[Any]],
    trained: Sequence[NDArray[Any]],
    weight: float,
    *,
    clipping_range: float,
    with_weight: bool = False,
) -> list[NDArray[Any]]:
    r"""Return :math:`w_i \Delta_i`, what a client sends with ``num_examples = 1``.

    Parameters
    ----------
    sent, trained
        The model as it came and after training, arrays of the same shapes.
    weight
        The client's own, 1/N included.
    clipping_range
        Of the workflow; a product beyond it is an error, since SecAgg+ would cut it silently. The
        client then counts as one that dropped out.
    with_weight
        Append the weight as one more array, so that the server learns the sum of weights too.

    Examples
    --------
    >>> scaled_update([np.zeros(2)], [np.array([1.0, -2.0])], 0.25, clipping_range=8.0)
    [array([ 0.25, -0.5 ])]
    """
    if [a.shape for a in sent] != [a.shape for a in trained]:
        raise InputError("The trained model has other shapes than the model sent.")
    if any(not np.issubdtype(a.dtype, np.floating) for a in (*sent, *trained)):
        raise InputError("Updates need floating-point arrays: leave the others out of the model.")
    products = [
        weight * (after.astype(np.float64) - before)
        for before, after in zip(sent, trained, strict=True)
    ]
    if with_weight:
        products.append(np.array([weight], dtype=np.float64))
    largest = max((float(np.abs(p).max(initial=0.0)) for p in products), default=0.0)
    if not largest <= clipping_range:  # NaN is not
        raise InputError(
            f"Weight times update reaches {largest:.4g} with weight {weight:.4g}, beyond SecAgg+'s "
            f"clipping_range {clipping_range:g}. Widen the range, clip updates, or take shorter "
            "local steps."
        )
    return products


def weighted_sum(
    mean: Sequence[NDArray[Any]], active: int, fixed: FixedPoint | None = None
) -> list[NDArray[Any]]:
    r"""Return :math:`\sum_{i \in S} w_i \Delta_i` from SecAgg+'s mean.

    ``active`` is the number of clients whose masked vectors arrived: the number of results that
    ``aggregate_fit`` receives. With ``fixed``, more of them than a sum can hold is an error.

    >>> weighted_sum([np.array([0.5, 1.0])], active=4)
    [array([2., 4.])]
    """
    if active < 1:
        raise InputError(f"A sum needs at least one client, not {active}.")
    if fixed is not None and active > fixed.largest_round:
        raise InputError(
            f"The sum of {active} clients wraps around: {fixed.largest_round} fit in modulus "
            f"{fixed.modulus_range} with {fixed.quantization_range} steps. Invite fewer, or lower "
            "quantization_range."
        )
    return [active * array for array in mean]


def hajek_mean(sums: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    r"""Return :math:`\sum w_i \Delta_i / \sum w_i` (W3) from sums taken ``with_weight``.

    >>> hajek_mean([np.array([0.5, 1.0]), np.array([0.5])])
    [array([1., 2.])]
    """
    *updates, weights = sums
    total = float(weights.item()) if weights.size == 1 else np.nan
    if not total > 0.0:
        raise InputError(
            f"Hájek's mean divides by the sum of weights, and that is {total:.4g}: clients send it "
            "as the last array (with_weight=True)."
        )
    return [array / total for array in updates]


def moved(
    sent: Sequence[NDArray[Any]], step: Sequence[NDArray[Any]], rate: float = 1.0
) -> list[NDArray[Any]]:
    r"""Return :math:`\theta + \gamma \sum_i w_i \Delta_i` (O3), in the model's own types.

    >>> moved([np.zeros(2, dtype=np.float32)], [np.array([0.5, 1.0])], rate=0.5)
    [array([0.25, 0.5 ], dtype=float32)]
    """
    return [(m + rate * s).astype(m.dtype) for m, s in zip(sent, step, strict=True)]
