"""What an audit says of training: the method that fits, and what a server's updates have shown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedipw.weighting.methods import default_method

if TYPE_CHECKING:
    from fedipw.audit.values import Audit
    from fedipw.tables.ledger import Ledger

ENOUGH_ENROLLED = 100  # for a memory: with 50 enrolled clients it lost to plain means in a draw
RENEWED = 20.0  # replies of each client, on average, from which on a memory was ahead
UNEVEN = 2.0  # design effect of enrollment weights from which invitations by design saved much
RELIED, UNRELIED = 0.75, 0.25  # mean reliance that answers whether weights are worth their noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a federation can do, as far as that is known; none where it is not."""

    memory: bool | None = None  # keep the latest update of every enrolled client
    invitations: bool | None = None  # choose whom to invite


def advice(audit: Audit, means: Means) -> tuple[str, ...]:
    """Return which method to train with on such a population, and why.

    The rules are those of docs/which-method.md, read off the regimes measured there.
    """
    sizes = audit.sizes
    if not sizes.enrolled:
        return ()
    method = default_method(everyone=sizes.population_table, training=True)
    known = (
        "the whole population is known"
        if sizes.population_table
        else f"the population is known by {sizes.population_source.value}"
    )
    best = f"Train with {method}: {known}, and its error was above FedAvg's in no draw where "
    out = [f"{best}selection matters."]
    out += [*_memory(audit, means, method), *_invitations(audit, means)]
    relied = mean_reliance(audit)
    if relied is not None and relied <= UNRELIED:
        out.append(
            f"The updates of the last rounds relied on enrollment weights by {relied:.2f}: "
            "participation-only-hajek does as well here and needs no table."
        )
    return tuple(out)


def _memory(audit: Audit, means: Means, method: str) -> Iterator[str]:
    """Say whether a memory of clients pays, where it may be kept."""
    sizes = audit.sizes
    if means.memory is False or not sizes.rounds:
        return
    each = sizes.replies / sizes.enrolled
    if each >= RENEWED and sizes.enrolled >= ENOUGH_ENROLLED:
        start = "Better, since" if means.memory else "If"
        yield (
            f"{start} the server may keep one update per enrolled client: efficient-hajek. Clients "
            f"replied {each:.3g} times each; where they come back that often its error was below "
            f"that of {method} in most regimes measured, by more than half where what clients "
            "report before a round predicts their updates, and up to a fifth above in the others."
        )
    elif means.memory:
        why = (
            f"clients replied {each:.2g} times each so far, too seldom to renew it"
            if each < RENEWED
            else f"with {sizes.enrolled} enrolled clients it lost to FedAvg in a draw"
        )
        yield f"A memory of clients (efficient-hajek) is not advised: {why}."


def _invitations(audit: Audit, means: Means) -> Iterator[str]:
    """Say whether invitations by design pay, where the server chooses whom to invite."""
    part = next((one for one in audit.weights if one.name == "enrollment"), None)
    chosen = any(line.invited < 0.95 * line.enrolled for line in audit.rounds)
    possible = chosen if means.invitations is None else means.invitations
    if part is None or not possible:
        return
    effect = f"the design effect of enrollment weights is {part.design_effect:.2g}"
    if part.design_effect >= UNEVEN:
        yield (
            f'Invite with invitations="proportional": {effect}, and from {UNEVEN:g} on it saved '
            "a quarter to two thirds of the error for the same number of invitations."
        )
    elif means.invitations:
        yield f"Uniform invitations will do: {effect}, and below {UNEVEN:g} little is saved."


def mean_reliance(audit: Audit) -> float | None:
    """Return the mean reliance on enrollment weights (O21) of the last quarter of the rounds."""
    known = [line.reliance for line in audit.rounds if line.reliance is not None]
    late = known[-max(1, len(known) // 4) :]
    return sum(late) / len(late) if late else None


def recorded_reliance(ledger: Ledger | None) -> Mapping[int, float]:
    """Return the reliance on enrollment weights by round, where a server wrote it by its ledger.

    A server's checkpoint has the metrics of every round. What is not there, or cannot be read, is
    left out.
    """
    if ledger is None or not isinstance(ledger.directory, Path):  # no server writes to a URL
        return {}
    folder, out = ledger.directory / "checkpoint", {}
    if not folder.is_dir():
        return {}
    for index in ledger.rounds:
        try:
            text = (folder / f"train-{index:06d}.json").read_text(encoding="utf-8")
            value = float(json.loads(text)["metrics"]["fedipw-reliance"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if math.isfinite(value) and 0.0 <= value <= 1.0:
            out[index] = value
    return out
