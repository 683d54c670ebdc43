"""What is seen of a run: one line a round, warnings once, callbacks, subgroups, a summary."""

import json
import logging
from dataclasses import FrozenInstanceError
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from hypothesis import given
from hypothesis import strategies as st

from cli.command import fedipw
from fedipw.errors import InputError
from fedipw.flower import FedIPW, RoundReport, StopWhen, describes
from fedipw.flower.stopping import interval_of
from fedipw.tables import Ledger

from .federations import INSIDE, LabFederation, Small, answered, theta

ROUNDS = 4


def inner() -> FedAvg:
    return FedAvg(fraction_evaluate=0.7, min_available_nodes=1)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a run on the testbed with subgroups, a callback that counts and one that fails."""
    where, reports = tmp_path_factory.mktemp("seen"), list[RoundReport]()
    world = LabFederation(seed=5, size=400, rounds=ROUNDS)
    path = world.put(where)
    side = pl.when(pl.col("z2") > 0).then(pl.lit("b\x1bb")).otherwise(pl.lit("a"))
    pl.read_parquet(path).with_columns(side.alias("side")).write_parquet(path)

    def fails(report: RoundReport) -> None:
        raise RuntimeError(f"no disk in round {report.round}")

    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[assignment, method-assign]
    logger = logging.getLogger("flwr.fedipw")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        strategy = FedIPW(
            inner(), population=path, ledger=where / "ledger", covariates=world.columns,
            enrollment="z1 + z2", participation="z2 + x", subgroups=("side",),
            callbacks=[fails, reports.append],
        )  # fmt: skip
        result = strategy.start(world.grid(), world.start, num_rounds=ROUNDS)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return {"where": where, "world": world, "result": result, "reports": reports, "lines": lines}


def test_training_and_evaluation_have_one_line_each_round(seen: dict[str, Any]) -> None:
    said = [r.getMessage() for r in seen["lines"] if r.levelno == logging.INFO]
    for index in range(1, ROUNDS + 1):
        (trained,) = [m for m in said if f"training of round {index}," in m]
        (evaluated,) = [m for m in said if f"evaluation of round {index}," in m]
        told = seen["result"].evaluate_metrics_clientapp[index]
        assert "weights sum to" in trained
        assert f"z2 {told['z2-target']:.4g} (95% {told['z2-target-low']:.4g} to" in evaluated
        assert f"respondents {told['z2-plain']:.4g})" in evaluated
    of_rounds = [m for m in said if m.startswith("FedIPW: ") and " of round " in m]
    assert len(of_rounds) == 2 * ROUNDS


def test_the_run_ends_with_a_summary(seen: dict[str, Any]) -> None:
    said = [r.getMessage() for r in seen["lines"]]
    told = seen["result"].evaluate_metrics_clientapp[ROUNDS]
    place = next(k for k, m in enumerate(said) if "finished in" in m)
    text = "\n".join(said[place:])
    assert f"target population, round {ROUNDS}: z2 {told['z2-target']:.4g}" in text
    assert f"z2[side = a] {told['z2[side = a]-target']:.4g} (95% " in text
    assert "z2[side = b\\x1bb]" in text  # a level of the table cannot paint the terminal
    assert "\x1b" not in text


def test_a_callback_that_fails_is_named_once_and_the_others_go_on(seen: dict[str, Any]) -> None:
    works = [(r.round, r.work) for r in seen["reports"]]
    assert works == [(r, w) for r in range(1, ROUNDS + 1) for w in ("train", "evaluate")]
    said = [r.getMessage() for r in seen["lines"] if "callback" in r.getMessage()]
    assert "fails failed in round 1 with RuntimeError: 'no disk in round 1'" in said[0]
    assert [f"{2 * ROUNDS - 1} more like" in m for m in said] == [False, True]


def test_a_report_is_what_the_result_holds_and_cannot_be_changed(seen: dict[str, Any]) -> None:
    train, evaluate = seen["reports"][-2:]
    told = seen["result"].evaluate_metrics_clientapp[ROUNDS]
    assert evaluate.intervals["z2"] == interval_of(told, "z2")
    assert evaluate.metrics["z2-plain"] == told["z2-plain"]
    assert evaluate.counts["invited"] == told["fedipw-invited"]
    weights = seen["result"].train_metrics_clientapp[ROUNDS]["fedipw-weights"]
    assert train.lists["fedipw-weights"] == tuple(weights)
    model = train.model()
    model["theta"][:] = 7.0
    assert not (train.model()["theta"] == 7.0).any()
    with pytest.raises(FrozenInstanceError):
        train.round = 9
    with pytest.raises(TypeError):
        train.metrics["loss"] = 0.0


def test_subgroups_are_those_the_command_finds_later(seen: dict[str, Any]) -> None:
    where, told = seen["where"], seen["result"].evaluate_metrics_clientapp[ROUNDS]
    evaluation = where / "ledger" / "evaluation"
    code, out, err = fedipw(
        "evaluate", "--population", where / "people.parquet", "--rounds", evaluation,
        "--metrics", evaluation / "metrics" / "z2" / f"round-{ROUNDS:06d}.parquet", "--missing",
        "drop", "--enrollment", "z1 + z2", "--participation", "z2 + x", "--by", "side", "--json",
    )  # fmt: skip
    assert code == 0, err
    lines = {(e["estimator"], e["group"]): e for e in json.loads(out)["estimates"]}
    for group, name in (("everyone", "z2"), ("side = a", "z2[side = a]")):
        found, mine = lines["hajek", group], interval_of(told, name)
        assert mine is not None
        np.testing.assert_allclose(
            mine, [found[key] for key in ("estimate", "se", "low", "high")], rtol=1e-9
        )


def test_all_metrics_of_a_round_are_read_off_one_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation ledger is read as often for five metrics and subgroups as for one."""
    reads: dict[int, int] = {}
    whole = Ledger.read

    def counted(self: Ledger, index: int) -> pl.DataFrame:
        if self.directory.name == "evaluation":
            reads[count] += 1
        return whole(self, index)

    monkeypatch.setattr(Ledger, "read", counted)
    told = {}
    for count in (1, 5):
        reads[count] = 0
        small = Small(_made(tmp_path / str(count)))

        def evaluate(message: Message, context: Any, count: int = count) -> Message:
            k = int(context.node_config["k"])
            metrics = {f"m{j}": 0.1 * k + j for j in range(count)}
            record = MetricRecord({"num-examples": 5, **metrics})
            return Message(RecordDict({"m": record}), reply_to=message)

        small.grid.app = _with_evaluate(evaluate)
        by = ("age",) if count > 1 else ()
        result = small.trained(3, FedAvg(min_available_nodes=1), subgroups=by)
        told[count] = result.evaluate_metrics_clientapp[3]
    assert reads[5] == reads[1] > 0
    for key in ("", "-se", "-low", "-high"):
        assert told[5][f"m0-target{key}"] == told[1][f"m0-target{key}"]
    assert told[5]["m4-target"] == pytest.approx(told[5]["m0-target"] + 4.0)
    assert any(name.startswith("m3[age in") for name in told[5])


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _with_evaluate(evaluate: Any) -> Any:
    """Return the app of a federation with another evaluation."""
    app = ClientApp()

    @describes(app)
    def about(context: Context, server_round: int) -> dict[str, Any]:
        k = int(context.node_config["k"])
        del server_round
        return {"unit_id": f"u{k}", "battery": 0.1 * (k % 7)}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        return answered(message, {"theta": theta(message) + 1.0}, loss=0.5)

    app.evaluate()(evaluate)
    return app


