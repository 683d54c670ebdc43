"""Tables of a study: results, means over seeds, paired comparisons, ranks. Pure functions.

A method that failed in a seed has no value there. It is counted, left out of means and pairs, and
ranked last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from fedipw.lab.study_file import Study
    from fedipw.numerics import FloatArray

LEVEL = 0.95
RESULT: Mapping[str, Any] = {
    "scenario": pl.String,
    "method": pl.String,
    "seed": pl.Int64,
    **dict.fromkeys(
        (
            "excess_loss", "tail_excess_loss", "mean_tail_loss", "distance", "limit_excess_loss",
            "optimisation", "lottery", "bias", "mean_replies", "mean_effective_replies",
            "best_loss",
        ),
        pl.Float64,
    ),
    **dict.fromkeys(("enrolled_size", "skipped_rounds"), pl.Int64),
    "failure": pl.String,
    "limit_failure": pl.String,
}  # fmt: skip
_PARTS = ("optimisation", "lottery", "bias")
_SUMMARY = {
    "scenario": pl.String,
    "method": pl.String,
    "n": pl.Int64,
    **dict.fromkeys(("mean", "se", "low", "high", "median"), pl.Float64),
    "failures": pl.Int64,
    **dict.fromkeys(("limit_mean", "limit_se", *_PARTS, "mean_effective_replies"), pl.Float64),
}
_COMPARISON = {
    "scenario": pl.String,
    "method": pl.String,
    "reference": pl.String,
    "n": pl.Int64,
    **dict.fromkeys(
        (
            "difference", "se", "low", "high", "better", "ratio", "ratio_low", "ratio_high", "p",
            "p_holm",
        ),
        pl.Float64,
    ),
    "verdict": pl.String,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StudyTables:
    """What a study found.

    ``results`` has one row per scenario, seed and method; ``curves`` excess loss at some forty
    rounds of each; ``summary`` one row per scenario and method; ``comparison`` one per scenario and
    method other than the reference; ``ranks`` one per method that every scenario has.
    """

    study: Study
    results: pl.DataFrame
    curves: pl.DataFrame
    summary: pl.DataFrame
    comparison: pl.DataFrame
    ranks: pl.DataFrame

    @classmethod
    def of(cls, study: Study, parts: pl.DataFrame) -> StudyTables:
        """Return the tables of all part files together."""
        results, measure = parts.select(list(RESULT)), study.measure.column
        return cls(
            study=study,
            results=results,
            curves=parts.select("scenario", "method", "seed", "curve_round", "curve_excess_loss")
            .rename({"curve_round": "round", "curve_excess_loss": "excess_loss"})
            .drop_nulls()
            .explode("round", "excess_loss"),
            summary=summary_table(results, measure),
            comparison=comparison_table(results, measure, study.references),
            ranks=rank_table(results, measure),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its standard error and t interval; none where there are too few values."""

    n: int
    mean: float | None
    se: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A method against a reference on the same seeds, method minus reference."""

    n: int
    difference: float | None
    se: float | None
    low: float | None
    high: float | None
    better: float | None  # share of seeds with a lower value
    ratio: float | None  # of the means
    ratio_low: float | None
    ratio_high: float | None
    p: float | None  # of the paired t test

    @property
    def verdict(self) -> str:
        """What the interval shows: lower, higher, or no difference."""
        if self.low is None or self.high is None or self.low <= 0.0 <= self.high:
            return "no difference shown"
        return "lower" if self.high < 0.0 else "higher"


def mean_interval(values: FloatArray, level: float = LEVEL) -> Interval:
    r"""Return mean, standard error and interval :math:`\bar x \pm t_{n-1}\, s/\sqrt n`.

    >>> found = mean_interval(np.array([1.0, 2.0, 3.0]))
    >>> found.mean, round(found.se, 4), round(found.low, 3), round(found.high, 3)
    (2.0, 0.5774, -0.484, 4.484)
    """
    n = len(values)
    if n == 0:
        return Interval(n=0, mean=None, se=None, low=None, high=None)
    mean = float(np.mean(values))
    if n == 1:
        return Interval(n=1, mean=mean, se=None, low=None, high=None)
    se = float(np.std(values, ddof=1) / np.sqrt(n))
    half = _t(n, level) * se
    return Interval(n=n, mean=mean, se=se, low=mean - half, high=mean + half)


def paired(values: FloatArray, reference: FloatArray, level: float = LEVEL) -> Comparison:
    r"""Return how values differ from a reference's, seed by seed, (n,) each.

    The interval of the ratio of means is by the delta method on the log scale, with the covariance
    of the pairs; it needs positive means:

    .. math:: \operatorname{var} \log\frac{\bar y}{\bar x} \approx \frac1n \left(
       \frac{s_y^2}{\bar y^2} + \frac{s_x^2}{\bar x^2} - \frac{2 s_{xy}}{\bar x \bar y}\right)
    """
    gap = mean_interval(values - reference, level)
    ratio, ratio_low, ratio_high = _ratio(values, reference, level)
    return Comparison(
        difference=gap.mean,
        **{name: getattr(gap, name) for name in ("n", "se", "low", "high")},
        better=float(np.mean(values < reference)) if gap.n else None,
        ratio=ratio,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        p=_p_value(gap),
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted by Holm's method for the number of those that exist.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    known = sorted((p, k) for k, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for step, (p, k) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - step) * p))
        adjusted[k] = largest
    return adjusted


def ranks(results: pl.DataFrame, measure: str) -> pl.DataFrame:
    """Return the rank of each method among those of its scenario and seed.

    1 is the least value; ties, to twelve digits, share the mean of their ranks; methods that failed
    share the last.
    """
    lost = pl.col(measure).fill_null(float("inf"))
    return results.select(
        "scenario",
        "method",
        "seed",
        rank=lost.round_sig_figs(12).rank("average").over("scenario", "seed"),
    )


def rank_table(results: pl.DataFrame, measure: str) -> pl.DataFrame:
    """Return the mean rank over scenarios of the methods that every scenario has.

    They are ranked among themselves; each scenario counts alike. Empty if they are fewer than two.
    """
    scenarios = results["scenario"].n_unique()
    held = results.group_by("method", maintain_order=True).agg(pl.col("scenario").n_unique())
    common = held.filter(pl.col("scenario") == scenarios)["method"]
    if len(common) < 2:
        common = common.clear()
    each = ranks(results.filter(pl.col("method").is_in(common.to_list())), measure)
    means = each.group_by("method", "scenario", maintain_order=True).agg(pl.col("rank").mean())
    return means.group_by("method", maintain_order=True).agg(
        mean_rank=pl.col("rank").mean(), scenarios=pl.col("scenario").len().cast(pl.Int64)
    )


def summary_table(results: pl.DataFrame, measure: str) -> pl.DataFrame:
    """Return one row per scenario and method, in the order of the results.

    ``mean``, ``se``, ``low``, ``high`` (95% t interval) and ``median`` are of the measure over the
    ``n`` seeds that have it, ``failures`` counts the others. ``limit_mean`` and ``limit_se`` are of
    the limit's excess loss, the three parts are means over seeds of those of the last model.
    """
    rows = []
    for (scenario, method), part in results.group_by("scenario", "method", maintain_order=True):
        found = mean_interval(_known(part, measure))
        limit = mean_interval(_known(part, "limit_excess_loss"))
        rows.append(
            {
                "scenario": scenario,
                "method": method,
                **asdict(found),
                "median": part[measure].median(),
                "failures": part["failure"].count(),
                "limit_mean": limit.mean,
                "limit_se": limit.se,
                **{name: part[name].mean() for name in _PARTS},
                "mean_effective_replies": part["mean_effective_replies"].mean(),
            }
        )
    mean_rank = ranks(results, measure).group_by("scenario", "method").agg(pl.col("rank").mean())
    return pl.DataFrame(rows, schema=_SUMMARY).join(
        mean_rank.rename({"rank": "mean_rank"}),
        on=["scenario", "method"],
        how="left",
        maintain_order="left",
    )


def comparison_table(
    results: pl.DataFrame, measure: str, references: Mapping[str, str]
) -> pl.DataFrame:
    """Return one row per scenario and method other than the scenario's reference.

    Pairs are the seeds in which both have a value. ``p_holm`` is adjusted for all comparisons of
    the scenario; ``verdict`` goes by the 95% interval of the difference alone.
    """
    rows: list[dict[str, object]] = []
    for (scenario,), part in results.group_by("scenario", maintain_order=True):
        reference = references[str(scenario)]
        methods = [m for m in part["method"].unique(maintain_order=True) if m != reference]
        found = [paired(*_pairs(part, measure, (m, reference))) for m in methods]
        adjusted = holm([one.p for one in found])
        rows += [
            {
                "scenario": scenario,
                "method": method,
                "reference": reference,
                **asdict(one),
                "p_holm": p,
                "verdict": one.verdict,
            }
            for method, one, p in zip(methods, found, adjusted, strict=True)
        ]
    return pl.DataFrame(rows, schema=_COMPARISON)


def _pairs(part: pl.DataFrame, measure: str, names: Iterable[str]) -> tuple[FloatArray, FloatArray]:
    """Return the values of two methods in the seeds that both have."""
    one, two = (
        part.filter(pl.col("method") == name).select("seed", measure).drop_nulls() for name in names
    )
    both = one.join(two, on="seed", how="inner", maintain_order="left")
    return both[measure].to_numpy(), both[f"{measure}_right"].to_numpy()


def _known(part: pl.DataFrame, column: str) -> FloatArray:
    return part[column].drop_nulls().to_numpy()


def _t(n: int, level: float) -> float:
    from scipy import stats  # noqa: PLC0415 (slow to load)

    return float(stats.t.ppf(0.5 + level / 2, n - 1))


def _p_value(gap: Interval) -> float | None:
    if gap.mean is None or gap.se is None:
        return None
    if gap.se == 0.0:
        return 1.0 if gap.mean == 0.0 else 0.0
    from scipy import stats  # noqa: PLC0415 (slow to load)

    return float(2.0 * stats.t.sf(abs(gap.mean / gap.se), gap.n - 1))


def _ratio(
    values: FloatArray, reference: FloatArray, level: float
) -> tuple[float | None, float | None, float | None]:
    n = len(values)
    top, bottom = (float(np.mean(v)) if n else 0.0 for v in (values, reference))
    if not (top > 0.0 and bottom > 0.0):
        return None, None, None
    ratio = top / bottom
    if n == 1:
        return ratio, None, None
    spread = float(np.var(values / top - reference / bottom, ddof=1) / n)
    factor = float(np.exp(_t(n, level) * np.sqrt(spread)))
    return ratio, ratio / factor, ratio * factor
