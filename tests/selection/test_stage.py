"""Saved models: the same digits when loaded, refused where they are not what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn.naive_bayes import GaussianNB

from fedipw.errors import InputError
from fedipw.selection.classifiers import Classifier
from fedipw.selection.coded import TableSettings, table_model
from fedipw.selection.saved import StageModel
from fedipw.tables.design import Missing
from fedipw.tables.table import Table


def people(n: int = 400) -> pl.DataFrame:
    rng = np.random.default_rng(4)
    age = rng.normal(40.0, 9.0, n)
    return pl.DataFrame(
        {
            "unit_id": np.arange(n),
            "age": pl.Series(age).scatter(range(5, n, 10), None),
            "os": pl.Series(
                rng.choice(["ios", "web", "d\u00e9j\u00e0 \U0001f600", 'a"b\\n'], n).tolist()
            ),
            "flag": rng.random(n) < 0.4,
            "same": np.full(n, 2.5),
            "enrolled": rng.random(n) < 1.0 / (1.0 + np.exp(0.3 - 0.05 * (age - 40.0))),
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    path = tmp_path_factory.mktemp("stage") / "people.parquet"
    people().write_parquet(path)
    settings = TableSettings(missing=Missing.INDICATOR)
    formula = "age*os + C(flag) + same + age**2 + ns(age, 25, 40, 55)"
    return table_model(Table(path), formula, settings=settings)


@pytest.fixture
def saved(model: StageModel, tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    model.save(path)
    return path


def test_a_loaded_model_is_the_one_saved_bit_for_bit(model: StageModel, saved: Path) -> None:
    loaded = StageModel.load(saved)
    assert (loaded.stage, loaded.design, loaded.left_out) == (
        model.stage,
        model.design,
        model.left_out,
    )
    here, there = model.logistic(), loaded.logistic()
    inner = {"frame", "information", "saved_covariance"}  # the file has the covariance they make
    for name in {field.name for field in fields(here)} - inner | {"covariance", "standard_errors"}:
        mine, theirs = getattr(here, name), getattr(there, name)
        if isinstance(mine, np.ndarray):
            assert mine.tobytes() == theirs.tobytes(), name
        else:
            assert mine == theirs, name
    assert there.constant == ("same",)
    assert np.isnan(there.standard_errors[there.names.index("same")])
    other = people().sample(300, seed=1, with_replacement=True)
    for frame in (people(), other, people().head(1)):
        assert loaded.prob(frame)[0].tobytes() == model.prob(frame)[0].tobytes()


def test_saving_again_writes_the_same_bytes_over_the_old_file(saved: Path) -> None:
    first = saved.read_bytes()
    StageModel.load(saved).save(saved)
    assert saved.read_bytes() == first
    assert [path.name for path in saved.parent.iterdir()] == ["model.json"]


def test_the_stage_is_checked_when_asked_for(model: StageModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for stage in ("enrollment", "participation", "availability", "reply"):
        replace(model, stage=stage).save(path)
        assert StageModel.load(path, stage).stage == stage
    with pytest.raises(InputError, match=r"model.json is a model of reply, not of enrollment"):
        StageModel.load(path, "enrollment")


# --- files that are something else


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a saved model: "),
        (b"{}", "is not a saved model of this program"),
        (b"[1, 2]", "is not a saved model of this program"),
        (b'"fedipw-model"', "is not a saved model of this program"),
        (b'{"format": "other", "version": 1}', "is not a saved model of this program"),
        (b'{"format": "fedipw-model", "version": 2}', "has version 2, this program reads 1"),
        (b'{"format": "fedipw-model"}', "has version None, this program reads 1"),
        (b'{"format": "fedipw-model", "version": 1}', "is damaged: KeyError 'design'"),
        (b"\xff\xfe\x00PAR1", "is not a saved model: "),
        (b"unit_id,age\n1,2\n", "is not a saved model: "),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"model.json {message}"):
        StageModel.load(path)


def test_no_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No file .*none.json"):
        StageModel.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="is not a saved model"):
        StageModel.load(tmp_path)


@pytest.mark.parametrize("kept", [0.01, 0.3, 0.7, 0.999])
def test_a_file_cut_short_is_refused(saved: Path, kept: float) -> None:
    text = saved.read_text()
    saved.write_text(text[: int(kept * len(text))])
    with pytest.raises(InputError, match=r"model.json is not a saved model: "):
        StageModel.load(saved)


def shorter_covariance(d: dict[str, Any]) -> None:
    d["fit"]["covariance"] = d["fit"]["covariance"][:-1]


def ragged_covariance(d: dict[str, Any]) -> None:
    d["fit"]["covariance"][0] = d["fit"]["covariance"][0][:-1]


def nan_in_covariance(d: dict[str, Any]) -> None:
    d["fit"]["covariance"][0][0] = float("nan")


def one_coefficient_less(d: dict[str, Any]) -> None:
    d["fit"]["coefficients"].popitem()
    d["fit"]["covariance"] = [row[:-1] for row in d["fit"]["covariance"][:-1]]


def renamed_coefficient(d: dict[str, Any]) -> None:
    d["fit"]["coefficients"] = {f"{k}!": v for k, v in d["fit"]["coefficients"].items()}


def other_order(d: dict[str, Any]) -> None:
    d["fit"]["coefficients"] = dict(reversed(d["fit"]["coefficients"].items()))


def nan_coefficient(d: dict[str, Any]) -> None:
    d["fit"]["coefficients"]["age"] = float("nan")


def infinite_intercept(d: dict[str, Any]) -> None:
    d["fit"]["intercept"] = float("inf")


def text_intercept(d: dict[str, Any]) -> None:
    d["fit"]["intercept"] = "zero"


def null_coefficient(d: dict[str, Any]) -> None:
    d["fit"]["coefficients"]["age"] = None


def coefficients_without_names(d: dict[str, Any]) -> None:
    d["fit"]["coefficients"] = list(d["fit"]["coefficients"].values())


def no_fit(d: dict[str, Any]) -> None:
    d["fit"] = None


def unknown_stage(d: dict[str, Any]) -> None:
    d["stage"] = "selection"


def unknown_status(d: dict[str, Any]) -> None:
    d["fit"]["status"] = "fine"


def no_terms(d: dict[str, Any]) -> None:
    del d["design"]["terms"]


def no_rows(d: dict[str, Any]) -> None:
    del d["fit"]["rows"]


@pytest.mark.parametrize(
    "change",
    [
        shorter_covariance, ragged_covariance, nan_in_covariance, one_coefficient_less,
        renamed_coefficient, other_order, nan_coefficient, infinite_intercept, text_intercept,
        null_coefficient, coefficients_without_names, no_fit, unknown_stage, unknown_status,
        no_terms, no_rows,
    ],
)  # fmt: skip
def test_a_file_tampered_with_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    plain = json.loads(saved.read_text())
    change(plain)
    saved.write_text(json.dumps(plain))
    with pytest.raises(InputError, match=r"model.json is damaged: "):
        StageModel.load(saved)


# --- what cannot be saved


def test_a_classifier_has_no_coefficients_to_save(tmp_path: Path) -> None:
    settings = TableSettings(estimator=Classifier(GaussianNB(), folds=2))
    model = table_model(Table(people()), "flag + os", settings=settings)
    for action in (model.logistic, model.to_json, lambda: model.save(tmp_path / "model.json")):
        with pytest.raises(InputError, match=r"enrollment is a classifier .* Use logistic"):
            action()
    assert list(tmp_path.iterdir()) == []
    prob, kept = model.prob(people())
    assert kept is None
    assert ((prob > 0.0) & (prob < 1.0)).all()


# --- nothing half written


def test_a_model_that_is_no_number_is_not_written(model: StageModel, tmp_path: Path) -> None:
    broken = replace(model, fit=replace(model.logistic(), log_likelihood=float("nan")))
    path = tmp_path / "model.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.save(path)
    assert list(tmp_path.iterdir()) == []
    model.save(path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.save(path)
    kept = StageModel.load(path).logistic()
    assert kept.log_likelihood == model.logistic().log_likelihood  # the old one
    assert [p.name for p in tmp_path.iterdir()] == ["model.json"]


@pytest.mark.parametrize("name", ["missing/model.json", "file/model.json", "folder", "n" * 300])
def test_a_place_that_cannot_be_written_is_named_and_stays_clean(
    model: StageModel, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").write_text("")
    with pytest.raises(InputError, match=f"{name} cannot be written: "):
        model.save(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_read_only_directory_is_named_and_stays_clean(model: StageModel, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o500)
    try:
        try:
            (folder / "probe").touch()
        except PermissionError:
            with pytest.raises(
                InputError, match=r"model.json cannot be written: Permission denied"
            ):
                model.save(folder / "model.json")
            assert list(folder.iterdir()) == []
        else:
            pytest.skip("this user may write to read-only directories")
    finally:
        folder.chmod(0o700)
