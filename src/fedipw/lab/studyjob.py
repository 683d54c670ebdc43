"""One job of a study: a scenario with one seed and all its methods, as rows of a table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedipw.errors import DivergedError, FedIPWError
from fedipw.lab.engine import History, Simulation, tail_length
from fedipw.lab.scenario import Scenario
from fedipw.lab.theory import FederatedLogistic, error_parts

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray, IntArray

NUMBERS = (
    "excess_loss",
    "tail_excess_loss",
    "mean_tail_loss",
    "distance",
    "limit_excess_loss",
    "optimisation",
    "lottery",
    "bias",
    "mean_replies",
    "mean_effective_replies",
    "best_loss",
)
COUNTS = ("enrolled_size", "skipped_rounds")
RESULT: Mapping[str, Any] = {
    "scenario": pl.String,
    "method": pl.String,
    "seed": pl.Int64,
    **dict.fromkeys(NUMBERS, pl.Float64),
    **dict.fromkeys(COUNTS, pl.Int64),
    "failure": pl.String,
    "limit_failure": pl.String,
}
PART: Mapping[str, Any] = {
    **RESULT,
    "curve_round": pl.List(pl.Int64),
    "curve_excess_loss": pl.List(pl.Float64),
    "seconds": pl.Float64,
    "fingerprint": pl.String,
}
_POINTS = 20  # of a curve, evenly over its rounds, and as many more towards its start


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A scenario, with the seed it is run with, and what its part file must hold."""

    name: str
    scenario: Scenario
    file: str
    fingerprint: str

    def part(self) -> pl.DataFrame:
        """Run it: one row per method, in the scenario's order.

        A method that fails keeps its row, with the reason and no numbers; the others are run
        without it, which changes nothing for them.
        """
        began = time.perf_counter()
        rows = _rows(self.scenario)
        shared = {
            "scenario": self.name,
            "seed": self.scenario.seed,
            "seconds": time.perf_counter() - began,
            "fingerprint": self.fingerprint,
        }
        empty = dict.fromkeys(PART)
        return pl.DataFrame(
            [{**empty, **rows[m], **shared, "method": m} for m in self.scenario.methods],
            schema=dict(PART),
        )

    def fits(self, part: pl.DataFrame) -> bool:
        """Whether a part is one of this job: its columns, scenario, seed, methods, settings."""
        return (
            dict(part.schema) == {name: _kind(kind) for name, kind in PART.items()}
            and part["method"].to_list() == list(self.scenario.methods)
            and set(part["scenario"]) == {self.name}
            and set(part["seed"]) == {self.scenario.seed}
            and set(part["fingerprint"]) == {self.fingerprint}
        )


def finished(job: Job) -> tuple[str, pl.DataFrame]:
    """Return a job's file and part; here, so that a worker needs no plotting."""
    return job.file, job.part()


def _kind(kind: Any) -> Any:
    return kind() if isinstance(kind, type) else kind


def curve_rounds(rounds: int) -> IntArray:
    """Return the rounds at which a curve is kept: some forty, denser at the start.

    >>> curve_rounds(12).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    >>> len(curve_rounds(600)), int(curve_rounds(600)[-1])
    (37, 600)
    """
    even = np.linspace(1, rounds, min(rounds, _POINTS))
    early = np.geomspace(1, rounds, min(rounds, _POINTS))
    return np.unique(np.rint(np.concatenate([even, early])).astype(np.int64))


def _rows(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return each method's columns: all together, or one at a time if one of them fails."""
    try:
        return _together(scenario, limits=scenario.has_limits)
    except FedIPWError:
        return {name: _alone(scenario, name) for name in scenario.methods}


def _alone(scenario: Scenario, name: str) -> dict[str, Any]:
    """Return the columns of one method; a limit that cannot be had does not cost it the rest."""
    single = replace(scenario, methods=(name,))
    try:
        return _together(single, limits=scenario.has_limits)[name]
    except DivergedError as error:
        return {"failure": str(error)}
    except FedIPWError as error:
        first = str(error)
    try:
        return {**_together(single, limits=False)[name], "limit_failure": first}
    except FedIPWError as error:
        return {"failure": str(error)}


def _together(scenario: Scenario, *, limits: bool) -> dict[str, dict[str, Any]]:
    with np.errstate(over="ignore", invalid="ignore"):  # a method that leaves the finite numbers
        run = scenario.simulation(limits=limits)
        run.advance(scenario.rounds)
        target, history = scenario.objective(run.federation), run.history()
        best = target.minimum()
        shared = {
            "best_loss": best.value,
            "enrolled_size": run.federation.population.enrolled_size,
            "mean_replies": float(history.replies.mean()),
            "skipped_rounds": int(history.skipped.sum()),
        }
        return {
            name: {
                **shared,
                **_losses(scenario, history, target, name),
                "distance": float(np.linalg.norm(history.of(name)[-1] - best.point)),
                "mean_effective_replies": _effective(history, name),
                **_limit(run, target, history.of(name)[-1], name),
            }
            for name in scenario.methods
        }


def _losses(
    scenario: Scenario, history: History, target: FederatedLogistic, name: str
) -> dict[str, Any]:
    """Return the losses of a method's last, averaged and kept models, in one pass over the data."""
    iterates = history.of(name)
    tail = iterates[-tail_length(history.rounds, scenario.training.tail) :]
    rounds = curve_rounds(history.rounds)
    average = history.tail_average(name, scenario.training.tail)
    losses = target.losses(np.vstack([average, tail, iterates[rounds]])) - target.minimum().value
    if not np.isfinite(losses).all():
        raise FedIPWError(
            f"{name} diverged: its loss is no longer finite. Lower the local step size, the number "
            "of local steps or the server step, trim the weights, or use the Hájek form."
        )
    curve = losses[1 + len(tail) :]
    return {
        "excess_loss": float(losses[len(tail)]),
        "tail_excess_loss": float(losses[0]),
        "mean_tail_loss": float(losses[1 : 1 + len(tail)].mean()),
        "curve_round": rounds.tolist(),
        "curve_excess_loss": curve.tolist(),
    }


def _effective(history: History, name: str) -> float | None:
    sizes = history.effective_replies[history.methods.index(name)]
    known = sizes[np.isfinite(sizes)]
    return float(known.mean()) if len(known) else None


def _limit(
    run: Simulation, target: FederatedLogistic, last: FloatArray, name: str
) -> dict[str, Any]:
    weights = run.limits.get(name)
    if weights is None:
        return {}
    parts = error_parts(target, weights, last)
    return {
        "limit_excess_loss": parts.limit_excess_loss,
        "optimisation": parts.optimisation,
        "lottery": parts.lottery,
        "bias": parts.bias,
    }
