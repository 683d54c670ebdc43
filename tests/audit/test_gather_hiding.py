"""What an audit must not show: parts of too few clients, and anybody's identifier."""

import json
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedipw.audit.gather import audit_facts
from fedipw.audit.suppression import merged_reliability, shown_histogram, weight_part
from fedipw.audit.values import Audit
from fedipw.evaluation.diagnostics import ReliabilityBin
from fedipw.selection.classifiers import Newton
from fedipw.selection.coded import TableSettings
from fedipw.selection.enrollment import enrollment_stage
from fedipw.selection.participation import ParticipationSettings, Window
from fedipw.selection.steps import Clock, Formulas
from fedipw.tables import Ledger, Population, Targets
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan
from worlds import Tables

Array = np.ndarray[Any, Any]


def rare_world(seed: int, size: int, rounds: int) -> tuple[pl.DataFrame, list[pl.DataFrame]]:
    """Return people and rounds with levels of all sizes, some of one client."""
    rng = np.random.default_rng(seed)
    places = [f"place {k}" for k in range(40)]
    share = 0.6 ** np.arange(40)
    people = pl.DataFrame(
        {
            "unit_id": [f"zq{i}zq" for i in range(size)],
            "enrolled": rng.random(size) < 0.5,
            "place": rng.choice(places, size, p=share / share.sum()),
            "kids": np.minimum(rng.geometric(0.5, size), 9),
            "rare": rng.random(size) < 4 / size,
            "z": rng.normal(size=size),
        }
    )
    inside = people.filter("enrolled")
    n, made = inside.height, []
    for k in range(1, rounds + 1):
        table = {
            "round": np.full(n, k),
            "unit_id": inside["unit_id"],
            "invited": np.ones(n, dtype=bool),
            "replied": rng.random(n) < 0.4,
            "carrier": rng.choice(["a", "b", "c", "d"], n, p=[0.7, 0.25, 0.04, 0.01]),
        }
        made.append(pl.DataFrame(table))
    return people, made


def audit_of(
    people: pl.DataFrame, rounds: list[pl.DataFrame], *, min_cell: int, fit: str = "pooled"
) -> Audit:
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        Tables(people, rounds).write(where)
        # with a penalty, since levels of one client part the classes
        plan = Plan(
            method=method_named("fedipw"),
            formulas=Formulas(reply="place + kids + rare + z + carrier"),
            settings=ParticipationSettings(
                window=Window(fit), clock=Clock(day_length=2.0), estimator=Newton(1.0)
            ),
        )
        formula = "place + kids + rare + z"
        settings = TableSettings(estimator=Newton(1.0))
        stage = enrollment_stage(Population(where / "people.parquet"), formula, settings=settings)
        return audit_facts(stage, Ledger(where / "rounds"), plan, min_cell=min_cell)


