"""Study files: what they describe, and what is said of those that describe nothing."""

from pathlib import Path

import pytest

from fedipw.errors import InputError
from fedipw.lab.mechanisms import DailyParticipation, MarkovAvailability
from fedipw.lab.study_file import Measure, Study, study_from
from fedipw.lab.testbed import Testbed

EXAMPLES = Path(__file__).parents[3] / "examples" / "studies"


def read(tmp_path: Path, text: str) -> Study:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return study_from(path)


def test_a_scenario_is_the_base_with_its_own_settings_on_top(tmp_path: Path) -> None:
    study = read(
        tmp_path,
        """
        rounds = 50
        seeds = [3, 5]
        methods = ["fedavg", "fedipw"]
        measure = "last"
        [base.population]
        size = 120
        rows = 7
        [base.participation]
        rate = 0.4
        coefficients = { z1 = 0.1, z2 = 0.2 }
        [scenarios.plain]
        [scenarios.other]
        title = "another"
        rounds = 10
        methods = ["oracle", "fedavg"]
        population.size = 90
        participation.coefficients = { z1 = -1.0 }
        [scenarios.chain.participation]
        kind = "markov"
        """,
    )
    plain, other, chain = (case.scenario for case in study.cases)
    assert study.seeds == (3, 5)
    assert [case.title for case in study.cases] == ["plain", "another", "chain"]
    assert (plain.rounds, other.rounds, chain.rounds) == (50, 10, 50)
    assert list(other.methods) == ["oracle", "fedavg"]
    assert other.population == Testbed(size=90, rows=7)
    assert isinstance(other.participation, DailyParticipation)
    assert other.participation.rate == 0.4
    assert dict(other.participation.coefficients) == {"z1": -1.0, "z2": 0.2}
    assert chain.participation == MarkovAvailability()  # another kind shares no keys
    assert study.measure is Measure.LAST
    assert study.methods == ("fedavg", "fedipw", "oracle")
    assert study.references == {"plain": "fedavg", "other": "oracle", "chain": "fedavg"}


def test_participation_only_is_the_reference_where_it_is_run(tmp_path: Path) -> None:
    text = 'methods = ["fedavg", "participation-only", "fedipw"]\n{}[scenarios.a]\n'
    assert read(tmp_path, text.format("")).references == {"a": "participation-only"}
    chosen = read(tmp_path, text.format('reference = "fedipw"\n'))
    assert chosen.references == {"a": "fedipw"}
    assert chosen.seeds == tuple(range(10))


@pytest.mark.parametrize("name", ["testbed.toml", "breaks.toml", "baselines.toml", "real.toml"])
def test_examples_are_studies(name: str) -> None:
    study = study_from(EXAMPLES / name)
    assert len(study.seeds) == (40 if name == "real.toml" else 20)
    assert all(case.scenario.rounds == 300 for case in study.cases)


ONE = "[scenarios.a]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = 3\n", r"no scenarios; add one or more tables \[scenarios.NAME\]"),
        ("scenarios = 3\n", r"\[scenarios\] must be a table"),
        ("[scenarios]\na = 3\n", r"\[scenarios.a\] must be a table"),
        ("seed = 3\n" + ONE, "unknown key 'seed'; did you mean 'seeds'"),
        ("size = 3\n" + ONE, "unknown key 'size'; known: title, rounds"),
        ("seeds = 0\n" + ONE, "seeds = 0: at least 1"),
        ("seeds = []\n" + ONE, "seeds is empty; give a number of seeds"),
        ("seeds = [1, 2, 1]\n" + ONE, "seeds names 1 twice"),
        ("seeds = [-1]\n" + ONE, "seeds must be 0 or more, not -1"),
        ("seeds = true\n" + ONE, "seeds must be a number of seeds"),
        ("seeds = [1.5]\n" + ONE, "seeds must be a number of seeds"),
        ("seeds = 'many'\n" + ONE, "seeds must be a number of seeds"),
        ("rounds = 0\n" + ONE, "rounds must be"),
        ("methods = []\n" + ONE, "Scenario 'a' has no methods"),
        ("methods = ['fedipw', 'fedpiw']\n" + ONE, "No method 'fedpiw'; did you mean fedipw"),
        ("methods = ['nothing']\n" + ONE, ": fedavg, participation-only"),
        ("methods = ['fedavg', 'fedavg']\n" + ONE, "Each method can be run once"),
        ("methods = ['fedavg']\nreference = 'oracle'\n" + ONE, "not run in scenario 'a'; it has"),
        ("reference = 3\n" + ONE, "reference must be text, not 3"),
        ("measure = 'best'\n" + ONE, "measure must be one of tail, mean-tail, last, not 'best'"),
        ("[base]\nseed = 1\n" + ONE, r"\[base\] 'seed' does not go here; give seeds at the top"),
        ("[base]\nrounds = 1\n" + ONE, r"\[base\] 'rounds' does not go here; give rounds at"),
        ("[base]\nsize = 1\n" + ONE, "unknown key 'size'.*scenario 'a'"),
        ("[base.enrollment]\nstrenght = 1.0\n" + ONE, "'strenght'; did you mean 'strength'"),
        ("[scenarios.a]\nseed = 1\n", r"\[scenarios.a\] 'seed' does not go here"),
        ("[scenarios.a]\ntitle = ''\n", "title must be text"),
        ("[scenarios.a]\npopulation.size = '9'\n", r"\[population\] size: .*scenario 'a'"),
        ("[scenarios.a]\npopulation = 9\n", r"\[population\] must be a table"),
        ("[scenarios.'']\n", "a scenario's name is empty"),
        ("[scenarios.a]\n[scenarios.a]\n", "is not readable TOML: .*twice"),
        ("[scenarios.a]\ntitle='x'\n[scenarios.b]\ntitle='x'\n", "Two scenarios have the title"),
        ("rounds = \n", "is not readable TOML"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "study.toml"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No study file"):
        study_from(tmp_path / "none.toml")
