"""``python -m benchmarks.drifting``: participation that changes over rounds, and models of it.

Five mechanisms (D7), (D8) and seven ways to know participation in a round: its true probabilities,
logistic regression on all past rounds, the same with clock columns, on the last rounds, and with a
decay. Enrollment is fitted alike in all. Numbers go to benchmarks/results/drifting.json, tables and
a figure to docs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from threadpoolctl import threadpool_limits

from fedipw.lab.files import environment
from fedipw.lab.mechanisms import (
    ChangePointParticipation,
    ParticipationMechanism,
    ScaledSineAvailability,
    SineParticipation,
    TrendParticipation,
)
from fedipw.lab.scenario import PropensitySettings, Scenario, TrainingSettings
from fedipw.lab.style import new_figure, styled
from fedipw.numerics.threads import limit_threads
from fedipw.tables.ledger import Round

HERE = Path(__file__).parent
RESULT = HERE / "results" / "drifting.json"
STATIC = HERE.parent / "docs" / "_static"
ROUNDS, TAIL = 400, 0.25  # the tail is one cycle of the slow sine
FIRST_SEED = 100
METHODS = ("fedavg", "fedipw-hajek", "augmented")
COVARIATES = ("z1", "z2", "z3")
KNOWN, PAST, CLOCK = "known", "past", "clock"
# participation that opposes enrollment at first and adds to it in the end, as on the testbed
TURNING: Mapping[str, Any] = {
    "coefficients": {"z1": -0.4, "z2": -0.2}, "drift": {"z1": 0.8, "z2": 0.8}
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mechanism, and the clock columns by which a model can follow it."""

    title: str
    mechanism: ParticipationMechanism
    time: tuple[str, ...]
    day_length: float = 100.0

    @cached_property
    def formula(self) -> str:
        """Main effects, the clock, and the clock's products with each of them."""
        products = [f"{z}:{t}" for z in COVARIATES for t in self.time]
        return " + ".join([".", *self.time, *products])


