"""``fedipw weights`` against a slow reference that reads the same tables by the book."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.command import Files, fedipw
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import Participation, ParticipationSettings, panel
from fedipw.selection.steps import Formulas, participation_steps
from fedipw.tables.ledger import Round
from fedipw.tables.population import Population
from fedipw.weighting.methods import method_named
from fedipw.weighting.weigher import StagedEnrollment, Weigher
from worlds import Tables, World, drawn

Array = np.ndarray[Any, Any]
CLOSE = 1e-8


def sigmoid(odds: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-odds))


def world(seed: int = 0, *, category: bool = False, **options: Any) -> Tables:
    """Return a world in which z2 is -1 or 1, with a category or without."""
    odds = 0.2 + 0.7 * pl.col("z1") + 0.4 * pl.col("z2").sign()
    given = World(
        seed=seed, ids="u{}", covariates=("z1", "z2", "os") if category else ("z1", "z2"),
        enrollment=odds, **{"rounds": 13, **options},
    )  # fmt: skip
    made = drawn(given)
    return replace(made, people=made.people.with_columns(pl.col("z2").sign()))


def weighed(
    given: Tables, *options: object, targets: dict[str, float] | None = None
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Return the command's table of a world and its summary."""
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        given.write(where, targets=targets)
        files = Files(given.people, given.rounds, where=where)
        return files.weighed(*options, source="population" if targets is None else "targets")


# The reference: plain loops, and maximum likelihood by iteratively reweighted least squares.


def maximum(X: Array, y: Array, weights: Array | float = 1.0) -> Array:
    """Return the coefficients of logistic regression, intercept first, by weights of the rows.

    A column that follows from those before it has coefficient 0.
    """
    X, kept = np.column_stack([np.ones(len(X)), X]), [0]
    for j in range(1, X.shape[1]):
        if np.linalg.matrix_rank(X[:, [*kept, j]]) > len(kept):
            kept.append(j)
    A, beta = X[:, kept], np.zeros(len(kept))
    for _ in range(60):
        p = sigmoid(A @ beta)
        step = np.linalg.solve((A.T * (weights * p * (1 - p))) @ A, A.T @ (weights * (y - p)))
        beta += step
        if np.abs(step).max() < 1e-11:
            return np.bincount(kept, weights=beta, minlength=X.shape[1])
    raise AssertionError("no maximum")


def prob(beta: Array, X: Array) -> Array:
    return sigmoid(beta[0] + X @ beta[1:])


def static(frame: pl.DataFrame) -> Array:
    """Return z1, z2 and all levels of os but the first, (n, q)."""
    dummies = [pl.col("os") == level for level in ("ios", "web") if "os" in frame.columns]
    return frame.select("z1", "z2", *(d.cast(float).alias(str(d)) for d in dummies)).to_numpy()


def past_of(flags: list[dict[str, bool]], index: int, unit: str) -> list[float]:
    """Return last flag, smoothed rate and rounds since the last, of a client before a round."""
    enrolled = [k for k, round_ in enumerate(flags, 1) if unit in round_]
    before = [k for k in enrolled if k < index]
    yes = [k for k in before if flags[k - 1][unit]]
    last = max(yes, default=min(enrolled) - 1)
    return [float(index - 1 in yes), (len(yes) + 1) / (len(before) + 2), float(index - last)]


def past_columns(given: Tables, flag: str, index: int) -> Array:
    flags = [dict(zip(t["unit_id"], t[flag], strict=True)) for t in given.rounds]
    return np.array([past_of(flags, index, u) for u in given.rounds[index - 1]["unit_id"]])


def covariates(given: Tables, label: str, *, history: bool, day: float = 24.0) -> Iterator[Array]:
    """Yield a step's covariates in each round, (n, q)."""
    known = given.people.drop("enrolled")
    for k, table in enumerate(given.rounds, 1):
        parts = [static(table.select("unit_id").join(known, on="unit_id", maintain_order="left"))]
        if label == "replied":
            parts.append(table["x"].cast(float).fill_null(np.nan).to_numpy()[:, None])
        if history:
            flags = ["available", "replied"] if label == "available" else ["replied"]
            parts += [past_columns(given, flag, k) for flag in flags]
            angle = 2 * np.pi * k / day
            parts.append(np.tile([np.sin(angle), np.cos(angle)], (table.height, 1)))
        yield np.hstack(parts)


