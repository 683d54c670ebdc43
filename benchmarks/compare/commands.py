"""The commands whose numbers are compared, world by world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare.worlds import (
    ENROLLED,
    METRICS,
    NOISY,
    OTHER,
    PEOPLE,
    ROUNDS,
    SMALL,
    TARGETS,
)

STDOUT = "stdout.json"
_FORMS = ("", "-hajek")
_CALIBRATED = tuple(
    f"calibrated-{distance}{form}"
    for distance in ("quadratic", "entropy", "linear", "logit", "inverse-logit", "noise-aware")
    for form in _FORMS
)
_WITH_TOTALS = (
    "fedavg", "participation-only", "participation-only-hajek", *_CALIBRATED,
    "efficient", "efficient-hajek",
)  # fmt: skip
_WITH_TABLE = (
    *_WITH_TOTALS,
    *(n + form for n in ("fedipw", "collapsed", "greg", "greg-nonnegative") for form in _FORMS),
)
_RULES = (
    "fedprox", "fednova", "scaffold", "mifa", "fedvarp", "fedau", "amplified", "fedavgm", "fedadam",
    "fedyogi", "fedprox+fedipw", "fednova+fedipw", "scaffold+fedipw", "mifa+fedipw",
    "fedvarp+fedipw", "fedau+fedipw", "amplified+fedipw", "fedadam+fedipw", "scaffold+efficient",
    "fedprox+fedvarp+fedavgm+calibrated-entropy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Output:
    """A file of a command; a table has keys that name its rows, JSON has none."""

    file: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its options, the exit code it must have, and what it writes.

    ``{world}`` in an option is the world's directory, ``{out}`` the command's own and ``{before}``
    that of the command before it.
    """

    world: str
    name: str
    label: str
    options: tuple[str, ...]
    outputs: tuple[Output, ...]
    code: int = 0
    alone: bool = False  # in a process of its own: it starts others

    @property
    def shown(self) -> str:
        """The command as it is printed and as ``EXPECTED`` names it."""
        return f"{self.name} {self.label}".strip()

    def arguments(self, world: Path, out: Path, before: Path) -> list[str]:
        """Return the words of the command line."""
        given = (o.format(world=world, out=out, before=before) for o in self.options)
        return [self.name, *given]


_WEIGHTS = (Output("weights.parquet", ("round", "unit_id")), Output(STDOUT))
_ESTIMATES = (Output("estimates.csv", ("group", "estimator")), Output(STDOUT))
_CALIBRATION = (Output("weights.parquet", ("unit_id",)), Output(STDOUT))
_AUDIT = (Output("audit.json"),)


@dataclass(frozen=True, slots=True)
class _Commands:
    """Makes the commands of one world."""

    world: str
    sources: tuple[str, ...]

    def weights(self, label: str, *more: str, code: int = 0) -> Command:
        options = (*self.sources, "--rounds", f"{{world}}/{ROUNDS}", "--json", *more)
        options += ("--out", "{out}/weights.parquet")
        return Command(self.world, "weights", label, options, _WEIGHTS if code == 0 else (), code)

    def scheme(self, name: str, *more: str) -> Command:
        return self.weights(" ".join((name, *more)), "--scheme", name, *more)

    def evaluate(self, label: str, *more: str) -> Command:
        options = ("--metrics", f"{{world}}/{METRICS}", *self.sources, "--json", *more)
        options += ("--rounds", f"{{world}}/{ROUNDS}", "--out", "{out}/estimates.csv")
        return Command(self.world, "evaluate", label, options, _ESTIMATES)

    def audit(self, label: str, *more: str, rounds: bool = True) -> Command:
        options = (*self.sources, "--out", "{out}/audit.html", "--json", "{out}/audit.json", *more)
        options += ("--rounds", f"{{world}}/{ROUNDS}") if rounds else ()
        return Command(self.world, "audit", label, options, _AUDIT)

    def calibrate(self, distance: str, *more: str, targets: str = TARGETS) -> Command:
        files = (f"{{world}}/{ENROLLED}", "--targets", f"{{world}}/{targets}")
        options = (
            *files,
            "--distance",
            distance,
            "--out",
            "{out}/weights.parquet",
            "--json",
            *more,
        )
        label = " ".join((distance, *more, *(["noisy"] if targets == NOISY else [])))
        return Command(self.world, "calibrate", label, options, _CALIBRATION)


_POOLED, _SAME = ("--participation-fit", "pooled"), ("--participation-fit", "same-round")
_METRIC = ("--metrics", f"{{world}}/{METRICS}")


