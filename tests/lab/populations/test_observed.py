"""Observed populations: tables become flags, replies and data; wrong cells are named."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedipw.errors import InputError
from fedipw.lab.config import scenario_from
from fedipw.lab.observed import (
    DrawnReplies,
    ObservedPopulation,
    ObservedTables,
    RecordedReplies,
    recorded,
)
from fedipw.lab.open_data import (
    OUTCOMES,
    MichiganPopulation,
    OuladPopulation,
    SurveyReplies,
    oulad_presentations,
)
from fedipw.lab.study_file import study_from
from fedipw.lab.testbed import PopulationDraw

DATA = os.environ.get("FEDIPW_DATA")
needs_data = pytest.mark.skipif(
    DATA is None, reason="FEDIPW_DATA does not name the directory of the open data sets"
)
PEOPLE = pl.DataFrame(
    {
        "unit_id": ["a", "b", "c", "d"],
        "enrolled": [True, True, False, True],
        "age": [30.0, 60.0, 70.0, 40.0],
        "os": ["x", "y", "x", "y"],
        "bmi": [20.0, 25.0, 30.0, 22.0],
        "ill": [0, 1, 1, 0],
    }
)
ROUNDS = pl.DataFrame(
    {
        "round": [2, 2, 2, 5, 5, 5],
        "unit_id": ["b", "a", "d", "a", "b", "d"],
        "replied": [True, False, True, True, False, False],
        "battery": [0.2, 0.9, 0.5, 0.8, 0.1, 0.4],
    }
)


def files(place: Path, people: pl.DataFrame = PEOPLE, rounds: pl.DataFrame = ROUNDS) -> Path:
    people.write_csv(place / "people.csv")
    rounds.write_parquet(place / "rounds.parquet")
    return place


def source(place: Path, **settings: object) -> ObservedPopulation:
    given = {"label": "ill", "features": "bmi", "rounds": place / "rounds.parquet"} | settings
    return ObservedPopulation(path=place / "people.csv", **given)  # type: ignore[arg-type]


def test_flags_replies_and_data_are_those_of_the_tables(tmp_path: Path) -> None:
    drawn = source(files(tmp_path)).draw(np.random.default_rng(0))
    assert drawn.population.covariates == ("age", "os")
    assert drawn.population.unit_ids.tolist() == ["a", "b", "c", "d"]
    assert drawn.observed is not None
    assert drawn.observed.enrolled.tolist() == [True, True, False, True]
    process = drawn.observed.process
    assert process.columns == ("battery",)
    first, second, again = (process.advance() for _ in range(3))
    assert first.replied.tolist() == [False, True, False, True]
    assert second.replied.tolist() == [True, False, False, False]
    assert again.replied.tolist() == first.replied.tolist()  # rounds start again
    assert first.covariates[[0, 1, 3], 0].tolist() == [0.9, 0.2, 0.5]
    assert np.isnan(first.covariates[2, 0])  # nothing is known of who is not enrolled
    assert first.participation_prob is None
    bmi = np.array([20.0, 25.0, 30.0, 22.0])
    np.testing.assert_allclose(drawn.clients.features[:, 0], (bmi - bmi.mean()) / bmi.std())
    assert drawn.clients.labels.tolist() == [0, 1, 1, 0]


def test_metric_and_truth_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    tables = source(files(tmp_path)).tables()
    value = dict(zip(PEOPLE["unit_id"], PEOPLE["ill"], strict=True))
    expected = [
        (one, index, float(value[one]))
        for index, number in enumerate([2, 5], start=1)
        for one in ("a", "b", "d")
        if ROUNDS.filter(round=number, unit_id=one)["replied"].item()
    ]
    assert tables.metric("ill", rounds=2).rows() == expected
    assert tables.truth("ill") == 0.5
    ledger = tables.ledger(tmp_path / "ledger", rounds=2)
    assert ledger.rounds == (1, 2)
    assert ledger.covariates == ("battery",)


def test_a_ledger_and_other_identifiers_are_read(tmp_path: Path) -> None:
    place = files(tmp_path, PEOPLE.rename({"unit_id": "device"}))
    source(files(tmp_path)).tables().ledger(tmp_path / "ledger", rounds=2)
    PEOPLE.rename({"unit_id": "device"}).write_csv(place / "people.csv")
    tables = source(place, rounds=tmp_path / "ledger", id="device").tables()
    assert isinstance(tables.replies, RecordedReplies)
    assert tables.replies.replied.tolist() == [
        [False, True, False, True],
        [True, False, False, False],
    ]


def bootstrap(drawn: PopulationDraw, people: pl.DataFrame) -> None:
    """Check that a client's flag, replies, covariates and data are all of one person."""
    assert drawn.observed is not None
    bmi = people["bmi"].to_numpy()
    scaled = drawn.clients.features[:, 0] * bmi.std() + bmi.mean()
    who = [int(np.argmin(np.abs(bmi - one))) for one in scaled]
    assert drawn.population.frame["age"].to_list() == people["age"][who].to_list()
    assert drawn.observed.enrolled.tolist() == people["enrolled"][who].to_list()
    assert drawn.clients.labels.tolist() == people["ill"][who].to_list()
    replied = [False, True, False, True]
    assert drawn.observed.process.advance().replied.tolist() == [replied[k] for k in who]
    assert len(set(drawn.population.unit_ids.tolist())) == people.height