def step_probs(
    X: list[Array],
    y: list[Array],
    may: list[Array],
    *,
    fit: str,
    every: int,
    last: int | None,
    decay: float = 1.0,
) -> Iterator[tuple[Array, str]]:
    """Yield everyone's probability of one step in each round, and where it came from."""
    beta = None
    for r, now in enumerate(X):
        start = 0 if last is None else max(0, r - last)
        seen = {"past": range(start, r), "pooled": range(len(X)), "same-round": [r]}[fit]
        age = {k: decay ** (r - 1 - k) for k in seen}
        rows = sum(age[k] * may[k].sum() for k in seen)
        passed = sum(age[k] * y[k][may[k]].sum() for k in seen)
        if passed == 0:
            yield np.full(len(now), y[r][may[r]].mean()), "reply rate of this round"
        elif fit != "pooled" and min(passed, rows - passed) <= 10 * (now.shape[1] + 1):
            which = "past rounds" if fit == "past" else "this round"
            yield np.full(len(now), passed / rows), f"reply rate of {which}"
        else:
            if beta is None or fit != "past" or r <= every or r % every == 0:
                beta = maximum(
                    np.vstack([X[k][may[k]] for k in seen]),
                    np.concatenate([y[k][may[k]] for k in seen]),
                    np.concatenate([np.full(may[k].sum(), age[k]) for k in seen]),
                )
            yield prob(beta, now), "model"


def participation(
    given: Tables,
    *,
    fit: str = "past",
    every: int = 10,
    last: int | None = None,
    history: bool = False,
    decay: float = 1.0,
) -> list[Array]:
    """Return (P5) of every row of every round, whether it replied or not."""
    names, rounds = given.rounds[0].columns, given.rounds
    told = "available" in names
    among = "invited" if "invite_prob" in names else "available" if told else None
    steps: list[tuple[str, str | None]] = [("available", None)] if told else []
    steps.append(("replied", among))
    out = [np.ones(t.height) for t in rounds]
    for label, could in steps:
        X = list(covariates(given, label, history=history))
        y = [t[label].to_numpy() for t in rounds]
        may = [np.ones(t.height, bool) if could is None else t[could].to_numpy() for t in rounds]
        found = step_probs(X, y, may, fit=fit, every=every, last=last, decay=decay)
        out = [a * b for a, (b, _) in zip(out, found, strict=True)]
    if "invite_prob" in names:
        known = [t["invite_prob"].fill_null(np.nan).to_numpy() for t in rounds]
        out = [a * b for a, b in zip(out, known, strict=True)]
    return out


def enrollment(given: Tables, present: Array | None = None) -> Array:
    """Return P(enrolled) of the enrolled, fitted with those enrolled who are ``present``, (n,)."""
    Z, labels = static(given.people), given.people["enrolled"].to_numpy().copy()
    inside = np.flatnonzero(labels)
    labels[inside] = True if present is None else present
    return prob(maximum(Z, labels.astype(float)), Z[inside])


def expected(given: Tables, part: list[Array]) -> pl.DataFrame:
    """Return the reference's table with the weights of four schemes."""
    size, inside = given.people.height, given.inside
    by_id = pl.DataFrame({"unit_id": inside["unit_id"], "enrollment_prob": enrollment(given)})
    tables = []
    for k, (table, p) in enumerate(zip(given.rounds, part, strict=True), 1):
        made = table.select("unit_id", "replied", participation_prob=pl.Series(p))
        made = made.filter("replied").join(by_id, on="unit_id", maintain_order="left")
        raw = 1 / (made["enrollment_prob"] * made["participation_prob"])
        weights = {
            "fedipw": raw / size,
            "fedipw-hajek": raw / raw.sum(),
            "participation-only": 1 / (inside.height * made["participation_prob"]),
            "fedavg": pl.Series([1 / max(1, made.height)] * made.height, dtype=pl.Float64),
        }
        tables.append(made.drop("replied").with_columns(pl.lit(k).alias("round"), **weights))
    return pl.concat(tables)


