"""Differences that mended defects explain: what is here does not fail the comparison.

An entry names the command and the place as the comparison prints them, with ``*`` for any text, and
says which defect was mended:

    Expected(
        command="weights greg*",
        what="weights.parquet:weight",
        why="greg weighed replies without a value as if they had one",
        world="missing",
    )

An entry that explains nothing any more is printed, and should go.
"""

from __future__ import annotations

from benchmarks.compare.agreement import Expected

_FIFTHS = "fifths of a column were cut by two rules on one page; now by the population's quantiles"
_RANK = (
    "participation fits of the first rounds, when history columns do not vary yet, took the least "
    "solution in a simulation and left columns out on files; now both leave columns out"
)
_TRIM = "trimming took the mean of signed weights; now it cuts by size, at a multiple of mean size"
_NOISE = (
    "calibrated-noise-aware and the other calibrated methods were one estimator where targets have "
    "standard errors; now only the first uses them"
)
_COLLAPSED = (
    "clients left out because values are missing counted in the population size of collapsed alone"
)
_ERRORS = "standard errors were those one Newton step before the maximum; now at the maximum itself"
_TIES = "ranks of methods that agree to rounding were told apart by it; now they are ties"

EXPECTED: tuple[Expected, ...] = (
    Expected(command="audit*", what="audit/rates/*", why=_FIFTHS),
    Expected(command="audit*", what="audit/heat/*", why=_FIFTHS),
    Expected(command="audit*", what="audit/stages/*/standard_error", why=_ERRORS),
    Expected(command="simulate history, trim", what="*", why=_RANK, world="testbed"),
    Expected(command="weights greg --trim*", what="*", why=_TRIM, world="table"),
    Expected(command="weights calibrated-quadratic noisy", what="*", why=_NOISE, world="totals"),
    Expected(command="weights collapsed --missing drop", what="*", why=_COLLAPSED, world="missing"),
    Expected(
        command="weights collapsed", what="stdout/enrollment_fits",
        why="enrollment as it changes is counted, whether or not a method fits it",
        world="changes",
    ),
    Expected(command="study", what="summary.csv:mean_rank", why=_TIES, world="testbed"),
    Expected(command="study", what="ranks.csv:mean_rank", why=_TIES, world="testbed"),
)  # fmt: skip
