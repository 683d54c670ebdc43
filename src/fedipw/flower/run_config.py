"""Settings of the strategy from an app's ``run_config``: keys that begin with ``fedipw-``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from fedipw.errors import InputError
from fedipw.numerics.checks import some

PREFIX: Final = "fedipw-"
NONE: Final = "none"
_NULLABLE: Final = frozenset({"winsorise", "average", "patience"})  # whose default is not none


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("text")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("a whole number")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number")
    return float(value)


def _count(value: object) -> float:
    """Return a share as a float and a number of clients as an int."""
    return value if isinstance(value, int) and not isinstance(value, bool) else _number(value)


def _names(value: object) -> tuple[str, ...]:
    return tuple(name.strip() for name in _text(value).split(",") if name.strip())


# by argument of FedIPW; the key has dashes in the place of underscores
KINDS: Final[Mapping[str, Callable[[object], Any]]] = {
    "ledger": _text,
    "population": _text,
    "enrolled": _text,
    "targets": _text,
    "population_size": _number,
    "totals": _flag,
    "enrollment": _text,
    "participation": _text,
    "availability": _text,
    "history": _flag,
    "missing": _text,
    "covariates": _names,
    "scheme": _text,
    "trim": _number,
    "refit_every": _whole,
    "window": _whole,
    "decay": _number,
    "day_length": _number,
    "day_hours": _number,
    "classifier": _text,
    "folds": _whole,
    "score_calibration": _text,
    "l2": _number,
    "ask": _count,
    "ask_timeout": _number,
    "patience": _number,
    "authenticated": _flag,
    "winsorise": _number,
    "average": _number,
    "soft": _flag,
    "buffers": _names,
    "examples": _text,
    "subgroups": _names,
    "cluster": _text,
    "invitations": _text,
    "seed": _whole,
}


def run_settings(
    run_config: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of :class:`~fedipw.flower.FedIPW` that a run's configuration sets.

    Keys are the names of arguments after ``fedipw-``, with dashes: ``fedipw-refit-every``. Empty
    text leaves a setting as it is by default, so that ``flwr run -c`` can set it; ``none`` turns
    ``winsorise``, ``average`` and ``patience`` off. Lists are names with commas. Other keys are the
    app's own. ``given`` are arguments that stand in the server's code: one in both places is an
    error, and one of them must name the ledger.

    >>> run_settings({"fedipw-enrollment": "age + os", "fedipw-subgroups": "os, region",
    ...               "fedipw-scheme": "", "fedipw-average": "none", "num-server-rounds": 3})
    {'enrollment': 'age + os', 'subgroups': ('os', 'region'), 'average': None}
    >>> run_settings({"fedipw-enrolment": "age"})
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: The run's configuration has fedipw-enrolment, which is no setting; ...
    """
    known = {PREFIX + name.replace("_", "-"): name for name in KINDS}
    out: dict[str, Any] = {}
    for key, value in run_config.items():
        if not key.startswith(PREFIX):
            continue
        if key not in known:
            own = key.removeprefix(PREFIX)
            near = get_close_matches(own, [k.removeprefix(PREFIX) for k in known], n=1)
            hint = (
                f"did you mean {PREFIX}{near[0]}?" if near else f"there are {some(sorted(known))}."
            )
            raise InputError(f"The run's configuration has {key}, which is no setting; {hint}")
        name = known[key]
        if value == "":
            continue
        if value == NONE and name in _NULLABLE:
            out[name] = None
            continue
        try:
            out[name] = KINDS[name](value)
        except TypeError as error:
            raise InputError(
                f"{key} in the run's configuration must be {error}, not {value!r}."
            ) from None
    if given is not None:
        twice = sorted(set(out) & set(given))
        if twice:
            raise InputError(
                f"{some(twice)} stands in the run's configuration and in the server's code: keep "
                "one."
            )
        if "ledger" not in {*out, *given}:
            raise InputError("The directory of the ledger is missing: set fedipw-ledger.")
    return out
