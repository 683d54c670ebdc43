"""Guards of weights: what a cap and tempering keep, and how guards are named and joined."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.weighting.functions import capped, effective_sample_size, trimmed
from fedipw.weighting.methods import METHODS, method_named
from fedipw.weighting.pipeline import Cap, Guards, NoGuard, Temper, Trim

# Sums of at most 40 numbers of like size, and a division: some tens of rounding errors.
CLOSE = 1e-12
SIZES = st.floats(1e-4, 1e4)
ANY = arrays(np.float64, st.integers(1, 40), elements=st.one_of(st.just(0.0), SIZES))
POSITIVE = arrays(np.float64, st.integers(1, 40), elements=SIZES)
SHARES = st.floats(0.01, 1.0)
POWERS = st.floats(0.0, 1.0)


def plainly_capped(weights: FloatArray, share: float) -> FloatArray:
    """Return (W20) by bisection on the factor f, where there is one."""
    total, low, high = sum(abs(w) for w in weights), 1.0, 1e12
    for _ in range(200):
        f = (low * high) ** 0.5
        if sum(min(abs(w) * f, share * total) for w in weights) < total:
            low = f
        else:
            high = f
    return np.array([np.sign(w) * min(abs(w) * high, share * total) for w in weights])


@given(ANY, st.lists(st.sampled_from([-1.0, 1.0]), min_size=40, max_size=40), SHARES)
def test_a_cap_keeps_the_sum_of_sizes_the_signs_and_the_order(
    sizes: FloatArray, signs: list[float], share: float
) -> None:
    weights = sizes * np.array(signs[: len(sizes)])
    report = capped(weights, share)
    out, total = report.weights, float(sizes.sum())
    np.testing.assert_allclose(np.abs(out).sum(), total, rtol=CLOSE)
    np.testing.assert_array_equal(np.sign(out), np.sign(weights))
    room = max(share, 1.0 / max(int(np.count_nonzero(weights)), 1))  # fewer than 1/c carry the same
    assert np.abs(out).max() <= room * total * (1.0 + CLOSE)
    np.testing.assert_allclose(report.cap, room * total if total else 0.0, rtol=CLOSE)
    order = np.argsort(sizes, kind="stable")
    steps = np.diff(np.abs(out)[order])
    assert (steps >= -CLOSE * total).all()
    assert 0.0 <= report.mass <= 1.0
    assert report.changed == 0 or report.changed >= (sizes > report.cap * (1.0 + CLOSE)).sum()


@given(POSITIVE, SHARES)
def test_a_cap_is_its_equation(sizes: FloatArray, share: float) -> None:
    if share * len(sizes) <= 1.0:
        expected = np.full(len(sizes), sizes.mean())  # too few to carry the sum below the cap
    else:
        expected = plainly_capped(sizes, share)
    # Near f = infinity, where the smallest weights must carry almost all, f has few digits left.
    np.testing.assert_allclose(capped(sizes, share).weights, expected, rtol=1e-6)


@given(st.integers(1, 60), SIZES, SHARES)
def test_equal_weights_stay_as_they_are(size: int, value: float, share: float) -> None:
    weights = np.full(size, value)
    np.testing.assert_allclose(capped(weights, share).weights, weights, rtol=CLOSE)
    for guard in (Cap(share), Guards((Temper(0.5), Cap(share)))):
        report = guard.applied(weights)
        assert report is not None
        np.testing.assert_allclose(report.weights, weights, rtol=CLOSE)
        assert (report.changed, report.mass) == (0, 0.0)


@given(ANY, SHARES)
def test_a_cap_below_which_all_weights_are_changes_nothing(
    weights: FloatArray, share: float
) -> None:
    once = capped(weights, share)
    if weights.max() <= share * weights.sum():
        assert once.weights is weights
        assert (once.changed, once.mass) == (0, 0.0)
    again = capped(once.weights, share)
    np.testing.assert_allclose(again.weights, once.weights, rtol=CLOSE, atol=0.0)


@given(POSITIVE, SHARES, st.data())
def test_presence_counts_a_weight_as_often_as_it_says(
    weights: FloatArray, share: float, data: st.DataObject
) -> None:
    times = data.draw(arrays(np.int64, len(weights), elements=st.integers(1, 3)))
    for guard in (Cap(share), Temper(0.6), Guards((Temper(0.6), Cap(share)))):
        each = guard.expected(weights, times.astype(np.float64))
        repeated = guard.applied(np.repeat(weights, times))
        assert repeated is not None
        np.testing.assert_allclose(np.repeat(each, times), repeated.weights, rtol=1e-10)


@pytest.mark.parametrize(
    ("share", "replies", "limit"),
    [
        (0.1, 1, 1.0), (0.1, 5, 1.0), (0.1, 12, 5 / 12), (0.1, 49, 5 / 49), (0.1, 50, 0.1),
        (0.1, 1000, 0.1), (0.3, 16, 5 / 16), (0.3, 17, 0.3), (1.0, 1000, 1.0), (0.1, 0.3, 1.0),
    ],
)  # fmt: skip
def test_the_limit_is_a_share_or_five_times_the_equal_share(
    share: float, replies: float, limit: float
) -> None:
    assert Cap(share).limit(replies) == pytest.approx(limit, rel=1e-15)


@given(POSITIVE, st.floats(0.02, 0.5))
def test_a_guarded_round_has_no_reply_above_the_limit(weights: FloatArray, share: float) -> None:
    shares = weights / weights.sum()
    report = Cap(share).applied(shares)
    assert report is not None
    limit = max(share, 5.0 / len(shares))
    assert report.weights.max() <= min(limit, 1.0) * (1.0 + CLOSE)
    np.testing.assert_allclose(report.weights.sum(), 1.0, rtol=CLOSE)
    assert report.changed >= (shares > limit * (1.0 + CLOSE)).sum()
    if len(shares) <= 5:
        assert report.weights is shares


@given(POSITIVE, POWERS)
def test_tempering_keeps_the_sum_and_the_order_and_powers_the_ratios(
    weights: FloatArray, power: float
) -> None:
    report = Temper(power).applied(weights)
    assert report is not None
    np.testing.assert_allclose(report.weights.sum(), weights.sum(), rtol=CLOSE)
    assert (np.diff(report.weights[np.argsort(weights, kind="stable")]) >= 0.0).all()
    ratios = report.weights / report.weights[0]
    np.testing.assert_allclose(ratios, (weights / weights[0]) ** power, rtol=1e-11)
    assert (report.changed, report.mass, report.cap) == (0, 0.0, report.weights.max())
    # tempering evens: Kish's number of replies does not fall
    assert effective_sample_size(report.weights) >= effective_sample_size(weights) * (1 - CLOSE)


@given(ANY, st.lists(st.sampled_from([-1.0, 1.0]), min_size=40, max_size=40))
def test_power_one_changes_nothing(sizes: FloatArray, signs: list[float]) -> None:
    weights = sizes * np.array(signs[: len(sizes)])
    report = Temper(1.0).applied(weights)
    assert report is not None
    np.testing.assert_array_equal(report.weights, weights)


@given(POSITIVE)
def test_power_zero_makes_all_equal(weights: FloatArray) -> None:
    report = Temper(0.0).applied(weights)
    assert report is not None
    np.testing.assert_allclose(report.weights, weights.mean(), rtol=CLOSE)


def test_weights_that_sum_to_nothing_are_left() -> None:
    for weights in (np.zeros(3), np.array([1.0, -1.0])):
        for guard in (Temper(0.5), Cap(0.1)):
            report = guard.applied(weights)
            assert report is not None
            np.testing.assert_array_equal(report.weights, weights)


def test_a_chain_reports_what_all_its_guards_cut() -> None:
    weights = np.array([0.9, *np.full(99, 0.1 / 99)])
    chain = Guards((Trim(20.0), Temper(0.75), Cap(0.1)))
    first = trimmed(weights, 20.0)
    second = Temper(0.75).applied(first.weights)
    assert second is not None
    third = capped(second.weights, 0.1)
    report = chain.applied(weights)
    assert report is not None
    np.testing.assert_array_equal(report.weights, third.weights)
    assert first.changed == third.changed == 1
    assert report.changed == 2
    assert report.mass == first.mass + third.mass > third.mass > 0.0
    assert report.cap == third.cap == pytest.approx(0.1 * first.weights.sum(), rel=CLOSE)
    one = np.ones(len(weights))
    expected = Cap(0.1).expected(Temper(0.75).expected(Trim(20.0).expected(weights, one), one), one)
    np.testing.assert_array_equal(chain.expected(weights, one), expected)


def test_guards_that_do_nothing_report_nothing() -> None:
    assert Guards((NoGuard(), NoGuard())).applied(np.ones(3)) is None
    alone, joined = Cap(0.1).applied(np.ones(3)), Guards((NoGuard(), Cap(0.1))).applied(np.ones(3))
    assert alone is not None
    assert joined is not None
    assert (joined.cap, joined.changed, joined.mass) == (alone.cap, alone.changed, alone.mass)


def test_guards_are_joined_by_then() -> None:
    joined = Guards((Temper(0.75), Cap()))
    assert METHODS["augmented"].guard == joined
    assert method_named("fedipw-hajek, guard=temper(0.75) then cap").guard == joined
    assert method_named("fedipw-hajek, guard=temper then cap(0.1)").guard == joined
    three = method_named("fedipw-hajek, guard=trim(20) then temper(0.5) then cap(0.3)").guard
    assert three == Guards((Trim(20.0), Temper(0.5), Cap(0.3)))
    assert method_named("augmented, guard=none").guard == NoGuard()
    same = "calibrated-online, guard=temper(0.5) then cap, augmentation=regression"
    assert method_named(same).name == "augmented-online"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temper(1.5)", r"'temper\(1.5\)' is no guard: Weights are tempered by a power in"),
        ("temper(-0.1)", "tempered by a power in"),
        ("temper(nan)", "tempered by a power in"),
        ("cap(0)", "A share must lie in"),
        ("cap(1.01)", "A share must lie in"),
        ("cap(nan)", "A share must lie in"),
        ("cap(tenth)", "is no guard"),
        ("cap()", "is no guard"),
        ("none(2)", "the guard none takes no setting"),
        ("temper(0.75) then", "no guard 'temper"),
        ("then cap", "no guard 'then cap'"),
        ("temper then capp", r"no guard 'capp'; did you mean cap\?"),
        ("temper(0.75) then cap(2)", "A share must lie in"),
        ("temper(0.75), cap", "no choice 'cap'"),
        ("temper(0.75)then cap", "no guard"),
        ("cap(0.1", "no guard"),
        ("", "no guard ''"),
    ],
)
def test_guards_that_do_not_parse_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        method_named(f"fedipw-hajek, guard={text}")