def _table() -> Iterator[Command]:
    c = _Commands("table", ("--population", f"{{world}}/{PEOPLE}"))
    for name in _WITH_TABLE:
        yield c.scheme(name)
    for name in ("fedipw", "fedipw-hajek", "calibrated-entropy", "efficient", "collapsed"):
        yield c.scheme(name, *_POOLED)
        yield c.scheme(name, *_SAME)
    yield c.weights("oracle", "--scheme", "oracle", code=2)
    yield c.scheme("fedipw", "--window", "5", "--refit-every", "3")
    yield c.scheme("fedipw-hajek", "--trim", "3")
    yield c.scheme("greg", "--trim", "2.5", *_POOLED)
    yield c.scheme("fedipw", "--history", "--day-length", "12")
    yield c.scheme("fedipw", "--l2", "2.0", "--lump-below", "0.08")
    yield c.scheme("fedipw", "--strict", "0.0001")
    yield c.weights("strict, refused", "--strict", "0.4", code=4)
    yield c.weights(
        "formulas", "--enrollment", "ns(age, 20, 45, 70) + os*income",
        "--participation", "battery**2 + battery + network:income + os[ios]",
    )  # fmt: skip
    yield c.weights("saved models", "--save-models", "{out}/models", *_POOLED)
    yield c.weights("models of before", "--models", "{before}/models")
    yield c.evaluate("")
    yield c.evaluate("by", "--by", "os", "--by", "region", "--by", "round")
    yield c.evaluate("against", "--against", f"{{world}}/{OTHER}", "--by", "os")
    yield c.evaluate("sensitivity", "--sensitivity", "1.5", "--sensitivity", "3", "--conclusion",
                     "0.55")  # fmt: skip
    yield c.evaluate("jackknife", "--jackknife", "20", "--confidence", "0.9")
    yield c.evaluate("samples", "--samples", "--by", "os")
    for name in ("efficient", "calibrated-entropy", "calibrated-logit"):
        yield c.evaluate(name, "--scheme", name)
    yield c.audit("")
    yield c.audit("without rounds", rounds=False)
    yield c.audit("pooled, metrics", *_POOLED, *_METRIC, "--by", "os", "--min-cell", "20")
    yield c.audit("calibrated", "--scheme", "calibrated-quadratic", *_METRIC)
    yield c.audit("formulas, window", "--enrollment", "age + os", "--participation",
                  "battery + age", "--window", "6")  # fmt: skip


def _steps() -> Iterator[Command]:
    c = _Commands("steps", ("--population", f"{{world}}/{PEOPLE}"))
    names = ("participation-only", "fedipw", "fedipw-hajek", "calibrated-quadratic",
             "calibrated-inverse-logit-hajek", "greg", "greg-nonnegative", "efficient")  # fmt: skip
    for name in names:
        yield c.scheme(name)
        yield c.scheme(name, "--history")
        yield c.scheme(name, *_POOLED)
    yield c.scheme("fedipw", *_SAME)
    yield c.scheme("fedipw", *_POOLED, "--history")
    yield c.scheme("fedipw", "--history", "--window", "6", "--trim", "4")
    yield c.weights(
        "formulas", "--availability", "age + last_available + hour_sin + hour_cos",
        "--participation", "battery + reply_rate",
    )  # fmt: skip
    yield c.evaluate("by", "--by", "os", "--by", "round")
    yield c.evaluate("history", "--history", "--sensitivity", "2")
    yield c.audit("")
    yield c.audit("history, metrics", "--history", *_METRIC, "--by", "region")
    yield c.audit("pooled", *_POOLED)


def _totals() -> Iterator[Command]:
    known = ("--enrolled", f"{{world}}/{ENROLLED}", "--targets", f"{{world}}/{TARGETS}")
    size = ("--population-size", str(SMALL["totals"].clients))
    plain = _Commands("totals", known)
    for name in _WITH_TOTALS:
        if "inverse-logit" not in name and "efficient" not in name:
            yield plain.scheme(name)
    noisy = _Commands("totals", (*known[:3], f"{{world}}/{NOISY}", *size))
    c = _Commands("totals", (*known, *size))
    for name in _WITH_TOTALS:
        yield c.scheme(name, *_POOLED)
    for name in ("calibrated-noise-aware", "calibrated-noise-aware-hajek", "calibrated-quadratic"):
        yield noisy.weights(f"{name} noisy", "--scheme", name)
    yield plain.weights("fedipw", "--scheme", "fedipw", code=2)
    yield plain.scheme("calibrated-quadratic", *_SAME)
    yield plain.scheme("calibrated-quadratic", "--history", "--window", "5", "--trim", "3")
    yield plain.evaluate("")
    yield c.evaluate("by, size", "--by", "os")
    yield c.evaluate("efficient", "--scheme", "efficient", "--sensitivity", "2")
    yield plain.audit("")
    yield c.audit("metrics, size", *_METRIC, "--by", "os")
    yield plain.audit("without rounds", rounds=False)
    for distance in ("quadratic", "entropy", "linear"):
        yield c.calibrate(distance)
        yield c.calibrate(distance, "--slack", "0.02")
    yield c.calibrate("quadratic", "--bounds", "0.3,4", *size)
    yield c.calibrate("quadratic", "--base", "age")
    yield c.calibrate("entropy", "--base", "age")
    yield c.calibrate("logit", "--bounds", "0.2,6")
    yield c.calibrate("inverse-logit", *size)
    yield c.calibrate("quadratic", targets=NOISY)
    yield c.calibrate("entropy", targets=NOISY)