def test_bootstrap_persons_stay_whole_and_are_new_clients(tmp_path: Path) -> None:
    place, drawn = files(tmp_path), []
    for seed in range(8):
        one = source(place, bootstrap=True).draw(np.random.default_rng(seed))
        bootstrap(one, PEOPLE)
        drawn.append(tuple(one.population.frame["age"].to_list()))
    assert len(set(drawn)) > 1


def test_clients_may_have_rows_of_their_own(tmp_path: Path) -> None:
    data = pl.DataFrame(
        {
            "unit_id": ["b", "a", "d", "c", "a"],
            "steps": [1.0, 2.0, 3.0, 4.0, 5.0],
            "ill": [1, 0, 0, 1, 1],
        }
    )
    data.write_csv(tmp_path / "data.csv")
    place = files(tmp_path, PEOPLE.drop("ill", "bmi"))
    clients = source(place, features="steps", data=tmp_path / "data.csv").draw(
        np.random.default_rng(0)
    ).clients  # fmt: skip
    assert clients.counts.tolist() == [2, 1, 1, 1]
    assert clients.labels.tolist() == [0, 1, 1, 1, 0]
    np.testing.assert_allclose(clients.features[:, 0] * np.sqrt(2.0) + 3.0, [2, 5, 1, 4, 3])
    data.filter(pl.col("unit_id") != "c").write_csv(tmp_path / "data.csv")
    with pytest.raises(InputError, match=r"1 clients of the population have no row \(c\)"):
        source(place, features="steps", data=tmp_path / "data.csv").draw(np.random.default_rng(0))


def test_replies_by_frequency_have_their_rate(tmp_path: Path) -> None:
    """Shares of 4,000 rounds within 5 standard errors: a false alarm in a million runs or fewer."""
    rate = pl.Series("rate", [0.0, 0.3, 0.9, 1.0])
    place = files(tmp_path, PEOPLE.with_columns(rate))
    drawn = source(place, rounds=None, reply_rate="rate").draw(np.random.default_rng(0))
    assert drawn.population.covariates == ("age", "os")
    assert drawn.observed is not None
    process = drawn.observed.process
    share = np.mean([process.advance().replied for _ in range(4000)], axis=0)
    assert (share[0], share[2], share[3]) == (0.0, 0.0, 1.0)  # c is not enrolled
    assert abs(share[1] - 0.3) < 5.0 * np.sqrt(0.3 * 0.7 / 4000)
    state = process.state()
    following = process.advance().replied
    process.restore(state)
    assert (process.advance().replied == following).all()


SCENARIO = """
rounds = 6
methods = ["fedavg", "participation-only-hajek", "fedipw-hajek"]
[population]
kind = "observed"
path = "people.csv"
rounds = "rounds.csv"
label = "ill"
features = "bmi + os"
bootstrap = true
"""


def many(place: Path, size: int = 300) -> None:
    rng = np.random.default_rng(5)
    age = rng.normal(size=size)
    people = pl.DataFrame(
        {
            "unit_id": np.arange(size),
            "enrolled": rng.random(size) < 1 / (1 + np.exp(-age)),
            "age": age,
            "os": rng.choice(["x", "y"], size),
            "bmi": rng.normal(size=size),
            "ill": (rng.random(size) < 0.4).astype(int),
        }
    )
    inside = people.filter("enrolled")["unit_id"]
    rounds = pl.concat(
        pl.DataFrame({"round": [r] * len(inside), "unit_id": inside,
                      "replied": rng.random(len(inside)) < 0.5})
        for r in (1, 2)
    )  # fmt: skip
    people.write_csv(place / "people.csv")
    rounds.write_csv(place / "rounds.csv")


