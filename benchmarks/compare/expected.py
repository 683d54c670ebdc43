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

EXPECTED: tuple[Expected, ...] = ()