def agree(got: pl.DataFrame, wanted: pl.DataFrame, *names: str) -> None:
    assert got["unit_id"].to_list() == wanted["unit_id"].to_list()
    assert got["round"].to_list() == wanted["round"].to_list()
    for name in names or ("enrollment_prob", "participation_prob"):
        np.testing.assert_allclose(got[name], wanted[name], rtol=CLOSE, err_msg=name)
    product = got["enrollment_prob"] * got["participation_prob"]
    np.testing.assert_allclose(got["inclusion_prob"], product, rtol=1e-14)


@pytest.mark.parametrize(
    "steps", [(), ("available",), ("invite_prob",), ("available", "invite_prob")]
)
@pytest.mark.parametrize(
    ("options", "how"),
    [
        ((), {}),
        (("--refit-every", 3), {"every": 3}),
        (("--refit-every", 1, "--window", 4), {"every": 1, "last": 4}),
        (("--refit-every", 1, "--decay", 0.9), {"every": 1, "decay": 0.9}),
        (("--participation-fit", "pooled"), {"fit": "pooled"}),
        (("--participation-fit", "same-round"), {"fit": "same-round"}),
        (("--history",), {"history": True}),
        (("--history", "--participation-fit", "pooled"), {"history": True, "fit": "pooled"}),
    ],
)
def test_probabilities_and_weights_are_those_of_the_reference(
    steps: tuple[str, ...], options: tuple[object, ...], how: dict[str, Any]
) -> None:
    given = world(steps=steps, category=not steps)
    wanted = expected(given, participation(given, **how))
    got, summary = weighed(given, *options, "--scheme", "fedipw")
    agree(got, wanted)
    np.testing.assert_allclose(got["weight"], wanted["fedipw"], rtol=CLOSE)
    assert summary["replies"] == summary["weighed"] == wanted.height
    assert summary["sources"]["model"] >= 10


def test_a_clock_by_time_is_that_of_own_columns() -> None:
    """Hours of opened_at, seven apart, against columns of the ledger that say the same."""
    given = world(hours=7)
    first = given.rounds[0]["opened_at"][0]
    own = []
    for table in given.rounds:
        moment = table["opened_at"][0]
        turn = 2 * np.pi * (moment.hour + moment.minute / 60) / 24
        days = (moment - first) / timedelta(hours=24)
        own.append(table.with_columns(
            my_sin=pl.lit(np.sin(turn)), my_cos=pl.lit(np.cos(turn)), days=pl.lit(days)
        ))  # fmt: skip
    options: tuple[object, ...] = ("--refit-every", 1, "--scheme", "fedipw", "--participation")
    by_clock, _ = weighed(
        given, *options, "z1 + x + hour_sin + z1:hour_cos + elapsed", "--day-hours", 24
    )
    by_hand, _ = weighed(replace(given, rounds=own), *options, "z1 + x + my_sin + z1:my_cos + days")
    agree(by_clock, by_hand, "participation_prob", "weight")
    by_round, _ = weighed(given, *options, "z1 + x + hour_sin + z1:hour_cos + elapsed")
    assert np.abs(by_clock["weight"] / by_round["weight"] - 1).max() > 0.01


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--decay", 0), "decay must lie in (0, 1], not 0.0"),
        (("--decay", 0.9, "--participation-fit", "pooled"), "the pooled fit counts all"),
        (("--decay", 0.9, "--participation-fit", "same-round"), "the same-round fit counts all"),
        (("--decay", 0.9, "--classifier", "boosting"), "a classifier or folds take rows"),
        (("--decay", 0.9, "--folds", 3), "a classifier or folds take rows"),
        (("--day-hours", 24, "--participation", "hour_sin"), "Round 1 has no 'opened_at'"),
        (("--day-hours", 0), "A cycle has 0.001 to 1e+06 hours, not 0.0"),
    ],
)
def test_combinations_without_meaning_are_refused(
    tmp_path: Path, options: tuple[object, ...], words: str
) -> None:
    given = world(rounds=2)
    given.write(tmp_path)
    for command in ("weights", "audit"):
        out = tmp_path / ("w.parquet" if command == "weights" else "report.html")
        code, _, told = fedipw(
            command, "--population", tmp_path / "people.parquet", "--rounds", tmp_path / "rounds",
            "--out", out, *options,
        )  # fmt: skip
        assert code == 2
        assert words in " ".join(told.split())
        assert not out.exists()


