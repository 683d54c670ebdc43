"""``python -m benchmarks.flower_apps``: what the two example apps on Flower show, over seeds.

Each app runs as it is, on an in-process grid, without weights, with a population table and with
totals. The model after the last round is judged by the truth, and what its clients report, plain
and weighted, by that. Results go to benchmarks/results/flower_apps.json, the table to
docs/_static/flower-apps.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import multiprocessing as mp
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from fedipw.lab.files import environment
from fedipw.numerics.threads import limit_threads

EXAMPLES = Path(__file__).parents[1] / "examples" / "flower"
RESULT = Path(__file__).parent / "results" / "flower_apps.json"
TABLE = Path(__file__).parents[1] / "docs" / "_static" / "flower-apps.md"
METRICS = {"testbed": "loss", "digits": "accuracy"}
RUNS: dict[str, dict[str, Any]] = {
    "none (`fedavg`)": {"scheme": "fedavg"},
    "table": {},
    "totals": {"information": "totals"},
}
FIRST = 100  # seed; the apps' settings were chosen by looking at others


def run(task: tuple[str, dict[str, Any]]) -> dict[str, float]:
    """Run an app with some settings, and return the last round's metric by kind."""
    app, changed = task
    for path in (EXAMPLES, EXAMPLES / app):
        sys.path.insert(0, str(path))
    from flwr.app import Context, RecordDict

    from fedipw.flower import InProcessGrid

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    client = importlib.import_module(f"{app}.client_app")
    server = importlib.import_module(f"{app}.server_app")
    settings = tomllib.loads((EXAMPLES / app / "pyproject.toml").read_text(encoding="utf-8"))
    config = {**settings["tool"]["flwr"]["app"]["config"], **changed}
    nodes = {k + 1: {"partition-id": k} for k in range(int(config["enrolled"]))}
    metric, last = METRICS[app], int(config["num-server-rounds"])
    with tempfile.TemporaryDirectory() as output:
        config["output"] = output
        grid = InProcessGrid(client.app, nodes)
        for context in grid.contexts.values():
            context.run_config = config
        server.main(grid, Context(0, 0, {}, RecordDict(), config))
        folder = Path(output) / "ledger" / "checkpoint"
        told, truth = (
            json.loads((folder / f"{kind}-{last:06d}.json").read_text())["metrics"]
            for kind in ("evaluate", "server")
        )
    names = {"plain": "-plain", "estimate": "-target", "low": "-target-low", "high": "-target-high"}
    found = {kind: told.get(f"{metric}{name}", np.nan) for kind, name in names.items()}
    return {**found, "truth": truth[metric]}


def summary(lines: list[dict[str, float]]) -> dict[str, float]:
    """Return biases, errors and coverage over seeds."""
    columns = {name: np.array([line[name] for line in lines]) for name in lines[0]}
    truth = columns["truth"]
    out: dict[str, float] = {"seeds": len(lines), "truth": float(truth.mean())}
    out["truth_se"] = float(truth.std(ddof=1) / np.sqrt(len(lines)))
    for name in ("plain", "estimate"):
        errors = columns[name] - truth
        out[f"{name}_bias"] = float(np.nanmean(errors))
        out[f"{name}_rmse"] = float(np.sqrt(np.nanmean(errors**2)))
    known = np.isfinite(columns["low"])
    inside = (columns["low"] <= truth) & (truth <= columns["high"])
    out["intervals"] = int(known.sum())
    out["coverage"] = float(inside[known].mean()) if known.any() else np.nan
    return out


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the results as a page's table."""
    head = ("app", "weights", "true metric", "plain reports: bias, RMSE", "weighted: bias, RMSE",
            "95% intervals that hold")  # fmt: skip
    rows = [head, ("---",) * len(head)]
    for app, runs in found.items():
        for k, (name, line) in enumerate(runs.items()):
            rows.append((
                f"{app}, {METRICS[app]} ({line['seeds']:.0f} seeds)" if k == 0 else "",
                name,
                f"{line['truth']:.3f}",
                f"{line['plain_bias']:+.3f}, {line['plain_rmse']:.3f}",
                f"{line['estimate_bias']:+.3f}, {line['estimate_rmse']:.3f}",
                f"{line['coverage']:.0%}",
            ))  # fmt: skip
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _setup() -> None:
    limit_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    chosen = parser.parse_args()
    tasks = [
        (app, name, {**settings, "seed": FIRST + seed})
        for app in METRICS
        for name, settings in RUNS.items()
        for seed in range(chosen.seeds)
    ]
    with mp.get_context("spawn").Pool(2, _setup) as pool:
        lines = pool.map(run, [(app, settings) for app, _, settings in tasks], chunksize=1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for app in METRICS:
        found[app] = {
            name: summary([line for line, task in zip(lines, tasks, strict=True)
                           if task[:2] == (app, name)])
            for name in RUNS
        }  # fmt: skip
    print(table(found))
    TABLE.write_text(table(found), encoding="utf-8")
    told = {"environment": environment(), "first_seed": FIRST, "results": found}
    RESULT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
