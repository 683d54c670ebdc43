"""Every rule of training written again from its definition, one client and one step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fedipw.lab.scenario import Scenario
from fedipw.selection.coded import table_model

Vector = np.ndarray


@dataclass
class World:
    """The draws of a scenario, as a plain loop needs them."""

    scenario: Scenario
    rounds: list[list[int]] = field(default_factory=list)  # who replied
    reply_prob: list[Vector] = field(default_factory=list)  # (N,) true participation

    def __post_init__(self) -> None:
        run = self.scenario.simulation(limits=False)
        federation = run.federation
        self.clients, self.population = federation.rows, federation.population
        self.enrolled = [int(i) for i in np.flatnonzero(self.population.enrolled)]
        assert federation.enrollment_prob is not None
        self.true_enrollment = federation.enrollment_prob
        self.fitted_enrollment = table_model(self.population.clients).prob(self.population.frame)[0]
        training = run.training
        self.eta, self.l2 = training.work.step_size, training.l2
        steps = training.steps
        self.K = [training.work.steps] * self.population.listed if steps is None else list(steps)
        for _ in range(self.scenario.rounds):
            draw = federation.participation.advance()
            assert draw.participation_prob is not None
            self.rounds.append([i for i in self.enrolled if draw.replied[i]])
            self.reply_prob.append(draw.participation_prob)

    def gradient(self, i: int, y: Vector) -> Vector:
        """Return the gradient of client i's regularised logistic loss, row by row."""
        first, last = self.clients.offsets[i], self.clients.offsets[i + 1]
        total = np.zeros_like(y)
        for row in range(first, last):
            x = np.append(self.clients.features[row], 1.0)
            total += (1.0 / (1.0 + np.exp(-x @ y)) - self.clients.labels[row]) * x
        gradient: Vector = total / (last - first) + self.l2 * y
        return gradient

    def loss(self, i: int, y: Vector) -> float:
        """Return client i's regularised logistic loss, row by row."""
        first, last = self.clients.offsets[i], self.clients.offsets[i + 1]
        total = 0.0
        for row in range(first, last):
            u = float(np.append(self.clients.features[row], 1.0) @ y)
            total += np.log(1.0 + np.exp(u)) - self.clients.labels[row] * u
        return float(total / (last - first) + 0.5 * self.l2 * (y @ y))

    def update(self, i: int, theta: Vector, mu: float = 0.0, shift: Vector | float = 0.0) -> Vector:
        """Return y_K - theta after K_i steps y -= eta (g + mu (y - theta) + shift)."""
        y: Vector = theta.copy()
        for _ in range(self.K[i]):
            y = y - self.eta * (self.gradient(i, y) + mu * (y - theta) + shift)
        update: Vector = y - theta
        return update

    def omega(self, weighting: str) -> dict[int, float]:
        """Return the enrollment weight of every enrolled client; they sum to one."""
        prob = {"fedipw": self.fitted_enrollment, "oracle": self.true_enrollment}.get(weighting)
        raw = {i: 1.0 if prob is None else 1.0 / float(prob[i]) for i in self.enrolled}
        total = sum(raw.values())
        return {i: raw[i] / total for i in self.enrolled}

    def weights(self, weighting: str, r: int) -> dict[int, float]:
        """Return the weights of a round's replies: a plain mean, or the oracle's."""
        replies = self.rounds[r]
        if weighting == "":
            return {i: 1.0 / len(replies) for i in replies}
        assert weighting == "oracle"
        N, prob = self.population.size, self.reply_prob[r]
        return {i: 1.0 / (N * self.true_enrollment[i] * prob[i]) for i in replies}


def start(world: World) -> Vector:
    return np.zeros(world.clients.n_parameters)


def fedprox(world: World, weighting: str) -> Vector:
    theta, mu = start(world), world.scenario.rules.fedprox.mu
    for r in range(len(world.rounds)):
        w = world.weights(weighting, r)
        theta = theta + sum((w[i] * world.update(i, theta, mu=mu) for i in w), start(world))
    return theta


def fednova(world: World, weighting: str) -> Vector:
    theta = start(world)
    for r in range(len(world.rounds)):
        w = world.weights(weighting, r)
        effective = sum(w[i] * world.K[i] for i in w) / sum(w.values())
        mean = sum((w[i] * world.update(i, theta) / world.K[i] for i in w), start(world))
        theta = theta + effective * mean
    return theta


def scaffold(world: World, weighting: str) -> Vector:
    theta, omega = start(world), world.omega(weighting)
    c, own = start(world), {i: start(world) for i in world.enrolled}
    for replies in world.rounds:
        change, move = start(world), start(world)
        for i in replies:
            delta = world.update(i, theta, shift=c - own[i])
            following = own[i] - c + (theta - (theta + delta)) / (world.K[i] * world.eta)
            change = change + omega[i] * (following - own[i])
            move = move + delta / len(replies)
            own[i] = following
        theta, c = theta + move, c + change
    return theta


