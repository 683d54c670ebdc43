"""One look for every figure: colours that colour-blind readers can tell apart, with markers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Look:
    """How a method is drawn and called."""

    label: str
    colour: str
    line: str
    marker: str


# Okabe and Ito's palette
LOOKS = {
    "fedavg": Look("FedAvg", "#000000", "-", "o"),
    "participation-only": Look("Participation-only IPW", "#E69F00", "--", "s"),
    "fedipw": Look("FedIPW", "#0072B2", "-", "D"),
    "oracle": Look("Oracle IPW", "#CC79A7", ":", "^"),
    "collapsed": Look("Collapsed", "#999999", "-.", "v"),
    "calibrated-quadratic": Look("Calibrated, quadratic", "#56B4E9", "--", "P"),
    "calibrated-entropy": Look("Calibrated, entropy", "#009E73", "-", "X"),
    "calibrated-inverse-logit": Look("Calibrated, inverse logit", "#8F6FC0", "-.", "*"),
    "calibrated-noise-aware": Look("Calibrated, noise-aware", "#D55E00", "-", "h"),
    "efficient": Look("Efficient", "#882255", "-", "p"),
    "calibrated-online": Look("Calibrated as you go", "#44AA99", ":", "<"),
    "augmented": Look("Augmented", "#CC3311", "-", "*"),
    "augmented-online": Look("Augmented, as you go", "#117733", "-", "P"),
}
RULE_LABELS = {
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "fedau": "FedAU",
    "debiased": "Debiased FedAvg",
    "scaffold": "SCAFFOLD",
    "mifa": "MIFA",
    "fedvarp": "FedVARP",
    "fedawe": "FedAWE",
    "focus": "FOCUS",
    "f3ast": "F3AST",
    "cafed": "CA-Fed",
    "amplified": "Amplified FedAvg",
    "fedavgm": "Server momentum",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
}
_RULE_MARKERS = dict(zip(RULE_LABELS, "v^<>DsPXp8o1d*h", strict=True))
_OTHERS = ("#56B4E9", "#D55E00", "#F0E442", "#999999")

SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "fedipw",
    "svg.fonttype": "none",
}


def look_of(method: str) -> Look:
    """Return the look of a method; Hájek forms share their method's colour, dash-dotted.

    A rule joined to a weighting has the weighting's colour and the rule's marker; alone it has the
    colour of what it weighs by, FedAvg's or participation-only's.

    >>> look_of("scaffold+fedipw").label
    'SCAFFOLD + FedIPW'
    """
    *rules, last = method.split("+")
    if last in RULE_LABELS:
        rules.append(last)
        last = "participation-only" if {"fedau", "debiased"} & set(rules) else "fedavg"
        return _joined(rules, _weighting_look(last), "")
    look = _weighting_look(last)
    return _joined(rules, look, look.label) if rules else look


def _joined(rules: list[str], look: Look, label: str) -> Look:
    names = [RULE_LABELS.get(rule, rule) for rule in rules]
    marker = _RULE_MARKERS.get(rules[0], "x")
    return Look(" + ".join([*names, *([label] if label else [])]), look.colour, ":", marker)


def _weighting_look(method: str) -> Look:
    base = method.removesuffix("-hajek")
    found = LOOKS.get(base)
    if found is None:
        return Look(method, _OTHERS[sum(map(ord, method)) % len(_OTHERS)], "-", "x")
    if base == method:
        return found
    return Look(f"{found.label} (Hájek)", found.colour, "-.", "x")


def new_figure(width: float, height: float) -> Figure:
    """Return a figure with its own canvas: no global state, no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (slow to load)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def styled() -> AbstractContextManager[None]:
    """Return a context in which figures take the project's settings."""
    import matplotlib as mpl  # noqa: PLC0415 (slow to load)

    return mpl.rc_context(SETTINGS)
