"""Names of methods, each a source of probabilities and a scheme; only names live here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING

from fedipw.calibration import Distance, Entropy, InverseLogit, Linear, Logit, Quadratic
from fedipw.errors import InfeasibleError, InputError, NotConvergedError
from fedipw.weighting.balance import Balance
from fedipw.weighting.schemes import (
    Calibrated,
    FedAvg,
    Greg,
    Hajek,
    HorvitzThompson,
    ParticipationOnly,
    SampleHajek,
    Scheme,
)

if TYPE_CHECKING:
    from fedipw.numerics.types import FloatArray

HAJEK = "-hajek"


class Target(Enum):
    """What the target objective averages over."""

    CLIENT = "client"
    SAMPLE = "sample"


class SourceKind(Enum):
    """Which probabilities a method plugs in."""

    NONE = "none"
    TWO_STAGE = "two-stage"
    KNOWN = "known"
    COLLAPSED = "collapsed"
    GAPS = "gaps"


class Slot(Enum):
    """What a rule decides; a method has at most one rule for each."""

    LOCAL = "each client's local loss"
    WORK = "how unequal local work is evened out"
    PARTICIPATION = "where participation probabilities come from"
    MEMORY = "what is remembered of each client"
    SERVER = "the server's step"


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What a scheme may use of the population: sizes, and balance columns with known means."""

    population: float
    enrolled: float
    balance: Balance | None = None  # the covariates
    rich: Balance | None = None  # covariates, squares and products
    enrollment_prob: FloatArray | None = None  # (N,) true, in simulations

    def calibrated(self, balance: Balance, distance: Distance | InverseLogit) -> Calibrated:
        """Return enrollment weights by calibration, with their mean over enrollment if known.

        Where calibration in the mean has no solution, the weights of this draw serve for both.
        """
        weights, expected = balance.enrollment_weights(distance), None
        if self.enrollment_prob is not None:
            with suppress(InfeasibleError, NotConvergedError):
                expected = balance.expected_weights(distance, self.enrollment_prob)
        return Calibrated(weights, expected)

    def balance_for(self, name: str, *, rich: bool = False) -> Balance:
        """Return the balance a method needs, or say that it is not known."""
        found = self.rich if rich else self.balance
        if found is None:
            raise InputError(f"{name} needs population means of the covariates.")
        return found


@dataclass(frozen=True, slots=True)
class Method:
    """A name, the probabilities it uses and how it turns them into weights."""

    name: str
    source: SourceKind
    scheme: Callable[[Facts], Scheme]
    uses_enrollment: bool = True  # whether it reads enrollment probabilities
    balanced: str = ""  # "balance" or "rich" where it needs population means
    memory: bool = False  # whether training keeps each client's latest update (O5)
    distance: Distance | InverseLogit | None = None  # of the calibration of enrollment

    def scheme_for(self, facts: Facts, target: Target = Target.CLIENT) -> Scheme:
        """Return the scheme for a population, for the mean over clients or over samples."""
        scheme = self.scheme(facts)
        if target is Target.CLIENT:
            return scheme
        if not scheme.self_normalised:
            raise InputError(
                f"{self.name} is a Horvitz–Thompson form, and the sample target has none: the "
                "sample counts of clients that never enrolled are unknown. Use "
                f"{self.name}{HAJEK}."
            )
        return SampleHajek(scheme)


def _forms(method: Method) -> tuple[Method, Method]:
    """Return a Horvitz–Thompson method and its self-normalised form."""
    return method, replace(
        method, name=method.name + HAJEK, scheme=lambda facts: Hajek(method.scheme(facts))
    )


def _horvitz_thompson(facts: Facts) -> Scheme:
    return HorvitzThompson(facts.population)


def _participation_only(facts: Facts) -> Scheme:
    return ParticipationOnly(facts.enrolled)


def _calibrated(name: str, distance: Distance | InverseLogit) -> tuple[Method, Method]:
    """Return enrollment by calibration to the population means of the covariates, both forms."""

    def scheme(facts: Facts) -> Scheme:
        return facts.calibrated(facts.balance_for(name), distance)

    return _forms(
        Method(
            name, _TWO_STAGE, scheme, uses_enrollment=False, balanced="balance", distance=distance
        )
    )


def _greg(name: str, *, nonnegative: bool) -> tuple[Method, Method]:
    """Return FedIPW balanced in every round, both forms."""

    def scheme(facts: Facts) -> Scheme:
        inner = HorvitzThompson(facts.population)
        return Greg(inner, facts.balance_for(name), nonnegative)

    return _forms(Method(name, _TWO_STAGE, scheme, balanced="balance"))


def _efficient(facts: Facts) -> Scheme:
    """Return inverse-logit calibration on a rich map (method of the efficiency bound)."""
    rich = facts.balance_for("efficient", rich=True)
    return facts.calibrated(rich, InverseLogit())


_TWO_STAGE, _KNOWN, _COLLAPSED = SourceKind.TWO_STAGE, SourceKind.KNOWN, SourceKind.COLLAPSED
LOGIT_BOUNDS = (0.1, 10.0)  # of the weight ratio, for the method of that name
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("fedavg", SourceKind.NONE, lambda _: FedAvg(), uses_enrollment=False),
        *_forms(
            Method("participation-only", _TWO_STAGE, _participation_only, uses_enrollment=False)
        ),
        *_forms(Method("fedipw", _TWO_STAGE, _horvitz_thompson)),
        *_forms(Method("oracle", _KNOWN, _horvitz_thompson)),
        *_forms(Method("collapsed", _COLLAPSED, _horvitz_thompson, uses_enrollment=False)),
        *_calibrated("calibrated-quadratic", Quadratic()),
        *_calibrated("calibrated-entropy", Entropy()),
        *_calibrated("calibrated-linear", Linear()),
        *_calibrated("calibrated-logit", Logit(*LOGIT_BOUNDS)),
        *_calibrated("calibrated-inverse-logit", InverseLogit()),
        *_calibrated("calibrated-noise-aware", Entropy()),
        *_greg("greg", nonnegative=False),
        *_greg("greg-nonnegative", nonnegative=True),
        *_forms(
            Method(
                "efficient",
                _TWO_STAGE,
                _efficient,
                uses_enrollment=False,
                balanced="rich",
                memory=True,
                distance=InverseLogit(),
            )
        ),
    )
}

RULES: Mapping[str, Slot] = {
    "fedprox": Slot.LOCAL,
    "fednova": Slot.WORK,
    "fedau": Slot.PARTICIPATION,
    "scaffold": Slot.MEMORY,
    "mifa": Slot.MEMORY,
    "fedvarp": Slot.MEMORY,
    "amplified": Slot.SERVER,
    "fedavgm": Slot.SERVER,
    "fedadam": Slot.SERVER,
    "fedyogi": Slot.SERVER,
}


def method_named(name: str) -> Method:
    """Return a method, or an error with the nearest name.

    >>> method_named("fedipw-hajek").source.value
    'two-stage'
    >>> method_named("fedpiw")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: No method 'fedpiw'; did you mean fedipw? Known: fedavg, ...
    """
    if name not in METHODS:
        if set(name.split("+")) & set(RULES):
            raise InputError(
                f"{name!r} is a way of training, for fedipw simulate and fedipw study. Here a "
                f"method gives one weight per reply: {', '.join(METHODS)}."
            )
        near = get_close_matches(name, METHODS, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise InputError(f"No method {name!r};{hint} Known: {', '.join(METHODS)}.")
    return METHODS[name]
