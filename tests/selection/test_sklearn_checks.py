"""scikit-learn's own contract for estimators."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from fedipw.selection.propensity import NewtonLogistic, PropensityModel

ESTIMATORS = [
    NewtonLogistic(),
    NewtonLogistic(l2=1.0),
    PropensityModel(),
    PropensityModel(LogisticRegression()),
]


# Some of the checks fit separable data, where a maximum-likelihood fit warns that none exists.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(ESTIMATORS)  # type: ignore[untyped-decorator]
def test_the_estimator_keeps_the_contract(estimator: Any, check: Any) -> None:
    check(estimator)
