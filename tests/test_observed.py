"""The study of selection as observed reads its table right, and the docs show what was saved."""

import json
import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from benchmarks.observed import (
    COVARIATES,
    ESTIMATORS,
    FILE,
    INTERNET,
    OUTCOMES,
    RESULT,
    STATIC,
    USE,
    estimated,
    holds,
    main,
    markdown,
    observed,
)

from fedipw.errors import InputError

DATA = os.environ.get("FEDIPW_DATA")


def made(rows: int = 4) -> pl.DataFrame:
    """Return a table of the survey's columns and codes; no row is of a person."""
    rng = np.random.default_rng(3)
    levels = {"AGECAT": 6, "RACECAT": 3, "EDCAT": 4, "INCOMC3": 5, "GENDER": 2}
    columns = {name: rng.integers(1, top + 1, rows) for name, top in levels.items()}
    internet = rng.integers(1, 3, rows)
    columns |= {INTERNET: internet, USE: np.where(internet == 1, rng.integers(1, 7, rows), 0)}
    tops = (5, 2, 3, 3, 2, 2, 3, 2, 2)
    return pl.DataFrame(
        columns
        | {
            one.column: rng.integers(1, top + 1, rows)
            for one, top in zip(OUTCOMES, tops, strict=True)
        }
    )


def written(table: pl.DataFrame, place: Path) -> Path:
    table.write_csv(place / FILE)
    return place / FILE


def test_codes_become_enrollment_replies_and_outcomes(tmp_path: Path) -> None:
    table = made().with_columns(
        pl.Series(INTERNET, [1, 1, 2, 1]),
        pl.Series(USE, [1, 4, 0, 1]),
        pl.Series("GENHLTH", [3, 5, 4, 1]),
        pl.Series("HIGHBP", [1, 2, 3, 1]),
        pl.Series("BINGE2", [1, 2, 2, 1]),
        pl.Series("AGECAT", [6, 1, 2, 3]),
    )
    data = observed(written(table, tmp_path))
    assert data.population["enrolled"].to_list() == [True, True, False, True]
    assert data.population["age"].to_list() == ["6", "1", "2", "3"]
    assert set(data.population.columns) == {"unit_id", "enrolled", *COVARIATES.values()}
    assert data.round["unit_id"].to_list() == [0, 1, 3]
    assert data.round["replied"].to_list() == [True, False, True]
    assert data.outcomes["GENHLTH"].to_list() == [0.0, 1.0, 1.0, 0.0]
    assert data.outcomes["HIGHBP"].to_list() == [1.0, 0.0, 0.0, 1.0]
    assert data.outcomes["BINGE2"].to_list() == [0.0, 1.0, 1.0, 0.0]
    assert data.truth("GENHLTH") == 0.5
    assert data.metric("HIGHBP").rows() == [(0, 1, 1.0), (3, 1, 1.0)]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="PracTools"):
        observed(tmp_path / FILE)
    with pytest.raises(InputError, match="no column WEBUSE"):
        observed(written(made().drop(USE), tmp_path))
    gap = made().with_columns(pl.Series("EDCAT", [1, 2, None, 4]))
    with pytest.raises(InputError, match="line 4: EDCAT is empty"):
        observed(written(gap, tmp_path))


def test_every_outcome_is_estimated_three_ways(tmp_path: Path) -> None:
    found = estimated(observed(written(made(1500), tmp_path)))
    assert len(found["estimates"]) == len(OUTCOMES) * len(ESTIMATORS)
    json.dumps(found, allow_nan=False)
    plain = found["estimates"][0]
    table = made(1500).filter((pl.col(INTERNET) == 1) & (pl.col(USE) == 1))
    assert found["respondents"] == table.height
    assert plain["estimate"] == pytest.approx((table["GENHLTH"] >= 4).mean(), rel=1e-12)


def test_the_docs_show_what_was_saved(tmp_path: Path) -> None:
    saved = json.loads(RESULT.read_text(encoding="utf-8"))
    assert (STATIC / "observed.md").read_text(encoding="utf-8") == markdown(saved)
    main(["--saved", str(RESULT), "--out", str(tmp_path)])
    assert (tmp_path / "observed.png").stat().st_size > 10_000


@pytest.mark.skipif(DATA is None, reason=f"FEDIPW_DATA does not name the directory of {FILE}")
def test_saved_results_are_those_of_the_survey() -> None:
    saved = json.loads(RESULT.read_text(encoding="utf-8"))
    found = estimated(observed(Path(str(DATA)) / FILE))
    for old, new in zip(saved["estimates"], found["estimates"], strict=True):
        assert (old["outcome"], old["estimator"]) == (new["outcome"], new["estimator"])
        # fits converge to a gradient norm whose effect on a share is far below this
        assert new["estimate"] == pytest.approx(old["estimate"], rel=1e-6)
        assert new["se"] == pytest.approx(old["se"], rel=1e-6)
        assert holds(old) == holds(new)
