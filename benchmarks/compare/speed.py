"""Time and memory of both checkouts on the same files, in turns."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.checkout import Checkout, Usage
from benchmarks.compare.worlds import LARGE, METRICS, PEOPLE, ROUNDS, TARGETS

SLOWER = 1.10  # ratios above this are named
_SMALL = 0.01  # scale of the worlds that kernels are compiled on
_SHORT, _LONG = 5, 600  # rounds of the simulations

_LOG = ("--population", f"{{world}}/{PEOPLE}", "--rounds", f"{{world}}/{ROUNDS}")
_WEIGHTS = ("weights", *_LOG, "--out", "{out}/weights.parquet", "--participation-fit")
_AUDIT = ("audit", *_LOG, "--out", "{out}/audit.html", "--json", "{out}/audit.json")
_UNITS = (f"{{world}}/{PEOPLE}", "--targets", f"{{world}}/{TARGETS}")
_CALIBRATE = ("calibrate", *_UNITS, "--out", "{out}/weights.parquet", "--distance")
START, SIMULATED = "start-up and 5 rounds", "simulate, 600 rounds"


@dataclass(frozen=True, slots=True)
class Case:
    """A command that is timed on a world."""

    name: str
    world: str
    options: tuple[str, ...]

    def arguments(self, worlds: Path, out: Path) -> list[str]:
        """Return the words of the command line."""
        return [o.format(world=worlds / self.world, out=out) for o in self.options]


CASES = (
    Case("help", "runs", ("--help",)),
    Case(START, "runs", ("simulate", f"{{world}}/{_SHORT}.toml", "--out", "{out}/run")),
    Case(SIMULATED, "runs", ("simulate", f"{{world}}/{_LONG}.toml", "--out", "{out}/run")),
    Case("ledger, past", "ledger", (*_WEIGHTS, "past")),
    Case("ledger, pooled", "ledger", (*_WEIGHTS, "pooled")),
    Case("fitting", "wide", (*_WEIGHTS, "pooled", "--participation", "z1")),
    Case("calibrate, quadratic", "units", (*_CALIBRATE, "quadratic")),
    Case("calibrate, entropy", "units", (*_CALIBRATE, "entropy")),
    Case("audit", "audit", _AUDIT),
    Case("audit, metrics", "audit", (*_AUDIT, "--metrics", f"{{world}}/{METRICS}", "--by", "os")),
)
NET = "simulator, without start-up"


@dataclass(frozen=True, slots=True)
class Timing:
    """The best of some runs of one case, in both checkouts."""

    name: str
    old: Usage
    new: Usage

    def ratios(self) -> dict[str, float]:
        """Return new over old, of each thing measured."""
        return {
            name: getattr(self.new, name) / getattr(self.old, name)
            for name in Usage.__slots__
            if getattr(self.old, name)
        }

    def exceeded(self) -> list[str]:
        """Return what is more than it was, by more than one run differs from the next."""
        found = self.ratios()
        words = {"seconds": "time", "megabytes": "memory"}
        return [word for name, word in words.items() if found.get(name, 1.0) > SLOWER]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        sides = {"old": self.old, "new": self.new}
        used = {s: {n: getattr(u, n) for n in Usage.__slots__} for s, u in sides.items()}
        return {"case": self.name, **used, "ratio": self.ratios(), "exceeds": self.exceeded()}


def compared_speed(old: Checkout, new: Checkout, scratch: Path, repeats: int) -> list[Timing]:
    """Run every case in both checkouts in turns, and return the best of each."""
    worlds, small = scratch / "large", scratch / "tiny"
    for directory, scale in ((small, _SMALL), (worlds, 1.0)):
        _write_worlds(directory, scale)
    for checkout in (old, new):  # modules and kernels are compiled once, here
        _compile(checkout, small, scratch / checkout.name / "compiled")
    timings = {}
    for case in CASES:
        timings[case.name] = _timed(case, (old, new), scratch, worlds, repeats=repeats)
        print(f"timed: {case.name}", file=sys.stderr, flush=True)
    return _with_simulator(timings)


def _timed(
    case: Case, pair: tuple[Checkout, Checkout], scratch: Path, worlds: Path, *, repeats: int
) -> Timing:
    """Return the best of both; where one is slower it may be chance, and both run again."""
    runs: dict[str, list[Usage]] = {checkout.name: [] for checkout in pair}
    for turn in range(3 * repeats):
        for checkout in pair[:: 1 if turn % 2 == 0 else -1]:
            out = scratch / checkout.name / "timed"
            runs[checkout.name].append(checkout.run_alone(case.arguments(worlds, out), out))
            _check(checkout, case, out)
        timing = Timing(case.name, *(_best(runs[checkout.name]) for checkout in pair))
        if turn + 1 >= repeats and 1.0 / SLOWER < timing.ratios()["seconds"] < SLOWER:
            break
    return timing


def _write_worlds(directory: Path, scale: float) -> None:
    """Write worlds in processes of their own: a process starts with its parent's peak memory."""
    (directory / "runs").mkdir(parents=True)
    for rounds in (_SHORT, _LONG):
        count = max(_SHORT, int(rounds * scale))
        (directory / "runs" / f"{rounds}.toml").write_text(f"rounds = {count}\n")
    context = multiprocessing.get_context("spawn")
    for name in LARGE:
        process = context.Process(target=_write_world, args=(name, directory / name, scale))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"The world {name} was not written.")