@pytest.mark.parametrize("scheme", ["fedipw", "fedipw-hajek", "participation-only", "fedavg"])
def test_each_scheme_weighs_by_its_formula(scheme: str) -> None:
    given = world(1, steps=("available", "invite_prob"), rounds=6)
    wanted = expected(given, participation(given))
    got, summary = weighed(given, "--scheme", scheme)
    agree(got, wanted)
    assert summary["method"] == scheme
    np.testing.assert_allclose(got["weight"], wanted[scheme], rtol=CLOSE)


def test_constant_rates_until_ten_of_each_kind_per_coefficient_and_they_are_recorded() -> None:
    given = world(2, size=120, rounds=9)
    X, may = list(covariates(given, "replied", history=False)), given.rounds
    y = [t["replied"].to_numpy() for t in given.rounds]
    all_may = [np.ones(t.height, bool) for t in may]
    found = list(step_probs(X, y, all_may, fit="past", every=10, last=None))
    got, summary = weighed(given)
    agree(got, expected(given, [p for p, _ in found]))
    kinds = [kind for _, kind in found]
    assert kinds[:2] == ["reply rate of this round", "reply rate of past rounds"]
    assert summary["sources"] == {kind: kinds.count(kind) for kind in kinds}
    first = got.filter(pl.col("round") == 1)["participation_prob"]
    assert set(first) == {y[0].mean()}


def test_rounds_nobody_replied_in_are_skipped_and_recorded_but_count_as_past() -> None:
    given = world(3, rounds=7)
    for k in (1, 4):
        given = given.changed(k, replied=pl.lit(value=False))
    got, summary = weighed(given, "--refit-every", 1)
    agree(got, expected(given, participation(given, every=1)))
    assert summary["skipped"] == {"1": "nobody replied", "4": "nobody replied"}
    assert set(got["round"]) == {2, 3, 5, 6, 7}
    assert summary["rounds"] == 7


@pytest.mark.parametrize("fit", ["past", "pooled"])
def test_a_round_in_which_nothing_is_known_of_the_replies_is_skipped_under_drop(fit: str) -> None:
    given = world(4, rounds=6)
    unknown = given.changed(3, x=pl.lit(None, dtype=pl.Float64))
    got, summary = weighed(unknown, "--missing", "drop", "--participation-fit", fit)
    assert summary["skipped"] == {"3": "no reply has all the values needed"}
    lost = int(given.rounds[2]["replied"].sum())
    assert summary["left_out"] == summary["replies"] - summary["weighed"] == lost
    without = [t for k, t in enumerate(unknown.rounds, 1) if k != 3]
    part = participation(Tables(given.people, without), fit=fit)
    wanted = expected(Tables(given.people, without), part)["participation_prob"]
    np.testing.assert_allclose(got["participation_prob"], wanted, rtol=CLOSE)


@settings(max_examples=8)
@given(data=st.data())
def test_under_past_a_round_is_weighed_without_its_own_replies_or_later_ones(
    data: st.DataObject,
) -> None:
    steps = data.draw(st.sampled_from([(), ("available", "invite_prob")]))
    index = data.draw(st.integers(2, 5))
    given = world(data.draw(st.integers(0, 99)), rounds=6, steps=steps, size=300)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    # fewer replies, never as many others: the first rounds look at the rate of replies alone
    lost = pl.Series(rng.random(given.rounds[0].height) < 0.5)
    other = given.changed(index, replied=pl.col("replied") & ~lost)
    a, b = (weighed(w, "--history", "--refit-every", 1)[0] for w in (given, other))
    both = a.join(b, on=["unit_id", "round"], suffix="_other")
    moved = (both["participation_prob"] / both["participation_prob_other"] - 1).abs()
    assert moved.filter(both["round"] <= index).max() < 1e-12  # type: ignore[operator]
    assert moved.filter(both["round"] > index).min() > 1e-12  # type: ignore[operator]


# Calibrated enrollment.


def everyone_replies(given: Tables, *indices: int) -> Tables:
    for k in indices:
        given = given.changed(k, replied=pl.col("invited"))
    return given


CALIBRATED = ("quadratic", "entropy", "linear", "logit", "inverse-logit", "noise-aware")


