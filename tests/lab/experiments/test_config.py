"""Scenarios from TOML: what is accepted, and how each mistake is named."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.lab.config import scenario_from
from fedipw.lab.mechanisms import (
    DataAvailability,
    LogisticEnrollment,
    MarkovAvailability,
    TraceAvailability,
)
from fedipw.lab.real import RealPopulation, WaveParticipation
from fedipw.lab.scenario import Scenario, Target
from fedipw.lab.simulate import simulate
from fedipw.lab.testbed import Testbed
from fedipw.lab.theory import error_parts
from fedipw.selection.participation import Window

FULL = """
seed = 4
rounds = 30
methods = ["fedavg", "fedprox+fedipw-hajek"]
target = "sample"
trim = 20

[population]
size = 80
rows = 5
rows_max = 9
loadings = [1.0, 0.5, 0]

[enrollment]
strength = 0.5
coefficients = { z1 = 1.0 }

[participation]
kind = "markov"
memory = 0.5

[training]
local_steps = 2
batch_size = 3
steps_coefficients = { z1 = 1.0 }

[propensity]
window = "same-round"
classifier = "boosting"
folds = 3
enrollment_columns = ["z1", "z2"]

[rules]
fedprox = { mu = 0.25 }

[rules.fedadam]
tau = 0.01
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return path


def test_every_section_is_read(tmp_path: Path) -> None:
    scenario = scenario_from(written(tmp_path, FULL))
    assert (scenario.seed, scenario.rounds, scenario.trim) == (4, 30, 20.0)
    assert scenario.methods == ("fedavg", "fedprox+fedipw-hajek")
    assert scenario.target is Target.SAMPLE
    assert isinstance(scenario.population, Testbed)
    assert scenario.population.loadings == (1.0, 0.5, 0.0)
    assert scenario.enrollment == LogisticEnrollment(strength=0.5, coefficients={"z1": 1.0})
    assert scenario.participation == MarkovAvailability(memory=0.5)
    assert scenario.training.steps_coefficients == {"z1": 1.0}
    assert scenario.propensity.window is Window.SAME_ROUND
    assert scenario.propensity.classifier == "boosting"
    assert scenario.rules.fedprox.mu == 0.25
    # what a table leaves out keeps the rule's default
    assert (scenario.rules.fedadam.tau, scenario.rules.fedadam.size) == (0.01, 0.02)
    run = scenario.simulation()
    run.advance(3)
    assert run.history().iterates.shape == (2, 4, 6)


def test_an_empty_file_is_the_paper_s_testbed(tmp_path: Path) -> None:
    assert scenario_from(written(tmp_path, "")) == Scenario()


def test_other_participation_kinds(tmp_path: Path) -> None:
    data = scenario_from(written(tmp_path, '[participation]\nkind = "data"\nlabel = 2.0\n'))
    assert data.participation == DataAvailability(label=2.0)
    pl.DataFrame({"round": [1], "unit_id": [0], "replied": [True]}).write_csv(tmp_path / "t.csv")
    trace = scenario_from(written(tmp_path, '[participation]\nkind = "trace"\npath = "t.csv"\n'))
    assert trace.participation == TraceAvailability(path=tmp_path / "t.csv")


