"""Weights applied by clients, under Flower's SecAgg+."""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from secure.run import CopyingGrid, clear_step, main, trained
from secure.secure_app import (
    FIXED,
    HAJEK,
    HT,
    SIZE,
    SecureIPW,
    client_app,
    enrolled_people,
    pilot_models,
)

from fedipw.errors import InputError
from fedipw.flower.secure import (
    FixedPoint,
    WeightModel,
    hajek_mean,
    moved,
    scaled_update,
    weighted_sum,
)
from fedipw.selection.enrollment import EnrollmentStage, enrollment_stage
from fedipw.selection.participation import ParticipationSettings, Window
from fedipw.selection.saved import StageModel
from fedipw.selection.steps import Formulas
from fedipw.tables.design import Missing
from fedipw.tables.ledger import Ledger
from fedipw.tables.population import Population
from fedipw.weighting.live import Live
from fedipw.weighting.methods import method_named
from fedipw.weighting.replay import Plan, Record, Replay

SETUP, SHARE_KEYS, MASKED, UNMASK = "setup", "share_keys", "collect_masked_vectors", "unmask"
CONFIGS = "secaggplus_configs"
CLIENTS = 8


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def lost_from(stage: str, places: set[int]) -> Callable[[Message], bool]:
    """Return what loses messages to some clients from a stage of the protocol on."""
    order = [SETUP, SHARE_KEYS, MASKED, UNMASK]

    def loses(message: Message) -> bool:
        now = str(message.content.config_records[CONFIGS]["stage"])
        gone = message.metadata.dst_node_id - 100 in places
        return gone and order.index(now) >= order.index(stage)

    return loses


def one_round(
    estimator: str, loses: Callable[[Message], bool] = lambda _: False
) -> tuple[SecureIPW, CopyingGrid]:
    strategy = SecureIPW(pilot_models(), estimator)
    grid = trained(strategy, 1, app=client_app(lambda *_: True), clients=CLIENTS, loses=loses)
    return strategy, grid


def masked_of(grid: CopyingGrid) -> list[Message]:
    return [m for m in grid.heard if "masked_params" in m.content.config_records[CONFIGS]]


def clear(places: list[int], *, hajek: bool = False) -> Any:
    everybody = enrolled_people()
    return clear_step([everybody[k] for k in places], np.zeros(SIZE), hajek=hajek)


# ----- the protocol ------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [HT, HAJEK])
def test_secure_step_is_the_weighted_step_in_the_clear(estimator: str) -> None:
    strategy, _ = one_round(estimator)
    expected = clear([*range(CLIENTS)], hajek=estimator == HAJEK)
    np.testing.assert_allclose(strategy.steps[1][0], expected, rtol=0.0, atol=1e-4)
    np.testing.assert_allclose(strategy.models[1][0], expected, rtol=0.0, atol=1e-4)
    if estimator == HT:  # Hájek's divides by a sum that has an error too
        assert np.abs(strategy.steps[1][0] - expected).max() < FIXED.error(CLIENTS) < 1e-4
        assert np.abs(clear([*range(CLIENTS)]) - clear([*range(1, CLIENTS)])).max() > 1e-2


@pytest.mark.parametrize("estimator", [HT, HAJEK])
def test_clients_lost_after_sharing_keys_are_not_in_the_sum(estimator: str) -> None:
    strategy, grid = one_round(estimator, lost_from(MASKED, {1, 4}))
    left = [0, 2, 3, 5, 6, 7]
    np.testing.assert_allclose(
        strategy.steps[1][0], clear(left, hajek=estimator == HAJEK), rtol=0.0, atol=1e-4
    )
    assert len(masked_of(grid)) == len(left)


def test_a_client_lost_after_its_masked_vector_arrived_is_in_the_sum() -> None:
    strategy, grid = one_round(HT, lost_from(UNMASK, {3}))
    shares = [m for m in grid.heard if "shares" in m.content.config_records[CONFIGS]]
    assert len(shares) == CLIENTS - 1  # it is gone by then
    np.testing.assert_allclose(strategy.steps[1][0], clear([*range(CLIENTS)]), rtol=0.0, atol=1e-4)


def test_a_client_that_raises_counts_as_one_that_dropped_out() -> None:
    fifth = enrolled_people()[5]
    strategy = SecureIPW(pilot_models(), HT)
    app = client_app(lambda person, _: person.covariates != fifth.covariates)
    trained(strategy, 1, app=app, clients=CLIENTS)
    np.testing.assert_allclose(
        strategy.steps[1][0], clear([0, 1, 2, 3, 4, 6, 7]), rtol=0.0, atol=1e-4
    )