def test_scenario_and_study_files_take_observed_populations(tmp_path: Path) -> None:
    many(tmp_path)
    (tmp_path / "run.toml").write_text(SCENARIO)
    scenario = scenario_from(tmp_path / "run.toml")
    assert scenario.is_observed
    assert not scenario.has_limits
    assert "enrollment" not in scenario.settings()
    run = scenario.simulation(limits=False)
    run.advance(6)
    assert run.history().iterates.shape == (3, 7, 3)
    assert run.federation.enrollment_prob is None
    study = """
    seeds = 2
    rounds = 4
    methods = ["fedavg", "fedipw-hajek"]
    [base.population]
    kind = "observed"
    path = "people.csv"
    rounds = "rounds.csv"
    label = "ill"
    features = "bmi"
    bootstrap = true
    [scenarios.plain]
    [scenarios.more]
    population.features = "bmi + age"
    """
    (tmp_path / "study.toml").write_text(study)
    found = study_from(tmp_path / "study.toml")
    sizes = [case.scenario.simulation(limits=False).models["fedavg"].size for case in found.cases]
    assert sizes == [2, 3]
    ages = {tuple(replace(found.cases[0].scenario, seed=seed).simulation(limits=False)
                  .federation.population.frame["age"].to_list()) for seed in (0, 0, 1)}  # fmt: skip
    assert len(ages) == 2  # a seed is a bootstrap population


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[enrollment]\nrate = 0.3\n', r"\[enrollment\] does not go with an observed population"),
        ('[participation]\nrate = 0.3\n', r"\[participation\] does not go with an observed"),
    ],
)  # fmt: skip
def test_simulated_selection_is_refused_beside_it(tmp_path: Path, text: str, message: str) -> None:
    many(tmp_path)
    (tmp_path / "run.toml").write_text(SCENARIO + text)
    with pytest.raises(InputError, match=message):
        scenario_from(tmp_path / "run.toml")


def changed(rows: pl.DataFrame, column: str, values: list[object]) -> pl.DataFrame:
    return rows.with_columns(pl.Series(column, values, strict=False))


@pytest.mark.parametrize(
    ("people", "message"),
    [
        (PEOPLE.drop("enrolled"), r"people.csv has no column enrolled; it has"),
        (PEOPLE.drop("ill"), r"people.csv has no column ill"),
        (changed(PEOPLE, "age", [30.0, 60.0, None, 40.0]), r"people.csv, row 3: age is empty"),
        (changed(PEOPLE, "ill", [0, 1, 2, 0]), r"row 3: ill is 2; it must be true or false"),
        (changed(PEOPLE, "enrolled", [False] * 4), r"nobody is enrolled"),
        (changed(PEOPLE, "unit_id", ["a", "b", "a", "d"]), r"two clients share the unit_id a"),
        (changed(PEOPLE, "bmi", [1.0] * 4), r"feature bmi has the same value in all rows"),
    ],
)
def test_wrong_populations_are_named(tmp_path: Path, people: pl.DataFrame, message: str) -> None:
    with pytest.raises(InputError, match=message):
        source(files(tmp_path, people)).draw(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        (ROUNDS.drop("replied"), r"rounds.parquet has no column replied"),
        (changed(ROUNDS, "replied", [1, 0, 3, 1, 0, 0]), r"row 3: replied is 3; it must be true"),
        (changed(ROUNDS, "battery", [1.0, None, *([0.5] * 4)]), r"row 2: battery is empty"),
        (changed(ROUNDS, "battery", ["x"] * 6), r"must be numbers; battery are not"),
        (changed(ROUNDS, "unit_id", list("cadabd")), r"round 2 lists 1 clients that are not enr"),
        (ROUNDS[:5], r"round 5 lacks 1 enrolled clients \(d\)"),
        (changed(ROUNDS, "unit_id", list("bbdabd")), r"round 2 lists b more than once"),
        (changed(ROUNDS, "round", [1.5] * 6), r"round must be a whole number"),
    ],
)
def test_wrong_rounds_are_named(tmp_path: Path, rounds: pl.DataFrame, message: str) -> None:
    with pytest.raises(InputError, match=message):
        source(files(tmp_path, rounds=rounds)).tables()


def test_other_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no .*people.csv. It must be the table"):
        source(tmp_path).tables()
    with pytest.raises(InputError, match="give one of the two"):
        source(tmp_path, rounds=None)
    with pytest.raises(InputError, match=r"between 0 and 1; row 2 has 1\.5"):
        DrawnReplies(rate=np.array([0.5, 1.5]))
    with pytest.raises(InputError, match="Outcomes have 3 rows and clients 4"):
        ObservedTables(
            clients=PEOPLE, replies=recorded(ROUNDS, PEOPLE), outcomes=PEOPLE.select("ill")[:3]
        )