def test_real_populations_and_observed_waves(tmp_path: Path) -> None:
    text = """
    rounds = 20
    methods = ["fedavg", "scaffold+fedipw"]
    [population]
    kind = "real"
    name = "nlswork"
    size = 300
    [enrollment]
    coefficients = { schooling = 1.0 }
    [participation]
    kind = "waves"
    """
    scenario = scenario_from(written(tmp_path, text))
    assert scenario.population == RealPopulation(name="nlswork", size=300)
    assert scenario.participation == WaveParticipation()
    summary = simulate(scenario, tmp_path / "run")
    assert summary["population_size"] == 300
    assert "errors" not in summary["methods"]["fedavg"]  # who replied is observed: no limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[population]\nkind = 'reel'", r"\[population\] kind = 'reel'; did you mean 'real'"),
        ("[population]\nkind = 'real'\nname = 'iris'", r"iris"),
        ("[population]\nkind = 'real'\nrows = 3", r"\[population\] unknown key 'rows'"),
        ("sed = 1", r"unknown key 'sed'; did you mean 'seed'"),
        ("[enrolment]\nrate = 0.1", r"unknown key 'enrolment'; did you mean 'enrollment'"),
        ("[enrollment]\nstrenght = 1", r"\[enrollment\] unknown key 'strenght'; did you mean"),
        ("[participation]\nkind = 'dayly'", r"kind = 'dayly'; did you mean 'daily'"),
        ("[participation]\nmemory = 1", r"\[participation\] unknown key 'memory'"),
        ("rounds = '5'", r"rounds .*valid integer \(got '5'\)"),
        ("rounds = 1.5", r"rounds .*valid integer"),
        ("rounds = 0", r"rounds must be a finite number above 0"),
        ("seed = -1", r"seed must be 0 or more"),
        ("[population]\nloadings = [1.0]", r"\[population\] loadings"),
        ("[population]\nsize = true", r"\[population\] size: .*valid integer"),
        ("[enrollment]\nrate = nan", r"\[enrollment\] rate: .*finite"),
        ("[training]\ntail = 0.0", r"tail must be a fraction"),
        ("methods = ['fedavgg']", r"No method 'fedavgg'; did you mean fedavg"),
        ("population = 3", r"\[population\] must be a table"),
        ("participation = 3", r"\[participation\] must be a table"),
        ("target = 'rows'", r"target .*'client' or 'sample'"),
        ("seed = ", r"not readable TOML"),
        ("seed = 2020-01-01", r"seed .*valid integer"),
        ("methods = ['fedavg', 'fedavg']", r"Each method can be run once"),
        ("methods = ['scaffold+mifa']", r"both decide what is remembered"),
        (
            "methods = ['mifa']\n[training]\nsecure_sum = true",
            r"a secure sum shows the server none",
        ),
        ("[rules]\nfedprx = {}", r"\[rules\] unknown rule 'fedprx'; did you mean 'fedprox'"),
        ("[rules.fedprox]\nnu = 1.0", r"\[rules.fedprox\] unknown key 'nu'"),
        ("[rules.fedprox]\nmu = -1.0", r"mu must be 0 or more"),
        ("[rules]\nfedprox = 3", r"\[rules.fedprox\] must be a table"),
        ("rules = 3", r"\[rules\] must be a table"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario_from(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No configuration file .*nowhere\.toml"):
        scenario_from(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[enrollment]\nrate = 1e-9", r"No client of 1000 enrolled"),
        ("[enrollment]\nrate = 1.0", r"strictly between 0 and 1"),
        ("[enrollment]\ncoefficients = { age = 1.0 }", r"No covariate column 'age'"),
        ("[propensity]\nenrollment_columns = ['age']", r"No covariate column 'age'"),
        ("target = 'sample'", r"participation-only is a Horvitz–Thompson form"),
        ("[participation]\nkind = 'data'\nsize = 1.0", r"clients of different size"),
        ("[propensity]\nfolds = 1", r"1 folds over 1000 clients"),
    ],
)
def test_settings_no_run_can_have(tmp_path: Path, text: str, message: str) -> None:
    scenario = scenario_from(written(tmp_path, text))
    with pytest.raises(InputError, match=message):
        scenario.simulation()


def test_runs_without_limits_work_too(tmp_path: Path) -> None:
    text = (
        "rounds = 4\nmethods = ['fedipw']\n[population]\nsize = 150\n[propensity]\nhistory = true\n"
    )
    scenario = scenario_from(written(tmp_path, text))
    assert not scenario.has_limits
    summary = simulate(scenario, tmp_path / "run")
    assert "errors" not in summary["methods"]["fedipw"]


def test_folds_do_not_depend_on_which_methods_run(tmp_path: Path) -> None:
    text = "rounds = 4\nmethods = [{}]\n[population]\nsize = 150\n[propensity]\nfolds = 3\n"
    runs = []
    for methods in ("'participation-only'", "'fedipw', 'collapsed', 'participation-only'"):
        run = scenario_from(written(tmp_path, text.format(methods))).simulation(limits=False)
        run.advance(4)
        runs.append(run.history().of("participation-only").tobytes())
    assert runs[0] == runs[1]


def test_boosted_propensities_repeat_to_the_byte(tmp_path: Path) -> None:
    text = "methods = ['fedipw']\n[population]\nsize = 300\n[propensity]\nclassifier = 'boosting'\n"
    runs = []
    for _ in range(2):
        run = scenario_from(written(tmp_path, text)).simulation(limits=False)
        run.advance(3)
        runs.append(run.history().iterates.tobytes())
    assert runs[0] == runs[1]


def test_a_balance_formula_reaches_the_calibrated_methods(tmp_path: Path) -> None:
    """Balancing squares and products brings entropy calibration nearer to the best model."""
    found = {}
    for formula in ("z1 + z2 + z3", "z1 + z2 + z3 + z2**2 + z1:z2"):
        text = f"""
            rounds = 20
            methods = ["calibrated-entropy"]
            [propensity]
            balance = "{formula}"
        """
        scenario = scenario_from(written(tmp_path, text))
        run = scenario.simulation()
        run.advance(20)
        target = scenario.objective(run.federation)
        part = error_parts(target, run.limits["calibrated-entropy"], np.zeros(6))
        found[formula] = part.bias
    plain, rich = found.values()
    assert rich < 0.3 * plain
    bad = scenario_from(written(tmp_path, "methods = ['greg']\n[propensity]\nbalance = 'z1 + age'"))
    with pytest.raises(InputError, match="'age' names no column"):
        bad.simulation()
