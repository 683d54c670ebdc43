"""Studies of observed selection run on small tables, and the docs show what was saved."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from benchmarks.observed.__main__ import RESULTS, STATIC, STUDIES, main
from benchmarks.observed.courses import course
from benchmarks.observed.evaluation import (
    ESTIMATORS,
    coverage,
    estimates,
    fitted_probabilities,
    redrawn,
    survey,
)
from benchmarks.observed.training import BEST, MEASURES, Case, judged, summary

from fedipw.lab.observed import ObservedTables, RecordedReplies
from fedipw.lab.open_data import OUTCOMES, PASSED, MichiganPopulation

DATA = os.environ.get("FEDIPW_DATA")


def made(rows: int, place: Path) -> Path:
    """Write a table of the survey's columns and codes; no row is of a person."""
    rng = np.random.default_rng(3)
    tops = {"AGECAT": 3, "RACECAT": 2, "EDCAT": 2, "INCOMC3": 2, "GENDER": 2, "GENHLTH": 5,
            "PHYSACT": 2, "HIGHBP": 3, "ARTHRIT": 3, "ASTHMA": 2, "SMOKE100": 2, "BMICAT3": 3,
            "CHOLCHK": 2, "BINGE2": 2}  # fmt: skip
    columns = {name: rng.integers(1, top + 1, rows) for name, top in tops.items()}
    internet = rng.integers(1, 3, rows)
    use = np.where(internet == 1, rng.integers(1, 4, rows), 0)
    table = pl.DataFrame(columns | {"INETHOME": internet, "WEBUSE": use})
    table.write_csv(place / "mibrfss.csv")
    return place


def test_every_outcome_is_estimated_by_every_estimator(tmp_path: Path) -> None:
    tables = survey(made(900, tmp_path))
    found = estimates(tables)
    assert [(x.outcome, x.estimator) for x in found] == [
        (outcome, name) for outcome in OUTCOMES for name in ESTIMATORS
    ]
    by = {x.estimator: x for x in found if x.outcome == "GENHLTH"}
    assert isinstance(tables.replies, RecordedReplies)
    replied, value = tables.replies.replied[0], tables.outcomes["GENHLTH"].to_numpy()
    assert by["plain"].estimate == pytest.approx(value[replied].mean(), rel=1e-12)
    # Hájek's mean and the one of enrollment alone, by probabilities fitted elsewhere
    first, second = fitted_probabilities(tables)
    both, one = 1.0 / (first * second)[replied], 1.0 / first[replied]
    assert by["hajek"].estimate == pytest.approx((both @ value[replied]) / both.sum(), rel=1e-6)
    assert by["enrollment"].estimate == pytest.approx((one @ value[replied]) / one.sum(), rel=1e-6)
    alone = 1.0 / second[replied]
    expected = (alone @ value[replied]) / alone.sum()
    assert by["participation"].estimate == pytest.approx(expected, rel=1e-6)
    assert all(x.truth == value.mean() for x in by.values())


def test_bootstrap_populations_keep_or_redraw_selection(tmp_path: Path) -> None:
    tables = survey(made(900, tmp_path))
    drawn = redrawn(tables, fitted_probabilities(tables), np.random.default_rng(0))
    assert isinstance(drawn.replies, RecordedReplies)
    assert not (drawn.replies.replied[0] & ~drawn.enrolled).any()
    found = coverage(tables, 2)
    for kind in ("observed", "redrawn"):
        assert len(found[kind]) == len(OUTCOMES) * len(ESTIMATORS)
        assert all(0.0 <= row["coverage"] <= 1.0 for row in found[kind])


