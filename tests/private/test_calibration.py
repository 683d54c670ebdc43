"""What a client adds to a private round, and which totals clients can have."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.private.calibration import (
    BalanceMap,
    PrivateCalibration,
    RoundTerms,
    RoundTotals,
    TermLimits,
)
from fedipw.private.sums import LocalSums, SumResult
from fedipw.tables.targets import Targets
from fedipw.weighting.online import OnlineSettings, OnlineState, OnlineSums

Q, P = 3, 4


def terms(**changes: Any) -> RoundTerms:
    names = tuple(f"z{j}" for j in range(Q))
    made = RoundTerms(
        balance=BalanceMap(names=names, mean=np.zeros(Q), scale=np.ones(Q)),
        coefficients=np.array([0.3, -0.2, 0.1]), unit=1.5, limits=TermLimits(clip=2.0),
        parameters=P,
    )  # fmt: skip
    return replace(made, **changes)


def opened(made: RoundTerms, base: Any, b: Any, updates: Any, bits: int = 64) -> SumResult:
    clients: list[Any] = [
        {"train": lambda _, d=d, row=row, u=u: made.contribution(d, row, u)}
        for d, row, u in zip(base, b, updates, strict=True)
    ]
    return LocalSums(clients, minimum=2, bits=bits).sum(made.request)


@given(seed=st.integers(0, 2**32 - 1), augmented=st.booleans())
@settings(max_examples=25)
def test_totals_are_the_sums_of_clients_that_nobody_sees(seed: int, augmented: bool) -> None:
    rng, made = np.random.default_rng(seed), terms(augmented=augmented)
    base, b = rng.uniform(0.5, 2.0, 7), rng.standard_normal((7, Q))
    updates = rng.standard_normal((7, P)) / 3.0
    found = RoundTotals.of(made, opened(made, base, b, updates))
    c = np.minimum(1.0, 2.0 / np.linalg.norm(updates, axis=1))
    e = base * np.exp(b @ made.coefficients)
    np.testing.assert_allclose(found.online.count, e.sum(), rtol=1e-9)
    np.testing.assert_allclose(found.online.first, e @ b, atol=1e-9)
    np.testing.assert_allclose(found.online.second, (e[:, None] * b).T @ b, atol=1e-9)
    np.testing.assert_allclose(found.update, (e * c) @ updates, atol=1e-9)
    np.testing.assert_allclose(found.effective_replies, e.sum() ** 2 / np.sum(e**2), rtol=1e-8)
    if augmented:
        assert found.cross is not None
        np.testing.assert_allclose(
            found.cross, (e * c * b.T) @ updates, atol=1e-9
        )  # fmt: skip
    assert found.fault(made) == ""


@given(seed=st.integers(0, 2**32 - 1), bits=st.sampled_from([32, 64]))
@settings(max_examples=25)
def test_whatever_clients_have_their_totals_are_accepted(seed: int, bits: int) -> None:
    """Heavy tails, weights and updates beyond their bounds: cut, counted, and no fault."""
    rng, made = np.random.default_rng(seed), terms()
    b, updates = 4.0 * rng.standard_t(1.5, (9, Q)), 3.0 * rng.standard_t(2, (9, P))
    base = 10.0 ** rng.uniform(-2.0, 3.0, 9)
    result = opened(made, base, b, updates, bits)
    found = RoundTotals.of(made, result)
    assert result.clipped == 0
    inside = np.clip(b, -10.0, 10.0)
    e = base * np.exp(np.clip(inside @ made.coefficients, -8.0, 8.0))
    most = made.limits.largest_weight * 1.5
    expected = (
        int(np.sum(e > most)), int(np.sum(np.abs(b).max(axis=1) > 10.0)),
        int(np.sum(np.linalg.norm(updates, axis=1) > 2.0)),
    )  # fmt: skip
    assert found.cut == expected
    assert found.fault(made) == ""


def honest() -> tuple[RoundTerms, RoundTotals]:
    rng, made = np.random.default_rng(4), terms()
    b, updates = rng.standard_normal((6, Q)), rng.standard_normal((6, P))
    return made, RoundTotals.of(made, opened(made, np.ones(6), b, updates))


BROKEN: list[tuple[str, Any]] = [
    ("sum of weights", lambda t: replace(t, online=replace(t.online, count=-1.0))),
    ("sum of weights", lambda t: replace(t, online=replace(t.online, count=1e4))),
    ("first moments", lambda t: replace(t, online=replace(t.online, first=np.full(Q, 900.0)))),
    ("second moments", lambda t: replace(t, online=replace(t.online, second=-t.online.second))),
    ("squares", lambda t: replace(t, square=1e5)),
    ("longer than any", lambda t: replace(t, update=np.full(P, 40.0))),
    ("more clients were cut", lambda t: replace(t, cut=(7, 0, 0))),
    ("range of the code", lambda t: replace(t, clipped=1)),
]


@pytest.mark.parametrize(("reason", "change"), BROKEN)
def test_totals_that_no_clients_can_have_are_named(reason: str, change: Any) -> None:
    made, found = honest()
    assert found.fault(made) == ""
    assert reason in change(found).fault(made)


def test_the_step_of_calibration_is_that_of_the_open_method() -> None:
    rng, how = np.random.default_rng(8), OnlineSettings()
    balance = terms().balance
    private = PrivateCalibration.begun(balance, how)
    zeros = np.zeros(Q)
    plain = OnlineState(
        names=balance.names, scale=balance.scale, coefficients=zeros, first=zeros,
        second=np.zeros((Q, Q)),
    )  # fmt: skip
    for _ in range(12):
        b, updates = 0.5 + rng.standard_normal((8, Q)), rng.standard_normal((8, P))
        made = terms(coefficients=private.online.coefficients, unit=private.unit(1.0))
        private = private.after(RoundTotals.of(made, opened(made, np.ones(8), b, updates)))
        plain = plain.learnt(np.ones(8), b, how)
    np.testing.assert_allclose(private.online.coefficients, plain.coefficients, atol=1e-9)
    again = PrivateCalibration.begun(balance, how).restored(private.to_arrays())
    np.testing.assert_array_equal(again.online.coefficients, private.online.coefficients)
    assert again.unit(1.0) == private.unit(1.0)


def test_one_step_is_taken_from_sums_alone() -> None:
    rng, how = np.random.default_rng(9), OnlineSettings()
    base, b = rng.uniform(0.5, 2.0, 6), rng.standard_normal((6, Q))
    zeros = np.zeros(Q)
    state = OnlineState(
        names=("a", "b", "c"), scale=np.ones(Q), coefficients=zeros, first=zeros,
        second=np.zeros((Q, Q)),
    )  # fmt: skip
    ours = state.moved(OnlineSums.of(base, b), how)
    np.testing.assert_array_equal(ours.coefficients, state.learnt(base, b, how).coefficients)


@pytest.mark.parametrize(
    "change",
    [{"unit": 0.0}, {"mean": [0.0]}, {"coefficients": [1.0, float("inf"), 0.0]}, {"names": 3},
     {"limits": {"clip": -1.0}}, {"limits": {"speed": 1.0}}, {"parameters": "many"}],
)  # fmt: skip
def test_terms_that_are_none_are_refused_by_the_client(change: dict[str, Any]) -> None:
    public = dict(terms().request.public)
    assert RoundTerms.of(public).parameters == P
    with pytest.raises(InputError):
        RoundTerms.of(public | change)


def test_spreads_follow_from_targets_or_are_given() -> None:
    targets = Targets.of({"age": 40.0, "age**2": 1700.0, "os[ios]": 0.2})
    found = BalanceMap.of(targets, {"age**2": 900.0})
    np.testing.assert_allclose(found.scale, [10.0, 900.0, 0.4])
    b = found.columns({"age": 50.0, "os": "android"})
    np.testing.assert_allclose(b, [1.0, 800.0 / 900.0, -0.5])
    for gap in ({"age": None, "os": "ios"}, {"age": 3.0}):
        with pytest.raises(InputError):
            found.columns(gap)
