"""Names of methods, each a source of probabilities and a scheme; only names live here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum

from fedipw.errors import InputError
from fedipw.weights.schemes import (
    FedAvg,
    Hajek,
    HorvitzThompson,
    ParticipationOnly,
    SampleHajek,
    Scheme,
)

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


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers a scheme may divide by."""

    population: float
    enrolled: float


@dataclass(frozen=True, slots=True)
class Method:
    """A name, the probabilities it uses and how it turns them into weights."""

    name: str
    source: SourceKind
    scheme: Callable[[Sizes], Scheme]
    uses_enrollment: bool = True  # whether it reads enrollment probabilities

    def scheme_for(self, sizes: Sizes, target: Target = Target.CLIENT) -> Scheme:
        """Return the scheme for a population, for the mean over clients or over samples."""
        scheme = self.scheme(sizes)
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
        method, name=method.name + HAJEK, scheme=lambda sizes: Hajek(method.scheme(sizes))
    )


def _horvitz_thompson(sizes: Sizes) -> Scheme:
    return HorvitzThompson(sizes.population)


def _participation_only(sizes: Sizes) -> Scheme:
    return ParticipationOnly(sizes.enrolled)


_TWO_STAGE, _KNOWN, _COLLAPSED = SourceKind.TWO_STAGE, SourceKind.KNOWN, SourceKind.COLLAPSED
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
    )
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
        near = get_close_matches(name, METHODS, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise InputError(f"No method {name!r};{hint} Known: {', '.join(METHODS)}.")
    return METHODS[name]
