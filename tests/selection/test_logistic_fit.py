"""One logistic fit over arrays and files: R's numbers, Newton in long double, and invariances."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError, NotConvergedError
from fedipw.numerics import FloatArray, LabelArray
from fedipw.selection.classifiers import Newton
from fedipw.selection.coded import CodedTable, TableSettings, table_model
from fedipw.selection.logistic import LogisticFit, logistic_fit
from fedipw.selection.saved import StageModel
from fedipw.tables.design import Missing
from fedipw.tables.partitions import Block, Blocks, Frame
from fedipw.tables.table import Table

FOLDER = Path(__file__).parents[1] / "reference"
R: dict[str, Any] = json.loads((FOLDER / "ipw200_R.json").read_text())
FITTED = pl.read_csv(FOLDER / "ipw200_fitted_R.csv", null_values="NA")
CLIENTS = pl.read_csv(FOLDER / "ipw200.csv").select(
    pl.col("id").alias("unit_id"), "z1", "z2", "z3", enrolled=pl.col("e") == 1
)
R_ORDER = ("z1", "z2", "z3b", "z3c", "(Intercept)")


def newton_in_long_double(
    X: FloatArray, y: FloatArray, weights: FloatArray | None = None, l2: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """Return coefficients, intercept last, and the inverse of the penalised information.

    Gradients are summed in long double, so each step repairs what the last one rounded.
    """
    Z = np.column_stack([X, np.ones(len(X))]).astype(np.longdouble)
    w = np.ones(len(X)) if weights is None else weights
    penalty = np.append(np.full(X.shape[1], l2), 0.0).astype(np.longdouble)
    beta = np.zeros(Z.shape[1], dtype=np.longdouble)
    for _ in range(60):
        p = 1.0 / (1.0 + np.exp(-(Z @ beta)))
        gradient = Z.T @ (w * (y - p)) - penalty * beta
        hessian = ((Z * (w * p * (1.0 - p))[:, None]).T @ Z + np.diag(penalty)).astype(np.float64)
        scale = np.sqrt(np.diag(hessian))
        step = np.linalg.solve(hessian / np.outer(scale, scale), (gradient / scale).astype(float))
        beta = beta + step / scale
    covariance = np.linalg.inv(hessian / np.outer(scale, scale)) / np.outer(scale, scale)
    return beta.astype(np.float64), covariance


def coefficients(fit: LogisticFit) -> FloatArray:
    return np.append(fit.coefficients, fit.intercept)


def assert_same_fit(a: LogisticFit, b: LogisticFit, rtol: float) -> None:
    np.testing.assert_allclose(coefficients(a), coefficients(b), rtol=rtol, atol=rtol)
    np.testing.assert_allclose(a.covariance, b.covariance, rtol=100 * rtol, atol=100 * rtol)
    assert a.log_likelihood == pytest.approx(b.log_likelihood, rel=rtol)
    assert (a.names, a.rows, a.dropped) == (b.names, b.rows, b.dropped)


def in_blocks(
    X: FloatArray, y: LabelArray, edges: list[int], w: FloatArray | None = None
) -> Blocks:
    cuts = [0, *sorted(edges), len(X)]
    return Blocks.of(
        [
            Block(X[a:b].T.copy(), y[a:b], np.empty(0) if w is None else w[a:b])
            for a, b in pairwise(cuts)
        ]
    )


def random_rows(seed: int, n: int = 300, q: int = 3) -> tuple[FloatArray, LabelArray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, q))
    odds = X @ rng.uniform(-1.0, 1.0, q) - 0.5
    return X, (rng.random(n) < 1.0 / (1.0 + np.exp(-odds))).astype(np.int8)


# --- R


def by_arrays(tmp_path: Path) -> LogisticFit:  # noqa: ARG001
    X = CLIENTS.select("z1", "z2", b=pl.col("z3") == "b", c=pl.col("z3") == "c")
    matrix = X.cast(pl.Float64).to_numpy()
    labels = CLIENTS["enrolled"].to_numpy().astype(np.int8)
    return logistic_fit(Blocks.of_arrays(matrix, labels), ["z1", "z2", "z3[b]", "z3[c]"])


def by_parquet(tmp_path: Path) -> LogisticFit:
    path = tmp_path / "clients.parquet"
    CLIENTS.write_parquet(path)
    return table_model(Table(path), "z1 + z2 + z3").logistic()


def by_csv(tmp_path: Path) -> LogisticFit:
    path = tmp_path / "clients.csv"
    CLIENTS.write_csv(path)
    return table_model(Table(path), "z1 + z2 + z3").logistic()


def by_parts(tmp_path: Path) -> LogisticFit:
    for k, start in enumerate(range(0, 200, 37)):
        CLIENTS.slice(start, 37).write_parquet(tmp_path / f"part-{k}.parquet")
    return table_model(Table(tmp_path), ".").logistic()


@pytest.mark.parametrize("fitted", [by_arrays, by_parquet, by_csv, by_parts])
def test_every_way_in_gives_rs_numbers(fitted: Any, tmp_path: Path) -> None:
    fit: LogisticFit = fitted(tmp_path)
    assert fit.names == ("z1", "z2", "z3[b]", "z3[c]")
    expected = [R["coef"][name] for name in R_ORDER]
    np.testing.assert_allclose(coefficients(fit), expected, rtol=1e-12)
    errors = [R["se"][name] for name in R_ORDER]
    np.testing.assert_allclose(fit.standard_errors, errors, rtol=5e-9)
    assert fit.log_likelihood == pytest.approx(R["loglik"], rel=1e-13)
    assert (fit.rows, fit.selected, fit.total_weight) == (200, R["n_enrolled"], 200.0)
    columns = CLIENTS.select("z1", "z2", b=pl.col("z3") == "b", c=pl.col("z3") == "c").cast(
        pl.Float64
    )
    prob = fit.prob(columns.to_numpy().T)
    np.testing.assert_allclose(prob, FITTED["p"].to_numpy(), rtol=1e-12)
    Z = np.column_stack([columns.to_numpy(), np.ones(200)])
    p = FITTED["p"].to_numpy()
    information = (Z * (p * (1.0 - p))[:, None]).T @ Z  # at R's own probabilities
    np.testing.assert_allclose(fit.covariance @ information, np.eye(5), atol=1e-8)


# --- an independent implementation


def some_people(seed: int, n: int) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    age, os_, flag = (
        rng.normal(40, 9, n),
        rng.choice(["ios", "web", "droid"], n),
        rng.random(n) < 0.3,
    )
    odds = 0.04 * (age - 40) - 0.6 * (os_ == "ios") + 0.5 * flag - 0.8
    return pl.DataFrame(
        {
            "unit_id": np.arange(n),
            "age": age,
            "os": os_,
            "flag": flag,
            "count": rng.integers(1, 5, n),
            "enrolled": rng.random(n) < 1.0 / (1.0 + np.exp(-odds)),
        }
    )


def by_hand(frame: pl.DataFrame) -> FloatArray:
    """Return the columns of age*os + flag + age**2: droid is the first level."""
    age = frame["age"].to_numpy()
    ios, web = ((frame["os"] == level).to_numpy().astype(float) for level in ("ios", "web"))
    flag = frame["flag"].to_numpy().astype(float)
    return np.column_stack([age, ios, web, age * ios, age * web, flag, age**2])


@pytest.mark.parametrize("kind", ["parquet", "csv", "parts"])
@pytest.mark.parametrize("weight", [None, "count"])
@pytest.mark.parametrize("l2", [0.0, 0.7])
def test_tables_equal_newton_in_long_double(
    tmp_path: Path, kind: str, weight: str | None, l2: float
) -> None:
    frame = some_people(1, 4000)
    path = tmp_path / f"people.{kind}"
    if kind == "csv":
        frame.write_csv(path)
    elif kind == "parquet":
        frame.write_parquet(path)
    else:
        path = tmp_path
        for k in range(3):
            frame.slice(1500 * k, 1500).write_parquet(path / f"{k}.parquet")
    settings = TableSettings(estimator=Newton(l2))
    model = table_model(Table(path), "age*os + flag + age**2", weight=weight, settings=settings)
    assert model.logistic().names == (
        "age", "os[ios]", "os[web]", "age:os[ios]", "age:os[web]", "flag", "age**2"
    )  # fmt: skip
    y = frame["enrolled"].to_numpy().astype(float)
    w = None if weight is None else frame["count"].to_numpy().astype(float)
    beta, covariance = newton_in_long_double(by_hand(frame), y, w, l2)
    np.testing.assert_allclose(coefficients(model.logistic()), beta, rtol=1e-9)
    errors = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(model.logistic().standard_errors, errors, rtol=1e-8)
    size = np.outer(errors, errors)
    np.testing.assert_allclose(model.logistic().covariance / size, covariance / size, atol=1e-8)
    odds = by_hand(frame) @ beta[:-1] + beta[-1]
    prob, kept = model.prob(frame)
    assert kept is None
    np.testing.assert_allclose(prob, 1.0 / (1.0 + np.exp(-odds)), rtol=1e-10)
    w = np.ones(len(y)) if w is None else w
    assert model.logistic().log_likelihood == pytest.approx(
        w @ (y * odds - np.log1p(np.exp(odds))), rel=1e-11
    )
    assert model.logistic().total_weight == w.sum()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), q=st.integers(1, 4), l2=st.sampled_from([0.0, 0.01, 3.0]))
def test_arrays_equal_newton_in_long_double(seed: int, q: int, l2: float) -> None:
    X, y = random_rows(seed, q=q)
    w = np.random.default_rng(seed).uniform(0.1, 3.0, len(y))
    fit = logistic_fit(Blocks.of_arrays(X, y, w), [str(j) for j in range(q)], l2=l2).checked()
    beta, covariance = newton_in_long_double(X, y.astype(float), w, l2)
    np.testing.assert_allclose(coefficients(fit), beta, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(fit.covariance, covariance, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("l2", [0.0, 0.5])
def test_standard_errors_equal_those_of_a_differentiated_likelihood(l2: float) -> None:
    X, y = random_rows(8)
    w = np.random.default_rng(8).uniform(0.5, 2.0, len(y))
    fit = logistic_fit(Blocks.of_arrays(X, y, w), ["a", "b", "c"], l2=l2).checked()
    Z = np.column_stack([X, np.ones(len(X))]).astype(np.longdouble)

    def loss(beta: FloatArray) -> np.longdouble:
        odds = Z @ beta
        total: np.longdouble = (
            w @ (np.log1p(np.exp(odds)) - y * odds) + l2 / 2 * beta[:-1] @ beta[:-1]
        )
        return total

    h, at = np.longdouble(1e-4), coefficients(fit).astype(np.longdouble)
    units = h * np.eye(4, dtype=np.longdouble)
    second = np.array(
        [
            [
                (loss(at + a + b) - loss(at + a - b) - loss(at - a + b) + loss(at - a - b))
                / (4 * h * h)
                for a in units
            ]
            for b in units
        ]
    ).astype(np.float64)
    np.testing.assert_allclose(fit.covariance, np.linalg.inv(second), rtol=1e-6)


# --- what must not matter


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    edges=st.lists(st.integers(0, 300), max_size=8),
    weighted=st.booleans(),
)
def test_how_rows_are_split_does_not_matter(seed: int, edges: list[int], weighted: bool) -> None:
    X, y = random_rows(seed)
    w = np.random.default_rng(seed).uniform(0.1, 3.0, 300) if weighted else None
    whole = logistic_fit(in_blocks(X, y, [], w), ["a", "b", "c"])
    split = logistic_fit(in_blocks(X, y, edges, w), ["a", "b", "c"])
    assert_same_fit(whole, split, 1e-12)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    centre=st.lists(st.floats(-5.0, 5.0), min_size=3, max_size=3),
    scale=st.lists(st.floats(0.01, 100.0), min_size=3, max_size=3),
    l2=st.sampled_from([0.0, 1.0]),
)
def test_the_frame_does_not_move_the_result(
    seed: int, centre: list[float], scale: list[float], l2: float
) -> None:
    X, y = random_rows(seed)
    frame = Frame(np.array(centre), np.array(scale))
    inside = frame.standard(X.T.copy())
    moved = logistic_fit(
        Blocks.of([Block(inside, y, np.empty(0))]), list("abc"), frame=frame, l2=l2
    )
    assert_same_fit(moved, logistic_fit(Blocks.of_arrays(X, y), list("abc"), l2=l2), 1e-9)


def test_doubled_rows_equal_doubled_weights() -> None:
    X, y = random_rows(2)
    once = logistic_fit(Blocks.of_arrays(X, y), list("abc"))
    weights = logistic_fit(Blocks.of_arrays(X, y, np.full(300, 2.0)), list("abc"))
    rows = logistic_fit(Blocks.of_arrays(np.tile(X, (2, 1)), np.tile(y, 2)), list("abc"))
    for twice in (weights, rows):
        np.testing.assert_allclose(coefficients(twice), coefficients(once), rtol=1e-11)
        np.testing.assert_allclose(2.0 * twice.covariance, once.covariance, rtol=1e-9)
        assert twice.log_likelihood == pytest.approx(2.0 * once.log_likelihood, rel=1e-12)
    assert (weights.rows, rows.rows) == (300, 600)
    assert weights.total_weight == rows.total_weight == 600.0


def test_rows_of_weight_zero_are_not_there() -> None:
    X, y = random_rows(3)
    w = np.where(np.arange(300) % 3 == 0, 0.0, 1.0)
    some = logistic_fit(Blocks.of_arrays(X, y, w), list("abc"))
    kept = logistic_fit(Blocks.of_arrays(X[w > 0], y[w > 0]), list("abc"))
    np.testing.assert_allclose(coefficients(some), coefficients(kept), rtol=1e-11)
    np.testing.assert_allclose(some.covariance, kept.covariance, rtol=1e-9)


def test_a_warm_start_gives_the_same_answer_in_fewer_passes() -> None:
    X, y = random_rows(4, n=5000)
    blocks = Blocks.of_arrays(X, y)
    cold = logistic_fit(blocks, list("abc"))
    warm = logistic_fit(blocks, list("abc"), start=coefficients(cold))
    assert_same_fit(warm, cold, 1e-11)
    assert warm.passes == 1 < cold.passes
    near = logistic_fit(blocks, list("abc"), start=coefficients(cold) + 0.01)
    assert_same_fit(near, cold, 1e-11)
    assert near.passes < cold.passes


@pytest.mark.parametrize(
    "start",
    [[0.0, 0.0, 0.0, 40.0], [0.0, 0.0, 0.0, -800.0], [800.0, 0.0, 0.0, 0.0], [1e6, -1e6, 1e6, 1e6]],
)
def test_a_start_however_far_off_gives_the_same_answer(start: list[float]) -> None:
    """Where every probability is 0 or 1 the curvature is 0, and says nothing about columns."""
    X, y = random_rows(5)
    blocks = Blocks.of_arrays(X, y)
    far = logistic_fit(blocks, list("abc"), start=np.array(start)).checked()
    assert_same_fit(far, logistic_fit(blocks, list("abc")), 1e-10)


# --- columns that add nothing


def test_constant_and_collinear_columns_are_named_and_the_rest_is_the_reduced_fit() -> None:
    X, y = random_rows(6)
    extra = np.column_stack(
        [X[:, 0], np.full(300, 7.0), X[:, 1], 2.0 * X[:, 0] - X[:, 1] + 3.0, X[:, 2], X[:, 2]]
    )
    fit = logistic_fit(Blocks.of_arrays(extra, y), ["a", "k", "b", "ab", "c", "c2"]).checked()
    assert (fit.constant, fit.collinear, fit.dropped) == (("k",), ("ab", "c2"), ("k", "ab", "c2"))
    reduced = logistic_fit(Blocks.of_arrays(X, y), ["a", "b", "c"])
    kept = [0, 2, 4, 6]
    np.testing.assert_allclose(coefficients(fit)[kept], coefficients(reduced), rtol=1e-10)
    np.testing.assert_allclose(fit.covariance[np.ix_(kept, kept)], reduced.covariance, rtol=1e-8)
    assert fit.log_likelihood == pytest.approx(reduced.log_likelihood, rel=1e-13)
    assert np.isnan(fit.standard_errors[[1, 3, 5]]).all()
    assert (fit.coefficients[[1, 3, 5]] == 0.0).all()
    assert np.count_nonzero(fit.covariance[[1, 3, 5]]) == 0
    start = np.array([0.1, 5.0, 0.2, -3.0, 0.3, 0.4, 0.5])  # also on columns that are left out
    again = logistic_fit(Blocks.of_arrays(extra, y), fit.names, start=start)
    assert_same_fit(again, fit, 1e-10)


def test_a_table_names_them_too(tmp_path: Path) -> None:
    frame = some_people(2, 900).with_columns(
        half=pl.col("age") / 2.0, same=pl.lit(3.0), ios=pl.col("os") == "ios"
    )
    frame.write_parquet(tmp_path / "people.parquet")
    table = Table(tmp_path / "people.parquet")
    full = table_model(table, "age + same + half + os + ios").logistic()
    assert (full.constant, full.collinear) == (("same",), ("half", "ios"))
    reduced = table_model(table, "age + os").logistic()
    kept = [k for k, name in enumerate(full.names) if name not in full.dropped]
    np.testing.assert_allclose(full.coefficients[kept], reduced.coefficients, rtol=1e-10)
    assert full.intercept == pytest.approx(reduced.intercept, rel=1e-10)


def test_only_constant_columns_leave_the_rate() -> None:
    y = np.array([1, 0, 0, 0, 1], np.int8)
    fit = logistic_fit(Blocks.of_arrays(np.full((5, 1), 3.0), y), ["k"]).checked()
    assert fit.constant == ("k",)
    assert fit.intercept == pytest.approx(np.log(2 / 3), rel=1e-12)
    assert fit.standard_errors[1] == pytest.approx(np.sqrt(1 / 2 + 1 / 3), rel=1e-11)


# --- units


def test_columns_far_from_zero_and_of_tiny_scale(tmp_path: Path) -> None:
    X, y = random_rows(7, n=2000, q=2)
    frame = pl.DataFrame({"far": 1e9 + X[:, 0], "tiny": 1e-6 * X[:, 1], "enrolled": y == 1})
    frame.write_parquet(tmp_path / "people.parquet")
    fit = table_model(Table(tmp_path / "people.parquet"), "far + tiny").logistic()
    shifted = frame["far"].to_numpy() - 1e9  # exact
    beta, covariance = newton_in_long_double(np.column_stack([shifted, X[:, 1]]), y.astype(float))
    np.testing.assert_allclose(fit.coefficients * [1.0, 1e-6], beta[:2], rtol=1e-10)
    errors = np.sqrt(np.diag(covariance))[:2]
    np.testing.assert_allclose(fit.standard_errors[:2] * [1.0, 1e-6], errors, rtol=1e-7)
    assert fit.log_likelihood == pytest.approx(
        logistic_fit(
            Blocks.of_arrays(np.column_stack([shifted, X[:, 1]]), y), ["a", "b"]
        ).log_likelihood,
        rel=1e-11,
    )
    odds = np.column_stack([shifted, X[:, 1]]) @ beta[:2] + beta[2]
    prob = fit.prob(frame.select("far", "tiny").to_numpy().T)
    np.testing.assert_allclose(prob, 1.0 / (1.0 + np.exp(-odds)), rtol=1e-6)  # 1e9 costs 9 digits


@pytest.mark.parametrize("scale", [1e-12, 1e-7, 1e-3, 1e3, 1e9])
def test_raw_columns_of_any_scale_reach_the_same_maximum(scale: float) -> None:
    X, y = random_rows(9, q=2)
    plain = logistic_fit(Blocks.of_arrays(X, y), ["a", "b"])
    scaled = logistic_fit(Blocks.of_arrays(scale * X, y), ["a", "b"]).checked()
    np.testing.assert_allclose(scale * scaled.coefficients, plain.coefficients, rtol=1e-10)
    assert scaled.intercept == pytest.approx(plain.intercept, rel=1e-10)


# --- the sample the fit on all rows starts from


def written_people(tmp_path: Path, frame: pl.DataFrame) -> Table:
    frame.write_parquet(tmp_path / "people.parquet")
    return Table(tmp_path / "people.parquet")


def test_a_start_from_a_sample_changes_passes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = written_people(tmp_path, some_people(3, 20_000))
    whole = CodedTable.of(table, "age*os + flag", weight="count")
    assert whole.start is None
    monkeypatch.setattr("fedipw.selection.coded.SAMPLE_ROWS", 2_000)
    part = CodedTable.of(table, "age*os + flag", weight="count")
    assert part.start is not None
    started, plain = part.model().logistic(), whole.model().logistic()
    assert_same_fit(started, plain, 1e-10)
    assert started.passes < plain.passes


@pytest.mark.parametrize("order", ["enrolled", "os", "age"])
def test_a_sample_unlike_the_table_is_only_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Sorted tables: runs of rows with one label, one level or a narrow range."""
    frame = some_people(4, 6_000)
    plain = table_model(written_people(tmp_path, frame), "age*os + flag").logistic()
    table = written_people(tmp_path, frame.sort(order))
    for rows in (8, 40, 400):
        monkeypatch.setattr("fedipw.selection.coded.SAMPLE_ROWS", rows)
        assert_same_fit(table_model(Table(table), "age*os + flag").logistic(), plain, 1e-9)


