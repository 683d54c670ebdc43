"""What a run tells while it goes on: log lines, reports to callbacks, a summary at the end."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from fedipw.errors import InputError
from fedipw.flower.outcomes import PREFIX
from fedipw.flower.stopping import Interval, intervals_of
from fedipw.numerics.checks import visible

TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
_KINDS_MAX = 5  # different texts of one warning that are shown, such as reasons of refusal
_SHOWN = 8  # metrics on a line
_FIELD = re.compile(r"%[-#0 +]*[\d.*]*([a-zA-Z%])")
_LOG = getLogger("flwr.fedipw")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundReport:
    """A round of training or evaluation that has just closed, as callbacks receive it.

    Examples
    --------
    >>> metrics = MetricRecord({"loss": 0.4, "loss-target": 0.5, "loss-target-se": 0.05,
    ...                         "loss-target-low": 0.4, "loss-target-high": 0.6,
    ...                         "fedipw-replied": 12, "fedipw-weights": [0.5, 0.5]})
    >>> report = RoundReport.of(3, "evaluate", metrics, ArrayRecord())
    >>> report.metrics["loss"], report.intervals["loss"].high, report.counts["replied"]
    (0.4, 0.6, 12)
    """

    round: int
    work: Literal["train", "evaluate"]
    metrics: Mapping[str, float]  # all that are one number, under their names in Flower's record
    intervals: Mapping[str, Interval]  # of the target population, by metric and subgroup
    counts: Mapping[str, int]  # available, invited, replied and the other outcomes
    lists: Mapping[str, tuple[float, ...]]  # metrics that are several numbers, such as the weights
    _arrays: ArrayRecord = field(repr=False)

    @classmethod
    def of(
        cls, index: int, work: Literal["train", "evaluate"], metrics: MetricRecord,
        arrays: ArrayRecord,
    ) -> RoundReport:  # fmt: skip
        """Return the report of a round's metrics and the model after it."""
        numbers = {k: float(v) for k, v in metrics.items() if not isinstance(v, list)}
        counts = {
            name.removeprefix(PREFIX): int(value)
            for name, value in metrics.items()
            if name.startswith(PREFIX) and isinstance(value, int)
        }
        lists = {k: tuple(map(float, v)) for k, v in metrics.items() if isinstance(v, list)}
        return cls(
            round=index, work=work, metrics=MappingProxyType(numbers),
            intervals=MappingProxyType(intervals_of(metrics)), counts=MappingProxyType(counts),
            lists=MappingProxyType(lists), _arrays=arrays,
        )  # fmt: skip

    def model(self) -> dict[str, NDArray[Any]]:
        """Return the model after the round, by array; copies, made when they are asked for."""
        return {name: np.array(array.numpy()) for name, array in self._arrays.items()}


Callback: TypeAlias = Callable[[RoundReport], object]


@final
class Reporter:
    """Passes reports on to callbacks; one that fails is logged and called again next time."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        strange = [one for one in callbacks if not callable(one)]
        if strange:
            raise InputError(f"callbacks are functions of a RoundReport, not {strange[0]!r}.")
        self._callbacks = tuple(callbacks)

    def report(
        self, index: int, work: Literal["train", "evaluate"], metrics: MetricRecord | None,
        arrays: ArrayRecord,
    ) -> None:  # fmt: skip
        """Call every callback with a round's report."""
        if not self._callbacks:
            return
        made = RoundReport.of(index, work, MetricRecord() if metrics is None else metrics, arrays)
        for callback in self._callbacks:
            try:
                callback(made)
            except Exception as error:
                name = getattr(callback, "__qualname__", type(callback).__qualname__)
                _LOG.warning("FedIPW: the callback %s failed in round %d with %s: %r", name, index,
                             type(error).__name__, visible(str(error))[:500])  # fmt: skip


