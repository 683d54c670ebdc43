"""Both stages of a scenario: formulas, categories, classifiers, combinations of choices."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.lab.config import scenario_from
from fedipw.lab.engine import Simulation
from fedipw.lab.mechanisms.base import solved_intercept
from fedipw.lab.scenario import PropensitySettings, Scenario
from fedipw.lab.simulate import simulate
from fedipw.lab.testbed import PopulationDraw, Testbed
from fedipw.numerics import FloatArray
from fedipw.selection.participation import Window
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from fedipw.tables.population import Population

REGIONS = ("east", "north", "south")


@dataclass(frozen=True)
class Regions:
    """Clients of the testbed whose third covariate is a region, as text or by hand-made dummies."""

    dummies: bool
    size: int = 500

    def draw(self, rng: np.random.Generator) -> PopulationDraw:
        drawn = Testbed(size=self.size, rows=5).draw(rng)
        frame = drawn.population.frame
        place = np.digitize(frame["z3"].to_numpy(), [-0.5, 0.6])
        columns = [pl.Series("region", np.array(REGIONS)[place])]
        if self.dummies:
            columns = [pl.Series(REGIONS[k], (place == k).astype(np.float64)) for k in (1, 2)]
        table = frame.drop("z3").with_columns(columns)
        return PopulationDraw(population=Population(table), clients=drawn.clients)


@dataclass(frozen=True)
class ByRegion:
    """Enrollment that is likelier in the north."""

    def __call__(self, population: Population) -> FloatArray:
        frame = population.frame
        north = frame["region"] == "north" if "region" in frame.columns else frame["north"] == 1.0
        score = 0.8 * frame["z1"].to_numpy() + 1.2 * north.to_numpy()
        odds = np.exp(solved_intercept(lambda: [score], 0.5) + score)
        return np.asarray(odds / (1.0 + odds))


METHODS = ("fedipw", "fedipw-hajek", "calibrated-entropy", "greg", "efficient", "collapsed")
TEXT = Scenario(
    seed=2,
    rounds=10,
    methods=METHODS,
    population=Regions(dummies=False),
    enrollment=ByRegion(),
    propensity=PropensitySettings(
        enrollment="z1 + C(region)", participation=". + z1:region", balance="z1*region"
    ),
)
DUMMIES = replace(
    TEXT,
    population=Regions(dummies=True),
    propensity=PropensitySettings(
        enrollment="z1 + north + south",
        participation=". + z1:north + z1:south",
        balance="z1 + north + south + z1:north + z1:south",
    ),
)


def advanced(scenario: Scenario, *, limits: bool = True) -> Simulation:
    run = scenario.simulation(limits=limits)
    run.advance(scenario.rounds)
    return run


def test_a_text_covariate_equals_its_dummies() -> None:
    text, dummies = advanced(TEXT), advanced(DUMMIES)
    assert "model" in text.history().source[0]
    for name in METHODS:
        np.testing.assert_allclose(text.models[name], dummies.models[name], rtol=0, atol=1e-9)
        for kind in ("given_enrolled", "over_enrollment"):
            mine, other = (getattr(run.limits[name], kind) for run in (text, dummies))
            np.testing.assert_allclose(mine, other, rtol=1e-9)


def test_all_covariates_by_default_with_every_level_of_a_category() -> None:
    settings = PropensitySettings()
    named = replace(settings, enrollment="z1 + z2 + region", participation="z1 + z2 + region + x")
    one, two = (advanced(replace(TEXT, propensity=s)) for s in (settings, named))
    assert one.history().iterates.tobytes() == two.history().iterates.tobytes()
    left_out = advanced(replace(TEXT, propensity=PropensitySettings(enrollment=". - region")))
    assert np.abs(left_out.models["fedipw"] - one.models["fedipw"]).max() > 1e-3


@pytest.mark.parametrize(
    ("text", "dummies"),
    [
        (". + z1:x + region:x + x**2", ". + z1:x + north:x + south:x + x**2"),
        ("x + region:last_reply", "x + north:last_reply + south:last_reply"),
    ],
)
def test_products_of_what_a_client_is_and_what_a_round_is(text: str, dummies: str) -> None:
    one = replace(TEXT.propensity, participation=text)
    two = replace(DUMMIES.propensity, participation=dummies)
    found = [
        advanced(replace(scenario, propensity=settings), limits=False).models
        for scenario, settings in ((TEXT, one), (DUMMIES, two))
    ]
    for name in ("fedipw", "collapsed"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=0, atol=1e-9)


def test_a_run_on_text_is_evaluated_like_its_dummies(tmp_path: Path) -> None:
    one, two = (
        simulate(replace(s, methods=("fedipw", "fedavg")), tmp_path / str(k))
        for k, s in enumerate((TEXT, DUMMIES))
    )
    assert one["theory"]["efficiency_bound"] == pytest.approx(two["theory"]["efficiency_bound"])
    assert len(one["evaluation"]) == len(two["evaluation"]) > 0
    for mine, other in zip(one["evaluation"], two["evaluation"], strict=True):
        values = [[line[k] for k in ("truth", "estimate", "low", "high")] for line in (mine, other)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-9)


BOOSTED = PropensitySettings(classifier="boosting", folds=3, calibration="platt")
SMALL = Scenario(
    seed=1,
    rounds=8,
    methods=("fedavg", "participation-only", "fedipw", "calibrated-entropy", "collapsed"),
    population=Testbed(size=240, rows=4),
    propensity=BOOSTED,
)


def test_cross_fitted_boosting_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    scenario = replace(SMALL, rounds=5)
    whole, first, second = (scenario.simulation() for _ in range(3))
    whole.advance(5)
    first.advance(3)
    save_checkpoint(tmp_path, first.state(), "settings")
    state = load_checkpoint(tmp_path, "settings")
    assert state is not None
    second.restore(state)
    second.advance(2)
    one, two = whole.history(), second.history()
    assert one.iterates.tobytes() == two.iterates.tobytes()
    assert np.isfinite(one.iterates).all()
    assert {"model"} < set(one.source[2])
    logistic = advanced(replace(scenario, propensity=PropensitySettings()))
    for name in ("participation-only", "fedipw", "collapsed"):
        limit = whole.limits[name]
        assert limit.over_enrollment.tobytes() == second.limits[name].over_enrollment.tobytes()
        assert np.abs(logistic.models[name] - whole.models[name]).max() > 1e-4
    np.testing.assert_array_equal(logistic.models["fedavg"], whole.models["fedavg"])


def test_clients_outside_every_fold_have_the_mean_of_the_folds_models() -> None:
    """Limits ask for clients that never enrolled, the last of the table among them."""
    scenario = replace(SMALL, seed=0, methods=("fedipw",), population=Testbed(size=151, rows=4))
    scenario = replace(scenario, propensity=PropensitySettings(folds=3))
    run = advanced(scenario)
    assert not run.federation.population.enrolled[-1]
    weights = run.limits["fedipw"].over_enrollment
    assert np.isfinite(weights).all()
    # fedipw aims at weights 1/N however its model is fitted
    assert weights.sum() == pytest.approx(1.0, abs=0.1)


def test_choices_make_a_method() -> None:
    """A preset by its parts is that preset; other combinations run beside and differ."""
    parts = "base=participation, calibration=entropy, normalisation=hajek"
    guarded = "fedipw, guard=trim(2)"
    other = "base=participation, calibration=rich-inverse-logit"
    rule = f"scaffold+{other}"
    names = ("calibrated-entropy-hajek", parts, "fedipw", guarded, other, rule)
    scenario = replace(SMALL, methods=names, propensity=PropensitySettings(), rounds=12)
    run = advanced(scenario)
    models, history = run.models, run.history()
    assert models[parts].tobytes() == models["calibrated-entropy-hajek"].tobytes()
    assert history.trimmed[names.index(guarded)].sum() > 0
    assert history.trimmed[names.index("fedipw")].sum() == 0
    for name in (guarded, other, rule):
        assert np.abs(models[name] - models["fedipw"]).max() > 1e-4
    with pytest.raises(InputError, match="no calibration 'entropie'; did you mean entropy"):
        replace(SMALL, methods=("base=participation, calibration=entropie",))
    with pytest.raises(InputError, match="are both weightings"):
        replace(SMALL, methods=(f"fedipw+{parts}",))


@pytest.mark.parametrize(
    "scenario", [TEXT, SMALL, replace(SMALL, methods=("fedipw, guard=trim(2)",))]
)
def test_settings_are_json(scenario: Scenario) -> None:
    settings = scenario.settings()
    assert json.loads(json.dumps(settings, allow_nan=False)) == settings
    assert settings["propensity"]["enrollment"] == scenario.propensity.enrollment
    assert settings["methods"] == list(scenario.methods)


def test_formulas_and_classifiers_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(
        """
        rounds = 4
        methods = ["base=participation, calibration=entropy, normalisation=hajek"]
        [population]
        size = 200
        [propensity]
        enrollment = "z1 + ns(z2, -1, 0, 1)"
        participation = ". + z1:z2"
        classifier = "sklearn.linear_model.LogisticRegression"
        folds = 2
        calibration = "platt"
        """
    )
    scenario = scenario_from(path)
    assert scenario.propensity.classifier == "sklearn.linear_model.LogisticRegression"
    run = advanced(scenario)
    assert np.isfinite(run.history().iterates).all()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: PropensitySettings(classifier="bosting"), "No classifier 'bosting'"),
        (lambda: PropensitySettings(calibration="platt"), "give the number of folds"),
        (lambda: PropensitySettings(window=Window.POOLED), "reads rounds to come"),
        (lambda: PropensitySettings(decay=0.9, folds=3), "a classifier or folds take rows"),
        (lambda: PropensitySettings(decay=0.9, window=Window.SAME_ROUND), "same-round fit counts"),
        (
            lambda: PropensitySettings(enrollment="z1", enrollment_columns=("z1",)),
            "as a formula or as columns",
        ),
        (
            lambda: replace(
                SMALL, propensity=PropensitySettings(participation="z1 + age")
            ).simulation(),
            "'age' names no column",
        ),
        (
            lambda: replace(SMALL, propensity=PropensitySettings(enrollment="z1 + x")).simulation(),
            "'x' names no column",
        ),
    ],
)
def test_settings_that_cannot_be(made, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        made()


@pytest.mark.parametrize(
    ("formula", "limits"), [("x + last_reply", False), ("z1:hour_sin + x", True), (".", True)]
)
def test_a_formula_that_reads_replies_has_no_limits(formula: str, limits: bool) -> None:
    scenario = replace(SMALL, propensity=PropensitySettings(participation=formula))
    assert scenario.has_limits is limits


def test_limit_weights_of_zero_are_outside_the_theorem_and_in_the_summary(tmp_path: Path) -> None:
    methods: Sequence[str] = ("fedipw", "calibrated-quadratic")
    scenario = Scenario(rounds=12, methods=methods, population=Testbed(size=200, rows=4))
    run = simulate(scenario, tmp_path)
    theory = {name: run["methods"][name]["theory"] for name in methods}
    assert "weight_error" in theory["fedipw"]
    assert (
        "some limit weights are 0 or below" in theory["calibrated-quadratic"]["bound"]["statement"]
    )
    assert "weight_error" not in theory["calibrated-quadratic"]
    assert "some limit weights are 0 or below" in (tmp_path / "index.html").read_text()