@pytest.mark.parametrize("known", ["population", "targets"])
@pytest.mark.parametrize("scheme", [*(f"calibrated-{d}" for d in CALIBRATED), "efficient"])
def test_calibrated_enrollment_meets_the_population_means(scheme: str, known: str) -> None:
    given = everyone_replies(world(5, rounds=5, category=True), 5)
    Z = pl.DataFrame(static(given.people), schema=["z1", "z2", "os[ios]", "os[web]"])
    means, size = {n: float(Z[n].mean() or 0.0) for n in Z.columns}, given.people.height  # type: ignore[arg-type]
    options: tuple[object, ...] = ("--scheme", scheme)
    if known == "population":
        got, _ = weighed(given, *options)
        np.testing.assert_allclose(
            got["participation_prob"], expected(given, participation(given))["participation_prob"],
            rtol=CLOSE,
        )  # fmt: skip
        assert got["enrollment_prob"].null_count() == 0
    else:
        got, summary = weighed(given, *options, "--population-size", size, targets=means)
        assert got["enrollment_prob"].null_count() == got["inclusion_prob"].null_count() == len(got)
        assert summary["overlap"] is None
    q = got.filter(pl.col("round") == 5)["enrollment_weight"].to_numpy()
    b = static(given.inside)
    assert len(q) == given.inside.height
    assert q.sum() == pytest.approx(1.0, abs=1e-9)
    np.testing.assert_allclose(q @ b, list(means.values()), atol=1e-8)
    ratio = got["enrollment_weight"] / got["participation_prob"]
    np.testing.assert_allclose(got["weight"], ratio, rtol=1e-12)
    if "inverse-logit" in scheme:  # N q = 1 + exp(-b'lambda)
        logs, ones = np.log(size * q - 1), np.column_stack([np.ones(len(b)), b])
        np.testing.assert_allclose(
            ones @ np.linalg.lstsq(ones, logs, rcond=None)[0], logs, atol=1e-7
        )


def test_efficient_balances_squares_and_products_of_a_population_table() -> None:
    given = everyone_replies(world(6, rounds=3), 3)
    got, _ = weighed(given, "--scheme", "efficient")
    q = got.filter(pl.col("round") == 3)["enrollment_weight"].to_numpy()
    for power, other in ((2, 0), (1, 1)):
        of = [
            f["z1"].to_numpy() ** power * f["z2"].to_numpy() ** other
            for f in (given.people, given.inside)
        ]
        assert q @ of[1] == pytest.approx(of[0].mean(), abs=1e-8)


@pytest.mark.parametrize("scheme", ["greg", "greg-hajek"])
def test_greg_moves_the_weights_of_each_round_to_the_population_means(scheme: str) -> None:
    given = world(7, rounds=4)
    got, summary = weighed(given, "--scheme", scheme)
    wanted, mu = expected(given, participation(given)), static(given.people).mean(axis=0)
    moved = []
    for (index,), plain in wanted.group_by("round", maintain_order=True):
        d = plain["fedipw"].to_numpy()
        rows = plain.select("unit_id").join(given.people, on="unit_id", maintain_order="left")
        b = np.column_stack([np.ones(len(d)), static(rows)])
        move = np.linalg.solve((b.T * d) @ b, np.append(1.0, mu) - d @ b)
        w = d * (1 + b @ move)
        moved.append(w)
        mine = got.filter(pl.col("round") == index)["weight"].to_numpy()
        np.testing.assert_allclose(mine @ b, np.append(1.0, mu), atol=1e-10)
    np.testing.assert_allclose(got["weight"], np.concatenate(moved), rtol=1e-7, atol=1e-10)
    assert summary["negative"] == sum(int((w < 0).sum()) for w in moved)


# The same rounds told in a simulation, and in files.