@pytest.mark.parametrize(
    ("stage", "gone"), [(SETUP, {2}), (SHARE_KEYS, {2}), (MASKED, {0, 1, 2, 3, 4})]
)
def test_a_round_without_enough_shares_leaves_the_model_as_it_was(
    stage: str, gone: set[int]
) -> None:
    strategy, _ = one_round(HT, lost_from(stage, gone))
    assert strategy.steps == {}


def test_the_server_hears_no_update_no_weight_and_no_covariate() -> None:
    strategy, grid = one_round(HAJEK)
    model, everybody = pilot_models(), enrolled_people()[:CLIENTS]
    private: dict[int, list[float]] = {}
    for place, person in enumerate(everybody):
        weight = model.weight(person.covariates)
        scaled = scaled_update(
            [np.zeros(SIZE)], [0.5 * person.optimum], weight, clipping_range=8.0
        )[0]
        numbers = [person.covariates["age"], person.covariates["battery"]]
        private[100 + place] = [weight, *scaled, *(float(str(v)) for v in numbers)]
    step = 2.0 * FIXED.clipping_range / FIXED.quantization_range
    assert len(grid.heard) == 4 * CLIENTS  # four stages
    for message in grid.heard:
        content = message.content
        assert all(len(record) == 0 for record in content.array_records.values())
        told = [v for record in content.metric_records.values() for v in record.values()]
        assert told in ([], [1])  # one example
        configs = content.config_records[CONFIGS]
        assert set(configs) <= {"pk1", "pk2", "dsts", "ctxts", "masked_params", "nids", "shares"}
        rest = [r for name, r in content.config_records.items() if name != CONFIGS]
        assert not any(isinstance(v, float) for record in rest for v in record.values())
        raw = b"".join(_bytes(configs))
        for value in private[message.metadata.src_node_id]:
            assert np.float64(value).tobytes() not in raw
    # a masked vector is nowhere near what it hides, and differs from a second round's
    first, again = _masked(grid), _masked(one_round(HAJEK)[1])
    for node, vector in first.items():
        hidden = np.array(private[node][1 : SIZE + 1])
        quantised = (hidden + FIXED.clipping_range) / step
        assert np.abs(vector[1][:SIZE] - quantised).max() > 1e6
        assert not np.array_equal(vector[1], again[node][1])
    assert strategy.steps  # and yet there is a sum


def _bytes(record: Any) -> list[bytes]:
    found = []
    for value in record.values():
        found += [v for v in (value if isinstance(value, list) else [value]) if type(v) is bytes]
    return found


def _masked(grid: CopyingGrid) -> dict[int, list[Any]]:
    found = {m.metadata.src_node_id: m.content.config_records[CONFIGS] for m in masked_of(grid)}
    return {node: [np.load(BytesIO(b)) for b in _bytes(record)] for node, record in found.items()}


def test_the_example_says_how_far_secure_and_clear_sums_are_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(1, HT)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("9 of 24 people are enrolled")
    apart = re.fullmatch(r"round 1: 6 replied; .* differ by (\S+); distance to .*", second)
    assert apart is not None
    assert float(apart[1]) < FIXED.error(9)


# ----- weights -----------------------------------------------------------------------------------