def _changes() -> Iterator[Command]:
    c = _Commands("changes", ("--population", f"{{world}}/{PEOPLE}"))
    names = ("fedavg", "participation-only", "fedipw", "fedipw-hajek", "collapsed",
             "calibrated-quadratic", "calibrated-entropy-hajek", "greg", "efficient")  # fmt: skip
    for name in names:
        yield c.scheme(name)
    for name in ("fedipw", "calibrated-entropy"):
        yield c.scheme(name, *_POOLED)
        yield c.scheme(name, "--history", "--window", "5")
    yield c.audit("")
    yield c.audit("pooled, history", *_POOLED, "--history")


def _missing() -> Iterator[Command]:
    c = _Commands("missing", ("--population", f"{{world}}/{PEOPLE}"))
    for policy in ("indicator", "drop"):
        how = ("--missing", policy)
        for name in ("fedipw", "fedipw-hajek", "calibrated-quadratic", "greg", "collapsed"):
            yield c.scheme(name, *how)
        yield c.scheme("fedipw", *how, *_POOLED)
        yield c.scheme("fedipw", *how, "--history")
        yield c.evaluate(policy, *how, "--by", "region")
        yield c.audit(policy, *how)
    yield c.weights("error", code=2)


_SCENARIOS: Mapping[str, str] = {
    "every weighting": """
rounds = 60
seed = 1
methods = [{methods}, "oracle", "oracle-hajek"]
[population]
size = 400
rows = 10
rows_max = 20
[enrollment]
strength = 0.5
[participation]
kind = "markov"
memory = 0.5
[training]
local_steps = 2
step_size = 0.2
batch_size = 5
""",
    "boosting, folds": """
rounds = 12
seed = 2
methods = ["participation-only", "fedipw", "fedipw-hajek", "greg"]
[population]
size = 200
[propensity]
classifier = "boosting"
folds = 2
per_coefficient = 4.0
""",
    "history, trim": """
rounds = 60
seed = 3
trim = 3.0
methods = ["fedipw", "fedipw-hajek", "efficient", "fedvarp+fedipw", "fedau+fedipw"]
[population]
size = 400
[propensity]
history = true
""",
    "same round, samples": """
rounds = 60
seed = 4
target = "sample"
methods = ["fedavg", "fedipw-hajek", "calibrated-entropy-hajek", "oracle-hajek"]
[population]
size = 400
rows = 5
rows_max = 40
[participation]
kind = "data"
label = 0.5
size = 0.5
[propensity]
window = "same-round"
folds = 3
balance = "z1 + z2 + z2**2"
""",
}
_STUDY = """
rounds = 50
seeds = 2
methods = [{methods}]
reference = "participation-only"
[base.population]
size = 300
[scenarios.testbed]
[scenarios.uneven]
training = {{ local_steps = 5, step_size = 0.05, steps_coefficients = {{ z1 = 4.0 }} }}
[scenarios.batches]
training = {{ local_steps = 5, step_size = 0.1, batch_size = 4 }}
rules = {{ fedprox = {{ mu = 0.3 }}, mifa = {{ wait = 10 }} }}
"""


def _file(label: str) -> str:
    return f"{label.replace(', ', '-').replace(' ', '-')}.toml"


def write_scenarios(directory: Path) -> None:
    """Write the files of simulations and of the study."""
    directory.mkdir(parents=True)
    every = ", ".join(f'"{name}"' for name in _WITH_TABLE)
    for label, text in _SCENARIOS.items():
        (directory / _file(label)).write_text(text.replace("{methods}", every))
    study = ("fedavg", "participation-only", "fedipw", "efficient", "oracle", *_RULES)
    named = ", ".join(f'"{name}"' for name in study)
    (directory / "study.toml").write_text(_STUDY.format(methods=named))


def _simulated() -> Iterator[Command]:
    run = (Output("history.parquet", ("method", "round")), Output("summary.json"))
    for label in _SCENARIOS:
        options = (f"{{world}}/{_file(label)}", "--out", "{out}")
        yield Command("testbed", "simulate", label, options, run)
    row = ("scenario", "method")
    study = (
        Output("results.parquet", (*row, "seed")),
        Output("curves.parquet", (*row, "seed", "round")),
        Output("summary.csv", row), Output("comparison.csv", row), Output("ranks.csv", ("method",)),
    )  # fmt: skip
    options = ("{world}/study.toml", "--out", "{out}")
    yield Command("testbed", "study", "", options, study, alone=True)
    panels = (
        Output("results.csv", ("panel", "method", "x", "seed")),
        Output("summary.csv", ("panel", "method", "x")),
        Output("errors.csv", ("strength", "method", "seed")), Output(STDOUT),
    )  # fmt: skip
    few = ("--seeds", "3", "--rounds", "120", "--out", "{out}", "--json")
    yield Command("testbed", "reproduce", "", few, panels, alone=True)


COMMANDS: Mapping[str, tuple[Command, ...]] = {
    "testbed": tuple(_simulated()),
    "table": tuple(_table()),
    "steps": tuple(_steps()),
    "totals": tuple(_totals()),
    "changes": tuple(_changes()),
    "missing": tuple(_missing()),
}
