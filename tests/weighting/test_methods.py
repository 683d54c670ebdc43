"""One contract for every registered method, and what sets methods apart."""

from itertools import product

import numpy as np
import pytest

from fedipw.errors import InputError
from fedipw.lab.recipes import RULES as LAB_RULES
from fedipw.lab.recipes import recipe_named
from fedipw.selection.participation import Source
from fedipw.weighting.balance import Balance
from fedipw.weighting.functions import trimmed
from fedipw.weighting.methods import CHOICES, METHODS, RULES, method_named
from fedipw.weighting.pipeline import MEMORIES, Trim, Weighing
from fedipw.weighting.replay import Plan
from fedipw.weighting.weigher import EnrollmentState, Replies

_COLUMNS = np.random.default_rng(5).standard_normal((50, 2))
BALANCE = Balance(
    names=("a", "b"),
    matrix=_COLUMNS,
    enrolled=np.arange(50) < 20,
    mean=np.array([0.05, -0.1]),
    population_size=50,
)
STATE = EnrollmentState(
    unit_ids=np.arange(50),
    sample_counts=np.arange(50) + 1,
    enrolled=BALANCE.enrolled,
    prob=np.random.default_rng(6).uniform(0.1, 1.0, 50),
    population_size=50.0,
    balances={"main": BALANCE, "rich": BALANCE, "wide": BALANCE},
)
SIGNED = [n for n in METHODS if n.startswith(("greg", "calibrated-linear"))]


def weighing(name: str) -> Weighing:
    return method_named(name).at(STATE)


def replies(m: int = 7, seed: int = 0) -> Replies:
    rng = np.random.default_rng(seed)
    return Replies(
        index=3,
        unit_ids=np.arange(m),
        rows=rng.permutation(20)[np.arange(m) % 20],
        enrollment_prob=rng.uniform(0.1, 1.0, m),
        participation_prob=rng.uniform(0.05, 1.0, m),
        sample_counts=rng.integers(1, 30, m),
        source=Source.MODEL,
        invite_prob=rng.uniform(0.05, 1.0, m),
    )


def subset(given: Replies, rows: np.ndarray) -> Replies:
    return Replies(
        index=given.index,
        unit_ids=given.unit_ids[rows],
        rows=given.rows[rows],
        enrollment_prob=given.enrollment_prob[rows],
        participation_prob=given.participation_prob[rows],
        sample_counts=given.sample_counts[rows],
        source=given.source,
        invite_prob=given.invite_prob[rows],
    )


@pytest.mark.parametrize("name", METHODS)
def test_weights_are_one_per_reply_follow_the_rows_and_are_not_negative(name: str) -> None:
    scheme, given = weighing(name), replies()
    weights = scheme.weights(given)
    assert weights.shape == (7,)
    assert np.all(weights >= 0) or name in SIGNED
    assert weights.any()
    order = np.random.default_rng(1).permutation(7)
    np.testing.assert_allclose(scheme.weights(subset(given, order)), weights[order], rtol=1e-14)


@pytest.mark.parametrize("name", METHODS)
def test_self_normalised_weights_sum_to_one_and_others_stand_alone(name: str) -> None:
    scheme, given = weighing(name), replies()
    part = subset(given, np.array([0, 3]))
    if scheme.self_normalised:
        assert np.isclose(scheme.weights(given).sum(), 1.0)
        assert np.isclose(scheme.weights(part).sum(), 1.0)
    else:
        np.testing.assert_array_equal(scheme.weights(part), scheme.weights(given)[[0, 3]])


ALONE = [n for n, m in METHODS.items() if not m.normalisation.self_normalised]
TOGETHER = [n for n in METHODS if n not in ALONE]


@pytest.mark.parametrize("name", ALONE)
def test_expected_weights_against_enumeration(name: str) -> None:
    scheme, given = weighing(name), replies(6)
    chance = np.random.default_rng(2).uniform(0.2, 0.9, 6)
    mean = np.zeros(6)
    for present in product([True, False], repeat=6):
        rows = np.flatnonzero(present)
        if rows.size:
            prob = np.where(present, chance, 1 - chance).prod()
            mean[rows] += prob * scheme.weights(subset(given, rows))
    np.testing.assert_allclose(scheme.expected_weights(given, chance), mean, rtol=1e-12)


