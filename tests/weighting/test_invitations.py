"""Invitation design: probabilities, the sampler and estimates, by enumeration and as properties."""

from collections.abc import Iterator
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedipw.errors import InputError
from fedipw.selection.participation import Source
from fedipw.weighting.invitations import (
    InclusionProbabilities,
    InvitationDesign,
    Invitations,
    systematic_sample,
)
from fedipw.weighting.methods import METHODS, method_named
from fedipw.weighting.weigher import EnrollmentState

SCORES = arrays(np.float64, st.integers(1, 40), elements=st.floats(1e-6, 1e6))


@st.composite
def designs(draw: st.DrawFn) -> tuple[np.ndarray, int, float]:
    scores = draw(SCORES)
    number = draw(st.integers(1, len(scores)))
    return scores, number, draw(st.floats(0.0, 1.0)) * number / len(scores)


@given(designs())
def test_probabilities_sum_to_the_number_and_follow_the_scores_between_bounds(
    drawn: tuple[np.ndarray, int, float],
) -> None:
    scores, number, floor = drawn
    prob = InclusionProbabilities.solved(scores, number, floor=floor).prob(scores)
    assert prob.sum() == pytest.approx(number, rel=1e-12)
    assert (prob <= 1.0).all()
    assert (prob >= floor).all()
    assert (prob > 0.0).all()
    order = np.argsort(scores)
    assert (np.diff(prob[order]) >= 0.0).all()
    between = (prob > floor) & (prob < 1.0)
    ratio = prob[between] / scores[between]
    np.testing.assert_allclose(ratio, ratio[:1].repeat(len(ratio)), rtol=1e-12)


@given(designs(), st.floats(0.01, 100.0))
def test_probabilities_forget_a_common_factor(
    drawn: tuple[np.ndarray, int, float], factor: float
) -> None:
    scores, number, floor = drawn
    one, other = (
        InclusionProbabilities.solved(s, number, floor=floor).prob(s)
        for s in (scores, factor * scores)
    )
    np.testing.assert_allclose(one, other, rtol=1e-9)


def test_equal_scores_and_a_full_floor_are_uniform() -> None:
    scores = np.array([1.0, 5.0, 100.0, 0.01, 3.0])
    full = InclusionProbabilities.solved(scores, 2, floor=2 / 5)
    np.testing.assert_allclose(full.prob(scores), 0.4, rtol=1e-12)
    equal = InclusionProbabilities.solved(np.full(5, 7.0), 2)
    np.testing.assert_allclose(equal.prob(np.full(5, 7.0)), 0.4, rtol=1e-12)
    assert (InclusionProbabilities.solved(scores, 5).prob(scores) == 1.0).all()


@pytest.mark.parametrize(
    ("scores", "number", "floor", "reason"),
    [
        ([1.0, 2.0], 3, 0.0, "3 invitations cannot be sent to 2 clients"),
        ([1.0, 2.0], 0, 0.0, "0 invitations cannot"),
        ([1.0, 2.0, 3.0], 1, 0.4, "sum to 1.2 or more, not to 1 invitations"),
        ([1.0, 0.0], 1, 0.1, "above 0; 1 of 2 are not, such as 0.0"),
        ([1.0, -2.0], 1, 0.1, "above 0"),
        ([1.0, np.nan], 1, 0.1, "finite"),
        ([1.0, np.inf], 1, 0.1, "finite"),
        ([1.0, 2.0], 1, -0.1, "between 0 and 1"),
    ],
)
def test_probabilities_that_cannot_be_are_refused(
    scores: list[float], number: int, floor: float, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        InclusionProbabilities.solved(np.array(scores), number, floor=floor)


def samples(prob: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """Yield every sample of the sampler with its probability: all orders, all start intervals."""
    size = len(prob)
    orders = list(permutations(range(size)))
    for order in map(np.array, orders):
        cuts = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(prob[order]) % 1.0]))
        for low, high in pairwise(cuts):
            if high - low > 1e-9:  # of rounding, else
                chosen = systematic_sample(prob, order, (low + high) / 2.0)
                yield chosen, (high - low) / len(orders)


