"""Every number of both checkouts' outputs, compared."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compare.agreement import (
    RELATIVE,
    Agreement,
    Difference,
    Expected,
    compared_files,
)
from benchmarks.compare.checkout import Checkout
from benchmarks.compare.commands import COMMANDS, Command, write_scenarios
from benchmarks.compare.expected import EXPECTED
from benchmarks.compare.worlds import SMALL, write_world

_SHOWN = 6  # differences of a command that are printed


@dataclass(frozen=True, slots=True)
class Line:
    """What was found of one command."""

    command: Command
    found: Agreement
    explained: tuple[Expected | None, ...]  # of each difference

    @property
    def same(self) -> bool:
        """Whether there is no difference but expected ones."""
        return None not in self.explained

    @property
    def verdict(self) -> str:
        """One word of it."""
        if not self.explained:
            return "same" if self.command.code == 0 else f"both end with {self.command.code}"
        return "expected" if self.same else "DIFFERENT"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        largest = self.found.largest
        return {
            "world": self.command.world,
            "command": self.command.shown,
            "numbers": self.found.numbers,
            "largest_difference": largest if math.isfinite(largest) else None,
            "verdict": self.verdict,
            "differences": [
                {"place": d.place, "what": d.what, "why": None if e is None else e.why}
                for d, e in zip(self.found.differences, self.explained, strict=True)
            ],
            "added": list(self.found.added),
            "texts_changed": self.found.texts,
        }


def compared_numbers(old: Checkout, new: Checkout, scratch: Path) -> list[Line]:
    """Run every command in both checkouts, side by side, and compare what they wrote."""
    worlds = scratch / "worlds"
    for name, world in SMALL.items():
        write_world(worlds / name, world)
    write_scenarios(worlds / "testbed")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda checkout: _run(replace(checkout, threads=1), scratch), (old, new)))
    places = [(c, _out(world, i)) for world, cs in COMMANDS.items()
              for i, c in enumerate(cs)]  # fmt: skip
    return [_line(c, scratch / old.name / out, scratch / new.name / out) for c, out in places]


def _out(world: str, place: int) -> Path:
    return Path(world) / f"{place:03d}"


def _run(checkout: Checkout, scratch: Path) -> None:
    for world, commands in COMMANDS.items():
        where = scratch / checkout.name
        jobs = []
        for place, command in enumerate(commands):
            out, before = (where / _out(world, p) for p in (place, place - 1))
            arguments = command.arguments(scratch / "worlds" / world, out, before)
            if command.alone:
                checkout.run_alone(arguments, out)
            else:
                jobs.append((arguments, out))
        checkout.run_batch(jobs)
        print(f"{checkout.name}: {len(commands)} commands on {world}", file=sys.stderr, flush=True)


def _line(command: Command, old: Path, new: Path) -> Line:
    found = _compared(command, old, new)
    explained = tuple(
        next((e for e in EXPECTED if e.explains(command.world, command.shown, d.place)), None)
        for d in found.differences
    )
    return Line(command, found, explained)


def _compared(command: Command, old: Path, new: Path) -> Agreement:
    codes = [int((place / "code").read_text()) for place in (old, new)]
    if codes[0] != command.code:
        said = (old / "stderr.txt").read_text()
        raise RuntimeError(f"{command.world}, {command.shown} ended with {codes[0]}:\n{said}")
    if codes[1] != codes[0]:
        last = (new / "stderr.txt").read_text().strip().splitlines()[-2:]
        what = f"{codes[0]} -> {codes[1]}: {' '.join(last)[:300]}"
        return Agreement(0, math.inf, (Difference("exit code", math.inf, what),))
    found = Agreement()
    for output in command.outputs:
        found += compared_files(old / output.file, new / output.file, output.keys)
    if command.outputs and not found.numbers:
        raise RuntimeError(f"{command.world}, {command.shown}: no numbers to compare.")
    return found


def print_lines(lines: Sequence[Line]) -> None:
    """Print one line per command, and the differences below it."""
    print(f"{'world':9}{'command':62}{'numbers':>9}{'largest':>10}  verdict")
    for line in lines:
        found, shown = line.found, line.command.shown
        print(
            f"{line.command.world:9}{shown[:61]:62}{found.numbers:9}{found.largest:10.1e}  "
            f"{line.verdict}"
        )
        pairs = zip(found.differences, line.explained, strict=True)
        for difference, reason in list(pairs)[:_SHOWN]:
            why = "" if reason is None else f" (expected: {reason.why})"
            print(f"{'':9}  {difference.place}: {difference.what}{why}")
        if len(found.differences) > _SHOWN:
            print(f"{'':9}  ... and {len(found.differences) - _SHOWN} more")
    total = sum((line.found for line in lines), Agreement())
    print(
        f"{len(lines)} commands, {total.numbers} numbers, tolerance {RELATIVE:g}; "
        f"{sum(not line.same for line in lines)} commands differ; {total.texts} texts changed, "
        f"{len(total.added)} keys or columns added."
    )
    used = {e for line in lines for e in line.explained}
    for entry in EXPECTED:
        if entry not in used:
            print(f"Explains nothing any more: {entry}")
