"""The command ``fedipw example``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option

from fedipw.cli.terminal import say


class KindName(StrEnum):
    """What is known of the population."""

    TABLE = "table"
    TOTALS = "totals"


def example(
    out: Annotated[Path, Option(help="Directory of the example, which is not there yet.")] = Path(
        "example"
    ),
    kind: Annotated[
        KindName, Option(help="Whether every device is known, or the enrolled and totals alone.")
    ] = KindName.TABLE,
) -> None:
    """Write a small population, targets, rounds and metrics to try everything with.

    5,000 phones, 30 rounds, two metrics; the truth is known and in truth.csv. Prints the commands
    to try.

    Example: fedipw example --out example
    """
    from fedipw.example_world import example as made

    world = made()
    tried = world.save(out, kind.value)
    say(
        f"Wrote {out}: {world.devices.height} devices, {world.enrolled.height} of them enrolled, "
        f"{len(world.rounds)} rounds, two metrics, and the truth in {out / 'truth.csv'}. Try:"
    )
    for line in tried:
        say("")
        say(line)