# The open data sets: small tables with their columns and codes; no row is of a person.


def survey(rows: int = 60) -> pl.DataFrame:
    rng = np.random.default_rng(3)
    tops = {"AGECAT": 6, "RACECAT": 3, "EDCAT": 4, "INCOMC3": 5, "GENDER": 2, "GENHLTH": 5,
            "PHYSACT": 2, "HIGHBP": 3, "ARTHRIT": 3, "ASTHMA": 2, "SMOKE100": 2, "BMICAT3": 3,
            "CHOLCHK": 2, "BINGE2": 2}  # fmt: skip
    columns = {name: rng.integers(1, top + 1, rows) for name, top in tops.items()}
    internet = rng.integers(1, 3, rows)
    use = np.where(internet == 1, rng.integers(1, 7, rows), 0)
    return pl.DataFrame(columns | {"INETHOME": internet, "WEBUSE": use})


def test_the_survey_s_codes_become_enrollment_replies_and_outcomes(tmp_path: Path) -> None:
    table = survey(4).with_columns(
        pl.Series("INETHOME", [1, 1, 2, 1]),
        pl.Series("WEBUSE", [1, 4, 0, 1]),
        pl.Series("GENHLTH", [3, 5, 4, 1]),
        pl.Series("BINGE2", [1, 2, 2, 1]),
        pl.Series("AGECAT", [6, 1, 2, 3]),
    )
    table.write_csv(tmp_path / "survey.csv")
    tables = MichiganPopulation(path=tmp_path / "survey.csv").tables()
    assert tables.enrolled.tolist() == [True, True, False, True]
    assert tables.covariates == ("age", "race", "education", "income", "gender")
    assert tables.clients["age"].to_list() == ["6", "1", "2", "3"]
    assert tables.outcomes["GENHLTH"].to_list() == [0.0, 1.0, 1.0, 0.0]
    assert tables.outcomes["BINGE2"].to_list() == [0.0, 1.0, 1.0, 0.0]
    assert tables.metric("GENHLTH").rows() == [(0, 1, 0.0), (3, 1, 0.0)]
    often = MichiganPopulation(
        path=tmp_path / "survey.csv", replies=SurveyReplies.FREQUENCY
    ).tables()
    assert isinstance(often.replies, DrawnReplies)
    np.testing.assert_allclose(often.replies.rate, [1.0, 1.0 / 7.0, 0.0, 1.0])


def test_the_survey_trains_from_a_scenario_file(tmp_path: Path) -> None:
    survey(400).write_csv(tmp_path / "survey.csv")
    text = """
    rounds = 3
    methods = ["fedavg", "fedipw-hajek"]
    [population]
    kind = "michigan"
    path = "survey.csv"
    replies = "frequency"
    bootstrap = true
    """
    (tmp_path / "run.toml").write_text(text)
    run = scenario_from(tmp_path / "run.toml").simulation(limits=False)
    run.advance(3)
    assert run.history().iterates.shape == (2, 4, len(OUTCOMES))  # the intercept for the label


def test_wrong_cells_of_the_survey_are_named(tmp_path: Path) -> None:
    path = tmp_path / "survey.csv"
    with pytest.raises(InputError, match="PracTools"):
        MichiganPopulation(path=path).tables()
    survey().drop("WEBUSE").write_csv(path)
    with pytest.raises(InputError, match="has no column WEBUSE"):
        MichiganPopulation(path=path).tables()
    survey(3).with_columns(pl.Series("EDCAT", [1, 2, None])).write_csv(path)
    with pytest.raises(InputError, match="row 3: EDCAT is empty"):
        MichiganPopulation(path=path).tables()
    survey(3).with_columns(pl.Series("GENDER", [1, 9, 2])).write_csv(path)
    with pytest.raises(InputError, match="row 2: GENDER is 9; its codes are 1, 2"):
        MichiganPopulation(path=path).tables()
    with pytest.raises(InputError, match="No outcome 'FLU'"):
        MichiganPopulation(path=path, outcome="FLU")