def counts(found: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield every count of clients or rows in the parts that can be small."""
    for part in found["stages"]:
        for group, values in part["prob"]["counts"].items():
            yield from ((f"{part['stage']} {group}", n) for n in values)
        yield from ((f"{part['stage']} reliability", one["count"]) for one in part["reliability"])
    for part in found["weights"]:
        for values in part["multiples"]["counts"].values():
            yield from ((part["name"], n) for n in values)
    for part in found["rates"]:
        yield from ((part["column"], line["rows"]) for line in part["lines"])
    for part in found["heat"]:
        yield from ((part["column"], n) for line in part["rows"] for n in line if n is not None)
    if found["overlap"] is not None:
        yield from ((part["name"], part["population"]) for part in found["overlap"]["empty"])


@settings(max_examples=12)
@given(
    seed=st.integers(0, 999),
    size=st.integers(60, 400),
    rounds=st.integers(1, 6),
    min_cell=st.sampled_from([2, 5, 10, 25]),
    fit=st.sampled_from(["past", "pooled", "same-round"]),
)
@example(seed=0, size=60, rounds=5, min_cell=25, fit="past")
def test_no_part_of_too_few_clients_or_rows_is_shown(
    seed: int, size: int, rounds: int, min_cell: int, fit: str
) -> None:
    people, tables = rare_world(seed, size, rounds)
    found = audit_of(people, tables, min_cell=min_cell, fit=fit).to_json()
    text = json.dumps(found, allow_nan=False)
    assert "zq" not in text
    small = [(name, n) for name, n in counts(found) if 0 < n < min_cell]
    assert not small
    check_levels(found, people, pl.concat(tables), min_cell)


def check_levels(
    found: dict[str, Any], people: pl.DataFrame, log: pl.DataFrame, min_cell: int
) -> None:
    """Check that no level of few clients is named, and that all others are."""
    clients = dict(people["place"].value_counts().iter_rows())
    lines = [line["name"] for line in found["balance"]["lines"]]
    shown = {name[6:-1] for name in lines if name.startswith("place[")}
    assert shown == {place for place, n in clients.items() if n >= min_cell}
    yes = int(people["rare"].sum())
    assert ("rare" in lines) == (yes == 0 or min(yes, people.height - yes) >= min_cell)
    wanted = len(clients) - len(shown) + ("rare" not in lines)
    assert found["balance"]["hidden"] == wanted
    rates = {part["column"]: part for part in found["rates"]}
    inside = dict(people.filter("enrolled")["place"].value_counts().iter_rows())
    large = {place for place, n in inside.items() if n >= min_cell}
    assert {line["level"] for line in rates["place"]["lines"]} == large
    assert rates["place"]["hidden"] == len(inside) - len(large)
    users = dict(log.group_by("carrier").agg(pl.col("unit_id").n_unique()).iter_rows())
    seen = {carrier for carrier, n in users.items() if n >= min_cell}
    assert {line["level"] for line in rates["carrier"]["lines"]} == seen
    for part in found["stages"]:
        for one in part["coefficients"]:
            name = one["name"]
            if name.startswith("place["):
                whole = clients if part["stage"] == "enrollment" else inside
                assert whole[name[6:-1]] >= min_cell
            if name.startswith("carrier["):
                assert users[name[8:-1]] >= min_cell


def test_every_level_of_enough_clients_has_its_rate() -> None:
    rng = np.random.default_rng(0)
    people, tables = rare_world(1, 3000, 2)
    places = [f"p{k:02d}" for k in range(30)]
    people = people.with_columns(place=pl.Series(rng.choice(places, 3000)))
    part = next(p for p in audit_of(people, tables, min_cell=10).rates if p.column == "place")
    sizes = dict(people.filter("enrolled")["place"].value_counts().iter_rows())
    assert {line.level: line.rows for line in part.lines} == {p: 2 * n for p, n in sizes.items()}
    assert part.hidden == 0
    assert [line.level for line in part.lines] == places


def test_columns_of_too_many_levels_and_beyond_twelve_are_named_and_not_counted() -> None:
    people, tables = rare_world(2, 1500, 2)
    wide = people.with_columns(
        serial=pl.col("unit_id").str.replace_all("z", "y"),
        **{f"more{k}": pl.lit(float(k)) for k in range(12)},
    )
    found = audit_of(wide, tables, min_cell=10)
    assert len(found.rates) == 11  # twelve but the serial number
    assert any("by serial, more6" in note and "2 more" in note for note in found.notes)
    assert "yq" not in json.dumps(found.to_json())


@given(
    table=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=30),
    min_cell=st.integers(1, 40),
)
def test_merged_bins_keep_every_count_and_none_is_small(
    table: list[tuple[int, int]], min_cell: int
) -> None:
    groups = {name: np.array(n) for name, n in zip("ab", zip(*table, strict=True), strict=True)}
    edges = np.arange(len(table) + 1.0)
    found = shown_histogram(edges, groups, min_cell, log_scale=False)
    assert (found.edges[0], found.edges[-1]) == (0.0, float(len(table)))
    assert list(found.edges) == sorted({*found.edges})
    for name, values in groups.items():
        if 0 < values.sum() < min_cell:
            assert name not in found.counts
            continue
        got = np.array(found.counts[name])
        assert ((got == 0) | (got >= min_cell)).all()
        cuts = np.array(found.edges, dtype=int)
        assert got.tolist() == [values[a:b].sum() for a, b in pairwise(cuts)]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    min_cell=st.integers(1, 40),
)
def test_merged_reliability_keeps_rows_and_means(sizes: list[int], min_cell: int) -> None:
    rng = np.random.default_rng(len(sizes))
    bins = [
        ReliabilityBin(
            count=n, mean_prob=p, rate=float(rng.integers(0, n + 1)) / n, standard_error=0
        )
        for n, p in zip(sizes, np.sort(rng.random(len(sizes))).tolist(), strict=True)
    ]
    found = merged_reliability(bins, min_cell)
    if sum(sizes) < min_cell:
        assert found == ()
        return
    assert sum(one.count for one in found) == sum(sizes)
    assert min(one.count for one in found) >= min_cell
    for name in ("mean_prob", "rate"):
        got = sum(one.count * getattr(one, name) for one in found)
        assert got == pytest.approx(sum(one.count * getattr(one, name) for one in bins))


@given(seed=st.integers(0, 99), n=st.integers(1, 200))
def test_how_uneven_weights_are_equals_plain_sums(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.lognormal(size=n) * (rng.random(n) < 0.9)
    part = weight_part("replies", weights, min_cell=1)
    if not weights.any():
        assert part is None
        return
    assert part is not None
    total, top = weights.sum(), int(np.ceil(0.01 * n))
    assert (part.count, part.zeros, part.negative) == (n, (weights == 0.0).sum(), 0)
    assert part.effective_sample_size == pytest.approx(total**2 / (weights**2).sum())
    assert part.design_effect == pytest.approx(1.0 + (weights.std() / weights.mean()) ** 2)
    assert part.largest_share == pytest.approx(weights.max() / total)
    assert part.top_share == pytest.approx(np.sort(weights)[-top:].sum() / total)
    points = [float(q) for q in part.quantiles]
    expected = np.quantile(weights / weights.mean(), points)
    np.testing.assert_allclose(list(part.quantiles.values()), expected, rtol=1e-12)
    assert sum(part.multiples.counts["replies"]) == (weights > 0.0).sum()


def test_the_effective_size_of_weights_equals_that_of_r() -> None:
    folder = Path(__file__).parents[1] / "reference"
    r = json.loads((folder / "ipw200_R.json").read_text())
    weights = pl.read_csv(folder / "ipw200_fitted_R.csv").filter(pl.col("e") == 1)["w"]
    part = weight_part("enrolled", weights.to_numpy(), min_cell=1)
    assert part is not None
    assert part.effective_sample_size == pytest.approx(r["ess"], rel=1e-10)


@given(seed=st.integers(0, 99), power=st.integers(-600, 400))
def test_a_common_factor_changes_no_weight_diagnostic(seed: int, power: int) -> None:
    weights = np.random.default_rng(seed).uniform(1e-3, 1e3, 60)
    one, other = (weight_part("replies", w, min_cell=1) for w in (weights, weights * 2.0**power))
    assert one == other


@given(count=st.integers(1, 500), weight=st.floats(1e-200, 1e200))
def test_equal_weights_have_design_effect_one(count: int, weight: float) -> None:
    part = weight_part("replies", np.full(count, weight), min_cell=1)
    assert part is not None
    assert part.design_effect == pytest.approx(1.0, rel=1e-12)
    assert part.top_share == pytest.approx(np.ceil(0.01 * count) / count)
    np.testing.assert_allclose(list(part.quantiles.values()), 1.0, rtol=1e-12)
    assert part.multiples.counts["replies"] == (count,)


def test_with_totals_levels_of_few_enrolled_clients_are_hidden(tmp_path: Path) -> None:
    people, _ = rare_world(3, 400, 1)
    people.filter("enrolled").write_parquet(tmp_path / "enrolled.parquet")
    inside = people.filter("enrolled")["place"].value_counts()
    large = inside.filter(pl.col("count") >= 10)["place"][0]
    small = inside.filter(pl.col("count") < 10)["place"][0]
    targets = Targets.of({"z": 0.0, f"place[{large}]": 0.3, f"place[{small}]": 0.01})
    known = Population.from_totals(tmp_path / "enrolled.parquet", targets)
    found = audit_facts(
        enrollment_stage(known), None, Plan(method=method_named("calibrated-entropy"))
    )
    assert found.balance is not None
    assert [line.name for line in found.balance.lines] == ["z", f"place[{large}]"]
    assert found.balance.hidden == 1
    assert "1 levels of the balance are hidden: fewer than 10 clients or rows." in found.notes
