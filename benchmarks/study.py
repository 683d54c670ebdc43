"""``python -m benchmarks.study``: how long a study takes, and where a job spends its time.

Runs examples/studies/testbed.toml (10 methods, 20 seeds, 300 rounds) on two processes, then one of
its jobs under a profiler. Results go to benchmarks/results/study.json.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

from fedipw.lab.files import environment
from fedipw.lab.study import jobs_of, run_study
from fedipw.lab.study_file import study_from

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "examples" / "studies" / "testbed.toml"
RESULT = Path(__file__).parent / "results" / "study.json"
WORKERS, LIMIT = 2, 180.0  # seconds it may take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--note", default="", help="said beside the numbers")
    arguments = parser.parse_args()
    study = study_from(STUDY)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        began, cpu = time.perf_counter(), _cpu()
        run_study(study, Path(scratch) / "out", workers=WORKERS)
        seconds, used = time.perf_counter() - began, _cpu() - cpu
        manifest = json.loads((Path(scratch) / "out" / "manifest.json").read_text())
    job = jobs_of(study)[0]
    result = {
        "workload": f"{len(study.methods)} methods x {len(study.seeds)} seeds x "
        f"{study.cases[0].scenario.rounds} rounds, testbed of 1000 clients",
        "seconds": seconds,
        "seconds_allowed": LIMIT,
        "processor_seconds": used,
        "job_seconds": manifest["seconds"]["jobs"],
        "workers": WORKERS,
        "cores": os.cpu_count(),
        "load_before": load,
        "note": arguments.note,
        "job_profile": profile(job.part),
        **environment(),
    }
    print(json.dumps(result, indent=2))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def profile(run: Any, shown: int = 12) -> dict[str, float]:
    """Return the functions in which most time is spent, with their own share of it."""
    run()  # compiles
    profiler = cProfile.Profile()
    profiler.runcall(run)
    rows = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in rows.values())
    most = sorted(rows.items(), key=lambda item: -item[1][2])[:shown]
    return {
        f"{Path(file).name}:{name}": round(own / total, 3)
        for (file, _, name), (_, _, own, _, _) in most
    }


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
