"""Participation by secure sums against the pooled fit, and with clients that never answer."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import default_rng

from fedipw.errors import SeparationError
from fedipw.numerics import FloatArray
from fedipw.private.newton import (
    PARTICIPATION,
    ClientRows,
    OncePerPass,
    RowPlan,
    likelihood_contribution,
    private_fit,
)
from fedipw.private.sums import LocalSums, SumNotOpenedError, SumRequest, SumResult
from fedipw.selection.logistic import LogisticFit, logistic_fit
from fedipw.tables.partitions import Block, Blocks

NAMES = ("z", "x", "ios")
PLAN = RowPlan(
    names=NAMES, low=np.array([-4.0, -5.0, 0.0]), high=np.array([4.0, 5.0, 1.0]), most_rows=12
)


def client_rows(clients: int, seed: int = 3) -> list[Block]:
    """Return rows of clients, of 3 to 12 rounds each, that reply by a logistic model."""
    rng, out = default_rng(seed), []
    for _ in range(clients):
        m = int(rng.integers(3, 13))
        z = float(np.clip(rng.standard_normal(), -4.0, 4.0))
        x = np.clip(0.5 * z + rng.standard_normal(m), -5.0, 5.0)
        columns = np.vstack([np.full(m, z), x, np.full(m, float(rng.random() < 0.3))])
        odds = -0.4 + 0.5 * columns[0] + 0.8 * columns[1] - 0.6 * columns[2]
        replied = (rng.random(m) < 1.0 / (1.0 + np.exp(-odds))).astype(np.int8)
        out.append(Block(columns, replied, np.empty(0)))
    return out


def pooled(blocks: list[Block]) -> LogisticFit:
    """Return the fit over all rows in one place."""
    return logistic_fit(Blocks.of(blocks), NAMES).checked()


def store(blocks: list[Block], plan: RowPlan = PLAN, *, bits: int = 64) -> ClientRows:
    """Return the rows behind sums in process, all clients reachable."""
    functions = [{PARTICIPATION: OncePerPass(block)} for block in blocks]
    sums = LocalSums(functions, minimum=10, bits=bits)
    return ClientRows(sums, plan, clients=len(blocks))


class Shifts:
    """Clients that are reachable by turns; sums of fewer than ten are not opened."""

    def __init__(self, blocks: list[Block], turns: list[list[int]]) -> None:
        self._keepers = [OncePerPass(block) for block in blocks]
        self._turns, self._asked = turns, 0

    def sum(self, request: SumRequest) -> SumResult:
        """Return the sum over the clients of this turn."""
        who = self._turns[self._asked % len(self._turns)]
        self._asked += 1
        functions = [{PARTICIPATION: self._keepers[k]} for k in who]
        return LocalSums(functions, minimum=10, bits=64).sum(request)


def test_private_fit_equals_the_pooled_one() -> None:
    """Coefficients, standard errors and likelihood agree to 1e-8 and better."""
    blocks = client_rows(150)
    open_, found = pooled(blocks), private_fit(store(blocks))
    assert found.fit.converged
    assert found.steady
    np.testing.assert_allclose(found.fit.point, open_.point, atol=1e-8, rtol=0.0)
    np.testing.assert_allclose(found.fit.standard_errors, open_.standard_errors, rtol=1e-6)
    assert found.fit.log_likelihood == pytest.approx(open_.log_likelihood, abs=1e-6)
    assert (found.fit.rows, found.fit.selected) == (open_.rows, open_.selected)
    assert found.missing(invited=open_.rows, replied=int(open_.selected)).note == ""
    assert len(found.passes) <= 8


def test_coarse_words_are_off_by_no_more_than_the_bound() -> None:
    """With 32 bits the error of coefficients is within the inverse Hessian times that of sums."""
    blocks = client_rows(150)
    open_ = pooled(blocks)
    rows = store(blocks, bits=32)
    found = private_fit(rows).fit
    frame = PLAN.frame
    inside = frame.matrix() @ open_.point
    exact, counts = _sums_in_frame(blocks, inside)
    # the value's bound is |beta| + log 2 a row, and twice over for two passes; the score's is 1
    per_row = rows.value_error / 2.0 / (np.abs(inside).sum() + np.log(2.0))
    limit = np.abs(np.linalg.inv(exact / counts)).sum(axis=1) * per_row
    apart = np.abs(frame.matrix() @ found.point - inside)
    assert (apart <= limit).all()
    assert apart.max() > 1e-12


def _sums_in_frame(blocks: list[Block], beta: FloatArray) -> tuple[FloatArray, int]:
    hessian, rows = np.zeros((len(beta), len(beta))), 0
    for block in map(PLAN.frame.block, blocks):
        for row in block.columns.T:
            full = np.append(row, 1.0)
            p = 1.0 / (1.0 + np.exp(-full @ beta))
            hessian, rows = hessian + p * (1.0 - p) * np.outer(full, full), rows + 1
    return hessian, rows


def test_a_contribution_is_the_plain_sum_over_rows() -> None:
    """Value, score and Hessian of one client by a loop over its rows, all within the bound."""
    block = client_rows(1, seed=8)[0]
    beta = np.array([0.3, -0.2, 0.5, -0.1])
    request = PLAN.request(1, beta, np.zeros(4))
    added = likelihood_contribution(request, block)
    value, score, hessian = 0.0, np.zeros(4), np.zeros((4, 4))
    for row, y in zip(PLAN.frame.block(block).columns.T, block.labels, strict=True):
        full = np.append(row, 1.0)
        u = float(full @ beta)
        p = 1.0 / (1.0 + np.exp(-u))
        value += np.log1p(np.exp(u)) - y * u
        score += (p - y) * full
        hessian += p * (1.0 - p) * np.outer(full, full)
    assert np.abs(added).max() <= request.bound
    np.testing.assert_allclose(added[0] * 12.0 * (1.1 + np.log(2.0)), value, rtol=1e-12)
    np.testing.assert_allclose(added[1:5] * 12.0, score, rtol=1e-12)
    np.testing.assert_allclose(added[5:15] * 3.0, hessian[np.tril_indices(4)], rtol=1e-11)


def test_clients_that_are_reachable_by_turns_have_the_same_fit() -> None:
    """A pass over several sums, one of them not opened, is the pass over all clients at once."""
    blocks = client_rows(60)
    turns = [list(range(25)), list(range(55, 60)), list(range(20, 60))]
    rows = ClientRows(Shifts(blocks, turns), PLAN, clients=60, patience=3)
    found = private_fit(rows)
    np.testing.assert_allclose(found.fit.point, pooled(blocks).point, atol=1e-8, rtol=0.0)
    assert {(p.clients, p.sums, p.not_opened) for p in found.passes} == {(60, 3, 1)}


def test_clients_that_never_answer_are_missing_and_reported() -> None:
    """The fit is that of the clients that answered; the counts of the others are reported."""
    blocks = client_rows(120)
    # those who never replied are never reachable
    answering = [b for b in blocks if b.labels.any()]
    silent = len(blocks) - len(answering)
    assert silent > 5
    functions = [{PARTICIPATION: OncePerPass(b)} if b.labels.any() else {} for b in blocks]
    rows = ClientRows(LocalSums(functions, minimum=10, bits=64), PLAN, clients=120)
    found = private_fit(rows)
    np.testing.assert_allclose(found.fit.point, pooled(answering).point, atol=1e-8, rtol=0.0)
    total, replied = (
        sum(b.rows for b in blocks), int(sum(b.labels.sum() for b in blocks))
    )  # fmt: skip
    missing = found.missing(invited=total, replied=replied)
    assert (missing.clients, missing.replies) == (silent, 0)
    assert missing.rows == sum(b.rows for b in blocks if not b.labels.any())
    assert missing.rate > missing.rate_of_all
    assert f"{silent} clients" in missing.note
    # and its probabilities are too high for the enrolled as a whole
    everyone = Blocks.of(blocks)
    mean = np.concatenate([found.fit.prob(b.columns) for b in everyone]).mean()
    assert mean > missing.rate_of_all


def test_too_few_clients_have_no_fit() -> None:
    """Below the fewest clients of a pass nothing is fitted, and the error says how many came."""
    sums = LocalSums(
        [{PARTICIPATION: OncePerPass(block)} for block in client_rows(12)], minimum=10, bits=64
    )
    with pytest.raises(SumNotOpenedError, match="12 clients answered"):
        private_fit(ClientRows(sums, PLAN, clients=40, patience=2, fewest=20))


@pytest.mark.parametrize("whole", [True, False])
def test_separation_is_proved_by_counts(whole: bool) -> None:
    """Complete and quasi-complete separation end the fit with the columns, as in the open one."""
    blocks = []
    for block in client_rows(40):
        labels = (
            (block.columns[1] > 0.3).astype(np.int8)
            if whole
            else np.where(block.columns[2] > 0.5, 0, block.labels).astype(np.int8)
        )
        blocks.append(block._replace(labels=labels))
    assert logistic_fit(Blocks.of(blocks), NAMES).separating == (("x",) if whole else ("ios",))
    with pytest.raises(SeparationError) as error:
        private_fit(store(blocks))
    assert ("x" if whole else "ios") in error.value.columns


def test_values_out_of_range_and_rows_beyond_the_most_are_counted() -> None:
    """What a client cuts or leaves out is in the sum's counts."""
    blocks = client_rows(40)
    wild = blocks[0].columns.copy()
    wild[1, 0] = 40.0
    blocks[0] = blocks[0]._replace(columns=wild)
    plan = RowPlan(names=NAMES, low=PLAN.low, high=PLAN.high, most_rows=10)
    found = private_fit(store(blocks, plan))
    beyond = sum(max(b.rows - 10, 0) for b in blocks)
    assert beyond > 0
    assert {p.left_out for p in found.passes} == {beyond}
    assert {p.cut for p in found.passes} == {int(blocks[0].rows <= 10)}
    last = [b._replace(columns=b.columns[:, -10:], labels=b.labels[-10:]) for b in blocks]
    last[0] = last[0]._replace(columns=np.clip(last[0].columns, PLAN.low[:, None],
                                               PLAN.high[:, None]))  # fmt: skip
    np.testing.assert_allclose(found.fit.point, pooled(last).point, atol=1e-8, rtol=0.0)
