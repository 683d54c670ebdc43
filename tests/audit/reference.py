"""A world to audit, its audit through JSON, and the numbers by the book in scikit-learn."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from fedipw.audit.gather import audit_facts
from fedipw.selection.coded import TableSettings
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import ParticipationSettings, Window
from fedipw.selection.steps import Formulas
from fedipw.tables import Ledger, Missing, Population
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan
from worlds import STEPS, Tables, World, drawn

Array = np.ndarray[Any, Any]


def world(seed: int = 0, *, steps: bool = False, clock: bool = False, **options: Any) -> Tables:
    """Return a world of one step, or of three; with a clock, rounds open every five hours."""
    odds = 0.1 + 0.8 * pl.col("z1") + 0.5 * (pl.col("os") == "ios") - 0.2 * pl.col("rooms")
    given = World(
        seed=seed, ids="zq{}zq", covariates=("z1", "os", "flat", "rooms"), changing=("x", "net"),
        enrollment=odds, steps=STEPS if steps else (), hours=5 if clock else 0, **options,
    )  # fmt: skip
    return drawn(given)


def planned(
    method: str = "fedipw", *, fit: str = "past", missing: str = "error", **settings: Any
) -> Plan:
    return Plan(
        method=method_named(method),
        formulas=Formulas(missing=Missing(missing)),
        settings=ParticipationSettings(window=Window(fit), **settings),
    )


def gathered(
    given: Tables,
    where: Path,
    plan: Plan,
    *,
    ledger: bool = True,
    targets: dict[str, float] | None = None,
    population_size: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the audit of a world, through JSON without any number that is not finite."""
    given.write(where)
    rounds = Ledger(where / "rounds")
    people = Population(where / "people.parquet")
    if targets is not None:
        people = Population.from_totals(where / "enrolled.parquet", targets, population_size)
    settings = TableSettings(missing=plan.formulas.missing)
    stage = enrollment_stage(people, settings=settings, later=rounds.covariates)
    audit = audit_facts(stage, rounds if ledger else None, plan, **options)
    assert audit.metric is None
    assert audit.verdict is None
    found: dict[str, Any] = json.loads(json.dumps(audit.to_json(), allow_nan=False))
    return found


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


def step_truth(given: Tables, label: str, among: str | None, *, log: bool, fit: str) -> StepTruth:
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


def truths(given: Tables, fit: str) -> dict[str, StepTruth]:
    if "available" not in given.rounds[0].columns:
        return {"participation": step_truth(given, "replied", None, log=True, fit=fit)}
    return {
        "availability": step_truth(given, "available", None, log=False, fit=fit),
        "reply": step_truth(given, "replied", "invited", log=True, fit=fit),
    }


def enrollment_prob(given: Tables) -> tuple[LogisticRegression, Array, Array]:
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
    untested = dict.fromkeys(("standard_error", "odds_ratio", "low", "high", "p_value"))
    assert got["flat"] == {"name": "flat", "value": 0.0, **untested}
    value, error = (np.array([got[n][key] for n in names]) for key in ("value", "standard_error"))
    close(value, model.coef_[0], rtol=1e-4)
    close(error, errors(model, X), rtol=1e-4)
    close([got[n]["odds_ratio"] for n in names], np.exp(value))
    for key, sign in (("low", -1.0), ("high", 1.0)):
        close([got[n][key] for n in names], np.exp(value + sign * norm.ppf(0.975) * error))
    close([got[n]["p_value"] for n in names], 2 * norm.sf(np.abs(value) / error))


def expected_rates(given: Tables, fit: str) -> list[tuple[float, float] | None]:
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


def reply_probs(given: Tables, fit: str) -> pl.DataFrame:
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


def moments(given: Tables, names: Sequence[str], ids: pl.DataFrame | None) -> dict[str, Array]:
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