def test_models_are_judged_on_everybody(tmp_path: Path) -> None:
    made(900, tmp_path)
    population = MichiganPopulation(path=tmp_path / "mibrfss.csv", bootstrap=True)
    case = Case("small", population, ("age",), ("fedavg", "fedipw-hajek"))
    found = judged(case, 0, rounds=4)
    assert found[BEST]["excess_loss"] == pytest.approx(0.0, abs=1e-12)
    assert found["fedavg"]["excess_loss"] > 0.0
    assert [*found["fedavg"]["subgroups"]] == ["age = 1", "age = 2", "age = 3"]
    made_of = summary(case, 2, rounds=4)["methods"]["fedipw-hajek"]
    against = made_of["excess_loss"]["against_fedavg"]
    pairs = [judged(case, seed, rounds=4) for seed in (0, 1)]
    expected = np.mean(
        [one["fedipw-hajek"]["excess_loss"] - one["fedavg"]["excess_loss"] for one in pairs]
    )
    assert against["difference"] == pytest.approx(expected, rel=1e-12)
    assert set(MEASURES) < set(made_of)


def test_a_course_whose_replies_depend_on_the_outcome_is_warned_of() -> None:
    """Those who pass reply with 9 times the odds: beyond 3 standard errors in all but 1 in 1e9."""
    rng = np.random.default_rng(1)
    size, rounds = 600, 4
    passed = rng.random(size) < 0.5
    replied = rng.random((rounds, size)) < np.where(passed, 0.75, 0.25)
    clients = pl.DataFrame(
        {
            "unit_id": np.arange(size),
            "enrolled": True,
            "credits": rng.integers(1, 5, size) * 30,
            "gender": rng.choice(["F", "M"], size),
        }
    )
    tables = ObservedTables(
        clients=clients,
        replies=RecordedReplies(replied=replied, covariates=np.empty((rounds, size, 0))),
        outcomes=pl.DataFrame({PASSED: passed.astype(float)}),
    )
    found = course("made", tables)
    assert found["warned"]
    assert (found["correction"], found["dependence"]) == ("Not fully", "Yes")
    assert found["hajek"]["low"] > found["truth"]  # no weight corrects it
    low, high = found["bounds"]["5"]["both"]
    assert low < found["truth"] < high
    low, high = found["bounds"]["5"]["enrollment"]
    assert high - low < 1e-9  # everybody is enrolled
    fair = replace(tables, outcomes=pl.DataFrame({PASSED: rng.permutation(passed).astype(float)}))
    assert not course("made", fair)["warned"]


@pytest.mark.parametrize("study", STUDIES)
def test_the_docs_show_what_was_saved(tmp_path: Path, study: str) -> None:
    main([study, "--saved", "--out", str(tmp_path)])
    for path in tmp_path.iterdir():
        if path.suffix == ".md":
            assert path.read_text(encoding="utf-8") == (STATIC / path.name).read_text(
                encoding="utf-8"
            )
        else:
            assert path.stat().st_size > 20_000
            assert (STATIC / path.name).exists()


def test_the_readme_says_what_was_saved() -> None:
    saved = json.loads((RESULTS / "observed-evaluation.json").read_text(encoding="utf-8"))
    errors = {
        name: [x["estimate"] - x["truth"] for x in saved["estimates"] if x["estimator"] == name]
        for name in ("plain", "hajek")
    }
    plain, weighted = (100 * np.sqrt(np.mean(np.square(errors[n]))) for n in ("plain", "hajek"))
    held = [sum(x["holds"] for x in saved["estimates"] if x["estimator"] == n) for n in errors]
    text = " ".join((STATIC.parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert f"root mean square error of {plain:.1f} percentage points" in text
    assert f"bring that to {weighted:.1f} points and one of nine" in text
    assert held == [5, 8]
    assert saved["coverage"]["populations"] >= 300


def test_studies_need_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDIPW_DATA", raising=False)
    with pytest.raises(SystemExit):
        main(["evaluation", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        main(["nothing", "--out", str(tmp_path)])


@pytest.mark.skipif(DATA is None, reason="FEDIPW_DATA does not name the directory of the survey")
def test_saved_estimates_are_those_of_the_survey() -> None:
    saved = json.loads((RESULTS / "observed-evaluation.json").read_text(encoding="utf-8"))
    again = estimates(survey(Path(str(DATA))))
    for row, one in zip(saved["estimates"], again, strict=True):
        assert (row["outcome"], row["estimator"]) == (one.outcome, one.estimator)
        assert row["estimate"] == pytest.approx(one.estimate, rel=1e-6)
        assert (row["low"], row["high"]) == pytest.approx((one.low, one.high), rel=1e-6)
