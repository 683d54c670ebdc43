"""``python -m benchmarks.intervals``: how often the recommended intervals hold the truth.

Populations, enrollment and replies are drawn again and again, both propensities estimated on each
draw, and several metrics are evaluated on the same replies. For every metric and subgroup the study
counts the share of nominal 95% intervals of Hájek's mean that hold the population's mean, by the
interval that ``fedipw evaluate`` gives and, beside it, by Student's t. Since an interval may say
that it cannot promise its coverage, so are the share of draws that say so and the coverage of the
others.

Worlds:

- skewed: 3,000 clients of which about 300 enroll, over 5 rounds with 30% replies. A skewed
  covariate drives both stages; those with large values enroll more often.
- skewed, scarce: the same, but clients with large values seldom enroll: few carry much weight;
- few replies: the first with 2% replies over 20 rounds;
- persons: 1 to 5 devices a person, who enrolls and replies with all of them or with none;
- devices: 1 to 5 devices a person, each enrolling and replying by itself;
- testbed: the project's own, 1,000 clients, over 5 rounds.

Metrics: normal; lognormal with sigma 1.5; Student's t with 2.2 degrees of freedom; and rare, 0 or 1
with a mean of 2.4%, also in random subgroups of 50, 30, 15 and 5% of the clients. Those of persons
are mostly shared by their devices.

Results go to benchmarks/results/intervals.json, the table of the docs to docs/_static/intervals.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, ndtri

from fedipw.evaluation.estimators import Group, HajekMean, population_means
from fedipw.evaluation.intervals import Automatic, StudentT
from fedipw.evaluation.sample import Clusters, TwoPhase
from fedipw.lab.files import environment
from fedipw.lab.mechanisms import DailyParticipation, LogisticEnrollment, enrollment_draw
from fedipw.lab.testbed import Testbed
from fedipw.lab.two_phase import fitted_two_phase
from fedipw.numerics import BoolArray, FloatArray, IntArray

RESULT = Path(__file__).parent / "results" / "intervals.json"
TABLE = Path(__file__).parents[1] / "docs" / "_static" / "intervals.md"
SUBGROUPS = {"50%": 0.5, "30%": 0.3, "15%": 0.15, "5%": 0.05}
RARE = 0.024


class Drawn(NamedTuple):
    """One draw: the replies, whose they are, and what drives the metrics."""

    sample: TwoPhase
    ids: IntArray  # (n,) rows of the enrolled
    person: IntArray  # (N,)
    signal: FloatArray  # (N,) what the metrics have to do with the covariates


@dataclass(frozen=True)
class World:
    """A population and how it is selected."""

    size: int = 3000
    rounds: int = 5
    enrolled: float = 0.1
    replies: float = 0.3
    tilt: float = 0.5  # of the skewed covariate on enrollment, in log odds
    persons: bool = False  # whether devices share persons
    together: bool = False  # whether a person's devices enroll, and reply, together

    def draw(self, rng: np.random.Generator) -> Drawn:
        """Draw everything anew."""
        N, R = self.size, self.rounds
        person = np.arange(N)
        if self.persons:
            person = np.repeat(np.arange(N), rng.integers(1, 6, size=N))[:N]
        count = int(person[-1]) + 1
        skewed = np.exp(0.8 * rng.normal(size=count))[person]
        skewed = (skewed - skewed.mean()) / skewed.std()
        own = rng.normal(size=count)[person] if self.together else rng.normal(size=N)
        Z = np.column_stack([skewed, own])
        prob = with_rate(self.tilt * skewed + 0.4 * own, self.enrolled)
        chance = rng.random(count)[person] if self.together else rng.random(N)
        enrolled = chance < prob
        ids = np.flatnonzero(enrolled)
        client, index = np.tile(ids, R), np.repeat(np.arange(R), len(ids))
        state = rng.normal(size=(R, count))[:, person[ids]].ravel()
        if not self.together:
            state = rng.normal(size=len(client))
        reply = with_rate(0.4 * np.sign(self.tilt) * skewed[client] + 0.5 * state, self.replies)
        chance = rng.random(len(client))
        if self.together:
            chance = rng.random((R, count))[:, person[ids]].ravel()
        X = np.column_stack([Z[client], state])
        sample = fitted_two_phase(Z, enrolled, X, client, index, replied=chance < reply)
        if self.persons:
            sample = replace(sample, clusters=clusters(person, ids))
        return Drawn(sample, ids, person, 0.3 * skewed + 0.3 * own)


@dataclass(frozen=True)
class TestbedWorld:
    """The project's testbed."""

    __test__ = False  # it is no test of pytest's

    size: int = 1000
    rounds: int = 5

    def draw(self, rng: np.random.Generator) -> Drawn:
        """Draw everything anew."""
        drawn = Testbed(size=self.size).draw(rng)
        Z, R = drawn.population.matrix(), self.rounds
        enrolled = enrollment_draw(LogisticEnrollment()(drawn.population), rng)
        ids = np.flatnonzero(enrolled)
        process = DailyParticipation().start(drawn.population, drawn.clients, rng)
        rounds = [process.advance() for _ in range(R)]
        X = np.column_stack([np.tile(Z[ids], (R, 1)), *[np.concatenate([r.covariates[ids] for r in
                                                                         rounds])]])  # fmt: skip
        replied = np.concatenate([r.replied[ids] for r in rounds])
        index = np.repeat(np.arange(R), len(ids))
        sample = fitted_two_phase(Z, enrolled, X, np.tile(ids, R), index, replied=replied)
        return Drawn(sample, ids, np.arange(self.size), 0.3 * Z[:, 0] - 0.3 * Z[:, 1])