# --- what cannot be fitted


@pytest.mark.parametrize(("label", "kind"), [(1, "selected"), (0, "not selected")])
@pytest.mark.parametrize("start", [None, np.zeros(4)])
def test_one_kind_of_rows_is_refused(label: int, kind: str, start: FloatArray | None) -> None:
    X, _ = random_rows(0)
    y = np.full(300, label, np.int8)
    with pytest.raises(InputError, match=f"All 300 rows are {kind}: a probability .* needs both"):
        logistic_fit(Blocks.of_arrays(X, y), list("abc"), start=start)


def test_one_kind_of_rows_with_weight_is_refused(tmp_path: Path) -> None:
    X, y = random_rows(0)
    with pytest.raises(InputError, match="rows are selected"):
        logistic_fit(Blocks.of_arrays(X, y, y.astype(float)), list("abc"))
    frame = some_people(0, 50).with_columns(none=pl.lit(0.0), text=pl.lit("x"), odd=pl.lit(-1.0))
    table = written_people(tmp_path, frame)
    with pytest.raises(InputError, match="All 50 rows are not selected"):
        table_model(table, "age", weight="none")
    for name in ("text", "odd"):
        with pytest.raises(InputError, match=f"weights in '{name}' must be finite and not neg"):
            table_model(table, "age", weight=name)


