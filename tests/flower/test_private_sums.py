"""Participation fits and metrics over the protocol on Flower, against sums in process."""

import logging
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedipw.flower import InProcessGrid, Private, PrivateClient, RecordingGrid
from fedipw.flower.private import FlowerSums
from fedipw.flower.private_rows import RemainingSums
from fedipw.numerics import FloatArray
from fedipw.private.metrics import (
    CALIBRATION,
    ERRORS,
    MetricPlan,
    OwnReplies,
    PrivateMetric,
    calibration_contribution,
    error_contribution,
    private_means,
)
from fedipw.private.newton import (
    PARTICIPATION,
    ClientRows,
    RowPlan,
    likelihood_contribution,
    private_fit,
)
from fedipw.private.sums import LocalSums, SumRequest
from fedipw.selection.logistic import logistic_fit
from fedipw.tables.partitions import Block, Blocks

CLIENTS = 14
PRIVATE = Private(minimum=5, bits=64)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


class World:
    """Clients with rows of their own and a metric, on a grid that keeps what a server receives."""

    def __init__(self) -> None:
        rng = np.random.default_rng(8)
        self.rows, self.replies = [], []
        for _ in range(CLIENTS):
            x = rng.uniform(-1.0, 1.0, (2, 20))
            odds = 0.3 + x[0] - 0.5 * x[1]
            replied = (rng.random(20) < 1.0 / (1.0 + np.exp(-odds))).astype(np.int8)
            self.rows.append(Block(x, replied, np.empty(0)))
            b = rng.standard_normal(1)
            value = np.clip(0.5 + 0.1 * b + 0.1 * rng.standard_normal(1), 0.0, 1.0)
            self.replies.append(OwnReplies(balance=b, values=value[None], base=np.ones(1)))
        app = ClientApp()
        private = PrivateClient(app, covariates=lambda *_: {}, smallest=3)
        private.contribution(PARTICIPATION)(self.likelihood)
        private.contribution(CALIBRATION)(self.calibration)
        private.contribution(ERRORS)(self.errors)
        nodes = {100 + k: {"k": k} for k in range(CLIENTS)}
        self.inner = InProcessGrid(app, nodes)
        self.grid = RecordingGrid(self.inner)

    def likelihood(self, context: Context, request: SumRequest) -> FloatArray:
        return likelihood_contribution(request, self.rows[int(context.node_config["k"])])

    def calibration(self, context: Context, request: SumRequest) -> FloatArray:
        return calibration_contribution(request, self.replies[int(context.node_config["k"])])

    def errors(self, context: Context, request: SumRequest) -> FloatArray:
        return error_contribution(request, self.replies[int(context.node_config["k"])])


def test_clients_that_come_and_go_have_the_pooled_fit() -> None:
    """Half are online at first and one of them is lost in the sum: the fit is that of all rows."""
    world, asked = World(), 0

    def online() -> list[int]:
        nonlocal asked
        asked += 1
        return [100 + k for k in range(CLIENTS) if asked % 2 == 0 or k % 2 == 0]

    def loses(message: Message) -> bool:
        """Node 102 gets no box the first time it is asked in a pass."""
        told = message.content.config_records["fedipw-sum"]
        return asked % 2 == 1 and message.metadata.dst_node_id == 102 and told["stage"] == "mask"

    world.inner.loses = loses
    plan = RowPlan(names=("a", "b"), low=-np.ones(2), high=np.ones(2), most_rows=20)
    sums = RemainingSums(world.grid, PRIVATE, online)
    rows = ClientRows(sums, plan, clients=CLIENTS, patience=6)
    found = private_fit(rows)
    pooled = logistic_fit(Blocks.of(world.rows), ("a", "b")).checked()
    np.testing.assert_allclose(found.fit.point, pooled.point, atol=1e-8, rtol=0.0)
    assert found.steady
    assert found.answered == CLIENTS
    assert {p.sums for p in found.passes} == {2}
    assert not world.grid.holds(np.concatenate([b.columns.ravel() for b in world.rows]))


def test_metrics_on_the_grid_are_those_of_sums_in_process() -> None:
    """Estimate and interval are the same to rounding, and no value or column was received."""
    world = World()
    plan = MetricPlan(
        metrics=(PrivateMetric(name="accuracy", share=True),), mean=np.zeros(1), scale=np.ones(1)
    )
    found = private_means(FlowerSums(world.grid, range(100, 100 + CLIENTS), PRIVATE), plan)
    functions = [
        {
            CALIBRATION: partial(calibration_contribution, own=own),
            ERRORS: partial(error_contribution, own=own),
        }
        for own in world.replies
    ]
    local = private_means(LocalSums(functions, minimum=5, bits=64), plan)
    line, expected = found.estimates["accuracy"], local.estimates["accuracy"]
    for name in ("estimate", "se", "low", "high", "effective_sample_size"):
        assert getattr(line, name) == pytest.approx(getattr(expected, name), rel=1e-9)
    own = np.concatenate([np.append(r.balance, r.values.ravel()) for r in world.replies])
    assert not world.grid.holds(own)