@pytest.mark.parametrize("name", TOGETHER)
def test_expected_weights_are_the_limit_of_large_rounds(name: str) -> None:
    """Six kinds of client, 400 of each: false alarm below 1e-6 (six standard errors)."""
    scheme, copies, rng = weighing(name), 400, np.random.default_rng(3)
    kinds = np.repeat(np.arange(6), copies)
    given = subset(replies(6), kinds)
    chance = np.random.default_rng(2).uniform(0.2, 0.9, 6)[kinds]
    mean = np.zeros(6)
    for _ in range(400):
        rows = np.flatnonzero(rng.random(len(kinds)) < chance)
        drawn = scheme.weighed(subset(given, rows)).weights
        mean += np.bincount(kinds[rows], drawn, minlength=6) / 400
    expected = np.bincount(kinds, scheme.expected_weights(given, chance), minlength=6)
    near_zero = 1e-3 * expected.max()  # GREG can leave a kind almost without weight
    np.testing.assert_allclose(mean, expected, rtol=0.03, atol=near_zero)


@pytest.mark.parametrize("name", METHODS)
def test_expected_trimmed_weights_are_the_limit_of_large_rounds(name: str) -> None:
    """As above with weights cut at 1.2 times the mean: false alarm below 1e-6."""
    scheme = method_named(name).trimmed(1.2).at(STATE)
    copies, rng = 400, np.random.default_rng(4)
    kinds = np.repeat(np.arange(6), copies)
    given = subset(replies(6), kinds)
    chance = np.random.default_rng(2).uniform(0.2, 0.9, 6)[kinds]
    mean = np.zeros(6)
    for _ in range(400):
        rows = np.flatnonzero(rng.random(len(kinds)) < chance)
        drawn = subset(given, rows)
        cut = scheme.weighed(drawn).weights
        np.testing.assert_array_equal(cut, trimmed(scheme.weights(drawn), 1.2).weights)
        mean += np.bincount(kinds[rows], cut, minlength=6) / 400
    expected = np.bincount(kinds, scheme.expected_weights(given, chance), minlength=6)
    near_zero = 1e-3 * expected.max() / expected.sum()
    share = expected / expected.sum()
    np.testing.assert_allclose(mean / mean.sum(), share, rtol=0.03, atol=near_zero)


def test_the_table_of_weights() -> None:
    given = replies()
    enroll, part = given.enrollment_prob, given.participation_prob
    table = {
        "fedavg": np.full(7, 1 / 7),
        "participation-only": 1 / (20 * part),
        "fedipw": 1 / (50 * enroll * part),
        "fedipw-hajek": (1 / (enroll * part)) / (1 / (enroll * part)).sum(),
        "participation-only-hajek": (1 / part) / (1 / part).sum(),
    }
    for name, expected in table.items():
        weights = weighing(name).weights(given)
        np.testing.assert_allclose(weights, expected, rtol=1e-14, err_msg=name)


def test_normalising_participation_by_the_population_only_shortens_the_step() -> None:
    given = replies()
    by_enrolled = weighing("participation-only").weights(given)
    literal = 1 / (50 * given.participation_prob)
    np.testing.assert_allclose(literal * 2.5, by_enrolled)


def test_sample_target_weighs_by_rows_and_has_no_horvitz_thompson_form() -> None:
    given = replies()
    weights = method_named("fedipw-hajek").by_samples().at(STATE).weights(given)
    raw = given.sample_counts / given.inclusion_prob
    np.testing.assert_allclose(weights, raw / raw.sum(), rtol=1e-13)
    plain = method_named("fedavg").by_samples().at(STATE).weights(given)
    np.testing.assert_allclose(plain, given.sample_counts / given.sample_counts.sum(), rtol=1e-13)
    with pytest.raises(InputError, match=r"fedipw is a Horvitz–Thompson form.*fedipw-hajek"):
        method_named("fedipw").by_samples()
    by_rows = method_named("fedipw, normalisation=samples").at(STATE)
    np.testing.assert_array_equal(by_rows.weights(given), weights)
    with pytest.raises(InputError, match="needs the sample counts of clients"):
        Plan(method=by_rows.method)


def test_an_unknown_method_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean participation-only"):
        method_named("participaton-only")


# The five choices behind each name.

