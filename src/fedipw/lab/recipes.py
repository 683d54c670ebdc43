"""Names of composed methods: rules of training and a weighting, joined by ``+``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from types import MappingProxyType

from fedipw.errors import InputError
from fedipw.weighting.methods import JOIN, METHODS, PLAIN, method_named
from fedipw.weighting.pipeline import MEMORIES, Augmentation, Method, Probabilities, Regression


@dataclass(frozen=True, slots=True)
class Intermittent:
    """A rule for clients that come and go, which combines updates by what it keeps of each."""

    memory: str  # its name
    moves_model: bool = False  # whether it makes the next model itself, without a server step
    gradients: bool = False  # whether it keeps gradients, which do not grow with local work
    weighs_replies = False
    regression = None
    balance = ""


class Slot(Enum):
    """What a rule decides; a method has at most one rule for each."""

    LOCAL = "each client's local loss"
    WORK = "how unequal local work is evened out"
    PARTICIPATION = "where participation probabilities come from"
    MEMORY = "what is remembered of each client"
    SERVER = "the server's step"


RULES: Mapping[str, Slot] = {
    "fedprox": Slot.LOCAL,
    "fednova": Slot.WORK,
    "fedau": Slot.PARTICIPATION,
    "debiased": Slot.PARTICIPATION,
    "scaffold": Slot.MEMORY,
    "mifa": Slot.MEMORY,
    "fedvarp": Slot.MEMORY,
    "fedawe": Slot.MEMORY,
    "focus": Slot.MEMORY,
    "f3ast": Slot.MEMORY,
    "cafed": Slot.MEMORY,
    "amplified": Slot.SERVER,
    "fedavgm": Slot.SERVER,
    "fedadam": Slot.SERVER,
    "fedyogi": Slot.SERVER,
}
INTERMITTENT: Mapping[str, Intermittent] = {
    "fedawe": Intermittent("fedawe", moves_model=True),
    "focus": Intermittent("focus", gradients=True),
    "f3ast": Intermittent("f3ast"),
    "cafed": Intermittent("cafed"),
}
_KEPT: Mapping[str, Augmentation] = {**MEMORIES, **INTERMITTENT}
REPLY_SOURCES: Mapping[str, Probabilities] = {
    "fedau": Probabilities.GAPS,
    "debiased": Probabilities.RATES,
}


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A method taken apart: its rules, one a slot, and its weighting."""

    name: str
    rules: Mapping[Slot, str]
    method: Method

    @property
    def augmentation(self) -> Augmentation:
        """What is kept of updates: by the rule that remembers, else by the weighting itself."""
        rule = self.rules.get(Slot.MEMORY)
        return self.method.augmentation if rule is None else _KEPT[rule]

    @property
    def memory(self) -> str | None:
        """The rule that remembers updates, if any: ``efficient`` has FedVARP's by itself."""
        return self.augmentation.memory or None

    @property
    def intermittent(self) -> Intermittent | None:
        """The rule for clients that come and go, if it has one."""
        return INTERMITTENT.get(self.rules.get(Slot.MEMORY, ""))

    @property
    def regression(self) -> Regression | None:
        """How it regresses updates on balance columns, if it does."""
        return self.method.augmentation.regression

    @property
    def weighs_replies(self) -> bool:
        """Whether a round's replies get weights of their own; else memory alone decides."""
        return self.augmentation.weighs_replies

    @property
    def source(self) -> Probabilities:
        """Which participation probabilities its replies are weighed with."""
        if not self.weighs_replies:
            return Probabilities.NONE
        rule = self.rules.get(Slot.PARTICIPATION)
        return self.method.base.probabilities if rule is None else REPLY_SOURCES[rule]

    @property
    def weighting(self) -> str:
        """Name of the weights of its replies: methods that share it share them."""
        if not self.weighs_replies:
            return self.name
        rule, named = self.rules.get(Slot.PARTICIPATION), self.method.name
        return named if rule is None else f"{rule}{JOIN}{named}"


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
    parts = [part.strip() for part in name.split(JOIN)]
    for part in parts:
        if part not in METHODS and part not in RULES and "=" not in part:
            raise InputError(_unknown(name, part))
    weightings = [p for p in parts if p not in RULES]
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
    alone = "participation-only" if Slot.PARTICIPATION in rules else PLAIN
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
    method, memory, kept = recipe.method.name, recipe.memory, recipe.intermittent
    source = recipe.rules.get(Slot.PARTICIPATION)
    fault = None
    if memory is not None and recipe.regression:
        fault = (
            f"{memory} and the regression of {method} both decide what is remembered of updates; "
            "keep one"
        )
    elif memory is not None and recipe.method.base.probabilities is Probabilities.COLLAPSED:
        fault = (
            f"{memory} keeps its memory under enrollment weights, and {method} has one model for "
            "both stages, so no enrollment weights; use fedipw or a calibrated weighting"
        )
    elif source and not recipe.weighs_replies:
        fault = f"{memory} reads no participation probabilities, so {source} has nothing to do"
    elif source and recipe.method.base.probabilities is not Probabilities.FITTED:
        fault = (
            f"{method} reads no estimated participation probabilities, so {source} has nothing "
            "to replace; use participation-only, fedipw or a calibrated weighting"
        )
    elif Slot.WORK in recipe.rules and memory == "scaffold":
        fault = (
            "scaffold's control variates are gradients of one step already, so fednova has "
            "nothing to even out"
        )
    elif Slot.WORK in recipe.rules and kept is not None and kept.gradients:
        fault = f"{memory} keeps gradients, not updates, so fednova has nothing to even out"
    elif Slot.SERVER in recipe.rules and kept is not None and kept.moves_model:
        fault = (
            f"{memory} averages the clients' models into the next one, so "
            f"{recipe.rules[Slot.SERVER]} has no update to step by"
        )
    if fault is not None:
        raise InputError(f"{recipe.name}: {fault}.")
