"""``python -m benchmarks.observed --data DIR``: both stages of selection as they were observed.

Three studies, all by default, or those named: ``evaluation`` (nine shares of the Michigan survey by
every estimator, and coverage over bootstrap populations), ``training`` (models of an outcome,
trained by respondents and judged on everybody, on both data sets) and ``courses`` (22 course
presentations of OULAD, in which replies depend on the outcome).

The tables are not part of the project: ``--data`` or ``FEDIPW_DATA`` names their directory.
Aggregates go to benchmarks/results/observed-*.json, tables and figures of the docs to docs/_static;
``--saved`` makes these from the saved results alone.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.observed import pages
from benchmarks.observed.courses import courses
from benchmarks.observed.evaluation import FORMULA, coverage, estimates, survey
from benchmarks.observed.training import training
from fedipw.lab.files import environment

RESULTS = Path(__file__).parents[1] / "results"
STATIC = Path(__file__).parents[2] / "docs" / "_static"


def evaluation(data: Path, populations: int) -> dict[str, Any]:
    """Return the survey's estimates and their coverage."""
    tables = survey(data)
    found = estimates(tables)
    return {
        "population": tables.clients.height,
        "enrolled": int(tables.enrolled.sum()),
        "respondents": tables.metric("HIGHBP").height,
        "enrollment": FORMULA,
        "participation": FORMULA,
        "estimates": [{**asdict(one), "holds": one.holds} for one in found],
        "coverage": coverage(tables, populations),
    }


STUDIES: Mapping[str, Callable[[Path, int], dict[str, Any]]] = {
    "evaluation": evaluation,
    "training": training,
    "courses": courses,
}
REPEATS = {"evaluation": 400, "training": 24, "courses": 1}  # populations, seeds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run studies, or read what was saved, and write results, tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", help="evaluation, training, courses; all if none")
    parser.add_argument("--data", type=Path, default=os.environ.get("FEDIPW_DATA"))
    parser.add_argument("--saved", action="store_true", help="only make tables and figures again")
    parser.add_argument("--repeats", type=int, help="bootstrap populations, or seeds")
    parser.add_argument("--out", type=Path, help="write everything to this directory instead")
    chosen = parser.parse_args(arguments)
    for name in chosen.studies or STUDIES:
        if name not in STUDIES:
            parser.error(f"no study {name!r}; there are {', '.join(STUDIES)}")
        if chosen.data is None and not chosen.saved:
            parser.error("give the directory of the tables by --data or FEDIPW_DATA")
        result = RESULTS / f"observed-{name}.json"
        if not chosen.saved:
            found = STUDIES[name](Path(chosen.data), chosen.repeats or REPEATS[name])
            result = (chosen.out or RESULTS) / result.name
            saved = json.dumps({**environment(), **found}, indent=1, allow_nan=False)
            result.write_text(saved + "\n", encoding="utf-8")
        written = pages.PAGES[name](json.loads(result.read_text(encoding="utf-8")))
        for file, write in written.items():
            write((chosen.out or STATIC) / file)


if __name__ == "__main__":
    main()
