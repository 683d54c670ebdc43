"""``python -m benchmarks.invitations``: what invitations in proportion to weights save.

Two questions, in regimes of ``benchmarks.regimes``, against uniform invitations with the same
number: how noisy is a round's mean of updates at the target minimiser, and how good is the trained
model. Numbers go to benchmarks/results/invitations.json, tables and a figure to docs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from threadpoolctl import threadpool_limits

from benchmarks.regimes import REGIMES
from benchmarks.round_noise import (
    FLOOR,
    PROPORTIONAL,
    UNIFORM,
    clients_of,
    designs,
    horvitz_thompson_variance,
    self_normalised_error,
)
from fedipw.lab.files import environment
from fedipw.lab.invitations import SimulatedInvitations
from fedipw.lab.style import new_figure, styled
from fedipw.numerics.threads import limit_threads

HERE = Path(__file__).parent
RESULT = HERE / "results" / "invitations.json"
STATIC = HERE.parent / "docs" / "_static"
NOISE_REGIMES = ("testbed", "strength-2", "rate-05", "B")
TRAINED_REGIMES = ("testbed", "strength-2", "B")
TITLES = {
    "testbed": "testbed", "strength-2": "enrollment strength 2", "rate-05": "5% enrolled",
    "B": "N = 20,000, 10% enrolled",
}  # fmt: skip
SHARES = (0.1, 0.4)  # of the enrolled that are invited in a round
NOISE_SHARES = (0.05, 0.1, 0.2, 0.4, 0.7)
RESTED = "proportional, rest of 3 rounds"


def noise(job: tuple[str, int]) -> list[dict[str, Any]]:
    """Return a seed's noise of a round's mean, by number of invitations and design."""
    name, seed = job
    clients, rows = clients_of(replace(REGIMES[name].scenario, seed=seed)), []
    for share in NOISE_SHARES:
        number = max(1, round(share * len(clients.weights)))
        for k, (design, prob) in enumerate(designs(clients, number).items()):
            rng = np.random.default_rng([seed, number, k])
            row = {"regime": name, "seed": seed, "share": share, "number": number, "design": design}
            for what, values in (("", clients.gradients), ("residual_", clients.residuals)):
                row[f"{what}variance"] = horvitz_thompson_variance(clients, values, prob, rng)
                row[f"{what}hajek"] = self_normalised_error(clients, values, prob, rng)
            rows.append(row)
    return rows


def noise_summary(found: pl.DataFrame) -> pl.DataFrame:
    """Return noise relative to uniform invitations, the mean over seeds of each seed's ratio."""
    names = ["variance", "hajek", "residual_variance", "residual_hajek"]
    base = found.filter(design=UNIFORM).select("regime", "seed", "share", *names)
    joined = found.join(base, on=["regime", "seed", "share"], suffix="_uniform")
    return joined.group_by("regime", "share", "design", maintain_order=True).agg(
        pl.col("number").mean(), pl.col("seed").count().alias("seeds"),
        *((pl.col(n) / pl.col(f"{n}_uniform")).mean().alias(n) for n in names),
    )  # fmt: skip


