"""A two-phase sample from arrays: simulations know the covariates of everybody in every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedipw.errors import InputError
from fedipw.evaluation.phases import FittedEnrollment, StepPhase
from fedipw.evaluation.sample import TwoPhase
from fedipw.numerics.checks import check_finite, check_rows
from fedipw.selection.logistic import LogisticFit, logistic_fit
from fedipw.tables.partitions import NOBODY, Block, Blocks, Frame, rows_per_block

if TYPE_CHECKING:
    from fedipw.numerics import BoolArray, CodeArray, FloatArray, IntArray


def fitted_two_phase(
    Z: FloatArray,
    enrolled: BoolArray,
    X: FloatArray,
    client: IntArray,
    round_index: IntArray,
    *,
    replied: BoolArray,
) -> TwoPhase:
    """Return the replies as a two-phase sample, with logistic models of both stages.

    Parameters
    ----------
    Z
        Pre-enrollment covariates of the population, without a constant, (N, q).
    enrolled
        Who is enrolled, (N,).
    X
        Covariates of participation, one row per enrolled client and round, (rows, k); those in
        ``Z`` that matter for it among them.
    client
        Row of ``Z`` of each of these, (rows,).
    round_index
        Round of each of these, 0 to R - 1, (rows,).
    replied
        Who replied, (rows,).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> Z, enrolled = rng.normal(size=(400, 1)), rng.random(400) < 0.5
    >>> client = np.repeat(np.flatnonzero(enrolled), 3)
    >>> sample = fitted_two_phase(Z, enrolled, Z[client], client, np.arange(len(client)) % 3,
    ...                           replied=rng.random(len(client)) < 0.4)
    >>> sample.rounds, bool(abs(sample.weights.sum() / 400 - 1) < 0.1)
    (3, True)
    """
    check_rows(len(Z), enrolled=enrolled)
    check_rows(len(X), client=client, round_index=round_index, replied=replied)
    check_finite(Z, [f"Z{j}" for j in range(Z.shape[1])], "population")
    check_finite(X, [f"X{j}" for j in range(X.shape[1])], "rounds")
    if not enrolled[client].all():
        raise InputError("Rounds list clients that are not enrolled.")
    code = np.cumsum(enrolled) - 1
    phase = FittedEnrollment.of(*_fit(Z, enrolled), np.ascontiguousarray(Z[enrolled].T))
    replies = np.flatnonzero(replied)
    step = StepPhase.of(
        *_fit(X, replied, client), codes=code, replies=replies, n=int(enrolled.sum())
    )
    return TwoPhase(
        client=code[client[replies]],
        round=round_index[replies],
        prob=step.reply_prob,
        rounds=int(round_index.max()) + 1,
        enrollment=phase,
        steps=(step,),
    )


def _fit(
    columns: FloatArray, labels: BoolArray, clients: CodeArray = NOBODY
) -> tuple[Blocks, Frame, LogisticFit]:
    """Return rows in their frame, the frame, and the fit on them."""
    frame, size = Frame.of(columns.T), rows_per_block(columns.shape[1])
    blocks = Blocks(memory=2**63)
    for first in range(0, len(columns), size):
        part = np.array(columns[first : first + size].T, dtype=np.float64, order="C")
        flags, mine = labels[first : first + size].astype(np.int8), clients[first : first + size]
        blocks.append(Block(frame.standard(part), flags, np.empty(0), clients=mine))
    names = [f"x{j}" for j in range(columns.shape[1])]
    return blocks, frame, logistic_fit(blocks, names, frame=frame).checked()