@pytest.mark.parametrize(
    "prob",
    [
        [0.5, 0.5, 0.25, 0.75],
        [1.0, 1.0, 0.2, 0.3, 0.5],
        [0.1, 0.2, 0.3, 0.4],
        [0.9, 0.8, 0.7, 0.35, 0.25],
        [1.0, 1.0, 1.0],
    ],
)
def test_inclusion_probabilities_of_the_sampler_are_exact(prob: list[float]) -> None:
    wanted = np.array(prob)
    found, mass = np.zeros(len(prob)), 0.0
    for chosen, chance in samples(wanted):
        assert len(set(chosen.tolist())) == len(chosen) == round(wanted.sum())
        found[chosen] += chance
        mass += chance
    assert mass == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(found, wanted, rtol=0.0, atol=1e-12)


@given(designs(), st.integers(0, 2**32), st.floats(0.0, 1.0, exclude_max=True))
def test_a_sample_always_has_its_size(
    drawn: tuple[np.ndarray, int, float], seed: int, start: float
) -> None:
    scores, number, floor = drawn
    prob = InclusionProbabilities.solved(scores, number, floor=floor).prob(scores)
    order = np.random.default_rng(seed).permutation(len(prob))
    chosen = systematic_sample(prob, order, start)
    assert len(np.unique(chosen)) == len(chosen) == number
    assert set(np.flatnonzero(prob == 1.0)) <= set(chosen.tolist())


def test_probabilities_without_a_whole_sum_have_no_sample() -> None:
    with pytest.raises(InputError, match=r"sum to 1\.5"):
        systematic_sample(np.array([0.5, 0.5, 0.5]), np.arange(3), 0.2)


@pytest.mark.parametrize("rest", [1, 2, 3])
@pytest.mark.parametrize("number", [1, 2])
def test_estimates_are_unbiased_over_groups_samples_and_replies(rest: int, number: int) -> None:
    """E of the Horvitz–Thompson total over all draws is that of the enrolled, at 1/(N pi_enr)."""
    enroll = np.array([0.2, 0.5, 0.8, 0.35])
    reply = np.array([0.3, 0.6, 0.9, 0.5])
    values = np.array([4.0, -1.0, 2.0, 7.0])
    state = EnrollmentState(
        unit_ids=np.arange(4), sample_counts=np.ones(4, dtype=np.int64),
        enrolled=np.ones(4, dtype=np.bool_), prob=enroll, population_size=10.0,
    )  # fmt: skip
    weighing, scores = method_named("fedipw").at(state), 1.0 / enroll
    mean, mass = 0.0, 0.0
    for groups in product(range(rest), repeat=4):
        inside = np.flatnonzero(np.array(groups) == 1 % rest)
        design = InclusionProbabilities.of(scores[inside], number, 0.25)
        invited = design.prob(scores) / rest
        small = design.prob(scores[inside])
        drawn = samples(small) if len(inside) > number else [(np.arange(len(inside)), 1.0)]
        for chosen, chance in drawn:
            rows = inside[chosen]
            for replied in product([True, False], repeat=len(rows)):
                heard = rows[np.array(replied, dtype=np.bool_)]
                each = np.where(replied, reply[rows], 1.0 - reply[rows])
                p = chance * each.prod() / rest**4
                mass += p
                if len(heard):
                    prob = invited[heard] * reply[heard]
                    w = weighing.weights(state.replies(1, heard, prob, Source.KNOWN))
                    mean += p * float(w @ values[heard])
    assert mass == pytest.approx(1.0, abs=1e-12)
    assert mean == pytest.approx(float((values / enroll).sum() / 10.0), rel=1e-11)


def test_a_design_draws_by_its_probabilities() -> None:
    """4000 rounds: a mean within 5 standard errors for each of 12 clients, false alarm 7e-6."""
    scores, ids = np.geomspace(0.1, 10.0, 12), [f"u{k}" for k in range(12)]
    design = InvitationDesign(Invitations(number=5), seed=3)
    rounds = [design.drawn(r, ids, scores, number=99) for r in range(1, 4001)]
    prob = rounds[0].prob
    assert prob.sum() == pytest.approx(5.0, rel=1e-12)
    assert prob.min() == pytest.approx(0.1 * 5 / 12, rel=1e-12)
    assert all(found.flags.sum() == 5 for found in rounds)
    share = np.mean([found.flags for found in rounds], axis=0)
    assert (np.abs(share - prob) <= 5.0 * np.sqrt(prob * (1.0 - prob) / 4000) + 1e-12).all()


