"""Tables and figures of the docs, made of saved results alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.observed.evaluation import ESTIMATORS
from benchmarks.observed.training import BEST, METHODS
from fedipw.lab.open_data import OUTCOMES
from fedipw.lab.style import look_of, new_figure, styled

Saved = Mapping[str, Any]
Written = dict[str, Callable[[Path], None]]
# Okabe and Ito's palette, with markers
LOOKS = {
    "plain": ("#D55E00", "o"),
    "ht": ("#56B4E9", "^"),
    "hajek": ("#0072B2", "D"),
    "greg": ("#009E73", "s"),
    "powered": ("#CC79A7", "P"),
    "totals": ("#000000", "X"),
    "participation": ("#E69F00", "v"),
    "enrollment": ("#999999", "<"),
}
SHOWN = "5"  # odds ratio of the bounds
README = {
    "plain": "respondents, plain mean",
    "hajek": "weighted, Hájek mean",
    "greg": "weighted, GREG mean",
}
LEAST, MOST = 0.92, 0.98  # of coverage, nominally 95%


def _text(lines: Iterator[str], path: Path) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|---|" + "--:|" * (len(heads) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


# Evaluation.


def evaluation(saved: Saved) -> Written:
    """Return the files of the evaluation."""
    return {
        "observed.md": lambda path: _text(_errors(saved), path),
        "observed-coverage.md": lambda path: _text(_coverage(saved), path),
        "observed.png": partial(_draw_errors, saved, README, 5.2),
        "observed-estimators.png": partial(_draw_errors, saved, ESTIMATORS, 8.4),
    }


def _by(saved: Saved) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {name: {} for name in OUTCOMES}
    for row in saved["estimates"]:
        out[row["outcome"]][row["estimator"]] = row
    return out


def _errors(saved: Saved) -> Iterator[str]:
    by = _by(saved)

    def rows() -> Iterator[list[str]]:
        for outcome, found in by.items():
            truth = found["plain"]["truth"]
            yield [f"{OUTCOMES[outcome].title}, {100 * truth:.1f}%",
                   *(_error(found[name]) for name in ESTIMATORS)]  # fmt: skip
        each = [[found[name] for found in by.values()] for name in ESTIMATORS]
        squares = [np.mean([(x["estimate"] - x["truth"]) ** 2 for x in part]) for part in each]
        yield ["root mean square error", *(f"{100 * np.sqrt(one):.1f}" for one in squares)]
        held = [sum(x["holds"] for x in part) for part in each]
        yield ["intervals that hold the truth", *(f"{one} of {len(by)}" for one in held)]

    yield from _table(["outcome, share in the population", *ESTIMATORS.values()], rows())


def _error(row: Saved) -> str:
    error, half = 100 * (row["estimate"] - row["truth"]), 50 * (row["high"] - row["low"])
    return f"{error:+.1f} ± {half:.1f}{'' if row['holds'] else ' ✗'}"


def _coverage(saved: Saved) -> Iterator[str]:
    kinds = saved["coverage"]
    found = {
        kind: {(x["outcome"], x["estimator"]): x for x in kinds[kind]}
        for kind in ("observed", "redrawn")
    }

    def rows() -> Iterator[list[str]]:
        for outcome, one in OUTCOMES.items():
            kept = {name: found["observed"][outcome, name] for name in ESTIMATORS}
            drawn = found["redrawn"][outcome, "hajek"]
            default = kept["hajek"]
            yield [
                one.title,
                f"{100 * kept['plain']['bias']:+.1f}; {_share(kept['plain'])}",
                f"{100 * default['bias']:+.1f} ({default['bias'] / default['mean_se']:+.1f})",
                *(_share(kept[name]) for name in ("hajek", "ht", "greg", "powered", "totals")),
                f"{100 * default['coverage_centred']:.1f}",
                f"{100 * drawn['coverage']:.1f}",
            ]

    heads = ("outcome", "plain: bias; coverage", "Hájek: bias (in standard errors)",
             "coverage, Hájek", "HT", "GREG", "prediction-powered", "totals only",
             "Hájek without its bias", "Hájek, selection redrawn")  # fmt: skip
    yield from _table(heads, rows())


def _share(row: Saved) -> str:
    inside = LEAST <= row["coverage"] <= MOST
    return f"{100 * row['coverage']:.1f}{'' if inside else ' ✗'}"


def _draw_errors(saved: Saved, names: Mapping[str, str], height: float, path: Path) -> None:
    by = _by(saved)
    step = 0.72 / len(names)
    with styled():
        figure = new_figure(8.0, height)
        ax = figure.subplots()
        for k, (name, label) in enumerate(names.items()):
            colour, marker = LOOKS[name]
            part = [found[name] for found in by.values()]
            middle = [100 * (row["estimate"] - row["truth"]) for row in part]
            sides = ([100 * (row["estimate"] - row["low"]) for row in part],
                     [100 * (row["high"] - row["estimate"]) for row in part])  # fmt: skip
            places = [j + (k - 0.5 * (len(names) - 1)) * step for j in range(len(part))]
            ax.errorbar(middle, places, xerr=sides, fmt=marker, color=colour, markersize=5,
                        label=label, capsize=2.5, linewidth=1.3)  # fmt: skip
        ax.axvline(0.0, color="#000000", linewidth=1.0)
        ax.grid(visible=False, axis="y")
        titles = [
            f"{OUTCOMES[name].title} ({100 * found['plain']['truth']:.0f}%)"
            for name, found in by.items()
        ]
        ax.set_yticks(range(len(by)), titles)
        ax.set_ylim(len(by) - 0.5, -0.5)
        for j in range(1, len(by)):
            ax.axhline(j - 0.5, color="#bbbbbb", linewidth=0.5)
        ax.annotate("truth", (0.0, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
                    textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
        ax.set_xlabel("estimate less the truth (percentage points), with 95% interval")
        figure.suptitle(
            f"All {saved['population']:,} persons of a health survey, estimated from the "
            f"{saved['respondents']:,} who use the internet at home every day",
            fontsize=10,
        )
        figure.legend(loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=160)


# Training.


def training(saved: Saved) -> Written:
    """Return the files of the training study."""
    return {
        "observed-training.md": lambda path: _text(_losses(saved), path),
        "observed-accuracy.md": lambda path: _text(_accuracies(saved), path),
        "observed-subgroups.png": partial(_draw_subgroups, saved),
    }


def _arrow(measured: Saved) -> str:
    """Return ↓ or ↑ where the paired interval against FedAvg leaves zero out."""
    against = measured["against_fedavg"]
    if against["low"] is None or against["low"] <= 0.0 <= against["high"]:
        return ""
    return " ↓" if against["high"] < 0.0 else " ↑"


def _losses(saved: Saved) -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for case in saved["cases"].values():
            cells = []
            for method in METHODS:
                found = case["methods"].get(method)
                if found is None:
                    cells.append("–")
                    continue
                one = found["excess_loss"]
                cells.append(f"{1000 * one['mean']:.1f}{_arrow(one)}")
            yield [case["title"], *cells]

    yield from _table(["excess loss × 1000", *(look_of(name).label for name in METHODS)], rows())


def _accuracies(saved: Saved) -> Iterator[str]:
    shown = (*METHODS, BEST)

    def rows() -> Iterator[list[str]]:
        for case in saved["cases"].values():
            cells = []
            for method in shown:
                found = case["methods"].get(method)
                if found is None:
                    cells.append("–")
                    continue
                right, gap = found["accuracy"], found["subgroup_gap"]
                cells.append(
                    f"{100 * right['mean']:.1f}{_arrow(right)}; "
                    f"{100 * gap['mean']:.1f}{_arrow(gap)}"
                )
            yield [case["title"], *cells]

    labels = [name if name == BEST else look_of(name).label for name in shown]
    yield from _table(["accuracy; largest gap of a subgroup, %", *labels], rows())


def _draw_subgroups(saved: Saved, path: Path) -> None:
    shown = {
        "survey": "Survey: high blood pressure",
        "BBB-2014J": "Course BBB-2014J: passed",
    }
    markers = {"fedavg": "o", "participation-only-hajek": "v", "efficient-hajek": "s",
               "augmented": "*", BEST: "|"}  # fmt: skip
    with styled():
        figure = new_figure(8.6, 5.6)
        axes = figure.subplots(1, 2, width_ratios=(1, 1))
        for ax, (case, title) in zip(axes, shown.items(), strict=True):
            by = saved["cases"][case]["methods"]
            groups = [*by[BEST]["subgroups"]]
            for k, (name, marker) in enumerate(markers.items()):
                look = look_of("fedavg" if name == BEST else name)
                label, colour = (name, "#888888") if name == BEST else (look.label, look.colour)
                places = [j + (k - 2) * 0.15 for j in range(len(groups))]
                gaps = [100 * by[name]["subgroups"][group] for group in groups]
                ax.plot(gaps, places, marker, color=colour, label=label, markeredgewidth=1.5,
                        markersize=9 if name == BEST else 5)  # fmt: skip
            ax.axvline(0.0, color="#000000", linewidth=1.0)
            short = [group.replace(" or Equivalent", "").replace("education", "educ.")
                     for group in groups]  # fmt: skip
            ax.set_yticks(range(len(groups)), short)
            ax.set_ylim(len(groups) - 0.5, -0.5)
            ax.set_title(title, fontsize=9)
            ax.set_xlabel("prediction less share (percentage points)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        figure.suptitle("Calibration of the trained models by subgroup, over everybody",
                        fontsize=10)  # fmt: skip
        figure.savefig(path, dpi=160)


# Courses.


def courses(saved: Saved) -> Written:
    """Return the files of the courses."""
    return {
        "observed-courses.md": lambda path: _text(_passes(saved), path),
        "observed-courses.png": partial(_draw_courses, saved),
    }


def _passes(saved: Saved) -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for one in saved["courses"]:
            low, high = one["bounds"][SHOWN]["both"]
            yield [
                one["presentation"],
                f"{one['registrations']:,}",
                f"{one['rounds']}",
                f"{100 * one['never']:.0f}",
                *(f"{100 * one[name]['estimate']:.1f}" for name in ("plain", "hajek")),
                f"{100 * one['hajek_history']['estimate']:.1f}",
                f"**{100 * one['truth']:.1f}**",
                f"{100 * low:.0f} to {100 * high:.0f}",
                "{odds_ratio:.2f} ({odds_ratio_low:.2f} to {odds_ratio_high:.2f})".format_map(one),
                one["correction"].lower(),
            ]

    heads = ("presentation", "registered", "rounds", "never reply, %", "passed, %: plain", "Hájek",
             "Hájek with history", "truth", f"bounds, odds ratio {SHOWN}, both stages",
             "odds ratio of a reply per sd of the metric", "can weights correct it?")  # fmt: skip
    yield from _table(heads, rows())


def _draw_courses(saved: Saved, path: Path) -> None:
    found = sorted(saved["courses"], key=lambda one: one["truth"])
    places = range(len(found))
    with styled():
        figure = new_figure(7.6, 6.0)
        ax = figure.subplots()
        for place, one in zip(places, found, strict=True):
            low, high = (100 * end for end in one["bounds"][SHOWN]["both"])
            ax.plot([low, high], [place, place], color="#9ecae1", linewidth=5,
                    solid_capstyle="butt",
                    label=None if place else f"bounds of both stages, odds ratio {SHOWN}",
                    )  # fmt: skip
        for name, label in (("plain", "plain mean of replies"), ("hajek", "weighted, Hájek mean")):
            colour, marker = LOOKS[name]
            middle = [100 * one[name]["estimate"] for one in found]
            estimates = [one[name] for one in found]
            sides = ([100 * (x["estimate"] - x["low"]) for x in estimates],
                     [100 * (x["high"] - x["estimate"]) for x in estimates])  # fmt: skip
            ax.errorbar(middle, places, xerr=sides, fmt=marker, color=colour, label=label,
                        markersize=4, capsize=2, linewidth=1.1)  # fmt: skip
        ax.plot([100 * one["truth"] for one in found], places, "*", color="#000000", markersize=8,
                label="truth, everybody registered", linestyle="none")  # fmt: skip
        ax.set_yticks(places, [one["presentation"] for one in found])
        ax.set_ylim(-0.6, len(found) - 0.4)
        ax.set_xlabel("share that passed the course (%), with 95% interval")
        figure.suptitle("Replies depend on the outcome: neither weights nor intervals reach the "
                        "truth", fontsize=10)  # fmt: skip
        figure.legend(loc="outside lower center", ncols=2)
        figure.savefig(path, dpi=160)


PAGES: Mapping[str, Callable[[Saved], Written]] = {
    "evaluation": evaluation,
    "training": training,
    "courses": courses,
}
