"""``fedipw weights`` with classifiers of one's choice, and with a reference sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from fedipw.calibration import Entropy, calibrated
from fedipw.selection.classifiers import Platt, client_folds, cross_fit
from fedipw.selection.enrollment import reference_sample_fit
from worlds import NONLINEAR

from .command import Files, fedipw

BOOSTING = ("--classifier", "boosting", "--folds", 3)
PLATT = (*BOOSTING, "--score-calibration", "platt")
FOREST = ("--classifier", "forest", "--folds", 2, "--refit-every", 2)
PROBABILITIES = ("enrollment_prob", "participation_prob", "inclusion_prob")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files.of(NONLINEAR, tmp_path_factory.mktemp("weights")).put()


Weighed = Callable[..., tuple[pl.DataFrame, dict[str, Any]]]


@pytest.fixture(scope="module")
def weighed(files: Files) -> Weighed:
    """What a command gave when these options were first asked for: each is run once."""
    return cache(files.weighed)


@pytest.mark.parametrize(
    "options",
    [
        BOOSTING,
        PLATT,
        (*BOOSTING, "--participation-fit", "pooled"),
        ("--classifier", "sklearn.ensemble.ExtraTreesClassifier", "--scheme", "participation-only"),
        FOREST,
        ("--classifier", "logistic", "--folds", 3),
    ],
)
def test_a_classifier_weighs_every_reply_by_probabilities_of_its_own(
    weighed: Weighed, options: tuple[object, ...]
) -> None:
    plain, _ = weighed(*_scheme(options))
    got, summary = weighed(*options)
    assert got.select("unit_id", "round").equals(plain.select("unit_id", "round"))
    if "participation-only" in options:  # trees grown to the end may be sure of enrollment
        assert got["participation_prob"].is_between(0.0, 1.0, closed="right").all()
    else:
        for name in PROBABILITIES:
            assert got[name].is_between(0.0, 1.0, closed="none").all(), name
    assert summary["sources"]["model"] >= NONLINEAR.rounds - 2
    assert json.dumps(summary, allow_nan=False)
    modelled = got["round"] == NONLINEAR.rounds
    for name in ("enrollment_prob", "participation_prob"):
        apart = (got[name] / plain[name] - 1).abs().filter(modelled)
        assert apart.max() > 1e-6, name  # type: ignore[operator]
    if "participation-only" not in options:
        for _, part in got.group_by("round"):
            raw = 1 / part["inclusion_prob"]
            np.testing.assert_allclose(part["weight"], raw / raw.sum(), rtol=1e-12)


def test_a_classifier_gives_the_same_weights_again(files: Files, weighed: Weighed) -> None:
    assert files.weighed(*FOREST)[0].equals(weighed(*FOREST)[0])


def _scheme(options: tuple[object, ...]) -> tuple[object, ...]:
    if "--scheme" not in options:
        return ()
    return "--scheme", options[options.index("--scheme") + 1]


def test_enrollment_by_boosting_is_the_cross_fit_of_the_table(
    files: Files, weighed: Weighed
) -> None:
    got, _ = weighed(*PLATT)
    people = files.people
    fold_of = client_folds(
        people["enrolled"], people["unit_id"].to_numpy(), folds=3, rng=np.random.default_rng(0)
    )
    expected = cross_fit(
        HistGradientBoostingClassifier(random_state=0), people.select("z1", "z2").to_numpy(),
        people["enrolled"], fold_of, calibration=Platt(),
    ).prob  # fmt: skip
    np.testing.assert_allclose(
        got["enrollment_prob"], expected[got["unit_id"].to_numpy()], rtol=1e-9
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--classifier", "bosting"), ["No classifier 'bosting'", "logistic, boosting, forest"]),
        (("--classifier", "sklearn.svm.LinearSVC"), ["No classifier", "predict_proba"]),
        (("--classifier", "sklearn.nothing.Here"), ["cannot be made"]),
        (("--classifier", "json.loads"), ["cannot be made"]),
        ((*BOOSTING, "--score-calibration", "plat"), ["'plat'", "platt", "isotonic"]),
        (
            ("--classifier", "boosting", "--folds", 0, "--score-calibration", "platt"),
            ["calibrated out of fold"],
        ),
        ((*BOOSTING, "--l2", 1.0), ["l2 is a penalty of logistic regression"]),
        (("--classifier", "boosting", "--folds", 1), ["1 folds"]),
    ],
)
def test_classifiers_that_cannot_be_had_end_with_code_2(
    files: Files, options: tuple[object, ...], words: list[str]
) -> None:
    code, _, err = files.weights(*options, out="bad.parquet")
    assert code == 2
    for word in words:
        assert word in err
    assert not (files.where / "bad.parquet").exists()


@pytest.mark.parametrize("options", [BOOSTING, ("--folds", 3), ("--score-calibration", "platt")])
def test_models_of_a_classifier_are_not_saved(files: Files, options: tuple[object, ...]) -> None:
    before = sorted(files.where.rglob("*"))
    code, _, err = files.weights(
        *options, "--save-models", files.where / "models", out="saved.parquet"
    )
    assert code == 2
    assert "no coefficients to write" in err
    assert sorted(files.where.rglob("*")) == before


# A reference sample.


@pytest.fixture(scope="module")
def sampled(files: Files) -> pl.DataFrame:
    """Return a sample of the population, people with large z1 drawn more often."""
    rng = np.random.default_rng(3)
    chance = np.where(files.people["z1"].to_numpy() > 0, 0.5, 0.25)
    sample = files.people.drop("enrolled").with_columns(design_weight=pl.Series(1 / chance))
    sample = sample.filter(pl.Series(rng.random(len(chance)) < chance))
    sample.write_parquet(files.where / "sample.parquet")
    return sample


def test_a_reference_sample_takes_the_place_of_the_population_table(
    files: Files, sampled: pl.DataFrame
) -> None:
    got, summary = files.weighed("--scheme", "fedipw", source="reference")
    by_table, _ = files.weighed()
    names = ["z1", "z2"]
    inside = files.people.filter("enrolled")
    fit = reference_sample_fit(
        inside.select(names).to_numpy(), sampled.select(names).to_numpy(),
        sampled["design_weight"].to_numpy(), names,
    )  # fmt: skip
    prob = dict(zip(inside["unit_id"], fit.prob, strict=True))
    expected = np.array([prob[unit] for unit in got["unit_id"]])
    np.testing.assert_allclose(got["enrollment_prob"], expected, rtol=1e-10)
    np.testing.assert_allclose(
        got["participation_prob"], by_table["participation_prob"], rtol=1e-10
    )
    size = sampled["design_weight"].sum()
    np.testing.assert_allclose(got["weight"], 1 / (size * got["inclusion_prob"]), rtol=1e-12)
    assert summary["method"] == "fedipw"
    assert summary["overlap"] is None
    assert any("reference sample" in note for note in summary["notes"])
    near = np.corrcoef(got["enrollment_prob"], by_table["enrollment_prob"])[0, 1]
    assert near > 0.95


def test_calibration_meets_the_means_a_reference_sample_estimates(
    files: Files, sampled: pl.DataFrame
) -> None:
    weights, b = sampled["design_weight"].to_numpy(), sampled.select("z1", "z2").to_numpy()
    share = weights / weights.sum()
    mean = share @ b
    se = np.sqrt(share**2 @ (b - mean) ** 2)
    inside = files.people.filter("enrolled")
    own = inside.select("z1", "z2").to_numpy()
    for scheme, errors in (("calibrated-entropy", None), ("calibrated-noise-aware", se)):
        got, _ = files.weighed("--scheme", scheme, source="reference")
        q = calibrated(own, mean, distance=Entropy(), se=errors, names=["z1", "z2"]).weights
        expected = dict(zip(inside["unit_id"], q, strict=True))
        np.testing.assert_allclose(
            got["enrollment_weight"], [expected[unit] for unit in got["unit_id"]], rtol=1e-9
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "Give --population, or --enrolled together with --targets or --reference"),
        (("--enrolled", "e.parquet"), "--enrolled and --targets go together, or --enrolled and"),
        (("--population", "p.csv", "--targets", "t.csv"), "--enrolled and --targets go together"),
        (("--enrolled", "e.parquet", "--reference", "s.parquet"), "go together"),
        (("--enrolled", "e.parquet", "--reference-weight", "d"), "go together"),
        (
            ("--enrolled", "e.parquet", "--reference", "s.parquet", "--reference-weight", "d",
             "--targets", "t.csv"),
            "takes the place of --targets",
        ),
        (
            ("--population", "p.parquet", "--reference", "s.parquet", "--reference-weight", "d"),
            "--enrolled and --reference go together",
        ),
    ],
)  # fmt: skip
def test_sources_that_do_not_go_together_are_refused(
    files: Files, options: tuple[object, ...], words: str
) -> None:
    out = files.where / "none.parquet"
    code, _, err = fedipw("weights", *options, "--rounds", files.where / "rounds", "--out", out)
    assert code == 2
    assert words in err


@pytest.mark.parametrize(
    ("scheme", "words"),
    [("collapsed", "needs a table of the whole population"), ("oracle", "oracle")],
)
def test_methods_that_need_everybody_are_refused_with_a_sample(
    files: Files, sampled: pl.DataFrame, scheme: str, words: str
) -> None:
    del sampled
    code, _, err = files.weights("--scheme", scheme, source="reference", out="none.parquet")
    assert code == 2
    assert words in err


def test_a_sample_without_its_weights_is_refused(files: Files, tmp_path: Path) -> None:
    (tmp_path / "sample.csv").write_text("z1,z2\n0.1,0.2\n")
    code, _, err = fedipw(
        "weights", "--enrolled", files.where / "enrolled.parquet", "--reference",
        tmp_path / "sample.csv", "--reference-weight", "design_weight", "--rounds",
        files.where / "rounds", "--out", tmp_path / "w.parquet",
    )  # fmt: skip
    assert code == 2
    assert "design_weight" in err