def test_a_column_to_group_by_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="subgroups: the table of clients has no column 'os'"):
        Small(tmp_path).strategy(subgroups=("os",))
    with pytest.raises(InputError, match="callbacks are functions"):
        Small(tmp_path).strategy(callbacks=["mlflow"])


def test_warnings_are_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three clients whose replies are refused for one reason in five rounds: one line, and 14."""

    def bad(message: Message, index: int) -> Message:
        del index
        return answered(message, {"theta": theta(message) * np.nan}, loss=0.5)

    small = Small(tmp_path, behaviours=dict.fromkeys((1, 2, 3), bad))
    with caplog.at_level(logging.WARNING, "flwr.fedipw"):
        small.trained(5)
    said = [r.getMessage() for r in caplog.records if "is refused" in r.getMessage()]
    assert said[0] == "FedIPW: the reply of 'u1' is refused: NaN or infinite values"
    assert said[1:] == [
        "FedIPW: 14 more like: the reply of 'u1' is refused: NaN or infinite values"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr.fedipw"):
        small.trained(6)  # the next start begins to count anew
    assert any("the reply of 'u1' is refused" in r.getMessage() for r in caplog.records)


def told(name: str, mean: float, half: float) -> MetricRecord:
    return MetricRecord({f"{name}-target": mean, f"{name}-target-se": half / 2,
                         f"{name}-target-low": mean - half,
                         f"{name}-target-high": mean + half})  # fmt: skip


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 0.5)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.booleans(),
)
def test_patience_counts_evaluations_without_an_improvement(
    seen: list[tuple[float, float]], patience: int, grows: bool
) -> None:
    """A plain loop over the definition; and a rule never stops before a shorter patience does."""
    metrics = {r: told("score", *pair) for r, pair in enumerate(seen, 1)}
    rule = StopWhen(metric="score", patience=patience, higher_is_better=grows)
    best, last = seen[0][0], 1
    for index, (mean, half) in enumerate(seen, 1):
        if index > 1 and (mean - best if grows else best - mean) > _half(metrics[index]):
            best, last = mean, index
        del half
        assert rule(index, Result(evaluate_metrics_clientapp=metrics)) == (index - last >= patience)


def _half(metrics: MetricRecord) -> float:
    found = interval_of(metrics, "score")
    assert found is not None
    return found.half_width


def test_a_run_stops_when_the_interval_is_narrow(tmp_path: Path) -> None:
    small = Small(tmp_path)
    rule = StopWhen(metric="loss", half_width=10.0, least=2)
    for _ in range(2):  # a run that has stopped is not begun again
        result = small.strategy(FedAvg(min_available_nodes=1)).start(
            small.grid, small.start, num_rounds=6, should_stop=rule
        )
        assert list(result.evaluate_metrics_clientapp) == [1, 2]
    assert Ledger(tmp_path / "ledger").rounds == (1, 2)
    on = small.trained(4, FedAvg(min_available_nodes=1))
    assert list(on.train_metrics_clientapp) == [1, 2, 3, 4]


def test_should_stop_is_called_after_each_round_as_flower_does(tmp_path: Path) -> None:
    small, calls = Small(tmp_path), []

    def stop(index: int, result: Result) -> bool:
        calls.append((index, float(result.arrays["theta"].numpy()[0])))
        return index == 3

    small.strategy(scheme="fedavg").start(small.grid, small.start, num_rounds=9, should_stop=stop)
    assert calls == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_start_has_every_argument_that_flowers_own_has(tmp_path: Path) -> None:
    ours = signature(FedIPW.start).parameters
    assert set(signature(Strategy.start).parameters) <= set(ours)
    assert "should_stop" in ours
    small = Small(tmp_path)
    with pytest.raises(InputError, match="no argument 'patience'"):
        small.strategy().start(small.grid, small.start, patience=3)


@pytest.mark.parametrize(
    ("bad", "words"),
    [({}, "needs half_width= or patience="), ({"half_width": 0.0}, "half_width"),
     ({"patience": 0}, "1 or more"), ({"half_width": 1.0, "least": 0}, "1 or more")],
)  # fmt: skip
def test_rules_that_cannot_be_are_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        StopWhen(metric="loss", **bad)


def test_another_loop_does_not_overwrite_the_checkpoint_of_the_server_that_won(
    tmp_path: Path,
) -> None:
    """Two loops of their own on one ledger: the one that closes the round second is refused."""
    small = Small(tmp_path)
    first, second = small.strategy(), small.strategy()
    replies = []
    for strategy in (first, second):
        sent = list(strategy.configure_train(1, small.start, ConfigRecord(), small.grid))
        replies.append(list(small.grid.send_and_receive(sent)))
    first.aggregate_train(1, replies[0])
    path = tmp_path / "ledger" / "checkpoint" / "round-000001.npz"
    before = path.stat().st_mtime_ns, path.read_bytes()
    with pytest.raises(InputError, match="another server closed round 1 meanwhile"):
        second.aggregate_train(1, replies[1])
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    assert Ledger(tmp_path / "ledger").rounds == (1,)


def test_flower_does_not_log_the_sum_of_replies_as_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        Small(tmp_path).trained(1, FedAvg(fraction_evaluate=0.0))
        Small(tmp_path / "own").trained(1, OwnAverage(fraction_evaluate=0.0))
    said = [r.getMessage() for r in caplog.records if "aggregate_train: Received" in r.getMessage()]
    assert len(said) == 1
    assert f"Received {INSIDE + 2} results" in said[0]  # with the two that make the mean a sum


class OwnAverage(FedAvg):
    """A strategy that is not known to average, and does."""
