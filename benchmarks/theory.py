"""``python -m benchmarks.theory``: the convergence bound against simulation, and counter-examples.

Quadratic clients with Bernoulli participation redrawn every round, as the theorem assumes. Numbers
go to benchmarks/results/theory.json, two figures to docs/_static; the docs show them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedipw.lab.files import environment
from fedipw.lab.style import new_figure, styled
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import (
    CurvedPair,
    FederatedLogistic,
    ProblemConstants,
    Schedule,
    UnequalPair,
    convergence_bound,
    exact_floor,
    participation_only_errors,
    printed_bound,
    step_limit,
    target_weights,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedipw.numerics import FloatArray

HERE = Path(__file__).parent
RESULT = HERE / "results" / "theory.json"
FIGURES = HERE.parent / "docs" / "_static"
REPEATS = 40
STEPS = (1, 2, 3, 5, 8, 12, 20, 35, 60, 100)
BLUE, ORANGE, GREEN, PINK, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
TERMS = {"transient": (ORANGE, "--"), "variance": (GREEN, "-.")}
TERMS |= {"drift": (PINK, ":"), "floor": (RED, (0, (5, 1)))}
UNIT = r"excess loss $F - F^\star$ (loss units)"
LEGEND = ["bound (T6), total", f"measured, mean of {REPEATS} runs", "exact floor"]
LEGEND += [f"its {name} term" for name in TERMS]


@dataclass(frozen=True, kw_only=True, eq=False)
class Quadratics:
    """Clients f_i = (theta - c_i)' A_i (theta - c_i) / 2; used probabilities p_i / rho_i."""

    curvatures: FloatArray  # A, (N, d, d)
    centres: FloatArray  # c, (N, d)
    probs: FloatArray  # p, (N,)
    noise: float  # sigma

    @property
    def hessian(self) -> FloatArray:
        return self.curvatures.mean(axis=0)

    def minimiser(self, ratio: FloatArray) -> FloatArray:
        """Return the minimiser of sum_i rho_i f_i, (d,)."""
        pulls = np.einsum("ijk,ik->ij", self.curvatures, self.centres)
        weighted = np.einsum("i,ijk->jk", ratio, self.curvatures)
        return np.linalg.solve(weighted, ratio @ pulls)

    @property
    def best(self) -> FloatArray:
        return self.minimiser(np.ones(len(self.probs)))

    @property
    def gradients(self) -> FloatArray:
        """Clients' gradients at the minimum, (N, d)."""
        return np.einsum("ijk,ik->ij", self.curvatures, self.best - self.centres)

    def excess(self, theta: FloatArray) -> FloatArray:
        """Return F - F* at (..., d)."""
        gap = theta - self.best
        return 0.5 * np.einsum("...j,jk,...k", gap, self.hessian, gap)

    def constants(self, ratio: FloatArray) -> ProblemConstants:
        """Return exact L, mu, p_min, sigma, and G, B by co-coercivity (T2) with a = 1."""
        return ProblemConstants(
            smoothness=float(np.linalg.eigvalsh(self.curvatures).max()),
            strong_convexity=float(np.linalg.eigvalsh(self.hessian).min()),
            heterogeneity=float(np.sqrt(2.0 * (self.gradients**2).sum(axis=1).mean())),
            growth=float(np.sqrt(2.0)),
            noise=self.noise,
            population_size=len(self.probs),
            least_prob=float(min(self.probs.min(), (self.probs / ratio).min())),
        )

    def aligned_ratio(self, error: float) -> FloatArray:
        """Return rho = 1 +- eps, the sign by the gradients along the flattest direction."""
        flattest = np.linalg.eigh(self.hessian)[1][:, 0]
        return 1.0 + error * np.sign(self.gradients @ flattest)

    def paths(
        self, ratio: FloatArray, schedule: Schedule, start: FloatArray, rng: np.random.Generator
    ) -> FloatArray:
        """Return F(theta_r) - F* of every repetition and round, (R + 1, repeats).

        K steps from theta end at c + M^K (theta - c) plus Gaussian noise, M = I - eta A, so the
        sum over clients is drawn at once: the same law as K steps one after the other.
        """
        d, eta = len(start), schedule.step_size
        step = np.eye(d) - eta * self.curvatures
        powers = [np.broadcast_to(np.eye(d), step.shape)]
        for _ in range(schedule.local_steps):
            powers.append(powers[-1] @ step)
        pull = np.eye(d) - powers[-1]  # the update is -pull (theta - c) + noise
        to_centre = np.einsum("ijk,ik->ij", pull, self.centres)
        noise = eta**2 * self.noise**2 / d * sum(p @ p for p in powers[:-1])
        used, n = self.probs / ratio, len(self.probs)
        flat = np.concatenate([pull.reshape(n, -1), to_centre], axis=1)
        theta = np.tile(start, (REPEATS, 1))
        out = [self.excess(theta)]
        for _ in range(schedule.rounds):
            w = (rng.random((REPEATS, n)) < self.probs) / used * (schedule.server_step / n)
            sums = w @ flat
            pulled = sums[:, : d * d].reshape(-1, d, d)
            move = sums[:, d * d :] - np.einsum("tjk,tk->tj", pulled, theta)
            if self.noise > 0.0:
                spread = np.linalg.cholesky((w**2 @ noise.reshape(n, -1)).reshape(-1, d, d))
                move += np.einsum("tjk,tk->tj", spread, rng.standard_normal((REPEATS, d)))
            theta = theta + move
            out.append(self.excess(theta))
        return np.array(out)


