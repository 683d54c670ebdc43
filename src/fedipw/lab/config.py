"""Scenarios from TOML: every key is checked, and a wrong one is named."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from fedipw.errors import InputError
from fedipw.lab.engine import RuleSettings
from fedipw.lab.engine.rules import RULE_SETTINGS
from fedipw.lab.invitations import SimulatedInvitations
from fedipw.lab.mechanisms import (
    ChangePointParticipation,
    DailyParticipation,
    DataAvailability,
    LogisticEnrollment,
    MarkovAvailability,
    ParticipationMechanism,
    ScaledSineAvailability,
    SineParticipation,
    TraceAvailability,
    TrendParticipation,
)
from fedipw.lab.observed import ObservedPopulation, ObservedSource
from fedipw.lab.open_data import MichiganPopulation, OuladPopulation
from fedipw.lab.real import RealPopulation, WaveParticipation
from fedipw.lab.scenario import (
    PAPER_METHODS,
    PropensitySettings,
    Scenario,
    Target,
    TrainingSettings,
)
from fedipw.lab.testbed import PopulationModel, Testbed
from fedipw.numerics.checks import LARGEST, SMALLEST, shown

T = TypeVar("T")
WHOLE = 10**9  # the largest whole number of a setting: clients, rounds, steps

PARTICIPATION: Mapping[str, type] = {
    "daily": DailyParticipation,
    "markov": MarkovAvailability,
    "data": DataAvailability,
    "sine": SineParticipation,
    "trend": TrendParticipation,
    "change-point": ChangePointParticipation,
    "scaled-sine": ScaledSineAvailability,
    "trace": TraceAvailability,
    "waves": WaveParticipation,
}
POPULATION: Mapping[str, type] = {
    "testbed": Testbed,
    "real": RealPopulation,
    "observed": ObservedPopulation,
    "michigan": MichiganPopulation,
    "oulad": OuladPopulation,
}
_SECTIONS: Mapping[str, type] = {
    "enrollment": LogisticEnrollment,
    "training": TrainingSettings,
    "propensity": PropensitySettings,
    "invitations": SimulatedInvitations,
}
_TOP: Mapping[str, Any] = {
    "seed": int,
    "rounds": int,
    "methods": tuple[str, ...],
    "target": Target,
    "trim": float | None,
}
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def scenario_from(path: Path) -> Scenario:
    """Return the scenario a TOML file describes; what it leaves out keeps its default."""
    return scenario_of(toml_table(path, "configuration"), path)


def toml_table(path: Path, what: str) -> dict[str, Any]:
    """Return the table of a TOML file; ``what`` it is, for messages."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"No {what} file {path}.") from None
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} is not readable TOML: {error}.") from error
    _check_numbers(table, f"{path}:")
    return table


def _check_numbers(value: Any, where: str) -> None:
    """Raise if a number is beyond what any setting can use; seeds may have 63 bits."""
    if isinstance(value, dict):
        for key, part in value.items():
            _check_numbers(part, f"{where} {key}")
    elif isinstance(value, list):
        for part in value:
            _check_numbers(part, where)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        most = LARGEST if isinstance(value, float) else WHOLE
        if isinstance(value, int) and where.endswith("seed"):
            most = 2**63 - 1
        if 0.0 < abs(value) < SMALLEST:
            raise InputError(f"{where} = {value!r} is too small to compute with; 0 is not.")
        if abs(value) > most and not (isinstance(value, float) and math.isinf(value)):
            raise InputError(
                f"{where} = {shown(value)} is out of range: {most:g} is the largest number there."
            )


def scenario_of(table: Mapping[str, Any], path: Path) -> Scenario:
    """Return the scenario of a parsed table; ``path`` is for messages and relative files."""
    known = (*_TOP, *_SECTIONS, "population", "participation", "rules")
    for key in table:
        if key not in known:
            raise InputError(f"{path}: unknown key {key!r}{hint(key, known)}")
    given: dict[str, Any] = {
        key: _value(kind, table[key], f"{path}: {key}")
        for key, kind in _TOP.items()
        if key in table
    }
    for name, kind in _SECTIONS.items():
        if name in table:
            given[name] = _section(kind, table[name], f"{path}: [{name}]")
    if "population" in table:
        given["population"] = _population(table, path)
    if "participation" in table:
        given["participation"] = _participation(table["participation"], path)
    if "rules" in table:
        given["rules"] = _rules(table["rules"], path)
    return Scenario(**{"methods": PAPER_METHODS, **given})


def _population(table: Mapping[str, Any], path: Path) -> PopulationModel:
    where = f"{path}: [population]"
    model: Any = _of_kind(POPULATION, "testbed", table["population"], where)
    if not isinstance(model, ObservedSource):
        return model  # type: ignore[no-any-return]
    for stage in ("enrollment", "participation"):
        if stage in table:
            raise InputError(
                f"{path}: [{stage}] does not go with an observed population, whose {stage} is in "
                "its tables; leave it out."
            )
    return model.at(path.parent)


def _participation(table: Any, path: Path) -> ParticipationMechanism:
    mechanism: Any = _of_kind(PARTICIPATION, "daily", table, f"{path}: [participation]")
    if isinstance(mechanism, TraceAvailability):
        return replace(mechanism, path=path.parent / mechanism.path)
    return mechanism  # type: ignore[no-any-return]


def _of_kind(kinds: Mapping[str, type], default: str, table: Any, where: str) -> Any:
    """Return what a table with a ``kind`` describes."""
    if not isinstance(table, dict):
        raise InputError(f"{where} must be a table.")
    kind = table.get("kind", default)
    if not isinstance(kind, str) or kind not in kinds:
        raise InputError(f"{where} kind = {shown(kind)}{hint(shown(kind), tuple(kinds))}")
    return _section(kinds[kind], {k: v for k, v in table.items() if k != "kind"}, where)


def _rules(table: Any, path: Path) -> RuleSettings:
    """Return the settings of rules, ``[rules.fedprox] mu = 0.2`` and so on."""
    where = f"{path}: [rules]"
    if not isinstance(table, dict):
        raise InputError(f"{where} must be a table.")
    for name in table:
        if name not in RULE_SETTINGS:
            raise InputError(f"{where} unknown rule {name!r}{hint(name, tuple(RULE_SETTINGS))}")
    defaults = RuleSettings()
    made: dict[str, Any] = {}
    for name, given in table.items():
        # a rule's defaults are not its class's
        whole = {**asdict(getattr(defaults, name)), **given} if isinstance(given, dict) else given
        made[name] = _section(RULE_SETTINGS[name], whole, f"{path}: [rules.{name}]")
    return RuleSettings(**made)


def _section(kind: type[T], table: Any, where: str) -> T:
    if not isinstance(table, dict):
        raise InputError(f"{where} must be a table.")
    names = tuple(f.name for f in fields(kind))  # type: ignore[arg-type]
    for key in table:
        if key not in names:
            raise InputError(f"{where} unknown key {key!r}{hint(key, names)}")
    section: T = _value(with_config(_STRICT)(kind), table, where)
    return section


def _value(kind: Any, value: Any, where: str) -> Any:
    try:
        # JSON mode: arrays become tuples and strings become paths, yet "5" is no number
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc']) or 'value'}: {fault['msg']} "
            f"(got {fault['input']!r})"
            for fault in error.errors()
        )
        raise InputError(f"{where} {faults}.") from error


def hint(key: str, known: tuple[str, ...]) -> str:
    """Return what to say of an unknown key: the nearest, or all there are."""
    near = get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}."