@pytest.mark.parametrize("history", [False, True])
def test_the_simulators_weigher_gives_the_same_weights(history: bool) -> None:
    """Rows in a panel, rounds without a ledger: early fits leave the same columns out."""
    given = world(8, rounds=9, size=300)
    stage, how = enrollment_stage(Population(given.people)), ParticipationSettings(refit_every=1)
    members, rows = stage.members, np.arange(stage.members.size)
    first = Round(index=1, rows=rows, table=given.rounds[0].select("x"))
    steps = participation_steps(first, members, Formulas(history=history))
    methods = {name: method_named(name) for name in ("fedipw", "participation-only")}
    learner = Participation(members, steps, how, store=panel(how.estimator))
    weigher = Weigher(StagedEnrollment(stage, *methods.values()), learner, methods)
    wanted: dict[str, list[Array]] = {name: [] for name in methods}
    for k, table in enumerate(given.rounds, 1):
        replied = table["replied"].to_numpy()
        weigher.open(Round(index=k, rows=rows, table=table.select("x")))
        for name, found in weigher.weigh(replied).items():
            wanted[name].append(found.weights)
        weigher.close(replied)
    for name, weights in wanted.items():
        options = ("--history",) if history else ()
        got, _ = weighed(given, "--scheme", name, "--refit-every", 1, *options)
        np.testing.assert_allclose(got["weight"], np.concatenate(weights), rtol=CLOSE)


# Enrollment that changes.


def changing(given: Tables, kind: str) -> tuple[Tables, list[Array]]:
    """Return a world in which some join in round 4 and others leave in round 9; who is present."""
    rounds = len(given.rounds)
    rng, n = np.random.default_rng(9), given.people.height
    late, leaves = rng.random(n) < 0.3, rng.random(n) < 0.3
    day, start = timedelta(days=1), datetime(2024, 3, 1)
    moments: dict[str, list[Any]] = {
        "rounds": list(range(1, rounds + 1)),
        "dates": [date(2024, 3, k) for k in range(1, rounds + 1)],
        "times": [start + k * day for k in range(rounds)],
    }
    at = moments[kind]
    people = given.people.with_columns(
        enrolled_from=pl.Series([at[3] if x else None for x in late]),
        enrolled_until=pl.Series([at[8] if x else None for x in leaves]),
    )
    inside = given.people["enrolled"].to_numpy()
    tables, present = [], []
    for k, table in enumerate(given.rounds, 1):
        here = ~(late & (k < 4)) & ~(leaves & (k >= 9))
        present.append(here[inside])
        kept = table.filter(pl.Series(here[inside]))
        named = kept if kind == "rounds" else kept.with_columns(opened_at=pl.lit(at[k - 1]))
        tables.append(named)
    return Tables(people, tables), present


@pytest.mark.parametrize("kind", ["rounds", "dates", "times"])
def test_a_round_uses_the_enrollment_and_history_of_those_enrolled_then(kind: str) -> None:
    given, present = changing(world(9, rounds=12), kind)
    plain = replace(given, people=given.people.drop("enrolled_from", "enrolled_until"))
    plain = replace(plain, rounds=[t.drop("opened_at", strict=False) for t in given.rounds])
    got, summary = weighed(given, "--history", "--refit-every", 1, "--scheme", "fedipw")
    part = participation(plain, history=True, every=1)
    ids, pieces = plain.inside["unit_id"], []
    for k, (table, p) in enumerate(zip(plain.rounds, part, strict=True), 1):
        fitted = pl.DataFrame({"unit_id": ids, "e": enrollment(plain, present[k - 1])})
        made = table.with_columns(p=pl.Series(p)).filter("replied")
        pieces.append(made.join(fitted, on="unit_id", maintain_order="left"))
    wanted = pl.concat(pieces)
    assert got["unit_id"].to_list() == wanted["unit_id"].to_list()
    np.testing.assert_allclose(got["enrollment_prob"], wanted["e"], rtol=CLOSE)
    np.testing.assert_allclose(got["participation_prob"], wanted["p"], rtol=CLOSE)
    weight = 1 / (given.people.height * wanted["e"] * wanted["p"])
    np.testing.assert_allclose(got["weight"], weight, rtol=CLOSE)
    assert summary["enrollment_fits"] == 3


def test_calibration_is_renewed_when_clients_join_and_leave() -> None:
    given, present = changing(everyone_replies(world(9, rounds=12), 3, 8, 12), "rounds")
    mu, b = static(given.people).mean(axis=0), static(given.inside)
    for options, targets in (
        (("--scheme", "calibrated-entropy"), None),
        (("--scheme", "calibrated-quadratic"), {"z1": float(mu[0]), "z2": float(mu[1])}),
    ):
        got, summary = weighed(given, *options, targets=targets)
        for k in (3, 8, 12):
            q = got.filter(pl.col("round") == k)["enrollment_weight"].to_numpy()
            assert len(q) == present[k - 1].sum()
            assert q.sum() == pytest.approx(1.0, abs=1e-9)
            np.testing.assert_allclose(q @ b[present[k - 1]], mu, atol=1e-8)
        assert summary["enrollment_fits"] == 3