HT, HAJEK = "horvitz-thompson", "hajek"
BOTH_FORMS = {  # base, calibration, augmentation
    "participation-only": ("participation", "none", "none"),
    "fedipw": ("inclusion", "none", "none"),
    "oracle": ("true-inclusion", "none", "none"),
    "collapsed": ("collapsed", "none", "none"),
    "calibrated-quadratic": ("participation", "quadratic", "none"),
    "calibrated-entropy": ("participation", "entropy", "none"),
    "calibrated-linear": ("participation", "linear", "none"),
    "calibrated-logit": ("participation", "logit", "none"),
    "calibrated-inverse-logit": ("participation", "inverse-logit", "none"),
    "calibrated-noise-aware": ("participation", "noise-aware", "none"),
    "greg": ("inclusion", "greg", "none"),
    "greg-nonnegative": ("inclusion", "greg-nonnegative", "none"),
    "efficient": ("participation", "rich-inverse-logit", "memory"),
}
PRESETS: dict[str, dict[str, str]] = {
    "fedavg": dict(zip(CHOICES, ("equal", "none", HAJEK, "none", "none"), strict=True))
}
for _name, (_base, _calibration, _augmentation) in BOTH_FORMS.items():
    for _suffix, _form in (("", HT), ("-hajek", HAJEK)):
        _chosen = (_base, _calibration, _form, "none", _augmentation)
        PRESETS[_name + _suffix] = dict(zip(CHOICES, _chosen, strict=True))
for _name, _chosen in {
    "calibrated-online": ("invitation", "online", HAJEK, "cap(0.3)", "none"),
    "augmented": (
        "participation", "rich-inverse-logit", HAJEK, "temper(0.75) then cap",
        "adaptive-regression",
    ),
    "augmented-online": ("invitation", "online", HAJEK, "temper(0.5) then cap", "regression"),
}.items():  # fmt: skip
    PRESETS[_name] = dict(zip(CHOICES, _chosen, strict=True))