CYCLE, TREND = ("hour_sin", "hour_cos"), ("elapsed",)
CASES = {
    "sine": Case(
        title="sine, 100 rounds", mechanism=SineParticipation(period=100.0), time=CYCLE
    ),
    "fast": Case(
        title="sine, 24 rounds", mechanism=SineParticipation(period=24.0), time=CYCLE,
        day_length=24.0,
    ),
    "scaled": Case(
        title="scaled sine, 100 rounds", mechanism=ScaledSineAvailability(period=100.0), time=CYCLE
    ),
    "trend": Case(
        title="trend", mechanism=TrendParticipation(length=ROUNDS, **TURNING), time=TREND
    ),
    "change": Case(
        title="change point", mechanism=ChangePointParticipation(at=ROUNDS // 2 + 1, **TURNING),
        time=TREND,
    ),
}  # fmt: skip


def ways(case: Case) -> dict[str, PropensitySettings]:
    """Return how participation is known, by name."""
    return {
        KNOWN: PropensitySettings(known_participation=True),
        PAST: PropensitySettings(),
        CLOCK: PropensitySettings(participation=case.formula, day_length=case.day_length),
        "last 10": PropensitySettings(last=10),
        "last 50": PropensitySettings(last=50),
        "decay 0.8": PropensitySettings(decay=0.8),
        "decay 0.95": PropensitySettings(decay=0.95),
    }


WAYS = tuple(ways(CASES["sine"]))


def scenario_of(case: Case, seed: int, rounds: int = ROUNDS) -> Scenario:
    """Return a run of the testbed with a case's participation."""
    return Scenario(
        seed=seed, rounds=rounds, methods=METHODS, participation=case.mechanism,
        training=TrainingSettings(tail=TAIL),
    )  # fmt: skip


def trained(job: tuple[str, int, int]) -> list[dict[str, Any]]:
    """Return a seed's excess losses: of the tail average, and the tail's mean of raw models."""
    name, seed, rounds = job
    case, rows = CASES[name], []
    for way, how in ways(case).items():
        scenario = replace(scenario_of(case, seed, rounds), propensity=how)
        run = scenario.simulation(limits=False)
        run.advance(rounds)
        target, history = scenario.objective(run.federation), run.history()
        best, last = target.minimum().value, max(1, round(TAIL * rounds))
        for method in METHODS:
            tail = float(target.losses(history.tail_average(method))[0] - best)
            raw = float(np.mean(target.losses(history.of(method)[-last:])) - best)
            rows.append({
                "case": name, "seed": seed, "way": way, "method": method, "tail": tail, "raw": raw
            })  # fmt: skip
    return rows


def tracked(job: tuple[str, int, int]) -> dict[str, Any]:
    """Return a client's probability over the rounds, true and by each way, and how far all are off.

    The client is the one nearest to z1 = 1, z2 = 1; ``error`` is the root mean square of log odds
    against the truth, over all enrolled clients and the tail's rounds.
    """
    name, seed, rounds = job
    case = CASES[name]
    scenario = scenario_of(case, seed, rounds)
    run = scenario.simulation(limits=False)
    federation = run.federation
    enrolled = np.flatnonzero(federation.population.enrolled)
    learners = {
        way: replace(scenario, propensity=how).stages(federation).participation()
        for way, how in ways(case).items()
        if not how.known_participation
    }
    z = federation.population.matrix(("z1", "z2"))[enrolled]
    chosen = int(np.argmin(((z - 1.0) ** 2).sum(axis=1)))
    paths: dict[str, list[float]] = {way: [] for way in (KNOWN, *learners)}
    squares = dict.fromkeys(learners, 0.0)
    for index in range(1, rounds + 1):
        draw = federation.participation.advance()
        assert draw.participation_prob is not None
        truth, replied = draw.participation_prob[enrolled], draw.replied[enrolled]
        round_ = Round(index=index, rows=enrolled, table=pl.DataFrame())
        paths[KNOWN].append(round(float(truth[chosen]), 4))
        for way, learner in learners.items():
            learner.open(round_)
            learner.prob(replied)
            (rows,) = learner.step_rows(replied)
            learner.close(replied)
            paths[way].append(round(float(rows.prob[chosen]), 4))
            if index > rounds - round(TAIL * rounds):
                squares[way] += float(np.mean((_logit(rows.prob) - _logit(truth)) ** 2))
    count = round(TAIL * rounds)
    errors = {way: float(np.sqrt(square / count)) for way, square in squares.items()}
    return {"case": name, "seed": seed, "paths": paths, "error": errors}


def _logit(prob: Any) -> Any:
    return np.log(prob / (1.0 - prob))


def summary(found: pl.DataFrame, errors: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Return means over seeds, and their ratio to known participation with a paired interval.

    The interval is the 2.5% and 97.5% quantile over 10,000 bootstrap samples of seeds.
    """
    rng, rows = np.random.default_rng(0), []
    seeds = sorted(found["seed"].unique().to_list())
    draws = rng.integers(len(seeds), size=(10_000, len(seeds)))
    for (case, method), part in found.group_by(["case", "method"], maintain_order=True):
        values = {
            way: part.filter(way=way).sort("seed").select("tail", "raw").to_numpy() for way in WAYS
        }
        for way in WAYS:
            row: dict[str, Any] = {"case": case, "method": method, "way": way, "seeds": len(seeds)}
            row["log_odds_error"] = errors.get((str(case), way), 0.0)
            for k, measure in enumerate(("tail", "raw")):
                own, known = values[way][:, k], values[KNOWN][:, k]
                low, high = np.quantile(
                    own[draws].mean(axis=1) / known[draws].mean(axis=1), [0.025, 0.975]
                )
                row[measure], row[f"{measure}_ratio"] = own.mean(), own.mean() / known.mean()
                row[f"{measure}_low"], row[f"{measure}_high"] = low, high
            rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]], method: str) -> str:
    """Return the docs' table of a method: excess in thousandths, and its ratio to known."""
    heads = ("participation", "way", "log odds off by", "excess, tail average", "of known",
             "excess, raw models", "of known")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for row in rows:
        if row["method"] != method:
            continue
        cells = [CASES[row["case"]].title, row["way"], f"{row['log_odds_error']:.2f}"]
        for measure in ("tail", "raw"):
            cells.append(f"{1e3 * row[measure]:.2f}")
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(
                *(row[f"{measure}_{end}"] for end in ("ratio", "low", "high"))
            )
            cells.append("1" if row["way"] == KNOWN else ratio)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


DRAWN = {  # Okabe and Ito's colours
    KNOWN: ("true probability", "#000000", "-", 2.0),
    PAST: ("fitted, all past rounds", "#E69F00", "--", 1.4),
    CLOCK: ("fitted, clock columns", "#0072B2", "-", 1.2),
    "last 50": ("fitted, last 50 rounds", "#CC79A7", "-.", 1.2),
    "decay 0.8": ("fitted, decay 0.8", "#009E73", ":", 1.4),
}


def draw(paths: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw one client's probability over the rounds, true and fitted."""
    shown = [one for one in paths if one["case"] != "scaled"]
    with styled():
        figure = new_figure(8.4, 5.6)
        axes = figure.subplots(2, 2, sharex=True, sharey=True).ravel()
        for ax, one in zip(axes, shown, strict=False):
            for way, (label, colour, line, width) in DRAWN.items():
                values = one["paths"][way]
                ax.plot(range(1, len(values) + 1), values, color=colour, linestyle=line,
                        linewidth=width, label=label)  # fmt: skip
            ax.set_title(CASES[one["case"]].title)
            ax.set_ylim(0.0, 1.0)
        for ax in axes[2:]:
            ax.set_xlabel("round")
        for ax in axes[::2]:
            ax.set_ylabel("participation probability")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
        figure.savefig(path, dpi=160)


def _start() -> None:
    limit_threads(1)
    threadpool_limits(1)


def results(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return summaries and the numbers of every seed."""
    seeds = range(FIRST_SEED, FIRST_SEED + chosen.seeds)
    rows: list[dict[str, Any]] = []
    tracks: list[dict[str, Any]] = []
    if chosen.resume is not None:
        before = json.loads(chosen.resume.read_text())
        if before["rounds"] != chosen.rounds:
            raise SystemExit(f"{chosen.resume} has {before['rounds']} rounds, not {chosen.rounds}.")
        rows = [row for row in before["trained_seeds"] if row["seed"] in seeds]
        tracks = before["tracked"]
    done = {(row["case"], row["seed"]) for row in rows} | {(t["case"], None) for t in tracks}
    jobs = [
        (name, seed, chosen.rounds)
        for seed in seeds for name in chosen.cases if (name, seed) not in done
    ]  # fmt: skip
    paths = [(name, FIRST_SEED, chosen.rounds) for name in chosen.cases if (name, None) not in done]
    with ProcessPoolExecutor(
        chosen.workers, mp_context=get_context("spawn"), initializer=_start
    ) as pool:
        tracks += pool.map(tracked, paths)
        for (name, seed, _), part in zip(jobs, pool.map(trained, jobs), strict=True):
            rows += part
            print(f"seed {seed}: {name}", flush=True)
    errors = {(one["case"], way): off for one in tracks for way, off in one["error"].items()}
    return {
        **environment(),
        "seeds": chosen.seeds,
        "rounds": chosen.rounds,
        "formulas": {name: CASES[name].formula for name in chosen.cases},
        "summary": summary(pl.DataFrame(rows), errors),
        "tracked": tracks,
        "trained_seeds": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cases and write results, tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write JSON here, and no table or figure")
    parser.add_argument("--resume", type=Path, help="take what this JSON has, run the rest")
    parser.add_argument("--saved", type=Path, help="make tables and figure of this JSON")
    chosen = parser.parse_args(arguments)
    if chosen.saved is None:
        saved = results(chosen)
        (chosen.out or RESULT).write_text(json.dumps(saved) + "\n")
    else:
        saved = json.loads(chosen.saved.read_text())
    for method in METHODS[1:]:
        print(table(saved["summary"], method))
    if chosen.out is None:
        for method in METHODS[1:]:
            text = table(saved["summary"], method)
            (STATIC / f"drifting-{method}.md").write_text(text, encoding="utf-8")
        draw(saved["tracked"], STATIC / "drifting.png")


if __name__ == "__main__":
    main()
