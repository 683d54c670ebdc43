"""A stated number of cases of our fuzzer, others with every commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from benchmarks.fuzz.run import Result, run_case

CASES, PARTS = 240, 4


def seed() -> int:
    """Return a seed by the commit at hand; a constant where there is none."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    commit = found.stdout.strip()
    return int(commit[:8], 16) if found.returncode == 0 and commit else 20


@pytest.mark.parametrize("part", range(PARTS))
def test_odd_inputs_are_refused_or_answered_rightly(part: int) -> None:
    result = Result(seed=seed())
    for index in range(part, CASES, PARTS):
        run_case(result.seed, index, result)
    assert result.cases == CASES // PARTS
    shown = [f"--seed {result.seed} --only {f.case}: {f.why}" for f in result.faults]
    assert not shown, "\n".join(shown)