@pytest.mark.parametrize("l2", [-1.0, float("nan")])
def test_a_penalty_below_zero_is_refused(l2: float) -> None:
    X, y = random_rows(0)
    with pytest.raises(InputError, match="l2 must be 0 or more"):
        logistic_fit(Blocks.of_arrays(X, y), list("abc"), l2=l2)


def test_too_few_steps_are_an_error_when_checked() -> None:
    X, y = random_rows(0)
    fit = logistic_fit(Blocks.of_arrays(X, y), list("abc"), max_iter=1)
    assert not fit.converged
    assert not fit.separating
    with pytest.raises(NotConvergedError, match="stopped after 1 iterations"):
        fit.checked()


def test_rows_left_out_are_counted_and_the_rest_is_fitted(tmp_path: Path) -> None:
    frame = some_people(5, 800).with_columns(
        age=pl.when(pl.int_range(pl.len()) % 10 == 3).then(None).otherwise(pl.col("age"))
    )
    table = written_people(tmp_path, frame)
    with pytest.raises(InputError, match=r"'age' is missing in 80 of 800 rows"):
        table_model(table, "age + os")
    model: StageModel = table_model(table, "age + os", settings=TableSettings(missing=Missing.DROP))
    complete = frame.drop_nulls()
    assert (model.left_out, model.logistic().rows) == (80, complete.height)
    table = written_people(tmp_path, complete)
    assert_same_fit(model.logistic(), table_model(Table(table), "age + os").logistic(), 1e-10)