N = 600


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a population, and a ledger of 12 rounds in three steps."""
    where, rng = tmp_path_factory.mktemp("study"), np.random.default_rng(5)
    age, os = rng.normal(size=N), rng.choice(["android", "ios", "web"], size=N)
    odds = -0.3 + 0.8 * age + 0.6 * (os == "ios")
    enrolled = rng.random(N) < 1.0 / (1.0 + np.exp(-odds))
    people = pl.DataFrame({"unit_id": range(N), "age": age, "os": os, "enrolled": enrolled})
    people.write_parquet(where / "people.parquet")
    people.filter("enrolled").drop("enrolled").write_parquet(where / "inside.parquet")
    inside, ledger = np.flatnonzero(enrolled), Ledger(where / "rounds")
    for index in range(1, 13):
        available = rng.random(len(inside)) < 1.0 / (1.0 + np.exp(-1.0 - 0.5 * age[inside]))
        invited = available & (rng.random(len(inside)) < 0.7)
        battery = rng.random(len(inside))
        replied = invited & (rng.random(len(inside)) < 0.3 + 0.5 * battery)
        table = pl.DataFrame(
            {
                "unit_id": inside, "round": index, "available": available, "invited": invited,
                "invite_prob": np.where(available, 0.7, np.nan), "battery": battery,
                "replied": replied,
            }
        ).with_columns(pl.col("invite_prob").fill_nan(None))  # fmt: skip
        ledger.append(index, table)
    return where


def stage_of(study: Path, scheme: str) -> EnrollmentStage:
    if scheme == "fedipw":
        return enrollment_stage(Population(study / "people.parquet"), "age*os")
    mean = pl.read_parquet(study / "people.parquet")["age"].mean()
    assert isinstance(mean, float)
    targets = study / "targets.csv"
    targets.write_text(f"name,value\nage,{mean!r}\n")
    return enrollment_stage(Population.from_totals(study / "inside.parquet", targets))


def weighed(study: Path, scheme: str) -> Record:
    plan = Plan(
        method=method_named(scheme), formulas=Formulas(reply="battery + os", availability="age"),
        settings=ParticipationSettings(window=Window.POOLED),
    )  # fmt: skip
    replay = Replay(stage_of(study, scheme), Ledger(study / "rounds"), plan)
    for table in replay:
        table.write_parquet(study / f"{scheme}-{table['round'][0]}.parquet")
    return replay.record


@pytest.fixture(scope="module")
def record(study: Path) -> Record:
    return weighed(study, "fedipw")


@pytest.mark.parametrize("scheme", ["fedipw", "calibrated-entropy"])
def test_a_client_finds_the_weight_the_server_finds(study: Path, scheme: str) -> None:
    record = weighed(study, scheme)
    steps = list(record.participation.values())
    assert {step.stage for step in steps} == {"availability", "reply"}
    clients = {row["unit_id"]: row for row in pl.read_parquet(study / "people.parquet").to_dicts()}
    compared = 0
    for index in (1, 7, 12):
        told = pl.read_parquet(study / f"{scheme}-{index}.parquet")
        own = {row["unit_id"]: row for row in Ledger(study / "rounds").read(index).to_dicts()}
        for row in told.to_dicts():
            unit = row["unit_id"]
            if scheme == "fedipw":
                assert record.enrollment is not None
                model = WeightModel.horvitz_thompson(record.enrollment, steps, N)
            else:
                model = WeightModel.calibrated(row["enrollment_weight"], steps)
            private = {**clients[unit], "battery": own[unit]["battery"]}
            weight = WeightModel.from_json(model.to_json()).weight(private, invite_prob=0.7)
            assert weight == pytest.approx(row["weight"], rel=1e-12, abs=0.0)
            compared += 1
    assert compared > 100


def test_a_live_server_knows_weights_of_all_it_invites_before_anybody_replies(
    study: Path, record: Record, tmp_path: Path
) -> None:
    models = record.participation
    plan = Plan(method=method_named("fedipw"), models=models)
    live = Live(stage_of(study, "fedipw"), Ledger(tmp_path / "rounds"), plan)
    table = Ledger(study / "rounds").read(3)
    live.open(table)
    invited, replied = table["invited"].to_numpy(), table["replied"].to_numpy()
    before = live.weigh(invited)
    after = live.weigh(replied)
    assert before is not None
    assert after is not None
    by_row = dict(zip(before.replies.rows.tolist(), before.weights, strict=True))
    assert len(by_row) == invited.sum() > replied.sum()
    np.testing.assert_array_equal([by_row[row] for row in after.replies.rows], after.weights)
    assert record.enrollment is not None
    own = WeightModel.horvitz_thompson(record.enrollment, models.values(), N)
    place = int(np.flatnonzero(invited)[0])
    row = {**people_row(study, table["unit_id"][place]), "battery": table["battery"][place]}
    assert own.weight(row, 0.7) == pytest.approx(before.weights[0], rel=1e-12, abs=0.0)


def people_row(study: Path, unit: int) -> dict[str, Any]:
    return pl.read_parquet(study / "people.parquet").row(unit, named=True)


def test_a_weight_model_carries_no_more_of_a_fit_than_its_coefficients(record: Record) -> None:
    assert record.enrollment is not None
    text = WeightModel.horvitz_thompson(record.enrollment, (), N).to_json()
    whole = record.enrollment.to_json()["fit"]
    assert all(repr(v) in text for v in whole["coefficients"].values())
    assert repr(whole["covariance"][0][0]) not in text
    assert repr(whole["log_likelihood"]) not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [({"os": "beos"}, "os"), ({"age": None}, "age"), ({"age": "old"}, "age")],
)
def test_a_client_the_models_do_not_know_has_no_weight(
    record: Record, change: dict[str, Any], message: str
) -> None:
    assert record.enrollment is not None
    model = WeightModel.horvitz_thompson(record.enrollment, (), N)
    with pytest.raises(InputError, match=message):
        model.weight({"age": 0.0, "os": "web", **change})


def test_a_level_that_no_fitted_row_had_has_no_weight(record: Record) -> None:
    assert record.enrollment is not None
    fit = replace(record.enrollment.logistic(), constant=("os[web]",))
    stage = StageModel(stage="enrollment", design=record.enrollment.design, fit=fit)
    model = WeightModel.from_json(WeightModel.horvitz_thompson(stage, (), N).to_json())
    assert model.weight({"age": 0.0, "os": "ios"}) > 0.0
    with pytest.raises(InputError, match=r"os\[web\].*decline"):
        model.weight({"age": 0.0, "os": "web"})


def test_missing_values_under_the_policy_drop_are_named(record: Record) -> None:
    assert record.enrollment is not None
    design = replace(record.enrollment.design, missing=Missing.DROP)
    stage = StageModel(stage="enrollment", design=design, fit=record.enrollment.fit)
    with pytest.raises(InputError, match=r"^age: missing.*decline"):
        WeightModel.horvitz_thompson(stage, (), N).weight({"age": None, "os": "web"})


def test_weight_models_that_make_no_sense_are_refused(record: Record) -> None:
    assert record.enrollment is not None
    steps = record.participation
    with pytest.raises(InputError, match="not one of enrollment"):
        WeightModel.horvitz_thompson(steps["reply"], (), N)
    with pytest.raises(InputError, match="not enrollment, reply"):
        WeightModel.calibrated(0.1, [record.enrollment, steps["reply"]])
    with pytest.raises(InputError, match="finite"):
        WeightModel.calibrated(np.nan, [])
    with pytest.raises(InputError, match="population_size"):
        WeightModel.horvitz_thompson(record.enrollment, (), 0.0)
    with pytest.raises(InputError, match="invite_prob"):
        WeightModel.calibrated(0.1, []).weight({}, invite_prob=0.0)
    for text in ("{}", "[]", "no", '{"format": "fedipw-weight-model", "version": 1}'):
        with pytest.raises(InputError, match="no weight model"):
            WeightModel.from_json(text)


# ----- products and sums -------------------------------------------------------------------------


def test_a_product_beyond_the_range_is_an_error_with_the_numbers() -> None:
    sent, after = [np.zeros(2)], [np.array([1.0, -3.0])]
    assert scaled_update(sent, after, 2.0, clipping_range=6.0)[0].tolist() == [2.0, -6.0]
    with pytest.raises(InputError, match=r"reaches 6 with weight 2, beyond .* 5\.9"):
        scaled_update(sent, after, 2.0, clipping_range=5.9)
    with pytest.raises(InputError, match="weight 7"):  # the weight is sent too
        scaled_update(sent, [np.zeros(2)], 7.0, clipping_range=6.0, with_weight=True)
    with pytest.raises(InputError, match="nan"):
        scaled_update(sent, [np.array([np.nan, 0.0])], 1.0, clipping_range=8.0)
    with pytest.raises(InputError, match="shapes"):
        scaled_update(sent, [np.zeros(3)], 1.0, clipping_range=8.0)
    with pytest.raises(InputError, match="floating"):
        scaled_update([np.zeros(2, int)], [np.ones(2, int)], 1.0, clipping_range=8.0)


@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=20),
    seed=st.integers(0, 2**32 - 1),
)
def test_means_of_products_give_back_both_estimators(weights: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    sent = [rng.normal(size=3).astype(np.float32), rng.normal(size=(2, 2)).astype(np.float32)]
    after = [[a + rng.normal(size=a.shape).astype(a.dtype) for a in sent] for _ in weights]
    products = [
        scaled_update(sent, t, w, clipping_range=100.0, with_weight=True)
        for t, w in zip(after, weights, strict=True)
    ]
    mean = [np.mean(parts, axis=0) for parts in zip(*products, strict=True)]
    sums = weighted_sum(mean, len(weights))
    for k, array in enumerate(sent):
        updates = np.array([t[k].astype(np.float64) - array for t in after])
        expected = np.tensordot(weights, updates, axes=1)
        np.testing.assert_allclose(sums[k], expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(
            hajek_mean(sums)[k], expected / np.sum(weights), rtol=1e-9, atol=1e-9
        )
        stepped = moved(sent, sums[:-1], rate=0.5)[k]
        assert stepped.dtype == np.float32
        np.testing.assert_allclose(stepped, array + 0.5 * expected, rtol=1e-5, atol=1e-5)


def test_sums_that_would_wrap_around_are_an_error() -> None:
    fixed = FixedPoint(quantization_range=2**30)
    assert fixed.largest_round == 3
    assert weighted_sum([np.ones(1)], 3, fixed)[0] == 3.0
    with pytest.raises(InputError, match="4 clients wraps around: 3 fit"):
        weighted_sum([np.ones(1)], 4, fixed)
    with pytest.raises(InputError, match="at least one"):
        weighted_sum([np.ones(1)], 0)
    with pytest.raises(InputError, match="between 0 and modulus_range"):
        FixedPoint(quantization_range=2**33)


def test_hajek_needs_a_positive_sum_of_weights() -> None:
    with pytest.raises(InputError, match="sum of weights, and that is 0"):
        hajek_mean([np.ones(2), np.zeros(1)])
    with pytest.raises(InputError, match="last array"):
        hajek_mean([np.ones(2), np.ones(2)])