def target_line(metrics: Mapping[str, object]) -> str:
    """Return the target population's metrics for a log line, subgroups left to the summary.

    >>> target_line({"loss-target": 0.5, "loss-target-se": 0.05, "loss-target-low": 0.4,
    ...              "loss-target-high": 0.6, "loss-plain": 0.45})
    'loss 0.5 (95% 0.4 to 0.6, respondents 0.45)'
    >>> target_line({"loss": 0.5, "loss-plain": 0.45})
    'loss 0.5 (no interval, respondents 0.45)'
    """
    found, said = intervals_of(metrics), []
    names = [key.removesuffix("-plain") for key in metrics if key.endswith("-plain")]
    for name in names[:_SHOWN]:
        plain = f", respondents {_number(metrics[f'{name}-plain'])}"
        if name in found:
            said.append(f"{visible(name)} {_interval(found[name])[:-1]}{plain})")
        elif name in metrics:
            said.append(f"{visible(name)} {_number(metrics[name])} (no interval{plain})")
    more = len(names) - _SHOWN
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def plain_line(metrics: Mapping[str, object]) -> str:
    """Return a round's weighted metrics of training for a log line.

    >>> plain_line({"loss": 0.41234, "fedipw-replied": 3})
    'loss 0.4123'
    """
    own = {k: v for k, v in metrics.items() if not (k.startswith(PREFIX) or isinstance(v, list))}
    said = [f"{visible(name)} {_number(own[name])}" for name in list(own)[:_SHOWN]]
    return ", ".join(said) + (f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else "")


def summary_lines(result: Result) -> list[str]:
    """Return the summary at the end: the metrics of the last rounds, subgroups among them."""
    out = []
    evaluated, trained = result.evaluate_metrics_clientapp, result.train_metrics_clientapp
    if trained:
        last = max(trained)
        out.append(f"training, round {last}: {plain_line(trained[last]) or 'no metrics'}")
    if evaluated:
        last = max(evaluated)
        found = intervals_of(evaluated[last])
        out.append(f"target population, round {last}: {target_line(evaluated[last])}")
        out += [f"  {visible(n)} {_interval(i)}" for n, i in found.items() if "[" in n]
    if result.evaluate_metrics_serverapp:
        last = max(result.evaluate_metrics_serverapp)
        found_here = plain_line(result.evaluate_metrics_serverapp[last])
        out.append(f"evaluation on the server, round {last}: {found_here}")
    return out


def _interval(found: Interval) -> str:
    return f"{_number(found.estimate)} (95% {_number(found.low)} to {_number(found.high)})"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else visible(str(value))


@final
class _Once(logging.Filter):
    """Lets a warning pass the first time, and counts it from then on.

    Two are the same if their text is, but for what stands for numbers and identifiers (%d, %g, %r):
    one for each reason, not one for each client and round.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[tuple[str, ...], str] = {}
        self.again: Counter[tuple[str, ...]] = Counter()
        self._kinds: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        key = _key(record)
        if key in self.first:
            self.again[key] += 1
            return False
        self._kinds[key[0]] += 1
        if self._kinds[key[0]] > _KINDS_MAX:
            self.again[key[0],] += 1
            self.first.setdefault((key[0],), record.getMessage())
            return False
        self.first[key] = record.getMessage()
        return True

    def lines(self) -> list[str]:
        """Return which warnings were repeated, and how often."""
        return [
            f"{count} more like: {self.first[key].removeprefix('FedIPW: ')}"
            for key, count in self.again.items()
        ]


def _key(record: logging.LogRecord) -> tuple[str, ...]:
    """Return what a warning says but for numbers and identifiers."""
    text, args = str(record.msg), record.args
    if not isinstance(args, tuple):
        return (text,)
    fields = [kind for kind in _FIELD.findall(text) if kind != "%"]
    if len(fields) != len(args):
        return (text,)
    return (text, *(str(a) for kind, a in zip(fields, args, strict=True) if kind == "s"))


@contextmanager
def warnings_once() -> Iterator[None]:
    """Log each warning of the strategy once, and at the end how often it was repeated."""
    once = _Once()
    _LOG.addFilter(once)
    try:
        yield
    finally:
        _LOG.removeFilter(once)
        for line in once.lines():
            _LOG.warning("FedIPW: %s", line)
