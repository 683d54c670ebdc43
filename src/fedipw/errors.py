"""Errors that say what failed, with the numbers, and what to do next."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, cast


class FedIPWError(Exception):
    """Base of every error this package raises on purpose."""

    def __post_init__(self) -> None:
        facts = [f.name for f in fields(cast("Any", self)) if not f.kw_only]
        self.args = tuple(getattr(self, name) for name in facts)  # so that workers can pickle it


class InputError(FedIPWError, ValueError):
    """Input that cannot be used as it is; the message names the thing and the remedy."""


class UnwritableError(InputError):
    """A file that cannot be written, such as on a full disk."""


class EmptyRoundError(InputError):
    """A round without any reply that can be weighed: to be skipped and recorded."""


class FedIPWWarning(UserWarning):
    """Input that is used as it is and may be meant otherwise; the message names the cell."""


@dataclass(eq=False, repr=False)
class PositivityError(FedIPWError, ValueError):
    """Probabilities below the threshold one was willing to weigh by."""

    what: str  # which probability
    smallest: float
    threshold: float  # how small it may be

    def __str__(self) -> str:
        return (
            f"The smallest {self.what} is {self.smallest:.3g}, below the threshold "
            f"{self.threshold:g}: weights would lean on very few clients. Narrow the target "
            "population, coarsen the model, or accept a lower threshold."
        )


@dataclass(eq=False, repr=False)
class SeparationError(FedIPWError, ValueError):
    """A logistic model without a maximum: some covariates split the two groups exactly."""

    columns: tuple[str, ...]  # covariates along which the groups part
    n_rows: int  # in the fit
    stage: str = field(default="", kw_only=True)  # of selection, where it is one

    def __str__(self) -> str:
        more = f" and {len(self.columns) - 8} more" if len(self.columns) > 8 else ""
        of = f" of the stage {self.stage}" if self.stage else ""
        return (
            f"{', '.join(self.columns[:8])}{more} separate(s) selected from non-selected clients "
            f"in {self.n_rows} rows{of}: probabilities run to 0 or 1 and no weight exists for the "
            "clients that can never be selected. Drop or coarsen the covariate(s) (their formula, "
            "--lump-below); or, if the split is an accident of a small sample, fit with a penalty: "
            "`soft=True` (--soft), or an L2 penalty of your own (`l2=...`, --l2)."
        )

    def within(self, stage: str) -> SeparationError:
        """Return the error of a stage's model."""
        return SeparationError(self.columns, self.n_rows, stage=stage)

    @property
    def reason(self) -> str:
        """Why there is no model, for reports: columns without their levels, which may be small.

        >>> SeparationError(("os[web]", "os[web]:net[3g]", "age"), 90).reason[:62]
        'os, os:net, age separate(s) selected from non-selected clients'
        """
        names = dict.fromkeys(re.sub(r"\[.*?\](?=:|$)", "", name) for name in self.columns)
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return (
            f"{', '.join([*names][:8])}{more} separate(s) selected from non-selected clients, so "
            "that the likelihood has no maximum; no weight stands for clients that can never be "
            "selected"
        )


@dataclass(eq=False, repr=False)
class NotConvergedError(FedIPWError, ArithmeticError):
    """An iteration that stopped before it met its tolerance."""

    iterations: int  # steps taken
    gradient_norm: float  # where it stood
    tolerance: float  # where it had to get
    advice: str = (  # what to try next
        "Standardise covariates of very different scale, remove collinear ones, or allow more "
        "iterations."
    )

    def within(self, stage: str) -> NotConvergedError:
        """Return the error of a stage's model."""
        advice = f"This is the model of the stage {stage}. {self.advice}"
        return NotConvergedError(self.iterations, self.gradient_norm, self.tolerance, advice)

    @property
    def reason(self) -> str:
        """Why there is no model, for reports."""
        return f"maximum likelihood did not converge in {self.iterations} iterations"

    def __str__(self) -> str:
        return (
            f"Newton stopped after {self.iterations} iterations with gradient norm "
            f"{self.gradient_norm:.3g}, above {self.tolerance:.3g}. {self.advice}"
        )


@dataclass(eq=False, repr=False)
class DivergedError(FedIPWError, ArithmeticError):
    """Training left the finite numbers."""

    method: str
    round: int
    largest_weight: float  # of that round's replies

    def __str__(self) -> str:
        return (
            f"{self.method} diverged in round {self.round} (largest weight "
            f"{self.largest_weight:.3g}). Lower the local step size, the number of local steps or "
            "the server step, trim the weights, or use the Hájek form."
        )


@dataclass(eq=False, repr=False)
class InfeasibleError(FedIPWError, ValueError):
    """Targets that no weights on the enrolled clients can meet."""

    why: str  # what stands in the way
    # constraints that cannot hold together: name, target, least and largest value of the enrolled
    conflict: tuple[tuple[str, float, float, float], ...]
    # the values nearest to the targets that can be met, by name; empty where not worked out
    nearest: dict[str, float] = field(default_factory=dict, kw_only=True)
    # how far those are from the targets: the largest distance, in standard deviations
    least_slack: float = field(default=float("nan"), kw_only=True)
    ways_out: tuple[str, ...] = field(default=(), kw_only=True)

    def __str__(self) -> str:
        listed = "; ".join(
            f"{name} = {target:.6g} (enrolled clients span {least:.6g} to {largest:.6g})"
            for name, target, least, largest in self.conflict
        )
        text = f"{self.why} In conflict: {listed}."
        if self.nearest:
            shown = [f"{name} = {value:.6g}" for name, value in self.nearest.items()]
            more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
            text += (
                f" Nearest that can be met: {', '.join(shown[:8])}{more} (each within "
                f"{self.least_slack:.4g} standard deviations of its target)."
            )
        return f"{text} Ways out: {'; '.join(self.ways_out)}." if self.ways_out else text


@dataclass(eq=False, repr=False)
class NotFiniteError(FedIPWError, ArithmeticError):
    """Results that left the range of numbers; none of them is written."""

    where: str  # what would hold them
    columns: tuple[str, ...]
    count: int

    def __str__(self) -> str:
        return (
            f"{self.where} would hold {self.count} number(s) that are not finite, in "
            f"{', '.join(self.columns)}; nothing was written. Some numbers given are too extreme "
            "to compute with: scale covariates to ordinary units, and look for probabilities near "
            "0."
        )


class WorkerLostError(FedIPWError, RuntimeError):
    """A worker process ended before its task did."""

    def __str__(self) -> str:
        return (
            "A worker process was ended from outside, most often by the system because memory ran "
            "out. Try fewer --workers."
        )
