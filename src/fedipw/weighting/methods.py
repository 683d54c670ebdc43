"""Names of methods: presets of the five choices, and other sensible combinations by their parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from fedipw.errors import InputError
from fedipw.weighting.pipeline import (
    AUGMENTATIONS,
    BASES,
    CALIBRATIONS,
    GUARDS,
    MEMORIES,
    NORMALISATIONS,
    Guards,
    Method,
)

HAJEK = "-hajek"
JOIN = "+"  # between a rule of training and a method
PLAIN = "fedavg"  # the weighting of a memory that is named alone
CHOICES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "base": BASES,
    "calibration": CALIBRATIONS,
    "normalisation": NORMALISATIONS,
    "guard": GUARDS,
    "augmentation": AUGMENTATIONS,
}
THEN = " then "  # between guards that follow each other
_VALUE = re.compile(r"^(?P<name>[\w-]+)(?:\((?P<setting>[^()]*)\))?$")


def _preset(name: str, base: str, calibration: str = "none", augmentation: str = "none") -> Method:
    """Return a Horvitz–Thompson form."""
    return Method(
        name=name,
        base=BASES[base](),
        calibration=CALIBRATIONS[calibration](),
        augmentation=AUGMENTATIONS[augmentation](),
    )


def _both_forms(*presets: Method) -> dict[str, Method]:
    """Return each Horvitz–Thompson preset and its self-normalised form."""
    out = {}
    for method in presets:
        out[method.name] = method
        hajek = replace(method, name=method.name + HAJEK, normalisation=NORMALISATIONS["hajek"]())
        out[hajek.name] = hajek
    return out


def _choice(name: str, key: str, value: str) -> Any:
    """Return a choice by its name, with a setting in brackets where it takes one."""
    if key == "guard" and THEN in value:
        return Guards(tuple(_choice(name, key, part.strip()) for part in value.split(THEN)))
    known, found = CHOICES[key], _VALUE.match(value)
    if found is None or found["name"] not in known:
        near = get_close_matches(value, known, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise InputError(f"{name!r}: no {key} {value!r};{hint} Known: {', '.join(known)}.")
    make, setting = known[found["name"]], found["setting"]
    try:
        return make() if setting is None else make(float(setting))
    except TypeError as error:
        takes = "takes no setting" if setting is not None else "needs a setting in brackets"
        raise InputError(f"{name!r}: the {key} {found['name']} {takes}.") from error
    except ValueError as error:
        why = str(error).removesuffix(".")
        raise InputError(f"{name!r}: {value!r} is no {key}: {why}.") from error


def _self_normalised(name: str, base: str, **choices: str) -> Method:
    made = {key: _choice(name, key, value) for key, value in choices.items()}
    return Method(name=name, base=BASES[base](), normalisation=NORMALISATIONS["hajek"](), **made)


METHODS: Mapping[str, Method] = {
    "fedavg": Method(name="fedavg", base=BASES["equal"](), normalisation=NORMALISATIONS["hajek"]()),
    **_both_forms(
        _preset("participation-only", "participation"),
        _preset("fedipw", "inclusion"),
        _preset("oracle", "true-inclusion"),
        _preset("collapsed", "collapsed"),
        _preset("calibrated-quadratic", "participation", "quadratic"),
        _preset("calibrated-entropy", "participation", "entropy"),
        _preset("calibrated-linear", "participation", "linear"),
        _preset("calibrated-logit", "participation", "logit"),
        _preset("calibrated-inverse-logit", "participation", "inverse-logit"),
        _preset("calibrated-noise-aware", "participation", "noise-aware"),
        _preset("greg", "inclusion", "greg"),
        _preset("greg-nonnegative", "inclusion", "greg-nonnegative"),
        _preset("efficient", "participation", "rich-inverse-logit", "memory"),
    ),
    **{
        method.name: method
        for method in (
            _self_normalised(
                "calibrated-online", "invitation", calibration="online", guard="cap(0.3)"
            ),
            _self_normalised(
                "augmented",
                "participation",
                calibration="rich-inverse-logit",
                guard="temper(0.75) then cap",
                augmentation="adaptive-regression",
            ),
            _self_normalised(
                "augmented-online",
                "invitation",
                calibration="online",
                guard="temper(0.5) then cap",
                augmentation="regression",
            ),
        )
    },
}
RULES: tuple[str, ...] = (
    "fedprox", "fednova", "fedau", "debiased", "scaffold", "mifa", "fedvarp", "fedawe", "focus",
    "f3ast", "cafed", "amplified", "fedavgm", "fedadam", "fedyogi",
)  # fmt: skip


def default_method(*, everyone: bool, training: bool = False) -> str:
    """Return the method used where none is named, by what is known and what it is for.

    ``everyone`` is whether the clients that are not enrolled are known; ``training`` whether
    updates are at hand to be augmented. All are self-normalised; benchmarks.regimes chose them.

    >>> default_method(everyone=True), default_method(everyone=True, training=True)
    ('fedipw-hajek', 'augmented')
    >>> default_method(everyone=False), default_method(everyone=False, training=True)
    ('calibrated-entropy-hajek', 'augmented-online')
    """
    if training:
        return "augmented" if everyone else "augmented-online"
    return "fedipw-hajek" if everyone else "calibrated-entropy-hajek"


def method_named(name: str) -> Method:
    """Return a method by its name, by its choices, or by a name with other choices.

    Choices are ``base``, ``calibration``, ``normalisation``, ``guard`` and ``augmentation``, joined
    by commas. Without a name those left out do nothing, and the base is ``inclusion``. A published
    memory before a method, as in ``mifa+efficient``, is its augmentation; alone it counts all
    enrolled clients alike.

    >>> method_named("fedipw-hajek").normalisation
    Hajek()
    >>> method_named("fedipw, guard=trim(20)").guard
    Trim(times_mean=20.0)
    >>> method_named("base=participation, calibration=entropy, normalisation=hajek").name
    'calibrated-entropy-hajek'
    >>> method_named("scaffold+fedipw").augmentation
    ControlVariates()
    >>> method_named("fedvarp+efficient").name
    'efficient'
    >>> method_named("fedpiw")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: No method 'fedpiw'; did you mean fedipw? Known: fedavg, ...
    """
    if name in METHODS:
        return METHODS[name]
    parts = [part.strip() for part in name.split(JOIN)]
    rules = [part for part in parts if part in MEMORIES]
    if len(rules) > 1:
        raise InputError(f"{name!r}: {' and '.join(rules)} are both memories; keep one.")
    if rules and len(parts) <= 2:
        parts.remove(rules[0])
        return _known(method_named(parts[0] if parts else PLAIN).remembering(rules[0]))
    first, *others = [part.strip() for part in name.split(",")]
    if "=" in first:
        chosen: dict[str, Any] = {"name": name, "base": BASES["inclusion"]()}
        others = [first, *others]
    elif first in METHODS and others:
        chosen = {key: getattr(METHODS[first], key) for key in ("name", *CHOICES)}
        chosen["name"] = name
    else:
        raise InputError(_unknown(first))
    given: set[str] = set()
    for part in others:
        key, _, value = (text.strip() for text in part.partition("="))
        if key not in CHOICES:
            raise InputError(f"{name!r}: no choice {key!r}; there are {', '.join(CHOICES)}.")
        if key in given:
            raise InputError(f"{name!r}: {key} is chosen twice; keep one.")
        given.add(key)
        chosen[key] = _choice(name, key, value)
    return _known(Method(**chosen))


def _known(made: Method) -> Method:
    """Return the method with a name of its own that is the same, itself if there is none."""
    for known in METHODS.values():
        if replace(made, name=known.name) == known:
            return known
    return made


def _unknown(name: str) -> str:
    if {part.strip() for part in name.split(JOIN)} & set(RULES):
        return (
            f"{name!r} is a way of training, for fedipw simulate and fedipw study. Here a method "
            f"gives one weight per reply: {', '.join(METHODS)}; with one of "
            f"{', '.join(MEMORIES)} and + before it, it has that memory of updates."
        )
    near = get_close_matches(name, METHODS, n=1)
    hint = f" did you mean {near[0]}?" if near else ""
    return f"No method {name!r};{hint} Known: {', '.join(METHODS)}."
