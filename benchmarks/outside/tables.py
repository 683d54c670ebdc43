"""Tables of published results and ours, as the docs show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t

from benchmarks.outside import clusters, cyclic, sine, two_clients

Part = Mapping[str, Any]


def _interval(values: Sequence[float], digits: int = 2) -> str:
    """Return a mean with its 95% interval."""
    found = np.asarray(values)
    half = t.ppf(0.975, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found))
    return f"{found.mean():+.{digits}f} ± {half:.{digits}f}"


def _mean(values: Sequence[float], digits: int = 2) -> str:
    return f"{np.mean(values):.{digits}f}"


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def two_client_lines(found: Part) -> list[str]:
    """Return where methods end, by the availability of the two clients."""
    names = {m: f"`{m}`" for m in two_clients.METHODS} | {"oracle": "known $p$"}
    names[two_clients.MEAN] = "`fedawe`, mean model"
    head = ["$p_1, p_2$", "equation (3)", "closed form", *(names.values())]
    rows = [
        [
            pair,
            _mean([one["equation_3"]], 1),
            _mean([one["closed_form"]], 1),
            *(f"{one['mean'][m]:.1f}" for m in names),
        ]
        for pair, one in found["runs"].items()
    ]
    return _lines(head, rows)


def sine_lines(found: Part) -> list[str]:
    """Return accuracies in the order of the paper's, then those without a published one."""
    accuracy, early = found["accuracy"], found["early"]["accuracy"]
    published = sorted(sine.PUBLISHED, key=lambda m: -sine.PUBLISHED[m][0])
    order = [*published, *(m for m in sine.METHODS if m not in sine.PUBLISHED)]
    rows = []
    for m in order:
        theirs = sine.PUBLISHED.get(m)
        off = np.subtract(accuracy[m], accuracy["fedavg"])
        soon = np.subtract(early[m], early["fedavg"])
        rows.append(
            [
                {sine.MEAN: "FedAWE", **sine.METHODS}[m],
                "–" if theirs is None else f"{theirs[0]:.1f} ± {theirs[1]:.1f}",
                "–" if theirs is None else f"{theirs[0] - sine.PUBLISHED['fedavg'][0]:+.1f}",
                f"{np.mean(accuracy[m]):.1f} ± {np.std(accuracy[m], ddof=1):.1f}",
                "0" if m == "fedavg" else _interval(off),
                f"{np.mean(early[m]):.1f} ± {np.std(early[m], ddof=1):.1f}",
                "0" if m == "fedavg" else _interval(soon),
            ]
        )
    head = ["method", "SVHN, theirs", "to FedAvg", "digits, tuned", "to FedAvg"]
    head += ["digits, early", "to FedAvg"]
    return _lines(head, rows)


def cluster_lines(found: Part) -> list[str]:
    """Return test accuracies, and paired differences to the unbiased weights."""
    rows = []
    for name, how in clusters.RUNS.items():
        mine, theirs = found["runs"][name], clusters.PUBLISHED.get(name)
        base = found["runs"]["unbiased"]
        off = np.subtract(mine["time_average"], base["time_average"])
        rows.append(
            [
                f"{how.label} ({how.local:g}, {how.server:g})",
                "–" if theirs is None else " / ".join(f"{v:.2f}" for v in theirs),
                " / ".join(_mean(mine[k]) for k in ("maximum", "time_average", "deviation")),
                "0" if name == "unbiased" else _interval(off),
                "0"
                if name == "unbiased"
                else _interval(np.subtract(mine["deviation"], base["deviation"])),
            ]
        )
    head = ["method (local, server rate)", "theirs", "ours", "time average", "deviation"]
    return _lines(head, rows)


def cyclic_lines(found: Part) -> list[str]:
    """Return tuned settings, the objective of the last tenth of rounds, and how soon 0.01."""
    rows = []
    for m, label in cyclic.METHODS.items():
        one = found["methods"][m]
        below = np.flatnonzero(np.array(one["curve"]) < 0.01)
        # stays below only if all later ones are
        kept = len(below) and below[-1] == len(one["curve"]) - 1
        first = len(one["curve"])
        while kept and first and one["curve"][first - 1] < 0.01:
            first -= 1
        rows.append(
            [
                label,
                ", ".join(f"{k} {v:g}" for k, v in one["settings"].items()),
                f"{np.mean(one['last']):.2g}",
                f"{(first + 1) * found['every']:,}" if kept else "never",
            ]
        )
    head = ["method", "tuned", "objective, last tenth", "below 0.01 from round"]
    return _lines(head, rows)


def lines(saved: Mapping[str, Part]) -> dict[str, list[str]]:
    """Return the table of every part that was run."""
    made = {
        "two-clients": two_client_lines,
        "sine": sine_lines,
        "clusters": cluster_lines,
        "cyclic": cyclic_lines,
    }
    return {part: made[part](found) for part, found in saved.items()}