def course(place: Path, **columns: list[object]) -> Path:
    students = {
        "code_module": ["AAA"] * 4 + ["BBB"],
        "code_presentation": ["2013J"] * 5,
        "id_student": [11, 12, 13, 14, 11],
        "gender": ["M", "F", "F", "M", "M"],
        "region": ["Wales", "Wales", "Ireland", "Ireland", "Wales"],
        "highest_education": ["HE Qualification", "No Formal quals", "Lower Than A Level",
                              "Post Graduate Qualification", "HE Qualification"],
        "imd_band": ["", "0-10%", "0-10%", "10-20", "0-10%"],
        "age_band": ["55<=", "35-55", "0-35", "0-35", "0-35"],
        "num_of_prev_attempts": [0, 0, 0, 0, 0],
        "studied_credits": [60, 120, 60, 60, 60],
        "disability": ["N", "Y", "N", "N", "N"],
        "final_result": ["Pass", "Withdrawn", "Distinction", "Fail", "Pass"],
        "date_registration": [-100.0, -40.0, None, 5.0, -3.0],
    }  # fmt: skip
    pl.DataFrame(students | columns).write_parquet(place / "oulad_students.parquet")
    pl.DataFrame(
        {
            "code_module": ["AAA"] * 4 + ["BBB"],
            "code_presentation": ["2013J"] * 5,
            "id_assessment": [7, 5, 6, 8, 9],
            "assessment_type": ["TMA", "TMA", "CMA", "Exam", "TMA"],
            "date": [50, 20, 30, None, 20],
            "weight": [50.0, 50.0, 0.0, 100.0, 100.0],
        }
    ).write_csv(place / "oulad_assessments.csv")
    pl.DataFrame(
        {
            "id_assessment": [5, 5, 5, 7, 6, 9, 5],
            "id_student": [11, 12, 13, 11, 14, 11, 14],
            "date_submitted": [20, 21, 3, 50, 1, 20, -1],
            "is_banked": [0, 0, 0, 0, 0, 0, 1],
        }
    ).write_parquet(place / "oulad_submissions.parquet")
    return place


def test_assessments_become_rounds_and_submissions_in_time_replies(tmp_path: Path) -> None:
    tables = OuladPopulation(path=course(tmp_path), presentation="AAA-2013J").tables()
    assert tables.enrolled.all()
    assert isinstance(tables.replies, RecordedReplies)
    # by date: 5 (11 on its day, 12 late, 13 early, 14 banked), then 7; 6 and 8 are no rounds
    assert tables.replies.replied.tolist() == [
        [True, False, True, False],
        [True, False, False, False],
    ]
    assert tables.outcomes["passed"].to_list() == [1.0, 0.0, 1.0, 0.0]
    assert "attempts" not in tables.covariates  # one value in this presentation
    by = tables.clients.to_dict(as_series=False)
    assert by["education"] == ["HE Qualification", "Lower Than A Level", "Lower Than A Level",
                               "HE Qualification"]  # fmt: skip
    assert by["age"] == ["35-55", "35-55", "0-35", "0-35"]
    assert by["deprivation"][0] == "not recorded"
    assert by["registered"] == ["earlier", "one to three months before",
                                *["last month, later or not recorded"] * 2]  # fmt: skip
    assert oulad_presentations(tmp_path) == ("AAA-2013J", "BBB-2013J")


def test_wrong_cells_of_courses_are_named(tmp_path: Path) -> None:
    wrong = OuladPopulation(path=tmp_path, presentation="AAA-2013J")
    with pytest.raises(InputError, match=r"oulad_students.parquet. It must be OULAD's"):
        wrong.tables()
    course(tmp_path)
    with pytest.raises(InputError, match=r"no presentation 'CCC-2013J'; it has AAA-2013J, BBB"):
        OuladPopulation(path=tmp_path, presentation="CCC-2013J").tables()
    course(tmp_path, final_result=["Pass", "Gone", "Pass", "Fail", "Pass"])
    with pytest.raises(InputError, match=r"row 2: final_result is 'Gone'; its codes are"):
        wrong.tables()
    course(tmp_path, id_student=[11, 12, 12, 14, 11])
    with pytest.raises(InputError, match="a student is twice in AAA-2013J"):
        wrong.tables()


@needs_data
def test_the_survey_has_the_sizes_the_docs_give() -> None:
    tables = MichiganPopulation(path=Path(str(DATA)) / "mibrfss.csv").tables()
    assert (tables.clients.height, int(tables.enrolled.sum())) == (2845, 1857)
    assert tables.metric("HIGHBP").height == 827


@needs_data
def test_the_courses_have_the_sizes_the_docs_give() -> None:
    place = Path(str(DATA))
    names = oulad_presentations(place)
    sizes = [
        OuladPopulation(path=place, presentation=name).tables().clients.height for name in names
    ]
    assert (len(names), sum(sizes)) == (22, 32593)
