"""Augmented private rounds against the open regression, which sees every reply."""

from __future__ import annotations

import numpy as np
import pytest

from fedipw.combining.regression import RegressionSums, UpdateRegression
from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.private.augmentation import TEMPER, PrivateRegression
from fedipw.private.calibration import BalanceMap, RoundTerms, RoundTotals, TermLimits
from fedipw.private.sums import LocalSums
from fedipw.weighting.functions import effective_sample_size
from fedipw.weighting.pipeline import Regression
from fedipw.weighting.weigher import ClientNumbers

BALANCE = BalanceMap(names=("a", "b"), mean=np.zeros(2), scale=np.ones(2))
ENROLLED, P = 50, 5


def terms(coefficients: list[float], temper: float = TEMPER) -> RoundTerms:
    """Return the terms of an augmented round."""
    return RoundTerms(
        balance=BALANCE, coefficients=np.array(coefficients), unit=1.0, parameters=P,
        limits=TermLimits(clip=50.0), augmented=True, temper=temper,
    )  # fmt: skip


def totals(how: RoundTerms, b: FloatArray, updates: FloatArray) -> RoundTotals:
    """Return the totals of a round of clients with base weight 1."""
    clients = [
        {"train": lambda _, k=k: how.contribution(1.0, b[k], updates[k])} for k in range(len(b))
    ]
    return RoundTotals.of(how, LocalSums(clients, minimum=3, bits=64).sum(how.request))


def test_steps_are_those_of_the_regression_that_sees_every_reply() -> None:
    """Tempered steps corrected by what was learnt from full weights, round after round."""
    rng, private = np.random.default_rng(2), PrivateRegression(2, 2, ENROLLED)
    settings = Regression(adaptive=False, largest=1e9)
    rule = UpdateRegression(P, moments=2, main=2, settings=settings)
    known, replies = 0.0, 0.0
    for index in range(6):
        b, updates = rng.normal(size=(12, 2)), rng.normal(size=(12, P))
        coefficients = [0.1 * index, -0.05 * index]
        e = np.exp(b @ coefficients)
        mild = e**TEMPER
        known = 0.99 * known + effective_sample_size(mild)
        replies = 0.99 * replies + 12
        number = ENROLLED * known / replies
        full = np.column_stack([np.ones(12), b])
        sums = RegressionSums(
            mean=mild / mild.sum() @ full, gram=(e[:, None] * full).T @ full, replies=12
        )
        here = rule.opened(sums, ClientNumbers(ENROLLED, number, number), np.zeros(2))
        expected = mild / mild.sum() @ updates + here.correction(slice(None))
        here.learn(slice(None), (e[:, None] * full).T @ updates)
        here.close()
        found = private.corrected(totals(terms(coefficients), b, updates))
        np.testing.assert_allclose(found, expected, atol=1e-9)
    assert rule.used == 3
    again = PrivateRegression(2, 2, ENROLLED)
    again.restore(private.state())
    b, updates = rng.normal(size=(12, 2)), rng.normal(size=(12, P))
    last = totals(terms([0.1, 0.1]), b, updates)
    np.testing.assert_array_equal(again.corrected(last), private.corrected(last))


def test_a_round_without_products_cannot_be_augmented() -> None:
    """The sums of columns and updates must have been asked for."""
    plain = RoundTerms(
        balance=BALANCE, coefficients=np.zeros(2), unit=1.0, parameters=P,
        limits=TermLimits(clip=1.0),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    found = totals(plain, rng.normal(size=(4, 2)), 0.1 * rng.normal(size=(4, P)))
    with pytest.raises(InputError, match="without augmentation"):
        PrivateRegression(2, 2, ENROLLED).corrected(found)
    with pytest.raises(InputError, match="tempered"):
        terms([0.0, 0.0], temper=1.5)


def test_an_untempered_step_is_the_weighted_mean() -> None:
    """With a power of 1 the sums of the step are those of the weights."""
    rng = np.random.default_rng(1)
    b, updates = rng.normal(size=(9, 2)), rng.normal(size=(9, P))
    found = totals(terms([0.4, 0.2], temper=1.0), b, updates)
    e = np.exp(b @ [0.4, 0.2])
    np.testing.assert_allclose(found.step, e @ updates / e.sum(), atol=1e-12)
    np.testing.assert_allclose(found.mean_columns, e @ b / e.sum(), atol=1e-12)
    assert found.efficiency == pytest.approx(effective_sample_size(e) / 9)


def test_a_weight_at_its_bound_is_within_the_range_of_the_code() -> None:
    """Powers of the largest weight round either way, and are not taken for a client's fault."""
    rng = np.random.default_rng(5)
    for temper in (0.3, 0.5, 0.77):
        how = terms([0.0, 0.0], temper=temper)
        b, updates = rng.normal(size=(4, 2)), rng.normal(size=(4, P))
        vectors = [how.contribution(1e6, b[k], updates[k]) for k in range(4)]
        clients = [{"train": lambda _, v=v: v} for v in vectors]
        found = LocalSums(clients, minimum=3).sum(how.request)
        assert found.clipped == 0
        made = RoundTotals.of(how, found)
        assert made.cut == (4, 0, 0)
        assert made.fault(how) == ""