def test_labels_must_be_true_or_false_and_there(tmp_path: Path) -> None:
    frame = some_people(6, 30).with_columns(
        some=pl.when(pl.col("age") > 30).then(pl.col("flag")).otherwise(None)
    )
    table = written_people(tmp_path, frame)
    with pytest.raises(InputError, match="'count' must be true or false in every row, not Int64"):
        table_model(table, "age", label="count")
    with pytest.raises(InputError, match=r"'some' must be true or false in every row; \d+ are mis"):
        table_model(table, "age", label="some")
    with pytest.raises(InputError, match="has no column 'joined'"):
        table_model(table, "age", label="joined")
    assert table_model(table, "age + os", label="flag").logistic().selected == frame["flag"].sum()


@pytest.mark.parametrize("unit", [1e-9, 1e-8, 1.0, 1e8])
def test_the_unit_of_a_column_without_a_frame_does_not_matter(unit: float) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=300)
    overlapping = (x + 0.1 * rng.normal(size=300) > 0).astype(np.int8)
    fit = logistic_fit(Blocks.of_arrays((x * unit)[:, None], overlapping), ["a"])
    plain = logistic_fit(Blocks.of_arrays(x[:, None], overlapping), ["a"])
    assert fit.converged
    np.testing.assert_allclose(fit.coefficients * unit, plain.coefficients, rtol=1e-9)
    parted = (x > 0).astype(np.int8)
    assert logistic_fit(Blocks.of_arrays((x * unit)[:, None], parted), ["a"]).separating == ("a",)