def mifa(world: World, weighting: str) -> Vector:
    theta, omega = start(world), world.omega(weighting)
    latest = {i: start(world) for i in world.enrolled}
    wait, seen = world.scenario.rules.mifa.wait, set()
    for r, replies in enumerate(world.rounds):
        for i in replies:
            latest[i] = world.update(i, theta)
            seen.add(i)
        if wait is None or len(seen) == len(world.enrolled) or r + 1 >= wait:
            theta = theta + sum((omega[i] * latest[i] for i in world.enrolled), start(world))
    return theta


def fedvarp(world: World, weighting: str) -> Vector:
    theta, omega = start(world), world.omega(weighting)
    latest = {i: start(world) for i in world.enrolled}
    for r, replies in enumerate(world.rounds):
        prob = world.reply_prob[r]
        move = sum((omega[i] * latest[i] for i in world.enrolled), start(world))
        for i in replies:
            share = omega[i] / prob[i] if weighting else 1.0 / len(replies)
            delta = world.update(i, theta)
            move = move + share * (delta - latest[i])
            latest[i] = delta
        theta = theta + move
    return theta


def fedau(world: World, weighting: str) -> Vector:
    theta, cutoff = start(world), world.scenario.rules.fedau.cutoff
    gaps: dict[int, list[int]] = {i: [] for i in world.enrolled}
    since = dict.fromkeys(world.enrolled, 0)
    for replies in world.rounds:
        move = start(world)
        for i in replies:
            gap = np.mean(gaps[i]) if gaps[i] else 1.0
            size = len(world.enrolled)
            if weighting == "fedipw":
                size = world.population.size * world.fitted_enrollment[i]
            move = move + gap / size * world.update(i, theta)
        theta = theta + move
        for i in world.enrolled:
            since[i] += 1
            if i in replies or since[i] == cutoff:
                gaps[i].append(since[i])
                since[i] = 0
    return theta


def debiased(world: World, weighting: str) -> Vector:
    theta, replies = start(world), dict.fromkeys(world.enrolled, 0)
    for r, present in enumerate(world.rounds):
        move = start(world)
        for i in present:
            replies[i] += 1
            size = len(world.enrolled)
            if weighting == "fedipw":
                size = world.population.size * world.fitted_enrollment[i]
            move = move + world.update(i, theta) / (size * replies[i] / (r + 1))
        theta = theta + move
    return theta


def fedawe(world: World, weighting: str) -> Vector:
    """Algorithm 1 of the paper, each client with a model of its own."""
    omega, size = world.omega(weighting), world.scenario.rules.fedawe.size
    own = {i: start(world) for i in world.enrolled}
    tau = dict.fromkeys(world.enrolled, -1)
    model = start(world)
    for t, present in enumerate(world.rounds):
        sent = {i: own[i] + size * (t - tau[i]) * world.update(i, own[i]) for i in present}
        mass = sum(omega[i] for i in present)
        model = sum((omega[i] / mass * sent[i] for i in present), start(world))
        for i in present:
            own[i], tau[i] = model, t
    return model


def focus(world: World, weighting: str) -> Vector:
    """The authors' loop: the push is what the client's gradient changed, the server adds it up."""
    theta, omega, tracked = start(world), world.omega(weighting), start(world)
    last = {i: start(world) for i in world.enrolled}
    for present in world.rounds:
        push = start(world)
        for i in present:
            y, direction, before = theta, start(world), last[i]
            for k in range(world.K[i]):
                if k > 0:
                    y = y - world.eta * direction
                gradient = world.gradient(i, y)
                direction = direction + gradient - last[i]
                last[i] = gradient
            push = push + omega[i] * (last[i] - before)
        tracked = tracked + push
        theta = theta - world.scenario.rules.focus.size * world.eta * tracked
    return theta


def f3ast(world: World, weighting: str) -> Vector:
    theta, omega, rule = start(world), world.omega(weighting), world.scenario.rules.f3ast
    rate: dict[int, float] = {}
    for present in world.rounds:
        most = len(present) if rule.capacity is None else min(rule.capacity, len(present))
        if not rate:
            rate = dict.fromkeys(world.enrolled, most / len(world.enrolled))
        # the variance sum omega^2 / rate falls fastest in these clients' rates
        used = sorted(present, key=lambda i: (-((omega[i] / rate[i]) ** 2), i))[:most]
        for i in world.enrolled:
            rate[i] = (1 - rule.beta) * rate[i] + rule.beta * (i in used)
        move = sum((omega[i] / rate[i] * world.update(i, theta) for i in used), start(world))
        theta = theta + move
    return theta