def federation(probs: tuple[float, float], scale: float = 1.0) -> Quadratics:
    """Return 200 clients in the plane, kappa about 5; curvature goes with the centre."""
    rng, n = np.random.default_rng(7), 200
    z = rng.standard_normal((n, 2))
    eigen = np.array([0.2, 0.8]) + np.array([0.1, 0.2]) * np.tanh(z)
    angle = rng.uniform(-0.2, 0.2, n)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    curvatures = np.einsum("jki,ik,lki->ijl", turn, eigen, turn)
    p = rng.uniform(*probs, n)
    return Quadratics(curvatures=curvatures, centres=scale * z, probs=p, noise=0.05)


def measured(clients: Quadratics, error: float, schedule: Schedule, *, seed: int) -> dict[str, Any]:
    """Return the mean excess of the last quarter of rounds, from theta* on: h_0 = 0."""
    ratio = clients.aligned_ratio(error)
    paths = clients.paths(ratio, schedule, clients.best, np.random.default_rng(seed))
    tail = paths[-schedule.rounds // 4 :].mean(axis=0)
    return {
        "eps_w": error,
        "measured": float(tail.mean()),
        "standard_error": float(tail.std(ddof=1) / np.sqrt(REPEATS)),
        "exact_floor": float(clients.excess(clients.minimiser(ratio))),
        **bound_of(clients, ratio, schedule, 0.0, error),
    }


def bound_of(
    clients: Quadratics, ratio: FloatArray, schedule: Schedule, gap: float, error: float
) -> dict[str, Any]:
    problem = clients.constants(ratio)
    bound = convergence_bound(problem, schedule, initial_gap=gap, weight_error=error)
    return {
        "G": problem.heterogeneity,
        **{name: getattr(bound, name) for name in TERMS},
        "total": bound.total,
        "holds": bound.holds,
        "statement": bound.statement,
    }


def schedule_of(clients: Quadratics, relative_step: float, steps: int, rounds: int) -> Schedule:
    """Return K steps with eta~ L = ``relative_step`` and gamma = 1."""
    smooth = clients.constants(np.ones(len(clients.probs))).smoothness
    return Schedule(local_steps=steps, step_size=relative_step / (smooth * steps), rounds=rounds)


def over_errors() -> list[dict[str, Any]]:
    clients = federation((0.3, 0.8))
    schedule = schedule_of(clients, 0.003, steps=5, rounds=12000)
    errors = [0.001, 0.003, 0.006, 0.012, 0.02, 0.037, 0.07, 0.12, 0.2]
    return [measured(clients, e, schedule, seed=100) for e in errors]


def over_heterogeneity() -> list[dict[str, Any]]:
    scaled = [federation((0.3, 0.8), scale=s) for s in np.geomspace(0.01, 10.0, 10)]
    schedule = schedule_of(scaled[0], 0.003, steps=5, rounds=12000)
    return [measured(clients, 0.02, schedule, seed=200) for clients in scaled]


def over_steps() -> list[dict[str, Any]]:
    clients, out = federation((1.0, 1.0)), []
    for steps in STEPS:
        schedule = schedule_of(clients, 0.014, steps=steps, rounds=2500)
        out.append({"K": steps, **measured(clients, 0.0, schedule, seed=300)})
    return out


def over_rounds() -> list[dict[str, Any]]:
    clients, error = federation((0.3, 0.8), scale=0.1), 0.02
    schedule = schedule_of(clients, 0.01, steps=5, rounds=40000)
    ratio, start = clients.aligned_ratio(error), clients.best + np.array([2.0, 1.0])
    paths = clients.paths(ratio, schedule, start, np.random.default_rng(400))
    out = []
    for r in np.unique(np.rint(np.geomspace(1, schedule.rounds, 28)).astype(int)):
        after = replace(schedule, rounds=int(r))
        row = bound_of(clients, ratio, after, float(paths[0, 0]), error)
        mean, spread = float(paths[r].mean()), float(paths[r].std(ddof=1) / np.sqrt(REPEATS))
        out.append({"R": int(r), "measured": mean, "standard_error": spread, **row})
    return out


def problem_of(smooth: float, convex: float, square: float, **others: float) -> ProblemConstants:
    """Return constants with L, mu and B^2 given, everyone replying."""
    return ProblemConstants(
        smoothness=smooth,
        strong_convexity=convex,
        growth=float(np.sqrt(square)),
        least_prob=1.0,
        **others,
    )


def curved() -> dict[str, Any]:
    """Return excess over h_0 of the diverging pair, and the printed bound, over rounds."""
    pair, step = CurvedPair(smoothness=50.0, strong_convexity=1.0), 1.0 / (9.0 * 50.0)
    growth_square = (50.0**2 + 48.0**2) / (2.0 * 50.0 * 1.0)  # B^2
    problem = problem_of(50.0, 1.0, growth_square, heterogeneity=0.0, population_size=20000)
    rounds = np.arange(0, 5001, 100)
    schedules = [Schedule(local_steps=10, step_size=step / 10, rounds=int(r)) for r in rounds]
    start = {"initial_gap": 1.0, "weight_error": 0.0}
    return {
        "B_square": growth_square,
        "effective_step": step,
        "printed_step_limit": step_limit(problem),
        "growth": {str(k): pair.growth(k, step) for k in (1, 10)},
        "statement": convergence_bound(problem, schedules[-1], **start).statement,
        "rounds": rounds.tolist(),
        "excess": {str(k): (pair.growth(k, step) ** (2.0 * rounds)).tolist() for k in (1, 10)},
        "printed": [printed_bound(problem, s, constant=1.0, **start) for s in schedules],
    }


def unequal() -> dict[str, Any]:
    """Return the fixed point's excess over K, beside both bounds after infinitely many rounds."""
    pair, step = UnequalPair(smoothness=1.0, low_curvature=0.1), 0.02
    problem = problem_of(1.0, 0.55, 2.0, heterogeneity=2.0**0.5, population_size=1e12)  # a = 1
    schedule = Schedule(local_steps=1, step_size=step, rounds=0)
    start = {"initial_gap": 0.0, "weight_error": 0.0}
    bound = convergence_bound(problem, schedule, **start)
    return {
        "effective_step": step,
        "K": STEPS,
        "excess": [pair.excess(k, step / k) for k in STEPS],
        "printed_by_C": {
            str(c): printed_bound(problem, schedule, constant=c, **start) for c in (1, 60)
        },
        "corrected": bound.total,
        "statement": bound.statement,
    }


def uncentred() -> dict[str, Any]:
    """Return errors and floors of participation-only weights at a constant enrollment rate."""
    clients = Testbed(size=200).draw(np.random.default_rng(0)).clients
    target = FederatedLogistic(clients, 0.05, target_weights(clients))
    probs = np.linspace(0.1, 1.0, 10)
    errors = [participation_only_errors(np.full(clients.size, p)) for p in probs]
    return {
        "enrollment_prob": probs.tolist(),
        "raw": [e.raw for e in errors],
        "centred": [e.centred for e in errors],
        "rms": [e.rms for e in errors],
        "exact_floor": [exact_floor(target, np.full(clients.size, p)) for p in probs],
    }


def units() -> list[dict[str, Any]]:
    """Scale two kinds of client s (theta -+ 1)^2 / 2 by s, the step by 1/s, and compare.

    With q = eta~ s and tau = (1 - p)/(N p) the stationary excess is s q tau / (4 - 2 q (1 + tau)).
    """
    size, prob, q = 100, 0.1, 0.04
    tau, ones, out = (1.0 - prob) / (size * prob), np.ones(size), []
    centres, start = np.resize([1.0, -1.0], (size, 1)), {"initial_gap": 0.0, "weight_error": 0.0}
    for s in (1.0, 10.0, 100.0, 1000.0, 10000.0):
        same = np.full((size, 1, 1), s)
        clients = Quadratics(curvatures=same, centres=centres, probs=prob * ones, noise=0.0)
        # equal curvatures: mean |grad f_i|^2 = G^2 + 2 L h exactly, so B = 1 and G = s
        problem = replace(clients.constants(ones), heterogeneity=s, growth=1.0)
        schedule = Schedule(local_steps=1, step_size=q / s, rounds=4000)
        paths = clients.paths(ones, schedule, clients.best, np.random.default_rng(500))
        bound = convergence_bound(problem, schedule, **start)
        found = {
            "s": s,
            "excess": s * q * tau / (4.0 - 2.0 * q * (1.0 + tau)),
            "simulated": float(paths[1000:].mean()),
            "printed_C_60": printed_bound(problem, schedule, constant=60.0, **start),
            "corrected_variance": bound.variance,
            "corrected_total": bound.total,
            "statement": bound.statement,
        }
        out.append(found)
    return out


def draw_bound(result: dict[str, list[dict[str, Any]]]) -> None:
    panels = (
        ("over_eps_w", "eps_w", r"A  weight error $\epsilon_w$ ($K = 5$)", r"$\epsilon_w$"),
        ("over_G", "G", r"B  heterogeneity $G$ ($\epsilon_w = 0.02$, $K = 5$)", "$G$"),
        ("over_K", "K", r"C  local steps $K$ at fixed $\tilde\eta$ ($p = 1$)", "$K$"),
        ("over_R", "R", r"D  rounds $R$ ($\epsilon_w = 0.02$, $K = 5$)", "rounds $R$"),
    )
    with styled():
        figure = new_figure(8.4, 7.0)
        axes = figure.subplots(2, 2).ravel()
        for axis, (name, x, title, label) in zip(axes, panels, strict=True):
            _panel(axis, result[name], x)
            axis.set(title=title, xlabel=label, ylabel=UNIT)
        axes[0].axvspan(0.0373, 0.25, color="0.9", lw=0)
        axes[0].text(0.097, 0.02, "outside", transform=axes[0].get_xaxis_transform(), ha="center")
        axes[0].set(xlim=(0.0009, 0.25), ylim=(2e-7, None))
        handles = {h.get_label(): h for a in axes for h in a.get_legend_handles_labels()[0]}
        lines = [handles[name] for name in LEGEND]
        figure.legend(lines, LEGEND, loc="outside lower center", ncols=4)
        figure.savefig(FIGURES / "theory-bound.png", dpi=130)


def _panel(axis: Axes, rows: list[dict[str, Any]], x: str) -> None:
    across = [row[x] for row in rows]
    total, mean = [r["total"] for r in rows], [r["measured"] for r in rows]
    axis.plot(across, total, color=BLUE, lw=2.4, label=LEGEND[0])
    for name, (colour, line) in TERMS.items():
        values = [r[name] for r in rows]
        if max(values) > 0.0:
            axis.plot(across, values, color=colour, ls=line, lw=1.2, label=f"its {name} term")
    if x == "eps_w":
        axis.plot(across, [r["exact_floor"] for r in rows], color="k", lw=0.9, label="exact floor")
    bars = [2.0 * r["standard_error"] for r in rows]
    axis.errorbar(across, mean, yerr=bars, color="k", fmt="o", ms=4, label=LEGEND[1])
    axis.set(xscale="log", yscale="log", ylim=(min(mean) / 2.0, max(total) * 3.0))


def draw_counterexamples(result: dict[str, Any]) -> None:
    with styled():
        figure = new_figure(10.8, 3.9)
        first, second, third = figure.subplots(1, 3)
        one, two, flat = result["curved_pair"], result["unequal_pair"], np.ones(len(STEPS))
        first.plot(one["rounds"], one["excess"]["10"], color="k", label="true, $K = 10$")
        first.plot(one["rounds"], one["excess"]["1"], color=GREEN, ls=":", label="true, $K = 1$")
        first.plot(one["rounds"], one["printed"], color=RED, ls="--", label="printed bound")
        first.set(yscale="log", xlabel="rounds $R$", ylabel=r"excess loss $(F - F^\star)/h_0$")
        first.set_title("A  concave clients diverge")
        first.legend(loc="upper left")
        second.plot(two["K"][1:], two["excess"][1:], "ko", ms=4, label="true, fixed point")
        second.plot(two["K"], two["corrected"] * flat, color=BLUE, label="corrected bound")
        for c, line in (("60", "-."), ("1", "--")):
            label = f"printed bound, $C = {c}$"
            second.plot(two["K"], two["printed_by_C"][c] * flat, color=RED, ls=line, label=label)
        second.set(xscale="log", yscale="log", xlabel="local steps $K$", ylabel=UNIT)
        second.set(ylim=(1e-15, 1e3), title="B  drift, $N = 10^{12}$, all reply")
        second.legend(loc="center right", bbox_to_anchor=(1.0, 0.36))
        _draw_uncentred(third, result["uncentred"])
        figure.savefig(FIGURES / "theory-counterexamples.png", dpi=130)


def _draw_uncentred(axis: Axes, found: dict[str, list[float]]) -> None:
    across, raw = np.array(found["enrollment_prob"]), np.array(found["raw"])
    axis.axvspan(0.05, 0.5, color="0.92", lw=0)
    axis.plot(across, raw, color=ORANGE, ls="-.", label=r"raw $\epsilon_w$")
    axis.plot(across, raw**2, color=RED, ls="--", label=r"printed floor $/(C G^2/\mu)$")
    axis.plot(across, found["centred"], color=BLUE, label=r"centred $\epsilon_w$")
    axis.plot(across, found["exact_floor"], "ko", ms=4, label="exact floor")
    axis.text(0.275, 0.08, r"$\epsilon_w > 1/2$: outside", ha="center")
    axis.set(xlim=(0.05, 1.02), ylim=(-0.04, 1.0), title="C  a common factor is no error")
    axis.set(xlabel=r"constant enrollment probability $\pi^{enr}$", ylabel="error, floor (no unit)")
    axis.legend(loc="upper right")


def main() -> None:
    """Simulate, save the numbers, draw both figures."""
    bounds = {"over_eps_w": over_errors(), "over_G": over_heterogeneity()}
    bounds |= {"over_K": over_steps(), "over_R": over_rounds()}
    failures = {"curved_pair": curved(), "unequal_pair": unequal()}
    failures |= {"uncentred": uncentred(), "units": units()}
    result = {"repeats": REPEATS, "bound": bounds, "printed_theorem": failures, **environment()}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    draw_bound(bounds)
    draw_counterexamples(failures)
    for name, rows in bounds.items():
        ratios = [r["total"] / r["measured"] for r in rows if r["holds"]]
        print(f"{name}: bound / measured from {min(ratios):.3g} to {max(ratios):.3g}")
    print(json.dumps(failures["units"], indent=2))


if __name__ == "__main__":
    main()