def test_every_preset_is_in_the_table_above() -> None:
    assert set(METHODS) == set(PRESETS)
    assert len({tuple(choices.values()) for choices in PRESETS.values()}) == len(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_five_choices_and_they_resolve_to_its_name(name: str) -> None:
    choices = PRESETS[name]
    for kind, choice in choices.items():
        base = "equal" if kind == "calibration" else "participation"
        base = (
            "inclusion" if choice == "adaptive-regression" else base
        )  # it must correct enrollment
        other = {"base": base, "normalisation": HAJEK} | {kind: choice}
        alone = method_named(", ".join(f"{k}={v}" for k, v in other.items()))
        assert getattr(METHODS[name], kind) == getattr(alone, kind)
    text = ", ".join(f"{kind}={choice}" for kind, choice in choices.items())
    assert method_named(text) is METHODS[name]
    backwards = ",".join(f"{kind} = {choice}" for kind, choice in reversed(choices.items()))
    assert method_named(backwards) is METHODS[name]
    assert method_named(f"{name}, guard={choices['guard']}") is METHODS[name]


def test_a_combination_without_a_name_is_asked_for_by_its_choices() -> None:
    text = "base=participation, calibration=entropy, normalisation=hajek, guard=trim(5)"
    method, known = method_named(text), METHODS["calibrated-entropy-hajek"]
    assert method.name == text
    assert method.guard == Trim(5.0)
    by_name = method_named("calibrated-entropy-hajek, guard=trim(5)")
    for other in (by_name, known.trimmed(5.0)):
        assert {k: getattr(other, k) for k in CHOICES} == {k: getattr(method, k) for k in CHOICES}
    given = replies(20)
    cut = method.at(STATE).weighed(given)
    np.testing.assert_array_equal(cut.weights, known.trimmed(5.0).at(STATE).weighed(given).weights)
    assert method_named("guard=trim").guard == Trim(20.0)


NEW = (
    "base=equal, calibration=quadratic, normalisation=hajek",
    "base=participation, calibration=greg, normalisation=hajek",
    "base=collapsed, calibration=greg-nonnegative",
    "base=equal, calibration=greg, normalisation=hajek",
    "calibration=rich-inverse-logit, base=participation",
    "fedipw, augmentation=memory",
)


@pytest.mark.parametrize("text", NEW)
def test_sensible_combinations_weigh_like_any_other(text: str) -> None:
    method, given = method_named(text), replies(18)
    assert method.name == text
    assert text not in METHODS
    found = method.at(STATE).weighed(given)
    assert found.weights.shape == (18,)
    assert np.isfinite(found.weights).all()
    if method.normalisation.self_normalised:
        assert np.isclose(found.total, 1.0)


REFUSED = {
    "base=inclusion, calibration=entropy": "corrects enrollment, and the base weight does too",
    "fedipw, calibration=quadratic": "corrects enrollment, and the base weight does too",
    "base=true-inclusion, calibration=linear": "corrects enrollment, and the base weight does too",
    "base=collapsed, calibration=logit": "corrects enrollment, and the base weight does too",
    "base=invitation": "equal or by invitation, have no Horvitz",
    "base=equal": "have no Horvitz–Thompson form",
    "base=equal, calibration=quadratic": "have no Horvitz–Thompson form",
    "fedavg, normalisation=horvitz-thompson": "have no Horvitz–Thompson form",
    "guard=trim(0.5)": "is no guard: Trimming below the mean weight is not trimming: 0.5 < 1[.]$",
    "guard=trim(nan)": "is not trimming",
    "guard=trim(much)": "is no guard: could not convert",
    "guard=none(3)": "the guard none takes no setting",
    "calibration=entropy(2), base=participation": "the calibration entropy takes no setting",
    "guard=trim(5), guard=none": "guard is chosen twice",
    "guard=trim(5": "no guard 'trim.5'",
    "calibration=entropi": "no calibration 'entropi'; did you mean entropy",
    "weight=1": "no choice 'weight'; there are base, calibration, normalisation, guard",
    "fedipw, trim(20)": "no choice 'trim.20.'",
    "fedipw,": "no choice ''",
    "fedpiw, guard=trim(20)": "No method 'fedpiw'; did you mean fedipw",
}


@pytest.mark.parametrize("text", REFUSED)
def test_senseless_combinations_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(InputError, match=REFUSED[text]):
        method_named(text)


def test_names_of_training_rules_are_known_as_such() -> None:
    assert set(RULES) == set(LAB_RULES)
    for name in ("fedprox", "fedau+fedipw", "fedadam+mifa+fedipw"):
        with pytest.raises(InputError, match="is a way of training"):
            method_named(name)


@pytest.mark.parametrize("rule", MEMORIES)
def test_a_published_memory_is_the_augmentation_of_a_method(rule: str) -> None:
    """The weights are those of the method; named alone, every enrolled client counts alike."""
    given = replies(20)
    for name in ("efficient", "efficient-hajek", "fedipw", "fedavg", "fedipw, guard=trim(5)"):
        plain = method_named(name)
        for text in (f"{rule}+{name}", f" {rule} + {name}"):
            method = method_named(text)
            assert method.augmentation == MEMORIES[rule]
            assert {k: getattr(method, k) for k in list(CHOICES)[:4]} == {
                k: getattr(plain, k) for k in list(CHOICES)[:4]
            }
            found, expected = (m.at(STATE).weighed(given).weights for m in (method, plain))
            np.testing.assert_array_equal(found, expected)
        assert recipe_named(f"{rule}+{name}").memory == rule
    assert method_named(rule) == method_named(f"{rule}+fedavg")
    assert recipe_named(rule).augmentation == method_named(rule).augmentation


def test_one_name_is_one_augmentation_on_a_server_and_in_the_lab() -> None:
    assert method_named("fedvarp+efficient-hajek") is METHODS["efficient-hajek"]
    assert method_named("fedvarp+efficient, augmentation=none") == METHODS["efficient"]
    for text, rule in (
        ("efficient", "fedvarp"),
        ("mifa+efficient", "mifa"),
        ("fedipw, augmentation=control-variates", "scaffold"),
        ("efficient, augmentation=latest-updates", "mifa"),
        ("efficient, augmentation=none", None),
        ("augmented", None),
    ):
        recipe, method = recipe_named(text), method_named(text)
        assert recipe.memory == rule == (method.augmentation.memory or None)
        assert recipe.weighs_replies == method.augmentation.weighs_replies


def test_memories_that_do_not_go_together_are_refused() -> None:
    for text, why in (
        ("mifa+scaffold", "mifa and scaffold are both memories; keep one"),
        ("mifa+augmented", "mifa and the regression of augmented both decide"),
        ("scaffold+", "No method ''"),
        ("scaffold+fedpiw", "did you mean fedipw"),
    ):
        with pytest.raises(InputError, match=why):
            method_named(text)


def test_replies_of_a_memory_without_reply_weights_count_alike() -> None:
    given = replies(18)
    for name in ("mifa+efficient", "scaffold+fedipw"):
        found = method_named(name).of_replies().at(STATE).weighed(given)
        np.testing.assert_allclose(found.weights, 1.0 / 18.0, rtol=1e-15)
        assert method_named(name).of_replies().name == name
    assert method_named("efficient").of_replies() is METHODS["efficient"]