def cafed(world: World, weighting: str) -> Vector:
    """Algorithm 1 of the paper with the total variation distance written out."""
    theta, omega, rule = start(world), world.omega(weighting), world.scenario.rules.cafed
    E = world.enrolled
    least: dict[int, float] = {}
    heard: dict[int, float] = {}
    for i in E:
        y = start(world)
        for _ in range(rule.alone):
            y = y - world.eta * world.gradient(i, y)
        least[i] = world.loss(i, y)
    path: dict[int, list[int]] = {i: [] for i in E}
    for present in world.rounds:
        now = {i: world.loss(i, theta) for i in present}
        if not heard:
            heard = dict.fromkeys(E, sum(now.values()) / len(now)) | now
        else:
            for i in present:
                heard[i] = rule.smoothing * heard[i] + (1 - rule.smoothing) * now[i]
        pi, lam = {}, {}
        for i in E:
            path[i].append(int(i in present))
            pi[i] = (sum(path[i]) + 1) / (len(path[i]) + 2)
            moves = list(zip(path[i][:-1], path[i][1:], strict=True))
            stay = [(moves.count((s, s)) + 1) / (sum(m[0] == s for m in moves) + 2) for s in (0, 1)]
            lam[i] = stay[0] + stay[1] - 1

        def error(q: dict[int, float]) -> float:
            p = {i: pi[i] * q[i] for i in E}  # noqa: B023
            p = {i: p[i] / sum(p.values()) for i in E}
            excess = {i: heard[i] - least[i] for i in E}  # noqa: B023
            distance = 0.5 * sum(abs(omega[i] - p[i]) for i in E)
            bias = rule.bias * max(excess.values()) * distance**2
            return float(sum(p[i] * excess[i] for i in E) + bias)

        q = {i: omega[i] / pi[i] for i in E}
        for order in (sorted(E, key=lambda i: -abs(lam[i])), sorted(E, key=lambda i: pi[i])):
            for i in order:
                tried = q | {i: 0.0}
                if q[i] and any(tried.values()) and error(q) - error(tried) >= rule.tolerance:
                    q = tried
        if any(q[i] for i in present):
            theta = theta + sum((q[i] * world.update(i, theta) for i in present), start(world))
    return theta


def amplified(world: World, weighting: str) -> Vector:
    theta = before = start(world)
    rule = world.scenario.rules.amplified
    for r in range(len(world.rounds)):
        theta = theta + _sum(world, weighting, r, theta)
        if (r + 1) % rule.every == 0:
            theta = theta + (rule.factor - 1.0) * (theta - before)
            before = theta
    return theta


def fedavgm(world: World, weighting: str) -> Vector:
    theta, m, rule = start(world), start(world), world.scenario.rules.fedavgm
    for r in range(len(world.rounds)):
        m = rule.beta * m + _sum(world, weighting, r, theta)
        theta = theta + rule.size * m
    return theta


def fedadam(world: World, weighting: str) -> Vector:
    theta, m, v = start(world), start(world), start(world)
    rule = world.scenario.rules.fedadam
    for r in range(len(world.rounds)):
        g = _sum(world, weighting, r, theta)
        m = rule.beta_1 * m + (1 - rule.beta_1) * g
        v = rule.beta_2 * v + (1 - rule.beta_2) * g * g
        size = rule.size * np.sqrt(1 - rule.beta_2 ** (r + 2)) / (1 - rule.beta_1 ** (r + 2))
        theta = theta + size * m / (np.sqrt(v) + rule.tau)
    return theta


def fedyogi(world: World, weighting: str) -> Vector:
    theta, m, v = start(world), start(world), start(world)
    rule = world.scenario.rules.fedyogi
    for r in range(len(world.rounds)):
        g = _sum(world, weighting, r, theta)
        m = rule.beta_1 * m + (1 - rule.beta_1) * g
        v = v - (1 - rule.beta_2) * g * g * np.sign(v - g * g)
        theta = theta + rule.size * m / (np.sqrt(v) + rule.tau)
    return theta


def _sum(world: World, weighting: str, r: int, theta: Vector) -> Vector:
    w = world.weights(weighting, r)
    return sum((w[i] * world.update(i, theta) for i in w), start(world))


PLAIN = {
    "fedprox": fedprox,
    "fednova": fednova,
    "fedau": fedau,
    "debiased": debiased,
    "scaffold": scaffold,
    "mifa": mifa,
    "fedvarp": fedvarp,
    "fedawe": fedawe,
    "focus": focus,
    "f3ast": f3ast,
    "cafed": cafed,
    "amplified": amplified,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
}
