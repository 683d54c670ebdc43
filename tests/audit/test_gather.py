"""Every number of a gathered audit against plain polars, numpy and scikit-learn."""

import io
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from fedipw.audit.gather import audit_facts
from fedipw.cli import main
from fedipw.data import Ledger, Missing, TableFile, Targets
from fedipw.propensity import Formulas, LogSettings, LogWindow, StageModel, TableSettings
from fedipw.weights import method_named
from fedipw.weights.logrun import LogPlan
from fedipw.weights.people import KnownPopulation, KnownTotals

Array = np.ndarray[Any, Any]
NUMBERS, NET = ("z1", "flat", "rooms"), ("wifi", "cell")


@dataclass(frozen=True)
class World:
    """A population and its closed rounds."""

    people: pl.DataFrame
    rounds: tuple[pl.DataFrame, ...]

    @property
    def inside(self) -> pl.DataFrame:
        return self.people.filter("enrolled")

    @property
    def log(self) -> pl.DataFrame:
        """All rows with what is known of their clients."""
        return pl.concat(self.rounds).join(
            self.people.drop("enrolled"), on="unit_id", maintain_order="left"
        )

    def changed(self, index: int, **columns: pl.Expr) -> "World":
        rounds = list(self.rounds)
        rounds[index - 1] = rounds[index - 1].with_columns(**columns)
        return replace(self, rounds=tuple(rounds))

    def put(self, where: Path) -> None:
        self.people.write_parquet(where / "people.parquet")
        self.inside.drop("enrolled").write_parquet(where / "enrolled.parquet")
        (where / "rounds").mkdir()
        for k, table in enumerate(self.rounds, 1):
            table.write_parquet(where / "rounds" / f"round-{k:06d}.parquet")


def sigmoid(odds: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-odds))


def world(
    seed: int = 0, *, size: int = 400, rounds: int = 12, steps: bool = False, clock: bool = False
) -> World:
    """Return a world of one step, or of three; rounds open every five hours."""
    rng = np.random.default_rng(seed)
    z, system = (
        rng.normal(size=size),
        rng.choice(["android", "ios", "web"], size, p=[0.5, 0.3, 0.2]),
    )
    rooms = rng.integers(1, 5, size)
    odds = 0.1 + 0.8 * z + 0.5 * (system == "ios") - 0.2 * rooms
    people = pl.DataFrame(
        {
            "unit_id": [f"zq{i}zq" for i in range(size)],
            "enrolled": rng.random(size) < sigmoid(odds),
            "z1": z,
            "os": system,
            "flat": np.ones(size),
            "rooms": rooms,
        }
    )
    inside = people.filter("enrolled")
    n, z1, made = inside.height, inside["z1"].to_numpy(), []
    for k in range(1, rounds + 1):
        x, net, prob = rng.normal(size=n), rng.choice(NET, n), rng.uniform(0.5, 1.0, n)
        there = (rng.random(n) < sigmoid(1.0 + 0.5 * z1)) | (not steps)
        invited = there & ((rng.random(n) < prob) | (not steps))
        replied = invited & (rng.random(n) < sigmoid(-0.3 + 0.8 * x + 0.4 * z1))
        unseen = pl.Series(~there)
        columns: dict[str, Any] = {
            "round": np.full(n, k),
            "unit_id": inside["unit_id"],
            "invited": invited,
            "replied": replied,
            "x": pl.Series(x).set(unseen, None),
            "net": pl.Series(net).set(unseen, None),
        }
        if steps:
            columns |= {"available": there, "invite_prob": pl.Series(prob).set(unseen, None)}
        if clock:
            opened = datetime(2026, 3, 1) + timedelta(hours=5 * k)
            columns["opened_at"] = [opened] * n
        made.append(pl.DataFrame(columns))
    return World(people, tuple(made))


def planned(
    method: str = "fedipw", *, fit: str = "past", missing: str = "error", **settings: Any
) -> LogPlan:
    return LogPlan(
        method=method_named(method),
        formulas=Formulas(missing=Missing(missing)),
        settings=LogSettings(window=LogWindow(fit), **settings),
    )