WORLDS: dict[str, World | TestbedWorld] = {
    "skewed": World(),
    "skewed, scarce": World(tilt=-0.5),
    "few replies": World(replies=0.02, rounds=20),
    "persons": World(persons=True, together=True),
    "devices": World(persons=True),
    "testbed": TestbedWorld(),
}


def with_rate(log_odds: FloatArray, rate: float) -> FloatArray:
    """Return probabilities of log odds, moved so that their mean is a rate."""
    low, high = -20.0, 20.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if expit(log_odds + middle).mean() > rate else (middle, high)
    out: FloatArray = expit(log_odds + low)
    return out


def clusters(person: IntArray, ids: IntArray) -> Clusters:
    """Return the clusters of the enrolled, with those of the population counted."""
    sizes = np.bincount(person)
    code = np.unique(person[ids], return_inverse=True)[1]
    return Clusters(code=code, count=len(sizes), pairs=float((sizes * (sizes - 1) / 2).sum()))


def _noise(drawn: Drawn, rng: np.random.Generator) -> FloatArray:
    """Return standard normal numbers, mostly shared by the devices of a person."""
    own = rng.normal(size=len(drawn.person))
    shared = rng.normal(size=int(drawn.person[-1]) + 1)[drawn.person]
    return own if drawn.sample.clusters is None else np.sqrt(0.8) * shared + np.sqrt(0.2) * own


def _scores(signal: FloatArray) -> FloatArray:
    """Return the normal scores of a signal."""
    out: FloatArray = ndtri((np.argsort(np.argsort(signal)) + 0.5) / len(signal))
    return out


def _rare(drawn: Drawn, rng: np.random.Generator) -> FloatArray:
    count = int(drawn.person[-1]) + 1
    chance = rng.random(len(drawn.person))
    if drawn.sample.clusters is not None:  # four in five of the devices go with their person
        shared = rng.random(count)[drawn.person]
        chance = np.where(rng.random(len(chance)) < 0.8, shared, chance)
    return (chance < with_rate(drawn.signal, RARE)).astype(np.float64)


METRICS: dict[str, Callable[[Drawn, np.random.Generator], FloatArray]] = {
    "normal": lambda drawn, rng: drawn.signal + _noise(drawn, rng),
    "lognormal": lambda drawn, rng: np.exp(
        1.5 * (0.3 * _scores(drawn.signal) + np.sqrt(0.91) * _noise(drawn, rng))
    ),
    "t(2.2)": lambda drawn, rng: (
        drawn.signal + _noise(drawn, rng) / np.sqrt(rng.chisquare(2.2, len(drawn.person)) / 2.2)
    ),
    "rare": _rare,
}


class Hit(NamedTuple):
    """What one interval did."""

    held: bool
    width: float
    warned: bool
    kind: str
    by_t: bool  # whether Student's t held the truth
    apart: float  # whether it did as if clients were not clustered; NaN if they are not
    error: float  # of the estimate


