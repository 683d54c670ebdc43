"""Calibration as you go: its equation, where it comes to rest, and its state."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp

import numpy as np
import pytest

from fedipw.calibration import Calibration, Entropy, calibrated
from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.selection.participation import Source
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint
from fedipw.weighting.balance import Balance
from fedipw.weighting.methods import method_named
from fedipw.weighting.online import OnlineSettings, OnlineState
from fedipw.weighting.weigher import EnrollmentState

Rounds = Sequence[tuple[FloatArray, FloatArray]]  # base weights (m,), standardised columns (m, q)


def fresh(size: int) -> OnlineState:
    names = tuple(f"b{j}" for j in range(size))
    zeros = np.zeros(size)
    return OnlineState(
        names=names, scale=np.ones(size), coefficients=zeros, first=zeros,
        second=np.zeros((size, size)),
    )  # fmt: skip


def drawn_rounds(seed: int, count: int, replies: int, columns: int, shift: float = 0.4) -> Rounds:
    """Return rounds whose replies are not like the population, whose means are zero."""
    rng = np.random.default_rng(seed)
    mix = np.eye(columns) + 0.3 * np.tri(columns, k=-1)
    return [
        (
            rng.uniform(0.5, 2.0, replies),
            rng.standard_normal((replies, columns)) @ mix + shift * rng.uniform(0.5, 1.5, columns),
        )
        for _ in range(count)
    ]


def pooled(rounds: Rounds) -> Calibration:
    """Return the entropy calibration of all respondents of the rounds together."""
    base, b = (np.concatenate(parts) for parts in zip(*rounds, strict=True))
    return calibrated(b, np.zeros(b.shape[1]), distance=Entropy(), base=base)


def plain_steps(rounds: Rounds, g: float, rho: float, s: float, limit: float) -> list[FloatArray]:
    """Return lambda after each round, (W18) sum by sum; damped by 2 (1 - g)."""
    q = rounds[0][1].shape[1]
    lam, S0, S1, S2 = [0.0] * q, 0.0, np.zeros(q), np.zeros((q, q))
    out = []
    for base, b in rounds:
        S0, S1, S2 = g * S0, g * S1, g * S2
        for d, row in zip(base, b, strict=True):
            exponent = sum(lam[j] * row[j] for j in range(q))
            e = d * exp(min(max(exponent, -limit), limit))
            S0 += e
            for j in range(q):
                S1[j] += e * row[j]
                for k in range(q):
                    S2[j, k] += e * row[j] * row[k]
        m = S1 / S0
        V = np.array(
            [
                [S2[j, k] / S0 - m[j] * m[k] + (rho if j == k else 0.0) for k in range(q)]
                for j in range(q)
            ]
        )
        move = 2.0 * (1.0 - g) * (np.linalg.inv(V) @ m)
        lam = [lam[j] - min(max(move[j], -s), s) for j in range(q)]
        out.append(np.array(lam))
    return out


@pytest.mark.parametrize(
    ("settings", "shift"),
    [
        (OnlineSettings(), 0.4),
        (OnlineSettings(decay=0.5, ridge=0.1), 0.4),
        (OnlineSettings(decay=0.5, largest_step=0.05), 1.0),  # steps are cut
        (OnlineSettings(decay=0.9, largest_exponent=0.5), 1.0),  # and exponents
    ],
)
def test_a_run_is_the_equation_round_by_round(settings: OnlineSettings, shift: float) -> None:
    rounds = drawn_rounds(1, 60, 7, 3, shift)
    expected = plain_steps(
        rounds, settings.decay, settings.ridge, settings.largest_step, settings.largest_exponent
    )
    state, cut = fresh(3), 0
    for (base, b), lam in zip(rounds, expected, strict=True):
        before, state = state.coefficients, state.learnt(base, b, settings)
        cut += int((np.abs(state.coefficients - before) > 0.999 * settings.largest_step).sum())
        # sums of 7 terms and the inverse of a well-conditioned 3 x 3 matrix, 60 times
        np.testing.assert_allclose(state.coefficients, lam, rtol=0.0, atol=1e-11)
    assert cut > 3 if settings.largest_step < 0.1 else np.abs(state.coefficients).max() > 0.1


def test_one_round_over_and_over_ends_in_its_calibration() -> None:
    """With nothing that changes between rounds a fixed decay is enough, to rounding."""
    for seed in range(4):
        rounds = drawn_rounds(seed, 1, 30, 3)
        state, settings = fresh(3), OnlineSettings(decay=0.9)
        for _ in range(600):
            state = state.learnt(*rounds[0], settings)
        expected = pooled(rounds)
        np.testing.assert_allclose(state.coefficients, expected.multipliers[:-1], atol=1e-9)
        assert np.abs(state.first / state.count).max() < 1e-9  # at rest m = 0


def test_with_decay_to_one_it_converges_to_the_calibration_of_all_respondents() -> None:
    """Rounds in a cycle: lambda swings within it by the square of 1 - g, which goes to zero."""
    rounds = drawn_rounds(0, 5, 8, 2)
    expected, state, apart = pooled(rounds), fresh(2), []
    assert np.abs(expected.multipliers[:-1]).max() > 0.3  # there is something to correct
    for power in range(4, 12):
        settings = OnlineSettings(decay=1.0 - 2.0**-power)
        for _ in range(2 * 2**power):  # whole cycles
            for base, b in rounds:
                state = state.learnt(base, b, settings)
        apart.append(float(np.abs(state.coefficients - expected.multipliers[:-1]).max()))
    assert apart[-1] < 1e-6
    assert apart[-1] < apart[0] / 1000.0
    # halving 1 - g quarters the distance
    np.testing.assert_allclose(np.array(apart[-3:-1]) / apart[-2:], 4.0, rtol=0.05)
    base, b = (np.concatenate(parts) for parts in zip(*rounds, strict=True))
    weights = base * state.factors(b, settings)
    np.testing.assert_allclose(weights / weights.sum(), expected.weights, rtol=0.0, atol=1e-6)
    np.testing.assert_allclose(weights @ b / weights.sum(), 0.0, atol=2e-6)
    # later rounds of the cycle count more in m
    assert np.abs(state.first / state.count).max() < 2.0**-power


def test_a_common_factor_of_the_base_changes_nothing() -> None:
    one, two = fresh(2), fresh(2)
    for base, b in drawn_rounds(3, 20, 6, 2):
        one = one.learnt(base, b, OnlineSettings())
        two = two.learnt(1e-6 * base, b, OnlineSettings())
    np.testing.assert_allclose(two.coefficients, one.coefficients, rtol=1e-9)


def test_a_round_without_weight_or_with_weights_that_overflow_teaches_nothing() -> None:
    state = fresh(2).learnt(np.ones(3), np.ones((3, 2)), OnlineSettings())
    assert state.learnt(np.zeros(3), np.ones((3, 2)), OnlineSettings()) is state
    assert state.learnt(np.full(3, np.inf), np.ones((3, 2)), OnlineSettings()) is state


def test_one_far_reply_moves_no_coefficient_by_more_than_a_step() -> None:
    settings, state = OnlineSettings(), fresh(2)
    for base, b in drawn_rounds(5, 30, 6, 2):
        state = state.learnt(base, b, settings)
    after = state.learnt(np.array([1.0]), np.array([[1e6, -1e6]]), settings)
    assert np.abs(after.coefficients - state.coefficients).max() <= settings.largest_step
    assert after.factors(np.array([[1e6, 1e6]]), settings)[0] <= exp(settings.largest_exponent)


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, 1.5, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(InputError, match="decay must lie between 0 and 1"):
        OnlineSettings(decay=decay)


# The state: other balance columns, and files.


def balance_of(names: tuple[str, ...], seed: int = 0, stretch: float = 1.0) -> Balance:
    rng = np.random.default_rng(seed)
    known = {name: rng.standard_normal(40) + 0.5 for name in ("age", "income", "age**2", "north")}
    matrix = stretch * np.column_stack([known[name] for name in names])
    return Balance(
        names=names, matrix=matrix, enrolled=np.arange(40) < 25, mean=matrix.mean(axis=0),
        population_size=40.0,
    )  # fmt: skip


def test_the_same_columns_keep_the_state_and_its_scale() -> None:
    first = balance_of(("age", "income"))
    state = OnlineState.begun(first)
    np.testing.assert_array_equal(state.scale, first.scale)
    assert not state.coefficients.any()
    later = state.on(balance_of(("age", "income"), stretch=3.0))
    assert later is state  # other clients enrolled: coefficients stay in their units


def test_changed_columns_keep_what_was_learnt_of_them_by_name() -> None:
    state = OnlineState.begun(balance_of(("age", "income")))
    for base, b in drawn_rounds(2, 12, 9, 2):
        state = state.learnt(base, b, OnlineSettings())
    wider = balance_of(("income", "age**2", "age", "north"), stretch=2.0)
    after = state.on(wider)
    assert after.names == wider.names
    assert after.count == state.count
    np.testing.assert_array_equal(after.coefficients[[2, 0]], state.coefficients)
    np.testing.assert_array_equal(after.first[[2, 0]], state.first)
    np.testing.assert_array_equal(after.scale[[2, 0]], state.scale)
    np.testing.assert_array_equal(after.second[np.ix_([2, 0], [2, 0])], state.second)
    np.testing.assert_array_equal(after.scale[[1, 3]], wider.scale[[1, 3]])
    for array in (after.coefficients, after.first, after.second[[1, 3]], after.second[:, [1, 3]]):
        assert not (array[[1, 3]] if array.ndim == 1 else array).any()
    # a client's factor is the same as before: new columns count once something is learnt of them
    rows = np.random.default_rng(1).standard_normal((5, 4))
    np.testing.assert_allclose(
        after.factors(rows, OnlineSettings()),
        state.factors(rows[:, [2, 0]], OnlineSettings()),
        rtol=1e-14,
    )
    narrower = after.on(balance_of(("age",)))
    np.testing.assert_array_equal(narrower.coefficients, state.coefficients[:1])
    np.testing.assert_array_equal(narrower.second, state.second[:1, :1])
    np.testing.assert_array_equal(balance_of(wider.names, stretch=2.0).scale, wider.scale)


def test_what_is_new_is_learnt_and_ends_in_the_calibration_too() -> None:
    """Two of three columns first; the third joins, and all come to rest where they should."""
    rounds = drawn_rounds(7, 1, 30, 3)
    settings = OnlineSettings(decay=0.9)
    names = ("age", "income", "north")
    plain = replace(OnlineState.begun(balance_of(names[:2])), scale=np.ones(2))
    for _ in range(100):
        plain = plain.learnt(rounds[0][0], rounds[0][1][:, :2], settings)
    state = plain.on(balance_of(names))
    for _ in range(1000):
        state = state.learnt(*rounds[0], settings)
    np.testing.assert_allclose(state.coefficients, pooled(rounds).multipliers[:-1], atol=1e-9)


def test_the_state_goes_through_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    state = OnlineState.begun(balance_of(("age", "income")))
    rounds = drawn_rounds(4, 8, 5, 2)
    for base, b in rounds:
        state = state.learnt(base, b, OnlineSettings())
    save_checkpoint(tmp_path, {"learnt": state.to_arrays()}, "settings")
    found = load_checkpoint(tmp_path, "settings")
    assert found is not None
    again = OnlineState.of(found["learnt"])
    assert again.names == state.names
    for settings in (OnlineSettings(), OnlineSettings(decay=0.5)):
        one, two = (s.learnt(*rounds[0], settings) for s in (state, again))
        assert one.coefficients.tobytes() == two.coefficients.tobytes()
        assert (one.count, one.scale.tobytes()) == (two.count, two.scale.tobytes())


# In a method.


def test_the_weights_of_a_round_rest_on_the_rounds_before_it() -> None:
    """The first round is a plain mean; a round's own replies do not change their weights."""
    balance = balance_of(("age", "income"))
    state = EnrollmentState(
        unit_ids=np.arange(40), sample_counts=np.ones(40, dtype=np.int64),
        enrolled=balance.enrolled, prob=np.full(40, np.nan), population_size=40.0,
        balances={"rich": balance},
    )  # fmt: skip
    weighing = method_named("calibrated-online").at(state)
    rng, ones = np.random.default_rng(0), np.ones(20)
    history: list[tuple[FloatArray, FloatArray]] = []
    for index in range(1, 9):
        rows = np.sort(rng.choice(25, 20, replace=False))
        b = (balance.matrix[rows] - balance.mean) / balance.scale
        replies = state.replies(index, rows, ones, Source.NONE)
        found = weighing.weighed(replies)
        lam = plain_steps(history, 0.97, 0.02, 0.3, 8.0)[-1] if history else np.zeros(2)
        raw = np.exp(b @ lam)
        np.testing.assert_allclose(found.raw, 20.0 * raw / raw.sum(), rtol=1e-11)
        history.append((ones, b))
        weighing = weighing.after(replies)
    assert np.ptp(found.raw) > 1e-3  # something was learnt