def runs_of(share: float, enrolled: int) -> dict[str, tuple[SimulatedInvitations, tuple[str, ...]]]:
    """Return the runs of a seed: invitations and the methods trained under them, by design.

    ``augmented-online`` invites by what it has learnt itself, as it would on Flower.
    """
    number, own = round(share * enrolled), "augmented-online"
    return {
        UNIFORM: (SimulatedInvitations(kind="uniform", number=number), ("augmented", own)),
        PROPORTIONAL: (SimulatedInvitations(number=number), ("augmented",)),
        f"{PROPORTIONAL}, {own}": (SimulatedInvitations(number=number, method=own), (own,)),
        RESTED: (SimulatedInvitations(number=min(number, enrolled // 4), rest=3), ("augmented",)),
    }


def trained(job: tuple[str, int]) -> list[dict[str, Any]]:
    """Return a seed's excess losses under each design."""
    name, seed = job
    scenario, rows = replace(REGIMES[name].scenario, seed=seed), []
    enrolled = scenario.simulation(limits=False).federation.population.enrolled_size
    for share in SHARES:
        for design, (how, methods) in runs_of(share, enrolled).items():
            if how.rest > 1 and share > SHARES[0]:
                continue
            mine = replace(scenario, methods=methods, invitations=how)
            run = mine.simulation(limits=False)
            run.advance(mine.rounds)
            target, history = mine.objective(run.federation), run.history()
            best = target.minimum().value
            for method in methods:
                tail = float(target.losses(history.tail_average(method))[0] - best)
                last = float(target.losses(history.of(method)[-1])[0] - best)
                rows.append({
                    "regime": name, "seed": seed, "share": share, "number": how.number,
                    "design": design.split(", aug")[0], "method": method, "tail": tail,
                    "last": last, "replies": float(history.replies.mean()),
                })  # fmt: skip
    return rows


def trained_summary(found: pl.DataFrame) -> pl.DataFrame:
    """Return mean and worst seed, and the share of seeds better than under uniform invitations."""
    keys = ["regime", "seed", "share", "method"]
    base = found.filter(design=UNIFORM).select(*keys, uniform="tail")
    joined = found.join(base, on=keys, how="left")
    return joined.group_by("regime", "share", "method", "design", maintain_order=True).agg(
        pl.col("seed").count().alias("seeds"), pl.col("number").mean(), pl.col("replies").mean(),
        tail=pl.col("tail").mean(), worst=pl.col("tail").max(), last=pl.col("last").mean(),
        better=(pl.col("tail") < pl.col("uniform")).mean(),
    )  # fmt: skip


def noise_table(table: pl.DataFrame) -> str:
    """Return the docs' table of noise relative to uniform invitations."""
    heads = ("regime", "invited", "unbiased", "self-normalised", "unbiased, residuals",
             "self-normalised, residuals")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in table.filter(design=PROPORTIONAL).iter_rows(named=True):
        cells = (row[n] for n in ("variance", "hajek", "residual_variance", "residual_hajek"))
        lines.append(f"| {TITLES[row['regime']]} | {row['share']:.0%} | "
                     + " | ".join(f"{value:.2f}" for value in cells) + " |")  # fmt: skip
    return "\n".join(lines) + "\n"


def trained_table(table: pl.DataFrame) -> str:
    """Return the docs' table of trained models: mean and worst seed, in thousandths."""
    lines = [
        "| regime | invited | replies | method | uniform | proportional | better in |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    for (name, share, method), part in table.group_by(
        ["regime", "share", "method"], maintain_order=True
    ):
        by = {row["design"]: row for row in part.iter_rows(named=True)}
        uniform, own = by[UNIFORM], by[PROPORTIONAL]
        cells = (f"{1e3 * row['tail']:.2f} ({1e3 * row['worst']:.2f})" for row in (uniform, own))
        lines.append(
            f"| {TITLES[str(name)]} | {uniform['number']:.0f} | "
            f"{uniform['replies']:.0f} / {own['replies']:.0f} | `{method}` | "
            + " | ".join(cells) + f" | {own['better']:.0%} |"
        )  # fmt: skip
        del share
    return "\n".join(lines) + "\n"


def draw(table: pl.DataFrame, path: Path) -> None:
    """Draw noise relative to uniform invitations over the share of the enrolled invited."""
    panels: Mapping[str, str] = {
        "variance": "unbiased mean (Horvitz–Thompson)", "hajek": "self-normalised mean (Hájek)"
    }  # fmt: skip
    colours = ("#332288", "#CC6677", "#117733", "#DDAA33")
    with styled():
        figure = new_figure(8.0, 3.4)
        for ax, (column, title) in zip(
            figure.subplots(1, 2, sharey=True), panels.items(), strict=True
        ):
            for name, colour, marker in zip(NOISE_REGIMES, colours, "osD^", strict=True):
                mine = table.filter(regime=name, design=PROPORTIONAL)
                if mine.height:
                    ax.plot(100 * mine["share"], mine[column], marker=marker, color=colour,
                            label=TITLES[name])  # fmt: skip
            ax.axhline(1.0, color="#999999", linewidth=0.8)
            ax.set_xscale("log")
            ticks = [5, 10, 20, 40, 70]
            ax.set_xticks(ticks, [f"{tick}%" for tick in ticks], minor=False)
            ax.minorticks_off()
            ax.set_xlabel("invited of the enrolled")
            ax.set_title(title)
            ax.set_ylim(0.0, 1.3)
        figure.axes[0].set_ylabel("error relative to uniform invitations")
        figure.axes[1].legend(loc="lower left", fontsize=8)
        figure.savefig(path, dpi=160)


def _start() -> None:
    limit_threads(1)
    threadpool_limits(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both parts and write results, tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--noise", nargs="+", choices=NOISE_REGIMES, default=[*NOISE_REGIMES])
    parser.add_argument("--trained", nargs="+", choices=TRAINED_REGIMES, default=[*TRAINED_REGIMES])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write JSON here, and no table or figure")
    parser.add_argument("--saved", type=Path, help="make tables and figure of this JSON")
    chosen = parser.parse_args(arguments)
    if chosen.saved is None:
        saved = results(chosen)
        (chosen.out or RESULT).write_text(json.dumps(saved) + "\n")
    else:
        saved = json.loads(chosen.saved.read_text())
    found, models = (pl.DataFrame(saved[part]) for part in ("noise", "trained"))
    print(noise_table(found))
    print(trained_table(models))
    if chosen.out is None:
        (STATIC / "invitations-noise.md").write_text(noise_table(found), encoding="utf-8")
        (STATIC / "invitations-trained.md").write_text(trained_table(models), encoding="utf-8")
        draw(found, STATIC / "invitations.png")


def results(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return summaries and the numbers of every seed."""
    seeds = range(chosen.seeds)
    with ProcessPoolExecutor(
        chosen.workers, mp_context=get_context("spawn"), initializer=_start
    ) as pool:
        noises = pool.map(noise, [(name, seed) for name in chosen.noise for seed in seeds])
        models = pool.map(trained, [(name, seed) for name in chosen.trained for seed in seeds])
        noisy = pl.DataFrame([row for part in noises for row in part])
        made = pl.DataFrame([row for part in models for row in part])
    return {
        **environment(),
        "floor": FLOOR,
        "seeds": chosen.seeds,
        "noise": noise_summary(noisy).to_dicts(),
        "trained": trained_summary(made).to_dicts(),
        "noise_seeds": noisy.to_dicts(),
        "trained_seeds": made.to_dicts(),
    }


if __name__ == "__main__":
    main()
