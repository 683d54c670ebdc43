"""Names of composed methods: rules of training and a weighting, joined by ``+``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from fedipw.errors import InputError
from fedipw.weighting.registry import METHODS, RULES, Method, Slot, SourceKind, method_named

JOIN = "+"


WITHOUT_REPLY_WEIGHTS = ("scaffold", "mifa")  # they combine by memory alone


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A method taken apart: its rules, one a slot, and its weighting."""

    name: str
    rules: Mapping[Slot, str]
    method: Method

    @property
    def memory(self) -> str | None:
        """The rule that remembers updates, if any: ``efficient`` has FedVARP's by itself."""
        return self.rules.get(Slot.MEMORY, "fedvarp" if self.method.memory else None)

    @property
    def weighs_replies(self) -> bool:
        """Whether a round's replies get weights of their own; else memory alone decides."""
        return self.memory not in WITHOUT_REPLY_WEIGHTS

    @property
    def source(self) -> SourceKind:
        """Which probabilities its replies are weighed with."""
        if not self.weighs_replies:
            return SourceKind.NONE
        return SourceKind.GAPS if Slot.PARTICIPATION in self.rules else self.method.source

    @property
    def weighting(self) -> str:
        """Name of the weights of its replies: methods that share it share them."""
        if not self.weighs_replies:
            return self.name
        named = self.method.name
        return named if self.source is self.method.source else f"fedau{JOIN}{named}"


def recipe_named(name: str) -> Recipe:
    """Return a method taken apart, or an error that lists what there is.

    A name is a weighting (``fedipw``), a rule as published (``scaffold``: all enrolled clients
    count alike), or rules and a weighting (``scaffold+fedipw``, ``fedprox+fedadam+fedipw-hajek``).

    >>> recipe_named("scaffold+fedipw").method.name
    'fedipw'
    >>> recipe_named("fednova").method.name
    'fedavg'
    >>> recipe_named("scaffold+mifa")
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: scaffold+mifa: scaffold and mifa both decide what is remembered of
    each client; keep one.
    """
    parts = name.split(JOIN)
    for part in parts:
        if part not in METHODS and part not in RULES:
            raise InputError(_unknown(name, part))
    weightings = [p for p in parts if p in METHODS]
    if len(weightings) > 1:
        raise InputError(
            f"{name}: {' and '.join(weightings)} are both weightings; keep one, after the rules."
        )
    rules: dict[Slot, str] = {}
    for part in parts:
        if part in RULES:
            other = rules.setdefault(RULES[part], part)
            if other != part or parts.count(part) > 1:
                what = (
                    f"{other} and {part} both decide" if other != part else f"{part} twice decides"
                )
                raise InputError(f"{name}: {what} {RULES[part].value}; keep one.")
    alone = "participation-only" if "fedau" in parts else "fedavg"
    method = method_named(weightings[0] if weightings else alone)
    recipe = Recipe(name, MappingProxyType(rules), method)
    _check(recipe)
    return recipe


def _unknown(name: str, part: str) -> str:
    near = get_close_matches(part, (*METHODS, *RULES), n=1)
    which = f"No method {part!r}" if part == name else f"{name}: no method {part!r}"
    hint = f" did you mean {near[0]}?" if near else ""
    return (
        f"{which};{hint} Weightings: {', '.join(METHODS)}. Rules, alone or as rule+weighting: "
        f"{', '.join(RULES)}."
    )


def _check(recipe: Recipe) -> None:
    """Raise if the parts do not go together."""
    method, memory = recipe.method.name, recipe.memory
    gaps = Slot.PARTICIPATION in recipe.rules
    fault = None
    if memory is not None and recipe.method.source is SourceKind.COLLAPSED:
        fault = (
            f"{memory} keeps its memory under enrollment weights, and {method} has one model for "
            "both stages, so no enrollment weights; use fedipw or a calibrated weighting"
        )
    elif gaps and not recipe.weighs_replies:
        fault = f"{memory} reads no participation probabilities, so fedau has nothing to do"
    elif gaps and recipe.method.source is not SourceKind.TWO_STAGE:
        fault = (
            f"{method} reads no estimated participation probabilities, so fedau has nothing to "
            "replace; use participation-only, fedipw or a calibrated weighting"
        )
    elif Slot.WORK in recipe.rules and memory == "scaffold":
        fault = (
            "scaffold's control variates are gradients of one step already, so fednova has "
            "nothing to even out"
        )
    if fault is not None:
        raise InputError(f"{recipe.name}: {fault}.")
