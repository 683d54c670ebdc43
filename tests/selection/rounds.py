"""Rounds of the same clients as arrays, and what a learner says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.special import expit

from fedipw.numerics import BoolArray, FloatArray
from fedipw.selection.logistic import NewtonLogistic
from fedipw.selection.participation import (
    Participation,
    ParticipationSettings,
    Source,
    StoreMaker,
    panel,
)
from fedipw.selection.steps import Formulas, participation_steps
from fedipw.tables.ledger import Round
from fedipw.tables.population import Members

Stores = Callable[[ParticipationSettings], StoreMaker | None]


def in_panel(settings: ParticipationSettings) -> StoreMaker | None:
    """Return where rows of a simulation lie."""
    return panel(settings.estimator)


def in_blocks(settings: ParticipationSettings) -> StoreMaker | None:
    """Return where rows of a ledger lie: the default."""
    del settings
    return None


STORES = {"panel": in_panel, "blocks": in_blocks}


class Log(NamedTuple):
    """Constant covariates (n, q_z), covariates (R, n, q_x) and replies (R, n)."""

    static: FloatArray
    covariates: FloatArray
    replied: BoolArray

    def members(self) -> Members:
        """Return the clients, whose columns are z1, z2 and so on."""
        ids, names = range(len(self.static)), [f"z{j + 1}" for j in range(self.static.shape[1])]
        return Members(
            pl.DataFrame({"unit_id": ids, **dict(zip(names, self.static.T, strict=True))})
        )

    def round(self, r: int) -> Round:
        """Return a round, counted from 0, whose columns are x1, x2 and so on."""
        columns = {f"x{j + 1}": x for j, x in enumerate(self.covariates[r].T)}
        return Round(index=r + 1, rows=np.arange(len(self.static)), table=pl.DataFrame(columns))

    def stacked(self, rounds: slice) -> tuple[FloatArray, BoolArray]:
        """Return rows (z, x) and replies of some rounds."""
        x = self.covariates[rounds]
        X = np.column_stack([np.tile(self.static, (len(x), 1)), x.reshape(-1, x.shape[2])])
        return X, self.replied[rounds].ravel()

    def fitted_prob(self, rounds: slice, at: int) -> FloatArray:
        """Return what logistic regression on ``rounds`` says of all clients in round ``at``."""
        model = NewtonLogistic().fit(*self.stacked(rounds))
        return model.predict_proba(self.stacked(slice(at, at + 1))[0])[:, 1]


def random_log(
    seed: int = 0, rounds: int = 5, clients: int = 120, static: int = 1, rate: float = -0.7
) -> Log:
    """Return rounds in which replies depend on z1 and x1."""
    rng = np.random.default_rng(seed)
    z, x = rng.normal(size=(clients, static)), rng.normal(size=(rounds, clients, 1))
    log_odds = rate + 0.5 * z[:, 0] + 0.7 * x[:, :, 0]
    return Log(z, x, rng.random((rounds, clients)) < expit(log_odds))


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