def _write_world(name: str, path: Path, scale: float) -> None:
    LARGE[name](path, scale)


def _compile(checkout: Checkout, worlds: Path, where: Path) -> None:
    jobs = [
        (case.arguments(worlds, where / str(i)), where / str(i)) for i, case in enumerate(CASES)
    ]
    checkout.run_batch(jobs)
    for case, (_, out) in zip(CASES, jobs, strict=True):
        _check(checkout, case, out)


def _check(checkout: Checkout, case: Case, out: Path) -> None:
    code = (out / "code").read_text()
    if code != "0":
        said = (out / "stderr.txt").read_text()
        raise RuntimeError(f"{checkout.name}: {case.name} ended with {code}:\n{said}")


def _best(runs: Sequence[Usage]) -> Usage:
    return Usage(*(min(getattr(run, name) for run in runs) for name in Usage.__slots__))


def _with_simulator(timings: Mapping[str, Timing]) -> list[Timing]:
    """Return the timings, with the simulator's time less that of starting up."""
    start, whole = timings[START], timings[SIMULATED]
    net = Timing(NET, _less(whole.old, start.old), _less(whole.new, start.new))
    return [*timings.values(), net]


def _less(whole: Usage, start: Usage) -> Usage:
    """Return the time of a run without that of its start; memory is the whole run's."""
    return Usage(
        whole.seconds - start.seconds,
        whole.processor_seconds - start.processor_seconds,
        whole.megabytes,
    )


def print_timings(timings: Sequence[Timing], repeats: int) -> None:
    """Print seconds and memory of both, and the ratios."""
    heads = ("old s", "new s", "ratio", "cpu ratio", "old MB", "new MB", "ratio")
    print(f"{'case':30}" + "".join(f"{head:>10}" for head in heads))
    for timing in timings:
        old, new, ratio = timing.old, timing.new, timing.ratios()
        print(
            f"{timing.name:30}{old.seconds:10.2f}{new.seconds:10.2f}"
            f"{ratio.get('seconds', 1.0):10.2f}{ratio.get('processor_seconds', 1.0):10.2f}"
            f"{old.megabytes:10.0f}{new.megabytes:10.0f}{ratio['megabytes']:10.2f}"
        )
    over = [f"{t.name} ({' and '.join(t.exceeded())})" for t in timings if t.exceeded()]
    print(f"Best of {repeats} or more. Above {SLOWER:.2f}: {'; '.join(over) or 'none'}.")
