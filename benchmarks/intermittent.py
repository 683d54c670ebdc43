"""``python -m benchmarks.intermittent``: rules for clients that come and go, alone and weighted.

Excess loss over the whole population on the testbed, of the model after the last round and of the
mean of the last fifth of models. Results go to benchmarks/results/intermittent.json; docs/baselines
shows them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedipw.lab.engine import RuleSettings
from fedipw.lab.engine.intermittent import F3AST
from fedipw.lab.files import environment
from fedipw.lab.scenario import Scenario

RESULT = Path(__file__).parent / "results" / "intermittent.json"
RULES = ("debiased", "fedawe", "focus", "f3ast", "cafed", "mifa")
METHODS = ("fedavg", "participation-only", "fedipw", *RULES, *(f"{rule}+fedipw" for rule in RULES))
BETA = 0.02  # of F3AST: a memory of 50 rounds, where its default has 1,000


def one_seed(seed: int, rounds: int, methods: tuple[str, ...] = METHODS) -> dict[str, list[float]]:
    """Return the excess loss of each method's last and tail-averaged models."""
    rules = RuleSettings(f3ast=F3AST(beta=BETA))
    scenario = Scenario(seed=seed, rounds=rounds, methods=methods, rules=rules)
    run = scenario.simulation(limits=False)
    run.advance(rounds)
    target, history = scenario.objective(run.federation), run.history()
    best = target.minimum().value
    return {
        name: (
            target.losses(np.stack([run.models[name], history.tail_average(name)])) - best
        ).tolist()
        for name in methods
    }


def study(seeds: int = 10, rounds: int = 300) -> dict[str, Any]:
    """Return both figures by method and seed."""
    found = [one_seed(seed, rounds) for seed in range(seeds)]
    excess = {name: [one[name] for one in found] for name in METHODS}
    return {"seeds": seeds, "rounds": rounds, "excess": excess, **environment()}


def lines(saved: dict[str, Any]) -> list[str]:
    """Return the table of the docs."""

    def cells(name: str) -> list[str]:
        values = np.array(saved["excess"][name])
        error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
        return [f"{values[:, k].mean():.4f} ± {error[k]:.4f}" for k in range(2)]

    head = ["rule", "alone, last", "alone, tail", "`+fedipw`, last", "`+fedipw`, tail"]
    rows = [
        ["a plain mean", *cells("fedavg"), *cells("fedipw")],
        ["`participation-only`", *cells("participation-only"), "", ""],
        *([f"`{rule}`", *cells(rule), *cells(f"{rule}+fedipw")] for rule in RULES),
    ]
    return [f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * 4], *rows)]


def main() -> None:
    """Run the study and save it."""
    found = study()
    RESULT.write_text(json.dumps(found, indent=2) + "\n")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
