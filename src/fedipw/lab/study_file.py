"""Studies from TOML: scenarios on top of a shared base, seeds, methods, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from fedipw.errors import InputError
from fedipw.lab.config import hint, scenario_of, toml_table
from fedipw.lab.scenario import Scenario

_TOP = ("title", "rounds", "seeds", "methods", "reference", "measure", "base", "scenarios")
_OWN = ("title",)  # keys of a scenario that are no settings of a run
_NOT_IN_BASE = ("seed", "rounds", "methods", "title")
_REFERENCE = "participation-only"
_MEASURES = {
    "tail": ("tail_excess_loss", "excess loss of the model averaged over the last rounds"),
    "mean-tail": ("mean_tail_loss", "excess loss, mean over the last rounds"),
    "last": ("excess_loss", "excess loss of the last model"),
}


class Measure(Enum):
    """What methods are compared by, as the study file names it."""

    TAIL = "tail"
    MEAN_TAIL = "mean-tail"
    LAST = "last"

    @property
    def column(self) -> str:
        """Its column in the results."""
        return _MEASURES[self.value][0]

    @property
    def words(self) -> str:
        """What it is, in words."""
        return _MEASURES[self.value][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario of a study by name, its seed left at 0."""

    name: str
    title: str
    scenario: Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Scenarios, each run with every seed and all its methods, and how they are compared.

    Paired comparisons are against ``reference``; by default against participation-only weighting
    where a scenario has it, else against the scenario's first method.
    """

    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    title: str = "A study of methods under two-stage selection"
    reference: str | None = None
    measure: Measure = Measure.TAIL

    def __post_init__(self) -> None:
        if not self.cases:
            raise InputError("A study needs one scenario or more.")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) != len(self.seeds):
            raise InputError(
                "seeds must be one or more different whole numbers from 0 on, not "
                f"{list(self.seeds)}."
            )
        for what in ("name", "title"):
            named = [getattr(case, what) for case in self.cases]
            twice = next((n for n in named if named.count(n) > 1), None)
            if twice is not None:
                raise InputError(f"Two scenarios have the {what} {twice!r}; give each its own.")
        for case in self.cases:
            methods = case.scenario.methods
            if not methods:
                raise InputError(f"Scenario {case.name!r} has no methods; name one or more.")
            if self.reference is not None and self.reference not in methods:
                raise InputError(
                    f"reference = {self.reference!r} is not run in scenario {case.name!r}; it has "
                    f"{', '.join(methods)}."
                )

    @property
    def titles(self) -> dict[str, str]:
        """The scenarios' titles, by name."""
        return {case.name: case.title for case in self.cases}

    @property
    def references(self) -> dict[str, str]:
        """The method others are compared with, by scenario."""
        found = {}
        for case in self.cases:
            methods = case.scenario.methods
            default = _REFERENCE if _REFERENCE in methods else methods[0]
            found[case.name] = default if self.reference is None else self.reference
        return found

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods, in the order they are first named."""
        return tuple(dict.fromkeys(m for case in self.cases for m in case.scenario.methods))


def study_from(path: Path) -> Study:
    """Return the study a TOML file describes; every scenario in it is checked."""
    return study_of(toml_table(path, "study"), path)


def study_of(table: Mapping[str, Any], path: Path) -> Study:
    """Return the study of a parsed table; ``path`` is for messages and relative files."""
    for key in table:
        if key not in _TOP:
            raise InputError(
                f"{path}: unknown key {key!r}{hint(key, _TOP)} Settings of runs go under [base] or "
                "[scenarios.NAME]."
            )
    base = _table(table.get("base", {}), f"{path}: [base]")
    for key in _NOT_IN_BASE:
        if key in base:
            at_top = {"seed": "seeds at the top of the file", "title": "a title in each scenario"}
            place = at_top.get(key, f"{key} at the top of the file")
            raise InputError(f"{path}: [base] {key!r} does not go here; give {place}.")
    scenarios = _table(table.get("scenarios", {}), f"{path}: [scenarios]")
    if not scenarios:
        raise InputError(f"{path}: no scenarios; add one or more tables [scenarios.NAME].")
    shared = {**base, **{key: table[key] for key in ("rounds", "methods") if key in table}}
    cases = tuple(_case(name, own, shared, path) for name, own in scenarios.items())
    given: dict[str, Any] = {}
    for key in ("title", "reference"):
        if key in table:
            given[key] = _text(table[key], f"{path}: {key}")
    try:
        return Study(
            cases=cases,
            seeds=_seeds(table.get("seeds", 10), f"{path}: seeds"),
            measure=_measure(table.get("measure", "tail"), f"{path}: measure"),
            **given,
        )
    except InputError as error:
        raise InputError(_placed(str(error), path)) from error


def _case(name: str, own: Any, shared: Mapping[str, Any], path: Path) -> Case:
    where = f"{path}: [scenarios.{name}]"
    if not name.strip():
        raise InputError(f"{path}: a scenario's name is empty; name it [scenarios.NAME].")
    given = _table(own, where)
    if "seed" in given:
        raise InputError(f"{where} 'seed' does not go here; give seeds at the top of the file.")
    title = _text(given.get("title", name), f"{where} title")
    settings = _merged(shared, {k: v for k, v in given.items() if k not in _OWN})
    try:
        scenario = scenario_of(settings, path)
    except InputError as error:
        text = _placed(str(error), path)
        raise InputError(
            f"{text} (This is scenario {name!r}: [scenarios.{name}] on top of [base].)"
        ) from error
    return Case(name=name, title=title, scenario=replace(scenario, seed=0))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``over`` on top of ``base``: tables merge, all else is replaced.

    A table that names a ``kind`` which the base's does not name has other keys, and replaces it
    whole.
    """
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = value
        if isinstance(value, dict) and isinstance(below, dict):
            other_kind = "kind" in value and value["kind"] != below.get("kind")
            merged[key] = value if other_kind else _merged(below, value)
    return merged


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    wanted = "a number of seeds (20 is seeds 0 to 19) or a list such as [3, 5, 8]"
    if _whole(value):
        if value < 1:
            raise InputError(f"{where} = {value}: at least 1 is needed.")
        return tuple(range(value))
    if not isinstance(value, list) or not all(map(_whole, value)):
        raise InputError(f"{where} must be {wanted}, not {value!r}.")
    if not value:
        raise InputError(f"{where} is empty; give {wanted}.")
    twice = next((seed for seed in value if value.count(seed) > 1), None)
    if twice is not None:
        raise InputError(f"{where} names {twice} twice; name each seed once.")
    if min(value) < 0:
        raise InputError(f"{where} must be 0 or more, not {min(value)}.")
    return tuple(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _measure(value: Any, where: str) -> Measure:
    if value not in [*_MEASURES]:
        raise InputError(f"{where} must be one of {', '.join(_MEASURES)}, not {value!r}.")
    return Measure(value)


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a table.")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where} must be text, not {value!r}.")
    return value


def _placed(text: str, path: Path) -> str:
    return text if str(path) in text else f"{path}: {text}"