def gathered(
    given: World,
    where: Path,
    plan: LogPlan,
    *,
    ledger: bool = True,
    targets: dict[str, float] | None = None,
    population_size: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the audit of a world, through JSON without any number that is not finite."""
    given.put(where)
    rounds = Ledger(where / "rounds")
    if targets is None:
        people: KnownPopulation | KnownTotals = KnownPopulation.of(
            TableFile(where / "people.parquet"),
            settings=TableSettings(missing=plan.formulas.missing),
            later=rounds.covariates,
        )
    else:
        table = TableFile(where / "enrolled.parquet")
        people = KnownTotals.of(table, Targets.of(targets), population_size)
    audit = audit_facts(people, rounds if ledger else None, plan, **options)
    assert audit.metric is None
    assert audit.verdict is None
    found: dict[str, Any] = json.loads(json.dumps(audit.to_json(), allow_nan=False))
    return found


# The reference.


def design(frame: pl.DataFrame, *, log: bool) -> tuple[list[str], Array]:
    """Return the columns of enrollment and availability, or of replies, but the constant one."""
    columns = {
        "z1": frame["z1"].to_numpy(),
        "os[ios]": (frame["os"] == "ios").to_numpy(),
        "os[web]": (frame["os"] == "web").to_numpy(),
        "rooms": frame["rooms"].to_numpy(),
    }
    if log:
        columns |= {"x": frame["x"].to_numpy(), "net[wifi]": (frame["net"] == "wifi").to_numpy()}
    return list(columns), np.column_stack(list(columns.values())).astype(float)


def fitted(X: Array, y: Array) -> LogisticRegression:
    return LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-10).fit(X, y)


def errors(model: LogisticRegression, X: Array) -> Array:
    """Return standard errors of the coefficients."""
    p, A = model.predict_proba(X)[:, 1], np.column_stack([np.ones(len(X)), X])
    information = (A.T * (p * (1 - p))) @ A
    deviations: Array = np.sqrt(np.diag(np.linalg.inv(information)))[1:]
    return deviations


@dataclass(frozen=True)
class StepTruth:
    """One step by the book: rows that could pass it, of each round."""

    rows: list[pl.DataFrame]
    passed: list[Array]
    prob: list[Array | None]  # none where nothing was known
    constant: list[bool]
    last: LogisticRegression | None
    last_on: Array | None  # rows of the last fit


def step_truth(given: World, label: str, among: str | None, *, log: bool, fit: str) -> StepTruth:
    known = given.people.drop("enrolled")
    rows = [
        (t if among is None else t.filter(among)).join(known, on="unit_id", maintain_order="left")
        for t in given.rounds
    ]
    X, y = [design(r, log=log)[1] for r in rows], [r[label].to_numpy() for r in rows]
    q = X[0].shape[1] + 1  # the constant column counts as a coefficient
    prob: list[Array | None] = []
    constant, last, last_on, fitted_on = [], None, None, -1
    for r in range(len(rows)):
        seen = {"past": range(r), "pooled": range(len(rows)), "same-round": [r]}[fit]
        passed, total = sum(y[k].sum() for k in seen), sum(len(y[k]) for k in seen)
        if fit == "past" and not passed:
            prob.append(None)
            constant.append(bool(y[r].any()))
        elif fit != "pooled" and min(passed, total - passed) <= 10 * (q + 1):
            prob.append(np.full(len(y[r]), passed / total))
            constant.append(True)
        else:
            asked = given.rounds[r]["replied"].any()  # a round without replies is not fitted for
            due = asked and (fit != "past" or r <= 10 or r - fitted_on >= 10)
            if last is None or (due and fit != "pooled"):
                last_on = np.vstack([X[k] for k in seen])
                last, fitted_on = fitted(last_on, np.concatenate([y[k] for k in seen])), r
            prob.append(last.predict_proba(X[r])[:, 1])
            constant.append(False)
    return StepTruth(rows, y, prob, constant, last, last_on)


def truths(given: World, fit: str) -> dict[str, StepTruth]:
    if "available" not in given.rounds[0].columns:
        return {"participation": step_truth(given, "replied", None, log=True, fit=fit)}
    return {
        "availability": step_truth(given, "available", None, log=False, fit=fit),
        "reply": step_truth(given, "replied", "invited", log=True, fit=fit),
    }


def enrollment_prob(given: World) -> tuple[LogisticRegression, Array, Array]:
    _, Z = design(given.people, log=False)
    model = fitted(Z, given.people["enrolled"].to_numpy())
    return model, Z, model.predict_proba(Z)[:, 1]


def close(got: object, wanted: object, rtol: float = 1e-6) -> None:
    np.testing.assert_allclose(np.array(got, float), np.array(wanted, float), rtol=rtol, atol=1e-9)


def check_stage(part: dict[str, Any], prob: Array, labels: Array, names: tuple[str, str]) -> None:
    """Check curve, area, error and histogram of a stage against its rows."""
    assert part["rows"] == len(prob)
    close(part["rate"], labels.mean())
    close(part["calibration_ratio"], labels.sum() / prob.sum())
    assert part["auc"] == pytest.approx(roc_auc_score(labels, prob), abs=2e-3)
    order = np.argsort(prob, kind="stable")
    p, y = prob[order], labels[order].astype(float)
    counts = [one["count"] for one in part["reliability"]]
    assert sum(counts) == len(prob)
    assert min(counts) >= 10
    apart = 0.0
    for one, ps, ys in zip(
        part["reliability"], *(np.split(a, np.cumsum(counts)[:-1]) for a in (p, y)), strict=True
    ):
        close([one["mean_prob"], one["rate"]], [ps.mean(), ys.mean()])
        close(one["standard_error"], np.sqrt(ys.mean() * (1 - ys.mean()) / len(ys)))
        apart += abs(ps.sum() - ys.sum())
    close(part["expected_error"], apart / len(prob))
    edges = np.array(part["prob"]["edges"])
    assert list(part["prob"]["counts"]) == list(names)
    for group, chosen in zip(names, (prob, prob[labels]), strict=True):
        assert part["prob"]["counts"][group] == np.histogram(chosen, edges)[0].tolist()
        assert sum(part["prob"]["counts"][group]) == len(chosen)


def check_coefficients(
    part: dict[str, Any], model: LogisticRegression, X: Array, names: Sequence[str]
) -> None:
    got = {c["name"]: c for c in part["coefficients"]}
    assert {*got} == {*names, "flat"}
    assert got["flat"] == {"name": "flat", "value": 0.0, "standard_error": None}
    close([got[n]["value"] for n in names], model.coef_[0], rtol=1e-4)
    close([got[n]["standard_error"] for n in names], errors(model, X), rtol=1e-4)


@pytest.mark.parametrize("fit", ["past", "pooled", "same-round"])
@pytest.mark.parametrize("steps", [False, True])
def test_stages_are_those_of_scikit_learn(fit: str, steps: bool, tmp_path: Path) -> None:
    given = world(1, steps=steps, rounds=13)
    found = gathered(given, tmp_path, planned(fit=fit))
    enrollment, *parts = found["stages"]
    model, Z, prob = enrollment_prob(given)
    check_stage(enrollment, prob, given.people["enrolled"].to_numpy(), ("population", "enrolled"))
    check_coefficients(enrollment, model, Z, design(given.people, log=False)[0])
    wanted = truths(given, fit)
    assert [part["stage"] for part in parts] == list(wanted)
    for part, (name, truth) in zip(parts, wanted.items(), strict=True):
        told = [k for k, p in enumerate(truth.prob) if p is not None]
        label = "available" if name == "availability" else "replied"
        check_stage(
            part,
            np.concatenate([truth.prob[k] for k in told]),
            np.concatenate([truth.passed[k] for k in told]),
            ("rows", label),
        )
        if fit == "same-round":
            assert part["coefficients"] == []
        else:
            assert truth.last is not None
            assert truth.last_on is not None
            names = design(truth.rows[0], log=name != "availability")[0]
            check_coefficients(part, truth.last, truth.last_on, names)
        rates = sum(truth.constant)
        said = [n for n in found["notes"] if f"{name!r} was given a constant rate" in n]
        assert len(said) == bool(rates)
        assert all(f" {rates} round" in note for note in said)


def expected_rates(given: World, fit: str) -> list[tuple[float, float] | None]:
    """Return the expected share of replies and the ratio of each round."""
    out: list[tuple[float, float] | None] = []
    wanted = truths(given, fit)
    for k, table in enumerate(given.rounds):
        share = 1.0
        for truth in wanted.values():
            p = truth.prob[k]
            share *= np.nan if p is None or not len(p) else float(p.mean())
        if "available" in table.columns:
            share *= float(table.filter("available")["invite_prob"].mean() or np.nan)  # type: ignore[arg-type]
        rate = float(table["replied"].mean() or 0.0)  # type: ignore[arg-type]
        out.append(None if np.isnan(share) else (share, rate / share))
    return out


def reply_probs(given: World, fit: str) -> pl.DataFrame:
    """Return the participation probability of each reply, and its weight by fedipw."""
    wanted, tables = truths(given, fit), []
    for k, table in enumerate(given.rounds):
        made = table.filter("replied").select("unit_id", "round")
        p = np.ones(made.height)
        for truth in wanted.values():
            rows, given_prob = truth.rows[k], truth.prob[k]
            if given_prob is None:  # the first round: its own rate
                given_prob = np.full(len(truth.passed[k]), truth.passed[k].mean())
            p = p * given_prob[rows["replied"].to_numpy()]
        if "invite_prob" in table.columns:
            p = p * table.filter("replied")["invite_prob"].to_numpy()
        tables.append(made.with_columns(p=p))
    prob = pl.DataFrame({"unit_id": given.people["unit_id"], "pi": enrollment_prob(given)[2]})
    return (
        pl.concat(tables)
        .join(prob, on="unit_id", maintain_order="left")
        .with_columns(weight=1 / (given.people.height * pl.col("pi") * pl.col("p")))
    )


@pytest.mark.parametrize("fit", ["past", "pooled"])
@pytest.mark.parametrize("steps", [False, True])
def test_rounds_and_sizes_are_those_of_the_ledger(fit: str, steps: bool, tmp_path: Path) -> None:
    given = world(2, steps=steps, clock=True).changed(6, replied=pl.lit(value=False))
    found = gathered(given, tmp_path, planned(fit=fit))
    weights = reply_probs(given, fit)
    assert found["sizes"] == {
        "population": 400.0,
        "population_table": True,
        "enrolled": given.inside.height,
        "rounds": 12,
        "rows": given.log.height,
        "replies": int(given.log["replied"].sum()),
        "clients_replied": given.log.filter("replied")["unit_id"].n_unique(),
    }
    for line, table, expected in zip(
        found["rounds"], given.rounds, expected_rates(given, fit), strict=True
    ):
        k = line["first"]
        assert line["last"] == k == table["round"][0]
        assert line["opened_at"] == (datetime(2026, 3, 1) + timedelta(hours=5 * k)).isoformat()
        assert (line["enrolled"], line["invited"]) == (table.height, table["invited"].sum())
        close(line["reply_rate"], table["replied"].mean())
        own = weights.filter(pl.col("round") == k)["weight"].to_numpy()
        if k == 6:
            assert line["skipped"] == 1
            assert line["effective_replies"] is line["weight_sum"] is line["largest_share"] is None
        else:
            assert line["skipped"] == 0
            close(line["replies"], len(own))
            close(line["weight_sum"], own.sum())
            close(line["effective_replies"], own.sum() ** 2 / (own**2).sum())
            close(line["largest_share"], own.max() / own.sum())
        if expected is None:
            assert line["expected_rate"] is line["calibration_ratio"] is None
        else:
            close([line["expected_rate"], line["calibration_ratio"]], expected)
    assert "1 round could not be weighed: nobody replied." in found["notes"]


def check_weights(part: dict[str, Any], weights: Array) -> None:
    multiples = weights / weights.mean()
    top = int(np.ceil(0.01 * len(weights)))
    assert (part["count"], part["zeros"]) == (len(weights), int((weights == 0).sum()))
    assert part["negative"] == int((weights < 0).sum())
    close(part["effective_sample_size"], weights.sum() ** 2 / (weights**2).sum())
    close(part["design_effect"], len(weights) * (weights**2).sum() / weights.sum() ** 2)
    close(part["largest_share"], weights.max() / weights.sum())
    close(part["top_share"], np.sort(weights)[-top:].sum() / weights.sum())
    for q, value in part["quantiles"].items():
        close(value, np.quantile(multiples, float(q)), rtol=1e-5)
    edges = np.array(part["multiples"]["edges"])
    inner = np.r_[edges[0] * (1 - 1e-6), edges[1:-1], edges[-1] * (1 + 1e-6)]
    counts = part["multiples"]["counts"][part["name"]]
    assert counts == np.histogram(multiples[multiples > 0], inner)[0].tolist()
    assert sum(counts) == (weights > 0).sum()


def moments(given: World, names: Sequence[str], ids: pl.DataFrame | None) -> dict[str, Array]:
    """Return the columns of a group's clients, as often as they are in it."""
    rows = (
        given.people if ids is None else ids.join(given.people, on="unit_id", maintain_order="left")
    )
    return {
        name: (rows["os"] == name[3:-1]).to_numpy().astype(float)
        if name.startswith("os[")
        else rows[name].to_numpy().astype(float)
        for name in names
    }


def test_weights_and_balance_are_those_of_the_groups(tmp_path: Path) -> None:
    given = world(3, steps=True)
    found = gathered(given, tmp_path, planned())
    replies = reply_probs(given, "past")
    inside = given.inside.select("unit_id")
    pi = enrollment_prob(given)[2][given.people["enrolled"].to_numpy()]
    enrolled, weighted = found["weights"]
    assert (enrolled["name"], weighted["name"]) == ("enrollment", "replies")
    check_weights(enrolled, 1 / pi)
    check_weights(weighted, replies["weight"].to_numpy())
    part = found["balance"]
    assert part["scale_from"] == "population"
    groups = ["enrolled", "participants", "enrolled weighted", "participants weighted"]
    assert part["groups"] == groups
    names = [line["name"] for line in part["lines"]]
    assert names == ["z1", "os[android]", "os[ios]", "os[web]", "flat", "rooms"]
    everyone, those = moments(given, names, None), moments(given, names, inside)
    again = moments(given, names, replies.select("unit_id"))
    for line in part["lines"]:
        name = line["name"]
        mean, sd = everyone[name].mean(), everyone[name].std(ddof=1)
        close([line["mean"], line["sd"]], [mean, sd])
        wanted = (
            those[name].mean(),
            again[name].mean(),
            np.average(those[name], weights=1 / pi),
            np.average(again[name], weights=replies["weight"]),
        )
        for group, value in zip(groups, wanted, strict=True):
            cell = line["groups"][group]
            close(cell["mean"], value)
            close(cell["smd"], 0.0 if name == "flat" else (value - mean) / sd, rtol=1e-5)


def test_overlap_counts_small_probabilities_and_parts_nobody_is_enrolled_in(tmp_path: Path) -> None:
    given = world(4)
    gone = (pl.col("os") == "web") & pl.col("rooms").is_in([1, 2])
    people = given.people.with_columns(enrolled=pl.col("enrolled") & ~gone)
    kept = people.filter("enrolled")["unit_id"]
    rounds = tuple(t.filter(pl.col("unit_id").is_in(kept.implode())) for t in given.rounds)
    given = World(people, rounds)
    found = gathered(given, tmp_path, planned(), threshold=0.2, min_cell=10)["overlap"]
    prob = enrollment_prob(given)[2]
    pi = prob[people["enrolled"].to_numpy()]
    close(found["smallest_prob"], prob.min())
    assert found["below"] == (prob < 0.2).sum()
    close(found["share_below"], (prob < 0.2).mean())
    close(found["estimated_size"], (1 / pi).sum())
    close(found["effective_sample_size"], (1 / pi).sum() ** 2 / (1 / pi**2).sum())
    pairs = people.group_by("os", "rooms").agg(pl.len(), pl.col("enrolled").sum())
    empty = pairs.filter(enrolled=0).sort("len", descending=True)
    assert empty.height >= 2
    wanted = {f"os = {o} and rooms = {r}": n for o, r, n, _ in empty.iter_rows()}
    assert {e["name"]: e["population"] for e in found["empty"]} == wanted
    assert found["empty_small"] == 0
    (tmp_path / "small").mkdir()
    limit = int(empty["len"][0])  # only the largest is shown
    small = gathered(given, tmp_path / "small", planned(), min_cell=limit)["overlap"]
    assert [e["population"] for e in small["empty"]] == [n for n in empty["len"] if n >= limit]
    assert small["empty_small"] == empty.filter(pl.col("len") < limit).height


@pytest.mark.parametrize("clock", [True, False])
def test_rates_and_heat_maps_are_plain_counts(clock: bool, tmp_path: Path) -> None:
    given = world(5, clock=clock, steps=True)
    found = gathered(given, tmp_path, planned(day_length=4.0))
    log = given.log
    parts = {part["column"]: part for part in found["rates"]}
    assert list(parts) == ["z1", "os", "flat", "rooms", "x", "net"]
    cuts = {}
    sample = pl.concat([given.rounds[k] for k in np.linspace(0, 11, 8).astype(int)])
    for name, frame in (("z1", given.inside), ("x", sample.drop_nulls("x"))):
        edges = [
            float(f"{e:.4g}") for e in np.quantile(frame[name].to_numpy(), [0.2, 0.4, 0.6, 0.8])
        ]
        text = [f"{e:g}" for e in edges]
        labels = [
            f"up to {text[0]}",
            *(f"{a} to {b}" for a, b in pairwise(text)),
        ]
        labels.append(f"above {text[-1]}")
        level = pl.lit(labels[-1])
        for limit, label in reversed([*zip(edges, labels, strict=False)]):
            level = pl.when(pl.col(name) <= limit).then(pl.lit(label)).otherwise(level)
        cuts[name] = pl.when(pl.col(name).is_null()).then(None).otherwise(level)
    levels = {n: cuts.get(n, pl.col(n).cast(pl.String).str.replace(r"\.0$", "")) for n in parts}
    hour = pl.col("opened_at").dt.hour() if clock else (pl.col("round") - 1) % 4
    log = log.with_columns(e.fill_null("(missing)").alias(f"{n} level") for n, e in levels.items())
    log = log.with_columns(hour.cast(pl.Int64).alias("hour"))
    for name, part in parts.items():
        counts = log.group_by(f"{name} level").agg(pl.len(), pl.col("replied").sum())
        wanted = {level: (n, k) for level, n, k in counts.iter_rows()}
        assert {p["level"]: (p["rows"], p["replies"]) for p in part["lines"]} == wanted
        assert part["hidden"] == 0
        for line in part["lines"]:
            close(line["rate"], line["replies"] / line["rows"])
    assert {m["column"] for m in found["heat"]} <= {*parts}
    assert len(found["heat"]) == 3
    for heat in found["heat"]:
        assert heat["clock"] == ("hour" if clock else "round of the day")
        assert heat["hours"] == sorted(set(log["hour"]))
        assert heat["levels"] == [p["level"] for p in parts[heat["column"]]["lines"]]
        for level, rates, rows in zip(heat["levels"], heat["rate"], heat["rows"], strict=True):
            for hour_, rate, n in zip(heat["hours"], rates, rows, strict=True):
                cell = log.filter(pl.col(f"{heat['column']} level") == level, hour=hour_)["replied"]
                assert n == (len(cell) if len(cell) >= 10 else None)
                assert (rate is None) == (n is None)
                if rate is not None:
                    close(rate, cell.mean())
    spread = {
        name: np.average(
            [(p["rate"] - log["replied"].mean()) ** 2 for p in part["lines"]],
            weights=[p["rows"] for p in part["lines"]],
        )
        for name, part in parts.items()
        if len(part["lines"]) > 1
    }
    chosen = sorted(spread, key=lambda n: -spread[n])[:3]
    assert {m["column"] for m in found["heat"]} == {*chosen}


def test_without_a_clock_or_two_days_there_is_no_heat_map(tmp_path: Path) -> None:
    assert gathered(world(6), tmp_path, planned())["heat"] == []


def fedipw(*arguments: object) -> None:
    """Run a command in this process."""
    before, code = sys.argv, 0
    sys.argv = ["fedipw", *map(str, arguments)]
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            main()
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        sys.argv = before
    assert code == 0


@pytest.mark.parametrize(
    ("method", "fit"),
    [
        ("fedipw", "past"),
        ("fedipw-hajek", "pooled"),
        ("greg", "past"),
        ("calibrated-linear", "same-round"),
        ("participation-only", "past"),
        ("collapsed", "past"),
    ],
)
def test_weights_are_those_of_the_command(method: str, fit: str, tmp_path: Path) -> None:
    given = world(7, steps=True, rounds=14)
    for k in (1, 5, 12):  # rounds without replies are not fitted in
        given = given.changed(k, replied=pl.lit(value=False))
    found = gathered(given, tmp_path, planned(method, fit=fit))
    fedipw(
        "weights", "--population", tmp_path / "people.parquet", "--rounds", tmp_path / "rounds",
        "--out", tmp_path / "w.parquet", "--scheme", method, "--participation-fit", fit,
    )  # fmt: skip
    written = pl.read_parquet(tmp_path / "w.parquet")
    parts = {part["name"]: part for part in found["weights"]}
    check_weights(parts["replies"], written["weight"].to_numpy())
    means = moments(given, ["z1", "os[web]"], written.select("unit_id"))
    lines = {line["name"]: line for line in found["balance"]["lines"]}
    for name, values in means.items():
        wanted = np.average(values, weights=written["weight"])
        close(lines[name]["groups"]["participants weighted"]["mean"], wanted)
    assert found["settings"]["scheme"] == method
    assert found["settings"]["participation_fit"] == fit


def test_negative_weights_are_counted_and_kept_out_of_the_histogram(tmp_path: Path) -> None:
    given = world(8, size=300, rounds=6)
    found = gathered(given, tmp_path, planned("greg"))
    part = next(p for p in found["weights"] if p["name"] == "replies")
    assert part["negative"] > 0
    assert sum(part["multiples"]["counts"]["replies"]) == part["count"] - part["negative"]
    assert f"{part['negative']} weights of replies are negative." in found["notes"]


TARGETS = {"z1": 0.1, "os[ios]": 0.3, "os[web]": 0.2}


@pytest.mark.parametrize("method", ["calibrated-quadratic", "participation-only"])
def test_totals_alone_give_balance_and_say_what_is_unknown(method: str, tmp_path: Path) -> None:
    given = world(9)
    found = gathered(given, tmp_path, planned(method), targets=TARGETS)
    assert found["overlap"] is None
    assert [part["stage"] for part in found["stages"]] == ["participation"]
    assert found["sizes"]["population"] is None
    assert found["settings"]["enrollment"] == "z1, os[ios], os[web]"
    said = " ".join(found["unknown"])
    for words in ("Enrollment probabilities", "size of the population", "not among the targets"):
        assert words in said
    lines = {line["name"]: line for line in found["balance"]["lines"]}
    assert {n: line["mean"] for n, line in lines.items()} == TARGETS
    those = moments(given, list(TARGETS), given.inside.select("unit_id"))
    calibrated = method != "participation-only"
    assert found["balance"]["scale_from"] == ("enrolled weighted" if calibrated else "enrolled")
    for name, line in lines.items():
        close(line["groups"]["enrolled"]["mean"], those[name].mean())
        smd = (those[name].mean() - TARGETS[name]) / line["sd"]
        close(line["groups"]["enrolled"]["smd"], smd)
        if calibrated:
            close(line["groups"]["enrolled weighted"]["mean"], TARGETS[name])
        else:
            close(line["sd"], those[name].std(ddof=1))
            assert "enrolled weighted" not in line["groups"]
    (tmp_path / "sized").mkdir()
    sized = gathered(
        given, tmp_path / "sized", planned(method), targets=TARGETS, population_size=400.0
    )
    assert sized["sizes"]["population"] == 400.0
    assert "size of the population" not in " ".join(sized["unknown"])


def test_without_a_ledger_there_is_enrollment_alone(tmp_path: Path) -> None:
    found = gathered(world(10), tmp_path, planned(), ledger=False)
    assert [part["stage"] for part in found["stages"]] == ["enrollment"]
    assert found["rates"] == found["heat"] == found["rounds"] == []
    assert [part["name"] for part in found["weights"]] == ["enrollment"]
    assert found["balance"]["groups"] == ["enrolled", "enrolled weighted"]
    assert found["sizes"]["rounds"] == 0
    assert any(text.startswith("Participation:") for text in found["unknown"])


def test_enrollment_that_changes_is_audited_as_of_the_last_round(tmp_path: Path) -> None:
    given = world(11, size=600)
    rng = np.random.default_rng(0)
    n = given.people.height
    start = pl.Series(np.where(rng.random(n) < 0.3, 4, 1))
    end = pl.Series(np.where(rng.random(n) < 0.2, 9, 99))
    people = given.people.with_columns(enrolled_from=start, enrolled_until=end)
    there = people.select("unit_id", "enrolled_from", "enrolled_until")
    rounds = tuple(
        t.join(there, on="unit_id", maintain_order="left")
        .filter(pl.col("enrolled_from") <= k, pl.col("enrolled_until") > k)
        .drop("enrolled_from", "enrolled_until")
        for k, t in enumerate(given.rounds, 1)
    )
    found = gathered(World(people, rounds), tmp_path, planned())
    last = people.with_columns(enrolled=pl.col("enrolled") & (pl.col("enrolled_until") > 12))
    model, Z, prob = enrollment_prob(World(last, ()))
    part = found["stages"][0]
    check_stage(part, prob, last["enrolled"].to_numpy(), ("population", "enrolled"))
    check_coefficients(part, model, Z, design(last, log=False)[0])
    pi = prob[last["enrolled"].to_numpy()]
    check_weights(found["weights"][0], 1 / pi)
    close(found["overlap"]["estimated_size"], (1 / pi).sum())
    assert found["sizes"]["enrolled"] == people["enrolled"].sum()
    assert [line["enrolled"] for line in found["rounds"]] == [t.height for t in rounds]
    line = found["balance"]["lines"][0]
    close(line["groups"]["enrolled"]["mean"], last.filter("enrolled")["z1"].mean())
    assert any(f"as of round 12 ({len(pi)} clients)" in note for note in found["notes"])


def test_rounds_nobody_is_enrolled_in_are_lines_without_a_rate(tmp_path: Path) -> None:
    given = world(12, rounds=8)
    people = given.people.with_columns(enrolled_from=pl.lit(4))
    rounds = tuple(t.clear() if k < 4 else t for k, t in enumerate(given.rounds, 1))
    found = gathered(World(people, rounds), tmp_path, planned())
    for line in found["rounds"][:3]:
        assert line["reply_rate"] is line["expected_rate"] is line["weight_sum"] is None
        assert (line["enrolled"], line["skipped"]) == (0.0, 1)
    assert "3 rounds could not be weighed: nobody is enrolled." in found["notes"]
    assert found["rounds"][3]["expected_rate"] is None  # nothing was known before it
    assert found["rounds"][4]["expected_rate"] is not None


def test_missing_values_under_drop_are_left_out_and_counted(tmp_path: Path) -> None:
    given = world(13)
    people = given.people.with_columns(
        z1=pl.when(pl.int_range(pl.len()) % 10 == 0).then(None).otherwise(pl.col("z1"))
    )
    given = replace(given, people=people).changed(
        3, x=pl.when(pl.int_range(pl.len()) % 3 == 0).then(None).otherwise(pl.col("x"))
    )
    found = gathered(given, tmp_path, planned(missing="drop"))
    known = World(people.drop_nulls("z1"), given.rounds)
    enrollment, part = found["stages"]
    _, _, prob = enrollment_prob(known)
    check_stage(enrollment, prob, known.people["enrolled"].to_numpy(), ("population", "enrolled"))
    assert enrollment["left_out"] == 40
    whole = given.log.filter(pl.col("round") > 1)
    assert part["rows"] == whole.drop_nulls(["z1", "x"]).height
    assert part["left_out"] == whole.height - part["rows"]
    close(part["rate"], whole.drop_nulls(["z1", "x"])["replied"].mean())
    assert found["sizes"]["population"] == 400.0
    inside = known.people.filter("enrolled")
    line = found["balance"]["lines"][0]
    close(line["groups"]["enrolled"]["mean"], inside["z1"].mean())
    close(line["mean"], known.people["z1"].mean())
    missing = {
        p["level"]: p for part in found["rates"] for p in part["lines"] if part["column"] == "z1"
    }
    rows = given.log.filter(pl.col("z1").is_null())
    assert missing["(missing)"]["rows"] == rows.height
    lost = given.log.filter(pl.col("replied") & pl.any_horizontal(pl.col("z1", "x").is_null()))
    assert any(note.startswith(f"{lost.height} of ") for note in found["notes"])


def test_a_level_nobody_enrolled_in_parts_the_classes_and_is_named(tmp_path: Path) -> None:
    given = world(14)
    people = given.people.with_columns(enrolled=pl.col("enrolled") & (pl.col("os") != "web"))
    ids = people.filter("enrolled")["unit_id"]
    rounds = tuple(t.filter(pl.col("unit_id").is_in(ids.implode())) for t in given.rounds)
    given = World(people, rounds)
    found = gathered(given, tmp_path, planned("fedipw"))
    web = people.filter(os="web").height
    assert {"name": "os = web", "population": web} in found["overlap"]["empty"]
    assert found["overlap"]["smallest_prob"] is None
    assert found["settings"]["scheme"] == "participation-only"
    assert any("stand for the enrolled, not for the population" in n for n in found["notes"])
    assert "enrollment" not in [part["stage"] for part in found["stages"]]
    assert any("no model of enrollment" in text for text in found["unknown"])
    line = next(line for line in found["balance"]["lines"] if line["name"] == "os[web]")
    assert line["groups"]["enrolled"]["mean"] == 0.0


def test_many_rounds_are_merged_evenly(tmp_path: Path) -> None:
    given = world(15, size=60, rounds=401)
    found = gathered(given, tmp_path, planned(refit_every=100), min_cell=1)
    assert len(found["rounds"]) == 134
    assert [line["first"] for line in found["rounds"]] == list(range(1, 402, 3))
    assert found["rounds"][-1]["last"] == 401
    for line in found["rounds"][:5]:
        tables = given.rounds[line["first"] - 1 : line["last"]]
        close(line["replies"], np.mean([t["replied"].sum() for t in tables]))
        close(line["reply_rate"], pl.concat(tables)["replied"].mean())
        for name in ("effective_replies", "weight_sum"):
            assert line[name] > 0.0


def test_saved_models_are_checked_as_they_are(tmp_path: Path) -> None:
    given = world(16, steps=True)
    pooled = gathered(given, tmp_path, planned(fit="pooled"))
    fedipw(
        "weights", "--population", tmp_path / "people.parquet", "--rounds", tmp_path / "rounds",
        "--out", tmp_path / "w.parquet", "--participation-fit", "pooled",
        "--save-models", tmp_path / "models",
    )  # fmt: skip
    names = ("availability", "reply")
    models = {name: StageModel.load(tmp_path / "models" / f"{name}.json") for name in names}
    (tmp_path / "again").mkdir()
    found = gathered(given, tmp_path / "again", replace(planned(), models=models))
    assert found["settings"]["participation_fit"] == "saved"
    for name in ("stages", "rounds", "balance", "weights", "rates"):
        assert found[name] == pooled[name]
