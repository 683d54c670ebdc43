"""``python -m benchmarks.studies [NAME ...]``: the studies whose tables the documentation shows.

Runs examples/studies/NAME.toml (baselines, breaks, real) as ``fedipw study`` does, resuming what an
earlier run left in .benchmarks/studies. Tables and figures go to docs/_static, all numbers to
benchmarks/results/studies-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedipw.lab.comparison import StudyTables
from fedipw.lab.files import environment
from fedipw.lab.study import run_study
from fedipw.lab.study_file import Study, study_from
from fedipw.lab.style import look_of

ROOT = Path(__file__).parents[1]
NAMES = ("baselines", "breaks", "real")
MARKS = {"lower": " ↓", "higher": " ↑", "no difference shown": ""}


def number(value: float | None) -> str:
    """Return thousandths with three digits that count."""
    if value is None:
        return "–"
    scaled = 1e3 * value
    return f"{scaled:.1f}" if abs(scaled) >= 10 else f"{scaled:.2f}"


def means(study: Study, found: StudyTables) -> Iterator[str]:
    """Yield a table: methods by scenarios, marked by what the paired comparison shows."""
    verdict = {(r["scenario"], r["method"]): r["verdict"] for r in found.comparison.to_dicts()}
    mean = {(r["scenario"], r["method"]): r["mean"] for r in found.summary.to_dicts()}
    yield "| method | " + " | ".join(case.title for case in study.cases) + " |"
    yield "| --- |" + " --- |" * len(study.cases)
    for method in study.methods:
        cells = [
            number(mean[key]) + MARKS.get(verdict.get(key, ""), "") if key in mean else ""
            for key in ((case.name, method) for case in study.cases)
        ]
        yield f"| {look_of(method).label} | " + " | ".join(cells) + " |"


def differences(study: Study, found: StudyTables, methods: tuple[str, ...]) -> Iterator[str]:
    """Yield a table of paired differences from the reference, with 95% intervals."""
    rows = {(r["scenario"], r["method"]): r for r in found.comparison.to_dicts()}
    yield "| | " + " | ".join(look_of(m).label for m in methods) + " |"
    yield "| --- |" + " --- |" * len(methods)
    for case in study.cases:
        cells = []
        for method in methods:
            row = rows.get((case.name, method))
            cells.append(
                "–"
                if row is None
                else f"{number(row['difference'])} [{number(row['low'])}, {number(row['high'])}]"
            )
        yield f"| {case.title} | " + " | ".join(cells) + " |"


COMPARED = {
    "baselines": ("fedipw", "fednova+fedipw", "scaffold", "scaffold+fedipw", "mifa", "mifa+fedipw"),
    "breaks": ("fedavg", "fedipw", "fedipw-hajek", "scaffold+fedipw", "efficient"),
    "real": ("fedavg", "fedipw", "calibrated-entropy", "efficient", "scaffold+fedipw"),
}


def record(study: Study, found: StudyTables) -> dict[str, Any]:
    """Return what is saved."""
    return {
        "title": study.title,
        "measure": study.measure.column,
        "seeds": list(study.seeds),
        "summary": found.summary.to_dicts(),
        "comparison": found.comparison.to_dicts(),
        "ranks": found.ranks.to_dicts(),
        **environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    given = parser.parse_args()
    static, results = ROOT / "docs" / "_static", ROOT / "benchmarks" / "results"
    for name in given.names:
        out = ROOT / ".benchmarks" / "studies" / name
        study = study_from(ROOT / "examples" / "studies" / f"{name}.toml")
        out.parent.mkdir(parents=True, exist_ok=True)
        found = run_study(study, out, workers=given.workers)
        (static / f"study-{name}.md").write_text("\n".join(means(study, found)) + "\n")
        compared = "\n".join(differences(study, found, COMPARED[name])) + "\n"
        (static / f"study-{name}-differences.md").write_text(compared)
        shutil.copy(out / "figure.png", static / f"study-{name}.png")
        made = json.dumps(record(study, found), indent=1) + "\n"
        (results / f"studies-{name}.json").write_text(made)
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