def test_a_design_is_a_function_of_seed_round_and_clients() -> None:
    scores, ids = np.arange(1.0, 9.0), list(range(8))
    first = InvitationDesign(Invitations(number=3), seed=1)
    again = InvitationDesign(Invitations(number=3), seed=1)
    flags = [first.drawn(r, ids, scores, 0).flags for r in range(1, 30)]
    for r, expected in reversed(list(enumerate(flags, start=1))):
        np.testing.assert_array_equal(again.drawn(r, ids, scores, 0).flags, expected)
    assert len({tuple(f) for f in flags}) > 10
    other = InvitationDesign(Invitations(number=3), seed=2)
    assert any((other.drawn(r, ids, scores, 0).flags != flags[r - 1]).any() for r in range(1, 30))


def test_rests_are_kept_and_probabilities_know_them() -> None:
    ids, rng = [f"u{k}" for k in range(40)], np.random.default_rng(0)
    scores = rng.uniform(0.5, 2.0, 40)
    design = InvitationDesign(Invitations(number=4, rest=4), seed=5)
    last = np.full(40, -100)
    for r in range(1, 60):
        found = design.drawn(r, ids, scores, 0)
        assert (r - last[found.flags] >= 4).all()
        last[found.flags] = r
        group = design.group(ids) == r % 4
        assert found.prob[group].sum() == pytest.approx(4 / 4, rel=1e-12)
        assert not found.flags[~group].any()
        assert ((found.prob > 0.0) & (found.prob <= 0.25)).all()
    assert set(design.group(ids)) == {0, 1, 2, 3}
    late = design.group([*ids, "late"])
    np.testing.assert_array_equal(late[:40], design.group(ids))


def test_fewer_clients_than_invitations_are_all_invited_and_noted() -> None:
    design = InvitationDesign(Invitations(number=5), seed=0)
    found = design.drawn(1, ["a", "b"], np.array([1.0, 9.0]), 2)
    assert found.flags.all()
    assert (found.prob == 1.0).all()
    assert found.note == "all 2 available clients are invited, not 5"
    rested = InvitationDesign(Invitations(number=5, rest=2), seed=0)
    few = rested.drawn(1, ["a", "b"], np.array([1.0, 9.0]), 2)
    assert (few.prob == 0.5).all()
    assert "of group 2 of 2 are invited, not 5" in few.note


def test_clients_without_weight_are_invited_at_the_floor() -> None:
    found = InvitationDesign(Invitations(number=2), seed=0).drawn(
        1, range(6), np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]), 0
    )
    assert found.prob[-1] == 1.0
    np.testing.assert_allclose(found.prob[:-1], 0.2, rtol=1e-12)
    for bad in (-1.0, np.nan):
        with pytest.raises(InputError, match="finite and above 0"):
            InvitationDesign(Invitations(number=2), seed=0).drawn(
                1, range(3), np.array([1.0, bad, 1.0]), 0
            )


def test_scores_not_known_yet_are_equal() -> None:
    found = InvitationDesign(Invitations(number=2), seed=0).drawn(1, range(8), None, 0)
    assert (found.prob == 0.25).all()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "sometimes"}, "uniform or proportional, not 'sometimes'"),
        ({"number": 0}, "number of invitations must be a whole number from 1 on, not 0"),
        ({"number": 2.5}, "not 2.5"),
        ({"number": True}, "not True"),
        ({"rest": 0}, "rest of invitations"),
        ({"rest": None}, "rest of invitations"),
        ({"floor": 0.0}, "lies in .0, 1., not 0.0"),
        ({"floor": 1.5}, "not 1.5"),
        ({"floor": float("nan")}, "not nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Invitations(**settings)  # type: ignore[arg-type]


def test_methods_without_enrollment_weights_are_refused() -> None:
    without = {name for name, method in METHODS.items() if not method.weighs_enrollment}
    assert without == {
        "fedavg", "participation-only", "participation-only-hajek", "collapsed", "collapsed-hajek",
        "calibrated-linear", "calibrated-linear-hajek",
    }  # fmt: skip
    for name in METHODS:
        method = method_named(name)
        Invitations(kind="uniform").check_method(method)
        if name in without:
            with pytest.raises(InputError, match=f"{name} has none"):
                Invitations().check_method(method)
        else:
            Invitations().check_method(method)