def one(world: World | TestbedWorld, seed: tuple[int, ...]) -> dict[tuple[str, str], Hit]:
    """Return what the intervals of one draw did, by metric and group."""
    rng = np.random.default_rng(seed)
    drawn = world.draw(rng)
    part = rng.choice(len(SUBGROUPS), size=len(drawn.person), p=list(SUBGROUPS.values()))
    out = {}
    for name, make in METRICS.items():
        metric = make(drawn, rng)
        inside: dict[str, BoolArray] = {"everyone": np.ones(len(metric), dtype=np.bool_)}
        if name in {"normal", "rare"}:
            inside |= {group: part == k for k, group in enumerate(SUBGROUPS)}
        for group, found in _hits(drawn, metric, inside, seed[-1]).items():
            out[name, group] = found
    return out


def _hits(
    drawn: Drawn, metric: FloatArray, inside: dict[str, BoolArray], seed: int
) -> dict[str, Hit]:
    sample, values = drawn.sample, metric[drawn.ids][drawn.sample.client]
    groups = [Group(name=name, inside=flags[drawn.ids]) for name, flags in inside.items()]
    mean = [HajekMean()]
    auto = population_means(sample, values, mean, groups, interval=Automatic(seed=seed))
    by_t = population_means(sample, values, mean, groups, interval=StudentT())
    apart: tuple[Any, ...] = (None,) * len(groups)
    if sample.clusters is not None:
        apart = population_means(replace(sample, clusters=None), values, mean, groups)
    out = {}
    for line, other, single in zip(auto, by_t, apart, strict=True):
        truth = float(metric[inside[line.group]].mean())
        if not np.isfinite(line.low):  # nobody, or a single client, replied: no interval
            out[line.group] = Hit(True, np.nan, True, "none", True, np.nan, np.nan)
            continue
        out[line.group] = Hit(
            held=line.low <= truth <= line.high,
            width=line.high - line.low,
            warned=bool(line.warnings),
            kind=line.interval,
            by_t=other.low <= truth <= other.high,
            apart=np.nan if single is None else float(single.low <= truth <= single.high),
            error=line.estimate - truth,
        )
    return out


def row(world: str, metric: str, group: str, hits: list[Hit]) -> dict[str, Any]:
    """Return one row of the table."""
    given = [h for h in hits if h.kind != "none"]
    sure = [h.held for h in given if not h.warned]
    kinds = sorted({h.kind for h in hits})
    apart = [h.apart for h in given]
    return {
        "world": world, "metric": metric, "group": group, "draws": len(hits),
        "without_interval": len(hits) - len(given),
        "coverage": float(np.mean([h.held for h in given])),
        "warned": float(np.mean([h.warned for h in hits])),
        "coverage_unwarned": float(np.mean(sure)) if sure else None,
        "mean_width": float(np.mean([h.width for h in given])),
        "median_width": float(np.median([h.width for h in given])),
        "coverage_t": float(np.mean([h.by_t for h in given])),
        "coverage_t_unclustered": None if np.isnan(apart).any() else float(np.mean(apart)),
        "bias_by_sd": float(np.mean([h.error for h in given]) / np.std([h.error for h in given])),
        "kinds": {k: float(np.mean([h.kind == k for h in hits])) for k in kinds},
    }  # fmt: skip


def study(name: str, draws: int, seed: int) -> list[dict[str, Any]]:
    """Return the rows of one world."""
    hits: dict[tuple[str, str], list[Hit]] = defaultdict(list)
    place = list(WORLDS).index(name)
    for k in range(draws):
        for key, hit in one(WORLDS[name], (seed, place, k)).items():
            hits[key].append(hit)
    return [row(name, metric, group, found) for (metric, group), found in hits.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table for the docs."""
    heads = ["world", "metric", "group", "coverage", "warned", "coverage, not warned",
             "mean width", "Student's t", "t, unclustered"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---|---|---|" + "---:|" * 6]
    for r in rows:
        sure, apart = r["coverage_unwarned"], r["coverage_t_unclustered"]
        few = sure is None or (1.0 - r["warned"]) * r["draws"] < 20.0
        cells = [
            r["world"], r["metric"], r["group"], f"{100 * r['coverage']:.1f}",
            f"{100 * r['warned']:.0f}", "" if few else f"{100 * sure:.1f}",
            f"{r['mean_width']:.3g}", f"{100 * r['coverage_t']:.1f}",
            "" if apart is None else f"{100 * apart:.1f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    for name in arguments.worlds:
        began = time.perf_counter()
        rows += study(name, arguments.draws, arguments.seed)
        print(table([r for r in rows if r["world"] == name]), flush=True)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        result = {"nominal": 0.95, "seed": arguments.seed, "rows": rows}
        arguments.out.write_text(json.dumps(result | environment(), indent=2) + "\n")
        arguments.table.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
