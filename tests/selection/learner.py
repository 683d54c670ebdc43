"""Learners of participation, and what they say of the rounds of a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import polars as pl

from fedipw.numerics import FloatArray
from fedipw.selection.participation import (
    Participation,
    ParticipationSettings,
    Source,
    StoreMaker,
    panel,
)
from fedipw.selection.propensity import NewtonLogistic
from fedipw.selection.steps import Formulas, participation_steps
from worlds import EVERYONE, Log, World, arrays

Stores = Callable[[ParticipationSettings], StoreMaker | None]


def in_panel(settings: ParticipationSettings) -> StoreMaker | None:
    """Return where rows of a simulation lie."""
    return panel(settings.estimator)


def in_blocks(settings: ParticipationSettings) -> StoreMaker | None:
    """Return where rows of a ledger lie: the default."""
    del settings
    return None


STORES = {"panel": in_panel, "blocks": in_blocks}


def random_log(
    seed: int = 0, rounds: int = 5, clients: int = 120, static: int = 1, rate: float = -0.7
) -> Log:
    """Return rounds in which replies depend on z1 and x1; everybody is enrolled."""
    world = World(
        size=clients, rounds=rounds, seed=seed, enrollment=EVERYONE, changing=("x1",),
        covariates=tuple(f"z{j + 1}" for j in range(static)),
        reply=rate + 0.5 * pl.col("z1") + 0.7 * pl.col("x1"),
    )  # fmt: skip
    return arrays(world)


def fitted_prob(log: Log, rounds: slice, at: int) -> FloatArray:
    """Return what logistic regression on ``rounds`` says of all clients in round ``at``."""
    model = NewtonLogistic().fit(*log.stacked(rounds))
    return model.predict_proba(log.stacked(slice(at, at + 1))[0])[:, 1]


def learner_of(
    log: Log,
    settings: ParticipationSettings | None = None,
    formulas: Formulas | None = None,
    store: Stores = in_panel,
) -> Participation:
    """Return a learner of a log's rounds that has seen none of them."""
    settings, members = settings or ParticipationSettings(refit_every=1), log.members()
    steps = participation_steps(log.round(0), members, formulas or Formulas())
    return Participation(members, steps, settings, store=store(settings))


class Told(NamedTuple):
    """What all clients of a round were given, (n,), what the replies were, and its source."""

    prob: FloatArray
    replies: FloatArray
    source: Source


def played(model: Participation, log: Log, rounds: Iterable[int]) -> list[Told]:
    """Run some rounds in order and return what each was given."""
    found = []
    for r in rounds:
        model.open(log.round(r))
        replied = log.replied[r]
        prob, known, source = model.prob(replied)
        assert known.all()
        (rows,) = model.step_rows(replied)
        np.testing.assert_allclose(rows.prob[replied], prob, rtol=1e-13)
        np.testing.assert_array_equal(rows.passed, replied)
        assert rows.source is source
        assert all(taken.all() for taken in model.close(replied))
        found.append(Told(rows.prob, prob, source))
    return found


def all_rounds(
    log: Log,
    settings: ParticipationSettings | None = None,
    formulas: Formulas | None = None,
    store: Stores = in_panel,
) -> list[Told]:
    """Run every round in order and return what each was given."""
    return played(learner_of(log, settings, formulas, store), log, range(len(log.replied)))
