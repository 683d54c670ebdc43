r"""Calibration as you go by secure sums: clients weigh themselves, the server learns totals.

A client computes its balance columns and its weight from covariates that never leave it, by
coefficients it is sent, and adds its weighted update and moments to one sum. The server divides,
steps and moves the coefficients by the same function as where it sees every client
(:meth:`fedipw.weighting.online.OnlineState.moved`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self, final

import numpy as np
import polars as pl

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.checks import check_positive, some
from fedipw.private.sums import Part, Parts, SumRequest, SumResult
from fedipw.tables.formula import term_matrix, term_of
from fedipw.tables.targets import Targets
from fedipw.weighting.online import OnlineSettings, OnlineState, OnlineSums

PURPOSE: Final = "train"
Covariates = Mapping[str, float | bool | str | None]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BalanceMap:
    """The moments that respondents are calibrated to, as every client receives them."""

    names: tuple[str, ...]  # as in targets: age, os[ios], age**2
    mean: FloatArray  # of the population, (q,)
    scale: FloatArray  # by which moments are standardised, (q,)

    def __post_init__(self) -> None:
        if not (np.isfinite(self.mean).all() and np.isfinite(self.scale).all()):
            raise InputError("A mean or a spread of the balance map is not a finite number.")
        if not (self.scale > 0.0).all():
            raise InputError("The spread of a moment must be positive.")

    @classmethod
    def of(cls, targets: Targets, spread: Mapping[str, float]) -> Self:
        r"""Return the map of population means, standardised by the population's spreads.

        That of a level is :math:`\sqrt{p (1 - p)}`, and that of a column whose square is among
        the targets follows from both means. Others must be in ``spread``: their standard
        deviations, roughly; the weights do not depend on them at rest.

        >>> targets = Targets.of({"age": 45.0, "os[ios]": 0.2, "height": 170.0})
        >>> BalanceMap.of(targets, {"age": 15.0, "height": 10.0}).scale
        array([15. ,  0.4, 10. ])
        """
        known = dict(zip(targets.names, targets.values.tolist(), strict=True))
        scale, lacking = [], []
        for name, mean in known.items():
            square = known.get(f"{name}**2")
            if name in spread:
                scale.append(check_positive(spread[name], f"spread of {name}"))
            elif name.endswith("]") and 0.0 < mean < 1.0:
                scale.append(math.sqrt(mean * (1.0 - mean)))
            elif square is not None and square > mean**2:
                scale.append(math.sqrt(square - mean**2))
            else:
                lacking.append(name)
        if lacking:
            raise InputError(
                f"The spread of {some(map(repr, lacking))} is not known: pass the population's "
                "standard deviation in spread=, or the mean of its square among the targets."
            )
        strange = sorted(set(spread) - set(known))
        if strange:
            raise InputError(f"{some(map(repr, strange))} in spread= is none of the targets.")
        return cls(names=targets.names, mean=targets.values, scale=np.array(scale))

    def columns(self, covariates: Covariates) -> FloatArray:
        """Return a client's standardised balance columns, (q,); InputError if a value is missing.

        >>> made = BalanceMap(names=("age", "os[ios]"), mean=np.array([45.0, 0.2]),
        ...                   scale=np.array([15.0, 0.4]))
        >>> made.columns({"age": 60, "os": "ios"})
        array([1., 2.])
        """
        plain = {k: float(v) if isinstance(v, bool) else v for k, v in covariates.items()}
        frame = pl.DataFrame({name: [value] for name, value in plain.items()})
        terms = [term_of(name, frame.schema) for name in self.names]
        values = term_matrix(terms, frame)[0]
        if not np.isfinite(values).all():
            gaps = [n for n, v in zip(self.names, values, strict=True) if not math.isfinite(v)]
            raise InputError(f"No value of {some(map(repr, gaps))}: there is no weight.")
        b: FloatArray = (values - self.mean) / self.scale
        return b


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TermLimits:
    r"""Bounds on what one client adds; the range of the code follows from them.

    A weight is at most ``largest_weight`` times the mean weight of earlier rounds, a standardised
    column at most ``largest_column`` away from the population's mean, an update's norm at most
    ``clip``. Clients cut what is beyond, and how many did so is part of the sum.
    """

    clip: float
    largest_weight: float = 100.0
    largest_column: float = 10.0
    largest_exponent: float = 8.0  # of lambda'b

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_positive(value, name)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundTerms:
    r"""What all clients are sent in a round, and what each adds to its sum.

    .. math:: e_i = \min\big(d_i \exp(\lambda' b_i),\, W u\big), \qquad
       \big[ e_i,\; e_i^2,\; e_i b_i,\; e_i b_i b_i',\; e_i c_i \Delta_i \big],
       \quad c_i = \min(1, C / |\Delta_i|) \qquad (M4)

    with u the mean weight so far. With ``augmented`` :math:`e_i b_i c_i \Delta_i'` is added too: q
    more vectors of the model's size. With ``temper`` below 1 the step has weights
    :math:`e_i^t`, and :math:`e_i^t,\; e_i^{2t},\; e_i^t b_i,\; e_i^t c_i \Delta_i` are added: the
    regression learns by e and takes most of the bias, so that the step's weights need not carry all
    of it.
    """

    balance: BalanceMap
    coefficients: FloatArray  # lambda, (q,)
    unit: float  # u
    limits: TermLimits
    parameters: int  # P
    augmented: bool = False
    temper: float = 1.0  # t, of the step's weights

    def __post_init__(self) -> None:
        if not 0.0 < self.temper <= 1.0 or (self.temper < 1.0 and not self.augmented):
            raise InputError(
                f"Weights are tempered by a power above 0 and up to 1, not {self.temper!r}, and "
                "where an augmentation takes the bias that they leave."
            )

    @property
    def parts(self) -> Parts:
        """The layout of a client's vector."""
        q, how = len(self.balance.names), self.limits
        w, b, c = how.largest_weight * self.unit, how.largest_column, how.clip
        tempered = self.temper < 1.0
        mild = w**self.temper * (1.0 + 1e-9)  # two ways to a power may differ in the last digit
        return Parts(
            weight=Part(1, w),
            square=Part(1, w**2),
            first=Part(q, w * b),
            second=Part(q * (q + 1) // 2, w * b**2),
            cut=Part(3, 1.0),
            update=Part(self.parameters, w * c),
            cross=Part(q * self.parameters if self.augmented else 0, w * b * c),
            tempered=Part(1 if tempered else 0, mild),
            tempered_square=Part(1 if tempered else 0, mild**2),
            tempered_first=Part(q if tempered else 0, mild * b),
            tempered_update=Part(self.parameters if tempered else 0, mild * c),
        )

    @property
    def request(self) -> SumRequest:
        """The sum that clients are asked to add to; every coordinate is within 1."""
        public = {
            "names": list(self.balance.names),
            "mean": self.balance.mean.tolist(),
            "scale": self.balance.scale.tolist(),
            "coefficients": self.coefficients.tolist(),
            "unit": self.unit,
            "limits": asdict(self.limits),
            "parameters": self.parameters,
            "augmented": self.augmented,
            "temper": self.temper,
        }
        return SumRequest(purpose=PURPOSE, public=public, length=self.parts.length)

    @classmethod
    def of(cls, public: Mapping[str, Any]) -> Self:
        """Return the terms of a request, as a client reads them; InputError if they are none."""
        try:
            vectors = {
                k: np.array(public[k], dtype=np.float64) for k in ("mean", "scale", "coefficients")
            }
            names = tuple(map(str, public["names"]))
            if any(v.shape != (len(names),) for v in vectors.values()):
                raise ValueError("vectors of different lengths")
            made = cls(
                balance=BalanceMap(names=names, mean=vectors["mean"], scale=vectors["scale"]),
                coefficients=vectors["coefficients"],
                unit=check_positive(float(public["unit"]), "unit"),
                limits=TermLimits(**{k: float(v) for k, v in public["limits"].items()}),
                parameters=int(public["parameters"]),
                augmented=bool(public["augmented"]),
                temper=float(public["temper"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"These are no terms of a private round: {error}.") from error
        if not np.isfinite(made.coefficients).all():
            raise InputError("A coefficient of a private round is not a finite number.")
        return made

    def contribution(self, base: float, b: FloatArray, update: FloatArray) -> FloatArray:
        """Return the vector (M4) of a client, every coordinate within 1.

        Parameters
        ----------
        base
            Its base weight d, such as the inverse of its invitation probability.
        b
            Its standardised balance columns, (q,).
        update
            Its update, (P,).
        """
        how, q = self.limits, len(self.balance.names)
        inside = np.clip(b, -how.largest_column, how.largest_column)
        exponent = float(inside @ self.coefficients)
        e = base * math.exp(min(max(exponent, -how.largest_exponent), how.largest_exponent))
        most = how.largest_weight * self.unit
        norm = float(np.linalg.norm(update))
        clipped = update if norm <= how.clip else update * (how.clip / norm)
        cut = np.array([e > most, np.abs(b).max(initial=0.0) > how.largest_column, norm > how.clip])
        e = min(e, most)
        mild = e**self.temper
        return self.parts.packed(
            weight=np.array([e]),
            square=np.array([e**2]),
            first=e * inside,
            second=e * np.outer(inside, inside)[np.triu_indices(q)],
            cut=cut.astype(np.float64),
            update=e * clipped,
            cross=e * np.outer(inside, clipped) if self.augmented else np.empty(0),
            tempered=np.array([mild]),
            tempered_square=np.array([mild**2]),
            tempered_first=mild * inside,
            tempered_update=mild * clipped,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundTotals:
    """The totals of a round that was opened."""

    online: OnlineSums
    square: float  # of weights
    cut: tuple[int, int, int]  # clients whose weight, columns, update were cut
    update: FloatArray  # sum of e c Delta, (P,)
    cross: FloatArray | None  # sum of e b c Delta', (q, P), where augmented
    contributors: int
    clipped: int  # values beyond the range of the code, 0 from clients that follow the protocol
    tolerance: float  # of one coordinate, in units of its bound
    efficiency: float  # of the step's weights: their mean squared over their mean square
    mean_columns: FloatArray  # by the step's weights, (q,)
    step: FloatArray  # the mean update by the step's weights, (P,)

    @classmethod
    def of(cls, terms: RoundTerms, found: SumResult) -> Self:
        """Return the totals of an opened sum."""
        values, q = terms.parts.unpacked(found.total), len(terms.balance.names)
        second = np.zeros((q, q))
        second[np.triu_indices(q)] = values["second"]
        second = second + np.triu(second, 1).T
        cut = [round(float(n)) for n in values["cut"]]
        of = "tempered_{}" if terms.temper < 1.0 else "{}"
        total = float(values["tempered" if terms.temper < 1.0 else "weight"][0])
        total = total if total > 0.0 else math.nan  # a fault, found by its sum of weights
        squares = float(values[of.format("square")][0])
        return cls(
            online=OnlineSums(
                count=float(values["weight"][0]), first=values["first"], second=second
            ),
            square=float(values["square"][0]),
            cut=(cut[0], cut[1], cut[2]),
            update=values["update"],
            cross=values["cross"].reshape(q, -1) if terms.augmented else None,
            contributors=found.contributors,
            clipped=found.clipped,
            tolerance=found.error,
            efficiency=total**2 / (found.contributors * squares) if squares > 0.0 else math.nan,
            mean_columns=values[of.format("first")] / total,
            step=values[of.format("update")] / total,
        )

    @property
    def effective_replies(self) -> float:
        """Kish's number of replies that equal weights would make as good."""
        return self.online.count**2 / self.square if self.square > 0.0 else math.nan

    def fault(self, terms: RoundTerms) -> str:
        r"""Return why no clients that follow the protocol can have these totals; empty if they can.

        .. math:: 0 < \sum e_i \le n W u, \quad \Big|\sum e_i b_{ij}\Big| \le B \sum e_i, \quad
           0 \preceq \sum e_i b_i b_i' - \frac{(\sum e_i b_i)(\sum e_i b_i)'}{\sum e_i}, \quad
           \Big\|\sum e_i c_i \Delta_i\Big\| \le C \sum e_i \qquad (M5)

        each with room for the rounding of codes. One client that sends something else than a coded
        vector, such as words of an earlier round, moves all coordinates at random and is all but
        certain to break them; one that lies within its bounds is not found out.
        """
        how, e, n = terms.limits, self.online.count, self.contributors
        most, off = how.largest_weight * terms.unit, self.tolerance
        if not most * off < e <= most * (n + off):
            return "the sum of weights is out of range"
        moment = how.largest_column * most * off  # what rounding adds to a first moment
        first, spread = self.online.first, self.online.second
        spread = spread - np.outer(first, first) / e
        least = float(np.linalg.eigvalsh(spread)[0]) if len(spread) else 0.0
        room = 4.0 * len(spread) * how.largest_column * moment * (1.0 + n * most / e)
        added = (1.0 + math.sqrt(len(self.update))) * most * how.clip * off
        broken = {
            "values are beyond the range of the code": self.clipped != 0,
            "more clients were cut than have a part in it": not all(0 <= k <= n for k in self.cut),
            "first moments are out of range": (
                np.abs(first) > how.largest_column * e + moment
            ).any(),
            "second moments are those of no weights": not least >= -room,
            "squares are out of range": not 0.0 < self.square <= most * (e + 2.0 * most * off),
            "the mean update is longer than any client's may be": not (
                float(np.linalg.norm(self.update)) <= how.clip * e + added
            ),
        }  # fmt: skip
        return next((reason for reason, bad in broken.items() if bad), "")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrivateCalibration:
    """What the server keeps between rounds: the calibration, and its mean weight."""

    online: OnlineState
    replies: float = 0.0  # contributors, earlier rounds less
    settings: OnlineSettings

    @classmethod
    def begun(cls, balance: BalanceMap, settings: OnlineSettings) -> Self:
        """Return the state before the first round."""
        q = len(balance.names)
        zeros = np.zeros(q)
        online = OnlineState(
            names=balance.names, scale=balance.scale, coefficients=zeros, first=zeros,
            second=np.zeros((q, q)),
        )  # fmt: skip
        return cls(online=online, settings=settings)

    def unit(self, base: float) -> float:
        """Return the mean weight so far, or of the base weights before the first round."""
        return self.online.count / self.replies if self.replies else base

    def after(self, totals: RoundTotals) -> PrivateCalibration:
        """Return the state after a round, the coefficients one step further."""
        return replace(
            self,
            online=self.online.moved(totals.online, self.settings),
            replies=self.settings.decay * self.replies + totals.contributors,
        )

    def to_arrays(self) -> dict[str, Any]:
        """Return what ``restored`` needs."""
        return {"online": self.online.to_arrays(), "replies": self.replies}

    def restored(self, saved: Mapping[str, Any]) -> PrivateCalibration:
        """Return a saved state."""
        online = OnlineState.of(saved["online"])
        return replace(self, online=online, replies=float(saved["replies"]))
