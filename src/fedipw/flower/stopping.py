"""Rules that end a run when the target population's interval says so, for ``should_stop``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedipw.errors import InputError
from fedipw.numerics.checks import check_positive


class Interval(NamedTuple):
    """A metric of the target population with its interval."""

    estimate: float
    se: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return 0.5 * (self.high - self.low)


def interval_of(metrics: Mapping[str, object], name: str) -> Interval | None:
    """Return the interval of a metric among a round's metrics, none if there is none.

    >>> interval_of({"loss-target": 0.5, "loss-target-se": 0.1, "loss-target-low": 0.25,
    ...              "loss-target-high": 0.75}, "loss").half_width
    0.25
    """
    found = [metrics.get(f"{name}-target{key}") for key in ("", "-se", "-low", "-high")]
    numbers = [float(value) for value in found if isinstance(value, int | float)]
    if len(numbers) < len(found) or not all(map(math.isfinite, numbers)):
        return None
    return Interval(*numbers)


def intervals_of(metrics: Mapping[str, object]) -> dict[str, Interval]:
    """Return all intervals among a round's metrics, subgroups as ``loss[os = ios]``."""
    names = [key.removesuffix("-target") for key in metrics if key.endswith("-target")]
    found = {name: interval_of(metrics, name) for name in names}
    return {name: interval for name, interval in found.items() if interval is not None}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StopWhen:
    r"""Stop when a metric's interval is narrow enough, or shows no improvement for a while.

    With the estimate :math:`m_r` of round r, better if smaller, and half its interval
    :math:`h_r`, the best so far is

    .. math:: b_r = \begin{cases} m_r & m_r < b_{r-1} - h_r \\ b_{r-1} & \text{else} \end{cases}
       \qquad (E34)

    and a run stops when :math:`h_r \le` ``half_width``, or when ``patience`` evaluations have not
    changed b.

    It is a pure function of the results so far: a run that is started again stops at the same
    round. Rounds without an interval are not counted. The intervals are of one look each: over many
    looks at least one misses the truth far more often than 5%, and the round at which a rule stops
    looks better than it is. Evaluate the final model once more, on other clients or rounds, for an
    interval that holds.

    Parameters
    ----------
    metric
        Name of a metric that clients report, or of one of its subgroups, as ``loss[os = ios]``.
    half_width
        Stop when the interval is at most this far from its middle; none for never.
    patience
        Stop after so many evaluations without an improvement beyond the interval; none for never.
    higher_is_better
        Whether the metric is to grow, as accuracy does; by default it is unless it is a loss or an
        error by its name.
    least
        Evaluations before which nothing stops.

    Examples
    --------
    >>> from flwr.app import MetricRecord
    >>> def told(mean, half):
    ...     return MetricRecord({"loss-target": mean, "loss-target-se": half / 2,
    ...                          "loss-target-low": mean - half, "loss-target-high": mean + half})
    >>> result = Result(evaluate_metrics_clientapp={1: told(0.9, 0.2), 2: told(0.6, 0.1),
    ...                                             3: told(0.55, 0.1), 4: told(0.58, 0.1)})
    >>> StopWhen(metric="loss", half_width=0.1)(2, result)
    True
    >>> [StopWhen(metric="loss", patience=2)(index, result) for index in (1, 2, 3, 4)]
    [False, False, False, True]
    """

    metric: str
    half_width: float | None = None
    patience: int | None = None
    higher_is_better: bool | None = None
    least: int = 1

    def __post_init__(self) -> None:
        if self.half_width is None and self.patience is None:
            raise InputError("StopWhen needs half_width= or patience=, else it never stops.")
        if self.half_width is not None:
            check_positive(self.half_width, "half_width")
        for name in ("patience", "least"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InputError(f"{name} is a number of evaluations, 1 or more, not {value!r}.")

    def __call__(self, server_round: int, result: Result) -> bool:
        """Return whether the run ends after this round."""
        seen = self._seen(server_round, result.evaluate_metrics_clientapp)
        if len(seen) < self.least or not seen:
            return False
        narrow = self.half_width is not None and seen[-1].half_width <= self.half_width
        return narrow or (self.patience is not None and self._since_best(seen) >= self.patience)

    def _seen(self, last: int, metrics: Mapping[int, MetricRecord]) -> list[Interval]:
        found = (interval_of(metrics[r], self.metric) for r in sorted(metrics) if r <= last)
        return [interval for interval in found if interval is not None]

    def _since_best(self, seen: Sequence[Interval]) -> int:
        """Return the evaluations since one was better than the best by more than its half-width."""
        sign = 1.0 if self._grows else -1.0
        best, since = sign * seen[0].estimate, 0
        for interval in seen[1:]:
            value = sign * interval.estimate
            if value > best + interval.half_width:
                best, since = value, 0
            else:
                since += 1
        return since

    @property
    def _grows(self) -> bool:
        if self.higher_is_better is not None:
            return self.higher_is_better
        name = self.metric.split("[")[0].lower()
        return not any(word in name for word in ("loss", "error", "perplexity", "mse", "mae"))
