"""Errors that say what failed, with the numbers, and what to do next."""

from __future__ import annotations


class FedIPWError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(FedIPWError, ValueError):
    """Input that cannot be used as it is; the message names the thing and the remedy."""


class EmptyRoundError(InputError):
    """A round without any reply that can be weighed: to be skipped and recorded."""


class PositivityError(FedIPWError, ValueError):
    """Probabilities below the threshold one was willing to weigh by.

    Attributes
    ----------
    what, smallest, threshold
        Which probability, how small it gets and how small it may be.
    """

    def __init__(self, what: str, smallest: float, threshold: float) -> None:
        super().__init__(what, smallest, threshold)
        self.what, self.smallest, self.threshold = what, smallest, threshold

    def __str__(self) -> str:
        return (
            f"The smallest {self.what} is {self.smallest:.3g}, below the threshold "
            f"{self.threshold:g}: weights would lean on very few clients. Narrow the target "
            "population, coarsen the model, or accept a lower threshold."
        )


class SeparationError(FedIPWError, ValueError):
    """A logistic model without a maximum: some covariates split the two groups exactly.

    Attributes
    ----------
    columns
        Names of the covariates along which the groups part.
    n_rows
        Number of rows in the fit.
    """

    def __init__(self, columns: tuple[str, ...], n_rows: int) -> None:
        super().__init__(columns, n_rows)
        self.columns, self.n_rows = columns, n_rows

    def __str__(self) -> str:
        return (
            f"{', '.join(self.columns)} separate(s) selected from non-selected clients in "
            f"{self.n_rows} rows: probabilities run to 0 or 1 and no weight exists for the clients "
            "that can never be selected. Drop or coarsen the covariate(s), or add an L2 penalty "
            "(`l2=...`, --l2) if the split is an accident of a small sample."
        )


class NotConvergedError(FedIPWError, ArithmeticError):
    """An iteration that stopped before it met its tolerance.

    Attributes
    ----------
    iterations
        Steps taken.
    gradient_norm, tolerance
        Where it stood and where it had to get.
    advice
        What to try next.
    """

    def __init__(
        self, iterations: int, gradient_norm: float, tolerance: float, advice: str | None = None
    ) -> None:
        super().__init__(iterations, gradient_norm, tolerance, advice)
        self.iterations, self.gradient_norm, self.tolerance = iterations, gradient_norm, tolerance
        self.advice = advice or (
            "Standardise covariates of very different scale, remove collinear ones, or allow more "
            "iterations."
        )

    def __str__(self) -> str:
        return (
            f"Newton stopped after {self.iterations} iterations with gradient norm "
            f"{self.gradient_norm:.3g}, above {self.tolerance:.3g}. {self.advice}"
        )


class DivergedError(FedIPWError, ArithmeticError):
    """Training left the finite numbers.

    Attributes
    ----------
    method, round
        Where it happened.
    largest_weight
        The largest weight of that round's replies.
    """

    def __init__(self, method: str, round_: int, largest_weight: float) -> None:
        super().__init__(method, round_, largest_weight)
        self.method, self.round, self.largest_weight = method, round_, largest_weight

    def __str__(self) -> str:
        return (
            f"{self.method} diverged in round {self.round} (largest weight "
            f"{self.largest_weight:.3g}). Lower the local step size, the number of local steps or "
            "the server step, trim the weights, or use the Hájek form."
        )


class InfeasibleError(FedIPWError, ValueError):
    """Targets that no weights on the enrolled clients can meet.

    Attributes
    ----------
    why
        What stands in the way.
    conflict
        The constraints that cannot hold together: name, target, and the least and largest value
        enrolled clients have.
    nearest
        By name, the values nearest to the targets that can be met; empty where not worked out.
    least_slack
        How far those are from the targets: the largest distance, in standard deviations.
    ways_out
        What to do about it.
    """

    def __init__(
        self,
        why: str,
        conflict: tuple[tuple[str, float, float, float], ...],
        *,
        nearest: dict[str, float] | None = None,
        least_slack: float = float("nan"),
        ways_out: tuple[str, ...] = (),
    ) -> None:
        super().__init__(why, conflict)
        self.why, self.conflict, self.ways_out = why, conflict, ways_out
        self.nearest, self.least_slack = nearest or {}, least_slack

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


class WorkerLostError(FedIPWError, RuntimeError):
    """A worker process ended before its task did."""

    def __str__(self) -> str:
        return (
            "A worker process was ended from outside, most often by the system for want of "
            "memory. Try fewer --workers."
        )