def test_enrollment_that_changes_is_fitted_in_blocks_of_a_large_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedipw.tables.partitions._BLOCK_BYTES", 1)  # 8,192 rows a block
    rng, size = np.random.default_rng(10), 20_000
    z1 = rng.normal(size=size)
    people = pl.DataFrame(
        {
            "unit_id": np.arange(size),
            "z1": z1,
            "z2": rng.normal(size=size),
            "enrolled": rng.random(size) < sigmoid(-4.0 + 0.5 * z1),
        }
    )
    inside = people.filter("enrolled")
    joins = pl.Series(rng.random(size) < 0.5)
    people = people.with_columns(enrolled_from=pl.select(pl.when(joins).then(2)).to_series())
    row = inside.select("unit_id", invited=True, replied=rng.random(inside.height) < 0.5)
    early = row.join(people.filter(~joins), on="unit_id", how="semi", maintain_order="left")
    rounds = [early.with_columns(round=1), row.with_columns(round=2)]
    given = Tables(people, rounds)
    got, _ = weighed(given, "--participation", "z1")
    for k, here in ((1, ~joins.to_numpy()), (2, np.ones(size, bool))):
        Z, labels = people.select("z1", "z2").to_numpy(), people["enrolled"].to_numpy() & here
        fitted = prob(maximum(Z, labels.astype(float)), Z)
        mine = got.filter(pl.col("round") == k)
        np.testing.assert_allclose(
            mine["enrollment_prob"], fitted[mine["unit_id"].to_numpy()], rtol=CLOSE
        )


# Saved models.


@pytest.mark.parametrize("steps", [(), ("available", "invite_prob")])
def test_saved_models_give_the_same_bytes(steps: tuple[str, ...], tmp_path: Path) -> None:
    given = world(11, rounds=6, steps=steps, category=True)
    pooled, _ = weighed(
        given, "--participation-fit", "pooled", "--save-models", tmp_path / "models", "--history"
    )
    names = {"enrollment", "availability", "reply"} if steps else {"enrollment", "participation"}
    assert {p.name for p in (tmp_path / "models").iterdir()} == {f"{n}.json" for n in names}
    again, summary = weighed(given, "--models", tmp_path / "models")
    assert again.equals(pooled)
    assert summary["refits"] == 0


@pytest.mark.parametrize(
    ("steps", "change", "message"),
    [
        ((), {"x": "y"}, "no column 'x'"),
        ((), {"z2": "w"}, "z2"),
        (("available", "invite_prob"), {}, "no saved model of availability"),
    ],
)
def test_saved_models_of_other_columns_are_refused(
    steps: tuple[str, ...], change: dict[str, str], message: str, tmp_path: Path
) -> None:
    options = ("--participation-fit", "pooled", "--save-models", tmp_path / "models")
    weighed(world(12, rounds=4), *options)
    other = world(12, rounds=4, steps=steps)
    Tables(
        other.people.rename(change, strict=False),
        [t.rename(change, strict=False) for t in other.rounds],
    ).write(tmp_path)
    code, _, err = fedipw(
        "weights", "--population", tmp_path / "people.parquet", "--rounds", tmp_path / "rounds",
        "--out", tmp_path / "w.csv", "--models", tmp_path / "models",
    )  # fmt: skip
    assert code == 2
    assert message in err
    assert not (tmp_path / "w.csv").exists()


@pytest.mark.parametrize("fit", ["past", "pooled"])
def test_steps_that_everybody_passed_have_probability_one(fit: str) -> None:
    plain = world(4)
    sure = replace(
        plain,
        rounds=[
            table.with_columns(available=pl.lit(True), invite_prob=pl.lit(1.0))
            for table in plain.rounds
        ],
    )
    expected, _ = weighed(plain, "--participation-fit", fit)
    got, _ = weighed(sure, "--participation-fit", fit)
    np.testing.assert_allclose(got["weight"], expected["weight"], rtol=CLOSE)
    np.testing.assert_allclose(got["participation_prob"], expected["participation_prob"])
